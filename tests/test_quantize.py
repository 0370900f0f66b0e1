"""The casts to FP8 and back, bit for bit against `cast_oracle`, and the promises of their ops."""

import itertools
import math
import random
from collections.abc import Sequence

import cast_oracle as oracle
import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import float8  # noqa: F401 (registers the ops)
from float8.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Float8Format
from float8.scaling import FULL, SCALE_MODES, Block, scale_shape
from float8.testing import assert_same_bytes, deterministic, needs

ops = torch.ops.float8
DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
FORMATS = [E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SETTINGS = list(itertools.product(FORMATS, SCALE_MODES))

# (block, scale mode) of the granularities that recipes use.
GRANULARITIES = {
    "tensorwise": ((FULL, FULL), "fp32"),
    "rowwise": ((1, FULL), "fp32"),
    "columnwise": ((FULL, 1), "fp32"),
    "blockwise": ((1, 128), "fp32"),
    "blockwise weight": ((128, 128), "fp32"),
    "blockwise pow2": ((128, 1), "pow2"),
    "mxfp8": ((1, 32), "e8m0_rceil"),
    "mxfp8 columns": ((32, 1), "e8m0_floor"),
}
granularity = pytest.mark.parametrize(
    ("block", "mode"), GRANULARITIES.values(), ids=GRANULARITIES.keys()
)

# Odd lengths, one more than a block, less than a block, 1 and 0; ranks 0 to 4; an expert weight has
# a leading 1.
CASES: list[tuple[tuple[int, ...], Block]] = [
    ((5, 7), (FULL, FULL)),
    ((5, 7), (1, FULL)),
    ((5, 7), (FULL, 1)),
    ((5, 7), (1, 1)),
    ((7, 11), (3, 5)),
    ((3, 257), (1, 128)),
    ((257, 3), (128, 1)),
    ((129, 3), (128, 128)),
    ((2, 130), (128, 128)),
    ((3, 65), (1, 32)),
    ((65, 3), (32, 1)),
    ((1, 1), (FULL, FULL)),
    ((1, 9), (1, 128)),
    ((9, 1), (1, 32)),
    ((9, 1), (FULL, 1)),
    ((0, 5), (FULL, FULL)),
    ((5, 0), (1, FULL)),
    ((0, 5), (1, 128)),
    ((5, 0), (32, 1)),
    ((), ()),
    ((13,), (FULL,)),
    ((13,), (4,)),
    ((3, 2, 33), (1, 1, 32)),
    ((3, 33, 2), (1, 32, 1)),
    ((2, 5, 6), (1, FULL, 1)),
    ((2, 5, 6), (1, FULL, FULL)),
    ((2, 5, 6), (2, 3, FULL)),
    ((2, 2, 3, 5), (1, 1, 1, 2)),
    ((2, 3, 4, 5), (1, 2, FULL, 3)),
    ((1, 2, 0, 5), (1, 1, FULL, 32)),
]
case = pytest.mark.parametrize(
    ("shape", "block"), CASES, ids=[f"{list(s)} by {list(b)}" for s, b in CASES]
)


def values_of(x: Tensor) -> list[float]:
    """The numbers of a bf16, fp16 or fp32 tensor in row-major order, decoded in Python."""
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.float32:
        return [oracle.from_bits(b & 0xFFFFFFFF) for b in x.view(torch.int32).flatten().tolist()]
    decode = {torch.bfloat16: oracle.from_bfloat16, torch.float16: oracle.from_float16}[x.dtype]
    return [decode(b & 0xFFFF) for b in x.view(torch.int16).flatten().tolist()]


def codes_of(x: Tensor) -> list[int]:
    """The bytes of an FP8 tensor in row-major order."""
    return x.detach().cpu().contiguous().view(torch.uint8).flatten().tolist()


def scale_codes(scale: Tensor) -> list[int]:
    """E8M0 codes, or the bits of float32, in row-major order."""
    if scale.dtype == E8M0.dtype:
        return codes_of(scale)
    return [b & 0xFFFFFFFF for b in scale.cpu().contiguous().view(torch.int32).flatten().tolist()]


def from_codes(codes: Sequence[int], fmt: Float8Format, device: str = "cpu") -> Tensor:
    return torch.tensor(codes, dtype=torch.uint8, device=device).view(fmt.dtype)


def awkward(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Numbers over many binades, many on a tie between two FP8 values, zeros, -0, subnormals."""
    wide = torch.randn(shape) * torch.exp2(torch.randint(-22, 8, shape))
    ties = (torch.randint(-32, 32, shape) + 0.5) * torch.exp2(torch.randint(-14, 3, shape))
    tiny = torch.randn(shape) * (1e-42 if dtype == torch.float32 else torch.finfo(dtype).tiny)
    zeros = torch.where(torch.rand(shape) < 0.5, 0.0, -0.0)
    x = torch.stack([wide, ties, ties, wide, tiny, zeros])
    pick = torch.randint(0, 6, shape)
    return x.gather(0, pick[None]).squeeze(0).to(dtype).to(device)


def assert_cast(
    x: Tensor, cast: tuple[Tensor, Tensor], expected: tuple[list[int], list[float]]
) -> None:
    """Data and scales equal an answer of the oracle, on the right device."""
    data, scale = cast
    assert (data.shape, data.device, scale.device) == (x.shape, x.device, x.device)
    codes, scales = expected
    as_codes = oracle.e8m0_code if scale.dtype == E8M0.dtype else oracle.bits_of
    assert scale_codes(scale) == [as_codes(s) for s in scales], "scales differ"
    wrong = [
        f"{value!r}: {got:#04x}, not {want:#04x}"
        for value, got, want in zip(values_of(x), codes_of(data), codes, strict=True)
        if got != want
    ]
    assert not wrong, f"{len(wrong)} of {len(codes)} bytes differ: {wrong[:5]}"


def assert_quantize(x: Tensor, block: Block, fmt: Float8Format, mode: str) -> None:
    data, scale = ops.quantize(x, block, fmt.dtype, mode)
    assert data.dtype == fmt.dtype
    assert scale.dtype == (E8M0.dtype if mode.startswith("e8m0") else torch.float32)
    assert tuple(scale.shape) == oracle.scale_shape(x.shape, block)
    expected = oracle.quantize(values_of(x), x.shape, block, fmt.name, mode)
    assert_cast(x, (data, scale), expected)


def assert_same_cast(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    for left, right in zip(a, b, strict=True):
        assert_same_bytes(left, right)
        assert left.stride() == right.stride()


# -------------------------------------------------------------------------------------- the oracle


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_oracle_agrees_with_the_formats(fmt: Float8Format) -> None:
    """Every finite code is what torch decodes it to, and is what its own value rounds to."""
    layout = oracle.LAYOUTS[fmt.name]
    assert layout.max == fmt.max
    decoded = from_codes(range(256), fmt).to(torch.float32).tolist()
    finite = [c for c in range(256) if math.isfinite(decoded[c])]
    assert len(finite) == {"e4m3fn": 254, "e5m2": 248}.get(fmt.name, 255)
    for code in finite:
        assert oracle.decode(code, fmt.name) == decoded[code]
        assert oracle.encode(decoded[code], fmt.name) == code


@pytest.mark.parametrize(
    ("value", "name", "code"),
    [
        (17.0, "e4m3fn", 0x58),  # between 16 and 18: to the even 16
        (19.0, "e4m3fn", 0x5A),  # between 18 and 20: to the even 20
        (2.0**-10, "e4m3fn", 0x00),  # half the smallest subnormal
        (3 * 2.0**-10, "e4m3fn", 0x02),
        (15.5 * 2.0**-10, "e4m3fn", 0x08),  # the largest subnormal and the smallest normal
        (-1e-10, "e4m3fn", 0x80),
        (-1e-10, "e4m3fnuz", 0x00),  # 0x80 would be NaN
        (-1e-10, "e5m2", 0x80),
        (-1e-10, "e5m2fnuz", 0x00),
        (1e30, "e4m3fn", 0x7E),
        (math.inf, "e4m3fnuz", 0x7F),
        (-1e30, "e5m2", 0xFB),
        (61440.0, "e5m2fnuz", 0x7F),
    ],
)
def test_oracle_rounds_as_computed_by_hand(value: float, name: str, code: int) -> None:
    assert oracle.encode(value, name) == code


def test_oracle_multiplies_as_fractions_do() -> None:
    """The product of two floats, packed as float32, is the exact product rounded once."""
    draw = random.Random(0)
    for _ in range(2000):
        x, y = (oracle.from_bits(draw.randrange(0, 0x7F800000)) for _ in range(2))
        assert oracle.times(x, y) == oracle.float32(oracle.Fraction(x) * oracle.Fraction(y))


# -------------------------------------------------------------------------- scales from the data


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@case
def test_quantize(shape: tuple[int, ...], block: Block, dtype: torch.dtype, device: str) -> None:
    """Every block shape, format and scale mode; large tensors take a fifth of the settings each."""
    x = awkward(shape, dtype, device)
    few = x.numel() > 100
    start = CASES.index((shape, block)) + 5 * DTYPES.index(dtype)
    for fmt, mode in SETTINGS[start % 5 :: 5] if few else SETTINGS:
        assert_quantize(x, block, fmt, mode)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_quantize_square_blocks_with_two_ragged_edges(fmt: Float8Format) -> None:
    assert_quantize(awkward((129, 131), torch.bfloat16), (128, 128), fmt, "fp32")


@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_quantize_any_bits_of_float32(fmt: Float8Format, mode: str) -> None:
    """Any exponent, subnormals, Inf and NaN of any payload, in blocks of close exponents."""
    draw = random.Random(f"{fmt} {mode}")
    exponents = [0, 1, 2, 253, 254, 255] * 20 + [draw.randrange(256) for _ in range(200)]
    bits = [
        draw.getrandbits(1) << 31 | max(e - draw.randrange(12), 0) << 23 | draw.getrandbits(23)
        for e in exponents
        for _ in range(3)
    ]
    signed = [b - (1 << 32) if b >> 31 else b for b in bits]
    x = torch.tensor(signed, dtype=torch.int32).view(torch.float32).view(-1, 3)
    assert_quantize(x, (1, 3), fmt, mode)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_bytes_of_an_odd_length_equal_the_oracles(fmt: Float8Format) -> None:
    """Vectorised bodies and their tails; on the CPU against Python."""
    assert_quantize(torch.randn(2**16 + 7), (FULL,), fmt, "fp32")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs("cuda"))])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_bytes_of_a_device_equal_the_cpus(fmt: Float8Format, device: str) -> None:
    x = torch.randn(2**20 + 7)
    for block in ((FULL,), (128,)):
        on_device = ops.quantize(x.to(device), block, fmt.dtype, "fp32")
        toolkit = f"CUDA {torch.version.cuda}, HIP {torch.version.hip}, torch {torch.__version__}"
        for ours, cpus in zip(on_device, ops.quantize(x, block, fmt.dtype, "fp32"), strict=True):
            assert torch.equal(ours.cpu().view(torch.uint8), cpus.view(torch.uint8)), toolkit


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@granularity
def test_largest_value_becomes_the_maximum_and_no_nan_appears(
    block: Block, mode: str, fmt: Float8Format, device: str
) -> None:
    """One maximum per format, for scale and clamp: 240 in fnuz, and no byte 0x80, its NaN."""
    for dtype in DTYPES:
        x = (torch.randn(64, 96, device=device) * 1e3).to(dtype)
        data, scale = ops.quantize(x, block, fmt.dtype, mode)
        values = data.float()
        assert values.isfinite().all()
        assert not set(codes_of(data)) & set(fmt.nan_codes)
        reached = scale.double().max() * fmt.max / x.double().abs().max()
        if mode == "fp32":
            assert values.abs().max() == fmt.max
            assert (reached - 1).abs() <= 2.0**-24
        else:
            assert values.abs().max() > fmt.max / 2 - fmt.max / 16
            assert reached >= (7 / 8 if mode == "e8m0_floor" else 1)


def test_e8m0_floor_saturates_and_the_modes_that_round_up_do_not() -> None:
    x = torch.full((1, 32), 1.9)
    for mode, expected in [
        ("e8m0_floor", 1.75),
        ("e8m0_even", 1.75),
        ("e8m0_ceil", 1.875),
        ("e8m0_rceil", 1.875),
    ]:
        data, scale = ops.quantize(x, (1, 32), E4M3FN.dtype, mode)
        assert ops.dequantize(data, scale, (1, 32), torch.float32)[0, 0].item() == expected


@pytest.mark.parametrize("size", [(1, 7), (7, 1), (1, 1)], ids=str)
def test_one_row_or_one_column_keeps_its_kind_of_scale(size: tuple[int, int]) -> None:
    x = torch.randn(size)
    rows, columns = size
    shapes = {
        (FULL, FULL): (1, 1),
        (1, FULL): (rows, 1),
        (FULL, 1): (1, columns),
        (1, 128): (rows, 1),
        (128, 1): (1, columns),
        (128, 128): (1, 1),
    }
    for block, shape in shapes.items():
        assert ops.quantize(x, block, E4M3FN.dtype, "fp32")[1].shape == shape


# -------------------------------------------------------------------------- zero and tiny blocks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("zero", [0.0, -0.0])
@granularity
def test_zeros(block: Block, mode: str, zero: float, device: str) -> None:
    x = torch.full((130, 64), zero, dtype=torch.bfloat16, device=device)
    for fmt in FORMATS:
        data, scale = ops.quantize(x, block, fmt.dtype, mode)
        assert set(codes_of(data)) == {0}
        smallest = 0 if scale.dtype == E8M0.dtype else oracle.bits_of(2.0**-126)
        assert set(scale_codes(scale)) == {smallest}
        back = ops.dequantize(data, scale, block, torch.bfloat16)
        assert_same_bytes(back, torch.zeros_like(back))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", [E4M3FN, E4M3FNUZ], ids=str)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_a_zero_row_leaves_the_others_alone(name: str, fmt: Float8Format, device: str) -> None:
    block, mode = GRANULARITIES[name]
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device)
    x[3] = 0
    others = [i for i in range(16) if i != 3]
    data, scale = ops.quantize(x, block, fmt.dtype, mode)
    alone, alone_scale = ops.quantize(x[others], block, fmt.dtype, mode)
    assert_same_bytes(data[others], alone)
    assert_same_bytes(scale[others] if scale.shape[0] > 1 else scale, alone_scale)
    assert set(codes_of(data[3])) == {0}


@pytest.mark.parametrize("device", DEVICES)
def test_a_zero_tile_leaves_the_others_alone(device: str) -> None:
    w = torch.randn(256, 256, dtype=torch.bfloat16, device=device)
    w[128:, :128] = 0
    data, scale = ops.quantize(w, (128, 128), E4M3FN.dtype, "fp32")
    assert scale[1, 0].item() == 2.0**-126
    assert set(codes_of(data[128:, :128])) == {0}
    for i, j in [(0, 0), (0, 1), (1, 1)]:
        tile = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        alone, alone_scale = ops.quantize(w[tile], (FULL, FULL), E4M3FN.dtype, "fp32")
        assert_same_bytes(data[tile], alone)
        assert scale[i, j].item() == alone_scale.item()


@pytest.mark.parametrize("device", DEVICES)
def test_a_zero_block_beside_a_live_one(device: str) -> None:
    """1 x 128 blocks, the second one zero: as if there were only the first."""
    x = torch.randn(4, 256, dtype=torch.bfloat16, device=device)
    x[:, 128:] = 0
    data, scale = ops.quantize(x, (1, 128), E4M3FN.dtype, "fp32")
    alone, alone_scale = ops.quantize(x[:, :128], (1, 128), E4M3FN.dtype, "fp32")
    assert_same_bytes(data[:, :128], alone)
    assert_same_bytes(scale[:, :1], alone_scale)
    assert set(codes_of(data[:, 128:])) == {0}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("mode", SCALE_MODES)
def test_extreme_amax_stays_finite(mode: str, fmt: Float8Format, device: str) -> None:
    """Beside a block with amax 1; nothing is NaN, the error is that of FP8 or of the floor."""
    for amax in (1e-44, 1e-40, 1e-38, 1e-36, 1e-30, 3e38):
        x = torch.tensor([[amax, -amax / 3, 0.0, 1.0, 0.3, -0.0]], device=device)
        assert_quantize(x, (1, 3), fmt, mode)
        data, scale = ops.quantize(x, (1, 3), fmt.dtype, mode)
        assert data.float().isfinite().all()
        back = ops.dequantize(data, scale, (1, 3), torch.float32)
        # An eighth (half a step of e5m2, saturation under "floor"), or a step under the floor.
        step = fmt.smallest_subnormal * 2.0**-126
        assert ((back - x).abs() <= x.abs() * 0.126 + step).all(), (x, back)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["e8m0_floor", "e8m0_rceil"])
def test_mxfp8_of_values_that_push_the_scale_to_code_0(mode: str, device: str) -> None:
    exponents = torch.linspace(-40, -35, 32 * 64).view(32, 64)
    x = (10.0**exponents).to(torch.bfloat16).to(device)
    assert x.count_nonzero() == x.numel()
    data, scale = ops.quantize(x, (1, 32), E4M3FN.dtype, mode)
    assert_quantize(x, (1, 32), E4M3FN, mode)
    assert 0 in codes_of(scale)
    assert data.float().isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_small_float16_is_scaled_in_float32(device: str) -> None:
    """The reciprocal scale, about 5.9e7, is beyond float16."""
    x = torch.randn(8, 8, device=device).clamp(-1, 1).to(torch.float16)
    x[0, 0] = 1
    x = x * 2.0**-17
    data, scale = ops.quantize(x, (FULL, FULL), E4M3FN.dtype, "fp32")
    assert scale.item() == oracle.float32(oracle.Fraction(2.0**-17) / 448)
    back = ops.dequantize(data, scale, (FULL, FULL), torch.float16)
    half_step = x.float().abs() * 2.0**-4 + scale.item() * E4M3FN.smallest_subnormal / 2
    assert ((back.float() - x.float()).abs() <= half_step + 2.0**-25).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [(1, FULL), (1, 128)], ids=str)
def test_tiny_neighbours_flush_to_zero(block: Block, device: str) -> None:
    x = torch.tensor([[1.0, 1e-20, 0.0]], device=device)
    data, scale = ops.quantize(x, block, E4M3FN.dtype, "fp32")
    assert codes_of(data) == [0x7E, 0, 0]
    back = ops.dequantize(data, scale, block, torch.float32)
    torch.testing.assert_close(back, torch.tensor([[1.0, 0.0, 0.0]], device=device))


# ------------------------------------------------------------------------- non-finite, -0, ties


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@granularity
def test_a_non_finite_value_makes_its_block_nan_and_leaves_the_others_alone(
    block: Block, mode: str, fmt: Float8Format, device: str
) -> None:
    for dtype, bad in zip(DTYPES, (math.nan, math.inf, -math.inf), strict=True):
        clean = torch.randn(130, 160, device=device).to(dtype)
        x = clean.clone()
        x[1, 33] = bad
        hit = torch.zeros(x.shape, dtype=torch.bool, device=device)
        rows, columns = (
            slice(None) if b == FULL else slice(i - i % b, i - i % b + b)
            for b, i in zip(block, (1, 33), strict=True)
        )
        hit[rows, columns] = True
        data, scale = ops.quantize(x, block, fmt.dtype, mode)
        back = ops.dequantize(data, scale, block, dtype)
        assert torch.equal(back.isnan(), hit)
        assert set(codes_of(data.view(torch.uint8)[hit].view(fmt.dtype))) == {0}
        clean_data, clean_scale = ops.quantize(clean, block, fmt.dtype, mode)
        assert_same_bytes(data.view(torch.uint8)[~hit], clean_data.view(torch.uint8)[~hit])
        canonical = 255 if scale.dtype == E8M0.dtype else oracle.NAN_BITS
        pairs = zip(scale_codes(scale), scale_codes(clean_scale), strict=True)
        assert [now for now, then in pairs if now != then] == [canonical]


def test_nan_anywhere_beside_inf_is_seen() -> None:
    """The maximum is taken over bits, so that no comparison loses the NaN."""
    for row in itertools.permutations([math.nan, 1.0, math.inf, -2.0]):
        data, scale = ops.quantize(torch.tensor([row]), (1, FULL), E4M3FN.dtype, "fp32")
        assert scale_codes(scale) == [oracle.NAN_BITS]
        assert codes_of(data) == [0] * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_negative_zero_and_negative_underflow(dtype: torch.dtype, device: str) -> None:
    """fn keeps the sign; fnuz has one zero, since 0x80 is its NaN."""
    x = torch.tensor([[-0.0, -(2.0**-18), -1e-7, 0.0, 1.0]], device=device).to(dtype)
    for fmt in FORMATS:
        given = torch.ones(1, 1, device=device)
        data, _ = ops.quantize_static(x, given, (1, FULL), fmt.dtype)
        zero = 0x80 if fmt.flavour == "fn" else 0x00
        assert codes_of(data)[:4] == [zero, zero, zero, 0x00]
        assert not data.float().isnan().any()
        back = ops.dequantize(data, given, (1, FULL), torch.float32)
        assert math.copysign(1, back[0, 0].item()) == (-1 if fmt.flavour == "fn" else 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_tie_rounds_to_even(fmt: Float8Format, device: str) -> None:
    """The midpoint of every two neighbours, and the float32 numbers next to it, of either sign."""
    codes = [c for c in range(0x7F) if oracle.decode(c + 1, fmt.name) <= fmt.max]
    middles = [(oracle.decode(c, fmt.name) + oracle.decode(c + 1, fmt.name)) / 2 for c in codes]
    one = torch.ones((), device=device)
    ties = torch.tensor(middles, device=device)
    for sign in (1, -1):
        for step, expected in [
            (-math.inf, codes),
            (None, [c + (c & 1) for c in codes]),
            (math.inf, [c + 1 for c in codes]),
        ]:
            x = ties if step is None else ties.nextafter(one * step)
            data, _ = ops.quantize_static(sign * x, one.view(1), (FULL,), fmt.dtype)
            zero = 0x80 if fmt.has_negative_zero else 0x00
            signed = [(c | 0x80 if c else zero) if sign < 0 else c for c in expected]
            assert codes_of(data) == signed


# ----------------------------------------------------------------------------------- given scales


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@case
def test_quantize_static(
    shape: tuple[int, ...], block: Block, dtype: torch.dtype, device: str
) -> None:
    x = awkward(shape, dtype, device)
    counts = scale_shape(shape, block)
    given = (torch.rand(counts, device=device) + 0.5) * torch.exp2(
        torch.randint(-12, 4, counts, device=device)
    )
    codes = torch.randint(100, 150, counts, dtype=torch.uint8, device=device)
    for fmt in FORMATS:
        for scale in (given, codes.view(E8M0.dtype)):
            decoded = (
                [oracle.e8m0_value(c) for c in codes_of(scale)]
                if scale.dtype == E8M0.dtype
                else values_of(scale)
            )
            data, used = ops.quantize_static(x, scale, block, fmt.dtype)
            expected = oracle.quantize_static(values_of(x), shape, decoded, block, fmt.name)
            assert data.dtype == fmt.dtype
            assert_cast(x, (data, used), expected)
            assert_same_bytes(used, scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_finite_values_saturate_at_the_maximum(fmt: Float8Format, device: str) -> None:
    """From 464 on, torch's own casts differ by version, and from Triton's."""
    values = [448.0, 464.0, 465.0, 1e4, 6e4, 3e38, 247.9, 248.0]
    x = torch.tensor([values + [-v for v in values]], device=device)
    data, _ = ops.quantize_static(x, torch.ones(1, 1, device=device), (1, FULL), fmt.dtype)
    got = data.float()
    assert got.isfinite().all()
    expected = x.clamp(-fmt.max, fmt.max)
    beyond = x.abs() >= fmt.max
    assert torch.equal(got[beyond], expected[beyond])
    assert codes_of(data) == [oracle.encode(v, fmt.name) for v in values_of(x)]


@pytest.mark.parametrize("device", DEVICES)
def test_given_scales_that_cannot_scale_give_nan_blocks(device: str) -> None:
    """Zero, negative, Inf, NaN, and those so small that their reciprocal is infinite."""
    bad = [0.0, -0.0, -1.0, math.inf, -math.inf, math.nan, 2.0**-129, 1e-45, -(2.0**-127)]
    good = [1.0, 2.0**-126, 2.0**-127, 2.0**127, 3e38]
    scale = torch.tensor([[s] for s in bad + good], device=device)
    x = torch.tensor([[1.0, 0.0, 1e-38]], device=device).expand(len(scale), 3)
    data, used = ops.quantize_static(x, scale, (1, FULL), E4M3FN.dtype)
    assert scale_codes(used)[: len(bad)] == [oracle.NAN_BITS] * len(bad)
    assert set(codes_of(data[: len(bad)])) == {0}
    assert used[len(bad) :, 0].tolist() == scale[len(bad) :, 0].tolist()
    assert data[len(bad) :].float().isfinite().all()
    back = ops.dequantize(data, used, (1, FULL), torch.float32)
    assert back[: len(bad)].isnan().all()
    expected = oracle.quantize_static(values_of(x), x.shape, values_of(scale), (1, FULL), "e4m3fn")
    assert_cast(x, (data, used), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_every_e8m0_scale_can_be_given(device: str) -> None:
    """Code 0 is 2^-127 and usable, 255 is NaN."""
    scale = from_codes(range(256), E8M0, device).view(256, 1)
    draw = random.Random(0)
    values = [[oracle.e8m0_value(min(c, 254)) * v for v in (1.0, -1.75)] for c in range(256)]
    values = [[max(min(v, 3e38), -3e38) for v in row] + [draw.uniform(-9, 9)] for row in values]
    x = torch.tensor(values, device=device)
    data, used = ops.quantize_static(x, scale, (1, FULL), E4M3FN.dtype)
    assert_same_bytes(used, scale)
    assert codes_of(data[:254, :1]) == [0x38] * 254  # 1.0
    assert codes_of(data[255]) == [0, 0, 0]
    decoded = [oracle.e8m0_value(c) for c in range(256)]
    expected = oracle.quantize_static(values_of(x), x.shape, decoded, (1, FULL), "e4m3fn")
    assert_cast(x, (data, used), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_under_a_given_scale(bad: float, device: str) -> None:
    x = torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 3.0]], device=device)
    for scale in (torch.ones(2, 1, device=device), from_codes([127, 127], E8M0, device).view(2, 1)):
        data, used = ops.quantize_static(x, scale, (1, FULL), E4M3FN.dtype)
        canonical, one = (255, 127) if scale.dtype == E8M0.dtype else (oracle.NAN_BITS, 0x3F800000)
        assert scale_codes(used) == [canonical, one]
        assert codes_of(data) == [0, 0, 0] + [oracle.encode(v, "e4m3fn") for v in (1.0, 2.0, 3.0)]


def test_the_given_scale_is_left_as_it_was() -> None:
    scale = torch.tensor([[0.0], [1.0]])
    _, used = ops.quantize_static(torch.randn(2, 3), scale, (1, FULL), E4M3FN.dtype)
    assert scale.tolist() == [[0.0], [1.0]]
    assert used.data_ptr() != scale.data_ptr()


def test_quantising_again_under_the_same_scale_changes_nothing() -> None:
    """The values of a cast are fixed points of it."""
    x = torch.randn(9, 40)
    for fmt, mode in SETTINGS:
        data, scale = ops.quantize(x, (1, 32), fmt.dtype, mode)
        values = ops.dequantize(data, scale, (1, 32), torch.float32)
        again, used = ops.quantize_static(values, scale, (1, 32), fmt.dtype)
        assert_same_bytes(again, data)
        assert_same_bytes(used, scale)


# -------------------------------------------------------------------------------------- and back


def dequantized(code: int, scale: float, name: str, dtype: torch.dtype) -> int:
    """Bits of the product in float32, rounded once more to dtype."""
    value = oracle.times(oracle.decode(code, name), scale)
    if dtype == torch.float32:
        return oracle.bits_of(value)
    return (oracle.to_bfloat16 if dtype == torch.bfloat16 else oracle.to_float16)(value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_dequantize_every_byte(fmt: Float8Format, dtype: torch.dtype, device: str) -> None:
    """256 codes under E8M0 and float32 scales from one end to the other."""
    data = from_codes(range(256), fmt, device).view(256, 1)
    codes = [0, 1, 2, 63, 110, 126, 127, 128, 140, 200, 246, 254]
    e8m0 = from_codes(codes, E8M0, device).view(1, -1)
    fp32 = torch.tensor([[1.0, 0.1, 1e-3, 2.0**-126, 1e-41, 3.4e38, 7.3e30]], device=device)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    mask = (1 << 8 * dtype.itemsize) - 1
    finite = [c for c in range(256) if data[c].float().isfinite().item()]
    for scale, values in [(e8m0, [oracle.e8m0_value(c) for c in codes]), (fp32, values_of(fp32))]:
        grid = data.view(torch.uint8).expand(256, len(values)).contiguous().view(fmt.dtype)
        out = ops.dequantize(grid, scale, (FULL, 1), dtype)
        assert out.dtype == dtype
        got = [[b & mask for b in row] for row in out.view(integer).tolist()]
        for code in finite:
            assert got[code] == [dequantized(code, s, fmt.name, dtype) for s in values], hex(code)
        for code in set(range(256)) - set(finite):
            infinite = fmt is E5M2 and code & 3 == 0
            assert (out[code].isinf() if infinite else out[code].isnan()).all(), hex(code)


@pytest.mark.parametrize("device", DEVICES)
def test_dequantize_every_e8m0_scale(device: str) -> None:
    """Code 0 is 2^-127 and not 0, 254 is 2^127, 255 is NaN and not Inf."""
    scale = from_codes(range(256), E8M0, device).view(256, 1)
    ones = from_codes([0x38] * 256, E4M3FN, device).view(256, 1)
    out = ops.dequantize(ones, scale, (1, 1), torch.float32)
    assert values_of(out)[:255] == [oracle.e8m0_value(c) for c in range(255)]
    assert out[255].isnan().all()
    zeros = ops.dequantize(torch.zeros_like(ones), scale, (1, 1), torch.float32)
    assert (zeros[:255] == 0).all() and zeros[255].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@case
def test_dequantize_of_every_block_shape(shape: tuple[int, ...], block: Block, device: str) -> None:
    x = awkward(shape, torch.float32, device)
    data, scale = ops.quantize(x, block, E4M3FN.dtype, "fp32")
    out = ops.dequantize(data, scale, block, torch.bfloat16)
    scales = values_of(scale)
    expected = [
        dequantized(code, scales[number], "e4m3fn", torch.bfloat16)
        for code, number in zip(codes_of(data), oracle.blocks_of(shape, block), strict=True)
    ]
    assert [b & 0xFFFF for b in out.cpu().view(torch.int16).flatten().tolist()] == expected
    assert out.shape == shape and out.is_contiguous()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_largest_numbers_come_back_finite_under_float32_scales(
    fmt: Float8Format, dtype: torch.dtype
) -> None:
    """Under power-of-two scales they round up past the largest number; "floor" clamps them."""
    largest = torch.tensor([[torch.finfo(dtype).max]], dtype=dtype)
    backs = {}
    for mode in SCALE_MODES:
        data, scale = ops.quantize(largest, (1, FULL), fmt.dtype, mode)
        assert scale.float().isfinite().all() and data.float().isfinite().all()
        backs[mode] = ops.dequantize(data, scale, (1, FULL), dtype)
    assert torch.equal(backs["fp32"], largest)
    assert backs["e8m0_floor"].isfinite().all()
    assert backs["e8m0_rceil"].isinf().all()


# ------------------------------------------------------------------------ memory: layout and views


def views(device: str) -> dict[str, Tensor]:
    """Tensors that share memory with a larger one, or with themselves."""
    base = torch.randn(64, 96, dtype=torch.bfloat16, device=device)
    flat = torch.randn(1 + 40 * 48, dtype=torch.bfloat16, device=device)
    image = torch.randn(2, 3, 5, 33, dtype=torch.bfloat16, device=device)
    return {
        "transposed": base.t(),
        "every second row": base[::2],
        "every second column": base[:, ::2],
        "columns 8 to 40": base[:, 8:40],
        "expanded rows": base[:1].expand(40, 96),
        "expanded columns": base[:, :1].expand(64, 40),
        "expanded scalar": base[0, 0].expand(33, 40),
        "offset 1": flat[1:].view(40, 48),
        "one column": base[:, 5:6],
        "one row, transposed": base[:, 5:6].t(),
        "permuted 3-D": image[0].permute(2, 0, 1),
        "channels last": image.to(memory_format=torch.channels_last),
        "permuted 4-D": image.permute(3, 1, 0, 2),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(views("cpu")))
def test_views_give_the_bytes_and_strides_of_contiguous_tensors(name: str, device: str) -> None:
    x = views(device)[name]
    whole = x.clone(memory_format=torch.contiguous_format)
    before = x.clone()
    for last_two, mode in GRANULARITIES.values():
        block = (1,) * (x.ndim - 2) + last_two
        data, scale = cast = ops.quantize(x, block, E4M3FN.dtype, mode)
        assert_same_cast(cast, ops.quantize(whole, block, E4M3FN.dtype, mode))
        # given scales and data may be views as well
        loose = scale.mT.contiguous().mT if scale.is_contiguous() else scale.contiguous()
        assert_same_cast(ops.quantize_static(x, loose, block, E4M3FN.dtype), cast)
        holey = data.view(torch.uint8).repeat_interleave(2, -1)[..., ::2].view(data.dtype)
        for strided in (holey, data.mT.contiguous().mT):
            back = ops.dequantize(strided, loose, block, torch.float32)
            assert_same_bytes(back, ops.dequantize(data, scale, block, torch.float32))
            assert back.is_contiguous()
    assert_same_bytes(x, before)


def dual_settings(block: Block) -> list[tuple[object, ...]]:
    """Arguments of quantize_dual after x: blocks of one kind in both layouts, or of two."""
    turned = (*block[:-2], block[-1], block[-2])
    first = (block, E4M3FN.dtype, "fp32")
    return [(*first, *first), (*first, turned, E5M2.dtype, "e8m0_rceil")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@case
def test_quantize_dual_is_a_cast_of_x_and_one_of_its_transpose(
    shape: tuple[int, ...], block: Block, dtype: torch.dtype, device: str
) -> None:
    if len(shape) < 2:
        pytest.skip("has no transpose")
    x = awkward(shape, dtype, device)
    for arguments in dual_settings(block):
        data, scale, data_t, scale_t = ops.quantize_dual(x, *arguments)
        assert_same_cast((data, scale), ops.quantize(x, *arguments[:3]))
        assert_same_cast((data_t, scale_t), ops.quantize(x.mT.contiguous(), *arguments[3:]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(5, 7), (128, 256), (3, 36, 200)], ids=str)
@pytest.mark.parametrize("mode", ["fp32", "pow2", "e8m0_even"])
def test_given_amax_stands_for_the_measured_one(
    shape: tuple[int, ...], mode: str, device: str
) -> None:
    x = awkward(shape, torch.bfloat16, device)
    block = (*(1,) * (len(shape) - 2), FULL, FULL)
    settings = (block, E4M3FN.dtype, mode)
    amax = x.float().abs().amax((-2, -1), keepdim=True)
    assert_same_cast(ops.quantize(x, *settings, amax), ops.quantize(x, *settings))
    dual = ops.quantize_dual(x, *settings, *settings)
    for given in (amax, -amax):  # also of a NaN, the sign says nothing
        for one, other in zip(ops.quantize_dual(x, *settings, *settings, given), dual, strict=True):
            assert_same_bytes(one, other)
    x = torch.randn(shape, device=device)
    data, scale = ops.quantize(x, *settings, torch.full_like(amax, 0.5))
    back = ops.dequantize(data, scale, block, torch.float32)
    assert back.abs().max() <= E4M3FN.max * scale.float().max() < x.abs().max()  # it saturates
    want = ops.dequantize(*ops.quantize_static(x, scale, block, E4M3FN.dtype), block, torch.float32)
    assert_same_bytes(back, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(5, 7), (128, 256), (3, 36, 200)], ids=str)
@pytest.mark.parametrize("later", [(1, FULL), (FULL, FULL)], ids=["rowwise", "tensorwise"])
@granularity
def test_quantize_and_measure_is_one_cast_and_what_the_next_needs(
    block: Block, mode: str, later: Block, shape: tuple[int, ...], device: str
) -> None:
    lead = (1,) * (len(shape) - 2)
    block, later = (*lead, *block[-2:]), (*lead, *later)
    for x in (awkward(shape, torch.bfloat16, device), torch.randn(shape, device=device).mT):
        data, scale, amax = ops.quantize_and_measure(x, block, E4M3FN.dtype, mode, later)
        assert_same_cast((data, scale), ops.quantize(x, block, E4M3FN.dtype, mode))
        given = ops.quantize(x.mT, later, E4M3FN.dtype, "fp32", amax)
        assert_same_cast(given, ops.quantize(x.mT, later, E4M3FN.dtype, "fp32"))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


@pytest.mark.parametrize("device", DEVICES)
@case
def test_strides_of_data_and_scale(shape: tuple[int, ...], block: Block, device: str) -> None:
    """Data is row-major; scales of blocks along a row stand column by column, all others by row."""
    x = torch.randn(shape, device=device)
    data, scale = ops.quantize(x, block, E4M3FN.dtype, "fp32")
    assert data.stride() == contiguous_strides(shape)
    along_rows = len(block) >= 2 and block[-2] == 1 and block[-1] > 1
    if along_rows:
        assert scale.mT.stride() == contiguous_strides(scale.mT.shape)
    else:
        assert scale.stride() == contiguous_strides(scale.shape)
    _, used = ops.quantize_static(x, scale.contiguous(), block, E4M3FN.dtype)
    assert used.stride() == scale.stride()


def test_blockwise_scale_is_stored_column_by_column() -> None:
    for rows, blocks, stride in [(5, 3, (1, 5)), (1, 3, (1, 1)), (5, 1, (1, 5))]:
        x = torch.randn(rows, 128 * blocks)
        scale = ops.quantize(x, (1, 128), E4M3FN.dtype, "fp32")[1]
        assert (tuple(scale.shape), scale.stride()) == ((rows, blocks), stride)


@pytest.mark.parametrize("device", DEVICES)
@granularity
def test_nothing_is_read_that_nobody_wrote(block: Block, mode: str, device: str) -> None:
    """Deterministic mode fills empty tensors with NaN; ragged edges of blocks must not show it."""
    x = torch.randn(131, 77, dtype=torch.bfloat16, device=device)
    plain = ops.quantize(x, block, E4M3FN.dtype, mode)
    with deterministic():
        assert torch.empty(3, dtype=E4M3FN.dtype, device=device).float().isnan().all()
        poisoned = ops.quantize(x, block, E4M3FN.dtype, mode)
        static = ops.quantize_static(x, plain[1], block, E4M3FN.dtype)
        back = ops.dequantize(*plain, block, torch.bfloat16)
    assert_same_cast(poisoned, plain)
    assert_same_cast(static, plain)
    assert_same_bytes(back, ops.dequantize(*plain, block, torch.bfloat16))
    assert back.isfinite().all()


# ------------------------------------------------------------------- fake tensors, opcheck, compile


def samples(device: str = "cpu") -> list[tuple[object, tuple[object, ...]]]:
    """(op, arguments) for the checks of torch.library."""
    found: list[tuple[object, tuple[object, ...]]] = []
    image = torch.randn(2, 5, 33, device=device)
    for x, block, fmt, mode in [
        (torch.randn(5, 7, device=device, dtype=torch.bfloat16), (1, FULL), E4M3FN, "fp32"),
        (torch.randn(3, 257, device=device), (1, 128), E4M3FNUZ, "pow2"),
        (torch.randn(65, 40, device=device).t(), (1, 32), E5M2, "e8m0_rceil"),
        (torch.randn(0, 64, device=device, dtype=torch.float16), (128, 128), E4M3FN, "fp32"),
        (image.permute(2, 0, 1), (1, FULL, 1), E5M2FNUZ, "fp32"),
    ]:
        settings = (block, fmt.dtype, mode)
        data, scale = ops.quantize(x, *settings)
        found += [
            (ops.quantize.default, (x, *settings)),
            (ops.quantize_dual.default, (x, *settings, block, E5M2.dtype, "fp32")),
            (ops.quantize_static.default, (x, scale, block, fmt.dtype)),
            (ops.dequantize.default, (data, scale, block, torch.bfloat16)),
        ]
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(20))
def test_opcheck(index: int, device: str) -> None:
    """Schema, fake kernel, and tracing with dynamic shapes."""
    op, arguments = samples(device)[index]
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    if all(t.dtype in DTYPES for t in tensors):
        checks.append("test_schema")  # it compares inputs by isclose, which FP8 has not
    before = [t.clone() for t in tensors]
    torch.library.opcheck(op, arguments, test_utils=checks)
    for now, then in zip(tensors, before, strict=True):
        assert_same_bytes(now, then)


@pytest.mark.parametrize("device", DEVICES)
@case
def test_fake_and_meta_tensors_have_the_real_shapes_and_strides(
    shape: tuple[int, ...], block: Block, device: str
) -> None:
    """Exact strides, those of dimensions of length 1 included, also of transposed input."""

    def facts(tensors: Sequence[Tensor]) -> list[object]:
        return [(t.shape, t.dtype, t.stride()) for t in tensors]

    x = torch.randn(shape, device=device)
    for view, mode in [(x, "fp32"), (x.mT.contiguous().mT if x.ndim >= 2 else x, "e8m0_floor")]:
        real = ops.quantize(view, block, E4M3FN.dtype, mode)
        static = ops.quantize_static(view, real[1], block, E4M3FN.dtype)
        turned = real[0].mT.contiguous().mT if x.ndim >= 2 else real[0]
        back = ops.dequantize(turned, real[1], block, torch.bfloat16)
        settings = dual_settings(block) if x.ndim >= 2 else []
        duals = [(each, ops.quantize_dual(view, *each)) for each in settings]
        meta = ops.quantize(view.to("meta"), block, E4M3FN.dtype, mode)
        assert all(t.device.type == "meta" for t in meta)
        assert facts(meta) == facts(real)
        with FakeTensorMode() as fake:
            fx, data, scale = (fake.from_tensor(t) for t in (view, turned, real[1]))
            fakes = ops.quantize(fx, block, E4M3FN.dtype, mode)
            assert facts(fakes) == facts(real)
            assert all(t.device == x.device for t in fakes)
            assert facts(ops.quantize_static(fx, scale, block, E4M3FN.dtype)) == facts(static)
            for each, dual in duals:
                assert facts(ops.quantize_dual(fx, *each)) == facts(dual)
            assert facts([ops.dequantize(data, scale, block, torch.bfloat16)]) == facts([back])


def cast_all_ways(x: Tensor) -> list[Tensor]:
    """Casts of a computed tensor and back, in one graph."""
    y = x * 2
    found = []
    for block, mode in GRANULARITIES.values():
        data, scale = ops.quantize(y, block, E4M3FN.dtype, mode)
        found += [data, scale, ops.dequantize(data, scale, block, y.dtype)]
    return [*found, *ops.quantize_static(y, found[4], (1, FULL), E5M2.dtype)]


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_casts_give_eager_bytes_for_any_size(device: str) -> None:
    compiled = torch.compile(cast_all_ways, fullgraph=True, backend="aot_eager", dynamic=True)
    # More than one block either way: torch guards on whether a length, of scales too, is 1.
    for rows, columns in [(300, 400), (130, 257), (257, 129)]:
        x = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
        for ours, eager in zip(compiled(x), cast_all_ways(x), strict=True):
            assert_same_bytes(ours, eager)
            assert ours.stride() == eager.stride()
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert frames == 1, f"{frames} compilations"


@pytest.mark.parametrize("device", DEVICES)
def test_inductor_gives_eager_bytes(device: str) -> None:
    def casts(bf16: Tensor, fp16: Tensor, fp32: Tensor) -> list[Tensor]:
        found = []
        for x in (bf16, fp16, fp32):
            for name in ("tensorwise", "rowwise", "blockwise", "mxfp8"):
                block, mode = GRANULARITIES[name]
                cast = ops.quantize(x * 2, block, E4M3FN.dtype, mode)
                found += [*cast, ops.dequantize(*cast, block, x.dtype)]
        return found

    inputs = [torch.randn(33, 130, device=device).to(dtype) for dtype in DTYPES]
    compiled = torch.compile(casts, fullgraph=True)(*inputs)
    for ours, eager in zip(compiled, casts(*inputs), strict=True):
        assert_same_bytes(ours, eager)
        assert ours.stride() == eager.stride()


# ----------------------------------------------------------------------------------------- refusals


def test_ops_refuse_what_they_do_not_take() -> None:
    """In words, for real and for fake tensors alike."""
    x, one = torch.randn(4, 6), torch.ones(4, 1)
    e4m3 = E4M3FN.dtype
    data = torch.zeros(4, 6, dtype=e4m3)
    calls = {
        ops.quantize: [
            (x.double(), (1, FULL), e4m3, "fp32"),
            (x.int(), (1, FULL), e4m3, "fp32"),
            (data, (1, FULL), e4m3, "fp32"),
            (x, (1,), e4m3, "fp32"),
            (x, (1, 0), e4m3, "fp32"),
            (x, (1, FULL), E8M0.dtype, "fp32"),
            (x, (1, FULL), torch.bfloat16, "fp32"),
            (x, (1, FULL), e4m3, "e8m0"),
        ],
        ops.quantize_static: [
            (x.double(), one, (1, FULL), e4m3),
            (x, one, (1, FULL), E8M0.dtype),
            (x, one, (FULL, FULL), e4m3),
            (x, one.bfloat16(), (1, FULL), e4m3),
        ],
        ops.dequantize: [
            (x, one, (1, FULL), torch.float32),
            (data, one, (1, FULL), torch.float64),
            (data, one, (1, 3), torch.float32),
            (one.to(E8M0.dtype), one, (1, FULL), torch.float32),
        ],
    }
    messages = []
    for op, arguments in calls.items():
        for args in arguments:
            with pytest.raises(ValueError) as refused:
                op(*args)
            messages.append(str(refused.value))
            about_the_scale = messages[-1].startswith("scale is")
            if not about_the_scale:  # its shape may be symbolic there
                meta = [a.to("meta") if isinstance(a, Tensor) else a for a in args]
                with pytest.raises(ValueError) as fake:
                    op(*meta)
                assert str(fake.value) == messages[-1]
    assert_expected_inline(
        "\n".join(messages),
        """\
x is torch.float64; a cast takes torch.bfloat16, torch.float16, torch.float32, so convert it first
x is torch.int32; a cast takes torch.bfloat16, torch.float16, torch.float32, so convert it first
x is torch.float8_e4m3fn; a cast takes torch.bfloat16, torch.float16, torch.float32, so convert it first
block (1) has 1 entries but the tensor of shape (4, 6) has 2 dimensions; give one entry per dimension (a size, or float8.FULL)
block (1, 0) holds 0; every entry must be a positive size or float8.FULL (-1)
dtype=torch.float8_e8m0fnu is a format for scales only; use an e4m3 or e5m2 dtype
torch.bfloat16 is not an FP8 dtype; those are torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu.
scale_mode 'e8m0' is unknown; choose one of fp32, pow2, e8m0_floor, e8m0_even, e8m0_ceil, e8m0_rceil
x is torch.float64; a cast takes torch.bfloat16, torch.float16, torch.float32, so convert it first
dtype=torch.float8_e8m0fnu is a format for scales only; use an e4m3 or e5m2 dtype
scale is torch.float32 of shape (4, 1); data of shape (4, 6) in blocks (FULL, FULL) needs torch.float32 or torch.float8_e8m0fnu of shape (1, 1), one entry per block
scale is torch.bfloat16 of shape (4, 1); data of shape (4, 6) in blocks (1, FULL) needs torch.float32 or torch.float8_e8m0fnu of shape (4, 1), one entry per block
torch.float32 is not an FP8 dtype; those are torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu.
dtype=torch.float64 must be one of torch.bfloat16, torch.float16, torch.float32
scale is torch.float32 of shape (4, 1); data of shape (4, 6) in blocks (1, 3) needs torch.float32 or torch.float8_e8m0fnu of shape (4, 2), one entry per block
data is torch.float8_e8m0fnu, a format for scales only; data has an e4m3 or e5m2 dtype""",  # noqa: E501
    )


# --------------------------------------------------------------------------------------- properties


def test_properties_of_any_cast() -> None:
    """Against the oracle, on shapes, blocks and values that hypothesis finds."""
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    special = [0.0, -0.0, 1.9999999, 448.0, 464.0, 1e-45, 3e38]
    number = st.floats(width=32) | st.sampled_from(special)

    @hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @hypothesis.given(st.data())
    def check(draw: object) -> None:
        shape = tuple(draw.draw(st.lists(st.integers(0, 4), max_size=4)))
        block = tuple(draw.draw(st.sampled_from([FULL, 1, 2, 3, 7])) for _ in shape)
        count = math.prod(shape)
        values = draw.draw(st.lists(number, min_size=count, max_size=count))
        x = torch.tensor(values, dtype=torch.float32).view(shape)
        fmt = draw.draw(st.sampled_from(FORMATS))
        assert_quantize(x, block, fmt, draw.draw(st.sampled_from(SCALE_MODES)))

    check()


@pytest.mark.parametrize("factor", [2.0**-9, 2.0, 2.0**20])
def test_a_power_of_two_moves_into_the_scale(factor: float) -> None:
    x = torch.randn(17, 40)
    for fmt, mode in SETTINGS:
        data, scale = ops.quantize(x, (1, 32), fmt.dtype, mode)
        scaled, moved = ops.quantize(x * factor, (1, 32), fmt.dtype, mode)
        assert_same_bytes(scaled, data)
        assert torch.equal(moved.float(), scale.float() * factor)


def test_a_cast_commutes_with_permuting_blocks_and_transposing() -> None:
    """A scale knows nothing but its block."""
    x = torch.randn(12, 64)
    order = torch.randperm(12)
    for fmt, mode in SETTINGS:
        data, scale = ops.quantize(x, (1, 32), fmt.dtype, mode)
        moved, moved_scale = ops.quantize(x[order], (1, 32), fmt.dtype, mode)
        assert_same_bytes(moved, data[order])
        assert torch.equal(moved_scale.float(), scale.float()[order])
        turned, turned_scale = ops.quantize(x.t(), (32, 1), fmt.dtype, mode)
        assert_same_bytes(turned, data.t())
        assert torch.equal(turned_scale.float(), scale.float().t())
