// What a slot's next step begins with (graphs/ops/next_rows.py).
// Shapes: token, accepted, step [S]; drafts, confidence [S, B] or absent; slot, position [T]; row_start [S+1];
// next_ids [slots, 1+B]; next_at [slots, 2]; next_confidence [slots, B] or absent. Threads: a CTA a sequence, a thread an id.
#include <uf/early.cuh>

extern "C" __global__ void uf_next_rows(const Args a) {
    Turn turn;
    int s = blockIdx.x, first = a.row_start[s];
    if (a.row_start[s + 1] == first) return;
    int slot = a.slot[first];
    int* ids = a.next_ids + slot * a.next_ids_1;
    int* at = a.next_at + slot * a.next_at_1;
    if (threadIdx.x == 0) {
        ids[0] = a.token[s];
        at[0] = a.position[first] + a.accepted[s] + 1;
        at[1] = a.step[s] + 1;
    }
#if UF_HAS_drafts
    for (int i = threadIdx.x; i < a.drafts_1; i += blockDim.x) {
        ids[1 + i] = a.drafts[s * a.drafts_1 + i];
        a.next_confidence[slot * a.drafts_1 + i] = a.confidence[s * a.drafts_1 + i];
    }
#endif
}
