"""Several ranks: the same curve, weights and ends as one rank, whatever the optimizer and the way work is shared.

Four processes are forked once from a server that has torch loaded, and go through all jobs of `JOBS` over gloo; the tests
below only look at what they left. Two launches of torchrun cover what torchrun itself adds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from train_support import flags, result, rows, write_shards

# Large enough that most parameters are reduced in the backward pass (from 65,536 numbers on) and some together after it.
WIDE = {"n_embd": 160, "n_head": 2, "vocab_size": 500, "padded_vocab": 512, "max_steps": 6}
PATIENCE = 400.0  # seconds for all jobs; on two free cores they take about 30
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("gpt2", {"lr": 0.003, "embed_lr": 0.003, "warmup_steps": 2, "clip": 0.5}),
    "muon": ("sample", {"value_embeds": 1, "muon_momentum_warmup": 3, "tied_steps": 4}),
}
MODES = ("ddp", "owner", "zero1", "fsdp2", "fsdp3")
CASES = [(mode, world) for mode in MODES for world in (2, 4) if (mode, world) != ("fsdp2", 4)]


@dataclass
class Job:
    """One run by the first `world` of four processes."""

    name: str
    world: int
    recipe: str
    changes: dict[str, Any] = field(default_factory=dict)
    poison: tuple[int, int] | None = None  # (rank, step): one number of this rank's gradient is nan in this step
    stop: tuple[int, int] | None = None  # (rank, signal): sent to this rank alone once three steps are logged


def jobs() -> list[Job]:
    todo = []
    for kind, (recipe, changes) in KINDS.items():
        todo.append(Job(f"{kind}-1", 1, recipe, changes))
        todo += [Job(f"{kind}-{mode}-{world}", world, recipe, {**changes, "parallel": mode}) for mode, world in CASES]
    still = {**KINDS["muon"][1], "schedule": "constant", "val_every": 0}
    todo.append(Job("before", 2, "sample", {**still, "parallel": "zero1", "max_steps": 3}))
    todo.append(Job("poisoned", 2, "sample", {**still, "parallel": "zero1"}, poison=(1, 4)))
    todo.append(Job("fp16", 2, "gpt2", {**KINDS["adamw"][1], "parallel": "zero1", "precision": "fp16"}, poison=(1, 2)))
    todo.append(Job("bf16", 2, "sample", {**KINDS["muon"][1], "parallel": "owner", "reduce_precision": "bf16"}))
    long = {"max_steps": 5_000, "epochs": 900, "parallel": "owner", "val_every": 0}
    todo.append(Job("stopped", 2, "sample", long, stop=(1, signal.SIGTERM)))
    todo.append(Job("taken", 2, "gpt2", {"parallel": "ddp"}))  # its run directory holds a run already
    todo.append(Job("indivisible", 4, "gpt2", {"micro_batch": 4}))
    return todo


def work(rank: int, todo: list[Job], ports: list[int], data: Path, out: Path, barrier: Any) -> None:
    """The life of one process: every job that has this rank. Writes <job>/rank<k>.json and rank<k>.txt beside the runs."""
    import torch

    import train_gpt2

    seen: list[Any] = []

    class Watched(train_gpt2.Trainer):
        def setup(self) -> None:
            super().setup()
            seen.append(self)
            if job.poison and job.poison[0] == self.rank:
                self.model.wte.weight.register_hook(
                    lambda g: (
                        g.index_fill(0, torch.tensor(3), math.nan) if self.step == job.poison[1] - 1 and self.loader.wait_s else g
                    )
                )
            if job.stop and job.stop[0] == self.rank:
                threading.Thread(target=stop_later, args=(self.run_dir, job.stop[1]), daemon=True).start()

        def finish(self, *args: Any) -> None:
            digest = hashlib.sha256()
            for p in self.weights().values():  # of all ranks together where they are sharded
                digest.update(p.contiguous().numpy().tobytes())
            self.digest = digest.hexdigest()
            super().finish(*args)

    train_gpt2.Trainer = Watched  # type: ignore[misc]
    for job, port in zip(todo, ports, strict=True):
        barrier.wait(PATIENCE)  # no rank waits in a connection for one that is jobs behind
        if rank >= job.world:
            continue
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.world), "LOCAL_WORLD_SIZE": str(job.world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        seen.clear()
        with open(out / f"{job.name}.rank{rank}.txt", "w") as stderr, contextlib.redirect_stderr(stderr):
            code = train_gpt2.main(flags(job.recipe, data, out / job.name, **{**WIDE, **job.changes}))
        report: dict[str, Any] = {"code": int(code)}
        for trainer in seen:
            report |= {"weights": trainer.digest, "step": trainer.step, "state": sorted(trainer.optimizer.state())}
        (out / f"{job.name}.rank{rank}.json").write_text(json.dumps(report))


def stop_later(run_dir: Path, number: int) -> None:
    deadline = time.monotonic() + 20
    metrics = run_dir / "metrics.jsonl"
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count('"train"') >= 3):
        time.sleep(0.005)
    os.kill(os.getpid(), number)


def free_ports(count: int) -> list[int]:
    """Below those that the system gives to outgoing connections, which would take them before their turn comes."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(12_000, 32_000), 20 * count):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            break
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all jobs have been run."""
    out = tmp_path_factory.mktemp("ranks")
    data = write_shards(out / "data", train=(700, 37, 400), val=(90, 60))
    (out / "taken").mkdir()
    (out / "taken" / "config.json").write_text("{}")
    todo = jobs()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_gpt2"])
    ports, barrier = free_ports(len(todo)), context.Barrier(4)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    processes = [context.Process(target=work, args=(r, todo, ports, data, out, barrier)) for r in range(4)]
    try:
        for p in processes:
            p.start()
        deadline = time.monotonic() + PATIENCE
        for p in processes:
            p.join(max(0.1, deadline - time.monotonic()))
        assert [p.exitcode for p in processes] == [0, 0, 0, 0], sorted(p.name for p in out.glob("*.json"))
    finally:
        for p in processes:
            p.kill()
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return out


def reports(done: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(p.read_text()) for p in sorted(done.glob(f"{name}.rank*.json"))]


def curve(run_dir: Path) -> list[float]:
    return [r["loss"] for r in rows(run_dir, "train")] + [r["val_loss"] for r in rows(run_dir, "val")]


@pytest.mark.parametrize(("mode", "world"), CASES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_curve_is_that_of_one_rank(done: Path, kind: str, mode: str, world: int) -> None:
    """1 rank x 4 accumulation steps, 2 x 2, 4 x 1. Sums in another order: fp32 rounding grown over six updates."""
    one, many = done / f"{kind}-1", done / f"{kind}-{mode}-{world}"
    assert result(many)["world_size"] == world and result(many)["exit_code"] == 0
    expected = curve(one)
    assert len(expected) == 6 + 3 and expected[5] < expected[0] - 0.1
    assert curve(many) == pytest.approx(expected, rel=2e-5)
    norms = [[r["grad_norm"] for r in rows(d, "train")] for d in (one, many)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    a, b = load_file(one / "model.safetensors"), load_file(many / "model.safetensors")
    off = sum(((a[k] - b[k]) ** 2).sum().item() for k in a)
    moved = sum((a[k] ** 2).sum().item() for k in a)
    assert off <= (2e-4) ** 2 * moved
    steps = [[(r["step"], r["tokens"], r["epoch"], r["lr"]) for r in rows(d, "train")] for d in (one, many)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(("mode", "world"), CASES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_replicas_end_bit_equal(done: Path, kind: str, mode: str, world: int) -> None:
    found = reports(done, f"{kind}-{mode}-{world}")
    assert len(found) == world and {r["code"] for r in found} == {0} and {r["step"] for r in found} == {6}
    assert len({r["weights"] for r in found}) == 1


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", list(KINDS))
def test_optimizer_state_lives_where_the_mode_says(done: Path, kind: str, world: int) -> None:
    """ddp: everywhere. owner, fsdp: Muon's on one rank each, AdamW's everywhere (in fsdp a part). zero1: all on one rank each."""
    (one,) = reports(done, f"{kind}-1")
    whole = sorted(one["state"])
    muon = [k for k in whole if k.startswith(("momentum.", "second."))]
    assert bool(muon) == (kind == "muon")
    assert all(r["state"] == whole for r in reports(done, f"{kind}-ddp-{world}"))
    for mode in ("owner", "fsdp3"):
        owner = [r["state"] for r in reports(done, f"{kind}-{mode}-{world}")]
        assert sorted(k for s in owner for k in s if k in muon) == muon
        assert all([k for k in s if k not in muon] == [k for k in whole if k not in muon] for s in owner)
    zero1 = [r["state"] for r in reports(done, f"{kind}-zero1-{world}")]
    assert sorted(k for s in zero1 for k in s) == whole and all(zero1)


def test_a_bad_number_on_one_rank_stops_all_with_the_weights_before_it(done: Path) -> None:
    found, before = reports(done, "poisoned"), reports(done, "before")
    assert [r["code"] for r in found] == [3, 3] and [r["code"] for r in before] == [0, 0]
    assert {r["weights"] for r in found} == {r["weights"] for r in before} and len({r["weights"] for r in found}) == 1
    end = result(done / "poisoned")
    assert (end["exit_reason"], end["step"]) == ("non_finite", 3)
    said = [(done / f"poisoned.rank{r}.txt").read_text() for r in (0, 1)]
    assert said[0].count("error: ") == 1 and "at step 4" in said[0] and "error" not in said[1]


def test_an_fp16_overflow_on_one_rank_skips_the_step_on_all(done: Path) -> None:
    found = reports(done, "fp16")
    assert [r["code"] for r in found] == [0, 0] and found[0]["weights"] == found[1]["weights"]
    losses, plain = ([r["loss"] for r in rows(done / n, "train")] for n in ("fp16", "adamw-zero1-2"))
    assert losses[:2] == pytest.approx(plain[:2], rel=2e-3)  # one update made, then the poisoned one skipped
    assert losses[2] > plain[2] and losses[5] < losses[0] - 0.05


def test_gradients_may_travel_in_bf16(done: Path) -> None:
    found = reports(done, "bf16")
    assert [r["code"] for r in found] == [0, 0] and found[0]["weights"] == found[1]["weights"]
    half, full = curve(done / "bf16"), curve(done / "muon-owner-2")
    assert half == pytest.approx(full, rel=1e-2) and half != full


def test_a_signal_to_any_rank_stops_all_after_the_same_step(done: Path) -> None:
    found = reports(done, "stopped")
    assert [r["code"] for r in found] == [5, 5] and found[0]["step"] == found[1]["step"]
    end = result(done / "stopped")
    assert end["exit_reason"] == "stopped" and 3 <= end["step"] < 5_000 and end["step"] == found[0]["step"]
    assert (done / "stopped" / "checkpoints" / f"step-{end['step']:06d}" / "manifest.json").exists()
    assert found[0]["weights"] == found[1]["weights"]


@pytest.mark.parametrize(("name", "world", "said"), [("taken", 2, "--resume"), ("indivisible", 4, "micro-batch")])
def test_bad_input_ends_every_rank_and_only_rank_0_speaks(done: Path, name: str, world: int, said: str) -> None:
    assert [r["code"] for r in reports(done, name)] == [2] * world
    first, *others = [(done / f"{name}.rank{r}.txt").read_text() for r in range(world)]
    assert first.startswith("error: ") and said in first and first.count("\n") == 1
    assert others == [""] * (world - 1)
    assert not (done / name / "metrics.jsonl").exists() and not (done / "indivisible").exists()


# ------------------------------------------------------------------------------- torchrun itself


def torchrun(folder: Path, options: list[str], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    import train_gpt2

    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, train_gpt2.__file__, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)


def test_torchrun_ranks_agree_on_a_run_directory(tmp_path: Path) -> None:
    data = write_shards(tmp_path / "data")
    ended = torchrun(tmp_path, ["--nproc_per_node=2"], flags("sample", data, "", max_steps=3))
    assert ended.returncode == 0, ended.stderr[-2000:]
    (found,) = (tmp_path / "runs").iterdir()
    assert result(found)["world_size"] == 2 and len(rows(found, "train")) == 3
    assert ended.stderr.count("run directory: ") == 1


def test_torchrun_does_not_retry_bad_input(tmp_path: Path) -> None:
    data = write_shards(tmp_path / "data")
    ended = torchrun(tmp_path, ["--max-restarts=3"], flags("sample", data, tmp_path / "run", max_steps=5_000))
    assert ended.stderr.count("error: ") == 1 and "need 640,000 train tokens" in ended.stderr
    assert "Traceback" not in ended.stderr and not (tmp_path / "run").exists()
