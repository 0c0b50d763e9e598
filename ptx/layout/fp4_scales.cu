// Stored scales of FP4 codes, put beside their tiles (runtime/weights/layout.py says what goes where).
// Shapes: x [N, K/32] u8; y [ceil(N/32), K/32, 32] u8.
// Threads: one for each 16 bytes of y, four rows of each of four lanes; beyond the matrix they are zero.
// Shared memory: none. Runs once a weight, behind its copy to the device.
#include <uf/types.cuh>

extern "C" __global__ void __launch_bounds__(256) uf_fp4_scales(const Args a) {
    i64 thread = (i64)blockIdx.x * 256 + threadIdx.x;
    if (thread >= UF_SIZE(y) / 16) return;
    i64 tile = thread / 2;
#pragma unroll
    for (int e = 0; e < 16; e++) {
        i64 n = tile / a.y_1 * 32 + 8 * (e % 4) + thread % 2 * 4 + e / 4;
        a.y[thread * 16 + e] = n < a.x_0 ? a.x[n * a.x_1 + tile % a.y_1] : 0;
    }
}
