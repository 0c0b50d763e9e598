// Blocks of entries that later index layers may choose from (graphs/ops/candidate_pool.py).
// Shapes: scores [T, entries] f32; position [T]; y [T, blocks] ascending, then -1.
// Threads: grid T * TOPK_CTAS, a cluster a row. The newest block counts as +inf.
#include <uf/topk.cuh>

extern "C" __global__ void __cluster_dims__(TOPK_CTAS, 1, 1) __launch_bounds__(TOPK_THREADS) uf_candidate_pool(const Args a) {
    __shared__ Topk s;
    int t = blockIdx.x / TOPK_CTAS, reach = (a.position[t] + 1) / a.ratio, size = a.block_size;
    int n = (reach + size - 1) / size;
    const float* scores = a.scores + (i64)t * a.scores_1;
    int* y = a.y + (i64)t * a.blocks;
    if (n <= a.blocks) {
        for (int i = (int)cluster_rank() * blockDim.x + threadIdx.x; i < a.blocks; i += TOPK_CTAS * blockDim.x)
            y[i] = i < n ? i : -1;
        return;
    }
    bool aligned = a.scores_1 % 4 == 0 && size % 4 == 0;
    auto best = [&](int block) {
        float peak = from_bits(block < n - 1 ? 0xFF800000u : 0x7F800000u);
        if (block >= n - 1) return peak;
        const float* score = scores + block * size;
        if (aligned)
            for (int i = 0; i < size; i += 4) {
                float4 x = *(const float4*)(score + i);
                peak = fmaxf(peak, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
            }
        else
            for (int i = 0; i < size; i++) peak = fmaxf(peak, score[i]);
        return peak;
    };
    auto quad = [&](int i) { return make_float4(best(i), best(i + 1), best(i + 2), best(i + 3)); };
    select_topk(s, n, a.blocks, quad, [&](int place, int block) { y[place] = block; });
}
