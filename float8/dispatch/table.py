"""The dispatch table of ``Float8TrainingTensor``: which handler answers which aten op. It imports
nothing of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch

Op: TypeAlias = torch._ops.OpOverload
Handler = Callable[..., Any]
_H = TypeVar("_H", bound=Handler)

HANDLERS: dict[Op, Handler] = {}


def implements(*ops: Op) -> Callable[[_H], _H]:
    """Register the decorated function as the handler of aten overloads on ``Float8TrainingTensor``.

    The handler is called as ``handler(op, *args, **kwargs)`` with the op's own arguments, below
    autograd, whenever at least one of them is a ``Float8TrainingTensor``; it returns the op's
    result or raises. A later registration of the same overload replaces the earlier one.

        @float8.implements(torch.ops.aten.neg.default)
        def neg(op, x):
            return x.replace(qdata=op(x.qdata), scale=x.scale)

    Raises:
        TypeError: one of ``ops`` is not an overload (``torch.ops.aten.neg`` is a packet of several;
            name one).
    """
    for op in ops:
        if not isinstance(op, torch._ops.OpOverload):
            raise TypeError(
                "implements() takes aten overloads such as torch.ops.aten.neg.default, but got "
                f"{op!r}; pick one of a packet's overloads by its name"
            )

    def register(handler: _H) -> _H:
        HANDLERS.update(dict.fromkeys(ops, handler))
        return handler

    return register
