// Gated Engram values enter the residual streams (graphs/ops/engram_mix.py).
// Shapes: x, y [T, C, D] bf16; kv [T, (C+1)*D] bf16; q_weight, k_weight [C, D] bf16; is_image [T].
// Threads: grid (C, T), double sums.
#include <uf/early.cuh>
#include <uf/reduce.cuh>

extern "C" __global__ void uf_engram_mix(const Args a) {
    Turn turn;
    int c = blockIdx.x, t = blockIdx.y, copies = a.x_1, dim = a.x_2;
    const bf16* x = a.x + ((i64)t * copies + c) * dim;
    const bf16* key = a.kv + (i64)t * a.kv_1 + (i64)c * dim;
    const bf16* value = a.kv + (i64)t * a.kv_1 + (i64)copies * dim;
    double dot = 0.0, xx = 0.0, kk = 0.0;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        double v = load(x, d), k = load(key, d);
        float w = load(a.q_weight, (i64)c * dim + d) * load(a.k_weight, (i64)c * dim + d);
        dot = fma(v * (double)w, k, dot);
        xx = fma(v, v, xx);
        kk = fma(k, k, kk);
    }
    float s = (float)block_sum(dot), x2 = (float)(block_sum(xx) / dim), k2 = (float)(block_sum(kk) / dim);
    s = s * __fdiv_rn(1.0f, __fsqrt_rn(x2 + a.eps)) * __fdiv_rn(1.0f, __fsqrt_rn(k2 + a.eps));
    s = s * (float)(1.0 / sqrt((double)dim));
    float root = copysignf(__fsqrt_rn(fmaxf(fabsf(s), 1e-6f)), s);
    float gate = a.is_image[t] > 0 ? 0.0f : __fdiv_rn(1.0f, 1.0f + expf(fminf(-root, 88.0f)));
    bf16* y = a.y + ((i64)t * copies + c) * dim;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) store(y, d, load(x, d) + gate * load(value, d));
}
