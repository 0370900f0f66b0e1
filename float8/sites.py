"""The places of a model that multiply a weight, or may, and why one cannot do so in FP8.

``convert`` decides which of them it changes. Here is what torch does with a weight behind its
layer's back, and what would be lost with an object that is replaced.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .linear import Float8Linear
from .mlp import SwiGLU
from .moe import Experts
from .recipe import Recipe
from .tensor import HIGH_PRECISION, Float8TrainingTensor
from .weight import Float8Weight, given_as

Kind = Literal["linear", "experts", "unknown"]

SHARDED = "its weight is sharded already: convert before that"
_TIED = "it is tied to a parameter of another module, which would meet the Float8Weight too"
_OTHERS = ("torch.", "torchao.", "bitsandbytes.")  # whose linear layers quantise by themselves
STATE = ("recipe", "last_run", "cached")  # what Float8Linear keeps on an instance
SWIGLU_STATE = ("names", "original")  # and SwiGLU
_TRANSFORMERS = (  # SwiGLU layers, if SiLU is set; of mixture-of-experts the shared and dense ones
    "LlamaMLP",
    "Llama4TextMLP",
    "MistralMLP",
    "Qwen2MLP",
    "Qwen2MoeMLP",
    "Qwen3MLP",
    "Qwen3MoeMLP",
    "DeepseekV3MLP",
)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_CONTAINERS = (  # classes of torch that leave the use of parameters to others
    nn.Module,
    nn.Linear,
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
)


@dataclass(frozen=True)
class Site:
    """A place that multiplies a weight, or may."""

    name: str  # the layer's, or the parameter's
    names: tuple[str, ...]  # what patterns are matched against
    module: nn.Module
    parameter: str  # its name within the module
    kind: Kind
    by_class: bool  # becomes a Float8Linear, rather than its parameter a Float8Weight
    refusal: str | None  # why it cannot become either

    @property
    def weight(self) -> Tensor | None:
        """Also one that something computes at each use; None where there is none."""
        weight: Tensor | None = getattr(self.module, self.parameter, None)
        return weight

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of a converted place; None where it is in high precision."""
        if isinstance(self.module, Float8Linear) and self.kind == "linear":
            return self.module.recipe
        if (weight := float8_weight(self.module._parameters.get(self.parameter))) is not None:
            return weight.recipe
        given = given_as(self.module, self.parameter)
        return None if given is None else given[0]

    @property
    def overridden(self) -> bool:
        """Whether pruning, weight_norm, spectral_norm or a parametrization of torch.nn.utils took
        the parameter over after convert: the module then multiplies what is made of it."""
        if isinstance(self.module, ParametrizationList):
            return True
        base, _, suffix = self.parameter.rpartition("_")
        made = self.module.__dict__.get(base) if suffix in ("orig", "v") else None
        return isinstance(made, Tensor) and float8_weight(made) is None

    def matches(self, pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in self.names)

    def named_by(self, pattern: str) -> bool:
        """Whether a pattern of a recipe map means this place; "*" never means an unknown one."""
        if self.kind == "unknown" and pattern.rpartition(".")[2] != self.parameter:
            return False
        return self.matches(pattern)


def find_sites(model: nn.Module) -> list[Site]:
    """Every place in ``model`` that multiplies a weight, or may, in order; a shared module once."""
    modules = list(model.named_modules(remove_duplicate=False))
    by_path = dict(modules)
    paths: dict[nn.Module, list[str]] = {}
    for path, module in modules:
        paths.setdefault(module, []).append(path)
    users = Counter(id(p) for module in paths for p in module._parameters.values())

    sites = []
    for module, names in paths.items():
        known = (*names, *(name.rpartition(".")[2] for name in names))
        ancestors = [by_path[name[:i]] for name in names for i in _dots(name)]
        managed = any(hasattr(m, "unshard") for m in (module, *ancestors))  # by fully_shard
        if isinstance(module, nn.Linear):
            by_class = type(module) in (nn.Linear, Float8Linear) and "forward" not in vars(module)
            parents = [by_path[name.rpartition(".")[0]] for name in names if name]
            refusal = _refuse_linear(module, parents, by_class)
            if not by_class:
                refusal = refusal or _refuse_swap(module.weight, users, managed)
            sites.append(Site(names[0], known, module, "weight", "linear", by_class, refusal))
        for local, weight in _other_weights(module):
            refusal = _refuse_parameter(module, weight) or _refuse_swap(weight, users, managed)
            large = weight.ndim == 3 and weight.shape[0] > 1 and min(weight.shape[1:]) >= 16
            kind: Kind = "experts" if large or isinstance(module, Experts) else "unknown"
            full = [f"{name}.{local}".lstrip(".") for name in names]
            known_here = (*full, local, *known)
            sites.append(Site(full[0], known_here, module, local, kind, False, refusal))
    return sites


@dataclass(frozen=True)
class SwigluSite:
    """A module that is a SwiGLU layer, and may become one call."""

    name: str
    module: nn.Module
    names: tuple[str, ...]  # of its layers, as in ``SwiGLU.names``
    refusal: str | None  # why it cannot, whatever recipes its layers have


def find_swiglus(model: nn.Module) -> list[SwigluSite]:
    """Every SwiGLU layer that is known to be one: a ``SwiGLU``, an MLP of Hugging Face's
    transformers, or a module whose very class names its layers in ``float8_swiglu``."""
    found = []
    for name, module in model.named_modules():
        cls = type(module)
        declared = vars(cls).get("float8_swiglu")
        foreign = (
            cls.__module__.startswith("transformers.models.") and cls.__name__ in _TRANSFORMERS
        )
        if isinstance(module, SwiGLU):
            names = module.names
        elif foreign:
            names = SwiGLU.names
        elif declared is not None:
            names = declared
        else:
            continue
        refusal = _refuse_class(cls) if names is declared else None
        refusal = refusal or _refuse_swiglu(module, names, foreign)
        found.append(SwigluSite(name, module, names, refusal))
    return found


def _refuse_class(cls: type[nn.Module]) -> str | None:
    """Why a class that declares ``float8_swiglu`` cannot give way to SwiGLU."""
    names = vars(cls)["float8_swiglu"]
    if (
        not isinstance(names, tuple)
        or len(names) not in (3, 4)
        or not all(isinstance(name, str) for name in names)
    ):
        return (
            f"its float8_swiglu is {names!r}; it must be a tuple of the names of gate, up and "
            "down, and perhaps of a norm"
        )
    bases = cls.__mro__[: -len(nn.Module.__mro__)]
    members = [name for base in bases for name in vars(base) if not name.startswith("__")]
    if own := [name for name in members if name not in ("forward", "float8_swiglu")]:
        return f"its class has {own[0]!r}, which SwiGLU lacks"
    if (takes := list(inspect.signature(cls.forward).parameters)[1:]) != ["x"]:
        return f"its forward takes ({', '.join(takes)}), that of SwiGLU (x)"
    return None


def _refuse_swiglu(module: nn.Module, names: Sequence[str], foreign: bool) -> str | None:
    missing = [name for name in names if module._modules.get(name) is None]
    if missing:
        return f"it has no layer {missing[0]!r}"
    if not isinstance(module, SwiGLU):
        if "forward" in module.__dict__:
            return "its instance has a forward of its own"
        own = (*module.__dict__, *module._parameters, *module._buffers, *module._modules)
        if taken := [name for name in own if name in vars(SwiGLU)]:
            return f"it has an attribute {taken[0]!r} of its own, a name that SwiGLU uses"
    if foreign:
        act = getattr(module, "act_fn", getattr(module, "activation_fn", None))  # Llama 4's
        forward, named = type(module).forward, type(act).__name__
        if not isinstance(act, nn.SiLU) and named != "SiLUActivation":  # transformers 5's
            return f"its activation is {named}, not SiLU"
        if forward.__module__ != type(module).__module__:
            return f"its class has a forward of {forward.__module__}"
    gate, up, down = shapes = [
        (getattr(layer, "in_features", 0), getattr(layer, "out_features", 0))
        for layer in (module._modules[name] for name in names[:3])
    ]
    if not gate == up == down[::-1]:
        return f"its layers, of {shapes[0]}, {shapes[1]} and {shapes[2]} features, make no SwiGLU"
    return None


def _dots(name: str) -> list[int]:
    """Where the names of the modules around a module end in its name."""
    return [0, *(i for i, letter in enumerate(name) if letter == ".")]


def _other_weights(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters, besides ``weight`` of an nn.Linear, that may be weights of products."""
    found = {name: p for name, p in module._parameters.items() if p is not None}
    if isinstance(module, nn.MultiheadAttention):
        return [(name, p) for name, p in found.items() if name.endswith("proj_weight")]
    if isinstance(module, _RECURRENT):
        return [(name, p) for name, p in found.items() if name.startswith("weight_")]
    if isinstance(module, ParametrizationList):  # which may have taken one over
        return [(name, p) for name, p in found.items() if float8_weight(p) is not None]
    if type(module) in (nn.Linear, Float8Linear) or _is_torchs(module):
        return []
    if isinstance(module, nn.Linear):
        found.pop("weight", None)
    return [
        (name, p)
        for name, p in found.items()
        if not is_lazy(p) and p.is_floating_point() and p.ndim in (2, 3)
    ]


def _is_torchs(module: nn.Module) -> bool:
    """Whether a class of torch uses the module's parameters: a convolution, a norm, ..."""
    classes = [c for c in type(module).__mro__ if issubclass(c, nn.Module) and c not in _CONTAINERS]
    return any(c.__module__.startswith("torch.") and not is_distributed(c) for c in classes)


def check_module(model: object, name: str) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is of type {type(model).__name__}; {name} takes an nn.Module")


def title(name: str) -> str:
    return f"Layer {name!r}" if name else "The model"


def is_distributed(cls: type) -> bool:
    """DTensor, or a class that fully_shard made; by name, for torch may be built without them."""
    return cls.__module__.startswith("torch.distributed.")


def float8_weight(weight: Tensor | None) -> Float8Weight | None:
    """The Float8Weight that a parameter is, or that fully_shard cut it into (a DTensor's part)."""
    if weight is not None and is_distributed(type(weight)):
        weight = getattr(weight, "_local_tensor", None)
    return weight if isinstance(weight, Float8Weight) else None


def _refuse_linear(module: nn.Linear, parents: Sequence[nn.Module], by_class: bool) -> str | None:
    if any(isinstance(parent, nn.MultiheadAttention) for parent in parents):
        return "nn.MultiheadAttention multiplies this weight itself, without calling the layer"
    if any(_has_fast_path(parent) for parent in parents):
        return (
            "nn.TransformerEncoderLayer multiplies this weight itself in eval mode; "
            "torch.backends.mha.set_fastpath_enabled(False) before convert prevents that"
        )
    if is_parametrized(module):
        return "it is parametrized: its weight is computed at each use"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is no parameter: weight_norm, spectral_norm, pruning or FSDP1 makes it"
    if isinstance(module, Float8Linear) or float8_weight(weight) is not None:
        return None
    cls = type(module)
    if is_distributed(cls):
        return f"fully_shard made it a {cls.__name__}: convert before that"
    if cls.__module__.startswith(_OTHERS) and cls is not nn.Linear and not is_lazy(weight):
        return f"a {cls.__name__} of {cls.__module__} has its own way with its weight"
    taken = [name for name in STATE if by_class and name in module.__dict__]
    if taken:
        return f"it has an attribute {taken[0]!r} of its own, a name that Float8Linear uses"
    return _refuse_weight(weight)


def _refuse_parameter(module: nn.Module, weight: Tensor) -> str | None:
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies it in one function with everything else"
    if isinstance(module, _RECURRENT):
        return f"{type(module).__name__} multiplies it in one function with everything else"
    if float8_weight(weight) is not None:
        return None
    if is_parametrized(module):
        return "its module is parametrized"
    return _refuse_weight(weight)


def _refuse_weight(weight: Tensor) -> str | None:
    if is_lazy(weight):
        return "a lazy layer has no weight yet: run one batch before convert"
    if isinstance(weight, Float8TrainingTensor):
        return f"its weight is stored in FP8 already ({weight.format.name}) and multiplies so"
    if is_traceable_wrapper_subclass(weight) and not is_distributed(type(weight)):
        return f"its weight is a {type(weight).__name__}, not a plain tensor"
    if weight.dtype not in HIGH_PRECISION:
        return f"its weight is {weight.dtype}; needed {', '.join(map(str, HIGH_PRECISION))}"
    if weight.is_inference():
        return "its weight was made under torch.inference_mode, where nothing can be trained"
    return None


def _refuse_swap(weight: Tensor, users: Counter[int], managed: bool) -> str | None:
    """Why a parameter cannot become a Float8Weight, or stop being one, in place."""
    if managed or is_distributed(type(weight)):
        return SHARDED
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "its weight has hooks, which would be lost: register them after convert"
    return _TIED if users[id(weight)] > 1 else None


def _has_fast_path(module: nn.Module) -> bool:
    """Whether torch's fused kernel may run, which reads the weights of linear1 and linear2."""
    return (
        isinstance(module, nn.TransformerEncoderLayer)
        and type(module).forward is nn.TransformerEncoderLayer.forward
        and torch.backends.mha.get_fastpath_enabled()
        and module.self_attn.batch_first
        and module.activation_relu_or_gelu != 0
    )
