"""Ops that copy, move, relabel or make tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..formats import E8M0
from ..tensor import HIGH_PRECISION, Float8TrainingTensor, dequantize_parts
from .shape import refuse
from .table import implements

aten = torch.ops.aten


@implements(aten.clone.default, aten._pin_memory.default)
def clone(op: torch._ops.OpOverload, x: Float8TrainingTensor, *args: Any, **kwargs: Any) -> Float8TrainingTensor:
    # A memory format is about the data; the scale keeps the layout that GEMMs want.
    return x.replace(qdata=op(x.qdata, *args, **kwargs), scale=op(x.scale))


@implements(aten.is_pinned.default)
def is_pinned(op: torch._ops.OpOverload, x: Float8TrainingTensor, *args: Any) -> bool:
    return bool(op(x.qdata, *args) and op(x.scale, *args))


@implements(aten.record_stream.default)
def record_stream(op: torch._ops.OpOverload, x: Float8TrainingTensor, stream: Any) -> None:
    op(x.qdata, stream)
    op(x.scale, stream)


@implements(aten._to_copy.default)
def to_copy(
    op: torch._ops.OpOverload, x: Float8TrainingTensor, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> Float8TrainingTensor:
    """A dtype relabels ``orig_dtype`` (autocast relies on it); a device moves data and scale."""
    dtype = dtype or x.orig_dtype
    if dtype not in HIGH_PRECISION:
        refuse(op, x, f"it cannot become {dtype}, only {', '.join(map(str, HIGH_PRECISION))}")
    scale_kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return x.replace(qdata=op(x.qdata, **kwargs), scale=op(x.scale, **scale_kwargs), orig_dtype=dtype)


@implements(aten.copy_.default)
def copy_(op: torch._ops.OpOverload, dst: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """Into FP8: the same bytes if formats and blocks agree, else requantised into dst's blocks. Out of FP8: dequantised."""
    if not isinstance(dst, Float8TrainingTensor):
        assert isinstance(src, Float8TrainingTensor)
        return op(dst, dequantize_parts(src), non_blocking)  # type: ignore[no-any-return]
    if isinstance(src, Float8TrainingTensor):
        same = src.block == dst.block and src.shape == dst.shape
        if same and src.qdata.dtype == dst.qdata.dtype and src.scale.dtype == dst.scale.dtype:
            op(dst.qdata, src.qdata, non_blocking)
            op(dst.scale, src.scale, non_blocking)
            return dst
        src = dequantize_parts(src)
    mode = "e8m0_rceil" if dst.scale.dtype == E8M0.dtype else "fp32"
    values = src.to(dst.device).to(dst.orig_dtype).expand(dst.shape)
    data, scale = torch.ops.float8.quantize(values, dst.block, dst.qdata.dtype, mode)
    op(dst.qdata, data)
    op(dst.scale, scale)
    return dst


@implements(
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
def factory(op: torch._ops.OpOverload, x: Float8TrainingTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Factories give plain tensors of ``orig_dtype``: gradients and optimiser states are never FP8."""
    kwargs.setdefault("dtype", x.orig_dtype)
    result: Tensor = op(x.qdata, *args, **kwargs)
    return result


@implements(aten.is_same_size.default)
def is_same_size(op: torch._ops.OpOverload, a: Tensor, b: Tensor) -> bool:
    return tuple(a.shape) == tuple(b.shape)
