"""The FP8 linear layer: values, shapes, dtypes, what is kept for backward, life inside autograd.

Shape letters: M tokens, N out features, K in features. x input, w weight, g gradient of the output.
"""

import copy
import dataclasses
import pickle
import textwrap
import threading
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import float8
from float8 import (
    FULL,
    RECIPES,
    ROWWISE,
    ROWWISE_WGRAD_HP,
    TENSORWISE,
    Cast,
    Float8Linear,
    Gemm,
    Recipe,
    assume_device,
)
from float8.cache import CachedWeight
from float8.testing import (
    assert_no_worse_than,
    assert_same_bytes,
    deterministic,
    needs,
    relative_error,
    saved_bytes,
)

DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _high_precision(recipe: Recipe, forward: bool, dgrad: bool, wgrad: bool) -> Recipe:
    """The recipe with the GEMMs marked True left in high precision."""
    return dataclasses.replace(
        recipe,
        name=f"{recipe.name}, hp {forward:d}{dgrad:d}{wgrad:d}",
        forward=None if forward else recipe.forward,
        dgrad=None if dgrad else recipe.dgrad,
        wgrad=None if wgrad else recipe.wgrad,
    )


def _uniform(name: str, cast: Cast) -> Recipe:
    gemm = Gemm(cast, cast)
    return Recipe(name, gemm, gemm, gemm)


SUBSETS = [_high_precision(ROWWISE, *which) for which in product((False, True), repeat=3)]
CUSTOM = [
    *SUBSETS,
    dataclasses.replace(ROWWISE, name="rowwise, save", weight_for_dgrad="save"),
    dataclasses.replace(float8.MXFP8, name="mxfp8, save", weight_for_dgrad="save"),
    _uniform("pow2 rows", Cast("e4m3", (1, FULL), "pow2")),
    _uniform("pow2 tensors", Cast("e4m3", (FULL, FULL), "pow2")),
    _uniform("e5m2 everywhere", Cast("e5m2", (1, FULL))),
    _uniform("mx floor", Cast("e4m3", (1, 32), "e8m0_floor")),
    _uniform("odd blocks", Cast("e4m3", (3, 20), "e8m0_even")),
]
ALL = {recipe.name: recipe for recipe in (*RECIPES.values(), *CUSTOM)}
NAMED = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
EVERY = pytest.mark.parametrize("recipe", ALL.values(), ids=list(ALL))

Grads = tuple[Tensor, Tensor, Tensor, Tensor | None]  # y, gx, gw, gb


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, g: Tensor, f: Callable[..., Tensor]
) -> Grads:
    """Output and gradients of ``f(x, weight, bias)`` for a gradient g of the output."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]
    bias = None if bias is None else bias.detach().clone().requires_grad_()
    y = f(*leaves, bias)
    y.backward(g)
    for t in (*leaves, *filter(None, [bias] if bias is None else [])):
        assert t.grad is not None
    gx, gw = (t.grad for t in leaves)
    assert gx is not None
    assert gw is not None
    return y.detach(), gx, gw, None if bias is None else bias.grad


def fp8(recipe: Recipe) -> Callable[..., Tensor]:
    return lambda x, weight, bias: float8.linear(x, weight, bias, recipe=recipe)


def problem(
    m: int, n: int, k: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, bias, g with columns and rows of different magnitudes."""
    x = torch.randn(m, k, device=device) * torch.exp2(torch.randint(-3, 3, (k,), device=device))
    w = torch.randn(n, k, device=device) * torch.exp2(torch.randint(-6, -2, (n, 1), device=device))
    g = torch.randn(m, n, device=device) * torch.exp2(torch.randint(-4, 1, (m, 1), device=device))
    return x.to(dtype), w.to(dtype), torch.randn(n, device=device).to(dtype), g.to(dtype)


# ---- values ------------------------------------------------------------------------------------


def fake_quant(x: Tensor, cast: Cast, device: str = "cpu") -> Tensor:
    """Quantise and dequantise in float64, as simple as can be, without the package's arithmetic."""
    fmt = float8.format_for(device, cast.kind)
    rows, columns = (
        torch.arange(n, device=x.device) // (max(n, 1) if b == FULL else b)
        for n, b in zip(x.shape, cast.block, strict=True)
    )
    block = (rows[:, None] * (len(columns) + 1) + columns).reshape(-1)
    amax = torch.zeros((len(rows) + 1) * (len(columns) + 1), dtype=torch.float64, device=x.device)
    amax.scatter_reduce_(0, block, x.double().abs().reshape(-1), "amax")
    amax = torch.where(amax == 0, 1.0, amax)
    scale = amax / fmt.max
    if cast.scale_mode == "e8m0_floor":
        scale = torch.exp2(amax.log2().floor() - fmt.max_exponent)
    elif cast.scale_mode == "e8m0_even":
        mantissa, exponent = torch.frexp(amax)
        carry = mantissa * 2 >= 2 - 2.0 ** -(fmt.mantissa_bits + 1)
        scale = torch.exp2(exponent - 1 - fmt.max_exponent + carry)
    elif cast.scale_mode != "fp32":
        scale = torch.exp2(scale.log2().ceil())
    each = scale[block].reshape(x.shape)
    q = (x.double() / each).clamp(-fmt.max, fmt.max)
    return q.float().to(fmt.dtype).double() * each


def baseline(recipe: Recipe, x: Tensor, w: Tensor, bias: Tensor | None, g: Tensor) -> Grads:
    """The layer by fake quantisation in float64, rounded once to x's dtype."""

    def mm(a: Tensor, b: Tensor, gemm: Gemm | None) -> Tensor:
        """a [rows, contraction] times b [columns, contraction] transposed."""
        if gemm is None:
            return (a.double() @ b.double().t()).to(x.dtype)
        device = x.device.type
        return (fake_quant(a, gemm.a, device) @ fake_quant(b, gemm.b, device).t()).to(x.dtype)

    y = mm(x, w, recipe.forward)
    y = y if bias is None else y + bias
    gx, gw = mm(g, w.t(), recipe.dgrad), mm(g.t(), x.t(), recipe.wgrad)
    return y, gx, gw, None if bias is None else g.sum(0)


def truth(x: Tensor, w: Tensor, bias: Tensor | None, g: Tensor) -> Grads:
    x, w, g = x.double(), w.double(), g.double()
    y = x @ w.t()
    y = y if bias is None else y + bias.double()
    return y, g @ w, g.t() @ x, None if bias is None else g.sum(0)


def check(recipe: Recipe, x: Tensor, w: Tensor, bias: Tensor | None, g: Tensor) -> None:
    """As near to the exact layer as fake quantisation is, and of x's dtype."""
    got = run(x, w, bias, g, fp8(recipe))
    expected = zip(truth(x, w, bias, g), baseline(recipe, x, w, bias, g), strict=True)
    for t, (exact, simple) in zip(got, expected, strict=True):
        if t is not None:
            assert exact is not None
            assert simple is not None
            assert t.dtype == x.dtype
            assert_no_worse_than(t, exact, simple, 1.5)


@pytest.mark.parametrize("device", DEVICES)
@EVERY
def test_as_exact_as_fake_quantisation(recipe: Recipe, device: str) -> None:
    for dtype in DTYPES:
        x, w, bias, g = problem(40, 48, 72, dtype, device)
        check(recipe, x, w, bias, g)
    x, w, _, g = problem(300, 136, 264, torch.bfloat16, device)
    check(recipe, x, w, None, g)


def by_hand(recipe: Recipe, x: Tensor, w: Tensor, bias: Tensor | None, g: Tensor) -> Grads:
    """The layer written with the public pieces: quantize, dequantize and matmuls in float32, which
    nothing rounds before it is an output or a gradient."""

    def mm(a: Tensor, b: Tensor, gemm: Gemm | None) -> Tensor:
        if gemm is None:
            return a.to(x.dtype) @ b.to(x.dtype).t()
        a8, b8 = (
            float8.quantize(t, cast.block, cast.kind, cast.scale_mode).to(torch.float32)
            for t, cast in ((a, gemm.a), (b, gemm.b))
        )
        return a8.dequantize() @ b8.dequantize().t().contiguous()

    y = mm(x, w, recipe.forward)
    y = y if bias is None else y + bias
    gx = mm(g, w.t(), recipe.dgrad)
    gw = g.t() @ x if recipe.wgrad is None else mm(g.t(), x.t(), recipe.wgrad)
    return y.to(x.dtype), gx.to(x.dtype), gw.to(w.dtype), None if bias is None else g.sum(0)


@EVERY
def test_the_same_bits_as_the_pieces_put_together_by_hand(recipe: Recipe) -> None:
    for dtype in DTYPES:
        for m, n, k in ((35, 48, 64), (7, 130, 33)):
            x, w, bias, g = problem(m, n, k, dtype)
            for b in (bias, None):
                got, expected = run(x, w, b, g, fp8(recipe)), by_hand(recipe, x, w, b, g)
                for t, e in zip(got[:3], expected[:3], strict=True):
                    assert e is not None
                    assert_same_bytes(t, e)


SIZES = (0, 1, 2, 15, 16, 17, 33, 129)
MORE_SIZES = (*SIZES, 3, 31, 32, 44, 100, 127)


def pairwise(sizes: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Every pair of sizes of every two dimensions once."""
    each = list(enumerate(sizes))
    return [(m, n, sizes[(i + j) % len(sizes)]) for i, m in each for j, n in each]


@pytest.mark.parametrize("device", DEVICES)
@NAMED
def test_every_size(recipe: Recipe, device: str) -> None:
    for i, (m, n, k) in enumerate(pairwise(SIZES if device == "cpu" else MORE_SIZES)):
        dtype = DTYPES[i % 3]
        x, w, bias, g = problem(m, n, k, dtype, device)
        with_bias = None if i % 2 else bias
        got = run(x, w, with_bias, g, fp8(recipe))
        expected = truth(x, w, with_bias, g)
        for t, exact, simple in zip(
            got, expected, baseline(recipe, x, w, with_bias, g), strict=True
        ):
            if t is None or exact is None or simple is None:
                continue
            assert t.dtype == dtype
            assert t.isfinite().all()
            assert_no_worse_than(t, exact, simple, 2.0)


@pytest.mark.parametrize("device", DEVICES)
@NAMED
@pytest.mark.parametrize(
    ("m", "n", "k"), [(35, 2, 768), (35, 15, 64), (48, 64, 64), (64, 16, 128), (33, 64, 48)]
)
def test_layers_that_others_refuse(recipe: Recipe, m: int, n: int, k: int, device: str) -> None:
    layer = Float8Linear(k, n, device=device, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    y = layer(x)
    assert y.shape == (m, n)
    y.backward(g)
    assert x.grad is not None
    assert layer.weight.grad is not None
    simple = baseline(recipe, x.detach(), layer.weight.detach(), layer.bias.detach(), g)
    exact = truth(x.detach(), layer.weight.detach(), layer.bias.detach(), g)
    for t, e, s in zip((y.detach(), x.grad, layer.weight.grad), exact, simple, strict=False):
        assert e is not None
        assert s is not None
        assert_no_worse_than(t, e, s)


@pytest.mark.parametrize("device", DEVICES)
@NAMED
@pytest.mark.parametrize("lead", [(), (4,), (2, 3), (2, 2, 4), (2, 0), (0,), (1, 1, 1, 1)])
def test_leading_dimensions_fold(recipe: Recipe, lead: tuple[int, ...], device: str) -> None:
    _, w, bias, _ = problem(1, 48, 64, device=device)
    x, g = torch.randn(*lead, 64, device=device), torch.randn(*lead, 48, device=device)
    y, gx, gw, gb = run(x, w, bias, g, fp8(recipe))
    assert y.shape == (*lead, 48)
    assert gx.shape == x.shape
    flat = run(x.reshape(-1, 64), w, bias, g.reshape(-1, 48), fp8(recipe))
    assert_same_bytes(y, flat[0].reshape(y.shape))
    assert_same_bytes(gx, flat[1].reshape(x.shape))
    assert_same_bytes(gw, flat[2])
    assert gb is not None
    torch.testing.assert_close(gb, flat[3])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "rows of a wider one": lambda x: torch.cat([x, x * 1e9], 1)[:, : x.shape[1]],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "offset": lambda x: torch.cat([x.new_ones(1), x.reshape(-1)])[1:].view(x.shape),
}


@pytest.mark.parametrize("device", DEVICES)
@NAMED
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_change_a_bit(recipe: Recipe, layout: str, device: str) -> None:
    x, w, bias, g = problem(35, 48, 64, torch.bfloat16, device)
    expected = run(x, w, bias, g, fp8(recipe))
    relaid = LAYOUTS[layout]
    leaf_x, leaf_w = (relaid(t).detach().requires_grad_() for t in (x, w))
    assert not leaf_x.is_contiguous() or layout == "offset"
    y = float8.linear(leaf_x, leaf_w, bias, recipe=recipe)
    y.backward(relaid(g))
    assert leaf_x.grad is not None
    assert leaf_w.grad is not None
    for t, e in zip((y, leaf_x.grad), expected, strict=False):
        assert e is not None
        assert_same_bytes(t, e)
    assert expected[2] is not None
    if recipe.wgrad is None and device == "cuda":  # cuBLAS picks its bf16 kernel by the layout
        torch.testing.assert_close(leaf_w.grad, expected[2])
    else:
        assert_same_bytes(leaf_w.grad, expected[2])


@NAMED
def test_expanded_and_transposed_gradients(recipe: Recipe) -> None:
    x, w = torch.randn(4, 16, 64), torch.randn(48, 64)
    weights = torch.randn(16, 4, 48)
    losses: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "sum": (Tensor.sum, torch.ones(4, 16, 48)),
        "mean": (Tensor.mean, torch.full((4, 16, 48), 1 / (4 * 16 * 48))),
        "transposed": (lambda y: (y.transpose(0, 1) * weights).sum(), weights.transpose(0, 1)),
        "one row": (lambda y: y[1, 2].sum(), F.pad(torch.ones(1, 1, 48), (0, 0, 2, 13, 1, 2))),
        "broadcast": (lambda y: y.sum(1).prod(), torch.empty(0)),
    }
    for name, (loss, g) in losses.items():
        leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = float8.linear(leaf_x, leaf_w, recipe=recipe)
        if name == "broadcast":
            (g,) = torch.autograd.grad(loss(y), y, retain_graph=True)
        loss(y).backward()
        expected = run(x, w, None, g.contiguous(), fp8(recipe))
        assert leaf_x.grad is not None
        assert leaf_w.grad is not None
        assert_same_bytes(leaf_x.grad, expected[1])
        assert_same_bytes(leaf_w.grad, expected[2])


# ---- dtypes and autocast -----------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@NAMED
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_are_those_of_the_input(recipe: Recipe, dtype: torch.dtype, device: str) -> None:
    layer = Float8Linear(64, 15, device=device, dtype=dtype, recipe=recipe)
    x = torch.randn(33, 64, device=device, dtype=dtype, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (33, 15)
    grads = (x.grad, layer.weight.grad, layer.bias.grad)
    assert [t.dtype for t in (y, *grads) if t is not None] == [dtype] * 4


@pytest.mark.parametrize("device", DEVICES)
@NAMED
def test_the_bias_is_rounded_with_the_product_and_once(recipe: Recipe, device: str) -> None:
    """Nearer to the truth than a product that is rounded first, also where the two cancel."""
    for dtype in (torch.bfloat16, torch.float16):
        x, w, _, _ = problem(35, 48, 64, dtype, device)
        exact = float8.linear(x.float(), w.float(), recipe=recipe)  # the same casts
        for bias in (-exact[3].to(dtype), -exact[3]):
            y = float8.linear(x, w, bias, recipe=recipe)
            twice = (float8.linear(x, w, recipe=recipe) + bias).to(dtype)
            truth = exact.double() + bias.double()
            step = torch.finfo(dtype).eps / 2
            # Tensor cores drop bits of the product before anything is rounded.
            dropped = exact.double().norm(dim=1, keepdim=True) * (2.0**-9 if y.is_cuda else 2e-6)
            assert torch.all((y.double() - truth).abs() <= step * truth.abs() + dropped + 1e-7)
            if not y.is_cuda:
                assert (y - truth).norm() < 0.9 * (twice - truth).norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", [ROWWISE, float8.MXFP8, SUBSETS[-1]], ids=lambda r: r.name)
def test_the_gradient_of_the_bias_sums_over_all_tokens(recipe: Recipe, device: str) -> None:
    """In the bias's precision or x's, the higher one; whatever else asks for a gradient."""
    for dtype, bias_dtype in product(DTYPES, DTYPES):
        x, w, bias, g = problem(36, 48, 64, dtype, device)
        for frozen in (False, True):
            leaf = bias.detach().to(bias_dtype).requires_grad_()
            y = float8.linear(x.view(4, 9, 64).requires_grad_(not frozen), w, leaf, recipe=recipe)
            (grad,) = torch.autograd.grad(y, [leaf], g.view(4, 9, 48))
            wide = torch.promote_types(dtype, bias_dtype)
            assert_same_bytes(grad, g.sum(0, dtype=wide).to(bias_dtype))
    x, w, bias, g = problem(0, 48, 64, device=device)
    assert not run(x, w, bias, g, fp8(recipe))[3].any()  # type: ignore[union-attr]


def test_a_bias_that_needs_no_gradient_gets_none() -> None:
    x, w, bias, g = problem(35, 15, 64)
    w.requires_grad_()
    y = float8.linear(x, w, bias)
    y.backward(g)
    assert bias.grad is None
    assert w.grad is not None
    # Of the bias nothing is kept for backward.
    kept = saved(lambda: float8.linear(x, w, bias.requires_grad_()))
    assert not storages(bias) & storages(*kept)


def test_the_gradient_of_the_bias_is_not_fp8() -> None:
    x, w, bias, g = problem(35, 15, 64)
    got = run(x, w, bias, g, fp8(TENSORWISE))
    plain = run(x, w, bias, g, F.linear)
    assert got[3] is not None
    assert plain[3] is not None
    assert_same_bytes(got[3], plain[3])


def test_a_bias_of_higher_precision_does_not_change_the_outputs_dtype() -> None:
    x, w, bias, _ = problem(8, 16, 32)
    x, w = x.bfloat16(), w.bfloat16()
    for recipe in (ROWWISE, _high_precision(ROWWISE, True, False, False)):
        y = float8.linear(x, w, bias, recipe=recipe)
        assert_same_bytes(y, by_hand(recipe, x, w, bias, y)[0])
        assert_same_bytes(float8.linear(x, w, bias.double(), recipe=recipe), y)


@pytest.mark.parametrize("recipe", SUBSETS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_float32_weights(recipe: Recipe, dtype: torch.dtype) -> None:
    x, w, bias, g = problem(35, 48, 64)
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    with torch.autocast("cpu", dtype):
        y = float8.linear(*leaves, recipe=recipe)
    assert y.dtype == dtype
    y.backward(g.to(dtype))
    assert [None if t.grad is None else t.grad.dtype for t in leaves] == [torch.float32] * 3
    exact = truth(x, w, bias, g)
    # x, y and gradients are rounded to autocast's dtype; the weight is quantised from its own.
    low_x, low_g, low_bias = x.to(dtype), g.to(dtype), bias.to(dtype)
    simple = baseline(recipe, low_x, w, low_bias, low_g)
    for t, e, s in zip((y, *(t.grad for t in leaves)), exact, simple, strict=True):
        assert t is not None
        assert e is not None
        assert s is not None
        assert_no_worse_than(t, e, s, 1.5)
    hand = by_hand(recipe, low_x, w, low_bias, low_g)
    assert hand[0] is not None
    assert_same_bytes(y, hand[0])


@pytest.mark.parametrize("device", DEVICES)
@NAMED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_weights_gradient_was_never_in_autocasts_dtype(
    recipe: Recipe, dtype: torch.dtype, device: str
) -> None:
    """It is rounded once, to float32: as near to the truth as it was, and nearer to the product of
    what was cast."""
    x, w, _, g = problem(35, 48, 64, device=device)
    leaf = w.clone().requires_grad_()
    with torch.autocast(device, dtype):
        y = float8.linear(x, leaf, recipe=recipe)
    y.backward(g.to(dtype))
    grad = leaf.grad
    assert grad is not None
    assert grad.dtype == torch.float32
    rounded = grad.to(dtype).float()
    if recipe.wgrad is None:  # torch's product writes what it reads
        assert_same_bytes(grad, rounded)
        return
    assert (grad != rounded).float().mean() > 0.9
    assert_no_worse_than(grad, truth(x.to(dtype), w, None, g.to(dtype))[2], rounded, 1.01)
    # The same values in float32 have the same casts.
    again = run(x.to(dtype).float(), w, None, g.to(dtype).float(), fp8(recipe))[2]
    assert_same_bytes(grad, again)
    left, right = (
        fake_quant(t.to(dtype), cast, device)
        for t, cast in ((g.t(), recipe.wgrad.a), (x.t(), recipe.wgrad.b))
    )
    cast_product = left @ right.t()
    kept = 0.1 if device == "cpu" else 1.0  # tensor cores drop bits too
    assert relative_error(grad, cast_product) <= kept * relative_error(rounded, cast_product)


def test_autocast_that_is_off_inside_and_a_backward_inside() -> None:
    x, w, _, g = problem(16, 32, 64)
    expected = run(x, w, None, g, fp8(ROWWISE_WGRAD_HP))
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        got = run(x, w, None, g, fp8(ROWWISE_WGRAD_HP))
    for t, e in zip(got[:3], expected[:3], strict=True):
        assert e is not None
        assert_same_bytes(t, e)
    leaf = x.clone().requires_grad_()
    y = float8.linear(leaf, w, recipe=ROWWISE)
    with torch.autocast("cpu", torch.bfloat16):
        y.backward(g)
    assert leaf.grad is not None
    assert_same_bytes(leaf.grad, expected[1])


def wrapped(*messages: str) -> str:
    """Messages as this file pins them: no line is too long to read."""
    return "\n".join(
        textwrap.fill(m, 92, subsequent_indent="    ", break_on_hyphens=False) for m in messages
    )


def refusal(f: Callable[[], Any], error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as info:
        f()
    return str(info.value)


def test_what_does_not_fit_is_refused() -> None:
    expecttest = pytest.importorskip("expecttest")
    x, w = torch.randn(4, 64), torch.randn(48, 64)
    cases: list[tuple[Tensor, Tensor]] = [
        (x, w.bfloat16()),
        (x.bfloat16(), w),
        (x.double(), w.double()),
        (x.to(torch.int32), w.to(torch.int32)),
        (x[:, :63], w),
        (torch.tensor(1.0), w),
        (x, w[0]),
        (x, w.expand(2, 48, 64)),
    ]
    messages = [refusal(lambda x=x, w=w: float8.linear(x, w)) for x, w in cases]  # type: ignore[misc]
    with torch.autocast(
        "cpu", torch.bfloat16
    ):  # casts what it casts elsewhere: no integers, no doubles
        messages += [refusal(lambda: float8.linear(x.long(), w))]
    expecttest.assert_expected_inline(
        wrapped(*messages),
        """\
x is torch.float32 and the weight torch.bfloat16; bring both to one dtype, or run under
    torch.autocast
x is torch.bfloat16 and the weight torch.float32; bring both to one dtype, or run under
    torch.autocast
x is torch.float64 and the weight torch.float64; an FP8 linear takes torch.bfloat16,
    torch.float16, torch.float32
x is torch.int32 and the weight torch.int32; an FP8 linear takes torch.bfloat16,
    torch.float16, torch.float32
x of shape (4, 63) does not fit a weight of shape (48, 64); needed (..., K) and (N, K)
x of shape () does not fit a weight of shape (48, 64); needed (..., K) and (N, K)
x of shape (4, 64) does not fit a weight of shape (64,); needed (..., K) and (N, K)
x of shape (4, 64) does not fit a weight of shape (2, 48, 64); needed (..., K) and (N, K)
x is torch.int64 and the weight torch.float32; bring both to one dtype, or run under
    torch.autocast""",
    )


# ---- what is kept for backward -----------------------------------------------------------------


def saved(f: Callable[..., Tensor], *args: Tensor) -> list[Tensor]:
    """The tensors that autograd keeps for backward of ``f(*args)``."""
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        f(*args)
    return kept


def storages(*tensors: Tensor) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


M, N, K = 16, 256, 128
# Of x^T, M = 16; and the amax with which the weight is cast again.
SCALES = {"tensorwise": 4 + 4, "rowwise": 4 * K + 4 * K, "blockwise": 4 * K, "mxfp8": K}


@pytest.mark.parametrize("name", SCALES)
def test_one_byte_for_each_element_of_x_and_its_scales(name: str) -> None:
    recipe = RECIPES[name]
    for dtype in DTYPES:
        layer = Float8Linear(K, N, dtype=dtype, recipe=recipe)
        x = torch.randn(M, K, dtype=dtype, requires_grad=True)
        with saved_bytes() as total:
            y = layer(x)
        assert total() == M * K + SCALES[name]
        kept = saved(layer, x)
        assert storages(layer.weight) <= storages(*kept)
        assert not storages(x) & storages(*kept)
        assert sorted(t.dtype.itemsize for t in kept)[0] == 1
        del y


def test_saving_the_weight_adds_one_byte_for_each_of_its_elements() -> None:
    recipe = dataclasses.replace(ROWWISE, weight_for_dgrad="save")
    layer = Float8Linear(K, N, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    with saved_bytes() as total:
        layer(x)
    assert total() == M * K + 4 * K + N * K + 4 * K
    assert not storages(layer.weight, x) & storages(*saved(layer, x))


def test_only_what_a_requested_gradient_needs_is_kept() -> None:
    for recipe in ALL.values():
        layer = Float8Linear(K, N, recipe=recipe)
        x = torch.randn(M, K, requires_grad=True)
        saves_w = recipe.weight_for_dgrad == "save"

        layer.weight.requires_grad_(False)  # frozen: dgrad only
        kept = saved(layer, x)
        assert storages(x).isdisjoint(storages(*kept))
        assert saves_w or storages(layer.weight) <= storages(*kept)
        # Besides it the amax with which it is cast again.
        assert sum(t.numel() * t.element_size() for t in kept) <= layer.weight.nbytes + 4 * K

        layer.weight.requires_grad_(True)  # the first layer: wgrad only
        kept = saved(layer, x.detach())
        assert storages(layer.weight).isdisjoint(storages(*kept))
        assert sum(t.numel() for t in kept) <= 2 * M * K
        if recipe.wgrad is None:  # x itself, not a copy
            assert storages(*kept) == storages(x)

        with torch.no_grad():
            assert saved(layer, x) == []
        layer.requires_grad_(False)
        assert saved(layer, x.detach()) == []


def test_no_weight_sized_tensor_is_kept_of_a_small_batch() -> None:
    layer = Float8Linear(512, 512, bias=False, dtype=torch.bfloat16)
    x = torch.randn(16, 512, dtype=torch.bfloat16, requires_grad=True)
    with saved_bytes() as total:
        layer(x)
    assert total() <= 16 * 512 + 4 * 512 + 4 * 512  # x, its scales, the weight's amax


@EVERY
def test_frozen_weights_and_inputs_without_gradient(recipe: Recipe) -> None:
    x, w, bias, g = problem(20, 30, 40)
    _, gx, gw, _ = run(x, w, bias, g, fp8(recipe))
    leaf = x.clone().requires_grad_()
    float8.linear(leaf, w, bias, recipe=recipe).backward(g)
    assert leaf.grad is not None
    assert_same_bytes(leaf.grad, gx)
    leaf = w.clone().requires_grad_()
    float8.linear(x, leaf, bias, recipe=recipe).backward(g)
    assert leaf.grad is not None
    assert_same_bytes(leaf.grad, gw)
    leaf = bias.clone().requires_grad_()
    float8.linear(x, w, leaf, recipe=recipe).backward(g)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, g.sum(0))


def test_a_weight_that_changed_before_backward_is_an_error() -> None:
    layer, x = Float8Linear(32, 32), torch.randn(4, 32, requires_grad=True)
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- inside autograd ---------------------------------------------------------------------------


def test_a_second_derivative_is_refused() -> None:
    """Also where the gradient of the output needs none itself, so that torch would let the second
    derivative vanish: a gradient penalty would have no effect."""
    x, w = torch.randn(4, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    for loss in (torch.sum, lambda y: y.pow(2).sum()):
        y = loss(float8.linear(x, w))
        with pytest.raises(NotImplementedError, match=r"create_graph=True asks for a second"):
            torch.autograd.grad(y, x, create_graph=True)


def test_functorch_is_refused_in_words() -> None:
    expecttest = pytest.importorskip("expecttest")
    layer = Float8Linear(32, 16)
    x = torch.randn(4, 32)
    transforms: list[Callable[[], Any]] = [
        lambda: torch.func.grad(lambda x: layer(x).sum())(x),
        lambda: torch.func.vmap(layer)(x),
        lambda: torch.func.jacrev(layer)(x),
        lambda: torch.func.vjp(layer, x),
        lambda: torch.func.jvp(layer, (x,), (x,)),
    ]
    messages = {refusal(f, NotImplementedError) for f in transforms}
    assert len(messages) == 1
    expecttest.assert_expected_inline(
        wrapped(*messages),
        """\
float8.linear was called under a functorch transform (torch.func.grad, vmap, jvp, ...),
    which its autograd function does not support; use .backward() or torch.autograd.grad, or
    float8.revert(model) first""",
    )


def test_functional_call() -> None:
    layer, x = Float8Linear(32, 16), torch.randn(4, 32)
    weight = torch.randn(16, 32, requires_grad=True)
    y = torch.func.functional_call(layer, {"weight": weight, "bias": layer.bias}, (x,))
    assert_same_bytes(y, float8.linear(x, weight, layer.bias))
    y.sum().backward()
    assert weight.grad is not None
    assert layer.weight.grad is None


def block(recipe: Recipe = ROWWISE) -> nn.Sequential:
    """Linear, activation, linear."""
    return nn.Sequential(
        Float8Linear(32, 48, recipe=recipe), nn.GELU(), Float8Linear(48, 16, recipe=recipe)
    )


def step(
    model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """Output and all gradients of one forward and backward."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = (call or model)(x)
    y.square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    assert x.grad is not None
    return [y.detach(), x.grad, *(g for g in grads if g is not None)]


def assert_all_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        assert_same_bytes(left, right)


@NAMED
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(recipe: Recipe, use_reentrant: bool) -> None:
    model, x = block(recipe), torch.randn(35, 32)
    expected = step(model, x)

    def call(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(model, x, use_reentrant=use_reentrant)
        return y

    assert_all_same(step(model, x, call), expected)


def test_checkpointing_under_autocast_gives_the_same_bits() -> None:
    model, x = block(), torch.randn(35, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model, x)
        got = step(model, x, lambda x: checkpoint(model, x, use_reentrant=False))
    assert_all_same(got, expected)


def test_backward_twice_over_one_graph_doubles_the_gradients() -> None:
    x, w, _, g = problem(35, 48, 64)
    leaf = w.clone().requires_grad_()
    y = float8.linear(x, leaf)
    y.backward(g, retain_graph=True)
    assert leaf.grad is not None
    once = leaf.grad.clone()
    y.backward(g)
    assert_same_bytes(leaf.grad, once * 2)


def test_saved_tensors_may_live_elsewhere_until_backward() -> None:
    model, x = block(float8.MXFP8), torch.randn(35, 32)
    expected = step(model, x)
    with torch.autograd.graph.save_on_cpu():
        assert_all_same(step(model, x), expected)


def test_checkpointed_layers_keep_their_input_only() -> None:
    model, x = block(), torch.randn(35, 32, requires_grad=True)
    with saved_bytes() as total:
        checkpoint(model, x, use_reentrant=False)
    assert total() <= x.nbytes


class Products(TorchDispatchMode):
    """Counts FP8 products."""

    count = 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += op is torch.ops.float8.scaled_mm.default
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep", [False, True])
def test_selective_checkpointing_sees_the_ops_and_can_keep_their_results(keep: bool) -> None:
    model, x = block(), torch.randn(35, 32)
    expected = step(model, x)
    seen: list[str] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_ours = op.namespace == "float8"
        if is_ours and not ctx.is_recompute:
            seen.append(str(op))
        save = keep and is_ours
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def call(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(
            model,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        return y

    with Products() as products:
        assert_all_same(step(model, x, call), expected)
    # Per layer: x as forward and as wgrad want it, w, the product.
    ops = "quantize_dual", "quantize_and_measure", "scaled_mm"
    names = [f"float8.{name}.default" for name in ops]
    assert seen == names * 2
    # Two layers of three products, and those of forward again where nothing is kept.
    assert products.count == (6 if keep else 8)


@NAMED
def test_micro_batches_one_forward_ahead_of_their_backwards(recipe: Recipe) -> None:
    model = block(recipe)
    batches = [torch.randn(n, 32) for n in (16, 7, 33)]
    expected: list[Tensor] = [torch.zeros_like(p) for p in model.parameters()]
    for x in batches:
        model.zero_grad()
        model(x).square().sum().backward()
        expected = [e + p.grad for e, p in zip(expected, model.parameters(), strict=True)]  # type: ignore[operator]
    model.zero_grad()
    losses = [model(batches[0]).square().sum()]
    for x in batches[1:]:
        losses.append(model(x).square().sum())
        losses[-2].backward()
    losses[-1].backward()
    assert_all_same([p.grad for p in model.parameters()], expected)  # type: ignore[misc]


def test_a_layer_that_is_used_twice_sums_its_gradients() -> None:
    layer, x = Float8Linear(32, 32), torch.randn(8, 32)
    y = layer(layer(x).relu())
    y.square().sum().backward()
    assert layer.weight.grad is not None
    first, second = copy.deepcopy(layer), copy.deepcopy(layer)
    first.zero_grad()
    second.zero_grad()
    second(first(x).relu()).square().sum().backward()
    assert first.weight.grad is not None
    assert second.weight.grad is not None
    assert_same_bytes(layer.weight.grad, second.weight.grad + first.weight.grad)


def test_hooks_see_tensors_of_high_precision() -> None:
    layer, x = (
        Float8Linear(32, 16, dtype=torch.bfloat16),
        torch.randn(2, 5, 32, dtype=torch.bfloat16),
    )
    seen: dict[str, list[Any]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            tensors = torch.utils._pytree.tree_leaves(args)
            seen[name] = [
                (type(t), tuple(t.shape), t.dtype) for t in tensors if isinstance(t, Tensor)
            ]

        return hook

    layer.register_forward_pre_hook(note("forward pre"))
    layer.register_forward_hook(note("forward"))
    layer.register_full_backward_pre_hook(note("backward pre"))
    layer.register_full_backward_hook(note("backward"))
    layer.weight.register_hook(note("weight"))
    layer.weight.register_post_accumulate_grad_hook(note("accumulated"))
    x.requires_grad_()
    y = layer(x)
    y.register_hook(note("y"))
    y.square().sum().backward()
    bf16 = torch.bfloat16
    t_x, t_y, t_w = ((Tensor, shape, bf16) for shape in ((2, 5, 32), (2, 5, 16), (16, 32)))
    assert seen == {
        "forward pre": [t_x],
        "forward": [t_x, t_y],
        "backward pre": [t_y],
        "backward": [t_x, t_y],
        "weight": [t_w],
        "accumulated": [(nn.Parameter, (16, 32), bf16)],
        "y": [t_y],
    }


@EVERY
def test_cached_weights_give_the_same_bits(recipe: Recipe) -> None:
    layer, x = Float8Linear(40, 24, recipe=recipe), torch.randn(33, 40)
    expected = step(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        low = step(layer, x)
    layer.cached = CachedWeight.of(layer.weight, recipe)
    assert (layer.cached.w_NK is None, layer.cached.w_KN is None) == (
        recipe.forward is None,
        recipe.dgrad is None,
    )
    assert_all_same(step(layer, x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_all_same(step(layer, x), low)
    layer.cached = None
    assert_all_same(step(layer, x), expected)


def test_a_weight_that_is_stored_in_fp8() -> None:
    x, w, bias, _ = problem(35, 48, 64)
    frozen = float8.quantize(w, (FULL, FULL))
    leaf = x.clone().requires_grad_()
    y = float8.linear(leaf, frozen, bias)
    assert_same_bytes(y, F.linear(x, frozen, bias))
    y.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().sum() > 0


def test_an_fp8_weights_product_is_rounded_once_with_its_bias() -> None:
    """By linear, addmm and the layers, with x in FP8 or cast to match; the other sums of addmm are
    of a product that is rounded."""
    x, w, bias, _ = problem(35, 48, 64, torch.bfloat16)
    w8, x8 = float8.quantize(w, (FULL, FULL)), float8.quantize(x, (FULL, FULL))
    exact = x8.to(torch.float32).dequantize() @ w8.to(torch.float32).dequantize().t()
    expected = (exact + bias.float()).bfloat16()
    assert not torch.equal(expected, exact.bfloat16() + bias)
    for left in (x, x8):
        calls: list[Callable[[], Tensor]] = [
            lambda left=left: F.linear(left, w8, bias),  # type: ignore[misc]
            lambda left=left: torch.addmm(bias, left, w8.t()),  # type: ignore[misc]
            lambda left=left: float8.linear(left, w8, bias),  # type: ignore[misc]
        ]
        for call in calls:
            assert_same_bytes(call(), expected)
    half = torch.addmm(bias, x8, w8.t(), alpha=0.5)
    assert_same_bytes(half, ((x8 @ w8.t()) * 0.5 + bias))
    column = torch.randn(35, 1).bfloat16()
    assert_same_bytes(torch.addmm(column, x8, w8.t()), (x8 @ w8.t()) + column)
    bias8 = float8.quantize(bias, (FULL,))
    want = (exact + bias8.dequantize().float()).bfloat16()
    assert_same_bytes(torch.addmm(bias8, x8, w8.t()), want)
    rows = x8.dequantize(), w8.dequantize().t()
    assert_same_bytes(torch.addmm(bias8, *rows), rows[0] @ rows[1] + bias8.dequantize())
    # Where the contraction lies in no block, both run in high precision.
    columns = float8.quantize(w, (FULL, 1))
    with pytest.warns(UserWarning, match="runs in torch.bfloat16"):
        y = F.linear(x, columns, bias)
    assert_same_bytes(y, x @ columns.dequantize().t() + bias)


# ---- numbers that are not ----------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8"])
def test_a_bad_token_stays_in_its_row(name: str, bad: float, device: str) -> None:
    recipe = RECIPES[name]
    x, w, bias, g = problem(35, 48, 64, torch.bfloat16, device)
    clean = run(x, w, bias, g, fp8(recipe))
    worse_x, worse_g = x.clone(), g.clone()
    worse_x[3, 5] = bad
    worse_g[4, 6] = bad
    y, _, gw, _ = run(worse_x, w, bias, g, fp8(recipe))
    others = torch.arange(35, device=device) != 3
    assert y[3].isnan().all()
    assert_same_bytes(y[others], clean[0][others])
    assert not gw.isfinite().all()  # the token is part of every sum over tokens: it surfaces
    if name == "rowwise":
        assert gw[:, 5].isnan().all()
        others = torch.arange(64, device=device) != 5
        assert_same_bytes(gw[:, others], clean[2][:, others])
    _, gx, gw, _ = run(x, w, bias, worse_g, fp8(recipe))
    others = torch.arange(35, device=device) != 4
    assert gx[4].isnan().all()
    assert_same_bytes(gx[others], clean[1][others])
    assert gw[6].isnan().all()


def test_a_bad_number_reaches_everything_that_shares_its_scale() -> None:
    x, w, _, g = problem(35, 48, 64)
    x[3, 5] = float("nan")
    for t in run(x, w, None, g, fp8(TENSORWISE))[:3:2]:
        assert t is not None
        assert t.isnan().all()
    w[7, 8] = float("inf")
    y = float8.linear(problem(35, 48, 64)[0], w, recipe=ROWWISE)
    assert y[:, 7].isnan().all()
    assert y.isnan().sum() == 35


@NAMED
def test_zeros_and_tiny_values(recipe: Recipe) -> None:
    for scale in (0.0, 1e-44, 1e-38, 1e-30):
        x, w, _, g = (t * scale for t in problem(20, 24, 40))
        for t in run(x, w, None, g, fp8(recipe))[:3]:
            assert t is not None
            assert t.isfinite().all()
    x, w, _, g = problem(20, 24, 40)
    x[3], w[:, 4] = 0, 0  # a padding token, a dead input
    y, gx, _, _ = run(x, w, None, g, fp8(recipe))
    assert (y[3] == 0).all()
    assert (gx[:, 4] == 0).all()


# ---- devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [*RECIPES.values(), CUSTOM[8]], ids=lambda r: r.name)
def test_fnuz_in_forward_and_in_a_backward_elsewhere(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formats are decided in forward: backward runs later, and on another thread, in the same."""
    x, w, bias, g = problem(35, 48, 64)
    with assume_device("gfx942"):
        expected = baseline(recipe, x, w, bias, g)
        whole = run(x, w, bias, g, fp8(recipe))
    plain = run(x, w, bias, g, fp8(recipe))
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    with assume_device("gfx942"):
        y = float8.linear(*leaves, recipe=recipe)
    thread = threading.Thread(target=y.backward, args=(g,))
    thread.start()
    thread.join()
    exact = truth(x, w, bias, g)
    got = (y.detach(), *(leaf.grad for leaf in leaves))
    for i, (t, e, s) in enumerate(zip(got, exact, expected, strict=True)):
        assert t is not None
        assert e is not None
        assert s is not None
        assert_no_worse_than(t, e, s, 1.5)
        assert_same_bytes(t, whole[i])  # type: ignore[arg-type]
    gemms = (recipe.forward, recipe.dgrad, recipe.wgrad)
    if recipe is not float8.MXFP8:  # whose power-of-two scales give both flavours the same values
        for t, fn, gemm in zip(got[:3], plain[:3], gemms, strict=True):
            assert torch.equal(t, fn) == (gemm is None)  # type: ignore[arg-type]


def test_fnuz_bytes_are_what_is_saved() -> None:
    x, w, _, _ = problem(35, 48, 64)
    with assume_device("gfx942"):
        kept = saved(lambda: float8.linear(x, w.requires_grad_(), recipe=TENSORWISE))
    assert torch.float8_e4m3fnuz in {t.dtype for t in kept}


@pytest.mark.parametrize("device", DEVICES)
@NAMED
def test_the_same_bits_again(recipe: Recipe, device: str) -> None:
    model = nn.Sequential(
        Float8Linear(64, 129, device=device, recipe=recipe),
        nn.GELU(),
        Float8Linear(129, 48, device=device, recipe=recipe),
    )
    x = torch.randn(35, 64, device=device)
    with deterministic():  # and nothing reads memory that nobody wrote
        first = step(model, x)
        assert all(t.isfinite().all() for t in first)
    assert_all_same(step(model, x), first)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, "eval"])
@NAMED
def test_inference_gives_trainings_numbers(recipe: Recipe, mode: Any, device: str) -> None:
    layer = Float8Linear(64, 48, device=device, recipe=recipe)
    for x in (torch.randn(35, 64, device=device), torch.randn(2, 9, 64, device=device)):
        expected = layer(x).detach()
        if mode == "eval":
            assert_same_bytes(layer.eval()(x), expected)
            layer.train()
        else:
            with mode():
                assert_same_bytes(layer(x), expected)


def test_on_the_meta_device() -> None:
    layer = Float8Linear(64, 48, device="meta")
    x = torch.empty(2, 5, 64, device="meta", requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (2, 5, 48)
    assert x.grad is not None
    assert x.grad.shape == x.shape


# ---- the module --------------------------------------------------------------------------------


def test_last_run_names_what_ran() -> None:
    layer = Float8Linear(32, 16, recipe=ROWWISE_WGRAD_HP)
    assert layer.last_run is None
    layer(torch.randn(4, 32))
    assert layer.last_run == ("torch", "torch", "high precision")


def test_the_module_is_a_linear_with_plain_parameters() -> None:
    layer = Float8Linear(32, 16, recipe=float8.MXFP8)
    assert isinstance(layer, nn.Linear)
    assert repr(layer) == "Float8Linear(in_features=32, out_features=16, bias=True, recipe=mxfp8)"
    assert [type(p) for p in layer.parameters()] == [nn.Parameter] * 2
    plain = nn.Linear(32, 16)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 32)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.recipe == layer.recipe
        assert_same_bytes(other(x), layer(x))
    converted = copy.deepcopy(plain)
    converted.__class__ = Float8Linear
    converted.recipe, converted.last_run = float8.MXFP8, None
    assert_same_bytes(converted(x), layer(x))


def test_a_recipe_can_change_between_steps() -> None:
    layer, x = Float8Linear(32, 16), torch.randn(8, 32)
    outputs = {}
    for recipe in (*RECIPES.values(), *RECIPES.values()):
        layer.recipe = recipe
        y = step(layer, x)
        if recipe.name in outputs:
            assert_all_same(y, outputs[recipe.name])
        outputs[recipe.name] = y
    off = Recipe("off", None, None, None)
    layer.recipe = off
    plain = nn.Linear(32, 16)
    plain.load_state_dict(layer.state_dict())
    for a, b in zip(step(layer, x), step(plain, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture(autouse=True)
def _cublas_may_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, torch refuses cuBLAS under deterministic algorithms."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _no_assumed_device() -> Iterator[None]:
    yield
    assert float8.devices.assumed_device() is None
