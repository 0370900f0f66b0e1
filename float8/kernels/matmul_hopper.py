"""The FP8 matrix product for Hopper (sm_90): the kernel behind ``impl="hopper"`` of
``float8.kernels.matmul``.

Shape letters: M rows of a, N rows of b, K the contraction. Both operands are row-major, so that K
    is contiguous, as quantised activations and weights are for a forward product.

    out_MN = sum over k of (a_MK * scale_a) (b_NK * scale_b), rounded once to out_dtype

The reference is ``scaled_mm_torch`` of ``float8.kernels.matmul``. Hopper's tensor cores add up FP8
    products in less than float32 (about 14 bits of the largest term), so that their sums are moved
    to float32 every 128 of K, where block scales meet them too. ``fast_accum`` leaves the whole sum
    to the tensor cores.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Literal

import torch
from torch import Tensor

from ..formats import format_of
from ..scaling import FULL, Block, scale_shape
from .quantize import HIGH_PRECISION

Mode = Literal["tensorwise", "rowwise", "block", "block_t", "block2"]

# Blocks of a [M, K] and of b [N, K].
BLOCKS: dict[Mode, tuple[Block, Block]] = {
    "tensorwise": ((FULL, FULL), (FULL, FULL)),
    "rowwise": ((1, FULL), (1, FULL)),
    "block": ((1, 128), (128, 128)),
    "block_t": ((128, 128), (1, 128)),
    "block2": ((1, 128), (1, 128)),
}
_KINDS = {1: "vector", 128: "square"}  # of scales of blocks of so many rows and 128 of K
_LARGEST = 2**30  # coordinates are 32-bit, and tiles reach beyond the last row


@functools.cache
def refusal() -> str | None:
    """Why this installation of Triton cannot compile the kernel, None if it can."""
    try:
        from . import matmul_hopper_triton as device
    except (ImportError, AttributeError) as error:
        return f"Triton does not have Gluon as the Hopper kernel uses it ({error})"
    # What device code asks of a module it asks for when it is compiled, which is not now.
    used = set(re.findall(r"\b(gl|mbarrier|tma)\.(\w+)", inspect.getsource(device)))
    absent = [f"{of}.{name}" for of, name in sorted(used) if not hasattr(getattr(device, of), name)]
    return f"Triton's Gluon does not have {', '.join(absent)}" if absent else None


def fits(a_MK: Tensor, b_NK: Tensor) -> str | None:
    """Why the kernel does not take the operands as they lie in memory, None if it does: FP8 of the
    FN flavour, contiguous rows, each on 16 bytes (TMA's rule). Any number of rows does."""
    for name, x in (("first", a_MK), ("second", b_NK)):
        fmt, (rows, k) = format_of(x.dtype), x.shape
        if fmt.flavour != "fn" or fmt.kind == "e8m0":
            return f"the {name} operand is {fmt}; Hopper multiplies e4m3fn and e5m2"
        if not (0 < rows <= _LARGEST and 0 < k <= _LARGEST):
            return f"the {name} operand is {rows} x {k}; the Hopper kernel takes 1 to {_LARGEST}"
        row, step = x.stride()
        if (k > 1 and step != 1) or (rows > 1 and (row % 16 or row < k)) or x.data_ptr() % 16:
            return (
                f"the {name} operand has strides {row, step} and begins {x.data_ptr() % 16} bytes "
                "after a multiple of 16; the Hopper kernel reads contiguous rows, each on 16 bytes"
            )
    return None


def kinds(block_a: Block, block_b: Block) -> tuple[str, str]:
    """How the scales of two operands lie (``Config``), given their blocks (rows, K)."""
    if block_a[1] == FULL:
        return "outer", "outer"
    return _KINDS[block_a[0]], _KINDS[block_b[0]]


def scaled_mm_hopper(
    a_MK: Tensor,
    b_NK: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    mode: Mode,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``(a_MK * scale_a) @ (b_NK * scale_b).T`` (module docstring), on a GPU of sm_90.

    Args:
        a_MK, b_NK: FP8 operands that ``fits`` does not refuse, e4m3 and e5m2 in any pair.
        scale_a, scale_b: float32, ``scale_shape`` of a_MK and b_NK under BLOCKS[mode], any strides;
            none is copied that has the strides of ``scale_layout`` and, in blocks of 1x128, rows
            in a multiple of 4. In "rowwise" one of them may be a single scale, of shape [1, 1].
        out_dtype: bf16, fp16 or fp32.
        fast_accum: see the module's docstring; block modes do without.
        bias: [N], contiguous, bf16, fp16 or fp32, added before rounding.
        out: [M, N] ``out_dtype`` with contiguous rows, to which the rounded product is added.
            In float32 the memory adds: values below 2^-126 become zero.

    Returns: ``out``, or a new contiguous [M, N].
    """
    (m, k), n = a_MK.shape, b_NK.shape[0]
    block_a, block_b = BLOCKS[mode]
    assert fits(a_MK, b_NK) is None and b_NK.shape[1] == k, (a_MK.shape, b_NK.shape)
    for scale, rows, block in ((scale_a, m, block_a), (scale_b, n, block_b)):
        single = block[1] == FULL and scale.shape == (1, 1)
        assert single or scale.shape == scale_shape((rows, k), block), (scale.shape, mode)
        assert scale.dtype == torch.float32, scale.dtype
    assert bias is None or (bias.shape == (n,) and bias.is_contiguous()), bias.shape
    assert out_dtype in HIGH_PRECISION, out_dtype
    accumulate = out is not None
    if out is None:
        out = a_MK.new_empty((m, n), dtype=out_dtype)
    assert out.shape == (m, n) and out.dtype == out_dtype, (out.shape, out.dtype)
    assert n == 1 or out.stride(1) == 1, out.stride()

    from .matmul_hopper_triton import multiply

    scales = kinds(block_a, block_b)
    multiply(a_MK, b_NK, scale_a, scale_b, scales, fast_accum, bias, out, accumulate)
    return out
