"""Device code of ``float8.kernels.matmul_hopper`` and ``grouped_hopper`` in Gluon, Triton's
language in which layouts, barriers and the roles of warps are written out, and its launch.

Shape letters: M rows of a, N rows of b (of each group's, where groups are of rows of a), K the
contraction, G groups.

A program computes tiles of 128 x BN outputs, one after the other. Three groups of warps run at
once: one producer warp, which moves operands and their scales into a ring of STAGES buffers by TMA,
and two warpgroups, each of which multiplies 64 rows of the tile by all its columns. Of each buffer,
the barrier ``full`` completes when all its bytes have arrived, and ``empty`` when both warpgroups
have read it. All three walk the same tiles in the same order and count the same buffers; nothing
else passes between them. Where there are groups of rows, a list in shared memory says how many
tiles there are up to the end of each, and every warp finds a tile's group in it by itself: empty
groups cost nothing.

Where sums are promoted, the tensor cores add 128 products at a time, in less than float32, and
these partial sums are scaled and added up in float32. Four things keep that fast and free of
spills:

  - a tile's columns are multiplied in two halves, which share the registers of one partial sum;
  - a partial sum is begun with ``use_acc=False`` on the old one, not by writing zeros;
  - scales are read while the tensor cores work;
  - a wait that names the first half's sum keeps ptxas from beginning the second half's products
    before that sum is done. The other warpgroup has work for the tensor cores meanwhile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..formats import format_of
from .launch import Launch, multiprocessors

_SHARED_MEMORY = 227 * 1024 - 512  # of what a program can have; the rest is for barriers


@dataclass(frozen=True)
class Config:
    """What the kernel is compiled for; passed as one constexpr.

    Scales are "outer" (one per row, or one in all, which meets the finished sum), "vector" (one per
    row and 128 of K, rows-major) or "square" (one per 128 rows and 128 of K). Groups are "rows" of
    a, or "columns" of a and b; "none" is one product.
    """

    SCALE_A: str
    SCALE_B: str
    GROUPS: str
    LISTS: int  # of the ends of 128 groups of rows each
    FAST: bool  # sums stay in the tensor cores
    BIAS: bool
    ACCUMULATE: bool  # onto what out holds
    TMA_OUT: bool
    WIDTH: int  # columns that are written at a time, from BUFFERS that take turns
    BUFFERS: int  # of each warpgroup
    STAGES: int
    BN: int = 256
    BK: int = 128
    GROUP: int = 8  # rows of tiles that are finished before the next ones are begun

    @staticmethod
    def of(
        scales: tuple[str, str],
        groups: str,
        count: int,
        fast: bool,
        bias: bool,
        accumulate: bool,
        wide: int,
    ) -> Config:
        """``count``: groups; ``wide``: bytes of an output, 0 where TMA cannot write them."""
        lists = -(-count // 128) if groups == "rows" else 0
        # What is written, and the sums it is made of, must fit beside the other half's sums. (Two
        # buffers of half the columns were slower: TMA then writes 128 bytes of a row.)
        width = 256 // wide if wide else 32
        stage = (128 + Config.BN) * Config.BK
        stage += (scales[0] == "vector") * 128 * 4 + (scales[1] == "vector") * Config.BN * 4
        rest, buffer = _SHARED_MEMORY - lists * 128 * 4, 128 * width * wide
        stages = min(4, (rest - buffer) // stage)
        # A second buffer only where operands leave room: they need theirs more.
        buffers = 2 if stages * stage + 2 * buffer <= rest else 1
        return Config(
            *scales, groups, lists, fast, bias, accumulate, wide > 0, width, buffers, stages
        )


@gluon.constexpr_function
def _sums(columns):
    """The layout of 64 x columns sums in a warpgroup."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32]
    )


@gluon.jit
def _span(offs, g, G, LENGTH):
    """Where groups g begin and end, within LENGTH whatever offs holds; group G is the rest. What
    comes of those after G, which fill up a list, nobody may use."""
    start = gl.load(offs + (g - 1), mask=(g > 0) & (g <= G), other=0)
    end = gl.load(offs + g, mask=g < G, other=LENGTH)
    start = gl.minimum(gl.maximum(start, 0), LENGTH)
    return start, gl.minimum(gl.maximum(end, start), LENGTH)


@gluon.jit
def _top(low, high, P: gl.constexpr):
    """The row that the first tile of a group begins at."""
    top = low
    if P.SCALE_A == "vector":
        # TMA reads scales from multiples of 4 on. The rows before are another group's.
        top = gl.where(high > low, low // 4 * 4, low)
    return top


@gluon.constexpr_function
def _each(warps):
    """A layout of a vector that each warp holds all of."""
    return gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0]))


@gluon.constexpr_function
def _line():
    """A layout of a vector in shared memory, its values one after the other."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.constexpr_function
def _spread():
    """A layout of a vector over four warps."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _list_ends(ends, offs, M, G, across, P: gl.constexpr):
    """For groups of rows, how many tiles there are up to the end of each; behind the last group's
    stands a number that no tile reaches."""
    before = gl.to_tensor(0)
    for i in range(P.LISTS):
        g = i * 128 + gl.arange(0, 128, _spread())
        low, high = _span(offs, g, G, M)
        down = gl.where(g < G, gl.cdiv(high - _top(low, high, P), 128), 0)
        tiles = before + gl.associative_scan(down * across, 0, _add)
        before = gl.max(tiles, 0)
        ends.index(i).store(gl.where(g < G, tiles, 2**31 - 1))


@gluon.jit
def _find(t, ends, P: gl.constexpr, WARPS: gl.constexpr):
    """The group of tile t, and how many tiles are in those before it."""
    g, before = gl.to_tensor(0), gl.to_tensor(0)
    for i in range(P.LISTS):
        end = ends.index(i).load(_each(WARPS))
        past = end <= t
        g += gl.sum(past.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(past, end, 0), 0))
    return g, before


@gluon.jit
def _turns(G, P: gl.constexpr):
    """Groups of columns take turns, one after the other: their tiles have few steps, beside which a
    search in a list takes long. All other tiles are walked in one turn."""
    turns = 1
    if P.GROUPS == "columns":
        turns = G
    return turns


@gluon.jit
def _steps(turn, tiles, offs, K, G, P: gl.constexpr):
    """Of what is multiplied in this turn: its first block of K, how many it has, and its tiles."""
    begin, blocks = 0, gl.cdiv(K, P.BK)
    if P.GROUPS == "columns":
        start, end = _span(offs, turn, G, K)
        begin, blocks = start // P.BK, gl.cdiv(end - start, P.BK)
        if P.ACCUMULATE:  # or zeros would be added
            tiles = gl.where(blocks > 0, tiles, 0)
    return begin, blocks, tiles


@gluon.jit
def _count(ends, offs, M, G, down, across, P: gl.constexpr, WARPS: gl.constexpr):
    """How many tiles a turn has. Behind those of groups of rows are those of rows of no group,
    which come out zero."""
    count = down * across
    if P.GROUPS == "rows":
        low, high = _span(offs, G, G, M)
        _, last = _find(2**31 - 2, ends, P, WARPS)  # behind all groups, before what fills the list
        count = last + gl.cdiv(high - _top(low, high, P), 128) * across
    return count


@gluon.jit
def _tile(t, blocks, ends, offs, M, G, down, across, P: gl.constexpr, WARPS: gl.constexpr):
    """Of tile t: its group of rows; its first row and column; where the group's rows begin and end;
    how many of the turn's blocks of K it has."""
    g, top, low, high = 0, 0, 0, M
    if P.GROUPS == "rows":
        g, before = _find(t, ends, P, WARPS)
        t -= before
        low, high = _span(offs, g, G, M)
        top = _top(low, high, P)
        down = gl.cdiv(high - top, 128)
        blocks = gl.where(g < G, blocks, 0)
    # Tiles go down GROUP rows of tiles, then on to the next column, so that programs share rows and
    # columns in the cache.
    batch, within = t // (P.GROUP * across), t % (P.GROUP * across)
    height = gl.minimum(down - batch * P.GROUP, P.GROUP)
    row = top + (batch * P.GROUP + within % height) * 128
    return g, row, within // height * P.BN, low, high, blocks


@gluon.jit
def _next(stage, phase, P: gl.constexpr):
    """The buffer after this one, and the parity that its barriers' phase has: each turn of the ring
    flips it."""
    last = stage == P.STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _before(stage, P: gl.constexpr):
    """The buffer before this one. (A variable that a loop sets to what another one held, and that
    began as the same value, Triton 3.6 takes for a constant of the loop.)"""
    return gl.where(stage == 0, P.STAGES - 1, stage - 1)


@gluon.jit
def _produce(
    a_desc, b_desc, scale_a_desc, scale_b_desc, a_low, a_high, b, sa_low, sa_high, sb, full, empty,
    ends, offs, M, K, G, down, across, b_g, sa_k, sb_g, sb_k, P: gl.constexpr,
):  # fmt: skip
    """The producer warp: for each tile, for each 128 of K, fill the next buffer."""
    HALF: gl.constexpr = P.BN // 2
    A_SCALES: gl.constexpr = P.SCALE_A == "vector"
    B_SCALES: gl.constexpr = P.SCALE_B == "vector"
    BYTES: gl.constexpr = (128 + P.BN) * P.BK + 4 * (128 * A_SCALES + P.BN * B_SCALES)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    t, tiles = gl.program_id(0), _count(ends, offs, M, G, down, across, P, 1)
    for turn in range(_turns(G, P)):
        begin, blocks, count = _steps(turn, tiles, offs, K, G, P)
        while t < count:
            g, row, column, _, _, own = _tile(t, blocks, ends, offs, M, G, down, across, P, 1)
            for block in range(begin, begin + own):
                k = block * P.BK
                ready = full.index(stage)
                # A new barrier's phase of parity 1 counts as past: the first turn does not wait.
                mbarrier.wait(empty.index(stage), phase ^ 1)
                # What lies outside a matrix arrives as zeros, and is counted.
                mbarrier.expect(ready, BYTES)
                tma.async_copy_global_to_shared(a_desc, [row, k], ready, a_low.index(stage))
                tma.async_copy_global_to_shared(a_desc, [row + 64, k], ready, a_high.index(stage))
                for h in gl.static_range(2):
                    there, part = column + h * HALF, stage * 2 + h
                    at = [g * b_g + there, k]
                    tma.async_copy_global_to_shared(b_desc, at, ready, b.index(part))
                    if B_SCALES:
                        at = [g * sb_g + block * sb_k + there]
                        tma.async_copy_global_to_shared(scale_b_desc, at, ready, sb.index(part))
                if A_SCALES:
                    at = block * sa_k + row
                    lower, upper = sa_low.index(stage), sa_high.index(stage)
                    tma.async_copy_global_to_shared(scale_a_desc, [at], ready, lower)
                    tma.async_copy_global_to_shared(scale_a_desc, [at + 64], ready, upper)
                stage, phase = _next(stage, phase, P)
            t += gl.num_programs(0)
        t -= count  # the next turn's are counted from its first


@gluon.jit
def _begin(a, b, old):
    """Begin a @ b.T; ``old`` lends its registers."""
    return warpgroup_mma(a, b.permute((1, 0)), old, use_acc=False, is_async=True)


@gluon.jit
def _promote(total, partial, row_scale, column_scale, P: gl.constexpr):
    """total + partial, scaled with what belongs to these 128 of K."""
    if P.SCALE_A == "outer":
        total += partial
    elif P.SCALE_A == "vector" and P.SCALE_B == "vector":
        total += partial * (row_scale[:, None] * column_scale[None, :])
    elif P.SCALE_A == "vector":
        total += partial * (row_scale * column_scale)[:, None]
    else:
        total += partial * (row_scale * column_scale)[None, :]
    return total


@gluon.constexpr_function
def _vector(element):
    """Elements in 16 bytes."""
    return 128 // element.primitive_bitwidth


@gluon.constexpr_function
def _lines(columns, element):
    """A layout of 64 x columns in which a warpgroup writes rows 16 bytes at a time."""
    across = columns // _vector(element)
    return gl.BlockedLayout([1, _vector(element)], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _inside(rows, columns, low, high, N, P: gl.constexpr):
    inside = rows < high
    if P.GROUPS == "rows":
        inside = inside & (rows >= low)
    return inside[:, None] & (columns < N)[None, :]


@gluon.jit
def _put(at, values, mask, P: gl.constexpr):
    if P.ACCUMULATE and (P.TMA_OUT or values.dtype == gl.float32):
        # The memory adds, 16 bytes at once where they lie so: no warp waits for what was there.
        # (To each value one tile adds, once: the same bits in every run.)
        gl.atomic_add(at, values, mask=mask, sem="relaxed")
    else:
        if P.ACCUMULATE:
            values += gl.load(at, mask=mask, other=0.0)
        gl.store(at, values, mask=mask)


@gluon.jit
def _write_part(
    out, buffer, row, column, low, high, shift, N, out_m, COLUMNS: gl.constexpr, P: gl.constexpr
):
    """Write what the buffer holds of rows from low to high: next to them lie another group's."""
    R: gl.constexpr = _lines(COLUMNS, out.dtype.element_ty)
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, R))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, R))
    # As TMA has it, rows are on 16 bytes, and as long.
    VECTOR: gl.constexpr = _vector(out.dtype.element_ty)
    pitch, end = out_m // VECTOR * VECTOR, N // VECTOR * VECTOR
    at = out + ((rows + shift)[:, None].to(gl.int64) * pitch + columns[None, :])
    at = gl.multiple_of(at, [1, 16])
    _put(at, buffer.load(R), _inside(rows, columns, low, high, end, P), P)


@gluon.jit
def _store(
    total, out_desc, out, buffers, scale_a, scale_b, bias, row, column, low, high, shift, live, N,
    sa_m, sb_n, out_m, COLUMNS: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Finish 64 x COLUMNS sums and write them at (row, column), WIDTH columns at a time: rows from
    low to high, ``shift`` rows further down in the output. Sums that are not ``live`` are zero, and
    have no scales."""
    L: gl.constexpr = _sums(COLUMNS)
    if COLUMNS > P.WIDTH:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = gl.split(gl.permute(gl.reshape(total, [64, 2, HALF]), (0, 2, 1)))
        # No value moves to another thread.
        left = gl.convert_layout(left, _sums(HALF), assert_trivial=True)
        right = gl.convert_layout(right, _sums(HALF), assert_trivial=True)
        _store(
            left, out_desc, out, buffers, scale_a, scale_b, bias, row, column, low, high, shift,
            live, N, sa_m, sb_n, out_m, HALF, P,
        )  # fmt: skip
        _store(
            right, out_desc, out, buffers, scale_a, scale_b, bias, row, column + HALF, low, high,
            shift, live, N, sa_m, sb_n, out_m, HALF, P,
        )  # fmt: skip
    else:
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, L))
        columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
        if P.SCALE_A == "outer":
            # One after the other: the product of two tiny scales may be zero.
            row_scale = gl.load(scale_a + rows * sa_m, mask=(rows < high) & live, other=0.0)
            column_scale = gl.load(scale_b + columns * sb_n, mask=(columns < N) & live, other=0.0)
            total = (total * row_scale[:, None]) * column_scale[None, :]
        if P.BIAS:
            total += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        rounded = total.to(out.dtype.element_ty)
        if P.TMA_OUT:
            part = buffers.index(column // COLUMNS % P.BUFFERS)
            tma.store_wait(P.BUFFERS - 1)  # what this buffer held has been read
            part.store(rounded)
            if not P.ACCUMULATE and ((P.GROUPS == "none") or ((row >= low) & (row + 64 <= high))):
                fence_async_shared()
                tma.async_copy_shared_to_global(out_desc, [row + shift, column], part)
            else:
                _write_part(out, part, row, column, low, high, shift, N, out_m, COLUMNS, P)
                if P.BUFFERS == 2:  # or one may still be read when its turn comes again
                    tma.store_wait(0)
        else:
            at = out + ((rows + shift)[:, None].to(gl.int64) * out_m + columns[None, :])
            _put(at, rounded, _inside(rows, columns, low, high, N, P), P)


@gluon.jit
def _consume(
    out_desc, out, buffers, scale_a, scale_b, bias, a, b, sa, sb, full, empty, ends, offs,
    M, N, K, G, down, across, sa_g, sa_m, sa_k, sb_g, sb_n, sb_k, out_m,
    FIRST_ROW: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows of each tile, from FIRST_ROW on."""
    HALF: gl.constexpr = P.BN // 2
    L: gl.constexpr = _sums(HALF)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    t, tiles = gl.program_id(0), _count(ends, offs, M, G, down, across, P, 4)
    for turn in range(_turns(G, P)):
        begin, blocks, count = _steps(turn, tiles, offs, K, G, P)
        while t < count:
            g, row, column, low, high, own = _tile(t, blocks, ends, offs, M, G, down, across, P, 4)
            row += FIRST_ROW
            shift, live = 0, True
            if P.GROUPS == "columns":
                g, shift = turn, turn * M
            if P.GROUPS != "none":
                live = own > 0
            own_a, own_b = scale_a + g * sa_g, scale_b + g * sb_g
            left = gl.zeros([64, HALF], gl.float32, L)
            right = gl.zeros([64, HALF], gl.float32, L)
            if P.FAST:
                for block in range(own):
                    mbarrier.wait(full.index(stage), phase)
                    b_left = b.index(stage * 2).permute((1, 0))
                    left = warpgroup_mma(a.index(stage), b_left, left, is_async=True)
                    b_right = b.index(stage * 2 + 1).permute((1, 0))
                    right = warpgroup_mma(a.index(stage), b_right, right, is_async=True)
                    left, right = warpgroup_mma_wait(2, deps=[left, right])
                    # The products of this buffer run; those of the one before are done.
                    mbarrier.arrive(empty.index(_before(stage, P)), count=1, pred=block > 0)
                    stage, phase = _next(stage, phase, P)
                left, right = warpgroup_mma_wait(0, deps=[left, right])
                mbarrier.arrive(empty.index(_before(stage, P)), count=1, pred=live)
            else:
                partial = gl.zeros([64, HALF], gl.float32, L)
                square_a = own_a + row // 128 * sa_m
                square_left = own_b + column // 128 * sb_n
                # The right half may lie beyond the last block of b.
                square_right = own_b + gl.minimum(column // 128 + 1, (N - 1) // 128) * sb_n
                for block in range(begin, begin + own):
                    row_scale, left_scale, right_scale = 1.0, 1.0, 1.0
                    if P.SCALE_A == "square":
                        row_scale = gl.load(square_a + block * sa_k)
                    if P.SCALE_B == "square":
                        left_scale = gl.load(square_left + block * sb_k)
                        right_scale = gl.load(square_right + block * sb_k)
                    mbarrier.wait(full.index(stage), phase)
                    partial = _begin(a.index(stage), b.index(stage * 2), partial)
                    if P.SCALE_A == "vector":
                        row_scale = sa.index(stage).load(gl.SliceLayout(1, L))
                    if P.SCALE_B == "vector":
                        left_scale = sb.index(stage * 2).load(gl.SliceLayout(0, L))
                    partial = warpgroup_mma_wait(0, deps=[partial])
                    left = _promote(left, partial, row_scale, left_scale, P)
                    left = warpgroup_mma_wait(0, deps=[left])
                    partial = _begin(a.index(stage), b.index(stage * 2 + 1), partial)
                    if P.SCALE_B == "vector":
                        right_scale = sb.index(stage * 2 + 1).load(gl.SliceLayout(0, L))
                    partial = warpgroup_mma_wait(0, deps=[partial])
                    mbarrier.arrive(empty.index(stage), count=1)
                    right = _promote(right, partial, row_scale, right_scale, P)
                    stage, phase = _next(stage, phase, P)
            _store(
                left, out_desc, out, buffers, own_a, own_b, bias, row, column, low, high, shift,
                live, N, sa_m, sb_n, out_m, HALF, P,
            )  # fmt: skip
            _store(
                right, out_desc, out, buffers, own_a, own_b, bias, row, column + HALF, low, high,
                shift, live, N, sa_m, sb_n, out_m, HALF, P,
            )  # fmt: skip
            t += gl.num_programs(0)
        t -= count  # the next turn's are counted from its first
    if P.TMA_OUT:
        tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "M", "N", "K", "G", "down", "across", "b_g", "sa_g", "sa_m", "sa_k", "sb_g", "sb_n",
        "sb_k", "out_m",
    ],
    do_not_specialize_on_alignment=["scale_a", "scale_b", "bias", "out", "offs"],
)  # fmt: skip
def matmul_kernel(
    a_desc, b_desc, scale_a_desc, scale_b_desc, out_desc, scale_a, scale_b, bias, out, offs,
    M, N, K, G, down, across, b_g, sa_g, sa_m, sa_k, sb_g, sb_n, sb_k, out_m, P: gl.constexpr,
):  # fmt: skip
    """out [M, N] = (a [M, K] * scale_a) @ (b [N, K] * scale_b).T, plus bias [N] if P says so,
    rounded; then added to what out holds if P says so. With groups of rows that is true of the rows
    of a and out that end at offs[g] and rows g * b_g to g * b_g + N of b; rows of no group are
    written as zeros. With groups of columns, which end at offs[g] and begin at multiples of BK,
    group g's product is out[g] of [G, M, N].

    ``down`` and ``across`` are the tiles of M x N.

    The scale of group g, row m and block i of K stands at scale_a + g * sa_g + m * sa_m + i * sa_k,
    that of a square block at ... + m // 128 * sa_m + i * sa_k; b's likewise. Rows of a, and blocks
    of groups of columns, are counted from the first group's on. Vector scales are read through
    descriptors of all their memory. Descriptors that P does not call for are None.
    """
    STAGES: gl.constexpr = P.STAGES
    PARTS: gl.constexpr = P.STAGES * 2
    HALF: gl.constexpr = P.BN // 2
    a_low = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 64, P.BK], a_desc.layout)
    a_high = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 64, P.BK], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [PARTS, HALF, P.BK], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sa_low, sa_high, sb, out_low, out_high, ends = None, None, None, None, None, None
    if P.SCALE_A == "vector":
        sa_low = gl.allocate_shared_memory(gl.float32, [STAGES, 64], scale_a_desc.layout)
        sa_high = gl.allocate_shared_memory(gl.float32, [STAGES, 64], scale_a_desc.layout)
    if P.SCALE_B == "vector":
        sb = gl.allocate_shared_memory(gl.float32, [PARTS, HALF], scale_b_desc.layout)
    if P.TMA_OUT:
        out_low = gl.allocate_shared_memory(
            out_desc.dtype, [P.BUFFERS, 64, P.WIDTH], out_desc.layout
        )
        out_high = gl.allocate_shared_memory(
            out_desc.dtype, [P.BUFFERS, 64, P.WIDTH], out_desc.layout
        )
    if P.GROUPS == "rows":
        ends = gl.allocate_shared_memory(gl.int32, [P.LISTS, 128], _line())
        _list_ends(ends, offs, M, G, across, P)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)  # the producer
        mbarrier.init(empty.index(i), count=2)  # both warpgroups
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                out_desc, out, out_low, scale_a, scale_b, bias, a_low, b, sa_low, sb, full, empty,
                ends, offs, M, N, K, G, down, across, sa_g, sa_m, sa_k, sb_g, sb_n, sb_k, out_m,
                0, P,
            )),
            (_consume, (
                out_desc, out, out_high, scale_a, scale_b, bias, a_high, b, sa_high, sb, full,
                empty, ends, offs, M, N, K, G, down, across, sa_g, sa_m, sa_k, sb_g, sb_n, sb_k,
                out_m, 64, P,
            )),
            (_produce, (
                a_desc, b_desc, scale_a_desc, scale_b_desc, a_low, a_high, b, sa_low, sa_high, sb,
                full, empty, ends, offs, M, K, G, down, across, b_g, sa_k, sb_g, sb_k, P,
            )),
        ],
        [4, 1],
        [30 * 8, 3 * 8],  # registers of a thread, which come in eights
    )  # fmt: skip


class Groups(NamedTuple):
    """What one launch multiplies groups of."""

    kind: str  # as in Config
    offs: Tensor  # int32, where each group ends
    b_rows: int  # from a group's first row of b to the next one's


def multiply(
    a_MK: Tensor,
    b_NK: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    scales: tuple[str, str],
    fast_accum: bool,
    bias: Tensor | None,
    out: Tensor,
    accumulate: bool,
    groups: Groups | None = None,
) -> None:
    """Write, or add, the product to out. ``scales``: how each operand's lie (``Config``); a scale
    of [groups, rows, blocks] is each group's own. b and out hold the rows of all groups.
    ``fast_accum``: leave whole sums to the tensor cores, where no scale meets them before."""
    scale_a, *strides_a = _scale(scale_a, scales[0])
    scale_b, *strides_b = _scale(scale_b, scales[1])
    pitches = _pitch(a_MK), _pitch(b_NK), _pitch(out)
    size = out.element_size()
    # TMA writes whole 16 bytes: of a shorter end of a row it overwrites what lies behind.
    wide = 0 if (pitches[2] * size | out.shape[1] * size | out.data_ptr()) % 16 else size
    bias_dtype = None if bias is None else bias.dtype
    kind, offs, count, b_rows = "none", None, 1, 0
    if groups is not None:
        kind, offs, count, b_rows = groups.kind, groups.offs, len(groups.offs), groups.b_rows
    run = _product(
        (a_MK.shape[0], out.shape[1], a_MK.shape[1], count, b_rows), pitches,
        (*strides_a, *strides_b), scales, kind, fast_accum and scales[0] == "outer", accumulate,
        wide,
        (a_MK.dtype, b_NK.dtype, out.dtype, bias_dtype), a_MK.device,
    )  # fmt: skip
    run(a_MK, b_NK, scale_a, scale_b, bias, out, offs)


def _pitch(x: Tensor) -> int:
    """Elements from row to row; a single row may have any stride."""
    rows, columns = x.shape
    return x.stride(0) if rows > 1 else columns + -columns % 16


def _scale(scale: Tensor, kind: str) -> tuple[Tensor, int, int, int]:
    """A scale as the kernel reads it, and its strides from group to group, row to row and block to
    block; a copy where TMA cannot read vectors as they lie, which is where their number is no
    multiple of 4."""
    *lead, rows, blocks = scale.shape
    group = scale.stride(0) if lead else 0
    if kind == "outer":
        return scale, group, 0 if rows == 1 else scale.stride(-2), 0
    if kind == "square":
        return scale, group, scale.stride(-2), scale.stride(-1)
    step = scale.stride(-1) if blocks > 1 else 0
    if (rows > 1 and scale.stride(-2) != 1) or (step | group) % 4 or scale.data_ptr() % 16:
        step = rows + -rows % 4
        group = blocks * step if lead else 0
        scale = scale.new_empty(*lead, blocks, step).mT[..., :rows, :].copy_(scale)
    return scale, group, 1, step


class _Product:
    """The launch for operands of one geometry."""

    def __init__(
        self,
        sizes: tuple[int, int, int, int, int],
        pitches: tuple[int, int, int],
        scale_strides: tuple[int, int, int, int, int, int],
        config: Config,
        dtypes: tuple[torch.dtype, ...],
        device: torch.device,
    ) -> None:
        (m, n, k, count, b_rows), (a_m, b_n, out_m) = sizes, pitches
        _, _, sa_k, sb_g, _, sb_k = scale_strides
        half, blocks = config.BN // 2, -(-k // 128)
        rows_b, rows_out = (count - 1) * b_rows + n, count * m if config.GROUPS == "columns" else m
        # A vector scale is one row: all of its memory, from the first element to the last.
        self.windows = (
            _Window((m, k), (a_m, 1), (64, config.BK), dtypes[0]),
            _Window((rows_b, k), (b_n, 1), (half, config.BK), dtypes[1]),
            _Window(((blocks - 1) * sa_k + m,), (1,), (64,), torch.float32)
            if config.SCALE_A == "vector" else None,
            _Window(((count - 1) * sb_g + (blocks - 1) * sb_k + n,), (1,), (half,), torch.float32)
            if config.SCALE_B == "vector" else None,
            _Window((rows_out, n), (out_m, 1), (64, config.WIDTH), dtypes[2])
            if config.TMA_OUT else None,
        )  # fmt: skip
        # Of groups of rows there may be fewer tiles; more would not be known without waiting.
        down, across = -(-m // 128), -(-n // config.BN)
        most = {"none": down, "rows": down + count, "columns": down * count}[config.GROUPS]
        programs = most * across
        if device.type == "cuda":
            programs = min(programs, multiprocessors(device))
        self.launch = Launch(
            matmul_kernel, (programs, 1, 1), m, n, k, count, down, across, b_rows, *scale_strides,
            out_m,
            options={"num_warps": 4}, P=config,
        )  # fmt: skip

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None,
        out: Tensor,
        offs: Tensor | None,
    ) -> None:
        tensors = (a, b, scale_a, scale_b, out)
        seen: list[Any] = [w and w.over(x) for w, x in zip(self.windows, tensors, strict=True)]
        self.launch(*seen, scale_a, scale_b, bias, out, offs)


@functools.lru_cache(maxsize=1024)
def _product(
    sizes: tuple[int, int, int, int, int],
    pitches: tuple[int, int, int],
    scale_strides: tuple[int, int, int, int, int, int],
    scales: tuple[str, str],
    groups: str,
    fast: bool,
    accumulate: bool,
    wide: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> _Product:
    """``dtypes``: of a, b, out and bias. The launch does not ask for all, but Triton compiles for
    each of them."""
    config = Config.of(scales, groups, sizes[3], fast, dtypes[3] is not None, accumulate, wide)
    return _Product(sizes, pitches, scale_strides, config, dtypes, device)


class _Window:
    """What TMA sees of tensors of one geometry. A descriptor's constructor checks what is the same
    for all of them, at a cost for the host; so one is made, and copies of it."""

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        block: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.shape, self.strides, self.block = list(shape), list(strides), list(block)
        self.layout = _layout(block, dtype)
        self.checked: dict[str, Any] | None = None

    def over(self, x: Tensor) -> Any:
        if self.checked is None:
            first = TensorDescriptor(x, self.shape, self.strides, self.block, self.layout)
            self.checked = {**vars(first), "base": None}
        descriptor = object.__new__(TensorDescriptor)
        vars(descriptor).update(self.checked, base=x)
        return descriptor


def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """How TMA lays out a block in shared memory."""
    if len(block) == 1:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    others = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    element = others.get(dtype) or getattr(gl, format_of(dtype).triton)
    return gl.NVMMASharedLayout.get_default_for(list(block), element)
