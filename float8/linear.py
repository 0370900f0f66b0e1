"""The FP8 linear layer: one autograd function, three GEMMs.

Shape letters: M tokens (all leading dimensions folded), N out features, K in features. x input, w
    weight, g gradient of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .kernels.quantize import CastPlan, can_measure, check_devices
from .recipe import ROWWISE, Plan, Plans, Recipe, check_recipe
from .tensor import HIGH_PRECISION, Float8TrainingTensor, refuse_functorch
from .totals import give, multiply_gradient

Parts = tuple[Any, Any]  # (data, scale); (x, None) in high precision; (None, None) if nobody asked


def settings(cast: CastPlan | None) -> tuple[Any, Any, Any]:
    """A cast as ops take it, three Nones for none. (torch 2.11 does not trace ``*cast``, the
    unpacking of a named tuple.)"""
    return (None, None, None) if cast is None else (cast.block, cast.dtype, cast.scale_mode)


def cast_layouts(x: Tensor, cast: CastPlan | None, cast_t: CastPlan | None) -> tuple[Parts, Parts]:
    """FP8 parts of x and of its transpose, together where both are asked for; (None, None) for a
    cast that is None."""
    if cast is not None and cast_t is not None:
        parts: Any = torch.ops.float8.quantize_dual(x, *settings(cast), *settings(cast_t))
        return parts[:2], parts[2:]
    return _cast_one(x, cast), _cast_one(x.mT, cast_t)


def _cast_one(x: Tensor, cast: CastPlan | None, amax: Tensor | None = None) -> Parts:
    if cast is None:
        return None, None
    data, scale = torch.ops.float8.quantize(x, *settings(cast), amax)
    return data, scale


def multiply_parts(
    a: Parts, b: Parts, plan: Plan, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """a [rows, contraction] times b [columns, contraction] transposed, plus bias [columns]."""
    blocks = plan.a.block, plan.b.block[::-1]
    out: Tensor = torch.ops.float8.scaled_mm(
        a[0], b[0].t(), a[1], b[1].t(), *blocks, dtype, plan.fast_accum, plan.impl, bias
    )
    return out


# Copies of w and of its transpose, and what w's gradients are added to.
Cached = tuple[Float8TrainingTensor | None, Float8TrainingTensor | None, Tensor | None]
NOT_CACHED: Cached = (None, None, None)


def weight_layouts(
    weight: Tensor, cast: CastPlan | None, cast_t: CastPlan | None, save: bool, cached: Cached
) -> tuple[Parts, Parts]:
    """FP8 parts of a weight for forward, and what backward is to have for dgrad, if there is a
    cast_t: parts of its transpose where they are to be saved or cached already, else the weight and
    None, or the amax that its second cast would have to find."""
    w, w_t, _ = cached
    if cast and cast_t and not save and w is w_t is None and can_measure(weight, cast, cast_t):
        data, scale, amax = torch.ops.float8.quantize_and_measure(
            weight, *settings(cast), cast_t.block
        )
        return (data, scale), (weight, amax)
    now, later = cast if w is None else None, cast_t if save and w_t is None else None
    parts, parts_t = cast_layouts(weight, now, later)
    parts = parts if w is None else (w.qdata, w.scale)
    parts_t = parts_t if w_t is None else (w_t.qdata, w_t.scale)
    return parts, (weight, None) if parts_t[0] is None else parts_t


def weight_for_dgrad(saved: Sequence[Any], dgrad: Plan) -> Parts:
    """The FP8 parts that dgrad multiplies, of what ``weight_layouts`` gave backward."""
    w, other = saved
    return (w, other) if w.itemsize == 1 else _cast_one(w.mT, dgrad.b, other)


class _Linear(torch.autograd.Function):
    """y = x @ w.T + bias. Saved for backward: FP8 copies of x in the layout wgrad needs (x itself
    where wgrad is in high precision), and the weight parameter, or its FP8 copy for dgrad; each
    only if a requested gradient needs it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        w_NK: Tensor,
        bias_N: Tensor | None,
        plans: Plans,
        save_weight: bool,
        *cached: Any,  # what is Cached of w
    ) -> Tensor:
        dtype = x_MK.dtype
        needs_gx, needs_gw = ctx.needs_input_grad[:2]
        forward, dgrad, wgrad = plans
        keep_x = wgrad.b if needs_gw and wgrad is not None else None
        x, x_t = cast_layouts(x_MK, None if forward is None else forward.a, keep_x)
        later = dgrad.b if needs_gx and dgrad is not None else None
        w, w_t = weight_layouts(w_NK, forward and forward.b, later, save_weight, cached)
        if forward is None:
            y_MN = torch.mm(x_MK, w_NK.to(dtype).t())
            y_MN = y_MN if bias_N is None else (y_MN + bias_N).to(dtype)
        else:
            y_MN = multiply_parts(x, w, forward, dtype, bias_N)
        if needs_gw and wgrad is None:
            x_t = x_MK, None
        ctx.save_for_backward(*x_t, *(w_t if needs_gx else (None, None)))
        ctx.plans, ctx.dtypes = plans, (dtype, w_NK.dtype, None if bias_N is None else bias_N.dtype)
        ctx.total = cached[2]
        return y_MN

    @staticmethod
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("float8.linear")
        x, x_scale, w, w_scale = ctx.saved_tensors
        needs_gx, needs_gw, needs_gb = ctx.needs_input_grad[:3]
        (dtype, w_dtype, bias_dtype), (_, dgrad, wgrad) = ctx.dtypes, ctx.plans
        casts = dgrad.a if needs_gx and dgrad else None, wgrad.a if needs_gw and wgrad else None
        g, g_t = cast_layouts(g_MN, *casts)
        gx_MK = gw_NK = None
        if needs_gx:
            if dgrad is None:
                gx_MK = torch.mm(g_MN, w.to(dtype))
            else:
                gx_MK = multiply_parts(g, weight_for_dgrad((w, w_scale), dgrad), dgrad, dtype)
        if needs_gw:
            if wgrad is None:
                gw_NK = give(torch.mm(g_MN.t(), x).to(w_dtype), ctx.total)
            else:
                gw_NK = multiply_gradient(g_t, (x, x_scale), wgrad, w_dtype, ctx.total)
        gb_N = g_MN.sum(0, dtype=torch.promote_types(dtype, bias_dtype)) if needs_gb else None
        return gx_MK, gw_NK, gb_N, *[None] * 5


def whole(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``, which torch.compile takes into graphs as one call instead of a subgraph
    of its own, in which torch 2.11 loses the marks of activation checkpointing, so that nothing is
    recomputed and everything kept."""

    def keep_whole() -> None:
        torch._dynamo.allow_in_graph(function)

    # torch.compile runs it while tracing. (As a decorator, allow_in_graph would import
    # torch._dynamo with us: 2 s.)
    keep_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def apply(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            keep_whole()
        return function.apply(*arguments)

    return apply


def refuse_second_derivative(what: str) -> None:
    """Raise NotImplementedError in a backward that is to be differentiated. (torch's
    once_differentiable, where the gradient needs none, as that of a sum, lets the second derivative
    vanish without a word.)"""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{what} is differentiable once, and create_graph=True asks for a second derivative (a "
            "gradient penalty, a Hessian); leave it out, or keep the layers that need one in high "
            "precision"
        )


_linear = whole(_Linear)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe = ROWWISE
) -> Tensor:
    """``x @ weight.T + bias`` in FP8, forward and backward, as ``recipe`` says; differentiable
    once.

    Args:
        x: [..., K] bf16, fp16 or fp32, any number of leading dimensions, any sizes including 0.
        weight: [N, K], of x's dtype. Under autocast x and bias are cast to its dtype, while the
            weight is quantised from its own precision, in which its gradient comes. A
            ``Float8TrainingTensor`` multiplies as it is (the dispatch table's matrix products).
        bias: [N]; an FP8 product adds it in float32, before it is rounded. Its gradient is a sum in
            its own precision or x's, the higher one, of what is never FP8.

    Returns: [..., N] of x's dtype.

    Raises:
        ValueError: shapes, dtypes, layouts or devices do not fit, or ``recipe`` is no Recipe.
        NotImplementedError: called under torch.func.grad, vmap or another functorch transform, or,
            in backward, with create_graph=True.
    """
    if (plain := getattr(type(weight), "plain", None)) is not None:
        weight = plain(weight)  # a Float8Weight's own recipe is for modules that do not name one
    check_recipe(recipe)
    return run_linear(x, weight, bias, recipe, recipe.plan(x.device))


def operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x and bias as autocast wants them, no bias in float64; ValueError unless they fit the
    weight."""
    device_type = x.device.type
    # "meta" has no autocast, and asking raises (torch 2.11 cannot trace
    # torch.amp.is_autocast_available).
    autocast = device_type != "meta" and torch.is_autocast_enabled(device_type)
    if autocast and x.dtype in HIGH_PRECISION:
        dtype = torch.get_autocast_dtype(device_type)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    elif x.dtype != weight.dtype:
        raise ValueError(
            f"x is {x.dtype} and the weight {weight.dtype}; bring both to one dtype, or run under "
            "torch.autocast"
        )
    check_fit(x, weight, bias)
    return x, bias if bias is None or bias.dtype != torch.float64 else bias.float()


def fold(x: Tensor) -> Tensor:
    """x [..., K] as a matrix [M, K]; a matrix as it is."""
    return (x if x.ndim > 1 else x[None]).flatten(0, -2)


def unfold(y_MN: Tensor, x: Tensor) -> Tensor:
    """y with x's leading dimensions. To autograd it is no view, of which FSDP2 would warn."""
    return torch.ops.aten._unsafe_view(y_MN, (*x.shape[:-1], y_MN.shape[1]))  # type: ignore[no-any-return]


def check_fit(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dtype not in HIGH_PRECISION or weight.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"x is {x.dtype} and the weight {weight.dtype}; an FP8 linear takes "
            f"{', '.join(map(str, HIGH_PRECISION))}"
        )
    if not x.layout == weight.layout == torch.strided or x.is_nested:
        raise ValueError(
            f"x is {'nested' if x.is_nested else x.layout} and the weight {weight.layout}; an FP8 "
            "linear takes strided tensors"
        )
    check_devices(x, weight, bias)
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x of shape {tuple(x.shape)} does not fit a weight of shape {tuple(weight.shape)}; "
            "needed (..., K) and (N, K)"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise ValueError(
            f"bias is {bias.dtype} of shape {tuple(bias.shape)}; a weight of shape "
            f"{tuple(weight.shape)} takes a floating point one of shape {tuple(weight.shape[:1])}"
        )


def run_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    plans: Plans,
    cached: Cached = NOT_CACHED,
) -> Tensor:
    """``linear`` by these plans, with FP8 copies of the weight where there are some."""
    refuse_functorch("float8.linear", "float8.revert(model) first")
    if isinstance(x, Float8TrainingTensor) or isinstance(weight, Float8TrainingTensor):
        return nn.functional.linear(x, weight, bias)
    x, bias = operands(x, weight, bias)
    save_weight = recipe.weight_for_dgrad == "save"
    return unfold(_linear(fold(x), weight, bias, plans, save_weight, *cached), x)


def note_run(holder: Any, plans: Plans) -> None:
    """Set ``holder.last_run``: who is going to multiply, by these plans."""
    run = tuple("high precision" if plan is None else plan.impl for plan in plans)
    if torch.compiler.is_compiling():
        # Dynamo takes no change of an attribute inside a checkpointed region, as it could change
        # what is recomputed; this one does not.
        unchecked = torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer
        unchecked(setattr, holder, "last_run", run)
    else:
        holder.last_run = run


class Float8Linear(nn.Linear):
    """``nn.Linear`` whose GEMMs run as ``recipe`` says. Its parameters are plain; so is its state
    dict.

    ``float8.convert`` turns an ``nn.Linear`` into one by its class alone. ``last_run`` holds the
    names of the implementations that forward, dgrad and wgrad took (or, in backward, will take)
    when the layer was last run or traced, None before.
    """

    recipe: Recipe
    last_run: tuple[str, str, str] | None = None
    cached: Any = None  # a CachedWeight, which float8.cached_weights sets

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe = ROWWISE,
    ) -> None:
        check_recipe(recipe)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = recipe

    def forward(self, input: Tensor) -> Tensor:
        plans = self.recipe.plan(input.device)
        return run_linear(input, self.weight, self.bias, self.recipe, plans, self.begin(plans))

    def begin(self, plans: Plans) -> Cached:
        """Note who is going to multiply; the weight's FP8 copies, if there are any."""
        note_run(self, plans)
        if self.cached is None:
            return NOT_CACHED
        self.cached.check(self.weight, self.recipe)
        return self.cached.w_NK, self.cached.w_KN, self.cached.total

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: they outlive the block of float8.cached_weights, which knows
        nothing of them."""
        return {name: value for name, value in self.__dict__.items() if name != "cached"}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"
