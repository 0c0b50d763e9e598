// Mean of the residual copies behind the means of earlier target layers (graphs/ops/stream_mean.py).
// Shapes: x [T, C, D] bf16; before [T, n*D] bf16 or absent; y [T, (n+1)*D] bf16.
// Threads: a CTA a row.
#include <uf/types.cuh>

extern "C" __global__ void uf_stream_mean(const Args a) {
    int t = blockIdx.x, copies = a.x_1, dim = a.x_2, width = a.y_1 - dim;
    const bf16* x = a.x + (i64)t * copies * dim;
    bf16* y = a.y + (i64)t * a.y_1;
#if UF_HAS_before
    for (int i = threadIdx.x; i < width; i += blockDim.x) y[i] = a.before[(i64)t * width + i];
#endif
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float sum = load(x, d);
        for (int c = 1; c < copies; c++) sum = sum + load(x, (i64)c * dim + d);
        store(y, width + d, __fdiv_rn(sum, (float)copies));
    }
}
