// Tensor-core products of bf16 tiles, number formats as bf16 pairs, and shared memory of a cluster's CTAs.
#include <uf/types.cuh>

UF_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

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
// c[16, 8] += a[16, 16] b[16, 8], sums in fp32. Lane l: c rows l/4 and l/4 + 8, columns 2(l%4) and the next.
UF_DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

UF_DEVICE u32 times_pair(u32 a, u32 b) {
    u32 c;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
UF_DEVICE u32 both(u32 bits) { return bits | bits << 16; }
UF_DEVICE u32 pair_bits(float low, float high) { return (u32)bf16_bits(low) | (u32)bf16_bits(high) << 16; }

// Codes become bf16 by moving their fields and one product with a scale, which also puts the exponent's bias right.
// What bf16 has no room for is left over: values are 2^-63 of what they stand for, exactly. Elements i and i + 4 of
// eight neighbours make a pair: the tensor core does not mind an order that both of its operands have.
constexpr float UNSCALED = 9223372036854775808.0f;  // 2^63
UF_DEVICE u32 e2m1_pair(u32 codes, int i, u32 scale) {  // of eight codes; six significant bits
    u32 shifted = i == 0 ? codes << 6 : i == 1 ? codes << 2 : i == 2 ? codes >> 2 : codes >> 6;
    return times_pair((shifted & 0x01C001C0u) | (codes << (12 - 4 * i) & 0x80008000u), scale);
}
UF_DEVICE u32 e4m3_pair(u32 low, u32 high, int i, u32 scale) {  // of four codes and the next four; four bits
    u32 x = __byte_perm(low, high, 0x4400u + 0x1111u * i);
    return times_pair((x >> 4 & 0x07F007F0u) | (x & 0x80008000u), scale);
}
// Scales that leave 2^-63: E4M3 over E2M1 codes (2^-126 as moved), E8M0 over either (E4M3: 2^-120).
UF_DEVICE u32 e4m3_over_e2m1(u32 code) { return times_pair(times_pair(both(code << 4), 0x7B807B80u), 0x5F005F00u); }
UF_DEVICE u32 e8m0_over_e2m1(u32 byte) { return both((byte + 63u) << 7); }
UF_DEVICE u32 e8m0_over_e4m3(u32 byte) { return both((byte + 57u) << 7); }

// --- clusters: CTAs that see each other's shared memory ---

UF_DEVICE u32 cluster_rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
// All threads of all CTAs of the cluster; what was written before it, to whichever CTA, is seen behind it.
UF_DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same in two steps: what stands between them does not wait.
UF_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
UF_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Where CTA `rank` has what this CTA has at `p`.
UF_DEVICE u32 address_in(const void* p, u32 rank) {
    u32 a;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(shared_address(p)), "r"(rank));
    return a;
}
UF_DEVICE void store_in(float* p, u32 rank, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_in(p, rank)), "f"(x) : "memory");
}
UF_DEVICE void store_in(u32* p, u32 rank, u32 x) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_in(p, rank)), "r"(x) : "memory");
}
UF_DEVICE u32 load_in(const u32* p, u32 rank) {
    u32 x;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(address_in(p, rank)) : "memory");
    return x;
}
UF_DEVICE float2 load_in(const float2* p, u32 rank) {
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address_in(p, rank)) : "memory");
    return x;
}
