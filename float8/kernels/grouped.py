"""Scaled matrix products of groups (the tokens of each expert, one after another), the choice of
who computes them, and the same products in high precision: ``torch.ops.float8.{grouped_mm,
grouped_wgrad, grouped_wgrad_add_, grouped_mm_hp}``.

Shape letters: T tokens, sorted by group; G groups; K and N features; P columns of a column layout
    (``kernels.quantize_grouped``), in which every group is padded with zeros. ``offs`` holds where
    each group's rows end, ``offs_t`` where its columns do.

    grouped_mm     out_TN[rows of g] = a_TK[rows of g] @ b_GKN[g]
                   rows from offs[G-1] on, which are of no group, come out zero
    grouped_wgrad  out_GNK[g] = a_NP[:, columns of g] @ b_KP[:, columns of g].T
                   a group without columns comes out exactly zero
    grouped_wgrad_add_  the same, added to what out_GNK holds

    a and b times their scales, accumulated in float32 and rounded once, before they are added

Implementations: ``hopper`` and ``triton`` are the kernels of ``scaled_mm`` that have these names,
    walking groups whose ends they read on the device. ``torch`` multiplies the dequantised operands
    group by group in float32 and is the reference; for the sizes of groups it waits for the device.
    ``torch_grouped`` is torch's own kernel, on request only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..devices import DeviceProfile, device_profile
from ..formats import E8M0, format_of
from ..scaling import FULL, Block, block_name, check_block, num_blocks
from . import matmul
from .matmul import Operand, native_mode
from .quantize import HIGH_PRECISION, check_devices, check_scale, dequantize, names

_LIB = torch.library.Library("float8", "FRAGMENT")
_LIB.define(
    "grouped_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs, int[] block_a, "
    "int[] block_b, ScalarType out_dtype, bool fast_accum, str impl) -> Tensor"
)
_LIB.define(
    "grouped_wgrad(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs_t, "
    "int[] block_a, int[] block_b, ScalarType out_dtype, bool fast_accum, str impl) -> Tensor"
)
_LIB.define(
    "grouped_wgrad_add_(Tensor(a!) out, Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, "
    "Tensor offs_t, int[] block_a, int[] block_b, bool fast_accum, str impl) -> ()"
)
_LIB.define("grouped_mm_hp(Tensor a, Tensor b, Tensor offs) -> Tensor")


class GroupedProduct(NamedTuple):
    """The arguments of ``grouped_mm`` and of ``grouped_wgrad`` (offs is offs_t there), in order,
    and what the products are added to, if they are."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    offs: Tensor
    block_a: Block
    block_b: Block
    out_dtype: torch.dtype
    fast_accum: bool
    impl: str
    out: Tensor | None = None


Refusal = Callable[[DeviceProfile, Operand, Operand], str | None]


def _rows_refusal(kernel: str, profile: DeviceProfile, a: Operand, b: Operand) -> str | None:
    """That of the kernel for one matrix, if no scale but one for all is for several groups."""
    if a.block[0] not in (1, FULL) or b.block[0] != 1:
        return (
            "rows of several groups, or several matrices, share scales in blocks "
            f"{block_name(a.block)} and {block_name(b.block)}; the kernels take (1 or FULL, …) and "
            "(1, …)"
        )
    return matmul.IMPLEMENTATIONS[kernel](profile, a, b._replace(block=b.block[1:]))


def _torch_grouped_refusal(profile: DeviceProfile, a: Operand, b: Operand) -> str | None:
    if (reason := profile.refusal("grouped")) is not None:
        return reason
    if profile.arch != "sm_90":
        return "torch's grouped kernel is known here on sm_90 alone"
    # b's leading 1 says that every group has scales of its own.
    mode = native_mode(a, b._replace(block=b.block[1:])) if b.block[0] == 1 else None
    formats = [format_of(operand.dtype) for operand in (a, b)]
    rows = mode == "rowwise" and {a.block[0], b.block[2]} == {1}
    if not rows or {(fmt.kind, fmt.flavour) for fmt in formats} != {("e4m3", "fn")}:
        return (
            "torch's grouped kernel takes e4m3fn with a scale per row and per column, these are "
            f"{formats[0]} in blocks {block_name(a.block)} and {formats[1]} in "
            f"{block_name(b.block)}"
        )
    return None


# In the order in which they are preferred: what follows "torch" is taken on request only. torch's
# kernel stops the process at a group that starts off a 16-byte boundary, which the host cannot see;
# by its source no rows of whole 16 bytes do, and it is not chosen before that has been run. It
# takes K and N that are multiples of 16, a row-major, b column-major, and writes bf16.
IMPLEMENTATIONS: dict[str, Refusal] = {
    "hopper": partial(_rows_refusal, "hopper"),
    "triton": partial(_rows_refusal, "triton"),
    "torch": matmul.never_refuses,
    "torch_grouped": _torch_grouped_refusal,
}
# Columns of a group are multiplied as matrices are, blocks of whole groups as FULL.
WGRAD_IMPLEMENTATIONS: dict[str, Refusal] = {
    "hopper": matmul.IMPLEMENTATIONS["hopper"],
    "triton": matmul.IMPLEMENTATIONS["triton"],
    "torch": matmul.never_refuses,
}


def select(
    device: torch.device,
    a: Operand,
    b: Operand,
    impl: str | None = None,
    table: dict[str, Refusal] = IMPLEMENTATIONS,
) -> str:
    """Name of the implementation in ``table`` that multiplies groups of a and b on ``device``: the
    first that does not refuse, or the named one, which must not refuse.

    Raises:
        ValueError: the named implementation is unknown or refuses; the message gives the reason.
    """
    profile = device_profile(device)
    if impl is None:
        return next(name for name, refuse in table.items() if refuse(profile, a, b) is None)
    _check_impl(impl, table)
    if (reason := table[impl](profile, a, b)) is not None:
        raise ValueError(
            f"impl={impl!r} cannot multiply these groups: {reason.rstrip('.')}; choose another"
        )
    return impl


def _check_impl(impl: str, table: dict[str, Refusal]) -> None:
    if impl not in table:
        raise ValueError(f"impl={impl!r} is unknown; choose one of {', '.join(table)}")


# ------------------------------------------------------------------------------------- M-grouped


def grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    block_a: Block,
    block_b: Block,
    out_dtype: torch.dtype,
    fast_accum: bool,
    impl: str,
) -> Tensor:
    """Each group's rows of a times that group's matrix of b (module docstring), on the
    implementation that ``select`` named.

    Args:
        a: FP8 [T, K], any strides.
        b: FP8 [G, K, N], any strides.
        scale_a, scale_b: float32 or E8M0, ``scale_shape`` of a and b.
        offs: int32 [G], as torch's grouped_mm takes them: from 0 to T, never less than the one
            before. The last may be less than T.
        block_a, block_b: (rows, K) and (1, K, columns).
        out_dtype: bf16, fp16 or fp32.
        fast_accum: as of ``scaled_mm``.

    Returns: [T, N] ``out_dtype``, contiguous.

    Raises:
        ValueError: an argument is none of these, or the implementation does not take these
            operands. Only the reference looks into offs; if these fall, or pass T, what the kernels
            write is undefined, and they write nowhere else.
    """
    blocks = tuple(block_a), tuple(block_b)
    x = GroupedProduct(a, b, scale_a, scale_b, offs, *blocks, out_dtype, fast_accum, impl)
    _check_rows(x)
    if 0 in (*a.shape, *b.shape):
        return a.new_zeros((a.shape[0], b.shape[2]), dtype=out_dtype)
    if impl == "torch":
        return _grouped_mm_reference(x)
    _check_takes(x, x.block_b, IMPLEMENTATIONS)
    if impl == "torch_grouped":
        per_row, per_column = scale_a.reshape(-1), scale_b.reshape(b.shape[0], -1)
        out = torch._scaled_grouped_mm(
            a, b, per_row, per_column, offs, out_dtype=out_dtype, use_fast_accum=fast_accum
        )
        return zero_tail(out, offs)
    lead, inner, columns = x.block_b
    turned = x.block_a, (lead, columns, inner)
    args = (a, b.mT, scale_a, scale_b.mT, offs, *turned, out_dtype, fast_accum)
    from . import grouped_hopper, grouped_triton

    if impl == "hopper" and len(offs) <= grouped_hopper.MOST:
        return grouped_hopper.multiply_rows(*args)
    return grouped_triton.multiply_rows(*args)


def _grouped_mm_reference(x: GroupedProduct) -> Tensor:
    out_TN = x.a.new_zeros((x.a.shape[0], x.b.shape[2]), dtype=x.out_dtype)
    a_TK = dequantize(x.a, x.scale_a, x.block_a, torch.float32)
    # Autocast would round the operands to its dtype first.
    with torch.autocast(x.a.device.type, enabled=False):
        for g, (start, end) in enumerate(_spans(x.offs, x.a.shape[0])):
            b_KN = dequantize(x.b[g], x.scale_b[g], x.block_b[1:], torch.float32)
            out_TN[start:end] = torch.mm(a_TK[start:end], b_KN).to(x.out_dtype)
    return out_TN


def _check_takes(x: GroupedProduct, block_b: Block, table: dict[str, Refusal]) -> None:
    """Raise ValueError unless the implementation takes such operands on their device. ``block_b``
    is (…, contraction, columns), which ``grouped_wgrad``'s is not."""
    left = Operand(x.a.dtype, x.block_a, x.scale_a.dtype)
    right = Operand(x.b.dtype, block_b, x.scale_b.dtype)
    select(x.a.device, left, right, x.impl, table)


def stacked(x_GRK: Tensor) -> tuple[Tensor, int]:
    """The rows of all matrices as those of one, each on 16 bytes, and how many there are from one
    matrix to the next: what kernels read. A view where the memory is like that, else a copy, padded
    with zeros to a multiple of 16 of K."""
    (groups, rows, k), pad = x_GRK.shape, -x_GRK.shape[2] % 16
    if pad:
        x_GRK = F.pad(x_GRK.view(torch.uint8), (0, pad)).view(x_GRK.dtype)
        k += pad
    step, pitch, row = (x_GRK.stride(d) if x_GRK.shape[d] > 1 else 0 for d in range(3))
    pitch = pitch if rows > 1 else step if groups > 1 else k
    if row not in (0, 1) or pitch % 16 or pitch < k or step % pitch or x_GRK.data_ptr() % 16:
        x_GRK = x_GRK.clone(memory_format=torch.contiguous_format)
        pitch, step = k, rows * k
    b_rows = step // pitch
    return x_GRK.as_strided(((groups - 1) * b_rows + rows, k), (pitch, 1)), b_rows


def scale_by_group(scale: Tensor, block: Block) -> Tensor:
    """The scale of a column layout as kernels read it: of blocks of whole groups [G, rows, 1], one
    scale of a matrix for each group, where ``quantize_grouped`` gives [G, rows]."""
    return scale[..., None] if block[1] == FULL else scale


def zero_tail(x_TK: Tensor, offs: Tensor) -> Tensor:
    """x with the rows that are of no group set to zero, without waiting for the device."""
    rows = torch.arange(x_TK.shape[0], device=x_TK.device)
    return torch.where((rows < offs[-1])[:, None], x_TK, x_TK.new_zeros(()))


def _spans(offs: Tensor, length: int) -> list[tuple[int, int]]:
    """Where each group starts and ends; waits for the device."""
    ends = offs.tolist()
    if any(end < start for start, end in pairwise([0, *ends, length])):
        raise ValueError(
            f"offs holds {ends}; it must hold where each group ends: never less than the one "
            f"before, and between 0 and {length}"
        )
    return list(pairwise([0, *ends]))


def _check_rows(x: GroupedProduct) -> None:
    _check_groups(x.a, x.b, x.offs)
    check_devices(x.a, x.b, x.scale_a, x.scale_b, x.offs)
    _check_out(x.out_dtype, x.impl, IMPLEMENTATIONS)
    for data, scale, block in ((x.a, x.scale_a, x.block_a), (x.b, x.scale_b, x.block_b)):
        check_block(data.shape, block)
        check_scale(scale, data, block)


def _check_groups(a: Tensor, b: Tensor, offs: Tensor) -> None:
    if a.ndim != 2 or b.ndim != 3 or a.shape[1] != b.shape[1]:
        raise ValueError(
            f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not multiply in groups; needed "
            "(tokens, K), sorted by group, and (groups, K, N)"
        )
    check_offs(offs, b.shape[0])


def check_offs(offs: Tensor, groups: int | None = None) -> None:
    """Raise ValueError unless ``offs`` can say where so many groups (any number, if None) end."""
    fits = offs.ndim == 1 and offs.shape[0] > 0 and groups in (None, offs.shape[0])
    if offs.dtype != torch.int32 or not fits:
        raise ValueError(
            f"offs is {offs.dtype} of shape {tuple(offs.shape)}; it must be torch.int32 of shape "
            f"({groups or 'at least 1'},), with where each group ends"
        )


def _check_out(out_dtype: torch.dtype, impl: str, table: dict[str, Refusal]) -> None:
    if out_dtype not in HIGH_PRECISION:
        raise ValueError(f"out_dtype={out_dtype} must be one of {names(HIGH_PRECISION)}")
    _check_impl(impl, table)


def _fake_grouped_mm(*arguments: Any) -> Tensor:
    x = GroupedProduct(*arguments)
    _check_rows(x)
    return x.a.new_empty((x.a.shape[0], x.b.shape[2]), dtype=x.out_dtype)


# ------------------------------------------------------------------------------------- K-grouped


def grouped_wgrad(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs_t: Tensor,
    block_a: Block,
    block_b: Block,
    out_dtype: torch.dtype,
    fast_accum: bool,
    impl: str,
) -> Tensor:
    """Each group's columns of a times the same columns of b, transposed (module docstring): the
    gradients of all weights, of the column layouts of two matrices with the same groups.

    Args:
        a, b: FP8 [N, P] and [K, P], the data_t of ``quantize_grouped``.
        scale_a, scale_b: their scale_t: for blocks of whole groups [G, ceil(N / rows)], else
            [ceil(N / rows), P / columns of a block].
        offs_t: int32 [G], where each group's columns end: multiples of GROUP_ALIGN.
        block_a, block_b: (rows, tokens), the block_t of their casts.
        out_dtype: bf16, fp16 or fp32.
        fast_accum: as of ``scaled_mm``.

    Returns: [G, N, K] ``out_dtype``, contiguous.

    Raises:
        ValueError: an argument is none of these, or the implementation does not take these
            operands. Only the reference looks into offs_t; for the kernels it is as with
            ``grouped_mm``.
    """
    blocks = tuple(block_a), tuple(block_b)
    x = GroupedProduct(a, b, scale_a, scale_b, offs_t, *blocks, out_dtype, fast_accum, impl)
    _check_columns(x)
    if 0 in (*a.shape, *b.shape):
        return a.new_zeros(_shape_columns(x), dtype=out_dtype)
    return _run_columns(x)


def _run_columns(x: GroupedProduct) -> Tensor:
    """The products on the implementation that x names: new ones, or x.out."""
    if x.impl == "torch":
        product = _grouped_wgrad_reference(x)
        return product if x.out is None else x.out.add_(product)
    _check_takes(x, x.block_b[::-1], WGRAD_IMPLEMENTATIONS)
    if x.impl == "triton":
        from . import grouped_triton

        return grouped_triton.multiply_columns(*x[:9], x.out)
    from . import grouped_hopper

    return grouped_hopper.multiply_columns(*x[:9], x.out)


def _grouped_wgrad_reference(x: GroupedProduct) -> Tensor:
    out_GNK = x.a.new_zeros(_shape_columns(x), dtype=x.out_dtype)
    with torch.autocast(x.a.device.type, enabled=False):
        for g, span in enumerate(_spans(x.offs, x.a.shape[1])):
            if span[0] < span[1]:
                a_NP = _dequantize_columns(x.a, x.scale_a, x.block_a, g, *span)
                b_KP = _dequantize_columns(x.b, x.scale_b, x.block_b, g, *span)
                out_GNK[g] = torch.mm(a_NP, b_KP.t().contiguous()).to(x.out_dtype)
    return out_GNK


def _dequantize_columns(
    data: Tensor, scale: Tensor, block: Block, g: int, start: int, end: int
) -> Tensor:
    """Columns of group g, in float32."""
    width, scale = block[1], scale_by_group(scale, block)
    of_group = scale[g] if width == FULL else scale[:, start // width : end // width]
    return dequantize(data[:, start:end], of_group, block, torch.float32)


def _shape_columns(x: GroupedProduct) -> tuple[int, int, int]:
    return x.offs.shape[0], x.a.shape[0], x.b.shape[0]


def _check_columns(x: GroupedProduct) -> None:
    if x.a.ndim != 2 or x.b.ndim != 2 or x.a.shape[1] != x.b.shape[1]:
        raise ValueError(
            f"shapes {tuple(x.a.shape)} and {tuple(x.b.shape)} are no column layouts of the same "
            "groups; needed (N, columns) and (K, columns)"
        )
    check_offs(x.offs)
    check_devices(x.a, x.b, x.scale_a, x.scale_b, x.offs, x.out)
    matmul.check_out(x.out, _shape_columns(x))
    _check_out(x.out_dtype, x.impl, WGRAD_IMPLEMENTATIONS)
    for data, scale, block in ((x.a, x.scale_a, x.block_a), (x.b, x.scale_b, x.block_b)):
        check_block(data.shape, block)
        _check_columns_scale(data, scale, x.offs.shape[0], block)


def _check_columns_scale(x: Tensor, scale: Tensor, groups: int, block: Block) -> None:
    lines = num_blocks(x.shape[0], block[0])
    whole = block[1] == FULL
    needed = (groups, lines) if whole else (lines, num_blocks(x.shape[1], block[1]))
    if scale.dtype not in (torch.float32, E8M0.dtype) or tuple(scale.shape) != needed:
        raise ValueError(
            f"a scale is {scale.dtype} of shape {tuple(scale.shape)}; columns of shape "
            f"{tuple(x.shape)} of {groups} groups in blocks {block_name(block)} need torch.float32 "
            f"or {E8M0.dtype} of shape {needed}"
        )


def _fake_grouped_wgrad(*arguments: Any) -> Tensor:
    x = GroupedProduct(*arguments)
    _check_columns(x)
    return x.a.new_empty(_shape_columns(x), dtype=x.out_dtype)


def grouped_wgrad_add_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs_t: Tensor,
    block_a: Block,
    block_b: Block,
    fast_accum: bool,
    impl: str,
) -> None:
    """Add to ``out`` what ``grouped_wgrad`` gives for the other arguments in ``out``'s dtype: the
    gradients of another micro-batch.

    Args:
        out: bf16, fp16 or fp32 [G, N, K], contiguous; the sum of a group without columns stays as
            it is.

    Raises:
        ValueError: ``out`` is none of this; or as ``grouped_wgrad``.
    """
    blocks = tuple(block_a), tuple(block_b)
    x = GroupedProduct(a, b, scale_a, scale_b, offs_t, *blocks, out.dtype, fast_accum, impl, out)
    _check_columns(x)
    if 0 not in (*a.shape, *b.shape):
        torch.autograd.graph.increment_version(out)  # a kernel's writing would pass unnoticed
        _run_columns(x)


def _fake_grouped_wgrad_add_(out: Tensor, *arguments: Any) -> None:
    _check_columns(GroupedProduct._make((*arguments[:7], out.dtype, *arguments[7:], out)))


# -------------------------------------------------------------------------------- high precision


def grouped_mm_hp(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """The products of ``torch._grouped_mm`` for operands of any size, with every element written.

    Args:
        a: [T, K]; with groups of columns [N, T].
        b: [G, K, N]; with groups of columns [T, K]. Of a's dtype: bf16, fp16 or fp32.
        offs: int32 [G], where each group's tokens end.

    Returns: [T, N], rows of no group zero; with groups of columns [G, N, K], empty ones zero.
        Contiguous. On a GPU torch's kernel multiplies where it takes the operands; else it is a
        product per group, which waits for the device.

    Raises:
        ValueError: shapes, offs or devices do not fit; offs' values, where it waits for them.
    """
    _check_hp(a, b, offs)
    columns = b.ndim == 2
    out = a.new_zeros(_shape_hp(a, b, offs))
    if 0 in (*a.shape, *b.shape):
        return out
    # Autocast would round the operands to its dtype first.
    with torch.autocast(a.device.type, enabled=False):
        if a.is_cuda and _torch_takes(a, b):
            by_torch = torch._grouped_mm(a, b, offs=offs)
            if not columns:
                return zero_tail(by_torch, offs)
            empty = offs == torch.cat([offs.new_zeros(1), offs[:-1]])
            return torch.where(empty[:, None, None], out, by_torch)
        for g, (start, end) in enumerate(_spans(offs, a.shape[int(columns)])):
            if columns:
                out[g] = torch.mm(a[:, start:end], b[start:end])
            else:
                out[start:end] = torch.mm(a[start:end], b[g])
    return out


def _torch_takes(a: Tensor, b: Tensor) -> bool:
    """Whether torch's kernel multiplies operands, in one launch: bf16 in rows of whole 16 bytes,
    laid out so that groups are whole rows of both, of which it then takes any number."""
    rows = a if b.ndim == 3 else a.t()
    packed = b.is_contiguous() or (b.ndim == 3 and b.mT.is_contiguous())
    aligned = all(n % 8 == 0 for n in (rows.shape[1], *b.shape[1:]))
    starts = (a.data_ptr() | b.data_ptr()) % 16 == 0
    return a.dtype == torch.bfloat16 and rows.is_contiguous() and packed and aligned and starts


def _check_hp(a: Tensor, b: Tensor, offs: Tensor) -> None:
    contracted = b.ndim == 2 and a.ndim == 2 and a.shape[1] == b.shape[0]
    if contracted:
        check_offs(offs)
    else:
        _check_groups(a, b, offs)
    check_devices(a, b, offs)


def _shape_hp(a: Tensor, b: Tensor, offs: Tensor) -> tuple[int, ...]:
    return (a.shape[0], b.shape[2]) if b.ndim == 3 else (offs.shape[0], a.shape[0], b.shape[1])


def _fake_grouped_mm_hp(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    _check_hp(a, b, offs)
    return a.new_empty(_shape_hp(a, b, offs))


for _name, _reference, _fake in (
    ("grouped_mm", grouped_mm, _fake_grouped_mm),
    ("grouped_wgrad", grouped_wgrad, _fake_grouped_wgrad),
    ("grouped_wgrad_add_", grouped_wgrad_add_, _fake_grouped_wgrad_add_),
    ("grouped_mm_hp", grouped_mm_hp, _fake_grouped_mm_hp),
):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _reference, _key)
    torch.library.register_fake(f"float8::{_name}", _fake, lib=_LIB)
