// Which experts serve a row, and with what weight (graphs/ops/gate.py).
// Shapes: x [T, D] bf16; w [N, D] bf16; bias, bias_image [N] f32; is_image [T]; ids [T, k] ascending; weight [T, k] f32.
// Threads: a CTA a row, warps stride over experts (double sums); one warp chooses. N <= 1024, k <= 32.
#include <uf/reduce.cuh>

extern "C" __global__ void uf_gate(const Args a) {
    __shared__ float score[1024], biased[1024];
    int t = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = a.x_1, n = a.w_0;
    const bf16* x = a.x + (i64)t * dim;
    for (int e = warp; e < n; e += blockDim.x / 32) {
        double sum = 0.0;
        for (int d = lane; d < dim; d += 32) sum = fma((double)load(a.w, (i64)e * dim + d), (double)load(x, d), sum);
        float logit = (float)warp_sum(sum);
        float softplus = logit > 20.0f ? logit : log1pf(expf(fminf(logit, 20.0f)));
        if (lane == 0) {
            score[e] = __fsqrt_rn(softplus);
            biased[e] = score[e] + (a.is_image[t] > 0 ? a.bias_image[e] : a.bias[e]);
        }
    }
    __syncthreads();
    if (warp) return;
    int mine = 0x7FFFFFFF;  // lane i holds the i-th choice
    for (int i = 0; i < a.k; i++) {
        float best = from_bits(0xFF800000u);
        int at = 0x7FFFFFFF;
        for (int e = lane; e < n; e += 32)
            if (biased[e] > best || (biased[e] == best && e < at)) best = biased[e], at = e;
        for (int o = 16; o; o >>= 1) {
            float other = __shfl_xor_sync(0xFFFFFFFFu, best, o);
            int where = __shfl_xor_sync(0xFFFFFFFFu, at, o);
            if (other > best || (other == best && where < at)) best = other, at = where;
        }
        if (lane == i) mine = at;
        if (lane == 0) biased[at] = from_bits(0xFF800000u);
        __syncwarp();
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
