"""Times of float8 beside plain torch and torchao, on the GPU of this machine.

    python -m benchmarks list                    the rows, and the sets of shapes that each has
    python -m benchmarks run casts 'ffn/*'       measures rows, by group or by glob
    python -m benchmarks table FILE.json         a saved run as Markdown

No row is timed before its result was compared with the reference. Exit status: 0; 1 where a row was
refused for its result; 2, with a sentence, for bad arguments or without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from float8.recipe import RECIPES

from . import (
    casts,
    experts,
    fused,
    gemm,
    grouped,
    grouped_gemm,
    layers,
    permute,
    report,
    runner,
    step,
)
from .registry import Bench, Options, chosen, shapes_of

PLOTS = (".png", ".pdf", ".svg")
GROUPS = (casts, grouped, permute, fused, gemm, grouped_gemm, layers, experts, step)
BENCHES: list[Bench] = [bench for group in GROUPS for bench in group.BENCHES]


def command_line() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=raw
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="the rows and their shapes")
    run = commands.add_parser("run", help="measure rows")
    run.add_argument("names", nargs="+", metavar="NAME", help="a group, or a glob over names")
    run.add_argument("--json", type=Path, metavar="FILE", help="save the run, after each row")
    run.add_argument("--plot", type=Path, metavar="FILE.png", help="draw speeds, by matplotlib")
    run.add_argument("--peer", choices=["torchao"], help="measure torchao's ways too")
    run.add_argument(
        "--shapes", default="default", help="sets, or shapes such as 8192x4096, with commas"
    )
    run.add_argument(
        "--recipes", default=",".join(RECIPES), help="of layers and steps, with commas"
    )
    run.add_argument("--repeat", type=int, default=20, help="turns that each contender has")
    run.add_argument(
        "--eager", action="store_true", help="also time calls, the host's time included"
    )
    run.add_argument(
        "--isolate",
        type=float,
        metavar="SECONDS",
        help="check each of ours in a process of its own first, killed after so long",
    )
    run.add_argument(
        "--smoke", action="store_true", help="only check results, on tiny shapes, on any device"
    )
    table = commands.add_parser("table", help="a saved run as Markdown")
    table.add_argument("file", type=Path)
    return parser


def show_list() -> None:
    width = max(len(bench.name) for bench in BENCHES)
    for bench in BENCHES:
        print(f"{bench.name.ljust(width)}  {', '.join(bench.shapes)}")


def measure(args: argparse.Namespace, benches: list[Bench], options: Options) -> runner.Record:
    sets = args.shapes.split(",")
    for name in sets:
        if not any(shapes_of(bench, [name]) for bench in benches):
            raise ValueError(f"no row that was named has shapes for {name!r}; see list")
    timer = runner.Timer(options.device, args.repeat)
    result: runner.Record = {"environment": runner.environment(options.device), "rows": []}
    with torch.cuda.stream(timer.stream):
        result["environment"] |= timer.ceiling() | {"repeat": args.repeat}
        for bench in benches:
            for label, shape in shapes_of(bench, sets).items():
                print(f"{bench.name} {label} ...", file=sys.stderr, flush=True)
                result["rows"] += runner.measure(bench, label, shape, options, timer, args.eager)
                runner.release()
                if args.json is not None:
                    report.save(result, args.json)
    return result


def run(args: argparse.Namespace, benches: list[Bench]) -> int:
    """Raises ValueError for arguments that name nothing, and without a GPU."""
    benches, recipes = chosen(benches, args.names), tuple(args.recipes.split(","))
    if unknown := set(recipes) - set(RECIPES):
        raise ValueError(
            f"no recipe is called {', '.join(unknown)}; there are {', '.join(RECIPES)}"
        )
    if args.repeat < 1:
        raise ValueError(f"--repeat {args.repeat}: a contender has one turn at least")
    if args.plot is not None and args.plot.suffix not in PLOTS:
        raise ValueError(f"--plot {args.plot}: its name must end in {', '.join(PLOTS)}")
    if args.smoke and args.shapes != "default":
        raise ValueError("--smoke has shapes of its own; leave --shapes out")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    options = Options(device, args.peer is not None, recipes, args.isolate)
    if args.smoke:
        rows = [row for bench in benches for row in runner.smoke(bench, options)]
        result: runner.Record = {
            "environment": runner.environment(options.device),
            "rows": rows,
        }
    elif on_gpu:
        result = measure(args, benches, options)
    else:
        raise ValueError(
            "run measures on a GPU, and torch sees none here; with --smoke it checks the results "
            "alone, on any device"
        )
    report.show(result)
    if args.json is not None:
        report.save(result, args.json)
    if args.plot is not None:
        report.plot(result, args.plot)
    return int(any(runner.refusals(row) for row in result["rows"]))


def main(argv: list[str] | None = None, benches: list[Bench] = BENCHES) -> int:
    parser = command_line()
    args = parser.parse_args(argv)
    if args.command == "list":
        show_list()
    elif args.command == "table":
        try:
            saved = json.loads(args.file.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"{args.file} is no saved run: {error}")
        print(report.markdown(saved))
    else:
        try:
            return run(args, benches)
        except ValueError as error:
            parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
