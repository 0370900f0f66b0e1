"""Structure ops: what is done to the data is done to the scale.

One rule per op, read off the block shape of the dimension it touches: in a dimension of block 1 the
scale moves like the data, in a FULL one it stays, in one of size b it moves in steps of b. An op
that would split a block is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..scaling import FULL, Block, as_bytes, block_name, num_blocks, scale_shape
from ..tensor import Float8TrainingTensor
from .table import Op, implements

aten = torch.ops.aten


def refuse(op: Op, x: Float8TrainingTensor, why: str) -> NoReturn:
    raise NotImplementedError(
        f"{op} on a Float8TrainingTensor of shape {tuple(x.shape)} and block "
        f"{block_name(x.block)}: {why}. Call .dequantize() first, or give the op another handler "
        "with float8.implements."
    )


def shares_memory(a: Tensor, b: Tensor) -> bool:
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]


@implements(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def alias(op: Op, x: Float8TrainingTensor) -> Float8TrainingTensor:
    return x.replace(qdata=op(x.qdata), scale=op(x.scale))


@implements(aten.view.default, aten._unsafe_view.default)
def view(op: Op, x: Float8TrainingTensor, size: Sequence[int]) -> Float8TrainingTensor:
    qdata = op(x.qdata, size)
    if tuple(qdata.shape) == tuple(x.shape):
        return x.replace(qdata=qdata)
    block = _view_block(x, tuple(qdata.shape))
    scales = () if block is None else scale_shape(qdata.shape, block)
    # The number of blocks can differ where there is no element: FULL counts as one, a size as none.
    if block is None or math.prod(scales) != x.scale.numel():
        refuse(op, x, f"seen as {tuple(qdata.shape)}, a scale block would be split")
    return x.replace(qdata=qdata, scale=x.scale.reshape(scales), block=block)


def _view_block(x: Float8TrainingTensor, shape: tuple[int, ...]) -> Block | None:
    block: Block = ()
    for old, new in _runs(tuple(x.shape), shape):
        sizes, blocks = [x.shape[d] for d in old], [x.block[d] for d in old]
        new_sizes = [shape[d] for d in new]
        if sizes != new_sizes:
            merged = _merge(sizes, blocks)
            split = None if merged is None else _split(new_sizes, merged)
            if split is None:
                return None
            blocks = split
        block += tuple(blocks)
    return block


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
    """Block of the one dimension that ``sizes`` flatten to, or None if its blocks would not be
    contiguous: outer dimensions of single rows, then one of any block, then whole ones."""
    whole = [b == FULL or b >= n > 0 for n, b in zip(sizes, block, strict=True)]
    if all(whole):
        return FULL
    at = max(d for d, w in enumerate(whole) if not w)
    outer = [b for n, b in zip(sizes[:at], block[:at], strict=True) if n != 1]
    if any(b != 1 for b in outer) or (outer and sizes[at] % block[at] != 0):
        return None
    return block[at] * math.prod(max(n, 1) for n in sizes[at + 1 :])


def _split(sizes: list[int], block: int) -> list[int] | None:
    """Blocks of ``sizes``, into which one dimension of blocks of ``block`` is split, or None if a
    block would be cut: the reverse of _merge."""
    if block == FULL:
        return [FULL] * len(sizes)
    blocks: list[int] = []
    for d in range(len(sizes) - 1, -1, -1):
        n = sizes[d]
        if block == 1 or n % block == 0 or all(outer == 1 for outer in sizes[:d]):
            blocks.append(block)
            block = 1
        elif block % n == 0:
            blocks.append(FULL)
            block //= n
        else:
            return None
    return blocks[::-1]


@implements(aten.t.default, aten.transpose.int, aten.permute.default)
def permute(op: Op, x: Float8TrainingTensor, *dims: Any) -> Float8TrainingTensor:
    order = list(range(x.ndim))
    if op is aten.permute.default:
        order = [d % x.ndim for d in dims[0]]
    elif x.ndim >= 2:
        first, second = dims if dims else (0, 1)
        order[first], order[second] = order[second], order[first]
    block = tuple(x.block[d] for d in order)
    return x.replace(qdata=op(x.qdata, *dims), scale=op(x.scale, *dims), block=block)


def _cut(op: Op, x: Float8TrainingTensor, dim: int, start: int, end: int, step: int = 1) -> Tensor:
    """Scale of the rows start:end:step of dimension dim; 0 <= start and end <= the dimension."""
    n, b = x.shape[dim], x.block[dim]
    if b == FULL or (start == 0 and end == n and step == 1):
        return x.scale
    if start >= end:
        at = 0, 0, 1
    elif b == 1:
        at = start, end, step
    elif b >= n:  # one block
        at = 0, 1, 1
    elif step == 1 and start % b == 0 and (end % b == 0 or end == n):
        at = start // b, num_blocks(end, b), 1
    else:
        refuse(op, x, f"rows {start}:{end}:{step} of dimension {dim} would split blocks of {b}")
    return aten.slice.Tensor(x.scale, dim, *at)  # type: ignore[no-any-return]


@implements(aten.slice.Tensor)
def slice_(
    op: Op,
    x: Float8TrainingTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Float8TrainingTensor:
    qdata = op(x.qdata, dim, start, end, step)  # checks dim and step
    dim, n = dim % x.ndim, x.shape[dim]
    # As slice.indices(n), which would turn a symbolic n into a number.
    first, last = (
        default if i is None else min(max(i + n if i < 0 else i, 0), n)
        for i, default in ((start, 0), (end, n))
    )
    return x.replace(qdata=qdata, scale=_cut(op, x, dim, first, last, step))


@implements(aten.select.int)
def select(op: Op, x: Float8TrainingTensor, dim: int, index: int) -> Float8TrainingTensor:
    qdata = op(x.qdata, dim, index)  # checks dim and index
    dim %= x.ndim
    b = x.block[dim]
    scale = op(x.scale, dim, 0 if b == FULL else index % x.shape[dim] // b)
    return x.replace(qdata=qdata, scale=scale, block=x.block[:dim] + x.block[dim + 1 :])


@implements(aten.unbind.int)
def unbind(op: Op, x: Float8TrainingTensor, dim: int = 0) -> list[Float8TrainingTensor]:
    return [select(aten.select.int, x, dim, i) for i in range(x.shape[dim])]


@implements(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
def split(
    op: Op, x: Float8TrainingTensor, sizes: int | Sequence[int], dim: int = 0
) -> list[Float8TrainingTensor]:
    parts: list[Float8TrainingTensor] = []
    start = 0
    for qdata in op(x.qdata, sizes, dim):
        end = start + qdata.shape[dim]
        parts.append(x.replace(qdata=qdata, scale=_cut(op, x, dim % x.ndim, start, end)))
        start = end
    return parts


@implements(aten.cat.default)
def cat(op: Op, tensors: Sequence[Tensor], dim: int = 0) -> Float8TrainingTensor:
    parts = [t for t in tensors if isinstance(t, Float8TrainingTensor)]
    first = parts[0]
    kinds = {(t.qdata.dtype, t.scale.dtype, t.block, t.orig_dtype) for t in parts}
    if len(parts) < len(tensors) or len(kinds) > 1:
        why = "its parts differ in format, block, scale dtype or orig_dtype"
        refuse(op, first, f"{why}, or one is high precision")
    qdata = op([as_bytes(t.qdata) for t in parts], dim).view(first.qdata.dtype)  # checks dim
    b = first.block[dim]
    if b == FULL or b >= qdata.shape[dim]:  # one block
        if all(_same_memory(t.scale, first.scale) for t in parts):
            return first.replace(qdata=qdata, scale=first.scale.clone())
        if b == FULL:
            refuse(op, first, f"dimension {dim} is one block, but its parts do not share one scale")
    if any(t.shape[dim] % b != 0 for t in parts[:-1]):
        refuse(op, first, f"a part before the last is no multiple of {b} along dimension {dim}")
    scale = op([as_bytes(t.scale) for t in parts], dim).view(first.scale.dtype)
    return first.replace(qdata=qdata, scale=scale)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two scales are the same elements, as those of a split tensor's parts are."""
    place_a, place_b = ((t.shape, t.stride(), t.storage_offset()) for t in (a, b))
    return a is b or (place_a == place_b and shares_memory(a, b))


@implements(aten.stack.default)
def stack(op: Op, tensors: Sequence[Tensor], dim: int = 0) -> Float8TrainingTensor:
    return cat(aten.cat.default, [aten.unsqueeze.default(t, dim) for t in tensors], dim)


@implements(aten.unsqueeze.default)
def unsqueeze(op: Op, x: Float8TrainingTensor, dim: int) -> Float8TrainingTensor:
    at = dim % (x.ndim + 1)
    block = (*x.block[:at], 1, *x.block[at:])
    return x.replace(qdata=op(x.qdata, dim), scale=op(x.scale, dim), block=block)


@implements(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(op: Op, x: Float8TrainingTensor, *dim: Any) -> Float8TrainingTensor:
    qdata = op(x.qdata, *dim)
    asked = range(x.ndim) if not dim else [dim[0]] if op is aten.squeeze.dim else dim[0]
    gone = {d % x.ndim for d in asked if x.ndim and x.shape[d] == 1}
    block = tuple(b for d, b in enumerate(x.block) if d not in gone)
    return x.replace(qdata=qdata, scale=x.scale.squeeze(tuple(gone)), block=block)


@implements(aten.expand.default)
def expand(
    op: Op, x: Float8TrainingTensor, size: Sequence[int], *, implicit: bool = False
) -> Float8TrainingTensor:
    qdata = op(x.qdata, size)
    new = qdata.ndim - x.ndim
    kept = zip(x.shape, qdata.shape[new:], x.block, strict=True)
    block = (1,) * new + tuple(FULL if n != wide and b != 1 else b for n, wide, b in kept)
    scale = op(x.scale, scale_shape(qdata.shape, block))
    return x.replace(qdata=qdata, scale=scale, block=block)


@implements(aten.index_select.default)
def index_select(op: Op, x: Float8TrainingTensor, dim: int, index: Tensor) -> Float8TrainingTensor:
    b = x.block[dim]
    if b not in (1, FULL):
        refuse(op, x, f"picked rows of dimension {dim} would leave their blocks of {b}")
    qdata = op(as_bytes(x.qdata), dim, index).view(x.qdata.dtype)
    if b == FULL:
        return x.replace(qdata=qdata, scale=x.scale.clone())
    scale = op(as_bytes(x.scale), dim, index).view(x.scale.dtype)
    return x.replace(qdata=qdata, scale=scale)


@implements(aten.index.Tensor)
def index(op: Op, x: Float8TrainingTensor, indices: Sequence[Tensor | None]) -> Tensor:
    """``x[rows]``: one tensor of positions, in any dimension."""
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    dim, rows = given[0]
    if len(given) > 1 or rows.dtype in (torch.bool, torch.uint8):
        refuse(op, x, "only one tensor of positions can be followed, no mask and no second one")
    rows = torch.where(rows < 0, rows + x.shape[dim], rows).to(x.device)
    picked = index_select(aten.index_select.default, x, dim, rows.flatten())
    return view(aten.view.default, picked, (*x.shape[:dim], *rows.shape, *x.shape[dim + 1 :]))


@implements(aten.as_strided.default)
def as_strided(
    op: Op,
    x: Float8TrainingTensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Float8TrainingTensor:
    same = tuple(size) == tuple(x.shape) and tuple(stride) == tuple(x.stride())
    if not same or storage_offset not in (None, x.storage_offset()):
        why = f"size {tuple(size)} and stride {tuple(stride)} do not say where the scales go"
        refuse(op, x, why)
    return alias(aten.alias.default, x)
