"""Compile the kernels that move tokens for a GPU that is not here; print what the code shows.

    python tests/cross_compile_permute.py sm_90 gfx942

Run as a program of its own, as cross_compile.py, with whose means it works.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from cross_compile import POINTERS, compiled, facts  # keeps Triton's interpreter out
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from float8.devices import assume_device, describe
from float8.formats import E4M3FN, E4M3FNUZ, Float8Format
from float8.kernels import launch, permute_triton
from float8.kernels import permute as ops
from float8.kernels.quantize import CastPlan
from float8.scaling import FULL

POINTERS[torch.int64] = "*i64"
TOKENS, K, EXPERTS, FEATURES = 1001, 8, 256, 7168  # as many as no kernel may count on


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def runs(fmt: Float8Format) -> dict[str, Callable[[], None]]:
    """Names of what is moved, and functions that do it."""
    found: dict[str, Callable[[], None]] = {}
    for dtype in (torch.int64, torch.int32):
        indices = tensor(TOKENS, K, dtype=dtype)
        routing = ops._fake_route(indices, EXPERTS, 128)
        found[f"route {dtype}"] = partial(permute_triton.launch_route, indices, 128, *routing)
    position, source, *_ = routing
    x, rows, weights = tensor(TOKENS, FEATURES), tensor(len(source), FEATURES), tensor(TOKENS, K)
    found["permute"] = partial(permute_triton.launch_permute, x, position, source, rows)
    casts = {
        "row": CastPlan((1, FULL), fmt.dtype, "fp32"),
        "block": CastPlan((1, 128), fmt.dtype, "fp32"),
    }
    if fmt is E4M3FN:
        casts["mx"] = CastPlan((1, 32), fmt.dtype, "e8m0_rceil")
    for name, cast in casts.items():
        outputs = ops.empty_rows(x, (len(source), x.shape[1]), cast)
        found[f"permute {name}"] = partial(
            permute_triton.launch_permute, x, position, source, *outputs, cast
        )
    for name, given in {"unpermute": weights.float(), "unpermute alone": None}.items():
        found[name] = partial(permute_triton.launch_unpermute, rows, position, given, x)
    for name, y in {"backward": rows, "backward alone": None}.items():
        found[name] = partial(
            permute_triton.launch_unpermute_backward, x, y, position, source, weights, rows,
            tensor(TOKENS, K, dtype=torch.float32),
        )  # fmt: skip
    return found


def main(targets: list[str]) -> None:
    launches: list[tuple[Any, Any, Any]] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, args, kwargs))

    JITFunction.run = record
    permute_triton.multiprocessors = lambda device: 132
    for name in targets:
        profile = describe(name)
        nvidia = profile.vendor == "nvidia"
        launch.runs_ptx = lambda device, ptx=nvidia: ptx
        permute_triton._permute.cache_clear()
        target = (
            GPUTarget("cuda", int(name[3:]), 32)
            if nvidia
            else GPUTarget("hip", name, profile.wavefront)
        )
        fmt = E4M3FNUZ if profile.flavour == "fnuz" else E4M3FN
        lines, binaries = [], []
        for what, run in runs(fmt).items():
            launches.clear()
            with assume_device(name):
                run()
            for seen in launches:
                lines.append({"target": name, "of": what, "kernel": seen[0].__name__})
                binaries.append(compiled(seen, target))
        for where, shown in zip(lines, facts(binaries, target), strict=True):
            print(json.dumps(where | shown), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
