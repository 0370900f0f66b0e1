"""SwiGLU experts: the same bits as their parts, experts and rows that hold nothing, what is kept
for backward, and torch.compile.

Letters: T tokens, sorted by expert; E experts; D model width, F hidden width. Weights of a problem
are parameters [E, N, K] as models have them, multiplied as their transposes.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from recorders import Ops
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import float8
from float8 import (
    BLOCKWISE,
    FULL,
    MXFP8,
    RECIPES,
    ROWWISE,
    ROWWISE_WGRAD_HP,
    TENSORWISE,
    Cast,
    Gemm,
    Recipe,
    assume_device,
    swiglu_experts,
)
from float8.kernels.quantize_grouped import padded_tokens
from float8.mlp import silu_times
from float8.testing import (
    assert_same_bytes,
    deterministic,
    needs,
    relative_error,
    saved_bytes,
    sqnr,
)

DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
STACKED = pytest.mark.parametrize("stacked", [False, True], ids=["", "stacked"])


def _uniform(name: str, cast: Cast) -> Recipe:
    gemm = Gemm(cast, cast)
    return Recipe(name, gemm, gemm, gemm)


SAVE = dataclasses.replace(ROWWISE, name="save", weight_for_dgrad="save")
MIXED = Recipe(  # every operand has a block and a format of its own
    "mixed",
    Gemm(Cast("e4m3", (1, FULL)), Cast("e4m3", (64, FULL), "pow2")),
    Gemm(Cast("e5m2", (2, FULL)), Cast("e4m3", (1, FULL), "pow2")),
    Gemm(Cast("e5m2", (1, FULL)), Cast("e4m3", (32, FULL))),
)
EVERY = (
    *RECIPES.values(),
    Recipe("off", None, None, None),
    dataclasses.replace(BLOCKWISE, name="blockwise, dgrad hp", dgrad=None),
    SAVE,
    MIXED,
    _uniform("odd blocks", Cast("e4m3", (3, 64), "e8m0_even")),
)
NAMED = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
ALL = pytest.mark.parametrize("recipe", EVERY, ids=lambda recipe: recipe.name)

Leaves = tuple[Tensor, ...]  # x, gate, up, down; or x, gate and up in one, down
Layer = Callable[..., Tensor]


def ends(sizes: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def problem(
    sizes: Sequence[int],
    rest: int = 0,
    d: int = 64,
    f: int = 48,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    stacked: bool = False,
) -> tuple[Leaves, Tensor, Tensor]:
    """Leaves, a gradient of the output, offs; experts and rows of different magnitudes, ``rest``
    rows of no expert."""
    t, e = sum(sizes) + rest, len(sizes)
    x = torch.randn(t, d) * torch.exp2(torch.randint(-3, 3, (t, 1)))
    gate, up = (torch.randn(e, f, d) / max(d, 1) ** 0.5 for _ in range(2))
    down = torch.randn(e, d, f) * torch.exp2(torch.randint(-4, 0, (e, d, 1)))
    g = torch.randn(t, d) * torch.exp2(torch.randint(-4, 1, (t, 1)))
    into = [torch.cat([gate, up], 1)] if stacked else [gate, up]
    leaves = tuple(leaf.to(device, dtype) for leaf in (x, *into, down))
    return leaves, g.to(device, dtype), ends(sizes, device)


def experts(recipe: Recipe) -> Layer:
    def layer(offs: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
        gate, *up, down = (w.mT for w in weights)
        return swiglu_experts(x, gate, up[0] if up else None, down, offs, recipe=recipe)

    return layer


def parts(recipe: Recipe) -> Layer:
    """The layer put together of ``float8.grouped_mm`` and the activation."""

    def layer(offs: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
        *into, down = (w.mT for w in weights)
        products = [float8.grouped_mm(x, w, offs, recipe=recipe) for w in into]
        gate, up = products if len(products) == 2 else products[0].chunk(2, 1)
        return float8.grouped_mm(silu_times(gate, up), down, offs, recipe=recipe)

    return layer


def one_by_one(offs: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
    """Every expert by torch alone; rows of none are zero."""
    *into, down = weights
    y = []
    for e, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
        products = [x[start:end] @ w[e].t() for w in into]
        gate, up = products if len(products) == 2 else products[0].chunk(2, 1)
        y.append((F.silu(gate) * up) @ down[e].t())
    return torch.cat([*y, x[int(offs[-1]) :] * 0])


def run(layer: Layer, leaves: Leaves, g: Tensor, offs: Tensor, wanted: Any = None) -> list[Tensor]:
    """Output and the gradients of the leaves that are wanted, all by default."""
    copies = [t.detach().clone() for t in leaves]
    chosen = [
        copies[i].requires_grad_() for i in (range(len(leaves)) if wanted is None else wanted)
    ]
    y = layer(offs, *copies)
    assert y.requires_grad == bool(chosen)
    if chosen:
        y.backward(g)
    assert all(t.grad is not None for t in chosen)
    return [y.detach(), *(t.grad for t in chosen)]  # type: ignore[list-item]


def assert_all_same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        try:
            assert_same_bytes(a, b)
        except AssertionError as error:
            raise AssertionError(f"tensor {i}: {error}") from error


# ---- values ------------------------------------------------------------------------------------

CASES = {
    "all empty": ([0, 0, 0], 9),
    "one expert": ([70], 0),
    "first and last empty": ([0, 20, 13, 0], 5),
    "whole blocks": ([128, 0, 256], 0),
    "sizes of 7, 9 and 16": ([7, 9, 16], 1),
    "one empty of whole fours": ([44, 20, 0, 64], 0),
    "fifteen sizes": (list(range(1, 16)), 0),
    "more experts than tokens": ([0, 1] * 4 + [0] * 8, 2),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


@cases
@STACKED
@ALL
def test_the_same_bits_as_their_parts(
    recipe: Recipe, stacked: bool, case: tuple[list[int], int]
) -> None:
    for d, f, dtype in ((64, 48, torch.bfloat16), (19, 33, torch.float32)):
        args = problem(*case, d, f, dtype, stacked=stacked)
        assert_all_same(run(experts(recipe), *args), run(parts(recipe), *args))


@pytest.mark.parametrize("device", DEVICES)
@STACKED
@NAMED
def test_near_the_exact_layer(recipe: Recipe, stacked: bool, device: str) -> None:
    args = problem([130, 0, 71, 200], 30, 136, 264, torch.bfloat16, device, stacked)
    got = run(experts(recipe), *args)
    leaves, g, offs = args
    expected = run(one_by_one, tuple(t.double() for t in leaves), g.double(), offs)
    for t, e in zip(got, expected, strict=True):
        assert t.dtype == torch.bfloat16
        assert sqnr(t, e) > 17  # e5m2 gradients through two products; e4m3 alone gives 22


@STACKED
@NAMED
def test_sizes_of_one_and_none(recipe: Recipe, stacked: bool) -> None:
    for d, f, sizes in product((1, 17), (1, 15), ([0, 0], [1, 0], [0, 33])):
        args = problem(sizes, 0, d, f, stacked=stacked)
        got = run(experts(recipe), *args)
        assert_all_same(got, run(parts(recipe), *args))
        assert all(t.isfinite().all() for t in got)


@pytest.mark.parametrize("blemish", [float("nan"), float("inf"), 1e30])
@STACKED
@ALL
def test_what_rows_of_no_expert_hold_reaches_nothing(
    recipe: Recipe, stacked: bool, blemish: float
) -> None:
    sizes = [0, 5, 0, 17, 1, 0]
    leaves, g, offs = problem(sizes, 41, stacked=stacked)
    clean = run(experts(recipe), leaves, g, offs)
    leaves[0][sum(sizes) :], g[sum(sizes) :] = blemish, blemish
    y, gx, *gws = got = run(experts(recipe), leaves, g, offs)
    assert_all_same(got, clean)
    assert all(t.isfinite().all() for t in got)
    assert not y[sum(sizes) :].any()
    assert not gx[sum(sizes) :].any()
    for gw in gws:
        assert [bool(gw[e].any()) for e in range(len(sizes))] == [size > 0 for size in sizes]


@NAMED
def test_nan_in_one_expert_leaves_the_others(recipe: Recipe) -> None:
    leaves, g, offs = problem([6, 10, 0, 16], 2)
    clean = run(experts(recipe), leaves, g, offs)
    leaves[0][8, 3] = leaves[3][1, 5, 7] = float("nan")
    y, gx, *gws = run(experts(recipe), leaves, g, offs)
    assert y[8].isnan().all()
    for gw, was in zip(gws, clean[2:], strict=True):
        assert gw[1].isnan().any()
        if recipe is not TENSORWISE:  # whose rows share their scales
            assert_same_bytes(gw[[0, 2, 3]], was[[0, 2, 3]])
    if recipe is not TENSORWISE:
        others = torch.cat([torch.arange(6), torch.arange(16, 34)])
        assert_same_bytes(y[others], clean[0][others])
        assert_same_bytes(gx[others], clean[1][others])


@NAMED
def test_strides_do_not_change_a_bit(recipe: Recipe) -> None:
    leaves, g, offs = problem([30, 0, 9], 3)
    expected = run(experts(recipe), leaves, g, offs)
    relaid: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.mT.contiguous().mT,  # weights are [E, K, N] then
        lambda t: torch.cat([t, t * 1e9], -1)[..., : t.shape[-1]],
        lambda t: torch.cat([t.new_ones(1), t.reshape(-1)])[1:].view(t.shape),
    ]
    for relay in relaid:
        views = [relay(t).detach().requires_grad_() for t in leaves]
        experts(recipe)(offs, *views).backward(relay(g))
        assert_all_same([t.grad for t in views], expected[1:])  # type: ignore[misc]
    x = leaves[0].clone().requires_grad_()
    experts(recipe)(offs, x, *leaves[1:]).sum().backward()  # an expanded gradient
    assert x.grad is not None
    assert_same_bytes(x.grad, run(experts(recipe), leaves, torch.ones_like(g), offs, (0,))[1])


def draw(rng: random.Random) -> tuple[list[int], int]:
    """Ragged sizes, many of them 0, and rows of no expert: 100 rows in all."""
    cuts = sorted(rng.choice([0, 1, 40, rng.randint(0, 100)]) for _ in range(5))
    return [b - a for a, b in pairwise([0, *cuts])], 100 - cuts[-1]


@STACKED
@ALL
def test_two_steps_of_ragged_experts_in_memory_full_of_nan(recipe: Recipe, stacked: bool) -> None:
    """What nobody wrote is read by nobody, in the second step neither."""
    rng = random.Random(0)
    for _ in range(3):
        args = problem(*draw(rng), dtype=torch.bfloat16, stacked=stacked)
        expected = run(experts(recipe), *args)
        for _ in range(2):
            rubbish = [torch.full((1 << 14,), 0x7F, dtype=torch.uint8) for _ in range(64)]
            del rubbish  # what the allocator hands out next
            with deterministic():
                assert_all_same(run(experts(recipe), *args), expected)


def test_gradients_accumulate_over_micro_batches_where_experts_are_empty() -> None:
    """An expert without a token has a gradient, of zeros."""
    weights = [nn.Parameter(t) for t in problem([0, 0, 0])[0][1:]]
    total = [torch.zeros_like(w) for w in weights]
    for sizes in ([0, 8, 0], [0, 0, 0], [5, 0, 0]):
        (x, *_), g, offs = problem(sizes)
        experts(ROWWISE)(offs, x, *weights).backward(g)
        for t, grad in zip(total, run(experts(ROWWISE), (x, *weights), g, offs)[2:], strict=True):
            t += grad
    for w, t in zip(weights, total, strict=True):
        assert w.grad is not None
        assert_same_bytes(w.grad, t)
        assert not w.grad[2].any()


def test_routing_weights_of_two_experts_per_token() -> None:
    """Gradients with weights of .9 and .1 as torch alone has them."""
    (x, *weights), _, _ = problem([24, 0, 0, 0])
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(24)]).reshape(-1)
    order, scores = chosen.argsort(stable=True), torch.tensor([0.9, 0.1]).repeat(24)
    offs = torch.bincount(chosen, minlength=4).cumsum(0).to(torch.int32)

    def routed(layer: Layer) -> Layer:
        def call(offs: Tensor, x: Tensor, scores: Tensor, *weights: Tensor) -> Tensor:
            y = layer(offs, x[order // 2], *weights) * scores[order, None]
            return torch.zeros_like(x).index_add(0, order // 2, y)

        return call

    leaves, g = (x, scores, *weights), torch.randn_like(x)
    got, plain = (run(routed(f), leaves, g, offs) for f in (experts(ROWWISE), one_by_one))
    for ours, theirs in zip(got, plain, strict=True):
        assert relative_error(ours, theirs) < 0.1


# ---- what is made and kept ---------------------------------------------------------------------

T, D, F_, SIZES = 96, 64, 128, [40, 0, 56]
P = padded_tokens(T, len(SIZES))


def expected_bytes(flags: tuple[bool, ...], stacked: bool, save: bool) -> int:
    """Of rowwise experts in bf16 besides their parameters, each once."""
    x, *into, down = flags
    e = len(SIZES)
    total = e * 4  # offs, where anything is kept
    if any(into):
        total += P * D + 4 * e * D  # x's columns, and their scales
    if any(into) or down:
        total += e * 4  # offs_t, of x and of h
        total += (any(into) and down) * e * 4
    if x or any(into):
        total += 2 * 2 * T * F_  # the products
        total += e * (save * D * F_ + 4 * F_)  # the weights' scales, or amaxes to cast them with
    if down:
        total += P * F_ + 4 * e * F_
    if x:
        total += 2 * e * (save * D * F_ + 4 * D * (0.5 if stacked else 1))
    return int(total) if any(flags) else 0


@STACKED
@pytest.mark.parametrize("recipe", [ROWWISE, SAVE], ids=lambda r: r.name)
def test_only_what_a_requested_gradient_needs_is_made_and_kept(
    recipe: Recipe, stacked: bool
) -> None:
    leaves, g, offs = problem(SIZES, 0, D, F_, torch.bfloat16, stacked=stacked)
    _, *grads = run(experts(recipe), leaves, g, offs)
    memory = {t.untyped_storage().data_ptr() for t in leaves[1:]}
    for flags in product([False, True], repeat=len(leaves)):
        wanted = [i for i, flag in enumerate(flags) if flag]
        got = run(experts(recipe), leaves, g, offs, wanted)
        assert_all_same(got[1:], [grads[i] for i in wanted])
        sizes: dict[int, int] = {}

        def pack(t: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        copies = [t.detach().requires_grad_(flag) for t, flag in zip(leaves, flags, strict=True)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = experts(recipe)(offs, *copies)
        ours = sum(n for at, n in sizes.items() if at not in memory)
        assert ours == expected_bytes(flags, stacked, recipe is SAVE), flags
        assert recipe is not SAVE or memory.isdisjoint(sizes)
        del y


def test_x_and_the_gradients_are_cast_once() -> None:
    args = problem(SIZES)
    with Ops() as ops:
        run(experts(ROWWISE), *args)
    assert ops.seen == {
        "quantize_grouped": 2,  # x; the gradient of y
        "swiglu_quantize_grouped": 1,  # h
        "swiglu_backward_quantize_grouped": 1,  # the gradients of gate and up
        "quantize_and_measure": 3,  # weights: forward
        "quantize": 3,  # and dgrad
        "grouped_mm": 6,
        "grouped_wgrad": 3,
    }
    with Ops() as ops:
        run(experts(ROWWISE), *args, wanted=(0,))  # frozen experts
    assert ops.seen == {
        "quantize_and_measure": 3,
        "quantize": 2 + 3,
        "swiglu_quantize": 1,
        "swiglu_backward_quantize": 1,
        "grouped_mm": 6,
    }
    args = problem(SIZES, stacked=True)
    with Ops() as ops:
        run(experts(ROWWISE), *args)
    assert ops.seen == {
        "quantize_grouped": 2,
        "swiglu_quantize_grouped": 1,
        "swiglu_backward_quantize_grouped": 1,
        "quantize_and_measure": 2,
        "quantize": 2,
        "grouped_mm": 4,
        "grouped_wgrad": 2,
    }


@NAMED
def test_nothing_is_kept_without_gradients(recipe: Recipe) -> None:
    leaves, g, offs = problem(SIZES)
    expected = run(experts(recipe), leaves, g, offs)[0]
    weights = [nn.Parameter(t) for t in leaves[1:]]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), saved_bytes() as total:
            assert_same_bytes(experts(recipe)(offs, leaves[0], *weights), expected)
        assert total() == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
@NAMED
def test_checkpointing_gives_the_same_bits(recipe: Recipe, use_reentrant: bool) -> None:
    args = problem([40, 0, 33], 3)

    def again(*tensors: Tensor) -> Tensor:
        y: Tensor = checkpoint(experts(recipe), *tensors, use_reentrant=use_reentrant)
        return y

    assert_all_same(run(again, *args), run(experts(recipe), *args))


# ---- dtypes, autocast, other tensors, devices ----------------------------------------------------


@NAMED
def test_autocast_with_float32_weights(recipe: Recipe) -> None:
    leaves, g, offs = problem([10, 0, 22], 4)

    def cast(layer: Layer) -> Layer:
        def call(offs: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return layer(offs, x.bfloat16() if layer is not ours else x, *weights)

        return call

    ours = experts(recipe)
    got = run(cast(ours), leaves, g.bfloat16(), offs)
    assert [t.dtype for t in got] == [torch.bfloat16] + [torch.float32] * 4
    assert_all_same(got, run(cast(parts(recipe)), leaves, g.bfloat16(), offs))


def test_weights_that_are_float8_weights() -> None:
    (x, *weights), g, offs = problem([10, 0, 22], 4)
    wrapped = [nn.Parameter(float8.Float8Weight(w, MXFP8)) for w in weights]
    experts(ROWWISE)(offs, x, *wrapped).backward(g)
    expected = run(experts(ROWWISE), (x, *weights), g, offs)[2:]
    assert_all_same([w.grad for w in wrapped], expected)  # type: ignore[misc]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_wgrad_hp", "blockwise"])
def test_fnuz_in_forward_and_in_a_backward_elsewhere(name: str) -> None:
    """Formats are decided in forward."""
    recipe, (leaves, g, offs) = RECIPES[name], problem([10, 0, 22], 4)
    with assume_device("gfx942"):
        expected = run(parts(recipe), leaves, g, offs)
        copies = [t.clone().requires_grad_() for t in leaves]
        y = experts(recipe)(offs, *copies)
    y.backward(g)
    assert_all_same([y.detach(), *(t.grad for t in copies)], expected)  # type: ignore[misc]
    assert not torch.equal(y, experts(recipe)(offs, *leaves))


def test_on_the_meta_device() -> None:
    leaves, g, offs = problem([10, 0, 22], 4, device="meta")
    copies = [t.requires_grad_() for t in leaves]
    y = experts(ROWWISE)(offs, *copies)
    y.sum().backward()
    assert y.shape == g.shape
    assert [t.grad is not None and t.grad.shape == t.shape for t in copies] == [True] * 4


# ---- cached weights ------------------------------------------------------------------------------


class Stacks(nn.Module):
    """Experts as modules multiply them: names say how the parameter lies and what multiplies it."""

    def __init__(self, way: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.way = way
        shape = (4, 48, 64) if "mT" in way else (4, 64, 48)
        self.w = nn.Parameter(torch.randn(shape, dtype=dtype) / 8)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        w = self.w.mT if "mT" in self.way else self.w  # [E, K, N]
        if "grouped" in self.way:
            return F.grouped_mm(x, w, offs=offs)
        if "bmm" in self.way:
            return torch.bmm(x.reshape(4, -1, x.shape[1]), w).flatten(0, 1)
        if "chunk" in self.way:
            w = torch.cat(w.chunk(2, -1)[::-1], -1)
        spans = pairwise([0, *offs.tolist()])
        if "linear" in self.way:
            return torch.cat([F.linear(x[s:t], w[e].t()) for e, (s, t) in enumerate(spans)])
        return torch.cat([x[s:t] @ w[e] for e, (s, t) in enumerate(spans)])


WAYS = ("grouped", "grouped mT", "bmm", "bmm mT", "matmul", "matmul mT", "linear", "linear mT")


class WeightCasts(TorchDispatchMode):
    """Counts layouts that casts of matrices of 64 x 48 make."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if "quantize" in op.name() and op.namespace == "float8":
            shapes = [tuple(t.shape)[-2:] for t in out[::2]]
            self.count += sum(shape in ((64, 48), (48, 64)) for shape in shapes)
        return out


@pytest.mark.parametrize("way", [*WAYS, "matmul chunk"])
@pytest.mark.parametrize("recipe", [*RECIPES.values(), SAVE, MIXED], ids=lambda r: r.name)
def test_cached_weights_of_stacks(recipe: Recipe, way: str) -> None:
    model = Stacks(way)
    float8.convert(model, recipe)
    x, offs = torch.randn(72, 64, dtype=torch.bfloat16), ends([16, 0, 31, 25])

    def step() -> list[Tensor]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = model(leaf, offs)
        y.square().sum().backward()
        return [y.detach(), leaf.grad, model.w.grad.clone()]  # type: ignore[list-item, union-attr]

    expected = step()
    with WeightCasts() as casts, float8.cached_weights(model):
        layouts = 4 if recipe is MIXED else 2
        assert casts.count == layouts
        for _ in range(2):
            assert_all_same(step(), expected)
        assert (casts.count == layouts) == ("chunk" not in way)  # which no copy serves
    assert model.w.record.cached is None  # type: ignore[union-attr]
    assert_all_same(step(), expected)


def test_cached_weights_that_changed_are_seen() -> None:
    x, offs = torch.randn(72, 64, dtype=torch.bfloat16), ends([16, 0, 31, 25])
    changes: list[Callable[[nn.Parameter], object]] = [
        lambda w: w.mul_(2),
        lambda w: w[1].zero_(),
        lambda w: w.mT.copy_(w.mT * 2),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: torch.optim.SGD([w], lr=0.1).step(),
    ]
    for way in ("grouped mT", "linear"):
        for change in changes:
            model = Stacks(way)
            float8.convert(model)
            with float8.cached_weights(model):
                model(x, offs).sum().backward()
                with torch.no_grad():
                    change(model.w)
                with pytest.raises(RuntimeError, match=r"changed inside float8\.cached_weights"):
                    model(x, offs)
    with float8.cached_weights(model):  # what .data is given is another tensor, and is cast at use
        before = model(x, offs)
        model.w.data = model.w.data * 2
        assert_same_bytes(model(x, offs), before * 2)


def test_cached_weights_of_one_matrix_for_all_experts() -> None:
    model = Stacks("matmul")
    model.w = nn.Parameter(model.w.detach()[:1].expand(4, -1, -1), requires_grad=False)
    float8.convert(model)
    x, offs = torch.randn(72, 64, dtype=torch.bfloat16), ends([16, 0, 31, 25])
    y = model(x, offs)
    with float8.cached_weights(model):
        assert_same_bytes(model(x, offs), y)


def test_compiled_code_has_copies_within_the_block_and_casts_after_it() -> None:
    model = Stacks("grouped mT")
    float8.convert(model)
    x, offs = torch.randn(72, 64, dtype=torch.bfloat16), ends([16, 0, 31, 25])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with float8.cached_weights(model):
            assert_same_bytes(compiled(x, offs), model(x, offs))
        with torch.no_grad():
            model.w.mul_(2)
    assert_same_bytes(compiled(x, offs), model(x, offs))


# ---- refusals ------------------------------------------------------------------------------------


@STACKED
def test_a_second_derivative_and_functorch_are_refused(stacked: bool) -> None:
    (x, *weights), _, offs = problem([10, 0, 22], stacked=stacked)
    layer = experts(ROWWISE)
    x.requires_grad_()
    for loss in (torch.sum, lambda y: y.pow(2).sum()):
        y = layer(offs, x, *weights)
        with pytest.raises(NotImplementedError, match=r"swiglu_experts is differentiable once"):
            torch.autograd.grad(loss(y), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^float8\.swiglu_experts was called under a f"):
        torch.func.grad(lambda x: layer(offs, x, *weights).sum())(x)


def test_what_does_not_fit_is_refused() -> None:
    (x, gate, up, down), _, offs = problem([10, 0, 22])
    a, b, c = gate.mT, up.mT, down.mT
    wrong: list[Callable[[], object]] = [
        lambda: swiglu_experts(x, gate, up, c, offs),
        lambda: swiglu_experts(x, a, b[:2], c, offs),
        lambda: swiglu_experts(x, a, None, c, offs),
        lambda: swiglu_experts(x, a[0], b[0], c[0], offs),
        lambda: swiglu_experts(x[:, 1:], a, b, c, offs),
        lambda: swiglu_experts(x[None], a, b, c, offs),
        lambda: swiglu_experts(x, a, b, c, offs[1:]),
        lambda: swiglu_experts(x, a, b, c, offs.long()),
        lambda: swiglu_experts(x, a, b.bfloat16(), c, offs),
        lambda: swiglu_experts(x, a, b, c, offs, recipe="rowwise"),  # type: ignore[arg-type]
    ]
    texts = []
    for call in wrong:
        with pytest.raises(ValueError) as info:
            call()
        texts.append(str(info.value))
    assert_expected_inline(
        "\n".join(texts),
        """\
x and weights of shapes (32, 64), (3, 48, 64), (3, 48, 64), (3, 48, 64) make no SwiGLU experts; needed (T, D), (E, D, F), (E, D, F) and (E, F, D)
x and weights of shapes (32, 64), (3, 64, 48), (2, 64, 48), (3, 48, 64) make no SwiGLU experts; needed (T, D), (E, D, F), (E, D, F) and (E, F, D)
x and weights of shapes (32, 64), (3, 64, 48), (3, 48, 64) make no SwiGLU experts; needed (T, D), (E, D, 2 F) and (E, F, D)
x and weights of shapes (32, 64), (64, 48), (64, 48), (48, 64) make no SwiGLU experts; needed (T, D), (E, D, F), (E, D, F) and (E, F, D)
x and weights of shapes (32, 63), (3, 64, 48), (3, 64, 48), (3, 48, 64) make no SwiGLU experts; needed (T, D), (E, D, F), (E, D, F) and (E, F, D)
x and weights of shapes (1, 32, 64), (3, 64, 48), (3, 64, 48), (3, 48, 64) make no SwiGLU experts; needed (T, D), (E, D, F), (E, D, F) and (E, F, D)
offs is torch.int32 of shape (2,); it must be torch.int32 of shape (3,), with where each group ends
offs is torch.int64 of shape (3,); it must be torch.int32 of shape (3,), with where each group ends
x is torch.float32 and w torch.bfloat16; bring both to one dtype, or run under torch.autocast
recipe='rowwise' is no float8.Recipe; float8.RECIPES holds tensorwise, rowwise, rowwise_wgrad_hp, blockwise, mxfp8""",  # noqa: E501
    )
    with pytest.raises(NotImplementedError, match="got a Float8TrainingTensor"):
        swiglu_experts(x, a, b, float8.quantize(c, (1, 1, FULL)), offs)


# ---- torch.compile -------------------------------------------------------------------------------


@STACKED
@ALL
def test_one_graph_for_twenty_routings(recipe: Recipe, stacked: bool) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, rng = CompileCounterWithBackend("aot_eager"), random.Random(0)

    def layer(offs: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
        return experts(recipe)(offs, x * 2, *weights).tanh()

    call = torch.compile(layer, backend=counter, fullgraph=True)
    leaves, g, _ = problem([60, 0, 0, 0, 0], 40, dtype=torch.bfloat16, stacked=stacked)
    for _ in range(20):
        offs = ends(draw(rng)[0])
        assert_all_same(run(call, leaves, g, offs), run(layer, leaves, g, offs))
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
@STACKED
@pytest.mark.parametrize("recipe", [ROWWISE, BLOCKWISE, ROWWISE_WGRAD_HP], ids=lambda r: r.name)
def test_inductor(recipe: Recipe, stacked: bool, device: str) -> None:
    args = problem([10, 0, 50], 4, dtype=torch.bfloat16, device=device, stacked=stacked)
    compiled = torch.compile(experts(recipe), fullgraph=True)
    for t, e in zip(run(compiled, *args), run(experts(recipe), *args), strict=True):
        assert sqnr(t, e) > 30


def test_two_graphs_for_all_numbers_of_tokens() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(experts(ROWWISE), backend=counter, fullgraph=True)
    for sizes in ([3, 17, 1], [40, 0, 2], [0, 5, 1], [130, 9, 0]):
        args = problem(sizes)
        assert_all_same(run(call, *args), run(experts(ROWWISE), *args))
    assert counter.frame_count <= 2
