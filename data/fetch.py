"""`python -m data fetch`: shards that somebody has tokenized already, from the Hugging Face hub.

Every file is checked against the sha256 of the hub's LFS store before it gets its final name, and against the
manifest ever after. Downloads go on where they were cut, within a run and across runs.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from data.build import locked
from data.errors import user_error
from data.format import HEADER_BYTES, PARTIAL_SUFFIX, SHARD_NAME, Shard, fsync_dir, verify_shard
from data.hub import (
    RETRIES,
    RemoteFile,
    download,
    list_files,
    resolve_revision,
    sha256_of,
    with_retries,
)
from data.manifest import Manifest, read_manifest, write_manifest

# modded-nanogpt data/cached_fineweb10B.py, cached_fineweb100B.py, cached_finewebedu10B.py
KNOWN = {
    "fineweb10B": "kjj0/fineweb10B-gpt2",
    "fineweb100B": "kjj0/fineweb100B-gpt2",
    "finewebedu10B": "kjj0/finewebedu10B-gpt2",
}
CONNECTIONS = 8
_SPARE_BYTES = 64 << 20  # left free beside what is downloaded: manifest, other programs


@dataclass(frozen=True)
class Wanted:
    """Which shards to fetch: every val shard, and train shards until both limits are met (0: no limit)."""

    tokens: int = 0
    shards: int = 0

    def choose(self, files: list[RemoteFile]) -> list[RemoteFile]:
        """The files to fetch, in order. Raises UserError where the data set has fewer than asked for."""
        named = sorted((m["split"] != "val", int(m["index"]), f) for f in files if (m := SHARD_NAME.fullmatch(f.name)))
        val = [f for is_train, _, f in named if not is_train]
        train = [f for is_train, _, f in named if is_train]
        if not train:
            raise user_error("no shards in this data set (files named NAME_train_000001.bin)")
        count = self.shards or len(train)
        if self.tokens:
            count, reached = 0, 0
            while reached < self.tokens and count < len(train):
                reached += (train[count].bytes - HEADER_BYTES) // 2
                count += 1
            if reached < self.tokens:
                raise user_error(f"the data set has {reached:,} train tokens, fewer than {self.tokens:,}; ask for less")
        if count > len(train):
            raise user_error(f"the data set has {len(train)} train shards, fewer than {count}; ask for less")
        return val + train[:count]


@dataclass(frozen=True)
class Fetcher:
    """Downloads files of one commit of a data set into `folder`."""

    dataset: str
    commit: str
    folder: Path
    retries: int
    stop: threading.Event

    def partial(self, file: RemoteFile) -> Path:
        """Where a file grows. Named after its hash, so that bytes of two versions are never put together."""
        return self.folder / f".{file.name}.{file.sha256[:16]}{PARTIAL_SUFFIX}"

    def get(self, file: RemoteFile, recorded: bool) -> Shard:
        """Have `file` in the folder, whole and verified. `recorded`: the manifest says that it was fetched
        before.
        """
        path = self.folder / file.name
        if path.is_file():
            if sha256_of(path) == file.sha256:
                return verify_shard(path, full=True)
            if not recorded:
                raise user_error(f"{path}: not the hub's file of this name; move it away or choose another --out")
            tqdm.write(f"{path}: damaged, fetching it again")
        with_retries(
            f"{self.dataset}/{file.name}",
            lambda: download(self.dataset, self.commit, file, self.partial(file), self.stop),
            self.retries,
            self.stop,
        )
        partial = self.partial(file)
        shard = verify_shard(partial, full=True)
        os.replace(partial, path)
        fsync_dir(self.folder)
        return Shard(file.name, shard.tokens, shard.documents, shard.sha256, shard.bytes)


def _sizes(paths: list[tuple[Path, Path]]) -> Iterator[int]:
    for path in (p for pair in paths for p in pair):
        try:
            yield path.stat().st_size
        except FileNotFoundError:
            pass


def fetch(
    dataset: str,
    folder: Path,
    wanted: Wanted,
    revision: str = "",
    connections: int = CONNECTIONS,
    retries: int = RETRIES,
) -> Manifest:
    """Fetch shards of a data set into `folder`, in parallel; what is there already is verified instead.

    Without `revision` the first fetch takes the newest and records its commit in the manifest; later ones
    keep to it. Raises UserError; OSError for a full disk. Whatever happens, files with a final name are
    whole and verified.
    """
    repository = KNOWN.get(dataset, dataset)
    if "/" not in repository:
        raise user_error(f"{dataset}: unknown data set; known are {', '.join(KNOWN)}, others go by OWNER/NAME")
    before = read_manifest(folder)
    if before is not None and before.dataset != repository:
        raise user_error(f"{folder}: holds shards of {before.dataset}; choose another --out")
    commit = before.revision if before and not revision else ""
    commit = commit or resolve_revision(repository, revision, retries)
    if before is not None and before.revision != commit:
        raise user_error(
            f"{folder}: holds revision {before.revision}, not {commit}; leave out --revision or choose another --out"
        )
    files = wanted.choose(list_files(repository, commit, retries))
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        stop = threading.Event()
        fetcher = Fetcher(repository, commit, folder, retries, stop)
        shards = {shard.file: shard for shard in before.shards} if before is not None else {}
        _check_disk(fetcher, files)

        def record() -> Manifest:
            manifest = Manifest(repository, "", commit, "", [shards[name] for name in sorted(shards, key=_order)])
            write_manifest(folder, manifest)
            return manifest

        record()  # the commit is pinned from here on, even if this run is killed
        places = [(folder / file.name, fetcher.partial(file)) for file in files]
        bar = tqdm(
            total=sum(file.bytes for file in files),
            unit="B",
            unit_scale=True,
            disable=None,
            desc=f"{len(files)} files",
        )
        with ThreadPoolExecutor(connections) as pool:
            futures = {pool.submit(fetcher.get, file, file.name in shards): file for file in files}
            try:
                pending = set(futures)
                while pending:
                    done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
                    bar.update(min(sum(_sizes(places)), bar.total) - bar.n)
                    for future in done:
                        shards[futures[future].name] = future.result()
                    if done:
                        record()
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)
                bar.close()
        return record()


def _order(name: str) -> tuple[bool, str]:
    match = SHARD_NAME.fullmatch(name)
    return (match is None or match["split"] == "train", name)


def _check_disk(fetcher: Fetcher, files: list[RemoteFile]) -> None:
    """Raise UserError where the folder's disk cannot hold what is still missing."""
    missing = 0
    for file in files:
        if not (fetcher.folder / file.name).is_file():
            missing += file.bytes - sum(_sizes([(fetcher.partial(file),) * 2])) // 2
    free = shutil.disk_usage(fetcher.folder).free
    if missing and missing + _SPARE_BYTES > free:
        raise user_error(
            f"{fetcher.folder}: {missing / 1e9:.2f} GB are missing but only {free / 1e9:.2f} GB are free; "
            "free some space, ask for fewer --tokens, or choose another --out"
        )
