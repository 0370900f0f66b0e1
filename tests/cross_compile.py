"""Compile the casts' kernels for a GPU that is not here; print what the code shows, as JSON.

    python tests/cross_compile.py sm_90 gfx942
    python tests/cross_compile.py --grouped sm_90 gfx942     # the casts of token groups
    python tests/cross_compile.py --fused sm_90 gfx942       # those fused with their producers
    python tests/cross_compile.py --fused-grouped sm_90      # those of groups, fused

Run as a program of its own: in a process with Triton's interpreter the kernels are not compilable.
"""

import bisect
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import sm_arch_from_capability
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from float8.devices import assume_device, describe
from float8.formats import E4M3FN, E4M3FNUZ, FORMATS
from float8.kernels import fused_triton, launch, quantize_grouped_triton, quantize_triton
from float8.kernels.quantize import CastPlan, given_mode
from float8.scaling import FULL, scale_dtype, scale_shape

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.uint8: "*u8",
} | {f.dtype: f"*{f.triton.replace('float8e', 'fp8e')}" for f in FORMATS if f.kind != "e8m0"}

BLOCKS = {"tensor": (FULL, FULL), "row": (1, FULL), "block": (1, 128), "square": (128, 128)}


def compiled(recorded: tuple[Any, Any, Any], target: GPUTarget) -> Any:
    """The kernel of a recorded launch, specialised as Triton does: divisibility by 16, ones."""
    kernel, args, kwargs = recorded
    names = [p.name for p in kernel.params]
    values = dict(zip(names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        elif (
            parameter.is_constexpr
            or value is None
            or (value == 1 and not parameter.do_not_specialize)
        ):
            signature[parameter.name], constants[(i,)] = "constexpr", value
            continue
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
            continue
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
        aligned = isinstance(value, torch.Tensor) or value % 16 == 0
        if aligned and not parameter.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = {k: v for k, v in kwargs.items() if k not in names}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options)


def text_section(cubin: bytes) -> bytes:
    """The instructions of a cubin of one kernel, an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, naming = struct.unpack_from("<3H", cubin, 58)
    # of each section: where its name is among the names, its offset, its length
    sections = [struct.unpack_from("<I20x2Q", cubin, table + i * size) for i in range(count)]
    names = sections[naming][1]
    (found,) = [s for s in sections if cubin.startswith(b".text.", names + s[0])]
    return cubin[found[1] : sum(found[1:])]


def machine_code(binaries: Sequence[Any], target: GPUTarget) -> list[str]:
    """SASS of each kernel, by the disassembler that Triton brings along. It gets all in one piece,
    for to start it takes as long as fifteen kernels do."""
    codes = [text_section(binary.asm["cubin"]) for binary in binaries]
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    arch = sm_arch_from_capability(target.arch).replace("sm_", "SM")
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        # -ndf: without an analysis of data flow, which takes longer than the rest.
        command = [tool, "-ndf", "--binary", arch, file.name]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    ends = list(itertools.accumulate(map(len, codes)))
    found: list[list[str]] = [[] for _ in codes]
    for line in run.stdout.splitlines(keepends=True):
        if address := re.match(r"\s+/\*([0-9a-f]{4,})\*/", line):
            found[bisect.bisect_right(ends, int(address[1], 16))].append(line)
    assert all(len(sass) * 16 == len(code) for sass, code in zip(found, codes, strict=True))
    return ["".join(sass) for sass in found]


def stack_pointer_reads(sass: str) -> int:
    """Instructions that take R1, the stack pointer, as data: how ptxas 12.8 shows that it lost
    track of a byte it had packed (the transposed bytes of such a kernel are wrong)."""
    found = 0
    for op, text in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?(\S+) (.*?);", sass, re.M):
        operands = [a.strip() for a in re.sub(r"\[[^\]]*\]", "[]", text).split(",")]
        if operands[0] != "R1" or op.startswith("ST"):  # else it moves the pointer itself
            read = operands if op.startswith(("ST", "RED", "ATOM")) else operands[1:]
            found += any(re.fullmatch(r"[-~|!]*R1(\.\w+)*\|?", operand) for operand in read)
    return found


def read(binary: Any, sass: str) -> dict[str, Any]:
    amd = "amdgcn" in binary.asm
    code = binary.asm["amdgcn" if amd else "ptx"]
    if amd:
        wide, all_ = "(global|buffer)_{}_dwordx4", "(global|buffer)_{}_"
    else:
        wide, all_ = r"{}\.global[.\w:]*\.v4\.b32|cp\.async\.cg", r"{}\.global|cp\.async\.c"
    count = lambda pattern, op: len(re.findall(pattern.format(op), code))  # noqa: E731
    load, store = ("load", "store") if amd else ("ld", "st")
    return {
        "spills": len(re.findall(r"\b(LDL|STL)\b", sass)),
        "stack_pointer_reads": stack_pointer_reads(sass),
        "wide_loads": count(wide, load),
        "loads": count(all_, load),
        "wide_stores": count(wide.split("|cp")[0], store),
        "stores": count(all_.split("|cp")[0], store),
        "conversions": len(re.findall(r"v_cvt(_scalef32)?_pk_fp8|cvt\.rn\.satfinite\.e4m3", code)),
        "fences": len(re.findall("buffer_wbl2|buffer_inv|fence.acq_rel|membar", code)),
        "scratch": max([0, *map(int, re.findall(r"ScratchSize: (\d+)", code))])
        if amd
        else len(re.findall(r"\.local ", code)),
        "atomics": len(re.findall(r"atom(?:ic)?[._]", code)),
        "shared": binary.metadata.shared,
    }


def facts(binaries: Sequence[Any], target: GPUTarget) -> list[dict[str, Any]]:
    """What the code of each kernel shows."""
    amd = target.backend == "hip"
    return list(
        map(read, binaries, [""] * len(binaries) if amd else machine_code(binaries, target))
    )


def quantize(row: CastPlan | None, col: CastPlan | None) -> None:
    """The row layout alone in blocks of a row; a pair's kernels serve the other blocks alone."""
    if col is None and (row is None or row.block[0] != 1 or row.block[1] == FULL):
        return
    x = torch.empty(1, 512, 4096, dtype=torch.bfloat16, device="meta")
    quantize_triton.quantize_layouts(x, row, col)


def quantize_static(row: CastPlan | None, col: CastPlan | None) -> None:
    """A given scale; the transposed layout has it where other loads of its kind are."""
    if row is not None and (col is None or row.block == (1, 128)):
        x = torch.empty(512, 4096, dtype=torch.bfloat16, device="meta")
        x = x if col is None else x.t()
        scale = torch.empty(
            scale_shape(x.shape, row.block), dtype=scale_dtype(row.scale_mode), device="meta"
        )
        cast = row._replace(scale_mode=given_mode(scale))
        quantize_triton.quantize_layouts(x, cast, None, scale=scale)


def quantize_uneven(row: CastPlan | None, col: CastPlan | None) -> None:
    """With a number of rows that no access but one of a byte suits."""
    if row is not None and col is not None:
        x = torch.empty(4099, 4096, dtype=torch.bfloat16, device="meta")
        quantize_triton.quantize_layouts(x, row, col)


def quantize_grouped(row: CastPlan | None, col: CastPlan | None) -> None:
    """With a number of tokens that no kernel may count on, in groups that fill two warps."""
    if col is None:
        return
    x = torch.empty(1001, 4096, dtype=torch.bfloat16, device="meta")
    offs = torch.empty(64, dtype=torch.int32, device="meta")
    quantize_grouped_triton.quantize_groups(x, offs, row, col)


def fused(source: str) -> Callable[[CastPlan | None, CastPlan | None], None]:
    """On rows as long as those of a large model's MLP; tensorwise, squares and other blocks alone
    are much the same code, of which each kernel takes seconds."""

    def run(row: CastPlan | None, col: CastPlan | None) -> None:
        if col is None or col.block[0] != 1 or (row is None and col.block[1] != FULL):
            return
        x = torch.empty(512, 14336, dtype=torch.bfloat16, device="meta")
        y, z = (x[0], None) if source == "rms" else (x, x if source != "swiglu" else None)
        fused_triton.fused_layouts(source, x, y, z, 1e-5, row, col)

    return run


def fused_grouped(source: str, joint: bool) -> Callable[[CastPlan | None, CastPlan | None], None]:
    """Of halves of one product; what is left out is much the same code: squares, columns alone but
    for their own scale per feature, and stacked results in blocks."""

    def run(row: CastPlan | None, col: CastPlan | None) -> None:
        if col is None or col.block[0] == 128:
            return
        rowwise = col.block == (1, FULL)
        if not rowwise and (row is None or (source == "swiglu_backward" and not joint)):
            return
        both = torch.empty(1001, 4096, dtype=torch.bfloat16, device="meta")
        gate, up = both.chunk(2, 1)
        offs = torch.empty(64, dtype=torch.int32, device="meta")
        inputs = gate, up, None if source == "swiglu" else torch.empty_like(gate)
        quantize_grouped_triton.group_layouts(source, inputs, offs, joint, row, col)

    return run


# What an option compiles: names and functions of two casts.
RUNS: dict[str, dict[str, Callable[[CastPlan | None, CastPlan | None], None]]] = {
    "": {"quantize": quantize, "static": quantize_static, "uneven": quantize_uneven},
    "--grouped": {"quantize_grouped": quantize_grouped},
    "--fused": {source: fused(source) for source in ("rms", "swiglu", "swiglu_backward")},
    "--fused-grouped": {
        "swiglu": fused_grouped("swiglu", False),
        "joint": fused_grouped("swiglu_backward", True),
        "apart": fused_grouped("swiglu_backward", False),
    },
}


def show(lines: list[tuple[str, dict[str, Any]]], known: dict[str, Any], target: GPUTarget) -> None:
    """Print what the code of the kernels of ``lines`` shows, and forget the lines."""
    keys = list(dict.fromkeys(key for key, _ in lines))
    shown = dict(zip(keys, facts([known[key] for key in keys], target), strict=True))
    for key, where in lines:
        print(json.dumps(where | shown[key]), flush=True)
    lines.clear()


def main(arguments: list[str]) -> None:
    targets = [a for a in arguments if not a.startswith("--")]
    options = set(arguments) - set(targets)
    launches: list[tuple[Any, Any, Any]] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, args, kwargs))

    JITFunction.run = record
    (runs,) = [RUNS[option] for option in options & set(RUNS)] or [RUNS[""]]
    modules: tuple[Any, ...] = (launch, quantize_triton, quantize_grouped_triton, fused_triton)
    for module in modules:
        module.multiprocessors = lambda device: 132
    for name in targets:
        profile = describe(name)
        nvidia = profile.vendor == "nvidia"
        fmt = E4M3FNUZ if profile.flavour == "fnuz" else E4M3FN
        # --portable: without the PTX that packs bytes, the code that ptxas has got wrong.
        for module in modules:
            module.runs_ptx = lambda device, ptx=nvidia and "--portable" not in options: ptx
        quantize_triton._cast.cache_clear()
        quantize_grouped_triton._launches.cache_clear()
        fused_triton._prepared.cache_clear()
        target = (
            GPUTarget("cuda", int(name[3:]), 32)
            if nvidia
            else GPUTarget("hip", name, profile.wavefront)
        )
        casts = {k: CastPlan(block, fmt.dtype, "fp32") for k, block in BLOCKS.items()}
        if fmt is E4M3FN:
            casts["mx"] = CastPlan((1, 32), fmt.dtype, "e8m0_rceil")
        known: dict[str, Any] = {}  # casts share launches
        lines: list[tuple[str, dict[str, Any]]] = []
        for (source, run), (kind, cast) in itertools.product(runs.items(), casts.items()):
            for layouts in ("dual", "row", "col"):
                launches.clear()
                with assume_device(name):
                    run(None if layouts == "col" else cast, None if layouts == "row" else cast)
                for seen in launches:
                    key = repr(seen)
                    known[key] = known.get(key) or compiled(seen, target)
                    where = {"target": name, "of": source, "kind": kind, "layouts": layouts}
                    lines.append((key, {**where, "kernel": seen[0].__name__}))
                if "--portable" in options:  # what comes later may not compile
                    show(lines, known, target)
        show(lines, known, target)


if __name__ == "__main__":
    main(sys.argv[1:])
