// y = x . w^T of exactly dequantised operands: every linear of the model (graphs/ops/linear.py).
// Shapes: x [T, G*K] bf16; w [N, K] fp8 + E8M0 32x32 | bf16 | f32; y [T, N] bf16 | f32.
// Threads: a warp an output column; lanes stride over K four elements at a time, eight rows at once.
// Order of a sum: a lane's own elements ascending, then a tree over lanes, whatever the rows.
// Shared memory: none. Limited by reading w, once for each eight rows.
#include <uf/dot.cuh>

#if UF_SCALED_w
UF_DEVICE const u8* scale_of(const Args& a) { return a.w_scale; }
#else
UF_DEVICE const u8* scale_of(const Args& a) { return nullptr; }
#endif

extern "C" __global__ void __launch_bounds__(128) uf_linear(const Args a) {
    int n = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= a.w_0) return;
    int size = a.w_1, group = n / (a.w_0 / a.groups);
    for (int first = 0; first < a.x_0; first += ROWS) {
        const bf16* x[ROWS];
        for (int r = 0; r < ROWS; r++)
            x[r] = a.x + (i64)min(first + r, a.x_0 - 1) * a.x_1 + group * size;
        float sum[ROWS];
        dot_rows(a.w, scale_of(a), n, size, x, lane, sum);
        if (lane < ROWS && first + lane < a.x_0) {
            float mine = 0.0f;
            for (int r = 0; r < ROWS; r++) mine = lane == r ? sum[r] : mine;
            store(a.y, (i64)(first + lane) * a.y_1 + n, mine);
        }
    }
}
