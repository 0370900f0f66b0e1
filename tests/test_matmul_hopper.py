"""The Gluon matrix product against float64 on the scaled operands, on a GPU of sm_90 where there is
one and emulated anywhere (gluon_emulator.py); and its machine code.

Shape letters: M rows of a, N rows of b, K the contraction.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from recorders import machine_code
from torch import Tensor

from float8 import E4M3FN, E4M3FNUZ, E5M2, FULL
from float8.devices import device_profile
from float8.kernels import matmul_hopper
from float8.kernels.matmul_hopper import BLOCKS, fits, refusal, scaled_mm_hopper
from float8.scaling import Block, scale_layout, scale_shape
from float8.testing import assert_same_bytes, deterministic, missing, relative_error

pytest.importorskip("triton.experimental.gluon")
from gluon_emulator import emulated

from float8.kernels import matmul_hopper_triton


def no_hopper() -> str | None:
    if (reason := missing("fp8")) is not None:
        return reason
    arch = device_profile("cuda").arch
    return None if arch == "sm_90" else f"needs sm_90, this is {arch}"


HOPPER = pytest.mark.skipif(no_hopper() is not None, reason=no_hopper() or "")
DEVICES = ["cpu", pytest.param("cuda", marks=HOPPER)]
FORMATS = {"e4m3": E4M3FN, "e5m2": E5M2}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    mode: matmul_hopper.Mode
    fast: bool
    a: str
    b: str
    out: torch.dtype


CASES = [
    Case("tensorwise", True, "e4m3", "e4m3", BF16),
    Case("tensorwise", False, "e5m2", "e4m3", FP32),
    Case("rowwise", True, "e4m3", "e5m2", FP16),
    Case("rowwise", False, "e4m3", "e4m3", BF16),
    Case("block", False, "e4m3", "e4m3", BF16),
    Case("block", False, "e5m2", "e4m3", FP32),
    Case("block_t", False, "e4m3", "e5m2", FP16),
    Case("block_t", False, "e4m3", "e4m3", BF16),
    Case("block2", False, "e4m3", "e4m3", BF16),
    Case("block2", False, "e5m2", "e5m2", FP32),
]
ONE_OF_EACH = [CASES[i] for i in (0, 3, 4, 7, 8)]
each_device = pytest.mark.parametrize("device", DEVICES)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.mode}-{c.a}-{c.b}")
each_mode = pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda c: c.mode)


@pytest.fixture(autouse=True)
def _cublas_may_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 products are cuBLAS's, which torch refuses under deterministic algorithms."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class Operands(NamedTuple):
    a_MK: Tensor
    b_NK: Tensor
    scale_a: Tensor
    scale_b: Tensor


def operands(m: int, k: int, n: int, case: Case, device: str) -> Operands:
    """Random data, and scales over three decades."""

    def one(rows: int, kind: str, block: Block) -> tuple[Tensor, Tensor]:
        fmt = FORMATS[kind]
        data = torch.randn(rows, k, device=device) * fmt.max / 8
        exponent = torch.rand(scale_shape((rows, k), block), device=device) * 10 - 8
        scale = torch.exp2(exponent - fmt.max_exponent)
        return data.clamp(-fmt.max, fmt.max).to(fmt.dtype), scale_layout(scale, block)

    block_a, block_b = BLOCKS[case.mode]
    (a, scale_a), (b, scale_b) = one(m, case.a, block_a), one(n, case.b, block_b)
    return Operands(a, b, scale_a, scale_b)


def values(data: Tensor, scale: Tensor, block: Block) -> Tensor:
    """An operand in float64: element i has the scale of block i // size."""
    scale = scale.double()
    for dim, (n, size) in enumerate(zip(data.shape, block, strict=True)):
        index = torch.arange(n, device=data.device)
        index = torch.zeros_like(index) if size == FULL or scale.shape[dim] == 1 else index // size
        scale = scale.index_select(dim, index)
    return data.double() * scale


def multiply(x: Operands, case: Case, seed: int = 0, **options: Any) -> Tensor:
    args = (*x, case.mode, case.out, case.fast)
    with deterministic():  # an output that nobody wrote is NaN
        if x.a_MK.is_cuda:
            return scaled_mm_hopper(*args, **options)
        with emulated(matmul_hopper_triton, "matmul_kernel", seed):
            return scaled_mm_hopper(*args, **options)


def assert_product(out: Tensor, x: Operands, case: Case, added: Tensor | float = 0.0) -> None:
    """Every element, and all of them, within what the sums and the output's dtype round away.

    A Hopper tensor core aligns the products of a step to the largest and keeps 14 bits or so, of
    the running sum too: that is small beside the sum of the magnitudes, also where an element's
    own sum cancels. A scale of another row or block is not: it changes an element by about its
    size, which is 1 / sqrt(K) of that sum or more.
    """
    block_a, block_b = BLOCKS[case.mode]
    a, b = values(x.a_MK, x.scale_a, block_a), values(x.b_NK, x.scale_b, block_b)
    truth, magnitude = a @ b.t() + added, a.abs() @ b.abs().t() + abs(added)
    exact = (a.shape[1] + 8) * 2.0**-24  # float32, in which the emulator adds
    kept = exact if not out.is_cuda else 2.0**-8 if case.fast else 2.0**-9
    eps = torch.finfo(out.dtype).eps / 2
    tiny = torch.finfo(out.dtype).tiny * 2 * eps
    error = (out.double() - truth).abs()
    wrong = ~(error <= kept * magnitude + eps * truth.abs() + tiny)
    assert not wrong.any(), (case, a.shape, b.shape, wrong.nonzero()[:5], wrong.sum())
    rounding = exact if not out.is_cuda else 2.0**-10 if case.fast else 2.0**-11
    assert relative_error(out, truth) <= rounding + eps, (case, a.shape, b.shape)


SIZES = (1, 127, 128, 130, 300, 512, 1000)
INNER = (16, 128, 144, 304, 512, 1008)


@each_device
@each_case
def test_product(case: Case, device: str) -> None:
    pairs = list(product(SIZES, SIZES)) if device == "cuda" else [(1, 300), (130, 1), (300, 520)]
    for i, (m, n) in enumerate(pairs):
        x = operands(m, INNER[(i + m) % len(INNER)], n, case, device)
        out = multiply(x, case, seed=i)
        assert out.dtype == case.out
        assert out.shape == (m, n) and out.is_contiguous()
        assert_product(out, x, case)


@each_device
@each_mode
def test_many_tiles_and_many_turns_of_the_ring(case: Case, device: str) -> None:
    """More tiles than a GPU has multiprocessors, in groups of rows that do not divide; a K of many
    blocks, and one of fewer than the ring has."""
    cuda = [(1537, 304, 3081), (130, 4112, 300)]
    for m, k, n in cuda if device == "cuda" else [(1200, 144, 300), (64, 1552, 260)]:
        x = operands(m, k, n, case, device)
        assert_product(multiply(x, case), x, case)


@each_device
@each_mode
def test_every_run_gives_the_same_bytes(case: Case, device: str) -> None:
    """On a CPU: in whatever order the warps run, and for any number of programs."""
    x = operands(300, 912, 520, case, device)
    first = multiply(x, case)
    for seed in range(1, 21):
        assert_same_bytes(multiply(x, case, seed), first)


@each_device
@each_mode
def test_bias_and_accumulation(case: Case, device: str) -> None:
    """A bias is added before the one rounding; the product is then added to what is there, which
    may be a part of a larger matrix, whose rows may lie on 16 bytes or not."""
    for (m, k, n), pitch, out_dtype, bias_dtype in (
        ((130, 304, 300), 320, FP32, None),
        ((130, 144, 300), 301, BF16, FP32),
        ((300, 128, 130), 144, BF16, None),
        ((1, 272, 260), 260, FP32, BF16),
    ):
        c = case._replace(out=out_dtype)
        x = operands(m, k, n, c, device)
        bias = None if bias_dtype is None else torch.randn(n, device=device).to(bias_dtype) * 9
        whole = torch.randn(m + 2, pitch, device=device).to(out_dtype)
        before, out = whole.clone(), whole[:m, :n]
        assert multiply(x, c, out=out, bias=bias) is out
        assert_same_bytes(out, before[:m, :n] + multiply(x, c, bias=bias))
        whole[:m, :n] = before[:m, :n]
        assert_same_bytes(whole, before)  # nothing beside it was written
        if bias is not None:
            assert_product(multiply(x, c, bias=bias), x, c, bias.double())


def padded(x: Tensor) -> Tensor:
    """The same values as a part of a matrix that is NaN elsewhere, rows on 16 bytes."""
    rows, k = x.shape
    whole = torch.full((rows + 3, k + 32 + -k % 16), 0x7F, dtype=torch.uint8, device=x.device)
    part = whole.view(x.dtype)[1 : rows + 1, 16 : 16 + k]
    return part.copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row-major": lambda s: s.clone(memory_format=torch.contiguous_format),
    "column-major": lambda s: s.t().clone(memory_format=torch.contiguous_format).t(),
    "every other": lambda s: s.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2],
    "a part, aligned": lambda s: torch.nn.functional.pad(
        s.t(), (4, 4 + -s.shape[0] % 4, 1, 1), value=torch.nan
    )[1:-1, 4 : 4 + s.shape[0]].t(),
}


@each_device
@each_mode
def test_parts_of_larger_matrices_and_scales_of_any_strides(case: Case, device: str) -> None:
    """K ends where the operand does, not at the next 16 bytes or 128 elements: what lies there is
    NaN."""
    for m, k, n in ((130, 300, 132), (128, 7, 1), (1, 257, 300)):
        x = operands(m, -(-k // 16) * 16, n, case, device)
        block_a, block_b = BLOCKS[case.mode]
        x = Operands(
            padded(x.a_MK[:, :k]), padded(x.b_NK[:, :k]),
            scale_layout(x.scale_a[:, : scale_shape((m, k), block_a)[1]], block_a),
            scale_layout(x.scale_b[:, : scale_shape((n, k), block_b)[1]], block_b),
        )  # fmt: skip
        if m == 1:  # a single row may have any stride
            x = x._replace(a_MK=x.a_MK.as_strided((1, k), (5, 1)))
        expected = multiply(x, case)
        assert_product(expected, x, case)
        for rewrite in LAYOUTS.values():
            y = x._replace(scale_a=rewrite(x.scale_a), scale_b=rewrite(x.scale_b))
            assert_same_bytes(multiply(y, case), expected)


@each_device
def test_one_scale_for_all_rows_of_one_operand(device: str) -> None:
    case = Case("rowwise", False, "e4m3", "e4m3", BF16)
    x = operands(130, 256, 300, case, device)
    for single in (x._replace(scale_a=x.scale_a[:1]), x._replace(scale_b=x.scale_b[:1])):
        expanded = single._replace(
            scale_a=single.scale_a.expand(130, 1), scale_b=single.scale_b.expand(300, 1)
        )
        out = multiply(single, case)
        assert_same_bytes(out, multiply(expanded, case))
        assert_product(out, single, case)


@each_device
@each_mode
def test_a_nan_scale_stays_in_its_rows_or_columns(case: Case, device: str) -> None:
    """Those of the last block, which is a part one, and of no row beyond M that a tile reads."""
    m, k, n = 258, 272, 390
    x = operands(m, k, n, case, device)
    clean = multiply(x, case)
    for dim, (rows, size) in enumerate(zip((m, n), (b[0] for b in BLOCKS[case.mode]), strict=True)):
        scales = [x.scale_a.clone(), x.scale_b.clone()]
        scales[dim][-1, -1] = torch.nan
        out = multiply(x._replace(scale_a=scales[0], scale_b=scales[1]), case)
        hit = torch.zeros(rows, dtype=torch.bool, device=device)
        hit[0 if size == FULL else (rows - 1) // size * size :] = True
        hit = (hit[:, None] if dim == 0 else hit[None, :]).expand(m, n)
        assert torch.equal(out.isnan(), hit)
        assert_same_bytes(out.where(~hit, 0), clean.where(~hit, 0))


@each_device
@pytest.mark.parametrize("mode", ["tensorwise", "rowwise"])
def test_two_tiny_scales_do_not_underflow_before_they_meet_the_sum(
    mode: matmul_hopper.Mode, device: str
) -> None:
    case = Case(mode, False, "e4m3", "e4m3", FP32)
    x = operands(16, 512, 16, case, device)
    data = torch.full_like(x.a_MK, 448.0)
    scales = (torch.full_like(s, 2.0**-80) for s in (x.scale_a, x.scale_b))
    out = multiply(Operands(data, data, *scales), case)
    expected = 448.0**2 * 512 * 2.0**-160
    assert torch.all((out.double() - expected).abs() <= 2.0**-10 * expected)


@HOPPER
@each_mode
def test_in_a_cuda_graph(case: Case) -> None:
    x, y = (operands(300, 512, 520, case, "cuda") for _ in range(2))
    expected = multiply(y, case)
    buffers = Operands(*(t.clone() for t in x))
    multiply(buffers, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = multiply(buffers, case)
    for buffer, new in zip(buffers, y, strict=True):
        buffer.copy_(new)
    graph.replay()
    assert_same_bytes(out, expected)


# ---- what is refused ---------------------------------------------------------------------------


def test_operands_that_fit() -> None:
    x = torch.zeros(64, 256, dtype=torch.uint8).view(E4M3FN.dtype)
    assert fits(x, x) is None
    assert fits(x[:, :7], x.view(E5M2.dtype)[5:, :7]) is None
    assert fits(x[3:4, 16:32], x[:1, 32:48].expand(1, 16)) is None
    assert fits(x.flatten()[:16].view(16, 1).t(), x[:, :16]) is None


def test_why_operands_do_not_fit() -> None:
    x = torch.zeros(64, 256, dtype=torch.uint8).view(E4M3FN.dtype)
    strides = "the Hopper kernel reads contiguous rows, each on 16 bytes"
    begins = "bytes after a multiple of 16; " + strides
    fnuz, narrow = x.view(E4M3FNUZ.dtype), x.flatten()[:600].view(60, 10)
    for a, b, reason in (
        (x, fnuz, "the second operand is e4m3fnuz; Hopper multiplies e4m3fn and e5m2"),
        (x[:0], x, "the first operand is 0 x 256; the Hopper kernel takes 1 to 1073741824"),
        (x, x[:, :0], "the second operand is 64 x 0; the Hopper kernel takes 1 to 1073741824"),
        (x.t(), x, f"the first operand has strides (1, 256) and begins 0 {begins}"),
        (x, x[:, 1:], f"the second operand has strides (256, 1) and begins 1 {begins}"),
        (x[:1].expand(8, 256), x, f"the first operand has strides (0, 1) and begins 0 {begins}"),
        (x, x[:, ::2], f"the second operand has strides (256, 2) and begins 0 {begins}"),
        (narrow, x[:, :10], f"the first operand has strides (10, 1) and begins 0 {begins}"),
    ):  # fmt: skip
        assert fits(a, b) == reason


@pytest.fixture
def asked_anew() -> Iterator[None]:
    refusal.cache_clear()
    yield
    refusal.cache_clear()


def test_this_triton_compiles_it(asked_anew: None) -> None:
    assert refusal() is None


def test_a_triton_without_gluon_is_refused(
    asked_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "float8.kernels.matmul_hopper_triton")
    monkeypatch.delattr(sys.modules["float8.kernels"], "matmul_hopper_triton")
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    assert str(refusal()).startswith("Triton does not have Gluon as the Hopper kernel uses it (")


def names_of_gluon() -> set[tuple[str, str]]:
    """All that the device code's file takes from modules of Gluon's language, as (module, name)."""
    nodes = ast.walk(ast.parse(Path(matmul_hopper_triton.__file__).read_text()))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    modules = {
        name: module
        for name, module in vars(matmul_hopper_triton).items()
        if isinstance(module, ModuleType) and "gluon.language" in module.__name__
    }
    return {
        (node.value.id, node.attr)
        for node in attributes
        if isinstance(node.value, ast.Name) and node.value.id in modules
    }


def test_a_gluon_with_other_names_is_refused(
    asked_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = names_of_gluon()
    assert {("gl", "associative_scan"), ("gl", "warp_specialize"), ("tma", "store_wait")} <= used
    for module, name in used:
        refusal.cache_clear()
        with monkeypatch.context() as patch:
            patch.delattr(getattr(matmul_hopper_triton, module), name)
            assert refusal() == f"Triton's Gluon does not have {module}.{name}"
    refusal.cache_clear()
    monkeypatch.delattr(matmul_hopper_triton.tma, "store_wait")
    monkeypatch.delattr(matmul_hopper_triton.gl, "split")
    assert refusal() == "Triton's Gluon does not have gl.split, tma.store_wait"


# ---- machine code ------------------------------------------------------------------------------


def test_machine_code() -> None:
    """Compiled for sm_90, which need not be here: FP8 matrix products of 64 x 128, TMA, registers
    moved to the warpgroups that multiply; nothing spilled, nothing made to wait, and it fits."""
    kernels = machine_code("cross_compile_hopper.py")
    assert {kernel["mode"] for kernel in kernels} == set(BLOCKS)
    assert {kernel["groups"] for kernel in kernels} == {"none", "rows", "columns"}
    for kernel in kernels:
        kinds = ".".join(kernel["formats"].split())
        assert kernel["products"] == [f"m64n128k32.f32.{kinds}"], kernel
        vectors = {"block": 2, "block_t": 2, "block2": 4}.get(kernel["mode"], 0)
        assert kernel["loads"] == 4 + vectors, kernel
        on_16_bytes, adds = kernel["n"] % 16 == 0, kernel["accumulate"]
        assert (kernel["stores"] > 0) == (on_16_bytes and not adds), kernel
        lanes = {"fp32": "v4.f32", "bf16": "v8.bf16", "fp16": "v8.f16"}[kernel["output"]]
        assert kernel["adds"] == ([lanes] if on_16_bytes and adds else []), kernel
        assert {24, 240} <= set(kernel["registers"]), kernel
        scales = {"block": 512, "block_t": 1024, "block2": 1536}.get(kernel["mode"], 0)
        assert kernel["expects"] == [(128 + 256) * 128 + scales], kernel
        # A word, the program's number, may be kept in memory from the kernel's start to that of the
        # warps' loops; with sums to add to, also words that are read once a tile.
        words = (40 if kernel["accumulate"] else 12) if kernel["mode"] == "block2" else 0
        assert kernel["spills"] <= words, kernel
        assert kernel["warnings"] == [], kernel
        assert kernel["shared"] <= 227 * 1024, kernel
