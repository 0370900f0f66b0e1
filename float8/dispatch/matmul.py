"""Matrix products: between two FP8 tensors, and of one with a high-precision operand.

Shape letters: M rows of a, N columns of b, K the contraction.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..formats import E8M0, FORMATS
from ..kernels.matmul import Operand, contraction_error, select
from ..scaling import FULL, Block, block_name
from ..tensor import Float8TrainingTensor, dequantize_parts
from .table import implements

aten = torch.ops.aten


def multiply(
    a_MK: Float8TrainingTensor,
    b_KN: Float8TrainingTensor,
    impl: str,
    *,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = True,
) -> Tensor:
    """``a_MK @ b_KN`` of two FP8 matrices, outside autograd: the one route to an FP8 GEMM, for the table and for layers.

    Args:
        impl: the implementation that ``kernels.matmul.select`` named for these operands.
        out_dtype: bf16, fp16 or fp32; default a's ``orig_dtype``.
        fast_accum: see ``torch.ops.float8.scaled_mm``.
    """
    dtype = a_MK.orig_dtype if out_dtype is None else out_dtype
    a, b = (a_MK.qdata, a_MK.scale, a_MK.block), (b_KN.qdata, b_KN.scale, b_KN.block)
    out: Tensor = torch.ops.float8.scaled_mm(a[0], b[0], a[1], b[1], a[2], b[2], dtype, fast_accum, impl)
    return out


def operand(x: Float8TrainingTensor) -> Operand:
    return Operand(x.qdata.dtype, x.block, x.scale.dtype)


@implements(aten.mm.default)
def mm(op: torch._ops.OpOverload, a: Tensor, b: Tensor) -> Tensor:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{op}: shapes {tuple(a.shape)} and {tuple(b.shape)} do not multiply; needed (M, K) and (K, N)")
    if a.dtype != b.dtype:
        raise ValueError(f"{op}: operands of {a.dtype} and {b.dtype}; bring both to one dtype with .to()")
    pair = _both_fp8(op, a, b)
    if pair is None:
        return op(_plain(a), _plain(b))  # type: ignore[no-any-return]
    operands = operand(pair[0]), operand(pair[1])
    if (error := contraction_error(*operands, a.shape[1])) is not None:
        raise ValueError(f"{op} of shapes {tuple(a.shape)} and {tuple(b.shape)}: {error}")
    return multiply(*pair, select(a.device, *operands))


@implements(aten.addmm.default)
def addmm(op: torch._ops.OpOverload, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    fp8 = isinstance(a, Float8TrainingTensor) or isinstance(b, Float8TrainingTensor)
    product = mm(aten.mm.default, a, b) if fp8 else torch.mm(a, b)
    return product * alpha + _plain(bias) * beta


@implements(aten.bmm.default)
def bmm(op: torch._ops.OpOverload, a: Tensor, b: Tensor) -> Tensor:
    if a.ndim != 3 or b.ndim != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise ValueError(f"{op}: shapes {tuple(a.shape)} and {tuple(b.shape)} do not multiply; needed (B, M, K), (B, K, N)")
    if a.shape[0] == 0:
        return a.new_zeros((0, a.shape[1], b.shape[2]))
    return torch.stack([mm(aten.mm.default, a[i], b[i]) for i in range(a.shape[0])])


@implements(aten.mv.default)
def mv(op: torch._ops.OpOverload, a: Tensor, b: Tensor) -> Tensor:
    return mm(aten.mm.default, a, b.unsqueeze(1)).squeeze(1)


def _plain(x: Tensor) -> Tensor:
    return dequantize_parts(x) if isinstance(x, Float8TrainingTensor) else x


def _both_fp8(
    op: torch._ops.OpOverload, a: Tensor, b: Tensor
) -> tuple[Float8TrainingTensor, Float8TrainingTensor] | None:
    """Both operands in FP8: a high-precision one is quantised to match the other where the contraction lies inside the
    other's blocks. None, with a warning, where it does not."""
    a_fp8, b_fp8 = isinstance(a, Float8TrainingTensor), isinstance(b, Float8TrainingTensor)
    if a_fp8 and b_fp8:
        return a, b  # type: ignore[return-value]
    given = a if a_fp8 else b
    assert isinstance(given, Float8TrainingTensor)
    k = a.shape[1]
    rows, inner = given.block if a_fp8 else given.block[::-1]
    if inner == 1 and k > 1:
        warnings.warn(
            f"{op} of shapes {tuple(a.shape)} and {tuple(b.shape)} runs in {a.dtype}: the FP8 operand's blocks "
            f"{block_name(given.block)} do not contain the contraction. Quantise it along the contraction, or with a "
            "block that holds both ways, such as (128, 128), to multiply in FP8.",
            stacklevel=2,
        )
        return None
    row = FULL if rows == inner == FULL else 1
    block: Block = (inner, row) if a_fp8 else (row, inner)
    # e4m3 of the same flavour, with scales of the same kind.
    fmt = next(f for f in FORMATS if f.kind == "e4m3" and f.flavour == given.format.flavour)
    mode = "e8m0_rceil" if given.scale.dtype == E8M0.dtype else "fp32"
    other = b if a_fp8 else a
    data, scale = torch.ops.float8.quantize(other, block, fmt.dtype, mode)
    match = given.replace(qdata=data, scale=scale, block=block, orig_dtype=other.dtype)
    return (given, match) if a_fp8 else (match, given)


