// y = ring[slot, position mod R] for every row (graphs/ops/ring_read.py).
// Shapes: ring [slots, R, ...]; slot, position [T]; y [T, ...]. Threads: a CTA a row.
#include <uf/early.cuh>
#include <uf/rows.cuh>

extern "C" __global__ void uf_ring_read(const Args a) {
    Turn turn;
    int t = blockIdx.x;
    i64 width = UF_SIZE(y) / a.y_0;
    i64 from = (slot_of(a.slot, t, a.ring_0) * a.ring_1 + ring_at(a.position[t], a.ring_1)) * width;
    for (i64 i = threadIdx.x; i < width; i += blockDim.x) a.y[t * width + i] = a.ring[from + i];
}
