// Mean of the residual copies behind the means of earlier target layers (graphs/ops/stream_mean.py).
// Shapes: x [T, C, D] bf16; before [T, n*D] bf16 or absent; y [T, (n+1)*D] bf16. D is even.
// Threads: grid (T, (n+1) * D / 512), two neighbouring elements a thread.
#include <uf/early.cuh>
#include <uf/vector.cuh>

extern "C" __global__ void uf_stream_mean(const Args a) {
    Turn turn;
    int t = blockIdx.x, copies = a.x_1, dim = a.x_2, width = a.y_1 - dim;
    int i = 2 * (blockIdx.y * blockDim.x + threadIdx.x), d = i - width;
    if (i >= a.y_1) return;
#if UF_HAS_before
    if (d < 0) {
        *(u32*)(a.y + (i64)t * a.y_1 + i) = *(const u32*)(a.before + (i64)t * width + i);
        return;
    }
#endif
    i64 row = (i64)t * copies * dim + d;
    float2 sum = load2(a.x, row);
    for (int c = 1; c < copies; c++) sum = sum + load2(a.x, row + (i64)c * dim);
    store2(a.y, (i64)t * a.y_1 + i, make_float2(__fdiv_rn(sum.x, (float)copies), __fdiv_rn(sum.y, (float)copies)));
}
