"""What holds for every test: a fixed seed, no compiled code left over from another test, a process
for each core."""

import gc
import importlib.util
import os
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Read when triton is first imported, which inductor may do in any test.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:  # other cores have tests of their own
    os.environ["OMP_NUM_THREADS"] = "1"  # of what a test starts
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else a pool of processes for each of ours
    torch.set_num_threads(1)

if importlib.util.find_spec("expecttest") is None:
    # It pins the text of errors in most files. Where it cannot be installed (a GPU machine without
    # network), comparing is enough; only rewriting the expected text needs the real one.
    def assert_expected_inline(actual: str, expect: str, skip: int = 0) -> None:
        assert actual == expect

    class TestCase(unittest.TestCase):
        def assertExpectedInline(self, actual: str, expect: str, skip: int = 0) -> None:
            self.assertMultiLineEqual(expect, actual)

    stand_in = types.ModuleType("expecttest")
    vars(stand_in).update(assert_expected_inline=assert_expected_inline, TestCase=TestCase)
    sys.modules["expecttest"] = stand_in


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deterministic",
        action="store_true",
        help="deterministic algorithms: empty tensors are filled with NaN, so that a read of "
        "memory that nobody wrote shows",
    )


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes for ``-n auto``. None but this one for a single file: to start them takes seconds.
    At most 16: on a GPU each needs memory."""
    files = {Path(argument.split("::")[0]) for argument in config.args}
    most = len(files) if all(path.is_file() for path in files) else 16
    return min(os.cpu_count() or 1, most) if most > 1 else 0


def pytest_collection_finish() -> None:
    """What imports have made stays: walking it for garbage takes a sixth of the time that the
    compiler's tests take."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def deterministic_algorithms(request: pytest.FixtureRequest) -> Iterator[None]:
    """What `--deterministic` asks for, around every test."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or request.config.getoption("--deterministic"))
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Random inputs are the same in every run and in any order of the tests."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget compiled code and counters after a test; free when nothing imported the compiler."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
        dynamo.utils.counters.clear()
