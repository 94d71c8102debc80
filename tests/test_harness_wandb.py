"""Weights & Biases with its real client: offline files read back, and servers that refuse or hang."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness_support import write_hellaswag
from train_support import flags, result, rows

TRAINER = Path(__file__).parents[1] / "train_gpt2.py"


def run_process(argv: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """A process away from any login of the person who runs the tests; wandb flushes its files as it ends."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    clean |= {
        "OMP_NUM_THREADS": "1",
        "HOME": "/nonexistent",
        "WANDB_CONFIG_DIR": "/nonexistent",
        **environment,
    }
    command = [sys.executable, *argv]
    return subprocess.run(command, env=clean, cwd=TRAINER.parent, capture_output=True, text=True, timeout=200)


def train(argv: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return run_process([str(TRAINER), *argv], **environment)


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: a LevelDB log (7 bytes of header, then blocks of 32 KiB, each record with
    checksum, length and kind), every record a message of wandb's own protocol."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # too small for a record's header: padding
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def history(path: Path) -> dict[int, dict[str, Any]]:
    """Logged values by step."""
    found: dict[int, dict[str, Any]] = {}
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            row = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            found.setdefault(row["_step"], {}).update(row)
    return found


def test_offline_files_hold_every_metric_and_the_report(shards: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = train(flags("sample", shards, run, max_steps=9, wandb="offline"))
    assert done.returncode == 0, done.stderr
    (logged,) = (run / "wandb").glob("offline-run-*/*.wandb")
    by_step = history(logged)
    for row in rows(run, "train"):
        for key in ("loss", "lr", "grad_norm", "tokens", "tokens_per_s"):
            assert by_step[row["step"]][f"train/{key}"] == pytest.approx(row[key], rel=1e-12)
    for row in rows(run, "val"):
        assert by_step[row["step"]]["val/val_loss"] == pytest.approx(row["val_loss"], rel=1e-12)
    kinds = {record.WhichOneof("record_type") for record in records(logged)}
    assert {"run", "stats", "exit"} <= kinds  # config, system figures, a proper end
    (head,) = (record.run for record in records(logged) if record.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in head.config.update}
    assert config["max_steps"] == 9 and config["optimizer"] == "muon"

    # The report continues the same run, with the evaluations in its summary and the page itself.
    write_hellaswag(run, acc_norm=0.2955)
    done = run_process(["-m", "harness", "report", str(run), "--samples", "0"])
    assert done.returncode == 0 and "wandb" not in done.stderr, done.stderr
    (added,) = set((run / "wandb").glob("offline-run-*/*.wandb")) - {logged}
    assert added.name == logged.name  # the run's id
    texts = "".join(str(record) for record in records(added))
    assert "hellaswag-llmc/acc_norm" in texts and "0.2955" in texts
    assert history(added)[10]["report/_type"] == "html-file"  # the step after the last
    (page,) = added.parent.rglob("*.html")
    assert (run / "report.html").read_text().split("<body>")[1] in page.read_text()


def test_without_a_login_training_goes_on(shards: Path, tmp_path: Path) -> None:
    done = train(
        flags("sample", shards, tmp_path / "run", max_steps=4, wandb="online"),
        WANDB_BASE_URL="http://127.0.0.1:9",
    )
    assert done.returncode == 0, done.stderr
    assert "wandb: logging stopped" in done.stderr and "Traceback" not in done.stderr
    assert result(tmp_path / "run")["exit_reason"] == "finished"


@pytest.mark.full
@pytest.mark.parametrize("server", ["refuses", "hangs"])
def test_a_bad_server_changes_no_step_time(server: str, shards: Path, tmp_path: Path) -> None:
    """Interleaved runs with W&B off, and with a server that is not there or never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        if server == "hangs":
            listener.listen(100)
        medians: dict[str, list[float]] = {"off": [], "online": []}
        login = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "0" * 40}
        for turn in range(3):
            for mode, times in medians.items():
                run = tmp_path / f"{mode}{turn}"
                size = {"n_embd": 64, "max_steps": 300, "epochs": 100, "val_every": 0}
                done = train(flags("sample", shards, run, wandb=mode, **size), **login)
                assert done.returncode == 0, done.stderr
                times.append(float(np.median([row["step_ms"] for row in rows(run, "train")])))
                assert result(run)["exit_reason"] == "finished"
        # The fastest of three medians each: what remains is the machine's own noise.
        assert min(medians["online"]) < 1.25 * min(medians["off"]), medians
