// y = bf16(sum over copies of pre * x), copies in order (graphs/ops/hc_collapse.py).
// Shapes: x [T, C, D] bf16; pre [T, C] f32; y [T, D] bf16.
// Threads: a CTA a row.
#include <uf/types.cuh>

extern "C" __global__ void uf_hc_collapse(const Args a) {
    int t = blockIdx.x, copies = a.x_1, dim = a.x_2;
    const bf16* x = a.x + (i64)t * copies * dim;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float sum = a.pre[t * copies] * load(x, d);
        for (int c = 1; c < copies; c++) sum = sum + a.pre[t * copies + c] * load(x, (i64)c * dim + d);
        store(a.y, (i64)t * dim + d, sum);
    }
}
