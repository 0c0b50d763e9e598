// Table rows of every row's n-grams (graphs/ops/engram_hash.py).
// Shapes: ids [T]; history [slots, R]; slot, position [T]; row_start [S+1]; token_map [V] i64; multipliers [orders+1];
// primes, offsets [columns] i64; y [T, columns] i64.
// Threads: a CTA a row, a thread a column. Exact 64-bit integers.
#include <uf/early.cuh>
#include <uf/rows.cuh>

extern "C" __global__ void uf_engram_hash(const Args a) {
    Turn turn;
    int t = blockIdx.x, column = threadIdx.x;
    if (column >= a.primes_0) return;
    int order = column / (a.primes_0 / (a.multipliers_0 - 1)) + 1;  // farthest distance that it looks back
    int first = first_row(a.row_start, a.row_start_0 - 1, t);
    i64 pad = a.token_map[a.pad_token], mixed = 0;
    bool dead = false;
    for (int back = 0; back <= order; back++) {
        int row = row_back(t, first, back);
        i64 id = -1;
        if (back <= a.position[t])
            id = row >= 0 ? a.ids[row]
                          : a.history[slot_of(a.slot, t, a.history_0) * a.history_1 + ring_at(a.position[t] - back, a.history_1)];
        dead = dead || id < 0;
        mixed ^= (dead ? pad : id) * a.multipliers[back];
    }
    a.y[t * a.primes_0 + column] = mixed % a.primes[column] + a.offsets[column];
}
