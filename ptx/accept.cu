// Which drafts stay, and the token behind them: block verification (graphs/ops/accept.py, graphs/verify.py).
// Shapes: logits [T, V] f32; ids, slot, position [T]; row_start [S+1]; q [slots, B, V] f32 or absent; mask [T, V/32];
// bias_ids, bias [S, n]; banned [T]; temperature, top_p, top_k, seed, step, want_logprobs [S];
// accepted, token [S]; logprob [T]; top_ids, top_logprobs [T, 20].
// Threads: a CTA a sequence, its rows one after the other. Limited by reading logits and q a few times.
#include <uf/constrain.cuh>
#include <uf/philox.cuh>

extern "C" __global__ void __launch_bounds__(TOPK_THREADS) uf_accept(const Args a) {
    __shared__ Workspace w;
    __shared__ Distribution p[2], last;  // of a row and the next, and of the row behind which the token comes
    int s = blockIdx.x, first = a.row_start[s], m = a.row_start[s + 1] - first - 1, n = a.logits_1;
    for (int row = first; row <= first + m; row++) {
        if (threadIdx.x == 0) a.logprob[row] = 0.0f;
        for (int i = threadIdx.x; i < a.top_ids_1; i += TOPK_THREADS) {
            a.top_ids[row * a.top_ids_1 + i] = -1;
            a.top_logprobs[row * a.top_ids_1 + i] = from_bits(0xFF800000u);
        }
    }
    __syncthreads();
    if (m < 0) {
        if (threadIdx.x == 0) a.accepted[s] = 0, a.token[s] = 0;
        return;
    }
    Bias bias = bias_of(a.bias_ids + s * a.bias_ids_1, a.bias + s * a.bias_ids_1, a.bias_ids_1);
    auto logit_at = [&](int i) {
        int row = first + i, banned = a.banned[row];
        const float* logits = a.logits + (i64)row * n;
        const u32* mask = a.mask + (i64)row * a.mask_1;
        return [=](int x) { return allowed(mask, banned, x) ? with_bias(bias, x, logits[x]) : from_bits(0xFF800000u); };
    };
    int kept = 0, token;
    if (a.temperature[s] == 0.0f) {
        token = argmax(w, n, logit_at(0));
        while (kept < m && token == a.ids[first + kept + 1]) token = argmax(w, n, logit_at(++kept));
    } else {
#if UF_HAS_q
        const float* q = a.q + (i64)max(a.slot[first], 0) * a.q_1 * n;
        auto drawn = [=](int i, int x) { return i < a.q_1 ? (double)q[(i64)i * n + x] : 0.0; };
#else
        auto drawn = [](int, int) { return 0.0; };  // drawn from nothing known: none of them stays
#endif
        double reach = 1.0, scale = 1.0;
        for (int i = 0; i <= m && reach > 0.0; i++) {
            Distribution here = distribution(w, n, logit_at(i), a.temperature[s], a.top_p[s], a.top_k[s]);
            if (threadIdx.x == 0) {
                p[i & 1] = here;
                if (i == 0) last = here;
            }
            __syncthreads();
            if (i == 0) continue;
            int draft = a.ids[first + i];
            double wanted = reach * probability(p[i - 1 & 1], logit_at(i - 1), draft);
            double had = drawn(i - 1, draft);
            reach = had > 0.0 ? fmin(wanted, had) / had : 0.0;
            double chance = reach;
            if (i < m) {
                auto logit = logit_at(i);
                double rest = total_of_ids(w, n, [&](int x) {
                    return reach > 0.0 ? fmax(reach * probability(p[i & 1], logit, x) - drawn(i, x), 0.0) : 0.0;
                });
                chance = rest + (1.0 - reach) > 0.0 ? rest / (rest + (1.0 - reach)) : 1.0;
            }
            double coin = uniform(a.seed[s], a.position[first] + i, a.step[s], PURPOSE_ACCEPT);
            if (coin < chance) {
                kept = i, scale = reach;
                if (threadIdx.x == 0) last = p[i & 1];
            }
            __syncthreads();
        }
        auto logit = logit_at(kept);
        double u = uniform(a.seed[s], a.position[first] + kept + 1, a.step[s], PURPOSE_RESIDUAL);
        auto whole = [&](int x) { return probability(last, logit, x); };
        auto left = [&](int x) { return fmax(scale * probability(last, logit, x) - drawn(kept, x), 0.0); };
        bool residual = kept < m && total_of_ids(w, n, left) > 0.0;
        __syncthreads();
        token = residual ? pick(w, n, u, left) : pick(w, n, u, whole);
    }
    if (threadIdx.x == 0) a.accepted[s] = kept, a.token[s] = token;
    if (!a.want_logprobs[s]) return;
    for (int i = 0; i <= kept; i++) {
        auto logit = logit_at(i);
        int row = first + i, chosen = i < kept ? a.ids[first + i + 1] : token;
        Distribution d = distribution(w, n, logit, 1.0f, 1.0f, 0);
        double norm = log(d.z);
        auto logs = [&](int x) { return (float)((double)logit(x) - (double)d.peak - norm); };
        if (threadIdx.x == 0) a.logprob[row] = logs(chosen);
        float below = from_bits(0x7F800000u);
        int behind = -1;  // the alternatives come one by one: smaller than the last, or equal with a larger id
        for (int place = 0; place < min(a.top_ids_1, n); place++) {
            auto rest = [&](int x) {
                float l = logit(x);
                return l < below || (l == below && x > behind) ? l : from_bits(0xFFC00000u);  // NaN never wins
            };
            int next = argmax(w, n, rest);
            below = logit(next), behind = next;
            if (threadIdx.x == 0) {
                a.top_ids[row * a.top_ids_1 + place] = next;
                a.top_logprobs[row * a.top_ids_1 + place] = logs(next);
            }
        }
    }
}
