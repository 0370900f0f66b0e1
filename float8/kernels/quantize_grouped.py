"""Tokens that are sorted by group (expert) to FP8, for K-grouped GEMMs (wgrad):
``torch.ops.float8.quantize_grouped``. The body below is the reference and the specification; a GPU
runs Triton kernels that give the same bytes, where ``triton_refusal`` does not say otherwise.

Letters: T tokens (rows of x), K features, G groups, P columns of the column layout.

    x       [T, K]   group g is rows offs[g-1]..offs[g]; rows from offs[G-1] on are of no group
    data_t  [K, P]   columns offs_t[g-1]..offs_t[g]: group g transposed, then zeros up to a multiple
                     of GROUP_ALIGN columns; zeros from offs_t[G-1] on

The contraction of a K-grouped GEMM runs over one group's columns in steps of 128, and TMA wants the
start of a copy on 16 bytes of the contiguous axis: hence the alignment. P depends on T and G alone,
so that no size waits for the device.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..scaling import (
    FULL,
    Block,
    as_bytes,
    block_name,
    check_scale_mode,
    num_blocks,
    scale_dtype,
    scale_layout,
    scale_shape,
    scale_strides,
)
from .quantize import CastPlan, check_cast, check_devices, check_layout, quantize, triton_refusal

GROUP_ALIGN = 128
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

_LIB = torch.library.Library("float8", "FRAGMENT")
_LIB.define(
    "quantize_grouped(Tensor x, Tensor offs, int[]? block, ScalarType? dtype, str? scale_mode, "
    "int[] block_t, ScalarType dtype_t, str scale_mode_t) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def quantize_grouped(
    x: Tensor,
    offs: Tensor,
    block: Block | None,
    dtype: torch.dtype | None,
    scale_mode: str | None,
    block_t: Block,
    dtype_t: torch.dtype,
    scale_mode_t: str,
) -> Outputs:
    """``quantize`` of x, and of every group's transpose into one aligned matrix.

    Args:
        x: [T, K], bf16, fp16 or fp32, any strides.
        offs: int32 [G], where each group's rows end, as torch's grouped_mm takes them: from 0 to T,
            never less than the one before. The last may be less than T.
        block, dtype, scale_mode: the cast of x as ``quantize`` takes it; three None: none.
        block_t, dtype_t, scale_mode_t: the cast of a group's transpose [K, tokens]. Along tokens a
            block is FULL, the whole group, or divides GROUP_ALIGN, so that none crosses groups.

    Returns:
        data, scale: ``quantize(x, block, dtype, scale_mode)``; without it, empty tensors.
        data_t: ``dtype_t`` [K, P], P = ``padded_tokens(T, G)``.
        scale_t: for blocks (b, FULL) [G, ceil(K / b)], a row per group; for others
            [ceil(K / b), P / tokens of a block] in ``scale_layout``. A group without tokens, and a
            block of padding, have the scale of a zero block.
        offs_t: int32 [G], where each group's columns end; a group without tokens has none.

    Raises:
        ValueError: an argument is none of these. Only the reference looks into offs, and not if x
            has no rows; the kernels do not wait for its values. If these fall, or pass T, what the
            kernels write into their outputs is undefined; they write nowhere else.
    """
    row, col = check_grouped(x, offs, block, dtype, scale_mode, block_t, dtype_t, scale_mode_t)
    rows, features = x.shape
    ends = offs.tolist() if rows else [0] * len(offs)
    if any(end < start for start, end in pairwise([0, *ends, rows])):
        raise ValueError(
            f"offs holds {ends}; it must hold the row where each group ends: never less than the "
            f"one before, and between 0 and the {rows} rows of x"
        )
    parts, widths = [], []
    for start, end in pairwise([0, *ends]):
        widths.append((end - start + GROUP_ALIGN - 1) // GROUP_ALIGN * GROUP_ALIGN)
        parts.append(quantize(F.pad(x[start:end].t(), (0, widths[-1] - (end - start))), *col))
    rest = x.new_zeros(features, padded_tokens(rows, len(ends)) - sum(widths))
    parts.append(quantize(rest, *col))
    # Autocast would bring what is joined to one dtype, and knows none of one byte.
    with torch.autocast(x.device.type, enabled=False):
        data_t = join([data for data, _ in parts], 1)
        if col.block[1] == FULL:
            scale_t = join([scale.t() for _, scale in parts[:-1]], 0)
        else:
            scale_t = scale_layout(join([scale for _, scale in parts], 1), col.block)
    return (
        *(no_rows(x) if row is None else quantize(x, *row)),
        data_t,
        scale_t,
        torch.tensor(list(accumulate(widths)), dtype=torch.int32, device=x.device),
    )


def join(parts: list[Tensor], dim: int) -> Tensor:
    """``torch.cat`` as bytes: on a GPU torch joins only some 8-bit types."""
    return torch.cat([as_bytes(part) for part in parts], dim).view(parts[0].dtype)


def padded_tokens(tokens: int, groups: int, align: int = GROUP_ALIGN) -> int:
    """P: the most that the column layout of so many tokens in so many groups can need. All groups
    but one of a single token need exactly that."""
    longest = align - 1  # what padding adds to a group that is not empty
    padded: int = (tokens + longest * torch.sym_min(groups, tokens)) // align * align
    return padded


def check_grouped(
    x: Tensor,
    offs: Tensor,
    block: Block | None,
    dtype: torch.dtype | None,
    scale_mode: str | None,
    block_t: Block,
    dtype_t: torch.dtype,
    scale_mode_t: str,
) -> tuple[CastPlan | None, CastPlan]:
    """The two casts; ValueError for what the op does not take."""
    if x.ndim != 2:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; groups are rows of a matrix [tokens, features], so "
            "flatten the leading dimensions"
        )
    if offs.dtype != torch.int32 or offs.ndim != 1 or offs.shape[0] == 0:
        raise ValueError(
            f"offs is {offs.dtype} of shape {tuple(offs.shape)}; it must be torch.int32 of shape "
            "(groups,), with where each group's rows end"
        )
    check_devices(x, offs)
    col = CastPlan(tuple(block_t), dtype_t, scale_mode_t)
    check_cast(x, col.block, dtype_t)
    check_scale_mode(scale_mode_t)
    if col.block[1] != FULL and GROUP_ALIGN % col.block[1]:
        raise ValueError(
            f"block_t {block_name(col.block)} would cross groups, which start at multiples of "
            f"{GROUP_ALIGN} columns; give FULL or a divisor of that along tokens"
        )
    return check_layout(x, block, dtype, scale_mode), col


def empty_rows(x: Tensor, shape: tuple[int, ...], row: CastPlan) -> tuple[Tensor, Tensor]:
    """What ``quantize`` returns of a matrix of ``shape`` on x's device, or of each of a stack,
    unwritten."""
    blocks = scale_shape(shape, (*(1,) * (len(shape) - 2), *row.block))
    return x.new_empty(shape, dtype=row.dtype), _empty_scale(x, blocks, row)


def empty_columns(
    x: Tensor, shape: tuple[int, ...], groups: int, col: CastPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """data_t, scale_t and offs_t of it, unwritten."""
    (*lead, tokens, features), (height, width) = shape, col.block
    padded, lines = padded_tokens(tokens, groups), num_blocks(features, height)
    blocks = (groups, lines) if width == FULL else (lines, padded // width)
    data = x.new_empty((*lead, features, padded), dtype=col.dtype)
    offs_t = x.new_empty((groups,), dtype=torch.int32)
    return data, _empty_scale(x, (*lead, *blocks), col), offs_t


def _empty_scale(x: Tensor, shape: tuple[int, ...], layout: CastPlan) -> Tensor:
    strides, dtype = scale_strides(shape, layout.block), scale_dtype(layout.scale_mode)
    return x.new_empty_strided(shape, strides, dtype=dtype)


def no_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """data and scale of a cast that is left out."""
    return x.new_empty(0), x.new_empty(0)


def empty_outputs(
    x: Tensor, shape: tuple[int, ...], offs: Tensor, row: CastPlan | None, col: CastPlan
) -> Outputs:
    """What the op returns of a matrix of ``shape`` on x's device, or of each of a stack,
    unwritten."""
    rows = no_rows(x) if row is None else empty_rows(x, shape, row)
    return (*rows, *empty_columns(x, shape, offs.shape[0], col))


def _quantize_grouped_gpu(x: Tensor, offs: Tensor, *casts: Any) -> Outputs:
    row, col = check_grouped(x, offs, *casts)
    if triton_refusal(x, col) is not None:
        return quantize_grouped(x, offs, *casts)
    from .quantize_grouped_triton import quantize_groups

    alike = row is not None and triton_refusal(x, row) is None
    rows, columns = quantize_groups(x, offs, row if alike else None, col)
    if rows is None:
        rows = no_rows(x) if row is None else torch.ops.float8.quantize(x, *row)
    return (*rows, *columns)


def _fake_quantize_grouped(x: Tensor, offs: Tensor, *casts: Any) -> Outputs:
    return empty_outputs(x, x.shape, offs, *check_grouped(x, offs, *casts))


_LIB.impl("quantize_grouped", quantize_grouped, "CPU")
_LIB.impl("quantize_grouped", _quantize_grouped_gpu, "CUDA")
torch.library.register_fake("float8::quantize_grouped", _fake_quantize_grouped, lib=_LIB)
