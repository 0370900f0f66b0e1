"""Runs the Gluon matrix product without a GPU: its functions as plain Python, on stand-ins for what
they use of Gluon, so that a lost scale, a forgotten wait or a deadlock shows on a CPU.

Each group of warps is a thread, of which one runs at a time; which one, a seeded generator decides
at every barrier and copy. What hardware does in its own time is done at the worst moment: a load
leaves NaN in its buffer and lands at random; products are computed, and stores read their buffer,
at the wait that orders them. When no thread can go on, that is a deadlock.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from tracing import traced_once
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.runtime.jit import JITFunction

Ready = Callable[[], bool]


class Stopped(Exception):
    """Another thread has failed."""


class Role(threading.local):
    """Of the thread that runs: its number, and what it has begun."""

    number = -1
    unfenced = False

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []


class Machine:
    """One program: its threads, barriers and loads on their way."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.condition = threading.Condition()
        self.waiting: dict[int, Ready] = {}  # by role, until it ends
        self.turn = -1
        self.loads: list[Callable[[], None]] = []
        self.role = Role()
        self.error: BaseException | None = None

    def run(self, roles: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        self.waiting = {i: lambda: True for i in range(len(roles))}
        threads = [
            threading.Thread(target=self._run, args=(i, *role)) for i, role in enumerate(roles)
        ]
        for thread in threads:
            thread.start()
        with self.condition:
            self._choose()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        assert not self.loads, "loads that nobody waited for"

    def _run(self, number: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.role.number = number
        try:
            with self.condition:
                self._await_turn()
            function(*args)
            assert not self.role.products and not self.role.stores, "work that nobody waited for"
        except Stopped:
            pass
        except BaseException as error:
            self.error = self.error or error
        with self.condition:
            del self.waiting[number]
            self._choose()

    def pause(self, ready: Ready = lambda: True) -> None:
        """Let others run; go on when ``ready``."""
        with self.condition:
            self.waiting[self.role.number] = ready
            self._choose()
            self._await_turn()

    def _await_turn(self) -> None:
        self.condition.wait_for(lambda: self.turn == self.role.number or self.error is not None)
        if self.error is not None:
            raise Stopped

    def _choose(self) -> None:
        while self.waiting and self.error is None:
            able = [role for role, ready in self.waiting.items() if ready()]
            choice = self.rng.choice(able + [-1] * bool(self.loads)) if able or self.loads else None
            if choice is None:
                self.error = AssertionError(f"deadlock of roles {sorted(self.waiting)}")
            elif choice == -1:
                self.loads.pop(self.rng.randrange(len(self.loads)))()
            else:
                self.turn = choice
                break
        self.condition.notify_all()


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all bytes that it expects have come."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phases = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def add(self, arrivals: int, expected: int) -> None:
        self.pending -= arrivals
        self.bytes += expected
        assert self.pending >= 0, "more arrivals than the barrier counts"
        assert self.bytes >= 0, "more bytes than were expected"
        if self.pending == self.bytes == 0:
            self.phases, self.pending = self.phases + 1, self.count

    def is_past(self, parity: int) -> bool:
        return self.phases % 2 != parity


class Barriers:
    def __init__(self, n: int) -> None:
        self.all = [Barrier() for _ in range(n)]

    def index(self, i: int) -> Barrier:
        return self.all[i]


def fill_nan(x: Tensor) -> None:
    x.view(torch.uint8).fill_(0x7F if x.element_size() == 1 else 0xFF)


class Shared:
    """Shared memory; begins as NaN."""

    def __init__(self, data: Tensor, machine: Machine) -> None:
        self.data, self.machine = data, machine

    def index(self, i: int) -> Shared:
        assert 0 <= i < self.data.shape[0]
        return Shared(self.data[i], self.machine)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order), self.machine)

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        assert value.shape == self.data.shape and value.dtype == self.data.dtype
        self.machine.role.unfenced = True
        self.data.copy_(value)


class Product:
    """a @ b, plus ``old`` if asked for: operands are read when it is waited for."""

    def __init__(self, a: Shared, b: Shared, old: Any, use_acc: bool) -> None:
        self.a, self.b, self.old, self.use_acc = a, b, old, use_acc
        self.value: Tensor | None = None

    def finish(self) -> None:
        value = self.a.data.double() @ self.b.data.double()
        if self.use_acc:
            value += self.old.value if isinstance(self.old, Product) else self.old
        self.value, self.old = value.float(), None


class Window:
    """What TMA reads and writes through a descriptor."""

    def __init__(self, descriptor: Any) -> None:
        base, self.block, self.layout = descriptor.base, descriptor.block_shape, descriptor.layout
        self.dtype = base.dtype
        self.data = torch.as_strided(base, descriptor.shape, descriptor.strides)
        assert max(self.block) <= 256

    def inside(self, corner: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Of the block at ``corner``, what lies in the matrix: there and in the block."""
        assert corner[-1] * self.dtype.itemsize % 16 == 0, corner
        ends = [
            max(0, min(n - c, b))
            for n, c, b in zip(self.data.shape, corner, self.block, strict=True)
        ]
        there = tuple(slice(c, c + e) for c, e in zip(corner, ends, strict=True))
        return there, tuple(slice(0, e) for e in ends)

    def read(self, corner: list[int]) -> Tensor:
        there, here = self.inside(corner)
        bits = {1: torch.uint8, 4: torch.int32}[self.dtype.itemsize]
        block = torch.zeros(self.block, dtype=bits)
        block[here] = self.data.view(bits)[there]
        return block.view(self.dtype)

    def write(self, corner: list[int], block: Tensor) -> None:
        # TMA writes whole 16 bytes, also where less of a row is left.
        assert self.data.shape[-1] * self.dtype.itemsize % 16 == 0, self.data.shape
        there, here = self.inside(corner)
        self.data[there] = block[here]


class Pointer:
    """A pointer, or a tensor of pointers; reading and writing stays within the tensor's memory."""

    def __init__(self, data: Tensor, at: Any) -> None:
        self.data, self.at = data, at
        self.dtype = SimpleNamespace(element_ty=data.dtype)

    @staticmethod
    def to(x: Tensor) -> Pointer:
        span = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
        return Pointer(torch.as_strided(x, (span,), (1,)), 0)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.at + offset)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        at = torch.as_tensor(self.at)
        mask = torch.as_tensor(True if mask is None else mask)
        at, mask = torch.broadcast_tensors(at, mask)
        assert ((at[mask] >= 0) & (at[mask] < self.data.shape[0])).all(), "outside of the tensor"
        return at, mask

    def load(self, mask: Any = None, other: float = 0.0) -> Any:
        at, mask = self.places(mask)
        loaded = torch.where(mask, self.data[at.where(mask, 0)], other).to(self.data.dtype)
        return loaded if loaded.ndim or loaded.is_floating_point() else int(loaded)

    def store(self, value: Tensor, mask: Any) -> None:
        at, mask = self.places(mask)
        self.data[at[mask]] = value[mask]

    def add(self, value: Tensor, mask: Any, sem: str) -> None:
        at, mask = self.places(mask)
        self.data[at[mask]] += value[mask]


def select(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


def extreme(choose: Callable[..., Tensor], a: Any, b: Any) -> Any:
    chosen = choose(torch.as_tensor(a), torch.as_tensor(b))
    return chosen if chosen.ndim else int(chosen)


class Gluon:
    """What a module imports of Gluon, for one program."""

    def __init__(self, machine: Machine, program: int, programs: int) -> None:
        self.machine, self.program, self.programs = machine, program, programs

    def names(self) -> dict[str, Any]:
        machine = self.machine
        gl = SimpleNamespace(
            float32=torch.float32,
            int32=torch.int32,
            int64=torch.int64,
            program_id=lambda axis: self.program,
            num_programs=lambda axis: self.programs,
            cdiv=lambda a, b: -(-a // b),
            minimum=lambda a, b: extreme(torch.minimum, a, b),
            maximum=lambda a, b: extreme(torch.maximum, a, b),
            associative_scan=lambda x, axis, add: x.cumsum(axis, dtype=x.dtype),
            sum=lambda x, axis: int(x.sum(axis)),
            max=lambda x, axis: int(x.amax(axis)),
            multiple_of=lambda x, n: x,
            where=select,
            to_tensor=lambda x: x,
            static_range=range,
            static_assert=lambda condition: None,
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
            SliceLayout=lambda dim, layout: None,
            split=lambda x: (x[..., 0], x[..., 1]),
            permute=lambda x, order: x.permute(order),
            reshape=lambda x, shape: x.reshape(shape),
            convert_layout=lambda x, layout, assert_trivial: x,
            load=Pointer.load,
            store=Pointer.store,
            atomic_add=Pointer.add,
            allocate_shared_memory=self.allocate,
            warp_specialize=lambda roles, warps, registers: machine.run(roles),
        )
        tma = SimpleNamespace(
            async_copy_global_to_shared=self.load,
            async_copy_shared_to_global=self.store,
            store_wait=self.store_wait,
        )
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: "barriers",
            init=Barrier.init,
            expect=self.expect,
            arrive=self.arrive,
            wait=lambda barrier, parity: machine.pause(lambda: barrier.is_past(parity)),
        )
        return {
            "gl": gl,
            "tma": tma,
            "mbarrier": mbarrier,
            "fence_async_shared": self.fence,
            "warpgroup_mma": self.begin,
            "warpgroup_mma_wait": self.wait,
            "_sums": lambda columns: None,
            "_line": lambda: None,
            "_spread": lambda: None,
            "_each": lambda warps: None,
            "_lines": lambda columns, element: None,
            "_vector": lambda element: 16 // element.itemsize,
        }

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            return Barriers(shape[0])
        data = torch.empty(shape, dtype=dtype)
        fill_nan(data)
        return Shared(data, self.machine)

    def load(self, window: Window, corner: list[int], barrier: Barrier, to: Shared) -> None:
        assert list(to.data.shape) == list(window.block)
        window.inside(corner)
        fill_nan(to.data)

        def land() -> None:
            to.data.copy_(window.read(corner))
            barrier.add(0, -to.data.nbytes)

        self.machine.loads.append(land)
        self.machine.pause()

    def store(self, window: Window, corner: list[int], source: Shared) -> None:
        assert list(source.data.shape) == list(window.block)
        assert not self.machine.role.unfenced, "a store before the fence"
        window.inside(corner)
        self.machine.role.stores.append(lambda: window.write(corner, source.data.clone()))
        self.machine.pause()

    def store_wait(self, pending: int) -> None:
        while len(self.machine.role.stores) > pending:
            self.machine.role.stores.pop(0)()

    def fence(self) -> None:
        self.machine.role.unfenced = False

    def expect(self, barrier: Barrier, n: int) -> None:
        barrier.add(1, n)
        self.machine.pause()

    def arrive(self, barrier: Barrier, count: int, pred: bool = True) -> None:
        if pred:
            barrier.add(count, 0)
        self.machine.pause()

    def begin(
        self, a: Shared, b: Shared, old: Any, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        assert is_async
        product = Product(a, b, old, use_acc)
        self.machine.role.products.append(product)
        return product

    def wait(self, pending: int, deps: list[Any]) -> Any:
        self.machine.pause()
        while len(self.machine.role.products) > pending:
            self.machine.role.products.pop(0).finish()
        done = [d.value if isinstance(d, Product) and d.value is not None else d for d in deps]
        return done[0] if len(done) == 1 else tuple(done)


def layout(block: tuple[int, ...], dtype: torch.dtype) -> NVMMASharedLayout:
    width = min(128, block[-1] * dtype.itemsize) if len(block) > 1 else 0
    return NVMMASharedLayout(width, element_bitwidth=8 * dtype.itemsize, rank=len(block))


@contextmanager
def emulated(module: ModuleType, kernel: str, seed: int) -> Iterator[None]:
    """Within the block ``kernel`` and all Gluon functions of ``module`` run here, with programs of
    a random number, at most as many as the launch asks for."""
    rng = random.Random(seed)
    names = vars(module)
    before = dict(names)
    names.update({name: f.fn for name, f in before.items() if isinstance(f, JITFunction)})
    body = names[kernel]

    class Kernel:
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            def launch(*args: Any, num_warps: int, **constants: Any) -> None:
                assert num_warps == 4
                programs = rng.randint(1, grid[0])
                given = [
                    Window(x) if hasattr(x, "block_shape")
                    else Pointer.to(x) if isinstance(x, Tensor)
                    else x
                    for x in args
                ]  # fmt: skip

                def run() -> None:
                    for program in range(programs):
                        names.update(Gluon(Machine(rng), program, programs).names())
                        body(*given, **constants)

                traced_once((body, repr(constants), *map(type, given), programs), run)

            return launch

    names.update({kernel: Kernel(), "_layout": layout})
    module._product.cache_clear()
    try:
        yield
    finally:
        names.update(before)
        module._product.cache_clear()
