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
// Holds for scales up to 2^65, which layout.py makes sure of.
constexpr u32 RAISED = 0x5F805F80u, SCALE_SHIFT = 0x3E3E3E3Eu;
UF_DEVICE uint4 raised(uint4 x) {
    return make_uint4(times_bf16x2(x.x, RAISED), times_bf16x2(x.y, RAISED), times_bf16x2(x.z, RAISED), times_bf16x2(x.w, RAISED));
}
UF_DEVICE float scale_at(u32 scales, int j) {
    return from_bits((j < 3 ? scales << (23 - 8 * j) : scales >> 1) & 0x7F800000u);
}

// A copy of 4 or 16 bytes that stays in the L1 cache, for what several warps of an SM want.
template <int BYTES> UF_DEVICE void copy_kept(void* shared, const void* global) {
    u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(BYTES) : "memory");
}

// A unit's weights for 32 k lie in shared memory on their way to the warp: 16 bytes a lane of codes of both streams
// (words of rows 8 j + g), then 4 a lane of scales. A lane reads what it has copied itself, so nobody has to meet.
constexpr int CODES = 512, SLAB = 2 * (CODES + 128);
struct Unit {
    const u8* codes[2];
    const u8* scales[2];
    // Tile rows `first` and `second` of matrices w and v.
    UF_DEVICE Unit(const fp4* w, const u8* w_scale, const fp4* v, const u8* v_scale, i64 first, i64 second, int blocks, int lane) {
        codes[0] = (const u8*)w + first * blocks * TILE_BYTES + lane * 16;
        codes[1] = (const u8*)v + second * blocks * TILE_BYTES + lane * 16;
        scales[0] = w_scale + first * blocks * TILE_SCALES + lane / 4 * 4;
        scales[1] = v_scale + second * blocks * TILE_SCALES + lane / 4 * 4;
    }
    UF_DEVICE void send(u8* slab, int block, int lane) const {
#pragma unroll
        for (int s = 0; s < 2; s++) {
            copy16(slab + s * CODES + lane * 16, codes[s] + (i64)block * TILE_BYTES);
            copy_kept<4>(slab + 2 * CODES + s * 128 + lane * 4, scales[s] + (i64)block * TILE_SCALES);
        }
    }
    UF_DEVICE void advance() {  // by a block
#pragma unroll
        for (int s = 0; s < 2; s++) codes[s] += TILE_BYTES, scales[s] += TILE_SCALES;
    }
};

// Operands A of 32 k: tile j has rows 8 j + g of both streams; products 0 and 1 take four registers each.
struct Operand {
    u32 a[4][2][4];
    float scale[4][2];
    UF_DEVICE Operand(const u8* slab, int lane) {
        uint4 codes[2] = {*(const uint4*)(slab + lane * 16), *(const uint4*)(slab + CODES + lane * 16)};
        const u32* scales = (const u32*)(slab + 2 * CODES) + lane;
        u32 first = scales[0] + SCALE_SHIFT, second = scales[32] + SCALE_SHIFT;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 w[4], v[4];
            fp4_pairs((&codes[0].x)[j], w);
            fp4_pairs((&codes[1].x)[j], v);
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

// Of a warp's ring: slabs, each with 16 bytes a lane of its column's row behind it. graphs/ops/experts_up.py has the
// same. Six take 3 % longer than four, which let more CTAs of `experts_down` live on an SM.
constexpr int RING = 4, NARROW_SLOT = SLAB + 512, NARROW_PAIRS = 2048;

extern __shared__ __align__(16) u8 experts_shared[];

struct Narrow {
    u32 votes[NARROW_PAIRS / 32];    // a bit a place of ids
    u16 pair[NARROW_PAIRS];          // that chose the expert
    int count;                       // 0: an earlier CTA has this expert
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
UF_DEVICE void stream(const Unit& unit, const bf16* x, int start, int end, u8* ring, int lane, float (*sum)[4]) {
    u8 *from = ring, *to = ring, *last = ring + (RING - 1) * NARROW_SLOT;
    auto send = [&](int block) {
        if (block < end) {
            unit.send(to, block, lane);
            if (x) copy_kept<16>(to + SLAB + lane * 16, x + (i64)block * 32);
        }
        close_group();
        to = to == last ? ring : to + NARROW_SLOT;
    };
    for (int i = 0; i < RING - 1; i++) send(start + i);
    for (int block = start; block < end; block++) {
        copies_arrived<RING - 2>();
        Operand w(from, lane);
        uint4 column = x ? *(const uint4*)(from + SLAB + lane * 16) : make_uint4(0, 0, 0, 0);
        send(block + RING - 1);  // into the slot before this one, whose contents have been used
        multiply(w, raised(column), sum);
        from = from == last ? ring : from + NARROW_SLOT;
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
    auto ring = [&](int w) { return experts_shared + w * RING * NARROW_SLOT; };
    auto sums = [&](int p, int i) -> float& { return ((float*)ring(p))[i * 32 + lane]; };  // of a part, in its ring
    for (int first = 0; first < count; first += COLUMNS) {
        int mine = first + lane / 4;
        const bf16* x = mine < count ? row(s.pair[mine]) + lane % 4 * 8 : nullptr;
        float sum[4][4] = {};
        stream(unit, x, part_start(part, parts, blocks), part_start(part + 1, parts, blocks), ring(warp), lane, sum);
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
            for (int c = 0; c < 4; c++) sums(part, 4 * j + c) = sum[j][c];
        __syncthreads();
        int j = warp / 2, c = warp % 2, column = first + lane % 4 * 2 + c;  // PARTS warps: one of 4 x 2 each
        float one = sums(0, 4 * j + c), two = sums(0, 4 * j + 2 + c);
        for (int p = 1; p < PARTS; p++) one += sums(p, 4 * j + c), two += sums(p, 4 * j + 2 + c);
        if (column < count) emit((int)s.pair[column], at, 8 * j + lane / 4, one, two);
        __syncthreads();
    }
}
