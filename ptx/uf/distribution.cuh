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
// Digits of top_p's threshold, a mass for each bin: this CTA's part. Digits take turns, peers read the last one.
struct MassSearch {
    u64 mass[2][BINS], group[2][BIN_GROUPS], left;
    u32 digit;
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

// One warp: the bin from above in which the mass that is left runs out. The first time it is a share of the whole.
UF_DEVICE void find_bin(MassSearch& s, int turn, bool first, float top_p) {
    int lane = threadIdx.x % 32;
    u64 mass = mass_of_cluster(&s.group[turn][lane]), above = sum_above(mass, lane), left = s.left;
    if (first) left = max((u64)((double)top_p * (double)warp_sum(mass)), (u64)1);
    u32 votes = __ballot_sync(0xFFFFFFFFu, above < left && left <= above + mass);
    int group = votes ? __ffs(votes) - 1 : 0;  // none: there is no mass, of logits that are no numbers
    left -= __shfl_sync(0xFFFFFFFFu, above, group);
    int bin = group * (BINS / BIN_GROUPS) + 2 * lane;
    u64 low = mass_of_cluster(&s.mass[turn][bin]), high = mass_of_cluster(&s.mass[turn][bin + 1]);
    above = sum_above(low + high, lane);
    __syncwarp();
    if (above >= left || left > above + high + low) return;
    bool upper = left <= above + high;
    s.left = left - (upper ? above : above + high);
    s.digit = bin + upper;
}

// Narrows d to the fewest tokens, largest first, whose mass reaches top_p of what d keeps. The first digit is how far
// a logit is below the peak, in even steps, so that a warp's ids fall into different bins; then come its order bits.
UF_DEVICE void keep_mass(Workspace& w, Row& row, float top_p, Distribution& d) {
    MassSearch& s = w.search;
    auto distance = [&, step = BINS / FAR * d.cold.high](u32 bits) { return (d.peak - value_of(bits)) * step; };
    auto bin_of = [&](float far) { return BINS - 1 - min((int)far, BINS - 1); };
    for (int i = threadIdx.x; i < BINS; i += DRAW_THREADS) s.mass[0][i] = 0;
    if (threadIdx.x == 0) s.digit = 0, s.left = 1;
    __syncthreads();
    u32 prefix = 0, mask = 0;
    int near = 0;
    for (int digit = 0; digit <= DIGITS; digit++) {
        int turn = digit % 2, shift = digit == 1 ? 21 : digit == 2 ? 10 : 0;
        u32 last = digit == DIGITS ? BINS / 2 - 1 : BINS - 1;
        each_id(row, [&](int x, u32 bits) {
            float far = distance(bits);
            if (far >= (float)BINS || (digit && (bin_of(far) != near || (bits & mask) != prefix))) return;
            u64 mass = mass_of(d, x, bits);
            if (mass) add_mass(&s.mass[turn][digit ? bits >> shift & last : bin_of(far)], mass);
        });
        __syncthreads();
        for (int g = threadIdx.x / 32; g < BIN_GROUPS; g += DRAW_THREADS / 32) {
            const u64* bin = &s.mass[turn][g * (BINS / BIN_GROUPS) + threadIdx.x % 32];
            u64 sum = warp_sum(bin[0] + bin[32]);
            if (threadIdx.x % 32 == 0) s.group[turn][g] = sum;
        }
        cluster_barrier();
        for (int i = threadIdx.x; i < BINS; i += DRAW_THREADS) s.mass[1 - turn][i] = 0;
        if (threadIdx.x < 32) find_bin(s, turn, digit == 0, top_p);
        __syncthreads();
        if (digit == 0) near = s.digit;
        else prefix |= s.digit << shift, mask |= last << shift;
    }
    // All logits at the threshold weigh the same: how many of them are needed.
    u64 one = max((u64)units_of(weight_of_bits(d, prefix), WEIGHT_UNIT), (u64)1);
    int end = nth(row, max((s.left + one - 1) / one, (u64)1), [&](u32 bits) { return bits == prefix; });
    d.last_equal = prefix == d.threshold ? min(end, d.last_equal) : end;
    d.threshold = prefix;
}

// Temperature, then top_k, then top_p; equal logits: the lower id first. The CTA has made its powers.
UF_DEVICE Distribution distribution(Workspace& w, Row& row, float temperature, float top_p, int top_k) {
    // Nothing is as cold as to make a number of no distance.
    Pair cold = pair_of(fmin(1.4426950408889634 / (double)temperature, 1e30));
    Distribution d = {value_of(best_id(row).bits), 0, row.n - 1, cold, 0.0, w.powers};
    if (top_k > 0 && top_k < row.n) {
        Threshold t = find_threshold(w.topk, row.part, top_k, [&](int i) { return row.quad(i); });
        d.last_equal = nth(row, t.equals, [&](u32 bits) { return t.same(bits); });
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
