"""Tokens moved to their experts and back: the references against loops in Python and plain torch;
the Triton kernels against the references, on a GPU or in Triton's interpreter; and their machine
code.

Letters: T tokens, k experts for each, E experts, H features, R rows sorted by expert.
"""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from recorders import machine_code, specialisations
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import float8
from float8.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ
from float8.kernels import permute as reference
from float8.kernels.quantize import HIGH_PRECISION, CastPlan
from float8.kernels.quantize_grouped import padded_tokens
from float8.scaling import FULL, Block, block_name
from float8.testing import (
    assert_no_worse_than,
    assert_same_bytes,
    deterministic,
    needs,
    relative_error,
    saved_bytes,
    targets,
)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ops = float8.ops
FORMATS = (E4M3FN, E5M2) if GPU else (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ)
MODES = ("fp32", "pow2", "e8m0_floor", "e8m0_even", "e8m0_ceil", "e8m0_rceil")
ALIGNS = (1, 16, 32, 128)
BLOCKS: tuple[Block, ...] = ((1, FULL), (1, 128), (1, 32))  # those of kernels

Routed = tuple[Tensor, Tensor, Tensor, Tensor]


def choose(tokens: int, k: int, experts: int, dropped: float = 0.0) -> Tensor:
    """Different experts for each token, as of top-k; some pairs dropped."""
    indices = torch.rand(tokens, max(k, experts)).argsort(1)[:, :k] % experts
    return indices.masked_fill(torch.rand(tokens, k) < dropped, -1)


# indices and E
ROUTINGS: dict[str, tuple[Tensor, int]] = {
    "no token": (torch.empty(0, 2, dtype=torch.int64), 3),
    "one token": (torch.tensor([[2]]), 4),
    "one expert": (torch.zeros(5, 1, dtype=torch.int64), 1),
    "all to one expert": (torch.full((9, 1), 3), 8),
    "twice to one expert": (torch.ones(4, 2, dtype=torch.int64), 3),
    "to the last": (torch.full((3, 2), 63), 64),
    "nowhere": (torch.full((3, 2), -1), 4),
    "dropped": (torch.tensor([[0, -1], [-1, -1], [2, 0], [-1, 2], [1, 2]]), 3),
    "many experts": (torch.tensor([[255, 0], [7, 255], [128, 7]]), 256),
    "eight of nine": (torch.arange(7)[:, None] * torch.arange(1, 9) % 9, 9),
}
routings = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())


def by_hand(indices: Tensor, experts: int, align: int) -> tuple[list[int], ...]:
    """position, source without the tail, offs and counts, one pair after another."""
    position, source, offs, counts = [-1] * indices.numel(), [], [], []
    for expert in range(experts):
        pairs = [i for i, e in enumerate(indices.flatten().tolist()) if e == expert]
        for pair in pairs:
            position[pair] = len(source)
            source.append(pair)
        source += [-1] * (-len(source) % align)
        offs.append(len(source))
        counts.append(len(pairs))
    return position, source, offs, counts


def rows_of(indices: Tensor, experts: int, align: int = 1) -> Routed:
    return reference.route(indices.cpu(), experts, align)


def values(tokens: int, features: int, rng: random.Random) -> Tensor:
    """Rows of many magnitudes; some blemished."""
    x = torch.randn(tokens, features) * torch.exp2(torch.randint(-12, 12, (tokens, 1)))
    blemish = rng.choice(["none", "nan", "inf", "zero row", "negative zeros"])
    if blemish in ("nan", "inf"):
        x.view(-1)[rng.randrange(x.numel())] = math.nan if blemish == "nan" else -math.inf
    elif blemish == "zero row":
        x[rng.randrange(tokens)] = 0
    elif blemish == "negative zeros":
        x[:, rng.randrange(features)] = -0.0
    return x.to(rng.choice(HIGH_PRECISION))


def stride(x: Tensor, rng: random.Random) -> Tensor:
    """The same values with other strides, or on another boundary."""
    kind = rng.choice(["contiguous", "transposed", "wide rows", "from the second element"])
    if kind == "transposed":
        return x.t().contiguous().t()
    if kind == "wide rows":
        return torch.cat([x, x], 1)[:, : x.shape[1]]
    if kind == "from the second element":
        return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    return x


def cast_plan(block: Block, rng: random.Random) -> CastPlan:
    return CastPlan(block, rng.choice(FORMATS).dtype, rng.choice(MODES))


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(got) == len(expected)
    for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        try:
            assert_same_bytes(ours, theirs)
            assert ours.stride() == theirs.stride()
        except AssertionError as error:
            raise AssertionError(f"output {i}: {error}") from error


# ---------------------------------------------------------------------------------- the references


@routings
@pytest.mark.parametrize("align", ALIGNS)
def test_rows_are_sorted_by_expert_in_the_order_of_tokens(
    routing: tuple[Tensor, int], align: int
) -> None:
    indices, experts = routing
    for dtype in (torch.int64, torch.int32):
        position, source, offs, counts = ops.route(indices.to(dtype), experts, align)
        by_position, by_source, ends, sizes = by_hand(indices, experts, align)
        assert position.flatten().tolist() == by_position and position.shape == indices.shape
        rows = padded_tokens(indices.numel(), experts, align)
        assert source.tolist() == by_source + [-1] * (rows - len(by_source))
        assert (offs.tolist(), counts.tolist()) == (ends, sizes)
        assert {t.dtype for t in (position, source, offs, counts)} == {torch.int32}


def test_there_are_no_more_rows_than_can_be_needed() -> None:
    """Against all ways to share a few pairs."""
    for experts, align in itertools.product((1, 2, 3), (1, 2, 5, 16)):
        for pairs in (0, 1, 2, 3, 5, 7):
            ways = itertools.product(range(pairs + 1), repeat=experts)
            longest = max(
                sum(math.ceil(size / align) * align for size in way)
                for way in ways
                if sum(way) <= pairs
            )
            assert padded_tokens(pairs, experts, align) == longest


@routings
@pytest.mark.parametrize("align", (1, 16))
def test_rows_hold_their_tokens_and_padding_zeros(routing: tuple[Tensor, int], align: int) -> None:
    indices, experts = routing
    position, source, *_ = ops.route(indices, experts, align)
    x = torch.randn(len(indices), 5)
    rows = ops.permute(x, position, source)
    expected = torch.zeros(len(source), 5)
    for t, j in itertools.product(range(len(indices)), range(indices.shape[1])):
        if indices[t, j] >= 0:
            expected[position[t, j]] = x[t]
    assert_same_bytes(rows, expected)


@routings
@pytest.mark.parametrize("block", [*BLOCKS, (1, 3)], ids=block_name)
@pytest.mark.parametrize("mode", ["fp32", "e8m0_rceil"])
def test_a_cast_is_that_of_the_tokens_moved(
    routing: tuple[Tensor, int], block: Block, mode: str
) -> None:
    indices, experts = routing
    position, source, *_ = ops.route(indices, experts, 16)
    cast = CastPlan(block, E4M3FN.dtype, mode)
    x = torch.randn(len(indices), 200, dtype=torch.bfloat16)
    data, scale = ops.permute_quantize(x, position, source, *cast)
    by_token = ops.quantize(x, *cast)
    zero, lowest = ops.quantize(x.new_zeros(1, 200), *cast)
    for r, pair in enumerate(source.tolist()):
        t = pair // indices.shape[1]
        assert_same_bytes(data[r], by_token[0][t] if pair >= 0 else zero[0])
        assert_same_bytes(scale[r], by_token[1][t] if pair >= 0 else lowest[0])
    assert scale.stride() == ops.quantize(x.new_zeros(len(source), 200), *cast)[1].stride()


@routings
@pytest.mark.parametrize("dtype", HIGH_PRECISION, ids=str)
def test_sums_of_weighted_rows(routing: tuple[Tensor, int], dtype: torch.dtype) -> None:
    """Against float64, as exact as one rounding of a float32 sum."""
    indices, experts = routing
    position, source, *_ = ops.route(indices, experts, 16)
    y, weights = torch.randn(len(source), 33).to(dtype), torch.rand(indices.shape)
    truth = torch.zeros(len(indices), 33, dtype=torch.float64)
    there = indices >= 0
    for t, j in there.nonzero().tolist():
        truth[t] += weights[t, j].double() * y[position[t, j]].double()
    out = ops.unpermute(y, position, weights)
    assert out.dtype == dtype
    assert_no_worse_than(out, truth, truth.to(dtype), factor=1.01)
    alone = ops.unpermute(y, position)
    assert_same_bytes(alone, ops.unpermute(y, position, torch.ones(indices.shape)))


def test_what_holds_nothing_adds_nothing_whatever_it_is() -> None:
    """Weights of dropped pairs and rows of padding that are no numbers."""
    indices, experts = ROUTINGS["dropped"]
    position, source, *_ = ops.route(indices, experts, 16)
    y, weights, grad = torch.randn(len(source), 6), torch.rand(5, 2), torch.randn(5, 6)
    spoilt = y.masked_fill((source < 0)[:, None], math.nan)
    bad = weights.masked_fill(indices < 0, math.inf)
    assert_same_bytes(ops.unpermute(spoilt, position, bad), ops.unpermute(y, position, weights))
    assert not ops.unpermute(spoilt, position, bad)[1].any()
    got = ops.unpermute_backward(grad, spoilt, position, source, bad)
    assert_same(got, ops.unpermute_backward(grad, y, position, source, weights))
    assert not got[0][source < 0].any() and not got[1][indices < 0].any()


@pytest.mark.parametrize("dtype", HIGH_PRECISION, ids=str)
def test_strides_do_not_change_a_bit(dtype: torch.dtype) -> None:
    indices, experts = ROUTINGS["eight of nine"]
    position, source, *_ = ops.route(indices.t().contiguous().t(), experts, 1)
    x, y = torch.randn(7, 40).to(dtype), torch.randn(len(source), 40).to(dtype)
    weights = torch.rand(7, 8)
    cast = ((1, 32), E4M3FN.dtype, "fp32")
    for seed in range(6):
        rng = random.Random(seed)
        a, b, w = stride(x, rng), stride(y, rng), stride(weights, rng)
        assert_same_bytes(ops.permute(a, position, source), ops.permute(x, position, source))
        assert_same(
            ops.permute_quantize(a, position, source, *cast),
            ops.permute_quantize(x, position, source, *cast),
        )
        assert_same_bytes(ops.unpermute(b, position, w), ops.unpermute(y, position, weights))
        for ours, theirs in zip(
            ops.unpermute_backward(a, b, position, source, w),
            ops.unpermute_backward(x, y, position, source, weights),
            strict=True,
        ):
            assert relative_error(ours, theirs) < 1e-6


# ---------------------------------------------------------------------------------------- gradients


def layer(x: Tensor, w: Tensor, weights: Tensor, indices: Tensor, align: int) -> Tensor:
    """A layer of experts that are matrices, by products of their rows."""
    routing = float8.route(indices, len(w), align=align)
    rows = float8.permute(x, routing)
    parts, start = [], 0
    for e, end in enumerate(routing.offs.tolist()):
        parts.append(rows[start:end] @ w[e])
        start = end
    parts.append(rows[start:] * math.nan)  # of no expert
    return float8.unpermute(torch.cat(parts), routing, weights)


def loop(x: Tensor, w: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """The same, token by token."""
    out = []
    for t, experts in enumerate(indices.tolist()):
        terms = [weights[t, j] * (x[t] @ w[e]) for j, e in enumerate(experts) if e >= 0]
        out.append(sum(terms, x[t] * 0))
    return torch.stack(out)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("name", ["dropped", "all to one expert", "eight of nine", "one token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("align", (1, 16))
def test_gradients_of_a_layer_of_experts(name: str, dtype: torch.dtype, align: int) -> None:
    indices, experts = ROUTINGS[name]
    x, w = torch.randn(len(indices), 12).to(dtype), torch.randn(experts, 12, 12).to(dtype)
    weights, grad = torch.rand(indices.shape), torch.randn(len(indices), 12).to(dtype)
    ours, plain = leaves(x, w, weights), leaves(x, w, weights.to(dtype))
    truth = leaves(x.double(), w.double(), weights.double())
    out = layer(*ours, indices, align)
    exact = loop(*truth, indices)
    baseline = loop(*plain, indices)
    assert_no_worse_than(out, exact, baseline)
    out.backward(grad)
    exact.backward(grad.double())
    baseline.backward(grad)
    for got, want, usual in zip(ours, truth, plain, strict=True):
        assert got.grad is not None and got.grad.dtype == got.dtype
        assert_no_worse_than(got.grad, want.grad, usual.grad)


def test_gradient_of_a_token_is_rounded_once() -> None:
    """Eight rows' gradients of which bfloat16 would lose all but the first."""
    indices, experts = torch.arange(8)[None], 8
    routing = float8.route(indices, experts)
    x = torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.full((8, 4), 2.0**-9, dtype=torch.bfloat16)
    grad[0] = 1
    float8.permute(x, routing).backward(grad)
    assert x.grad is not None
    assert x.grad.tolist() == torch.full((1, 4), 1 + 7 * 2.0**-9).bfloat16().tolist()


def test_only_what_a_requested_gradient_needs_is_kept() -> None:
    indices, experts = ROUTINGS["eight of nine"]
    routing = float8.route(indices, experts)
    y, weights = torch.randn(len(routing.source), 64), torch.rand(7, 8)
    indexing = routing.position.nbytes + routing.source.nbytes
    with saved_bytes() as total:
        float8.permute(torch.randn(7, 64, requires_grad=True), routing)
        assert total() == routing.position.nbytes
    for needs_y, needs_weights, kept in [
        (True, False, indexing + weights.nbytes),
        (True, True, indexing + weights.nbytes + y.nbytes),
    ]:
        a, b = y.clone().requires_grad_(needs_y), weights.clone().requires_grad_(needs_weights)
        with saved_bytes() as total:
            out = float8.unpermute(a, routing, b)
            assert total() == kept
        out.sum().backward()
        assert (a.grad is not None, b.grad is not None) == (needs_y, needs_weights)


def test_the_gradient_of_a_sum_is_moved() -> None:
    """An expanded gradient, and no weights."""
    indices, experts = ROUTINGS["dropped"]
    routing = float8.route(indices, experts, align=16)
    y = torch.randn(len(routing.source), 6, requires_grad=True)
    float8.unpermute(y, routing).sum().backward()
    assert y.grad is not None
    assert_same_bytes(y.grad, (routing.source >= 0).float()[:, None].expand(-1, 6).contiguous())


def test_experts_of_grouped_products() -> None:
    """What float8.grouped_mm makes of the rows is what a linear layer of each token's expert
    makes."""
    indices, experts = choose(40, 2, 4, dropped=0.2), 4
    x, w = torch.randn(40, 64), torch.randn(experts, 64, 48)
    for align in (1, 32):
        routing = float8.route(indices, experts, align=align)
        y = float8.grouped_mm(float8.permute(x, routing), w, routing.offs)
        out = float8.unpermute(y, routing)
        expected = torch.zeros(40, 48)
        for j in range(2):
            for t in range(40):
                if (e := int(indices[t, j])) >= 0:
                    expected[t] += float8.linear(x[t : t + 1], w[e].t())[0]
        assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize("rows", [6, 8])
def test_rows_of_another_routing_are_refused(rows: int) -> None:
    """Too few would be read as dropped by kernels, too many would have no gradient."""
    routing = float8.route(torch.tensor([[0], [1], [0], [1], [1], [0], [0]]), 2)
    for weights in (None, torch.ones(7, 1)):
        with pytest.raises(ValueError, match=rf"\({rows}, 4\); it must have the 7 rows of routing"):
            float8.unpermute(torch.randn(rows, 4), routing, weights)


def test_autocast_leaves_the_dtype() -> None:
    indices, experts = ROUTINGS["dropped"]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        routing = float8.route(indices.to(DEVICE), experts)
        rows = float8.permute(torch.randn(5, 6, device=DEVICE), routing)
        out = float8.unpermute(rows, routing, torch.rand(5, 2, device=DEVICE))
    assert rows.dtype == out.dtype == torch.float32


# ------------------------------------------------------------------------------------ the kernels


def kernels() -> Any:
    pytest.importorskip("triton")
    pytest.importorskip("numpy")
    if not GPU:
        import interpreter  # noqa: F401
    from float8.kernels import permute_triton

    return permute_triton


def launched_route(indices: Tensor, experts: int, align: int) -> Routed:
    """By the kernels, into memory full of large numbers."""
    with deterministic():
        outputs = reference._fake_route(indices, experts, align)
        kernels().launch_route(indices, align, *outputs)
    return outputs


def launched_permute(
    x: Tensor, position: Tensor, source: Tensor, cast: CastPlan | None
) -> tuple[Tensor, ...]:
    """By the kernels, into memory full of NaN."""
    with deterministic():
        if cast is None:
            outputs: tuple[Tensor, ...] = (reference._fake_permute(x, position, source),)
            kernels().launch_permute(x, position, source, *outputs)
        else:
            outputs = reference.empty_rows(x, (len(source), x.shape[1]), cast)
            kernels().launch_permute(x, position, source, *outputs, cast)
    return outputs


def launched_unpermute(y: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    with deterministic():
        out = reference._fake_unpermute(y, position, weights)
        kernels().launch_unpermute(y, position, weights, out)
    return out


def launched_backward(*arguments: Any) -> tuple[Tensor, Tensor]:
    with deterministic():
        outputs = reference._fake_unpermute_backward(*arguments)
        kernels().launch_unpermute_backward(*arguments, *outputs)
    return outputs


def on_device(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.to(DEVICE) for t in tensors)


@routings
@pytest.mark.parametrize("dtype, align", [(torch.int64, 1), (torch.int32, 128)], ids=str)
def test_routes_of_kernels(routing: tuple[Tensor, int], dtype: torch.dtype, align: int) -> None:
    indices, experts = routing
    got = launched_route(indices.to(DEVICE, dtype), experts, align)
    assert_same(got, rows_of(indices, experts, align))


@pytest.mark.parametrize("experts, k, align", [(1, 1, 16), (64, 8, 1), (256, 8, 16), (3, 2, 1)])
def test_routes_of_many_pairs(
    experts: int, k: int, align: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several blocks, whose counts take several steps to add up."""
    if not GPU:
        monkeypatch.setattr(kernels(), "_BLOCK", 16)
        monkeypatch.setattr(kernels(), "_STEP", 2)
        kernels()._route.cache_clear()
    tokens = 300_001 // k if GPU else 75 // k
    indices = choose(tokens, k, experts, dropped=0.1)
    expected = rows_of(indices, experts, align)
    assert_same(launched_route(indices.to(DEVICE), experts, align), expected)
    kernels()._route.cache_clear()


def test_blocks_of_their_own_size() -> None:
    indices = choose(300, 1, 5)
    assert_same(launched_route(indices.to(DEVICE), 5, 16), rows_of(indices, 5, 16))


@pytest.mark.parametrize("wrong", [5, 99, -2, 2**31 - 1, 2**32, 2**32 + 1, -(2**63)])
def test_what_is_no_expert_is_none_for_kernels(wrong: int) -> None:
    """The reference refuses them."""
    indices = torch.tensor([[0, wrong], [4, 0], [wrong, 1]])
    none = indices.masked_fill((indices < 0) | (indices > 4), -1)
    assert_same(launched_route(indices.to(DEVICE), 5, 16), rows_of(none, 5, 16))
    with pytest.raises(ValueError, match="each must be an expert, 0 to 4, or -1 for none"):
        ops.route(indices, 5, 16)


needs_interpreter = pytest.mark.skipif(GPU, reason="constants of compiled kernels stay")

# T, k, E, H, alignment
SHAPES = [
    (1, 1, 1, 1, 1),
    (7, 2, 3, 40, 16),
    (5, 8, 9, 129, 1),
    (3, 2, 256, 16, 1),
    (2, 3, 4, 1100, 32),
    (3, 1, 2, 2100, 128),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # Inf * 0 in numpy
@shapes
def test_kernels_give_the_bytes_of_the_references(shape: tuple[int, ...]) -> None:
    """Into memory full of NaN. Weights' gradients are sums in another order."""
    tokens, k, experts, features, align = shape
    rng = random.Random(str(shape))
    torch.manual_seed(rng.randrange(1000))
    position, source, *_ = rows_of(choose(tokens, k, experts, 0.2), experts, align)
    where = on_device((position, source))
    # The interpreter takes 10 ms a program.
    for block in (None, *(BLOCKS if GPU or features < 1000 else BLOCKS[: 1 + tokens % 2])):
        x = stride(values(tokens, features, rng).to(DEVICE), rng)
        cast = None if block is None else cast_plan(block, rng)
        got = launched_permute(x, *where, cast)
        if cast is None:
            expected: tuple[Tensor, ...] = (reference.permute(x.cpu(), position, source),)
        else:
            expected = reference.permute_quantize(x.cpu(), position, source, *cast)
        try:
            assert_same(got, expected)
        except AssertionError as error:
            raise AssertionError(f"{cast} {x.dtype} {x.stride()}: {error}") from error

    y, weights = values(len(source), features, rng), torch.rand(tokens, k)
    weights = weights.to(rng.choice(HIGH_PRECISION))
    for given in (weights, None):
        out = launched_unpermute(
            stride(y.to(DEVICE), rng), where[0], None if given is None else given.to(DEVICE)
        )
        assert_same_bytes(out, reference.unpermute(y, position, given))

    y, grad = torch.randn(len(source), features), torch.randn(tokens, features)
    y, grad = y.to(x.dtype), grad.to(x.dtype)
    expected = reference.unpermute_backward(grad, y, position, source, weights)
    arguments = stride(grad.to(DEVICE), rng), stride(y.to(DEVICE), rng)
    got = launched_backward(*arguments, *where, weights.to(DEVICE))
    assert_same_bytes(got[0], expected[0])
    assert relative_error(got[1], expected[1]) < 1e-5
    alone = launched_backward(arguments[0], None, *where, weights.to(DEVICE))
    assert_same_bytes(alone[0], expected[0])


@needs_interpreter
@pytest.mark.parametrize("block", [None, (1, FULL), (1, 32)], ids=str)
def test_padding_is_found_in_any_number_of_steps(
    block: Block | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block of rows is looked through at once, and there are more than programs."""
    import triton.language as tl

    monkeypatch.setattr(kernels(), "_AHEAD", tl.constexpr(1))
    monkeypatch.setattr(kernels(), "multiprocessors", lambda device: 1)
    kernels()._permute.cache_clear()
    position, source, *_ = rows_of(torch.tensor([[3], [5], [-1]]), 6, 128)
    x, cast = torch.randn(3, 40), None
    expected: tuple[Tensor, ...] = (reference.permute(x, position, source),)
    if block is not None:
        cast = CastPlan(block, E4M3FN.dtype, "fp32")
        expected = reference.permute_quantize(x, position, source, *cast)
    assert_same(launched_permute(x, position, source, cast), expected)
    kernels()._permute.cache_clear()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # Inf * 0 in numpy
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("block", BLOCKS, ids=block_name)
def test_a_bad_value_stays_in_its_blocks(block: Block, bad: float) -> None:
    indices, experts = ROUTINGS["dropped"]
    position, source, *_ = rows_of(indices, experts)
    x, cast = torch.randn(5, 256), CastPlan(block, E4M3FN.dtype, "fp32")
    x[2, 200] = bad
    data, scale = launched_permute(x.to(DEVICE), *on_device((position, source)), cast)
    assert_same((data, scale), reference.permute_quantize(x, position, source, *cast))
    assert scale.isnan().sum() == 2  # the token's two rows, a block of each


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_kernels_add_nothing_of_what_holds_nothing() -> None:
    indices, experts = ROUTINGS["dropped"]
    position, source, *_ = rows_of(indices, experts, 16)
    y, weights, grad = torch.randn(len(source), 6), torch.rand(5, 2), torch.randn(5, 6)
    grad[1] = math.nan  # of the token without an expert
    y[source < 0], weights[indices < 0] = math.nan, math.inf
    where = on_device((position, source))
    out = launched_unpermute(y.to(DEVICE), where[0], weights.to(DEVICE))
    assert_same_bytes(out, reference.unpermute(y, position, weights))
    assert out.isfinite().all()
    given = grad.to(DEVICE), y.to(DEVICE), *where, weights.to(DEVICE)
    gy, gw = launched_backward(*given)
    expected = reference.unpermute_backward(grad, y, position, source, weights)
    assert gy.isfinite().all() and not gw.cpu()[indices < 0][1:].nan_to_num(1).any()
    assert_same_bytes(gy, expected[0])


def test_sums_have_no_fused_rounding() -> None:
    """A product and a sum of which an FMA would give other bits: (1 + 2^-12)^2 - 1."""
    y = torch.tensor([[-1.0], [1 + 2.0**-12]], device=DEVICE)
    weights = torch.tensor([[1, 1 + 2.0**-12]], device=DEVICE)
    position = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    out = launched_unpermute(y, position, weights)
    assert out.item() == 2.0**-11
    assert out.item() == reference.unpermute(y.cpu(), position.cpu(), weights.cpu()).item()


def test_rows_that_are_far_apart_or_the_same(tmp_path: Path) -> None:
    """2^31 elements from one row to the next; none."""
    size, options = (1 << 31) + 8, {"dtype": torch.bfloat16, "device": DEVICE}
    if GPU:
        far = torch.empty(size, **options)
    else:  # a file that is nearly all hole takes no memory
        far = torch.from_file(str(tmp_path / "far"), shared=True, size=size, **options)
    far[:8], far[-8:] = torch.randn(8), torch.randn(8)
    position, source, *_ = rows_of(torch.tensor([[1], [0]]), 2)
    where, weights = on_device((position, source)), torch.rand(2, 1)
    for x in (far.as_strided((2, 8), (1 << 31, 1)), far[:1].expand(2, 8), far[:8].expand(2, 8)):
        near = x.cpu().contiguous()
        for cast in (None, CastPlan((1, FULL), E4M3FN.dtype, "fp32")):
            expected = (
                (reference.permute(near, position, source),)
                if cast is None
                else reference.permute_quantize(near, position, source, *cast)
            )
            assert_same(launched_permute(x, *where, cast), expected)
        out = launched_unpermute(x, where[0], weights.to(DEVICE))
        assert_same_bytes(out, reference.unpermute(near, position, weights))
        got = launched_backward(x, x, *where, weights.to(DEVICE))
        expected = reference.unpermute_backward(near, near, position, source, weights)
        assert_same_bytes(got[0], expected[0])
        assert relative_error(got[1], expected[1]) < 1e-5


def test_tensors_may_start_anywhere() -> None:
    """Off 16 bytes after others that start on them, and the other way round: what is prepared of a
    kernel holds for one of them."""

    def moved(t: Tensor, off: bool) -> Tensor:
        return torch.cat([t.new_zeros(int(off)), t.flatten()])[int(off) :].view(t.shape)

    indices, experts = ROUTINGS["eight of nine"]
    routed = rows_of(indices, experts, 1)
    x, y = torch.randn(7, 64).bfloat16(), torch.randn(len(routed[1]), 64).bfloat16()
    weights, cast = torch.rand(7, 8), CastPlan((1, 32), E4M3FN.dtype, "fp32")
    position, source, *_ = routed
    expected = reference.unpermute_backward(x, y, position, source, weights)[0]
    for offs in ((False, False), (True, False), (False, True), (True, True), (False, False)):
        a, b = moved(x.to(DEVICE), offs[0]), moved(y.to(DEVICE), offs[1])
        where = [moved(t.to(DEVICE), offs[0]) for t in (position, source, weights)]
        given = moved(indices.to(DEVICE, torch.int32), offs[0])
        assert_same(launched_route(given, experts, 1), routed)
        assert_same(
            launched_permute(a, *where[:2], cast),
            reference.permute_quantize(x, position, source, *cast),
        )
        out = launched_unpermute(b, where[0], where[2])
        assert_same_bytes(out, reference.unpermute(y, position, weights))
        assert_same_bytes(launched_backward(a, b, *where)[0], expected)


def test_routing_may_be_a_view() -> None:
    indices, experts = ROUTINGS["dropped"]
    position, source, *_ = on_device(rows_of(indices, experts))
    x, weights = torch.randn(5, 16, device=DEVICE), torch.rand(5, 2, device=DEVICE)
    views = [torch.stack([t, t], -1)[..., 1] for t in (position, source, weights)]
    assert not any(t.is_contiguous() for t in views)
    cast = CastPlan((1, FULL), E4M3FN.dtype, "fp32")
    assert_same(launched_permute(x, *views[:2], cast), launched_permute(x, position, source, cast))
    y = launched_permute(x, position, source, None)[0]
    assert_same_bytes(
        launched_unpermute(y, views[0], views[2]), launched_unpermute(y, position, weights)
    )
    assert_same(launched_backward(x, y, *views), launched_backward(x, y, position, source, weights))
    other = launched_route(torch.stack([indices, indices], -1)[..., 0].to(DEVICE), experts, 16)
    assert_same(other, rows_of(indices, experts, 16))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that nobody wrote
@pytest.mark.parametrize("wrong", [-(2**31), -7, 99, 2**31 - 1])
def test_a_wrong_routing_writes_nowhere_else(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the outputs then hold is undefined; the memory around all that is allocated stays."""
    fences: list[Tensor] = []

    def fenced(x: Tensor, shape: Any, *strides: Any, dtype: Any = None, **others: Any) -> Tensor:
        dtype = dtype or x.dtype
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        width, length = 1 << 16, math.prod(shape) * dtype.itemsize
        memory = torch.full((2 * width + length,), 0xA5, dtype=torch.uint8, device=x.device)
        fences.extend([memory[:width], memory[width + length :]])
        inside = memory[width : width + length].view(dtype).view(shape)
        return inside.as_strided(shape, *strides) if strides else inside

    position, source, *_ = rows_of(torch.tensor([[0, 1], [1, -1], [0, 1]]), 2)
    position[1, 0], source[2] = wrong, wrong
    where, weights = on_device((position, source)), torch.rand(3, 2, device=DEVICE)
    x, y = torch.randn(3, 40, device=DEVICE), torch.randn(len(source), 40, device=DEVICE)
    module, outputs = kernels(), []
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_empty", fenced)
        patch.setattr(Tensor, "new_empty_strided", fenced)
        outputs.append((reference._fake_permute(x, *where),))
        cast = CastPlan((1, 32), E4M3FN.dtype, "fp32")
        outputs.append(reference.empty_rows(x, (len(source), x.shape[1]), cast))
        outputs.append((reference._fake_unpermute(y, where[0], weights),))
        outputs.append(reference._fake_unpermute_backward(x, y, *where, weights))
    module.launch_permute(x, *where, *outputs[0])
    module.launch_permute(x, *where, *outputs[1], cast)
    module.launch_unpermute(y, where[0], weights, *outputs[2])
    module.launch_unpermute_backward(x, y, *where, weights, *outputs[3])
    assert len(fences) == 12
    assert all((fence == 0xA5).all() for fence in fences)


def test_constants_of_a_kernel_do_not_depend_on_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One compiled kernel serves every number of tokens: constants stay, and what Triton would
    specialise on (a multiple of 16, 1) is left out or always the same."""
    module = kernels()
    names = [name for name in vars(module) if name.endswith("_kernel")]
    assert len(names) == 6
    seen = specialisations(monkeypatch, module, names)
    for name in ("_route", "_permute", "_unpermute", "_unpermute_backward"):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
    cast = CastPlan((1, 128), E4M3FN.dtype, "fp32")
    for tokens in (1, 2, 16, 127, 128, 1000):
        indices = choose(tokens, 2, 4).to(DEVICE)
        position, source, *_ = reference._fake_route(indices, 4, 16)
        x = torch.empty(tokens, 32, device=DEVICE)
        y, weights = x.new_empty(len(source), 32), x.new_empty(tokens, 2)
        module.launch_route(indices, 16, *reference._fake_route(indices, 4, 16))
        outputs = reference.empty_rows(x, (len(source), x.shape[1]), cast)
        module.launch_permute(x, position, source, *outputs, cast)
        module.launch_unpermute(y, position, weights, x)
        module.launch_unpermute_backward(x, y, position, source, weights, y, weights)
    assert {name: len(keys) for name, keys in seen.items()} == dict.fromkeys(names, 1)


@needs("fp8")
def test_other_routings_and_tokens_compile_nothing() -> None:
    """Counted in Triton's own caches."""
    module = kernels()
    prepared = (module._route, module._permute, module._unpermute, module._unpermute_backward)

    def compiled() -> int:
        jitted = [getattr(module, name) for name in vars(module) if name.endswith("_kernel")]
        return sum(len(cache[0]) for kernel in jitted for cache in kernel.device_caches.values())

    def run(tokens: int) -> None:
        x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weights = torch.rand(tokens, 2, device="cuda", requires_grad=True)
        routing = float8.route(choose(tokens, 2, 8).cuda(), 8, align=16)
        float8.unpermute(float8.permute(x, routing), routing, weights).sum().backward()
        for block in BLOCKS:
            cast = (block, E4M3FN.dtype, "fp32")
            ops.permute_quantize(x.detach(), routing.position, routing.source, *cast)
        for function in prepared:  # what is prepared is not looked up again
            function.cache_clear()

    run(1000)
    before = compiled()
    assert before > 0
    for tokens in (1, 16, 1000, 4099):
        run(tokens)
    assert compiled() == before


@needs("cuda")
@pytest.mark.parametrize("features", [200, 7168, 16400])
@pytest.mark.parametrize("align", (1, 128))
def test_the_ops_give_the_bytes_of_a_cpu(features: int, align: int) -> None:
    """Through the dispatcher, also where kernels refuse, and without waiting for the device."""
    indices, experts = choose(333, 8, 16, dropped=0.05), 16
    position, source, *_ = routed = rows_of(indices, experts, align)
    x = torch.randn(333, features, dtype=torch.bfloat16)
    y = torch.randn(len(source), features, dtype=torch.bfloat16)
    weights = torch.rand(333, 8)
    casts = [(block, E4M3FN.dtype, mode) for block in (*BLOCKS, (1, 64)) for mode in MODES[:2]]

    def run(device: str) -> list[tuple[Tensor, ...]]:
        a, b, w, p, s, i = (t.to(device) for t in (x, y, weights, position, source, indices))
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        try:
            return [
                ops.route(i, experts, align),
                (ops.permute(a, p, s),),
                *(ops.permute_quantize(a, p, s, *cast) for cast in casts[:6]),
                (ops.unpermute(b, p, w), ops.unpermute(b, p)),
                ops.unpermute_backward(a, b, p, s, w),
                ops.unpermute_backward(a, None, p, s, w),
            ]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    expected = run("cpu")
    assert_same(expected[0], routed)
    run("cuda")  # compiles
    for got, want in zip(run("cuda")[:-2], expected[:-2], strict=True):
        assert_same(got, want)
    for got, want in zip(run("cuda")[-2:], expected[-2:], strict=True):
        assert_same_bytes(got[0], want[0])
        assert got[1].shape == want[1].shape
        if want[1].numel():
            assert relative_error(got[1], want[1]) < 1e-5
    where = position.cuda(), source.cuda()
    for cast in casts[6:]:  # by another route
        assert_same(
            ops.permute_quantize(x.cuda(), *where, *cast),
            ops.permute_quantize(x, position, source, *cast),
        )


@needs("cuda")
def test_equal_runs_give_equal_bits() -> None:
    indices = choose(5000, 8, 64).cuda()
    x, weights = torch.randn(5000, 1024, device="cuda").bfloat16(), torch.rand(5000, 8).cuda()
    runs = []
    for _ in range(3):
        a, w = leaves(x, weights)
        routing = float8.route(indices, 64, align=16)
        out = float8.unpermute(float8.permute(a, routing) * 1.5, routing, w)
        out.square().sum().backward()
        runs.append((*routing, out.detach(), a.grad, w.grad))
    for other in runs[1:]:
        assert_same(other, runs[0])  # type: ignore[arg-type]


# ------------------------------------------------------------------- fake tensors, opcheck, compile


def calls(device: str = "cpu") -> dict[str, tuple[Any, ...]]:
    """Arguments of every op."""
    indices, experts = ROUTINGS["dropped"]
    position, source, *_ = (t.to(device) for t in rows_of(indices, experts, 16))
    x, weights = torch.randn(5, 40, device=device), torch.rand(5, 2, device=device)
    y = torch.randn(len(source), 40, device=device)
    cast = ((1, 32), E4M3FN.dtype, "e8m0_rceil")
    return {
        "route": (indices.to(device), experts, 16),
        "permute": (x, position, source),
        "permute_quantize": (x, position, source, *cast),
        "unpermute": (y, position, weights),
        "unpermute_backward": (x, y, position, source, weights),
    }


@pytest.mark.parametrize("name", calls())
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.float8, name).default, calls(DEVICE)[name])


@pytest.mark.parametrize("name", calls())
def test_fake_and_meta_tensors_have_the_real_shapes_and_strides(name: str) -> None:
    def facts(outputs: Any) -> list[object]:
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        return [(t.shape, t.dtype, t.stride()) for t in tensors]

    arguments = calls()[name]
    op = getattr(ops, name)
    real = facts(op(*arguments))
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
    assert facts(op(*meta)) == real
    with FakeTensorMode() as fake:
        faked = [fake.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        assert facts(op(*faked)) == real
    if name == "unpermute_backward":
        assert facts(op(*meta[:1], None, *meta[2:])) == facts(
            op(*arguments[:1], None, *arguments[2:])
        )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_for_twenty_routings(backend: str) -> None:
    """Forward and backward, whatever the experts of the tokens."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counts = CompileCounterWithBackend(backend)

    def step(x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        routing = float8.route(indices, 4, align=16)
        cast = ((1, FULL), E4M3FN.dtype, "fp32")
        data, scale = ops.permute_quantize(x.detach(), routing.position, routing.source, *cast)
        rows = float8.permute(x, routing) + 0 * data.float() * scale
        return float8.unpermute(rows * 2, routing, weights)

    compiled = torch.compile(step, backend=counts, fullgraph=True)
    for i in range(20):
        indices = choose(6, 2, 4, dropped=i / 20).to(DEVICE)
        x, weights = torch.randn(6, 8, device=DEVICE), torch.rand(6, 2, device=DEVICE)
        ours, plain = leaves(x, weights), leaves(x, weights)
        out, expected = compiled(*ours, indices), step(*plain, indices)
        assert_same_bytes(out, expected)
        out.sum().backward()
        expected.sum().backward()
        for got, want in zip(ours, plain, strict=True):
            assert got.grad is not None and want.grad is not None
            assert_same_bytes(got.grad, want.grad)
        assert counts.frame_count == 1


def test_two_graphs_for_all_numbers_of_tokens() -> None:
    """One of the first number, one of any."""
    from torch._dynamo.testing import CompileCounter

    counts = CompileCounter()

    def move(x: Tensor, indices: Tensor) -> Tensor:
        routing = float8.route(indices, 4, align=16)
        return float8.unpermute(float8.permute(x, routing), routing)

    compiled = torch.compile(move, backend=counts, fullgraph=True)
    for tokens, graphs in [(30, 1), (50, 2), (7, 2), (300, 2)]:
        x, indices = torch.randn(tokens, 8, device=DEVICE), choose(tokens, 2, 4).to(DEVICE)
        assert_same_bytes(compiled(x, indices), move(x, indices))
        assert counts.frame_count == graphs


def test_inductor_gives_eager_bits() -> None:
    def move(x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        routing = float8.route(indices, 4, align=16)
        return float8.unpermute(float8.permute(x, routing), routing, weights)

    x, weights = torch.randn(20, 8, device=DEVICE), torch.rand(20, 2, device=DEVICE)
    indices = choose(20, 2, 4).to(DEVICE)
    compiled = torch.compile(move, fullgraph=True)
    assert_same_bytes(compiled(x, weights, indices), move(x, weights, indices))


def test_what_the_references_refuse_fake_tensors_refuse() -> None:
    """All but the values in indices; the texts are in docs/refusals.md."""
    for device in ("cpu", "meta"):
        given = {
            name: tuple(a.to(device) if isinstance(a, Tensor) else a for a in arguments)
            for name, arguments in calls().items()
        }
        indices, experts, align = given["route"]
        x, position, source = given["permute"]
        y, _, weights = given["unpermute"]
        cast = given["permute_quantize"][3:]
        for name, wrong in [
            ("route", (indices[0], experts, align)),
            ("route", (indices.float(), experts, align)),
            ("route", (indices[:, :0], experts, align)),
            ("route", (indices, 0, align)),
            ("route", (indices, experts, 0)),
            ("route", (indices, experts, 129)),
            ("permute", (x[0], position, source)),
            ("permute", (x.double(), position, source)),
            ("permute", (x[:4], position, source)),
            ("permute", (x, position.long(), source)),
            ("permute", (x, position[0], source)),
            ("permute", (x, position[:, :0], source)),
            ("permute", (x, position, source.long())),
            ("permute", (x, position, source[None])),
            ("permute_quantize", (x, position, source, (1, FULL), E4M3FN.dtype, "fp16")),
            ("permute_quantize", (x, position, source, (FULL, FULL), *cast[1:])),
            ("permute_quantize", (x, position, source, (32,), *cast[1:])),
            ("unpermute", (y[0], position, weights)),
            ("unpermute", (y.double(), position, weights)),
            ("unpermute", (y, position.long(), weights)),
            ("unpermute", (y, position, weights[:, 0])),
            ("unpermute", (y, position, weights.long())),
            ("unpermute_backward", (x, y[1:], position, source, weights)),
            ("unpermute_backward", (x, y.bfloat16(), position, source, weights)),
            ("unpermute_backward", (x[1:], y, position, source, weights)),
            ("unpermute_backward", (x, y, position, source, weights[1:])),
        ]:
            with pytest.raises(ValueError):
                getattr(ops, name)(*wrong)
    x, position, source = calls()["permute"]
    with pytest.raises(ValueError, match="operands are on cpu and meta"):
        ops.permute(x, position.to("meta"), source)


# ----------------------------------------------------------------------------------- machine code


@pytest.mark.parametrize("target", targets("tokens"))
def test_machine_code(target: str) -> None:
    """Compiled for GPUs that are not here: rows move by 16 bytes, nothing is in scratch, no fences,
    and atomics in the shared memory of a count alone."""
    pytest.importorskip("triton")
    found = machine_code("cross_compile_permute.py", target)
    assert {k["kernel"] for k in found} == {
        "rank_kernel", "scan_kernel", "place_kernel", "permute_kernel", "unpermute_kernel",
        "unpermute_backward_kernel",
    }  # fmt: skip
    for kernel in found:
        assert kernel["spills"] == kernel["scratch"] == kernel["fences"] == 0, kernel
        assert kernel["atomics"] == 0 or kernel["kernel"] == "rank_kernel", kernel
        assert kernel["shared"] <= 64 * 1024, kernel
        if kernel["kernel"] in ("permute_kernel", "unpermute_kernel"):
            # Eight rows, but for scales, and positions, which are one number for all.
            assert kernel["wide_stores"] >= (8 if kernel["kernel"] == "permute_kernel" else 1)
            assert kernel["wide_loads"] >= (1 if kernel["kernel"] == "permute_kernel" else 8)
        if kernel["kernel"] == "unpermute_backward_kernel":
            assert kernel["wide_stores"] == kernel["stores"] - ("alone" not in kernel["of"])
            assert kernel["wide_loads"] >= 4 or "alone" in kernel["of"], kernel
        if kernel["of"] in ("permute row", "permute block", "permute mx"):
            assert kernel["conversions"] >= 4, kernel
