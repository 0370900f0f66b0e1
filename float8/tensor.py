"""``Float8TrainingTensor``: FP8 data and the scales that dequantise it, under the face of a high-precision tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .devices import format_for
from .dispatch.table import HANDLERS
from .formats import E8M0, FORMATS, Float8Format, format_of
from .kernels import quantize as _registers_ops  # noqa: F401
from .scaling import (
    Block,
    block_amax,
    block_name,
    broadcast_scale,
    check_block,
    check_scale_mode,
    scale_layout,
    scale_shape,
)

HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)


class Float8TrainingTensor(torch.Tensor):
    """FP8 data with one float32 or E8M0 scale per block: ``x ~ qdata * scale``, multiplied in ``orig_dtype``.

    It has the shape, device and autograd behaviour of a tensor of ``orig_dtype``. Ops reach it through the dispatch
    table (``float8.implements``): structure ops move data and scale together, matrix products run in FP8, and a list of
    value ops dequantise. Anything else raises. It is made by ``float8.quantize`` and undone by ``.dequantize()``, both
    transparent to gradients, which are plain tensors. As an ``nn.Parameter`` it is frozen: no optimiser can update it.

    Args:
        data: FP8 tensor of any rank.
        scale: float32 or E8M0, one entry per block: ``ceil(data.shape[d] / block[d])`` in dimension d.
        block: one entry per dimension, a size or ``float8.FULL``.
        orig_dtype: bf16, fp16 or fp32.

    Raises:
        ValueError: dtypes, block or the scale's shape or device do not fit.
    """

    qdata: Tensor
    scale: Tensor
    block: Block
    orig_dtype: torch.dtype

    @staticmethod
    def __new__(
        cls, data: Tensor, scale: Tensor, block: Sequence[int], orig_dtype: torch.dtype
    ) -> Float8TrainingTensor:
        block = tuple(block)
        _check_parts(data, scale, block, orig_dtype)
        return _build(data, scale, block, orig_dtype)

    @property
    def format(self) -> Float8Format:
        """The number format of the data."""
        return format_of(self.qdata.dtype)

    def replace(
        self,
        *,
        qdata: Tensor | None = None,
        scale: Tensor | None = None,
        block: Block | None = None,
        orig_dtype: torch.dtype | None = None,
    ) -> Float8TrainingTensor:
        """The same tensor with some parts replaced (outside autograd); handlers of the dispatch table use this."""
        return _build(
            self.qdata if qdata is None else qdata,
            self.scale if scale is None else scale,
            self.block if block is None else block,
            self.orig_dtype if orig_dtype is None else orig_dtype,
        )

    def dequantize(self) -> Tensor:  # type: ignore[override]
        """A plain tensor of ``orig_dtype``: ``qdata * scale`` in float32, rounded once. The gradient passes through."""
        result: Tensor = _Dequantize.apply(self)  # type: ignore[no-untyped-call]
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"Float8TrainingTensor(shape={tuple(self.shape)}, format={self.format.name}, block={block_name(self.block)}, "
            f"scale={self.scale.dtype}, orig_dtype={self.orig_dtype}, device={self.device}"
            + (", requires_grad=True)" if self.requires_grad else ")")
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Block, torch.dtype]]:
        return ["qdata", "scale"], (self.block, self.orig_dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: tuple[Block, torch.dtype], outer_size: Any, outer_stride: Any
    ) -> Float8TrainingTensor:
        return _build(inner["qdata"], inner["scale"], *meta)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # As bytes: plain pickle cannot write FP8 storages (torch 2.11 to 2.14).
        scale = self.scale.view(torch.uint8) if self.scale.dtype == E8M0.dtype else self.scale
        is_parameter = isinstance(self, torch.nn.Parameter)
        with torch.no_grad():
            parts = (self.qdata.view(torch.uint8), scale)
        return _rebuild, (*parts, self.format.name, self.block, self.orig_dtype, self.requires_grad, is_parameter)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: torch._ops.OpOverload, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        known = (cls, FakeTensor, FunctionalTensor)
        if not all(issubclass(t, known) or t in (Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # another subclass, such as DTensor, goes first
        if (handler := HANDLERS.get(func)) is not None:
            return handler(func, *args, **(kwargs or {}))
        # Under inference_mode composite ops arrive whole; their parts are what the table knows.
        if (result := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
            return result
        raise NotImplementedError(_no_handler(func, args, kwargs))


def _no_handler(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> str:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    x = next(leaf for leaf in leaves if isinstance(leaf, Float8TrainingTensor))
    if func._schema.is_mutable:
        advice = (
            "It would change FP8 values in place, which a frozen tensor does not allow (an optimiser must not own it): "
            "train a high-precision weight, or make a new tensor with float8.quantize"
        )
    else:
        advice = "Call .dequantize() first, or give the op a handler with float8.implements"
    return (
        f"{func} has no handler for a Float8TrainingTensor (shape {tuple(x.shape)}, {x.format.name}, block "
        f"{block_name(x.block)}). {advice}."
    )


def _build(data: Tensor, scale: Tensor, block: Block, orig_dtype: torch.dtype) -> Float8TrainingTensor:
    t: Float8TrainingTensor = torch.Tensor._make_wrapper_subclass(
        Float8TrainingTensor, data.shape, strides=data.stride(), dtype=orig_dtype, layout=data.layout, device=data.device
    )
    t.qdata, t.scale, t.block, t.orig_dtype = data, scale, block, orig_dtype
    return t


def _rebuild(
    data: Tensor,
    scale: Tensor,
    format_name: str,
    block: Block,
    orig_dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    from_name = {f.name: f for f in FORMATS}
    if scale.dtype == torch.uint8:
        scale = scale.view(E8M0.dtype)
    t = Float8TrainingTensor(data.view(from_name[format_name].dtype), scale, block, orig_dtype)
    if is_parameter:
        return torch.nn.Parameter(t, requires_grad)
    return t.requires_grad_(requires_grad)


def _check_parts(data: Tensor, scale: Tensor, block: Block, orig_dtype: torch.dtype) -> None:
    if format_of(data.dtype) is E8M0:
        raise ValueError(f"data is {data.dtype}, a format for scales only; use an e4m3 or e5m2 dtype")
    check_block(data.shape, block)
    _check_scale(scale, data, block)
    if orig_dtype not in HIGH_PRECISION:
        raise ValueError(f"orig_dtype={orig_dtype} must be one of {', '.join(map(str, HIGH_PRECISION))}")


def _check_scale(scale: Tensor, x: Tensor, block: Block) -> None:
    needed = scale_shape(x.shape, block)
    if scale.dtype not in (torch.float32, E8M0.dtype):
        raise ValueError(f"scale is {scale.dtype}; it must be torch.float32 or {E8M0.dtype}")
    if tuple(scale.shape) != needed:
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}, but data of shape {tuple(x.shape)} in blocks {block_name(block)} needs "
            f"{needed}: one entry per block, which multiplies the data"
        )
    if scale.device != x.device:
        raise ValueError(f"scale is on {scale.device} and the data on {x.device}; move one of them")


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, block: Block, dtype: torch.dtype, scale_mode: str
    ) -> Float8TrainingTensor:
        if scale is None:
            data, scale = torch.ops.float8.quantize(x, block, dtype, scale_mode)
        else:
            data, scale = torch.ops.float8.quantize_static(x, scale, block, dtype)
        return _build(data, scale, block, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, None, None, None, None


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Float8TrainingTensor) -> Tensor:
        return dequantize_parts(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def dequantize_parts(x: Float8TrainingTensor) -> Tensor:
    """``x.dequantize()`` outside autograd, for handlers of the dispatch table."""
    result: Tensor = torch.ops.float8.dequantize(x.qdata, x.scale, x.block, x.orig_dtype)
    return result


def quantize(
    x: Tensor,
    block: Sequence[int],
    format: Float8Format | str = "e4m3",
    scale_mode: str | None = None,
    scale: Tensor | None = None,
) -> Float8TrainingTensor:
    """Cast ``x`` to FP8 in blocks; the gradient passes straight through (formulas: ``float8.scaling``).

    Args:
        x: bf16, fp16 or fp32, any shape and strides.
        block: one entry per dimension, a size or ``float8.FULL``: ``(1, FULL)`` is one scale per row.
        format: a ``Float8Format``, or "e4m3" / "e5m2" for the flavour of x's device (``format_for``).
        scale_mode: how scales follow from the data: "fp32" (default), "pow2", or "e8m0_" + floor, even, ceil, rceil.
        scale: given instead (a static scale), float32 or E8M0; values it cannot reach saturate.

    Raises:
        ValueError: x is of another dtype or already FP8, or an argument does not fit, or both scale_mode and scale are
            given.
    """
    block = tuple(block)
    if isinstance(x, Float8TrainingTensor):
        raise ValueError(f"x is already in FP8 ({x.format.name}, block {block_name(x.block)}); .dequantize() it first")
    if x.dtype not in HIGH_PRECISION or x.layout != torch.strided:
        raise ValueError(
            f"x is {x.dtype} with layout {x.layout}; quantize takes strided {', '.join(map(str, HIGH_PRECISION))}: "
            "cast it, and decide what its rounding means for you"
        )
    check_block(x.shape, block)
    fmt = format if isinstance(format, Float8Format) else format_for(x.device, format)
    if fmt is E8M0:
        raise ValueError("e8m0 is a format for scales only; quantise to an e4m3 or e5m2 format")
    if scale is not None:
        if scale_mode is not None:
            raise ValueError(f"scale_mode={scale_mode!r} and a given scale exclude each other; pass one of them")
        _check_scale(scale, x, block)
    mode = scale_mode or "fp32"
    check_scale_mode(mode)
    result: Float8TrainingTensor = _Quantize.apply(x, scale, block, fmt.dtype, mode)  # type: ignore[no-untyped-call]
    return result


def convert_format(x: Float8TrainingTensor, to: Float8Format) -> Float8TrainingTensor:
    """The same values in the other flavour of the same kind, outside autograd.

    fn to fnuz is exact: the same byte is half the value, so the scale doubles; -0 becomes 0x00, NaN and Inf 0x80.
    fnuz to fn halves the scale; blocks with codes that are NaN or Inf in fn (e4m3: 0x7F = 240), or whose E8M0 scale
    cannot be halved, are quantised anew (float32 scale: as "fp32", E8M0: as "e8m0_rceil").

    Raises:
        ValueError: ``to`` is not of the same kind (e4m3 or e5m2).
    """
    fmt, block = x.format, x.block
    if to.kind != fmt.kind:
        raise ValueError(
            f"convert_format changes the flavour, not the kind: {fmt.name} cannot become {to.name}; "
            "dequantize() and quantize() instead"
        )
    if to is fmt:
        return x
    to_fnuz = to.flavour == "fnuz"
    bytes_ = x.qdata.view(torch.uint8)
    special = {"e4m3": 0x7F, "e5m2": 0x7C}[fmt.kind]  # from here on up an fn magnitude is NaN or Inf
    top = bytes_.bitwise_and(0x7F) >= special
    microscaled = x.scale.dtype == E8M0.dtype
    if microscaled:
        code = x.scale.view(torch.uint8).to(torch.int32)
        moved = torch.where(code == 255, code, code + (1 if to_fnuz else -1))
        scale = moved.clamp(min=0).to(torch.uint8).view(E8M0.dtype)
    else:
        scale = x.scale * (2.0 if to_fnuz else 0.5)
    if to_fnuz:
        converted = torch.where(bytes_ == 0x80, 0x00, torch.where(top, 0x80, bytes_)).to(torch.uint8)
        return x.replace(qdata=converted.view(to.dtype), scale=scale)
    kept = torch.where(bytes_ == 0x80, 0x7F, bytes_).to(torch.uint8)
    anew = block_amax(top.to(torch.float32), block) > 0
    if microscaled:
        anew = anew | (code == 0)
    values = torch.ops.float8.dequantize(x.qdata, x.scale, block, torch.float32)
    data, rescale = torch.ops.float8.quantize(values, block, to.dtype, "e8m0_rceil" if microscaled else "fp32")
    pick = broadcast_scale(anew, x.shape, block)
    as_bytes = (lambda s: s.view(torch.uint8)) if microscaled else (lambda s: s)
    picked = torch.where(anew, as_bytes(rescale), as_bytes(scale)).view(scale.dtype)
    qdata = torch.where(pick, data.view(torch.uint8), kept).view(to.dtype)
    return x.replace(qdata=qdata, scale=scale_layout(picked, block))


torch.serialization.add_safe_globals([Float8TrainingTensor, _rebuild])
