"""Measure the figures that the documentation states, on this machine, and write them as JSON.

    python -m harness bench --data DIR [--only speedrun,gpt2,...] [--seeds 1,2] [--out bench.json]

Each item is one or more real trainings (or evaluations) started as processes; a failed one is said and the
others go on. Medians and spread over the seeds; nothing here is a claim without the hardware printed above it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.common import SCHEMA, TRAINER, UserError, read_json

# A short speedrun on 0.1B tokens: small batches learn most per token at this length.
SPEEDRUN_FLAGS = (
    "--batch-tokens 65536 --micro-batch 64 --max-steps 1250 --val-every 250 --val-tokens 1835008 --epochs 2 "
    "--muon-lr 0.02 --muon-momentum-warmup 300 --checkpoint-every 0"
)
SHORT = "--val-every 0 --val-tokens 65536 --val-batch 16 --checkpoint-every 0 --epochs 4"


class Bench:
    """Runs items in one folder and keeps what they found."""

    def __init__(self, data: str, folder: Path, seeds: list[int], target: float, speedrun_flags: str):
        self.data, self.folder, self.seeds, self.target = data, folder, seeds, target
        self.speedrun_flags = speedrun_flags
        self.results: dict[str, Any] = {}

    def train(self, name: str, recipe: str, flags: str, caches: Path | None = None) -> dict[str, Any]:
        """One training; returns result.json with its metrics under "rows". Raises RuntimeError if it fails."""
        run_dir = self.folder / name
        environment = dict(os.environ)
        if caches is not None:
            environment |= {
                "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
                "TRITON_CACHE_DIR": str(caches / "triton"),
            }
        command = [sys.executable, str(TRAINER), recipe, "--data", self.data, "--run-dir", str(run_dir)]
        done = subprocess.run(
            [*command, *shlex.split(flags)], capture_output=True, text=True, env=environment, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{name} ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}")
        result = json.loads((run_dir / "result.json").read_text())
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return result | {"rows": [json.loads(line) for line in lines], "run_dir": str(run_dir)}

    def speedrun(self) -> dict[str, Any]:
        """Seconds of training to the target loss, the final loss and tokens/s, for each seed."""
        runs = []
        for seed in self.seeds:
            run = self.train(f"speedrun-{seed}", "speedrun", f"{self.speedrun_flags} --seed {seed}")
            curve = [(r["tokens"], r["train_s"], r["val_loss"]) for r in run["rows"] if r["kind"] == "val"]
            reached = next((point for point in curve if point[2] <= self.target), None)
            runs.append(
                {
                    "seed": seed,
                    "val_loss": run["val_loss"],
                    "train_seconds": run["train_seconds"],
                    "tokens": run["tokens"],
                    "tokens_per_s": run["tokens_per_s"],
                    "mfu": run["mfu"],
                    "peak_gb": run["peak_mem_bytes"] / 1e9,
                    "startup_seconds": run["startup_seconds"],
                    "target": self.target,
                    "seconds_to_target": reached and reached[1],
                    "curve": curve,
                }
            )
            say(f"  seed {seed}: val loss {run['val_loss']:.4f} after {run['train_seconds']:.1f} s and {run['tokens']:,} tokens")
        return {"runs": runs, **spread("val_loss", runs), **spread("tokens_per_s", runs)}

    def gpt2(self) -> dict[str, Any]:
        """Tokens/s of the control recipe over a short steady window."""
        run = self.train("gpt2", "gpt2", f"{SHORT} --max-steps 24")
        return {k: run[k] for k in ("tokens_per_s", "mfu", "peak_mem_bytes", "startup_seconds")}

    def start(self) -> dict[str, Any]:
        """Seconds from process start to the end of the first step, with an empty and a filled compile cache."""
        with tempfile.TemporaryDirectory() as caches:
            cold, warm = (
                self.train(f"start-{name}", "speedrun", f"{SHORT} --max-steps 3", Path(caches))["startup_seconds"]
                for name in ("cold", "warm")
            )
        return {"cold_seconds": cold, "warm_seconds": warm}

    def memory(self) -> dict[str, Any]:
        """Peak memory of speedrun by micro-batch (the same batch, more accumulation)."""
        return {
            str(rows): self.train(f"memory-{rows}", "speedrun", f"{SHORT} --max-steps 3 --micro-batch {rows}")[
                "peak_mem_bytes"
            ]
            / 1e9
            for rows in (8, 16, 32, 64)
        }

    def checkpoint(self) -> dict[str, Any]:
        """The longest step with a save against the median step, over at least ten saves of the full model."""
        flags = "--max-steps 144 --batch-tokens 65536 --micro-batch 64 --checkpoint-every 12"
        run = self.train("checkpoint", "speedrun", f"{SHORT} {flags}")
        rows = [r for r in run["rows"] if r["kind"] == "train"]
        saved = {s + 1 for s in range(12, 144, 12)}  # the step that runs while the copy is made
        with_save = [r["step_ms"] + r.get("save_ms", 0.0) for r in rows if r["step"] in saved]
        usual = statistics.median(r["step_ms"] for r in rows if r["step"] not in saved)
        size = sum(f.stat().st_size for f in Path(run["run_dir"], "checkpoints").glob("step-*/*")) / 2
        return {
            "saves": len(with_save),
            "median_step_ms": usual,
            "median_step_with_save_ms": statistics.median(with_save),
            "longest_step_with_save_ms": max(with_save),
            "checkpoint_gb": size / 1e9,
            "stall_seconds_total": run["checkpoint_stall_seconds"],
        }

    def hellaswag(self) -> dict[str, Any]:
        """Wall seconds of the full HellaSwag validation set on the newest speedrun model."""
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "eval", "hellaswag", str(self.newest())],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-300:])
        return {"wall_seconds": time.perf_counter() - began, "output": done.stdout.strip().splitlines()[-6:]}

    def val(self) -> dict[str, Any]:
        """Seconds of a validation pass over 10,485,760 tokens (train tokens: only the time is of interest)."""
        import torch

        from train_gpt2 import TokenStream, evaluate_tokens, find_shards, load_run

        model, cfg = load_run(self.newest(), "cuda" if torch.cuda.is_available() else "cpu")
        stream = TokenStream(find_shards(self.data, "train"))
        evaluate_tokens(model, stream, 4 * 64 * cfg.seq_len, cfg.seq_len, 64)
        began = time.perf_counter()
        loss = evaluate_tokens(model, stream, 10_485_760, cfg.seq_len, 64)
        return {"seconds": time.perf_counter() - began, "loss": loss, "compiled": False}

    def newest(self) -> Path:
        runs = [r for r in self.folder.glob("speedrun-*") if (r / "model.safetensors").exists()]
        if not runs:
            raise RuntimeError("needs a finished speedrun item")
        return max(runs, key=lambda r: r.stat().st_mtime)


def spread(key: str, runs: list[dict[str, Any]]) -> dict[str, float]:
    values = [r[key] for r in runs]
    return {f"median_{key}": statistics.median(values), f"range_{key}": max(values) - min(values)}


def measure_all(
    items: Sequence[str], measure: Callable[[str], dict[str, Any]], results: dict[str, Any], write: Callable[[], None]
) -> None:
    """Each item into `results`: one that fails is said, with {"error": ...}, and the others go on. `write` after each."""
    for item in items:
        say(f"{item} ...")
        try:
            results[item] = measure(item)
            shown = {k: v for k, v in results[item].items() if k != "runs"}
            say(f"  {shown.get('shown') or json.dumps(shown, default=str)}")
        except Exception as error:  # hours of measurements must not be lost to one of them
            if not isinstance(error, (RuntimeError, OSError, ValueError)):
                traceback.print_exc()
            results[item] = {"error": str(error) or type(error).__name__}
            say(f"  FAILED: {results[item]['error']}")
        write()


def hardware(folder: Path) -> dict[str, Any]:
    """env.json of one of the runs in `folder`; empty before the first."""
    return next((read_json(path) for path in sorted(folder.rglob("env.json"))), {})


def say(text: str) -> None:
    print(text, flush=True)


ITEMS = ("speedrun", "hellaswag", "gpt2", "checkpoint", "start", "val", "memory")


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("bench", help="measure the figures that the documentation states")
    parser.add_argument("--data", default="data/fineweb10B", help="folder of token shards (default: %(default)s)")
    parser.add_argument("--only", default=",".join(ITEMS), help="items, in this order (default: %(default)s)")
    parser.add_argument("--seeds", default="1,2", help="seeds of the speedrun item (default: %(default)s)")
    parser.add_argument("--target", type=float, default=3.65, help="val loss whose time is taken (default: %(default)s)")
    parser.add_argument("--speedrun-flags", default=SPEEDRUN_FLAGS, help="trainer flags of the speedrun item")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="where the runs go (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="JSON of all results (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    items = args.only.split(",")
    if unknown := sorted(set(items) - set(ITEMS)):
        raise UserError(f"--only {unknown[0]}: choose from {', '.join(ITEMS)}")
    if args.folder.exists() and any(args.folder.iterdir()):
        raise UserError(f"{args.folder} is not empty; choose another --folder")
    seeds = [int(s) for s in args.seeds.split(",")]
    bench = Bench(args.data, args.folder, seeds, args.target, args.speedrun_flags)

    def write() -> None:
        content = {"schema": SCHEMA, "hardware": hardware(args.folder), "data": args.data, **bench.results}
        args.out.write_text(json.dumps(content, indent=1))

    measure_all(items, lambda item: getattr(bench, item)(), bench.results, write)
    say(f"written to {args.out}")
    return 1 if any("error" in result for result in bench.results.values()) else 0
