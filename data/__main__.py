"""`python -m data`: token shards, fetched or built, and checked."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from pathlib import Path

from data.errors import is_user_error

# What a folder that cannot be written looks like; any other OSError is a bug and keeps its traceback.
_FOLDER_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """argparse's own errors as one line, like all others."""
        print(f"error: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def run_sample(args: argparse.Namespace) -> int:
    from data.sample import make_sample

    made = make_sample(args.out)
    print(f"{args.out}: sample shards {'written' if made else 'verified'}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    sample = commands.add_parser(
        "sample", help="make the embedded sample shards (249 presidential addresses)"
    )
    sample.add_argument("--out", type=Path, default=Path("data/sample"), help="folder (default: %(default)s)")
    sample.set_defaults(run=run_sample)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 2 for a person's mistake, 7 for a full disk."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except ValueError as error:
        if not is_user_error(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and error.errno not in _FOLDER_ERRORS:
            raise
        advice = "free some space and run the same command again" if full else "choose another folder"
        print(f"error: {error.filename or 'disk'}: {error.strerror}; {advice}", file=sys.stderr)
        return 7 if full else 2


if __name__ == "__main__":
    raise SystemExit(main())
