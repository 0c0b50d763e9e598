// y = bf16(w * (x * rsqrt(mean(x^2) + eps))), each row alone, or the Q8 of it (graphs/ops/rms_norm.py).
// Shapes: x, y [T, K] bf16; weight [K] bf16. K is a multiple of 32, at most 8,192.
// Threads: a CTA a row (uf/norm.cuh). Limited by latency.
#include <uf/early.cuh>
#include <uf/norm.cuh>

extern "C" __global__ void __launch_bounds__(1024) uf_rms_norm(const Args a) {
    RowPairs y(a.weight_0), weight(a.weight_0);
    weight.fill([&](int i) { return load2(a.weight, i); });
    Turn turn;
    i64 row = (i64)blockIdx.x * a.weight_0;
    y.fill([&](int i) { return load2(a.x, row + i); });
    y.norm(weight, a.eps);
    if (a.q8) y.quantise();
    y.put(a.y + row);
}
