// y = the sum of all ranks' x in fp32, rank 0 first, rounded once (graphs/ops/all_reduce.py).
// Shapes: x [T, ...] f32, y the same, bf16 or f32. Threads: four values each, going round (uf/exchange.cuh).
#include <uf/early.cuh>
#include <uf/exchange.cuh>

extern "C" __global__ void __launch_bounds__(256, 1) uf_all_reduce(const __grid_constant__ Args a) {
    Turn turn;
    auto use = [&](i64 at, float4 sum) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (at + i < UF_SIZE(x)) store(a.y, at + i, (&sum.x)[i]);
    };
#if UF_SLICED
    exchange_slices(a.exchange, a.x, UF_SIZE(x), use);
#else
    exchange(a.exchange, a.x, UF_SIZE(x), [&](i64 at, const Words(&parts)[MAX_WORLD]) { use(at, sum_of(a.exchange, parts)); });
#endif
}
