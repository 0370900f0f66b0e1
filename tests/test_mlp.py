"""The SwiGLU layer: the same bits as its parts, what it keeps for backward, the module around it.

Letters: M tokens, D model width, F hidden width; z the layer's input after its norm, if there is
one. What convert makes of MLPs is in test_convert.py, torch.compile in test_compile.py.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from recorders import Ops
from test_moe import Live
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import float8
from float8 import RECIPES, ROWWISE, Float8Linear, Recipe, SwiGLU, assume_device, swiglu_mlp
from float8.mlp import rms_norm_backward
from float8.testing import (
    assert_same_bytes,
    deterministic,
    needs,
    relative_error,
    saved_bytes,
    sqnr,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import gpt

DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAMED = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
NORM = pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
SAVE = dataclasses.replace(ROWWISE, name="save", weight_for_dgrad="save")
ODD = Recipe("odd blocks", *[float8.Gemm(*[float8.Cast("e5m2", (3, 20), "e8m0_even")] * 2)] * 3)
FP8 = [r for r in (*RECIPES.values(), SAVE, ODD) if r.wgrad is not None]  # in all products
EPS = 1e-5

Leaves = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]  # x, norm, gate, up, down
Layer = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], Tensor]


def problem(
    m: int, d: int, f: int, norm: bool, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> tuple[Leaves, Tensor]:
    """The layer's tensors, columns and rows of different magnitudes; a gradient of its output."""
    x = torch.randn(m, d) * torch.exp2(torch.randint(-2, 2, (d,)))
    gate, up = (torch.randn(f, d) / max(d, 1) ** 0.5 for _ in range(2))
    down = torch.randn(d, f) * torch.exp2(torch.randint(-4, 0, (d, 1)))
    g = torch.randn(m, d) * torch.exp2(torch.randint(-4, 1, (m, 1)))
    x, gate, up, down, g = (t.to(device, dtype) for t in (x, gate, up, down, g))
    weight = (torch.rand(d) + 0.5).to(device, dtype) if norm else None
    return (x, weight, gate, up, down), g


def run(
    layer: Layer, leaves: Leaves, g: Tensor, wanted: Sequence[int] = (0, 1, 2, 3, 4)
) -> list[Tensor]:
    """Output and the gradients of the leaves that are wanted."""
    copies = [None if t is None else t.detach().clone() for t in leaves]
    chosen = [t.requires_grad_() for i in wanted if (t := copies[i]) is not None]
    y = layer(*copies)  # type: ignore[arg-type]
    assert y.requires_grad == bool(chosen)
    if chosen:
        y.backward(g)
    grads = [t.grad for t in chosen]
    assert all(t is not None for t in grads)
    return [y.detach(), *grads]  # type: ignore[list-item]


def fused(recipe: Recipe = ROWWISE) -> Layer:
    def layer(x: Tensor, norm: Tensor | None, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        eps = None if norm is None else EPS
        return swiglu_mlp(x, gate, up, down, recipe=recipe, norm_weight=norm, eps=eps)

    return layer


class Activation(torch.autograd.Function):
    """silu(gate) * up in float32, and its gradients, each rounded once."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        g32, a, u = g.float(), gate.float(), up.float()
        s = a.sigmoid()
        return (g32 * u * s * (1 + a * (1 - s))).to(gate.dtype), (g32 * a * s).to(gate.dtype)


class Norm(torch.autograd.Function):
    """RMSNorm in float32, rounded once; its gradients by the layer's own formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rstd = torch.rsqrt(x.float().square().mean(1) + EPS)
        ctx.save_for_backward(x, rstd, weight)
        return (x.float() * rstd[:, None] * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        return rms_norm_backward(g, *ctx.saved_tensors)


def parts(recipe: Recipe) -> Layer:
    """The layer put together of ``float8.linear`` and elementwise functions."""

    def layer(x: Tensor, norm: Tensor | None, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        z = x if norm is None else Norm.apply(x, norm)
        h = Activation.apply(*(float8.linear(z, w, recipe=recipe) for w in (gate, up)))
        return float8.linear(h, down, recipe=recipe)

    return layer


def norm_first(recipe: Recipe, dtype: torch.dtype) -> Layer:
    """``parts`` on torch's norm, whose result is rounded to ``dtype``."""

    def layer(x: Tensor, norm: Tensor | None, *weights: Tensor) -> Tensor:
        z = x if norm is None else F.rms_norm(x, x.shape[-1:], norm, EPS)
        return parts(recipe)(z.to(dtype), None, *weights)

    return layer


def torchs(recipe: Recipe | None) -> Layer:
    """The same with torch's own gradients; without FP8 if there is no recipe."""
    linear = F.linear if recipe is None else lambda x, w: float8.linear(x, w, recipe=recipe)

    def layer(x: Tensor, norm: Tensor | None, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        z = x if norm is None else F.rms_norm(x, x.shape[-1:], norm, EPS)
        a, b = linear(z, gate), linear(z, up)
        wide = a.dtype if a.dtype == torch.float64 else torch.float32
        return linear((F.silu(a.to(wide)) * b.to(wide)).to(a.dtype), down)

    return layer


def assert_all_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        assert_same_bytes(left, right)


# ---- values ------------------------------------------------------------------------------------

SIZES = [(33, 64, 96), (7, 130, 33), (1, 17, 15), (40, 16, 1), (0, 16, 32), (128, 128, 256)]


@NORM
@pytest.mark.parametrize("recipe", FP8, ids=lambda r: r.name)
def test_the_same_bits_as_its_parts(recipe: Recipe, norm: bool) -> None:
    for dtype in DTYPES:
        for m, d, f in SIZES:
            leaves, g = problem(m, d, f, norm, dtype)
            assert_all_same(run(fused(recipe), leaves, g), run(parts(recipe), leaves, g))


@pytest.mark.parametrize("device", DEVICES)
@NORM
@NAMED
def test_torchs_own_gradients(recipe: Recipe, norm: bool, device: str) -> None:
    """Where a value lies between two FP8 numbers, the last bit of float32 decides."""
    for dtype in (torch.float32, torch.bfloat16):
        leaves, g = problem(33, 64, 96, norm, dtype, device)
        got, expected = run(fused(recipe), leaves, g), run(torchs(recipe), leaves, g)
        for t, e in zip(got, expected, strict=True):
            assert t.dtype == dtype
            assert relative_error(t, e) < (1e-3 if device == "cpu" else 2e-2)


@pytest.mark.parametrize("device", DEVICES)
@NORM
@NAMED
def test_near_the_exact_layer(recipe: Recipe, norm: bool, device: str) -> None:
    leaves, g = problem(300, 136, 264, norm, torch.bfloat16, device)
    got = run(fused(recipe), leaves, g)
    exact = [None if t is None else t.double() for t in leaves]
    expected = run(torchs(None), exact, g.double())  # type: ignore[arg-type]
    for t, e in zip(got, expected, strict=True):
        assert sqnr(t, e) > 17  # e5m2 gradients through two products; e4m3 alone gives 22


@pytest.mark.parametrize("device", DEVICES)
@NORM
@NAMED
def test_every_size(recipe: Recipe, norm: bool, device: str) -> None:
    sizes = (0, 1, 2, 15, 16, 17, 33)
    for i, (m, d) in enumerate(product(sizes, sizes[1:])):
        leaves, g = problem(m, d, sizes[(i + m) % 7], norm, DTYPES[i % 3], device)
        got, expected = run(fused(recipe), leaves, g), run(torchs(recipe), leaves, g)
        for t, e in zip(got, expected, strict=True):
            assert t.isfinite().all()
            assert t.shape == e.shape
            # The only number of a tensor may be cast to the next FP8 number, of e5m2 as well.
            assert relative_error(t, e) < (5e-2 if device == "cpu" else 0.3)


def test_a_norm_without_a_weight_and_without_an_eps() -> None:
    (x, norm, gate, up, down), _ = problem(9, 32, 48, True, torch.float32)
    assert norm is not None
    for weight, eps in ((None, 1e-3), (norm, None)):
        used = torch.finfo(torch.float32).eps if eps is None else eps
        z = F.rms_norm(x, (32,), weight, used)
        y = swiglu_mlp(x, gate, up, down, norm_weight=weight, eps=eps)
        assert relative_error(y, swiglu_mlp(z, gate, up, down)) < 1e-3
    assert not torch.equal(swiglu_mlp(x, gate, up, down), swiglu_mlp(x, gate, up, down, eps=1e-3))


@NORM
@pytest.mark.parametrize("lead", [(), (4,), (2, 3), (2, 0), (0,), (1, 1, 1)])
def test_leading_dimensions_fold(lead: tuple[int, ...], norm: bool) -> None:
    (_, weight, gate, up, down), _ = problem(1, 64, 48, norm)
    x, g = (torch.randn(*lead, 64, dtype=torch.bfloat16) for _ in range(2))
    got = run(fused(), (x, weight, gate, up, down), g)
    flat = run(fused(), (x.reshape(-1, 64), weight, gate, up, down), g.reshape(-1, 64))
    assert got[0].shape == got[1].shape == x.shape
    assert_all_same([t.reshape(f.shape) for t, f in zip(got, flat, strict=True)], flat)


@NORM
def test_strides_do_not_change_a_bit(norm: bool) -> None:
    leaves, g = problem(35, 64, 48, norm)
    expected = run(fused(), leaves, g)
    for relaid in (
        lambda t: t.t().contiguous().t(),
        lambda t: t.repeat_interleave(2, -1)[..., ::2],
        lambda t: torch.cat([t, t * 1e9], -1)[..., : t.shape[-1]],
    ):
        views = [None if t is None else relaid(t).detach().requires_grad_() for t in leaves]
        fused()(*views).backward(relaid(g))  # type: ignore[arg-type]
        assert_all_same([t.grad for t in views if t is not None], expected[1:])


def test_expanded_gradients() -> None:
    leaves, _ = problem(35, 64, 48, False)
    x = leaves[0].clone().requires_grad_()
    fused()(x, *leaves[1:]).sum().backward()
    assert x.grad is not None
    assert_same_bytes(x.grad, run(fused(), leaves, torch.ones_like(x), (0,))[1])


@NORM
@pytest.mark.parametrize("dtype", DTYPES[:2])
@NAMED
def test_autocast_with_float32_weights(recipe: Recipe, dtype: torch.dtype, norm: bool) -> None:
    """The weights are quantised from their own precision; the norm sees x as it is."""
    (x, weight, *weights), g = problem(20, 64, 48, norm, torch.float32)
    leaves = (x, weight, *weights)
    with torch.autocast("cpu", dtype):
        got = run(fused(recipe), leaves, g.to(dtype))
    assert got[0].dtype == dtype
    assert {t.dtype for t in got[1:]} == {torch.float32}
    with torch.autocast("cpu", dtype):
        expected = run(norm_first(recipe, dtype), leaves, g.to(dtype))
    if recipe.wgrad is not None:
        assert_all_same(got, expected)
    else:  # called one by one: the activation's gradient sees autocast's roundings
        for t, e in zip(got, expected, strict=True):
            assert sqnr(t, e) > 25
    exact = [None if t is None else t.double() for t in leaves]
    for t, e in zip(got, run(torchs(None), exact, g.double()), strict=True):  # type: ignore[arg-type]
        assert sqnr(t, e) > 17


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_stays_in_its_row(bad: float) -> None:
    leaves, g = problem(35, 64, 48, True)
    clean = run(fused(), leaves, g)
    leaves[0][3, 5] = bad
    y, gx, *rest = run(fused(), leaves, g)
    others = torch.arange(35) != 3
    assert y[3].isnan().all()
    assert gx[3].isnan().all()
    assert_same_bytes(y[others], clean[0][others])
    assert all(not t.isfinite().all() for t in rest)  # sums over all tokens


@NAMED
def test_zeros(recipe: Recipe) -> None:
    leaves, g = problem(20, 24, 40, True)
    for zeroed in (0, 2, 4):
        some = [t.clone() for t in leaves if t is not None]
        some[zeroed].zero_()
        assert all(t.isfinite().all() for t in run(fused(recipe), tuple(some), g))  # type: ignore[arg-type]


@NORM
@NAMED
def test_recipes_with_a_gemm_in_high_precision(recipe: Recipe, norm: bool) -> None:
    leaves, g = problem(33, 64, 48, norm)
    for which in ("forward", "dgrad", "wgrad"):
        some = dataclasses.replace(recipe, name="some", **{which: None})
        assert_all_same(run(fused(some), leaves, g), run(torchs(some), leaves, g))


def test_weights_that_are_not_plain() -> None:
    """A frozen FP8 tensor multiplies as it is, a Float8Weight as its plain self."""
    (x, _, gate, up, down), _ = problem(33, 128, 256, False, torch.float32)
    stored = float8.quantize(gate, (128, 128))
    y = swiglu_mlp(x, stored, up, down)
    assert_same_bytes(y, torchs(ROWWISE)(x, None, stored, up, down))
    wrapped = float8.Float8Weight(gate, float8.MXFP8)
    assert_same_bytes(swiglu_mlp(x, wrapped, up, down), swiglu_mlp(x, gate, up, down))
    x8 = float8.quantize(x, (1, 128))
    assert swiglu_mlp(x8, stored, float8.quantize(up, (128, 128)), down).shape == x.shape


# ---- what is kept for backward -----------------------------------------------------------------

M, D, F_ = 16, 64, 96


def expected_bytes(norm: bool, flags: tuple[bool, ...], save: bool) -> int:
    """Of a rowwise layer in bf16; parameters are not counted."""
    x, n, gate, up, down = flags
    total = 0
    if gate or up:
        total += M * D + 4 * D  # z transposed, and its scales
    if x or n or gate or up:
        total += 2 * 2 * M * F_  # the two products
        total += save * D * F_ + 4 * F_  # the weight's scales, or the amax to cast it with
    if down:
        total += M * F_ + 4 * F_
    if x or n:
        total += norm * (2 * M * D + 4 * M)  # x and its 1/rms
        total += 2 * (save * D * F_ + 4 * D)
    return total


@NORM
@pytest.mark.parametrize("recipe", [ROWWISE, SAVE], ids=str)
def test_only_what_a_requested_gradient_needs_is_made_and_kept(recipe: Recipe, norm: bool) -> None:
    leaves, g = problem(M, D, F_, norm)
    _, *all_grads = run(fused(recipe), leaves, g)
    grads = dict(zip([i for i in range(5) if leaves[i] is not None], all_grads, strict=True))
    for flags in product([False, True], repeat=5):
        if flags[1] and not norm:
            continue
        wanted = tuple(i for i in range(5) if flags[i])
        got = run(fused(recipe), leaves, g, wanted)
        assert_all_same(got[1:], [grads[i] for i in wanted])
        copies = [
            None if t is None else nn.Parameter(t.clone(), requires_grad=flags[i])
            for i, t in enumerate(leaves)
        ]
        copies[0] = leaves[0].clone().requires_grad_(flags[0])  # type: ignore[call-overload]
        with saved_bytes() as total:
            y = fused(recipe)(*copies)  # type: ignore[arg-type]
        assert total() == expected_bytes(norm, flags, recipe is SAVE), flags
        del y


def test_what_is_alive_at_each_product_of_backward() -> None:
    """In eager code: what ops made and something still names, without scales."""
    layer = SwiGLU(D, F_, "meta", torch.bfloat16, norm_eps=EPS)
    x = torch.empty(256, D, device="meta", dtype=torch.bfloat16, requires_grad=True)
    g = torch.empty_like(x)
    with Live(layer, "scaled_mm", D * F_) as live:
        live.held |= {t.untyped_storage()._cdata for t in (x, g)}
        layer(x).backward(g)
    text = "\n".join("; ".join(each) for each in live.at[3:])
    assert_expected_inline(
        text.replace("float8_e4m3fn", "fp8").replace("bfloat16", "bf16"),
        """\
bf16 [256, 64]; bf16 [256, 96]; bf16 [256, 96]; bf16 [64, 96]; fp8 [256, 64]; fp8 [64, 256]; fp8 [64, 256]; fp8 [96, 256]
bf16 [256, 64]; bf16 [256, 96]; bf16 [256, 96]; bf16 [256, 96]; bf16 [64, 96]; fp8 [256, 64]; fp8 [64, 256]; fp8 [96, 64]
bf16 [256, 64]; bf16 [256, 64]; bf16 [64, 96]; fp8 [2, 256, 96]; fp8 [2, 96, 256]; fp8 [64, 256]; fp8 [64, 96]
bf16 [256, 64]; bf16 [256, 64]; bf16 [256, 64]; bf16 [64, 96]; fp8 [2, 256, 96]; fp8 [2, 96, 256]; fp8 [64, 256]; fp8 [64, 96]
bf16 [256, 64]; bf16 [256, 64]; bf16 [64, 96]; bf16 [96, 64]; fp8 [2, 96, 256]; fp8 [64, 256]
bf16 [256, 64]; bf16 [256, 64]; bf16 [64, 96]; bf16 [96, 64]; bf16 [96, 64]; fp8 [2, 96, 256]; fp8 [64, 256]""",  # noqa: E501
    )


def test_each_op_runs_once_for_what_it_fuses() -> None:
    leaves, g = problem(M, D, F_, True)
    with Ops() as casts:
        run(fused(), leaves, g)
    assert casts.seen == {
        "rms_norm_quantize": 1,
        "swiglu_quantize": 1,
        "swiglu_backward_quantize": 1,
        "quantize_and_measure": 3,  # weights: forward
        "quantize": 3,  # weights: dgrad
        "quantize_dual": 1,  # the gradient of the output
        "scaled_mm": 9,
    }


@pytest.mark.parametrize("recipe", [ROWWISE, SAVE, float8.MXFP8], ids=lambda r: r.name)
def test_nothing_is_kept_without_gradients(recipe: Recipe) -> None:
    layer, x = SwiGLU(D, F_, recipe=recipe, norm_eps=EPS), torch.randn(M, D)
    expected = layer(x).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), saved_bytes() as total:
            assert_same_bytes(layer(x), expected)
        assert total() == 0


def test_a_weight_that_changed_before_backward_is_an_error() -> None:
    layer, x = SwiGLU(32, 32), torch.randn(4, 32, requires_grad=True)
    y = layer(x)
    with torch.no_grad():
        layer.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- inside autograd ---------------------------------------------------------------------------


def step(
    model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """Output and all gradients of one forward and backward."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = (call or model)(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@NAMED
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(recipe: Recipe, use_reentrant: bool) -> None:
    layer, x = SwiGLU(32, 48, recipe=recipe, norm_eps=EPS), torch.randn(35, 32)
    expected = step(layer, x)

    def call(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(layer, x, use_reentrant=use_reentrant)
        return y

    assert_all_same(step(layer, x, call), expected)
    with saved_bytes() as total:
        call(x.requires_grad_())
    assert total() <= x.nbytes


@pytest.mark.parametrize("recipe", FP8, ids=lambda r: r.name)
def test_saved_tensors_may_live_elsewhere_and_a_graph_may_run_twice(recipe: Recipe) -> None:
    layer, x = SwiGLU(32, 48, recipe=recipe, norm_eps=EPS), torch.randn(35, 32)
    expected = step(layer, x)
    with torch.autograd.graph.save_on_cpu():
        assert_all_same(step(layer, x), expected)
    leaves = [x.requires_grad_(), *layer.parameters()]
    y = layer(x).square().sum()
    for retain in (True, False):
        got = torch.autograd.grad(y, leaves, retain_graph=retain)
        assert_all_same(list(got), expected[1:])


@pytest.mark.parametrize("device", DEVICES)
@NORM
@NAMED
def test_the_same_bits_again(recipe: Recipe, norm: bool, device: str) -> None:
    eps = EPS if norm else None
    layer = SwiGLU(64, 48, device, torch.bfloat16, recipe=recipe, norm_eps=eps)
    x = torch.randn(35, 64, device=device, dtype=torch.bfloat16)
    with deterministic():  # and nothing reads memory that nobody wrote
        first = step(layer, x)
        assert all(t.isfinite().all() for t in first)
    assert_all_same(step(layer, x), first)


def test_a_second_derivative_is_refused() -> None:
    (x, _, *weights), _ = problem(4, 32, 48, False)
    x.requires_grad_()
    for loss in (torch.sum, lambda y: y.pow(2).sum()):
        with pytest.raises(NotImplementedError, match=r"float8\.swiglu_mlp is differentiable once"):
            torch.autograd.grad(loss(swiglu_mlp(x, *weights)), x, create_graph=True)


def test_functorch_is_refused() -> None:
    (x, _, *weights), _ = problem(4, 32, 48, False)
    for transform in (
        lambda: torch.func.grad(lambda x: swiglu_mlp(x, *weights).sum())(x),
        lambda: torch.func.vmap(lambda x: swiglu_mlp(x, *weights))(x),
    ):
        with pytest.raises(NotImplementedError, match=r"^float8\.swiglu_mlp was called under a f"):
            transform()


def test_what_does_not_fit_is_refused() -> None:
    (x, _, gate, up, down), _ = problem(4, 32, 48, False, torch.float32)
    norm = torch.ones(32)
    wrong: list[Callable[[], object]] = [
        lambda: swiglu_mlp(x, gate, up, down.t()),
        lambda: swiglu_mlp(x, gate, up[:40], down),
        lambda: swiglu_mlp(x, gate, up, down[:, :40]),
        lambda: swiglu_mlp(x[:, :31], gate, up, down),
        lambda: swiglu_mlp(x, gate[None], up[None], down[None]),
        lambda: swiglu_mlp(x, gate, up.bfloat16(), down),
        lambda: swiglu_mlp(x, gate, up, down.bfloat16()),
        lambda: swiglu_mlp(x, gate, up, down.to("meta")),
        lambda: swiglu_mlp(x.double(), gate.double(), up.double(), down.double()),
        lambda: swiglu_mlp(x, gate, up, down, norm_weight=norm[:31]),
        lambda: swiglu_mlp(x, gate, up, down, norm_weight=norm.double()),
        lambda: swiglu_mlp(x, gate, up, down, recipe="rowwise"),  # type: ignore[arg-type]
        lambda: SwiGLU(8, 8, recipe=None),  # type: ignore[arg-type]
    ]
    texts = []
    for call in wrong:
        with pytest.raises(ValueError) as info:
            call()
        texts.append(str(info.value))
    assert_expected_inline(
        "\n".join(texts),
        """\
weights of shapes (48, 32), (48, 32) and (48, 32) make no SwiGLU layer; needed (F, D), (F, D) and (D, F)
weights of shapes (48, 32), (40, 32) and (32, 48) make no SwiGLU layer; needed (F, D), (F, D) and (D, F)
weights of shapes (48, 32), (48, 32) and (32, 40) make no SwiGLU layer; needed (F, D), (F, D) and (D, F)
x of shape (4, 31) does not fit a weight of shape (48, 32); needed (..., K) and (N, K)
weights of shapes (1, 48, 32), (1, 48, 32) and (1, 32, 48) make no SwiGLU layer; needed (F, D), (F, D) and (D, F)
x is torch.float32 and the weight torch.bfloat16; bring both to one dtype, or run under torch.autocast
x is torch.float32 and the weight torch.bfloat16; bring both to one dtype, or run under torch.autocast
operands are on cpu and meta; move them to one device
x is torch.float64 and the weight torch.float64; an FP8 linear takes torch.bfloat16, torch.float16, torch.float32
weight is torch.float32 of shape (31,); x of shape (4, 32) needs (32,) of torch.bfloat16, torch.float16, torch.float32
weight is torch.float64 of shape (32,); x of shape (4, 32) needs (32,) of torch.bfloat16, torch.float16, torch.float32
recipe='rowwise' is no float8.Recipe; float8.RECIPES holds tensorwise, rowwise, rowwise_wgrad_hp, blockwise, mxfp8
recipe=None is no float8.Recipe; float8.RECIPES holds tensorwise, rowwise, rowwise_wgrad_hp, blockwise, mxfp8""",  # noqa: E501
    )


# ---- devices -----------------------------------------------------------------------------------


@NORM
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
def test_fnuz_in_forward_and_in_a_backward_elsewhere(name: str, norm: bool) -> None:
    """Formats are decided in forward."""
    recipe, (leaves, g) = RECIPES[name], problem(35, 64, 48, norm)
    with assume_device("gfx942"):
        expected = run(parts(recipe), leaves, g)
    copies = [None if t is None else t.clone().requires_grad_() for t in leaves]
    with assume_device("gfx942"):
        y = fused(recipe)(*copies)  # type: ignore[arg-type]
    y.backward(g)
    got = [y.detach(), *(t.grad for t in copies if t is not None)]
    assert_all_same(got, expected)  # type: ignore[arg-type]
    assert not torch.equal(y, fused(recipe)(*leaves))


def test_on_the_meta_device() -> None:
    layer = SwiGLU(64, 48, device="meta", norm_eps=EPS)
    x = torch.empty(2, 5, 64, device="meta", requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    assert y.shape == x.grad.shape == x.shape
    assert [p.grad is not None for p in layer.parameters()] == [True] * 4


# ---- the module --------------------------------------------------------------------------------


def test_the_module_is_three_linears_with_plain_parameters() -> None:
    layer = SwiGLU(32, 48, dtype=torch.bfloat16, recipe=float8.MXFP8)
    names = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    assert list(layer.state_dict()) == names
    assert {type(p) for p in layer.parameters()} == {nn.Parameter}
    assert list(SwiGLU(32, 48, norm_eps=EPS).state_dict()) == ["norm.weight", *names]
    assert (layer.recipe, layer.last_run) == (float8.MXFP8, None)
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    y = layer(x)
    weights = [p.detach() for p in layer.parameters()]
    assert_same_bytes(y, swiglu_mlp(x, *weights, recipe=float8.MXFP8))
    assert layer.last_run == layer.up_proj.last_run == ("torch",) * 3
    assert_expected_inline(
        repr(layer),
        """\
SwiGLU(
  recipe=mxfp8
  (gate_proj): Float8Linear(in_features=32, out_features=48, bias=False, recipe=mxfp8)
  (up_proj): Float8Linear(in_features=32, out_features=48, bias=False, recipe=mxfp8)
  (down_proj): Float8Linear(in_features=48, out_features=32, bias=False, recipe=mxfp8)
)""",
    )


@NORM
def test_copies_and_pickles(norm: bool) -> None:
    layer = SwiGLU(32, 48, recipe=float8.BLOCKWISE, norm_eps=EPS if norm else None)
    x = torch.randn(4, 32)
    expected = step(layer, x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer)):
        assert twin.recipe == layer.recipe
        assert_all_same(step(twin, x), expected)
    with float8.cached_weights(layer):
        twin = pickle.loads(pickle.dumps(layer))
    assert_all_same(step(twin, x), expected)
    other = SwiGLU(32, 48, recipe=float8.BLOCKWISE, norm_eps=EPS if norm else None)
    other.load_state_dict(layer.state_dict())
    assert_all_same(step(other, x), expected)


def test_functional_call() -> None:
    layer, x = SwiGLU(32, 48), torch.randn(4, 32)
    others = {name: torch.randn_like(p).requires_grad_() for name, p in layer.named_parameters()}
    y = torch.func.functional_call(layer, others, (x,))
    assert_same_bytes(y, swiglu_mlp(x, *others.values()))
    y.sum().backward()
    assert all(t.grad is not None for t in others.values())
    assert all(p.grad is None for p in layer.parameters())


class Adapter(nn.Module):
    """A low-rank adapter around a layer, whose weight it shows as its own, as PEFT's do."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.low = nn.Linear(base.in_features, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.low(x)
        return y


def test_nothing_is_skipped() -> None:
    """What was put on or in place of a layer runs; without effect it leaves the same bits."""
    layer, x = SwiGLU(32, 48, norm_eps=EPS), torch.randn(9, 32)
    expected = step(layer, x)
    seen: list[str] = []
    for name, child in layer.named_children():
        for register in (
            child.register_forward_hook,
            child.register_forward_pre_hook,
            child.register_full_backward_hook,
            child.register_full_backward_pre_hook,
        ):
            handle = register(lambda *args, name=name: seen.append(name))  # type: ignore[misc]
            got = step(layer, x)
            assert seen == [name]
            assert relative_error(got[1], expected[1]) < 1e-3
            assert_same_bytes(got[0], expected[0])
            handle.remove()
            seen.clear()
        forward = child.forward
        child.forward = lambda x, f=forward, name=name: seen.append(name) or f(x)  # type: ignore[method-assign,func-returns-value]
        assert_same_bytes(step(layer, x)[0], expected[0])
        assert seen == [name]
        del child.forward
        seen.clear()
    assert_all_same(step(layer, x), expected)

    layer.up_proj = Adapter(layer.up_proj)  # type: ignore[assignment]
    with torch.no_grad():
        assert not torch.equal(layer(x), expected[0])
        layer.up_proj.low.weight.zero_()
        assert_same_bytes(layer(x), expected[0])


def test_hooks_of_all_modules_are_called() -> None:
    layer, x = SwiGLU(32, 48), torch.randn(3, 32)
    expected, seen = layer(x), []
    hook = nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(m))
    try:
        assert_same_bytes(layer(x), expected)
    finally:
        hook.remove()
    assert seen == [layer.gate_proj, layer.up_proj, layer.down_proj, layer]


def test_why_layers_are_called_one_by_one() -> None:
    def changed(change: Callable[[SwiGLU], object]) -> str | None:
        layer = SwiGLU(32, 48, norm_eps=EPS)
        assert layer.obstacle() is None
        change(layer)
        why = layer.obstacle()
        layer(torch.randn(3, 32)).sum().backward()
        return why

    def recipes(layer: SwiGLU, *values: Recipe) -> None:
        for name, recipe in zip(layer.names, values, strict=False):
            getattr(layer, name).recipe = recipe

    hp = float8.ROWWISE_WGRAD_HP
    reasons = [
        changed(lambda layer: layer.norm.register_forward_hook(lambda *args: None)),
        changed(lambda layer: setattr(layer, "gate_proj", Adapter(layer.gate_proj))),
        changed(lambda layer: setattr(layer, "up_proj", Float8Linear(32, 48))),
        changed(lambda layer: float8.revert(layer)),
        changed(lambda layer: recipes(layer, ROWWISE, ROWWISE, float8.MXFP8)),
        changed(lambda layer: recipes(layer, hp, hp, hp)),
        changed(lambda layer: setattr(layer, "norm", nn.LayerNorm(32))),
        changed(lambda layer: nn.utils.parametrizations.weight_norm(layer.down_proj)),
    ]
    assert_expected_inline(
        "\n".join(map(str, reasons)),
        """\
norm has hooks, or a forward of its own, which would be skipped
gate_proj is no nn.Linear without bias
up_proj is no nn.Linear without bias
gate_proj is in high precision
gate_proj and down_proj have different recipes
the recipe rowwise_wgrad_hp leaves a GEMM in high precision
norm is no nn.RMSNorm of one dimension
down_proj is no nn.Linear without bias""",
    )


@NORM
@NAMED
def test_a_reverted_layer_is_plain_and_may_come_back(recipe: Recipe, norm: bool) -> None:
    layer = SwiGLU(32, 48, recipe=recipe, norm_eps=EPS if norm else None)
    x = torch.randn(9, 32)
    expected = step(layer, x)
    float8.revert(layer)
    assert layer.recipe is None
    assert {type(m) for m in layer.children()} <= {nn.Linear, nn.RMSNorm}
    weight = layer.norm.weight if norm else None
    weights = [layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight]
    torch.testing.assert_close(layer(x), torchs(None)(x, weight, *weights))
    report = float8.convert(layer, recipe)
    assert (report.fused == {"": recipe.name}) == (recipe.wgrad is not None)
    assert_all_same(step(layer, x), expected)


@NORM
@pytest.mark.parametrize("recipe", FP8, ids=lambda r: r.name)
def test_cached_weights_give_the_same_bits(recipe: Recipe, norm: bool) -> None:
    layer = SwiGLU(40, 24, recipe=recipe, norm_eps=EPS if norm else None)
    x = torch.randn(33, 40)
    expected = step(layer, x)
    with Ops() as without:
        step(layer, x)
    with float8.cached_weights(layer), Ops() as casts:
        assert_all_same(step(layer, x), expected)
    weights = 3 if recipe is SAVE else 6
    names = ("quantize_dual",) if recipe is SAVE else ("quantize", "quantize_and_measure")
    assert sum(without.seen.get(n, 0) - casts.seen.get(n, 0) for n in names) == weights
    with float8.cached_weights(layer):
        y = layer(x)
    y.square().sum().backward()  # after the block
    layer.zero_grad()
    with float8.cached_weights(layer.up_proj):  # one of three
        assert_all_same(step(layer, x), expected)


def test_cached_weights_that_changed_are_seen() -> None:
    layer, x = SwiGLU(40, 24), torch.randn(33, 40)
    for name in ("gate_proj", "up_proj", "down_proj"):
        with float8.cached_weights(layer):
            layer(x)
            with torch.no_grad():
                getattr(layer, name).weight.mul_(2)
            with pytest.raises(RuntimeError, match=r"changed inside float8\.cached_weights"):
                layer(x)


# ---- a model -----------------------------------------------------------------------------------


class RoundsOnce(gpt.MLP):
    """The example's MLP, with the arithmetic of the fused layer."""

    float8_swiglu = ("w1", "w3", "w2")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(Activation.apply(self.w1(x), self.w3(x)))
        return y


def losses(fuse: bool, recipe: Recipe, cls: type[nn.Module], dtype: torch.dtype) -> list[float]:
    """Of a tiny GPT, trained on one batch."""
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(layers=2, dim=32, heads=2, hidden=48)).to(dtype)
    for block in model.blocks:
        block.mlp.__class__ = cls
    report = float8.convert(model, recipe, fuse=fuse)
    fused = fuse and recipe.wgrad is not None
    assert set(report.fused) == ({"blocks.0.mlp", "blocks.1.mlp"} if fused else set())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(256, (2, 4, 17))
    found = []
    for _ in range(4):
        loss = model(tokens[0, :, :-1], tokens[0, :, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert all(layer.last_run for layer in float8.summary(model).layers if layer.recipe)
    return found


@pytest.mark.parametrize("recipe", [*RECIPES.values(), SAVE], ids=lambda r: r.name)
def test_a_gpt_trains_as_without_fusing(recipe: Recipe) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        pair = [losses(fuse, recipe, RoundsOnce, dtype) for fuse in (True, False)]
        assert pair[0] == pair[1]
        assert pair[0][-1] < pair[0][0]
        # The example's own MLP rounds silu's result, too.
        pair = [losses(fuse, recipe, gpt.MLP, dtype) for fuse in (True, False)]
        assert pair[0] == pytest.approx(pair[1], rel=2e-3)


@pytest.fixture(autouse=True)
def _no_assumed_device() -> Iterator[None]:
    yield
    assert float8.devices.assumed_device() is None
