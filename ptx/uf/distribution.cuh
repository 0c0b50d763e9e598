// From logits to a probability distribution and a token (graphs/sampling.py), by a cluster that holds the row.
//
// Probabilities are made on the fly from logits: w(x) = exp((l(x) - peak) / temperature) where x is kept, over their
// sum z. What top_k and top_p keep is a threshold on the order of logits and a last id among those equal to it, found
// by radix selection: never a sort. Masses are fixed point integers. Weights are pairs of float32: no float64 is used
// for each id.
#include <uf/held_row.cuh>
#include <uf/pair.cuh>

constexpr float WEIGHT_UNIT = 70368744177664.0f;      // 2^46: the weights of 2^17 ids do not overflow
constexpr float SHARE_UNIT = 4611686018427387904.0f;  // 2^62: probabilities add up to 1
constexpr float FAR = 48.0f;                          // 2^-FAR is no mass: less than half a unit
constexpr float NOTHING = 126.0f;                     // 2^-NOTHING and less is no weight at all

struct Distribution {
    float peak;
    u32 threshold;   // order bits of the smallest logit kept
    int last_equal;  // the largest id kept among logits equal to the threshold
    Pair cold;       // a logit that is 1 / cold below another has half its weight
    double share;    // of a weight of 1: 1 / z
    const Pair* powers;
};
// Masses of bins of logits, and the least and the largest order bits in each: this CTA's part. Searches take turns,
// peers read the last one.
constexpr int MASS_BINS = 1024, MASS_GROUPS = 32;
struct MassSearch {
    u64 mass[2][MASS_BINS], group[2][MASS_GROUPS];
    u32 least[2][MASS_BINS], largest[2][MASS_BINS];
    u64 left, here;  // of the mass wanted: what is to come from the bin; what the bin has
    u32 bin, low, high;  // the bin, and its logits' order bits
};
struct Workspace {
    union { ClusterTopk topk; MassSearch search; };
    Told told;
    Pair powers[POWERS];
};

UF_DEVICE Pair weight_of_bits(const Distribution& d, u32 bits) {
    Pair below = two_sum(d.peak, -value_of(bits)), x = two_product(below.high, d.cold.high);
    if (!(x.high < NOTHING)) return {0.0f, 0.0f};
    x.low = fmaf(below.high, d.cold.low, fmaf(below.low, d.cold.high, x.low));
    return power_of_half(d.powers, x);
}
UF_DEVICE Pair weight_of(const Distribution& d, int x, u32 bits) {
    if (bits < d.threshold || (bits == d.threshold && x > d.last_equal)) return {0.0f, 0.0f};
    return weight_of_bits(d, bits);
}
UF_DEVICE u64 mass_of(const Distribution& d, int x, u32 bits) { return units_of(weight_of(d, x, bits), WEIGHT_UNIT); }

// The id of the `count`-th that is the same, in id order; the last id of all if they are fewer.
template <class Same> UF_DEVICE int nth(Row& row, u64 count, Same same) {
    int x = first_beyond(row, [&](int, u32 bits) { return (u64)same(bits); }, [&](u64) { return count - 1; });
    return x < 0 ? row.n - 1 : x;
}

// Adds 64 bits without a loop: whoever wraps the lower half carries.
UF_DEVICE void add_mass(u64* to, u64 x) {
    u32 *half = (u32*)to, low = (u32)x, high = (u32)(x >> 32);
    u32 sum = atomicAdd(half, low) + low;
    high += sum < low;
    if (high) atomicAdd(half + 1, high);
}

UF_DEVICE u64 mass_of_cluster(const u64* p) {
    u64 sum = 0;
#pragma unroll
    for (int r = 0; r < SELECT_CTAS; r++) sum += load_in(p, r);
    return sum;
}

// One warp: the bin from above in which the mass that is left runs out.
UF_DEVICE void find_bin(MassSearch& s, int turn, u64 left) {
    int lane = threadIdx.x % 32;
    u64 mass = mass_of_cluster(&s.group[turn][lane]), above = sum_above(mass, lane);
    u32 votes = __ballot_sync(0xFFFFFFFFu, above < left && left <= above + mass);
    if (!votes) return;  // there is no mass, of logits that are no numbers
    int group = __ffs(votes) - 1, bin = group * (MASS_BINS / MASS_GROUPS) + lane;
    left -= __shfl_sync(0xFFFFFFFFu, above, group);
    mass = mass_of_cluster(&s.mass[turn][bin]), above = sum_above(mass, lane);
    if (above >= left || left > above + mass) return;
    s.left = left - above, s.here = mass, s.bin = bin;
    s.low = 0xFFFFFFFFu, s.high = 0;
#pragma unroll
    for (int r = 0; r < SELECT_CTAS; r++) {
        s.low = min(s.low, load_in(&s.least[turn][bin], r));
        s.high = max(s.high, load_in(&s.largest[turn][bin], r));
    }
}
UF_DEVICE void clear(MassSearch& s, int turn) {
    for (int i = threadIdx.x; i < MASS_BINS; i += DRAW_THREADS)
        s.mass[turn][i] = 0, s.least[turn][i] = 0xFFFFFFFFu, s.largest[turn][i] = 0;
}

// Narrows d to the fewest tokens, largest first, whose mass reaches top_p of what d keeps. First come bins by how far
// a logit is below the peak, in even steps, so that a warp's ids fall into different ones; then finer steps inside the
// bin where the mass runs out, which is hardly ever more than one logit; if it is, its order bits tell.
UF_DEVICE void keep_mass(Workspace& w, Row& row, float top_p, Distribution& d) {
    MassSearch& s = w.search;
    float step = MASS_BINS / FAR * d.cold.high;
    clear(s, 0);
    if (threadIdx.x == 0) s.left = 1, s.here = 1, s.bin = s.low = s.high = 0;
    __syncthreads();
    u64 goal = 0;
    u32 low = 0, high = 0;
    int near = 0, spread = 0;
    for (int round = 0; round < 2 || low < high; round++) {
        int turn = round % 2;
        each_id(row, [&](int x, u32 bits) {
            float far = (d.peak - value_of(bits)) * step;
            u32 bin = (u32)(int)far;
            if (far >= (float)MASS_BINS || (round == 1 && bin != near) || (round > 1 && (bits < low || bits > high))) return;
            u64 mass = mass_of(d, x, bits);
            if (!mass) return;
            if (round == 1) bin = min((u32)((far - (float)near) * MASS_BINS), MASS_BINS - 1u);
            bin = round < 2 ? MASS_BINS - 1 - bin : (bits - low) >> spread;
            add_mass(&s.mass[turn][bin], mass);
            if (round) atomicMin(&s.least[turn][bin], bits), atomicMax(&s.largest[turn][bin], bits);
        });
        __syncthreads();
        for (int g = threadIdx.x / 32; g < MASS_GROUPS; g += DRAW_THREADS / 32) {
            u64 sum = warp_sum(s.mass[turn][g * (MASS_BINS / MASS_GROUPS) + threadIdx.x % 32]);
            if (threadIdx.x % 32 == 0) s.group[turn][g] = sum;
        }
        cluster_barrier();
        clear(s, 1 - turn);
        if (threadIdx.x < 32) {
            if (round == 0) {  // a share of the whole
                u64 all = warp_sum(mass_of_cluster(&s.group[0][threadIdx.x]));
                goal = max((u64)((double)top_p * (double)all), (u64)1);
            }
            find_bin(s, turn, round ? s.left : goal);
        }
        __syncthreads();
        if (round == 0) near = MASS_BINS - 1 - s.bin;
        else low = s.low, high = s.high, spread = max(0, 32 - __clz(high - low) - 10);
    }
    // All logits in the bin weigh the same: how many of them are needed.
    u64 one = max((u64)units_of(weight_of_bits(d, low), WEIGHT_UNIT), (u64)1);
    u64 needed = (s.left + one - 1) / one;
    int end = needed * one < s.here ? nth(row, needed, [&](u32 bits) { return bits == low; }) : row.n - 1;
    d.last_equal = low == d.threshold ? min(end, d.last_equal) : end;
    d.threshold = low;
}

// Temperature, then top_k, then top_p; equal logits: the lower id first. The CTA has made its powers.
UF_DEVICE Distribution distribution(Workspace& w, Row& row, float temperature, float top_p, int top_k) {
    // Nothing is as cold as to make a number of no distance.
    Pair cold = pair_of(fmin(1.4426950408889634 / (double)temperature, 1e30));
    Distribution d = {value_of(best_id(row).bits), 0, row.n - 1, cold, 0.0, w.powers};
    if (top_k > 0 && top_k < row.n) {
        Threshold t = find_threshold(w.topk, row.part, top_k, [&](int i) { return row.quad(i); });
        d.last_equal = nth(row, t.equals, [&](u32 bits) { return t.same(bits); });  // a barrier behind the search, too
        d.threshold = t.bits;
    }
    if (top_p < 1.0f) keep_mass(w, row, top_p, d);
    u64 z = sums_of(row, [&](int x, u32 bits) { return mass_of(d, x, bits); }).all;
    d.share = (double)WEIGHT_UNIT / (double)z;
    return d;
}

// The first id whose cumulative share exceeds u of the whole; -1 where there is none.
template <class F> UF_DEVICE int pick(Row& row, double u, F share) {
    return first_beyond(row, share, [&](u64 all) { return (u64)(u * (double)all); });
}
