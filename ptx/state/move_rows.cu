// Moves stretches of device memory, many in one launch: rows of state to a staging buffer and back (runtime/gpu/copies.py).
// Shapes: pieces [MAX_PIECES], of any size and alignment; they do not overlap.
// Threads: grid (pieces, CTAs a piece); a piece's CTAs stride over it, 16 bytes a thread where all addresses allow it.
// Shared memory: none. Limited by the launch for a restore point (2.9 MB), by device memory above.
// Not an operation of a plan: runs between steps, so that its grid may follow what is moved.
#include <uf/types.cuh>

constexpr int THREADS = 256;

template <typename T>
UF_DEVICE void move(const Piece& p) {
    T* to = (T*)p.to;
    const T* from = (const T*)p.from;
    u64 n = p.bytes / sizeof(T), step = (u64)gridDim.y * THREADS;
    for (u64 i = (u64)blockIdx.y * THREADS + threadIdx.x; i < n; i += step) to[i] = from[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) uf_move_rows(const __grid_constant__ Args a) {
    const Piece& p = a.pieces[blockIdx.x];
    u64 common = p.to | p.from | p.bytes;
    if (common % 16 == 0) move<longlong2>(p);
    else if (common % 4 == 0) move<u32>(p);
    else move<u8>(p);
}
