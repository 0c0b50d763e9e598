// Two neighbouring tokens become one latent at odd positions, zeros at even ones (graphs/ops/compress_pairs.py).
// Shapes: kv, gate [T, E] f32; kv_ring, gate_ring [slots, R, E] f32; slot, position [T]; row_start [S+1]; y [T, E] bf16.
// Threads: a CTA a row.
#include <uf/early.cuh>
#include <uf/rows.cuh>

extern "C" __global__ void uf_compress_pairs(const Args a) {
    Turn turn;
    int t = blockIdx.x, dim = a.kv_1;
    i64 out = (i64)t * dim;
    if (a.position[t] % 2 == 0) {
        for (int d = threadIdx.x; d < dim; d += blockDim.x) store(a.y, out + d, 0.0f);
        return;
    }
    int before = row_back(t, first_row(a.row_start, a.row_start_0 - 1, t), 1);
    i64 ring = (slot_of(a.slot, t, a.kv_ring_0) * a.kv_ring_1 + ring_at(a.position[t] - 1, a.kv_ring_1)) * dim;
    const float* kv0 = before >= 0 ? a.kv + (i64)before * dim : a.kv_ring + ring;
    const float* gate0 = before >= 0 ? a.gate + (i64)before * dim : a.gate_ring + ring;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float g0 = gate0[d], g1 = a.gate[out + d], peak = fmaxf(g0, g1);
        float w0 = expf(g0 - peak), w1 = expf(g1 - peak), total = w0 + w1;
        store(a.y, out + d, __fdiv_rn(w0, total) * kv0[d] + __fdiv_rn(w1, total) * a.kv[out + d]);
    }
}
