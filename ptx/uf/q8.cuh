// Q8 of bf16 values (model.md 3.1) with two neighbours a lane: 16 lanes share a scale. All lanes of a warp take part.
#include <uf/vector.cuh>

UF_DEVICE float2 rounded(float2 x) { return make_float2(bf16_round(x.x), bf16_round(x.y)); }

UF_DEVICE u32 q8_scale_of(float2 x) {
    float peak = fmaxf(fabsf(x.x), fabsf(x.y));
#pragma unroll
    for (int o = 8; o; o >>= 1) peak = fmaxf(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, o));
    return q8_scale(peak);
}
UF_DEVICE u8 q8_code(float x, u32 scale) { return e4m3_code(x * from_bits((254u - scale) << 23)); }
UF_DEVICE float q8_value(float x, u32 scale) { return e4m3_value(q8_code(x, scale)) * from_bits(scale << 23); }
// The exact bf16 values code * scale.
UF_DEVICE float2 fake_q8(float2 x) {
    u32 scale = q8_scale_of(x);
    return make_float2(q8_value(x.x, scale), q8_value(x.y, scale));
}
