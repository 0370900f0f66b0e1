"""Triton kernels of ``float8.kernels.permute``; letters as there.

Routing is a counting sort in three launches: a block of pairs ranks its pairs among those of the
same expert and counts the experts', each expert adds up its blocks', and a block of pairs knows
its rows. Ranks are numbers of earlier equals, so the order is stable, and nothing is atomic.

``permute`` goes by tokens: a row is read and cast once, and written k times. Blocks of rows that
hold nothing are found in ``source`` by the same programs, and zeroed.

Kernels are compiled for any number of tokens and rows.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..devices import device_profile
from ..scaling import as_bytes
from .cast_triton import amax_bits, convert, store_scale, to_magnitude, to_scale
from .launch import Launch, kind, multiprocessors, row_loop, row_stages, target
from .quantize import CastPlan

_BLOCK = 256  # pairs that are ranked together: each with each, so no more of them
_STEP = 1024  # blocks that are added up at once
_COMPARED = tl.constexpr(32)  # of them at once, or registers would not hold it
_LONGEST_PADDING = tl.constexpr(128)  # a power of two no less than any alignment
_SCANNED = tl.constexpr(32)  # entries of source whose rows one program zeroes
_AHEAD = tl.constexpr(16)  # times as many are looked through at once


# ---------------------------------------------------------------------------------------- routing


@triton.jit
def experts_of(indices, i, N, E):
    """Experts of pairs i, E for none."""
    e = tl.load(indices + i, mask=i < N, other=-1)
    return tl.where((e >= 0) & (e < E), e, E).to(tl.int32)


@triton.jit(do_not_specialize=["indices", "N", "blocks"])
def rank_kernel(indices, rank, held, N, blocks, E, BLOCK: tl.constexpr, EP: tl.constexpr):
    """Pairs of one block: how many before each are of its expert, to rank [N], and how many each
    expert has, to held [E, blocks]."""
    b = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    i = b * BLOCK + j
    e = experts_of(indices, i, N, E)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, BLOCK, _COMPARED):
        other = first + tl.arange(0, _COMPARED)
        equal = e[:, None] == experts_of(indices, b * BLOCK + other, N, E)[None, :]
        before += tl.sum((equal & (other[None, :] < j[:, None])).to(tl.int32), 1)
    tl.store(rank + i, before, mask=i < N)
    g = tl.arange(0, EP)
    tl.store(held + g.to(tl.int64) * blocks + b, tl.histogram(e, EP), mask=g < E)


@triton.jit(do_not_specialize=["blocks"])
def scan_kernel(held, totals, blocks, STEP: tl.constexpr):
    """Counts of one expert to what the blocks before have of it, and their total."""
    line = held + tl.program_id(0).to(tl.int64) * blocks
    before = tl.zeros([], tl.int32)
    for first in range(0, blocks, STEP):
        b = first + tl.arange(0, STEP)
        count = tl.load(line + b, mask=b < blocks, other=0)
        tl.store(line + b, before + tl.cumsum(count, 0) - count, mask=b < blocks)
        before += tl.sum(count, 0)
    tl.store(totals + tl.program_id(0), before)


@triton.jit(do_not_specialize=["indices", "N", "R", "blocks"])
def place_kernel(
    indices, position, held, totals, source, offs, N, R, blocks, E,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """Program p gives the pairs of block p, whose ranks ``position`` holds, their rows, and says
    that nothing is in the padding of expert p and in block p of the rows, as far as they are past
    the last expert's."""
    p = tl.program_id(0)
    g = tl.arange(0, EP)
    total = tl.load(totals + g, mask=g < E, other=0)
    room = (total + (ALIGN - 1)) // ALIGN * ALIGN
    ends = tl.cumsum(room, 0)
    starts = ends - room
    if p == 0:
        tl.store(offs + g, ends, mask=g < E)

    i = p * BLOCK + tl.arange(0, BLOCK)
    e = experts_of(indices, i, N, E)
    there = e < E
    row = tl.gather(starts, e, 0) + tl.load(position + i, mask=there, other=0)
    row += tl.load(held + e.to(tl.int64) * blocks + p, mask=there, other=0)
    tl.store(position + i, tl.where(there, row, -1), mask=i < N)
    tl.store(source + row, i, mask=there)

    tl.store(source + i, tl.full([BLOCK], -1, tl.int32), mask=(i >= tl.max(ends, 0)) & (i < R))
    if ALIGN > 1:
        first = tl.sum(tl.where(g == p, starts + total, 0), 0)
        end = tl.sum(tl.where(g == p, ends, 0), 0)
        r = first + tl.arange(0, _LONGEST_PADDING)
        tl.store(source + r, tl.full([_LONGEST_PADDING], -1, tl.int32), mask=r < end)


def launch_route(
    indices: Tensor, align: int, position: Tensor, source: Tensor, offs: Tensor, totals: Tensor
) -> None:
    """All outputs of ``route`` for indices [T, k]."""
    pairs, experts, rows = indices.numel(), len(offs), len(source)
    blocks = max(1, triton.cdiv(pairs, _BLOCK))
    held = indices.new_empty((experts, blocks), dtype=torch.int32)
    rank, scan, place = _route(experts, align, indices.dtype, indices.device)
    indices = indices.contiguous()
    rank(indices, position, held, pairs, blocks, grid=(blocks, 1, 1))
    scan(held, totals, blocks, grid=(experts, 1, 1))
    place(
        indices, position, held, totals, source, offs, pairs, rows, blocks,
        grid=(max(experts, blocks, triton.cdiv(rows, _BLOCK)), 1, 1),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _route(
    experts: int, align: int, dtype: torch.dtype, device: torch.device
) -> tuple[Launch, Launch, Launch]:
    # One more than there are, for none.
    sizes = {"BLOCK": _BLOCK, "EP": triton.next_power_of_2(experts + 1)}
    few, many = {"num_warps": 4}, {"num_warps": 8}
    return (
        Launch(rank_kernel, None, experts, options=many, **sizes),
        Launch(scan_kernel, None, options=few, STEP=_STEP),
        Launch(place_kernel, None, experts, options=few, ALIGN=align, **sizes),
    )


# ------------------------------------------------------------------------------------- to experts


@triton.jit
def zero_block(
    rows, scale, source, first, R, H, first_column, scale_r, scale_b,
    T: tl.constexpr, PER_ROW: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``zero_rows`` of _SCANNED rows."""
    r = first + tl.arange(0, _SCANNED)
    nothing = tl.load(source + r, mask=r < R, other=0) < 0
    if tl.max(nothing.to(tl.int32), 0) > 0:
        if T is not None:
            if PER_ROW:
                s, _, _ = to_scale(tl.zeros([_SCANNED], tl.int32), T)
                store_scale(scale + r, s, nothing)
            else:
                b = first_column // BLOCK + tl.arange(0, BN // BLOCK)
                s, _, _ = to_scale(tl.zeros([BN // BLOCK, _SCANNED], tl.int32), T)
                to = r.to(tl.int64)[None, :] * scale_r + b.to(tl.int64)[:, None] * scale_b
                store_scale(scale + to, s, nothing[None, :] & (b * BLOCK < H)[:, None])
        c = first_column + tl.arange(0, BN)
        ROWS: tl.constexpr = 16384 // BN if BN > 512 else 32  # of 64 KB at most at once
        for few in range(first, first + _SCANNED, ROWS):
            row = few + tl.arange(0, ROWS)
            empty = tl.load(source + row, mask=row < R, other=0) < 0
            tl.store(
                rows + row.to(tl.int64)[:, None] * H + c[None, :],
                tl.zeros([ROWS, BN], tl.float32).to(rows.dtype.element_ty),
                mask=empty[:, None] & (c < H)[None, :],
                eviction_policy="evict_first",
            )


@triton.jit
def zero_rows(
    rows, scale, source, R, H, p, programs, first_column, scale_r, scale_b,
    T: tl.constexpr, PER_ROW: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns ``first_column`` to BN of the rows that hold nothing, of every block of rows whose
    number is p modulo ``programs``; with T, their scales as of zero blocks: one for a row, PER_ROW,
    or one for BLOCK columns."""
    step = programs * _SCANNED
    for first in range(p * _SCANNED, R, step * _AHEAD):
        ahead = first + tl.arange(0, _AHEAD)[:, None] * step + tl.arange(0, _SCANNED)[None, :]
        held = tl.load(source + ahead, mask=ahead < R, other=0)
        if tl.min(tl.min(held, 1), 0) < 0:
            for block in range(first, tl.minimum(first + step * _AHEAD, R), step):
                zero_block(
                    rows, scale, source, block, R, H, first_column, scale_r, scale_b,
                    T, PER_ROW, BN, BLOCK,
                )  # fmt: skip


# Tokens and rows differ from step to step, and what route gives may be a part of a table: no
# variant of a kernel is made for multiples of 16.
@triton.jit(do_not_specialize=["position", "source", "N", "R", "scale_r", "scale_b"])
def permute_kernel(
    x, rows, scale, position, source, N, R, scale_r, scale_b, H, stride_t,
    K: tl.constexpr, T: tl.constexpr, PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BN columns of tokens p, p + programs, ... of N, to the K rows of each; with T, cast, with a
    scale for the row, PER_ROW, or one for each BLOCK columns."""
    p, programs = tl.program_id(0), tl.num_programs(0)
    left = tl.program_id(1) * BN
    zero_rows(rows, scale, source, R, H, p, programs, left, scale_r, scale_b, T, PER_ROW, BN, BLOCK)
    c = left + tl.arange(0, BN)
    inside = c < H
    b = left // BLOCK + tl.arange(0, BN // BLOCK)
    for t in tl.range(p, N, programs, num_stages=STAGES):
        token = tl.cast(t, tl.int64)
        v = tl.load(x + token * stride_t + c, mask=inside, other=0.0)
        if T is None:
            q = v
        else:
            m = to_magnitude(v.to(tl.float32), T)
            if PER_ROW:
                s, inverse, live = to_scale(amax_bits(m, 0), T)
                q = tl.where(live != 0, v.to(tl.float32) * inverse, 0.0)
            else:
                s, inverse, live = to_scale(amax_bits(tl.reshape(m, [BN // BLOCK, BLOCK]), 1), T)
                w = tl.reshape(v.to(tl.float32), [BN // BLOCK, BLOCK])
                q = tl.reshape(tl.where(live[:, None] != 0, w * inverse[:, None], 0.0), [BN])
            q = convert(q, T)
        for j in tl.static_range(K):
            to = tl.load(position + token * K + j)
            there = (to >= 0) & (to < R)
            row = to.to(tl.int64)
            tl.store(rows + row * H + c, q, mask=inside & there, eviction_policy="evict_first")
            if T is not None:
                if PER_ROW:
                    store_scale(scale + row, s, there)
                else:
                    into = scale + row * scale_r + b.to(tl.int64) * scale_b
                    store_scale(into, s, there & (b * BLOCK < H))


def launch_permute(
    x: Tensor,
    position: Tensor,
    source: Tensor,
    rows: Tensor,
    scale: Tensor | None = None,
    cast: CastPlan | None = None,
) -> None:
    """``permute`` of x [T, H], and its cast if there is one, into rows and scale, not empty."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, features), k = x.shape, position.shape[1]
    launch, programs, pieces = _permute(
        features, x.stride(0), x.dtype, x.device, x.data_ptr() % 16 == 0, k, cast
    )
    strides = (0, 0) if scale is None else scale.stride()
    launch(
        x, rows, None if scale is None else as_bytes(scale),
        position.contiguous(), source.contiguous(), tokens, len(source), *strides,
        grid=(programs, pieces, 1),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _permute(
    features: int,
    stride: int,
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
    k: int,
    cast: CastPlan | None,
) -> tuple[Launch, int, int]:
    """The launch for any number of tokens, its programs, and the pieces that they take of a row.
    Alignment is not asked for, but Triton specialises on it."""
    padded, processors = max(128, triton.next_power_of_2(features)), multiprocessors(device)
    whole = cast is not None and kind(cast) == "vector"
    if whole:
        width = padded
        warps, together, stages = row_loop(device, width, dtype.itemsize)
    else:
        width, itemsize = min(1024, padded), 1 if cast is not None else dtype.itemsize
        warps = warps_that_write(width * itemsize, device)
        together = 32 // warps
        stages = row_stages(device, together * width * dtype.itemsize, 3)
    pieces = triton.cdiv(features, width)
    programs = max(1, processors * together // pieces)
    launch = Launch(
        permute_kernel, None, features, stride, options={"num_warps": warps},
        K=k, T=cast and target(device, cast), PER_ROW=whole,
        BLOCK=width if cast is None or whole else cast.block[1], BN=width,
        STAGES=stages,
    )  # fmt: skip
    return launch, programs, pieces


def warps_that_write(row_bytes: int, device: torch.device) -> int:
    """So many that each thread has 16 bytes of a piece of a row."""
    return max(1, row_bytes // (16 * max(16, device_profile(device).wavefront)))


# --------------------------------------------------------------------------------------- and back


@triton.jit(do_not_specialize=["position", "weights", "R"])
def unpermute_kernel(y, position, weights, out, R, H, stride_r, K: tl.constexpr, BN: tl.constexpr):
    """BN columns of one token's sum over its K rows."""
    pieces = tl.cdiv(H, BN)
    token = (tl.program_id(0) // pieces).to(tl.int64)
    c = tl.program_id(0) % pieces * BN + tl.arange(0, BN)
    inside = c < H
    total = tl.zeros([BN], tl.float32)
    for j in tl.static_range(K):
        row = tl.load(position + token * K + j)
        there = (row >= 0) & (row < R)
        v = tl.load(
            y + row.to(tl.int64) * stride_r + c,
            mask=inside & there,
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        if weights is not None:
            v *= tl.load(weights + token * K + j, mask=there, other=0.0).to(tl.float32)
        total += v
    tl.store(out + token * H + c, total.to(out.dtype.element_ty), mask=inside)


def launch_unpermute(y: Tensor, position: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """``unpermute`` of y [R, H] into out, not empty."""
    y = y if y.stride(1) == 1 else y.contiguous()
    of_weights = None if weights is None else weights.dtype
    launch, pieces = _unpermute(
        y.shape[1], y.stride(0), y.dtype, y.device, y.data_ptr() % 16 == 0, position.shape[1],
        of_weights,
    )  # fmt: skip
    launch(
        y, position.contiguous(), None if weights is None else weights.contiguous(), out,
        len(y), grid=(len(position) * pieces, 1, 1),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _unpermute(
    features: int,
    stride: int,
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
    k: int,
    of_weights: torch.dtype | None,
) -> tuple[Launch, int]:
    """The launch for any number of tokens, and the pieces of a row."""
    width = min(1024, max(128, triton.next_power_of_2(features)))
    warps = warps_that_write(width * dtype.itemsize, device)
    launch = Launch(
        unpermute_kernel, None, features, stride,
        # Products and sums are rounded one by one, as the reference's are.
        options={"num_warps": warps, "enable_fp_fusion": False}, K=k, BN=width,
    )  # fmt: skip
    return launch, triton.cdiv(features, width)


@triton.jit(do_not_specialize=["position", "source", "weights", "R"])
def unpermute_backward_kernel(
    grad, y, position, source, weights, grad_y, grad_w, R, H, stride_t, stride_r,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token's gradient, times its weights, to its K rows of grad_y, and its products with these
    rows of y, summed, to grad_w."""
    p = tl.program_id(0)
    for left in range(0, H, BN):
        zero_rows(
            grad_y, None, source, R, H, p, tl.num_programs(0), left, 0, 0, None, False, BN, BN
        )
    token = p.to(tl.int64)
    j = tl.arange(0, KP)
    row = tl.load(position + token * K + j, mask=j < K, other=-1)
    there = (row >= 0) & (row < R)
    weight = tl.load(weights + token * K + j, mask=there, other=0.0).to(tl.float32)
    row = row.to(tl.int64)[:, None]
    products = tl.zeros([KP, BN], tl.float32)
    for left in tl.range(0, H, BN, num_stages=STAGES):
        c = left + tl.arange(0, BN)
        mask = there[:, None] & (c < H)[None, :]
        g = tl.load(grad + token * stride_t + c, mask=c < H, other=0.0).to(tl.float32)[None, :]
        if y is not None:
            v = tl.load(
                y + row * stride_r + c[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
            )
            # Without a row there is nothing to multiply, not even a gradient that is no number.
            products += tl.where(there[:, None], v.to(tl.float32) * g, 0.0)
        tl.store(
            grad_y + row * H + c[None, :],
            (weight[:, None] * g).to(grad_y.dtype.element_ty),
            mask=mask,
            eviction_policy="evict_first",
        )
    if y is not None:
        tl.store(grad_w + token * K + j, tl.sum(products, 1), mask=j < K)


def launch_unpermute_backward(
    grad: Tensor,
    y: Tensor | None,
    position: Tensor,
    source: Tensor,
    weights: Tensor,
    grad_y: Tensor,
    grad_w: Tensor,
) -> None:
    """Both gradients, or that of y alone if there is no y; not empty."""
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    y = y if y is None or y.stride(1) == 1 else y.contiguous()
    aligned = grad.data_ptr() % 16 == 0, y is None or y.data_ptr() % 16 == 0
    launch = _unpermute_backward(
        grad.shape[1], grad.stride(0), None if y is None else y.stride(0), grad.dtype, grad.device,
        aligned, position.shape[1], weights.dtype,
    )  # fmt: skip
    launch(
        grad, y, position.contiguous(), source.contiguous(), weights.contiguous(), grad_y,
        None if y is None else grad_w, len(source), grid=(len(position), 1, 1),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _unpermute_backward(
    features: int,
    stride: int,
    stride_y: int | None,
    dtype: torch.dtype,
    device: torch.device,
    aligned: tuple[bool, bool],
    k: int,
    of_weights: torch.dtype,
) -> Launch:
    padded = triton.next_power_of_2(k)
    # 32 values a thread, of whole rows where these are short.
    width = min(max(128, 4096 // padded), max(128, triton.next_power_of_2(features)))
    return Launch(
        unpermute_backward_kernel, None, features, stride, stride_y or 0,
        options={"num_warps": 4}, K=k, KP=padded, BN=width, STAGES=2,
    )  # fmt: skip
