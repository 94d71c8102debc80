"""How fast HellaSwag is scored, against the loop of build-nanogpt: one example (four rows) per forward."""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch.nn import functional as F

from data.tokenizer import gpt2_encoding
from eval import common, hellaswag
from eval.models import open_model
from eval.scoring import Request, Scores, arithmetic, score_exactly, score_groups
from train_gpt2 import GPT, UserError


@torch.inference_mode()
def one_example(net: GPT, requests: tuple[Request, ...]) -> list[float]:
    """Summed nats of each row, from one forward that makes all logits (build-nanogpt, hellaswag.py)."""
    device = next(net.parameters()).device
    rows = torch.zeros(len(requests), max(len(r.tokens) for r in requests), dtype=torch.int64)
    mask = torch.zeros_like(rows)
    for i, (tokens, scored) in enumerate(requests):
        rows[i, : len(tokens)] = torch.tensor(tokens)
        mask[i, len(tokens) - scored : len(tokens)] = 1
    rows, mask = rows.to(device), mask.to(device)
    logits_BTV = net.logits(rows[:, :-1])
    nll_BT = F.cross_entropy(logits_BTV.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(len(rows), -1)
    return (nll_BT.double() * mask[:, 1:]).sum(1).tolist()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument("--limit", type=common.positive, metavar="N", help="examples (default: all on a GPU, 200)")
    parser.add_argument("--loop", type=common.positive, metavar="N", default=200, help="examples for the loop")
    parser.add_argument("--scoring", default="llmc", choices=tuple(hellaswag.RENDER))
    parser.add_argument("--save", type=common.writable_file, metavar="FILE", help="the numbers as JSON")


def run(args: argparse.Namespace) -> int:
    device = common.pick_device(args.device)
    model = open_model(args.model, device)
    net = model.net
    on_gpu = device.type == "cuda"
    rows = hellaswag.load_rows(args.limit or (None if on_gpu else 200))
    examples = hellaswag.RENDER[args.scoring](rows, gpt2_encoding())
    groups = [e.requests for e in examples]
    if net.cfg.seq_len < max(len(r.tokens) for g in groups for r in g):
        raise UserError(f"the loop cuts no rows: the model's context of {net.cfg.seq_len} tokens is too short for it")
    exact = on_gpu and args.dtype == "auto"
    dtype = ("bf16" if on_gpu else "fp32") if args.dtype == "auto" else args.dtype

    def batched() -> Scores:
        if exact:
            return score_exactly(net, groups, lambda s: hellaswag.margin(examples, s, args.scoring))
        return score_groups(net, groups, dtype)

    loop_groups = groups[: args.loop]
    with arithmetic(net, dtype):
        for group in loop_groups[:5]:  # first calls allocate and choose kernels
            one_example(net, group)
        synchronize(device)
        started = time.perf_counter()
        loop_nll = np.array([one_example(net, group) for group in loop_groups])
        synchronize(device)
        loop_rate = len(loop_groups) / (time.perf_counter() - started)
    score_groups(net, groups[:64], dtype)
    started = time.perf_counter()
    scores = batched()
    synchronize(device)
    seconds = time.perf_counter() - started
    rate = len(groups) / seconds
    n = len(loop_groups)
    part = Scores(loop_nll, scores.greedy[:n], scores.scored[:n], 0)
    ours = hellaswag.choices(examples, scores, args.scoring)
    theirs = hellaswag.choices(examples[:n], part, args.scoring)
    agree = {metric: int((ours[metric][:n] == theirs[metric]).sum()) for metric in ours}
    how = "bf16, near ties again in fp32" if exact else dtype
    print(f"{common.device_name(device)}, HellaSwag {args.scoring}, {model.config.recipe}")
    print(f"one example per forward  {loop_rate:8.1f} examples/s  ({n} examples, {dtype})")
    print(f"batched                  {rate:8.1f} examples/s  ({len(groups):,} in {seconds:.2f} s, {how})")
    print(f"ratio                    {rate / loop_rate:8.1f}")
    print(f"equal choices            {', '.join(f'{m} {k} of {n}' for m, k in agree.items())}")
    if args.save:
        numbers = {
            "device": common.device_name(device),
            "scoring": args.scoring,
            "loop_examples_per_second": loop_rate,
            "loop_examples": n,
            "loop_dtype": dtype,
            "batched_examples_per_second": rate,
            "batched_examples": len(groups),
            "batched_seconds": seconds,
            "batched_dtype": how,
            "scored_again_fp32": scores.retried,
            "bf16_largest_error": scores.bf16_error,
            "ratio": rate / loop_rate,
            "equal_choices": agree,
            "model": model.describe(),
        }
        common.write_json(args.save, numbers)
    return 0
