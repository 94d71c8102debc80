"""Validation loss by protocol: the run's own number again, or any model on any shards.

A loss means nothing without its protocol: which tokens, how many, how much context each target had, whether
a target sees the documents before its own, which arithmetic. All of it is printed and stored with the
number, and numbers of different protocols are never compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from data.tokenizer import gpt2_encoding
from eval import common, stats
from eval.common import world
from eval.models import Model, open_model
from eval.scoring import arithmetic
from train_gpt2 import EOT, GPT, TokenStream, UserError, find_shards, read_json

BLOCKS = 1024  # losses are kept in so many blocks of consecutive tokens, for paired comparisons of two models
PAD_MULTIPLE = 64


class Segment(NamedTuple):
    """`length` inputs from token `start` on; the last `scored` of their targets count."""

    start: int
    length: int
    scored: int


def windows(tokens: int, seq_len: int, stride: int) -> list[Segment]:
    """Windows of `seq_len` inputs, one every `stride` tokens, that score each of `tokens` targets once.

    stride == seq_len is the usual evaluation: consecutive windows, a target has 1 to seq_len tokens of
    context. With a smaller stride every target after the first window has more than seq_len - stride tokens
    of context, at seq_len / stride times the work.
    """
    out, done, start = [], 0, 0
    while done < tokens:
        end = min(start + seq_len, tokens)
        out.append(Segment(start, end - start, end - done))
        done, start = end, start + stride
    return out


def split_documents(segments: Sequence[Segment], inputs: np.ndarray) -> list[Segment]:
    """Cut each window before every end-of-text token, which starts a document: no target sees another one.

    Positions start again at each cut, which for relative positions (rotary, none) is the document mask
    exactly. The end-of-text token itself is still predicted from the document before it.
    """
    out = []
    starts = np.flatnonzero(inputs == EOT)
    for start, length, scored in segments:
        end = start + length
        inside = starts[np.searchsorted(starts, start, "right") : np.searchsorted(starts, end)]
        edges = [start, *inside.tolist(), end]
        for a, b in pairwise(edges):
            counted = min(b - a, b - (end - scored))
            if counted > 0:
                out.append(Segment(a, b - a, counted))
    return out


@dataclass(frozen=True)
class Losses:
    """Sums over the targets, in float64; equal on all ranks."""

    nll: float  # nats, all targets
    count: int
    text_nll: float  # nats of targets that are text (not end-of-text)
    text_bytes: int  # UTF-8 bytes of those targets
    position_nll: np.ndarray  # (seq_len,) nats of targets with 1, 2, … seq_len tokens of context
    position_count: np.ndarray
    block_nll: np.ndarray  # (blocks,) nats of each block of consecutive targets
    block_count: np.ndarray


def token_bytes() -> np.ndarray:
    """(50257,) bytes of each token's text. From the raw bytes: a decoded part of a character would count
    three.
    """
    encoding = gpt2_encoding()
    return np.array([len(encoding.decode_single_token_bytes(i)) for i in range(EOT)] + [0])


@torch.inference_mode()
def measure(
    net: GPT,
    tokens_N1: np.ndarray,
    seq_len: int,
    stride: int,
    document_mask: bool,
    dtype: str,
    batch_tokens: int = 0,
) -> Losses:
    """Loss of every target of `tokens_N1` (N + 1 tokens: N inputs, and the last target); see `windows`.

    Ranks take batches in turn and meet in one all-reduce at the end.
    """
    device = next(net.parameters()).device
    rank, ranks = world()
    count = len(tokens_N1) - 1
    segments = windows(count, seq_len, stride)
    if document_mask:
        segments = split_documents(segments, tokens_N1[:-1])
    batch_tokens = batch_tokens or (32_768 if device.type == "cuda" else 4_096)
    blocks = min(BLOCKS, count)
    bytes_V = token_bytes()
    position_nll, position_count = np.zeros(seq_len), np.zeros(seq_len)
    block_nll = np.zeros(blocks)
    text_nll, text_bytes = 0.0, 0
    show = common.progress("validation")
    mine = batches(segments, seq_len, batch_tokens)[rank::ranks]
    with arithmetic(net, dtype):
        for done, (length, members) in enumerate(mine, 1):
            inputs = np.zeros((len(members), length), dtype=np.int64)
            targets = np.full((len(members), length), -1, dtype=np.int64)
            for r, s in enumerate(members):
                inputs[r, : s.length] = tokens_N1[s.start : s.start + s.length]
                first = s.length - s.scored
                targets[r, first : s.length] = tokens_N1[s.start + first + 1 : s.start + s.length + 1]
            nll_BT = net.nll(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
            nll = nll_BT.double().cpu().numpy()
            row, position = np.nonzero(targets >= 0)
            value, target = nll[row, position], targets[row, position]
            position_nll += np.bincount(position, value, seq_len)
            position_count += np.bincount(position, minlength=seq_len)
            where = np.array([s.start for s in members])[row] + position
            block_nll += np.bincount(where * blocks // count, value, blocks)
            text = target != EOT
            text_nll += float(value[text].sum())
            text_bytes += int(bytes_V[target].sum())
            show(done, len(mine))
    parts = [position_nll, position_count, block_nll, np.array([text_nll, text_bytes])]
    if ranks > 1:
        shared = torch.from_numpy(np.concatenate(parts)).to(device)
        dist.all_reduce(shared)
        parts = np.split(shared.cpu().numpy(), np.cumsum([len(p) for p in parts])[:-1])
    position_nll, position_count, block_nll, text_part = parts
    block_count = np.bincount(np.arange(count) * blocks // count, minlength=blocks)
    assert position_count.sum() == count
    return Losses(
        float(block_nll.sum()), count, float(text_part[0]), int(text_part[1]), position_nll, position_count,
        block_nll, block_count,
    )  # fmt: skip


def batches(segments: Sequence[Segment], seq_len: int, batch_tokens: int) -> list[tuple[int, list[Segment]]]:
    """Segments of one padded length together, longest first; whole windows are not padded."""
    by_length: dict[int, list[Segment]] = {}
    for s in segments:
        by_length.setdefault(min(seq_len, -(-s.length // PAD_MULTIPLE) * PAD_MULTIPLE), []).append(s)
    out = []
    for length in sorted(by_length, reverse=True):
        rows = max(1, batch_tokens // length)
        group = by_length[length]
        out += [(length, group[i : i + rows]) for i in range(0, len(group), rows)]
    return out


def protocol_line(protocol: dict[str, Any]) -> str:
    return "protocol " + " ".join(f"{k}={v[:12] if k == 'data' else v}" for k, v in protocol.items())


def summarize(losses: Losses, protocol: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one measurement. The standard error treats the blocks as independent draws of text."""
    block_loss = losses.block_nll / losses.block_count
    filled = losses.position_count > 0
    per_position = np.full(len(filled), np.nan)
    per_position[filled] = losses.position_nll[filled] / losses.position_count[filled]
    se = stats.mean(block_loss).se
    return {
        "task": "val",
        "protocol": protocol,
        "nats_per_token": losses.nll / losses.count,
        "stderr_over_text": se if math.isfinite(se) else None,
        "bits_per_byte": losses.text_nll / math.log(2) / losses.text_bytes if losses.text_bytes else None,
        "text_bytes": losses.text_bytes,
        "per_position": [round(v, 6) if math.isfinite(v) else None for v in per_position.tolist()],
        "per_position_count": losses.position_count.astype(int).tolist(),
        "blocks": [round(v, 6) for v in block_loss.tolist()],
    }


def draw_positions(curves: dict[str, Sequence[float | None]], path: Path) -> list[Path]:
    """Loss against tokens of context, as PNG and SVG.

    A model that uses its context falls along the whole axis;
    an off-by-one shows as a near-zero or flat curve from the first position on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for label, values in curves.items():
        y = np.array([math.nan if v is None else v for v in values])
        x = np.arange(1, len(y) + 1)
        # Means over ever longer spans of positions: a single position is noisy, and the axis is logarithmic.
        edges = np.unique(np.geomspace(1, len(y) + 1, 48).astype(int))
        spans = [slice(a - 1, b - 1) for a, b in pairwise(edges) if np.isfinite(y[a - 1 : b - 1]).any()]
        axes.plot([x[s].mean() for s in spans], [np.nanmean(y[s]) for s in spans], marker=".", label=label)
    axes.set(xscale="log", xlabel="tokens of context", ylabel="loss (nats per token)")
    axes.set_title("Validation loss against position")
    axes.grid(alpha=0.3)
    axes.legend()
    return common.save_picture(figure, path)


@dataclass(frozen=True)
class Plan:
    """What will be measured: the tokens and the protocol that names them."""

    tokens_N1: np.ndarray
    protocol: dict[str, Any]
    stride: int
    batch_tokens: int
    own: dict[str, Any] | None  # the run's result.json, where its own number is to be repeated


def make_plan(model: Model, args: argparse.Namespace) -> Plan:
    """The run's own protocol with what the arguments change. Raises UserError for what cannot be measured."""
    cfg = model.config
    result_file = model.path / "result.json"
    result = read_json(result_file) if model.run_dir and result_file.is_file() else None
    folder = args.data or (Path(cfg.data) if model.run_dir else None)
    if folder is None:
        raise UserError("--data DIR is needed: a Hugging Face directory does not say which shards to use")
    seq_len = args.seq_len or cfg.seq_len
    if seq_len > cfg.seq_len:
        raise UserError(f"--seq-len {seq_len}: the model's context is {cfg.seq_len} tokens")
    stride = args.stride or seq_len
    if stride > seq_len:
        raise UserError(f"--stride {stride} is above --seq-len {seq_len}: tokens between windows would be left out")
    stream = TokenStream(find_shards(folder, "val"))
    own_tokens = result["val_protocol"]["tokens"] if result else cfg.val_tokens
    count = args.tokens or own_tokens
    if count + 1 > len(stream):
        most = (len(stream) - 1) // seq_len * seq_len
        raise UserError(f"{folder}: {len(stream):,} val tokens, {count + 1:,} are needed; use --tokens {most}")
    dtype = args.dtype
    if dtype == "auto":
        dtype = cfg.precision if model.run_dir else ("bf16" if model.device.type == "cuda" else "fp32")
    tokens_N1 = stream.slice(0, count + 1)
    protocol = {
        "data": hashlib.sha256(tokens_N1.tobytes()).hexdigest(),
        "tokens": count,
        "seq_len": seq_len,
        # A model without a mask of its own has its windows cut where documents start: other numbers than a mask's.
        "document_mask": cfg.document_mask or ("cut" if args.document_mask else False),
        "dtype": dtype,
    }
    if stride != seq_len:
        protocol["stride"] = stride
    asked = (args.data, args.tokens, args.seq_len, args.stride, protocol["document_mask"] == "cut")
    own = result if result and result["val_loss"] is not None and not any(asked) else None
    if own and own["val_protocol"] != protocol and args.dtype == "auto":
        changed = [k for k in protocol if own["val_protocol"].get(k) != protocol[k]]
        raise UserError(
            f"{folder}: not the val tokens of this run ({', '.join(changed)} differ from result.json);"
            " give --data with the run's own shards, or state a protocol with --tokens and --seq-len"
        )
    # The batch shape of a run whose blocks were not compiled, so that its number can be met to the last bit.
    return Plan(tokens_N1, protocol, stride, cfg.val_batch * cfg.seq_len if model.run_dir else 0, own)


# How far the run's own number may lie from a repetition: other thread counts and, on a GPU, the compiler's
# fused kernels add the same numbers in another order.
SAME = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 2e-3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of *_val_*.bin shards (default: the run's)")
    parser.add_argument("--tokens", type=common.positive, metavar="N", help="the first N targets (default: the run's)")
    parser.add_argument("--seq-len", type=common.positive, metavar="T", help="window length (default: the model's)")
    parser.add_argument("--stride", type=common.positive, metavar="S", help="a window every S tokens (default: T)")
    parser.add_argument("--document-mask", action="store_true", help="no target sees the documents before its own")
    parser.add_argument("--save", type=common.writable_file, metavar="FILE", help="the result as JSON")
    parser.add_argument("--picture", type=common.writable_file, metavar="FILE", help="loss against position")


def run(args: argparse.Namespace) -> int:
    device = common.pick_device(args.device)
    model = open_model(args.model, device)
    plan = make_plan(model, args)
    with common.ranks(device):
        started = time.perf_counter()
        losses = measure(
            model.net, plan.tokens_N1, plan.protocol["seq_len"], plan.stride,
            plan.protocol["document_mask"] == "cut", plan.protocol["dtype"], plan.batch_tokens,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        main = common.is_main()
    if not main:
        return 0
    summary = summarize(losses, plan.protocol) | {
        "seconds": seconds,
        "tokens_per_second": losses.count / seconds,
        "device": common.device_name(device),
        "model": model.describe(),
    }
    noise = summary["stderr_over_text"]
    line = f"val loss {summary['nats_per_token']:.6f} nats per token"
    print(line + (f" (+- {noise:.4f} over text)" if noise else ""))
    if summary["bits_per_byte"] is not None:
        print(f"         {summary['bits_per_byte']:.6f} bits per byte ({losses.text_bytes:,} bytes)")
    print(protocol_line(plan.protocol))
    print(f"{seconds:.1f} s on {summary['device']}")
    code = 0
    if plan.own and plan.own["val_protocol"] == plan.protocol:
        difference = summary["nats_per_token"] - plan.own["val_loss"]
        summary["run_val_loss"] = plan.own["val_loss"]
        same = abs(difference) <= SAME[plan.protocol["dtype"]]
        code = 0 if same else 1
        verdict = "equal to" if same else "NOT equal to"
        print(f"{verdict} the run's own {plan.own['val_loss']:.6f} (difference {difference:+.1e})")
    name = hashlib.sha256(json.dumps(plan.protocol, sort_keys=True).encode()).hexdigest()[:8]
    targets = [args.save] if args.save else []
    picture = args.picture
    if model.run_dir:
        targets.append(model.run_dir / f"val-{name}.json")
        picture = picture or model.run_dir / f"val-{name}.png"
    for target in targets:
        common.write_json(target, summary)
    if picture:
        written = draw_positions({str(model.path.name): summary["per_position"]}, picture)
        print("loss against position: " + " ".join(str(p) for p in written))
    return code
