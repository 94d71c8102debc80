"""The main job: train on the hardware found here, evaluate, and print a short summary.

    python -m harness speedrun [--recipe NAME] [--gpus N] [--dry-run] [-- TRAINER FLAGS]

Everything that can be checked is checked before the first process starts, and the recipe that was chosen
is printed with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import math
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.common import UserError, flag_value, human_count, launch_training, read_json, run_process

if TYPE_CHECKING:
    from train_gpt2 import Config

FINEWEB_TARGET = 3.28  # val loss of llm.c's and modded-nanogpt's 124M on FineWeb's 10,485,760 val tokens
UNIGRAM_MARGIN = 0.5  # nats below a unigram model: a run below this has learned more than word frequencies
CPU_HELLASWAG_LIMIT = 100  # examples, 10 to 20 s on two cores; all 10,042 would take half an hour
MAX_RESTARTS = 3  # of all ranks, from the newest verified checkpoint, when one of several is lost
GIB = 2**30
TRAINER_FLAGS = True


@dataclass(frozen=True)
class Hardware:
    """What training can use here: names of the usable CUDA GPUs, and free memory in bytes."""

    gpus: list[str]
    gpu_bytes: int  # of the smallest GPU; 0 without one
    ram_bytes: int  # available now
    cpu_reason: str  # why there is no GPU, when there is none


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "speedrun",
        help="train, evaluate, and print a summary",
        usage="python -m harness speedrun [options] [-- TRAINER FLAGS]",
    )
    parser.add_argument("--recipe", help="recipe of train_gpt2.py; default: speedrun on a GPU, sample on a CPU")
    parser.add_argument("--gpus", type=int, help="GPUs of this machine to train on; default: all")
    parser.add_argument(
        "--hellaswag",
        type=int,
        metavar="N",
        help=f"HellaSwag examples (default: all 10,042 on a GPU, {CPU_HELLASWAG_LIMIT} on a CPU)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and write nothing")


def run(args: argparse.Namespace) -> int:
    from train_gpt2 import RECIPES, check_data, grad_accum_steps, parse_args

    if args.recipe is not None and args.recipe not in RECIPES:
        raise UserError(f"unknown recipe {args.recipe!r}: choose one of {', '.join(RECIPES)}")
    hardware = find_hardware()
    gpus = choose_gpus(args.gpus, hardware)
    recipe, reason = choose_recipe(args.recipe, hardware, gpus)
    trainer_argv = [recipe, *args.trainer_flags]
    if not gpus and hardware.gpus:
        trainer_argv += ["--device", "cpu"]
    cfg = parse_args(trainer_argv)
    if (
        flag_value(trainer_argv, "--micro-batch") is None
        and (size := fitting_micro_batch(cfg, hardware, gpus)) != cfg.micro_batch
    ):
        reason += (
            f"; micro-batch {size} instead of {cfg.micro_batch}, so that it fits and divides the batch on {max(gpus, 1)} ranks"
        )
        trainer_argv += ["--micro-batch", str(size)]
        cfg = parse_args(trainer_argv)
    grad_accum_steps(cfg, max(gpus, 1))
    if args.hellaswag is not None and args.hellaswag < 1:
        raise UserError(f"--hellaswag {args.hellaswag}: give a number of examples, at least 1")
    if not cfg.run_dir:
        run_dir = fresh_run_dir(recipe)
        trainer_argv += ["--run-dir", str(run_dir)]
    else:
        run_dir = Path(cfg.run_dir)
        if (run_dir / "config.json").exists() and not cfg.resume:
            raise UserError(f"{run_dir} exists: choose another --run-dir, or continue it with -- --resume")

    print(f"hardware  {describe_hardware(hardware, gpus)}")
    print(f"recipe    {recipe}: {reason}")
    for name, text in (("memory", check_memory(cfg, hardware, gpus)), ("disk", check_disk(cfg, run_dir))):
        print(f"{name:9s} {text}")
    prepare = data_command(cfg)
    print(f"data      {cfg.data}: {'ready' if prepare is None else 'to be prepared'}")
    examples = args.hellaswag or (None if gpus else CPU_HELLASWAG_LIMIT)
    limit = [] if examples is None else ["--limit", str(examples)]
    evaluations = {"val": ["val", str(run_dir)], "hellaswag": ["hellaswag", str(run_dir), *limit]}

    if args.dry_run:
        print("would run:")
        if prepare is not None:
            print("  " + shlex.join(["python", "-m", *prepare]))
        launcher = ["torchrun", "--standalone", f"--nproc_per_node={gpus}"] if gpus > 1 else ["python"]
        print("  " + shlex.join([*launcher, "train_gpt2.py", *trainer_argv]))
        for evaluation in evaluations.values():
            print("  " + shlex.join(["python", "-m", "eval", *evaluation]))
        return 0

    if prepare is not None:
        if run_process([sys.executable, "-m", *prepare]) != 0:
            raise UserError(f"the data could not be prepared; what it takes: python -m {shlex.join(prepare)}")
        check_data(cfg)
    print(f"training  {run_dir}", flush=True)
    code = launch_training(trainer_argv, max(gpus, 1), MAX_RESTARTS)
    if code != 0:
        print(f"error: training ended with exit code {code}; what it left is in {run_dir}", file=sys.stderr)
        return code
    failed = [name for name, argv in evaluations.items() if run_process([sys.executable, "-m", "eval", *argv]) != 0]
    print_summary(run_dir, failed)
    return 1 if failed else 0


def find_hardware() -> Hardware:
    """Ask torch, since it decides what training can use, and say why when it sees no GPU."""
    import psutil
    import torch

    ram = psutil.virtual_memory().available
    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return Hardware([p.name for p in properties], min(p.total_memory for p in properties), ram, "")
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA"
    else:
        reason = "no usable CUDA GPU was found"
    if shutil.which("nvidia-smi"):
        reason += ", although nvidia-smi is here: check with python -m harness doctor"
    return Hardware([], 0, ram, reason)


def choose_gpus(asked: int | None, hardware: Hardware) -> int:
    """Number of GPUs to train on: all, or as many as asked; 0 on a CPU. Raises UserError if too many."""
    found = len(hardware.gpus)
    if asked is None:
        return found
    if asked < 0:
        raise UserError(f"--gpus {asked}: give 0 for the CPU, or a number of GPUs")
    if asked > found:
        why = f" ({hardware.cpu_reason})" if not found else ""
        raise UserError(f"--gpus {asked}, but there are {found} GPUs here{why}: ask for at most {found}")
    return asked


def choose_recipe(asked: str | None, hardware: Hardware, gpus: int) -> tuple[str, str]:
    """The recipe and, in words, why."""
    if asked is not None:
        return asked, "asked for"
    if gpus:
        return "speedrun", f"{gpus} x {hardware.gpus[0]} can train the real 124M"
    why = hardware.cpu_reason or "--gpus 0 was asked for"
    return "sample", f"{why}, so the small model on the embedded sample text; minutes on a laptop"


def fitting_micro_batch(cfg: Config, hardware: Hardware, gpus: int) -> int:
    """The recipe's micro-batch, halved until it divides the batch over the ranks and, by the planner's prediction,
    fits the GPU. What is learned does not depend on it."""
    from harness.plan import USABLE, config_model, trainer_peak

    model, ranks, size = config_model(cfg), max(gpus, 1), cfg.micro_batch

    def fits(size: int) -> bool:
        peak = trainer_peak(model, size) or 0
        return not gpus or peak <= USABLE * hardware.gpu_bytes

    while size > 1 and (cfg.batch_tokens % (size * cfg.seq_len * ranks) or not fits(size)):
        size //= 2
    return size


def fresh_run_dir(recipe: str, root: Path = Path("runs")) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return root / f"{stamp}-{recipe}"


def describe_hardware(hardware: Hardware, gpus: int) -> str:
    ram = f"{hardware.ram_bytes / GIB:.0f} GiB of memory free"
    if not hardware.gpus:
        return f"CPU only, {ram}"
    each = f"{hardware.gpus[0]}, {hardware.gpu_bytes / GIB:.0f} GiB each"
    return f"{gpus} of {len(hardware.gpus)} GPUs: {each}; {ram}"


def training_bytes(cfg: Config) -> int:
    """fp32 weights and gradients, and the optimizer's moments: what a rank holds beside activations."""
    from train_gpt2 import parameter_count

    return 16 * parameter_count(cfg)["total"]


def check_memory(cfg: Config, hardware: Hardware, gpus: int) -> str:
    """Refuse a machine that cannot hold the training state at all; returns what was found, in words."""
    state = training_bytes(cfg)
    if gpus and state > hardware.gpu_bytes:
        raise UserError(
            f"the training state alone takes {state / GIB:.1f} GiB and {hardware.gpus[0]} has "
            f"{hardware.gpu_bytes / GIB:.1f} GiB: choose a smaller model"
        )
    # A checkpoint is staged in host memory, each tensor by one rank only: about as much as the state itself.
    need, what = state, "staging a checkpoint in host memory" if gpus else "weights, gradients and optimizer"
    if need > hardware.ram_bytes:
        raise UserError(
            f"{what} take {need / GIB:.1f} GiB, and {hardware.ram_bytes / GIB:.1f} GiB of memory are free: "
            "close other programs, or choose a smaller model"
        )
    return f"{need / GIB:.1f} GiB needed for {what}, {hardware.ram_bytes / GIB:.1f} GiB free"


def check_disk(cfg: Config, run_dir: Path) -> str:
    """Refuse a disk that cannot hold the run; returns what was found, in words."""
    parent = next(p for p in [run_dir.absolute(), *run_dir.absolute().parents] if p.exists())
    copies = 1 if cfg.checkpoint_every == "0" else cfg.keep + 2  # kept, the next one, and the weights
    need = training_bytes(cfg) * copies
    free = shutil.disk_usage(parent).free
    if need > free:
        raise UserError(
            f"the run takes up to {need / GIB:.1f} GiB of disk and {parent} has {free / GIB:.1f} GiB free: "
            "make room, or choose another --run-dir"
        )
    return f"{need / GIB:.1f} GiB at most for weights and checkpoints, {free / GIB:.1f} GiB free"


def data_command(cfg: Config) -> list[str] | None:
    """None when the shards are there; else the module and arguments that prepare them. Raises UserError
    for shards that are there and broken, or that nobody but the user can provide."""
    from train_gpt2 import TokenStream, check_data, find_shards

    data = Path(cfg.data)
    missing = not any(data.glob("*_train_*.bin")) or not any(data.glob("*_val_*.bin"))
    if missing and data.name == "sample":
        return ["data", "sample", "--out", str(data)]
    if data.name == "fineweb10B":
        needed = math.ceil((cfg.max_steps * cfg.batch_tokens + 1) / cfg.epochs)
        if missing or len(TokenStream(find_shards(data, "train"))) < needed:
            return ["data", "fetch", data.name, "--tokens", str(needed), "--out", str(data)]
    check_data(cfg)
    return None


def unigram_loss(data: Path, val_tokens: int) -> float:
    """Nats per token of an add-one unigram model of the train shards, on the first `val_tokens` of val.

    The floor that any model must beat by far: it knows how often a token occurs, and nothing of context.
    """
    import numpy as np

    from train_gpt2 import TokenStream, find_shards

    train, val = (TokenStream(find_shards(data, split)) for split in ("train", "val"))
    counts = np.ones(50257)
    for start in range(0, len(train), 2**24):
        counts += np.bincount(train.slice(start, min(2**24, len(train) - start)), minlength=50257)
    held_out = val.slice(0, min(val_tokens, len(val)))
    return float(np.log(counts.sum()) - np.log(counts)[held_out].mean())


def target_for(recipe: str, data: Path, val_tokens: int) -> tuple[float | None, str]:
    """The val loss to reach and where it comes from; None where nothing comparable was published."""
    if recipe == "sample":
        unigram = unigram_loss(data, val_tokens)
        return unigram - UNIGRAM_MARGIN, f"{UNIGRAM_MARGIN} below a unigram model's {unigram:.2f}"
    manifest = data / "manifest.json"
    if manifest.exists() and "fineweb10B" in str(read_json(manifest).get("dataset")):
        return FINEWEB_TARGET, "FineWeb, as published"
    return None, f"no published figure for {data}"


def print_summary(run_dir: Path, failed: list[str]) -> None:
    from harness.curve import draw

    config = read_json(run_dir / "config.json")
    result = read_json(run_dir / "result.json")
    data = Path(result["data"]["dir"])
    target, source = target_for(config["recipe"], data, result["val_protocol"]["tokens"])
    png, svg = draw([run_dir], run_dir / "loss", target)
    loss = result["val_loss"]
    verdict = ""
    if target is not None:
        verdict = f"; target {target:.2f} ({source}) {'reached' if loss <= target else 'NOT reached'}"
    mfu = "MFU unknown for this device" if result["mfu"] is None else f"MFU {100 * result['mfu']:.1f}%"
    print(f"\nval loss      {loss:.4f} nats per token over {result['val_protocol']['tokens']:,} tokens{verdict}")
    print(f"HellaSwag     {hellaswag_line(run_dir)}")
    print(
        f"trained       {human_count(result['tokens'])} tokens in {result['train_seconds']:.1f} s "
        f"({result['tokens_per_s']:,.0f} tokens/s, {mfu})"
    )
    print(f"run           {run_dir}")
    print(f"loss curve    {png} and {svg.name}")
    for name in failed:
        print(f"error: the evaluation failed; repeat it with python -m eval {name} {run_dir}", file=sys.stderr)


def hellaswag_line(run_dir: Path) -> str:
    """acc_norm and its standard error, with the scoring's name and whether it is a subset."""
    scores: list[dict[str, Any]] = [read_json(path) for path in sorted(run_dir.glob("hellaswag-*.json"))]
    if not scores:
        return "not measured"
    return "; ".join(
        f"acc_norm {100 * s['acc_norm']:.2f}% +- {100 * s['acc_norm_stderr']:.2f} ({s['scoring']} scoring, "
        + (f"a subset of {s['examples']:,} of 10,042" if s["examples"] < 10042 else "all 10,042")
        + " examples)"
        for s in scores
    )
