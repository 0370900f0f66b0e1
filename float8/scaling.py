"""Block shapes, and the arithmetic from amax to scale. It stands here once; kernels repeat it bit
for bit.

A **block** is a tuple with one entry per dimension: a size, or ``FULL`` for the whole dimension.
Elements of one block share one scale. Tensorwise is ``(FULL, FULL)``, rowwise ``(1, FULL)``, MXFP8
``(1, 32)``; an expert weight has a leading 1. A scale tensor has the rank of its data and
``ceil(length / block)`` entries per dimension (a FULL dimension is one block, also when its length
is 0).

A **scale** always dequantises: ``x ~ data * scale``.

    amax  = max |x| over the block
            an integer maximum of bits(x) & 0x7fffffff, in which NaN > Inf > finite
    scale = max(amax / format.max, 2^-126)
            "fp32": one correctly rounded division per block
    scale = 2^e, e = exponent(amax) - format.max_exponent + carry
            "pow2" and "e8m0_*": integer arithmetic
    data  = rne(clamp(x * (1 / scale), -format.max, format.max))
            one correctly rounded division per block

The carry of a power-of-two scale is the rounding mode (OCP MX specification 1.0, section 6.3, is
"floor"): ``floor`` 0; ``ceil`` 1 unless amax is a power of two; ``rceil`` 1 if amax would exceed
format.max (the only one that never saturates and never wastes a binade; "pow2" is the same as
fp32); ``even`` 1 if amax, rounded to the format's mantissa, reaches the next power of two.
"""

from __future__ import annotations

import struct
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .formats import E8M0, Float8Format

FULL = -1
Block = tuple[int, ...]
ScaleMode = Literal["fp32", "pow2", "e8m0_floor", "e8m0_even", "e8m0_ceil", "e8m0_rceil"]
SCALE_MODES: tuple[str, ...] = get_args(ScaleMode)

_INF_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000
_MANTISSA = 0x007FFFFF
_MIN_SCALE = 2.0**-126  # the smallest normal float32; it and its reciprocal are finite and normal


def block_name(block: Block) -> str:
    """``(1, -1)`` as a reader writes it: ``(1, FULL)``."""
    return "(" + ", ".join("FULL" if b == FULL else str(b) for b in block) + ")"


def check_block(shape: torch.Size | tuple[int, ...], block: Block) -> None:
    """Raise ValueError unless ``block`` has one entry per dimension of ``shape``, each FULL or a
    positive size."""
    if len(block) != len(shape):
        raise ValueError(
            f"block {block_name(block)} has {len(block)} entries but the tensor of shape "
            f"{tuple(shape)} has {len(shape)} dimensions; give one entry per dimension (a size, or "
            "float8.FULL)"
        )
    for b in block:
        if isinstance(b, bool) or not isinstance(b, int | torch.SymInt) or (b != FULL and b < 1):
            raise ValueError(
                f"block {block_name(block)} holds {b}; every entry must be a positive size or "
                "float8.FULL (-1)"
            )


def check_scale_mode(mode: str) -> None:
    """Raise ValueError unless ``mode`` is one of SCALE_MODES."""
    if mode not in SCALE_MODES:
        raise ValueError(f"scale_mode {mode!r} is unknown; choose one of {', '.join(SCALE_MODES)}")


def scale_dtype(mode: str) -> torch.dtype:
    """The dtype of a scale tensor: float32, or E8M0 for the ``e8m0_*`` modes."""
    return E8M0.dtype if mode.startswith("e8m0") else torch.float32


def mode_like(scale: Tensor) -> str:
    """The mode of a cast that is to match a scale tensor: scales of its kind, none saturates."""
    return "e8m0_rceil" if scale.dtype == E8M0.dtype else "fp32"


def as_bytes(x: Tensor) -> Tensor:
    """FP8 and E8M0 as uint8, for ops that not every torch, and no Triton, has for them."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def num_blocks(length: int, block: int) -> int:
    """How many blocks of size ``block`` cover ``length`` elements; FULL is always one."""
    return 1 if block == FULL else (length + block - 1) // block


def scale_shape(shape: torch.Size | tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Shape of the scale of a tensor of ``shape`` in blocks of ``block``."""
    return tuple(num_blocks(n, b) for n, b in zip(shape, block, strict=True))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, those of dimensions of length 1 and 0 included."""
    strides = [1]
    for n in shape[:0:-1]:
        strides.append(strides[-1] * max(n, 1))
    return tuple(strides[::-1])


def scale_strides(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """The memory layout that GEMMs want of a scale of ``shape``: outer-dimension-major for blocks
    along the last dimension of one row (cuBLASLt's 1x128 mode), else contiguous."""
    if len(block) >= 2 and block[-2] == 1 and block[-1] not in (1, FULL):
        *lead, rows, blocks = contiguous_strides((*shape[:-2], shape[-1], shape[-2]))
        return (*lead, blocks, rows)
    return contiguous_strides(shape)


def scale_layout(scale: Tensor, block: Block) -> Tensor:
    """A copy with the strides of ``scale_strides``."""
    # clone, since contiguous() keeps whatever stride a dimension of length 1 came with.
    if len(block) >= 2 and block[-2] == 1 and block[-1] not in (1, FULL):
        return scale.mT.clone(memory_format=torch.contiguous_format).mT
    return scale.clone(memory_format=torch.contiguous_format)


def broadcast_scale(scale: Tensor, shape: torch.Size | tuple[int, ...], block: Block) -> Tensor:
    """Repeat ``scale`` so that it multiplies data of ``shape``; dimensions of FULL blocks stay of
    length 1."""
    for dim, (n, b) in enumerate(zip(shape, block, strict=True)):
        if b not in (1, FULL) and b < n:
            scale = scale.repeat_interleave(b, dim).narrow(dim, 0, n)
    return scale


def block_amax(x: Tensor, block: Block) -> Tensor:
    """max |x| per block as float32, of shape ``scale_shape(x.shape, block)``; 0 for a block without
    elements.

    Taken over the integer bits, where NaN > Inf > finite, so that a NaN can never be lost to a
    comparison.
    """
    bits = x.to(torch.float32).view(torch.int32).bitwise_and(0x7FFFFFFF)
    # A block that is longer than its dimension is as long as it, not padded.
    sizes = [max(n, 1) if b == FULL or b > n else b for n, b in zip(x.shape, block, strict=True)]
    pads = [
        c * s - n
        for n, b, s, c in zip(x.shape, block, sizes, scale_shape(x.shape, block), strict=True)
    ]
    if any(pads):
        bits = F.pad(bits, [p for pad in reversed(pads) for p in (0, pad)])
    tiled = [k for n, s in zip(bits.shape, sizes, strict=True) for k in (n // s, s)]
    amax = bits.reshape(tiled).amax(dim=list(range(1, 2 * x.ndim, 2)))
    return amax.view(torch.float32)


def scale_from_amax(amax: Tensor, fmt: Float8Format, mode: str) -> tuple[Tensor, Tensor]:
    """(scale, live) of blocks with the given amax.

    ``scale``: float32, as used in the arithmetic (also for E8M0 modes, whose codes ``encode_e8m0``
    makes). NaN where amax is not finite. ``live``: bool, False where the data bytes are zero by
    rule: all-zero and non-finite blocks.
    """
    bits = amax.view(torch.int32)
    finite = bits < _INF_BITS
    if mode == "fp32":
        # A tensor divisor: torch turns division by a Python number into a multiplication by its
        # reciprocal on CUDA.
        scale = torch.div(amax, torch.full_like(amax, fmt.max)).clamp(min=_MIN_SCALE)
    else:
        scale = _power_of_two(bits, fmt, mode)
    nan = torch.full_like(scale, float("nan"))
    return torch.where(finite, scale, nan), finite & (bits > 0)


def _power_of_two(bits: Tensor, fmt: Float8Format, mode: str) -> Tensor:
    mantissa = bits.bitwise_and(_MANTISSA)
    if mode in ("pow2", "e8m0_rceil"):
        (max_bits,) = struct.unpack("<i", struct.pack("<f", fmt.max))
        carry = (mantissa > (max_bits & _MANTISSA)).to(torch.int32)
    elif mode == "e8m0_ceil":
        carry = (mantissa > 0).to(torch.int32)
    elif mode == "e8m0_even":
        half_step = 1 << (22 - fmt.mantissa_bits)
        carry = (mantissa + half_step).bitwise_right_shift(23)
    else:
        carry = torch.zeros_like(mantissa)
    # A subnormal amax has exponent field 0 and lands on the lowest scale whatever its carry.
    lowest = 1 if mode == "pow2" else 0
    code = (bits.bitwise_right_shift(23) - fmt.max_exponent + carry).clamp(lowest, 254)
    return decode_e8m0(code)


def decode_e8m0(code: Tensor) -> Tensor:
    """Float32 values of E8M0 codes (integers): 0 is 2^-127, 254 is 2^127, 255 is NaN."""
    code = code.to(torch.int32)
    bits = code.bitwise_left_shift(23)
    bits = torch.where(
        code == 0, torch.full_like(bits, 0x00400000), bits
    )  # 2^-127 is subnormal in float32
    return torch.where(code == 255, torch.full_like(bits, _NAN_BITS), bits).view(torch.float32)


def encode_e8m0(scale: Tensor) -> Tensor:
    """E8M0 tensor of a float32 tensor that holds powers of two (2^-127 .. 2^127) or NaN only."""
    code = scale.view(torch.int32).bitwise_right_shift(23)
    return (
        torch.where(scale.isnan(), torch.full_like(code, 255), code)
        .to(torch.uint8)
        .view(E8M0.dtype)
    )


def decode_scale(scale: Tensor) -> Tensor:
    """Any scale tensor as float32."""
    return (
        decode_e8m0(scale.view(torch.uint8))
        if scale.dtype == E8M0.dtype
        else scale.to(torch.float32)
    )
