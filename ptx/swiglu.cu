// The shared expert's activation (graphs/ops/swiglu.py). Shapes: gate, up, y [T, F] bf16. Threads: one an element.
#include <uf/early.cuh>
#include <uf/swiglu.cuh>

extern "C" __global__ void uf_swiglu(const Args a) {
    take_turn();
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < UF_SIZE(y)) store(a.y, i, swiglu(load(a.gate, i), load(a.up, i), a.limit));
}
