// RMS norm of a row by one CTA (model.md 3.3), whose threads keep it: pairs of neighbours, PAIRS of them a thread.
#include <uf/q8.cuh>
#include <uf/reduce.cuh>

constexpr int PAIRS = 4;  // graphs/ops/rms_norm.py has the same

// A thread's pairs of a row of `size` elements; zeros where it has none.
struct RowPairs {
    float2 x[PAIRS];
    int size;
    UF_DEVICE explicit RowPairs(int size) : size(size) {}
    UF_DEVICE int at(int p) const { return 2 * (p * blockDim.x + threadIdx.x); }
    UF_DEVICE bool real(int p) const { return at(p) < size; }
    UF_DEVICE bool any(int p) const { return p < PAIRS && 2 * p * blockDim.x < size; }  // in the CTA
    template <class Load> UF_DEVICE void fill(Load load) {
#pragma unroll
        for (int p = 0; p < PAIRS; p++) x[p] = real(p) ? load(at(p)) : make_float2(0.0f, 0.0f);
    }
    // Squares are summed in double, in an order that the size alone fixes.
    UF_DEVICE void norm(const RowPairs& weight, float eps) {
        double squares = 0.0;
#pragma unroll
        for (int p = 0; p < PAIRS; p++) squares += (double)x[p].x * (double)x[p].x + (double)x[p].y * (double)x[p].y;
        float inverse = inverse_root(block_sum(squares), size, eps);
#pragma unroll
        for (int p = 0; any(p); p++) {
            float2 y = inverse * x[p], w = weight.x[p];
            x[p] = rounded(make_float2(w.x * y.x, w.y * y.y));
        }
    }
    UF_DEVICE void quantise() {
#pragma unroll
        for (int p = 0; any(p); p++) x[p] = fake_q8(x[p]);
    }
    UF_DEVICE void put(bf16* row) const {
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
            if (real(p)) store2(row, at(p), x[p]);
    }
};
