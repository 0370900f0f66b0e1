"""Into FP8 and out of it: what convert takes and leaves, and what works around a converted model.

Objects stay the same objects, state dicts stay plain, and every layer that stays in high precision
says why. How well layers multiply is the business of test_linear.py.
"""

import copy
import importlib
import io
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from process_group import one_process_group
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode

from float8 import (
    BLOCKWISE,
    MXFP8,
    RECIPES,
    ROWWISE,
    ROWWISE_WGRAD_HP,
    TENSORWISE,
    Float8Linear,
    Recipe,
    SwiGLU,
    cached_weights,
    quantize,
)
from float8.convert import KEEP, Report, convert, revert, summary
from float8.devices import describe
from float8.moe import SharedExpert
from float8.sites import _TRANSFORMERS
from float8.testing import assert_same_bytes, needs, relative_error

DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


class Block(nn.Module):
    """A residual MLP with a norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head: [B, T] tokens to [B, T, vocabulary]."""

    def __init__(self, dim: int = 32, blocks: int = 2, vocabulary: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


class MyLinear(nn.Linear):
    """A user's layer, with a forward and attributes of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.linear(x, self.weight.to(x.dtype), self.bias) * 2

    def flops(self) -> int:
        return 2 * self.in_features * self.out_features


class Plainest(nn.Linear):
    """A subclass that changes nothing."""


class Experts(nn.Module):
    """Stacked experts, each of which takes an equal share of the tokens; other shapes as well."""

    def __init__(self, experts: int = 4, dim: int = 32) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, dim, 2 * dim) / dim**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, 2 * dim, dim) / dim**0.5)
        self.bias = nn.Parameter(torch.zeros(experts, dim))
        self.position = nn.Parameter(torch.zeros(1, 64, dim))
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x_EMK = x.reshape(len(self.w1), -1, x.shape[-1])
        y = torch.bmm(F.gelu(torch.bmm(x_EMK, self.w1)), self.w2) + self.bias.unsqueeze(1)
        return (y.reshape(x.shape) + self.position[0, : len(x)]) * self.scale


class Projection(nn.Module):
    """A custom module: a weight [K, N] that it multiplies, a table that it adds."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, dim))
        self.proj = nn.Parameter(torch.randn(dim, dim) / dim**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.table[: len(x)]) @ self.proj


TOKENS = torch.arange(24).reshape(2, 12)
LAYERS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]


def loss_of(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    return model(tokens).float().square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def raised(call: Callable[[], object], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as info:
        call()
    return str(info.value)


# --- what convert does


def test_converts_by_class_and_copies_nothing() -> None:
    model = Net()
    modules, parameters = list(model.modules()), dict(model.named_parameters())
    hook = model.blocks[0].up.register_forward_hook(lambda m, args, y: None)
    hooks = dict(model.blocks[0].up._forward_hooks)
    before = {name: t.clone() for name, t in model.state_dict().items()}

    report = convert(model)

    assert report.converted == dict.fromkeys(LAYERS, ("rowwise", "Float8Linear"))
    assert report.skipped == {"lm_head": "kept by pattern 'lm_head'"}
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert dict(model.blocks[0].up._forward_hooks) == hooks
    assert type(model.blocks[0].up) is Float8Linear
    assert type(model.lm_head) is nn.Linear
    assert list(model.state_dict()) == list(before)
    for name, t in model.state_dict().items():
        assert type(t) is Tensor
        assert torch.equal(t, before[name])
    hook.remove()
    assert_expected_inline(
        str(report),
        """\
layer          as            recipe, or why not
blocks.0.up    Float8Linear  rowwise
blocks.0.down  Float8Linear  rowwise
blocks.1.up    Float8Linear  rowwise
blocks.1.down  Float8Linear  rowwise
lm_head        -             kept by pattern 'lm_head'
4 converted (4 Float8Linear, 0 Float8Weight), 1 skipped""",
    )


def test_a_single_layer_is_a_model() -> None:
    layer = nn.Linear(8, 4)
    assert convert(layer).converted == {"": ("rowwise", "Float8Linear")}
    assert type(layer) is Float8Linear
    assert "(the model)" in str(summary(layer))
    revert(layer)
    assert type(layer) is nn.Linear


def test_revert_leaves_no_trace() -> None:
    model = Net()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    convert(model)
    with cached_weights(model):
        loss_of(model).backward()
    revert(model)
    for name, module in model.named_modules():
        assert vars(module) == before[name]
        assert type(module) in (Net, Block, nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleList)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert {layer.note for layer in summary(model).layers} == {"not converted"}


def test_revert_of_a_part_and_of_nothing() -> None:
    model = Net()
    convert(model.blocks[1])
    revert(model)
    assert type(model.blocks[1].up) is nn.Linear
    assert_expected_inline(
        raised(lambda: revert(model)),
        """no layer of this model is in FP8, so there is nothing to revert""",
    )
    convert(model)
    revert(model.blocks[0])
    assert [layer.recipe for layer in summary(model).layers] == [None] * 2 + ["rowwise"] * 2 + [
        None
    ]


def test_revert_refuses_what_was_built_on_top() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    convert(model)
    nn.utils.parametrizations.orthogonal(model[1])
    messages = [raised(lambda: revert(model))]
    parametrize.remove_parametrizations(model[1], "weight")
    model[1].forward = model[1].forward
    messages.append(raised(lambda: revert(model)))
    assert type(model[0]) is Float8Linear
    assert_expected_inline(
        "\n".join(messages),
        """\
Layer '1' is of class ParametrizedFloat8Linear, which something (fully_shard, parametrize, ...) derived from Float8Linear; revert before that
Layer '1' got a forward of its own after convert, which may call that of Float8Linear; take it off before revert""",  # noqa: E501
    )


def test_converting_twice_is_refused() -> None:
    model = Net()
    convert(model.blocks[1], TENSORWISE)
    message = raised(lambda: convert(model))
    assert type(model.blocks[0].up) is nn.Linear
    assert_expected_inline(
        message,
        """Layer 'blocks.1.up' is in FP8 already; float8.revert(model), then convert as you like""",
    )


# --- patterns and options


def test_patterns_match_the_full_name_or_its_last_component() -> None:
    for keep in (["up"], ["blocks.*.up"], ["u?"], ["*.up"]):
        report = convert(Net(), keep=[*keep, "lm_head"])
        assert list(report.converted) == ["blocks.0.down", "blocks.1.down"]
        assert report.skipped["blocks.0.up"] == f"kept by pattern {keep[0]!r}"
    assert list(convert(Net(), keep=["blocks.0.*"]).skipped) == ["blocks.0.up", "blocks.0.down"]
    assert "Up" not in convert(Net(), keep=["UP"], strict=False).skipped


def test_default_keep_may_match_nothing_and_covers_routers() -> None:
    model = nn.ModuleDict(
        {name: nn.Linear(8, 8) for name in ("gate", "gate_proj", "router", "moe_router2", "output")}
    )
    assert list(convert(model).converted) == ["gate_proj"]


def test_default_keep_covers_routers_of_several_layers() -> None:
    def moe() -> nn.ModuleDict:
        gate = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        stack = nn.ParameterDict({"weight": nn.Parameter(torch.randn(4, 16, 16))})
        return nn.ModuleDict({"gate": gate, "gated": nn.Linear(16, 16), "experts": stack})

    model = nn.ModuleDict({"block": moe(), "gate": nn.ModuleDict({"wg": nn.Linear(16, 4)})})
    assert list(convert(model).converted) == ["block.gated", "block.experts.weight"]
    assert list(convert(moe()).converted) == ["gated", "experts.weight"]
    stacks = nn.ModuleDict({"gate": moe()["experts"], "up": moe()["experts"]})
    assert list(convert(stacks).converted) == ["gate.weight", "up.weight"]


def test_a_map_gives_each_layer_its_recipe() -> None:
    model = Net()
    report = convert(model, {"blocks.0.up": None, "up": MXFP8, "blocks.*": TENSORWISE}, keep=())
    assert report.converted == {
        "blocks.0.down": ("tensorwise", "Float8Linear"),
        "blocks.1.up": ("mxfp8", "Float8Linear"),
        "blocks.1.down": ("tensorwise", "Float8Linear"),
    }
    assert report.skipped == {
        "blocks.0.up": "kept by None for pattern 'blocks.0.up'",
        "lm_head": "no pattern of the recipe map matches it",
    }
    loss_of(model).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_layers_that_are_alike_share_a_line() -> None:
    """The fifth is not; "v2" is a name, not a number."""
    layers = [
        nn.ModuleDict({"v2": nn.Linear(16, 16), "mlp": SharedExpert(16, 32)}) for _ in range(6)
    ]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers), "head": nn.Linear(16, 4)})
    report = convert(model, {"layers.4.v2": MXFP8, "*": ROWWISE})
    assert len(report.converted) == 25
    assert_expected_inline(
        str(report),
        """\
layer                       as            recipe, or why not
layers.*.v2 (5)             Float8Linear  rowwise
layers.*.mlp.gate_proj (6)  Float8Linear  rowwise
layers.*.mlp.up_proj (6)    Float8Linear  rowwise
layers.*.mlp.down_proj (6)  Float8Linear  rowwise
layers.4.v2                 Float8Linear  mxfp8
head                        Float8Linear  rowwise
layers.*.mlp (6)            SwiGLU        rowwise
25 converted (25 Float8Linear, 0 Float8Weight), 0 skipped, 6 of 6 SwiGLU fused""",
    )
    assert_expected_inline(
        str(summary(model)),
        """\
layer                       shape    recipe   forward    dgrad  wgrad  note
layers.*.v2 (5)             16 x 16  rowwise  never run  -      -
layers.*.mlp.gate_proj (6)  32 x 16  rowwise  never run  -      -      fused in 'layers.*.mlp'
layers.*.mlp.up_proj (6)    32 x 16  rowwise  never run  -      -      fused in 'layers.*.mlp'
layers.*.mlp.down_proj (6)  16 x 32  rowwise  never run  -      -      fused in 'layers.*.mlp'
layers.4.v2                 16 x 16  mxfp8    never run  -      -
head                        4 x 16   rowwise  never run  -      -
25 of 25 in FP8, 25 of them never run""",
    )


def test_patterns_that_decide_nothing_are_refused() -> None:
    model = Net()
    before = {name: type(module) for name, module in model.named_modules()}
    recipe = {"down": ROWWISE, "*.down": MXFP8, "*": ROWWISE, "fc": ROWWISE}
    message = raised(lambda: convert(model, recipe, keep=("blocks", "head"), experts=MXFP8))
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert_expected_inline(
        message.split(". ")[0],
        """convert left the model as it was: pattern 'blocks' of keep decides nothing ('blocks' only holds layers, which 'blocks.*' matches); pattern 'head' of keep decides nothing; pattern '*.down' of recipe decides nothing, since keep or an earlier pattern has decided what it matches; pattern 'fc' of recipe decides nothing; no stack of expert matrices is left for experts= to decide""",  # noqa: E501
    )
    report = convert(model, recipe, keep=("blocks", "head"), experts=MXFP8, strict=False)
    assert len(report.converted) == 5
    everything = {"up": ROWWISE, "down": MXFP8, "*": None}  # "*" is for what may be left
    assert len(convert(Net(), everything, keep=(*KEEP, "blocks.0.*")).converted) == 2
    assert len(convert(Net(), experts=False).converted) == 4


def test_patterns_that_hit_only_what_cannot_be_converted_are_refused() -> None:
    model = nn.ModuleDict(
        {"fc": nn.Linear(16, 16), "wide": nn.Linear(16, 16).double(), "lazy": nn.LazyLinear(4)}
    )
    model["experts"] = Experts().double()
    recipe = {"wide": ROWWISE, "fc": ROWWISE, "[wl]*": MXFP8}
    message = raised(lambda: convert(model, recipe, experts=MXFP8))
    assert type(model["fc"]) is nn.Linear
    assert_expected_inline(
        message.split(". ")[0],
        """convert left the model as it was: pattern 'wide' of recipe decides nothing, since 'wide' cannot multiply in FP8 (its weight is torch.float64; needed torch.bfloat16, torch.float16, torch.float32); pattern '[wl]*' of recipe decides nothing, since 'wide' cannot multiply in FP8 (its weight is torch.float64; needed torch.bfloat16, torch.float16, torch.float32); no stack of expert matrices is left for experts= to decide, since 'experts.w1' cannot multiply in FP8 (its weight is torch.float64; needed torch.bfloat16, torch.float16, torch.float32)""",  # noqa: E501
    )
    assert list(convert(model, recipe, experts=MXFP8, strict=False).converted) == ["fc"]
    revert(model)
    assert list(convert(model, {"*": ROWWISE}).converted) == ["fc"]  # it decides of one
    revert(model)
    for kept in ({"keep": ("wide",)}, {"recipe": {"wide": None, "fc": ROWWISE}}):
        assert list(convert(model, **kept).converted) == ["fc"]  # type: ignore[arg-type]
        revert(model)


def test_nothing_to_convert_is_refused() -> None:
    assert_expected_inline(
        raised(lambda: convert(nn.ModuleDict({"lm_head": nn.Linear(4, 4)}))),
        """\
convert left the model as it was: no layer is left to convert. Change that, or pass strict=False. It would have done this:
layer    as  recipe, or why not
lm_head  -   kept by pattern 'lm_head'
0 converted (0 Float8Linear, 0 Float8Weight), 1 skipped""",  # noqa: E501
    )
    assert convert(nn.ReLU(), strict=False) == Report({}, {})


def test_a_float8_weight_that_is_parametrized_after_convert() -> None:
    class Twice(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 2

    model = nn.ModuleDict({"experts": Experts(), "fc": nn.Linear(16, 16)})
    convert(model)
    parametrize.register_parametrization(model["experts"], "w1", Twice())
    notes = {layer.name: layer.note for layer in summary(model).layers}
    assert notes["experts.parametrizations.w1.original"].startswith("overridden")
    with cached_weights(model):
        assert model["experts"].w1.shape == model["experts"].parametrizations["w1"].original.shape
    assert_expected_inline(
        raised(lambda: revert(model)),
        """Layer 'experts.parametrizations.w1.original' is a Float8Weight that was parametrized after convert; torch.nn.utils.parametrize.remove_parametrizations, then revert""",  # noqa: E501
    )
    parametrize.remove_parametrizations(model["experts"], "w1")
    revert(model)
    assert type(model["experts"].w1) is nn.Parameter


def test_parametrized_linears_are_cast_at_each_use_within_cached_weights() -> None:
    class Twice(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 2

    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(6, 32)
    convert(model)
    parametrize.register_parametrization(model[0], "weight", Twice())
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with cached_weights(model, accumulate=torch.float32):
        model(x).sum().backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert_same_bytes(p.grad, grad)


def test_arguments_of_the_wrong_kind() -> None:
    wrong: list[Callable[[], object]] = [
        lambda: convert([nn.Linear(2, 2)]),  # type: ignore[arg-type]
        lambda: convert(Net(), "rowwise"),  # type: ignore[arg-type]
        lambda: convert(Net(), {"*": "rowwise"}),  # type: ignore[dict-item]
        lambda: convert(Net(), {1: ROWWISE}),  # type: ignore[dict-item]
        lambda: convert(Net(), keep="lm_head"),
        lambda: convert(Net(), keep=("lm_head", None)),  # type: ignore[arg-type]
        lambda: convert(Net(), experts=True),  # type: ignore[arg-type]
        lambda: convert(Net(), fuse="mlp"),  # type: ignore[arg-type]
        lambda: convert(Net(), strict="no"),  # type: ignore[arg-type]
        lambda: summary(None),  # type: ignore[arg-type]
    ]
    assert_expected_inline(
        "\n".join(raised(call) for call in wrong),
        """\
model is of type list; convert changes an nn.Module in place
'rowwise' is no recipe; pass a float8.Recipe, such as those of float8.RECIPES (tensorwise, rowwise, rowwise_wgrad_hp, blockwise, mxfp8), or a map from patterns to recipes
'rowwise' is no recipe; pass a float8.Recipe, such as those of float8.RECIPES (tensorwise, rowwise, rowwise_wgrad_hp, blockwise, mxfp8), or a map from patterns to recipes
recipe has the keys [1]; patterns are strings
keep='lm_head' must be a sequence of patterns: ('lm_head', 'blocks.0.*')
keep=('lm_head', None) must be a sequence of patterns: ('lm_head', 'blocks.0.*')
experts=True must be 'auto', False or a float8.Recipe
fuse='mlp' must be True or False
strict='no' must be True or False
model is of type NoneType; summary takes an nn.Module""",  # noqa: E501
    )


# --- what convert leaves alone, and why


def frozen_out(make: Callable[[], nn.Module]) -> str:
    """The reason that a layer which cannot be converted is given."""
    model = nn.ModuleDict({"good": nn.Linear(16, 16), "bad": make()})
    before = type(model["bad"])
    report = convert(model)
    assert list(report.converted) == ["good"]
    assert type(model["bad"]) is before
    assert list(report.skipped) == ["bad"]
    notes = {layer.name: layer.note for layer in summary(model).layers}
    assert notes["bad"] == report.skipped["bad"]
    return report.skipped["bad"]


def with_inference_weight() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(16, 16)


def with_fp8_weight() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.weight = nn.Parameter(quantize(layer.weight.detach(), (128, 128)), requires_grad=False)
    return layer


def with_int8_weight() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.weight = nn.Parameter(torch.ones(16, 16, dtype=torch.int8), requires_grad=False)
    return layer


def with_deleted_weight() -> nn.Module:
    layer = nn.Linear(16, 16)
    del layer.weight
    return layer


def with_no_weight() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.register_parameter("weight", None)
    return layer


def with_own_recipe() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.recipe = "sourdough"  # type: ignore[assignment]
    return layer


def with_hooked_weight() -> nn.Module:
    layer = MyLinear(16, 16)
    layer.weight.register_hook(lambda g: g)
    return layer


LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    "lazy": lambda: nn.LazyLinear(16),
    "float64": lambda: nn.Linear(16, 16, dtype=torch.float64),
    "int8": with_int8_weight,
    "inference": with_inference_weight,
    "fp8": with_fp8_weight,
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(16, 16)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(16, 16)),
    "deleted": with_deleted_weight,
    "none": with_no_weight,
    "attribute": with_own_recipe,
    "hooks": with_hooked_weight,
    "torch.ao": lambda: nn.MultiheadAttention(16, 2).out_proj,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_reasons() -> None:
    reasons = {name: frozen_out(make) for name, make in LEFT_ALONE.items()}
    reasons["old weight_norm"] = frozen_out(lambda: nn.utils.weight_norm(nn.Linear(16, 16)))
    assert_expected_inline(
        "\n".join(f"{name}: {reason}" for name, reason in reasons.items()),
        """\
lazy: a lazy layer has no weight yet: run one batch before convert
float64: its weight is torch.float64; needed torch.bfloat16, torch.float16, torch.float32
int8: its weight is torch.int8; needed torch.bfloat16, torch.float16, torch.float32
inference: its weight was made under torch.inference_mode, where nothing can be trained
fp8: its weight is stored in FP8 already (e4m3fn) and multiplies so
orthogonal: it is parametrized: its weight is computed at each use
weight_norm: it is parametrized: its weight is computed at each use
spectral_norm: its weight is no parameter: weight_norm, spectral_norm, pruning or FSDP1 makes it
deleted: its weight is no parameter: weight_norm, spectral_norm, pruning or FSDP1 makes it
none: its weight is no parameter: weight_norm, spectral_norm, pruning or FSDP1 makes it
attribute: it has an attribute 'recipe' of its own, a name that Float8Linear uses
hooks: its weight has hooks, which would be lost: register them after convert
torch.ao: a NonDynamicallyQuantizableLinear of torch.nn.modules.linear has its own way with its weight
old weight_norm: its weight is no parameter: weight_norm, spectral_norm, pruning or FSDP1 makes it""",  # noqa: E501
    )


def test_multihead_attention_is_left_alone() -> None:
    model = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(16, 2, kdim=8), "fc": nn.Linear(4, 4)}
    )
    report = convert(model)
    assert list(report.converted) == ["fc"]
    assert_expected_inline(
        str(report),
        """\
layer                    as            recipe, or why not
fc                       Float8Linear  rowwise
attention.q_proj_weight  -             nn.MultiheadAttention multiplies it in one function with everything else
attention.k_proj_weight  -             nn.MultiheadAttention multiplies it in one function with everything else
attention.v_proj_weight  -             nn.MultiheadAttention multiplies it in one function with everything else
attention.out_proj       -             nn.MultiheadAttention multiplies this weight itself, without calling the layer
1 converted (1 Float8Linear, 0 Float8Weight), 4 skipped""",  # noqa: E501
    )


def test_fast_path_of_the_encoder_layer() -> None:
    """In eval mode without gradients torch's layer never calls linear1 and linear2."""
    x = torch.randn(2, 4, 16)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    assert "eval mode" in convert(nn.ModuleList([layer, nn.Linear(2, 2)])).skipped["0.linear1"]

    layer.linear1.__class__ = Float8Linear  # by hand: this is what would happen
    layer.linear1.recipe = ROWWISE
    with torch.no_grad():
        layer.eval()(x)
    assert layer.linear1.last_run is None

    revert(layer)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert list(convert(layer).converted) == ["linear1", "linear2"]
        with torch.no_grad():
            layer(x)
        assert all(run.last_run for run in summary(layer).layers if run.recipe)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)

    plain = nn.TransformerEncoderLayer(16, 2, 32)  # batch_first=False has no fast path
    assert list(convert(plain).converted) == ["linear1", "linear2"]


def test_modules_of_torch_are_left_alone() -> None:
    model = nn.Sequential(
        nn.Conv1d(16, 16, 16),
        nn.Conv2d(4, 4, 3),
        nn.Embedding(32, 32),
        nn.EmbeddingBag(32, 32),
        nn.LayerNorm((16, 16, 16)),
        nn.Bilinear(16, 16, 16),
        nn.PReLU(),
        nn.Linear(16, 16),
    )
    report = convert(model)
    assert list(report.converted) == ["7"]
    assert report.skipped == {}


def test_recurrent_layers_say_why_they_are_left_alone() -> None:
    model = nn.ModuleDict(
        {"lstm": nn.LSTM(16, 16, proj_size=8), "cell": nn.GRUCell(16, 16), "fc": nn.Linear(8, 8)}
    )
    report = convert(model)
    assert list(report.converted) == ["fc"]
    assert_expected_inline(
        "\n".join(f"{name}: {reason}" for name, reason in report.skipped.items()),
        """\
lstm.weight_ih_l0: LSTM multiplies it in one function with everything else
lstm.weight_hh_l0: LSTM multiplies it in one function with everything else
lstm.weight_hr_l0: LSTM multiplies it in one function with everything else
cell.weight_ih: GRUCell multiplies it in one function with everything else
cell.weight_hh: GRUCell multiplies it in one function with everything else""",
    )
    assert {layer.name: layer.note for layer in summary(model).layers if layer.note} == {
        **report.skipped
    }
    revert(model)
    assert "LSTM multiplies it" in raised(lambda: convert(model, {"lstm.*": None, "*_hh*": MXFP8}))


def test_nothing_changes_when_a_layer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: nn.Module, name: str, recipe: Recipe) -> None:
        raise RuntimeError("no")

    class Mine(nn.Linear):
        pass

    monkeypatch.setattr(sys.modules["float8.convert"], "wrap_parameter", fail)
    model = nn.Sequential(nn.Linear(4, 4), Mine(4, 4))
    before = dict(vars(model[0]))
    raised(lambda: convert(model), RuntimeError)
    assert type(model[0]) is nn.Linear
    assert vars(model[0]) == before


# --- summary


def test_summary_shows_what_ran() -> None:
    model = Net(blocks=1)
    convert(model, {"up": ROWWISE_WGRAD_HP, "down": ROWWISE})
    model.blocks[0].up(torch.randn(3, 32))
    assert_expected_inline(
        str(summary(model)),
        """\
layer          shape    recipe            forward    dgrad  wgrad           note
blocks.0.up    64 x 32  rowwise_wgrad_hp  torch      torch  high precision
blocks.0.down  32 x 64  rowwise           never run  -      -
lm_head        48 x 32  -                 -          -      -               kept by pattern 'lm_head'
2 of 3 in FP8, 1 of them never run, 1 emulated""",  # noqa: E501
    )
    assert summary(model).fp8 == 2
    assert summary(model).layers[1].last_run is None


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("how", ["prune", "weight_norm", "spectral_norm"])
def test_summary_of_weights_that_were_taken_over(how: str) -> None:
    """By class, what a hook computes multiplies in FP8; a Float8Weight under a hook does not."""
    utils: dict[str, Callable[[nn.Module], object]] = {
        "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        "weight_norm": nn.utils.weight_norm,
        "spectral_norm": nn.utils.spectral_norm,
    }
    model = nn.Sequential(nn.Linear(32, 32), MyLinear(32, 32))
    convert(model)
    for layer in model:
        utils[how](layer)
    model(torch.randn(4, 32))
    found = summary(model)
    assert [layer.name for layer in found.layers if layer.recipe] == ["0"]
    assert found.layers[0].last_run == ("torch",) * 3
    notes = {layer.note for layer in found.layers if layer.name in ("1.weight_orig", "1.weight_v")}
    assert notes == {"overridden: something computes another weight from it, in high precision"}


def test_a_matrix_that_took_a_converted_ones_place_is_one_too() -> None:
    model, x = Experts(), torch.randn(64, 32)
    plain = copy.deepcopy(model)
    convert(model)
    for each in (model, plain):
        each.w1 = nn.Parameter(torch.arange(4 * 32 * 64.0).view(4, 32, 64).sin())
    assert not torch.equal(model(x), plain(x))
    found = {layer.name: (layer.recipe, layer.last_run) for layer in summary(model).layers}
    assert found["w1"] == found["w2"] == ("rowwise", ("torch",) * 3)
    revert(model)
    assert torch.equal(model(x), plain(x))
    assert not any(layer.recipe for layer in summary(model).layers)


def test_summary_without_layers() -> None:
    assert_expected_inline(
        str(summary(nn.ReLU())),
        """\
layer  shape  recipe  forward  dgrad  wgrad  note
0 of 0 in FP8, 0 of them never run""",
    )


def test_summary_of_a_layer_that_lost_its_weight() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(8, 4), nn.LazyLinear(4))
    convert(model[0])
    for layer in model[:2]:
        del layer.weight
    assert [layer.shape for layer in summary(model).layers] == [(), (), ()]
    assert [layer.recipe for layer in summary(model).layers] == ["rowwise", None, None]


@pytest.mark.parametrize("chip", ["NVIDIA H200", "NVIDIA H20", "NVIDIA B200", None])
def test_advice_only_where_it_was_measured(
    chip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = replace(describe("sm_90"), product=chip)
    monkeypatch.setattr(sys.modules["float8.convert"], "device_profile", lambda device: profile)
    model = nn.ModuleDict()
    for n, k in (
        (2048, 8192),
        (8192, 1024),
        (4096, 2048),
        (4096, 2080),
        (1024, 4096),
        (1040, 4096),
    ):
        model[f"{n}x{k}"] = nn.Linear(k, n, device="meta")
    small = {}
    for recipe in (ROWWISE, TENSORWISE, ROWWISE_WGRAD_HP, BLOCKWISE, MXFP8):
        convert(model, recipe)
        small[recipe.name] = [layer.name for layer in summary(model).layers if layer.note]
        revert(model)
    measured = chip == "NVIDIA H200"
    assert small == {
        "rowwise": ["2048x8192", "8192x1024", "4096x2048", "1024x4096", "1040x4096"] * measured,
        "tensorwise": ["1024x4096"] * measured,
        "rowwise_wgrad_hp": [],
        "blockwise": [],
        "mxfp8": [],
    }


# --- weights that are shared, on the meta device, moved, loaded


def test_tied_weights_stay_tied() -> None:
    model = Net()
    model.lm_head.weight = model.embed.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model, keep=())
    assert model.lm_head.weight is model.embed.weight
    loss_of(model).backward()
    gradient = model.embed.weight.grad.clone()

    apart = copy.deepcopy(model)
    apart.zero_grad()
    apart.lm_head.weight = nn.Parameter(model.embed.weight.detach().clone())
    loss_of(apart).backward()
    torch.testing.assert_close(apart.lm_head.weight.grad + apart.embed.weight.grad, gradient)

    before = model.embed.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model.lm_head.weight.detach(), before - 0.1 * gradient)
    revert(model)
    assert model.lm_head.weight is model.embed.weight


def test_meta_device_and_to_empty() -> None:
    """to_empty unties what shares a parameter, converted or not; what is tied later stays so."""
    models = []
    for converted in (False, True):
        with torch.device("meta"):
            model = Net()
        model.lm_head.weight = model.embed.weight
        if converted:
            convert(model, keep=())
        assert model.lm_head.weight is model.embed.weight
        model.to_empty(device="cpu")
        models.append(model)
    plain, model = models
    assert len(list(model.parameters())) == len(list(plain.parameters()))

    reference = Net()
    model.load_state_dict(reference.state_dict())
    convert(reference, keep=())
    assert_same_bytes(model(TOKENS), reference(TOKENS))
    model.lm_head.weight = model.embed.weight
    loss_of(model).backward()
    assert model.embed.weight.grad is not None


def test_a_shared_module_is_one_layer() -> None:
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert list(convert(model, keep=("lm_head",)).converted) == ["0"]
    x = torch.randn(4, 16)
    model(x).sum().backward()
    shared = layer.weight.grad.clone()
    twins = nn.Sequential(copy.deepcopy(layer), nn.ReLU(), copy.deepcopy(layer))
    twins.zero_grad()
    twins(x).sum().backward()
    assert_same_bytes(shared, twins[0].weight.grad + twins[2].weight.grad)

    revert(model)
    assert raised(lambda: convert(model, keep=("2",))).startswith(
        "convert left the model as it was"
    )


@pytest.mark.parametrize("first", [True, False], ids=["convert, load", "load, convert"])
@pytest.mark.parametrize("assign", [True, False], ids=["assign", "copy"])
def test_a_bf16_checkpoint_loads_strictly(first: bool, assign: bool) -> None:
    saved = io.BytesIO()
    source = Net().bfloat16()
    torch.save(source.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    model = Net().bfloat16()
    if first:
        convert(model)
    model.load_state_dict(state, strict=True, assign=assign)
    if not first:
        convert(model)
    convert(source)
    assert_same_bytes(model(TOKENS), source(TOKENS))


def test_a_converted_models_checkpoint_is_plain() -> None:
    model = Net()
    convert(model)
    loss_of(model).backward()
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    size = saved.tell()
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    assert {type(t) for t in state.values()} == {Tensor}
    Net().load_state_dict(state, strict=True)
    for _ in range(2):
        loss_of(model).backward()
    again = io.BytesIO()
    torch.save(model.state_dict(), again)
    assert again.tell() == size


def test_loaded_weights_leave_no_memory_of_the_old_ones() -> None:
    model, fresh = Net(), Net()
    convert(model)
    model(TOKENS)
    fresh.load_state_dict({name: t * 100 for name, t in model.state_dict().items()})
    model.load_state_dict(fresh.state_dict())
    convert(fresh)
    assert_same_bytes(model(TOKENS), fresh(TOKENS))


def test_moves_and_casts_of_the_model() -> None:
    model = Net()
    convert(model)
    for move in ("bfloat16", "half", "float", "cpu"):
        getattr(model, move)()
        reference = Net().to(model.lm_head.weight.dtype)
        reference.load_state_dict(model.state_dict())
        convert(reference)
        y = model(TOKENS)
        assert y.dtype == model.blocks[0].up.weight.dtype
        assert_same_bytes(y, reference(TOKENS))
    model.to("meta")
    assert summary(model).fp8 == 4
    assert model.blocks[0].up.weight.is_meta


def test_an_optimizer_made_before_trains_the_same_parameters() -> None:
    model = Net()
    after = copy.deepcopy(model)
    early = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    convert(model)
    convert(after)
    late = torch.optim.AdamW(after.parameters(), lr=1e-2, foreach=True)
    losses = train(model, early)
    assert losses == train(after, late)
    assert losses[-1] < losses[0]
    assert early.state_dict()["state"].keys() == late.state_dict()["state"].keys()


# --- copies, wrappers, other uses of a model


def test_copies_and_pickles() -> None:
    model = Net()
    convert(model, {"up": MXFP8, "down": BLOCKWISE})
    y = model(TOKENS)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert type(twin.blocks[0].up) is Float8Linear
        assert twin.blocks[0].up.recipe == MXFP8
        assert_same_bytes(twin(TOKENS), y)
        assert summary(twin).fp8 == 4
    twin = copy.deepcopy(model)
    revert(twin)
    assert type(twin.blocks[0].up) is nn.Linear
    assert type(model.blocks[0].up) is Float8Linear


def test_a_moving_average_of_the_weights() -> None:
    model = Net()
    convert(model)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    before = model.blocks[0].up.weight.detach().clone()
    average.update_parameters(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average.update_parameters(model)
    expected = 0.5 * before + 0.5 * model.blocks[0].up.weight.detach()
    torch.testing.assert_close(average.module.blocks[0].up.weight.detach(), expected)
    assert summary(average).fp8 == 4
    assert average(TOKENS).isfinite().all()


def test_functional_call() -> None:
    model = Net()
    convert(model)
    other = Net()
    convert(other)
    y = torch.func.functional_call(model, dict(other.named_parameters()), (TOKENS,))
    assert_same_bytes(y, other(TOKENS))
    y.sum().backward()
    assert model.blocks[0].up.weight.grad is None
    assert other.blocks[0].up.weight.grad is not None
    assert_same_bytes(torch.func.functional_call(model, other.state_dict(), (TOKENS,)), y)


class Adapter(nn.Module):
    """A low-rank adapter around a frozen layer, as PEFT makes them."""

    def __init__(self, base_layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@EVERY_RECIPE
@pytest.mark.parametrize("order", ["convert, adapt", "adapt, convert"])
def test_adapters_around_layers(order: str, recipe: Recipe) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    if order == "convert, adapt":
        convert(model, recipe)
        model[2] = Adapter(model[2])
    else:
        model[2] = Adapter(model[2])
        assert list(convert(model, recipe, keep=("lora_*",)).converted) == ["0", "2.base_layer"]
    assert type(model[2].base_layer) is Float8Linear
    assert type(model[2].lora_A) is nn.Linear
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x = torch.randn(16, 32)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert model[2].base_layer.weight.grad is None
    assert model[2].lora_B.weight.grad.abs().sum() > 0


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_data_parallel() -> None:
    model, alone = Net(), Net()
    alone.load_state_dict(model.state_dict())
    convert(alone)
    with one_process_group():
        parallel = nn.parallel.DistributedDataParallel(model)
        report = convert(parallel)
        assert list(report.converted) == [f"module.{name}" for name in LAYERS]
        for _ in range(2):
            loss_of(parallel).backward()
            loss_of(alone).backward()
        for name, gradient in grads(alone).items():
            assert_same_bytes(model.get_parameter(name).grad, gradient)


@pytest.mark.parametrize("device", DEVICES)
@EVERY_RECIPE
def test_evaluation_gives_the_numbers_of_training(recipe: Recipe, device: str) -> None:
    model = Net().to(device)
    convert(model, recipe)
    for x in (TOKENS.to(device), TOKENS[0].to(device)):
        y = model(x)
        assert y.requires_grad
        for context in (torch.inference_mode, torch.no_grad, nullcontext):
            with context():
                assert_same_bytes(model.eval()(x), y)
        model.train()


def test_one_gemm_in_high_precision_under_autocast() -> None:
    """fp32 weights, bf16 autocast, another GEMM in high precision in each layer."""
    model = Net()
    recipes = {
        "blocks.0.up": replace(ROWWISE, name="fp8 backward", forward=None),
        "blocks.0.down": replace(ROWWISE, name="no dgrad", dgrad=None),
        "blocks.1.up": ROWWISE_WGRAD_HP,
        "blocks.1.down": Recipe("none", None, None, None),
    }
    convert(model, recipes)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(TOKENS)
    y.float().square().mean().backward()
    assert y.dtype == torch.bfloat16
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    ran = {layer.name: layer.last_run for layer in summary(model).layers}
    assert ran["blocks.0.up"] == ("high precision", "torch", "torch")
    assert ran["blocks.1.down"] == ("high precision",) * 3


def test_export_of_the_reverted_model() -> None:
    model = Net().eval()
    expected = model(TOKENS)
    convert(model)
    model(TOKENS)
    revert(model)
    program = torch.export.export(model, (TOKENS,))
    torch.testing.assert_close(program.module()(TOKENS), expected)


# --- hooks


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_hooks_see_what_they_see_of_a_plain_layer(compiled: bool) -> None:
    seen: dict[str, list[tuple[str, Any]]] = {}
    for kind in ("plain", "fp8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32))
        layer = model[0]
        log = seen.setdefault(kind, [])

        def note(name: str, tensors: Any, log: list[tuple[str, Any]] = log) -> None:
            tensors = tensors if isinstance(tensors, tuple) else (tensors,)
            log.append((name, [(type(t).__name__, tuple(t.shape), t.dtype) for t in tensors]))

        def pre_hook(module: nn.Module, args: Any, note: Any = note) -> None:
            note("pre", args)

        def hook(module: nn.Module, args: Any, y: Tensor, note: Any = note) -> Tensor:
            note("forward", y)
            return y * 2

        def backward_hook(module: nn.Module, gx: Any, gy: Any, note: Any = note) -> None:
            note("backward", (*gx, *gy))

        layer.register_forward_pre_hook(pre_hook)
        layer.register_forward_hook(hook)
        if not compiled:
            layer.register_full_backward_hook(backward_hook)
            layer.register_full_backward_pre_hook(lambda m, g, note=note: note("backward pre", g))
        layer.weight.register_hook(lambda g, note=note: note("weight", g))
        layer.weight.register_post_accumulate_grad_hook(lambda p, note=note: note("post", p.grad))
        if kind == "fp8":
            convert(model)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        run(torch.randn(4, 16, requires_grad=True)).sum().backward()
        log.sort(key=lambda entry: entry[0])
    if compiled:  # hooks run at tracing, on fake tensors
        for kind, log in seen.items():
            seen[kind] = [(name, [t[1:] for t in tensors]) for name, tensors in log]
    assert seen["fp8"] == seen["plain"]
    assert seen["fp8"]


# --- compile


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_is_eager_bit_for_bit(device: str) -> None:
    model = nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)
    ).to(device)
    convert(model, {"0": ROWWISE, "2": TENSORWISE, "4": BLOCKWISE})
    x = torch.randn(8, 32, device=device)
    y = model(x)
    y.square().sum().backward()
    expected = grads(model)
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x).square().sum().backward()
    assert_same_bytes(compiled(x), y)
    for name, gradient in grads(model).items():
        assert_same_bytes(gradient, expected[name])


def counted(model: nn.Module) -> tuple[nn.Module, Any]:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, fullgraph=True), counter


def test_compiles_once_and_once_more_for_all_sizes() -> None:
    import torch._dynamo.testing

    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).requires_grad_(False)
    convert(model)
    compiled, counter = counted(model)
    for _ in range(5):
        compiled(torch.randn(48, 32))
    assert counter.frame_count == 1
    for m in (64, 80, 96):
        compiled(torch.randn(m, 32))
    assert counter.frame_count == 2


def test_converting_after_compile_takes_effect() -> None:
    import torch._dynamo.testing

    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).requires_grad_(False)
    x = torch.randn(4, 32)
    compiled, counter = counted(model)
    plain = compiled(x)
    assert list(convert(compiled).converted) == ["_orig_mod.0", "_orig_mod.2"]
    y = compiled(x)
    assert_same_bytes(y, model(x))
    assert not torch.equal(y, plain)
    revert(compiled)
    assert_same_bytes(compiled(x), plain)
    assert counter.frame_count == 2


# --- cached weights


class Casts(TorchDispatchMode):
    """Counts casts, by the shape of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.float8.quantize.default, torch.ops.float8.quantize_dual.default):
            self.shapes += [tuple(data.shape) for data in out[::2]]
        if func is torch.ops.float8.quantize_and_measure.default:
            self.shapes.append(tuple(out[0].shape))
        return out


@pytest.mark.parametrize("device", DEVICES)
@EVERY_RECIPE
def test_cached_weights_are_cast_once(recipe: Recipe, device: str) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48)).to(device)
    convert(model, recipe)
    batches = [torch.randn(5, 32, device=device) for _ in range(3)]
    weights = {(64, 32), (32, 64), (48, 64), (64, 48)}

    def run() -> tuple[list[Tensor], dict[str, Tensor], list[tuple[int, ...]]]:
        model.zero_grad()
        outputs = []
        with Casts() as casts:
            with cached_weights(model) if cached else nullcontext():
                for x in batches:
                    outputs.append(model(x))
                    outputs[-1].square().sum().backward()
        return outputs, grads(model), [shape for shape in casts.shapes if shape in weights]

    cached = False
    expected, expected_grads, casts = run()
    assert len(casts) == 3 * 3  # each batch: forward of two layers, dgrad of the second
    cached = True
    outputs, gradients, casts = run()
    assert sorted(casts) == sorted(weights)
    for y, y_expected in zip(outputs, expected, strict=True):
        assert_same_bytes(y, y_expected)
    for name in gradients:
        assert_same_bytes(gradients[name], expected_grads[name])
    assert "cached" not in vars(model[0])


def test_backward_after_the_block_uses_what_forward_used() -> None:
    model = Net()
    convert(model)
    loss_of(model).backward()
    expected = grads(model)
    model.zero_grad()
    with cached_weights(model):
        loss = loss_of(model)
    loss.backward()
    for name, gradient in grads(model).items():
        assert_same_bytes(gradient, expected[name])


def test_a_tied_weight_is_cast_once() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    convert(model)
    with Casts() as casts, cached_weights(model):
        pass
    assert len(casts.shapes) == 2
    convert_again = copy.deepcopy(model)
    revert(convert_again)
    convert(convert_again, {"0": ROWWISE, "1": MXFP8})
    with Casts() as casts, cached_weights(convert_again):
        pass
    assert len(casts.shapes) == 4


def test_what_cached_weights_refuses() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    x = torch.randn(2, 16)
    messages = [raised(lambda: cached_weights(model).__enter__())]
    convert(model)
    with cached_weights(model):
        messages.append(raised(lambda: cached_weights(model[1]).__enter__()))
        model(x)
        with torch.no_grad():
            model[1].weight.mul_(2)
        messages.append(raised(lambda: model(x), RuntimeError))
        with torch.no_grad():
            model[1].weight.div_(2)
        raised(lambda: model(x), RuntimeError)
    for change in ("assign", "recipe", "functional"):
        with cached_weights(model):
            if change == "assign":
                model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
            if change == "recipe":
                model[0].recipe = MXFP8
            others = {"0.weight": torch.zeros(16, 16)} if change == "functional" else {}
            raised(lambda: torch.func.functional_call(model, others, (x,)), RuntimeError)  # noqa: B023
    assert_expected_inline(
        "\n".join(messages),
        """\
this model has no Float8Linear and no Float8Weight; float8.convert(model) first
The model has a cached weight; cached_weights does not nest, so leave the outer block first
the weight (shape (16, 16)), the recipe or the assumed device of a layer changed inside float8.cached_weights, whose FP8 copies are of the old one; leave the block before the optimiser's step, loading, .to(), a new recipe or assume_device""",  # noqa: E501
    )


def through_pickle(model: nn.Module) -> nn.Module:
    twin: nn.Module = pickle.loads(pickle.dumps(model))
    return twin


def through_a_file(model: nn.Module) -> nn.Module:
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    twin: nn.Module = torch.load(saved, weights_only=False)
    return twin


def averaged(model: nn.Module) -> nn.Module:
    twin: nn.Module = torch.optim.swa_utils.AveragedModel(model).module
    return twin


def copied_layers(model: nn.Module) -> nn.Module:
    return nn.Sequential(*(copy.copy(layer) for layer in model.children()))


@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, copied_layers, through_pickle, through_a_file, averaged]
)
def test_a_copy_made_inside_the_block_comes_without_the_cache(
    twin_of: Callable[[nn.Module], nn.Module],
) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(2, 16)
    convert(model)
    with cached_weights(model):
        y = model(x)
        twin = twin_of(model)
        assert_same_bytes(twin(x), y)
        with cached_weights(twin):
            assert_same_bytes(twin(x), y)
        assert_same_bytes(model(x), y)
        assert all("cached" in vars(layer) for layer in model)
    assert all("cached" not in vars(layer) for layer in twin.children())
    for p in twin.parameters():
        p.data.mul_(2)
    fresh = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fresh.load_state_dict(twin.state_dict())
    convert(fresh)
    assert_same_bytes(twin(x), fresh(x))


@pytest.mark.parametrize("change", ["data", "half", "there and back", "offset", "transpose"])
def test_a_weight_whose_data_was_assigned_is_seen(change: str) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(2, 16)
    convert(model)
    model[0].weight.data = torch.randn(2, 16, 16)[0]
    with cached_weights(model):
        model(x)
        version, weight = model[0].weight._version, model[0].weight
        if change == "data":
            weight.data = torch.randn(16, 16)
        if change == "half":
            model.half()
            x = x.half()
        if change == "there and back":  # the allocator may give the old address again
            model.half().float()
        if change == "offset":
            weight.data = weight.data.as_strided((16, 16), (16, 1), 256)
        if change == "transpose":
            weight.data = weight.data.t()
        assert model[0].weight is weight
        assert weight._version == version
        raised(lambda: model(x), RuntimeError)
    model(x)


@pytest.mark.parametrize("kind", ["fused", "foreach", "one by one"])
def test_a_step_inside_the_block_is_seen(kind: str) -> None:
    """By each layer on its own."""
    model, x = mixed(), torch.randn(16, 32)
    convert(model)
    kinds = {"fused": kind == "fused", "foreach": kind == "foreach"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **kinds)
    for layer in model:
        with cached_weights(layer):
            model(x).sum().backward()
            optimizer.step()
            raised(lambda: model(x), RuntimeError)
        model(x)


def test_a_step_of_others_inside_the_block_is_none() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(4, 16)
    convert(model)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with cached_weights(model[0]):
        y = model(x)
        y.sum().backward()
        optimizer.step()
        assert not torch.equal(model(x), y)


def test_an_exception_ends_the_caching() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    convert(model)
    with pytest.raises(KeyError), cached_weights(model):
        raise KeyError
    assert all(layer.cached is None for layer in model)
    bad = replace(ROWWISE, name="bad")
    model[1].recipe = bad
    original, bad_plan = Recipe.plan, RuntimeError("no plan")

    def plan(self: Recipe, device: torch.device) -> Any:
        if self is bad:
            raise bad_plan
        return original(self, device)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="no plan"):
        patch.setattr(Recipe, "plan", plan)
        cached_weights(model).__enter__()
    assert all(layer.cached is None for layer in model)
    with cached_weights(model):
        pass


def test_revert_inside_the_block() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    convert(model)
    with cached_weights(model):
        revert(model)
        model(torch.randn(2, 16))
    assert "cached" not in vars(model[0])


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_training_with_cached_weights(device: str) -> None:
    """Two compilations in all, with and without; new weights need no third."""
    import torch._dynamo.testing

    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(device)
    convert(model)
    compiled, counter = counted(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 32, device=device)
    compiled(x).square().sum().backward()
    for _ in range(3):
        optimizer.zero_grad()
        with cached_weights(model):
            for _ in range(2):
                y = compiled(x)
                y.square().sum().backward()
            assert_same_bytes(y, model(x))
        optimizer.step()
    assert_same_bytes(compiled(x), model(x))
    assert counter.frame_count == 2


# --- weights that multiply within classes that stay


def test_subclasses_of_linear_keep_their_class() -> None:
    layer = MyLinear(32, 48)
    reference = nn.Linear(32, 48)
    reference.load_state_dict(layer.state_dict())
    convert(reference)
    model = nn.Sequential(layer, Plainest(48, 16))
    weights = [m.weight for m in model]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = {name: t.clone() for name, t in model.state_dict().items()}

    assert convert(model).converted == dict.fromkeys("01", ("rowwise", "Float8Weight"))
    assert type(layer) is MyLinear
    assert isinstance(layer, nn.Linear)
    assert layer.flops() == 2 * 32 * 48
    assert repr(layer) == "MyLinear(in_features=32, out_features=48, bias=True)"
    assert all(
        m.weight is w and isinstance(w, nn.Parameter) for m, w in zip(model, weights, strict=True)
    )
    x = torch.randn(5, 32)
    assert_same_bytes(layer(x), reference(x) * 2)
    assert layer.calls == 1
    assert [run.last_run for run in summary(model).layers] == [("torch",) * 3, None]

    for name, t in model.state_dict().items():
        assert type(t) is Tensor
        assert torch.equal(t, before[name])
    model(x).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    nn.Sequential(MyLinear(32, 48), Plainest(48, 16)).load_state_dict(model.state_dict())

    trained = {name: t.clone() for name, t in model.state_dict().items()}
    revert(model)
    assert all(
        m.weight is w and type(w) is nn.Parameter for m, w in zip(model, weights, strict=True)
    )
    assert not any(of for name, of in vars(layer).items() if "_hooks" in name)
    for name, t in model.state_dict().items():
        assert_same_bytes(t, trained[name])
    plain = F.linear(x, layer.weight, layer.bias) * 2
    assert torch.equal(layer(x), plain)


def test_a_forward_on_the_instance_is_kept() -> None:
    """Libraries that move layers between devices patch forward; no class reaches past that."""
    layer = nn.Linear(16, 16)
    old_forward = layer.forward
    layer.forward = lambda x: old_forward(x) * 3  # type: ignore[method-assign]
    model = nn.Sequential(layer)
    assert convert(model).converted == {"0": ("rowwise", "Float8Weight")}
    x = torch.randn(4, 16)
    y = model(x)
    del layer.forward
    revert(model)
    convert(model)
    assert_same_bytes(y, model(x) * 3)


def test_experts() -> None:
    x = torch.randn(16, 32)
    model = nn.ModuleDict({"experts": Experts(), "router": nn.Linear(32, 4)})
    with torch.no_grad():
        plain = model["experts"](x)
    report = convert(model)
    assert report.converted == {
        "experts.w1": ("rowwise", "Float8Weight"),
        "experts.w2": ("rowwise", "Float8Weight"),
    }
    assert_expected_inline(
        str(report),
        """\
layer             as            recipe, or why not
experts.w1        Float8Weight  rowwise
experts.w2        Float8Weight  rowwise
experts.bias      -             what Experts does with it is unknown: recipe={'experts.bias': ...} says that it multiplies
experts.position  -             what Experts does with it is unknown: recipe={'experts.position': ...} says that it multiplies
router            -             kept by pattern '*router*'
2 converted (0 Float8Linear, 2 Float8Weight), 3 skipped""",  # noqa: E501
    )
    y = model["experts"](x)
    assert not torch.equal(y, plain)
    y.sum().backward()
    assert all(p.grad is not None for p in model["experts"].parameters())
    assert summary(model).layers[0].last_run == ("torch",) * 3
    assert {type(t) for t in model.state_dict().values()} == {Tensor}
    revert(model)
    assert_same_bytes(model["experts"](x), plain)

    model["fc"] = nn.Linear(8, 8)
    assert list(convert(model, experts=False).converted) == ["fc"]
    revert(model)
    assert convert(model, experts=MXFP8).converted == {
        "experts.w1": ("mxfp8", "Float8Weight"),
        "experts.w2": ("mxfp8", "Float8Weight"),
        "fc": ("rowwise", "Float8Linear"),
    }
    revert(model)
    assert list(convert(model, keep=["experts"]).converted) == ["router", "fc"]
    revert(model)
    assert convert(model, {"experts.w1": BLOCKWISE, "fc": ROWWISE}, experts=MXFP8).converted == {
        "experts.w1": ("blockwise", "Float8Weight"),
        "experts.w2": ("mxfp8", "Float8Weight"),
        "fc": ("rowwise", "Float8Linear"),
    }


def test_a_matrix_of_a_custom_module_has_to_be_named() -> None:
    x = torch.randn(8, 32)
    model = nn.ModuleDict({"mix": Projection(), "one": Experts(1), "fc": nn.Linear(32, 32)})
    report = convert(model)
    assert list(report.converted) == ["fc"]
    assert_expected_inline(
        report.skipped["mix.proj"],
        """what Projection does with it is unknown: recipe={'mix.proj': ...} says that it multiplies""",  # noqa: E501
    )
    revert(model)
    assert list(convert(model, {"*": ROWWISE, "mix.*": ROWWISE}, strict=False).converted) == ["fc"]
    revert(model)
    for name in ("mix.proj", "proj", "*.proj", "m*.proj"):
        report = convert(model, {name: ROWWISE, "w1": ROWWISE, "*": TENSORWISE})
        assert report.converted["mix.proj"] == ("rowwise", "Float8Weight")
        assert "one.w1" in report.converted
        assert {"mix.table", "one.w2"} < set(report.skipped)
        model["mix"](x).sum().backward()
        assert summary(model).layers[1].last_run == ("torch",) * 3
        revert(model)


def test_weights_by_name_in_a_fused_adapter() -> None:
    """An adapter that holds the layer's weight itself, and is no nn.Linear."""

    class FusedAdapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32), requires_grad=False)
            self.lora_a = nn.Parameter(torch.randn(4, 32))
            self.lora_b = nn.Parameter(torch.zeros(32, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight) + F.linear(F.linear(x, self.lora_a), self.lora_b)

    model = nn.Sequential(FusedAdapter())
    report = convert(model, {"weight": ROWWISE})
    assert report.converted == {"0.weight": ("rowwise", "Float8Weight")}
    assert list(report.skipped) == ["0.lora_a", "0.lora_b"]
    x = torch.randn(4, 32, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert model[0].weight.grad is None
    assert model[0].lora_b.grad.abs().sum() > 0


def test_a_tied_weight_never_becomes_a_float8_weight() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(16, 8), "head": MyLinear(8, 16), "fc": MyLinear(8, 8)}
    )
    model["head"].weight = model["embed"].weight
    report = convert(model)
    assert list(report.converted) == ["fc"]
    assert_expected_inline(
        report.skipped["head"],
        """it is tied to a parameter of another module, which would meet the Float8Weight too""",
    )
    assert type(model["embed"].weight) is nn.Parameter

    twins = nn.ModuleDict({"a": Experts(), "b": Experts()})
    twins["b"].w1 = twins["a"].w1
    assert list(convert(twins).converted) == ["a.w2", "b.w2"]


def mixed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), MyLinear(32, 32), Experts())


def test_copies_pickles_and_checkpoints_of_mixed_models() -> None:
    model, x = mixed(), torch.randn(16, 32)
    convert(model)
    y = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bytes(twin(x), y)
        assert summary(twin).fp8 == 4
        revert(twin)
        assert summary(twin).fp8 == 0
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    for assign in (False, True):
        plain = mixed()
        plain.load_state_dict(state, assign=assign)
        convert(plain)
        assert_same_bytes(plain(x), y)
        other = mixed()
        convert(other)
        other.load_state_dict(state, assign=assign)
        assert summary(other).fp8 == 4
        assert_same_bytes(other(x), y)


def test_a_mixed_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = mixed()
    convert(model)
    model.to_empty(device="cpu")
    source = mixed()
    model.load_state_dict(source.state_dict())
    convert(source)
    x = torch.randn(16, 32)
    assert_same_bytes(model(x), source(x))
    assert summary(model).fp8 == 4


def test_cached_weights_of_float8_weights() -> None:
    """How they serve experts is in test_experts.py."""
    model, x = mixed(), torch.randn(16, 32)
    convert(model)
    y = model(x)
    with Casts() as casts, cached_weights(model):
        weights = [(32, 32)] * 4 + [(4, 32, 64), (4, 64, 32)] * 2
        assert sorted(casts.shapes) == sorted(weights)
        for _ in range(2):
            assert_same_bytes(model(x), y)
        model(x).sum().backward()
        casts_of_weights = [shape for shape in casts.shapes if shape in weights]
        assert len(casts_of_weights) == len(weights)
        twin = copy.deepcopy(model)
        with cached_weights(twin):
            assert_same_bytes(twin(x), y)
    for layer in (model[0], model[1], model[2]):
        revert(layer)
    assert "no Float8Weight" in raised(lambda: cached_weights(model).__enter__())


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_float8_weights_come_before_data_parallel() -> None:
    model = mixed()
    with one_process_group():
        parallel = nn.parallel.DistributedDataParallel(model)
        message = raised(lambda: convert(parallel), RuntimeError)
        assert summary(model).fp8 == 0
        assert all(type(p) is nn.Parameter for p in model.parameters())
    assert_expected_inline(
        message,
        """Layer 'module.1' could not be changed, so nothing was: its parameter is held by a graph that waits for its backward (that of an output which you still hold), by DistributedDataParallel or by a weak reference""",  # noqa: E501
    )
    model = mixed()
    with one_process_group():
        convert(model)
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(torch.randn(16, 32)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_fully_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def sharded(model: nn.Module) -> nn.Module:
        fully_shard(model[3], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    with one_process_group():
        mesh, x = init_device_mesh("cpu", (1,)), torch.randn(16, 32)
        model = sharded(nn.Sequential(*mixed(), nn.Linear(32, 32)))
        report = convert(model)
        assert report.converted == {"0": ("rowwise", "Float8Linear")}
        reasons = [report.skipped[name] for name in ("1", "2.w1", "3")]
        messages = [raised(lambda: cached_weights(model).__enter__())]
        model(x).sum().backward()
        assert summary(model).layers[0].last_run == ("torch",) * 3
        revert(model)
        assert type(model[0]) is nn.Linear

        model = nn.Sequential(*mixed(), nn.Linear(32, 32))
        convert(model)
        expected = model(x)
        model = sharded(model)
        assert_same_bytes(model(x), expected)
        fp8 = {layer.name: layer.last_run for layer in summary(model).layers if layer.recipe}
        assert fp8 == dict.fromkeys(("0", "1", "2.w1", "2.w2", "3"), ("torch",) * 3)
        messages.append(raised(lambda: convert(model)))
        messages.append(raised(lambda: revert(model)))
        assert summary(model).fp8 == 5
    assert_expected_inline(
        "\n".join(reasons + messages),
        """\
its weight is sharded already: convert before that
its weight is sharded already: convert before that
fully_shard made it a FSDPLinear: convert before that
Layer '0' has a sharded weight (DTensor), of which there is no whole to cast; train without cached_weights
Layer '0' is in FP8 already; float8.revert(model), then convert as you like
Layer '1' has a sharded Float8Weight; revert before fully_shard""",  # noqa: E501
    )


def test_revert_that_fails_leaves_no_trace() -> None:
    model, x = mixed(), torch.randn(16, 32)
    convert(model)
    model(x)
    cached = cached_weights(model)
    cached.__enter__()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    classes = [type(module) for module in model.modules()]
    layers, weights = summary(model).layers, list(model.parameters())
    held = weakref.ref(model[2].w2)
    assert "weak reference" in raised(lambda: revert(model), RuntimeError)
    assert summary(model).layers == layers
    assert [type(module) for module in model.modules()] == classes
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    assert vars(model[0]) == before["0"]
    assert list(model.state_dict()) == list(mixed().state_dict())
    cached.__exit__(None, None, None)
    del held
    revert(model)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_a_graph_that_waits_for_backward() -> None:
    model, x = mixed(), torch.randn(16, 32)
    y = model(x)
    raised(lambda: convert(model), RuntimeError)
    assert summary(model).fp8 == 0
    y.sum().backward()
    del y
    convert(model)
    y = model(x)
    revert(model)
    with pytest.raises(RuntimeError, match="swap_tensors"):  # torch's own refusal
        y.sum().backward()


# --- SwiGLU layers

MODELING = """
import torch
from torch import nn


class LlamaMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(config["dim"], config["hidden"], bias=config.get("bias", False))
        self.up_proj = nn.Linear(config["dim"], config["hidden"], bias=config.get("bias", False))
        self.down_proj = nn.Linear(config["hidden"], config["dim"], bias=config.get("bias", False))
        self.act_fn = config.get("act", nn.SiLU)()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PhiMLP(LlamaMLP):
    pass


class Qwen3MLP(LlamaMLP):
    forward = torch.nn.Identity.forward
"""


class Imitation:
    """A stand-in for a module of Hugging Face's transformers, under its name."""

    name = "transformers.models.llama.modeling_llama"

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType(self.name)
        exec(MODELING, vars(module))
        for name in ("transformers", "transformers.models", "transformers.models.llama"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, self.name, module)
        self.module = module

    def mlp(self, cls: str = "LlamaMLP", **config: Any) -> nn.Module:
        mlp: nn.Module = getattr(self.module, cls)({"dim": 32, "hidden": 48, **config})
        return mlp


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Imitation:
    return Imitation(monkeypatch)


class MLP(nn.Module):
    """A user's own, that says what it is."""

    float8_swiglu = ("w1", "w3", "w2")

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(k, n, bias=False) for k, n in ((32, 48), (48, 32), (32, 48))
        )
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class NormedMLP(MLP):
    float8_swiglu = ("w1", "w3", "w2", "norm")

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Undeclared(MLP):
    """Its forward may be another one."""


def mlp_step(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def near(a: list[Tensor], b: list[Tensor]) -> bool:
    """Up to casts that land on the next FP8 number, since silu's result is not rounded."""
    return all(relative_error(t, e) < 1e-2 for t, e in zip(a, b, strict=True))


FUSABLE = {
    "llama": lambda llama: llama.mlp(),
    "own": lambda _: MLP(),
    "norm": lambda _: NormedMLP(),
}
EVERY_MLP = pytest.mark.parametrize("kind", FUSABLE)
FP8_RECIPES = [recipe for recipe in RECIPES.values() if recipe.wgrad is not None]


@EVERY_MLP
@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=lambda r: r.name)
def test_a_swiglu_layer_becomes_one_call(kind: str, recipe: Recipe, llama: Imitation) -> None:
    mlp = FUSABLE[kind](llama)
    cls, parameters = type(mlp), dict(mlp.named_parameters())
    before = {name: dict(vars(module)) for name, module in mlp.named_modules()}
    hooked: list[int] = []
    mlp.register_forward_hook(lambda *args: hooked.append(1))
    names = cls.float8_swiglu if kind != "llama" else SwiGLU.names
    apart = copy.deepcopy(mlp)
    convert(apart, recipe, fuse=False)
    x = torch.randn(2, 9, 32)

    report = convert(mlp, recipe)
    assert report.fused == {"": recipe.name}
    assert sorted(report.converted) == sorted(names[:3])
    assert type(mlp) is SwiGLU
    assert dict(mlp.named_parameters()) == parameters
    got, expected = mlp_step(mlp, x), mlp_step(apart, x)
    assert near(got, expected)
    assert all(layer.last_run for layer in summary(mlp).layers)
    assert mlp.last_run == ("torch",) * 3
    assert {type(t) for t in mlp.state_dict().values()} == {Tensor}
    apart.load_state_dict(mlp.state_dict(), strict=True)
    with Casts() as casts:
        mlp(x)
    assert not {(18, 48), (48, 18)} & set(casts.shapes)  # what is between is cast where it is made
    assert casts.shapes[-3:] == [(48, 32), (48, 32), (32, 48)]
    child = mlp.get_submodule(names[1])
    assert type(child) is Float8Linear
    assert_same_bytes(child(x), apart.get_submodule(names[1])(x))

    hooked.clear()
    mlp.zero_grad()
    revert(mlp)
    assert type(mlp) is cls
    mlp(x)
    assert hooked == [1]
    mlp._forward_hooks.clear()
    for name, module in mlp.named_modules():
        assert {k: v for k, v in vars(module).items() if k != "calls"} == {
            k: v for k, v in before[name].items() if k != "calls"
        }
    assert all(p is parameters[name] for name, p in mlp.named_parameters())


def test_the_report_and_the_summary_of_swiglu_layers(llama: Imitation) -> None:
    model = nn.ModuleDict({"a": llama.mlp(), "b": MLP(), "c": MLP(), "d": Undeclared()})
    model["b"].w3.register_forward_hook(lambda *args: None)
    report = convert(model, keep=("c.w2",))
    assert_expected_inline(
        str(report),
        """\
layer        as            recipe, or why not
a.gate_proj  Float8Linear  rowwise
a.up_proj    Float8Linear  rowwise
a.down_proj  Float8Linear  rowwise
b.w1         Float8Linear  rowwise
b.w2         Float8Linear  rowwise
b.w3         Float8Linear  rowwise
c.w1         Float8Linear  rowwise
c.w3         Float8Linear  rowwise
d.w1         Float8Linear  rowwise
d.w2         Float8Linear  rowwise
d.w3         Float8Linear  rowwise
a            SwiGLU        rowwise
c.w2         -             kept by pattern 'c.w2'
b            -             not fused: w3 has hooks, or a forward of its own, which would be skipped
c            -             not fused: w2 is in high precision
11 converted (11 Float8Linear, 0 Float8Weight), 1 skipped, 1 of 3 SwiGLU fused""",
    )
    model["a"](torch.randn(3, 32))
    assert_expected_inline(
        str(summary(model)),
        """\
layer        shape    recipe   forward    dgrad  wgrad  note
a.gate_proj  48 x 32  rowwise  torch      torch  torch  fused in 'a'
a.up_proj    48 x 32  rowwise  torch      torch  torch  fused in 'a'
a.down_proj  32 x 48  rowwise  torch      torch  torch  fused in 'a'
b.w1         48 x 32  rowwise  never run  -      -      'b' is not fused: w3 has hooks, or a forward of its own, which would be skipped
b.w2         32 x 48  rowwise  never run  -      -      'b' is not fused: w3 has hooks, or a forward of its own, which would be skipped
b.w3         48 x 32  rowwise  never run  -      -      'b' is not fused: w3 has hooks, or a forward of its own, which would be skipped
c.w1         48 x 32  rowwise  never run  -      -      'c' is not fused: w2 is in high precision
c.w2         32 x 48  -        -          -      -      kept by pattern 'c.w2'
c.w3         48 x 32  rowwise  never run  -      -      'c' is not fused: w2 is in high precision
d.w1         48 x 32  rowwise  never run  -      -
d.w2         32 x 48  rowwise  never run  -      -
d.w3         48 x 32  rowwise  never run  -      -
11 of 12 in FP8, 8 of them never run, 3 emulated""",  # noqa: E501
    )
    model["a"].gate_proj.register_forward_hook(lambda *args: None)
    assert summary(model).layers[0].note.startswith("'a' is not fused: gate_proj has hooks")
    revert(model)
    assert [type(m).__name__ for m in model.values()] == ["LlamaMLP", "MLP", "MLP", "Undeclared"]
    report = convert(model, fuse=False)
    assert (report.fused, set(report.not_fused.values())) == ({}, {"fuse=False"})
    assert type(model["c"]) is MLP
    assert summary(model).fp8 == 12


def test_swiglu_layers_that_stay_apart(llama: Imitation) -> None:  # noqa: C901
    class Taken(MLP):
        float8_swiglu = ("w1", "w3", "w2")

        def __init__(self) -> None:
            super().__init__()
            self.names = ["x"]

    class Misnamed(MLP):
        float8_swiglu = ("w1", "w3", "w4")

    class Swapped(MLP):
        float8_swiglu = ("w1", "w2", "w3")

    class HuggingFaceNorm(NormedMLP):
        float8_swiglu = ("w1", "w3", "w2", "norm")

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Identity()

    def patched() -> nn.Module:
        mlp = llama.mlp()
        mlp.forward = lambda x, f=mlp.forward: f(x) * 2  # type: ignore[method-assign]
        return mlp

    def with_subclass() -> nn.Module:
        mlp = MLP()
        mlp.w1 = MyLinear(32, 48, bias=False)
        return mlp

    def hooked_activation() -> nn.Module:
        mlp = llama.mlp()
        mlp.act_fn.register_forward_hook(lambda *args: None)
        return mlp

    def tensor_parallel() -> nn.Module:
        mlp = llama.mlp()
        mlp.down_proj.register_forward_pre_hook(lambda *args: None)
        return mlp

    def double() -> nn.Module:
        mlp = MLP()
        mlp.w2.double()
        return mlp

    kinds: dict[str, nn.Module] = {
        "bias": llama.mlp(bias=True),
        "gelu": llama.mlp(act=nn.GELU),
        "class forward": llama.mlp("Qwen3MLP"),
        "instance forward": patched(),
        "taken": Taken(),
        "misnamed": Misnamed(),
        "swapped": Swapped(),
        "norm": HuggingFaceNorm(),
        "subclass": with_subclass(),
        "activation": hooked_activation(),
        "hook": tensor_parallel(),
        "double": double(),
    }
    texts, x = [], torch.randn(3, 32, requires_grad=True)
    for name, mlp in kinds.items():
        cls = type(mlp)
        report = convert(mlp)
        assert report.fused == {}
        assert type(mlp) is cls
        texts.append(f"{name}: {report.not_fused['']}")
        if name not in ("misnamed", "double"):
            mlp(x).sum().backward()
    hp = convert(MLP(), ROWWISE_WGRAD_HP).not_fused[""]
    mixed = convert(MLP(), {"w2": MXFP8, "*": ROWWISE}).not_fused[""]
    assert_expected_inline(
        "\n".join([*texts, f"hp: {hp}", f"mixed: {mixed}"]),
        """\
bias: gate_proj is no nn.Linear without bias
gelu: its activation is GELU, not SiLU
class forward: its class has a forward of torch.nn.modules.linear
instance forward: its instance has a forward of its own
taken: it has an attribute 'names' of its own, a name that SwiGLU uses
misnamed: it has no layer 'w4'
swapped: its layers, of (32, 48), (48, 32) and (32, 48) features, make no SwiGLU
norm: norm is no nn.RMSNorm of one dimension
subclass: w1 is no nn.Linear without bias
activation: act_fn has hooks, or a forward of its own, which would be skipped
hook: down_proj has hooks, or a forward of its own, which would be skipped
double: w2 is in high precision
hp: the recipe rowwise_wgrad_hp leaves a GEMM in high precision
mixed: w1 and w2 have different recipes""",
    )
    for other in (Undeclared(), llama.mlp("PhiMLP")):
        report = convert(other)
        assert (report.fused, report.not_fused) == ({}, {})


def test_copies_and_pickles_of_fused_layers(llama: Imitation) -> None:
    for make in FUSABLE.values():
        model, x = nn.Sequential(make(llama)), torch.randn(3, 32)
        cls = type(model[0])
        convert(model, BLOCKWISE)
        y = model(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
            assert_same_bytes(twin(x), y)
            assert type(twin[0]) is SwiGLU
        twin = pickle.loads(pickle.dumps(model))
        revert(twin)
        assert type(twin[0]) is cls
        assert type(model[0]) is SwiGLU


def test_an_optimizer_tied_weights_and_a_shared_layer() -> None:
    shared = MLP()
    shared.w3.weight = shared.w1.weight
    model = nn.Sequential(shared, MLP(), shared)
    apart = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, apart)]
    assert set(convert(model).fused) == {"0", "1"}
    convert(apart, fuse=False)
    x = torch.randn(9, 32)
    for _ in range(2):
        assert near(mlp_step(model, x), mlp_step(apart, x))
        for optimizer in optimizers:
            optimizer.step()
    assert model[0].w3.weight is model[2].w1.weight
    revert(model)
    assert type(model[2]) is MLP


@EVERY_MLP
def test_cached_weights_of_fused_layers(kind: str, llama: Imitation) -> None:
    mlp, x = FUSABLE[kind](llama), torch.randn(9, 32)
    convert(mlp, MXFP8)
    expected = mlp_step(mlp, x)
    with cached_weights(mlp), Casts() as casts:
        for t, e in zip(mlp_step(mlp, x), expected, strict=True):
            assert_same_bytes(t, e)
        assert (48, 32) not in casts.shapes
        with torch.no_grad():
            next(iter(mlp.parameters())).mul_(2)
            if kind == "norm":  # its weight is no FP8 copy
                mlp.w2.weight.mul_(2)
        raised(lambda: mlp(x), RuntimeError)


def test_hooks_and_adapters_that_come_after_convert(llama: Imitation) -> None:
    mlp, x = llama.mlp(), torch.randn(9, 32)
    convert(mlp)
    y, seen = mlp(x), []
    handle = mlp.up_proj.register_forward_hook(lambda m, args, y: seen.append(y.shape))
    assert_same_bytes(mlp(x), y)
    assert seen == [(9, 48)]
    handle.remove()
    mlp.down_proj = Adapter(mlp.down_proj)
    assert_same_bytes(mlp(x), y)
    nn.init.ones_(mlp.down_proj.lora_B.weight)
    assert not torch.equal(mlp(x), y)
    mlp.down_proj = mlp.down_proj.base_layer
    assert_same_bytes(mlp(x), y)


def test_revert_of_fused_layers_refuses_what_was_built_on_top() -> None:
    class Derived(SwiGLU):
        pass

    model = nn.Sequential(MLP(), MLP())
    convert(model)
    model[1].__class__ = Derived
    messages = [raised(lambda: revert(model))]
    model[1].__class__ = SwiGLU
    model[0].forward = model[0].forward
    messages.append(raised(lambda: revert(model)))
    assert type(model[0].w1) is Float8Linear
    del model[0].forward
    assert_expected_inline(
        "\n".join(messages),
        """\
Layer '1' is of class Derived, which something (fully_shard, parametrize, ...) derived from SwiGLU; revert before that
Layer '0' got a forward of its own after convert, which may call that of SwiGLU; take it off before revert""",  # noqa: E501
    )
    revert(model[0].w1)  # a part of a part
    x = torch.randn(3, 32)
    assert "w1 is in high precision" in str(summary(model))
    model(x).sum().backward()
    for layer in (model[0].w2, model[0].w3):
        revert(layer)
    revert(model)
    assert [type(m) for m in model] == [MLP, MLP]
    assert convert(model).fused == {"0": "rowwise", "1": "rowwise"}


def test_a_class_that_has_more_than_swiglu_stays() -> None:
    class Counts(MLP):
        float8_swiglu = ("w1", "w3", "w2")

        def flops(self) -> int:
            return 6 * 32 * 48

    class Listed(MLP):
        float8_swiglu = ["w1", "w3", "w2"]  # noqa: RUF012

    class ByKeyword(MLP):
        float8_swiglu = ("w1", "w3", "w2")

        def forward(self, hidden: Tensor, scale: float = 1) -> Tensor:
            return super().forward(hidden) * scale

    model = nn.ModuleDict({c.__name__: c() for c in (Counts, Listed, ByKeyword)})
    report = convert(model)
    assert report.fused == {}
    assert [type(m) for m in model.values()] == [Counts, Listed, ByKeyword]
    assert_expected_inline(
        "\n".join(f"{name}: {reason}" for name, reason in report.not_fused.items()),
        """\
Counts: its class has 'flops', which SwiGLU lacks
Listed: its float8_swiglu is ['w1', 'w3', 'w2']; it must be a tuple of the names of gate, up and down, and perhaps of a norm
ByKeyword: its forward takes (hidden, scale), that of SwiGLU (x)""",  # noqa: E501
    )


def test_nothing_is_fused_when_a_layer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slotted(MLP):
        __slots__ = ("__x__",)
        float8_swiglu = ("w1", "w3", "w2")

    model = nn.Sequential(MLP(), Slotted())
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    raised(lambda: convert(model), TypeError)  # such a class cannot be changed
    assert [type(m) for m in model] == [MLP, Slotted]
    assert {name: vars(module) for name, module in model.named_modules()} == before


def test_fused_layers_on_the_meta_device_and_under_functional_call() -> None:
    with torch.device("meta"):
        model = nn.Sequential(NormedMLP())
    convert(model)
    assert model(torch.empty(3, 32, device="meta")).shape == (3, 32)
    model.to_empty(device="cpu")
    source, x = nn.Sequential(NormedMLP()), torch.randn(3, 32)
    convert(source)
    model.load_state_dict(source.state_dict())
    assert_same_bytes(model(x), source(x))
    other = nn.Sequential(NormedMLP())
    convert(other)
    y = torch.func.functional_call(model, dict(other.named_parameters()), (x,))
    assert_same_bytes(y, other(x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_fused_layers_compile(backend: str, llama: Imitation) -> None:
    model, x = nn.Sequential(llama.mlp(), MLP(), NormedMLP()), torch.randn(9, 32)
    convert(model)
    expected = mlp_step(model, x)
    got = mlp_step(torch.compile(model, backend=backend, fullgraph=True), x)
    for t, e in zip(got, expected, strict=True):
        if backend == "aot_eager":
            assert_same_bytes(t, e)
        else:
            assert relative_error(t, e) < 1e-2


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_fused_layers_fully_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(9, 32)
    with one_process_group():
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(MLP(), MLP(), MLP())
        convert(model)
        expected = model(x)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model[1].w3, mesh=mesh)  # which hooks gather: the others are called alone, too
        fully_shard(model, mesh=mesh)
        y = model(x)
        assert_same_bytes(y, expected)
        y.sum().backward()
        notes = [layer.note for layer in summary(model).layers[::3]]
        assert notes[0] == "fused in '0'"
        assert notes[1].startswith("'1' is not fused: w3 has hooks")
        assert "derived from SwiGLU" in raised(lambda: revert(model))

        model = nn.Sequential(MLP(), MLP())
        model.load_state_dict({k: v for k, v in model.state_dict().items()})
        fully_shard(model, mesh=mesh)
        assert set(convert(model).fused) == {"0", "1"}
        model(x).sum().backward()
        assert model[0].last_run == ("torch",) * 3


REAL_MLPS = [  # of transformers: a class that convert knows by its name, its model, its config
    ("LlamaMLP", "llama", "LlamaConfig"),
    ("Llama4TextMLP", "llama4", "Llama4TextConfig"),
    ("MistralMLP", "mistral", "MistralConfig"),
    ("Qwen2MLP", "qwen2", "Qwen2Config"),
    ("Qwen2MLP", "qwen2_vl", "Qwen2VLTextConfig"),
    ("Qwen2MLP", "qwen2_5_vl", "Qwen2_5_VLTextConfig"),
    ("Qwen2MoeMLP", "qwen2_moe", "Qwen2MoeConfig"),
    ("Qwen3MLP", "qwen3", "Qwen3Config"),
    ("Qwen3MoeMLP", "qwen3_moe", "Qwen3MoeConfig"),
    ("DeepseekV3MLP", "deepseek_v3", "DeepseekV3Config"),
]


def test_each_name_that_is_known_is_tried() -> None:
    assert {name for name, *_ in REAL_MLPS} == set(_TRANSFORMERS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "model", "config"), REAL_MLPS)
def test_layers_of_transformers(name: str, model: str, config: str) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    folder = f"transformers.models.{model}"
    layer = getattr(importlib.import_module(f"{folder}.modeling_{model}"), name)
    sizes = getattr(importlib.import_module(f"{folder}.configuration_{model}"), config)
    mlp, x = layer(sizes(hidden_size=32, intermediate_size=48)), torch.randn(7, 32)
    plain = mlp_step(mlp, x)
    assert convert(mlp).fused == {"": "rowwise"}
    for got, expected in zip(mlp_step(mlp, x), plain, strict=True):
        assert 0 < relative_error(got, expected) < 0.1
    assert mlp.last_run == ("torch",) * 3
    revert(mlp)
    assert type(mlp) is layer
    for got, expected in zip(mlp_step(mlp, x), plain, strict=True):
        assert_same_bytes(got, expected)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_models_of_transformers(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{name}Config")(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        state = {key: t.clone() for key, t in model.state_dict().items()}
        report = convert(model)
        assert list(report.fused) == [f"model.layers.{i}.mlp" for i in range(2)]
        tokens = torch.arange(24).reshape(2, 12)
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        assert model.model.layers[0].mlp.last_run == ("torch",) * 3
        assert model.state_dict().keys() == state.keys()
        revert(model)
        assert type(model.model.layers[0].mlp).__name__ == f"{name}MLP"
