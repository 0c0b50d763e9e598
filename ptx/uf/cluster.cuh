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

// Where the cluster's first CTA has what this CTA has at `p`, in shared memory.
UF_DEVICE u32 in_first(const void* p) {
    u32 mine, first;
    asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(mine) : "l"(p));
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(first) : "r"(mine));
    return first;
}
UF_DEVICE void store_in_first(float* p, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(in_first(p)), "f"(x) : "memory");
}
UF_DEVICE void store_in_first(double* p, double x) {
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(in_first(p)), "d"(x) : "memory");
}
