"""`python -m harness COMMAND ...`: train, compare, promote, plan and show runs.

Only the module of the command that is asked for is imported, so that `--help` and the light commands
answer at once. A module offers `add_parser(sub)` and `run(args) -> int`; one with `TRAINER_FLAGS = True`
finds what follows `--` in `args.trainer_flags`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from harness.common import is_user_error

SUBCOMMANDS: dict[str, str] = {
    "speedrun": "harness.speedrun",
    "runs": "harness.runs",
    "curve": "harness.curve",
    "report": "harness.report",
    "plan": "harness.plan",
    "doctor": "harness.doctor",
    "baseline": "harness.baseline",
    "regress": "harness.regress",
    "promote": "harness.promote",
    "profile": "harness.profile",
    "checkpoints": "harness.checkpoints",
    "bench": "harness.bench",
    "bench-multi": "harness.bench_multi",
}

HELP: dict[str, str] = {
    "speedrun": "train on the hardware found here, evaluate, and print a summary",
    "runs": "list the runs on this machine",
    "curve": "draw the loss curves of runs as PNG and SVG",
    "report": "one self-contained HTML page (and Markdown) about one or more runs",
    "plan": "memory, time, cost and strategy of a run, before anything is rented",
    "doctor": "check the machine and a config against known mistakes",
    "baseline": "freeze runs as a baseline; list, show and verify baselines",
    "regress": "test runs against a baseline: PASS, FAIL or INCONCLUSIVE",
    "promote": "measure a candidate against the control, gate it, record the verdict",
    "profile": "split a steady training step and name the binding limit",
    "checkpoints": "list, verify and prune the checkpoints of a run",
    "bench": "measure the figures that the documentation states",
    "bench-multi": "scaling, same curve, promotions, lost rank and evaluation on several devices",
}


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """Parser with every command listed, and `command` alone filled in by its module."""
    parser = OneLineParser(prog="python -m harness", description=__doc__.split("\n")[0])
    sub = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in SUBCOMMANDS.items():
        if name == command:
            importlib.import_module(module).add_parser(sub)
        else:
            sub.add_parser(name, help=HELP[name])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (2 for a person's mistake, 130 when interrupted)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = argv[0] if argv and argv[0] in SUBCOMMANDS else None
    flags: list[str] = []
    try:
        if command and getattr(importlib.import_module(SUBCOMMANDS[command]), "TRAINER_FLAGS", False):
            # Split here: argparse cannot tell an optional positional from flags after "--".
            cut = argv.index("--") if "--" in argv else len(argv)
            argv, flags = argv[:cut], argv[cut + 1 :]
        args = build_parser(command).parse_args(argv)
        args.trainer_flags = flags
        code = int(importlib.import_module(SUBCOMMANDS[args.command]).run(args))
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse: --help or a wrong flag
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `... | head`: nobody reads on, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if not is_user_error(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
