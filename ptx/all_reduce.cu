// y = the sum of all ranks' x in fp32, rank 0 first, rounded once (graphs/ops/all_reduce.py).
// Shapes: x [T, ...] f32, y the same, bf16 or f32. Threads: four values each, going round (uf/exchange.cuh).
#include <uf/early.cuh>
#include <uf/exchange.cuh>

extern "C" __global__ void __launch_bounds__(256, 1) uf_all_reduce(const __grid_constant__ Args a) {
    Turn turn;
    exchange(a.exchange, a.x, UF_SIZE(x), [&](i64 at, const Words(&parts)[MAX_WORLD]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float sum = from_bits(parts[0].w[i]);
#pragma unroll
            for (int r = 1; r < MAX_WORLD; r++)
                if (r < a.exchange.world) sum = sum + from_bits(parts[r].w[i]);
            if (at + i < UF_SIZE(x)) store(a.y, at + i, sum);
        }
    });
}
