"""The dispatch table: what every op does to a Float8TrainingTensor, and what it refuses.

The rule for structure ops is one property: ``op(x8).dequantize()`` equals ``op(x8.dequantize())``
bit for bit, with one scale per block, or the op refuses with NotImplementedError.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import float8
import float8.dispatch.grouped as table_of_grouped
import float8.dispatch.matmul as table_of_products
from float8 import E4M3FN, E4M3FNUZ, E5M2, FULL, Float8TrainingTensor, assume_device, quantize
from float8.dispatch.matmul import multiply
from float8.dispatch.table import HANDLERS
from float8.dispatch.value import dequantized
from float8.scaling import Block, block_name, scale_shape
from float8.testing import assert_same_bytes, needs, relative_error

aten = torch.ops.aten
DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]

TENSORWISE, ROWWISE, COLUMNWISE = (FULL, FULL), (1, FULL), (FULL, 1)
BLOCKS_2D: list[Block] = [
    *(TENSORWISE, ROWWISE, COLUMNWISE),
    *((1, 128), (128, 1), (128, 128), (1, 32), (32, 1)),
]
# An expert weight, or an activation that is not folded yet.
BLOCKS_3D: list[Block] = [(FULL, FULL, FULL), *((1, *block) for block in BLOCKS_2D)]
SHAPES_2D = [(16, 256), (7, 33), (130, 66), (1, 160), (160, 1), (0, 64), (64, 0)]
SHAPES_3D = [(2, 8, 64), (3, 66, 160), (1, 5, 33), (0, 4, 32)]

Function = Callable[[Any], Any]


def make(
    shape: tuple[int, ...],
    block: Block,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    scale_mode: str = "fp32",
    requires_grad: bool = False,
) -> Float8TrainingTensor:
    """Normal data whose blocks differ in their scales."""
    x = torch.randn(shape, device=device)
    x = x * torch.exp2(torch.arange(x.numel(), device=device) % 13 - 6.0).reshape(shape)
    return quantize(x.to(dtype).requires_grad_(requires_grad), block, scale_mode=scale_mode)


def assert_valid(x: Any) -> None:
    """The invariant: one scale per block, and the constructor takes the parts."""
    assert isinstance(x, Float8TrainingTensor)
    assert tuple(x.scale.shape) == scale_shape(x.shape, x.block)
    Float8TrainingTensor(x.qdata, x.scale, x.block, x.orig_dtype)
    assert (x.shape, x.stride(), x.device) == (x.qdata.shape, x.qdata.stride(), x.qdata.device)
    assert x.dtype == x.orig_dtype


def values(x: Tensor) -> Tensor:
    """Plain, contiguous in every dimension."""
    x = x.dequantize() if isinstance(x, Float8TrainingTensor) else x
    return x.detach().clone(memory_format=torch.contiguous_format)


def as_list(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def moves_as_its_values(op: Function, x8: Float8TrainingTensor) -> bool:
    """Check the property of structure ops; False if the op was refused."""
    want = as_list(op(values(x8)))
    try:
        got = as_list(op(x8))
    except NotImplementedError:
        return False
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert_valid(g)
        assert_same_bytes(values(g), values(w))
    return True


# ------------------------------------------------------------------------------------- structure

# The ways to reach a structure op, for a tensor of any size and at least two dimensions.
STRUCTURE: dict[str, Function] = {
    "transpose": lambda x: x.transpose(0, -1),
    "swapaxes": lambda x: x.swapaxes(-2, -1),
    "permute": lambda x: x.permute(*range(x.ndim - 1, -1, -1)),
    "movedim": lambda x: x.movedim(0, -1),
    "mT": lambda x: x.mT,
    "adjoint": lambda x: x.adjoint(),
    "view same": lambda x: x.view(x.shape),
    "view_as": lambda x: x.view_as(x),
    "view lead": lambda x: x.view(1, *x.shape),
    "view trail": lambda x: x.view(*x.shape, 1),
    "view(-1)": lambda x: x.view(-1),
    "reshape transposed": lambda x: x.mT.reshape(-1),
    "flatten": lambda x: x.flatten(-2),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(-1, (-1, 1)),
    "slice all": lambda x: x[:],
    "slice rows": lambda x: x[..., 0:128, :],
    "slice columns": lambda x: x[..., -32:],
    "slice step": lambda x: x[..., ::2, :],
    "slice empty": lambda x: x[..., 3:3],
    "slice crossed": lambda x: x[..., 9:4],
    "narrow": lambda x: x.narrow(-1, 0, x.shape[-1] // 2),
    "split": lambda x: x.split(32, -1),
    "split sizes": lambda x: x.split([x.shape[-2], 0], -2),
    "chunk": lambda x: x.chunk(2, -1),
    "tensor_split": lambda x: x.tensor_split(3, -2),
    "unsafe_split": lambda x: x.unsafe_split(64, -1),
    "unsafe_chunk": lambda x: x.unsafe_chunk(2, -2),
    "split_with_sizes": lambda x: x.split_with_sizes([0, x.shape[-1]], -1),
    "unsafe_split_with_sizes": lambda x: x.unsafe_split_with_sizes([x.shape[-1]], -1),
    "unbind": lambda x: x.unbind(0),
    "split, cat rows": lambda x: torch.cat(x.split(32, -2), -2),
    "split, cat columns": lambda x: torch.cat(x.split(32, -1), -1),
    "detached parts, cat": lambda x: torch.cat([p.detach() for p in x.split(32, -2)], -2),
    "cat": lambda x: torch.cat([x, x], -1),
    "concat": lambda x: torch.concat([x, x], 0),
    "stack": lambda x: torch.stack([x, x], -1),
    "vstack": lambda x: torch.vstack([x, x]),
    "squeeze": lambda x: x.squeeze(),
    "squeeze dim": lambda x: x.squeeze(-2),
    "squeeze dims": lambda x: x.squeeze((0, -1)),
    "squeeze no dims": lambda x: x.squeeze(()),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze last": lambda x: x.unsqueeze(-1),
    "[:, None]": lambda x: x[:, None],
    "expand": lambda x: x.expand(3, *x.shape),
    "expand ones": lambda x: x.unsqueeze(-1).expand(*x.shape, 4),
    "expand_as": lambda x: x.expand_as(x),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, *x.shape)),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.mT.contiguous(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": lambda x: aten.alias(x),
    "lift_fresh": lambda x: aten.lift_fresh(x),
    "to same": lambda x: x.to(torch.float32),
    "to copy": lambda x: x.to(torch.float32, copy=True),
    "cpu": lambda x: x.cpu().to(x.device),
    "as_strided same": lambda x: x.as_strided(x.shape, x.stride()),
    "as_strided same part": lambda x: (part := x[..., 3:, :]).as_strided(
        part.shape, part.stride(), part.storage_offset()
    ),
}
# These need an element.
ROWS: dict[str, Function] = {
    "select": lambda x: x.select(-1, 0),
    "[..., -1, :]": lambda x: x[..., -1, :],
    "iteration": lambda x: next(iter(x)),
    "index_select": lambda x: x.index_select(-1, positions(x, [0, 0, x.shape[-1] - 1])),
    "x[rows]": lambda x: x[positions(x, [-1, 0])],
    "x[rows 2-d]": lambda x: x[positions(x, [[0, -1, 0], [-1, 0, 0]])],
    "x[row 0-d]": lambda x: x[positions(x, 0)],
    "x[..., columns]": lambda x: x[..., positions(x, [0, -1])],
    "x[rows int32]": lambda x: x[positions(x, [0]).int()],
}
EVERY_OP = {**STRUCTURE, **ROWS}


def positions(x: Tensor, index: Any) -> Tensor:
    return torch.tensor(index, device=x.device)


def check_every_op(x8: Float8TrainingTensor) -> list[str]:
    """The ops that x8 refuses; every other one kept the property."""
    refused = []
    for name, op in (EVERY_OP if x8.numel() else STRUCTURE).items():
        try:
            if not moves_as_its_values(op, x8):
                refused.append(name)
        except Exception as e:
            raise AssertionError(f"{name} of {x8!r}") from e
    return refused


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [*BLOCKS_2D, *BLOCKS_3D], ids=block_name)
def test_structure_moves_data_and_scale_together(block: Block, device: str) -> None:
    for shape in SHAPES_2D if len(block) == 2 else SHAPES_3D:
        check_every_op(make(shape, block, device, requires_grad=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("block", [TENSORWISE, ROWWISE, (1, 1, 128)], ids=block_name)
def test_structure_without_autograd(block: Block, mode: Any, device: str) -> None:
    shape = (2, 130, 160)[3 - len(block) :]
    with mode():
        refused = check_every_op(make(shape, block, device))
    assert refused == check_every_op(make(shape, block, device, requires_grad=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape, block", [((7, 96), (1, 32)), ((2, 40, 96), (1, 32, 32))])
def test_structure_with_e8m0_scales(shape: tuple[int, ...], block: Block, device: str) -> None:
    refused = check_every_op(make(shape, block, device, torch.bfloat16, "e8m0_rceil"))
    assert refused == check_every_op(make(shape, block, device))


FLAT = {"view(-1)", "flatten", "ravel"}
TRANSPOSED = {"reshape transposed"}
PICKED_ROWS = {"x[rows]", "x[rows 2-d]", "x[rows int32]"}
PICKED_COLUMNS = {"index_select", "x[..., columns]"}
# What is refused, and nothing else; 256 x 256.
REFUSED: dict[Block, set[str]] = {
    TENSORWISE: set(),
    ROWWISE: TRANSPOSED,
    COLUMNWISE: FLAT,
    (1, 128): {
        *(*TRANSPOSED, *PICKED_COLUMNS),
        *("slice columns", "split", "unsafe_split", "split, cat columns"),
    },
    (128, 1): {
        *(*FLAT, *PICKED_ROWS),
        *("slice step", "tensor_split", "split, cat rows", "detached parts, cat"),
        "as_strided same part",
    },
    (1, 32): {*TRANSPOSED, *PICKED_COLUMNS},
    (32, 1): {*FLAT, *PICKED_ROWS, "slice step", "tensor_split", "as_strided same part"},
    (128, 128): {
        *(*FLAT, *TRANSPOSED, *PICKED_ROWS, *PICKED_COLUMNS),
        *("slice columns", "slice step", "split", "tensor_split", "unsafe_split"),
        *("split, cat rows", "split, cat columns", "detached parts, cat", "as_strided same part"),
    },
}


@pytest.mark.parametrize("block", BLOCKS_2D, ids=block_name)
def test_refusals_are_these(block: Block) -> None:
    assert set(check_every_op(make((256, 256), block))) == REFUSED[block]


ACCEPTED: list[tuple[tuple[int, ...], Block, Function, tuple[int, ...], Block]] = [
    # An activation is folded and unfolded.
    ((2, 8, 64), (1, 1, FULL), lambda x: x.view(16, 64), (16, 64), (1, FULL)),
    ((16, 64), (1, FULL), lambda x: x.view(2, 8, 64), (2, 8, 64), (1, 1, FULL)),
    ((2, 8, 256), (1, 1, 128), lambda x: x.view(-1, 256), (16, 256), (1, 128)),
    ((2, 3, 4, 64), (1, 1, 1, 32), lambda x: x.flatten(0, 2), (24, 64), (1, 32)),
    ((2, 8, 64), (FULL, FULL, FULL), lambda x: x.view(16, 64), (16, 64), TENSORWISE),
    # Heads are split off and merged.
    ((16, 256), ROWWISE, lambda x: x.view(16, 4, 64), (16, 4, 64), (1, FULL, FULL)),
    ((16, 256), (1, 128), lambda x: x.view(16, 4, 64), (16, 4, 64), (1, 2, FULL)),
    ((16, 256), (1, 128), lambda x: x.view(16, 2, 128), (16, 2, 128), (1, 1, 128)),
    ((16, 256), (1, 32), lambda x: x.view(16, 4, 64), (16, 4, 64), (1, 1, 32)),
    ((256, 16), (128, 128), lambda x: x.view(4, 64, 16), (4, 64, 16), (2, FULL, 128)),
    ((16, 4, 64), (1, FULL, FULL), lambda x: x.view(16, 256), (16, 256), ROWWISE),
    ((16, 4, 64), (1, 2, FULL), lambda x: x.view(16, 256), (16, 256), (1, 128)),
    # A dimension of length 1 comes and goes, beside blocks that do not divide the others.
    ((200, 130), (128, 128), lambda x: x.view(1, 200, 130), (1, 200, 130), (1, 128, 128)),
    ((200, 130), (128, 128), lambda x: x.view(200, 1, 130), (200, 1, 130), (128, 1, 128)),
    ((1, 200, 130), (1, 128, 128), lambda x: x.view(200, 130), (200, 130), (128, 128)),
    ((130,), (128,), lambda x: x.view(1, 130), (1, 130), (1, 128)),
    # Experts are folded where blocks end with an expert, and picked.
    ((3, 128, 96), (1, 128, 128), lambda x: x.view(-1, 96), (384, 96), (128, 128)),
    ((384, 96), (128, 128), lambda x: x.view(3, 128, 96), (3, 128, 96), (1, 128, 128)),
    ((3, 130, 96), (1, 128, 128), lambda x: x[1], (130, 96), (128, 128)),
    # Whole blocks are cut out; a FULL dimension is cut anywhere.
    ((256, 300), (128, 128), lambda x: x[128:, 128:300], (128, 172), (128, 128)),
    ((8, 300), (1, 128), lambda x: x[2:5, 256:], (3, 44), (1, 128)),
    ((8, 300), ROWWISE, lambda x: x[::3, 7:11], (3, 4), ROWWISE),
    ((8, 300), TENSORWISE, lambda x: x[1:-1, ::7], (6, 43), TENSORWISE),
    ((64, 64), (128, 128), lambda x: x[3:7, ::2], (4, 32), (128, 128)),
    # Tensor and sequence parallelism take a tensor apart and put it together.
    ((8, 64), ROWWISE, lambda x: torch.cat(x.chunk(4)), (8, 64), ROWWISE),
    ((8, 64), ROWWISE, lambda x: torch.cat(x.chunk(4, 1), 1), (8, 64), ROWWISE),
    ((8, 64), TENSORWISE, lambda x: torch.cat(x.split(3)), (8, 64), TENSORWISE),
    ((256, 192), (128, 128), lambda x: torch.cat(x.split(128)), (256, 192), (128, 128)),
    ((8, 192), (1, 32), lambda x: torch.cat(x.split(64, 1), 1), (8, 192), (1, 32)),
    ((8, 192), (1, 128), lambda x: torch.cat([x[:0], x[:3], x[3:]]), (8, 192), (1, 128)),
    # Rank 0 and 1.
    ((6,), (FULL,), lambda x: x[2], (), ()),
    ((6,), (1,), lambda x: x[2].view(1, 1), (1, 1), (FULL, FULL)),
    ((6,), (1,), lambda x: x[2].squeeze(0).unsqueeze(0), (1,), (1,)),
    ((6,), (4,), lambda x: x.t(), (6,), (4,)),
    # Without elements.
    ((0, 64), ROWWISE, lambda x: x.view(0, 8, 8), (0, 8, 8), (1, 8, FULL)),
    ((0, 64), TENSORWISE, lambda x: x.view(8, 0), (8, 0), TENSORWISE),
    ((0, 4, 64), (1, 1, FULL), lambda x: x.view(0, 64), (0, 64), ROWWISE),
    ((0, 64), (1, 32), lambda x: x.view(0, 4, 64), (0, 4, 64), (1, 1, 32)),
    ((4, 0), ROWWISE, lambda x: x.view(2, 2, 0), (2, 2, 0), (1, 1, FULL)),
]


@pytest.mark.parametrize("case", range(len(ACCEPTED)))
def test_must_be_accepted(case: int) -> None:
    shape, block, op, new_shape, new_block = ACCEPTED[case]
    x8 = make(shape, block)
    assert moves_as_its_values(op, x8)
    assert (tuple(op(x8).shape), op(x8).block) == (new_shape, new_block)


MUST_REFUSE: list[tuple[tuple[int, ...], Block, Function]] = [
    ((16, 64), COLUMNWISE, lambda x: x.view(-1)),
    ((16, 64), COLUMNWISE, lambda x: x.view(2, 8, 64).view(8, 2, 64)[0].view(-1)),
    ((16, 64), TENSORWISE, lambda x: torch.cat([x, x.clone()])),
    ((16, 64), ROWWISE, lambda x: torch.cat([x, x.clone()], 1)),
    ((16, 64), ROWWISE, lambda x: torch.cat([x, make((16, 64), COLUMNWISE)])),
    ((16, 64), ROWWISE, lambda x: torch.cat([x, x.dequantize()])),
    ((16, 64), ROWWISE, lambda x: torch.cat([x.dequantize(), x])),
    ((16, 64), ROWWISE, lambda x: torch.cat([x, x.bfloat16()])),
    ((16, 64), ROWWISE, lambda x: torch.cat([x, quantize(torch.ones(16, 64), (1, FULL), E5M2)])),
    ((16, 64), (1, 32), lambda x: torch.cat([x, make((16, 64), (1, 32), scale_mode="e8m0_ceil")])),
    ((16, 64), ROWWISE, lambda x: torch.stack([x, x.dequantize()])),
    ((16, 33), (1, 32), lambda x: torch.cat([x, x], 1)),
    ((16, 200), (1, 128), lambda x: x.view(-1)),
    ((16, 256), (1, 128), lambda x: x.view(16, 128, 2).view(2048, 2)[:, :1].view(16, 128)[:, 3:5]),
    ((16, 200), (1, 128), lambda x: x.view(16, 2, 100)),
    ((256, 256), (128, 128), lambda x: x[64:192]),
    ((256, 256), (128, 128), lambda x: x[:, 0:64]),
    ((256, 256), (128, 128), lambda x: x[::2]),
    ((256, 256), (128, 128), lambda x: x.split([100, 156])),
    ((256, 256), (128, 128), lambda x: x.flip(0)),
    ((256, 256), (128, 128), lambda x: x[positions(x, [0, 1])]),
    ((16, 64), ROWWISE, lambda x: x[x.dequantize() > 0]),
    ((16, 64), ROWWISE, lambda x: x[positions(x, [0, 1]), positions(x, [0, 1])]),
    ((16, 64), ROWWISE, lambda x: x.as_strided((8, 64), (128, 1))),
    ((16, 64), ROWWISE, lambda x: x.as_strided((16, 64), (64, 1), 1)),
    ((16, 64), ROWWISE, lambda x: x[4:].as_strided((12, 64), (64, 1), 4 * 64)),
    ((16, 64), ROWWISE, lambda x: x.view(torch.uint8)),
    ((16, 64), ROWWISE, lambda x: x.view(E4M3FNUZ.dtype)),
    ((16, 64), ROWWISE, lambda x: x.double()),
    ((16, 64), ROWWISE, lambda x: x.to(E5M2.dtype)),
    ((16, 64), ROWWISE, lambda x: x.int()),
    ((4, 0), ROWWISE, lambda x: x.view(0)),
    ((4, 0), ROWWISE, lambda x: x.view(0, 4)),
    # No structure op of ours, nor a value op that is listed.
    ((16, 64), ROWWISE, lambda x: x.repeat(2, 1)),
    ((16, 64), ROWWISE, lambda x: x.roll(1)),
    ((16, 64), ROWWISE, lambda x: x.unfold(0, 2, 2)),
    ((16, 64), ROWWISE, lambda x: x.diagonal()),
    ((16, 64), ROWWISE, lambda x: x.bernoulli()),
    ((16, 64), ROWWISE, lambda x: F.pad(x, (0, 1))),
    ((16, 64), ROWWISE, lambda x: F.embedding(positions(x, [1]), x)),
    ((16, 64), ROWWISE, lambda x: torch.linalg.inv(x[:, :16])),
    ((2, 16, 64), (1, 1, FULL), lambda x: F.conv1d(x, torch.ones(1, 16, 1))),
]


@pytest.mark.parametrize("case", range(len(MUST_REFUSE)))
def test_must_be_refused(case: int) -> None:
    shape, block, op = MUST_REFUSE[case]
    with pytest.raises(NotImplementedError) as e:
        op(make(shape, block))
    text = str(e.value)
    assert "aten." in text and "shape (" in text and "block (" in text
    assert ".dequantize()" in text and "float8.implements" in text


def refusal(op: Callable[[], Any], error: type[Exception] = NotImplementedError) -> str:
    with pytest.raises(error) as e:
        op()
    return str(e.value)


def test_refusals_in_words() -> None:
    x8 = make((256, 256), (128, 128))
    assert_expected_inline(
        refusal(lambda: x8[64:192]),
        """aten.slice.Tensor on a Float8TrainingTensor of shape (256, 256) and block (128, 128): rows 64:192:1 of dimension 0 would split blocks of 128. Call .dequantize() first, or give the op another handler with float8.implements.""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: x8.view(-1)),
        """aten.view.default on a Float8TrainingTensor of shape (256, 256) and block (128, 128): seen as (65536,), a scale block would be split. Call .dequantize() first, or give the op another handler with float8.implements.""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: torch.cat([make((4, 8), ROWWISE), make((4, 8), ROWWISE)], 1)),
        """aten.cat.default on a Float8TrainingTensor of shape (4, 8) and block (1, FULL): dimension 1 is one block, but its parts do not share one scale. Call .dequantize() first, or give the op another handler with float8.implements.""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: x8.flip(0)),
        """aten.flip.default has no handler for a Float8TrainingTensor (shape (256, 256), e4m3fn, block (128, 128)). Call .dequantize() first, or give the op a handler with float8.implements.""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: x8.double()),
        """aten._to_copy.default on a Float8TrainingTensor of shape (256, 256) and block (128, 128): it cannot become torch.float64, only torch.bfloat16, torch.float16, torch.float32. Call .dequantize() first, or give the op another handler with float8.implements.""",  # noqa: E501
    )


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.select(5, 0),
        lambda x: x.select(0, 16),
        lambda x: x.select(0, -17),
        lambda x: aten.slice(x, 2, 0, 1),
        lambda x: aten.slice(x, 0, 0, 1, 0),
        lambda x: x.split([3, 4]),
        lambda x: x.split(0),
        lambda x: x.split(-1),
        lambda x: x.split_with_sizes([20, -4]),
        lambda x: torch.cat([x, x], 2),
        lambda x: torch.cat([x, x[:, :3]]),
        lambda x: torch.stack([x, x], 3),
        lambda x: torch.stack([x, x[:3]]),
        lambda x: x.unsqueeze(4),
        lambda x: x.squeeze(2),
        lambda x: x.transpose(0, 2),
        lambda x: x.permute(0, 0),
        lambda x: x.unbind(2),
        lambda x: x.view(3, -1),
        lambda x: x.view(5, 5),
        lambda x: x.mT.view(-1),
        lambda x: x.expand(3, 64),
        lambda x: x.index_select(2, positions(x, [0])),
        lambda x: x.index_select(0, positions(x, [16])),
        lambda x: x[positions(x, [16])],
        lambda x: x[positions(x, [-17])],
    ],
)
def test_misuse_fails_as_it_does_on_a_plain_tensor(op: Function) -> None:
    x8 = make((16, 64), ROWWISE)
    with pytest.raises((RuntimeError, IndexError)) as want:
        op(x8.dequantize())
    with pytest.raises((RuntimeError, IndexError)) as got:
        op(x8)
    assert not isinstance(got.value, NotImplementedError)
    assert type(got.value) is type(want.value)


def random_op(rng: random.Random, shape: tuple[int, ...]) -> Function:
    """A structure op that a plain tensor of this shape takes."""
    ndim = len(shape)
    d, e = rng.randrange(ndim), rng.randrange(ndim)
    n = shape[d]
    start, step = rng.choice([0, 0, 32, 128, rng.randrange(n + 1)]), rng.choice([1, 1, 1, 2])
    end = rng.choice([n, n, 128, 64, rng.randrange(n + 1)])
    size = rng.choice([1, 32, 64, 128, max(n // 2, 1)])
    rows = [rng.randrange(-n, n) for _ in range(3)] if n else []
    wide = tuple(2 if k == 1 else k for k in shape)
    outer = rng.choice([f for f in (1, 2, 4, 8, 32, 64) if n % f == 0])
    split_up = (*shape[:d], outer, n // outer, *shape[d + 1 :])
    index = (slice(None),) * d
    candidates: list[Function] = [
        lambda x: x.transpose(d, e),
        lambda x: x.permute(*rng_order),
        lambda x: x.narrow(d, min(start, n), n - min(start, n)),
        lambda x: x[(*index, slice(start, end, step))],
        lambda x: x.split(size, d)[-1],
        lambda x: torch.cat(x.split(size, d), d),
        lambda x: torch.cat(x.chunk(3, d)[::-1], d),
        lambda x: torch.stack([x, x], d),
        lambda x: torch.stack(x.unbind(d)[:4], e),
        lambda x: x.flatten(min(d, e), max(d, e)),
        lambda x: x.reshape(-1),
        lambda x: x.reshape(*shape[:d], 1, *shape[d:]),
        lambda x: x.unsqueeze(d),
        lambda x: x.squeeze(),
        lambda x: x.expand(wide),
        lambda x: x.expand(2, *shape),
        lambda x: x.contiguous(),
        lambda x: x.clone(),
        lambda x: x.detach(),
    ]
    rng_order = rng.sample(range(ndim), ndim)
    if n:
        candidates += [
            lambda x: x.reshape(split_up),
            lambda x: x.reshape(split_up),
            lambda x: x.select(d, rows[0]),
            lambda x: x[(*index, positions(x, rows))],
            lambda x: x.index_select(d, positions(x, rows) % n),
        ]
    else:
        candidates.remove(candidates[8])  # stack needs a part
    return rng.choice(candidates)


def test_random_chains() -> None:
    rng, lengths = random.Random(0), [0] * 5
    for _ in range(250):
        ndim = rng.choice([2, 2, 3])
        block = rng.choice(BLOCKS_2D if ndim == 2 else BLOCKS_3D)
        shape = tuple(rng.choice([1, 2, 7, 32, 64, 130, 256]) for _ in range(ndim - 2))
        shape = tuple(min(n, 3) for n in shape)
        shape += tuple(rng.choice([1, 7, 32, 64, 96, 130, 256]) for _ in range(2))
        x8 = make(shape, block)
        truth = x8.dequantize()
        chain: list[str] = []
        for _ in range(rng.randint(1, 4)):
            if x8.ndim == 0:
                break
            op = random_op(rng, tuple(x8.shape))
            truth = op(truth)
            try:
                x8 = op(x8)
            except NotImplementedError:
                break
            chain.append(f"{tuple(x8.shape)} {block_name(x8.block)}")
            try:
                assert_valid(x8)
                assert_same_bytes(values(x8), values(truth))
            except AssertionError as e:
                raise AssertionError(f"{shape} {block_name(block)} -> {' -> '.join(chain)}") from e
        lengths[len(chain)] += 1
    assert min(lengths[1:]) > 20, lengths  # chains of every length happened


def test_view_follows_symbolic_shapes() -> None:
    def run(x: Tensor) -> Tensor:
        x8 = quantize(x, (1, 1, FULL))
        folded = x8.view(-1, x.shape[-1])
        heads = folded.view(x.shape[0], x.shape[1], 4, -1).transpose(1, 2)
        return torch.cat([h.dequantize() for h in heads.split(1, 1)], 1)

    traced = make_fx(run, tracing_mode="symbolic")(torch.randn(2, 8, 64))
    for shape in ((2, 8, 64), (3, 5, 32), (7, 2, 128)):
        x = torch.randn(shape)
        assert_same_bytes(traced(x), run(x))


# ------------------------------------------------------------------------------ shared memory

VIEWS: dict[str, Function] = {
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": lambda x: aten.alias(x),
    "view": lambda x: x.view(2, x.shape[0] // 2, x.shape[1]),
    "heads": lambda x: x.view(x.shape[0], 2, -1).transpose(0, 1),
    "t": lambda x: x.t(),
    "permute": lambda x: x.permute(1, 0),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "all rows": lambda x: x[:],
    "as_strided": lambda x: x.as_strided(x.shape, x.stride()),
    "rows": lambda x: x[4:8],
    "columns": lambda x: x[:, :32],
    "split": lambda x: x.split(32, 1)[1],
    "row": lambda x: x[3],
    "expand": lambda x: x.expand(2, *x.shape),
}
WHOLE_VIEWS = list(VIEWS)[:11]


@pytest.mark.parametrize("block", [TENSORWISE, ROWWISE, COLUMNWISE, (1, 32)], ids=block_name)
@pytest.mark.parametrize("name", VIEWS)
def test_views_see_what_is_written_into_their_base(name: str, block: Block) -> None:
    x8 = make((16, 64), block)
    view = VIEWS[name](x8)
    x8.copy_(torch.randn(16, 64) * 100)
    assert_same_bytes(values(view), values(VIEWS[name](x8)))


@pytest.mark.parametrize("block", [TENSORWISE, ROWWISE, COLUMNWISE, (1, 32)], ids=block_name)
@pytest.mark.parametrize("name", WHOLE_VIEWS)
def test_base_sees_what_is_written_into_a_whole_view(name: str, block: Block) -> None:
    x8 = make((16, 64), block)
    new = torch.randn(16, 64) * 100
    VIEWS[name](x8).copy_(VIEWS[name](new))
    assert_same_bytes(values(x8), values(quantize(new, block)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape, block, part",
    [
        ((16, 64), ROWWISE, lambda x: x[4:8]),
        ((16, 64), ROWWISE, lambda x: x[3]),
        ((16, 64), ROWWISE, lambda x: x[::2]),
        ((16, 64), ROWWISE, lambda x: x.view(2, 8, 64)[1]),
        ((16, 64), COLUMNWISE, lambda x: x[:, 5:9].t()),
        ((16, 64), (1, 32), lambda x: x[1:3, 32:]),
        ((256, 256), (128, 128), lambda x: x[128:, :128]),
        ((3, 128, 64), (1, 128, 32), lambda x: x[1]),
    ],
)
def test_base_sees_what_is_written_into_whole_blocks(
    shape: tuple[int, ...], block: Block, part: Function, device: str
) -> None:
    x8 = make(shape, block, device)
    want, new = values(x8), torch.randn(part(x8).shape, device=device) * 100
    want_part = quantize(new, part(x8).block)
    part(want).copy_(want_part)
    part(x8).copy_(new)
    assert_same_bytes(values(x8), want)


PARTS_OF_BLOCKS: dict[str, tuple[tuple[int, ...], Block, Function]] = {
    "rows of a tensorwise one": ((16, 64), TENSORWISE, lambda x: x[4:8]),
    "columns of a rowwise one": ((16, 64), ROWWISE, lambda x: x[:, :32]),
    "every second column": ((16, 64), ROWWISE, lambda x: x[:, ::2]),
    "a column": ((16, 64), ROWWISE, lambda x: x[:, 0]),
    "no column": ((16, 64), ROWWISE, lambda x: x[:, 3:3]),
    "a part of a split": ((16, 64), ROWWISE, lambda x: x.chunk(2, 1)[1]),
    "a head": ((16, 64), ROWWISE, lambda x: x.view(16, 4, 16)[:, 1]),
    "a row of a block": ((256, 256), (128, 128), lambda x: x[0]),
    "beside a ragged block": ((192, 4), (128, FULL), lambda x: x[:128, :3]),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PARTS_OF_BLOCKS)
def test_a_part_of_a_block_cannot_be_written(name: str, mode: Any) -> None:
    """Its new scale would change the elements of the block that the view has not."""
    shape, block, part = PARTS_OF_BLOCKS[name]
    with mode():
        x8 = make(shape, block)
        before, view = values(x8), part(x8)
        for src in (torch.full(view.shape, 1e4), quantize(torch.ones(view.shape), view.block)):
            assert "it is a view whose scales" in refusal(lambda v=view, s=src: v.copy_(s))
        assert_same_bytes(values(x8), before)


def test_a_view_that_had_to_copy_its_scales_cannot_be_written() -> None:
    x8 = make((2, 8, 256), (1, 1, 128))
    folded = x8.view(16, 256)
    assert folded.scale.untyped_storage().data_ptr() != x8.scale.untyped_storage().data_ptr()
    assert_expected_inline(
        refusal(lambda: folded.copy_(torch.ones(16, 256))),
        """aten.copy_.default on a Float8TrainingTensor of shape (16, 256) and block (1, 128): it is a view whose scales hold for elements outside it too, or are a copy, so that new values in it would change or leave the tensor it views. Call .dequantize() first, or give the op another handler with float8.implements.""",  # noqa: E501
    )


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.clone(),
        lambda x: x.t().contiguous(),
        lambda x: x.t().reshape(-1, 2),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.to(torch.float32, copy=True),
        lambda x: torch.cat([x, x[:0]]),
        lambda x: torch.cat(x.chunk(2)),
        lambda x: torch.cat(x.chunk(2, 1), 1),
        lambda x: torch.stack([x, x]),
        lambda x: x[positions(x, [1, 0])],
        lambda x: x.index_select(1, positions(x, [1, 0])),
    ],
)
@pytest.mark.parametrize("block", [TENSORWISE, ROWWISE, COLUMNWISE], ids=block_name)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_copies_share_nothing(op: Function, block: Block, mode: Any) -> None:
    with mode():
        x8 = make((16, 64), block)
        before = values(x8)
        try:
            copied = op(x8)
        except NotImplementedError:
            pytest.skip("refused")
        copied.copy_(torch.full(copied.shape, 1e4))
        assert_same_bytes(values(x8), before)


def test_assignment_by_index() -> None:
    x8, rows = make((8, 32), ROWWISE), torch.randn(2, 32)
    want = values(x8)
    want[3:5] = quantize(rows, ROWWISE).dequantize()
    x8[3:5] = rows
    assert_same_bytes(values(x8), want)
    x8[...] = torch.zeros(8, 32)
    assert not values(x8).any()
    for index in ((slice(None), 3), (positions(x8, [0]),), (values(x8) > 0,)):
        with pytest.raises(NotImplementedError):
            x8[index] = 1.0


# ---------------------------------------------------------------------------------------- copy_


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("src_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("block", [TENSORWISE, ROWWISE, (128, 128), (1, 128)], ids=block_name)
def test_copy_from_high_precision_quantises(
    block: Block, src_dtype: torch.dtype, device: str
) -> None:
    dst = make((16, 256), block, device, torch.bfloat16)
    src = (torch.randn(16, 256) * 10).to(src_dtype)  # from the CPU
    assert dst.copy_(src) is dst
    want = quantize(src.to(device, torch.bfloat16), block)
    assert_same_bytes(dst.qdata, want.qdata)
    assert_same_bytes(dst.scale.contiguous(), want.scale.contiguous())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dst_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_copy_to_high_precision_dequantises(dst_dtype: torch.dtype, device: str) -> None:
    src = make((16, 64), (1, 32), device)
    dst = torch.zeros(2, 16, 64, dtype=dst_dtype, device=device)
    dst.copy_(src)
    assert_same_bytes(dst, values(src).to(dst_dtype).expand(2, 16, 64).contiguous())


@pytest.mark.parametrize("device", DEVICES)
def test_copy_between_fp8_tensors(device: str) -> None:
    src = make((16, 64), (1, 32), device)
    for same in (make((16, 64), (1, 32), device, dtype) for dtype in (torch.float32, torch.half)):
        same.copy_(src)
        assert_same_bytes(same.qdata, src.qdata)
        assert_same_bytes(same.scale.contiguous(), src.scale.contiguous())
    for other in (
        make((16, 64), ROWWISE, device),
        make((16, 64), (1, 32), device, scale_mode="e8m0_rceil"),
        quantize(torch.ones(16, 64, device=device), (1, 32), E5M2),
        quantize(torch.ones(16, 64, device=device), (1, 32), E4M3FNUZ),
    ):
        other.copy_(src)
        microscaled = other.scale.dtype == float8.E8M0.dtype
        want = quantize(
            values(src).to(other.orig_dtype),
            other.block,
            other.format,
            "e8m0_rceil" if microscaled else "fp32",
        )
        assert other.format is want.format
        assert_same_bytes(values(other), values(want))
        assert_valid(other)


def test_copy_broadcasts_and_checks_shapes() -> None:
    dst, row = make((16, 64), ROWWISE), torch.randn(64)
    dst.copy_(row)
    assert_same_bytes(values(dst), values(quantize(row.expand(16, 64), ROWWISE)))
    dst.copy_(make((1, 64), ROWWISE))
    with pytest.raises(RuntimeError, match="must match"):
        dst.copy_(torch.ones(15, 64))
    with pytest.raises(RuntimeError):
        dst.expand(2, 16, 64).copy_(torch.ones(2, 16, 64))
    empty = make((0, 64), TENSORWISE)
    assert empty.copy_(torch.ones(0, 64)).shape == (0, 64)


# -------------------------------------------------------------------------------------- factories


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "op",
    [
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        torch.rand_like,
        torch.randn_like,
        lambda x: torch.full_like(x, 2.5),
        lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format),
        lambda x: x.new_empty(x.shape),
        lambda x: x.new_empty_strided(x.shape, (1, 16)),
        lambda x: x.new_zeros(x.shape),
        lambda x: x.new_ones(x.shape),
        lambda x: x.new_full(x.shape, 2.5),
        lambda x: x.new_tensor([[1.0]]).expand(x.shape).contiguous(),
    ],
)
def test_factories_give_plain_tensors_of_orig_dtype(op: Function, device: str) -> None:
    x8 = make((16, 64), (1, 32), device, torch.bfloat16)
    made, model = op(x8), op(x8.dequantize())
    assert type(made) is Tensor
    assert (made.dtype, made.shape, made.device) == (torch.bfloat16, x8.shape, x8.device)
    assert made.stride() == model.stride()


def test_factories_take_a_dtype_and_a_device() -> None:
    x8 = make((16, 64), ROWWISE)
    assert torch.zeros_like(x8, dtype=torch.int32).dtype == torch.int32
    assert x8.new_zeros(3, dtype=torch.float64).dtype == torch.float64
    assert torch.empty_like(x8, device="meta").device.type == "meta"
    assert aten.is_same_size(x8, x8.dequantize()) and not aten.is_same_size(x8, x8.t())


# -------------------------------------------------------------------------------------- value ops

# What the overloads of some op take, x in FP8 and y plain; the others take x, and y or a number.
ARGUMENTS: dict[str, Callable[[Any, Tensor], tuple[Any, ...]]] = {
    "silu_backward": lambda x, y: (y, x),
    "gelu_backward": lambda x, y: (y, x),
    "mse_loss": lambda x, y: (x, y),
    "mse_loss_backward": lambda x, y: (y[0, 0], x, y, 1),
    "topk": lambda x, y: (x, 5),
    "_softmax": lambda x, y: (x, 1, False),
    "_log_softmax": lambda x, y: (x, 1, False),
    "logsumexp": lambda x, y: (x, [1]),
    "cumsum": lambda x, y: (x, 0),
    "isclose": lambda x, y: (x, y),
    "allclose": lambda x, y: (x, y),
    "equal": lambda x, y: (y, x),
    "is_nonzero": lambda x, y: (x[0, 0],),
    "_local_scalar_dense": lambda x, y: (x[0, 0],),
    "_is_all_true": lambda x, y: (x > 0,),
    "_is_any_true": lambda x, y: (x > 0,),
    "div.Tensor_mode": lambda x, y: (y, x),
    "div.Scalar_mode": lambda x, y: (x, 3.0),
    "pow.Scalar": lambda x, y: (2.0, x),
    "pow.Tensor_Tensor": lambda x, y: (y, x),
    "clamp": lambda x, y: (x, -0.5, 1.0),
    "clamp.Tensor": lambda x, y: (x, None, y),
    "clamp_min": lambda x, y: (x, -0.5),
    "clamp_max": lambda x, y: (x, 0.5),
    "maximum": lambda x, y: (x, y),
    "minimum": lambda x, y: (x, y),
    "where.self": lambda x, y: (y > 0, x, y),
    "masked_fill.Scalar": lambda x, y: (x, y > 0, 2.0),
    "masked_fill.Tensor": lambda x, y: (x, y > 0, y[0, 0]),
    "sum.dim_IntList": lambda x, y: (x, [0]),
    "mean.dim": lambda x, y: (x, [1], True),
    "amax": lambda x, y: (x, [-1]),
    "amin": lambda x, y: (x, [0, 1]),
    "max.other": lambda x, y: (y, x),
    "min.other": lambda x, y: (x, x),
    "any.dims": lambda x, y: (x, [0, 1]),
    "all.dims": lambda x, y: (x, [0]),
    "linalg_vector_norm": lambda x, y: (x, 2.0, [1]),
    "norm.ScalarOpt_dim": lambda x, y: (x, 2.0, [1]),
    "count_nonzero.dim_IntList": lambda x, y: (x, [1]),
    "std.correction": lambda x, y: (x, [1]),
    "var.correction": lambda x, y: (x, [1]),
    "std_mean.correction": lambda x, y: (x, [0]),
    "var_mean.correction": lambda x, y: (x, [1]),
}
KEYWORDS: dict[str, dict[str, Any]] = {
    "aminmax": {"dim": 1},
    "div.Tensor_mode": {"rounding_mode": "floor"},
    "div.Scalar_mode": {"rounding_mode": "trunc"},
    "sort.stable": {"stable": True, "dim": 1},
    "add.Tensor": {"alpha": 2},
    "sub.Tensor": {"alpha": 3},
}
VALUE_OPS = {
    str(op).removeprefix("aten.").removesuffix(".default"): op
    for op, handler in HANDLERS.items()
    if handler is dequantized
}
NO_DERIVATIVE = {"silu_backward", "gelu_backward", "aminmax"}  # in some version of torch
IN_PLACE = {"add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor"}


def arguments(name: str, x: Any, y: Tensor) -> tuple[Any, ...]:
    if name in ARGUMENTS:
        return ARGUMENTS[name](x, y)
    overload = name.partition(".")[2]
    second: dict[str, Any] = {"Tensor": y, "Scalar": 2.0, "Tensor_Scalar": 2.0, "dim": 1}
    return (x, second[overload]) if overload in second else (x,)


def test_no_product_and_nothing_random_is_a_value_op() -> None:
    never = ("mm", "mv", "dot", "matmul", "linear", "conv", "rand", "bernoulli", "dropout")
    assert not [name for name in VALUE_OPS if any(part in name for part in never)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(set(VALUE_OPS) - IN_PLACE - {"dequantize.self"}))
def test_value_op_is_that_of_the_values(name: str, device: str) -> None:
    op, keywords = VALUE_OPS[name], KEYWORDS.get(name, {})
    leaf = torch.randn(6, 40, device=device, requires_grad=True)
    y = torch.randn(6, 40, device=device)
    x8 = quantize(leaf, (1, 32))
    plain = values(x8).requires_grad_()
    got = op(*arguments(name, x8, y), **keywords)
    want = op(*arguments(name, plain, y), **keywords)
    if not isinstance(want, Tensor | tuple):
        assert got == want
        return
    if isinstance(want, Tensor):
        got, want = (got,), (want,)
    for g, w in zip(got, want, strict=True):
        assert type(g) is Tensor and g.requires_grad == w.requires_grad
        assert_same_bytes(values(g), values(w))
    if name in NO_DERIVATIVE or not any(w.requires_grad for w in want):
        return
    for outputs in (got, want):
        weights = [torch.linspace(1, 2, o.numel(), device=device).view(o.shape) for o in outputs]
        pairs = zip(outputs, weights, strict=True)
        sum((o * weight).sum() for o, weight in pairs if o.requires_grad).backward()
    assert leaf.grad is not None and plain.grad is not None
    assert_same_bytes(leaf.grad, plain.grad)


def test_value_ops_without_autograd() -> None:
    with torch.inference_mode():
        x8, y = make((6, 40), (1, 32)), torch.randn(6, 40)
        for name in sorted(set(VALUE_OPS) - IN_PLACE - {"dequantize.self"}):
            op, keywords = VALUE_OPS[name], KEYWORDS.get(name, {})
            got = op(*arguments(name, x8, y), **keywords)
            want = op(*arguments(name, values(x8), y), **keywords)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_python_arithmetic() -> None:
    x8, y = make((6, 40), ROWWISE), torch.randn(6, 40)
    x = x8.dequantize()
    pairs = [
        (x8 + y, x + y),
        (y - x8, y - x),
        (1 - x8, 1 - x),
        (x8 / 3, x / 3),
        (1 / x8, 1 / x),
        (x8 * x8, x * x),
        (x8**2, x**2),
        (-x8, -x),
        (abs(x8), abs(x)),
        (x8 == y, x == y),
        (x8 >= 0, x >= 0),
        (torch.where(x8 > 0, x8, 0.0), torch.where(x > 0, x, 0.0)),
        (x8.std(), x.std()),
        (x8.var(0), x.var(0)),
        (x8.norm(), x.norm()),
        (torch.linalg.norm(x8), torch.linalg.norm(x)),
        (x8.max(1).values, x.max(1).values),
        (F.softmax(x8, -1), F.softmax(x, -1)),
        (F.silu(x8), F.silu(x)),
    ]
    for got, want in pairs:
        assert type(got) is Tensor
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert x8[0, 0].item() == x[0, 0].item() == float(x8[0, 0])
    assert bool(x8[0, 0] != 0) and torch.equal(x8, x) and torch.allclose(x8, x)


def test_arithmetic_in_place_goes_into_plain_tensors_only() -> None:
    x8 = make((6, 40), ROWWISE)
    for method in ("add_", "sub_", "mul_", "div_"):
        y = torch.randn(6, 40)
        want = getattr(y.clone(), method)(x8.dequantize())
        assert_same_bytes(getattr(y, method)(x8), want)
        assert "in place" in refusal(lambda m=method, y=y: getattr(x8, m)(y))


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.zero_(),
        lambda x: x.fill_(1.0),
        lambda x: x.normal_(),
        lambda x: x.clamp_(0, 1),
        lambda x: x.add_(1),
        lambda x: x.t_(),
        lambda x: x.resize_(3),
        lambda x: x.index_copy_(0, positions(x, [0]), x[:1]),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: torch.add(x, x, out=x),
    ],
)
def test_changes_in_place_are_refused(op: Function) -> None:
    x8 = make((6, 40), ROWWISE)
    before = values(x8)
    assert "would change FP8 values in place" in refusal(lambda: op(x8))
    assert_same_bytes(values(x8), before)


def test_out_of_a_plain_tensor_is_not_called_a_change_in_place() -> None:
    x8, out = make((6, 40), ROWWISE), torch.empty(6, 40)
    text = refusal(lambda: torch.add(out, x8, out=out))
    assert "in place" not in text and ".dequantize()" in text


@pytest.mark.parametrize("block", [TENSORWISE, ROWWISE], ids=block_name)
def test_value_ops_in_a_trace(block: Block) -> None:
    """A backward that is traced again, as for DTensor, meets them outside any handler."""

    def run(x: Tensor) -> list[Tensor]:
        x8 = quantize(x, block)
        return [x8.abs(), x8.amax(), x8.max(), x8.max(1).values, x8.isnan(), x8.sum()]

    x = torch.randn(8, 32)
    traced = make_fx(run)(x)
    for got, want in zip(traced(x), run(x), strict=True):
        assert_same_bytes(got, want)
    x8 = quantize(x, block)
    assert_same_bytes(make_fx(lambda t: t.abs().amax())(x8)(x8), x8.abs().amax())


# ---------------------------------------------------------------------------------------- matmul

E8M0 = "e8m0_rceil"
# Blocks of a [M, K] and b [K, N], and how their scales are made.
PRODUCTS: dict[str, tuple[Block, Block, str]] = {
    "tensorwise": (TENSORWISE, TENSORWISE, "fp32"),
    "rowwise": (ROWWISE, COLUMNWISE, "fp32"),
    "row by tensor": (ROWWISE, TENSORWISE, "fp32"),
    "tensor by row": (TENSORWISE, COLUMNWISE, "pow2"),
    "1x128 by 128x128": ((1, 128), (128, 128), "fp32"),
    "128x128 by 1x128": ((128, 128), (128, 1), "fp32"),
    "1x128 by 1x128": ((1, 128), (128, 1), "pow2"),
    "128x128": ((128, 128), (128, 128), "fp32"),
    "mxfp8": ((1, 32), (32, 1), E8M0),
    "1x32 in float32": ((1, 32), (32, 1), "fp32"),
    "odd": ((3, 48), (48, FULL), "fp32"),
}


def truth(a8: Tensor, b8: Tensor) -> Tensor:
    """The product of the dequantised operands in float64."""
    return exact(a8) @ exact(b8)


def exact(x: Tensor) -> Tensor:
    if isinstance(x, Float8TrainingTensor):
        x = torch.ops.float8.dequantize(x.qdata, x.scale, x.block, torch.float32)
    return x.detach().double()


def assert_near(got: Tensor, want: Tensor) -> None:
    """To float32 sums and one rounding; on a GPU to its tensor cores' sums, which keep 13 bits."""
    assert type(got) is Tensor and got.shape == want.shape
    rounding = torch.finfo(got.dtype).eps / 2
    sums = 1e-6 if got.device.type == "cpu" else 2e-3
    assert relative_error(got, want) <= rounding + sums


@pytest.fixture
def fp8_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Block, Block]]:
    """The blocks of the operands of every FP8 GEMM that the table starts, in order."""
    calls: list[tuple[Block, Block]] = []

    def spy(a: Any, b: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((a.block, b.block))
        return multiply(a, b, *args, **kwargs)

    monkeypatch.setattr(table_of_products, "multiply", spy)
    return calls


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("m, k, n", [(17, 96, 33), (1, 160, 5), (16, 256, 1), (3, 1, 4)])
def test_product_of_two_fp8_matrices(
    name: str, m: int, k: int, n: int, device: str, fp8_products: list[Any]
) -> None:
    block_a, block_b, mode = PRODUCTS[name]
    for dtype in (torch.bfloat16, torch.float32):
        a8 = make((m, k), block_a, device, dtype, mode)
        b8 = make((k, n), block_b, device, dtype, mode)
        for got in (a8 @ b8, torch.mm(a8, b8), torch.matmul(a8, b8)):
            assert got.dtype == dtype
            assert_near(got, truth(a8, b8))
        assert_near(F.linear(a8, b8.t().contiguous()), truth(a8, b8))
    assert len(fp8_products) == 8


@pytest.mark.parametrize("device", DEVICES)
def test_every_way_to_multiply(device: str, fp8_products: list[Any]) -> None:
    a8, b8 = make((16, 64), ROWWISE, device), make((64, 32), COLUMNWISE, device)
    bias, product = torch.randn(32, device=device), truth(a8, b8)
    with_bias = product + bias.double()
    assert_near(torch.einsum("mk,kn->mn", a8, b8), product)
    assert_near(torch.addmm(bias, a8, b8), with_bias)
    assert_near(torch.addmm(bias, a8, b8, beta=2, alpha=0.5), product * 0.5 + bias.double() * 2)
    nan = torch.full((32,), float("nan"), device=device)
    assert_near(torch.addmm(nan, a8, b8, beta=0), product)
    assert_near(torch.addmm(make((16, 32), TENSORWISE, device) * 0, a8, b8), product)
    assert_near(F.linear(a8, b8.t(), bias), with_bias)
    assert_near(F.linear(a8.view(2, 8, 64), b8.t(), bias), with_bias.view(2, 8, 32))
    assert_near(F.linear(a8.view(2, 2, 4, 64), b8.t()), product.view(2, 2, 4, 32))
    assert_near(a8.view(2, 8, 64) @ b8, product.view(2, 8, 32))
    half = torch.mm(a8.bfloat16(), b8.bfloat16(), out_dtype=torch.float32)
    assert half.dtype == torch.float32
    assert_near(half, product)
    column = b8[:, 3]
    assert column.block == (FULL,)
    assert_near(torch.mv(a8, column), product[:, 3])
    assert_near(a8 @ column, product[:, 3])
    assert_near(a8[2] @ b8, product[2])
    assert_near(torch.dot(a8[2], column), product[2, 3])
    batch = a8.view(4, 4, 64)
    others = torch.stack([b8[:, 8 * i : 8 * i + 8] for i in range(4)])
    products = torch.stack([product.view(4, 4, 32)[i, :, 8 * i : 8 * i + 8] for i in range(4)])
    added = torch.randn(4, 4, 8, device=device)
    fp8_products.clear()
    assert_near(torch.bmm(batch, others), products)
    assert_near(batch @ others, products)
    assert_near(torch.einsum("bmk,bkn->bmn", batch, others), products)
    assert_near(torch.baddbmm(added, batch, others, beta=3), products + added.double() * 3)
    assert_near(batch @ b8, product.view(4, 4, 32))
    assert len(fp8_products) == 4 * 4 + 1
    assert torch.bmm(batch[:0], others[:0]).shape == (0, 4, 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_products_without_autograd(mode: Any, device: str) -> None:
    with mode():
        for block_a, block_w, how in ((ROWWISE, ROWWISE, "fp32"), ((1, 32), (1, 32), E8M0)):
            a8 = make((16, 64), block_a, device, scale_mode=how)
            w8 = make((32, 64), block_w, device, scale_mode=how)
            bias = torch.randn(32, device=device)
            want = truth(a8, w8.t())
            assert_near(F.linear(a8, w8), want)
            assert_near(F.linear(a8.view(2, 8, 64), w8, bias), (want + bias).view(2, 8, 32))
            assert_near(a8.view(2, 8, 64) @ w8.t(), want.view(2, 8, 32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m, k, n", [(0, 64, 32), (16, 0, 32), (16, 64, 0), (0, 0, 0)])
def test_products_without_elements(m: int, k: int, n: int, device: str) -> None:
    for block_a, block_b, mode in PRODUCTS.values():
        a8 = make((m, k), block_a, device, torch.bfloat16, mode)
        b8 = make((k, n), block_b, device, torch.bfloat16, mode)
        out = a8 @ b8
        assert out.shape == (m, n) and out.dtype == torch.bfloat16 and not out.any()


# ------------------------------------------------------------------ one high-precision operand

# Blocks of the FP8 operand [rows, K], and those that the other one [rows, K] is given.
MATCHES: list[tuple[Block, Block, str]] = [
    (TENSORWISE, TENSORWISE, "fp32"),
    (ROWWISE, ROWWISE, "fp32"),
    ((128, 128), (1, 128), "fp32"),
    ((1, 128), (1, 128), "fp32"),
    ((1, 32), (1, 32), E8M0),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block, other_block, mode", MATCHES)
def test_high_precision_operand_is_quantised_to_match(
    block: Block, other_block: Block, mode: str, device: str, fp8_products: list[Any]
) -> None:
    w8 = make((40, 160), block, device, torch.bfloat16, mode)
    x = torch.randn(24, 160, device=device, dtype=torch.bfloat16)
    match = quantize(x, other_block, scale_mode=mode)
    want = truth(match, w8.t())
    assert_near(x @ w8.t(), want)
    assert_near(w8 @ x.t(), want.t())
    assert_near(F.linear(x, w8), want)
    assert_near(F.linear(x.view(2, 12, 160), w8), want.view(2, 12, 40))
    row = truth(quantize(x[:1], other_block, scale_mode=mode), w8.t())[0]
    assert_near(torch.mv(w8, x[0]), row)
    assert_near(x[0] @ w8.t(), row)
    assert len(fp8_products) == 6
    batch = x.view(2, 12, 160)
    matches = [quantize(matrix, other_block, scale_mode=mode) for matrix in batch]
    wants = torch.stack([truth(matrix, w8.t()) for matrix in matches])
    assert_near(torch.bmm(batch, w8.t().expand(2, 160, 40)), wants)
    assert len(fp8_products) == 8


def test_high_precision_operand_takes_the_other_ones_flavour() -> None:
    w8 = quantize(torch.randn(8, 32), ROWWISE, E4M3FNUZ)
    x = torch.randn(4, 32)
    assert_near(x @ w8.t(), truth(quantize(x, ROWWISE, E4M3FNUZ), w8.t()))
    w8 = quantize(torch.randn(8, 32), ROWWISE, E5M2)
    assert_near(x @ w8.t(), truth(quantize(x, ROWWISE, E4M3FN), w8.t()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "block, mode", [(TENSORWISE, "fp32"), ((128, 128), "fp32"), ((32, 32), E8M0)]
)
def test_frozen_weight_keeps_dgrad_in_fp8(
    block: Block, mode: str, device: str, fp8_products: list[Any]
) -> None:
    w8 = torch.nn.Parameter(make((40, 160), block, device, torch.bfloat16, mode), False)
    x = torch.randn(2, 12, 160, device=device, dtype=torch.bfloat16, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = F.linear(x, w8)
        g = torch.randn_like(y)
        y.backward(g)
    assert len(fp8_products) == 2
    match = block if block == TENSORWISE else (1, block[1])
    g8 = quantize(g.view(24, 40), match, scale_mode=mode)
    assert x.grad is not None
    assert_near(x.grad, truth(g8, w8).view(2, 12, 160))


def test_frozen_rowwise_weight_warns_once_in_backward(fp8_products: list[Any]) -> None:
    w8 = torch.nn.Parameter(make((40, 160), ROWWISE), False)
    grads = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            x = torch.randn(24, 160, requires_grad=True)
            y = F.linear(x, w8)
            g = torch.randn_like(y)
            y.backward(g)
            grads.append((x.grad, g))
    assert len(fp8_products) == 3  # forward stays in FP8
    for got, g in grads:
        assert_near(got, g.double() @ exact(w8))
    (warning,) = caught
    assert warning.category is UserWarning
    assert_expected_inline(
        str(warning.message),
        """aten.mm.default of shapes (24, 40) and (40, 160) runs in torch.float32: the FP8 operand's blocks (1, FULL) do not contain the contraction. Quantise it along the contraction, or with a block that holds both ways, such as (128, 128), to multiply in FP8.""",  # noqa: E501
    )


def test_both_gradients_through_fp8_operands() -> None:
    """Straight through the casts: those of the product of the dequantised operands."""
    for block_a, block_b, mode in PRODUCTS.values():
        a = torch.randn(24, 96, requires_grad=True)
        b = torch.randn(96, 40, requires_grad=True)
        a8, b8 = quantize(a, block_a, scale_mode=mode), quantize(b, block_b, scale_mode=mode)
        g = torch.randn(24, 40)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (a8 @ b8).backward(g)
        assert a.grad is not None and b.grad is not None
        # An operand whose blocks hold the other contraction multiplies g cast to FP8, to 5 bits.
        assert relative_error(a.grad, g.double() @ exact(b8).t()) < 0.05
        assert relative_error(b.grad, exact(a8).t() @ g.double()) < 0.05


def test_a_frozen_weight_never_drops_gradients() -> None:
    """Also to what lies before it, with either operand and in every product."""
    first = torch.nn.Linear(32, 64)
    x = torch.randn(8, 32)
    products: list[Callable[[Tensor, Any], Tensor]] = [
        lambda h, w8: F.linear(h, w8),
        lambda h, w8: F.linear(h.view(2, 4, 64), w8, torch.ones(48)),
        lambda h, w8: h @ w8.t(),
        lambda h, w8: (w8 @ h.t()).t(),
        lambda h, w8: torch.addmm(torch.ones(48), h, w8.t()),
        lambda h, w8: torch.bmm(h.view(2, 4, 64), w8.t().expand(2, 64, 48)),
        lambda h, w8: torch.einsum("bk,nk->bn", h, w8),
        lambda h, w8: torch.stack([torch.mv(w8, row) for row in h]),
        lambda h, w8: quantize(h, ROWWISE) @ w8.t(),
    ]
    for block in (TENSORWISE, ROWWISE, (128, 128)):
        w8 = torch.nn.Parameter(make((48, 64), block), requires_grad=False)
        for product in products:
            first.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                product(first(x), w8).pow(2).sum().backward()
            want = torch.nn.functional.linear(first(x), w8.dequantize())
            expected = torch.autograd.grad(want.pow(2).sum(), first.weight)[0]
            assert first.weight.grad is not None and w8.grad is None
            if product is not products[1]:  # which adds a bias
                assert relative_error(first.weight.grad, expected) < 0.15


# --------------------------------------------------------------------------------------- grouped

# Tokens, and how many of them each group has: none, one, ends inside blocks, and some left over.
ROUTINGS: list[tuple[int, list[int]]] = [
    (37, [5, 0, 17, 3]),
    (400, [0, 128, 1, 130, 0]),
    (33, [33]),
    (20, [0, 0, 0]),
]


def ends(sizes: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def grouped_truth(a8: Tensor, b8: Tensor, offs: Tensor) -> Tensor:
    """Group by group in float64, of the dequantised operands; rows of no group are zero."""
    a, b, end = exact(a8), exact(b8), offs.tolist()
    spans = list(zip([0, *end[:-1]], end, strict=True))
    if a.ndim == 3:
        return grouped_truth(b.mT, a.mT, offs).mT
    if b.ndim == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in spans])
    out = a.new_zeros(a.shape[0], b.shape[2])
    for g, (i, j) in enumerate(spans):
        out[i:j] = a[i:j] @ b[g]
    return out


def poison(x: Tensor, held: int, block: int = 1) -> Tensor:
    """x with NaN in the rows that share no block with the first ``held``."""
    rest = x.shape[0] if block == FULL else held + -held % block
    return torch.where(torch.arange(len(x), device=x.device)[:, None] < rest, x, float("nan"))


def tokens_of(
    count: int, features: int, held: int, block: Block, device: str, mode: str = "fp32"
) -> Float8TrainingTensor:
    """Rows [T, features] as ``make`` makes them, poisoned after those of groups."""
    x = make((count, features), (1, 1), device, torch.bfloat16).dequantize()
    return quantize(poison(x, held, block[0]), block, scale_mode=mode)


@pytest.fixture
def grouped_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Block, Block]]:
    """How every grouped FP8 product multiplies, and the blocks of its operands, in order."""
    calls: list[tuple[str, Block, Block]] = []
    for name in ("_multiply_rows", "_multiply_columns"):

        def spy(a: Any, b: Any, *args: Any, name: str = name) -> Tensor:
            calls.append((name.removeprefix("_multiply_"), a.block, b.block))
            return multiply_grouped[name](a, b, *args)

        monkeypatch.setattr(table_of_grouped, name, spy)
    return calls


multiply_grouped = {
    name: getattr(table_of_grouped, name) for name in ("_multiply_rows", "_multiply_columns")
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_grouped_product_of_rows(name: str, device: str, grouped_products: list[Any]) -> None:
    block_a, block_b, mode = PRODUCTS[name]
    for count, sizes in ROUTINGS:
        offs, k, n, held = ends(sizes, device), 160, 33, sum(sizes)
        a8 = tokens_of(count, k, held, block_a, device, mode)
        for lead in (1, FULL, 2):  # scales of one matrix, or of several
            stack = make((len(sizes), n, k), (lead, *block_b[::-1]), device, torch.bfloat16, mode)
            for b8 in (stack.mT, stack.mT.contiguous()):
                want = grouped_truth(a8, b8, offs)
                got = F.grouped_mm(a8, b8, offs=offs)
                assert got.dtype == torch.bfloat16 and not got[held:].any()
                assert_near(got, want)
                transposed = F.grouped_mm(b8.mT, a8.t(), offs=offs)
                assert transposed.is_contiguous()  # as of torch
                assert_near(transposed, want.mT)
                wide = torch._grouped_mm(a8, b8, offs, out_dtype=torch.float32)
                assert wide.dtype == torch.float32
                assert_near(wide, want)
    assert {how for how, *_ in grouped_products} == {"rows"}
    assert len(grouped_products) == len(ROUTINGS) * 3 * 2 * 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_grouped_product_of_columns(name: str, device: str, grouped_products: list[Any]) -> None:
    """Blocks of scales go across the borders of groups: their tokens are told apart."""
    block_a, block_b, mode = PRODUCTS[name]
    for count, sizes in ROUTINGS:
        offs, n, k, held = ends(sizes, device), 33, 40, sum(sizes)
        a8 = tokens_of(count, n, held, block_a[::-1], device, mode).t()
        b8 = tokens_of(count, k, held, block_b, device, mode)
        for left, right in ((a8, b8), (a8.contiguous(), b8.t().contiguous().t())):
            got = F.grouped_mm(left, right, offs=offs)
            assert got.dtype == torch.bfloat16 and got.shape == (len(sizes), n, k)
            assert_near(got, grouped_truth(a8, b8, offs))
            for g, size in enumerate(sizes):
                assert size or not got[g].any()
            half = torch._grouped_mm(left, right, offs, out_dtype=torch.float32)
            assert_near(half, grouped_truth(a8, b8, offs))
    assert {how for how, *_ in grouped_products} == {"columns"}


@pytest.mark.parametrize("device", DEVICES)
def test_one_block_of_columns_by_whichever_name(device: str) -> None:
    """Blocks that are longer than the tokens, and FULL ones."""
    offs = ends([5, 0, 17], device)
    for inner_a, inner_b in ((128, FULL), (FULL, 128), (48, 200)):
        a8 = make((33, 37), (1, inner_a), device)
        b8 = make((37, 40), (inner_b, 1), device)
        assert_near(F.grouped_mm(a8, b8, offs=offs), grouped_truth(a8, b8, offs))


@pytest.mark.parametrize("device", DEVICES)
def test_columns_of_a_group_see_no_other_groups_scale(device: str) -> None:
    """Every group between blocks of NaN; one without tokens may lie inside such a block."""
    x = torch.randn(160, 40, device=device)
    x[32:64] = x[96:128] = float("nan")
    offs = torch.tensor([32, 40, 40, 70, 90, 100, 140, 160], dtype=torch.int32, device=device)
    for block in (1, 32), (40, 32):
        a8, b8 = quantize(x.t().contiguous(), block), quantize(x, block[::-1])
        got = F.grouped_mm(a8, b8, offs=offs)
        want = grouped_truth(a8, b8, offs)
        clean = [0, 2, 4, 7]
        assert_near(got[clean], want[clean])
        assert not got[2].any() and got[[1, 3, 5, 6]].isnan().all()
        assert want[[1, 3, 5, 6]].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_grouped_product_of_two_stacks_is_bmm(device: str, fp8_products: list[Any]) -> None:
    for block_a, block_b, mode in PRODUCTS.values():
        a8 = make((3, 7, 96), (1, *block_a), device, torch.bfloat16, mode)
        b8 = make((3, 96, 5), (1, *block_b), device, torch.bfloat16, mode)
        assert_near(F.grouped_mm(a8, b8), exact(a8) @ exact(b8))
    assert len(fp8_products) == 3 * len(PRODUCTS)
    assert F.grouped_mm(a8, b8, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block, other_block, mode", MATCHES)
def test_grouped_high_precision_operand_is_quantised_to_match(
    block: Block, other_block: Block, mode: str, device: str, grouped_products: list[Any]
) -> None:
    for count, sizes in ROUTINGS:
        groups, offs, k, n, held = len(sizes), ends(sizes, device), 160, 40, sum(sizes)
        x = poison(torch.randn(count, k, device=device).bfloat16(), held)
        # What tokens of no group hold decides about nobody's scale.
        clean = torch.where(torch.arange(count, device=device)[:, None] < held, x, 0)
        x8 = quantize(clean, other_block, scale_mode=mode)
        w8 = make((groups, n, k), (1, *block), device, torch.bfloat16, mode)
        want = grouped_truth(x8, w8.mT, offs)
        assert_near(F.grouped_mm(x, w8.mT, offs=offs), want)
        assert_near(F.grouped_mm(w8, x.t(), offs=offs), want.mT)
        w = torch.randn(groups, n, k, device=device).bfloat16()
        x8 = tokens_of(count, k, held, block, device, mode)
        match = quantize(w, (1, *other_block), scale_mode=mode)
        assert_near(F.grouped_mm(x8, w.mT, offs=offs), grouped_truth(x8, match.mT, offs))
        assert_near(F.grouped_mm(w, x8.t(), offs=offs), grouped_truth(match, x8.t(), offs))
        g8 = tokens_of(count, n, held, block[::-1], device, mode)
        match = quantize(clean, other_block[::-1], scale_mode=mode)
        assert_near(F.grouped_mm(g8.t(), x, offs=offs), grouped_truth(g8.t(), match, offs))
        assert_near(F.grouped_mm(x.t(), g8, offs=offs), grouped_truth(match.t(), g8, offs))
        stack = torch.randn(groups, 7, k, device=device).bfloat16()
        match = quantize(stack, (1, *other_block), scale_mode=mode)
        assert_near(F.grouped_mm(stack, w8.mT), exact(match) @ exact(w8.mT))
    assert len(grouped_products) == 6 * len(ROUTINGS)


@pytest.mark.parametrize("device", DEVICES)
def test_grouped_product_across_blocks_is_one_in_high_precision(
    device: str, grouped_products: list[Any]
) -> None:
    for count, sizes in ROUTINGS:
        groups, offs, k, n, held = len(sizes), ends(sizes, device), 33, 7, sum(sizes)
        x = poison(torch.randn(count, k, device=device), held)
        w8 = make((groups, k, n), (1, 1, FULL), device)
        x8 = tokens_of(count, k, held, (1, 32), device).float()
        g = poison(torch.randn(count, n, device=device), held)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows = F.grouped_mm(x, w8, offs=offs)
            columns = F.grouped_mm(x8.t(), g, offs=offs)
        assert_near(rows, grouped_truth(x, w8, offs))
        assert_near(columns, grouped_truth(x8.t(), g, offs))
        assert not rows[held:].any() and len(caught) == 2
        assert all("runs in torch.float32" in str(warning.message) for warning in caught)
    assert not grouped_products


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "block, mode", [(TENSORWISE, "fp32"), ((128, 128), "fp32"), ((32, 32), E8M0)]
)
def test_frozen_experts_keep_dgrad_in_fp8(
    block: Block, mode: str, device: str, grouped_products: list[Any]
) -> None:
    w8 = torch.nn.Parameter(make((3, 40, 160), (1, *block), device, torch.bfloat16, mode), False)
    offs, held, count = ends([5, 0, 17], device), 22, 30
    x = torch.randn(count, 160, device=device, dtype=torch.bfloat16)
    x = poison(x, held).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = F.grouped_mm(x, w8.mT, offs=offs)
        g = poison(torch.randn_like(y), held)
        y.backward(g)
    assert [how for how, *_ in grouped_products] == ["rows", "rows"]
    assert x.grad is not None and not x.grad[held:].any() and not y[held:].any()
    match = block if block == TENSORWISE else (1, block[1])
    for got, plain, b8 in ((y, x.detach(), w8.mT), (x.grad, g, w8)):
        clean = plain.clone()
        clean[held:] = 0
        assert_near(got, grouped_truth(quantize(clean, match, scale_mode=mode), b8, offs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "1x128 by 128x128", "mxfp8"])
def test_gradients_of_grouped_products_of_fp8_operands(name: str, device: str) -> None:
    """Straight through the casts: those of the product of the dequantised operands. Where one
    operand is FP8 alone, the other's gradient is of two plain tensors and torch's own product,
    which leaves rows of no group unwritten."""
    block_a, block_b, mode = PRODUCTS[name]
    count, sizes = 40, [5, 0, 17, 10]
    offs, held, dtype = ends(sizes, device), sum(sizes), torch.bfloat16
    for fp8 in ((True, True), (True, False), (False, True)):
        x = torch.randn(count, 64, device=device, dtype=dtype, requires_grad=True)
        w = torch.randn(4, 48, 64, device=device, dtype=dtype, requires_grad=True)
        a = quantize(x, block_a, scale_mode=mode) if fp8[0] else x
        b = quantize(w.mT, (1, *block_b), scale_mode=mode) if fp8[1] else w.mT
        g = torch.randn(count, 48, device=device, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            F.grouped_mm(a, b, offs=offs).backward(g)
        assert type(x.grad) is type(w.grad) is Tensor
        # An operand whose blocks hold the other contraction multiplies g cast to FP8, to 5 bits.
        gx, gw = grouped_truth(g, exact(b).mT, offs), grouped_truth(g.t(), exact(a), offs)
        assert relative_error(x.grad[:held], gx[:held]) < 0.05
        full = [i for i, size in enumerate(sizes) if size or fp8[0]]
        assert relative_error(w.grad[full], gw[full]) < 0.05
        assert not fp8[1] or not x.grad[held:].any()
        assert not fp8[0] or not w.grad[1].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grouped_products_without_autograd(mode: Any, device: str) -> None:
    with mode():
        offs = ends([5, 0, 9], device)
        a8, b8 = make((16, 64), (1, 32), device), make((3, 64, 24), (1, 32, 1), device)
        g8 = make((16, 24), (32, 1), device)
        with torch.autocast(device, torch.float16):  # which products of FP8 do not mind
            for got in (F.grouped_mm(a8, b8, offs=offs), torch._grouped_mm(a8, b8, offs)):
                assert_near(got, grouped_truth(a8, b8, offs))
            x8 = make((16, 64), (32, 1), device)
            assert_near(F.grouped_mm(x8.t(), g8, offs=offs), grouped_truth(x8.t(), g8, offs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("t, k, n", [(0, 64, 32), (16, 0, 32), (16, 64, 0), (0, 0, 0)])
def test_grouped_products_without_elements(t: int, k: int, n: int, device: str) -> None:
    offs = ends([t // 2, t // 4], device)
    for block_a, block_b, mode in PRODUCTS.values():
        a8 = make((t, k), block_a, device, torch.bfloat16, mode)
        b8 = make((2, k, n), (1, *block_b), device, torch.bfloat16, mode)
        out = F.grouped_mm(a8, b8, offs=offs)
        assert out.shape == (t, n) and out.dtype == torch.bfloat16 and not out.any()
        a8 = make((k, t), block_a, device, torch.bfloat16, mode)
        b8 = make((t, n), block_b, device, torch.bfloat16, mode)
        out = F.grouped_mm(a8, b8, offs=offs)
        assert out.shape == (2, k, n) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["tensorwise", "1x128 by 128x128"])
def test_grouped_products_in_a_graph(name: str) -> None:
    """One graph, and a second one for sizes that change, whatever the groups are."""
    block_a, block_b, mode = PRODUCTS[name]

    def products(x: Tensor, w: Tensor, g: Tensor, offs: Tensor) -> Tensor:
        a8 = quantize(x, block_a, scale_mode=mode)
        rows = F.grouped_mm(a8, quantize(w.mT, (1, *block_b), scale_mode=mode), offs=offs)
        g8 = quantize(g.t(), block_a, scale_mode=mode)
        columns = F.grouped_mm(g8, quantize(x, block_b, scale_mode=mode), offs=offs)
        return rows.square().sum() + (columns + F.grouped_mm(g8.detach(), x, offs=offs)).sum()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(products, backend=counter, fullgraph=True)
    for count, sizes in ((300, [5, 0, 130]), (300, [0, 0, 0]), (511, [100, 200, 211])):
        results = []
        given = torch.randn(count, 64), torch.randn(3, 48, 64), torch.randn(count, 48)
        for call in (products, compiled):
            leaves = [t.clone().requires_grad_() for t in given]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                y = call(*leaves, ends(sizes))
                y.backward()
            results.append((y, *(leaf.grad for leaf in leaves)))
        for got, want in zip(*results, strict=True):
            assert got is not None and want is not None
            assert_same_bytes(values(got), values(want))
    assert counter.frame_count == 2


def test_grouped_products_of_fake_tensors() -> None:
    with FakeTensorMode():
        offs = torch.empty(3, dtype=torch.int32)
        for block_a, block_b, mode in PRODUCTS.values():
            a8, b8 = (
                make((300, 64), block_a, scale_mode=mode),
                make((3, 64, 40), (1, *block_b), scale_mode=mode),
            )
            assert F.grouped_mm(a8, b8, offs=offs).shape == (300, 40)
            a8, b8 = (
                make((40, 300), block_a, scale_mode=mode),
                make((300, 64), block_b, scale_mode=mode),
            )
            assert F.grouped_mm(a8, b8, offs=offs).shape == (3, 40, 64)


@needs("fp8")
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "1x128 by 128x128", "mxfp8"])
def test_grouped_products_do_not_wait_for_the_device(name: str) -> None:
    block_a, block_b, mode = PRODUCTS[name]
    offs, x = ends([5, 0, 130], "cuda"), torch.randn(300, 64, device="cuda").bfloat16()
    a8, b8 = (
        make((300, 64), block_a, "cuda", scale_mode=mode),
        make((3, 64, 40), (1, *block_b), "cuda", scale_mode=mode),
    )
    g8 = make((48, 300), block_a, "cuda", torch.bfloat16, scale_mode=mode)
    x8 = make((300, 64), block_b, "cuda", torch.bfloat16, scale_mode=mode)
    for warm in (True, False):
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        try:
            F.grouped_mm(a8, b8, offs=offs)
            F.grouped_mm(g8, x8, offs=offs)
            F.grouped_mm(g8, x, offs=offs)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_grouped_products_that_do_not_exist() -> None:
    x8, w8, offs = make((16, 64), ROWWISE), make((2, 64, 8), (1, FULL, 1)), ends([5, 9])
    assert_expected_inline(
        refusal(lambda: F.grouped_mm(x8, w8), ValueError),
        """aten._grouped_mm.default: shapes (16, 64) and (2, 64, 8) do not multiply; needed (T, K) and (G, K, N), (N, T) and (T, K) or (G, N, K) and (K, T), with offs; or without, (G, T, K) and (G, K, N)""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: F.grouped_mm(x8, w8[:, 1:], offs=offs), ValueError),
        """aten._grouped_mm.default: shapes (16, 64) and (2, 63, 8) do not multiply; needed (T, K) and (G, K, N), (N, T) and (T, K) or (G, N, K) and (K, T), with offs; or without, (G, T, K) and (G, K, N)""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: F.grouped_mm(x8, w8, offs=offs, bias=torch.ones(8))),
        """aten._grouped_mm.default takes no bias, nor does torch; add it to the result""",
    )
    assert_expected_inline(
        refusal(lambda: F.grouped_mm(x8, w8, offs=offs.long()), ValueError),
        """offs is torch.int64 of shape (2,); it must be torch.int32 of shape (2,), with where each group ends""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: F.grouped_mm(x8, w8, offs=offs[:1]), ValueError),
        """offs is torch.int32 of shape (1,); it must be torch.int32 of shape (2,), with where each group ends""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: F.grouped_mm(x8, w8.dequantize()[:0], offs=offs[:0]), ValueError),
        """offs is torch.int32 of shape (0,); it must be torch.int32 of shape (at least 1,), with where each group ends""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: F.grouped_mm(x8, w8, offs=offs.to("meta")), ValueError),
        """operands are on cpu and meta; move them to one device""",
    )
    assert_expected_inline(
        refusal(lambda: F.grouped_mm(x8, w8.bfloat16(), offs=offs), ValueError),
        """aten._grouped_mm.default: operands of torch.float32 and torch.bfloat16; bring them to one dtype with .to()""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: F.grouped_mm(x8, make((2, 64, 8), (1, 1, FULL)), offs=offs), ValueError),
        """aten._grouped_mm.default of shapes (16, 64) and (2, 64, 8): the contraction of length 64 does not lie inside the same scale blocks of both operands: the first has blocks (1, FULL) and is contracted over its last dimension, the second (1, FULL) over its first; quantise both along the contraction, or multiply .dequantize() of one""",  # noqa: E501
    )
    # Scales of each token, for a product that sums over tokens.
    assert_expected_inline(
        refusal(lambda: F.grouped_mm(x8.t(), make((16, 8), COLUMNWISE), offs=offs), ValueError),
        """aten._grouped_mm.default of shapes (64, 16) and (16, 8): the contraction of length 16 does not lie inside the same scale blocks of both operands: the first has blocks (FULL, 1) and is contracted over its last dimension, the second (FULL, 1) over its first; quantise both along the contraction, or multiply .dequantize() of one""",  # noqa: E501
    )
    text = refusal(lambda: F.grouped_mm(x8, w8, offs=offs.flip(0)), ValueError)
    assert text.startswith("offs holds [14, 5]; it must hold where each group ends")
    g8, y8 = make((8, 16), ROWWISE), make((16, 64), COLUMNWISE)
    for wrong in (offs.flip(0), offs + 3, offs - 6):  # of their own, not of a layout inside
        text = refusal(lambda: F.grouped_mm(g8, y8, offs=wrong), ValueError)  # noqa: B023
        assert text.startswith(f"offs holds {wrong.tolist()}; it must hold where each group ends")
        assert text.endswith("between 0 and 16")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", float8.RECIPES.values(), ids=list(float8.RECIPES))
def test_grouped_mm_as_clients_with_a_config_call_it(recipe: float8.Recipe, device: str) -> None:
    """``f(A, B_t, offs=..., config=...)``, as docs/ways.md adapts float8.grouped_mm to it."""

    def scaled_grouped_mm(A: Tensor, B_t: Tensor, *, offs: Tensor, config: float8.Recipe) -> Tensor:
        return float8.grouped_mm(A, B_t, offs, recipe=config)

    sizes, count = [5, 0, 130, 17], 160
    offs, held = ends(sizes, device), sum(sizes)
    weight = torch.nn.Parameter(torch.randn(4, 48, 64, device=device, dtype=torch.bfloat16) / 8)
    g = torch.randn(count, 48, device=device, dtype=torch.bfloat16)
    for call in (scaled_grouped_mm, functools.partial(float8.grouped_mm, recipe=recipe)):
        A = torch.randn(count, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight.grad = None
        named = {"config": recipe} if call is scaled_grouped_mm else {}
        y = call(A, weight.transpose(-2, -1), offs=offs, **named)
        y.backward(g)
        assert A.grad is not None and weight.grad is not None
        assert y.dtype == A.grad.dtype == weight.grad.dtype == torch.bfloat16
        assert not y[held:].any() and not A.grad[held:].any() and not weight.grad[1].any()
        x64, w64, g64 = A.detach().double(), weight.detach().double(), g.double()
        assert relative_error(y, grouped_truth(x64, w64.mT, offs)) < 0.07
        assert relative_error(A.grad, grouped_truth(g64, w64, offs)) < 0.07
        assert relative_error(weight.grad, grouped_truth(g64.t(), x64, offs)) < 0.07


# ----------------------------------------------------------------------------- products refused


def test_products_that_do_not_exist() -> None:
    x8 = make((16, 64), ROWWISE)
    assert_expected_inline(
        refusal(lambda: x8 @ quantize(torch.ones(64, 8), COLUMNWISE, E4M3FNUZ), ValueError),
        """aten.mm.default of shapes (16, 64) and (64, 8): e4m3fn times e4m3fnuz mixes the fn and fnuz flavours, whose bytes mean different values; bring one over with float8.convert_format""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: x8 @ make((64, 8), ROWWISE), ValueError),
        """aten.mm.default of shapes (16, 64) and (64, 8): the contraction of length 64 does not lie inside the same scale blocks of both operands: the first has blocks (1, FULL) and is contracted over its last dimension, the second (1, FULL) over its first; quantise both along the contraction, or multiply .dequantize() of one""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: x8 @ make((64, 8), (32, 1)), ValueError),
        """aten.mm.default of shapes (16, 64) and (64, 8): the contraction of length 64 does not lie inside the same scale blocks of both operands: the first has blocks (1, FULL) and is contracted over its last dimension, the second (32, 1) over its first; quantise both along the contraction, or multiply .dequantize() of one""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: x8 @ torch.ones(64, 8).half(), ValueError),
        """aten.mm.default: operands of torch.float32 and torch.float16; bring them to one dtype with .to()""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: x8 @ torch.ones(32, 8), ValueError),
        """aten.mm.default: shapes (16, 64) and (32, 8) do not multiply; needed (M, K) and (K, N)""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: torch.addmm(torch.ones(8).half(), x8, torch.ones(64, 8)), ValueError),
        """aten.addmm.default: bias, a and b are torch.float16, torch.float32 and torch.float32; bring them to one dtype with .to()""",  # noqa: E501
    )
    batch = make((2, 16, 64), (1, 1, FULL))
    assert_expected_inline(
        refusal(lambda: torch.bmm(batch, torch.ones(3, 64, 8)), ValueError),
        """aten.bmm.default: shapes (2, 16, 64) and (3, 64, 8) do not multiply; needed (B, M, K) and (B, K, N)""",  # noqa: E501
    )
    assert_expected_inline(
        refusal(lambda: torch.bmm(batch, make((2, 64, 8), (1, 1, FULL))), ValueError),
        """aten.bmm.default of shapes (2, 16, 64) and (2, 64, 8): the contraction of length 64 does not lie inside the same scale blocks of both operands: the first has blocks (1, FULL) and is contracted over its last dimension, the second (1, FULL) over its first; quantise both along the contraction, or multiply .dequantize() of one""",  # noqa: E501
    )


def test_mixed_flavours_can_be_brought_together() -> None:
    a8 = make((16, 64), ROWWISE)
    with assume_device("gfx942"):
        b8 = quantize(torch.randn(64, 8), COLUMNWISE)
    with pytest.raises(ValueError, match="e4m3fn times e4m3fnuz mixes"):
        a8 @ b8
    assert_near(a8 @ float8.convert_format(b8, E4M3FN), truth(a8, b8))


def test_other_products_are_refused() -> None:
    x8, plain = make((2, 4, 8, 8), (1, 1, FULL, FULL)), torch.ones(2, 4, 8, 8)
    for op in (
        lambda: F.conv2d(x8, torch.ones(1, 4, 3, 3)),
        lambda: torch.addmv(torch.ones(8), x8[0, 0], torch.ones(8)),
        lambda: F.scaled_dot_product_attention(plain, x8, plain),
        lambda: torch.linalg.solve(x8, plain),
    ):
        with pytest.raises(NotImplementedError, match="has no handler for a Float8TrainingTensor"):
            op()


# ------------------------------------------------------------------------------------- implements


@pytest.fixture
def restored_table() -> Iterator[None]:
    before = dict(HANDLERS)
    yield
    HANDLERS.clear()
    HANDLERS.update(before)


def flip(op: Any, x: Float8TrainingTensor, dims: list[int]) -> Float8TrainingTensor:
    assert all(x.block[d] in (1, FULL) for d in dims)
    scale = op(x.scale, [d for d in dims if x.block[d] == 1])
    return x.replace(qdata=op(x.qdata.view(torch.uint8), dims).view(x.qdata.dtype), scale=scale)


def test_implements_adds_an_op(restored_table: None) -> None:
    x8 = make((16, 64), ROWWISE)
    with pytest.raises(NotImplementedError):
        x8.flip(0)
    assert float8.implements(aten.flip.default)(flip) is flip
    assert moves_as_its_values(lambda x: x.flip(0), x8)
    assert moves_as_its_values(lambda x: x.flip(0, 1), x8)
    compiled = torch.compile(lambda x: x.flip(0), backend="aot_eager", fullgraph=True)
    assert_same_bytes(values(compiled(x8)), values(x8.flip(0)))
    x = torch.randn(16, 64, requires_grad=True)
    quantize(x, ROWWISE).flip(0).dequantize()[3].sum().backward()
    assert x.grad is not None and x.grad[12].sum() == 64 and x.grad.sum() == 64


def test_implements_replaces_an_op(restored_table: None) -> None:
    x8 = make((16, 64), ROWWISE)

    @float8.implements(aten.add.Tensor, aten.sub.Tensor)
    def refuse(op: Any, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError(f"{op} costs too much here")

    for op in (lambda: x8 + 1, lambda: x8 - x8):
        with pytest.raises(NotImplementedError, match="costs too much"):
            op()


def test_implements_wants_overloads() -> None:
    for wrong in (aten.neg, torch.neg, "neg"):
        with pytest.raises(TypeError, match="takes aten overloads"):
            float8.implements(wrong)
    assert_expected_inline(
        refusal(lambda: float8.implements(aten.neg.default, aten.add), TypeError),
        """implements() takes aten overloads such as torch.ops.aten.neg.default, but got <OpOverloadPacket(op='aten.add')>; pick one of a packet's overloads by its name""",  # noqa: E501
    )
