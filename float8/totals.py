"""Sums of weights' gradients over micro-batches, to which backward adds its products instead of
giving them to autograd: ``float8.cached_weights(model, accumulate=...)``.

Letters: N out features, K in features; M tokens.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from .kernels.quantize import HIGH_PRECISION, names
from .recipe import Plan

_DDP = nn.parallel.DistributedDataParallel


def give(g_w: Tensor, total: Tensor | None) -> Tensor | None:
    """A weight's gradient, as backward returns it: None where it is added to ``total`` instead."""
    if total is None:
        return g_w
    with _adding(total):
        total += g_w
    return None


def multiply_gradient(
    g_t: tuple[Any, Any], x_t: tuple[Any, Any], plan: Plan, dtype: torch.dtype, total: Tensor | None
) -> Tensor | None:
    """``give`` of g_t [N, M] times x_t [K, M] transposed, FP8 parts, to a total [N, K]."""
    (a, scale_a), (b, scale_b), ops = g_t, x_t, torch.ops.float8
    args = a, b.t(), scale_a, scale_b.t(), plan.a.block, plan.b.block[::-1]
    return give_product(ops.scaled_mm, ops.scaled_mm_add_, args, plan, dtype, total)


def give_product(
    op: Any, add_: Any, args: tuple[Any, ...], plan: Plan, dtype: torch.dtype, total: Tensor | None
) -> Tensor | None:
    """``give`` of the product that ``op`` makes of args; in one launch, by ``add_``, where the
    total lies as a product does."""
    last = plan.fast_accum, plan.impl
    if total is not None and total.is_contiguous():
        with _adding(total):
            add_(total, *args, *last)
        return None
    return give(op(*args, dtype if total is None else total.dtype, *last), total)


def _adding(total: Tensor) -> AbstractContextManager[Any]:
    """What to add to a total in: on a CPU each thread that calls backward adds by itself.

    Raises RuntimeError in a backward that is not to give the gradient which is about to be added.
    (Of compiled code only the end of the block can tell.)"""
    of = getattr(total if total._base is None else total._base, "_total", None)
    if of is None or of.node is None:  # compiled, or of a block that has ended
        return nullcontext()
    try:
        asked = torch._C._will_engine_execute_node(of.node)
    except RuntimeError:  # torch.autograd.grad of the weight, to which nothing could be returned
        asked = False
    if not asked:
        of.refused = True  # for good: other weights' products may have been added before
        _refuse_partial(of.weight)
    return of.lock  # type: ignore[no-any-return]


class _Total:
    """A weight and the sum of its gradients. Autograd passes the weight in each backward that is to
    give it one, after all that adds to the sum, although there is nothing for it to take."""

    def __init__(self, weight: Tensor, total: Tensor) -> None:
        self.weight, self.passed, self.closed, self.version = weight, False, False, 0
        self.refused, self.lock = False, threading.Lock()
        self.node: Any = get_gradient_edge(weight).node  # held, as autograd would make another
        hook = self.node.register_prehook(self.see)
        # Whoever holds the node for good would hold the sums of all blocks.
        self.sum = weakref.ref(total, lambda _: hook.remove())

    def see(self, gradients: Any) -> None:
        total = self.sum()
        if total is None:
            return
        if self.closed and self.version != total._version:
            raise RuntimeError(
                "a backward after the block of float8.cached_weights(accumulate=...) in which its "
                "forward ran adds to sums that are in .grad already; run it inside of the block"
            )
        with self.lock:
            self.passed, self.version = True, total._version

    def close(self, total: Tensor) -> None:
        """Graphs may still wait, and hold the node. Compiled ones then see another version."""
        torch.autograd.graph.increment_version(total)
        self.closed, self.version, self.node = True, total._version, None

    def give(self, total: Tensor) -> None:
        weight, grad = self.weight, self.weight.grad
        if not self.passed:
            return
        if grad is not None and grad.layout == torch.strided:
            grad += total
        else:  # a sparse one, that of a tied embedding, is only added to a dense one
            total = total if grad is None else total + grad
            dtype = weight.grad_dtype or weight.dtype
            weight.grad = total.to(dtype).data  # which counts its own versions


class Totals:
    """The sums of a block of ``float8.cached_weights``; without a dtype there are none."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        if dtype not in (None, *HIGH_PRECISION):
            raise ValueError(
                f"accumulate={dtype} must be one of {names(HIGH_PRECISION)}, or None to leave "
                "gradients to autograd"
            )
        self.dtype, self.of = dtype, dict[int, Any]()  # by the weight's id, with its _Total

    def begin(self, weight: Tensor) -> Tensor | None:
        """What gradients of the weight are to be added to."""
        if self.dtype is None or not weight.requires_grad or torch.is_inference_mode_enabled():
            return None
        total: Any = self.of.get(id(weight))
        if total is None:
            total = torch.zeros(weight.shape, dtype=self.dtype, device=weight.device)
            total._total, self.of[id(weight)] = _Total(weight, total), total
        return total  # type: ignore[no-any-return]

    def check_model(self, model: nn.Module) -> None:
        if self.dtype is not None and any(isinstance(m, _DDP) for m in model.modules()):
            _refuse_ddp()

    def check_weight(self, title: str, weight: Any) -> None:
        hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
        if self.dtype is not None and hooks:
            raise ValueError(
                f"{title} has a weight with hooks on its gradient, which accumulate= keeps from "
                "autograd until the end of the block; leave accumulate out"
            )

    def check_step(self, parameters: set[int]) -> None:
        if not parameters.isdisjoint(self.of):
            raise RuntimeError(
                "an optimiser stepped inside of float8.cached_weights(accumulate=...), whose end "
                "is what puts gradients into .grad; leave the block before the step"
            )

    def check_end(self) -> None:
        for total in self.of.values():
            if total._total.refused or total._total.version != total._version:
                _refuse_partial(total._total.weight)

    def close(self) -> None:
        for total in self.of.values():
            total._total.close(total)

    @torch.no_grad()
    def give(self) -> None:
        """Put the sums into ``.grad``, one by one, so that each is free before the next."""
        while self.of:
            _, total = self.of.popitem()
            total._total.give(total)


def check_no_ddp() -> None:
    """In a forward that adds to a sum."""
    if _DDP._active_ddp_module is not None:
        _refuse_ddp()


def _refuse_ddp() -> None:
    raise ValueError(
        "DistributedDataParallel averages gradients as autograd gets them, which accumulate= keeps "
        "from it; leave accumulate out"
    )


def _refuse_partial(weight: Tensor) -> NoReturn:
    raise RuntimeError(
        "a backward inside of float8.cached_weights(accumulate=...) went past a weight (shape "
        f"{tuple(weight.shape)}) whose gradient was not asked for, as torch.autograd.grad and "
        "backward(inputs=...) do, and would be a part of the sum; leave accumulate out"
    )
