"""The five formats, byte by byte, against a decoder written from their bit layouts."""

import ast
import math
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

from float8.formats import (
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    Float8Format,
    format_of,
)

DATA_FORMATS = [f for f in FORMATS if f is not E8M0]
PACKAGE = Path(__file__).resolve().parent.parent / "float8"

# Exponent bits, mantissa bits, bias, and how the special values are coded.
LAYOUT = {
    "e4m3fn": (4, 3, 7, "all ones is NaN"),
    "e4m3fnuz": (4, 3, 8, "0x80 is NaN"),
    "e5m2": (5, 2, 15, "IEEE"),
    "e5m2fnuz": (5, 2, 16, "0x80 is NaN"),
}


def decode(name: str, code: int) -> float:
    """One byte to its value, by shifts alone."""
    if name == "e8m0":
        return math.nan if code == 0xFF else math.ldexp(1.0, code - 127)
    exponent_bits, mantissa_bits, bias, special = LAYOUT[name]
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    if special == "0x80 is NaN" and code == 0x80:
        return math.nan
    if special == "all ones is NaN" and code & 0x7F == 0x7F:
        return math.nan
    if special == "IEEE" and exponent == (1 << exponent_bits) - 1:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


def torch_values(fmt: Float8Format) -> list[float]:
    """All 256 codes as torch decodes them."""
    return torch.arange(256, dtype=torch.uint8).view(fmt.dtype).to(torch.float32).tolist()


def same(a: float, b: float) -> bool:
    """Equal as bits, so that -0 is not 0; all NaNs are one."""
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b and math.copysign(1, a) == math.copysign(1, b)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_code_decodes_as_the_bit_layout_says(fmt: Float8Format) -> None:
    wrong = [
        (hex(code), got, decode(fmt.name, code))
        for code, got in enumerate(torch_values(fmt))
        if not same(got, decode(fmt.name, code))
    ]
    assert wrong == []


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_facts_are_those_of_the_codes(fmt: Float8Format) -> None:
    values = [decode(fmt.name, code) for code in range(256)]
    finite = [v for v in values if math.isfinite(v)]
    positive = [v for v in finite if v > 0]
    assert fmt.max == max(finite)
    assert fmt.smallest_subnormal == min(positive)
    # From the smallest normal number on, an octave holds as many values as the mantissa has codes.
    whole = [v for v in positive if math.frexp(v)[0] == 0.5]  # powers of two
    steps = 1 << fmt.mantissa_bits
    full = [v for v in whole if sum(v <= w < 2 * v for w in positive) == steps]
    assert fmt.smallest_normal == min(full)
    assert fmt.nan_codes == tuple(c for c, v in enumerate(values) if math.isnan(v))
    assert fmt.has_inf == any(math.isinf(v) for v in values)
    assert fmt.has_negative_zero == any(v == 0 and math.copysign(1, v) < 0 for v in values)
    assert 2.0**fmt.max_exponent <= fmt.max < 2.0 ** (fmt.max_exponent + 1)
    assert same(fmt.max, torch.finfo(fmt.dtype).max)


def test_facts_as_the_specifications_print_them() -> None:
    facts = "\n".join(
        f"{f.name}: max {f.max:g}, emax {f.max_exponent}, "
        f"normal 2^{math.log2(f.smallest_normal):g}, "
        f"subnormal 2^{math.log2(f.smallest_subnormal):g}, NaN {[hex(c) for c in f.nan_codes]}"
        for f in FORMATS
    )
    assert_expected_inline(
        facts,
        """\
e4m3fn: max 448, emax 8, normal 2^-6, subnormal 2^-9, NaN ['0x7f', '0xff']
e4m3fnuz: max 240, emax 7, normal 2^-7, subnormal 2^-10, NaN ['0x80']
e5m2: max 57344, emax 15, normal 2^-14, subnormal 2^-16, NaN ['0x7d', '0x7e', '0x7f', '0xfd', '0xfe', '0xff']
e5m2fnuz: max 57344, emax 15, normal 2^-15, subnormal 2^-17, NaN ['0x80']
e8m0: max 1.70141e+38, emax 127, normal 2^-127, subnormal 2^-127, NaN ['0xff']""",  # noqa: E501
    )


@pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)
def test_a_cast_attains_the_extremes(fmt: Float8Format) -> None:
    extremes = [fmt.max, -fmt.max, fmt.smallest_normal, fmt.smallest_subnormal]
    assert torch.tensor(extremes).to(fmt.dtype).to(torch.float32).tolist() == extremes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)
def test_small_negatives_become_zero_and_never_nan(fmt: Float8Format, dtype: torch.dtype) -> None:
    """Byte 0x80 is -0 in FN and NaN in FNUZ: there a value that rounds to -0 must be byte 0."""
    small = torch.tensor([-0.0, -1e-10, -(2.0**-18)], dtype=dtype)
    small = torch.cat([small, small.new_full((1,), -fmt.smallest_subnormal / 2)])  # a tie, to even
    data = small.to(fmt.dtype).view(torch.uint8).tolist()
    assert data == [0x80 if fmt.has_negative_zero else 0x00] * 4


def test_one_byte_is_half_the_value_in_fnuz() -> None:
    for fn, fnuz in ((E4M3FN, E4M3FNUZ), (E5M2, E5M2FNUZ)):
        for code in range(256):
            value, half = decode(fn.name, code), decode(fnuz.name, code)
            if code != 0x80 and math.isfinite(value):
                assert half == value / 2


def test_maps_between_dtypes_are_total() -> None:
    one_byte_floats = {
        d
        for d in vars(torch).values()
        if isinstance(d, torch.dtype) and d.is_floating_point and d.itemsize == 1 and "8" in str(d)
    }
    assert {f.dtype for f in FORMATS} == one_byte_floats
    for fmt in FORMATS:
        assert format_of(fmt.dtype) is fmt
    assert len({f.triton for f in FORMATS}) == len({f.name for f in FORMATS}) == len(FORMATS)


def test_triton_names_exist() -> None:
    language = pytest.importorskip("triton.language")
    for fmt in FORMATS:
        assert getattr(language, fmt.triton).primitive_bitwidth == 8


def test_other_dtypes_are_refused_in_words() -> None:
    with pytest.raises(ValueError) as error:
        format_of(torch.bfloat16)
    assert_expected_inline(
        str(error.value),
        """torch.bfloat16 is not an FP8 dtype; those are torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu.""",  # noqa: E501
    )


def test_formats_are_values() -> None:
    assert len(set(FORMATS)) == 5
    with pytest.raises(AttributeError):
        E4M3FN.max = 1.0  # type: ignore[misc]
    assert f"{E4M3FN} {E5M2FNUZ}" == "e4m3fn e5m2fnuz"


def names_a_format(node: ast.AST) -> bool:
    """Whether the node is `torch.float8_...`, its name in a string, or a maximum."""
    if isinstance(node, ast.Attribute):
        return node.attr.startswith("float8_e")
    if isinstance(node, ast.ImportFrom):
        return any(alias.name.startswith("float8_e") for alias in node.names)
    if not isinstance(node, ast.Constant):
        return False
    if isinstance(node.value, str):  # getattr(torch, "float8_e4m3fn")
        return node.value.startswith(("float8_e", "torch.float8_e"))
    return type(node.value) in (int, float) and node.value in (448, 240, 57344)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("torch.float8_e5m2", True),
        ("getattr(torch, 'float8_e4m3fn')", True),
        ("from torch import float8_e4m3fn", True),
        ("x.clamp(-448, 448.0)", True),
        ("x / 57344", True),
        ("2.4e2", True),
        ("tl.float8e4nv", False),
        ("torch.ops.float8.quantize", False),
        ("'clamped to 448'", False),
        ("x + 1024", False),
    ],
)
def test_the_search_for_formats_finds_them(code: str, found: bool) -> None:
    assert any(map(names_a_format, ast.walk(ast.parse(code)))) == found


def test_no_other_module_knows_a_dtype_or_a_maximum() -> None:
    where = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "formats.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if names_a_format(node)
    ]
    assert where == []
