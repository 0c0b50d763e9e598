// Which global entries a row attends to (graphs/ops/select_topk.py).
// Shapes: scores [T, entries] f32; position [T]; pool [T, blocks] or absent; y [T, k] ascending, then -1.
// Threads: a CTA a row.
#include <uf/topk.cuh>

extern "C" __global__ void __launch_bounds__(TOPK_THREADS) uf_select_topk(const Args a) {
    __shared__ Topk s;
    __shared__ int kept;
    int t = blockIdx.x, reach = (a.position[t] + 1) / a.ratio;
    const float* scores = a.scores + (i64)t * a.scores_1;
    int* y = a.y + t * a.k;
#if UF_HAS_pool
    // Positions of the pool in ascending order: its blocks are; only the newest may reach too far.
    const int* pool = a.pool + t * a.pool_1;
    if (threadIdx.x == 0) kept = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < a.pool_1; i += TOPK_THREADS) if (pool[i] >= 0) atomicAdd(&kept, 1);
    __syncthreads();
    int size = a.block_size;
    int n = kept ? min(kept * size, (kept - 1) * size + reach - pool[kept - 1] * size) : 0;
    auto entry = [&](int i) { return pool[i / size] * size + i % size; };
#else
    int n = reach;
    auto entry = [&](int i) { return i; };
#endif
    for (int i = threadIdx.x; i < a.k; i += TOPK_THREADS) y[i] = i < n && n <= a.k ? entry(i) : -1;
    if (n <= a.k) return;
    __syncthreads();
    select_topk(s, n, a.k, [&](int i) { return scores[entry(i)]; }, [&](int place, int i) { y[place] = entry(i); });
}
