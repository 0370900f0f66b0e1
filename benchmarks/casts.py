"""Casts of bf16 to FP8, in one layout and in two.

Letters: E experts, M rows, K columns. *row* is FP8 in the layout of x [M, K]; *dual* is that and
the transpose [K, M], which has scales of its own, along M.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import float8
from float8.formats import Float8Format
from float8.kernels.quantize import CastPlan, quantize, quantize_dual, quantize_static
from float8.scaling import FULL, Block, as_bytes, scale_dtype, scale_shape
from float8.testing import deterministic

from . import peers
from .registry import EXPERTS, MATRICES, Bench, Call, Contender, Options, Outputs, Shape


class Scaling(NamedTuple):
    """Blocks (rows, contraction), and the bytes per element that each cast must move: 2 for each
    time the bf16 input is read, 1 for each FP8 output. Scales of whole columns, or of all, are
    known only once all has been read: a second read."""

    block: Block
    mode: str
    row_bytes: int
    dual_bytes: int


SCALINGS = {
    "rowwise": Scaling((1, FULL), "fp32", 3, 6),
    "tensorwise": Scaling((FULL, FULL), "fp32", 5, 6),
    "1x128": Scaling((1, 128), "fp32", 3, 4),
    "128x128": Scaling((128, 128), "fp32", 3, 4),
    "mxfp8": Scaling((1, 32), "e8m0_rceil", 3, 4),
}


# ------------------------------------------------------------------------------------- the checks


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def same_bytes(expected: Callable[[], Outputs], call: Call) -> str | None:
    """Which output differs from the reference's, if any. Memory that the call allocates holds NaN
    first, so that what it leaves unwritten differs."""
    with deterministic():
        outputs = call()
    wanted = expected()
    if len(outputs) != len(wanted):
        return f"{len(outputs)} outputs, the reference has {len(wanted)}"
    for i, (actual, want) in enumerate(zip(outputs, wanted, strict=True)):
        if (actual.dtype, actual.shape) != (want.dtype, want.shape):
            return (
                f"output {i} is {actual.dtype} {tuple(actual.shape)}, "
                f"the reference's {want.dtype} {tuple(want.shape)}"
            )
        if different := (bits(actual) != bits(want)).sum().item():
            return f"{different} of {want.numel()} elements of output {i} have other bits"
    return None


def same_job(expected: Callable[[], Outputs], call: Call, tolerance: float = 0.01) -> str | None:
    """What keeps another's outputs from being the same cast: other shapes, another layout, or FP8
    of which more than ``tolerance`` is other bytes. (A scale that is rounded otherwise moves a
    few.)"""
    outputs, wanted = call(), expected()
    data = range(0, len(wanted), 2)  # (data, scale) of each layout
    for i in data:
        if outputs[i].shape != wanted[i].shape or not outputs[i].is_contiguous():
            return f"output {i} has shape {tuple(outputs[i].shape)}, strides {outputs[i].stride()}"
        other = (as_bytes(outputs[i]) != as_bytes(wanted[i])).sum().item() / wanted[i].numel()
        if other > tolerance:
            return f"{other:.1%} of the bytes of output {i} are not the reference's"
    return None


# ------------------------------------------------------------------------- what plain torch does


def eager_cast(x: Tensor, block: Block, fmt: Float8Format, mode: str) -> tuple[Tensor, Tensor]:
    """amax, scale, clamp, cast, in float32, op by op; block of the last two dimensions."""
    *lead, m, k = x.shape
    bm, bk = (n if b == FULL else b for n, b in zip((m, k), block, strict=True))
    tiles = x.float().reshape(*lead, m // bm, bm, k // bk, bk)
    amax = tiles.abs().amax((-3, -1), keepdim=True)
    scale = (amax / fmt.max).clamp(min=torch.finfo(torch.float32).tiny)
    if mode.startswith("e8m0"):
        scale = scale.log2().ceil().exp2()
    data = (tiles / scale).clamp(-fmt.max, fmt.max).to(fmt.dtype).reshape(x.shape)
    return data, scale.squeeze(-3).squeeze(-1).to(scale_dtype(mode))


def transposed_bytes(data: Tensor) -> Tensor:
    return as_bytes(data).mT.contiguous().view(data.dtype)


def eager_dual(x: Tensor, block: Block, fmt: Float8Format, mode: str) -> Outputs:
    """Blocks that are their own transpose are cast once."""
    data, scale = eager_cast(x, block, fmt, mode)
    along_m = (data, scale) if block[0] == block[1] else eager_cast(x, block[::-1], fmt, mode)
    return data, scale, transposed_bytes(along_m[0]), along_m[1].mT


# --------------------------------------------------------------------------------------- the rows


def random_input(shape: Shape, device: torch.device) -> Tensor:
    """Normal values in bf16, each row of another size."""
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    return x * torch.randn(*shape[:-1], 1, device=device, dtype=torch.bfloat16).exp2()


def contenders(
    ours: Call,
    expected: Call,
    eager: Call,
    others: dict[str, Callable[[], Call]],
    alike: Call | None = None,
) -> dict[str, Contender]:
    """Ours, which has to give the bytes of ``expected``; the others have to do about the same
    (``alike``, if they lay it out otherwise)."""
    check = partial(same_job, alike or expected)
    return {
        "float8": Contender(lambda: ours, partial(same_bytes, expected), ours=True, line=True),
        "eager": Contender(lambda: eager, check),
    } | {name: Contender(make, check) for name, make in others.items()}


def cast_contenders(name: str, dual: bool, shape: Shape, options: Options) -> dict[str, Contender]:
    block, mode, *_ = SCALINGS[name]
    x, fmt = random_input(shape, options.device), float8.format_for(options.device, "e4m3")
    plan = CastPlan((1,) * (len(shape) - 2) + block, fmt.dtype, mode)
    others = peers.casts(name, dual, x, fmt.dtype) if options.peer else {}
    if dual:
        return contenders(
            partial(torch.ops.float8.quantize_dual, x, *plan, *plan),
            partial(quantize_dual, x, *plan, *plan),
            partial(eager_dual, x, block, fmt, mode),
            others,
        )
    return contenders(
        partial(torch.ops.float8.quantize, x, *plan),
        partial(quantize, x, *plan),
        partial(eager_cast, x, block, fmt, mode),
        others,
    )


def static_contenders(shape: Shape, options: Options) -> dict[str, Contender]:
    """One scale for all, given; the kernels still read x first, for values that are not finite."""
    x, fmt = random_input(shape, options.device), float8.format_for(options.device, "e4m3")
    block = (FULL, FULL)
    scale = (x.abs().amax().float() / fmt.max).view(1, 1)

    def eager() -> Outputs:
        return (x.float() / scale).clamp(-fmt.max, fmt.max).to(fmt.dtype), scale

    return contenders(
        partial(torch.ops.float8.quantize_static, x, scale, block, fmt.dtype),
        partial(quantize_static, x, scale, block, fmt.dtype),
        eager,
        {},
    )


def scale_bytes(name: str, dual: bool, shape: Shape) -> int:
    block, mode, *_ = SCALINGS[name]
    *lead, m, k = shape
    sizes = [(m, k), (k, m)] if dual else [(m, k)]
    blocks = sum(math.prod(scale_shape(size, block)) for size in sizes)
    return math.prod(lead) * blocks * scale_dtype(mode).itemsize


def cast_bytes(name: str, dual: bool, shape: Shape) -> int:
    per_element = SCALINGS[name].dual_bytes if dual else SCALINGS[name].row_bytes
    return math.prod(shape) * per_element + scale_bytes(name, dual, shape)


def cast_row(name: str, kind: str, shapes: dict[str, dict[str, Shape]], smoke: Shape) -> Bench:
    dual = kind != "row"
    return Bench(
        f"casts/{name}-{kind}",
        partial(cast_contenders, name, dual),
        shapes,
        smoke,
        baseline="eager",
        bytes=partial(cast_bytes, name, dual),
    )


BENCHES = [
    cast_row(name, *rest)
    for name in SCALINGS
    for rest in (
        ("row", MATRICES, (256, 384)),
        ("dual", MATRICES, (256, 384)),
        ("dual-experts", EXPERTS, (2, 128, 256)),
    )
] + [
    Bench(
        "casts/tensorwise-static-row",
        static_contenders,
        MATRICES,
        (256, 384),
        baseline="eager",
        bytes=partial(cast_bytes, "tensorwise", False),
    )
]
