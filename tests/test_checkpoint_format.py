"""A checkpoint of every format version that was ever written still loads, and training goes on from it as it did then.

fixtures/checkpoint-v1 was written on two ranks, with Muon and AdamW, by the first version; the losses below are those
of the run that wrote it, left alone. Change the format: keep this test, and add a fixture of the version before.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from train_support import shard_bytes
from trainer_jobs import run

FIXTURE = Path(__file__).parent / "fixtures" / "checkpoint-v1"
LATER_LOSSES = {5: 13.999141693115234, 6: 12.599534034729004}


def write_data(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for split, count in (("train", 300), ("val", 70)):
        i = np.arange(count)
        (folder / f"fixed_{split}_000000.bin").write_bytes(shard_bytes((i * i + 3 * i) % 31))
    return folder


def argv(data: Path, run_dir: Path, *more: str) -> list[str]:
    text = (
        "gpt2 --optimizer muon --n-layer 1 --n-head 1 --n-embd 16 --seq-len 8 --vocab-size 31 --padded-vocab 32 --bias no "
        "--norm rms --batch-tokens 64 --micro-batch 2 --val-every 0 --val-tokens 64 --val-batch 2 --threads 1 --device cpu "
        "--precision fp32 --schedule constant --warmup-steps 0 --epochs 9 --checkpoint-every 4 --lr 0.01 --max-steps 6"
    )
    return [*text.split(), "--data", str(data), "--run-dir", str(run_dir), *more]


@pytest.mark.parametrize("world", [1, 2])
def test_the_first_version_still_loads_and_goes_on(world: int, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(FIXTURE, run_dir / "checkpoints" / "step-000004")
    output = run(argv(write_data(tmp_path / "data"), run_dir, "--resume"), world)
    assert "resumed from" in output and "at step 4" in output
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {r["step"]: r["loss"] for r in rows if r["kind"] == "train"}
    assert losses == pytest.approx(LATER_LOSSES, abs=2e-5)


def test_a_future_version_is_refused_by_its_number(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    path = run_dir / "checkpoints" / "step-000004"
    shutil.copytree(FIXTURE, path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"schema": 2}, indent=1) + "\n")
    output = run(argv(write_data(tmp_path / "data"), run_dir, "--resume"), code=2)
    assert "manifest.json has schema 2; this program reads 1" in output


if __name__ == "__main__":  # python tests/test_checkpoint_format.py FOLDER: write such a run, to make a fixture of
    os.chdir(sys.argv[1])  # so that no path of this machine gets into it
    run(argv(write_data(Path("data")), Path("run")), 2)
    for row in (json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()):
        print(row["kind"], row["step"], row.get("loss"))
