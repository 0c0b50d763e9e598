// z = bf16(weight * swiglu(x w1, x w3)) of each chosen expert (graphs/ops/experts_up.py).
// Shapes: x [T, D] bf16; ids [T, k]; weight [T, k] f32; w1, w3 [N, F, D] fp4 + E8M0 1x32; y [T, k, F] bf16.
// Threads: grid (F / 4, T*k), a warp an output of one row and expert.
// Limited by reading weights, again for each row that chose the expert.
#include <uf/dot.cuh>
#include <uf/swiglu.cuh>

extern "C" __global__ void __launch_bounds__(128) uf_experts_up(const Args a) {
    int f = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, chosen = blockIdx.y;
    if (f >= a.w1_1) return;
    int t = chosen / a.ids_1;
    i64 n = (i64)a.ids[chosen] * a.w1_1 + f;
    const bf16* x = a.x + (i64)t * a.x_1;
    float gate = bf16_round(dot_row(a.w1, a.w1_scale, n, a.x_1, x, lane));
    float up = bf16_round(dot_row(a.w3, a.w3_scale, n, a.x_1, x, lane));
    if (lane == 0) store(a.y, (i64)chosen * a.w1_1 + f, a.weight[chosen] * swiglu(gate, up, a.limit));
}
