// Blocks of entries that later index layers may choose from (graphs/ops/candidate_pool.py).
// Shapes: scores [T, entries] f32; position [T]; y [T, blocks] ascending, then -1.
// Threads: a CTA a row. The newest block counts as +inf.
#include <uf/topk.cuh>

extern "C" __global__ void __launch_bounds__(TOPK_THREADS) uf_candidate_pool(const Args a) {
    __shared__ Topk s;
    int t = blockIdx.x, reach = (a.position[t] + 1) / a.ratio, size = a.block_size;
    int n = (reach + size - 1) / size;
    const float* scores = a.scores + (i64)t * a.scores_1;
    int* y = a.y + t * a.blocks;
    for (int i = threadIdx.x; i < a.blocks; i += TOPK_THREADS) y[i] = i < n && n <= a.blocks ? i : -1;
    if (n <= a.blocks) return;
    __syncthreads();
    auto best = [&](int block) {
        if (block == n - 1) return from_bits(0x7F800000u);
        float peak = scores[block * size];
        for (int i = 1; i < size; i++) peak = fmaxf(peak, scores[block * size + i]);
        return peak;
    };
    select_topk(s, n, a.blocks, best, [&](int place, int block) { y[place] = block; });
}
