"""Where a weight's codes lie in device memory: as they are stored, or in tiles made for streaming.

The checkpoint's bytes travel as they are and a kernel puts them into tiles (ptx/layout/); what it
has to do is written here in NumPy. A `Ref` keeps its logical shape and type, and the interpreter
its own form: only kernels that read tiles know of them. Scales stay as they are stored, but for
those of FP4, which go along with their tiles.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.numerics import U8
from ultraflash.graphs.plan import Geometry, Life, Op, Ref
from ultraflash.runtime.errors import WeightsError

Array = npt.NDArray[Any]
SCALED = ("fp8", "fp4", "rows8")  # formats whose scales stand in an allocation of their own
# Largest scale byte: kernels multiply dense FP8 by 2^(scale - 7) in bf16 (ptx/uf/mma.cuh), sums of
# FP4 by 2^(scale - 65) in fp32 (ptx/uf/experts.cuh).
MAX_SCALE = {"fp8": 134, "fp4": 192}
# Matrices in bf16 that `Linear` multiplies by. All other bf16 weights are vectors, rows that are
# looked up, or read by kernels of their own.
_LINEAR = re.compile(
    r"head|.*\.(ffn\.gate|attn\.compressor\.w(kv|gate)|attn\.indexer\.(wk|weights_proj)|markov_head\.head)"
)


@dataclass(frozen=True)
class Relayout(Op, ABC):
    """Base of the kernels that lay stored codes out; `x` holds whole rows, `y` what they become.

    Any multiple of `ROWS` rows of a matrix can be laid out alone: what they become is contiguous.
    """

    x: Ref
    y: Ref
    ROWS: ClassVar[int]
    ELEMENT: ClassVar[str]  # what x and y are made of
    PACKED: ClassVar[int] = 1  # columns that an element of x holds

    @classmethod
    @abstractmethod
    def laid(cls, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of y, padding included."""

    @staticmethod
    @abstractmethod
    def reference(x: Array) -> Array:
        """What the kernel has to make of x."""

    @classmethod
    def of(cls, rows: int, columns: int) -> Self:
        """The operation for a matrix, or some of its rows."""
        x = Ref("x", (rows, columns // cls.PACKED), cls.ELEMENT, Life.IO)
        return cls(x, Ref("y", cls.laid(rows, columns), cls.ELEMENT, Life.IO))

    def geometry(self) -> Geometry:
        """A thread for each 16 bytes of y."""
        return Geometry(-(-self.y.nbytes // 16 // 256), threads=256)


@dataclass(frozen=True)
class _Tiles(Relayout):
    """Tiles of 16 rows x 32 columns, row by row of tiles; what is beyond the matrix is zero.

    A tile is two operands A of mma.m16n8k16 in the order of its lanes: lane 4 g + t has rows g and
    g + 8 and columns 8 t to 8 t + 7, of which the first four go into the first product.
    """

    ROWS = 16
    COLUMNS = 32

    @classmethod
    def stem(cls) -> str:
        """One source for all of them: no operation of a plan."""
        return "layout/tiles"

    @classmethod
    def laid(cls, rows: int, columns: int) -> tuple[int, ...]:
        """[rows of tiles, tiles in a row, elements]."""
        return -(-rows // cls.ROWS), -(-columns // cls.COLUMNS), cls.ROWS * cls.COLUMNS

    @classmethod
    def _split(cls, x: Array) -> Array:
        """Axes of an element's place: tile row, h, g, tile, t, product, pair, half."""
        rows, columns, _ = cls.laid(*x.shape)
        padded = np.zeros((rows * cls.ROWS, columns * cls.COLUMNS), x.dtype)
        padded[: x.shape[0], : x.shape[1]] = x
        return padded.reshape(rows, 2, 8, columns, 4, 2, 2, 2)


@dataclass(frozen=True)
class Fp8Tiles(_Tiles):
    """E4M3 codes: a lane's 16 bytes are one word for each product and row, first product first.

    In a word columns 1 and 2 change places: bytes 0 and 2 become one register of bf16, 1 and 3 the
    other, each with a mask and a shift.
    """

    ELEMENT = "u8"

    @staticmethod
    def reference(x: Array) -> Array:
        """x: u1 [N, K]; y: u1 [N/16, K/32, 512]."""
        tiles = Fp8Tiles._split(x).transpose(0, 3, 2, 4, 5, 1, 7, 6)
        return np.ascontiguousarray(tiles).reshape(Fp8Tiles.laid(*x.shape))


@dataclass(frozen=True)
class Bf16Tiles(_Tiles):
    """bf16: the operand of the first product for all lanes, then that of the second."""

    ELEMENT = "bf16"

    @staticmethod
    def reference(x: Array) -> Array:
        """x: u2 [N, K]; y: u2 [N/16, K/32, 512]."""
        tiles = Bf16Tiles._split(x).transpose(0, 3, 5, 2, 4, 6, 1, 7)
        return np.ascontiguousarray(tiles).reshape(Bf16Tiles.laid(*x.shape))


# Where the bits of element 2 p of a word stand: m, e0, e1 and sign of pair p. Those of element
# 2 p + 1 stand 16 further, around the end. ptx/uf/fp4.cuh says why.
FP4_BITS = ((6, 7, 8, 15), (0, 1, 2, 9), (12, 13, 14, 21), (10, 11, 4, 19))


@dataclass(frozen=True)
class _Fp4(Relayout):
    """Tiles of 32 rows x 32 columns; a lane of a warp has rows g, g + 8, g + 16 and g + 24."""

    ROWS = 32
    ELEMENT = "u8"

    @classmethod
    def _tiled(cls, x: Array, columns: int) -> Array:
        """[N, columns * c] to [tile row, j, g, tile, c], where 8 j + g is the row; 0 beyond N."""
        rows = -(-len(x) // cls.ROWS)
        padded = np.zeros((rows * cls.ROWS, x.shape[1]), np.uint8)
        padded[: len(x)] = x
        return padded.reshape(rows, 4, 8, columns, -1)


@dataclass(frozen=True)
class Fp4Tiles(_Fp4):
    """Lane 4 g + t has a word of each of its rows: columns 8 t to 8 t + 7, their bits permuted."""

    PACKED = 2

    @classmethod
    def stem(cls) -> str:
        """No operation of a plan."""
        return "layout/fp4_tiles"

    @classmethod
    def laid(cls, rows: int, columns: int) -> tuple[int, ...]:
        """[rows of tiles, tiles in a row, bytes]; columns are a multiple of 32, as groups are."""
        return -(-rows // 32), columns // 32, 512

    @staticmethod
    def reference(x: Array) -> Array:
        """x: u1 [N, K/2], low nibble = even k; y: u1 [N/32, K/32, 512]."""
        columns = x.shape[1] // 16
        words = np.ascontiguousarray(Fp4Tiles._tiled(x, columns)).view("<u4").reshape(-1)
        out = np.zeros_like(words)
        for element in range(8):
            for bit, place in enumerate(FP4_BITS[element // 2]):
                taken = (words >> np.uint32(4 * element + bit)) & np.uint32(1)
                out |= taken << np.uint32((place + 16 * (element % 2)) % 32)
        tiles = out.reshape(-1, 4, 8, columns, 4).transpose(0, 3, 2, 4, 1)
        laid = Fp4Tiles.laid(len(x), 2 * x.shape[1])
        return np.ascontiguousarray(tiles).view(np.uint8).reshape(laid)


@dataclass(frozen=True)
class Fp4Scales(_Fp4):
    """E8M0 bytes of a tile: those of rows g, g + 8, g + 16 and g + 24 are a word."""

    @classmethod
    def stem(cls) -> str:
        """No operation of a plan."""
        return "layout/fp4_scales"

    @classmethod
    def laid(cls, rows: int, columns: int) -> tuple[int, ...]:
        """[rows of tiles, tiles in a row, bytes]; there is a column for each 32 of the codes."""
        return -(-rows // 32), columns, 32

    @staticmethod
    def reference(x: Array) -> Array:
        """x: u1 [N, K/32]; y: u1 [N/32, K/32, 32]."""
        tiles = Fp4Scales._tiled(x, x.shape[1])[..., 0].transpose(0, 3, 2, 1)
        return np.ascontiguousarray(tiles).reshape(Fp4Scales.laid(*x.shape))


LAYOUTS: tuple[type[Relayout], ...] = (Fp8Tiles, Bf16Tiles, Fp4Tiles, Fp4Scales)


def layout_of(name: str, format: str) -> type[Relayout] | None:
    """How the codes of a weight lie on the device; None: as they are stored."""
    if format == "fp8":  # every matrix in dense FP8 is a linear's
        return Fp8Tiles
    if format == "fp4":  # and in FP4 the routed experts'
        return Fp4Tiles
    return Bf16Tiles if format == "bf16" and _LINEAR.fullmatch(name) else None


def scales_layout_of(format: str) -> type[Relayout] | None:
    """How the scales of a weight lie on the device; None: as they are stored."""
    return Fp4Scales if format == "fp4" else None


def stored_sizes(ref: Ref) -> tuple[int, ...]:
    """Bytes of each of a buffer's allocations: codes and, for quantised formats, scales."""
    per = 2 if ref.dtype == "fp4" else 1
    scales = ref.nbytes - prod(ref.shape) // per if ref.dtype in SCALED else 0
    codes = ref.nbytes - scales
    layout = layout_of(ref.name, ref.dtype) if ref.life is Life.WEIGHT else None
    if layout:
        codes = prod(ref.shape[:-2]) * layout.of(*ref.shape[-2:]).y.nbytes
    if ref.dtype == "fp4" and layout:
        scales = codes // 16  # a byte for each 32 elements, rows that fill a tile up included
    return (codes, scales) if ref.dtype in SCALED else (codes,)


def check_range(scales: U8, name: str, format: str) -> None:
    """Refuse scales that kernels cannot multiply by.

    Raises:
        WeightsError: naming the tensor, the scale and the limit.
    """
    most = MAX_SCALE.get(format)
    if most and scales.max(initial=0) > most:
        raise WeightsError(
            f"{name} holds the scale byte {scales.max()}, kernels take up to {most} (a factor "
            f"of {2 ** (most - 127)}): the file is damaged, or run on the CPU with "
            f"UF_BACKEND=numpy"
        )
