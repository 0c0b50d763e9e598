// A drafted token and the distribution that it was drawn from (graphs/ops/draft_sample.py).
// Shapes: logits [S*B, V] f32; markov [S, V] f32; at, slot [S*B]; bias_ids, bias [S, n]; drafts [S, B]; q [slots, B, V] f32.
// Threads: grid S * SELECT_CTAS, a cluster a sequence. Limited by reading its logits once.
// Shared memory: the CTA's slice of them.
#include <uf/constrain.cuh>
#include <uf/distribution.cuh>
#include <uf/early.cuh>
#include <uf/philox.cuh>

extern __shared__ __align__(16) float slice[];

extern "C" __global__ void __cluster_dims__(SELECT_CTAS, 1, 1)
    __launch_bounds__(DRAW_THREADS, 1) uf_draft_sample(const Args a) {
    Turn turn;
    __shared__ Workspace w;
    int s = blockIdx.x / SELECT_CTAS, at = s * a.block + a.index, n = a.markov_1;
    const float *block = a.logits + (i64)at * n, *markov = a.markov + (i64)s * n;
    Row row(slice, w.told, n);
    cluster_arrive();
    hold(row, [&](int i) {
        float4 x = load_quad(block, i, n), y = load_quad(markov, i, n);
        return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    });
    add_bias(row, a.bias_ids + s * a.bias_ids_1, a.bias + s * a.bias_ids_1, a.bias_ids_1);
    cluster_wait();  // all CTAs run: they can be told
    int token;
    if (a.temperature[s] == 0.0f || a.slot[at] < 0) {
        token = best_id(row).id;
    } else {
        make_powers(w.powers);
        Distribution d = distribution(w, row, a.temperature[s], a.top_p[s], a.top_k[s]);
        float* q = a.q + ((i64)a.slot[at] * a.q_1 + a.index) * n;
        Pair share = pair_of(d.share);
        scan(row.part, [&](int i) { return row.quad(i); }, [&](int i, const u32(&bits)[4]) {
            if (i >= n) return;
            float y[4];
#pragma unroll
            for (int j = 0; j < 4; j++) y[j] = (weight_of(d, i + j, bits[j]) * share).high;  // 0 behind the row
            *(float4*)&row.at(i) = make_float4(y[0], y[1], y[2], y[3]);
            store_quad(q, i, n, y);
        });
        __syncwarp();
        double u = uniform(a.seed[s], a.at[at] + 1, a.step[s], PURPOSE_DRAFT);
        // What was kept is what is drawn from.
        token = pick(row, u, [&](int, u32 bits) { return __float2ull_rn(value_of(bits) * SHARE_UNIT); });
        token = max(token, 0);
    }
    if (cluster_rank() == 0 && threadIdx.x == 0) a.drafts[s * a.drafts_1 + a.index] = token;
}
