"""Runs that are killed, stopped, damaged and moved to other ranks, against runs that were left alone."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_support import read_tokens, shard_bytes, write_shards
from trainer_jobs import RECIPE, Job, kill_all, run

OPTIMIZERS = ["adamw", "muon"]
STEPS = 24


@pytest.fixture(autouse=True)
def no_training_is_left() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1737 train tokens in three shards: a step of 256 crosses a shard's end every few steps, and 24 steps are 3.5 epochs."""
    return write_shards(tmp_path_factory.mktemp("data"), (1000, 37, 700), (400,))


def flags(optimizer: str, data: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        *RECIPE[optimizer], "--data", str(data), "--run-dir", str(run_dir), "--max-steps", str(STEPS), "--epochs", "9",
        "--checkpoint-every", "3", *more,
    ]  # fmt: skip


def rows(run_dir: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Rows of metrics.jsonl by kind and step, a later one in place of an earlier one."""
    out = {}
    if (run_dir / "metrics.jsonl").exists():
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # cut short by a kill
                continue
            if row["kind"] != "resume":
                out[row["kind"], row["step"]] = row
    return out


def losses(run_dir: Path) -> dict[tuple[str, int], float]:
    return {key: row["loss" if key[0] == "train" else "val_loss"] for key, row in rows(run_dir).items()}


def norms(run_dir: Path) -> list[float]:
    return [row["grad_norm"] for (kind, _), row in sorted(rows(run_dir).items()) if kind == "train"]


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(run_dir / "model.safetensors")


def assert_same_run(a: Path, b: Path, steps: int = STEPS) -> None:
    """Every loss, norm and weight of two finished runs, bit for bit."""
    assert losses(a) == losses(b) and norms(a) == norms(b)
    assert sorted(s for kind, s in losses(a) if kind == "train") == list(range(1, steps + 1))
    wa, wb = weights(a), weights(b)
    assert wa.keys() == wb.keys() and all(np.array_equal(wa[k], wb[k]) for k in wa)


def saved(run_dir: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in (run_dir / "checkpoints").glob("step-*"))


def result(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The run directory of an unbroken run, made once for each optimizer and number of ranks."""
    made: dict[tuple[str, int], Path] = {}
    folder = tmp_path_factory.mktemp("unbroken")

    def get(optimizer: str, world: int = 1) -> Path:
        if (optimizer, world) not in made:
            made[optimizer, world] = folder / f"{optimizer}-{world}"
            run(flags(optimizer, data, made[optimizer, world]), world)
        return made[optimizer, world]

    return get


# -- killed and resumed: bit-equal

# The interpreter reports these events just before they happen: in turn during the save of step 9, at the manifest, between
# the files and the final name, before `latest` moves, while an older checkpoint is purged, and in its removal.
NAMED = [
    ("open", r"tmp-000009-.*/__0_0.distcp", 1),
    ("open", r"tmp-000009-.*/\.metadata", 1),
    ("os.rename", r"tmp-000009-.*/.manifest.json", 1),
    ("os.rename", r"/step-000009$", 1),
    ("open", r"step-000009/__0_0.distcp", 1),
    ("os.rename", r"\.latest\..*", 3),
    ("os.rename", r"/step-000003$", 2),
    ("shutil.rmtree", r"old-step-000003", 1),
]


def killed_and_resumed(argv: list[str], run_dir: Path, world: int, trap: tuple[str, str, int]) -> None:
    """Kills at the trap, then resumes to the end."""
    job = Job(argv, world, trap)
    assert job.wait() == -signal.SIGKILL, f"{trap} was never reached: {job.output()}"
    run([*argv, "--resume"], world)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_killed_during_a_save_and_during_the_purge(
    optimizer: str, data: Path, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    argv = flags(optimizer, data, tmp_path / "run")
    job = Job(argv, 1, NAMED[1])
    assert job.wait() == -signal.SIGKILL, job.output()
    assert saved(tmp_path / "run") == [3, 6] and list((tmp_path / "run" / "checkpoints").glob(".tmp-000009-*"))
    job = Job([*argv, "--resume"], 1, ("shutil.rmtree", r"old-step-000009", 1))  # a second resume in a row follows
    assert job.wait() == -signal.SIGKILL, job.output()
    assert "resumed from" in job.output() and "step 6" in job.output()
    run([*argv, "--resume"])
    assert_same_run(unbroken(optimizer), tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").glob(".*")) and saved(tmp_path / "run") == [21, 24]


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_killed_at_twenty_moments(optimizer: str, world: int, data: Path, tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    chance = random.Random(world)
    for i, trap in enumerate(NAMED):
        run_dir = tmp_path / f"named-{i}"
        killed_and_resumed(flags(optimizer, data, run_dir), run_dir, world, trap)
        assert_same_run(unbroken(optimizer, world), run_dir)
    run_dir = tmp_path / "random"
    argv = flags(optimizer, data, run_dir)
    kills = 0
    while kills < 12:  # one run after another, killed again and again
        shutil.rmtree(run_dir, ignore_errors=True)
        resume: list[str] = []
        for moment in ("first", "validation", "any", "any"):
            job = Job([*argv, *resume], world)
            if moment == "first":
                killed = job.kill_when(lambda: saved_any(run_dir))
            elif moment == "validation":  # the train row of the step is there, its val row not yet
                here = max((s for kind, s in losses(run_dir) if kind == "train"), default=0)
                killed = job.kill_when(lambda here=here: in_validation(run_dir, here))
            else:
                job_started = len(losses(run_dir))
                wait = chance.uniform(0, 0.6)
                job.kill_when(lambda n=job_started: len(rows_written(run_dir)) > n)
                killed = True
                job = Job([*argv, "--resume"], world)
                began = time.monotonic()
                killed = job.kill_when(lambda began=began, wait=wait: time.monotonic() - began > 1 + wait)
            kills += killed
            resume = ["--resume"]
        run([*argv, "--resume"], world)
        assert_same_run(unbroken(optimizer, world), run_dir)


def saved_any(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("step-*")) if run_dir.exists() else False


def rows_written(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text().splitlines() if (run_dir / "metrics.jsonl").exists() else []


def in_validation(run_dir: Path, after: int, every: int = 5) -> bool:
    done = losses(run_dir)
    last = max((s for kind, s in done if kind == "train"), default=0)
    return last > after and last % every == 0 and ("val", last) not in done


@pytest.mark.full
def test_killed_at_every_file_event_of_a_save(data: Path, tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    """Between any two events of the whole third save, from its first file to the end of the purge."""
    for event in ("open", "os.rename", "shutil.rmtree", "os.mkdir", "os.remove"):
        for count in range(1, 1000):
            run_dir = tmp_path / f"{event}-{count}"
            argv = flags("muon", data, run_dir, "--max-steps", "12", "--schedule", "constant")
            job = Job(argv, 1, (event, r"checkpoints/.*(000009|latest|old-)", count))
            if job.wait() == 0:
                break
            run([*argv, "--resume", "auto"])
            if count == 1 and event == "open":
                first = losses(run_dir)
            assert losses(run_dir) == first, (event, count)
            shutil.rmtree(run_dir)


# -- other ranks


def close_run(a: Path, b: Path, tolerance: float) -> None:
    la, lb = losses(a), losses(b)
    assert la.keys() <= lb.keys()  # the end of a shorter run is validated as well
    assert max(abs(la[k] - lb[k]) for k in la) < tolerance


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.full)])
def test_saved_on_two_ranks_and_resumed_on_one(optimizer: str, data: Path, tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    moved = tmp_path / "run"
    run(flags(optimizer, data, moved, "--max-steps", "12", "--schedule", "constant"), 2)
    states = list((moved / "checkpoints" / "step-000012").glob("*.distcp"))
    sizes = [p.stat().st_size for p in states]
    assert len(sizes) == 2 and min(sizes) > 0.3 * max(sizes)  # sharded, and nothing twice
    run(flags(optimizer, data, moved, "--schedule", "constant", "--resume"), 1)
    whole = tmp_path / "whole"
    run(flags(optimizer, data, whole, "--schedule", "constant"), 1)
    close_run(whole, moved, 2e-4)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "parallel",
    [
        ("owner", "zero1", "ddp"),
        ("ddp", "owner", "zero1"),
        ("zero1", "ddp", "owner"),
        ("fsdp2", "owner", "fsdp3"),
        ("ddp", "fsdp3", "zero1"),
    ],
)
def test_two_to_one_to_four_ranks_and_back(optimizer: str, parallel: tuple[str, str, str], data: Path, tmp_path: Path) -> None:
    moved, whole = tmp_path / "moved", tmp_path / "whole"
    run(flags(optimizer, data, whole, "--schedule", "constant"), 1)
    for steps, world, mode in ((6, 2, 0), (12, 1, 0), (18, 4, 1), (24, 2, 2)):
        more = ["--resume"] if steps > 6 else []
        run(
            flags(
                optimizer, data, moved, "--schedule", "constant", "--max-steps", str(steps), "--parallel", parallel[mode], *more
            ),
            world,
        )
    a, b = losses(whole), losses(moved)
    train = [k for k in a if k[0] == "train"]
    assert max(abs(a[k] - b[k]) for k in train) < 5e-4
    assert all(rows(moved)[k]["tokens"] == rows(whole)[k]["tokens"] for k in train)


# -- stopped by a signal


def test_sigterm_saves_and_the_rest_is_the_same_run(data: Path, tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    run_dir = tmp_path / "run"
    argv = flags("muon", data, run_dir, "--checkpoint-every", "100")
    job = Job(argv)
    while len(rows_written(run_dir)) < 5 and job.alive():
        time.sleep(0.001)
    os.kill(job.ranks[0].pid or 0, signal.SIGTERM)
    assert job.wait() == 5, job.output()
    stop = saved(run_dir)
    assert len(stop) == 1 and 0 < stop[0] < STEPS and f"saved at step {stop[0]}" in job.output() and "--resume" in job.output()
    assert result(run_dir)["exit_reason"] == "stopped" and result(run_dir)["exit_code"] == 5
    assert "Traceback" not in job.output()
    run([*argv, "--resume"])
    assert_same_run(unbroken("muon"), run_dir)
    again = run([*argv, "--resume"])  # nothing left to do: no save, the same result
    assert "nothing to train" in again and result(run_dir)["checkpoints"]["saves"] == 0
    assert_same_run(unbroken("muon"), run_dir)


def test_a_second_interrupt_stops_at_once(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = Job(flags("adamw", data, run_dir, "--max-steps", "100000", "--epochs", "100000"))
    while not saved_any(run_dir) and job.alive():
        time.sleep(0.001)
    pid = job.ranks[0].pid or 0
    os.kill(pid, signal.SIGSTOP)  # both arrive before the step can end
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.002)
    if job.alive():
        os.kill(pid, signal.SIGINT)
    assert job.wait() in (130, 5), job.output()
    import train_gpt2

    for path in (run_dir / "checkpoints").glob("step-*"):
        train_gpt2.verify_checkpoint(path)


# -- lost ranks


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_a_dead_or_hung_rank_is_named_and_ends_the_job(how: signal.Signals, data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    more = ["--max-steps", "100000", "--epochs", "100000", "--comm-timeout", "8"]
    job = Job(flags("muon", data, run_dir, *more), 4 if how == signal.SIGSTOP else 2)
    while len(rows_written(run_dir)) < 8 and job.alive():
        time.sleep(0.01)
    os.kill(job.ranks[1].pid or 0, how)
    began = time.monotonic()
    job.ranks[0].join(30)
    seconds = time.monotonic() - began
    output = job.output()
    job.kill()
    assert job.ranks[0].exitcode == 6, output
    assert seconds < 8 + 5 + 7, seconds
    assert re.search(r"error: rank 0 lost another rank at step \d+: rank 1 \(process \d+\) is (dead|stopped)", output), output
    assert result(run_dir)["exit_reason"] == "peer_lost"


# -- refusals: one line, exit code 2, nothing changed


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    run(flags("adamw", data, run_dir, "--max-steps", "9"))
    return run_dir


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--n-layer", "3"], "n_layer 2 -> 3"),
        (["--lr", "0.02", "--clip", "0.5"], r"lr 0\.01 -> 0\.02; clip 1\.0 -> 0\.5"),
        (["--seed", "7"], "seed 1337 -> 7"),
        (["--optimizer", "muon"], "optimizer 'adamw' -> 'muon'"),
        (["--data", "{other}"], "data fingerprint"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_the_differences(
    change: list[str], said: str, data: Path, finished: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    other = write_shards(tmp_path / "other", (1000, 800), (400,))
    before = snapshot(run_dir)
    argv = flags("adamw", data, run_dir, "--resume", *(c.replace("{other}", str(other)) for c in change))
    output = run(argv, code=2)
    assert re.fullmatch(f"error: the checkpoint belongs to another run: .*{said}.*\n", output), output
    assert snapshot(run_dir) == before


def test_a_run_directory_in_use_is_refused_without_resume(data: Path, finished: Path) -> None:
    before = snapshot(finished)
    output = run(flags("adamw", data, finished), code=2)
    assert output.startswith("error: ") and output.count("\n") == 1 and "--resume" in output
    assert snapshot(finished) == before


def test_resume_without_anything_to_resume(data: Path, tmp_path: Path) -> None:
    for want in ("newest", "40", str(tmp_path / "nowhere")):
        output = run(flags("adamw", data, tmp_path / "run", "--resume", want), code=2)
        assert output.startswith("error: --resume") and output.count("\n") == 1
        assert not (tmp_path / "run").exists()


def test_resume_auto_is_a_fresh_start_where_there_is_none(data: Path, tmp_path: Path) -> None:
    output = run(flags("adamw", data, tmp_path / "run", "--resume", "auto", "--max-steps", "2"))
    assert "resumed" not in output and ("val", 0) in losses(tmp_path / "run")


def test_a_corrupt_newest_is_refused_by_name_and_the_older_used(
    data: Path, tmp_path: Path, finished: Path, unbroken: Callable[..., Path]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken("adamw"), run_dir)
    newest = run_dir / "checkpoints" / "step-000024" / "__0_0.distcp"
    damaged = bytearray(newest.read_bytes())
    damaged[1000] ^= 4
    newest.write_bytes(bytes(damaged))
    output = run(flags("adamw", data, run_dir, "--resume"))
    assert "CHECKPOINT REFUSED" in output and "step-000024: __0_0.distcp does not match its sha256" in output
    assert "resumed from" in output and "at step 21" in output
    assert_same_run(unbroken("adamw"), run_dir)
    assert result(run_dir)["checkpoints"]["saves"] == 1  # the damaged one is written anew


def test_going_back_sets_the_later_ones_aside(data: Path, tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken("adamw"), run_dir)
    job = Job(flags("adamw", data, run_dir, "--resume", "21"), 1, ("open", "tmp-000024.*metadata", 1))
    assert job.wait() == -signal.SIGKILL, job.output()
    assert saved(run_dir) == [21] and len(list((run_dir / "checkpoints").glob("abandoned-step-000024-*"))) == 1
    # The end of the first attempt is not the state of a run that was killed in its second.
    assert not (run_dir / "result.json").exists() and not (run_dir / "model.safetensors").exists()
    assert (run_dir / "checkpoints" / "latest").read_text() == "step-000021\n"
    import train_gpt2

    written = [json.loads(line) for line in rows_written(run_dir)]
    again = written[[row["kind"] for row in written].index("resume") + 1 :]
    assert {row["step"] for row in again} < {22, 23, 24, 25}, "killed while it saved step 24"
    # Of what the first attempt did, nothing beyond the step that the second went on from is read.
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written[: -len(again)]))
    seen = train_gpt2.read_metrics(run_dir)
    assert [row["step"] for row in seen["train"]] == list(range(1, 22)) and max(r["step"] for r in seen["val"]) <= 21
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    run(flags("adamw", data, run_dir, "--resume"))
    assert_same_run(unbroken("adamw"), run_dir)


def test_resume_from_a_path_goes_on_in_a_new_run_directory(data: Path, tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    path = unbroken("muon") / "checkpoints" / "step-000021"
    before = snapshot(unbroken("muon"))
    run(flags("muon", data, tmp_path / "run", "--resume", str(path)))
    assert weights(tmp_path / "run").keys() == weights(unbroken("muon")).keys()
    assert losses(tmp_path / "run") == {k: v for k, v in losses(unbroken("muon")).items() if k[1] > 21}
    assert snapshot(unbroken("muon")) == before and saved(tmp_path / "run") == [24]


@pytest.mark.parametrize("more", [("--n-layer", "3"), ("--max-steps", "10")])
def test_a_checkpoint_that_does_not_fit_leaves_no_new_run_directory(
    data: Path, tmp_path: Path, unbroken: Callable[..., Path], more: tuple[str, str]
) -> None:
    path = unbroken("muon") / "checkpoints" / "step-000021"
    run(flags("muon", data, tmp_path / "run", "--resume", str(path), *more), code=2)
    assert not (tmp_path / "run").exists()


def test_a_second_writer_is_refused_in_one_line(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = Job(flags("adamw", data, run_dir, "--max-steps", "100000", "--epochs", "100000", "--checkpoint-every", "0"))
    while not rows_written(run_dir) and first.alive():
        time.sleep(0.01)
    (run_dir / "config.json").rename(run_dir / "moved")  # so that it is the lock that refuses
    output = run(flags("adamw", data, run_dir), code=2)
    assert first.alive()
    first.kill()
    assert re.fullmatch(r"error: .*run is being written by another process.*\n", output), output


# -- spikes


def spiky(data: Path, folder: Path, run_dir: Path, *more: str) -> list[str]:
    """A run that hardly learns, so that its numbers are flat, over data of which steps 10 and 11 are one token only."""
    text = read_tokens(data, "train")
    write_shards(folder, (100,), (400,))
    odd = np.concatenate([np.resize(text, 9 * 256), np.full(512, 3), np.resize(text, 20 * 256)])
    (folder / "tiny_train_000000.bin").write_bytes(shard_bytes(odd))
    return [*flags("adamw", folder, run_dir, "--spike-window", "8", "--warmup-steps", "10000", "--checkpoint-every", "4"), *more]


def test_a_spike_is_skipped_and_the_checkpoint_before_it_pinned(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    output = run(spiky(data, tmp_path / "odd", run_dir, "--spike", "skip", "--max-steps", "16"))
    skipped = re.findall(
        r"step (\d+): (?:loss|gradient norm) .* deviations above its last 8 steps; this update is skipped", output
    )
    assert skipped == ["10", "11"], output
    folder = run_dir / "checkpoints"
    # The checkpoint of step 8 stays; the state before the spike, step 9, was saved, and later purged in its turn.
    assert saved(run_dir) == [8, 12, 16] and "step 10" in (folder / "step-000008" / "pinned").read_text()
    whole = tmp_path / "whole"
    run(spiky(data, tmp_path / "odd", whole, "--max-steps", "16"))
    a, b = losses(run_dir), losses(whole)
    assert all(a["train", s] == b["train", s] for s in range(1, 11)) and a["train", 11] != b["train", 11]


def test_a_spike_halts_with_the_state_before_it_saved(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = spiky(data, tmp_path / "odd", run_dir)
    output = run([*argv, "--spike", "halt"], code=8)
    assert "error: step 10: " in output and "--resume" in output
    assert saved(run_dir) == [8, 9] and (run_dir / "checkpoints" / "step-000008" / "pinned").exists()
    assert result(run_dir)["exit_reason"] == "spike"
    output = run([*argv, "--spike", "skip", "--resume", "--max-steps", "13"])
    assert "changed since the checkpoint: spike 'halt' -> 'skip'" in output and "step 10: " in output


# -- a full disk during a training


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_a_disk_that_fills_up(policy: str, data: Path, tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        (run_dir / "checkpoints").symlink_to(disk)
        job = Job(flags("adamw", data, run_dir, "--on-save-error", policy, "--max-steps", "90", "--epochs", "100"))
        while len(list(disk.glob("step-*"))) < 2 and job.alive():
            time.sleep(0.001)
        with open(disk / "filler", "wb", buffering=0) as f:
            try:
                while f.write(b"x" * 65536):
                    pass
            except OSError:
                pass
        code = job.wait()
        assert code == (0 if policy == "continue" else 7), job.output()
        assert (
            "No space left" in job.output() and "earlier ones are untouched" in job.output() and "Traceback" not in job.output()
        )
        import train_gpt2

        there = train_gpt2.list_checkpoints(run_dir)
        assert len(there) >= 2 and not list(disk.glob(".tmp-*"))
        for path in there:
            train_gpt2.verify_checkpoint(path)
        assert result(run_dir)["exit_reason"] == ("finished" if policy == "continue" else "disk")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# -- torchrun


def torchrun(argv: list[str], *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, "train_gpt2.py", *argv]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
    )


def workers_of(run_dir: Path) -> list[int]:
    """Process ids of the ranks that train into run_dir, rank 0 first."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text().split("\0")
            if str(run_dir) in command and "torch.distributed.run" not in command:
                variables = (process / "environ").read_text().split("\0")
                found[int(next(v[5:] for v in variables if v.startswith("RANK=")))] = int(process.name)
        except (OSError, StopIteration):
            continue
    return [found[r] for r in sorted(found)]


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_brings_a_killed_rank_back(rank: int, data: Path, tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    run_dir = tmp_path / "run"
    process = torchrun(flags("muon", data, run_dir), "--nproc_per_node=2", "--max-restarts=2")
    while 6 not in (saved(run_dir) if run_dir.exists() else []) and process.poll() is None:
        time.sleep(0.005)
    os.kill(workers_of(run_dir)[rank], signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "resumed from" in output
    assert_same_run(unbroken("muon", 2), run_dir)


@pytest.mark.full
def test_workers_that_outlive_torchrun_keep_a_second_job_out(data: Path, tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    run_dir = tmp_path / "run"
    process = torchrun(flags("muon", data, run_dir), "--nproc_per_node=2")
    while 6 not in (saved(run_dir) if run_dir.exists() else []) and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.wait()
    alive = workers_of(run_dir)
    assert len(alive) == 2
    for pid in alive:  # held where they are, so that they are still there when the second job comes
        os.kill(pid, signal.SIGSTOP)
    before = snapshot(run_dir)
    second = torchrun(flags("muon", data, run_dir, "--resume"), "--nproc_per_node=2")
    output = second.communicate(timeout=120)[0]
    assert second.returncode != 0
    assert [line for line in output.splitlines() if line.startswith("error: ")] == [
        f"error: {run_dir} is being written by another process; wait for it or stop it first"
    ]
    assert snapshot(run_dir) == before
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    third = torchrun(flags("muon", data, run_dir, "--resume"), "--nproc_per_node=2")
    output = third.communicate(timeout=120)[0]
    assert third.returncode == 0, output
    assert_same_run(unbroken("muon", 2), run_dir)


@pytest.mark.full
def test_auto_cadence_measures_and_says_its_interval(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    more = [
        "--checkpoint-every",
        "auto",
        "--max-minutes",
        "1.3",
        "--max-steps",
        "1000000",
        "--epochs",
        "1000000",
        "--val-every",
        "0",
    ]
    output = run(flags("adamw", data, run_dir, *more), timeout=200)
    assert re.search(
        r"checkpoints every \d+ s: sqrt\(2 x [\d.]+ s stall x 24.00 h between failures\), not below [\d.]+ s", output
    ), output
    assert result(run_dir)["exit_reason"] == "max_minutes"


# -- full size, on a GPU


@pytest.fixture(scope="module")
def big_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2.1M made-up tokens, enough for 30 steps."""
    folder = tmp_path_factory.mktemp("big")
    rng = np.random.default_rng(1)
    for split, count in (("train", 2_100_000), ("val", 1_100_000)):
        (folder / f"big_{split}_000000.bin").write_bytes(shard_bytes(np.minimum(rng.geometric(0.001, count), 50_256)))
    return folder


def big_flags(recipe: str, data: Path, run_dir: Path, *more: str) -> list[str]:
    """The recipe's own model; steps of 65,536 tokens in two micro-batches, so that starting is most of the time."""
    return [
        recipe, "--data", str(data), "--run-dir", str(run_dir), "--max-steps", "30", "--checkpoint-every", "6",
        "--val-every", "10", "--val-tokens", "1048576", "--batch-tokens", "65536", "--micro-batch", "32", *more,
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", ["gpt2", "speedrun"])
def test_full_size_killed_at_three_named_phases(recipe: str, big_data: Path, tmp_path: Path) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    run(big_flags(recipe, big_data, whole, "--deterministic"), timeout=600)
    argv = big_flags(recipe, big_data, run_dir, "--deterministic")
    job = Job(argv, 1, ("open", r"tmp-000012-.*/\.metadata", 1))  # during a save
    assert job.wait(600) == -signal.SIGKILL, job.output()
    assert saved(run_dir) == [6]
    job = Job([*argv, "--resume"], 1, ("shutil.rmtree", r"old-step-", 1))  # during the purge
    assert job.wait(600) == -signal.SIGKILL, job.output()
    here = max(s for kind, s in losses(run_dir) if kind == "train")
    job = Job([*argv, "--resume"])
    assert job.kill_when(lambda: in_validation(run_dir, here, 10), 600), job.output()
    output = run([*argv, "--resume"], timeout=600)
    assert "resumed from" in output
    assert_same_run(whole, run_dir, 30)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
def test_full_size_without_determinism_drifts_no_more_than_two_unbroken_runs(big_data: Path, tmp_path: Path) -> None:
    for name in ("a", "b", "broken"):
        run(
            big_flags("speedrun", big_data, tmp_path / name, *(["--max-minutes", "0.01"] if name == "broken" else [])),
            timeout=600,
        )
    run(big_flags("speedrun", big_data, tmp_path / "broken", "--resume"), timeout=600)
    a, b, broken = (losses(tmp_path / name) for name in ("a", "b", "broken"))
    train = [k for k in a if k[0] == "train"]
    usual = max(abs(a[k] - b[k]) for k in train)
    drift = min(max(abs(x[k] - broken[k]) for k in train) for x in (a, b))
    print(f"largest loss difference: two unbroken runs {usual:.2e}, resumed run {drift:.2e}")
    assert drift <= 3 * usual + 1e-3
