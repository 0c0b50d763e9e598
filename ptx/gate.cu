// Which experts serve a row, and with what weight (graphs/ops/gate.py).
// Shapes: x [T, D] bf16; w [N, D] bf16; bias, bias_image [N] f32; is_image [T]; ids [T, k] ascending; weight [T, k] f32.
// D is a multiple of 8, N <= 1024, k <= 32.
// Threads: a cluster for one row, or for eight where there are many: its CTAs share the experts, a warp one at a time,
// and the first CTA chooses, a warp a row.
// Order of a sum: eight products at a time in f32, where each is exact; these ascending in double over a lane's
// vectors, then a tree over lanes. Shared memory: the scores. Limited by reading w from the L2 cache.
#include <uf/cluster.cuh>
#include <uf/reduce.cuh>
#include <uf/vector.cuh>

constexpr int THREADS = 512;
constexpr int CTAS = 8, WARPS = THREADS / 32, MANY = 8, EXPERTS = 1024;

UF_DEVICE float dot8(uint4 x, uint4 y) {
    const u32 u[4] = {x.x, x.y, x.z, x.w}, v[4] = {y.x, y.y, y.z, y.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 p = pair_of(u[i]), q = pair_of(v[i]);
        sum = fmaf(p.y, q.y, fmaf(p.x, q.x, sum));
    }
    return sum;
}

UF_DEVICE float score_of(float logit) {
    return __fsqrt_rn(logit > 20.0f ? logit : log1pf(expf(fminf(logit, 20.0f))));
}

// Scores of this CTA's experts for `ROWS` rows from `first` on, into the first CTA's memory.
template <int ROWS> UF_DEVICE void find_scores(const Args& a, int first, float (*score)[EXPERTS]) {
    int lane = threadIdx.x % 32, n = a.w_0, part = (n + CTAS - 1) / CTAS, from = cluster_rank() * part;
    for (int e = from + threadIdx.x / 32; e < min(n, from + part); e += WARPS) {
        const uint4* w = (const uint4*)(a.w + (i64)e * a.w_1);
        double sum[ROWS] = {};
#pragma unroll 4
        for (int v = lane; v < a.w_1 / 8; v += 32) {
            uint4 mine = w[v];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const uint4* x = (const uint4*)(a.x + (i64)min(first + r, a.x_0 - 1) * a.x_1);
                sum[r] += (double)dot8(mine, x[v]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float logit = (float)warp_sum(sum[r]);
            if (lane == 0) store_in_first(&score[r][e], score_of(logit));
        }
    }
}

// Bits that order as floats do; -inf is above 0, both zeros are equal.
UF_DEVICE u32 ordered(float x) {
    u32 b = x == 0.0f ? 0u : to_bits(x);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// One warp: the k best of a row, the lower of equals; lane i then has the i-th choice.
UF_DEVICE void choose(const Args& a, const float* score, int t, int lane) {
    const float* bias = a.is_image[t] > 0 ? a.bias_image : a.bias;
    int n = a.w_0, mine = 0x7FFFFFFF;
    u32 taken = 0;  // of this lane's experts
    for (int i = 0; i < a.k; i++) {
        u32 best = 0;
        int at = n;
        for (int e = lane; e < n; e += 32) {
            u32 key = taken >> (e / 32) & 1u ? 0u : ordered(score[e] + bias[e]);
            if (key > best) best = key, at = e;
        }
        u32 top = __reduce_max_sync(0xFFFFFFFFu, best);
        at = __reduce_min_sync(0xFFFFFFFFu, best == top ? at : n);
        if (at % 32 == lane) taken |= 1u << (at / 32);
        if (lane == i) mine = at;
    }
    int rank = 0;
    for (int i = 0; i < a.k; i++) rank += __shfl_sync(0xFFFFFFFFu, mine, i) < mine;
    if (lane < a.k) a.ids[t * a.k + rank] = mine;
    __syncwarp();
    float own = lane < a.k ? score[a.ids[t * a.k + lane]] : 0.0f, total = __shfl_sync(0xFFFFFFFFu, own, 0);
    for (int i = 1; i < a.k; i++) total = total + __shfl_sync(0xFFFFFFFFu, own, i);
    if (a.k > 1) own = __fdiv_rn(own, total + 1e-20f);
    if (lane < a.k) a.weight[t * a.k + lane] = own * a.scale;
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS) uf_gate(const Args a) {
    __shared__ float score[MANY][EXPERTS];
    int group = blockIdx.x / CTAS, rows = gridDim.x / CTAS == a.x_0 ? 1 : MANY;
    cluster_arrive();
    cluster_wait();  // the first CTA runs: its memory may be written
    if (rows == 1) find_scores<1>(a, group, score);
    else find_scores<MANY>(a, group * MANY, score);
    cluster_arrive();
    cluster_wait();
    int warp = threadIdx.x / 32, t = group * rows + warp;
    if (cluster_rank() == 0 && warp < rows && t < a.x_0) choose(a, score[warp], t, threadIdx.x % 32);
}
