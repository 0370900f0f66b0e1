"""The cast to FP8 in plain Python, written from its rules and not from the library's code.

Numbers are floats, fractions and bit patterns; nothing here imports torch or float8. A product of
two float32 numbers is exact in a Python float (24 + 24 bits of 53), so every rounding below is one
that is asked for.
"""

import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

FULL = -1
NAN_BITS = 0x7FC00000
INF_BITS = 0x7F800000
MODES = ("fp32", "pow2", "e8m0_floor", "e8m0_even", "e8m0_ceil", "e8m0_rceil")


@dataclass(frozen=True)
class Layout:
    """What the bits of a format mean."""

    mantissa: int  # bits
    lowest: int  # exponent of the smallest normal number
    max: int
    negative_zero: bool

    @property
    def emax(self) -> int:
        """Exponent of the largest number."""
        return floor_log2(Fraction(self.max))


LAYOUTS = {
    "e4m3fn": Layout(3, -6, 448, True),
    "e4m3fnuz": Layout(3, -7, 240, False),
    "e5m2": Layout(2, -14, 57344, True),
    "e5m2fnuz": Layout(2, -15, 57344, False),
}


# ----------------------------------------------------------------------------------------- rounding


def floor_log2(value: Fraction) -> int:
    """The exponent of a positive number."""
    top, bottom = value.numerator, value.denominator
    guess = top.bit_length() - bottom.bit_length()
    reached = top >= bottom << guess if guess >= 0 else top << -guess >= bottom
    return guess if reached else guess - 1


def power_of_two(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def nearest_even(value: Fraction, mantissa: int, lowest: int) -> Fraction:
    """The nearest number of so many mantissa bits, no exponent below `lowest`; ties to even."""
    if value == 0:
        return value
    quantum = power_of_two(max(floor_log2(abs(value)), lowest) - mantissa)
    return round(value / quantum) * quantum  # Python rounds halves to even


def float32(value: Fraction) -> float:
    """The nearest float32; Inf from half a step beyond the largest."""
    rounded = nearest_even(value, 23, -126)
    return float(rounded) if abs(rounded) < 2**128 else math.copysign(math.inf, value)


def bits_of(value: float) -> int:
    """The bits of a number that is a float32 already; the canonical NaN for any NaN."""
    return NAN_BITS if math.isnan(value) else struct.unpack("<I", struct.pack("<f", value))[0]


def from_bits(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def from_bfloat16(bits: int) -> float:
    return from_bits(bits << 16)


def from_float16(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def to_bfloat16(value: float) -> int:
    """Bits of the nearest bfloat16 of a float32 that is not NaN."""
    bits = bits_of(value)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def to_float16(value: float) -> int:
    """Bits of the nearest float16 of a float32 that is not NaN."""
    try:
        return struct.unpack("<H", struct.pack("<e", value))[0]
    except OverflowError:
        return 0x7C00 if value > 0 else 0xFC00


# -------------------------------------------------------------------------------------------- scale


def amax_bits(values: Sequence[float]) -> int:
    """Bits of max |x|; NaN is above Inf is above all others. 0 for no values."""
    if any(math.isnan(v) for v in values):
        return NAN_BITS
    return bits_of(max((abs(v) for v in values), default=0.0))


def exponent_of_scale(amax: Fraction, name: str, mode: str) -> int:
    """e of the scale 2^e of an exact positive amax, each mode by its definition, not by bits."""
    layout = LAYOUTS[name]
    if mode in ("pow2", "e8m0_rceil"):  # the least power of two that keeps amax within max
        ratio = amax / layout.max
        e = floor_log2(ratio)
        return e if ratio == power_of_two(e) else e + 1
    if mode == "e8m0_even":  # as floor, of amax rounded to the format's mantissa
        amax = nearest_even(amax, layout.mantissa, -(10**6))
    e = floor_log2(amax)
    if mode == "e8m0_ceil" and amax != power_of_two(e):
        e += 1
    return e - layout.emax


def scale(amax: int, name: str, mode: str) -> float:
    """The scale of a block whose amax has the given bits; NaN where that is not finite."""
    if amax >= INF_BITS:
        return math.nan
    value = Fraction(from_bits(amax))
    if mode == "fp32":
        return max(float32(value / LAYOUTS[name].max), 2.0**-126)
    lowest = -126 if mode == "pow2" else -127
    e = lowest if amax == 0 else max(exponent_of_scale(value, name, mode), lowest)
    return math.ldexp(1.0, e)


def e8m0_code(value: float) -> int:
    """The code of a power of two or NaN."""
    return 255 if math.isnan(value) else floor_log2(Fraction(value)) + 127


def e8m0_value(code: int) -> float:
    return math.nan if code == 255 else math.ldexp(1.0, code - 127)


# --------------------------------------------------------------------------------------------- data


def encode(value: float, name: str) -> int:
    """The byte of a finite number: clamped to the format's maximum, then rounded to even."""
    layout = LAYOUTS[name]
    magnitude = min(abs(value), layout.max)
    exponent = layout.lowest
    if magnitude:
        exponent = max(math.frexp(magnitude)[1] - 1, layout.lowest)
    steps = round(math.ldexp(magnitude, layout.mantissa - exponent))  # exact, then halves to even
    code = ((exponent - layout.lowest) << layout.mantissa) + steps
    negative = math.copysign(1.0, value) < 0 and (code or layout.negative_zero)
    return code | 0x80 if negative else code


def decode(code: int, name: str) -> float:
    """The value of a byte that is finite in its format."""
    layout = LAYOUTS[name]
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> layout.mantissa, code & ((1 << layout.mantissa) - 1)
    if exponent:
        mantissa, exponent = mantissa + (1 << layout.mantissa), exponent - 1
    return sign * math.ldexp(mantissa, layout.lowest + exponent - layout.mantissa)


def times(x: float, y: float) -> float:
    """The nearest float32 to the product of two."""
    try:
        return struct.unpack("<f", struct.pack("<f", x * y))[0]
    except OverflowError:
        return math.copysign(math.inf, x * y)


def inverse(scale: float) -> float:
    """The nearest float32 to 1 / scale."""
    return float32(1 / Fraction(scale))


# -------------------------------------------------------------------------------------- whole casts


def scale_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    return tuple(1 if b == FULL else -(-n // b) for n, b in zip(shape, block, strict=True))


def blocks_of(shape: Sequence[int], block: Sequence[int]) -> list[int]:
    """For each element in row-major order, the row-major number of its block."""
    counts = scale_shape(shape, block)
    numbers = []
    for index in itertools.product(*map(range, shape)):
        number = 0
        for i, b, count in zip(index, block, counts, strict=True):
            number = number * count + (0 if b == FULL else i // b)
        numbers.append(number)
    return numbers


def quantize(
    values: Sequence[float], shape: Sequence[int], block: Sequence[int], name: str, mode: str
) -> tuple[list[int], list[float]]:
    """(bytes, scales), both row-major, of float32 values in row-major order."""
    numbers = blocks_of(shape, block)
    members: list[list[float]] = [[] for _ in range(math.prod(scale_shape(shape, block)))]
    for value, number in zip(values, numbers, strict=True):
        members[number].append(value)
    amaxes = [amax_bits(m) for m in members]
    scales = [scale(amax, name, mode) for amax in amaxes]
    live = [0 < amax < INF_BITS for amax in amaxes]
    inverses = [inverse(s) if alive else None for s, alive in zip(scales, live, strict=True)]
    return cast(values, numbers, inverses, name), scales


def quantize_static(
    values: Sequence[float],
    shape: Sequence[int],
    given: Sequence[float],
    block: Sequence[int],
    name: str,
) -> tuple[list[int], list[float]]:
    """The same under given scales, row-major; usable are finite ones of at least 2^-127."""
    numbers = blocks_of(shape, block)
    usable = [math.isfinite(s) and s >= 2.0**-127 for s in given]
    for value, number in zip(values, numbers, strict=True):
        usable[number] = usable[number] and math.isfinite(value)
    inverses = [inverse(s) if u else None for s, u in zip(given, usable, strict=True)]
    used = [s if u else math.nan for s, u in zip(given, usable, strict=True)]
    return cast(values, numbers, inverses, name), used


def cast(
    values: Sequence[float], numbers: Sequence[int], inverses: Sequence[float | None], name: str
) -> list[int]:
    """Bytes of values by the inverse scale of their block; 0 where a block has none."""
    data = []
    for value, number in zip(values, numbers, strict=True):
        inv = inverses[number]
        data.append(0 if inv is None else encode(times(value, inv), name))
    return data
