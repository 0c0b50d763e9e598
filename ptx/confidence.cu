// Column `index` of y = [h ; me] . w, before the sigmoid (graphs/ops/confidence.py).
// Shapes: h [S*B, D] bf16; me [S, r] bf16; w [1, D+r] bf16; y [S, B] f32. Threads: a CTA a sequence, double sums.
#include <uf/early.cuh>
#include <uf/reduce.cuh>

extern "C" __global__ void uf_confidence(const Args a) {
    Turn turn;
    int s = blockIdx.x, dim = a.h_1, rank = a.me_1;
    const bf16* h = a.h + ((i64)s * a.y_1 + a.index) * dim;
    double sum = 0.0;
    for (int d = threadIdx.x; d < dim + rank; d += blockDim.x)
        sum = fma((double)load(a.w, d), (double)(d < dim ? load(h, d) : load(a.me, (i64)s * rank + d - dim)), sum);
    sum = block_sum(sum);
    if (threadIdx.x == 0) a.y[s * a.y_1 + a.index] = (float)sum;
}
