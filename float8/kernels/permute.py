"""Movement of tokens to their experts and back: ``torch.ops.float8.{route, permute,
permute_quantize, unpermute, unpermute_backward}``. The bodies below are the references and the
specification; a GPU runs Triton kernels that give the same bytes (weights' gradients apart, which
are sums in another order), where ``triton_refusal`` does not say otherwise.

Letters: T tokens, k experts for each, E experts, H features, R rows sorted by expert.

    indices   [T, k]   the experts of each token; -1 for none
    position  [T, k]   the row of each of these pairs of token and expert; -1 for none
    source    [R]      the pair t * k + j that each row holds; -1 for a row of padding
    offs      [E]      where each expert's rows end, padding included; rows from offs[E-1] on hold
                       nothing either

    permute      rows[position[t, j]] = x[t]                       all other rows zero
    unpermute    out[t] = sum over j of weights[t, j] * rows[position[t, j]]

An expert's rows are in the order of their pairs, so that equal routings give equal bits. R depends
on T * k, E and the alignment alone, so that no size waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._triton import has_triton_package

from ..devices import device_profile
from ..scaling import FULL, Block, block_name, check_scale_mode
from .launch import MAX_ROW
from .quantize import (
    HIGH_PRECISION,
    CastPlan,
    check_cast,
    check_devices,
    names,
    quantize,
    triton_refusal,
)
from .quantize_grouped import GROUP_ALIGN, empty_rows, padded_tokens

_LIB = torch.library.Library("float8", "FRAGMENT")
_LIB.define("route(Tensor indices, int experts, int align) -> (Tensor, Tensor, Tensor, Tensor)")
_LIB.define("permute(Tensor x, Tensor position, Tensor source) -> Tensor")
_LIB.define(
    "permute_quantize(Tensor x, Tensor position, Tensor source, int[] block, ScalarType dtype, "
    "str scale_mode) -> (Tensor, Tensor)"
)
_LIB.define("unpermute(Tensor y, Tensor position, Tensor? weights=None) -> Tensor")
_LIB.define(
    "unpermute_backward(Tensor grad, Tensor? y, Tensor position, Tensor source, Tensor weights) "
    "-> (Tensor, Tensor)"
)


def _has_kernels(x: Tensor) -> bool:
    """Whether Triton kernels run where x is; what is emulated there is moved by the references."""
    return device_profile(x.device).refusal("convert") is None and has_triton_package()


# ---------------------------------------------------------------------------------------- routing


def route(indices: Tensor, experts: int, align: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the rows of each expert lie when its tokens are put together.

    Args:
        indices: int64 or int32 [T, k], the experts of each token: 0 to E - 1, or -1 for none (a
            pair that was dropped, or whose expert is elsewhere).
        experts: E.
        align: every expert's rows are a multiple of it, 1 to GROUP_ALIGN; what is beyond the pairs
            is padding. 16 suits any FP8 kernel, 32 and 128 keep blocks along tokens within experts.

    Returns:
        position: int32 [T, k].
        source: int32 [R], R = ``padded_tokens(T * k, E, align)``.
        offs: int32 [E], as grouped products take it.
        counts: int32 [E], the pairs of each expert.

    Raises:
        ValueError: an argument is none of these. Only the reference looks into indices; for the
            kernels, which do not wait for their values, what is no expert is none.
    """
    _check_route(indices, experts, align)
    (tokens, k), device = indices.shape, indices.device
    if indices.numel() and not bool(((indices >= -1) & (indices < experts)).all()):
        raise ValueError(
            f"indices holds {int(indices.min())} to {int(indices.max())}; each must be an expert, "
            f"0 to {experts - 1}, or -1 for none"
        )
    pairs = tokens * k
    expert = torch.where(indices >= 0, indices, experts).reshape(pairs)  # those of none come last
    sizes = torch.bincount(expert, minlength=experts + 1)
    ends = ((sizes[:-1] + align - 1) // align * align).cumsum(0)
    # From a pair's place in the order to its row: what padding adds before its expert.
    added = torch.cat([ends.new_zeros(1), ends]) - (sizes.cumsum(0) - sizes)
    order = expert.argsort(stable=True)
    there = torch.arange(pairs, device=device) < pairs - sizes[-1]
    row = torch.arange(pairs, device=device) + added[expert[order]]
    # One row more than there are, for what goes nowhere.
    rows = padded_tokens(pairs, experts, align)
    source = indices.new_full((rows + 1,), -1, dtype=torch.int32)
    source[torch.where(there, row, rows)] = order.to(torch.int32)
    position = indices.new_empty((pairs,), dtype=torch.int32)
    position[order] = torch.where(there, row, -1).to(torch.int32)
    return (
        position.view(tokens, k),
        source[:-1].clone(),
        ends.to(torch.int32),
        sizes[:-1].to(torch.int32),
    )


def _check_route(indices: Tensor, experts: int, align: int) -> None:
    if indices.ndim != 2 or indices.dtype not in (torch.int32, torch.int64) or not indices.shape[1]:
        raise ValueError(
            f"indices is {indices.dtype} of shape {tuple(indices.shape)}; it must be torch.int64 "
            "or torch.int32 of shape (tokens, k), with the experts of each token"
        )
    if experts < 1 or not 1 <= align <= GROUP_ALIGN:
        raise ValueError(
            f"experts={experts} and align={align}; there must be at least one expert, and an "
            f"alignment of 1 to {GROUP_ALIGN} rows"
        )


def _route_gpu(indices: Tensor, experts: int, align: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _has_kernels(indices):
        return route(indices, experts, align)
    outputs = _fake_route(indices, experts, align)
    from .permute_triton import launch_route

    launch_route(indices, align, *outputs)
    return outputs


def _fake_route(indices: Tensor, experts: int, align: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_route(indices, experts, align)
    tokens, k = indices.shape
    shapes = (tokens, k), (padded_tokens(tokens * k, experts, align),), (experts,), (experts,)
    position, source, offs, counts = (indices.new_empty(s, dtype=torch.int32) for s in shapes)
    return position, source, offs, counts


# ------------------------------------------------------------------------------------- to experts


def permute(x: Tensor, position: Tensor, source: Tensor) -> Tensor:
    """The rows of every expert's tokens, one expert after another.

    Args:
        x: [T, H] bf16, fp16 or fp32, any strides.
        position, source: as ``route`` gives them. Values that it does not give make the result
            undefined, no more: kernels neither read nor write elsewhere.

    Returns: [R, H] of x's dtype, contiguous; rows of padding are zero.

    Raises:
        ValueError: an argument is none of these.
    """
    _check_permute(x, position, source)
    token = source.clamp(min=0) // position.shape[1]
    rows = x.index_select(0, token)
    return torch.where((source >= 0)[:, None], rows, rows.new_zeros(()))


def permute_quantize(
    x: Tensor,
    position: Tensor,
    source: Tensor,
    block: Block,
    dtype: torch.dtype,
    scale_mode: str,
) -> tuple[Tensor, Tensor]:
    """``quantize`` of ``permute``, which a kernel does in one pass, casting each token once: blocks
    lie within rows, so these are the bytes and scales of ``quantize(x)``, moved.

    Args:
        x, position, source: as of ``permute``.
        block, dtype, scale_mode: as ``quantize`` takes them, a block being of one row.

    Returns: data [R, H] and its scale, as ``quantize`` lays them out. Padding has data +0 and the
        scale of a zero block.

    Raises:
        ValueError: an argument is none of these.
    """
    _check_permute(x, position, source)
    _check_rowwise(x, block, dtype, scale_mode)
    return quantize(permute(x, position, source), block, dtype, scale_mode)


def _check_permute(x: Tensor, position: Tensor, source: Tensor) -> None:
    check_devices(x, position, source)
    _check_pairs(position)
    if x.ndim != 2 or x.dtype not in HIGH_PRECISION or x.shape[0] != position.shape[0]:
        raise ValueError(
            f"x is {x.dtype} of shape {tuple(x.shape)}; with the positions of {position.shape[0]} "
            f"tokens it must be one of {names(HIGH_PRECISION)} of shape ({position.shape[0]}, "
            "features)"
        )
    _check_source(source)


def _check_pairs(position: Tensor) -> None:
    if position.ndim != 2 or position.dtype != torch.int32 or not position.shape[1]:
        raise ValueError(
            f"position is {position.dtype} of shape {tuple(position.shape)}; it must be the "
            "torch.int32 of shape (tokens, k) that route gives"
        )


def _check_source(source: Tensor) -> None:
    if source.ndim != 1 or source.dtype != torch.int32:
        raise ValueError(
            f"source is {source.dtype} of shape {tuple(source.shape)}; it must be the torch.int32 "
            "of shape (rows,) that route gives"
        )


def _check_rowwise(x: Tensor, block: Block, dtype: torch.dtype, scale_mode: str) -> CastPlan:
    check_cast(x, block, dtype)
    check_scale_mode(scale_mode)
    if block[0] != 1:
        raise ValueError(
            f"block {block_name(block)} spans rows, and these change their neighbours; permute x, "
            "and quantize the result"
        )
    return CastPlan(tuple(block), dtype, scale_mode)


def _permute_gpu(x: Tensor, position: Tensor, source: Tensor) -> Tensor:
    rows = _fake_permute(x, position, source)
    if not _has_kernels(x):
        return permute(x, position, source)
    if rows.numel():
        from .permute_triton import launch_permute

        launch_permute(x, position, source, rows)
    return rows


def _permute_quantize_gpu(
    x: Tensor,
    position: Tensor,
    source: Tensor,
    block: Block,
    dtype: torch.dtype,
    scale_mode: str,
) -> tuple[Tensor, Tensor]:
    _check_permute(x, position, source)
    cast = _check_rowwise(x, block, dtype, scale_mode)
    too_long = cast.block[1] == FULL and x.shape[1] > MAX_ROW
    if too_long or triton_refusal(x, cast) is not None:
        rows = torch.ops.float8.permute(x, position, source)
        data, scale = torch.ops.float8.quantize(rows, *cast)
        return data, scale
    from .permute_triton import launch_permute

    data, scale = empty_rows(x, (source.shape[0], x.shape[1]), cast)
    launch_permute(x, position, source, data, scale, cast)
    return data, scale


def _fake_permute(x: Tensor, position: Tensor, source: Tensor) -> Tensor:
    _check_permute(x, position, source)
    return x.new_empty((source.shape[0], x.shape[1]))


def _fake_permute_quantize(
    x: Tensor,
    position: Tensor,
    source: Tensor,
    block: Block,
    dtype: torch.dtype,
    scale_mode: str,
) -> tuple[Tensor, Tensor]:
    _check_permute(x, position, source)
    shape = source.shape[0], x.shape[1]
    return empty_rows(x, shape, _check_rowwise(x, block, dtype, scale_mode))


# --------------------------------------------------------------------------------------- and back


def unpermute(y: Tensor, position: Tensor, weights: Tensor | None = None) -> Tensor:
    """The weighted sum of each token's rows: in float32, products and sums rounded one by one in
    the order of j, and the result once to y's dtype.

    Args:
        y: [R, H] bf16, fp16 or fp32, any strides.
        position: as ``route`` gives it.
        weights: [T, k] bf16, fp16 or fp32; None for ones, which makes this the gradient of
            ``permute``.

    Returns: [T, H] of y's dtype, contiguous. A pair of no row adds nothing, whatever its weight.

    Raises:
        ValueError: an argument is none of these.
    """
    _check_unpermute(y, position, weights)
    total = y.new_zeros((position.shape[0], y.shape[1]), dtype=torch.float32)
    for j in range(position.shape[1]):
        there, rows = _rows_of(y, position[:, j])
        if weights is not None:
            rows = rows * weights[:, j, None].to(torch.float32)
        total = total + torch.where(there, rows, 0.0)
    return total.to(y.dtype)


def _rows_of(y: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Where there is a row, [T, 1]; these rows in float32, any others where there is none."""
    return (position >= 0)[:, None], y.index_select(0, position.clamp(min=0)).to(torch.float32)


def unpermute_backward(
    grad: Tensor, y: Tensor | None, position: Tensor, source: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of y and of weights of ``unpermute``, given that of its result:

    gy[position[t, j]] = weights[t, j] * grad[t]          all other rows zero
    gw[t, j] = sum over features of y[position[t, j]] * grad[t]

    Args:
        grad: [T, H] bf16, fp16 or fp32, any strides.
        y: [R, H] of grad's dtype, any strides; None if gw is not wanted.
        position, source: as ``route`` gives them.
        weights: [T, k] bf16, fp16 or fp32.

    Returns:
        gy: [R, H] of grad's dtype, contiguous; multiplied in float32 and rounded once.
        gw: float32 [T, k], summed in float32; 0 for a pair of no row. Empty without y.

    Raises:
        ValueError: an argument is none of these.
    """
    _check_unpermute_backward(grad, y, position, source, weights)
    pair = source.clamp(min=0)
    rows = grad.index_select(0, pair // position.shape[1]).to(torch.float32)
    rows = rows * weights.reshape(-1).index_select(0, pair)[:, None].to(torch.float32)
    gy = torch.where((source >= 0)[:, None], rows, 0.0).to(grad.dtype)
    if y is None:
        return gy, _no_weights(grad)
    gw = grad.new_empty(position.shape, dtype=torch.float32)
    for j in range(position.shape[1]):
        there, rows = _rows_of(y, position[:, j])
        gw[:, j] = (torch.where(there, rows, 0.0) * grad.to(torch.float32)).sum(1)
    return gy, gw


def _no_weights(grad: Tensor) -> Tensor:
    return grad.new_empty(0, dtype=torch.float32)


def _check_unpermute(y: Tensor, position: Tensor, weights: Tensor | None) -> None:
    check_devices(y, position, weights)
    _check_pairs(position)
    if y.ndim != 2 or y.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"y is {y.dtype} of shape {tuple(y.shape)}; it must be one of {names(HIGH_PRECISION)} "
            "of shape (rows, features), sorted by expert"
        )
    if weights is not None:
        _check_weights(weights, position)


def _check_weights(weights: Tensor, position: Tensor) -> None:
    if weights.shape != position.shape or weights.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"weights is {weights.dtype} of shape {tuple(weights.shape)}; it must be one of "
            f"{names(HIGH_PRECISION)}, one for each of the pairs {tuple(position.shape)}"
        )


def _check_unpermute_backward(
    grad: Tensor, y: Tensor | None, position: Tensor, source: Tensor, weights: Tensor
) -> None:
    check_devices(grad, weights, y)
    _check_permute(grad, position, source)
    _check_weights(weights, position)
    shape = (source.shape[0], grad.shape[1])
    if y is not None and (y.dtype != grad.dtype or tuple(y.shape) != shape):
        raise ValueError(
            f"y is {y.dtype} of shape {tuple(y.shape)}; it must be {grad.dtype} of shape {shape}, "
            "as what unpermute was given"
        )


def _unpermute_gpu(y: Tensor, position: Tensor, weights: Tensor | None = None) -> Tensor:
    out = _fake_unpermute(y, position, weights)
    if not _has_kernels(y):
        return unpermute(y, position, weights)
    if out.numel():
        from .permute_triton import launch_unpermute

        launch_unpermute(y, position, weights, out)
    return out


def _unpermute_backward_gpu(
    grad: Tensor, y: Tensor | None, position: Tensor, source: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    gy, gw = _fake_unpermute_backward(grad, y, position, source, weights)
    if not _has_kernels(grad) or 0 in (*gy.shape, *position.shape):
        return unpermute_backward(grad, y, position, source, weights)
    from .permute_triton import launch_unpermute_backward

    launch_unpermute_backward(grad, y, position, source, weights, gy, gw)
    return gy, gw


def _fake_unpermute(y: Tensor, position: Tensor, weights: Tensor | None = None) -> Tensor:
    _check_unpermute(y, position, weights)
    return y.new_empty((position.shape[0], y.shape[1]))


def _fake_unpermute_backward(
    grad: Tensor, y: Tensor | None, position: Tensor, source: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    _check_unpermute_backward(grad, y, position, source, weights)
    gy = grad.new_empty((source.shape[0], grad.shape[1]))
    if y is None:
        return gy, _no_weights(grad)
    return gy, grad.new_empty(position.shape, dtype=torch.float32)


for _name, _reference, _gpu, _fake in (
    ("route", route, _route_gpu, _fake_route),
    ("permute", permute, _permute_gpu, _fake_permute),
    ("permute_quantize", permute_quantize, _permute_quantize_gpu, _fake_permute_quantize),
    ("unpermute", unpermute, _unpermute_gpu, _fake_unpermute),
    ("unpermute_backward", unpermute_backward, _unpermute_backward_gpu, _fake_unpermute_backward),
):
    _LIB.impl(_name, _reference, "CPU")
    _LIB.impl(_name, _gpu, "CUDA")
    torch.library.register_fake(f"float8::{_name}", _fake, lib=_LIB)
