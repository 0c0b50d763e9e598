// Cosines and sines of f32(position * frequency) (graphs/ops/rope_table.py).
// Shapes: position [T]; freq [P] f32; cos, sin [T, P] f32.
// Threads: a CTA a row. Double functions, rounded once: angles reach a million radians.
#include <uf/early.cuh>

extern "C" __global__ void uf_rope_table(const Args a) {
    Turn turn;
    int t = blockIdx.x;
    for (int j = threadIdx.x; j < a.freq_0; j += blockDim.x) {
        double angle = (double)((float)(a.position[t] + a.offset) * a.freq[j]);
        a.cos[t * a.freq_0 + j] = (float)cos(angle);
        a.sin[t * a.freq_0 + j] = (float)sin(angle);
    }
}
