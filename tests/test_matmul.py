"""The scaled matrix product: the reference against float64, a bias, sums with what is there, the
choice of an implementation, and what is handed to torch's own kernels, which this machine need not
have.

Shape letters: M rows of a, N columns of b, K the contraction.
"""

import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import float8
from float8 import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FULL, RECIPES, Float8Format
from float8.devices import DeviceProfile, describe
from float8.kernels import matmul
from float8.kernels.matmul import Operand, contraction_error, native_mode, select
from float8.scaling import Block, scale_shape
from float8.testing import assert_same_bytes, deterministic, needs, relative_error

scaled_mm, scaled_mm_add_ = float8.ops.scaled_mm, float8.ops.scaled_mm_add_

DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
Blocks = tuple[Block, Block, str]  # of a [M, K], of b [K, N], and the mode of their scales
NATIVE: dict[str, Blocks] = {
    "tensor x tensor": ((FULL, FULL), (FULL, FULL), "fp32"),
    "row x row": ((1, FULL), (FULL, 1), "fp32"),
    "row x tensor": ((1, FULL), (FULL, FULL), "fp32"),
    "tensor x row": ((FULL, FULL), (FULL, 1), "pow2"),
    "1x128 x 128x128": ((1, 128), (128, 128), "fp32"),
    "128x128 x 1x128": ((128, 128), (128, 1), "fp32"),
    "1x128 x 1x128": ((1, 128), (128, 1), "pow2"),
    "mx": ((1, 32), (32, 1), "e8m0_rceil"),
}
ODD: dict[str, Blocks] = {
    "1x7 x 1x7": ((1, 7), (7, 1), "fp32"),
    "3x5 x 2x5": ((3, 5), (5, 2), "fp32"),
    "rows of 16 x tensor": ((16, FULL), (FULL, FULL), "pow2"),
    "1x32, float32 scales": ((1, 32), (32, 1), "fp32"),
    "2x64 x 16x64, E8M0": ((2, 64), (64, 16), "e8m0_ceil"),
}
FN, FNUZ = (E4M3FN, E5M2), (E4M3FNUZ, E5M2FNUZ)
PAIRS = [(a, b) for flavour in (FN, FNUZ) for a in flavour for b in flavour]
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Matrix = tuple[Tensor, Tensor, Block]  # data, scale, block


def values(data: Tensor, scale: Tensor, block: Block) -> Tensor:
    """An operand in float64, without the package: element i has the scale of block i // size."""
    if scale.dtype == E8M0.dtype:
        code = scale.view(torch.uint8).double()
        scale = torch.where(code == 255, torch.nan, torch.exp2(code - 127))
    scale = scale.double()
    for dim, (n, b) in enumerate(zip(data.shape, block, strict=True)):
        index = torch.arange(n, device=data.device)
        scale = scale.index_select(dim, torch.zeros_like(index) if b == FULL else index // b)
    return data.double() * scale


def operand(
    shape: tuple[int, int], block: Block, fmt: Float8Format, mode: str, device: str = "cpu"
) -> Matrix:
    """Random data and scales over three decades, so that a scale in a wrong place shows."""
    data = (torch.randn(shape, device=device) * fmt.max / 8).clamp(-fmt.max, fmt.max).to(fmt.dtype)
    exponent = torch.randint(-8, 3, scale_shape(shape, block), device=device) - fmt.max_exponent
    if mode.startswith("e8m0"):
        return data, (exponent + 127).to(torch.uint8).view(E8M0.dtype), block
    fraction = torch.rand(exponent.shape, device=device) if mode == "fp32" else 0.0
    return data, torch.exp2(exponent + fraction), block


def operands(
    m: int,
    k: int,
    n: int,
    blocks: Blocks,
    formats: tuple[Float8Format, Float8Format],
    device: str = "cpu",
) -> tuple[Matrix, Matrix]:
    block_a, block_b, mode = blocks
    return operand((m, k), block_a, formats[0], mode, device), operand(
        (k, n), block_b, formats[1], mode, device
    )


def multiply(
    a: Matrix,
    b: Matrix,
    out_dtype: torch.dtype,
    impl: str = "torch",
    fast_accum: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    out = scaled_mm(a[0], b[0], a[1], b[1], a[2], b[2], out_dtype, fast_accum, impl, bias)
    assert out.dtype == out_dtype
    assert out.shape == (a[0].shape[0], b[0].shape[1])
    assert out.is_contiguous()
    return out


def add(out: Tensor, a: Matrix, b: Matrix, impl: str = "torch", fast_accum: bool = False) -> Tensor:
    """What ``out`` is after the product was added to a copy of it, which nothing else touched."""
    flat = torch.full((out.numel() + 35,), -0.0, dtype=out.dtype, device=out.device)
    inner = flat[17 : 17 + out.numel()].view(out.shape).copy_(out)  # not on 16 bytes
    args = (a[0], b[0], a[1], b[1], a[2], b[2], fast_accum, impl)
    assert scaled_mm_add_(inner, *args) is None
    rest = torch.cat([flat[:17], flat[17 + out.numel() :]])
    assert_same_bytes(rest, torch.full_like(rest, -0.0))
    aligned = out.clone()
    scaled_mm_add_(aligned, *args)
    assert_same_bytes(aligned, inner)
    return aligned


def assert_product(out: Tensor, a: Matrix, b: Matrix, added: Tensor | float = 0.0) -> None:
    """Every element within the rounding errors of float32 sums and of the output's dtype."""
    a_MK, b_KN = values(*a), values(*b)
    truth, magnitude = a_MK @ b_KN + added, a_MK.abs() @ b_KN.abs() + abs(added)
    info = torch.finfo(out.dtype)
    bound = (
        (a_MK.shape[1] + 4) * 2.0**-24 * magnitude
        + info.eps / 2 * truth.abs()
        + info.smallest_normal * info.eps
    )
    assert torch.all((out.double() - truth).abs() <= bound)


def integers(
    m: int,
    k: int,
    n: int,
    blocks: Blocks,
    formats: tuple[Float8Format, Float8Format],
    device: str = "cpu",
) -> tuple[Matrix, Matrix]:
    """Operands whose products and sums are exact in whatever order and however few bits: small
    integers, and scales of 1 and 2."""
    pair = []
    for shape, block, fmt in zip(((m, k), (k, n)), blocks[:2], formats, strict=True):
        data = torch.randint(-2, 3, shape, device=device).to(torch.float32).to(fmt.dtype)
        scale = torch.randint(1, 3, scale_shape(shape, block), device=device).to(torch.float32)
        if blocks[2].startswith("e8m0"):
            scale = (scale + 126).to(torch.uint8).view(E8M0.dtype)
        pair.append((data, scale, block))
    return pair[0], pair[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks", [*NATIVE.values(), *ODD.values()], ids=[*NATIVE, *ODD])
def test_the_reference_is_the_product_of_the_scaled_operands(blocks: Blocks, device: str) -> None:
    for pair in PAIRS:
        for out_dtype in OUT_DTYPES:
            a, b = operands(33, 129, 17, blocks, pair, device)
            assert_product(multiply(a, b, out_dtype), a, b)
    for m, k, n in ((1, 1, 1), (1, 300, 1), (130, 2, 131), (128, 256, 128)):
        a, b = operands(m, k, n, blocks, FN, device)
        assert_product(multiply(a, b, torch.float32), a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_the_bf16_product_of_mx_blocks(device: str) -> None:
    """As good as the reference: neither operand is rounded."""
    for pair, out_dtype, (m, k, n) in itertools.product(
        PAIRS, OUT_DTYPES, ((33, 129, 17), (1, 1, 1), (128, 256, 130))
    ):
        a, b = operands(m, k, n, NATIVE["mx"], pair, device)
        assert_product(multiply(a, b, out_dtype, "torch_bf16"), a, b)
    a, b = operands(16, 64, 16, NATIVE["row x row"], FN, device)
    with pytest.raises(ValueError, match="where scales are powers of two"):
        multiply(a, b, torch.bfloat16, "torch_bf16")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks", [*NATIVE.values(), *ODD.values()], ids=[*NATIVE, *ODD])
def test_a_bias_is_added_before_the_product_is_rounded(blocks: Blocks, device: str) -> None:
    """In float32, whatever dtype it has; and the product, as it was rounded, to what is there."""
    impls = ["torch", "torch_bf16"] if blocks == NATIVE["mx"] else ["torch"]
    for dtype, other, impl in itertools.product(OUT_DTYPES, OUT_DTYPES, impls):
        a, b = operands(33, 129, 17, blocks, FN, device)
        bias = torch.randn(17, device=device).to(other) * 3
        got = multiply(a, b, dtype, impl, bias=bias)
        product = multiply(a, b, torch.float32, impl)
        assert_product(got, a, b, bias.double())
        assert_same_bytes(got, (product + bias.float()).to(dtype))
        there = torch.randn(33, 17, device=device).to(dtype) * 3
        assert_same_bytes(add(there, a, b, impl), there + product.to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_sums_of_many_products_lose_nothing_in_float32(device: str) -> None:
    """As a weight's gradient gathers those of micro-batches."""
    blocks = NATIVE["row x row"]
    total, truth = torch.zeros(33, 17, device=device), torch.zeros(33, 17, device=device).double()
    for k in (1, 16, 35, 128, 129):
        a, b = integers(33, k, 17, blocks, FN, device)
        total = add(total, a, b)
        truth += values(*a) @ values(*b)
        assert torch.equal(total.double(), truth)


def test_a_bias_that_cancels_keeps_what_its_product_alone_would_lose() -> None:
    """257 is no bf16 value, and 1 is."""
    ones = torch.ones(3, 257).to(E4M3FN.dtype)
    a, b = (ones, torch.ones(3, 1), (1, FULL)), (ones.t(), torch.ones(1, 3), (FULL, 1))
    bias = torch.full((3,), -256.0).bfloat16()
    out = multiply(a, b, torch.bfloat16, bias=bias)
    assert_same_bytes(out, torch.ones(3, 3).bfloat16())


def test_what_is_not_a_number_surfaces_where_it_was_added() -> None:
    a, b = operands(6, 40, 5, NATIVE["row x row"], FN)
    clean = multiply(a, b, torch.float32)
    for bad in (torch.nan, torch.inf, -torch.inf):
        bias = torch.tensor([0.0, 0.0, bad, 0.0, 0.0])
        out = multiply(a, b, torch.float32, bias=bias)
        assert_same_bytes(out, clean + bias)
        assert not out[:, 2].isfinite().any()
        there = torch.zeros(6, 5)
        there[1, 3] = bad
        out = add(there, a, b)
        assert_same_bytes(out, clean + there)
        assert out.isfinite().sum() == 29


def test_a_bias_of_any_strides_adds_the_same() -> None:
    a, b = operands(6, 40, 5, NATIVE["row x row"], FN)
    bias = torch.randn(5)
    expected = multiply(a, b, torch.bfloat16, bias=bias)
    views = bias.repeat_interleave(2)[::2], torch.cat([bias[:1], bias])[1:], bias[:1].expand(5)
    for view in views[:2]:
        assert_same_bytes(multiply(a, b, torch.bfloat16, bias=view), expected)
    same = multiply(a, b, torch.bfloat16, bias=bias[:1].repeat(5))
    assert_same_bytes(multiply(a, b, torch.bfloat16, bias=views[2]), same)


def test_autograd_knows_what_was_written() -> None:
    a, b = operands(6, 40, 5, NATIVE["row x row"], FN)
    out, w = torch.randn(6, 5), torch.randn(6, 5, requires_grad=True)
    loss = (w * out).sum()
    add_to = (a[0], b[0], a[1], b[1], a[2], b[2], False, "torch")
    scaled_mm_add_(out, *add_to)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():  # in which tensors have no versions
        scaled_mm_add_(torch.randn(6, 5), *add_to)


def test_what_cannot_be_added_is_refused() -> None:
    expecttest = pytest.importorskip("expecttest")
    a, b = operands(6, 40, 5, NATIVE["row x row"], FN)
    messages = []
    for bias in (torch.zeros(6), torch.zeros(1, 5), torch.zeros(5).double(), b[0][0]):
        with pytest.raises(ValueError) as refusal:
            multiply(a, b, torch.bfloat16, bias=bias)
        messages.append(str(refusal.value))
    for out in (
        torch.zeros(5, 6), torch.zeros(5, 6).t(), torch.zeros(5), torch.zeros(6, 5).double(),
        torch.zeros(6, 8)[:, :5], torch.zeros(6, 5, device="meta"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as refusal:
            scaled_mm_add_(out, a[0], b[0], a[1], b[1], a[2], b[2], False, "torch")
        messages.append(str(refusal.value))
    with FakeTensorMode(), pytest.raises(ValueError, match="bias is"):  # while tracing
        fakes = [torch.empty(t.shape, dtype=t.dtype) for t in (a[0], b[0], a[1], b[1])]
        scaled_mm(*fakes, a[2], b[2], torch.bfloat16, False, "torch", bias=torch.empty(6))
    expecttest.assert_expected_inline(
        wrapped(*messages),
        """\
bias is torch.float32 of shape (6,); it must be one of torch.bfloat16, torch.float16,
    torch.float32 of shape (5,)
bias is torch.float32 of shape (1, 5); it must be one of torch.bfloat16, torch.float16,
    torch.float32 of shape (5,)
bias is torch.float64 of shape (5,); it must be one of torch.bfloat16, torch.float16,
    torch.float32 of shape (5,)
bias is torch.float8_e5m2 of shape (5,); it must be one of torch.bfloat16, torch.float16,
    torch.float32 of shape (5,)
out is torch.float32 of shape (5, 6) and strides (6, 1); this product is added to one of
    torch.bfloat16, torch.float16, torch.float32 of shape (6, 5), contiguous
out is torch.float32 of shape (6, 5) and strides (1, 6); this product is added to one of
    torch.bfloat16, torch.float16, torch.float32 of shape (6, 5), contiguous
out is torch.float32 of shape (5,) and strides (1,); this product is added to one of
    torch.bfloat16, torch.float16, torch.float32 of shape (6, 5), contiguous
out is torch.float64 of shape (6, 5) and strides (5, 1); this product is added to one of
    torch.bfloat16, torch.float16, torch.float32 of shape (6, 5), contiguous
out is torch.float32 of shape (6, 5) and strides (8, 1); this product is added to one of
    torch.bfloat16, torch.float16, torch.float32 of shape (6, 5), contiguous
operands are on cpu and meta; move them to one device""",
    )


@pytest.fixture(autouse=True)
def _cublas_may_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, torch refuses cuBLAS under deterministic algorithms."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("impl", [*matmul.IMPLEMENTATIONS])
@pytest.mark.parametrize("blocks", [*NATIVE.values(), *ODD.values()], ids=[*NATIVE, *ODD])
def test_empty_matrices(blocks: Blocks, impl: str, device: str) -> None:
    with deterministic():  # memory that nobody wrote would be NaN
        for m, k, n in ((5, 0, 3), (0, 32, 3), (5, 32, 0), (0, 0, 0)):
            a, b = operands(m, k, n, blocks, FN, device)
            zeros = torch.zeros(m, n, dtype=torch.bfloat16, device=device)
            assert torch.equal(multiply(a, b, torch.bfloat16, impl), zeros)
            bias = torch.randn(n, device=device)
            got = multiply(a, b, torch.bfloat16, impl, bias=bias)
            assert_same_bytes(got, bias.bfloat16().expand(m, n))
            there = torch.full((m, n), -0.0, device=device)
            assert_same_bytes(add(there, a, b, impl), there)  # not even by a zero
            with pytest.raises(ValueError, match="scale is"):
                multiply(a, (b[0], torch.ones(9, 9, device=device), b[2]), torch.bfloat16, impl)


def test_scales_that_do_not_fit_are_refused_by_every_implementation() -> None:
    a, b = operands(16, 16, 16, NATIVE["row x row"], FN)
    for impl in ("torch", "cublas"):
        for scale in (torch.ones(4, 4), torch.ones(1, 16), torch.ones(1, 1)):
            with pytest.raises(ValueError, match="scale is"):
                multiply((a[0], scale, a[2]), b, torch.bfloat16, impl)


def test_a_nan_scale_surfaces_in_its_rows_or_columns_and_nowhere_else() -> None:
    for blocks in (*NATIVE.values(), *ODD.values()):
        a, b = operands(6, 260, 140, blocks, FN)
        clean = multiply(a, b, torch.float32)
        for matrix, dim in ((a, 0), (b, 1)):
            data, scale, block = matrix
            poisoned = scale.clone()
            block_index = scale.shape[dim] - 1
            at = (block_index, 0) if dim == 0 else (0, block_index)
            if scale.dtype == E8M0.dtype:
                poisoned.view(torch.uint8)[at] = 255
            else:
                poisoned[at] = torch.nan
            pair = ((data, poisoned, block), b) if dim == 0 else (a, (data, poisoned, block))
            out = multiply(*pair, torch.float32)
            n, size = data.shape[dim], block[dim]
            hit = torch.zeros(n, dtype=torch.bool)
            hit[0 if size == FULL else block_index * size :] = True
            hit = hit[:, None] if dim == 0 else hit[None, :]
            assert torch.equal(out.isnan(), hit.expand_as(out)), blocks
            assert_same_bytes(torch.where(hit, 0.0, out), torch.where(hit, 0.0, clean))


def tiny(name: str, device: str) -> tuple[Matrix, Matrix]:
    """Operands with scales of 2^-80, whose product is 0 in float32; 2^-160 * 448^2 * 512, which
    every element of the operands' product is, is not."""
    data = torch.full((16, 512), 448.0, device=device).to(E4M3FN.dtype)
    block_a, block_b, _ = NATIVE[name]
    shape_a, shape_b = scale_shape((16, 512), block_a), scale_shape((512, 16), block_b)
    a = (data, torch.full(shape_a, 2.0**-80, device=device), block_a)
    return a, (data.t(), torch.full(shape_b, 2.0**-80, device=device), block_b)


@pytest.mark.parametrize("name", ["tensor x tensor", "row x row"])
def test_two_tiny_scales_do_not_underflow_before_they_meet_the_sum(name: str) -> None:
    out = multiply(*tiny(name, "cpu"), torch.float32)
    assert torch.all(out == 448.0**2 * 512 * 2.0**-160)


@pytest.mark.parametrize("blocks", [*NATIVE.values(), *ODD.values()], ids=[*NATIVE, *ODD])
def test_strides_and_offsets_do_not_change_the_product(blocks: Blocks) -> None:
    a, b = operands(34, 144, 20, blocks, FN)
    expected = multiply(a, b, torch.bfloat16)
    for rewrite in REWRITES.values():
        for rewrite_scale in (lambda t: t, *REWRITES.values()):
            rewritten = [
                (rewrite(data), rewrite_scale(scale), block) for data, scale, block in (a, b)
            ]
            assert_same_bytes(multiply(*rewritten, torch.bfloat16), expected)


def _wide(t: Tensor) -> Tensor:
    """The same values as columns 5.. of a wider matrix, whose other values are NaN."""
    wide = torch.full((t.shape[0], t.shape[1] + 16), 0xFF, dtype=torch.uint8)
    wide = (
        wide.view(t.dtype)
        if t.element_size() == 1
        else torch.full(wide.shape, torch.nan, dtype=t.dtype)
    )
    wide[:, 5 : 5 + t.shape[1]] = t
    return wide[:, 5 : 5 + t.shape[1]]


def _offset(t: Tensor) -> Tensor:
    """The same values, contiguous, one element after the start of an allocation."""
    buffer = torch.empty(t.numel() + 1, dtype=t.dtype)
    buffer[1:] = t.reshape(-1)
    return buffer[1:].view(t.shape)


REWRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "column-major": lambda t: t.t().contiguous().t(),
    "slice of a wider matrix": _wide,
    "slice of a taller one, transposed": lambda t: _wide(t.t().contiguous()).t(),
    "offset": _offset,
}


def test_a_row_that_is_repeated_by_stride_zero() -> None:
    row, b = operands(1, 48, 5, NATIVE["row x row"], FN)
    data, scale, block = row
    repeated = (data.expand(7, 48), scale.expand(7, 1), block)
    written = (data.repeat(7, 1), scale.repeat(7, 1), block)
    assert_same_bytes(multiply(repeated, b, torch.float32), multiply(written, b, torch.float32))


def test_the_reference_keeps_out_of_autocast() -> None:
    a, b = operands(16, 64, 16, NATIVE["row x row"], FN)
    expected = multiply(a, b, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bytes(multiply(a, b, torch.float32), expected)


def test_the_ops_are_registered_as_torch_wants_it() -> None:
    ops = torch.ops.float8
    for blocks in (NATIVE["row x row"], NATIVE["mx"], ODD["3x5 x 2x5"]):
        a, b = operands(5, 40, 3, blocks, FN)
        tensors, sizes = (a[0], b[0], a[1], b[1]), (list(a[2]), list(b[2]))
        before = [t.clone() for t in tensors]
        # test_schema compares the inputs by arithmetic that torch does not have on FP8.
        checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        last = torch.bfloat16, False, "torch"
        for bias in ((), (torch.randn(3),)):
            args = *tensors, *sizes, *last, *bias
            torch.library.opcheck(ops.scaled_mm.default, args, test_utils=checks)
        sums = torch.randn(5, 3), *tensors, *sizes, *last[1:]
        torch.library.opcheck(ops.scaled_mm_add_.default, sums, test_utils=checks)
        for t, old in zip(tensors, before, strict=True):
            assert_same_bytes(t, old)


# ---- which implementation ----------------------------------------------------------------------


def wrapped(*lines: str) -> str:
    """Messages as this file pins them: no line is too long to read."""
    return "\n".join(
        textwrap.fill(line, 92, subsequent_indent="    ", break_on_hyphens=False) for line in lines
    )


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let every device be the named architecture, with all that it runs natively."""

    def pretend(arch: str) -> None:
        profile = (
            describe(arch) if arch != "unknown" else float8.device_profile(torch.device("meta"))
        )
        monkeypatch.setattr(matmul, "device_profile", lambda device: profile)

    return pretend


def pair(
    blocks: Blocks, kinds: tuple[str, str] = ("e4m3", "e4m3"), flavour: str = "fn"
) -> tuple[Operand, Operand]:
    """Two operands as ``select`` sees them."""
    formats = {(f.kind, f.flavour): f.dtype for f in (*FN, *FNUZ)}
    scale = E8M0.dtype if blocks[2].startswith("e8m0") else torch.float32
    a, b = (
        Operand(formats[kind, flavour], block, scale)
        for kind, block in zip(kinds, blocks, strict=False)
    )
    return a, b


def test_native_modes() -> None:
    got = {name: native_mode(*pair(blocks)) for name, blocks in (NATIVE | ODD).items()}
    assert got == {
        "tensor x tensor": "tensorwise",
        "row x row": "rowwise",
        "row x tensor": "rowwise",
        "tensor x row": "rowwise",
        "1x128 x 128x128": "blockwise",
        "128x128 x 1x128": "blockwise",
        "1x128 x 1x128": "blockwise",
        "mx": "mx",
    } | dict.fromkeys(ODD)
    assert native_mode(*pair(((128, 128), (128, 128), "fp32"))) is None


CPU = torch.device("cpu")
CHOICES = {
    "sm_80": "torch torch torch torch torch",
    "sm_89": "cublas cublas triton triton cublas",
    "sm_90": "cublas cublas cublas torch_bf16 cublas",
    "sm_100": "cublas cublas triton cublas cublas",
    "sm_120": "cublas cublas triton cublas cublas",
    "gfx90a": "torch torch torch torch torch",
    "gfx942": "torch torch torch torch torch",  # of FN operands
    "gfx950": "cublas cublas triton triton cublas",
    "gfx1201": "cublas torch torch torch torch",
    "cpu": "torch torch torch torch torch",
    "unknown": "torch torch torch torch torch",
}


@pytest.mark.parametrize("arch", CHOICES)
def test_what_each_architecture_takes(arch: str, on: Callable[[str], None]) -> None:
    on(arch)
    cases = ("tensor x tensor", "row x row", "1x128 x 128x128", "mx", "row x tensor")
    assert " ".join(select(CPU, *pair(NATIVE[name])) for name in cases) == CHOICES[arch]
    assert select(CPU, *pair(ODD["3x5 x 2x5"])) == "torch"


def test_gfx942_multiplies_fnuz(on: Callable[[str], None]) -> None:
    on("gfx942")
    for kinds in (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2")):
        assert select(CPU, *pair(NATIVE["tensor x tensor"], kinds, "fnuz")) == "cublas"
    assert select(CPU, *pair(NATIVE["row x row"], flavour="fnuz")) == "cublas"
    for name in ("1x128 x 128x128", "mx"):
        assert select(CPU, *pair(NATIVE[name], flavour="fnuz")) == "triton"


def test_every_refusal_gives_its_reason(on: Callable[[str], None]) -> None:
    expecttest = pytest.importorskip("expecttest")
    fn, fnuz = "fn", "fnuz"
    ee, ge = ("e5m2", "e5m2"), ("e5m2", "e4m3")
    cases = [
        ("sm_90", pair(ODD["3x5 x 2x5"])),
        ("sm_90", pair(ODD["1x32, float32 scales"])),
        ("sm_90", pair(NATIVE["mx"])),
        ("sm_90", pair(NATIVE["row x row"], flavour=fnuz)),
        ("sm_90", pair(NATIVE["tensor x tensor"], ee)),
        ("sm_100", pair(NATIVE["1x128 x 1x128"])),
        ("sm_100", pair(NATIVE["row x row"], ge)),
        ("gfx942", pair(NATIVE["tensor x tensor"], flavour=fn)),
        ("gfx942", pair(NATIVE["mx"], flavour=fnuz)),
        ("gfx950", pair(NATIVE["mx"])),
        ("gfx950", pair(NATIVE["row x row"], ge)),
        ("gfx1201", pair(NATIVE["row x row"])),
        ("sm_80", pair(NATIVE["tensor x tensor"])),
        ("cpu", pair(NATIVE["tensor x tensor"])),
        ("unknown", pair(NATIVE["tensor x tensor"])),
    ]
    lines = []
    for arch, operand_pair in cases:
        on(arch)
        assert select(CPU, *operand_pair, impl="torch") == "torch"
        with pytest.raises(
            ValueError, match="impl='cublas' cannot multiply these operands: "
        ) as refusal:
            select(CPU, *operand_pair, impl="cublas")  # a named one never falls back
        reason = re.fullmatch(
            "impl='cublas' cannot multiply these operands: (.*); choose another",
            str(refusal.value),
        )
        assert reason is not None
        lines.append(f"{arch}, so {select(CPU, *operand_pair)}: {reason[1]}")
    expecttest.assert_expected_inline(
        wrapped(*lines),
        """\
sm_90, so torch: torch's scaled_mm has no mode for blocks (3, 5) times (5, 2) with scales
    torch.float32 and torch.float32
sm_90, so triton: torch's scaled_mm has no mode for blocks (1, 32) times (32, 1) with scales
    torch.float32 and torch.float32
sm_90, so torch_bf16: torch multiplies MX blocks on sm_100, sm_103, sm_120, gfx950
sm_90, so torch: sm_90 multiplies fn formats, these are e4m3fnuz and e4m3fnuz
sm_90, so hopper: cuBLASLt does not multiply e5m2 by e5m2
sm_100, so triton: torch multiplies 128-wide blocks on sm_90 only
sm_100, so triton: the rowwise kernel of sm_100 takes e4m3 times e4m3 only
gfx942, so torch: gfx942 multiplies fnuz formats, these are e4m3fn and e4m3fn
gfx942, so triton: gfx942 has FNUZ FP8, and MX is made of OCP formats
gfx950, so triton: hipBLASLt's layout of MX scales depends on the ROCm version and was not
    run here
gfx950, so triton: the rowwise kernel of gfx950 takes e4m3 times e4m3 only
gfx1201, so torch: hipBLASLt's row scales are untested, and slow, on gfx12
sm_80, so torch: sm_80 has no FP8 instructions; they start with sm_89
cpu, so torch: torch has no fast FP8 on a CPU
unknown, so torch: Unknown device: type 'meta'""",
    )


def test_what_the_triton_kernel_does_not_multiply(
    on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expecttest = pytest.importorskip("expecttest")
    row = pair(NATIVE["row x row"])
    cases = [
        ("sm_80", row),
        ("gfx90a", row),
        ("gfx1201", row),
        ("cpu", row),
        ("unknown", row),
        ("sm_90", pair(NATIVE["mx"], flavour="fnuz")),
        ("gfx942", row),
        ("sm_90", pair(ODD["1x7 x 1x7"])),
        ("sm_90", pair(((1, 128), (FULL, 1), "fp32"))),
    ]
    lines = []

    def refused(arch: str, *operands: Operand) -> None:
        with pytest.raises(ValueError, match="impl='triton' cannot") as refusal:
            select(CPU, *operands, impl="triton")
        reason = str(refusal.value).partition(": ")[2].removesuffix("; choose another")
        lines.append(f"{arch}: {reason}")

    for arch, operand_pair in cases:
        on(arch)
        refused(arch, *operand_pair)
    on("sm_90")
    assert select(CPU, *row, impl="triton") == "triton"
    with monkeypatch.context() as patch:
        patch.setattr(matmul, "has_triton_package", lambda: False)
        refused("sm_90", *row)
        patch.setattr(matmul, "device_profile", float8.device_profile)
        with float8.assume_device("sm_90"):
            refused("sm_90", *row)
    expecttest.assert_expected_inline(
        wrapped(*lines),
        """\
sm_80: sm_80 has no FP8 instructions; they start with sm_89
gfx90a: gfx90a has no FP8 instructions, gfx942 has
gfx1201: the Triton kernel is made for AMD's MFMA instructions, gfx1201 has WMMA
cpu: torch has no fast FP8 on a CPU
unknown: Unknown device: type 'meta'
sm_90: sm_90 multiplies fn formats, these are e4m3fnuz and e4m3fnuz
gfx942: gfx942 multiplies fnuz formats, these are e4m3fn and e4m3fn
sm_90: the Triton kernel takes blocks of 32, 64, 128 or FULL along the contraction, these
    are (1, 7) times (7, 1)
sm_90: the Triton kernel takes blocks of 32, 64, 128 or FULL along the contraction, these
    are (1, 128) times (FULL, 1)
sm_90: triton is not installed
sm_90: sm_90 is assumed; PyTorch's reference runs""",
    )


def test_what_the_hopper_kernel_does_not_multiply(on: Callable[[str], None]) -> None:
    expecttest = pytest.importorskip("expecttest")
    lines = []
    for arch, operand_pair in (
        ("sm_80", pair(NATIVE["row x row"])),
        ("sm_89", pair(NATIVE["row x row"])),
        ("sm_90", pair(NATIVE["row x row"], flavour="fnuz")),
        ("sm_90", pair(NATIVE["mx"])),
        ("sm_90", pair(ODD["rows of 16 x tensor"])),
        ("sm_90", pair(((1, 128), (128, 128), "e8m0_rceil"))),
    ):
        on(arch)
        with pytest.raises(ValueError, match="impl='hopper' cannot") as refusal:
            select(CPU, *operand_pair, impl="hopper")
        reason = str(refusal.value).partition(": ")[2].removesuffix("; choose another")
        lines.append(f"{arch}: {reason}")
    for name, blocks in NATIVE.items():
        if name != "mx":
            assert select(CPU, *pair(blocks), impl="hopper") == "hopper"
    expecttest.assert_expected_inline(
        wrapped(*lines),
        """\
sm_80: sm_80 has no FP8 instructions; they start with sm_89
sm_89: the Hopper kernel is made for sm_90 alone
sm_90: sm_90 multiplies fn formats, these are e4m3fnuz and e4m3fnuz
sm_90: the Hopper kernel takes float32 scales per tensor, row or 128 of K, these are
    torch.float8_e8m0fnu and torch.float8_e8m0fnu of blocks (1, 32) times (32, 1)
sm_90: the Hopper kernel takes float32 scales per tensor, row or 128 of K, these are
    torch.float32 and torch.float32 of blocks (16, FULL) times (FULL, FULL)
sm_90: the Hopper kernel takes float32 scales per tensor, row or 128 of K, these are
    torch.float8_e8m0fnu and torch.float8_e8m0fnu of blocks (1, 128) times (128, 128)""",
    )


def test_measurements_decide_the_order(
    on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on("sm_90")
    monkeypatch.setitem(matmul.RULES, ("sm_90", "rowwise"), ("hopper", "cublas", "torch"))
    assert select(CPU, *pair(NATIVE["row x row"])) == "hopper"
    assert select(CPU, *pair(NATIVE["row x row"], flavour="fnuz")) == "torch"
    assert select(CPU, *pair(NATIVE["tensor x tensor"])) == "cublas"
    on("sm_89")
    assert select(CPU, *pair(NATIVE["row x row"])) == "cublas"


def test_an_unknown_implementation_is_refused() -> None:
    expecttest = pytest.importorskip("expecttest")
    with pytest.raises(ValueError, match="unknown") as refusal:
        select(CPU, *pair(NATIVE["mx"]), impl="cutlass")
    expecttest.assert_expected_inline(
        str(refusal.value),
        "impl='cutlass' is unknown; choose one of cublas, hopper, triton, torch, "
        "torch_bf16, or None for the fastest",
    )


def test_an_assumed_device_takes_the_reference() -> None:
    for arch in ("sm_90", "gfx942", "gfx950"):
        with float8.assume_device(arch):
            assert select(CPU, *pair(NATIVE["row x row"])) == "torch"


def test_contractions_that_no_scale_can_leave() -> None:
    expecttest = pytest.importorskip("expecttest")
    for blocks in (*NATIVE.values(), *ODD.values()):
        assert contraction_error(*pair(blocks), 256) is None
        assert contraction_error(*pair(blocks), 1) is None
        assert contraction_error(*pair(blocks), 0) is None
    # Blocks of different sizes are the same block where the whole contraction fits into both.
    assert contraction_error(*pair(((1, 128), (FULL, 1), "fp32")), 128) is None
    assert contraction_error(*pair(((1, 128), (32, 1), "fp32")), 32) is None
    wrong = [
        contraction_error(*pair(((1, 128), (FULL, 1), "fp32")), 129),
        contraction_error(*pair(((FULL, 1), (FULL, 1), "fp32")), 64),
        contraction_error(*pair(((FULL, 1), (1, FULL), "fp32")), 64),
    ]
    a, b = pair(NATIVE["tensor x tensor"])
    wrong.append(contraction_error(a, b._replace(dtype=E4M3FNUZ.dtype), 64))
    assert None not in wrong
    expecttest.assert_expected_inline(
        wrapped(*map(str, wrong)),
        """\
the contraction of length 129 does not lie inside the same scale blocks of both operands:
    the first has blocks (1, 128) and is contracted over its last dimension, the second
    (FULL, 1) over its first; quantise both along the contraction, or multiply .dequantize()
    of one
the contraction of length 64 does not lie inside the same scale blocks of both operands: the
    first has blocks (FULL, 1) and is contracted over its last dimension, the second (FULL,
    1) over its first; quantise both along the contraction, or multiply .dequantize() of one
the contraction of length 64 does not lie inside the same scale blocks of both operands: the
    first has blocks (FULL, 1) and is contracted over its last dimension, the second (1,
    FULL) over its first; quantise both along the contraction, or multiply .dequantize() of
    one
e4m3fn times e4m3fnuz mixes the fn and fnuz flavours, whose bytes mean different values;
    bring one over with float8.convert_format""",
    )


# ---- what torch's scaled_mm is handed ----------------------------------------------------------


def swizzled_offset(row: int, block: int, blocks: int) -> int:
    """Where cuBLASLt's documentation puts the scale of (row, block): tiles of 128 x 4, themselves
    in row-major order; within one, (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4."""
    tiles_per_row = -(-blocks // 4)
    tile = row // 128 * tiles_per_row + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (128, 4), (33, 5), (300, 9), (256, 8)])
def test_mx_scales_stand_where_cublaslt_looks(rows: int, blocks: int) -> None:
    codes = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8)
    swizzled = matmul.swizzle_mx_scale(codes.view(E8M0.dtype))
    assert swizzled.dtype == E8M0.dtype
    assert swizzled.is_contiguous()
    assert swizzled.numel() == -(-rows // 128) * 128 * -(-blocks // 4) * 4
    expected = torch.full((swizzled.numel(),), 127, dtype=torch.uint8)  # padding is 2^0
    for r in range(rows):
        for c in range(blocks):
            expected[swizzled_offset(r, c, blocks)] = codes[r, c]
    assert torch.equal(swizzled.view(torch.uint8), expected)


class Scaled:
    """Stands in for torch.nn.functional.scaled_mm on a GPU: checks what it was handed as
    ScaledBlas.cpp and torch's shape rules do, and multiplies in float64 by reading the scales from
    where the documentation says they are."""

    def __init__(self, row_dtypes: tuple[torch.dtype, ...]) -> None:
        self.row_dtypes = row_dtypes
        self.calls: list[str] = []
        self.biased = False  # the last call
        self.real = F.scaled_mm

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        recipe_a: F.ScalingType,
        scale_b: Tensor,
        recipe_b: F.ScalingType,
        bias: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        (m, k), n = a.shape, b.shape[1]
        kinds, out_dtype = (recipe_a, recipe_b), options["output_dtype"]
        fast_accum = options["use_fast_accum"]
        self.calls.append(f"{recipe_a.name} {recipe_b.name} {out_dtype} {fast_accum=}")
        self.biased = bias is not None
        if bias is not None:
            assert {recipe_a, recipe_b} <= {F.ScalingType.TensorWise, F.ScalingType.RowWise}
            assert bias.dtype == out_dtype != torch.float32
            assert (bias.shape, bias.stride(), bias.data_ptr() % 16) == ((n,), (1,), 0)
        for scale in (scale_a, scale_b):
            assert scale.data_ptr() % (4 if scale.numel() == 1 else 16) == 0
        for t in (a, b.t()):  # row-major, rows and start on 16 bytes
            assert t.stride(1) == 1
            assert t.stride(0) % 16 == t.data_ptr() % 16 == t.shape[1] % 16 == 0
            assert t.stride(0) >= t.shape[1]
        assert n % 16 == 0
        if recipe_a == F.ScalingType.RowWise:
            assert out_dtype in self.row_dtypes
        elif recipe_a != F.ScalingType.TensorWise:
            assert out_dtype in (torch.bfloat16, torch.float32)
        # torch's own rules count whole tiles of 128 x 128 only, its kernels also part ones.
        if F.ScalingType.BlockWise128x128 not in kinds or m % 128 == n % 128 == k % 128 == 0:
            with FakeTensorMode():
                fakes = [
                    torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
                    for t in (a, b, scale_a, scale_b, *([] if bias is None else [bias]))
                ]
                fake_bias = fakes[4] if self.biased else None
                self.real(*fakes[:3], recipe_a, fakes[3], recipe_b, bias=fake_bias, **options)
        if recipe_b == F.ScalingType.RowWise:
            scale_b = scale_b.t()
        a_MK = self.values(a, scale_a, recipe_a, options.get("swizzle_a"))
        b_NK = self.values(b.t(), scale_b, recipe_b, options.get("swizzle_b"))
        added = 0.0 if bias is None else bias.double()
        return (a_MK @ b_NK.t() + added).to(out_dtype)

    def values(
        self, x_RK: Tensor, scale: Tensor, recipe: F.ScalingType, swizzle: F.SwizzleType | None
    ) -> Tensor:
        rows, k = x_RK.shape
        kb = -(-k // 128)
        kind = F.ScalingType
        assert (swizzle == F.SwizzleType.SWIZZLE_32_4_4) == (recipe == kind.BlockWise1x32)
        if recipe == kind.TensorWise:
            assert scale.numel() == 1
            block, scale_RK = (FULL, FULL), scale.reshape(1, 1)
        elif recipe == kind.RowWise:
            assert scale.shape == (rows, 1)
            assert scale.is_contiguous()
            block, scale_RK = (1, FULL), scale
        elif recipe == kind.BlockWise1x128:
            assert scale.shape == (rows, kb)
            assert scale.stride(0) == 1
            assert scale.stride(1) == rows or scale.shape[1] == scale.stride(1) == 1
            block, scale_RK = (1, 128), scale
        elif recipe == kind.BlockWise128x128:
            padded = kb + -kb % 4
            assert scale.shape == (padded, -(-rows // 128))
            assert scale.stride(0) == 1
            assert scale.stride(1) == padded or scale.shape[1] == scale.stride(1) == 1
            block, scale_RK = (128, 128), scale.t()[:, :kb]
        else:
            assert recipe == kind.BlockWise1x32
            assert rows % 16 == k % 128 == 0  # as torch's own tests shape them
            assert scale.is_contiguous()
            blocks = k // 32
            offsets = [[swizzled_offset(r, c, blocks) for c in range(blocks)] for r in range(rows)]
            block, scale_RK = (
                (1, 32),
                scale.view(torch.uint8)[torch.tensor(offsets)].view(E8M0.dtype),
            )
        if recipe != kind.BlockWise1x32:
            assert scale.dtype == torch.float32
        return values(x_RK, scale_RK, block)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scaled]:
    fake = Scaled(OUT_DTYPES)
    monkeypatch.setattr(F, "scaled_mm", fake)
    monkeypatch.setattr(matmul, "device_profile", lambda device: describe("sm_90"))
    yield fake


@pytest.mark.parametrize("blocks", NATIVE.values(), ids=NATIVE)
def test_torchs_kernels_get_what_they_document(blocks: Blocks, native: Scaled) -> None:
    for m, k, n in (
        (1, 1, 1),
        (15, 16, 17),
        (35, 129, 1),
        (16, 128, 48),
        (129, 513, 129),
        (130, 1024, 300),
    ):
        for out_dtype in OUT_DTYPES:
            a, b = operands(m, k, n, blocks, FN)
            assert_product(multiply(a, b, out_dtype, "cublas"), a, b)
    assert len(native.calls) == 18


@pytest.mark.parametrize("blocks", NATIVE.values(), ids=NATIVE)
def test_torchs_kernels_get_aligned_copies_of_views(blocks: Blocks, native: Scaled) -> None:
    for m, k, n in ((32, 256, 144), (34, 144, 20), (1, 128, 16), (129, 512, 128)):
        a, b = operands(m, k, n, blocks, FN)
        for rewrite in REWRITES.values():
            for rewrite_scale in (lambda t: t, *REWRITES.values()):
                rewritten = [
                    (rewrite(data), rewrite_scale(scale), block) for data, scale, block in (a, b)
                ]
                assert_product(multiply(*rewritten, torch.float32, "cublas"), a, b)


@pytest.mark.parametrize("name", [name for name in NATIVE if name != "mx"])
def test_the_hopper_kernel_gets_what_it_documents(
    name: str, on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from float8.kernels import matmul_hopper

    def multiplied(
        a_MK: Tensor,
        b_NK: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        mode: matmul_hopper.Mode,
        out_dtype: torch.dtype,
        fast_accum: bool,
        *added: Tensor | None,
    ) -> Tensor:
        bias, out = added
        assert matmul_hopper.fits(a_MK, b_NK) is None
        wide = []
        for x, scale, block in zip(
            (a_MK, b_NK), (scale_a, scale_b), matmul_hopper.BLOCKS[mode], strict=True
        ):
            single = mode == "rowwise" and scale.shape == (1, 1)
            assert single or scale.shape == scale_shape(x.shape, block)
            wide.append(values(x, scale, (FULL, FULL) if single else block))
        product = wide[0] @ wide[1].t()
        if out is not None:
            assert bias is None and out.dtype == out_dtype and out.is_contiguous()
            return out.add_(product.to(out_dtype))
        if bias is not None:
            assert bias.is_contiguous()
            product += bias
        return product.to(out_dtype)

    on("sm_90")
    monkeypatch.setattr(matmul_hopper, "scaled_mm_hopper", multiplied)
    for m, k, n in ((1, 1, 1), (35, 129, 17), (130, 256, 300)):
        a, b = operands(m, k, n, NATIVE[name], (E5M2, E4M3FN))
        assert_product(multiply(a, b, torch.float32, "hopper"), a, b)
        for rewrite in REWRITES.values():
            moved = [(rewrite(data), scale, block) for data, scale, block in (a, b)]
            assert_product(multiply(*moved, torch.float32, "hopper"), a, b)
        bias, there = torch.randn(n, 2)[:, 0].bfloat16(), torch.randn(m, n).bfloat16()
        got = multiply(a, b, torch.bfloat16, "hopper", bias=bias)
        assert_product(got, a, b, bias.double())
        product = multiply(a, b, torch.bfloat16, "hopper")
        assert_same_bytes(add(there, a, b, "hopper"), there + product)


def test_slices_of_scaled_tensors_reach_torchs_kernels(native: Scaled) -> None:
    """A slice leaves the scale with strides of the whole, also where a dimension has length 1."""
    for recipe in (float8.ROWWISE, float8.BLOCKWISE):
        assert recipe.forward is not None
        x = float8.quantize(
            torch.randn(256, 1024), recipe.forward.a.block, "e4m3", recipe.forward.a.scale_mode
        )
        w = float8.quantize(
            torch.randn(256, 1024), recipe.forward.b.block, "e4m3", recipe.forward.b.scale_mode
        )
        parts = [(x[128:160], w[:128]), (x[:16], w[128:]), (x[5:6], w[:128])]
        if recipe is float8.BLOCKWISE:
            parts += [
                (x[:, :128], w[:, :128]),
                (x[:6, 512:], w[:128, 512:]),
                (x[:, :256], w[128:, :256]),
            ]
        for x_part, w_part in parts:
            a = (x_part.qdata, x_part.scale, x_part.block)
            b = (w_part.t().qdata, w_part.t().scale, w_part.t().block)
            assert_product(multiply(a, b, torch.float32, "cublas"), a, b)


def test_no_copy_of_operands_that_are_aligned() -> None:
    x = torch.zeros(32, 256, dtype=torch.uint8).view(E4M3FN.dtype)
    assert matmul._aligned(x, 16, 128) is x
    assert matmul._aligned(x[:, :128], 1, 16).data_ptr() == x.data_ptr()
    for view in (x[:, 1:129], x.t(), x[:1].expand(32, 256), x[:, ::2]):
        copy = matmul._aligned(view, 1, 16)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert_same_bytes(copy, view)


def test_padding_is_zero() -> None:
    x = torch.full((3, 5), 1.0).to(E4M3FN.dtype)
    padded = matmul._aligned(x, 16, 16)
    assert padded.shape == (16, 16)
    assert padded.float().sum() == 15
    assert_same_bytes(padded[:3, :5].contiguous(), x)


def test_fast_accumulation_is_handed_on(native: Scaled) -> None:
    a, b = operands(16, 128, 16, NATIVE["row x row"], FN)
    multiply(a, b, torch.bfloat16, "cublas", fast_accum=True)
    multiply(a, b, torch.bfloat16, "cublas", fast_accum=False)
    calls = [f"RowWise RowWise torch.bfloat16 fast_accum={fast}" for fast in (True, False)]
    assert native.calls == calls


@pytest.mark.parametrize("arch", ["sm_89", "sm_100", "sm_120", "gfx950"])
def test_row_scaled_kernels_that_write_bf16_only(
    arch: str, native: Scaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.row_dtypes = (torch.bfloat16,)
    monkeypatch.setattr(matmul, "device_profile", lambda device: describe(arch))
    for name in ("row x row", "row x tensor", "tensor x row"):
        for out_dtype in OUT_DTYPES:
            a, b = operands(35, 129, 17, NATIVE[name], FN)
            assert_product(multiply(a, b, out_dtype, "cublas"), a, b)


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "gfx950"])
def test_torchs_kernels_add_the_biases_that_they_take(
    arch: str, native: Scaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the output's dtype, beside scales of tensors and rows, on NVIDIA; any other is added to
    float32."""
    profile = describe(arch)
    native.row_dtypes = OUT_DTYPES if arch == "sm_90" else (torch.bfloat16,)
    monkeypatch.setattr(matmul, "device_profile", lambda device: profile)
    for name, blocks in NATIVE.items():
        if matmul.IMPLEMENTATIONS["cublas"](profile, *pair(blocks)) is not None:
            continue
        for out_dtype, bias_dtype in itertools.product(OUT_DTYPES, OUT_DTYPES):
            for m, k, n in ((35, 129, 17), (16, 128, 48)):
                a, b = operands(m, k, n, blocks, FN)
                wide = torch.randn(n + 1).to(bias_dtype) * 3
                for bias in (wide[:n], wide[1:]):  # on 16 bytes and not
                    got = multiply(a, b, out_dtype, "cublas", bias=bias)
                    assert_product(got, a, b, bias.double())
                takes = bias_dtype == out_dtype != torch.float32 and arch != "gfx950"
                if "row" in name and arch != "sm_90":
                    takes = takes and out_dtype == torch.bfloat16
                elif "1x" in name or name == "mx":
                    takes = False
                assert native.biased == takes, (name, out_dtype, bias_dtype)
        there = torch.randn(35, 17) * 3
        for dtype in OUT_DTYPES:
            a, b = operands(35, 129, 17, blocks, FN)
            product = multiply(a, b, dtype, "cublas")
            assert_same_bytes(add(there.to(dtype), a, b, "cublas"), there.to(dtype) + product)


# ---- on a GPU ----------------------------------------------------------------------------------


@needs("fp8")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("fast_accum", [False, True])
def test_torchs_kernels_are_as_exact_as_the_reference(
    recipe: float8.Recipe, fast_accum: bool
) -> None:
    """Every other implementation that takes the operands too, of one output's dtype for each size:
    all of them for each size of each dimension."""
    device = torch.device("cuda")
    profile = float8.device_profile(device)
    sizes = (1, 3, 15, 16, 17, 31, 32, 35, 44, 100, 127, 129, 512)
    for gemm in filter(None, (recipe.forward, recipe.dgrad, recipe.wgrad)):
        blocks = (gemm.a.block, gemm.b.block[::-1], gemm.a.scale_mode)
        formats = (float8.format_for(device, gemm.a.kind), float8.format_for(device, gemm.b.kind))
        scale = E8M0.dtype if gemm.a.scale_mode.startswith("e8m0") else torch.float32
        ops = (
            Operand(formats[0].dtype, blocks[0], scale),
            Operand(formats[1].dtype, blocks[1], scale),
        )
        chosen, refusals = select(device, *ops), matmul.IMPLEMENTATIONS.items()
        others = [
            impl
            for impl, refuse in refusals
            if impl not in (chosen, "torch") and refuse(profile, *ops) is None
        ]
        for i, m in enumerate(sizes):
            for j, k in enumerate(sizes):
                a, b = operands(m, k, sizes[(i + j) % len(sizes)], blocks, formats, "cuda")
                truth = values(*a) @ values(*b)
                # Tensor cores align the products of a step to the largest and keep 14 bits: 2.5e-4
                # was measured on an H200. Where the sums are kept so too, what is dropped is of the
                # size of the terms, and more than that of a sum in which they cancel.
                rounding = 2.0**-11
                if fast_accum and truth.any():
                    terms = values(*a).abs() @ values(*b).abs()
                    rounding += 2.0**-13 * (terms.norm() / truth.norm()).item()
                for out_dtype in OUT_DTYPES:
                    reference = relative_error(multiply(a, b, out_dtype, "torch"), truth)
                    for impl in (
                        chosen,
                        *(others if out_dtype == OUT_DTYPES[(i + 2 * j) % 3] else ()),
                    ):
                        error = relative_error(multiply(a, b, out_dtype, impl, fast_accum), truth)
                        assert error <= 2 * reference + rounding, (
                            impl,
                            m,
                            k,
                            out_dtype,
                            error,
                            reference,
                        )


@needs("fp8")
@pytest.mark.parametrize("impl", [*matmul.IMPLEMENTATIONS])
@pytest.mark.parametrize("name", NATIVE)
def test_every_implementation_adds_alike(name: str, impl: str) -> None:
    """A bias, or to what is there: the reference's bits where sums are exact, and else as exact."""
    device, blocks = torch.device("cuda"), NATIVE[name]
    refuses = matmul.IMPLEMENTATIONS[impl](float8.device_profile(device), *pair(blocks))
    if refuses is not None:
        pytest.skip(refuses)
    for (m, k, n), dtype, other in itertools.product(
        ((1, 16, 1), (35, 129, 17), (300, 512, 264)), OUT_DTYPES, OUT_DTYPES
    ):
        bias = torch.randn(n, device=device).to(other) * 9
        there = torch.randn(m, n, device=device).to(dtype) * 9
        a, b = integers(m, k, n, blocks, (E4M3FN, E4M3FN), "cuda")
        whole, sums = bias.round() + 0.0, there.round() + 0.0  # without -0
        got = multiply(a, b, dtype, impl, bias=whole)
        assert_same_bytes(got, multiply(a, b, dtype, "torch", bias=whole))
        assert_same_bytes(add(sums, a, b, impl), add(sums, a, b, "torch"))
        a, b = operands(m, k, n, blocks, (E4M3FN, E4M3FN), "cuda")
        product = values(*a) @ values(*b)
        for got, reference, truth in (
            (
                multiply(a, b, dtype, impl, bias=bias),
                multiply(a, b, dtype, "torch", bias=bias),
                product + bias.double(),
            ),
            (add(there, a, b, impl), add(there, a, b, "torch"), product + there.double()),
        ):
            allowed = 2 * relative_error(reference, truth) + 2.0**-11
            assert relative_error(got, truth) <= allowed, (impl, m, k, n, dtype, other)


def takers(name: str) -> list[str]:
    """The implementations, but the reference, that take a mode on this GPU."""
    profile, operands = float8.device_profile("cuda"), pair(NATIVE[name])
    named = matmul.IMPLEMENTATIONS.items()
    return [impl for impl, refuse in named if impl != "torch" and not refuse(profile, *operands)]


OURS = pytest.mark.parametrize("impl", ["hopper", "triton"])


@needs("fp8")
@OURS
@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize(
    "name", ["tensor x tensor", "row x row", "1x128 x 128x128", "1x128 x 1x128"]
)
def test_ours_are_as_exact_as_torchs(name: str, fast_accum: bool, impl: str) -> None:
    """Errors of the same sums, whose scales differ by a factor of a thousand, within a twentieth,
    which is noise: in float32, which shows what tensor cores drop, and in bf16. Matrices are large
    enough where sums are long: of small ones cuBLAS adds up parts of a sum apart."""
    if not {impl, "cublas"} <= set(takers(name)):
        pytest.skip(f"{impl} and torch's own do not both multiply this here")
    sizes = ((256, 128, 256), (1000, 512, 1040), (2048, 2064, 2064), (2048, 8192, 2048))
    for (m, k, n), dtype in itertools.product(sizes, (torch.float32, torch.bfloat16)):
        a, b = operands(m, k, n, NATIVE[name], (E4M3FN, E4M3FN), "cuda")
        truth = values(*a) @ values(*b)
        ours, torchs = (
            relative_error(multiply(a, b, dtype, by, fast_accum), truth) for by in (impl, "cublas")
        )
        assert ours <= 1.05 * torchs, (m, k, n, dtype, ours, torchs)


@pytest.fixture
def much_memory() -> Iterator[None]:
    """For a few matrices of more than 2^31 elements, which go back to other processes."""
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of free GPU memory")
    yield
    torch.cuda.empty_cache()


def drawn(shape: tuple[int, int], block: Block, device: str = "cuda") -> Matrix:
    """An operand whose bytes are drawn, not cast, for want of memory: even ones, of which none is
    NaN in e4m3fn. Scales over three decades."""
    codes = torch.randint(0, 128, shape, dtype=torch.uint8, device=device).mul_(2)
    scale = torch.exp2(torch.rand(scale_shape(shape, block), device=device) * 10 - 8)
    return codes.view(E4M3FN.dtype), scale, block


def some(count: int, *pitches: int, device: str = "cuda") -> Tensor:
    """Which rows of a matrix to look at: of many the first and last, those about 2^31 elements in,
    by any pitch, and some at random."""
    if count <= 600:
        return torch.arange(count, device=device)
    ends = [0, count, *(2**31 // pitch for pitch in pitches)]
    near = {at + i for at in ends for i in range(-2, 3)}
    picked = near | set(torch.randint(count, (64,)).tolist())
    return torch.tensor(sorted(i for i in picked if 0 <= i < count), device=device)


def some_of(x: Matrix, rows: Tensor) -> Tensor:
    """Those rows of an operand, in float64."""
    data, scale, (size, inner) = x
    own = scale if size == FULL else scale[rows // size]
    picked = data.view(torch.uint8)[rows].view(data.dtype)
    return values(picked, own, (FULL if size == FULL else 1, inner))


def assert_near(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out is a @ b.t() but for what tensor cores drop, which is small beside the magnitudes of what
    they add, and for its rounding. Another row's sum is not near."""
    truth, magnitude = a @ b.t(), a.abs() @ b.abs().t()
    wrong = (out.double() - truth).abs() > (
        2.0**-9 * magnitude + torch.finfo(out.dtype).eps / 2 * truth.abs()
    )
    assert not wrong.any(), (wrong.nonzero()[:5], int(wrong.sum()), wrong.numel())


def assert_numbers(out: Tensor) -> None:
    """None is NaN, as memory is that nobody wrote; without a copy."""
    assert out.amin().isfinite() and out.amax().isfinite()


# Of which the output, that with rows off 16 bytes, a or b has more than 2^31 elements.
HUGE = [(65664, 128, 32784), (65664, 144, 32783), (65664, 32896, 272), (272, 32896, 65664)]


def multiply_huge(m: int, k: int, n: int, blocks: Blocks, impl: str, device: str) -> None:
    a, b = drawn((m, k), blocks[0], device), drawn((n, k), blocks[1][::-1], device)
    columns_of_b = (b[0].t(), b[1].t(), blocks[1])
    with deterministic():
        out = multiply(a, columns_of_b, torch.bfloat16, impl)
    assert_numbers(out)
    rows, columns = some(m, k, n, device=device), some(n, k, device=device)
    part = out[rows][:, columns]
    assert_near(part, some_of(a, rows), some_of(b, columns))
    args = a[0], columns_of_b[0], a[1], columns_of_b[1], a[2], columns_of_b[2]
    scaled_mm_add_(out, *args, False, impl)
    assert_same_bytes(out[rows][:, columns], part + part)
    assert_numbers(out)


@needs("fp8")
@OURS
@pytest.mark.parametrize("name", ["row x row", "1x128 x 1x128"])
@pytest.mark.parametrize(("m", "k", "n"), HUGE, ids=["output", "odd output", "a", "b"])
def test_more_than_two_to_the_31_elements(
    m: int, k: int, n: int, name: str, impl: str, much_memory: None
) -> None:
    """The product, and what it is added to, which is itself."""
    if impl not in takers(name):
        pytest.skip(f"{impl} does not multiply this here")
    multiply_huge(m, k, n, NATIVE[name], impl, "cuda")


@needs("fp8")
@pytest.mark.parametrize("name", NATIVE)
def test_nothing_unwritten_is_read(name: str) -> None:
    for impl in takers(name):
        for m, k, n in ((1, 16, 1), (35, 129, 17), (129, 300, 130), (5, 0, 3)):
            a, b = operands(m, k, n, NATIVE[name], (E4M3FN, E4M3FN), "cuda")
            poison = torch.full((1 << 22,), 0x7F, dtype=torch.uint8, device="cuda")
            del poison  # the allocator hands this memory to padded copies and outputs
            with deterministic():
                first = multiply(a, b, torch.bfloat16, impl)
                assert first.isfinite().all(), impl
                assert_same_bytes(first, multiply(a, b, torch.bfloat16, impl))


@needs("fp8")
@pytest.mark.parametrize("name", NATIVE)
def test_fifty_runs_beside_other_work_give_the_same_bytes(name: str) -> None:
    a, b = operands(1000, 1040, 520, NATIVE[name], (E4M3FN, E4M3FN), "cuda")
    noise, beside = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for impl in takers(name):
        first = multiply(a, b, torch.bfloat16, impl)
        torch.cuda.synchronize()
        for _ in range(50):
            with torch.cuda.stream(beside):
                noise @ noise
            assert_same_bytes(multiply(a, b, torch.bfloat16, impl), first)
        torch.cuda.synchronize()


@needs("fp8")
@pytest.mark.parametrize("name", NATIVE)
def test_nan_scales_and_tiny_scales_on_torchs_kernels(name: str) -> None:
    device, blocks = torch.device("cuda"), NATIVE[name]
    impl = select(device, *pair(blocks))
    a, b = operands(64, 256, 48, blocks, (E4M3FN, E4M3FN), "cuda")
    scale = a[1].clone()
    if scale.dtype == E8M0.dtype:
        scale.view(torch.uint8)[-1, 0] = 255
    else:
        scale[-1, 0] = torch.nan
    poisoned = (a[0], scale, a[2])
    out, reference = (multiply(poisoned, b, torch.float32, i) for i in (impl, "torch"))
    assert torch.equal(out.isnan(), reference.isnan())


@needs("fp8")
@pytest.mark.parametrize("name", ["tensor x tensor", "row x row"])
def test_two_tiny_scales_on_torchs_kernels(name: str) -> None:
    """Row scales meet the sum one by one. cuBLASLt multiplies tensor scales first, here to 0."""
    impl = select(torch.device("cuda"), *pair(NATIVE[name]))
    out = multiply(*tiny(name, "cuda"), torch.float32, impl)
    expected = 0.0 if name == "tensor x tensor" else 448.0**2 * 512 * 2.0**-160
    assert torch.all((out.double() - expected).abs() <= 2.0**-10 * expected)


def test_profiles_of_this_machine_are_used_as_they_are() -> None:
    """select asks the device that it is given: a CPU stays a CPU beside a GPU."""
    profile: DeviceProfile = float8.device_profile(CPU)
    assert profile.vendor == "cpu"
    assert select(CPU, *pair(NATIVE["row x row"])) == "torch"
