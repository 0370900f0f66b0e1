"""FP8 copies of weights that do not change for a while: ``cached_weights``.

Letters: N out features, K in features of a layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from .devices import assumed_device
from .kernels.quantize import CastPlan
from .linear import NOT_CACHED, Cached, Float8Linear, cast_layouts
from .recipe import Recipe
from .sites import check_module, float8_weight, is_distributed, title
from .tensor import Float8TrainingTensor
from .totals import Totals, check_no_ddp
from .weight import Copies, Float8Weight


class CachedWeight:
    """That there are FP8 copies of a weight, and what they were made of; those of a layer's weight
    are here, those of a Float8Weight are with it and its views.

    Args:
        weight: a parameter.
        recipe: by which it was cast.
        copies: for forward [N, K] and for dgrad [K, N], None where that GEMM is in high precision.
    """

    def __init__(self, weight: Tensor, recipe: Recipe, copies: Cached = NOT_CACHED) -> None:
        self.weight, self.recipe = weight, recipe
        self.w_NK, self.w_KN, self.total = copies
        self.original = weight.original if isinstance(weight, Float8Weight) else weight
        self.storage = self.original.untyped_storage()  # held, so that no other gets its address
        self.made_of = self._made_of()
        self.assumed = assumed_device()
        self.stale = False

    @staticmethod
    @torch.no_grad()
    def of(weight: Tensor, recipe: Recipe, total: Tensor | None = None) -> CachedWeight:
        """With copies of a layer's weight."""
        forward, dgrad, _ = recipe.plan(weight.device)
        w, w_t = cast_layouts(weight, forward and forward.b, dgrad and dgrad.b)
        w_NK = None if forward is None else Float8TrainingTensor(*w, forward.b.block, weight.dtype)
        w_KN = None if dgrad is None else Float8TrainingTensor(*w_t, dgrad.b.block, weight.dtype)
        return CachedWeight(weight, recipe, (w_NK, w_KN, total))

    def has_changed(self) -> bool:
        """Whether the weight is, or was once, not what the copies are of. What is written through
        ``weight.data`` in place (``weight.data.mul_(2)``) leaves no trace and is not seen."""
        self.stale = self.stale or self.made_of != self._made_of()
        return self.stale

    def _made_of(self) -> tuple[object, ...]:
        """What changes with the weight's values. Assigning ``.data``, as ``.to()`` does, leaves the
        version as it is, but not the memory or its reading. In place of a Float8Weight's views its
        own version moves."""
        t = self.original
        memory = t.untyped_storage()._cdata, t.storage_offset()
        return self.weight._version, t._version, *memory, t.shape, t.stride(), t.dtype

    def check(self, weight: Tensor, recipe: Recipe) -> None:
        """Raise RuntimeError unless the copies are of this weight as it is now, by this recipe."""
        if self.total is not None:
            check_no_ddp()
        # Compiled code is guarded on all of this but has_changed.
        changed = self.stale or (not torch.compiler.is_compiling() and self.has_changed())
        other = weight is not self.weight and not isinstance(weight, Float8Weight)  # or a view
        if changed or other or recipe != self.recipe or assumed_device() != self.assumed:
            _raise_changed(weight)


def _raise_changed(weight: Tensor) -> None:
    raise RuntimeError(
        f"the weight (shape {tuple(weight.shape)}), the recipe or the assumed device of a layer "
        "changed inside float8.cached_weights, whose FP8 copies are of the old one; leave the "
        "block before the optimiser's step, loading, .to(), a new recipe or assume_device"
    )


@torch.no_grad()
def _copies(weight: Float8Weight) -> tuple[Float8TrainingTensor | None, ...]:
    """The parts of ``Copies``: either layout may be what a module multiplies by."""
    forward, dgrad, _ = weight.recipe.plan(weight.device)
    casts = [gemm and gemm.b for gemm in (forward, dgrad)]
    copies: list[Float8TrainingTensor | None] = []
    for cast in casts[:1] if casts[0] == casts[1] else casts:
        if cast is None:
            copies += None, None
            continue
        block = (*(1,) * (weight.ndim - 2), *cast.block)
        plan = CastPlan(block, cast.dtype, cast.scale_mode)
        for parts in cast_layouts(weight.original, plan, plan):
            copies.append(Float8TrainingTensor(*parts, block, weight.dtype))
    return tuple(copies)


def _watch_steps(made: Mapping[Any, CachedWeight], totals: Totals) -> RemovableHandle:
    """Let optimisers' steps be seen at once, by compiled code too; fused ones move no version."""

    def mark(optimizer: Any, args: Any, kwargs: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        totals.check_step({id(p) for p in params})
        stepped = {id(p) for p in params if p.grad is not None}
        for cached in made.values():
            cached.stale = cached.stale or id(cached.weight) in stepped

    return register_optimizer_step_post_hook(mark)


@contextlib.contextmanager
def cached_weights(model: nn.Module, *, accumulate: torch.dtype | None = None) -> Iterator[None]:
    """Within the block, Float8Linears and Float8Weights multiply FP8 copies of their weights that
    are made here, once, in both layouts (2 bytes per weight): for the micro-batches of one
    optimiser step, in eager and in compiled code. Copies and pickles of the model come without
    them.

        with float8.cached_weights(model):
            for batch in micro_batches:
                loss(model(batch)).backward()
        optimizer.step()

    Results are the same bits as without. A weight that changes meanwhile makes the next forward
    raise RuntimeError; where compiled code cannot tell (it has changed the weight itself, or a
    layer's weight was changed by something else than an optimiser of torch), the end of the block
    does. A change in place through ``weight.data``, as ``weight.data.mul_(2)``, cannot be seen.

    Of a Float8Weight, such as a stack of experts, the copies serve products with it, with its
    transpose and with one matrix of either. Other views (``chunk``), what ``.to(dtype)`` makes of
    it, and weights that are computed at each use (parametrized, pruned) are cast then, as without.

    torch.compile takes the copies as inputs of its graphs: code is compiled once for use inside of
    blocks and once for use outside, whatever the weights hold.

    With ``accumulate``, the products that make gradients of these weights add them up in that
    dtype: torch.bfloat16 saves autograd's passes over them; in torch.float32 no micro-batch rounds
    their sum. ``.grad`` is as it was until the end of the block puts the sums there, or adds them
    to what it holds; an exception leaves it so. Gradients that come by other ways (of
    views without copies, of other parameters) go to ``.grad`` as ever. Every backward in the block
    is to be a whole one, and in compiled code to come before the next forward; a call of compiled
    code may be given one view of a weight, and more are taken inside of it. Threads may call
    backward at once, but not of compiled code.

    Raises:
        ValueError: there is nothing in FP8, a weight is cached already (blocks do not nest), or
            sharded; or ``accumulate`` is no such dtype, a weight has hooks on its gradient, or the
            model is in a DistributedDataParallel, which would see no gradient. Of one around the
            model the first forward that it runs tells.
        RuntimeError: with ``accumulate``, an optimiser steps in the block; a backward does not ask
            for a weight's gradient, which of compiled code only the end of the block tells, if no
            whole backward followed (and of Inductor's products with single matrices of a stack
            nothing does); or runs after the block.
        NotImplementedError: the block is entered in code that torch.compile traces.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "float8.cached_weights is entered in code that torch.compile traces; enter it outside, "
            "and call compiled code inside of the block"
        )
    totals = Totals(accumulate)
    layers, weights = _find(model, totals)
    records = [w.record for w in weights]
    made: dict[tuple[int, Recipe], CachedWeight] = {}  # a tied weight is cast once
    watching = _watch_steps(made, totals)
    try:
        for layer in layers:
            key = id(layer.weight), layer.recipe
            if key not in made:
                made[key] = CachedWeight.of(layer.weight, layer.recipe, totals.begin(layer.weight))
            layer.cached = made[key]
        for w in weights:
            total = totals.begin(w)
            cached = made[id(w), w.recipe] = CachedWeight(w, w.recipe, (None, None, total))
            w.copies, w.record.cached = Copies(cached, _copies(w), total), cached
        yield
        if not any(cached.stale for cached in made.values()):  # else it has been said
            if (changed := next((c for c in made.values() if c.has_changed()), None)) is not None:
                _raise_changed(changed.weight)
        totals.check_end()
    finally:
        watching.remove()
        for holder in (*layers, *records):
            holder.__dict__.pop("cached", None)
        for w in weights:
            w.__dict__.pop("copies", None)
        for cached in made.values():
            vars(cached).clear()  # compiled code keeps it, and would keep the weight
        totals.close()
    totals.give()


def _find(model: nn.Module, totals: Totals) -> tuple[list[Float8Linear], list[Float8Weight]]:
    """What is to have copies; raises unless all of it can."""
    check_module(model, "cached_weights")
    totals.check_model(model)
    linears = ((n, m) for n, m in model.named_modules() if isinstance(m, Float8Linear))
    layers = [(n, m, m.weight) for n, m in linears if "weight" in m._parameters]
    found = ((n, p, float8_weight(p)) for n, p in model.named_parameters())
    weights = [(n, w, p) for n, p, w in found if w is not None and w.ndim in (2, 3)]
    if not layers and not weights:
        raise ValueError(
            "this model has no Float8Linear and no Float8Weight; float8.convert(model) first"
        )
    holders: list[tuple[str, Any, Tensor]] = [*layers, *((n, w.record, p) for n, w, p in weights)]
    for name, holder, weight in holders:
        if holder.cached is not None:
            raise ValueError(
                f"{title(name)} has a cached weight; cached_weights does not nest, so leave the "
                "outer block first"
            )
        if is_distributed(type(weight)):
            raise ValueError(
                f"{title(name)} has a sharded weight ({type(weight).__name__}), of which there is "
                "no whole to cast; train without cached_weights"
            )
        totals.check_weight(title(name), weight)
    return [layer for _, layer, _ in layers], [w for _, w, _ in weights]
