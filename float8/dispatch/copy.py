"""Ops that copy, move, relabel or make tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..scaling import FULL, mode_like
from ..tensor import HIGH_PRECISION, Float8TrainingTensor, dequantize_parts
from .shape import refuse, shares_memory
from .table import Op, implements

aten = torch.ops.aten


@implements(aten.clone.default, aten._pin_memory.default)
def clone(op: Op, x: Float8TrainingTensor, *args: Any, **kwargs: Any) -> Float8TrainingTensor:
    # A memory format is about the data; the scale keeps the layout that GEMMs want.
    return x.replace(qdata=op(x.qdata, *args, **kwargs), scale=op(x.scale))


@implements(aten.is_pinned.default)
def is_pinned(op: Op, x: Float8TrainingTensor, *args: Any) -> bool:
    return bool(op(x.qdata, *args) and op(x.scale, *args))


@implements(aten.record_stream.default)
def record_stream(op: Op, x: Float8TrainingTensor, stream: Any) -> None:
    op(x.qdata, stream)
    op(x.scale, stream)


@implements(aten._to_copy.default)
def to_copy(
    op: Op, x: Float8TrainingTensor, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> Float8TrainingTensor:
    """A dtype relabels ``orig_dtype`` (autocast relies on it); a device moves data and scale."""
    dtype = dtype or x.orig_dtype
    if dtype not in HIGH_PRECISION:
        refuse(op, x, f"it cannot become {dtype}, only {', '.join(map(str, HIGH_PRECISION))}")
    qdata = op(x.qdata, **kwargs)
    kwargs.pop("memory_format", None)
    return x.replace(qdata=qdata, scale=op(x.scale, **kwargs), orig_dtype=dtype)


@implements(aten.copy_.default)
def copy_(op: Op, dst: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """Into FP8: the same bytes if formats and blocks agree, else requantised into dst's blocks,
    with scales from the data ("fp32", "e8m0_rceil"), however dst's were made. Out of FP8:
    dequantised."""
    if not isinstance(dst, Float8TrainingTensor):
        assert isinstance(src, Float8TrainingTensor)
        return op(dst, dequantize_parts(src), non_blocking)  # type: ignore[no-any-return]
    if not _owns_its_scales(dst):
        why = "it is a view whose scales hold for elements outside it too, or are a copy"
        refuse(
            op, dst, f"{why}, so that new values in it would change or leave the tensor it views"
        )
    if isinstance(src, Float8TrainingTensor):
        same = src.block == dst.block and src.shape == dst.shape
        if same and src.qdata.dtype == dst.qdata.dtype and src.scale.dtype == dst.scale.dtype:
            op(dst.qdata, src.qdata, non_blocking)
            op(dst.scale, src.scale, non_blocking)
            return dst
        src = dequantize_parts(src)
    values = src.to(dst.device).to(dst.orig_dtype).expand(dst.shape)
    data, scale = torch.ops.float8.quantize(
        values, dst.block, dst.qdata.dtype, mode_like(dst.scale)
    )
    op(dst.qdata, data)
    op(dst.scale, scale)
    return dst


def _owns_its_scales(x: Float8TrainingTensor) -> bool:
    """Whether x may be written: what it is a view of sees new scales, and has no element under them
    that x has not."""
    base = x._base
    if base is None:  # no view, or one made in inference mode, which keeps no record
        return not x.is_inference() or x.qdata.untyped_storage().nbytes() == x.numel()
    assert isinstance(base, Float8TrainingTensor)
    if not shares_memory(x.scale, base.scale):
        return False
    # All blocks of the base hold as many elements, and so do those of x: they are whole.
    even = all(b == FULL or n % b == 0 for n, b in zip(base.shape, base.block, strict=True))
    whole = even and x.numel() * base.scale.numel() == base.numel() * x.scale.numel()
    return x.numel() == base.numel() or whole


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
def factory(op: Op, x: Float8TrainingTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Factories give plain tensors of ``orig_dtype``: gradients and optimiser states are never
    FP8."""
    if kwargs.get("dtype") is None:
        kwargs["dtype"] = x.orig_dtype
    result: Tensor = op(x.qdata, *args, **kwargs)
    return result


@implements(aten.is_same_size.default)
def is_same_size(op: Op, a: Tensor, b: Tensor) -> bool:
    return tuple(a.shape) == tuple(b.shape)
