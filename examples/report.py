"""What a training leaves behind: JSON logs and losses, progress, TensorBoard, a plot, a table.

tqdm, tensorboard, matplotlib and rich are optional: where one of the first three is missing, a line
says what is left out; without rich the table is plain text.
"""

from __future__ import annotations

import importlib
import json
import math
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

LAST = 20  # steps that the closing loss is the mean of, and that the plot smooths over
Record = dict[str, Any]  # one recipe's run: settings, versions, rows (one per step), summary


def optional(module: str, without: str) -> ModuleType | None:
    """Import a package that only some of the output needs, or say in one line what is left out."""
    try:
        return importlib.import_module(module)
    except ImportError:
        print(f"{module} is not installed: {without} (pip install {module})")
        return None


class Outputs:
    """The folder of a training, and the optional packages, looked for before it starts."""

    def __init__(self, folder: Path, tensorboard: bool) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.tqdm = optional("tqdm", "progress is printed as lines")
        self.matplotlib = optional("matplotlib", "loss.png is not drawn")
        self.tensorboard = None
        if tensorboard and optional("tensorboard", "no event files are written"):
            self.tensorboard = importlib.import_module("torch.utils.tensorboard")


def finite(value: Any) -> Any:
    """A dict, to any depth, with None for each float that is not finite; anything else as it is."""
    if isinstance(value, dict):
        return {key: finite(below) for key, below in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Log:
    """Where one run's steps go: <recipe>.jsonl, a progress bar or plain lines, TensorBoard."""

    def __init__(self, outputs: Outputs, record: Record, steps: int) -> None:
        self.recipe, self.steps, done = record["recipe"], steps, len(record["rows"])
        self.path = outputs.folder / f"{self.recipe}.jsonl"
        self.path.write_text("")
        self.write({key: record[key] for key in ("recipe", "settings", "run", "versions")})
        for row in record["rows"]:  # the log of a resumed run holds all its steps
            self.write(row)
        self.bar = self.board = None
        if outputs.tqdm and sys.stderr.isatty():
            self.bar = outputs.tqdm.tqdm(total=steps, initial=done, desc=self.recipe, unit="step")
        if outputs.tensorboard:
            folder = str(outputs.folder / "tensorboard" / self.recipe)
            self.board = outputs.tensorboard.SummaryWriter(folder, purge_step=done)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line. JSON has no NaN and no infinity: they become null."""
        with self.path.open("a") as file:
            file.write(json.dumps(finite(line), allow_nan=False) + "\n")

    def step(self, row: dict[str, Any]) -> None:
        self.write(row)
        done, speed = row["step"] + 1, f"{row['tokens_per_s']:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {row['loss']:.3f}, {speed}", refresh=False)
            self.bar.update()
        elif done % max(1, self.steps // 10) == 0 or done == self.steps:
            print(
                f"{self.recipe:>16} {done:>5}/{self.steps}  loss {row['loss']:.3f}  "
                f"lr {row['lr']:.2e}  gradient norm {row['grad_norm']:.2f}  {speed}",
                flush=True,
            )
        if self.board is not None:
            for name in ("loss", "lr", "grad_norm", "tokens_per_s"):
                self.board.add_scalar(name, row[name], row["step"])

    def finish(self, record: Record) -> None:
        self.write({"summary": record["summary"], "stopped": record["stopped"]})
        self.close()

    def close(self) -> None:
        for sink in (self.bar, self.board):
            if sink is not None:
                sink.close()


def smooth(values: list[float], window: int = LAST) -> tuple[list[float], list[float]]:
    """Means of up to `window` successive values, and the middle of the steps that each is of.

    The last is the number in the table; at the start, where there are fewer values, of those.
    """
    middles, means = [], []
    for end in range(1, len(values) + 1):
        start = max(0, end - window)
        middles.append((start + end - 1) / 2)
        means.append(statistics.fmean(values[start:end]))
    return middles, means


def gap_percent(loss: float, bf16: float) -> float:
    return 100 * (loss / bf16 - 1)


def save_losses(records: dict[str, Record], path: Path, last: int = LAST) -> None:
    """Write, per recipe, the mean loss of the last steps and the held-out one, each with its gap to
    bf16 in percent. What is not known, or not finite, is null."""
    found: dict[str, dict[str, Any]] = {}
    for recipe, record in records.items():
        rows, summary = record["rows"], record["summary"]
        loss = statistics.fmean(row["loss"] for row in rows[-last:])
        found[recipe] = {"steps": len(rows), "stopped": record["stopped"], "loss": loss}
        found[recipe] |= {key: summary[key] for key in ("validation_loss", "tokens_per_s")}
    base = found.get("bf16", {"loss": math.nan, "validation_loss": math.nan})
    for losses in found.values():
        losses["gap_percent"] = gap_percent(losses["loss"], base["loss"])
        held_out = gap_percent(losses["validation_loss"], base["validation_loss"])
        losses["validation_gap_percent"] = held_out
    written = {"mean_of_last": last, "recipes": finite(found)}
    path.write_text(json.dumps(written, indent=1, allow_nan=False) + "\n")


def plot(records: dict[str, Record], title: str, path: Path, last: int = LAST) -> None:
    """Loss curves, raw and smoothed; below, the smoothed ones' distance from bf16's in percent."""
    from matplotlib.figure import Figure  # the object interface: no display, no global state

    figure = Figure(figsize=(9, 8), layout="constrained")
    losses, gaps = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    colours = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")  # Okabe and Ito's
    curves = {recipe: [row["loss"] for row in record["rows"]] for recipe, record in records.items()}
    _, base = smooth(curves.get("bf16", []), last)
    for (recipe, curve), colour in zip(curves.items(), colours, strict=False):
        steps, means = smooth(curve, last)
        losses.plot(curve, color=colour, alpha=0.3, linewidth=0.8)
        losses.plot(steps, means, color=colour, linewidth=1.6, label=recipe)
        if base and recipe != "bf16":
            gap = [gap_percent(ours, bf16) for ours, bf16 in zip(means, base, strict=False)]
            gaps.plot(steps[: len(gap)], gap, color=colour, linewidth=1.6, label=recipe)
    losses.set(title=title, ylabel="training loss (nats per byte)")
    losses.legend(title=f"thin: each step; thick: mean of {last}")
    gaps.axhline(0, color="#000000", linewidth=0.8)
    gaps.set(
        xlabel="step",
        ylabel="gap to bf16 (%)",
        title=f"Relative gap to bf16 of the mean of {last} steps",
    )
    if not base:
        gaps.text(0.5, 0.5, "no bf16 run to compare with", ha="center", transform=gaps.transAxes)
    for axes in (losses, gaps):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f}%"


def table(records: dict[str, Record], last: int = LAST) -> list[list[str]]:
    """The closing table as text: a header and one line per recipe."""
    header = ["recipe", f"loss (last {last})", "gap to bf16", "held-out loss", "tokens/s"]
    lines = [[*header, "MFU (bf16 peak)", "MFU (FP8 peak)", "peak GPU memory", "FP8 layers"]]
    base = records["bf16"]["summary"]["loss"] if "bf16" in records else math.nan
    for recipe, record in records.items():
        s = record["summary"]
        gap = math.nan if record["stopped"] else gap_percent(s["loss"], base)
        memory = s["peak_memory_bytes"]
        lines.append(
            [
                recipe,
                "stopped" if record["stopped"] else f"{s['loss']:.4f}",
                f"{gap:+.2f}%" if recipe != "bf16" and math.isfinite(gap) else "-",
                f"{s['validation_loss']:.4f}",
                f"{s['tokens_per_s']:,.0f}",
                percent(s["mfu_bf16"]),
                percent(s["mfu_fp8"]) if s["fp8_layers"] else "-",
                "-" if memory is None else f"{memory / 2**30:.2f} GiB",
                f"{s['fp8_layers']} of {s['all_layers']}",
            ]
        )
    return lines


def print_table(lines: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        return
    shown = Table()
    for name in lines[0]:
        shown.add_column(
            name, no_wrap=name == "recipe", justify="left" if name == "recipe" else "right"
        )
    for line in lines[1:]:
        shown.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 140).print(shown)
