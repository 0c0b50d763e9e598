// One row and head of attention over keys that an accessor names (graphs/ops/attention.py).
#include <uf/reduce.cuh>

// A stored key-value row. Window rows are E4M3 with E8M0 scales per 32, global entries E2M1 pairs with E4M3 per 16.
struct Key {
    const u8* codes;
    const u8* scales;
    bool global, valid;
};
UF_DEVICE float key_value(const Key& k, int d) {
    if (!k.global) return e4m3_value(k.codes[d]) * e8m0_value(k.scales[d / 32]);
    return e2m1_value(k.codes[d / 2] >> (4 * (d & 1)) & 15u) * e4m3_value(k.scales[d / 16]);
}

constexpr int ATTEND_THREADS = 128;
constexpr int KEY_GROUP = 64;  // keys that the model authors' kernel takes at once

// out[d] = bf16 of sum_n w_n K_n[d] / (sum_n w_n + exp(sink - max)), turned back by the row's angle.
// `work` holds count + ceil(count / group) + dim floats. With `rounded`, weights are bf16 relative to the running
// maximum of 64-key groups in the value product; else there is one group of all keys.
template <class Keys>
UF_DEVICE void attend(const bf16* q, int dim, int count, Keys key, float sink, bool rounded, const float* cos,
                      const float* sin, int pairs, float* work, bf16* out) {
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    int group = rounded ? KEY_GROUP : count, groups = (count + group - 1) / group;
    float *weight = work, *keep = weight + count, *mixed = keep + groups;
    float scale = (float)(1.0 / sqrt((double)dim));
    for (int n = warp; n < count; n += ATTEND_THREADS / 32) {
        Key k = key(n);
        double dot = 0.0;
        if (k.valid)
            for (int d = lane; d < dim; d += 32) dot = fma((double)load(q, d), (double)key_value(k, d), dot);
        dot = warp_sum(dot);
        if (lane == 0) weight[n] = k.valid ? (float)dot * scale : from_bits(0xFF800000u);
    }
    float peak = from_bits(0xFF800000u);
    double total = 0.0;
    for (int g = 0; g < groups; g++) {
        __syncthreads();
        int start = g * group, end = min(start + group, count);
        float top = from_bits(0xFF800000u);
        for (int n = start + thread; n < end; n += ATTEND_THREADS) top = fmaxf(top, weight[n]);
        top = fmaxf(fmaxf(peak, block_max(top)), -1e30f);
        double sum = 0.0;
        for (int n = start + thread; n < end; n += ATTEND_THREADS) {
            weight[n] = expf(weight[n] - top);
            sum += (double)weight[n];
        }
        float kept = expf(peak - top);
        total = total * (double)kept + block_sum(sum);
        if (thread == 0) keep[g] = kept;
        peak = top;
    }
    __syncthreads();
    total += (double)expf(sink - peak);
    for (int d = thread; d < dim; d += ATTEND_THREADS) {
        double value = 0.0;
        for (int g = 0; g < groups; g++) {
            double part = 0.0;
            for (int n = g * group; n < min(g * group + group, count); n++) {
                Key k = key(n);
                if (!k.valid) continue;
                float w = rounded ? bf16_round(weight[n]) : weight[n];
                part = fma((double)w, (double)key_value(k, d), part);
            }
            value = value * (double)keep[g] + part;
        }
        mixed[d] = bf16_round((float)(value / total));
    }
    __syncthreads();
    for (int d = thread; d < dim; d += ATTEND_THREADS) {
        int r = d - (dim - 2 * pairs);
        float x = mixed[d];
        if (r >= 0) {
            float c = cos[r / 2], s = -sin[r / 2], even = mixed[d - (r & 1)], odd = mixed[d - (r & 1) + 1];
            x = r & 1 ? even * s + odd * c : even * c - odd * s;
        }
        store(out, d, x);
    }
}
