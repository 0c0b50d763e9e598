// A row of logits in the shared memory of a cluster, read from global memory once: each CTA holds a slice of it,
// each warp a stretch (uf/cluster_topk.cuh), a lane four neighbours of each run of 128. Sums are of integers: no
// order of additions shows, and what a number exceeds is found exactly.
#include <uf/cluster_topk.cuh>

constexpr int DRAW_THREADS = 512, DRAW_WARPS = SELECT_CTAS * DRAW_THREADS / 32;
constexpr int EACH = DRAW_WARPS / 32;  // warps of the cluster whose message a lane reads
constexpr int LOADS = 8;               // of a lane that are under way at once: all of the released vocabulary

// What each warp of the cluster told all CTAs. Two turns: who writes the next one may have peers that read this one.
struct Told {
    u64 sum[2][DRAW_WARPS];
    u32 bits[2][DRAW_WARPS], id[2][DRAW_WARPS], found[2], asked;
};

struct Row {
    float* held;  // this CTA's slice; -inf behind the row
    Told& told;
    Stretch part;  // of this warp
    int n, base, size, turn;  // ids of the row; of the slice: the first, and how many
    UF_DEVICE Row(float* held, Told& told, int n) : held(held), told(told), part(stretch_of(n)), n(n), turn(0) {
        size = length_of(n) * (DRAW_THREADS / 32);
        base = (int)cluster_rank() * size;
    }
    UF_DEVICE bool has(int x) const { return x >= base && x < min(base + size, n); }
    UF_DEVICE float& at(int x) const { return held[x - base]; }
    UF_DEVICE float4 quad(int i) const { return *(const float4*)(held + (i - base)); }
};

UF_DEVICE float value_of(u32 order) { return from_bits(order & 0x80000000u ? order & 0x7FFFFFFFu : ~order); }

// visit(id, order bits of its logit) for the ids of this warp, in order for each lane.
template <class Visit> UF_DEVICE void each_id(const Row& row, Visit visit) {
    scan(row.part, [&](int i) { return row.quad(i); }, [&](int i, const u32(&bits)[4]) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j < row.part.end) visit(i + j, bits[j]);
    });
}

// Fills the slice with quad(i), the values of ids i .. i + 3; those from n on may be anything.
template <class Quad> UF_DEVICE void hold(Row& row, Quad quad) {
    int lane = threadIdx.x % 32;
    float never = from_bits(0xFF800000u);
    for (int start = row.part.from; start < row.part.end; start += 128 * LOADS) {
        float4 x[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            int i = start + 128 * u + 4 * lane;
            x[u] = i < row.part.end ? quad(i) : make_float4(never, never, never, never);
        }
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            int i = start + 128 * u + 4 * lane;
            if (i >= row.part.end) continue;
            if (i + 1 >= row.n) x[u].y = never;
            if (i + 2 >= row.n) x[u].z = never;
            if (i + 3 >= row.n) x[u].w = never;
            *(float4*)(row.held + (i - row.base)) = x[u];
        }
    }
    __syncwarp();
}
// Values i .. i + 3 of n in global memory, i a multiple of 4; those from n on may be anything.
UF_DEVICE float4 load_quad(const float* p, int i, int n) {
    if (n % 4 == 0) return *(const float4*)(p + i);
    float x[4];
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = p[min(i + j, n - 1)];
    return make_float4(x[0], x[1], x[2], x[3]);
}
UF_DEVICE void store_quad(float* p, int i, int n, const float (&x)[4]) {
    if (n % 4 == 0) *(float4*)(p + i) = make_float4(x[0], x[1], x[2], x[3]);
    else
        for (int j = 0; j < min(4, n - i); j++) p[i + j] = x[j];
}

struct Best { u32 bits; int id; };  // order bits of the largest logit, the lowest id among equals

UF_DEVICE Best best_of(Best mine) {
    u32 top = __reduce_max_sync(0xFFFFFFFFu, mine.bits);
    return {top, (int)__reduce_min_sync(0xFFFFFFFFu, mine.bits == top ? (u32)mine.id : 0x7FFFFFFFu)};
}
UF_DEVICE Best better(Best a, Best b) { return b.bits > a.bits || (b.bits == a.bits && b.id < a.id) ? b : a; }

UF_DEVICE int warp_in_cluster() { return (int)cluster_rank() * (DRAW_THREADS / 32) + (int)threadIdx.x / 32; }

// `meanwhile()` runs while others finish: the row is not read any more.
template <class Meanwhile> UF_DEVICE Best best_id(Row& row, Meanwhile meanwhile) {
    Told& t = row.told;
    int lane = threadIdx.x % 32, turn = row.turn ^= 1;
    Best best = {0, 0x7FFFFFFF};
    each_id(row, [&](int x, u32 bits) { best = better(best, {bits, x}); });
    best = best_of(best);
    if (lane < SELECT_CTAS) {
        store_in(&t.bits[turn][warp_in_cluster()], lane, best.bits);
        store_in(&t.id[turn][warp_in_cluster()], lane, (u32)best.id);
    }
    cluster_arrive();
    meanwhile();
    cluster_wait();
    best = {0, 0x7FFFFFFF};
#pragma unroll
    for (int e = 0; e < EACH; e++) best = better(best, {t.bits[turn][32 * e + lane], (int)t.id[turn][32 * e + lane]});
    return best_of(best);
}

UF_DEVICE Best best_id(Row& row) { return best_id(row, [] {}); }

UF_DEVICE u64 warp_sum(u64 x) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, o);
    return x;
}

struct Sums { u64 all, before, own; };  // over the row, over ids before this warp's, over this warp's

// Sums of f(id, order bits).
template <class F> UF_DEVICE Sums sums_of(Row& row, F f) {
    Told& t = row.told;
    int lane = threadIdx.x % 32, turn = row.turn ^= 1, warp = warp_in_cluster();
    Sums s = {0, 0, 0};
    each_id(row, [&](int x, u32 bits) { s.own += f(x, bits); });
    s.own = warp_sum(s.own);
    if (lane < SELECT_CTAS) store_in(&t.sum[turn][warp], lane, s.own);
    cluster_barrier();
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        u64 x = t.sum[turn][32 * e + lane];
        s.all += x, s.before += 32 * e + lane < warp ? x : 0;
    }
    s.all = warp_sum(s.all), s.before = warp_sum(s.before);
    return s;
}

// The first id up to which f sums to more than `target(sum over all)`; -1 if there is none.
template <class F, class Target> UF_DEVICE int first_beyond(Row& row, F f, Target target) {
    Sums s = sums_of(row, f);
    u64 goal = target(s.all);
    if (s.all <= goal) return -1;
    int lane = threadIdx.x % 32;
    if (s.before <= goal && goal < s.before + s.own) {  // among this warp's
        int found = -1;
        scan(row.part, [&](int i) { return row.quad(i); }, [&](int i, const u32(&bits)[4]) {
            u64 x[4], sum = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) sum += x[j] = i + j < row.part.end ? f(i + j, bits[j]) : 0;
            u64 run = s.before + sum_below(sum, lane);
            if (run <= goal && goal < run + sum) {
                int j = 0;
                while ((run += x[j]) <= goal) j++;
                found = i + j;
            }
            s.before += warp_sum(sum);
        });
        found = (int)__reduce_max_sync(0xFFFFFFFFu, (u32)(found + 1)) - 1;
        if (lane < SELECT_CTAS) store_in(&row.told.found[row.turn], lane, (u32)found);
    }
    cluster_barrier();
    return (int)row.told.found[row.turn];
}

// Everyone learns the order bits of id x: read `told.asked` behind the next barrier of the cluster.
UF_DEVICE void ask(const Row& row, int x) {
    if (row.has(x) && threadIdx.x < SELECT_CTAS) store_in(&row.told.asked, threadIdx.x, order_bits(row.at(x)));
}
