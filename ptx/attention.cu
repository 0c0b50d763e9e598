// Each row's heads over its last W window rows, then its selected entries (graphs/ops/attention.py).
// Shapes: q [T, H, E] bf16; codes [T, E], scales [T, E/32] of this step; ring_*, main_* state; sel [T, k]; sink [H];
// cos, sin [T, P]; slot, position, window_start [T]; row_start [S+1]; y [T, H*E] bf16.
// Threads: grid (T * SPLIT, H / HEADS): a cluster of SPLIT CTAs a row and HEADS heads.
// Shared memory: `AttendShared`.
#include <uf/attend.cuh>
#include <uf/early.cuh>
#include <uf/rows.cuh>

extern __shared__ __align__(16) u8 work[];

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1)
    __launch_bounds__(UF_THREADS, UF_CTAS) uf_attention(const Args a) {
    Turn turn;
    int t = blockIdx.x / SPLIT, h = blockIdx.y * HEADS, pairs = a.cos_1, position = a.position[t];
    int first = first_row(a.row_start, a.row_start_0 - 1, t), start = a.window_start[t];
    i64 slot = slot_of(a.slot, t, a.ring_codes_0);
    auto key = [&](int n) {
        Key k = {a.codes, a.scales, false, false};
        if (n < a.window) {
            int back = a.window - 1 - n, row = row_back(t, first, back);
            i64 ring = slot * a.ring_codes_1 + ring_at(position - back, a.ring_codes_1);
            k.codes = row >= 0 ? a.codes + (i64)row * DIM : a.ring_codes + ring * DIM;
            k.scales = row >= 0 ? a.scales + (i64)row * (DIM / 32) : a.ring_scales + ring * (DIM / 32);
            k.valid = back <= position - start;
        }
#if UF_HAS_sel
        else if (n < a.window + a.sel_1) {
            int entry = a.sel[(i64)t * a.sel_1 + n - a.window];
            i64 at = slot * a.main_codes_1 + max(entry, 0);
            k.codes = a.main_codes + at * (DIM / 2);
            k.scales = a.main_scales + at * (DIM / 16);
            k.global = true;
            k.valid = entry >= 0;
        }
#endif
        return k;
    };
    i64 head = ((i64)t * a.q_1 + h) * DIM, angle = (i64)t * pairs;
    AttendRow row = {a.q + head, a.y + head, min(HEADS, a.q_1 - h), a.sink + h, a.cos + angle, a.sin + angle, pairs};
    attend(*(AttendShared*)work, row, key);
}
