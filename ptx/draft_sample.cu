// A drafted token and the distribution that it was drawn from (graphs/ops/draft_sample.py).
// Shapes: logits [S*B, V] f32; markov [S, V] f32; at, slot [S*B]; bias_ids, bias [S, n]; drafts [S, B]; q [slots, B, V] f32.
// Threads: a CTA a sequence. Limited by reading its logits a few times.
#include <uf/constrain.cuh>
#include <uf/philox.cuh>

extern "C" __global__ void __launch_bounds__(TOPK_THREADS) uf_draft_sample(const Args a) {
    __shared__ Workspace w;
    int s = blockIdx.x, row = s * a.block + a.index, n = a.markov_1;
    const float *block = a.logits + (i64)row * n, *markov = a.markov + (i64)s * n;
    Bias bias = bias_of(a.bias_ids + s * a.bias_ids_1, a.bias + s * a.bias_ids_1, a.bias_ids_1);
    auto logit = [&](int x) { return with_bias(bias, x, block[x] + markov[x]); };
    int token;
    if (a.temperature[s] == 0.0f || a.slot[row] < 0) {
        token = argmax(w, n, logit);
    } else {
        Distribution d = distribution(w, n, logit, a.temperature[s], a.top_p[s], a.top_k[s]);
        float* q = a.q + ((i64)a.slot[row] * a.q_1 + a.index) * n;
        for (int x = threadIdx.x; x < n; x += TOPK_THREADS) q[x] = (float)probability(d, logit, x);
        __syncthreads();
        token = pick(w, n, uniform(a.seed[s], a.at[row] + 1, a.step[s], PURPOSE_DRAFT), [&](int x) { return (double)q[x]; });
    }
    if (threadIdx.x == 0) a.drafts[s * a.drafts_1 + a.index] = token;
}
