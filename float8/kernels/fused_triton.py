"""Triton kernels of ``float8.kernels.fused``: a producer is computed in registers and cast there.

Letters: M rows and K columns of the producer's result (for SwiGLU, K is the MLP's hidden size), E
results (2 for the backward of SwiGLU, else 1). SOURCE, a constexpr, names the producer, whose
inputs are x, y and z:

    rms              x, weight [K] or None, 1/rms of the rows [M], which the first pass writes
    swiglu           gate, up, None
    swiglu_backward  gate, up, gradient of the result; results: gradient of gate, gradient of up

No result goes to memory in high precision. What a scale must know before, the amax of a row, column
or matrix, and the norm of a row, ``row_kernel`` takes in a first pass over the inputs;
``tile_kernel`` computes the producer again and stores the layouts, through ``store_tile``. A first
pass that holds whole rows stores the rowwise row layout itself.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cast_triton import (
    amax_bits,
    larger,
    scale_strides,
    store_row,
    store_scale,
    store_tile,
    to_magnitude,
    to_scale,
)
from .fused import inverse_rms
from .launch import (
    MAX_ROW,
    Launch,
    Matrices,
    Outputs,
    fused_row_loop,
    kind,
    multiprocessors,
    runs_ptx,
    target,
    tile_constants,
    tile_options,
    tile_shape,
)
from .quantize import CastPlan
from .quantize_triton import ColumnAmaxes

# 1 / (1 + e^-v) in five instructions, without a branch for any exponent: a quarter is added to a
# quarter of e^-v, so that nothing overflows before e^-v itself does and the reciprocal is normal.
_SIGMOID = tl.constexpr(
    "{ .reg .f32 t; fma.rn.f32 t, $1, 0fBFB8AA3B, 0fC0000000; ex2.approx.ftz.f32 t, t; "
    "add.f32 t, t, 0f3E800000; rcp.approx.ftz.f32 t, t; mul.f32 $0, t, 0f3E800000; }"
)
# Two at a time: of one conversion alone ptxas makes a slow instruction, and of two widenings three.
_ROUND_BF16 = tl.constexpr(
    "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }"
)
_ROUND_FP16 = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 lo, hi; cvt.rn.f16x2.f32 t, $3, $2; mov.b32 {lo, hi}, t; "
    "cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }"
)
_WIDEN_BF16 = tl.constexpr("{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }")


@triton.jit
def _sigmoid(v, T: tl.constexpr):
    if T.PTX != "":
        s = tl.inline_asm_elementwise(_SIGMOID, "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)
    else:
        s = 1.0 / (1.0 + tl.exp(-v))
    return s


@triton.jit
def _rounded(v, DTYPE: tl.constexpr, T: tl.constexpr):
    """v as float32, rounded to DTYPE."""
    if DTYPE == tl.float32:
        w = v
    elif T.PTX != "":
        ROUND: tl.constexpr = _ROUND_BF16 if DTYPE == tl.bfloat16 else _ROUND_FP16
        w = tl.inline_asm_elementwise(
            ROUND, "=f,=f,f,f", [v], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        w = v.to(DTYPE).to(tl.float32)
    return w


@triton.jit
def widened(v, T: tl.constexpr):
    """v as float32."""
    if T.PTX != "" and v.dtype == tl.bfloat16:
        w = tl.inline_asm_elementwise(
            _WIDEN_BF16, "=f,=f,r", [v], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        w = v.to(tl.float32)
    return w


@triton.jit
def swiglu(gate, up, DTYPE: tl.constexpr, T: tl.constexpr):
    return _rounded(gate * _sigmoid(gate, T) * up, DTYPE, T)


@triton.jit
def gate_gradient(grad, gate, up, DTYPE: tl.constexpr, T: tl.constexpr):
    s = _sigmoid(gate, T)
    return _rounded(grad * up * s * (1.0 + gate * (1.0 - s)), DTYPE, T)


@triton.jit
def up_gradient(grad, gate, DTYPE: tl.constexpr, T: tl.constexpr):
    return _rounded(grad * gate * _sigmoid(gate, T), DTYPE, T)


@triton.jit
def _cast_row(
    v, highest, row, row_scale, row_amax, at, c, K, inside, ROW: tl.constexpr, T: tl.constexpr
):
    """Store or measure v, row ``at`` of the results; maxima of v and ``highest``."""
    magnitude = to_magnitude(v, T)
    if ROW == "store":
        scale, inverse, live = to_scale(amax_bits(magnitude, 0), T)
        store_scale(row_scale + at, scale, None)
        store_row(row + at * K + c, v * inverse, live, inside, T)
    elif ROW == "amax":
        tl.atomic_max(row_amax + at, amax_bits(magnitude, 0), sem="relaxed")
    return larger(highest, magnitude)


@triton.jit
def _store_amax(amax, highest, e, c, K, inside, PER: tl.constexpr):
    if PER == "column":
        pid, G = tl.program_id(0).to(tl.int64), tl.num_programs(0)
        tl.store(amax + (e * G + pid) * K + c, highest.to(tl.int32, bitcast=True), mask=inside)
    elif PER == "tensor":
        tl.atomic_max(amax + e, amax_bits(highest, 0), sem="relaxed")


@triton.jit(do_not_specialize=["M"])  # as in quantize_triton
def row_kernel(
    x, y, z, row, row_scale, row_amax, amax, M, K, eps,
    stride_xm, stride_xk, stride_ym, stride_yk, stride_zm, stride_zk,
    SOURCE: tl.constexpr, ROW: tl.constexpr, PER: tl.constexpr, WHOLE: tl.constexpr,
    T: tl.constexpr, KP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows pid, pid + G, ... of the results, KP columns of them; with WHOLE, these are all, and rms
    takes the rows' norms here and stores them to z.

    ROW: "store" data and scale, or the "amax" of each row to row_amax [E, M], or "none".
    PER: the amax of each "column", over this program's rows, to amax [E, G, K], or of the "tensor"
    to amax [E], or "none". What atomics write starts as zeros.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    c = tl.program_id(1) * KP + tl.arange(0, KP)
    inside, columns = c < K, c.to(tl.int64)
    x += columns * stride_xk
    if y is not None:
        y += columns * stride_yk
    if SOURCE == "rms" and y is not None:
        weight = tl.load(y, mask=inside, other=0.0).to(tl.float32)
    if SOURCE == "swiglu_backward":
        z += columns * stride_zk
    highest = to_magnitude(tl.zeros([KP], tl.float32), T)
    second = highest
    for r in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
        at = tl.cast(r, tl.int64)
        v = widened(tl.load(x + at * stride_xm, mask=inside, other=0.0), T)
        if SOURCE == "rms":
            if WHOLE:
                mean = tl.math.div_rn(tl.sum(v * v, 0), tl.cast(K, tl.float32))
                rstd = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))
                tl.store(z + at, rstd)
            else:
                rstd = tl.load(z + at)
            v *= rstd
            if y is not None:
                v *= weight
            v = _rounded(v, DTYPE, T)
        else:
            u = widened(tl.load(y + at * stride_ym, mask=inside, other=0.0), T)
            if SOURCE == "swiglu":
                v = swiglu(v, u, DTYPE, T)
            else:
                g = widened(tl.load(z + at * stride_zm, mask=inside, other=0.0), T)
                second = _cast_row(
                    up_gradient(g, v, DTYPE, T), second,
                    row, row_scale, row_amax, M + at, c, K, inside, ROW, T,
                )  # fmt: skip
                v = gate_gradient(g, v, u, DTYPE, T)
        highest = _cast_row(v, highest, row, row_scale, row_amax, at, c, K, inside, ROW, T)
    _store_amax(amax, highest, 0, c, K, inside, PER)
    if SOURCE == "swiglu_backward":
        _store_amax(amax, second, 1, c, K, inside, PER)


@triton.jit
def _corner(x, stride_m, stride_k, pm, pn, BM: tl.constexpr, BN: tl.constexpr, NEAR: tl.constexpr):
    """Pointers to every fourth row of a tile, and how far the next row is."""
    corner = x + (pm * BM).to(tl.int64) * stride_m + (pn * BN).to(tl.int64) * stride_k
    OFFSET: tl.constexpr = tl.int32 if NEAR else tl.int64
    next_row, next_column = tl.cast(stride_m, OFFSET), tl.cast(stride_k, OFFSET)
    i, j = tl.arange(0, BM // 4).to(OFFSET), tl.arange(0, BN).to(OFFSET)
    return corner + (4 * i[:, None] * next_row + j[None, :] * next_column), next_row


@triton.jit
def _load(pointer, inside, EVICT: tl.constexpr):
    """0 where not inside."""
    if inside is None:
        v = tl.load(pointer, eviction_policy=EVICT)
    else:
        v = tl.load(pointer, mask=inside, other=0.0)
    return v


@triton.jit
def four_rows(pointer, step, m0, m1, m2, m3):
    """Rows that follow each other, as they lie in memory."""
    return (
        _load(pointer, m0, "evict_first"),
        _load(pointer + step, m1, "evict_first"),
        _load(pointer + 2 * step, m2, "evict_first"),
        _load(pointer + 3 * step, m3, "evict_first"),
    )


@triton.jit
def produce(x, y, z, e, weight, SOURCE: tl.constexpr, DTYPE: tl.constexpr, T: tl.constexpr):
    """Rows of result e, of those of the inputs; of "rms" z is one number per row."""
    v = widened(x, T)
    if SOURCE == "rms":
        v *= z[:, None]
        if weight is not None:
            v *= weight[None, :]
        v = _rounded(v, DTYPE, T)
    elif SOURCE == "swiglu":
        v = swiglu(v, widened(y, T), DTYPE, T)
    elif e == 0:
        v = gate_gradient(widened(z, T), v, widened(y, T), DTYPE, T)
    else:
        v = up_gradient(widened(z, T), v, DTYPE, T)
    return v


@triton.jit
def _tile(
    x, y, z, row, row_scale, row_amax, col, col_scale, col_amax, pm, pn, e, M, K,
    stride_xm, stride_xk, stride_ym, stride_yk, stride_zm, stride_zk,
    SOURCE: tl.constexpr, NEAR: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr,
    ROW_T: tl.constexpr, COL_T: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Tile (pm, pn) of result e in one or both layouts. NEAR: it spans less than 2^31 elements of
    every input."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    T: tl.constexpr = ROW_T if COL == "none" else COL_T
    r = pm * BM + 4 * tl.arange(0, BM // 4)
    c = pn * BN + tl.arange(0, BN)
    m0, m1, m2, m3, weight = None, None, None, None, None
    if not EVEN:
        c_inside = (c < K)[None, :]
        m0, m1 = (r[:, None] < M) & c_inside, (r[:, None] + 1 < M) & c_inside
        m2, m3 = (r[:, None] + 2 < M) & c_inside, (r[:, None] + 3 < M) & c_inside
    # All loads before all else: they are under way together. In 16 bits what they bring takes no
    # more registers than the results do.
    x, next_x = _corner(x, stride_xm, stride_xk, pm, pn, BM, BN, NEAR)
    x0, x1, x2, x3 = four_rows(x, next_x, m0, m1, m2, m3)
    y0, y1, y2, y3, z0, z1, z2, z3 = x0, x1, x2, x3, x0, x1, x2, x3
    if SOURCE == "rms":
        z0 = _load(z + r, None if EVEN else r < M, "")
        z1 = _load(z + r + 1, None if EVEN else r + 1 < M, "")
        z2 = _load(z + r + 2, None if EVEN else r + 2 < M, "")
        z3 = _load(z + r + 3, None if EVEN else r + 3 < M, "")
        if y is not None:
            y += c.to(tl.int64) * stride_yk
            weight = _load(y, None if EVEN else c < K, "").to(tl.float32)
    else:
        y, next_y = _corner(y, stride_ym, stride_yk, pm, pn, BM, BN, NEAR)
        if SOURCE == "swiglu" or e == 0:
            y0, y1, y2, y3 = four_rows(y, next_y, m0, m1, m2, m3)
    if SOURCE == "swiglu_backward":
        z, next_z = _corner(z, stride_zm, stride_zk, pm, pn, BM, BN, NEAR)
        z0, z1, z2, z3 = four_rows(z, next_z, m0, m1, m2, m3)
    v0 = produce(x0, y0, z0, e, weight, SOURCE, DTYPE, T)
    v1 = produce(x1, y1, z1, e, weight, SOURCE, DTYPE, T)
    v2 = produce(x2, y2, z2, e, weight, SOURCE, DTYPE, T)
    v3 = produce(x3, y3, z3, e, weight, SOURCE, DTYPE, T)
    row_scale_e, row_scale_m, row_scale_k = scale_strides(M, K, ROW, BM, ROW_BLOCK)
    col_scale_e, col_scale_m, col_scale_k = scale_strides(K, M, COL, BN, COL_BLOCK)
    store_tile(
        v0, v1, v2, v3, r, c, pm, pn, e.to(tl.int64),
        row, row_scale, row_amax, col, col_scale, col_amax, M, K,
        row_scale_e, row_scale_m, row_scale_k, col_scale_e, col_scale_m, col_scale_k,
        ROW, COL, ROW_BLOCK, COL_BLOCK, ROW_T, COL_T, EVEN, EVEN, BM, BN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def tile_kernel(
    x, y, z, row, row_scale, row_amax, col, col_scale, col_amax, M, K,
    stride_xm, stride_xk, stride_ym, stride_yk, stride_zm, stride_zk,
    SOURCE: tl.constexpr, NEAR: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr,
    ROW_T: tl.constexpr, COL_T: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of one result in one or both layouts; with STAGES, tiles pid, pid + G, ...
    of one result, the loads of the next under way while one is made."""
    # The results' programs are neighbours: one reads what the other brings to the cache.
    RESULTS: tl.constexpr = 2 if SOURCE == "swiglu_backward" else 1
    if STAGES == 0:
        pn, pm, e = tl.program_id(0) // RESULTS, tl.program_id(1), tl.program_id(0) % RESULTS
        if (
            SOURCE == "rms"
            or ROW == "tensor"
            or ROW == "vector"
            or COL == "tensor"
            or COL == "vector"
        ):
            pm = tl.num_programs(1) - 1 - pm  # what the first pass read last may be in the cache
        _tile(
            x, y, z, row, row_scale, row_amax, col, col_scale, col_amax, pm, pn, e, M, K,
            stride_xm, stride_xk, stride_ym, stride_yk, stride_zm, stride_zk,
            SOURCE, NEAR, ROW, COL, ROW_BLOCK, COL_BLOCK, ROW_T, COL_T, EVEN, BM, BN,
        )  # fmt: skip
    else:
        width = tl.cdiv(K, BN)
        tiles = tl.cdiv(M, BM) * width
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            _tile(
                x, y, z, row, row_scale, row_amax, col, col_scale, col_amax,
                tile // width, tile % width, tl.program_id(1), M, K,
                stride_xm, stride_xk, stride_ym, stride_yk, stride_zm, stride_zk,
                SOURCE, NEAR, ROW, COL, ROW_BLOCK, COL_BLOCK, ROW_T, COL_T, EVEN, BM, BN,
            )  # fmt: skip


_CHUNK = 2048  # columns of row_kernel's programs where they need not see whole rows


def fused_layouts(
    source: str,
    x: Tensor,
    y: Tensor | None,
    z: Tensor | None,
    eps: float,
    row: CastPlan | None,
    col: CastPlan | None,
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """1/rms of the rows (None but for rms); data and scale of the row layout and of the transposed
    one, two Nones for one not asked for, two results stacked. Inputs have any strides and are not
    empty."""
    if source == "rms":
        # Longer rows than these are no model's; torch takes their norms.
        held = x.shape[1] <= MAX_ROW
        z = x.new_empty(len(x), dtype=torch.float32) if held else inverse_rms(x, eps)
    strides: tuple[int, ...] = ()
    dtypes: list[tuple[torch.dtype, bool] | None] = []
    for t in (x, y, z):
        # A vector is a row of a matrix that has no others.
        strides += (0, 0) if t is None else (0, *t.stride())[-2:]
        dtypes.append(None if t is None else (t.dtype, t.data_ptr() % 16 == 0))
    m, k = x.shape
    job = _Job(source, m, k, strides, tuple(dtypes), x.device, eps, row, col)
    layouts = _prepared(job)(x, y, z)
    return z if source == "rms" else None, layouts


class _Job(NamedTuple):
    """What the launches depend on; Triton specialises on dtypes and on alignment to 16 bytes."""

    source: str
    m: int
    k: int
    strides: tuple[int, ...]  # of rows and of columns, of x, y and z
    dtypes: tuple[tuple[torch.dtype, bool] | None, ...]
    device: torch.device
    eps: float
    row: CastPlan | None
    col: CastPlan | None

    @property
    def itemsize(self) -> int:
        assert self.dtypes[0] is not None
        return self.dtypes[0][0].itemsize

    @property
    def results(self) -> Matrices:
        e = 2 if self.source == "swiglu_backward" else 1
        return Matrices(e, self.m, self.k, 0, 0, 0, self.device)

    @property
    def kinds(self) -> list[str]:
        return ["none" if layout is None else kind(layout) for layout in (self.row, self.col)]


class _Fused:
    """The launches of a job."""

    def __init__(self, job: _Job) -> None:
        x, row, col = job.results, job.row, job.col
        lead = () if x.e == 1 else (x.e,)
        self.device, self.outputs = job.device, Outputs.of((*lead, x.m, x.k), row, col)
        self.rows = _Rows(job)
        self.tiles: Launch | None = None
        left = None if self.rows.row == "store" else row
        if left is not None or col is not None:
            constants, s = tile_constants(x, left, col), job.strides
            bm, bn = constants["BM"], constants["BN"]
            grid, stages = (triton.cdiv(x.k, bn) * x.e, triton.cdiv(x.m, bm), 1), 0
            options = _tile_options(job, left, col)
            if stream := _stream(job, left, col):
                grid = (min(grid[0] * grid[1], stream.programs * multiprocessors(x.device)), 1, 1)
                options, stages = stream.options, 2
            self.tiles = Launch(
                tile_kernel, grid, x.m, x.k, *s,
                options=options,
                SOURCE=job.source,
                NEAR=all(bm * s[i] + bn * s[i + 1] < 2**31 for i in (0, 2, 4)),
                **constants, STAGES=stages,
            )  # fmt: skip

    def __call__(self, x: Tensor, y: Tensor | None, z: Tensor | None) -> tuple[Tensor | None, ...]:
        outputs, (data, scale, data_t, scale_t) = self.outputs.new(self.device)
        row_amax, col_amax = self.rows(x, y, z, data, scale)
        if self.tiles is not None:
            self.tiles(x, y, z, data, scale, row_amax, data_t, scale_t, col_amax)
        return tuple(outputs)


class _Stream(NamedTuple):
    """Programs that stay."""

    programs: int  # on a multiprocessor
    options: dict[str, int]


def _stream(job: _Job, row: CastPlan | None, col: CastPlan | None) -> _Stream | None:
    """How both layouts of SwiGLU in blocks are made on an H200, where its loads and its arithmetic
    take about as long as each other: 8192 x 14336 in 204 us (1x128) and 193 (MX) instead of 262 and
    222. No other fused cast gains from it, and masks need the registers."""
    x, (bm, bn) = job.results, tile_shape(row, col)
    blocks = row is not None and col is not None and kind(row) == kind(col) == "block"
    even = x.m % bm == x.k % bn == 0 and job.itemsize == 2
    if job.source != "swiglu" or not (blocks and even and runs_ptx(x.device)):
        return None
    if bn == 128:
        return _Stream(2, {"num_warps": 4})
    return _Stream(3, {"num_warps": 4, "maxnreg": 168})


def _tile_options(job: _Job, row: CastPlan | None, col: CastPlan | None) -> dict[str, int]:
    """As of a plain cast, but where a warp has 32 threads: masks, inputs in float32, or three, need
    the registers of eight warps, of which two programs share a multiprocessor in 16 bits. SwiGLU
    with a scale per column runs eight of few registers, so that three do (8192 x 14336: 315 us
    instead of 346)."""
    bm, bn = tile_shape(row, col)
    if not runs_ptx(job.device):
        return tile_options(job.results, row, col)
    backward = job.source == "swiglu_backward"
    if bm * bn < 128 * 128:
        return {"num_warps": 4 if backward else 8}
    uneven = job.m % bm != 0 or job.k % bn != 0
    if backward or job.itemsize == 4 or uneven:
        squares = "square" in (row and kind(row), col and kind(col))
        few = {"maxnreg": 128} if job.itemsize == 2 and (uneven or squares) else {}
        return {"num_warps": 8, **few}
    if job.source == "swiglu" and bm == 256:
        return {"num_warps": 8, "maxnreg": 80}
    return tile_options(job.results, row, col)


_prepared = functools.lru_cache(maxsize=1024)(_Fused)


class _Rows:
    """The first pass of a job, if there has to be one: ``row_kernel``, which does what ``row`` and
    ``per`` say, and what is made of its amaxes."""

    def __init__(self, job: _Job) -> None:
        x, self.kinds = job.results, job.kinds
        held = x.k <= MAX_ROW
        self.row = self.per = "none"
        if self.kinds[0] == "vector":
            # Rows of two results, with their columns' maxima, are more than the registers hold.
            self.row = "store" if held and x.e == 1 else "amax"
        if self.kinds[1] == "vector":
            self.per = "column"
        elif "tensor" in self.kinds:
            self.per = "tensor"
        whole = held and (job.source == "rms" or self.row == "store")
        self.launch: Launch | None = None
        if not whole and self.row == self.per == "none":
            return

        width = max(128, triton.next_power_of_2(x.k))
        width = width if whole else min(width, _CHUNK)
        options, programs, stages = fused_row_loop(x.device, job.source, width, job.itemsize)
        chunks = triton.cdiv(x.k, width)
        most = max(1, multiprocessors(x.device) * programs // chunks)
        g = min(x.m, most)
        self.amax_shape = (x.e, g, x.k) if self.per == "column" else (x.e, 1)
        self.row_shape = (x.e, x.m)
        layout = job.col if job.row is None else job.row
        assert layout is not None
        self.launch = Launch(
            row_kernel, (g, chunks, 1), x.m, x.k, job.eps, *job.strides,
            options=options, SOURCE=job.source, ROW=self.row, PER=self.per, WHOLE=whole,
            T=target(x.device, layout), KP=width, STAGES=stages,
        )  # fmt: skip
        self.columns = ColumnAmaxes(x.e, g, most, x.k) if self.per == "column" else None

    def __call__(
        self,
        x: Tensor,
        y: Tensor | None,
        z: Tensor | None,
        data: Tensor | None,
        scale: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The amax bits that ``store_tile`` takes of the row layout and of the transposed one."""
        if self.launch is None:
            return None, None
        rows = amax = columns = None
        if self.row == "amax":
            rows = x.new_zeros(self.row_shape, dtype=torch.int32)
        if self.per != "none":
            new = x.new_empty if self.per == "column" else x.new_zeros
            amax = new(self.amax_shape, dtype=torch.int32)
        if self.row != "store":
            data = scale = None
        self.launch(x, y, z, data, scale, rows, amax)
        if self.columns is not None and amax is not None:
            columns = self.columns(amax)
            amax = columns.amax(1, keepdim=True) if "tensor" in self.kinds else None
        of_row = {"vector": rows, "tensor": amax}
        of_col = {"vector": columns, "tensor": amax}
        return of_row.get(self.kinds[0]), of_col.get(self.kinds[1])
