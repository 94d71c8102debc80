"""LAMBADA: the last word of a passage, which people guess only from the whole passage. A second cheap signal.

HellaSwag is near chance at 124M (25% is guessing, 30% is GPT-2); the loss on LAMBADA's last word falls from
the first steps of training on, and its accuracy from a few per cent. The text is OpenAI's version with each
line break replaced by a space, so the numbers are close to, but not, those that lm-eval reports for
lambada_openai.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

import tiktoken

from data.tokenizer import gpt2_encoding
from eval import common, files, stats
from eval.hellaswag import keep_result
from eval.models import Model, open_model
from eval.scoring import Request, score_groups
from train_gpt2 import UserError

EXAMPLES = 5_153
DEFINITION = "OpenAI's LAMBADA, line breaks as spaces; acc: each token of ' '+word is the model's first choice"


def render(rows: Sequence[dict[str, str]], encoding: tiktoken.Encoding) -> list[Request]:
    """encode(context + " " + word), of which all after the length of encode(context) is scored (as lm-
    eval does).
    """
    contexts = encoding.encode_ordinary_batch([row["context"] for row in rows])
    wholes = encoding.encode_ordinary_batch([row["context"] + " " + row["word"] for row in rows])
    return [Request(whole, len(whole) - len(context)) for whole, context in zip(wholes, contexts)]


def evaluate(model: Model, rows: Sequence[dict[str, str]], dtype: str = "auto") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, one object per passage). dtype "auto" is float32: half a million tokens cost seconds on a
    GPU.
    """
    requests = render(rows, gpt2_encoding())
    dtype = "fp32" if dtype == "auto" else dtype
    started = time.perf_counter()
    groups = [(r,) for r in requests]
    scores = score_groups(model.net, groups, dtype, greedy=True, progress=common.progress("LAMBADA"))
    seconds = time.perf_counter() - started
    nll, right = scores.nll[:, 0], scores.greedy[:, 0]
    accuracy, loss = stats.accuracy(right), stats.mean(nll)
    summary = {
        "task": "lambada",
        "definition": DEFINITION,
        "examples": len(rows),
        "subset": len(rows) < EXAMPLES,
        "acc": accuracy.value,
        "acc_stderr": accuracy.se,
        "acc_ci95": [accuracy.low, accuracy.high],
        "nats_per_word": loss.value,
        "nats_per_word_stderr": loss.se if math.isfinite(loss.se) else None,
        "perplexity": math.exp(loss.value),
        "truncated_rows": scores.truncated,
        "dtype": dtype,
        "score_seconds": seconds,
        "examples_per_second": len(rows) / seconds,
        "ranks": common.world()[1],
        "device": common.device_name(model.device),
        "data_sha256": files.LAMBADA.sha256,
        "model": model.describe(),
    }
    table = [
        {"index": i, "nll": float(nll[i]), "tokens": int(scores.scored[i, 0]), "right": bool(right[i])} for i in range(len(rows))
    ]
    return summary, table


def summary_lines(summary: dict[str, Any]) -> list[str]:
    count = summary["examples"]
    which = f"the FIRST {count:,} of {EXAMPLES:,} passages: a subset" if summary["subset"] else f"all {count:,}"
    noise = summary["nats_per_word_stderr"]
    return [
        f"LAMBADA (line breaks as spaces), {which}, {summary['dtype']}",
        f"  acc       {100 * summary['acc']:.2f}% +- {100 * summary['acc_stderr']:.2f}",
        f"  last word {summary['nats_per_word']:.4f} nats" + (f" +- {noise:.4f}" if noise is not None else ""),
        f"  {summary['score_seconds']:.1f} s on {summary['ranks']} x {summary['device']}",
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument("--limit", type=common.positive, metavar="N", help="only the first N passages: a subset")
    parser.add_argument("--save", type=common.writable_file, metavar="FILE", help="one JSON object per passage")


def run(args: argparse.Namespace) -> int:
    device = common.pick_device(args.device)
    rows = files.json_lines(files.obtain(files.LAMBADA))
    if args.limit is not None and args.limit > len(rows):
        raise UserError(f"--limit {args.limit}: the file has {len(rows):,} passages")
    model = open_model(args.model, device)
    with common.ranks(device):
        summary, table = evaluate(model, rows[: args.limit], args.dtype)
        common.say(*summary_lines(summary))
        if common.is_main():
            if args.save:
                common.write_lines(args.save, table)
            if model.run_dir:
                keep_result(model.run_dir, "lambada", summary, table)
    return 0
