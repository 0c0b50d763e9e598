// Rotation of the last 2*pairs of `dim` elements, pairwise (2j, 2j+1); rounded to bf16 (model.md 3.4).
#include <uf/types.cuh>

// Element d of a rotated bf16 vector. `sign` -1 turns back.
UF_DEVICE float rotated(const bf16* x, int d, int dim, const float* cos, const float* sin, int pairs, float sign) {
    int r = d - (dim - 2 * pairs);
    if (r < 0) return load(x, d);
    float c = cos[r / 2], s = sign * sin[r / 2];
    float even = load(x, d - (r & 1)), odd = load(x, d - (r & 1) + 1);
    return bf16_round(r & 1 ? even * s + odd * c : even * c - odd * s);
}

// Elements 2j and 2j + 1 turned by their angle.
UF_DEVICE float2 turned(float2 x, float c, float s) {
    return make_float2(bf16_round(x.x * c - x.y * s), bf16_round(x.x * s + x.y * c));
}
