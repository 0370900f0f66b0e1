"""What holds for every test: a fixed seed, and no compiled code left over from another test."""

import sys
from collections.abc import Iterator

import pytest
import torch


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
