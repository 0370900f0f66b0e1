"""``convert`` and mixtures of experts: it finds the experts, however a model holds and multiplies
them, and leaves routers and gates.

The layers here are look-alikes of Hugging Face's transformers and of TorchTitan, which name and
multiply their parameters as those do. The last tests take the models of transformers themselves,
where it is installed; TorchTitan's GroupedExperts is tested as a look-alike alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import float8
from float8 import RECIPES, Recipe, convert, summary
from float8.convert import KEEP
from float8.testing import assert_same_bytes, relative_error

E, D, H, TOP = 4, 32, 48, 2
NAMED = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))


def stack(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(E, *shape) / shape[-1] ** 0.5)


class TopKRouter(nn.Module):
    """Logits from a weight that is no nn.Linear's, as Mixtral and DeepSeek-V3 have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, D))
        self.register_buffer("e_score_correction_bias", torch.zeros(E))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x.float(), self.weight.float()).softmax(-1)
        return scores.topk(TOP)


class LinearRouter(nn.Linear):
    """As Llama 4 has it."""

    def __init__(self) -> None:
        super().__init__(D, E, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x).float().softmax(-1).topk(TOP)


class Routed(nn.Module):
    """Experts behind a router; each token goes to two of them."""

    def __init__(self, experts: nn.Module, router: str = "gate") -> None:
        super().__init__()
        self.add_module(router, TopKRouter() if router == "gate" else LinearRouter())
        self.experts, self.router_name = experts, router

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = getattr(self, self.router_name)(x)
        order = chosen.reshape(-1).argsort(stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=E)
        y = self.experts(x[order // TOP], counts) * weights.reshape(-1, 1)[order].to(x.dtype)
        return torch.zeros_like(x).index_add(0, order // TOP, y)


class Mixtral(nn.Module):
    """A loop over F.linear of one expert after another, gate and up in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = stack(2 * H, D), stack(D, H)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        y = []
        for e, rows in enumerate(x.split(counts.tolist())):
            gate, up = F.linear(rows, self.gate_up_proj[e]).chunk(2, -1)
            y.append(F.linear(F.silu(gate) * up, self.down_proj[e]))
        return torch.cat(y)


class TorchTitan(nn.Module):
    """GroupedExperts: torch._grouped_mm of what a cast and a transpose make of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = stack(H, D), stack(D, H), stack(H, D)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        offs = counts.cumsum(0, dtype=torch.int32)
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        h = F.silu(torch._grouped_mm(x.bfloat16(), w1, offs=offs))
        h = h * torch._grouped_mm(x.bfloat16(), w3, offs=offs)
        return torch._grouped_mm(h, w2, offs=offs).type_as(x)


class TorchTitanLoop(TorchTitan):
    """Its other way."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        y = []
        for e, rows in enumerate(x.split(counts.tolist())):
            h = F.silu(torch.matmul(rows, self.w1[e].transpose(-2, -1)))
            h = h * torch.matmul(rows, self.w3[e].transpose(-2, -1))
            y.append(torch.matmul(h, self.w2[e].transpose(-2, -1)))
        return torch.cat(y)


class Named(nn.Module):
    """F.grouped_mm of parameters [E, K, N] that are called as routers often are."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = stack(D, H), stack(D, H), stack(H, D)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        offs = counts.cumsum(0, dtype=torch.int32)
        h = F.silu(F.grouped_mm(x, self.gate, offs=offs)) * F.grouped_mm(x, self.up, offs=offs)
        return F.grouped_mm(h, self.down, offs=offs)


class GroupedLinear(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = stack(*shape)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight.mT, offs=offs)


class Modules(nn.Module):
    """The same with a module for each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = GroupedLinear(H, D), GroupedLinear(H, D)
        self.gate_proj = GroupedLinear(D, H)  # named to mislead

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        offs = counts.cumsum(0, dtype=torch.int32)
        return self.gate_proj(F.silu(self.gate(x, offs)) * self.up(x, offs), offs)


class Llama4(nn.Module):
    """torch.bmm with as many rows for each expert; what is missing is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = stack(D, 2 * H), stack(H, D)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        padded = nn.utils.rnn.pad_sequence(list(x.split(counts.tolist())), batch_first=True)
        gate, up = torch.bmm(padded, self.gate_up_proj).chunk(2, -1)
        y = torch.bmm(up * F.silu(gate), self.down_proj)
        return torch.cat([y[e, :n] for e, n in enumerate(counts.tolist())])


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(D, H, bias=False)
        self.up_proj = nn.Linear(D, H, bias=False)
        self.down_proj = nn.Linear(H, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ListOfExperts(nn.ModuleList):
    """As transformers held experts before it stacked them."""

    def __init__(self) -> None:
        super().__init__(MLP() for _ in range(E))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        parts = x.split(counts.tolist())
        return torch.cat([expert(rows) for expert, rows in zip(self, parts, strict=True)])


LAYERS: list[type[nn.Module]] = [
    Mixtral,
    TorchTitan,
    TorchTitanLoop,
    Named,
    Modules,
    Llama4,
    ListOfExperts,
]
layers = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    y = model(leaf)
    y.square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    return [y.detach(), leaf.grad, *grads]  # type: ignore[list-item]


@layers
@NAMED
def test_experts_multiply_in_fp8_and_routers_do_not(layer: type[nn.Module], recipe: Recipe) -> None:
    for router in ("gate", "router"):
        model, x = Routed(layer(), router).bfloat16(), torch.randn(40, D, dtype=torch.bfloat16)
        plain = step(model, x)
        report = convert(model, recipe)
        assert {name.partition(".")[0] for name in report.converted} == {"experts"}
        assert list(report.skipped.values()) == [
            f"kept by pattern {'gate' if router == 'gate' else '*router*'!r}"
        ]
        for got, expected in zip(step(model, x), plain, strict=True):
            assert 0 < relative_error(got, expected) < 0.2
        ran = [line.last_run for line in summary(model).layers if line.recipe]
        assert None not in ran
        assert len(ran) == len(list(model.experts.parameters()))
        float8.revert(model)
        for got, expected in zip(step(model, x), plain, strict=True):
            assert_same_bytes(got, expected)


@layers
@NAMED
def test_cached_weights(layer: type[nn.Module], recipe: Recipe) -> None:
    model, x = Routed(layer()).bfloat16(), torch.randn(40, D, dtype=torch.bfloat16)
    convert(model, recipe)
    expected = step(model, x)
    with float8.cached_weights(model):
        for _ in range(2):
            for got, was in zip(step(model, x), expected, strict=True):
                assert_same_bytes(got, was)


def test_what_the_report_says() -> None:
    class Everything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = Routed(Named())
            self.shared_expert = MLP()
            self.shared_expert_gate = nn.Linear(D, 1, bias=False)
            self.output = nn.Linear(D, 64)

    assert_expected_inline(
        str(convert(Everything())),
        """\
layer                    as            recipe, or why not
moe.experts.gate         Float8Weight  rowwise
moe.experts.up           Float8Weight  rowwise
moe.experts.down         Float8Weight  rowwise
shared_expert.gate_proj  Float8Linear  rowwise
shared_expert.up_proj    Float8Linear  rowwise
shared_expert.down_proj  Float8Linear  rowwise
moe.gate.weight          -             kept by pattern 'gate'
shared_expert_gate       -             kept by pattern 'shared_expert_gate'
output                   -             kept by pattern 'output'
6 converted (3 Float8Linear, 3 Float8Weight), 3 skipped""",
    )


def test_stacks_are_kept_where_a_pattern_means_them() -> None:
    for keep in (["*.gate"], ["moe.experts.gate"], [*KEEP, "*.gate"]):
        model = nn.ModuleDict({"moe": Routed(Named())})
        report = convert(model, keep=keep)
        assert "moe.experts.gate" in report.skipped
        assert list(report.converted) == ["moe.experts.up", "moe.experts.down"]


MODELING = """
from torch import nn
from torch.nn import functional as F

class SiLUActivation(nn.Module):
    def forward(self, input):
        return F.silu(input)

class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(32, 48, bias=False)
        self.up_proj = nn.Linear(32, 48, bias=False)
        self.down_proj = nn.Linear(48, 32, bias=False)
        self.{act} = SiLUActivation()

    def forward(self, x):
        return self.down_proj(self.{act}(self.gate_proj(x)) * self.up_proj(x))
"""


@pytest.mark.parametrize(
    ("name", "act"),
    [("DeepseekV3MLP", "act_fn"), ("Qwen3MoeMLP", "act_fn"), ("Llama4TextMLP", "activation_fn")],
)
def test_shared_experts_of_transformers_become_one_call(name: str, act: str) -> None:
    module = types.ModuleType("transformers.models.some.modeling_some")
    exec(MODELING.format(name=name, act=act), vars(module))
    shared, x = vars(module)[name](), torch.randn(20, D)
    plain = step(shared, x)
    assert convert(shared).fused == {"": "rowwise"}
    for got, expected in zip(step(shared, x), plain, strict=True):
        assert 0 < relative_error(got, expected) < 0.1
    float8.revert(shared)
    assert type(shared).__name__ == name


@pytest.mark.filterwarnings("ignore")
@NAMED
def test_the_op_of_transformers_for_compiled_experts(recipe: Recipe) -> None:
    """In float32 it replaces torch's grouped_mm, which inductor takes in bf16 alone."""
    name = "transformers::grouped_mm_fallback"
    with torch.library._scoped_library("transformers", "FRAGMENT") as lib:
        if importlib.util.find_spec("transformers") is not None:
            importlib.import_module("transformers.integrations.moe")  # which defines it
        else:
            form = "(Tensor input, Tensor weight, Tensor offs) -> Tensor"
            torch.library.define(name, form, lib=lib)
        layer = GroupedLinear(H, D)
        convert(layer, recipe)
        x, offs = torch.randn(20, D), torch.tensor([3, 3, 12, 20], dtype=torch.int32)

        def call(x: Tensor) -> Tensor:
            return torch.ops.transformers.grouped_mm_fallback(x, layer.weight.mT, offs=offs)

        assert_same_bytes(call(x), layer(x, offs))
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert_same_bytes(compiled(x), layer(x, offs))


# ---- transformers' own ---------------------------------------------------------------------------


def _real() -> dict[str, Callable[[], nn.Module]]:
    t = pytest.importorskip("transformers", minversion="5.0")
    sizes = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(intermediate_size=96, max_position_embeddings=64)
    heads = dict(num_key_value_heads=2, head_dim=16)
    experts = dict(num_experts_per_tok=2, moe_intermediate_size=32)
    latent = dict(kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16)
    latent |= dict(v_head_dim=16, num_key_value_heads=4, n_group=2, topk_group=1)

    def mixtral() -> nn.Module:
        config = t.MixtralConfig(**sizes, **heads, num_local_experts=4)
        return t.MixtralForCausalLM(config)

    def qwen3() -> nn.Module:
        config = t.Qwen3MoeConfig(**sizes, **heads, **experts, num_experts=4)
        return t.Qwen3MoeForCausalLM(config)

    def deepseek() -> nn.Module:
        dense = dict(n_routed_experts=4, first_k_dense_replace=1)
        return t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**sizes, **experts, **latent, **dense))

    def llama4() -> nn.Module:
        few = dict(num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=96)
        return t.Llama4ForCausalLM(t.Llama4TextConfig(**sizes, **heads, **few))

    return {f.__name__: f for f in (mixtral, qwen3, deepseek, llama4)}


REAL = ["mixtral", "qwen3", "deepseek", "llama4"]
WAYS = ["eager", "grouped_mm", "batched_mm"]  # of multiplying; Llama 4 has one, torch.bmm


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "way", "recipe"),
    [(name, way, "rowwise") for name in REAL[:3] for way in WAYS]
    + [(name, None, recipe) for name in ("mixtral", "llama4") for recipe in RECIPES]
    + [("qwen3", None, "tensorwise"), ("deepseek", None, "mxfp8")],
)
def test_models_of_transformers(name: str, way: str | None, recipe: str) -> None:
    model, tokens = _real()[name]().bfloat16(), torch.randint(64, (2, 16))
    if way is not None:
        model.set_experts_implementation(way)

    def step() -> list[Tensor]:
        model.zero_grad()
        y = model(tokens, labels=tokens)
        y.loss.backward()
        grads = [p.grad for p in model.parameters()]
        assert all(g is not None for g in grads)
        return [y.logits.detach(), *grads]

    plain = step()
    report = convert(model, RECIPES[recipe])
    assert all(".experts." not in name for name in report.skipped)
    assert not report.not_fused or recipe == "rowwise_wgrad_hp"
    got = step()
    assert 0 < relative_error(got[0], plain[0]) < 0.1
    # Together, as a token that another expert takes changes all of a small gradient.
    together, expected = (torch.cat([t.float().flatten() for t in ts[1:]]) for ts in (got, plain))
    assert 0 < relative_error(together, expected) < 0.15
    lines = summary(model).layers
    assert all(line.last_run for line in lines if line.recipe)
    kept = {line.name.split(".")[-2] if "gate.weight" in line.name else line.name.split(".")[-1]
            for line in lines if not line.recipe}  # fmt: skip
    assert kept <= {"gate", "router", "lm_head"}
    with float8.cached_weights(model):
        for t, e in zip(step(), got, strict=True):
            assert_same_bytes(t, e)
    float8.revert(model)
    for t, e in zip(step(), plain, strict=True):
        assert_same_bytes(t, e)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_models_of_transformers_compile(dtype: torch.dtype) -> None:
    model = _real()["mixtral"]().to(dtype)
    model.set_experts_implementation("grouped_mm")
    convert(model)
    layer, x = model.model.layers[0].mlp, torch.randn(2, 16, 64, dtype=dtype)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_same_bytes(compiled(x), layer(x))
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in layer.experts.parameters())
