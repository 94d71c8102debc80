"""`python -m data build`: the same bytes whatever happens, from local files."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data_helpers import ROOT, environment, kill_after, mounted, run_data

import data.sources
from data.build import build, read_progress
from data.checks import documents
from data.format import list_shards
from data.sample import sample_documents
from data.sources import LocalFiles
from data.tokenizer import gpt2_encoding
from train_gpt2 import UserError

ODD = [
    "",
    "a",  # one token
    "The end.<|endoftext|>Not the end.",
    "tail\ud800 and \udfff",
    "nul\0nul",
    "שלום עולם مرحبا 😀🧑‍🚀",
    "",
    "\n\n   \t\r\n",
    "word " * 3_000,  # longer than the shards below
    "last",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The addresses cut into 3,100 documents, as .jsonl."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with path.open("w") as f:
        for _, text in sample_documents():
            for i in range(0, len(text), 4000):
                f.write(json.dumps({"text": text[i : i + 4000]}) + "\n")
    return path


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an unbroken build of the corpus."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = run_data("build", "--files", corpus, "--out", out, "--workers", 2, "--shard-tokens", "250K")
    assert done.returncode == 0, done.stderr
    return contents(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def texts_of(folder: Path) -> list[str]:
    """Every document of a built set, decoded; each must start with 50256."""
    found = list(documents(list_shards(folder)))
    assert all(tokens[0] == 50256 and (tokens[1:] != 50256).all() for tokens in found)
    return [gpt2_encoding().decode_bytes(tokens[1:].tolist()).decode() for tokens in found]


def reference(texts: list[str]) -> np.ndarray:
    """The stream by the plainest loop: llm.c's tokenize over the texts."""
    ids = [[50256, *gpt2_encoding().encode_ordinary(text)] for text in texts]
    return np.array([token for one in ids for token in one])


def stream(folder: Path) -> np.ndarray:
    parts = [np.frombuffer(path.read_bytes()[1024:], "<u2") for path in list_shards(folder)]
    return np.concatenate(parts)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_any_number_of_workers_gives_the_same_bytes(corpus: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    for workers in (1, 3):
        out = tmp_path / str(workers)
        build(LocalFiles([str(corpus)]), out, workers, 250_000)
        assert contents(out) == whole
    texts = [json.loads(line)["text"] for line in corpus.open()]
    assert (stream(out) == reference(texts)).all()
    assert texts_of(out) == texts
    manifest = json.loads(whole["manifest.json"])
    assert sum(s["documents"] for s in manifest["shards"]) == len(texts)
    assert {s["tokens"] for s in manifest["shards"][:-1]} == {250_000}
    assert [s["file"].split("_")[-2] for s in manifest["shards"]] == ["val"] + ["train"] * (len(whole) - 2)


@pytest.mark.parametrize("shard_tokens", [40, 2_500, 10**8])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_documents_of_every_kind(tmp_path: Path, shard_tokens: int, suffix: str) -> None:
    if suffix == "jsonl":
        path = write_jsonl(tmp_path / "odd.jsonl", ODD)
        replaced = 2
        expected = [text.replace("\ud800", "�").replace("\udfff", "�") for text in ODD]
    else:  # parquet holds bytes, and a writer in another language may have put three per surrogate
        path = tmp_path / "odd.parquet"
        column = pa.array([text.encode("utf-8", "surrogatepass") for text in ODD])
        table = pa.table({"id": list(range(len(ODD))), "text": column.view(pa.string())})
        pq.write_table(table, path, row_group_size=3)
        replaced = 6
        expected = [text.replace("\ud800", "�" * 3).replace("\udfff", "�" * 3) for text in ODD]
    out = tmp_path / "out"
    manifest, _ = build(LocalFiles([str(path)]), out, 1, shard_tokens)
    assert texts_of(out) == expected
    assert (stream(out) == reference(expected)).all()
    assert manifest.replaced == replaced
    assert all(shard.tokens == shard_tokens for shard in manifest.shards[:-1])
    assert manifest.shards[-1].tokens > 0


def test_replacements_are_said(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "odd.jsonl", ODD)
    done = run_data("build", "--files", path, "--out", tmp_path / "out", "--workers", 1, "--shard-tokens", 1000)
    assert done.returncode == 0
    assert "note: 2 characters" in done.stderr


def test_text_files_are_one_document_each(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"two\r\nlines\n")
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")  # Latin-1, not UTF-8
    manifest, _ = build(LocalFiles([str(tmp_path / "*.txt")]), tmp_path / "out", 1, 1000)
    assert texts_of(tmp_path / "out") == ["caf�", "two\r\nlines\n"]
    assert manifest.replaced == 1


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("text", ["prose", "a", "😀"])
def test_fifty_megabytes_in_one_line(tmp_path: Path, text: str) -> None:
    prose = " ".join(t for _, t in sample_documents()).replace("\n", " ")
    unit = prose if text == "prose" else text
    line = unit * (50_000_000 // len(unit.encode()) + 1)
    path = write_jsonl(tmp_path / "long.jsonl", ["before", line, "after"])
    build(LocalFiles([str(path)]), tmp_path / "out", 2, 3_000_000)
    assert texts_of(tmp_path / "out") == ["before", line, "after"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_a_source_goes_on_from_every_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(data.sources, "BATCH_CHARACTERS", 10)
    texts = [f"document {i} " * (i % 3) for i in range(23)]
    parts = [texts[:11], texts[11:]]
    if kind == "txt":
        paths = [tmp_path / f"{i:03d}.txt" for i in range(23)]
        for path, text in zip(paths, texts):
            path.write_text(text)
    else:
        paths = [tmp_path / f"{i}.{kind}" for i in range(2)]
        for path, part in zip(paths, parts):
            if kind == "jsonl":
                write_jsonl(path, part)
            else:
                pq.write_table(pa.table({"text": part}), path, row_group_size=4)
    source = LocalFiles([str(path) for path in paths])
    batches = list(source.batches(None))
    assert [text for batch in batches for text in batch.texts] == texts and len(batches) > 10
    for i, batch in enumerate(batches):
        position = json.loads(json.dumps(batch.start))
        again = list(source.batches(position))
        assert again == batches[i:]


def _resume_everywhere(source: Any, folder: Path, shard_tokens: int, max_tokens: int = 0) -> None:
    """Stop a build behind each shard in turn, resume it every time, compare with the unbroken one."""
    build(source, folder / "whole", 1, shard_tokens, max_tokens)
    broken = folder / "broken"
    stops = 0
    while True:
        with _stopped_behind_one_more_shard(stops):
            try:
                build(source, broken, 1, shard_tokens, max_tokens)
                break
            except _Stop:
                stops += 1
                assert not (broken / "manifest.json").exists()
    assert contents(broken) == contents(folder / "whole")
    assert stops == len(list_shards(broken)) - 1 or stops == len(list_shards(broken))


class _Stop(Exception):
    pass


@contextmanager
def _stopped_behind_one_more_shard(before: int = 0) -> Iterator[None]:
    """A build ends right after it has recorded more than `before` shards, as if killed there."""
    import data.build as module

    real = module.write_progress

    def save_and_stop(folder: Path, progress: module.Progress) -> None:
        real(folder, progress)
        if len(progress.shards) > before:
            raise _Stop

    module.write_progress = save_and_stop
    try:
        yield
    finally:
        module.write_progress = real


@pytest.mark.parametrize("shard_tokens", [50, 1_000])
def test_resumed_behind_every_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_tokens: int) -> None:
    """Documents longer than a shard, empty ones at its edge, replaced characters: counted once, written
    once.
    """
    monkeypatch.setattr(data.sources, "BATCH_CHARACTERS", 2_000)
    texts = [*ODD[:8], "word " * 300, *ODD[:8], "x\udc80" * 40, "last"]
    _resume_everywhere(LocalFiles([str(write_jsonl(tmp_path / "odd.jsonl", texts))]), tmp_path, shard_tokens)


@pytest.mark.parametrize("max_tokens", [8, 10, 12, 13, 17])
def test_resumed_up_to_a_token_limit(tmp_path: Path, max_tokens: int) -> None:
    """Limits inside a shard, inside a document that straddles, and exactly where both end (12)."""
    path = write_jsonl(tmp_path / "n.jsonl", ["some text"] * 20)  # 3 tokens each
    _resume_everywhere(LocalFiles([str(path)]), tmp_path, 4, max_tokens)
    assert len(stream(tmp_path / "broken")) == -(-max_tokens // 3) * 3


def test_killed_between_the_first_shard_and_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import data.build as module

    source = LocalFiles([str(write_jsonl(tmp_path / "a.jsonl", ["some text"] * 50))])
    build(source, tmp_path / "whole", 1, 20)
    real, calls = module.write_progress, []

    def only_once(folder: Path, progress: module.Progress) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise _Stop
        real(folder, progress)

    monkeypatch.setattr(module, "write_progress", only_once)
    with pytest.raises(_Stop):
        build(source, tmp_path / "out", 1, 20)
    monkeypatch.setattr(module, "write_progress", real)
    assert [p.name for p in list_shards(tmp_path / "out")] == ["local_files_val_000000.bin"]
    build(source, tmp_path / "out", 1, 20)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_what_was_read_before_an_error_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.sources, "BATCH_CHARACTERS", 10)
    path = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 50)
    good = path.read_bytes()
    path.write_bytes(good + b"{\n")
    with pytest.raises(UserError, match="not a line of JSON"):
        build(LocalFiles([str(path)]), tmp_path / "out", 1, 20)
    assert len(list_shards(tmp_path / "out")) == 150 // 20  # 3 tokens a document, and no part of a shard
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_token_limit_ends_with_a_whole_document(tmp_path: Path) -> None:
    texts = [f"number {i} and so on" for i in range(100)]
    path = write_jsonl(tmp_path / "n.jsonl", texts)
    build(LocalFiles([str(path)]), tmp_path / "out", 1, 64, max_tokens=200)
    found = texts_of(tmp_path / "out")
    assert found == texts[: len(found)]
    assert len(reference(found)) >= 200 > len(reference(found[:-1]))


def _kill_loop(corpus: Path, whole: dict[str, bytes], out: Path, kills: int, seed: int) -> None:
    """Kill builds at `kills` random moments; one that gets to its end is checked, and a new one is begun."""
    draw = random.Random(seed)
    args = ("build", "--files", corpus, "--out", out, "--workers", 2, "--shard-tokens", "250K")
    written: dict[str, int] = {}  # inodes of the shards that are on record
    killed = 0
    while killed < kills:
        if kill_after(draw.uniform(0.1, 2.0), *args):
            killed += 1
        else:
            assert contents(out) == whole
            shutil.rmtree(out)
            written.clear()
            continue
        for path in out.glob("*.bin"):
            assert path.read_bytes() == whole[path.name]
        progress = read_progress(out) if out.is_dir() else None
        for shard in progress.shards if progress else []:  # not written again: still the same file
            inode = os.stat(out / shard.file).st_ino
            assert written.setdefault(shard.file, inode) == inode
    done = run_data(*args)
    assert done.returncode == 0, done.stderr
    assert contents(out) == whole
    assert all(os.stat(out / name).st_ino == inode for name, inode in written.items())


def test_killed_build_goes_on(corpus: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    _kill_loop(corpus, whole, tmp_path / "out", kills=2, seed=3)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_twenty_kills_of_a_build(corpus: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    _kill_loop(corpus, whole, tmp_path / "out", kills=20, seed=4)


def test_workers_end_with_a_killed_parent(corpus: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data", "build", "--files", str(corpus), "--out", str(tmp_path / "out")]
    parent = subprocess.Popen([*command, "--workers", "2"], cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    workers: list[psutil.Process] = []
    while len(workers) < 2:
        assert parent.poll() is None
        children = psutil.Process(parent.pid).children(recursive=True)
        workers = [child for child in children if "--multiprocessing-fork" in child.cmdline()]
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []


def test_full_disk(corpus: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """A disk with room for four shards: one line, only whole files; with more room the build goes on."""
    out = tmp_path / "disk"
    out.mkdir()
    with mounted(["mount", "-t", "tmpfs", "-o", "size=2200k", "tmpfs", str(out)], out):
        args = ("build", "--files", corpus, "--out", out, "--workers", 1, "--shard-tokens", "250K")
        done = run_data(*args)
        assert done.returncode == 7, done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert "No space left" in done.stderr and str(out) in done.stderr
        left = contents(out)
        finished = [name for name in left if name.endswith(".bin")]
        assert 3 <= len(finished) <= 4 and all(left[name] == whole[name] for name in finished)
        assert set(left) - set(finished) == {".build.json"}
        subprocess.run(["mount", "-o", "remount,size=20m", str(out)], check=True)
        assert run_data(*args).returncode == 0
        assert contents(out) == whole


def test_read_only_folder(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "disk"
    out.mkdir()
    with mounted(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(out)], out):
        for args in (("build", "--files", corpus, "--out", out), ("sample", "--out", out / "new")):
            done = run_data(*args)
            assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
            assert done.stderr.startswith(f"error: {args[-1]}") and "Read-only" in done.stderr
        assert contents(out) == {}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ('{"text": "a"}\n{"text": \n', "byte 14: not a line of JSON"),
        ('{"text": null}\n', "NoneType, not text"),
        ('{"body": "a"}\n', "no field 'text', only 'body'"),
        ("[1]\n", "must be a JSON object"),
        ("", "no documents"),
    ],
)
def test_wrong_lines(tmp_path: Path, lines: str, says: str) -> None:
    (tmp_path / "x.jsonl").write_text(lines)
    with pytest.raises(UserError, match=says):
        build(LocalFiles([str(tmp_path / "x.jsonl")]), tmp_path / "out", 1, 1000)
    assert not (tmp_path / "out").exists()


def test_wrong_files(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"<html>")
    (tmp_path / "x.csv").write_text("text\na\n")
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "y.parquet")
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "z.parquet")
    for name, says in (
        ("nothing.txt", "no such file"),
        ("x.csv", "cannot be read as documents"),
        ("x.parquet", "cannot be read as parquet"),
        ("y.parquet", "no column 'text', only body"),
        ("z.parquet", "row 1: the text is null"),
    ):
        with pytest.raises(UserError, match=says):
            build(LocalFiles([str(tmp_path / name)]), tmp_path / "out", 1, 1000)


def test_a_folder_in_other_use_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 50)
    source = LocalFiles([str(path)])
    out = tmp_path / "out"
    build(source, out, 1, 20)
    before = contents(out)
    with pytest.raises(UserError, match="shard_tokens 20 there, 30 asked for"):
        build(source, out, 1, 30)
    assert build(source, out, 1, 20)[1] is False
    assert contents(out) == before
    (out / "manifest.json").unlink()
    with pytest.raises(UserError, match="unknown origin"):
        build(source, out, 1, 20)
    with _stopped_behind_one_more_shard(), pytest.raises(_Stop):
        build(source, tmp_path / "half", 1, 20)
    other = LocalFiles([str(write_jsonl(tmp_path / "b.jsonl", ["other"]))])
    with pytest.raises(UserError, match="unfinished build of another set"):
        build(other, tmp_path / "half", 1, 20)
    list_shards(tmp_path / "half")[0].write_bytes(b"")
    with pytest.raises(UserError, match="too short"):
        build(source, tmp_path / "half", 1, 20)


def test_two_builds_at_once_are_refused(tmp_path: Path) -> None:
    from data.build import locked

    path = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 50)
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"), pytest.raises(UserError, match="another process"):
        build(LocalFiles([str(path)]), tmp_path / "out", 1, 20)


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--out", "x"),
        ("--out", "x", "--files", "nothing.txt"),
        ("--out", "x", "--files", "a.jsonl", "--dataset", "b/c"),
        ("--out", "x", "--files", "a.jsonl", "--revision", "main"),
        ("--out", "x", "--files", "a.jsonl", "--workers", "0"),
        ("--out", "x", "--files", "a.jsonl", "--shard-tokens", "many"),
    ],
)
def test_wrong_command_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from data.__main__ import main

    monkeypatch.chdir(tmp_path)
    try:
        code: Any = main(["build", *args])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
