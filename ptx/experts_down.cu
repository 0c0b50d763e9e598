// Each chosen expert's output (graphs/ops/experts_down.py).
// Shapes: z [T, k, F] bf16; ids [T, k]; w2 [N, D, F] fp4 + E8M0 1x32; y [T, k, D] bf16 | f32.
// Threads: grid (D / 4, T*k), a warp an output of one row and expert.
#include <uf/dot.cuh>

extern "C" __global__ void __launch_bounds__(128) uf_experts_down(const Args a) {
    int d = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, chosen = blockIdx.y;
    if (d >= a.w2_1) return;
    i64 n = (i64)a.ids[chosen] * a.w2_1 + d;
    float sum = dot_row(a.w2, a.w2_scale, n, a.w2_2, a.z + (i64)chosen * a.w2_2, lane);
    if (lane == 0) store(a.y, (i64)chosen * a.w2_1 + d, sum);
}
