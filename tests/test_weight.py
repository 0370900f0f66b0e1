"""Float8Weight: every way of multiplying it, what its views keep, its life inside modules.

Letters: B batch or experts, M rows of x, N out features, K the contraction. x input, w weight.
"""

import copy
import dataclasses
import pickle
import textwrap
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from recorders import Ops
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import float8
from float8 import BLOCKWISE, MXFP8, RECIPES, ROWWISE, ROWWISE_WGRAD_HP, TENSORWISE, Recipe
from float8.testing import assert_same_bytes, needs, saved_bytes, sqnr
from float8.weight import Float8Weight, unwrap_parameter, wrap_parameter

DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
NAMED = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
BF16 = torch.bfloat16
Multiply = Callable[[Tensor, Tensor], Tensor]
Product = Callable[[Tensor, Tensor, Multiply], Tensor]  # of x, w and a linear of two matrices


class Layer(nn.Module):
    """A module with its own way to multiply its weight."""

    def __init__(
        self, multiply: Multiply = F.linear, shape: tuple[int, ...] = (64, 32), **kind: Any
    ) -> None:
        super().__init__()
        self.multiply = multiply
        self.weight = nn.Parameter(torch.randn(shape, **{"dtype": BF16, **kind}))
        self.bias = nn.Parameter(torch.randn(shape[-2], **{"dtype": BF16, **kind}))

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight)


def wrapped(multiply: Multiply = F.linear, recipe: Recipe = ROWWISE, **kind: Any) -> Layer:
    layer = Layer(multiply, **kind)
    wrap_parameter(layer, "weight", recipe)
    return layer


def inner(layer: nn.Module) -> Tensor:
    """The plain tensor in a layer's weight."""
    assert isinstance(layer.weight, Float8Weight)
    return layer.weight.original


def step(f: Multiply, x: Tensor, w: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    """f(x, w), its gradients, and the gradient of the result they are for."""
    x = x.detach().requires_grad_()
    y = f(x, w)
    grad = torch.randn_like(y) if grad is None else grad
    return (y.detach(), *torch.autograd.grad(y, (x, w), grad), grad)


def hooks_of(module: nn.Module) -> dict[str, Any]:
    return {name: of for name, of in vars(module).items() if "_hooks" in name and of}


def error(f: Callable[[], Any], kind: type[Exception] = NotImplementedError) -> str:
    with pytest.raises(kind) as caught:
        f()
    return str(caught.value)


# ---------------------------------------------------------------------------------------- products


def each(x: Tensor, w: Tensor, lin: Multiply) -> Tensor:
    """x [B, M, K], w [B, N, K]: one linear after the other."""
    return torch.stack([lin(a, b) for a, b in zip(x.unbind(), w.unbind(), strict=True)])


def to_all(x: Tensor, w: Tensor, lin: Multiply) -> Tensor:
    """x [M, K] or [K] to every matrix of w [B, N, K]: one linear, to B * N columns."""
    return lin(x, w.flatten(0, 1)).unflatten(-1, w.shape[:2]).movedim(-2, 0)


def c(x: Tensor) -> Tensor:
    """An addend [N]."""
    return torch.linspace(-2, 2, 48, dtype=BF16).to(x)


K, MK, KM, NK, KN = (40,), (6, 40), (40, 6), (48, 40), (40, 48)
RUNS = [(0, 0, 2), (1, 2, 2), (2, 2, 6)]  # an expert, and from where to where its rows are
SMK, BMK, BKM, BNK, BKN = (2, 3, 40), (3, 6, 40), (3, 40, 6), (3, 48, 40), (3, 40, 48)

# name, product, the same by linears of matrices, shapes of x and w
PRODUCTS: list[tuple[str, Multiply, Product, tuple[int, ...], tuple[int, ...]]] = [
    ("F.linear", F.linear, lambda x, w, lin: lin(x, w), SMK, NK),
    ("linear, bias", lambda x, w: F.linear(x, w, c(x)), lambda x, w, lin: lin(x, w, c(x)), MK, NK),
    (
        "linear, keywords",
        lambda x, w: F.linear(bias=c(x), weight=w, input=x),
        lambda x, w, lin: lin(x, w, c(x)),
        MK,
        NK,
    ),
    ("linear, row", lambda x, w: F.linear(x, w[0]), lambda x, w, lin: lin(x, w[:1])[:, 0], MK, NK),
    ("linear, w first", lambda x, w: F.linear(w, x), lambda x, w, lin: lin(x, w).mT, MK, NK),
    ("mm", torch.mm, lambda x, w, lin: lin(x, w.t()), MK, KN),
    (
        "mm, keywords",
        lambda x, w: torch.mm(mat2=w, input=x),
        lambda x, w, lin: lin(x, w.t()),
        MK,
        KN,
    ),
    ("x.mm", lambda x, w: x.mm(w), lambda x, w, lin: lin(x, w.t()), MK, KN),
    ("w.mm", lambda x, w: w.mm(x), lambda x, w, lin: lin(x.t(), w).t(), KM, NK),
    ("x @ w", lambda x, w: x @ w, lambda x, w, lin: lin(x, w.t()), SMK, KN),
    ("x @ w, square", lambda x, w: x @ w, lambda x, w, lin: lin(x, w.t()), MK, (40, 40)),
    ("x @ w.t()", lambda x, w: x @ w.t(), lambda x, w, lin: lin(x, w), MK, NK),
    ("w @ x", lambda x, w: w @ x, lambda x, w, lin: lin(x.mT, w).mT, BKM, NK),
    ("vector @ w", lambda x, w: x @ w, lambda x, w, lin: lin(x, w.t()), K, KN),
    ("w @ vector", lambda x, w: w @ x, lambda x, w, lin: lin(x, w), K, NK),
    ("x @ row", lambda x, w: x @ w[1], lambda x, w, lin: lin(x, w[1:2])[..., 0], BMK, NK),
    ("row @ x", lambda x, w: w[1] @ x, lambda x, w, lin: lin(x.mT, w[1:2])[..., 0], KM, NK),
    ("row @ vector", lambda x, w: w[1] @ x, lambda x, w, lin: lin(x, w[1:2])[0], K, NK),
    ("mv", lambda x, w: torch.mv(w, x), lambda x, w, lin: lin(x, w), K, NK),
    ("w.mv", lambda x, w: w.mv(vec=x), lambda x, w, lin: lin(x, w), K, NK),
    ("vector.mv", lambda x, w: x.mv(w[0]), lambda x, w, lin: lin(x, w[:1])[..., 0], MK, NK),
    ("linalg.matmul", torch.linalg.matmul, lambda x, w, lin: lin(x, w.t()), SMK, KN),
    ("bmm", torch.bmm, lambda x, w, lin: each(x, w.mT, lin), BMK, BKN),
    ("w.bmm", lambda x, w: w.bmm(x), lambda x, w, lin: each(x.mT, w, lin).mT, BKM, BNK),
    ("matmul, batches", torch.matmul, lambda x, w, lin: each(x, w.mT, lin), BMK, BKN),
    ("x @ w, every w", torch.matmul, lambda x, w, lin: to_all(x, w.mT, lin), MK, BKN),
    ("vector @ w, every w", torch.matmul, lambda x, w, lin: to_all(x, w.mT, lin), K, BKN),
    ("w @ vector, every w", lambda x, w: w @ x, lambda x, w, lin: to_all(x, w, lin), K, BNK),
    ("x @ w, every x", torch.matmul, lambda x, w, lin: lin(x, w[0].t()), BMK, (1, 40, 48)),
    (
        "addmm",
        lambda x, w: torch.addmm(c(x), x, w, beta=0.5, alpha=2),
        lambda x, w, lin: 2 * lin(x, w.t()) + 0.5 * c(x),
        MK,
        KN,
    ),
    (
        "addmm, keywords",
        lambda x, w: torch.addmm(mat2=w.T, mat1=x, input=c(x)),
        lambda x, w, lin: lin(x, w, c(x)),
        MK,
        NK,
    ),
    (
        "c.addmm, beta 0",
        lambda x, w: (c(x) * torch.nan).addmm(x, w.mT, beta=0),
        lambda x, w, lin: lin(x, w),
        MK,
        NK,
    ),
    (
        "baddbmm",
        lambda x, w: torch.baddbmm(c(x), x, w, beta=0.5, alpha=2),
        lambda x, w, lin: 2 * each(x, w.mT, lin) + 0.5 * c(x),
        BMK,
        BKN,
    ),
    (
        "einsum",
        lambda x, w: torch.einsum("...k, nk -> ...n", x, w),
        lambda x, w, lin: lin(x, w),
        SMK,
        NK,
    ),
    (
        "einsum, w first",
        lambda x, w: torch.einsum("nk,bmk->bmn", w, x),
        lambda x, w, lin: lin(x, w),
        SMK,
        NK,
    ),
    (
        "einsum without a result",  # its labels are in the order of the alphabet
        lambda x, w: torch.einsum("mk,ka", [x, w]),
        lambda x, w, lin: lin(x, w.t()).t(),
        MK,
        KN,
    ),
    (
        "einsum, labels in lists",
        lambda x, w: torch.einsum(x, [..., 2], w, [1, 2], [..., 1]),
        lambda x, w, lin: lin(x, w),
        SMK,
        NK,
    ),
    (
        "einsum, experts",
        lambda x, w: torch.einsum("emk,enk->men", x, w),
        lambda x, w, lin: each(x, w, lin).transpose(0, 1),
        BMK,
        BNK,
    ),
    (
        "einsum, batches in an ellipsis",
        lambda x, w: torch.einsum("...mk,...nk->...mn", x, w),
        lambda x, w, lin: each(x, w, lin),
        BMK,
        BNK,
    ),
    (
        "einsum, a letter broadcasts",
        lambda x, w: torch.einsum("bmk,bnk->bmn", x, w),
        lambda x, w, lin: lin(x, w[0]),
        BMK,
        (1, 48, 40),
    ),
    (
        "einsum over two labels",
        lambda x, w: torch.einsum("mhd,nhd->mn", x, w),
        lambda x, w, lin: lin(x.flatten(1), w.flatten(1)),
        (6, 4, 10),
        (48, 4, 10),
    ),
    (
        "einsum into heads",
        lambda x, w: torch.einsum("bmk,khd->bhmd", x, w),
        lambda x, w, lin: lin(x, w.flatten(1).t()).unflatten(-1, (4, 12)).transpose(1, 2),
        SMK,
        (40, 4, 12),
    ),
    (
        "einsum that sums x first",
        lambda x, w: torch.einsum("bmk,nk->mn", x, w),
        lambda x, w, lin: lin(x.sum(0), w),
        SMK,
        NK,
    ),
    (
        "view",
        lambda x, w: F.linear(x, w.view(-1, 40)),
        lambda x, w, lin: lin(x, w.view(-1, 40)),
        MK,
        (2, 24, 40),
    ),
    ("expert", lambda x, w: x @ w[1].T, lambda x, w, lin: lin(x, w[1]), MK, BNK),
    (
        "experts by index",
        lambda x, w: torch.bmm(x, w[torch.tensor([2, 0], device=w.device)].mT),
        lambda x, w, lin: each(x, torch.stack([w[2], w[0]]), lin),
        (2, 6, 40),
        BNK,
    ),
    (
        "loop over experts",  # one has no rows
        lambda x, w: torch.cat([F.linear(x[i:j], w[e]) for e, i, j in RUNS]),
        lambda x, w, lin: torch.cat([lin(x[i:j], w[e]) for e, i, j in RUNS]),
        MK,
        BNK,
    ),
    (
        "grouped_mm of stacks",
        lambda x, w: torch.bmm(x, w.mT) if x.dtype == torch.double else F.grouped_mm(x, w.mT),
        lambda x, w, lin: each(x, w, lin),
        (3, 6, 40),
        BNK,
    ),
    (
        "chunks",
        lambda x, w: torch.cat([F.linear(x, part) for part in w.chunk(3)], -1),
        lambda x, w, lin: torch.cat([lin(x, part) for part in w.chunk(3)], -1),
        MK,
        NK,
    ),
    ("columns", lambda x, w: x @ w[:, 8:32], lambda x, w, lin: lin(x, w[:, 8:32].t()), MK, KN),
    (
        "rows joined",
        lambda x, w: F.linear(x, torch.cat([w[24:], w[:24]])),
        lambda x, w, lin: lin(x, torch.cat([w[24:], w[:24]])),
        MK,
        NK,
    ),
    (
        "another dtype",
        lambda x, w: F.linear(x.half(), w.half()),
        lambda x, w, lin: lin(x.half(), w.half()),
        MK,
        NK,
    ),
]
BY_NAME = {name: row for name, *row in PRODUCTS}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BY_NAME)
def test_product(name: str, device: str) -> None:
    """Result and gradients: torch's up to FP8's noise, float8.linear's to the bit."""
    f, by_linear, x_shape, w_shape = BY_NAME[name]
    layer = wrapped(f, shape=w_shape, device=device)
    inner(layer).add_(1)  # so that no sum happens to be small
    x = torch.randn(x_shape, dtype=BF16, device=device) + 1
    plain = inner(layer).clone().requires_grad_()
    expected = step(f, x, plain)
    grad = expected[-1]
    got = step(f, x, layer.weight, grad)
    truth = step(f, x.double(), plain.detach().double().requires_grad_(), grad.double())
    for ours, theirs, exact in zip(got, expected, truth, strict=True):
        assert type(ours) is Tensor
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert sqnr(ours, exact) > 25
    same = step(lambda x, w: by_linear(x, w, float8.linear), x, plain, grad)
    for ours, theirs in zip(got, same, strict=True):
        assert_same_bytes(ours, theirs)
    assert layer.weight.last_run is not None


@NAMED
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "multiply",
    [F.linear, lambda x, w: x @ w.t(), lambda x, w: (w @ x.mT).mT],
    ids=["F", "@", "w @"],
)
def test_each_recipe_is_the_linears(recipe: Recipe, multiply: Multiply, device: str) -> None:
    layer = wrapped(multiply, recipe, shape=(160, 288), device=device)
    x = torch.randn(5, 3, 288, dtype=BF16, device=device)
    y, gx, gw, grad = step(multiply, x, layer.weight)
    plain = inner(layer).clone().requires_grad_()
    expected = step(lambda x, w: float8.linear(x, w, recipe=recipe), x, plain, grad)
    for ours, theirs in zip((y, gx, gw), expected, strict=False):
        assert_same_bytes(ours, theirs)


def ends(*sizes: int) -> Tensor:
    """``offs`` of groups of rows."""
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


# With scales of more than one row, groups are cast together; their linears would each be alone.
ALONE = pytest.mark.parametrize(
    "recipe", [r for r in RECIPES.values() if r != TENSORWISE], ids=lambda recipe: recipe.name
)


@ALONE
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grouped", [torch._grouped_mm, F.grouped_mm], ids=["torch", "F"])
def test_grouped_mm_is_a_linear_per_expert(grouped: Any, recipe: Recipe, device: str) -> None:
    """Up to the rows of zeros, to a multiple of 128, over which weight gradients are summed. One
    expert has no rows, and some rows have no expert."""
    sizes = (20, 0, 150, 3)

    def by_linear(x: Tensor, w: Tensor) -> Tensor:
        parts = x.split([*sizes, 9])
        rest = parts[-1].new_zeros(9, w.shape[1])
        ys = [
            float8.linear(F.pad(x_e, (0, 0, 0, -len(x_e) % 128)), w_e, recipe=recipe)[: len(x_e)]
            for x_e, w_e in zip(parts[:-1], w, strict=True)
        ]
        return torch.cat([*ys, rest])

    layer = wrapped(recipe=recipe, shape=(4, 48, 160), device=device)
    x, offs = torch.randn(182, 160, dtype=BF16, device=device), ends(*sizes).to(device)
    got = step(lambda x, w: grouped(x, w.transpose(-2, -1), offs=offs), x, layer.weight)
    plain = inner(layer).clone().requires_grad_()
    for ours, theirs in zip(got, step(by_linear, x, plain, got[-1]), strict=True):
        assert type(ours) is Tensor
        if device == "cuda" and recipe == MXFP8:  # other kernels multiply for a linear layer
            assert sqnr(ours, theirs.double()) > 45
        else:
            assert_same_bytes(ours, theirs)
    by_torch = step(lambda x, w: grouped(x[:173], w.mT, offs=offs), x, plain, got[-1][:173])
    for ours, theirs in zip((got[0][:173], *got[1:3]), by_torch, strict=False):
        assert sqnr(ours, theirs.double()) > 22


GROUPED: dict[str, tuple[Multiply, tuple[int, ...]]] = {  # by ends(2, 0, 4), and w's shape
    "w": (lambda x, w: torch._grouped_mm(x, w, ends(2, 0, 4)), (3, 32, 48)),
    "keywords": (
        lambda x, w: torch._grouped_mm(mat2=w, offs=ends(2, 0, 4), input=x, out_dtype=x.dtype),
        (3, 32, 48),
    ),
    "F": (lambda x, w: F.grouped_mm(mat_b=w.mT, mat_a=x, offs=ends(2, 0, 4)), (3, 48, 32)),
    "cast": (
        lambda x, w: F.grouped_mm(x.to(BF16), w.to(BF16).mT, offs=ends(2, 0, 4)),
        (3, 48, 32),
    ),
    "slice": (lambda x, w: torch._grouped_mm(x, w[1:4].mT, offs=ends(2, 0, 4)), (5, 48, 32)),
    "index": (
        lambda x, w: torch._grouped_mm(x, w[torch.tensor([2, 0, 1])].mT, offs=ends(2, 0, 4)),
        (3, 48, 32),
    ),
    "chunks": (
        lambda x, w: torch.cat(
            [F.grouped_mm(x, part.mT, offs=ends(2, 0, 4)) for part in w.chunk(2, dim=1)], -1
        ),
        (3, 96, 32),
    ),
    "no rows": (lambda x, w: torch._grouped_mm(x[:0], w.mT, offs=ends(0, 0, 0)), (3, 48, 32)),
}


@NAMED
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_mm_is_float8_grouped_mm(
    name: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, shape = GROUPED[name]
    layer = wrapped(recipe=recipe, shape=shape, dtype=torch.float32)
    x = torch.randn(6, 32)
    got = step(f, x, layer.weight)
    plain = inner(layer).clone().requires_grad_()

    def torchs(input: Tensor, mat2: Tensor, offs: Tensor, **_: Any) -> Tensor:
        return float8.grouped_mm(input, mat2, offs, recipe=recipe)

    monkeypatch.setattr(torch, "_grouped_mm", torchs)
    for a, b in zip(got, step(f, x, plain, got[-1]), strict=True):
        assert type(a) is Tensor
        assert_same_bytes(a, b)
    wgrad = "high precision" if recipe.wgrad is None else "torch"
    assert layer.weight.last_run == ("torch", "torch", wgrad)


def test_grouped_mm_under_autocast_and_without_gradients() -> None:
    layer = wrapped(
        lambda x, w: F.grouped_mm(x, w.mT, offs=ends(2, 4)), shape=(2, 48, 32), dtype=torch.float32
    )
    x = torch.randn(6, 32)
    with torch.autocast("cpu", dtype=BF16):
        y = layer(x)
        expected = float8.grouped_mm(x, inner(layer).mT, ends(2, 4))
    assert y.dtype == BF16
    assert_same_bytes(y, expected)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_same_bytes(layer(x), float8.grouped_mm(x, inner(layer).mT, ends(2, 4)))


# Stacks as parameters hold them, and how they are multiplied by x [3, C, 40] to [3, C, 48].
STACKS: dict[str, tuple[Multiply, tuple[int, ...]]] = {
    "bmm": (torch.bmm, BKN),
    "bmm mT": (lambda x, w: torch.bmm(x, w.mT), BNK),
    "@": (torch.matmul, BKN),
    "w first": (lambda x, w: (w @ x.mT).mT, BNK),
    "w first, mT": (lambda x, w: w.mT.bmm(x.mT).mT, BKN),
    "einsum": (lambda x, w: torch.einsum("bmk,bnk->bmn", x, w), BNK),
    "grouped_mm": (lambda x, w: F.grouped_mm(x, w.mT), BNK),
    "baddbmm": (lambda x, w: torch.baddbmm(x.new_zeros(48), x, w), BKN),
}


@NAMED
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_one_grouped_product(name: str, recipe: Recipe, device: str) -> None:
    """That of groups of equal size, to the bit, for any number of rows; and with scales within rows
    a linear for each matrix, up to the zeros of a group's columns that wgrad adds."""
    f, shape = STACKS[name]
    layer = wrapped(f, recipe, shape=shape, device=device)
    plain = inner(layer).clone().requires_grad_()
    turned = shape == BKN

    def grouped(x: Tensor, w: Tensor) -> Tensor:
        offs = ends(*[x.shape[1]] * 3).to(device)
        y = float8.grouped_mm(x.flatten(0, 1), w if turned else w.mT, offs, recipe=recipe)
        return y.view(3, -1, 48)

    def linears(x: Tensor, w: Tensor) -> Tensor:
        by = lambda a, b: float8.linear(a, b, recipe=recipe)  # noqa: E731
        rows = F.pad(x, (0, 0, 0, -x.shape[1] % 128))
        return each(rows, w.mT if turned else w, by)[:, : x.shape[1]]

    for count in (0, 1, 5, 131):
        x = torch.randn(3, count, 40, dtype=BF16, device=device)
        with Ops() as ops:
            got = step(f, x, layer.weight)
        products = {op: n for op, n in ops.seen.items() if "mm" in op or "wgrad" in op}
        hp = recipe.wgrad is None
        assert products == {"grouped_mm": 2, "grouped_mm_hp" if hp else "grouped_wgrad": 1}
        for ours, same in zip(got, step(grouped, x, plain, got[-1]), strict=True):
            assert_same_bytes(ours, same)
        if recipe == TENSORWISE or device == "cuda":
            continue  # one scale for all rows; other kernels multiply for a linear layer
        for ours, same in zip(got, step(linears, x, plain, got[-1]), strict=True):
            assert_same_bytes(ours, same)


def test_an_fp8_stack_times_a_stack() -> None:
    """Multiplies as it is, as float8.linear takes it."""
    w = Float8Weight(torch.randn(BKN))
    x8 = float8.quantize(torch.randn(BMK), block=(1, 1, float8.FULL))
    expected = each(x8, w.original.mT, lambda a, b: float8.linear(a, b))
    assert_same_bytes(torch.bmm(x8, w), expected)


@NAMED
def test_bias_is_added_in_every_recipe(recipe: Recipe) -> None:
    layer = wrapped(recipe=recipe)
    x = torch.randn(6, 32, dtype=BF16)
    y = F.linear(x, layer.weight, layer.bias)
    assert_same_bytes(y, float8.linear(x, inner(layer), layer.bias, recipe=recipe))
    assert (y != F.linear(x, layer.weight)).any(0).all()
    y.sum().backward()
    assert_same_bytes(layer.bias.grad, torch.full_like(layer.bias, 6))


@NAMED
def test_float8_linear_takes_a_float8_weight(recipe: Recipe) -> None:
    """By its own recipe, as with a plain weight."""
    layer = wrapped(recipe=TENSORWISE)
    x = torch.randn(6, 32, dtype=BF16)
    got = step(lambda x, w: float8.linear(x, w, layer.bias, recipe=recipe), x, layer.weight)
    plain = inner(layer).clone().requires_grad_()
    expected = step(lambda x, w: float8.linear(x, w, layer.bias, recipe=recipe), x, plain, got[-1])
    for ours, theirs in zip(got, expected, strict=True):
        assert type(ours) is Tensor
        assert_same_bytes(ours, theirs)


@pytest.mark.parametrize("which", ["forward", "dgrad", "wgrad"])
def test_gemm_in_high_precision(which: str) -> None:
    """Its result is plain torch's, and the other two are the FP8 recipe's."""
    names = ["forward", "dgrad", "wgrad"]
    recipe = dataclasses.replace(ROWWISE, name="partly", **{which: None})
    x = torch.randn(6, 32, dtype=BF16)
    layer, fp8 = wrapped(recipe=recipe), wrapped()
    inner(fp8).copy_(inner(layer))
    got = step(F.linear, x, layer.weight)
    in_fp8 = step(F.linear, x, fp8.weight, got[-1])
    in_bf16 = step(F.linear, x, inner(layer).clone().requires_grad_(), got[-1])
    for name, ours, eight, sixteen in zip(names, got, in_fp8, in_bf16, strict=False):
        assert_same_bytes(ours, sixteen if name == which else eight)
        assert not torch.equal(eight, sixteen)
    assert layer.weight.last_run == tuple(
        "high precision" if n == which else "torch" for n in names
    )


def test_sizes_of_zero() -> None:
    w = nn.Parameter(Float8Weight(torch.randn(8, 4)))
    experts = nn.Parameter(Float8Weight(torch.randn(0, 8, 4)))
    for x in (torch.randn(0, 4), torch.randn(2, 0, 4)):
        y, gx, gw, _ = step(F.linear, x, w)
        assert (y.shape, gx.shape, gw.shape) == ((*x.shape[:-1], 8), x.shape, w.shape)
        assert not gw.any()
    y, gx, gw, _ = step(lambda x, w: x @ w.mT, torch.randn(0, 3, 4), experts)
    assert (y.shape, gx.shape, gw.shape) == ((0, 3, 8), (0, 3, 4), (0, 8, 4))
    assert torch.equal(torch.ones(3, 0) @ Float8Weight(torch.ones(0, 2)), torch.zeros(3, 2))


def test_frozen_weight_saves_no_input() -> None:
    """Nor is the weight saved when the input needs no gradient."""
    layer = wrapped(shape=(16, 256), dtype=torch.float32)
    x = torch.randn(64, 256)
    with saved_bytes() as everything:
        layer(x.clone().requires_grad_())
    kept = inner(layer).nbytes + 4 * 256  # w, and the amax that its second cast would have to find
    assert everything() == x.numel() + 4 * 256 + kept  # x in FP8, its scales
    with saved_bytes() as without_dgrad:
        layer(x)
    assert without_dgrad() == x.numel() + 4 * 256
    layer.weight.requires_grad_(False)
    with saved_bytes() as frozen:
        y = layer(x.clone().requires_grad_())
    assert frozen() == kept
    assert y.requires_grad


def test_autocast_quantises_the_float32_weight() -> None:
    layer = wrapped(dtype=torch.float32)
    x = torch.randn(6, 32)
    w, bias = layer.weight, layer.bias
    with torch.autocast("cpu", dtype=BF16):
        products = x @ w.t(), (w @ x.t()).t(), torch.einsum("mk,nk->mn", x, w)
        y = F.linear(x, w, bias)
        expected = float8.linear(x, inner(layer))
        for product in products:
            assert_same_bytes(product, expected)
        assert_same_bytes(y, float8.linear(x, inner(layer), bias))
        added = torch.addmm(bias.to(BF16), x, w.t())
    assert_same_bytes(added, y)
    y.sum().backward()
    assert w.grad.dtype == torch.float32
    assert error(lambda: layer(x.to(BF16)), ValueError).startswith("x is torch.bfloat16 and the we")


def test_gradients_add_up_over_uses_of_views() -> None:
    layer = wrapped(shape=(3, 16, 32), dtype=torch.float32)
    w, x = layer.weight, torch.randn(8, 32)
    (F.linear(x, w[0]).sum() + (w[0] @ x.t()).sum() + F.linear(x, w[2]).sum()).backward()
    expected = torch.zeros(3, 16, 32)
    one = step(F.linear, x, w[0].detach().requires_grad_(), torch.ones(8, 16))[2]
    expected[0], expected[2] = one + one, one
    assert_same_bytes(w.grad, expected)
    assert type(w.grad) is Tensor


def test_in_place_change_before_backward_is_noticed() -> None:
    layer = wrapped()
    y = layer(torch.randn(6, 32, dtype=BF16, requires_grad=True))
    with torch.no_grad():
        layer.weight.mul_(2)
    assert "modified by an inplace operation" in error(y.sum().backward, RuntimeError)


THROUGH_VIEWS: dict[str, tuple[Multiply, bool]] = {  # and whether of a stack
    "x @ w.T": (lambda x, w: x @ w.T, False),
    "chunk": (lambda x, w: x @ w.chunk(2)[0].T, False),
    "slice": (lambda x, w: x @ w[:32].T, False),
    "plain().T": (lambda x, w: x @ w.plain().T, False),  # type: ignore[attr-defined]
    "F.linear": (F.linear, False),
    "bmm": (lambda x, w: torch.bmm(x.expand(4, -1, -1), w.mT), True),
    "einsum": (lambda x, w: torch.einsum("mk,enk->emn", x, w), True),
    "w[0]": (lambda x, w: x @ w[0].T, True),
    "grouped_mm": (
        lambda x, w: F.grouped_mm(x, w.mT, offs=torch.tensor([1, 2, 2, 6], dtype=torch.int32)),
        True,
    ),
    "view": (lambda x, w: x @ w.view(-1, 32).T, True),
}
CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul_": lambda w: w.mul_(2),
    "of a view": lambda w: w[0].mul_(2),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "AdamW": lambda w: torch.optim.AdamW([w], foreach=False).step(),
    "fused AdamW": lambda w: torch.optim.AdamW([w], fused=True).step(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", THROUGH_VIEWS)
def test_in_place_change_is_noticed_through_views(name: str, change: str) -> None:
    """As of a plain parameter: dgrad would be of a weight that forward has not seen."""
    multiply, stack = THROUGH_VIEWS[name]
    w = nn.Parameter(Float8Weight(torch.randn(4, 64, 32) if stack else torch.randn(64, 32)))
    x = torch.randn(6, 32, requires_grad=True)
    multiply(x, w).sum().backward()
    y = multiply(x, w).sum()
    with torch.no_grad():
        CHANGES[change](w)
    assert "modified by an inplace operation" in error(y.backward, RuntimeError)


def test_in_place_change_of_a_plain_tensor_among_weights_is_noticed() -> None:
    layer, plain = wrapped(), torch.ones(4, requires_grad=True)
    y = plain.square()
    with torch.no_grad():
        torch._foreach_mul_([plain, layer.weight], 2.0)
    assert "modified by an inplace operation" in error(y.sum().backward, RuntimeError)


def test_wrapping_in_inference_mode_freezes_nothing() -> None:
    layer = Layer(lambda x, w: torch.cat([x @ part.t() for part in w.chunk(2)], -1))
    x = torch.randn(6, 32, dtype=BF16)
    with torch.inference_mode():
        wrap_parameter(layer, "weight")
    expected = wrapped(layer.multiply)
    expected.weight.data.copy_(inner(layer))
    for each_layer in (layer, expected):
        each_layer(x).sum().backward()
    assert_same_bytes(layer.weight.grad, expected.weight.grad)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    with torch.inference_mode():
        unwrap_parameter(layer, "weight")
    layer.zero_grad()
    layer(x).sum().backward()
    assert layer.weight.grad is not None and type(layer.weight) is nn.Parameter


def test_copies_have_no_gradient_but_what_others_have_hung_on() -> None:
    layer = wrapped()
    layer.weight.tag = "expert"  # type: ignore[attr-defined]
    layer(torch.randn(6, 32, dtype=BF16)).sum().backward()
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert made.weight.grad is None and made.weight.tag == "expert"
        assert_same_bytes(inner(made), inner(layer))
    assert layer.weight.grad is not None


def test_what_reads_memory_reads_the_plain_tensor() -> None:
    w = Float8Weight(torch.randn(4, 16))
    assert (w.numpy() == w.original.numpy()).all()
    assert w.tolist() == w.original.tolist()
    w.numpy()[0] = 3
    w.apply_(lambda value: value + 1)
    assert (w.original[0] == 4).all()
    w.map_(torch.zeros(4, 16), lambda a, b: b)
    assert not w.original.any()


def test_autograd_grad_of_unused_weights() -> None:
    used, unused = wrapped().weight, wrapped().weight
    y = (torch.randn(6, 32, dtype=BF16) @ used.t()).sum()
    first, second = torch.autograd.grad(y, [used, unused], retain_graph=True, allow_unused=True)
    assert first.any() and second is None
    zeros = torch.autograd.grad(y, [used, unused], retain_graph=True, materialize_grads=True)[1]
    assert type(zeros) is Tensor and zeros.shape == unused.shape and not zeros.any()
    assert "not have been used" in error(lambda: torch.autograd.grad(y, unused), RuntimeError)


def test_inference_mode_and_no_grad() -> None:
    layer = wrapped(lambda x, w: torch.cat([x @ part.t() for part in w.chunk(2)], -1))
    x = torch.randn(6, 32, dtype=BF16)
    expected = layer(x)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_same_bytes(layer(x), expected)
            assert isinstance(layer.weight.view(-1)[5:], Float8Weight)
    with torch.inference_mode():
        made_there = Float8Weight(inner(layer).clone())
        assert_same_bytes(x @ made_there.t(), expected)
        assert "mm does not multiply" in error(lambda: torch.tensordot(x, layer.weight.t(), 1))


def test_checkpointing_recomputes_the_bits() -> None:
    layer = wrapped()
    x = torch.randn(6, 32, dtype=BF16)
    got = step(lambda x, w: checkpoint(F.linear, x, w, use_reentrant=False), x, layer.weight)
    for ours, theirs in zip(got, step(F.linear, x, layer.weight, got[-1]), strict=True):
        assert_same_bytes(ours, theirs)


class Attention(nn.Module):
    """Weights multiplied in three ways, none by an nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, 4, 32, 8) / 6)
        self.out = nn.Parameter(torch.randn(32, 32) / 6)
        self.experts = nn.Parameter(torch.randn(2, 32, 16) / 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bsk,hkd->bhsd", x, part) for part in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = torch.mm(y.flatten(0, 1), self.out)
        return torch.stack(
            [F.linear(y[:, 16 * e :][:, :16], w) for e, w in enumerate(self.experts)]
        )


def test_module_that_multiplies_its_weights_itself() -> None:
    model = Attention()
    reference = copy.deepcopy(model)
    for name in ("qkv", "out", "experts"):
        wrap_parameter(model, name)
    x = torch.randn(2, 5, 32)
    y, expected = model(x), reference(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    assert sqnr(y, expected) > 22  # through three products
    for name, p in model.named_parameters():
        assert isinstance(p, Float8Weight) and p.last_run == ("torch",) * 3
        assert sqnr(p.grad, reference.get_parameter(name).grad) > 20
    assert {name: type(value) for name, value in model.state_dict().items()} == {
        "qkv": Tensor,
        "out": Tensor,
        "experts": Tensor,
    }


# ------------------------------------------------------------------------- what becomes of results

# A column-sharded init, a fused projection, FSDP2 and to_empty rely on these.
VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda w: w.chunk(2)[1],
    "split": lambda w: w.split(2)[1],
    "split_with_sizes": lambda w: w.split([1, 5])[1],
    "tensor_split": lambda w: w.tensor_split(3)[1],
    "unbind": lambda w: w.unbind(1)[1],
    "iteration": lambda w: list(w)[1],
    "narrow": lambda w: w.narrow(0, 1, 2),
    "slice": lambda w: w[1:3, :, ::2],
    "select": lambda w: w[1],
    "ellipsis": lambda w: w[..., 1],
    "new dimension": lambda w: w[None],
    "view": lambda w: w.view(24, 8),
    "view_as": lambda w: w.view_as(torch.empty(24, 8)),
    "reshape": lambda w: w.reshape(-1),
    "reshape that copies": lambda w: w.mT.reshape(-1),
    "flatten": lambda w: w.flatten(1),
    "unflatten": lambda w: w.unflatten(0, (2, 3)),
    "as_strided": lambda w: w.as_strided((3, 4), (4, 1), 2),
    "t": lambda w: w[0].t(),
    "T": lambda w: w[0].T,
    "mT": lambda w: w.mT,
    "H": lambda w: w[0].H,
    "transpose": lambda w: w.transpose(0, 1),
    "swapaxes": lambda w: w.swapaxes(0, 1),
    "permute": lambda w: w.permute(2, 0, 1),
    "movedim": lambda w: w.movedim(0, 1),
    "diagonal": lambda w: w.diagonal(),
    "squeeze": lambda w: w[:1].squeeze(0),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "expand": lambda w: w[0].expand(3, 4, 8),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "clone": lambda w: w.clone(),
    "contiguous": lambda w: w.mT.contiguous(),
    "to": lambda w: w.to(BF16),
    "bfloat16": lambda w: w.bfloat16(),
    "double": lambda w: w.double(),
    "index": lambda w: w[torch.tensor([2, 0])],
    "mask": lambda w: w[torch.tensor([True, False] * 3)],
    "index_select": lambda w: w.index_select(0, torch.tensor([2, 0])),
    "cat": lambda w: torch.cat([w, w[:2]]),
    "stack": lambda w: torch.stack([w, w]),
    "requires_grad_": lambda w: w.requires_grad_(),
    "nn.Parameter": lambda w: nn.Parameter(w),
}
FACTORIES: dict[str, Callable[[Tensor], Any]] = {
    "empty_like": torch.empty_like,
    "new_empty": lambda w: w.new_empty(0, 3),
    "new_zeros": lambda w: w.new_zeros(2, 3),
    "meta": lambda w: w.to("meta"),
}
PLAIN: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda w: w + 1,
    "mul": lambda w: w * w,
    "neg": lambda w: -w,
    "sum": torch.sum,
    "norm": torch.linalg.vector_norm,
    "where": lambda w: torch.where(w > 0, w, 0),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "new_ones": lambda w: w.new_ones(2),
    "int": lambda w: w.int(),
    "bits": lambda w: w.view(torch.int32),
    "FP8": lambda w: w.to(torch.float8_e4m3fn),
    "embedding": lambda w: F.embedding(torch.tensor([1]), w[0]),
    "cat with a plain tensor": lambda w: torch.cat([w, torch.ones(1, 4, 8)]),
    "cat of two recipes": lambda w: torch.cat([w, Float8Weight(torch.ones(1, 4, 8), TENSORWISE)]),
    "copy to a plain tensor": lambda w: torch.zeros(6, 4, 8).copy_(w),
    "out": lambda w: torch.add(w, 1, out=torch.zeros(6, 4, 8)),
}


@pytest.mark.parametrize("name", [*VIEWS, *FACTORIES])
def test_stays_a_float8_weight(name: str) -> None:
    w = Float8Weight(torch.randn(6, 4, 8), MXFP8)
    result = {**VIEWS, **FACTORIES}[name](w)
    assert isinstance(result, Float8Weight)
    assert result.recipe is MXFP8
    assert result.record is w.record
    for attribute in ("shape", "dtype", "device", "layout"):
        assert getattr(result, attribute) == getattr(result.original, attribute)
    assert result.stride() == result.original.stride()
    if name in VIEWS:
        assert_same_bytes(result.original, VIEWS[name](w.original).detach())


@pytest.mark.parametrize("name", PLAIN)
def test_becomes_plain(name: str) -> None:
    w = Float8Weight(torch.randn(6, 4, 8), ROWWISE)
    result = PLAIN[name](w)
    assert type(result) is Tensor
    if "two" not in name:
        assert_same_bytes(result, PLAIN[name](w.original))


def test_views_pass_gradients_back() -> None:
    for name, view in VIEWS.items():
        if name in ("detach", "data", "requires_grad_", "nn.Parameter"):
            continue
        w = nn.Parameter(Float8Weight(torch.randn(6, 4, 8)))
        plain = nn.Parameter(w.original.clone())
        for p in (w, plain):
            view(p).pow(2).sum().backward()
        assert type(w.grad) is Tensor, name
        assert_same_bytes(w.grad, plain.grad)


def test_in_place_ops_change_the_weight() -> None:
    w = Float8Weight(torch.zeros(6, 4))
    original = w.original
    assert w.add_(2).mul_(3) is w
    assert w.copy_(w + 1) is w
    w[0].fill_(5)
    w[:, 1:2] = 4.0
    w.data[5].zero_()
    torch._foreach_add_([w], 1)
    expected = torch.full((6, 4), 8.0)
    expected[0], expected[:, 1], expected[5] = 6, 5, 1
    assert w.original is original
    assert torch.equal(original, expected)
    assert torch.equal(w, expected) and torch.equal(w.plain(), expected)


def test_memory_that_processes_share() -> None:
    layer, x = wrapped(), torch.randn(6, 32, dtype=BF16)
    y, weight = layer(x).detach(), layer.weight
    assert not weight.is_shared()
    layer.share_memory()
    assert layer.weight is weight and isinstance(weight, Float8Weight)
    assert weight.is_shared() and weight.original.is_shared()
    assert_same_bytes(layer(x), y)


def test_plain_shares_storage_and_passes_the_gradient() -> None:
    layer = wrapped()
    plain = layer.weight.plain()
    assert type(plain) is Tensor
    assert plain.data_ptr() == inner(layer).data_ptr()
    plain.sum().backward()
    assert_same_bytes(layer.weight.grad, torch.ones(64, 32, dtype=BF16))


def test_repr() -> None:
    expecttest.assert_expected_inline(
        repr(nn.Parameter(Float8Weight(torch.ones(1, 2)))),
        """Float8Weight(tensor([[1., 1.]]), recipe=rowwise, requires_grad=True)""",
    )


# ---------------------------------------------------------------------------------------- refusals


def test_other_products_are_refused() -> None:
    """Also those that reach the weight below Python's functions: nothing falls back in silence."""
    w, x, lstm = Float8Weight(torch.zeros(6, 8)), torch.zeros(5, 6), [torch.zeros(1, 8)] * 2
    stack = Float8Weight(torch.zeros(2, 8, 8))
    products: list[tuple[str, Callable[[], Any]]] = [
        ("mm", lambda: torch.tensordot(x, w, 1)),
        ("mm", lambda: torch.linalg.multi_dot([x, w])),
        ("mm", lambda: torch.ops.aten.mm(x, w)),
        ("mm", lambda: torch.lstm_cell(x[:1], lstm, w.new_zeros(32, 6), torch.zeros(32, 8))),
        ("dot", lambda: torch.dot(w[0], torch.zeros(8))),
        ("addmm_", lambda: torch.zeros(5, 8).addmm_(x, w)),
        ("addmv", lambda: torch.addmv(torch.zeros(6), w, torch.zeros(8))),
        ("addbmm", lambda: torch.addbmm(torch.zeros(3, 8), torch.zeros(2, 3, 8), stack)),
        ("convolution", lambda: F.conv1d(torch.zeros(1, 8, 9), stack)),
        ("_trilinear", lambda: F.bilinear(torch.zeros(2, 8), torch.zeros(2, 8), stack)),
        ("_grouped_mm", lambda: torch.ops.aten._grouped_mm(x, stack, ends(2, 3))),
    ]
    for name, product in products:
        assert error(product).startswith(f"{name} does not multiply a Float8Weight")


def errors(kind: type[Exception], *calls: Callable[[], Any]) -> str:
    return "\n".join(textwrap.fill(error(call, kind), 96) for call in calls)


class TestMessages(expecttest.TestCase):
    """What came, what is needed, what to do."""

    def test_other_ops(self) -> None:
        w, x = Float8Weight(torch.zeros(6, 8)), torch.zeros(5, 6)
        got = errors(
            NotImplementedError,
            lambda: torch.tensordot(x, w, 1),
            lambda: w @ w.t(),
            lambda: torch.mm(x, w, out=torch.zeros(5, 8)),
            lambda: torch.mm(x, w, out_dtype=torch.float32),
            lambda: w.t_(),
            lambda: w.resize_(3),
            lambda: setattr(w, "data", torch.zeros(3, 8)),
        )
        self.assertExpectedInline(
            got,
            """\
mm does not multiply a Float8Weight (shape (6, 8), recipe rowwise) in FP8. What does: F.linear,
@, matmul, mm, bmm, mv, addmm, baddbmm, grouped_mm, einsum of two; not in torch.func. Pass
weight.plain() to multiply in high precision.
both operands are Float8Weights, and an FP8 product has one; multiply .plain() of them
mm with a Float8Weight takes no out=; use its result
mm with a Float8Weight takes no out_dtype=; use its result
t_ reshapes a Float8Weight in place; take a view of it instead
resize_ reshapes a Float8Weight in place; take a view of it instead
a Float8Weight's .data keeps its shape, strides, dtype and device: (torch.Size([6, 8]), (8, 1),
torch.float32, device(type='cpu')), not (torch.Size([3, 8]), (8, 1), torch.float32,
device(type='cpu'))""",
        )

    def test_grouped_mm(self) -> None:
        w, x, offs = Float8Weight(torch.zeros(2, 8, 6)), torch.zeros(5, 8), ends(2, 3)
        got = errors(
            NotImplementedError,
            lambda: torch._grouped_mm(w.mT, x.t(), offs),
            lambda: F.grouped_mm(w, w.mT),
            lambda: F.grouped_mm(x, w, offs=offs, bias=torch.zeros(2, 6)),
            lambda: torch._grouped_mm(x, w, offs=offs, out_dtype=BF16),
            lambda: torch._grouped_mm(x[None].expand(2, 5, 8), w, out_dtype=BF16),
        )
        self.assertExpectedInline(
            got,
            """\
grouped_mm takes one Float8Weight, its second operand, and no bias; add a bias to the result, or
multiply weight.plain()
grouped_mm takes one Float8Weight, its second operand, and no bias; add a bias to the result, or
multiply weight.plain()
grouped_mm takes one Float8Weight, its second operand, and no bias; add a bias to the result, or
multiply weight.plain()
grouped_mm with a Float8Weight makes torch.float32 here, and out_dtype=torch.bfloat16 is asked
for; use .to() of its result
grouped_mm with a Float8Weight makes torch.float32 here, and out_dtype=torch.bfloat16 is asked
for; use .to() of its result""",
        )
        got = errors(
            ValueError,
            lambda: torch._grouped_mm(x, w),
            lambda: torch._grouped_mm(x[None], w, offs),
            lambda: torch._grouped_mm(x, w.mT, offs),
            lambda: torch._grouped_mm(x, w, ends(2, 3).long()),
            lambda: torch._grouped_mm(x.to(BF16), w, offs),
        )
        self.assertExpectedInline(
            got,
            """\
grouped_mm of shapes (5, 8) and (2, 8, 6) with a Float8Weight: needed [T, K], [E, K, N] and
offs=, int32 [E], with where the rows of each expert end; or, without offs, [E, M, K] and [E, K,
N]
grouped_mm of shapes (1, 5, 8) and (2, 8, 6) with a Float8Weight: needed [T, K], [E, K, N] and
offs=, int32 [E], with where the rows of each expert end; or, without offs, [E, M, K] and [E, K,
N]
shapes (5, 8) and (2, 6, 8) do not multiply in groups; needed (tokens, K), sorted by group, and
(groups, K, N)
offs is torch.int64 of shape (2,); it must be torch.int32 of shape (2,), with where each group
ends
x is torch.bfloat16 and w torch.float32; bring both to one dtype, or run under torch.autocast""",
        )

    def test_einsum(self) -> None:
        w, x = Float8Weight(torch.zeros(6, 8)), torch.zeros(6, 8)
        got = errors(
            NotImplementedError,
            lambda: torch.einsum("nk,nk->nk", x, w),
            lambda: torch.einsum("mk,nk->m", x, w),
            lambda: torch.einsum("mm,nk->mn", torch.zeros(8, 8), w),
            lambda: torch.einsum("mk,nk,nj->mj", x, w, x),
        )
        self.assertExpectedInline(
            got,
            """\
'nk,nk->nk' of shapes (6, 8) and (6, 8) with a Float8Weight is no matrix product, which sums
over labels of both operands and over no other label of the weight; use weight.plain()
'mk,nk->m' of shapes (6, 8) and (6, 8) with a Float8Weight is no matrix product, which sums over
labels of both operands and over no other label of the weight; use weight.plain()
'mm,nk->mn' of shapes (8, 8) and (6, 8) with a Float8Weight takes a diagonal, which is no matrix
product
einsum 'mk,nk,nj->mj' of 3 operands has a Float8Weight; contract in pairs""",
        )
        got = errors(
            ValueError,
            lambda: torch.einsum("mkj,nk->mn", x, w),
            lambda: torch.einsum("mk,kn->mn", x, w),
            lambda: torch.einsum("mk,nk->mnz", x, w),
        )
        self.assertExpectedInline(
            got,
            """\
'mkj,nk->mn' of shapes (6, 8) and (6, 8) with a Float8Weight: 'mkj' does not label 2 dimensions
'mk,kn->mn' of shapes (6, 8) and (6, 8) with a Float8Weight: 'k' has sizes 8 and 6
'mk,nk->mnz' of shapes (6, 8) and (6, 8) with a Float8Weight: the result's labels must be
distinct, and labels of operands""",
        )

    def test_shapes_and_constructor(self) -> None:
        w = Float8Weight(torch.zeros(6, 8))
        got = errors(
            ValueError,
            lambda: torch.mm(torch.zeros(5, 7), w),
            lambda: torch.mm(torch.zeros(2, 5, 6), w),
            lambda: torch.zeros(5, 1) @ w[None],
            lambda: torch.zeros(1, 5, 6).bmm(w.expand(2, 6, 8)),
            lambda: Float8Weight(torch.zeros(2, 2).int()),
            lambda: Float8Weight(w),
        )
        self.assertExpectedInline(
            got,
            """\
'mk,kn->mn' of shapes (5, 7) and (6, 8) with a Float8Weight: 'k' has sizes 7 and 6
'mk,kn->mn' of shapes (2, 5, 6) and (6, 8) with a Float8Weight: 'mk' does not label 3 dimensions
'...mk,...kn->...mn' of shapes (5, 1) and (1, 6, 8) with a Float8Weight: 'k' has sizes 1 and 6
'bmk,bkn->bmn' of shapes (1, 5, 6) and (2, 6, 8) with a Float8Weight: 'b' has sizes 1 and 2
a Float8Weight holds a plain strided tensor in high precision, but got a Tensor of torch.int32
with layout torch.strided
a Float8Weight holds a plain strided tensor in high precision, but got a Float8Weight of
torch.float32 with layout torch.strided""",
        )

    def test_wrap_parameter(self) -> None:
        layer, hooked = Layer(), Layer()
        wrap_parameter(layer, "weight")
        hooked.weight.register_hook(lambda grad: grad)
        got = errors(
            ValueError,
            lambda: wrap_parameter(layer, "wieght"),
            lambda: wrap_parameter(layer, "bias"),
            lambda: wrap_parameter(layer, "weight", MXFP8),
            lambda: wrap_parameter(hooked, "weight"),
            lambda: unwrap_parameter(hooked, "weight"),
            lambda: unwrap_parameter(layer, "wieght"),
        )
        self.assertExpectedInline(
            got,
            """\
Layer has no parameter 'wieght'; it has weight, bias
parameter 'bias' of shape (64,) is no matrix
parameter 'weight' has recipe rowwise; unwrap_parameter first
parameter 'weight' has hooks; register them after wrap_parameter
Layer has no 'weight' that wrap_parameter has made
Layer has no 'wieght' that wrap_parameter has made""",
        )


# ----------------------------------------------------------------------------------------- modules


def test_wrap_and_unwrap_keep_the_parameter() -> None:
    """The same object, leaf, storage, gradient and attributes; what it was, to the bit, after."""
    layer = Layer()
    p, pointer, value = layer.weight, layer.weight.data_ptr(), layer.weight.detach().clone()
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.5)
    p.grad, p.note = torch.ones_like(p), "mine"  # type: ignore[attr-defined]
    wrap_parameter(layer, "weight")
    wrap_parameter(layer, "weight")  # again changes nothing
    assert layer.weight is p
    assert isinstance(p, nn.Parameter) and isinstance(p, Float8Weight)
    assert p.is_leaf and p.requires_grad and p.note == "mine"
    assert dict(layer.named_parameters())["weight"] is p
    assert type(p.grad) is Tensor
    optimiser.step()
    assert_same_bytes(p.plain(), value - 0.5)
    unwrap_parameter(layer, "weight")
    assert layer.weight is p
    assert type(p) is nn.Parameter
    assert p.data_ptr() == pointer and p.requires_grad and p.is_leaf
    assert (p.note, p.grad.sum()) == ("mine", p.numel())
    assert_same_bytes(p, value - 0.5)
    assert not hooks_of(layer)
    optimiser.step()
    assert_same_bytes(p, value - 0.5 - 0.5)
    assert error(lambda: unwrap_parameter(layer, "weight"), ValueError)


def test_frozen_parameter_stays_frozen() -> None:
    layer = Layer()
    layer.weight.requires_grad_(False)
    wrap_parameter(layer, "weight")
    assert not layer.weight.requires_grad
    unwrap_parameter(layer, "weight")
    assert not layer.weight.requires_grad


def test_tied_parameter() -> None:
    """Wrapped for each module that has it; one object throughout."""
    first, second = nn.Embedding(16, 32), nn.Linear(32, 16, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    wrap_parameter(first, "weight")
    wrap_parameter(second, "weight")
    assert first.weight is second.weight
    tokens = torch.tensor([1, 2, 3])
    y = model(tokens)
    assert_same_bytes(y, float8.linear(first.weight.plain()[tokens], first.weight.plain()))
    y.sum().backward()
    assert len(list(model.parameters())) == 1
    assert {type(value) for value in model.state_dict().values()} == {Tensor}
    unwrap_parameter(first, "weight")
    unwrap_parameter(second, "weight")
    assert type(second.weight) is nn.Parameter and first.weight is second.weight
    assert not hooks_of(first) and not hooks_of(second)


def test_state_dict_is_plain_and_shares_storage() -> None:
    model = nn.Sequential(wrapped(), Layer())
    state = model.state_dict()
    assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert {type(value) for value in state.values()} == {Tensor}
    assert state["0.weight"].data_ptr() == inner(model[0]).data_ptr()
    assert not state["0.weight"].requires_grad
    kept = model.state_dict(keep_vars=True)["0.weight"]
    assert type(kept) is Tensor and kept.requires_grad


@pytest.mark.parametrize("swap", [False, True], ids=["", "swap"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_load_state_dict(assign: bool, swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From plain tensors, which a plain model wrote; the weight stays a Float8Weight."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swap)
    state, layer = Layer().state_dict(), wrapped(recipe=MXFP8)
    p = layer.weight
    assert str(layer.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
    assert isinstance(layer.weight, Float8Weight) and isinstance(layer.weight, nn.Parameter)
    assert layer.weight.recipe is MXFP8 and layer.weight.requires_grad
    assert_same_bytes(inner(layer), state["weight"])
    assert (layer.weight is p) == (swap or not assign)
    assert (inner(layer).data_ptr() == state["weight"].data_ptr()) == assign
    assert type(state["weight"]) is Tensor  # the caller's is not touched
    plain = Layer()
    plain.load_state_dict(layer.state_dict())
    assert_same_bytes(plain.weight, state["weight"])


def test_load_state_dict_reports_what_is_missing() -> None:
    layer = wrapped()
    result = layer.load_state_dict({"bias": layer.bias.detach()}, strict=False, assign=True)
    assert result.missing_keys == ["weight"]
    assert isinstance(layer.weight, Float8Weight)


def test_deepcopy_and_pickle() -> None:
    layer = wrapped(recipe=BLOCKWISE)
    layer(torch.randn(6, 32, dtype=BF16))
    layer.multiply = F.linear
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for twin in copies:
        p = twin.weight
        assert isinstance(p, Float8Weight) and isinstance(p, nn.Parameter)
        assert p.recipe == BLOCKWISE and p.requires_grad
        assert p.record is not layer.weight.record
        assert inner(twin).data_ptr() != inner(layer).data_ptr()
        assert_same_bytes(inner(twin), inner(layer))
        assert type(twin.state_dict()["weight"]) is Tensor
        twin.load_state_dict(Layer().state_dict(), assign=True)
        assert isinstance(twin.weight, Float8Weight)
        unwrap_parameter(twin, "weight")
        assert not hooks_of(twin)
    assert isinstance(layer.weight, Float8Weight)


def test_saved_weight_loads_with_weights_only(tmp_path: Any) -> None:
    """Recipe and all: its classes are registered when float8 is imported."""
    layer = wrapped(recipe=MXFP8)
    torch.save({"p": layer.weight, "view": layer.weight.detach()[:3].t()}, tmp_path / "w.pt")
    for name, value in torch.load(tmp_path / "w.pt", weights_only=True).items():
        assert isinstance(value, Float8Weight) and value.recipe == MXFP8, name
        assert isinstance(value, nn.Parameter) == (name == "p")


OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    # One by one: foreach, which torch picks for plain parameters on a GPU, rounds otherwise.
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers_do_what_they_do_to_plain_weights(name: str, device: str) -> None:
    plain = Layer(dtype=torch.float32, device=device)
    layer = copy.deepcopy(plain)
    wrap_parameter(layer, "weight")
    for model in (plain, layer):
        optimiser = OPTIMISERS[name](model.parameters())
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.linspace(-1, 1, p.numel(), device=device).view_as(p)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimiser.step()
            optimiser.zero_grad()
        states = [s for state in optimiser.state.values() for s in state.values()]
        assert {type(s) for s in states} == {Tensor}
    assert_same_bytes(inner(layer), plain.weight)


def test_training_follows_the_plain_model() -> None:
    def train(model: nn.Module) -> list[float]:
        generator = torch.Generator().manual_seed(0)
        optimiser, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for _ in range(20):
            x = torch.randn(64, 32, generator=generator)
            loss = (model(x) - x @ target).square().mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.item())
        return losses

    target = torch.randn(32, 16)
    plain = Layer(torch.matmul, shape=(32, 16), dtype=torch.float32)
    layer = copy.deepcopy(plain)
    wrap_parameter(layer, "weight")
    expected, losses = train(plain), train(layer)
    assert expected[-1] < 0.9 * expected[0]
    assert losses == pytest.approx(expected, rel=0.02)
    assert losses != expected


def test_init_functions() -> None:
    for init in (
        nn.init.kaiming_uniform_,
        nn.init.xavier_normal_,
        nn.init.orthogonal_,
        nn.init.trunc_normal_,
        nn.init.zeros_,
    ):
        layer, plain = wrapped(dtype=torch.float32), torch.empty(64, 32)
        torch.manual_seed(1)
        assert init(layer.weight) is layer.weight
        torch.manual_seed(1)
        assert_same_bytes(inner(layer), init(plain))


def test_module_conversions_keep_the_parameter() -> None:
    layer = wrapped(dtype=torch.float32)
    p, value = layer.weight, inner(layer).clone()
    for convert, dtype in {
        "bfloat16": BF16,
        "half": torch.float16,
        "float": torch.float32,
        "double": torch.float64,
    }.items():
        getattr(layer, convert)()
        assert layer.weight is p and isinstance(p, Float8Weight) and isinstance(p, nn.Parameter)
        assert p.dtype == inner(layer).dtype == dtype
    assert_same_bytes(inner(layer), value.bfloat16().half().double())
    assert error(lambda: layer(torch.zeros(1, 32).double()), ValueError)  # TestMessages has it
    layer.float().to("meta")
    assert layer.weight is p and inner(layer).is_meta
    layer.to_empty(device="cpu")
    assert layer.weight is p and isinstance(p, Float8Weight) and inner(layer).device.type == "cpu"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("form", ["weight", "parameter", "state dict", "detached", "computed"])
def test_functional_call(form: str, compiled: bool) -> None:
    """Whatever stands in for the weight multiplies as it would, and gets the gradient."""
    layer, x = wrapped(recipe=MXFP8), torch.randn(6, 32, dtype=BF16)
    value = torch.randn(64, 32, dtype=BF16)
    leaf = nn.Parameter(Float8Weight(value, MXFP8) if form == "weight" else value)
    stand_in = leaf
    if form == "state dict":
        stand_in = wrapped(recipe=MXFP8).state_dict()["weight"].copy_(value)
    if form == "detached":
        stand_in = leaf.detach()
    weight, state = layer.weight, {"weight": stand_in}

    def call(x: Tensor) -> Tensor:
        given = {"weight": leaf * 2} if form == "computed" else state
        return torch.func.functional_call(layer, given, (x,))

    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    factor = 2 if form == "computed" else 1
    for _ in range(2):
        y = call(x)
        assert_same_bytes(y, float8.linear(x, value * factor, recipe=MXFP8))
        assert layer.weight is weight and state["weight"] is stand_in
    if not compiled:
        assert (weight.last_run is None) == (form == "weight")  # which has a record of its own
    if stand_in.requires_grad:
        y.sum().backward()
        (expected,) = torch.autograd.grad(layer(x).sum(), layer.weight)
        assert type(leaf.grad) is Tensor
        assert_same_bytes(leaf.grad, expected * factor)
        assert weight.grad is None
    assert_same_bytes(layer(x), float8.linear(x, inner(layer), recipe=MXFP8))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_functional_call_of_a_compiled_module(requires_grad: bool) -> None:
    """Hooks of the module that is compiled run outside of its graph."""
    layer, x = wrapped(), torch.randn(6, 32, dtype=BF16)
    value = torch.randn(64, 32, dtype=BF16, requires_grad=requires_grad)
    expected, own = float8.linear(x, value), layer(x)
    torch._dynamo.reset()
    module = torch.compile(layer, backend="aot_eager", fullgraph=True)
    model = nn.Sequential(nn.Identity(), module)
    for _ in range(2):
        y = torch.func.functional_call(module, {"_orig_mod.weight": value}, (x,))
        assert_same_bytes(y, expected)
        y = torch.func.functional_call(model, {"1._orig_mod.weight": value}, (x,))
        assert_same_bytes(y, expected)
        assert_same_bytes(model(x), own)
    if requires_grad:
        y.sum().backward()
        assert type(value.grad) is Tensor and layer.weight.grad is None


def test_functional_call_of_a_forward_that_fails_or_calls_itself() -> None:
    layer, x = wrapped(), torch.randn(6, 32, dtype=BF16)
    weight, state = layer.weight, {"weight": torch.randn(64, 32, dtype=BF16)}

    def fails(x: Tensor, w: Tensor) -> Tensor:
        raise KeyError

    layer.multiply = fails
    with pytest.raises(KeyError):
        torch.func.functional_call(layer, state, (x,))
    assert layer.weight is weight and type(state["weight"]) is Tensor

    def twice(x: Tensor, w: Tensor) -> Tensor:
        layer.multiply = F.linear
        return torch.cat([layer(x), F.linear(x, layer.weight)])

    for copied in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(wrapped()))):
        layer = copied
        layer.multiply = twice
        y = torch.func.functional_call(layer, state, (x,))
        assert_same_bytes(y, float8.linear(x, state["weight"]).repeat(2, 1))
    assert type(state["weight"]) is Tensor
    unwrap_parameter(layer, "weight")
    y = torch.func.functional_call(layer, state, (x,))
    assert_same_bytes(y, F.linear(x, state["weight"]))


def test_functorch_is_refused() -> None:
    layer, x = wrapped(), torch.randn(6, 32, dtype=BF16)
    assert "torch.func" in error(lambda: torch.func.grad(lambda x: layer(x).sum())(x))
    weights = {"weight": layer.weight.detach(), "bias": layer.bias.detach()}
    loss = lambda w: torch.func.functional_call(layer, w, (x,)).sum()  # noqa: E731
    assert "torch.func" in error(lambda: torch.func.grad(loss)(weights))
    plain = {name: t.detach() for name, t in layer.state_dict().items()}
    assert "torch.func.grad, vmap" in error(lambda: torch.func.grad(loss)(plain))
    samples = torch.func.vmap(lambda w, _: loss(w), in_dims=(None, 0))
    assert "torch.func.grad, vmap" in error(lambda: samples(plain, x))
    several = {name: t.expand(2, *t.shape) for name, t in plain.items()}
    assert "torch.func.grad, vmap" in error(lambda: torch.func.vmap(loss)(several))


def test_moving_averages_and_vectors_of_parameters() -> None:
    layer = wrapped(dtype=torch.float32)
    average = torch.optim.swa_utils.AveragedModel(layer)
    average.update_parameters(layer)
    with torch.no_grad():
        layer.weight.add_(1)
    average.update_parameters(layer)
    assert isinstance(average.module.weight, Float8Weight)
    torch.testing.assert_close(inner(average.module), inner(layer) - 0.5)
    vector = nn.utils.parameters_to_vector(layer.parameters())
    assert type(vector) is Tensor
    nn.utils.vector_to_parameters(torch.zeros_like(vector), layer.parameters())
    assert isinstance(layer.weight, Float8Weight) and not inner(layer).any()


def test_last_run() -> None:
    """Of the weight or any of its views; of nobody else."""
    layer, other = wrapped(recipe=ROWWISE_WGRAD_HP), wrapped()
    assert layer.weight.last_run is None
    x = torch.randn(6, 32, dtype=BF16)
    torch.cat([x @ part.t() for part in layer.weight.to(BF16)[:8].chunk(2)])
    assert layer.weight.last_run == ("torch", "torch", "high precision")
    experts = wrapped(recipe=ROWWISE_WGRAD_HP, shape=(3, 64, 32)).weight
    F.grouped_mm(x, experts[1:].mT, offs=ends(2, 4))
    assert experts.last_run == ("torch", "torch", "high precision")
    assert other.weight.last_run is None


# ----------------------------------------------------------------------------------- torch.compile

COMPILED: dict[str, Multiply] = {
    "linear": F.linear,
    "@": lambda x, w: x @ w.t(),
    "addmm": lambda x, w: torch.addmm(x[:, :1], x, w.mT),
    "w first": lambda x, w: (w @ x.mT).mT,
    "cast": lambda x, w: F.linear(x.float(), w.float()),
    "chunks": lambda x, w: torch.cat([F.linear(x, part) for part in w.chunk(2)], -1),
    "experts": lambda x, w: torch.einsum("mk,enk->men", x, w.view(2, 32, 32)),
    "bmm": lambda x, w: torch.bmm(x.unflatten(0, (2, -1)), w.view(2, 32, 32).mT),
    "grouped_mm": lambda x, w: F.grouped_mm(
        x, w.view(2, 32, 32).transpose(-2, -1), offs=torch.tensor([2, 6], dtype=torch.int32)
    ),
    "float8.linear": lambda x, w: float8.linear(x, w),
}


def counter(backend: str = "aot_eager") -> Any:
    import torch._dynamo.testing

    return torch._dynamo.testing.CompileCounterWithBackend(backend)


def check_compiled(layer: Layer, x: Tensor, call: Callable[[Tensor], Tensor]) -> None:
    got = step(lambda x, _: call(x), x, layer.weight)
    for ours, theirs in zip(got, step(layer.multiply, x, layer.weight, got[-1]), strict=True):
        assert type(ours) is Tensor
        assert_same_bytes(ours, theirs)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_without_a_graph_break(name: str) -> None:
    layer, count = wrapped(COMPILED[name]), counter()
    call = torch.compile(layer, backend=count, fullgraph=True)
    check_compiled(layer, torch.randn(6, 32, dtype=BF16), call)
    assert count.frame_count == 1


class Experts(nn.Module):
    """Layers of gated experts, in bf16 as they multiply, and in fp32 as they are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(4, 48, 32) / 6) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(4, 32, 48) / 7)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
        x = x.bfloat16()
        h = F.silu(torch._grouped_mm(x, self.w1.bfloat16().transpose(-2, -1), offs=offs))
        h = h * torch._grouped_mm(x, self.w3.bfloat16().transpose(-2, -1), offs=offs)
        return F.grouped_mm(h, self.w2.bfloat16().transpose(-2, -1), offs=offs)


@pytest.mark.parametrize("recipe", [ROWWISE, MXFP8], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_converted_experts_train_in_fp8(
    recipe: Recipe, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the plain module does whose products are float8.grouped_mm; with experts without rows and
    rows without an expert, in one graph."""
    model = nn.ModuleDict({"experts": Experts()})
    reference = copy.deepcopy(model)
    report = float8.convert(model, recipe, experts="auto")
    assert set(report.converted) == {"experts.w1", "experts.w2", "experts.w3"}
    run = model["experts"]
    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    routings = [[5, 0, 20, 3], [0, 0, 1, 22]]

    def train(model: nn.Module, call: Callable[..., Tensor]) -> list[Tensor]:
        optimiser, seen = torch.optim.AdamW(model.parameters(), lr=0.01), []
        torch.manual_seed(0)
        for counts, stance in zip(routings, ("default", "fail_on_recompile"), strict=True):
            x = torch.randn(30, 32, requires_grad=True)
            with torch.compiler.set_stance(stance):
                y = call(x, torch.tensor(counts))
            y.float().square().mean().backward()
            seen += [y.detach(), x.grad, *(p.grad for p in model.parameters())]
            optimiser.step()
            optimiser.zero_grad()
        return [*seen, *(p.detach() for p in model.state_dict().values())]

    got = train(model, run)
    assert {type(t) for t in got} == {Tensor}
    assert all(s.last_run == ("torch",) * 3 for s in float8.summary(model).layers)
    x, counts = torch.randn(30, 32), torch.tensor(routings[0])
    with monkeypatch.context() as m:
        m.setattr(
            torch,
            "_grouped_mm",
            lambda x, w, offs, **_: float8.grouped_mm(x, w, offs, recipe=recipe),
        )
        for ours, theirs in zip(got, train(reference, reference["experts"]), strict=True):
            assert_same_bytes(ours, theirs)
    float8.revert(model)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    plain, reverted = (m["experts"](x, counts) for m in (reference, model))
    assert_same_bytes(reverted[:28], plain[:28])  # torch leaves rows of no expert unwritten


CASTS: dict[str, tuple[torch.dtype, bool, int]] = {  # the weight's dtype, autocast, casts of it
    "kept in bf16": (BF16, False, 0),
    "cast by autocast": (torch.float32, True, 0),
    "cast by the module": (torch.float32, False, 4),  # w2 for dgrad too
}


@pytest.mark.parametrize("name", CASTS)
def test_experts_that_cast_their_weights_in_a_block_of_cached_weights(name: str) -> None:
    """Copies serve what has the weight's own values; what is rounded first has its own bits."""
    dtype, autocast, casts = CASTS[name]
    model = Experts().to(dtype)
    float8.convert(model)
    x, counts = torch.randn(30, 32), torch.tensor([5, 0, 20, 3])
    if autocast:
        model.forward = lambda x, counts: F.grouped_mm(  # type: ignore[method-assign]
            F.silu(F.grouped_mm(x, model.w1.mT, offs=counts.cumsum(0, dtype=torch.int32))),
            model.w2.mT,
            offs=counts.cumsum(0, dtype=torch.int32),
        )

    def run() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", BF16, enabled=autocast):
            y = model(x, counts)
        y.float().square().sum().backward()
        return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = run()
    with float8.cached_weights(model), Ops() as ops:
        for ours, same in zip(run(), expected, strict=True):
            assert_same_bytes(ours, same)
    assert ops.seen.get("quantize", 0) + ops.seen.get("quantize_and_measure", 0) == casts


def test_compiled_records_the_run() -> None:
    layer = wrapped(lambda x, w: x @ w.t())
    call = torch.compile(layer, backend="eager", fullgraph=True)
    call(torch.randn(6, 32, dtype=BF16))
    assert layer.weight.last_run == ("torch",) * 3


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_for_any_number_of_tokens(dynamic: bool | None) -> None:
    layer, count = wrapped(), counter()
    call = torch.compile(layer, backend=count, fullgraph=True, dynamic=dynamic)
    for tokens in (8, 12, 20, 33):
        check_compiled(layer, torch.randn(tokens, 32, dtype=BF16), call)
    assert count.frame_count == (1 if dynamic else 2)


def test_compiled_stack_of_any_number_of_rows() -> None:
    """One graph, with the ends of groups in it, and nothing that waits for the device."""
    layer, count = wrapped(lambda x, w: torch.bmm(x, w.mT), shape=BNK), counter()
    call = torch.compile(layer, backend=count, fullgraph=True, dynamic=True)
    for rows in (6, 17, 128, 3):
        check_compiled(layer, torch.randn(3, rows, 40, dtype=BF16), call)
    assert count.frame_count == 1


def test_compiled_once_for_equal_layers_and_once_per_setting() -> None:
    layers, count = [wrapped() for _ in range(3)], counter()
    x = torch.randn(6, 32, dtype=BF16)
    for layer in layers:
        check_compiled(layer, x, torch.compile(layer, backend=count, fullgraph=True))
    assert count.frame_count == 1
    call = torch.compile(layers[0], backend=count, fullgraph=True)
    for recipe in (TENSORWISE, ROWWISE, TENSORWISE):
        layers[0].weight.recipe = recipe
        check_compiled(layers[0], x, call)
    assert count.frame_count == 2
    with float8.assume_device("gfx942"):
        check_compiled(layers[0], x, call)
    check_compiled(layers[0], x, call)
    assert count.frame_count == 3


def test_compiled_with_autocast_and_checkpointing() -> None:
    layer = wrapped(
        lambda x, w: checkpoint(F.linear, x, w, use_reentrant=False), dtype=torch.float32
    )
    call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=BF16):
        check_compiled(layer, torch.randn(6, 32), call)


def test_compiled_code_may_change_and_return_weights() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(w: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            w.mul_(2)
        return w.t(), w[:4], w.float(), w + 1

    layer = wrapped()
    value = inner(layer).clone()
    with torch.no_grad():
        transposed, rows, cast, plain = f(layer.weight)
    assert_same_bytes(inner(layer), 2 * value)
    for result, expected in (
        (transposed, 2 * value.t()),
        (rows, 2 * value[:4]),
        (cast, 2.0 * value.float()),
    ):
        assert isinstance(result, Float8Weight) and result.recipe == ROWWISE
        assert_same_bytes(result.original, expected)
    assert type(plain) is Tensor
    with torch.no_grad():
        rows.zero_()
    assert not inner(layer)[:4].any()


def test_inductor() -> None:
    """Its cache on disk, which outlives the process, tells recipes apart."""
    x = torch.randn(6, 32, dtype=BF16)
    layer = wrapped(lambda x, w: F.linear(x, w[:32]) @ w[32:].t())
    for recipe in (ROWWISE, TENSORWISE):
        torch._dynamo.reset()
        layer.weight.recipe = recipe
        check_compiled(layer, x, torch.compile(layer, fullgraph=True))


# ------------------------------------------------------------------------------------- distributed


# torch 2.11's threads that act as ranks end with an AttributeError.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_fully_shard_with_uneven_shards() -> None:
    """Two ranks: the numbers of one process, plain (sharded) state dicts, both ways to load."""
    common = pytest.importorskip("torch.testing._internal.common_distributed")
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    reference = wrapped(lambda x, w: (x @ w.t()).relu(), shape=(33, 32), dtype=torch.float32)
    x = torch.randn(8, 32)

    def losses(model: nn.Module, steps: int = 3) -> list[float]:
        optimiser, result = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(steps):
            loss = model(x).square().mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            result.append(loss.item())
        return result

    @common.spawn_threads_and_init_comms(world_size=2)
    def run(_: Any) -> None:
        models = [copy.deepcopy(reference) for _ in range(3)]
        expected = losses(copy.deepcopy(reference), 4)
        for model in models:
            fully_shard(model)
        assert losses(models[0]) == expected[:3]
        state = models[0].state_dict()
        assert type(state["weight"]._local_tensor) is Tensor
        models[1].load_state_dict(state)
        models[2].load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
        for model in models:
            assert isinstance(model.weight._local_tensor, Float8Weight)
            assert losses(model, 1) == expected[3:]
        assert "is sharded" in error(lambda: unwrap_parameter(models[0], "weight"), ValueError)

    run(None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_fully_shard_along_another_dimension() -> None:
    """As fewer experts than ranks are sharded."""
    common = pytest.importorskip("torch.testing._internal.common_distributed")
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    torch.manual_seed(0)
    reference, x, counts = Experts(), torch.randn(12, 32), torch.tensor([5, 0, 4, 3])
    for name in ("w1", "w2", "w3"):
        wrap_parameter(reference, name)

    def train(model: nn.Module) -> list[float]:
        optimiser, result = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            loss = model(x, counts).float().square().mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            result.append(loss.item())
        return result

    @common.spawn_threads_and_init_comms(world_size=2)
    def run(_: Any) -> None:
        model, expected = copy.deepcopy(reference), train(copy.deepcopy(reference))
        fully_shard(model, shard_placement_fn=lambda p: Shard(1))
        assert model.w1._local_tensor.shape == (4, 24, 32)
        assert train(model) == expected
        assert expected[2] < expected[0]

    run(None)


def test_dlpack_hands_over_the_values() -> None:
    w = torch.randn(8, 64)
    assert torch.equal(torch.from_dlpack(Float8Weight(w)), w)
