"""A MODEL argument: a run directory, or a Hugging Face GPT-2 directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eval import hf
from train_gpt2 import GPT, Config, UserError, load_run, parameter_count, sha256_file


@dataclass(frozen=True)
class Model:
    """The plain (uncompiled) module in eval mode with float32 weights, and where it came from."""

    net: GPT
    config: Config
    path: Path
    kind: str  # "run" or "hf"

    @property
    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    @property
    def run_dir(self) -> Path | None:
        """Where results are kept: beside a run, never in somebody else's model directory."""
        return self.path if self.kind == "run" else None

    def describe(self) -> dict[str, Any]:
        """What identifies the model in a result."""
        files = sorted(self.path.glob("model*.safetensors"))
        return {
            "kind": self.kind,
            "recipe": self.config.recipe,
            "params": parameter_count(self.config)["total"],
            "weights_sha256": sha256_file(files[0]) if len(files) == 1 else [sha256_file(f) for f in files],
        }


def open_model(path: Path, device: torch.device) -> Model:
    """Load a run or a Hugging Face GPT-2 directory onto `device`. Raises UserError with one line."""
    if not path.is_dir():
        raise UserError(f"{path}: no such directory; give a run directory or a Hugging Face GPT-2 directory")
    if not (path / "config.json").is_file():
        raise UserError(f"{path}: no config.json; give a run directory or a Hugging Face GPT-2 directory")
    if hf.is_hf(path):
        config = hf.read_config(path)
        net = hf.build(config, hf.read_tensors(path, config)).to(device).eval()
        return Model(net, config, path, "hf")
    net, config = load_run(path, device)
    return Model(net, config, path, "run")
