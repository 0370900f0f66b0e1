"""An op of your own for Float8TrainingTensor: torch.flip, in ten lines.

    python examples/extend_dispatch.py

An op that is not in the dispatch table raises, so that nothing leaves FP8 unasked. A handler makes
it work: eagerly, under autograd and under torch.compile, where it becomes part of the graph.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import float8


def add_flip() -> None:
    """Give the table a handler. It gets the op and its arguments, below autograd."""

    @float8.implements(torch.ops.aten.flip.default)
    def flip(op: Any, x: float8.Float8TrainingTensor, dims: list[int]) -> Tensor:
        if any(x.block[d] not in (1, float8.FULL) for d in dims):
            raise NotImplementedError(f"{op} along {dims}: blocks {x.block} would be cut")

        def reverse(part: Tensor) -> Tensor:  # as bytes: torch reverses only some 8-bit types
            bits = part.view(torch.uint8) if part.itemsize == 1 else part
            return op(bits, dims).view(part.dtype)

        return x.replace(qdata=reverse(x.qdata), scale=reverse(x.scale))


def both_ways(x: Tensor, w: Tensor) -> Tensor:
    """A sequence read forwards and backwards, [T, K] to [2T, N]; both products are in FP8."""
    x8 = float8.quantize(x, block=(1, 128))
    w8 = float8.quantize(w, block=(128, 128))  # holds both ways: the gradient of x is in FP8 too
    return torch.cat([F.linear(x8, w8), F.linear(x8.flip(0), w8)])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """{"before": the error's text, "refusal": the handler's own, "eager", "compiled", "grad"}."""
    parser = argparse.ArgumentParser(
        prog="extend_dispatch.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="default: %(default)s")
    parser.add_argument("--backend", help="of torch.compile (default: inductor; CPU: aot_eager)")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    backend = args.backend or ("aot_eager" if device.type == "cpu" else "inductor")
    torch.manual_seed(0)
    x = torch.randn(64, 128, device=device, requires_grad=True)
    w = torch.randn(96, 128, device=device)

    before = None
    try:
        both_ways(x, w)
    except NotImplementedError as error:
        before = str(error)
    print(f"Without a handler:\n   {before}\n")

    add_flip()
    eager = both_ways(x, w)
    forwards, backwards = eager.chunk(2)
    same = torch.equal(forwards.flip(0), backwards)
    print(f"With it: shape {tuple(eager.shape)}, and the second half is ", end="")
    print("the first in reverse, bit for bit." if same else "NOT the first in reverse.")

    compiled = torch.compile(both_ways, backend=backend, fullgraph=True)(x, w)
    difference = (compiled - eager).abs().max().item()
    print(f"Compiled by {backend} with fullgraph=True: the largest difference is {difference:g}.")

    compiled.sum().backward()
    grad = x.grad
    print(f"The gradient reached x: shape {tuple(grad.shape)}, {grad.dtype}.")

    refusal = None
    try:
        float8.quantize(x, block=(48, 128)).flip(0)  # 48 rows, then 16
    except NotImplementedError as error:
        refusal = str(error)
    print(f"What the handler itself refuses:\n   {refusal}")
    return {
        "before": before,
        "eager": eager,
        "compiled": compiled,
        "grad": grad,
        "refusal": refusal,
    }


if __name__ == "__main__":
    main()
