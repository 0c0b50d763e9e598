// Kernels that start before those in front of them are done (programmatic dependent launch).
//
// A source that includes this is launched so (driver.Function.early): its kernel begins as soon as every CTA of the one
// in front of it has called `next_kernel_may_start`, or is gone. Before its `Turn` it reads nothing but weights, and
// writes nothing.
//
// Why one wait covers all earlier kernels, what they read as well as what they write: it waits for the kernel in front
// to end, with its writes in memory; that one ended behind a wait of its own, and so on back to one that was launched
// behind everything. So no kernel that starts early may end without having waited, whatever it is given: a `Turn` stands
// where all threads come by. A kernel that does not start early breaks no chain: it is launched when the one in front
// has ended.
//
// A node beside another (graphs/plan.py) touches nothing that the one in front of it writes, and waits at its end only.
// What it reads is complete: the kernel that it stands beside let it go behind its own wait. But no wait of its own has
// made it visible, so older lines may still be in the L1 cache: a fence drops them.
#include <uf/types.cuh>

#ifndef UF_BESIDE
#define UF_BESIDE 0
#endif

extern "C" { __device__ int uf_starts_early; }

UF_DEVICE void earlier_kernels_done() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
UF_DEVICE void next_kernel_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// A kernel's work, from here to the end of the function. The next kernel is let go now and no sooner: none is two ahead.
struct Turn {
    UF_DEVICE Turn() {
        if (UF_BESIDE) asm volatile("fence.acq_rel.gpu;" ::: "memory");
        else earlier_kernels_done();
        next_kernel_may_start();
    }
    UF_DEVICE ~Turn() {
        if (UF_BESIDE) earlier_kernels_done();
    }
};
