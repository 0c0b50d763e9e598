// A step's rows as they follow from each slot's last step (graphs/ops/follow_rows.py, graphs/width.py).
// Shapes: follows, end, ban, ban_end, own [S]; threshold [B]; chance [2, B, K]; price [T]; next_ids [slots, 1+B];
// next_at [slots, 2]; next_confidence [slots, B]; row_start [S+1]; slot, ids, position, banned [T]; step, kept [S].
// Without drafting B = 0, and own, threshold, chance, price, next_confidence are absent.
// Threads: one CTA; a thread a draft, then one thread decides, then a thread a row.
// Shared memory, dynamic: chances [S, 2, B], kept [S], first rows [S].
// Every float operation is rounded by itself, as NumPy does: what the host decides alone has to be the same.
#include <uf/early.cuh>

extern __shared__ float follow_shared[];

// `limit` of `Rule.kept`: drafts that could still become tokens.
UF_DEVICE int room(int start, int end, int block) { return min(max(end - start - 2, 0), block); }

extern "C" __global__ void __launch_bounds__(128) uf_follow_rows(const Args a) {
    Turn turn;
    int sequences = a.step_0, rows = a.ids_0, block = a.next_ids_1 - 1, thread = threadIdx.x;
    if (a.follows[0] < 0) {
        for (int s = thread; s < sequences; s += blockDim.x) a.kept[s] = max(a.row_start[s + 1] - a.row_start[s] - 1, 0);
        return;
    }
    float* chances = follow_shared;
    int* kept = (int*)(chances + sequences * 2 * block);
    int* first = kept + sequences;
#if UF_HAS_chance
    for (int i = thread; i < sequences * 2 * block; i += blockDim.x) {
        int draft = i % block, which = i / block % 2, s = i / block / 2, last = a.chance_2 - 1;
        float c = a.next_confidence[a.follows[s] * block + draft];
        float at = fminf(fmaxf(__fmul_rn(__fsub_rn(c, a.low), a.per_logit), 0.0f), (float)last);
        int knot = min((int)at, last - 1);
        const float* table = a.chance + (which * block + draft) * a.chance_2 + knot;
        float rise = __fsub_rn(table[1], table[0]);
        chances[i] = __fadd_rn(table[0], __fmul_rn(__fsub_rn(at, (float)knot), rise));
    }
    __syncthreads();
#endif
    if (thread == 0) {
        int left = rows - sequences;
        for (int s = 0; s < sequences; s++) {
            kept[s] = 0;
#if UF_HAS_chance
            float* mine = chances + s * 2 * block;  // survivals from here on
            for (int i = 1; i < block; i++)
                for (int which = 0; which < 2; which++)
                    mine[which * block + i] = __fmul_rn(mine[which * block + i - 1], mine[which * block + i]);
            int most = min(min(a.own[s], room(a.next_at[a.follows[s] * 2], a.end[s], block)), left);
            while (kept[s] < most && mine[kept[s]] >= a.threshold[kept[s]]) kept[s]++;
            left -= kept[s];
#endif
        }
#if UF_HAS_chance
        for (; left > 0; left--) {
            int best = -1;
            float most = 0.0f;
            for (int s = 0; s < sequences; s++) {
                if (a.own[s] >= 0 || kept[s] >= room(a.next_at[a.follows[s] * 2], a.end[s], block)) continue;
                float worth = chances[(s * 2 + 1) * block + kept[s]];
                bool more = best < 0 || worth > most || (worth == most && kept[s] < kept[best]);
                if (more) best = s, most = worth;
            }
            if (best < 0 || !(most >= a.price[rows - left])) break;
            kept[best]++;
        }
#endif
        int row = 0;
        for (int s = 0; s < sequences; s++) {
            first[s] = a.row_start[s] = row;
            row += 1 + kept[s];
        }
        a.row_start[sequences] = row;
    }
    __syncthreads();
    for (int t = thread; t < rows; t += blockDim.x) {
        int s = sequences - 1;
        while (first[s] > t) s--;
        int i = t - first[s], slot = a.follows[s];
        bool busy = i <= kept[s];  // behind the last sequence's rows others are idle
        int position = busy ? a.next_at[slot * 2] + i : 0;
        a.slot[t] = busy ? slot : -1;
        a.ids[t] = busy ? a.next_ids[slot * (1 + block) + i] : 0;
        a.position[t] = position;
        a.banned[t] = busy && position < a.ban_end[s] ? a.ban[s] : -1;
    }
    for (int s = thread; s < sequences; s += blockDim.x) {
        a.kept[s] = kept[s];
        a.step[s] = a.next_at[a.follows[s] * 2 + 1];
    }
}
