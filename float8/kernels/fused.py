"""Casts fused with what makes their input: ``torch.ops.float8.{rms_norm_quantize, swiglu_quantize,
swiglu_backward_quantize}``. Each is a formula in float32, rounded once to the inputs' dtype, and
then ``quantize_dual`` of the result, which never reaches memory in high precision where Triton
kernels run.

    rms_norm         y = x * rstd * weight,  rstd = 1 / sqrt(mean(x^2) + eps)
    swiglu           h = gate * s * up,      s = 1 / (1 + e^-gate)
    its backward     d_gate = grad * up * s * (1 + gate * (1 - s)),  d_up = grad * gate * s

The bodies below are the reference and the specification. The kernels' exponentials, roots and sums
differ from it in the last bits of float32, and so may a result in its last bit; what the cast then
makes of it is the reference's, byte for byte. No gradient flows through these ops.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..scaling import Block
from .quantize import HIGH_PRECISION, CastPlan, check_devices, check_layout, names, triton_refusal

Casts = tuple[CastPlan | None, CastPlan | None]  # of the row layout and of the transposed one
Layouts = tuple[Tensor, Tensor, Tensor, Tensor]

_CASTS = (
    "int[]? block, ScalarType? dtype, str? scale_mode, "
    "int[]? block_t, ScalarType? dtype_t, str? scale_mode_t"
)
_LIB = torch.library.Library("float8", "FRAGMENT")
_LIB.define(
    f"rms_norm_quantize(Tensor x, Tensor? weight, float eps, {_CASTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIB.define(
    f"swiglu_quantize(Tensor gate, Tensor up, {_CASTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIB.define(
    f"swiglu_backward_quantize(Tensor grad, Tensor gate, Tensor up, {_CASTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    block: Block | None,
    dtype: torch.dtype | None,
    scale_mode: str | None,
    block_t: Block | None,
    dtype_t: torch.dtype | None,
    scale_mode_t: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """FP8 of ``F.rms_norm(x, (K,), weight, eps)`` and of its transpose.

    Args:
        x: [M, K], bf16, fp16 or fp32, any strides.
        weight: [K], bf16, fp16 or fp32; None is a weight of ones.
        block, dtype, scale_mode: as of ``quantize``, with a block of two entries; three Nones
            leave the layout out.
        block_t, dtype_t, scale_mode_t: the same of the transpose.

    Returns:
        data, scale: of the result [M, K], as ``quantize`` gives them.
        data_t, scale_t: of its transpose [K, M]. A layout that is left out is two tensors without
            elements.
        rstd: float32 [M], for the backward.

    Raises:
        ValueError: an argument is none of these, or both layouts are left out.
    """
    casts = _casts(x, block, dtype, scale_mode, block_t, dtype_t, scale_mode_t)
    _check_weight(x, weight)
    rstd = inverse_rms(x, eps)
    y = x.to(torch.float32) * rstd[:, None]
    if weight is not None:
        y = y * weight.to(torch.float32)
    return (*_both(y.to(x.dtype), casts), rstd)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of each row of x [M, K]: float32 [M]."""
    return torch.rsqrt(x.to(torch.float32).square().mean(1) + eps)


def swiglu_quantize(
    gate: Tensor,
    up: Tensor,
    block: Block | None,
    dtype: torch.dtype | None,
    scale_mode: str | None,
    block_t: Block | None,
    dtype_t: torch.dtype | None,
    scale_mode_t: str | None,
) -> Layouts:
    """FP8 of ``F.silu(gate) * up`` and of its transpose.

    Args:
        gate, up: [M, F], both bf16, fp16 or fp32, any strides: they may be halves of one tensor.
        block, ...: as of ``rms_norm_quantize``.

    Returns:
        data, scale, data_t, scale_t: as of ``rms_norm_quantize``.

    Raises:
        ValueError: an argument is none of these, or both layouts are left out.
    """
    casts = _casts(gate, block, dtype, scale_mode, block_t, dtype_t, scale_mode_t)
    check_same(gate=gate, up=up)
    return _both(swiglu(gate, up), casts)


def swiglu_backward_quantize(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    block: Block | None,
    dtype: torch.dtype | None,
    scale_mode: str | None,
    block_t: Block | None,
    dtype_t: torch.dtype | None,
    scale_mode_t: str | None,
) -> Layouts:
    """FP8 of the gradients of gate and up, given that of ``F.silu(gate) * up``, and of their
    transposes.

    Args:
        grad, gate, up: [M, F], all bf16, fp16 or fp32, any strides.
        block, ...: as of ``rms_norm_quantize``; both gradients are cast alike, each by itself.

    Returns:
        data, scale: [2, M, F], the gradient of gate and that of up, as ``quantize`` gives them for
            blocks with a leading 1.
        data_t, scale_t: of their transposes [2, F, M].

    Raises:
        ValueError: an argument is none of these, or both layouts are left out.
    """
    casts = _casts(gate, block, dtype, scale_mode, block_t, dtype_t, scale_mode_t)
    check_same(grad=grad, gate=gate, up=up)
    return _both(torch.stack(swiglu_backward(grad, gate, up)), casts)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of tensors of one shape and dtype, in float32, rounded once to that."""
    return (F.silu(gate.to(torch.float32)) * up.to(torch.float32)).to(gate.dtype)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and of up, given that of ``swiglu``: in float32, each rounded once to
    gate's dtype."""
    g, a, u = (t.to(torch.float32) for t in (grad, gate, up))
    s = torch.sigmoid(a)
    return (g * u * s * (1 + a * (1 - s))).to(gate.dtype), (g * a * s).to(gate.dtype)


def _both(y: Tensor, casts: Casts) -> Layouts:
    """The layouts asked for of y, a matrix or a stack of two; of a fake tensor too."""
    found: list[Tensor] = []
    for view, cast in zip((y, y.mT), casts, strict=True):
        if cast is None:
            found += [y.new_empty(0), y.new_empty(0)]
        else:
            block = (*(1,) * (y.ndim - 2), *cast.block)
            found += torch.ops.float8.quantize(view, block, cast.dtype, cast.scale_mode)
    data, scale, data_t, scale_t = found
    return data, scale, data_t, scale_t


def _casts(
    x: Tensor,
    block: Block | None,
    dtype: torch.dtype | None,
    scale_mode: str | None,
    block_t: Block | None,
    dtype_t: torch.dtype | None,
    scale_mode_t: str | None,
) -> Casts:
    """Both casts of a result of x's shape and dtype, checked."""
    if x.ndim != 2:
        raise ValueError(
            f"the input has shape {tuple(x.shape)}; a fused cast takes matrices [M, K], so flatten "
            "leading dimensions into M"
        )
    row = check_layout(x, block, dtype, scale_mode)
    col = check_layout(x, block_t, dtype_t, scale_mode_t)
    if row is None and col is None:
        raise ValueError(
            "no layout is asked for; give block, dtype and scale_mode of the result, of its "
            "transpose, or of both"
        )
    return row, col


def _check_weight(x: Tensor, weight: Tensor | None) -> None:
    if weight is None:
        return
    if weight.dtype not in HIGH_PRECISION or weight.shape != x.shape[1:]:
        raise ValueError(
            f"weight is {weight.dtype} of shape {tuple(weight.shape)}; x of shape "
            f"{tuple(x.shape)} needs {tuple(x.shape[1:])} of {names(HIGH_PRECISION)}"
        )
    check_devices(x, weight)


def check_same(**inputs: Tensor) -> None:
    """Raise ValueError unless all are of one shape, dtype and device."""
    first = next(iter(inputs.values()))
    if any(t.shape != first.shape or t.dtype != first.dtype for t in inputs.values()):
        came = ", ".join(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in inputs.items())
        raise ValueError(f"inputs differ: {came}; bring them to one shape and dtype")
    check_devices(*inputs.values())


def _rms_norm_quantize_gpu(
    x: Tensor, weight: Tensor | None, eps: float, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    casts = _casts(x, *arguments)
    _check_weight(x, weight)
    if _refused(x, casts):
        return rms_norm_quantize(x, weight, eps, *arguments)
    rstd, layouts = _launch("rms", (x, weight, None), casts, eps)
    assert rstd is not None
    return (*layouts, rstd)


def _swiglu_quantize_gpu(gate: Tensor, up: Tensor, *arguments: Any) -> Layouts:
    casts = _casts(gate, *arguments)
    check_same(gate=gate, up=up)
    if _refused(gate, casts):
        return swiglu_quantize(gate, up, *arguments)
    return _launch("swiglu", (gate, up, None), casts)[1]


def _swiglu_backward_quantize_gpu(
    grad: Tensor, gate: Tensor, up: Tensor, *arguments: Any
) -> Layouts:
    casts = _casts(gate, *arguments)
    check_same(grad=grad, gate=gate, up=up)
    if _refused(gate, casts):
        return swiglu_backward_quantize(grad, gate, up, *arguments)
    return _launch("swiglu_backward", (gate, up, grad), casts)[1]


def _refused(x: Tensor, casts: Casts) -> bool:
    return triton_refusal(x, *(cast for cast in casts if cast is not None)) is not None


def _launch(
    source: str, inputs: tuple[Tensor, Tensor | None, Tensor | None], casts: Casts, eps: float = 0.0
) -> tuple[Tensor | None, Layouts]:
    """1/rms of the rows (None but for "rms"), and the layouts."""
    from .fused_triton import fused_layouts

    rstd, layouts = fused_layouts(source, *inputs, eps, *casts)
    data, scale, data_t, scale_t = (
        inputs[0].new_empty(0) if part is None else part for part in layouts
    )
    return rstd, (data, scale, data_t, scale_t)


def _fake_rms_norm_quantize(
    x: Tensor, weight: Tensor | None, eps: float, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    casts = _casts(x, *arguments)
    _check_weight(x, weight)
    return (*_both(x, casts), x.new_empty(x.shape[0], dtype=torch.float32))


def _fake_swiglu_quantize(gate: Tensor, up: Tensor, *arguments: Any) -> Layouts:
    casts = _casts(gate, *arguments)
    check_same(gate=gate, up=up)
    return _both(gate, casts)


def _fake_swiglu_backward_quantize(
    grad: Tensor, gate: Tensor, up: Tensor, *arguments: Any
) -> Layouts:
    casts = _casts(gate, *arguments)
    check_same(grad=grad, gate=gate, up=up)
    return _both(gate.expand(2, *gate.shape), casts)


for _name, _reference, _gpu, _fake in (
    ("rms_norm_quantize", rms_norm_quantize, _rms_norm_quantize_gpu, _fake_rms_norm_quantize),
    ("swiglu_quantize", swiglu_quantize, _swiglu_quantize_gpu, _fake_swiglu_quantize),
    (
        "swiglu_backward_quantize",
        swiglu_backward_quantize,
        _swiglu_backward_quantize_gpu,
        _fake_swiglu_backward_quantize,
    ),
):
    _LIB.impl(_name, torch.no_grad()(_reference), "CPU")
    _LIB.impl(_name, torch.no_grad()(_gpu), "CUDA")
    torch.library.register_fake(f"float8::{_name}", _fake, lib=_LIB)
