"""What a run leaves: JSON, tables for a terminal and for a page, a plot."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from .runner import Record

HEADER = ["row", "shape", "timing", "contender", "time", "moved", "share of copy"]


def sentence(run: Record) -> str:
    """Where, with what and when a run was made."""
    where = run["environment"]
    parts = [
        where["card"],
        *(f"{n} {where[n]}" for n in ("torch", "triton", "torchao") if where[n]),
    ]
    parts += [f"commit {where['commit']}", where["date"]]
    if "copy_bytes_per_us" in where:
        parts.append(f"copy {where['copy_bytes_per_us'] / 1e6:.2f} TB/s")
        parts.append(f"empty launch {where['empty_us']:.1f} us")
        parts.append(f"median of {where['repeat']}")
    return ", ".join(parts)


def _time(us: float) -> str:
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.3f} ms"


def _ratio(times: Iterable[float], us: float) -> str:
    """How many times as long the fastest of ``times`` takes."""
    return f"{min(found) / us:.2f}" if (found := list(times)) else ""


def lines(row: Record, copy_rate: float | None, peak: float | None = None) -> list[list[str]]:
    """The cells of a row, a line for each contender that has one. Rates of the card: bytes per us
    of a copy, FLOP/s of FP8."""
    shape = "x".join(map(str, row["shape"]))
    title = [row["bench"], shape if row["label"] == shape else f"{row['label']} {shape}"]
    times = {name: c["us"] for name, c in row["contenders"].items() if "us" in c}
    peers = [us for name, us in times.items() if name.startswith("torchao")]
    base, cublas = ([times[n]] if n in times else [] for n in (row["baseline"], "cublas"))
    found = []
    for name, contender in row["contenders"].items():
        cells = [*title, row["timing"], name]
        if (us := times.get(name)) is not None:
            moved, flops = row["bytes"], row.get("flops")
            layer = moved is None and flops is None
            cells += [
                _time(us),
                f"{moved / 1e6:.1f} MB" if moved else "",
                f"{moved / us / copy_rate:.0%}" if moved and copy_rate else "",
                _ratio(base, us),
                _ratio(peers, us),
                f"{contender['peak_gib']:.2f} GiB" if layer else "",
                f"{contender['first_call_s']:.1f} s" if layer else "",
                f"{flops / us / 1e6:.0f}" if flops else "",
                f"{flops / us * 1e6 / peak:.0%}" if flops and peak else "",
                _ratio(cublas, us) if flops else "",
            ]
        else:
            state = next((word for word in ("refused", "absent") if word in contender), "right")
            cells += [state, *[""] * 9]
        if contender["line"]:
            found.append(cells)
    return found


def notes(run: Record) -> list[str]:
    """What is to be said of rows in words: refusals, who is absent and why, remarks. Each once."""
    found: dict[str, None] = {}
    for row in run["rows"]:
        for name, contender in row["contenders"].items():
            for word in ("refused", "absent"):
                if word in contender:
                    where = f"{row['bench']}, {row['label']}: {name}"
                    found[f"{where} {word}. {contender[word]}"] = None
            if contender["note"]:
                found[f"{row['bench']}: {name}: {contender['note']}"] = None
    return list(found)


def tables(run: Record) -> list[tuple[str, list[list[str]]]]:
    """A table for each group: its name and its lines, the header first. Columns that say nothing
    are left out."""
    groups: dict[str, list[Record]] = {}
    for row in run["rows"]:
        groups.setdefault(row["bench"].partition("/")[0], []).append(row)
    found = []
    for group, rows in groups.items():
        baseline = rows[0]["baseline"]
        header = [*HEADER, f"x {baseline}", "x torchao", "peak", "first call"]
        header += ["TFLOPS", "share of FP8 peak", "x cublas"]
        rates = [run["environment"].get(rate) for rate in ("copy_bytes_per_us", "peak_fp8")]
        table = [cells for row in rows for cells in lines(row, *rates)]
        kept = [i for i in range(len(header)) if any(cells[i] for cells in table)]
        found.append((group, [[cells[i] for i in kept] for cells in [header, *table]]))
    return found


def plain(run: Record) -> str:
    parts = [sentence(run)]
    for _, table in tables(run):
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        parts.append("")
        for cells in table:
            padded = (cell.ljust(w) for cell, w in zip(cells, widths, strict=True))
            parts.append("  ".join(padded).rstrip())
    return "\n".join([*parts, "", *notes(run)]).rstrip()


def markdown(run: Record) -> str:
    parts = [f"{sentence(run)}."]
    for _, (header, *body) in tables(run):
        parts += ["", *(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header)))]
        parts += [f"| {' | '.join(cells)} |" for cells in body]
    if remarks := notes(run):
        parts += ["", *(f"- {remark}" for remark in remarks)]
    return "\n".join(parts)


def show(run: Record) -> None:
    """Print a run's tables; on a terminal by rich, where it is installed."""
    if importlib.util.find_spec("rich") is None or not sys.stdout.isatty():
        print(plain(run))
        return
    rich, table_module = importlib.import_module("rich"), importlib.import_module("rich.table")
    print(sentence(run))
    for group, (header, *body) in tables(run):
        table = table_module.Table(title=group)
        for title in header:
            table.add_column(title, overflow="fold")
        for cells in body:
            table.add_row(*cells)
        rich.print(table)
    print("\n".join(notes(run)))


def save(run: Record, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1, allow_nan=False) + "\n")


def plot(run: Record, path: Path) -> None:
    """Bars: how many times as fast as the row's baseline each contender is."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    bars: dict[str, list[tuple[int, float]]] = {}
    labels: list[str] = []
    for row in run["rows"]:
        times = {name: c["us"] for name, c in row["contenders"].items() if "us" in c}
        if row["baseline"] not in times:
            continue
        for name, us in times.items():
            bars.setdefault(name, []).append((len(labels), times[row["baseline"]] / us))
        labels.append(f"{row['bench']}\n{row['label']}, {row['timing']}")
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.12 * len(labels) * (2 + len(bars))))
    # There are more contenders than the ten colours of the default cycle.
    axes.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
    height = 0.85 / max(1, len(bars))
    for i, (name, points) in enumerate(bars.items()):
        at = [place + i * height for place, _ in points]
        axes.barh(at, [speed for _, speed in points], height, label=name)
    axes.set_yticks([i + 0.4 for i in range(len(labels))], labels, fontsize=7)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as the baseline")
    axes.set_title(sentence(run), fontsize=6)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))  # beside the bars
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
