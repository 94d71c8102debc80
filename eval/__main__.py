"""`python -m eval`: numbers about a trained model, each with its definition and its noise."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

# Command -> help. Each is a module of this package with add_arguments(parser) and run(args) -> exit code.
COMMANDS = {
    "val": "validation loss: the run's own number again, or any model on any shards",
    "hellaswag": "HellaSwag accuracy in llm.c's or lm-eval's definition",
    "lambada": "last-word accuracy and loss (LAMBADA)",
    "sample": "generate text",
    "export": "write a run's weights for transformers or as safetensors",
    "reference": "a published model's numbers, ours beside the published ones",
    "compare": "two runs side by side, differences with intervals",
    "bench": "HellaSwag speed against one example per forward",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """argparse's own errors as one line, like all others."""
        print(f"error: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 2 for a person's mistake, 1 where a reference cannot be had."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="python -m eval", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        # Importing a command imports torch, so only the one asked for is loaded, and `--help` answers at
        # once.
        if argv[:1] == [name]:
            module = importlib.import_module(f"eval.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    from train_gpt2 import UserError

    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `... | head`: nobody reads on, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, OSError) as error:
        line = str(error) if isinstance(error, UserError) else f"{error.filename or 'disk'}: {error.strerror}"
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {line}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
