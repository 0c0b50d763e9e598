// y = bf16(sum over copies of pre * x), copies in order (graphs/ops/hc_collapse.py).
// Shapes: x [T, C, D] bf16; pre [T, C] f32; y [T, D] bf16. D is even.
// Threads: grid (T, D / 512), two neighbouring elements a thread.
#include <uf/early.cuh>
#include <uf/vector.cuh>

extern "C" __global__ void uf_hc_collapse(const Args a) {
    Turn turn;
    int t = blockIdx.x, copies = a.x_1, dim = a.x_2, d = 2 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (d >= dim) return;
    i64 row = (i64)t * copies * dim + d;
    float2 sum = a.pre[t * copies] * load2(a.x, row);
#pragma unroll 4
    for (int c = 1; c < copies; c++) sum = sum + a.pre[t * copies + c] * load2(a.x, row + (i64)c * dim);
    store2(a.y, (i64)t * dim + d, sum);
}
