"""GPT-2's tokenizer in the files that transformers reads, made from tiktoken's ranks."""

from __future__ import annotations

import json
from itertools import pairwise

import tiktoken


def byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte (openai/gpt-2 encoder.py, bytes_to_unicode): 0x20 is Ġ."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    letters = {b: chr(b) for b in printable}
    for n, b in enumerate(b for b in range(256) if b not in letters):
        letters[b] = chr(256 + n)
    return letters


def merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that byte-pair encoding joins last: `token` encoded with the earlier ranks alone."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        assert pairs[best] < ranks[token]
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def tokenizer_files(encoding: tiktoken.Encoding, context: int) -> dict[str, bytes]:
    """vocab.json, merges.txt and tokenizer_config.json of GPT2Tokenizer; file name to content."""
    ranks = {encoding.decode_single_token_bytes(i): i for i in range(encoding.eot_token)}
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    vocabulary = {spell(token): rank for token, rank in ranks.items()} | {"<|endoftext|>": encoding.eot_token}
    merges = [merge_of(token, ranks) for token in ranks if len(token) > 1]
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": context,
        "add_prefix_space": False,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    }
    lines = ["#version: 0.2", *(f"{spell(a)} {spell(b)}" for a, b in merges)]
    return {
        "vocab.json": json.dumps(vocabulary, ensure_ascii=False).encode(),
        "merges.txt": ("\n".join(lines) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=1) + "\n").encode(),
    }
