// Token embeddings, copied into the residual streams (graphs/ops/embed.py).
// Shapes: ids [T]; table [V, D] bf16; x [T, C, D] bf16; pre [T, C] f32.
// Threads: a CTA a row. Limited by writing x.
#include <uf/types.cuh>

extern "C" __global__ void uf_embed(const Args a) {
    int t = blockIdx.x;
    const bf16* row = a.table + (i64)a.ids[t] * a.table_1;
    for (int d = threadIdx.x; d < a.x_2; d += blockDim.x)
        for (int c = 0; c < a.copies; c++) a.x[((i64)t * a.copies + c) * a.x_2 + d] = row[d];
    if (threadIdx.x < a.copies) a.pre[t * a.copies + threadIdx.x] = threadIdx.x == 0;
}
