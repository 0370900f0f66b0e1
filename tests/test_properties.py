"""Properties over what hypothesis draws: shapes, blocks, layouts, dtypes, formats and scale modes.

An op of a Float8TrainingTensor is the op of the values it dequantises to, bit for bit, or it is
refused in words; a cast depends on values alone, never on strides; a product is as exact as float32
sums allow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import FULL, Float8TrainingTensor, ops, quantize
from float8.formats import FORMATS, Float8Format
from float8.scaling import SCALE_MODES, Block, block_name, decode_scale, scale_shape
from float8.testing import assert_same_bytes

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DATA_FORMATS = [f for f in FORMATS if f.kind != "e8m0"]
BY_FLAVOUR = [[f for f in DATA_FORMATS if f.flavour == flavour] for flavour in ("fn", "fnuz")]
LENGTHS = [0, 1, 2, 3, 4, 6, 8, 12, 33]
SIZES = [FULL, 1, 2, 3, 4, 32]

Function = Callable[[Any], Any]
Draw = Any  # hypothesis' interactive draw


def examples(count: int) -> Any:
    return hypothesis.settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


# --- what is drawn


def draw_plain(
    draw: Draw, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """A plain tensor in any layout: values of many binades, some zero, now and then one bad."""
    if shape is None:
        shape = tuple(draw(st.lists(st.sampled_from(LENGTHS), min_size=2, max_size=3)))
    dtype = dtype or draw(st.sampled_from(DTYPES))
    torch.manual_seed(draw(st.integers(0, 999)))

    def fresh(*size: int) -> Tensor:
        x = torch.randn(size) * torch.exp2(torch.randint(-9, 5, size).float())
        return torch.where(torch.rand(size) < 0.1, torch.zeros(()), x).to(dtype)

    layout = draw(st.sampled_from(["contiguous", "transposed", "strided", "expanded", "offset"]))
    if layout == "transposed":
        x = fresh(*reversed(shape)).permute(*range(len(shape) - 1, -1, -1))
    elif layout == "strided":
        x = fresh(*(2 * n for n in shape))[(slice(None, None, 2),) * len(shape)]
    elif layout == "expanded":
        x = fresh(*shape[:-2], 1, shape[-1]).expand(shape)
    elif layout == "offset":
        x = fresh(math.prod(shape) + 3)[3:].view(shape)
    else:
        x = fresh(*shape)
    bad = draw(st.sampled_from([None, None, None, math.inf, -math.inf, math.nan]))
    if bad is not None and x.numel() and layout != "expanded":
        x[tuple(n // 2 for n in shape)] = bad
    return x


def draw_cast(draw: Draw, ndim: int) -> tuple[Block, Float8Format, str]:
    block = tuple(draw(st.sampled_from(SIZES)) for _ in range(ndim))
    return block, draw(st.sampled_from(DATA_FORMATS)), draw(st.sampled_from(SCALE_MODES))


def draw_fp8(draw: Draw) -> Float8TrainingTensor:
    x = draw_plain(draw)
    return quantize(x, *draw_cast(draw, x.ndim))


def positions(*index: int) -> Tensor:
    return torch.tensor(index)


def structure_op(draw: Draw, shape: tuple[int, ...]) -> tuple[str, Function]:
    """A structure op, with its name, that a plain tensor of this shape takes."""
    d, e = (draw(st.integers(0, len(shape) - 1)) for _ in range(2))
    n, low, high = shape[d], min(d, e), max(d, e)
    start, step = draw(st.sampled_from([0, 1, 2, 4, 32])), draw(st.sampled_from([1, 1, 2, 3]))
    end, size = draw(st.integers(0, n)), draw(st.sampled_from([1, 2, 4, 32]))
    outer = draw(st.sampled_from([f for f in (1, 2, 3, 4, 32) if n % f == 0]))
    at = (slice(None),) * d
    ops_of_any: dict[str, Function] = {
        f"transpose({d}, {e})": lambda x: x.transpose(d, e),
        f"movedim({d}, {e})": lambda x: x.movedim(d, e),
        f"slice {d}, {start}:{end}:{step}": lambda x: x[(*at, slice(start, end, step))],
        f"last of split({size}, {d})": lambda x: x.split(size, d)[-1],
        f"cat of split({size}, {d})": lambda x: torch.cat(x.split(size, d), d),
        f"cat of chunks along {d}, reversed": lambda x: torch.cat(x.chunk(2, d)[::-1], d),
        f"cat of a tensor with itself along {d}": lambda x: torch.cat([x, x], d),
        f"stack along {d}": lambda x: torch.stack([x, x], d),
        f"flatten({low}, {high})": lambda x: x.flatten(low, high),
        "reshape(-1)": lambda x: x.reshape(-1),
        f"unsqueeze({d})": lambda x: x.unsqueeze(d),
        "squeeze()": lambda x: x.squeeze(),
        "expand": lambda x: x.expand(2, *shape),
        "contiguous": lambda x: x.contiguous(),
        "clone": lambda x: x.clone(),
    }
    ops_of_elements: dict[str, Function] = {
        f"split {d} into {outer} x {n // outer}": lambda x: x.reshape(
            *shape[:d], outer, n // outer, *shape[d + 1 :]
        ),
        f"select({d}, {end % max(n, 1)})": lambda x: x.select(d, end % n),
        f"last of unbind({d})": lambda x: x.unbind(d)[-1],
        f"index_select({d})": lambda x: x.index_select(d, positions(0, n - 1, 0)),
        f"positions in {d}": lambda x: x[(*at, positions(-1, 0))],
    }
    chosen = {**ops_of_any, **(ops_of_elements if n else {})}
    name = draw(st.sampled_from(list(chosen)))
    return name, chosen[name]


VALUE_OPS: dict[str, Function] = {
    "abs": lambda x: x.abs(),
    "neg": lambda x: -x,
    "x + 1": lambda x: x + 1,
    "x * x": lambda x: x * x,
    "x - its own plain values": lambda x: x - values(x),
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(),
    "sum of columns": lambda x: x.sum(0),
    "mean": lambda x: x.mean(-1),
    "isnan": lambda x: x.isnan(),
    "x > 0": lambda x: x > 0,
    "clamp": lambda x: x.clamp(-1, 1),
    "where": lambda x: torch.where(x < 0, 0.0, x),
    "masked_fill": lambda x: x.masked_fill(x == 0, 7.0),
    "norm": torch.linalg.vector_norm,
    "zeros_like": torch.zeros_like,
    "plain.copy_": lambda x: torch.empty(x.shape).copy_(x),
}
# No handler, and none may be made up.
WITHOUT_HANDLER: dict[str, Function] = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "view dtype": lambda x: x.view(torch.uint8),
    "double": lambda x: x.double(),
    "add_": lambda x: x.add_(1),
    "zero_": lambda x: x.zero_(),
    "cat with plain": lambda x: torch.cat([x, values(x)]),
    "mask": lambda x: x[values(x) > 0],
    "triu": lambda x: x.triu(),
}


# --- what is checked


def values(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, Float8TrainingTensor) else x


def as_list(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def one_nan(x: Tensor) -> Tensor:
    """NaN has many bits, and torch gives other ones to a scalar than to a vector."""
    return x.masked_fill(x.isnan(), math.nan) if x.is_floating_point() else x


def assert_says_why(refusal: BaseException) -> None:
    """A refusal is NotImplementedError or ValueError, with sentences that name a way out."""
    assert type(refusal) in (NotImplementedError, ValueError), repr(refusal)
    text = str(refusal)
    assert len(text) > 40 and ("dequantize()" in text or "quantise" in text), text


def apply(op: Function, x8: Float8TrainingTensor) -> Any:
    """``op(x8)`` after the property was checked; None if it was refused."""
    want = op(values(x8))
    try:
        got = op(x8)
    except Exception as refusal:
        assert_says_why(refusal)
        return None
    for g, w in zip(as_list(got), as_list(want), strict=True):
        if isinstance(g, Float8TrainingTensor):
            assert tuple(g.scale.shape) == scale_shape(g.shape, g.block)
            assert (g.shape, g.stride(), g.dtype) == (g.qdata.shape, g.qdata.stride(), w.dtype)
        assert_same_bytes(one_nan(values(g)), one_nan(w))
    return got


# --- the properties


def test_an_op_is_the_op_of_the_values_or_is_refused_in_words() -> None:
    @examples(70)
    @hypothesis.given(st.data())
    def check(data: Any) -> None:
        x8 = draw_fp8(data.draw)
        name, move = structure_op(data.draw, tuple(x8.shape))
        hypothesis.note(f"{x8!r}, then {name}")
        moved = apply(move, x8)  # strides of all kinds, for the next op
        if isinstance(moved, Float8TrainingTensor):
            x8 = moved
        for name, op in data.draw(st.permutations(list(VALUE_OPS.items())))[:4]:
            hypothesis.note(f"{x8!r}, then {name}")
            if x8.numel() or name not in ("softmax", "mean"):
                assert apply(op, x8) is not None
        dtype = data.draw(st.sampled_from(DTYPES))  # a name for the same parts: rounded once
        parts = x8.qdata, x8.scale, x8.block
        assert_same_bytes(x8.to(dtype).dequantize(), ops.dequantize(*parts, dtype))

    check()


def test_ops_without_handler_say_so() -> None:
    @examples(15)
    @hypothesis.given(st.data())
    def check(data: Any) -> None:
        x8 = draw_fp8(data.draw)
        before = x8.qdata.clone(), x8.scale.clone()
        for name, op in WITHOUT_HANDLER.items():
            with pytest.raises(NotImplementedError) as refusal:
                op(x8)
            text = str(refusal.value)
            assert block_name(x8.block) in text and str(tuple(x8.shape)) in text, name
            assert "dequantize()" in text or "float8.quantize" in text, name
        assert_same_bytes(x8.qdata, before[0])
        assert_same_bytes(x8.scale, before[1])

    check()


def test_chains_keep_the_values() -> None:
    lengths: list[int] = []

    @examples(60)
    @hypothesis.given(st.data())
    def check(data: Any) -> None:
        x8, length = draw_fp8(data.draw), 0
        for _ in range(data.draw(st.integers(3, 5))):
            if x8.ndim == 0:
                break
            name, op = structure_op(data.draw, tuple(x8.shape))
            hypothesis.note(f"{x8!r}, then {name}")
            if (moved := apply(op, x8)) is not None:  # else another op gets its turn
                x8, length = moved, length + 1
        lengths.append(length)

    check()
    assert sum(n >= 3 for n in lengths) > 20, lengths


def test_gradients_are_those_of_the_plain_op() -> None:
    @examples(20)
    @hypothesis.given(st.data())
    def check(data: Any) -> None:
        x = draw_plain(data.draw, dtype=torch.float32).detach().clone().requires_grad_()
        name, op = structure_op(data.draw, tuple(x.shape))
        hypothesis.note(name)
        x8 = quantize(x, *draw_cast(data.draw, x.ndim))
        try:
            y = op(x8).dequantize()
        except NotImplementedError:
            return
        g = torch.randint(-8, 9, y.shape).float()
        (want,) = torch.autograd.grad(op(x), x, g)
        (got,) = torch.autograd.grad(y, x, g)
        assert type(got) is Tensor
        assert torch.equal(got, want)

    check()


def test_a_cast_depends_on_values_alone() -> None:
    """Not on strides or offsets, nor on whether the transpose is cast in the same call."""

    @examples(50)
    @hypothesis.given(st.data())
    def check(data: Any) -> None:
        x = draw_plain(data.draw)
        whole = x.clone(memory_format=torch.contiguous_format)
        (block, fmt, mode), other = draw_cast(data.draw, x.ndim), draw_cast(data.draw, x.ndim)
        hypothesis.note(
            f"{tuple(x.shape)}, strides {x.stride()}, {block_name(block)}, {fmt}, {mode}"
        )
        x8, want = quantize(x, block, fmt, mode), quantize(whole, block, fmt, mode)
        for got, expected in ((x8.qdata, want.qdata), (x8.scale, want.scale)):
            assert_same_bytes(got, expected)
            assert got.stride() == expected.stride()
        again = quantize(x, block, fmt, scale=want.scale)
        assert_same_bytes(again.qdata, want.qdata)
        arguments = (block, fmt.dtype, mode), (other[0], other[1].dtype, other[2])
        parts = torch.ops.float8.quantize_dual(x, *arguments[0], *arguments[1])
        single = ops.quantize(whole, *arguments[0]), ops.quantize(whole.mT, *arguments[1])
        for part, alone in zip(parts, itertools.chain(*single), strict=True):
            assert_same_bytes(part, alone)

    check()


def exact(x: Float8TrainingTensor) -> Tensor:
    """``qdata * scale`` in float64, where it is exact."""
    scale = decode_scale(x.scale).double()
    for d, b in enumerate(x.block):
        if b not in (1, FULL):
            scale = scale.repeat_interleave(b, d).narrow(d, 0, x.shape[d])
    return x.qdata.double() * scale


def test_a_product_is_that_of_the_values_or_is_refused_in_words() -> None:
    """Products in float64 of what the operands dequantise to; float32 sums may lose what n
    additions lose, and the result is rounded once."""
    done: list[bool] = []

    @examples(60)
    @hypothesis.given(st.data())
    def check(data: Any) -> None:
        m, k, n = (data.draw(st.sampled_from([0, 1, 2, 5, 16, 33, 64])) for _ in range(3))
        dtype = data.draw(st.sampled_from(DTYPES))
        formats = data.draw(st.sampled_from(BY_FLAVOUR))
        inner = data.draw(st.sampled_from([FULL, 2, 3, 16, 32]))
        inner_b = data.draw(st.sampled_from([inner] * 7 + [1, 32]))
        rows, columns = (data.draw(st.sampled_from([FULL, 1, 2, 32])) for _ in range(2))
        operands = []
        for shape, block in (((m, k), (rows, inner)), ((k, n), (inner_b, columns))):
            fmt, mode = data.draw(st.sampled_from(formats)), data.draw(st.sampled_from(SCALE_MODES))
            x = torch.nan_to_num(draw_plain(data.draw, shape, dtype), 0.5, 2.0, -2.0)
            operands.append(quantize(x, block, fmt, mode))
        a8, b8 = operands
        hypothesis.note(f"{a8!r} @ {b8!r}")
        try:
            product = a8 @ b8
        except ValueError as refusal:
            assert "does not lie inside the same scale blocks" in str(refusal)
            done.append(False)
            return
        done.append(True)
        assert (type(product), product.dtype, product.shape) == (Tensor, dtype, (m, n))
        a, b = exact(a8), exact(b8)
        truth, rounding = a @ b, torch.finfo(dtype)
        allowed = (a.abs() @ b.abs()) * (k + 2) * 2.0**-23 + truth.abs() * rounding.eps
        excess = (product.double() - truth).abs() - allowed - rounding.smallest_normal
        assert not (excess > 0).any(), excess.max().item()

    check()
    assert sum(done) > 30 and not all(done)
