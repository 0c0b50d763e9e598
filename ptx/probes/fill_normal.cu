// Normal random numbers (runtime/gpu/fill.py): y = mean + deviation * n.
// Shapes: y [m, n] bf16 | f32. Elements 4i .. 4i + 3 are made of Philox counter i, two by two (Box and Muller).
// Threads: any number of CTAs stride over y, four elements a thread. Shared memory: none.
#include <uf/philox.cuh>

constexpr int THREADS = 256;

UF_DEVICE float unit(u32 word) { return ((float)word + 0.5f) * 2.3283064365386963e-10f; }

extern "C" __global__ void __launch_bounds__(THREADS) uf_fill_normal(const Args a) {
    u64 key = (u64)(u32)a.key_high << 32 | (u32)a.key_low;
    i64 n = UF_SIZE(y), step = (i64)gridDim.x * THREADS;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i * 4 < n; i += step) {
        Words w = philox(key, {(u32)i, (u32)(i >> 32), 0, 0});
        float long_one = sqrtf(-2.0f * logf(unit(w.a))), angle = 2.0f * unit(w.b);
        float long_two = sqrtf(-2.0f * logf(unit(w.c))), other = 2.0f * unit(w.d);
        float z[4] = {long_one * cospif(angle), long_one * sinpif(angle), long_two * cospif(other), long_two * sinpif(other)};
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i * 4 + j < n) store(a.y, i * 4 + j, a.mean + a.deviation * z[j]);
    }
}
