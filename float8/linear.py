"""The FP8 linear layer: one autograd function, three GEMMs.

Shape letters: M tokens (all leading dimensions folded), N out features, K in features. x input, w weight, g gradient of
the output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .dispatch.matmul import multiply
from .kernels.quantize import CastPlan
from .recipe import ROWWISE, Plan, Plans, Recipe
from .tensor import HIGH_PRECISION, Float8TrainingTensor

def _cast(x: Tensor, cast: CastPlan, orig_dtype: torch.dtype) -> Float8TrainingTensor:
    data, scale = torch.ops.float8.quantize(x, *cast)
    return Float8TrainingTensor(data, scale, cast.block, orig_dtype)


def _mm(a: Float8TrainingTensor, b: Float8TrainingTensor, plan: Plan) -> Tensor:
    """a [rows, contraction] times b [columns, contraction] transposed."""
    return multiply(a, b.t(), plan.impl, fast_accum=plan.fast_accum)  # type: ignore[arg-type]


class _Linear(torch.autograd.Function):
    """y = x @ w.T. Saved for backward: FP8 copies of x in the layout wgrad needs (x itself where wgrad is in high
    precision), and the weight parameter, or its FP8 copy for dgrad; each only if a requested gradient needs it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        w_NK: Tensor,
        plans: Plans,
        save_weight: bool,
        cached_NK: Float8TrainingTensor | None,
        cached_KN: Float8TrainingTensor | None,
    ) -> Tensor:
        dtype = x_MK.dtype
        needs_gx, needs_gw = ctx.needs_input_grad[:2]
        forward, dgrad, wgrad = plans
        if forward is None:
            y_MN = torch.mm(x_MK, w_NK.to(dtype).t())
        else:
            w = _cast(w_NK, forward.b, dtype) if cached_NK is None else cached_NK
            y_MN = _mm(_cast(x_MK, forward.a, dtype), w, forward)

        x_saved: tuple[Tensor | None, Tensor | None] = (None, None)
        w_saved: tuple[Tensor | None, Tensor | None] = (None, None)
        if needs_gw:
            x_saved = (x_MK, None) if wgrad is None else torch.ops.float8.quantize(x_MK.t(), *wgrad.b)
        if needs_gx:
            if cached_KN is not None:
                w_saved = (cached_KN.qdata, cached_KN.scale)
            elif dgrad is not None and save_weight:
                w_saved = torch.ops.float8.quantize(w_NK.t(), *dgrad.b)
            else:
                w_saved = (w_NK, None)
        ctx.save_for_backward(*x_saved, *w_saved)
        ctx.plans, ctx.dtype, ctx.w_dtype = plans, dtype, w_NK.dtype
        return y_MN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, w, w_scale = ctx.saved_tensors
        dtype = ctx.dtype
        _, dgrad, wgrad = ctx.plans
        gx_MK = gw_NK = None
        if ctx.needs_input_grad[0]:
            if dgrad is None:
                gx_MK = torch.mm(g_MN, w.to(dtype))
            elif w_scale is None:
                gx_MK = _mm(_cast(g_MN, dgrad.a, dtype), _cast(w.t(), dgrad.b, dtype), dgrad)
            else:
                w_KN = Float8TrainingTensor(w, w_scale, dgrad.b.block, dtype)
                gx_MK = _mm(_cast(g_MN, dgrad.a, dtype), w_KN, dgrad)
        if ctx.needs_input_grad[1]:
            if wgrad is None:
                gw_NK = torch.mm(g_MN.t(), x)
            else:
                x_KM = Float8TrainingTensor(x, x_scale, wgrad.b.block, dtype)
                gw_NK = _mm(_cast(g_MN.t(), wgrad.a, dtype), x_KM, wgrad)
            gw_NK = gw_NK.to(ctx.w_dtype)
        return gx_MK, gw_NK, None, None, None, None


class CachedWeight(NamedTuple):
    """A weight's FP8 copies for forward [N, K] and dgrad [K, N] (None where that GEMM is in high precision), and what
    they were made of."""

    w_NK: Float8TrainingTensor | None
    w_KN: Float8TrainingTensor | None
    weight: Tensor
    version: int
    recipe: Recipe

    @staticmethod
    @torch.no_grad()
    def of(weight: Tensor, recipe: Recipe) -> CachedWeight:
        forward, dgrad, _ = recipe.plan(weight.device)
        w_NK = None if forward is None else _cast(weight, forward.b, weight.dtype)
        w_KN = None if dgrad is None else _cast(weight.t(), dgrad.b, weight.dtype)
        return CachedWeight(w_NK, w_KN, weight, weight._version, recipe)

    def check(self, weight: Tensor, recipe: Recipe) -> None:
        """Raise RuntimeError unless the copies are of this weight as it is now, made for this recipe."""
        if weight is self.weight and weight._version == self.version and recipe == self.recipe:
            return
        raise RuntimeError(
            f"the weight (shape {tuple(weight.shape)}) or the recipe of a layer changed inside float8.cached_weights, whose "
            "FP8 copies are of the old one; leave the block before the optimiser's step, loading, .to() or a new recipe"
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe = ROWWISE) -> Tensor:
    """``x @ weight.T + bias`` in FP8, forward and backward, as ``recipe`` says; differentiable once.

    Args:
        x: [..., K] bf16, fp16 or fp32, any number of leading dimensions, any sizes including 0.
        weight: [N, K], of x's dtype. Under autocast x and bias are cast to its dtype, while the weight is quantised from
            its own precision. A ``Float8TrainingTensor`` multiplies as it is (the dispatch table's matrix products).
        bias: [N]; added in its own precision or x's, the higher one; its gradient is never FP8.

    Returns: [..., N] of x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit.
        NotImplementedError: called under torch.func.grad, vmap or another functorch transform.
    """
    return _linear(x, weight, bias, recipe, recipe.plan(x.device))


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, plans: Plans, cached: CachedWeight | None = None
) -> Tensor:
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            "float8.linear was called under a functorch transform (torch.func.grad, vmap, jvp, ...), which its autograd "
            "function does not support; use .backward() or torch.autograd.grad, or float8.revert(model) first"
        )
    if isinstance(x, Float8TrainingTensor) or isinstance(weight, Float8TrainingTensor):
        return nn.functional.linear(x, weight, bias)
    device_type = x.device.type
    autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    if autocast and x.dtype in HIGH_PRECISION:
        dtype = torch.get_autocast_dtype(device_type)
        x = x.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    elif x.dtype != weight.dtype:
        raise ValueError(
            f"x is {x.dtype} and the weight {weight.dtype}; bring both to one dtype, or run under torch.autocast"
        )
    if x.dtype not in HIGH_PRECISION or weight.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"x is {x.dtype} and the weight {weight.dtype}; an FP8 linear takes {', '.join(map(str, HIGH_PRECISION))}"
        )
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x of shape {tuple(x.shape)} does not fit a weight of shape {tuple(weight.shape)}; needed (..., K) and (N, K)"
        )
    lead = x.shape[:-1]
    tokens = 1
    for n in lead:
        tokens *= n
    w_NK, w_KN = (None, None) if cached is None else cached[:2]
    y_MN = _Linear.apply(  # type: ignore[no-untyped-call]
        x.reshape(tokens, x.shape[-1]), weight, plans, recipe.weight_for_dgrad == "save", w_NK, w_KN
    )
    y: Tensor = y_MN.reshape(*lead, weight.shape[0])
    return y if bias is None else (y + bias).to(y.dtype)


class Float8Linear(nn.Linear):
    """``nn.Linear`` whose GEMMs run as ``recipe`` says. Its parameters are plain; so is its state dict.

    ``float8.convert`` turns an ``nn.Linear`` into one by its class alone. ``last_run`` holds the names of the
    implementations that forward, dgrad and wgrad took (or, in backward, will take) when the layer was last run or traced,
    None before.
    """

    recipe: Recipe
    last_run: tuple[str, str, str] | None = None
    cached: CachedWeight | None = None  # set by float8.cached_weights

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
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = recipe

    def forward(self, input: Tensor) -> Tensor:
        plans = self.recipe.plan(input.device)
        forward, dgrad, wgrad = ("high precision" if plan is None else plan.impl for plan in plans)
        self.last_run = (forward, dgrad, wgrad)
        if self.cached is not None and not torch.compiler.is_compiling():
            self.cached.check(self.weight, self.recipe)
        return _linear(input, self.weight, self.bias, self.recipe, plans, self.cached)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"
