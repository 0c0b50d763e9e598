// y = bf16(w * (x * rsqrt(mean(x^2) + eps))), each row alone (graphs/ops/rms_norm.py).
// Shapes: x, y [T, K] bf16; weight [K] bf16. K is even.
// Threads: a CTA a row, two neighbouring elements a thread at a time; squares summed in double, in an order that K
// alone fixes. Limited by latency.
#include <uf/early.cuh>
#include <uf/reduce.cuh>
#include <uf/vector.cuh>

extern "C" __global__ void __launch_bounds__(1024) uf_rms_norm(const Args a) {
    take_turn();
    int k = a.weight_0;
    i64 row = (i64)blockIdx.x * k;
    double sum = 0.0;
#pragma unroll 4
    for (int i = 2 * threadIdx.x; i < k; i += 2 * blockDim.x) {
        float2 x = load2(a.x, row + i);
        sum += (double)x.x * (double)x.x + (double)x.y * (double)x.y;
    }
    float mean = (float)(block_sum(sum) / (double)k);
    float inverse = __fdiv_rn(1.0f, __fsqrt_rn(mean + a.eps));
#pragma unroll 4
    for (int i = 2 * threadIdx.x; i < k; i += 2 * blockDim.x) {
        float2 x = inverse * load2(a.x, row + i), w = load2(a.weight, i);
        store2(a.y, row + i, make_float2(w.x * x.x, w.y * x.y));
    }
}
