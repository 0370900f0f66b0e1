"""The mixture-of-experts layer: its values against a loop over experts, what convert makes of it,
the balance of its experts, batches that leave experts empty, and torch.compile.

Letters: T tokens, k experts for each, E experts, D model width, F hidden width.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from process_group import one_process_group
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import float8
from float8 import BLOCKWISE, MXFP8, RECIPES, ROWWISE, MoE, Recipe, assume_device, convert
from float8.grouped import plain
from float8.moe import Router, balance_loss
from float8.testing import (
    assert_same_bytes,
    deterministic,
    needs,
    relative_error,
    saved_bytes,
    sqnr,
)

DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
NAMED = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))


def name(recipe: Recipe | None) -> str:
    return "off" if recipe is None else recipe.name


SAVE = dataclasses.replace(ROWWISE, name="save", weight_for_dgrad="save")
E, K, D, F_ = 6, 2, 64, 48


def layer(recipe: Recipe | None = None, dtype: torch.dtype = torch.float32, **other: Any) -> MoE:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"experts": E, "top_k": K, "dtype": dtype, **other}
    moe = MoE(D, F_, **settings)
    if recipe is not None:
        convert(moe, recipe)
    return moe


def step(moe: nn.Module, x: Tensor, call: Callable[..., Any] | None = None) -> list[Tensor]:
    """Output, loss of balance, gradients of x and of the parameters."""
    leaf = x.detach().clone().requires_grad_()
    moe.zero_grad()
    y, balance, _ = (moe if call is None else call)(leaf)
    (y.float().square().sum() + balance).backward()
    assert all(p.grad is not None for p in moe.parameters())
    grads = [p.grad.clone() for p in moe.parameters()]  # type: ignore[union-attr]
    return [y.detach(), balance.detach(), leaf.grad, *grads]  # type: ignore[list-item]


def by_loop(moe: MoE, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The layer by the book, a token after another."""
    rows, weight = x.reshape(-1, D), moe.router.weight
    logits = rows @ weight.t()
    scores = logits.softmax(-1) if moe.router.score == "softmax" else logits.sigmoid()
    counts, y = torch.zeros(len(weight), dtype=torch.int32), []
    for t, row in enumerate(rows):
        best = scores[t].topk(moe.router.top_k)
        total = best.values.sum() if moe.router.top_k > 1 else 1
        out = torch.zeros_like(row)
        for value, e in zip(best.values, best.indices.tolist(), strict=True):
            gate, up = moe.experts.gate_proj[e] @ row, moe.experts.up_proj[e] @ row
            out = out + value / total * (moe.experts.down_proj[e] @ (F.silu(gate) * up))
            counts[e] += 1
        if (shared := moe.shared) is not None:
            gate, up = shared.gate_proj.weight @ row, shared.up_proj.weight @ row
            out = out + shared.down_proj.weight @ (F.silu(gate) * up)
        y.append(out)
    probabilities = scores / scores.sum(-1, keepdim=True)
    loss = len(weight) * (counts / counts.sum() * probabilities.mean(0)).sum()
    return torch.stack(y).view(x.shape), loss, counts


def assert_all_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        try:
            assert_same_bytes(a, b)
        except AssertionError as error:
            raise AssertionError(f"tensor {i}: {error}") from error


# ---- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shared", [0, 32], ids=["", "shared"])
@pytest.mark.parametrize("k", [1, 2, E])
def test_the_layer_by_the_book(k: int, shared: int, score: Any) -> None:
    moe = layer(top_k=k, shared_hidden=shared, score=score)
    x = torch.randn(3, 7, D)
    expected = step(moe, x, lambda x: by_loop(moe, x))
    for got, truth in zip(step(moe, x), expected, strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-5)
    assert torch.equal(moe(x)[2], by_loop(moe, x)[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@NAMED
def test_converted_it_is_near(recipe: Recipe, score: Any, device: str) -> None:
    moe = layer(dtype=torch.bfloat16, shared_hidden=32, score=score).to(device)
    x = torch.randn(200, D, dtype=torch.bfloat16, device=device)
    plain = step(moe, x)
    convert(moe, recipe)
    for got, expected in zip(step(moe, x), plain, strict=True):
        assert got.dtype == expected.dtype
        # The router goes by its own numbers: the same tokens come to the same experts. Its gradient
        # is what is left of sums that cancel.
        assert sqnr(got, expected) > (9 if got.shape == moe.router.weight.shape else 17)
    assert_same_bytes(step(moe, x)[1], plain[1])
    float8.revert(moe)
    assert_all_same(step(moe, x), plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [1, K])
@pytest.mark.parametrize("recipe", [*RECIPES.values(), SAVE], ids=lambda r: r.name)
def test_the_same_bits_as_its_parts(recipe: Recipe, k: int, device: str) -> None:
    moe = layer(recipe, torch.bfloat16, top_k=k).to(device)
    x = torch.randn(50, D, dtype=torch.bfloat16, device=device)

    def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, chosen, probabilities = moe.router(x)
        routing, experts = float8.route(chosen, E), moe.experts
        stacks = (w.plain().mT for w in experts.parameters())
        y = float8.swiglu_experts(
            float8.permute(x, routing), *stacks, offs=routing.offs, recipe=recipe
        )
        loss = balance_loss(probabilities, routing.counts)
        return float8.unpermute(y, routing, weights), loss, routing.counts

    assert_all_same(step(moe, x), step(moe, x, parts))
    assert [p.last_run for p in moe.experts.parameters()] != [None] * 3


@pytest.mark.parametrize("recipe", [*RECIPES.values(), SAVE], ids=lambda r: r.name)
def test_gradients_are_the_same_whichever_are_asked_for(recipe: Recipe) -> None:
    moe, x = layer(recipe, torch.bfloat16), torch.randn(50, D, dtype=torch.bfloat16)
    names = ["x", *(name for name, _ in moe.named_parameters())]
    expected = dict(zip(names, step(moe, x)[2:], strict=True))
    for wanted in (
        [],
        ["x"],
        ["router.weight"],
        *([f"experts.{n}_proj"] for n in ("gate", "down")),
    ):
        for part in (wanted, [name for name in names if name not in wanted]):
            leaf = x.clone().requires_grad_("x" in part)
            for name, p in moe.named_parameters():
                p.grad = None
                p.requires_grad_(name in part)
            y, balance, _ = moe(leaf)
            if part:
                (y.float().square().sum() + balance).backward()
            grads = {"x": leaf.grad, **{name: p.grad for name, p in moe.named_parameters()}}
            got = {name: g for name, g in grads.items() if g is not None}
            assert sorted(got) == sorted(part)
            assert_all_same(list(got.values()), [expected[name] for name in got])


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 0), (0,)])
@pytest.mark.parametrize("recipe", [None, ROWWISE, MXFP8], ids=name)
def test_leading_dimensions_and_no_tokens(recipe: Recipe | None, lead: tuple[int, ...]) -> None:
    """With no token at all there are gradients, of zeros."""
    moe, x = layer(recipe, shared_hidden=32), torch.randn(*lead, D)
    got, flat = step(moe, x), step(moe, x.reshape(-1, D))
    assert got[0].shape == got[2].shape == x.shape
    assert_all_same([t.reshape(f.shape) for t, f in zip(got, flat, strict=True)], flat)
    assert all(t.isfinite().all() for t in got)
    if 0 in lead:
        assert not any(t.any() for t in got)
        assert moe(x)[2].tolist() == [0] * E


def test_the_router_is_in_float32() -> None:
    x = torch.randn(64, D)
    moe = layer(ROWWISE)
    with torch.autocast("cpu", torch.bfloat16):
        y, balance, _ = moe(x)
        weights, chosen, _ = moe.router(x)
    assert (y.dtype, balance.dtype, weights.dtype) == (torch.bfloat16, *[torch.float32] * 2)
    logits = x.double() @ moe.router.weight.double().t()
    truth = logits.softmax(-1).topk(K)
    assert torch.equal(chosen, truth.indices)
    assert relative_error(weights, truth.values / truth.values.sum(-1, keepdim=True)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_router_keeps_x_as_it_is(dtype: torch.dtype) -> None:
    """And its gradients are those of autograd's product in float32."""
    router, x = Router(D, E, K, dtype=dtype), torch.randn(30, D, dtype=dtype, requires_grad=True)

    def plain(x: Tensor) -> Tensor:
        scores = F.linear(x.float(), router.weight.float()).softmax(-1)
        weights = scores.topk(K, -1)[0]
        return (weights / weights.sum(-1, keepdim=True)).square().sum() + scores.square().sum()

    def ours(x: Tensor) -> Tensor:
        weights, _, probabilities = router(x)
        return weights.square().sum() + probabilities.square().sum()

    leaves = [x, router.weight]
    got, expected = (torch.autograd.grad(f(x), leaves) for f in (ours, plain))
    assert_all_same(list(got), list(expected))
    twice, truth = (
        torch.autograd.grad(torch.autograd.grad(f(x), x, create_graph=True)[0].sum(), leaves)
        for f in (ours, plain)
    )
    for a, b in zip(twice, truth, strict=True):
        torch.testing.assert_close(a, b)
    assert [text for text in saved(router, x) if text.endswith(f"[30, {D}]")] == [of(x)]


def test_the_router_in_torch_func() -> None:
    router, x = Router(D, E, K), torch.randn(30, D, requires_grad=True)
    (expected,) = torch.autograd.grad(router(x)[0].square().sum(), x)
    assert_same_bytes(torch.func.grad(lambda x: router(x)[0].square().sum())(x), expected)
    each = torch.func.vmap(lambda x: router(x)[0])(x.detach().view(2, 15, D))
    torch.testing.assert_close(each.view(30, K), router(x)[0])
    with pytest.raises(NotImplementedError, match="swiglu_experts was called under"):
        torch.func.grad(lambda x: layer()(x)[0].sum())(x)


@pytest.mark.parametrize("way", ["backward in autocast", "compiled"])
def test_the_routers_gradients_are_in_float32(way: str) -> None:
    """Compiled code runs backward under the autocast that forward had."""
    router, x = Router(D, E, K), torch.randn(30, D, requires_grad=True)

    def gradients(call: Callable[..., Any], inside: bool) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            weights, _, probabilities = call(x)
            loss = weights.square().sum() + probabilities.square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return list(torch.autograd.grad(loss, [x, router.weight]))

    inside = way != "compiled"
    call = router if inside else torch.compile(router, backend="aot_eager", fullgraph=True)
    assert_all_same(gradients(call, inside), gradients(router, False))


@NAMED
def test_autocast_with_float32_weights(recipe: Recipe) -> None:
    moe, x = layer(recipe, shared_hidden=32), torch.randn(64, D)
    plain = step(layer(shared_hidden=32), x)

    def cast(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return moe(x)

    got = step(moe, x, cast)
    assert {t.dtype for t in got[1:]} == {torch.float32}
    for ours, expected in zip(got, plain, strict=True):
        assert sqnr(ours, expected) > (9 if ours.shape == moe.router.weight.shape else 17)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_wgrad_hp", "blockwise"])
def test_fnuz(name: str) -> None:
    x = torch.randn(64, D)
    plain, fn = step(layer(), x), step(layer(RECIPES[name]), x)
    with assume_device("gfx942"):
        got = step(layer(RECIPES[name]), x)
    assert not torch.equal(got[0], fn[0])
    for ours, expected in zip(got, plain, strict=True):
        assert sqnr(ours, expected) > (9 if ours.shape == (E, D) else 17)


# ---- balance -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2])
def test_scores_that_are_too_small_for_float32(k: int) -> None:
    """Sigmoids of -200: no expert is any token's, and nothing is 0 / 0, in backward either."""
    moe, x = MoE(D, F_, experts=4, top_k=k, score="sigmoid"), torch.ones(3, D, requires_grad=True)
    with torch.no_grad():
        moe.router.weight.fill_(-200 / D)
    y, balance, _ = moe(x)
    assert not y.any() and balance == 0
    (1e4 * y.sum() + balance).backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (x, *moe.parameters()))


@pytest.mark.parametrize(("d", "f", "experts"), [(D, F_, 1), (8, 8, 4), (1, 3, 2)])
def test_few_or_small_experts_are_known_as_experts(d: int, f: int, experts: int) -> None:
    """Other modules' parameters of such shapes could be anything."""
    moe, x = MoE(d, f, experts=experts, top_k=1), torch.randn(37, d)
    truth = moe(x)[0].detach()
    report = convert(moe, ROWWISE)
    assert len(report.converted) == 3, report
    y = moe(x)[0]
    y.sum().backward()
    assert not torch.equal(y, truth)
    assert relative_error(y, truth) < 0.1
    assert all(p.grad is not None for p in moe.experts.parameters())


def test_experts_without_width() -> None:
    y, *_ = MoE(D, 0, experts=4, top_k=2)(torch.randn(3, D))
    assert y.shape == (3, D) and not y.any()


def test_the_loss_of_balance() -> None:
    even = torch.full((12, E), 1 / E)
    assert balance_loss(even, torch.full((E,), 4)) == pytest.approx(1)
    one = torch.eye(E)[torch.zeros(12, dtype=torch.int64)]
    assert balance_loss(one, torch.tensor([12, 0, 0, 0, 0, 0])) == pytest.approx(E)
    assert balance_loss(torch.zeros(0, E), torch.zeros(E, dtype=torch.int32)) == 0


def test_its_gradient_evens_the_experts_out() -> None:
    moe = layer(top_k=1)
    with torch.no_grad():
        moe.router.weight[0] += 0.2  # tokens with a positive sum go here
    x = torch.randn(600, D) + 0.3
    optimizer = torch.optim.SGD(moe.router.parameters(), lr=0.5)
    _, first, before = moe(x)
    for _ in range(40):
        optimizer.zero_grad()
        moe(x)[1].backward()
        optimizer.step()
    _, last, after = moe(x)
    assert before.max() > 400
    assert after.max() < 250
    assert after.sum() == 600
    assert 1 - 1e-3 < last < first
    assert moe.experts.gate_proj.grad is None


# ---- what is alive -------------------------------------------------------------------------------


def of(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"


def saved(module: nn.Module, x: Tensor) -> list[str]:
    """What autograd keeps for backward, each storage once, those of parameters left out."""
    held = {plain(p).untyped_storage().data_ptr() for p in module.parameters()}
    seen: dict[int, str] = {}

    def pack(t: Tensor) -> Tensor:
        if (at := t.untyped_storage().data_ptr()) not in held:
            seen.setdefault(at, of(t))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = module(x)
    del result
    return sorted(seen.values())


class Live(TorchDispatchMode):
    """Memory of ``least`` bytes and more that ops make, but for that of a module: all ``made``,
    and what there is of it ``at`` each op of one name."""

    def __init__(self, module: nn.Module, name: str, least: int) -> None:
        super().__init__()
        self.name, self.least, self.at = f"float8::{name}", least, list[list[str]]()
        self.held = {plain(p).untyped_storage()._cdata for p in module.parameters()}
        self.known: dict[int, tuple[StorageWeakRef, str]] = {}
        self.made: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        self.known = {at: known for at, known in self.known.items() if not known[0].expired()}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and (memory := t.untyped_storage()).nbytes() >= self.least:
                if memory._cdata not in self.known and memory._cdata not in self.held:
                    self.known[memory._cdata] = StorageWeakRef(memory), of(t)
                    self.made.append(of(t))
        if op.name() == self.name:
            self.at.append(sorted(text for _, text in self.known.values()))
        return out


T, ROWS = 256, 256 * 3  # three experts for each


def wide(recipe: Recipe) -> tuple[MoE, Tensor]:
    """A layer that computes nothing, and its input."""
    moe = MoE(D, F_, experts=2 * E, top_k=3, device="meta", dtype=torch.bfloat16)
    convert(moe, recipe)
    return moe, torch.empty(T, D, device="meta", dtype=torch.bfloat16, requires_grad=True)


def test_tokens_are_kept_and_not_their_rows() -> None:
    """Of x: itself. y's rows are kept for the gradients of the routing weights."""
    moe = MoE(D, F_, experts=2 * E, top_k=3, dtype=torch.bfloat16)
    convert(moe)
    x = torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True)
    large = [text for text in saved(moe, x) if text.startswith(("bfloat16", "float8"))]
    assert_expected_inline(
        "\n".join(large),
        """\
bfloat16 [256, 64]
bfloat16 [768, 48]
bfloat16 [768, 48]
bfloat16 [768, 64]
float8_e4m3fn [48, 2176]""",
    )
    moe.router.requires_grad_(False)
    left = saved(moe, x.detach())
    assert f"bfloat16 [{T}, {D}]" in left
    assert f"bfloat16 [{ROWS}, {D}]" not in left


@pytest.mark.parametrize("recipe", [ROWWISE, BLOCKWISE, MXFP8], ids=name)
def test_no_rows_in_high_precision_on_the_way_to_experts(recipe: Recipe) -> None:
    moe, x = wide(recipe)
    with Live(moe, "unpermute", 1) as live:
        moe(x)
    assert live.made.count(f"bfloat16 [{ROWS}, {D}]") == 1  # y's
    assert f"float8_e4m3fn [{ROWS}, {D}]" in live.made


def test_what_is_alive_beside_each_gradient_of_a_weight() -> None:
    """In eager code. The largest of all, in layers of usual sizes."""
    moe, x = wide(ROWWISE)
    with Live(moe, "grouped_wgrad", ROWS * F_) as live:
        moe(x)[0].sum().backward()
    assert_expected_inline(
        "\n".join(", ".join(each) for each in live.at),
        """\
bfloat16 [12, 48, 64], float8_e4m3fn [2, 48, 2176], float8_e4m3fn [48, 2176], float8_e4m3fn [64, 2176], float8_e4m3fn [64, 2176]
bfloat16 [12, 48, 64], bfloat16 [12, 48, 64], float8_e4m3fn [2, 48, 2176], float8_e4m3fn [48, 2176], float8_e4m3fn [64, 2176], float8_e4m3fn [64, 2176]
bfloat16 [12, 48, 64], bfloat16 [12, 48, 64], bfloat16 [12, 64, 48], float8_e4m3fn [48, 2176], float8_e4m3fn [64, 2176]""",  # noqa: E501
    )


# ---- empty experts, memory nobody wrote ----------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, *RECIPES.values(), SAVE], ids=name)
def test_two_steps_in_memory_full_of_nan(recipe: Recipe | None) -> None:
    """Experts that get nothing, in the second step too."""
    moe, x = layer(recipe, torch.bfloat16), torch.randn(60, D, dtype=torch.bfloat16)
    x[:, 0] = 4
    with torch.no_grad():
        moe.router.weight[:3, 0] = -100  # the first three experts stay empty
    expected = step(moe, x)
    for _ in range(2):
        rubbish = [torch.full((1 << 14,), 0x7F, dtype=torch.uint8) for _ in range(64)]
        del rubbish  # what the allocator hands out next
        with deterministic():
            assert_all_same(step(moe, x), expected)
    for p in moe.experts.parameters():
        assert p.grad is not None
        assert [bool(p.grad[e].any()) for e in range(E)] == [False] * 3 + [True] * 3


def test_gradients_accumulate_over_micro_batches() -> None:
    """With cached weights, too: the same bits, whichever experts a batch leaves empty."""
    batches = [torch.randn(3, D) for _ in range(4)]
    found = []
    for cached in (False, True):
        moe = layer(ROWWISE)
        with float8.cached_weights(moe) if cached else torch.enable_grad():
            for x in batches:
                y, balance, _ = moe(x)
                (y.square().sum() + balance).backward()
        found.append([p.grad for p in moe.parameters()])
    assert_all_same(*found)  # type: ignore[arg-type]
    total = [torch.zeros_like(p) for p in moe.parameters()]
    for x in batches:
        for t, g in zip(total, step(moe, x)[3:], strict=True):
            t += g
    assert_all_same(found[0], total)  # type: ignore[arg-type]


# ---- what convert makes of it --------------------------------------------------------------------


def test_the_report_and_the_state() -> None:
    moe = layer(shared_hidden=32)
    state = {name: t.clone() for name, t in moe.state_dict().items()}
    assert_expected_inline(
        str(convert(moe)),
        """\
layer              as            recipe, or why not
experts.gate_proj  Float8Weight  rowwise
experts.up_proj    Float8Weight  rowwise
experts.down_proj  Float8Weight  rowwise
shared.gate_proj   Float8Linear  rowwise
shared.up_proj     Float8Linear  rowwise
shared.down_proj   Float8Linear  rowwise
shared             SwiGLU        rowwise
router.weight      -             kept by pattern '*router*'
6 converted (3 Float8Linear, 3 Float8Weight), 1 skipped, 1 of 1 SwiGLU fused""",
    )
    assert {name: type(t) for name, t in moe.state_dict().items()} == dict.fromkeys(state, Tensor)
    moe(torch.randn(4, D))[0].sum().backward()
    assert_expected_inline(
        str(float8.summary(moe)),
        """\
layer              shape        recipe   forward  dgrad  wgrad  note
router.weight      6 x 64       -        -        -      -      kept by pattern '*router*'
experts.gate_proj  6 x 48 x 64  rowwise  torch    torch  torch
experts.up_proj    6 x 48 x 64  rowwise  torch    torch  torch
experts.down_proj  6 x 64 x 48  rowwise  torch    torch  torch
shared.gate_proj   32 x 64      rowwise  torch    torch  torch  fused in 'shared'
shared.up_proj     32 x 64      rowwise  torch    torch  torch  fused in 'shared'
shared.down_proj   64 x 32      rowwise  torch    torch  torch  fused in 'shared'
6 of 7 in FP8, 0 of them never run, 6 emulated""",
    )
    other = MoE(D, F_, experts=E, top_k=K, shared_hidden=32)
    other.load_state_dict(moe.state_dict())
    x = torch.randn(20, D)
    assert_same_bytes(copy.deepcopy(moe)(x)[0], moe(x)[0])
    convert(other)
    assert_same_bytes(other(x)[0], moe(x)[0])
    assert_expected_inline(
        repr(MoE(D, F_, experts=E, top_k=K, device="meta")),
        """\
MoE(
  (router): Router(64, 6 experts, top_k=2, score=softmax)
  (experts): Experts(6 experts, 64, 48)
)""",
    )


def test_experts_whose_weights_have_recipes_of_their_own() -> None:
    x = torch.randn(50, D)
    plain = step(layer(), x)
    some = layer()
    convert(some, {"*.down_proj": BLOCKWISE, "*.gate_proj": ROWWISE})
    mixed = step(some, x)
    assert [line.recipe for line in float8.summary(some).layers] == [
        None,
        "rowwise",
        None,
        "blockwise",
    ]
    same = layer()
    convert(same, {f"*.{name}_proj": ROWWISE for name in ("gate", "up", "down")})
    assert_all_same(step(same, x), step(layer(ROWWISE), x))
    for got, expected in zip(mixed, plain, strict=True):
        assert sqnr(got, expected) > (9 if got.shape == (E, D) else 17)
    assert all(line.last_run for line in float8.summary(some).layers if line.recipe)


def test_a_router_in_fp8_where_it_is_asked_for() -> None:
    moe, x = layer(), torch.randn(50, D)
    convert(moe, {"router.weight": ROWWISE}, keep=())
    moe(x)
    assert float8.summary(moe).layers[0].last_run is not None


@NAMED
def test_cached_weights_are_cast_once(recipe: Recipe) -> None:
    moe, x = layer(recipe, torch.bfloat16, shared_hidden=32), torch.randn(50, D).bfloat16()
    expected = step(moe, x)
    with float8.cached_weights(moe):
        for _ in range(2):
            assert_all_same(step(moe, x), expected)
        with torch.no_grad():
            moe.experts.up_proj[2].zero_()
        with pytest.raises(RuntimeError, match=r"changed inside float8\.cached_weights"):
            moe(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=name)
def test_checkpointing_gives_the_same_bits(recipe: Recipe | None, use_reentrant: bool) -> None:
    moe, x = layer(recipe), torch.randn(50, D)

    def call(x: Tensor) -> Any:
        return checkpoint(moe, x, use_reentrant=use_reentrant)

    assert_all_same(step(moe, x, call), step(moe, x))
    with saved_bytes() as total:
        call(x.requires_grad_())
    assert total() <= x.nbytes


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_fully_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    moe, x = layer(ROWWISE, shared_hidden=32), torch.randn(20, D)
    expected = step(moe, x)
    with one_process_group():
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(moe.experts, mesh=mesh)
        fully_shard(moe, mesh=mesh)
        y, balance, _ = moe(x)
        (y.square().sum() + balance).backward()
        grads = [p.grad.to_local() for p in moe.parameters()]  # type: ignore[union-attr]
        assert_all_same([y.detach(), *grads], [expected[0], *expected[3:]])


def test_on_the_meta_device() -> None:
    moe = MoE(D, F_, experts=E, top_k=K, shared_hidden=32, device="meta")
    for _ in range(2):
        y, balance, counts = moe(torch.empty(2, 5, D, device="meta"))
        assert (y.shape, balance.shape, counts.shape) == ((2, 5, D), (), (E,))
        y.sum().backward()
        if _ == 0:
            convert(moe)
    assert all(p.grad is not None for p in moe.experts.parameters())


def test_refusals() -> None:
    wrong: list[Callable[[], object]] = [
        lambda: Router(D, 4, 5),
        lambda: MoE(D, F_, experts=4, top_k=0),
        lambda: MoE(D, F_, experts=4, top_k=2, score="tanh"),  # type: ignore[arg-type]
        lambda: layer(ROWWISE)(torch.randn(4, D, dtype=torch.bfloat16)),
    ]
    texts = []
    for call in wrong:
        with pytest.raises(ValueError) as info:
            call()
        texts.append(str(info.value))
    assert_expected_inline(
        "\n".join(texts),
        """\
top_k=5 of 4 experts; it must be 1 to 4
top_k=0 of 4 experts; it must be 1 to 4
score='tanh' must be 'softmax' or 'sigmoid'
x is torch.bfloat16 and w torch.float32; bring both to one dtype, or run under torch.autocast""",
    )


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, *RECIPES.values(), SAVE], ids=name)
def test_one_graph_for_twenty_routings(recipe: Recipe | None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    moe = layer(recipe, torch.bfloat16, shared_hidden=32, experts=12)
    call = torch.compile(moe, backend=counter, fullgraph=True)
    for i in range(20):
        x = torch.randn(16, D).bfloat16() + (i % 3)  # which leaves other experts empty
        assert_all_same(step(moe, x, call), step(moe, x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("recipe", [None, ROWWISE, MXFP8], ids=name)
def test_checkpointing_in_compiled_code(recipe: Recipe | None) -> None:
    """Of a layer that never ran before."""
    moe, x = layer(recipe, torch.bfloat16, shared_hidden=32), torch.randn(20, D).bfloat16()

    def call(x: Tensor) -> Any:
        return checkpoint(moe, x, use_reentrant=False)

    got = step(moe, x, torch.compile(call, backend="aot_eager", fullgraph=True))
    ran = [getattr(p, "last_run", None) for p in moe.experts.parameters()]
    assert ran == [None if recipe is None else ("torch",) * 3] * 3
    assert_all_same(got, step(moe, x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", [None, ROWWISE, BLOCKWISE], ids=name)
def test_inductor(recipe: Recipe | None, device: str) -> None:
    moe = layer(recipe, torch.bfloat16, shared_hidden=32).to(device)
    call, x = torch.compile(moe, fullgraph=True), torch.randn(40, D, device=device).bfloat16()
    for got, expected in zip(step(moe, x, call), step(moe, x), strict=True):
        assert sqnr(got, expected) > 25


# ---- training ------------------------------------------------------------------------------------


@NAMED
def test_it_learns_as_in_high_precision(recipe: Recipe) -> None:
    """What no single expert can: another map for each kind of token."""
    x = torch.randn(256, D)
    teacher = torch.randn(4, D, D) / D**0.5
    target = torch.einsum("td,tde->te", x, teacher[(x[:, :2] > 0).long() @ torch.tensor([1, 2])])
    found = []
    for how in (None, recipe):
        moe = layer(how)
        optimizer = torch.optim.Adam(moe.parameters(), lr=3e-3)
        for _ in range(60):
            optimizer.zero_grad()
            y, balance, _ = moe(x)
            loss = F.mse_loss(y, target)
            (loss + 0.01 * balance).backward()
            optimizer.step()
        found.append(loss.item())
    assert found[0] < 0.5
    assert found[1] < 1.2 * found[0]
