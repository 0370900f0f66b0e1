"""``Float8TrainingTensor``: FP8 data and the scales that dequantise it, under the face of a
high-precision tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .devices import assumed_device, format_for
from .dispatch.table import HANDLERS, Op
from .formats import E8M0, FORMATS, Float8Format, format_of
from .kernels.quantize import HIGH_PRECISION as HIGH_PRECISION  # and registers the ops
from .kernels.quantize import check_scale
from .scaling import (
    Block,
    as_bytes,
    block_amax,
    block_name,
    broadcast_scale,
    check_block,
    check_scale_mode,
    decode_scale,
    encode_e8m0,
    scale_layout,
    scale_shape,
)


class Float8TrainingTensor(torch.Tensor):
    """FP8 data with one float32 or E8M0 scale per block: ``x ~ qdata * scale`` in ``orig_dtype``.

    It has the shape, device and autograd behaviour of a tensor of ``orig_dtype``. Ops reach it
    through the dispatch table (``float8.implements``): structure ops move data and scale together,
    matrix products run in FP8, and a list of value ops dequantise. Anything else raises. It is made
    by ``float8.quantize`` and undone by ``.dequantize()``, both transparent to gradients, which are
    plain tensors. As an ``nn.Parameter`` it is frozen: no optimiser can update it.

    Args:
        data: FP8 tensor of any rank.
        scale: float32 or E8M0, one entry per block: ``ceil(data.shape[d] / block[d])`` in
            dimension d.
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
        """The same tensor with some parts replaced, outside autograd and unchecked: for handlers of
        the dispatch table."""
        return _build(
            self.qdata if qdata is None else qdata,
            self.scale if scale is None else scale,
            self.block if block is None else block,
            self.orig_dtype if orig_dtype is None else orig_dtype,
        )

    @property
    def data(self) -> Tensor:
        """The same FP8 tensor outside autograd. It cannot be assigned: torch would exchange the
        tensor that this one pretends to be, and keep the values."""
        plain: Any = Tensor.data
        return plain.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        raise NotImplementedError(
            "the .data of a Float8TrainingTensor cannot be replaced; write into it with .copy_(), "
            "or assign a new parameter to the module"
        )

    def apply_(self, *_: Any) -> NoReturn:  # torch's would go through memory that is not there
        raise NotImplementedError(
            "apply_ and map_ go through a tensor's memory, and a Float8TrainingTensor has that of "
            "its parts alone; take .dequantize(), or write into it with .copy_()"
        )

    map_: Any = apply_
    map2_: Any = apply_

    def share_memory_(self) -> Float8TrainingTensor:
        """Move data and scale into shared memory."""
        self.qdata.share_memory_()
        self.scale.share_memory_()
        return self

    def is_shared(self) -> bool:
        return bool(self.qdata.is_shared() and self.scale.is_shared())

    def dequantize(self) -> Tensor:
        """A plain tensor of ``orig_dtype``: ``qdata * scale`` in float32, rounded once. The
        gradient passes through.

        Raises:
            NotImplementedError: inside torch.func.grad, vmap or another functorch transform.
        """
        refuse_functorch("dequantize()")
        result: Tensor = _Dequantize.apply(self)  # type: ignore[no-untyped-call]
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Float8TrainingTensor(shape={tuple(self.shape)}, format={self.format.name}, "
            f"block={block_name(self.block)}, scale={self.scale.dtype}, "
            f"orig_dtype={self.orig_dtype}, device={self.device}"
            + (", requires_grad=True)" if self.requires_grad else ")")
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Block, torch.dtype, str | None]]:
        # The assumed device only for torch.compile, which compares this before it reuses code.
        return ["qdata", "scale"], (self.block, self.orig_dtype, assumed_device())

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        meta: tuple[Block, torch.dtype, str | None],
        outer_size: Any,
        outer_stride: Any,
    ) -> Float8TrainingTensor:
        return _build(inner["qdata"], inner["scale"], *meta[:2])

    def __coerce_tangent_metadata__(self) -> Tensor:
        """What torch.compile takes as the gradient of an FP8 output: a plain tensor. It asks for a
        wrapper's parts next, so this one says that it has none."""
        tangent: Any = torch.empty_like(self)
        tangent.__tensor_flatten__ = lambda: ((), None)
        return tangent  # type: ignore[no-any-return]

    def _stable_hash_for_caching(self) -> str:
        """All that compiled code depends on, for torch's cache of it on disk."""
        parts = [
            (t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (self.qdata, self.scale)
        ]
        return repr((parts, *self.__tensor_flatten__()[1], self.device, self.requires_grad))

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        # Its own storage is empty: what reads it through a pointer must not get that.
        raise NotImplementedError(
            "a Float8TrainingTensor is data and scales, which dlpack cannot hand over; export "
            ".dequantize(), or .qdata and .scale"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # As bytes: plain pickle cannot write FP8 storages (torch 2.11 to 2.14).
        parts = as_bytes(self.qdata), as_bytes(self.scale)
        meta = self.format.name, self.block, self.orig_dtype
        return _rebuild, (*parts, *meta, self.requires_grad, isinstance(self, torch.nn.Parameter))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Op, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        known = (cls, FakeTensor, FunctionalTensor)
        if not all(issubclass(t, known) or t in (Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # another subclass, such as DTensor, goes first
        if (handler := HANDLERS.get(func)) is not None:
            return handler(func, *args, **(kwargs or {}))
        # Under inference_mode composite ops arrive whole; their parts are what the table knows.
        if (result := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
            return result
        raise NotImplementedError(no_handler(func, args, kwargs))


def no_handler(func: Op, args: Any, kwargs: Any) -> str:
    """Why an op that has no handler is refused, and the ways out."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
    written = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]

    def fp8(values: Any) -> list[Float8TrainingTensor]:
        leaves = torch.utils._pytree.tree_leaves(values)
        return [leaf for leaf in leaves if isinstance(leaf, Float8TrainingTensor)]

    if fp8([named.get(name) for name in written]):
        advice = (
            "It would change FP8 values in place, which a frozen tensor does not allow (an "
            "optimiser must not own it): train a high-precision weight, or make a new tensor with "
            "float8.quantize"
        )
    else:
        advice = "Call .dequantize() first, or give the op a handler with float8.implements"
    x = fp8(named)[0]
    return (
        f"{func} has no handler for a Float8TrainingTensor (shape {tuple(x.shape)}, "
        f"{x.format.name}, block {block_name(x.block)}). {advice}."
    )


def refuse_functorch(what: str, otherwise: str = "call it before the transform") -> None:
    """Raise NotImplementedError inside torch.func.grad, vmap or another functorch transform."""
    compiling = torch.compiler.is_compiling()
    if not compiling and torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            f"{what} was called under a functorch transform (torch.func.grad, vmap, jvp, ...), "
            "which its autograd function does not support; use .backward() or torch.autograd.grad, "
            f"or {otherwise}"
        )


def _build(
    data: Tensor, scale: Tensor, block: Block, orig_dtype: torch.dtype
) -> Float8TrainingTensor:
    t: Float8TrainingTensor = torch.Tensor._make_wrapper_subclass(
        Float8TrainingTensor,
        data.shape,
        strides=data.stride(),
        dtype=orig_dtype,
        layout=data.layout,
        device=data.device,
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
        raise ValueError(f"data is {data.dtype}, for scales only; use an e4m3 or e5m2 dtype")
    check_block(data.shape, block)
    _check_scale(scale, data, block)
    if orig_dtype not in HIGH_PRECISION:
        names = ", ".join(map(str, HIGH_PRECISION))
        raise ValueError(f"orig_dtype={orig_dtype} must be one of {names}")


def _check_scale(scale: Tensor, x: Tensor, block: Block) -> None:
    check_scale(scale, x, block)
    if scale.requires_grad:
        raise ValueError("scale requires a gradient, which none would reach; pass scale.detach()")


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, block: Block, dtype: torch.dtype, scale_mode: str
    ) -> Float8TrainingTensor:
        if scale is None:
            data, scale = torch.ops.float8.quantize(x, block, dtype, scale_mode)
        else:
            data, scale = torch.ops.float8.quantize_static(x, scale, block, dtype)
        return Float8TrainingTensor(data, scale, block, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Float8TrainingTensor) -> Tensor:
        return dequantize_parts(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def dequantize_parts(x: Float8TrainingTensor) -> Tensor:
    """``x.dequantize()`` outside autograd, for handlers of the dispatch table."""
    result: Tensor = torch.ops.float8.dequantize(x.qdata, x.scale, x.block, x.orig_dtype)
    return result


def quantize(
    x: Tensor,
    block: Sequence[int],
    format: Float8Format | Literal["e4m3", "e5m2"] = "e4m3",
    scale_mode: str | None = None,
    scale: Tensor | None = None,
) -> Float8TrainingTensor:
    """Cast ``x`` to FP8 in blocks (formulas: ``float8.scaling``); the gradient passes through.

    Args:
        x: bf16, fp16 or fp32, any shape and strides.
        block: one entry per dimension, a size or ``float8.FULL``: ``(1, FULL)`` is a scale per row.
        format: a ``Float8Format``, or "e4m3" / "e5m2" for the flavour of x's device
            (``format_for``).
        scale_mode: how scales follow from the data: "fp32" (default), "pow2", or "e8m0_" + floor,
            even, ceil, rceil.
        scale: given instead (a static scale), float32 or E8M0; values it cannot reach saturate.

    Raises:
        ValueError: x is of another dtype or already FP8, or an argument does not fit, or both
            scale_mode and scale are given.
        NotImplementedError: inside torch.func.grad, vmap or another functorch transform.
    """
    refuse_functorch("float8.quantize")
    if not isinstance(x, Tensor) or not isinstance(block, Sequence) or isinstance(block, str):
        raise ValueError(
            "quantize takes a tensor and a block with one entry per dimension, such as (1, 128); "
            f"got {type(x).__name__} and {block!r}"
        )
    block = tuple(block)
    if isinstance(x, Float8TrainingTensor):
        raise ValueError(
            f"x is already in FP8 ({x.format.name}, block {block_name(x.block)}); .dequantize() it "
            "first"
        )
    if x.dtype not in HIGH_PRECISION or x.layout != torch.strided:
        raise ValueError(
            f"x is {x.dtype} with layout {x.layout}; quantize takes strided "
            f"{', '.join(map(str, HIGH_PRECISION))}: cast it, and decide what its rounding means "
            "for you"
        )
    check_block(x.shape, block)
    fmt = format if isinstance(format, Float8Format) else format_for(x.device, format)
    if fmt is E8M0:
        raise ValueError("e8m0 is a format for scales only; quantise to an e4m3 or e5m2 format")
    if scale is not None:
        if scale_mode is not None:
            raise ValueError(
                f"scale_mode={scale_mode!r} and a given scale exclude each other; pass one of them"
            )
        if not isinstance(scale, Tensor):
            raise ValueError(
                f"scale={scale!r} must be a tensor with one entry per block; for one number: "
                f"torch.full({scale_shape(x.shape, block)}, {scale!r})"
            )
        _check_scale(scale, x, block)
    mode = scale_mode or "fp32"
    check_scale_mode(mode)
    apply: Any = _Quantize.apply
    result: Float8TrainingTensor = apply(x, scale, block, fmt.dtype, mode)
    return result


def convert_format(x: Float8TrainingTensor, to: Float8Format) -> Float8TrainingTensor:
    """The same values in the other flavour of the same kind, outside autograd.

    fn to fnuz is exact: the same byte is half the value, so the scale doubles; -0 becomes 0x00, NaN
    and Inf 0x80. fnuz to fn halves the scale. Blocks with a code that is NaN or Inf in fn (e4m3:
    0x7F = 240), or whose scale cannot be doubled or halved, keep their scale, and their data is
    cast: exact but for odd multiples of fnuz's smallest subnormal.

    Raises:
        ValueError: ``to`` is no format, or not of the same kind (e4m3 or e5m2).
    """
    fmt, block = x.format, x.block
    if not isinstance(to, Float8Format):
        raise ValueError(f"to={to!r} must be a format, such as float8.E4M3FNUZ")
    if to.kind != fmt.kind:
        raise ValueError(
            f"convert_format changes the flavour, not the kind: {fmt.name} cannot become "
            f"{to.name}; dequantize() and quantize() instead"
        )
    if to is fmt:
        return x
    code, scale = x.qdata.view(torch.uint8), decode_scale(x.scale)
    top = code.bitwise_and(0x7F) >= (0x7F if fmt.kind == "e4m3" else 0x7C)  # NaN or Inf in fn
    if to.flavour == "fnuz":
        code = torch.where(code == 0x80, 0x00, torch.where(top, 0x80, code))
        moved = scale * 2.0
        cast = ~moved.isfinite()
    else:
        code = torch.where(code == 0x80, 0x7F, code)
        moved = scale * 0.5
        cast = ~(moved >= 2.0**-127) | (block_amax(top.to(torch.float32), block) > 0)
    values = x.qdata.to(torch.float32)
    values = torch.where(values.abs() <= to.max, values, float("nan")).to(to.dtype)
    code = torch.where(broadcast_scale(cast, x.shape, block), values.view(torch.uint8), code)
    scale = torch.where(cast, scale, moved)
    scale = scale_layout(encode_e8m0(scale) if x.scale.dtype == E8M0.dtype else scale, block)
    return Float8TrainingTensor(code.to(torch.uint8).view(to.dtype), scale, block, x.orig_dtype)


torch.serialization.add_safe_globals([Float8TrainingTensor, _rebuild])
