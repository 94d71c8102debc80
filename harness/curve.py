"""Loss curves of one or more runs, as PNG and SVG."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.common import UserError, human_count, run_directory


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("curve", help="draw the loss curves of runs")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, or its name under runs/")
    parser.add_argument("--out", type=Path, help="path without suffix; default: loss in the first run directory")


def run(args: argparse.Namespace) -> int:
    run_dirs = [run_directory(name) for name in args.runs]
    for path in draw(run_dirs, args.out or run_dirs[0] / "loss"):
        print(path)
    return 0


def draw(run_dirs: Sequence[Path], stem: Path, target: float | None = None) -> tuple[Path, Path]:
    """Draw train (thin) and validation (dots) loss against tokens to `stem`.png and `stem`.svg.

    The loss axis is logarithmic: the last hundredths, which decide, stay visible beside the first steps.
    """
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    from train_gpt2 import read_metrics

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for i, run_dir in enumerate(run_dirs):
        color = f"C{i}"
        metrics = read_metrics(run_dir)
        label = run_dir.resolve().name
        train, val = metrics["train"], metrics["val"]
        if train:
            axes.plot([r["tokens"] for r in train], [r["loss"] for r in train], color=color, lw=0.8, alpha=0.5)
        if val:
            tokens, losses = [r["tokens"] for r in val], [r["val_loss"] for r in val]
            axes.plot(tokens, losses, "o-", color=color, ms=4, lw=1.4, label=f"{label}: val {losses[-1]:.4f}")
            axes.annotate(
                f"{losses[-1]:.3f}",
                (tokens[-1], losses[-1]),
                textcoords="offset points",
                xytext=(0, 7),
                ha="right",
                color=color,
                fontsize=9,
            )
    if target is not None:
        axes.axhline(target, color="0.4", ls="--", lw=1, label=f"target {target:.4g}")
    axes.set_yscale("log")
    # A text that repeats itself gives single steps of very low loss: the axis follows the other 99 in 100.
    shown = [y for line in axes.get_lines() for y in np.asarray(line.get_ydata(), dtype=float) if np.isfinite(y)]
    if shown:
        axes.set_ylim(0.97 * float(np.percentile(shown, 1)), 1.03 * max(shown))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: human_count(value)))
    axes.set(xlabel="training tokens", ylabel="loss (nats per token)", title="train (thin) and validation (dots)")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    png, svg = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".svg")
    try:
        figure.savefig(png, dpi=150)
        figure.savefig(svg)
    except OSError as error:
        raise UserError(f"{error.filename or png} cannot be written: {error.strerror}") from None
    return png, svg
