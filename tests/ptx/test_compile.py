"""Every kernel that plans need, for every architecture, without a GPU: compiles, does not spill."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.c_struct import Layout
from helpers.compiler import device_nodes, no_compiler
from ultraflash import ptx
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Node, Op, Plan
from ultraflash.graphs.release import release_model
from ultraflash.graphs.served import Served
from ultraflash.graphs.step import Build
from ultraflash.runtime.config import BUNDLED_CHECKPOINT

pytestmark = pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())

# 64 registers let 1,024 threads live on an SM. Verification and drawing run eight CTAs of 512
# threads a sequence: nothing stands beside one whose place it could take. A CTA of `linear` fills
# an SM's shared memory with operands under way, so that its registers are no one else's.
REGISTERS, REGISTERS_OF = 64, {"accept": 128, "draft_sample": 128, "linear": 255}
# The warps of a mix of many rows hold 25 sums each; a CTA of 512 threads has an SM to itself.
REGISTERS_OF |= {"hc_mix": 128}
# Exchanges wait for other GPUs with few CTAs, whose loads should all be under way at once.
REGISTERS_OF |= {"all_reduce": 192, "all_gather": 128}
# Of `experts_up` and `experts_down` two to four CTAs fill an SM, with sums of rows in registers.
REGISTERS_OF |= {"experts_up": 255, "experts_down": 255}
# Tensor-core tiles live in registers: two CTAs of 256 threads share an SM, or one of 512 has it.
REGISTERS_OF |= {"attention": 128, "draft_attention": 128, "index_scores": 128}
STATIC_SHARED = 48 << 10
SHARED = 227 << 10  # of one CTA, static and dynamic, on all three architectures
GRID_Y = 65_535
CHUNKS = (16, 128, 1024, 4096)  # rows of prompts that graphs are captured for


def served(model: Model) -> Iterator[Plan]:
    """All kinds of plans, on one rank and as one of several: partial sums have other types."""
    whole = Build(model, Capacity(3, model.max_position), block=model.draft_block)
    split = Build(model, Capacity(3, model.max_position), world=2, block=model.draft_block)
    for mode in ("full", "ced20", "ced21"):
        yield from Served(sequences=(1, 2), prefill=mode, chunks=CHUNKS).plans(whole)
    yield from Served((8,), (2,)).plans(split)
    yield from Served(rows=(1,)).plans(Build(model, Capacity(1, 64), block=0))


@pytest.fixture(scope="module")
def nodes() -> list[Node]:
    models = (Model.from_checkpoint(BUNDLED_CHECKPOINT), release_model())
    return [node for model in models for node in device_nodes(served(model))]


@pytest.fixture(scope="module")
def kernels(nodes: list[Node], kernel_cache: Path) -> dict:
    """(unit, architecture) -> kernel, those included that no plan has; a `CompileError` of any
    fails everything here.
    """
    from ultraflash.runtime.gpu.backend import other_units
    from ultraflash.runtime.gpu.nvrtc import Unit, compile_units

    units = [*dict.fromkeys(Unit.of_node(node) for node in nodes), *other_units()]
    return {
        (unit, arch): kernel
        for arch in ptx.ARCHITECTURES
        for unit, kernel in compile_units(units, arch, kernel_cache).items()
    }


@pytest.mark.parametrize("arch", ptx.ARCHITECTURES)
def test_no_kernel_spills_or_is_too_large(kernels: dict, arch: str) -> None:
    found = [kernel for (_, of), kernel in kernels.items() if of == arch]
    others = {"host/copy_words", "layout/fp4_scales", "layout/fp4_tiles", "layout/tiles"}
    assert {k.stem for k in found} == {*ptx.stems(), *others, "state/move_rows"}
    bad = [
        f"{k.stem}: {k.registers} registers, {k.spill_bytes} bytes spilled, {k.shared_bytes} shared"
        for k in found
        if k.spill_bytes
        or not 0 < k.registers <= REGISTERS_OF.get(k.stem, REGISTERS)
        or k.shared_bytes > STATIC_SHARED
    ]
    assert bad == []


def test_cubins_hold_their_entry(kernels: dict) -> None:
    for (unit, _), kernel in kernels.items():
        assert f"\0{unit.entry}\0".encode() in kernel.cubin


def test_launches_fit_what_was_compiled(kernels: dict, nodes: list[Node]) -> None:
    """Of the full-size model with its whole context, too: a wrong launch shows only on a GPU."""
    from ultraflash.runtime.gpu.nvrtc import Unit

    for op, unit in {(node.op, Unit.of_node(node)) for node in nodes}:
        for arch in ptx.ARCHITECTURES:
            launch, kernel = op.launch(arch), kernels[unit, arch]
            (threads, *flat), (_, y, z) = launch.block, launch.grid
            assert flat == [1, 1], unit.stem
            assert threads <= _launch_bound(op, arch), unit.stem
            assert threads * kernel.registers <= 65_536, unit.stem
            assert y <= GRID_Y, unit.stem
            assert z == 1, unit.stem
            assert launch.shared + kernel.shared_bytes <= SHARED, unit.stem


def _launch_bound(op: Op, arch: str) -> int:
    """What the source promises the compiler; 1,024 where it promises nothing."""
    from ultraflash.runtime.gpu.args import struct_text

    text = ptx.source(op.stem(), arch, struct_text(op)).text
    found = re.search(r"__launch_bounds__\((\w+)[,)]", text)
    if not found:
        return 1024
    bound = found[1]
    while not bound.isdecimal():
        constant = re.search(rf"(?:{bound} =|#define {bound}) (\w+)", text)
        assert constant, f"{op.stem()} is bounded by {bound}, which is no constant"
        bound = constant[1]
    return int(bound)


def test_the_compiler_lays_arguments_out_as_they_are_packed(
    nodes: list[Node], kernel_cache: Path
) -> None:
    """One compilation of every `Args`, all sizes and offsets asserted."""
    from ultraflash.runtime.gpu.args import pack, struct_text
    from ultraflash.runtime.gpu.exchange import Exchange
    from ultraflash.runtime.gpu.nvrtc import Unit, compile_unit

    ops = {struct_text(node.op): node.op for node in nodes}
    checks = []
    for number, (text, op) in enumerate(ops.items()):
        layout = Layout.of(text)
        assert layout.size == len(pack(op, lambda ref: (0, 0), Exchange((0, 0), 1)))
        checks.append(f"namespace n{number} {{ {text[text.index('struct ') :]} }}")
        args, why = f"n{number}::Args", f'"{op.stem()}"'
        checks.append(f"static_assert(sizeof({args}) == {layout.size}, {why});")
        for name, member in layout.members.items():
            at = f"__INTADDR__(&(({args}*)0)->{name})"  # offsetof, without headers
            checks.append(f"static_assert({at} == {member.offset}, {why});")
    last_io = next(op for op in ops.values() if op.stem() == "last_io")
    unit = Unit("last_io", struct_text(last_io) + "\n".join(checks))
    assert compile_unit(unit, "sm_90a", kernel_cache).cubin
