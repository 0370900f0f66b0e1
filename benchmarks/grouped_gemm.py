"""The scaled products of groups of tokens, by every implementation that takes them on the device.

Letters: T tokens, sorted by group; N and K features; G groups, from no tokens to about twice their
mean, multiples of 16, which torch's kernels ask for. *rows* multiplies each group's rows by its own
matrix, as forward and dgrad do; *columns* makes a matrix of each group's rows, as wgrad does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

import float8
from float8.kernels import grouped
from float8.kernels.matmul import Operand
from float8.kernels.quantize import quantize
from float8.scaling import FULL, broadcast_scale, decode_scale

from .casts import random_input
from .gemm import MODES, ROUNDING, Mode, as_exact, exact
from .grouped import group_ends
from .layers import near
from .registry import Bench, Call, Contender, Options, Outputs, Shape, named_shapes

ops = torch.ops.float8
Table = dict[str, grouped.Refusal]


def contenders(
    truth: Tensor,
    bf16: Call,
    multiply: Callable[[str], Outputs],
    impls: list[str],
    fast: bool,
    smoke: bool,
) -> dict[str, Contender]:
    """bf16 and the implementations by name; the reference, which waits for the device, on the smoke
    shape alone. A row or column may be off by what rounding to bf16 and the tensor cores change."""
    check = partial(as_exact, truth, 2.0**-8 + ROUNDING[fast])
    found = {"bf16": Contender(lambda: bf16, partial(near, (truth,)), line=True)}
    for impl in impls:
        if smoke or impl != "torch":
            found[impl] = Contender(
                partial(partial, multiply, impl), check, ours=impl != "torch_grouped", line=True
            )
    return found


def taken(table: Table, device: torch.device, a: Operand, b: Operand) -> list[str]:
    profile = float8.device_profile(device)
    return [name for name, refuse in table.items() if refuse(profile, a, b) is None]


class Rows(NamedTuple):
    """Operands of a product of rows: x and w in bf16, a and b in FP8."""

    mode: Mode
    x_TK: Tensor
    w_GNK: Tensor
    a: Tensor
    b_GNK: Tensor
    scale_a: Tensor
    scale_b: Tensor
    offs: Tensor

    @staticmethod
    def of(name: str, shape: Shape, device: torch.device, align: int = 16) -> Rows:
        mode, (t, n, k, g) = MODES[name], shape
        x_TK, w_GNK = random_input((t, k), device), random_input((g * n, k), device).view(g, n, k)
        fp8 = float8.format_for(device, "e4m3").dtype
        a, scale_a = quantize(x_TK, mode.block_a, fp8, mode.scale_mode)
        b, scale_b = quantize(w_GNK, (1, *mode.block_b), fp8, mode.scale_mode)
        return Rows(mode, x_TK, w_GNK, a, b, scale_a, scale_b, group_ends(t, g, align).to(device))

    def operands(self) -> tuple[Operand, Operand]:
        return (
            Operand(self.a.dtype, self.mode.block_a, self.scale_a.dtype),
            Operand(self.b_GNK.dtype, (1, *self.mode.block_b[::-1]), self.scale_b.dtype),
        )

    def product(self) -> Callable[[str], Outputs]:
        """What multiplies them by the implementation of a name."""
        left, right = (operand.block for operand in self.operands())
        parts = self.a, self.b_GNK.mT, self.scale_a, self.scale_b.mT, self.offs, left, right
        args = (*parts, torch.bfloat16, self.mode.fast_accum)
        return lambda impl: (ops.grouped_mm(*args, impl),)

    def truth(self) -> Tensor:
        """In float64."""
        out_TN = self.a.new_zeros((len(self.a), self.b_GNK.shape[1]), dtype=torch.float64)
        for e, (start, end) in enumerate(pairwise([0, *self.offs.tolist()])):
            b_NK = exact(self.b_GNK[e], self.scale_b[e], self.mode.block_b)
            part = self.scale_a if self.scale_a.shape[0] == 1 else self.scale_a[start:end]
            out_TN[start:end] = exact(self.a[start:end], part, self.mode.block_a) @ b_NK.t()
        return out_TN


def rows_contenders(name: str, shape: Shape, options: Options) -> dict[str, Contender]:
    x = Rows.of(name, shape, options.device)
    return contenders(
        x.truth(),
        lambda: (torch._grouped_mm(x.x_TK, x.w_GNK.mT, offs=x.offs),),
        x.product(),
        taken(grouped.IMPLEMENTATIONS, options.device, *x.operands()),
        x.mode.fast_accum,
        shape == SMOKE,
    )


def empty_contenders(shape: Shape, options: Options) -> dict[str, Contender]:
    """A rowwise product, and the same with three more groups for each, that have no tokens."""
    x = Rows.of("rowwise", shape, options.device)
    impl = grouped.select(options.device, *x.operands())
    alone: Call = partial(x.product(), impl)
    fours = torch.arange(4 * len(x.offs), device=options.device) // 4

    def among_empty_ones() -> Call:
        b_GNK = x.b_GNK.view(torch.uint8)[fours].view(x.b_GNK.dtype)
        more = x._replace(b_GNK=b_GNK, scale_b=x.scale_b[fours], offs=x.offs[fours])
        return partial(more.product(), impl)

    check = partial(near, alone())
    return {
        "alone": Contender(lambda: alone, check, line=True),
        "among empty ones": Contender(among_empty_ones, check, ours=True, line=True),
    }


def unaligned_contenders(shape: Shape, options: Options) -> dict[str, Contender]:
    """Products of groups that start on multiples of 16, and of groups that start anywhere."""
    found = {}
    for name in ("rowwise", "1x128x128x128"):
        for starts, align in (("", 16), (", unaligned", 1)):
            x = Rows.of(name, shape, options.device, align)
            impl = grouped.select(options.device, *x.operands())
            check = partial(as_exact, x.truth(), 2.0**-8 + ROUNDING[False])
            make = partial(partial, x.product(), impl)
            found[name + starts] = Contender(make, check, ours=True, line=True)
    return found


def columns_contenders(name: str, shape: Shape, options: Options) -> dict[str, Contender]:
    mode, (t, n, k, g), device = MODES[name], shape, options.device
    g_TN, x_TK = random_input((t, n), device), random_input((t, k), device)
    offs, fp8 = group_ends(t, g, 16).to(device), float8.format_for(device, "e4m3").dtype
    block, cast = mode.block_a, (None, None, None, mode.block_a, fp8, mode.scale_mode)
    _, _, a, scale_a, offs_t = ops.quantize_grouped(g_TN, offs, *cast)
    _, _, b, scale_b, _ = ops.quantize_grouped(x_TK, offs, *cast)
    args = (a, b, scale_a, scale_b, offs_t, block, block, torch.bfloat16)

    def multiply(impl: str) -> Outputs:
        return (ops.grouped_wgrad(*args, mode.fast_accum, impl),)

    def columns(data: Tensor, scale: Tensor, e: int, start: int, end: int) -> Tensor:
        """Of group e, in float64."""
        width = block[1]
        of_group = scale[e, :, None] if width == FULL else scale[:, start // width : end // width]
        part = data[:, start:end]
        return part.double() * broadcast_scale(decode_scale(of_group).double(), part.shape, block)

    truth = torch.zeros(g, n, k, dtype=torch.float64, device=device)
    for e, span in enumerate(pairwise([0, *offs_t.tolist()])):
        truth[e] = columns(a, scale_a, e, *span) @ columns(b, scale_b, e, *span).t()
    left = Operand(fp8, block, scale_a.dtype)
    return contenders(
        truth,
        lambda: (torch._grouped_mm(g_TN.t(), x_TK, offs=offs),),
        multiply,
        taken(grouped.WGRAD_IMPLEMENTATIONS, device, left, left._replace(block=block[::-1])),
        mode.fast_accum,
        shape == SMOKE,
    )


def flops(shape: Shape) -> int:
    t, n, k, _ = shape
    return 2 * t * n * k


SMOKE = (512, 64, 128, 4)
SHAPES = named_shapes(  # [tokens, out, in, groups]
    {
        "deepseek-moe-16b": "down 49152x2048x1408x64, gate_up 49152x2816x2048x64",
        "deepseek-v3": "gate_up 65536x4096x7168x32, down 65536x7168x2048x32",
        "llama4-scout": "up 65536x8192x5120x16",
    },
    default=(
        "deepseek-moe-16b down",
        "deepseek-moe-16b gate_up",
        "deepseek-v3 gate_up",
        "deepseek-v3 down",
        "llama4-scout up",
    ),
)
ROWS = ("rowwise-fast", "rowwise", "1x128x128x128", "mxfp8")
COLUMNS = ("rowwise-fast", "rowwise", "1x128x1x128", "mxfp8")
BENCHES = [
    Bench(f"grouped_gemm/{kind}-{name}", partial(make, name), SHAPES, SMOKE, "bf16", flops=flops)
    for kind, make, names in (
        ("rows", rows_contenders, ROWS),
        ("columns", columns_contenders, COLUMNS),
    )
    for name in names
] + [
    Bench("grouped_gemm/empty", empty_contenders, SHAPES, SMOKE, "alone", flops=flops),
    Bench("grouped_gemm/unaligned", unaligned_contenders, SHAPES, SMOKE, "rowwise", flops=flops),
]
