// Attention of one row's heads over keys that an accessor names (graphs/ops/attention.py).
// Keys are taken in groups of 64 and are made bf16 once for all heads, exactly. Every group's values are a product
// of their own; they are added in order, whether one CTA takes all groups or the CTAs of a cluster share them.
#include <uf/attend_mma.cuh>
#include <uf/reduce.cuh>

// A stored key-value row. Window rows are E4M3 with E8M0 scales per 32, global entries E2M1 pairs with E4M3 per 16.
struct Key {
    const u8* codes;
    const u8* scales;
    bool global, valid;
};

constexpr int GROUP = 64;  // keys that the model authors' kernel takes at once
constexpr int DIM = UF_DIM, TILES = UF_TILES, HEADS = 8 * TILES, GROUPS = UF_GROUPS, SPLIT = UF_SPLIT;
constexpr int OWN = (GROUPS + SPLIT - 1) / SPLIT;  // groups of a CTA
constexpr int STAGES = SPLIT > 1 ? OWN : 1;        // groups that it holds at once, each with a team of its own
constexpr int TEAM = 256, WARPS = TEAM / 32, ATTEND_THREADS = TEAM * STAGES;
constexpr int PIECES = UF_PIECES;                       // bf16 numbers that make a weight
constexpr int PARTS = DIM % 128 == 0 ? 2 : 1;           // of a key, for a warp each
constexpr int CHUNKS = DIM / 64 / PARTS;                // of 16 elements that a lane reads of a key's part
constexpr int DIM_TILES = (DIM / 16 + WARPS - 1) / WARPS;  // of 16 output elements, of a warp
// Rows that are read together start in different banks.
constexpr int KEY_PITCH = DIM + 8, WEIGHT_PITCH = GROUP + 8, LOGIT_PITCH = GROUP + 4, VALUE_PITCH = DIM + 4;
constexpr float NEVER = -1e30f;  // below every logit, and no infinity: a group may have no valid key

struct AttendShared {
    u16 key[STAGES][GROUP * KEY_PITCH];  // afterwards values [HEADS][VALUE_PITCH] f32
    uint2 query[TILES * (DIM / 16) * 32];
    u16 weight[STAGES][PIECES][HEADS * WEIGHT_PITCH];
    float logit[STAGES][PARTS][HEADS * LOGIT_PITCH];
    float top[GROUPS][HEADS], sum[GROUPS][HEADS], keep[GROUPS][HEADS], total[HEADS];
    bool valid[STAGES][GROUP];
};
static_assert(DIM % 64 == 0, "four lanes take 16 elements of a key each");
static_assert(sizeof(AttendShared) <= UF_SHARED, "AttendShape.shared of attention.py is too small");
static_assert(ATTEND_THREADS == UF_THREADS, "AttendShape.threads of attention.py differs");
static_assert(HEADS * VALUE_PITCH * 4 <= GROUP * KEY_PITCH * 2, "values do not fit where keys were");

struct AttendRow {
    const bf16* q;  // [heads, DIM]
    bf16* out;      // the same
    int heads;      // of this CTA, at most HEADS
    const float *sink, *cos, *sin;
    int pairs;
};

UF_DEVICE float* values_of(AttendShared& s, int stage) { return (float*)s.key[stage]; }

// Queries in the order of the tensor core's second operand: step k takes pairs of each lane's 16 elements.
UF_DEVICE void fetch_query(AttendShared& s, const AttendRow& row) {
    for (int i = threadIdx.x; i < TILES * (DIM / 16) * 32; i += ATTEND_THREADS) {
        int lane = i % 32, step = i / 32 % (DIM / 16), h = i / 32 / (DIM / 16) * 8 + lane / 4;
        const bf16* q = row.q + h * DIM + step / 4 * 64 + lane % 4 * 16 + step % 4 / 2 * 8 + step % 2 * 2;
        u32 low = h < row.heads ? *(const u32*)q : 0u, high = h < row.heads ? *(const u32*)(q + 4) : 0u;
        s.query[i] = make_uint2(__byte_perm(low, high, 0x5410u), __byte_perm(low, high, 0x7632u));
    }
}

// What a lane reads of a key: CHUNKS times 16 elements, and their scales.
struct Raw {
    uint4 codes[CHUNKS];
    u32 scales[CHUNKS];
    bool global;
};
// A key that does not count is zeros.
UF_DEVICE void read_key(Raw& raw, const Key& k, int part, int c) {
    raw.global = k.global;
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        int at = part * CHUNKS + j;  // of 64 elements
        raw.codes[j] = make_uint4(0u, 0u, 0u, 0u), raw.scales[j] = 0u;
        if (k.valid && k.global) {
            uint2 codes = *(const uint2*)(k.codes + 32 * at + 8 * c);
            raw.codes[j].x = codes.x, raw.codes[j].y = codes.y;
            raw.scales[j] = *(const u32*)(k.scales + 4 * at);
        } else if (k.valid) {
            raw.codes[j] = *(const uint4*)(k.codes + 64 * at + 16 * c);
            raw.scales[j] = *(const u16*)(k.scales + 2 * at);
        }
    }
}
UF_DEVICE void unpack(u32 (&x)[8], const Raw& raw, int j, int c) {
    uint4 codes = raw.codes[j];
    if (raw.global) {
        u32 scale = e4m3_over_e2m1(raw.scales[j] >> (8 * c) & 255u);
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = e2m1_pair(codes.x, i, scale), x[4 + i] = e2m1_pair(codes.y, i, scale);
    } else {
        u32 scale = e8m0_over_e4m3(raw.scales[j] >> (8 * (c / 2)) & 255u);
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = e4m3_pair(codes.x, codes.y, i, scale), x[4 + i] = e4m3_pair(codes.z, codes.w, i, scale);
    }
}

// A warp takes 16 keys of a group and one part of their elements; a lane of it keys `first` and `first` + 8.
struct Place { int warp, lane, part, first, c; };
UF_DEVICE Place place_of() {
    int warp = threadIdx.x % TEAM / 32, lane = threadIdx.x % 32;
    return {warp, lane, warp / 4, warp % 4 * 16 + lane / 4, lane % 4};
}
template <class Keys> UF_DEVICE void read_keys(int n, Keys keys, Raw (&raw)[2]) {
    Place at = place_of();
    if (at.part >= PARTS) return;
#pragma unroll
    for (int i = 0; i < 2; i++) read_key(raw[i], keys(n + at.first + 8 * i), at.part, at.c);
}
template <class Keys> UF_DEVICE void mark_keys(AttendShared& s, int stage, int n, Keys keys) {
    int i = threadIdx.x % TEAM;
    if (i < GROUP) s.valid[stage][i] = keys(n + i).valid;
}

// Keys as bf16 to shared memory, and their dots with all heads.
UF_DEVICE void score_keys(AttendShared& s, int stage, const Raw (&raw)[2]) {
    Place at = place_of();
    if (at.part >= PARTS) return;
    u16* key = s.key[stage] + at.first * KEY_PITCH + at.part * CHUNKS * 64 + 16 * at.c;
    constexpr int CHAINS = 3 - TILES;  // even and odd steps where one tile would wait for itself
    float sum[CHAINS][TILES][4] = {};
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        u32 x[2][8];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            unpack(x[i], raw[i], j, at.c);
            uint4* to = (uint4*)(key + i * 8 * KEY_PITCH + 64 * j);
            to[0] = make_uint4(x[i][0], x[i][1], x[i][2], x[i][3]);
            to[1] = make_uint4(x[i][4], x[i][5], x[i][6], x[i][7]);
        }
#pragma unroll
        for (int step = 0; step < 4; step++) {
            u32 a[4] = {x[0][2 * step], x[1][2 * step], x[0][2 * step + 1], x[1][2 * step + 1]};
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                uint2 b = s.query[(n * (DIM / 16) + (at.part * CHUNKS + j) * 4 + step) * 32 + at.lane];
                mma(sum[step % CHAINS][n], a, b.x, b.y);
            }
        }
    }
    float* logit = s.logit[stage][at.part] + at.c * 2 * LOGIT_PITCH + at.first;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            logit[(8 * n + i % 2) * LOGIT_PITCH + i / 2 * 8] = CHAINS == 1 ? sum[0][n][i] : sum[0][n][i] + sum[CHAINS - 1][n][i];
}

// Logits of keys lane and lane + 32 of the group, for one head.
UF_DEVICE float2 logits_of(const AttendShared& s, int stage, int head, int lane) {
    const float *first = s.logit[stage][0] + head * LOGIT_PITCH, *last = s.logit[stage][PARTS - 1] + head * LOGIT_PITCH;
    const float scale = (float)(1.0 / sqrt((double)DIM)) * UNSCALED;
    float l[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float dot = PARTS == 1 ? first[lane + 32 * i] : first[lane + 32 * i] + last[lane + 32 * i];
        l[i] = s.valid[stage][lane + 32 * i] ? dot * scale : from_bits(0xFF800000u);
    }
    return make_float2(l[0], l[1]);
}

// Writes the weights of one head relative to `peak`, as bf16 pieces, and returns their sum.
UF_DEVICE float weigh(AttendShared& s, int stage, int head, int lane, float2 logits, float peak) {
    float sum = 0.0f, l[2] = {logits.x, logits.y};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float w = expf(l[i] - peak), rest = w;
        sum += w;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            u16 bits = bf16_bits(rest);
            s.weight[stage][p][head * WEIGHT_PITCH + lane + 32 * i] = bits;
            rest -= from_bits((u32)bits << 16);
        }
    }
    return warp_sum(sum);
}

// Values of a group, sum_n w_n K_n: a warp takes DIM_TILES times 16 elements of all heads.
UF_DEVICE void mix_values(const AttendShared& s, int stage, float (&part)[DIM_TILES][TILES][4]) {
    int warp = threadIdx.x % TEAM / 32, lane = threadIdx.x % 32, matrix = lane / 8, r = lane % 8;
    int first = warp * DIM_TILES * 16;
#pragma unroll
    for (int j = 0; j < DIM_TILES; j++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) part[j][n][i] = 0.0f;
    if (first >= DIM) return;
    const u16* key = s.key[stage] + (matrix / 2 * 8 + r) * KEY_PITCH + first + matrix % 2 * 8;
    int weight = (matrix / 2 * 8 * (TILES - 1) + r) * WEIGHT_PITCH + matrix % 2 * 8;
#pragma unroll 1
    for (int step = 0; step < GROUP / 16; step++) {
        u32 a[4], b[PIECES][2 * TILES];
#pragma unroll
        for (int p = 0; p < PIECES; p++) load_matrices(b[p], s.weight[stage][p] + weight + 16 * step);
#pragma unroll
        for (int j = 0; j < DIM_TILES; j++) {
            load_matrices_turned(a, key + 16 * step * KEY_PITCH + 16 * j);
#pragma unroll
            for (int p = 0; p < PIECES; p++)
#pragma unroll
                for (int n = 0; n < TILES; n++) mma(part[j][n], a, b[p][2 * n], b[p][2 * n + 1]);
        }
    }
}

// A warp's tiles to [HEADS][VALUE_PITCH], elements where they belong.
UF_DEVICE void put_values(float* values, const float (&part)[DIM_TILES][TILES][4]) {
    int warp = threadIdx.x % TEAM / 32, lane = threadIdx.x % 32, first = warp * DIM_TILES * 16;
    if (first >= DIM) return;
    int place = lane / 8 + lane / 4 % 2 * 4;
#pragma unroll
    for (int j = 0; j < DIM_TILES; j++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                values[(8 * n + lane % 4 * 2 + i % 2) * VALUE_PITCH + first + 16 * j + place + i / 2 * 8] = part[j][n][i];
}

// Elements d and d + 1 of a head: divided, rounded, turned back by the row's angle.
UF_DEVICE void put_pair(const AttendRow& row, int head, int d, float2 x, float total) {
    float even = bf16_round(__fdiv_rn(x.x * UNSCALED, total)), odd = bf16_round(__fdiv_rn(x.y * UNSCALED, total));
    int r = (d - (DIM - 2 * row.pairs)) / 2;
    if (d >= DIM - 2 * row.pairs) {
        float c = row.cos[r], s = -row.sin[r], still = even;
        even = still * c - odd * s;
        odd = still * s + odd * c;
    }
    *(u32*)(row.out + head * DIM + d) = pair_bits(even, odd);
}

#if UF_SPLIT == 1
// One CTA takes all groups, one after the other.
template <class Keys> UF_DEVICE void attend(AttendShared& s, const AttendRow& row, Keys keys) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float peak[TILES], total[TILES], value[DIM_TILES][TILES][4] = {}, part[DIM_TILES][TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; n++) peak[n] = from_bits(0xFF800000u), total[n] = 0.0f;
    constexpr bool AHEAD = TILES == 1 && GROUPS > 4;  // there are registers for the next group's keys, and many groups
    Raw raw[2];
    if (AHEAD) read_keys(0, keys, raw);
    fetch_query(s, row);
#pragma unroll 1
    for (int g = 0; g < GROUPS; g++) {
        if (!AHEAD) read_keys(g * GROUP, keys, raw);
        __syncthreads();
        mark_keys(s, 0, g * GROUP, keys);
        score_keys(s, 0, raw);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            int head = warp + 8 * n;
            float2 l = logits_of(s, 0, head, lane);
            float top = fmaxf(fmaxf(peak[n], warp_max(fmaxf(l.x, l.y))), NEVER), keep = expf(peak[n] - top);
            total[n] = total[n] * keep + weigh(s, 0, head, lane, l, top);
            peak[n] = top;
            if (lane == 0) s.keep[0][head] = keep;
        }
        __syncthreads();
        if (AHEAD) read_keys((g + 1) * GROUP, keys, raw);  // they arrive meanwhile
        mix_values(s, 0, part);
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            float keep[2] = {s.keep[0][8 * n + lane % 4 * 2], s.keep[0][8 * n + lane % 4 * 2 + 1]};
#pragma unroll
            for (int j = 0; j < DIM_TILES; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) value[j][n][i] = value[j][n][i] * keep[i % 2] + part[j][n][i];
        }
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        int head = warp + 8 * n;
        if (lane == 0) s.total[head] = total[n] + (head < row.heads ? expf(row.sink[head] - peak[n]) : 1.0f);
    }
    __syncthreads();
    put_values(values_of(s, 0), value);
    __syncthreads();
    for (int i = threadIdx.x; i < row.heads * (DIM / 2); i += ATTEND_THREADS) {
        int head = i / (DIM / 2), d = i % (DIM / 2) * 2;
        put_pair(row, head, d, *(const float2*)(values_of(s, 0) + head * VALUE_PITCH + d), s.total[head]);
    }
}
#else
// The CTAs of a cluster take OWN groups each. Maxima and sums go to all; each CTA adds a share of the elements.
template <class Keys> UF_DEVICE void attend(AttendShared& s, const AttendRow& row, Keys keys) {
    int warp = threadIdx.x % TEAM / 32, lane = threadIdx.x % 32, stage = threadIdx.x / TEAM;
    int rank = (int)cluster_rank(), group = rank * OWN + stage;
    Raw raw[2];
    read_keys(group * GROUP, keys, raw);
    fetch_query(s, row);
    mark_keys(s, stage, group * GROUP, keys);
    cluster_barrier();  // every CTA runs: its shared memory may be written
    score_keys(s, stage, raw);
    __syncthreads();
    float2 l[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        l[n] = logits_of(s, stage, warp + 8 * n, lane);
        float top = warp_max(fmaxf(l[n].x, l[n].y));
        if (lane < SPLIT && group < GROUPS) store_in(&s.top[group][warp + 8 * n], lane, top);
    }
    cluster_barrier();
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        int head = warp + 8 * n;
        float peak = from_bits(0xFF800000u), own = 0.0f;
        for (int g = 0; g < GROUPS; g++) {
            float top = fmaxf(fmaxf(peak, s.top[g][head]), NEVER), keep = expf(peak - top);
            peak = top;
            if (g == group) own = peak;
            if (lane == 0 && stage == 0) s.keep[g][head] = keep;
        }
        float sum = weigh(s, stage, head, lane, l[n], own);
        if (lane < SPLIT && group < GROUPS) store_in(&s.sum[group][head], lane, sum);
        if (lane == 0 && stage == 0) s.total[head] = head < row.heads ? expf(row.sink[head] - peak) : 1.0f;
    }
    __syncthreads();
    float part[DIM_TILES][TILES][4];
    mix_values(s, stage, part);
    __syncthreads();
    put_values(values_of(s, stage), part);
    cluster_barrier();
    if (threadIdx.x < HEADS) {
        float total = 0.0f;
        for (int g = 0; g < GROUPS; g++) total = total * s.keep[g][threadIdx.x] + s.sum[g][threadIdx.x];
        s.total[threadIdx.x] = total + s.total[threadIdx.x];
    }
    __syncthreads();
    for (int i = rank * ATTEND_THREADS + threadIdx.x; i < row.heads * (DIM / 2); i += SPLIT * ATTEND_THREADS) {
        int head = i / (DIM / 2), d = i % (DIM / 2) * 2;
        float2 parts[GROUPS], x = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            parts[g] = load_in((const float2*)(values_of(s, g % OWN) + head * VALUE_PITCH + d), g / OWN);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            float keep = s.keep[g][head];
            x = make_float2(x.x * keep + parts[g].x, x.y * keep + parts[g].y);
        }
        put_pair(row, head, d, x, s.total[head]);
    }
    cluster_barrier();  // others may still read this CTA's values
}
#endif
