"""Casts of token groups fused with what makes them, for SwiGLU experts:
``torch.ops.float8.{swiglu_quantize_grouped, swiglu_backward_quantize_grouped}``. Each is a formula
of ``kernels.fused``, rounded once to the inputs' dtype, and then ``quantize_grouped`` of the
result, which never reaches memory in high precision where Triton kernels run.

Letters: T tokens, F hidden features, G groups, P columns of the column layout.

The bodies below are the reference and the specification, and kernels differ from them as far as
those of ``kernels.fused`` do. No gradient flows through these ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..scaling import Block, scale_layout
from .fused import check_same, swiglu, swiglu_backward
from .quantize import CastPlan, triton_refusal
from .quantize_grouped import Outputs, check_grouped, empty_outputs, join, no_rows

_CASTS = (
    "int[]? block, ScalarType? dtype, str? scale_mode, "
    "int[] block_t, ScalarType dtype_t, str scale_mode_t"
)
_LIB = torch.library.Library("float8", "FRAGMENT")
_LIB.define(
    f"swiglu_quantize_grouped(Tensor gate, Tensor up, Tensor offs, {_CASTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIB.define(
    "swiglu_backward_quantize_grouped(Tensor grad, Tensor gate, Tensor up, Tensor offs, "
    f"bool joint, {_CASTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def swiglu_quantize_grouped(
    gate: Tensor,
    up: Tensor,
    offs: Tensor,
    block: Block | None,
    dtype: torch.dtype | None,
    scale_mode: str | None,
    block_t: Block,
    dtype_t: torch.dtype,
    scale_mode_t: str,
) -> Outputs:
    """``quantize_grouped`` of ``F.silu(gate) * up``.

    Args:
        gate, up: [T, F], both bf16, fp16 or fp32, any strides: they may be halves of one tensor.
        offs, block, ...: as of ``quantize_grouped``.

    Returns:
        data, scale, data_t, scale_t, offs_t: as of ``quantize_grouped``.

    Raises:
        ValueError: an argument is none of these; for offs as ``quantize_grouped``.
    """
    casts = block, dtype, scale_mode, block_t, dtype_t, scale_mode_t
    check_grouped(gate, offs, *casts)
    check_same(gate=gate, up=up)
    return _grouped(swiglu(gate, up), offs, casts)


def swiglu_backward_quantize_grouped(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    offs: Tensor,
    joint: bool,
    block: Block | None,
    dtype: torch.dtype | None,
    scale_mode: str | None,
    block_t: Block,
    dtype_t: torch.dtype,
    scale_mode_t: str,
) -> Outputs:
    """``quantize_grouped`` of the gradients of gate and up, given that of ``F.silu(gate) * up``.

    Args:
        grad, gate, up: [T, F], all bf16, fp16 or fp32, any strides.
        joint: whether the gradients are one matrix [T, 2 F], gate's columns before up's, or each is
            cast by itself.
        offs, block, ...: as of ``quantize_grouped``.

    Returns:
        data, scale, data_t, scale_t, offs_t: as of ``quantize_grouped``; but for offs_t those of
            the two gradients stacked, gate's first, unless they are joint.

    Raises:
        ValueError: an argument is none of these; for offs as ``quantize_grouped``.
    """
    casts = block, dtype, scale_mode, block_t, dtype_t, scale_mode_t
    row, col = check_grouped(gate, offs, *casts)
    check_same(grad=grad, gate=gate, up=up)
    gradients = swiglu_backward(grad, gate, up)
    if joint:
        return _grouped(torch.cat(gradients, 1), offs, casts)
    both = zip(*(_grouped(g, offs, casts) for g in gradients), strict=True)
    data, scale, data_t, scale_t, (offs_t, _) = both
    rows = no_rows(gate) if row is None else _stacked(data, scale, row)
    return (*rows, *_stacked(data_t, scale_t, col), offs_t)


def _grouped(x: Tensor, offs: Tensor, casts: tuple[Any, ...]) -> Outputs:
    outputs: Outputs = torch.ops.float8.quantize_grouped(x, offs, *casts)
    return outputs


def _stacked(
    data: tuple[Tensor, ...], scale: tuple[Tensor, ...], cast: CastPlan
) -> tuple[Tensor, Tensor]:
    # Autocast knows no dtype of one byte.
    with torch.autocast(data[0].device.type, enabled=False):
        scales = join([part[None] for part in scale], 0)
        return join([part[None] for part in data], 0), scale_layout(scales, cast.block)


def _swiglu_quantize_grouped_gpu(gate: Tensor, up: Tensor, offs: Tensor, *casts: Any) -> Outputs:
    row, col = check_grouped(gate, offs, *casts)
    check_same(gate=gate, up=up)
    if _refused(gate, False, row, col):
        return swiglu_quantize_grouped(gate, up, offs, *casts)
    return _launch("swiglu", (gate, up, None), offs, False, row, col)


def _swiglu_backward_quantize_grouped_gpu(
    grad: Tensor, gate: Tensor, up: Tensor, offs: Tensor, joint: bool, *casts: Any
) -> Outputs:
    row, col = check_grouped(gate, offs, *casts)
    check_same(grad=grad, gate=gate, up=up)
    if _refused(gate, joint, row, col):
        return swiglu_backward_quantize_grouped(grad, gate, up, offs, joint, *casts)
    return _launch("swiglu_backward", (gate, up, grad), offs, joint, row, col)


def _refused(x: Tensor, joint: bool, row: CastPlan | None, col: CastPlan) -> bool:
    """Whether the kernels do not take this; ``quantize_grouped`` may have some that do."""
    if triton_refusal(x, col, *(() if row is None else (row,))) is not None:
        return True
    from .quantize_grouped_triton import crosses_halves, shares_a_pass

    shared = row is None or shares_a_pass(row, col)
    return not shared or (joint and crosses_halves(x.shape[1], row, col))


def _launch(
    source: str,
    inputs: tuple[Tensor, Tensor | None, Tensor | None],
    offs: Tensor,
    joint: bool,
    row: CastPlan | None,
    col: CastPlan,
) -> Outputs:
    from .quantize_grouped_triton import group_layouts

    rows, columns = group_layouts(source, inputs, offs, joint, row, col)
    return (*(no_rows(inputs[0]) if rows is None else rows), *columns)


def _fake_swiglu_quantize_grouped(gate: Tensor, up: Tensor, offs: Tensor, *casts: Any) -> Outputs:
    row, col = check_grouped(gate, offs, *casts)
    check_same(gate=gate, up=up)
    return empty_outputs(gate, gate.shape, offs, row, col)


def _fake_swiglu_backward_quantize_grouped(
    grad: Tensor, gate: Tensor, up: Tensor, offs: Tensor, joint: bool, *casts: Any
) -> Outputs:
    row, col = check_grouped(gate, offs, *casts)
    check_same(grad=grad, gate=gate, up=up)
    t, f = gate.shape
    return empty_outputs(gate, (t, 2 * f) if joint else (2, t, f), offs, row, col)


for _name, _reference, _gpu, _fake in (
    (
        "swiglu_quantize_grouped",
        swiglu_quantize_grouped,
        _swiglu_quantize_grouped_gpu,
        _fake_swiglu_quantize_grouped,
    ),
    (
        "swiglu_backward_quantize_grouped",
        swiglu_backward_quantize_grouped,
        _swiglu_backward_quantize_grouped_gpu,
        _fake_swiglu_backward_quantize_grouped,
    ),
):
    _LIB.impl(_name, torch.no_grad()(_reference), "CPU")
    _LIB.impl(_name, torch.no_grad()(_gpu), "CUDA")
    torch.library.register_fake(f"float8::{_name}", _fake, lib=_LIB)
