// z = bf16(weight * swiglu(x w1, x w3)) of each chosen expert (graphs/ops/experts_up.py).
// Shapes: x [T, D] bf16; ids [T, k]; weight [T, k] f32; w1, w3 [N, F, D] fp4 in tiles + E8M0; y [T, k, F] bf16;
// many rows have order [T k] and chunks [C, 3] of expert_rows.
// Threads: grid, warps, shared memory and the order of sums: uf/experts.cuh, uf/experts_wide.cuh. A unit is 32 gates
// and their 32 ups.
// Limited by reading each chosen expert once (few rows), by the tensor cores (many).
#include <uf/early.cuh>
#include <uf/experts.cuh>
#if UF_HAS_chunks
#include <uf/experts_wide.cuh>
#endif
#include <uf/swiglu.cuh>

extern "C" __global__ void __launch_bounds__(UF_THREADS, UF_CTAS) uf_experts_up(const Args a) {
    Turn turn;
    int blocks = a.x_1 / 32, units = (a.w1_1 + 31) / 32, k = a.ids_1, width = a.w1_1;
    auto unit = [&](int expert, int at, int lane) {
        i64 tile = (i64)expert * units + at;
        return Unit(a.w1, a.w1_scale, a.w3, a.w3_scale, tile, tile, blocks, lane);
    };
    auto row = [&](int pair) { return a.x + (i64)(pair / k) * a.x_1; };
    auto emit = [&](int pair, int at, int r, float gate, float up) {
        int f = at * 32 + r;
        if (f < width)
            store(a.y, (i64)pair * width + f, a.weight[pair] * swiglu(bf16_round(gate), bf16_round(up), a.limit));
    };
#if UF_HAS_chunks
    wide(a.chunks, a.order, units, blocks, unit, row, emit);
#else
    narrow(a.ids, a.ids_0 * k, units, blocks, unit, row, emit);
#endif
}
