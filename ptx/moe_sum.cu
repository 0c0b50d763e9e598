// Experts in increasing number, then the shared one (graphs/ops/moe_sum.py).
// Shapes: routed [T, k, D], shared [T, D], y [T, D]: bf16, or f32 where ranks still have to add.
// Threads: one an element, grid (D / 256, T). Limited by reading `routed`.
#include <uf/early.cuh>

extern "C" __global__ void __launch_bounds__(256) uf_moe_sum(const Args a) {
    Turn turn;
    int d = blockIdx.x * 256 + threadIdx.x, t = blockIdx.y, k = a.routed_1, dim = a.y_1;
    if (d >= dim) return;
    i64 first = (i64)t * k * dim + d, at = (i64)t * dim + d;
    float shared = load(a.shared, at), sum = load(a.routed, first);
#pragma unroll 4
    for (int i = 1; i < k; i++) sum = sum + load(a.routed, first + (i64)i * dim);
    store(a.y, at, sum + shared);
}
