"""The checkpoints of a run: list, verify, prune, fetch back from a mirror, and tell what saving cost."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.common import UserError, read_json, run_directory


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("checkpoints", help="list, verify, prune and restore the checkpoints of a run")
    parser.add_argument("run", help="run directory, or the name of one in runs/")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="hash every file; exit code 1 if one is bad")
    what.add_argument("--prune", action="store_true", help="remove all but the newest verified and the pinned ones")
    what.add_argument("--from", dest="source", metavar="URI", help="fetch the newest good one from this mirror")
    what.add_argument("--cost", action="store_true", help="how long its saves held up the training")
    parser.add_argument("--keep", type=int, default=2, help="verified checkpoints that --prune leaves (default 2)")
    parser.add_argument("--step", type=int, help="fetch this step, not the newest")


def run(args: argparse.Namespace) -> int:
    if args.keep < 2:
        raise UserError(f"--keep {args.keep}: at least 2 verified checkpoints are kept, since the newest can be bad")
    if args.source:
        return fetch(Path(args.run), args.source, args.step)
    run_dir = run_directory(args.run)
    if args.prune:
        return prune(run_dir, args.keep)
    if args.cost:
        for key, value in stalls([run_dir]).items():
            print(f"{key:<24} {value:.4g}")
        return 0
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


def stalls(run_dirs: Sequence[Path]) -> dict[str, float]:
    """What each save of these runs cost, from their train rows. Raises UserError where there is none.

    stall: the time blocked, and how much longer than usual the longer of the next two steps took (the host is a step ahead).
    stall_5_steps: the time blocked, and how much longer than usual the next five steps took together.
    wait: for the save before it, where saves come faster than they are written; in neither of them.
    The usual step is the median of a run's steps with no save in the five steps before them. Left out are the first tenth of a
    run, at least three steps, and a save with fewer than five steps after it.
    """
    from train_gpt2 import read_metrics  # torch comes with it

    found: dict[str, list[float]] = {name: [] for name in ("usual", "blocked", "stall", "five", "wait")}
    for run_dir in run_dirs:
        rows = read_metrics(run_dir)["train"]
        rows = rows[max(3, len(rows) // 10) :]
        saves = [i for i, row in enumerate(rows) if "save_ms" in row]
        if any(b - a < 6 for a, b in itertools.pairwise(saves)):
            raise UserError(f"{run_dir}: saves fewer than six steps apart; five steps after a save count as its own")
        near = {j for i in saves for j in range(i, i + 5)}
        usual = statistics.median([row["step_ms"] for i, row in enumerate(rows) if i not in near] or [0.0])
        for i in (i for i in saves if i + 5 <= len(rows)):
            blocked, longer = rows[i]["save_ms"], [row["step_ms"] - usual for row in rows[i : i + 5]]
            found["usual"].append(usual)
            found["blocked"].append(blocked)
            found["stall"].append(blocked + max(longer[:2]))
            found["five"].append(blocked + sum(longer))
            found["wait"].append(rows[i].get("save_wait_ms", 0.0))
    if not found["stall"]:
        names = ", ".join(map(str, run_dirs))
        raise UserError(f"{names}: no save with five steps after it, the first tenth of the steps left out")
    median = {name: statistics.median(values) for name, values in found.items()}
    return {
        "stalls": len(found["stall"]), "median_step_ms": median["usual"], "median_blocked_ms": median["blocked"],
        "median_stall_ms": median["stall"], "max_stall_ms": max(found["stall"]),
        "median_stall_in_steps": statistics.median(s / u for s, u in zip(found["stall"], found["usual"])),
        "median_stall_5_steps_ms": median["five"], "median_wait_ms": median["wait"],
    }  # fmt: skip
