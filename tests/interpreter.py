"""Triton's interpreter with exact casts, to compare kernels byte for byte without a GPU.

As shipped (Triton 3.6 to 3.9) it loses the carry of a cast to FP8 that rounds up to a power of two,
breaks ties upwards, cuts off what bfloat16 does not hold, and knows no FNUZ format. It also spends
up to half of its time on exchanging the language's functions for its own at every call of a device
function, where the launch has done so. conftest.py switches it on.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from tracing import traced_once

from float8.formats import FORMATS

_FP8 = {getattr(tl, fmt.triton): fmt for fmt in FORMATS if fmt.kind != "e8m0"}
_HIGH = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}
_BITS = {1: np.uint8, 2: np.int16, 4: np.int32}
_convert = interpreter._convert_float


def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Casts to FP8 saturate, as the hardware's conversions do; torch rounds."""
    to_bfloat16 = source == tl.float32 and target == tl.bfloat16
    if not to_bfloat16 and (source not in _HIGH or target not in _FP8):
        return _convert(data, source, target, rounding)
    bits = np.ascontiguousarray(data).view(_BITS[_HIGH[source].itemsize])
    values = torch.from_numpy(bits.copy()).view(_HIGH[source]).to(torch.float32)
    if to_bfloat16:
        cast = values.to(torch.bfloat16).view(torch.uint16)
    else:
        fmt = _FP8[target]
        cast = values.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    return cast.numpy().reshape(np.shape(data))


interpreter._convert_float = convert
_patch_core = interpreter._patch_lang_core


def _patch_lang_core(language: Any, scope: Any) -> None:
    _patch_core(language, scope)
    known = language.dtype.to_ir

    def to_ir(self: Any, builder: Any) -> Any:
        if self.name in ("fp8e4b8", "fp8e5b16"):
            return getattr(builder, f"get_{self.name}_ty")()
        return known(self, builder)

    scope.set_attr(language.dtype, "to_ir", to_ir)
    # That of Triton 3.6 takes no array of one element, with numpy 2.4.
    index = lambda self: int(self.handle.data.squeeze())  # noqa: E731
    scope.set_attr(language.tensor, "__index__", index)


interpreter._patch_lang_core = _patch_lang_core


_exchange, _execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
_exchanged: set[int] = set()  # globals of functions that the launch has come to


def _patch_lang(function: Any) -> Any:
    """What is exchanged depends on the modules that a function sees, which are its globals."""
    if id(function.__globals__) in _exchanged:
        return interpreter._LangPatchScope()
    _exchanged.add(id(function.__globals__))
    return _exchange(function)


def _execute_grid(self: Any, *args: Any, **kwargs: Any) -> None:
    _exchanged.clear()  # at the end of a launch the language gets its functions back
    given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
    constants = {n: v for n, v in given.items() if n in self.constexprs or v is None}
    traced_once((self.fn, repr(constants)), _execute, self, *args, **kwargs)


interpreter._patch_lang = _patch_lang
interpreter.GridExecutor.__call__ = _execute_grid
