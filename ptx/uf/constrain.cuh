// Bias, mask and ban of a request (graphs/sampling.py).
#include <uf/held_row.cuh>

// Adds what is meant for ids of this CTA's slice, repeated ids in the order of their entries; ids of -1 are unused.
UF_DEVICE void add_bias(Row& row, const int* ids, const float* values, int count) {
    bool any = false;
    for (int i = threadIdx.x; i < count; i += DRAW_THREADS) any |= ids[i] >= 0;
    if (!__syncthreads_or(any)) return;
    for (int i = threadIdx.x; i < count; i += DRAW_THREADS) {
        int x = ids[i];
        bool first = x >= 0 && row.has(x);
        for (int j = 0; j < i && first; j++) first = ids[j] != x;
        if (!first) continue;
        float logit = row.at(x);
        for (int j = i; j < count; j++)
            if (ids[j] == x) logit = logit + values[j];
        row.at(x) = logit;
    }
    __syncthreads();
}

// Values of ids i .. i + 3, -inf where one is forbidden; i is a multiple of 4.
UF_DEVICE float4 allowed(const u32* mask, int banned, int i, float4 x) {
    u32 bits = mask[i / 32] >> (i % 32);
    float never = from_bits(0xFF800000u);
    return make_float4(bits & 1u && i != banned ? x.x : never, bits & 2u && i + 1 != banned ? x.y : never,
                       bits & 4u && i + 2 != banned ? x.z : never, bits & 8u && i + 3 != banned ? x.w : never);
}
