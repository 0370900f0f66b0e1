"""float8 on the command line: what devices are, whether they compute rightly, recorded losses.

    python -m float8 doctor              every device here: formats, what is native, a self-test
    python -m float8 support             the table of known architectures, as Markdown
    python -m float8 baseline --check    in a checkout: training losses beside the recorded ones

Exit status: 0; 1 where a self-test failed or a loss differs; 2, with a sentence, for bad arguments.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import baseline, doctor


def command_line() -> argparse.ArgumentParser:
    raw: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(prog="python -m float8", description=__doc__, **raw)
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for name, text, module in (
        ("doctor", "what each device is, what is native there, and a self-test", doctor),
        ("support", "the table of known architectures (docs/support.md)", None),
        ("baseline", "training losses compared with the recorded ones", baseline),
    ):
        description = text if module is None else module.__doc__
        command = commands.add_parser(name, help=text, description=description, **raw)
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
