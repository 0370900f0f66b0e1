"""One linear layer, and one feed-forward block, forward and backward, without the optimiser.

Letters: M tokens, N out features, K in features; D model width, H hidden width. Weights are bf16;
gradients are dropped after each step, so that each step makes them anew.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import float8
from float8.testing import sqnr

from . import peers
from .registry import Bench, Call, Contender, Options, Outputs, Shape, compiled, named_shapes

SQNR_FLOOR = 15.0  # dB; e5m2 gradients through three products reach about 20


class MLP(nn.Module):
    """down(silu(gate(norm(x))) * up(norm(x)))"""

    float8_swiglu = ("gate", "up", "down", "norm")  # float8.convert fuses what is so named

    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d, eps=1e-5)
        self.gate = nn.Linear(d, h, bias=False)
        self.up = nn.Linear(d, h, bias=False)
        self.down = nn.Linear(h, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        y: Tensor = self.down(F.silu(self.gate(z)) * self.up(z))
        return y


class FeedForward(nn.Module):
    """y = x + mlp(x)"""

    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.mlp = MLP(d, h)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(x)
        return y


def build(kind: str, shape: Shape, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, an input and a gradient of its output, random."""
    with torch.device(device):
        if kind == "ffn":
            m, d, h = shape
            model: nn.Module = FeedForward(d, h)
            k, n = d, d
        else:
            m, n, k = shape
            model = nn.Linear(k, n, bias=False)
        x = torch.randn(m, k, dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(m, n, dtype=torch.bfloat16)
    return model.to(torch.bfloat16), x, g


def training_step(
    model: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, g: Tensor
) -> Call:
    """A call that does forward and backward, and returns y and the gradients of x and weights."""
    leaves = [x, *model.parameters()]

    def step() -> Outputs:
        y = forward(x)
        y.backward(g)
        return taken(y, leaves)

    return step


def taken(y: Tensor, leaves: Sequence[Tensor]) -> Outputs:
    """y and the gradients of leaves, which have none then."""
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return y.detach(), *(grad for grad in grads if grad is not None)


def make_step(
    base: nn.Module,
    x: Tensor,
    g: Tensor,
    convert: Callable[[nn.Module], nn.Module],
    with_compile: bool,
) -> Call:
    """The step of a converted copy of ``base``."""
    model = convert(copy.deepcopy(base))

    def forward(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out

    return training_step(model, compiled(forward) if with_compile else forward, x, g)


def near(expected: Outputs, call: Call, floor: float = SQNR_FLOOR) -> str | None:
    """What is too far from bf16's: y, the gradient of x or one of a weight."""
    outputs = call()
    if len(outputs) != len(expected):
        return f"{len(outputs)} outputs, bf16 has {len(expected)}"
    for i, (actual, want) in enumerate(zip(outputs, expected, strict=True)):
        if not (ratio := sqnr(actual, want)) >= floor:
            return f"output {i} is {ratio:.1f} dB from bf16's, {floor} are asked for"
    return None


def variants(name: str) -> dict[str, float8.Recipe]:
    """A preset; with the weights' FP8 copies kept for backward; and, of scales in blocks, where a
    gradient of a weight is a product of operands scaled rowwise, whose kernels are faster."""
    recipe = float8.RECIPES[name]
    found = {
        name: recipe,
        f"{name}, weights saved": dataclasses.replace(recipe, weight_for_dgrad="save"),
    }
    if recipe == float8.BLOCKWISE:
        label = f"{name}, wgrad rowwise, weights saved"
        found[label] = float8.Recipe(
            label, recipe.forward, recipe.dgrad, float8.ROWWISE.wgrad, weight_for_dgrad="save"
        )
    return found


def convert_to(recipe: float8.Recipe, fuse: bool, model: nn.Module) -> nn.Module:
    report = float8.convert(model, recipe, keep=(), fuse=fuse)
    assert bool(report.fused) == fuse, report
    return model


def layer_contenders(
    kind: str,
    with_compile: bool,
    torchao_recipes: tuple[str, ...],
    shape: Shape,
    options: Options,
) -> dict[str, Contender]:
    base, x, g = build(kind, shape, options.device)
    check = partial(near, training_step(base, base, x, g)())
    found = {
        "bf16": Contender(
            partial(make_step, base, x, g, lambda model: model, with_compile), check, line=True
        )
    }
    for name in options.recipes:
        can_fuse = kind == "ffn" and None not in float8.RECIPES[name].plan(options.device)
        ways = [(name, float8.RECIPES[name], False)]
        if can_fuse:
            ways += [(f"fused {label}", recipe, True) for label, recipe in variants(name).items()]
        for label, recipe, fuse in ways:
            plans = recipe.plan(options.device)
            by = list(dict.fromkeys("bf16" if plan is None else plan.impl for plan in plans))
            found[label] = Contender(
                partial(make_step, base, x, g, partial(convert_to, recipe, fuse), with_compile),
                check,
                ours=True,
                line=True,
                note=f"GEMMs by {', '.join(by)}",
            )
    if options.peer:
        for name in torchao_recipes:
            found[f"torchao {name}"] = Contender(
                partial(make_step, base, x, g, partial(peers.convert, name), True),
                check,
                line=True,
                note="" if with_compile else "compiled, which torchao is made for",
            )
    return found


FFNS = named_shapes(
    {"llama3-8b": "ffn 8192x4096x14336", "llama3-70b": "ffn 16384x8192x28672"},
    default=("llama3-8b ffn", "llama3-70b ffn"),
)
LINEARS = named_shapes(
    {"llama3-8b": "wq 8192x4096x4096, ffn_in 8192x14336x4096"},
    default=("llama3-8b wq", "llama3-8b ffn_in"),
)

BENCHES = [
    Bench(
        f"{kind}/{'compiled' if with_compile else 'uncompiled'}",
        partial(layer_contenders, kind, with_compile, recipes),
        shapes,
        smoke,
        baseline="bf16",
    )
    for kind, recipes, shapes, smoke in (
        ("ffn", ("tensorwise", "rowwise", "rowwise_with_gw_hp"), FFNS, (64, 128, 256)),
        ("linear", ("rowwise",), LINEARS, (64, 128, 256)),
    )
    for with_compile in (True, False)
]
