"""What the commands share: device, ranks, arguments, and writing results next to the run."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data.format import write_bytes
from train_gpt2 import SCHEMA, UserError, read_json

DTYPES = ("auto", "fp32", "bf16", "fp16")


def add_model_arguments(parser: argparse.ArgumentParser, dtype: bool = True) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="run directory, or Hugging Face GPT-2 directory")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: a GPU if any")
    if dtype:
        parser.add_argument("--dtype", default="auto", choices=DTYPES, help="arithmetic of the matrix products")


def pick_device(name: str) -> torch.device:
    """The device of this rank; under torchrun GPU number LOCAL_RANK."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device; use --device cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise UserError(f"rank {local} has no GPU: there are {torch.cuda.device_count()}; start fewer ranks")
    return torch.device("cuda", local)


@contextlib.contextmanager
def ranks(device: torch.device) -> Iterator[None]:
    """Join the other ranks when started by torchrun; alone otherwise."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def world() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) outside torchrun."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_main() -> bool:
    """True on the rank that prints and writes."""
    return os.environ.get("RANK", "0") == "0" if not dist.is_initialized() else dist.get_rank() == 0


def say(*lines: str) -> None:
    if is_main():
        print("\n".join(lines), flush=True)


def progress(label: str) -> Callable[[int, int], None]:
    """A counter on a terminal's standard error; silent in a pipe, a file and on ranks above 0."""
    shown = is_main() and sys.stderr.isatty()

    def show(done: int, total: int) -> None:
        if shown:
            print(f"\r{label} {done}/{total} ", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """One object with the schema version, whole or not at all."""
    write_bytes(path, (json.dumps({"schema": SCHEMA, **content}, indent=1, allow_nan=False) + "\n").encode())


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """JSON lines, whole or not at all."""
    write_bytes(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not JSON lines ({error}); evaluate the model again") from None


def writable_file(text: str) -> Path:
    """An argument that names a file to write: its folder must exist, found out before the work is done."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is no folder")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    return path


def positive(text: str) -> int:
    try:
        value = int(text.replace("_", "").replace(",", ""))
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def read_summary(path: Path) -> dict[str, Any] | None:
    """A result written by `write_json`, or None if there is none."""
    return read_json(path) if path.is_file() else None


def save_picture(figure: Any, path: Path) -> list[Path]:
    """Writes a matplotlib figure as PNG and SVG beside each other and closes it; returns their paths."""
    import matplotlib.pyplot as plt

    written = [path.with_suffix(s) for s in (".png", ".svg")]
    for file in written:
        figure.savefig(file, dpi=150)
    plt.close(figure)
    return written
