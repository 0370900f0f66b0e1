"""Compile the kernel of the matrix product, and of those of groups, for a GPU that is not here;
print what the code shows.

    python tests/cross_compile_matmul.py sm_90 gfx942

Run as a program of its own: in a process with Triton's interpreter kernels are not compilable.
"""

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
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from float8.devices import describe
from float8.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FORMATS
from float8.kernels import grouped_triton, matmul_triton
from float8.scaling import FULL, scale_shape

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
} | {f.dtype: f"*{f.triton.replace('float8e', 'fp8e')}" for f in FORMATS if f.kind != "e8m0"}
INTO = "columns", "out"
# blocks of a and b, dtype of the scales, whether sums may stay in the tensor cores, dtype out, and
# what groups are of and what the product is added to
MODES: dict[str, tuple[Any, ...]] = {
    "tensor fast": ((FULL, FULL), (FULL, FULL), torch.float32, True, torch.bfloat16),
    "row fast": ((1, FULL), (FULL, 1), torch.float32, True, torch.float32),
    "row": ((1, FULL), (FULL, 1), torch.float32, False, torch.bfloat16),
    "1x128 x 128x128": ((1, 128), (128, 128), torch.float32, False, torch.bfloat16),
    "1x128 x 1x128": ((1, 128), (128, 1), torch.float32, False, torch.float32),
    "any strides": ((1, FULL), (FULL, 1), torch.float32, False, torch.bfloat16),
    "mx": ((1, 32), (32, 1), E8M0.dtype, False, torch.bfloat16),
    "tensor fast + bias": ((FULL, FULL), (FULL, FULL), torch.float32, True, torch.bfloat16, "bias"),
    "row fast + bias": ((1, FULL), (FULL, 1), torch.float32, True, torch.bfloat16, "bias"),
    "row + bias": ((1, FULL), (FULL, 1), torch.float32, False, torch.float32, "bias"),
    "1x128 + bias": ((1, 128), (128, 128), torch.float32, False, torch.bfloat16, "bias"),
    "mx + bias": ((1, 32), (32, 1), E8M0.dtype, False, torch.bfloat16, "bias"),
    "row fast + out": ((1, FULL), (FULL, 1), torch.float32, True, torch.float32, "out"),
    "row + out": ((1, FULL), (FULL, 1), torch.float32, False, torch.float32, "out"),
    "row bf16 + out": ((1, FULL), (FULL, 1), torch.float32, False, torch.bfloat16, "out"),
    "1x128 + out": ((1, 128), (128, 1), torch.float32, False, torch.float32, "out"),
    "mx + out": ((1, 32), (32, 1), E8M0.dtype, False, torch.float32, "out"),
    "row, groups": ((1, FULL), (FULL, 1), torch.float32, False, torch.bfloat16, "rows"),
    "row fast, groups": ((1, FULL), (FULL, 1), torch.float32, True, torch.bfloat16, "rows"),
    "1x128, groups": ((1, 128), (128, 128), torch.float32, False, torch.bfloat16, "rows"),
    "mx, groups": ((1, 32), (32, 1), E8M0.dtype, False, torch.bfloat16, "rows"),
    "row, columns": ((1, FULL), (FULL, 1), torch.float32, False, torch.float32, "columns"),
    "row fast, columns": ((1, FULL), (FULL, 1), torch.float32, True, torch.bfloat16, "columns"),
    "1x128, columns": ((1, 128), (128, 1), torch.float32, False, torch.bfloat16, "columns"),
    "mx, columns": ((1, 32), (32, 1), E8M0.dtype, False, torch.bfloat16, "columns"),
    "row, columns + out": ((1, FULL), (FULL, 1), torch.float32, False, torch.float32, *INTO),
    "row fast, columns + out": ((1, FULL), (FULL, 1), torch.float32, True, torch.float32, *INTO),
    "1x128, columns + out": ((1, 128), (128, 1), torch.float32, False, torch.float32, *INTO),
    "mx, columns + out": ((1, 32), (32, 1), E8M0.dtype, False, torch.bfloat16, *INTO),
}


def compiled(launch: tuple[Any, Any, Any], target: GPUTarget) -> Any:
    """The kernel of a recorded launch, specialised as Triton does: divisibility by 16, ones."""
    kernel, args, kwargs = launch
    names = [p.name for p in kernel.params]
    values = dict(zip(names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value, kept = values[parameter.name], not parameter.do_not_specialize
        if isinstance(value, TensorDescriptor):
            element = POINTERS[value.base.dtype][1:]
            signature[parameter.name] = f"tensordesc<{element}{value.block_shape}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if kept:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (value == 1 and kept):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and kept:
                attributes[(i,)] = [["tt.divisibility", 16]]
    options = {k: v for k, v in kwargs.items() if k not in names}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options)


INSTRUCTIONS = {  # of the matrix units: FP8, FP8 with MX scales, and anything else
    "fp8": r"wgmma\S+\.e[45]m[23]\.e[45]m[23]|tcgen05\.mma\S+kind::f8f6f4|"
    r"mma\.sync\S+\.e[45]m[23]\.e[45]m[23]|v_s?w?mm?fma[ci]?_f32_\S+_(?:fp8|bf8|f8f6f4)\S*|"
    r"v_mfma_f32_\S*f8f6f4",
    "mx": r"tcgen05\.mma\S+kind::mxf8f6f4\S*block_scale|v_mfma_scale_f32\S+f8f6f4|"
    r"mma\.sync\S+kind::mxf8f6f4\S*block_scale",
    "all": r"wgmma\.mma_async|tcgen05\.mma\.|mma\.sync|v_(?:s?w?mfma|wmma)\S*",
}


def stack(cubin: bytes) -> int:
    """Bytes of local memory of a thread, which is where spilled registers go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", said)))


def facts(binary: Any) -> dict[str, Any]:
    amd = "amdgcn" in binary.asm
    code = binary.asm["amdgcn" if amd else "ptx"]
    found = {name: len(re.findall(pattern, code)) for name, pattern in INSTRUCTIONS.items()}
    spilled = r"ScratchSize: (\d+)|vgpr_spill_count: +(\d+)"
    scratch = sum(int(x or y) for x, y in re.findall(spilled, code))
    return {
        **found,
        "adds": len(re.findall(r"add(?:\.rn)?\.f32", code)),
        "tma": len(re.findall("cp.async.bulk.tensor", code)),
        "scratch": scratch if amd else stack(binary.asm["cubin"]),
        "shared": binary.metadata.shared,
    }


def main(targets: list[str]) -> None:
    launches: list[tuple[Any, Any, Any]] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, args, kwargs))

    JITFunction.run = record
    matmul_triton.multiprocessors = lambda device: 132
    for name in targets:
        profile = describe(name)
        matmul_triton.device_profile = lambda device, profile=profile: profile
        grouped_triton.device_profile = matmul_triton.device_profile
        e4m3, e5m2 = (E4M3FNUZ, E5M2FNUZ) if profile.flavour == "fnuz" else (E4M3FN, E5M2)
        target = (
            GPUTarget("cuda", int(name[3:]), 32)
            if profile.vendor == "nvidia"
            else GPUTarget("hip", name, profile.wavefront)
        )
        for mode, (block_a, block_b, scales, fast_accum, out_dtype, *groups) in MODES.items():
            m, k, n, count = 1000, 4112 if mode == "any strides" else 4096, 2048, 8
            new = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
            a = new(m, k, dtype=e4m3.dtype)
            b = new(n, k, dtype=e5m2.dtype if mode == "row" else e4m3.dtype)
            scale_a, scale_b = (
                new(*scale_shape(shape, block), dtype=scales)
                for shape, block in (((m, k), block_a), ((k, n), block_b))
            )
            if mode == "any strides":
                b = new(k, n, dtype=e4m3.dtype).t()
            offs, last = new(count, dtype=torch.int32), (out_dtype, fast_accum)
            launches.clear()
            if groups == ["rows"]:
                stack, lead = b.expand(count, n, k).contiguous(), (count, -1, -1)
                blocks = block_a, (1, *block_b[::-1])
                grouped_triton.multiply_rows(
                    a, stack, scale_a, scale_b.t().expand(lead), offs, *blocks, *last
                )
            elif "columns" in groups:
                scale_b = scale_b.t()
                if block_a[1] == FULL:
                    scale_a, scale_b = (s.t().expand(count, -1) for s in (scale_a, scale_b))
                blocks = block_a, block_b[::-1]
                out = new(count, m, n, dtype=out_dtype) if "out" in groups else None
                grouped_triton.multiply_columns(a, b, scale_a, scale_b, offs, *blocks, *last, out)
            else:
                added = {
                    kind: new(*shape, dtype=dtype)
                    for kind, shape, dtype in (
                        ("bias", (n,), torch.bfloat16),
                        ("out", (m, n), out_dtype),
                    )
                    if groups == [kind]
                }
                matmul_triton.multiply(a, b.t(), scale_a, scale_b, block_a, block_b, *last, **added)
            shown = facts(compiled(launches[0], target))
            print(json.dumps({"target": name, "mode": mode, **shown}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
