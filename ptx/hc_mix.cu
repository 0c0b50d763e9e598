// Hyper-connection coefficients of a sub-layer (graphs/ops/hc_mix.py).
// Shapes: x [T, C, D] bf16; fn [2C + C*C, C*D] f32; scale [3], base [2C + C*C] f32; pre, post [T, C], comb [T, C, C] f32.
// Threads: a CTA a row, a warp a projection (double sums); then 16 lanes normalise the C x C matrix, C = 4.
#include <uf/reduce.cuh>

UF_DEVICE float sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + expf(fminf(-x, 88.0f))); }

// Sum over i (rows) or j (columns) of a 4 x 4 matrix held by lanes 4i + j, in increasing order.
UF_DEVICE float sum4(float v, bool over_rows, int lane) {
    int i = lane / 4, j = lane % 4;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        float one = __shfl_sync(0xFFFFu, v, over_rows ? 4 * n + j : 4 * i + n);
        sum = n ? sum + one : one;
    }
    return sum;
}

extern "C" __global__ void uf_hc_mix(const Args a) {
    __shared__ float mixes[32];
    int t = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, size = a.fn_1, copies = a.x_1;
    const bf16* x = a.x + (i64)t * size;
    double square = 0.0;
    for (int k = threadIdx.x; k < size; k += blockDim.x) square += (double)load(x, k) * (double)load(x, k);
    float mean = (float)(block_sum(square) / (double)size);
    float inverse = __fdiv_rn(1.0f, __fsqrt_rn(mean + a.norm_eps));
    for (int n = warp; n < a.fn_0; n += blockDim.x / 32) {
        double sum = 0.0;
        for (int k = lane; k < size; k += 32) sum = fma((double)a.fn[(i64)n * size + k], (double)load(x, k), sum);
        sum = warp_sum(sum);
        if (lane == 0) mixes[n] = (float)sum * inverse;
    }
    __syncthreads();
    if (threadIdx.x < copies) {
        int c = threadIdx.x;
        a.pre[t * copies + c] = sigmoid(mixes[c] * a.scale[0] + a.base[c]) + a.eps;
        a.post[t * copies + c] = 2.0f * sigmoid(mixes[copies + c] * a.scale[1] + a.base[copies + c]);
    }
    if (threadIdx.x < 16) {
        int n = 2 * copies + lane;
        float m = mixes[n] * a.scale[2] + a.base[n], peak = m;
#pragma unroll
        for (int o = 1; o < 4; o <<= 1) peak = fmaxf(peak, __shfl_xor_sync(0xFFFFu, peak, o));
        m = expf(m - peak);
        m = __fdiv_rn(m, sum4(m, false, lane)) + a.eps;
        for (int step = 0; step < 2 * a.iterations - 1; step++) m = __fdiv_rn(m, sum4(m, step % 2 == 0, lane) + a.eps);
        a.comb[t * 16 + lane] = m;
    }
}
