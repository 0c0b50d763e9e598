// Bias, mask and ban of a request (graphs/sampling.py).
#include <uf/distribution.cuh>

struct Bias {
    const int* ids;
    const float* values;
    int count;  // entries up to the last one used
};
UF_DEVICE Bias bias_of(const int* ids, const float* values, int size) {
    int count = 0;
    for (int i = 0; i < size; i++) if (ids[i] >= 0) count = i + 1;
    return Bias{ids, values, count};
}
UF_DEVICE float with_bias(const Bias& b, int x, float logit) {
    for (int i = 0; i < b.count; i++) if (b.ids[i] == x) logit = logit + b.values[i];
    return logit;
}
UF_DEVICE bool allowed(const u32* mask, int banned, int x) { return (mask[x / 32] >> (x % 32) & 1u) && x != banned; }
