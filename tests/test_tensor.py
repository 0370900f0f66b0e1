"""Float8TrainingTensor as a tensor: made, undone, differentiated, stored, moved, compiled."""

from __future__ import annotations

import copy
import io
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import float8
from float8 import (
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FULL,
    Float8Format,
    Float8TrainingTensor,
    assume_device,
    convert_format,
    quantize,
)
from float8.scaling import Block, block_name, decode_scale, scale_shape
from float8.testing import assert_same_bytes, deterministic, needs, relative_error, sqnr

DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
TENSORWISE, ROWWISE, COLUMNWISE = (FULL, FULL), (1, FULL), (FULL, 1)
BLOCKS: list[Block] = [TENSORWISE, ROWWISE, COLUMNWISE, (1, 128), (128, 128), (1, 32)]
RCEIL = "e8m0_rceil"
# Blocks, and how their scales are made.
KINDS = [*((block, "fp32") for block in BLOCKS), ((1, 32), RCEIL)]


def refusal(op: Callable[[], Any], error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as e:
        op()
    return str(e.value)


def assert_same_tensor(a: Any, b: Any) -> None:
    """The same in every part."""
    assert isinstance(a, Float8TrainingTensor) and isinstance(b, Float8TrainingTensor)
    assert_same_bytes(a.qdata.contiguous(), b.qdata.contiguous())
    assert_same_bytes(a.scale.contiguous(), b.scale.contiguous())
    assert (a.block, a.orig_dtype, a.requires_grad) == (b.block, b.orig_dtype, b.requires_grad)
    assert isinstance(a, nn.Parameter) == isinstance(b, nn.Parameter)


# -------------------------------------------------------------------------- making and undoing it


def test_parts() -> None:
    data = torch.ones(4, 256).to(E4M3FN.dtype)
    x8 = Float8TrainingTensor(data, torch.full((4, 2), 0.5), [1, 128], torch.bfloat16)
    assert x8.qdata is data and x8.block == (1, 128) and x8.format is E4M3FN
    assert (x8.dtype, x8.orig_dtype, x8.shape) == (torch.bfloat16, torch.bfloat16, (4, 256))
    assert isinstance(x8, Tensor) and not x8.requires_grad and x8.is_leaf
    plain = x8.dequantize()
    assert type(plain) is Tensor
    assert_same_bytes(plain, torch.full((4, 256), 0.5, dtype=torch.bfloat16))


def test_parts_that_do_not_fit() -> None:
    data, scale = torch.ones(4, 256).to(E4M3FN.dtype), torch.ones(4, 2)

    def build(
        data: Tensor = data,
        scale: Tensor = scale,
        block: Block = (1, 128),
        dtype: torch.dtype = torch.bfloat16,
    ) -> str:
        return refusal(lambda: Float8TrainingTensor(data, scale, block, dtype))

    assert_expected_inline(
        build(data=torch.ones(4, 256)),
        """torch.float32 is not an FP8 dtype; those are torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu.""",  # noqa: E501
    )
    assert_expected_inline(
        build(data=torch.ones(4, 256).to(E8M0.dtype)),
        """data is torch.float8_e8m0fnu, for scales only; use an e4m3 or e5m2 dtype""",
    )
    assert_expected_inline(
        build(scale=torch.ones(4, 1)),
        """scale is torch.float32 of shape (4, 1); data of shape (4, 256) in blocks (1, 128) needs torch.float32 or torch.float8_e8m0fnu of shape (4, 2), one entry per block""",  # noqa: E501
    )
    assert_expected_inline(
        build(scale=torch.ones(4, 2).half()),
        """scale is torch.float16 of shape (4, 2); data of shape (4, 256) in blocks (1, 128) needs torch.float32 or torch.float8_e8m0fnu of shape (4, 2), one entry per block""",  # noqa: E501
    )
    assert_expected_inline(
        build(scale=scale.to("meta")), """operands are on cpu and meta; move them to one device"""
    )
    assert_expected_inline(
        build(block=(128,)),
        """block (128) has 1 entries but the tensor of shape (4, 256) has 2 dimensions; give one entry per dimension (a size, or float8.FULL)""",  # noqa: E501
    )
    assert_expected_inline(
        build(block=(1, 0)),
        """block (1, 0) holds 0; every entry must be a positive size or float8.FULL (-1)""",
    )
    assert_expected_inline(
        build(dtype=torch.float64),
        """orig_dtype=torch.float64 must be one of torch.bfloat16, torch.float16, torch.float32""",
    )


def test_quantize_says_what_it_takes() -> None:
    x = torch.randn(4, 256)
    assert_expected_inline(
        refusal(lambda: quantize(x.double(), ROWWISE)),
        """x is torch.float64 with layout torch.strided; quantize takes strided torch.bfloat16, torch.float16, torch.float32: cast it, and decide what its rounding means for you""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: quantize(x.to_sparse(), ROWWISE)),
        """x is torch.float32 with layout torch.sparse_coo; quantize takes strided torch.bfloat16, torch.float16, torch.float32: cast it, and decide what its rounding means for you""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: quantize(quantize(x, ROWWISE), ROWWISE)),
        """x is already in FP8 (e4m3fn, block (1, FULL)); .dequantize() it first""",
    )
    assert_expected_inline(
        refusal(lambda: quantize(x, ROWWISE, E8M0)),
        """e8m0 is a format for scales only; quantise to an e4m3 or e5m2 format""",
    )
    assert_expected_inline(
        refusal(lambda: quantize(x, ROWWISE, "e3m4")),
        """No FP8 format of kind 'e3m4'; tensors are 'e4m3' or 'e5m2'.""",
    )
    assert_expected_inline(
        refusal(lambda: quantize(x, ROWWISE, scale_mode="pow3")),
        """scale_mode 'pow3' is unknown; choose one of fp32, pow2, e8m0_floor, e8m0_even, e8m0_ceil, e8m0_rceil""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: quantize(x, TENSORWISE, scale_mode="pow2", scale=torch.ones(1, 1))),
        """scale_mode='pow2' and a given scale exclude each other; pass one of them""",
    )
    assert_expected_inline(
        refusal(lambda: quantize(x, ROWWISE, scale=torch.ones(1, 1))),
        """scale is torch.float32 of shape (1, 1); data of shape (4, 256) in blocks (1, FULL) needs torch.float32 or torch.float8_e8m0fnu of shape (4, 1), one entry per block""",  # noqa: E501
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block, mode", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_trip(block: Block, mode: str, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(130, 160, device=device).to(dtype)
    for fmt, error in ((E4M3FN, 0.04), (E4M3FNUZ, 0.04), (E5M2, 0.08), (E5M2FNUZ, 0.08)):
        x8 = quantize(x, block, fmt, scale_mode=mode)
        assert (x8.format, x8.dtype, x8.device) == (fmt, dtype, x.device)
        assert x8.scale.dtype == (E8M0.dtype if mode == RCEIL else torch.float32)
        assert tuple(x8.scale.shape) == scale_shape(x.shape, block)
        assert x8.dequantize().dtype == dtype
        assert relative_error(x8.dequantize(), x) < error


@pytest.mark.parametrize("device", DEVICES)
def test_every_rank(device: str) -> None:
    for rank in range(5):
        x = torch.randn((3, 5, 2, 4)[:rank], device=device)
        for block in ((1,) * rank, (FULL,) * rank, (2,) * rank):
            x8 = quantize(x, block)
            assert x8.shape == x.shape and x8.scale.ndim == rank
            torch.testing.assert_close(x8.dequantize(), x, rtol=0.07, atol=0.01)


def test_format_is_that_of_the_device() -> None:
    x = torch.randn(4, 32)
    assert quantize(x, ROWWISE).format is E4M3FN
    assert quantize(x, ROWWISE, "e5m2").format is E5M2
    with assume_device("gfx942"):
        assert quantize(x, ROWWISE).format is E4M3FNUZ
        assert quantize(x, ROWWISE, "e5m2").format is E5M2FNUZ
        assert quantize(x, ROWWISE, E4M3FN).format is E4M3FN


@pytest.mark.parametrize("device", DEVICES)
def test_given_scale(device: str) -> None:
    x = torch.tensor([[1.0, 2.0, -1e4], [0.5, float("inf"), 3.0]], device=device)
    for scale in (torch.tensor([[0.5], [0.5]]), torch.tensor([[0.5], [0.5]]).to(E8M0.dtype)):
        x8 = quantize(x, ROWWISE, E4M3FN, scale=scale.to(device))
        assert x8.scale.dtype == scale.dtype
        want = [[1.0, 2.0, -224.0], [math.nan] * 3]
        torch.testing.assert_close(x8.dequantize().cpu(), torch.tensor(want), equal_nan=True)


def test_one_column_and_one_row_keep_their_kind() -> None:
    """The block says what the scales are, not their shape."""
    for shape in ((1, 64), (64, 1), (1, 1)):
        x = torch.randn(shape)
        for block in (TENSORWISE, ROWWISE, COLUMNWISE, (128, 128)):
            x8 = quantize(x, block)
            assert x8.block == block and x8.t().block == block[::-1]
            assert_same_bytes(x8.t().dequantize(), x8.dequantize().t().contiguous())


def test_repr() -> None:
    x8 = quantize(torch.zeros(4, 256, dtype=torch.bfloat16, requires_grad=True), (1, 128))
    assert_expected_inline(
        repr(x8),
        """Float8TrainingTensor(shape=(4, 256), format=e4m3fn, block=(1, 128), scale=torch.float32, orig_dtype=torch.bfloat16, device=cpu, requires_grad=True)""",  # noqa: E501
    )
    assert_expected_inline(
        str(nn.Parameter(quantize(torch.zeros(2, 64), (1, 32), E5M2, RCEIL), False)),
        """Float8TrainingTensor(shape=(2, 64), format=e5m2, block=(1, 32), scale=torch.float8_e8m0fnu, orig_dtype=torch.float32, device=cpu)""",  # noqa: E501
    )
    with FakeTensorMode():
        assert "shape=(2, 3)" in repr(quantize(torch.zeros(2, 3), TENSORWISE))


# -------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block, mode", KINDS)
def test_gradient_passes_straight_through(
    block: Block, mode: str, dtype: torch.dtype, device: str
) -> None:
    x = torch.randn(40, 160, device=device).to(dtype).requires_grad_()
    x8 = quantize(x, block, scale_mode=mode)
    assert x8.requires_grad and not x8.is_leaf
    y, g = x8.dequantize(), torch.randn(40, 160, device=device).to(dtype)
    y.backward(g)
    assert x.grad is not None and type(x.grad) is Tensor
    assert_same_bytes(x.grad, g)


def test_jacobian_is_the_identity() -> None:
    def there_and_back(x: Tensor) -> Tensor:
        return quantize(x, (1, 4)).dequantize()

    jacobian = torch.autograd.functional.jacobian(there_and_back, torch.randn(2, 6))
    assert torch.equal(jacobian.view(12, 12), torch.eye(12))
    # Twice: d/dx of the gradient of y ** 3 is 6 y, through the same two casts.
    x = torch.randn(6, requires_grad=True)
    y = quantize(x, (FULL,)).dequantize()
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * y.detach())


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.t(),
        lambda x: x.view(2, 8, 64),
        lambda x: x.view(16, 4, 16).transpose(0, 1),
        lambda x: x.t().reshape(16, -1),
        lambda x: x[3:9, ::2],
        lambda x: x[5],
        lambda x: torch.cat([x.split(4)[i] for i in (2, 0, 2)]),
        lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
        lambda x: torch.stack(x.unbind(0)[:3]),
        lambda x: x.unsqueeze(0).expand(3, 16, 64),
        lambda x: x[torch.tensor([1, 1, -2])],
        lambda x: x.index_select(1, torch.tensor([1, 1, 5])),
        lambda x: x.clone(),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.unsafe_split(5)[1],
        lambda x: x.squeeze().unsqueeze(-1),
    ],
)
@pytest.mark.parametrize("block", [TENSORWISE, (1, 64)], ids=block_name)
def test_gradient_through_structure(op: Callable[[Any], Any], block: Block) -> None:
    """Exactly the gradient that the op gives on a plain tensor."""
    x, plain = (torch.randn(16, 64).requires_grad_() for _ in range(2))
    y = op(plain)
    try:
        y8 = op(quantize(x, block))
    except NotImplementedError:
        assert block != TENSORWISE
        return
    assert y8.requires_grad and isinstance(y8, Float8TrainingTensor)
    g = torch.randn(y.shape).to(y.dtype)
    y8.dequantize().backward(g)
    y.backward(g)
    assert x.grad is not None and plain.grad is not None
    assert_same_bytes(x.grad, plain.grad)


def test_gradient_through_a_write() -> None:
    """What is written into a view gets the view's gradient, what was there gets none."""
    x, rows = torch.randn(4, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    x8, g = quantize(x, ROWWISE), torch.randn(4, 8)
    x8[2:].copy_(rows)
    x8.dequantize().backward(g)
    assert x.grad is not None and rows.grad is not None
    assert torch.equal(x.grad[:2], g[:2]) and not x.grad[2:].any()
    assert torch.equal(rows.grad, g[2:])


def test_gradients_of_leaves_and_hooks_are_plain() -> None:
    leaf = quantize(torch.randn(4, 8), ROWWISE).requires_grad_()
    seen: list[Tensor] = []
    leaf.register_hook(seen.append)
    (leaf * 2).sum().backward()
    (leaf.t().dequantize() * 3).sum().backward()
    assert leaf.grad is not None and type(leaf.grad) is Tensor
    assert torch.equal(leaf.grad, torch.full((4, 8), 5.0))
    assert [type(t) for t in seen] == [Tensor, Tensor]
    leaf.grad.zero_()


def test_nothing_requires_grad_without_cause() -> None:
    assert not quantize(torch.randn(4, 8), ROWWISE).requires_grad
    x = torch.randn(4, 8, requires_grad=True)
    with torch.no_grad():
        assert not quantize(x, ROWWISE).requires_grad
    with torch.inference_mode():
        x8 = quantize(x, ROWWISE)
        assert x8.is_inference() and x8.qdata.is_inference()
    assert not quantize(x.detach(), ROWWISE).dequantize().requires_grad
    assert not quantize(x, ROWWISE).detach().dequantize().requires_grad


def test_recomputation_gives_the_same_gradient() -> None:
    w8 = quantize(torch.randn(32, 64), TENSORWISE)

    def block(x: Tensor) -> Tensor:
        return F.linear(quantize(x, TENSORWISE), w8).relu()

    grads = []
    for run in (block, lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)):
        torch.manual_seed(0)
        x = torch.randn(16, 64, requires_grad=True)
        run(x).pow(2).sum().backward()
        grads.append(x.grad)
    assert_same_bytes(*grads)


def test_autocast() -> None:
    w8 = nn.Parameter(quantize(torch.randn(32, 64), TENSORWISE), requires_grad=False)
    x = torch.randn(16, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, w8)
        assert y.dtype == torch.bfloat16
        assert (quantize(x, ROWWISE) @ quantize(x, ROWWISE).t()).dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    half = F.linear(x.bfloat16(), w8.bfloat16())
    assert_same_bytes(y, half)


# ---------------------------------------------------------------------- parameters and optimisers


def frozen(block: Block = TENSORWISE, mode: str = "fp32") -> nn.Linear:
    """A linear layer that holds its weight in FP8."""
    layer = nn.Linear(64, 32)
    w8 = quantize(layer.weight.detach(), block, scale_mode=mode)
    layer.weight = nn.Parameter(w8, requires_grad=False)
    return layer


OPTIMISERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.1, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
]


@pytest.mark.parametrize("optimiser, options", OPTIMISERS)
def test_optimiser_cannot_update_it(optimiser: Any, options: dict[str, Any]) -> None:
    p = nn.Parameter(quantize(torch.randn(32, 64), ROWWISE))
    p.grad, before = torch.ones(32, 64), p.dequantize().clone()
    text = refusal(optimiser([p], **options).step, NotImplementedError)
    assert "(an optimiser must not own it): train a high-precision weight" in text
    assert_same_bytes(p.dequantize(), before)


def test_optimiser_is_told_why() -> None:
    p = nn.Parameter(quantize(torch.randn(32, 64), ROWWISE))
    p.grad = torch.ones(32, 64)
    assert_expected_inline(
        refusal(torch.optim.SGD([p], foreach=False).step, NotImplementedError),
        """aten.add_.Tensor has no handler for a Float8TrainingTensor (shape (32, 64), e4m3fn, block (1, FULL)). It would change FP8 values in place, which a frozen tensor does not allow (an optimiser must not own it): train a high-precision weight, or make a new tensor with float8.quantize.""",  # noqa: E501
    )


def test_optimiser_leaves_a_frozen_one_alone() -> None:
    model = nn.Sequential(nn.Linear(64, 64), frozen())
    before = copy.deepcopy(model[1].weight)
    optimiser = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(8, 64)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    assert_same_tensor(model[1].weight, before)
    assert model[1].weight.grad is None and model[0].weight.grad is not None


@pytest.mark.parametrize("block, mode", KINDS)
def test_module_moves_it(block: Block, mode: str) -> None:
    for method, dtype in (
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float", torch.float32),
        ("cpu", torch.float32),
    ):
        layer = frozen(block, mode)
        before = layer.weight
        weight: Any = getattr(layer, method)().weight
        assert isinstance(weight, nn.Parameter) and isinstance(weight, Float8TrainingTensor)
        assert weight.orig_dtype == weight.dtype == dtype and not weight.requires_grad
        assert_same_bytes(weight.qdata, before.qdata)
        assert_same_bytes(weight.scale.contiguous(), before.scale.contiguous())
        if block != COLUMNWISE:  # which would multiply in high precision, with a warning
            assert layer(torch.randn(3, 64, dtype=layer.bias.dtype)).dtype == layer.bias.dtype
    text = refusal(frozen(block, mode).double, NotImplementedError)
    assert "it cannot become torch.float64" in text


def test_module_on_meta() -> None:
    layer = frozen((128, 128)).to("meta")
    weight: Any = layer.weight
    assert weight.qdata.is_meta and weight.scale.is_meta and weight.block == (128, 128)
    source = frozen((128, 128))
    layer.load_state_dict(source.state_dict(), assign=True)
    assert_same_bytes(layer.weight.dequantize(), source.weight.dequantize())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs("cuda"))])
def test_module_on_a_gpu(device: str) -> None:
    layer = frozen((1, 32), RCEIL)
    before = layer.weight.dequantize()
    weight: Any = layer.to(device).weight
    assert weight.qdata.is_cuda and weight.scale.is_cuda
    assert_same_bytes(weight.dequantize(), before)
    pinned = layer.cpu().weight.pin_memory()
    assert pinned.is_pinned() and pinned.qdata.is_pinned() and pinned.scale.is_pinned()
    on_gpu = pinned.to(device, non_blocking=True)
    on_gpu.record_stream(torch.cuda.current_stream())
    assert_same_bytes(on_gpu.dequantize(), before)


# ---------------------------------------------------------------------------------------- storing


def stored(x8: Tensor) -> list[Tensor]:
    """The ways to store it and load it again, and to copy it."""
    buffer = io.BytesIO()
    torch.save({"x": x8}, buffer)
    buffer.seek(0)
    return [
        pickle.loads(pickle.dumps(x8)),
        pickle.loads(pickle.dumps(x8, protocol=pickle.HIGHEST_PROTOCOL)),
        torch.load(buffer, weights_only=True)["x"],
        copy.deepcopy(x8),
        copy.copy(x8),
    ]


@pytest.mark.parametrize("block, mode", KINDS)
def test_stored_and_copied_whole(block: Block, mode: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x8 = quantize(torch.randn(40, 160, dtype=dtype), block, scale_mode=mode)
        for original in (
            x8,
            x8.clone().requires_grad_(),
            nn.Parameter(x8, requires_grad=False),
            nn.Parameter(x8),
            quantize(x8.dequantize(), block, E5M2FNUZ, mode),
        ):
            for again in stored(original):
                assert_same_tensor(again, original)


def test_a_view_is_stored_as_it_is() -> None:
    x8 = quantize(torch.randn(40, 256), (1, 32))
    for view in (x8.t(), x8[3:7], x8[:, 64:128], x8.view(2, 20, 256), x8[0]):
        for again in stored(view):
            assert_same_tensor(again, view)


def test_what_is_copied_is_shared_or_not() -> None:
    x8 = quantize(torch.randn(4, 8), ROWWISE)
    assert copy.copy(x8).qdata.data_ptr() == x8.qdata.data_ptr()
    deep = copy.deepcopy(x8)
    assert deep.qdata.data_ptr() != x8.qdata.data_ptr()
    assert deep.scale.data_ptr() != x8.scale.data_ptr()
    tied = nn.ModuleList([frozen(), nn.Linear(64, 32)])
    tied[1].weight = tied[0].weight
    again = copy.deepcopy(tied)
    assert again[0].weight is again[1].weight
    one, other = pickle.loads(pickle.dumps([x8, x8]))
    assert one is other
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(quantize(torch.randn(2, 2, requires_grad=True), ROWWISE))


def test_state_dict_of_a_frozen_weight() -> None:
    source = frozen((1, 32), RCEIL)
    state = source.state_dict()
    assert isinstance(state["weight"], Float8TrainingTensor)
    plain = nn.Linear(64, 32)
    plain.load_state_dict(state)  # plain parameters stay plain
    assert type(plain.weight) is nn.Parameter
    assert_same_bytes(plain.weight.detach(), source.weight.dequantize())
    target = frozen((1, 32), RCEIL)
    target.load_state_dict(state)
    assert_same_tensor(target.weight, source.weight)
    plain.weight.data *= 8
    target.load_state_dict(plain.state_dict())  # quantised into the same blocks
    assert isinstance(target.weight, Float8TrainingTensor) and target.weight.block == (1, 32)
    assert_same_bytes(target.weight.dequantize(), source.weight.dequantize() * 8)
    assigned = nn.Linear(64, 32)
    assigned.load_state_dict(state, assign=True)
    assert isinstance(assigned.weight, Float8TrainingTensor)


LOADS = """
import sys
import float8
import torch
state = torch.load(sys.argv[1], weights_only=True)
layer = torch.nn.Linear(64, 32)
layer.load_state_dict(state, assign=True)
torch.save(layer(torch.ones(3, 64)).detach(), sys.argv[2])
print(state['weight'])
"""


def test_state_dict_is_loaded_by_a_process_that_imports_float8_alone(tmp_path: Path) -> None:
    layer = frozen((1, 32), RCEIL)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    command = [sys.executable, "-c", LOADS, str(tmp_path / "state.pt"), str(tmp_path / "out.pt")]
    root = Path(float8.__file__).parent.parent
    done = subprocess.run(command, cwd=root, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == repr(layer.weight)
    assert_same_bytes(torch.load(tmp_path / "out.pt"), layer(torch.ones(3, 64)).detach())


# ---------------------------------------------------------------------------------------- flavours

FLAVOURS = [(E4M3FN, E4M3FNUZ), (E5M2, E5M2FNUZ)]


def every_code(fmt: Float8Format, block: Block, scale: Tensor, device: str) -> Float8TrainingTensor:
    """[1, 256]: all bytes of a format."""
    data = torch.arange(256, dtype=torch.uint8, device=device).view(1, 256).view(fmt.dtype)
    scale = scale.expand(scale_shape(data.shape, block)).contiguous()
    return Float8TrainingTensor(data, scale.to(device), block, torch.float32)


def e8m0(code: int) -> Tensor:
    return torch.tensor([[code]], dtype=torch.uint8).view(E8M0.dtype)


SCALES = {
    "1": torch.ones(1, 1),
    "0.3": torch.tensor([[0.3]]),
    "2^-126": torch.tensor([[2.0**-126]]),
    "2^-149": torch.tensor([[2.0**-149]]),
    "2^127": torch.tensor([[2.0**127]]),
    "nan": torch.tensor([[math.nan]]),
    **{f"code {code}": e8m0(code) for code in (0, 1, 127, 253, 254, 255)},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("block", [(1, 1), (1, 32), TENSORWISE], ids=block_name)
@pytest.mark.parametrize("fn, fnuz", FLAVOURS)
def test_convert_format_keeps_every_value(
    fn: Float8Format, fnuz: Float8Format, block: Block, scale: str, device: str
) -> None:
    for source, target in ((fn, fnuz), (fnuz, fn)):
        x8 = every_code(source, block, SCALES[scale], device)
        y8 = convert_format(x8, target)
        assert y8.format is target and y8.scale.dtype == x8.scale.dtype
        assert (y8.block, y8.orig_dtype, y8.scale.shape) == (block, x8.orig_dtype, x8.scale.shape)
        wanted, got = exact(x8), exact(y8)
        finite = torch.ops.float8.dequantize(x8.qdata, x8.scale, block, torch.float32).isfinite()
        assert not got[~finite].to(torch.float32).isfinite().any()
        # A block that had to be cast to fn loses half a step of its subnormals, and no more.
        allowed = torch.zeros_like(wanted)
        if target is fn:
            subnormal = x8.qdata.to(torch.float64).abs() < fn.smallest_normal
            allowed[subnormal] = fn.smallest_subnormal / 2
        error = (got - wanted).abs() / exact_scale(x8)
        assert (error <= allowed)[finite].all()
        assert not (got[finite] == 0).logical_and(got[finite].signbit()).any() or target is fn


def exact_scale(x8: Float8TrainingTensor) -> Tensor:
    """One per column, in float64."""
    scale = decode_scale(x8.scale).to(torch.float64)
    return scale.repeat_interleave(x8.shape[1] // scale.shape[1], 1)


def exact(x8: Float8TrainingTensor) -> Tensor:
    """In float64, where data times scale loses nothing."""
    return x8.qdata.to(torch.float64) * exact_scale(x8)


@pytest.mark.parametrize("fn, fnuz", FLAVOURS)
def test_convert_format_of_a_real_tensor(fn: Float8Format, fnuz: Float8Format) -> None:
    x = torch.randn(200, 300)
    for block, mode in KINDS:
        x8 = quantize(x, block, fn, mode)
        y8 = convert_format(x8, fnuz)
        assert_same_bytes(y8.dequantize(), x8.dequantize())
        assert_same_bytes(convert_format(y8, fn).dequantize(), x8.dequantize())
        z8 = quantize(x, block, fnuz, mode)
        back = convert_format(z8, fn)
        # Blocks whose maximum became the largest code, 240 in e4m3fnuz, cannot halve their scale.
        assert relative_error(back.dequantize(), z8.dequantize()) < 1e-4
        assert_same_bytes(convert_format(back, fnuz).dequantize(), back.dequantize())
        assert back.scale.stride() == z8.scale.stride()


def test_convert_format_changes_the_flavour_alone() -> None:
    x8 = quantize(torch.randn(2, 3), ROWWISE)
    assert convert_format(x8, E4M3FN) is x8
    for to in (E5M2, E5M2FNUZ, E8M0):
        assert "changes the flavour, not the kind" in refusal(lambda to=to: convert_format(x8, to))
    assert_expected_inline(
        refusal(lambda: convert_format(x8, E5M2)),
        """convert_format changes the flavour, not the kind: e4m3fn cannot become e5m2; dequantize() and quantize() instead""",  # noqa: E501
    )
    assert convert_format(quantize(torch.zeros(0, 3), ROWWISE), E4M3FNUZ).shape == (0, 3)
    assert_expected_inline(
        refusal(lambda: convert_format(x8, "e4m3fnuz")),  # type: ignore[arg-type]
        """to='e4m3fnuz' must be a format, such as float8.E4M3FNUZ""",
    )


def test_what_goes_through_memory_is_refused() -> None:
    """torch's own would crash the process."""
    x8 = quantize(torch.randn(2, 3), ROWWISE)
    for call in (lambda: x8.apply_(abs), lambda: x8.map_(x8, max), lambda: x8.map2_(x8, x8, max)):
        with pytest.raises(NotImplementedError, match="write into it with"):
            call()


# --------------------------------------------------------------------------- compiled and traced


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


def parts(result: Any) -> list[Tensor]:
    """The plain tensors that a result is made of."""
    if isinstance(result, Float8TrainingTensor):
        return [result.qdata.detach(), result.scale.detach()]
    if isinstance(result, Tensor):
        return [result.detach()]
    return [part for item in result for part in parts(item)]


def assert_same_parts(got: Any, want: Any) -> None:
    for g, w in zip(parts(got), parts(want), strict=True):
        assert_same_bytes(g.contiguous(), w.contiguous())
        assert g.stride() == w.stride()


def everywhere(x: Tensor, w: Tensor, x8: Any, w8: Any) -> Any:
    """FP8 as input, intermediate, output and saved for backward, with structure ops in between."""
    a8 = quantize(x, ROWWISE)
    y = a8 @ quantize(w, ROWWISE).t()
    z = F.linear(x8.view(2, 8, 64), w8, y[0])
    halves = x8.chunk(2, 1)
    joined = torch.cat(halves, 1)
    rows = torch.stack([joined[i] for i in (1, 0)])
    return y, z, a8, a8.t(), halves[0], joined, rows, x8.detach(), (x8 * 2).sum(), w8.dequantize()


# Rowwise operands hold no second contraction, and torch.compile looks at the .grad of an input that
# is no leaf: both warn.
@pytest.mark.filterwarnings("ignore:.*do not contain the contraction", "ignore:The .grad attribute")
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_is_eager_bit_for_bit(device: str) -> None:
    results = []
    for run in (everywhere, compiled(everywhere)):
        torch.manual_seed(1)
        x, x_source = (torch.randn(16, 64, device=device, requires_grad=True) for _ in range(2))
        w = torch.randn(64, 64, device=device, requires_grad=True)
        x8 = quantize(x_source, ROWWISE)
        w8 = nn.Parameter(quantize(torch.randn(64, 64, device=device), TENSORWISE), False)
        outputs = run(x, w, x8, w8)
        values = [o.dequantize() if isinstance(o, Float8TrainingTensor) else o for o in outputs]
        sum(v.pow(2).sum() for v in values if v.requires_grad).backward()
        results.append((outputs, [t.grad for t in (x, w, x_source)]))
    assert_same_parts(results[1], results[0])
    for got, want in zip(results[1][0], results[0][0], strict=True):
        assert type(got) is type(want) and got.requires_grad == want.requires_grad
        if isinstance(want, Float8TrainingTensor):
            assert (got.block, got.orig_dtype, got.shape) == (
                want.block,
                want.orig_dtype,
                want.shape,
            )


@pytest.mark.parametrize("block, mode", KINDS)
def test_compiled_round_trip(block: Block, mode: str) -> None:
    def run(x: Tensor) -> tuple[Any, Tensor]:
        x8 = quantize(x, block, scale_mode=mode)
        return x8, x8.dequantize() * 2

    grads = []
    for function in (run, compiled(run)):
        torch.manual_seed(1)
        x = torch.randn(40, 160, dtype=torch.bfloat16, requires_grad=True)
        x8, y = function(x)
        (y.sum() + x8.dequantize().sum()).backward()
        grads.append(((x8, y), x.grad))
    assert_same_parts(grads[1], grads[0])


def test_compiled_module_with_a_frozen_weight() -> None:
    model = nn.Sequential(nn.Linear(64, 64), frozen((128, 128)), nn.ReLU(), frozen_square((1, 32)))
    results = []
    for run in (model, compiled(model)):
        torch.manual_seed(1)
        model.zero_grad()
        x = torch.randn(8, 64, requires_grad=True)
        y = run(x)
        y.pow(2).sum().backward()
        results.append((y, x.grad, model[0].weight.grad))
    assert_same_parts(results[1], results[0])


def frozen_square(block: Block) -> nn.Linear:
    layer = nn.Linear(32, 32)
    # Blocks along both dimensions, so that dgrad stays in FP8.
    w8 = quantize(layer.weight.detach(), (32, 32), scale_mode=RCEIL)
    layer.weight = nn.Parameter(w8, requires_grad=False)
    return layer


def test_compiled_write() -> None:
    def run(x8: Any, rows: Tensor) -> Tensor:
        x8[2:4].copy_(rows)
        x8.t().copy_(x8.t().dequantize() * 2)
        return x8.sum()

    x, rows = torch.randn(8, 64), torch.randn(2, 64)
    eager, other = quantize(x, ROWWISE), quantize(x, ROWWISE)
    assert_same_bytes(compiled(run)(other, rows), run(eager, rows))
    assert_same_tensor(other, eager)

    def part_of_a_block(x8: Any) -> Any:
        return x8[:, :8].copy_(torch.ones(8, 8))

    def copied_scales(x: Tensor) -> Any:
        return quantize(x, (1, 1, 32)).view(8, 64).copy_(torch.ones(8, 64))

    for function, argument in ((part_of_a_block, eager), (copied_scales, x.view(2, 4, 64))):
        with pytest.raises(Exception, match="it is a view whose scales"):
            compiled(function)(argument)


def count_compilations(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> int:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(function, backend=counter, fullgraph=True)
    for args in calls:
        assert_same_parts(run(*args), function(*args))
    return counter.frame_count


@pytest.mark.parametrize("block, mode", [(TENSORWISE, "fp32"), (ROWWISE, "fp32"), ((1, 32), RCEIL)])
def test_token_counts_cost_one_dynamic_compilation(block: Block, mode: str) -> None:
    w8 = quantize(torch.randn(32, 64), block, scale_mode=mode)

    def run(x: Tensor) -> Any:
        x8 = quantize(x, block, scale_mode=mode)
        return F.linear(x8.view(2, -1, 64), w8), x8[: x.shape[0] // 2], x8.view(-1, 4, 64)

    assert count_compilations(run, [(torch.randn(m, 64),) for m in (8, 64, 80, 96)]) <= 2


def test_fp8_inputs_of_other_lengths_cost_one_dynamic_compilation() -> None:
    w8 = quantize(torch.randn(32, 64), (128, 128))

    def run(x8: Any) -> Any:
        return x8 @ w8.t(), x8.t(), x8.view(2, -1, 64).dequantize()

    calls = [(quantize(torch.randn(m, 64), (1, 128)),) for m in (8, 64, 80, 96)]
    assert count_compilations(run, calls) <= 2


def test_convert_format_compiles() -> None:
    def run(x8: Any) -> Any:
        return convert_format(x8, E4M3FNUZ)

    x8 = quantize(torch.randn(4, 64), (1, 32))
    assert_same_parts(compiled(run)(x8), run(x8))


def test_traced_with_make_fx() -> None:
    def run(x: Tensor, x8: Any) -> Tensor:
        return quantize(x, ROWWISE) @ x8.t()

    x, x8 = torch.randn(4, 64), quantize(torch.randn(8, 64), ROWWISE)
    traced = make_fx(run)(x, x8)
    assert_same_bytes(traced(x, x8), run(x, x8))


@pytest.mark.parametrize("block, mode", KINDS)
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(block: Block, mode: str) -> None:
    def run(x: Tensor, w: Tensor) -> list[Any]:
        x8 = quantize(x, block, scale_mode=mode)
        w8 = quantize(w, block[::-1], scale_mode=mode)
        product = [] if block == COLUMNWISE else [x8 @ w8]
        return [x8, w8, x8.t(), x8.view(2, 20, 160), x8.dequantize(), x8 + 1, *product]

    x, w = torch.randn(40, 160), torch.randn(160, 24)
    with FakeTensorMode() as mode_of_fakes:
        fakes = run(mode_of_fakes.from_tensor(x), mode_of_fakes.from_tensor(w))
    for fake, real in zip(fakes, run(x, w), strict=True):
        for f, r in zip(parts(fake), parts(real), strict=True):
            assert isinstance(f, FakeTensor)
            assert (f.shape, f.stride(), f.dtype) == (r.shape, r.stride(), r.dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_mode_changes_nothing(device: str) -> None:
    """It fills empty tensors with NaN: what nobody writes would show."""

    def run() -> list[Any]:
        torch.manual_seed(1)
        x = torch.randn(40, 160, device=device, requires_grad=True)
        x8, results = quantize(x, (1, 32), scale_mode=RCEIL), []
        w8 = quantize(torch.randn(24, 160, device=device), (1, 32), scale_mode=RCEIL)
        results += [x8, x8[:, 32:], torch.cat(x8.chunk(2)), x8[torch.tensor([1, 0])], x8 @ w8.t()]
        results += [convert_format(x8, E4M3FNUZ), x8.to(torch.bfloat16), torch.stack([x8, x8])]
        x8.sum().backward()
        return [*results, x.grad]

    want = run()
    with deterministic():
        got = run()
    assert_same_parts(got, want)


# -------------------------------------------------------------------------------------- torch.func


def test_functional_call() -> None:
    layer, x = nn.Linear(64, 32), torch.randn(4, 64)
    weights = {"weight": quantize(layer.weight.detach(), TENSORWISE), "bias": layer.bias}
    want = F.linear(x, weights["weight"], layer.bias)
    assert_same_bytes(torch.func.functional_call(layer, weights, (x,)).detach(), want.detach())


def test_functorch_is_refused_in_words() -> None:
    x, x8 = torch.randn(4, 64), quantize(torch.randn(4, 64), ROWWISE)
    functions: list[Callable[[Any], Any]] = [
        lambda t: quantize(t, (FULL,) * t.ndim).sum(),
        lambda t: (t * x8.dequantize()).sum(),
    ]
    for function in functions:
        for transform in (torch.func.grad, torch.func.vmap, torch.func.jacrev):
            with pytest.raises(NotImplementedError, match="under a functorch transform"):
                transform(function)(x)
    assert_expected_inline(
        refusal(lambda: torch.func.grad(functions[0])(x), NotImplementedError),
        """float8.quantize was called under a functorch transform (torch.func.grad, vmap, jvp, ...), which its autograd function does not support; use .backward() or torch.autograd.grad, or call it before the transform""",  # noqa: E501
    )
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.grad(lambda t: t.dequantize().sum())(x8)


def test_functorch_around_a_frozen_weight() -> None:
    """Products and value ops know no autograd function, and are right."""
    w8, x = quantize(torch.randn(64, 64), TENSORWISE), torch.randn(4, 64)
    eager = x.clone().requires_grad_()
    ((eager @ w8) * w8[0]).sum().backward()
    got = torch.func.grad(lambda t: ((t @ w8) * w8[0]).sum())(x)
    assert eager.grad is not None
    assert_same_bytes(got, eager.grad)
    assert_same_bytes(torch.func.vmap(lambda t: w8[0] * t)(x), w8[0] * x)


def test_what_reads_memory_through_dlpack_gets_a_sentence() -> None:
    with pytest.raises(NotImplementedError, match=r"dlpack cannot hand over; export \.dequantize"):
        torch.from_dlpack(float8.quantize(torch.randn(8, 64), (1, FULL)))


def test_a_block_longer_than_its_dimension_is_as_long_as_it() -> None:
    """And nothing is padded to its length."""
    x = torch.randn(5, 7)
    huge, full = float8.quantize(x, (1, 2**40)), float8.quantize(x, (1, FULL))
    assert torch.equal(huge.dequantize(), full.dequantize())
    assert huge.scale.shape == full.scale.shape


def test_sqnr_of_what_is_no_number() -> None:
    one, nan, inf = torch.ones(2), torch.tensor([1.0, math.nan]), torch.tensor([1.0, -math.inf])
    assert sqnr(one, one) == math.inf and sqnr(inf, one) == -math.inf
    assert all(math.isnan(sqnr(x, y)) for x, y in ((nan, one), (one, nan), (one, inf), (inf, inf)))
