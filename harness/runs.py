"""List the runs on this machine: what each was, how far it got, and how it ended."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from harness.common import UserError, find_runs, read_json


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("runs", help="list the runs on this machine")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="folder of run directories (default: runs)")
    parser.add_argument("--json", action="store_true", help="one JSON array instead of a table")


def run(args: argparse.Namespace) -> int:
    rows = [describe(path) for path in find_runs(args.root)]
    if args.json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print(f"no runs in {args.root}/")
    else:
        print_table(rows)
    return 0


def describe(run_dir: Path) -> dict[str, Any]:
    """One run as a flat record; a run without result.json is running or was cut off."""
    row: dict[str, Any] = {
        "run": run_dir.name,
        "recipe": None,
        "seed": None,
        "state": "unfinished",
        "step": None,
        "tokens": None,
        "val_loss": None,
        "tokens_per_s": None,
        "train_seconds": None,
        "device": None,
    }
    try:
        config = read_json(run_dir / "config.json")
        row |= {"recipe": config["recipe"], "seed": config["config"]["seed"]}
        if (run_dir / "result.json").exists():
            result = read_json(run_dir / "result.json")
            row |= {key: result.get(key) for key in row.keys() & result.keys()} | {"state": result["exit_reason"]}
        elif (last := last_row(run_dir / "metrics.jsonl")) is not None:
            row |= {"step": last["step"], "tokens": last["tokens"], "train_seconds": last.get("train_s")}
    except UserError as error:
        row["state"] = f"unreadable: {error}"
    return row


def last_row(metrics: Path) -> dict[str, Any] | None:
    """The last whole line of a metrics file, read from its end (the file may be long, or being written)."""
    if not metrics.exists():
        return None
    with metrics.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 8192))
        for line in reversed(file.read().splitlines()):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                return row
    return None


def print_table(rows: list[dict[str, Any]]) -> None:
    def cell(value: Any, spec: str = "") -> str:
        return "-" if value is None else format(value, spec)

    header = ("run", "recipe", "seed", "state", "step", "tokens", "val loss", "tokens/s", "train s", "device")
    table = [header] + [
        (
            r["run"],
            cell(r["recipe"]),
            cell(r["seed"]),
            r["state"],
            cell(r["step"]),
            cell(r["tokens"], ","),
            cell(r["val_loss"], ".4f"),
            cell(r["tokens_per_s"], ",.0f"),
            cell(r["train_seconds"], ",.1f"),
            cell(r["device"]),
        )
        for r in rows
    ]
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    right_aligned = {2, 4, 5, 6, 7, 8}
    for line in table:
        cells = (c.rjust(w) if i in right_aligned else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths)))
        print("  ".join(cells).rstrip())
