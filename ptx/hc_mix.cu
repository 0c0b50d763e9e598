// Hyper-connection coefficients of a sub-layer (graphs/ops/hc_mix.py).
// Shapes: x [T, C, D] bf16; fn [2C + C*C, C*D] f32; scale [3], base [2C + C*C] f32; pre, post [T, C], comb [T, C, C] f32.
// C = 4, D a multiple of 8.
// Threads: a cluster for one row, or for sixteen where there are many. Its CTAs share the columns; a warp has a projection
// or the squares, where rows are many six projections of four rows and the squares of one of them. The first CTA adds up,
// and a warp a row normalises the C x C matrix, a lane an element.
// Order of a sum: ascending over a lane's elements with what rounding loses kept beside it, a tree over lanes in double,
// then CTA by CTA. Coefficients off by an ulp turn bf16 ties of whole streams over, and drafts of three stages multiply
// that. Pairs of f32 cost less than doubles where those are slow.
// Shared memory: the sums. Limited by reading fn, where rows are many by arithmetic.
#include <uf/cluster.cuh>
#include <uf/early.cuh>
#include <uf/reduce.cuh>
#include <uf/vector.cuh>

constexpr int CTAS = 8, COPIES = 4, OUTPUTS = 2 * COPIES + COPIES * COPIES, SUMS = OUTPUTS + 1;
constexpr int THREADS = UF_THREADS, ROWS = UF_ROWS;  // of a cluster; graphs/ops/hc_mix.py chooses
typedef double Sums[CTAS][ROWS][SUMS];

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

UF_DEVICE void hand_over(Sums& sums, int row, int number, Sum sum) {
    double all = warp_sum((double)sum.high + (double)sum.low);
    if (threadIdx.x % 32 == 0) store_in(&sums[cluster_rank()][row][number], 0, all);
}

// This CTA's columns of the rows from `first` on.
#if UF_ROWS == 1
UF_DEVICE void add_columns(const Args& a, int first, Sums& sums) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = a.fn_1 / CTAS, from = cluster_rank() * part;
    const float4* w = (const float4*)(a.fn + (i64)min(warp, OUTPUTS - 1) * a.fn_1 + from);
    const bf16* x = a.x + (i64)first * a.fn_1 + from;
    Sum sum;
#pragma unroll 4
    for (int v = lane; v < part / 4; v += 32) {
        float4 mine = w[v], of = load4(x, 4 * v);
        sum.add(warp < OUTPUTS ? mine : of, of);
    }
    hand_over(sums, 0, warp, sum);
}
#else
UF_DEVICE void add_columns(const Args& a, int first, Sums& sums) {
    constexpr int MINE = 4, SIDES = 4, EACH = OUTPUTS / SIDES;  // rows of a warp; warps that share them, a part of fn each
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = a.fn_1 / CTAS, from = cluster_rank() * part;
    int side = warp % SIDES, row = warp / SIDES * MINE;
    const float* w = a.fn + (i64)side * EACH * a.fn_1 + from;
    const bf16* x[MINE];
#pragma unroll
    for (int r = 0; r < MINE; r++) x[r] = a.x + (i64)min(first + row + r, a.x_0 - 1) * a.fn_1 + from;
    const bf16* own = a.x + (i64)min(first + row + side, a.x_0 - 1) * a.fn_1 + from;
    Sum sum[EACH][MINE], square;
#pragma unroll 1
    for (int v = 4 * lane; v < part; v += 4 * 32) {
        float4 of[MINE], mine = load4(own, v);
        square.add(mine, mine);
#pragma unroll
        for (int r = 0; r < MINE; r++) of[r] = load4(x[r], v);
#pragma unroll
        for (int p = 0; p < EACH; p++) {
            float4 weight = load4(w, p * a.fn_1 + v);
#pragma unroll
            for (int r = 0; r < MINE; r++) sum[p][r].add(weight, of[r]);
        }
    }
#pragma unroll
    for (int p = 0; p < EACH; p++)
#pragma unroll
        for (int r = 0; r < MINE; r++) hand_over(sums, row + r, side * EACH + p, sum[p][r]);
    hand_over(sums, row + side, OUTPUTS, square);
}
#endif

// One warp: lanes 0-3 pre, 4-7 post; lane l has element l % 16 of comb.
UF_DEVICE void coefficients(const Args& a, const Sums& sums, int r, int t, int lane) {
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

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1) uf_hc_mix(const Args a) {
    Turn turn;
    __shared__ Sums sums;
    int first = blockIdx.x / CTAS * ROWS;
    cluster_barrier();  // the first CTA runs: its memory may be written
    add_columns(a, first, sums);
    cluster_barrier();
    int warp = threadIdx.x / 32;
    if (cluster_rank() == 0 && warp < ROWS && first + warp < a.x_0) coefficients(a, sums, warp, first + warp, threadIdx.x % 32);
}
