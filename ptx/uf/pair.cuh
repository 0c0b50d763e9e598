// Numbers as the sum of two float32, good to about 2^-37: what float64 would be taken for where a GPU has little of it.
#include <uf/types.cuh>

struct Pair { float high, low; };

UF_DEVICE Pair pair_of(double x) { return {(float)x, (float)(x - (double)(float)x)}; }
UF_DEVICE double value_of(Pair x) { return (double)x.high + (double)x.low; }

// Exact, as long as nothing overflows or vanishes: the compiler fuses no operations (runtime/gpu/nvrtc.py).
UF_DEVICE Pair two_sum(float a, float b) {
    float s = a + b, v = s - a;
    return {s, (a - (s - v)) + (b - v)};
}
UF_DEVICE Pair two_product(float a, float b) {
    float p = a * b;
    return {p, fmaf(a, b, -p)};
}
UF_DEVICE Pair operator*(Pair a, Pair b) {
    Pair p = two_product(a.high, b.high);
    return two_sum(p.high, fmaf(a.high, b.low, fmaf(a.low, b.high, p.low)));
}

// Multiples of 1 / unit, a power of two.
UF_DEVICE i64 units_of(Pair x, float unit) { return __float2ll_rn(x.high * unit) + __float2ll_rn(x.low * unit); }

// 2^-(j / POWERS) for j below POWERS, of a CTA. Whoever reads them waits for those who make them.
constexpr int POWERS = 64;
UF_DEVICE void make_powers(Pair* powers) {
    for (int j = threadIdx.x; j < POWERS; j += blockDim.x) powers[j] = pair_of(exp2(-(double)j / POWERS));
}
// 2^-x for 0 <= x < 126: a power from the table, and a series for what is left of x, at most 1 / (2 POWERS).
UF_DEVICE Pair power_of_half(const Pair* powers, Pair x) {
    float n = rintf(x.high * POWERS);
    Pair r = two_sum(fmaf(n, -1.0f / POWERS, x.high), x.low);
    Pair y = Pair{-r.high, -r.low} * Pair{0.693147182464599609375f, -1.90465429995776e-9f};  // ln 2
    float square = y.high * y.high;
    float rest = fmaf(square, fmaf(y.high, fmaf(y.high, 1.0f / 24.0f, 1.0f / 6.0f), 0.5f), y.low);  // of exp(y) - 1
    Pair base = powers[(int)n % POWERS], first = two_product(base.high, y.high), sum = two_sum(base.high, first.high);
    float low = fmaf(base.high, rest, fmaf(base.low, y.high, base.low)) + first.low + sum.low;
    Pair scaled = two_sum(sum.high, low);
    float size = from_bits((u32)(127 - (int)n / POWERS) << 23);
    return {scaled.high * size, scaled.low * size};
}
