"""Tokens to their experts and back, differentiable: what stands before and after
``float8.grouped_mm``. The ops and their formulas: ``float8/kernels/permute.py``, whose letters
these are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kernels import permute as _ops  # noqa: F401 (registers)
from .linear import refuse_second_derivative, whole
from .tensor import refuse_functorch


class Routing(NamedTuple):
    """Where the rows of each expert lie; T tokens, k experts for each, E experts, R rows."""

    position: Tensor  # int32 [T, k], the row of each pair of token and expert; -1 for none
    source: Tensor  # int32 [R], the pair t * k + j of each row; -1 for none
    offs: Tensor  # int32 [E], where each expert's rows end, as grouped products take it
    counts: Tensor  # int32 [E], the pairs of each expert


def route(indices: Tensor, experts: int, *, align: int = 1) -> Routing:
    """The rows of tokens that are put together by expert, in the order of the tokens.

    Args:
        indices: int64 or int32 [T, k], the experts of each token, as ``torch.topk`` of a router's
            scores gives them; -1 for a pair that has none.
        experts: how many there are.
        align: every expert's rows are padded to a multiple of it, 1 to 128.

    Returns: a Routing, on the device of indices, which nothing waits for (but the reference, which
        looks for experts that there are not). Its number of rows R is the most that any indices of
        this shape can need.

    Raises:
        ValueError: an argument is none of these.
    """
    return Routing(*torch.ops.float8.route(indices, experts, align))


class _Permute(torch.autograd.Function):
    """Saved for backward: position."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, position: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        rows: Tensor = torch.ops.float8.permute(x, position, source)
        return rows

    @staticmethod
    def backward(ctx: Any, g_rows: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("float8.permute")
        (position,) = ctx.saved_tensors
        return torch.ops.float8.unpermute(g_rows, position), None, None


class _Unpermute(torch.autograd.Function):
    """Saved for backward: where the rows are, the weights, and y for their gradient; each only if a
    requested gradient needs it."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, position: Tensor, source: Tensor, weights: Tensor | None
    ) -> Tensor:
        needs_weights = ctx.needs_input_grad[3]
        ctx.save_for_backward(position, source, weights, y if needs_weights else None)
        out: Tensor = torch.ops.float8.unpermute(y, position, weights)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("float8.unpermute")
        position, source, weights, y = ctx.saved_tensors
        if weights is None:
            return torch.ops.float8.permute(g, position, source), None, None, None
        g_y, g_weights = torch.ops.float8.unpermute_backward(g, y, position, source, weights)
        return g_y, None, None, None if y is None else g_weights.to(weights.dtype)


_permute = whole(_Permute)
_unpermute = whole(_Unpermute)


def permute(x: Tensor, routing: Routing) -> Tensor:
    """The rows of every expert's tokens, one expert after another; differentiable once.

    Args:
        x: [T, H] bf16, fp16 or fp32, any strides; leading dimensions flattened as in ``indices``.

    Returns: [R, H] of x's dtype; rows of padding, and those past the last expert's, are zero. The
        gradient of a token is the sum of those of its rows, in float32 in the order of its experts,
        rounded once.

    Raises:
        ValueError: x or routing does not fit.
        NotImplementedError: as ``float8.linear``.
    """
    refuse_functorch("float8.permute")
    rows: Tensor = _permute(x, routing.position, routing.source)
    return rows


def unpermute(y: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Each token's rows, times their weights, summed in float32 and rounded once; differentiable
    once.

    Args:
        y: [R, H] bf16, fp16 or fp32, any strides: what the experts made of the rows of ``permute``.
        weights: [T, k] bf16, fp16 or fp32, the routing weights; None for ones.

    Returns: [T, H] of y's dtype. A pair without an expert adds nothing. The gradient of padding is
        zero; that of weights is summed in float32.

    Raises:
        ValueError: y, routing or weights do not fit.
        NotImplementedError: as ``float8.linear``.
    """
    refuse_functorch("float8.unpermute")
    rows = routing.source.shape[0]
    if y.ndim == 2 and y.shape[0] != rows:
        raise ValueError(f"y is of shape {tuple(y.shape)}; it must have the {rows} rows of routing")
    out: Tensor = _unpermute(y, routing.position, routing.source, weights)
    return out
