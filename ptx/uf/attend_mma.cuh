// Tensor-core products of bf16 tiles, number formats as bf16 pairs.
#include <uf/cluster.cuh>
#include <uf/mma.cuh>

// Four 8x8 matrices of 16-bit elements; lane l names row l % 8 of matrix l / 8 (16 bytes).
UF_DEVICE void load_matrices(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
UF_DEVICE void load_matrices(u32 (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)) : "memory");
}
UF_DEVICE void load_matrices_turned(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
UF_DEVICE u32 both(u32 bits) { return bits | bits << 16; }
UF_DEVICE u32 pair_bits(float low, float high) { return (u32)bf16_bits(low) | (u32)bf16_bits(high) << 16; }

// Codes become bf16 by moving their fields and one product with a scale, which also puts the exponent's bias right.
// What bf16 has no room for is left over: values are 2^-63 of what they stand for, exactly. Elements i and i + 4 of
// eight neighbours make a pair: the tensor core does not mind an order that both of its operands have.
constexpr float UNSCALED = 9223372036854775808.0f;  // 2^63
UF_DEVICE u32 e2m1_pair(u32 codes, int i, u32 scale) {  // of eight codes; six significant bits
    u32 shifted = i == 0 ? codes << 6 : i == 1 ? codes << 2 : i == 2 ? codes >> 2 : codes >> 6;
    return times_bf16x2((shifted & 0x01C001C0u) | (codes << (12 - 4 * i) & 0x80008000u), scale);
}
UF_DEVICE u32 e4m3_pair(u32 low, u32 high, int i, u32 scale) {  // of four codes and the next four; four bits
    u32 x = __byte_perm(low, high, 0x4400u + 0x1111u * i);
    return times_bf16x2((x >> 4 & 0x07F007F0u) | (x & 0x80008000u), scale);
}
// Scales that leave 2^-63: E4M3 over E2M1 codes (2^-126 as moved), E8M0 over either (E4M3: 2^-120).
UF_DEVICE u32 e4m3_over_e2m1(u32 code) { return times_bf16x2(times_bf16x2(both(code << 4), 0x7B807B80u), 0x5F005F00u); }
UF_DEVICE u32 e8m0_over_e2m1(u32 byte) { return both((byte + 63u) << 7); }
UF_DEVICE u32 e8m0_over_e4m3(u32 byte) { return both((byte + 57u) << 7); }
