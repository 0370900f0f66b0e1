"""How kernels are launched: prepared once, with all that stays the same from call to call; the
memory they write; what they are told of formats and devices; and the constants of
``cast_triton.store_tile``, by whichever kernel it is called."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..devices import device_profile
from ..formats import Float8Format, format_of
from ..scaling import FULL, contiguous_strides, scale_dtype, scale_shape, scale_strides
from .quantize import GRID_LIMIT, CastPlan

MAX_ROW = 16384  # the longest row that a kernel holds in registers


class Launch:
    """A kernel and the arguments that are the same at every call; those of the call come first.

    Triton examines every argument at every launch; for these kernels that costs the host of an H200
    45 us. Here it happens once: what Triton specialises on are the arguments held here, and the
    dtypes of those given and whether they start on 16 bytes; one object serves calls that agree in
    those, and in the device.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int] | None,
        *sizes: float,
        options: dict[str, int],
        **constants: Any,
    ) -> None:
        """``grid``: None if it is given at the call. ``options``: Triton's own, such as num_warps.
        ``constants``: all constexprs, in the order of the kernel's parameters."""
        self.kernel, self.grid, self.sizes = kernel, grid, sizes
        self.options, self.constants = options, constants
        self.compiled: Any = None  # stays None in Triton's interpreter
        self.index: int | None = None  # of the GPU that it is compiled for

    def __call__(self, *first: Any, grid: tuple[int, int, int] | None = None) -> None:
        """``first``: tensors, what stands for them (a descriptor, None) and sizes that the kernel
        does not specialise on. They are on one device, which need not be the current one."""
        if self.compiled is None:
            self.index = next(x.device.index for x in first if isinstance(x, Tensor))
        if self.index is not None and self.index != torch.cuda.current_device():
            with torch.cuda.device(self.index):  # where Triton compiles and launches
                return self(*first, grid=grid)
        grid = grid or self.grid
        if self.compiled is None:
            launch = self.kernel[grid]
            self.compiled = launch(*first, *self.sizes, **self.constants, **self.options)
        else:
            self.compiled[grid](*first, *self.sizes, *self.constants.values())


class Matrices(NamedTuple):
    """Sizes and strides of x [E, M, K]."""

    e: int
    m: int
    k: int
    stride_e: int
    stride_m: int
    stride_k: int
    device: torch.device


class Output(NamedTuple):
    """Memory that a kernel writes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    written_as: torch.dtype

    @staticmethod
    def data(shape: tuple[int, ...], layout: CastPlan, col: bool = False) -> Output:
        """Data of one layout."""
        written_as = torch.uint8 if col else layout.dtype
        return Output(shape, contiguous_strides(shape), layout.dtype, written_as)

    @staticmethod
    def scale(shape: tuple[int, ...], layout: CastPlan) -> Output:
        """Scales of data of ``shape``."""
        block = (1,) * (len(shape) - 2) + layout.block
        of, dtype = scale_shape(shape, block), scale_dtype(layout.scale_mode)
        written_as = torch.uint8 if dtype.itemsize == 1 else dtype
        return Output(of, scale_strides(of, block), dtype, written_as)

    def new(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """New memory, as callers see it and as a kernel does."""
        out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return out, out if self.written_as == self.dtype else out.view(self.written_as)


class Outputs(NamedTuple):
    """Memory of one or both layouts, the transposed one second; None for one not asked for."""

    data: Output | None
    scale: Output | None
    data_t: Output | None
    scale_t: Output | None

    @staticmethod
    def of(shape: tuple[int, ...], row: CastPlan | None, col: CastPlan | None) -> Outputs:
        """Of casts of x of ``shape``."""
        turned = (*shape[:-2], shape[-1], shape[-2])
        return Outputs(
            row and Output.data(shape, row),
            row and Output.scale(shape, row),
            col and Output.data(turned, col, col=True),
            col and Output.scale(turned, col),
        )

    def new(self, device: torch.device) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """New memory, as callers see it and as a kernel does."""
        new = [o and o.new(device) for o in self]
        return [n and n[0] for n in new], [n and n[1] for n in new]


def kind(layout: CastPlan) -> str:
    """Which of ``cast_triton``'s kinds the scales of a layout are; its block is (rows,
    contraction)."""
    rows, inner = layout.block
    if inner == FULL:
        return "tensor" if rows == FULL else "vector"
    return "block" if rows == 1 else "square"


@dataclass(frozen=True)
class Target:
    """What the kernels must know of a format, a scale mode and a device; passed as one
    constexpr."""

    FP8: Any  # Triton's dtype
    MAX: float
    INVERSE_MAX: float  # 1 / MAX, rounded to float32
    MAX_MANTISSA: int  # bits of the maximum's mantissa, as float32
    MAX_EXPONENT: int
    HALF_STEP: int  # half a step of the format's mantissa, in float32 mantissa bits
    MODE: str
    PTX: str  # converts four float32 and packs them; "" for the portable form

    @staticmethod
    def of(fmt: Float8Format, mode: str, ptx: bool) -> Target:
        import triton.language as tl

        (max_bits,) = struct.unpack("<i", struct.pack("<f", fmt.max))
        (inverse,) = struct.unpack("<f", struct.pack("<f", 1 / fmt.max))
        cvt = f"cvt.rn.satfinite.{fmt.kind}x2.f32"
        pack = (
            f"{{ .reg .b16 lo, hi; {cvt} lo, $2, $1; {cvt} hi, $4, $3; mov.b32 $0, {{lo, hi}};  }}"
        )
        return Target(
            FP8=getattr(tl, fmt.triton),
            MAX=fmt.max,
            INVERSE_MAX=inverse,
            MAX_MANTISSA=max_bits & 0x007FFFFF,
            MAX_EXPONENT=fmt.max_exponent,
            HALF_STEP=1 << (22 - fmt.mantissa_bits),
            MODE="given" if mode.endswith("given") else mode,
            PTX=pack if ptx else "",
        )


def target(device: torch.device, layout: CastPlan) -> Target:
    return _cached_target(format_of(layout.dtype), layout.scale_mode, runs_ptx(device))


def runs_ptx(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


_cached_target = functools.cache(Target.of)  # a dozen values at most


def multiprocessors(device: torch.device) -> int:
    return _multiprocessor_count(device.index) if device.type == "cuda" else 2


@functools.cache
def _multiprocessor_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def row_loop(device: torch.device, elements: int, itemsize: int) -> tuple[int, int, int]:
    """(warps, programs on a multiprocessor, stages) of a loop over rows or tiles of so many
    elements, one per iteration of a program that stays; measured on an H200."""
    wide = elements > 4096
    programs = 1 if elements > 8192 else 2 if wide else 4
    stages = row_stages(device, programs * elements * itemsize, 4 if wide else 3)
    return 8 if wide else 4, programs, stages


def fused_row_loop(
    device: torch.device, source: str, width: int, itemsize: int
) -> tuple[dict[str, int], int, int]:
    """(options, programs on a multiprocessor, stages) of a loop over so many columns of rows that
    the source makes: 16 warps on a multiprocessor, up to 32 columns a thread, in 128 registers."""
    warps = min(16, max(4, width // 1024))
    options = {"num_warps": warps} | ({"maxnreg": 128} if runs_ptx(device) else {})
    programs, inputs = 16 // warps, {"rms": 1, "swiglu": 2, "swiglu_backward": 3}[source]
    under_way = programs * width * itemsize * inputs
    return options, programs, row_stages(device, under_way, 4)


def row_stages(device: torch.device, row_bytes: int, wanted: int) -> int:
    """Stages of a loop over rows, of which ``row_bytes`` are under way at once in all programs of a
    multiprocessor: as many as its shared memory holds beside 4 KB for reductions, or one."""
    buffers = (device_profile(device).shared_memory - 4096) // row_bytes
    return min(wanted, buffers + 1) if buffers > 1 else 1


def tile_constants(x: Matrices, row: CastPlan | None, col: CastPlan | None) -> dict[str, Any]:
    """The constexprs of a kernel that calls ``store_tile`` for two layouts of x [E, M, K], in its
    order. What depends on M: whether tiles are whole."""
    bm, bn = tile_shape(row, col)
    if x.m > GRID_LIMIT * bm:  # triton_refusal stops at 128 rows a program
        bm = 128
    return {
        "ROW": "none" if row is None else kind(row),
        "COL": "none" if col is None else kind(col),
        "ROW_BLOCK": bn if row is None or row.block[1] == FULL else row.block[1],
        "COL_BLOCK": bm if col is None or col.block[1] == FULL else col.block[1],
        "ROW_T": None if row is None else target(x.device, row),
        "COL_T": None if col is None else target(x.device, col),
        "EVEN": x.m % bm == 0 and x.k % bn == 0,
        "BM": bm,
        "BN": bn,
    }


def tile_shape(row: CastPlan | None, col: CastPlan | None) -> tuple[int, int]:
    """Rows and columns of a tile: at least one block of every layout. The fastest of seven shapes
    by four or eight warps on an H200."""
    blocks = {layout.block[1] for layout in (row, col) if layout is not None}
    if row is not None and col is None and row.block[0] == 1 and row.block[1] in (32, 128):
        return 32, 256 if row.block[1] == 32 else 128
    if row is None and col is not None and kind(col) == "vector":
        return 256, 64
    return (128, 64) if 32 in blocks and 128 not in blocks else (128, 128)


def tile_options(x: Matrices, row: CastPlan | None, col: CastPlan | None) -> dict[str, int]:
    """Triton's options for a tile. 128 x 128 in four wavefronts of 64 is right as it is; of 32, it
    leaves 128 values to a thread: blocks get so few registers that three programs share a
    multiprocessor instead of two (1x128 dual, 8192 x 14336: 134.7 us instead of 144.2), and two
    layouts from one amax get eight warps. So do masks of the transposed layout, for the registers;
    two programs share a multiprocessor."""
    if not runs_ptx(x.device):
        return {"num_warps": 4}
    bm, bn = tile_shape(row, col)
    if col is not None and (x.m % bm or x.k % bn):
        return {"num_warps": 8, "maxnreg": 128}
    if (bm, bn) == (128, 128):
        both = row is not None and col is not None and kind(row) == kind(col) == "tensor"
        return {"num_warps": 8} if both else {"num_warps": 4, "maxnreg": 168}
    return {"num_warps": 4}
