"""torch.compile: no graph break, eager's bits, and no compilation more than once per setting.

aot_eager runs the traced forward and backward with eager's kernels, so it must give eager's bits.
Inductor fuses: it keeps float32 between operations that eager rounds, unless it is told to round as
eager does (`emulate_precision_casts`).
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
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
    Cast,
    Float8Linear,
    Gemm,
    Recipe,
    SwiGLU,
    assume_device,
    swiglu_mlp,
)
from float8.cache import CachedWeight
from float8.testing import assert_same_bytes, deterministic, needs, saved_bytes, sqnr

NAMED = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
OFF = Recipe("off", None, None, None)
SAVE = dataclasses.replace(ROWWISE, name="save", weight_for_dgrad="save")

Model = Callable[[Tensor], Tensor]


def step(
    model: nn.Module, x: Tensor, call: Model | None = None, autocast: torch.dtype | None = None
) -> list[Tensor]:
    """Output and all gradients of one forward and backward of ``call`` (the model itself)."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    context = nullcontext() if autocast is None else torch.autocast(x.device.type, autocast)
    with context:
        y = model(x) if call is None else call(x)
    y.square().mean().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_all_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        assert_same_bytes(left, right)


def compiled(model: Model, backend: Any = "aot_eager", **options: Any) -> Model:
    f: Model = torch.compile(model, backend=backend, fullgraph=True, **options)
    return f


def mlp(recipe: Recipe = ROWWISE, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return nn.Sequential(
        Float8Linear(64, 96, dtype=dtype, recipe=recipe),
        nn.GELU(),
        Float8Linear(96, 48, dtype=dtype, recipe=recipe),
        nn.SiLU(),
        Float8Linear(48, 64, dtype=dtype, recipe=recipe, bias=False),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("recipe", [*RECIPES.values(), SAVE, OFF], ids=lambda r: r.name)
def test_the_same_bits_as_eager(recipe: Recipe, backend: str) -> None:
    layer = Float8Linear(72, 40, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(5, 7, 72, dtype=torch.bfloat16)
    expected = step(layer, x)
    ran, layer.last_run = layer.last_run, None
    assert_all_same(step(layer, x, compiled(layer, backend)), expected)
    assert layer.last_run == ran  # recorded, without a graph break


@pytest.mark.parametrize("name", ["rowwise_wgrad_hp", "mxfp8"])
def test_the_same_bits_as_eager_under_autocast(name: str) -> None:
    layer = Float8Linear(64, 48, recipe=RECIPES[name])
    call, x = compiled(layer), torch.randn(33, 64)
    assert_all_same(step(layer, x, call, torch.bfloat16), step(layer, x, autocast=torch.bfloat16))
    assert_all_same(step(layer, x, call), step(layer, x))


@NAMED
def test_symbolic_sizes(recipe: Recipe) -> None:
    layer = Float8Linear(64, 48, dtype=torch.bfloat16, recipe=recipe)
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(layer, counter, dynamic=True)
    for tokens in (160, 135, 512, 257):
        x = torch.randn(tokens, 64, dtype=torch.bfloat16)
        assert_all_same(step(layer, x, call), step(layer, x))
    assert counter.frame_count == 1
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert_all_same(step(layer, x, call), step(layer, x))
    # 1 is never a symbol to torch.compile: batches of one block of tokens are a graph of their own.
    assert counter.frame_count == 1 + (recipe.name in ("blockwise", "mxfp8"))


@pytest.mark.parametrize("name", ["rowwise", "blockwise"])
def test_changing_batches_compile_twice(name: str) -> None:
    """Once for the first shape, once for all others."""
    layer = Float8Linear(64, 48, recipe=RECIPES[name])
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(layer, counter)
    for tokens in (32, 32, 32, 32, 32, 64, 80, 96):
        x = torch.randn(tokens, 64)
        assert_all_same(step(layer, x, call), step(layer, x))
    assert counter.frame_count == 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_products_that_add_to_what_is_there(backend: str) -> None:
    """In place and seen by what follows, in one graph for any number of tokens."""

    def gather(total_NK: Tensor, g_MN: Tensor, x_MK: Tensor, bias_K: Tensor) -> Tensor:
        cast = (1, FULL), torch.float8_e4m3fn, "pow2"
        g, g_scale = float8.ops.quantize(g_MN.t(), *cast)
        x, x_scale = float8.ops.quantize(x_MK.t(), *cast)
        pair, blocks = (g, x.t(), g_scale, x_scale.t()), ((1, FULL), (FULL, 1))
        float8.ops.scaled_mm_add_(total_NK, *pair, *blocks, False, "torch")
        twice = total_NK * 2
        float8.ops.scaled_mm_add_(total_NK, *pair, *blocks, False, "torch")
        args = *pair, *blocks, torch.bfloat16, False, "torch"
        return twice + float8.ops.scaled_mm(*args, bias=bias_K)

    counter = CompileCounterWithBackend(backend)
    call = torch.compile(gather, backend=counter, fullgraph=True)
    got, expected = torch.zeros(48, 40), torch.zeros(48, 40)
    for tokens in (32, 48, 35, 129):
        # Small integers: no order of sums changes a bit.
        g, x = (torch.randint(-2, 3, (tokens, n)).bfloat16() for n in (48, 40))
        bias = torch.randint(-2, 3, (40,)).float()
        assert_same_bytes(call(got, g, x, bias), gather(expected, g, x, bias))
        assert_same_bytes(got, expected)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
def test_three_layers_and_activations_in_one_graph(name: str) -> None:
    model = mlp(RECIPES[name])
    counter = CompileCounterWithBackend("aot_eager")
    x = torch.randn(2, 17, 64, dtype=torch.bfloat16)
    assert_all_same(step(model, x, compiled(model, counter)), step(model, x))
    assert counter.frame_count == 1


def test_layers_that_are_alike_share_their_code() -> None:
    blocks = nn.ModuleList(Float8Linear(64, 64) for _ in range(6))
    counter = CompileCounterWithBackend("aot_eager")
    for block in blocks:
        block.compile(backend=counter, fullgraph=True)
    x = torch.randn(16, 64, requires_grad=True)
    y = x
    for block in blocks:
        y = block(y)
    y.sum().backward()
    assert counter.frame_count <= 2


# ---- switching ---------------------------------------------------------------------------------


def test_each_setting_of_the_recipes_compiles_once() -> None:
    layers = [Float8Linear(64, 64, dtype=torch.bfloat16) for _ in range(2)]
    model, x = nn.Sequential(*layers), torch.randn(32, 64, dtype=torch.bfloat16)
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(model, counter)

    def set_to(*recipes: Recipe) -> None:
        for layer, recipe in zip(layers, recipes, strict=True):
            layer.recipe = recipe

    settings = [
        (ROWWISE, ROWWISE),
        (OFF, OFF),  # evaluation in high precision
        (OFF, ROWWISE),
        (float8.MXFP8, float8.BLOCKWISE),
        (SAVE, float8.ROWWISE_WGRAD_HP),
    ]
    for i, setting in enumerate(settings):
        set_to(*setting)
        assert_all_same(step(model, x, call), step(model, x))
        assert counter.frame_count == i + 1
    for setting in (*settings, *reversed(settings)):
        set_to(*setting)
        assert_all_same(step(model, x, call), step(model, x))
    set_to(*[dataclasses.replace(ROWWISE)] * 2)  # equal, not the same object
    step(model, x, call)
    assert counter.frame_count == len(settings)


def test_recipes_that_differ_in_one_number_do_not_make_it_symbolic() -> None:
    """torch.compile turns a number that it has seen change into a symbol; a block must not be."""
    layer, x = Float8Linear(96, 48), torch.randn(32, 96)
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(layer, counter)
    sizes = (16, 32, 48)
    for size in (*sizes, *sizes):
        cast = float8.Cast("e4m3", (1, size))
        gemm = float8.Gemm(cast, cast)
        layer.recipe = Recipe(str(size), gemm, gemm, gemm)
        assert_all_same(step(layer, x, call), step(layer, x))
    assert counter.frame_count == len(sizes)


def test_training_and_evaluation_compile_once_each() -> None:
    model, x = Float8Linear(64, 48), torch.randn(32, 64)
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(model, counter)
    for _ in range(3):
        step(model, x, call)
        with torch.no_grad():
            call(x)
    assert counter.frame_count == 2


def test_compiled_code_is_of_the_device_that_was_assumed() -> None:
    layer, x = Float8Linear(64, 48), torch.randn(32, 64)
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(layer, counter)
    plain = step(layer, x)
    with assume_device("gfx942"):
        fnuz = step(layer, x)
    assert not torch.equal(plain[0], fnuz[0])
    for _ in range(2):
        assert_all_same(step(layer, x, call), plain)
        with assume_device("gfx942"):
            assert_all_same(step(layer, x, call), fnuz)
    assert counter.frame_count == 2
    # Formats are forward's, also in a backward that runs after the block.
    leaf = x.clone().requires_grad_()
    with assume_device("gfx942"):
        y = call(leaf)
    y.square().mean().backward()
    assert leaf.grad is not None
    assert_same_bytes(leaf.grad, fnuz[1])


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [ROWWISE, float8.BLOCKWISE, SAVE], ids=lambda r: r.name)
def test_compiled_layers_keep_no_more_than_eager(recipe: Recipe) -> None:
    layer = Float8Linear(128, 256, bias=False, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(16, 128, dtype=torch.bfloat16, requires_grad=True)
    call = compiled(layer)
    call(x)
    totals = []
    for f in (layer, call):
        with saved_bytes() as total:
            f(x)
        totals.append(total())
    assert totals[1] <= totals[0]


def test_compiled_checkpointed_blocks_keep_their_input_only() -> None:
    model = nn.Sequential(Block(), Block())
    x = torch.randn(35, 64, dtype=torch.bfloat16, requires_grad=True)
    call = compiled(model)
    call(x)
    assert model[0].linear.last_run == ("torch", "torch", "torch")
    with saved_bytes() as total:
        call(x)
    assert total() <= 2 * x.nbytes


def test_an_activation_memory_budget() -> None:
    model, x = mlp(), torch.randn(32, 64, dtype=torch.bfloat16)
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert_all_same(step(model, x, compiled(model)), step(model, x))


class Block(nn.Module):
    """RMSNorm and an FP8 linear layer, and a residual connection; checkpointed or not."""

    def __init__(self, recipe: Recipe = ROWWISE, recompute: bool = True) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, dtype=torch.bfloat16)
        self.linear = Float8Linear(64, 64, dtype=torch.bfloat16, recipe=recipe)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        f = lambda x: self.linear(self.norm(x).relu())  # noqa: E731
        if not self.recompute:
            return x + f(x)
        y: Tensor = checkpoint(f, x, use_reentrant=False)
        return x + y


@pytest.mark.parametrize("name", ["rowwise_wgrad_hp", "blockwise"])
def test_checkpointing_inside_a_graph_gives_the_same_bits(name: str) -> None:
    model = nn.Sequential(Block(RECIPES[name]), Block(RECIPES[name]))
    plain = copy.deepcopy(model)
    for block in plain:
        block.recompute = False
    x = torch.randn(35, 64, dtype=torch.bfloat16)
    expected = step(plain, x)
    assert_all_same(step(model, x), expected)
    assert_all_same(step(model, x, compiled(model)), expected)


def test_selective_checkpointing_in_a_graph_keeps_products() -> None:
    layer, x = Float8Linear(64, 64), torch.randn(32, 64, requires_grad=True)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = op == torch.ops.float8.scaled_mm.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.MUST_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def call(x: Tensor, **options: Any) -> Tensor:
        return checkpoint(lambda x: layer(x).sin(), x, use_reentrant=False, **options).sum()  # type: ignore[no-any-return]

    totals = []
    for options in ({"context_fn": contexts}, {}):
        f = compiled(functools.partial(call, **options))
        f(x).backward()
        assert x.grad is not None
        grad, x.grad = x.grad, None
        with saved_bytes() as total:
            f(x)
        totals.append(total())
        layer(x).sin().sum().backward()
        assert_same_bytes(grad, x.grad)
        x.grad = None
    assert totals == [2 * x.nbytes, x.nbytes]  # with y or without


def train(model: nn.Module, call: Model, steps: int = 20) -> list[float]:
    """Losses of ``steps`` steps of SGD on one batch."""
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, 64, 64, generator=generator).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        loss = (call(x) - target).float().square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_twenty_steps_of_a_checkpointed_block(backend: str) -> None:
    eager = Block()
    model = copy.deepcopy(eager)
    expected, losses = train(eager, eager), train(model, compiled(model, backend))
    assert expected[-1] < 0.9 * expected[0]
    if backend == "aot_eager":
        assert losses == expected
    else:
        for loss, e in zip(losses, expected, strict=True):
            # Fused activations are rounded elsewhere, and a cast may land on the next FP8 number.
            assert abs(loss - e) < 0.01 * e


def test_deterministic_algorithms_and_the_poison_they_fill_empties_with() -> None:
    model, x = mlp(), torch.randn(35, 64, dtype=torch.bfloat16)
    call = compiled(model)
    with deterministic():
        first, second = step(model, x, call), step(model, x, call)
    assert all(t.isfinite().all() for t in first)
    assert_all_same(first, second)
    assert_all_same(first, step(model, x))


def test_cached_weights_in_a_graph() -> None:
    recipe = float8.MXFP8
    layer, x = Float8Linear(64, 48, recipe=recipe), torch.randn(33, 64)
    expected = step(layer, x)
    call = compiled(layer)
    assert_all_same(step(layer, x, call), expected)
    layer.cached = CachedWeight.of(layer.weight, recipe)
    assert_all_same(step(layer, x, call), expected)
    with torch.no_grad():
        layer.weight.mul_(1.5)  # the optimiser's step: new values of the same tensor
    layer.cached = None
    expected = step(layer, x)
    layer.cached = CachedWeight.of(layer.weight, recipe)
    assert_all_same(step(layer, x, call), expected)
    layer.cached = None
    assert_all_same(step(layer, x, call), expected)


# ---- cached weights ------------------------------------------------------------------------------

MIXED = Recipe(  # dgrad casts weights in its own way
    "mixed",
    Gemm(Cast("e4m3", (1, FULL)), Cast("e4m3", (16, FULL), "pow2")),
    Gemm(Cast("e5m2", (1, FULL)), Cast("e4m3", (1, FULL))),
    ROWWISE.wgrad,
)


class Stack(nn.Module):
    """A layer, and four experts multiplied in one of several ways; 48 tokens, 12 for each."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.into = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        shape = (4, 80, 64) if "mT" in way else (4, 64, 80)
        self.w = nn.Parameter(torch.randn(shape, dtype=torch.bfloat16) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        w = self.w.mT if "mT" in self.way else self.w  # [E, K, N]
        if "grouped" in self.way:
            offs = torch.arange(12, 49, 12, dtype=torch.int32, device=x.device)
            return F.grouped_mm(x, w, offs=offs)
        if "bmm" in self.way:
            return torch.bmm(x.reshape(4, 12, 64), w).flatten(0, 1)
        return torch.cat([rows @ w[e] for e, rows in enumerate(x.split(12))])


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = float8.MoE(64, 80, experts=4, top_k=2, shared_hidden=80, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y, _, _ = self.moe(x)
        return y


CACHEABLE: dict[str, Callable[[], nn.Module]] = {
    **{
        way: functools.partial(Stack, way)
        for way in ("grouped", "grouped mT", "bmm mT", "one by one", "one by one mT")
    },
    "moe": Mixture,
}


class Casts:
    """A backend like aot_eager that counts graphs and, in each, casts of weights, whose rows and
    columns, unlike those of tokens, are 64 and 80 or 64 and 64."""

    def __init__(self) -> None:
        self.frame_count = 0
        self.of_weights: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.frame_count += 1
        return aot_autograd(fw_compiler=self.look, bw_compiler=self.look)(graph, inputs)

    def look(self, graph: Any, inputs: Any) -> Any:
        ops = (n for n in graph.graph.nodes if "float8.quantize" in str(n.target))
        shapes = [set(n.args[0].meta["val"].shape[-2:]) for n in ops]
        self.of_weights.append(sum(shape in ({64, 80}, {64}) for shape in shapes))
        return make_boxed_func(graph.forward)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *((name, ROWWISE) for name in CACHEABLE),
        ("grouped", MIXED),
        ("bmm mT", float8.MXFP8),
        ("one by one", MIXED),
        ("one by one mT", SAVE),
        ("moe", float8.BLOCKWISE),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_cached_weights_are_not_cast_in_graphs(name: str, recipe: Recipe) -> None:
    """Linear layers and experts, over several steps: eager's bits, and a compilation for use within
    blocks and one for use without."""
    model, casts = CACHEABLE[name](), Casts()
    float8.convert(model, recipe)
    call = compiled(model, casts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(2, 48, 64, dtype=torch.bfloat16)
    for _ in range(3):
        expected = [step(model, x) for x in batches]
        with float8.cached_weights(model):
            for x, e in zip(batches, expected, strict=True):
                assert_all_same(step(model, x, call), e)
        optimizer.step()
    assert casts.frame_count == 1 and casts.of_weights == [0, 0]
    for x in batches:
        assert_all_same(step(model, x, call), step(model, x))
    assert casts.frame_count == 2 and sum(casts.of_weights) > 0


def test_inductor_with_cached_weights() -> None:
    """Its cache on disk, which outlives the process, tells graphs with copies apart."""
    model = Stack("grouped mT")
    float8.convert(model)
    x = torch.randn(48, 64, dtype=torch.bfloat16)
    expected = step(model, x)
    for _ in range(2):
        for context in (nullcontext(), float8.cached_weights(model), nullcontext()):
            torch._dynamo.reset()
            with context:
                assert_all_same(step(model, x, compiled(model, "inductor")), expected)


def _decay(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def _optimise(model: nn.Module) -> None:
    torch.optim.AdamW(model.parameters(), fused=True).step()  # moves no version


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: t / 2 for name, t in model.state_dict().items()})


def _assign(model: nn.Module) -> None:
    model.load_state_dict({name: t / 2 for name, t in model.state_dict().items()}, assign=True)


def _switch(model: nn.Module) -> None:
    for holder in (*model.modules(), *model.parameters()):
        if isinstance(holder, Float8Linear | float8.Float8Weight):
            holder.recipe = float8.MXFP8


CHANGES = [_decay, _optimise, _load, _assign, _switch]
CHANGING = "changed inside float8.cached_weights"


@pytest.mark.parametrize("warm", [False, True], ids=["", "used before"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, change) for name in ("linear", "grouped mT") for change in CHANGES),
        ("moe", _optimise),
        ("moe", _load),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__[1:],
)
def test_no_graph_multiplies_copies_of_old_weights(
    name: str, change: Callable[[nn.Module], None], warm: bool
) -> None:
    """Where the next call cannot see a change, the end of the block does."""
    model = mlp() if name == "linear" else CACHEABLE[name]()
    if name == "grouped mT":
        model.into = nn.Identity()
    if name != "linear":
        float8.convert(model)
    call, x = compiled(model), torch.randn(48, 64, dtype=torch.bfloat16)
    if warm:
        call(x)
    with contextlib.ExitStack() as stack:
        stack.enter_context(float8.cached_weights(model))
        step(model, x, call)
        change(model)
        try:
            y = call(x)
        except Exception as error:
            assert CHANGING in str(error)
        else:
            if name == "grouped mT" and change is _assign:  # another weight, which has no copies
                assert_same_bytes(y, model(x))
            else:
                assert name == "linear" and change in (_decay, _load)
                with pytest.raises(RuntimeError, match=CHANGING):
                    stack.close()
    assert_all_same(step(model, x, call), step(model, x))


@pytest.mark.parametrize("way", ["linear", "grouped", "bmm mT"])
def test_the_end_of_the_block_sees_what_a_graph_changed_itself(way: str) -> None:
    model = mlp() if way == "linear" else Stack(way)
    if way != "linear":
        float8.convert(model)
    weight = model[0].weight if way == "linear" else model.w

    def update(x: Tensor) -> Tensor:
        with torch.no_grad():
            weight.mul_(0.5)
        return model(x)

    x = torch.randn(48, 64, dtype=torch.bfloat16)
    if way != "linear" and torch.__version__ < "2.12":  # it writes to no weight with copies
        with pytest.raises(StopIteration), float8.cached_weights(model):
            compiled(update)(x)
        return
    with pytest.raises(RuntimeError, match=CHANGING), float8.cached_weights(model):
        compiled(update)(x)


def test_compiled_code_keeps_no_weight_that_was_cached() -> None:
    model = Stack("grouped mT")
    float8.convert(model)
    call, x = compiled(model), torch.randn(48, 64, dtype=torch.bfloat16)
    with float8.cached_weights(model):
        step(model, x, call)
    kept = weakref.ref(model.w)
    del model, call
    gc.collect()
    assert kept() is None


def test_views_of_cached_weights_of_dynamic_sizes() -> None:
    model, x = Stack("bmm mT"), torch.randn(48, 64, dtype=torch.bfloat16)
    float8.convert(model)

    def product(x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x.unflatten(0, (4, 12)), w.mT) + x[:12] @ w[2].t()

    call = compiled(product, dynamic=True)
    for context in (float8.cached_weights(model), nullcontext()):
        with context:
            w = model.w.detach()
            assert_same_bytes(call(x, w), product(x, w))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
def test_graph_breaks_between_a_view_and_its_product(cached: bool) -> None:
    model, x = Stack("bmm mT"), torch.randn(48, 64, dtype=torch.bfloat16)
    float8.convert(model)

    def broken(x: Tensor) -> Tensor:
        w, first = model.w.mT, model.w[0]
        torch._dynamo.graph_break()
        return torch.bmm(x.unflatten(0, (4, 12)), w) + F.linear(x, first).unflatten(0, (4, 12))

    expected = broken(x)
    with float8.cached_weights(model) if cached else nullcontext():
        assert_same_bytes(torch.compile(broken, backend="aot_eager")(x), expected)


def test_copies_are_of_the_device_that_was_assumed() -> None:
    for name in ("one by one", "linear"):
        model = mlp() if name == "linear" else Stack(name)
        if name != "linear":
            float8.convert(model)
        x = torch.randn(48, 64, dtype=torch.bfloat16)
        for call in (model, compiled(model)):
            with float8.cached_weights(model):
                y = call(x)
                with assume_device("gfx942"), pytest.raises(Exception, match=CHANGING):
                    call(x)
                assert_same_bytes(call(x), y)


def test_a_view_that_outlives_its_block_has_no_copies() -> None:
    model, x = Stack("grouped mT"), torch.randn(12, 64, dtype=torch.bfloat16)
    float8.convert(model.requires_grad_(False))
    with float8.cached_weights(model):
        view = model.w[1]
        y = x @ view.t()
    with torch.no_grad():
        model.w.mul_(2)
    for context in (nullcontext(), float8.cached_weights(model)):
        with context:
            for f in (torch.matmul, compiled(torch.matmul)):
                assert_same_bytes(f(x, view.t()), y * 2)


def test_blocks_are_entered_outside_of_graphs() -> None:
    model, x = Stack("grouped mT"), torch.randn(48, 64, dtype=torch.bfloat16)
    float8.convert(model)

    def micro_batches(x: Tensor) -> Tensor:
        with float8.cached_weights(model):
            return model(x) + model(x)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="enter it outside"):
        compiled(micro_batches)(x)
    torch._dynamo.reset()
    assert_same_bytes(torch.compile(micro_batches, backend="aot_eager")(x), micro_batches(x))


# ---- the SwiGLU layer --------------------------------------------------------------------------


@pytest.mark.parametrize("norm_eps", [None, 1e-5], ids=["", "norm"])
@pytest.mark.parametrize("recipe", [*RECIPES.values(), SAVE, OFF], ids=lambda r: r.name)
def test_a_swiglu_layer_has_eagers_bits(recipe: Recipe, norm_eps: float | None) -> None:
    layer = SwiGLU(64, 96, dtype=torch.bfloat16, recipe=recipe, norm_eps=norm_eps)
    x = torch.randn(5, 7, 64, dtype=torch.bfloat16)
    expected = step(layer, x)
    ran, layer.down_proj.last_run = layer.last_run, None
    assert_all_same(step(layer, x, compiled(layer)), expected)
    assert ran == layer.last_run is not None  # recorded, without a graph break


def test_a_swiglu_function_has_eagers_bits_under_autocast() -> None:
    layer, x = SwiGLU(64, 96, norm_eps=1e-5), torch.randn(33, 64)

    def call(x: Tensor) -> Tensor:
        gate, up, down = (m.weight for m in (layer.gate_proj, layer.up_proj, layer.down_proj))
        return swiglu_mlp(x, gate, up, down, norm_weight=layer.norm.weight, eps=1e-5)

    for dtype in (None, torch.bfloat16):
        expected = step(layer, x, autocast=dtype)
        assert_all_same(step(layer, x, compiled(call), dtype), expected)


@NAMED
def test_a_swiglu_layer_with_symbolic_sizes(recipe: Recipe) -> None:
    layer = SwiGLU(64, 48, dtype=torch.bfloat16, recipe=recipe, norm_eps=1e-5)
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(layer, counter, dynamic=True)
    for tokens in (160, 135, 512, 257):
        x = torch.randn(tokens, 64, dtype=torch.bfloat16)
        assert_all_same(step(layer, x, call), step(layer, x))
    # torch.compile begins anew, at the first call, where it made a symbol of the norm's eps.
    assert counter.frame_count <= 2


class Checkpointed(nn.Module):
    """A SwiGLU layer and a residual connection, recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = SwiGLU(64, 96, dtype=torch.bfloat16, norm_eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.mlp, x, use_reentrant=False)
        return x + y


def test_a_checkpointed_swiglu_layer_in_a_graph() -> None:
    model = nn.Sequential(Checkpointed(), Checkpointed())
    x = torch.randn(35, 64, dtype=torch.bfloat16, requires_grad=True)
    call = compiled(model)
    assert_all_same(step(model, x, call), step(model, x))
    assert model[0].mlp.last_run == ("torch",) * 3
    with saved_bytes() as total:
        call(x)
    assert total() <= 2 * x.nbytes


@pytest.mark.parametrize("recipe", [ROWWISE, float8.BLOCKWISE, SAVE], ids=lambda r: r.name)
def test_a_compiled_swiglu_layer_keeps_no_more_than_eager(recipe: Recipe) -> None:
    layer = SwiGLU(128, 256, dtype=torch.bfloat16, recipe=recipe, norm_eps=1e-5)
    x = torch.randn(16, 128, dtype=torch.bfloat16, requires_grad=True)
    call = compiled(layer)
    call(x)
    totals = []
    for f in (layer, call):
        with saved_bytes() as total:
            f(x)
        totals.append(total())
    assert totals[1] <= totals[0]


def test_a_swiglu_layer_with_cached_weights_in_a_graph() -> None:
    layer, x = SwiGLU(64, 48, recipe=float8.MXFP8), torch.randn(33, 64)
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(layer, counter)
    for _ in range(3):
        expected = step(layer, x)
        assert_all_same(step(layer, x, call), expected)
        with float8.cached_weights(layer):
            assert_all_same(step(layer, x, call), expected)
        with torch.no_grad():
            layer.up_proj.weight.mul_(1.5)
    assert counter.frame_count == 2


def test_a_swiglu_layer_that_comes_apart_compiles_again() -> None:
    layer, x = SwiGLU(64, 48), torch.randn(33, 64)
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(layer, counter)
    for recipe in (ROWWISE, float8.MXFP8, OFF, ROWWISE, float8.MXFP8):
        layer.up_proj.recipe = recipe
        assert_all_same(step(layer, x, call), step(layer, x))
    assert counter.frame_count == 3


def test_inductor_gives_a_swiglu_layer_eagers_bits() -> None:
    """But for the norm's gradient, which it fuses."""
    for norm_eps in (None, 1e-5):
        layer = SwiGLU(64, 96, dtype=torch.bfloat16, norm_eps=norm_eps)
        x = torch.randn(3, 16, 64, dtype=torch.bfloat16)
        got, expected = step(layer, x, compiled(layer, "inductor")), step(layer, x)
        for i, (t, e) in enumerate(zip(got, expected, strict=True)):
            if norm_eps is not None and i in (1, 2):
                assert sqnr(t, e) > 40
            else:
                assert_same_bytes(t, e)


# ---- inductor ----------------------------------------------------------------------------------


def test_inductor_gives_one_layer_eagers_bits() -> None:
    layer = Float8Linear(1040, 1040, dtype=torch.bfloat16)  # a size whose strides inductor pads
    x = torch.randn(3, 16, 1040, dtype=torch.bfloat16)
    assert_all_same(step(layer, x, compiled(layer, "inductor")), step(layer, x))


def test_inductor_that_rounds_as_eager_does_gives_a_network_eagers_bits() -> None:
    version = tuple(int(n) for n in torch.__version__.split(".")[:2])
    model = nn.Sequential(
        Float8Linear(64, 96, dtype=torch.bfloat16),
        nn.GELU(),
        Float8Linear(96, 48, dtype=torch.bfloat16, recipe=float8.MXFP8),
    )
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with torch._inductor.config.patch(emulate_precision_casts=True), deterministic():
        got = step(model, x, compiled(model, "inductor"))
    expected = step(model, x)
    if version >= (2, 13):
        assert_all_same(got, expected)
    else:  # emulates some of the roundings, and a cast of what is left may land on the next number
        assert min(sqnr(t, e) for t, e in zip(got, expected, strict=True)) > 20


@needs("cuda")
@NAMED
def test_cuda_graphs_and_gradient_accumulation(recipe: Recipe) -> None:
    model = mlp(recipe).cuda()
    call = compiled(model, "inductor", mode="reduce-overhead")
    batches = torch.randn(6, 32, 64, dtype=torch.bfloat16, device="cuda")
    results: dict[str, list[Tensor]] = {}
    for p in model.parameters():  # not the graph's own memory, which its next run writes again
        p.grad = torch.zeros_like(p)
    for name, f in (("eager", model), ("graphs", call)):
        grads = []
        for i in range(3):
            model.zero_grad(set_to_none=False)
            for x in batches[2 * i : 2 * i + 2]:
                torch.compiler.cudagraph_mark_step_begin()
                f(x).square().mean().backward()
            grads += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results[name] = grads
    for t, e in zip(results["graphs"], results["eager"], strict=True):
        assert sqnr(t, e) > 15


@needs("cuda")
@NAMED
def test_inductor_on_a_gpu(recipe: Recipe) -> None:
    layer = Float8Linear(1040, 1040, device="cuda", dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(3, 16, 1040, device="cuda", dtype=torch.bfloat16)
    got, expected = step(layer, x, compiled(layer, "inductor")), step(layer, x)
    for t, e in zip(got, expected, strict=True):
        assert sqnr(t, e) > 35


@pytest.fixture(autouse=True)
def _every_recompilation_counts() -> Iterator[None]:
    """A test that recompiles past the limit fails: it would fall back to eager in silence."""
    limit: AbstractContextManager[None] = torch._dynamo.config.patch(
        fail_on_recompile_limit_hit=True
    )
    with limit:
        yield
