"""Into FP8 and out of it: ``convert``, ``revert``, ``summary``.

What becomes of a place that multiplies a weight:

- A module that is exactly ``nn.Linear`` becomes ``Float8Linear`` by its class alone: the same
  object, the same parameters and hooks.
- What has a forward of its own keeps its class, and its parameter becomes a ``Float8Weight``:
  - ``weight`` of a subclass of ``nn.Linear``, or of an ``nn.Linear`` whose instance has a forward;
  - a stack of expert matrices: a 3-D parameter [experts, rows, columns], at least 2 x 16 x 16, of a
    module that is not one of torch's, or one of ``MoE``;
  - another 2-D or 3-D parameter of such a module, but only where the last component of a recipe
    map's pattern is its name: nothing tells a weight from a table of positions.
- A SwiGLU layer of three that become Float8Linears becomes a ``SwiGLU`` around them, by its class
  alone: one call, in which casts are fused with what makes their input. Known are the MLPs of
  Llama, Mistral, Qwen and DeepSeek-V3 of Hugging Face's transformers, and modules whose class says
  so: ``float8_swiglu = ("w1", "w3", "w2")`` names gate, up and down (and as a fourth the nn.RMSNorm
  before them, if there is one) of ``down(silu(gate(x)) * up(x))``.
- Embeddings, norms, convolutions and other modules of torch are left alone. What reads a weight
  behind its layer's back is skipped with the reason.

A pattern (``fnmatch``, case matters) matches a layer by its full dotted name or the last component
of it, and a parameter also by the names of its module. Of ``keep`` the patterns of GATES mean
routers and no stack of experts, which "*.gate" keeps.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from .devices import device_profile
from .linear import Float8Linear
from .mlp import SwiGLU, obstacle
from .recipe import RECIPES, ROWWISE, Recipe, aligned
from .scaling import FULL, Block
from .sites import (
    SHARDED,
    STATE,
    SWIGLU_STATE,
    Site,
    SwigluSite,
    check_module,
    find_sites,
    find_swiglus,
    float8_weight,
    title,
)
from .weight import Float8Weight, given_as, unwrap_parameter, wrap_parameter

RecipeMap = Mapping[str, Recipe | None]
Experts = Recipe | Literal["auto", False]

# Logits and routing: small gain, large harm. GATES are for routers alone, which may be modules
# (DeepSpeed's and HunYuan's have their layer in gate.wg): of a stack of expert matrices that is the
# name of half the weights.
GATES = ("gate", "gate.*", "*.gate.*")
KEEP = ("lm_head", "output", "*router*", *GATES, "shared_expert_gate")

# Why the last convert left a place alone: module -> parameter -> reason; "" is the parameter of a
# SwiGLU layer. For summary(); a copied model has none, and its summary says less.
_reasons: weakref.WeakKeyDictionary[nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Report:
    """What ``convert`` did; ``print`` it.

    Args:
        converted: name -> (the recipe's name, "Float8Linear" or "Float8Weight").
        skipped: name -> why it stays in high precision.
        fused: SwiGLU layers whose three products became one call: name -> the recipe's name.
        not_fused: name of another SwiGLU layer -> why its layers are called one by one.
    """

    converted: dict[str, tuple[str, str]]
    skipped: dict[str, str]
    fused: dict[str, str] = field(default_factory=dict)
    not_fused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [("layer", "as", "recipe, or why not")]
        rows += [(name, how, recipe) for name, (recipe, how) in self.converted.items()]
        rows += [(name, "SwiGLU", recipe) for name, recipe in self.fused.items()]
        rows += [(name, "-", reason) for name, reason in self.skipped.items()]
        rows += [(name, "-", f"not fused: {why}") for name, why in self.not_fused.items()]
        hows = Counter(how for _, how in self.converted.values())
        kinds = ", ".join(f"{hows[how]} {how}" for how in ("Float8Linear", "Float8Weight"))
        total = f"{len(self.converted)} converted ({kinds}), {len(self.skipped)} skipped"
        if mlps := len(self.fused) + len(self.not_fused):
            total += f", {len(self.fused)} of {mlps} SwiGLU fused"
        return _table(rows, total)


_NUMBER = re.compile(r"(?<![^.'])\d+(?![^.'])")  # that is a whole part of a name


def _table(rows: Sequence[tuple[str, ...]], total: str) -> str:
    """Four or more rows that are alike but for the numbers in names become one, whose name is a
    pattern for them all, and how many there are."""
    patterns = [tuple(_NUMBER.sub("*", cell) for cell in row) for row in rows]
    alike = Counter(patterns)
    lines: dict[tuple[str, ...], None] = {}  # each once
    for row, pattern in zip(rows, patterns, strict=True):
        name, *rest = row
        if alike[pattern] > 3:
            name, *rest = f"{pattern[0]} ({alike[pattern]})", *pattern[1:]
        lines[(name or "(the model)", *rest)] = None
    return "\n".join([*aligned([*lines]), total])


def convert(
    model: nn.Module,
    recipe: Recipe | RecipeMap = ROWWISE,
    keep: Sequence[str] = KEEP,
    experts: Experts = "auto",
    strict: bool = True,
    fuse: bool = True,
) -> Report:
    """Let the layers of ``model`` multiply in FP8, in place.

    Which layers, how, and what a pattern matches: see the module's docstring. Parameters stay the
    same objects, so an optimiser made before still trains them; state dicts stay plain. Nothing is
    copied, and the model may be on the meta device. ``revert`` undoes it.

    Args:
        model: any module, a single ``nn.Linear`` too.
        recipe: for every layer; or pattern -> recipe, where the first match wins, and None, like no
            match at all, leaves a layer in high precision.
        keep: patterns of layers to leave in high precision, whatever ``recipe`` says. Yours replace
            KEEP; ``(*float8.KEEP, "layers.0.*")`` adds to it.
        experts: for stacks of expert matrices that no pattern of a recipe map matches: "auto" goes
            by ``recipe``, a Recipe is theirs alone, False leaves them in high precision.
        strict: raise when nothing was converted, or when a pattern (but "*") or a Recipe for
            experts that you passed decided nothing, be it because all it is for cannot multiply in
            FP8.
        fuse: make SwiGLU layers one call; False leaves their forward as it is. (A module that was
            made as a ``SwiGLU`` needs no permission.)

    Raises:
        ValueError: an argument is of the wrong kind, a layer is in FP8 already, or ``strict``
            objects.
        RuntimeError: a parameter that should become a Float8Weight is held by a graph that waits
            for its backward, by DistributedDataParallel or by a weak reference.
            In either case the model is as it was.
    """
    _check_arguments(model, recipe, keep, experts, strict=strict, fuse=fuse)
    sites = find_sites(model)
    if (found := next((site.name for site in sites if site.recipe is not None), None)) is not None:
        raise ValueError(
            f"{title(found)} is in FP8 already; float8.revert(model), then convert as you like"
        )
    used: set[tuple[str, object]] = set()
    decisions = [(site, _decide(site, recipe, keep, experts, used)) for site in sites]
    mlps = _decide_fusions(model, decisions, fuse)
    report = _report(decisions, mlps)
    if strict:
        asked: list[tuple[str, object]] = [("keep", p) for p in keep if p not in KEEP]
        patterns = recipe if isinstance(recipe, Mapping) else ()
        asked += [("recipe", p) for p in patterns if p != "*"]  # which may be left with nothing
        asked += [("experts", experts)] * isinstance(experts, Recipe)
        _check_outcome(model, report, sites, [option for option in asked if option not in used])
    todo = [(s.name, partial(_enter, s, d)) for s, d in decisions if isinstance(d, Recipe)]
    todo += [
        (mlp.name, partial(_fuse, mlp))
        for mlp, decision in mlps
        if isinstance(decision, Recipe) and not isinstance(mlp.module, SwiGLU)
    ]
    _change_all(todo)
    for place, parameter, decision in (
        *((site.module, site.parameter, decision) for site, decision in decisions),
        *((mlp.module, "", decision) for mlp, decision in mlps),
    ):
        if isinstance(decision, str):
            _reasons.setdefault(place, {})[parameter] = decision
    return report


def _check_arguments(
    model: object, recipe: object, keep: object, experts: object, **flags: object
) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is of type {type(model).__name__}; convert changes an nn.Module in place"
        )
    values = [recipe]
    if isinstance(recipe, Mapping):
        values = [value for value in recipe.values() if value is not None]
        if not all(isinstance(pattern, str) for pattern in recipe):
            raise ValueError(f"recipe has the keys {list(recipe)}; patterns are strings")
    for value in values:
        if not isinstance(value, Recipe):
            raise ValueError(
                f"{value!r} is no recipe; pass a float8.Recipe, such as those of float8.RECIPES "
                f"({', '.join(RECIPES)}), or a map from patterns to recipes"
            )
    patterns = isinstance(keep, Sequence) and all(isinstance(pattern, str) for pattern in keep)
    if not patterns or isinstance(keep, str):
        raise ValueError(f"keep={keep!r} must be a sequence of patterns: ('lm_head', 'blocks.0.*')")
    if not isinstance(experts, Recipe) and experts is not False and experts != "auto":
        raise ValueError(f"experts={experts!r} must be 'auto', False or a float8.Recipe")
    for option, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{option}={flag!r} must be True or False")


def _decide(
    site: Site,
    recipe: Recipe | RecipeMap,
    keep: Sequence[str],
    experts: Experts,
    used: set[tuple[str, object]],
) -> Recipe | str:
    """The site's recipe, or why it has none; ``used`` gets what patterns and options had a say.
    One that asks for FP8 where that cannot be has none."""
    kept = [p for p in keep if site.matches(p) and (p not in GATES or site.kind != "experts")]
    used.update(("keep", pattern) for pattern in kept)
    if kept:
        return f"kept by pattern {kept[0]!r}"
    if isinstance(recipe, Mapping):
        pattern = next((pattern for pattern in recipe if site.named_by(pattern)), None)
        if pattern is not None:
            chosen: Recipe | None = recipe[pattern]
            if chosen is None or site.refusal is None:
                used.add(("recipe", pattern))
            return site.refusal or chosen or f"kept by None for pattern {pattern!r}"
    if site.kind == "experts" and experts != "auto":
        if site.refusal is None:
            used.add(("experts", experts))
        return site.refusal or experts or "kept by experts=False"
    if site.refusal is not None:
        return site.refusal
    if site.kind == "unknown":
        return (
            f"what {type(site.module).__name__} does with it is unknown: "
            f"recipe={{{site.name!r}: ...}} says that it multiplies"
        )
    if isinstance(recipe, Mapping):
        return "no pattern of the recipe map matches it"
    return recipe


def _decide_fusions(
    model: nn.Module, decisions: Sequence[tuple[Site, Recipe | str]], fuse: bool
) -> list[tuple[SwigluSite, Recipe | str]]:
    """Of each SwiGLU layer, the recipe of the one call that it becomes, or why it becomes none."""
    recipes = {
        site.module: decision
        for site, decision in decisions
        if site.by_class and isinstance(decision, Recipe)
    }
    found: list[tuple[SwigluSite, Recipe | str]] = []
    for mlp in find_swiglus(model):
        why = mlp.refusal
        if not fuse and not isinstance(mlp.module, SwiGLU):
            why = "fuse=False"
        if why is None:
            layers = [getattr(mlp.module, name) for name in mlp.names]
            why = obstacle(mlp.module, mlp.names, [recipes.get(layer) for layer in layers[:3]])
        found.append((mlp, recipes[layers[0]] if why is None else why))
    return found


def _report(
    decisions: Sequence[tuple[Site, Recipe | str]], mlps: Sequence[tuple[SwigluSite, Recipe | str]]
) -> Report:
    report = Report({}, {})
    for site, decision in decisions:
        if isinstance(decision, Recipe):
            how = "Float8Linear" if site.by_class else "Float8Weight"
            report.converted[site.name] = (decision.name, how)
        else:
            report.skipped[site.name] = decision
    for mlp, decision in mlps:
        if isinstance(decision, Recipe):
            report.fused[mlp.name] = decision.name
        else:
            report.not_fused[mlp.name] = decision
    return report


def _check_outcome(
    model: nn.Module,
    report: Report,
    sites: Sequence[Site],
    idle: Sequence[tuple[str, object]],
) -> None:
    """Raise ValueError if nothing is to be converted, or for options that decided nothing."""
    problems = []
    for option, value in idle:
        if isinstance(value, str):
            text = f"pattern {value!r} of {option} decides nothing"
            meant = [site for site in sites if site.named_by(value)]
        else:
            text = "no stack of expert matrices is left for experts= to decide"
            meant = [site for site in sites if site.kind == "experts"]
        refused = [s for s in meant if s.refusal and s.refusal == report.skipped.get(s.name)]
        if refused:
            text += f", since {refused[0].name!r} cannot multiply in FP8 ({refused[0].refusal})"
        elif isinstance(value, str):
            if meant:
                text += ", since keep or an earlier pattern has decided what it matches"
            elif (holder := _holder_of_layers(model, value, sites)) is not None:
                text += f" ({holder!r} only holds layers, which {holder + '.*'!r} matches)"
        problems.append(text)
    if not report.converted:
        problems.append("no layer is left to convert")
    if problems:
        raise ValueError(
            f"convert left the model as it was: {'; '.join(problems)}. Change that, or pass "
            f"strict=False. It would have done this:\n{report}"
        )


def _holder_of_layers(model: nn.Module, pattern: str, sites: Sequence[Site]) -> str | None:
    """The name of a module that a pattern matches and that has layers inside."""
    name: str
    for name, _ in model.named_modules():
        matched = fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)
        if name and matched and any(site.name.startswith(f"{name}.") for site in sites):
            return name
    return None


def _enter(site: Site, recipe: Recipe) -> Callable[[], object]:
    """Convert a site; returns what takes that back."""
    module, name = site.module, site.parameter
    if site.by_class:
        module.__class__ = Float8Linear
        module.__dict__["recipe"] = recipe
        return partial(_leave, site, recipe)
    wrap_parameter(module, name, recipe)
    return partial(unwrap_parameter, module, name)


def _leave(site: Site, recipe: Recipe) -> Callable[[], object]:
    """Revert a site; returns what takes that back, and what it recorded too."""
    module, name = site.module, site.parameter
    by_class = type(module) is Float8Linear  # else mypy takes nn.Linear for a mistake
    if by_class:
        state = {key: module.__dict__.pop(key) for key in STATE if key in module.__dict__}
        module.__class__ = nn.Linear

        def back() -> None:
            module.__class__ = Float8Linear
            module.__dict__.update(state)

        return back
    weight = float8_weight(module._parameters[name])  # None after another that shares it
    record = None if weight is None else weight.record
    unwrap_parameter(module, name)

    def back_to_weight() -> None:
        wrap_parameter(module, name, recipe)
        again = module._parameters[name]
        if record is not None and isinstance(again, Float8Weight):
            again.record = record

    return back_to_weight


def _fuse(mlp: SwigluSite) -> Callable[[], object]:
    """Make a SwiGLU layer one call; returns what takes that back."""
    original = type(mlp.module)
    mlp.module.__class__ = SwiGLU
    mlp.module.__dict__.update(names=mlp.names, original=original)
    return partial(_take_apart, mlp)


def _take_apart(mlp: SwigluSite) -> Callable[[], object]:
    state = {key: mlp.module.__dict__.pop(key) for key in SWIGLU_STATE}
    mlp.module.__class__ = state["original"]
    return partial(_fuse, mlp)


def _change_all(todo: Sequence[tuple[str, Callable[[], Callable[[], object]]]]) -> None:
    """Make every change, of a name each, or, if one of them fails, none. A change returns what
    takes it back."""
    undo: list[Callable[[], object]] = []
    for name, change in todo:
        try:
            undo.append(change())
        except BaseException as error:
            for back in reversed(undo):
                back()
            if isinstance(error, RuntimeError):  # from torch.utils.swap_tensors
                raise RuntimeError(
                    f"{title(name)} could not be changed, so nothing was: its parameter is "
                    "held by a graph that waits for its backward (that of an output which you "
                    "still hold), by DistributedDataParallel or by a weak reference"
                ) from error
            raise


def revert(model: nn.Module) -> nn.Module:
    """Give back what ``convert`` found, in place: classes, attributes, plain parameters (the same
    objects, with what training made of their values). Returns ``model``.

    Raises:
        ValueError: nothing in ``model`` is in FP8, or something was built on a converted layer
            meanwhile: a class derived, a forward patched, a Float8Weight sharded or parametrized.
        RuntimeError: a Float8Weight is held by DistributedDataParallel or by a weak reference.
            In either case the model is as it was.

    A graph made before holds nothing up, but its backward then raises where it has a Float8Weight.
    """
    check_module(model, "revert")
    found = [(site, site.recipe) for site in find_sites(model) if site.recipe is not None]
    mlps = [mlp for mlp in find_swiglus(model) if "original" in mlp.module.__dict__]
    if not found and not mlps:
        raise ValueError("no layer of this model is in FP8, so there is nothing to revert")
    for mlp in mlps:
        _check_unchanged(mlp.name, mlp.module, SwiGLU)
    for site, _ in found:
        if isinstance(site.module, Float8Linear):
            _check_unchanged(site.name, site.module, Float8Linear)
        if site.refusal == SHARDED:
            raise ValueError(
                f"{title(site.name)} has a sharded Float8Weight; revert before fully_shard"
            )
        if isinstance(site.module, ParametrizationList):
            raise ValueError(
                f"{title(site.name)} is a Float8Weight that was parametrized after convert; "
                "torch.nn.utils.parametrize.remove_parametrizations, then revert"
            )
    todo = [(mlp.name, partial(_take_apart, mlp)) for mlp in mlps]
    todo += [(site.name, partial(_leave, site, recipe)) for site, recipe in found]
    _change_all(todo)
    for module in model.modules():
        _reasons.pop(module, None)
    return model


def _check_unchanged(name: str, module: nn.Module, made: type[nn.Module]) -> None:
    """Raise ValueError if something was built on a module that convert gave the class ``made``."""
    if type(module) is not made:
        raise ValueError(
            f"{title(name)} is of class {type(module).__name__}, which something (fully_shard, "
            f"parametrize, ...) derived from {made.__name__}; revert before that"
        )
    if "forward" in module.__dict__:
        raise ValueError(
            f"{title(name)} got a forward of its own after convert, which may call that of "
            f"{made.__name__}; take it off before revert"
        )


@dataclass(frozen=True)
class Layer:
    """A line of ``summary``: a place that multiplies a weight, or may.

    Args:
        name: the layer's, or the parameter's, as in ``Report``.
        shape: the weight's; () where there is none, or none yet (a lazy layer).
        recipe: its name; None in high precision.
        last_run: implementations that forward, dgrad and wgrad took when last run or traced; None
            before, and in high precision.
        note: why it is in high precision, the SwiGLU layer that it is part of, advice; else "".
    """

    name: str
    shape: tuple[int, ...]
    recipe: str | None
    last_run: tuple[str, str, str] | None
    note: str


_EMULATED = {"torch", "torch_bf16"}  # implementations that multiply dequantised operands


@dataclass(frozen=True)
class Summary:
    """What multiplies in a model, and how; ``print`` it."""

    layers: tuple[Layer, ...]

    @property
    def fp8(self) -> int:
        """How many of the layers have a recipe."""
        return sum(layer.recipe is not None for layer in self.layers)

    def __str__(self) -> str:
        rows = [("layer", "shape", "recipe", "forward", "dgrad", "wgrad", "note")]
        for layer in self.layers:
            ran = layer.last_run or ("-" if layer.recipe is None else "never run", "-", "-")
            shape = " x ".join(map(str, layer.shape))
            rows.append((layer.name, shape, layer.recipe or "-", *ran, layer.note))
        idle = sum(layer.recipe is not None and layer.last_run is None for layer in self.layers)
        total = f"{self.fp8} of {len(self.layers)} in FP8, {idle} of them never run"
        if emulated := sum(not _EMULATED.isdisjoint(layer.last_run or ()) for layer in self.layers):
            total += f", {emulated} emulated"
        return _table(rows, total)


def summary(model: nn.Module) -> Summary:
    """Every layer of ``model`` that multiplies a weight: its recipe and what its GEMMs took when
    they last ran, or why it stays in high precision."""
    check_module(model, "summary")
    layers, mlps = [], _notes_on_mlps(model)
    for site in find_sites(model):
        weight, recipe = site.weight, site.recipe
        shape = () if weight is None or is_lazy(weight) else tuple(weight.shape)
        if recipe is None:
            noted = _reasons.get(site.module, {}).get(site.parameter)
            layers.append(
                Layer(site.name, shape, None, None, noted or site.refusal or "not converted")
            )
            continue
        if site.overridden:
            note = "overridden: something computes another weight from it, in high precision"
            layers.append(Layer(site.name, shape, None, None, note))
            continue
        given, wrapped = given_as(site.module, site.parameter), float8_weight(weight)
        holder: Any = wrapped if wrapped is not None else given[1] if given else site.module
        advice = "" if weight is None else _advice(shape, recipe, weight.device)
        note = "; ".join(filter(None, (mlps.get(site.module, ""), advice)))
        layers.append(Layer(site.name, shape, recipe.name, holder.last_run, note))
    return Summary(tuple(layers))


def _notes_on_mlps(model: nn.Module) -> dict[nn.Module, str]:
    """Of each layer of a SwiGLU layer, whether it is part of one call."""
    notes: dict[nn.Module, str] = {}
    for mlp in find_swiglus(model):
        if isinstance(mlp.module, SwiGLU):
            why = mlp.refusal or mlp.module.obstacle()
        else:
            why = _reasons.get(mlp.module, {}).get("", "not converted")
        note = f"fused in {mlp.name!r}" if why is None else f"{mlp.name!r} is not fused: {why}"
        layers = (mlp.module._modules.get(name) for name in mlp.names[:3])
        notes.update((layer, note) for layer in layers if layer is not None)
    return notes


# Sizes [N, K] up to which FP8 does not beat BF16, by the block of x. Measured on H100 by torchao's
# authors (0.18, _auto_filter_for_recipe), who compile, so that casts fuse into what is before them.
# Other blocks and other chips have no such measurement, so nothing is said of them.
_TOO_SMALL: dict[Block, Callable[[int, int], bool]] = {
    (1, FULL): lambda n, k: n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048),
    (FULL, FULL): lambda n, k: n <= 1024 and k <= 4096,
}


def _advice(shape: tuple[int, ...], recipe: Recipe, device: torch.device) -> str:
    gemms = recipe.forward, recipe.dgrad, recipe.wgrad
    chip = device_profile(device).product or ""
    if len(shape) != 2 or None in gemms or not ("H100" in chip or "H200" in chip):
        return ""
    blocks = {gemm.a.block for gemm in gemms if gemm is not None}
    too_small = _TOO_SMALL.get(blocks.pop()) if len(blocks) == 1 else None
    if too_small is None or not too_small(*shape):
        return ""
    return "too small to gain on this device: keep it in high precision"
