// Index queries: rotated, then QMX4 as exact bf16 values (graphs/ops/index_query.py).
// Shapes: x [T, Hi*I] bf16; cos, sin [T, P] f32; y [T, Hi, I] bf16.
// Threads: a CTA a row, a warp a group of 32.
#include <uf/early.cuh>
#include <uf/reduce.cuh>
#include <uf/rope.cuh>

extern "C" __global__ void uf_index_query(const Args a) {
    Turn turn;
    int t = blockIdx.x, dim = a.y_2, pairs = a.cos_1;
    for (int i = threadIdx.x; i < a.x_1; i += blockDim.x) {
        const bf16* head = a.x + (i64)t * a.x_1 + i / dim * dim;
        float x = rotated(head, i % dim, dim, a.cos + t * pairs, a.sin + t * pairs, pairs, 1.0f);
        float scale = e8m0_value((u8)qmx4_scale(warp_max(fabsf(x))));
        store(a.y, (i64)t * a.x_1 + i, e2m1_value(e2m1_code(__fdiv_rn(x, scale))) * scale);
    }
}
