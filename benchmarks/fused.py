"""Casts fused with what makes their input, against that and a cast after it.

Letters: M tokens, K features, G groups. Every row writes both layouts of the result, [M, K] and
[K, M], or each group's transpose; of groups, the backward's two results are one matrix [M, 2 K].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import float8
from float8.kernels import fused, fused_grouped
from float8.kernels.quantize import CastPlan
from float8.scaling import FULL
from float8.testing import deterministic

from . import peers
from .casts import SCALINGS, bits, random_input, same_job, scale_bytes
from .grouped import group_ends
from .registry import Bench, Call, Contender, Options, Outputs, Shape, compiled, named_shapes

EPS = 1e-6


class Producer(NamedTuple):
    """What makes the input of a cast.

    ``torch``: plain torch's way from the inputs to the results. The bytes per element are those
    that the fused op must move: with blocks inside a tile, and with scales of whole rows and
    columns, for which the inputs are read twice. RMSNorm needs its rows' means first in both.
    """

    inputs: int
    results: int
    torch: Callable[..., list[Tensor]]
    tile_bytes: int
    whole_bytes: int


def rms_norm(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [F.rms_norm(x, weight.shape, weight, EPS)]


def swiglu(gate: Tensor, up: Tensor) -> list[Tensor]:
    return [F.silu(gate) * up]


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    s = torch.sigmoid(gate)
    return [grad * up * s * (1 + gate * (1 - s)), grad * gate * s]


PRODUCERS = {
    "rms_norm": Producer(1, 1, rms_norm, 6, 6),
    "swiglu": Producer(2, 1, swiglu, 6, 10),
    "swiglu_backward": Producer(3, 2, swiglu_backward, 10, 16),
}


def near_bytes(expected: Callable[[], Outputs], call: Call) -> str | None:
    """What is too far from the reference's: more than 1% of an output's FP8 bytes, or a float32
    scale by more than 1%. The producer may differ from its reference in a last bit, and so may a
    scale. Memory that the call allocates holds NaN first."""
    with deterministic():
        outputs = call()
    for i, (actual, want) in enumerate(zip(outputs, expected(), strict=True)):
        if (actual.dtype, actual.shape) != (want.dtype, want.shape):
            return f"output {i} is {actual.dtype} {tuple(actual.shape)}"
        if actual.dtype == torch.float32:
            right = (actual - want).abs() <= 0.01 * want.abs()
        else:
            right = bits(actual) == bits(want)
        wrong = (~right).sum().item() / want.numel()
        if wrong > (0 if actual.dtype == torch.float32 else 0.01):
            return f"{wrong:.2%} of output {i} is not near the reference's"
    return None


def contenders(
    ours: Call, expected: Call, chain: Call, expected_of_chain: Call, options: Options
) -> dict[str, Contender]:
    """Our op, and a chain of a producer and casts."""
    # Op by op, bf16 rounds in between; a row's scale that moves takes many of its bytes along.
    check = partial(same_job, expected_of_chain, tolerance=0.2)
    found = {
        "float8": Contender(lambda: ours, partial(near_bytes, expected), ours=True, line=True),
        "compiled": Contender(lambda: compiled(chain), check),
        "eager": Contender(lambda: chain, check),
    }
    return found | ({"torchao": Contender(peers.absent, check)} if options.peer else {})


def fused_contenders(
    producer: str, name: str, shape: Shape, options: Options
) -> dict[str, Contender]:
    block, mode, *_ = SCALINGS[name]
    plan = CastPlan(block, float8.format_for(options.device, "e4m3").dtype, mode)
    job = PRODUCERS[producer]
    inputs = [random_input(shape, options.device) for _ in range(job.inputs)]
    args: tuple[object, ...] = (*inputs, *plan, *plan)
    if producer == "rms_norm":
        inputs.append(random_input((1, shape[1]), options.device)[0])
        args = (*inputs, EPS, *plan, *plan)
    expected: Call = partial(getattr(fused, f"{producer}_quantize"), *args)

    def chain() -> Outputs:
        outputs: list[Tensor] = []
        for result in job.torch(*inputs):
            outputs += torch.ops.float8.quantize_dual(result, *plan, *plan)
        return tuple(outputs)

    def apart() -> Outputs:
        layouts = expected()[:4]
        if job.results == 1:
            return layouts
        return tuple(part[i] for i in range(job.results) for part in layouts)

    ours: Call = partial(getattr(torch.ops.float8, f"{producer}_quantize"), *args)
    return contenders(ours, expected, chain, apart, options)


def grouped_contenders(
    producer: str, name: str, shape: Shape, options: Options
) -> dict[str, Contender]:
    (tokens, hidden, groups), job = shape, PRODUCERS[producer]
    block, mode, *_ = SCALINGS[name]
    plan = CastPlan(block, float8.format_for(options.device, "e4m3").dtype, mode)
    gate_up = random_input((tokens, 2 * hidden), options.device).chunk(2, 1)
    offs = group_ends(tokens, groups).to(options.device)
    inputs, joint = [*gate_up], []
    if producer == "swiglu_backward":
        inputs, joint = [random_input((tokens, hidden), options.device), *gate_up], [True]
    args = (*inputs, offs, *joint, *plan, *plan)
    expected: Call = partial(getattr(fused_grouped, f"{producer}_quantize_grouped"), *args)

    def chain() -> Outputs:
        result = torch.cat(job.torch(*inputs), 1)
        return tuple(torch.ops.float8.quantize_grouped(result, offs, *plan, *plan))

    ours: Call = partial(getattr(torch.ops.float8, f"{producer}_quantize_grouped"), *args)
    return contenders(ours, expected, chain, expected, options)


def fused_bytes(producer: str, name: str, shape: Shape) -> int:
    job = PRODUCERS[producer]
    per_element = job.whole_bytes if FULL in SCALINGS[name].block else job.tile_bytes
    rstd = 4 * shape[0] if producer == "rms_norm" else 0
    return math.prod(shape) * per_element + job.results * scale_bytes(name, True, shape) + rstd


def grouped_bytes(producer: str, name: str, shape: Shape) -> int:
    """As for one matrix; what is written to pad groups does not count."""
    return fused_bytes(producer, name, shape[:2])


SHAPES = named_shapes(
    {
        "llama3-8b": "x 8192x4096, hidden 8192x14336",
        "llama3-70b": "x 8192x8192, hidden 8192x28672",
        "deepseek-v3": "x 8192x7168, hidden 8192x18432",
    },
    default=("llama3-8b x", "llama3-8b hidden"),
)
GROUPED_SHAPES = named_shapes(
    {
        "deepseek-moe-16b": "hidden 49152x1408x64",
        "deepseek-v3": "hidden 65536x2048x32",
        "llama4-scout": "hidden 65536x8192x16",
    },
    default=("deepseek-moe-16b hidden", "deepseek-v3 hidden"),
)
BENCHES = [
    Bench(
        f"fused/{producer}-{name}",
        partial(fused_contenders, producer, name),
        SHAPES,
        (256, 384),
        baseline="compiled",
        bytes=partial(fused_bytes, producer, name),
    )
    for producer in PRODUCERS
    for name in ("tensorwise", "rowwise", "1x128", "mxfp8")
] + [
    Bench(
        f"fused/{producer}-groups-{name}",
        partial(grouped_contenders, producer, name),
        GROUPED_SHAPES,
        (1024, 256, 4),
        baseline="compiled",
        bytes=partial(grouped_bytes, producer, name),
    )
    for producer in ("swiglu", "swiglu_backward")
    for name in ("tensorwise", "rowwise", "1x128", "mxfp8")
]
