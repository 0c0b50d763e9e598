// What a sub-layer sees of the residual streams: their weighted sum, normed, and the Q8 of that (graphs/ops/hc_in.py).
// Shapes: x [T, C, D] bf16; pre [T, C] f32; weight [D] bf16; y, y_q8 [T, D] bf16. D is a multiple of 32, at most 8,192.
// Threads: a CTA a row (uf/norm.cuh); copies are added in order. Limited by latency.
#include <uf/early.cuh>
#include <uf/norm.cuh>

constexpr int COPIES = UF_COPIES;

extern "C" __global__ void __launch_bounds__(1024) uf_hc_in(const Args a) {
    int dim = a.x_2;
    RowPairs y(dim), weight(dim);
    weight.fill([&](int d) { return load2(a.weight, d); });
    Turn turn;
    const bf16* x = a.x + (i64)blockIdx.x * COPIES * dim;
    float pre[COPIES];
#pragma unroll
    for (int c = 0; c < COPIES; c++) pre[c] = a.pre[blockIdx.x * COPIES + c];
    y.fill([&](int d) {
        float2 copy[COPIES];
#pragma unroll
        for (int c = 0; c < COPIES; c++) copy[c] = load2(x, (i64)c * dim + d);
        float2 sum = pre[0] * copy[0];
#pragma unroll
        for (int c = 1; c < COPIES; c++) sum = sum + pre[c] * copy[c];
        return rounded(sum);
    });
    i64 row = (i64)blockIdx.x * dim;
    y.norm(weight, a.eps);
    y.put(a.y + row);
    y.quantise();
    y.put(a.y_q8 + row);
}
