// Number formats, bit for bit as graphs/numerics.py has them. No library headers: NVRTC alone compiles this.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 { u16 bits; };          // a stored bf16 value
struct fp8 { u8 code; };            // E4M3 code of a weight or table with E8M0 scales beside it
struct fp4 { u8 pair; };            // two E2M1 codes, low nibble = even element

#define UF_SIZE(name) UF_SIZE_##name  // elements of a buffer of `Args`, which every kernel calls `a`
#define UF_DEVICE __device__ __forceinline__

UF_DEVICE float from_bits(u32 bits) { return __uint_as_float(bits); }
UF_DEVICE u32 to_bits(float x) { return __float_as_uint(x); }

// float32 to bf16, nearest even; NaN is not expected.
UF_DEVICE u16 bf16_bits(float x) {
    u32 b = to_bits(x);
    return (u16)((b + 0x7FFFu + ((b >> 16) & 1u)) >> 16);
}
UF_DEVICE float bf16_round(float x) { return from_bits((u32)bf16_bits(x) << 16); }

UF_DEVICE float load(const bf16* p, i64 i) { return from_bits((u32)p[i].bits << 16); }
UF_DEVICE float load(const float* p, i64 i) { return p[i]; }
UF_DEVICE void store(bf16* p, i64 i, float x) { p[i].bits = bf16_bits(x); }
UF_DEVICE void store(float* p, i64 i, float x) { p[i] = x; }

// E4M3: sign, 4 exponent bits (bias 7), 3 mantissa bits. Exact in float32; code 127 and 255 are NaN and never stored.
UF_DEVICE float e4m3_value(u8 code) {
    u32 e = (code >> 3) & 15u, m = code & 7u;
    float v = e ? from_bits(((e + 120u) << 23) | (m << 20)) : (float)m * 0.001953125f;
    return code & 128u ? -v : v;
}
// Nearest E4M3 code, ties to even, saturating at 448; the sign of zero is kept.
UF_DEVICE u8 e4m3_code(float x) {
    float a = fminf(fabsf(x), 448.0f);
    int e = max((int)(to_bits(a) >> 23) - 127, -6);
    int steps = (int)rintf(ldexpf(a, 3 - e));
    return (u8)((e + 6) * 8 + steps + (to_bits(x) >> 31) * 128);
}
UF_DEVICE float e2m1_value(u32 code) {
    u32 m = code & 7u;
    float v = m < 2u ? 0.5f * (float)m : from_bits(((126u + (m >> 1)) << 23) | ((m & 1u) << 22));
    return code & 8u ? -v : v;
}
// Nearest E2M1 code, ties to the even code, saturating at 6; the sign of zero is kept.
UF_DEVICE u32 e2m1_code(float x) {
    float a = fabsf(x);
    u32 c = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return c | ((to_bits(x) >> 31) << 3);
}
// 2^(byte - 127); byte 0 is a float32 subnormal.
UF_DEVICE float e8m0_value(u8 byte) { return byte ? from_bits((u32)byte << 23) : from_bits(0x00400000u); }

// pow2ceil of model.md 3.1 as an E8M0 byte.
UF_DEVICE u32 pow2ceil_byte(float t) { return (to_bits(t) + 0x7FFFFFu) >> 23; }

// Scale bytes of a group whose largest magnitude is `peak`.
UF_DEVICE u32 q8_scale(float peak) { return pow2ceil_byte(fmaxf(peak, 1e-4f) * (float)(1.0 / 448.0)); }
UF_DEVICE u32 qmx4_scale(float peak) {
    return pow2ceil_byte(fmaxf(peak, 7.05296610e-38f /* 6 * 2^-126 */) * (float)(1.0 / 6.0));
}
UF_DEVICE u8 qnv4_scale(float peak) { return e4m3_code(__fdiv_rn(fmaxf(peak, 0.01171875f), 6.0f)); }
