// The named table rows as exact bf16 values, side by side (graphs/ops/engram_gather.py).
// Shapes: rows [T, columns] i64; table [R, dim] E4M3 + E8M0 1x32; y [T, columns*dim] bf16.
// Threads: grid (columns, T), a thread an element.
#include <uf/early.cuh>

extern "C" __global__ void uf_engram_gather(const Args a) {
    Turn turn;
    int column = blockIdx.x, t = blockIdx.y, dim = a.table_1;
    i64 row = a.rows[(i64)t * a.rows_1 + column];
    for (int d = threadIdx.x; d < dim; d += blockDim.x)
        store(a.y, ((i64)t * a.rows_1 + column) * dim + d,
              e4m3_value(a.table[row * dim + d].code) * e8m0_value(a.table_scale[row * (dim / 32) + d / 32]));
}
