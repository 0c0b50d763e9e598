// Q8 in groups of 32 along the last axis, as the exact bf16 values code * scale (graphs/ops/quant8.py).
// Shapes: x, y [.., K] bf16, K a multiple of 32.
// Threads: a warp a group, a lane an element.
#include <uf/early.cuh>
#include <uf/reduce.cuh>

extern "C" __global__ void uf_quant8(const Args a) {
    take_turn();
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= UF_SIZE(y)) return;  // whole warps: the size is a multiple of 32
    float x = load(a.x, i);
    u32 scale = q8_scale(warp_max(fabsf(x)));
    float q = e4m3_value(e4m3_code(x * from_bits((254u - scale) << 23)));
    store(a.y, i, q * from_bits(scale << 23));
}
