"""The FP8 number formats: the only place that names their torch dtypes and knows their maxima.

Bit layouts: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433) and the OCP
8-bit floating point specification (FN); Noune et al., "8-bit Numerical Formats for Deep Neural
Networks" (arXiv 2206.02915) for FNUZ; the OCP Microscaling (MX) specification for E8M0.

The flavour says what a byte means. "fn" (OCP) is what NVIDIA, CPUs and AMD after gfx942 use.
"fnuz" (AMD gfx942) has one zero and no infinity, its only NaN is byte 0x80, and its exponent bias
is larger by one: the same byte is half the value.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["e4m3", "e5m2", "e8m0"]
Flavour = Literal["fn", "fnuz"]


@dataclass(frozen=True)
class Float8Format:
    """One 8-bit format. Every number is exact; `smallest_*` and `max` are positive finite values.

    `triton` names the `triton.language` dtype. E8M0 has none: kernels see its bytes, as "uint8".
    """

    name: str
    kind: Kind
    flavour: Flavour
    dtype: torch.dtype
    triton: str
    max: float
    smallest_normal: float
    smallest_subnormal: float  # E8M0 has no subnormals: its smallest value
    mantissa_bits: int
    has_inf: bool
    has_negative_zero: bool
    nan_codes: tuple[int, ...]  # bytes, ascending

    @property
    def max_exponent(self) -> int:
        """floor(log2(max)), the `emax` of the MX specification."""
        return math.frexp(self.max)[1] - 1

    def __str__(self) -> str:
        return self.name


# fmt: off
E4M3FN = Float8Format(
    name="e4m3fn", kind="e4m3", flavour="fn", dtype=torch.float8_e4m3fn, triton="float8e4nv",
    max=448.0, smallest_normal=2.0**-6, smallest_subnormal=2.0**-9, mantissa_bits=3,
    has_inf=False, has_negative_zero=True, nan_codes=(0x7F, 0xFF),
)
E4M3FNUZ = Float8Format(
    name="e4m3fnuz", kind="e4m3", flavour="fnuz", dtype=torch.float8_e4m3fnuz, triton="float8e4b8",
    max=240.0, smallest_normal=2.0**-7, smallest_subnormal=2.0**-10, mantissa_bits=3,
    has_inf=False, has_negative_zero=False, nan_codes=(0x80,),
)
E5M2 = Float8Format(
    name="e5m2", kind="e5m2", flavour="fn", dtype=torch.float8_e5m2, triton="float8e5",
    max=57344.0, smallest_normal=2.0**-14, smallest_subnormal=2.0**-16, mantissa_bits=2,
    has_inf=True, has_negative_zero=True, nan_codes=(0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF),
)
E5M2FNUZ = Float8Format(
    name="e5m2fnuz", kind="e5m2", flavour="fnuz", dtype=torch.float8_e5m2fnuz, triton="float8e5b16",
    max=57344.0, smallest_normal=2.0**-15, smallest_subnormal=2.0**-17, mantissa_bits=2,
    has_inf=False, has_negative_zero=False, nan_codes=(0x80,),
)
# Scales only: code c is 2^(c - 127), no sign and no zero.
E8M0 = Float8Format(
    name="e8m0", kind="e8m0", flavour="fn", dtype=torch.float8_e8m0fnu, triton="uint8",
    max=2.0**127, smallest_normal=2.0**-127, smallest_subnormal=2.0**-127, mantissa_bits=0,
    has_inf=False, has_negative_zero=False, nan_codes=(0xFF,),
)
# fmt: on

FORMATS: tuple[Float8Format, ...] = (E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0)

_BY_DTYPE = {f.dtype: f for f in FORMATS}


def format_of(dtype: torch.dtype) -> Float8Format:
    """The format of a torch dtype; ValueError when it is not an FP8 dtype."""
    if dtype not in _BY_DTYPE:
        known = ", ".join(str(d) for d in _BY_DTYPE)
        raise ValueError(f"{dtype} is not an FP8 dtype; those are {known}.")
    return _BY_DTYPE[dtype]
