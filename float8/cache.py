"""FP8 copies of weights that do not change for a while: ``cached_weights``.

Letters: N out features, K in features of a layer; R rows, C columns of a parameter that modules
multiply in their own ways.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from .kernels.quantize import CastPlan
from .linear import Cached, Float8Linear, cast_layouts
from .recipe import Recipe
from .sites import check_module, float8_weight, is_distributed, title
from .tensor import Float8TrainingTensor
from .weight import Float8Weight


def _made_of(weight: Tensor) -> tuple[object, ...]:
    """What changes with a weight's values. Assigning ``.data``, as ``.to()`` does, leaves the
    version as it is, but not the memory or its reading."""
    memory = weight.untyped_storage()._cdata, weight.storage_offset()
    return weight._version, *memory, weight.shape, weight.stride(), weight.dtype


class CachedWeight(NamedTuple):
    """A weight's FP8 copies for forward [N, K] and dgrad [K, N] (None where that GEMM is in high
    precision), and what they were made of."""

    w_NK: Float8TrainingTensor | None
    w_KN: Float8TrainingTensor | None
    weight: Tensor
    storage: torch.UntypedStorage  # held, so that no other gets its address
    made_of: tuple[object, ...]
    recipe: Recipe

    @staticmethod
    @torch.no_grad()
    def of(weight: Tensor, recipe: Recipe) -> CachedWeight:
        forward, dgrad, _ = recipe.plan(weight.device)
        w, w_t = cast_layouts(weight, forward and forward.b, dgrad and dgrad.b)
        w_NK = None if forward is None else Float8TrainingTensor(*w, forward.b.block, weight.dtype)
        w_KN = None if dgrad is None else Float8TrainingTensor(*w_t, dgrad.b.block, weight.dtype)
        return CachedWeight(w_NK, w_KN, weight, weight.untyped_storage(), _made_of(weight), recipe)

    def check(self, weight: Tensor, recipe: Recipe) -> None:
        """Raise RuntimeError unless the copies are of this weight as it is now, made for this
        recipe. What is written through ``weight.data`` in place (``weight.data.mul_(2)``) leaves no
        trace and is not seen."""
        if weight is not self.weight or recipe != self.recipe or _made_of(weight) != self.made_of:
            _raise_changed(weight)


def _raise_changed(weight: Tensor) -> None:
    raise RuntimeError(
        f"the weight (shape {tuple(weight.shape)}) or the recipe of a layer changed inside "
        "float8.cached_weights, whose FP8 copies are of the old one; leave the block before "
        "the optimiser's step, loading, .to() or a new recipe"
    )


class CachedFloat8Weight(NamedTuple):
    """FP8 copies of a Float8Weight [(E,) R, C] (False) and of its transpose (True), each cast as
    forward casts weights and as dgrad does: R may be N or K. Most recipes cast them alike, which
    makes two copies."""

    copies: dict[tuple[bool, CastPlan], Float8TrainingTensor]
    weight: Float8Weight
    original: Tensor
    storage: torch.UntypedStorage  # held, so that no other gets its address
    made_of: tuple[object, ...]
    version: int  # of the Float8Weight, which changes in place of its views move

    @staticmethod
    @torch.no_grad()
    def of(weight: Float8Weight) -> CachedFloat8Weight:
        copies: dict[tuple[bool, CastPlan], Float8TrainingTensor] = {}
        original = weight.original
        for gemm in weight.recipe.plan(weight.device)[:2]:
            if gemm is not None and (False, gemm.b) not in copies:
                block = (*(1,) * (original.ndim - 2), *gemm.b.block)
                cast = CastPlan(block, gemm.b.dtype, gemm.b.scale_mode)
                for transposed, parts in enumerate(cast_layouts(original, cast, cast)):
                    copy = Float8TrainingTensor(*parts, block, weight.dtype)
                    copies[bool(transposed), gemm.b] = copy
        made_of, version = _made_of(original), weight._version
        return CachedFloat8Weight(
            copies, weight, original, original.untyped_storage(), made_of, version
        )

    def find(self, view: Float8Weight) -> Cached:
        """Copies for forward and dgrad of a view [.., N, K] that is the whole or one matrix of it,
        as it is or transposed; Nones for another, or for what a cast made of it, which are cast at
        use. RuntimeError if the weight has changed."""
        v = view.original
        for transposed in (False, True):
            whole = self.original.mT if transposed else self.original
            inner = whole.ndim - v.ndim
            if (v.shape, v.stride()) != (whole.shape[inner:], whole.stride()[inner:]):
                continue
            if v.untyped_storage()._cdata != self.storage._cdata or v.dtype != whole.dtype:
                continue
            step = whole.stride(0) or 1  # 0 where one matrix is expanded
            e, rest = divmod(int(v.storage_offset() - whole.storage_offset()), step)
            if rest or not 0 <= e < (len(whole) if inner else 1):
                continue
            changed = self.version != self.weight._version or self.made_of != _made_of(
                self.original
            )
            if changed or view.recipe != self.weight.recipe:
                _raise_changed(self.weight)
            forward, dgrad, _ = view.recipe.plan(v.device)
            found = (
                None if forward is None else self.copies.get((transposed, forward.b)),
                None if dgrad is None else self.copies.get((not transposed, dgrad.b)),
            )
            return (_matrix(found[0], e), _matrix(found[1], e)) if inner else found
        return None, None


def _matrix(stack: Float8TrainingTensor | None, e: int) -> Float8TrainingTensor | None:
    if stack is None:
        return None
    return Float8TrainingTensor(stack.qdata[e], stack.scale[e], stack.block[1:], stack.dtype)


def _count_steps(weights: set[int]) -> RemovableHandle:
    """Let every optimiser's step move the versions of these weights: fused ones do not."""

    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if id(p) in weights and p.grad is not None:
                torch.autograd.graph.increment_version(p)

    return register_optimizer_step_post_hook(count)


@contextlib.contextmanager
def cached_weights(model: nn.Module) -> Iterator[None]:
    """Within the block, Float8Linears and Float8Weights multiply FP8 copies of their weights that
    are made here, once, in both layouts (2 bytes per weight): for the micro-batches of one
    optimiser step. Copies and pickles of the model come without them.

        with float8.cached_weights(model):
            for batch in micro_batches:
                loss(model(batch)).backward()
        optimizer.step()

    Results are the same bits as without. A weight that changes meanwhile makes the next eager
    forward raise RuntimeError, with two exceptions: compiled code cannot check, and a change in
    place through ``weight.data``, as ``weight.data.mul_(2)``, cannot be seen.

    Of a Float8Weight, such as a stack of experts, the copies serve products with it, with its
    transpose and with one matrix of either. Other views (``chunk``), what ``.to(dtype)`` makes of
    it, and compiled code are cast at each use, as without.

    Raises:
        ValueError: there is nothing in FP8, a weight is cached already (blocks do not nest), or
            sharded.
    """
    check_module(model, "cached_weights")
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, Float8Linear)]
    found = ((n, p, float8_weight(p)) for n, p in model.named_parameters())
    others = [(n, p, w) for n, p, w in found if w is not None and w.ndim in (2, 3)]
    # Who is to have copies, of what.
    holders: list[tuple[str, Any, Tensor]] = [(name, m, m.weight) for name, m in layers]
    holders += [(name, w.record, p) for name, p, w in others]
    if not holders:
        raise ValueError(
            "this model has no Float8Linear and no Float8Weight; float8.convert(model) first"
        )
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
    copies: dict[tuple[int, Recipe], CachedWeight] = {}  # a tied weight is cast once
    counting = _count_steps({id(weight) for _, _, weight in holders})
    try:
        for _, layer in layers:
            key = id(layer.weight), layer.recipe
            if key not in copies:
                copies[key] = CachedWeight.of(layer.weight, layer.recipe)
            layer.cached = copies[key]
        for _, _, weight in others:
            weight.record.cached = CachedFloat8Weight.of(weight)
        yield
    finally:
        counting.remove()
        for _, holder, _ in holders:
            holder.__dict__.pop("cached", None)
