"""Helpers to judge FP8 results, for our tests and for yours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from .devices import device_profile

Need = Literal["cuda", "fp8", "two_gpus"]
Kernels = Literal["casts", "casts of groups", "products", "tokens", "fused", "fused groups"]

_MAIN: tuple[Kernels, ...] = ("casts", "casts of groups", "products", "tokens")
_ALL: tuple[Kernels, ...] = (*_MAIN, "fused", "fused groups")
# The GPUs with FP8 that tests compile for, and the kernels that they compile for each. Casts that
# are fused with their producers take most of a minute for each target and are the plain casts' code
# behind some arithmetic, so three targets have the plain ones alone. gfx1200 and gfx1201 are left
# out, as no product is made for them; Hopper's own products are compiled for sm_90 by their tests.
TARGETS: dict[str, tuple[Kernels, ...]] = {
    "sm_89": _MAIN,
    "sm_90": _ALL,
    "sm_100": _ALL,
    "sm_103": _MAIN,
    "sm_120": _MAIN,
    "gfx942": _ALL,
    "gfx950": _ALL,
}


def sqnr(x: Tensor, reference: Tensor) -> float:
    """Signal to quantisation noise in dB: ``20 log10(|reference| / |x - reference|)``; inf if
    equal, -inf where x alone has an Inf, nan with NaN.

    e4m3 casts of normal data reach about 31 dB, GEMMs of two such operands 28, e5m2 ones 25.
    """
    x64, r64 = x.detach().double(), reference.detach().double()
    noise, signal = (x64 - r64).norm().item(), r64.norm().item()
    if noise == 0.0:
        return math.inf
    ratio = max(signal, 1e-300) / noise
    return -math.inf if ratio == 0.0 else 20 * math.log10(ratio)


def relative_error(x: Tensor, truth: Tensor) -> float:
    """``|x - truth| / |truth|`` in float64; 0 / 0 is 0."""
    x64, t64 = x.detach().double().cpu(), truth.detach().double().cpu()
    noise = (x64 - t64).norm().item()
    return 0.0 if noise == 0.0 else noise / max(t64.norm().item(), 1e-300)


def assert_no_worse_than(x: Tensor, truth: Tensor, baseline: Tensor, factor: float = 2.0) -> None:
    """Fail unless x is about as near to ``truth`` (float32 or float64) as ``baseline`` of x's own
    kind of arithmetic is.

    ``error(x) <= factor * error(baseline) + 1e-6``, errors as ``relative_error``.
    """
    assert x.shape == truth.shape == baseline.shape, (x.shape, truth.shape, baseline.shape)
    error, allowed = relative_error(x, truth), factor * relative_error(baseline, truth) + 1e-6
    assert error <= allowed, (
        f"relative error {error:.3e}, allowed {allowed:.3e} ({factor} x the baseline's)"
    )


def assert_same_bytes(a: Tensor, b: Tensor) -> None:
    """Fail unless two tensors have the same dtype, shape and bits (NaN equals the same NaN)."""
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    assert a.shape == b.shape, (a.shape, b.shape)
    if a.numel() == 0:
        return
    # A single element may have any stride, and contiguous() keeps it.
    packed = (t.detach().cpu().clone(memory_format=torch.contiguous_format) for t in (a, b))
    left, right = (t.reshape(-1).view(torch.uint8) for t in packed)
    if not torch.equal(left, right):
        different = (left != right).reshape(-1, a.dtype.itemsize).any(1).sum().item()
        raise AssertionError(f"{different} of {a.numel()} elements differ in their bits")


def missing(need: Need) -> str | None:
    """Why this machine cannot run a test with the given need, or None."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    if (
        need == "fp8"
        and (reason := device_profile(torch.device("cuda")).refusal("mm_tensorwise")) is not None
    ):
        return f"needs FP8 matmuls: {reason}"
    if need == "two_gpus" and torch.cuda.device_count() < 2:
        return "needs two GPUs"
    return None


def needs(need: Need) -> Any:
    """pytest mark that skips a test, with the reason, where this machine cannot run it."""
    import pytest

    reason = missing(need)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def targets(kernels: Kernels) -> list[str]:
    """The architectures that ``kernels`` are compiled for in tests."""
    return [arch for arch, compiled in TARGETS.items() if kernels in compiled]


@contextmanager
def saved_bytes() -> Iterator[Callable[[], int]]:
    """Count the bytes that autograd saves for backward within the block, each storage once,
    parameters left out.

    with saved_bytes() as total:
        y = layer(x)
    assert total() <= x.numel()
    """
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if not isinstance(t, torch.nn.Parameter):
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield lambda: sum(seen.values())


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms, under which torch fills empty tensors with NaN: a read of memory
    that nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
