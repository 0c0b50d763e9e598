// A draft block's rows over the window before it and the whole block (graphs/ops/draft_attention.py).
// Shapes: q [S*B, H, E] bf16; codes [S*B, E], scales [S*B, E/32]; ring_* [slots, R, ...]; sink [H]; cos, sin [S*B, P];
// slot, position [S*B]; y [S*B, H*E] bf16.
// Threads: grid (S*B, H), a CTA a head. Shared memory: logits, group factors, one output row.
#include <uf/attend.cuh>
#include <uf/rows.cuh>

extern __shared__ float work[];

extern "C" __global__ void __launch_bounds__(ATTEND_THREADS) uf_draft_attention(const Args a) {
    int row = blockIdx.x, h = blockIdx.y, dim = a.q_2, pairs = a.cos_1, start = row / a.block * a.block;
    int last = a.position[start] - 1;
    i64 slot = slot_of(a.slot, start, a.ring_codes_0);
    auto key = [&](int n) {
        Key k;
        int position = last - (a.window - 1 - n);
        i64 ring = slot * a.ring_codes_1 + ring_at(position, a.ring_codes_1);
        bool own = n >= a.window;
        i64 at = own ? start + n - a.window : ring;
        k.codes = (own ? a.codes : a.ring_codes) + at * dim;
        k.scales = (own ? a.scales : a.ring_scales) + at * (dim / 32);
        k.global = false;
        k.valid = own || position >= 0;
        return k;
    };
    i64 head = ((i64)row * a.q_1 + h) * dim;
    attend(a.q + head, dim, a.window + a.block, key, a.sink[h], a.round_weights, a.cos + row * pairs,
           a.sin + row * pairs, pairs, work, a.y + head);
}
