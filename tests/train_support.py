"""Shards, tiny configurations and runs for the trainer's tests, written without the trainer's own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, PADDED = 200, 256
# A model of a few thousand parameters: every flag a test does not care about.
TINY = {
    "n-layer": 2, "n-head": 2, "n-embd": 32, "seq-len": 16, "vocab-size": VOCAB, "padded-vocab": PADDED,
    "batch-tokens": 128, "micro-batch": 2, "max-steps": 6, "val-every": 3, "val-tokens": 112, "val-batch": 2,
    "precision": "fp32", "device": "cpu", "threads": 1, "checkpoint-every": "0",
}  # fmt: skip


def shard_bytes(tokens: Any, magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    """A shard in llm.c's format: 256 little-endian int32, of which magic, version and count, then uint16 tokens."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + np.asarray(tokens, "<u2").tobytes()


def text(seed: int, count: int) -> np.ndarray:
    """Tokens below VOCAB that a model can learn: each follows from the one before it, give or take a little."""
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.integers(1, 4, count)) % VOCAB


def write_shards(folder: Path, train: tuple[int, ...] = (1000, 37, 700), val: tuple[int, ...] = (90, 60)) -> Path:
    """Train and val shards of these lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, lengths in (("train", train), ("val", val)):
        tokens, at = text(len(split), sum(lengths)), 0
        for i, length in enumerate(lengths):
            (folder / f"tiny_{split}_{i:06d}.bin").write_bytes(shard_bytes(tokens[at : at + length]))
            at += length
    return folder


def read_tokens(folder: Path, split: str) -> np.ndarray:
    """All tokens of a split in order."""
    return np.concatenate([np.fromfile(p, "<u2", offset=1024) for p in sorted(folder.glob(f"*_{split}_*.bin"))])


def flags(recipe: str, data: Path | str, run_dir: Path | str, **changes: Any) -> list[str]:
    """Command line of a tiny run. Underscores in the names of changes are dashes."""
    values = TINY | {"data": data, "run-dir": run_dir} | {k.replace("_", "-"): v for k, v in changes.items()}
    return [recipe, *(f"--{k}={v}" for k, v in values.items())]


def rows(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of one kind, as they were written."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def result(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())
