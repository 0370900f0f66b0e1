"""Triton kernels of ``float8.kernels.quantize_grouped``: the same bytes and scales as its
reference, for any offsets that it takes, which stay on the device.

Letters as there. The column layout is cut into tiles of GROUP_ALIGN columns; each is of one group
or of none, and a program finds which by a scan of the groups' sizes. The rows of no group count as
another group, G, in the row layout. Kinds of scales are those of ``cast_triton``.

Scales of a whole group take a pass of their own: programs walk equal shares of x's rows, and
program p keeps what it saw of group g in row p + g of a table of partial maxima. Both only rise
along x, so no two pairs meet in a row, and nothing is atomic.
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
    kind,
    multiprocessors,
    row_loop,
    row_stages,
    runs_ptx,
    target,
)
from .quantize import CastPlan
from .quantize_grouped import GROUP_ALIGN, empty_columns, empty_rows, padded_tokens

Parts = tuple[Tensor, Tensor]  # data and scale of the rows
Columns = tuple[Tensor, Tensor, Tensor]  # data_t, scale_t, offs_t


@triton.jit
def row_end(offs, g, G, T):
    """Where the rows of group g end: 0 for -1, T for G on. Never outside x, whatever offs holds."""
    end = tl.load(offs + g, mask=(g >= 0) & (g < G), other=0)
    return tl.where(g < G, tl.minimum(tl.maximum(end, 0), T), T)


@triton.jit
def find_tile(offs, tile, G, T, GP: tl.constexpr, BM: tl.constexpr):
    """(group of a tile, its first row, where the group's rows end, where every group's tiles
    end)."""
    g = tl.arange(0, GP)
    size = tl.where(g < G, row_end(offs, g, G, T) - row_end(offs, g - 1, G, T), 0)
    ends = tl.cumsum((tl.maximum(size, 0) + BM - 1) // BM, 0)
    before = (g < G) & (ends <= tile)
    # How many groups are before the tile and how many tiles those have, in one reduction.
    found = tl.max(tl.where(before, (ends.to(tl.int64) << 32) + g + 1, 0), 0)
    group, first = found.to(tl.int32), (found >> 32).to(tl.int32)
    row = row_end(offs, group - 1, G, T) + (tile - first) * BM
    return group, row, row_end(offs, group, G, T), ends


# T and what follows from it differ from step to step, and offs may be part of a table: no variant
# of a kernel is made for multiples of 16.
@triton.jit(do_not_specialize=["offs", "T", "row_scale_k", "col_scale_m", "col_scale_k"])
def group_tile_kernel(
    x, offs, row, row_scale, col, col_scale, col_amax, offs_t, T, K, P, G, stride_t, stride_k,
    row_scale_k, col_scale_m, col_scale_k,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr,
    ROW_T: tl.constexpr, COL_T: tl.constexpr, EVEN: tl.constexpr, GP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """One tile: BM columns of the column layout by BN features, and its rows in row layout.
    NEAR: a tile spans less than 2^31 elements of x."""
    width = tl.cdiv(K, BN)
    tile, pn = tl.program_id(0) // width, tl.program_id(0) % width
    group, start, end, ends = find_tile(offs, tile, G, T, GP, BM)
    if tl.program_id(0) == 0:
        g = tl.arange(0, GP)
        tl.store(offs_t + g, tl.minimum(ends * BM, P), mask=g < G)
    if ROW == "none":
        end = tl.where(group < G, end, 0)  # nobody wants the others
    r, c = tile * BM + 4 * tl.arange(0, BM // 4), pn * BN + tl.arange(0, BN)
    # Rows are counted from the tile's first one, which has one number in both layouts.
    shift, stop = start.to(tl.int64) - tile * BM, tile * BM + end - start
    OFFSET: tl.constexpr = tl.int32 if NEAR else tl.int64
    next_row, next_column = tl.cast(stride_t, OFFSET), tl.cast(stride_k, OFFSET)
    i, j = tl.arange(0, BM // 4).to(OFFSET), tl.arange(0, BN).to(OFFSET)
    corner = x + start.to(tl.int64) * stride_t + (pn * BN).to(tl.int64) * stride_k
    source = corner + (4 * i[:, None] * next_row + j[None, :] * next_column)
    v0, v1, v2, v3 = load_four(source, next_row, r, c, stop, K, False)
    if ROW != "none":
        store_tile(
            v0, v1, v2, v3, r, c, tile, pn, 0,
            row + shift * K, row_scale + shift, None, None, None, None, stop, K,
            0, 1, row_scale_k, 0, 0, 0,
            ROW, "none", ROW_BLOCK, BM, ROW_T, None, False, False, BM, BN,
        )  # fmt: skip
        if group == G:
            zero = tl.zeros([BM // 4, BN], tl.float32)
            v0, v1, v2, v3 = zero, zero, zero, zero
    if ROW == "none" or tile * BM < P:
        if COL == "vector" or COL == "tensor":
            at = tl.minimum(group, G - 1).to(tl.int64) * (K if COL == "vector" else 1)
            col_scale += at
            col_amax += at
        store_tile(
            v0, v1, v2, v3, r, c, tile, pn, 0,
            None, None, None, col, col_scale, col_amax, P, K,
            0, 0, 0, 0, col_scale_m, col_scale_k,
            "none", COL, BN, COL_BLOCK, None, COL_T, True, EVEN, BM, BN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["offs", "T", "share"])
def group_rows_kernel(
    x, offs, row, row_scale, partial, T, K, G, stride_t, stride_k, share,
    ROW_T: tl.constexpr, COL: tl.constexpr, COL_T: tl.constexpr, GP: tl.constexpr,
    KP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows p * share to (p + 1) * share, KP columns of them: what each group's column amaxes, or
    its one amax, are among them, to partial [p + g]; with ROW_T, also the rows, rowwise."""
    p, pn = tl.program_id(0), tl.program_id(1)
    c = pn * KP + tl.arange(0, KP)
    inside = c < K
    source = x + c.to(tl.int64) * stride_k
    at = p * share
    stop = tl.minimum(at + share, T)
    g = tl.arange(0, GP)
    ends = row_end(offs, g, G, T)
    first = tl.sum(((g < G) & (ends <= at)).to(tl.int32), 0)
    last = tl.sum(((g < G) & (ends < stop)).to(tl.int32), 0)
    for group in range(first, last + 1):
        end = tl.minimum(row_end(offs, group, G, T), stop)
        columns = to_magnitude(tl.zeros([KP], tl.float32), COL_T)
        for r in tl.range(at, end, num_stages=STAGES):
            v = tl.load(
                source + tl.cast(r, tl.int64) * stride_t,
                mask=inside,
                other=0.0,
                eviction_policy="evict_last",
            ).to(tl.float32)
            magnitude = to_magnitude(v, COL_T)
            columns = larger(columns, magnitude)
            if ROW_T is not None:
                scale, inverse, live = to_scale(amax_bits(magnitude, 0), ROW_T)
                store_scale(row_scale + r, scale, None)
                store_row(row + tl.cast(r, tl.int64) * K + c, v * inverse, live, inside, ROW_T)
        if (at < end) & (group < G):
            line = tl.cast(p + group, tl.int64)
            if COL == "vector":
                tl.store(partial + line * K + c, columns.to(tl.int32, bitcast=True), mask=inside)
            else:
                tl.store(partial + line * tl.num_programs(1) + pn, amax_bits(columns, 0))
        at = tl.maximum(at, end)


@triton.jit(do_not_specialize=["offs", "T", "share"])
def group_amax_kernel(
    partial, offs, amax, scale, T, W, G, share,
    COL: tl.constexpr, COL_T: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """amax bits and scale of a group, from its rows of partial [p + g, W]: W of them, or one."""
    group = tl.program_id(1)
    start, end = row_end(offs, group - 1, G, T), row_end(offs, group, G, T)
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = c < W
    last = tl.where(start < end, tl.cdiv(end, share), 0)
    seen = tl.zeros([BP, BN], tl.int32)
    for p in range(start // share, last, BP):
        at = p + tl.arange(0, BP)
        line = (at + group).to(tl.int64)[:, None] * W
        mask = (at < last)[:, None] & inside[None, :]
        seen = tl.maximum(seen, tl.load(partial + line + c[None, :], mask=mask, other=0))
    bits = tl.max(seen, 0)
    if COL == "vector":
        out = tl.cast(group, tl.int64) * W + c
    else:
        bits, out, inside = tl.max(bits, 0), group, None
    tl.store(amax + out, bits, mask=inside)
    s, _, _ = to_scale(bits, COL_T)
    store_scale(scale + out, s, inside)


def quantize_groups(
    x: Tensor, offs: Tensor, row: CastPlan | None, col: CastPlan
) -> tuple[Parts | None, Columns]:
    """(data, scale) of x's rows and (data, scale, offs_t) of its groups' columns; x [T, K], any
    strides, not empty. None for the rows unless they share a pass over x: where a program has
    their blocks at hand."""
    whole, aligned = col.block[1] == FULL, x.data_ptr() % 16 == 0
    with_pass = row is not None and whole and kind(row) == "vector" and x.shape[1] <= MAX_ROW
    with_tile = row is not None and kind(row) == "block"
    measure, tiles = _launches(
        x.shape[1], len(offs), x.stride(), x.dtype, x.device, aligned,
        row if with_pass else None, row if with_tile else None, col,
    )  # fmt: skip
    rows = empty_rows(x, row) if row is not None and (with_pass or with_tile) else None
    columns, offs = empty_columns(x, len(offs), col), offs.contiguous()
    amax = None if measure is None else measure(x, offs, rows, columns[1])
    tiles(x, offs, rows, columns, amax)
    return rows, columns


@functools.lru_cache(maxsize=1024)
def _launches(
    features: int,
    groups: int,
    strides: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
    row_in_pass: CastPlan | None,
    row_in_tile: CastPlan | None,
    col: CastPlan,
) -> tuple[_Measure | None, _Tiles]:
    """For any number of tokens. Alignment is not asked for, but Triton specialises on it."""
    x = Matrices(1, 0, features, 0, *strides, device)
    measure = _Measure(x, dtype, groups, row_in_pass, col) if col.block[1] == FULL else None
    return measure, _Tiles(x, groups, row_in_tile, col)


class _Measure:
    """amax bits of the groups' columns [G, K], or of the groups [G, 1]; their scale is written, and
    so are x's rows if there is a cast of them."""

    def __init__(
        self,
        x: Matrices,
        dtype: torch.dtype,
        groups: int,
        row: CastPlan | None,
        col: CastPlan,
    ) -> None:
        width, processors = max(128, triton.next_power_of_2(x.k)), multiprocessors(x)
        if row is None:
            width = min(2048, width)
            warps, together = 4, 8
            stages = row_stages(x.device, together * width * dtype.itemsize, 3)
        else:
            warps, together, stages = row_loop(x.device, width, dtype.itemsize)
        self.pieces = triton.cdiv(x.k, width)
        self.programs = triton.cdiv(together * processors, self.pieces)
        self.rows = Launch(
            group_rows_kernel, None, options={"num_warps": warps},
            ROW_T=row and target(x, row), COL=kind(col), COL_T=target(x, col),
            GP=triton.next_power_of_2(groups), KP=width, STAGES=stages,
        )  # fmt: skip
        vector = kind(col) == "vector"
        self.amaxes = x.k if vector else 1
        self.entries: int = x.k if vector else self.pieces  # of a program's partial maxima
        # One step where groups are of equal sizes.
        lines = min(256, triton.next_power_of_2(self.programs // groups + 1))
        self.step = min(256, 8192 // lines) if vector else triton.next_power_of_2(self.pieces)
        self.amax = Launch(
            group_amax_kernel, None, options={"num_warps": 4},
            COL=kind(col), COL_T=target(x, col), BP=lines, BN=self.step,
        )  # fmt: skip

    def __call__(self, x: Tensor, offs: Tensor, rows: Parts | None, scale: Tensor) -> Tensor:
        (t, k), g = x.shape, len(offs)
        partial = x.new_empty((self.programs + g, self.entries), dtype=torch.int32)
        amax = x.new_empty((g, self.amaxes), dtype=torch.int32)
        data, row_scale = (None, None) if rows is None else (rows[0], as_bytes(rows[1]))
        share = triton.cdiv(t, self.programs)
        self.rows(
            x, offs, data, row_scale, partial, t, k, g, *x.stride(), share,
            grid=(self.programs, self.pieces, 1),
        )  # fmt: skip
        self.amax(
            partial, offs, amax, as_bytes(scale), t, self.entries, g, share,
            grid=(triton.cdiv(self.entries, self.step), g, 1),
        )  # fmt: skip
        return amax


class _Tiles:
    """The column layout and, if there is a cast of them, x's rows."""

    def __init__(self, x: Matrices, groups: int, row: CastPlan | None, col: CastPlan) -> None:
        blocks = {layout.block[1] for layout in (row, col) if layout is not None}
        self.bn = 64 if 32 in blocks and 128 not in blocks else 128
        # The rows of no group are one more group.
        self.groups = groups if row is None else groups + 1
        self.whole = col.block[1] == FULL
        # Registers of a block's maxima are capped as in the dense tile_options.
        few = {"maxnreg": 168} if runs_ptx(x) and self.bn == 128 and not self.whole else {}
        self.launch = Launch(
            group_tile_kernel, None, options={"num_warps": 4, **few},
            ROW="none" if row is None else kind(row), COL=kind(col),
            ROW_BLOCK=self.bn if row is None else row.block[1],
            COL_BLOCK=GROUP_ALIGN if self.whole else col.block[1],
            ROW_T=row and target(x, row), COL_T=target(x, col),
            EVEN=x.k % self.bn == 0, GP=triton.next_power_of_2(groups), BM=GROUP_ALIGN, BN=self.bn,
            NEAR=GROUP_ALIGN * x.stride_m + self.bn * x.stride_k < 2**31,
        )  # fmt: skip

    def __call__(
        self, x: Tensor, offs: Tensor, rows: Parts | None, columns: Columns, amax: Tensor | None
    ) -> None:
        (t, k), (data_t, scale_t, offs_t) = x.shape, columns
        data, scale, row_scale_k = None, None, 0
        if rows is not None:
            data, scale, row_scale_k = rows[0], as_bytes(rows[1]), rows[1].stride(1)
        tiles = padded_tokens(t, self.groups) // GROUP_ALIGN
        self.launch(
            x, offs, data, scale, data_t.view(torch.int32), as_bytes(scale_t), amax, offs_t,
            t, k, data_t.shape[1], len(offs), *x.stride(), row_scale_k,
            *((1, 0) if self.whole else scale_t.stride()),
            grid=(tiles * triton.cdiv(k, self.bn), 1, 1),
        )  # fmt: skip
