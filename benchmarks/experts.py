"""SwiGLU experts of a mixture-of-experts layer, forward and backward, without router and without
the movement of tokens.

Letters: T tokens, sorted by expert; D model width, F hidden width; E experts. Experts have from no
tokens to about twice their mean, multiples of 16, which torch's kernels ask for.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import float8

from . import peers
from .grouped import group_ends
from .layers import make_step, near, training_step
from .registry import Bench, Call, Contender, Options, Shape, named_shapes

# torch's kernels want a weight's contraction contiguous: parameters are [E, out, in].
Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """y[rows of e] = (silu(x @ w1[e].T) * (x @ w3[e].T)) @ w2[e].T"""

    def __init__(self, d: int, f: int, offs: Tensor, multiply: Multiply) -> None:
        super().__init__()
        e = len(offs)
        self.w1 = nn.Parameter(torch.randn(e, f, d) * d**-0.5)
        self.w3 = nn.Parameter(torch.randn(e, f, d) * d**-0.5)
        self.w2 = nn.Parameter(torch.randn(e, d, f) * f**-0.5)
        self.register_buffer("offs", offs, persistent=False)
        self.multiply = multiply

    def forward(self, x: Tensor) -> Tensor:
        product = partial(self.multiply, offs=self.offs)
        h = F.silu(product(x, self.w1.mT)) * product(x, self.w3.mT)
        return product(h, self.w2.mT)


class Float8Experts(Experts):
    """The same as one call."""

    recipe: float8.Recipe

    def forward(self, x: Tensor) -> Tensor:
        w1, w3, w2 = self.w1.mT, self.w3.mT, self.w2.mT
        return float8.swiglu_experts(x, w1, w3, w2, self.offs, recipe=self.recipe)


def one_call(recipe: float8.Recipe, model: nn.Module) -> nn.Module:
    model.__class__, model.recipe = Float8Experts, recipe
    return model


def converted(recipe: float8.Recipe, model: nn.Module) -> nn.Module:
    report = float8.convert(model, recipe, keep=())
    assert report.converted, report
    return model


def by(multiply: Multiply, model: nn.Module) -> nn.Module:
    model.multiply = multiply
    return model


def build(shape: Shape, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    t, d, f, e = shape
    with torch.device(device):
        offs = group_ends(t, e, 16).to(device)
        model = Experts(d, f, offs, torch._grouped_mm).to(torch.bfloat16)
        x = torch.randn(t, d, dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(t, d, dtype=torch.bfloat16)
    return model, x, g


def micro_batches(
    base: nn.Module, x: Tensor, g: Tensor, convert: Callable[[nn.Module], nn.Module]
) -> Call:
    """Four micro-batches between two steps of an optimiser: weights are cast once."""
    model = convert(copy.deepcopy(base))
    ours = any(isinstance(w, float8.Float8Weight) for w in model.parameters())

    def forward(x: Tensor) -> Tensor:
        with float8.cached_weights(model) if ours else contextlib.nullcontext():
            for _ in range(3):
                model(x).backward(g)
            out: Tensor = model(x)
        return out

    return training_step(model, forward, x, g)


def experts_contenders(kind: str, shape: Shape, options: Options) -> dict[str, Contender]:
    base, x, g = build(shape, options.device)
    several = kind == "4-micro-batches"
    if several:
        step = partial(micro_batches, base, x, g)
    else:
        step = partial(make_step, base, x, g, with_compile=kind == "compiled")
    check = partial(near, step(lambda model: model)())
    found = {"bf16": Contender(partial(step, lambda model: model), check, line=True)}
    for name in options.recipes:
        recipe = float8.RECIPES[name]
        ways = {f"converted {name}": (converted, recipe)}
        if not several:  # what is called by name is not cached
            saving = dataclasses.replace(recipe, weight_for_dgrad="save")
            ways = {name: (one_call, recipe), **ways, f"{name}, weights saved": (one_call, saving)}
        for label, (convert, each) in ways.items():
            make = partial(step, partial(convert, each))
            found[label] = Contender(make, check, ours=True, line=True)
    if options.peer:
        make = partial(step, partial(by, peers.grouped_product))
        found["torchao rowwise"] = Contender(make, check, line=True)
    return found


SHAPES = named_shapes(  # [tokens, model width, hidden width, experts]
    {
        "deepseek-moe-16b": "experts 49152x2048x1408x64",
        "deepseek-v3": "experts 65536x7168x2048x32, few 16384x7168x2048x32",
        "llama4-scout": "experts 16384x5120x8192x16",
    },
    default=(
        "deepseek-moe-16b experts",
        "deepseek-v3 experts",
        "deepseek-v3 few",
        "llama4-scout experts",
    ),
)
SMOKE = (512, 64, 96, 4)

BENCHES = [
    Bench(f"experts/{kind}", partial(experts_contenders, kind), SHAPES, SMOKE, baseline="bf16")
    for kind in ("compiled", "uncompiled", "4-micro-batches")
]
