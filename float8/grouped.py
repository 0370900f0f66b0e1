"""The grouped matrix product of mixture-of-experts layers in FP8: one autograd function, three
grouped GEMMs.

Shape letters: T tokens, sorted by group (expert); G groups; K in features; N out features. x input,
    w weights, g gradient of the output. offs holds where each group's rows end.

    forward  y_TN[rows of e]  = x_TK[rows of e] @ w_GKN[e]
    dgrad    gx_TK[rows of e] = g_TN[rows of e] @ w_GKN[e].T
    wgrad    gw_GNK[e]        = g_TN[rows of e].T @ x_TK[rows of e]
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .devices import DeviceProfile, assumed_device, device_profile
from .kernels.grouped import IMPLEMENTATIONS, WGRAD_IMPLEMENTATIONS, select, zero_tail
from .kernels.matmul import Operand
from .kernels.quantize import CastPlan
from .linear import (
    NOT_CACHED,
    Cached,
    Parts,
    cast_layouts,
    refuse_second_derivative,
    settings,
    weight_for_dgrad,
    weight_layouts,
    whole,
)
from .recipe import ROWWISE, Plan, Plans, Recipe, check_recipe
from .scaling import Block, scale_dtype
from .tensor import HIGH_PRECISION, Float8TrainingTensor, refuse_functorch
from .totals import give, give_product

Columns = tuple[Any, Any, Any]  # (data_t, scale_t, offs_t) of quantize_grouped; or Nones


def cast_groups(
    x_TK: Tensor, offs: Tensor, cast: CastPlan | None, cast_t: CastPlan | None
) -> tuple[Parts, Columns]:
    """FP8 parts of x, and of each group's transpose; Nones for a cast that is None."""
    if cast is not None and cast.block[0] != 1:
        # Rows of no group may hold anything, and must not decide about others' scales.
        x_TK = zero_tail(x_TK, offs)
    if cast_t is None:
        return cast_layouts(x_TK, cast, None)[0], (None, None, None)
    data, scale, data_t, scale_t, offs_t = torch.ops.float8.quantize_grouped(
        x_TK, offs, *settings(cast), *settings(cast_t)
    )
    return (None, None) if cast is None else (data, scale), (data_t, scale_t, offs_t)


def stack_layouts(
    w_GKN: Tensor, forward: CastPlan | None, dgrad: CastPlan | None, save: bool, cached: Cached
) -> tuple[Parts, Parts]:
    """FP8 parts [G, N, K] of weights for forward, and what backward is to have for dgrad: parts
    [G, K, N] where they are to be saved or cached already, else as ``weight_layouts``."""
    w, (w_t, other) = weight_layouts(w_GKN.mT, forward, dgrad, save, cached)
    return w, (w_t if w_t.itemsize == 1 else w_GKN, other)


def stack_for_dgrad(saved: Parts, dgrad: Plan) -> Parts:
    """The FP8 parts that dgrad multiplies, of what ``stack_layouts`` gave backward."""
    w, other = saved
    return saved if w.itemsize == 1 else weight_for_dgrad((w.mT, other), dgrad)


def multiply_rows(a: Parts, b: Parts, offs: Tensor, plan: Plan, dtype: torch.dtype) -> Tensor:
    """a [rows, contraction] times each group's b [columns, contraction] transposed."""
    lead, columns, inner = plan.b.block
    out: Tensor = torch.ops.float8.grouped_mm(
        a[0],
        b[0].mT,
        a[1],
        b[1].mT,
        offs,
        plan.a.block,
        (lead, inner, columns),
        dtype,
        plan.fast_accum,
        plan.impl,
    )
    return out


def multiply_columns(
    a: Columns, b: Columns, plan: Plan, dtype: torch.dtype, total_GNK: Tensor | None
) -> Tensor | None:
    """Each group's columns of a times the same columns of b, transposed, as the gradient [G, K, N]
    of weights; None where it has been added to ``total_GNK`` instead."""
    args, ops = (a[0], b[0], a[1], b[1], a[2], plan.a.block, plan.b.block), torch.ops.float8
    op, add_ = ops.grouped_wgrad, ops.grouped_wgrad_add_
    gw_GNK = give_product(op, add_, args, plan, dtype, total_GNK)
    return None if gw_GNK is None else gw_GNK.mT


class _GroupedMM(torch.autograd.Function):
    """Saved for backward: FP8 copies of x in the layout wgrad needs (x itself where wgrad is in
    high precision), and the weights, or their FP8 copies for dgrad; each only if a requested
    gradient needs it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        w_GKN: Tensor,
        offs: Tensor,
        plans: Plans,
        save_weight: bool,
        *cached: Any,  # what is Cached of w
    ) -> Tensor:
        dtype = x_TK.dtype
        needs_gx, needs_gw = ctx.needs_input_grad[:2]
        forward, dgrad, wgrad = plans
        keep_x = wgrad.b if needs_gw and wgrad is not None else None
        x, (x_t, x_t_scale, _) = cast_groups(x_TK, offs, forward and forward.a, keep_x)
        later = dgrad.b if needs_gx and dgrad is not None else None
        w, w_t = stack_layouts(w_GKN, forward and forward.b, later, save_weight, cached)
        if forward is None:
            y_TN: Tensor = torch.ops.float8.grouped_mm_hp(x_TK, w_GKN.to(dtype), offs)
        else:
            y_TN = multiply_rows(x, w, offs, forward, dtype)
        if needs_gw and wgrad is None:
            x_t = x_TK
        ctx.save_for_backward(x_t, x_t_scale, *(w_t if needs_gx else (None, None)), offs)
        ctx.plans, ctx.dtype, ctx.w_dtype, ctx.total = plans, dtype, w_GKN.dtype, cached[2]
        return y_TN

    @staticmethod
    def backward(ctx: Any, g_TN: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("float8.grouped_mm")
        x_t, x_t_scale, *w_t, offs = ctx.saved_tensors
        needs_gx, needs_gw = ctx.needs_input_grad[:2]
        dtype, (_, dgrad, wgrad) = ctx.dtype, ctx.plans
        g, g_t = cast_groups(
            g_TN,
            offs,
            dgrad.a if needs_gx and dgrad is not None else None,
            wgrad.a if needs_gw and wgrad is not None else None,
        )
        gx_TK = gw_GKN = None
        if needs_gx and dgrad is None:
            gx_TK = torch.ops.float8.grouped_mm_hp(g_TN, w_t[0].to(dtype).mT, offs)
        elif needs_gx:
            gx_TK = multiply_rows(g, stack_for_dgrad(w_t, dgrad), offs, dgrad, dtype)
        if needs_gw:
            if wgrad is None:
                gw_GNK = torch.ops.float8.grouped_mm_hp(g_TN.t(), x_t, offs).to(ctx.w_dtype)
                gw_GNK = give(gw_GNK, ctx.total)
                gw_GKN = None if gw_GNK is None else gw_GNK.mT
            else:
                x_t = x_t, x_t_scale, None
                gw_GKN = multiply_columns(g_t, x_t, wgrad, ctx.w_dtype, ctx.total)
        return gx_TK, gw_GKN, *[None] * 6


_grouped_mm = whole(_GroupedMM)


def grouped_plans(recipe: Recipe, device: torch.device) -> Plans:
    """``recipe.plan`` for groups: weights are stacks, and the implementations those of grouped
    products."""
    if torch.compiler.is_compiling():
        return _plans(recipe, device)
    return _cached_plans(recipe, device, device_profile(device))


@functools.cache  # as of recipe.plan
def _cached_plans(recipe: Recipe, device: torch.device, profile: DeviceProfile) -> Plans:
    return _plans(recipe, device)


def _plans(recipe: Recipe, device: torch.device) -> Plans:
    forward, dgrad, wgrad = recipe.plan(device)
    return _plan(forward, device, True), _plan(dgrad, device, True), _plan(wgrad, device, False)


def _plan(plan: Plan | None, device: torch.device, stack: bool) -> Plan | None:
    """For rows times a stack of weights, or for columns times columns."""
    if plan is None:
        return None
    a, b = plan.a, plan.b
    block = (1, b.block[0], b.block[1]) if stack else b.block
    left, right = (a.dtype, a.block, a.scale_mode), (b.dtype, block, b.scale_mode)
    impl = _choose(left, right, device, assumed_device())
    return Plan(a, CastPlan(block, b.dtype, b.scale_mode), plan.fast_accum, impl)


_Operand = tuple[torch.dtype, Block, str]


def _choose(a: _Operand, b: _Operand, device: torch.device, assumed: str | None) -> str:
    """Who multiplies rows by a stack, or columns by columns."""
    left, right = (Operand(dtype, block, scale_dtype(mode)) for dtype, block, mode in (a, b))
    *lead, columns, inner = right.block
    table = IMPLEMENTATIONS if lead else WGRAD_IMPLEMENTATIONS
    return select(device, left, right._replace(block=(*lead, inner, columns)), table=table)


# As recipe._resolve: a constant of compiled graphs, which guard on ``assumed``.
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


def grouped_mm(x: Tensor, w: Tensor, offs: Tensor, *, recipe: Recipe = ROWWISE) -> Tensor:
    """``torch._grouped_mm(x, w, offs=offs)`` in FP8, forward and backward, as ``recipe`` says;
    differentiable once. The rows of each group times its matrix.

    Args:
        x: [T, K] bf16, fp16 or fp32, rows sorted by group.
        w: [G, K, N] of x's dtype, any strides: often ``weight.mT`` of a parameter [G, N, K], whose
            gradient then comes in its own layout. Under autocast x is cast to its dtype, while w is
            quantised from its own precision.
        offs: int32 [G] on x's device: where each group's rows end. Groups may be empty and of any
            size; the last may end before T.

    Returns: [T, N] of x's dtype. Rows of no group are zero, as is their gradient, whatever x and
        the gradient hold there; the gradient of an empty group's matrix is exactly zero. A block of
        a scale that spans rows of several groups (tensorwise) is shared by them; those of the
        transposes that multiply to weight gradients never are.

    Raises:
        ValueError: shapes, dtypes, layouts or devices do not fit, or ``recipe`` is no Recipe, or
            its blocks along tokens would cross groups in wgrad.
        NotImplementedError: an operand is an FP8 tensor; or as ``float8.linear``.

    No size waits for the device, but the PyTorch references, which multiply where no kernel does,
    read offs.
    """
    check_recipe(recipe)
    return run_grouped_mm(x, plain(w), offs, recipe, grouped_plans(recipe, x.device))


def plain(w: Tensor) -> Tensor:
    """w, or what a Float8Weight holds, whose own recipe is for modules that do not name one."""
    inner = getattr(type(w), "plain", None)
    return w if inner is None else inner(w)


def run_grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    recipe: Recipe,
    plans: Plans,
    cached: Cached = NOT_CACHED,
) -> Tensor:
    """``grouped_mm`` by these plans, with FP8 copies of w where there are some."""
    refuse_functorch("float8.grouped_mm")
    x = grouped_operand(x, w)
    save_weight = recipe.weight_for_dgrad == "save"
    y: Tensor = _grouped_mm(x, w, offs, plans, save_weight, *cached)
    return y


def grouped_operand(x: Tensor, w: Tensor) -> Tensor:
    """x as autocast wants it; raises unless it fits w. The ops check shapes, offs and devices."""
    if isinstance(x, Float8TrainingTensor) or isinstance(w, Float8TrainingTensor):
        raise NotImplementedError(
            "float8.grouped_mm casts x and w itself, and got a Float8TrainingTensor; pass "
            ".dequantize() of it"
        )
    # As linear.operands.
    autocast = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    if autocast and x.dtype in HIGH_PRECISION:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    elif x.dtype != w.dtype:
        raise ValueError(
            f"x is {x.dtype} and w {w.dtype}; bring both to one dtype, or run under torch.autocast"
        )
    strided = x.layout == w.layout == torch.strided
    if x.dtype not in HIGH_PRECISION or w.dtype not in HIGH_PRECISION or not strided:
        raise ValueError(
            f"x is {x.dtype} with layout {x.layout} and w {w.dtype} with layout {w.layout}; an FP8 "
            f"product takes strided {', '.join(map(str, HIGH_PRECISION))}"
        )
    return x
