"""What is refused, at the earliest call that can know, in words: what the other files leave out.

They pin the refusals of what they test; README.md beside this file lists which. Each text is pinned
once.
"""

from __future__ import annotations

import copy
import io
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.autograd import forward_ad

import float8
from float8 import (
    E4M3FNUZ,
    E8M0,
    FULL,
    MXFP8,
    ROWWISE,
    ROWWISE_WGRAD_HP,
    Cast,
    Float8Linear,
    Float8TrainingTensor,
    Float8Weight,
    Gemm,
    Recipe,
    convert,
    convert_format,
    linear,
    quantize,
)
from float8.testing import assert_same_bytes

ROWS = (1, FULL)
Call = Callable[[], Any]


def said(call: Call, *kinds: type[Exception]) -> str:
    """What the error of a call says, of one of exactly these kinds (ValueError)."""
    with pytest.raises(kinds or ValueError) as refusal:
        call()
    assert refusal.type in (kinds or (ValueError,))
    return str(refusal.value)


def pinned(*messages: str) -> str:
    return "\n".join(
        textwrap.fill(m, 96, subsequent_indent="    ", break_on_hyphens=False) for m in messages
    )


def of_op(text: str) -> str:
    """The same advice ends every refusal of the table, which test_dispatch.py pins."""
    return text.split(". Call .dequantize()")[0].split(". It would change")[0]


# --- quantize


def test_quantize_takes_strided_tensors_of_high_precision_alone() -> None:
    x = torch.randn(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of layouts in beta
        others = {
            "complex": x.to(torch.complex64),
            "integers": x.int(),
            "a mask": x > 0,
            "FP8 without its scale": x.to(E4M3FNUZ.dtype),
            "rows of CSR": x.to_sparse_csr(),
            "rows of different lengths": torch.nested.nested_tensor(
                [x, x[:2]], layout=torch.jagged
            ),
        }
    texts = {n: said(lambda t=t: quantize(t, (1,) * t.ndim)) for n, t in others.items()}
    assert_expected_inline(
        "\n".join(f"{name}: {text.split(';')[0]}" for name, text in texts.items()),
        """\
complex: x is torch.complex64 with layout torch.strided
integers: x is torch.int32 with layout torch.strided
a mask: x is torch.bool with layout torch.strided
FP8 without its scale: x is torch.float8_e4m3fnuz with layout torch.strided
rows of CSR: x is torch.float32 with layout torch.sparse_csr
rows of different lengths: x is torch.float32 with layout torch.jagged""",
    )


def test_arguments_of_quantize() -> None:
    x = torch.randn(4, 8)
    assert_expected_inline(
        pinned(
            said(lambda: quantize(x, ROWS, torch.float8_e4m3fn)),  # type: ignore[arg-type]
            said(lambda: quantize(x, ROWS, None)),  # type: ignore[arg-type]
            said(lambda: quantize(x, ROWS, scale=torch.ones(4, 1, requires_grad=True))),
            said(lambda: convert_format(quantize(x, ROWS), E8M0)),
        ),
        """\
No FP8 format of kind torch.float8_e4m3fn; tensors are 'e4m3' or 'e5m2'.
No FP8 format of kind None; tensors are 'e4m3' or 'e5m2'.
scale requires a gradient, which none would reach; pass scale.detach()
convert_format changes the flavour, not the kind: e4m3fn cannot become e8m0; dequantize() and
    quantize() instead""",
    )


# --- ops of the tensor


def test_an_fp8_tensor_does_not_become_another_kind_of_number() -> None:
    x8 = quantize(torch.randn(4, 8), ROWS)
    conversions: list[Call] = [
        lambda: x8.to(torch.float8_e4m3fn),
        lambda: x8.to(torch.complex64),
        lambda: x8.int(),
        lambda: x8.bool(),
        lambda: x8.view(torch.uint8),
        lambda: x8.view(E4M3FNUZ.dtype),
        lambda: x8.to_sparse(),
    ]
    assert_expected_inline(
        pinned(*(of_op(said(c, NotImplementedError)) for c in conversions)),
        """\
aten._to_copy.default on a Float8TrainingTensor of shape (4, 8) and block (1, FULL): it cannot
    become torch.float8_e4m3fn, only torch.bfloat16, torch.float16, torch.float32
aten._to_copy.default on a Float8TrainingTensor of shape (4, 8) and block (1, FULL): it cannot
    become torch.complex64, only torch.bfloat16, torch.float16, torch.float32
aten._to_copy.default on a Float8TrainingTensor of shape (4, 8) and block (1, FULL): it cannot
    become torch.int32, only torch.bfloat16, torch.float16, torch.float32
aten._to_copy.default on a Float8TrainingTensor of shape (4, 8) and block (1, FULL): it cannot
    become torch.bool, only torch.bfloat16, torch.float16, torch.float32
aten.view.dtype has no handler for a Float8TrainingTensor (shape (4, 8), e4m3fn, block (1,
    FULL))
aten.view.dtype has no handler for a Float8TrainingTensor (shape (4, 8), e4m3fn, block (1,
    FULL))
aten._to_sparse.default has no handler for a Float8TrainingTensor (shape (4, 8), e4m3fn, block
    (1, FULL))""",
    )


def test_layers_that_are_no_products_take_plain_tensors() -> None:
    x8, index = quantize(torch.randn(4, 8), ROWS), torch.tensor([0, 1])
    layers: list[Call] = [
        lambda: F.layer_norm(x8, (8,)),
        lambda: F.embedding(index, x8),
        lambda: torch.fft.fft(x8),
        lambda: F.one_hot(index, 4).float().scatter_add(0, index[None].t(), x8),
        lambda: torch.linalg.svd(x8),
    ]
    assert_expected_inline(
        pinned(*(of_op(said(c, NotImplementedError)) for c in layers)),
        """\
aten.native_layer_norm.default has no handler for a Float8TrainingTensor (shape (4, 8), e4m3fn,
    block (1, FULL))
aten.embedding.default has no handler for a Float8TrainingTensor (shape (4, 8), e4m3fn, block
    (1, FULL))
aten._fft_r2c.default has no handler for a Float8TrainingTensor (shape (4, 8), e4m3fn, block (1,
    FULL))
aten.scatter_add.default has no handler for a Float8TrainingTensor (shape (4, 8), e4m3fn, block
    (1, FULL))
aten._linalg_svd.default has no handler for a Float8TrainingTensor (shape (4, 8), e4m3fn, block
    (1, FULL))""",
    )


def test_an_fp8_tensor_is_not_initialised_or_exchanged_in_place() -> None:
    weight = nn.Parameter(quantize(torch.randn(4, 8), ROWS), requires_grad=False)
    before = weight.dequantize()
    changes: list[Call] = [
        lambda: weight.zero_(),
        lambda: nn.init.kaiming_uniform_(weight),
        lambda: nn.init.eye_(weight),
        lambda: nn.utils.vector_to_parameters(torch.zeros(32), [weight]),
    ]
    assert_expected_inline(
        pinned(*(of_op(said(c, NotImplementedError)) for c in changes)),
        """\
aten.zero_.default has no handler for a Float8TrainingTensor (shape (4, 8), e4m3fn, block (1,
    FULL))
aten.uniform_.default has no handler for a Float8TrainingTensor (shape (4, 8), e4m3fn, block (1,
    FULL))
aten.eye.m_out has no handler for a Float8TrainingTensor (shape (4, 8), e4m3fn, block (1, FULL))
the .data of a Float8TrainingTensor cannot be replaced; write into it with .copy_(), or assign a
    new parameter to the module""",
    )
    with pytest.raises(NotImplementedError):
        weight.data = torch.zeros(4, 8)
    assert_same_bytes(weight.dequantize(), before)
    assert_same_bytes(weight.data.dequantize(), before)


def test_numpy_and_numbers_come_from_plain_tensors() -> None:
    """torch's own words, which name the subclass."""
    x8 = quantize(torch.randn(4, 8), ROWS)
    for call in (x8.numpy, x8.tolist):
        assert "not supported for tensor subclasses" in said(call, RuntimeError)
    assert "cannot be converted to Scalar" in said(x8.item, RuntimeError)


# --- linear


def test_operands_of_linear() -> None:
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    calls: list[Call] = [
        lambda: linear(x.to(torch.complex64), w.to(torch.complex64)),
        lambda: linear(x.to_sparse(), w),
        lambda: linear(x, w.to_sparse()),
        lambda: linear(x, w.to("meta")),
        lambda: linear(x, w, torch.zeros(5)),
        lambda: linear(x, w, torch.zeros(4, 6)),  # would broadcast
        lambda: linear(x, w, torch.zeros(2, 4, 6)),  # would make y larger
        lambda: linear(x, w, torch.zeros(1)),
        lambda: linear(x, w, torch.zeros(6).int()),
    ]
    assert_expected_inline(
        pinned(*(said(c) for c in calls)),
        """\
x is torch.complex64 and the weight torch.complex64; an FP8 linear takes torch.bfloat16,
    torch.float16, torch.float32
x is torch.sparse_coo and the weight torch.strided; an FP8 linear takes strided tensors
x is torch.strided and the weight torch.sparse_coo; an FP8 linear takes strided tensors
operands are on cpu and meta; move them to one device
bias is torch.float32 of shape (5,); a weight of shape (6, 8) takes a floating point one of
    shape (6,)
bias is torch.float32 of shape (4, 6); a weight of shape (6, 8) takes a floating point one of
    shape (6,)
bias is torch.float32 of shape (2, 4, 6); a weight of shape (6, 8) takes a floating point one of
    shape (6,)
bias is torch.float32 of shape (1,); a weight of shape (6, 8) takes a floating point one of
    shape (6,)
bias is torch.int32 of shape (6,); a weight of shape (6, 8) takes a floating point one of shape
    (6,)""",
    )
    assert linear(x, w, torch.zeros(6, dtype=torch.float64)).dtype == torch.float32


# --- recipes


def test_a_recipes_name_is_no_recipe() -> None:
    x = torch.randn(4, 8)
    wrong: list[Call] = [
        lambda: linear(x, x, recipe="rowwise"),  # type: ignore[arg-type]
        lambda: linear(x, x, recipe=None),  # type: ignore[arg-type]
        lambda: Float8Linear(8, 8, recipe="rowwise"),  # type: ignore[arg-type]
        lambda: Float8Weight(x, "rowwise"),  # type: ignore[arg-type]
        lambda: Float8Weight(x, ROWWISE.forward),  # type: ignore[arg-type]
    ]
    texts = {said(call).partition(" is ")[2] for call in wrong}
    assert_expected_inline(
        pinned(*texts),
        """no float8.Recipe; float8.RECIPES holds tensorwise, rowwise, rowwise_wgrad_hp, blockwise, mxfp8""",  # noqa: E501
    )


def test_parts_of_recipes() -> None:
    cast = Cast("e4m3", ROWS)
    gemm = Gemm(cast, cast)
    wrong: list[Call] = [
        lambda: Cast("e8m0", ROWS),  # type: ignore[arg-type]
        lambda: Cast("e4m3", (True, FULL)),
        lambda: Gemm("e4m3", cast),  # type: ignore[arg-type]
        lambda: Recipe("mine", cast, gemm, gemm),  # type: ignore[arg-type]
        lambda: Recipe("mine", gemm, True, gemm),  # type: ignore[arg-type]
    ]
    assert_expected_inline(
        pinned(*(said(c) for c in wrong)),
        """\
kind='e8m0' must be 'e4m3' or 'e5m2'
block=(True, -1) must be a tuple of two ints, (rows, contraction), such as (1, 128)
operands 'e4m3' and Cast(kind='e4m3', block=(1, -1), scale_mode='fp32') must each be a
    float8.Cast
forward=Cast(kind='e4m3', block=(1, -1), scale_mode='fp32') must be a float8.Gemm, or None
dgrad=True must be a float8.Gemm, or None""",
    )


# --- convert


def test_models_that_hold_nothing_to_convert() -> None:
    """Nothing changes, and each layer has its reason."""
    with torch.inference_mode():
        inference = nn.Linear(8, 8)
    models = {
        "float64": nn.Linear(8, 8).double(),
        "complex": nn.Linear(8, 8, dtype=torch.complex64),
        "inference": inference,
    }
    texts = []
    for model in models.values():
        texts.append(said(lambda model=model: convert(nn.Sequential(model))))  # type: ignore[misc]
        assert type(model) is nn.Linear
    texts.append(said(lambda: convert(nn.Sequential(nn.Linear(8, 8)), {})))
    assert_expected_inline(
        "\n".join(t.splitlines()[2] for t in texts),
        """\
0      -   its weight is torch.float64; needed torch.bfloat16, torch.float16, torch.float32
0      -   its weight is torch.complex64; needed torch.bfloat16, torch.float16, torch.float32
0      -   its weight was made under torch.inference_mode, where nothing can be trained
0      -   no pattern of the recipe map matches it""",
    )


def test_a_layer_made_in_fp8_is_not_converted_again() -> None:
    for layer in (Float8Linear(8, 8), nn.Sequential(nn.Linear(8, 8), Float8Linear(8, 8))):
        before = copy.deepcopy(layer.state_dict())
        text = said(lambda layer=layer: convert(layer, MXFP8))  # type: ignore[misc]
        assert text.endswith("is in FP8 already; float8.revert(model), then convert as you like")
        for name, value in layer.state_dict().items():
            assert_same_bytes(value, before[name])


# --- devices


def test_what_is_no_architecture() -> None:
    for wrong in (None, 90, torch.device("cuda"), "cuda", "sm90", "gfx9", ""):
        text = said(lambda wrong=wrong: float8.assume_device(wrong).__enter__())  # type: ignore[misc]
        assert text.startswith(f"Unknown architecture {wrong!r}; known are sm_80, ")
    assert float8.devices.assumed_device() is None


# --- derivatives


def test_a_second_derivative_is_refused_through_every_layer() -> None:
    """Where backward starts, since the gradient of a sum depends on no gradient of its own."""
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    module = nn.Linear(8, 6)
    module.weight = nn.Parameter(Float8Weight(module.weight.detach()))
    converted = nn.Sequential(nn.Linear(8, 6))
    convert(converted)
    off = Recipe("off", None, None, None)
    calls: list[Call] = [
        lambda: linear(x, w),
        lambda: linear(x, w, recipe=ROWWISE_WGRAD_HP),
        lambda: linear(x, w, recipe=off),
        lambda: module(x),
        lambda: converted(x),
    ]
    texts = set()
    for call in calls:
        for loss in (torch.sum, lambda y: y.square().mean()):
            y = loss(call())
            texts.add(
                said(lambda y=y: torch.autograd.grad(y, x, create_graph=True), NotImplementedError)  # type: ignore[misc]
            )
    assert_expected_inline(
        pinned(*texts),
        """\
float8.linear is differentiable once, and create_graph=True asks for a second derivative (a
    gradient penalty, a Hessian); leave it out, or keep the layers that need one in high
    precision""",
    )
    with pytest.raises(NotImplementedError):
        torch.autograd.functional.hessian(lambda t: linear(t, w.detach()).sum(), x.detach())


def test_a_cast_can_be_differentiated_twice() -> None:
    """It passes gradients through, so there is nothing to refuse."""
    x = torch.randn(4, 8, requires_grad=True)
    (g,) = torch.autograd.grad(quantize(x, ROWS).dequantize().pow(3).sum(), x, create_graph=True)
    (gg,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(gg, 6 * quantize(x, ROWS).dequantize().detach())


def test_forward_mode_derivatives_are_refused() -> None:
    """By torch, at the call."""
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for call in (lambda: linear(dual, w), lambda: quantize(dual, ROWS)):
            assert "jvp" in said(call, NotImplementedError, RuntimeError)


def test_functorch_around_dequantize() -> None:
    x8 = quantize(torch.randn(4, 8), ROWS)
    call: Call = lambda: torch.func.grad(lambda t: (t * x8.dequantize()).sum())(torch.randn(4, 8))  # noqa: E731
    assert said(call, NotImplementedError).startswith("dequantize() was called under a functorch ")


def test_inference_tensors() -> None:
    """FP8 copies of them can be kept for backward; they themselves cannot, as torch says."""
    w = torch.randn(6, 8, requires_grad=True)
    with torch.inference_mode():
        x = torch.randn(4, 8)
        frozen = quantize(torch.randn(6, 8), (FULL, FULL))
    linear(x, w).sum().backward()
    assert w.grad is not None and w.grad.any()
    text = said(lambda: linear(x, w, recipe=ROWWISE_WGRAD_HP), RuntimeError)
    assert text.startswith("Inference tensors cannot be saved for backward")
    y = F.linear(torch.randn(4, 8, requires_grad=True), frozen)
    y.sum().backward()


# --- what is stored


def test_a_stored_tensor_that_does_not_fit_is_refused() -> None:
    x8 = quantize(torch.randn(4, 8), ROWS)
    rebuild, parts = x8.__reduce_ex__(4)
    data, scale, *rest = parts
    assert_same_bytes(rebuild(*parts).dequantize(), x8.dequantize())
    text = said(lambda: rebuild(data, scale[:3], *rest))
    assert "torch.float32 of shape (3, 1)" in text
    with pytest.raises(KeyError):
        rebuild(data, scale, "e3m4", *rest[1:])
    file = io.BytesIO()
    torch.save(Holder(x8), file)
    file.seek(0)
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(file, weights_only=True)


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_parts_of_the_tensor_are_plain() -> None:
    x8 = quantize(torch.randn(4, 8), ROWS)
    text = said(lambda: Float8TrainingTensor(x8, x8.scale, ROWS, torch.float32))
    assert text.startswith("torch.float32 is not an FP8 dtype")
