// Random codes, scales or bytes of any distribution (runtime/gpu/fill.py): y_i = table[random byte].
// Shapes: y [m, n] u8; table [256] u8. Byte i of y comes from byte i % 16 of Philox counter i / 16.
// Threads: any number of CTAs stride over y, 16 bytes a thread. Shared memory: the table.
// Limited by the integer arithmetic of Philox, about half of what memory takes.
#include <uf/philox.cuh>

constexpr int THREADS = 256;

UF_DEVICE u32 looked_up(const u8* table, u32 word) {
    return table[word & 255u] | table[word >> 8 & 255u] << 8 | table[word >> 16 & 255u] << 16 |
           (u32)table[word >> 24] << 24;
}

extern "C" __global__ void __launch_bounds__(THREADS) uf_fill_codes(const Args a) {
    __shared__ u8 table[THREADS];
    table[threadIdx.x] = a.table[threadIdx.x];
    __syncthreads();
    u64 key = (u64)(u32)a.key_high << 32 | (u32)a.key_low;
    i64 n = UF_SIZE(y), step = (i64)gridDim.x * THREADS;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i * 16 < n; i += step) {
        Words w = philox(key, {(u32)i, (u32)(i >> 32), 0, 0});
        u32 words[4] = {looked_up(table, w.a), looked_up(table, w.b), looked_up(table, w.c), looked_up(table, w.d)};
        if (i * 16 + 16 <= n) {
            ((uint4*)a.y)[i] = make_uint4(words[0], words[1], words[2], words[3]);
            continue;
        }
#pragma unroll
        for (int j = 0; j < 16; j++)
            if (i * 16 + j < n) a.y[i * 16 + j] = (u8)(words[j / 4] >> (j % 4 * 8));
    }
}
