// Each row's heads over its last W window rows, then its selected entries (graphs/ops/attention.py).
// Shapes: q [T, H, E] bf16; codes [T, E], scales [T, E/32] of this step; ring_*, main_* state; sel [T, k]; sink [H];
// cos, sin [T, P]; slot, position, window_start [T]; row_start [S+1]; y [T, H*E] bf16.
// Threads: grid (T, H), a CTA a head: a warp a key for the scores, a thread an element for the values.
// Shared memory: logits, group factors, one output row.
#include <uf/attend.cuh>
#include <uf/rows.cuh>

extern __shared__ float work[];

extern "C" __global__ void __launch_bounds__(ATTEND_THREADS) uf_attention(const Args a) {
    int t = blockIdx.x, h = blockIdx.y, dim = a.q_2, pairs = a.cos_1, position = a.position[t];
    int first = first_row(a.row_start, a.row_start_0 - 1, t), groups = dim / 32;
    i64 slot = slot_of(a.slot, t, a.ring_codes_0);
    auto key = [&](int n) {
        Key k;
        if (n < a.window) {
            int back = a.window - 1 - n, row = row_back(t, first, back);
            i64 ring = slot * a.ring_codes_1 + ring_at(position - back, a.ring_codes_1);
            k.codes = row >= 0 ? a.codes + (i64)row * dim : a.ring_codes + ring * dim;
            k.scales = row >= 0 ? a.scales + row * groups : a.ring_scales + ring * groups;
            k.global = false;
            k.valid = back <= position - a.window_start[t];
        } else {
#if UF_HAS_sel
            int entry = a.sel[t * a.sel_1 + n - a.window];
            i64 at = slot * a.main_codes_1 + max(entry, 0);
            k.codes = a.main_codes + at * (dim / 2);
            k.scales = a.main_scales + at * (dim / 16);
            k.global = true;
            k.valid = entry >= 0;
#endif
        }
        return k;
    };
#if UF_HAS_sel
    int count = a.window + a.sel_1;
#else
    int count = a.window;
#endif
    i64 head = ((i64)t * a.q_1 + h) * dim;
    attend(a.q + head, dim, count, key, a.sink[h], a.round_weights, a.cos + t * pairs, a.sin + t * pairs, pairs, work,
           a.y + head);
}
