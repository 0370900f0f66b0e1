"""The grouped matrix product: ``torch._grouped_mm`` and ``F.grouped_mm`` of FP8 tensors.

Shape letters: T tokens, sorted by group; G groups; K and N features; P columns of a layout in which
    every group has columns of its own. offs holds where each group's tokens end.

    [T, K] x [G, K, N]  each group's rows times its matrix; rows of no group come out zero
    [N, T] x [T, K]     each group's columns times the same rows: [G, N, K], zero without tokens
    [G, N, K] x [K, T]  the first, transposed
    [G, T, K] x [G, K, N] without offs is bmm
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.grouped import WGRAD_IMPLEMENTATIONS, check_offs, select, zero_tail
from ..kernels.matmul import Operand, contraction_error
from ..kernels.quantize import check_devices
from ..kernels.quantize_grouped import GROUP_ALIGN
from ..scaling import FULL, Block, as_bytes, scale_layout
from ..tensor import Float8TrainingTensor
from .matmul import both_fp8, misfit, operand, plain
from .table import Op, implements

Part = tuple[Tensor, Tensor, Block]  # data, scale, block


@implements(torch.ops.aten._grouped_mm.default)
def grouped_mm(
    op: Op,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    if bias is not None:
        raise NotImplementedError(f"{op} takes no bias, nor does torch; add it to the result")
    dims, dtype = (a.ndim, b.ndim), out_dtype or a.dtype
    if not {*dims} <= {2, 3} or (offs is None) != (dims == (3, 3)) or a.shape[-1] != b.shape[-2]:
        needed = "(T, K) and (G, K, N), (N, T) and (T, K) or (G, N, K) and (K, T), with offs"
        misfit(op, a, b, f"{needed}; or without, (G, T, K) and (G, K, N)")
    if offs is None:
        return torch.bmm(a, b).to(dtype)
    if a.ndim == 3:
        return grouped_mm(op, b.mT, a.mT, offs, None, out_dtype).mT.contiguous()
    check_offs(offs, b.shape[0] if b.ndim == 3 else None)
    check_devices(a, b, offs)
    if (pair := both_fp8(op, *_matchable(a, b, offs))) is None:
        product: Tensor = torch.ops.float8.grouped_mm_hp(plain(a), plain(b), offs)
        return product.to(dtype)
    if (error := contraction_error(operand(pair[0]), operand(pair[1]), a.shape[1])) is not None:
        raise ValueError(f"{op} of shapes {tuple(a.shape)} and {tuple(b.shape)}: {error}")
    return (_multiply_rows if b.ndim == 3 else _multiply_columns)(*pair, offs, dtype)


def _matchable(a: Tensor, b: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """The operands as ``both_fp8`` is to see them: of as many dimensions, if b is to be cast; and
    what is to be cast without tokens of no group, which must not decide about others' scales."""
    a_fp8, b_fp8 = (isinstance(x, Float8TrainingTensor) for x in (a, b))
    if b.ndim == 3 and a_fp8:
        return a.unsqueeze(0), b
    if b.ndim == 3:
        assert isinstance(b, Float8TrainingTensor)
        return zero_tail(a, offs) if b.block[1:] == (FULL, FULL) else a, b
    return a if a_fp8 else zero_tail(a.t(), offs).t(), b if b_fp8 else zero_tail(b, offs)


def _operand(data: Tensor, scale: Tensor, block: Block) -> Operand:
    return Operand(data.dtype, block, scale.dtype)


def _multiply_rows(
    a_TK: Float8TrainingTensor, b_GKN: Float8TrainingTensor, offs: Tensor, dtype: torch.dtype
) -> Tensor:
    """a may have a leading dimension of 1."""
    groups, (lead, *block), scale = b_GKN.shape[0], b_GKN.block, b_GKN.scale
    if lead != 1:  # kernels take scales of each matrix
        shared = torch.arange(groups, device=offs.device) // (groups if lead == FULL else lead)
        scale = as_bytes(scale).index_select(0, shared).view(scale.dtype)
    a = a_TK.qdata.flatten(0, -2), a_TK.scale.flatten(0, -2), a_TK.block[-2:]
    b = b_GKN.qdata, scale, (1, *block)
    impl = select(offs.device, _operand(*a), _operand(*b))
    out: Tensor = torch.ops.float8.grouped_mm(
        a[0], b[0], a[1], b[1], offs, a[2], b[2], dtype, False, impl
    )
    return out


def _multiply_columns(
    a_NT: Float8TrainingTensor, b_TK: Float8TrainingTensor, offs: Tensor, dtype: torch.dtype
) -> Tensor:
    if 0 in (*a_NT.shape, *b_TK.shape):
        return offs.new_zeros((len(offs), a_NT.shape[0], b_TK.shape[1]), dtype=dtype)
    inner = a_NT.block[1]  # as b's, or either is one block
    token, held, ends = _columns_of_groups(offs, a_NT.shape[1], inner)
    a = _columns(a_NT.qdata, a_NT.scale, (a_NT.block[0], inner), token, held, len(offs))
    b = _columns(b_TK.qdata.t(), b_TK.scale.t(), (b_TK.block[1], inner), token, held, len(offs))
    right = _operand(b[0], b[1], b[2][::-1])
    impl = select(offs.device, _operand(*a), right, table=WGRAD_IMPLEMENTATIONS)
    args = a[0], b[0], a[1], b[1], ends, a[2], b[2], dtype, False, impl
    try:
        out: Tensor = torch.ops.float8.grouped_wgrad(*args)
    except ValueError as error:
        if impl != "torch":
            raise
        # The reference has looked into ends, which no caller knows.
        raise ValueError(
            f"offs holds {offs.tolist()}; it must hold where each group ends: never less than the "
            f"one before, and between 0 and {a_NT.shape[1]}"
        ) from error
    return out


def _columns_of_groups(offs: Tensor, tokens: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    """A layout for ``grouped_wgrad`` of tokens with scales in blocks of ``inner``, made without
    waiting for offs. A group's columns are those of all blocks that hold a token of it, and others
    up to a multiple of GROUP_ALIGN; only its own tokens are held.

    Returns: of each column the token [P], and whether it is held [P]; where each group's columns
        end [G], which is no rising sequence unless offs is one, within tokens.
    """
    step = 1 if inner == FULL else inner
    align = math.lcm(GROUP_ALIGN, step)
    start = F.pad(offs[:-1], (1, 0))
    first = start // step * step
    width = (offs - first + align - 1) // align * align
    width = torch.where((offs < start) | (offs > tokens), -align, width)
    ends = width.cumsum(0, dtype=torch.int32)
    most = (tokens + len(offs) * (step + align)) // align * align
    column = torch.arange(most, dtype=torch.int32, device=offs.device)
    group = torch.searchsorted(ends, column, right=True).clamp(max=len(offs) - 1)
    token = column + (first - ends + width)[group]
    return token, (token >= start[group]) & (token < offs[group]), ends


def _columns(
    data: Tensor, scale: Tensor, block: Block, token: Tensor, held: Tensor, groups: int
) -> Part:
    inner, data = block[1], _gather(data, token, held)
    if inner == FULL:
        return data, as_bytes(scale).t().repeat(groups, 1).view(scale.dtype), block
    scale = _gather(scale, token[::inner] // inner, held.view(-1, inner).any(1))
    return data, scale_layout(scale, block), block


def _gather(x_RT: Tensor, at: Tensor, held: Tensor) -> Tensor:
    """Columns of x; zeros where none is held."""
    columns = as_bytes(x_RT).index_select(1, at.clamp(0, x_RT.shape[1] - 1))
    return torch.where(held, columns, 0).view(x_RT.dtype)
