"""``cached_weights(model, accumulate=...)``: sums of gradients over micro-batches against those of
autograd and against float64, in eager and in compiled code, and what is refused.

Letters: as in test_compile.py, whose models these are: rows of 64, and matrices of 64 and 80.
"""

import contextlib
import copy
import importlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from test_compile import CACHEABLE, Casts, Stack, compiled
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import float8
from float8 import RECIPES, ROWWISE, cached_weights, totals
from float8.testing import assert_same_bytes, needs, relative_error
from float8.totals import _Total
from float8.weight import wrap_parameter

DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
FP32, BF16 = torch.float32, torch.bfloat16
NAMED = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))


class Layers(nn.Module):
    """A SwiGLU layer as one call, after a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.into = float8.Float8Linear(64, 64, dtype=BF16)
        self.mlp = float8.SwiGLU(64, 80, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.into(x))
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {**CACHEABLE, "layers": Layers}
each = pytest.mark.parametrize("name", list(MODELS))


def build(name: str, recipe: float8.Recipe = ROWWISE, device: str = "cpu") -> nn.Module:
    model = MODELS[name]()
    if name == "layers":
        for module in model.modules():
            if isinstance(module, float8.Float8Linear):
                module.recipe = recipe
    else:
        float8.convert(model, recipe)
    return model.to(device)


def batches(count: int, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """Inputs and gradients of the output's first columns."""
    return [
        (
            torch.randn(48, 64, dtype=BF16, device=device),
            torch.randn(48, 64, dtype=BF16, device=device),
        )
        for _ in range(count)
    ]


def raised(call: Callable[[], object]) -> str:
    with pytest.raises((ValueError, RuntimeError)) as info:
        call()
    return str(info.value)


def backward(call: Any, x: Tensor, g: Tensor) -> None:
    call(x)[:, :64].backward(g)


def grads(
    model: nn.Module,
    micro: list[tuple[Tensor, Tensor]],
    accumulate: torch.dtype | None = None,
    call: Any = None,
) -> list[Tensor]:
    model.zero_grad()
    with cached_weights(model, accumulate=accumulate):
        for x, g in micro:
            backward(model if call is None else call, x, g)
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


def in_float32(model: nn.Module) -> Any:
    """The model with the same weights in float32, and what calls it as if they were in bf16."""
    twin = copy.deepcopy(model).float()

    def call(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, BF16):
            y: Tensor = twin(x)
        return y

    return twin, call


@each
@NAMED
def test_sums_in_float32_are_autograds(name: str, recipe: float8.Recipe) -> None:
    """Of float32 weights, by the references, to the bit."""
    model, call = in_float32(build(name, recipe))
    micro = batches(3)
    expected, got = grads(model, micro, None, call), grads(model, micro, FP32, call)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == FP32
        assert_same_bytes(a, b)


@pytest.mark.parametrize("device", DEVICES)
@each
@NAMED
def test_sums_in_bf16_are_autograds(name: str, recipe: float8.Recipe, device: str) -> None:
    """Of bf16 weights, to the bit (but for the sign of a zero): products are rounded first."""
    model, micro = build(name, recipe, device), batches(3, device)
    expected, got = grads(model, micro), grads(model, micro, BF16)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == BF16
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@each
def test_sums_in_float32_lose_less_than_bf16(name: str, device: str) -> None:
    model, micro = build(name, device=device), batches(16, device)
    twin, call = in_float32(model)
    truth = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for batch in micro:
        for total, g in zip(truth, grads(twin, [batch], None, call), strict=True):
            total += g
    plain, same = grads(model, micro), grads(model, micro, BF16)
    for (n, p), t, a, b, c in zip(
        model.named_parameters(), truth, plain, same, grads(model, micro, FP32), strict=True
    ):
        assert a.dtype == b.dtype == c.dtype == BF16
        errors = [relative_error(g, t) for g in (a, b, c)]
        assert errors[1] < errors[0] * 1.1, (n, errors)
        if isinstance(p, float8.Float8Weight) or n.endswith("proj.weight"):
            assert errors[2] < 2.0**-8 < errors[0], (n, errors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, FP32) for name in ("grouped mT", "one by one", "bmm mT", "moe", "layers")),
        *((name, BF16) for name in ("grouped mT", "one by one", "layers")),
    ],
)
def test_compiled_code_adds_too(name: str, dtype: torch.dtype, device: str) -> None:
    """One compilation for all blocks with sums; eager's bits; no weight seems changed."""
    model, counter = build(name, device=device), Casts()
    call = compiled(model, counter)
    for _ in range(3):
        micro = batches(2, device)
        versions = [p._version for p in model.parameters()]
        got = grads(model, micro, dtype, call)
        assert versions == [p._version for p in model.parameters()]
        for a, b in zip(got, grads(model, micro, dtype), strict=True):
            assert_same_bytes(a, b)
    assert counter.frame_count == 1 and counter.of_weights == [0, 0]
    micro = batches(2, device)
    for a, b in zip(grads(model, micro, None, call), grads(model, micro), strict=True):
        assert_same_bytes(a, b)
    assert counter.frame_count == 2


VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "mT": (lambda w: w.mT, torch.bmm),
    "matrix": (lambda w: w[1], lambda x, w: F.linear(x[0], w)),
    "matrix, transposed": (lambda w: w[1].t(), lambda x, w: x[0] @ w),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", VIEWS)
def test_compiled_code_that_is_given_a_view(name: str, backend: str) -> None:
    """It adds to that part of the sum, and as it lies; sizes would not tell."""
    view, product = VIEWS[name]
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(3, 64, 64))
    wrap_parameter(model, "w")
    x, call = torch.randn(3, 8, 64), compiled(product, backend)
    found: list[Tensor] = []
    # torch 2.11's cache on disk does not tell code with sums apart.
    inductor = importlib.import_module("torch._inductor.config").patch(fx_graph_cache=False)
    autograd = importlib.import_module("torch._functorch.config").patch(enable_autograd_cache=False)
    for accumulate in (None, FP32, BF16):
        model.zero_grad()
        with cached_weights(model, accumulate=accumulate), inductor, autograd:
            for rows in (x, x.flip(1)):
                call(rows, view(model.w)).square().sum().backward()
        assert model.w.grad is not None
        found.append(model.w.grad)
    assert relative_error(found[1], found[0]) < 2.0**-20
    assert relative_error(found[2], found[0]) < 2.0**-8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, FP32) for name in ("grouped mT", "one by one mT", "layers")),
        *((name, BF16) for name in ("grouped mT", "one by one mT")),
    ],
)
def test_inductor_adds_in_place(name: str, dtype: torch.dtype, device: str) -> None:
    from torch._inductor.utils import run_and_get_code

    model, micro = build(name, device=device), batches(2, device)
    call = compiled(model, "inductor")
    inductor, autograd = torch._inductor.config, torch._functorch.config
    with inductor.patch(fx_graph_cache=False), autograd.patch(enable_autograd_cache=False):
        got, codes = run_and_get_code(lambda: grads(model, micro, dtype, call))
    for a, b in zip(got, grads(model, micro, dtype), strict=True):
        assert relative_error(a, b) < 2.0**-7
    assert "_add_.default(" in codes[-1]
    new = [line for line in codes[-1].splitlines() if "empty_strided" in line]
    assert not any("80, 64)" in line and str(dtype) in line for line in new), new


def test_weights_used_twice_tied_frozen_and_not_at_all() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.frozen, self.unused = (
                nn.Linear(64, 64, bias=False, dtype=BF16) for _ in range(4)
            )
            self.b.weight = self.a.weight
            self.frozen.weight.requires_grad_(False)
            self.table = nn.Embedding(64, 64, dtype=BF16)
            self.table.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            y = self.frozen(self.b(torch.tanh(self.a(x))))
            return self.a(y) + self.table.weight.sum() * 1e-3

    model = Model()
    float8.convert(model)
    twin, call = in_float32(model)
    micro = batches(3)
    got, truth = grads(model, micro, FP32), grads(twin, micro, None, call)
    assert [g is None for g in got] == [g is None for g in truth] == [False, True, True]
    assert relative_error(got[0], truth[0]) < 2.0**-6
    assert relative_error(grads(twin, micro, FP32, call)[0], truth[0]) < 2.0**-20


def test_what_is_in_grad_stays_and_what_no_copy_serves_is_added() -> None:
    class Chunks(Stack):
        def forward(self, x: Tensor) -> Tensor:
            w = torch.cat(self.w.chunk(2, -1)[::-1], -1)  # no view that has copies
            offs = torch.arange(12, 49, 12, dtype=torch.int32)
            return F.grouped_mm(self.into(x), w, offs=offs) + super().forward(x)

    model = Chunks("grouped")
    float8.convert(model)
    twin, call = in_float32(model)
    micro = batches(3)
    for m, c in ((model, model), (twin, call)):
        found = []
        for accumulate in (None, FP32):
            m.zero_grad()
            backward(c, *micro[0])
            with cached_weights(m, accumulate=accumulate):
                for x, g in micro[1:]:
                    backward(c, x, g)
            found.append([p.grad for p in m.parameters()])
        for a, b in zip(*found, strict=True):
            assert a is not None
            assert relative_error(b, a) < (2.0**-6 if m is model else 2.0**-20)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_adds_once(reentrant: bool) -> None:
    model, call = in_float32(build("layers"))
    micro = [(x.float().requires_grad_(), g) for x, g in batches(2)]
    again = lambda x: checkpoint(call, x, use_reentrant=reentrant)  # noqa: E731
    for a, b in zip(grads(model, micro, FP32, again), grads(model, micro, FP32, call), strict=True):
        assert_same_bytes(a, b)


def test_forward_twice_before_backward_and_a_graph_that_is_kept() -> None:
    model = build("grouped mT")
    (x, g), (x2, g2) = batches(2)
    expected = grads(model, [(x, g), (x2, g2), (x, g)], FP32)
    model.zero_grad()
    with cached_weights(model, accumulate=FP32):
        y, y2 = model(x)[:, :64], model(x2)[:, :64]
        y.backward(g, retain_graph=True)
        y2.backward(g2)
        y.backward(g)
    for p, e in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        assert_same_bytes(p.grad, e)
    # Compiled code saves what its backward writes.
    call = compiled(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), block(model):
        y, y2 = call(x)[:, :64], call(x2)[:, :64]
        y.backward(g)
        y2.backward(g2)


def test_a_backward_after_the_block_is_refused() -> None:
    """It would add to what has been given. What is alive of a backward in time does no harm."""
    model = build("grouped mT")
    (x, g), (x2, g2) = batches(2)
    for call, text in (
        (model, "after the block of float8"),
        (compiled(model), "inplace operation"),
    ):
        with block(model):
            backward(call, x, g)
            late = call(x)[:, :64]
        with pytest.raises(RuntimeError, match=text):
            late.backward(g)
        del late
        model.zero_grad()
        backward(model, x2, g2)
        expected = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        with block(model):
            y = model(x)[:, :64]
            y.backward(g, retain_graph=True)
        model.zero_grad()
        backward(model, x2, g2)
        for p, e in zip(model.parameters(), expected, strict=True):
            assert_same_bytes(p.grad, e)  # type: ignore[arg-type]
        del y


def test_an_exception_leaves_grad_as_it_was() -> None:
    model = build("grouped mT")
    (x, g), *more = batches(3)
    backward(model, x, g)
    before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    with pytest.raises(KeyError), cached_weights(model, accumulate=FP32):
        backward(model, *more[0])
        raise KeyError
    for p, b in zip(model.parameters(), before, strict=True):
        assert_same_bytes(p.grad, b)  # type: ignore[arg-type]
    got = grads(model, more, FP32)
    assert all(g is not None for g in got)


def test_a_late_backward_of_one_matrix_is_refused() -> None:
    """What is left of the sum is a view of it, of which the graph knows."""
    model = build("one by one")
    (x, g), *_ = batches(1)
    with block(model):
        late = model(x)[:, :64]
    with pytest.raises(RuntimeError, match="after the block of float8"):
        late.backward(g)


def test_who_holds_the_gradients_nodes_holds_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (batch, *_) = build("layers"), batches(1)
    nodes = [
        torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters() if p.ndim == 2
    ]
    sums: list[Any] = []

    def noted(weight: Tensor, total: Tensor) -> Any:
        sums.append(weakref.ref(total))
        return _Total(weight, total)

    monkeypatch.setattr(totals, "_Total", noted)
    for _ in range(2):
        grads(model, [batch], FP32)
    assert len(sums) == 2 * len(nodes)
    assert all(ref() is None for ref in sums)


def test_inference_mode_makes_no_sums() -> None:
    model, ((x, _), *_) = build("layers"), batches(1)
    with torch.inference_mode(), cached_weights(model, accumulate=FP32):
        y = model(x)
    assert_same_bytes(y, model(x).detach())
    assert all(p.grad is None for p in model.parameters())


@each
def test_gradients_of_another_dtype_than_weights(name: str) -> None:
    """``grad_dtype`` is what ``.grad`` is to be in; None leaves it open."""
    model, micro = build(name), batches(2)
    rounded = grads(model, micro, FP32)
    for dtype in (FP32, None):
        model.zero_grad()
        for p in model.parameters():
            p.grad_dtype = dtype
        for got, expected in zip(grads(model, micro, FP32), rounded, strict=True):
            assert got.dtype == (dtype or BF16)
            assert_same_bytes(got.to(BF16), expected)


def test_a_table_with_sparse_gradients_is_tied() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 64, sparse=True)
            self.head = float8.Float8Linear(64, 64, bias=False)
            self.head.weight = self.table.weight

        def forward(self, i: Tensor) -> Tensor:
            y: Tensor = self.head(self.table(i))
            return y

    model, micro = Model(), [(torch.randint(64, (48,)), torch.randn(48, 64)) for _ in range(2)]
    (expected,), (got,) = grads(model, micro), grads(model, micro, FP32)
    assert got.layout == torch.strided
    assert relative_error(got, expected) < 2.0**-20


@pytest.mark.parametrize("form", ["each", "bmm"])
def test_matrices_that_share_memory_have_gradients_of_their_own(form: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, 64).expand(3, 16, 64))

        def forward(self, x: Tensor) -> Tensor:
            x = x.unflatten(0, (3, -1))
            if form == "bmm":
                return torch.bmm(x, self.w.mT).flatten(0, 1)
            return torch.cat([F.linear(x[e], self.w[e]) for e in range(3)])

    model = Model()
    wrap_parameter(model, "w")
    micro = [(torch.randn(48, 64), torch.randn(48, 16)) for _ in range(2)]
    (expected,), (got,) = grads(model, micro), grads(model, micro, FP32)
    assert relative_error(got, expected) < 2.0**-20


@pytest.mark.parametrize("in_one_launch", [False, True])
def test_threads_that_call_backward_at_once_lose_nothing(in_one_launch: bool) -> None:
    """Each reads a sum before another has written what it adds, unless one waits for the other."""
    weight = nn.Parameter(torch.zeros(4, 4))
    sums = totals.Totals(FP32)
    total = sums.begin(weight)
    assert total is not None
    plan = ROWWISE.plan(weight.device)[2]
    assert plan is not None
    both = threading.Barrier(2)

    def slow(out: Tensor, by: Tensor) -> None:
        before = out.clone()
        time.sleep(0.1)
        out.copy_(before + by)

    class Slow(torch.Tensor):
        """A sum that is slow to add to."""

        def __iadd__(self, other: Any) -> Any:
            slow(self.as_subclass(Tensor), other)
            return self

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Tensor:
            return w.sum()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            both.wait(10)
            if in_one_launch:
                add_ = lambda out, by, *_: slow(out, by)  # noqa: E731
                return totals.give_product(None, add_, (torch.ones(4, 4),), plan, FP32, total)
            view = total[:].as_subclass(Slow)  # type: ignore[index]
            return totals.give(torch.ones(4, 4), view)

    def run() -> None:
        Backward.apply(weight).backward()  # type: ignore[no-untyped-call]

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(total, torch.full((4, 4), 2.0))
    sums.check_end()
    sums.close()
    sums.give()
    assert weight.grad is not None and torch.equal(weight.grad, total)


@pytest.mark.parametrize("name", ["one by one mT", "layers"])
def test_a_backward_for_less_than_weights_is_refused_at_once(name: str) -> None:
    """Although a whole one follows."""
    model, ((x, g), more) = build(name), batches(2)
    leaf = x.clone().requires_grad_()
    weight = next(p for p in model.parameters() if p.ndim > 1)
    for inputs in ([leaf], [weight]):
        with pytest.raises(RuntimeError, match="whose gradient was not asked for"), block(model):
            torch.autograd.grad(model(leaf)[:, :64], inputs, g)
            backward(model, *more)
    if name == "one by one mT":
        with pytest.raises(RuntimeError, match="whose gradient was not asked for"), block(model):
            F.linear(x, model.w[0].detach().requires_grad_()).sum().backward()
            backward(model, *more)
    assert all(p.grad is None for p in model.parameters())
    got = grads(model, [(leaf, g), more], FP32)  # what is asked for with all weights is well
    assert leaf.grad is not None and all(p is not None for p in got)


# ---- refusals ------------------------------------------------------------------------------------


def test_what_a_refused_backward_has_added_is_not_given() -> None:
    """Although it was caught, and a whole one came after it."""
    model, ((x, g), *_) = build("layers"), batches(1)
    into, *_ = model.parameters()
    with pytest.raises(RuntimeError, match="would be a part of the sum"), block(model):
        with pytest.raises(RuntimeError, match="would be a part of the sum"):
            model(x)[:, :64].backward(g, inputs=[into])
        backward(model, x, g)
    assert all(p.grad is None for p in model.parameters() if p.ndim == 2)


@contextlib.contextmanager
def block(model: nn.Module, accumulate: Any = FP32) -> Iterator[None]:
    with cached_weights(model, accumulate=accumulate):
        yield


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, g), *_ = batches(1)
    model = build("grouped mT")
    messages = []

    def inside(action: Callable[[], object], accumulate: Any = FP32) -> None:
        def run() -> None:
            with cached_weights(model, accumulate=accumulate):
                action()

        messages.append(raised(run))

    inside(lambda: None, torch.float64)
    for register in (model.w.register_hook, model.w.register_post_accumulate_grad_hook):
        handle = register(lambda t: None)
        inside(lambda: None)
        handle.remove()
    optimizer = torch.optim.SGD(model.parameters())
    inside(lambda: (backward(model, x, g), optimizer.step()))
    leaf = x.clone().requires_grad_()
    inside(lambda: torch.autograd.grad(model(leaf)[:, :64], leaf, g))
    inside(lambda: model(leaf)[:, :64].backward(g, inputs=[leaf]))

    class Parallel(DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

    messages.append(raised(lambda: cached_weights(Parallel(model), accumulate=FP32).__enter__()))
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", model)
    inside(lambda: model(x))
    assert all(p.grad is None for p in model.parameters())
    with cached_weights(model):
        model(x)  # as ever
    assert_expected_inline(
        "\n".join(messages),
        """\
accumulate=torch.float64 must be one of torch.bfloat16, torch.float16, torch.float32, or None to leave gradients to autograd
Layer 'w' has a weight with hooks on its gradient, which accumulate= keeps from autograd until the end of the block; leave accumulate out
Layer 'w' has a weight with hooks on its gradient, which accumulate= keeps from autograd until the end of the block; leave accumulate out
an optimiser stepped inside of float8.cached_weights(accumulate=...), whose end is what puts gradients into .grad; leave the block before the step
a backward inside of float8.cached_weights(accumulate=...) went past a weight (shape (4, 80, 64)) whose gradient was not asked for, as torch.autograd.grad and backward(inputs=...) do, and would be a part of the sum; leave accumulate out
a backward inside of float8.cached_weights(accumulate=...) went past a weight (shape (4, 80, 64)) whose gradient was not asked for, as torch.autograd.grad and backward(inputs=...) do, and would be a part of the sum; leave accumulate out
DistributedDataParallel averages gradients as autograd gets them, which accumulate= keeps from it; leave accumulate out
DistributedDataParallel averages gradients as autograd gets them, which accumulate= keeps from it; leave accumulate out""",  # noqa: E501
    )
