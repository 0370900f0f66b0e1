"""``python -m float8``: what devices are, whether they compute rightly, and the recorded losses.

python -m float8 doctor       every device here: formats, what is native, a self-test
python -m float8 support      the table of known architectures, as Markdown
python -m float8 baseline     compare training losses with the recorded ones (in a checkout)
"""

from __future__ import annotations

import argparse
import sys

from . import baseline, doctor


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m float8", description="FP8 training for PyTorch.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", title="commands", metavar="")
    for name, text, module in (
        ("doctor", "what each device is, what is native there, and a self-test", doctor),
        ("support", "the table of known architectures, as Markdown (docs/support.md)", None),
        ("baseline", "compare training losses with the recorded ones, in a checkout", baseline),
    ):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if module is not None:
            module.add_arguments(command)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status. SystemExit(2), with a sentence: bad arguments."""
    parser = command_line()
    args = parser.parse_args(argv)
    if args.command == "doctor":
        return doctor.run(args)
    if args.command == "baseline":
        return baseline.run(args)
    if args.command == "support":
        print(doctor.support_table(), end="")
    else:
        parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
