"""The one command, its checks and choices, and the small commands around it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from harness_support import write_hellaswag, write_run
from train_support import shard_bytes

import train_gpt2
from harness import common, speedrun
from harness.__main__ import HELP, SUBCOMMANDS, main
from harness.common import UserError
from harness.speedrun import Hardware
from train_gpt2 import RECIPES

ROOT = Path(__file__).parents[1]
CPU = Hardware([], 0, 16 * 2**30, "torch is built without CUDA")
EIGHT = Hardware(["NVIDIA H100 80GB HBM3"] * 8, 80 * 10**9, 10**12, "")


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A `sample` folder of shards over GPT-2's whole vocabulary."""
    folder = tmp_path / "data" / "sample"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(5)
    for split, count in (("train", 6000), ("val", 600)):
        tokens = np.minimum(rng.zipf(1.3, count), 50255)
        tokens[::100] = 50256
        (folder / f"words_{split}_000000.bin").write_bytes(shard_bytes(tokens))
    return folder


SMALL = [
    *("--n-layer=1", "--n-embd=16", "--n-head=2", "--seq-len=32", "--batch-tokens=64", "--micro-batch=2"),
    *(
        "--max-steps=4",
        "--val-tokens=128",
        "--val-every=2",
        "--threads=1",
        "--checkpoint-every=0",
        "--device=cpu",
    ),
]


# ------------------------------------------------------------------------------------------- choices


def test_recipe_follows_the_hardware():
    assert speedrun.choose_recipe(None, CPU, 0)[0] == "sample"
    assert "without CUDA" in speedrun.choose_recipe(None, CPU, 0)[1]
    assert speedrun.choose_recipe(None, EIGHT, 8) == (
        "speedrun",
        "8 x NVIDIA H100 80GB HBM3 can train the real 124M",
    )
    assert speedrun.choose_recipe(None, EIGHT, 0)[0] == "sample"
    assert speedrun.choose_recipe("gpt2", CPU, 0) == ("gpt2", "asked for")


def test_gpus():
    assert speedrun.choose_gpus(None, EIGHT) == 8
    assert speedrun.choose_gpus(2, EIGHT) == 2
    assert speedrun.choose_gpus(None, CPU) == 0
    for asked, hardware in ((9, EIGHT), (1, CPU), (-1, EIGHT)):
        with pytest.raises(UserError):
            speedrun.choose_gpus(asked, hardware)


def test_micro_batch_follows_ranks_and_memory():
    cfg = dataclasses.replace(RECIPES["speedrun"], batch_tokens=262_144, micro_batch=64)
    assert speedrun.fitting_micro_batch(cfg, EIGHT, 1) == 64
    assert speedrun.fitting_micro_batch(cfg, EIGHT, 8) == 32  # 262,144 tokens are 8 x 32 x 1,024
    card = dataclasses.replace(EIGHT, gpu_bytes=24 * 10**9)
    assert speedrun.fitting_micro_batch(cfg, card, 1) == 32  # 20.5 GB of 21.6; 64 would take 36.5
    assert speedrun.fitting_micro_batch(cfg, dataclasses.replace(EIGHT, gpu_bytes=16 * 10**9), 1) == 16
    assert speedrun.fitting_micro_batch(RECIPES["sample"], CPU, 0) == RECIPES["sample"].micro_batch


def test_memory_that_is_short_is_refused():
    cfg = RECIPES["gpt2"]
    state = 16 * 124_475_904
    assert "1.9 GiB" in speedrun.check_memory(cfg, CPU, 0)
    with pytest.raises(UserError, match="memory are free"):
        speedrun.check_memory(cfg, dataclasses.replace(CPU, ram_bytes=state - 1), 0)
    with pytest.raises(UserError, match="smaller model"):
        speedrun.check_memory(cfg, dataclasses.replace(EIGHT, gpu_bytes=state - 1), 1)
    with pytest.raises(UserError, match="staging"):
        speedrun.check_memory(cfg, dataclasses.replace(EIGHT, ram_bytes=state - 1), 8)


def test_disk_that_is_short_is_refused(tmp_path, monkeypatch):
    usage = speedrun.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(speedrun.shutil, "disk_usage", lambda _: usage._replace(free=10**8))
    with pytest.raises(UserError, match="free"):
        speedrun.check_disk(RECIPES["gpt2"], tmp_path / "new" / "run")


def test_data_commands(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    sample, real = RECIPES["sample"], RECIPES["speedrun"]
    need = real.max_steps * real.batch_tokens + 1
    fetch = [
        "data",
        "fetch",
        "fineweb10B",
        "--tokens",
        str(math.ceil(need / real.epochs)),
        "--out",
        "data/fineweb10B",
    ]
    assert speedrun.data_command(real) == fetch
    assert speedrun.data_command(dataclasses.replace(sample, max_steps=4, val_tokens=512)) is None
    (words / "words_val_000000.bin").unlink()
    assert speedrun.data_command(sample) == ["data", "sample", "--out", "data/sample"]
    with pytest.raises(train_gpt2.UserError, match="elsewhere"):
        speedrun.data_command(dataclasses.replace(sample, data="elsewhere"))


def test_unigram_loss_by_hand(tmp_path):
    (tmp_path / "x_train_0.bin").write_bytes(shard_bytes([1, 1, 1, 2]))
    (tmp_path / "x_val_0.bin").write_bytes(shard_bytes([1, 2, 3, 4]))
    total = 4 + 50257
    by_hand = -(math.log(4 / total) + math.log(2 / total) + math.log(1 / total)) / 3
    assert speedrun.unigram_loss(tmp_path, 3) == pytest.approx(by_hand)


def test_targets(tmp_path, words):
    target, source = speedrun.target_for("sample", words, 512)
    assert target == pytest.approx(speedrun.unigram_loss(words, 512) - 0.5) and "unigram" in source
    assert speedrun.target_for("speedrun", tmp_path, 512)[0] is None
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": 1, "dataset": "kjj0/fineweb10B-gpt2"}))
    assert speedrun.target_for("speedrun", tmp_path, 512)[0] == 3.28


# ------------------------------------------------------------------------------------ the whole command


def test_dry_run_writes_nothing(tmp_path, monkeypatch, words, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["speedrun", "--recipe", "sample", "--dry-run", "--", *SMALL]) == 0
    out = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    for text in (
        "hardware",
        "recipe    sample: asked for",
        "data/sample: ready",
        "train_gpt2.py sample",
        "-m eval hellaswag",
    ):
        assert text in out


def test_from_data_to_summary(tmp_path, monkeypatch, words):
    """Training, both evaluations, curve and summary, as a person starts it."""
    command = [sys.executable, "-m", "harness", "speedrun", "--recipe", "sample", "--hellaswag", "8"]
    command += ["--", *SMALL, "--run-dir", "mine"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "mine" / "result.json").read_text())
    score = json.loads((tmp_path / "mine" / "hellaswag-llmc.json").read_text())
    summary = done.stdout.split("\nval loss  ")[-1]
    assert f"{result['val_loss']:.4f}" in summary.splitlines()[0]
    line = next(line for line in summary.splitlines() if line.startswith("HellaSwag"))
    assert f"{100 * score['acc_norm']:.2f}%" in line and "subset" in line  # a line of its own
    assert f"{100 * score['acc_norm_stderr']:.2f}" in line
    for suffix in ("png", "svg"):
        assert (tmp_path / "mine" / f"loss.{suffix}").stat().st_size > 1000
    # again into the same directory: refused before anything starts
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2 and "mine exists" in again.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--recipe", "gpt5"], "unknown recipe"),
        (["--gpus", "99"], "GPUs here"),
        (["--recipe", "sample", "--", "--no-such-flag", "1"], "no-such-flag"),
        (["--recipe", "sample", "--", *SMALL, "--micro-batch=3"], "micro-batch"),
        (["--recipe", "sample", "--", *SMALL, "--max-steps=100000"], "train tokens"),
        (["--recipe", "sample", "--", *SMALL, "--data=nowhere"], "nowhere"),
        (["sample"], "unrecognized"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(argv, message, tmp_path, monkeypatch, words, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["speedrun", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and message in captured.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_truncated_shard_is_not_replaced_in_silence(tmp_path, monkeypatch, words, capsys):
    monkeypatch.chdir(tmp_path)
    shard = words / "words_train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-10])
    assert main(["speedrun", "--recipe", "sample", "--", *SMALL]) == 2
    assert "words_train_000000.bin" in capsys.readouterr().err


# --------------------------------------------------------------------------------------- processes


def test_an_interrupt_reaches_the_child_once():
    """Ctrl-C in a terminal goes to the whole group; the child must see one, and may finish its work."""
    child = (
        "import signal,time,sys\nseen=[]\nsignal.signal(signal.SIGINT, lambda *a: "
        "seen.append(1))\nprint('up', flush=True)\n"
        "t=time.time()\nwhile time.time()-t<1.5: time.sleep(.05)\nsys.exit(40+len(seen))"
    )
    parent = f"import sys; from harness.common import run_process; sys.exit(run_process([sys.executable, '-c', {child!r}]))"
    process = subprocess.Popen(
        [sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout and process.stdout.readline() == "up\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 41


def test_exit_codes_of_children():
    assert common.run_process([sys.executable, "-c", "raise SystemExit(5)"]) == 5
    assert common.run_process([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == 137


def test_flag_value():
    assert common.flag_value(["--run-dir", "a", "--run-dir=b"], "--run-dir") == "b"
    assert common.flag_value(["--run-dir"], "--run-dir") is None


@pytest.mark.full
def test_exit_code_through_torchrun(tmp_path, words):
    """torchrun turns every failure into 1; the trainer's own code is read from what it wrote."""
    hot = ["--micro-batch=1", "--lr=1e30", "--embed-lr=1e30", "--head-lr=1e30", "--muon-lr=1e30", f"--data={words}"]
    argv = ["sample", *SMALL, *hot, "--run-dir", str(tmp_path / "run")]
    assert common.launch_training(argv, gpus=2) == 3  # non-finite
    missing = ["sample", *SMALL, "--data=nowhere", "--run-dir", str(tmp_path / "other")]
    assert common.launch_training(missing, gpus=2, max_restarts=3) != 0  # bad input is no reason to start again


# ------------------------------------------------------------------------------------ small commands


def test_help_is_fast_and_names_every_command():
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "harness", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert time.perf_counter() - started < 2
    assert set(HELP) == set(SUBCOMMANDS) and all(name in done.stdout for name in SUBCOMMANDS)
    loaded = "import sys; from harness.__main__ import main; main(['runs']); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True).returncode == 0


def test_runs_are_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == "no runs in runs/\n"
    write_run(tmp_path / "runs" / "done", steps=50, seed=7)
    going = write_run(tmp_path / "runs" / "going", steps=50)
    (going / "result.json").unlink()
    with (going / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 51, "tok')  # a line being written
    broken = write_run(tmp_path / "runs" / "broken")
    (broken / "config.json").write_text('{"schema": 99}')
    assert main(["runs", "--json"]) == 0
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["done"]["state"] == "finished" and rows["done"]["seed"] == 7
    assert rows["going"]["state"] == "unfinished" and rows["going"]["step"] == 50
    assert "schema 99" in rows["broken"]["state"]
    assert main(["runs"]) == 0
    assert f"{rows['done']['val_loss']:.4f}" in capsys.readouterr().out


def test_curve(tmp_path, capsys):
    runs = [write_run(tmp_path / f"r{i}", steps=40, seed=i) for i in range(2)]
    assert main(["curve", *map(str, runs), "--out", str(tmp_path / "both")]) == 0
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "both.svg").read_text()
    assert svg.startswith("<?xml") and "</svg>" in svg


def test_summary_without_hellaswag_says_so(tmp_path, words, capsys):
    run = write_run(tmp_path / "run", data={"dir": str(words), "fingerprint": "x"})
    speedrun.print_summary(run, ["hellaswag"])
    captured = capsys.readouterr()
    assert "not measured" in captured.out and "python -m eval hellaswag" in captured.err
    write_hellaswag(run, examples=100)
    assert "subset of 100 of 10,042" in speedrun.hellaswag_line(run)
