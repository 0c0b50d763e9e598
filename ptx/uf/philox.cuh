// Philox4x32-10 and the uniform numbers that a step draws (graphs/philox.py).
#include <uf/types.cuh>

constexpr u32 PURPOSE_DRAFT = 1, PURPOSE_ACCEPT = 2, PURPOSE_RESIDUAL = 3;

struct Words { u32 a, b, c, d; };

// Four random words of a counter.
UF_DEVICE Words philox(u64 key, Words w) {
    u32 k0 = (u32)key, k1 = (u32)(key >> 32);
    for (int round = 0; round < 10; round++) {
        u64 left = (u64)w.a * 0xD2511F53u, right = (u64)w.c * 0xCD9E8D57u;
        w = {(u32)(right >> 32) ^ w.b ^ k0, (u32)right, (u32)(left >> 32) ^ w.d ^ k1, (u32)left};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return w;
}

// Strictly between 0 and 1: (first word + 1/2) / 2^32.
UF_DEVICE double uniform(u64 seed, int position, int step, u32 purpose) {
    Words w = philox(seed, {(u32)position, (u32)step, purpose, 0});
    return ((double)w.a + 0.5) * 2.3283064365386963e-10;
}
