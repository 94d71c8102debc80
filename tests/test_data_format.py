"""Shards on disk: the layout byte by byte, the verifier against every kind of damage, the manifest."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_data_helpers import ROOT, environment

import train_gpt2
from data import format as shards
from data.manifest import Manifest, read_manifest, write_manifest


def raw(tokens: list[int], magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    """A shard made by hand."""
    header = [magic, version, len(tokens) if count is None else count, *[0] * 253]
    return struct.pack("<256i", *header) + struct.pack(f"<{len(tokens)}H", *tokens)


def test_the_layout_is_llm_c_s(tmp_path: Path) -> None:
    tokens = [50256, 1, 2, 50256, 0, 50255]
    written = shards.write_shard(tmp_path / "x_train_000001.bin", np.array(tokens))
    content = (tmp_path / "x_train_000001.bin").read_bytes()
    assert content == raw(tokens)
    assert written == shards.Shard("x_train_000001.bin", 6, 2, hashlib.sha256(content).hexdigest(), 1024 + 12)
    assert shards.verify_shard(tmp_path / "x_train_000001.bin", full=True) == written
    assert list(tmp_path.iterdir()) == [tmp_path / "x_train_000001.bin"]


def test_the_trainer_s_reader_agrees(tmp_path: Path) -> None:
    assert (shards.MAGIC, shards.VERSION) == (train_gpt2.SHARD_MAGIC, train_gpt2.SHARD_VERSION)
    assert (shards.HEADER_INTS, shards.EOT) == (train_gpt2.HEADER_INTS, train_gpt2.EOT)
    tokens = np.array([50256, 7, 9], np.uint16)
    written = shards.write_shard(tmp_path / "x_val_000000.bin", tokens)
    assert (train_gpt2.open_shard(tmp_path / "x_val_000000.bin") == tokens).all()
    manifest = Manifest("d", "c", "r", "t", [written])
    write_manifest(tmp_path, manifest)
    assert train_gpt2.data_fingerprint(tmp_path) == manifest.fingerprint


@pytest.mark.parametrize(
    ("content", "full", "says"),
    [
        (b"", False, "too short"),
        (b"<html><body>404</body></html>" + bytes(2000), False, "web page"),
        (raw([1, 2], magic=20240521), False, "magic 20240521"),
        (raw([1, 2], version=2), False, "version 2"),
        (raw([1, 2], count=3), False, "has 1028 bytes"),
        (raw([1, 2])[:-1], False, "has 1027 bytes"),
        (raw([1, 2]) + b"\0\0", False, "has 1030 bytes"),
        (raw([1, 2], count=-1), False, "header says -1"),
        (raw([50256, 3, 50257, 65535]), True, "token id 50257 at position 2"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, full: bool, says: str) -> None:
    path = tmp_path / "x_train_000001.bin"
    path.write_bytes(content)
    with pytest.raises(train_gpt2.UserError, match=says) as error:
        shards.verify_shard(path, full)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_only_gpt2_tokens_can_be_written(tmp_path: Path) -> None:
    for bad in (50257, -1):
        with pytest.raises(train_gpt2.UserError):
            shards.write_shard(tmp_path / "x_train_000001.bin", np.array([50256, bad]))
    with (
        pytest.raises(train_gpt2.UserError, match="not kept"),
        shards.ShardWriter(tmp_path / "y.bin") as writer,
    ):
        writer.append(np.array([1]))
        writer.finish("0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_verification_reads_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions and counts are right across the pieces in which a large file is read."""
    tokens = [50256, 1, 2, 3, 50256, 5, 6, 60000]
    (tmp_path / "x_train_000001.bin").write_bytes(raw(tokens))
    monkeypatch.setattr(shards.chunks, "__defaults__", (3,))
    with pytest.raises(train_gpt2.UserError, match="60000 at position 7"):
        shards.verify_shard(tmp_path / "x_train_000001.bin", full=True)
    (tmp_path / "x_train_000001.bin").write_bytes(raw(tokens[:-1]))
    assert shards.verify_shard(tmp_path / "x_train_000001.bin", full=True).documents == 2


def test_stream_order_is_the_order_of_cutting(tmp_path: Path) -> None:
    for name in (
        "a_train_000010.bin",
        "a_train_000002.bin",
        "a_val_000000.bin",
        ".a_train_000001.bin.partial",
        "b.bin",
    ):
        (tmp_path / name).write_bytes(b"")
    names = [path.name for path in shards.list_shards(tmp_path)]
    assert names == ["a_val_000000.bin", "a_train_000002.bin", "a_train_000010.bin"]
    assert [path.name for path in shards.list_shards(tmp_path, "val")] == ["a_val_000000.bin"]
    with pytest.raises(train_gpt2.UserError, match="no shard here"):
        shards.list_shards(ROOT / "docs")


def test_manifest_round_trip_and_fingerprint(tmp_path: Path) -> None:
    made = [shards.write_shard(tmp_path / f"x_train_{i:06d}.bin", np.array([50256, i])) for i in (2, 1)]
    manifest = Manifest("name", "config", "rev", "rank", made, extra={"split": "train"})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    line = "LC_ALL=C sha256sum x_train_*.bin | sha256sum"
    said = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.split()[0] == manifest.fingerprint
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert content["schema"] == 1 and content["tokenizer"] == {"name": "gpt2", "rank_sha256": "rank"}
    for change in ({"schema": 2}, {"fingerprint": "0"}, {"shards": [{"file": "x"}]}, {"tokenizer": None}):
        (tmp_path / "manifest.json").write_text(json.dumps({**content, **change}))
        with pytest.raises(train_gpt2.UserError, match=r"manifest\.json"):
            read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(train_gpt2.UserError, match="not valid JSON"):
        read_manifest(tmp_path)


def test_tokenizer_processes_never_load_torch() -> None:
    code = "import sys, data.build, data.sample, data.__main__; print({'torch', 'datasets'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.stdout == "set()\n"
