"""High precision to FP8 and back, for any block shape on any rank: ``torch.ops.float8.{quantize,
quantize_dual, quantize_and_measure, quantize_static, dequantize}``. The bodies below are the
reference and the specification; no gradient flows through these ops (``float8.quantize`` and
``Float8TrainingTensor.dequantize`` carry it). On a GPU, all but ``dequantize`` run Triton kernels
that give the same bytes, where ``triton_refusal`` does not say otherwise.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._triton import has_triton_package

from ..devices import DeviceProfile, device_profile
from ..formats import E8M0, format_of
from ..scaling import (
    FULL,
    Block,
    block_amax,
    block_name,
    broadcast_scale,
    check_block,
    check_scale_mode,
    decode_scale,
    encode_e8m0,
    mode_like,
    scale_dtype,
    scale_from_amax,
    scale_layout,
    scale_shape,
)

HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)
_LOWEST_GIVEN_SCALE = 2.0**-127  # the lowest of E8M0; below 2^-128 the reciprocal is infinite


class CastPlan(NamedTuple):
    """How an operand is quantised on a device: the arguments of ``quantize`` after x."""

    block: Block
    dtype: torch.dtype
    scale_mode: str


_LIB = torch.library.Library("float8", "FRAGMENT")
_LIB.define(
    "quantize(Tensor x, int[] block, ScalarType dtype, str scale_mode, Tensor? amax=None) -> "
    "(Tensor, Tensor)"
)
_LIB.define(
    "quantize_dual(Tensor x, int[] block, ScalarType dtype, str scale_mode, int[] block_t, "
    "ScalarType dtype_t, str scale_mode_t, Tensor? amax=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIB.define(
    "quantize_and_measure(Tensor x, int[] block, ScalarType dtype, str scale_mode, int[] block_t) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIB.define(
    "quantize_static(Tensor x, Tensor scale, int[] block, ScalarType dtype) -> (Tensor, Tensor)"
)
_LIB.define("dequantize(Tensor data, Tensor scale, int[] block, ScalarType dtype) -> Tensor")


def quantize(
    x: Tensor, block: Block, dtype: torch.dtype, scale_mode: str, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """FP8 data and scale of ``x`` with scales taken from the data (formulas: ``float8.scaling``).

    Args:
        x: bf16, fp16 or fp32, any shape and strides.
        block: one entry per dimension, a size or ``FULL``.
        dtype: an FP8 dtype.
        scale_mode: one of ``float8.scaling.SCALE_MODES``.
        amax: max |x|, where it is known already, which spares a pass over x: float32 of the scale's
            shape, for a tensorwise or rowwise cast; not negative; NaN or Inf where x holds one.
            Values beyond it saturate.

    Returns:
        data: ``dtype``, shape of ``x``, contiguous.
        scale: float32 (E8M0 for the ``e8m0_*`` modes), ``scale_shape(x.shape, block)``, in
            ``scale_layout``. A block that is all zero has data +0 and the smallest scale; one that
            holds NaN or Inf has data +0 and scale NaN.

    Raises:
        ValueError: an argument is none of these.
    """
    check_cast(x, block, dtype)
    check_scale_mode(scale_mode)
    check_amax(x, amax, block)
    amax = block_amax(x, block) if amax is None else amax.abs()
    scale, live = scale_from_amax(amax, format_of(dtype), scale_mode)
    data = _cast(x, scale, live, block, dtype)
    return data, scale_layout(encode_e8m0(scale) if scale_mode.startswith("e8m0") else scale, block)


def quantize_dual(
    x: Tensor,
    block: Block,
    dtype: torch.dtype,
    scale_mode: str,
    block_t: Block,
    dtype_t: torch.dtype,
    scale_mode_t: str,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``quantize`` of x and of its transpose (the last two dimensions swapped), which a kernel does
    in fewer passes; ``amax`` is for both, which then are tensorwise.

    Returns: (data, scale) of x and (data, scale) of the transpose, both contiguous in their own
        shapes.
    """
    check_dual_amax(x, amax, block, block_t)
    transposed = quantize(x.transpose(-2, -1), block_t, dtype_t, scale_mode_t, amax)
    return (*quantize(x, block, dtype, scale_mode, amax), *transposed)


def quantize_and_measure(
    x: Tensor, block: Block, dtype: torch.dtype, scale_mode: str, block_t: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """``quantize`` of x now, and what spares a later ``quantize`` of its transpose a pass over x.

    Args:
        block_t: of the later cast, tensorwise or rowwise.

    Returns: data, scale, and the ``amax`` of the later cast: float32,
        ``scale_shape(x.transpose(-2, -1).shape, block_t)``.

    Raises:
        ValueError: as ``quantize``; or block_t is of neither kind.
    """
    x_t = x.transpose(-2, -1)
    _check_measured(x_t.shape, block_t)
    return *quantize(x, block, dtype, scale_mode), block_amax(x_t, block_t)


def can_measure(x: Tensor, cast: CastPlan, cast_t: CastPlan) -> bool:
    """Whether ``quantize_and_measure`` spares the second of two casts a pass: both must know whole
    rows, or all of x, first, and x must lie in rows, of which one pass takes both amaxes."""
    return _whole(cast.block) and _whole(cast_t.block) and x.stride(-1) == 1


def quantize_static(
    x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """FP8 data of ``x`` under given scales; values beyond the format's range saturate at its
    maximum.

    Args:
        scale: float32 or E8M0, ``scale_shape(x.shape, block)``.

    Returns:
        (data, scale) as ``quantize`` does; the scale is the given one, but NaN for a block that
        holds NaN or Inf or whose given scale is not a finite number of at least 2^-127 (data +0 in
        both cases).

    Raises:
        ValueError: an argument is none of these.
    """
    check_cast(x, block, dtype)
    check_scale(scale, x, block)
    given = decode_scale(scale)
    live = block_amax(x, block).isfinite() & given.isfinite() & (given >= _LOWEST_GIVEN_SCALE)
    data = _cast(x, given, live, block, dtype)
    used = torch.where(live, given, torch.full_like(given, float("nan")))
    return data, scale_layout(encode_e8m0(used) if scale.dtype == E8M0.dtype else used, block)


def _cast(x: Tensor, scale: Tensor, live: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    fmt = format_of(dtype)
    inverse = torch.div(torch.ones_like(scale), scale)
    scaled = x.to(torch.float32) * broadcast_scale(inverse, x.shape, block)
    # The clamp is explicit: what an unclamped cast does beyond the maximum differs between formats
    # and torch versions.
    data = torch.where(broadcast_scale(live, x.shape, block), scaled.clamp(-fmt.max, fmt.max), 0.0)
    return data.to(dtype, memory_format=torch.contiguous_format)


def dequantize(data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """``data * scale`` per block, multiplied in float32 and rounded once to ``dtype``; contiguous.

    A finite value can come back as Inf: under a power-of-two scale, one that is nearer than half an
    FP8 step to the largest number of ``dtype`` rounds up past it.

    Raises:
        ValueError: ``data`` is not FP8, or ``scale``, ``block`` or ``dtype`` does not fit.
    """
    _check_dequantize(data, block, dtype)
    check_scale(scale, data, block)
    values = data.to(torch.float32) * broadcast_scale(decode_scale(scale), data.shape, block)
    return values.to(dtype).contiguous()


TRITON_BLOCKS = ((FULL, FULL), (1, FULL), (1, 32), (1, 128), (128, 128))
GRID_LIMIT = 65535  # of a launch grid's second and third dimension
_ROWS_PER_TILE = 128


def triton_refusal(x: Tensor, *casts: CastPlan) -> str | None:
    """Why the Triton kernels do not cast x, None if they do. The reference runs instead, with the
    same result."""
    return _refusal(x.shape, device_profile(x.device), casts)


def _refusal(shape: torch.Size, profile: DeviceProfile, casts: tuple[CastPlan, ...]) -> str | None:
    if (reason := profile.refusal("convert")) is not None:
        return reason
    if any(format_of(cast.dtype).flavour != profile.flavour for cast in casts):
        return f"{profile.arch} converts to {profile.flavour} formats only"
    if len(shape) not in (2, 3) or any(cast.block[:-2] not in ((), (1,)) for cast in casts):
        return "the kernels take a matrix, or a stack of matrices with a leading block of 1"
    if any(cast.block[-2:] not in TRITON_BLOCKS for cast in casts):
        return f"the kernels' blocks are {', '.join(map(block_name, TRITON_BLOCKS))}"
    too_long = max(shape) > GRID_LIMIT * _ROWS_PER_TILE
    if 0 in shape or too_long or (len(shape) == 3 and shape[0] > GRID_LIMIT):
        return f"the kernels take 1 to {GRID_LIMIT * _ROWS_PER_TILE} rows and columns"
    return None if has_triton_package() else "triton is not installed"


@functools.lru_cache(maxsize=1024)  # the host has less time than these checks take
def _layouts(
    shape: torch.Size, x_dtype: torch.dtype, profile: DeviceProfile, *casts: CastPlan
) -> tuple[CastPlan, ...] | None:
    """The casts as the kernels take them, for one matrix; None where they refuse. Raises what
    ``quantize`` does."""
    for cast in casts:
        _check_cast(shape, x_dtype, cast.block, cast.dtype)
        check_scale_mode(cast.scale_mode)
    if _refusal(shape, profile, casts) is not None:
        return None
    return tuple(cast._replace(block=cast.block[-2:]) for cast in casts)


def _quantize_gpu(
    x: Tensor, block: Block, dtype: torch.dtype, scale_mode: str, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    cast = CastPlan(tuple(block), dtype, scale_mode)
    layouts = _layouts(x.shape, x.dtype, device_profile(x.device), cast)
    if layouts is None:
        return quantize(x, block, dtype, scale_mode, amax)
    check_amax(x, amax, block)
    from .quantize_triton import quantize_layouts

    data, scale = quantize_layouts(x, layouts[0], None, amax)
    return data, scale


def _quantize_dual_gpu(
    x: Tensor,
    block: Block,
    dtype: torch.dtype,
    scale_mode: str,
    block_t: Block,
    dtype_t: torch.dtype,
    scale_mode_t: str,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cast = CastPlan(tuple(block), dtype, scale_mode)
    cast_t = CastPlan(tuple(block_t), dtype_t, scale_mode_t)
    layouts = _layouts(x.shape, x.dtype, device_profile(x.device), cast, cast_t)
    if layouts is None:
        return quantize_dual(x, *cast, *cast_t, amax)
    check_dual_amax(x, amax, block, block_t)
    from .quantize_triton import quantize_layouts

    data, scale, data_t, scale_t = quantize_layouts(x, layouts[0], layouts[1], amax)
    return data, scale, data_t, scale_t


def _quantize_and_measure_gpu(
    x: Tensor, block: Block, dtype: torch.dtype, scale_mode: str, block_t: Block
) -> tuple[Tensor, Tensor, Tensor]:
    cast, later = (CastPlan(tuple(b), dtype, scale_mode) for b in (block, block_t))
    _check_measured(x.transpose(-2, -1).shape, block_t)
    layouts = _layouts(x.shape, x.dtype, device_profile(x.device), cast, later)
    if layouts is None:
        return quantize_and_measure(x, *cast, block_t)
    from .quantize_triton import quantize_and_measure as launch

    data, scale, amax = launch(x, layouts[0], layouts[1])
    return data, scale, amax


def _quantize_static_gpu(
    x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    cast = CastPlan(tuple(block), dtype, mode_like(scale))
    layouts = _layouts(x.shape, x.dtype, device_profile(x.device), cast)
    if layouts is None:
        return quantize_static(x, scale, block, dtype)
    check_scale(scale, x, block)
    from .quantize_triton import quantize_layouts

    given = layouts[0]._replace(scale_mode=given_mode(scale))
    data, used = quantize_layouts(x, given, None, scale=scale)
    return data, used


def given_mode(scale: Tensor) -> str:
    """The kernels' scale mode of a static scale: none of SCALE_MODES, as nothing is computed."""
    return "e8m0_given" if scale.dtype == E8M0.dtype else "given"


def check_cast(x: Tensor, block: Block, dtype: torch.dtype) -> None:
    """Raise ValueError for what neither cast takes; implementations and fake kernels ask this."""
    _check_cast(x.shape, x.dtype, block, dtype)


def _check_cast(shape: torch.Size, x_dtype: torch.dtype, block: Block, dtype: torch.dtype) -> None:
    if x_dtype not in HIGH_PRECISION:
        raise ValueError(
            f"x is {x_dtype}; a cast takes {names(HIGH_PRECISION)}, so convert it first"
        )
    check_block(shape, block)
    if format_of(dtype) is E8M0:
        raise ValueError(f"dtype={dtype} is a format for scales only; use an e4m3 or e5m2 dtype")


def check_layout(
    x: Tensor, block: Block | None, dtype: torch.dtype | None, scale_mode: str | None
) -> CastPlan | None:
    """The cast that makes one of an op's layouts of x, None for three Nones; ValueError for what
    ``quantize`` does not take, and where only some are None."""
    if block is None and dtype is None and scale_mode is None:
        return None
    if block is None or dtype is None or scale_mode is None:
        raise ValueError(
            f"block={block}, dtype={dtype}, scale_mode={scale_mode!r}: a layout takes all three, "
            "or three Nones to be left out"
        )
    check_cast(x, block, dtype)
    check_scale_mode(scale_mode)
    return CastPlan(tuple(block), dtype, scale_mode)


def check_amax(x: Tensor, amax: Tensor | None, block: Block) -> None:
    """Raise ValueError unless ``amax`` is None, or may stand for the amax of x in a tensorwise or
    rowwise cast."""
    if amax is None:
        return
    check_devices(x, amax)
    needed = scale_shape(x.shape, block)
    if not _whole(block) or amax.dtype != torch.float32 or tuple(amax.shape) != needed:
        raise ValueError(
            f"amax is {amax.dtype} of shape {tuple(amax.shape)} for blocks {block_name(block)}; "
            "only a tensorwise or rowwise cast takes one, torch.float32 of the scale's shape "
            f"{needed}; leave it out to have it measured"
        )


def _whole(block: Block) -> bool:
    """Whether blocks are whole rows, or all of them."""
    return tuple(block[-2:]) in ((1, FULL), (FULL, FULL))


def check_dual_amax(x: Tensor, amax: Tensor | None, block: Block, block_t: Block) -> None:
    """Raise ValueError unless ``amax`` is None, or may stand for both layouts' amax."""
    if amax is not None and not tuple(block[-2:]) == tuple(block_t[-2:]) == (FULL, FULL):
        raise ValueError(
            f"amax is given for blocks {block_name(block)} and {block_name(block_t)}; two layouts "
            "share one where both are tensorwise; leave it out to have it measured"
        )
    check_amax(x, amax, block)


def _check_measured(shape_t: torch.Size, block_t: Block) -> None:
    check_block(shape_t, block_t)
    if not _whole(block_t):
        raise ValueError(
            f"blocks {block_name(block_t)} have no amax that could be given later; a tensorwise or "
            "rowwise cast has"
        )


def _check_dequantize(data: Tensor, block: Block, dtype: torch.dtype) -> None:
    if format_of(data.dtype) is E8M0:
        raise ValueError(
            f"data is {data.dtype}, a format for scales only; data has an e4m3 or e5m2 dtype"
        )
    check_block(data.shape, block)
    if dtype not in HIGH_PRECISION:
        raise ValueError(f"dtype={dtype} must be one of {names(HIGH_PRECISION)}")


def check_devices(*tensors: Tensor | None) -> None:
    """Raise ValueError unless all that are given are on one device. The dispatcher does not ask:
    among a CPU and a meta tensor it picks the fake kernel, whose result nobody has computed."""
    devices = {t.device: None for t in tensors if t is not None}
    if len(devices) > 1:
        raise ValueError(
            f"operands are on {' and '.join(map(str, devices))}; move them to one device"
        )


def check_scale(scale: Tensor, x: Tensor, block: Block) -> None:
    """Raise ValueError unless ``scale`` may be that of x in these blocks."""
    check_devices(x, scale)
    needed = scale_shape(x.shape, block)
    if scale.dtype not in (torch.float32, E8M0.dtype) or tuple(scale.shape) != needed:
        raise ValueError(
            f"scale is {scale.dtype} of shape {tuple(scale.shape)}; data of shape {tuple(x.shape)} "
            f"in blocks {block_name(block)} needs torch.float32 or {E8M0.dtype} of shape {needed}, "
            "one entry per block"
        )


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))


def _fake_quantize(
    x: Tensor, block: Block, dtype: torch.dtype, scale_mode: str, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    check_cast(x, block, dtype)
    check_scale_mode(scale_mode)
    check_amax(x, amax, block)
    data = x.new_empty(x.shape, dtype=dtype)
    return data, scale_layout(
        x.new_empty(scale_shape(x.shape, block), dtype=scale_dtype(scale_mode)), block
    )


def _fake_quantize_dual(
    x: Tensor,
    block: Block,
    dtype: torch.dtype,
    scale_mode: str,
    block_t: Block,
    dtype_t: torch.dtype,
    scale_mode_t: str,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_dual_amax(x, amax, block, block_t)
    transposed = _fake_quantize(x.transpose(-2, -1), block_t, dtype_t, scale_mode_t, amax)
    return (*_fake_quantize(x, block, dtype, scale_mode, amax), *transposed)


def _fake_quantize_and_measure(
    x: Tensor, block: Block, dtype: torch.dtype, scale_mode: str, block_t: Block
) -> tuple[Tensor, Tensor, Tensor]:
    x_t = x.transpose(-2, -1)
    _check_measured(x_t.shape, block_t)
    amax = x.new_empty(scale_shape(x_t.shape, block_t), dtype=torch.float32)
    return *_fake_quantize(x, block, dtype, scale_mode), amax


def _fake_quantize_static(
    x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    check_cast(x, block, dtype)
    check_devices(x, scale)
    return x.new_empty(x.shape, dtype=dtype), scale_layout(torch.empty_like(scale), block)


def _fake_dequantize(data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    _check_dequantize(data, block, dtype)
    check_devices(data, scale)
    return data.new_empty(data.shape, dtype=dtype)


for _name, _reference, _gpu, _fake in (
    ("quantize", quantize, _quantize_gpu, _fake_quantize),
    ("quantize_dual", quantize_dual, _quantize_dual_gpu, _fake_quantize_dual),
    (
        "quantize_and_measure",
        quantize_and_measure,
        _quantize_and_measure_gpu,
        _fake_quantize_and_measure,
    ),
    ("quantize_static", quantize_static, _quantize_static_gpu, _fake_quantize_static),
    ("dequantize", dequantize, dequantize, _fake_dequantize),
):
    _LIB.impl(_name, _reference, "CPU")
    _LIB.impl(_name, _gpu, "CUDA")
    torch.library.register_fake(f"float8::{_name}", _fake, lib=_LIB)
