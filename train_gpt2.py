"""Train GPT-2 124M. One file, three recipes, one node.

    python train_gpt2.py sample                                       # a laptop CPU, minutes
    torchrun --standalone --nproc_per_node=8 train_gpt2.py speedrun    # Muon, to FineWeb val loss 3.28
    torchrun --standalone --nproc_per_node=8 train_gpt2.py gpt2        # the control: llm.c's AdamW recipe

It reads token shards (--data), and leaves a run directory (--run-dir) from which everything else is read:
config.json, env.json, metrics.jsonl, result.json, model.safetensors, checkpoints/. Importing it does nothing,
so its pure parts (Config, GPT, TokenStream, load_run, ...) can be used from elsewhere. Reads top to bottom:
config, data, model, loss, optimizer, run directory, checkpoints, training loop.

Shapes in names: B sequences, T positions, C width, H heads, D head width, V padded vocabulary, N = B*T tokens.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import datetime
import enum
import errno
import fcntl
import functools
import hashlib
import io
import itertools
import json
import math
import multiprocessing.pool
import os
import pickle
import platform
import queue
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
import types
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

SCHEMA = 1  # version in every JSON file of a run; a reader that meets another says so
EOT = 50256  # <|endoftext|>, which starts every document


class UserError(ValueError):
    """A person's mistake: one clear line, exit code 2, no traceback."""


class Exit(enum.IntEnum):
    """Exit codes of the trainer."""

    OK = 0
    FAILED = 1  # a bug: there is a traceback
    BAD_INPUT = 2  # one line says what is wrong; nothing was written, unless it is data that training came to later
    NON_FINITE = 3  # loss or gradient became inf or nan; the weights are those before that step
    OUT_OF_MEMORY = 4
    STOPPED = 5  # SIGTERM or SIGINT: the step was finished and the state saved
    PEER_LOST = 6  # another rank died or hangs
    DISK = 7  # a checkpoint could not be written and --on-save-error is stop
    SPIKE = 8  # a loss spike, and --spike is halt


class Halt(Exception):
    """Ends training early with an exit code and one line."""

    def __init__(self, code: Exit, message: str):
        super().__init__(message)
        self.code = code


# ------------------------------------------------------------------------------------------------ config

Precision = Literal["bf16", "fp32", "fp16"]
Toggle = Literal["auto", "on", "off"]


BELOW_1, ABOVE_0 = 1 - 1e-7, 1e-6  # bounds that are not allowed themselves: 1 - 1e-7 is below 1 in fp32 too


def opt(default: Any, text: str, low: float = 0, high: float = sys.float_info.max) -> Any:
    """A config field with its help line and, for a number, what it must lie between."""
    return field(default=default, metadata={"help": text, "low": low, "high": high})


@dataclass(frozen=True)
class Config:
    """Everything a run depends on. Every field is a flag: n_layer is --n-layer."""

    recipe: str = opt("gpt2", "name of the preset these values started from")
    run_dir: str = opt("", "where the run is written; empty: runs/<recipe>-<date>")
    data: str = opt("data/fineweb10B", "folder of token shards, *_train_*.bin and *_val_*.bin")
    seed: int = opt(1337, "seed of the initial weights")
    # Model.
    n_layer: int = opt(12, "number of blocks", low=1)
    n_head: int = opt(12, "attention heads", low=1)
    n_embd: int = opt(768, "width", low=1)
    seq_len: int = opt(1024, "context length T in tokens", low=1)
    vocab_size: int = opt(50257, "real token ids; loss, evaluation and sampling see these only", low=1)
    padded_vocab: int = opt(50304, "rows of embedding and head, padded for speed; the padding is masked out")
    position: Literal["learned", "rotary", "none"] = opt("learned", "position encoding")
    norm: Literal["layer", "rms"] = opt("layer", "LayerNorm with weights, or RMSNorm without")
    activation: Literal["gelu", "relu2"] = opt("gelu", "GELU(tanh) or ReLU squared in the MLP")
    bias: bool = opt(True, "biases in linear layers")
    tied_head: bool = opt(True, "output head shares the token embedding")
    qk_norm: bool = opt(False, "RMSNorm on queries and keys")
    zero_init: bool = opt(False, "projections back to the residual stream, and a head that is never tied, start at zero")
    softcap: float = opt(0.0, "logits become c*tanh(logits/c); 0: off", high=80)  # exp(-c) must not vanish in fp32
    attn_scale: float = opt(0.0, "scale of attention scores; 0: 1/sqrt(head width)")
    x0_mix: bool = opt(False, "every block sees a learned mix of its input and the token embedding")
    value_embeds: int = opt(0, "token-embedding tables added to the values of the first and last n blocks")
    unet_skip: bool = opt(False, "learned skip connections from the first half of the blocks to the second")
    attn_gate: bool = opt(False, "each head's output is gated by a sigmoid of the first 12 channels")
    smear: bool = opt(False, "each embedding takes in a gated part of the one before it")
    key_offset: bool = opt(False, "key channels without position are those of the token before")
    document_mask: bool = opt(
        False, "attention stays within a document, which starts at <|endoftext|>; smear and key offset still reach one token back"
    )
    window: int = opt(0, "tokens that attention sees, its own and those before; 0: the whole context")
    # Optimizer.
    optimizer: Literal["adamw", "muon"] = opt("adamw", "muon: Muon for matrices inside blocks, AdamW for the rest")
    muon_lr: float = opt(0.02, "Muon learning rate, times sqrt(max(1, rows/cols))")
    muon_momentum: float = opt(0.95, "Muon (Nesterov) momentum", high=BELOW_1)
    muon_momentum_warmup: int = opt(0, "steps over which momentum rises from 0.85")
    muon_beta2: float = opt(0.0, "NorMuon: decay of the per-row second moment; 0: plain Muon", high=BELOW_1)
    muon_wd: float = opt(0.0, "cautious weight decay of Muon: only where it agrees with the update; times lr")
    lr: float = opt(6e-4, "AdamW learning rate of matrices outside Muon")
    embed_lr: float = opt(6e-4, "AdamW learning rate of embeddings; with --tied-steps not of the tokens' own")
    head_lr: float = opt(6e-4, "AdamW learning rate of an untied head")
    tied_steps: int = opt(0, "first steps, in which an untied head and the token embedding are one weight; both keep --head-lr")
    scalar_lr: float = opt(6e-4, "AdamW learning rate of biases, norms, gates and scalars")
    beta1: float = opt(0.9, "AdamW beta1", high=BELOW_1)
    beta2: float = opt(0.95, "AdamW beta2", high=BELOW_1)
    eps: float = opt(1e-8, "AdamW epsilon")
    weight_decay: float = opt(0.1, "AdamW weight decay of matrices and embeddings, times lr")
    clip: float = opt(1.0, "global gradient-norm clip; 0: off")
    schedule: Literal["constant", "linear", "cosine"] = opt("cosine", "after warm-up; linear: constant, then warmdown")
    warmup_steps: int = opt(700, "linear warm-up of the learning rate")
    warmdown_frac: float = opt(0.0, "last part of the steps over which `linear` decays", high=1)
    final_lr_frac: float = opt(0.0, "learning rate at the end, as a part of its peak", high=1)
    # Budget and data.
    batch_tokens: int = opt(524_288, "tokens per optimizer step over all ranks", low=1)
    micro_batch: int = opt(64, "sequences per forward on one rank", low=1)
    max_steps: int = opt(19_560, "optimizer steps", low=1)
    max_minutes: float = opt(0.0, "stop after this much training time; 0: no limit")
    epochs: int = opt(1, "passes over the train shards allowed; running out is an error before training", low=1)
    val_every: int = opt(250, "validate every so many steps, and at the end; 0: at the end only")
    val_tokens: int = opt(10_485_760, "validation tokens, the first of the val shards")
    val_batch: int = opt(64, "sequences per validation forward on one rank; compiled blocks take --micro-batch", low=1)
    # Execution.
    device: Literal["auto", "cpu", "cuda"] = opt("auto", "auto: cuda where there is one")
    precision: Precision = opt("bf16", "arithmetic of the forward and backward; weights and sums stay fp32")
    head_precision: Literal["same", "fp8", "fp8-rows", "fp8-all"] = opt(
        "same", "products of the head in training. fp8 (capability 8.9): the forward one, with one scale a tensor or (rows) one "
        "a token and id; all: with one scale a tensor, and the two backward ones too"
    )
    compile: Toggle = opt("auto", "torch.compile the blocks; auto: on for CUDA (measured not to pay on CPU)")
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = opt("default", "torch.compile mode; autotuning is slow")
    attention: Literal["auto", "cudnn", "flash", "efficient", "math", "flex", "fa3", "fa4"] = opt(
        "auto", "SDPA backend, FlexAttention, or an installed FlashAttention-3 or -4; auto: the fastest SDPA backend that works"
    )
    fused_mlp: Literal["auto", "off"] = opt("auto", "ReLU squared in the product before it; auto: on Hopper, in bf16")
    parallel: Literal["owner", "ddp", "zero1", "fsdp2", "fsdp3"] = opt(
        "owner", "several ranks. ddp: all replicated. owner: one rank updates each Muon matrix. zero1: AdamW too. fsdp2, fsdp3: "
        "weights sharded as well, by FSDP2 that keeps or frees them between forward and backward"
    )
    ddp_bucket_mb: int = opt(25, "DDP gradient bucket size in MB", low=1)
    reduce_precision: Literal["fp32", "bf16"] = opt("fp32", "type in which gradients travel between ranks (not with ddp)")
    recompute: Literal["off", "selective", "block"] = opt(
        "off", "activations computed again in the backward pass. selective: never attention, every second matrix product"
    )
    threads: int = opt(0, "CPU threads per rank, recorded; 0: all cores over the ranks")
    deterministic: bool = opt(False, "bit-equal repetition on CUDA, at some cost in speed")
    comm_timeout: float = opt(120.0, "seconds without an answer after which a rank counts as lost", low=ABOVE_0)
    # Checkpoints and logging.
    checkpoint_every: str = opt("auto", "steps (100), minutes (10m), 0 for off, or auto: by save cost and failure rate")
    keep: int = opt(2, "verified checkpoints kept, at least 2", low=2)
    resume: str = opt("", "newest (also a bare --resume), auto (start afresh if there is none), a step, or a path")
    mirror: str = opt("", "copy checkpoints to this folder or fsspec URI (s3://...), verified")
    mtbf_hours: float = opt(24.0, "mean time between failures of one device, for checkpoint_every=auto", low=ABOVE_0)
    spot_mtbf_hours: float = opt(0.0, "mean time between preemptions of the whole machine; 0: not a spot machine")
    on_save_error: Literal["continue", "stop"] = opt("continue", "when a checkpoint cannot be written")
    spike: Literal["off", "skip", "halt"] = opt("off", "loss or gradient-norm spike: skip the update, or save and halt")
    spike_z: float = opt(6.0, "z-score over the window that counts as a spike")
    spike_window: int = opt(128, "steps in the spike window", low=1)
    wandb: Literal["off", "online", "offline"] = opt("off", "also log to Weights & Biases")
    on_finish: str = opt("", "shell command run once at the end, when all results are durably written")
    on_finish_when: Literal["always", "success", "failure"] = opt("always", "which ends run --on-finish")

    @property
    def attended(self) -> int:
        """Tokens that attention reaches back over, its own included, if no document starts among them."""
        return min(self.seq_len, self.window or self.seq_len)

    @property
    def fusable_mlp(self) -> bool:
        """Whether `relu2_mlp` may be the MLP, where the device suits it."""
        return self.fused_mlp == "auto" and self.activation == "relu2" and not self.bias

    @property
    def masked(self) -> bool:
        """Whether attention is more than causal."""
        return self.document_mask or self.attended < self.seq_len


# Fields that say how or where a run executes, not what it learns.
EXECUTION_FIELDS = frozenset(
    "run_dir seed data device compile compile_mode attention fused_mlp parallel ddp_bucket_mb recompute threads deterministic "
    "comm_timeout micro_batch val_batch checkpoint_every keep resume mirror mtbf_hours spot_mtbf_hours on_save_error wandb "
    "on_finish on_finish_when max_minutes".split()
)

RECIPES: dict[str, Config] = {
    # llm.c's reproduction: val loss 3.2722 on FineWeb after 10.26B tokens.
    "gpt2": Config(),
    # Muon (Jordan et al. 2024) and the architecture that grew around it in the GPT-2 speedruns.
    "speedrun": Config(
        recipe="speedrun", n_head=6, position="rotary", norm="rms", activation="relu2", bias=False, tied_head=False,
        qk_norm=True, zero_init=True, softcap=15.0, attn_scale=0.12, x0_mix=True, value_embeds=3, unet_skip=True,
        attn_gate=True, smear=True, key_offset=True, tied_steps=4_000,
        optimizer="muon", muon_lr=0.03, muon_momentum_warmup=200, muon_beta2=0.95, muon_wd=0.1,
        lr=0.005, embed_lr=0.3, head_lr=0.005, scalar_lr=0.02, beta1=0.8, beta2=0.95, eps=1e-10, weight_decay=0.0, clip=0.0,
        schedule="linear", warmup_steps=0, warmdown_frac=0.6, final_lr_frac=0.05,
        batch_tokens=262_144, micro_batch=32, max_steps=6_000, val_every=250, head_precision="fp8-all",
    ),
    # The speedrun made small enough for two CPU cores and the embedded sample text.
    "sample": Config(
        recipe="sample", data="data/sample", n_layer=4, n_head=4, n_embd=256, seq_len=256, position="rotary", norm="rms",
        activation="relu2", bias=False, tied_head=False, qk_norm=True, zero_init=True, softcap=15.0, attn_scale=0.12,
        x0_mix=True, unet_skip=True, attn_gate=True, smear=True,
        optimizer="muon", muon_lr=0.03, muon_momentum_warmup=20, muon_beta2=0.95, muon_wd=0.1,
        lr=0.005, embed_lr=0.3, head_lr=0.005, scalar_lr=0.02, beta1=0.8, beta2=0.95, eps=1e-10, weight_decay=0.0, clip=0.0,
        schedule="linear", warmup_steps=0, warmdown_frac=0.6, final_lr_frac=0.05,
        batch_tokens=1_024, micro_batch=4, max_steps=108, val_every=54, val_tokens=16_384, val_batch=8, precision="fp32",
    ),
}


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UserError(f"{message} (python train_gpt2.py --help lists recipes and flags)")


def _boolean(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is not true or false")


def build_parser() -> argparse.ArgumentParser:
    """The command line: a recipe, then any field of Config as a flag."""
    parser = _OneLineParser(
        prog="train_gpt2.py", allow_abbrev=False, description=__doc__, argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", choices=list(RECIPES), help="preset of all the values below")
    hints = get_type_hints(Config)
    for f in dataclasses.fields(Config)[1:]:
        kind, values = hints[f.name], {name: getattr(cfg, f.name) for name, cfg in RECIPES.items()}
        shown = values["gpt2"] if len(set(values.values())) == 1 else " ".join(f"{k}:{v}" for k, v in values.items())
        more: dict[str, Any] = {"choices": get_args(kind)} if get_args(kind) else {"type": kind}
        if kind is bool:
            more = {"type": _boolean, "nargs": "?", "const": True, "metavar": "BOOL"}
        elif f.name == "resume":
            more = {"nargs": "?", "const": "newest"}
        text = f"{f.metadata['help']} [{shown}]".replace("%", "%%")
        parser.add_argument(f"--{f.name.replace('_', '-')}", help=text, **more)
    return parser


def parse_args(argv: list[str]) -> Config:
    """Command line to Config. Raises UserError for anything that does not fit."""
    given = vars(build_parser().parse_args(argv))
    cfg = dataclasses.replace(RECIPES[given.pop("recipe")], **given)
    check_config(cfg)
    return cfg


def check_config(cfg: Config) -> None:
    """Refuses a config that cannot run, before anything is written. Raises UserError."""
    for f in dataclasses.fields(Config):
        value, low, high = getattr(cfg, f.name), f.metadata["low"], f.metadata["high"]
        if isinstance(value, (int, float)) and not low <= value <= high:
            limits = f"at least {low:g}" + (f" and at most {high:.7g}" if high < sys.float_info.max else "")
            raise UserError(f"--{f.name.replace('_', '-')} must be a number of {limits}, not {value}")
    if (cfg.attn_gate or cfg.smear) and cfg.n_embd < 12:
        raise UserError(f"--n-embd {cfg.n_embd}: the gates of --attn-gate and --smear read 12 channels")
    if cfg.n_embd % cfg.n_head or (cfg.n_embd // cfg.n_head) % 4:
        raise UserError(f"--n-embd {cfg.n_embd} must be a multiple of 4 times --n-head {cfg.n_head}")
    if cfg.vocab_size > cfg.padded_vocab:
        raise UserError(f"--vocab-size {cfg.vocab_size} must be at most --padded-vocab {cfg.padded_vocab}")
    if cfg.val_tokens < cfg.seq_len or cfg.val_tokens % cfg.seq_len:
        raise UserError(f"--val-tokens {cfg.val_tokens} must be a multiple of --seq-len {cfg.seq_len}")
    if 2 * cfg.value_embeds > cfg.n_layer:
        raise UserError(f"--value-embeds {cfg.value_embeds} needs {2 * cfg.value_embeds} blocks; --n-layer is {cfg.n_layer}")
    if cfg.reduce_precision == "bf16" and cfg.parallel == "ddp":
        raise UserError("--reduce-precision bf16 goes with --parallel owner, zero1, fsdp2 or fsdp3, not with ddp")
    if cfg.head_precision != "same" and (cfg.n_embd % 16 or cfg.padded_vocab % 16):
        raise UserError(f"--head-precision {cfg.head_precision} needs --n-embd and --padded-vocab that are multiples of 16")
    if cfg.key_offset and cfg.position != "rotary":
        raise UserError(f"--key-offset needs --position rotary, not {cfg.position}; or leave it out by --key-offset false")
    if cfg.tied_steps and cfg.tied_head:
        raise UserError(f"--tied-steps {cfg.tied_steps} is for a head of its own: add --tied-steps 0 or --tied-head false")
    if cfg.document_mask and cfg.vocab_size <= EOT:
        raise UserError(f"--document-mask needs a --vocab-size above {EOT}, the id that starts a document")
    if cfg.attention == "flex" and (cfg.seq_len % FLEX_BLOCK or cfg.compile == "off"):
        raise UserError(f"--attention flex needs compiled blocks and a --seq-len that is a multiple of {FLEX_BLOCK}")
    parse_cadence(cfg.checkpoint_every)


def parse_cadence(text: str) -> tuple[str, float]:
    """'100' -> ('steps', 100), '10m' -> ('seconds', 600), 'auto' -> ('auto', 0), '0' -> ('off', 0)."""
    if text in ("auto", "0"):
        return ("auto" if text == "auto" else "off"), 0.0
    try:
        kind, value = ("seconds", float(text[:-1]) * 60) if text.endswith("m") else ("steps", float(int(text)))
    except ValueError:
        value = -1.0
    if not (value > 0 and math.isfinite(value)):
        raise UserError(f"--checkpoint-every {text!r}: give steps (100), minutes (10m), auto, or 0 for off")
    return kind, value


def grad_accum_steps(cfg: Config, world: int) -> int:
    """Micro-batches per rank and step. Raises UserError where they do not divide the batch."""
    per_pass = cfg.micro_batch * cfg.seq_len * world
    if cfg.batch_tokens % per_pass:
        raise UserError(
            f"--batch-tokens {cfg.batch_tokens} is not a multiple of {per_pass} = --micro-batch {cfg.micro_batch} "
            f"x --seq-len {cfg.seq_len} x {world} ranks; choose a micro-batch that divides it"
        )
    return cfg.batch_tokens // per_pass


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def config_hash(cfg: Config) -> str:
    """Hash of every field that is not Config's default, so that a new field with a neutral default changes no hash."""
    neutral = dataclasses.asdict(Config())
    return _hash_json({k: v for k, v in dataclasses.asdict(cfg).items() if v != neutral[k]})


def learning_hash(cfg: Config) -> str:
    """config_hash of what is learned alone: without seed, data folder, and how it is executed."""
    neutral = dataclasses.asdict(Config())
    return config_hash(dataclasses.replace(cfg, **{k: neutral[k] for k in EXECUTION_FIELDS}))


# ------------------------------------------------------------------------------------------------ data

SHARD_MAGIC, SHARD_VERSION, HEADER_INTS = 20240520, 1, 256  # llm.c's format: int32 header, then uint16 tokens


def open_shard(path: str | Path) -> np.ndarray:
    """Memory-maps a shard's tokens (uint16) after the cheap checks: magic, version, size against header.

    Raises UserError with the file's name. `python -m data verify --full` checks every token.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    except OSError as e:  # a dangling link, a folder, no permission
        raise UserError(f"{path} cannot be read: {e.strerror or e}") from None
    if size < HEADER_INTS * 4:
        raise UserError(f"{path}: {size} bytes are too few for a shard header; fetch or build it again")
    if header[0] != SHARD_MAGIC:
        raise UserError(f"{path}: not a token shard (magic {header[0]}, not {SHARD_MAGIC}); fetch or build it again")
    if header[1] != SHARD_VERSION:
        raise UserError(f"{path}: shard version {header[1]} is unknown (this program reads {SHARD_VERSION})")
    count = int(header[2])
    if count < 0 or size != HEADER_INTS * 4 + 2 * count:
        raise UserError(f"{path}: header says {count} tokens, the file holds {(size - 1024) / 2:.0f}; fetch or build it again")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_INTS * 4, shape=(count,))


def find_shards(folder: str | Path, split: Literal["train", "val"]) -> list[Path]:
    """The shards of a split in order. Raises UserError where there are none."""
    paths = sorted(Path(folder).glob(f"*_{split}_*.bin"))
    if not paths:
        how = "python -m data sample" if Path(folder).name == "sample" else "python -m data fetch fineweb10B"
        raise UserError(f"no *_{split}_*.bin shards in {folder}; prepare them with `{how}`, or point --data elsewhere")
    return paths


class TokenStream:
    """Shards joined end to end: one sequence of tokens, in which a slice may cross shards and wraps at the end."""

    def __init__(self, paths: list[Path]):
        self.shards = [open_shard(p) for p in paths]
        self.ends = np.cumsum([len(s) for s in self.shards])
        if not self.ends[-1]:
            raise UserError(f"{paths[0].parent}: the shards hold no tokens")

    def __len__(self) -> int:
        return int(self.ends[-1])

    def slice(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as uint16, position taken modulo the length."""
        parts = [np.empty(0, dtype=np.uint16)]
        while count > 0:
            at = start % len(self)
            i = int(np.searchsorted(self.ends, at, side="right"))
            parts.append(self.shards[i][at - int(self.ends[i]) :][:count])  # counted from the shard's end
            start, count = start + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts)


def data_fingerprint(folder: str | Path) -> str:
    """manifest.json's fingerprint; without a manifest a hash of names, sizes and samples of every shard, marked so."""
    manifest = Path(folder) / "manifest.json"
    if manifest.exists():
        found = read_json(manifest).get("fingerprint")
        if not found:
            raise UserError(f"{manifest} has no fingerprint; build or fetch the shards again")
        return str(found)
    digest = hashlib.sha256()
    for path in [*find_shards(folder, "train"), *find_shards(folder, "val")]:
        tokens = open_shard(path)
        digest.update(f"{path.name} {len(tokens)}\n".encode())
        for start in range(0, len(tokens), max(1, len(tokens) // 16)):
            digest.update(tokens[start : start + 4096].tobytes())
    return "unmanifested:" + digest.hexdigest()


def most_documents(stream: TokenStream, span: int, total: int) -> int:
    """A bound on how many documents start in any `span` tokens in a row of the first `total`, which may wrap."""
    total = min(total, len(stream))
    counts = [int((stream.slice(at, span) == EOT).sum()) for at in range(0, total, span)]
    return max(a + b for a, b in zip(counts, counts[1:] + counts[:1]))


def check_ids(tokens: np.ndarray, cfg: Config) -> np.ndarray:
    """The tokens, if the vocabulary has them all; an id beyond it would end in a crash of the device. Raises UserError."""
    if tokens.max() >= cfg.vocab_size:
        raise UserError(
            f"{cfg.data}: token id {tokens.max()} is not below --vocab-size {cfg.vocab_size}; check it by `python -m data verify`"
        )
    return tokens


class Loader:
    """Micro-batches of the train stream in global order, made ahead by a thread.

    Step s consumes the next `batch_tokens` tokens, whatever the number of ranks: sequence row r of micro-step m
    on rank k is global row (m * world + k) * micro_batch + r of the step.
    """

    def __init__(self, cfg: Config, stream: TokenStream, rank: int, world: int, device: torch.device):
        self.cfg, self.stream, self.rank, self.world, self.device = cfg, stream, rank, world, device
        self.accum = grad_accum_steps(cfg, world)
        self.pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="loader")
        self.wait_s = 0.0

    def _make(self, step: int, micro: int) -> Tensor:
        cfg = self.cfg
        row = (micro * self.world + self.rank) * cfg.micro_batch
        start = step * cfg.batch_tokens + row * cfg.seq_len
        tokens = check_ids(self.stream.slice(start, cfg.micro_batch * cfg.seq_len + 1), cfg)
        batch = torch.from_numpy(tokens.astype(np.int64))
        return batch.pin_memory() if self.device.type == "cuda" else batch

    def batches(self, first_step: int, last_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets), each (micro_batch, T) int64 on the device, for steps first_step .. last_step - 1."""
        todo = ((s, m) for s in range(first_step, last_step) for m in range(self.accum))
        ahead = collections.deque(self.pool.submit(self._make, *key) for key in itertools.islice(todo, 2))
        while ahead:
            began = time.perf_counter()
            tokens = ahead.popleft().result()
            self.wait_s += time.perf_counter() - began
            ahead.extend(self.pool.submit(self._make, *key) for key in itertools.islice(todo, 1))
            tokens = tokens.to(self.device, non_blocking=True)
            shape = (self.cfg.micro_batch, self.cfg.seq_len)
            yield tokens[:-1].view(shape), tokens[1:].view(shape)


# ------------------------------------------------------------------------------------------------ model


class Linear(nn.Linear):
    """Weights are kept in fp32 and cast to the activations' type where they are used."""

    def reset_parameters(self) -> None:
        """Nothing: GPT gives every weight its first value."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing, as above."""


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class RMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),))


def rotary_table(seq_len: int, head_width: int, base: float = 1024.0) -> Tensor:
    """(2, T, D/2) cosines and sines. Half of the frequencies are zero, so that half of each head carries no position
    (modded-nanogpt record 18, 2025-01)."""
    freqs = torch.cat([(1 / base) ** torch.linspace(0, 1, head_width // 4), torch.zeros(head_width // 4)])
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), freqs)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x_BTHD: Tensor, rope: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864)."""
    cos, sin = rope[0, : x_BTHD.size(1), None].to(x_BTHD.dtype), rope[1, : x_BTHD.size(1), None].to(x_BTHD.dtype)
    a, b = x_BTHD.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


Kernel = Literal["sdpa", "varlen", "flex"]  # of attention
FLEX_BLOCK = 128  # positions of a block of FlexAttention's mask


class Varlen(NamedTuple):
    """A mask for the varlen kernels: the rows of a micro-batch are laid end to end and cut where documents start."""

    bounds: Tensor  # (D + 1,) int32, first token of each document and the end of all; documents of no tokens fill it up
    longest: int
    window: int


def flex_mask(doc_BT: Tensor, window: int) -> Any:
    """BlockMask of causal attention within a document and a window, from the bounds of each block of positions.

    doc_BT: number of each token's document, which only grows within a row; T is a multiple of FLEX_BLOCK. (create_block_mask
    looks at every pair: 4.3 ms for 65,536 tokens, measured.)
    """
    from torch.nn.attention.flex_attention import BlockMask

    first, last = doc_BT[:, ::FLEX_BLOCK], doc_BT[:, FLEX_BLOCK - 1 :: FLEX_BLOCK]
    i = torch.arange(first.size(1), device=doc_BT.device)
    ahead = FLEX_BLOCK * (i[:, None] - i)  # of a query's block before a key's, in tokens
    some = (ahead >= 0) & (ahead - FLEX_BLOCK + 1 < window) & (first[:, :, None] <= last[:, None, :])
    every = (ahead > 0) & (ahead + FLEX_BLOCK - 1 < window) & (last[:, :, None] == first[:, None, :])

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 1, Q) numbers of key blocks and (B, 1, Q, K) the blocks themselves, those that count first."""
        blocks = blocks[:, None]
        return blocks.sum(-1).int(), blocks.int().argsort(dim=-1, descending=True, stable=True).int()

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k < window) & (doc_BT[b, q] == doc_BT[b, k])

    return BlockMask.from_kv_blocks(*listed(some & ~every), *listed(every), BLOCK_SIZE=FLEX_BLOCK, mask_mod=allowed)


def attention_mask(cfg: Config, kernel: Kernel, idx_BT: Tensor, most_documents: int | None) -> Any:
    """What `attend` takes for these tokens; None where attention is causal and no more.

    most_documents: a bound on those that start in the batch, for the varlen kernels; None: they are counted, which waits for
    the device as nothing else here does.
    """
    B, T = idx_BT.shape
    window = min(cfg.attended, T)
    if kernel == "sdpa" and window == T and not cfg.document_mask:
        return None
    starts_BT = (idx_BT == EOT) & cfg.document_mask
    if kernel == "varlen":
        most = int(starts_BT.sum()) if most_documents is None else most_documents
        starts_BT[:, 0] = True
        bounds = starts_BT.flatten().nonzero_static(size=most + B + 1, fill_value=B * T)
        return Varlen(bounds.flatten().int(), T, window)
    doc_BT = starts_BT.cumsum(1)
    if kernel == "flex":
        return flex_mask(doc_BT, window)
    at = torch.arange(T, device=idx_BT.device)
    ago_TT = at[:, None] - at
    mask_TT = (ago_TT >= 0) & (ago_TT < window)
    return (mask_TT & (doc_BT[:, :, None] == doc_BT[:, None, :])).unsqueeze(1) if cfg.document_mask else mask_TT


def attend(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, mask: Any, scale: float) -> Tensor:
    """Causal attention, (B, T, H, D). mask decides the kernel: None, (T, T) or (B, 1, T, T) bool; a Varlen; a BlockMask."""
    if isinstance(mask, Varlen):
        from torch.nn.attention.varlen import varlen_attn

        back = mask.window - 1 if mask.window < mask.longest else -1
        q, k, v = q_BTHD.flatten(0, 1), k_BTHD.flatten(0, 1), v_BTHD.flatten(0, 1)
        at, longest = mask.bounds, mask.longest
        y: Any = varlen_attn(q, k, v, at, at, longest, longest, scale=scale, window_size=(back, 0))
        return y.view_as(q_BTHD)
    q, k, v = q_BTHD.transpose(1, 2), k_BTHD.transpose(1, 2), v_BTHD.transpose(1, 2)
    if mask is None or isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale).transpose(1, 2)
    from torch.nn.attention.flex_attention import flex_attention

    flexed: Any = flex_attention(q, k, v, block_mask=mask, scale=scale)
    return flexed.transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, cfg: Config, value_embed: bool):
        super().__init__()
        self.n_head, self.head_width = cfg.n_head, cfg.n_embd // cfg.n_head
        self.qk_norm, self.rotary = cfg.qk_norm, cfg.position == "rotary"
        self.scale, self.key_offset = cfg.attn_scale or self.head_width**-0.5, cfg.key_offset
        self.qkv = Linear(cfg.n_embd, 3 * cfg.n_embd, bias=cfg.bias)
        self.proj = Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.value_mix = nn.Parameter(torch.tensor([0.5, 0.5])) if value_embed else None
        # Zero-initialised: every head starts half open (modded-nanogpt record 28).
        self.gate = Linear(12, cfg.n_head, bias=False) if cfg.attn_gate else None

    def forward(self, x_BTC: Tensor, ve_BTC: Tensor | None, rope: Tensor, mask: Any) -> Tensor:
        B, T, C = x_BTC.shape
        q, k, v = self.qkv(x_BTC).view(B, T, 3, self.n_head, self.head_width).unbind(2)
        if self.value_mix is not None:
            assert ve_BTC is not None
            v = self.value_mix[0] * v + self.value_mix[1] * ve_BTC.view_as(v)
        if self.qk_norm:
            q, k = F.rms_norm(q, (self.head_width,)), F.rms_norm(k, (self.head_width,))
        if self.rotary:
            q, k = rotate(q, rope), rotate(k, rope)
        if self.key_offset:  # a query finds what followed an earlier token like it in one layer (modded-nanogpt record 49)
            still = torch.arange(self.head_width, device=k.device) // (self.head_width // 4) % 2 == 1  # see rotary_table
            k = torch.cat([k[:, :1], torch.where(still, k[:, :-1], k[:, 1:])], dim=1)
        y = attend(q, k, v, mask, self.scale)
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x_BTC[..., :12])).unsqueeze(-1)
        return self.proj(y.reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.fc = Linear(cfg.n_embd, 4 * cfg.n_embd, bias=cfg.bias)
        self.proj = Linear(4 * cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.relu2 = cfg.activation == "relu2"  # So et al. 2021, arXiv 2109.08668

    def forward(self, x_BTC: Tensor, fused: bool) -> Tensor:
        if fused:
            up, down = self.fc.weight.to(x_BTC.dtype), self.proj.weight.to(x_BTC.dtype)
            return relu2_mlp(x_BTC.flatten(0, 1), up, down)[0].view_as(x_BTC)
        h = self.fc(x_BTC)
        return self.proj(F.relu(h).square() if self.relu2 else F.gelu(h, approximate="tanh"))


class Block(nn.Module):
    def __init__(self, cfg: Config, value_embed: bool, skip: bool):
        super().__init__()
        self.norm1, self.norm2 = make_norm(cfg), make_norm(cfg)
        self.attn, self.mlp = Attention(cfg, value_embed), MLP(cfg)
        self.x0_mix = nn.Parameter(torch.tensor([1.0, 0.0])) if cfg.x0_mix else None
        self.skip_weight = nn.Parameter(torch.tensor(1.0)) if skip else None

    def forward(
        self, x: Tensor, x0: Tensor, skip: Tensor | None, ve: Tensor | None, rope: Tensor, mask: Any, fused: bool
    ) -> Tensor:
        if self.skip_weight is not None:
            assert skip is not None
            x = x + self.skip_weight * skip
        if self.x0_mix is not None:
            x = self.x0_mix[0] * x + self.x0_mix[1] * x0
        x = x + self.attn(self.norm1(x), ve, rope, mask)
        return x + self.mlp(self.norm2(x), fused)


def make_norm(cfg: Config) -> nn.Module:
    return RMSNorm() if cfg.norm == "rms" else LayerNorm(cfg.n_embd, bias=cfg.bias)


def selective_contexts() -> Any:
    """Policy of selective recomputation: saved are every attention, whatever its backend, and every second matrix product.

    torch's own list of compute-intensive operators lacks the cuDNN and CPU attentions; math attention is bmm and softmax.
    """
    import torch.nn.attention.varlen  # defines its operator
    from torch._functorch.partitioners import get_default_op_list
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    linear = {aten.mm, aten.addmm}
    keep = {*get_default_op_list().compute_intensive_ops, aten._softmax, aten._safe_softmax}
    keep |= {torch.ops.higher_order.flex_attention, torch.ops.torch_attn._varlen_attn, torch.ops.gpt2_harness.relu2_mlp}
    names = [name for name in dir(aten) if name.startswith("_scaled_dot_product") and not name.endswith("backward")]
    keep |= {getattr(aten, name) for name in names}
    # Forward and recomputation count apart: with one counter, an odd number of products would swap their roles.
    products = {False: 0, True: 0}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        packet = getattr(op, "overloadpacket", op)
        if packet in linear:
            products[ctx.is_recompute] += 1
            if products[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if packet in keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def recomputing(forward: Callable[..., Tensor], how: str) -> Callable[..., Tensor]:
    """A block's forward whose activations are computed again in the backward pass (there is no dropout to replay)."""
    from torch.utils.checkpoint import checkpoint

    more: Any = {"context_fn": selective_contexts} if how == "selective" else {}

    def run(*args: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **more)

    return run


TIED_STD = 0.005  # of an embedding that is the head as well, for small first logits; blocks see it normed
COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019) or, by its config, the modern variant that the speedruns arrived at."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.dtype = COMPUTE_DTYPE[cfg.precision]
        self.wte = Embedding(cfg.padded_vocab, cfg.n_embd)
        self.wpe = Embedding(cfg.seq_len, cfg.n_embd) if cfg.position == "learned" else None
        n = cfg.value_embeds
        # Value embeddings (Zhou et al. 2024, arXiv 2410.17897, in the form of modded-nanogpt record 16): table j serves
        # blocks j and n_layer - n + j.
        self.value_tables = nn.ModuleList(Embedding(cfg.padded_vocab, cfg.n_embd) for _ in range(n))
        self.table_of = [i if i < n else i - (cfg.n_layer - n) if i >= cfg.n_layer - n else -1 for i in range(cfg.n_layer)]
        self.blocks = nn.ModuleList(
            Block(cfg, self.table_of[i] >= 0, cfg.unet_skip and i >= cfg.n_layer - cfg.n_layer // 2) for i in range(cfg.n_layer)
        )
        self.norm_f = make_norm(cfg)
        self.head = None if cfg.tied_head else Linear(cfg.n_embd, cfg.padded_vocab, bias=False)
        self.smear_gate = Linear(12, 1, bias=False) if cfg.smear else None
        self.smear_scale = nn.Parameter(torch.tensor(0.0)) if cfg.smear else None
        rope = rotary_table(cfg.seq_len, cfg.n_embd // cfg.n_head) if cfg.position == "rotary" else torch.empty(0)
        self.register_buffer("rope", rope, persistent=False)
        self.kernel: Kernel = "sdpa"
        self.most_documents: int | None = None  # see attention_mask
        self.one_graph = False  # validate with the graphs of training: a forward without gradients would be compiled apart
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        cfg = self.cfg
        generator = torch.Generator().manual_seed(cfg.seed)
        modern = cfg.norm == "rms"
        for name, p in self.named_parameters():
            if p.ndim < 2:
                continue  # biases are zeroed below; norms, mixes and scalars have their own starting values
            residual = name.endswith("proj.weight")
            if name == "head.weight" and cfg.tied_steps:
                p.copy_(self.wte.weight)
            elif name.endswith("gate.weight") or (cfg.zero_init and (residual or name == "head.weight")):
                p.zero_()
            elif modern and name.startswith(("wte", "value_tables")):
                p.normal_(std=TIED_STD if cfg.tied_steps and name == "wte.weight" else 1.0, generator=generator)
            elif modern:
                bound = 0.5 * 3**0.5 * cfg.n_embd**-0.5  # uniform of standard deviation 0.5/sqrt(C)
                p.uniform_(-bound, bound, generator=generator)
            else:  # GPT-2: 0.02, residual projections divided by sqrt(2 L), as in llm.c
                p.normal_(std=0.02 / (2 * cfg.n_layer) ** 0.5 if residual else 0.02, generator=generator)
        for name, p in self.named_parameters():
            if name.endswith(".bias"):
                p.zero_()

    @property
    def head_weight(self) -> Tensor:
        return self.wte.weight if self.head is None else self.head.weight

    def attention_mask(self, idx_BT: Tensor) -> Any:
        """What `attend` takes for these tokens."""
        kernel = "sdpa" if self.kernel == "varlen" and self.dtype == torch.float32 else self.kernel  # it has no fp32
        return attention_mask(self.cfg, kernel, idx_BT, self.most_documents)

    def hidden(self, idx_BT: Tensor) -> Tensor:
        """(B, T) token ids to the final normed residual stream (B, T, C) in the compute type."""
        T = idx_BT.size(1)
        if T > self.cfg.seq_len:
            raise ValueError(f"{T} positions exceed the model's context of {self.cfg.seq_len}")
        x = self.wte(idx_BT).to(self.dtype)
        if self.wpe is not None:
            x = x + self.wpe.weight[:T].to(self.dtype)
        if self.smear_gate is not None:
            assert self.smear_scale is not None
            gate = self.smear_scale * torch.sigmoid(self.smear_gate(x[:, 1:, :12]))
            x = torch.cat([x[:, :1], x[:, 1:] + gate.to(x.dtype) * x[:, :-1]], dim=1)
        if self.cfg.norm == "rms":
            x = F.rms_norm(x, (x.size(-1),))
        x0, skips, mask, fused = x, list[Tensor](), self.attention_mask(idx_BT), fuses_mlp(self.cfg, x)
        tables = [table(idx_BT).to(self.dtype) for table in self.value_tables]
        half = self.cfg.n_layer // 2
        for i, block in enumerate(self.blocks):
            # The last block of the first half pairs with the first of the second half, and so outwards.
            skip = skips.pop() if i >= self.cfg.n_layer - half and skips else None
            x = block(x, x0, skip, tables[self.table_of[i]] if self.table_of[i] >= 0 else None, self.rope, mask, fused)
            if self.cfg.unet_skip and i < half:
                skips.append(x)
        return self.norm_f(x)

    def forward(self, idx_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Sum of the token losses in nats (scalar fp32): the training path."""
        x_NC = self.hidden(idx_BT).flatten(0, 1)
        cfg, targets_N = self.cfg, targets_BT.flatten()
        return HeadLoss.apply(x_NC, self.head_weight, targets_N, cfg.vocab_size, cfg.softcap, cfg.head_precision)

    @torch.no_grad()
    def nll(self, idx_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Loss of every token in nats, (B, T) fp32, without gradients; 0 where the target is -1."""
        with torch.set_grad_enabled(self.one_graph):
            x_NC = self.hidden(idx_BT).flatten(0, 1).detach()
        return head_nll(x_NC, self.head_weight, targets_BT.flatten(), self.cfg.vocab_size, self.cfg.softcap).view_as(idx_BT)

    def logits(self, idx_BT: Tensor) -> Tensor:
        """(B, T, 50257) fp32 logits of the real ids."""
        return self.head_logits(self.hidden(idx_BT))

    def head_logits(self, x: Tensor) -> Tensor:
        """(..., C) of `hidden` to fp32 logits (..., 50257), softcap applied."""
        z = F.linear(x, self.head_weight[: self.cfg.vocab_size].to(x.dtype)).float()
        return self.cfg.softcap * torch.tanh(z / self.cfg.softcap) if self.cfg.softcap else z


def parameter_count(cfg: Config) -> dict[str, int]:
    """Parameters by kind: {"total", "matmul"}; matmul counts the weights every token is multiplied by, a tied head once."""
    with torch.device("meta"):
        shapes = {name: p.numel() for name, p in GPT(cfg).named_parameters()}
    head = cfg.padded_vocab * cfg.n_embd
    inside = {name: n for name, n in shapes.items() if name.startswith("blocks.") and name.endswith(".weight")}
    matmul = sum(n for name, n in inside.items() if ".norm" not in name)
    return {"total": sum(shapes.values()), "matmul": matmul + head}


def flops_per_token(cfg: Config) -> int:
    """Training FLOPs per token: 6*N_matmul + 12*L*C*T (Chowdhery et al. 2022, appendix B), no causal discount.

    T is at most the window. A document mask leaves out more, by the text, so that such runs state no MFU (`peak_flops`).
    """
    return 6 * parameter_count(cfg)["matmul"] + 12 * cfg.n_layer * cfg.n_embd * cfg.attended


# ------------------------------------------------------------------------------------------------ loss
#
# Head, softcap and cross entropy together are a third of the work of GPT-2 small. The loss is computed chunk by chunk
# and its gradients in the same pass, in place of the logits, so that the logits are written once, in bf16, and no fp32
# copy of them ever exists.

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch has no Triton; the plain form below runs everywhere
    triton = None

HEAD_CHUNK = {"cuda": 16_384, "cpu": 256}  # tokens whose logits exist at once; 16,384 x 50,304 bf16 is 1.6 GB

if triton is not None:

    @triton.jit
    def _tanh(x, FAST: tl.constexpr):
        if FAST:  # one instruction, relative error 2^-11: as exact as the bf16 logits
            return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return 2 * tl.sigmoid(2 * x) - 1

    @triton.jit
    def _logit_gradient(z, wanted, lse, cap, HAS_CAP: tl.constexpr, FAST: tl.constexpr):
        """d(loss)/dz of logits, `wanted` being 1 at the target; lse: of the capped logits, to the base 2."""
        LOG2E: tl.constexpr = 1.4426950408889634
        if HAS_CAP:
            t = _tanh(z * (1 / cap), FAST)
            grad = (tl.exp2(t * (cap * LOG2E) - lse) - wanted) * (1 - t * t)
        else:
            grad = tl.exp2(z * LOG2E - lse) - wanted
        return grad

    @triton.jit
    def _cross_entropy_kernel(
        z_ptr, target_ptr, nll_ptr, lse_ptr, cap, V, width,
        HAS_CAP: tl.constexpr, GRAD: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program per token: the loss by a logsumexp kept per lane, then the logits are overwritten by their gradient.

        With a softcap no logit exceeds it, so it serves as the maximum and no running one is needed.
        """
        LOG2E: tl.constexpr = 1.4426950408889634
        row = tl.program_id(0).to(tl.int64)
        z_ptr += row * width
        lane = tl.arange(0, BLOCK)
        top = tl.full((BLOCK,), -1e30, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            col = start + lane
            z = tl.load(z_ptr + col, mask=col < V, other=0.0).to(tl.float32)
            if HAS_CAP:
                e = tl.exp2((_tanh(z * (1 / cap), FAST) - 1) * (cap * LOG2E))
                total += tl.where(col < V, e, 0.0)
            else:
                z = tl.where(col < V, z * LOG2E, -1e30)
                new_top = tl.maximum(top, z)
                total = total * tl.exp2(top - new_top) + tl.exp2(z - new_top)
                top = new_top
        if HAS_CAP:
            lse = cap * LOG2E + tl.log2(tl.sum(total, 0))
        else:
            highest = tl.max(top, 0)
            lse = highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))
        target = tl.load(target_ptr + row)
        valid = target >= 0
        at_target = tl.load(z_ptr + tl.maximum(target, 0)).to(tl.float32)
        if HAS_CAP:
            at_target = cap * _tanh(at_target * (1 / cap), FAST)
        tl.store(nll_ptr + row, tl.where(valid, lse / LOG2E - at_target, 0.0))
        tl.store(lse_ptr + row, lse)
        if GRAD:
            tl.debug_barrier()  # the target's logit must be read before it is overwritten
            for start in range(0, width, BLOCK):
                col = start + lane
                z = tl.load(z_ptr + col, mask=col < V, other=0.0).to(tl.float32)
                grad = _logit_gradient(z, tl.where(col == target, 1.0, 0.0), lse, cap, HAS_CAP, FAST)
                grad = tl.where((col < V) & valid, grad, 0.0)
                tl.store(z_ptr + col, grad.to(z_ptr.dtype.element_ty), mask=col < width)

    @triton.jit
    def _fp8_gradient_kernel(
        z_ptr, target_ptr, lse_ptr, g_ptr, packed_ptr, cap, N, V, width, unit,
        HAS_CAP: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    ):  # fmt: skip
        """One program per tile of 4 ROWS x COLS: the gradient times `unit`, as (N, V) and as (V, N).

        The transposed tile goes through shared memory: four rows are packed into a word there, since bytes would be slow.
        """
        four, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
        real, inside = (col < V)[None, :], (four * 4 < N)[:, None] & (col < width)[None, :]
        packed = tl.zeros((ROWS, COLS), tl.uint32)
        for i in tl.static_range(4):
            row = (four * 4 + i).to(tl.int64)
            z = tl.load(z_ptr + row[:, None] * width + col[None, :], mask=inside, other=0.0).to(tl.float32)
            lse = tl.load(lse_ptr + row, mask=row < N, other=0.0)[:, None]
            target = tl.load(target_ptr + row, mask=row < N, other=-1)[:, None]
            grad = _logit_gradient(z, tl.where(col[None, :] == target, 1.0, 0.0), lse, cap, HAS_CAP, FAST)
            # e5m2 is the upper byte of fp16; rounded to the nearest, or to even. (Triton 3.6 packs its own cast wrongly.)
            half = tl.where(real & (target >= 0), grad * unit, 0.0).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
            byte = ((half + 0x7F + ((half >> 8) & 1)) >> 8) & 0xFF
            byte = tl.where((half & 0x7FFF) > 0x7C00, 0x7E, byte)  # NaN, which rounding would carry over into a zero
            tl.store(g_ptr + row[:, None] * width + col[None, :], byte.to(tl.uint8), mask=inside)
            packed |= byte << (8 * i)
        tl.store(packed_ptr + col.to(tl.int64)[None, :] * (N // 4) + four[:, None], packed, mask=inside)


def _device_losses(
    z_NV: Tensor, targets_N: Tensor, vocab: int, cap: float, grad: bool, fast: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Losses and logsumexps (to the base 2) of every token, (N,) fp32 each, by the kernel."""
    nll_N, lse_N = torch.empty(2, len(z_NV), dtype=torch.float32, device=z_NV.device)
    _cross_entropy_kernel[(len(z_NV),)](
        z_NV, targets_N, nll_N, lse_N, cap, vocab, z_NV.size(1), HAS_CAP=cap > 0, GRAD=grad, FAST=fast, BLOCK=1024, num_warps=4
    )
    return nll_N, lse_N


def cross_entropy_(z_NV: Tensor, targets_N: Tensor, vocab: int, cap: float, grad: bool) -> Tensor:
    """Token losses (N,) fp32 from raw head outputs (N, V padded); with `grad`, z becomes d(sum of losses)/dz in place.

    Ids from `vocab` on are masked out; a target of -1 has no loss and no gradient.
    """
    if z_NV.is_cuda and triton is not None:
        return _device_losses(z_NV, targets_N, vocab, cap, grad, fast=grad)[0]
    nll_N = torch.empty(len(z_NV), dtype=torch.float32, device=z_NV.device)
    for rows in range(0, len(z_NV), 32):  # few rows at a time stay in the processor's cache
        part, target = z_NV[rows : rows + 32], targets_N[rows : rows + 32]
        z = part[:, :vocab].float()
        if cap:
            t = torch.tanh(z / cap)
            z = cap * t
        lse = torch.logsumexp(z, dim=1, keepdim=True)
        valid = (target >= 0).unsqueeze(1)
        at_target = target.clamp_min(0).unsqueeze(1)
        nll_N[rows : rows + 32] = ((lse - z.gather(1, at_target)) * valid).squeeze(1)
        if grad:
            g = torch.exp(z - lse)
            g.scatter_add_(1, at_target, torch.full_like(lse, -1.0))
            if cap:
                g *= 1 - t * t
            part[:, :vocab] = g * valid
            part[:, vocab:] = 0
    return nll_N


FP8_UNIT = 2.0**14  # of the logits' gradients, which are at most 1: e5m2 then holds them from 4e-9 on with 2 bits of mantissa


def cross_entropy_fp8(z_NV: Tensor, targets_N: Tensor, vocab: int, cap: float) -> tuple[Tensor, Tensor, Tensor]:
    """cross_entropy_, but the gradient times FP8_UNIT comes in e5m2, as (N, V) and as (V, N). z is lost; N is a multiple of 4.

    An fp8 product wants both of its operands contiguous along the side that it sums over, so the gradient is needed both ways.
    """
    if not z_NV.is_cuda or triton is None:
        nll_N = cross_entropy_(z_NV, targets_N, vocab, cap, grad=True)
        g_NV = (z_NV.float() * FP8_UNIT).to(torch.float8_e5m2)
        return nll_N, g_NV, g_NV.T.contiguous()
    nll_N, lse_N = _device_losses(z_NV, targets_N, vocab, cap, grad=False, fast=True)
    N, V = z_NV.shape
    g_NV, g_VN = (torch.empty(shape, dtype=torch.float8_e5m2, device=z_NV.device) for shape in ((N, V), (V, N)))
    _fp8_gradient_kernel[(triton.cdiv(N, 128), triton.cdiv(V, 64))](
        z_NV, targets_N, lse_N, g_NV.view(torch.uint8), g_VN.view(torch.int32), cap, N, vocab, V, FP8_UNIT,
        HAS_CAP=cap > 0, FAST=True, ROWS=32, COLS=64, num_warps=8,
    )  # fmt: skip
    return nll_N, g_NV, g_VN


def _mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with an fp32 result."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def has_fp8(device: torch.device, precision: str) -> bool:
    """Whether fp8 products of activations in this precision run there."""
    return precision == "bf16" and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def to_fp8(x: Tensor, by_row: bool) -> tuple[Tensor, Tensor]:
    """x (R, C) in float8_e4m3fn and the scale, of the whole () or of each row (R, 1): x is about x8 * scale."""
    largest = x.abs().amax(1, keepdim=True) if by_row else x.abs().amax()
    scale = (largest.float().clamp_min(1e-12) / 448.0).to(x.dtype)
    return (x / scale).to(torch.float8_e4m3fn), scale.float()


class HeadLoss(torch.autograd.Function):
    """Sum of cross entropies of softcap(x @ W.T): (N, C), (V, C) -> scalar. Gradients are made in the forward pass.

    With fp8 the logits are an fp8 product (e4m3, one scale a tensor or, "fp8-rows", a row); with "fp8-all" the gradients of x
    and W are too, from logit gradients in e5m2, summed in fp32 (without the tensor cores' fast accumulation).
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_NC: Tensor, w_VC: Tensor, targets_N: Tensor, vocab: int, cap: float, precision: str
    ) -> Tensor:  # fmt: skip
        w = w_VC.to(x_NC.dtype)
        grad = any(ctx.needs_input_grad[:2])
        loss = torch.zeros((), dtype=torch.float32, device=x_NC.device)
        dx = torch.empty_like(x_NC) if grad else None
        dw: Tensor | None = None
        step = HEAD_CHUNK[x_NC.device.type]
        fp8, by_row, backward8 = precision != "same", precision == "fp8-rows", precision == "fp8-all" and grad
        if fp8:
            (x8, x_scale), (w8, w_scale) = to_fp8(x_NC, by_row), to_fp8(w, by_row)
        if backward8:
            w8_CV, unit = w8.T.contiguous(), torch.full_like(w_scale, 1 / FP8_UNIT)
        for start in range(0, len(x_NC), step):
            here = slice(start, start + step)
            x, targets = x_NC[here], targets_N[here]
            if fp8:
                scales = (x_scale[here], w_scale.T) if by_row else (x_scale, w_scale)
                z = torch._scaled_mm(x8[here], w8.T, *scales, out_dtype=x.dtype, use_fast_accum=True)
            else:
                z = x @ w.T
            if backward8:
                nll, g, g_VN = cross_entropy_fp8(z, targets, vocab, cap)
                assert dx is not None
                dx[here] = torch._scaled_mm(g, w8_CV.T, unit, w_scale, out_dtype=x.dtype)
                x8_CN = x8[here].T.contiguous()
                part = torch._scaled_mm(g_VN, x8_CN.T, unit, x_scale, out_dtype=torch.float32)
                del g, g_VN
            else:
                nll = cross_entropy_(z, targets, vocab, cap, grad)
                if grad:
                    assert dx is not None
                    torch.mm(z, w, out=dx[here])
                    part = _mm_fp32(z.T, x)
            loss += nll.sum()
            if grad:
                dw = part if dw is None else dw.add_(part)
                del part
            del z  # before the next chunk's logits are made
        ctx.save_for_backward(dx, dw)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:  # type: ignore[override]
        dx, dw = ctx.saved_tensors
        return dx * grad_loss.to(dx.dtype), dw * grad_loss, None, None, None, None


def head_nll(x_NC: Tensor, w_VC: Tensor, targets_N: Tensor, vocab: int, cap: float) -> Tensor:
    """Token losses (N,) fp32 without gradients, from fp32 logits of one small chunk at a time."""
    w = w_VC.to(x_NC.dtype)
    step = HEAD_CHUNK[x_NC.device.type]
    parts = [
        cross_entropy_(_mm_fp32(x, w.T), t, vocab, cap, grad=False)
        for x, t in zip(x_NC.split(step), targets_N.split(step), strict=True)
    ]
    return torch.cat(parts)


# ------------------------------------------------------------------------------------------------ fused MLP

if triton is not None:

    @triton.jit
    def _relu2_kernel(
        a_desc, b_desc, kept_desc, out_desc, M, N, K,
        BACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr,
    ):  # fmt: skip
        """Persistent product of (M, K) and (N, K), or (K, N) if BACK; tiles pass the activation before they are stored."""
        columns = N // BN
        for tile in tl.range(tl.program_id(0), (M // BM) * columns, PROGRAMS, flatten=True):
            m, n = tile // columns * BM, tile % columns * BN
            acc = tl.zeros((BM, BN), tl.float32)
            for k in range(0, K, BK):
                a = a_desc.load([m, k])
                acc = tl.dot(a, b_desc.load([k, n]), acc) if BACK else tl.dot(a, b_desc.load([n, k]).T, acc)
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))  # halves need less shared memory
            for half in tl.static_range(2):
                h = right if half else left
                at = n + half * (BN // 2)
                if BACK:
                    h *= 2 * tl.sqrt(kept_desc.load([m, at]).to(tl.float32))
                else:
                    h = tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL)
                    h *= h
                out_desc.store([m, at], h.to(out_desc.dtype))


def fuses_mlp(cfg: Config, x_BTC: Tensor) -> bool:
    """Whether the MLP of these activations is `relu2_mlp`, whose tiles were chosen on Hopper."""
    fits = x_BTC.is_cuda and x_BTC.dtype == torch.bfloat16 and x_BTC[..., 0].numel() % 128 == 0 and cfg.n_embd % 64 == 0
    return cfg.fusable_mlp and fits and triton is not None and torch.cuda.get_device_capability(x_BTC.device)[0] == 9


def relu2_product(a_MK: Tensor, b: Tensor, kept_MN: Tensor | None) -> Tensor:
    """relu(a @ b.T)^2 for b (N, K). With that as `kept`, the factor of its gradient: (a @ b) * 2 relu(.) for b (K, N)."""
    if not a_MK.is_cuda:
        return F.relu(a_MK @ b.T).square() if kept_MN is None else a_MK @ b * (2 * kept_MN.sqrt())
    from triton.tools.tensor_descriptor import TensorDescriptor

    back = kept_MN is not None
    (M, K), N, (BM, BN, BK) = a_MK.shape, b.size(1 if back else 0), (128, 256, 64)
    out_MN = torch.empty(M, N, dtype=a_MK.dtype, device=a_MK.device)
    shapes = [BM, BK], [BK, BN] if back else [BN, BK], [BM, BN // 2], [BM, BN // 2]
    tensors = a_MK.contiguous(), b.contiguous(), out_MN if kept_MN is None else kept_MN, out_MN
    descriptors = [TensorDescriptor.from_tensor(t, shape) for t, shape in zip(tensors, shapes, strict=True)]
    processors = torch.cuda.get_device_properties(a_MK.device).multi_processor_count
    _relu2_kernel[(min(processors, M // BM * (N // BN)),)](
        *descriptors, M, N, K, BACK=back, BM=BM, BN=BN, BK=BK, PROGRAMS=processors, num_warps=8, num_stages=3
    )
    return out_MN


# Operators rather than an autograd.Function, with which torch.compile would find nothing again on disk at the next start.
@torch.library.custom_op("gpt2_harness::relu2_mlp", mutates_args=())
def relu2_mlp(x_NC: Tensor, up_FC: Tensor, down_CF: Tensor) -> tuple[Tensor, Tensor]:
    """h @ down.T (N, C) and h = relu(x @ up.T)^2 (N, F), which is for the backward alone and has no gradient itself.

    The square costs no pass over (N, F) of its own, forward and backward: 2.85 to 2.56 ms a layer for 65,536 tokens (H200).
    """
    h_NF = relu2_product(x_NC, up_FC, None)
    return h_NF @ down_CF.T, h_NF


@torch.library.custom_op("gpt2_harness::relu2_mlp_backward", mutates_args=())
def relu2_mlp_backward(
    dy_NC: Tensor, x_NC: Tensor, up_FC: Tensor, down_CF: Tensor, h_NF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, up and down."""
    dh_NF = relu2_product(dy_NC, down_CF, h_NF)
    return dh_NF @ up_FC, dh_NF.T @ x_NC, dy_NC.T @ h_NF


relu2_mlp.register_fake(lambda x, up, down: (x.new_empty(x.shape), x.new_empty(len(x), len(up))))
relu2_mlp_backward.register_fake(lambda dy, x, up, down, h: tuple(t.new_empty(t.shape) for t in (x, up, down)))


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[1])


def _through_mlp(ctx: Any, dy_NC: Tensor | None, dh_NF: Tensor | None) -> tuple[Tensor | None, ...]:
    assert dh_NF is None, "the hidden layer of relu2_mlp has no gradient of its own"
    return (None,) * 3 if dy_NC is None else relu2_mlp_backward(dy_NC, *ctx.saved_tensors)


relu2_mlp.register_autograd(_through_mlp, setup_context=_keep_for_backward)


# ------------------------------------------------------------------------------------------------ optimizer

# Polar Express: the optimal odd quintics for singular values in [1e-3, 1], five steps in bf16 (Amsel et al. 2025,
# arXiv 2505.16932, algorithm 1). All but the last are divided for a safety factor of 1.01 against rounding.
POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
POLAR_SAFETY = 1.01


def orthogonalize(g_KRC: Tensor) -> Tensor:
    """U V^T of each matrix of a stack (K, R, C), nearly: Newton-Schulz iterations with Polar Express coefficients.

    Singular values of at least 1e-3 of the Frobenius norm end near 1. bf16 on CUDA, fp32 on CPU.
    """
    x = g_KRC.to(torch.bfloat16 if g_KRC.is_cuda else torch.float32)
    tall = x.size(1) > x.size(2)
    if tall:
        x = x.mT.contiguous()  # products of transposed stacks were measured at half the speed
    x = x / (x.norm(dim=(1, 2), keepdim=True) * POLAR_SAFETY + 1e-7)
    for i, (a, b, c) in enumerate(POLAR_EXPRESS):
        if i < len(POLAR_EXPRESS) - 1:
            a, b, c = a / POLAR_SAFETY, b / POLAR_SAFETY**3, c / POLAR_SAFETY**5
        gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a)
    return x.mT if tall else x


def muon_update(
    p_KRC: Tensor, g_KRC: Tensor, momentum_KRC: Tensor, second_KR1: Tensor | None,
    lr: Tensor, mu: Tensor, wd: float, beta2: float, skip: Tensor,
) -> Tensor:  # fmt: skip
    """New weights of a stack of matrices; momentum and second moment are changed in place, nothing at all if `skip`.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): Nesterov momentum, orthogonalized. With beta2, NorMuon
    (Li et al. 2025, arXiv 2510.05491): rows divided by the root of a running mean square, the Frobenius norm kept.
    Weight decay is cautious (Chen et al. 2025, arXiv 2510.12402): only where the update also shrinks the weight.
    lr, mu: 0-D tensors, so that a schedule does not recompile.
    """
    momentum = g_KRC + mu * (momentum_KRC - g_KRC)
    update = orthogonalize(g_KRC + mu * (momentum - g_KRC)).float()
    if second_KR1 is not None:
        second = torch.lerp(update.square().mean(dim=2, keepdim=True), second_KR1, beta2)
        scaled = update * second.clamp_min(1e-10).rsqrt()
        update = scaled * (update.norm(dim=(1, 2), keepdim=True) / scaled.norm(dim=(1, 2), keepdim=True).clamp_min(1e-10))
        second_KR1.copy_(torch.where(skip, second_KR1, second))
    momentum_KRC.copy_(torch.where(skip, momentum_KRC, momentum))
    if wd:
        update = update + wd * p_KRC * (update * p_KRC >= 0)
    # Rectangular matrices get the larger step that keeps the size of their output change (Jordan et al. 2024).
    scale = max(1.0, p_KRC.size(1) / p_KRC.size(2)) ** 0.5
    return torch.where(skip, p_KRC, p_KRC - lr * scale * update)


def local(t: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP shards; any other as it is."""
    return t.to_local() if hasattr(t, "to_local") else t


def whole(t: Tensor) -> Tensor:
    """The whole of a sharded tensor, gathered (a collective of all ranks); any other as it is."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def shard_like(part: Tensor, t: Any) -> Tensor:
    """`part` as this rank's part of a tensor that is sharded like t; as it is where t is not sharded."""
    if local(t) is t:
        return part
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    mesh = t.device_mesh if part.device.type == t.device_mesh.device_type else init_device_mesh("cpu", t.device_mesh.shape)
    return DTensor.from_local(part, mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride())


MUON_WEIGHTS = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight")


def is_muon(name: str, cfg: Config) -> bool:
    return cfg.optimizer == "muon" and name.startswith("blocks.") and name.endswith(MUON_WEIGHTS)


def matrices(name: str, t: Tensor) -> Tensor:
    """A weight as its stack of separate matrices (K, R, C): the fused query, key and value are three."""
    return t.view(3, -1, t.size(1)) if name.endswith("attn.qkv.weight") else t.unsqueeze(0)


def assign_owners(costs: dict[str, float], world: int) -> dict[str, int]:
    """Longest-processing-time assignment: each name goes to the rank with the least work so far. Same on all ranks."""
    load = [0.0] * world
    owner: dict[str, int] = {}
    for name in sorted(costs, key=lambda n: (-costs[n], n)):
        rank = min(range(world), key=lambda r: (load[r], r))
        owner[name] = rank
        load[rank] += costs[name]
    return owner


class Optimizer:
    """Muon for the matrices inside blocks and AdamW for the rest, over any number of ranks.

    ddp:    gradients are averaged by DDP, every rank updates everything.
    owner:  as soon as a Muon gradient is complete in the backward pass it is reduced to the one rank that owns the matrix
            and its momentum; that rank orthogonalizes it and broadcasts the new weights. AdamW gradients are all-reduced.
    zero1:  AdamW parameters have owners too (ZeRO stage 1, Rajbhandari et al. 2020, by whole parameters).
    fsdp*:  FSDP2 has averaged and sharded the gradients; AdamW updates shards, Muon gathers whole matrices for their owner.
    Collectives are started in one fixed order on every rank and their handles kept until waited for.
    """

    def __init__(self, model: GPT, cfg: Config, rank: int, world: int, compiled: bool):
        self.cfg, self.rank, self.world = cfg, rank, world
        self.params = dict(model.named_parameters())
        self.sharded = [n for n, p in self.params.items() if local(p) is not p]
        shapes = {n: matrices(n, torch.empty(p.shape, device="meta")).shape for n, p in self.params.items() if is_muon(n, cfg)}
        self.owner: dict[str, int] = {}  # parameters with one owner; the others are updated by every rank
        self.reduces = world > 1 and cfg.parallel != "ddp"
        if self.reduces:
            self.owner |= assign_owners({n: float(shape.numel() * min(shape[1:])) for n, shape in shapes.items()}, world)
        if self.reduces and cfg.parallel == "zero1":
            self.owner |= assign_owners({n: float(p.numel()) for n, p in self.params.items() if n not in shapes}, world)
            if cfg.tied_steps:
                self.owner["head.weight"] = self.owner["wte.weight"]  # who needs the gradients of both
        mine = [n for n in self.params if self.owner.get(n, rank) == rank]
        self.state_tensors: dict[str, Tensor] = {}

        # Muon: matrices of one shape are one stack; momentum lives as the stack.
        self.muon = list(shapes)
        self.stacks: dict[tuple[int, ...], list[str]] = {}
        for name in self.muon:
            if name in mine:
                self.stacks.setdefault(tuple(shapes[name][1:]), []).append(name)
        self.momentum, self.second = {}, {}
        for shape, names in self.stacks.items():
            counts, device = [shapes[n][0] for n in names], self.params[names[0]].device
            self.momentum[shape] = torch.zeros(sum(counts), *shape, device=device)
            self.second[shape] = torch.zeros(sum(counts), shape[0], 1, device=device) if cfg.muon_beta2 else None
            for kind, stack in (("momentum", self.momentum[shape]), ("second", self.second[shape])):
                parts = [] if stack is None else stack.split(counts)
                self.state_tensors |= {f"{kind}.{n}": part.flatten(0, 1) for n, part in zip(names, parts)}
        self.muon_update = torch.compile(muon_update, fullgraph=True, dynamic=False) if compiled else muon_update

        # AdamW: torch's own fused one, called once for each learning rate and decay.
        self.adam_groups: dict[tuple[float, float], list[str]] = {}
        for name in (n for n in mine if n not in shapes):
            p = self.params[name]
            matrix = p.ndim >= 2 and not name.endswith("gate.weight")
            lr = cfg.lr if matrix else cfg.scalar_lr
            if name == "head.weight" or (name == "wte.weight" and cfg.tied_steps):
                lr = cfg.head_lr
            elif name.startswith(("wte", "wpe", "value_tables")):
                lr = cfg.embed_lr
            self.adam_groups.setdefault((lr, cfg.weight_decay if matrix else 0.0), []).append(name)
            self.state_tensors[f"step.{name}"] = torch.zeros((), dtype=torch.float32, device=p.device)
            for kind in ("exp_avg", "exp_avg_sq"):
                self.state_tensors[f"{kind}.{name}"] = shard_like(torch.zeros_like(local(p.detach())), p)

        # Gradient reduction in the backward pass, in one fixed order: last parameter first. Small ones go together.
        self.works: list[tuple[Any, Tensor, Tensor]] = []
        here = [n for n in self.params if n not in self.sharded]
        self.large, self.small = ([n for n in here if (self.params[n].numel() >= 65_536) == size] for size in (True, False))
        self.waiting = self.large.copy()
        self.ready: set[str] = set()
        self.sync = True  # off for all but the last micro-step
        for name in self.large if self.reduces else []:
            self.params[name].register_post_accumulate_grad_hook(functools.partial(self._gradient_complete, name))
        # The norm counts every parameter once: parts and owned ones where they are, replicated ones as a world-th on each rank.
        alone = [n for n in here if self.owner.get(n) == rank] + self.sharded
        self.norm_parts = [(alone, 1), ([n for n in here if n not in self.owner], world)]
        self.scaled = [n for n in self.params if n in mine or n in self.sharded]

    def grad(self, name: str) -> Tensor:
        grad = self.params[name].grad
        assert grad is not None, f"{name} got no gradient"
        return grad

    def _gradient_complete(self, name: str, _: Tensor) -> None:
        """Starts the reductions whose turn has come."""
        if not self.sync:
            return
        self.ready.add(name)
        while self.waiting and self.waiting[-1] in self.ready:
            grad = self.grad(name := self.waiting.pop())
            sent = grad.bfloat16() if self.cfg.reduce_precision == "bf16" else grad
            if name in self.owner:
                work = dist.reduce(sent, dst=self.owner[name], async_op=True)
            else:
                work = dist.all_reduce(sent, async_op=True)
            self.works.append((work, sent, grad))

    def finish_gradients(self, control: Tensor, tied: bool = False) -> Tensor:
        """Completes the reductions. Returns the global gradient norm; adds up `control` (a small fp32 vector) over the ranks.

        tied: head and token embedding, which began as copies, both get the sum of their gradients, and so stay copies.
        """
        if self.reduces:
            assert not self.waiting, "a parameter got no gradient"
            self.waiting = self.large.copy()
            self.ready.clear()
            if self.small:
                grads = [self.grad(n) for n in self.small]
                flat = torch.cat([g.flatten() for g in grads])
                dist.all_reduce(flat)
                for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                    g.copy_(part.view_as(g))
            for work, sent, grad in self.works:
                work.wait()
                if sent is not grad:
                    grad.copy_(sent)
            self.works.clear()
        if tied:
            head, wte = (local(self.grad(n)) for n in ("head.weight", "wte.weight"))
            wte.add_(head)
            head.zero_()  # one weight counts once in the norm
        squares = torch.zeros((), device=control.device)
        for names, copies in self.norm_parts:
            if names:
                norms = torch._foreach_norm([local(self.grad(n)) for n in names])
                squares = squares + torch.stack(norms).square().sum() / copies
        packed = torch.cat([control, squares.unsqueeze(0)])
        if self.world > 1:
            dist.all_reduce(packed)
        control.copy_(packed[:-1])
        if tied:
            head.copy_(wte)
        return packed[-1].sqrt()

    @torch.no_grad()
    def step(self, lr_scale: float, mu: float, grad_scale: Tensor | None, skip: Tensor) -> None:
        """One update, or none at all where `skip` (0-D bool on the device) says so, without asking the host.

        lr_scale: the schedule's factor. mu: Muon momentum now. grad_scale: factor for all gradients (clipping).
        """
        if grad_scale is not None:
            torch._foreach_mul_([local(self.grad(n)) for n in self.scaled], grad_scale)
        muon = {n: (whole(self.params[n].detach()), whole(self.grad(n))) for n in self.muon}
        lr_, mu_ = torch.tensor(self.cfg.muon_lr * lr_scale), torch.tensor(mu)
        for shape, names in self.stacks.items():
            ps, gs = ([m for n in names for m in matrices(n, muon[n][i]).unbind()] for i in (0, 1))
            new = self.muon_update(
                torch.stack(ps), torch.stack(gs), self.momentum[shape], self.second[shape],
                lr_, mu_, self.cfg.muon_wd, self.cfg.muon_beta2, skip,
            )  # fmt: skip
            torch._foreach_copy_(ps, list(new.unbind()))
        found_inf = skip.float()  # the fused kernel leaves weights and moments alone where this is 1
        for (lr, wd), names in self.adam_groups.items():
            steps, m, v = ([local(self.state_tensors[f"{k}.{n}"]) for n in names] for k in ("step", "exp_avg", "exp_avg_sq"))
            adamw(
                [local(self.params[n].detach()) for n in names], [local(self.grad(n)) for n in names], m, v, [], steps,
                fused=True, found_inf=found_inf, amsgrad=False, maximize=False, lr=lr * lr_scale, weight_decay=wd,
                beta1=self.cfg.beta1, beta2=self.cfg.beta2, eps=self.cfg.eps,
            )  # fmt: skip
        sent = [muon[n][0] if n in muon else self.params[n].data for n in self.owner]
        works = [dist.broadcast(t, src=owner, async_op=True) for t, owner in zip(sent, self.owner.values())]
        for work in works:
            work.wait()
        for name in (n for n in self.muon if n in self.sharded):  # each rank keeps its own part
            from torch.distributed.tensor import distribute_tensor

            p: Any = self.params[name]
            local(p).copy_(local(distribute_tensor(muon[name][0], p.device_mesh, p.placements, src_data_rank=None)))

    def zero_grad(self) -> None:
        for p in self.params.values():
            p.grad = None

    def state(self) -> dict[str, Tensor]:
        """This rank's optimizer state by parameter name; every entry of an owned parameter exists on its owner only."""
        return self.state_tensors


# ------------------------------------------------------------------------------------------------ run directory


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to; then fsync, rename to `path`, fsync the folder."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write_atomic(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)


def fsync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomic(path, json.dumps({"schema": SCHEMA, **value}, indent=1) + "\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON file of a run. Raises UserError if it is missing, broken, or of an unknown version."""
    try:
        value = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read: {e}") from None
    found = value.get("schema") if isinstance(value, dict) else None
    if found != SCHEMA:
        raise UserError(f"{path} has schema {found!r}; this program reads {SCHEMA}")
    return value


def read_metrics(run_dir: str | Path) -> dict[str, list[dict[str, Any]]]:
    """{"train": rows, "val": rows} of metrics.jsonl in order of steps; a later line replaces an earlier one of its step.

    What an earlier attempt did beyond the step that a later one went on from is left out, and a line cut short by a kill.
    """
    rows: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "val": {}}
    path = Path(run_dir) / "metrics.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        if row["kind"] == "resume":
            rows = {kind: {s: r for s, r in by_step.items() if s <= row["step"]} for kind, by_step in rows.items()}
        else:
            rows[row["kind"]][row["step"]] = row
    return {kind: [by_step[s] for s in sorted(by_step)] for kind, by_step in rows.items()}


def config_from_json(values: dict[str, Any], where: str | Path) -> Config:
    """Config from its saved fields. Raises UserError for fields this version does not know."""
    known = {f.name for f in dataclasses.fields(Config)}
    if unknown := sorted(set(values) - known):
        raise UserError(f"{where}: unknown config fields {', '.join(unknown)}; it was written by another version")
    return Config(**values)


def load_run(run_dir: str | Path, device: str | torch.device = "cpu") -> tuple[GPT, Config]:
    """The trained model of a run, in eval mode, from model.safetensors (no pickle). Raises UserError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    cfg = config_from_json(read_json(Path(run_dir) / "config.json")["config"], Path(run_dir) / "config.json")
    path = Path(run_dir) / "model.safetensors"
    if not path.exists():
        raise UserError(f"{path} does not exist: the run has not finished; resume it with --run-dir {run_dir} --resume")
    model = GPT(cfg)
    try:
        model.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as e:
        raise UserError(f"{path} does not fit its config: {str(e).splitlines()[0]}") from None
    if cfg.masked and torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8:
        model.kernel = "varlen"  # a (T, T) mask would not fit for long rows
    return model.to(device).eval(), cfg


def sha256_file(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sha256_files(paths: list[Path]) -> list[str]:
    """As above, of several at once: every rank has a file in a checkpoint, and rank 0 reads them all."""
    with multiprocessing.pool.ThreadPool(8) as pool:  # concurrent.futures starts no thread once the interpreter is going
        return pool.map(sha256_file, paths)


def save_weights(model: GPT, cfg: Config, path: Path, state: dict[str, Tensor] | None = None) -> str:
    """model.safetensors, fp32, from `state` where it was gathered before; returns its sha256."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {k: v.detach().cpu().contiguous() for k, v in (state or model.state_dict()).items()}
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"config": json.dumps(public_config(cfg))})
        except SafetensorError as e:  # a full disk comes as this one
            raise OSError(errno.ENOSPC if "os error 28" in str(e) else errno.EIO, str(e)) from None
        os.chmod(temporary, 0o644)  # safetensors makes it readable by its owner alone
        return sha256_file(temporary)


def lock_run(run_dir: Path, patience: float) -> io.TextIOBase:
    """Holds the run directory for this process; the lock dies with it. Raises UserError if another writer has it."""
    handle = open(run_dir / ".lock", "a")  # noqa: SIM115  (kept open on purpose)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError:
            if time.monotonic() > deadline:
                handle.close()
                raise UserError(f"{run_dir} is being written by another process; wait for it or stop it first") from None
            time.sleep(0.2)


# Dense bf16 tensor-core peaks in TFLOP/s from the vendors' datasheets (without sparsity).
PEAK_BF16: dict[str, float] = {
    "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.4, "H200 NVL": 835.5, "H200": 989.4, "GH200": 989.4, "B200": 2250.0,
    "A100": 312.0, "A10G": 70.0, "L40S": 362.0, "L4": 121.0, "RTX 4090": 165.2, "RTX 3090": 71.0,
}  # fmt: skip


def peak_flops(device: torch.device, cfg: Config) -> float | None:
    """Peak FLOP/s for the MFU, or None where it is not known, the arithmetic is not 16-bit, or the FLOPs depend on the text."""
    if device.type != "cuda" or cfg.precision == "fp32" or cfg.document_mask:
        return None
    name = torch.cuda.get_device_name(device)
    if {"MIG", "Ti", "Laptop", "SUPER", "D", "Max"} & set(re.split(r"[\s-]+", name)):  # a slice, or a chip of a like name
        return None
    # Whole words only: an L40 is no L4.
    return next((peak * 1e12 for key, peak in PEAK_BF16.items() if re.search(rf"\b{re.escape(key)}\b", name)), None)


class _SeenOps(torch.utils._python_dispatch.TorchDispatchMode):
    attention = "math"  # the fused operator that has run, if any

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.attention == "math" and ("scaled_dot_product" in str(func) or "varlen_attn" in str(func)):
            self.attention = str(func).split(".")[1].strip("_")
        return func(*args, **(kwargs or {}))


def activate_flash_attention(version: Literal["fa3", "fa4"]) -> None:
    """Puts an installed FlashAttention-3 or -4 in the place of torch's own FlashAttention-2, by torch's switch.

    Raises ImportError if it is not installed.
    """
    from torch.nn import attention

    if version == "fa4":  # its newer releases return more than the two tensors that torch 2.11 to 2.13 expect
        import flash_attn.cute.interface as cute  # type: ignore[import-not-found]
        from torch.nn.attention._fa4 import register_flash_attention_fa4

        adapter: Any = types.ModuleType("flash_attention_4_for_torch")
        adapter._flash_attn_fwd = lambda *args, **kwargs: cute._flash_attn_fwd(*args, **kwargs)[:2]
        adapter._flash_attn_bwd = cute._flash_attn_bwd
        sys.modules[adapter.__name__] = adapter
        attention.register_flash_attention_impl("FA4", register_fn=lambda: register_flash_attention_fa4(adapter.__name__))
    attention.activate_flash_attention_impl(version.upper())


def choose_attention(cfg: Config, device: torch.device) -> tuple[str, Kernel]:
    """Sets the attention backend by trying it, forward and backward, on a small call; returns the operator that really ran, and
    the kernel for GPT.

    auto on CUDA: cuDNN first from compute capability 9.0 (measured on an H200: 1.9 times FlashAttention-2 at T=1024),
    else FlashAttention-2, memory-efficient, math. Deterministic runs leave cuDNN out. With a document mask or a window
    FlashAttention takes its varlen form; cuDNN, memory-efficient and math take a (T, T) mask. Raises UserError.
    """
    order = ["flash", "efficient", "math"] if device.type == "cuda" else ["flash", "math"]
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9 and not cfg.deterministic and not cfg.masked:
        order.insert(0, "cudnn")
    if cfg.attention in ("flex", "fa3", "fa4") and device.type != "cuda":
        why = " (FlexAttention has no backward on a CPU)" if cfg.attention == "flex" else ""
        raise UserError(f"--attention {cfg.attention} needs a CUDA device{why}")
    backends = torch.backends.cuda
    switch = {
        "cudnn": backends.enable_cudnn_sdp, "flash": backends.enable_flash_sdp,
        "efficient": backends.enable_mem_efficient_sdp, "math": backends.enable_math_sdp,
    }  # fmt: skip
    tokens = torch.zeros(1, min(cfg.seq_len, 256), dtype=torch.int64, device=device)
    shape = (*tokens.shape, cfg.n_head, cfg.n_embd // cfg.n_head)
    # A window that the small call feels, if the run has one.
    small = dataclasses.replace(cfg, window=min(cfg.window, tokens.numel() // 2) if cfg.attended < cfg.seq_len else 0)
    for name in order if cfg.attention == "auto" else [cfg.attention]:
        # torch.compile's caches on disk do not look at these switches: a run with one backend was given the kernels that
        # an earlier run had compiled with another.
        torch.compiler.config.cache_key_tag = f"attention={name}"
        if name == "flex":  # not compiled it would be another operator
            return "flex_attention", "flex"
        for key, enable in switch.items():
            enable(key == ("flash" if name in ("fa3", "fa4") else name))
        q = torch.zeros(shape, dtype=COMPUTE_DTYPE[cfg.precision], device=device, requires_grad=True)
        try:
            if name in ("fa3", "fa4"):
                activate_flash_attention(name)  # type: ignore[arg-type]
            varlen = cfg.masked and device.type == "cuda" and cfg.precision != "fp32" and name in ("flash", "fa3", "fa4")
            kernel: Kernel = "varlen" if varlen else "sdpa"
            with _SeenOps() as seen:
                attend(q, q, q, attention_mask(small, kernel, tokens, None), 1.0).sum().backward()
            return seen.attention + (f" ({name})" if name in ("fa3", "fa4") else ""), kernel
        except (RuntimeError, ImportError, ValueError) as e:
            problem = str(e).splitlines()[0]
    raise UserError(f"--attention {cfg.attention} does not run here: {problem}")


def public_config(cfg: Config) -> dict[str, Any]:
    """Every field as it may be written down and shown: a command or an address can hold a password."""
    command = "(not kept)" if cfg.on_finish else ""
    return dataclasses.asdict(cfg) | {"on_finish": command, "mirror": re.sub("//[^/@]*@", "//", cfg.mirror)}


def public_argv(argv: list[str]) -> list[str]:
    """The command line, without the same."""
    text = re.sub("(^|\0)(--on-finish[=\0])[^\0]*", r"\1\2(not kept)", "\0".join(argv))
    return re.sub("//[^/@\0]*@", "//", text).split("\0")


def environment(cfg: Config, device: torch.device, attention: str, compiled: bool, world: int) -> dict[str, Any]:
    """What env.json says; nothing of the process environment is copied, so no token can get in."""

    def command(*args: str) -> str | None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(args, capture_output=True, text=True, timeout=10, check=True, cwd=Path(__file__).parent)
            return done.stdout.strip() or None
        return None

    cuda, info = device.type == "cuda", Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    return {
        "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__, "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "triton": getattr(triton, "__version__", None),
        "driver": command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0") if cuda else None,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "gpu_memory_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "cpu": cpu[1].strip() if cpu else platform.processor(),
        "threads": torch.get_num_threads(), "world_size": world, "device": device.type, "platform": platform.platform(),
        "git_commit": command("git", "rev-parse", "HEAD"), "train_gpt2_sha256": sha256_file(Path(__file__)),
        "attention_backend": attention, "compile": compiled, "precision": cfg.precision, "argv": public_argv(sys.argv[1:]),
    }  # fmt: skip


class WandbLog:
    """Weights & Biases beside metrics.jsonl: a thread of its own, so that no login, network or server can hold up training."""

    def __init__(self, cfg: Config, run_dir: Path):
        self.rows: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, args=(cfg, run_dir), daemon=True, name="wandb")
        self.thread.start()

    def _run(self, cfg: Config, run_dir: Path) -> None:
        try:
            import wandb

            run = wandb.init(
                project="gpt2", name=run_dir.name, dir=str(run_dir), config=public_config(cfg), mode=cfg.wandb,  # type: ignore
                settings=wandb.Settings(init_timeout=60, silent=True),
            )  # fmt: skip
            for row in iter(self.rows.get, None):
                kind = row["kind"]
                run.log({f"{kind}/{k}": v for k, v in row.items() if k not in ("kind", "step")}, step=row["step"])
            run.finish()
        except Exception as e:  # whatever the client does, training goes on
            print(f"wandb: logging stopped ({last_line(e)}); the run goes on", file=sys.stderr)

    def close(self) -> None:
        self.rows.put(None)
        self.thread.join(timeout=15)


# ------------------------------------------------------------------------------------------------ checkpoints


# The index of torch.distributed.checkpoint is a pickle. These, and dtypes, are all it consists of (torch 2.11 to 2.13).
METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo", "torch.serialization": "_get_layout", "torch": "Size",
    "pathlib": "PosixPath", "pathlib._local": "PosixPath",
}  # fmt: skip


def _enum_member(kind: Any, name: str) -> enum.Enum:
    """In the place of getattr, by which Python 3.11.0 to 3.11.3 pickle an enum's member."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise UserError(f"a checkpoint's .metadata asks for {name!r} of {kind!r}, which no checkpoint needs: it is not loaded")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in METADATA_CLASSES.get(module, "").split():
            raise UserError(f"a checkpoint's .metadata asks for {module}.{name}, which no checkpoint needs: it is not loaded")
        return super().find_class(module.removesuffix("._local"), name)


def checkpoint_reader(path: Path) -> Any:
    """A reader for torch.distributed.checkpoint whose index is read with the restricted unpickler."""
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with open(path / ".metadata", "rb") as f:
                metadata = _MetadataUnpickler(f).load()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(path)


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """The manifest, after every file has been compared with its size and sha256. Raises UserError with what is wrong."""
    manifest = read_json(path / "manifest.json")
    text = (path / "manifest.json").read_text()
    own = _hash_json({k: v for k, v in manifest.items() if k != "hash"})
    if text != json.dumps(manifest, indent=1) + "\n" or own != manifest.get("hash"):
        raise UserError(f"{path}: manifest.json does not match its own hash")
    try:
        present = {p.name for p in path.iterdir()} - {"manifest.json", "pinned"}
        for name in sorted(present ^ set(manifest["files"])):
            raise UserError(f"{path}: {name} is {'not in the manifest' if name in present else 'missing'}")
        for name, entry in manifest["files"].items():
            if (size := (path / name).stat().st_size) != entry["bytes"]:
                raise UserError(f"{path}: {name} has {size} bytes, not {entry['bytes']}")
        digests = sha256_files([path / name for name in manifest["files"]])
        for (name, entry), digest in zip(manifest["files"].items(), digests, strict=True):
            if digest != entry["sha256"]:
                raise UserError(f"{path}: {name} does not match its sha256")
    except OSError as e:
        raise UserError(f"{path}: {e.filename} cannot be read: {e.strerror}") from None
    return manifest


def step_number(path: str | Path) -> int:
    """120 for .../step-000120, -1 for what is no checkpoint's name."""
    number = Path(path).name.removeprefix("step-")
    return int(number) if number.isdecimal() and number != Path(path).name else -1


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """Checkpoint folders with a final name, oldest first."""
    return sorted((p for p in Path(run_dir, "checkpoints").glob("step-*") if step_number(p) >= 0), key=step_number)


def checkpoint_interval(stall_s: float, mtbf_s: float, upload_s: float) -> float:
    """Seconds between checkpoints that minimise stall plus expected lost work: sqrt(2 * stall * MTBF)
    (Young 1974; Daly 2006), never below the time an upload takes."""
    return max(math.sqrt(2 * stall_s * mtbf_s), upload_s)


def mean_time_between_failures(cfg: Config, devices: int) -> float:
    """Seconds: the device figure over the number of devices, and the whole machine's preemptions undivided."""
    rate = devices / cfg.mtbf_hours + (1 / cfg.spot_mtbf_hours if cfg.spot_mtbf_hours else 0.0)
    return 3600 / rate


def last_line(e: BaseException) -> str:
    return str(e).strip().splitlines()[-1] if str(e).strip() else type(e).__name__


class Checkpoints:
    """Writes checkpoints beside the training loop and never leaves one half-written under a final name.

    save() copies the state to host memory on a side stream and returns. It copies from a snapshot on the device where there
    is room for one (milliseconds); otherwise the next update waits for the copy (measured: 0.4 s for 3 GB). A thread then
    writes with torch.distributed.checkpoint (all ranks, gloo), and rank 0 commits: hash, fsync, manifest, rename, re-read
    and verify, move `latest`, purge. One save is in flight at a time.
    """

    def __init__(
        self, cfg: Config, run_dir: Path, rank: int, world: int, device: torch.device, group: Any, attempt: str,
        say: Callable[[str], None],
    ):  # fmt: skip
        self.cfg, self.dir, self.rank, self.world, self.device = cfg, run_dir / "checkpoints", rank, world, device
        self.group, self.attempt, self.say = group, attempt, say
        # A new thread's CUDA device is 0: without this every rank would open a context there.
        place = functools.partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self.pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=place)
        self.future: concurrent.futures.Future[None] | None = None
        self.buffers: dict[str, Tensor] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied: torch.cuda.Event | None = None
        self.snapshot: dict[str, Tensor] = {}
        self.verified: set[str] = set()
        self.failed = ""  # why the last save failed
        self.behind = False  # whether saves came too often, which is said once
        self.stats = {"saves": 0, "bytes": 0, "write_s": 0.0, "verify_s": 0.0, "mirror_s": 0.0}  # times of the last one
        self.to_mirror: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self.newest = self.mirroring = Path()
        self.mirror = threading.Thread(target=self._mirror, daemon=True)  # apart: a mirror that hangs holds up nothing
        if rank == 0:
            for path in [*self.dir.glob(".tmp-*"), *self.dir.glob(".old-*")]:  # what earlier attempts left
                shutil.rmtree(path, ignore_errors=True)
            if cfg.mirror:
                self.mirror.start()

    def busy(self) -> bool:
        return self.future is not None and not self.future.done()

    def remark(self) -> None:
        """Says, once, that saves come faster than they are written."""
        if self.busy() and not self.behind:
            self.behind = True
            self.say("a checkpoint is due while the last one is still written: training waits; save more rarely")

    def must_stop(self) -> bool:
        """A save has failed and --on-save-error is stop."""
        return bool(self.failed) and self.cfg.on_save_error == "stop"

    def wait(self) -> None:
        """Until nothing is in flight. Raises Halt, on every rank, after a failure where --on-save-error is stop."""
        if self.future is not None:
            self.future.result()
        if self.must_stop():
            raise Halt(Exit.DISK, f"stopped since a checkpoint could not be written: {self.failed}")

    def stage(self, tensors: dict[str, Tensor]) -> None:
        """Host memory for the copies, pinned for CUDA; made once, before the first step where saves are planned."""
        for key, t in tensors.items():  # a shard says which part of the whole it is; the file then fits any other layout
            part = torch.empty_like(local(t), device="cpu", pin_memory=self.device.type == "cuda")
            self.buffers[key] = shard_like(part, t)

    def save(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Starts a save of this rank's tensors and of `meta` (JSON, rank 0's). None may be in flight: `wait`."""
        assert not self.busy()
        if not self.buffers:
            self.stage(tensors)
        parts = {key: local(t) for key, t in tensors.items()}
        if self.stream is not None:
            if torch.cuda.mem_get_info(self.device)[0] > 1.2 * sum(t.nbytes for t in parts.values()):
                with torch.cuda.stream(self.stream):  # memory of its own, not what the next forward is about to take again
                    self.snapshot = {key: torch.empty_like(t) for key, t in parts.items()}
                for key, t in parts.items():
                    self.snapshot[key].copy_(t)
                parts = self.snapshot
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
            for key, t in parts.items():
                local(self.buffers[key]).copy_(t, non_blocking=True)
        if self.stream is not None:
            self.copied = self.stream.record_event()
        self.future = self.pool.submit(self._write, meta)

    def before_update(self) -> None:
        """The device must not change what is still being copied."""
        if self.copied is not None and not self.snapshot:
            torch.cuda.current_stream().wait_event(self.copied)

    def _write(self, meta: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        began = time.perf_counter()
        if self.copied is not None:
            self.copied.synchronize()
        self.snapshot = {}
        # The name is this attempt's own: what an orphan of an earlier attempt still writes never counts.
        temporary = self.dir / f".tmp-{meta['step']:06d}-{self.attempt}"
        failed = [""]
        try:
            # One thread: an error in another one of the writer's (a full disk) would be lost, and the file with it.
            writer = dcp.FileSystemWriter(temporary, thread_count=1)
            dcp.save(self.buffers, storage_writer=writer, process_group=self.group, no_dist=self.world == 1)
            if self.rank == 0:
                try:
                    self._commit(temporary, meta)
                except Exception as e:
                    failed = [self._why(e)]
            if self.world > 1:
                dist.broadcast_object_list(failed, src=0, group=self.group)
        except (Exception, dcp.api.CheckpointException) as e:  # the latter is no Exception
            failed = [self._why(e)]
        self.failed = failed[0]
        if self.failed:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            self.say(f"checkpoint of step {meta['step']} could not be written: {self.failed}; earlier ones are untouched")
        self.stats["write_s"] = time.perf_counter() - began

    def _why(self, e: BaseException) -> str:
        """An error's last line; torch's writers have words of their own for a full disk."""
        said = last_line(e)
        full = shutil.disk_usage(self.dir).free < 1 << 20 and "No space left" not in said
        return f"No space left on device ({said})" if full else said

    def _commit(self, temporary: Path, meta: dict[str, Any]) -> None:
        write_json(temporary / "train_state.json", meta)
        paths = sorted(temporary.iterdir())
        digests = zip(paths, sha256_files(paths), strict=True)
        files: dict[str, Any] = {p.name: {"bytes": p.stat().st_size, "sha256": digest} for p, digest in digests}
        manifest = {"schema": SCHEMA, "step": meta["step"], "files": files}
        write_json(temporary / "manifest.json", {**manifest, "hash": _hash_json(manifest)})
        final = self.dir / f"step-{meta['step']:06d}"
        gone = self._set_aside(final) if final.exists() else None  # the same step again after a resume
        os.replace(temporary, final)
        fsync_dir(self.dir)
        if gone is not None:
            shutil.rmtree(gone, ignore_errors=True)
        began = time.perf_counter()
        verify_checkpoint(final)
        self.stats["verify_s"] = time.perf_counter() - began
        self.stats["saves"] += 1
        self.stats["bytes"] = sum(entry["bytes"] for entry in files.values())
        self.verified.add(final.name)
        write_atomic(self.dir / "latest", final.name + "\n")
        self._purge()
        if self.cfg.mirror:
            self.newest = final
            self.to_mirror.put(final)

    def _set_aside(self, path: Path) -> Path:
        """The new name of a checkpoint that is to be removed; under it nobody takes what is left for a checkpoint."""
        gone = self.dir / f".old-{path.name}-{uuid.uuid4().hex[:8]}"
        os.replace(path, gone)
        return gone

    def _purge(self) -> None:
        """Removes older checkpoints once --keep verified ones stand; pinned ones stay."""
        good = 0
        for path in reversed(list_checkpoints(self.dir.parent)):
            if good < self.cfg.keep:
                with contextlib.suppress(UserError):
                    if path.name not in self.verified:
                        verify_checkpoint(path)
                    self.verified.add(path.name)
                    good += 1
            elif not (path / "pinned").exists() and path != self.mirroring:
                shutil.rmtree(self._set_aside(path))

    def pin(self, why: str) -> None:
        """Keeps the newest verified checkpoint from the purge, in place of the one pinned before."""
        good = [p for p in list_checkpoints(self.dir.parent) if p.name in self.verified]
        for path in self.dir.glob("step-*/pinned"):
            path.unlink()
        if good:
            (good[-1] / "pinned").write_text(why + "\n")

    def _mirror(self) -> None:
        for path in iter(self.to_mirror.get, None):
            if path != self.newest:  # the mirror is behind
                continue
            self.mirroring, began = path, time.perf_counter()
            try:
                mirror_checkpoint(path, self.cfg.mirror, self.cfg.keep)
                self.stats["mirror_s"] = time.perf_counter() - began
            except Exception as e:  # a failing mirror never stops training
                self.say(f"mirror {self.cfg.mirror} failed for {path.name}: {last_line(e)}; training goes on")
            self.mirroring = Path()

    def close(self) -> None:
        """Finishes what is in flight; a mirror gets MIRROR_PATIENCE seconds."""
        self.pool.shutdown()
        self.to_mirror.put(None)
        if self.mirror.is_alive():
            self.mirror.join(MIRROR_PATIENCE)
            if self.mirror.is_alive():
                self.say(f"mirror {self.cfg.mirror} did not finish in {MIRROR_PATIENCE} s; the newest checkpoint is not mirrored")


MIRROR_PATIENCE = 600


def mirror_checkpoint(path: Path, uri: str, keep: int) -> None:
    """Copies a checkpoint of a run to <uri>/<run>/step-N with fsspec, reads it back, and only then names it complete.

    Keeps `keep` of them there. Raises what fsspec raises, and OSError where the copy differs.
    """
    import fsspec

    fs, root = fsspec.core.url_to_fs(f"{uri.rstrip('/')}/{path.absolute().parents[1].name}")
    target = f"{root}/{path.name}"
    fs.makedirs(target, exist_ok=True)
    if fs.exists(f"{target}/manifest.json"):  # the manifest goes first and comes last: without it the copy does not count
        fs.rm_file(f"{target}/manifest.json")
    for name in [*sorted({p.name for p in path.iterdir()} - {"manifest.json", "pinned"}), "manifest.json"]:
        fs.put_file(str(path / name), f"{target}/{name}")
        with fs.open(f"{target}/{name}", "rb") as f:
            if hashlib.file_digest(f, "sha256").hexdigest() != sha256_file(path / name):  # type: ignore[arg-type]
                fs.rm(target, recursive=True)
                raise OSError(f"{target}/{name} does not read back as it was written")
    there = sorted((p for p in fs.ls(root, detail=False) if step_number(p) >= 0), key=step_number)
    older = [p for p in there if step_number(p) < step_number(path)]
    # Newer ones are of an attempt that this run has gone back behind.
    for old in older[: max(0, len(older) - keep + 1)] + [p for p in there if step_number(p) > step_number(path)]:
        fs.rm(old, recursive=True)


def find_checkpoint(cfg: Config, run_dir: Path, say: Callable[[str], None]) -> Path | None:
    """The checkpoint that --resume asks for, verified. None: start afresh (--resume auto and there is none at all).

    newest and auto walk from the newest to the oldest; a bad one is refused by name and said. Raises UserError.
    """
    want, there = cfg.resume, list_checkpoints(run_dir)
    if want not in ("newest", "auto"):
        path = run_dir / "checkpoints" / f"step-{int(want):06d}" if want.isdecimal() else Path(want)
        if not path.is_dir():
            raise UserError(f"--resume {want}: {path} does not exist; there are: {', '.join(p.name for p in there) or 'none'}")
        verify_checkpoint(path)
        return path
    for path in reversed(there):
        try:
            verify_checkpoint(path)
            return path
        except UserError as e:
            say(f"CHECKPOINT REFUSED: {e}; trying the one before it")
    if want == "auto" and not there:
        return None
    raise UserError(f"--resume {want}: {'no good' if there else 'there is no'} checkpoint in {run_dir}/checkpoints")


# What may differ on a resume without making it another run; a change is said. Execution fields but the seed are free.
RESUME_CHANGES = frozenset("max_steps epochs val_every head_precision spike spike_z spike_window".split())


def check_resume(meta: dict[str, Any], cfg: Config, fingerprint: str, say: Callable[[str], None]) -> None:
    """Refuses a checkpoint of another config, data set or model, with the differences. Raises UserError."""
    # A field that the checkpoint's version did not have yet meant the default.
    saved, now = {**dataclasses.asdict(Config()), **meta["config"]}, dataclasses.asdict(cfg)
    free = (EXECUTION_FIELDS | {"recipe"}) - {"seed"}
    changes = {k: f"{k} {saved[k]!r} -> {now[k]!r}" for k in now if saved[k] != now[k] and k not in free}
    different = [text for k, text in changes.items() if k not in RESUME_CHANGES]
    if meta["fingerprint"] != fingerprint:
        different.append(f"data fingerprint {meta['fingerprint'][:24]} -> {fingerprint[:24]}")
    if different:
        raise UserError(f"the checkpoint belongs to another run: {'; '.join(different)}")
    for text in changes.values():
        say(f"changed since the checkpoint: {text}{', and the learning-rate schedule with it' if 'max_steps' in text else ''}")


# ------------------------------------------------------------------------------------------------ validation


def val_protocol(cfg: Config, stream: TokenStream) -> dict[str, Any]:
    """What a val loss depends on besides the weights; numbers of different protocols are never compared."""
    digest = hashlib.sha256()
    for start in range(0, cfg.val_tokens + 1, 1 << 20):
        digest.update(check_ids(stream.slice(start, min(1 << 20, cfg.val_tokens + 1 - start)), cfg).tobytes())
    size = {"tokens": cfg.val_tokens, "seq_len": cfg.seq_len}
    return {"data": digest.hexdigest(), **size, "document_mask": cfg.document_mask, "dtype": cfg.precision}


def evaluate_tokens(
    model: GPT, stream: TokenStream, val_tokens: int, seq_len: int, batch: int, rank: int = 0, world: int = 1
) -> float:
    """Mean loss in nats over the first val_tokens targets of the stream, in rows of seq_len.

    The sum of all token losses over all ranks divided by their count: it does not depend on ranks or batch. Rows are dealt
    to the ranks in batches of one shape, the last padded with targets of -1.
    """
    device = next(model.parameters()).device
    rows = val_tokens // seq_len
    total = torch.zeros((), dtype=torch.float64, device=device)
    # Every rank makes the same number of forwards, since sharded weights are gathered in each: the last may be all padding.
    for first in range(rank * batch, math.ceil(rows / (world * batch)) * world * batch, world * batch):
        count = max(0, min(batch, rows - first))
        tokens = torch.from_numpy(stream.slice(first * seq_len, count * seq_len + 1).astype(np.int64))
        x, y = torch.zeros(batch, seq_len, dtype=torch.int64), torch.full((batch, seq_len), -1)
        x[:count], y[:count] = tokens[:-1].view(count, seq_len), tokens[1:].view(count, seq_len)
        total += model.nll(x.to(device), y.to(device)).double().sum()
    total = total.cpu()  # over gloo, which gives up on a lost rank; NCCL would hang the host
    if world > 1:
        dist.all_reduce(total)
    return total.item() / (rows * seq_len)


def state_bytes(cfg: Config) -> int:
    """Bytes of a full checkpoint: fp32 weights, one moment for Muon and two for AdamW parameters."""
    with torch.device("meta"):
        return sum(4 * p.numel() * (2 if is_muon(n, cfg) else 3) for n, p in GPT(cfg).named_parameters())


class LargestLogit(torch.overrides.TorchFunctionMode):
    """Keeps the largest attention logit of the calls that go by: one that keeps growing announces a divergence."""

    value = -math.inf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            logits = (args[0].float() @ args[1].float().mT) * kwargs["scale"]
            mask = torch.ones_like(logits[0, 0]).tril().bool() if kwargs["attn_mask"] is None else kwargs["attn_mask"]
            self.value = max(self.value, logits.masked_fill(~mask, -math.inf).max().item())
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------ training


def learning_rate_factor(cfg: Config, step: int) -> float:
    """Factor of every learning rate in the update that makes step+1 of max_steps; never 0 at the first step."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return 1.0
    if cfg.schedule == "cosine":
        done = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
        return cfg.final_lr_frac + (1 - cfg.final_lr_frac) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    length = cfg.warmdown_frac * cfg.max_steps
    left = min(1.0, max(0, cfg.max_steps - step) / length) if length else 1.0
    return cfg.final_lr_frac + (1 - cfg.final_lr_frac) * left


def muon_momentum(cfg: Config, step: int) -> float:
    """Rises from 0.85 over the first steps (modded-nanogpt record 9)."""
    if step >= cfg.muon_momentum_warmup:
        return cfg.muon_momentum
    return 0.85 + (cfg.muon_momentum - 0.85) * step / cfg.muon_momentum_warmup


def default_run_dir(cfg: Config) -> str:
    """runs/<recipe>-<date>: under torchrun the date is the launcher's start, so that a restarted job finds its own."""
    launcher = Path(f"/proc/{os.getppid()}")
    elastic = "TORCHELASTIC_RUN_ID" in os.environ and launcher.exists()
    began, process = (launcher.stat().st_ctime, os.getppid()) if elastic else (time.time(), os.getpid())
    return f"runs/{cfg.recipe}-{datetime.datetime.fromtimestamp(began):%Y%m%d-%H%M%S}-{process}"


def setup_distributed(cfg: Config) -> tuple[int, int, torch.device]:
    """Rank, world size and device from torchrun's variables; starts the process group. Raises UserError."""
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    kind = cfg.device if cfg.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise UserError("--device cuda: torch sees no CUDA device")
        here = max(local + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if here > torch.cuda.device_count():  # said on every rank: those with a GPU would wait for the others
            raise UserError(f"{here} processes were started for {torch.cuda.device_count()} GPUs; lower --nproc_per_node")
        torch.cuda.set_device(local)
        if cfg.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UserError(f"{torch.cuda.get_device_name(local)} has no native bf16; use --precision fp16")
    device = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if world > 1 or cfg.parallel.startswith("fsdp"):
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        # NCCL's watchdog kills without naming anyone; it comes after our own time limit.
        patience = datetime.timedelta(seconds=cfg.comm_timeout + (30 if kind == "cuda" else 0))
        # torchrun keeps one store over its restarts: without a prefix, an attempt would connect to addresses of the one
        # before it (pytorch issue 135712; seen here with torch 2.13).
        meeting = dist.HashStore() if world == 1 else next(iter(dist.rendezvous("env://", timeout=patience)))[0]
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), meeting)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=patience, device_id=device if kind == "cuda" else None
        )
    return rank, world, device


def check_data(cfg: Config) -> tuple[TokenStream, TokenStream]:
    """Opens the shards and compares them with what the steps need. Raises UserError."""
    train = TokenStream(find_shards(cfg.data, "train"))
    val = TokenStream(find_shards(cfg.data, "val"))
    need = cfg.batch_tokens * cfg.max_steps
    if need + 1 > len(train) * cfg.epochs:
        passes = math.ceil((need + 1) / len(train))
        raise UserError(
            f"{cfg.max_steps} steps of {cfg.batch_tokens} tokens need {need:,} train tokens, {cfg.data} has {len(train):,}; "
            f"fetch more shards, lower --max-steps to {(len(train) * cfg.epochs - 1) // cfg.batch_tokens}, or allow "
            f"--epochs {passes}"
        )
    if cfg.val_tokens + 1 > len(val):
        raise UserError(f"--val-tokens {cfg.val_tokens:,} need one more token than that; the val shards hold {len(val):,}")
    return train, val


@dataclass(eq=False)
class Progress:
    """How far a run has come: what train_state.json says of it, by the same names."""

    step: int = 0
    tokens: int = 0
    train_s: float = 0.0
    val_s: float = 0.0
    stall_s: float = 0.0
    val_loss: float | None = None
    best_val_loss: float | None = None
    train_loss: float | None = None
    val_step: int = -1
    last_spike: int = -1
    spike_rows: list[list[float]] = field(default_factory=list)


def process_age() -> float:
    """Seconds since this process was started, which the imports are a part of; 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return max(0.0, float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


class Trainer(Progress):
    """One training run on this rank, from an empty folder or a checkpoint to result.json."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.began = time.perf_counter() - process_age()
        self.line_open = False
        self.train_stream, self.val_stream = check_data(cfg)
        self.rank, self.world, self.device = setup_distributed(cfg)
        self.main, self.cuda = self.rank == 0, self.device.type == "cuda"
        if cfg.head_precision != "same" and not has_fp8(self.device, cfg.precision):
            cfg = dataclasses.replace(cfg, head_precision="same")
            self.say("the head runs in the precision of the rest: fp8 needs bf16 and a device that has it")
        if cfg.head_precision == "fp8-all" and cfg.micro_batch * cfg.seq_len % 16:
            cfg = dataclasses.replace(cfg, head_precision="fp8")
            self.say("of the head the forward product alone is in fp8: the others need --micro-batch times --seq-len in sixteens")
        self.accum = grad_accum_steps(cfg, self.world)
        self.save_group = self.host_group = None
        self.pids = [os.getpid()] * self.world
        if self.world > 1:
            # A gloo group of its own for checkpoint threads, and one for the main thread's small host-side exchanges.
            # Rank 0 hashes and reads back a checkpoint while the others wait in the save group.
            patience = datetime.timedelta(seconds=cfg.comm_timeout)  # new_group's own default is 30 minutes
            self.save_group = dist.new_group(backend="gloo", timeout=max(patience, datetime.timedelta(minutes=30)))
            self.host_group = dist.new_group(backend="gloo", timeout=patience)
            dist.all_gather_object(self.pids, os.getpid(), group=self.host_group)
        self.run_dir = Path(self.agree(cfg.run_dir or default_run_dir(cfg)))
        # Restarted by torchrun: go on from what this job has saved, or else do again what was asked for.
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and (not cfg.resume or list_checkpoints(self.run_dir)):
            cfg = dataclasses.replace(cfg, resume="auto")
        self.cfg = cfg
        self.stop_signal = 0
        self.compile_s = self.restore_s = self.save_ms = self.save_wait_ms = self.last_save_ms = 0.0
        self.startup_s: float | None = None
        self.created = False  # whether this process made the run directory
        self.lock: Any = None
        self.wandb: WandbLog | None = None
        # Of each step whose numbers have not been read yet: its number, they, and when it was done.
        self.pending: collections.deque[tuple[int, Tensor, Any]] = collections.deque()
        self.mark: Any = None  # when the step before was done
        self.step_ms: list[float] = []
        self.wishes = [False, False, False]  # of all ranks, in the step read last: stop, save, the time is up

    # -- small things

    def agree(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        box = [value]
        if self.world > 1:
            dist.broadcast_object_list(box, src=0, group=self.host_group)
        return box[0]

    def say(self, text: str) -> None:
        if self.main:
            print(("\n" if self.line_open else "") + text, file=sys.stderr, flush=True)
            self.line_open = False

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def tick(self) -> Any:
        """A point in time: on the device's own clock, an event; else seconds."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def on_rank0(self, action: Callable[[], Any]) -> Any:
        """Runs an action on rank 0. If it cannot write or is refused, every rank ends, and a run directory made here goes."""
        result: Any = None
        if self.main:
            try:
                result = ("ok", action())
            except (OSError, UserError) as e:
                if self.created:
                    shutil.rmtree(self.run_dir, ignore_errors=True)
                why = str(e) if isinstance(e, UserError) else f"{self.run_dir} cannot be written: {e.strerror or e}"
                result = ("error", why)
        kind, value = self.agree(result)
        if kind == "error":
            raise UserError(value)
        return value

    # -- set-up

    def prepare_run_dir(self) -> Path | None:
        """Checks, locks and makes the run directory on rank 0. Returns the verified checkpoint to resume from, if any."""
        cfg, run_dir = self.cfg, self.run_dir
        if (run_dir / "config.json").exists() and not cfg.resume:
            raise UserError(f"{run_dir} holds a run already; go on with it by --resume, or choose another --run-dir")
        parent = next(p for p in [run_dir.absolute(), *run_dir.absolute().parents] if p.exists())
        size, free = state_bytes(cfg), shutil.disk_usage(parent).free
        copies = 0 if parse_cadence(cfg.checkpoint_every)[0] == "off" else max(1, cfg.keep + 1 - len(list_checkpoints(run_dir)))
        need = size * copies + 4 * parameter_count(cfg)["total"] + (1 << 20)
        if free < need:
            raise UserError(
                f"{parent} has {free / 1e9:.2f} GB free; the run needs {need / 1e9:.2f} GB "
                f"({copies} checkpoints of {size / 1e9:.2f} GB and the weights)"
            )
        # Every tensor is staged by one rank only; pinned blocks are rounded up to powers of two.
        staged = 2 * size if self.cuda else size
        if copies and (available := available_memory()) < staged:
            raise UserError(
                f"{available / 1e9:.1f} GB of host memory are free; staging a checkpoint takes up to {staged / 1e9:.1f} GB: "
                "use --checkpoint-every 0 or a machine with more memory"
            )
        self.created = not run_dir.exists()
        run_dir.mkdir(parents=True, exist_ok=True)
        self.lock = lock_run(run_dir, patience=min(30.0, cfg.comm_timeout / 2) if cfg.resume else 0.0)
        resume_from = find_checkpoint(cfg, run_dir, self.say) if cfg.resume else None
        if resume_from is not None:
            meta = read_json(resume_from / "train_state.json")
            check_resume(meta, cfg, self.fingerprint, self.say)
            if meta["step"] > cfg.max_steps:
                raise UserError(f"{resume_from} is past --max-steps {cfg.max_steps}; ask for {meta['step']} steps or more")
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        return resume_from

    def write_run_files(self, attention: str, compiled: bool) -> None:
        """config.json, env.json, the source, and the opened metrics.jsonl."""
        run_dir, cfg = self.run_dir, self.cfg
        write_json(run_dir / "config.json", {
            "recipe": cfg.recipe, "config": public_config(cfg), "config_hash": config_hash(cfg),
            "learning_hash": learning_hash(cfg), "val_protocol": self.protocol, "data": self.data,
        })  # fmt: skip
        write_json(run_dir / "env.json", environment(cfg, self.device, attention, compiled, self.world))
        if Path(__file__).resolve() != (run_dir / "train_gpt2.py").resolve():
            shutil.copyfile(__file__, run_dir / "train_gpt2.py")
        path = run_dir / "metrics.jsonl"
        torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
        self.metrics = open(path, "a")  # noqa: SIM115  (kept open for the whole run)
        self.metrics.write("\n" if torn else "")

    def setup(self) -> None:
        cfg, device = self.cfg, self.device
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(cfg.threads or max(1, cores))
        if not self.cuda and platform.system() == "Linux":
            # glibc gives blocks above 32 MB back to the system at once, and every step would fault their pages in again
            # (measured: 60% less system time). M_MMAP_THRESHOLD is -3, M_TRIM_THRESHOLD -1.
            with contextlib.suppress(OSError, AttributeError):
                libc = ctypes.CDLL("libc.so.6")
                libc.mallopt(-3, 1 << 30), libc.mallopt(-1, (1 << 31) - 1)
        torch.set_float32_matmul_precision("highest" if cfg.precision == "fp32" else "high")
        if cfg.deterministic:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one rank saves and loads without it
        compiled = cfg.compile == "on" or (cfg.compile == "auto" and self.cuda)
        if cfg.compile_mode != "default" and not compiled:
            raise UserError(f"--compile-mode {cfg.compile_mode}: nothing is compiled here; add --compile on")
        attention, kernel = choose_attention(cfg, device)
        self.peak, self.flops = peak_flops(device, cfg), flops_per_token(cfg)
        self.fingerprint = self.on_rank0(lambda: data_fingerprint(cfg.data))
        manifest = Path(cfg.data) / "manifest.json"
        dataset = read_json(manifest).get("dataset") if manifest.exists() else None
        self.data = {"dir": cfg.data, "fingerprint": self.fingerprint, "dataset": dataset}
        self.protocol = val_protocol(cfg, self.val_stream)
        self.resume_from: Path | None = self.on_rank0(self.prepare_run_dir)
        if compiled and self.cuda:  # Inductor's workers take seconds to start; until then it compiles one kernel after another
            with contextlib.suppress(ImportError):  # torch's own call, which it makes at the first compilation
                from torch._inductor.async_compile import maybe_warm_pool

                maybe_warm_pool()
        meta = read_json(self.resume_from / "train_state.json") if self.resume_from else None
        for number in (signal.SIGTERM, signal.SIGINT):
            # Rank 0 decides when to stop; a Ctrl-C reaches every process of the group.
            signal.signal(number, self.on_signal if self.main or number == signal.SIGTERM else signal.SIG_IGN)
        attempt = self.agree(f"{os.getpid()}-{uuid.uuid4().hex[:8]}")
        self.checkpoints = Checkpoints(cfg, self.run_dir, self.rank, self.world, device, self.save_group, attempt, self.say)
        self.loader = Loader(cfg, self.train_stream, self.rank, self.world, device)

        self.model = GPT(cfg).to(device)
        if compiled:
            torch._dynamo.config.recompile_limit = 64  # blocks with and without skips and value embeddings, train and val
        self.model.kernel = kernel
        for block in self.model.blocks:
            if cfg.recompute != "off":
                block.forward = recomputing(block.forward, cfg.recompute)
            if compiled:  # blocks of one kind share one compilation
                block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, mode=cfg.compile_mode)
        self.sharded = cfg.parallel.startswith("fsdp")
        self.model.one_graph = compiled and not self.sharded
        self.val_rows = cfg.micro_batch if self.model.one_graph else cfg.val_batch
        if kernel == "varlen" and cfg.document_mask:
            span = max(cfg.micro_batch, self.val_rows) * cfg.seq_len
            needs = ((self.train_stream, cfg.max_steps * cfg.batch_tokens), (self.val_stream, cfg.val_tokens))
            self.model.most_documents = max(most_documents(stream, span, total) for stream, total in needs)
        if self.sharded:
            self.shard_model()
        self.ddp: nn.Module = self.model
        if self.world > 1 and cfg.parallel == "ddp":
            self.ddp = nn.parallel.DistributedDataParallel(
                self.model, device_ids=[device.index] if self.cuda else None, bucket_cap_mb=cfg.ddp_bucket_mb,
                gradient_as_bucket_view=True, broadcast_buffers=False,
            )  # fmt: skip
        self.optimizer = Optimizer(self.model, cfg, self.rank, self.world, compiled and self.cuda)
        self.bad = torch.zeros((), dtype=torch.bool, device=device)  # sticky: set by the first non-finite loss or gradient
        # fp16: torch's GradScaler decides the scale from the one number that is non-finite if any gradient is.
        self.scaler = torch.amp.GradScaler(device.type, enabled=cfg.precision == "fp16")
        self.probe = nn.Parameter(torch.zeros((), device=device))
        self.probe_optimizer = torch.optim.SGD([self.probe], lr=0.0)
        self.warm_up()
        if meta is not None:
            self.restore(meta)
        if parse_cadence(cfg.checkpoint_every)[0] != "off":
            self.checkpoints.stage(self.share())
        self.on_rank0(lambda: self.write_run_files(attention, compiled))
        if meta is not None:
            self.on_rank0(self.withdraw_later)
            self.log({"kind": "resume", "step": self.step, "tokens": self.tokens})
        if self.main and cfg.wandb != "off":
            self.wandb = WandbLog(cfg, self.run_dir)

    def shard_model(self) -> None:
        """FSDP2: each block, then the rest; gradients are summed in --reduce-precision. 0-D parameters stay replicated."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        kind = None if self.cfg.precision == "fp32" else self.model.dtype
        reduce = COMPUTE_DTYPE[self.cfg.reduce_precision]
        policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=reduce, cast_forward_inputs=False)
        mesh = init_device_mesh(self.device.type, (self.world,))
        scalars = {p for p in self.model.parameters() if p.ndim == 0}
        for module in [*self.model.blocks, self.model]:
            reshard = self.cfg.parallel == "fsdp3"
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, ignored_params=scalars)
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo knows no scaled sum
        register_fsdp_forward_method(self.model, "nll")

    def reshard(self) -> None:
        """After a forward without a backward FSDP still holds whole weights, which the next update would leave behind."""
        for module in [*self.model.blocks, self.model] if self.sharded else []:
            module.reshard()  # type: ignore[operator]

    def weights(self) -> dict[str, Tensor]:
        return {k: whole(v) for k, v in self.model.state_dict().items()}

    def warm_up(self) -> None:
        """Compiles and allocates with one whole step and one validation batch on made-up tokens, untimed.

        Leaves no trace: the update is skipped on the device, the tokens come from a generator of their own.
        """
        began, cfg = time.perf_counter(), self.cfg
        generator = torch.Generator().manual_seed(0)

        def made_up(rows: int) -> Tensor:
            return torch.randint(min(cfg.vocab_size, EOT), (rows, cfg.seq_len), generator=generator).to(self.device)

        for last in [True] if self.accum == 1 else [False, True]:
            x = made_up(cfg.micro_batch)
            self.backward(x, x, last)
        self.optimizer.finish_gradients(torch.zeros(1, device=self.device))
        self.optimizer.step(0.0, 0.0, None, torch.ones((), dtype=torch.bool, device=self.device))
        self.optimizer.zero_grad()
        x = made_up(self.val_rows)
        self.model.nll(x, x)
        self.reshard()
        self.synchronize()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.compile_s = time.perf_counter() - began

    def backward(self, x: Tensor, y: Tensor, last: bool) -> Tensor:
        """Forward and backward of one micro-batch; gradients of the step's mean loss add up. Returns the summed nats."""
        self.optimizer.sync = last
        ddp = isinstance(self.ddp, nn.parallel.DistributedDataParallel)
        # Set before the forward: DDP decides there whether the backward will reduce.
        quiet: Any = self.ddp.no_sync() if ddp and not last else contextlib.nullcontext()  # type: ignore[operator]
        if self.sharded:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        with quiet:
            loss = self.ddp(x, y)
            # DDP averages over ranks, the other modes sum.
            self.scaler.scale(loss * ((self.world if ddp else 1) / self.cfg.batch_tokens)).backward()
        return loss.detach()

    # -- state

    def tensors(self) -> dict[str, Tensor]:
        """Everything of this rank that a checkpoint holds, as named tensors: the live ones, whole or sharded."""
        state = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        state |= {f"optimizer.{k}": v for k, v in self.optimizer.state().items()}
        state[f"rng.cpu.{self.rank}"] = torch.get_rng_state()
        if self.cuda:
            state[f"rng.cuda.{self.rank}"] = torch.cuda.get_rng_state(self.device)
        return state

    def share(self) -> dict[str, Tensor]:
        """The part of `tensors` that this rank saves: its shards, and of what several ranks hold alike each by one of them.

        torch.distributed.checkpoint would drop all but one of them only after every rank had staged its own copy, and also
        where they differ.
        """
        state = self.tensors()
        alone = {k for k in state if k.startswith("optimizer.") and k.split(".", 2)[2] in self.optimizer.owner}
        alone |= {k for k in state if k.startswith("rng.")}
        alike = {k: float(t.nbytes) for k, t in state.items() if local(t) is t and k not in alone}
        writer = assign_owners(alike, self.world)
        return {k: t for k, t in state.items() if writer.get(k, self.rank) == self.rank}

    def meta(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, **dataclasses.asdict(self), "data_position": self.tokens, "config": public_config(self.cfg),
            "fingerprint": self.fingerprint, "world_size": self.world, "scaler": self.scaler.state_dict(),
        }  # fmt: skip

    def restore(self, meta: dict[str, Any]) -> None:
        """Loads a verified checkpoint into the live tensors; any number of ranks."""
        import torch.distributed.checkpoint as dcp

        assert self.resume_from is not None
        began = time.perf_counter()
        reader = checkpoint_reader(self.resume_from)
        saved = set(reader.read_metadata().state_dict_metadata)
        # A random state is missing where there were fewer ranks or another device.
        wanted = {k: t for k, t in self.tensors().items() if k in saved or not k.startswith("rng.")}
        if missing := sorted(set(wanted) - saved):
            raise UserError(f"{self.resume_from} lacks {missing[0]}: it belongs to another model or optimizer")
        dcp.load(wanted, storage_reader=reader, process_group=self.save_group, no_dist=self.world == 1)
        if f"rng.cpu.{self.rank}" in wanted:
            torch.set_rng_state(wanted[f"rng.cpu.{self.rank}"])
        if f"rng.cuda.{self.rank}" in wanted:
            torch.cuda.set_rng_state(wanted[f"rng.cuda.{self.rank}"], self.device)
        vars(self).update({f.name: meta[f.name] for f in dataclasses.fields(self)})
        if meta["scaler"]:
            self.scaler.load_state_dict(meta["scaler"])
        self.restore_s = time.perf_counter() - began
        self.say(f"resumed from {self.resume_from} at step {self.step}")
        if self.step == self.cfg.max_steps:
            self.say(f"the run is complete at {self.step} steps; nothing to train")
        if self.resume_from.parent == self.checkpoints.dir:
            self.checkpoints.verified.add(self.resume_from.name)

    def withdraw_later(self) -> None:
        """What an earlier attempt left beyond the step that this one goes on from no longer counts as the state of the run."""
        folder = self.checkpoints.dir
        if self.step < self.cfg.max_steps:
            for name in ("result.json", "model.safetensors"):
                (self.run_dir / name).unlink(missing_ok=True)
        # Going back on purpose; what is newer otherwise has been refused as damaged.
        for path in list_checkpoints(self.run_dir) if self.cfg.resume not in ("newest", "auto") else []:
            if step_number(path) > self.step:
                os.replace(path, path.with_name(f"abandoned-{path.name}-{uuid.uuid4().hex[:8]}"))
                self.say(f"{path.name} is set aside as abandoned-{path.name}-*")
        if self.resume_from is not None and self.resume_from.parent == folder:
            write_atomic(folder / "latest", self.resume_from.name + "\n")

    def save(self) -> None:
        asked = time.perf_counter()
        self.checkpoints.wait()  # one save at a time: that of the one before is no cost of this one
        began = time.perf_counter()
        self.checkpoints.save(self.share(), self.meta())
        done = time.perf_counter()
        self.stall_s += done - asked
        self.save_wait_ms, self.save_ms = (began - asked) * 1000, (done - began) * 1000
        self.last_save_ms = self.save_ms

    def on_signal(self, number: int, frame: Any) -> None:
        if self.stop_signal and number == signal.SIGINT:
            os._exit(130)  # a second Ctrl-C: at once; the last checkpoint stands
        self.stop_signal = number

    # -- the loop

    def validate(self) -> None:
        self.synchronize()
        began, cfg = time.perf_counter(), self.cfg
        loss = evaluate_tokens(self.model, self.val_stream, cfg.val_tokens, cfg.seq_len, self.val_rows, self.rank, self.world)
        self.reshard()
        seconds = time.perf_counter() - began
        self.val_s += seconds
        self.val_loss, self.val_step = loss, self.step
        self.best_val_loss = loss if self.best_val_loss is None else min(loss, self.best_val_loss)
        row = {"kind": "val", "step": self.step, "tokens": self.tokens, "val_loss": loss}
        row |= {"train_s": self.train_s, "val_s": seconds}
        if self.main and not self.sharded:  # on one sequence, eagerly: the compiled blocks cannot be looked into
            tokens = self.val_stream.slice(0, min(cfg.seq_len, 1024))
            idx_BT = torch.from_numpy(tokens.astype(np.int64)).unsqueeze(0).to(self.device)
            kernel, self.model.kernel = self.model.kernel, "sdpa"
            math_only = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
            with torch.no_grad(), torch.compiler.set_stance("force_eager"), math_only, LargestLogit() as attention:
                self.model.hidden(idx_BT)
            self.model.kernel = kernel
            row["max_attention_logit"] = attention.value
        self.log(row)
        self.say(f"step {self.step}/{cfg.max_steps}  val loss {loss:.4f}  after {self.train_s:.1f} s of training")

    def log(self, row: dict[str, Any]) -> None:
        if self.main:
            self.metrics.write(json.dumps(row) + "\n")
            self.metrics.flush()
            if self.wandb is not None:
                self.wandb.rows.put(row)

    def progress(self, row: dict[str, Any]) -> None:
        """One live line on a terminal; plain lines, few of them, where the output is piped."""
        step, steps = row["step"], self.cfg.max_steps
        left = datetime.timedelta(seconds=int((steps - step) * row["step_ms"] / 1000))
        mfu = f"  MFU {row['mfu']:.1%}" if row["mfu"] is not None else ""
        val = f"  val {self.val_loss:.4f}" if self.val_loss is not None else ""
        text = f"step {step}/{steps}  loss {row['loss']:.4f}{val}  {row['tokens_per_s']:,.0f} tok/s{mfu}"
        text += f"  {row['step_ms']:.0f} ms  ETA {left}"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self.line_open = True
        elif step % max(1, steps // 20) == 0 or step <= 3:
            self.say(text)

    def spike_guard(self, loss: float, norm: float) -> bool:
        """True where the update of this step must be skipped: loss or gradient norm are out of line with the window before.

        The first spike in a window's length saves the state before it and pins the last verified checkpoint. Raises Halt
        where --spike is halt. Every rank comes to the same answer, from the same reduced numbers.
        """
        cfg, now = self.cfg, np.array([loss, norm])
        window = np.array(self.spike_rows[-cfg.spike_window :]).reshape(-1, 2)  # (steps, 2)
        z = (now - window.mean(0)) / np.maximum(window.std(0), 1e-12) if len(window) >= cfg.spike_window else np.zeros(2)
        worst = int(z.argmax())
        if not z[worst] > cfg.spike_z:
            self.spike_rows = [*self.spike_rows, [loss, norm]][-cfg.spike_window :]
            return False
        said = f"step {self.step + 1}: {('loss', 'gradient norm')[worst]} {now[worst]:.4g} is {z[worst]:.1f} deviations above "
        said += f"its last {len(window)} steps"
        if cfg.spike == "halt" or self.last_spike < 0 or self.step - self.last_spike > cfg.spike_window:
            self.checkpoints.wait()
            if self.main:
                self.checkpoints.pin(f"before the spike: {said}")
            self.save()
        self.last_spike = self.step
        if cfg.spike == "halt":
            raise Halt(Exit.SPIKE, f"{said}; the state before it is saved, go on with --resume --spike skip")
        self.say(f"{said}; this update is skipped")
        return True

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Until the device has passed the event; a device that does not answer in time means a lost rank."""
        began = looked = time.monotonic()
        while not event.query():
            now = time.monotonic()
            if self.world > 1 and now > looked + 1:  # NCCL's kernels spin on when a rank dies; torchrun gives us 30 s
                looked = now
                if (lost := lost_ranks(self.pids)) or now > began + self.cfg.comm_timeout:
                    raise TimeoutError(lost or f"no answer from the device within {self.cfg.comm_timeout:.0f} s")
            time.sleep(0.0005)

    def settle(self, late: int = 0) -> None:
        """Reads and logs what all pending steps but the last `late` have left behind. Raises Halt for numbers not finite."""
        cfg = self.cfg
        while len(self.pending) > late:
            step, values, done = self.pending.popleft()
            if self.cuda:
                self.wait_for(done)
            loss, norm, *wishes = values.tolist()
            self.wishes = [wish > 0 for wish in wishes]
            elapsed = self.mark.elapsed_time(done) / 1000 if self.cuda else done - self.mark
            self.mark = done
            self.train_s += elapsed
            for name, value in (("loss", loss), ("gradient norm", 0.0 if self.scaler.is_enabled() else norm)):
                if not math.isfinite(value):  # this update and later ones were not made
                    self.step, self.tokens = step - 1, (step - 1) * cfg.batch_tokens
                    raise Halt(Exit.NON_FINITE, f"{name} is {value} at step {step}; the weights are those of step {step - 1}")
            self.train_loss = loss
            if self.startup_s is None:
                self.startup_s = time.perf_counter() - self.began
            rate = cfg.batch_tokens / elapsed
            mfu = rate * self.flops / (self.peak * self.world) if self.peak else None
            if mfu is not None and mfu > 1:
                name = torch.cuda.get_device_name()
                raise Halt(Exit.FAILED, f"MFU of {mfu:.0%} is impossible: the peak of {name} or the timing is wrong")
            row = {
                "kind": "train", "step": step, "tokens": step * cfg.batch_tokens, "loss": loss,
                "lr": (cfg.muon_lr if cfg.optimizer == "muon" else cfg.lr) * learning_rate_factor(cfg, step - 1),
                "grad_norm": norm, "step_ms": elapsed * 1000, "tokens_per_s": rate, "mfu": mfu,
                "peak_mem_bytes": torch.cuda.max_memory_allocated(self.device) if self.cuda else 0, "train_s": self.train_s,
                "epoch": (step * cfg.batch_tokens - 1) // len(self.train_stream),
            }  # fmt: skip
            if self.save_ms:  # of the save before this step, not part of its step_ms
                row |= {"save_ms": self.save_ms, "save_wait_ms": self.save_wait_ms}
                self.save_ms = 0.0
            self.step_ms.append(elapsed * 1000)
            self.log(row)
            if self.main:
                self.progress(row)

    def run(self) -> Exit:
        """Trains to the end. Returns Exit.OK or Exit.STOPPED; raises Halt for other ends."""
        cfg = self.cfg
        cadence, every = parse_cadence(cfg.checkpoint_every)
        due = (bool(cfg.val_every) and self.step % cfg.val_every == 0) or self.step == cfg.max_steps
        if due and self.val_step != self.step:  # at the start, or where a stop came before it
            self.validate()
        batches = self.loader.batches(self.step, cfg.max_steps)
        self.synchronize()
        self.mark = self.tick()  # train_s counts from here, with other work taken out
        last_save, interval, saved_at = time.perf_counter(), every or 60.0, 0  # auto: the first one soon, to measure it
        stopping = save_asked = over = False
        while self.step < cfg.max_steps and not (stopping or over):
            losses = torch.zeros((), device=self.device)
            for micro in range(self.accum):
                x, y = next(batches)
                losses += self.backward(x, y, last=micro == self.accum - 1)
                if micro == 1 and self.pending and self.world > 1:
                    self.wait_for(self.pending[0][2])  # a full launch queue would block before a lost rank is noticed
            # What all ranks must agree on travels with the loss: a signal to stop, a wish to save, the time being up.
            due = cadence in ("auto", "seconds") and time.perf_counter() - last_save > interval
            wishes = [
                bool(self.stop_signal),
                self.main and ((due and not self.checkpoints.busy()) or self.checkpoints.must_stop()),
                self.main and bool(cfg.max_minutes) and self.train_s > cfg.max_minutes * 60,
            ]
            # torch.full, not a copy from the host: a copy from pageable memory would wait for the device.
            flags = [torch.full((), float(wish), device=self.device) for wish in wishes]
            control = torch.stack([losses / cfg.batch_tokens, *flags])
            norm = self.optimizer.finish_gradients(control, tied=self.step < cfg.tied_steps)
            grad_scale = None
            if self.scaler.is_enabled():
                self.probe.grad = norm.clone()
                self.scaler.unscale_(self.probe_optimizer)
                grad_scale, norm = self.probe.grad / norm.clamp_min(1e-30), self.probe.grad.clone()
                self.scaler.step(self.probe_optimizer)
                self.scaler.update()
            finite, finite_norm = torch.isfinite(control[0]), torch.isfinite(norm)
            self.bad |= ~(finite if self.scaler.is_enabled() else finite & finite_norm)
            skip = self.bad | ~finite_norm  # fp16 overflow: this step only, and the scale falls
            if cfg.clip:
                factor = (cfg.clip / (norm + 1e-6)).clamp(max=1.0)
                grad_scale = factor if grad_scale is None else grad_scale * factor
            self.wishes = [False, False, False]
            if cfg.spike != "off":
                self.settle()  # the row of the step before, which a halt would lose
                if math.isfinite(norm.item()) and self.spike_guard(control[0].item(), norm.item()):
                    skip = torch.ones_like(skip)
            self.checkpoints.before_update()
            self.optimizer.step(learning_rate_factor(cfg, self.step), muon_momentum(cfg, self.step), grad_scale, skip)
            self.optimizer.zero_grad()
            self.step, self.tokens = self.step + 1, (self.step + 1) * cfg.batch_tokens
            packed = torch.cat([control[:1], norm.unsqueeze(0), control[1:]]).to("cpu", non_blocking=True)
            self.pending.append((self.step, packed, self.tick()))
            self.settle(late=1 if self.cuda else 0)  # one step late, so that the device never waits for the host
            stopping, save_asked, over = self.wishes[0], save_asked or self.wishes[1], self.wishes[2]

            at_end = self.step == cfg.max_steps or stopping or over
            validate = at_end or (cfg.val_every and self.step % cfg.val_every == 0)
            save = save_asked or (cadence == "steps" and self.step % int(every) == 0)
            if validate or save:
                self.settle()  # before a save, so that nothing follows a step that was not finite
                if validate and not stopping:
                    self.validate()
                if save and not at_end:
                    self.checkpoints.remark()
                    self.save()
                    last_save, saved_at, save_asked = time.perf_counter(), len(self.step_ms), False
                self.mark = self.tick()  # neither is training time
            if cadence == "auto" and saved_at and not self.checkpoints.busy():
                usual = statistics.median(self.step_ms[max(0, saved_at - 100) : saved_at])
                lost = self.last_save_ms + sum(ms - usual for ms in self.step_ms[saved_at:])
                interval, saved_at = self.auto_interval(lost / 1000, interval), 0
        if (cadence != "off" or stopping) and self.resume_from != self.checkpoints.dir / f"step-{self.step:06d}":
            self.save()
        self.checkpoints.wait()
        if stopping and self.checkpoints.failed:
            line = f"stopped by a signal at step {self.step}, and its state could not be saved; earlier checkpoints stand"
            raise Halt(Exit.DISK, line)
        return Exit.STOPPED if stopping else Exit.OK

    def auto_interval(self, stall: float, before: float) -> float:
        """Seconds to the next checkpoint. stall: seconds that the last one cost, blocked and by slower steps."""
        mtbf = mean_time_between_failures(self.cfg, self.world if self.cuda else 1)
        upload = self.checkpoints.stats["write_s"] + self.checkpoints.stats["mirror_s"]
        stall = max(stall, 1e-3)
        interval = checkpoint_interval(stall, mtbf, upload)
        if not 0.8 < interval / before < 1.25:
            self.say(
                f"checkpoints every {interval:.0f} s: sqrt(2 x {stall:.3f} s stall x {mtbf / 3600:.2f} h between failures), "
                f"not below {upload:.1f} s of writing"
            )
        return interval

    def finish(self, code: Exit, reason: str) -> None:
        """Weights, result.json, and whatever must come after everything is written; nothing for a run that never began."""
        done = code in (Exit.OK, Exit.STOPPED)
        state = self.weights() if done else None
        if not self.main or self.lock is None or not hasattr(self, "loader"):
            return
        cfg = self.cfg
        weights = save_weights(self.model, cfg, self.run_dir / "model.safetensors", state) if done else None
        rows = read_metrics(self.run_dir)["train"]
        steady = sorted(r["step_ms"] for r in rows[max(3, len(rows) // 10) :] or rows)
        rate = cfg.batch_tokens * 1000 / steady[len(steady) // 2] if steady else None
        write_json(self.run_dir / "result.json", {
            "recipe": cfg.recipe, "exit_reason": reason, "exit_code": int(code), "step": self.step, "max_steps": cfg.max_steps,
            "tokens": self.tokens, "train_loss": self.train_loss, "val_loss": self.val_loss, "best_val_loss": self.best_val_loss,
            "val_protocol": self.protocol, "train_seconds": self.train_s, "val_seconds": self.val_s,
            "compile_seconds": self.compile_s, "checkpoint_stall_seconds": self.stall_s,
            "checkpoints": {**self.checkpoints.stats, "restore_s": self.restore_s},
            "startup_seconds": self.startup_s, "total_seconds": time.perf_counter() - self.began,
            "loader_wait_seconds": self.loader.wait_s, "tokens_per_s": rate,
            "mfu": rate * self.flops / (self.peak * self.world) if rate and self.peak else None,
            "peak_mem_bytes": max((r["peak_mem_bytes"] for r in rows), default=0), "params": parameter_count(cfg)["total"],
            "data": self.data, "seed": cfg.seed, "world_size": self.world,
            "device": torch.cuda.get_device_name(self.device) if self.cuda else "cpu",
            "weights": "model.safetensors" if weights else None, "weights_sha256": weights,
        })  # fmt: skip
        if self.wandb is not None:
            self.wandb.close()


def available_memory() -> float:
    """Bytes of host memory that can be had without swapping; inf where the system does not say."""
    info = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+)", info.read_text() if info.exists() else "")
    return int(found[1]) * 1024 if found else math.inf


def explain_out_of_memory(trainer: Trainer) -> str:
    """Writes the allocator's summary into the run directory; returns the line for the person."""
    cfg, device = trainer.cfg, trainer.device
    state = 4 * parameter_count(cfg)["total"] + state_bytes(cfg)  # gradients; weights and optimizer
    if trainer.run_dir.is_dir():
        (trainer.run_dir / "out_of_memory.txt").write_text(torch.cuda.memory_summary(device))
    room = torch.cuda.get_device_properties(device).total_memory
    by_sequence = (torch.cuda.max_memory_allocated(device) - state) / cfg.micro_batch
    fit = max(1, cfg.micro_batch // 2)
    while fit > 1 and state + by_sequence * fit > 0.9 * room:
        fit //= 2
    return (
        f"out of GPU memory: weights, gradients and optimizer take {state / 1e9:.1f} GB, activations and logits of --micro-batch "
        f"{cfg.micro_batch} x {cfg.seq_len} tokens filled the rest of {room / 1e9:.0f} GB; try --micro-batch {fit} "
        f"(same result, more accumulation)"
    )


def lost_ranks(pids: list[int]) -> str:
    """Which ranks are gone or stopped, if any. All ranks are processes of this machine."""
    said = []
    for rank, pid in enumerate(pids):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            state = "X"
        if state in "ZXTt":
            said.append(f"rank {rank} (process {pid}) is {'dead' if state in 'ZX' else 'stopped'}")
    return ", ".join(said)


def name_lost_rank(trainer: Trainer) -> str:
    """Which rank is gone, stopped, or gives no sign of life."""
    time.sleep(0.5)  # a process closes its connections a little before it is gone
    if said := lost_ranks(trainer.pids):
        return said
    try:
        dist.monitored_barrier(trainer.host_group, timeout=datetime.timedelta(seconds=5), wait_all_ranks=True)
    except RuntimeError as e:
        return str(e).splitlines()[0]
    return "all ranks answer"


def train(cfg: Config) -> tuple[Exit, str, Path | None]:
    """Runs one training to its end on this rank. Returns the exit code, a line for the person, and the run directory."""
    trainer = Trainer(cfg)
    reason = line = ""
    try:
        trainer.setup()
        code = trainer.run()
        if code == Exit.STOPPED:
            by = trainer.stop_signal or "on another rank"
            how = f"go on with the same flags and --run-dir {trainer.run_dir} --resume"
            line = f"stopped by signal {by}; saved at step {trainer.step}; {how}"
        elif trainer.step < cfg.max_steps:
            reason, line = "max_minutes", f"stopped after {trainer.train_s / 60:.1f} minutes of training at step {trainer.step}"
    except Halt as e:
        code, line = e.code, str(e)
    except UserError as e:
        if trainer.mark is None:
            raise
        code, line = Exit.BAD_INPUT, str(e)  # of the data, on the rank that met it
        if trainer.rank:
            print(f"error: rank {trainer.rank}: {e}", file=sys.stderr, flush=True)
    except torch.OutOfMemoryError:
        code, line = Exit.OUT_OF_MEMORY, explain_out_of_memory(trainer)
    except (TimeoutError, RuntimeError) as e:
        lost_peer = re.search("gloo|NCCL|by peer|roken pipe|[Tt]imed? ?out", str(e))
        if trainer.world == 1 or not (lost_peer or isinstance(e, (TimeoutError, dist.DistError))):
            raise
        code, first = Exit.PEER_LOST, str(e).splitlines()[0][:160]
        lost = f"rank {trainer.rank} lost another rank at step {trainer.step + 1}: {name_lost_rank(trainer)} ({first})"
        print(f"error: {lost}", file=sys.stderr, flush=True)  # by every rank: rank 0 may be the one
    except OSError as e:  # TimeoutError is one too, and was taken above
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise
        code, line = Exit.DISK, f"{trainer.run_dir} cannot be written: {e.strerror}; checkpoints stand"
    if code != Exit.PEER_LOST and hasattr(trainer, "checkpoints"):
        trainer.checkpoints.close()
    try:
        trainer.finish(code, reason or ("finished" if code == Exit.OK else code.name.lower()))
    except OSError as e:
        code, line = Exit.DISK, f"{trainer.run_dir} cannot be written: {e.strerror}; checkpoints stand"
    if trainer.lock is not None:
        trainer.lock.close()
    return code, line, trainer.run_dir


def main(argv: list[str]) -> int:
    """Command line. Returns the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    cfg, begun = None, True
    try:
        cfg = parse_args(argv)
        code, line, run_dir = train(cfg)
        if rank == 0:
            if line:
                print(f"{'error: ' if code not in (Exit.OK, Exit.STOPPED) else ''}{line}", file=sys.stderr)
            print(f"run directory: {run_dir}", file=sys.stderr, flush=True)
    except UserError as e:
        code, begun = Exit.BAD_INPUT, False
        if rank == 0:
            print(f"error: {e}", file=sys.stderr, flush=True)
    except Exception:  # a bug; a rented machine must still get its --on-finish
        code = Exit.FAILED
        traceback.print_exc()
    ends = {"always": True, "success": code == Exit.OK, "failure": code != Exit.OK}
    if rank == 0 and cfg is not None and cfg.on_finish and begun and ends[cfg.on_finish_when]:
        subprocess.run(cfg.on_finish, shell=True, check=False)
    # torchrun restarts every failure; ends that another attempt would only repeat are reported to it as success.
    final = code in (Exit.FAILED, Exit.PEER_LOST, Exit.DISK) or not int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    status = int(code) if final else 0
    if code == Exit.PEER_LOST or any(t.name == "wandb" and t.is_alive() for t in threading.enumerate()):
        sys.stdout.flush()
        os._exit(status)  # collectives in flight, or a server that does not answer, would hold up an orderly exit
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
