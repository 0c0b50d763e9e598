// Which experts serve a row, and with what weight (graphs/ops/gate.py).
// Shapes: logits [T, N] f32; bias, bias_image [N] f32; is_image, slot [T]; ids [T, k] ascending; weight [T, k] f32.
// N <= 512.
// Threads: a CTA a row; all of them make scores, one warp chooses, the best left each time, a lane N / 32 keys.
// Shared memory, dynamic: scores [N], keys [N], chosen scores [k]. Limited by the latency of k choices.
#include <uf/early.cuh>
#include <uf/topk.cuh>

constexpr int THREADS = 128, MOST = 512, SCORES = MOST / THREADS, KEYS = MOST / 32;

extern __shared__ u32 gate_shared[];

// Bit i: expert lane + 32 i is among the k best.
UF_DEVICE u32 chosen_of(const u32* keys, int n, int k, int lane) {
    u32 key[KEYS], chosen = 0;  // 0: no expert, or chosen already; no number's order has these bits
#pragma unroll
    for (int i = 0; i < KEYS; i++) key[i] = lane + 32 * i < n ? keys[lane + 32 * i] : 0u;
    for (int turn = 0; turn < k; turn++) {
        u32 best = 0;
        int at = MOST;
#pragma unroll
        for (int i = 0; i < KEYS; i++)
            if (key[i] > best) best = key[i], at = lane + 32 * i;  // of equal ones the first
        u32 most = __reduce_max_sync(0xFFFFFFFFu, best);
        at = __reduce_min_sync(0xFFFFFFFFu, best == most ? at : MOST);
#pragma unroll
        for (int i = 0; i < KEYS; i++)
            if (at == lane + 32 * i) key[i] = 0, chosen |= 1u << i;
    }
    return chosen;
}

extern "C" __global__ void __launch_bounds__(THREADS) uf_gate(const Args a) {
    int t = blockIdx.x, lane = threadIdx.x, n = a.logits_1;
    float* score = (float*)gate_shared;
    u32* key = gate_shared + n;  // order of biased scores
    float* taken = (float*)(key + n);
    float bias[SCORES], bias_image[SCORES];
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        int e = min((int)threadIdx.x + THREADS * i, n - 1);
        bias[i] = a.bias[e], bias_image[i] = a.bias_image[e];
    }
    Turn turn;
    int row = a.slot[t] < 0 ? 0 : t;
    bool image = a.is_image[row] > 0;
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        int e = threadIdx.x + THREADS * i;
        if (e >= n) break;
        float logit = a.logits[(i64)row * n + e];
        float softplus = logit > 20.0f ? logit : log1pf(expf(fminf(logit, 20.0f)));
        score[e] = __fsqrt_rn(softplus);
        key[e] = order_bits(score[e] + (image ? bias_image[i] : bias[i]));
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    u32 chosen = chosen_of(key, n, a.k, lane);
    int place = 0;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        bool own = chosen >> i & 1u;
        u32 votes = __ballot_sync(0xFFFFFFFFu, own);
        if (own) {
            int at = place + __popc(votes & ((1u << lane) - 1u));
            a.ids[t * a.k + at] = lane + 32 * i, taken[at] = score[lane + 32 * i];
        }
        place += __popc(votes);
    }
    __syncwarp();
    float total = taken[0];
    for (int i = 1; i < a.k; i++) total = total + taken[i];
    for (int i = lane; i < a.k; i += 32)
        a.weight[t * a.k + i] = (a.k > 1 ? __fdiv_rn(taken[i], total + 1e-20f) : taken[i]) * a.scale;
}
