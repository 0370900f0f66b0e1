"""Triton kernel of ``float8.kernels.matmul`` and ``grouped``: one body for every mode of scaling,
on every GPU with FP8 matrix instructions.

Letters: M rows of a, N columns of b, K the contraction, G groups. A program computes tiles of
BM x BN, over BK of K at a time. A scale of a is for ROWS x INNER elements, one of b for
INNER x COLUMNS; each is a size or FULL.

    INNER is FULL      out = (sum over K of a b) * scale_a * scale_b
    INNER is BK        out = sum over blocks of K of (sum within of a b) * scale_a * scale_b
    A_FORMAT is given  the same for MX blocks, which the matrix instructions scale

To which is added, in float32 and before the one rounding, a bias of a number for each column. What
the output holds is added to what was rounded.

One scale after the other is multiplied in, since the product of two tiny ones may be zero; but
where a tile shares one of two block scales the two are multiplied first. What has a product of
scales below 2^-126 then loses precision, as float32 subnormals do.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..devices import DeviceProfile, device_profile
from ..formats import format_of
from ..scaling import FULL, Block, as_bytes
from .launch import Launch, multiprocessors
from .matmul import Operand, native_mode

_FULL = tl.constexpr(FULL)


@triton.jit
def _load_scales(
    scale, start, stride, stride_k, k, LENGTH,
    BLOCK: tl.constexpr, TILE: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """float32 scales of the TILE rows (AXIS 0) or columns (AXIS 1) from ``start`` on, of block k of
    the contraction, to multiply a tile by: a number if one block holds all of them, else [TILE, 1]
    or [1, TILE]."""
    scale += tl.cast(k, tl.int64) * stride_k
    if BLOCK == _FULL:
        s = _load_scale(scale, None)
    elif BLOCK % TILE == 0:
        s = _load_scale(scale + tl.cast(start // BLOCK, tl.int64) * stride, None)
    else:
        i = start + tl.arange(0, TILE)
        s = _load_scale(scale + (i // BLOCK).to(tl.int64) * stride, i < LENGTH)
        s = tl.expand_dims(s, 1 - AXIS)
    return s


@triton.jit
def _load_scale(at, mask):
    if at.dtype.element_ty == tl.uint8:  # codes of E8M0
        code = tl.load(at, mask=mask, other=None if mask is None else 0).to(tl.int32)
        bits = tl.where(code == 0, 0x00400000, tl.where(code == 255, 0x7FC00000, code << 23))
        s = bits.to(tl.float32, bitcast=True)
    else:
        s = tl.load(at, mask=mask, other=None if mask is None else 0.0)
    return s


@triton.jit
def _load_codes(
    scale, start, stride, stride_k, k, LENGTH, BLOCKS, TILE: tl.constexpr, BK: tl.constexpr
):
    """E8M0 codes [TILE, BK / 32] from block k of the contraction on; of none, 2^0."""
    i, j = start + tl.arange(0, TILE), k + tl.arange(0, BK // 32)
    at = scale + i[:, None].to(tl.int64) * stride + j[None, :].to(tl.int64) * stride_k
    return tl.load(at, mask=(i < LENGTH)[:, None] & (j < BLOCKS)[None, :], other=127)


@triton.jit
def _store(out, v, bias, row, column, M, N, ACCUMULATE: tl.constexpr, WIDTH: tl.constexpr):
    """Write v at (row, column), WIDTH columns at a time, with what is to be added."""
    if v.shape[1] > WIDTH:
        HALF: tl.constexpr = v.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(v, [v.shape[0], 2, HALF]), [0, 2, 1]))
        _store(out, left, bias, row, column, M, N, ACCUMULATE, WIDTH)
        _store(out, right, bias, row, column + HALF, M, N, ACCUMULATE, WIDTH)
    else:
        i = row + tl.arange(0, v.shape[0])
        j = column + tl.arange(0, v.shape[1])
        inside = (i < M)[:, None] & (j < N)[None, :]
        at = out + i[:, None].to(tl.int64) * N + j[None, :]
        if bias is not None:
            v += tl.load(bias + j, mask=j < N, other=0.0).to(tl.float32)[None, :]
        v = v.to(out.dtype.element_ty)
        if ACCUMULATE:
            v = (v.to(tl.float32) + tl.load(at, mask=inside, other=0.0)).to(out.dtype.element_ty)
        tl.store(at, v, mask=inside)


@triton.jit
def _corner(tile, down, across, GROUP: tl.constexpr):
    """Row and column of a tile, in tiles. GROUP rows of tiles go column by column, so that what is
    read again is still in L2."""
    first = tile // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    inside_group = tile % (GROUP * across)
    return first + inside_group % height, inside_group // height


@triton.jit
def _multiply_tile(
    a, b, scale_a, scale_b, out, bias, row, column, b_row, begin, end, high, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, scale_a_m, scale_a_k, scale_b_k, scale_b_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, PROMOTE: tl.constexpr, GROUPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TMA: tl.constexpr, EVEN_K: tl.constexpr, NEAR: tl.constexpr, WIDE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """The tile at (row, column), of rows below ``high``; steps of K from begin to end. ``b_row``
    is where the column is among those of all groups."""
    if not TMA:
        # A tile's corner is addressed in 64 bits; inside it 32 suffice where it is NEAR.
        OFFSET: tl.constexpr = tl.int32 if NEAR else tl.int64
        a_row, a_column = tl.cast(stride_am, OFFSET), tl.cast(stride_ak, OFFSET)
        b_down, b_column = tl.cast(stride_bk, OFFSET), tl.cast(stride_bn, OFFSET)
        i, j, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
        a_tile = i[:, None] * a_row + k[None, :] * a_column
        b_tile = k[:, None] * b_down + j[None, :] * b_column
    # Where every row and column of a tile has a scale of its own, those of a step are loaded during
    # the one before: their many small loads would hold up the sums. (597 to 737 TFLOPS on an H200;
    # larger tiles have no registers for it.)
    AHEAD: tl.constexpr = (
        A_FORMAT is None and INNER != _FULL and BM * BN <= 8192
        and ROWS != _FULL and ROWS % BM != 0 and COLUMNS != _FULL and COLUMNS % BN != 0
    )  # fmt: skip
    if AHEAD:
        last_row, last_column = tl.where(begin < end, high, 0), tl.where(begin < end, N, 0)
        sa = _load_scales(scale_a, row, scale_a_m, scale_a_k, begin, last_row, ROWS, BM, 0)
        sb = _load_scales(scale_b, column, scale_b_n, scale_b_k, begin, last_column, COLUMNS, BN, 1)
    acc = tl.zeros([BM, BN], tl.float32)
    for step in range(begin, end):
        if TMA:
            x = a.load([row, step * BK])
            y = b.load([b_row, step * BK]).T
        else:
            at = tl.cast(step * BK, tl.int64)
            x_at = a + tl.cast(row, tl.int64) * stride_am + at * stride_ak + a_tile
            y_at = b + tl.cast(b_row, tl.int64) * stride_bn + at * stride_bk + b_tile
            x_inside, y_inside = (i < high - row)[:, None], (j < N - column)[None, :]
            if not EVEN_K:
                x_inside = x_inside & (k < K - step * BK)[None, :]
                y_inside = y_inside & (k < K - step * BK)[:, None]
            x = tl.load(x_at, mask=x_inside, other=0.0)
            y = tl.load(y_at, mask=y_inside, other=0.0)
        if A_FORMAT is not None:
            blocks = tl.cdiv(K, 32)
            first_block = step * (BK // 32)
            x_codes = _load_codes(
                scale_a, row, scale_a_m, scale_a_k, first_block, high, blocks, BM, BK
            )
            y_codes = _load_codes(
                scale_b, column, scale_b_n, scale_b_k, first_block, N, blocks, BN, BK
            )
            acc = tl.dot_scaled(x, x_codes, A_FORMAT, y, y_codes, B_FORMAT, acc)
        elif INNER == _FULL and not PROMOTE:
            acc = tl.dot(x, y, acc)
        elif INNER == _FULL:
            # The option keeps the compiler from adding acc in the matrix instruction.
            acc += tl.dot(x, y, max_num_imprecise_acc=BK)
        else:
            at_step = tl.minimum(step + 1, end - 1) if AHEAD else step
            ta = _load_scales(scale_a, row, scale_a_m, scale_a_k, at_step, high, ROWS, BM, 0)
            tb = _load_scales(scale_b, column, scale_b_n, scale_b_k, at_step, N, COLUMNS, BN, 1)
            part = tl.dot(x, y, max_num_imprecise_acc=BK)
            if AHEAD:
                acc += (part * sa) * sb
                sa, sb = ta, tb
            else:
                acc += part * (ta * tb)
    # A sum of nothing is zero, and has no scales.
    if INNER == _FULL and ((GROUPS == "none") or (begin < end)):
        acc *= _load_scales(scale_a, row, scale_a_m, scale_a_k, 0, high, ROWS, BM, 0)
        acc *= _load_scales(scale_b, column, scale_b_n, scale_b_k, 0, N, COLUMNS, BN, 1)
    PARTS: tl.constexpr = (4 if ACCUMULATE else 2) if WIDE else 1
    _store(out, acc, bias, row, column, high, N, ACCUMULATE, BN // PARTS)


@triton.jit
def _span(offs, g, G, LENGTH):
    """Where group g begins and ends, within LENGTH whatever offs holds; group G is the rest."""
    start = tl.load(offs + (g - 1), mask=g > 0, other=0)
    end = tl.load(offs + g, mask=g < G, other=LENGTH)
    start = tl.minimum(tl.maximum(start, 0), LENGTH)
    return start, tl.minimum(tl.maximum(end, start), LENGTH)


# M and what follows from it differ from step to step: no variant is made for multiples of 16.
@triton.jit(do_not_specialize=["offs", "bias", "M", "G", "scale_a_k", "scale_b_k"])
def matmul_kernel(
    a, b, scale_a, scale_b, out, offs, bias, M, N, K, G, stride_am, stride_ak, stride_bk,
    stride_bn, b_rows, scale_a_g, scale_a_m, scale_a_k, scale_b_g, scale_b_k, scale_b_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, PROMOTE: tl.constexpr, GROUPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, EVEN_K: tl.constexpr, NEAR: tl.constexpr, WIDE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Tiles pid, pid + programs, ... of the output; what of them is outside the matrices is neither
    read nor written.

    GROUPS: "none"; "rows", of a and the output, which end at offs[g] and meet rows g * b_rows on of
    b, as [N, K], while rows of no group are written as zeros; or "columns" of a and b, which end at
    offs[g] and begin at multiples of BK: products of [G, M, N]. Group g's own scales are g *
    scale_a_g and g * scale_b_g further on.

    PROMOTE: sums over BK leave the matrix instructions, which on sm_89 and sm_90 keep less than
    float32, and are added up in float32. TMA: a and b, as [N, K], are tensor descriptors, otherwise
    pointers. EVEN_K: no step along K needs a mask. NEAR: a tile of a or b spans less than 2^31
    elements. WIDE: the loads of a tile begin before the last one is stored, which is done in parts
    for want of shared memory. ACCUMULATE: onto what the output holds, for which there are registers
    in smaller parts.
    """
    across = tl.cdiv(N, BN)
    if GROUPS == "none":
        down, steps = tl.cdiv(M, BM), tl.cdiv(K, BK)
        for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=WIDE):
            i, j = _corner(tile, down, across, GROUP)
            _multiply_tile(
                a, b, scale_a, scale_b, out, bias, i * BM, j * BN, j * BN, 0, steps, M, N, K,
                stride_am, stride_ak, stride_bk, stride_bn,
                scale_a_m, scale_a_k, scale_b_k, scale_b_n,
                ROWS, COLUMNS, INNER, A_FORMAT, B_FORMAT, PROMOTE, GROUPS, BM, BN, BK,
                TMA, EVEN_K, NEAR, WIDE, ACCUMULATE,
            )  # fmt: skip
    else:
        tile = tl.program_id(0)
        # Rows of no group are another one, of no steps.
        for g in range(G + 1 if GROUPS == "rows" else G):
            group = tl.cast(g, tl.int64)
            low, high, begin, end = 0, M, 0, tl.cdiv(K, BK)
            if GROUPS == "rows":
                low, high = _span(offs, g, G, M)
                end = tl.where(g < G, end, 0)
                own_out = out
            else:
                start, stop = _span(offs, g, G, K)
                begin, end = start // BK, tl.cdiv(stop, BK)
                end = tl.where(stop > start, end, begin)
                own_out = out + group * M * N
            own_a, own_b = scale_a, scale_b
            if GROUPS == "rows" or INNER == _FULL:
                own_a, own_b = scale_a + group * scale_a_g, scale_b + group * scale_b_g
            down = tl.cdiv(high - low, BM)
            tiles = down * across
            while tile < tiles:
                i, j = _corner(tile, down, across, GROUP)
                _multiply_tile(
                    a, b, own_a, own_b, own_out, bias, low + i * BM, j * BN, g * b_rows + j * BN,
                    begin, end, high, N, K,
                    stride_am, stride_ak, stride_bk, stride_bn,
                    scale_a_m, scale_a_k, scale_b_k, scale_b_n,
                    ROWS, COLUMNS, INNER, A_FORMAT, B_FORMAT, PROMOTE, GROUPS, BM, BN, BK,
                    TMA, EVEN_K, NEAR, WIDE, ACCUMULATE,
                )  # fmt: skip
                tile += tl.num_programs(0)
            tile -= tiles  # the next group's are counted from its first


class Tiling(NamedTuple):
    """Shape of a tile, and how many programs of it a multiprocessor holds."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    programs: int
    wide: bool = False


def tiling(profile: DeviceProfile, bk: int, in_registers: bool) -> Tiling:
    """The tile of a device: ``in_registers`` where sums leave the matrix instructions after every
    BK. The two of sm_90 (with 128 of K) are the fastest of a sweep on an H200; the others are what
    fits into shared memory and registers."""
    if profile.vendor == "amd":
        return Tiling(128, 128, bk, warps=8, stages=2, programs=2)
    if profile.shared_memory < 200 << 10:
        return Tiling(64, 128, bk, warps=8, stages=4, programs=1)
    if not in_registers:
        return Tiling(128, 256, bk, warps=8, stages=3, programs=1, wide=True)
    if profile.arch == "sm_90":
        # Short blocks have as many bytes under way as long ones.
        return Tiling(64, 128, bk, warps=4, stages=4 if bk == 128 else 8, programs=2)
    return Tiling(128, 128, bk, warps=8, stages=3, programs=1)


# Matrix instructions that add up products in less than float32, or are not known not to; that take
# E8M0 scales as Triton compiles them; and that read shared memory, which TMA fills.
_INEXACT = ("mma", "wgmma")
_SCALED = ("tcgen05", "mfma_scale")
_SHARED = ("wgmma", "tcgen05")


class Part(NamedTuple):
    """What Triton specialises on in a matrix."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool

    @staticmethod
    def of(x: Tensor) -> Part:
        return Part(tuple(x.shape), x.stride(), x.dtype, x.data_ptr() % 16 == 0)

    @property
    def described(self) -> bool:
        """Whether a tensor descriptor can describe it: rows that start on 16 bytes."""
        row, step = self.strides
        return self.aligned and step == 1 and row % 16 == 0 and row >= self.shape[1]


def multiply(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block_a: Block,
    block_b: Block,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """[M, N] of a [M, K] and b [K, N], any strides, not empty, where ``matmul.triton_refusal``
    has no objection; plus ``bias`` [N], contiguous, or added to ``out`` [M, N], contiguous."""
    launch = _launch(
        Part.of(a), Part.of(b.t()), Part.of(scale_a), Part.of(scale_b),
        tuple(block_a), tuple(block_b), out_dtype, fast_accum, a.device, device_profile(a.device),
        bias=None if bias is None else bias.dtype, into=None if out is None else Part.of(out),
    )  # fmt: skip
    if out is None:
        out = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    launch(a, b.t(), scale_a, scale_b, out, bias=bias)
    return out


class Groups(NamedTuple):
    """What one launch multiplies groups of."""

    kind: str  # GROUPS of the kernel
    number: int
    b_rows: int  # from a group's first row of b, as [N, K], to the next one's
    n: int  # columns of a group's product


NO_GROUPS = Groups("none", 1, 0, 0)


class Matmul:
    """The launch that multiplies matrices which agree in all that Triton specialises on."""

    def __init__(
        self,
        a: Part,
        b: Part,
        scale_a: Part,
        scale_b: Part,
        block_a: Block,
        block_b: Block,
        out_dtype: torch.dtype,
        fast_accum: bool,
        device: torch.device,
        profile: DeviceProfile,
        groups: Groups = NO_GROUPS,
        bias: torch.dtype | None = None,
        into: Part | None = None,
    ) -> None:
        """b is that of the transpose, [N, K], of all groups; scales of [groups, rows, columns] are
        each group's own. ``into``: the output, if it is one to add to; a new one is aligned.
        ``out_dtype`` and that of the bias are what Triton compiles for, and are not asked for
        here."""
        (m, k), n = a.shape, groups.n or b.shape[0]
        (rows, inner), (_, columns) = block_a, block_b
        left = Operand(a.dtype, block_a, scale_a.dtype)
        right = Operand(b.dtype, block_b, scale_b.dtype)
        mx = native_mode(left, right) == "mx" and profile.matrix in _SCALED
        promote = inner == FULL and profile.matrix in _INEXACT and not fast_accum
        in_registers = promote or (inner != FULL and not mx)
        tile = tiling(profile, 128 if inner == FULL or mx else inner, in_registers)
        self.tma = profile.matrix in _SHARED and a.described and b.described
        self.tiles = [tile.bm, tile.bk], [tile.bn, tile.bk]
        down = triton.cdiv(m, tile.bm)
        # Of groups of rows there may be fewer tiles; that is known on the device alone.
        down = {"none": down, "rows": down + groups.number, "columns": down * groups.number}[
            groups.kind
        ]
        tiles = down * triton.cdiv(n, tile.bn)
        spans = (
            tile.bm * a.strides[0] + tile.bk * a.strides[1],
            tile.bn * b.strides[0] + tile.bk * b.strides[1],
        )
        self.launch = Launch(
            matmul_kernel, (min(tiles, tile.programs * multiprocessors(device)), 1, 1),
            m, n, k, groups.number, *a.strides, *b.strides[::-1], groups.b_rows,
            *(0, *scale_a.strides)[-3:], *(0, *scale_b.strides)[-3:],
            options={"num_warps": tile.warps, "num_stages": tile.stages},
            ROWS=rows, COLUMNS=columns, INNER=inner,
            A_FORMAT=format_of(a.dtype).kind if mx else None,
            B_FORMAT=format_of(b.dtype).kind if mx else None,
            PROMOTE=promote, GROUPS=groups.kind,
            BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP=8,
            TMA=self.tma, EVEN_K=self.tma or k % tile.bk == 0, NEAR=max(spans) < 2**31,
            WIDE=tile.wide, ACCUMULATE=into is not None,
        )  # fmt: skip

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        out: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        x, y = a, b
        if self.tma:
            x = TensorDescriptor.from_tensor(a, self.tiles[0])
            y = TensorDescriptor.from_tensor(b, self.tiles[1])
        self.launch(x, y, as_bytes(scale_a), as_bytes(scale_b), out, offs, bias)


_launch = functools.lru_cache(maxsize=1024)(Matmul)
