"""Too good to be true: results that a leak, a mask or an off-by-one explains better than progress does.

Nothing here decides a verdict. Each finding is one line with its likely cause, for a person to look into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats as sp

from harness.baseline import Run
from harness.common import UserError, read_json
from harness.stats import jump

FAR = 0.01  # a loss lower by this part is suspicious, if it is also beyond the baseline's seeds
RARE = 0.001  # chance of a false finding, per run and kind
WINDOW = 20  # steps on either side of a boundary
PROBE = 64  # tokens: longer than the phrases that unrelated documents share
PROBES = 256
PROBES_SHARED = 0.05  # web text repeats itself a little; a leaked shard shares all of them
MOST_SCANNED = 200_000_000  # train tokens searched: seconds, not minutes


def suspicions(runs: Sequence[Run], baseline: dict[str, Any]) -> list[str]:
    """All findings over these finished runs."""
    found = []
    for run in runs:
        if not run.diverged:
            found += [*far_below(run, baseline), *boundary_drops(run)]
    for folder in sorted({run.result["data"]["dir"] for run in runs}):
        longest = max(run.result["tokens"] for run in runs if run.result["data"]["dir"] == folder)
        found += leaked_validation(Path(folder), longest)
    return found


def far_below(run: Run, baseline: dict[str, Any]) -> Iterator[str]:
    """A final loss below both the reach of the baseline's seeds (t, at `RARE`) and `FAR` of its mean."""
    if baseline["kind"] != "runs":
        return
    n, mean, std = baseline["n"], baseline["mean"], baseline["std"]
    bound = min(mean - float(sp.t.isf(RARE, n - 1)) * std * (1 + 1 / n) ** 0.5, mean * (1 - FAR))
    if run.val_loss < bound:
        yield (
            f"{run.name}: val loss {run.val_loss:.4f} is far below the baseline's {mean:.4f}; "
            "likely a leak: validation tokens in training, attention that sees ahead, or targets off by one"
        )


def boundary_drops(run: Run) -> Iterator[str]:
    """A train loss that falls at once where an epoch or a shard begins: tokens seen before, or easier."""
    losses = [row["loss"] for row in run.train]
    steps = [row["step"] for row in run.train]
    boundaries = [(step, what) for step, what in _boundaries(run) if step in set(steps)]
    for step, what in boundaries:
        at = steps.index(step)
        near = losses[max(0, at - WINDOW) : at + WINDOW]
        drop, p = jump(near, at - max(0, at - WINDOW))
        if p < RARE / len(boundaries) and -drop > FAR * float(np.mean(near)):
            yield (
                f"{run.name}: train loss drops by {-drop:.3f} at step {step}, where {what} begins; "
                "likely the same tokens again (memorised), or shards that are not shuffled"
            )


def _boundaries(run: Run) -> Iterator[tuple[int, str]]:
    """(first whole step, name) of every epoch and of every train shard, as far as the manifest is at hand."""
    for before, row in zip(run.train, run.train[1:]):
        if row.get("epoch", 0) != before.get("epoch", 0):
            yield row["step"], f"epoch {row['epoch']}"
    try:
        manifest = read_json(Path(run.result["data"]["dir"]) / "manifest.json")
    except UserError:
        return
    if manifest.get("fingerprint") != run.result["data"]["fingerprint"]:
        return
    ends = np.cumsum([shard["tokens"] for shard in manifest["shards"] if "_train_" in shard["file"]])
    for end in ends[:-1]:
        yield int(end) // run.config["batch_tokens"] + 2, "a shard"


def leaked_validation(folder: Path, tokens: int) -> list[str]:
    """A finding if validation tokens stand in the train tokens that a run of `tokens` has read.

    `PROBES` stretches of `PROBE` tokens, evenly spaced over the val shards, are looked for verbatim.
    """
    from train_gpt2 import TokenStream, find_shards

    if not all(any(folder.glob(f"*_{split}_*.bin")) for split in ("train", "val")):
        return []  # the data is not kept here any more
    val, train = (TokenStream(find_shards(folder, split)) for split in ("val", "train"))
    if len(val) < PROBE:
        return []
    starts = np.unique(np.linspace(0, len(val) - PROBE, PROBES).astype(np.int64))
    probes = [np.asarray(val.slice(int(start), PROBE)) for start in starts]
    scanned = min(tokens, len(train), MOST_SCANNED)
    share = shared(probes, (np.asarray(train.slice(start, size)) for start, size in pieces_of(scanned)))
    if share <= PROBES_SHARED:
        return []
    return [
        f"{folder}: {share:.0%} of {len(probes)} stretches of {PROBE} validation tokens stand in the first "
        f"{scanned:,} train tokens; the val loss measures memory, not learning"
    ]


def pieces_of(total: int, size: int = 1 << 24) -> Iterator[tuple[int, int]]:
    """(start, length) of pieces that overlap by one probe, so that none is missed between two."""
    for start in range(0, total, size):
        yield start, min(size + PROBE - 1, total - start)


def shared(probes: Sequence[npt.NDArray[np.uint16]], chunks: Iterator[npt.NDArray[np.uint16]]) -> float:
    """Part of `probes` that stands verbatim in one of `chunks`.

    Four tokens are one 64-bit word: the words at all four alignments are looked up among the probes' first
    ones, and what matches is compared in full.
    """
    firsts = np.array([probe[:4].copy().view(np.uint64)[0] for probe in probes])
    order = np.argsort(firsts, kind="stable")
    words = firsts[order]
    found = np.zeros(len(probes), bool)
    for chunk in chunks:
        for offset in range(4):
            part = chunk[offset : offset + (len(chunk) - offset) // 4 * 4]
            keys = np.ascontiguousarray(part).view(np.uint64)
            left = np.searchsorted(words, keys)
            hits = np.flatnonzero(words[np.minimum(left, len(words) - 1)] == keys)
            for hit in hits:
                start = offset + 4 * int(hit)
                for i in order[left[hit] : np.searchsorted(words, keys[hit], "right")]:
                    found[i] |= not found[i] and np.array_equal(chunk[start : start + PROBE], probes[i])
    return float(found.mean())
