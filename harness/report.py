"""One self-contained HTML page, and a Markdown summary, about one or more runs.

    python -m harness report RUN... [--baseline NAME] [--open]

The page needs no network and no script: curves are inline SVG, drawn here from binned rows, so that ten runs
of 20,000 steps stay a small file. Every chart is also there as a table.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import re
import shlex
import sys
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.common import UserError, human_count, read_json, run_directory, without_flags

BINS = 400  # points of a curve; more than a page shows, few enough for ten runs in a small file
TABLE_ROWS = 12
CUT = 0.1  # share of a curve, at its start, that may be above a loss chart
COLORS = 10
DASHES = ("", "8 4", "2 3")  # told apart without colour too, and beyond ten runs
HELLASWAG_SCALE = (0.15, 0.45)  # accuracies drawn; GPT-2 124M is at 0.30, chance at 0.25
PROMPTS = ("The state of the union is", "")
SAMPLE_TOKENS = 80

Array = np.ndarray
Format = Callable[[float, int], str]  # value, significant digits


@dataclass(frozen=True)
class Run:
    """A run directory in memory."""

    path: Path
    config: dict[str, Any]
    env: dict[str, Any]
    result: dict[str, Any]  # empty while the run is still going
    train: list[dict[str, Any]]
    val: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def column(self, kind: str, key: str) -> Array:
        """One column of the train or val rows as float64, null as nan."""
        rows = self.train if kind == "train" else self.val
        return np.array([math.nan if row.get(key) is None else row[key] for row in rows], dtype=np.float64)


@dataclass(frozen=True)
class Series:
    """One curve: x ascending, y the same length; `index` is its run's, which fixes colour and dash."""

    index: int
    name: str
    x: Array
    y: Array


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("report", help="one HTML page and a Markdown summary about runs")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, or its name under runs/")
    parser.add_argument("--baseline", metavar="NAME", help="draw this baseline's band behind the val curves")
    parser.add_argument("--out", type=Path, help="HTML file (default: report.html in the first run directory)")
    parser.add_argument("--samples", type=int, help="texts to generate per run (default: 2 for one run, else none)")
    parser.add_argument("--open", action="store_true", help="show it in the browser")


def run(args: argparse.Namespace) -> int:
    runs = [load(run_directory(name)) for name in args.runs]
    baseline = None
    if args.baseline:
        from harness.baseline import load as load_baseline

        baseline = load_baseline(args.baseline)
    out: Path = args.out or runs[0].path / "report.html"
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is no folder: create it, or choose another --out")
    samples = args.samples if args.samples is not None else 2 if len(runs) == 1 else 0
    content = gather(runs, baseline, samples)
    for path, template in ((out, "report.html.jinja"), (out.with_suffix(".md"), "report.md.jinja")):
        path.write_text(render(template, content))
        print(path)
    log_to_wandb(runs, out)
    if args.open:
        webbrowser.open(out.resolve().as_uri())
    return 0


def load(run_dir: Path) -> Run:
    from train_gpt2 import read_metrics

    metrics = read_metrics(run_dir)
    if not metrics["train"] and not metrics["val"]:
        raise UserError(f"{run_dir}/metrics.jsonl holds no steps yet: nothing to report")
    env, result = ({} if not (run_dir / name).exists() else read_json(run_dir / name) for name in ("env.json", "result.json"))
    return Run(run_dir, read_json(run_dir / "config.json"), env, result, metrics["train"], metrics["val"])


def render(template: str, content: dict[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=template.endswith(".html.jinja"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(content)


# --------------------------------------------------------------------------------------------- content


def gather(runs: Sequence[Run], baseline: dict[str, Any] | None, samples: int) -> dict[str, Any]:
    """Everything that the templates show."""
    names = ", ".join(run.name for run in runs)
    recipes = sorted({run.config["recipe"] for run in runs})
    return {
        "title": f"{names}" if len(runs) == 1 else f"{len(runs)} runs of {', '.join(recipes)}",
        "subtitle": subtitle(runs),
        "figures": headline(runs[0]) if len(runs) == 1 else [],
        "run_table": run_table(runs),
        "baseline": describe_baseline(baseline, runs),
        "groups": chart_groups(runs, baseline),
        "runs": [describe_run(run, i, samples) for i, run in enumerate(runs)],
        "ledger": read_ledger(),
    }


def subtitle(runs: Sequence[Run]) -> str:
    run, when = runs[0], datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    device = run.result.get("device") or (run.env.get("gpus") or ["CPU"])[0]
    count = run.env.get("world_size", 1)
    return f"recipe {run.config['recipe']} on {count} x {device}; reported {when}"


def headline(run: Run) -> list[dict[str, str]]:
    """The figures that a single run is asked for first. HellaSwag stands apart, further down."""
    result, config = run.result, run.config["config"]
    if not result:
        last = run.train[-1] if run.train else run.val[-1]
        return [
            {
                "name": "still running",
                "value": f"step {last['step']:,}",
                "note": f"of {config['max_steps']:,}",
            }
        ]
    protocol = result["val_protocol"]
    figures = [
        (
            "val loss",
            number(result["val_loss"], ".4f"),
            f"nats a token over {human_count(protocol['tokens'])} tokens",
        ),
        (
            "trained",
            human_count(result["tokens"]),
            f"tokens in {result['step']:,} steps, {result['exit_reason']}",
        ),
        (
            "training time",
            duration(result["train_seconds"]),
            f"{duration(result['total_seconds'])} with all else",
        ),
        ("throughput", number(result["tokens_per_s"], ",.0f"), "tokens/s, median of steady steps"),
        (
            "MFU",
            percent(result["mfu"]),
            "of the dense 16-bit peak" if result["mfu"] is not None else "peak unknown",
        ),
        ("seed", str(result["seed"]), f"{human_count(result['params'])} parameters"),
    ]
    return [{"name": name, "value": value, "note": note} for name, value, note in figures]


def run_table(runs: Sequence[Run]) -> dict[str, Any]:
    names = ["run", "val loss", "seed", "tokens", "steps", "train s", "tokens/s", "MFU", "best val"]
    names += ["recipe", "state"]
    rows = []
    for run in runs:
        r, last = run.result, (run.train or run.val)[-1]
        rows.append(
            [
                run.name,
                number(r.get("val_loss"), ".4f"),
                str(run.config["config"]["seed"]),
                human_count(r.get("tokens", last["tokens"])),
                f"{r.get('step', last['step']):,}",
                number(r.get("train_seconds"), ",.1f"),
                number(r.get("tokens_per_s"), ",.0f"),
                percent(r.get("mfu")),
                number(r.get("best_val_loss"), ".4f"),
                run.config["recipe"],
                r.get("exit_reason", "unfinished"),
            ]
        )
    return {"names": names, "rows": rows}


def describe_run(run: Run, index: int, samples: int) -> dict[str, Any]:
    config, profile = run.config["config"], read_profile(run)
    return {
        "name": run.name,
        "path": str(run.path),
        **style(index),
        "time_split": time_split(run),
        **step_split(profile),
        "memory": describe_memory(run, profile),
        "hellaswag": [describe_hellaswag(score) for _, score in hellaswag_scores(run)],
        "samples": generated_text(run, samples) if samples else [],
        "command": command(run),
        "environment": [(k, shown(v)) for k, v in run.env.items() if k not in ("schema", "argv")],
        "config": [(k, shown(v)) for k, v in config.items()],
    }


def command(run: Run) -> str:
    """What to type to repeat the run from its start, into a folder of its own."""
    argv = without_flags(run.env.get("argv") or [run.config["recipe"]], "--resume", "--run-dir")
    ranks = int(run.env.get("world_size", 1))
    launcher = f"torchrun --standalone --nproc_per_node={ranks}" if ranks > 1 else "python"
    return f"{launcher} train_gpt2.py {shlex.join(argv)}"


def bars(parts: Sequence[tuple[str, float]], text: Callable[[float], str]) -> list[dict[str, Any]]:
    """Rows of a bar table; shares are of the largest part."""
    largest = max((value for _, value in parts), default=0)
    if not largest > 0:
        return []
    return [{"name": name, "text": text(value), "share": round(100 * value / largest, 2)} for name, value in parts]


def time_split(run: Run) -> list[dict[str, Any]]:
    """Wall-clock seconds of the whole process by what they went to."""
    r = run.result
    if not r:
        return []
    known = {
        "training": r.get("train_seconds"),
        "validation": r.get("val_seconds"),
        "compilation and warm-up": r.get("compile_seconds"),
        "checkpoint stalls": r.get("checkpoint_stall_seconds"),
    }
    parts = [(name, float(value)) for name, value in known.items() if value is not None]
    rest = float(r.get("total_seconds") or 0) - sum(value for _, value in parts)
    return bars([*parts, ("everything else", max(0.0, rest))], duration)


def step_split(profile: dict[str, Any] | None) -> dict[str, Any]:
    """The split of one steady step as `python -m harness profile` measured it, and what binds it."""
    if profile is None:
        return {"step_split": [], "limit": ""}
    parts = [(name.replace("_", " "), float(ms)) for name, ms in profile["parts_ms"].items()]
    return {"step_split": bars(parts, lambda ms: f"{ms:.2f} ms"), "limit": profile["sentence"]}


def read_profile(run: Run) -> dict[str, Any] | None:
    """profile.json in the run directory, if it was put there (`harness profile --out RUN`)."""
    path = run.path / "profile.json"
    return read_json(path) if path.exists() else None


def describe_memory(run: Run, profile: dict[str, Any] | None) -> dict[str, str]:
    """Peak of one device, and what it consists of: measured by a profile, else what the parameters take."""
    peak = run.result.get("peak_mem_bytes") or max((row.get("peak_mem_bytes") or 0 for row in run.train), default=0)
    params, config = run.result.get("params"), run.config["config"]
    parts = [f"micro-batch {config['micro_batch']} x {config['seq_len']} tokens"]
    if profile is not None:
        parts += [f"{name} {size / 1e9:.2f} GB" for name, size in profile["memory_bytes"].items()]
    elif params:
        parts += [f"{human_count(params)} parameters: {4 * params / 1e9:.2f} GB of fp32 weights, as much of gradients"]
    return {"peak": f"{peak / 1e9:.2f} GB" if peak else "not measured on a CPU", "text": "; ".join(parts)}


def hellaswag_scores(run: Run) -> list[tuple[Path, dict[str, Any]]]:
    """Saved scores of the weights that the run has now; those of earlier weights are left out."""
    weights = run.result.get("weights_sha256")
    scores = [(path, read_json(path)) for path in sorted(run.path.glob("hellaswag-*.json"))]
    return [(path, score) for path, score in scores if score.get("model", {}).get("weights_sha256", weights) == weights]


def describe_hellaswag(score: dict[str, Any]) -> dict[str, Any]:
    low_end, high_end = HELLASWAG_SCALE

    def at(value: float) -> float:
        return round(100 * min(1.0, max(0.0, (value - low_end) / (high_end - low_end))), 2)

    low, high = score["acc_norm_ci95"]
    return {
        "scoring": score["scoring"],
        "acc": percent(score["acc"], 2),
        "acc_norm": percent(score["acc_norm"], 2),
        "low": percent(low, 2),
        "high": percent(high, 2),
        "at": at(score["acc_norm"]),
        "low_at": at(low),
        "width": round(at(high) - at(low), 2),
        "chance_at": at(0.25),
        "which": (
            f"a subset, the first {score['examples']:,} of 10,042 examples"
            if score["subset"]
            else f"all {score['examples']:,} examples"
        ),
    }


def generated_text(run: Run, count: int) -> list[dict[str, str]]:
    """`count` texts by the trained model, kept in samples.json for as long as the weights stay the same."""
    if not run.result.get("weights"):
        return []
    path, weights = run.path / "samples.json", run.result.get("weights_sha256")
    if path.exists():
        kept = read_json(path)
        if kept["weights_sha256"] == weights and len(kept["samples"]) >= count:
            return list(kept["samples"][:count])
    from data.tokenizer import gpt2_encoding
    from eval.sample import generate
    from train_gpt2 import EOT, load_run

    encoding = gpt2_encoding()
    net, _ = load_run(run.path)
    samples = []
    for i in range(count):
        prompt = PROMPTS[i % len(PROMPTS)]
        context = [EOT, *encoding.encode_ordinary(prompt)]
        tokens = generate(net.float(), context, SAMPLE_TOKENS, temperature=0.8, top_k=50, seed=i + 1)
        text = re.sub(r"\n{3,}", "\n\n", encoding.decode(list(tokens))).rstrip()
        samples.append({"prompt": prompt, "text": text})
    path.write_text(json.dumps({"schema": 1, "weights_sha256": weights, "samples": samples}, indent=1) + "\n")
    return samples


def describe_baseline(baseline: dict[str, Any] | None, runs: Sequence[Run]) -> dict[str, str] | None:
    if baseline is None:
        return None
    name = baseline["name"]
    if baseline["kind"] == "published":
        text = f"Baseline {name}: {baseline['value']} ({baseline['source']}), a figure without a curve."
        return {"text": text, "legend": f"baseline {name}"}
    text = (
        f"Baseline {name}: val loss {baseline['mean']:.4f}, deviation {baseline['std']:.4f} over "
        f"{baseline['n']} seeds. "
        "The band is their lowest to highest, the dashed line their mean. Whether a run is worse is "
        "a question for "
        "python -m harness regress, not for the eye."
    )
    facts = baseline.get("facts", {})
    unlike = [run.name for run in runs if run.result and facts.get("data.fingerprint") != run.result["data"]["fingerprint"]]
    if unlike:
        text += f" {', '.join(unlike)} read other data: do not compare."
    return {"text": text, "legend": f"baseline {name}, {baseline['n']} seeds"}


def read_ledger() -> dict[str, Any] | None:
    """The decisions of the promotion ledger as a table, where there are any."""
    from harness import ledger

    decisions = [record for record in ledger.read() if record["kind"] == "decision"]
    names = ["id", "date", "candidate", "verdict", "reason"]
    rows = [[r["id"], r["date"][:10], r["candidate"], r["verdict"], r["reason"]] for r in decisions]
    return {"names": names, "rows": rows} if rows else None


# ---------------------------------------------------------------------------------------------- charts


@dataclass(frozen=True)
class Plot:
    """What a chart shows and how: which rows and column, how bins are reduced, and the look of its axis."""

    name: str
    kind: str
    key: str
    text: Format
    pick: str = "mean"
    note: str = ""
    log: bool = False
    zero: bool = False  # the axis starts at 0
    cut: bool = False  # the first steps may leave the chart at its top
    band: bool = False  # the baseline's band is drawn
    start: float = 0.0  # only what comes after this share of each curve, on an axis that starts there


def plain(value: float, digits: int) -> str:
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


PLOTS = {
    "Loss": (
        Plot("Validation loss", "val", "val_loss", plain, cut=True, band=True),
        Plot("Validation loss at the end", "val", "val_loss", plain, band=True, start=0.6),
        Plot("Training loss", "train", "loss", plain, cut=True),
    ),
    "Optimization": (
        Plot("Learning rate", "train", "lr", plain, "last", zero=True),
        Plot("Gradient norm", "train", "grad_norm", plain, "max", "largest in each bin, logarithmic", log=True),
    ),
    "Speed": (
        Plot("Tokens per second", "train", "tokens_per_s", human_count, "median", zero=True),
        Plot("MFU", "train", "mfu", lambda v, digits: plain(100 * v, digits) + "%", "median", zero=True),
        Plot("Step time", "train", "step_ms", lambda v, digits: plain(v, digits) + " ms", "median", zero=True),
    ),
}


def chart_groups(runs: Sequence[Run], baseline: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The charts in reading order, each by tokens and by training time; those without data are left out."""
    groups = []
    for name, plots in PLOTS.items():
        charts = []
        for plot in plots:
            by_tokens = collect(runs, plot, "tokens")
            if by_tokens:
                by_time = collect(runs, plot, "train_s")
                charts.append(
                    {
                        "tokens": chart(plot, by_tokens, human_count, baseline if plot.band else None),
                        "time": chart(plot, by_time, seconds, None),
                    }
                )
        groups.append({"name": name, "charts": charts})
    return groups


def collect(runs: Sequence[Run], plot: Plot, axis: str) -> list[Series]:
    """The plot's curve of every run that has one, binned."""
    series = []
    for i, run in enumerate(runs):
        x, y = run.column(plot.kind, axis), run.column(plot.kind, plot.key)
        keep = np.isfinite(x) & np.isfinite(y)
        if plot.start and keep.any():  # the same rows on either axis
            tokens = run.column(plot.kind, "tokens")
            keep &= tokens >= plot.start * tokens[-1]
        if keep.sum() > 2 * bool(plot.start):
            series.append(Series(i, run.name, *bin_rows(x[keep], y[keep], plot.pick)))
    return series


def bin_rows(x: Array, y: Array, pick: str) -> tuple[Array, Array]:
    """At most BINS points: rows are grouped by their order, and each group is shown at its last x."""
    if len(x) <= BINS:
        return x, y
    edges = np.linspace(0, len(x), BINS + 1).astype(int)
    reduce: dict[str, Callable[[Array], float]] = {
        "mean": lambda part: float(part.mean()),
        "max": lambda part: float(part.max()),
        "median": lambda part: float(np.median(part)),
        "last": lambda part: float(part[-1]),
    }
    return x[edges[1:] - 1], np.array([reduce[pick](y[a:b]) for a, b in itertools.pairwise(edges)])


def chart(plot: Plot, series: Sequence[Series], x_text: Format, baseline: dict[str, Any] | None) -> dict[str, Any]:
    """One chart as paths in a 1000 x 1000 box, ticks in percent, a table and a sentence that describes it."""
    x_end = max(float(s.x[-1]) for s in series) or 1.0
    left = min(float(s.x[0]) for s in series) if plot.start else 0.0
    band = baseline_band(baseline, left)
    low = min(float(s.y.min()) for s in series)
    high = top_of_chart = max(float(s.y.max()) for s in series)
    note = plot.note
    if plot.cut:
        later = np.concatenate([s.y[s.x >= CUT * x_end] for s in series])
        if len(later) >= 5:
            top_of_chart = float(later.max())
        if high > 1.1 * top_of_chart:
            note = f"(the first steps, from {plot.text(high, 4)}, begin above the chart)"
        else:
            top_of_chart = high
    if band:
        low, top_of_chart = min(low, float(band[1].min())), max(top_of_chart, float(band[2].max()) if plot.start else 0)
    log = plot.log and low > 0
    scale: Callable[[Any], Any] = np.log10 if log else np.asarray
    bottom, top = float(scale(low)), float(scale(top_of_chart))
    pad = 0.06 * (top - bottom) or 0.1 * abs(top) or 1.0
    bottom, top = (0.0 if plot.zero else bottom - pad), top + pad

    def path(x: Array, y: Array, start: str = "M") -> str:
        px, py = 1000 * (x - left) / (x_end - left), 1000 * (top - scale(y)) / (top - bottom)
        return start + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(px, py))

    y_values = log_ticks(10**bottom, 10**top) if log else ticks(bottom, top)
    x_values = ticks(left, x_end)
    return {
        "name": plot.name,
        "note": note,
        "curves": [{"name": s.name, "path": path(s.x, s.y), **style(s.index)} for s in series],
        "band": f"{path(band[0], band[2])}{path(band[0][::-1], band[1][::-1], 'L')}Z" if band else "",
        "mean": path(band[0], band[3]) if band else "",
        "y_ticks": [
            {"at": round(100 * (top - float(scale(value))) / (top - bottom), 2), "text": text}
            for value, text in zip(y_values, distinct(y_values, plot.text))
        ],
        "x_ticks": [
            {"at": round(100 * (value - left) / (x_end - left), 2), "text": text, "extra": i % 2 == 1}
            for i, (value, text) in enumerate(zip(x_values, distinct(x_values, x_text)))
        ],
        "table": chart_table(series, x_text, plot.text),
        "summary": f"{plot.name}: "
        + "; ".join(f"{s.name} from {plot.text(s.y[0], 4)} to {plot.text(s.y[-1], 4)}" for s in series),
    }


def style(index: int) -> dict[str, Any]:
    """Colour and dash of a run's curves."""
    return {"color": index % COLORS, "dash": DASHES[index // COLORS % len(DASHES)]}


def distinct(values: Sequence[float], text: Format) -> list[str]:
    """Tick labels with as few digits as keep them apart."""
    labels: list[str] = []
    for digits in range(3, 9):
        labels = [text(value, digits) for value in values]
        if len(set(labels)) == len(labels):
            break
    return labels


def baseline_band(baseline: dict[str, Any] | None, left: float = 0.0) -> tuple[Array, Array, Array, Array] | None:
    """(tokens, lowest, highest, mean) of a baseline's val curves over its seeds, from `left` tokens on; None where
    it has no curves."""
    if baseline is None or baseline["kind"] != "runs":
        return None
    curves = [[point for point in run["curve"] if point["tokens"] >= left] for run in baseline["runs"]]
    tokens = np.array([point["tokens"] for point in curves[0]], dtype=np.float64)
    losses = np.array([[point["val_loss"] for point in curve] for curve in curves])
    return (tokens, losses.min(axis=0), losses.max(axis=0), losses.mean(axis=0)) if len(tokens) else None


def chart_table(series: Sequence[Series], x_text: Format, y_text: Format) -> dict[str, Any]:
    """At most TABLE_ROWS positions; each run's value is the last one at or before the position."""
    longest = max(series, key=lambda s: len(s.x)).x
    positions = longest[np.unique(np.linspace(0, len(longest) - 1, TABLE_ROWS).round().astype(int))]
    rows = []
    for position in positions:
        row = [x_text(float(position), 4)]
        for s in series:
            at = int(np.searchsorted(s.x, position, side="right")) - 1
            row.append(y_text(float(s.y[at]), 5) if at >= 0 else "")
        rows.append(row)
    return {"names": [s.name for s in series], "rows": rows}


def ticks(low: float, high: float) -> list[float]:
    """About five round positions inside [low, high]."""
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [float(t) for t in found if low <= t <= high]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 of every power of ten inside [low, high]; plain ones where that gives fewer than two."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    if len(found) > 7:
        found = [t for t in found if math.isclose(math.log10(t) % 1, 0, abs_tol=1e-9)]
    return found if len(found) >= 2 else ticks(low, high)


# ------------------------------------------------------------------------------------------------ text


def number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def seconds(value: float, digits: int = 3) -> str:
    """Training time on an axis."""
    if value < 600:
        return f"{value:.{digits}g} s"
    return f"{value / 60:.{digits}g} min" if value < 7200 else f"{value / 3600:.{digits}g} h"


def duration(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.2f} h"


def shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "-" if value is None or value == "" else str(value)


# --------------------------------------------------------------------------------------- Weights & Biases


def log_to_wandb(runs: Sequence[Run], page: Path) -> None:
    """Adds the page and the evaluations to the W&B run that training opened; a failure is said and "
    "forgotten."""
    for run in runs:
        mode = run.config["config"].get("wandb", "off")
        if mode == "off":
            continue
        try:
            attach_to_wandb(run, page, mode)
        except Exception as error:  # whatever the client does, the report is written
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"wandb: the report was not logged ({reason})", file=sys.stderr)


def attach_to_wandb(run: Run, page: Path, mode: Any) -> None:
    import wandb

    logged = sorted((run.path / "wandb").glob("*run-*-*"))
    if not logged:
        return
    session = wandb.init(
        project="gpt2",
        id=logged[-1].name.rsplit("-", 1)[1],
        resume="allow",
        dir=str(run.path),
        mode=mode,
        settings=wandb.Settings(init_timeout=30, silent=True),
    )
    for path, score in hellaswag_scores(run):
        for key in ("acc", "acc_norm", "acc_norm_stderr"):
            session.summary[f"{path.stem}/{key}"] = score[key]
    # After the last step, or the server would drop it as older than what it has.
    session.log({"report": wandb.Html(page.read_text())}, step=(run.train or run.val)[-1]["step"] + 1)
    session.finish()
