// Embedding of the token before draft `index` (graphs/ops/markov_embed.py).
// Shapes: anchor [S]; drafts [S, B]; table [V, r] bf16; y [S, r] bf16. Threads: a CTA a sequence.
#include <uf/early.cuh>

extern "C" __global__ void uf_markov_embed(const Args a) {
    Turn turn;
    int s = blockIdx.x, token = a.index ? a.drafts[s * a.drafts_1 + a.index - 1] : a.anchor[s];
    for (int d = threadIdx.x; d < a.y_1; d += blockDim.x) a.y[s * a.y_1 + d] = a.table[(i64)token * a.y_1 + d];
}
