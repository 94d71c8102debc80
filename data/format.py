"""Token shards on disk: the one writer and the full verifier.

The layout is that of llm.c (`dev/data/data_common.py`) and modded-nanogpt: a header of 256 little-endian
int32 (magic 20240520, version 1, token count, zeros), then the tokens as little-endian uint16. Every
document starts with 50256 (`<|endoftext|>`), and documents may straddle shards. Tokens are GPT-2's, so ids
above 50256 are damage.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from data.errors import user_error

# The trainer's reader has the same numbers (train_gpt2.SHARD_MAGIC, ...); a test holds the two together,
# because importing the trainer here would load torch into every tokenizer process.
MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
EOT = 50256

SHARD_NAME = re.compile(r"(?P<prefix>.+)_(?P<split>train|val)_(?P<index>\d{6,})\.bin")
PARTIAL_SUFFIX = ".partial"  # never matches SHARD_NAME, so no reader takes an unfinished file for a shard

_CHUNK_TOKENS = 1 << 22  # 8 MiB of tokens at a time keeps verification flat in memory


@dataclass(frozen=True)
class Shard:
    """One shard as the manifest records it. `documents` counts the documents that start in this shard."""

    file: str
    tokens: int
    documents: int
    sha256: str
    bytes: int


def fsync_dir(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file atomically: temporary name, fsync, rename. Nothing is left behind on failure."""
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with open(partial, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


class ShardWriter:
    """Append tokens to a shard that appears under its final name only when it is whole.

        with ShardWriter(path) as writer:
            writer.append(tokens)      # any number of times
            shard = writer.finish()

    Leaving the block without `finish()` (an exception, a full disk) removes the temporary file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.tokens = 0
        self.documents = 0
        self._partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
        self._file = open(self._partial, "w+b")  # noqa: SIM115 (closed by __exit__)
        self._file.write(bytes(HEADER_BYTES))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._file.close()
        finally:
            self._partial.unlink(missing_ok=True)  # gone already after finish()

    def append(self, tokens_T: np.ndarray) -> None:
        """Append token ids (any integer dtype). Raises UserError for an id outside [0, 50256]."""
        if not len(tokens_T):
            return
        if int(tokens_T.min()) < 0 or int(tokens_T.max()) > EOT:
            raise user_error(f"{self.path}: token id outside [0, {EOT}]; only GPT-2 tokens can be written")
        self._file.write(np.ascontiguousarray(tokens_T, dtype="<u2").data)
        self.tokens += len(tokens_T)
        self.documents += int(np.count_nonzero(tokens_T == EOT))

    def finish(self, expect_sha256: str = "") -> Shard:
        """Write the header, flush to disk, hash what was written, rename to the final name.

        With `expect_sha256`, another hash raises UserError and nothing gets the final name.
        """
        header = np.zeros(HEADER_INTS, "<i4")
        header[:3] = MAGIC, VERSION, self.tokens
        self._file.seek(0)
        self._file.write(header.tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.seek(0)
        # Hashed from the file, not from memory: what the manifest records is what a reader will see.
        sha256 = hashlib.file_digest(self._file, "sha256").hexdigest()
        if expect_sha256 not in ("", sha256):
            raise user_error(f"{self.path}: came out with sha256 {sha256} instead of {expect_sha256}; not kept")
        os.replace(self._partial, self.path)
        fsync_dir(self.path.parent)
        return Shard(self.path.name, self.tokens, self.documents, sha256, HEADER_BYTES + 2 * self.tokens)


def write_shard(path: Path, tokens_T: np.ndarray) -> Shard:
    """Write one whole shard atomically."""
    with ShardWriter(path) as writer:
        writer.append(tokens_T)
        return writer.finish()


def read_header(path: Path) -> int:
    """The token count of a shard, after checking magic, version and file size. Raises UserError."""
    try:
        with open(path, "rb") as f:
            head = f.read(HEADER_BYTES)
            size = os.fstat(f.fileno()).st_size
    except OSError as error:
        raise user_error(f"{path}: cannot be read ({error.strerror})") from None
    if len(head) < HEADER_BYTES:
        raise user_error(f"{path}: {size} bytes, too short for a shard header; fetch or build it again")
    header = np.frombuffer(head, "<i4")
    if header[0] != MAGIC:
        hint = " (it looks like a web page)" if head.lstrip()[:1] == b"<" else ""
        raise user_error(f"{path}: not a token shard, magic {header[0]} instead of {MAGIC}{hint}")
    if header[1] != VERSION:
        raise user_error(f"{path}: shard version {header[1]}, only version {VERSION} can be read")
    tokens = int(header[2])
    if tokens < 0 or size != HEADER_BYTES + 2 * tokens:
        raise user_error(
            f"{path}: header says {tokens} tokens ({HEADER_BYTES + 2 * tokens} bytes) but the file has "
            f"{size} bytes; it was cut or is still being written, fetch or build it again"
        )
    return tokens


def open_tokens(path: Path) -> np.ndarray:
    """The tokens of a shard, memory-mapped, uint16 (T,). Checks the header. Raises UserError."""
    tokens = read_header(path)
    if tokens == 0:
        return np.empty(0, "<u2")  # an empty file cannot be mapped
    return np.memmap(path, "<u2", mode="r", offset=HEADER_BYTES, shape=(tokens,))


def chunks(tokens_T: np.ndarray, size: int = _CHUNK_TOKENS) -> Iterator[np.ndarray]:
    """Split a (memory-mapped) token array into pieces that fit in memory."""
    for start in range(0, len(tokens_T), size):
        yield np.asarray(tokens_T[start : start + size])


def verify_shard(path: Path, full: bool = False) -> Shard:
    """Check one shard and describe it. Raises UserError for anything wrong.

    Fast: magic, version, size against header; `documents` is then -1 and `sha256` empty. Full: also the
    range of every token, a count of the document starts, and the sha256.
    """
    tokens = read_header(path)
    size = HEADER_BYTES + 2 * tokens
    if not full:
        return Shard(path.name, tokens, -1, "", size)
    documents = 0
    position = 0
    for piece in chunks(open_tokens(path)):
        if piece.max() > EOT:
            at = position + int(np.argmax(piece > EOT))
            raise user_error(
                f"{path}: token id {piece[at - position]} at position {at} is above {EOT}; not GPT-2 tokens, "
                "or damaged: fetch or build it again"
            )
        documents += int(np.count_nonzero(piece == EOT))
        position += len(piece)
    with open(path, "rb") as f:
        sha256 = hashlib.file_digest(f, "sha256").hexdigest()
    return Shard(path.name, tokens, documents, sha256, size)


def shard_order(path: Path) -> tuple[int, int, str]:
    """Sort key that restores the order in which the shards were cut: by index, val before train."""
    match = SHARD_NAME.fullmatch(path.name)
    assert match is not None
    return int(match["index"]), match["split"] == "train", path.name


def list_shards(folder: Path, split: str = "") -> list[Path]:
    """The shards of a folder in stream order (all, or one split). Raises UserError where there are none."""
    if not folder.is_dir():
        raise user_error(f"{folder}: no such folder")
    found = [p for p in folder.iterdir() if (m := SHARD_NAME.fullmatch(p.name)) and split in ("", m["split"])]
    if not found:
        what = f"{split} shard" if split else "shard"
        raise user_error(f"{folder}: no {what} here (a file named NAME_{split or 'train'}_000000.bin)")
    return sorted(found, key=shard_order)
