"""What a folder of shards holds: verification, statistics, and a look at single documents."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.errors import user_error
from data.format import EOT, SHARD_NAME, Shard, chunks, list_shards, open_tokens, verify_shard
from data.manifest import MANIFEST_NAME, read_manifest

_THREADS = 4  # hashing and numpy both let go of the interpreter; more threads only wait for the disk


def verify(folder: Path, full: bool = False) -> list[str]:
    """Check a folder of shards; returns every problem found, one line each (empty: all is well).

    Fast: headers, sizes, and the manifest against both. Full: also sha256, token range, document counts,
    and that the stream starts with a document. Raises UserError where there is nothing to check.
    """
    paths = list_shards(folder)
    manifest = read_manifest(folder)
    recorded = {shard.file: shard for shard in manifest.shards} if manifest is not None else {}

    def check(path: Path) -> Iterator[str]:
        try:
            found = verify_shard(path, full)
        except ValueError as error:
            yield str(error)
            return
        expected = recorded.get(path.name)
        if manifest is not None and expected is None:
            yield f"{path}: not in {MANIFEST_NAME}; move it away"
        elif expected is not None:
            yield from _differences(path, found, expected, full)

    problems = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for lines in pool.map(lambda path: list(check(path)), paths):
            problems += lines
    here = {path.name for path in paths}
    problems += [f"{folder / name}: missing; fetch or build it again" for name in recorded if name not in here]
    if full and not problems:
        problems += [f"{path}: does not start with a document" for path in paths if not _starts_well(path)]
    return problems


def _differences(path: Path, found: Shard, expected: Shard, full: bool) -> Iterator[str]:
    names = ("tokens", "bytes", "documents", "sha256") if full else ("tokens", "bytes")
    for name in names:
        if getattr(found, name) != getattr(expected, name):
            yield (
                f"{path}: {name} {getattr(found, name)}, but {MANIFEST_NAME} says {getattr(expected, name)}; "
                "fetch or build it again"
            )
            return


def _starts_well(path: Path) -> bool:
    """Documents straddle shards, so only shard 0 must begin with one."""
    match = SHARD_NAME.fullmatch(path.name)
    assert match is not None
    tokens_T = open_tokens(path)
    return int(match["index"]) > 0 or (len(tokens_T) > 0 and int(tokens_T[0]) == EOT)


def documents(paths: list[Path]) -> Iterator[np.ndarray]:
    """The documents of a stream of shards, each with its leading 50256 (T,); straddling ones are put
    together.

    What comes before the first 50256 (the end of a document that began in a shard not given) is a document
    too.
    """
    carried: list[np.ndarray] = []
    for path in paths:
        for piece in chunks(open_tokens(path)):
            starts = np.flatnonzero(piece == EOT)
            begin = 0
            for start in starts:
                if start > begin or carried:
                    carried.append(piece[begin:start])
                    whole = np.concatenate(carried)
                    if len(whole):
                        yield whole
                    carried = []
                begin = int(start)
            carried.append(piece[begin:])
    whole = np.concatenate(carried) if carried else np.empty(0, np.uint16)
    if len(whole):
        yield whole


def document_lengths(paths: list[Path]) -> np.ndarray:
    """Tokens of every document in the stream, without the leading 50256, int64 (D,)."""
    starts, offset, first = [], 0, EOT
    for path in paths:
        for piece in chunks(open_tokens(path)):
            if offset == 0 and len(piece):
                first = int(piece[0])
            starts.append(np.flatnonzero(piece == EOT) + offset)
            offset += len(piece)
    bounds = np.concatenate([*starts, [offset]]).astype(np.int64)
    lengths = np.diff(bounds) - 1
    if first != EOT:  # a document that began elsewhere
        lengths = np.concatenate([bounds[:1], lengths])
    return lengths


def find_document(paths: list[Path], number: int) -> np.ndarray:
    """Document `number` (from 0) of the stream with its leading 50256. Raises UserError where there are
    fewer.
    """
    seen = 0
    for seen, tokens_T in enumerate(documents(paths), 1):
        if seen == number + 1:
            return tokens_T
    raise user_error(f"{paths[0].parent}: has {seen} documents, numbered from 0; there is no document {number}")


@dataclass(frozen=True)
class Lengths:
    """A summary of document lengths in tokens."""

    documents: int
    tokens: int
    mean: float
    percentiles: dict[int, int]

    @staticmethod
    def of(lengths_D: np.ndarray) -> Lengths:
        percents = (0, 5, 25, 50, 75, 95, 100)
        values = np.percentile(lengths_D, percents, method="lower") if len(lengths_D) else [0] * len(percents)
        mean = float(lengths_D.mean()) if len(lengths_D) else math.nan
        tokens = int(lengths_D.sum()) + len(lengths_D)
        return Lengths(len(lengths_D), tokens, mean, dict(zip(percents, map(int, values))))


def draw_lengths(lengths_D: np.ndarray, title: str, picture: Path) -> None:
    """Save a histogram of document lengths on a logarithmic axis: by documents, and by the tokens they
    hold.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = np.maximum(lengths_D, 1)  # a logarithm has no place for empty documents: they stand with those of 1
    edges = np.geomspace(shown.min(), int(shown.max()) + 1, 61)
    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for weights, label in ((None, "documents"), (lengths_D, "tokens")):
        counts, _ = np.histogram(shown, edges, weights=weights)
        axis.stairs(counts / max(1, counts.sum()), edges, fill=weights is None, alpha=0.6, label=f"share of {label}")
    for value, label in ((np.median(lengths_D), "median"), (1024, "T = 1024")):
        axis.axvline(value, color="black", linewidth=0.8, linestyle="--" if label == "median" else ":", label=label)
    axis.set(xscale="log", xlabel="tokens in a document", ylabel="share", title=title)
    axis.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
