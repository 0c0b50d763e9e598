// y = bf16(w * (x * rsqrt(mean(x^2) + eps))), each row alone (graphs/ops/rms_norm.py).
// Shapes: x, y [T, K] bf16; weight [K] bf16.
// Threads: a CTA a row; squares summed in double, in an order that K alone fixes.
#include <uf/reduce.cuh>

extern "C" __global__ void uf_rms_norm(const Args a) {
    int k = a.weight_0;
    const bf16* x = a.x + (i64)blockIdx.x * k;
    double sum = 0.0;
    for (int i = threadIdx.x; i < k; i += blockDim.x) sum += (double)load(x, i) * (double)load(x, i);
    float mean = (float)(block_sum(sum) / (double)k);
    float inverse = __fdiv_rn(1.0f, __fsqrt_rn(mean + a.eps));
    for (int i = threadIdx.x; i < k; i += blockDim.x)
        store(a.y, (i64)blockIdx.x * k + i, load(a.weight, i) * (load(x, i) * inverse));
}
