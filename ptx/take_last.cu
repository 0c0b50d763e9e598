// The last row of each sequence; sequences without rows give row 0 (graphs/ops/take_last.py).
// Shapes: x [T, ...]; row_start [S+1]; y [S, ...]. Threads: a CTA a sequence.
#include <uf/early.cuh>

extern "C" __global__ void uf_take_last(const Args a) {
    Turn turn;
    int s = blockIdx.x;
    i64 width = UF_SIZE(y) / a.y_0, row = max(a.row_start[s + 1] - 1, 0);
    for (i64 i = threadIdx.x; i < width; i += blockDim.x) a.y[s * width + i] = a.x[row * width + i];
}
