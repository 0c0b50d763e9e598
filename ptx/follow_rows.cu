// A step's rows as they follow from each slot's last step (graphs/ops/follow_rows.py).
// Shapes: follows [S]; row_start [S+1]; slot [T]; next_ids [slots, 1+B]; next_at [slots, 2]; ids, position [T]; step [S].
// Threads: a CTA a sequence, a thread a row.
#include <uf/early.cuh>

extern "C" __global__ void uf_follow_rows(const Args a) {
    Turn turn;
    int s = blockIdx.x, first = a.row_start[s], rows = min(a.row_start[s + 1] - first, a.next_ids_1);
    if (!a.follows[s] || rows == 0) return;
    int slot = a.slot[first];
    const int* ids = a.next_ids + slot * a.next_ids_1;
    const int* at = a.next_at + slot * a.next_at_1;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        a.ids[first + i] = ids[i];
        a.position[first + i] = at[0] + i;
    }
    if (threadIdx.x == 0) a.step[s] = at[1];
}
