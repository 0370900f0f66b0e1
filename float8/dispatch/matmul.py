"""Matrix products: between two FP8 tensors, and of one with a high-precision operand.

Shape letters: M rows of a, N columns of b, K the contraction, B a batch.
"""

from __future__ import annotations

import warnings
from typing import NoReturn

import torch
from torch import Tensor

from ..formats import FORMATS
from ..kernels.matmul import Operand, contraction_error, select
from ..scaling import FULL, Block, block_name, mode_like
from ..tensor import Float8TrainingTensor, dequantize_parts
from .table import Op, implements

aten = torch.ops.aten


def multiply(
    a_MK: Float8TrainingTensor,
    b_KN: Float8TrainingTensor,
    impl: str,
    *,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """``a_MK @ b_KN + bias`` of two FP8 matrices, outside autograd: the table's one route to an FP8
    GEMM.

    Args:
        impl: the implementation that ``kernels.matmul.select`` named for these operands.
        out_dtype: bf16, fp16 or fp32; default a's ``orig_dtype``.
        fast_accum, bias: see ``torch.ops.float8.scaled_mm``.
    """
    out: Tensor = torch.ops.float8.scaled_mm(
        a_MK.qdata, b_KN.qdata, a_MK.scale, b_KN.scale, a_MK.block, b_KN.block,
        out_dtype or a_MK.orig_dtype, fast_accum, impl, bias,
    )  # fmt: skip
    return out


def operand(x: Float8TrainingTensor) -> Operand:
    """What ``select`` asks of a matrix, or of each matrix of a batch."""
    return Operand(x.qdata.dtype, x.block[-2:], x.scale.dtype)


@implements(aten.mm.default, aten.mm.dtype)
def mm(
    op: Op, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, bias: Tensor | None = None
) -> Tensor:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        misfit(op, a, b, "(M, K) and (K, N)")
    if (pair := both_fp8(op, a, b)) is not None:
        return multiply(*pair, _choose(op, *pair), out_dtype=out_dtype, bias=bias)
    product = plain(a) @ plain(b)
    product = product if bias is None else product + bias
    return product if out_dtype is None else product.to(out_dtype)


@implements(aten.bmm.default)
def bmm(op: Op, a: Tensor, b: Tensor) -> Tensor:
    if a.ndim != 3 or b.ndim != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        misfit(op, a, b, "(B, M, K) and (B, K, N)")
    if (pair := both_fp8(op, a, b)) is None:
        return plain(a) @ plain(b)
    impl = _choose(op, *pair)
    matrices = zip(*(aten.unbind.int(batch) for batch in pair), strict=True)
    out = [multiply(a_MK, b_KN, impl) for a_MK, b_KN in matrices]
    return torch.stack(out) if out else a.new_zeros((0, a.shape[1], b.shape[2]))


@implements(aten.addmm.default, aten.baddbmm.default)
def addmm(
    op: Op, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    if not bias.dtype == a.dtype == b.dtype:
        raise ValueError(f"{op}: bias, a and b are {bias.dtype}, {a.dtype} and {b.dtype}; {_CAST}")
    fp8 = Float8TrainingTensor in (type(a), type(b))
    if fp8 and a.ndim == 2 and beta == alpha == 1 and bias.shape == b.shape[1:]:
        return mm(aten.mm.default, a, b, bias=plain(bias))
    product = a @ b  # through the table again, or plain
    product = product if alpha == 1 else product * alpha
    bias = plain(bias).expand(product.shape)
    return product if beta == 0 else torch.add(product, bias, alpha=beta)


@implements(aten.mv.default)
def mv(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b.unsqueeze(1)).squeeze(1)


@implements(aten.dot.default)
def dot(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.unsqueeze(0), b.unsqueeze(1)).reshape(())


_CAST = "bring them to one dtype with .to()"


def misfit(op: Op, a: Tensor, b: Tensor, needed: str) -> NoReturn:
    shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
    raise ValueError(f"{op}: shapes {shapes} do not multiply; needed {needed}")


def plain(x: Tensor) -> Tensor:
    return dequantize_parts(x) if isinstance(x, Float8TrainingTensor) else x


def _choose(op: Op, a: Float8TrainingTensor, b: Float8TrainingTensor) -> str:
    operands = operand(a), operand(b)
    if (error := contraction_error(*operands, a.shape[-1])) is not None:
        raise ValueError(f"{op} of shapes {tuple(a.shape)} and {tuple(b.shape)}: {error}")
    return select(a.device, *operands)


def both_fp8(
    op: Op, a: Tensor, b: Tensor
) -> tuple[Float8TrainingTensor, Float8TrainingTensor] | None:
    """Both operands in FP8: a high-precision one is quantised to match the other where the
    contraction lies inside the other's blocks. None, with a warning, where it does not."""
    if a.dtype != b.dtype:
        raise ValueError(f"{op}: operands of {a.dtype} and {b.dtype}; {_CAST}")
    a_fp8, b_fp8 = isinstance(a, Float8TrainingTensor), isinstance(b, Float8TrainingTensor)
    if a_fp8 and b_fp8:
        return a, b  # type: ignore[return-value]
    given, other = (a, b) if a_fp8 else (b, a)
    assert isinstance(given, Float8TrainingTensor)
    rows, inner = given.block[-2:] if a_fp8 else given.block[:-3:-1]
    if inner == 1 and a.shape[-1] > 1:
        warnings.warn(
            f"{op} of shapes {tuple(a.shape)} and {tuple(b.shape)} runs in {a.dtype}: the FP8 "
            f"operand's blocks {block_name(given.block)} do not contain the contraction. Quantise "
            "it along the contraction, or with a block that holds both ways, such as (128, 128), "
            "to multiply in FP8.",
            stacklevel=2,
        )
        return None
    row = FULL if rows == inner == FULL else 1
    block: Block = (1,) * (a.ndim - 2) + ((inner, row) if a_fp8 else (row, inner))
    # e4m3 of the same flavour, with scales of the same kind.
    fmt = next(f for f in FORMATS if f.kind == "e4m3" and f.flavour == given.format.flavour)
    data, scale = torch.ops.float8.quantize(other, block, fmt.dtype, mode_like(given.scale))
    match = given.replace(qdata=data, scale=scale, block=block)
    return (given, match) if a_fp8 else (match, given)
