// The k largest of n scores in ascending index order, equal scores to the smaller index; never a sort.
// Radix selection over the bits of a float key, then a compaction in index order. One CTA of TOPK_THREADS threads.
#include <uf/reduce.cuh>

constexpr int TOPK_THREADS = 256;

// Order-preserving bits of a float; -inf is smallest, both zeros are equal.
UF_DEVICE u32 order_bits(float x) {
    u32 b = x == 0.0f ? 0u : to_bits(x);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// How many threads before this one have the flag; `count` then holds each warp's number.
UF_DEVICE u32 rank_among(u32* count, bool flag, int warp, int lane) {
    u32 votes = __ballot_sync(0xFFFFFFFFu, flag);
    if (lane == 0) count[warp] = __popc(votes);
    __syncthreads();
    u32 rank = __popc(votes & ((1u << lane) - 1u));
    for (int w = 0; w < warp; w++) rank += count[w];
    return rank;
}
UF_DEVICE u32 total_of(const u32* count) {
    u32 total = 0;
    for (int w = 0; w < TOPK_THREADS / 32; w++) total += count[w];
    return total;
}

struct Topk {
    u32 histogram[256];
    u32 prefix, left, count[TOPK_THREADS / 32], base, equal_base;
};

// Calls emit(place, index) for each chosen index, place ascending. key(i) for i < n; k < n.
template <class Key, class Emit> UF_DEVICE void select_topk(Topk& s, int n, int k, Key key, Emit emit) {
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (thread == 0) s.prefix = 0, s.left = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        s.histogram[thread] = 0;
        __syncthreads();
        u32 mask = shift == 24 ? 0u : 0xFFFFFFFFu << (shift + 8);
        for (int i = thread; i < n; i += TOPK_THREADS) {
            u32 bits = order_bits(key(i));
            if ((bits & mask) == (s.prefix & mask)) atomicAdd(&s.histogram[bits >> shift & 255u], 1u);
        }
        __syncthreads();
        if (thread == 0) {  // the digit of the k-th largest, from above
            u32 left = s.left;
            int digit = 255;
            while (s.histogram[digit] < left) left -= s.histogram[digit--];
            s.prefix |= (u32)digit << shift;
            s.left = left;  // how many equal to the threshold are taken
        }
        __syncthreads();
    }
    u32 threshold = s.prefix, equals = s.left;
    if (thread == 0) s.base = 0, s.equal_base = 0;
    __syncthreads();
    for (int start = 0; start < n; start += TOPK_THREADS) {
        int i = start + thread;
        u32 bits = i < n ? order_bits(key(i)) : 0u;
        bool above = i < n && bits > threshold, same = i < n && bits == threshold;
        u32 before = s.base, equal_before = s.equal_base;
        u32 equal_rank = equal_before + rank_among(s.count, same, warp, lane);
        u32 total_equal = equal_before + total_of(s.count);
        __syncthreads();
        bool take = above || (same && equal_rank < equals);
        u32 rank = before + rank_among(s.count, take, warp, lane);
        u32 total = before + total_of(s.count);
        if (take) emit((int)rank, i);
        __syncthreads();
        if (thread == 0) s.base = total, s.equal_base = total_equal;
        __syncthreads();
    }
}
