// What io says of the last row of each sequence (graphs/ops/last_io.py).
// Shapes: ids, slot, position [T]; row_start [S+1]; last_* [S], last_start [S+1]. Threads: one.
#include <uf/early.cuh>

extern "C" __global__ void uf_last_io(const Args a) {
    Turn turn;
    a.last_start[0] = 0;
    for (int s = 0; s < a.last_ids_0; s++) {
        bool busy = a.row_start[s + 1] > a.row_start[s];
        int row = max(a.row_start[s + 1] - 1, 0);
        a.last_ids[s] = a.ids[row];
        a.last_slot[s] = busy ? a.slot[row] : -1;
        a.last_position[s] = a.position[row];
        a.last_start[s + 1] = a.last_start[s] + busy;
    }
}
