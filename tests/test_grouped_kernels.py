"""The kernels of grouped products against float64 on the scaled operands of each group, on a GPU
where there is one and without: the Gluon kernel emulated (gluon_emulator.py), the Triton kernel in
Triton's interpreter, as several architectures would have it.

Shape letters: T tokens, G groups; M rows and N columns of a group's output, K the contraction; P
columns of a column layout. What is of no group, and matrices of groups without tokens, are NaN.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from test_grouped import CASES, draw, ends, spans
from torch import Tensor

import float8
from float8 import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FULL, Float8Format
from float8.devices import describe
from float8.kernels import grouped
from float8.kernels.matmul import Operand
from float8.kernels.quantize_grouped import padded_tokens
from float8.scaling import Block, decode_scale, num_blocks, scale_layout, scale_shape
from float8.testing import assert_same_bytes, deterministic, needs, relative_error

pytest.importorskip("triton.experimental.gluon")
from gluon_emulator import emulated
from test_matmul_hopper import HOPPER
from test_matmul_triton import NUMPY, exact_interpreter  # noqa: F401  (a fixture)

from float8.kernels import grouped_hopper, grouped_triton, matmul_hopper_triton

pytestmark = NUMPY
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Mode(NamedTuple):
    """Blocks (rows, contraction) of a and of b, and the scales'."""

    a: Block
    b: Block
    e8m0: bool = False


ROWS = {
    "tensorwise": Mode((FULL, FULL), (FULL, FULL)),
    "rowwise": Mode((1, FULL), (1, FULL)),
    "row x tensor": Mode((1, FULL), (FULL, FULL)),
    "1x128 x 128x128": Mode((1, 128), (128, 128)),
    "1x128 x 1x128": Mode((1, 128), (1, 128)),
}
COLUMNS = {
    "tensorwise": ROWS["tensorwise"],
    "rowwise": ROWS["rowwise"],
    "tensor x row": Mode((FULL, FULL), (1, FULL)),
    "1x128 x 1x128": ROWS["1x128 x 1x128"],
    "1x128 x 128x128": ROWS["1x128 x 128x128"],
    "128x128 x 1x128": Mode((128, 128), (1, 128)),
}
# What the Triton kernel takes besides.
MORE_ROWS = {"mx": Mode((1, 32), (1, 32), True), "1x64 x 3x64": Mode((1, 64), (3, 64))}
MORE_COLUMNS = {"mx": MORE_ROWS["mx"], "3x64 x 16x64": Mode((3, 64), (16, 64), True)}


class Problem(NamedTuple):
    """Operands of one product of groups, whose contraction is their last dimension."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    offs: Tensor
    mode: Mode
    sizes: list[int]

    @property
    def columns(self) -> bool:
        return self.b.ndim == 2


def data(shape: tuple[int, ...], fmt: Float8Format) -> Tensor:
    return (torch.randn(shape) * fmt.max / 8).clamp(-fmt.max, fmt.max).to(fmt.dtype)


def scale(shape: tuple[int, ...], fmt: Float8Format, mode: Mode) -> Tensor:
    """Over three decades."""
    if mode.e8m0:
        codes = torch.randint(-8, 3, shape) - fmt.max_exponent + 127
        return codes.to(torch.uint8).view(E8M0.dtype)
    return torch.exp2(torch.rand(shape) * 10 - 8 - fmt.max_exponent)


def poison(x: Tensor, at: Any) -> None:
    if x.dtype.itemsize == 1:
        x.view(torch.uint8)[at] = 0x80 if "fnuz" in str(x.dtype) else 0xFF
    else:
        x[at] = torch.nan


FORMATS = (E4M3FN, E4M3FN)


def rows(
    sizes: list[int],
    rest: int,
    n: int,
    k: int,
    mode: Mode,
    device: str,
    formats: tuple[Float8Format, Float8Format] = FORMATS,
) -> Problem:
    t, g = sum(sizes) + rest, len(sizes)
    a, b = data((t, k), formats[0]), data((g, n, k), formats[1])
    scale_a = scale_layout(scale(scale_shape((t, k), mode.a), formats[0], mode), mode.a)
    block = (1, *mode.b)
    scale_b = scale_layout(scale(scale_shape((g, n, k), block), formats[1], mode), block)
    for x, block in ((a, (1, 1)), (scale_a, mode.a)):
        if block[0] == 1:
            poison(x, slice(sum(sizes), None))
    empty = [i for i, size in enumerate(sizes) if size == 0]
    poison(b, empty)
    poison(scale_b, empty)
    parts = (x.to(device) for x in (a, b, scale_a, scale_b))
    return Problem(*parts, ends(sizes, device), mode, sizes)


def columns(
    sizes: list[int],
    rest: int,
    m: int,
    n: int,
    mode: Mode,
    device: str,
    formats: tuple[Float8Format, Float8Format] = FORMATS,
) -> Problem:
    """As ``quantize_grouped`` makes them: zeros after a group, up to a multiple of 128."""
    widths = [-(-size // 128) * 128 for size in sizes]
    p = padded_tokens(sum(sizes) + rest, len(sizes))
    parts = []
    for length, block, fmt in ((m, mode.a, formats[0]), (n, mode.b, formats[1])):
        x, lines = data((length, p), fmt), num_blocks(length, block[0])
        for (start, end), size in zip(spans(widths), sizes, strict=True):
            x.view(torch.uint8)[:, start + size : end] = 0
        poison(x, (slice(None), slice(sum(widths), None)))
        if block[1] == FULL:
            s = scale((len(sizes), lines), fmt, mode)
            poison(s, [i for i, size in enumerate(sizes) if size == 0])
        else:
            s = scale_layout(scale((lines, p // block[1]), fmt, mode), block)
            poison(s, (slice(None), slice(sum(widths) // block[1], None)))
        parts.append((x.to(device), s.to(device)))
    (a, scale_a), (b, scale_b) = parts
    return Problem(a, b, scale_a, scale_b, ends(widths, device), mode, sizes)


def values(x: Tensor, s: Tensor, block: Block) -> Tensor:
    """An operand in float64: element i has the scale of block i // size."""
    s = decode_scale(s).double()
    for dim, (n, size) in enumerate(zip(x.shape, block, strict=True)):
        index = torch.arange(n, device=x.device)
        s = s.index_select(dim, torch.zeros_like(index) if size == FULL else index // size)
    return x.double() * s


def groups(x: Problem) -> list[tuple[Tensor, Tensor]]:
    """Both operands of each group in float64."""
    pairs = []
    for g, (start, end) in enumerate(spans([-(-s // 128) * 128 for s in x.sizes])):
        if not x.columns:
            rows = slice(*spans(x.sizes)[g])
            whole = x.mode.a[0] == FULL
            scale_a = x.scale_a if whole else x.scale_a[rows]
            a = values(x.a[rows], scale_a, x.mode.a)
            pairs.append((a, values(x.b[g], x.scale_b[g], x.mode.b)))
            continue
        pair = []
        for data, s, block in ((x.a, x.scale_a, x.mode.a), (x.b, x.scale_b, x.mode.b)):
            own = s[g, :, None] if block[1] == FULL else s[:, start // block[1] : end // block[1]]
            pair.append(values(data[:, start:end], own, block))
        pairs.append((pair[0], pair[1]))
    return pairs


def through_op(x: Problem, out_dtype: torch.dtype, impl: str, fast: bool = False) -> Tensor:
    if x.columns:
        return float8.ops.grouped_wgrad(*x[:5], *x.mode[:2], out_dtype, fast, impl)
    last = (x.offs, x.mode.a, (1, *x.mode.b[::-1]), out_dtype, fast, impl)
    return float8.ops.grouped_mm(x.a, x.b.mT, x.scale_a, x.scale_b.mT, *last)


class Kernel(NamedTuple):
    name: str
    device: str
    arch: str = "sm_90"  # that the CPU is

    def __call__(
        self,
        x: Problem,
        out_dtype: torch.dtype = BF16,
        fast: bool = False,
        seed: int = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        mode = x.mode[:2] if x.columns else (x.mode.a, (1, *x.mode.b))
        args = (*x[:5], *mode, out_dtype, fast, *(() if out is None else (out,)))
        module = grouped_hopper if self.name == "hopper" else grouped_triton
        run = module.multiply_columns if x.columns else module.multiply_rows
        profile = describe(self.arch)
        with deterministic():  # an output that nobody wrote is NaN
            if 0 in (*x.a.shape, *x.b.shape):
                return through_op(x, out_dtype, self.name)
            if self.device == "cuda":
                return run(*args)
            if self.name == "triton":
                with mock.patch.object(grouped_triton, "device_profile", lambda device: profile):
                    return run(*args)
            with emulated(matmul_hopper_triton, "matmul_kernel", seed):
                return run(*args)

    def add(self, out: Tensor, x: Problem, fast: bool = False) -> None:
        """Through the op, which is to take the CPU for what the kernel runs on."""
        args = (out, *x[:5], *x.mode[:2], fast, self.name)
        profile = describe(self.arch)
        with deterministic(), contextlib.ExitStack() as stack:
            if self.device == "cpu":
                for module in (grouped, grouped_triton):
                    stack.enter_context(
                        mock.patch.object(module, "device_profile", lambda device: profile)
                    )
                if self.name == "hopper":
                    stack.enter_context(emulated(matmul_hopper_triton, "matmul_kernel", 0))
            float8.ops.grouped_wgrad_add_(*args)

    def formats(self, *formats: Float8Format) -> tuple[Float8Format, ...]:
        """These, in the flavour of the device."""
        fnuz = {E4M3FN: E4M3FNUZ, E5M2: E5M2FNUZ}
        profile = float8.device_profile("cuda") if self.device == "cuda" else describe(self.arch)
        return tuple(fnuz[f] for f in formats) if profile.flavour == "fnuz" else formats

    def rows(self, *args: Any, formats: tuple[Float8Format, ...] = FORMATS) -> Problem:
        return rows(*args, self.device, self.formats(*formats))

    def columns(self, *args: Any, formats: tuple[Float8Format, ...] = FORMATS) -> Problem:
        return columns(*args, self.device, self.formats(*formats))

    def modes(self, columns: bool = False) -> list[Mode]:
        more = MORE_COLUMNS if columns else MORE_ROWS
        return [
            *(COLUMNS if columns else ROWS).values(),
            *(more.values() if self.name == "triton" else ()),
        ]


KERNELS = [
    pytest.param(Kernel("hopper", "cpu"), id="hopper-cpu"),
    pytest.param(Kernel("hopper", "cuda"), id="hopper-cuda", marks=HOPPER),
    # By descriptors, promoted; by pointers, in FNUZ; with scales in the matrix instructions.
    *(
        pytest.param(
            Kernel("triton", "cpu", arch),
            id=f"triton-{arch}",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter"),
        )
        for arch in ("sm_90", "gfx942", "sm_100")
    ),
    pytest.param(Kernel("triton", "cuda"), id="triton-cuda", marks=needs("fp8")),
]
each = pytest.mark.parametrize("kernel", KERNELS)
each_rows = pytest.mark.parametrize("mode", ROWS.values(), ids=list(ROWS))
each_columns = pytest.mark.parametrize("mode", COLUMNS.values(), ids=list(COLUMNS))


@pytest.fixture(autouse=True)
def _cublas_may_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 products are cuBLAS's, which torch refuses under deterministic algorithms."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def assert_products(out: Tensor, x: Problem, fast: bool = False) -> None:
    """Every element within what sums (of tensor cores: see test_matmul_hopper.py) and the output's
    dtype round away; what is of no group, and products of groups without tokens, exactly zero."""
    truth, magnitude = (torch.zeros(out.shape, device=out.device).double() for _ in range(2))
    for g, (a, b) in enumerate(groups(x)):
        at = g if x.columns else slice(*spans(x.sizes)[g])
        truth[at], magnitude[at] = a @ b.t(), a.abs() @ b.abs().t()
    nothing = magnitude == 0
    terms = 128 + max(x.sizes) if x.columns else x.a.shape[1]
    exact = (terms + 8) * 2.0**-24  # float32, in which the emulator adds
    kept = exact if not out.is_cuda else 2.0**-8 if fast else 2.0**-9
    eps, tiny = torch.finfo(out.dtype).eps / 2, torch.finfo(out.dtype).tiny
    error = (out.double() - truth).abs()
    wrong = ~(error <= kept * magnitude + eps * truth.abs() + tiny * eps * 2)
    assert not wrong.any(), (x.mode, x.sizes, wrong.nonzero()[:5], int(wrong.sum()))
    rounding = exact if not out.is_cuda else 2.0**-10 if fast else 2.0**-11
    assert relative_error(out, truth) <= rounding + eps, (x.mode, x.sizes)
    assert not out[nothing].any()


OUTPUTS = ((BF16, (E4M3FN, E4M3FN)), (FP32, (E5M2, E4M3FN)), (FP16, (E4M3FN, E5M2)))
SIZES = (48, 128, 272, 300, 16, 320, 257, 520)  # of which not all lie on 16 bytes in the output


def combinations(modes: list[Mode], case: int, kernel: Kernel) -> list[tuple[int, Mode]]:
    """On a CPU one mode or two for each case, which differ from case to case."""
    chosen = list(enumerate(modes))
    if kernel.device == "cuda":
        return chosen
    if kernel.name == "triton":  # whose interpreter takes 10 ms a tile
        return [chosen[(case + len(kernel.arch)) % len(chosen)]]
    return [chosen[(2 * case + i) % len(chosen)] for i in range(2)]


@each
@pytest.mark.parametrize("case", range(len(CASES)), ids=list(CASES))
def test_groups_of_rows(case: int, kernel: Kernel) -> None:
    sizes, rest = list(CASES.values())[case]
    for i, mode in combinations(kernel.modes(), case, kernel):
        out_dtype, formats = OUTPUTS[(case + i) % 3]
        n, k = SIZES[(case + i) % len(SIZES)], (64, 144, 320)[i % 3]
        x = kernel.rows(sizes, rest, n, k, mode, formats=formats)
        fast = i % 2 == 0
        out = kernel(x, out_dtype, fast, seed=case)
        assert out.shape == (sum(sizes) + rest, n)
        assert out.dtype == out_dtype
        assert out.is_contiguous()
        assert_products(out, x, fast)


@each
@pytest.mark.parametrize("case", range(len(CASES)), ids=list(CASES))
def test_groups_of_columns(case: int, kernel: Kernel) -> None:
    sizes, rest = list(CASES.values())[case]
    for i, mode in combinations(kernel.modes(columns=True), case, kernel):
        out_dtype, formats = OUTPUTS[(case + i) % 3]
        m, n = SIZES[(case + i + 1) % len(SIZES)], SIZES[(case + i) % len(SIZES)]
        if kernel.device == "cpu" and len(sizes) > 12:
            m, n = 48, 16
        x = kernel.columns(sizes, rest, m, n, mode, formats=formats)
        fast = i % 2 == 0
        out = kernel(x, out_dtype, fast, seed=case)
        assert out.shape == (len(sizes), m, n)
        assert out.dtype == out_dtype
        assert out.is_contiguous()
        assert_products(out, x, fast)


@each
def test_a_few_groups_among_many_empty_ones(kernel: Kernel) -> None:
    """More than a warp has lanes, and than four have."""
    count = 1000 if kernel.device == "cuda" else 140 if kernel.name == "hopper" else 40
    for mode in kernel.modes() if kernel.device == "cuda" else kernel.modes()[1:2]:
        sizes = [0] * count
        for at, size in ((3, 1), (31, 130), (32, 7), (count - 11, 70), (count - 2, 128)):
            sizes[at] = size
        x = kernel.rows(sizes, 3, 48, 32, mode)
        assert_products(kernel(x), x)


def test_more_groups_than_the_list_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are the other kernel's."""
    x = Kernel("triton", "cpu", "sm_90").rows([3, 0, 5], 1, 16, 16, ROWS["rowwise"])
    monkeypatch.setattr(grouped_hopper, "MOST", 2)
    multiplied: list[Any] = []
    monkeypatch.setattr(grouped_triton, "multiply_rows", lambda *args: multiplied.append(args))
    monkeypatch.setattr(grouped, "device_profile", lambda device: describe("sm_90"))
    block = 1, *x.mode.b[::-1]
    args = (x.a, x.b.mT, x.scale_a, x.scale_b.mT, x.offs, x.mode.a, block, BF16, False, "hopper")
    float8.ops.grouped_mm(*args)
    assert len(multiplied) == 1


@pytest.mark.parametrize("align", [1, 16, 128])
@each
def test_many_groups_at_random(kernel: Kernel, align: int) -> None:
    """Sizes from 0 to three times their mean, of more tiles than a GPU has multiprocessors."""
    if kernel.device == "cpu":
        pytest.skip("too much for a CPU")
    rng = random.Random(align)
    for mode in kernel.modes():
        x = kernel.rows(draw(rng, 16, align, 300), 5, 768, 400, mode)
        for fast in (False, True):
            assert_products(kernel(x, BF16, fast), x, fast)
    for mode in kernel.modes(columns=True):
        x = kernel.columns(draw(rng, 16, align, 300), 5, 520, 768, mode)
        for fast in (False, True):
            assert_products(kernel(x, BF16, fast), x, fast)


@pytest.mark.parametrize("kernel", [KERNELS[1], KERNELS[-1]])
def test_every_number_of_features_and_groups(kernel: Kernel) -> None:
    for n in (128, 256, 384, 576, 768, 1536):
        for k in (128, 256, 576, 768):
            sizes = draw(random.Random(n + k), 1 + (n + k) // 128 % 7, 1, 100)
            for mode in kernel.modes():
                x = kernel.rows(sizes, 3, n, k, mode)
                assert_products(kernel(x), x)
            for mode in kernel.modes(columns=True):
                x = kernel.columns(sizes, 3, k, n, mode)
                assert_products(kernel(x), x)


@each
@each_rows
def test_two_routings_through_one_launch(mode: Mode, kernel: Kernel) -> None:
    """Nothing of the first is left in the second, for which nothing is prepared anew."""
    for sizes in ([100, 0, 160], [1, 258, 0], [0, 0, 260], [40, 7, 5]):
        x = kernel.rows(sizes, 260 - sum(sizes), 272, 144, mode)
        assert_products(kernel(x), x)
    if kernel.device == "cuda":
        hopper = kernel.name == "hopper"
        cache = matmul_hopper_triton._product if hopper else grouped_triton._launch
        before = cache.cache_info().misses
        kernel(kernel.rows([3, 4, 5], 248, 272, 144, mode))
        assert cache.cache_info().misses == before


@each
@each_columns
def test_two_routings_of_columns_through_one_launch(mode: Mode, kernel: Kernel) -> None:
    for sizes in ([100, 0, 160], [1, 258, 1], [0, 0, 260], [40, 7, 5]):
        x = kernel.columns(sizes, 260 - sum(sizes), 144, 272, mode)
        assert_products(kernel(x), x)


@each
@each_rows
def test_every_run_gives_the_same_bytes(mode: Mode, kernel: Kernel) -> None:
    """On a CPU: in whatever order the warps run, and for any number of programs."""
    x = kernel.rows([70, 0, 129, 3], 9, 300, 400, mode)
    first = kernel(x)
    for seed in range(1, 8 if kernel.name == "hopper" else 2):
        assert_same_bytes(kernel(x, seed=seed), first)


@each
@each_columns
def test_every_run_gives_the_same_bytes_of_columns(mode: Mode, kernel: Kernel) -> None:
    x = kernel.columns([70, 0, 129, 3], 9, 144, 300, mode)
    first = kernel(x)
    for seed in range(1, 8 if kernel.name == "hopper" else 2):
        assert_same_bytes(kernel(x, seed=seed), first)


@pytest.mark.parametrize("kernel", KERNELS[:2])
@each_columns
def test_products_are_added_to_what_is_there(mode: Mode, kernel: Kernel) -> None:
    """As rounded; of a group without tokens nothing is."""
    for n, out_dtype in ((272, FP32), (300, BF16), (301, FP32)):
        x = kernel.columns([70, 0, 129, 3], 9, 144, n, mode)
        out = torch.randn(4, 144, n, device=kernel.device).to(out_dtype)
        before = out.clone()
        assert kernel(x, out_dtype, out=out) is out
        assert_same_bytes(out, before + kernel(x, out_dtype))
        assert_same_bytes(out[1], before[1])


@each
@each_columns
def test_the_op_adds_products_to_what_is_there(mode: Mode, kernel: Kernel) -> None:
    """The same bytes each time, which autograd sees."""
    cases = ((300, BF16), (272, FP32), (301, FP16))
    for n, out_dtype in cases if kernel.device == "cuda" else cases[:1]:
        x = kernel.columns([70, 0, 129, 3], 9, 144, n, mode)
        out = torch.randn(4, 144, n, device=kernel.device).to(out_dtype)
        before, version, again = out.clone(), out._version, out.clone()
        kernel.add(out, x)
        assert out._version > version
        product = torch.zeros_like(out)
        kernel.add(product, x)
        assert_products(product, x)
        assert_same_bytes(out, before + product)
        assert_same_bytes(out[1], before[1])
        kernel.add(again, x)
        assert_same_bytes(again, out)


@each
def test_the_op_adds_nothing_of_no_columns(kernel: Kernel) -> None:
    for sizes, m, n in (([0, 0], 144, 272), ([70, 3], 0, 16), ([70, 3], 16, 0)):
        x = kernel.columns(sizes, 0, m, n, COLUMNS["rowwise"])
        out = torch.randn(2, m, n, device=kernel.device)
        before = out.clone()
        kernel.add(out, x)
        assert_same_bytes(out, before)


@each
@each_rows
def test_nan_of_one_group_stays_there(mode: Mode, kernel: Kernel) -> None:
    """Its tiles reach into the rows of the groups before and after it."""
    sizes = [6, 130, 0, 61, 3]
    x = kernel.rows(sizes, 2, 272, 144, mode)
    clean = kernel(x)
    for g in (1, 3):
        start, end = spans(sizes)[g]
        hit = torch.zeros(sum(sizes) + 2, dtype=torch.bool, device=kernel.device)
        bad = [t.clone() for t in x[:4]]
        poison(bad[1], g)  # data of its matrix
        hit[start:end] = True
        out = kernel(x._replace(b=bad[1]))
        assert torch.equal(out.isnan().all(1), hit)
        assert_same_bytes(out[~hit], clean[~hit])
        poison(bad[0], slice(start, end))
        out = kernel(x._replace(a=bad[0]))
        assert torch.equal(out.isnan().all(1), hit)
        assert_same_bytes(out[~hit], clean[~hit])


RELAID: dict[str, Callable[[Tensor], Tensor]] = {
    "contraction first": lambda t: t.mT.contiguous().mT,
    "off 16 bytes": lambda t: torch.cat([t.view(torch.uint8)] * 2, -1)[..., 1 : 1 + t.shape[-1]]
    .copy_(t.view(torch.uint8))
    .view(t.dtype),
    "rows further apart": lambda t: torch.cat([t.view(torch.uint8)] * 2, -1)[..., : t.shape[-1]]
    .view(t.dtype),
    "groups further apart": lambda t: torch.cat([t.view(torch.uint8)] * 2, -2)[
        ..., : t.shape[-2], :
    ].view(t.dtype),
}  # fmt: skip


@each
@each_rows
def test_strides_do_not_change_a_bit(mode: Mode, kernel: Kernel) -> None:
    x = kernel.rows([30, 0, 135], 3, 144, 272, mode)
    expected = kernel(x)
    for relay in list(RELAID.values())[:: 2 if kernel.name == "triton" else 1]:
        again = x._replace(a=relay(x.a), b=relay(x.b))
        again = again._replace(
            scale_a=x.scale_a.mT.contiguous().mT, scale_b=x.scale_b.mT.contiguous().mT
        )
        assert_same_bytes(kernel(again), expected)
    one = x._replace(b=x.b[:1].expand(3, -1, -1), scale_b=x.scale_b[:1].expand_as(x.scale_b))
    same = one._replace(b=one.b.contiguous(), scale_b=one.scale_b.contiguous())
    assert_same_bytes(kernel(one), kernel(same))
    table = torch.stack([x.offs, x.offs * 0 - 1], 1)[:, 0]  # a column of a table
    assert_same_bytes(kernel(x._replace(offs=table)), expected)


@each
def test_matrices_further_apart_than_32_bits_count(kernel: Kernel) -> None:
    x = kernel.rows([30, 9, 70], 1, 144, 272, ROWS["rowwise"])
    memory = torch.empty(2**31 + 2**20, dtype=torch.uint8, device=kernel.device)  # little is used
    far = memory.as_strided(x.b.shape, (2**30, 1024, 1)).view(x.b.dtype)
    far.copy_(x.b)
    assert_same_bytes(kernel(x._replace(b=far)), kernel(x))


@each
def test_any_contraction_and_any_features(kernel: Kernel) -> None:
    for i, (n, k) in enumerate(((1, 1), (1, 200), (130, 3), (3, 33), (257, 130))):
        for _, mode in combinations(kernel.modes(), i, kernel):
            x = kernel.rows([5, 0, 66], 2, n, k, mode)
            assert_products(kernel(x, FP32), x)
    for i, (m, n) in enumerate(((1, 1), (1, 200), (130, 3), (257, 130))):
        for _, mode in combinations(kernel.modes(columns=True), i, kernel):
            x = kernel.columns([5, 0, 66], 2, m, n, mode)
            assert_products(kernel(x, FP32), x)


@each
def test_offsets_that_no_groups_have_write_nowhere_else(kernel: Kernel) -> None:
    """They cannot be refused without waiting for the device; the emulator watches addresses."""
    for i, bad in enumerate(([90, 40, 60], [-5, 900, 30], [2**31 - 1, -(2**31), 0])):
        offs = torch.tensor(bad, dtype=torch.int32, device=kernel.device)
        for _, mode in combinations(kernel.modes(), i, kernel):
            x = kernel.rows([30, 10, 20], 9, 144, 64, mode)
            kernel(x._replace(offs=offs))
        for _, mode in combinations(kernel.modes(columns=True), i, kernel):
            x = kernel.columns([30, 10, 20], 9, 144, 64, mode)
            kernel(x._replace(offs=offs))


@pytest.mark.parametrize("kernel", [KERNELS[1], KERNELS[-1]])
def test_in_a_cuda_graph_with_other_offsets(kernel: Kernel) -> None:
    first, second = (
        kernel.rows(sizes, 300 - sum(sizes), 272, 144, ROWS["1x128 x 128x128"])
        for sizes in ([100, 0, 160], [1, 258, 0])
    )
    expected = kernel(second)
    buffers = first._replace(**{n: getattr(first, n).clone() for n in first._fields[:5]})
    kernel(buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(buffers)
    for buffer, new in zip(buffers[:5], second[:5], strict=True):
        buffer.copy_(new)
    graph.replay()
    assert_same_bytes(out, expected)


# ---- who multiplies ------------------------------------------------------------------------------


def operand_pair(mode: Mode, columns: bool = False) -> tuple[Operand, Operand]:
    lead = () if columns else (1,)
    scales = E8M0.dtype if mode.e8m0 else FP32
    return (
        Operand(E4M3FN.dtype, mode.a, scales),
        Operand(E4M3FN.dtype, (*lead, *mode.b[::-1]), scales),
    )


def chosen(arch: str, mode: Mode, columns: bool) -> str:
    table = grouped.WGRAD_IMPLEMENTATIONS if columns else grouped.IMPLEMENTATIONS
    pair = operand_pair(mode, columns)
    return next(name for name, refuse in table.items() if refuse(describe(arch), *pair) is None)


def test_who_multiplies_where() -> None:
    for columns in (False, True):
        for mode in Kernel("hopper", "cpu").modes(columns):
            assert chosen("sm_90", mode, columns) == "hopper"
            for arch in ("sm_89", "sm_100", "sm_120", "gfx950"):
                assert chosen(arch, mode, columns) == "triton"
            for arch in ("cpu", "sm_80", "gfx90a"):
                assert chosen(arch, mode, columns) == "torch"
    for columns, more in ((False, MORE_ROWS), (True, MORE_COLUMNS)):
        for mode in more.values():
            assert chosen("sm_90", mode, columns) == "triton"


def test_scales_that_rows_of_several_groups_share_are_refused() -> None:
    left, right = operand_pair(Mode((128, 128), (1, 128)))
    refuse = grouped.IMPLEMENTATIONS["hopper"]
    assert refuse(describe("sm_90"), left, right) == (
        "rows of several groups, or several matrices, share scales in blocks (128, 128) and "
        "(1, 128, 1); the kernels take (1 or FULL, …) and (1, …)"
    )
    left, right = operand_pair(ROWS["tensorwise"])
    shared = right._replace(block=(FULL, FULL, FULL))
    assert "several matrices, share scales" in (refuse(describe("sm_90"), left, shared) or "")


def test_a_named_kernel_that_cannot_run_here_is_refused() -> None:
    for make, mode in ((rows, ROWS["rowwise"]), (columns, COLUMNS["rowwise"])):
        x = make([5, 3], 0, 16, 32, mode, "cpu")
        for impl in ("hopper", "triton"):
            with pytest.raises(ValueError, match="cannot multiply these groups: torch has no fast"):
                through_op(x, BF16, impl)
