// Stored matrices to tiles of 16 rows x 32 columns (runtime/weights/layout.py says what goes where).
// Shapes: x [N, K] u8 (E4M3 codes) | bf16; y [ceil(N/16), ceil(K/32), 512] of the same type.
// Threads: one for each 16 bytes of y, which gathers its elements; beyond the matrix they are zero.
// Shared memory: none. Runs once a weight, behind its copy to the device, and is far faster than that.
#include <uf/types.cuh>

// Row and column, within a tile, of element `e` of the 16 bytes number `at` of the tile.
UF_DEVICE void source(const u8*, int at, int e, int& row, int& column) {
    row = at / 4 + 8 * (e / 4 % 2);
    column = at % 4 * 8 + e / 8 * 4 + e % 2 * 2 + e / 2 % 2;
}
UF_DEVICE void source(const bf16*, int at, int e, int& row, int& column) {
    row = at % 32 / 4 + 8 * (e / 2 % 2);
    column = at % 4 * 8 + at / 32 * 4 + e / 4 * 2 + e % 2;
}
UF_DEVICE u8 zero(const u8*) { return 0; }
UF_DEVICE bf16 zero(const bf16*) { return {0}; }

extern "C" __global__ void __launch_bounds__(256) uf_tiles(const Args a) {
    constexpr int MANY = 16 / sizeof(*a.x);
    i64 thread = (i64)blockIdx.x * 256 + threadIdx.x;
    if (thread >= UF_SIZE(y) / MANY) return;
    int at = (int)(thread % (512 / MANY));
    i64 tile = thread / (512 / MANY);
#pragma unroll
    for (int e = 0; e < MANY; e++) {
        int row, column;
        source(a.x, at, e, row, column);
        i64 n = tile / a.y_1 * 16 + row;
        int k = (int)(tile % a.y_1) * 32 + column;
        a.y[thread * MANY + e] = n < a.x_0 && k < a.x_1 ? a.x[n * a.x_1 + k] : zero(a.x);
    }
}
