// score_j = sum_h relu(q_h . key_j) * weight_h * scale for reachable entries, else -inf (graphs/ops/index_scores.py).
// Shapes: q [T, Hi, I] bf16; weight [T, Hi] bf16; codes [slots, entries, I/2]; scales [slots, entries, I/32]; y [T, entries] f32.
// Threads: grid (entries / 128, T), a thread an entry; the query in shared memory (Hi * I floats).
// Dots of FP4 values are exact in double, so any order gives the same bits.
#include <uf/rows.cuh>

extern __shared__ float query[];

extern "C" __global__ void __launch_bounds__(128) uf_index_scores(const Args a) {
    int t = blockIdx.y, heads = a.q_1, dim = a.q_2, entry = blockIdx.x * 128 + threadIdx.x;
    int reach = (a.position[t] + 1) / a.ratio;
    float* y = a.y + (i64)t * a.y_1;
    bool idle = a.slot[t] < 0;
    if (idle || blockIdx.x * 128 >= reach) {
        if (entry < a.y_1) y[entry] = from_bits(0xFF800000u);
        return;
    }
    for (int i = threadIdx.x; i < heads * dim; i += 128) query[i] = load(a.q, (i64)t * heads * dim + i);
    __syncthreads();
    if (entry >= a.y_1) return;
    if (entry >= reach) {
        y[entry] = from_bits(0xFF800000u);
        return;
    }
    i64 at = (i64)a.slot[t] * a.codes_1 + entry;
    const u8* codes = a.codes + at * (dim / 2);
    const u8* scales = a.scales + at * (dim / 32);
    double score = 0.0;
    for (int h = 0; h < heads; h++) {
        double dot = 0.0;
        for (int g = 0; g < dim / 32; g++) {
            float part = 0.0f;  // 32 products of FP4 codes over two powers of two: exact in fp32
            for (int i = 0; i < 16; i++) {
                u32 pair = codes[g * 16 + i];
                const float* q = query + h * dim + g * 32 + 2 * i;
                part = fmaf(e2m1_value(pair & 15u), q[0], part);
                part = fmaf(e2m1_value(pair >> 4), q[1], part);
            }
            dot += (double)part * (double)e8m0_value(scales[g]);
        }
        score += fmax(dot, 0.0) * ((double)load(a.weight, (i64)t * heads + h) * (double)a.scale);
    }
    y[entry] = (float)score;
}
