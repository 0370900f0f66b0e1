"""Device code that is interpreted or emulated takes two to three times as long under coverage."""

import sys
import threading
from collections.abc import Callable
from typing import Any

_seen: set[object] = set()


def traced_once(kind: object, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """``run(*args, **kwargs)``, which a tracer follows the first time only for each ``kind``."""
    tracer, of_threads = sys.gettrace(), threading.gettrace()
    if tracer is None or kind not in _seen:
        _seen.add(kind)
        return run(*args, **kwargs)
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    try:
        return run(*args, **kwargs)
    finally:
        threading.settrace(of_threads)  # type: ignore[arg-type]
        sys.settrace(tracer)
        _call()  # coverage's tracer counts calls and returns: from here on it sees this one's


def _call() -> None:
    pass
