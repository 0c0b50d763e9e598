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

constexpr int ATTEND_THREADS = 256, ATTEND_WARPS = ATTEND_THREADS / 32;
constexpr int GROUP = 64;  // keys that the model authors' kernel takes at once
constexpr int DIM = UF_DIM, TILES = UF_TILES, HEADS = 8 * TILES, GROUPS = UF_GROUPS, SPLIT = UF_SPLIT;
constexpr int OWN = (GROUPS + SPLIT - 1) / SPLIT;  // groups of a CTA
constexpr int STAGES = SPLIT > 1 ? OWN : 1;        // groups that it holds at once
constexpr int PIECES = UF_PIECES;                  // bf16 numbers that make a weight
constexpr int DIM_TILES = (DIM / 16 + ATTEND_WARPS - 1) / ATTEND_WARPS;  // of 16 output elements, of a warp
// Rows that are read together start in different banks.
constexpr int KEY_PITCH = DIM + 8, WEIGHT_PITCH = GROUP + 8, LOGIT_PITCH = GROUP + 4, VALUE_PITCH = DIM + 4;
constexpr float NEVER = -1e30f;  // below every logit, and no infinity: a group may have no valid key

struct AttendShared {
    u16 key[STAGES][GROUP * KEY_PITCH];  // afterwards values [HEADS][VALUE_PITCH] f32
    u16 query[HEADS * KEY_PITCH];
    u16 weight[STAGES][PIECES][HEADS * WEIGHT_PITCH];
    float logit[STAGES][2][HEADS * LOGIT_PITCH];
    float top[GROUPS][HEADS], sum[GROUPS][HEADS], keep[GROUPS][HEADS], total[HEADS];
    bool valid[STAGES][GROUP];
};
static_assert(DIM % 64 == 0, "four threads take a key, 16 elements at a time");
static_assert(sizeof(AttendShared) <= UF_SHARED, "attend_shared of attention.py is too small");
static_assert(HEADS * VALUE_PITCH * 4 <= GROUP * KEY_PITCH * 2, "values do not fit where keys were");

struct AttendRow {
    const bf16* q;  // [heads, DIM]
    bf16* out;      // the same
    int heads;      // of this CTA, at most HEADS
    const float *sink, *cos, *sin;
    int pairs;
};

UF_DEVICE float* values_of(AttendShared& s, int stage) { return (float*)s.key[stage]; }

UF_DEVICE void fetch_query(AttendShared& s, const AttendRow& row) {
    for (int i = threadIdx.x; i < HEADS * DIM / 8; i += ATTEND_THREADS) {
        int h = i / (DIM / 8), d = i % (DIM / 8) * 8;
        uint4 x = h < row.heads ? *(const uint4*)(row.q + h * DIM + d) : make_uint4(0u, 0u, 0u, 0u);
        *(uint4*)(s.query + h * KEY_PITCH + d) = x;
    }
}

// 64 keys from key n on, four threads a key, 16 elements at a time. A key that does not count is zeros.
template <class Keys> UF_DEVICE void fetch_keys(AttendShared& s, int stage, int n, Keys keys) {
    constexpr int CHUNKS = DIM / 64;
    int i = threadIdx.x / 4, part = threadIdx.x % 4;
    Key k = keys(n + i);
    if (part == 0) s.valid[stage][i] = k.valid;
    u32* row = (u32*)(s.key[stage] + i * KEY_PITCH) + 8 * part;
    if (!k.valid) {
#pragma unroll
        for (int j = 0; j < CHUNKS; j++)
            *(uint4*)(row + 32 * j) = *(uint4*)(row + 32 * j + 4) = make_uint4(0u, 0u, 0u, 0u);
    } else if (k.global) {
        uint2 codes[CHUNKS];
        u32 scales[CHUNKS], x[8];
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            codes[j] = *(const uint2*)(k.codes + 8 * (4 * j + part));
            scales[j] = *(const u32*)(k.scales + 4 * j);
        }
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            u32 scale = e4m3_scale_pair(scales[j] >> (8 * part) & 255u);
#pragma unroll
            for (int e = 0; e < 8; e++) x[e] = e2m1_pair(e < 4 ? codes[j].x : codes[j].y, e % 4, scale);
            *(uint4*)(row + 32 * j) = make_uint4(x[0], x[1], x[2], x[3]);
            *(uint4*)(row + 32 * j + 4) = make_uint4(x[4], x[5], x[6], x[7]);
        }
    } else {
        uint4 codes[CHUNKS];
        u32 scales[CHUNKS], x[8];
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            codes[j] = *(const uint4*)(k.codes + 16 * (4 * j + part));
            scales[j] = *(const u16*)(k.scales + 2 * j);
        }
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            u32 scale = e8m0_scale_pair(scales[j] >> (8 * (part / 2)) & 255u);
            u32 words[4] = {codes[j].x, codes[j].y, codes[j].z, codes[j].w};
#pragma unroll
            for (int e = 0; e < 8; e++) x[e] = e4m3_pair(words[e / 2], e % 2, scale);
            *(uint4*)(row + 32 * j) = make_uint4(x[0], x[1], x[2], x[3]);
            *(uint4*)(row + 32 * j + 4) = make_uint4(x[4], x[5], x[6], x[7]);
        }
    }
}

// Dots of the group's keys with all heads: a warp takes 16 keys and half of the dimensions.
UF_DEVICE void score_keys(AttendShared& s, int stage) {
    constexpr int STEPS = DIM / 32;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp / 4, matrix = lane / 8, r = lane % 8;
    const u16* key = s.key[stage] + (warp % 4 * 16 + matrix % 2 * 8 + r) * KEY_PITCH + half * (DIM / 2) + matrix / 2 * 8;
    const u16* query = s.query + (matrix / 2 * 8 * (TILES - 1) + r) * KEY_PITCH + half * (DIM / 2) + matrix % 2 * 8;
    float sum[2][TILES][4] = {};  // even and odd steps: two chains
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 a[4], b[2 * TILES];
        load_matrices(a, key + 16 * step);
        load_matrices(b, query + 16 * step);
#pragma unroll
        for (int n = 0; n < TILES; n++) multiply(sum[step % 2][n], a, b[2 * n], b[2 * n + 1]);
    }
    float* logit = s.logit[stage][half] + lane % 4 * 2 * LOGIT_PITCH + warp % 4 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            logit[(8 * n + i % 2) * LOGIT_PITCH + i / 2 * 8] = sum[0][n][i] + sum[1][n][i];
}

// Logits of keys lane and lane + 32 of the group, for one head.
UF_DEVICE float2 logits_of(const AttendShared& s, int stage, int head, int lane) {
    const float *first = s.logit[stage][0] + head * LOGIT_PITCH, *second = s.logit[stage][1] + head * LOGIT_PITCH;
    const float scale = (float)(1.0 / sqrt((double)DIM));
    float none = from_bits(0xFF800000u);
    return make_float2(s.valid[stage][lane] ? (first[lane] + second[lane]) * scale : none,
                       s.valid[stage][lane + 32] ? (first[lane + 32] + second[lane + 32]) * scale : none);
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
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, matrix = lane / 8, r = lane % 8, first = warp * DIM_TILES * 16;
#pragma unroll
    for (int j = 0; j < DIM_TILES; j++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) part[j][n][i] = 0.0f;
    if (first >= DIM) return;
    const u16* key = s.key[stage] + (matrix / 2 * 8 + r) * KEY_PITCH + first + matrix % 2 * 8;
    int weight = (matrix / 2 * 8 * (TILES - 1) + r) * WEIGHT_PITCH + matrix % 2 * 8;
#pragma unroll
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
                for (int n = 0; n < TILES; n++) multiply(part[j][n], a, b[p][2 * n], b[p][2 * n + 1]);
        }
    }
}

// A warp's tiles to [HEADS][VALUE_PITCH].
UF_DEVICE void put_values(float* values, const float (&part)[DIM_TILES][TILES][4]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp * DIM_TILES * 16;
    if (first >= DIM) return;
#pragma unroll
    for (int j = 0; j < DIM_TILES; j++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                values[(8 * n + lane % 4 * 2 + i % 2) * VALUE_PITCH + first + 16 * j + lane / 4 + i / 2 * 8] = part[j][n][i];
}

// Elements d and d + 1 of a head: divided, rounded, turned back by the row's angle.
UF_DEVICE void put_pair(const AttendRow& row, int head, int d, float2 x, float total) {
    float even = bf16_round(__fdiv_rn(x.x, total)), odd = bf16_round(__fdiv_rn(x.y, total));
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
    fetch_query(s, row);
    for (int g = 0; g < GROUPS; g++) {
        __syncthreads();
        fetch_keys(s, 0, g * GROUP, keys);
        __syncthreads();
        score_keys(s, 0);
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
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = (int)cluster_rank(), first = rank * OWN;
    int own = max(0, min(OWN, GROUPS - first));
    fetch_query(s, row);
    for (int i = 0; i < own; i++) fetch_keys(s, i, (first + i) * GROUP, keys);
    cluster_barrier();  // every CTA runs: its shared memory may be written
    for (int i = 0; i < own; i++) score_keys(s, i);
    __syncthreads();
    for (int i = 0; i < own; i++)
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            float2 l = logits_of(s, i, warp + 8 * n, lane);
            float top = warp_max(fmaxf(l.x, l.y));
            if (lane < SPLIT) store_in(&s.top[first + i][warp + 8 * n], lane, top);
        }
    cluster_barrier();
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        int head = warp + 8 * n;
        float peak = from_bits(0xFF800000u);
        for (int g = 0; g < GROUPS; g++) {
            float top = fmaxf(fmaxf(peak, s.top[g][head]), NEVER), keep = expf(peak - top);
            peak = top;
            if (lane == 0) s.keep[g][head] = keep;
            if (g < first || g >= first + own) continue;
            float sum = weigh(s, g - first, head, lane, logits_of(s, g - first, head, lane), peak);
            if (lane < SPLIT) store_in(&s.sum[g][head], lane, sum);
        }
        if (lane == 0) s.total[head] = head < row.heads ? expf(row.sink[head] - peak) : 1.0f;
    }
    __syncthreads();
    for (int i = 0; i < own; i++) {
        float part[DIM_TILES][TILES][4];
        mix_values(s, i, part);
        __syncthreads();
        put_values(values_of(s, i), part);
    }
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
