"""verify, stats, peek and leak, on sets whose faults and leaks were put there by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from data.__main__ import main
from data.checks import Lengths, document_lengths, documents, verify
from data.format import list_shards, write_shard
from data.leak import find_leaks, fingerprints
from data.manifest import Manifest, write_manifest
from train_gpt2 import UserError


def make_set(folder: Path, shards: list[list[int]], manifest: bool = True) -> Path:
    """Shards 0 (val), 1, 2, ... with the given tokens."""
    folder.mkdir(exist_ok=True)
    made = [
        write_shard(folder / f"x_{'train' if i else 'val'}_{i:06d}.bin", np.array(tokens, np.int64))
        for i, tokens in enumerate(shards)
    ]
    if manifest:
        write_manifest(folder, Manifest("d", "", "", "", made))
    return folder


def test_verify_finds_each_fault(tmp_path: Path) -> None:
    tokens = [[50256, 1, 2, 3], [4, 50256, 5], [50256, 6]]

    def fresh(name: str) -> Path:
        return make_set(tmp_path / name, tokens)

    assert verify(fresh("good")) == verify(fresh("good"), full=True) == []

    same_size = fresh("flip") / "x_train_000001.bin"
    content = bytearray(same_size.read_bytes())
    content[-2:] = (7).to_bytes(2, "little")
    same_size.write_bytes(content)
    assert verify(same_size.parent) == []  # only every byte shows it
    assert [p.split(": ")[1].split()[0] for p in verify(same_size.parent, full=True)] == ["sha256"]

    (fresh("gone") / "x_train_000002.bin").unlink()
    assert "x_train_000002.bin: missing" in verify(tmp_path / "gone")[0]

    cut = fresh("cut") / "x_val_000000.bin"
    cut.write_bytes(cut.read_bytes()[:-2])
    other = tmp_path / "cut" / "x_train_000001.bin"
    write_shard(other, np.array([50256] * 9))
    problems = verify(tmp_path / "cut")
    assert len(problems) == 2 and "x_val_000000.bin: header says 4" in problems[0] and "tokens 9" in problems[1]

    write_shard(fresh("more") / "x_train_000003.bin", np.array([50256]))
    assert "x_train_000003.bin: not in manifest.json" in verify(tmp_path / "more")[0]

    headless = make_set(tmp_path / "headless", [[1, 50256], [2]])
    assert verify(headless) == [] and "does not start with a document" in verify(headless, full=True)[0]

    (make_set(tmp_path / "alien", tokens, manifest=False) / "x_train_000001.bin").write_bytes(
        (tmp_path / "good" / "x_train_000001.bin").read_bytes()[:-2] + (60000).to_bytes(2, "little")
    )
    assert "token id 60000" in verify(tmp_path / "alien", full=True)[0]
    with pytest.raises(UserError, match="no such folder"):
        verify(tmp_path / "nowhere")


def test_verify_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_set(tmp_path / "set", [[50256, 1], [50256, 2]])
    assert main(["verify", str(folder), "--full"]) == 0
    assert json.loads((folder / "manifest.json").read_text())["fingerprint"] in capsys.readouterr().out
    (folder / "x_train_000001.bin").unlink()
    assert main(["verify", str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {folder / 'x_train_000001.bin'}: missing")


SHARDS = [[50256, 1, 2, 50256], [50256, 3], [4, 5, 6], [7, 50256, 50256, 8]]
DOCUMENTS = [[50256, 1, 2], [50256], [50256, 3, 4, 5, 6, 7], [50256], [50256, 8]]


@pytest.mark.parametrize("piece", [1, 2, 3, 100])
def test_documents_are_put_together_across_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    import data.format

    monkeypatch.setattr(data.format.chunks, "__defaults__", (piece,))
    folder = make_set(tmp_path, SHARDS)
    assert [d.tolist() for d in documents(list_shards(folder))] == DOCUMENTS
    assert document_lengths(list_shards(folder)).tolist() == [len(d) - 1 for d in DOCUMENTS]
    train = list_shards(folder, "train")[1:]  # begins inside a document
    assert [d.tolist() for d in documents(train)] == [[4, 5, 6, 7], [50256], [50256, 8]]
    assert document_lengths(train).tolist() == [4, 0, 1]


def test_lengths() -> None:
    summary = Lengths.of(np.arange(101))
    assert (summary.documents, summary.tokens, summary.mean) == (101, 5050 + 101, 50.0)
    assert summary.percentiles == {0: 0, 5: 5, 25: 25, 50: 50, 75: 75, 95: 95, 100: 100}


def test_stats_and_peek(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    text = [15496, 995]  # "Hello world"
    folder = make_set(tmp_path / "set", [[50256, *text, 50256], [*text, *text, 50256]])
    assert main(["stats", str(folder), "--picture", str(tmp_path / "p.png")]) == 0
    out = capsysbinary.readouterr().out.decode()
    assert "4 tokens" in out and "5 tokens" in out and "documents  3, 2 tokens each" in out
    assert "0%: 0" in out and "100%: 4" in out
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["stats", str(folder), "--picture", str(tmp_path / "p.jpx")]) == 2
    assert capsysbinary.readouterr().err.count(b"\n") == 1
    assert main(["stats", str(make_set(tmp_path / "empty", [[]]))]) == 0
    assert b"documents  0" in capsysbinary.readouterr().out
    for number, expected in enumerate([b"Hello world\n", b"Hello worldHello world\n", b"\n"]):
        assert main(["peek", str(folder), "--doc", str(number)]) == 0
        assert capsysbinary.readouterr().out == expected
    for number in ("3", "-1"):
        assert main(["peek", str(folder), "--doc", number]) == 2
        assert b"3 documents" in capsysbinary.readouterr().err
    assert main(["peek", str(tmp_path / "none")]) == 2


def test_peek_into_a_closed_pipe(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", [[50256] + [15496] * 100_000])
    import subprocess
    import sys

    from test_data_helpers import ROOT

    line = f"{sys.executable} -m data peek {folder} | head -c 5"
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "Hello" and "Traceback" not in done.stderr


def test_fingerprints_depend_on_their_ngram_alone() -> None:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 50257, 5_000).astype(np.uint16)
    hashes = fingerprints(tokens, 13)
    assert len(hashes) == 5_000 - 12 and len(np.unique(hashes)) == len(hashes)
    assert (fingerprints(tokens[100:200], 13) == hashes[100:188]).all()
    assert len(fingerprints(tokens[:12], 13)) == 0
    for place in (0, 6, 12):
        changed = tokens[:13].copy()
        changed[place] ^= 1
        assert fingerprints(changed, 13)[0] != hashes[0]
    zeros = [fingerprints(np.zeros(20, np.uint16), n)[0] for n in range(1, 14)]
    assert len(set(zeros)) == 13
    # All 64 bits are used evenly: the table is looked up by high bits and sampled by low ones.
    ones = [(int((hashes >> np.uint64(bit)).astype(np.uint64).__and__(np.uint64(1)).sum())) for bit in range(64)]
    assert min(ones) > 2_200 and max(ones) < 2_800


def test_leaks_that_were_planted_are_found(tmp_path: Path) -> None:
    draw = random.Random(0)

    def text(length: int) -> list[int]:
        return [draw.randrange(50256) for _ in range(length)]

    exact, short, near, half, long, fresh, boiler = (
        text(200),
        text(5),
        text(400),
        text(400),
        text(20_000),
        text(300),
        text(200),
    )
    val = [exact, short, near, half, long, fresh, [], *([*boiler, *text(30)] for _ in range(40))]
    changed = near[:]
    changed[200] = (changed[200] + 1) % 50256  # spoils 13 of 388 n-grams
    long_copy = [*text(500), *long[:18_000], *text(300)]
    train_documents = [text(1_000), exact, [*half[:200], *text(300)], short, changed, long_copy, boiler, []]
    train_documents += [text(draw.randrange(50, 3_000)) for _ in range(200)]
    train = [t for d in train_documents for t in (50256, *d)]
    folder = make_set(tmp_path, [[t for d in val for t in (50256, *d)], train[:40_000], train[40_000:]])

    # What 40 val documents begin with (boilerplate) is no leak, though it is most of each and a train
    # document too.
    leak = find_leaks(list_shards(folder, "train"), list_shards(folder, "val"))
    found = {m.document: (m.train_document, m.exact, round(m.share, 2)) for m in leak.matches}
    assert found == {
        0: (1, True, 1.0),
        1: (3, True, 1.0),
        2: (4, False, round(1 - 13 / 388, 2)),
        4: (5, False, found[4][2]),
    }
    assert abs(found[4][2] - 0.9) < 0.03  # a sample of its fingerprints
    total = sum(len(d) + 1 for d in val)
    assert (leak.documents, leak.tokens) == (len(val), total)
    assert leak.summary(exact=True) == (2, 201 + 6, 207 / total)
    assert leak.summary(exact=False)[:2] == (2, 401 + 20_001)
    assert 3 in {m.document for m in find_leaks(list_shards(folder, "train"), list_shards(folder, "val"), near=0.4).matches}


def test_leak_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best train document is kept, in whatever block of the stream it comes."""
    import data.leak

    monkeypatch.setattr(data.leak, "_BLOCK_TOKENS", 500)
    draw = random.Random(1)
    page = [draw.randrange(50256) for _ in range(300)]
    other = [[draw.randrange(50256) for _ in range(280)] for _ in range(6)]
    worse = [*page[:260], *other[0]]
    better = [*page[:290], *other[1]]
    train = [other[2], worse, other[3], other[4], better, other[5], worse]
    folder = make_set(tmp_path, [[50256, *page], [t for d in train for t in (50256, *d)]])
    leak = find_leaks(list_shards(folder, "train"), list_shards(folder, "val"))
    assert [(m.train_document, m.exact, m.share) for m in leak.matches] == [(4, False, 278 / 288)]


def test_leak_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = list(range(100, 200))
    folder = make_set(tmp_path, [[50256, *page, 50256, 1], [50256, *page]])
    assert main(["leak", str(folder), str(folder)]) == 0
    out = capsys.readouterr().out
    assert "exact: 1 documents in train, 101 tokens, 98.058% of val" in out
    assert "val document 0 (101 tokens) equals train document 0" in out
    shards = [str(folder / "x_train_000001.bin"), str(folder / "x_val_000000.bin")]
    assert main(["leak", *shards]) == 0
    assert capsys.readouterr().out == out
    assert main(["leak", *shards, "--near", "2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
