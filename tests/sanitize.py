"""Every kernel of the library on odd shapes, once: a program for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python tests/sanitize.py [part ...]

Without the caching allocator every tensor is an allocation of its own size, so that what a kernel
reads or writes beside it shows. Run it once without the sanitizer first, to compile what it runs.

Letters: M, T tokens; N out and K in features; D model and F hidden width; E experts.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import float8
from float8.kernels.matmul import IMPLEMENTATIONS, Operand

SIZES = ((37, 144, 40), (129, 130, 258), (5, 48, 16), (1, 16, 1), (300, 17, 129))  # M, N, K
GROUPS = ((0, 5, 17, 0, 130), (1, 0, 0), (0, 0), (0,) * 140 + (3, 0, 129))
SUMS = torch.float32, torch.bfloat16
RECIPES = tuple(float8.RECIPES.values())


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def layers() -> None:
    for m, n, k in SIZES:
        for recipe in RECIPES:
            float8.linear(random(m, k), random(n, k), random(n), recipe=recipe).sum().backward()
            weights = random(n, k), random(n, k), random(k, n)
            y = float8.swiglu_mlp(random(m, k), *weights, recipe=recipe, norm_weight=random(k))
            y.sum().backward()


@torch.no_grad()
def products() -> None:
    """Each implementation that takes the operands of a recipe's products, with all that it adds."""
    profile = float8.device_profile("cuda")
    e4m3 = float8.format_for("cuda", "e4m3").dtype
    for m, n, k in SIZES:
        for recipe in RECIPES:
            for gemm in (recipe.forward, recipe.wgrad):
                if gemm is None:
                    continue
                a, b = gemm.a, gemm.b
                data_a, scale_a = float8.ops.quantize(random(m, k), a.block, e4m3, a.scale_mode)
                data_b, scale_b = float8.ops.quantize(random(n, k), b.block, e4m3, b.scale_mode)
                args = data_a, data_b.t(), scale_a, scale_b.t(), a.block, b.block[::-1]
                left = Operand(e4m3, a.block, scale_a.dtype)
                right = Operand(e4m3, b.block[::-1], scale_b.dtype)
                for impl, refusal in IMPLEMENTATIONS.items():
                    if refusal(profile, left, right) is not None:
                        continue
                    for fast in (False, True):
                        float8.ops.scaled_mm(*args, torch.bfloat16, fast, impl, random(n))
                        for dtype in SUMS:
                            total = torch.zeros(m, n, device="cuda", dtype=dtype)
                            float8.ops.scaled_mm_add_(total, *args, fast, impl)


def experts() -> None:
    d, f = 48, 80
    for sizes in GROUPS:
        offs = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
        t, e = sum(sizes) + 3, len(sizes)
        for recipe in RECIPES:
            gate_up, down = random(e, 2 * f, d), random(e, d, f)
            float8.swiglu_experts(
                random(t, d), gate_up.mT, None, down.mT, offs, recipe=recipe
            ).sum().backward()
            moe = float8.MoE(d, f, experts=5, top_k=2, device="cuda", dtype=torch.bfloat16)
            float8.convert(moe, recipe, keep=())
            for dtype in SUMS:
                with float8.cached_weights(moe, accumulate=dtype):
                    moe(random(37, d))[0].sum().backward()


if __name__ == "__main__":
    torch.manual_seed(0)
    parts = {part.__name__: part for part in (layers, products, experts)}
    for name in sys.argv[1:] or parts:
        parts[name]()
        torch.cuda.synchronize()
        print(name, "done", flush=True)
