"""Run directories in the trainer's schema, written by hand, for tests that need no training."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from train_gpt2 import RECIPES


def write_run(
    path: Path,
    steps: int = 200,
    seed: int = 1,
    recipe: str = "sample",
    shift: float = 0.0,
    **result: Any,
) -> Path:
    """A finished run with a plausible curve; `shift` moves its losses, `result` changes result.json."""
    path.mkdir(parents=True)
    config = dataclasses.replace(RECIPES[recipe], seed=seed, max_steps=steps, run_dir=str(path), val_every=max(1, steps // 10))

    def loss(step: int) -> float:
        return 3.3 + 7.5 * math.exp(-5 * step / steps) + shift

    def jitter(step: int) -> float:  # repeatable noise in [-0.05, 0.05]
        return ((step * 2654435761 + seed * 40503) % 1000) / 10000 - 0.05

    rows: list[dict[str, Any]] = []
    for step in range(steps + 1):
        tokens, train_s = step * config.batch_tokens, 0.25 * step
        if step:
            speed = config.batch_tokens / 0.25 * (1 + jitter(step))
            rows.append(
                {
                    "kind": "train",
                    "step": step,
                    "tokens": tokens,
                    "loss": loss(step) + jitter(step),
                    "lr": 0.02 * (1 - step / (steps + 1)),
                    "grad_norm": 1 + 10 * math.exp(-step / 20) + jitter(step),
                    "step_ms": 250.0,
                    "tokens_per_s": speed,
                    "mfu": None,
                    "peak_mem_bytes": 0,
                    "train_s": train_s,
                    "epoch": 0,
                }
            )
        if step % config.val_every == 0 or step == steps:
            rows.append(
                {
                    "kind": "val",
                    "step": step,
                    "tokens": tokens,
                    "val_loss": loss(step),
                    "train_s": train_s,
                    "val_s": 1.0,
                }
            )
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = dataclasses.asdict(config)
    head = {
        "schema": 1,
        "recipe": recipe,
        "config": values,
        "config_hash": "c" * 16,
        "learning_hash": "l" * 16,
    }
    (path / "config.json").write_text(json.dumps(head))
    (path / "env.json").write_text(
        json.dumps(
            {
                "schema": 1,
                "python": "3.11",
                "torch": "2.13.0",
                "gpus": [],
                "device": "cpu",
                "world_size": 1,
                "threads": 2,
                "attention_backend": "flash",
                "git_commit": "0" * 40,
                "argv": [recipe, "--seed", str(seed), "--data", "my texts", "--run-dir", "runs/first", "--resume", "40"],
            }
        )
    )
    final = loss(steps)
    (path / "result.json").write_text(
        json.dumps(
            {
                "schema": 1,
                "recipe": recipe,
                "exit_reason": "finished",
                "exit_code": 0,
                "step": steps,
                "max_steps": steps,
                "tokens": steps * config.batch_tokens,
                "train_loss": final,
                "val_loss": final,
                "best_val_loss": final,
                "val_protocol": {
                    "data": "d" * 64,
                    "tokens": config.val_tokens,
                    "seq_len": 256,
                    "document_mask": False,
                    "dtype": "fp32",
                },
                "train_seconds": 0.25 * steps,
                "val_seconds": 11.0,
                "compile_seconds": 3.0,
                "checkpoint_stall_seconds": 0.5,
                "startup_seconds": 5.0,
                "total_seconds": 0.25 * steps + 20,
                "tokens_per_s": 4096.0,
                "mfu": None,
                "peak_mem_bytes": 0,
                "params": 28_902_000,
                "data": {"dir": "data/sample", "fingerprint": "f" * 16, "dataset": "sotu"},
                "seed": seed,
                "world_size": 1,
                "device": "cpu",
                "weights": None,
                "weights_sha256": None,
                **result,
            }
        )
    )
    return path


def write_hellaswag(run: Path, acc_norm: float = 0.295, examples: int = 10042) -> None:
    """The file that `python -m eval hellaswag` leaves beside a run."""
    stderr = math.sqrt(acc_norm * (1 - acc_norm) / examples)
    (run / "hellaswag-llmc.json").write_text(
        json.dumps(
            {
                "schema": 1,
                "task": "hellaswag",
                "scoring": "llmc",
                "examples": examples,
                "subset": examples < 10042,
                "acc": acc_norm - 0.01,
                "acc_stderr": stderr,
                "acc_norm": acc_norm,
                "acc_norm_stderr": stderr,
                "acc_norm_ci95": [acc_norm - 1.96 * stderr, acc_norm + 1.96 * stderr],
            }
        )
    )
