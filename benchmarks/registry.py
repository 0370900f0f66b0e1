"""What a row of the registry is, and the shapes that rows are measured on.

A row (``Bench``) is one job on a few shapes. Its ``make`` gives, for one shape, the contenders that
do this job: ours, a baseline of plain torch, a peer's. Each comes with a check of its result, which
it has to pass before it is timed.
"""

from __future__ import annotations

import fnmatch
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from float8.recipe import RECIPES

Shape = tuple[int, ...]
Outputs = tuple[Tensor, ...]
Call = Callable[[], Outputs]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Options:
    """How a row is set up. ``peer``: with torchao's contenders. ``isolate``: seconds that each of
    ours has to pass its check in a process of its own, before it runs in this one."""

    device: torch.device
    peer: bool = False
    recipes: tuple[str, ...] = tuple(RECIPES)
    isolate: float | None = None


@dataclass(frozen=True)
class Contender:
    """One way to do a job.

    Args:
        make: sets it up and returns the call that is timed. What it raises is reported as the
            reason why the contender is absent.
        check: what is wrong with the results of that call, None if nothing is.
        ours: a failure refuses the whole row.
        line: it has a line in the table; the others are seen in the ratios alone.
        note: stands beside its numbers.
    """

    make: Callable[[], Call]
    check: Callable[[Call], str | None]
    ours: bool = False
    line: bool = False
    note: str = ""


def compiled(function: F) -> F:
    """torch.compile of a copy. Compiled code hangs on a function's code object: contenders that
    shared one would look through each other's guards, and reach the limit of recompilations."""
    own = types.FunctionType(
        function.__code__.replace(), function.__globals__, closure=function.__closure__
    )
    return cast(F, torch.compile(own, dynamic=False))


@dataclass(frozen=True)
class Bench:
    """A row.

    Args:
        name: "group/what".
        make: the contenders for a shape, by name; names of a peer's start with "torchao".
        shapes: sets of named shapes; "default" is what runs unless others are asked for.
        smoke: a shape that a CPU does at once.
        baseline: the contender that ratios are to.
        bytes: how many bytes the method must move for a shape, None where that is no measure.
        flops: how many operations a product has, None of rows that are none.
    """

    name: str
    make: Callable[[Shape, Options], dict[str, Contender]]
    shapes: dict[str, dict[str, Shape]]
    smoke: Shape
    baseline: str
    bytes: Callable[[Shape], int] | None = None
    flops: Callable[[Shape], int] | None = None

    @property
    def whole_step(self) -> bool:
        """A layer's step: compilation and memory count, and no single measure of work does."""
        return self.bytes is None and self.flops is None

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


def chosen(benches: Iterable[Bench], patterns: Sequence[str]) -> list[Bench]:
    """The rows that any pattern names, a group or a glob over names. ValueError: one names none."""
    benches = list(benches)
    found: dict[str, Bench] = {}
    for pattern in patterns:
        hits = [b for b in benches if b.group == pattern or fnmatch.fnmatch(b.name, pattern)]
        if not hits:
            raise ValueError(f"no row is called {pattern!r}; python -m benchmarks list shows them")
        found |= {bench.name: bench for bench in hits}
    return list(found.values())


def shapes_of(bench: Bench, sets: Sequence[str]) -> dict[str, Shape]:
    """Shapes of a row by name: those of the sets that it has, and those written out, as in
    8192x4096, that have its rank. Each shape once."""
    found: dict[Shape, str] = {}
    for name in sets:
        if name.replace("x", "").isdigit():
            shape = tuple(map(int, name.split("x")))
            if len(shape) == len(bench.smoke):
                found.setdefault(shape, "")
        for label, shape in bench.shapes.get(name, {}).items():
            found.setdefault(shape, label)
    return {label or "x".join(map(str, shape)): shape for shape, label in found.items()}


# ------------------------------------------------------------------------------------- the shapes


def named_shapes(
    models: dict[str, str], default: tuple[str, ...], tokens: int = 0
) -> dict[str, dict[str, Shape]]:
    """Sets of shapes, one per model, from "name 4096x4096, name ..."; and "default", those of the
    given full names. With ``tokens``, shapes are weights [out, in], and before them comes that many
    rows of what they multiply."""
    sets: dict[str, dict[str, Shape]] = {}
    for model, text in models.items():
        pairs = [item.split() for item in text.split(", ")]
        found = {f"{model} {name}": tuple(map(int, shape.split("x"))) for name, shape in pairs}
        widths = dict.fromkeys(shape[-1] for shape in found.values()) if tokens else ()
        sets[model] = {f"{model} x {width}": (tokens, width) for width in widths} | found
    every = {name: shape for found in sets.values() for name, shape in found.items()}
    return {"default": {name: every[name] for name in default}} | sets


MATRICES = named_shapes(
    {
        "llama3-8b": "wq 4096x4096, wkv 1024x4096, ffn_in 14336x4096, ffn_out 4096x14336",
        "llama3-70b": "wq 8192x8192, wkv 1024x8192, ffn_in 28672x8192, ffn_out 8192x28672",
        "deepseek-v3": "wq_a 1536x7168, wq_b 24576x1536, wkv_a 576x7168, wkv_b 32768x512, "
        "wo 7168x16384, ffn_in 18432x7168, ffn_out 7168x18432, shared_in 2048x7168, "
        "shared_out 7168x2048",
        "deepseek-moe-16b": "wq 2048x2048, ffn_in 10944x2048, ffn_out 2048x10944, "
        "shared_in 2816x2048, shared_out 2048x2816",
        "llama4-scout": "wq 5120x5120, wkv 1024x5120, shared_in 8192x5120, shared_out 5120x8192",
    },
    default=("llama3-8b x 4096", "llama3-8b x 14336", "llama3-8b ffn_in"),
    tokens=8192,
)
EXPERTS = named_shapes(  # [experts on one device, out, in]
    {
        "deepseek-moe-16b": "gate+up 64x2816x2048, down 64x2048x1408",
        "deepseek-v3": "gate+up 32x4096x7168, down 32x7168x2048",
        "llama4-scout": "gate+up 16x16384x5120, down 16x5120x8192",
    },
    default=("deepseek-moe-16b gate+up", "deepseek-v3 gate+up"),
)
