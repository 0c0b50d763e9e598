// Kernels that start before those in front of them are done (programmatic dependent launch).
//
// A source that includes this is launched so (driver.Function.early): its kernel begins as soon as every CTA of the one
// in front of it has called `next_kernel_may_start`, or is gone. It reads nothing but weights, and writes nothing, until
// `earlier_kernels_done` returns.
//
// Why one wait covers all earlier kernels, what they read as well as what they write: it waits for the kernel in front
// to end, with its writes in memory; that one ended behind a wait of its own, and so on back to one that was launched
// behind everything. So no kernel that starts early may end without having waited: the wait stands first, where all
// threads of all CTAs come by. A kernel that does not start early breaks no chain: it is launched when the one in front
// has ended.
// No kernel is two ahead: the next one is let go behind the wait, when all earlier ones are done.
#include <uf/types.cuh>

extern "C" { __device__ int uf_starts_early; }

UF_DEVICE void earlier_kernels_done() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
UF_DEVICE void next_kernel_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// The first line of a kernel that has nothing to do before its turn.
UF_DEVICE void take_turn() { earlier_kernels_done(), next_kernel_may_start(); }
