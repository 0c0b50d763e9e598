// Which global entries a row attends to (graphs/ops/select_topk.py).
// Shapes: scores [T, entries] f32, with a pool in its order; position [T]; pool [T, blocks] or absent;
// y [T, k] ascending, then -1.
// Threads: grid T * SELECT_CTAS, a cluster a row.
#include <uf/cluster_topk.cuh>
#include <uf/early.cuh>

extern "C" __global__ void __cluster_dims__(SELECT_CTAS, 1, 1)
    __launch_bounds__(SELECT_THREADS) uf_select_topk(const Args a) {
    Turn turn;
    __shared__ ClusterTopk s;
    int t = blockIdx.x / SELECT_CTAS, reach = (a.position[t] + 1) / a.ratio;
    const float* scores = a.scores + (i64)t * a.scores_1;
    int* y = a.y + (i64)t * a.k;
#if UF_HAS_pool
    // Blocks of the pool ascend; only the newest may reach too far.
    const int* pool = a.pool + (i64)t * a.pool_1;
    int kept = 0, size = a.block_size, threads = blockDim.x;
    for (int i = 0; i < a.pool_1; i += threads)
        kept += __syncthreads_count(i + (int)threadIdx.x < a.pool_1 && pool[i + threadIdx.x] >= 0);
    int n = kept ? min(kept * size, (kept - 1) * size + reach - pool[kept - 1] * size) : 0;
    auto entry = [&](int i) { return pool[i / size] * size + i % size; };
#else
    int n = reach;
    auto entry = [&](int i) { return i; };
#endif
    if (n <= a.k) {
        for (int i = (int)cluster_rank() * blockDim.x + threadIdx.x; i < a.k; i += SELECT_CTAS * blockDim.x)
            y[i] = i < n ? entry(i) : -1;
        return;
    }
    bool aligned = a.scores_1 % 4 == 0;
    auto quad = [&](int i) {
        if (aligned) return *(const float4*)(scores + i);
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = scores[min(i + j, n - 1)];
        return make_float4(x[0], x[1], x[2], x[3]);
    };
    cluster_topk(s, n, a.k, quad, [&](int place, int i) { y[place] = entry(i); });
}
