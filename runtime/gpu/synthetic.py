"""Synthetic weights and state on the GPU: one rank's buffers, filled where they stand.

A table of n-gram rows that is too large for one GPU is placed as a rank would hold it, a part of
its rows; the address space of the whole table shows that part again and again, so that plans and
kernels see all rows and every lookup reads its own place in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver as cu

from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life, Plan, Ref
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.gpu.driver import Address, Device, allocate, check, memory, upload
from ultraflash.runtime.gpu.fill import Filler
from ultraflash.runtime.weights.device import DeviceWeights
from ultraflash.runtime.weights.layout import stored_sizes
from ultraflash.runtime.weights.synthetic import (
    KINDRED,
    constants,
    kindred_rows,
    state_content,
    weight_contents,
)

_ALIGNMENT = 256
_PAGE = 2 << 20  # granularity of mapped memory


def resident_bytes(refs: Iterable[Ref], world: int) -> int:
    """What the weights of one rank take: a world-th part of n-gram tables, all of the rest."""
    return sum(_placed(size) for ref in refs for size in _resident(ref, world))


def place_weights(
    plan: Plan, model: Model, device: Device, cache_dir: Path, rank: int = 0
) -> DeviceWeights:
    """Allocate and fill every weight of `plan` as rank `rank` of its world would hold it.

    Raises:
        DeviceError: when they do not fit, naming what is needed, what is there and the remedy.
        WeightsError: for a weight of which no statistics are known.
    """
    refs = plan.of_life(Life.WEIGHT)
    _refuse_too_large(resident_bytes(refs, plan.world), plan.world, device)
    known, filler = constants(model), Filler(device, cache_dir)
    plain = [ref for ref in refs if not _is_part(ref, plan.world)]
    at = allocate(resident_bytes(plain, plan.world), "synthetic weights")
    held: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for ref in refs:
        addresses = []
        for size, part in zip(stored_sizes(ref), _resident(ref, plan.world), strict=True):
            if part < size:
                addresses.append(_repeated(size, part, f"weight {ref}", device))
            else:
                addresses.append(at)
                at += _placed(size)
        held[ref.name] = ref.shape, tuple(addresses)
        if ref.name in known:
            upload(addresses[0], known[ref.name])
            continue
        for content, address, part in zip(
            weight_contents(ref, rank), addresses, _resident(ref, plan.world), strict=True
        ):
            plainly = ref.dtype if ref.dtype in ("bf16", "f32") else "u8"
            size = {"bf16": 2, "f32": 4, "u8": 1}[plainly]
            filler.fill(address, part // size, plainly, content)
    filler.wait()
    if "embed" in held and KINDRED.stop <= model.vocab:
        upload(held["embed"][1][0] + 2 * KINDRED.start * model.hidden, kindred_rows(model.hidden))
    return DeviceWeights(held)


def fill_state(
    refs: Iterable[tuple[Ref, Address]], model: Model, device: Device, cache_dir: Path
) -> None:
    """Make every slot look as if its conversation had filled its whole context.

    Raises:
        WeightsError: for a state buffer of which no contents are known.
    """
    filler, rng = Filler(device, cache_dir), np.random.default_rng(0)
    for ref, address in refs:
        if ref.dtype == "i32":
            upload(address, _integers(ref, model, rng))
            continue
        size = {"bf16": 2, "f32": 4, "u8": 1}.get(ref.dtype, 1)
        filler.fill(address, ref.nbytes // size, ref.dtype, state_content(ref))
    filler.wait()


def _integers(ref: Ref, model: Model, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """Compressed ids; selections and pools as they are kept for a replay, ascending."""
    if ref.name == "engram.history":
        return rng.integers(0, model.engram_vocab, ref.shape).astype(np.int32)
    count = ref.shape[-1]  # as many first entries: a context may hold no more
    return np.broadcast_to(np.arange(count, dtype=np.int32), ref.shape)


def _is_part(ref: Ref, world: int) -> bool:
    return ref.dtype == "rows8" and world > 1


def _resident(ref: Ref, world: int) -> tuple[int, ...]:
    """Bytes of memory behind each of a weight's allocations."""
    if not _is_part(ref, world):
        return stored_sizes(ref)
    return tuple(-(-size // (world * _PAGE)) * _PAGE for size in stored_sizes(ref))


def _placed(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _refuse_too_large(needed: int, world: int, device: Device) -> None:
    free, _ = memory()
    if needed > free:
        raise DeviceError(
            f"synthetic weights of one rank of world {world} need {needed / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} of {device.total_bytes / 2**30:.1f} GiB of {device.name} are free"
            f": choose a larger world (8 needs least), or end what else runs on this GPU"
        )


def _repeated(size: int, part: int, what: str, device: Device) -> Address:
    """Address space of `size` bytes in which `part` bytes of memory stand again and again."""
    where = cu.CUmemLocation()
    where.type, where.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device.ordinal
    made = cu.CUmemAllocationProp()
    made.type, made.location = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, where
    handle = check(cu.cuMemCreate(part, made, 0), f"{what} ({part:,} bytes of it)")
    times = -(-size // part)
    base = int(check(cu.cuMemAddressReserve(times * part, 0, 0, 0), f"addresses of {what}"))
    for number in range(times):
        check(cu.cuMemMap(base + number * part, part, 0, handle, 0), f"mapping {what}")
    access = cu.CUmemAccessDesc()
    access.location = where
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    check(cu.cuMemSetAccess(base, times * part, [access], 1), f"opening {what}")
    return base
