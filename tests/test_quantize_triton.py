"""The Triton kernels of the casts: the reference's bytes and strides; and their machine code.

Where there is a GPU they run on it; elsewhere in Triton's interpreter, with FP8 arithmetic mended.
"""

import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from recorders import machine_code, specialisations
from torch import Tensor

from float8.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0
from float8.kernels import quantize as reference
from float8.kernels.quantize import TRITON_BLOCKS, CastPlan
from float8.scaling import FULL, scale_shape
from float8.testing import assert_same_bytes, needs, targets

pytest.importorskip("triton")
np = pytest.importorskip("numpy")
GPU = torch.cuda.is_available()
if not GPU:
    import interpreter  # noqa: F401
from float8.kernels import launch, quantize_triton  # noqa: E402
from float8.kernels.quantize_triton import quantize_and_measure, quantize_layouts  # noqa: E402

FORMATS = (E4M3FN, E5M2) if GPU else (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ)
MODES = ("fp32", "fp32", "pow2", "e8m0_floor", "e8m0_even", "e8m0_ceil", "e8m0_rceil")
# Odd beside round, one beside several, longer than a tile in either direction.
SHAPES = [(1, 1, 1), (1, 5, 3), (1, 4, 16), (3, 7, 33), (1, 129, 130), (2, 36, 200), (1, 128, 256)]
PAIRS = [p for p in itertools.product((None, *TRITON_BLOCKS), repeat=2) if p != (None, None)]


def plan(block: tuple[int, int] | None, rng: random.Random) -> CastPlan | None:
    if block is None:
        return None
    mode = rng.choice(MODES[3:]) if block == (1, 32) else rng.choice(MODES)
    return CastPlan(block, rng.choice(FORMATS).dtype, mode)


def blemish(x: Tensor, rng: random.Random) -> str:
    kind = rng.choice(["none", "nan", "inf", "zero row", "negative zero column", "tiny"])
    if kind in ("nan", "inf"):
        x.view(-1)[rng.randrange(x.numel())] = math.nan if kind == "nan" else -math.inf
    elif kind == "zero row":
        x[:, rng.randrange(x.shape[1])] = 0
    elif kind == "negative zero column":
        x[:, :, rng.randrange(x.shape[2])] = -0.0
    elif kind == "tiny":
        x.mul_(1e-38 if x.dtype == torch.float32 else 2.0**-20)
    return kind


def stride(x: Tensor, rng: random.Random) -> Tensor:
    """The same values with other strides."""
    kind = rng.choice(["contiguous", "transposed", "every other column", "rows of a larger tensor"])
    if kind == "transposed":
        return x.mT.contiguous().mT
    if kind == "every other column":
        return torch.stack([x, x], -1)[..., 0]
    return torch.cat([x, x], 1)[:, : x.shape[1]] if kind != "contiguous" else x


def check(x: Tensor, row: CastPlan | None, col: CastPlan | None) -> None:
    expected: tuple[Tensor, ...] = ()
    for view, cast in ((x, row), (x.mT, col)):
        if cast is not None:
            block = (1, *cast.block)
            expected += reference.quantize(view, block, cast.dtype, cast.scale_mode)
    got = quantize_layouts(x, row, col)
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert_same_bytes(ours, theirs)
        assert ours.stride() == theirs.stride()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # Inf * 0 in numpy
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_layouts_have_the_bytes_of_the_reference(shape: tuple[int, int, int]) -> None:
    rng = random.Random(str(shape))
    torch.manual_seed(rng.randrange(1000))
    # The interpreter takes 10 ms a program, and 40 ms a row of the row kernel, which knows no whole
    # tiles: a third of the pairs there, others for each shape.
    pairs = [p for p in PAIRS if p[0] != (1, FULL) or shape[1] < 100]
    for row_block, col_block in PAIRS if GPU else rng.sample(pairs, 12):
        dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
        spread = torch.exp2(torch.randint(-12, 12, (*shape[:2], 1)).float())
        x = (torch.randn(shape) * spread).to(dtype)
        blemished = blemish(x, rng)
        x = stride(x.to("cuda" if GPU else "cpu"), rng)
        row, col = plan(row_block, rng), plan(col_block, rng)
        try:
            check(x, row, col)
        except AssertionError as error:
            raise AssertionError(
                f"{row} {col} {dtype} {x.stride()} {blemished}: {error}"
            ) from error


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # Inf * 0 in numpy
@pytest.mark.parametrize("draws", [pytest.param(200, marks=needs("cuda")), 4])
def test_any_size_has_the_bytes_of_the_reference(draws: int) -> None:
    """Of 1 to 300 rows and columns, any pair of blocks, dtype and mode; few in the interpreter,
    which takes 40 ms a row of rowwise casts."""
    rng = random.Random(draws)
    torch.manual_seed(0)
    pairs = PAIRS if GPU else [p for p in PAIRS if p[0] != (1, FULL)]
    for _ in range(draws):
        shape = (1, rng.randint(1, 300), rng.randint(1, 300))
        dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
        x = torch.randn(shape) * torch.exp2(torch.randint(-12, 12, (*shape[:2], 1)).float())
        x = x.to("cuda" if GPU else "cpu", dtype)
        row, col = (plan(block, rng) for block in rng.choice(pairs))
        try:
            check(x, row, col)
        except AssertionError as error:
            raise AssertionError(f"{shape} {row} {col} {dtype}: {error}") from error


def test_given_amax() -> None:
    """One for each matrix, for one layout and for both; a NaN's sign says nothing."""
    x = torch.randn(3, 36, 130, device="cuda" if GPU else "cpu")
    x[1, 4, 5] = math.nan
    amax = -x.abs().amax((1, 2), keepdim=True)
    cast = CastPlan((FULL, FULL), E4M3FN.dtype, "fp32")
    for row, col in ((cast, None), (None, cast), (cast, cast)):
        measured = quantize_layouts(x, row, col)
        strided = torch.cat([amax, amax * 2], 1)[:, :1]
        for given in (amax, strided):
            for ours, theirs in zip(quantize_layouts(x, row, col, given), measured, strict=True):
                assert_same_bytes(ours, theirs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about Inf and 1 / 0
@pytest.mark.parametrize("dtype", [torch.float32, E8M0.dtype], ids=str)
@pytest.mark.parametrize("block", TRITON_BLOCKS, ids=str)
def test_given_scales(
    block: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either layout: usable ones, the largest and the smallest among them, and those that make a
    block NaN; values that saturate; blocks that are not finite, or all zero, whose signs stay."""
    if not GPU:  # nor does the reference take its turn there
        monkeypatch.setattr(reference, "_refusal", lambda *of: None)
        monkeypatch.setattr(reference, "_layouts", reference._layouts.__wrapped__)
    casts: list[CastPlan | None] = []

    def recorded(
        x: Tensor, cast: CastPlan | None, *others: Any, **scale: Tensor
    ) -> tuple[Tensor, ...]:
        casts.append(cast)
        return quantize_layouts(x, cast, *others, **scale)

    monkeypatch.setattr(quantize_triton, "quantize_layouts", recorded)
    rng = random.Random(f"{block} {dtype}")
    torch.manual_seed(rng.randrange(1000))
    for shape in SHAPES if GPU else rng.sample(SHAPES, 3):
        x = torch.randn(shape) * torch.exp2(torch.randint(-12, 12, (*shape[:2], 1)).float())
        x = x.to(rng.choice([torch.bfloat16, torch.float16, torch.float32]))
        blemish(x, rng)
        x = stride(x.to("cuda" if GPU else "cpu"), rng)
        counts = scale_shape(shape, (1, *block))
        if dtype == E8M0.dtype:
            scale = torch.randint(100, 150, counts, dtype=torch.uint8)
            odd = [0, 254, 255]
        else:
            scale = torch.rand(counts) * torch.exp2(torch.randint(-12, 4, counts).float())
            odd = [0.0, -1.0, math.nan, math.inf, 2.0**-127, 2.0**-128, 3e38]
        for value in rng.sample(odd, min(len(odd), scale.numel() // 2)):
            scale.view(-1)[rng.randrange(scale.numel())] = value
        scale = torch.stack([scale, scale], -1)[..., 0].to(x.device).view(dtype)
        fmt = rng.choice(FORMATS)
        got = reference._quantize_static_gpu(x, scale, (1, *block), fmt.dtype)
        mode = "e8m0_given" if dtype == E8M0.dtype else "given"
        assert casts[0] == (block, fmt.dtype, mode)
        casts.clear()
        expected = reference.quantize_static(x, scale, (1, *block), fmt.dtype)
        for ours, theirs in zip(got, expected, strict=True):
            assert_same_bytes(ours, theirs)
            assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("columns", [130, 300])
@pytest.mark.parametrize(
    "blocks",
    [
        ((1, FULL), (1, FULL)),
        ((FULL, FULL), (1, FULL)),
        ((1, FULL), (FULL, FULL)),
        ((FULL, FULL), (FULL, FULL)),
    ],
)
def test_an_amax_that_the_first_cast_measures_serves_the_second(
    blocks: tuple[Any, Any], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not GPU:  # rows of 300 do not stay in registers
        monkeypatch.setattr(quantize_triton, "MAX_ROW", 256)
        monkeypatch.setattr(quantize_triton, "_cast", quantize_triton._cast.__wrapped__)
    x = torch.randn(3, 37, columns, device="cuda" if GPU else "cpu").to(torch.bfloat16)
    x[1, 4, 5], x[2, :, 7], x[0, 3] = math.nan, 0, 0
    row, col = (CastPlan(block, E4M3FN.dtype, "fp32") for block in blocks)
    both = quantize_layouts(x, row, col)
    *first, amax = quantize_and_measure(x, row, col)
    expected = reference.quantize_and_measure(x, (1, *row.block), *row[1:], (1, *col.block))
    # A GPU's maximum is a NaN of other bits.
    torch.testing.assert_close(amax, expected[2], rtol=0, atol=0, equal_nan=True)
    # From x, and from a transposed view, as a weight is cast for dgrad.
    for second in (quantize_layouts(x, None, col, amax), quantize_layouts(x.mT, col, None, amax)):
        for ours, theirs in zip((*first, *second), both, strict=True):
            assert_same_bytes(ours, theirs)
    # A given amax decides where rows lie in registers too.
    for ours, theirs in zip(
        quantize_layouts(x.mT.contiguous(), col, None, amax * 2),
        reference.quantize(x.mT, (1, *col.block), *col[1:], amax * 2),
        strict=True,
    ):
        assert_same_bytes(ours, theirs)


def test_prepared_launches_serve_other_values_and_alignments() -> None:
    """A second tensor of a shape takes the launches of the first, one that starts off 16 bytes its
    own."""
    device = "cuda" if GPU else "cpu"
    cast = CastPlan((1, FULL), E4M3FN.dtype, "fp32")
    for offset in (0, 0, 1, 8, 0):
        flat = torch.randn(5 * 48 + offset, device=device).to(torch.bfloat16)
        check(flat[offset:].view(1, 5, 48), cast, cast)


# One, powers of two and odd numbers; whole tiles of any cast, and of none.
TOKENS = (1, 2, 3, 4, 16, 17, 100, 127, 128, 129, 1000, 1024, 2048, 4100, 5000, 8192, 8208)


def test_a_new_number_of_tokens_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants, and what Triton would specialise on (a multiple of 16, 1), do not depend on it:
    two variants of kernels that know whole tiles of rows, one of the others."""
    bound = {"tile_kernel": 2, "amax_kernel": 2, "row_kernel": 1, "column_kernel": 1}
    monkeypatch.setattr(quantize_triton, "_cast", quantize_triton._cast.__wrapped__)
    # As on a GPU: fewer tokens than programs, and more.
    monkeypatch.setattr(quantize_triton, "multiprocessors", lambda device: 132)
    run: set[str] = set()
    monkeypatch.setattr(launch, "runs_ptx", lambda device: True)
    for i, (row_block, col_block) in enumerate(PAIRS):
        row, col = (b and CastPlan(b, E4M3FN.dtype, "fp32") for b in (row_block, col_block))
        for shape in ((), (1,), (2,)) if i % 6 == 0 else ((),):
            with monkeypatch.context() as patch:
                seen = specialisations(patch, quantize_triton, bound)
                for tokens in TOKENS:
                    x = torch.empty(*shape, tokens, 4096, dtype=torch.bfloat16, device="meta")
                    quantize_layouts(x, row, col)
            run |= {name for name in bound if seen[name]}
            measured = sum(b is not None and b[1] == FULL for b in (row_block, col_block))
            for name, keys in seen.items():
                kinds = max(1, measured) if name == "amax_kernel" else 1  # per tensor, row, column
                assert len(keys) <= bound[name] * kinds, (name, row, col, keys)
    assert run == set(bound)


@needs("fp8")
def test_tritons_own_caches_do_not_grow_with_the_number_of_tokens() -> None:
    names = ("tile_kernel", "amax_kernel", "row_kernel", "column_kernel")

    def compiled() -> int:
        jitted = [getattr(quantize_triton, name) for name in names]
        return sum(len(cache[0]) for kernel in jitted for cache in kernel.device_caches.values())

    def run(tokens: int) -> None:
        x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
        for row_block, col_block in PAIRS:
            row, col = (b and CastPlan(b, E4M3FN.dtype, "fp32") for b in (row_block, col_block))
            check(x, row, col)

    run(256)
    run(250)
    before = compiled()
    for tokens in TOKENS[:-4]:
        run(tokens)
    assert compiled() == before > 0


@pytest.mark.parametrize("columns", [16384, 16400] if GPU else [256, 300])
def test_rows_of_any_length(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a limit a row stays in registers; longer ones take two passes."""
    if not GPU:
        monkeypatch.setattr(quantize_triton, "MAX_ROW", 256)
    monkeypatch.setattr(quantize_triton, "_cast", quantize_triton._cast.__wrapped__)
    x = torch.randn(1, 3, columns, device="cuda" if GPU else "cpu")
    check(x, CastPlan((1, FULL), E4M3FN.dtype, "fp32"), None)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # Inf * 0 in numpy
@pytest.mark.parametrize("block", [128, 32])
def test_blocks_of_rows_alone(block: int, tmp_path: Path) -> None:
    """Several tiles in both directions, the last ones not whole; columns that are apart, rows that
    are the same, rows that are far apart."""
    options = {"dtype": torch.bfloat16, "device": "cuda" if GPU else "cpu"}
    mode, size = "fp32" if block == 128 else "e8m0_rceil", (1 << 27) + 300
    cast = CastPlan((1, block), E4M3FN.dtype, mode)
    x = torch.randn(2, 70, 300, **options)
    x[1, 33, :block] = 0
    x[0, 69, 299] = math.inf
    if GPU:
        far = torch.empty(size, **options)
    else:  # a file that is nearly all hole takes no memory
        far = torch.from_file(str(tmp_path / "far"), shared=True, size=size, **options)
    far[:300], far[-300:] = x[0, 0], x[0, 1]
    for view in (x, torch.stack([x, x], -1)[..., 0], x[:, :1].expand(2, 35, 300)):
        check(view, cast, None)
    check(far.as_strided((1, 2, 300), (0, 1 << 27, 1)), cast, None)


@pytest.mark.parametrize("maximum", [448.0, 240.0, 57344.0])
def test_division_by_a_maximum_is_correctly_rounded(maximum: float) -> None:
    """The kernels' two fused multiply-adds against IEEE division, for every float32 mantissa."""
    inverse = np.float32(1) / np.float32(maximum)
    for exponent in (-100, -1, 0, 120):
        mantissas = np.arange(1 << 23, dtype=np.int64) + ((127 + exponent) << 23)
        amax = mantissas.astype(np.uint32).view(np.float32)
        q = amax * inverse
        # float64 holds both products exactly, and all but the last bits of the second sum.
        left = (amax.astype(np.float64) - q.astype(np.float64) * maximum).astype(np.float32)
        corrected = (q.astype(np.float64) + left.astype(np.float64) * float(inverse)).astype(
            np.float32
        )
        assert (corrected == amax / np.float32(maximum)).all()


def test_screen_for_lost_bytes_sees_them() -> None:
    """Packed without PTX, as in the portable form, bytes get lost in ptxas 12.8; later kernels of
    that form it cannot compile at all, so that the program is ended when one was found."""
    program = Path(__file__).with_name("cross_compile.py")
    command = [sys.executable, str(program), "--portable", "sm_90"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        found = any(json.loads(line)["stack_pointer_reads"] for line in run.stdout)
        run.kill()
    assert found


@pytest.mark.parametrize("target", targets("casts"))
def test_machine_code(target: str) -> None:
    """Compiled for GPUs that are not here: wide accesses, hardware conversions, nothing in scratch,
    no fence around the atomics."""
    kernels = machine_code("cross_compile.py", target)
    assert {k["kernel"] for k in kernels} == {
        "tile_kernel", "row_kernel", "column_kernel", "amax_kernel"
    }  # fmt: skip
    by_rows = {(k["kind"], k["layouts"]) for k in kernels if k["kernel"] == "row_kernel"}
    assert {("row", "dual"), ("block", "row")} <= by_rows
    for kernel in kernels:
        assert kernel["scratch"] == 0, kernel
        # Three programs a multiprocessor need 168 registers each; the 1x128 pair, which would like
        # 229, is faster with a few values put aside than with two programs.
        # So are masks with two.
        blocks = (kernel["kind"], kernel["layouts"]) == ("block", "dual")
        allowed = 32 if blocks or kernel["of"] == "uneven" else 0
        if target == "sm_120":  # compiled alone; nobody has timed it
            allowed += 12
        assert kernel["spills"] <= allowed, kernel
        assert kernel["stack_pointer_reads"] == 0, kernel
        assert kernel["fences"] == 0, kernel
        assert kernel["shared"] <= 64 * 1024, kernel
        # All but the loads and stores of scales and amaxes.
        static = kernel["of"] == "static"
        assert kernel["wide_loads"] >= (0.5 if static else 0.75) * kernel["loads"], kernel
        if kernel["of"] == "uneven":  # each way to store the transposed layout
            wide = kernel["wide_stores"] >= 2 and kernel["stores"] > 4 * kernel["wide_stores"]
            assert wide or kernel["kernel"] != "tile_kernel", kernel
        elif kernel["kernel"] == "tile_kernel" and kernel["kind"] != "mx":
            assert kernel["wide_stores"] >= 0.6 * kernel["stores"], kernel
        if kernel["kernel"] in ("tile_kernel", "row_kernel"):
            assert kernel["conversions"] >= 8, kernel
