"""Tokens to their experts and back: the movement around the grouped products of a layer.

Letters: T tokens, H features, E experts, k of them for each token, R rows sorted by expert, each
expert's padded to a multiple of 16. *route* is the sort; *rows* moves bf16, and a cast's name moves
FP8 made on the way; *back* is the weighted sum of each token's rows, *back-gradients* its backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import float8
from float8.kernels import permute
from float8.kernels.quantize import CastPlan
from float8.kernels.quantize_grouped import padded_tokens
from float8.testing import relative_error

from . import peers
from .casts import SCALINGS, contenders, eager_cast, random_input, same_bytes, same_job, scale_bytes
from .registry import Bench, Call, Contender, Options, Outputs, Shape, compiled, named_shapes

ALIGN = 16
ops = torch.ops.float8


def choose(shape: Shape, device: torch.device) -> Tensor:
    """Experts of a router that likes some of them better."""
    tokens, _, experts, k = shape
    scores = torch.randn(tokens, experts, device=device) + torch.randn(experts, device=device) / 2
    return scores.topk(k).indices


def sorted_pairs(indices: Tensor, experts: int, rows: int) -> Outputs:
    """By torch's stable sort, without waiting for the device."""
    flat, device = indices.flatten(), indices.device
    in_order, order = flat.sort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    ends = ((counts + ALIGN - 1) // ALIGN * ALIGN).cumsum(0)
    added = (ends - counts.cumsum(0)).roll(1)
    added[0] = 0
    row = torch.arange(len(flat), device=device) + added[in_order]
    source = torch.full((rows,), -1, dtype=torch.int32, device=device)
    source[row] = order.int()
    position = torch.empty(len(flat), dtype=torch.int32, device=device)
    position[order] = row.int()
    return position.view(indices.shape), source, ends.int(), counts.int()


def route_contenders(shape: Shape, options: Options) -> dict[str, Contender]:
    tokens, _, experts, k = shape
    indices, rows = choose(shape, options.device), padded_tokens(tokens * k, experts, ALIGN)
    return contenders(
        lambda: ops.route(indices, experts, ALIGN),
        lambda: permute.route(indices, experts, ALIGN),
        partial(sorted_pairs, indices, experts, rows),
        {"torchao": peers.absent} if options.peer else {},
    )


Make = Callable[..., tuple[Call, Call, Callable[[], Outputs]]]  # ours, the reference, plain torch


def rows(x: Tensor, routed: Outputs, device: torch.device) -> tuple[Call, Call, Any]:
    position, source, *_ = routed

    def eager() -> Outputs:
        out = x.new_zeros(len(source), x.shape[1])
        out[position.flatten()] = x.repeat_interleave(position.shape[1], 0)
        return (out,)

    arguments = (x, position, source)
    return lambda: (ops.permute(*arguments),), lambda: (permute.permute(*arguments),), eager


def cast_rows(name: str, x: Tensor, routed: Outputs, device: torch.device) -> Any:
    position, source, *_ = routed
    block, mode, *_ = SCALINGS[name]
    fmt = float8.format_for(device, "e4m3")

    def eager() -> Outputs:
        data, scale = eager_cast(x, block, fmt, mode)
        token = source.clamp(min=0) // position.shape[1]
        empty, moved = (source < 0)[:, None], data.view(torch.uint8)[token]
        return moved.masked_fill(empty, 0).view(fmt.dtype), scale.view(torch.uint8)[token]

    arguments = (x, position, source, *CastPlan(block, fmt.dtype, mode))
    return (
        partial(ops.permute_quantize, *arguments),
        partial(permute.permute_quantize, *arguments),
        eager,
    )


def back(x: Tensor, routed: Outputs, device: torch.device) -> tuple[Call, Call, Any]:
    position, source, *_ = routed
    y = random_input((len(source), x.shape[1]), device)
    weights = torch.rand(position.shape, device=device)

    def eager() -> Outputs:
        return ((y[position].float() * weights[..., None]).sum(1).to(y.dtype),)

    arguments = (y, position, weights)
    return lambda: (ops.unpermute(*arguments),), lambda: (permute.unpermute(*arguments),), eager


def move_contenders(
    make: Make, compile_too: bool, shape: Shape, options: Options
) -> dict[str, Contender]:
    tokens, features, experts, _ = shape
    x = random_input((tokens, features), options.device)
    routed = permute.route(choose(shape, options.device), experts, ALIGN)
    ours, expected, eager = make(x, routed, options.device)
    found = contenders(ours, expected, eager, {"torchao": peers.absent} if options.peer else {})
    if compile_too:
        found["compiled"] = Contender(lambda: compiled(eager), partial(same_job, expected))
    return found


def same_gradients(expected: Call, call: Call) -> str | None:
    """Rows have the reference's bytes; weights' gradients are sums in another order."""
    error = relative_error(call()[1], expected()[1])
    if error > 1e-5:
        return f"weights' gradients have a relative error of {error:.1e}"
    return same_bytes(lambda: expected()[:1], lambda: call()[:1])


def gradient_contenders(shape: Shape, options: Options) -> dict[str, Contender]:
    tokens, features, experts, _ = shape
    device = options.device
    position, source, *_ = permute.route(choose(shape, device), experts, ALIGN)
    grad, y = (
        random_input((tokens, features), device),
        random_input((len(source), features), device),
    )
    weights = torch.rand(position.shape, device=device)

    def eager() -> Outputs:
        gw = (y[position].float() * grad[:, None].float()).sum(2)
        gy = grad.new_zeros(y.shape)
        gy[position.flatten()] = (weights[..., None] * grad[:, None]).flatten(0, 1).to(y.dtype)
        return gy, gw

    arguments = (grad, y, position, source, weights)
    expected: Call = partial(permute.unpermute_backward, *arguments)
    ours: Call = partial(ops.unpermute_backward, *arguments)
    check = partial(same_job, lambda: expected()[:1])
    found = {
        "float8": Contender(lambda: ours, partial(same_gradients, expected), ours=True, line=True),
        "eager": Contender(lambda: eager, check),
    }
    return found | ({"torchao": Contender(peers.absent, check)} if options.peer else {})


def moved_bytes(of_token: int, of_row: int, scaling: str | None, shape: Shape) -> int:
    """What is written to pad experts does not count, nor what says where rows are."""
    tokens, features, _, k = shape
    scales = 0 if scaling is None else scale_bytes(scaling, False, (tokens * k, features))
    return tokens * features * (of_token + k * of_row) + scales


def route_bytes(shape: Shape) -> int:
    tokens, _, experts, k = shape
    return tokens * k * (8 + 4) + 4 * padded_tokens(tokens * k, experts, ALIGN) + 8 * experts


SHAPES = named_shapes(  # tokens, model width, experts on one device, experts of a token
    {
        "deepseek-moe-16b": "x 8192x2048x64x6",
        "deepseek-v3": "x 8192x7168x256x8",
        "llama4-scout": "x 16384x5120x16x1",
        "qwen3-235b": "x 16384x4096x128x8",
    },
    default=("deepseek-moe-16b x", "deepseek-v3 x"),
)
SMOKE = (64, 256, 4, 2)


def row(
    name: str,
    make: Callable[[Shape, Options], dict[str, Contender]],
    count: Callable[[Shape], int],
) -> Bench:
    return Bench(f"permute/{name}", make, SHAPES, SMOKE, baseline="eager", bytes=count)


BENCHES = [
    row("route", route_contenders, route_bytes),
    row("rows", partial(move_contenders, rows, False), partial(moved_bytes, 2, 2, None)),
    *(
        row(
            name,
            partial(move_contenders, partial(cast_rows, name), name == "rowwise"),
            partial(moved_bytes, 2, 1, name),
        )
        for name in ("rowwise", "1x128", "mxfp8")
    ),
    row("back", partial(move_contenders, back, True), partial(moved_bytes, 2, 2, None)),
    row("back-gradients", gradient_contenders, partial(moved_bytes, 2, 4, None)),
]
