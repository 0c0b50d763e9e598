// FP4 weights as operand A of mma.m16n8k16: one layout of bits, and how few instructions undo it.
//
// A code s e1 e0 m becomes a bf16 by moving: s to bit 15, e1 e0 m to bits 8, 7 and 6, which is its value times
// 2^-126 (0.5 is a subnormal, as it is in E2M1). A word holds four pairs; where their bits stand
// (FP4_BITS in runtime/weights/layout.py) lets one mask, three shifts or rotations and one more step undo all: nine
// instructions for eight weights. No four places of the pattern fill a word, so the last pair takes two pieces.
#include <uf/types.cuh>

constexpr u32 FP4_PAIR = 0x81C081C0u, FP4_LOW_PARTS = 0x80C080C0u, FP4_HIGH_EXPONENT = 0x01000100u;

// Eight codes to four registers of two bf16, each value times 2^-126.
UF_DEVICE void fp4_pairs(u32 word, u32* pair) {
    pair[0] = word & FP4_PAIR;
    pair[1] = (word << 6) & FP4_PAIR;
    pair[2] = __funnelshift_r(word, word, 6) & FP4_PAIR;
    pair[3] = (__funnelshift_r(word, word, 4) & FP4_LOW_PARTS) | ((word << 4) & FP4_HIGH_EXPONENT);
}

// The word that `fp4_pairs` undoes, of eight codes in the checkpoint's order.
UF_DEVICE u32 fp4_packed(u32 codes) {
    u32 pair[4];
    for (int p = 0; p < 4; p++) {
        u32 low = codes >> (8 * p) & 15u, high = codes >> (8 * p + 4) & 15u;
        u32 two = low | high << 16;
        pair[p] = (two & 0x00080008u) << 12 | (two & 0x00070007u) << 6;
    }
    u32 last = pair[3] & FP4_LOW_PARTS;
    return pair[0] | pair[1] >> 6 | __funnelshift_l(pair[2], pair[2], 6) | __funnelshift_l(last, last, 4) |
           (pair[3] & FP4_HIGH_EXPONENT) >> 4;
}
