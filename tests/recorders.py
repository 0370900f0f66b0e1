"""What a call does, written down: which ops of ours run, what kernels are compiled for, and to what
machine code for a GPU that is not here."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    """Counts ops of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "float8":
            name = op.name().removeprefix("float8::")
            self.seen[name] = self.seen.get(name, 0) + 1
        return op(*args, **(kwargs or {}))


class _Kernel:
    """In a kernel's place: adds to ``seen`` what Triton would compile for, and runs nothing."""

    def __init__(self, kernel: Any, seen: set[str]) -> None:
        self.names, self.seen = kernel.arg_names, seen
        self.left_out = getattr(kernel, "kwargs", {}).get("do_not_specialize", ())
        if hasattr(kernel, "params"):
            self.left_out = [p.name for p in kernel.params if p.do_not_specialize]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def record(*args: Any, **constants: Any) -> None:
            # A prepared kernel is given them by position.
            assert [n for n in constants if n in self.names] == self.names[len(args) :]
            key = dict(constants)
            for name, value in zip(self.names, args, strict=False):
                if isinstance(value, int) and name not in self.left_out:
                    key[name] = "1" if value == 1 else value % 16 == 0
            self.seen.add(str(key))

        return record


def specialisations(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, names: Iterable[str]
) -> dict[str, set[str]]:
    """What each of a module's kernels is compiled for from here on: constants, and of each size
    that Triton specialises on whether it is 1 or a multiple of 16."""
    seen: dict[str, set[str]] = {name: set() for name in names}
    for name, keys in seen.items():
        monkeypatch.setattr(module, name, _Kernel(getattr(module, name), keys))
    return seen


def machine_code(program: str, *arguments: str) -> list[dict[str, Any]]:
    """What a program of this folder finds in the machine code of each kernel that it compiles."""
    command = [sys.executable, str(Path(__file__).with_name(program)), *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]
