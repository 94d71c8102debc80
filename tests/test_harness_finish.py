"""--on-finish for someone who rents: after a preemption, once, with nothing left to save."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from train_support import flags
from trainer_jobs import Job

from train_gpt2 import Exit, verify_checkpoint


def wait_for(path: Path, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.005)


def test_a_preempted_run_saves_before_the_machine_is_stopped(shards: Path, tmp_path: Path) -> None:
    """SIGTERM with saves under way on two ranks: what the command finds is whole, verified and the newest."""
    run, found, count = tmp_path / "run", tmp_path / "found", tmp_path / "count"
    # The command copies what it finds when it runs; a machine that it stopped would leave exactly this.
    command = f"cp -r {run} {found} && echo x >> {count}"
    argv = flags(
        "sample",
        shards,
        run,
        max_steps=100_000,
        epochs=10_000,
        val_every=0,
        checkpoint_every=3,
        on_finish=command,
    )
    argv = [part for flag in argv for part in (flag.split("=", 1) if flag.startswith("--") else [flag])]
    job = Job(argv, world=2)
    wait_for(run / "checkpoints" / "latest")
    pid = job.ranks[0].pid
    assert pid
    os.kill(pid, signal.SIGTERM)
    assert job.wait() == Exit.STOPPED, job.output()
    assert count.read_text() == "x\n"  # once, not once per rank

    end = json.loads((found / "result.json").read_text())
    assert end["exit_reason"] == "stopped"
    latest = found / "checkpoints" / (found / "checkpoints" / "latest").read_text().strip()
    assert verify_checkpoint(latest)["step"] == end["step"]
    assert not list((found / "checkpoints").glob(".tmp-*"))  # nothing pending
    assert (found / "model.safetensors").exists()
