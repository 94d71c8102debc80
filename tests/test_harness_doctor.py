"""Every check of the doctor fires on a made case and is silent on a good one; the probes are real."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import socket
import time

import numpy as np
import pytest
from harness_support import write_run

from harness import doctor
from harness.__main__ import main
from harness.doctor import Context, GpuState, Machine, examine
from train_gpt2 import RECIPES

H100 = GpuState("NVIDIA H100 80GB HBM3", 80 * 10**9, 79 * 10**9, (9, 0), 40, 1980, 1980)
V100 = dataclasses.replace(H100, name="Tesla V100-SXM2-32GB", memory=32 * 10**9, free=31 * 10**9, capability=(7, 0))
L4 = dataclasses.replace(H100, name="NVIDIA L4", memory=24 * 10**9, free=23 * 10**9, capability=(8, 9))
WORKING = {"cudnn": None, "flash": None, "efficient": None, "math": None}
MACHINE = Machine(
    gpus=(H100,) * 8, driver="580.1", torch="2.13.0", cuda="13.0", attention=WORKING, ram_available=10**12,
    collective_backend="nccl", shared_memory=2**34, open_files=65536, disk_free=10**12, disk_speed=2e9,
)  # fmt: skip
CONFIG = {
    "recipe": "gpt2", "device": "auto", "precision": "bf16", "compile": "auto", "attention": "auto",
    "parallel": "ddp",
    "optimizer": "adamw", "lr": 6e-4, "warmup_steps": 700, "clip": 1.0, "keep": 2, "checkpoint_every": "auto",
    "mirror": "", "max_steps": 19560, "batch_tokens": 524288, "micro_batch": 64, "seq_len": 1024, "epochs": 1,
    "deterministic": False, "data": "data/fineweb10B", "on_finish": "",
}  # fmt: skip
GOOD = Context(MACHINE, CONFIG, world_size=8, train_tokens=10_300_000_000, parameters=124_475_904)


def case(machine: dict | None = None, config: dict | None = None, **context) -> Context:
    """The good case with some facts changed."""
    return dataclasses.replace(
        GOOD,
        machine=dataclasses.replace(MACHINE, **(machine or {})),
        config=CONFIG | (config or {}),
        **context,
    )


def checks(context: Context) -> set[str]:
    return {finding.check for finding in examine(context)}


def gpus(**changes) -> dict:
    return {"gpus": (dataclasses.replace(H100, **changes), *[H100] * 7)}


BAD = {
    "gpu": case({"cuda_problem": "driver 470 is older than CUDA 13.0 needs"}),
    "no-gpu": case({"gpus": ()}),
    "gpu-busy": case(gpus(free=30 * 10**9)),
    "gpu-mixed": case({"gpus": (H100, L4)}, world_size=2),
    "clock": case(gpus(slowdown=("hw_thermal_slowdown",))),
    "clock-limit": case(gpus(clock_limit=1200)),
    "attention": case({"attention": WORKING | {"flash": "no kernel"}}, {"attention": "flash"}),
    "collective": case({"collective": "rank 3 did not answer in 15 s"}),
    "shared-memory": case({"shared_memory": 64 * 2**20}),
    "open-files": case({"open_files": 256}),
    "disk-speed": case({"disk_speed": 20e6}),
    "disk-space": case({"disk_free": 3 * 10**9}),
    "port": case({"busy_port": 29500}),
    "memory": case({"ram_available": 10**9}),
    "fp16": case(config={"precision": "fp16"}),
    "bf16": case({"gpus": (V100,) * 8}),
    "fp8-support": case({"gpus": (dataclasses.replace(H100, capability=(8, 0)),) * 8}, {"head_precision": "fp8"}),
    "fp8-control": case(config={"fp8_head": True}),
    "unsteady-start": case(config={"warmup_steps": 0, "clip": 0.0}),
    "recompute-attention": case(config={"recompute": "block"}),
    "one-checkpoint": case(config={"keep": 1}),
    "no-checkpoints": case({"spot": True}, {"checkpoint_every": "0", "mirror": "s3://bucket"}),
    "local-checkpoints": case({"spot": True}),
    "needless-sharding": case(config={"parallel": "fsdp2"}),
    "tensor-parallel": case(config={"tensor_parallel": 2}),
    "full-state": case(config={"parallel": "fsdp2", "full_state_dict": True}, parameters=7 * 10**9),
    "debug-large": case(config={"max_steps": 20}),
    "eager": case(config={"compile": "off"}),
    "autotune": case(config={"compile_mode": "max-autotune-no-cudagraphs", "max_steps": 500}),
    "deterministic": case(config={"deterministic": True}),
    "muon-strays": case(muon_strays=("wte.weight",)),
    "no-stop": case({"rented": "RUNPOD_POD_ID"}),
    "batch": case(config={"micro_batch": 48}),
    "short-data": case(train_tokens=100_000_000),
    "val-in-train": case(leaked_documents=3),
    "secret": case(config={"on_finish": "curl -H 'Authorization: Bearer abcdefgh123456' stop.example"}),
}

# The same situations made right, or near the bound: all silent.
RIGHT = {
    "fp16 where bf16 is missing": case({"gpus": (V100,) * 8}, {"precision": "fp16"}),
    "a warm but steady GPU": case(gpus(temperature=80)),
    "no GPU, small model": case({"gpus": ()}, parameters=4_000_000),
    "another backend fails": case({"attention": WORKING | {"cudnn": "no kernel"}}),
    "busy port, one rank": case({"busy_port": 29500, "shared_memory": 64 * 2**20}, world_size=1),
    "fp8 with its control": case(config={"fp8_head": True}, bf16_control=True),
    "an fp8 switch that is off": case(config={"fp8_head": False, "fp8": "off"}),
    "clipping without warm-up": case(config={"warmup_steps": 0}),
    "Muon without either": case(config={"optimizer": "muon", "warmup_steps": 0, "clip": 0.0}),
    "selective recomputation": case(config={"recompute": "selective"}),
    "spot with a mirror": case({"spot": True}, {"mirror": "s3://bucket/run"}),
    "sharding what does not fit": case(config={"parallel": "fsdp2"}, parameters=7 * 10**9),
    "debugging on a small card": case({"gpus": (L4,)}, {"max_steps": 20}, world_size=1),
    "a short run in eager mode": case(config={"compile": "off", "max_steps": 500}),
    "a short deterministic run": case(config={"deterministic": True, "max_steps": 500}),
    "rented with a stop": case({"rented": "RUNPOD_POD_ID"}, {"on_finish": "sudo poweroff"}),
    "epochs allowed": case(config={"epochs": 103}, train_tokens=100_000_000),
    "a secret by its name only": case(
        config={"on_finish": "curl -H \"Authorization: Bearer $KEY\" x"},
        environment={"API_KEY": "abcdefgh1234"},
    ),
}  # fmt: skip


def test_the_good_case_is_silent():
    assert examine(GOOD) == []
    assert examine(Context(MACHINE)) == []  # a machine alone


@pytest.mark.parametrize("check", BAD)
def test_check_fires(check):
    findings = [f for f in examine(BAD[check]) if f.check == check]
    assert findings, f"only {checks(BAD[check])}"
    for finding in findings:
        assert finding.severity in doctor.SEVERITIES and finding.what and finding.why and finding.fix


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_thing_is_silent(name):
    assert checks(RIGHT[name]) == set()


def test_every_rule_has_a_bad_case():
    fired = {finding.check for context in BAD.values() for finding in examine(context)}
    assert fired == set(BAD)
    silent = [rule.__name__ for rule in doctor.RULES if not any(list(rule(context)) for context in BAD.values())]
    assert silent == []


def test_a_secret_of_the_environment_is_found_in_any_field():
    context = case(
        config={"mirror": "s3://x?sig=topsecretvalue"},
        environment={"AWS_SECRET_ACCESS_KEY": "topsecretvalue"},
    )
    assert checks(context) == {"secret"}
    assert "topsecretvalue" not in " ".join(f.what + f.why + f.fix for f in examine(context))


def test_worst_first():
    severities = [f.severity for f in examine(case({"open_files": 256}, {"keep": 1, "max_steps": 20}))]
    assert severities == ["error", "warning", "info"]


# ------------------------------------------------------------------------------------------- probes


def test_attention_is_called_for_real():
    assert doctor.try_attention("cpu") == {"flash": None, "math": None}


def test_all_reduce_for_real(tmp_path):
    assert doctor.try_all_reduce("gloo", 2) is None
    # a CPU build has no NCCL: the error comes back as text
    assert doctor.try_all_reduce("gloo", 2, timeout=0.0) == "rank 0 did not answer in 0 s"
    import torch

    if not torch.distributed.is_nccl_available():
        queue = multiprocessing.get_context("fork").SimpleQueue()
        doctor.all_reduce_rank("nccl", 0, 1, str(tmp_path), queue)
        assert "Error" in queue.get()


def test_busy_port_is_found():
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        assert doctor.find_busy_port(port) == port
    assert doctor.find_busy_port(port) is None


def test_disk_speed_is_measured(tmp_path):
    free, speed = doctor.disk_facts(tmp_path / "not" / "there", size=2**20)
    assert free > 0 and speed > 0
    assert list(tmp_path.iterdir()) == []


def test_rented_sign():
    assert doctor.rented_sign({"RUNPOD_POD_ID": "x"}) == "RUNPOD_POD_ID"
    assert doctor.rented_sign({"HOME": "/root"}) is None


def shard(path, tokens):
    """A shard written by hand: 256 int32 of header, then uint16 tokens."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())


def test_val_documents_found_in_train(tmp_path):
    rng = np.random.default_rng(1)
    documents = [np.append(50256, rng.integers(0, 50000, size=n)) for n in (100, 200, 64, 63, 300)]
    shard(tmp_path / "x_train_000001.bin", np.concatenate(documents[:4]))
    shard(tmp_path / "x_val_000000.bin", documents[4])
    assert doctor.leaked_documents(tmp_path) == 0
    # one document whole, one of exactly 64 tokens; the 63 tokens are too short to tell
    shard(
        tmp_path / "x_val_000000.bin",
        np.concatenate([documents[4], documents[1], documents[2], documents[3]]),
    )
    assert doctor.leaked_documents(tmp_path) == 2


# ------------------------------------------------------------------------------------- command line


def test_the_whole_on_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNPOD_POD_ID", raising=False)
    started = time.perf_counter()
    code = main(["doctor", "sample", "--json", "--", "--keep", "3", "--device", "cpu"])
    seconds = time.perf_counter() - started
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["collective"] is None
    assert code == max((doctor.EXIT_CODES[f["severity"]] for f in report["findings"]), default=0)
    assert seconds < 20
    assert list(tmp_path.iterdir()) == []


def test_a_json_file_of_fields(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text(json.dumps({"recipe": "sample", "keep": 1, "mirror": ""}))
    assert main(["doctor", "mine.json", "--spot"]) == 3
    out = capsys.readouterr().out
    assert "[one-checkpoint]" in out and "[local-checkpoints]" in out and "[no-stop]" in out


def test_a_field_younger_than_the_run_meant_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fields = dataclasses.asdict(RECIPES["speedrun"])
    assert fields.pop("tied_steps") == 4000 and fields["key_offset"]
    (tmp_path / "config.json").write_text(json.dumps({"schema": 1, "config": fields}))
    for what in (".", "config.json"):
        config = doctor.load_config(what, [])
        assert config["tied_steps"] == 0 and config["key_offset"]
        assert doctor.config_facts(config)["parameters"] > 1e8
    assert doctor.load_config("speedrun", [])["tied_steps"] == 4000


@pytest.mark.parametrize(
    "argv",
    [
        ["no-such-thing"],
        ["broken.json"],
        ["list.json"],
        ["--", "--keep", "3"],
        ["broken.json", "--", "--keep", "3"],
        ["sample", "--", "--keep", "1"],
    ],
)
def test_bad_input_is_one_line(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    assert main(["doctor", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1


def test_a_bf16_run_is_a_control_and_an_fp8_run_is_none(tmp_path, monkeypatch):
    from harness import ledger

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ledger.read, "__defaults__", (tmp_path / "ledger.jsonl",))

    def head(run, precision):
        config = json.loads((run / "config.json").read_text())
        config["config"]["head_precision"] = precision
        (run / "config.json").write_text(json.dumps(config))

    head(write_run(tmp_path / "runs" / "fp8", recipe="speedrun"), "fp8")
    head(write_run(tmp_path / "runs" / "other", recipe="gpt2"), "same")
    head(write_run(tmp_path / "runs" / "cut", recipe="speedrun", exit_reason="stopped"), "same")
    assert not doctor.has_bf16_control("speedrun")
    head(write_run(tmp_path / "runs" / "bf16", recipe="speedrun"), "same")
    assert doctor.has_bf16_control("speedrun")
    assert not doctor.has_bf16_control("sample")
    decision = {"kind": "decision", "verdict": "accepted", "candidate": "fp8-head"}
    ledger.append(decision, tmp_path / "ledger.jsonl")
    assert doctor.has_bf16_control("sample")
