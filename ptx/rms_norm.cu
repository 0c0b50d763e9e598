// y = bf16(w * (x * rsqrt(mean(x^2) + eps))), each row alone, or the Q8 of it (graphs/ops/rms_norm.py).
// Shapes: x, y [T, K] bf16; weight [K] bf16. K is a multiple of 32.
// Threads: a CTA a row, two neighbouring elements a thread at a time; squares summed in double, in an order that K
// alone fixes. Limited by latency.
#include <uf/early.cuh>
#include <uf/q8.cuh>
#include <uf/reduce.cuh>

extern "C" __global__ void __launch_bounds__(1024) uf_rms_norm(const Args a) {
    Turn turn;
    int k = a.weight_0, lane = threadIdx.x % 32, first = 2 * (threadIdx.x - lane), step = 2 * blockDim.x;
    i64 row = (i64)blockIdx.x * k;
    double sum = 0.0;
#pragma unroll 4
    for (int i = 2 * threadIdx.x; i < k; i += step) {
        float2 x = load2(a.x, row + i);
        sum += (double)x.x * (double)x.x + (double)x.y * (double)x.y;
    }
    float inverse = inverse_root(block_sum(sum), k, a.eps);
#pragma unroll 4
    for (int start = first; start < k; start += step) {  // whole warps, for what they share
        int i = start + 2 * lane;
        float2 y = make_float2(0.0f, 0.0f);
        if (i < k) {
            float2 x = inverse * load2(a.x, row + i), w = load2(a.weight, i);
            y = rounded(make_float2(w.x * x.x, w.y * x.y));
        }
        if (a.q8) y = fake_q8(y);
        if (i < k) store2(a.y, row + i, y);
    }
}
