"""torchao's ways to do the same jobs (0.18), imported only under ``--peer torchao``.

Each function sets a job up and returns the call that does it; what a device lacks raises there.
Names that end in "compiled" are what torchao leaves to torch.compile, the others are its kernels.
Its scales are those that quantise or those that dequantise, as they come; views put its data into
the layouts [M, K] and [K, M] of ours, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from .registry import Call, Outputs, compiled


def convert(recipe: str, model: nn.Module) -> nn.Module:
    """``convert_to_float8_training`` by one of torchao's recipes."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    converted: nn.Module = convert_to_float8_training(model, config=config)
    return converted


def rowwise(x: Tensor, dtype: torch.dtype, dual: bool) -> Call:
    from torchao.prototype.moe_training.kernels import float8_rowwise, jagged_float8_scales

    everything = torch.tensor([x.shape[0]], dtype=torch.int32, device=x.device)  # one group

    def call() -> Outputs:
        row: Outputs = float8_rowwise.triton_fp8_rowwise_2d_scale_and_cast(x, dtype)
        if not dual:
            return row
        data, scale = jagged_float8_scales.triton_fp8_per_group_colwise_scales(x, everything, dtype)
        return *row, data.t(), scale

    return call


def rowwise_experts(x: Tensor, dtype: torch.dtype, transpose: str) -> Call:
    from torchao.prototype.moe_training.kernels import float8_rowwise

    along_m = getattr(float8_rowwise, transpose)

    def call() -> Outputs:
        data, scale = float8_rowwise.triton_fp8_colwise_3d_scale_and_cast(x.mT, dtype)
        data_t, scale_t = along_m(x.mT, dtype)
        return data.mT, scale, data_t.mT, scale_t

    return call


def tensorwise(x: Tensor, dtype: torch.dtype, dual: bool) -> Call:
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.prototype.float8nocompile.kernels import fp8_dynamic_tensorwise as kernels

    config = LinearMMConfig()

    def call() -> Outputs:
        if not dual:
            row = kernels.hp_to_fp8_row_major(x, dtype, config)
            return row._data, row._scale
        row, col = kernels.hp_to_fp8_row_major_t_and_non_t(x, dtype, config)
        return row._data, row._scale, col._data, col._scale

    return call


def blocks_1x128(x: Tensor, dtype: torch.dtype, dual: bool) -> Call:
    from torchao.prototype.blockwise_fp8_training import kernels

    def call() -> Outputs:
        row = kernels.triton_fp8_blockwise_act_quant_lhs(x, 128, dtype)
        col = kernels.triton_fp8_blockwise_act_quant_transposed_lhs(x, 128, dtype) if dual else ()
        return *row, *col

    return call


def blocks_128x128(x: Tensor, dtype: torch.dtype, dual: bool) -> Call:
    from torchao.prototype.blockwise_fp8_training import kernels

    def call() -> Outputs:
        data, scale = kernels.triton_fp8_blockwise_weight_quant_transposed_rhs(x, 128, dtype)
        if not dual:
            return data.t(), scale
        data_t, scale_t = kernels.triton_fp8_blockwise_weight_quant_rhs(x, 128, dtype)
        return data.t(), scale, data_t.t(), scale_t

    return call


def mxfp8(x: Tensor, dtype: torch.dtype, dual: bool) -> Call:
    from torchao.prototype.mx_formats import kernels

    def call() -> Outputs:
        row: Outputs = kernels.triton_to_mxfp8_dim0(x, 32, "rceil")
        if not dual:
            return row
        data, scale = kernels.triton_to_mxfp8_dim1(x, 32, "rceil")
        return *row, data.t(), scale

    return call


def compiled_scaling(x: Tensor, dtype: torch.dtype, dual: bool, axis: int | None) -> Call:
    """What its Float8Linear does around a GEMM: scales along ``axis``, None for one scale."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    kind = ScalingGranularity.TENSORWISE if axis is None else ScalingGranularity.AXISWISE

    def cast(x: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
        scale = tensor_to_scale(x, dtype, scaling_granularity=kind, axiswise_dim=axis)
        return to_fp8_saturated(x.to(torch.float32) * scale, dtype), scale

    def call() -> Outputs:
        data, scale = cast(x, axis)
        if not dual:
            return data, scale
        data_t, scale_t = (data, scale) if axis is None else cast(x, -2)
        return data, scale, data_t.mT.contiguous(), scale_t

    return compiled(call)


def compiled_mx(x: Tensor, dtype: torch.dtype, dual: bool) -> Call:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    def call() -> Outputs:
        scale, data = to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)
        if not dual:
            return data, scale
        scale_t, data_t = to_mx(x.mT.contiguous(), dtype, 32, ScaleCalculationMode.RCEIL)
        return data, scale, data_t, scale_t

    return compiled(call)


def absent() -> Call:
    raise NotImplementedError("torchao 0.18 has no kernel for this")


_MATRIX: dict[str, dict[str, Callable[[Tensor, torch.dtype, bool], Call]]] = {
    "rowwise": {"torchao": rowwise, "torchao compiled": partial(compiled_scaling, axis=-1)},
    "tensorwise": {"torchao": tensorwise, "torchao compiled": partial(compiled_scaling, axis=None)},
    "1x128": {"torchao": blocks_1x128},
    "128x128": {"torchao": blocks_128x128},
    "mxfp8": {"torchao": mxfp8, "torchao compiled": compiled_mx},
}
_EXPERTS = {
    "torchao": "triton_fp8_rowwise_3d_transpose_rhs",
    "torchao reduction": "triton_fp8_rowwise_3d_transpose_rhs_fused_reduction",
}


def casts(name: str, dual: bool, x: Tensor, dtype: torch.dtype) -> dict[str, Callable[[], Call]]:
    """torchao's contenders for a cast of x, by name."""
    if x.ndim == 2:
        return {label: partial(make, x, dtype, dual) for label, make in _MATRIX[name].items()}
    if name == "rowwise":
        return {label: partial(rowwise_experts, x, dtype, f) for label, f in _EXPERTS.items()}
    return {"torchao": absent}


def grouped_rowwise(x: Tensor, offs: Tensor, dtype: torch.dtype, dual: bool, pair: bool) -> Call:
    """``pair``: by the kernel for two tensors, which training uses; the second is thin here."""
    from torchao.prototype.moe_training.kernels import float8_rowwise
    from torchao.prototype.moe_training.kernels import jagged_float8_scales as kernels

    thin = x[:, :16].contiguous()

    def call() -> Outputs:
        row = float8_rowwise.triton_fp8_rowwise_2d_scale_and_cast(x, dtype) if dual else ()
        if pair:
            col = kernels.triton_fp8_per_group_colwise_scales_dual(x, thin, offs, dtype)
        else:
            col = kernels.triton_fp8_per_group_colwise_scales(x, offs, dtype)
        return *row, col[0].t(), col[1]

    return call


def grouped_casts(
    name: str, dual: bool, x: Tensor, offs: Tensor, dtype: torch.dtype
) -> dict[str, Callable[[], Call]]:
    """torchao's contenders for a cast of groups of rows of x, by name."""
    if name != "rowwise":
        return {"torchao": absent}
    return {
        label: partial(grouped_rowwise, x, offs, dtype, dual, pair)
        for label, pair in (("torchao", False), ("torchao pair", True))
    }


def grouped_product(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """torchao's grouped product in FP8, for groups of multiples of 16 rows; differentiable."""
    from torchao.prototype.moe_training import fp8_grouped_mm

    out: Tensor = fp8_grouped_mm._to_fp8_rowwise_then_scaled_grouped_mm(
        x, w, offs, pad_token_groups_for_grouped_mm=False
    )
    return out
