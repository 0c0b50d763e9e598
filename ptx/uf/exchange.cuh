// How the ranks of a world hand each other fp32 messages (all_reduce.cu, all_gather.cu).
//
// Every rank has an inbox u32 [3 stages][world sources][capacity]. A rank writes its message into every rank's inbox,
// its own too, in the place of its number, and takes what all ranks wrote out of its own. The data is the flag: a word
// that has not arrived is EMPTY, a NaN that nobody sends (another NaN goes in its place), so numbers arrive bit for bit.
// Whoever has taken a word makes it EMPTY again. A message longer than `capacity` goes in pieces, and each piece takes
// the next stage, round and round; the first piece takes stage `stage`.
//
// Why no word is overwritten before it was taken, and none is taken twice:
//  1. All ranks run the same exchanges in the same order, one after the other: a kernel begins its work when all before
//     it on its rank have ended, with their writes in the memory of that GPU (uf/early.cuh). Consecutive pieces use
//     consecutive stages, also across kernels of a graph. Between launches of graphs, all ranks have ended.
//  2. A thread takes the same words that it sends, and sends piece p + 1 after it took piece p from every rank. So
//     when rank A sends piece p + 1 of a message, the same thread of rank B has sent piece p, hence emptied p - 1
//     before the fence in front of p. Stage (p + 1) mod 3 was used by p - 2.
//  3. When rank A begins a message, its last one is complete, so every thread of B that had words of the last piece has
//     sent them. A thread that had none (the last piece is shorter) may still be taking the piece before; its stage is
//     not the next but the one after, whose first use needs B's answer out of the next kernel. Two stages would not do.
//     Pairs of pieces have words for the same threads throughout, and end with the second: whoever has seen all of it
//     knows that every thread has taken the first, and what came before the pair it emptied before the fence in front.
//     Between the two of a pair there is no fence: the second takes a stage that was emptied before that fence, too.
//  4. All CTAs of all ranks wait for each other: their number fits a GPU at once (graphs/exchange.py).
//  5. Words of 4 bytes arrive whole; 16 bytes are four such words, each with its own flag.
//  6. The kernel behind an exchange may start early, for all CTAs of the exchange run by then. Not where ranks share a GPU
//     (group.py): its waiting CTAs could take the room that another rank needs to get as far as its exchange.
// A rank that does not come within some ten seconds is an error (a trap) and no hang.
#include <uf/clock.cuh>

constexpr u32 EMPTY = 0xFFFFFFFFu, OTHER_NAN = 0x7FFFFFFFu;
constexpr int STAGES = 3, MAX_WORLD = 8;
constexpr u32 MAX_POLLS = 1u << 24;  // of about a microsecond

struct Words { u32 w[4]; };

UF_DEVICE void send_words(u32* to, const Words& v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
}
UF_DEVICE Words peek_words(const u32* from) {
    Words v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(from) : "memory");
    return v;
}
UF_DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
UF_DEVICE bool arrived(const Words& v) {
    return v.w[0] != EMPTY && v.w[1] != EMPTY && v.w[2] != EMPTY && v.w[3] != EMPTY;
}

// Four values from `at` on, zeros behind the message's end.
UF_DEVICE Words message_words(const float* x, i64 at, i64 size) {
    Words v;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 bits = at + i < size ? to_bits(x[at + i]) : 0u;
        v.w[i] = bits == EMPTY ? OTHER_NAN : bits;
    }
    return v;
}

UF_DEVICE int next_stage(int stage) { return stage == STAGES - 1 ? 0 : stage + 1; }

// What was sent stays under way for as long, where nobody else is there.
UF_DEVICE void hop(const Exchange& g) {
    if (g.hop_ns)
        for (u64 sent = nanoseconds(); nanoseconds() - sent < g.hop_ns;) {}
}

// The four words from `from` on of each rank's message, which are EMPTY again behind it.
UF_DEVICE void take(const Exchange& g, u32* from, Words (&parts)[MAX_WORLD]) {
    bool all;
    u32 polls = 0;
    do {
        all = true;
#pragma unroll
        for (int r = 0; r < MAX_WORLD; r++)
            if (r < g.world) parts[r] = peek_words(from + (i64)r * g.capacity);
#pragma unroll
        for (int r = 0; r < MAX_WORLD; r++)
            if (r < g.world) all &= arrived(parts[r]);
        if (++polls == MAX_POLLS) asm volatile("trap;");
    } while (!all);
#pragma unroll
    for (int r = 0; r < MAX_WORLD; r++)
        if (r < g.world) send_words(from + (i64)r * g.capacity, Words{{EMPTY, EMPTY, EMPTY, EMPTY}});
}

// Send the message x[size] and call use(at, parts) for every four values of it: parts[r] is what rank r sent from x[at]
// on, r < world. `use` must not look at values behind the end.
template <class Use>
UF_DEVICE void exchange(const Exchange& g, const float* x, i64 size, Use use) {
    i64 first = 4 * ((i64)blockIdx.x * blockDim.x + threadIdx.x), step = 4 * (i64)gridDim.x * blockDim.x;
    int stage = g.stage;
    for (i64 start = 0; start < size; start += g.capacity, stage = next_stage(stage)) {
        i64 end = min(size, start + g.capacity);
        i64 box = (i64)stage * g.world * g.capacity - start, mine = box + (i64)g.rank * g.capacity;
        if (start) fence_system();  // what was emptied comes before what is sent now
        for (i64 at = start + first; at < end; at += step) {
            Words v = message_words(x, at, size);
#pragma unroll
            for (int r = 0; r < MAX_WORLD; r++)
                if (r < g.world) send_words(g.inbox[r] + mine + at, v);
        }
        hop(g);
        for (i64 at = start + first; at < end; at += step) {
            Words parts[MAX_WORLD];
            take(g, g.inbox[g.rank] + box + at, parts);
            use(at, parts);
        }
    }
}

// The ranks' sum of four values, rank 0 first.
UF_DEVICE float4 sum_of(const Exchange& g, const Words (&parts)[MAX_WORLD]) {
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[i] = from_bits(parts[0].w[i]);
#pragma unroll
        for (int r = 1; r < MAX_WORLD; r++)
            if (r < g.world) sum[i] = sum[i] + from_bits(parts[r].w[i]);
    }
    return make_float4(sum[0], sum[1], sum[2], sum[3]);
}

// The sum of all ranks' x[size]: use(at, sum) for every four values of it. A message falls into `world` slices, and goes
// in pairs of pieces: everybody sends rank r slice r, then rank r sends everybody its sum. That is 2 / world of the words
// that `exchange` sends, and twice its latency.
template <class Use>
UF_DEVICE void exchange_slices(const Exchange& g, const float* x, i64 size, Use use) {
    i64 first = 4 * ((i64)blockIdx.x * blockDim.x + threadIdx.x), step = 4 * (i64)gridDim.x * blockDim.x;
    i64 pairs = (size + (i64)g.world * g.capacity - 1) / ((i64)g.world * g.capacity);
    i64 slice = ((size + pairs * g.world - 1) / (pairs * g.world) + 3) / 4 * 4;  // in all pairs: see 3
    u32* inbox = g.inbox[g.rank];
    int stage = g.stage;
    for (i64 pair = 0; pair < pairs; pair++) {
        i64 start = pair * slice * g.world, box = (i64)stage * g.world * g.capacity, mine = box + (i64)g.rank * g.capacity;
        if (pair) fence_system();
        for (i64 at = first; at < slice; at += step)
#pragma unroll
            for (int r = 0; r < MAX_WORLD; r++)
                if (r < g.world) send_words(g.inbox[r] + mine + at, message_words(x, start + r * slice + at, size));
        hop(g);
        stage = next_stage(stage);
        i64 next = (i64)stage * g.world * g.capacity, own = next + (i64)g.rank * g.capacity;
        for (i64 at = first; at < slice; at += step) {
            Words parts[MAX_WORLD];
            take(g, inbox + box + at, parts);
            float4 sum = sum_of(g, parts);
            Words v = message_words(&sum.x, 0, 4);
#pragma unroll
            for (int r = 0; r < MAX_WORLD; r++)
                if (r < g.world) send_words(g.inbox[r] + own + at, v);
        }
        hop(g);
        stage = next_stage(stage);
        for (i64 at = first; at < slice; at += step) {
            Words parts[MAX_WORLD];
            take(g, inbox + next + at, parts);
#pragma unroll
            for (int r = 0; r < MAX_WORLD; r++)
                if (r < g.world)
                    use(start + r * slice + at, make_float4(from_bits(parts[r].w[0]), from_bits(parts[r].w[1]),
                                                            from_bits(parts[r].w[2]), from_bits(parts[r].w[3])));
        }
    }
}
