"""The SwiGLU feed-forward layer in FP8 as one autograd function, with every cast fused into the op
that makes its input.

    z = rms_norm(x) if there is a norm, else x
    y = (silu(z @ w_gate.T) * (z @ w_up.T)) @ w_down.T

Shape letters: M tokens (all leading dimensions folded), D model width, F hidden width. g marks the
gradient of what follows it. Every GEMM follows the recipe's rule of its kind, as in a linear layer:
three forward, three dgrad, three wgrad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels.fused import swiglu, swiglu_backward
from .linear import (
    NOT_CACHED,
    Float8Linear,
    cast_layouts,
    fold,
    linear,
    multiply_parts,
    operands,
    refuse_second_derivative,
    settings,
    unfold,
    weight_for_dgrad,
    weight_layouts,
    whole,
)
from .recipe import ROWWISE, Plan, Plans, Recipe, check_recipe
from .tensor import refuse_functorch
from .totals import multiply_gradient


class Rules(NamedTuple):
    """How the layer runs on a device; without ``eps`` there is no norm."""

    forward: Plan
    dgrad: Plan
    wgrad: Plan
    save_weights: bool
    eps: float | None


class _SwigluMLP(torch.autograd.Function):
    """Saved for backward: z in FP8 in the layout that wgrad needs, gate and up as they are, their
    product in FP8 for wgrad, and the weights as parameters; x and its 1/rms for the norm. Each only
    if a requested gradient needs it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        norm_D: Tensor | None,
        gate_FD: Tensor,
        up_FD: Tensor,
        down_DF: Tensor,
        rules: Rules,
        *cached: Any,  # what is Cached of each weight
    ) -> Tensor:
        dtype, (forward, dgrad, wgrad, save_weights, eps) = x_MD.dtype, rules
        needs = ctx.needs_input_grad
        keep_z = wgrad.b if needs[2] or needs[3] else None
        keep_h = wgrad.b if needs[4] else None
        rstd_M = None
        if eps is None:
            z, z_t = cast_layouts(x_MD, forward.a, keep_z)
        else:
            *parts, rstd_M = torch.ops.float8.rms_norm_quantize(
                x_MD, norm_D, eps, *settings(forward.a), *settings(keep_z)
            )
            z, z_t = tuple(parts[:2]), tuple(parts[2:])
        into_x, into_hidden = any(needs[:2]), any(needs[:4])  # where gradients pass through
        (w_gate, gate_t), (w_up, up_t), (w_down, down_t) = (
            weight_layouts(w, forward.b, dgrad.b if into else None, save_weights, copies)
            for w, into, copies in (
                (gate_FD, into_x, cached[:3]),
                (up_FD, into_x, cached[3:6]),
                (down_DF, into_hidden, cached[6:]),
            )
        )
        gate_MF = multiply_parts(z, w_gate, forward, dtype)
        up_MF = multiply_parts(z, w_up, forward, dtype)
        *h, h_t, h_t_scale = torch.ops.float8.swiglu_quantize(
            gate_MF, up_MF, *settings(forward.a), *settings(keep_h)
        )
        y_MD = multiply_parts(tuple(h), w_down, forward, dtype)

        nothing = (None, None)
        ctx.save_for_backward(
            *((x_MD, norm_D, rstd_M) if eps is not None and into_x else (None, *nothing)),
            *(z_t if keep_z is not None else nothing),
            *((gate_MF, up_MF) if into_hidden else nothing),
            *((h_t, h_t_scale) if keep_h is not None else nothing),
            *((*gate_t, *up_t) if into_x else (*nothing, *nothing)),
            *(down_t if into_hidden else nothing),
        )
        ctx.rules, ctx.dtype = rules, dtype
        # Of each weight's gradient, the dtype and what it is added to.
        weights = gate_FD, up_FD, down_DF
        ctx.gradients = [*zip((w.dtype for w in weights), cached[2::3], strict=True)]
        return y_MD

    @staticmethod
    def backward(ctx: Any, gy_MD: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("float8.swiglu_mlp")
        x_MD, norm_D, rstd_M, *saved = ctx.saved_tensors
        # From here on memory is free, in eager code, when nothing in this function names it.
        ctx.maybe_clear_saved_tensors()
        z_t, products, h_t, *weights = (saved[i : i + 2] for i in range(0, 12, 2))
        del saved
        dtype, needs = ctx.dtype, ctx.needs_input_grad
        dgrad, wgrad = ctx.rules.dgrad, ctx.rules.wgrad
        into_hidden, into_x = any(needs[:4]), any(needs[:2])
        g_x = g_norm = g_gate = g_up = g_down = None

        gy, gy_t = cast_layouts(
            gy_MD, dgrad.a if into_hidden else None, wgrad.a if needs[4] else None
        )
        del gy_MD
        # The first: of many tokens it is smaller than what it multiplies and nothing else does.
        if needs[4]:
            g_down = multiply_gradient(gy_t, h_t, wgrad, *ctx.gradients[2])
        del gy_t, h_t
        if into_hidden:
            gh_MF = multiply_parts(gy, weight_for_dgrad(weights.pop(), dgrad), dgrad, dtype)
            del gy
            # Of gate and of up, stacked.
            g, g_scale, g_t, g_t_scale = torch.ops.float8.swiglu_backward_quantize(
                gh_MF,
                *products,
                *settings(dgrad.a if into_x else None),
                *settings(wgrad.a if needs[2] or needs[3] else None),
            )
            del gh_MF, products
            for i in range(2 if into_x else 0):
                w = weight_for_dgrad(weights.pop(0), dgrad)
                part = multiply_parts((g[i], g_scale[i]), w, dgrad, dtype)
                g_x = part if g_x is None else g_x.add_(part)
                del w, part
            del g
            if needs[2]:
                g_gate = multiply_gradient((g_t[0], g_t_scale[0]), z_t, wgrad, *ctx.gradients[0])
            if needs[3]:
                g_up = multiply_gradient((g_t[1], g_t_scale[1]), z_t, wgrad, *ctx.gradients[1])
            del g_t, z_t
            if g_x is not None and x_MD is not None:
                g_x, g_norm = rms_norm_backward(g_x, x_MD, rstd_M, norm_D)
        return g_x, g_norm, g_gate, g_up, g_down, *[None] * 10


_mlp = whole(_SwigluMLP)


def rms_norm_backward(
    g_MD: Tensor, x_MD: Tensor, rstd_M: Tensor, weight_D: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and weight of ``F.rms_norm``, given that of its result and 1/rms, in float32:

    n = x * rstd,  gn = g * weight
    gx = rstd * (gn - n * mean(gn * n)),  gweight = sum over rows of g * n
    """
    one_dtype = weight_D is None or weight_D.dtype == x_MD.dtype  # torch's kernel wants it
    # What F.rms_norm's own backward calls; it starts from the rstd that the fused cast has found.
    # Compiled code fuses the formula.
    if g_MD.is_cuda and one_dtype and not torch.compiler.is_compiling():
        shape, mask = [x_MD.shape[1]], [True, weight_D is not None]
        gx, gw = torch.ops.aten._fused_rms_norm_backward(
            g_MD, x_MD, shape, rstd_M.unsqueeze(1), weight_D, mask
        )
        return gx, gw if weight_D is not None else None
    g, n = g_MD.to(torch.float32), x_MD.to(torch.float32) * rstd_M[:, None]
    gn = g if weight_D is None else g * weight_D
    gx = rstd_M[:, None] * (gn - n * (gn * n).mean(1, keepdim=True))
    return gx.to(x_MD.dtype), None if weight_D is None else (g * n).sum(0).to(weight_D.dtype)


def swiglu_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    recipe: Recipe = ROWWISE,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """``(silu(z @ w_gate.T) * (z @ w_up.T)) @ w_down.T`` in FP8, forward and backward, as
    ``recipe`` says; differentiable once.

    Args:
        x: [..., D] bf16, fp16 or fp32, any number of leading dimensions, any sizes including 0.
        w_gate, w_up: [F, D]; w_down: [D, F]; of x's dtype, or any under autocast, which casts x.
        norm_weight: [D], the weight of an RMSNorm before the layer: z = rms_norm(x); without one
            and without ``eps``, z = x.
        eps: the norm's; given alone, the norm has no weight. Default float32's epsilon, as
            ``F.rms_norm`` has it for float32.

    Returns: [..., D] of x's dtype. What ``float8.linear`` gives for each GEMM, with the same casts:
        fused with the norm, the activation and its gradient, none of which goes through memory in
        high precision only to be cast. A recipe with a GEMM in high precision, and FP8 operands,
        take that unfused way.

    Raises:
        ValueError, NotImplementedError: as ``float8.linear``.
    """
    check_recipe(recipe)
    weights = w_gate, w_up, w_down
    return run_swiglu_mlp(x, weights, recipe, recipe.plan(x.device), norm_weight, eps)


def run_swiglu_mlp(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    recipe: Recipe,
    plans: Plans,
    norm_weight: Tensor | None,
    eps: float | None,
    cached: Sequence[Any] = NOT_CACHED * 3,
) -> Tensor:
    """``swiglu_mlp`` by these plans. ``cached``: what is Cached of each."""
    refuse_functorch("float8.swiglu_mlp", "float8.revert(model) first")
    if norm_weight is not None and eps is None:
        eps = torch.finfo(torch.float32).eps
    w_gate, w_up, w_down = weights
    if w_up.shape != w_gate.shape or w_down.shape != w_gate.shape[::-1]:
        raise ValueError(
            f"weights of shapes {tuple(w_gate.shape)}, {tuple(w_up.shape)} and "
            f"{tuple(w_down.shape)} make no SwiGLU layer; needed (F, D), (F, D) and (D, F)"
        )
    forward, dgrad, wgrad = plans
    plain = all(type(t) in (Tensor, nn.Parameter) for t in (x, *weights))
    if forward is None or dgrad is None or wgrad is None or not plain:
        z = x if eps is None else F.rms_norm(x, x.shape[-1:], norm_weight, eps)
        gate, up = (linear(z, w, recipe=recipe) for w in (w_gate, w_up))
        return linear(silu_times(gate, up), w_down, recipe=recipe)
    given = x
    x, _ = operands(x, w_gate, None)
    if eps is not None and x.dtype != given.dtype:
        # Autocast rounds a layer's input, not the norm's, which may lie beyond a float16.
        z = F.rms_norm(given, given.shape[-1:], norm_weight, eps)
        x, norm_weight, eps = z.to(x.dtype), None, None
    for w in (w_up, w_down.t()):
        operands(x, w, None)
    rules = Rules(forward, dgrad, wgrad, recipe.weight_for_dgrad == "save", eps)
    return unfold(_mlp(fold(x), norm_weight, *weights, rules, *cached), x)


class _SiluTimes(torch.autograd.Function):
    """``silu(gate) * up`` that keeps its inputs as they are: autograd would keep float32 copies."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return swiglu_backward(grad, *ctx.saved_tensors)


_silu_times = whole(_SiluTimes)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in float32, rounded once to gate's dtype."""
    product: Tensor = _silu_times(gate, up)
    return product


class SwiGLU(nn.Module):
    """``down_proj(silu(gate_proj(z)) * up_proj(z))`` with z = norm(x) if there is a norm, else x:
    three ``Float8Linear``s without bias, run as one by ``swiglu_mlp``. Its parameters are plain,
    and so is its state dict, whose names are those of Hugging Face's MLPs.

    ``float8.convert`` turns MLPs that it knows into one by their class alone. What is one stays one
    call only as long as nothing would be skipped: with a hook on one of the layers, an adapter in
    its place, recipes that differ or have a GEMM in high precision, the layers are called one by
    one, for the same result.

    Args:
        dim, hidden: D and F.
        device, dtype: of the parameters, as ``nn.Linear`` takes them.
        recipe: of the three layers; later, each layer's own ``recipe`` counts.
        norm_eps: that of an ``nn.RMSNorm``, ``norm``, before the layer; None for no norm.

    Raises:
        ValueError: ``recipe`` is no Recipe.
    """

    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # "norm", if there is one
    original: type[nn.Module] | None = None  # the class that float8.convert found

    def __init__(
        self,
        dim: int,
        hidden: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe = ROWWISE,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        if norm_eps is not None:
            self.names = (*self.names, "norm")
            self.norm = nn.RMSNorm(dim, norm_eps, device=device, dtype=dtype)
        self.gate_proj = Float8Linear(dim, hidden, False, device, dtype, recipe=recipe)
        self.up_proj = Float8Linear(dim, hidden, False, device, dtype, recipe=recipe)
        self.down_proj = Float8Linear(hidden, dim, False, device, dtype, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down, norm = self.layers()
        if self.obstacle() is not None:
            z = x if norm is None else norm(x)
            y: Tensor = down(silu_times(gate(z), up(z)))
            return y
        plans = gate.recipe.plan(x.device)
        cached = (*gate.begin(plans), *up.begin(plans), *down.begin(plans))
        norm_weight = eps = None
        if norm is not None:
            norm_weight, eps = norm.weight, norm.eps
            eps = torch.finfo(torch.float32).eps if eps is None else eps
        weights = gate.weight, up.weight, down.weight
        return run_swiglu_mlp(x, weights, gate.recipe, plans, norm_weight, eps, cached)

    def layers(self) -> tuple[Any, Any, Any, Any]:
        """Those of gate, up and down, and the norm or None."""
        gate, up, down, *norm = (self._modules[name] for name in self.names)
        return gate, up, down, norm[0] if norm else None

    def obstacle(self) -> str | None:
        """Why the layers are called one by one; None where they are one call."""
        if nn.modules.module._has_any_global_hook():
            return "there are hooks on all modules, which would be skipped"
        recipes = [getattr(layer, "recipe", None) for layer in self.layers()[:3]]
        return obstacle(self, self.names, recipes)

    @property
    def recipe(self) -> Recipe | None:
        """That of the gate; None after ``float8.revert``."""
        return getattr(self.layers()[0], "recipe", None)

    @property
    def last_run(self) -> tuple[str, str, str] | None:
        """As of ``Float8Linear``."""
        return getattr(self.layers()[2], "last_run", None)

    def extra_repr(self) -> str:
        of = "" if self.original is None else f"of {self.original.__name__}, "
        return f"{of}recipe={'none' if self.recipe is None else self.recipe.name}"


def _does_more(module: nn.Module) -> bool:
    """Whether calling the module runs more than its class's forward."""
    hooks = module._forward_pre_hooks or module._forward_hooks
    hooks = hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(hooks) or "forward" in module.__dict__


def obstacle(
    module: nn.Module, names: Sequence[str], recipes: Sequence[Recipe | None]
) -> str | None:
    """Why the layers ``names`` of a module, as in ``SwiGLU.names``, cannot run as one, if the first
    three have these recipes; None where they can."""
    for name, child in module._modules.items():
        if child is not None and _does_more(child):
            return f"{name} has hooks, or a forward of its own, which would be skipped"
    for name, recipe in zip(names, recipes, strict=False):
        layer: Any = module._modules[name]
        if (
            type(layer) not in (nn.Linear, Float8Linear)
            or layer._parameters.get("bias", layer) is not None
        ):
            return f"{name} is no nn.Linear without bias"
        if recipe is None:
            return f"{name} is in high precision"
        if recipe != recipes[0]:
            return f"{names[0]} and {name} have different recipes"
    if (recipe := recipes[0]) and None in (recipe.forward, recipe.dgrad, recipe.wgrad):
        return f"the recipe {recipe.name} leaves a GEMM in high precision"
    for name in names[3:]:
        norm = module._modules[name]
        if type(norm) is not nn.RMSNorm or len(norm.normalized_shape) != 1:
            return f"{name} is no nn.RMSNorm of one dimension"
    return None
