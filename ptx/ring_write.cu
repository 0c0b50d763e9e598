// ring[slot, position mod R] = row, for the last R active rows of each sequence (graphs/ops/ring_write.py).
// Shapes: value [T, ...]; ring [slots, R, ...]; slot, position [T]; row_start [S+1].
// Threads: a CTA a row.
#include <uf/early.cuh>
#include <uf/rows.cuh>

extern "C" __global__ void uf_ring_write(const Args a) {
    take_turn();
    int t = blockIdx.x, sequences = a.row_start_0 - 1;
    if (a.slot[t] < 0 || t >= a.row_start[sequences]) return;
    int end = t + 1;
    for (int s = 0; s < sequences; s++)
        if (t >= a.row_start[s] && t < a.row_start[s + 1]) end = a.row_start[s + 1];
    if (t < end - a.ring_1) return;  // a later row of this step takes its place
    i64 width = UF_SIZE(value) / a.value_0;
    i64 to = ((i64)a.slot[t] * a.ring_1 + ring_at(a.position[t], a.ring_1)) * width;
    for (i64 i = threadIdx.x; i < width; i += blockDim.x) a.ring[to + i] = a.value[t * width + i];
}
