// score_j = sum_h relu(q_h . key_j) * weight_h * scale for reachable entries, else -inf (graphs/ops/index_scores.py).
// Shapes: q [T, Hi, I] bf16; weight [T, Hi] bf16; codes [slots, entries, I/2]; scales [slots, entries, I/32];
// pool [T, blocks] or absent; y [T, places] f32: a place is an entry, with a pool one of the row's own blocks.
// Threads: grid (blocks of 256 places in turn, T / ROWS); a warp takes 32 places and all heads of ROWS rows.
// Shared memory: the rows' queries in the order of the tensor core's second operand, their weights, their runs.
// Dots of FP4 values with neighbouring scales are exact in fp32; the sum over heads has one order whatever the rows.
#include <uf/attend_mma.cuh>
#include <uf/early.cuh>

constexpr int SCORE_THREADS = 256, BLOCK = 256, DIM = UF_DIM, STEPS = DIM / 16, WORDS = DIM / 32;
constexpr int HEADS = UF_HEADS, COLUMNS = UF_COLUMNS, ROWS = COLUMNS / HEADS;  // heads: a power of two, at least 2
constexpr int UNIT_TILES = HEADS > 8 ? HEADS / 8 : 1, UNIT_ROWS = HEADS < 8 ? 8 / HEADS : 1;  // whole rows, whole tiles
constexpr int SHARE = HEADS < 8 ? HEADS / 2 : 4;  // neighbouring lanes that hold one row's sums
static_assert(DIM % 32 == 0 && DIM <= 128 && COLUMNS % 8 == 0, "a lane holds a quarter of a key");

struct Run { int start, end, slot, reach; };  // rows that follow each other and share keys; places that they reach
struct ScoreShared {
    uint2 query[COLUMNS / 8 * STEPS * 32];
    float weight[COLUMNS];
    Run run[ROWS];
    int runs;
};
static_assert(sizeof(ScoreShared) <= UF_SHARED, "score_shared of index_scores.py is too small");

struct Entries { u32 codes[4][WORDS], scale[4]; };  // a lane's quarter of four entries

extern __shared__ __align__(16) u8 work[];

// A lane reads its quarter of an entry at once, so the tensor core gets the dimensions in another order: the same for
// both operands. Of each 8 elements of a quarter a step takes pairs (0, 4) and (1, 5), the next one (2, 6) and (3, 7).
UF_DEVICE void fetch_rows(ScoreShared& s, const Args& a, int first, int rows) {
    for (int i = threadIdx.x; i < (rows * HEADS + 7) / 8 * STEPS * 32; i += SCORE_THREADS) {
        int lane = i % 32, step = i / 32 % STEPS, column = i / 32 / STEPS * 8 + lane / 4;
        int row = column / HEADS, head = column % HEADS;
        bool real = row < rows && head < a.q_1;
        i64 at = ((i64)(first + row) * a.q_1 + head) * DIM + lane % 4 * (DIM / 4) + step / 2 * 8 + step % 2 * 2;
        u32 low = real ? *(const u32*)(a.q + at) : 0u, high = real ? *(const u32*)(a.q + at + 4) : 0u;
        s.query[i] = make_uint2(__byte_perm(low, high, 0x5410u), __byte_perm(low, high, 0x7632u));
    }
    for (int i = threadIdx.x; i < COLUMNS; i += SCORE_THREADS) {
        int row = i / HEADS, head = i % HEADS;
        bool real = row < rows && head < a.q_1;
        s.weight[i] = real ? load(a.weight, (i64)(first + row) * a.q_1 + head) * a.scale * UNSCALED : 0.0f;
    }
    if (threadIdx.x == 0) {
        int runs = 0;
        for (int r = 0; r < rows; r++) {
            int slot = a.slot[first + r], reach = slot < 0 ? 0 : (a.position[first + r] + 1) / a.ratio;
            if (UF_HAS_pool) reach = min(a.y_1, (reach + a.block_size - 1) / a.block_size * a.block_size);
            if (!UF_HAS_pool && runs && s.run[runs - 1].slot == slot) {
                s.run[runs - 1].end = r + 1;
                s.run[runs - 1].reach = max(s.run[runs - 1].reach, reach);
            } else s.run[runs++] = {r, r + 1, slot, reach};
        }
        s.runs = runs;
    }
}

// The entry that stands at a place; far away where there is none.
UF_DEVICE int entry_at(const Args& a, int row, int place) {
#if UF_HAS_pool
    if (place >= a.y_1) return 0x7FFFFFFF;
    int block = a.pool[(i64)row * a.pool_1 + place / a.block_size];
    return block < 0 ? 0x7FFFFFFF : block * a.block_size + place % a.block_size;
#else
    return place;
#endif
}

UF_DEVICE void fetch_entries(Entries& e, const Args& a, const Run& run, int first, int base, int lane) {
    if (base >= run.reach) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int entry = entry_at(a, first + run.start, base + 8 * i + lane / 4);
        i64 at = (i64)run.slot * a.codes_1 + min(entry, a.codes_1 - 1);
        const u32* codes = (const u32*)(a.codes + at * (DIM / 2)) + lane % 4 * WORDS;
        if (WORDS == 4) *(uint4*)e.codes[i] = *(const uint4*)codes;
        else
#pragma unroll
            for (int w = 0; w < WORDS; w++) e.codes[i][w] = codes[w];
        e.scale[i] = a.scales[at * (DIM / 32) + lane % 4 * DIM / 128];
    }
}

// Entries 16m + lane/4 (+ 8) as the tensor core's first operand.
UF_DEVICE void unpack(u32 (&key)[2][STEPS][4], const Entries& e) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 scale = e8m0_over_e2m1(e.scale[i]);
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int p = 0; p < 2; p++)
                key[i / 2][step][i % 2 + 2 * p] = e2m1_pair(e.codes[i][step / 2], step % 2 * 2 + p, scale);
    }
}

// Scores of 32 entries for the rows of a unit: sum[2m + i] of entry 16m + 8i + lane/4.
UF_DEVICE void score(const ScoreShared& s, const u32 (&key)[2][STEPS][4], int unit, int lane, float (&sum)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = 0.0f;
#pragma unroll 1
    for (int n = 0; n < UNIT_TILES; n++) {
        int tile = unit * UNIT_TILES + n;
        float dot[2][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint2 q = s.query[(tile * STEPS + step) * 32 + lane];
            mma(dot[0], key[0][step], q.x, q.y);
            mma(dot[1], key[1][step], q.x, q.y);
        }
        float2 w = *(const float2*)(s.weight + tile * 8 + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum[i] = fmaf(fmaxf(dot[i / 2][i % 2 * 2], 0.0f), w.x, sum[i]);
            sum[i] = fmaf(fmaxf(dot[i / 2][i % 2 * 2 + 1], 0.0f), w.y, sum[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (SHARE > 1) sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], 1);
        if (SHARE > 2) sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], 2);
    }
}

extern "C" __global__ void __launch_bounds__(SCORE_THREADS, 2) uf_index_scores(const Args a) {
    Turn turn;
    ScoreShared& s = *(ScoreShared*)work;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * ROWS, rows = min(ROWS, a.y_0 - first);
    float none = from_bits(0xFF800000u);
    fetch_rows(s, a, first, rows);
    __syncthreads();
    int base = blockIdx.x * BLOCK + warp * 32, number = 0;
    Entries now = {}, ahead = {};
    fetch_entries(now, a, s.run[0], first, base, lane);
    while (base < a.y_1) {
        Run run = s.run[number];
        int at = base;
        if (++number == s.runs) number = 0, base += gridDim.x * BLOCK;
        fetch_entries(ahead, a, s.run[number], first, base, lane);
        if (at >= run.reach) {
            for (int r = run.start; r < run.end; r++)
                if (at + lane < a.y_1) a.y[(i64)(first + r) * a.y_1 + at + lane] = none;
        } else {
            u32 key[2][STEPS][4];
            unpack(key, now);
            for (int unit = run.start / UNIT_ROWS; unit <= (run.end - 1) / UNIT_ROWS; unit++) {
                float sum[4];
                score(s, key, unit, lane, sum);
                int r = unit * UNIT_ROWS + lane % 4 / SHARE;
                bool own = r >= run.start && r < run.end;
                int reach = own ? (a.position[first + r] + 1) / a.ratio : 0;
                float* y = a.y + (i64)(first + r) * a.y_1;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int place = at + 8 * i + lane / 4;
                    if (own && i % SHARE == lane % SHARE && place < a.y_1)
                        y[place] = entry_at(a, first + r, place) < reach ? sum[i] : none;
                }
            }
        }
        now = ahead;
    }
}
