// Experts in increasing number, then the shared one (graphs/ops/moe_sum.py).
// Shapes: routed [T, k, D], shared [T, D], y [T, D]: bf16, or f32 where ranks still have to add.
// Threads: one for four neighbours, grid (D / 1024, T). Limited by reading `routed`.
#include <uf/early.cuh>
#include <uf/vector.cuh>

extern "C" __global__ void __launch_bounds__(256) uf_moe_sum(const Args a) {
    Turn turn;
    int d = 4 * (blockIdx.x * 256 + threadIdx.x), t = blockIdx.y, k = a.routed_1, dim = a.y_1;
    if (d >= dim) return;
    i64 first = (i64)t * k * dim + d, at = (i64)t * dim + d;
    float4 shared = load4(a.shared, at), sum = load4(a.routed, first);
#pragma unroll 5
    for (int i = 1; i < k; i++) sum = sum + load4(a.routed, first + (i64)i * dim);
    store4(a.y, at, sum + shared);
}
