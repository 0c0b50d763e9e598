// silu(min(gate, limit)) * clamp(up, -limit, limit), not rounded (model.md 4.7).
#include <uf/types.cuh>

UF_DEVICE float swiglu(float gate, float up, float limit) {
    gate = fminf(gate, limit);
    float sigmoid = __fdiv_rn(1.0f, 1.0f + expf(fminf(-gate, 88.0f)));
    return gate * sigmoid * fminf(fmaxf(up, -limit), limit);
}
