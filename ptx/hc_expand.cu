// x'_j = bf16(post_j * out + sum_i comb_ij x_i), copies in order (graphs/ops/hc_expand.py).
// Shapes: out [T, D] bf16; x, y [T, C, D] bf16; post [T, C] f32; comb [T, C, C] f32. D is even, C at most 4.
// Threads: grid (T, D / 512), two neighbouring elements a thread. Limited by latency, with many rows by memory.
#include <uf/early.cuh>
#include <uf/vector.cuh>

constexpr int COPIES = 4;

extern "C" __global__ void uf_hc_expand(const Args a) {
    Turn turn;
    int t = blockIdx.x, copies = a.x_1, dim = a.x_2, d = 2 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (d >= dim) return;
    const float* comb = a.comb + t * copies * copies;
    i64 row = (i64)t * copies * dim + d;
    float2 out = load2(a.out, (i64)t * dim + d), x[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; i++)
        if (i < copies) x[i] = load2(a.x, row + (i64)i * dim);
#pragma unroll
    for (int j = 0; j < COPIES; j++) {
        if (j >= copies) return;
        float2 sum = comb[j] * x[0];
#pragma unroll
        for (int i = 1; i < COPIES; i++)
            if (i < copies) sum = sum + comb[i * copies + j] * x[i];
        store2(a.y, row + (i64)j * dim, a.post[t * copies + j] * out + sum);
    }
}
