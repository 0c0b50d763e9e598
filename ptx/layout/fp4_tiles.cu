// Stored FP4 codes to tiles of 32 rows x 32 columns (runtime/weights/layout.py says what goes where).
// Shapes: x [N, K/2] u8, low nibble = even k; y [ceil(N/32), K/32, 512] u8.
// Threads: one for each 16 bytes of y, a word of four rows; beyond the matrix codes are zero.
// Shared memory: none. Runs once a weight, behind its copy to the device, and is far faster than that.
#include <uf/fp4.cuh>

extern "C" __global__ void __launch_bounds__(256) uf_fp4_tiles(const Args a) {
    i64 thread = (i64)blockIdx.x * 256 + threadIdx.x;
    if (thread >= UF_SIZE(y) / 16) return;
    int lane = (int)(thread % 32);
    i64 tile = thread / 32;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        i64 n = tile / a.y_1 * 32 + 8 * j + lane / 4;
        i64 k = tile % a.y_1 * 16 + lane % 4 * 4;
        u32 word = 0;
        if (n < a.x_0)
            for (int b = 0; b < 4; b++) word |= (u32)a.x[n * a.x_1 + k + b] << (8 * b);
        word = fp4_packed(word);
        for (int b = 0; b < 4; b++) a.y[thread * 16 + 4 * j + b] = (u8)(word >> (8 * b));
    }
}
