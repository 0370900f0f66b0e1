"""A process group of this process alone, for what torch.distributed does to a model."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        # A thread of the group lets go of its last work a moment after that is done, and needs the
        # GIL for it, which this thread keeps while it waits for the group's threads to end.
        time.sleep(0.2)
        dist.destroy_process_group()
