// The shared expert's activation, rounded to bf16, then Q8 (graphs/ops/swiglu.py).
// Shapes: gate, up, y [T, F] bf16, F a multiple of 32. Threads: two neighbouring elements a thread.
#include <uf/early.cuh>
#include <uf/q8.cuh>
#include <uf/swiglu.cuh>

extern "C" __global__ void uf_swiglu(const Args a) {
    Turn turn;
    i64 i = 2 * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
    bool real = i < UF_SIZE(y);  // for all lanes of a group, or none
    float2 y = make_float2(0.0f, 0.0f);
    if (real) {
        float2 gate = load2(a.gate, i), up = load2(a.up, i);
        y = rounded(make_float2(swiglu(gate.x, up.x, a.limit), swiglu(gate.y, up.y, a.limit)));
    }
    y = fake_q8(y);
    if (real) store2(a.y, i, y);
}
