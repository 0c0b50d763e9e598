// Experts in increasing number, then the shared one (graphs/ops/moe_sum.py).
// Shapes: routed [T, k, D], shared [T, D], y [T, D]: bf16, or f32 where ranks still have to add.
// Threads: a CTA a row.
#include <uf/types.cuh>

extern "C" __global__ void uf_moe_sum(const Args a) {
    int t = blockIdx.x, k = a.routed_1, dim = a.y_1;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float sum = load(a.routed, (i64)t * k * dim + d);
        for (int i = 1; i < k; i++) sum = sum + load(a.routed, ((i64)t * k + i) * dim + d);
        store(a.y, (i64)t * dim + d, sum + load(a.shared, (i64)t * dim + d));
    }
}
