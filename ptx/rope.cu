// Rotate the last dimensions of every head (graphs/ops/rope.py).
// Shapes: x [T, H*E] bf16; cos, sin [T, P] f32; y [T, H, E] bf16.
// Threads: grid (T, H): a CTA a head.
#include <uf/early.cuh>
#include <uf/rope.cuh>

extern "C" __global__ void uf_rope(const Args a) {
    take_turn();
    int t = blockIdx.x, dim = a.y_2, pairs = a.cos_1;
    i64 at = ((i64)t * a.heads + blockIdx.y) * dim;
    for (int d = threadIdx.x; d < dim; d += blockDim.x)
        store(a.y, at + d, rotated(a.x + at, d, dim, a.cos + t * pairs, a.sin + t * pairs, pairs, 1.0f));
}
