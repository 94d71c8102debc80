"""Token order: step s consumes the next batch of the shard stream on any number of ranks, and bad shards are refused."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from train_support import read_tokens, shard_bytes, write_shards

import train_gpt2
from train_gpt2 import Config, Loader, TokenStream, UserError

CPU = torch.device("cpu")


def consumed(cfg: Config, folder: Path, world: int, first: int, last: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For every step the inputs and targets of all ranks, put together in the order of the global rows."""
    paths = train_gpt2.find_shards(folder, "train")
    loaders = [Loader(cfg, TokenStream(paths), rank, world, CPU) for rank in range(world)]
    streams = [loader.batches(first, last) for loader in loaders]
    steps = []
    for _ in range(first, last):
        micros = [[next(s) for s in streams] for _ in range(loaders[0].accum)]
        assert all(x.shape == y.shape == (cfg.micro_batch, cfg.seq_len) for ranks in micros for x, y in ranks)
        parts = [[pair[i].numpy() for ranks in micros for pair in ranks] for i in (0, 1)]
        steps.append((np.concatenate(parts[0]).ravel(), np.concatenate(parts[1]).ravel()))
    assert all(next(s, None) is None for s in streams), "a loader goes on after its last step"
    return steps


# Shard ends inside rows, on row ends, inside a batch; a shard shorter than a row; one that holds a single token.
@pytest.mark.parametrize("lengths", [(1000, 37, 700), (64, 64, 128), (5, 1, 300, 2, 129), (257,)])
@pytest.mark.parametrize(("micro_batch", "world"), [(8, 1), (4, 2), (2, 4), (2, 1), (1, 8), (4, 1), (2, 2)])
def test_token_order_is_the_streams_on_any_ranks(tmp_path: Path, lengths: tuple[int, ...], micro_batch: int, world: int) -> None:
    folder = write_shards(tmp_path, train=lengths)
    every = read_tokens(folder, "train")
    cfg = Config(batch_tokens=128, seq_len=16, micro_batch=micro_batch)
    last = 3 * len(every) // 128 + 2  # more than three epochs
    position = 0
    for inputs, targets in consumed(cfg, folder, world, 0, last):
        at = (position + np.arange(129)) % len(every)  # an epoch joins the next one: no token is left out
        np.testing.assert_array_equal(inputs, every[at[:-1]])
        np.testing.assert_array_equal(targets, every[at[1:]])
        position += 128


def test_a_later_start_sees_the_same_steps(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    cfg = Config(batch_tokens=128, seq_len=16, micro_batch=2)
    whole, tail = consumed(cfg, folder, 1, 0, 40), consumed(cfg, folder, 4, 17, 40)
    for (x, y), (later_x, later_y) in zip(whole[17:], tail, strict=True):
        np.testing.assert_array_equal(x, later_x)
        np.testing.assert_array_equal(y, later_y)


def test_stream_slices_cross_shards_and_wrap(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, train=(5, 1, 9))
    every = read_tokens(folder, "train")
    stream = TokenStream(train_gpt2.find_shards(folder, "train"))
    assert len(stream) == 15
    for start in range(31):
        for count in (0, 1, 4, 15, 16, 50):
            got = stream.slice(start, count)
            assert got.dtype == np.uint16
            np.testing.assert_array_equal(got, every[(start + np.arange(count)) % 15])


def test_ids_above_32767_keep_their_sign(tmp_path: Path) -> None:
    (tmp_path / "big_train_000000.bin").write_bytes(shard_bytes([50256, 40000, 32768, 1, 50256]))
    cfg = Config(batch_tokens=4, seq_len=4, micro_batch=1)
    inputs, targets = consumed(cfg, tmp_path, 1, 0, 1)[0]
    assert inputs.tolist() == [50256, 40000, 32768, 1]
    assert targets.tolist() == [40000, 32768, 1, 50256]


def test_a_micro_batch_that_does_not_divide_is_refused() -> None:
    cfg = Config(batch_tokens=128, seq_len=16, micro_batch=2)
    assert [train_gpt2.grad_accum_steps(cfg, world) for world in (1, 2, 4)] == [4, 2, 1]
    for world in (3, 8):
        with pytest.raises(UserError, match="micro-batch"):
            train_gpt2.grad_accum_steps(cfg, world)


GOOD = shard_bytes([50256, 1, 2, 3])
BAD_SHARDS = {
    "empty": (b"", "header"),
    "half a header": (GOOD[:512], "header"),
    "truncated": (GOOD[:-2], "header says 4 tokens"),
    "odd byte": (GOOD[:-1], "header says 4 tokens"),
    "longer": (GOOD + b"\0\0", "header says 4 tokens"),
    "magic": (shard_bytes([1], magic=20240521), "magic 20240521"),
    "byte order": (np.frombuffer(GOOD, "<i4").astype(">i4").tobytes(), "magic"),
    "version": (shard_bytes([1], version=2), "version 2"),
    "negative count": (shard_bytes([], count=-5), "header says -5"),
    "text": (b"<html>not found</html>" * 100, "magic"),
}


@pytest.mark.parametrize("kind", list(BAD_SHARDS))
def test_bad_shards_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    content, said = BAD_SHARDS[kind]
    path = tmp_path / "x_train_000007.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        train_gpt2.open_shard(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_shards_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a_train_000000.bin").symlink_to(tmp_path / "absent")
    (tmp_path / "a_train_000001.bin").mkdir()
    for path in train_gpt2.find_shards(tmp_path, "train"):
        with pytest.raises(UserError, match="cannot be read") as caught:
            train_gpt2.open_shard(path)
        assert str(path) in str(caught.value)


def test_find_shards_orders_and_separates_splits(tmp_path: Path) -> None:
    for name in (
        "f_train_000010.bin",
        "f_train_000002.bin",
        "f_val_000000.bin",
        "f_train_000001.bin.part",
        "notes.txt",
    ):
        (tmp_path / name).write_bytes(GOOD)
    assert [p.name for p in train_gpt2.find_shards(tmp_path, "train")] == [
        "f_train_000002.bin",
        "f_train_000010.bin",
    ]
    assert [p.name for p in train_gpt2.find_shards(tmp_path, "val")] == ["f_val_000000.bin"]
    with pytest.raises(UserError, match="no \\*_train_"):
        train_gpt2.find_shards(tmp_path / "absent", "train")


def test_fingerprint_follows_the_tokens(tmp_path: Path) -> None:
    first, second = write_shards(tmp_path / "a"), write_shards(tmp_path / "b")
    assert train_gpt2.data_fingerprint(first) == train_gpt2.data_fingerprint(second)
    assert train_gpt2.data_fingerprint(first).startswith("unmanifested:")
    path = second / "tiny_train_000001.bin"
    tokens = read_tokens(second, "train")[1000:1037]
    tokens[5] ^= 1
    path.write_bytes(shard_bytes(tokens))
    assert train_gpt2.data_fingerprint(first) != train_gpt2.data_fingerprint(second)
    (second / "manifest.json").write_text('{"schema": 1, "fingerprint": "abc"}')
    assert train_gpt2.data_fingerprint(second) == "abc"
    for broken in ('{"schema": 1}', '{"schema": 2, "fingerprint": "abc"}', "{"):
        (second / "manifest.json").write_text(broken)
        with pytest.raises(UserError, match=r"manifest\.json"):
            train_gpt2.data_fingerprint(second)


def test_data_that_does_not_suffice_is_refused_and_epochs_allow_it(tmp_path: Path) -> None:
    folder = str(write_shards(tmp_path, train=(1000, 37, 700), val=(90, 60)))  # 1737 and 150 tokens
    cfg = Config(data=folder, batch_tokens=128, seq_len=16, micro_batch=2, val_tokens=144)
    for steps, epochs, fits in ((13, 1, True), (14, 1, False), (14, 2, True), (27, 2, True), (28, 2, False)):
        tried = dataclasses.replace(cfg, max_steps=steps, epochs=epochs)
        if fits:
            train_gpt2.check_data(tried)
        else:
            with pytest.raises(UserError, match=f"--max-steps to {13 if epochs == 1 else 27}.*--epochs {epochs + 1}"):
                train_gpt2.check_data(tried)
    with pytest.raises(UserError, match="val shards hold 150"):
        train_gpt2.check_data(dataclasses.replace(cfg, max_steps=1, val_tokens=160))


def test_shards_are_mapped_not_copied(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    stream = TokenStream(train_gpt2.find_shards(folder, "train"))
    assert all(isinstance(s, np.memmap) and not s.flags.writeable for s in stream.shards)
    assert os.path.samefile(stream.shards[0].filename, folder / "tiny_train_000000.bin")
