"""The stateless ops, on plain tensors: the same as ``torch.ops.float8.*``, with their references
and fake kernels.

They carry no gradient and know no tensor class; ``float8.quantize``, ``Float8TrainingTensor`` and
``float8.linear`` are made of them. Arguments and formulas: ``float8/kernels/``.
"""

import torch

from .kernels import fused as _fused  # noqa: F401 (registers)
from .kernels import fused_grouped as _fused_grouped  # noqa: F401
from .kernels import grouped as _grouped  # noqa: F401
from .kernels import matmul as _matmul  # noqa: F401
from .kernels import permute as _permute  # noqa: F401
from .kernels import quantize as _quantize  # noqa: F401
from .kernels import quantize_grouped as _quantize_grouped  # noqa: F401

quantize = torch.ops.float8.quantize
quantize_dual = torch.ops.float8.quantize_dual
quantize_and_measure = torch.ops.float8.quantize_and_measure
quantize_grouped = torch.ops.float8.quantize_grouped
quantize_static = torch.ops.float8.quantize_static
dequantize = torch.ops.float8.dequantize
scaled_mm = torch.ops.float8.scaled_mm
scaled_mm_add_ = torch.ops.float8.scaled_mm_add_
grouped_mm = torch.ops.float8.grouped_mm
grouped_wgrad = torch.ops.float8.grouped_wgrad
grouped_wgrad_add_ = torch.ops.float8.grouped_wgrad_add_
grouped_mm_hp = torch.ops.float8.grouped_mm_hp
rms_norm_quantize = torch.ops.float8.rms_norm_quantize
swiglu_quantize = torch.ops.float8.swiglu_quantize
swiglu_backward_quantize = torch.ops.float8.swiglu_backward_quantize
swiglu_quantize_grouped = torch.ops.float8.swiglu_quantize_grouped
swiglu_backward_quantize_grouped = torch.ops.float8.swiglu_backward_quantize_grouped
route = torch.ops.float8.route
permute = torch.ops.float8.permute
permute_quantize = torch.ops.float8.permute_quantize
unpermute = torch.ops.float8.unpermute
unpermute_backward = torch.ops.float8.unpermute_backward
