// Philox4x32-10 and the uniform numbers that a step draws (graphs/philox.py).
#include <uf/types.cuh>

constexpr u32 PURPOSE_DRAFT = 1, PURPOSE_ACCEPT = 2, PURPOSE_RESIDUAL = 3;

// Strictly between 0 and 1: (first word + 1/2) / 2^32.
UF_DEVICE double uniform(u64 seed, int position, int step, u32 purpose) {
    u32 a = position, b = step, c = purpose, d = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        u64 left = (u64)a * 0xD2511F53u, right = (u64)c * 0xCD9E8D57u;
        a = (u32)(right >> 32) ^ b ^ k0;
        b = (u32)right;
        c = (u32)(left >> 32) ^ d ^ k1;
        d = (u32)left;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return ((double)a + 0.5) * 2.3283064365386963e-10;
}
