// x'_j = bf16(post_j * out + sum_i comb_ij x_i), copies in order (graphs/ops/hc_expand.py).
// Shapes: out [T, D] bf16; x, y [T, C, D] bf16; post [T, C] f32; comb [T, C, C] f32.
// Threads: a CTA a row.
#include <uf/types.cuh>

extern "C" __global__ void uf_hc_expand(const Args a) {
    int t = blockIdx.x, copies = a.x_1, dim = a.x_2;
    const bf16* x = a.x + (i64)t * copies * dim;
    const float* comb = a.comb + t * copies * copies;
    for (int d = threadIdx.x; d < dim; d += blockDim.x)
        for (int j = 0; j < copies; j++) {
            float sum = comb[j] * load(x, d);
            for (int i = 1; i < copies; i++) sum = sum + comb[i * copies + j] * load(x, (i64)i * dim + d);
            sum = a.post[t * copies + j] * load(a.out, (i64)t * dim + d) + sum;
            store(a.y, ((i64)t * copies + j) * dim + d, sum);
        }
}
