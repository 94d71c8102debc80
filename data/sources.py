"""Where documents come from: a data set of the Hugging Face hub (streamed), or local files.

A source reads documents in a fixed order and can start again at any position that it has reported. A
position is a small JSON value that means something to its source alone; it always lies between two
documents.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from data.errors import user_error

Position = dict[str, Any]

# Characters in a batch, the unit of work of a tokenizer process: about 60,000 tokens or 15 ms. Smaller
# wastes time on passing messages, larger leaves cores idle at the end and holds more text in memory.
BATCH_CHARACTERS = 1 << 18


@dataclass(frozen=True)
class Batch:
    """Consecutive documents: the first of them is number `first` (from 0) of those read from `start` on."""

    texts: list[str]
    start: Position
    first: int = 0


class Source(Protocol):
    """`identity` names what is read (for the manifest); `batches` reads it from a position, None for the
    start.
    """

    @property
    def identity(self) -> dict[str, str]: ...

    def batches(self, position: Position | None) -> Iterator[Batch]: ...


def _batches(documents: Iterator[tuple[str, Position]], start: Position) -> Iterator[Batch]:
    """Group (text, position after it) into batches of at least BATCH_CHARACTERS (the last may be smaller)."""
    texts: list[str] = []
    characters = 0
    for text, after in documents:
        texts.append(text)
        characters += len(text) + 1
        if characters >= BATCH_CHARACTERS:
            yield Batch(texts, start)
            texts, characters, start = [], 0, after
    if texts:
        yield Batch(texts, start)


class LocalFiles:
    """Documents in local files, in the order given: rows of .parquet and .jsonl, whole .txt files.

    A position is {"file": index, "row": n} (.parquet), {"file": index, "byte": offset} (.jsonl); .txt files
    are one document each. Bytes that are not UTF-8 come out as lone surrogates, which tokenization replaces
    and counts.
    """

    SUFFIXES = (".parquet", ".jsonl", ".txt")

    def __init__(self, patterns: Sequence[str], column: str = "text"):
        self.column = column
        self.paths: list[Path] = []
        for pattern in patterns:
            found = sorted(glob.glob(pattern)) or [pattern]  # the shell may have expanded it already
            self.paths += [Path(name) for name in found]
        for path in self.paths:
            if not path.is_file():
                raise user_error(f"{path}: no such file")
        self._check_suffixes()

    def _check_suffixes(self) -> None:
        for path in self.paths:
            if path.suffix not in self.SUFFIXES:
                raise user_error(f"{path}: cannot be read as documents; use {', '.join(self.SUFFIXES)}")

    @property
    def identity(self) -> dict[str, str]:
        """Names and sizes stand for the files: reading a corpus twice only to name it would double the
        work.
        """
        listing = "".join(f"{path.name}\0{path.stat().st_size}\n" for path in self.paths)
        revision = "files:" + hashlib.sha256(listing.encode()).hexdigest()
        return {"dataset": "local files", "config": "", "revision": revision, "column": self.column}

    def batches(self, position: Position | None) -> Iterator[Batch]:
        start = position or {"file": 0}
        return _batches(self._documents(start), start)

    def _documents(self, position: Position) -> Iterator[tuple[str, Position]]:
        for index in range(position["file"], len(self.paths)):
            here = position if index == position["file"] else {}
            with self._opened(index) as path:
                yield from self._in_file(path, index, here)

    @contextlib.contextmanager
    def _opened(self, index: int) -> Iterator[Path]:
        """File number `index`, for as long as it is read."""
        yield self.paths[index]

    def _in_file(self, path: Path, index: int, here: Position) -> Iterator[tuple[str, Position]]:
        """(text, position after it) for the documents of one file from position `here` on."""
        if path.suffix == ".txt":
            yield path.read_bytes().decode("utf-8", "surrogateescape"), {"file": index + 1}
        elif path.suffix == ".jsonl":
            for text, offset in self._lines(path, here.get("byte", 0)):
                yield text, {"file": index, "byte": offset}
        else:
            for row, text in self._rows(path, here.get("row", 0)):
                yield text, {"file": index, "row": row + 1}

    def _lines(self, path: Path, start: int) -> Iterator[tuple[str, int]]:
        """(text, offset after its line) for every line of a .jsonl file from byte `start` on."""
        with open(path, "rb") as f:
            f.seek(start)
            offset = start
            for line in f:
                where = f"{path}, byte {offset}"
                offset += len(line)
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8", "surrogateescape"))
                except ValueError as error:
                    raise user_error(f"{where}: not a line of JSON ({error})") from None
                if not isinstance(row, dict):
                    raise user_error(f"{where}: a line must be a JSON object with a field {self.column!r}")
                yield checked_text(row, self.column, where), offset

    def _rows(self, path: Path, start: int) -> Iterator[tuple[int, str]]:
        """(row number, text) of a .parquet file from row `start` on; row groups before it are not read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path, buffer_size=1 << 20) as file:
                if self.column not in file.schema_arrow.names:
                    raise user_error(f"{path}: no column {self.column!r}, only {', '.join(file.schema_arrow.names)}")
                row = 0
                for group in range(file.num_row_groups):
                    size = file.metadata.row_group(group).num_rows
                    if row + size <= start:
                        row += size
                        continue
                    for table in file.iter_batches(256, row_groups=[group], columns=[self.column]):
                        # As bytes: invalid UTF-8 must reach the replacement, not end the build half-way.
                        for value in table.column(0).cast(pa.large_binary()):
                            if row >= start:
                                yield row, parquet_text(value.as_py(), f"{path}, row {row}")
                            row += 1
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0]
            raise user_error(f"{path}: cannot be read as parquet ({reason})") from None


def parquet_text(value: bytes | None, where: str) -> str:
    """The text of one parquet cell."""
    if value is None:
        raise user_error(f"{where}: the text is null")
    return value.decode("utf-8", "surrogateescape")


def checked_text(row: dict[str, Any], column: str, where: str) -> str:
    """`row[column]`, a string. Raises UserError for a missing field, null or another type."""
    if column not in row:
        raise user_error(f"{where}: no field {column!r}, only {', '.join(map(repr, row)) or 'none'}; see --text-column")
    text = row[column]
    if not isinstance(text, str):
        raise user_error(f"{where}: field {column!r} is {type(text).__name__}, not text")
    return text


class HubDataset:
    """A text data set read through `datasets`, streamed: never whole in memory, never in a cache on disk.

    `dataset` is a name on the hub or a local folder laid out like one. The revision is resolved to a commit
    once, so that a resumed build reads what the first one read. A position is {"state": ..., "documents":
    n}: the state is `IterableDataset.state_dict()`.
    """

    def __init__(self, dataset: str, config: str, split: str, revision: str, column: str = "text"):
        self.dataset, self.config, self.split, self.column = dataset, config, split, column
        self.revision = self._resolve(revision)

    @property
    def identity(self) -> dict[str, str]:
        return {
            "dataset": self.dataset,
            "config": self.config,
            "split": self.split,
            "revision": self.revision,
            "column": self.column,
            "read": "streamed",
        }

    def _resolve(self, revision: str) -> str:
        if Path(self.dataset).is_dir():
            if revision and not revision.startswith("files:"):
                raise user_error(f"{self.dataset} is a local folder, which has no revisions; leave out --revision")
            root = Path(self.dataset)
            files = sorted(p for p in root.rglob("*") if p.is_file() and not p.is_relative_to(root / ".cache"))
            listing = "".join(f"{p.relative_to(root).as_posix()}\0{p.stat().st_size}\n" for p in files)
            return "files:" + hashlib.sha256(listing.encode()).hexdigest()
        from data.hub import resolve_revision

        return resolve_revision(self.dataset, revision)

    def _builder(self) -> Any:
        """The data set as `datasets` knows it before any of it is read. Raises UserError with its reason."""
        try:
            import datasets
        except ImportError:
            raise user_error("reading a data set needs the library `datasets`: pip install datasets") from None
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(logging.CRITICAL)  # it logs each error that it raises
        pinned = {} if self.revision.startswith("files:") else {"revision": self.revision}
        with _one_line(f"{self.dataset} ({self.config or 'default'})"):
            return datasets.load_dataset_builder(self.dataset, name=self.config or None, **pinned)

    def _open(self) -> Any:
        """The IterableDataset, with the text column alone. Raises UserError with the library's reason."""
        builder = self._builder()
        if hasattr(builder.config, "fragment_scan_options"):  # parquet
            import pyarrow.dataset

            # Two defaults make memory grow with the file (measured: docs/data.md): the buffers of row
            # groups that were read are kept until the file ends, and decoded batches are read ahead up to 1
            # GiB.
            options = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False)
            builder.config.fragment_scan_options = options
            builder.config.batch_size = 100
        with _one_line(f"{self.dataset} ({self.config or 'default'})"):
            opened = builder.as_streaming_dataset(split=self.split)
            names = opened.column_names or list(next(iter(opened.take(1)), {self.column: ""}))
        if self.column not in names:
            raise user_error(f"{self.dataset}: no column {self.column!r}, only {', '.join(names)}; see --text-column")
        return opened.select_columns([self.column])

    def file_names(self) -> list[str]:
        """The data files of the configuration and split inside the repository, in the order `datasets`
        reads them.
        """
        files = dict(self._builder().config.data_files or {})
        if self.split not in files:
            raise user_error(f"{self.dataset}: no split {self.split!r}, only {', '.join(map(str, files)) or 'none'}")
        prefix = f"hf://datasets/{self.dataset}@{self.revision}/"
        return [str(name).removeprefix(prefix) for name in files[self.split]]

    def batches(self, position: Position | None) -> Iterator[Batch]:
        opened = self._open()
        if position is None:
            position = {"state": opened.state_dict(), "documents": 0}
        else:
            opened.load_state_dict(position["state"])
        # The position of the first batch is the one that was loaded, word for word: `state_dict()` between
        # `load_state_dict()` and the first read tells the start of the data set, not where reading will go
        # on.
        return self._grouped(opened, position)

    def _grouped(self, opened: Any, start: Position) -> Iterator[Batch]:
        """As `_batches`, but asks for the state once a batch: a copy for every document costs more than
        reading it.
        """
        texts: list[str] = []
        characters = 0
        documents = start["documents"]
        rows = iter(opened)
        while True:
            with _one_line(f"{self.dataset}, after document {documents}"):
                row = next(rows, None)
            if row is None:
                break
            text = checked_text(row, self.column, f"{self.dataset}, document {documents}")
            texts.append(text)
            documents += 1
            characters += len(text) + 1
            if characters >= BATCH_CHARACTERS:
                yield Batch(texts, start)
                texts, characters = [], 0
                start = {"state": opened.state_dict(), "documents": documents}
        if texts:
            yield Batch(texts, start)


class CheckedHubFiles(LocalFiles):
    """The files of a hub data set, downloaded one at a time and compared with the hub's sha256 before they
    are read.

    Streaming reads pieces of files, of which no hash is known: a wrong byte that the parquet reader does
    not stumble over would become text. This source costs the disk space of one file instead. A file is
    removed once it is read.
    """

    def __init__(self, hub: HubDataset, folder: Path):
        if hub.revision.startswith("files:"):
            raise user_error(f"{hub.dataset} is a local folder: there are no hashes to check it against")
        self.column, self._hub, self._folder = hub.column, hub, folder
        self.names = hub.file_names()
        self.paths = [Path(name) for name in self.names]
        self._check_suffixes()

    @property
    def identity(self) -> dict[str, str]:
        return {**self._hub.identity, "read": "checked"}

    @contextlib.contextmanager
    def _opened(self, index: int) -> Iterator[Path]:
        from data.hub import describe_files, download, sha256_of, with_retries

        dataset, commit = self._hub.dataset, self._hub.revision
        [file] = describe_files(dataset, commit, [self.names[index]])
        whole = self._folder / f".source-{file.sha256[:16]}{self.paths[index].suffix}"
        if not whole.is_file() or sha256_of(whole) != file.sha256:
            growing = whole.with_suffix(".download")  # kept when a build is killed: the next one goes on with it
            free = shutil.disk_usage(self._folder).free
            if file.bytes > free:
                raise user_error(f"{self._folder}: {file.name} needs {file.bytes:,} bytes, {free:,} are free")
            stop = threading.Event()
            with_retries(f"{dataset}/{file.name}", lambda: download(dataset, commit, file, growing, stop))
            os.replace(growing, whole)
        yield whole
        whole.unlink()


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn what `datasets` and the hub raise for a wrong name, a missing file or a dead network into one
    line.
    """
    import httpx2  # what huggingface_hub 2 speaks HTTP with
    import pyarrow as pa

    try:
        yield
    except (OSError, ValueError, LookupError, RuntimeError, httpx2.HTTPError, pa.ArrowException) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise user_error(f"{what}: {reason.strip()}") from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("datasets", "huggingface_hub"):
            raise
        raise user_error(f"{what}: {str(error).splitlines()[0]}") from error
