// y = all ranks' columns side by side, rank 0 first (graphs/ops/all_gather.py).
// Shapes: x [T, N] f32, y [T, world*N] f32. Threads: four values each, going round (uf/exchange.cuh).
#include <uf/early.cuh>
#include <uf/exchange.cuh>

extern "C" __global__ void __launch_bounds__(256, 1) uf_all_gather(const __grid_constant__ Args a) {
    Turn turn;
    exchange(a.exchange, a.x, UF_SIZE(x), [&](i64 at, const Words(&parts)[MAX_WORLD]) {
        i64 row = at / a.x_1;
        int column = (int)(at - row * a.x_1);
        float* y = a.y + row * a.y_1;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (at + i >= UF_SIZE(x)) break;
#pragma unroll
            for (int r = 0; r < MAX_WORLD; r++)
                if (r < a.exchange.world) y[r * a.x_1 + column] = from_bits(parts[r].w[i]);
            if (++column == a.x_1) column = 0, y += a.y_1;
        }
    });
}
