"""Value ops: they look at the values, so one handler dequantises and runs the op in ``orig_dtype``.

The list is explicit: an op that is not on it raises, so that nothing leaves FP8 without being asked
to. Products and random ops are never on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..tensor import Float8TrainingTensor, dequantize_parts, no_handler
from .table import Op, implements

# Packets, each with its overloads; ``default`` where none is named.
_VALUE_OPS = """
abs neg sign sgn square sqrt rsqrt reciprocal exp log round floor ceil trunc nan_to_num
tanh sigmoid relu silu silu_backward gelu gelu_backward _softmax _log_softmax logsumexp cumsum
isnan isinf isfinite isposinf isneginf isclose allclose equal is_nonzero
add:Tensor,Scalar sub:Tensor,Scalar rsub:Tensor,Scalar mul:Tensor,Scalar div:Tensor,Scalar
div:Tensor_mode,Scalar_mode pow:Tensor_Scalar,Tensor_Tensor,Scalar
clamp:default,Tensor clamp_min:default,Tensor clamp_max:default,Tensor maximum minimum
eq:Tensor,Scalar ne:Tensor,Scalar lt:Tensor,Scalar le:Tensor,Scalar gt:Tensor,Scalar
ge:Tensor,Scalar where:self masked_fill:Scalar,Tensor
sum:default,dim_IntList mean:default,dim amax amin aminmax argmax argmin max:default,dim,other
min:default,dim,other any:default,dim,dims all:default,dim,dims std:correction var:correction
std_mean:correction var_mean:correction linalg_vector_norm norm:Scalar,ScalarOpt_dim
count_nonzero:default,dim_IntList nonzero sort:default,stable topk mse_loss mse_loss_backward
_is_all_true _is_any_true _local_scalar_dense dequantize:self
add_:Tensor sub_:Tensor mul_:Tensor div_:Tensor
"""


def _overloads(names: str) -> list[Op]:
    entries = [entry.partition(":") for entry in names.split()]
    return [
        getattr(getattr(torch.ops.aten, packet), overload)
        for packet, _, overloads in entries
        for overload in (overloads or "default").split(",")
    ]


@implements(*_overloads(_VALUE_OPS))
def dequantized(op: Op, *args: Any, **kwargs: Any) -> Any:
    if op._schema.is_mutable and isinstance(args[0], Float8TrainingTensor):
        raise NotImplementedError(no_handler(op, args, kwargs))
    args, kwargs = tree_map_only(Float8TrainingTensor, dequantize_parts, (args, kwargs))
    return op(*args, **kwargs)
