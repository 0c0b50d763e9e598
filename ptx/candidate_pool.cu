// Blocks of entries that later index layers may choose from (graphs/ops/candidate_pool.py).
// Shapes: scores [T, entries] f32; position [T]; y [T, blocks] ascending, then -1.
// Threads: grid T * SELECT_CTAS, a cluster a row. The newest block counts as +inf.
// Shared memory: the best score of each block of the CTA's part.
#include <uf/cluster_topk.cuh>
#include <uf/early.cuh>

extern __shared__ __align__(16) float best[];

// Each warp its own stretch of blocks; `first` is the CTA's first block.
UF_DEVICE void find_best(const float* scores, Stretch part, int first, int n, int size, bool aligned) {
    int lane = threadIdx.x % 32;
    float newest = from_bits(0x7F800000u);
    if (size == 8 && aligned) {  // a warp reads 16 blocks at once
        for (int start = part.from; start < part.end; start += 16) {
            int block = start + lane / 2;
            float4 x = block < min(part.end, n - 1) ? *(const float4*)(scores + 8 * start + 4 * lane)
                                                    : make_float4(newest, newest, newest, newest);
            float peak = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
            peak = fmaxf(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, 1));
            if (lane % 2 == 0 && block < part.end) best[block - first] = peak;
        }
    } else
        for (int block = part.from + lane; block < part.end; block += 32) {
            float peak = block < n - 1 ? from_bits(0xFF800000u) : newest;
            for (int i = 0; i < size && block < n - 1; i++) peak = fmaxf(peak, scores[block * size + i]);
            best[block - first] = peak;
        }
    __syncwarp();
}

extern "C" __global__ void __cluster_dims__(SELECT_CTAS, 1, 1)
    __launch_bounds__(SELECT_THREADS) uf_candidate_pool(const Args a) {
    Turn turn;
    __shared__ ClusterTopk s;
    int t = blockIdx.x / SELECT_CTAS, reach = (a.position[t] + 1) / a.ratio, size = a.block_size;
    int n = (reach + size - 1) / size;
    int* y = a.y + (i64)t * a.blocks;
    if (n <= a.blocks) {
        for (int i = (int)cluster_rank() * blockDim.x + threadIdx.x; i < a.blocks; i += SELECT_CTAS * blockDim.x)
            y[i] = i < n ? i : -1;
        return;
    }
    Stretch part = stretch_of(n);
    int first = (int)cluster_rank() * ((int)blockDim.x / 32) * length_of(n);
    find_best(a.scores + (i64)t * a.scores_1, part, first, n, size, a.scores_1 % 4 == 0);
    auto quad = [&](int i) { return *(const float4*)(best + i - first); };
    cluster_topk(s, n, a.blocks, quad, [&](int place, int block) { y[place] = block; });
}
