// Which experts serve a row, and with what weight (graphs/ops/gate.py).
// Shapes: logits [T, N] f32; bias, bias_image [N] f32; is_image, slot [T]; ids [T, k] ascending; weight [T, k] f32.
// Threads: a CTA a row; all of them make scores, one warp chooses, the best left each time.
// Shared memory, dynamic: scores [N], keys [N], chosen scores [k]. Limited by the latency of k choices.
#include <uf/topk.cuh>

extern __shared__ u32 gate_shared[];

extern "C" __global__ void __launch_bounds__(128) uf_gate(const Args a) {
    int t = blockIdx.x, row = a.slot[t] < 0 ? 0 : t, lane = threadIdx.x, n = a.logits_1;
    float* score = (float*)gate_shared;
    u32* key = gate_shared + n;  // order of biased scores, 0 once chosen: no number's bits are that
    float* taken = (float*)(key + n);
    for (int e = threadIdx.x; e < n; e += blockDim.x) {
        float logit = a.logits[(i64)row * n + e];
        float softplus = logit > 20.0f ? logit : log1pf(expf(fminf(logit, 20.0f)));
        score[e] = __fsqrt_rn(softplus);
        key[e] = order_bits(score[e] + (a.is_image[row] > 0 ? a.bias_image[e] : a.bias[e]));
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    for (int i = 0; i < a.k; i++) {
        u32 best = 0;
        int at = n;
        for (int e = lane; e < n; e += 32)
            if (key[e] > best) best = key[e], at = e;  // of equal ones the first
        u32 most = __reduce_max_sync(0xFFFFFFFFu, best);
        at = __reduce_min_sync(0xFFFFFFFFu, best == most ? at : n);
        if (lane == at % 32) key[at] = 0;
    }
    __syncwarp();
    int place = 0;
    for (int start = 0; start < n; start += 32) {
        int e = start + lane;
        bool chosen = e < n && key[e] == 0;
        u32 votes = __ballot_sync(0xFFFFFFFFu, chosen);
        if (chosen) {
            int i = place + __popc(votes & ((1u << lane) - 1u));
            a.ids[t * a.k + i] = e, taken[i] = score[e];
        }
        place += __popc(votes);
    }
    __syncwarp();
    float total = taken[0];
    for (int i = 1; i < a.k; i++) total = total + taken[i];
    for (int i = lane; i < a.k; i += 32)
        a.weight[t * a.k + i] = (a.k > 1 ? __fdiv_rn(taken[i], total + 1e-20f) : taken[i]) * a.scale;
}
