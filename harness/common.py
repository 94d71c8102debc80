"""What several commands share: starting processes, and finding and reading run directories.

Nothing here imports torch, so that light commands answer at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRAINER = Path(__file__).resolve().parents[1] / "train_gpt2.py"
SCHEMA = 1  # the version of a run's JSON files that this code reads; train_gpt2.SCHEMA


class UserError(ValueError):
    """A person's mistake: one clear line, exit code 2. The trainer's own is treated the same."""


def is_user_error(error: BaseException) -> bool:
    """True for our UserError and for the trainer's, without importing the trainer to ask."""
    trainer = sys.modules.get("train_gpt2")
    return isinstance(error, UserError) or (trainer is not None and isinstance(error, trainer.UserError))


def run_process(command: Sequence[str]) -> int:
    """Run `command` with its output streamed through, and return its exit code (128+n for signal n).

    The child gets its own process group, and Ctrl-C and SIGTERM are passed on to it once each: on a
    terminal it would otherwise see Ctrl-C itself as well, and take it for the second one, which means
    "stop without saving". We wait for it to end either way.
    """
    child = subprocess.Popen(command, process_group=0)
    previous = {
        number: signal.signal(number, lambda n, _frame: child.send_signal(n)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        code = child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def kill_family(pid: int) -> None:
    """SIGKILL to a process group and to all that its leader has started: torchrun gives each worker a session of its own."""
    import psutil

    family = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.kill()


def flag_value(argv: Sequence[str], flag: str) -> str | None:
    """The value of `--flag value` or `--flag=value` in `argv` (the last one wins), or None."""
    value = None
    for i, arg in enumerate(argv):
        if arg == flag and i + 1 < len(argv):
            value = argv[i + 1]
        elif arg.startswith(flag + "="):
            value = arg.split("=", 1)[1]
    return value


def without_flags(argv: Sequence[str], *flags: str) -> list[str]:
    """`argv` without these flags and their values, in either spelling; a flag without a value may stand alone."""
    kept = []
    for i, word in enumerate(argv):
        value = i > 0 and argv[i - 1] in flags and not word.startswith("--")
        if not value and word.split("=", 1)[0] not in flags:
            kept.append(word)
    return kept


def launcher(ranks: int = 1, *options: str) -> list[str]:
    """What a script (or -m and a module) is appended to: the interpreter, or torchrun with so many ranks of this node."""
    if ranks <= 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *options]


def launch_training(argv: Sequence[str], gpus: int = 1, max_restarts: int = 0) -> int:
    """Run the trainer with `argv` on `gpus` ranks of this node; returns the trainer's exit code.

    One rank is a plain `python train_gpt2.py`. Several go through torchrun, which starts all of them again up to
    `max_restarts` times when one is lost, and turns every failure into 1: the trainer's own code is then read
    from the result.json that this launch wrote.
    """
    if gpus <= 1:
        return run_process([sys.executable, str(TRAINER), *argv])
    started = time.time()
    code = run_process([*launcher(gpus, f"--max-restarts={max_restarts}"), str(TRAINER), *argv])
    if run_dir := flag_value(argv, "--run-dir"):
        result = Path(run_dir) / "result.json"
        if result.exists() and result.stat().st_mtime >= started:
            return int(read_json(result)["exit_code"])
        return code or 1  # an end that is not worth a restart is a success to torchrun, and this one left no result
    return code


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a run, its schema version checked. Raises UserError that names the file."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    version = content.get("schema") if isinstance(content, dict) else None
    if version != SCHEMA:
        raise UserError(f"{path} has schema {version!r}; this version reads schema {SCHEMA}")
    return content


def run_directory(name: str, root: Path = Path("runs")) -> Path:
    """The run directory that a person means by a path or by a bare name under `root`."""
    for path in (Path(name), root / name):
        if (path / "config.json").is_file():
            return path
    raise UserError(f"{name} is not a run directory (no config.json there or in {root / name})")


def find_runs(root: Path = Path("runs")) -> list[Path]:
    """Run directories directly under `root`, oldest first."""
    if not root.is_dir():
        return []
    runs = [path.parent for path in root.glob("*/config.json")]
    return sorted(runs, key=lambda run: ((run / "config.json").stat().st_mtime, run.name))


def human_count(value: float, digits: int = 3) -> str:
    """1234567 -> '1.23M'."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.{digits}g}{suffix}"
    return f"{value:.{digits}g}"
