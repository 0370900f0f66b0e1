"""High precision to FP8 and back, for any block shape on any rank: ``torch.ops.float8.{quantize, quantize_static,
dequantize}``. The bodies below are the reference and the specification; no gradient flows through these ops
(``float8.quantize`` and ``Float8TrainingTensor.dequantize`` carry it).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import E8M0, format_of
from ..scaling import (
    Block,
    block_amax,
    broadcast_scale,
    decode_scale,
    encode_e8m0,
    scale_from_amax,
    scale_layout,
    scale_shape,
)

_LIB = torch.library.Library("float8", "FRAGMENT")
_LIB.define("quantize(Tensor x, int[] block, ScalarType dtype, str scale_mode) -> (Tensor, Tensor)")
_LIB.define("quantize_static(Tensor x, Tensor scale, int[] block, ScalarType dtype) -> (Tensor, Tensor)")
_LIB.define("dequantize(Tensor data, Tensor scale, int[] block, ScalarType dtype) -> Tensor")


def quantize(x: Tensor, block: Block, dtype: torch.dtype, scale_mode: str) -> tuple[Tensor, Tensor]:
    """FP8 data and scale of ``x`` with scales taken from the data (formulas: ``float8.scaling``).

    Args:
        x: bf16, fp16 or fp32, any shape and strides.
        block: one entry per dimension, a size or ``FULL``.
        dtype: an FP8 dtype.
        scale_mode: one of ``float8.scaling.SCALE_MODES``.

    Returns:
        data: ``dtype``, shape of ``x``, contiguous.
        scale: float32 (E8M0 for the ``e8m0_*`` modes), ``scale_shape(x.shape, block)``, in ``scale_layout``. A block
            that is all zero has data +0 and the smallest scale; one that holds NaN or Inf has data +0 and scale NaN.
    """
    scale, live = scale_from_amax(block_amax(x, block), format_of(dtype), scale_mode)
    data = _cast(x, scale, live, block, dtype)
    return data, scale_layout(encode_e8m0(scale) if scale_mode.startswith("e8m0") else scale, block)


def quantize_static(x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """FP8 data of ``x`` under given scales; values beyond the format's range saturate at its maximum.

    Args:
        scale: float32 or E8M0, ``scale_shape(x.shape, block)``.

    Returns:
        (data, scale) as ``quantize`` does; the scale is the given one, but NaN for a block that holds NaN or Inf or
        whose given scale is not a positive finite number.
    """
    given = decode_scale(scale)
    finite = block_amax(x, block).isfinite() & given.isfinite() & (given > 0)
    data = _cast(x, given, finite, block, dtype)
    used = torch.where(finite, given, torch.full_like(given, float("nan")))
    return data, scale_layout(encode_e8m0(used) if scale.dtype == E8M0.dtype else used, block)


def _cast(x: Tensor, scale: Tensor, live: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    fmt = format_of(dtype)
    inverse = torch.div(torch.ones_like(scale), scale)
    scaled = x.to(torch.float32) * broadcast_scale(inverse, x.shape, block)
    # The clamp is explicit: what an unclamped cast does beyond the maximum differs between formats and torch versions.
    data = torch.where(broadcast_scale(live, x.shape, block), scaled.clamp(-fmt.max, fmt.max), 0.0)
    return data.to(dtype).contiguous()


def dequantize(data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """``data * scale`` per block, multiplied in float32 and rounded once to ``dtype``; contiguous."""
    values = data.to(torch.float32) * broadcast_scale(decode_scale(scale), data.shape, block)
    return values.to(dtype).contiguous()


def _fake_quantize(x: Tensor, block: Block, dtype: torch.dtype, scale_mode: str) -> tuple[Tensor, Tensor]:
    data = x.new_empty(x.shape, dtype=dtype)
    scale_dtype = E8M0.dtype if scale_mode.startswith("e8m0") else torch.float32
    return data, scale_layout(x.new_empty(scale_shape(x.shape, block), dtype=scale_dtype), block)


def _fake_quantize_static(x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), scale_layout(torch.empty_like(scale), block)


def _fake_dequantize(data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    return data.new_empty(data.shape, dtype=dtype)


for _name, _op, _fake in (
    ("quantize", quantize, _fake_quantize),
    ("quantize_static", quantize_static, _fake_quantize_static),
    ("dequantize", dequantize, _fake_dequantize),
):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _op, _key)
    torch.library.register_fake(f"float8::{_name}", _fake, lib=_LIB)
