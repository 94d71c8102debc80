"""`python -m data bench`: how fast `build` is against a plain tokenization loop, and how much memory it
takes.

The text is the sample's addresses cut into documents of about 3,000 characters (FineWeb's average is near),
repeated to the size asked for, in one parquet file. Both sides read that file and write nothing else than
token shards. The plain loop is the one of llm.c's `dev/data/fineweb.py`: a pool of (cores - 2, at least 1)
processes that returns a list of ids per document turned into an array, 16 documents at a time, a progress
bar, a list per shard. It is also run with as many processes as `build` gets, so that the gain from using
all cores and the gain from the work itself can be told apart.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
from tqdm import tqdm

from data.errors import user_error
from data.format import EOT, list_shards, read_header, write_shard

DOCUMENT_CHARACTERS = 3_000
SHARD_TOKENS = 10_000_000
_TOKENS_PER_CHARACTER = 2_388_908 / 12_185_751  # of the sample's text
_POLL_S = 0.02


@dataclass(frozen=True)
class Measured:
    """One run: tokens written, seconds, processor seconds and peak resident bytes of the whole process
    tree.
    """

    tokens: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def write_corpus(path: Path, tokens: int) -> None:
    """A parquet file with about `tokens` tokens of text in FineWeb-like documents, written piece by piece."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from data.sample import sample_documents

    texts = [
        text[i : i + DOCUMENT_CHARACTERS] for _, text in sample_documents() for i in range(0, len(text), DOCUMENT_CHARACTERS)
    ]
    wanted = tokens / _TOKENS_PER_CHARACTER
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        written = 0
        while written < wanted:
            piece: list[str] = []
            for text in texts:
                if written >= wanted:
                    break
                piece.append(text)
                written += len(text)
            writer.write_table(pa.table({"text": piece}, schema), row_group_size=1000)


def _plain_rows(path: Path) -> Iterator[dict[str, str]]:
    import pyarrow.parquet as pq

    for table in pq.ParquetFile(path).iter_batches(1000):
        yield from table.to_pylist()


def _plain_tokenize(row: dict[str, str]) -> np.ndarray:
    """llm.c dev/data/fineweb.py, tokenize_gpt2."""
    from data.tokenizer import gpt2_encoding

    tokens = [EOT]
    tokens.extend(gpt2_encoding().encode_ordinary(row["text"]))
    tokens_T = np.array(tokens)
    assert (tokens_T >= 0).all() and (tokens_T < 2**16).all()
    return tokens_T.astype(np.uint16)


def plain_build(corpus: Path, folder: Path, processes: int) -> None:
    """The main loop of llm.c dev/data/fineweb.py: a buffer of one shard, filled document by document, with
    a progress bar that moves with each of them; a shard passes through a list on its way to the file."""
    buffer = np.empty(SHARD_TOKENS, np.uint16)
    filled = index = 0

    def write(tokens_T: np.ndarray) -> None:
        write_shard(folder / f"plain_train_{index:06d}.bin", np.array(tokens_T.tolist(), np.uint16))

    with multiprocessing.Pool(processes) as pool, tqdm(unit="tokens", disable=False) as bar:
        for tokens_T in pool.imap(_plain_tokenize, _plain_rows(corpus), chunksize=16):
            bar.update(len(tokens_T))
            if filled + len(tokens_T) >= SHARD_TOKENS:
                rest = SHARD_TOKENS - filled
                buffer[filled:] = tokens_T[:rest]
                write(buffer)
                index += 1
                tokens_T = tokens_T[rest:]
                filled = 0
            buffer[filled : filled + len(tokens_T)] = tokens_T
            filled += len(tokens_T)
    if filled:
        write(buffer[:filled])


def _watch_memory(pid: int, stop: threading.Event, peak: list[int]) -> None:
    """Keep the largest sum of resident memory of a process and its descendants in peak[0]."""
    root = psutil.Process(pid)
    while not stop.wait(_POLL_S):
        total = 0
        try:
            for process in [root, *root.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    pass
        except psutil.NoSuchProcess:
            return
        peak[0] = max(peak[0], total)


def measure(command: list[str], folder: Path) -> Measured:
    """Run a command that leaves shards in `folder`; the time includes starting Python, the memory every
    child.
    """
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    stop, peak = threading.Event(), [0]
    watcher = threading.Thread(target=_watch_memory, args=(process.pid, stop, peak))
    watcher.start()
    _, errors = process.communicate()
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    stop.set()
    watcher.join()
    if process.returncode:
        raise user_error(f"the benchmark's own run failed: {errors.strip().splitlines()[-1:]}")
    tokens = sum(read_header(path) for path in list_shards(folder))
    return Measured(tokens, seconds, cpu_seconds, peak[0])


def _same_tokens(one: Path, other: Path) -> bool:
    """Whether two folders hold the same token stream, shard for shard."""
    pairs = zip(list_shards(one), list_shards(other), strict=True)
    return all(a.read_bytes() == b.read_bytes() for a, b in pairs)


def processor() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def bench(tokens: int, workers: int, json_path: Path | None = None) -> int:
    """Print the speed of `build` and of the plain loop on the same text, and the memory of `build` at two
    sizes.
    """
    import data.build  # noqa: F401  so that compiled files exist before the clock runs

    cores = os.cpu_count() or 1
    plain_processes = max(1, cores - 2)  # llm.c dev/data/fineweb.py
    here = [sys.executable, "-m"]
    results: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as scratch:
        corpora = {name: Path(scratch) / name / "train-00000.parquet" for name in ("whole", "quarter")}
        for corpus, size in ((corpora["whole"], tokens), (corpora["quarter"], tokens // 4)):
            corpus.parent.mkdir()
            write_corpus(corpus, size)

        def run_build(name: str, *source: str) -> None:
            command = [*here, "data", "build", *source, "--out", str(Path(scratch) / name)]
            command += ["--workers", str(workers), "--shard-tokens", str(SHARD_TOKENS)]
            results[name] = measure(command, Path(scratch) / name)

        def run_plain(name: str, processes: int) -> None:
            folder = Path(scratch) / name
            folder.mkdir()
            command = [*here, "data.bench", str(corpora["whole"]), str(folder), str(processes)]
            results[name] = measure(command, folder)

        run_plain("plain", plain_processes)
        run_build("build", "--files", str(corpora["whole"]))
        run_plain("plain, all cores", workers)
        run_build("build, quarter", "--files", str(corpora["quarter"]))
        if importlib.util.find_spec("datasets"):
            run_build("datasets", "--dataset", str(corpora["whole"].parent))
            run_build("datasets, quarter", "--dataset", str(corpora["quarter"].parent))
        if not _same_tokens(Path(scratch) / "plain", Path(scratch) / "build"):
            raise user_error("build and the plain loop wrote different tokens: one of them is wrong, please report it")
    print(f"{processor()}, {cores} cores; tokens of both sides equal")
    for name, run in results.items():
        print(
            f"{name:18} {run.tokens:12,} tokens {run.seconds:7.1f} s {run.tokens_per_s / 1e6:6.2f}M tokens/s "
            f"{run.cpu_seconds:6.1f} CPU s {run.peak_bytes / 2**20:6.0f} MiB"
        )
    ratio = results["build"].tokens_per_s / results["plain"].tokens_per_s
    equal = results["build"].tokens_per_s / results["plain, all cores"].tokens_per_s
    print(f"build is {ratio:.2f}x as fast as the plain loop with its {plain_processes} process, ", end="")
    print(f"{equal:.2f}x with {workers} processes on both sides")
    growth = {}
    for name in ("build", "datasets"):
        if name in results:
            growth[name] = results[name].peak_bytes / results[f"{name}, quarter"].peak_bytes
            print(f"memory of {name} at four times the text: {growth[name]:.2f}x")
    if json_path is not None:
        rows = {name: asdict(run) for name, run in results.items()}
        summary = {"processor": processor(), "cores": cores, "ratio": ratio, "ratio_all_cores": equal}
        json_path.write_text(json.dumps({"schema": 1, **summary, "memory_growth": growth, "runs": rows}, indent=1))
    return 0


if __name__ == "__main__":
    plain_build(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
