// Token embeddings, copied into the residual streams (graphs/ops/embed.py).
// Shapes: ids [T]; table [V, D] bf16; x [T, C, D] bf16; pre [T, C] f32. D is even.
// Threads: grid (T, D / 512), two neighbouring elements a thread. Limited by writing x.
#include <uf/early.cuh>

extern "C" __global__ void uf_embed(const Args a) {
    Turn turn;
    int t = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x, pairs = a.x_2 / 2;
    if (blockIdx.y == 0 && threadIdx.x < a.copies) a.pre[t * a.copies + threadIdx.x] = threadIdx.x == 0;
    if (i >= pairs) return;
    u32 pair = ((const u32*)(a.table + (i64)a.ids[t] * a.table_1))[i];
    for (int c = 0; c < a.copies; c++) ((u32*)a.x)[((i64)t * a.copies + c) * pairs + i] = pair;
}
