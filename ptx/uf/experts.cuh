// One expert's weights times the rows that chose it, on tensor cores (experts_up.cu, experts_down.cu).
//
// Weights are operand A, in tiles as runtime/weights/layout.py lays them out; the rows that chose the expert are the
// eight columns of operand B. A warp has a unit: 32 rows of each of two streams of tiles, which stand at g and g + 8
// of the operand, so that gate and up of one output meet in one lane.
// Order of a sum, the same however many rows there are: products of 32 k in two MMAs, times the group's scale, added
// to one fp32 chain in ascending k; K falls into `parts_of(K)` parts with a chain each, which are added left to right.
#include <uf/fp4.cuh>
#include <uf/mma.cuh>

constexpr int TILE_BYTES = 512, TILE_SCALES = 32, UNIT = 64, COLUMNS = 8;
constexpr int LONG_BLOCKS = 64, PARTS = 8;  // graphs/ops/experts_up.py has the same

UF_DEVICE int parts_of(int blocks) { return blocks >= LONG_BLOCKS ? PARTS : 1; }
UF_DEVICE int part_start(int part, int parts, int blocks) { return part * blocks / parts; }

// x 2^64, codes 2^-126 and the scale 2^-62 less than its byte says: no product leaves fp32, nothing is rounded.
// Holds for scales up to 2^65, which formats.py makes sure of.
constexpr u32 RAISED = 0x5F805F80u, SCALE_SHIFT = 0x3E3E3E3Eu;
UF_DEVICE uint4 raised(uint4 x) {
    return make_uint4(times_bf16x2(x.x, RAISED), times_bf16x2(x.y, RAISED), times_bf16x2(x.z, RAISED), times_bf16x2(x.w, RAISED));
}
UF_DEVICE float scale_at(u32 scales, int j) {
    return from_bits((j < 3 ? scales << (23 - 8 * j) : scales >> 1) & 0x7F800000u);
}

// Weights are read once: they shall not push anything out of the L1 cache.
UF_DEVICE uint4 load_once(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
UF_DEVICE u32 load_once(const u32* p) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// What a lane needs of a unit's weights for 32 k: words of rows 8 j + g of both streams, and their scales.
struct Slab {
    uint4 codes[2];
    u32 scales[2];
};
struct Unit {
    const u8* codes[2];
    const u8* scales[2];
    // Tile rows `first` and `second` of an expert's matrices w and v.
    UF_DEVICE Unit(const fp4* w, const u8* w_scale, const fp4* v, const u8* v_scale, i64 first, i64 second, int blocks, int lane) {
        codes[0] = (const u8*)w + first * blocks * TILE_BYTES + lane * 16;
        codes[1] = (const u8*)v + second * blocks * TILE_BYTES + lane * 16;
        scales[0] = w_scale + first * blocks * TILE_SCALES + lane / 4 * 4;
        scales[1] = v_scale + second * blocks * TILE_SCALES + lane / 4 * 4;
    }
    UF_DEVICE void fetch(Slab& slab, int block) const {
#pragma unroll
        for (int s = 0; s < 2; s++) {
            slab.codes[s] = load_once((const uint4*)(codes[s] + (i64)block * TILE_BYTES));
            slab.scales[s] = load_once((const u32*)(scales[s] + (i64)block * TILE_SCALES));
        }
    }
};

// Operands A of 32 k: tile j has rows 8 j + g of both streams; products 0 and 1 take four registers each.
struct Operand {
    u32 a[4][2][4];
    float scale[4][2];
    UF_DEVICE explicit Operand(const Slab& slab) {
        u32 first = slab.scales[0] + SCALE_SHIFT, second = slab.scales[1] + SCALE_SHIFT;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 w[4], v[4];
            fp4_pairs((&slab.codes[0].x)[j], w);
            fp4_pairs((&slab.codes[1].x)[j], v);
#pragma unroll
            for (int p = 0; p < 2; p++) {
                a[j][p][0] = w[2 * p], a[j][p][1] = v[2 * p];
                a[j][p][2] = w[2 * p + 1], a[j][p][3] = v[2 * p + 1];
            }
            scale[j][0] = scale_at(first, j), scale[j][1] = scale_at(second, j);
        }
    }
};

// sum[j][c] of a lane: rows 8 j + g, of stream c / 2, column 2 t + c % 2. x: eight k of column g, raised.
UF_DEVICE void multiply(const Operand& w, uint4 x, float (*sum)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        mma(product, w.a[j][0], x.x, x.y);
        mma(product, w.a[j][1], x.z, x.w);
#pragma unroll
        for (int c = 0; c < 4; c++) sum[j][c] = fmaf(product[c], w.scale[j][c / 2], sum[j][c]);
    }
}

// --- few rows an expert: a warp a part, straight from memory ---

constexpr int DEPTH = 3;             // slabs on their way to a warp
constexpr int NARROW_PAIRS = 2048;   // graphs/ops/experts_up.py has the same

struct Narrow {
    u32 votes[NARROW_PAIRS / 32];    // a bit a place of ids
    u16 pair[NARROW_PAIRS];          // that chose the expert
    int count;                       // 0: an earlier CTA has this expert
    float part[PARTS][16][32];
};

// All places of `ids` that name the same expert as place `at`, in order; none if one of them is before it.
UF_DEVICE void find_pairs(Narrow& s, const int* ids, int pairs, int at) {
    int expert = ids[at], warp = threadIdx.x / 32, lane = threadIdx.x % 32, words = (pairs + 31) / 32;
    for (int i = warp; i < words; i += blockDim.x / 32) {
        int q = i * 32 + lane;
        u32 votes = __ballot_sync(0xFFFFFFFFu, q < pairs && ids[q] == expert);
        if (lane == 0) s.votes[i] = votes;
    }
    __syncthreads();
    if (warp == 0) {
        int count = 0;
        for (int i = 0; i < words; i += 32) {
            u32 votes = i + lane < words ? s.votes[i + lane] : 0;
            int before = __popc(votes);  // of this word; then of it and all lanes below
            for (int o = 1; o < 32; o *= 2) {
                int below = __shfl_up_sync(0xFFFFFFFFu, before, o);
                before += lane >= o ? below : 0;
            }
            int place = count + before - __popc(votes);
            for (u32 left = votes; left; left &= left - 1) s.pair[place++] = (u16)((i + lane) * 32 + __ffs(left) - 1);
            count += __shfl_sync(0xFFFFFFFFu, before, 31);
        }
        __syncwarp();
        if (lane == 0) s.count = s.pair[0] == at ? count : 0;
    }
    __syncthreads();
}

// One chain over blocks [start, end) for the eight columns whose rows `x` points to (null: a column of zeros).
UF_DEVICE void stream(const Unit& unit, const bf16* x, int start, int end, float (*sum)[4]) {
    Slab slab[DEPTH];
    uint4 own[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        own[d] = make_uint4(0, 0, 0, 0);
        if (start + d < end) {
            unit.fetch(slab[d], start + d);
            if (x) own[d] = *(const uint4*)(x + (i64)(start + d) * 32);
        }
    }
    for (int block = start; block < end; block += DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (block + d >= end) break;
            Operand w(slab[d]);
            uint4 column = raised(own[d]);
            if (block + d + DEPTH < end) {
                unit.fetch(slab[d], block + d + DEPTH);
                if (x) own[d] = *(const uint4*)(x + (i64)(block + d + DEPTH) * 32);
            }
            multiply(w, column, sum);
        }
    }
}

// blockDim.x / 32 warps: `parts` a unit. row(pair): the input row of a pair; emit(pair, unit, row in 0..31, stream
// sums). CTAs: x over units, y over pairs.
template <class Units, class Row, class Emit>
UF_DEVICE void narrow(const int* ids, int pairs, int units, int blocks, Units units_of, Row row, Emit emit) {
    __shared__ Narrow s;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, parts = parts_of(blocks);
    find_pairs(s, ids, pairs, blockIdx.y);
    int count = s.count, part = warp % parts;
    int at = blockIdx.x * (blockDim.x / 32 / parts) + warp / parts;
    if (count == 0 || at >= units) return;  // all warps of a unit go, or none
    Unit unit = units_of(ids[blockIdx.y], at, lane);
    for (int first = 0; first < count; first += COLUMNS) {
        int mine = first + lane / 4;
        const bf16* x = mine < count ? row(s.pair[mine]) + lane % 4 * 8 : nullptr;
        float sum[4][4] = {};
        stream(unit, x, part_start(part, parts, blocks), part_start(part + 1, parts, blocks), sum);
        if (parts == 1) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                for (int c = 0; c < 2; c++) {
                    int column = first + lane % 4 * 2 + c;
                    if (column < count) emit((int)s.pair[column], at, 8 * j + lane / 4, sum[j][c], sum[j][2 + c]);
                }
            continue;
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            for (int c = 0; c < 4; c++) s.part[part][4 * j + c][lane] = sum[j][c];
        __syncthreads();
        int j = warp / 2, c = warp % 2, column = first + lane % 4 * 2 + c;  // PARTS warps: one of 4 x 2 each
        float one = s.part[0][4 * j + c][lane], two = s.part[0][4 * j + 2 + c][lane];
        for (int p = 1; p < PARTS; p++) one += s.part[p][4 * j + c][lane], two += s.part[p][4 * j + 2 + c][lane];
        if (column < count) emit((int)s.pair[column], at, 8 * j + lane / 4, one, two);
        __syncthreads();
    }
}
