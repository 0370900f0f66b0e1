"""What runs in FP8 and how: one frozen value per way of training.

A linear layer multiplies three times. Letters: M tokens, N out features, K in features.

    forward  y_MN  = x_MK    @ (w_NK).T      operands x [M, K]   and w [N, K],   contraction K
    dgrad    gx_MK = g_MN    @ (w_KN).T      operands g [M, N]   and w^T [K, N], contraction N
    wgrad    gw_NK = (g_NM)  @ (x_KM).T      operands g^T [N, M] and x^T [K, M], contraction M

Every operand is written as [rows, contraction], so one block shape ``(rows, contraction)`` says how
it is scaled in each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from .devices import DeviceProfile, assumed_device, device_profile, format_for
from .kernels.matmul import Operand, select
from .kernels.quantize import CastPlan
from .scaling import FULL, Block, block_name, check_block, check_scale_mode, scale_dtype


@dataclass(frozen=True)
class Cast:
    """How one operand [rows, contraction] of one GEMM is quantised.

    Args:
        kind: "e4m3" or "e5m2"; the device gives the flavour.
        block: (rows, contraction), each a size or ``FULL``.
        scale_mode: one of ``float8.scaling.SCALE_MODES``.
    """

    kind: Literal["e4m3", "e5m2"]
    block: Block
    scale_mode: str = "fp32"

    def __post_init__(self) -> None:
        if self.kind not in ("e4m3", "e5m2"):
            raise ValueError(f"kind={self.kind!r} must be 'e4m3' or 'e5m2'")
        if not isinstance(self.block, tuple) or [type(b) for b in self.block] != [int, int]:
            raise ValueError(
                f"block={self.block!r} must be a tuple of two ints, (rows, contraction), such as "
                "(1, 128)"
            )
        check_block((0, 0), self.block)
        check_scale_mode(self.scale_mode)

    def __str__(self) -> str:
        return f"{self.kind} {block_name(self.block)} {self.scale_mode}"


@dataclass(frozen=True)
class Gemm:
    """One FP8 GEMM: its two operands, and whether partial sums may be kept in less than float32
    (``fast_accum``)."""

    a: Cast
    b: Cast
    fast_accum: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.a, Cast) or not isinstance(self.b, Cast):
            raise ValueError(f"operands {self.a!r} and {self.b!r} must each be a float8.Cast")
        if not isinstance(self.fast_accum, bool):
            raise ValueError(f"fast_accum={self.fast_accum!r} must be True or False")
        if self.a.block[1] != self.b.block[1] or self.a.block[1] == 1:
            raise ValueError(
                f"operands with blocks {block_name(self.a.block)} and {block_name(self.b.block)} "
                "cannot be multiplied: the "
                "second entry is the contraction's, and must be the same size above 1, or FULL, in "
                "both"
            )


class Plan(NamedTuple):
    """A GEMM on a device: how its operands are quantised, and which implementation multiplies."""

    a: CastPlan
    b: CastPlan
    fast_accum: bool
    impl: str


Plans = tuple[Plan | None, Plan | None, Plan | None]


@dataclass(frozen=True)
class Recipe:
    """Which of a layer's three GEMMs run in FP8, and how.

    Args:
        name: shown in reports.
        forward, dgrad, wgrad: a ``Gemm`` (operands x and w; g and w^T; g^T and x^T), or None for
            high precision.
        weight_for_dgrad: "recompute" quantises the weight again in backward; "save" keeps forward's
            second FP8 copy, 1 byte per weight, for the time between forward and backward.

    Raises:
        ValueError: a part does not fit; see ``Cast`` and ``Gemm``.
    """

    name: str
    forward: Gemm | None
    dgrad: Gemm | None
    wgrad: Gemm | None
    weight_for_dgrad: Literal["recompute", "save"] = "recompute"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"name={self.name!r} must be a string")
        for label in ("forward", "dgrad", "wgrad"):
            if not isinstance(gemm := getattr(self, label), Gemm | None):
                raise ValueError(f"{label}={gemm!r} must be a float8.Gemm, or None")
        if self.weight_for_dgrad not in ("recompute", "save"):
            raise ValueError(
                f"weight_for_dgrad={self.weight_for_dgrad!r} must be 'recompute' or 'save'"
            )
        if self.weight_for_dgrad == "save" and self.dgrad is None:
            raise ValueError(
                "weight_for_dgrad='save' keeps an FP8 weight for dgrad, but dgrad is in high "
                "precision"
            )

    def __hash__(self) -> int:  # a cache asks at every call of a layer; all fields would cost 10 us
        return hash(self.name)

    def plan(self, device: torch.device) -> Plans:
        """Formats and implementations of forward, dgrad and wgrad on ``device``; None for a
        high-precision GEMM."""
        if torch.compiler.is_compiling():
            return _plan(self.forward, device), _plan(self.dgrad, device), _plan(self.wgrad, device)
        return _plans(self, device, device_profile(device))

    def __str__(self) -> str:
        rows = [("GEMM", "first operand", "second operand", "accumulation")]
        for label in ("forward", "dgrad", "wgrad"):
            if (gemm := getattr(self, label)) is None:
                rows.append((label, "high precision", "high precision", ""))
            else:
                accumulation = "fast" if gemm.fast_accum else "float32"
                rows.append((label, str(gemm.a), str(gemm.b), accumulation))
        title = f"Recipe {self.name} (weight for dgrad: {self.weight_for_dgrad})"
        return "\n".join([title, *aligned(rows)])


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A table's rows as lines, with the cells of a column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


# A layer asks at each call: 2 us instead of 50. Dynamo looks through no cache, and needs none.
@functools.cache
def _plans(recipe: Recipe, device: torch.device, profile: DeviceProfile) -> Plans:
    return _plan(recipe.forward, device), _plan(recipe.dgrad, device), _plan(recipe.wgrad, device)


def _plan(gemm: Gemm | None, device: torch.device) -> Plan | None:
    if gemm is None:
        return None
    a, b = ((cast.kind, _constant(cast.block), cast.scale_mode) for cast in (gemm.a, gemm.b))
    return _resolve(a, b, gemm.fast_accum, device, assumed_device())


def _constant(block: Block) -> Block:
    """The same block. torch.compile makes an int symbolic once it has seen two; a range's length it
    takes as constant."""
    return tuple(len(range(b + 1)) - 1 for b in block)


def _resolve(
    a: tuple[Any, Block, str],
    b: tuple[Any, Block, str],
    fast_accum: bool,
    device: torch.device,
    assumed: str | None,
) -> Plan:
    casts = [CastPlan(block, format_for(device, kind).dtype, mode) for kind, block, mode in (a, b)]
    left, right = (Operand(cast.dtype, cast.block, scale_dtype(cast.scale_mode)) for cast in casts)
    impl = select(device, left, right._replace(block=right.block[::-1]))
    return Plan(casts[0], casts[1], fast_accum, impl)


# torch.compile runs it while tracing and takes the answer as a constant of the graph (hence the
# plain arguments); what it guards on is ``assumed``, which the caller read.
# torch.compiler.assume_constant_result does this too, but imports torch._dynamo (2 s).
_resolve._dynamo_marked_constant = True  # type: ignore[attr-defined]


_TENSOR = Cast("e4m3", (FULL, FULL))
_TENSOR_GRAD = Cast("e5m2", (FULL, FULL))
_ROW = Cast("e4m3", (1, FULL))
_BLOCK = Cast("e4m3", (1, 128))
_SQUARE = Cast("e4m3", (128, 128))
_MX = Cast("e4m3", (1, 32), "e8m0_rceil")

TENSORWISE = Recipe(
    "tensorwise",
    Gemm(_TENSOR, _TENSOR, fast_accum=True),
    Gemm(_TENSOR_GRAD, _TENSOR),
    Gemm(_TENSOR_GRAD, _TENSOR),
)
ROWWISE = Recipe("rowwise", Gemm(_ROW, _ROW, fast_accum=True), Gemm(_ROW, _ROW), Gemm(_ROW, _ROW))
ROWWISE_WGRAD_HP = Recipe(
    "rowwise_wgrad_hp", Gemm(_ROW, _ROW, fast_accum=True), Gemm(_ROW, _ROW), None
)
# DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3.
BLOCKWISE = Recipe("blockwise", Gemm(_BLOCK, _SQUARE), Gemm(_BLOCK, _SQUARE), Gemm(_BLOCK, _BLOCK))
# OCP MX specification 1.0; scales rounded up so that no value saturates (arXiv 2506.08027).
MXFP8 = Recipe("mxfp8", Gemm(_MX, _MX), Gemm(_MX, _MX), Gemm(_MX, _MX))

RECIPES: dict[str, Recipe] = {
    r.name: r for r in (TENSORWISE, ROWWISE, ROWWISE_WGRAD_HP, BLOCKWISE, MXFP8)
}


def check_recipe(recipe: object) -> None:
    """Raise ValueError unless ``recipe`` is a Recipe."""
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"recipe={recipe!r} is no float8.Recipe; float8.RECIPES holds {', '.join(RECIPES)}"
        )
