// One block of rows behind each sequence's last accepted row (graphs/ops/draft_rows.py).
// Shapes: token, accepted [S]; slot, position [T]; row_start [S+1]; ids, at, at_slot, text [S*B]. Threads: a CTA a sequence.
#include <uf/early.cuh>

extern "C" __global__ void uf_draft_rows(const Args a) {
    Turn turn;
    int s = blockIdx.x, first = a.row_start[s];
    bool busy = a.row_start[s + 1] > first;
    for (int i = threadIdx.x; i < a.block; i += blockDim.x) {
        int row = s * a.block + i;
        a.ids[row] = i ? a.noise : a.token[s];
        a.at[row] = (busy ? a.position[first] + a.accepted[s] + 1 : 0) + i;
        a.at_slot[row] = busy ? a.slot[first] : -1;
        a.text[row] = 0;
    }
}
