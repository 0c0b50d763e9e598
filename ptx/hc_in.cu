// A sub-layer's input, and how its result will enter the streams (graphs/ops/hc_in.py).
// Shapes: x [T, C, D] bf16; last_pre [T, C] f32; fn [2C + C*C, C*D] f32; scale [3], base [2C + C*C] f32; weight [D] bf16;
// pre, post [T, C], comb [T, C, C] f32; y, y_q8 [T, D] bf16. C = 4, D a multiple of 256, at most 6,400.
// Threads: a cluster for one row, or for eight where there are many. Its CTAs share the columns of fn, where a warp has a
// projection and one the squares, and the dimensions of y, where a thread has one. The first CTA adds up, and a warp a
// row normalises the C x C matrix, a lane an element.
// Order of a sum: four products at a time in f32, these ascending in double over a lane's vectors, a tree over lanes,
// then CTA by CTA; the squares of y in double, a tree over threads, then CTA by CTA. Shared memory: the sums.
// Limited by reading fn, then by the latency of 2 * iterations divisions.
#include <uf/cluster.cuh>
#include <uf/early.cuh>
#include <uf/reduce.cuh>
#include <uf/vector.cuh>

constexpr int THREADS = 800;
constexpr int CTAS = 8, COPIES = 4, SUMS = 2 * COPIES + COPIES * COPIES + 1, MANY = 8;
static_assert(THREADS == 32 * SUMS, "a warp a sum");

struct Shared {
    double sums[CTAS][MANY][SUMS];  // of the first CTA
    double squares[CTAS][MANY];
};

UF_DEVICE float sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + expf(fminf(-x, 88.0f))); }

// Sum over i (rows) or j (columns) of a 4 x 4 matrix held by lanes 4i + j, in increasing order.
UF_DEVICE float sum4(float v, bool over_rows, int lane) {
    int i = lane / 4, j = lane % 4;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        float one = __shfl_sync(0xFFFFFFFFu, v, over_rows ? 4 * n + j : 4 * i + n);
        sum = n ? sum + one : one;
    }
    return sum;
}

UF_DEVICE float dot4(float4 w, float4 x) { return fmaf(w.w, x.w, fmaf(w.z, x.z, fmaf(w.y, x.y, w.x * x.x))); }

// Vectors of four that a lane has of fn at once: those in front are on their way before it is the kernel's turn.
template <int AHEAD> struct Columns {
    const float4* w;
    float4 mine[AHEAD];
    int count;  // of the CTA

    UF_DEVICE Columns(const Args& a) {
        int warp = threadIdx.x / 32, part = a.fn_1 / CTAS;
        count = part / 4;
        w = (const float4*)(a.fn + (i64)min(warp, a.fn_0 - 1) * a.fn_1 + cluster_rank() * part);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) mine[i] = at(threadIdx.x % 32 + 32 * i);
    }
    UF_DEVICE float4 at(int v) const { return v < count ? w[v] : make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
};

// This CTA's columns for `ROWS` rows from `first` on: a warp's projection, the last warp's squares.
template <int ROWS, int AHEAD> UF_DEVICE void add_columns(const Args& a, int first, Columns<AHEAD>& columns, double (&sum)[ROWS]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bf16* rows = a.x + cluster_rank() * (a.fn_1 / CTAS);
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = 0.0;
    for (int start = lane; start < columns.count; start += 32 * AHEAD)
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int v = start + 32 * i;
            float4 mine = columns.mine[i];
            columns.mine[i] = columns.at(v + 32 * AHEAD);
            if (v >= columns.count) continue;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                uint2 bits = *(const uint2*)(rows + (i64)min(first + r, a.x_0 - 1) * a.fn_1 + 4 * v);
                float2 low = pair_of(bits.x), high = pair_of(bits.y);
                float4 x = make_float4(low.x, low.y, high.x, high.y);
                sum[r] += (double)dot4(warp < a.fn_0 ? mine : x, x);
            }
        }
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = warp_sum(sum[r]);
}

// A thread's element of the collapsed row, bf16; 0 where it has none.
UF_DEVICE float collapsed(const Args& a, int t, int d) {
    const bf16* x = a.x + (i64)t * a.fn_1 + d;
    const float* last_pre = a.last_pre + t * COPIES;
    float copy[COPIES];
#pragma unroll
    for (int c = 0; c < COPIES; c++) copy[c] = load(x, (i64)c * a.x_2);
    float sum = last_pre[0] * copy[0];
#pragma unroll
    for (int c = 1; c < COPIES; c++) sum = sum + last_pre[c] * copy[c];
    return bf16_round(sum);
}

// Element d of the normed row and its Q8, a warp a group.
UF_DEVICE void put_normed(const Args& a, const Shared& s, int r, int t, int d, float y) {
    double squares = 0.0;
#pragma unroll
    for (int c = 0; c < CTAS; c++) squares += s.squares[c][r];
    y = bf16_round(load(a.weight, d) * (inverse_root(squares, a.x_2, a.norm_eps) * y));
    u32 scale = q8_scale(warp_max(fabsf(y)));
    i64 at = (i64)t * a.x_2 + d;
    store(a.y, at, y);
    store(a.y_q8, at, e4m3_value(e4m3_code(y * from_bits((254u - scale) << 23))) * from_bits(scale << 23));
}

// One warp: lanes 0-3 pre, 4-7 post; lane l has element l % 16 of comb.
UF_DEVICE void coefficients(const Args& a, const Shared& s, int r, int t, int lane) {
    double all = 0.0;
    for (int c = 0; c < CTAS; c++) all += lane < SUMS ? s.sums[c][r][lane] : 0.0;
    float mean = (float)(__shfl_sync(0xFFFFFFFFu, all, SUMS - 1) / (double)a.fn_1);
    float mix = (float)all * __fdiv_rn(1.0f, __fsqrt_rn(mean + a.norm_eps));
    if (lane < COPIES) a.pre[t * COPIES + lane] = sigmoid(mix * a.scale[0] + a.base[lane]) + a.eps;
    else if (lane < 2 * COPIES) a.post[t * COPIES + lane - COPIES] = 2.0f * sigmoid(mix * a.scale[1] + a.base[lane]);
    int n = 2 * COPIES + lane % 16;
    float m = __shfl_sync(0xFFFFFFFFu, mix, n) * a.scale[2] + a.base[n], peak = m;
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) peak = fmaxf(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, o));
    m = expf(m - peak);
    m = __fdiv_rn(m, sum4(m, false, lane)) + a.eps;
    for (int step = 0; step < 2 * a.iterations - 1; step++) m = __fdiv_rn(m, sum4(m, step % 2 == 0, lane) + a.eps);
    if (lane < 16) a.comb[t * 16 + lane] = m;
}

template <int ROWS, int AHEAD> UF_DEVICE void take_in(const Args& a, Shared& s, int first) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = cluster_rank();
    int part = a.x_2 / CTAS, d = rank * part + threadIdx.x;
    bool own = threadIdx.x < part;  // for all lanes of a warp, or none
    Columns<AHEAD> columns(a);
    cluster_arrive();
    take_turn();
    float y[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) y[r] = own ? collapsed(a, min(first + r, a.x_0 - 1), d) : 0.0f;
    double sum[ROWS];
    add_columns(a, first, columns, sum);
    cluster_wait();  // all CTAs run: their memory may be written
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        double squares = block_sum((double)y[r] * (double)y[r]);
        if (lane == 0) store_in(&s.sums[rank][r][warp], 0, sum[r]);
        if (threadIdx.x < CTAS) store_in(&s.squares[rank][r], threadIdx.x, squares);
    }
    cluster_barrier();
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (own && first + r < a.x_0) put_normed(a, s, r, first + r, d, y[r]);
    int r = SUMS - 1 - warp;  // the last warps have no element
    if (rank == 0 && r < ROWS && first + r < a.x_0) coefficients(a, s, r, first + r, lane);
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS) uf_hc_in(const Args a) {
    __shared__ Shared s;
    int group = blockIdx.x / CTAS;
    if (gridDim.x / CTAS == a.x_0) take_in<1, 10>(a, s, group);
    else take_in<MANY, 2>(a, s, group * MANY);
}
