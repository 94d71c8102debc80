"""A model's weights for other programs: transformers' GPT-2 directory, or safetensors with a config."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file

from data.tokenizer import gpt2_encoding
from eval import common, hf
from eval.models import Model, open_model
from eval.tokenizer_files import tokenizer_files
from train_gpt2 import UserError, config_hash, learning_hash, save_weights


def export_hf(model: Model, folder: Path) -> None:
    """config.json, model.safetensors and tokenizer files that GPT2LMHeadModel and AutoTokenizer load."""
    tensors = hf.to_hf(model.net)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf.hf_config(model.config), indent=1) + "\n")
    for name, content in tokenizer_files(gpt2_encoding(), model.config.seq_len).items():
        (folder / name).write_bytes(content)


def export_safetensors(model: Model, folder: Path) -> None:
    """model.safetensors under the trainer's names, and the config: `train_gpt2.load_run(folder)` loads it."""
    cfg = model.config
    save_weights(model.net, cfg, folder / "model.safetensors")
    hashes = {"config_hash": config_hash(cfg), "learning_hash": learning_hash(cfg)}
    common.write_json(folder / "config.json", {"recipe": cfg.recipe, "config": asdict(cfg), **hashes})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN", type=Path, help="run directory, or Hugging Face GPT-2 directory")
    parser.add_argument("--format", required=True, choices=("hf", "safetensors"), help="hf: for transformers")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder (default: export-FORMAT in it)")


def run(args: argparse.Namespace) -> int:
    out: Path = args.out or args.model / f"export-{args.format}"
    if out.exists():
        raise UserError(f"{out} exists; remove it or give another --out")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is no folder; make it or give another --out")
    model = open_model(args.model, common.pick_device("cpu"))
    temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        (export_hf if args.format == "hf" else export_safetensors)(model, temporary)
        temporary.chmod(0o755)
        os.rename(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    loader = f"transformers.GPT2LMHeadModel.from_pretrained({str(out)!r})"
    print(f"{out}: {loader if args.format == 'hf' else f'train_gpt2.load_run({str(out)!r})'} loads it")
    return 0
