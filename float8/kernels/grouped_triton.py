"""Launches of ``matmul_triton``'s kernel for groups: what is behind ``impl="triton"`` of
``float8.kernels.grouped``, whose references and shape letters these are."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..devices import device_profile
from ..scaling import Block
from .grouped import scale_by_group, stacked
from .matmul_triton import Groups, Matmul, Part


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
    """[T, N] of operands, any strides, no size 0, where ``grouped.select`` has no objection.
    Scales are those of a and b in blocks (rows, K) and (1, rows, K)."""
    (a_TK, _), (b_RK, b_rows) = stacked(a_TK[None]), stacked(b_GNK)
    groups, n, _ = b_GNK.shape
    out = torch.empty((a_TK.shape[0], n), dtype=out_dtype, device=a_TK.device)
    sizes, blocks = Groups("rows", groups, b_rows, n), (block_a, block_b[:0:-1])
    _run(a_TK, b_RK, scale_a, scale_b.mT, offs, *blocks, fast_accum, out, sizes)
    return out


def multiply_columns(
    a_NP: Tensor,
    b_KP: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs_t: Tensor,
    block_a: Block,
    block_b: Block,
    out_dtype: torch.dtype,
    fast_accum: bool,
    out: Tensor | None = None,
) -> Tensor:
    """[G, N, K] of operands, any strides, no size 0, where ``grouped.select`` has no objection; or
    added to ``out``, contiguous."""
    (a_NP, _), (b_KP, _) = stacked(a_NP[None]), stacked(b_KP[None])
    groups, n, k = offs_t.shape[0], a_NP.shape[0], b_KP.shape[0]
    into = None if out is None else Part.of(out)
    if out is None:
        out = torch.empty((groups, n, k), dtype=out_dtype, device=a_NP.device)
    scale_a, scale_b = scale_by_group(scale_a, block_a), scale_by_group(scale_b, block_b)
    sizes, blocks = Groups("columns", groups, 0, k), (block_a, block_b[::-1])
    _run(a_NP, b_KP, scale_a, scale_b.mT, offs_t, *blocks, fast_accum, out, sizes, into)
    return out


def _run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    block_a: Block,
    block_b: Block,
    fast_accum: bool,
    out: Tensor,
    groups: Groups,
    into: Part | None = None,
) -> None:
    """Scales and blocks of b as of its transpose."""
    launch = _launch(
        Part.of(a), Part.of(b), Part.of(scale_a), Part.of(scale_b), block_a, block_b, out.dtype,
        fast_accum, a.device, device_profile(a.device), groups, into=into,
    )  # fmt: skip
    launch(a, b, scale_a, scale_b, out, offs.contiguous())


_launch = functools.lru_cache(maxsize=1024)(Matmul)
