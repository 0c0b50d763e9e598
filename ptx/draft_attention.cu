// A draft block's rows over the window before it and the whole block (graphs/ops/draft_attention.py).
// Shapes: q [S*B, H, E] bf16; codes [S*B, E], scales [S*B, E/32]; ring_* [slots, R, ...]; sink [H]; cos, sin [S*B, P];
// slot, position [S*B]; y [S*B, H*E] bf16.
// Threads: grid (S*B * SPLIT, H / HEADS): a cluster of SPLIT CTAs a row and HEADS heads. Shared memory: `AttendShared`.
#include <uf/attend.cuh>
#include <uf/early.cuh>
#include <uf/rows.cuh>

extern __shared__ __align__(16) u8 work[];

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1)
    __launch_bounds__(UF_THREADS, UF_CTAS) uf_draft_attention(const Args a) {
    Turn turn;
    int t = blockIdx.x / SPLIT, h = blockIdx.y * HEADS, pairs = a.cos_1, start = t / a.block * a.block;
    int last = a.position[start] - 1;
    i64 slot = slot_of(a.slot, start, a.ring_codes_0);
    auto key = [&](int n) {
        int position = last - (a.window - 1 - n);
        bool own = n >= a.window;
        i64 at = own ? start + n - a.window : slot * a.ring_codes_1 + ring_at(position, a.ring_codes_1);
        Key k = {(own ? a.codes : a.ring_codes) + at * DIM, (own ? a.scales : a.ring_scales) + at * (DIM / 32)};
        k.valid = own ? n < a.window + a.block : position >= 0;
        return k;
    };
    i64 head = ((i64)t * a.q_1 + h) * DIM, angle = (i64)t * pairs;
    AttendRow row = {a.q + head, a.y + head, min(HEADS, a.q_1 - h), a.sink + h, a.cos + angle, a.sin + angle, pairs};
    attend(*(AttendShared*)work, row, key);
}
