// Many rows an expert: 64 of them at a time through a CTA, whose warps have a unit each (prefill).
//
// Rows come through a ring in shared memory that all warps read, weights straight from memory to the warp that needs
// them. The sums are those of uf/experts.cuh, bit for bit: a warp walks the parts one behind the other, and keeps what
// is folded so far in shared memory.
#include <uf/experts.cuh>

constexpr int WIDE = 64, GROUPS = WIDE / COLUMNS, WIDE_WARPS = 4;  // graphs/ops/experts_up.py has the same
constexpr int STEP = 2, STAGES = 4, AHEAD = 2;                     // blocks of a stage of the ring; slabs on their way
constexpr int STAGE_BYTES = STEP * WIDE * 64, FOLD_FLOATS = GROUPS * 16 * 32;

extern __shared__ u8 wide_shared[];  // STAGES stages, then, if there are parts, FOLD_FLOATS a warp

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

// Stage `number` of the ring: blocks STEP * number and on, lane by lane as `multiply` wants them.
UF_DEVICE void fill(const bf16* const* rows, int groups, int blocks, int number) {
    u8* stage = wide_shared + number % STAGES * STAGE_BYTES;
    for (int v = threadIdx.x; v < STEP * WIDE * 4; v += WIDE_WARPS * 32) {
        int column = v / 4 % WIDE, block = number * STEP + v / (4 * WIDE);
        if (column < groups * COLUMNS && block < blocks)
            copy16(stage + v * 16, rows[column] + block * 32 + v % 4 * 8);
    }
    close_group();
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
    float* folded = (float*)(wide_shared + STAGES * STAGE_BYTES) + warp * FOLD_FLOATS;
    Slab slab[AHEAD];
#pragma unroll
    for (int d = 0; d < AHEAD; d++)
        if (d < blocks) unit.fetch(slab[d], d);
    for (int n = 0; n < STAGES - 1; n++) fill(rows, groups, blocks, n);
    int part = 0, part_end = part_start(1, parts, blocks);
    for (int n = 0; n * STEP < blocks; n++) {
        copies_arrived<STAGES - 2>();
        __syncthreads();  // this stage is there, and everybody is done with the one before it
        fill(rows, groups, blocks, n + STAGES - 1);
        const uint4* stage = (const uint4*)(wide_shared + n % STAGES * STAGE_BYTES);
#pragma unroll
        for (int d = 0; d < STEP; d++) {
            int block = n * STEP + d;
            if (block >= blocks || !busy) break;
            if (block == part_end) {
                fold(sum, folded, part++, false, lane);
                part_end = part_start(part + 1, parts, blocks);
            }
            Operand w(slab[d % AHEAD]);
            if (block + AHEAD < blocks) unit.fetch(slab[d % AHEAD], block + AHEAD);
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                if (g < groups) multiply(w, raised(stage[(d * GROUPS + g) * 32 + lane]), sum[g]);
        }
    }
    if (!busy) return;
    if (parts > 1) fold(sum, folded, part, true, lane);
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            for (int c = 0; c < 2; c++) {
                int column = g * COLUMNS + lane % 4 * 2 + c;
                if (column < count) emit(pairs[column], at, 8 * j + lane / 4, sum[g][j][c], sum[g][j][2 + c]);
            }
}
