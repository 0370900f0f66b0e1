"""The FP8 products of groups for Hopper (sm_90): the kernel behind ``impl="hopper"`` of
``float8.kernels.grouped``, which is that of ``matmul_hopper`` and walks groups that end where
offsets on the device say.

Shape letters as in ``grouped``: T tokens, G groups, P columns of a column layout; M rows and N
    columns of the output of a group, K the contraction.

The references are those of ``grouped``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..scaling import FULL, Block, scale_shape
from .grouped import scale_by_group, stacked
from .matmul_hopper import fits, kinds

MOST = 8192  # groups of rows, listed beside three buffers of operands


def multiply_rows(
    a_TK: Tensor,
    b_GNK: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    block_a: Block,
    block_b: Block,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """The rows of each group of a times that group's matrix of b, transposed; on a GPU of sm_90.

    Args:
        a_TK, b_GNK: FP8, e4m3 and e5m2 in any pair; copied if K is no multiple of 16 or the rows
            do not lie as TMA wants them. No size is 0.
        scale_a, scale_b: float32, ``scale_shape`` of a and b.
        offs: int32 [G], where each group's rows end; at most MOST.
        block_a, block_b: (1, FULL) or (FULL, FULL) and (1, 1 or FULL, FULL); or (1, 128) and
            (1, 1 or 128, 128).

    Returns: [T, N] ``out_dtype``; rows of no group are zero.

    Raises:
        ValueError: the operands do not fit (``matmul_hopper.fits``).
    """
    assert block_a[0] in (1, FULL) and block_b[0] == 1, (block_a, block_b)
    assert scale_a.shape == scale_shape(a_TK.shape, block_a), scale_a.shape
    assert scale_b.shape == scale_shape(b_GNK.shape, block_b), scale_b.shape
    assert len(offs) <= MOST, len(offs)
    a_TK, _ = stacked(a_TK[None])
    n = b_GNK.shape[1]
    b_RK, b_rows = stacked(b_GNK)
    out = a_TK.new_empty((a_TK.shape[0], n), dtype=out_dtype)
    scales = kinds(block_a, block_b[1:])
    _run(a_TK, b_RK, scale_a, scale_b, scales, fast_accum, out, False, "rows", offs, b_rows)
    return out


def multiply_columns(
    a_MP: Tensor,
    b_NP: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs_t: Tensor,
    block_a: Block,
    block_b: Block,
    out_dtype: torch.dtype,
    fast_accum: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Each group's columns of a times the same columns of b, transposed; on a GPU of sm_90.

    Args:
        a_MP, b_NP: FP8, e4m3 and e5m2 in any pair; copied if the rows do not lie as TMA wants them.
            No size is 0.
        scale_a, scale_b: float32; for blocks of whole groups [G, rows of blocks], else
            ``scale_shape`` of a and b.
        offs_t: int32 [G], where each group's columns end: multiples of GROUP_ALIGN.
        block_a, block_b: blocks of (1 or FULL, FULL), or of (1 or 128, 128), not 128 both.
        out: [G, M, N] ``out_dtype``, contiguous, to which the rounded products are added, as by
            ``matmul_hopper``.

    Returns: ``out``, or a new [G, M, N]; products of no columns are zero.

    Raises:
        ValueError: the operands do not fit (``matmul_hopper.fits``).
    """
    groups = offs_t.shape[0]
    (a_MP, _), (b_NP, _) = stacked(a_MP[None]), stacked(b_NP[None])
    accumulate = out is not None
    if out is None:
        out = a_MP.new_empty((groups, a_MP.shape[0], b_NP.shape[0]), dtype=out_dtype)
    assert out.shape == (groups, a_MP.shape[0], b_NP.shape[0]) and out.dtype == out_dtype, out.shape
    assert out.is_contiguous(), out.stride()
    scale_a, scale_b = scale_by_group(scale_a, block_a), scale_by_group(scale_b, block_b)
    rows, scales = out.view(-1, out.shape[2]), kinds(block_a, block_b)
    _run(a_MP, b_NP, scale_a, scale_b, scales, fast_accum, rows, accumulate, "columns", offs_t, 0)
    return out


def _run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    scales: tuple[str, str],
    fast_accum: bool,
    out: Tensor,
    accumulate: bool,
    kind: str,
    offs: Tensor,
    b_rows: int,
) -> None:
    if (reason := fits(a, b)) is not None:
        raise ValueError(f"impl='hopper' cannot multiply these groups: {reason}")
    from .matmul_hopper_triton import Groups, multiply

    groups = Groups(kind, offs.contiguous(), b_rows)
    multiply(a, b, scale_a, scale_b, scales, fast_accum, None, out, accumulate, groups)
