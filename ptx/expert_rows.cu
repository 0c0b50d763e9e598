// Which rows each expert serves (graphs/ops/expert_rows.py).
// Shapes: ids [T, k]; order [T k]: places of ids, by expert; chunks [C, 3]: expert, first place in order, count.
// Threads: a CTA an expert, which counts all experts, then puts its own places behind those of the experts before it.
// Shared memory: a counter an expert, dynamic.
// Nothing is passed between CTAs: each reads all of ids, from the L2 cache.
#include <uf/early.cuh>
#include <uf/reduce.cuh>

extern __shared__ int counts[];

// Sum over a CTA; every thread gets it.
UF_DEVICE int total(int x) { return (int)block_sum((double)x); }

extern "C" __global__ void __launch_bounds__(512) uf_expert_rows(const Args a) {
    Turn turn;
    __shared__ int found[16];  // places of this expert by warp
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
    // A warp has a run of ids: it counts its own places, then knows where they go.
    int words = (pairs + 31) / 32, each = (words + 15) / 16, first = warp * each, last = min(first + each, words), at = 0;
    auto mine = [&](int word) { return word * 32 + lane < pairs && a.ids[word * 32 + lane] == expert; };
#pragma unroll 4
    for (int word = first; word < last; word++) at += __popc(__ballot_sync(0xFFFFFFFFu, mine(word)));
    if (lane == 0) found[warp] = at;
    __syncthreads();
    at = before;
    for (int w = 0; w < warp; w++) at += found[w];
#pragma unroll 4
    for (int word = first; word < last; word++) {
        bool here = mine(word);
        u32 votes = __ballot_sync(0xFFFFFFFFu, here);
        if (here) a.order[at + __popc(votes & ((1u << lane) - 1u))] = word * 32 + lane;
        at += __popc(votes);
    }
}
