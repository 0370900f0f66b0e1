"""Structure ops: what is done to the data is done to the scale.

One rule per op, read off the block shape of the dimension it touches: in a dimension of block 1 the scale moves like the
data, in a FULL one it stays, in one of size b it moves in steps of b. An op that would split a block is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..scaling import FULL, Block, block_name, num_blocks, scale_shape
from ..tensor import Float8TrainingTensor
from .table import implements

aten = torch.ops.aten


def refuse(op: torch._ops.OpOverload, x: Float8TrainingTensor, why: str) -> NoReturn:
    raise NotImplementedError(
        f"{op} on a Float8TrainingTensor of shape {tuple(x.shape)} and block {block_name(x.block)}: {why}. "
        "Call .dequantize() first, or quantise the result instead."
    )


@implements(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def alias(op: torch._ops.OpOverload, x: Float8TrainingTensor) -> Float8TrainingTensor:
    return x.replace(qdata=op(x.qdata), scale=op(x.scale))


@implements(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(op: torch._ops.OpOverload, x: Float8TrainingTensor, size: Sequence[int]) -> Float8TrainingTensor:
    qdata = op(x.qdata, size)
    if tuple(qdata.shape) == tuple(x.shape):
        return x.replace(qdata=qdata)
    block: Block = ()
    for old, new in _runs(tuple(x.shape), tuple(qdata.shape)):
        sizes, blocks = [x.shape[d] for d in old], [x.block[d] for d in old]
        new_sizes = [qdata.shape[d] for d in new]
        if sizes == new_sizes:
            block += tuple(blocks)
            continue
        merged = _merge(sizes, blocks)
        split = None if merged is None else _split(new_sizes, merged)
        if split is None:
            refuse(op, x, f"seen as {tuple(qdata.shape)}, a scale block would be split")
        block += tuple(split)
    scale = x.scale.reshape(scale_shape(qdata.shape, block))
    return x.replace(qdata=qdata, scale=scale, block=block)


def _runs(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Pair up the shortest runs of dimensions of old and new with equal products."""
    if 0 in old:  # products say nothing: pair equal dimensions from the right, the rest is one run
        tail = 0
        while tail < min(len(old), len(new)) and old[-1 - tail] == new[-1 - tail]:
            tail += 1
        head = [(list(range(len(old) - tail)), list(range(len(new) - tail)))]
        return head + [([len(old) - t], [len(new) - t]) for t in range(tail, 0, -1)]
    runs, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        first_i, first_j = i, j
        size_i = size_j = 1
        if i < len(old):
            size_i, i = old[i], i + 1
        if j < len(new):
            size_j, j = new[j], j + 1
        while size_i != size_j:
            if size_i < size_j:
                size_i, i = size_i * old[i], i + 1
            else:
                size_j, j = size_j * new[j], j + 1
        runs.append((list(range(first_i, i)), list(range(first_j, j))))
    return runs


def _merge(sizes: list[int], block: list[int]) -> int | None:
    """Block of the one dimension that ``sizes`` flatten to, or None if its blocks would not be contiguous: outer
    dimensions of single rows, then one of any block, then whole ones."""
    whole = [b == FULL or b >= n > 0 for n, b in zip(sizes, block, strict=True)]
    if all(whole):
        return FULL
    at = max(d for d, w in enumerate(whole) if not w)
    outer = [b for n, b in zip(sizes[:at], block[:at], strict=True) if n != 1]
    if any(b != 1 for b in outer) or (outer and sizes[at] % block[at] != 0):
        return None
    return block[at] * math.prod(max(n, 1) for n in sizes[at + 1 :])


def _split(sizes: list[int], block: int) -> list[int] | None:
    """Blocks of ``sizes``, into which one dimension of blocks of ``block`` is split, or None if a block would be cut:
    the reverse of _merge."""
    if block == FULL:
        return [FULL] * len(sizes)
    blocks: list[int] = []
    for d in range(len(sizes) - 1, -1, -1):
        n = sizes[d]
        if block == 1 or d == 0 or n % block == 0:
            blocks.append(block)
            block = 1
        elif block % n == 0:
            blocks.append(FULL)
            block //= n
        else:
            return None
    return blocks[::-1]


@implements(aten.t.default, aten.transpose.int, aten.permute.default)
def permute(op: torch._ops.OpOverload, x: Float8TrainingTensor, *dims: Any) -> Float8TrainingTensor:
    order = list(range(x.ndim))
    if op is aten.permute.default:
        order = [d % x.ndim for d in dims[0]]
    elif x.ndim >= 2:
        first, second = dims if dims else (0, 1)
        order[first], order[second] = order[second], order[first]
    return x.replace(qdata=op(x.qdata, *dims), scale=op(x.scale, *dims), block=tuple(x.block[d] for d in order))


@implements(aten.slice.Tensor)
def slice_(
    op: torch._ops.OpOverload,
    x: Float8TrainingTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Float8TrainingTensor:
    dim, n = dim % x.ndim, x.shape[dim]
    b = x.block[dim]
    qdata = op(x.qdata, dim, start, end, step)
    if b == FULL or qdata.shape[dim] == n:
        return x.replace(qdata=qdata)
    if b == 1:
        return x.replace(qdata=qdata, scale=op(x.scale, dim, start, end, step))
    start, end, _ = slice(start, end).indices(n)
    if step != 1 or start % b != 0 or (end % b != 0 and end != n):
        refuse(op, x, f"rows {start}:{end}:{step} of dimension {dim} would split blocks of {b}")
    return x.replace(qdata=qdata, scale=op(x.scale, dim, start // b, num_blocks(end, b)))


@implements(aten.select.int)
def select(op: torch._ops.OpOverload, x: Float8TrainingTensor, dim: int, index: int) -> Float8TrainingTensor:
    dim, b = dim % x.ndim, x.block[dim]
    qdata = op(x.qdata, dim, index)  # checks the index
    position = index % x.shape[dim]
    scale = op(x.scale, dim, 0 if b == FULL else position // b)
    return x.replace(qdata=qdata, scale=scale, block=x.block[:dim] + x.block[dim + 1 :])


@implements(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
def split(
    op: torch._ops.OpOverload, x: Float8TrainingTensor, sizes: int | Sequence[int] = 0, dim: int = 0
) -> list[Float8TrainingTensor]:
    if op is aten.unbind.int:
        dim = int(sizes)  # type: ignore[arg-type]
        return [select(aten.select.int, x, dim, i) for i in range(x.shape[dim])]
    n = x.shape[dim]
    if isinstance(sizes, int | torch.SymInt):
        sizes = [min(sizes, n - start) for start in range(0, n, sizes)] or [0]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [slice_(aten.slice.Tensor, x, dim, a, a + size) for a, size in zip(starts, sizes, strict=True)]


@implements(aten.cat.default)
def cat(op: torch._ops.OpOverload, tensors: Sequence[Tensor], dim: int = 0) -> Float8TrainingTensor:
    first = next(t for t in tensors if isinstance(t, Float8TrainingTensor))
    dim, b = dim % first.ndim, first.block[dim]
    parts = [t for t in tensors if isinstance(t, Float8TrainingTensor)]
    kinds = {(t.qdata.dtype, t.scale.dtype, t.block, t.orig_dtype) for t in parts}
    if len(parts) < len(tensors) or len(kinds) > 1:
        refuse(op, first, "its parts differ in format, block, scale dtype or orig_dtype, or one is high precision")
    qdata = op([t.qdata for t in parts], dim)
    if b == FULL:
        if any(t.scale is not first.scale for t in parts):
            refuse(op, first, f"dimension {dim} is one block, but the parts do not share one scale tensor")
        return first.replace(qdata=qdata)
    if any(t.shape[dim] % b != 0 for t in parts[:-1]):
        refuse(op, first, f"a part before the last is not a multiple of {b} along dimension {dim}")
    return first.replace(qdata=qdata, scale=op([t.scale for t in parts], dim))


@implements(aten.stack.default)
def stack(op: torch._ops.OpOverload, tensors: Sequence[Tensor], dim: int = 0) -> Float8TrainingTensor:
    return cat(aten.cat.default, [aten.unsqueeze.default(t, dim) for t in tensors], dim)


@implements(aten.unsqueeze.default)
def unsqueeze(op: torch._ops.OpOverload, x: Float8TrainingTensor, dim: int) -> Float8TrainingTensor:
    at = dim % (x.ndim + 1)
    return x.replace(qdata=op(x.qdata, dim), scale=op(x.scale, dim), block=(*x.block[:at], 1, *x.block[at:]))


@implements(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(op: torch._ops.OpOverload, x: Float8TrainingTensor, dim: Any = None) -> Float8TrainingTensor:
    asked = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    dims = [d % x.ndim for d in asked if x.shape[d] == 1]
    block = tuple(b for d, b in enumerate(x.block) if d not in dims)
    return x.replace(qdata=op(x.qdata, *(() if dim is None else (dim,))), scale=x.scale.squeeze(dims), block=block)


@implements(aten.expand.default)
def expand(
    op: torch._ops.OpOverload, x: Float8TrainingTensor, size: Sequence[int], *, implicit: bool = False
) -> Float8TrainingTensor:
    qdata = op(x.qdata, size)
    new = qdata.ndim - x.ndim
    block = (1,) * new + tuple(
        FULL if n != wide and b != 1 else b for n, wide, b in zip(x.shape, qdata.shape[new:], x.block, strict=True)
    )
    return x.replace(qdata=qdata, scale=op(x.scale, scale_shape(qdata.shape, block)), block=block)


@implements(aten.index_select.default)
def index_select(
    op: torch._ops.OpOverload, x: Float8TrainingTensor, dim: int, index: Tensor
) -> Float8TrainingTensor:
    b = x.block[dim]
    if b not in (1, FULL):
        refuse(op, x, f"picked rows of dimension {dim} would leave their blocks of {b}")
    qdata = op(x.qdata.view(torch.uint8), dim, index).view(x.qdata.dtype)
    if b == FULL:
        return x.replace(qdata=qdata)
    as_bytes = x.scale.view(torch.uint8) if x.scale.dtype.itemsize == 1 else x.scale
    return x.replace(qdata=qdata, scale=op(as_bytes, dim, index).view(x.scale.dtype))


@implements(aten.as_strided.default)
def as_strided(
    op: torch._ops.OpOverload,
    x: Float8TrainingTensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Float8TrainingTensor:
    same = tuple(size) == tuple(x.shape) and tuple(stride) == tuple(x.stride())
    if not same or storage_offset not in (None, x.qdata.storage_offset()):
        refuse(op, x, f"size {tuple(size)} and stride {tuple(stride)} say nothing about where the scales go")
    return alias(aten.alias.default, x)
