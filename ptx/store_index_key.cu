// A finished group's index key: rotated, then QMX4 (graphs/ops/store_index_key.py).
// Shapes: key [T, I] bf16; cos, sin [T, P]; slot, position [T]; codes [slots, entries, I/2]; scales [slots, entries, I/32].
// Threads: a CTA a row, a warp a group of 32.
#include <uf/early.cuh>
#include <uf/reduce.cuh>
#include <uf/rope.cuh>

extern "C" __global__ void uf_store_index_key(const Args a) {
    Turn turn;
    int t = blockIdx.x, dim = a.key_1, pairs = a.cos_1;
    if (a.slot[t] < 0 || (a.position[t] + 1) % a.ratio) return;
    i64 entry = (i64)a.slot[t] * a.codes_1 + a.position[t] / a.ratio;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float x = rotated(a.key + (i64)t * dim, d, dim, a.cos + t * pairs, a.sin + t * pairs, pairs, 1.0f);
        u32 scale = qmx4_scale(warp_max(fabsf(x)));
        u32 code = e2m1_code(__fdiv_rn(x, e8m0_value((u8)scale))), odd = __shfl_down_sync(0xFFFFFFFFu, code, 1);
        if (d % 2 == 0) a.codes[entry * (dim / 2) + d / 2] = (u8)(code | odd << 4);
        if (d % 32 == 0) a.scales[entry * (dim / 32) + d / 32] = (u8)scale;
    }
}
