"""Block shapes and the arithmetic from amax to scale, bit for bit against `cast_oracle`."""

import random

import cast_oracle as oracle
import pytest
import torch
from expecttest import assert_expected_inline

from float8.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Float8Format
from float8.scaling import (
    FULL,
    SCALE_MODES,
    block_amax,
    block_name,
    broadcast_scale,
    check_block,
    check_scale_mode,
    decode_e8m0,
    decode_scale,
    encode_e8m0,
    scale_from_amax,
    scale_layout,
    scale_shape,
)
from float8.testing import needs

DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
FORMATS = [E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ]
MIN_SCALE = 2.0**-126
MANTISSAS = sorted(
    {
        m
        for edge in (0, 1 << 22, 3 << 21, 7 << 20, 15 << 19, 31 << 18, 1 << 23)  # 1, 1.5, .. 2
        for m in (edge - 1, edge, edge + 1)
        if 0 <= m < 1 << 23
    }
)


def floats(bits: list[int], device: str = "cpu") -> torch.Tensor:
    """float32 of the given bit patterns."""
    signed = [b - (1 << 32) if b >> 31 else b for b in bits]
    return torch.tensor(signed, dtype=torch.int32, device=device).view(torch.float32)


def bits(x: torch.Tensor) -> list[int]:
    """The bit patterns of float32."""
    return [b & 0xFFFFFFFF for b in x.contiguous().view(torch.int32).flatten().tolist()]


def assert_scales(patterns: list[int], fmt: Float8Format, mode: str, device: str) -> None:
    scale, live = scale_from_amax(floats(patterns, device), fmt, mode)
    expected = [oracle.bits_of(oracle.scale(p, fmt.name, mode)) for p in patterns]
    wrong = [
        f"amax {p:#010x}: {got:#010x}, not {want:#010x}"
        for p, got, want in zip(patterns, bits(scale), expected, strict=True)
        if got != want
    ]
    assert not wrong, f"{len(wrong)} of {len(patterns)} scales differ: {wrong[:5]}"
    assert live.tolist() == [0 < p < oracle.INF_BITS for p in patterns]


# ------------------------------------------------------------------------------------------- scales


@pytest.mark.parametrize(
    ("amax", "name", "mode", "expected"),
    [
        (1.9, "e4m3fn", "e8m0_floor", 2.0**-8),  # saturates: 1.9 * 256 = 486 > 448
        (1.9, "e4m3fn", "e8m0_even", 2.0**-8),
        (1.9375, "e4m3fn", "e8m0_even", 2.0**-7),  # a tie of the mantissa 1.875 and 2: to even
        (1.9, "e4m3fn", "e8m0_ceil", 2.0**-7),
        (1.9, "e4m3fn", "e8m0_rceil", 2.0**-7),
        (1.75, "e4m3fn", "e8m0_ceil", 2.0**-7),
        (1.75, "e4m3fn", "e8m0_rceil", 2.0**-8),  # 1.75 * 256 = 448 exactly
        (1.75, "e4m3fn", "pow2", 2.0**-8),
        (1.9, "e4m3fnuz", "e8m0_floor", 2.0**-7),
        (1.875, "e4m3fnuz", "e8m0_rceil", 2.0**-7),  # 1.875 * 128 = 240
        (1.9, "e5m2", "e8m0_rceil", 2.0**-14),
        (1.0, "e5m2fnuz", "e8m0_ceil", 2.0**-15),
        (448.0, "e4m3fn", "fp32", 1.0),
        (240.0, "e4m3fnuz", "fp32", 1.0),
        (0.0, "e4m3fn", "fp32", 2.0**-126),
        (0.0, "e4m3fn", "pow2", 2.0**-126),
        (0.0, "e4m3fn", "e8m0_rceil", 2.0**-127),
    ],
)
def test_oracle_agrees_with_scales_computed_by_hand(
    amax: float, name: str, mode: str, expected: float
) -> None:
    near = oracle.bits_of(oracle.float32(oracle.Fraction(amax)))
    assert oracle.scale(near, name, mode) == expected


def test_modes_are_those_of_the_oracle() -> None:
    assert SCALE_MODES == oracle.MODES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_scale_at_the_edges_of_every_binade(fmt: Float8Format, mode: str, device: str) -> None:
    """The lowest exponents (0: subnormals), at which a scale meets its floor, the highest (255: Inf
    and NaN) and some between, each with the mantissas at which some mode carries."""
    exponents = {*range(20), *range(20, 240, 23), *range(250, 256)}
    assert_scales([e << 23 | m for e in exponents for m in MANTISSAS], fmt, mode, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_scale_of_random_bit_patterns(fmt: Float8Format, mode: str, device: str) -> None:
    """4200 in each of 24 settings; a third of them in the exponents 0, 1, 253 and 254."""
    draw = random.Random(f"{fmt} {mode}")
    patterns = [draw.getrandbits(31) for _ in range(2800)]
    patterns += [draw.choice((0, 1, 253, 254)) << 23 | draw.getrandbits(23) for _ in range(1400)]
    assert_scales(patterns, fmt, mode, device)


@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_scale_and_its_reciprocal_stay_finite(fmt: Float8Format, mode: str) -> None:
    smallest = MIN_SCALE if mode in ("fp32", "pow2") else MIN_SCALE / 2
    scale, _ = scale_from_amax(floats([0, 1, 1 << 20, 1 << 23, 0x7F7FFFFF]), fmt, mode)
    assert (scale >= smallest).all()
    assert scale[:3].tolist() == [smallest] * 3
    assert torch.div(torch.ones(5), scale).isfinite().all()
    assert (torch.div(torch.ones(5), scale) > 0).all()


@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_maximum_of_a_format_serves_scale_and_range(fmt: Float8Format, mode: str) -> None:
    """scale * max reaches amax: to half a float32 step in "fp32", else unless it saturates."""
    draw = random.Random(0)
    amax = floats([draw.randint(1 << 28, 0x7F7FFFFF) for _ in range(500)])
    scale, _ = scale_from_amax(amax, fmt, mode)
    reach = scale.double() * fmt.max / amax.double()
    if mode == "fp32":
        assert (reach - 1).abs().max() <= 2.0**-24
    else:
        mantissa, _ = torch.frexp(scale)
        assert (mantissa == 0.5).all(), "not a power of two"
        upper = {"e8m0_ceil": 2 * fmt.max / 2.0**fmt.max_exponent}.get(mode, 2)
        saturates = mode in ("e8m0_floor", "e8m0_even")
        lower = fmt.max / 2.0 ** (fmt.max_exponent + 1) if saturates else 1
        assert lower <= reach.min() and reach.max() <= upper


def test_scale_is_taken_from_float32_and_rounded_once() -> None:
    """Just below 2, where a detour over bf16 would reach the next binade."""
    just_below = floats([0x3FFFFFFF])
    for mode, expected in [("e8m0_floor", 2.0**-8), ("e8m0_rceil", 2.0**-7), ("pow2", 2.0**-7)]:
        assert scale_from_amax(just_below, E4M3FN, mode)[0].item() == expected
    exactly = floats([0x3FE00000])  # 1.75: 448 without a carry, the next float32 with one
    above = floats([0x3FE00001])
    assert scale_from_amax(exactly, E4M3FN, "e8m0_rceil")[0].item() == 2.0**-8
    assert scale_from_amax(above, E4M3FN, "e8m0_rceil")[0].item() == 2.0**-7


# -------------------------------------------------------------------------------------- E8M0 scales


@pytest.mark.parametrize("device", DEVICES)
def test_every_e8m0_code_decodes_exactly_and_back(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    expected = [oracle.bits_of(oracle.e8m0_value(c)) for c in range(256)]
    assert bits(decode_e8m0(codes)) == expected
    assert bits(decode_scale(codes.view(E8M0.dtype))) == expected
    back = encode_e8m0(decode_e8m0(codes))
    assert back.dtype == E8M0.dtype
    assert back.view(torch.uint8).tolist() == list(range(256))


def test_any_nan_becomes_e8m0_code_255() -> None:
    nans = floats([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
    assert encode_e8m0(nans).view(torch.uint8).tolist() == [255] * 4


# --------------------------------------------------------------------------------------------- amax


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0x7FC00000, 0x3F800000, 0x7F800000], 0x7FC00000),  # NaN, 1, Inf
        ([0x3F800000, 0xFF800000, 0x80000000], 0x7F800000),  # -Inf counts as Inf
        ([0xFFC00001, 0x7F7FFFFF, 0x00000000], 0x7FC00001),  # a negative NaN too
        ([0x80000000, 0x80000000, 0x80000000], 0x00000000),  # all -0: amax is +0
        ([0x80000000, 0x80000001, 0x00000000], 0x00000001),  # the smallest subnormal is not lost
        ([0xBF800001, 0x3F800000, 0x80000000], 0x3F800001),
    ],
    ids=["nan", "inf", "negative nan", "negative zeros", "subnormal", "negative"],
)
def test_amax_orders_nan_over_inf_over_numbers(
    values: list[int], expected: int, device: str
) -> None:
    for order in (values, values[::-1], values[1:] + values[:1]):
        assert bits(block_amax(floats(order, device), (FULL,))) == [expected]
        assert bits(block_amax(floats(order, device).view(1, 3), (1, 3))) == [expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_amax_of_each_block(dtype: torch.dtype) -> None:
    x = torch.randn(5, 7, 3).to(dtype)
    block = (2, FULL, 2)
    expected = [
        [[x[i : i + 2, :, k : k + 2].abs().max().item() for k in (0, 2)]] for i in (0, 2, 4)
    ]
    assert block_amax(x, block).tolist() == expected
    assert block_amax(x, block).dtype == torch.float32


def test_amax_of_no_elements_is_zero() -> None:
    assert block_amax(torch.empty(0, 4), (FULL, FULL)).tolist() == [[0.0]]
    assert block_amax(torch.empty(3, 0), (1, FULL)).tolist() == [[0.0]] * 3
    assert block_amax(torch.empty(0, 4), (1, 2)).shape == (0, 2)
    assert block_amax(torch.tensor(-2.0), ()).item() == 2.0


# ------------------------------------------------------------------------------------- block shapes


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((5, 7), (FULL, FULL), (1, 1)),
        ((5, 7), (1, FULL), (5, 1)),
        ((5, 7), (FULL, 1), (1, 7)),
        ((5, 257), (1, 128), (5, 3)),
        ((256, 1), (128, 128), (2, 1)),
        ((2, 129, 128), (1, 128, 128), (2, 2, 1)),
        ((1, 1), (1, FULL), (1, 1)),
        ((0, 7), (FULL, FULL), (1, 1)),  # FULL is one block, of no elements too
        ((0, 7), (1, FULL), (0, 1)),
        ((0, 7), (128, 1), (0, 7)),
        ((), (), ()),
    ],
)
def test_scale_shape(
    shape: tuple[int, ...], block: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert scale_shape(shape, block) == expected
    assert oracle.scale_shape(shape, block) == expected


@pytest.mark.parametrize(
    ("block", "shape", "stride"),
    [
        ((1, 128), (5, 3), (1, 5)),
        ((1, 128), (1, 3), (1, 1)),  # exact, for dimensions of length 1 too
        ((1, 128), (5, 1), (1, 5)),
        ((1, 32), (5, 3), (1, 5)),
        ((1, 1, 32), (2, 5, 3), (15, 1, 5)),
        ((128, 1), (5, 3), (3, 1)),
        ((128, 128), (5, 3), (3, 1)),
        ((1, FULL), (5, 1), (1, 1)),
        ((FULL, 1), (1, 3), (3, 1)),
        ((1, 1), (5, 3), (3, 1)),
        ((128,), (5,), (1,)),
    ],
)
def test_scale_layout(
    block: tuple[int, ...], shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    scale = torch.randn(shape)
    sources = [scale, torch.randn(shape).expand(shape), scale.repeat_interleave(2, -1)[..., ::2]]
    if len(shape) >= 2:
        sources += [scale.mT.contiguous().mT, torch.zeros(()).expand(shape)]
    for source in sources:
        laid_out = scale_layout(source, block)
        assert laid_out.stride() == stride
        assert torch.equal(laid_out, source)


def test_broadcast_scale_repeats_a_scale_over_its_block() -> None:
    shape, block = (5, 7, 4), (2, 3, FULL)
    scale = torch.randn(scale_shape(shape, block))
    whole = broadcast_scale(scale, shape, block).expand(shape)
    flat = scale.flatten().tolist()
    assert whole.flatten().tolist() == [flat[n] for n in oracle.blocks_of(shape, block)]


def test_names_and_refusals_of_blocks() -> None:
    assert block_name((1, FULL, 128)) == "(1, FULL, 128)"
    check_block((3, 4), (FULL, 2))
    with pytest.raises(ValueError) as wrong_rank:
        check_block((3, 4, 5), (1, FULL))
    assert_expected_inline(
        str(wrong_rank.value),
        """\
block (1, FULL) has 2 entries but the tensor of shape (3, 4, 5) has 3 dimensions; give one entry per dimension (a size, or float8.FULL)""",  # noqa: E501
    )
    with pytest.raises(ValueError) as zero:
        check_block((3, 4), (FULL, 0))
    assert_expected_inline(
        str(zero.value),
        """block (FULL, 0) holds 0; every entry must be a positive size or float8.FULL (-1)""",
    )
    with pytest.raises(ValueError, match="holds -2"):
        check_block((3, 4), (-2, 1))


def test_refusal_of_a_scale_mode() -> None:
    for mode in SCALE_MODES:
        check_scale_mode(mode)
    with pytest.raises(ValueError) as unknown:
        check_scale_mode("floor")
    assert_expected_inline(
        str(unknown.value),
        """\
scale_mode 'floor' is unknown; choose one of fp32, pow2, e8m0_floor, e8m0_even, e8m0_ceil, e8m0_rceil""",  # noqa: E501
    )
