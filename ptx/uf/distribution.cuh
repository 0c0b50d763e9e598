// From logits to a probability distribution and a token (graphs/sampling.py), by one CTA of 256 threads.
//
// Probabilities are made on the fly from logits: w(x) = exp((l(x) - peak) / temperature) where x is kept, over their
// sum z. What top_k and top_p keep is a threshold on the order of logits and a last id among those equal to it,
// found by radix selection: never a sort. Masses are summed as fixed point integers, so that no order of additions
// shows; z and cumulative sums take contiguous pieces of ids in order.
#include <uf/topk.cuh>

constexpr double FIXED = 1099511627776.0;  // 2^40

struct Distribution {
    float peak;
    u32 threshold;  // order bits of the smallest logit kept
    int last_equal;  // the largest id kept among logits equal to the threshold
    double z;
    float temperature;
};
struct Workspace {
    Topk topk;
    u64 mass[256];
    double part[TOPK_THREADS + 1];
    u64 target;
    int found;
};

template <class Logit> UF_DEVICE double weight_of(const Distribution& d, Logit logit, int x) {
    float l = logit(x);
    u32 bits = order_bits(l);
    if (bits < d.threshold || (bits == d.threshold && x > d.last_equal)) return 0.0;
    return exp(((double)l - (double)d.peak) / (double)d.temperature);
}
template <class Logit> UF_DEVICE double probability(const Distribution& d, Logit logit, int x) {
    return weight_of(d, logit, x) / d.z;
}

// Sum of f over all ids and where a cumulative sum first exceeds u * sum. Pieces of ids are contiguous.
template <class F> UF_DEVICE double total_of_ids(Workspace& w, int n, F f) {
    int piece = (n + TOPK_THREADS - 1) / TOPK_THREADS, start = threadIdx.x * piece;
    double sum = 0.0;
    for (int x = start; x < min(start + piece, n); x++) sum += f(x);
    __syncthreads();
    w.part[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {  // exclusive sums; the whole at the end
        double run = 0.0;
        for (int i = 0; i <= TOPK_THREADS; i++) {
            double own = i < TOPK_THREADS ? w.part[i] : 0.0;
            w.part[i] = run;
            run += own;
        }
    }
    __syncthreads();
    return w.part[TOPK_THREADS];
}
template <class F> UF_DEVICE int pick(Workspace& w, int n, double u, F f) {
    double target = u * total_of_ids(w, n, f);
    __syncthreads();
    int piece = (n + TOPK_THREADS - 1) / TOPK_THREADS, start = threadIdx.x * piece;
    if (threadIdx.x == 0) w.found = n - 1;
    __syncthreads();
    double run = w.part[threadIdx.x];
    if (target >= run && target < w.part[threadIdx.x + 1])
        for (int x = start; x < min(start + piece, n); x++) {
            run += f(x);
            if (run > target) {
                atomicMin(&w.found, x);
                break;
            }
        }
    __syncthreads();
    return w.found;
}

// The largest logit, the lowest id among equals; NaN stands for ids that do not take part.
template <class Logit> UF_DEVICE int argmax(Workspace& w, int n, Logit logit) {
    float best = from_bits(0xFF800000u);
    int at = 0x7FFFFFFF;
    for (int x = threadIdx.x; x < n; x += TOPK_THREADS) {
        float l = logit(x);
        if (l == l && (at == 0x7FFFFFFF || l > best)) best = l, at = x;
    }
    float top = block_max(best);
    if (threadIdx.x == 0) w.found = 0x7FFFFFFF;
    __syncthreads();
    if (at != 0x7FFFFFFF && best == top) atomicMin(&w.found, at);
    __syncthreads();
    int found = w.found;
    __syncthreads();
    return found;
}

// The id of the `count`-th logit equal to `bits`, in id order.
template <class Logit> UF_DEVICE int nth_equal(Workspace& w, int n, u32 bits, int count, Logit logit) {
    __syncthreads();  // `found` may still be read from an earlier search
    if (threadIdx.x == 0) w.topk.base = 0, w.found = n - 1;
    __syncthreads();
    for (int start = 0; start < n; start += TOPK_THREADS) {
        int x = start + threadIdx.x;
        bool same = x < n && order_bits(logit(x)) == bits;
        u32 before = w.topk.base, rank = before + rank_among(w.topk.count, same, threadIdx.x / 32, threadIdx.x % 32);
        u32 total = before + total_of(w.topk.count);
        if (same && (int)rank == count - 1) w.found = x;
        __syncthreads();
        if (threadIdx.x == 0) w.topk.base = total;
        __syncthreads();
        if ((int)total >= count) break;
    }
    int found = w.found;
    __syncthreads();
    return found;
}

// Narrows d to the fewest tokens, largest first, whose mass reaches top_p of what d keeps.
template <class Logit> UF_DEVICE void keep_mass(Workspace& w, int n, Logit logit, float top_p, Distribution& d) {
    int thread = threadIdx.x;
    u32 prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        w.mass[thread] = 0;
        __syncthreads();
        u32 mask = shift == 24 ? 0u : 0xFFFFFFFFu << (shift + 8);
        for (int x = thread; x < n; x += TOPK_THREADS) {
            u32 bits = order_bits(logit(x));
            if ((bits & mask) == (prefix & mask))
                atomicAdd(&w.mass[bits >> shift & 255u], (u64)(weight_of(d, logit, x) * FIXED + 0.5));
        }
        __syncthreads();
        if (thread == 0) {
            if (shift == 24) {
                u64 all = 0;
                for (int i = 0; i < 256; i++) all += w.mass[i];
                w.target = (u64)((double)top_p * (double)all);
                if (w.target == 0) w.target = 1;
            }
            int digit = 255;
            while (digit > 0 && w.mass[digit] < w.target) w.target -= w.mass[digit--];
            w.found = digit;
        }
        __syncthreads();
        prefix |= (u32)w.found << shift;
    }
    // All logits at the threshold weigh the same: how many of them are needed.
    __syncthreads();  // the last digit may still be read
    if (thread == 0) {
        float l = from_bits(prefix & 0x80000000u ? prefix & 0x7FFFFFFFu : ~prefix);
        u64 one = (u64)(exp(((double)l - (double)d.peak) / (double)d.temperature) * FIXED + 0.5);
        w.found = one ? (int)((w.target + one - 1) / one) : 1;
    }
    __syncthreads();
    int needed = max(w.found, 1);
    int last = nth_equal(w, n, prefix, needed, logit);
    d.last_equal = prefix == d.threshold ? min(last, d.last_equal) : last;
    d.threshold = prefix;
}

// Temperature, then top_k, then top_p; equal logits: the lower id first.
template <class Logit>
UF_DEVICE Distribution distribution(Workspace& w, int n, Logit logit, float temperature, float top_p, int top_k) {
    Distribution d;
    float best = from_bits(0xFF800000u);
    for (int x = threadIdx.x; x < n; x += TOPK_THREADS) best = fmaxf(best, logit(x));
    d.peak = block_max(best);
    d.threshold = 0;
    d.last_equal = n - 1;
    d.temperature = temperature;
    if (top_k > 0 && top_k < n) {
        // The threshold alone is wanted: places and indices are thrown away.
        select_topk(w.topk, n, top_k, logit, [](int, int) {});
        d.threshold = w.topk.prefix;
        d.last_equal = nth_equal(w, n, w.topk.prefix, w.topk.left, logit);
    }
    if (top_p < 1.0f) keep_mass(w, n, logit, top_p, d);
    d.z = total_of_ids(w, n, [&](int x) { return weight_of(d, logit, x); });
    __syncthreads();
    return d;
}
