// The k largest of n scores in ascending index order, equal scores to the smaller index; never a sort.
// A cluster takes a row, each warp a stretch of it. Digits of the k-th largest are found from above by histograms,
// which also tell how many of the chosen stand before each CTA; warps count, then put theirs where they belong.
#include <uf/attend_mma.cuh>
#include <uf/topk.cuh>

constexpr int SELECT_THREADS = 1024, SELECT_CTAS = 8;  // threads at most
constexpr int BINS = 2048, BIN_GROUPS = 32, DIGITS = 3;

struct ClusterTopk {
    u32 histogram[2][BINS], group[2][BIN_GROUPS];  // of this CTA's part; digits take turns, peers read the last one
    u32 prefix, left, whole;                       // of the threshold; how many equal to it are taken; all of them?
    u32 above_before, same_before;                 // in CTAs of lower rank
    u32 above[SELECT_THREADS / 32], same[SELECT_THREADS / 32];
};

struct Stretch { int from, end; };
// What each warp has of n scores: a multiple of 128, the last ones less.
UF_DEVICE int length_of(int n) {
    int warps = SELECT_CTAS * (int)blockDim.x / 32;
    return ((n + warps - 1) / warps + 127) / 128 * 128;
}
UF_DEVICE Stretch stretch_of(int n) {
    int from = ((int)cluster_rank() * ((int)blockDim.x / 32) + (int)threadIdx.x / 32) * length_of(n);
    return {min(n, from), min(n, from + length_of(n))};
}

// A stretch in runs of 128, a lane four neighbours: visit(i, bits of scores i .. i + 3), all lanes together.
template <class Quad, class Visit> UF_DEVICE void scan(Stretch part, Quad quad, Visit visit) {
    int lane = threadIdx.x % 32;
    for (int start = part.from; start < part.end; start += 512) {
        float4 x[4];
#pragma unroll
        for (int u = 0; u < 4; u++) {
            int i = start + 128 * u + 4 * lane;
            x[u] = i < part.end ? quad(i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int u = 0; u < 4; u++) {
            u32 bits[4] = {order_bits(x[u].x), order_bits(x[u].y), order_bits(x[u].z), order_bits(x[u].w)};
            if (start + 128 * u < part.end) visit(start + 128 * u + 4 * lane, bits);
        }
    }
}

// Sums over the lanes above, and below, this one.
template <class T> UF_DEVICE T sum_above(T x, int lane) {
    T sum = x;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        T more = __shfl_down_sync(0xFFFFFFFFu, sum, o);
        if (lane + o < 32) sum += more;
    }
    return sum - x;
}
template <class T> UF_DEVICE T sum_below(T x, int lane) {
    T sum = x;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        T more = __shfl_up_sync(0xFFFFFFFFu, sum, o);
        if (lane >= o) sum += more;
    }
    return sum - x;
}

struct Counts { u32 all, before; };  // of all CTAs, of those of lower rank
UF_DEVICE Counts over_cluster(const u32* p, int rank) {
    Counts c = {0, 0};
#pragma unroll
    for (int r = 0; r < SELECT_CTAS; r++) {
        u32 x = load_in(p, r);
        c.all += x, c.before += r < rank ? x : 0u;
    }
    return c;
}

// One warp: the digit of the k-th largest from all CTAs' histograms, first its group of 64, then itself.
UF_DEVICE void find_digit(ClusterTopk& s, int turn, int shift, int rank, int lane) {
    u32 left = s.left;
    Counts count = over_cluster(&s.group[turn][lane], rank);
    u32 above = sum_above(count.all, lane), before = sum_above(count.before, lane);
    int group = __ffs(__ballot_sync(0xFFFFFFFFu, above < left && left <= above + count.all)) - 1;
    left -= __shfl_sync(0xFFFFFFFFu, above, group), before = __shfl_sync(0xFFFFFFFFu, before, group);
    int bin = group * (BINS / BIN_GROUPS) + 2 * lane;
    Counts low = over_cluster(&s.histogram[turn][bin], rank), high = over_cluster(&s.histogram[turn][bin + 1], rank);
    above = sum_above(low.all + high.all, lane), before += sum_above(low.before + high.before, lane);
    if (above >= left || left > above + high.all + low.all) return;
    bool upper = left <= above + high.all;
    left -= upper ? above : above + high.all;
    s.prefix |= (u32)(bin + upper) << shift;
    s.left = left;
    s.whole = left == (upper ? high.all : low.all);
    s.above_before += upper ? before : before + high.before;
    s.same_before = upper ? high.before : low.before;
}

// Where the chosen begin and how they are told.
struct Threshold {
    u32 mask, bits, equals;  // chosen: masked bits above, and the first `equals` of those that are equal
    UF_DEVICE bool above(u32 x) const { return (x & mask) > bits; }
    UF_DEVICE bool same(u32 x) const { return (x & mask) == bits; }
};

template <class Quad> UF_DEVICE Threshold find_threshold(ClusterTopk& s, Stretch part, int k, Quad quad) {
    int thread = threadIdx.x, threads = blockDim.x, warp = thread / 32, lane = thread % 32, rank = (int)cluster_rank();
    if (thread == 0) s.prefix = 0, s.left = k, s.whole = 0, s.above_before = 0;
    for (int i = thread; i < BINS; i += threads) s.histogram[0][i] = 0;
    __syncthreads();
    u32 mask = 0;
    for (int digit = 0; digit < DIGITS && !s.whole; digit++) {
        int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, turn = digit % 2;
        u32 prefix = s.prefix, last = digit == 2 ? BINS / 2 - 1 : BINS - 1;
        scan(part, quad, [&](int i, const u32(&bits)[4]) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (i + j < part.end && (bits[j] & mask) == prefix)
                    atomicAdd(&s.histogram[turn][bits[j] >> shift & last], 1u);
        });
        __syncthreads();
        for (int g = warp; g < BIN_GROUPS; g += threads / 32) {
            u32* bin = &s.histogram[turn][g * (BINS / BIN_GROUPS) + lane];
            u32 sum = __reduce_add_sync(0xFFFFFFFFu, bin[0] + bin[32]);
            if (lane == 0) s.group[turn][g] = sum;
        }
        cluster_barrier();
        for (int i = thread; i < BINS; i += threads) s.histogram[1 - turn][i] = 0;
        if (warp == 0) find_digit(s, turn, shift, rank, lane);
        __syncthreads();
        mask |= last << shift;
    }
    return {mask, s.prefix, s.left};
}

// Calls emit(place, index) for each chosen index, place ascending. quad(i): scores i .. i + 3, i a multiple of 4;
// those from n on may be anything. k < n. All threads of the cluster.
template <class Quad, class Emit> UF_DEVICE void cluster_topk(ClusterTopk& s, int n, int k, Quad quad, Emit emit) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Stretch part = stretch_of(n);
    Threshold chosen = find_threshold(s, part, k, quad);
    cluster_arrive();  // this CTA reads no histogram of others any more
    u32 above = 0, same = 0;
    scan(part, quad, [&](int i, const u32(&bits)[4]) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            above += i + j < part.end && chosen.above(bits[j]);
            same += i + j < part.end && chosen.same(bits[j]);
        }
    });
    above = __reduce_add_sync(0xFFFFFFFFu, above), same = __reduce_add_sync(0xFFFFFFFFu, same);
    if (lane == 0) s.above[warp] = above, s.same[warp] = same;
    __syncthreads();
    bool any = above + same;
    above = __reduce_add_sync(0xFFFFFFFFu, lane < warp ? s.above[lane] : 0u) + s.above_before;
    same = __reduce_add_sync(0xFFFFFFFFu, lane < warp ? s.same[lane] : 0u) + s.same_before;
    if (any && above + min(same, chosen.equals) < (u32)k)
        scan(part, quad, [&](int i, const u32(&bits)[4]) {
            u32 mine = 0, equal = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                mine += i + j < part.end && chosen.above(bits[j]);
                equal += i + j < part.end && chosen.same(bits[j]);
            }
            if (!__any_sync(0xFFFFFFFFu, mine + equal)) return;
            u32 a = above + sum_below(mine, lane), e = same + sum_below(equal, lane);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                bool high = i + j < part.end && chosen.above(bits[j]), level = i + j < part.end && chosen.same(bits[j]);
                if (high || (level && e < chosen.equals)) emit((int)(a + min(e, chosen.equals)), i + j);
                a += high, e += level;
            }
            above += __reduce_add_sync(0xFFFFFFFFu, mine), same += __reduce_add_sync(0xFFFFFFFFu, equal);
        });
    cluster_wait();  // others may still read this CTA's histograms
}
