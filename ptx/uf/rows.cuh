// Rows of a step and their neighbours (graphs/rows.py).
#include <uf/types.cuh>

// First row of the sequence that row r belongs to; an idle row is its own.
UF_DEVICE int first_row(const int* row_start, int sequences, int r) {
    for (int s = 0; s < sequences; s++)
        if (r >= row_start[s] && r < row_start[s + 1]) return row_start[s];
    return r;
}
// Where `back` positions before row r stand: a row of this step (>= 0), or -1: in the ring of earlier steps.
UF_DEVICE int row_back(int r, int first, int back) { return back <= r - first ? r - back : -1; }

// Slots of idle rows are -1: they read the last slot, whose values nobody uses.
UF_DEVICE i64 slot_of(const int* slot, int r, int slots) { return slot[r] < 0 ? slots - 1 : slot[r]; }
UF_DEVICE int ring_at(int position, int ring) { return position & (ring - 1); }
