// Which drafts stay, and the token behind them: block verification (graphs/ops/accept.py, graphs/verify.py).
// Shapes: logits [T, V] f32; ids, slot, position [T]; row_start [S+1]; q [slots, B, V] f32 or absent; mask [T, V/32];
// bias_ids, bias [S, n]; banned [T]; temperature, top_p, top_k, seed, step, want_logprobs [S];
// accepted, token [S]; logprob [T]; top_ids, top_logprobs [T, 20].
// Threads: grid S * SELECT_CTAS, a cluster a sequence, its rows one after the other. Limited by reading logits and q.
// Shared memory: the CTA's slice of a row's logits.
#include <uf/constrain.cuh>
#include <uf/distribution.cuh>
#include <uf/early.cuh>
#include <uf/philox.cuh>

constexpr int ALTERNATIVES = 32;  // at most: a lane each
struct Alternatives { u32 bits[ALTERNATIVES], id[ALTERNATIVES]; };

extern __shared__ __align__(16) float slice[];

// Row i of sequence s, constrained.
UF_DEVICE void hold_row(const Args& a, Row& row, int s, int i) {
    int at = a.row_start[s] + i, banned = a.banned[at];
    const float* logits = a.logits + (i64)at * row.n;
    const u32* mask = a.mask + (i64)at * a.mask_1;
    hold(row, [&](int x) { return allowed(mask, banned, x, load_quad(logits, x, row.n)); });
    add_bias(row, a.bias_ids + s * a.bias_ids_1, a.bias + s * a.bias_ids_1, a.bias_ids_1);
}

struct Verified { int kept, token; };

UF_DEVICE Verified greedy(const Args& a, Row& row, int s, int first, int m) {
    for (int kept = 0;; kept++) {
        int token = best_id(row, [&] { if (kept < m) hold_row(a, row, s, kept + 1); }).id;
        if (kept == m || token != a.ids[first + kept + 1]) return {kept, token};
    }
}

UF_DEVICE Verified sampled(const Args& a, Workspace& w, Row& row, int s, int first, int m) {
#if UF_HAS_q
    const float* q = a.q + (i64)max(a.slot[first], 0) * a.q_1 * row.n;
    auto drawn = [=](int i, int x) { return i < a.q_1 ? q[(i64)i * row.n + x] : 0.0f; };
#else
    auto drawn = [](int, int) { return 0.0f; };  // drawn from nothing known: none of them stays
#endif
    // What p leaves where the draft may have come from q: scale * weight - q.
    auto rest = [&](const Distribution& d, Pair scale, int i, int x, u32 bits) {
        Pair p = weight_of(d, x, bits) * scale;
        if (p.high == 0.0f) return (u64)0;
        Pair left = two_sum(p.high, -drawn(i, x));
        left.low += p.low;
        return (u64)max(units_of(left, SHARE_UNIT), (i64)0);
    };
    make_powers(w.powers);
    Distribution last;  // of the row behind which the token comes
    double reach = 1.0, scale = 1.0, wanted = 0.0;
    int kept = 0, held = 0;
    for (int i = 0; i <= m; i++) {
        if (i) {
            double had = (double)drawn(i - 1, a.ids[first + i]);
            reach = had > 0.0 ? fmin(wanted, had) / had : 0.0;
            if (reach == 0.0) break;
            hold_row(a, row, s, held = i);
        }
        Distribution d = distribution(w, row, a.temperature[s], a.top_p[s], a.top_k[s]);
        double chance = reach;
        if (i < m) {  // what the next draft has here
            int draft = a.ids[first + i + 1];
            ask(row, draft);
            Pair by = pair_of(reach * d.share);
            u64 sum = sums_of(row, [&](int x, u32 bits) { return i ? rest(d, by, i, x, bits) : (u64)0; }).all;
            wanted = reach * d.share * value_of(weight_of(d, draft, row.told.asked));
            double left = (double)sum / (double)SHARE_UNIT;
            chance = left + (1.0 - reach) > 0.0 ? left / (left + (1.0 - reach)) : 1.0;
        }
        double coin = uniform(a.seed[s], a.position[first] + i, a.step[s], PURPOSE_ACCEPT);
        if (i == 0 || coin < chance) kept = i, scale = reach, last = d;
    }
    if (held != kept) hold_row(a, row, s, kept);
    double u = uniform(a.seed[s], a.position[first] + kept + 1, a.step[s], PURPOSE_RESIDUAL);
    Pair by = pair_of(scale * last.share);
    int token = -1;
    if (kept < m) token = pick(row, u, [&](int x, u32 bits) { return rest(last, by, kept, x, bits); });
    if (token < 0) token = pick(row, u, [&](int x, u32 bits) { return mass_of(last, x, bits); });
    return {kept, max(token, 0)};
}

// Log-probabilities of the held row at temperature 1: of the token `chosen`, and the largest ones.
UF_DEVICE void logprobs(const Args& a, Workspace& w, Alternatives& most, Row& row, int at, int chosen) {
    int thread = threadIdx.x, count = min(a.top_ids_1, row.n);
    Distribution d = distribution(w, row, 1.0f, 1.0f, 0);
    ask(row, chosen);
    auto emit = [&](int place, int x) {
        store_in(&most.bits[place], 0, order_bits(row.at(x)));
        store_in(&most.id[place], 0, (u32)x);
    };
    if (count < row.n) cluster_topk(w.topk, row.n, count, [&](int i) { return row.quad(i); }, emit);
    else each_id(row, [&](int x, u32) { emit(x, x); });
    cluster_barrier();
    if (cluster_rank() != 0 || thread >= 32) return;
    auto logs = [&](u32 bits) { return (float)((double)value_of(bits) - (double)d.peak + log(d.share)); };
    if (thread == 0) a.logprob[at] = logs(row.told.asked);
    if (thread >= count) return;
    int place = 0;  // larger ones come first, and equal ones of lower ids
    for (int i = 0; i < count; i++)
        place += most.bits[i] > most.bits[thread] || (most.bits[i] == most.bits[thread] && i < thread);
    a.top_ids[at * a.top_ids_1 + place] = most.id[thread];
    a.top_logprobs[at * a.top_ids_1 + place] = logs(most.bits[thread]);
}

extern "C" __global__ void __cluster_dims__(SELECT_CTAS, 1, 1)
    __launch_bounds__(DRAW_THREADS, 1) uf_accept(const Args a) {
    Turn turn;
    __shared__ Workspace w;
    __shared__ Alternatives most;
    int s = blockIdx.x / SELECT_CTAS, first = a.row_start[s], m = a.row_start[s + 1] - first - 1;
    bool leader = cluster_rank() == 0;
    if (m < 0) {
        if (leader && threadIdx.x == 0) a.accepted[s] = 0, a.token[s] = 0;
        return;
    }
    Row row(slice, w.told, a.logits_1);
    cluster_arrive();
    hold_row(a, row, s, 0);
    cluster_wait();  // all CTAs run: they can be told
    Verified v = a.temperature[s] == 0.0f ? greedy(a, row, s, first, m) : sampled(a, w, row, s, first, m);
    if (leader && threadIdx.x == 0) a.accepted[s] = v.kept, a.token[s] = v.token;
    int told = a.want_logprobs[s] ? v.kept + 1 : 0;
    if (told) make_powers(w.powers);
    for (int i = 0; i < told; i++) {
        hold_row(a, row, s, i);
        logprobs(a, w, most, row, first + i, i < v.kept ? a.ids[first + i + 1] : v.token);
    }
    for (int at = first; leader && at <= first + m; at++) {  // places that nobody filled
        bool empty = at >= first + told;
        if (empty && threadIdx.x == 0) a.logprob[at] = 0.0f;
        for (int i = threadIdx.x + (empty ? 0 : row.n); i < a.top_ids_1; i += DRAW_THREADS) {
            a.top_ids[at * a.top_ids_1 + i] = -1;
            a.top_logprobs[at * a.top_ids_1 + i] = from_bits(0xFF800000u);
        }
    }
}
