"""HellaSwag in its two public definitions, never compared: they differ by more than most models do.

`llmc` (llm.c, build-nanogpt): the context and " " + ending are encoded apart; acc chooses the ending of
lowest summed loss, acc_norm that of lowest mean loss per token. GPT-2 124M: 0.2955 acc_norm.

`lm-eval` (EleutherAI lm-evaluation-harness): the activity label leads, WikiHow's markup is cleaned away,
context and ending are encoded as one text and cut at the context's length; acc chooses the lowest summed
loss, acc_norm the lowest loss per character of the ending, acc_bytes per UTF-8 byte. GPT-2 124M: 0.3114
acc_norm.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from data.tokenizer import gpt2_encoding
from eval import common, files, stats
from eval.models import Model, open_model
from eval.scoring import Request, Scores, score_exactly, score_groups
from train_gpt2 import COMPUTE_DTYPE, UserError

EXAMPLES = 10_042  # in the official validation file
DEFINITIONS = {
    "llmc": "context and ' '+ending encoded apart; acc: lowest summed loss; acc_norm: lowest mean loss per token",
    "lm-eval": "activity label, cleaned text, encoded as one; acc: lowest summed loss; acc_norm: lowest loss"
    " per character of the ending; acc_bytes: per UTF-8 byte",
}


@dataclass(frozen=True)
class Example:
    """One rendered example: four requests, the right one, and what each definition divides its loss by."""

    index: int  # line of the official file
    ind: int  # the data set's own number
    label: int
    requests: tuple[Request, ...]
    characters: tuple[int, ...]  # of the endings as rendered
    utf8_bytes: tuple[int, ...]


def clean(text: str) -> str:
    """lm-eval's clean-up of WikiHow's markup (its hellaswag task, version 1.0): order and greed of the
    steps matter.
    """
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def render_llmc(rows: Sequence[dict[str, Any]], encoding: tiktoken.Encoding) -> list[Example]:
    """llm.c's rows: encode(ctx) + encode(" " + ending), no leading token."""
    texts = [row["ctx"] for row in rows] + [" " + ending for row in rows for ending in row["endings"]]
    tokens = encoding.encode_ordinary_batch(texts)
    contexts, endings = tokens[: len(rows)], tokens[len(rows) :]
    out = []
    for i, row in enumerate(rows):
        mine = endings[4 * i : 4 * i + 4]
        requests = tuple(Request(contexts[i] + ending, len(ending)) for ending in mine)
        out.append(_example(i, row, requests, row["endings"]))
    return out


def render_lm_eval(rows: Sequence[dict[str, Any]], encoding: tiktoken.Encoding) -> list[Example]:
    """lm-eval's rows: encode(query + " " + ending), of which all after the length of encode(query) is scored.

    A query that ends in white space gives it to the ending, as lm-eval does before it encodes.
    """
    queries, cleaned, texts = [], [], []
    for row in rows:
        query = clean(row["activity_label"] + ": " + row["ctx_a"] + " " + row["ctx_b"].capitalize())
        endings = [clean(ending) for ending in row["endings"]]
        queries.append(query.rstrip())
        cleaned.append(endings)
        texts += [query + " " + ending for ending in endings]
    contexts = encoding.encode_ordinary_batch(queries)
    wholes = encoding.encode_ordinary_batch(texts)
    out = []
    for i, row in enumerate(rows):
        mine = wholes[4 * i : 4 * i + 4]
        requests = tuple(Request(whole, len(whole) - len(contexts[i])) for whole in mine)
        out.append(_example(i, row, requests, cleaned[i]))
    return out


def _example(index: int, row: dict[str, Any], requests: tuple[Request, ...], endings: Sequence[str]) -> Example:
    characters = tuple(len(e) for e in endings)
    utf8_bytes = tuple(len(e.encode()) for e in endings)
    return Example(index, row["ind"], int(row["label"]), requests, characters, utf8_bytes)


RENDER = {"llmc": render_llmc, "lm-eval": render_lm_eval}


def lengths(examples: Sequence[Example], scored_EN: np.ndarray, scoring: str) -> dict[str, np.ndarray]:
    """Per metric, what each summed loss is divided by before the choice, (examples, 4) float64."""
    ones = np.ones(scored_EN.shape)
    if scoring == "llmc":
        return {"acc": ones, "acc_norm": scored_EN.astype(np.float64)}
    return {
        "acc": ones,
        "acc_norm": np.array([e.characters for e in examples], dtype=np.float64),
        "acc_bytes": np.array([e.utf8_bytes for e in examples], dtype=np.float64),
    }


def choices(examples: Sequence[Example], scores: Scores, scoring: str) -> dict[str, np.ndarray]:
    """Chosen ending per metric, (examples,) int; of equal values the first, as in both public codes."""
    by_metric = lengths(examples, scores.scored, scoring)
    return {metric: (scores.nll / divisor).argmin(1) for metric, divisor in by_metric.items()}


def ties(examples: Sequence[Example], scores: Scores, scoring: str) -> dict[str, int]:
    """How many examples have two endings share the lowest value exactly, per metric."""
    out = {}
    for metric, divisor in lengths(examples, scores.scored, scoring).items():
        value = scores.nll / divisor
        out[metric] = int(((value == value.min(1, keepdims=True)).sum(1) > 1).sum())
    return out


def margin(examples: Sequence[Example], scores: Scores, scoring: str) -> np.ndarray:
    """(examples,) float64: the least sum of two losses' errors (nats) that could change any choice.

    With value v = nll / length, ending b overtakes the chosen a once errors e_a and e_b satisfy e_a /
    length_a + e_b / length_b >= v_b - v_a; for errors of equal size e that is 2e >= 2 (v_b - v_a) /
    (1/length_a + 1/length_b).
    """
    rows = np.arange(len(examples))
    least = np.full(len(examples), np.inf)
    for divisor in lengths(examples, scores.scored, scoring).values():
        value, weight = scores.nll / divisor, 1 / divisor
        best = value.argmin(1)
        gap = 2 * (value - value[rows, best, None]) / (weight + weight[rows, best, None])
        gap[rows, best] = np.inf
        least = np.minimum(least, gap.min(1))
    return least


def per_example(examples: Sequence[Example], scores: Scores, scoring: str) -> list[dict[str, Any]]:
    """One JSON object per example, for comparing two models line by line: losses in nats, choices."""
    chosen = choices(examples, scores, scoring)
    out = []
    for i, e in enumerate(examples):
        row: dict[str, Any] = {"index": e.index, "ind": e.ind, "label": e.label}
        row["nll"] = scores.nll[i].tolist()
        row["tokens"] = scores.scored[i].tolist()
        if scoring == "lm-eval":
            row["characters"], row["bytes"] = list(e.characters), list(e.utf8_bytes)
        for metric, choice in chosen.items():
            row[f"choice_{metric}"] = int(choice[i])
        out.append(row)
    return out


def evaluate(
    model: Model, rows: Sequence[dict[str, Any]], scoring: str, dtype: str = "auto"
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Score `rows` of the official file: (summary, one object per example). Every rank gets both.

    dtype "auto" is float32 on a CPU; on a GPU it is bfloat16 with every near tie scored again in float32,
    which gives float32's choices (see scoring.score_exactly).
    """
    started = time.perf_counter()
    examples = RENDER[scoring](rows, gpt2_encoding())
    rendered = time.perf_counter()
    groups = [e.requests for e in examples]
    show = common.progress(f"HellaSwag ({scoring})")
    if dtype == "auto":
        dtype = "bf16, near ties fp32" if model.device.type == "cuda" else "fp32"
    if dtype in COMPUTE_DTYPE:
        scores = score_groups(model.net, groups, dtype, progress=show)
    else:
        scores = score_exactly(model.net, groups, lambda s: margin(examples, s, scoring), progress=show)
    seconds = time.perf_counter() - rendered
    labels = np.array([e.label for e in examples])
    summary: dict[str, Any] = {
        "task": "hellaswag",
        "scoring": scoring,
        "definition": DEFINITIONS[scoring],
        "examples": len(examples),
        "subset": len(examples) < EXAMPLES,
    }
    for metric, chosen in choices(examples, scores, scoring).items():
        estimate = stats.accuracy(chosen == labels)
        summary[metric] = estimate.value
        summary[f"{metric}_stderr"] = estimate.se
        summary[f"{metric}_ci95"] = [estimate.low, estimate.high]
    summary |= {
        "ties": ties(examples, scores, scoring),
        "truncated_rows": scores.truncated,
        "dtype": dtype,
        "scored_again_fp32": scores.retried,
        "bf16_largest_error": scores.bf16_error,
        "tokenize_seconds": rendered - started,
        "score_seconds": seconds,
        "examples_per_second": len(examples) / seconds,
        "ranks": common.world()[1],
        "device": common.device_name(model.device),
        "data_sha256": files.HELLASWAG.sha256,
        "model": model.describe(),
    }
    return summary, per_example(examples, scores, scoring)


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """What a person reads; a subset says so on every line."""
    count = summary["examples"]
    which = f"the FIRST {count:,} of {EXAMPLES:,} examples: a subset" if summary["subset"] else f"all {count:,}"
    lines = [f"HellaSwag, {summary['scoring']} scoring, {which}, {summary['dtype']}"]
    for metric in ("acc", "acc_norm", "acc_bytes"):
        if metric in summary:
            low, high = summary[f"{metric}_ci95"]
            lines.append(
                f"  {metric:<9} {100 * summary[metric]:.2f}% +- {100 * summary[metric + '_stderr']:.2f}"
                f"  (95% {100 * low:.2f} to {100 * high:.2f}; {summary['ties'][metric]} exact ties)"
            )
    lines.append(
        f"  {summary['score_seconds']:.1f} s, {summary['examples_per_second']:.0f} examples/s on"
        f" {summary['ranks']} x {summary['device']}"
    )
    if summary["truncated_rows"]:
        lines.append(f"  {summary['truncated_rows']} rows were longer than the model's context; their start was cut")
    return lines


def load_rows(limit: int | None, file: Path | None = None) -> list[dict[str, Any]]:
    """The first `limit` rows (None: all) of the official file."""
    rows = files.json_lines(files.obtain(files.HELLASWAG, file))
    if limit is not None and limit > len(rows):
        raise UserError(f"--limit {limit}: the file has {len(rows):,} examples")
    return rows[:limit]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument("--scoring", default="llmc", choices=(*RENDER, "both"), help="definition (default: llmc)")
    parser.add_argument("--limit", type=common.positive, metavar="N", help="only the first N examples: a subset")
    parser.add_argument("--file", type=Path, help="the official hellaswag_val.jsonl (default: fetched, cached)")
    parser.add_argument(
        "--save",
        type=common.writable_file,
        metavar="FILE",
        help="one JSON object per example; with --scoring both the definition's name is put before the suffix",
    )


def run(args: argparse.Namespace) -> int:
    device = common.pick_device(args.device)
    rows = load_rows(args.limit, args.file)
    model = open_model(args.model, device)
    with common.ranks(device):
        for scoring in RENDER if args.scoring == "both" else (args.scoring,):
            summary, table = evaluate(model, rows, scoring, args.dtype)
            common.say(*summary_lines(summary))
            if not common.is_main():
                continue
            if args.save:
                both = args.scoring == "both"
                common.write_lines(args.save.with_stem(f"{args.save.stem}-{scoring}") if both else args.save, table)
            if model.run_dir:
                keep_result(model.run_dir, f"hellaswag-{scoring}", summary, table)
    return 0


def keep_result(run_dir: Path, name: str, summary: dict[str, Any], table: Sequence[dict[str, Any]]) -> None:
    """Write NAME.json and NAME.jsonl next to the run, unless a result over more examples of it is there."""
    path = run_dir / f"{name}.json"
    kept = common.read_summary(path)
    if kept and kept["model"]["weights_sha256"] == summary["model"]["weights_sha256"] and kept["examples"] > summary["examples"]:
        common.say(f"  {path} is kept: it covers {kept['examples']:,} examples")
        return
    common.write_lines(run_dir / f"{name}.jsonl", table)
    common.write_json(path, summary)
