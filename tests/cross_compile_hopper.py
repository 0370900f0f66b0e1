"""Compile the Gluon matrix product for sm_90, which is not here; print what the code shows, as
JSON.

    python tests/cross_compile_hopper.py          # the modes, as training uses them
    python tests/cross_compile_hopper.py all      # every format, output, bias and accumulation

Run as a program of its own: in a process with Triton's interpreter kernels are not compilable.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from float8.formats import E4M3FN, E5M2
from float8.kernels.grouped_hopper import multiply_columns, multiply_rows
from float8.kernels.matmul_hopper import BLOCKS, scaled_mm_hopper
from float8.scaling import FULL, scale_layout, scale_shape

TARGET = GPUTarget("cuda", 90, 32)
BACKEND = make_backend(TARGET)
FLOAT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FP8 = {"e4m3": E4M3FN.dtype, "e5m2": E5M2.dtype}
# groups, mode, fast, formats, output, bias, accumulate, columns
USUAL = [
    ("none", "tensorwise", True, "e4m3 e4m3", "bf16", "bf16", False, 512),
    ("none", "rowwise", False, "e5m2 e4m3", "bf16", None, False, 512),
    ("none", "rowwise", False, "e4m3 e4m3", "fp32", None, True, 512),
    ("none", "block", False, "e4m3 e4m3", "bf16", None, False, 512),
    ("none", "block_t", False, "e4m3 e5m2", "fp16", None, False, 512),
    ("none", "block2", False, "e4m3 e4m3", "fp32", None, True, 512),
    ("none", "block2", False, "e5m2 e5m2", "bf16", None, False, 510),
    ("rows", "rowwise", True, "e4m3 e4m3", "bf16", None, False, 512),
    ("rows", "rowwise", False, "e4m3 e4m3", "bf16", None, False, 512),
    ("rows", "rowwise", False, "e5m2 e4m3", "fp32", None, False, 512),
    ("rows", "rowwise", False, "e4m3 e4m3", "bf16", None, False, 510),
    ("rows", "block", False, "e4m3 e4m3", "bf16", None, False, 512),
    ("columns", "rowwise", True, "e4m3 e4m3", "bf16", None, False, 512),
    ("columns", "rowwise", False, "e4m3 e4m3", "bf16", None, False, 512),
    ("columns", "rowwise", False, "e4m3 e5m2", "fp32", None, True, 512),
    ("columns", "rowwise", False, "e4m3 e5m2", "bf16", None, True, 512),
    ("columns", "block2", False, "e4m3 e4m3", "bf16", None, False, 512),
    ("columns", "block2", False, "e4m3 e4m3", "fp32", None, True, 512),
]
ALL = [
    (groups, mode, fast, formats, output, bias, accumulate, columns)
    for groups in ("none", "rows", "columns")
    for mode, fast in [("tensorwise", True), *((mode, False) for mode in BLOCKS)]
    for formats, output, bias, accumulate, columns in itertools.chain(
        itertools.product(["e4m3 e4m3"], FLOAT, [None, "bf16"], [False, True], [512, 510]),
        itertools.product(
            ["e5m2 e4m3", "e4m3 e5m2", "e5m2 e5m2"], ["bf16"], [None], [False], [512]
        ),
    )
    if groups == "none" or bias is None
    if groups != "rows" or not (accumulate or mode == "block_t")
]


def compiled(launch: tuple[Any, Any, Any]) -> Any:
    """The kernel of a recorded launch, specialised as Triton does at a launch."""
    kernel, args, kwargs = launch
    kwargs = {**kwargs, "debug": False, "instrumentation_mode": ""}
    bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    bound, specialization, options = bind(*args, **kwargs)
    options, *source = kernel._pack_args(BACKEND, kwargs, bound, specialization, options)
    return triton.compile(GluonASTSource(kernel, *source), target=TARGET, options=options.__dict__)


def ptxas(ptx: str) -> str:
    """What the assembler says of registers, spills and matrix products that it made wait."""
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "kernel.ptx")
        with open(source, "w") as file:
            file.write(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", source]
        command += ["-o", os.path.join(folder, "kernel.cubin")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def facts(binary: Any) -> dict[str, Any]:
    ptx, said = binary.asm["ptx"], ptxas(binary.asm["ptx"])
    count = lambda pattern: len(re.findall(pattern, ptx))  # noqa: E731
    stores = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return {
        "products": sorted(set(re.findall(r"wgmma\.mma_async\S+?(m64\S+)", ptx))),
        "loads": count(r"cp\.async\.bulk\.tensor\.\dd\.shared"),
        "stores": count(r"cp\.async\.bulk\.tensor\.\dd\.global"),
        "adds": sorted(set(re.findall(r"atom\.global\S+?add\.(?:noftz\.)?(\S+)", ptx))),
        "registers": sorted({int(n) for n in re.findall(r"setmaxnreg\S+\s+(\d+)", ptx)}),
        "expects": [
            int(n) for n in re.findall(r"mbarrier\.arrive\.expect_tx\S+ _, \S+ (\d+)", ptx)
        ],
        "waits": count(r"mbarrier\.try_wait"),
        "arrives": count(r"mbarrier\.arrive\.shared"),
        "spills": sum(int(n) for pair in stores for n in pair),
        "warnings": re.findall(r"(?i).*(?:warning|serialized).*", said),
        "shared": binary.metadata.shared,
    }


def main(cases: list[tuple[Any, ...]]) -> None:
    launches: list[tuple[Any, Any, Any]] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, args, kwargs))

    JITFunction.run = record
    for groups, mode, fast, formats, output, bias, accumulate, n in cases:
        # The ends of groups of rows are in one list or in three.
        m, k, count = 512, 1024, {"rowwise": 300}.get(mode, 100) if groups == "rows" else 4
        new = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
        dtypes, block = [FP8[kind] for kind in formats.split()], BLOCKS[mode]
        shapes = [(m, k), (count, n, k) if groups == "rows" else (n, k)]
        blocks = [block[0], (1, *block[1]) if groups == "rows" else block[1]]
        scales = [
            scale_layout(new(*scale_shape(shape, block), dtype=torch.float32), block)
            for shape, block in zip(shapes, blocks, strict=True)
        ]
        if groups == "columns" and block[0][1] == FULL:
            scales = [scale.t().expand(count, -1) for scale in scales]
        a, b = (new(*shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
        offs, out_dtype = new(count, dtype=torch.int32), FLOAT[output]
        launches.clear()
        if groups == "rows":
            multiply_rows(a, b, *scales, offs, *blocks, out_dtype, fast)
        elif groups == "columns":
            out = new(count, m, n, dtype=out_dtype) if accumulate else None
            multiply_columns(a, b, *scales, offs, *blocks, out_dtype, fast, out)
        else:
            scaled_mm_hopper(
                a, b, *scales, mode, out_dtype, fast,
                bias=bias and new(n, dtype=FLOAT[bias]),
                out=new(m, n, dtype=out_dtype) if accumulate else None,
            )  # fmt: skip
        shown = facts(compiled(launches[-1]))
        case = {"groups": groups, "mode": mode, "fast": fast, "formats": formats, "output": output}
        case |= {"bias": bias, "accumulate": accumulate, "n": n}
        print(json.dumps(case | shown), flush=True)


if __name__ == "__main__":
    main(ALL if sys.argv[1:] == ["all"] else USUAL)
