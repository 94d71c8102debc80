"""Loss of given continuations under a model: the engine below HellaSwag and LAMBADA.

A request is a row of tokens of which the last `scored` are the continuation. Requests that belong together
(the four endings of an example) form a group and travel in one batch. Batches are formed from the requests
alone, so every rank count and every machine forms the same ones; ranks take them in turn and meet in one
all-reduce per round, so that no rank waits for a peer that has no batch left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from eval.common import world
from train_gpt2 import COMPUTE_DTYPE, GPT, head_nll

PAD_MULTIPLE = 16  # rows are padded to a multiple of this; HellaSwag: 11 shapes, 19% of padding
HEAD_ROWS = 8192  # positions whose logits exist at one time: 8192 x 50257 x 4 bytes = 1.6 GB
# Without cuDNN, which plans anew for every shape: that pays in training, not for a few batches of each shape.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
NEAREST = 64  # examples scored again in any case, to measure the error of bfloat16


class Request(NamedTuple):
    """`tokens` holds context and continuation; the last `scored` of them are predicted from all before."""

    tokens: Sequence[int]
    scored: int


@dataclass(frozen=True)
class Scores:
    """Arrays of (groups, requests of a group); where a group is shorter than the longest, losses are NaN."""

    nll: np.ndarray  # float64, summed nats of the continuation
    greedy: np.ndarray  # bool: each continuation token was the model's first choice (if asked for)
    scored: np.ndarray  # int: continuation tokens scored (fewer than asked for in a row cut to the context)
    truncated: int  # rows whose start was cut off, since they are longer than the model's context
    retried: int = 0  # groups scored again in float32
    bf16_error: float = 0.0  # largest difference of a summed loss between bfloat16 and float32 among those


def fit(request: Request, seq_len: int) -> Request:
    """Keep the last seq_len + 1 tokens: seq_len inputs and the last target (as lm-eval cuts rows)."""
    if len(request.tokens) <= seq_len + 1:
        return request
    return Request(request.tokens[-(seq_len + 1) :], min(request.scored, seq_len))


def make_batches(
    lengths: Sequence[int], group_rows: Sequence[int], seq_len: int, batch_tokens: int
) -> list[tuple[int, list[int]]]:
    """Batches of groups as (padded length, group numbers), longest first.

    `lengths` is each group's longest row of inputs, `group_rows` its number of rows. A batch holds rows of
    one padded length, at most `batch_tokens` tokens with padding (but always at least one group).
    """
    padded = [min(-(-n // PAD_MULTIPLE) * PAD_MULTIPLE, seq_len) for n in lengths]
    order = sorted(range(len(lengths)), key=lambda g: (-padded[g], g))
    batches: list[tuple[int, list[int]]] = []
    rows = 0
    for g in order:
        full = rows + group_rows[g] > batch_tokens // padded[g]
        if not batches or batches[-1][0] != padded[g] or full:
            batches.append((padded[g], []))
            rows = 0
        batches[-1][1].append(g)
        rows += group_rows[g]
    return batches


@contextlib.contextmanager
def arithmetic(net: GPT, dtype: str) -> Iterator[None]:
    """Run the model in `dtype` ("fp32", "bf16", "fp16"); fp32 is true float32, never TensorFloat-32."""
    kept, precision = net.dtype, torch.get_float32_matmul_precision()
    net.dtype = COMPUTE_DTYPE[dtype]
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        net.dtype = kept
        torch.set_float32_matmul_precision(precision)


@torch.inference_mode()
def score_batch(net: GPT, rows: Sequence[Request], length: int, greedy: bool) -> tuple[np.ndarray, np.ndarray]:
    """Per row: summed nats (float64) and, if asked for, whether greedy decoding gives the continuation.

    Rows are padded on the right to `length` inputs; a causal model never sees the padding. The head runs on
    the scored positions only: a third of a HellaSwag batch, where the head is a third of the work.
    """
    device = next(net.parameters()).device
    inputs = np.zeros((len(rows), length), dtype=np.int64)
    positions, targets, starts = [], [], [0]
    for r, (tokens, scored) in enumerate(rows):
        assert 0 < scored < len(tokens), "nothing to predict, or nothing to predict it from"
        inputs[r, : len(tokens) - 1] = tokens[:-1]
        last = r * length + len(tokens) - 1
        positions.append(np.arange(last - scored, last))
        targets.append(np.asarray(tokens[len(tokens) - scored :], dtype=np.int64))
        starts.append(starts[-1] + scored)
    where = torch.from_numpy(np.concatenate(positions)).to(device)
    target_N = torch.from_numpy(np.concatenate(targets)).to(device)
    hidden_NC = net.hidden(torch.from_numpy(inputs).to(device)).flatten(0, 1)[where]
    nll_N = head_nll(hidden_NC, net.head_weight, target_N, net.cfg.vocab_size, net.cfg.softcap)
    # Summed on the host in float64 and in order, which atomic adds on a GPU would not promise.
    nll = np.add.reduceat(nll_N.double().cpu().numpy(), starts[:-1])
    if not greedy:
        return nll, np.zeros(len(rows), dtype=bool)
    first = [net.head_logits(h).argmax(-1) for h in hidden_NC.split(HEAD_ROWS)]
    return nll, np.logical_and.reduceat((torch.cat(first) == target_N).cpu().numpy(), starts[:-1])


def score_groups(
    net: GPT,
    groups: Sequence[Sequence[Request]],
    dtype: str = "fp32",
    batch_tokens: int = 0,
    greedy: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Score every group; all ranks get the whole result.

    `batch_tokens` 0 means 65,536 on a GPU and 4,096 on a CPU. `progress(done, all)` is called after each
    batch of this rank. The model must be the plain module: compiled, it would be compiled again for each
    shape.
    """
    rank, ranks = world()
    device, seq_len = next(net.parameters()).device, net.cfg.seq_len
    batch_tokens = batch_tokens or (65_536 if device.type == "cuda" else 4_096)
    fitted = [[fit(r, seq_len) for r in group] for group in groups]
    lengths = [max(len(r.tokens) - 1 for r in group) for group in fitted]
    batches = make_batches(lengths, [len(g) for g in fitted], seq_len, batch_tokens)
    width = max((len(g) for g in fitted), default=0)
    table = np.zeros((2, len(groups), width))
    mine = batches[rank::ranks]
    with arithmetic(net, dtype), sdpa_kernel(BACKENDS):
        for done, (length, members) in enumerate(mine, 1):
            nll, first = score_batch(net, [r for g in members for r in fitted[g]], length, greedy)
            at = 0
            for g in members:
                n = len(fitted[g])
                table[:, g, :n] = nll[at : at + n], first[at : at + n]
                at += n
            if progress:
                progress(done, len(mine))
    if ranks > 1:
        # Each cell is written by one rank and zero on the others, so the sum is exact.
        shared = torch.from_numpy(table).to(device)
        dist.all_reduce(shared)
        table = shared.cpu().numpy()
    scored = np.zeros((len(groups), width), dtype=np.int64)
    for g, group in enumerate(fitted):
        scored[g, : len(group)] = [r.scored for r in group]
        table[0, g, len(group) :] = np.nan
    truncated = sum(len(r.tokens) > seq_len + 1 for group in groups for r in group)
    return Scores(table[0], table[1].astype(bool), scored, truncated)


def score_exactly(
    net: GPT,
    groups: Sequence[Sequence[Request]],
    margin: Callable[[Scores], np.ndarray],
    tolerance: float = 0.25,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """bfloat16 for all, then float32 for every group whose choice bfloat16 could have changed.

    `margin(scores)` is, per group, the sum of two loss errors (nats) that could change its choice. Groups
    below a tolerance, and in any case the NEAREST ones, are scored again in float32. They also measure the
    error of bfloat16: the tolerance grows until it is four times the largest error seen (two losses err,
    and the groups not rescored may err twice as much as the rescored ones). So the choices are float32's at
    a fraction of its cost; the worst case, a model that finds all endings alike, is that every group is
    scored twice.
    """
    scores = score_groups(net, groups, "bf16", progress=progress)
    nll = scores.nll.copy()
    distance = margin(scores)
    exact = np.zeros(len(groups), dtype=bool)
    error = 0.0
    near = np.argsort(distance, kind="stable")[:NEAREST]
    while True:
        again = np.union1d(near, np.flatnonzero(distance < tolerance))
        again = again[~exact[again]]
        if len(again):
            rescored = score_groups(net, [groups[g] for g in again], "fp32", progress=progress)
            width = rescored.nll.shape[1]
            error = max(error, float(np.nanmax(np.abs(rescored.nll - scores.nll[again, :width]))))
            nll[again, :width] = rescored.nll
            exact[again] = True
        if exact.all() or tolerance >= 4 * error:
            break
        tolerance = 4 * error
    return Scores(nll, scores.greedy, scores.scored, scores.truncated, int(exact.sum()), error)
