"""SwiGLU experts of a mixture-of-experts layer, forward and backward, and the whole layer: router,
movement of tokens, experts.

Letters: T tokens; D model width, F hidden width; E experts, k of them for each token. In *experts*
the tokens are sorted already, and experts have from none to about twice the mean of them, multiples
of 16, which torch's kernels ask for.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import float8

from . import peers
from .grouped import group_ends
from .layers import make_step, near, taken, variants
from .registry import Bench, Call, Contender, Options, Outputs, Shape, compiled, named_shapes

SUMS = (torch.bfloat16, torch.float32)  # in which products add up micro-batches' gradients
Convert = Callable[[nn.Module], nn.Module]
Product = Callable[..., Tensor]


class Sorted(nn.Module):
    """Experts of tokens that are sorted already, gate's and up's weights in one parameter, as the
    models in transformers have them.

    ``multiply``: by which grouped product. ``recipe``: in one call of ours instead.
    """

    def __init__(self, d: int, f: int, offs: Tensor) -> None:
        super().__init__()
        e = len(offs)
        self.gate_up_proj = nn.Parameter(torch.randn(e, 2 * f, d) * d**-0.5)
        self.down_proj = nn.Parameter(torch.randn(e, d, f) * f**-0.5)
        self.register_buffer("offs", offs, persistent=False)
        self.multiply: Product = torch._grouped_mm
        self.recipe: float8.Recipe | None = None

    def forward(self, x: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj.mT, self.down_proj.mT
        if self.recipe is not None:
            return float8.swiglu_experts(x, gate_up, None, down, self.offs, recipe=self.recipe)
        gate, up = self.multiply(x, gate_up, offs=self.offs).chunk(2, -1)
        return self.multiply(F.silu(gate) * up, down, offs=self.offs)


class Layer(nn.Module):
    """A whole layer. ``by_torch``: by torch's sort, indexing and products, which may take groups of
    any size."""

    def __init__(self, d: int, f: int, experts: int, k: int) -> None:
        super().__init__()
        self.moe = float8.MoE(d, f, experts=experts, top_k=k)
        self.by_torch = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_torch:
            y: Tensor = self.moe(x)[0]
            return y
        weights, chosen, _ = self.moe.router(x)
        order = chosen.flatten().sort(stable=True)[1]
        counts = torch.zeros(len(self.moe.router.weight), dtype=torch.int32, device=x.device)
        ones = torch.ones_like(order, dtype=torch.int32)
        offs = counts.scatter_add(0, chosen.flatten(), ones).cumsum(0, dtype=torch.int32)
        token = order // chosen.shape[1]
        gate, up, down = (w.mT for w in self.moe.experts.parameters())
        gates, ups = (torch._grouped_mm(x[token], w, offs=offs) for w in (gate, up))
        rows = torch._grouped_mm(F.silu(gates) * ups, down, offs=offs)
        rows = rows * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, rows)


def by(multiply: Product, model: nn.Module) -> nn.Module:
    model.multiply = multiply
    return model


def one_call(recipe: float8.Recipe, model: nn.Module) -> nn.Module:
    if isinstance(model, Sorted):
        model.recipe = recipe
        return model
    model.by_torch = False
    return converted(recipe, model)


def converted(recipe: float8.Recipe, model: nn.Module) -> nn.Module:
    report = float8.convert(model, recipe, keep=())
    assert report.converted, report
    return model


def build(shape: Shape, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    t, d, f, experts, *k = shape
    with torch.device(device):
        offs = group_ends(t, experts, 16).to(device)
        model = Layer(d, f, experts, *k) if k else Sorted(d, f, offs)
        x = torch.randn(t, d, dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(t, d, dtype=torch.bfloat16)
    return model.to(torch.bfloat16), x, g


def micro_batches(
    base: nn.Module,
    x: Tensor,
    g: Tensor,
    convert: Convert,
    accumulate: torch.dtype | None = None,
) -> Call:
    """Four micro-batches between two steps of an optimiser, compiled: weights are cast once."""
    model = convert(copy.deepcopy(base))
    ours = any(isinstance(w, float8.Float8Weight) for w in model.parameters())

    @compiled
    def one(x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return y

    def step() -> Outputs:
        cached = float8.cached_weights(model, accumulate=accumulate) if ours else None
        with cached or contextlib.nullcontext():
            for _ in range(4):
                y = one(x)
                y.backward(g)
        return taken(y, [x, *model.parameters()])

    return step


def contenders(kind: str, shape: Shape, options: Options) -> dict[str, Contender]:
    base, x, g = build(shape, options.device)
    step: Callable[[Convert], Call] = partial(
        make_step, base, x, g, with_compile=kind == "compiled"
    )
    if kind == "4-micro-batches":
        step = partial(micro_batches, base, x, g)
    check = partial(near, step(lambda model: model)())
    found = {"bf16": Contender(partial(step, lambda model: model), check, line=True)}
    for name in options.recipes:
        ways = {label: (one_call, each) for label, each in variants(name).items()}
        if kind == "4-micro-batches":
            del ways[f"{name}, weights saved"]  # as those that are cached always are
        if isinstance(base, Sorted):
            if kind == "4-micro-batches":  # and those that a function is given are not
                ways = {label: (converted, each) for label, (_, each) in ways.items()}
            else:
                ways[f"{name}, call by call"] = converted, float8.RECIPES[name]
        for label, (convert, each) in ways.items():
            make = partial(step, partial(convert, each))
            found[label] = Contender(make, check, ours=True, line=True)
            for sums in SUMS if kind == "4-micro-batches" else ():
                make = partial(step, partial(convert, each), sums)
                found[f"{label}, summed in {str(sums).removeprefix('torch.')}"] = Contender(
                    make, check, ours=True, line=True
                )
    if options.peer and isinstance(base, Sorted):
        make = partial(step, partial(by, peers.grouped_product))
        found["torchao rowwise"] = Contender(make, check, line=True)
    return found


EXPERTS = named_shapes(  # [tokens, model width, hidden width, experts]
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
LAYERS = named_shapes(  # [tokens, model width, hidden width, experts, experts of a token]
    {
        "deepseek-moe-16b": "layer 8192x2048x1408x64x6",
        "deepseek-v3": "layer 8192x7168x2048x32x8",
        "llama4-scout": "layer 16384x5120x8192x16x1",
    },
    default=("deepseek-moe-16b layer", "deepseek-v3 layer", "llama4-scout layer"),
)

BENCHES = [
    Bench(f"{group}/{kind}", partial(contenders, kind), shapes, smoke, baseline="bf16")
    for group, shapes, smoke in (
        ("experts", EXPERTS, (512, 64, 96, 4)),
        ("moe", LAYERS, (96, 64, 96, 8, 2)),
    )
    for kind in ("compiled", "uncompiled", "4-micro-batches")
]
