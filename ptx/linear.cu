// y = x . w^T of exactly dequantised operands: every linear of the model (graphs/ops/linear.py).
// Shapes: x [T, G*K] bf16; w [N, K] fp8 + E8M0 32x32 | bf16, in tiles (runtime/weights/layout.py); y [T, N] bf16 | f32.
// Order of a sum: K falls into PARTS parts of whole tiles; a part is one chain of products (two a tile of 32 k, the
//   weights always the first operand), the parts are added in ascending order. Nothing of it depends on rows or on which
//   of the two kernels runs: few rows, where a warp takes a part, or many, where a warp takes all parts one by one.
// Threads, few rows: a CTA takes M_TILES tiles of 16 columns at a time and 8 N_TILES rows. Many: 128 columns x 128 rows.
// Shared memory: operands under way. Few rows: each lane copies what it reads itself, so that no barrier is needed.
// Limited by reading w (few rows), by the tensor cores (many).
#include <uf/early.cuh>
#include <uf/mma.cuh>

constexpr int THREADS = UF_THREADS, PARTS = UF_PARTS;
constexpr int PIECES = UF_SCALED_w ? 1 : 2;  // of 16 bytes that a lane has of a tile of w
constexpr int M_TILES = UF_M_TILES, N_TILES = UF_N_TILES, UNROLL = UF_UNROLL, DEPTH = UF_DEPTH, AHEAD = UF_AHEAD;

struct Sizes {
    int blocks, part;   // tiles along K, of which a part has so many
    int tiles, groups;  // tiles along N, groups of them
    UF_DEVICE explicit Sizes(const Args& a) {
        blocks = (a.w_1 + 31) / 32, part = (blocks + PARTS - 1) / PARTS;
        tiles = (a.w_0 + 15) / 16, groups = (tiles + M_TILES - 1) / M_TILES;
    }
};
struct Part {
    int first, last;
    UF_DEVICE Part(const Sizes& s, int number) {
        first = min(number * s.part, s.blocks), last = min(first + s.part, s.blocks);
    }
};

#if UF_SCALED_w
// Scales of up to 32 tiles in a row, a lane each; they are handed out in turn.
UF_DEVICE u32 scales_of(const Args& a, const Sizes& s, int tile, int block, int lane) {
    return tile < s.tiles && block + lane < s.blocks ? a.w_scale[(i64)(tile / 2) * s.blocks + block + lane] : 0;
}
#else
UF_DEVICE u32 scales_of(const Args&, const Sizes&, int, int, int) { return 0; }
#endif

// A lane's operands of a tile's two products.
UF_DEVICE void operands(const uint4* piece, u32 scale, u32 (&first)[4], u32 (&second)[4]) {
    uint4 v = piece[0];
#if UF_SCALED_w
    u32 factor = e4m3_factor(scale);
    e4m3_pairs(v.x, factor, first[0], first[2]);
    e4m3_pairs(v.y, factor, first[1], first[3]);
    e4m3_pairs(v.z, factor, second[0], second[2]);
    e4m3_pairs(v.w, factor, second[1], second[3]);
#else
    uint4 u = piece[32];
    first[0] = v.x, first[1] = v.y, first[2] = v.z, first[3] = v.w;
    second[0] = u.x, second[1] = u.y, second[2] = u.z, second[3] = u.w;
#endif
}

// A lane's four sums of a tile and eight rows: columns n and n + 8, rows `row` and `row` + 1.
UF_DEVICE void store_sums(const Args& a, int n, int row, const float (&sum)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (n + i / 2 * 8 < a.w_0 && row + i % 2 < a.x_0)
            store(a.y, (i64)(row + i % 2) * a.y_1 + n + i / 2 * 8, sum[i]);
}

#if UF_FEW
constexpr int BLOCK = (M_TILES * PIECES + N_TILES) * 32;  // BLOCK: of shared memory, in 16 bytes

// What a warp copies, in the order in which it is used: its part of one group of tiles after the other.
struct Source {
    const uint4* w[M_TILES];
    const bf16* x[N_TILES];
    bool real[N_TILES];  // others have no row: nothing reads what they would give
    int group, block;

    UF_DEVICE void enter(const Args& a, const Sizes& s, const Part& p, int lane) {
        block = p.first;
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            int tile = min(group * M_TILES + m, s.tiles - 1);
            w[m] = (const uint4*)a.w + ((i64)tile * s.blocks + p.first) * 32 * PIECES + lane;
        }
        int of = a.groups == 1 ? 0 : group * M_TILES * 16 / (a.w_0 / a.groups);
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            int row = (blockIdx.y * N_TILES + n) * 8 + lane / 4;
            real[n] = row < a.x_0;
            x[n] = a.x + (i64)row * a.x_1 + of * a.w_1 + p.first * 32 + lane % 4 * 8;
        }
    }
    UF_DEVICE void copy(const Args& a, const Sizes& s, const Part& p, int lane, uint4* slot, bool weights, bool rows) {
        if (group < s.groups) {
#pragma unroll
            for (int u = 0; u < UNROLL; u++, slot += BLOCK) {
                if (u && block + u == p.last) break;
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
#pragma unroll
                    for (int j = 0; j < PIECES; j++)
                        if (weights) copy16(slot + (m * PIECES + j) * 32, w[m] + (u * PIECES + j) * 32);
#pragma unroll
                for (int n = 0; n < N_TILES; n++)
                    if (rows && real[n]) copy16(slot + (M_TILES * PIECES + n) * 32, x[n] + u * 32);
            }
            block += UNROLL;
            if (block < p.last) {
#pragma unroll
                for (int m = 0; m < M_TILES; m++) w[m] += UNROLL * 32 * PIECES;
#pragma unroll
                for (int n = 0; n < N_TILES; n++) x[n] += UNROLL * 32;
            } else {
                group += gridDim.x;
                enter(a, s, p, lane);
            }
        }
    }
};

// The products of so many tiles along K.
template <int COUNT>
UF_DEVICE void multiply(const uint4* slot, const u32* scales, int turn, float (&sum)[M_TILES][N_TILES][4]) {
#pragma unroll
    for (int u = 0; u < COUNT; u++, slot += BLOCK) {
        uint4 x[N_TILES];
#pragma unroll
        for (int n = 0; n < N_TILES; n++) x[n] = slot[(M_TILES * PIECES + n) * 32];
        u32 one[M_TILES][4], two[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
            operands(slot + m * PIECES * 32, __shfl_sync(0xFFFFFFFFu, scales[m], turn + u), one[m], two[m]);
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int n = 0; n < N_TILES; n++) mma(sum[m][n], one[m], x[n].x, x[n].y);
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int n = 0; n < N_TILES; n++) mma(sum[m][n], two[m], x[n].z, x[n].w);
    }
}

// Adds the parts of a group of tiles, a warp for each tile and eight rows.
UF_DEVICE void fold(const Args& a, const Sizes& s, int group, int warp, int lane, const float4* sums) {
    for (int i = warp; i < M_TILES * N_TILES; i += PARTS) {
        float sum[4];
#pragma unroll
        for (int some = 0; some < PARTS; some += 8) {
            float4 part[8];
#pragma unroll
            for (int p = 0; p < 8; p++)
                if ((some + p) * s.part < s.blocks) part[p] = sums[((some + p) * M_TILES * N_TILES + i) * 32 + lane];
#pragma unroll
            for (int p = 0; p < 8; p++)
                if (some + p == 0) sum[0] = part[0].x, sum[1] = part[0].y, sum[2] = part[0].z, sum[3] = part[0].w;
                else if ((some + p) * s.part < s.blocks)
                    sum[0] += part[p].x, sum[1] += part[p].y, sum[2] += part[p].z, sum[3] += part[p].w;
        }
        int tile = group * M_TILES + i / N_TILES, row = (blockIdx.y * N_TILES + i % N_TILES) * 8;
        store_sums(a, tile * 16 + lane / 4, row + lane % 4 * 2, sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) uf_linear(const Args a) {
    extern __shared__ uint4 shared[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Sizes s(a);
    Part p(s, warp);
    uint4* ring = shared + warp * DEPTH * UNROLL * BLOCK + lane;
    float4* sums = (float4*)(shared + PARTS * DEPTH * UNROLL * BLOCK);

    u32 next_scales[M_TILES];
#pragma unroll
    for (int m = 0; m < M_TILES; m++) next_scales[m] = scales_of(a, s, blockIdx.x * M_TILES + m, p.first, lane);
    Source source;
    source.group = p.first < p.last ? blockIdx.x : s.groups;
    source.enter(a, s, p, lane);
    Source ahead = source;  // what no earlier kernel writes
    for (int i = 0; i < AHEAD; i++) ahead.copy(a, s, p, lane, ring + i * UNROLL * BLOCK, true, false);
    Turn turn;
    for (int i = 0; i < DEPTH - 1; i++) {
        source.copy(a, s, p, lane, ring + i * UNROLL * BLOCK, i >= AHEAD, true);
        close_group();
    }

    int at = 0;
    for (int group = blockIdx.x; group < s.groups; group += gridDim.x) {
        float sum[M_TILES][N_TILES][4] = {};
        u32 scales[M_TILES];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            scales[m] = next_scales[m];
            next_scales[m] = scales_of(a, s, (group + gridDim.x) * M_TILES + m, p.first, lane);
        }
        for (int block = p.first; block < p.last; block += UNROLL) {
            source.copy(a, s, p, lane, ring + (at ? at - 1 : DEPTH - 1) * UNROLL * BLOCK, true, true);
            close_group();
            copies_arrived<DEPTH - 1>();
            const uint4* slot = ring + at * UNROLL * BLOCK;
            at = at == DEPTH - 1 ? 0 : at + 1;
            int turn = (block - p.first) % 32;
            if (turn == 0 && block > p.first) {
#pragma unroll
                for (int m = 0; m < M_TILES; m++) scales[m] = scales_of(a, s, group * M_TILES + m, block, lane);
            }
            if (block + UNROLL <= p.last) multiply<UNROLL>(slot, scales, turn, sum);
            else
                for (; turn < p.last - p.first - (block - p.first) / 32 * 32; turn++, slot += BLOCK)
                    multiply<1>(slot, scales, turn, sum);
        }
        if (p.first < p.last) {
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int n = 0; n < N_TILES; n++) {
                    const float* c = sum[m][n];
                    sums[((warp * M_TILES + m) * N_TILES + n) * 32 + lane] = make_float4(c[0], c[1], c[2], c[3]);
                }
        }
        __syncthreads();
        fold(a, s, group, warp, lane, sums);
        __syncthreads();  // `sums` is free again
    }
}
#else
// Eight tiles of columns and 128 rows a CTA; a warp has two tiles and 64 rows. A stage is two tiles deep.
constexpr int COLUMN_TILES = 8, ROWS = 128;
constexpr int W_STAGE = COLUMN_TILES * 2 * PIECES * 32, STAGE = W_STAGE + ROWS * 8;  // in 16 bytes

struct Place {
    int tile, tiles;  // first tile of columns, end of the tiles that see the same input
    int row;
    const bf16* x;

    UF_DEVICE Place(const Args& a, const Sizes& s) {
        int each = s.tiles / a.groups, ctas = (each + COLUMN_TILES - 1) / COLUMN_TILES;
        int group = blockIdx.x / ctas;
        tile = group * each + blockIdx.x % ctas * COLUMN_TILES, tiles = (group + 1) * each;
        row = blockIdx.y * ROWS, x = a.x + (i64)group * a.w_1;
    }
};

// What a thread copies for every stage: bytes behind `w` and `x`, which advance by a stage.
struct Source {
    const u8 *w, *x;
    u32 w_at[W_STAGE / THREADS], x_at[ROWS * 8 / THREADS];

    UF_DEVICE Source(const Args& a, const Sizes& s, const Place& p) {
        w = (const u8*)a.w + (i64)p.tile * s.blocks * 512 * PIECES, x = (const u8*)(p.x + (i64)p.row * a.x_1);
#pragma unroll
        for (int r = 0; r < W_STAGE / THREADS; r++) {
            int i = r * THREADS + threadIdx.x, tile = min(i / (64 * PIECES), p.tiles - 1 - p.tile);
            w_at[r] = (tile * s.blocks * 32 * PIECES + i % (64 * PIECES)) * 16;
        }
#pragma unroll
        for (int r = 0; r < ROWS * 8 / THREADS; r++) {
            int i = r * THREADS + threadIdx.x, row = min(i / 8, a.x_0 - 1 - p.row);
            x_at[r] = (u32)row * a.x_1 * 2 + i % 8 * 16;
        }
    }
    UF_DEVICE void copy(const Sizes& s, int block, uint4* to) {
        bool both = block + 1 < s.blocks;
        if (block < s.blocks) {
#pragma unroll
            for (int r = 0; r < W_STAGE / THREADS; r++) {
                int i = r * THREADS + threadIdx.x;
                if (both || i % (64 * PIECES) < 32 * PIECES) copy16(to + i, w + w_at[r]);
            }
#pragma unroll
            for (int r = 0; r < ROWS * 8 / THREADS; r++) {
                int i = r * THREADS + threadIdx.x;
                // Even and odd rows change halves: a warp reads eight rows without bank conflicts.
                if (both || i % 8 < 4) copy16(to + W_STAGE + (i ^ i / 8 % 2 * 4), x + x_at[r]);
            }
        }
        w += 1024 * PIECES, x += 128;
        close_group();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) uf_linear(const Args a) {
    extern __shared__ uint4 shared[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Sizes s(a);
    Place p(a, s);
    int tile = warp % 4 * 2, rows = warp / 4 * 64;  // of the CTA's
    const uint4* w = shared + tile * 64 * PIECES + lane;
    const uint4* x = shared + W_STAGE + (rows + lane / 4) * 8;
    int swap = lane / 4 % 2 * 4;

    Turn turn;
    Source source(a, s, p);
    for (int i = 0; i < DEPTH - 1; i++) source.copy(s, 2 * i, shared + i * STAGE);
    float sum[2][8][4] = {}, total[2][8][4];
#pragma unroll
    for (int i = 0; i < 64; i++) total[i / 32][i / 4 % 8][i % 4] = -0.0f;  // adds nothing to any first part
    u32 scales = 0, next_scales = scales_of(a, s, p.tile + tile, 0, lane);
    int left = s.part;
    for (int block = 0, at = 0; block < s.blocks; block += 2) {
        copies_arrived<DEPTH - 2>();
        __syncthreads();
        source.copy(s, block + 2 * (DEPTH - 1), shared + (at ? at - 1 : DEPTH - 1) * STAGE);
        if (block % 32 == 0) {
            scales = next_scales;
            next_scales = scales_of(a, s, p.tile + tile, block + 32, lane);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (block + half == s.blocks) break;
            u32 one[2][4], two[2][4];
            u32 scale = __shfl_sync(0xFFFFFFFFu, scales, block % 32 + half);
#pragma unroll
            for (int m = 0; m < 2; m++)
                operands(w + at * STAGE + (m * 2 + half) * 32 * PIECES, scale, one[m], two[m]);
#pragma unroll
            for (int some = 0; some < 8; some += 4) {  // so that a sum's two products are not neighbours
                uint4 v[4];
#pragma unroll
                for (int n = 0; n < 4; n++) v[n] = x[at * STAGE + (some + n) * 64 + ((half * 4 + lane % 4) ^ swap)];
#pragma unroll
                for (int i = 0; i < 8; i++) mma(sum[i % 2][some + i / 2], one[i % 2], v[i / 2].x, v[i / 2].y);
#pragma unroll
                for (int i = 0; i < 8; i++) mma(sum[i % 2][some + i / 2], two[i % 2], v[i / 2].z, v[i / 2].w);
            }
            if (--left == 0 || block + half == s.blocks - 1) {
                left = s.part;
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int n = 0; n < 8; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) total[m][n][i] += sum[m][n][i], sum[m][n][i] = 0.0f;
            }
        }
        at = at == DEPTH - 1 ? 0 : at + 1;
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
        if (p.tile + tile + m < p.tiles)
#pragma unroll
            for (int n = 0; n < 8; n++)
                store_sums(a, (p.tile + tile + m) * 16 + lane / 4, p.row + rows + n * 8 + lane % 4 * 2, total[m][n]);
}
#endif
