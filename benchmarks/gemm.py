"""The scaled product of two FP8 matrices, by every implementation that takes it on the device.

Letters: M rows of a, N columns of b, K the contraction. Both operands are quantised as [rows, K],
as activations and weights are, so b is column-major. A row's name gives the blocks of both; *fast*
lets the tensor cores keep the sum.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import float8
from float8.kernels.matmul import IMPLEMENTATIONS, Operand, scaled_mm_torch
from float8.kernels.quantize import quantize
from float8.scaling import FULL, Block, broadcast_scale, decode_scale
from float8.testing import deterministic

from .casts import random_input
from .layers import near
from .registry import Bench, Call, Contender, Options, Outputs, Shape, named_shapes

# What tensor cores may add to the reference's error: they align the products of a step to the
# largest and keep 14 bits; with fast accumulation, of the sum too, whose error grows with K (with
# 14336 the worst row of cuBLAS's own product is 2^-10 off).
ROUNDING = {False: 2.0**-11, True: 2.0**-9}


class Mode(NamedTuple):
    """Blocks (rows, contraction) of both operands."""

    block_a: Block
    block_b: Block
    scale_mode: str = "fp32"
    fast_accum: bool = False


MODES = {
    "tensorwise-fast": Mode((FULL, FULL), (FULL, FULL), fast_accum=True),
    "tensorwise": Mode((FULL, FULL), (FULL, FULL)),
    "rowwise-fast": Mode((1, FULL), (1, FULL), fast_accum=True),
    "rowwise": Mode((1, FULL), (1, FULL)),
    "1x128x128x128": Mode((1, 128), (128, 128)),
    "1x128x1x128": Mode((1, 128), (1, 128)),
    "mxfp8": Mode((1, 32), (1, 32), "e8m0_rceil"),
}


def exact(data: Tensor, scale: Tensor, block: Block) -> Tensor:
    """An operand in float64."""
    return data.double() * broadcast_scale(decode_scale(scale).double(), data.shape, block)


def worst_error(out: Tensor, truth: Tensor) -> float:
    """|out - truth| / |truth|, the largest of any row and any column: over the whole matrix a wrong
    tile would hardly show."""
    wrong, tiny = out.double() - truth, torch.finfo(truth.dtype).tiny
    by = [wrong.norm(dim=dim) / truth.norm(dim=dim).clamp(min=tiny) for dim in (0, 1)]
    return float(torch.cat(by).max())


def as_exact(truth: Tensor, allowed: float, call: Call) -> str | None:
    """What is wrong with a product, if anything: memory that nobody wrote, an error above
    ``allowed``, or other bits in another call."""
    with deterministic(), warnings.catch_warnings():  # memory that the call allocates holds NaN
        warnings.simplefilter("ignore")  # of cuBLAS, which wants to be told to be deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        (out,) = call()
    if out.shape != truth.shape:
        return f"the product has shape {tuple(out.shape)}, the reference's {tuple(truth.shape)}"
    if bad := (~out.isfinite()).sum().item():
        return f"{bad} of {out.numel()} elements are unwritten, NaN or infinite"
    if not (error := worst_error(out, truth)) <= allowed:
        return f"the error of a row or column is {error:.2e}, {allowed:.2e} is allowed"
    for _ in range(3):
        if different := (out != call()[0]).sum().item():
            return f"{different} of {out.numel()} elements are other bits in another call"
    return None


def gemm_contenders(name: str, shape: Shape, options: Options) -> dict[str, Contender]:
    """bf16, and the implementations by name; the reference, which would take seconds, on the smoke
    shape alone."""
    mode, (m, n, k) = MODES[name], shape
    x_MK, w_NK = (random_input((rows, k), options.device) for rows in (m, n))
    fp8 = float8.format_for(options.device, "e4m3").dtype
    a_MK, scale_a = quantize(x_MK, mode.block_a, fp8, mode.scale_mode)
    b_NK, scale_b = quantize(w_NK, mode.block_b, fp8, mode.scale_mode)
    left = Operand(fp8, mode.block_a, scale_a.dtype)
    right = Operand(fp8, mode.block_b[::-1], scale_b.dtype)
    args = (a_MK, b_NK.t(), scale_a, scale_b.t(), left.block, right.block, torch.bfloat16)

    def multiply(impl: str) -> Outputs:
        return (torch.ops.float8.scaled_mm(*args, mode.fast_accum, impl),)

    truth = exact(a_MK, scale_a, mode.block_a) @ exact(b_NK, scale_b, mode.block_b).t()
    allowed = 2 * worst_error(scaled_mm_torch(*args), truth) + ROUNDING[mode.fast_accum]
    found = {
        "bf16": Contender(
            lambda: lambda: (torch.mm(x_MK, w_NK.t()),), partial(near, (truth,)), line=True
        )
    }
    profile = float8.device_profile(options.device)
    for impl, refusal in IMPLEMENTATIONS.items():
        if refusal(profile, left, right) is None and (impl != "torch" or shape == SMOKE):
            found[impl] = Contender(
                partial(partial, multiply, impl),
                partial(as_exact, truth, allowed),
                ours=True,
                line=True,
            )
    return found


def gemm_flops(shape: Shape) -> int:
    m, n, k = shape
    return 2 * m * n * k


SMOKE = (128, 256, 384)
SHAPES = named_shapes(  # [tokens, out, in]
    {
        "llama3-8b": "ffn_in 8192x14336x4096, ffn_out 8192x4096x14336",
        "deepseek-v3": "shared_out 4096x7168x2048",
    },
    default=("llama3-8b ffn_in", "llama3-8b ffn_out", "deepseek-v3 shared_out"),
)
BENCHES = [
    Bench(
        f"gemm/{name}",
        partial(gemm_contenders, name),
        SHAPES,
        SMOKE,
        baseline="bf16",
        flops=gemm_flops,
    )
    for name in MODES
]
