// Q8 in groups of 32 along the last axis, as the exact bf16 values code * scale (graphs/ops/quant8.py).
// Shapes: x, y [.., K] bf16, K a multiple of 32.
// Threads: two neighbouring elements a thread. Limited by latency.
#include <uf/early.cuh>
#include <uf/q8.cuh>

extern "C" __global__ void uf_quant8(const Args a) {
    Turn turn;
    i64 i = 2 * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
    bool real = i < UF_SIZE(y);  // for all lanes of a group, or none
    float2 y = fake_q8(real ? load2(a.x, i) : make_float2(0.0f, 0.0f));
    if (real) store2(a.y, i, y);
}
