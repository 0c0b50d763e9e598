// Several neighbouring elements at once; addresses are multiples of what is loaded.
#include <uf/types.cuh>

UF_DEVICE float2 pair_of(u32 bits) { return make_float2(from_bits(bits << 16), from_bits(bits & 0xFFFF0000u)); }

UF_DEVICE float2 load2(const bf16* p, i64 i) { return pair_of(*(const u32*)(p + i)); }
UF_DEVICE float2 load2(const float* p, i64 i) { return *(const float2*)(p + i); }
UF_DEVICE void store2(bf16* p, i64 i, float2 x) { *(u32*)(p + i) = bf16_bits(x.x) | (u32)bf16_bits(x.y) << 16; }
UF_DEVICE void store2(float* p, i64 i, float2 x) { *(float2*)(p + i) = x; }

UF_DEVICE float2 operator*(float s, float2 x) { return make_float2(s * x.x, s * x.y); }
UF_DEVICE float2 operator+(float2 x, float2 y) { return make_float2(x.x + y.x, x.y + y.y); }

UF_DEVICE float4 load4(const bf16* p, i64 i) {
    uint2 bits = *(const uint2*)(p + i);
    float2 low = pair_of(bits.x), high = pair_of(bits.y);
    return make_float4(low.x, low.y, high.x, high.y);
}
UF_DEVICE float4 load4(const float* p, i64 i) { return *(const float4*)(p + i); }
UF_DEVICE void store4(bf16* p, i64 i, float4 x) {
    *(uint2*)(p + i) = make_uint2(bf16_bits(x.x) | (u32)bf16_bits(x.y) << 16, bf16_bits(x.z) | (u32)bf16_bits(x.w) << 16);
}
UF_DEVICE void store4(float* p, i64 i, float4 x) { *(float4*)(p + i) = x; }

UF_DEVICE float4 operator+(float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }

// Bytes that a CTA copies, 16 at a time where all addresses allow it.
UF_DEVICE void copy_row(u8* to, const u8* from, int bytes) {
    if (((u64)to | (u64)from | (u64)bytes) % 16 == 0)
        for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) ((uint4*)to)[i] = ((const uint4*)from)[i];
    else
        for (int i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}
