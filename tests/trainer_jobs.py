"""Real trainings of tiny models as processes of their own, for tests that kill, resume and compare them.

A server process imports torch once and forks every rank from itself, so that a training takes a second or two
instead of ten. Ranks find each other as under torchrun, by the same variables.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
# The server finds modules by this variable alone.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])
CONTEXT.set_forkserver_preload(["train_gpt2", "torch.distributed.checkpoint", "trainer_jobs"])

TINY = [
    f"--{name}={value}"
    for name, value in {
        "n-layer": 2, "n-head": 2, "n-embd": 32, "seq-len": 16, "vocab-size": 200, "padded-vocab": 256, "batch-tokens": 256,
        "micro-batch": 4, "val-every": 5, "val-tokens": 128, "val-batch": 4, "threads": 1, "device": "cpu", "precision": "fp32",
        "compile": "off", "comm-timeout": 20,
    }.items()
]  # fmt: skip
RECIPE = {
    "adamw": [
        "gpt2", *TINY, "--warmup-steps", "3", "--weight-decay", "0.1",
        "--lr", "0.01", "--embed-lr", "0.01", "--scalar-lr", "0.01",
    ],
    "muon": ["speedrun", *TINY, "--value-embeds", "1", "--muon-momentum-warmup", "5", "--head-precision", "same"],
}  # fmt: skip


def _rank(argv: list[str], environment: dict[str, str], log: str, trap: tuple[str, str, int] | None) -> None:
    os.environ |= environment
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    import torch

    import train_gpt2

    torch.set_num_threads(1)
    if trap is not None:
        set_trap(*trap)
    code = train_gpt2.main(argv)
    sys.stderr.flush()
    sys.exit(code)


def set_trap(event: str, pattern: str, count: int) -> None:
    """SIGKILL for this process at the count-th audit event (open, os.rename, shutil.rmtree ...) about a path like `pattern`.

    The interpreter reports these just before it does them: no code of the trainer is replaced.
    """
    seen = 0

    def hook(name: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        if name == event and any(isinstance(a, (str, os.PathLike)) and re.search(pattern, os.fspath(a)) for a in args):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


JOBS: list[Job] = []


def kill_all() -> None:
    """Ends what a failed test has left running."""
    while JOBS:
        JOBS.pop().kill()


class Job:
    """One training on `world` ranks, started at once."""

    def __init__(self, argv: Sequence[str], world: int = 1, trap: tuple[str, str, int] | None = None, **environment: str):
        run_dir = Path(argv[argv.index("--run-dir") + 1])
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self.log = run_dir.with_name(run_dir.name + f".log-{time.monotonic_ns()}")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        self.ranks: list[BaseProcess] = []
        JOBS.append(self)
        for rank in range(world):
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", **environment}
            p = CONTEXT.Process(target=_rank, args=(list(argv), variables, str(self.log), trap if rank == 0 else None))
            p.start()
            self.ranks.append(p)

    def alive(self) -> bool:
        return all(p.is_alive() for p in self.ranks)

    def wait(self, timeout: float = 120) -> int:
        """The exit code of rank 0 once every rank has ended; the other ranks of one that was killed are killed too."""
        deadline = time.monotonic() + timeout
        while any(p.is_alive() for p in self.ranks):
            if any(p.exitcode == -signal.SIGKILL for p in self.ranks) or time.monotonic() > deadline:
                self.kill()
            time.sleep(0.01)
        assert time.monotonic() < deadline, f"the training hangs:\n{self.output()}"
        code = self.ranks[0].exitcode
        assert code is not None
        return code

    def kill(self) -> None:
        for p in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                p.kill()
        for p in self.ranks:
            p.join()

    def kill_when(self, moment: Callable[[], object], timeout: float = 60) -> bool:
        """SIGKILL to every rank once moment() is true; False where the training had ended before."""
        deadline = time.monotonic() + timeout
        while not moment() and self.alive():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.001)
        killed = self.alive()
        self.kill()
        return killed

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def run(argv: Sequence[str], world: int = 1, code: int = 0, timeout: float = 120) -> str:
    """One training to its end; returns what it printed."""
    job = Job(argv, world)
    assert job.wait(timeout) == code, job.output()
    return job.output()
