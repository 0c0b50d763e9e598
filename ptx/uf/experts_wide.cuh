// Many rows an expert: UF_WIDE of them at a time through a CTA, whose warps have a unit each (prefill).
//
// Rows come through a ring in shared memory that all warps read, weights straight from memory to the warp that needs
// them. The sums are those of uf/experts.cuh, bit for bit: a warp walks the parts one behind the other, and keeps what
// is folded so far in shared memory.
#include <uf/experts.cuh>

constexpr int WIDE = UF_WIDE, GROUPS = WIDE / COLUMNS, WIDE_WARPS = UF_THREADS / 32;
constexpr int STAGES = UF_STAGES;  // of the ring, a block of 32 k each: rows for all warps, then a slab for each
constexpr int ROWS_BYTES = WIDE * 64, STAGE_BYTES = ROWS_BYTES + WIDE_WARPS * SLAB, FOLD_FLOATS = GROUPS * 16 * 32;
// Shared memory: STAGES stages, then, if there are parts, FOLD_FLOATS a warp.

// A warp's sums of all columns, [group][j][c]; the part that ends is added to those before it.
UF_DEVICE void fold(float (*sum)[4][4], float* folded, int part, bool last, int lane) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float4* at = (float4*)folded + (g * 4 + j) * 32 + lane;
            float4 all = make_float4(sum[g][j][0], sum[g][j][1], sum[g][j][2], sum[g][j][3]);
            if (part > 0) {
                float4 before = *at;
                all = make_float4(before.x + all.x, before.y + all.y, before.z + all.z, before.w + all.w);
            }
            if (!last) *at = all;
            sum[g][j][0] = last ? all.x : 0.0f, sum[g][j][1] = last ? all.y : 0.0f;
            sum[g][j][2] = last ? all.z : 0.0f, sum[g][j][3] = last ? all.w : 0.0f;
        }
}

// A stage of the ring for one block: rows lane by lane as `multiply` wants them, and the warp's own slab, of which `unit`
// goes on to the next.
UF_DEVICE void fill(u8* stage, const bf16* const* rows, int groups, Unit& unit, bool busy, int block) {
#pragma unroll
    for (int i = 0; i < WIDE * 4; i += UF_THREADS) {
        int v = i + threadIdx.x, column = v / 4;
        if (column < groups * COLUMNS) copy16(stage + v * 16, rows[column] + block * 32 + v % 4 * 8);
    }
    if (busy) unit.send(stage + ROWS_BYTES + threadIdx.x / 32 * SLAB, 0, threadIdx.x % 32);
    unit.advance();
}

// The first G groups of columns: without a branch between them, so that their instructions mix.
template <int G> UF_DEVICE void multiply_groups(const Operand& w, const uint4* rows, int lane, float (*sum)[4][4]) {
#pragma unroll
    for (int g = 0; g < G; g++) multiply(w, raised(rows[g * 32 + lane]), sum[g]);
}

// CTAs: x over groups of units, y over chunks [C, 3] (expert, start in `order`, count); row and emit as in `narrow`.
template <class Units, class Row, class Emit>
UF_DEVICE void wide(const int* chunks, const int* order, int units, int blocks, Units units_of, Row row, Emit emit) {
    __shared__ int pairs[WIDE];
    __shared__ const bf16* rows[WIDE];
    const int* chunk = chunks + blockIdx.y * 3;
    int expert = chunk[0], start = chunk[1], count = chunk[2], groups = (count + COLUMNS - 1) / COLUMNS;
    if (count == 0) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, parts = parts_of(blocks);
    if (threadIdx.x < WIDE) {
        int c = threadIdx.x;
        pairs[c] = order[start + min(c, count - 1)];  // columns beyond the last are not looked at
        rows[c] = row(pairs[c]);
    }
    __syncthreads();
    int at = blockIdx.x * WIDE_WARPS + warp;
    bool busy = at < units;
    Unit unit = units_of(expert, min(at, units - 1), lane);
    float sum[GROUPS][4][4] = {};
    float* folded = (float*)(experts_shared + STAGES * STAGE_BYTES) + warp * FOLD_FLOATS;
    groups = groups > 4 ? GROUPS : groups > 2 ? 4 : groups;
    int from = 0, to = 0;
    auto send = [&](int block) {
        if (block < blocks) fill(experts_shared + to * STAGE_BYTES, rows, groups, unit, busy, block);
        close_group();
        to = to == STAGES - 1 ? 0 : to + 1;
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) send(i);
    for (int part = 0, block = 0; part < parts; part++) {
        for (int end = part_start(part + 1, parts, blocks); block < end; block++) {
            copies_arrived<STAGES - 2>();
            __syncthreads();  // this stage is there, and everybody is done with the one before it
            send(block + STAGES - 1);
            const u8* stage = experts_shared + from * STAGE_BYTES;
            from = from == STAGES - 1 ? 0 : from + 1;
            if (!busy) continue;
            Operand w(stage + ROWS_BYTES + warp * SLAB, lane);
            const uint4* own = (const uint4*)stage;
            constexpr int HALF = GROUPS / 2;
            if (groups == 1) multiply_groups<1>(w, own, lane, sum);
            else if (groups == 2 && HALF > 2) multiply_groups<2>(w, own, lane, sum);
            else {
                multiply_groups<HALF>(w, own, lane, sum);
                if (groups > HALF) multiply_groups<HALF>(w, own + HALF * 32, lane, sum + HALF);
            }
        }
        if (busy && parts > 1) fold(sum, folded, part, part == parts - 1, lane);
    }
    if (!busy) return;
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            for (int c = 0; c < 2; c++) {
                int column = g * COLUMNS + lane % 4 * 2 + c;
                if (column < count) emit(pairs[column], at, 8 * j + lane / 4, sum[g][j][c], sum[g][j][2 + c]);
            }
}
