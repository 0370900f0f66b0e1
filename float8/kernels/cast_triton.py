"""Casts of what a kernel holds in registers, whichever kernel it is: amaxes, scales, FP8 bytes, and
the two layouts of a tile.

Letters: E experts (1 for a matrix), M rows, K columns of what is cast. It can be stored in two
layouts: *row*, data [E, M, K], and *col*, data [E, K, M] of the transpose, scaled along M. Which
scales each layout has is a constexpr:

    none     the layout is not written
    tensor   one amax for each expert's matrix, given
    vector   one amax per row of the layout, given
    block    blocks of 1 x ROW_BLOCK (COL_BLOCK) in the layout, taken from the tile
    square   one block of the tile's size, shared by both layouts

Amaxes travel as int32 bits (``bits(x) & 0x7fffffff``), so a maximum, also an atomic one, is an
integer maximum.

A tile is held as four tiles of every fourth row (rows 4i, 4i+1, 4i+2, 4i+3), so that the four
values of a column become one int32 in registers: the transpose then moves 32-bit words, and all
global accesses are 16 bytes wide. The bytes of the two layouts come from separate conversions: with
one conversion feeding both, ptxas 12.8 was seen to emit wrong transposed bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INF = tl.constexpr(0x7F800000)
_MANTISSA = tl.constexpr(0x007FFFFF)
_LOWEST_GIVEN = tl.constexpr(0x00400000)  # 2^-127


@triton.jit
def to_magnitude(v, T: tl.constexpr):
    """What maxima are taken of, so that a NaN survives: |v| where the hardware's maximum can
    propagate NaN, else its bits."""
    if T.PTX != "":
        m = tl.abs(v)
    else:
        m = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return m


@triton.jit
def larger(a, b):
    if a.dtype.is_floating():
        m = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        m = tl.maximum(a, b)
    return m


@triton.jit
def amax_bits(m, axis: tl.constexpr):
    """amax bits of magnitudes, along one axis or over all."""
    if m.dtype.is_floating():
        bits = tl.reduce(m, axis, larger).to(tl.int32, bitcast=True)
    else:
        bits = tl.max(m, axis)
    return bits


@triton.jit
def _divide_by_max(amax, T: tl.constexpr):
    """amax / MAX, correctly rounded. One correction of the product with the rounded reciprocal
    suffices (Markstein, "Computation of elementary functions on the IBM RISC System/6000
    processor", 1990): equal for every float32 that gives a normal result."""
    if T.PTX != "":
        q = amax * T.INVERSE_MAX
        q = tl.fma(tl.fma(q, -T.MAX, amax), T.INVERSE_MAX, q)
    else:
        q = tl.math.div_rn(amax, T.MAX)
    return q


@triton.jit
def _reciprocal(scale, T: tl.constexpr):
    """1 / scale, correctly rounded. For scales of 2^-126 to 2^125, one Newton step from the
    approximation gives that; it is what PTX's rcp.rn does there, without its branch for the
    others."""
    if T.PTX != "":
        r = tl.inline_asm_elementwise(
            "{ .reg .f32 y, d; rcp.approx.ftz.f32 y, $1; neg.f32 d, $1; "
            "fma.rn.f32 d, d, y, 0f3F800000; fma.rn.f32 $0, d, y, y; }",
            "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        r = tl.math.div_rn(1.0, scale)
    return r


@triton.jit
def _decode_e8m0(code):
    return tl.where(code == 0, 0x00400000, code << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_scale(bits, T: tl.constexpr, given=None, mask=None):
    """(scale, inverse, live) of amax bits: ``scaling.scale_from_amax``; live is -1 where the block
    has data, 0 where its bytes are zero by rule. In the mode "given", the scale is what ``given``
    points at, if the block is finite: ``quantize.quantize_static``."""
    finite = bits < _INF
    if T.MODE == "given":
        if mask is None:
            scale = tl.load(given)
        else:
            scale = tl.load(given, mask=mask, other=1)
        if given.dtype.element_ty == tl.uint8:
            scale = _decode_e8m0(scale.to(tl.int32))
        code = scale.to(tl.int32, bitcast=True)
        finite &= (code >= _LOWEST_GIVEN) & (code < _INF)  # negative numbers are negative here
        inverse = tl.math.div_rn(1.0, scale)
    elif T.MODE == "fp32":
        scale = tl.maximum(
            _divide_by_max(bits.to(tl.float32, bitcast=True), T), 1.1754943508222875e-38
        )
        inverse = _reciprocal(scale, T)
    else:
        mantissa = bits & _MANTISSA
        if T.MODE == "pow2" or T.MODE == "e8m0_rceil":
            carry = (mantissa > T.MAX_MANTISSA).to(tl.int32)
        elif T.MODE == "e8m0_ceil":
            carry = (mantissa > 0).to(tl.int32)
        elif T.MODE == "e8m0_even":
            carry = (mantissa + T.HALF_STEP) >> 23
        else:
            carry = tl.zeros_like(mantissa)
        code = (bits >> 23) - T.MAX_EXPONENT + carry
        code = tl.minimum(tl.maximum(code, 1 if T.MODE == "pow2" else 0), 254)
        scale = _decode_e8m0(code)
        inverse = _decode_e8m0(254 - code)
    nan = tl.full(scale.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    if T.MODE == "given":
        live = tl.where(finite, -1, 0)
    else:  # 0 < bits < Inf in one unsigned comparison
        live = tl.where((bits - 1).to(tl.uint32, bitcast=True) < _INF - 1, -1, 0)
    return tl.where(finite, scale, nan), inverse, live


@triton.jit
def store_scale(pointer, scale, mask):
    if pointer.dtype.element_ty == tl.uint8:  # E8M0: the exponent field, 255 for NaN
        tl.store(pointer, (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=mask)
    else:
        tl.store(pointer, scale, mask=mask)


@triton.jit
def convert(v, T: tl.constexpr):
    """float32 to FP8, saturating."""
    if T.PTX != "":
        q = tl.inline_asm_elementwise(T.PTX, "=r,f,f,f,f", [v], dtype=T.FP8, is_pure=True, pack=4)
    else:
        q = tl.minimum(tl.maximum(v, -T.MAX), T.MAX).to(T.FP8)
    return q


@triton.jit
def store_row(out, v, live, inside, T: tl.constexpr):
    """Store FP8 of v, +0 where not live. Zeros are written over, by the same threads, since dead
    blocks are rare: a predicated store per vector costs less than a selection per element."""
    tl.store(out, convert(v, T), mask=inside, eviction_policy="evict_first")
    dead = tl.broadcast_to(tl.cast(live, tl.int32) == 0, v.shape)
    if inside is not None:
        dead = dead & inside
    tl.store(
        out,
        tl.zeros(v.shape, tl.uint8).to(T.FP8, bitcast=True),
        mask=dead,
        eviction_policy="evict_first",
    )


@triton.jit
def pack(a, b, c, d, live, T: tl.constexpr):
    """Four float32 to four FP8 bytes in one int32, a lowest; 0 where not live."""
    if T.PTX != "":
        word = tl.inline_asm_elementwise(
            T.PTX, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        word = _byte(a, T) | (_byte(b, T) << 8) | (_byte(c, T) << 16) | (_byte(d, T) << 24)
    return word & live


@triton.jit
def _byte(v, T: tl.constexpr):
    return convert(v, T).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _row_tile(
    v, out, inside, scale, scale_mask, stride_sk, amax, pn,
    KIND: tl.constexpr, BLOCK: tl.constexpr, BI: tl.constexpr, BN: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Quantise every fourth row of a tile in row layout: v [BI, BN] to out; scale points at (row,
    block 0)."""
    if KIND == "block" and BLOCK == BN:
        scale += pn.to(tl.int64) * stride_sk
        s, inverse, live = to_scale(amax_bits(to_magnitude(v, T), 1), T, scale, scale_mask)
        store_scale(scale, s, scale_mask)
        inverse, live = inverse[:, None], live[:, None]
    elif KIND == "block":
        groups: tl.constexpr = BN // BLOCK
        bits = amax_bits(tl.reshape(to_magnitude(v, T), [BI, groups, BLOCK]), 2)
        scale += (pn * groups).to(tl.int64) * stride_sk
        block = tl.arange(0, groups).to(tl.int64)
        scale = scale[:, None] + block[None, :] * stride_sk
        s, inverse, live = to_scale(bits, T, scale, scale_mask)
        store_scale(scale, s, scale_mask)
        # The compiler does not see that a group's mask is one for a whole vector: select here, not
        # in the store.
        v = tl.reshape(v, [BI, groups, BLOCK])
        v = tl.reshape(tl.where(live[:, :, None] != 0, v * inverse[:, :, None], 0.0), [BI, BN])
        inverse, live = 1.0, -1
    else:
        s, inverse, live = to_scale(amax, T, scale, scale_mask)
        if KIND == "vector":
            store_scale(scale, s, scale_mask & (pn == 0))
            inverse, live = inverse[:, None], live[:, None]
    store_row(out, v * inverse, live, inside, T)


@triton.jit
def _store_words(out, words, i, j, w, c, W, K, EVEN: tl.constexpr):
    """Words i by rows j from ``out``, which are words w of W and rows c of K. EVEN: all inside."""
    out = out.to(tl.pointer_type(tl.int32), bitcast=True) + (j[:, None] * W + i[None, :])
    inside = None if EVEN else (c[:, None] < K) & (w[None, :] < W)
    tl.store(out, words, mask=inside, eviction_policy="evict_first")


@triton.jit
def _store_bytes(out, words, r, c, M, K):
    """The four bytes of words, the first of them r of M in rows c of K, to any address."""
    r, inside = r[None, :], c[:, None] < K
    tl.store(out, words.to(tl.uint8), mask=inside & (r < M))
    tl.store(out + 1, (words >> 8).to(tl.uint8), mask=inside & (r + 1 < M))
    tl.store(out + 2, (words >> 16).to(tl.uint8), mask=inside & (r + 2 < M))
    tl.store(out + 3, (words >> 24).to(tl.uint8), mask=inside & (r + 3 < M))


@triton.jit
def scale_strides(ROWS, INNER, KIND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr):
    """Of scales [E, rows, blocks], as ``scaling.scale_strides`` has them, of data [E, ROWS, INNER]
    in one layout; its blocks are BLOCK_R x BLOCK if they are "square", else rows of BLOCK."""
    if KIND == "square":
        blocks = tl.cdiv(INNER, BLOCK)
        e, m, k = tl.cast(tl.cdiv(ROWS, BLOCK_R), tl.int64) * blocks, blocks, 1
    elif KIND == "block":
        e, m, k = tl.cast(tl.cdiv(INNER, BLOCK), tl.int64) * ROWS, 1, ROWS
    elif KIND == "vector":
        e, m, k = ROWS, 1, 1
    else:
        e, m, k = 1, 1, 1
    return e, m, k


@triton.jit
def store_tile(
    v0, v1, v2, v3, r, c, pm, pn, e,
    row, row_scale, row_amax, col, col_scale, col_amax, M, K,
    row_scale_e, row_scale_m, row_scale_k, col_scale_e, col_scale_m, col_scale_k,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr,
    ROW_T: tl.constexpr, COL_T: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Quantise tile (pm, pn) of expert e, rows r, r + 1, r + 2 and r + 3 by columns c, and store it
    in one or both layouts. EVEN: all of them are inside. WORDS: M is known to be a multiple of 16,
    else it is looked at: it is no constant. Scales of neighbouring rows of a layout are neighbours
    in memory, but those of squares."""
    BI: tl.constexpr = BM // 4
    # A tile's corner is addressed in 64 bits; inside it 32 suffice, as rows are shorter than 2^23.
    i, j = tl.arange(0, BI), tl.arange(0, BN)
    top, left = (pm * BM).to(tl.int64), (pn * BN).to(tl.int64)
    if EVEN:
        m0, m1, m2, m3, c_inside = None, None, None, None, None
    else:
        c_inside = c < K
        m0 = (r[:, None] < M) & c_inside[None, :]
        m1 = (r[:, None] + 1 < M) & c_inside[None, :]
        m2 = (r[:, None] + 2 < M) & c_inside[None, :]
        m3 = (r[:, None] + 3 < M) & c_inside[None, :]
    if COL == "block" or COL == "square" or ROW == "square":
        T: tl.constexpr = ROW_T if COL == "none" else COL_T
        highest = larger(
            larger(to_magnitude(v0, T), to_magnitude(v1, T)),
            larger(to_magnitude(v2, T), to_magnitude(v3, T)),
        )
    if COL == "square" or ROW == "square":
        tile_amax = tl.max(amax_bits(highest, 1), 0)

    if COL != "none":
        scale_at = col_scale + e * col_scale_e + left + j
        if COL == "block" and COL_BLOCK == BM:
            scale_at += pm.to(tl.int64) * col_scale_k
            s, inverse, live = to_scale(amax_bits(highest, 0), COL_T, scale_at, c_inside)
            store_scale(scale_at, s, c_inside)
            inverse, live = inverse[None, :], live[None, :]
        elif COL == "block":
            groups: tl.constexpr = BM // COL_BLOCK
            bits = amax_bits(tl.reshape(highest, [groups, COL_BLOCK // 4, BN]), 1)
            block = pm * groups + tl.arange(0, groups)
            scale_inside = None if EVEN else (block[:, None] * COL_BLOCK < M) & (c[None, :] < K)
            scale_at += (pm * groups).to(tl.int64) * col_scale_k
            scale_at = scale_at[None, :] + tl.arange(0, groups)[:, None] * col_scale_k
            s, inverse, live = to_scale(bits, COL_T, scale_at, scale_inside)
            store_scale(scale_at, s, scale_inside)
            inverse = tl.reshape(
                tl.broadcast_to(inverse[:, None, :], [groups, COL_BLOCK // 4, BN]), [BI, BN]
            )
            live = tl.reshape(
                tl.broadcast_to(live[:, None, :], [groups, COL_BLOCK // 4, BN]), [BI, BN]
            )
        elif COL == "vector":
            bits = tl.load(col_amax + e * K + c, mask=c < K, other=0)
            s, inverse, live = to_scale(bits, COL_T, scale_at, c < K)
            if pm == 0:
                store_scale(scale_at, s, c < K)
            inverse, live = inverse[None, :], live[None, :]
        else:
            scale_at = col_scale + e * col_scale_e + pn * col_scale_m + pm * col_scale_k
            bits = tl.load(col_amax + e) & 0x7FFFFFFF if COL == "tensor" else tile_amax
            if COL == "tensor":
                scale_at = col_scale + e
            s, inverse, live = to_scale(bits, COL_T, scale_at)
            if COL == "square" or ((pm == 0) & (pn == 0)):
                store_scale(scale_at, s, None)
        t0, t1, t2, t3 = v0 * inverse, v1 * inverse, v2 * inverse, v3 * inverse
        words = tl.trans(pack(t0, t1, t2, t3, live, COL_T))
        out = col.to(tl.pointer_type(tl.uint8), bitcast=True) + e * K * M + left * M + top
        if WORDS or M % 16 == 0:
            # Written so that the compiler sees accesses of 16 bytes, and masks as wide.
            _store_words(out, words, i, j, pm * BI + i, c, M // 16 * 4, K, EVEN)
        elif M % 4 == 0:
            _store_words(out, words, i, j, pm * BI + i, c, M // 4, K, EVEN)
        else:
            _store_bytes(out + j[:, None] * M + 4 * i[None, :], words, r, c, M, K)

    if ROW != "none":
        out = row + e * M * K + top * K + left + 4 * i[:, None] * K + j[None, :]
        scale_at = row_scale + e * row_scale_e + top + 4 * i
        a0, a1, a2, a3 = 0, 0, 0, 0
        s0, s1, s2, s3 = None, None, None, None
        if ROW == "block" and EVEN:
            pass
        elif ROW == "block" and ROW_BLOCK == BN:
            s0, s1, s2, s3 = r < M, r + 1 < M, r + 2 < M, r + 3 < M
        elif ROW == "block":
            inside = ((pn * (BN // ROW_BLOCK) + tl.arange(0, BN // ROW_BLOCK)) * ROW_BLOCK < K)[
                None, :
            ]
            s0 = (r[:, None] < M) & inside
            s1 = (r[:, None] + 1 < M) & inside
            s2 = (r[:, None] + 2 < M) & inside
            s3 = (r[:, None] + 3 < M) & inside
        elif ROW == "vector":
            a0 = tl.load(row_amax + e * M + r, mask=r < M, other=0)
            a1 = tl.load(row_amax + e * M + r + 1, mask=r + 1 < M, other=0)
            a2 = tl.load(row_amax + e * M + r + 2, mask=r + 2 < M, other=0)
            a3 = tl.load(row_amax + e * M + r + 3, mask=r + 3 < M, other=0)
            s0, s1, s2, s3 = r < M, r + 1 < M, r + 2 < M, r + 3 < M
        elif ROW == "tensor":
            a0 = tl.load(row_amax + e) & 0x7FFFFFFF
            scale_at = row_scale + e
            s, _, _ = to_scale(a0, ROW_T, scale_at)
            if (pm == 0) & (pn == 0):
                store_scale(scale_at, s, None)
            a1, a2, a3 = a0, a0, a0
        else:
            a0 = tile_amax
            scale_at = row_scale + e * row_scale_e + pm * row_scale_m + pn * row_scale_k
            s, _, _ = to_scale(a0, ROW_T, scale_at)
            store_scale(scale_at, s, None)
            a1, a2, a3 = a0, a0, a0
        at0, at1, at2, at3 = scale_at, scale_at, scale_at, scale_at
        if ROW == "block" or ROW == "vector":
            at1, at2, at3 = scale_at + 1, scale_at + 2, scale_at + 3
        _row_tile(v0, out, m0, at0, s0, row_scale_k, a0, pn, ROW, ROW_BLOCK, BI, BN, ROW_T)
        _row_tile(v1, out + K, m1, at1, s1, row_scale_k, a1, pn, ROW, ROW_BLOCK, BI, BN, ROW_T)
        _row_tile(v2, out + 2 * K, m2, at2, s2, row_scale_k, a2, pn, ROW, ROW_BLOCK, BI, BN, ROW_T)
        _row_tile(v3, out + 3 * K, m3, at3, s3, row_scale_k, a3, pn, ROW, ROW_BLOCK, BI, BN, ROW_T)


@triton.jit
def load_four(source, next_row, r, c, M, K, EVEN: tl.constexpr):
    """Rows r, r + 1, r + 2 and r + 3 by columns c of a matrix [M, K] as float32, 0 outside it;
    ``source`` points at the first. EVEN: all are inside."""
    if EVEN:
        v0 = tl.load(source, eviction_policy="evict_first")
        v1 = tl.load(source + next_row, eviction_policy="evict_first")
        v2 = tl.load(source + 2 * next_row, eviction_policy="evict_first")
        v3 = tl.load(source + 3 * next_row, eviction_policy="evict_first")
    else:
        rows, inside = r[:, None], c[None, :] < K
        v0 = tl.load(source, mask=(rows < M) & inside, other=0.0)
        v1 = tl.load(source + next_row, mask=(rows + 1 < M) & inside, other=0.0)
        v2 = tl.load(source + 2 * next_row, mask=(rows + 2 < M) & inside, other=0.0)
        v3 = tl.load(source + 3 * next_row, mask=(rows + 3 < M) & inside, other=0.0)
    return v0.to(tl.float32), v1.to(tl.float32), v2.to(tl.float32), v3.to(tl.float32)
