"""Published models: their weights from the hub, our numbers beside the published ones.

The published numbers come in two scorings and on two validation sets that lie close together; each is kept
under the definition it was measured with.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from eval import common, hellaswag
from eval.models import open_model
from train_gpt2 import UserError, sha256_file


@dataclass(frozen=True)
class Reference:
    """A model on the hub at a pinned revision, and what was published about it."""

    repo: str
    revision: str
    weights_sha256: str
    hellaswag: dict[tuple[str, str], float]  # (scoring, metric) -> accuracy
    val_loss: dict[str, float]  # nats per token on the val set of that name


REFERENCES = {
    "gpt2": Reference(
        repo="openai-community/gpt2",
        revision="607a30d783dfa663caf39e06633721c8d4cfcd7e",
        weights_sha256="248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707",
        hellaswag={
            # build-nanogpt hellaswag.py, which also quotes lm-evaluation-harness.
            ("llmc", "acc"): 0.2859,
            ("llmc", "acc_norm"): 0.2955,
            ("lm-eval", "acc"): 0.2892,
            ("lm-eval", "acc_norm"): 0.3114,
        },
        # llm.c dev/vislog.ipynb; build-nanogpt play.ipynb.
        val_loss={"FineWeb": 3.424958, "FineWeb-Edu": 3.2924},
    )
}


class Unreachable(Exception):
    """The hub does not answer: nobody's mistake."""


def fetch(reference: Reference) -> Path:
    """The model directory in huggingface_hub's cache. Raises Unreachable, or UserError if altered."""
    import requests
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def snapshot(offline: bool) -> str:
        return snapshot_download(
            reference.repo,
            revision=reference.revision,
            allow_patterns=["config.json", "model.safetensors"],
            local_files_only=offline,
        )

    try:
        folder = snapshot(offline=True)
    except LocalEntryNotFoundError:
        try:
            # One quick question first: huggingface_hub itself tries for half a minute, in many lines.
            requests.head(constants.ENDPOINT, timeout=10)
            folder = snapshot(offline=False)
        except (HfHubHTTPError, OSError) as error:
            raise Unreachable(f"{constants.ENDPOINT}: {type(error).__name__}") from None
    weights = Path(folder) / "model.safetensors"
    found = sha256_file(weights)
    if found != reference.weights_sha256:
        raise UserError(f"{weights}: sha256 {found[:12]}… is not the published file's; delete it and try again")
    return Path(folder)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=tuple(REFERENCES), help="gpt2: OpenAI's GPT-2 124M")
    parser.add_argument("--from", dest="folder", type=Path, metavar="DIR", help="its directory, if it is at hand")
    parser.add_argument("--limit", type=common.positive, metavar="N", help="only the first N examples: a subset")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: a GPU if any")


def run(args: argparse.Namespace) -> int:
    reference = REFERENCES[args.name]
    device = common.pick_device(args.device)
    if args.folder:
        folder = args.folder
    else:
        try:
            folder = fetch(reference)
        except Unreachable as error:
            line = (
                f"error: {reference.repo} is not at hand and the hub cannot be reached ({error});"
                f" on a machine that reaches it, download config.json and model.safetensors of revision"
                f" {reference.revision[:12]}, and give their folder with --from DIR"
            )
            print(line, file=sys.stderr)
            return 1
    model = open_model(folder, device)
    if args.folder and model.describe()["weights_sha256"] != reference.weights_sha256:
        common.say(f"note: {folder} does not hold the published weights of {reference.repo}")
    rows = hellaswag.load_rows(args.limit)
    with common.ranks(device):
        for scoring in hellaswag.RENDER:
            summary, _ = hellaswag.evaluate(model, rows, scoring)
            common.say(*hellaswag.summary_lines(summary))
            for (kind, metric), published in reference.hellaswag.items():
                if kind == scoring and not summary["subset"]:
                    difference = summary[metric] - published
                    common.say(f"  {metric:<9} published {100 * published:.2f}%, ours {100 * difference:+.2f}")
    for name, loss in reference.val_loss.items():
        common.say(f"published val loss on {name}'s val set: {loss} nats per token")
    common.say(f"ours: python -m eval val {folder} --data DIR --tokens 10485760 --seq-len 1024")
    return 0
