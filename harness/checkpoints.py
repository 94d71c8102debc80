"""The checkpoints of a run: list, verify, prune, fetch back from a mirror, and measure what saving costs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import uuid
from pathlib import Path
from typing import Any

from harness.common import UserError, launch_training, read_json, run_directory

TRAINER_FLAGS = True  # after `--`, for --bench


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("checkpoints", help="list, verify, prune and restore the checkpoints of a run")
    parser.add_argument("run", help="run directory, or the name of one in runs/")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="hash every file; exit code 1 if one is bad")
    what.add_argument("--prune", action="store_true", help="remove all but the newest verified and the pinned ones")
    what.add_argument("--from", dest="source", metavar="URI", help="fetch the newest good one from this mirror")
    what.add_argument(
        "--bench", metavar="RECIPE", help="train this recipe into RUN and report what saving costs (flags after --)"
    )
    parser.add_argument("--keep", type=int, default=2, help="verified checkpoints that --prune leaves (default 2)")
    parser.add_argument("--step", type=int, help="fetch this step, not the newest")
    parser.add_argument("--saves", type=int, default=12, help="saves that --bench makes (default 12)")
    parser.add_argument("--every", type=int, default=50, help="steps between them (default 50)")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of --bench")


def run(args: argparse.Namespace) -> int:
    if args.keep < 2:
        raise UserError(f"--keep {args.keep}: at least 2 verified checkpoints are kept, since the newest can be bad")
    if args.bench:
        return bench(Path(args.run), args)
    if args.source:
        return fetch(Path(args.run), args.source, args.step)
    run_dir = run_directory(args.run)
    if args.prune:
        return prune(run_dir, args.keep)
    return show(run_dir, args.verify)


def show(run_dir: Path, verify: bool) -> int:
    """One line for each checkpoint, oldest first. Returns 1 if one is bad."""
    folder = run_dir / "checkpoints"
    paths = sorted([*folder.glob("step-*"), *folder.glob("abandoned-step-*")], key=lambda p: (p.name[0], len(p.name), p.name))
    if not paths:
        print(f"{run_dir}: no checkpoints")
        return 0
    print(f"{'checkpoint':<24} {'step':>8} {'MB':>9} {'ranks':>5} {'val loss':>9}  state")
    bad = 0
    for path in paths:
        row, state = describe(path, verify)
        bad += state.startswith("BAD")
        size, loss = row.get("bytes"), row.get("val_loss")
        print(
            f"{path.name:<24} {row.get('step', '?'):>8} {'?' if size is None else f'{size / 1e6:.1f}':>9} "
            f"{row.get('world_size', '?'):>5} {'-' if loss is None else f'{loss:.4f}':>9}  {state}"
        )
    return 1 if bad else 0


def describe(path: Path, verify: bool) -> tuple[dict[str, Any], str]:
    """What a checkpoint says of itself, and its state in words."""
    row: dict[str, Any] = {}
    state = "not verified"
    try:
        manifest = read_json(path / "manifest.json")
        row = {"step": manifest["step"], "bytes": sum(f["bytes"] for f in manifest["files"].values())}
        if verify:
            from train_gpt2 import verify_checkpoint

            verify_checkpoint(path)
            state = "verified"
        row |= {k: v for k, v in read_json(path / "train_state.json").items() if k in ("world_size", "val_loss")}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        state = f"BAD: {error}"
    notes = [state]
    if (path / "pinned").exists():
        notes.append("pinned " + (path / "pinned").read_text().strip())
    if path.name.startswith("abandoned"):
        notes.append("set aside when the run went back to an earlier step")
    return row, ", ".join(notes)


def prune(run_dir: Path, keep: int) -> int:
    """Removes all but the newest `keep` verified and the pinned ones, and what was set aside or left half-written."""
    from train_gpt2 import list_checkpoints, lock_run, verify_checkpoint

    lock = lock_run(run_dir, patience=0.0)
    good: list[Path] = []
    rest: list[Path] = []
    for path in reversed(list_checkpoints(run_dir)):
        if len(good) < keep:
            try:
                verify_checkpoint(path)
                good.append(path)
                continue
            except ValueError as error:
                print(f"bad: {error}")
        rest.append(path)
    if len(good) < keep:
        raise UserError(f"{run_dir} has {len(good)} verified checkpoints, fewer than --keep {keep}: nothing was removed")
    folder = run_dir / "checkpoints"
    rest = [p for p in rest if not (p / "pinned").exists()]
    for path in [*rest, *folder.glob("abandoned-step-*"), *folder.glob(".tmp-*"), *folder.glob(".old-*")]:
        gone = folder / f".old-{uuid.uuid4().hex}"
        os.replace(path, gone)  # out of sight first: a half-removed one must not look like a checkpoint
        shutil.rmtree(gone)
        print(f"removed {path.name}")
    print(f"kept {', '.join(p.name for p in reversed(good))}")
    lock.close()
    return 0


def fetch(run_dir: Path, uri: str, step: int | None) -> int:
    """Copies the newest complete checkpoint (or that of `step`) from a mirror into the run, verified before it counts."""
    import fsspec

    from train_gpt2 import fsync_dir, lock_run, step_number, verify_checkpoint

    folder = run_dir / "checkpoints"
    try:
        fs, root = fsspec.core.url_to_fs(uri)
        inside = f"{root.rstrip('/')}/{run_dir.absolute().name}"
        root = inside if fs.isdir(inside) else root
        there = {step_number(p): p for p in fs.ls(root, detail=False) if step_number(p) >= 0}
    except Exception as error:  # each file system has its own
        raise UserError(f"{uri} cannot be read: {error or type(error).__name__}") from None
    if not there or (step is not None and step not in there):
        raise UserError(
            f"{uri}: no checkpoint{f' of step {step}' if step is not None else ''} of {run_dir.absolute().name} there"
        )
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_run(run_dir, patience=0.0)
    for number in [step] if step is not None else sorted(there, reverse=True):
        temporary = folder / f".tmp-fetch-{uuid.uuid4().hex[:8]}"
        final = folder / f"step-{number:06d}"
        try:
            fs.get(there[number].rstrip("/") + "/", str(temporary) + "/", recursive=True)
            verify_checkpoint(temporary)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            print(f"CHECKPOINT REFUSED: {there[number]}: {str(error).replace(str(temporary), '').lstrip(': ')}")
            continue
        if final.exists():
            os.replace(final, folder / f".old-{final.name}-{uuid.uuid4().hex[:8]}")
        os.replace(temporary, final)
        fsync_dir(folder)
        lock.close()
        print(f"{final} is restored and verified; go on with --run-dir {run_dir} --resume")
        return 0
    raise UserError(f"{uri}: no checkpoint there is whole")


def bench(run_dir: Path, args: argparse.Namespace) -> int:
    """Trains with a save every so often, resumes once, and writes checkpoint-bench.json with stalls, times and bytes."""
    if args.saves < 1 or args.every < 6:
        raise UserError("--bench needs --saves of at least 1 and --every of at least 6: five steps after a save count as its own")
    steps = args.every * (args.saves + 1)
    flags = [
        args.bench, "--run-dir", str(run_dir), "--checkpoint-every", str(args.every), "--max-steps", str(steps),
        "--val-every", "0", *args.trainer_flags,
    ]  # fmt: skip
    for more in ([], ["--resume"]):
        if code := launch_training([*flags, *more], args.gpus):
            return code
        if not more:
            first = read_json(run_dir / "result.json")
    restore_s = read_json(run_dir / "result.json")["checkpoints"]["restore_s"]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    report = stalls([r for r in rows if r["kind"] == "train"]) | {
        "device": first["device"], "world_size": first["world_size"], **first["checkpoints"], "restore_s": restore_s,
    }  # fmt: skip
    (run_dir / "checkpoint-bench.json").write_text(json.dumps({"schema": 1, **report}, indent=1) + "\n")
    for key, value in report.items():
        print(f"{key:<24} {value:.4g}" if isinstance(value, float) else f"{key:<24} {value}")
    return 0


def stalls(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What each save cost, from the train rows.

    stall: the time blocked, and how much longer than usual the longer of the next two steps took (the host is a step ahead).
    stall_5_steps: the time blocked, and how much longer than usual the next five steps took together.
    wait: for the save before it, where saves come faster than they are written; in neither of them.
    The usual step is the median of those with no save in the five steps before them; the first tenth is left out.
    """
    rows = rows[len(rows) // 10 :]
    saves = [i for i, row in enumerate(rows) if "save_ms" in row]
    near = {j for i in saves for j in range(i, i + 5)}
    usual = statistics.median(row["step_ms"] for i, row in enumerate(rows) if i not in near)
    cost = [rows[i]["save_ms"] + max(r["step_ms"] for r in rows[i : i + 2]) - usual for i in saves]
    wide = [rows[i]["save_ms"] + sum(r["step_ms"] - usual for r in rows[i : i + 5]) for i in saves]
    return {
        "stalls": len(cost), "median_step_ms": usual, "median_stall_ms": statistics.median(cost), "max_stall_ms": max(cost),
        "median_stall_in_steps": statistics.median(cost) / usual, "median_stall_5_steps_ms": statistics.median(wide),
        "median_wait_ms": statistics.median(rows[i].get("save_wait_ms", 0.0) for i in saves),
    }  # fmt: skip
