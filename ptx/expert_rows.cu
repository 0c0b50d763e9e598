// Which rows each expert serves (graphs/ops/expert_rows.py).
// Shapes: ids [T, k]; order [T k]: places of ids, by expert; chunks [C, 3]: expert, first place in order, count.
// Threads: a CTA an expert, which counts all experts, then puts its own places behind those of the experts before it.
// Shared memory: a counter an expert, dynamic.
// Nothing is passed between CTAs: each reads all of ids, from the L2 cache.
#include <uf/reduce.cuh>

extern __shared__ int counts[];

// Sum over a CTA; every thread gets it.
UF_DEVICE int total(int x) { return (int)block_sum((double)x); }

extern "C" __global__ void __launch_bounds__(512) uf_expert_rows(const Args a) {
    __shared__ int found[16];
    int expert = blockIdx.x, pairs = a.order_0, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    for (int e = thread; e < a.experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (int q = thread; q < pairs; q += blockDim.x) atomicAdd(&counts[a.ids[q]], 1);
    __syncthreads();
    int before = 0, chunk = 0, all = 0;
    for (int e = thread; e < a.experts; e += blockDim.x) {
        int chunks = (counts[e] + a.rows - 1) / a.rows;
        before += e < expert ? counts[e] : 0, chunk += e < expert ? chunks : 0, all += chunks;
    }
    before = total(before), chunk = total(chunk), all = total(all);
    int own = counts[expert];
    for (int c = thread; c * a.rows < own; c += blockDim.x) {
        int* out = a.chunks + (chunk + c) * 3;
        out[0] = expert, out[1] = before + c * a.rows, out[2] = min(own - c * a.rows, a.rows);
    }
    if (expert == a.experts - 1)
        for (int i = all * 3 + thread; i < a.chunks_0 * 3; i += blockDim.x) a.chunks[i] = 0;
    for (int start = 0; own && start < pairs; start += blockDim.x) {
        int q = start + thread;
        bool mine = q < pairs && a.ids[q] == expert;
        u32 votes = __ballot_sync(0xFFFFFFFFu, mine);
        if (lane == 0) found[warp] = __popc(votes);
        __syncthreads();
        int at = before + __popc(votes & ((1u << lane) - 1u));
        for (int w = 0; w < (int)blockDim.x / 32; w++) {
            at += w < warp ? found[w] : 0;
            before += found[w];
        }
        if (mine) a.order[at] = q;
        __syncthreads();
    }
}
