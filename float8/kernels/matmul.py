"""Scaled matrix product of two FP8 matrices: ``torch.ops.float8.scaled_mm``, which makes a new
matrix, and ``scaled_mm_add_``, which adds to one; and the choice of who computes it.

Shape letters: M rows of a, N columns of b, K the contraction. a_MK is scaled by blocks ``block_a``
    (rows, K) and b_KN by ``block_b`` (K, columns).

    out_MN  = sum over k of (a_MK * scale_a) (b_KN * scale_b) + bias_N
    out_MN += sum over k of (a_MK * scale_a) (b_KN * scale_b)

A product is accumulated in float32, the bias included, and rounded once to the output's dtype; then
it is added to what the output holds.

Implementations: ``cublas`` is torch's own scaled_mm (cuBLASLt or CUTLASS on NVIDIA, hipBLASLt on
    AMD); ``hopper`` is this library's kernel for sm_90, and ``triton`` the one for every GPU with
    FP8 matrix instructions and every mode of scaling; ``torch`` multiplies the dequantised operands
    in float32 on any device and is the reference; ``torch_bf16`` multiplies them in bf16,
    which holds what MX blocks do.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._triton import has_triton_package

from ..devices import DeviceProfile, Op, device_profile
from ..formats import E8M0, format_of
from ..scaling import FULL, Block, block_name, broadcast_scale, decode_scale, num_blocks
from .quantize import HIGH_PRECISION, check_devices, check_scale, dequantize, names

_LIB = torch.library.Library("float8", "FRAGMENT")
_LIB.define(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, int[] block_a, int[] block_b, "
    "ScalarType out_dtype, bool fast_accum, str impl, Tensor? bias=None) -> Tensor"
)
_LIB.define(
    "scaled_mm_add_(Tensor(a!) out, Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, "
    "int[] block_a, int[] block_b, bool fast_accum, str impl) -> ()"
)


class Operand(NamedTuple):
    """What the choice of an implementation needs to know of an operand: never its size."""

    dtype: torch.dtype
    block: Block
    scale_dtype: torch.dtype


class Product(NamedTuple):
    """The arguments of ``scaled_mm``, in its order, and what the product is added to, if it is."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    block_a: Block
    block_b: Block
    out_dtype: torch.dtype
    fast_accum: bool
    impl: str
    bias: Tensor | None = None
    out: Tensor | None = None

    @property
    def operands(self) -> tuple[Operand, Operand]:
        return (
            Operand(self.a.dtype, self.block_a, self.scale_a.dtype),
            Operand(self.b.dtype, self.block_b, self.scale_b.dtype),
        )


def contraction_error(a: Operand, b: Operand, k: int) -> str | None:
    """Why no scaled product exists: the contraction (of length k) must lie inside blocks of both
    operands, the same blocks, and both must be of one flavour. None when it does."""
    fmt_a, fmt_b = format_of(a.dtype), format_of(b.dtype)
    if fmt_a.flavour != fmt_b.flavour:
        return (
            f"{fmt_a} times {fmt_b} mixes the {fmt_a.flavour} and {fmt_b.flavour} flavours, whose "
            "bytes mean different values; bring one over with float8.convert_format"
        )
    inner_a, inner_b = (
        k if inner == FULL else min(inner, k) for inner in (a.block[-1], b.block[-2])
    )
    if inner_a == inner_b and (inner_a > 1 or k <= 1):
        return None
    return (
        f"the contraction of length {k} does not lie inside the same scale blocks of both "
        f"operands: the first has blocks {block_name(a.block)} and is contracted over its last "
        f"dimension, the second {block_name(b.block)} over its first; quantise both along the "
        "contraction, or multiply .dequantize() of one"
    )


def select(device: torch.device, a: Operand, b: Operand, impl: str | None = None) -> str:
    """Name of the implementation that multiplies a by b on ``device``.

    Without ``impl`` the first that does not refuse, in the order of RULES or else of
    IMPLEMENTATIONS; a named one must not refuse.

    Raises:
        ValueError: the named implementation is unknown or refuses; the message gives every reason.
    """
    profile = device_profile(device)
    refusals = {name: refuse(profile, a, b) for name, refuse in IMPLEMENTATIONS.items()}
    if impl is None:
        return next(name for name in preference(profile, a, b) if refusals[name] is None)
    if impl not in refusals:
        raise ValueError(
            f"impl={impl!r} is unknown; choose one of {', '.join(refusals)}, or None for the "
            "fastest"
        )
    if (reason := refusals[impl]) is not None:
        raise ValueError(_cannot(impl, reason))
    return impl


def _cannot(impl: str, reason: str) -> str:
    reason = reason.rstrip(".")
    return f"impl={impl!r} cannot multiply these operands: {reason}; choose another"


@functools.cache
def native_mode(a: Operand, b: Operand) -> str | None:
    """The mode of torch's scaled_mm that two operands fall under by their blocks, None if under
    none."""
    (rows, inner_a), (inner_b, columns) = a.block, b.block
    microscaled = a.scale_dtype == b.scale_dtype == E8M0.dtype
    if inner_a == inner_b == FULL and {rows, columns} <= {1, FULL}:
        return "tensorwise" if rows == columns == FULL else "rowwise"
    if inner_a == inner_b == 128 and {rows, columns} <= {1, 128} and not rows == columns == 128:
        return "blockwise"
    if inner_a == inner_b == 32 and rows == columns == 1 and microscaled:
        return "mx"
    return None


def _no_mode(a: Operand, b: Operand) -> str:
    return (
        f"torch's scaled_mm has no mode for blocks {block_name(a.block)} times "
        f"{block_name(b.block)} with scales {a.scale_dtype} and {b.scale_dtype}"
    )


def _cublas_refusal(profile: DeviceProfile, a: Operand, b: Operand) -> str | None:
    fmt_a, fmt_b, mode = format_of(a.dtype), format_of(b.dtype), native_mode(a, b)
    if mode is None:
        return _no_mode(a, b)
    if (reason := profile.refusal(cast(Op, f"mm_{mode}"))) is not None:
        return reason
    if (reason := _other_flavour(profile, a, b)) is not None:
        return reason
    if profile.vendor == "nvidia" and fmt_a.kind == fmt_b.kind == "e5m2":
        return "cuBLASLt does not multiply e5m2 by e5m2"
    if (
        mode == "rowwise"
        and not _cublaslt_scales_rows(profile)
        and (fmt_a.kind, fmt_b.kind) != ("e4m3", "e4m3")
    ):
        return f"the rowwise kernel of {profile.arch} takes e4m3 times e4m3 only"
    if mode == "blockwise" and (fmt_a.kind, fmt_b.kind) != ("e4m3", "e4m3"):
        return "torch's scaled_mm takes blocks of e4m3 times e4m3 only"
    if mode == "mx" and profile.vendor == "amd":
        return "hipBLASLt's layout of MX scales depends on the ROCm version and was not run here"
    return None


def _cublaslt_scales_rows(profile: DeviceProfile) -> bool:
    """Whether row scales run in cuBLASLt, which takes every format and writes every dtype: it
    learned them together with 128-wide blocks, in 12.9 and for sm_90. Elsewhere CUTLASS or
    hipBLASLt runs: e4m3 times e4m3, written as bf16."""
    return profile.refusal("mm_blockwise") is None


def _other_flavour(profile: DeviceProfile, a: Operand, b: Operand) -> str | None:
    formats = format_of(a.dtype), format_of(b.dtype)
    if all(fmt.flavour == profile.flavour for fmt in formats):
        return None
    these = " and ".join(map(str, formats))
    return f"{profile.arch} multiplies {profile.flavour} formats, these are {these}"


_TRITON_INNER = (32, 64, 128, FULL)  # sizes of a block along the contraction


@functools.cache
def triton_refusal(profile: DeviceProfile, a: Operand, b: Operand) -> str | None:
    """Why the Triton kernel does not multiply a by b on a device, None if it does. It takes blocks
    of any number of rows."""
    if (reason := profile.refusal("convert")) is not None:
        return reason  # FP8 comes as a whole: those that convert to it multiply it
    if (reason := _other_flavour(profile, a, b)) is not None:
        return reason
    if profile.matrix == "wmma":  # its tiles would spill
        return f"the Triton kernel is made for AMD's MFMA instructions, {profile.arch} has WMMA"
    inner = a.block[1], b.block[0]
    if inner[0] != inner[1] or inner[0] not in _TRITON_INNER:
        return (
            "the Triton kernel takes blocks of 32, 64, 128 or FULL along the contraction, these "
            f"are {block_name(a.block)} times {block_name(b.block)}"
        )
    return None


def _triton_refusal(profile: DeviceProfile, a: Operand, b: Operand) -> str | None:
    reason = triton_refusal(profile, a, b)
    return reason if reason or has_triton_package() else "triton is not installed"


def _hopper_refusal(profile: DeviceProfile, a: Operand, b: Operand) -> str | None:
    if (reason := profile.refusal("convert")) is not None:
        return reason
    if profile.arch != "sm_90":
        return "the Hopper kernel is made for sm_90 alone"
    if (reason := _other_flavour(profile, a, b)) is not None:
        return reason
    if native_mode(a, b) in (None, "mx") or {a.scale_dtype, b.scale_dtype} != {torch.float32}:
        return (
            "the Hopper kernel takes float32 scales per tensor, row or 128 of K, these are "
            f"{a.scale_dtype} and {b.scale_dtype} of blocks {block_name(a.block)} times "
            f"{block_name(b.block)}"
        )
    from .matmul_hopper import refusal

    return refusal()


def _bf16_refusal(profile: DeviceProfile, a: Operand, b: Operand) -> str | None:
    if a.scale_dtype == b.scale_dtype == E8M0.dtype:
        return None
    return (
        "FP8 values times their scales are bf16 values where scales are powers of two (E8M0), "
        f"these are {a.scale_dtype} and {b.scale_dtype}"
    )


def never_refuses(profile: DeviceProfile, a: Operand, b: Operand) -> str | None:
    return None


# In the order in which they are preferred; what follows "torch" is chosen by RULES alone.
IMPLEMENTATIONS = {
    "cublas": _cublas_refusal,
    "hopper": _hopper_refusal,
    "triton": _triton_refusal,
    "torch": never_refuses,
    "torch_bf16": _bf16_refusal,
}
# Where measurements (docs/performance.md) say otherwise: (architecture, native mode) to the names
# in their order.
RULES: dict[tuple[str, str | None], tuple[str, ...]] = {
    # 8192 x 14336 x 4096 on an H200: 547 TFLOPS; the Triton kernel, which meets the scales every 32
    # of K, has 254.
    ("sm_90", "mx"): ("torch_bf16", "triton", "torch"),
}


def preference(profile: DeviceProfile, a: Operand, b: Operand) -> tuple[str, ...]:
    """Names of IMPLEMENTATIONS, best first, for operands on a device."""
    measured = RULES.get((profile.arch, native_mode(a, b))) if profile.native else None
    return measured or tuple(IMPLEMENTATIONS)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block_a: Block,
    block_b: Block,
    out_dtype: torch.dtype,
    fast_accum: bool,
    impl: str,
    bias: Tensor | None = None,
) -> Tensor:
    """``a_MK @ b_KN`` with scales (module docstring), on the implementation that ``select`` named.

    Args:
        a, b: FP8 [M, K] and [K, N], any strides.
        scale_a, scale_b: float32 or E8M0, ``scale_shape`` of a and b.
        out_dtype: bf16, fp16 or fp32.
        fast_accum: let the tensor cores keep partial sums in less than float32 (NVIDIA sm_89 and
            sm_90); the reference ignores it, being exact either way.
        bias: [N] bf16, fp16 or fp32, added in float32 before the one rounding.

    Returns: [M, N] ``out_dtype``, contiguous; where K is 0, zeros or the bias.

    Raises:
        ValueError: shapes, devices, dtypes or ``impl`` do not fit, or that implementation does not
            take these operands.
    """
    blocks = tuple(block_a), tuple(block_b)
    flat = None if bias is None else bias.contiguous()
    x = Product(a, b, scale_a, scale_b, *blocks, out_dtype, fast_accum, impl, flat)
    _check(x)
    if 0 in (*a.shape, *b.shape):
        _check_scales(x)
        nothing = a.new_zeros((a.shape[0], b.shape[1]), dtype=out_dtype)
        return nothing if bias is None else nothing.add_(bias)
    return _run(x)


def scaled_mm_add_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block_a: Block,
    block_b: Block,
    fast_accum: bool,
    impl: str,
) -> None:
    """``out_MN += scaled_mm(...)``, whose other arguments and implementations these are: the
    product is rounded to ``out``'s dtype and then added, as autograd adds up gradients.

    Args:
        out: [M, N] bf16, fp16 or fp32, contiguous; left as it is where K is 0.

    Raises:
        ValueError: as ``scaled_mm``, or ``out`` does not fit.
    """
    blocks = tuple(block_a), tuple(block_b)
    x = Product(a, b, scale_a, scale_b, *blocks, out.dtype, fast_accum, impl, out=out)
    _check(x)
    if 0 in (*a.shape, *b.shape):
        _check_scales(x)
    else:
        torch.autograd.graph.increment_version(out)  # a kernel's writing would pass unnoticed
        _run(x)


def _run(x: Product) -> Tensor:
    """The product on the implementation that it names: a new matrix, or x.out."""
    if x.impl not in ("cublas", "torch"):  # those look at operands and scales themselves
        _check_scales(x)
        if (reason := IMPLEMENTATIONS[x.impl](device_profile(x.a.device), *x.operands)) is not None:
            raise ValueError(_cannot(x.impl, reason))
    run = {
        "cublas": _scaled_mm_cublas,
        "hopper": _scaled_mm_hopper,
        "triton": _scaled_mm_triton,
        "torch": _scaled_mm_reference,
        "torch_bf16": _scaled_mm_bf16,
    }[x.impl]
    if x.out is not None and x.impl not in ("hopper", "triton"):
        return x.out.add_(run(x._replace(out=None)))
    if x.bias is not None and not _adds_bias(x):
        product = run(x._replace(out_dtype=torch.float32, bias=None))
        return product.add_(x.bias).to(x.out_dtype)
    return run(x)


def _adds_bias(x: Product) -> bool:
    """Whether the implementation adds the bias itself, in float32 and before it rounds."""
    if x.impl != "cublas":
        return x.impl in ("hopper", "triton", "torch")
    # torch's scaled_mm takes a bias of the output's dtype, and none for float32; what becomes of
    # one in blocks, or on AMD, is not known here.
    assert x.bias is not None
    profile = device_profile(x.a.device)
    modes = {"tensorwise"}
    if _cublaslt_scales_rows(profile) or x.out_dtype == torch.bfloat16:
        modes.add("rowwise")
    return (
        profile.vendor == "nvidia"
        and x.bias.dtype == x.out_dtype != torch.float32
        and native_mode(*x.operands) in modes
    )


def _check(x: Product) -> None:
    check_devices(x.a, x.b, x.scale_a, x.scale_b, x.bias, x.out)
    if x.a.ndim != 2 or x.b.ndim != 2 or x.a.shape[1] != x.b.shape[0]:
        raise ValueError(
            f"shapes {tuple(x.a.shape)} and {tuple(x.b.shape)} do not multiply; needed (M, K), "
            "(K, N)"
        )
    shape = x.a.shape[0], x.b.shape[1]
    check_out(x.out, shape)
    if x.out_dtype not in HIGH_PRECISION:
        raise ValueError(f"out_dtype={x.out_dtype} must be one of {names(HIGH_PRECISION)}")
    if (bias := x.bias) is not None and not (
        bias.dtype in HIGH_PRECISION and bias.shape == shape[1:]
    ):
        raise ValueError(
            f"bias is {bias.dtype} of shape {tuple(bias.shape)}; it must be one of "
            f"{names(HIGH_PRECISION)} of shape {shape[1:]}"
        )
    if x.impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={x.impl!r} is unknown; choose one of {', '.join(IMPLEMENTATIONS)}")


def check_out(out: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a product of this shape can be added to ``out``, if it is to be."""
    if out is None or (out.dtype in HIGH_PRECISION and out.shape == shape and out.is_contiguous()):
        return
    raise ValueError(
        f"out is {out.dtype} of shape {tuple(out.shape)} and strides {out.stride()}; this product "
        f"is added to one of {names(HIGH_PRECISION)} of shape {shape}, contiguous"
    )


def _check_scales(x: Product) -> None:
    check_scale(x.scale_a, x.a, x.block_a)
    check_scale(x.scale_b, x.b, x.block_b)


def scaled_mm_torch(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block_a: Block,
    block_b: Block,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """The reference: dequantise both operands to float32, multiply, add the bias and round. Scales
    are at least 2^-127, so a dequantised value loses at most what lies 2^-22 below the smallest
    scale."""
    a_MK = dequantize(a, scale_a, block_a, torch.float32)
    b_KN = dequantize(b, scale_b, block_b, torch.float32)
    # Autocast would round the operands to its dtype first.
    with torch.autocast(a.device.type, enabled=False):
        out_MN = torch.mm(a_MK, b_KN)
    return (out_MN if bias is None else out_MN + bias).to(out_dtype)


def _scaled_mm_reference(x: Product) -> Tensor:
    return scaled_mm_torch(*x[:7], x.bias)


def _scaled_mm_bf16(x: Product) -> Tensor:
    """Dequantise both operands to bf16, which under E8M0 scales rounds no value above bf16's
    subnormals, and multiply there, accumulated in float32. What a device without MX instructions
    pays is a copy of each operand in bf16 and the time of a bf16 product."""
    a_MK, b_KN = _exact_bf16(x.a, x.scale_a, x.block_a), _exact_bf16(x.b, x.scale_b, x.block_b)
    with torch.autocast(x.a.device.type, enabled=False):
        if x.out_dtype == torch.bfloat16:
            return torch.mm(a_MK, b_KN)
        if x.a.is_cuda:
            return torch.mm(a_MK, b_KN, out_dtype=torch.float32).to(x.out_dtype)
        return torch.mm(a_MK.to(torch.float32), b_KN.to(torch.float32)).to(x.out_dtype)


def _exact_bf16(data: Tensor, scale: Tensor, block: Block) -> Tensor:
    values, powers = data.to(torch.bfloat16), decode_scale(scale).to(torch.bfloat16)
    rows, columns = (n if b == FULL else b for n, b in zip(data.shape, block, strict=True))
    if data.shape[0] % rows or data.shape[1] % columns:
        return values.mul_(broadcast_scale(powers, data.shape, block))
    tiles = values.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # a view
    tiles.mul_(powers[:, None, :, None])
    return values


def _scaled_mm_cublas(x: Product) -> Tensor:
    # cuBLASLt wants a row-major, b column-major, K and N multiples of 16 bytes; its block modes
    # also M, for the leading dimension of M-major scales. Both operands are handled as [rows, K]: b
    # as its transpose.
    a, b, scale_a, scale_b, block_a, block_b, out_dtype, fast_accum = x[:8]
    (m, n), (left, right) = (a.shape[0], b.shape[1]), x.operands
    if (mode := native_mode(left, right)) is None:
        raise ValueError(_cannot("cublas", _no_mode(left, right)))
    scales_rows = _cublaslt_scales_rows(device_profile(a.device))
    per_row = mode == "rowwise" and scales_rows
    bias = _native_bias(x.bias, n + -n % 16)
    if (mode == "tensorwise" or per_row) and _fits(a, b, scale_a, scale_b, per_row):
        scaling = F.ScalingType.RowWise if per_row else F.ScalingType.TensorWise
        return F.scaled_mm(
            a, b, scale_a, scaling, scale_b, scaling, bias=bias,
            output_dtype=out_dtype, use_fast_accum=fast_accum,
        )  # fmt: skip
    _check_scales(x)
    blocked = mode in ("blockwise", "mx")
    rows_multiple, k_multiple = {"blockwise": (16, 128), "mx": (32, 128)}.get(mode, (16, 16))
    a_MK = _aligned(a, rows_multiple if blocked else 1, k_multiple)
    b_NK = _aligned(b.t(), rows_multiple, k_multiple)
    recipe_a, scale_a = _native_scale(scale_a, a_MK, block_a, mode)
    recipe_b, scale_b_NK = _native_scale(scale_b.t(), b_NK, (block_b[1], block_b[0]), mode)
    if mode == "rowwise" and out_dtype != torch.bfloat16 and not scales_rows:
        # Take unscaled float32 sums and scale them here.
        one = torch.ones((), dtype=torch.float32, device=a.device)
        acc = F.scaled_mm(
            a_MK, b_NK.t(), one, F.ScalingType.TensorWise, one, F.ScalingType.TensorWise,
            output_dtype=torch.float32, use_fast_accum=fast_accum,
        )  # fmt: skip
        out = ((acc * scale_a) * scale_b_NK.t()).to(out_dtype)
    else:
        swizzle = F.SwizzleType.SWIZZLE_32_4_4 if mode == "mx" else F.SwizzleType.NO_SWIZZLE
        # The block modes write bf16 or fp32, and add up in float32 only.
        native = torch.float32 if blocked and out_dtype == torch.float16 else out_dtype
        out = F.scaled_mm(
            a_MK, b_NK.t(), scale_a, recipe_a, scale_b_NK if blocked else scale_b_NK.t(), recipe_b,
            swizzle_a=swizzle, swizzle_b=swizzle, bias=bias,
            output_dtype=native, use_fast_accum=fast_accum and not blocked,
        ).to(out_dtype)  # fmt: skip
    return out if out.shape == (m, n) else out[:m, :n].contiguous()


def _scaled_mm_hopper(x: Product) -> Tensor:
    from .matmul_hopper import BLOCKS, Mode, scaled_mm_hopper

    # A tensor's one scale is one of "rowwise" too.
    blocks = x.block_a, x.block_b[::-1]
    mode: Mode = next((mode for mode in BLOCKS if BLOCKS[mode] == blocks), "rowwise")
    operands = _aligned(x.a, 1, 16), _aligned(x.b.t(), 1, 16)
    scales = x.scale_a, x.scale_b.t()
    return scaled_mm_hopper(*operands, *scales, mode, x.out_dtype, x.fast_accum, x.bias, x.out)


def _scaled_mm_triton(x: Product) -> Tensor:
    from .matmul_triton import multiply

    return multiply(_wide(x.a), _wide(x.b.t()).t(), *x[2:8], x.bias, x.out)


def _wide(x_RK: Tensor) -> Tensor:
    """x itself if it can be read 16 bytes at a time, along rows or columns, else a copy whose rows
    are padded with zeros. The kernel reads either; bytes one by one take several times as long."""
    strides = x_RK.stride()
    other = strides[0] if strides[1] == 1 else strides[1] if strides[0] == 1 else 1
    fits = (x_RK.shape[1] | other | x_RK.data_ptr()) % 16 == 0
    return x_RK if fits else _aligned(x_RK, 1, 16)


def _fits(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, per_row: bool) -> bool:
    """Whether cuBLASLt takes operands that are tensorwise, or both rowwise, as they are. The common
    case: on the host it costs a third of what padding and copying would look at."""
    (m, k), n = a.shape, b.shape[1]
    (row_a, step_a), (step_b, row_b) = a.stride(), b.stride()
    at = a.data_ptr() | b.data_ptr() | scale_a.data_ptr() | scale_b.data_ptr()
    return (
        (k | n | row_a | row_b | at) % 16 == 0
        and step_a == step_b == 1
        and row_a >= k <= row_b
        and scale_a.shape == (m if per_row else 1, 1)
        and scale_b.shape == (1, n if per_row else 1)
        and scale_a.is_contiguous() and scale_b.is_contiguous()
        and scale_a.dtype == scale_b.dtype == torch.float32
    )  # fmt: skip


def _aligned(x_RK: Tensor, rows_multiple: int, k_multiple: int) -> Tensor:
    """x itself if it is row-major with aligned rows, else a zero-padded copy."""
    rows, k = x_RK.shape
    pad_rows, pad_k = -rows % rows_multiple, -k % k_multiple
    if pad_rows or pad_k:
        return F.pad(x_RK.view(torch.uint8), (0, pad_k, 0, pad_rows)).view(x_RK.dtype)
    aligned = (
        x_RK.stride(1) == 1
        and x_RK.stride(0) % 16 == 0
        and x_RK.stride(0) >= k
        and x_RK.data_ptr() % 16 == 0
    )
    return x_RK if aligned else x_RK.clone(memory_format=torch.contiguous_format)


def _native_scale(
    scale_RK: Tensor, x_RK: Tensor, block: Block, mode: str
) -> tuple[F.ScalingType, Tensor]:
    """The scale of a padded operand [rows, K] in the shape and strides that F.scaled_mm documents
    for its mode."""
    rows, k = x_RK.shape
    if mode == "tensorwise":
        return F.ScalingType.TensorWise, _packed(decode_scale(scale_RK)).reshape(())
    if mode == "mx":
        return F.ScalingType.BlockWise1x32, swizzle_mx_scale(
            _pad_scale(scale_RK, rows, num_blocks(k, 32))
        )
    scale = decode_scale(scale_RK)
    if mode == "rowwise":
        return F.ScalingType.RowWise, _packed(
            _pad_scale(scale.expand(-1 if block[0] == 1 else rows, 1), rows, 1)
        )
    if block[0] == 1:  # [rows, K / 128], rows-major
        padded = _pad_scale(scale, rows, num_blocks(k, 128))
        return F.ScalingType.BlockWise1x128, _packed(padded.t()).t()
    # [ceil(K / 128) rounded up to 4, rows / 128], K-major
    k_blocks = num_blocks(k, 128)
    padded = _pad_scale(scale, num_blocks(rows, 128), k_blocks + -k_blocks % 4)
    return F.ScalingType.BlockWise128x128, _packed(padded).t()


def _native_bias(bias: Tensor | None, columns: int) -> Tensor | None:
    """A bias on 16 bytes, with zeros for the columns of padding."""
    if bias is None or (bias.shape == (columns,) and bias.data_ptr() % 16 == 0):
        return bias
    return F.pad(bias, (0, columns - bias.shape[0]))  # new memory in any case


def _packed(scale: Tensor) -> Tensor:
    """Row-major without gaps and aligned, strides of dimensions of length 1 included: torch checks
    them, and contiguous() leaves them as they are."""
    packed = scale.stride() == (scale.shape[1], 1) and scale.data_ptr() % 16 == 0
    return scale if packed else scale.clone(memory_format=torch.contiguous_format)


def _pad_scale(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Pad with ones: padding data is zero, and 0 * 1 stays 0."""
    pad = (0, columns - scale.shape[1], 0, rows - scale.shape[0])
    if not any(pad):
        return scale
    if scale.dtype == E8M0.dtype:
        return F.pad(scale.view(torch.uint8), pad, value=127).view(E8M0.dtype)
    return F.pad(scale, pad, value=1.0)


def swizzle_mx_scale(scale_RB: Tensor) -> Tensor:
    """E8M0 scales [rows, blocks] in cuBLASLt's order for block scaling factors: tiles of 128 rows x
    4 blocks, in which entry (r, c) stands at offset (r % 32) * 16 + (r // 32) * 4 + c; both
    dimensions padded to whole tiles (cuBLAS documentation, "1D block scaling factors layout")."""
    rows, blocks = scale_RB.shape
    padded = _pad_scale(scale_RB, rows + -rows % 128, blocks + -blocks % 4).view(torch.uint8)
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(E8M0.dtype)


def _fake_scaled_mm(*arguments: Any) -> Tensor:
    x = Product(*arguments)
    _check(x)
    _check_scales(x)
    return x.a.new_empty((x.a.shape[0], x.b.shape[1]), dtype=x.out_dtype)


def _fake_scaled_mm_add_(out: Tensor, *arguments: Any) -> None:
    x = Product._make((*arguments[:6], out.dtype, *arguments[6:], None, out))
    _check(x)
    _check_scales(x)


for _key in ("CPU", "CUDA"):
    _LIB.impl("scaled_mm", scaled_mm, _key)
    _LIB.impl("scaled_mm_add_", scaled_mm_add_, _key)
torch.library.register_fake("float8::scaled_mm", _fake_scaled_mm, lib=_LIB)
torch.library.register_fake("float8::scaled_mm_add_", _fake_scaled_mm_add_, lib=_LIB)
