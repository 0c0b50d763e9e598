// Each chosen expert's output (graphs/ops/experts_down.py).
// Shapes: z [T, k, F] bf16; ids [T, k]; w2 [N, D, F] fp4 in tiles + E8M0; y [T, k, D] bf16 | f32; many rows have
// order [T k] and chunks [C, 3] of expert_rows.
// Threads: grid, warps, shared memory and the order of sums: uf/experts.cuh, uf/experts_wide.cuh. A unit is 64 outputs,
// two rows of tiles.
// Limited by reading each chosen expert once (few rows), by the tensor cores (many).
#include <uf/early.cuh>
#include <uf/experts.cuh>
#if UF_HAS_chunks
#include <uf/experts_wide.cuh>
#endif

extern "C" __global__ void __launch_bounds__(UF_THREADS, UF_CTAS) uf_experts_down(const Args a) {
    Turn turn;
    int blocks = a.z_2 / 32, dim = a.w2_1, tiles = (dim + 31) / 32, units = (tiles + 1) / 2;
    auto unit = [&](int expert, int at, int lane) {
        i64 first = (i64)expert * tiles, last = tiles - 1;
        return Unit(a.w2, a.w2_scale, a.w2, a.w2_scale, first + 2 * at, first + min((i64)2 * at + 1, last), blocks, lane);
    };
    auto row = [&](int pair) { return a.z + (i64)pair * a.z_2; };
    auto emit = [&](int pair, int at, int r, float one, float two) {
        int d = at * UNIT + r;
        if (d < dim) store(a.y, (i64)pair * dim + d, one);
        if (d + 32 < dim) store(a.y, (i64)pair * dim + d + 32, two);
    };
#if UF_HAS_chunks
    wide(a.chunks, a.order, units, blocks, unit, row, emit);
#else
    narrow(a.ids, a.ids_0 * a.ids_1, units, blocks, unit, row, emit);
#endif
}
