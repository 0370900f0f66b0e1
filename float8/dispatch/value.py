"""Value ops: they look at the values, so one handler dequantises and runs the op in ``orig_dtype``.

The list is explicit: an op that is not on it raises, so that nothing leaves FP8 without being asked to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..tensor import Float8TrainingTensor, dequantize_parts
from .table import implements

aten = torch.ops.aten


@implements(
    aten.abs.default,
    aten.add.Scalar,
    aten.add.Tensor,
    aten.allclose.default,
    aten.amax.default,
    aten.amin.default,
    aten.any.default,
    aten.argmax.default,
    aten.clamp.default,
    aten.div.Scalar,
    aten.div.Tensor,
    aten.eq.Scalar,
    aten.eq.Tensor,
    aten.equal.default,
    aten.ge.Scalar,
    aten.gt.Scalar,
    aten.isclose.default,
    aten.isfinite.default,
    aten.isinf.default,
    aten.isnan.default,
    aten._is_all_true.default,
    aten._local_scalar_dense.default,
    aten.le.Scalar,
    aten.lt.Scalar,
    aten.linalg_vector_norm.default,
    aten.max.default,
    aten.max.dim,
    aten.max.other,
    aten.maximum.default,
    aten.mean.default,
    aten.mean.dim,
    aten.min.default,
    aten.min.dim,
    aten.minimum.default,
    aten.mul.Scalar,
    aten.mul.Tensor,
    aten.ne.Scalar,
    aten.ne.Tensor,
    aten.neg.default,
    aten.norm.ScalarOpt_dim,
    aten.pow.Tensor_Scalar,
    aten.rsub.Scalar,
    aten.sgn.default,
    aten.sign.default,
    aten.sqrt.default,
    aten.square.default,
    aten.std.correction,
    aten.sub.Scalar,
    aten.sub.Tensor,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.var.correction,
    aten.where.self,
)
def dequantized(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = tree_map_only(Float8TrainingTensor, dequantize_parts, (args, kwargs))
    return op(*args, **kwargs)
