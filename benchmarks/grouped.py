"""Casts of tokens that are sorted by expert, for the products along tokens (wgrad).

Letters: T tokens, K features, G groups. *col* is each group's transpose, scaled along its tokens;
*dual* is that and the rows, [T, K].
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import float8
from float8.formats import Float8Format
from float8.kernels.quantize import CastPlan
from float8.kernels.quantize_grouped import join, quantize_grouped

from . import peers
from .casts import SCALINGS, cast_bytes, contenders, eager_cast, random_input, transposed_bytes
from .registry import Bench, Contender, Options, Outputs, Shape, named_shapes


def group_ends(tokens: int, groups: int, align: int = 128) -> Tensor:
    """Where ragged groups end, two of them empty, all multiples of ``align``. Of 128 torchao, which
    does not pad groups to what a product needs, has the same columns to write."""
    share = torch.rand(groups)
    share[[1, groups // 2]] = 0
    return (share.cumsum(0) / share.sum() * (tokens // align)).round().to(torch.int32) * align


def eager_grouped(x: Tensor, sizes: list[int], name: str, dual: bool, fmt: Float8Format) -> Outputs:
    """Group by group, of sizes that the host knows."""
    block, mode, *_ = SCALINGS[name]
    parts = [eager_cast(part, block[::-1], fmt, mode) for part in x.split(sizes) if len(part)]
    data = join([transposed_bytes(data) for data, _ in parts], 1)
    row = eager_cast(x, block, fmt, mode) if dual else ()
    return *row, data, join([scale for _, scale in parts], 0)


def grouped_contenders(
    name: str, dual: bool, shape: Shape, options: Options
) -> dict[str, Contender]:
    tokens, features, groups = shape
    block, mode, *_ = SCALINGS[name]
    x, fmt = (
        random_input((tokens, features), options.device),
        float8.format_for(options.device, "e4m3"),
    )
    ends = group_ends(tokens, groups)
    sizes, offs = ends.diff(prepend=ends.new_zeros(1)).tolist(), ends.to(options.device)
    plan = CastPlan(block, fmt.dtype, mode)
    args = (x, offs, *(plan if dual else (None, None, None)), *plan)

    def unpadded() -> Outputs:
        data, scale, data_t, scale_t, _ = quantize_grouped(*args)
        return *((data, scale) if dual else ()), data_t[:, :tokens], scale_t

    return contenders(
        partial(torch.ops.float8.quantize_grouped, *args),
        partial(quantize_grouped, *args),
        partial(eager_grouped, x, sizes, name, dual, fmt),
        peers.grouped_casts(name, dual, x, offs, fmt.dtype) if options.peer else {},
        alike=unpadded,
    )


def grouped_bytes(name: str, dual: bool, shape: Shape) -> int:
    """As for one matrix; what is written to pad groups does not count."""
    return cast_bytes(name, dual, shape[:2])


SHAPES = named_shapes(
    {
        "deepseek-moe-16b": "x 49152x2048x64, hidden 49152x1408x64",
        "deepseek-v3": "x 65536x7168x32, hidden 65536x2048x32",
        "llama4-scout": "x 65536x5120x16, hidden 65536x8192x16",
    },
    default=("deepseek-moe-16b x", "deepseek-v3 x"),
)
BENCHES = [
    Bench(
        f"grouped/{name}-{'dual' if dual else 'col'}",
        partial(grouped_contenders, name, dual),
        SHAPES,
        (1024, 256, 4),
        baseline="eager",
        bytes=partial(grouped_bytes, name, dual),
    )
    for name in ("rowwise", "1x128", "mxfp8")
    for dual in (False, True)
]
