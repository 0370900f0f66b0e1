"""Triton kernels of ``float8.kernels.quantize``: the same bytes and scales as its reference, in the
fewest passes over memory. Letters, layouts and kinds of scales are those of ``cast_triton``.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..scaling import FULL, as_bytes
from .cast_triton import (
    amax_bits,
    larger,
    load_four,
    scale_strides,
    store_row,
    store_scale,
    store_tile,
    to_magnitude,
    to_scale,
)
from .launch import (
    MAX_ROW,
    Launch,
    Matrices,
    Outputs,
    kind,
    multiprocessors,
    row_loop,
    target,
    tile_constants,
    tile_options,
)
from .quantize import GRID_LIMIT, CastPlan


# M is the number of tokens, often a new one: no kernel is compiled for M's value or alignment, but
# for whole tiles of rows (EVEN), where no access has a mask, and for others.
@triton.jit(do_not_specialize=["M"])
def tile_kernel(
    x, row, row_scale, row_amax, col, col_scale, col_amax, M, K, stride_e, stride_m, stride_k,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr,
    ROW_T: tl.constexpr, COL_T: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of x in one or both layouts. NEAR: it spans less than 2^31 elements of
    x."""
    pn, pm, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if ROW == "tensor" or ROW == "vector" or COL == "tensor" or COL == "vector":
        # A pass over x for its amaxes has just ended: begin with what the cache still holds.
        pm = tl.num_programs(1) - 1 - pm
    r = pm * BM + 4 * tl.arange(0, BM // 4)
    c = pn * BN + tl.arange(0, BN)
    corner = (
        x + e * stride_e + (pm * BM).to(tl.int64) * stride_m + (pn * BN).to(tl.int64) * stride_k
    )
    OFFSET: tl.constexpr = tl.int32 if NEAR else tl.int64
    next_row, next_column = tl.cast(stride_m, OFFSET), tl.cast(stride_k, OFFSET)
    i, j = tl.arange(0, BM // 4).to(OFFSET), tl.arange(0, BN).to(OFFSET)
    source = corner + (4 * i[:, None] * next_row + j[None, :] * next_column)
    v0, v1, v2, v3 = load_four(source, next_row, r, c, M, K, EVEN)
    row_scale_e, row_scale_m, row_scale_k = scale_strides(M, K, ROW, BM, ROW_BLOCK)
    col_scale_e, col_scale_m, col_scale_k = scale_strides(K, M, COL, BN, COL_BLOCK)
    store_tile(
        v0, v1, v2, v3, r, c, pm, pn, e,
        row, row_scale, row_amax, col, col_scale, col_amax, M, K,
        row_scale_e, row_scale_m, row_scale_k, col_scale_e, col_scale_m, col_scale_k,
        ROW, COL, ROW_BLOCK, COL_BLOCK, ROW_T, COL_T, EVEN, EVEN, BM, BN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def row_kernel(
    x, row, row_scale, partial, M, K, CHUNKS, stride_e, stride_m, stride_k,
    T: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, NEAR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Row layout of one expert, scaled along rows by blocks of BLOCK: tiles pid, pid + G, ... of BM
    rows by BN columns, of which CHUNKS make up a row. A block may be a whole row, then so is a
    tile. With COLUMNS, also this program's column amax, to partial [E, G, K]. NEAR: a tile spans
    less than 2^31 elements of x."""
    pid, G, e = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    BLOCKS: tl.constexpr = BN // BLOCK
    OFFSET: tl.constexpr = tl.int32 if NEAR else tl.int64
    i, block = tl.arange(0, BM), tl.arange(0, BLOCKS)
    rows = i[:, None, None]
    columns = block[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    source = rows.to(OFFSET) * tl.cast(stride_m, OFFSET)
    source += columns.to(OFFSET) * tl.cast(stride_k, OFFSET)
    highest = to_magnitude(tl.zeros([BM, BLOCKS, BLOCK], tl.float32), T)
    scale_e, scale_m, scale_k = scale_strides(M, K, "block", 1, BLOCK)
    for tile in tl.range(pid, tl.cdiv(M, BM) * CHUNKS, G, num_stages=STAGES):
        m, k = tile // CHUNKS * BM, tile % CHUNKS * BN
        top, left = tl.cast(m, tl.int64), tl.cast(k, tl.int64)
        inside = k + columns < K
        if BM > 1:
            inside &= m + rows < M
        v = tl.load(
            x + e * stride_e + top * stride_m + left * stride_k + source,
            mask=inside,
            other=0.0,
            eviction_policy="evict_last",
        ).to(tl.float32)
        magnitude = to_magnitude(v, T)
        if COLUMNS:
            highest = larger(highest, magnitude)
        at = row_scale + e * scale_e + (top + i)[:, None] * scale_m
        at += (left // BLOCK + block)[None, :] * scale_k
        scale_inside = (m + i < M)[:, None] & (k + block * BLOCK < K)[None, :]
        scale, inverse, live = to_scale(amax_bits(magnitude, 2), T, at, scale_inside)
        store_scale(at, scale, scale_inside)
        out = row + (e * M + top) * K + left + rows * K + columns
        store_row(out, v * inverse[:, :, None], live[:, :, None], inside, T)
    if COLUMNS:
        c = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(partial + (e * G + pid) * K + c, amax_bits(highest, 0), mask=c < K)


@triton.jit(do_not_specialize=["G"])
def column_kernel(partial, amax, G, K, GP: tl.constexpr, BN: tl.constexpr):
    """Maximum over partial [E, G, K] to amax [E, K]; G is GP at most."""
    e = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    g = tl.arange(0, GP)
    mask = (g[:, None] < G) & (c[None, :] < K)
    v = tl.load(partial + e * G * K + g[:, None].to(tl.int64) * K + c[None, :], mask=mask, other=0)
    tl.store(amax + e * K + c, tl.max(v, 0), mask=c < K)


@triton.jit(do_not_specialize=["M"])
def amax_kernel(
    x, amax, M, K, stride_e, stride_m, stride_k,
    T: tl.constexpr, PER: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """amax bits per "tensor" [E], "column" [E, K] or "row" [E, M], by relaxed integer atomics; amax
    starts as zeros. A program reads STEPS tiles [BM, BN]: down the rows, but for "row" along
    them. EVEN: M is a multiple of BM."""
    if EVEN:
        M = M // BM * BM  # shows the compiler that a tile's rows are inside together
    pn, pm, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    seen = to_magnitude(tl.zeros([BM, BN], tl.float32), T)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        r = (pm if PER == "row" else pm * STEPS + step) * BM + tl.arange(0, BM)
        c = (pn * STEPS + step if PER == "row" else pn) * BN + tl.arange(0, BN)
        mask = (r[:, None] < M) & (c[None, :] < K)
        at = (
            x
            + e * stride_e
            + r[:, None].to(tl.int64) * stride_m
            + c[None, :].to(tl.int64) * stride_k
        )
        seen = larger(seen, to_magnitude(tl.load(at, mask=mask, other=0.0).to(tl.float32), T))
    if PER == "tensor":
        tl.atomic_max(amax + e, tl.max(amax_bits(seen, 1), 0), sem="relaxed")
    elif PER == "column":
        c = pn * BN + tl.arange(0, BN)
        tl.atomic_max(amax + e * K + c, amax_bits(seen, 0), mask=c < K, sem="relaxed")
    else:
        r = pm * BM + tl.arange(0, BM)
        tl.atomic_max(amax + e * M + r, amax_bits(seen, 1), mask=r < M, sem="relaxed")


def quantize_layouts(
    x: Tensor,
    row: CastPlan | None,
    col: CastPlan | None,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(data, scale) of each layout asked for, row first; x [M, K] or [E, M, K], any strides, not
    empty. ``amax``: float32, where it is known: one for each matrix, or each row of one layout.
    ``scale``: that of one layout, whose mode is ``given_mode`` of it."""
    if x.stride(-1) != 1 and x.stride(-2) == 1:
        # A transposed view: its col layout is the row layout of what it is a view of.
        out = quantize_layouts(x.mT, col, row, amax, scale)
        return out if row is None or col is None else (*out[2:], *out[:2])
    return _cast_of(x, row, col, amax)(x, amax, scale)


def quantize_and_measure(x: Tensor, row: CastPlan, col: CastPlan) -> tuple[Tensor, ...]:
    """(data, scale) of the row layout, and the amax that a cast to the transposed one, with a scale
    per row or tensor, is to be given."""
    return _cast_of(x, row, col, None, measured=True)(x)


def _cast_of(
    x: Tensor,
    row: CastPlan | None,
    col: CastPlan | None,
    amax: Tensor | None,
    measured: bool = False,
) -> _Cast:
    # Alignment is not asked for, but Triton specialises on it.
    aligned = x.data_ptr() % 16 == 0, amax is None or amax.data_ptr() % 16 == 0
    given = amax is not None
    return _cast(x.shape, x.stride(), x.dtype, x.device, aligned, row, col, given, measured)


class _Cast:
    """The launches that cast tensors of one shape, strides, dtype and alignment, with an amax of
    one alignment."""

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        aligned: tuple[bool, bool],
        row: CastPlan | None,
        col: CastPlan | None,
        given: bool,
        measured: bool,
    ) -> None:
        """``given``: an amax for what is cast; ``measured``: col's amax is taken, and no col."""
        e, m, k = (1, *shape)[-3:]
        stride_e, stride_m, stride_k = (0, *strides)[-3:] if e > 1 else (0, *strides[-2:])
        x = Matrices(e, m, k, stride_e, stride_m, stride_k, device)
        kinds = row and kind(row), col and kind(col)
        self.device, self.outputs = device, Outputs.of(shape, row, None if measured else col)
        self.rows = self.row_amax = self.col_amax = self.tiles = None
        self.measured = (*shape[:-2], k if kinds[1] == "vector" else 1, 1) if measured else None
        held = kinds[0] == "vector" and x.k <= MAX_ROW and not given
        if row is not None and (held or (kinds == ("block", None) and row.block[1] == 128)):
            columns = kinds[1] == "vector"
            self.rows = _Rows(x, dtype, row, columns)
            row = None
        elif row is not None and kinds[0] in ("tensor", "vector"):
            self.row_amax = _Amax(x, row, "row")
        if col is not None and kinds[1] in ("tensor", "vector"):
            gathered = self.rows is not None and self.rows.columns is not None
            if not gathered and kinds != ("tensor", "tensor"):
                self.col_amax = _Amax(x, col, "column")
        col = None if measured else col
        if row is not None or col is not None:
            self.tiles = _tiles(x, row, col)

    def __call__(
        self, x: Tensor, amax: Tensor | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        outputs, seen = self.outputs.new(self.device)
        if scale is not None:
            # Kernels take it from where theirs goes, and write NaN where a block has none.
            (place,) = (s for s in (outputs[1], outputs[3]) if s is not None)
            as_bytes(place).copy_(as_bytes(scale))
        row_amax = col_amax = None if amax is None else amax.contiguous().view(torch.int32)
        if self.rows is not None:
            col_amax = self.rows(x, *seen[:2])
        if amax is None and self.row_amax is not None:
            row_amax = col_amax = self.row_amax(x)
        if amax is None and self.col_amax is not None:
            col_amax = self.col_amax(x)
        if self.tiles is not None:
            self.tiles(x, *seen[:2], row_amax, *seen[2:], col_amax)
        found = tuple(o for o in outputs if o is not None)
        if self.measured is None:
            return found
        assert col_amax is not None
        return *found, col_amax.view(torch.float32).view(self.measured)


_cast = functools.lru_cache(maxsize=1024)(_Cast)


class _Rows:
    """The row layout, rowwise or in blocks of one row; the columns' amax bits [E, K] too, if asked
    for."""

    def __init__(self, x: Matrices, dtype: torch.dtype, layout: CastPlan, columns: bool) -> None:
        block = layout.block[1]
        if block == FULL:
            block = max(128, triton.next_power_of_2(x.k))
            bm, bn = 1, block
        else:  # scales of 32 rows are neighbours in memory: whole sectors
            bm, bn = 32, 128
        warps, together, stages = row_loop(x.device, bm * bn, dtype.itemsize)
        chunks = triton.cdiv(x.k, bn)
        programs = tiles = triton.cdiv(x.m, bm) * chunks
        most = max(1, multiprocessors(x.device) * together // x.e)
        if bm == 1:
            programs = min(tiles, most)
        else:  # one tile each: 81.9 us for 8192 x 14336, against 85.6 of programs that stay
            stages = 1
        self.launch = Launch(
            row_kernel, (programs, x.e, 1),
            x.m, x.k, chunks, x.stride_e, x.stride_m, x.stride_k,
            options={"num_warps": warps},
            T=target(x.device, layout), COLUMNS=columns, BLOCK=block, BM=bm, BN=bn,
            NEAR=bm * x.stride_m + bn * x.stride_k < 2**31, STAGES=stages,
        )  # fmt: skip
        self.columns = ColumnAmaxes(x.e, programs, most, x.k) if columns else None

    def __call__(self, x: Tensor, data: Tensor | None, scale: Tensor | None) -> Tensor | None:
        if self.columns is None:
            self.launch(x, data, scale, None)
            return None
        partial = x.new_empty(self.columns.shape, dtype=torch.int32)
        self.launch(x, data, scale, partial)
        return self.columns(partial)


class ColumnAmaxes:
    """amax bits [E, K] of the programs' partial ones, of ``shape`` [E, G, K]; ``most``: G where
    there are many rows."""

    def __init__(self, e: int, programs: int, most: int, k: int) -> None:
        self.shape = (e, programs, k)
        width = 32
        self.launch = Launch(
            column_kernel, (triton.cdiv(k, width), e, 1), programs, k,
            options={"num_warps": 4}, GP=triton.next_power_of_2(most), BN=width,
        )  # fmt: skip

    def __call__(self, partial: Tensor) -> Tensor:
        amax = partial.new_empty((self.shape[0], self.shape[2]))
        self.launch(partial, amax)
        return amax


class _Amax:
    """amax bits per "row" [E, M] or "column" [E, K], or of each matrix [E, 1] if tensorwise."""

    def __init__(self, x: Matrices, layout: CastPlan, per: str) -> None:
        per = "tensor" if kind(layout) == "tensor" else per
        self.shape = (x.e, {"tensor": 1, "row": x.m, "column": x.k}[per])
        bm, bn, down, along = (16, 128, 1, 8) if per == "row" else (16, 256, 16, 1)
        if x.m > GRID_LIMIT * bm * down:  # triton_refusal stops at 128 rows a program
            bm, bn = 128, 16
        self.launch = Launch(
            amax_kernel, (triton.cdiv(x.k, bn * along), triton.cdiv(x.m, bm * down), x.e),
            x.m, x.k, x.stride_e, x.stride_m, x.stride_k,
            options={"num_warps": 4}, T=target(x.device, layout),
            PER=per, EVEN=x.m % bm == 0, BM=bm, BN=bn, STEPS=max(down, along), STAGES=4,
        )  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        amax = x.new_zeros(self.shape, dtype=torch.int32)
        self.launch(x, amax)
        return amax


def _tiles(x: Matrices, row: CastPlan | None, col: CastPlan | None) -> Launch:
    constants, options = tile_constants(x, row, col), tile_options(x, row, col)
    bm, bn = constants["BM"], constants["BN"]
    return Launch(
        tile_kernel, (triton.cdiv(x.k, bn), triton.cdiv(x.m, bm), x.e),
        x.m, x.k, x.stride_e, x.stride_m, x.stride_k,
        options=options, **constants, NEAR=bm * x.stride_m + bn * x.stride_k < 2**31,
    )  # fmt: skip
