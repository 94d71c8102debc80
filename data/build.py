"""`python -m data build`: text into token shards, on all cores, resumable, the same bytes for any number of
workers.

One process reads batches of documents and writes tokens in order; tokenizer processes between the two share
nothing. After every whole shard the position behind its last token is saved in `.build.json`: where reading
resumes, how many documents and how many tokens of the next document are already written. A build that was
killed goes on from there and ends with the bytes of an unbroken one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.errors import user_error
from data.format import EOT, PARTIAL_SUFFIX, SHARD_NAME, Shard, ShardWriter, read_header, write_bytes
from data.manifest import CODE_VERSION, MANIFEST_NAME, Manifest, read_manifest, write_manifest
from data.sources import Batch, Position, Source
from data.tokenizer import RANK_SHA256, gpt2_encoding, rank_file, well_formed

SHARD_TOKENS = 100_000_000  # llm.c dev/data/fineweb.py: 10^8 tokens per shard
STATE_NAME = ".build.json"
STATE_SCHEMA = 1
_MANIFEST_FIELDS = ("dataset", "config", "revision", "rank_sha256", "code_version")


@dataclass(frozen=True)
class Encoded:
    """One batch as tokens: documents one after another, each behind its 50256."""

    tokens_T: np.ndarray  # uint16
    ends_D: np.ndarray  # int64: where each document ends in tokens_T
    replaced_D: np.ndarray  # int64: characters of each document that became U+FFFD


def encode_batch(texts: list[str]) -> Encoded:
    """Tokenize documents. Runs in the tokenizer processes; a pure function of its texts."""
    encode = gpt2_encoding().encode_to_numpy
    separator = np.array([EOT], np.uint32)
    parts: list[np.ndarray] = []
    ends, replaced = [], []
    total = 0
    for text in texts:
        text, bad = well_formed(text)
        # No special tokens: the characters "<|endoftext|>" in a document are text, never the id 50256.
        ids = encode(text, allowed_special=frozenset(), disallowed_special=())
        parts += (separator, ids)
        total += 1 + len(ids)
        ends.append(total)
        replaced.append(bad)
    # All ids are below 50257, so uint16 holds them.
    tokens = np.concatenate(parts).astype(np.uint16) if parts else np.empty(0, np.uint16)
    return Encoded(tokens, np.array(ends, np.int64), np.array(replaced, np.int64))


def _start_worker() -> None:
    """Set up a tokenizer process: load the ranks, and end when the parent is gone (even by kill -9)."""
    parent = multiprocessing.parent_process()

    def follow_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent deals with it
    gpt2_encoding()


def encode_in_order(batches: Iterator[Batch], workers: int) -> Generator[tuple[Batch, Encoded], None, None]:
    """Tokenize batches on `workers` processes; results come in the order of the batches.

    At most four batches per worker are in flight, so memory does not grow with the corpus.
    """
    rank_file()  # fetched once here, not by every worker
    context = multiprocessing.get_context("spawn")  # fork would copy whatever threads the libraries started
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
    try:
        failure: Exception | None = None
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:
                failure = error  # raised below: what was read before it is still written
                break
            if batch is None:
                break
            waiting.append((batch, pool.submit(encode_batch, batch.texts)))
            if len(waiting) >= 4 * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
        if failure is not None:
            raise failure
    except BrokenProcessPool:
        raise user_error(
            "a tokenizer process died, most likely for lack of memory; run the same command again with fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass
class Progress:
    """What `.build.json` holds: whole shards, and where the next one begins."""

    identity: dict[str, Any]
    shards: list[Shard]
    position: Position | None  # where to read on; None at the start
    documents: int  # whole documents behind `position` that are already written
    tokens: int  # tokens of the document after those that are already written
    replaced: int  # characters replaced so far


def read_progress(folder: Path) -> Progress | None:
    """The saved progress of an unfinished build, or None. Raises UserError where it cannot be understood."""
    path = folder / STATE_NAME
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise user_error(f"{path}: not valid JSON; remove it and the shards beside it to start over") from None
    if content.pop("schema", None) != STATE_SCHEMA:
        raise user_error(f"{path}: written by another version; remove it and the shards beside it to start over")
    content["shards"] = [Shard(**shard) for shard in content["shards"]]
    return Progress(**content)


def write_progress(folder: Path, progress: Progress) -> None:
    write_bytes(folder / STATE_NAME, json.dumps({"schema": STATE_SCHEMA, **asdict(progress)}).encode())


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` against a second writer. Raises UserError where there is one."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise user_error(f"{folder}: another process is writing shards here; wait for it, or use another folder") from None
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Have `folder`; if it was not there and nothing came into it before an error, it goes again."""
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: whole shards to go on from
            if new:
                folder.rmdir()
        raise


def shard_name(prefix: str, index: int) -> str:
    """Shard 0 is the validation shard, as in llm.c."""
    return f"{prefix}_{'val' if index == 0 else 'train'}_{index:06d}.bin"


class ShardCutter:
    """Cuts the stream of tokens into shards and saves the progress after each."""

    def __init__(self, folder: Path, prefix: str, shard_tokens: int, progress: Progress):
        self.folder, self.prefix, self.shard_tokens, self.progress = folder, prefix, shard_tokens, progress
        self.total = sum(shard.tokens for shard in progress.shards)
        self._replaced = progress.replaced
        self._writer: ShardWriter | None = None

    def add(self, batch: Batch, encoded: Encoded, skip: int) -> None:
        """Write one batch without its first `skip` tokens (which an earlier run has written)."""
        begin = skip
        while begin < len(encoded.tokens_T):
            if self._writer is None:
                path = self.folder / shard_name(self.prefix, len(self.progress.shards))
                self._writer = ShardWriter(path)
            end = min(len(encoded.tokens_T), begin + self.shard_tokens - self._writer.tokens)
            self._writer.append(encoded.tokens_T[begin:end])
            self.total += end - begin
            begin = end
            if self._writer.tokens == self.shard_tokens:
                # Documents that end at or before `end` are whole; `inside` is what the next one has here.
                whole = int(np.searchsorted(encoded.ends_D, end, side="right"))
                inside = end - (int(encoded.ends_D[whole - 1]) if whole else 0)
                begun = whole + (inside > 0)
                self._close()
                self.progress.position = batch.start
                self.progress.documents = batch.first + whole
                self.progress.tokens = inside
                # A document's characters count with its first token: not again after a resume inside it.
                counted = int(encoded.replaced_D[0]) if skip else 0
                self.progress.replaced = self._replaced + int(encoded.replaced_D[:begun].sum()) - counted
                write_progress(self.folder, self.progress)
        self._replaced += int(encoded.replaced_D[1:].sum()) if skip else int(encoded.replaced_D.sum())

    def _close(self) -> None:
        assert self._writer is not None
        with self._writer as writer:
            self.progress.shards.append(writer.finish())
        self._writer = None

    def finish(self) -> int:
        """Close the last shard; returns the number of replaced characters."""
        if self._writer is not None:
            self._close()
        return self._replaced

    def abandon(self) -> None:
        """Remove the unfinished shard."""
        if self._writer is not None:
            self._writer.__exit__(None, None, None)
            self._writer = None


def unread(batches: Iterator[Batch], documents: int) -> Iterator[Batch]:
    """The batches without their first `documents` documents."""
    for batch in batches:
        if documents < len(batch.texts):
            yield Batch(batch.texts[documents:], batch.start, documents)
            documents = 0
        else:
            documents -= len(batch.texts)


def cut_at(encoded: Encoded, tokens: int) -> Encoded:
    """The documents of a batch up to the one in which token number `tokens` lies, that one whole."""
    last = int(np.searchsorted(encoded.ends_D, tokens, side="left"))
    end = int(encoded.ends_D[last])
    return Encoded(encoded.tokens_T[:end], encoded.ends_D[: last + 1], encoded.replaced_D[: last + 1])


def _begin(folder: Path, identity: dict[str, Any]) -> Progress | None:
    """The progress to go on from, or None where the build is finished. Raises UserError for a folder in
    other use.
    """
    for leftover in folder.glob(f".*{PARTIAL_SUFFIX}"):
        leftover.unlink()
    manifest = read_manifest(folder)
    if manifest is not None:
        recorded = {
            **manifest.extra,
            "rank_sha256": manifest.rank_sha256,
            "code_version": manifest.code_version,
        }
        recorded |= {"dataset": manifest.dataset, "config": manifest.config, "revision": manifest.revision}
        if recorded != identity:
            raise user_error(f"{folder}: holds another set ({_difference(recorded, identity)}); choose another --out")
        for shard in manifest.shards:
            if read_header(folder / shard.file) != shard.tokens:
                raise user_error(f"{folder / shard.file}: not what the manifest says; remove {MANIFEST_NAME} and shards")
        (folder / STATE_NAME).unlink(missing_ok=True)
        return None
    progress = read_progress(folder)
    if progress is None:
        shards = [path.name for path in folder.iterdir() if SHARD_NAME.fullmatch(path.name)]
        if shards:
            raise user_error(f"{folder}: holds shards of unknown origin ({shards[0]}); choose another --out")
        return Progress(identity, [], None, 0, 0, 0)
    if progress.identity != identity:
        raise user_error(
            f"{folder}: holds an unfinished build of another set "
            f"({_difference(progress.identity, identity)}); "
            f"choose another --out, or remove {STATE_NAME} and the shards beside it"
        )
    for shard in progress.shards:
        if read_header(folder / shard.file) != shard.tokens:
            raise user_error(f"{folder / shard.file}: changed since it was built; remove {STATE_NAME} and the shards")
    return progress


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    name = next(key for key in {**old, **new} if old.get(key) != new.get(key))
    return f"{name} {old.get(name)!r} there, {new.get(name)!r} asked for"


def recorded_revision(folder: Path, dataset: str) -> str:
    """The commit that a finished or unfinished build of `dataset` in `folder` reads, or an empty string."""
    manifest = read_manifest(folder)
    if manifest is not None:
        return manifest.revision if manifest.dataset == dataset else ""
    progress = read_progress(folder) if folder.is_dir() else None
    return progress.identity["revision"] if progress is not None and progress.identity["dataset"] == dataset else ""


def build(
    source: Source, folder: Path, workers: int, shard_tokens: int = SHARD_TOKENS, max_tokens: int = 0
) -> tuple[Manifest, bool]:
    """Build the shards of `source` in `folder`; returns the manifest, and whether anything had to be done.

    With `max_tokens`, ends with the document that reaches that many tokens. Raises UserError; OSError for a
    full disk. Whatever happens, files with a final name are whole, and the next call goes on from the last
    of them.
    """
    identity: dict[str, Any] = dict(source.identity)
    identity |= {"shard_tokens": shard_tokens, "max_tokens": max_tokens}
    identity |= {"rank_sha256": RANK_SHA256, "code_version": CODE_VERSION}
    prefix = re.sub(r"[^a-z0-9-]+", "_", Path(identity["dataset"]).name.lower())
    with _made(folder), locked(folder):
        progress = _begin(folder, identity)
        if progress is None:
            manifest = read_manifest(folder)
            assert manifest is not None
            return manifest, False
        cutter = ShardCutter(folder, prefix, shard_tokens, progress)
        if progress.shards:
            print(f"going on behind {progress.shards[-1].file}, {cutter.total:,} tokens", flush=True)
        batches = unread(source.batches(progress.position), progress.documents)
        skip = progress.tokens
        bar = tqdm(initial=cutter.total, unit=" tokens", unit_scale=True, disable=None, mininterval=0.5)
        encoded_batches = encode_in_order(batches, workers)
        # Before the first shard: one that was finished right before a kill must not look like somebody
        # else's.
        write_progress(folder, progress)
        try:
            for batch, encoded in encoded_batches:
                if max_tokens and cutter.total >= max_tokens and not skip:
                    break  # resumed behind the last shard
                left = max_tokens - cutter.total + skip
                last = bool(max_tokens) and left <= len(encoded.tokens_T)
                cutter.add(batch, cut_at(encoded, left) if last else encoded, skip)
                bar.update(cutter.total - bar.n)
                skip = 0
                if last:
                    break
            replaced = cutter.finish()
            if not progress.shards:
                raise user_error(f"{identity['dataset']}: no documents")
        except BaseException:
            if not progress.shards:
                (folder / STATE_NAME).unlink()  # nothing to go on from
            raise
        finally:
            encoded_batches.close()
            cutter.abandon()
            bar.close()
        extra = {k: v for k, v in identity.items() if k not in _MANIFEST_FIELDS}
        manifest = Manifest(
            identity["dataset"],
            identity["config"],
            identity["revision"],
            RANK_SHA256,
            progress.shards,
            replaced=replaced,
            extra=extra,
        )
        write_manifest(folder, manifest)
        for leftover in [folder / STATE_NAME, *folder.glob(".source-*")]:  # see CheckedHubFiles
            leftover.unlink(missing_ok=True)
        return manifest, True
