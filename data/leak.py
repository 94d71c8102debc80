"""`python -m data leak`: validation documents that are also in the training shards, exactly or nearly.

Exact: the same tokens. Near: at least a given share of a val document's n-grams are found in one single train
document. n-grams are compared by 64-bit fingerprints. Long documents are represented by the 1 in 16
fingerprints that are divisible by 16, a choice that depends on the text alone and so falls on the same
n-grams on both sides; short ones by all. n-grams in more than 32 val documents (boilerplate) tell nothing
and are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.checks import documents
from data.errors import user_error
from data.format import EOT

NGRAM = 13  # tokens; the length GPT-3 used against its test sets (Brown et al. 2020, appendix C)
NEAR = 0.8
SAMPLED = 16
SHORT = 1024  # n-grams up to which a document keeps all of its fingerprints
COMMON = 32
_BLOCK_TOKENS = 1 << 22
_FILTER_BITS = 26
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: an odd multiplier that mixes well


@dataclass(frozen=True)
class Match:
    """A val document found in train. `share` of its fingerprints are in train document `train_document`."""

    document: int
    tokens: int
    train_document: int
    share: float
    exact: bool


@dataclass
class Leak:
    """The result: matches, and how many val documents and tokens were compared."""

    documents: int
    tokens: int
    matches: list[Match] = field(default_factory=list)

    def summary(self, exact: bool) -> tuple[int, int, float]:
        """Documents, tokens, and share of all val tokens of the exact (or the near) matches."""
        chosen = [match for match in self.matches if match.exact == exact]
        tokens = sum(match.tokens for match in chosen)
        return len(chosen), tokens, tokens / self.tokens if self.tokens else 0.0


def fingerprints(tokens_T: np.ndarray, n: int) -> np.ndarray:
    """A 64-bit hash of every n-gram, uint64 (max(T - n + 1, 0),): a polynomial in an odd base, then mixed."""
    count = len(tokens_T) - n + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    values = tokens_T.astype(np.uint64)
    hashes = np.zeros(count, np.uint64)
    for i in range(n):
        hashes *= _ODD
        hashes += values[i : i + count]
        hashes += np.uint64(1)  # so that leading zeros count
    # The low bits of a product depend on low bits alone; a xor-shift between two products spreads all of
    # them.
    hashes ^= hashes >> np.uint64(31)
    hashes *= _ODD
    hashes ^= hashes >> np.uint64(29)
    return hashes


def _key(tokens_T: np.ndarray) -> bytes:
    return hashlib.blake2b(tokens_T.tobytes(), digest_size=16).digest()


def _body(tokens_T: np.ndarray) -> np.ndarray:
    return tokens_T[1:] if len(tokens_T) and tokens_T[0] == EOT else tokens_T


def _blocks(paths: list[Path]) -> Iterator[tuple[list[np.ndarray], int]]:
    """Documents (without 50256) in groups of about _BLOCK_TOKENS, with the number of the first of each
    group.
    """
    group: list[np.ndarray] = []
    size = first = 0
    for tokens_T in documents(paths):
        group.append(_body(tokens_T))
        size += len(tokens_T)
        if size >= _BLOCK_TOKENS:
            yield group, first
            first += len(group)
            group, size = [], 0
    if group:
        yield group, first


class _Table:
    """The fingerprints of the val documents, sorted, with the document of each."""

    def __init__(self, paths: list[Path], n: int):
        self.exact: dict[bytes, list[int]] = {}
        self.tokens: list[int] = []  # with the leading 50256
        parts: list[np.ndarray] = []
        owners: list[np.ndarray] = []
        for group, first in _blocks(paths):
            for number, body in enumerate(group, first):
                self.tokens.append(len(body) + 1)
                if len(body):
                    self.exact.setdefault(_key(body), []).append(number)
                marks = np.unique(fingerprints(body, n))
                if len(marks) > SHORT:
                    marks = marks[marks % np.uint64(SAMPLED) == 0]
                parts.append(marks)
                owners.append(np.full(len(marks), number, np.int64))
        hashes = np.concatenate(parts) if parts else np.empty(0, np.uint64)
        owner = np.concatenate(owners) if owners else np.empty(0, np.int64)
        order = np.argsort(hashes, kind="stable")
        hashes, owner = hashes[order], owner[order]
        _, counts = np.unique(hashes, return_counts=True)
        telling = np.repeat(counts <= COMMON, counts)
        self.hashes, self.owner = hashes[telling], owner[telling]
        self.marks_of = np.bincount(self.owner, minlength=len(self.tokens))
        # Most train n-grams are in no val document: one bit each says so without a search.
        self._filter = np.zeros(1 << _FILTER_BITS, bool)
        self._filter[self.hashes >> np.uint64(64 - _FILTER_BITS)] = True

    def pairs(self, hashes_N: np.ndarray, train_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(train document, val document, shared fingerprints) for the n-grams of some train documents."""
        maybe = self._filter[hashes_N >> np.uint64(64 - _FILTER_BITS)]
        hashes_N, train_N = hashes_N[maybe], train_N[maybe]
        left = np.searchsorted(self.hashes, hashes_N, side="left")
        right = np.searchsorted(self.hashes, hashes_N, side="right")
        counts = right - left
        total = int(counts.sum())
        # Row i stands for entries left[i] .. right[i] of the table.
        rows = np.repeat(np.arange(len(counts)), counts)
        entries = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(left, counts)
        # A fingerprint that a train document has twice counts once.
        once = np.unique(np.stack([train_N[rows], entries]), axis=1) if total else np.empty((2, 0), np.int64)
        both, shared = np.unique(np.stack([once[0], self.owner[once[1]]]), axis=1, return_counts=True)
        return both[0], both[1], shared


def find_leaks(train: list[Path], val: list[Path], n: int = NGRAM, near: float = NEAR) -> Leak:
    """Documents of the val shards that the train shards hold too. Memory: about 16 bytes per val
    fingerprint.
    """
    if n < 1 or not 0 < near <= 1:
        raise user_error("the n-gram length must be at least 1 and the share between 0 and 1")
    table = _Table(val, n)
    leak = Leak(len(table.tokens), sum(table.tokens))
    exact: dict[int, int] = {}
    best = np.zeros(leak.documents)
    best_train = np.full(leak.documents, -1, np.int64)
    for group, first in _blocks(train):
        hashes, numbers = [], []
        for number, body in enumerate(group, first):
            if len(body):
                for document in table.exact.get(_key(body), []):
                    exact.setdefault(document, number)
            marks = fingerprints(body, n)
            hashes.append(marks)
            numbers.append(np.full(len(marks), number, np.int64))
        train_P, val_P, shared_P = table.pairs(np.concatenate(hashes), np.concatenate(numbers))
        share_P = shared_P / table.marks_of[val_P]
        share_P[share_P <= best[val_P]] = 0
        order = np.argsort(share_P, kind="stable")  # ascending, so the best of a document is written last
        order = order[share_P[order] > 0]
        best[val_P[order]], best_train[val_P[order]] = share_P[order], train_P[order]
    for document, tokens in enumerate(table.tokens):
        if document in exact:
            leak.matches.append(Match(document, tokens, exact[document], 1.0, True))
        elif best[document] >= near:
            leak.matches.append(Match(document, tokens, int(best_train[document]), float(best[document]), False))
    return leak
