"""Two runs side by side: numbers that can be compared, their differences with intervals, and a picture."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from eval import common, stats
from train_gpt2 import Config, UserError, read_json, read_metrics

METRICS = ("acc", "acc_norm", "acc_bytes")


def read_run(run_dir: Path) -> dict[str, Any]:
    """config.json and result.json of a finished run."""
    if not (run_dir / "config.json").is_file():
        raise UserError(f"{run_dir}: no config.json; give a run directory")
    if not (run_dir / "result.json").is_file():
        raise UserError(f"{run_dir}: no result.json; the run has not ended")
    return {"config": read_json(run_dir / "config.json"), "result": read_json(run_dir / "result.json")}


def choices_right(rows: list[dict[str, Any]], metric: str) -> np.ndarray:
    return np.array([row[f"choice_{metric}"] == row["label"] for row in rows])


def current(run: Path, path: Path) -> dict[str, Any] | None:
    """A result kept next to `run`, or None; raises UserError if the run has other weights by now."""
    summary = common.read_summary(path)
    weights = read_run(run)["result"].get("weights_sha256")
    if summary and weights and summary["model"]["weights_sha256"] != weights:
        raise UserError(f"{path} was measured on other weights than the run has now; evaluate {run} again")
    return summary


def common_rows(a: Path, b: Path, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | None:
    """Rows of both NAME.jsonl, cut to the examples that both have; None where either has none."""
    first, second = (current(run, run / f"{name}.json") for run in (a, b))
    if not first or not second or not all((run / f"{name}.jsonl").is_file() for run in (a, b)):
        return None
    if first["data_sha256"] != second["data_sha256"]:
        raise UserError(f"{name}: {a} and {b} were scored on different files; score both again")
    tables = [{row["index"]: row for row in common.read_lines(run / f"{name}.jsonl")} for run in (a, b)]
    shared = sorted(tables[0].keys() & tables[1].keys())
    return [tables[0][i] for i in shared], [tables[1][i] for i in shared]


def compare_accuracies(a: Path, b: Path) -> list[dict[str, Any]]:
    """HellaSwag in each definition that both runs have, and LAMBADA: paired on the same examples."""
    out: list[dict[str, Any]] = []
    for scoring in ("llmc", "lm-eval"):
        rows = common_rows(a, b, f"hellaswag-{scoring}")
        for metric in METRICS if rows else ():
            assert rows is not None
            if f"choice_{metric}" not in rows[0][0]:
                continue
            right = [choices_right(r, metric) for r in rows]
            out.append(
                {"name": f"HellaSwag {scoring} {metric}", "unit": "accuracy", "examples": len(rows[0])}
                | {"a": float(right[0].mean()), "b": float(right[1].mean())}
                | stats.paired_accuracy(*right).to_json()
            )
    rows = common_rows(a, b, "lambada")
    if rows:
        right = [np.array([row["right"] for row in r]) for r in rows]
        nll = [np.array([row["nll"] for row in r]) for r in rows]
        out.append(
            {"name": "LAMBADA acc", "unit": "accuracy", "examples": len(rows[0])}
            | {"a": float(right[0].mean()), "b": float(right[1].mean())}
            | stats.paired_accuracy(*right).to_json()
        )
        out.append(
            {"name": "LAMBADA last word", "unit": "nats", "examples": len(rows[0])}
            | {"a": float(nll[0].mean()), "b": float(nll[1].mean())}
            | {"difference": stats.mean(nll[1] - nll[0]).to_json()}
        )
    return out


def compare_losses(a: Path, b: Path) -> list[dict[str, Any]]:
    """Every val-*.json protocol that both runs have, paired block by block of the same text."""
    tables = []
    for run in (a, b):
        measured = [current(run, path) for path in sorted(run.glob("val-*.json"))]
        tables.append({protocol_key(m["protocol"]): m for m in measured if m})
    out = []
    for key in sorted(tables[0].keys() & tables[1].keys()):
        of_a, of_b = tables[0][key], tables[1][key]
        difference = stats.mean(np.array(of_b["blocks"]) - np.array(of_a["blocks"]))
        out.append(
            {"name": "val loss", "unit": "nats per token", "protocol": of_a["protocol"]}
            | {"a": of_a["nats_per_token"], "b": of_b["nats_per_token"], "difference": difference.to_json()}
            | {"per_position": [of_a["per_position"], of_b["per_position"]]}
        )
    return out


def protocol_key(protocol: dict[str, Any]) -> str:
    return " ".join(f"{k}={protocol[k]}" for k in sorted(protocol))


def describe(row: dict[str, Any]) -> str:
    """One line of the table; accuracies in per cent."""
    scale, digits = (100, 2) if row["unit"] == "accuracy" else (1, 4)
    d = row.get("difference")
    line = f"{row['name']:<28} {scale * row['a']:>9.{digits}f} {scale * row['b']:>9.{digits}f}"
    if d is None:
        return line
    line += f" {scale * d['value']:>+9.{digits}f}"
    if d["low"] is not None:
        line += f"  95% {scale * d['low']:+.{digits}f} to {scale * d['high']:+.{digits}f}"
    if "examples" in row:
        line += f"  n={row['examples']:,}"
    if "mcnemar_exact_p" in row:
        line += f"  p={row['mcnemar_exact_p']:.3f} ({row['only_a']} only A, {row['only_b']} only B)"
    return line


def draw(a: Path, b: Path, rows: list[dict[str, Any]], path: Path) -> list[Path]:
    """Val loss against tokens of both runs; beside it each difference, B minus A, with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for run in (a, b):
        val = read_metrics(run)["val"]
        left.plot([r["tokens"] for r in val], [r["val_loss"] for r in val], marker=".", label=run.name)
    left.set(xlabel="tokens", ylabel="val loss (nats per token)")
    left.grid(alpha=0.3)
    left.legend()
    shown = [r for r in rows if "difference" in r and r["difference"]["low"] is not None]
    for y, row in enumerate(shown):
        d = row["difference"]
        # Nats and shares on one axis: each in units of its own standard error.
        unit = d["se"] or 1.0
        right.errorbar(
            d["value"] / unit,
            y,
            xerr=[[(d["value"] - d["low"]) / unit], [(d["high"] - d["value"]) / unit]],
            fmt="o",
        )
    right.axvline(0, color="gray", linewidth=1)
    right.set_xscale("symlog", linthresh=4)  # one difference may be a hundred errors wide, the next less than one
    right.set_yticks(range(len(shown)), [r["name"] for r in shown])
    right.set(xlabel=f"{b.name} minus {a.name}, in standard errors (95% interval)", ylim=(-0.5, max(len(shown), 1) - 0.5))
    right.invert_yaxis()
    return common.save_picture(figure, path)


def compare(a: Path, b: Path) -> dict[str, Any]:
    """All that can be compared of two runs; raises UserError where a directory is no ended run."""
    runs = [read_run(a), read_run(b)]
    neutral = dataclasses.asdict(Config())  # a field that a run lacks is younger than it and meant the default
    configs = [neutral | run["config"]["config"] for run in runs]
    changed = {
        k: [configs[0].get(k), configs[1].get(k)]
        for k in sorted(configs[0].keys() | configs[1].keys())
        if k != "run_dir" and configs[0].get(k) != configs[1].get(k)
    }
    results = [run["result"] for run in runs]
    rows = compare_losses(a, b)
    same_protocol = results[0]["val_protocol"] == results[1]["val_protocol"]
    if not rows and same_protocol:
        losses = [r["val_loss"] for r in results]
        rows.append({"name": "val loss", "unit": "nats per token", "a": losses[0], "b": losses[1]})
    return {
        "a": str(a),
        "b": str(b),
        "config": changed,
        "same_val_protocol": same_protocol,
        "results": [
            {k: r.get(k) for k in ("val_loss", "tokens", "train_seconds", "tokens_per_s", "params", "seed")} for r in results
        ],
        "rows": rows + compare_accuracies(a, b),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="RUN_A", type=Path)
    parser.add_argument("b", metavar="RUN_B", type=Path)
    parser.add_argument("--save", type=common.writable_file, metavar="FILE", help="the comparison as JSON")
    parser.add_argument("--picture", type=common.writable_file, metavar="FILE", help="default: RUN_B/compare-A.png and .svg")


def run(args: argparse.Namespace) -> int:
    found = compare(args.a, args.b)
    print(f"A {args.a}\nB {args.b}")
    for field, (old, new) in found["config"].items():
        print(f"  {field}: {old} -> {new}")
    for label, r in zip("AB", found["results"]):
        loss = "none" if r["val_loss"] is None else f"{r['val_loss']:.4f}"
        print(f"{label}: own val loss {loss}, {r['tokens']:,} tokens, {r['train_seconds']:.1f} s of training")
    if not found["same_val_protocol"]:
        print("the runs' own val losses have different protocols: not compared")
    print(f"{'':<28} {'A':>9} {'B':>9} {'B - A':>9}")
    for row in found["rows"]:
        print(describe(row))
    if not any(r["unit"] == "nats per token" and "difference" in r for r in found["rows"]):
        print("no interval for the val loss: run `python -m eval val` on both runs")
    if not any(r["name"].startswith("HellaSwag") for r in found["rows"]):
        print("no HellaSwag in both runs: run `python -m eval hellaswag` on both")
    picture = args.picture or args.b / f"compare-{args.a.name}.png"
    print("picture " + " ".join(str(p) for p in draw(args.a, args.b, found["rows"], picture)))
    if args.save:
        common.write_json(args.save, found)
    return 0
