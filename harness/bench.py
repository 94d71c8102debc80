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
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import gates
from harness.baseline import Run, read_run
from harness.checkpoints import stalls
from harness.common import SCHEMA, TRAINER, UserError, read_json

# A short speedrun on 72M tokens. Between saves: 185 steps and one or two validations, 23 to 24 s; a save beside training took up
# to 24 s.
SPEEDRUN_FLAGS = (
    "--batch-tokens 65536 --micro-batch 64 --max-steps 1100 --val-every 110 --val-tokens 1835008 --epochs 2 "
    "--muon-lr 0.02 --muon-momentum-warmup 300 --head-lr 0.01 --beta1 0.65 --checkpoint-every 185"
)
SHORT = "--val-every 0 --val-tokens 65536 --val-batch 16 --checkpoint-every 0 --epochs 4"


class Bench:
    """Runs items in one folder and keeps what they found."""

    def __init__(
        self, data: str, folder: Path, seeds: list[int], target: float, speedrun_flags: str, flags: str = "", hellaswag: str = ""
    ):
        self.data, self.folder, self.seeds, self.target = data, folder, seeds, target
        self.speedrun_flags, self.flags, self.hellaswag_flags = speedrun_flags, flags, shlex.split(hellaswag)
        self.results: dict[str, Any] = {}

    def train(self, name: str, recipe: str, flags: str, caches: Path | None = None, data: str | None = None) -> Run:
        """One training, as what it left. Raises RuntimeError if it fails."""
        run_dir = self.folder / name
        environment = dict(os.environ)
        if caches is not None:
            environment |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
        command = [sys.executable, str(TRAINER), recipe, "--data", data or self.data, "--run-dir", str(run_dir)]
        self.process(name, [*command, *shlex.split(f"{flags} {self.flags}")], environment)
        return read_run(run_dir)

    def process(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> str:
        """What the command prints. Raises RuntimeError with the end of what it says if it fails."""
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} ended with exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")
        return done.stdout

    def speedrun(self) -> dict[str, Any]:
        """Seconds of training to the target loss (between validations by a straight line), final loss, tokens/s, per seed."""
        runs: list[dict[str, Any]] = []
        errors = {}
        for seed in self.seeds:
            try:
                run = self.train(f"speedrun-{seed}", "speedrun", f"{self.speedrun_flags} --seed {seed}")
            except RuntimeError as error:  # the other seeds' figures stand
                errors["error"] = str(error)
                say(f"  seed {seed} FAILED: {error}")
                continue
            kept = "val_loss train_seconds tokens tokens_per_s mfu peak_mem_bytes startup_seconds".split()
            runs.append({"seed": seed, **{key: run.result[key] for key in kept}})
            runs[-1] |= {"target": self.target, "seconds_to_target": gates.seconds_to(run, self.target)}
            runs[-1]["curve"] = [(row["tokens"], row["train_s"], row["val_loss"]) for row in run.val]
            reached = runs[-1]["seconds_to_target"]
            said = f"{self.target:g} after {reached:.1f} s" if reached is not None else f"{self.target:g} not reached"
            say(f"  seed {seed}: val loss {run.val_loss:.4f} after {run.result['train_seconds']:.1f} s of training; {said}")
        figures = ("val_loss", "seconds_to_target", "tokens_per_s", "train_seconds")
        return {"runs": runs, **(spread(figures, runs) if runs else {}), **errors}

    def gpt2(self) -> dict[str, Any]:
        """Tokens/s of the control recipe over a short steady window, once for each seed."""
        kept = ("tokens_per_s", "mfu", "peak_mem_bytes", "startup_seconds")
        runs = [self.train(f"gpt2-{seed}", "gpt2", f"{SHORT} --max-steps 24 --seed {seed}").result for seed in self.seeds]
        return {"runs": [{key: run[key] for key in kept} for run in runs], **spread(kept, runs)}

    def start(self) -> dict[str, Any]:
        """Seconds from process start to the end of the first step, with an empty and a filled compile cache."""
        with tempfile.TemporaryDirectory() as caches:
            cold, warm = (
                self.train(f"start-{name}", "speedrun", f"{SHORT} --max-steps 3", Path(caches)).result["startup_seconds"]
                for name in ("cold", "warm")
            )
        return {"cold_seconds": cold, "warm_seconds": warm}

    def memory(self) -> dict[str, Any]:
        """Peak memory of speedrun in GB by micro-batch (the same batch, more accumulation)."""
        sizes = (8, 16, 32, 64)
        runs = [self.train(f"memory-{rows}", "speedrun", f"{SHORT} --max-steps 3 --micro-batch {rows}") for rows in sizes]
        return {str(rows): run.result["peak_mem_bytes"] / 1e9 for rows, run in zip(sizes, runs)}

    def checkpoint(self) -> dict[str, Any]:
        """What the saves of the speedrun item cost its loop, and seconds and bytes of a save and of a resume."""
        runs = self.finished()
        run_dir = runs[-1]
        # Resumed as a copy, since the run's own figures are to stand; a checkpoint's files never change, so links will do.
        shutil.copytree(run_dir / "checkpoints", self.folder / "restore" / "checkpoints", copy_function=os.link)
        seed = run_dir.name.removeprefix("speedrun-")
        resumed = self.train("restore", "speedrun", f"{self.speedrun_flags} --seed {seed} --resume newest")
        saved = read_json(run_dir / "result.json")["checkpoints"]
        return {**stalls(runs), **saved, "restore_s": resumed.result["checkpoints"]["restore_s"]}

    def hellaswag(self) -> dict[str, Any]:
        """Wall seconds of the full HellaSwag validation set on the last speedrun model."""
        began = time.perf_counter()
        command = [sys.executable, "-m", "eval", "hellaswag", str(self.finished()[-1]), *self.hellaswag_flags]
        said = self.process("hellaswag", command)
        return {"wall_seconds": time.perf_counter() - began, "output": said.strip().splitlines()[-6:]}

    def val(self) -> dict[str, Any]:
        """Seconds of the trainer's own validation over 10,485,760 tokens: train shards stand in, only the time counts."""
        from train_gpt2 import find_shards

        with tempfile.TemporaryDirectory() as folder:
            for path in map(Path.absolute, find_shards(self.data, "train")):
                for split in ("train", "val"):
                    Path(folder, path.name.replace("_train_", f"_{split}_")).symlink_to(path)
            flags = "--max-steps 2 --val-every 0 --val-tokens 10485760 --val-batch 64 --micro-batch 64 --checkpoint-every 0"
            run = self.train("val", "speedrun", f"{flags} --batch-tokens 65536", data=folder)
        return {"seconds": run.val[-1]["val_s"], "tokens": run.result["val_protocol"]["tokens"]}

    def kernels(self) -> dict[str, Any]:
        """Milliseconds of head and loss in each precision, and of an MLP, plain and fused: forward and backward of one
        micro-batch of 64 rows of random numbers, as far as this device can."""
        import torch
        from torch.utils.benchmark import Timer

        from train_gpt2 import COMPUTE_DTYPE, MLP, HeadLoss, fuses_mlp, has_fp8, parse_args

        cfg = parse_args(["speedrun", *shlex.split(f"{SHORT} --micro-batch 64 {self.flags}")])
        device = torch.device("cuda" if cfg.device != "cpu" and torch.cuda.is_available() else "cpu")
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(cfg.micro_batch, cfg.seq_len, cfg.n_embd, device=device, generator=generator)
        x = x.to(COMPUTE_DTYPE[cfg.precision]).requires_grad_()
        w = torch.randn(cfg.padded_vocab, cfg.n_embd, device=device, generator=generator).mul_(cfg.n_embd**-0.5).requires_grad_()
        targets = torch.randint(cfg.vocab_size, (x[..., 0].numel(),), device=device, generator=generator)
        mlp = MLP(cfg).to(device)
        for p in mlp.parameters():
            torch.nn.init.normal_(p, std=0.02, generator=generator)
        forward = torch.compile(mlp.forward, fullgraph=True, dynamic=False) if device.type == "cuda" else mlp.forward

        def head(precision: str) -> None:
            loss = HeadLoss.apply(x.flatten(0, 1), w, targets, cfg.vocab_size, cfg.softcap, precision)
            torch.autograd.grad(loss, (x, w))

        def hidden(fused: bool) -> None:
            torch.autograd.grad(forward(x, fused), (x, *mlp.parameters()), x.detach())

        def ms(f: Callable[[Any], None], form: Any) -> float:
            timer = Timer("f(form)", globals={"f": f, "form": form}, num_threads=torch.get_num_threads())
            return timer.blocked_autorange(min_run_time=1).median * 1000

        precisions = ["same", *(["fp8", "fp8-rows", "fp8-all"] if has_fp8(device, cfg.precision) else [])]
        found = {f"head_{precision}": ms(head, precision) for precision in precisions}
        found["mlp"] = ms(hidden, False)
        if fuses_mlp(cfg, x):
            found["mlp_fused"] = ms(hidden, True)
        torch.cuda.empty_cache()
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        return {"device": name, "torch": torch.__version__, "ms": found}

    def finished(self) -> list[Path]:
        """The speedrun item's runs that came to their end, in the order of the seeds. Raises RuntimeError if there is none."""
        runs = [self.folder / f"speedrun-{seed}" for seed in self.seeds]
        ends = [r for r in runs if (r / "result.json").exists() and read_json(r / "result.json")["exit_reason"] == "finished"]
        if not ends:
            raise RuntimeError("needs a finished run of the speedrun item")
        return ends


def spread(keys: Sequence[str], runs: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Median and range over the runs; None where one of them has no such number."""
    out: dict[str, float | None] = {}
    for key in keys:
        values = [run[key] for run in runs]
        whole = None not in values
        out |= {f"median_{key}": statistics.median(values) if whole else None}
        out |= {f"range_{key}": max(values) - min(values) if whole else None}
    return out


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


ITEMS = ("speedrun", "hellaswag", "gpt2", "checkpoint", "start", "val", "memory", "kernels")


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("bench", help="measure the figures that the documentation states")
    parser.add_argument("--data", default="data/fineweb10B", help="folder of token shards (default: %(default)s)")
    parser.add_argument("--only", default=",".join(ITEMS), help="items, in this order (default: %(default)s)")
    parser.add_argument("--seeds", default="1,2", help="seeds of the speedrun item (default: %(default)s)")
    parser.add_argument("--target", type=float, default=3.65, help="val loss whose time is taken (default: %(default)s)")
    parser.add_argument("--speedrun-flags", default=SPEEDRUN_FLAGS, help="trainer flags of the speedrun item")
    parser.add_argument("--flags", default="", help="added to every training, to rehearse on a small machine")
    parser.add_argument("--hellaswag", default="", help="options of the HellaSwag evaluation, such as '--limit 100'")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="where the runs go (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="JSON of all results (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    items = args.only.split(",")
    if unknown := sorted(set(items) - set(ITEMS)):
        raise UserError(f"--only {unknown[0]}: choose from {', '.join(ITEMS)}")
    if args.folder.is_dir() and any(args.folder.iterdir()):
        raise UserError(f"{args.folder} is not empty; choose another --folder")
    for item in {"checkpoint", "hellaswag"} & set(items):
        if "speedrun" not in items[: items.index(item)]:
            raise UserError(f"--only {args.only}: {item} reads the runs of speedrun, which must come before it")
    from train_gpt2 import find_shards, parse_args, write_atomic

    try:
        seeds = [int(s) for s in args.seeds.split(",")]
        parse_args(["speedrun", *shlex.split(f"{SHORT} {args.flags}")])
        for seed in seeds:
            cfg = parse_args(["speedrun", *shlex.split(f"{args.speedrun_flags} --seed {seed} {args.flags}")])
        if "checkpoint" in items and cfg.checkpoint_every == "0":
            raise UserError("the checkpoint item needs saves: give --checkpoint-every")
        shlex.split(args.hellaswag)
    except ValueError as error:  # a UserError is one
        raise UserError(f"--seeds, --flags, --speedrun-flags or --hellaswag: {error}") from None
    if len(set(seeds)) != len(seeds):
        raise UserError(f"--seeds {args.seeds}: each seed once")
    if args.out.exists():
        raise UserError(f"--out {args.out} exists; choose another, or remove it")
    find_shards(args.data, "train")  # said now, not by every item
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from None
    bench = Bench(args.data, args.folder, seeds, args.target, args.speedrun_flags, args.flags, args.hellaswag)

    def write() -> None:
        content = {"schema": SCHEMA, "hardware": hardware(args.folder), "data": args.data, **bench.results}
        write_atomic(args.out, json.dumps(content, indent=1) + "\n")

    measure_all(items, lambda item: getattr(bench, item)(), bench.results, write)
    say(f"written to {args.out}")
    return 1 if any("error" in result for result in bench.results.values()) else 0
