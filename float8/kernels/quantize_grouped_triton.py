"""Triton kernels of ``float8.kernels.quantize_grouped`` and ``fused_grouped``: the bytes and scales
of their references, for any offsets that these take, which stay on the device.

Letters as there; K features of x, or of each of the results. SOURCE, a constexpr, names what is
cast: "plain", x itself, or "swiglu" or "swiglu_backward" of x, y and z, computed in registers, as
``fused_triton`` has them. The backward's two results are JOINT, one matrix [T, 2 K], or stacked,
[2, T, K]; either way each is a *half*.

The column layout is cut into tiles of GROUP_ALIGN columns; each is of one group or of none, and a
program finds which by a scan of the groups' sizes. The rows of no group count as another group, G,
in the row layout. Kinds of scales are those of ``cast_triton``.

Scales of a whole group take a pass of their own: programs walk equal shares of x's rows, and
program p keeps what it saw of group g in row p + g of a table of partial maxima. Both only rise
along x, so no two pairs meet in a row. The pass stores rowwise rows too, where it holds them whole,
and measures them where it does not; only these maxima, and that of all rows, are atomic.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

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
from .fused_triton import four_rows, gate_gradient, produce, swiglu, up_gradient, widened
from .launch import (
    MAX_ROW,
    Launch,
    fused_row_loop,
    kind,
    multiprocessors,
    row_loop,
    row_stages,
    runs_ptx,
    target,
)
from .quantize import CastPlan
from .quantize_grouped import GROUP_ALIGN, empty_columns, empty_rows, padded_tokens

_CHUNK = 2048  # columns of group_rows_kernel's programs where they need not see whole rows
Inputs = tuple[Tensor, Tensor | None, Tensor | None]  # x, y and z
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


@triton.jit
def tile_pointers(
    x, stride_t, stride_k, start, pn, BM: tl.constexpr, BN: tl.constexpr, NEAR: tl.constexpr
):
    """Pointers to every fourth of BM rows from ``start``, and how far the next row is."""
    OFFSET: tl.constexpr = tl.int32 if NEAR else tl.int64
    next_row, next_column = tl.cast(stride_t, OFFSET), tl.cast(stride_k, OFFSET)
    i, j = tl.arange(0, BM // 4).to(OFFSET), tl.arange(0, BN).to(OFFSET)
    corner = x + start.to(tl.int64) * stride_t + (pn * BN).to(tl.int64) * stride_k
    return corner + (4 * i[:, None] * next_row + j[None, :] * next_column), next_row


# T and what follows from it differ from step to step, and offs may be part of a table: no variant
# of a kernel is made for multiples of 16.
@triton.jit(
    do_not_specialize=["offs", "T", "row_scale_h", "row_scale_k", "col_scale_h", "col_scale_m",
                       "col_scale_k"]
)  # fmt: skip
def group_tile_kernel(
    x, y, z, offs, row, row_scale, row_amax, col, col_scale, col_amax, offs_t, T, K, P, G,
    stride_xt, stride_xk, stride_yt, stride_yk, stride_zt, stride_zk,
    row_scale_h, row_scale_k, col_scale_h, col_scale_m, col_scale_k,
    SOURCE: tl.constexpr, JOINT: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr, ROW_T: tl.constexpr, COL_T: tl.constexpr,
    EVEN: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """One tile: BM columns of the column layout by BN features of one half, and its rows in row
    layout. NEAR: a tile spans less than 2^31 elements of every input."""
    # The halves' programs are neighbours: one reads what the other brings to the cache.
    HALVES: tl.constexpr = 2 if SOURCE == "swiglu_backward" else 1
    width = tl.cdiv(K, BN) * HALVES
    tile, at = tl.program_id(0) // width, tl.program_id(0) % width
    pn, half = at // HALVES, at % HALVES
    group, start, end, ends = find_tile(offs, tile, G, T, GP, BM)
    if tl.program_id(0) == 0:
        g = tl.arange(0, GP)
        tl.store(offs_t + g, tl.minimum(ends * BM, P), mask=g < G)
    if ROW == "none":
        end = tl.where(group < G, end, 0)  # nobody wants the others
    r, c = tile * BM + 4 * tl.arange(0, BM // 4), pn * BN + tl.arange(0, BN)
    # Rows are counted from the tile's first one, which has one number in both layouts.
    shift, stop = start.to(tl.int64) - tile * BM, tile * BM + end - start
    source, next_row = tile_pointers(x, stride_xt, stride_xk, start, pn, BM, BN, NEAR)
    if SOURCE == "plain":
        v0, v1, v2, v3 = load_four(source, next_row, r, c, stop, K, False)
    else:
        DTYPE: tl.constexpr = x.dtype.element_ty
        rows, inside = r[:, None], (c < K)[None, :]
        m0, m1 = (rows < stop) & inside, (rows + 1 < stop) & inside
        m2, m3 = (rows + 2 < stop) & inside, (rows + 3 < stop) & inside
        # All loads before all else, and kept in 16 bits, as in fused_triton.tile_kernel.
        x0, x1, x2, x3 = four_rows(source, next_row, m0, m1, m2, m3)
        y0, y1, y2, y3, z0, z1, z2, z3 = x0, x1, x2, x3, x0, x1, x2, x3
        source, next_row = tile_pointers(y, stride_yt, stride_yk, start, pn, BM, BN, NEAR)
        if SOURCE == "swiglu" or half == 0:
            y0, y1, y2, y3 = four_rows(source, next_row, m0, m1, m2, m3)
        if SOURCE == "swiglu_backward":
            source, next_row = tile_pointers(z, stride_zt, stride_zk, start, pn, BM, BN, NEAR)
            z0, z1, z2, z3 = four_rows(source, next_row, m0, m1, m2, m3)
        v0 = produce(x0, y0, z0, half, None, SOURCE, DTYPE, COL_T)
        v1 = produce(x1, y1, z1, half, None, SOURCE, DTYPE, COL_T)
        v2 = produce(x2, y2, z2, half, None, SOURCE, DTYPE, COL_T)
        v3 = produce(x3, y3, z3, half, None, SOURCE, DTYPE, COL_T)
    far = half.to(tl.int64)
    if ROW != "none":
        if JOINT:
            # Columns from K on, so that those of either half end at 2 K.
            line, columns, first = 2 * K, c + K, far * K
        else:
            line, columns, first = K, c, far * T * K
        row_scale += half * row_scale_h
        if ROW == "tensor":
            row_amax += half * row_scale_h
        else:
            row_scale += shift
        if ROW == "vector":
            row_amax += half * row_scale_h + shift
        store_tile(
            v0, v1, v2, v3, r, columns, tile, pn, 0,
            row + first + shift * line, row_scale, row_amax, None, None, None, stop, line,
            0, 1, row_scale_k, 0, 0, 0,
            ROW, "none", ROW_BLOCK, BM, ROW_T, None, False, False, BM, BN,
        )  # fmt: skip
        if group == G:
            zero = tl.zeros([BM // 4, BN], tl.float32)
            v0, v1, v2, v3 = zero, zero, zero, zero
    if ROW == "none" or tile * BM < P:
        col_scale += half * col_scale_h
        if COL == "vector" or COL == "tensor":
            at_group = tl.minimum(group, G - 1).to(tl.int64)
            if COL == "vector":
                at_group *= 2 * K if JOINT else K
            col_scale += at_group
            col_amax += at_group + half * col_scale_h
        store_tile(
            v0, v1, v2, v3, r, c, tile, pn, 0,
            None, None, None, col + far * K * P // 4, col_scale, col_amax, P, K,
            0, 0, 0, 0, col_scale_m, col_scale_k,
            "none", COL, BN, COL_BLOCK, None, COL_T, True, EVEN, BM, BN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["offs", "T", "share"])
def group_rows_kernel(
    x, y, z, offs, row, row_scale, row_amax, partial, T, K, G, lines,
    stride_xt, stride_xk, stride_yt, stride_yk, stride_zt, stride_zk, share,
    SOURCE: tl.constexpr, JOINT: tl.constexpr, ROW: tl.constexpr, ROW_T: tl.constexpr,
    COL: tl.constexpr, COL_T: tl.constexpr, REST: tl.constexpr, GP: tl.constexpr,
    KP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows p * share to (p + 1) * share, KP columns of them: what each group's column amaxes, or
    its one amax, are among them, to line p + g of partial, [lines, entries] for a matrix; REST: the
    rows of no group are a group too.

    ROW: "store" the rows, rowwise, or the "amax" of each to row_amax, which starts as zeros, or
    "none".
    """
    p, pn = tl.program_id(0), tl.program_id(1)
    DTYPE: tl.constexpr = x.dtype.element_ty
    EVICT: tl.constexpr = "evict_last" if SOURCE == "plain" else ""
    c = pn * KP + tl.arange(0, KP)
    inside, far = c < K, c.to(tl.int64)
    x += far * stride_xk
    if SOURCE != "plain":
        y += far * stride_yk
    if SOURCE == "swiglu_backward":
        z += far * stride_zk
    at = p * share
    stop = tl.minimum(at + share, T)
    g = tl.arange(0, GP)
    ends = row_end(offs, g, G, T)
    first = tl.sum(((g < G) & (ends <= at)).to(tl.int32), 0)
    last = tl.sum(((g < G) & (ends < stop)).to(tl.int32), 0)
    for group in range(first, last + 1):
        end = tl.minimum(row_end(offs, group, G, T), stop)
        columns = to_magnitude(tl.zeros([KP], tl.float32), COL_T)
        seconds = columns  # of the other half
        for r in tl.range(at, end, num_stages=STAGES):
            i = tl.cast(r, tl.int64)
            v = tl.load(x + i * stride_xt, mask=inside, other=0.0, eviction_policy=EVICT)
            if SOURCE == "plain":
                v = v.to(tl.float32)
            else:
                u = tl.load(y + i * stride_yt, mask=inside, other=0.0)
                if SOURCE == "swiglu":
                    v = swiglu(widened(v, COL_T), widened(u, COL_T), DTYPE, COL_T)
                else:
                    d = widened(tl.load(z + i * stride_zt, mask=inside, other=0.0), COL_T)
                    v, u = widened(v, COL_T), widened(u, COL_T)
                    second = to_magnitude(up_gradient(d, v, DTYPE, COL_T), COL_T)
                    v = gate_gradient(d, v, u, DTYPE, COL_T)
                    seconds = larger(seconds, second)
            magnitude = to_magnitude(v, COL_T)
            columns = larger(columns, magnitude)
            if ROW == "store":
                scale, inverse, live = to_scale(amax_bits(magnitude, 0), ROW_T)
                store_scale(row_scale + r, scale, None)
                store_row(row + i * K + c, v * inverse, live, inside, ROW_T)
            elif ROW == "amax":
                if SOURCE == "swiglu_backward":
                    if JOINT:
                        magnitude = larger(magnitude, second)
                    else:
                        tl.atomic_max(row_amax + T + i, amax_bits(second, 0), sem="relaxed")
                tl.atomic_max(row_amax + i, amax_bits(magnitude, 0), sem="relaxed")
        if (at < end) & ((group < G) | REST):
            line = tl.cast(p + group, tl.int64)
            if COL == "vector":
                entries, other = K, tl.cast(lines, tl.int64) * K
                if JOINT:
                    entries, other = 2 * K, K
                out = partial + line * entries + c
                tl.store(out, columns.to(tl.int32, bitcast=True), mask=inside)
                if SOURCE == "swiglu_backward":
                    tl.store(out + other, seconds.to(tl.int32, bitcast=True), mask=inside)
            else:
                out = partial + line * tl.num_programs(1) + pn
                if JOINT:
                    columns = larger(columns, seconds)
                elif SOURCE == "swiglu_backward":
                    tl.store(out + lines * tl.num_programs(1), amax_bits(seconds, 0))
                tl.store(out, amax_bits(columns, 0))
        at = tl.maximum(at, end)


@triton.jit(do_not_specialize=["offs", "T", "share"])
def group_amax_kernel(
    partial, offs, all_amax, amax, scale, T, W, G, lines, share,
    COL: tl.constexpr, COL_T: tl.constexpr, REST: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """amax bits and scale of a group, from its rows of partial [p + g, W]: W of them, or one. REST:
    the amax of all groups, and of the rows of none, which are group G, to all_amax, which starts as
    zeros."""
    group, matrix = tl.program_id(1), tl.program_id(2)
    partial += tl.cast(matrix, tl.int64) * lines * W
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
    if REST:
        tl.atomic_max(all_amax + matrix, tl.max(bits, 0), sem="relaxed")
    out = tl.cast(matrix * G + group, tl.int64)
    if COL == "vector":
        out, inside = out * W + c, inside & (group < G)
    else:
        bits, inside = tl.max(bits, 0), group < G
    tl.store(amax + out, bits, mask=inside)
    s, _, _ = to_scale(bits, COL_T)
    store_scale(scale + out, s, inside)


def quantize_groups(
    x: Tensor, offs: Tensor, row: CastPlan | None, col: CastPlan
) -> tuple[Parts | None, Columns]:
    """(data, scale) of x's rows and (data, scale, offs_t) of its groups' columns; x [T, K], any
    strides, not empty. None for the rows unless they share a pass over x."""
    if row is not None and not shares_a_pass(row, col):
        row = None
    return group_layouts("plain", (x, None, None), offs, False, row, col)


def shares_a_pass(row: CastPlan, col: CastPlan) -> bool:
    """Whether the kernels that write columns can write the rows too: a program has their blocks at
    hand, or the groups are measured first, and the rows with them."""
    return kind(row) == "block" or (kind(row) != "square" and col.block[1] == FULL)


def crosses_halves(features: int, row: CastPlan | None, col: CastPlan) -> bool:
    """Whether a tile of columns of a joint matrix [T, 2 features], which is of one half, may hold
    part of a block."""
    blocks = (row is not None and kind(row) == "block") or kind(col) == "square"
    return blocks and features % _tile_width(row, col) != 0


def group_layouts(
    source: str,
    inputs: Inputs,
    offs: Tensor,
    joint: bool,
    row: CastPlan | None,
    col: CastPlan,
) -> tuple[Parts | None, Columns]:
    """(data, scale) of the rows of what the source makes of the inputs, and (data, scale, offs_t)
    of its groups' columns. Inputs are [T, K], any strides, not empty. The rows share a pass, and
    no block crosses the halves of a joint matrix."""
    x, strides = inputs[0], tuple(s for t in inputs for s in ((0, 0) if t is None else t.stride()))
    (t, k), two = x.shape, source == "swiglu_backward"
    aligned = tuple(t is not None and t.data_ptr() % 16 == 0 for t in inputs)
    measure, tiles = _launches(
        _Job(source, joint, k, len(offs), strides, x.dtype, aligned, x.device, row, col)
    )
    shape = (t, 2 * k) if joint else (2, t, k) if two else (t, k)
    rows = None if row is None else empty_rows(x, shape, row)
    columns, offs = empty_columns(x, shape, len(offs), col), offs.contiguous()
    row_amax, amax = (None, None) if measure is None else measure(inputs, offs, rows, columns[1])
    tiles(inputs, offs, rows, row_amax, columns, amax)
    return rows, columns


class _Job(NamedTuple):
    """What launches depend on: not the number of tokens."""

    source: str
    joint: bool
    k: int
    groups: int
    strides: tuple[int, ...]  # of rows and of columns, of each input
    dtype: torch.dtype
    aligned: tuple[bool, ...]  # to 16 bytes: nothing here asks, but Triton specialises on it
    device: torch.device
    row: CastPlan | None
    col: CastPlan

    @property
    def whole(self) -> bool:
        """Whether the columns' scales are of whole groups."""
        return self.col.block[1] == FULL

    @property
    def halves(self) -> int:
        return 2 if self.source == "swiglu_backward" else 1

    @property
    def matrices(self) -> int:
        """How many the results are; gradients that are joint are one."""
        return 1 if self.joint else self.halves


@functools.lru_cache(maxsize=1024)
def _launches(job: _Job) -> tuple[_Measure | None, _Tiles]:
    measure = _Measure(job) if job.whole else None
    stored = measure is not None and measure.row == "store"
    return measure, _Tiles(job._replace(row=None) if stored else job)


class _Measure:
    """amax bits of the groups' columns, or of the groups; their scale is written, and so are the
    rows, where they are rowwise and a program holds them. Else amax bits of the rows, or of all."""

    def __init__(self, job: _Job) -> None:
        k, device, row, col = job.k, job.device, job.row, job.col
        width, processors = max(128, triton.next_power_of_2(k)), multiprocessors(device)
        self.row, self.rest = "none", row is not None and kind(row) == "tensor"
        if row is not None and kind(row) == "vector":
            # The registers hold no rows of two results beside the maxima of their columns.
            self.row = "store" if k <= MAX_ROW and job.halves == 1 else "amax"
        itemsize = job.dtype.itemsize
        width = width if self.row == "store" else min(_CHUNK, width)
        if job.source != "plain":
            options, together, stages = fused_row_loop(device, job.source, width, itemsize)
        else:
            warps, together, stages = row_loop(device, width, itemsize)
            if self.row != "store":
                together, stages = 8, row_stages(device, 8 * width * itemsize, 3)
            options = {"num_warps": warps}
        self.pieces = triton.cdiv(k, width)
        self.programs = triton.cdiv(together * processors, self.pieces)
        self.matrices, self.lines = job.matrices, self.programs + job.groups
        self.rows = Launch(
            group_rows_kernel, None, options=options,
            SOURCE=job.source, JOINT=job.joint, ROW=self.row, ROW_T=row and target(device, row),
            COL=kind(col), COL_T=target(device, col), REST=self.rest,
            GP=triton.next_power_of_2(job.groups), KP=width, STAGES=stages,
        )  # fmt: skip
        vector = kind(col) == "vector"
        features = k * job.halves // job.matrices
        self.amaxes = features if vector else 1  # of a group
        self.entries = features if vector else self.pieces  # of a program's partial maxima
        # One step where groups are of equal sizes.
        lines = min(256, triton.next_power_of_2(self.programs // job.groups + 1))
        self.step = min(256, 8192 // lines) if vector else triton.next_power_of_2(self.pieces)
        self.amax = Launch(
            group_amax_kernel, None, options={"num_warps": 4},
            COL=kind(col), COL_T=target(device, col), REST=self.rest, BP=lines, BN=self.step,
        )  # fmt: skip
        self.strides = job.strides

    def __call__(
        self, inputs: Inputs, offs: Tensor, rows: Parts | None, scale: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        x, g = inputs[0], len(offs)
        t, k = x.shape
        new = functools.partial(x.new_empty, dtype=torch.int32)
        partial = new((self.matrices, self.lines, self.entries))
        amax = new((self.matrices, g, self.amaxes))
        data = row_scale = row_amax = None
        if self.row == "store":
            assert rows is not None
            data, row_scale = rows[0], as_bytes(rows[1])
        elif self.row == "amax" or self.rest:
            row_amax = x.new_zeros((self.matrices, 1 if self.rest else t), dtype=torch.int32)
        share = triton.cdiv(t, self.programs)
        self.rows(
            *inputs, offs, data, row_scale, row_amax, partial, t, k, g, self.lines, *self.strides,
            share, grid=(self.programs, self.pieces, 1),
        )  # fmt: skip
        self.amax(
            partial, offs, row_amax, amax, as_bytes(scale), t, self.entries, g, self.lines, share,
            grid=(triton.cdiv(self.entries, self.step), g + self.rest, self.matrices),
        )  # fmt: skip
        return row_amax, amax


class _Tiles:
    """The column layout and, if there is a cast of them, the rows."""

    def __init__(self, job: _Job) -> None:
        row, col, s = job.row, job.col, job.strides
        self.bn, self.job = _tile_width(row, col), job
        # The rows of no group are one more group.
        self.groups = job.groups if row is None else job.groups + 1
        self.launch = Launch(
            group_tile_kernel, None, options=_tile_options(job, self.bn),
            SOURCE=job.source, JOINT=job.joint,
            ROW="none" if row is None else kind(row), COL=kind(col),
            ROW_BLOCK=self.bn if row is None or row.block[1] == FULL else row.block[1],
            COL_BLOCK=GROUP_ALIGN if job.whole else col.block[1],
            ROW_T=row and target(job.device, row), COL_T=target(job.device, col),
            EVEN=job.k % self.bn == 0, GP=triton.next_power_of_2(job.groups),
            BM=GROUP_ALIGN, BN=self.bn,
            NEAR=all(GROUP_ALIGN * s[i] + self.bn * s[i + 1] < 2**31 for i in (0, 2, 4)),
        )  # fmt: skip

    def __call__(
        self,
        inputs: Inputs,
        offs: Tensor,
        rows: Parts | None,
        row_amax: Tensor | None,
        columns: Columns,
        amax: Tensor | None,
    ) -> None:
        (t, k), (data_t, scale_t, offs_t), job = inputs[0].shape, columns, self.job
        data, scale, row_sizes = None, None, (0, 0)
        if job.row is not None:
            assert rows is not None
            data, scale = rows[0], as_bytes(rows[1])
            blocks = k // job.row.block[1] if kind(job.row) == "block" else 0
            row_sizes = _half_stride(scale, blocks, -1), scale.stride(-1)
        if job.whole:
            col_sizes = _half_stride(scale_t, k if kind(job.col) == "vector" else 0, -1), 1, 0
        else:
            half = _half_stride(scale_t, k // job.col.block[0], -2)
            col_sizes = half, scale_t.stride(-2), scale_t.stride(-1)
        tiles = padded_tokens(t, self.groups) // GROUP_ALIGN
        self.launch(
            *inputs, offs, data, scale, row_amax, data_t.view(torch.int32), as_bytes(scale_t), amax,
            offs_t, t, k, data_t.shape[-1], len(offs), *job.strides, *row_sizes, *col_sizes,
            grid=(tiles * triton.cdiv(k, self.bn) * job.halves, 1, 1),
        )  # fmt: skip


def _half_stride(scale: Tensor, blocks: int, dim: int) -> int:
    """From the scales of one half to those of the other: from matrix to matrix of a stack, or, of a
    joint one, over so many blocks along a dimension."""
    return scale.stride(0) if scale.ndim == 3 else blocks * scale.stride(dim)


def _tile_width(row: CastPlan | None, col: CastPlan) -> int:
    """Features of a tile, which has GROUP_ALIGN tokens."""
    blocks = {layout.block[1] for layout in (row, col) if layout is not None}
    return 64 if 32 in blocks and 128 not in blocks else 128


def _tile_options(job: _Job, bn: int) -> dict[str, int]:
    """Eight warps where masks, which every tile has, and inputs, or two layouts of which no amax is
    the tile's, need their registers. Two programs share a multiprocessor where inputs in 16 bits
    come in wide accesses; others would put hundreds of values aside."""
    if not runs_ptx(job.device):
        return {"num_warps": 4}
    if job.source != "plain":
        few = {"maxnreg": 128} if job.dtype.itemsize == 2 and job.k % 16 == 0 else {}
        return {"num_warps": 8, **few}
    if job.row is not None and job.row.block[1] == FULL:
        return {"num_warps": 8}
    # Registers of a block's maxima are capped as in the dense tile_options.
    return {"num_warps": 4, "maxnreg": 168} if bn == 128 and not job.whole else {"num_warps": 4}
