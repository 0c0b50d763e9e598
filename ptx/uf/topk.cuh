// The k largest of n scores in ascending index order, equal scores to the smaller index; never a sort.
// A cluster takes a row, each warp a stretch of it. Digits of the k-th largest are found from above by histograms;
// then every warp counts what its stretch has of the chosen, and puts them where they belong.
#include <uf/attend_mma.cuh>
#include <uf/reduce.cuh>

constexpr int TOPK_THREADS = 1024, TOPK_CTAS = 8;  // threads at most
constexpr int BINS = 2048, GROUPS = 32, DIGITS = 3;

// Order-preserving bits of a float; -inf is smallest, both zeros are equal.
UF_DEVICE u32 order_bits(float x) {
    u32 b = x == 0.0f ? 0u : to_bits(x);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

struct Topk {
    u32 histogram[2][BINS], group[2][GROUPS];  // of this CTA's part; digits take turns, peers read the last one
    u32 prefix, left, whole;                   // of the threshold; how many equal to it are taken; all of them?
    u32 above[TOPK_THREADS / 32], same[TOPK_THREADS / 32], part_above[TOPK_CTAS], part_same[TOPK_CTAS];
};

// The stretch [from, end) in runs of 128, a lane four neighbours: visit(i, scores i .. i + 3), all lanes together.
template <class Quad, class Visit> UF_DEVICE void scan(int from, int end, Quad quad, Visit visit) {
    int lane = threadIdx.x % 32;
    for (int start = from; start < end; start += 512) {
        float4 x[4];
#pragma unroll
        for (int u = 0; u < 4; u++) {
            int i = start + 128 * u + 4 * lane;
            x[u] = i < end ? quad(i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int u = 0; u < 4; u++) {
            u32 bits[4] = {order_bits(x[u].x), order_bits(x[u].y), order_bits(x[u].z), order_bits(x[u].w)};
            if (start + 128 * u < end) visit(start + 128 * u + 4 * lane, bits);
        }
    }
}

// Exclusive suffix sum over lanes.
UF_DEVICE u32 sum_above(u32 x, int lane) {
    u32 sum = x;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        u32 more = __shfl_down_sync(0xFFFFFFFFu, sum, o);
        if (lane + o < 32) sum += more;
    }
    return sum - x;
}
UF_DEVICE u32 sum_below(u32 x, int lane) {
    u32 sum = x;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        u32 more = __shfl_up_sync(0xFFFFFFFFu, sum, o);
        if (lane >= o) sum += more;
    }
    return sum - x;
}
UF_DEVICE u32 over_cluster(const u32* p) {
    u32 sum = 0;
#pragma unroll
    for (int rank = 0; rank < TOPK_CTAS; rank++) sum += load_in(p, rank);
    return sum;
}

// One warp: the digit of the k-th largest from all CTAs' histograms, first its group of 64, then itself.
UF_DEVICE void find_digit(Topk& s, int turn, int shift, int lane) {
    u32 left = s.left, count = over_cluster(&s.group[turn][lane]), above = sum_above(count, lane);
    int group = __ffs(__ballot_sync(0xFFFFFFFFu, above < left && left <= above + count)) - 1;
    left -= __shfl_sync(0xFFFFFFFFu, above, group);
    int bin = group * (BINS / GROUPS) + 2 * lane;
    u32 low = over_cluster(&s.histogram[turn][bin]), high = over_cluster(&s.histogram[turn][bin + 1]);
    above = sum_above(low + high, lane);
    if (above >= left || left > above + high + low) return;
    bool upper = left <= above + high;
    left -= upper ? above : above + high;
    s.prefix |= (u32)(bin + upper) << shift;
    s.left = left;
    s.whole = left == (upper ? high : low);
}

// Calls emit(place, index) for each chosen index, place ascending. quad(i): scores i .. i + 3, i a multiple of 4;
// those from n on may be anything. k < n. All threads of the cluster.
template <class Quad, class Emit> UF_DEVICE void select_topk(Topk& s, int n, int k, Quad quad, Emit emit) {
    int thread = threadIdx.x, threads = blockDim.x, warp = thread / 32, warps = threads / 32, lane = thread % 32;
    int rank = (int)cluster_rank(), stretches = TOPK_CTAS * warps;
    int length = ((n + stretches - 1) / stretches + 127) / 128 * 128;
    int from = min(n, (rank * warps + warp) * length), end = min(n, from + length);
    if (thread == 0) s.prefix = 0, s.left = k, s.whole = 0;
    for (int i = thread; i < BINS; i += threads) s.histogram[0][i] = 0;
    __syncthreads();
    u32 mask = 0;
    for (int digit = 0; digit < DIGITS && !s.whole; digit++) {
        int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, turn = digit % 2;
        u32 prefix = s.prefix, bins = digit == 2 ? BINS / 2 : BINS;
        scan(from, end, quad, [&](int i, const u32(&bits)[4]) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (i + j < end && (bits[j] & mask) == prefix) atomicAdd(&s.histogram[turn][bits[j] >> shift & (bins - 1)], 1u);
        });
        __syncthreads();
        for (int g = warp; g < GROUPS; g += warps) {
            u32* bin = &s.histogram[turn][g * (BINS / GROUPS) + lane];
            u32 sum = __reduce_add_sync(0xFFFFFFFFu, bin[0] + bin[32]);
            if (lane == 0) s.group[turn][g] = sum;
        }
        cluster_barrier();
        for (int i = thread; i < BINS; i += threads) s.histogram[1 - turn][i] = 0;
        if (warp == 0) find_digit(s, turn, shift, lane);
        __syncthreads();
        mask |= (bins - 1) << shift;
    }
    u32 threshold = s.prefix, equals = s.left, above = 0, same = 0;
    scan(from, end, quad, [&](int i, const u32(&bits)[4]) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            above += i + j < end && (bits[j] & mask) > threshold;
            same += i + j < end && (bits[j] & mask) == threshold;
        }
    });
    above = __reduce_add_sync(0xFFFFFFFFu, above), same = __reduce_add_sync(0xFFFFFFFFu, same);
    u32 any = above + same;
    if (lane == 0) s.above[warp] = above, s.same[warp] = same;
    __syncthreads();
    if (warp == 0) {  // what stands before each warp, and what this CTA has
        u32 x = lane < warps ? s.above[lane] : 0u, y = lane < warps ? s.same[lane] : 0u;
        u32 x_before = sum_below(x, lane), y_before = sum_below(y, lane);
        u32 x_all = __reduce_add_sync(0xFFFFFFFFu, x), y_all = __reduce_add_sync(0xFFFFFFFFu, y);
        if (lane < warps) s.above[lane] = x_before, s.same[lane] = y_before;
        if (lane < TOPK_CTAS) store_in(&s.part_above[rank], lane, x_all), store_in(&s.part_same[rank], lane, y_all);
    }
    cluster_barrier();
    above = s.above[warp], same = s.same[warp];
    for (int r = 0; r < rank; r++) above += s.part_above[r], same += s.part_same[r];
    if (any == 0 || (above + min(same, equals) >= (u32)k)) return;
    scan(from, end, quad, [&](int i, const u32(&bits)[4]) {
        u32 mine = 0, equal = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            mine += i + j < end && (bits[j] & mask) > threshold;
            equal += i + j < end && (bits[j] & mask) == threshold;
        }
        if (!__any_sync(0xFFFFFFFFu, mine + equal)) return;
        u32 a = above + sum_below(mine, lane), e = same + sum_below(equal, lane);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            bool high = i + j < end && (bits[j] & mask) > threshold, level = i + j < end && (bits[j] & mask) == threshold;
            if (high || (level && e < equals)) emit((int)(a + min(e, equals)), i + j);
            a += high, e += level;
        }
        above += __reduce_add_sync(0xFFFFFFFFu, mine), same += __reduce_add_sync(0xFFFFFFFFu, equal);
    });
}
