"""The grouped product of expert layers: its values against float64 and against ``float8.linear`` of
each group, rows and groups that hold nothing, what is kept for backward, and torch.compile.

Shape letters: T tokens, G groups, K in features, N out features. Weights of a problem are [G, N, K]
and multiplied as their transposes, the views of [G, K, N] that models pass.
"""

import dataclasses
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from test_matmul import (
    OURS,
    Matrix,
    assert_near,
    assert_numbers,
    drawn,
    much_memory,  # noqa: F401  (a fixture)
    operand,
    some,
    some_of,
    values,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

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
)
from float8.devices import describe
from float8.kernels import grouped as kernels
from float8.kernels import matmul
from float8.kernels.matmul import Operand
from float8.kernels.quantize_grouped import padded_tokens
from float8.scaling import Block
from float8.testing import (
    assert_same_bytes,
    deterministic,
    needs,
    relative_error,
    saved_bytes,
)

DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
ops = float8.ops


def _uniform(name: str, cast: Cast) -> Recipe:
    gemm = Gemm(cast, cast)
    return Recipe(name, gemm, gemm, gemm)


def _save(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, name=f"{recipe.name}, save", weight_for_dgrad="save")


OFF = Recipe("off", None, None, None)
EVERY = (
    *RECIPES.values(),
    OFF,
    dataclasses.replace(ROWWISE, name="rowwise, forward hp", forward=None),
    dataclasses.replace(BLOCKWISE, name="blockwise, dgrad hp", dgrad=None),
    *map(_save, (ROWWISE, BLOCKWISE, MXFP8)),
    _uniform("e5m2 rows", Cast("e5m2", (1, FULL), "pow2")),
    _uniform("odd blocks", Cast("e4m3", (3, 64), "e8m0_even")),
)
every = pytest.mark.parametrize("recipe", EVERY, ids=lambda recipe: recipe.name)
named = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
# Scales of rows of x and g are their own: groups are cast as if they were alone.
alone = pytest.mark.parametrize(
    "recipe", [r for r in EVERY if r not in (TENSORWISE, EVERY[-1])], ids=lambda recipe: recipe.name
)

Problem = tuple[Tensor, Tensor, Tensor, Tensor]  # x, w, g, offs
Grads = tuple[Tensor, Tensor, Tensor]  # y, gx, gw


def ends(sizes: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def spans(sizes: list[int]) -> list[tuple[int, int]]:
    return list(pairwise([0, *ends(sizes).tolist()]))


def problem(
    sizes: list[int],
    rest: int = 0,
    n: int = 48,
    k: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Problem:
    """Rows, and experts, of different magnitudes; ``rest`` rows are of no group."""
    t, e = sum(sizes) + rest, len(sizes)
    x = torch.randn(t, k) * torch.exp2(torch.randint(-3, 3, (t, 1)))
    w = torch.randn(e, n, k) * torch.exp2(torch.randint(-6, -2, (e, n, 1)))
    g = torch.randn(t, n) * torch.exp2(torch.randint(-4, 1, (t, 1)))
    return (*(part.to(device, dtype) for part in (x, w, g)), ends(sizes, device))  # type: ignore[return-value]


def run(recipe: Recipe, x: Tensor, w: Tensor, g: Tensor, offs: Tensor, layer: Any = None) -> Grads:
    """Output and gradients of a layer, ``float8.grouped_mm`` by default."""
    x, w = (t.detach().clone().requires_grad_() for t in (x, w))
    y = (layer or product)(x, w, offs, recipe)
    y.backward(g)
    assert x.grad is not None
    assert w.grad is not None
    return y.detach(), x.grad, w.grad


def product(x: Tensor, w: Tensor, offs: Tensor, recipe: Recipe) -> Tensor:
    return float8.grouped_mm(x, w.mT, offs, recipe=recipe)


def by_linear(
    recipe: Recipe, x: Tensor, w: Tensor, g: Tensor, sizes: list[int], padded: bool = False
) -> Grads:
    """``float8.linear`` of each group alone, and zeros; ``padded`` with rows of zeros to a multiple
    of 128, over which weight gradients are summed."""
    y, gx, gw = g.new_zeros(g.shape), torch.zeros_like(x), torch.zeros_like(w)
    for e, (start, end) in enumerate(spans(sizes)):
        rest = -(end - start) % 128 if padded else 0
        x_e, g_e = (
            torch.cat([t[start:end], t.new_zeros(rest, t.shape[1])]).requires_grad_()
            for t in (x, g)
        )
        w_e = w[e].detach().clone().requires_grad_()
        y_e = float8.linear(x_e, w_e, recipe=recipe)
        y_e.backward(g_e.detach())
        assert x_e.grad is not None
        assert w_e.grad is not None
        y[start:end], gx[start:end] = y_e.detach()[: end - start], x_e.grad[: end - start]
        gw[e] = w_e.grad
    return y, gx, gw


def assert_all_same(got: Any, expected: Any) -> None:
    for name, a, b in zip(("y", "gx", "gw"), got, expected, strict=True):
        try:
            assert_same_bytes(a, b)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


# ---- values ------------------------------------------------------------------------------------


def exact(
    recipe: Recipe, x: Tensor, w: Tensor, g: Tensor, sizes: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Products of the dequantised operands in float64."""

    def cast(t: Tensor, how: Cast | None) -> Tensor:
        if how is None:
            return t.double()
        cast = float8.quantize(t, how.block, how.kind, how.scale_mode)
        return cast.to(torch.float32).dequantize().double()

    x, g = (torch.cat([t[: sum(sizes)], torch.zeros_like(t[sum(sizes) :])]) for t in (x, g))
    (x_cast, w_cast), (g_cast, wt_cast), (gt_cast, xt_cast) = (
        (None, None) if gemm is None else (gemm.a, gemm.b)
        for gemm in (recipe.forward, recipe.dgrad, recipe.wgrad)
    )
    x_rows, g_rows = cast(x, x_cast), cast(g, g_cast)
    y, gx, gw = g.double() * 0, x.double() * 0, w.double() * 0
    for e, (s, t) in enumerate(spans(sizes)):
        y[s:t] = x_rows[s:t] @ cast(w[e], w_cast).t()
        gx[s:t] = g_rows[s:t] @ cast(w[e].t(), wt_cast).t()
        gw[e] = cast(g[s:t].t(), gt_cast) @ cast(x[s:t].t(), xt_cast).t()
    return y, gx, gw


@pytest.mark.parametrize("device", DEVICES)
@every
def test_products_of_the_dequantised_operands(recipe: Recipe, device: str) -> None:
    for dtype, unit in (
        (torch.float32, 2.0**-20),
        (torch.bfloat16, 2.0**-7),
        (torch.float16, 2.0**-10),
    ):
        sizes = [7, 0, 130, 1, 62]
        x, w, g, offs = problem(sizes, 20, dtype=dtype, device=device)
        got = run(recipe, x, w, g, offs)
        for ours, truth, like in zip(got, exact(recipe, x, w, g, sizes), (g, x, w), strict=True):
            assert ours.dtype == dtype
            assert ours.shape == like.shape
            assert relative_error(ours, truth) < unit + sums(device)


def sums(device: str) -> float:
    """What tensor cores drop of a sum that stays in them."""
    return 2.0**-10 if device == "cuda" else 0.0


def draw(rng: random.Random, count: int, align: int, mean: int = 40) -> list[int]:
    """Sizes of groups from 0 to three times their mean."""
    return [
        rng.choice([0, 1, 2, 3]) * rng.randrange(mean) // align * align or 0 for _ in range(count)
    ]


CASES: dict[str, tuple[list[int], int]] = {
    "all empty": ([0, 0, 0], 0),
    "all empty, rows of no group": ([0, 0, 0], 9),
    "one group": ([70], 0),
    "one token": ([1], 0),
    "one group of some": ([33], 31),
    "the first and the last empty": ([0, 20, 13, 0], 0),
    "aligned to a block": ([128, 0, 256], 0),
    "every other empty": ([16, 0, 32, 0], 0),
    "sizes of 7, 9 and 16": ([7, 9, 16], 1),
    "one empty of whole fours": ([44, 20, 0, 64], 0),
    "fewer than a block": ([3, 17, 1, 0], 0),
    "fifteen sizes": (list(range(1, 16)), 0),
    "more groups than tokens": ([0, 1] * 4 + [0] * 24, 2),
} | {
    f"random, aligned to {align}": (draw(random.Random(align), 6, align, 200), 5 * align)
    for align in (1, 16, 128)
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def nobodys(result: Tensor, sizes: list[int]) -> Tensor:
    """What no token of a group adds to: rows of no group of y and of x's gradient, and gradients of
    the weights of groups without tokens."""
    return result[sum(sizes) :] if result.ndim == 2 else result[[not size for size in sizes]]


@pytest.mark.parametrize("device", DEVICES)
@cases
@alone
def test_the_same_bits_as_a_linear_layer_per_group(
    recipe: Recipe, case: tuple[list[int], int], device: str
) -> None:
    """Weights' gradients of FP8 products are sums over padded rows, and have the bits of those. On
    a GPU other kernels multiply for a linear layer, and in high precision BLAS picks its kernel by
    the size: those are near the exact product."""
    sizes, rest = case
    gemms = (recipe.forward, recipe.dgrad, recipe.wgrad)
    for n, k, dtype in ((48, 64, torch.bfloat16), (19, 33, torch.float32)):
        x, w, g, offs = problem(sizes, rest, n, k, dtype, device)
        got, truth = run(recipe, x, w, g, offs), exact(recipe, x, w, g, sizes)
        bits = by_linear(recipe, x, w, g, sizes)[:2]
        bits = (*bits, by_linear(recipe, x, w, g, sizes, padded=True)[2])
        for gemm, ours, near, same in zip(gemms, got, truth, bits, strict=True):
            if device == "cpu" and gemm is not None:
                assert_same_bytes(ours, same)
            else:
                unit = max(torch.finfo(dtype).eps, 2.0**-20)
                assert relative_error(ours, near) < unit + sums(device)
                assert not nobodys(ours, sizes).any()


@cases
def test_tensors_are_cast_whole_and_weight_gradients_per_group(
    case: tuple[list[int], int],
) -> None:
    sizes, rest = case
    x, w, g, offs = problem(sizes, rest)
    y, gx, gw = run(TENSORWISE, x, w, g, offs)
    assert_same_bytes(gw, by_linear(TENSORWISE, x, w, g, sizes, padded=True)[2])
    truth = exact(TENSORWISE, x, w, g, sizes)
    assert relative_error(y, truth[0]) < 2.0**-20
    assert relative_error(gx, truth[1]) < 2.0**-20


@named
def test_features_of_any_number(recipe: Recipe) -> None:
    sizes = [5, 0, 130]
    for n, k in ((1, 1), (1, 200), (130, 3), (272, 96), (320, 128), (768, 16), (0, 8), (8, 0)):
        x, w, g, offs = problem(sizes, 2, n, k)
        got = run(recipe, x, w, g, offs)
        for ours, truth in zip(got, exact(recipe, x, w, g, sizes), strict=True):
            assert ours.isfinite().all()
            assert relative_error(ours, truth) < 2.0**-19


@named
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_at_all(recipe: Recipe, dtype: torch.dtype) -> None:
    x, w, g, offs = problem([0, 0, 0, 0], 0, dtype=dtype)
    y, gx, gw = run(recipe, x, w, g, offs)
    assert (y.shape, gx.shape, gw.shape) == ((0, 48), (0, 64), (4, 48, 64))
    assert not gw.any()


@named
def test_strides_do_not_change_a_bit(recipe: Recipe) -> None:
    sizes = [30, 0, 9]
    x, w, g, offs = problem(sizes, 3, dtype=torch.bfloat16)
    expected = run(recipe, x, w, g, offs)
    relaid: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.mT.contiguous().mT,
        lambda t: torch.cat([t, t * 1e9], -1)[..., : t.shape[-1]],
        lambda t: torch.cat([t.new_ones(1), t.reshape(-1)])[1:].view(t.shape),
    ]
    for relay in relaid:
        leaf_x, leaf_w = (relay(t).detach().requires_grad_() for t in (x, w))
        y = float8.grouped_mm(leaf_x, leaf_w.mT, offs, recipe=recipe)
        y.backward(relay(g))
        assert leaf_x.grad is not None
        assert leaf_w.grad is not None
        assert_all_same((y, leaf_x.grad, leaf_w.grad), expected)
    leaf_x, leaf_w = x.clone().requires_grad_(), w.mT.contiguous().requires_grad_()  # [G, K, N]
    y = float8.grouped_mm(leaf_x, leaf_w, offs, recipe=recipe)
    y.backward(g)
    assert leaf_x.grad is not None
    assert leaf_w.grad is not None
    assert_all_same((y, leaf_x.grad, leaf_w.grad.mT), expected)
    y = float8.grouped_mm(leaf_x, leaf_w, offs, recipe=recipe)
    y.sum().backward()  # an expanded gradient


def test_the_contract_of_torchs_grouped_mm() -> None:
    x, w, g, offs = problem([20, 0, 44], 0, dtype=torch.bfloat16)

    def by_torch(x: Tensor, w: Tensor, offs: Tensor, recipe: Recipe) -> Tensor:
        return torch._grouped_mm(x, w.mT, offs=offs)

    got, expected = run(ROWWISE, x, w, g, offs), run(ROWWISE, x, w, g, offs, by_torch)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert 0 < relative_error(ours, theirs) < 0.06


# ---- rows of no group, empty groups, memory nobody wrote ---------------------------------------


@every
@pytest.mark.parametrize("blemish", [float("nan"), float("inf"), 1e30])
def test_what_rows_of_no_group_hold_reaches_nothing(recipe: Recipe, blemish: float) -> None:
    sizes = [0, 5, 0, 0, 17, 0, 1, 0]
    x, w, g, offs = problem(sizes, 41)
    clean = run(recipe, x, w, g, offs)
    x[sum(sizes) :], g[sum(sizes) :] = blemish, blemish
    got = run(recipe, x, w, g, offs)
    assert_all_same(got, clean)
    y, gx, gw = got
    for t in got:
        assert t.isfinite().all()
    assert not y[sum(sizes) :].any()
    assert not gx[sum(sizes) :].any()
    for e, size in enumerate(sizes):
        assert bool(gw[e].any()) == (size > 0)


@every
def test_two_steps_in_memory_full_of_nan(recipe: Recipe) -> None:
    x, w, g, offs = problem([0, 5, 0, 0, 17, 0, 1, 0], 41)
    expected = run(recipe, x, w, g, offs)
    for _ in range(2):
        rubbish = [torch.full((1 << 14,), 0x7F, dtype=torch.uint8) for _ in range(64)]
        del rubbish  # what the allocator hands out next
        with deterministic():
            got = run(recipe, x, w, g, offs)
        assert_all_same(got, expected)


@alone
def test_nan_in_one_expert_leaves_the_others(recipe: Recipe) -> None:
    sizes = [6, 10, 0, 16]
    x, w, g, offs = problem(sizes, 2)
    clean = run(recipe, x, w, g, offs)
    others = torch.ones(len(x), dtype=torch.bool)
    others[6:16] = False
    bad_x, bad_w, bad_g = (t.clone() for t in (x, w, g))
    bad_x[8, 3] = bad_w[1, 5, 7] = bad_g[9, 1] = float("nan")
    y, gx, gw = run(recipe, bad_x, bad_w, bad_g, offs)
    assert_same_bytes(y[others], clean[0][others])
    assert_same_bytes(gx[others], clean[1][others])
    assert_same_bytes(gw[[0, 2, 3]], clean[2][[0, 2, 3]])
    for t in (y[8], gx[9], gw[1]):
        assert t.isnan().any()


def test_nan_in_one_expert_leaves_the_weight_gradients_of_others_under_tensorwise() -> None:
    """Forward shares the scale of x; weight gradients do not."""
    x, w, g, offs = problem([6, 10, 0, 16])
    clean = run(TENSORWISE, x, w, g, offs)
    x[8, 3] = float("nan")
    y, gx, gw = run(TENSORWISE, x, w, g, offs)
    assert y.isnan().all()
    assert_same_bytes(gx, clean[1])
    assert_same_bytes(gw[[0, 2, 3]], clean[2][[0, 2, 3]])
    assert gw[1].isnan().all()


@pytest.mark.parametrize("recipe", [TENSORWISE, ROWWISE, BLOCKWISE, MXFP8], ids=lambda r: r.name)
def test_padding_of_columns_is_not_read(recipe: Recipe) -> None:
    """NaN where nothing is: past the last group's columns, in data and in scales."""
    x, _, g, offs = problem([30, 0, 100], 300)
    wgrad = recipe.plan(x.device)[2]
    assert wgrad is not None
    casts = [
        ops.quantize_grouped(t, offs, None, None, None, *how)[2:]
        for t, how in ((g, wgrad.a), (x, wgrad.b))
    ]
    (a, scale_a, offs_t), (b, scale_b, _) = casts
    args = offs_t, wgrad.a.block, wgrad.b.block, torch.float32, False, "torch"
    expected = ops.grouped_wgrad(a, b, scale_a, scale_b, *args)
    last = int(offs_t[-1])
    assert last < a.shape[1]
    for t in (a, b):
        t.view(torch.uint8)[:, last:] = 0x7F
    for scale, how in ((scale_a, wgrad.a), (scale_b, wgrad.b)):
        if how.block[1] != FULL:
            scale[:, last // how.block[1] :] = torch.nan
    assert_same_bytes(ops.grouped_wgrad(a, b, scale_a, scale_b, *args), expected)


def test_gradients_accumulate_over_micro_batches_where_experts_are_empty() -> None:
    w = nn.Parameter(torch.randn(3, 16, 32))
    total = torch.zeros_like(w)
    for sizes in ([0, 8, 0], [0, 0, 0], [5, 0, 0]):
        x, _, g, offs = problem(sizes, 0, 16, 32)
        float8.grouped_mm(x, w.mT, offs).backward(g)
        total += run(ROWWISE, x, w, g, offs)[2]
        assert w.grad is not None
        assert w.grad.shape == w.shape
    assert w.grad is not None
    assert_same_bytes(w.grad, total)
    assert not w.grad[2].any()


@pytest.mark.parametrize("recipe", [ROWWISE, MXFP8], ids=lambda r: r.name)
def test_the_order_of_tokens_and_of_experts_does_not_matter(recipe: Recipe) -> None:
    sizes, order = [9, 0, 30, 4], [2, 0, 3, 1]
    x, w, g, offs = problem(sizes)
    y, gx, gw = run(recipe, x, w, g, offs)
    rows = torch.cat([torch.arange(*spans(sizes)[e]) for e in order])
    moved = [sizes[e] for e in order]
    got = run(recipe, x[rows], w[order], g[rows], ends(moved))
    # BLAS may add up a row otherwise where it stands elsewhere; another row's sum is nowhere near.
    for ours, theirs in zip(got, (y[rows], gx[rows], gw[order]), strict=True):
        assert relative_error(ours, theirs) < 2.0**-20
    shuffled = torch.cat([s + torch.randperm(t - s) for s, t in spans(sizes)])
    got = run(recipe, x[shuffled], w, g[shuffled], offs)
    assert relative_error(got[0], y[shuffled]) < 2.0**-20
    assert relative_error(got[1], gx[shuffled]) < 2.0**-20


def test_routing_weights_of_two_experts_per_token() -> None:
    """Gradients as autograd has them of a plain layer, where every token goes to two experts."""
    tokens, experts, k, n = 24, 4, 32, 16
    x, w = torch.randn(tokens, k), torch.randn(experts, n, k)
    scores = torch.tensor([0.9, 0.1]).expand(tokens, 2)
    chosen = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)]).reshape(-1)
    order = chosen.argsort(stable=True)
    offs = torch.bincount(chosen, minlength=experts).cumsum(0).to(torch.int32)

    def layer(multiply: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        routed = leaves[0].repeat_interleave(2, 0)[order]
        y = multiply(routed, leaves[1]) * scores.reshape(-1)[order, None]
        torch.zeros(tokens, n).index_add(0, order // 2, y).square().sum().backward()
        return leaves[0].grad, leaves[1].grad  # type: ignore[return-value]

    got = layer(lambda x, w: float8.grouped_mm(x, w.mT, offs))
    plain = layer(lambda x, w: torch.einsum("tk,tnk->tn", x, w[chosen[order]]))
    for ours, theirs in zip(got, plain, strict=True):
        assert relative_error(ours, theirs) < 0.08


# ---- what is kept for backward -----------------------------------------------------------------


def saved(f: Callable[[], Tensor]) -> list[Tensor]:
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        f()
    return kept


def storages(*tensors: Tensor) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


@every
def test_only_what_a_requested_gradient_needs_is_kept(recipe: Recipe) -> None:
    x, w, _, offs = problem([10, 0, 22], 0, 64, 128)

    def kept(needs_x: bool, needs_w: bool) -> list[Tensor]:
        leaf_x, leaf_w = x.requires_grad_(needs_x), w.requires_grad_(needs_w)
        return saved(lambda: float8.grouped_mm(leaf_x, leaf_w.mT, offs, recipe=recipe))

    columns = padded_tokens(len(x), len(offs)) * x.shape[1]
    saves = recipe.weight_for_dgrad == "save"
    assert kept(False, False) == []
    frozen_w = kept(True, False)
    assert (storages(w, offs) <= storages(*frozen_w)) != saves
    # Besides them the amaxes with which w is cast again.
    assert sum(t.nbytes for t in frozen_w) <= w.nbytes + offs.nbytes + 4 * 3 * 128
    frozen_x = kept(False, True)
    assert storages(w).isdisjoint(storages(*frozen_x))
    if recipe.wgrad is None:
        assert storages(*frozen_x) == storages(x, offs)
    else:
        assert storages(x).isdisjoint(storages(*frozen_x))
        assert sum(t.nbytes for t in frozen_x if t.itemsize == 1 and t.shape[0] == 128) >= columns
        assert sum(t.nbytes for t in frozen_x) <= columns * 1.1 + 4 * 128 * 3 + offs.nbytes
    with torch.no_grad():
        assert kept(True, True) == []


def test_one_byte_for_each_element_of_x() -> None:
    w = nn.Parameter(torch.randn(2, 64, 128, dtype=torch.bfloat16))
    x = torch.randn(256, 128, dtype=torch.bfloat16, requires_grad=True)
    with saved_bytes() as total:
        float8.grouped_mm(x, w.mT, ends([128, 128]))
    # A group more of padding than there is, the scales, offs, and the weight, seen through a view,
    # with the amaxes to cast it again.
    assert total() - w.nbytes <= padded_tokens(256, 2) * 128 + 2 * 2 * 128 * 4 + 8


@every
def test_frozen_weights_and_inputs_without_gradient(recipe: Recipe) -> None:
    sizes = [10, 0, 22]
    x, w, g, offs = problem(sizes, 4)
    _, gx, gw = run(recipe, x, w, g, offs)
    leaf = x.clone().requires_grad_()
    float8.grouped_mm(leaf, w.mT, offs, recipe=recipe).backward(g)
    assert leaf.grad is not None
    assert_same_bytes(leaf.grad, gx)
    leaf = w.clone().requires_grad_()
    float8.grouped_mm(x, leaf.mT, offs, recipe=recipe).backward(g)
    assert leaf.grad is not None
    assert_same_bytes(leaf.grad, gw)


@every
def test_saved_weights_give_the_same_bits(recipe: Recipe) -> None:
    if recipe.dgrad is None or recipe.weight_for_dgrad == "save":
        return
    args = problem([10, 0, 22], 4)
    assert_all_same(run(_save(recipe), *args), run(recipe, *args))


# ---- dtypes, autocast, other tensors -----------------------------------------------------------


@named
def test_autocast(recipe: Recipe) -> None:
    x, w, g, offs = problem([10, 0, 22], 4)
    leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = float8.grouped_mm(leaf_x, leaf_w.mT, offs, recipe=recipe)
    assert y.dtype == torch.bfloat16
    y.backward(g.bfloat16())
    assert leaf_x.grad is not None
    assert leaf_w.grad is not None
    assert leaf_x.grad.dtype == leaf_w.grad.dtype == torch.float32
    # The weights are cast from float32.
    plain = run(recipe, x.bfloat16(), w.bfloat16(), g.bfloat16(), offs)
    assert relative_error(y, plain[0]) < 0.05
    for e, (s, t) in enumerate(spans([10, 0, 22])):
        if recipe.name in ("rowwise", "mxfp8"):
            with torch.autocast("cpu", torch.bfloat16):
                assert_same_bytes(y[s:t], float8.linear(x[s:t], w[e], recipe=recipe))


@named
def test_autocast_rounds_no_gradient_of_float32_weights_to_its_dtype(recipe: Recipe) -> None:
    """That of x and g in float32, of which casts make the same bytes."""
    x, w, g, offs = problem([10, 0, 22], 4)
    x, g = x.bfloat16(), g.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        gw = run(recipe, x.float(), w, g, offs)[2]
    expected = run(recipe, x.float(), w, g.float(), offs)[2]
    if recipe.wgrad is None:
        expected = expected.bfloat16().float()
    assert_same_bytes(gw, expected)


def test_a_float8_weight_multiplies_as_the_call_says() -> None:
    x, w, g, offs = problem([10, 0, 22], 4)
    weight = nn.Parameter(float8.Float8Weight(w, MXFP8))
    y = float8.grouped_mm(x, weight.mT, offs, recipe=ROWWISE)
    y.backward(g)
    expected = run(ROWWISE, x, w, g, offs)
    assert_same_bytes(y, expected[0])
    assert weight.grad is not None
    assert_same_bytes(weight.grad, expected[2])


@named
def test_fnuz(recipe: Recipe) -> None:
    """The formats of gfx942, and no vendor's kernel, while it is assumed."""
    sizes = [10, 0, 22]
    x, w, g, offs = problem(sizes, 4)
    plain = run(recipe, x, w, g, offs)
    with assume_device("gfx942"):
        got = run(recipe, x, w, g, offs)
        truth = exact(recipe, x, w, g, sizes)
        leaf = w.clone().requires_grad_()
        kept = saved(lambda: float8.grouped_mm(x, leaf.mT, offs, recipe=recipe))
    for ours, expected in zip(got, truth, strict=True):
        assert relative_error(ours, expected) < 2.0**-20
    if recipe.wgrad is not None:
        assert {t.dtype for t in kept if t.itemsize == 1} - {float8.E8M0.dtype} <= {
            float8.E4M3FNUZ.dtype,
            float8.E5M2FNUZ.dtype,
        }
    assert not torch.equal(got[0], plain[0]) or recipe is MXFP8


def test_no_second_derivative() -> None:
    x, w, _, offs = problem([10, 0, 22])
    y = float8.grouped_mm(x.requires_grad_(), w.mT, offs).square().sum()
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(y, x, create_graph=True)


# ---- torch.compile, fake tensors, opcheck --------------------------------------------------------


@every
def test_one_graph_for_all_routings(recipe: Recipe) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def layer(x: Tensor, w: Tensor, offs: Tensor, recipe: Recipe) -> Tensor:
        return product(x * 2, w, offs, recipe).tanh()

    call, rng = torch.compile(layer, backend=counter, fullgraph=True), random.Random(0)
    x, w, g, _ = problem([60, 0, 0, 0], 8, dtype=torch.bfloat16)
    for _ in range(20):
        cuts = sorted(rng.randint(0, 68) for _ in range(4))
        offs = torch.tensor(cuts, dtype=torch.int32)
        assert_all_same(run(recipe, x, w, g, offs, call), run(recipe, x, w, g, offs, layer))
    assert counter.frame_count == 1


@pytest.mark.parametrize("recipe", [ROWWISE, BLOCKWISE, ROWWISE_WGRAD_HP], ids=lambda r: r.name)
def test_two_graphs_for_all_numbers_of_tokens(recipe: Recipe) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(product, backend=counter, fullgraph=True)
    for sizes in ([3, 17, 1, 0], [40, 0, 0, 2], [0, 0, 5, 1], [130, 9, 0, 0]):
        x, w, g, offs = problem(sizes)
        assert_all_same(run(recipe, x, w, g, offs, call), run(recipe, x, w, g, offs))
    assert counter.frame_count <= 2


def rows_args(recipe: Recipe) -> tuple[Any, ...]:
    x, w, _, offs = problem([20, 0, 120], 10, 24, 40)
    forward = recipe.plan(x.device)[0]
    assert forward is not None
    a, scale_a = ops.quantize(x, *forward.a)
    b, scale_b = ops.quantize(w, (1, *forward.b.block), *forward.b[1:])
    blocks = forward.a.block, (1, *forward.b.block[::-1])
    return (a, b.mT, scale_a, scale_b.mT, offs, *blocks, torch.bfloat16, False, "torch")


def columns_args(recipe: Recipe) -> tuple[Any, ...]:
    x, _, g, offs = problem([20, 0, 120], 10, 24, 40)
    wgrad = recipe.plan(x.device)[2]
    assert wgrad is not None
    none = (None, None, None)
    a, scale_a, offs_t = ops.quantize_grouped(g, offs, *none, *wgrad.a)[2:]
    b, scale_b, _ = ops.quantize_grouped(x, offs, *none, *wgrad.b)[2:]
    blocks = wgrad.a.block, wgrad.b.block
    return (a, b, scale_a, scale_b, offs_t, *blocks, torch.float16, False, "torch")


def added_args(recipe: Recipe) -> tuple[Any, ...]:
    *args, _, fast, impl = columns_args(recipe)
    return (torch.randn(3, 24, 40).half(), *args, fast, impl)


FP8_RECIPES = [TENSORWISE, ROWWISE, BLOCKWISE, MXFP8]


def calls() -> list[tuple[Any, tuple[Any, ...]]]:
    x, w, g, offs = problem([20, 0, 120], 10, 24, 40)
    return [
        *((ops.grouped_mm.default, rows_args(recipe)) for recipe in FP8_RECIPES),
        *((ops.grouped_wgrad.default, columns_args(recipe)) for recipe in FP8_RECIPES),
        *((ops.grouped_wgrad_add_.default, added_args(recipe)) for recipe in FP8_RECIPES),
        (ops.grouped_mm_hp.default, (x, w.mT, offs)),
        (ops.grouped_mm_hp.default, (g.t(), x, offs)),
    ]


def facts(t: Tensor | None) -> object:
    return None if t is None else (t.shape, t.dtype, t.stride())


@pytest.mark.parametrize("index", range(14))
def test_ops(index: int) -> None:
    op, args = calls()[index]
    # test_schema compares the inputs by arithmetic that torch does not have on FP8.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, args, test_utils=checks)
    real = op(*args)
    meta = [t.to("meta") if isinstance(t, Tensor) else t for t in args]
    assert facts(op(*meta)) == facts(real)
    with FakeTensorMode() as fake:
        faked = [fake.from_tensor(t) if isinstance(t, Tensor) else t for t in args]
        assert facts(op(*faked)) == facts(real)


def test_what_the_references_refuse_fake_tensors_refuse() -> None:
    """All but the values in offs; texts are in docs/refusals.md."""
    rows, columns, added = rows_args(ROWWISE), columns_args(ROWWISE), added_args(ROWWISE)
    out = added[0]
    wrong = [
        *((ops.grouped_mm, rows, at, bad) for at, bad in (
            (0, rows[0][0]), (0, rows[0][:, 1:]), (1, rows[1][0]), (2, rows[2].half()),
            (2, rows[2][1:]), (2, rows[2].t()), (3, rows[3].double()), (3, rows[3][0]),
            (3, rows[3][:1]), (4, rows[4].long()), (4, rows[4][1:]), (5, (FULL,)), (5, (1, 8)),
            (6, (1, FULL)), (6, (1, FULL, 0)), (7, torch.float64), (9, "fastest"),
        )),
        *((ops.grouped_wgrad, columns, at, bad) for at, bad in (
            (0, columns[0][0]), (0, columns[0][:, 1:]), (2, columns[2].half()),
            (2, columns[2][:, 1:]), (2, columns[2].t()), (3, columns[3].double()),
            (3, columns[3][0]), (4, columns[4].long()), (4, columns[4][None]), (4, columns[4][:0]),
            (5, (FULL,)), (5, (1, 8)), (6, (0, FULL)), (7, torch.int8), (9, "torch_grouped"),
        )),
        *((ops.grouped_wgrad_add_, added, at, bad) for at, bad in (
            (0, out.double()), (0, out[1:]), (0, out.mT), (0, out.mT.contiguous().mT), (0, out[0]),
            (1, added[1][:, 1:]), (3, added[3].half()), (9, "torch_grouped"),
        )),
    ]  # fmt: skip
    for op, args, at, bad in wrong:
        for device in ("cpu", "meta"):
            called = [*args[:at], bad, *args[at + 1 :]]
            with pytest.raises(ValueError):
                op(*(t.to(device) if isinstance(t, Tensor) else t for t in called))
    with pytest.raises(ValueError, match="and meta; move them to one device"):
        ops.grouped_wgrad_add_(out.to("meta"), *added[1:])
    for op, args in ((ops.grouped_mm, rows), (ops.grouped_wgrad, columns)):
        with pytest.raises(ValueError, match="and meta; move them to one device"):
            op(*args[:4], args[4].to("meta"), *args[5:])


@every
def test_products_added_in_compiled_code(recipe: Recipe) -> None:
    """In place, in one graph."""
    if recipe.wgrad is None:
        return
    out, *args = added_args(recipe)

    def add(out: Tensor, *args: Any) -> Tensor:
        ops.grouped_wgrad_add_(out, *args)
        ops.grouped_wgrad_add_(out, *args)
        return out.float() * 2

    outs = [out.float(), out.float()]
    plain = add(outs[0], *args)
    call = torch.compile(add, backend="aot_eager", fullgraph=True)
    assert_same_bytes(call(outs[1], *args), plain)
    assert_same_bytes(outs[1], outs[0])
    product = ops.grouped_wgrad(*args[:-2], torch.float32, *args[-2:])
    assert_same_bytes(outs[0], out.float() + product + product)


# ---- who multiplies ------------------------------------------------------------------------------


def test_torchs_kernel_is_never_chosen_and_asks_for_what_it_takes() -> None:
    left = Operand(float8.E4M3FN.dtype, (1, FULL), torch.float32)
    right = left._replace(block=(1, FULL, 1))
    names = list(kernels.IMPLEMENTATIONS)
    assert names.index("torch_grouped") > names.index("torch")  # which never refuses
    refuse = kernels.IMPLEMENTATIONS["torch_grouped"]
    assert refuse(describe("sm_90"), left, right) is None
    for arch in ("sm_89", "sm_100", "sm_103", "gfx942", "gfx950", "cpu"):
        assert refuse(describe(arch), left, right)
    for wrong in (
        right._replace(block=(1, FULL, FULL)),
        right._replace(block=(FULL, FULL, 1)),
        right._replace(block=(1, 128, 128)),
        right._replace(dtype=float8.E5M2.dtype),
        right._replace(dtype=float8.E4M3FNUZ.dtype),
    ):
        assert "torch's grouped kernel takes" in (refuse(describe("sm_90"), left, wrong) or "")


@pytest.mark.parametrize("device", DEVICES[1:])
def test_torchs_kernel_gives_what_the_reference_gives(device: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    sizes = [128, 0, 256, 16]
    x, w, _, offs = problem(sizes, 48, 256, 512, torch.bfloat16, device)
    a, scale_a = ops.quantize(x, (1, FULL), float8.E4M3FN.dtype, "fp32")
    b, scale_b = ops.quantize(w, (1, 1, FULL), float8.E4M3FN.dtype, "fp32")
    args = a, b.mT, scale_a, scale_b.mT, offs, (1, FULL), (1, FULL, 1), torch.bfloat16, False
    got, expected = ops.grouped_mm(*args, "torch_grouped"), ops.grouped_mm(*args, "torch")
    assert relative_error(got, expected) < 2.0**-7
    assert not got[sum(sizes) :].any()


# ---- each implementation, on a GPU ---------------------------------------------------------------


Make = Callable[[tuple[int, int], Block], Matrix]
Blocks = tuple[Block, Block]  # (rows, contraction) of a and of b
MODES: dict[str, Blocks] = {
    "tensorwise": ((FULL, FULL), (FULL, FULL)),
    "rowwise": ((1, FULL), (1, FULL)),
    "1x128 x 128x128": ((1, 128), (128, 128)),
    "1x128 x 1x128": ((1, 128), (1, 128)),
}


class Operands(NamedTuple):
    """Of one product of groups. Their contraction is the last dimension: K of a [T, K] and b
    [G, N, K], or P of a [N, P] and b [K, P]."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    sizes: list[int]
    blocks: Blocks

    @property
    def columns(self) -> bool:
        return self.b.ndim == 2

    def of(self, g: int) -> tuple[Matrix, Matrix]:
        """Both operands of a group, as [rows, contraction]."""
        (start, end), (block_a, block_b) = spans(self.sizes)[g], self.blocks
        if not self.columns:
            scale = self.scale_a if block_a[0] == FULL else self.scale_a[start:end]
            return (self.a[start:end], scale, block_a), (self.b[g], self.scale_b[g], block_b)

        def cut(data: Tensor, scale: Tensor, block: Block) -> Matrix:
            width = block[1]
            own = scale[g, :, None] if width == FULL else scale[:, start // width : end // width]
            return data[:, start:end], own, block

        return cut(self.a, self.scale_a, block_a), cut(self.b, self.scale_b, block_b)

    def refusal(self, impl: str) -> str | None:
        """Why an implementation does not take them on this GPU."""
        left, right = (Operand(self.a.dtype, block, torch.float32) for block in self.blocks)
        turned = right.block[::-1] if self.columns else (1, *right.block[::-1])
        table = kernels.WGRAD_IMPLEMENTATIONS if self.columns else kernels.IMPLEMENTATIONS
        if impl not in table:
            return "unknown"
        return table[impl](float8.device_profile("cuda"), left, right._replace(block=turned))

    def multiply(self, out_dtype: torch.dtype, fast_accum: bool, impl: str) -> Tensor:
        (block_a, block_b), offs = self.blocks, ends(self.sizes, str(self.a.device))
        last = (out_dtype, fast_accum, impl)
        if self.columns:
            return ops.grouped_wgrad(*self[:4], offs, block_a, block_b, *last)
        turned = self.a, self.b.mT, self.scale_a, self.scale_b.mT
        return ops.grouped_mm(*turned, offs, block_a, (1, *block_b[::-1]), *last)


def groups_of_rows(
    sizes: list[int], rest: int, n: int, k: int, blocks: Blocks, make: Make
) -> Operands:
    a, scale_a, _ = make((sum(sizes) + rest, k), blocks[0])
    each = [make((n, k), blocks[1]) for _ in sizes]
    b = torch.stack([data.view(torch.uint8) for data, *_ in each]).view(a.dtype)
    return Operands(a, b, scale_a, torch.stack([scale for _, scale, _ in each]), sizes, blocks)


def groups_of_columns(sizes: list[int], n: int, k: int, blocks: Blocks, make: Make) -> Operands:
    """Sizes are multiples of 128, as ``quantize_grouped`` makes them."""
    parts = []
    for length, block in ((n, blocks[0]), (k, blocks[1])):
        data, scale, _ = make((length, sum(sizes)), block)
        if block[1] == FULL:
            scale = torch.stack([make((length, 1), block)[1][:, 0] for _ in sizes])
        parts.append((data, scale))
    (a, scale_a), (b, scale_b) = parts
    return Operands(a, b, scale_a, scale_b, sizes, blocks)


def make_groups(
    columns: bool, sizes: list[int], rest: int, n: int, k: int, blocks: Blocks, make: Make
) -> Operands:
    if columns:
        return groups_of_columns(sizes, n, k, blocks, make)
    return groups_of_rows(sizes, rest, n, k, blocks, make)


ROWS_OR_COLUMNS = pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])


def errors_beside_torchs(x: Operands, fast_accum: bool, impl: str) -> list[tuple[float, float]]:
    """Of an implementation and of torch's own, for each group: that of torch's product for the
    group alone, in float32, and that of torch's grouped one, where that takes the operands."""
    ours = x.multiply(torch.float32, fast_accum, impl)
    grouped = x.refusal("torch_grouped") is None
    both = [x.multiply(torch.bfloat16, fast_accum, i) for i in (impl, "torch_grouped") if grouped]
    found = []
    for g, (start, end) in enumerate(spans(x.sizes)):
        if start == end:
            continue
        (a, scale_a, block_a), (b, scale_b, block_b) = x.of(g)
        truth = values(a, scale_a, block_a) @ values(b, scale_b, block_b).t()
        last = block_a, block_b[::-1], torch.float32, fast_accum, "cublas"
        alone = ops.scaled_mm(a, b.t(), scale_a, scale_b.t(), *last)
        for pair in ((ours, alone), both):
            own = [t if t is alone else t[g] if x.columns else t[start:end] for t in pair]
            if own:
                found.append((relative_error(own[0], truth), relative_error(own[1], truth)))
    return found


@needs("fp8")
@OURS
@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("name", MODES)
@ROWS_OR_COLUMNS
def test_ours_are_as_exact_as_torchs(columns: bool, name: str, fast_accum: bool, impl: str) -> None:
    """Errors of the same sums, whose scales differ by a factor of a thousand, within a twentieth,
    which is noise. Groups are so large that cuBLAS adds up no sum in parts."""
    left, right = (Operand(float8.E4M3FN.dtype, block, torch.float32) for block in MODES[name])
    right = right._replace(block=right.block[::-1])
    profile = float8.device_profile("cuda")
    if (reason := matmul.IMPLEMENTATIONS["cublas"](profile, left, right)) is not None:
        pytest.skip(reason)

    def make(shape: tuple[int, int], block: Block) -> Matrix:
        return operand(shape, block, float8.E4M3FN, "fp32", "cuda")

    for k in (512, 2048) if columns else (528, 8192):
        sizes = [512, 0, 8192] if columns else [2048, 0, 2064]
        x = make_groups(columns, sizes, 16, 2048, k, MODES[name], make)
        if (reason := x.refusal(impl)) is not None:
            pytest.skip(reason)
        for ours, torchs in errors_beside_torchs(x, fast_accum, impl):
            assert ours <= 1.05 * torchs, (k, ours, torchs)


# Of which the output, a or b has more than 2^31 elements.
HUGE: dict[str, tuple[bool, list[int], int, int, int]] = {
    "rows, output": (False, [20001, 0, 30000, 15662], 1, 32784, 128),
    "rows, odd output": (False, [20001, 0, 30000, 15662], 1, 32783, 144),
    "rows, a": (False, [20001, 0, 30000, 15662], 1, 272, 32896),
    "rows, b": (False, [1, 0] * 31 + [300, 257], 3, 1024, 32896),
    "columns, output": (True, [128, 0] * 65 + [256], 0, 4096, 4096),
    "columns, a": (True, [12800, 0, 38400, 14464], 0, 32896, 272),
    "columns, b": (True, [12800, 0, 38400, 14464], 0, 272, 32896),
}


def multiply_huge(x: Operands, impl: str) -> None:
    """The product, at some rows and columns of each group; where groups are of columns also what it
    is added to, which is itself."""
    device = str(x.a.device)
    with deterministic():
        out = x.multiply(torch.bfloat16, False, impl)
    assert_numbers(out)
    pitches = (x.a.shape[1],) if x.columns else (x.a.shape[1], out.shape[1])
    rows, columns = (some(len(x.a), *pitches, device=device), some(out.shape[-1], device=device))
    parts = []
    for g, (start, end) in enumerate(spans(x.sizes)):
        own = rows if x.columns else rows[(rows >= start) & (rows < end)] - start
        part = (out[g] if x.columns else out[start:end])[own][:, columns]
        a, b = x.of(g)
        assert_near(part, some_of(a, own), some_of(b, columns))
        parts.append(part)
    if not x.columns:
        assert not out[sum(x.sizes) :].any()
        return
    args = ends(x.sizes, device), *x.blocks, False, impl
    ops.grouped_wgrad_add_(out, *x[:4], *args)
    for g, part in enumerate(parts):
        assert_same_bytes(out[g][rows][:, columns], part + part)
    assert_numbers(out)


@needs("fp8")
@OURS
@pytest.mark.parametrize("name", ["rowwise", "1x128 x 1x128"])
@pytest.mark.parametrize("case", HUGE)
@pytest.mark.usefixtures("much_memory")
def test_more_than_two_to_the_31_elements(case: str, name: str, impl: str) -> None:
    columns, *rest = HUGE[case]
    x = make_groups(columns, *rest, MODES[name], drawn)
    if (reason := x.refusal(impl)) is not None:
        pytest.skip(reason)
    multiply_huge(x, impl)
