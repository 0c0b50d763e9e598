// y = x . w^T of exactly dequantised operands: every linear of the model (graphs/ops/linear.py).
// Shapes: x [T, G*K] bf16; w [N, K] fp8 + E8M0 32x32 | bf16, in tiles (runtime/weights/layout.py); y [T, N] bf16 | f32.
// Order of a sum: K falls into PARTS parts of whole tiles; a part is one chain of products (two a tile of 32 k, the
//   weights always the first operand), the parts are added in ascending order. Nothing of it depends on rows or on which
//   of the two kernels runs: few rows, where a warp takes a part, or many, where a warp takes all parts one by one.
// Threads, few rows: a CTA takes M_TILES tiles of 16 columns at a time and 8 N_TILES rows. Many: 128 columns x 128 rows.
// Shared memory: operands under way. Few rows: each lane copies what it reads itself, so that no barrier is needed.
// Limited by reading w (few rows), by the tensor cores (many).
#include <uf/mma.cuh>

constexpr int THREADS = 256, PARTS = 8;
constexpr int PIECES = UF_SCALED_w ? 1 : 2;  // of 16 bytes that a lane has of a tile of w
constexpr int M_TILES = UF_M_TILES, N_TILES = UF_N_TILES, DEPTH = UF_DEPTH;

struct Sizes {
    int blocks, part, tiles;  // tiles along K, of a part, along N
    UF_DEVICE explicit Sizes(const Args& a) {
        blocks = (a.w_1 + 31) / 32;
        part = (blocks + PARTS - 1) / PARTS;
        tiles = (a.w_0 + 15) / 16;
    }
};

#if UF_SCALED_w
// Scales of up to 32 tiles in a row, a lane each; they are handed out in turn.
UF_DEVICE u32 scales_of(const Args& a, int blocks, int tile, int block, int lane) {
    return block + lane < blocks ? a.w_scale[(i64)(tile / 2) * blocks + block + lane] : 0;
}
#else
UF_DEVICE u32 scales_of(const Args&, int, int, int, int) { return 0; }
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
constexpr int PIECES_OF_BLOCK = M_TILES * PIECES + N_TILES;  // that a lane copies

// What a warp copies, in the order in which it is used: its part of one group of tiles after the other.
struct Source {
    const uint4* w[M_TILES];
    const bf16* x[N_TILES];
    int group, block, first, last;

    UF_DEVICE void enter(const Args& a, const Sizes& s, int groups, int lane) {
        if (group >= groups) return;
        block = first;
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            int tile = min(group * M_TILES + m, s.tiles - 1);
            w[m] = (const uint4*)a.w + ((i64)tile * s.blocks + first) * 32 * PIECES + lane;
        }
        int offset = group * M_TILES * 16 / (a.w_0 / a.groups) * a.w_1 + first * 32 + lane % 4 * 8;
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            int row = min((int)(blockIdx.y * N_TILES + n) * 8 + lane / 4, a.x_0 - 1);
            x[n] = a.x + (i64)row * a.x_1 + offset;
        }
    }
    UF_DEVICE void copy(const Args& a, const Sizes& s, int groups, int lane, uint4* slot) {
        if (group < groups) {
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
#pragma unroll
                for (int j = 0; j < PIECES; j++) copy16(slot + (m * PIECES + j) * 32, w[m] + j * 32);
                w[m] += 32 * PIECES;
            }
#pragma unroll
            for (int n = 0; n < N_TILES; n++, slot += 32) {
                copy16(slot + M_TILES * PIECES * 32, x[n]);
                x[n] += 32;
            }
            if (++block == last) {
                group += gridDim.x;
                enter(a, s, groups, lane);
            }
        }
        close_group();
    }
};

// Adds the parts of a group of tiles, a warp for each tile and eight rows.
UF_DEVICE void fold(const Args& a, const Sizes& s, int group, int warp, int lane, const float4* sums) {
    int parts = (s.blocks + s.part - 1) / s.part;
    for (int i = warp; i < M_TILES * N_TILES; i += THREADS / 32) {
        const float4* from = sums + i * 32 + lane;
        float4 first = from[0];
        float sum[4] = {first.x, first.y, first.z, first.w};
        for (int p = 1; p < parts; p++) {
            float4 more = from[p * M_TILES * N_TILES * 32];
            sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
        }
        int tile = group * M_TILES + i / N_TILES, row = (blockIdx.y * N_TILES + i % N_TILES) * 8;
        store_sums(a, tile * 16 + lane / 4, row + lane % 4 * 2, sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) uf_linear(const Args a) {
    extern __shared__ uint4 shared[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Sizes s(a);
    int groups = (s.tiles + M_TILES - 1) / M_TILES;
    int first = min(warp * s.part, s.blocks), last = min(first + s.part, s.blocks);
    float4* sums = (float4*)(shared + PARTS * DEPTH * PIECES_OF_BLOCK * 32);
    uint4* ring = shared + warp * DEPTH * PIECES_OF_BLOCK * 32 + lane;

    Source source;
    source.group = first < last ? blockIdx.x : groups, source.first = first, source.last = last;
    source.enter(a, s, groups, lane);
    for (int i = 0; i < DEPTH - 1; i++) source.copy(a, s, groups, lane, ring + i * PIECES_OF_BLOCK * 32);
    u32 next_scales[M_TILES];
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
        next_scales[m] = scales_of(a, s.blocks, min((int)blockIdx.x * M_TILES + m, s.tiles - 1), first, lane);

    int at = 0;
    for (int group = blockIdx.x; group < groups; group += gridDim.x) {
        float sum[M_TILES][N_TILES][4] = {};
        u32 scales[M_TILES];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            scales[m] = next_scales[m];
            int tile = min((group + (int)gridDim.x) * M_TILES + m, s.tiles - 1);
            next_scales[m] = scales_of(a, s.blocks, tile, first, lane);
        }
        for (int block = first; block < last; block++) {
            copies_arrived<DEPTH - 2>();
            const uint4* slot = ring + at * PIECES_OF_BLOCK * 32;
            source.copy(a, s, groups, lane, ring + (at ? at - 1 : DEPTH - 1) * PIECES_OF_BLOCK * 32);
            at = at == DEPTH - 1 ? 0 : at + 1;
            int turn = (block - first) % 32;
            if (turn == 0 && block > first) {
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
                    scales[m] = scales_of(a, s.blocks, min(group * M_TILES + m, s.tiles - 1), block, lane);
            }
            uint4 x[N_TILES];
#pragma unroll
            for (int n = 0; n < N_TILES; n++) x[n] = slot[(M_TILES * PIECES + n) * 32];
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                u32 one[4], two[4];
                operands(slot + m * PIECES * 32, __shfl_sync(0xFFFFFFFFu, scales[m], turn), one, two);
#pragma unroll
                for (int n = 0; n < N_TILES; n++) mma(sum[m][n], one, x[n].x, x[n].y);
#pragma unroll
                for (int n = 0; n < N_TILES; n++) mma(sum[m][n], two, x[n].z, x[n].w);
            }
        }
        if (first < last) {
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

UF_DEVICE void copy_stage(const Args& a, const Sizes& s, const Place& p, int block, uint4* to) {
    bool both = block + 1 < s.blocks;
    if (block < s.blocks) {
#pragma unroll
        for (int r = 0; r < W_STAGE / THREADS; r++) {
            int i = r * THREADS + threadIdx.x, tile = i / (64 * PIECES), piece = i % (64 * PIECES);
            const uint4* from = (const uint4*)a.w + (i64)min(p.tile + tile, p.tiles - 1) * s.blocks * 32 * PIECES;
            if (both || piece < 32 * PIECES) copy16(to + i, from + block * 32 * PIECES + piece);
        }
#pragma unroll
        for (int r = 0; r < ROWS * 8 / THREADS; r++) {
            int i = r * THREADS + threadIdx.x, row = i / 8, piece = i % 8;
            const bf16* from = p.x + (i64)min(p.row + row, a.x_0 - 1) * a.x_1 + block * 32;
            // Even and odd rows change halves: a warp reads eight rows without bank conflicts.
            if (both || piece < 4) copy16(to + W_STAGE + row * 8 + (piece ^ row % 2 * 4), from + piece * 8);
        }
    }
    close_group();
}

extern "C" __global__ void __launch_bounds__(THREADS) uf_linear(const Args a) {
    extern __shared__ uint4 shared[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Sizes s(a);
    Place p(a, s);
    int tile = warp % 4 * 2, rows = warp / 4 * 64;  // of the CTA's
    const uint4* w = shared + tile * 64 * PIECES + lane;
    const uint4* x = shared + W_STAGE + (rows + lane / 4) * 8;
    int swap = lane / 4 % 2 * 4;

    for (int i = 0; i < DEPTH - 1; i++) copy_stage(a, s, p, 2 * i, shared + i * STAGE);
    float sum[2][8][4] = {}, total[2][8][4];
#pragma unroll
    for (int i = 0; i < 64; i++) total[i / 32][i / 4 % 8][i % 4] = -0.0f;  // adds nothing to any first part
    int scale_tile = min(p.tile + tile, s.tiles - 1);
    u32 scales = 0, next_scales = scales_of(a, s.blocks, scale_tile, 0, lane);
    int left = s.part;
    for (int block = 0, at = 0; block < s.blocks; block += 2) {
        copies_arrived<DEPTH - 2>();
        __syncthreads();
        copy_stage(a, s, p, block + 2 * (DEPTH - 1), shared + (at ? at - 1 : DEPTH - 1) * STAGE);
        if (block % 32 == 0) {
            scales = next_scales;
            next_scales = scales_of(a, s.blocks, scale_tile, block + 32, lane);
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
            for (int n = 0; n < 8; n++) {
                uint4 v = x[at * STAGE + n * 64 + ((half * 4 + lane % 4) ^ swap)];
#pragma unroll
                for (int m = 0; m < 2; m++) mma(sum[m][n], one[m], v.x, v.y);
#pragma unroll
                for (int m = 0; m < 2; m++) mma(sum[m][n], two[m], v.z, v.w);
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
