// ring[slot, position mod R] = row, for the last R active rows of each sequence (graphs/ops/ring_write.py).
// Shapes: value, second [T, ...]; ring, second_ring [slots, R, ...], the second ones or absent; slot, position [T];
// row_start [S+1].
// Threads: a CTA a row.
#include <uf/early.cuh>
#include <uf/rows.cuh>
#include <uf/vector.cuh>

// Row `from` of `value` becomes row `to` of `ring`.
template <class T> UF_DEVICE void put_row(T* ring, const T* value, i64 to, i64 from, i64 width) {
    copy_row((u8*)(ring + to * width), (const u8*)(value + from * width), (int)(width * sizeof(T)));
}

extern "C" __global__ void uf_ring_write(const Args a) {
    Turn turn;
    int t = blockIdx.x, sequences = a.row_start_0 - 1;
    if (a.slot[t] < 0 || t >= a.row_start[sequences]) return;
    int end = t + 1;
    for (int s = 0; s < sequences; s++)
        if (t >= a.row_start[s] && t < a.row_start[s + 1]) end = a.row_start[s + 1];
    if (t < end - a.ring_1) return;  // a later row of this step takes its place
    i64 to = (i64)a.slot[t] * a.ring_1 + ring_at(a.position[t], a.ring_1);
    put_row(a.ring, a.value, to, t, UF_SIZE(value) / a.value_0);
#if UF_HAS_second
    put_row(a.second_ring, a.second, to, t, UF_SIZE(second) / a.second_0);
#endif
}
