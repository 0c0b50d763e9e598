// Experts in increasing number, then the shared one (graphs/ops/moe_sum.py).
// Shapes: routed [T, k, D], shared [T, D], y [T, D]: bf16, or f32 where ranks still have to add. D is even.
// Threads: grid (T, D / 512), two neighbouring elements a thread.
#include <uf/vector.cuh>

extern "C" __global__ void uf_moe_sum(const Args a) {
    int t = blockIdx.x, k = a.routed_1, dim = a.y_1, d = 2 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (d >= dim) return;
    i64 row = (i64)t * k * dim + d, at = (i64)t * dim + d;
    float2 sum = load2(a.routed, row), shared = load2(a.shared, at);
#pragma unroll 8
    for (int i = 1; i < k; i++) sum = sum + load2(a.routed, row + (i64)i * dim);
    store2(a.y, at, sum + shared);
}
