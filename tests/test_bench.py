"""The benchmark command, every item of it rehearsed on a model of a few thousand parameters."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from train_support import write_shards

from harness import bench
from harness.__main__ import main

SIZES = (
    "--n-layer 2 --n-head 2 --n-embd 32 --seq-len 32 --vocab-size 50257 --padded-vocab 50304 --value-embeds 1 --batch-tokens 256 "
    "--micro-batch 4 --val-batch 4 --val-tokens 1024 --epochs 99 --device cpu --precision fp32 --head-precision same --threads 1"
)

KEPT = "val_loss train_seconds tokens tokens_per_s mfu peak_mem_bytes startup_seconds".split()


def test_spread_says_when_a_number_is_missing():
    runs = [{"a": 3.0, "b": 1.0}, {"a": 5.0, "b": None}, {"a": 4.0, "b": 2.0}]
    assert bench.spread(("a", "b"), runs) == {"median_a": 4.0, "range_a": 2.0, "median_b": None, "range_b": None}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--only", "gpt2,speed"], "--only speed: choose from speedrun"),
        (["--only", "checkpoint,speedrun"], "--only checkpoint,speedrun: checkpoint reads the runs of speedrun, which must come"),
        (["--only", "hellaswag"], "--only hellaswag: hellaswag reads the runs of speedrun"),
        (["--seeds", "1,-2"], "--seeds, --flags, --speedrun-flags or --hellaswag: --seed must be a number of at least 0"),
        (["--speedrun-flags", "--checkpoint-every 0"], "--seeds, --flags, --speedrun-flags or --hellaswag: the checkpoint"),
        (["--data", "nowhere"], "no *_train_*.bin shards in nowhere"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str):
    assert main(["bench", "--folder", str(tmp_path / "runs"), "--out", str(tmp_path / "out.json"), *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}") and error.count("\n") == 1 and not any(tmp_path.iterdir())


def test_a_seed_that_fails_takes_no_other_one_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lab = bench.Bench("data", tmp_path, [1, 2], 3.65, "--max-steps 4")
    run = SimpleNamespace(result=dict.fromkeys(KEPT, 3.0), val=[], val_loss=3.0)

    def train(name: str, *_: str) -> SimpleNamespace:
        (tmp_path / name).mkdir()
        reason = "finished" if name == "speedrun-1" else "stopped"
        (tmp_path / name / "result.json").write_text(json.dumps({"schema": 1, "exit_reason": reason}))
        if reason == "stopped":
            raise RuntimeError("speedrun-2 ended with exit code 5")
        return run

    monkeypatch.setattr(lab, "train", train)
    found = lab.speedrun()
    assert [r["seed"] for r in found["runs"]] == [1] and found["error"] == "speedrun-2 ended with exit code 5"
    assert found["median_val_loss"] == 3.0 and lab.finished() == [tmp_path / "speedrun-1"]


def test_single_kernels_are_timed_as_far_as_the_device_can(tmp_path: Path):
    found = bench.Bench("data", tmp_path, [1], 3.65, "", SIZES).kernels()
    assert found["device"] == "cpu" and found["ms"].keys() == {"head_same", "mlp"} and all(ms > 0 for ms in found["ms"].values())


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_item_on_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data, out = write_shards(tmp_path / "data", (20_000, 3_000), (1_100,)), tmp_path / "out.json"
    argv = ["bench", "--data", str(data), "--folder", str(tmp_path / "runs"), "--out", str(out), "--flags", SIZES]
    short = "--max-steps 24 --val-every 8 --checkpoint-every 6"
    assert main([*argv, "--speedrun-flags", short, "--target", "9.5", "--hellaswag", "--limit 8"]) == 0, capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["hardware"]["device"] == "cpu" and set(bench.ITEMS) <= found.keys()
    runs = found["speedrun"]["runs"]
    assert [r["seed"] for r in runs] == [1, 2] and all(len(r["curve"]) == 4 for r in runs)
    for r in runs:  # between two validations by a straight line
        (_, before, high), (_, after, low) = next((a, b) for a, b in zip(r["curve"], r["curve"][1:]) if a[2] > 9.5 >= b[2])
        assert r["seconds_to_target"] == pytest.approx(before + (high - 9.5) / (high - low) * (after - before))
    assert found["gpt2"]["median_tokens_per_s"] > 0 and len(found["gpt2"]["runs"]) == 2
    assert found["start"]["cold_seconds"] > 1 and found["start"]["warm_seconds"] > 1, "imports are part of a start"
    assert found["checkpoint"]["stalls"] == 6 and found["checkpoint"]["restore_s"] > 0, "three saves a run"
    kept = json.loads((tmp_path / "runs" / "speedrun-2" / "result.json").read_text())
    assert kept["checkpoints"]["saves"] == 4 and kept["checkpoints"]["restore_s"] == 0, "it is resumed as a copy"
    assert found["val"] == {"seconds": found["val"]["seconds"], "tokens": 1024} and found["val"]["seconds"] > 0
    assert set(found["memory"]) == {"8", "16", "32", "64"}
    assert "8 of 10,042" in " ".join(found["hellaswag"]["output"]) and found["hellaswag"]["wall_seconds"] > 1
