"""Recorded losses of two tiny GPTs, and whether this tree still trains to them.

``python -m float8 baseline --check`` compares, ``--update NAME`` records. A baseline is
tests/baselines/<name>.json: the losses of 100 steps of a training example (examples/train_gpt.py;
examples/train_moe.py, where the name starts with moe) for bf16, and for each recipe in FN and in
FNUZ arithmetic (as on gfx942), with the settings and with what computed them. They run on a CPU
with one thread, on a text that is made here, so that nothing but arithmetic can move them.

A check is **bit for bit** where plain torch computes here as it did there: the same torch version,
the same ``torch.backends.cpu.get_cpu_capability()``, and the same `arithmetic` (what the CPU model,
the BLAS and the build make of one capability). Elsewhere it allows a **band**, relative to what was
recorded: each of the first 5 losses within 0.1 %, and the mean of all within 0.2 %.

The band was measured. Other instruction sets (AVX2, and the least that torch, oneDNN and MKL can
do with), torch 2.11, and first weights that are off by one part in 10^6 to 10^3: at most 0.004 % in
the first 5 and 0.04 % in the mean (of mixtures of experts, where tokens then change their experts,
0.07 % with the least that torch can do with). Products of twice the size: 0.24 % and 3 %. No
gradient of the weights: 0.6 % and 9 %. 10 % of noise on every product: 0.02 % and 0.36 %. FNUZ
bytes under FN's maximum: NaN in the first step. Only a check bit for bit tells FN under FNUZ's
maximum from FN, or one recipe from another (0.03 % and 0.05 %).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import math
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .recipe import RECIPES

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "baselines"
EXAMPLES = ROOT / "examples"

STEPS = 100
FLAGS = (
    "--preset tiny --layers 2 --dim 64 --heads 2 --hidden 176 --seq-len 64 --batch-size 4 "
    "--warmup 10 --lr 3e-3 --schedule constant --seed 0 --device cpu"
)
MOE_FLAGS = "--hidden 48 --experts 6 --top-k 2 --shared 32"  # instead of, and besides, those
_NAMES = ("bf16", *(f"{recipe}-{flavour}" for recipe in RECIPES for flavour in ("fn", "fnuz")))
NAMES = (*_NAMES, *(f"moe-{name}" for name in _NAMES))
FNUZ_DEVICE = "gfx942"

FIRST, FIRST_BAND = 5, 0.001
MEAN_BAND = 0.002

# A kitchen garden through a year. Nothing depends on what it says, all on that it never changes.
PARAGRAPH = """\
In March the ground is cold and the days are short, so the gardener sows peas under glass and
waits. When the swallows come back she moves the young plants out, a row at a time, and covers
them at night. April brings rain; May brings snails, and with them a walk by lamplight along the
beds. "Leave one leaf in ten to the birds," her father used to say, "and they will leave you
nine." By June the beans have climbed past the top of their poles. Nobody can eat as much salad as
grows in that month: baskets of it go over the fence to the neighbours, and eggs come back. July
is dry. Each evening the two rain barrels sink by the width of a hand, and by the 20th the lower
one rings like a bell. Then the storms: hail takes a pane of the glasshouse, never the same one.
August smells of tomatoes and of straw. What is not eaten is boiled, salted, dried, or hung from
the beams, until the kitchen looks like a ship's store. In September the pumpkins are carried in,
two people to the largest; in October the last apples, each wrapped in a page of newspaper and
none touching another. After the first frost the beds are dug, or, as she does it now, only
covered with leaves and left to the worms. November and December belong to catalogues, with a
pencil, by the stove. And in January, on a day without wind, she walks the paths with a notebook,
counts the empty places, and begins again.
"""


def text(length: int = 60_000) -> bytes:
    """A text that reads a little like PARAGRAPH: a Markov chain, in which the two characters before
    decide what the next is drawn from."""
    follow: dict[str, list[str]] = {}
    circle = PARAGRAPH + PARAGRAPH[:2]
    for i in range(len(PARAGRAPH)):
        follow.setdefault(circle[i : i + 2], []).append(circle[i + 2])
    draw = random.Random(0)
    out = PARAGRAPH[:2]
    while len(out) < length:
        choices = follow[out[-2:]]
        out += choices[int(draw.random() * len(choices))]
    return out.encode("ascii")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _examples(name: str) -> ModuleType:
    """A module of examples/, whose files import each other by their bare names."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


@contextlib.contextmanager
def _no_plot() -> Iterator[None]:
    """The example leaves out its plot where matplotlib cannot be imported."""
    before = {name: sys.modules[name] for name in ("matplotlib",) if name in sys.modules}
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["matplotlib"]
        sys.modules.update(before)


def train(name: str, steps: int) -> dict[str, Any]:
    """Train as the baseline `name` is trained: "settings", "losses" and "stopped" of the example's
    own record. The losses are float32 values, one per step, and fewer where the training stopped.
    """
    moe, how = name.startswith("moe-"), name.removeprefix("moe-")
    recipe, _, flavour = how.rpartition("-") if how != "bf16" else ("bf16", "", "fn")
    example = _examples("train_moe" if moe else "train_gpt")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "text.txt")
        data.write_bytes(text())
        flags = [
            *FLAGS.split(),
            *(MOE_FLAGS.split() if moe else ()),
            "--recipe",
            recipe,
            "--steps",
            str(steps),
            "--data",
            str(data),
            "--out",
            folder,
        ]
        if flavour == "fnuz":
            flags += ["--assume-device", FNUZ_DEVICE]
        with _one_thread(), _no_plot(), contextlib.redirect_stdout(io.StringIO()):
            record = example.main(flags)["runs"][recipe]
    losses = [row["loss"] for row in record["rows"]]
    return {"settings": record["settings"], "losses": losses, "stopped": record["stopped"]}


def arithmetic() -> str:
    """What plain torch computes here, as a hash: float32 matrix products in the shapes of those
    that emulate FP8 ones, and one training step of the model in bf16."""
    gpt = _examples("gpt")
    digest = hashlib.sha256()

    def add(*results: torch.Tensor) -> None:
        for result in results:
            digest.update(bytes(result.detach().reshape(-1).view(torch.uint8).tolist()))

    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(0)
        for wide, narrow in ((64, 64), (176, 64)):
            x, w = torch.randn(256, wide), torch.randn(wide, narrow)
            g = torch.randn(256, narrow)
            add(x @ w, g @ w.t(), g.t() @ x, x.t() @ g)
        model = gpt.GPT(gpt.GPTConfig(layers=2, dim=64, heads=2, hidden=176))
        tokens = torch.randint(128, (4, 65))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        add(loss, *(p.grad for p in model.parameters()))
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """What computes here. Only the entries of EXACT decide how a check compares."""
    return {
        "torch": str(torch.__version__).partition("+")[0],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "arithmetic": arithmetic(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "threads": "1",
    }


EXACT = ("torch", "cpu_capability", "arithmetic", "threads")


@dataclass(frozen=True)
class Verdict:
    """How a run compares with its baseline."""

    name: str
    exact: bool  # compared bit for bit
    complaint: str | None  # None: it agrees
    first: float  # largest relative difference of the first FIRST losses
    mean: float  # relative difference of the means of all losses
    differing: tuple[
        tuple[int, float, float], ...
    ]  # (step, recorded, now), every step that is not the same


def relative(now: float, recorded: float) -> float:
    """|now - recorded| / recorded; Inf where that is no number."""
    difference = abs(now - recorded) / recorded
    return difference if math.isfinite(difference) else math.inf


def compare(name: str, recorded: list[float], now: list[float], exact: bool) -> Verdict:
    """Judge losses against as many recorded ones; a run that stopped early disagrees."""
    pairs = list(zip(recorded, now, strict=False))
    differing = tuple((step, a, b) for step, (a, b) in enumerate(pairs) if a != b)
    first = max(relative(b, a) for a, b in pairs[:FIRST])
    means = [statistics.fmean(losses) for losses in (recorded, now)]
    mean = relative(means[1], means[0]) if len(now) == len(recorded) else math.inf
    complaint = None
    if len(now) < len(recorded) or not all(map(math.isfinite, now)):
        complaint = f"the training stopped after step {len(now) - 1} of {len(recorded)}"
    elif first > FIRST_BAND:
        complaint = f"one of the first {FIRST} losses differs by {first:.3%}; "
        complaint += f"{FIRST_BAND:.1%} is allowed"
    elif mean > MEAN_BAND:
        complaint = (
            f"the mean of {len(now)} losses differs by {mean:.3%}; {MEAN_BAND:.1%} is allowed"
        )
    elif exact and differing:
        complaint = f"{len(differing)} of {len(now)} losses differ in their bits"
        complaint += f", the first at step {differing[0][0]}"
    return Verdict(name, exact, complaint, first, mean, differing)


def load(name: str) -> dict[str, Any]:
    """The recorded baseline; ValueError where there is none."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        raise ValueError(
            f"{path}: there is no such baseline; python -m float8 baseline --update {name} makes it"
        )
    baseline: dict[str, Any] = json.loads(path.read_text())
    return baseline


def why_not_exact(baseline: dict[str, Any], here: dict[str, str]) -> str | None:
    """What keeps a check from being bit for bit, None where nothing does."""
    for key in EXACT:
        there = baseline["versions"][key]
        if there != here[key]:
            if key == "arithmetic":
                return (
                    "plain torch, without any FP8, computes other bits here (another CPU, or "
                    "another build of torch)"
                )
            return f"{key} was {there}, is {here[key]}"
    return None


def check(name: str, here: dict[str, str], steps: int) -> Verdict:
    """Train `steps` steps and compare them with the first recorded ones.

    Raises ValueError when there is no baseline, or it was made with other settings or another text.
    """
    baseline = load(name)
    run = train(name, steps)
    before, now = baseline["settings"], run["settings"]
    if before != now:
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        changes = ", ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys)
        raise ValueError(
            f"{name} was recorded with other settings ({changes}); to record it with these: "
            f"python -m float8 baseline --update {name}"
        )
    exact = why_not_exact(baseline, here) is None
    return compare(name, baseline["losses"][:steps], run["losses"], exact)


def update(name: str, here: dict[str, str]) -> str:
    """Train and record. Returns what changed, in words; ValueError when the training diverges."""
    run = train(name, STEPS)
    if run["stopped"]:
        raise ValueError(
            f"{name}: the training stopped ({run['stopped']}), which makes no baseline; the file "
            "stays as it was"
        )
    path = FOLDER / f"{name}.json"
    told = "new"
    if path.exists():
        before = load(name)["losses"]
        verdict = compare(name, before, run["losses"], True) if len(before) == STEPS else None
        told = "unchanged" if verdict and not verdict.differing else "changed"
        told += f", the mean by {verdict.mean:.3%}" if verdict and verdict.differing else ""
    FOLDER.mkdir(parents=True, exist_ok=True)
    head = {"name": name, "settings": run["settings"], "versions": here}
    rows = [", ".join(map(repr, run["losses"][i : i + 5])) for i in range(0, STEPS, 5)]
    losses = ",\n  ".join(rows)  # repr is the shortest text that reads back as the same number
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "losses": [\n  {losses}\n ]\n}}\n')
    return told


def table(verdict: Verdict, most: int = 12) -> str:
    """The steps that differ, the first `most` of them."""
    lines = [f"{'step':>8}  {'recorded':>20}  {'now':>20}  {'difference':>10}"]
    for step, a, b in verdict.differing[:most]:
        lines.append(f"{step:>8}  {a:>20.15f}  {b:>20.15f}  {relative(b, a):>10.2e}")
    left = len(verdict.differing) - most
    return "\n".join(lines + ([f"{'':8}  and {left} more"] if left > 0 else []))


def line(verdict: Verdict, seconds: float) -> str:
    """One verdict in one line."""
    how = "bit for bit" if verdict.exact else "in the band"
    result = "ok" if verdict.complaint is None else "DIFFERS"
    differences = f"{verdict.first:>10.2e} {verdict.mean:>10.2e}"
    return f"{verdict.name:22} {how:12} {differences} {seconds:>5.0f} s  {result}"


def known(name: str) -> str:
    """A converter for argparse: the name of a baseline."""
    if name not in NAMES:
        raise argparse.ArgumentTypeError(
            f"there is no baseline {name!r}; those are {', '.join(NAMES)}"
        )
    return name


def steps_argument(value: str) -> int:
    """A converter for argparse: a number of steps to compare."""
    if not value.isdecimal() or not 1 <= int(value) <= STEPS:
        raise argparse.ArgumentTypeError(f"{value} is not a number of steps from 1 to {STEPS}")
    return int(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(
        "--check",
        nargs="*",
        type=known,
        metavar="NAME",
        help="compare these, or all, with the recorded losses",
    )
    group.add_argument(
        "--update", nargs="*", type=known, metavar="NAME", help="record these, or all, anew"
    )
    parser.add_argument(
        "--steps",
        type=steps_argument,
        default=None,
        metavar="N",
        help=f"with --check: only the first N of {STEPS} steps",
    )


def run(args: argparse.Namespace) -> int:
    """The command: 0 where all agrees, 1 where a baseline differs, 2 where it cannot be asked."""
    if not (EXAMPLES / "train_gpt.py").exists():
        print(
            "The baselines are trained by examples/train_gpt.py, which is not beside this package "
            f"({ROOT}): a wheel has no examples. Clone the repository and run this there.",
            file=sys.stderr,
        )
        return 2
    if args.update is not None and args.steps is not None:
        print("--steps is for --check: a baseline always holds all its steps.", file=sys.stderr)
        return 2
    here = versions()
    try:
        if args.update is not None:
            for name in args.update or NAMES:
                print(f"{name:22} {update(name, here)}", flush=True)
            return 0
        return _check_all(args.check or NAMES, here, args.steps or STEPS)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def _check_all(names: list[str] | tuple[str, ...], here: dict[str, str], steps: int) -> int:
    print(f"{'baseline':22} {'compared':12} {f'first {FIRST}':>10} {'mean':>10} {'took':>7}")
    bad: list[Verdict] = []
    reasons: dict[str, None] = {}
    for name in names:
        began = time.perf_counter()
        verdict = check(name, here, steps)
        print(line(verdict, time.perf_counter() - began), flush=True)
        if verdict.complaint is not None:
            bad.append(verdict)
        if (reason := why_not_exact(load(name), here)) is not None:
            reasons[reason] = None
    for reason in reasons:
        print(f"\nCompared in the band, not bit for bit: {reason}.")
    for verdict in bad:
        print(f"\n{verdict.name}: {verdict.complaint}.\n{table(verdict)}")
    if bad:
        print(
            f"\n{len(bad)} of {len(names)} differ. If the numerics were meant to change, record "
            f"them: python -m float8 baseline --update {' '.join(v.name for v in bad)}"
        )
    return 1 if bad else 0
