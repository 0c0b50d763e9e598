// A finished group's latent becomes an entry: rotated, then QNV4 (graphs/ops/store_main_kv.py).
// Shapes: latent [T, E] bf16; cos, sin [T, P]; slot, position [T]; codes [slots, entries, E/2]; scales [slots, entries, E/16].
// Threads: a CTA a row, a half warp a group of 16.
#include <uf/early.cuh>
#include <uf/reduce.cuh>
#include <uf/rope.cuh>

extern "C" __global__ void uf_store_main_kv(const Args a) {
    Turn turn;
    int t = blockIdx.x, dim = a.latent_1, pairs = a.cos_1;
    if (a.slot[t] < 0 || (a.position[t] + 1) % a.ratio) return;
    i64 entry = (i64)a.slot[t] * a.codes_1 + a.position[t] / a.ratio;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float x = rotated(a.latent + (i64)t * dim, d, dim, a.cos + t * pairs, a.sin + t * pairs, pairs, 1.0f);
        float peak = fabsf(x);
#pragma unroll
        for (int o = 8; o; o >>= 1) peak = fmaxf(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, o));
        u8 scale = qnv4_scale(peak);
        u32 code = e2m1_code(__fdiv_rn(x, e4m3_value(scale))), odd = __shfl_down_sync(0xFFFFFFFFu, code, 1);
        if (d % 2 == 0) a.codes[entry * (dim / 2) + d / 2] = (u8)(code | odd << 4);
        if (d % 16 == 0) a.scales[entry * (dim / 16) + d / 16] = scale;
    }
}
