"""What each device is to float8, and whether float8 computes rightly there.

``python -m float8 doctor`` prints it. The self-test judges by arithmetic that stands in this file,
in plain Python, and shares nothing with the library but the names of formats and scale modes:

- every code of every format, as the device decodes it, against the bit layouts;
- the cast of random numbers and of zeros, NaN, Inf and subnormals, in the blocks of every recipe:
  the reference against the cast in plain Python, and on a GPU the kernels against the reference,
  byte for byte;
- the matrix products of every recipe against float64 products of the same FP8 operands.

``python -m float8 support`` prints the table of all known architectures, docs/support.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import json
import math
import platform
import struct
import textwrap
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from . import devices
from .devices import OPS, DeviceProfile, assume_device, describe, device_profile, format_for
from .dispatch.matmul import multiply
from .formats import E8M0, FORMATS, Float8Format, format_of
from .kernels import grouped
from .kernels import quantize as cast
from .kernels.matmul import IMPLEMENTATIONS, Operand, preference
from .kernels.quantize import CastPlan
from .recipe import RECIPES, Plan
from .scaling import FULL, SCALE_MODES, Block, as_bytes, block_name, decode_scale, scale_dtype
from .tensor import Float8TrainingTensor
from .testing import relative_error

WIDTH = 98  # columns of the output
Report = dict[str, Any]

# ----------------------------------------------------------------------- the formats, independently

# Mantissa bits, exponent bias, and which codes are no numbers: 0x7f and 0xff are NaN ("ones"), 0x80
# is ("zero"), or the highest exponent is Inf and NaN ("ieee"). Sources: float8/formats.py.
_LAYOUTS = {
    "e4m3fn": (3, 7, "ones"),
    "e4m3fnuz": (3, 8, "zero"),
    "e5m2": (2, 15, "ieee"),
    "e5m2fnuz": (2, 16, "zero"),
}


def decode(code: int, name: str) -> float:
    """The value of a byte by the bit layout of its format."""
    if name == "e8m0":
        return math.nan if code == 0xFF else math.ldexp(1.0, code - 127)
    bits, bias, specials = _LAYOUTS[name]
    sign, field, mantissa = code >> 7, (code & 0x7F) >> bits, code & ((1 << bits) - 1)
    if (specials == "zero" and code == 0x80) or (specials == "ones" and code & 0x7F == 0x7F):
        return math.nan
    if specials == "ieee" and field == 0x7F >> bits:
        return math.nan if mantissa else (-1) ** sign * math.inf
    whole = mantissa + (1 << bits if field else 0)
    return (-1.0) ** sign * math.ldexp(whole, max(field, 1) - bias - bits)


@functools.cache
def _ladder(name: str) -> list[float]:
    """The finite values from 0 up; each stands at its own code."""
    return [v for v in (decode(code, name) for code in range(0x80)) if math.isfinite(v)]


def _float32(value: float) -> float:
    """The nearest float32, halves to even. A product of two float32 is exact in a Python float, and
    a quotient rounded twice is the one rounded once (53 bits are enough for 24)."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _exponent(value: float) -> int:
    """floor(log2(value)) of a positive number."""
    return math.frexp(value)[1] - 1


def _scale(amax: float, name: str, mode: str) -> float:
    """The scale of a block, by the definition of its mode and not by bits (`float8.scaling`)."""
    if not math.isfinite(amax):
        return math.nan
    ladder, (bits, _, _) = _ladder(name), _LAYOUTS[name]
    top = ladder[-1]
    if mode == "fp32":
        return max(_float32(amax / top), 2.0**-126)
    lowest = -126 if mode == "pow2" else -127
    if amax == 0:
        return 2.0**lowest
    rounded = amax
    if mode == "e8m0_even":
        quantum = 2.0 ** (_exponent(amax) - bits)
        rounded = round(amax / quantum) * quantum  # Python rounds halves to even
    exponent = _exponent(rounded) - _exponent(top)
    if mode in ("pow2", "e8m0_rceil"):  # the least power of two that keeps amax within the maximum
        exponent += amax > math.ldexp(top, exponent)
    elif mode == "e8m0_ceil":
        exponent += amax != 2.0 ** _exponent(amax)
    return 2.0 ** max(exponent, lowest)


def _encode(value: float, name: str) -> int:
    """The byte of the nearest value, halves to the even code; beyond the maximum the maximum."""
    ladder = _ladder(name)
    magnitude = min(abs(value), ladder[-1])
    code = bisect_left(ladder, magnitude)
    if ladder[code] != magnitude:
        below, above = magnitude - ladder[code - 1], ladder[code] - magnitude
        code -= below < above or (below == above and code % 2 == 1)
    negative = math.copysign(1.0, value) < 0 and (code > 0 or not math.isnan(decode(0x80, name)))
    return code | 0x80 if negative else code


def quantize_scalar(
    rows: list[list[float]], block: Block, name: str, mode: str
) -> tuple[list[list[int]], list[list[float]]]:
    """Bytes and scales of a matrix of float32 values, number by number."""
    height, width = (
        n if b == FULL else b for n, b in zip((len(rows), len(rows[0])), block, strict=True)
    )
    data = [[0] * len(row) for row in rows]
    scales: list[list[float]] = []
    for top in range(0, len(rows), height):
        line: list[float] = []
        scales.append(line)
        for left in range(0, len(rows[0]), width):
            places = [
                (i, j)
                for i in range(top, min(top + height, len(rows)))
                for j in range(left, min(left + width, len(rows[0])))
            ]
            values = [abs(rows[i][j]) for i, j in places]
            amax = math.nan if any(map(math.isnan, values)) else max(values)
            line.append(scale := _scale(amax, name, mode))
            if amax and not math.isnan(scale):
                inverse = _float32(1.0 / scale)
                for i, j in places:
                    data[i][j] = _encode(_float32(rows[i][j] * inverse), name)
    return data, scales


# ------------------------------------------------------------------------------------ the self-test


def _sample(rows: int, columns: int, dtype: torch.dtype, hostile: bool) -> Tensor:
    """Random numbers, the same every time; hostile: of all magnitudes, with zeros, NaN and Inf."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator))
    if hostile:
        x *= torch.exp2(torch.randint(-20, 21, (1, columns), generator=generator))
        x[0], x[1, : columns // 2], x[2] = 0.0, -0.0, x[2] * 1e-38
        x[3, 5], x[4, columns - 3], x[5, 7] = math.nan, math.inf, -math.inf
        x[6] *= 1e30
    return x.to(dtype)


def _difference(got: Tensor, expected: Tensor, any_nan: bool = False) -> str | None:
    """Where tensors of bytes or of float32 differ in their bits, None if nowhere. With `any_nan`
    one NaN is as good as another."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    got, expected = got.cpu().contiguous(), expected.contiguous()
    bits = {1: torch.uint8, 4: torch.int32}[got.dtype.itemsize]
    different = got.view(bits) != expected.view(bits)
    if any_nan:
        different &= ~(got.isnan() & expected.isnan())
    if not different.any():
        return None
    at = tuple(different.nonzero()[0].tolist())
    said = [
        f"{t[at].item():#x}" if bits is torch.uint8 else repr(t[at].item()) for t in (got, expected)
    ]
    count = f"{int(different.sum())} of {different.numel()}"
    return f"{count} differ, the first at {at}: {said[0]} instead of {said[1]}"


def _check_codes(fmt: Float8Format, device: torch.device) -> str | None:
    """A complaint about how a device decodes the 256 codes of a format, or about its maximum."""
    expected = [decode(code, fmt.name) for code in range(256)]
    codes = torch.arange(256, dtype=torch.uint8).to(device)
    if fmt is E8M0:
        values = decode_scale(codes.view(fmt.dtype))
    else:
        one = torch.ones((1, 1), device=device)
        data = codes.view(fmt.dtype).reshape(1, 256)
        values = torch.ops.float8.dequantize(data, one, (FULL, FULL), torch.float32).reshape(256)
    complaint = _difference(values, torch.tensor(expected), any_nan=True)
    top = max(v for v in expected if math.isfinite(v))
    if complaint is None and fmt.max != top:
        complaint = f"its maximum is taken to be {fmt.max:g}, by its bit layout it is {top:g}"
    return complaint


def _parts(x: Tensor, plan: CastPlan) -> tuple[Tensor, Tensor]:
    """Bytes and scale of the reference; x is on the CPU."""
    data, scale = cast.quantize(x, *plan)
    return as_bytes(data), as_bytes(scale)


def _check_reference(plan: CastPlan) -> str | None:
    """A complaint about the reference's cast, judged by plain Python."""
    name = format_of(plan.dtype).name
    for dtype, hostile in ((torch.bfloat16, False), (torch.float32, True)):
        x = _sample(131, 136, dtype, hostile)
        data, scales = quantize_scalar(x.float().tolist(), plan.block, name, plan.scale_mode)
        got_data, got_scale = cast.quantize(x, *plan)
        complaint = _difference(decode_scale(got_scale), torch.tensor(scales)) or _difference(
            got_data.view(torch.uint8), torch.tensor(data, dtype=torch.uint8)
        )
        if complaint is not None:
            return f"the reference against plain Python, {dtype}: {complaint}"
    return None


def _check_kernels(plan: CastPlan, device: torch.device) -> str | None:
    """A complaint about a device's cast of both layouts, judged by the reference on the CPU."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, columns, hostile in ((300, 520, False), (300, 520, True), (33, 1000, True)):
            x = _sample(rows, columns, dtype, hostile)
            on_device = x.to(device)
            row, column = _parts(x, plan), _parts(x.t(), plan)
            one = torch.ops.float8.quantize(on_device, *plan)
            both = torch.ops.float8.quantize_dual(on_device, *plan, *plan)
            for got, expected in zip((*one, *both), (*row, *row, *column), strict=True):
                if (complaint := _difference(as_bytes(got), expected)) is not None:
                    return (
                        f"the kernel against the reference, {dtype} {rows}x{columns}: {complaint}"
                    )
    return None


def _check_product(plan: Plan, device: torch.device) -> str | None:
    """A complaint about a matrix product: further from the float64 one than 1 % of it. Rounding to
    bf16 is 0.2 %, and Hopper's fast accumulation adds less than that."""
    m, n, k = 80, 112, 416
    operands = []
    for rows, part in ((m, plan.a), (n, plan.b)):
        x = _sample(rows, k, torch.bfloat16, False).to(device)
        data, scale = torch.ops.float8.quantize(x, *part)
        operands.append(Float8TrainingTensor(data, scale, part.block, torch.bfloat16))
    a, b_t = operands
    b: Any = b_t.t()
    got = multiply(a, b, plan.impl, fast_accum=plan.fast_accum)
    wide = [
        torch.ops.float8.dequantize(t.qdata, t.scale, t.block, torch.float32).double().cpu()
        for t in (a, b)
    ]
    error = relative_error(got, wide[0] @ wide[1])
    return None if error < 0.01 else f"relative error {error:.2g}"


def _cast_plans(device: torch.device) -> list[CastPlan]:
    """Every cast of every recipe there, and every scale mode once."""
    plans = [p for recipe in RECIPES.values() for p in recipe.plan(device) if p is not None]
    e4m3 = format_for(device, "e4m3").dtype
    modes = [CastPlan((1, 32), e4m3, mode) for mode in SCALE_MODES]
    return list(dict.fromkeys([part for p in plans for part in (p.a, p.b)] + modes))


def _checks(device: torch.device) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """(name, a function that returns a complaint or None)"""
    for fmt in FORMATS:
        yield f"decode {fmt.name}", functools.partial(_check_codes, fmt, device)
    for plan in _cast_plans(device):
        what = f"cast {format_of(plan.dtype)} {block_name(plan.block)} {plan.scale_mode}"
        yield what, functools.partial(_check_reference, plan)
        if device.type != "cpu":
            yield f"kernel {what}", functools.partial(_check_kernels, plan, device)
    done = set()
    for recipe in RECIPES.values():
        for gemm, product in zip(("forward", "dgrad", "wgrad"), recipe.plan(device), strict=True):
            if product is not None and product not in done:
                done.add(product)
                name = f"product {recipe.name} {gemm} by {product.impl}"
                yield name, functools.partial(_check_product, product, device)


def self_test(device: torch.device) -> Report:
    """Run every check; one that raises has failed, in the words of what it raised."""
    began = time.perf_counter()
    checks = []
    for name, check in _checks(device):
        try:
            complaint = check()
        except Exception as error:  # whatever a driver or a compiler can throw is a finding
            complaint = f"{type(error).__name__}: {error}"
        checks.append({"name": name, "ok": complaint is None, "complaint": complaint})
    ok = all(c["ok"] for c in checks)
    return {"ok": ok, "seconds": round(time.perf_counter() - began, 2), "checks": checks}


# ------------------------------------------------------------------------------------- the findings


def versions() -> dict[str, str | None]:
    """What is installed; None for what is not there."""
    try:
        package: str | None = importlib.metadata.version("float8")
    except importlib.metadata.PackageNotFoundError:
        package = None  # a checkout
    try:
        triton = str(importlib.import_module("triton").__version__)
    except ImportError:
        triton = None
    except Exception as error:  # a broken one is worth knowing of, and no reason to stop
        triton = f"broken ({error})"
    return {
        "float8": package,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "triton": triton,
    }


def _operands(plan: Plan) -> tuple[Operand, Operand]:
    a, b = (Operand(p.dtype, p.block, scale_dtype(p.scale_mode)) for p in plan[:2])
    return a, b._replace(block=b.block[::-1])


def _refusals(
    table: Mapping[str, grouped.Refusal], row: DeviceProfile, a: Operand, b: Operand
) -> dict[str, str]:
    answers = ((name, refuse(row, a, b)) for name, refuse in table.items())
    return {name: reason for name, reason in answers if reason is not None}


def _chosen(
    row: DeviceProfile, a: Operand, b: Operand
) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Who multiplies on a device of that row, why others cannot, and the order that was asked."""
    order, refusals = preference(row, a, b), _refusals(IMPLEMENTATIONS, row, a, b)
    return next(name for name in order if name not in refusals), refusals, order


def matmuls(device: torch.device, row: DeviceProfile, mnk: tuple[int, int, int]) -> list[Report]:
    """Who multiplies in each recipe's three GEMMs for M tokens, N out and K in features. `row` is
    the device's profile, or the one that it would have if it were the assumed architecture."""
    real = row == device_profile(device)
    m, n, k = mnk
    shapes = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
    found = []
    for recipe in RECIPES.values():
        for (gemm, shape), plan in zip(shapes.items(), recipe.plan(device), strict=True):
            entry: Report = {"recipe": recipe.name, "gemm": gemm, "shape": shape}
            if plan is None:
                entry |= {"impl": "high precision", "order": (), "refusals": {}, "padded": False}
                found.append(entry)
                continue
            chosen, refusals, order = _chosen(row, *_operands(plan))
            impl = plan.impl if real else chosen  # what `select` answered, and would answer there
            # Dequantised operands are padded nowhere, this library's kernels' in the contraction.
            sizes = {"torch": (), "torch_bf16": (), "hopper": shape[2:], "triton": shape[2:]}.get(
                impl, shape[1:]
            )
            padded = any(size % row.alignment for size in sizes)
            entry |= {"impl": impl, "order": order, "refusals": refusals, "padded": padded}
            found.append(entry)
    return found


def examine(name: str, assumed: bool, sizes: tuple[int, int, int] | None) -> Report:
    """All there is to say of a device ("cpu", "cuda:0"), or of an architecture that is assumed on
    this machine's CPU: its native ops are the table's, its self-test runs the emulation."""
    device = torch.device("cpu" if assumed else name)
    with assume_device(name) if assumed else contextlib.nullcontext():
        row = describe(name) if assumed else device_profile(device)
        kinds: tuple[Any, ...] = ("e4m3", "e5m2")
        formats = [format_for(device, kind) for kind in kinds]
        casts = {
            refusal: None
            for plan in _cast_plans(device)
            if (refusal := cast.triton_refusal(torch.ones((1, 1), device=device), plan)) is not None
        }
        found = None if sizes is None else matmuls(device, row, sizes)
        tested = self_test(device)
    return {
        "device": name,
        "assumed": assumed,
        "product": row.product,
        "arch": row.arch,
        "vendor": row.vendor,
        "formats": {fmt.name: fmt.max for fmt in formats},
        "why": row.why,
        "native": [op for op in OPS if op in row.native],
        "not_native": dict(row.refusals),
        "casts_by_reference": list(casts),  # why; empty where Triton kernels cast
        "alignment_bytes": row.alignment,
        "alignment": row.alignment_note,
        "peak_bf16": row.peak_bf16,
        "peak_fp8": row.peak_fp8,
        "peak_source": row.peak_source,
        "matmul": found,
        "self_test": tested,
    }


def report(assume: list[str], sizes: tuple[int, int, int] | None = None) -> Report:
    """What the command prints, as one JSON-able value: every visible device, then those assumed."""
    visible = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    found = [examine(name, False, sizes) for name in visible]
    found += [examine(name, True, sizes) for name in dict.fromkeys(assume)]
    ok = all(d["self_test"]["ok"] for d in found)
    return {"ok": ok, "versions": versions(), "matmul_sizes": sizes, "devices": found}


# ----------------------------------------------------------------------------------------- printing


def _paragraph(label: str, text: str, indent: int = 2) -> str:
    """A label in a column of its own and text that stays right of it."""
    start = " " * indent + f"{label:13} "
    return textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start))


def _by_reason(reasons: dict[str, str]) -> list[str]:
    """ "a, b: reason" for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [f"{', '.join(who)}: {reason}" for reason, who in names.items()]


def _lines(label: str, texts: list[str]) -> list[str]:
    return [_paragraph(label if i == 0 else "", text) for i, text in enumerate(texts)]


def _tera(flops: float | None) -> str:
    return "unknown" if flops is None else f"{flops / 1e12:g} TFLOP/s"


def _show_matmul(found: list[Report], alignment: int) -> list[str]:
    gemms = ("forward", "dgrad", "wgrad")
    shapes = {entry["gemm"]: entry["shape"] for entry in found}
    text = "; ".join(f"{gemm} {'x'.join(map(str, shapes[gemm]))}" for gemm in gemms)
    lines = [_paragraph("matmul", f"rows x columns x contraction: {text}")]
    lines.append(" " * 16 + f"{'recipe':20}" + "".join(f"{gemm:16}" for gemm in gemms).rstrip())
    refusals: dict[str, dict[str, str]] = {}
    orders: dict[str, dict[str, str]] = {}
    for i in range(0, len(found), 3):
        cells = "".join(f"{entry['impl'] + '*' * entry['padded']:16}" for entry in found[i : i + 3])
        lines.append(" " * 16 + f"{found[i]['recipe']:20}" + cells.rstrip())
        for entry in found[i : i + 3]:
            for name, reason in entry["refusals"].items():
                refusals.setdefault(f"{name}: {reason}", {})[entry["recipe"]] = ""
            if entry["order"]:
                names = ", ".join(entry["order"])
                measured = "" if entry["order"] == tuple(IMPLEMENTATIONS) else ", as measured"
                orders.setdefault(names + measured, {})[entry["recipe"]] = ""
    if any(entry["padded"] for entry in found):
        lines.append(_paragraph("", f"* padded inside: not all multiples of {alignment}"))
    everyone = len({entry["recipe"] for entry in found})

    def told(by: dict[str, dict[str, str]]) -> list[str]:
        return [
            text if len(who) == everyone else f"{text} ({', '.join(who)})"
            for text, who in by.items()
        ]

    lines += _lines("chosen", [f"the first that takes it of {order}" for order in told(orders)])
    return lines + _lines("refused", told(refusals))


def _show_self_test(tested: Report) -> list[str]:
    failed = [c for c in tested["checks"] if not c["ok"]]
    kinds: dict[str, int] = {}
    for check in tested["checks"]:
        kind = check["name"].partition(" ")[0]
        kinds[kind] = kinds.get(kind, 0) + 1
    names = {
        "decode": "tables of codes",
        "cast": "casts",
        "kernel": "kernel casts",
        "product": "products",
    }
    counts = ", ".join(f"{count} {names[kind]}" for kind, count in kinds.items())
    if not failed:
        return [_paragraph("self-test", f"passed: {counts} ({tested['seconds']:.1f} s)")]
    text = f"FAILED: {len(failed)} of {counts} ({tested['seconds']:.1f} s)"
    return [_paragraph("self-test", text)] + [
        _paragraph("", f"{c['name']}: {c['complaint']}") for c in failed
    ]


def _show_device(found: Report) -> list[str]:
    name = found["device"]
    title = f"{name} (assumed)" if found["assumed"] else name
    if found["product"]:
        title += f": {found['product']}, {found['arch']}"
    formats = ", ".join(f"{fmt} (maximum {top:g})" for fmt, top in found["formats"].items())
    lines = ["", title, _paragraph("formats", f"{formats}. {found['why']}")]
    native = ", ".join(found["native"]) or "nothing"
    if found["assumed"]:
        native += ". This is what the architecture has; here it is assumed, and all is emulated."
    lines.append(_paragraph("native", native))
    lines += _lines("not native", _by_reason(found["not_native"]) or ["nothing"])
    why = " ".join(found["casts_by_reference"])
    lines.append(_paragraph("casts", f"the PyTorch reference: {why}" if why else "Triton kernels"))
    lines.append(_paragraph("alignment", f"{found['alignment_bytes']} bytes: {found['alignment']}"))
    peak = f"bf16 {_tera(found['peak_bf16'])}, FP8 {_tera(found['peak_fp8'])}"
    source = f" ({found['peak_source']})" if found["peak_source"] else ""
    lines.append(_paragraph("peak", peak + source))
    if found["matmul"] is not None:
        lines += _show_matmul(found["matmul"], found["alignment_bytes"])
    return lines + _show_self_test(found["self_test"])


def render(found: Report) -> str:
    """The report for a reader."""
    there = {
        "float8": found["versions"]["float8"] or "not installed (a checkout)",
        "Python": found["versions"]["python"],
        "torch": found["versions"]["torch"],
        "CUDA": found["versions"]["cuda"],
        "ROCm": found["versions"]["rocm"],
        "triton": found["versions"]["triton"],
    }
    lines = [
        _paragraph("versions", ", ".join(f"{k} {v or '-'}" for k, v in there.items()), indent=0)
    ]
    for device in found["devices"]:
        lines += _show_device(device)
    return "\n".join(lines)


# What is sold with an architecture, for readers of the table.
_CARDS = {
    "sm_80": "A100",
    "sm_86": "A10, RTX 30",
    "sm_89": "L4, L40S, RTX 40",
    "sm_90": "H100, H200",
    "sm_100": "B200",
    "sm_103": "B300",
    "sm_120": "RTX 50",
    "gfx90a": "MI200",
    "gfx942": "MI300",
    "gfx950": "MI350",
    "gfx1200": "RX 9060",
    "gfx1201": "RX 9070",
}


def support_table() -> str:
    """docs/support.md: who multiplies in forward on every architecture that devices.py knows."""
    names = ("tensorwise", "rowwise", "blockwise", "mxfp8")
    table = [["architecture", "cards", "e4m3", *names, "experts"]]
    table.append(["---"] * len(table[0]))
    reasons: dict[str, int] = {}
    cpu = torch.device("cpu")

    def cell(impl: str, refusals: dict[str, str]) -> str:
        """Who, and why neither torch's own nor, where it is emulated, the portable kernel."""
        missed = ("cublas", "triton") if impl == "torch" else ("cublas",)
        why = dict.fromkeys(refusals[name].rstrip(".") for name in missed if name in refusals)
        notes = ", ".join(str(reasons.setdefault(reason, len(reasons) + 1)) for reason in why)
        return ("emulated" if impl == "torch" else impl) + (f" [{notes}]" if notes else "")

    for arch in devices._TABLE:
        row = describe(arch)
        with assume_device(arch):
            e4m3 = format_for(cpu, "e4m3")
            plans = [RECIPES[name].plan(cpu)[0] for name in names]
        pairs = dict(zip(names, map(_operands, filter(None, plans)), strict=True))
        cells = [cell(*_chosen(row, *pair)[:2]) for pair in pairs.values()]
        a, b = pairs["rowwise"]
        stack = b._replace(block=(1, *b.block))
        refusals = _refusals(grouped.IMPLEMENTATIONS, row, a, stack)
        first = next(name for name in grouped.IMPLEMENTATIONS if name not in refusals)
        cells.append(cell(first, refusals))
        table.append([arch, _CARDS.get(arch, ""), f"{e4m3.name}, {e4m3.max:g}", *cells])
    body = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    notes = "\n".join(f"- [{number}] {reason}" for reason, number in reasons.items())
    return _SUPPORT.format(table=body, notes=notes)


_SUPPORT = """\
# What runs where

This page is what `python -m float8 support` prints; a test compares the two.
What was run on hardware, and what only compiled, is in the README.

Who multiplies in forward, by recipe, on each architecture, and the format that its tensor cores
have with its largest number. `cublas` is torch's own `scaled_mm` (cuBLASLt or CUTLASS on NVIDIA,
hipBLASLt on AMD); `hopper` and `triton` are kernels of this library, which multiply experts
wherever these are not emulated (in MX blocks always the Triton kernel); `torch_bf16` multiplies MX
blocks, dequantised, in bf16, which holds their values; *emulated* is in float32, in the same
formats and blocks: for numerics, and slow. A number says why torch's own, and where it is emulated
the Triton kernel, does not multiply. Sizes are any: what an implementation needs to be aligned is
padded inside.

`python -m float8 doctor` says the same of the devices of a machine, less what its build of torch
lacks, and tests them. With `--matmul M N K` it says who multiplies in each recipe and product, and
why not another; with `--assume gfx942`, the same of any row of the table.

{table}

{notes}
"""

# ------------------------------------------------------------------------------------- the commands


def architecture(name: str) -> str:
    """A converter for argparse: a known architecture."""
    try:
        return describe(name).arch
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size(text: str) -> int:
    """A converter for argparse: the length of a dimension."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; M, N and K are whole numbers from 0"
        )
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    assume = "report on this architecture too, such as gfx942, emulated on the CPU; repeatable"
    matmul = "which implementation multiplies M tokens by a weight of N out and K in features"
    add("--assume", type=architecture, action="append", default=[], metavar="NAME", help=assume)
    add("--matmul", type=size, nargs=3, metavar=("M", "N", "K"), help=matmul)
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """The command: 0, or 1 where a self-test failed."""
    found = report(args.assume, None if args.matmul is None else tuple(args.matmul))
    print(json.dumps(found, allow_nan=False) if args.json else render(found))
    return 0 if found["ok"] else 1
