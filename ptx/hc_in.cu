// What a sub-layer sees of the residual streams: their weighted sum, normed, and the Q8 of that (graphs/ops/hc_in.py).
// Shapes: x [T, C, D] bf16; pre [T, C] f32; weight [D] bf16; y, y_q8 [T, D] bf16. D is a multiple of 32, at most 8,192.
// Threads: a CTA a row, two neighbouring elements a thread at a time, which it keeps. Copies in order; squares summed
// in double, in an order that D alone fixes. Limited by latency.
#include <uf/early.cuh>
#include <uf/q8.cuh>
#include <uf/reduce.cuh>

constexpr int PAIRS = 4;  // of a thread

extern "C" __global__ void __launch_bounds__(1024) uf_hc_in(const Args a) {
    Turn turn;
    int copies = a.x_1, dim = a.x_2, step = 2 * blockDim.x, first = 2 * threadIdx.x;
    const float* pre = a.pre + blockIdx.x * copies;
    i64 row = (i64)blockIdx.x * dim;
    float2 y[PAIRS] = {};
    double squares = 0.0;
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        int d = first + p * step;
        if (d >= dim) break;
        i64 at = row * copies + d;
        y[p] = pre[0] * load2(a.x, at);
#pragma unroll 4
        for (int c = 1; c < copies; c++) y[p] = y[p] + pre[c] * load2(a.x, at + (i64)c * dim);
        y[p] = rounded(y[p]);
        squares += (double)y[p].x * (double)y[p].x + (double)y[p].y * (double)y[p].y;
    }
    float inverse = inverse_root(block_sum(squares), dim, a.eps);
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        int d = first + p * step;
        if (d - first % 64 >= dim) break;  // whole warps, for what they share
        float2 w = d < dim ? load2(a.weight, d) : make_float2(0.0f, 0.0f), x = inverse * y[p];
        x = rounded(make_float2(w.x * x.x, w.y * x.y));
        float2 q = fake_q8(x);
        if (d < dim) store2(a.y, row + d, x), store2(a.y_q8, row + d, q);
    }
}
