// The window key-value row: normed, rotated, then Q8 codes and scales (graphs/ops/window_kv.py).
// Shapes: x [T, E] bf16; weight [E] bf16; cos, sin [T, P] f32; codes [T, E] u8 E4M3; scales [T, E/32] u8 E8M0.
// E is a multiple of 32. Threads: a CTA a row, a thread a pair of elements. Limited by latency.
#include <uf/early.cuh>
#include <uf/q8.cuh>
#include <uf/reduce.cuh>
#include <uf/rope.cuh>

extern "C" __global__ void uf_window_kv(const Args a) {
    Turn turn;
    int t = blockIdx.x, dim = a.x_1, pairs = a.cos_1, d = 2 * threadIdx.x;
    bool real = d < dim;  // for all lanes of a group, or none
    float2 x = real ? load2(a.x, (i64)t * dim + d) : make_float2(0.0f, 0.0f);
    float inverse = inverse_root(block_sum((double)x.x * (double)x.x + (double)x.y * (double)x.y), dim, a.eps);
    if (real) {
        float2 w = load2(a.weight, d);
        x = inverse * x;
        x = rounded(make_float2(w.x * x.x, w.y * x.y));
        int angle = d / 2 - (dim / 2 - pairs);
        if (angle >= 0) x = turned(x, a.cos[t * pairs + angle], a.sin[t * pairs + angle]);
    }
    u32 scale = q8_scale_of(x);
    if (real) *(uchar2*)(a.codes + (i64)t * dim + d) = make_uchar2(q8_code(x.x, scale), q8_code(x.y, scale));
    if (real && d % 32 == 0) a.scales[t * (dim / 32) + d / 32] = (u8)scale;
}
