"""What went wrong elsewhere with the tokens of experts, for all layers alike: memory that nobody
wrote, ranks without tokens, loops over experts, padding, another architecture's kernels, waiting
for the device, and kernels compiled anew.

Letters: T rows, E experts (groups), D model width, F hidden width. Weights are parameters
[E, N, K], as models have them.
"""

from __future__ import annotations

import dataclasses
import datetime
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from recorders import specialisations
from test_grouped import draw, ends, exact, spans, sums
from torch import Tensor, nn

import float8
from float8 import (
    BLOCKWISE,
    FULL,
    MXFP8,
    RECIPES,
    ROWWISE,
    ROWWISE_WGRAD_HP,
    TENSORWISE,
    MoE,
    Recipe,
    ops,
)
from float8.devices import describe
from float8.grouped import grouped_plans
from float8.kernels import grouped as kernels
from float8.testing import assert_same_bytes, deterministic, needs, relative_error, sqnr

DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
OFF = Recipe("off", None, None, None)
SAVE = dataclasses.replace(ROWWISE, name="save", weight_for_dgrad="save")
EVERY = (*RECIPES.values(), SAVE, OFF)
ALL_FP8 = (TENSORWISE, ROWWISE, BLOCKWISE, MXFP8)


@pytest.fixture(autouse=True)
def _cublas_may_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, torch refuses cuBLAS under deterministic algorithms."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


# ---- layers ------------------------------------------------------------------------------------


class Step(NamedTuple):
    """The rows of each expert, and rows of none after them; ``align``: what the rows of each are
    padded to where they are put together."""

    sizes: list[int]
    rest: int = 0
    align: int = 1


class Layer(nn.Module):
    """Experts in FP8, with ``plain``, the same in torch alone. x has its rows sorted by expert."""

    sorted = True

    def __init__(
        self, recipe: Recipe, experts: int, device: str, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.recipe, self.experts, self.device = recipe, experts, device
        self.d, self.f = (64, 48) if device == "cpu" else (272, 144)
        self.build()
        self.to(device, dtype)

    def build(self) -> None:
        raise NotImplementedError

    def add(self, name: str, n: int, k: int) -> None:
        w = torch.randn(self.experts, n, k) / k**0.5
        self.register_parameter(name, nn.Parameter(w))

    def batch(self, step: Step) -> tuple[Tensor, Tensor]:
        """x, and where its rows go."""
        t = sum(step.sizes) + step.rest
        x = torch.randn(t, self.d) * torch.exp2(torch.randint(-3, 3, (t, 1)))
        return x.to(self.device, torch.bfloat16), ends(step.sizes, self.device)

    def rows(self, x: Tensor, where: Tensor, e: int) -> tuple[Tensor, Tensor | float]:
        """Which rows go to expert e, and what its output is multiplied with."""
        start, end = [0, *where.tolist()][e : e + 2]
        return torch.arange(start, end), 1.0

    def of_expert(self, x: Tensor, e: int) -> Tensor:
        raise NotImplementedError

    def plain(self, x: Tensor, where: Tensor) -> Tensor:
        y = x.new_zeros(len(x), self.of_expert(x[:0], 0).shape[1])
        for e in range(self.experts):
            t, weight = self.rows(x, where, e)
            y = y.index_add(0, t, weight * self.of_expert(x[t], e))
        return y

    def truth(self, x: Tensor, g: Tensor, step: Step, where: Tensor) -> list[Tensor]:
        """Output and gradients in float64."""
        other = type(self)(OFF, self.experts, "cpu", torch.float64)
        other.d, other.f = self.d, self.f
        for p, ours in zip(other.parameters(), self.state_dict().values(), strict=True):
            p.data = ours.double().cpu()
        return run(other, other.plain, x.double().cpu(), g.double().cpu(), where.cpu())

    def near(self, got: Tensor, truth: Tensor, name: str) -> bool:
        """The router's gradient is what is left of sums that cancel; e5m2 gradients go through two
        products."""
        return sqnr(got.cpu(), truth) > (9 if "router" in name else 16)


class Product(Layer):
    """One ``float8.grouped_mm``."""

    def build(self) -> None:
        self.add("w", self.f, self.d)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return float8.grouped_mm(x, self.w.mT, offs, recipe=self.recipe)

    def of_expert(self, x: Tensor, e: int) -> Tensor:
        return x @ self.w[e].t()

    def truth(self, x: Tensor, g: Tensor, step: Step, where: Tensor) -> list[Tensor]:
        return [*exact(self.recipe, x, self.w.detach(), g, step.sizes)]

    def near(self, got: Tensor, truth: Tensor, name: str) -> bool:
        return relative_error(got, truth) < 2.0**-7 + sums(self.device)


class Split(Layer):
    """``float8.swiglu_experts``."""

    def build(self) -> None:
        for name, n, k in (("gate", self.f, self.d), ("up", self.f, self.d)):
            self.add(name, n, k)
        self.add("down", self.d, self.f)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        weights = self.gate.mT, self.up.mT, self.down.mT
        return float8.swiglu_experts(x, *weights, offs, recipe=self.recipe)

    def of_expert(self, x: Tensor, e: int) -> Tensor:
        return (F.silu(x @ self.gate[e].t()) * (x @ self.up[e].t())) @ self.down[e].t()


class Joint(Layer):
    """The same with gate and up in one."""

    def build(self) -> None:
        self.add("both", 2 * self.f, self.d)
        self.add("down", self.d, self.f)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        both, down = self.both.mT, self.down.mT
        return float8.swiglu_experts(x, both, None, down, offs, recipe=self.recipe)

    def of_expert(self, x: Tensor, e: int) -> Tensor:
        gate, up = (x @ self.both[e].t()).chunk(2, -1)
        return (F.silu(gate) * up) @ self.down[e].t()


class Permuted(Split):
    """Two experts of each token, put together with padding, and with pairs that have none."""

    sorted = False

    def build(self) -> None:
        super().build()
        self.router = nn.Parameter(torch.randn(self.experts, self.d) / self.d**0.5)

    def batch(self, step: Step) -> tuple[Tensor, Tensor]:
        # Less than what they are padded to.
        sizes = [size - (step.align > 1) * (size // 3) for size in step.sizes]
        pairs = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        pairs = torch.cat([pairs, pairs.new_full((step.rest + (sum(sizes) + step.rest) % 2,), -1)])
        self.align = step.align
        chosen = pairs[torch.randperm(len(pairs))].view(-1, 2)
        x = torch.randn(len(chosen), self.d, dtype=torch.bfloat16)
        return x.to(self.device), chosen.to(self.device)

    def scores(self, x: Tensor, chosen: Tensor) -> Tensor:
        return (x @ self.router.t()).sigmoid().gather(1, chosen.clamp(min=0))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        routing = float8.route(chosen, self.experts, align=self.align)
        y = super().forward(float8.permute(x, routing), routing.offs)
        return float8.unpermute(y, routing, self.scores(x, chosen))

    def rows(self, x: Tensor, where: Tensor, e: int) -> tuple[Tensor, Tensor | float]:
        t, j = (where == e).nonzero(as_tuple=True)
        return t, self.scores(x, where)[t, j, None]


class WholeLayer(Permuted):
    """``float8.MoE``, whose router sends each token where the step says."""

    def build(self) -> None:
        self.moe = MoE(self.d, self.f, experts=self.experts, top_k=1)
        with torch.no_grad():
            self.moe.router.weight.mul_(0.02)
            self.moe.router.weight[:, : self.experts] += torch.eye(self.experts)
        if self.recipe is not OFF:
            float8.convert(self.moe, self.recipe)

    def batch(self, step: Step) -> tuple[Tensor, Tensor]:
        sizes = torch.tensor(step.sizes)
        chosen = torch.arange(len(sizes)).repeat_interleave(sizes)[torch.randperm(sum(step.sizes))]
        x = torch.randn(len(chosen), self.d, dtype=torch.bfloat16)
        x[:, : self.experts] = 3 * F.one_hot(chosen, self.experts)
        return x.to(self.device), chosen[:, None].to(self.device)

    def scores(self, x: Tensor, chosen: Tensor) -> Tensor:
        return (x @ self.moe.router.weight.t()).softmax(-1).gather(1, chosen)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        y, _, self.counts = self.moe(x)
        return y

    def of_expert(self, x: Tensor, e: int) -> Tensor:
        gate, up, down = (w[e] for w in self.moe.experts.parameters())
        return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


LAYERS = {
    "grouped_mm": Product,
    "experts": Split,
    "experts, joint": Joint,
    "permuted": Permuted,
    "MoE": WholeLayer,
}


def gradient(layer: Layer, x: Tensor) -> Tensor:
    """Of a layer's output for x."""
    g = torch.randn(len(x), layer.f if isinstance(layer, Product) else layer.d)
    return (g * torch.exp2(torch.randint(-4, 1, (len(x), 1)))).to(x.device, x.dtype)


def run(
    layer: Layer, call: Callable[..., Tensor], x: Tensor, g: Tensor, where: Tensor
) -> list[Tensor]:
    """Output and gradients of x and of the parameters."""
    leaf = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = call(leaf, where)
    y.backward(g)
    assert leaf.grad is not None and all(p.grad is not None for p in layer.parameters())
    return [y.detach(), leaf.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


# ---- two steps in memory full of NaN -------------------------------------------------------------


def ragged(align: int, seed: int) -> tuple[Step, Step]:
    """Groups from 0 to three times their mean, drawn anew for the second step."""
    rng, mean = random.Random(100 * seed + align), 150 if align == 128 else 30
    first, second = (draw(rng, 5, align, mean) for _ in range(2))
    return Step(first, 2 * seed, align), Step(second, rng.randrange(40), align)


CASES = {
    "reported, rows of no group": (Step([7, 0, 41, 0], 16), Step([0, 30, 4, 14], 16)),
    "reported, empty groups": (Step([16, 0, 32, 0]), Step([0, 9, 0, 39])),
    "no rows": (Step([0, 0, 0, 0]), Step([3, 0, 1, 0])),
    "all empty": (Step([0, 0, 0], 9), Step([0, 8, 0], 1)),
    "one token": (Step([0, 0, 1, 0]), Step([1, 0, 0, 0])),
    **{
        f"ragged {align}-{seed}": ragged(align, seed) for align in (1, 16, 128) for seed in range(3)
    },
}


def test_the_draws_are_ragged() -> None:
    for first, second in (steps for case, steps in CASES.items() if case.startswith("ragged")):
        assert first.sizes != second.sizes
        for sizes, _, align in (first, second):
            assert len({*sizes}) > 1
            assert all(size % align == 0 for size in sizes)


def combinations() -> list[Any]:
    """On a CPU not all recipes of each case and layer, and two draws of each alignment."""
    found, gpu = [], needs("cuda")
    for device in ("cpu", "cuda"):
        for i, case in enumerate(CASES):
            if device == "cpu" and case.startswith("ragged") and case.endswith("-2"):
                continue
            for j, layer in enumerate(LAYERS):
                one = EVERY[(i + 2 * j) % len(EVERY)]
                literal = case.startswith("reported")
                some = EVERY if device == "cuda" else RECIPES.values() if literal else [one]
                found += [
                    pytest.param(case, layer, recipe, device, marks=[gpu] * (device == "cuda"),
                                 id=f"{case}-{layer}-{recipe.name}-{device}")
                    for recipe in some
                ]  # fmt: skip
    return found


def poisoned(call: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Where everything that is allocated holds NaN."""
    rubbish = [torch.full((1 << 14,), 0x7F, dtype=torch.uint8) for _ in range(64)]
    del rubbish  # what the allocator hands out next
    with deterministic():
        return call()


@pytest.mark.parametrize(("case", "kind", "recipe", "device"), combinations())
def test_two_steps_of_any_groups_in_memory_full_of_nan(
    case: str, kind: str, recipe: Recipe, device: str
) -> None:
    """Outputs and all gradients are near the truth, and zero where no token adds
    to them, whatever rows of no expert hold; the second step is of another routing."""
    experts = len(CASES[case][0].sizes)
    layer = LAYERS[kind](recipe, experts, device)
    for step in CASES[case]:
        x, where = layer.batch(step)
        g = gradient(layer, x)
        if layer.sorted:
            x[sum(step.sizes) :] = g[sum(step.sizes) :] = torch.nan
        got = poisoned(lambda: run(layer, layer, x, g, where))  # noqa: B023
        if kind == "MoE":
            assert layer.counts.tolist() == step.sizes
        truth = layer.truth(x, g, step, where)
        names = ["y", "gx", *(name for name, _ in layer.named_parameters())]
        for name, t, true in zip(names, got, truth, strict=True):
            assert (t.dtype, t.shape) == (torch.bfloat16, true.shape), name
            few = "router" in name and sum(step.sizes) < 16  # of which nothing may be left
            near = t.isfinite().all() if few else layer.near(t, true, name)
            assert near, (name, step, sqnr(t.cpu(), true.cpu()))
            if t.ndim == 3 or name in ("y", "gx"):
                nothing = ~true.flatten(1).any(1)
                assert not t[nothing].any(), (name, step)
        empty = [not size for size in step.sizes]
        assert all(not w.grad[empty].any() for w in layer.parameters() if w.ndim == 3)
        with torch.no_grad():
            for p in layer.parameters():
                p -= 2.0**-10 * p.grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", LAYERS)
def test_the_same_bits_whatever_memory_held(kind: str, device: str) -> None:
    """In plain memory, and twice where it holds NaN."""
    for recipe in EVERY if device == "cuda" else (ROWWISE, MXFP8):
        layer = LAYERS[kind](recipe, 4, device)
        x, where = layer.batch(CASES["reported, rows of no group"][0])
        g = gradient(layer, x)
        expected = run(layer, layer, x, g, where)
        for _ in range(2):
            got = poisoned(lambda: run(layer, layer, x, g, where))  # noqa: B023
            for t, e in zip(got, expected, strict=True):
                assert_same_bytes(t, e)


# ---- a rank without tokens -----------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """Rows to the ranks they are for; in backward their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, send: list[int], receive: list[int]) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return exchange(x, group, send, receive)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return exchange(g.contiguous(), ctx.group, ctx.receive, ctx.send), None, None, None


def exchange(x: Tensor, group: Any, send: list[int], receive: list[int]) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    group.alltoall_base(out, x, receive, send).wait()
    return out


def expert_parallel(
    x: Tensor, chosen: Tensor, scores: Tensor, weights: list[Tensor], recipe: Recipe, group: Any
) -> Tensor:
    """A layer whose experts are half on each of two ranks; these are ours."""
    half = len(weights[0])
    routing = float8.route(chosen, 2 * half)
    here = exchange(routing.counts, group, [half, half], [half, half]).view(2, half)
    send, receive = routing.counts.view(2, half).sum(1).tolist(), here.sum(1).tolist()
    rows = _Exchange.apply(float8.permute(x, routing), group, send, receive)
    # Those of each rank come sorted by expert.
    order = torch.arange(half).repeat(2).repeat_interleave(here.reshape(-1)).argsort(stable=True)
    stacks = [w.mT for w in weights]
    y = float8.swiglu_experts(rows[order], *stacks, ends(here.sum(0).tolist()), recipe=recipe)
    back = _Exchange.apply(y[order.argsort()], group, receive, send)
    return float8.unpermute(back, routing, scores)


def on_two_ranks(of_rank: Callable[[int, Any], Any]) -> list[Any]:
    """What ``of_rank(rank, group)`` gives for each of two ranks, which are threads. A collective
    that one of them leaves out is waited for in vain, until the group gives up."""
    store, found, errors = dist.HashStore(), [None, None], []

    def run(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=20))
            found[rank] = of_rank(rank, group)
            time.sleep(0.2)  # as in process_group.py
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return found


Batch = tuple[Tensor, Tensor]  # x and the experts of each token
EXPERTS = 4


def train(
    batches: list[Batch], parameters: list[Tensor], layer: Callable[..., Tensor]
) -> list[list[Tensor]]:
    """Output and gradients of x, a router and the experts' weights, for each batch."""
    found = []
    for x, chosen in batches:
        router, *weights = leaves = [p.clone().requires_grad_() for p in parameters]
        leaf = x.clone().requires_grad_()
        scores = (leaf @ router.t()).float().sigmoid().gather(1, chosen)
        y = layer(leaf, chosen, scores, weights)
        y.backward(x / 4)
        assert all(t.grad is not None for t in (leaf, *leaves))
        found.append([y.detach(), leaf.grad, *(t.grad for t in leaves)])
    return found  # type: ignore[return-value]


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize(
    "recipe", [ROWWISE, ROWWISE_WGRAD_HP, BLOCKWISE, MXFP8], ids=lambda r: r.name
)
def test_two_ranks_of_which_one_has_no_token(recipe: Recipe) -> None:
    """With no token on a rank, or none for its experts, gradients have the bits of one
    process, and no rank leaves out a collective, of forward or of backward."""
    d, f = 64, 48
    shapes = [(EXPERTS, d), (EXPERTS, f, d), (EXPERTS, f, d), (EXPERTS, d, f)]
    parameters = [torch.randn(shape).bfloat16() / 8 for shape in shapes]
    batches: list[list[Batch]] = []  # of each rank
    for rank in (0, 1):
        batches.append([])
        for tokens, among in (((9, 14), 4), ((20, 0), 4), ((0, 11), 4), ((7, 6), 2)):
            chosen = torch.rand(tokens[rank], among).argsort(1)[:, :2]
            batches[rank].append((torch.randn(tokens[rank], d).bfloat16(), chosen))

    def of_rank(rank: int, group: Any) -> list[list[Tensor]]:
        router, *weights = parameters
        ours = [router, *(w[2 * rank : 2 * rank + 2] for w in weights)]
        found = train(batches[rank], ours, lambda *a: expert_parallel(*a, recipe, group))
        for _, _, g_router, *_ in found:
            group.allreduce([g_router]).wait()
        return found

    def alone(x: Tensor, chosen: Tensor, scores: Tensor, weights: list[Tensor]) -> Tensor:
        routing = float8.route(chosen, EXPERTS)
        rows, stacks = float8.permute(x, routing), [w.mT for w in weights]
        y = float8.swiglu_experts(rows, *stacks, routing.offs, recipe=recipe)
        return float8.unpermute(y, routing, scores)

    joined = [
        (torch.cat([x, other_x]), torch.cat([chosen, other]))
        for (x, chosen), (other_x, other) in zip(*batches, strict=True)
    ]
    whole = train(joined, parameters, alone)
    ranks = on_two_ranks(of_rank)
    for expected, first, second in zip(whole, *ranks, strict=True):
        for i, t in enumerate(expected):
            if i == 2:  # the router, a sum over ranks
                assert_same_bytes(first[i], second[i])
                assert relative_error(first[i], t) < 2.0**-6
            else:
                assert_same_bytes(torch.cat([first[i], second[i]]), t)
    assert not any(g_w.any() for g_w in ranks[1][-1][3:])  # of experts without tokens


# ---- a loop over experts -------------------------------------------------------------------------


class Loop(nn.Module):
    """Four experts, one after another: layers, or matrices of a stack."""

    def __init__(self, recipe: Recipe, stacked: bool) -> None:
        super().__init__()
        layers = [nn.Linear(32, 16, dtype=torch.bfloat16) for _ in range(4)]
        if stacked:
            self.w = nn.Parameter(torch.randn(4, 16, 32, dtype=torch.bfloat16) / 4)
        else:
            self.layers = nn.ModuleList(layers)
        self.stacked = stacked
        float8.convert(self, recipe)

    def forward(self, x: Tensor, counts: Tensor | list[int]) -> Tensor:
        parts = x.split(counts.tolist() if isinstance(counts, Tensor) else counts)
        if self.stacked:
            return torch.cat([F.linear(part, w) for part, w in zip(parts, self.w, strict=True)])
        return torch.cat([e(part) for part, e in zip(parts, self.layers, strict=True)])


def frames(module: Loop, draws: list[list[int]], tensor: bool, backend: str) -> list[int]:
    """How often a loop has been compiled after each draw, all of which give eager's bits."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    found, call = [], torch.compile(module, backend=counter, fullgraph=True)
    for sizes in draws:
        x, results = torch.randn(sum(sizes), 32).bfloat16(), []
        for run in (call, module):
            leaf = x.clone().requires_grad_()
            module.zero_grad()
            y = run(leaf, torch.tensor(sizes) if tensor else sizes)
            y.square().sum().backward()
            results.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters())])
        for ours, expected in zip(*results, strict=True):
            assert_same_bytes(ours, expected)
        found.append(counter.frame_count)
    return found


@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
def test_a_compiled_loop_over_experts(stacked: bool) -> None:
    """Counts in a tensor are one graph, two where the number of tokens changes too."""
    draws = [[3, 17, 1, 0], [0, 5, 2, 14], [21, 0, 0, 0]]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        if stacked:
            assert frames(Loop(BLOCKWISE, True), draws, True, "aot_eager") == [1, 1, 1]
            return
        draws += [[40, 1, 0, 7], [0, 9, 0, 0]]
        assert frames(Loop(ROWWISE, False), draws, True, "aot_eager") == [1, 1, 1, 2, 2]


def test_a_compiled_loop_over_experts_whose_counts_are_a_list() -> None:
    """Of numbers in a list torch.compile makes 0 and 1 constants, wherever they stand: there are
    two graphs for all draws without them, and one more for each that has them in other places."""
    draws = [[3, 17, 2, 9], [4, 5, 6, 7], [40, 3, 2, 5], [3, 17, 1, 0], [5, 10, 1, 0]]
    assert frames(Loop(ROWWISE, False), draws, False, "eager") == [1, 2, 2, 3, 3]


# ---- padding -----------------------------------------------------------------------------------


def aligned(sizes: list[int], align: int) -> list[int]:
    return [-(-size // align) * align for size in sizes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", [ROWWISE, BLOCKWISE, MXFP8], ids=lambda r: r.name)
def test_what_rows_of_padding_hold_reaches_no_other_row(recipe: Recipe, device: str) -> None:
    """NaN in data and in scales of rows within groups, beside rows of the same tile."""
    sizes = [44, 20, 0, 64, 1]
    padded = aligned(sizes, 16)
    real = torch.zeros(sum(padded) + 5, dtype=torch.bool)
    for (start, _), size in zip(spans(padded), sizes, strict=True):
        real[start : start + size] = True
    x = torch.where(real[:, None], torch.randn(len(real), 272), 0).to(device, torch.bfloat16)
    w, offs = torch.randn(5, 144, 272).to(device, torch.bfloat16) / 16, ends(padded, device)
    plan, real = grouped_plans(recipe, x.device)[0], real.to(device)
    assert plan is not None
    a, b = ops.quantize(x, *plan.a), ops.quantize(w, *plan.b)
    bad = [t.clone() for t in a]
    bad[0].view(torch.uint8)[~real] = 0x7F
    if recipe is MXFP8:
        bad[1].view(torch.uint8)[~real] = 0xFF
    else:
        bad[1][~real] = torch.nan
    lead, columns, inner = plan.b.block

    def multiply(data: Tensor, scale: Tensor) -> Tensor:
        blocks = plan.a.block, (lead, inner, columns)
        rest = (*blocks, torch.bfloat16, plan.fast_accum, plan.impl)
        return ops.grouped_mm(data, b[0].mT, scale, b[1].mT, offs, *rest)

    clean = multiply(*a)
    assert clean[real].isfinite().all() and clean[real].any(1).all()
    assert_same_bytes(multiply(*bad)[real], clean[real])
    # And of x itself, through the layer.
    results = []
    for held in (0.0, float("nan")):
        leaf = torch.where(real[:, None], x, held).requires_grad_()
        y = float8.grouped_mm(leaf, w.mT, offs, recipe=recipe)
        y.backward(torch.where(real[:, None], y.detach(), held))
        assert leaf.grad is not None
        results.append((y.detach()[real], leaf.grad[real]))
    for ours, expected in zip(*results, strict=True):
        assert_same_bytes(ours, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", [TENSORWISE, ROWWISE, BLOCKWISE, MXFP8], ids=lambda r: r.name)
def test_columns_of_padding_are_as_those_of_zeros(recipe: Recipe, device: str) -> None:
    """Within groups they are multiplied, and so are written, scales too, in memory full
    of NaN; what follows the last group holds NaN here."""
    sizes = [44, 20, 0, 64, 1, 128, 130]
    padded = aligned(sizes, 128)
    x, g = (torch.randn(sum(sizes), n).to(device, torch.bfloat16) for n in (272, 144))
    wgrad = grouped_plans(recipe, x.device)[2]
    assert wgrad is not None

    def columns(t: Tensor, how: Any, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
        own = [t[start:end] for start, end in spans(sizes)]
        if zeros:
            own = [F.pad(part, (0, 0, 0, -len(part) % 128)) for part in own]
        tail = t.new_full((9, t.shape[1]), torch.nan)
        offs = ends(padded if zeros else sizes, device)
        args = torch.cat([*own, tail]), offs, None, None, None, *how
        return poisoned(lambda: ops.quantize_grouped(*args)[2:])  # type: ignore[return-value]

    last, products = sum(padded), []
    for zeros in (False, True):
        (a, scale_a, offs_t), (b, scale_b, _) = (
            columns(t, how, zeros) for t, how in ((g, wgrad.a), (x, wgrad.b))
        )
        assert offs_t.tolist() == ends(padded).tolist()
        blocks = wgrad.a.block, wgrad.b.block
        rest = (*blocks, torch.bfloat16, wgrad.fast_accum, wgrad.impl)
        products.append((ops.grouped_wgrad(a, b, scale_a, scale_b, offs_t, *rest),))
        for data, scale, block in ((a, scale_a, blocks[0]), (b, scale_b, blocks[1])):
            # Scales of whole groups are a row for each, others one for each block of columns.
            if block[1] != FULL:
                scale = scale[:, : last // block[1]]
            products[-1] += (data[:, :last], scale)
    for ours, expected in zip(*products, strict=True):
        assert_same_bytes(ours, expected)
    assert products[0][0].isfinite().all()


# ---- another architecture's kernels --------------------------------------------------------------


def test_no_kernel_of_another_architecture_is_chosen_or_launched() -> None:
    """On sm_103, which is no sm_90 and no sm_100."""
    for arch in ("sm_103", "sm_120"):
        profile = describe(arch)
        patches = [
            mock.patch.object(module, "device_profile", lambda device: profile)  # noqa: B023
            for module in (kernels, sys.modules["float8.grouped"])
        ]
        with patches[0], patches[1]:
            for recipe in RECIPES.values():
                plans = [p for p in grouped_plans(recipe, torch.device("cpu")) if p is not None]
                assert {plan.impl for plan in plans} == {"triton"}
            x, offs = torch.randn(8, 32), ends([5, 3])
            a, scale_a = ops.quantize(x, (1, FULL), float8.E4M3FN.dtype, "fp32")
            b, scale_b = ops.quantize(x.new_ones(2, 16, 32), (1, 1, FULL), a.dtype, "fp32")
            args = a, b.mT, scale_a, scale_b.mT, offs, (1, FULL), (1, FULL, 1), torch.bfloat16, True
            t, scale_t, offs_t = ops.quantize_grouped(
                x, offs, None, None, None, (1, FULL), a.dtype, "fp32"
            )[2:]
            columns = t, t, scale_t, scale_t, offs_t, (1, FULL), (1, FULL), torch.bfloat16, True
            for op, operands, impl in (
                (ops.grouped_mm, args, "hopper"),
                (ops.grouped_mm, args, "torch_grouped"),
                (ops.grouped_wgrad, columns, "hopper"),
            ):
                with pytest.raises(ValueError, match=r"cannot multiply these groups: .*sm_90"):
                    op(*operands, impl)


# ---- nothing waits for the device ----------------------------------------------------------------


@contextmanager
def nothing_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def has_torchs_kernel() -> bool:
    """Whether torch multiplies groups in bf16 by a kernel, and not one after another itself."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)


@needs("fp8")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", EVERY, ids=lambda r: r.name)
def test_no_layer_waits_for_the_device(recipe: Recipe, kind: str) -> None:
    """In forward and in backward, for routings that differ."""
    if None in (recipe.forward, recipe.dgrad, recipe.wgrad) and not has_torchs_kernel():
        pytest.skip("needs a GPU for which torch has a grouped kernel in bf16")
    layer = LAYERS[kind](recipe, 4, "cuda")
    for i, step in enumerate((Step([7, 0, 41, 20], 16), Step([20, 30, 18, 0], 16))):
        x, where = layer.batch(step)
        g = gradient(layer, x)
        if i == 0:
            run(layer, layer, x, g, where)  # compiles
        with nothing_waits():
            run(layer, layer, x, g, where)


@needs("cuda")
@pytest.mark.parametrize(
    ("dtype", "features", "waits"),
    [
        (torch.bfloat16, 144, False),
        (torch.bfloat16, 140, True),  # rows that are not whole 16 bytes
        (torch.float16, 144, True),
        (torch.float32, 144, True),
    ],
)
def test_which_products_in_high_precision_wait(
    dtype: torch.dtype, features: int, waits: bool
) -> None:
    """Those that torch's kernel does not take, which are made one after another."""
    if not waits and not has_torchs_kernel():
        pytest.skip("needs a GPU for which torch has a grouped kernel in bf16")
    x = torch.randn(48, 64, device="cuda", dtype=dtype, requires_grad=True)
    w = torch.randn(3, features, 64, device="cuda", dtype=dtype, requires_grad=True)
    g, offs = torch.randn(48, features, device="cuda", dtype=dtype), ends([16, 0, 20], "cuda")
    float8.grouped_mm(x, w.mT, offs, recipe=OFF).backward(g)
    y = float8.grouped_mm(x, w.mT, offs, recipe=OFF)
    with nothing_waits():
        if not waits:
            float8.grouped_mm(x, w.mT, offs, recipe=OFF).backward(g)
            return
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            float8.grouped_mm(x, w.mT, offs, recipe=OFF)
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            y.backward(g)


# ---- nothing is compiled anew --------------------------------------------------------------------

TOKENS = (16, 2, 17, 127, 128, 129, 5000, 48, 31, 64, 2048, 333, 15, 3, 7, 999, 512, 4099, 1700, 96)


def products() -> list[ModuleType]:
    """The modules of device code that multiply."""
    names = ("matmul_hopper_triton", "matmul_triton", "grouped_triton")
    return [sys.modules[m] for n in names if (m := f"float8.kernels.{n}") in sys.modules]


def compiled() -> int:
    """Products, counted in Triton's own caches."""
    kernels = [module.matmul_kernel for module in products() if hasattr(module, "matmul_kernel")]
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def forget_what_is_prepared() -> None:
    for module in products():
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


@needs("fp8")
@pytest.mark.parametrize("recipe", ALL_FP8, ids=lambda r: r.name)
@pytest.mark.parametrize("kind", ["grouped_mm", "experts"])
def test_other_numbers_of_tokens_compile_no_product(kind: str, recipe: Recipe) -> None:
    """After the first two, of rows or of columns."""
    layer, rng = LAYERS[kind](recipe, 4, "cuda"), random.Random(0)

    def step(tokens: int) -> None:
        cuts = sorted(rng.randint(0, tokens) for _ in range(3))
        sizes = [end - start for start, end in pairwise([0, *cuts, tokens])]
        x, where = layer.batch(Step(sizes))
        run(layer, layer, x, gradient(layer, x), where)
        forget_what_is_prepared()  # what is prepared is not looked up again

    step(1000)
    step(1)
    before = compiled()
    assert before > 0
    for tokens in TOKENS:
        step(tokens)
        assert compiled() == before, tokens


@pytest.mark.parametrize("recipe", ALL_FP8, ids=lambda r: r.name)
@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_90, hopper", "sm_100", "gfx942"])
def test_products_are_compiled_for_all_numbers_of_tokens(
    arch: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Triton would compile for: constants, and sizes that are 1 or a multiple of 16."""
    pytest.importorskip("triton.experimental.gluon")
    from float8.kernels import grouped_hopper, grouped_triton, matmul_hopper_triton, matmul_triton

    of_hopper, profile = "hopper" in arch, describe(arch[:6].rstrip(","))
    if of_hopper and recipe is MXFP8:
        pytest.skip("that kernel takes no scales of 32")
    monkeypatch.setattr(grouped_triton, "device_profile", lambda device: profile)
    monkeypatch.setattr(grouped_triton, "_launch", grouped_triton._launch.__wrapped__)
    product = matmul_hopper_triton._product.__wrapped__
    monkeypatch.setattr(matmul_hopper_triton, "_product", product)
    module = matmul_hopper_triton if of_hopper else matmul_triton
    seen = specialisations(monkeypatch, module, ["matmul_kernel"])["matmul_kernel"]
    run = grouped_hopper if of_hopper else grouped_triton
    forward, _, wgrad = grouped_plans(recipe, torch.device("cpu"))
    w = torch.randn(3, 144, 272)
    assert forward is not None and wgrad is not None
    b = ops.quantize(w, *forward.b)
    for kind in ("rows", "columns"):
        seen.clear()
        for tokens in (1000, 1, *TOKENS):
            x, offs = torch.zeros(tokens, 272), ends([tokens // 3, 0, tokens - tokens // 3])
            if kind == "rows":
                a, blocks = ops.quantize(x, *forward.a), (forward.a.block, forward.b.block)
                run.multiply_rows(a[0], b[0], a[1], b[1], offs, *blocks, torch.bfloat16, False)
                continue
            none = (None, None, None)
            a = ops.quantize_grouped(x[:, :144], offs, *none, *wgrad.a)[2:]
            c = ops.quantize_grouped(x, offs, *none, *wgrad.b)[2:]
            blocks = wgrad.a.block, wgrad.b.block
            run.multiply_columns(a[0], c[0], a[1], c[1], a[2], *blocks, torch.bfloat16, False)
        assert len(seen) == 1, (kind, seen)
