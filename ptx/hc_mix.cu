// Hyper-connection coefficients of a sub-layer (graphs/ops/hc_mix.py).
// Shapes: x [T, C, D] bf16; fn [2C + C*C, C*D] f32; scale [3], base [2C + C*C] f32; pre, post [T, C], comb [T, C, C] f32.
// C = 4, D a multiple of 8.
// Threads: a cluster for one row, or for eight where there are many. Its CTAs share the columns, a warp has a projection
// and one the squares; the first CTA adds up, and a warp a row normalises the C x C matrix, a lane an element.
// Order of a sum: ascending over a lane's elements with what rounding loses kept beside it, a tree over lanes in double,
// then CTA by CTA. Coefficients off by an ulp turn bf16 ties of whole streams over, and drafts of three stages multiply
// that. Pairs of f32 cost less than doubles where those are slow. Shared memory: the sums. Limited by reading fn.
#include <uf/cluster.cuh>
#include <uf/reduce.cuh>
#include <uf/vector.cuh>

constexpr int THREADS = 800;
constexpr int CTAS = 8, COPIES = 4, SUMS = 2 * COPIES + COPIES * COPIES + 1, MANY = 8;
static_assert(THREADS == 32 * SUMS, "a warp a sum");

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

// A sum of products and, apart from it, all that its roundings lost (Ogita, Rump, Oishi 2005, Dot2).
struct Sum {
    float high = 0.0f, low = 0.0f;
    UF_DEVICE void add(float w, float x) {
        float product = w * x, both = high + product, kept = both - high;
        low += ((high - (both - kept)) + (product - kept)) + fmaf(w, x, -product);
        high = both;
    }
    UF_DEVICE void add(float4 w, float4 x) { add(w.x, x.x), add(w.y, x.y), add(w.z, x.z), add(w.w, x.w); }
};

// This CTA's columns for `ROWS` rows from `first` on: a warp's projection, the last warp's squares.
template <int ROWS> UF_DEVICE void add_columns(const Args& a, int first, double (*sums)[MANY][SUMS]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = a.fn_1 / CTAS, from = cluster_rank() * part;
    const float4* w = (const float4*)(a.fn + (i64)min(warp, a.fn_0 - 1) * a.fn_1 + from);
    Sum sum[ROWS];
#pragma unroll 4
    for (int v = lane; v < part / 4; v += 32) {
        float4 mine = w[v];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            uint2 bits = *(const uint2*)(a.x + (i64)min(first + r, a.x_0 - 1) * a.fn_1 + from + 4 * v);
            float2 low = pair_of(bits.x), high = pair_of(bits.y);
            float4 x = make_float4(low.x, low.y, high.x, high.y);
            sum[r].add(warp < a.fn_0 ? mine : x, x);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        double all = warp_sum((double)sum[r].high + (double)sum[r].low);
        if (lane == 0) store_in(&sums[cluster_rank()][r][warp], 0, all);
    }
}

// One warp: lanes 0-3 pre, 4-7 post; lane l has element l % 16 of comb.
UF_DEVICE void coefficients(const Args& a, double (*sums)[MANY][SUMS], int r, int t, int lane) {
    double all = 0.0;
    for (int c = 0; c < CTAS; c++) all += lane < SUMS ? sums[c][r][lane] : 0.0;
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

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS) uf_hc_mix(const Args a) {
    __shared__ double sums[CTAS][MANY][SUMS];
    int group = blockIdx.x / CTAS, rows = gridDim.x / CTAS == a.x_0 ? 1 : MANY;
    cluster_arrive();
    cluster_wait();  // the first CTA runs: its memory may be written
    if (rows == 1) add_columns<1>(a, group, sums);
    else add_columns<MANY>(a, group * MANY, sums);
    cluster_arrive();
    cluster_wait();
    int warp = threadIdx.x / 32, t = group * rows + warp;
    if (cluster_rank() == 0 && warp < rows && t < a.x_0) coefficients(a, sums, warp, t, threadIdx.x % 32);
}
