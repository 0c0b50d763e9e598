// Rotate the last dimensions of every head (graphs/ops/rope.py).
// Shapes: x [T, H*E] bf16; cos, sin [T, P] f32; y [T, H, E] bf16.
// Threads: a CTA a row.
#include <uf/rope.cuh>

extern "C" __global__ void uf_rope(const Args a) {
    int t = blockIdx.x, dim = a.y_2, pairs = a.cos_1;
    for (int i = threadIdx.x; i < a.x_1; i += blockDim.x) {
        const bf16* head = a.x + (i64)t * a.x_1 + i / dim * dim;
        store(a.y, (i64)t * a.x_1 + i, rotated(head, i % dim, dim, a.cos + t * pairs, a.sin + t * pairs, pairs, 1.0f));
    }
}
