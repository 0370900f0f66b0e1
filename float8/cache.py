"""FP8 copies of weights that do not change for a while: ``cached_weights``.

Letters: N out features, K in features of a layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .linear import Float8Linear, cast_layouts
from .recipe import Recipe
from .sites import check_module, is_distributed, title
from .tensor import Float8TrainingTensor


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
        if weight is self.weight and recipe == self.recipe and _made_of(weight) == self.made_of:
            return
        raise RuntimeError(
            f"the weight (shape {tuple(weight.shape)}) or the recipe of a layer changed inside "
            "float8.cached_weights, whose FP8 copies are of the old one; leave the block before "
            "the optimiser's step, loading, .to() or a new recipe"
        )


@contextlib.contextmanager
def cached_weights(model: nn.Module) -> Iterator[None]:
    """Within the block, Float8Linears multiply FP8 copies of their weights that are made here,
    once, in both layouts (2 bytes per weight): for the micro-batches of one optimiser step.
    Copies and pickles of the model come without them.

        with float8.cached_weights(model):
            for batch in micro_batches:
                loss(model(batch)).backward()
        optimizer.step()

    Results are the same bits as without. A weight that changes meanwhile makes the next eager
    forward raise RuntimeError, with two exceptions: compiled code cannot check, and a change in
    place through ``weight.data``, as ``weight.data.mul_(2)``, cannot be seen. Float8Weights are
    cast at each use, as always.

    Raises:
        ValueError: there is no Float8Linear, the weight of one is cached already (blocks do not
            nest), or sharded.
    """
    check_module(model, "cached_weights")
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, Float8Linear)]
    if not layers:
        raise ValueError("this model has no Float8Linear; float8.convert(model) first")
    for name, layer in layers:
        if layer.cached is not None:
            raise ValueError(
                f"{title(name)} has a cached weight; cached_weights does not nest, so leave the "
                "outer block first"
            )
        if is_distributed(type(layer.weight)):
            raise ValueError(
                f"{title(name)} has a sharded weight ({type(layer.weight).__name__}), of which "
                "there is no whole to cast; train without cached_weights"
            )
    copies: dict[tuple[int, Recipe], CachedWeight] = {}  # a tied weight is cast once
    try:
        for _, layer in layers:
            key = id(layer.weight), layer.recipe
            if key not in copies:
                copies[key] = CachedWeight.of(layer.weight, layer.recipe)
            layer.cached = copies[key]
        yield
    finally:
        for _, layer in layers:
            layer.__dict__.pop("cached", None)
