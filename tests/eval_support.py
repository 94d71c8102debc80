"""Small models and run directories for the tests of `eval`."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import torch

from data.format import write_shard
from data.tokenizer import gpt2_encoding
from eval import files
from train_gpt2 import (
    EOT,
    GPT,
    RECIPES,
    Config,
    TokenStream,
    config_hash,
    evaluate_tokens,
    find_shards,
    learning_hash,
    save_weights,
    val_protocol,
    write_json,
)


def tiny(recipe: str = "gpt2", **changes: object) -> Config:
    """A config small enough for hundreds of examples in seconds, with a context that holds every
    HellaSwag row.
    """
    small = {"n_layer": 2, "n_head": 2, "n_embd": 32, "seq_len": 192, "precision": "fp32", "val_batch": 4}
    return dataclasses.replace(RECIPES[recipe], **(small | changes))


@functools.cache
def official_file() -> bytes:
    return files.obtain(files.HELLASWAG)


@functools.cache
def hellaswag_rows() -> tuple[dict, ...]:
    return tuple(files.json_lines(official_file()))


@functools.cache
def text_tokens(count: int = 30_000) -> np.ndarray:
    """Documents, each after an end-of-text token."""
    out: list[int] = []
    for row in hellaswag_rows():
        out += [EOT, *gpt2_encoding().encode_ordinary(row["ctx"] + " " + row["endings"][row["label"]])]
        if len(out) >= count:
            return np.array(out[:count])
    raise AssertionError("too few tokens")


@functools.cache
def trained(recipe: str = "gpt2", steps: int = 6) -> GPT:
    """A model trained a little, so that it has preferences, by torch's own AdamW. Shared: do not change
    it.
    """
    torch.manual_seed(0)
    net = GPT(tiny(recipe)).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    tokens = torch.from_numpy(text_tokens())
    for step in range(steps):
        piece = tokens[step * 256 : step * 256 + 257]
        loss = net(piece[:-1].view(2, 128), piece[1:].view(2, 128)) / 256
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.eval()


def write_shards(folder: Path, val_tokens: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "t_val_000000.bin", val_tokens.astype(np.uint16))
    return folder


def write_run(folder: Path, net: GPT, data: Path | None = None, val_tokens: int = 4 * 192) -> Path:
    """A finished run's directory around `net`, its val loss measured by the trainer's own function."""
    cfg = dataclasses.replace(net.cfg, run_dir=str(folder), data=str(data or ""), val_tokens=val_tokens)
    folder.mkdir(parents=True)
    write_json(
        folder / "config.json",
        {
            "recipe": cfg.recipe,
            "config": dataclasses.asdict(cfg),
            "config_hash": config_hash(cfg),
            "learning_hash": learning_hash(cfg),
        },
    )
    digest = save_weights(net, cfg, folder / "model.safetensors")
    if data is not None:
        stream = TokenStream(find_shards(data, "val"))
        loss = evaluate_tokens(net, stream, val_tokens, cfg.seq_len, cfg.val_batch)
        result = {
            "val_loss": loss,
            "val_protocol": val_protocol(cfg, stream),
            "tokens": 1024,
            "seed": cfg.seed,
        }
        result |= {"train_seconds": 1.0, "tokens_per_s": 1024.0, "params": 1, "weights_sha256": digest}
        write_json(folder / "result.json", {"recipe": cfg.recipe, **result})
        row = {"kind": "val", "step": 1, "tokens": 1024, "val_loss": loss, "train_s": 1.0, "val_s": 0.1}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return folder
