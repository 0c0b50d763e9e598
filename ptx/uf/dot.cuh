// Dot products of eight activation rows with one weight row, by one warp.
#include <uf/reduce.cuh>

constexpr int ROWS = 8;

template <class W> UF_DEVICE void weights4(const W* w, const u8* scale, i64 n, int k, int size, float* out) {
#pragma unroll
    for (int j = 0; j < 4; j++) out[j] = load(w, n * size + k + j);
}
// Dense FP8: one E8M0 scale for each 32 x 32 block.
UF_DEVICE void weights4(const fp8* w, const u8* scale, i64 n, int k, int size, float* out) {
    u32 codes = *(const u32*)(w + n * size + k);
    float s = e8m0_value(scale[(n / 32) * ((size + 31) / 32) + k / 32]);
#pragma unroll
    for (int j = 0; j < 4; j++) out[j] = e4m3_value((u8)(codes >> (8 * j))) * s;
}
// Packed FP4: one E8M0 scale for each 32 elements of a row.
UF_DEVICE void weights4(const fp4* w, const u8* scale, i64 n, int k, int size, float* out) {
    u32 codes = *(const u16*)(w + (n * size + k) / 2);
    float s = e8m0_value(scale[n * (size / 32) + k / 32]);
#pragma unroll
    for (int j = 0; j < 4; j++) out[j] = e2m1_value((codes >> (4 * j)) & 15u) * s;
}

// sum[r] = x[r] . row n of w, the same in all lanes. `size` is a multiple of 4.
template <class W>
UF_DEVICE void dot_rows(const W* w, const u8* scale, i64 n, int size, const bf16* const* x, int lane, float* sum) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = 0.0f;
    for (int k = lane * 4; k < size; k += 128) {
        float v[4];
        weights4(w, scale, n, k, size, v);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            u64 four = *(const u64*)(x[r] + k);
#pragma unroll
            for (int j = 0; j < 4; j++)
                sum[r] = fmaf(from_bits((u32)(u16)(four >> (16 * j)) << 16), v[j], sum[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = warp_sum(sum[r]);
}

// The same for one row.
template <class W> UF_DEVICE float dot_row(const W* w, const u8* scale, i64 n, int size, const bf16* x, int lane) {
    float sum = 0.0f;
    for (int k = lane * 4; k < size; k += 128) {
        float v[4];
        weights4(w, scale, n, k, size, v);
        u64 four = *(const u64*)(x + k);
#pragma unroll
        for (int j = 0; j < 4; j++) sum = fmaf(from_bits((u32)(u16)(four >> (16 * j)) << 16), v[j], sum);
    }
    return warp_sum(sum);
}
