// Sums in one fixed order, whatever the number of rows: strided partial sums of the lanes, then a tree.
#include <uf/types.cuh>

UF_DEVICE double warp_sum(double x) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, o);
    return x;
}
UF_DEVICE float warp_sum(float x) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, o);
    return x;
}
UF_DEVICE float warp_max(float x) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, o));
    return x;
}

// Sum over a CTA of blockDim.x threads (a multiple of 32, at most 1024); every thread gets it.
UF_DEVICE double block_sum(double x) {
    __shared__ double part[32];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    x = warp_sum(x);
    __syncthreads();  // `part` may still be read from an earlier call
    if (lane == 0) part[warp] = x;
    __syncthreads();
    x = lane < warps ? part[lane] : 0.0;
    return warp_sum(x);
}
UF_DEVICE float block_max(float x) {
    __shared__ float part[32];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) part[warp] = x;
    __syncthreads();
    x = lane < warps ? part[lane] : from_bits(0xFF800000u);
    return warp_max(x);
}

// 1 / sqrt(squares / size + eps), of a sum of squares.
UF_DEVICE float inverse_root(double squares, int size, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn((float)(squares / (double)size) + eps));
}
