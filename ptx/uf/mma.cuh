#include <uf/types.cuh>
UF_DEVICE void mma_bf16(float* c, const u32* a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
UF_DEVICE u32 mul_bf16x2(u32 x, u32 y) { u32 z; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y)); return z; }
UF_DEVICE uint4 load_stream(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
UF_DEVICE u32 load_stream(const u32* p) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
UF_DEVICE void copy_async(void* shared, const void* global, int bytes) {
    u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(global), "r"(bytes) : "memory");
}
UF_DEVICE void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> UF_DEVICE void wait_async() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
