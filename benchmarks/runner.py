"""Measures the rows of the registry on a GPU: results first checked, then timed side by side.

How a time is taken: the contenders of a row take turns (A B C A B C ...), so that clocks and
temperature are the same for all, and the median of each counts. Before each turn the L2 cache is
flushed, by a write and then a read (a write alone leaves dirty lines for the timed kernel to pay
for). Events stand around a CUDA graph's replay; an empty launch, reported beside, is not
subtracted. ``eager`` times the call itself instead, from an idle GPU: the host's time counts.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib
import importlib.metadata
import multiprocessing
import multiprocessing.connection
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from float8.devices import device_profile

from .registry import Bench, Call, Contender, Options, Shape

FLUSHED = 256 << 20  # bytes; several times the L2 of any GPU so far
COPIED = 1 << 30
Run = Callable[[], object]
Record = dict[str, Any]  # what a run, a row or a contender leaves in the JSON


class Timer:
    """Takes times on one GPU. Everything runs in one stream of its own, as graphs demand."""

    def __init__(self, device: torch.device, repeat: int) -> None:
        self.device, self.repeat = device, repeat
        self.buffer = torch.empty(FLUSHED, dtype=torch.uint8, device=device)
        self.stream = torch.cuda.Stream(device)

    def flush(self) -> None:
        self.buffer.fill_(1)
        self.buffer.view(torch.int64).amax()

    def capture(self, calls: dict[str, Call]) -> tuple[dict[str, Run], dict[str, str]]:
        """Replays of the calls' GPU work, and why others have none. The graphs share memory:
        nobody reads what they leave."""
        replays: dict[str, Run] = {}
        why_not: dict[str, str] = {}
        pool = None
        for name, call in calls.items():
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                    call()
            except Exception as error:
                why_not[name] = f"no CUDA graph: {one_line(error)}"
                continue
            pool = graph.pool()
            graph.replay()
            replays[name] = graph.replay
        return replays, why_not

    def microseconds(self, runs: dict[str, Run], wait: bool = False) -> dict[str, float]:
        """Median time of each, in turns. ``wait``: each starts from an idle GPU."""
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in runs}
        order, shuffle = list(runs.items()), random.Random(0).shuffle
        for _ in range(self.repeat):
            shuffle(order)  # what runs before one decides how warm the card is, and its clock
            for name, run in order:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.flush()
                if wait:
                    torch.cuda.synchronize()
                start.record()
                run()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        return {
            name: 1000 * statistics.median(start.elapsed_time(end) for start, end in pairs)
            for name, pairs in events.items()
        }

    def ceiling(self) -> Record:
        """The speed of a copy on this card, the faster of two ways, and the time of an empty
        launch."""
        source = torch.randn(COPIED // 2, device=self.device, dtype=torch.bfloat16)
        target, one = torch.empty_like(source), torch.ones(1, device=self.device)
        replays, _ = self.capture(
            {
                "memcpy": lambda: (target.copy_(source),),
                "kernel": lambda: (torch.neg(source, out=target),),
                "empty": lambda: (one.zero_(),),
            }
        )
        times = self.microseconds(replays)
        fastest = min(times["memcpy"], times["kernel"])
        return {"copy_bytes_per_us": 2 * COPIED / fastest, "empty_us": times["empty"]}

    def seconds(self, call: Call) -> float:
        """How long one call takes, compilation included."""
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def allocated(self, call: Call | None = None) -> int:
        """Bytes that are allocated: now, or at most during a call."""
        torch.cuda.reset_peak_memory_stats()
        if call is not None:
            call()
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


@functools.cache
def start_compiler(device: torch.device) -> None:
    """What torch.compile starts once in a process belongs to no contender."""
    torch.compile(torch.sin)(torch.ones(1, device=device))


def cold_caches(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Empty caches on disk for what torch.compile and Triton compile."""
    start_compiler(device)
    return importlib.import_module("torch._inductor.utils").fresh_cache()  # type: ignore[no-any-return]


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def prepare(contender: Contender, timer: Timer, cold: bool) -> tuple[Call, Record] | str:
    """Set a contender up and check it: its call, with the seconds of the first one and the memory
    that one takes at most, in GiB, its own parameters included; or why there is no such thing."""
    before = timer.allocated()
    try:
        with cold_caches(timer.device) if cold else contextlib.nullcontext():
            call = contender.make()
            first = timer.seconds(call)
        if (wrong := contender.check(call)) is not None:
            return wrong
        peak = (timer.allocated(call) - before) / 2**30
    except Exception as error:  # a peer may fail in any way; the row says how
        return one_line(error)
    return call, {"first_call_s": round(first, 2), "peak_gib": round(peak, 2)}


def try_out(
    reply: multiprocessing.connection.Connection,
    bench: Bench,
    shape: Shape,
    options: Options,
    name: str,
) -> None:
    """Set a contender up, check it and send the verdict: the whole life of a process."""
    try:
        contender = begin(bench, "", shape, options)[1][name]
        wrong = contender.check(contender.make())
    except Exception as error:
        wrong = one_line(error)
    reply.send(wrong)


def isolated(bench: Bench, shape: Shape, options: Options, name: str) -> str | None:
    """The verdict on a contender from a process of its own, which is killed after
    ``options.isolate`` seconds: a kernel that hangs, or writes where it must not, ends there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["float8"])  # imports torch once, and asks no GPU anything
    verdict, reply = context.Pipe(duplex=False)
    process = context.Process(target=try_out, args=(reply, bench, shape, options, name))
    process.start()
    reply.close()
    try:
        if not verdict.poll(options.isolate):
            return f"hung: no verdict within {options.isolate:g} s"
        wrong: str | None = verdict.recv()
        return wrong
    except EOFError:
        process.join()
        return f"its process died, exit code {process.exitcode}"
    finally:
        process.kill()
        process.join(10)  # a driver may keep it longer


def measure(
    bench: Bench, label: str, shape: Shape, options: Options, timer: Timer, eager: bool
) -> list[Record]:
    """The records of a row for one shape: timed by replays and, if ``eager``, by calls too."""
    row, contenders = begin(bench, label, shape, options)
    calls: dict[str, Call] = {}
    for name, contender in contenders.items():
        alone = options.isolate is not None and contender.ours
        prepared = (isolated(bench, shape, options, name) if alone else None) or prepare(
            contender, timer, cold=bench.whole_step
        )
        enter(row, name, contender, prepared if isinstance(prepared, str) else None)
        if not isinstance(prepared, str):
            calls[name] = prepared[0]
            row["contenders"][name] |= prepared[1]
    if not any(contenders[name].ours for name in calls):
        return [row]
    replays, why_not = timer.capture(calls)
    rows = [timed(row, "graph", timer.microseconds(replays), why_not)]
    if eager:
        rows.append(timed(row, "eager", timer.microseconds(dict(calls), wait=True), {}))
    return rows


def smoke(bench: Bench, options: Options) -> list[Record]:
    """The record of a row on its tiny shape, checked, on any device; nothing is compiled."""
    row, contenders = begin(bench, "smoke", bench.smoke, options)
    with torch.compiler.set_stance("force_eager"):
        for name, contender in contenders.items():
            try:
                wrong = contender.check(contender.make())
            except Exception as error:
                wrong = one_line(error)
            enter(row, name, contender, wrong)
    return [row]


def enter(row: Record, name: str, contender: Contender, wrong: str | None) -> None:
    """Write a contender down: that its results are right, or why it is not timed."""
    row["contenders"][name] = {"line": contender.line, "note": contender.note}
    if wrong is not None:
        row["contenders"][name]["refused" if contender.ours else "absent"] = wrong


def timed(row: Record, timing: str, times: dict[str, float], why_not: dict[str, str]) -> Record:
    """A row with the times that one way of timing gave."""
    contenders = {name: dict(record) for name, record in row["contenders"].items()}
    for name, time_us in times.items():
        contenders[name]["us"] = round(time_us, 2)
    for name, reason in why_not.items():
        contenders[name]["absent"] = reason
    return row | {"timing": timing, "contenders": contenders}


def refusals(row: Record) -> dict[str, str]:
    """Which of our contenders had wrong results, and what was wrong."""
    return {name: c["refused"] for name, c in row["contenders"].items() if "refused" in c}


def begin(
    bench: Bench, label: str, shape: Shape, options: Options
) -> tuple[Record, dict[str, Contender]]:
    torch.manual_seed(0)
    row: Record = {
        "bench": bench.name,
        "label": label,
        "shape": list(shape),
        "timing": "none",
        "bytes": None if bench.bytes is None else bench.bytes(shape),
        "flops": None if bench.flops is None else bench.flops(shape),
        "baseline": bench.baseline,
        "contenders": {},
    }
    return row, bench.make(shape, options)


def release() -> None:
    """Give back what a row held."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit that is checked out, "+dirty" if any file differs from it."""
    git = ["git", "-C", str(Path(__file__).parent), "-c", "safe.directory=*"]
    try:
        head, changed = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout
            for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain"])
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("+dirty" if changed else "")


def environment(device: torch.device) -> Record:
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "card": card,
        "peak_fp8": device_profile(device).peak_fp8,
        "torch": torch.__version__,
        "triton": version("triton") or version("pytorch-triton-rocm"),
        "torchao": version("torchao"),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
