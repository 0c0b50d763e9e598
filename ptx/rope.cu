// Rotate the last dimensions of every head (graphs/ops/rope.py).
// Shapes: x [T, H*E] bf16; cos, sin [T, P] f32; y [T, H, E] bf16.
// Threads: grid (T, H * E / 512), two neighbouring elements a thread. Limited by latency.
#include <uf/early.cuh>
#include <uf/rope.cuh>
#include <uf/vector.cuh>

extern "C" __global__ void uf_rope(const Args a) {
    Turn turn;
    int t = blockIdx.x, dim = a.y_2, pairs = a.cos_1, i = 2 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= a.heads * dim) return;
    i64 at = (i64)t * a.heads * dim + i;
    float2 x = load2(a.x, at);
    int angle = i % dim / 2 - (dim / 2 - pairs);
    if (angle >= 0) x = turned(x, a.cos[t * pairs + angle], a.sin[t * pairs + angle]);
    store2(a.y, at, x);
}
