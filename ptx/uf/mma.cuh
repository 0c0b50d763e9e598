// Tensor cores and asynchronous copies: instructions behind names, alike on all architectures.
#include <uf/types.cuh>

// c += a . b on one warp: a is 16 x 16 bf16, b 16 x 8 bf16, c 16 x 8 fp32. Lane 4 g + t holds
//   a: rows g (registers 0, 2) and g + 8 (1, 3), k = 2t, 2t + 1 (registers 0, 1) and 2t + 8, 2t + 9 (2, 3)
//   b: column g, the same k;   c: rows g (c[0], c[1]) and g + 8 (c[2], c[3]), columns 2t and 2t + 1
UF_DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A copy of 16 bytes from global to shared memory that goes on beside what follows. Copies are closed into groups;
// once `copies_arrived` returns, a thread sees its own of all but the newest `PENDING` groups (others behind a barrier).
UF_DEVICE void copy16(void* shared, const void* global) {
    u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(global) : "memory");
}
UF_DEVICE void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> UF_DEVICE void copies_arrived() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

UF_DEVICE u32 times_bf16x2(u32 a, u32 b) {  // exact where the result has a bf16; subnormal operands count
    u32 y;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// An E8M0 scale as the factor (twice) that `e4m3_pairs` wants: 2^(scale - 127 + 120), for scales up to 134.
UF_DEVICE u32 e4m3_factor(u32 scale) { return (scale + 120u) * 0x00800080u; }
// Four E4M3 codes times a scale, exactly: bytes 0 and 2 become `even`, 1 and 3 `odd`. A code moved to where bf16 has its
// exponent is the value times 2^-120, subnormals included.
UF_DEVICE void e4m3_pairs(u32 codes, u32 factor, u32& even, u32& odd) {
    even = times_bf16x2((codes << 8 & 0x80008000u) | (codes << 4 & 0x07F007F0u), factor);
    odd = times_bf16x2((codes & 0x80008000u) | (codes >> 4 & 0x07F007F0u), factor);
}
