"""Run directories for the tests of baselines and the regression check, in the trainer's own format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 1000
STEPS = 60
EVERY = 10
DEVIATION = 0.002

CONFIG = {
    "recipe": "sample",
    "data": "nowhere",
    "max_steps": STEPS,
    "batch_tokens": BATCH,
    "val_every": EVERY,
    "muon_lr": 0.03,
    "deterministic": False,
    "precision": "fp32",
}
ENV = {
    "schema": 1,
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "cuda": None,
    "cudnn": None,
    "nccl": None,
    "triton": None,
    "driver": None,
    "gpus": [],
    "cpu": "Some CPU",
    "threads": 2,
    "attention_backend": "flash",
    "compile": False,
    "git_commit": "0" * 40,
    "train_gpt2_sha256": "a" * 64,
    "argv": ["sample"],
}
PROTOCOL = {"data": "b" * 64, "tokens": 2048, "seq_len": 128, "document_mask": False, "dtype": "fp32"}


def val_curve(seed: int, shift: float = 0.0) -> list[float]:
    """Val losses at steps 0, 10, ... 60: a descent to about 5, noise of `DEVIATION` by the seed."""
    noise = np.random.default_rng(seed).normal(0, DEVIATION, STEPS // EVERY + 1)
    return [
        float(5 + 5.8 * np.exp(-step / 10) + e + shift * (step > 0))
        for step, e in zip(range(0, STEPS + 1, EVERY), noise)
    ]


def write_run(
    path: Path,
    seed: int,
    *,
    val: Sequence[float] | None = None,
    shift: float = 0.0,
    speed: float = 5000.0,
    train: Sequence[float] | None = None,
    reason: str = "finished",
    config: dict[str, Any] | None = None,
    env: dict[str, Any] | None = None,
    protocol: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    recipe: str = "sample",
    finished: bool = True,
    epoch_at: int | None = None,
) -> Path:
    """A run directory as the trainer writes it, with this val curve (default: `val_curve(seed, shift)`).

    `epoch_at`: the step with which epoch 1 begins. Not `finished`: no result.json, as of a run still going.
    """
    val = val_curve(seed, shift) if val is None else val
    rng = np.random.default_rng(seed + 10_000)
    train = (
        list(5 + 5.8 * np.exp(-np.arange(STEPS) / 10) + rng.normal(0, 0.02, STEPS))
        if train is None
        else train
    )
    fields = {**CONFIG, "recipe": recipe, "seed": seed, "run_dir": str(path), **(config or {})}
    path.mkdir(parents=True)
    learning_hash = hashlib.sha256(json.dumps(fields["muon_lr"]).encode()).hexdigest()
    put(
        path / "config.json",
        {"recipe": recipe, "config": fields, "config_hash": str(seed), "learning_hash": learning_hash},
    )
    put(path / "env.json", {**ENV, **(env or {})})
    batch = fields["batch_tokens"]
    rows = [
        {
            "kind": "train",
            "step": i + 1,
            "tokens": (i + 1) * batch,
            "loss": float(loss),
            "tokens_per_s": float(speed * (1 + 0.01 * rng.standard_normal())),
            "epoch": int(epoch_at is not None and i + 1 >= epoch_at),
        }
        for i, loss in enumerate(train)
    ]
    rows += [
        {"kind": "val", "step": i * EVERY, "tokens": i * EVERY * batch, "val_loss": loss}
        for i, loss in enumerate(val)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        result = {
            "recipe": recipe,
            "exit_reason": reason,
            "exit_code": 0,
            "step": len(train),
            "max_steps": STEPS,
            "tokens": len(train) * batch,
            "val_loss": val[-1] if reason == "finished" else None,
            "val_protocol": {**PROTOCOL, **(protocol or {})},
            "data": {"dir": "nowhere", "fingerprint": "c" * 64, "dataset": "a-text", **(data or {})},
            "tokens_per_s": speed,
            "train_seconds": 10.0,
            "seed": seed,
            "world_size": 1,
            "device": "cpu",
            "weights_sha256": "d" * 64,
        }
        put(path / "result.json", result)
    return path


def put(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps({"schema": 1, **content}))


def harness(*argv: object) -> int:
    """`python -m harness ...` in this process; its exit code."""
    from harness.__main__ import main

    return main([str(arg) for arg in argv])


def record(root: Path, n: int = 10, name: str = "base", margin: float | None = 0.02, **change: Any) -> Path:
    """A baseline of n seeds (0 .. n-1) in root/baselines; returns that folder."""
    runs = [write_run(root / f"{name}-{seed}", seed, **change) for seed in range(n)]
    folder = root / "baselines"
    options = [] if margin is None else ["--margin", margin]
    assert harness("baseline", "--folder", folder, "record", name, *runs, *options) == 0
    return folder
