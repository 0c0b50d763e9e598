// Clusters: CTAs that run at the same time and write each other's shared memory.
#include <uf/types.cuh>

UF_DEVICE int cluster_rank() {
    int r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
// A barrier of all threads of the cluster in two steps: what stands between them does not wait. What was written
// before the first, to whichever CTA, is seen behind the second.
UF_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
UF_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

UF_DEVICE void cluster_barrier() { cluster_arrive(), cluster_wait(); }

UF_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
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
UF_DEVICE void store_in(double* p, u32 rank, double x) {
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(address_in(p, rank)), "d"(x) : "memory");
}
UF_DEVICE void store_in(u64* p, u32 rank, u64 x) {
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address_in(p, rank)), "l"(x) : "memory");
}
UF_DEVICE u64 load_in(const u64* p, u32 rank) {
    u64 x;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(x) : "r"(address_in(p, rank)) : "memory");
    return x;
}
