"""The SwiGLU experts of a mixture-of-experts layer in FP8 as one autograd function: every cast of x
and of its gradients is made once for all products.

    y[rows of e] = (silu(x @ w_gate[e]) * (x @ w_up[e])) @ w_down[e]

Shape letters: R rows, sorted by expert; E experts; D model width, F hidden width; T tokens, k
experts for each. offs holds where each expert's rows end; gx, gy, gh are the gradients of x, of y
and of h = silu(..) * (..). Every GEMM follows the recipe's rule of its kind, as in
``float8.grouped_mm``.

With a routing, x holds tokens as they came, and the result is of those tokens: the function moves
them to their rows as it casts them, and sums each token's rows of y. For backward it keeps the
tokens, not their k times as many rows, which it casts again for wgrad.

The casts of h and of the gradients of gate and up are fused with what makes them, but for a frozen
matrix of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .grouped import (
    Columns,
    cast_groups,
    grouped_operand,
    grouped_plans,
    multiply_columns,
    multiply_rows,
    plain,
    run_grouped_mm,
    stack_for_dgrad,
    stack_layouts,
)
from .kernels import fused_grouped as _fused_grouped  # noqa: F401 (registers)
from .kernels.fused import swiglu_backward
from .kernels.quantize import CastPlan
from .linear import NOT_CACHED, Cached, Parts, refuse_second_derivative, settings, whole
from .mlp import silu_times
from .permute import Routing, permute, unpermute
from .recipe import ROWWISE, Plan, Plans, Recipe, check_recipe
from .tensor import refuse_functorch

_NOTHING: tuple[None, None] = (None, None)
_NO_COLUMNS: Columns = (None, None, None)


class Rules(NamedTuple):
    """How the experts run on a device."""

    forward: Plan
    dgrad: Plan
    wgrad: Plan
    save_weights: bool


class _SwigluExperts(torch.autograd.Function):
    """Saved for backward: x in FP8 in the layout that wgrad needs; gate and up as they are; h in
    FP8 for wgrad; the weights as parameters, or their copies for dgrad. With a routing: the tokens
    in place of x in FP8, where their rows are, the scores, and y for the scores' gradient. Each
    only if a requested gradient needs it, but for the routing and the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [R, D]; with a routing [T, D]; and so is the result
        scores_Tk: Tensor | None,
        offs: Tensor,
        routing: Routing | None,
        down_EFD: Tensor,
        rules: Rules,
        cached: Sequence[Cached],  # of w_down, then of each of ``into``
        *into: Tensor,  # gate and up [E, D, F], or both in one [E, D, 2 F]
    ) -> Tensor:
        dtype, (forward, dgrad, wgrad, save_weights) = x.dtype, rules
        needs_x, needs_scores, _, _, needs_down, _, _, *needs_into = ctx.needs_input_grad
        into_hidden = needs_x or any(needs_into)  # where gradients pass through
        keep_x = wgrad.b if any(needs_into) else None
        keep_h = wgrad.b if needs_down else None

        x_t: Columns
        position = source = None
        if routing is None:
            rows, x_t = cast_groups(x, offs, forward.a, keep_x)
        else:
            position, source = routing.position, routing.source
            rows = _cast_tokens(x, routing, forward.a)
            x_t = _NO_COLUMNS if keep_x is None else (x, None, None)
        products: list[Tensor] = []
        saved: list[Tensor | None] = []
        for w_EDN, copies in zip(into, cached[1:], strict=True):
            w, w_t = stack_layouts(
                w_EDN, forward.b, dgrad.b if needs_x else None, save_weights, copies
            )
            products.append(multiply_rows(rows, w, offs, forward, dtype))
            saved += w_t if needs_x else _NOTHING
        del rows, w
        gate_RF, up_RF = halves(products)
        h, h_t = _cast_hidden(gate_RF, up_RF, offs, forward.a, keep_h)
        w, w_t = stack_layouts(
            down_EFD, forward.b, dgrad.b if into_hidden else None, save_weights, cached[0]
        )
        y_RD = multiply_rows(h, w, offs, forward, dtype)

        ctx.save_for_backward(
            offs,
            position,
            source,
            scores_Tk,
            y_RD if needs_scores else None,
            *x_t,
            *h_t,
            *(w_t if into_hidden else _NOTHING),
            *saved,
            *(products if into_hidden else ()),
        )
        ctx.rules, ctx.dtype = rules, dtype
        # Of each weight's gradient, the dtype and what it is added to.
        ctx.gradients = [
            (w.dtype, total) for w, (_, _, total) in zip((down_EFD, *into), cached, strict=True)
        ]
        if routing is None:
            return y_RD
        y_TD: Tensor = torch.ops.float8.unpermute(y_RD, position, scores_Tk)
        return y_TD

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("float8.swiglu_experts")
        offs, position, source, scores_Tk, y_RD, *saved = ctx.saved_tensors
        # From here on memory is free, in eager code, when nothing in this function names it.
        ctx.maybe_clear_saved_tensors()
        dtype, (_, dgrad, wgrad, _) = ctx.dtype, ctx.rules
        needs_x, needs_scores, _, _, needs_down, _, _, *needs_into = ctx.needs_input_grad
        count = len(needs_into)
        x_t, h_t, w_down = tuple(saved[:3]), tuple(saved[3:6]), tuple(saved[6:8])
        weights, products = saved[8 : 8 + 2 * count], saved[8 + 2 * count :]
        del saved
        into_hidden = needs_x or any(needs_into)
        g_x = g_scores = g_down = None
        g_into: list[Tensor | None] = [None] * count

        if position is not None:
            gy, g_scores = torch.ops.float8.unpermute_backward(
                gy, y_RD, position, source, scores_Tk
            )
            g_scores = g_scores.to(scores_Tk.dtype) if needs_scores else None
            del y_RD
        g, gy_t = cast_groups(
            gy, offs, dgrad.a if into_hidden else None, wgrad.a if needs_down else None
        )
        del gy
        if into_hidden:
            gh_RF = multiply_rows(g, stack_for_dgrad(w_down, dgrad), offs, dgrad, dtype)
            del g, w_down
            rows, columns = (dgrad.a if needs_x else None), (wgrad.a if any(needs_into) else None)
            casts = _cast_gradients(gh_RF, products, offs, rows, columns)
            g_rows, g_columns = zip(*casts, strict=True)
            del gh_RF, products, casts
            # Before the weights' gradients, which are the largest of all: what only this multiplies
            # then makes room for them, and so do rows that become tokens again.
            for i in range(count if needs_x else 0):
                w = stack_for_dgrad((weights[2 * i], weights[2 * i + 1]), dgrad)
                part = multiply_rows(g_rows[i], w, offs, dgrad, dtype)
                g_x = part if g_x is None else g_x.add_(part)
                del w, part
            del g_rows, weights
            if g_x is not None and position is not None:
                g_x = torch.ops.float8.unpermute(g_x, position)
            if position is not None and any(needs_into):
                x_RD = torch.ops.float8.permute(x_t[0], position, source)
                x_t = cast_groups(x_RD, offs, None, wgrad.b)[1]
                del x_RD
            for i, g_t in enumerate(g_columns):
                if needs_into[i]:
                    g_into[i] = multiply_columns(g_t, x_t, wgrad, *ctx.gradients[1 + i])
            del x_t, g_columns, g_t
        if needs_down:  # the last, since beside all gradients it has the least to multiply
            g_down = multiply_columns(gy_t, h_t, wgrad, *ctx.gradients[0])
        return g_x, g_scores, None, None, g_down, None, None, *g_into


_experts = whole(_SwigluExperts)


def _cast_tokens(x_TD: Tensor, routing: Routing, cast: CastPlan) -> Parts:
    """``cast_groups`` of the tokens' rows, which reach memory in FP8 alone where a scale is of one
    row."""
    position, source, offs, _ = routing
    if cast.block[0] != 1:
        x_RD = torch.ops.float8.permute(x_TD, position, source)
        return cast_groups(x_RD, offs, cast, None)[0]
    data, scale = torch.ops.float8.permute_quantize(
        x_TD, position, source, cast.block, cast.dtype, cast.scale_mode
    )
    return data, scale


def halves(products: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gate and up of their products, which may be one [R, 2 F]."""
    gate, up = products if len(products) == 2 else products[0].chunk(2, -1)
    return gate, up


def _cast_hidden(
    gate: Tensor, up: Tensor, offs: Tensor, cast: CastPlan, cast_t: CastPlan | None
) -> tuple[Parts, Columns]:
    """``cast_groups`` of silu(gate) * up."""
    if cast_t is None:
        *h, _, _ = torch.ops.float8.swiglu_quantize(gate, up, *settings(cast), *settings(None))
        return (h[0], h[1]), _NO_COLUMNS
    data, scale, *columns = torch.ops.float8.swiglu_quantize_grouped(
        gate, up, offs, *settings(cast), *settings(cast_t)
    )
    return (data, scale), tuple(columns)


def _cast_gradients(
    gh: Tensor,
    products: Sequence[Tensor],
    offs: Tensor,
    cast: CastPlan | None,
    cast_t: CastPlan | None,
) -> list[tuple[Parts, Columns]]:
    """``cast_groups`` of the gradient of each product, given that of h."""
    gate, up = halves(products)
    joint = len(products) == 1
    if cast_t is None and joint:
        return [cast_groups(torch.cat(swiglu_backward(gh, gate, up), -1), offs, cast, None)]
    if cast_t is None:
        data, scale, _, _ = torch.ops.float8.swiglu_backward_quantize(
            gh, gate, up, *settings(cast), *settings(None)
        )
        return [((data[i], scale[i]), _NO_COLUMNS) for i in (0, 1)]
    data, scale, data_t, scale_t, offs_t = torch.ops.float8.swiglu_backward_quantize_grouped(
        gh, gate, up, offs, joint, *settings(cast), *settings(cast_t)
    )
    if joint:
        return [((data, scale), (data_t, scale_t, offs_t))]
    return [
        (_NOTHING if cast is None else (data[i], scale[i]), (data_t[i], scale_t[i], offs_t))
        for i in (0, 1)
    ]


def swiglu_experts(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    offs: Tensor,
    *,
    recipe: Recipe = ROWWISE,
) -> Tensor:
    """``(silu(x @ w_gate[e]) * (x @ w_up[e])) @ w_down[e]`` for the rows of each expert e, in FP8,
    forward and backward, as ``recipe`` says; differentiable once.

    Args:
        x: [R, D] bf16, fp16 or fp32, rows sorted by expert.
        w_gate, w_up: [E, D, F]; w_down: [E, F, D]; of x's dtype, or any under autocast, which casts
            x; any strides: often ``weight.mT`` of parameters [E, N, K]. With ``w_up=None`` w_gate
            is [E, D, 2 F], gate's columns before up's: one product instead of two, scaled as one.
        offs: int32 [E] on x's device: where each expert's rows end, as ``grouped_mm`` takes it.

    Returns: [R, D] of x's dtype: what ``grouped_mm`` gives for each product, with x cast and kept
        once for both. Rows of no expert are zero, as is their gradient, whatever x and the gradient
        hold there; the gradients of an expert without rows are exactly zero.

    Raises:
        ValueError, NotImplementedError: as ``float8.grouped_mm``.
    """
    check_recipe(recipe)
    given = [w_down, w_gate] if w_up is None else [w_down, w_gate, w_up]
    weights = [plain(w) for w in given]
    plans = grouped_plans(recipe, x.device)
    return run_swiglu_experts(x, weights, offs, recipe, plans, [NOT_CACHED] * len(weights))


def run_swiglu_experts(
    x: Tensor,
    weights: Sequence[Tensor],
    offs: Tensor,
    recipe: Recipe,
    plans: Plans,
    cached: Sequence[Cached],
    routed: tuple[Routing, Tensor] | None = None,
) -> Tensor:
    """``swiglu_experts`` by these plans. ``weights``: down, then gate and up or both in one;
    ``cached``: FP8 copies of each; ``routed``: a routing of tokens x [T, D], whose offs these are,
    and scores [T, k]. The result is then that of ``permute``, the experts and ``unpermute``, bit
    for bit."""
    refuse_functorch("float8.swiglu_experts", "float8.revert(model) first")
    down, *into = weights
    _check_shapes(x, down, into)
    given = x
    for w in weights:
        x = grouped_operand(given, w)
    forward, dgrad, wgrad = plans
    if forward is None or dgrad is None or wgrad is None:
        x_RD = x if routed is None else permute(x, routed[0])
        pairs = zip(into, cached[1:], strict=True)
        gate, up = halves(
            [run_grouped_mm(x_RD, w, offs, recipe, plans, copies) for w, copies in pairs]
        )
        y_RD = run_grouped_mm(silu_times(gate, up), down, offs, recipe, plans, cached[0])
        return y_RD if routed is None else unpermute(y_RD, *routed)
    rules = Rules(forward, dgrad, wgrad, recipe.weight_for_dgrad == "save")
    routing, scores = routed or (None, None)
    y: Tensor = _experts(x, scores, offs, routing, down, rules, cached, *into)
    return y


def _check_shapes(x: Tensor, down: Tensor, into: Sequence[Tensor]) -> None:
    """Raise ValueError for what is no problem of experts. The ops check offs."""
    came = [tuple(t.shape) for t in (x, *into, down)]
    if x.ndim == 2 and down.ndim == 3:
        experts, hidden, dim = down.shape
        wide = hidden * 2 if len(into) == 1 else hidden
        if x.shape[1] == dim and all(w.shape == (experts, dim, wide) for w in into):
            return
    needed = "(E, D, 2 F)" if len(into) == 1 else "(E, D, F), (E, D, F)"
    raise ValueError(
        f"x and weights of shapes {', '.join(map(str, came))} make no SwiGLU experts; needed "
        f"(T, D), {needed} and (E, F, D)"
    )
