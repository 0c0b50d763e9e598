// Copies io from pinned host memory, or a record to it (runtime/gpu/runner.py). A graph of kernels alone is launched in
// 4 us; with copy nodes among 550 kernels it took 8, and a copy between two events no less than this kernel.
// Shapes: x, y [n] u64, n even. Threads: one CTA, 16 bytes a thread at a time. Limited by the bus's latency.
#include <uf/types.cuh>

extern "C" __global__ void uf_copy_words(const Args a) {
    const longlong2* x = (const longlong2*)a.x;
    longlong2* y = (longlong2*)a.y;
    for (i64 i = threadIdx.x; i < UF_SIZE(x) / 2; i += blockDim.x) y[i] = x[i];
}
