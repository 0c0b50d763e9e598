// The window key-value row: rotated, then Q8 codes and scales (graphs/ops/window_kv.py).
// Shapes: x [T, E] bf16; cos, sin [T, P] f32; codes [T, E] u8 E4M3; scales [T, E/32] u8 E8M0.
// Threads: a CTA a row, a warp a group of 32.
#include <uf/early.cuh>
#include <uf/reduce.cuh>
#include <uf/rope.cuh>

extern "C" __global__ void uf_window_kv(const Args a) {
    take_turn();
    int t = blockIdx.x, dim = a.x_1, pairs = a.cos_1;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float x = rotated(a.x + (i64)t * dim, d, dim, a.cos + t * pairs, a.sin + t * pairs, pairs, 1.0f);
        u32 scale = q8_scale(warp_max(fabsf(x)));
        a.codes[(i64)t * dim + d] = e4m3_code(x * from_bits((254u - scale) << 23));
        if (d % 32 == 0) a.scales[t * (dim / 32) + d / 32] = (u8)scale;
    }
}
