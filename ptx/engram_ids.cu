// Compressed ids, -1 inside images (graphs/ops/engram_ids.py). Shapes: ids, is_image, y [T]; token_map [V] i64.
#include <uf/early.cuh>

extern "C" __global__ void uf_engram_ids(const Args a) {
    Turn turn;
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < a.ids_0) a.y[t] = a.is_image[t] > 0 ? -1 : (int)a.token_map[a.ids[t]];
}
