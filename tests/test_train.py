"""A whole run in this process: what it leaves behind, how it ends, and what it refuses before anything is written."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from train_support import PADDED, VOCAB, flags, read_tokens, result, rows, shard_bytes, write_shards

import train_gpt2
from train_gpt2 import GPT, RECIPES, Config, Exit, Halt, TokenStream, Trainer, main, parse_args

Capture = pytest.CaptureFixture[str]
SCRIPT = Path(train_gpt2.__file__)


def token_losses(model: GPT, tokens: np.ndarray) -> Tensor:
    """Loss of every token after the first of each row of seq_len, in float64 from the model's logits."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    T = model.cfg.seq_len
    with torch.no_grad():
        logits = model.logits(ids[:-1].view(-1, T)).double()
    return F.cross_entropy(logits.flatten(0, 1), ids[1:], reduction="none")


# ------------------------------------------------------------------------------- a finished run


@pytest.fixture(scope="module")
def finished(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the Muon recipe, with secrets in the environment that must not be found anywhere in it."""
    run_dir = tmp_path_factory.mktemp("runs") / "muon"
    secrets = {"WANDB_API_KEY": "secret-12345", "HF_TOKEN": "secret-12345", "AWS_SECRET_ACCESS_KEY": "secret-12345"}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in secrets.items():
            patch.setenv(key, value)
        assert main(flags("sample", shards, run_dir, max_steps=40, val_every=15, epochs=9)) == Exit.OK
    return run_dir


def test_run_directory_holds_what_others_read(finished: Path) -> None:
    for name in ("config.json", "env.json", "result.json", "metrics.jsonl", "model.safetensors", "train_gpt2.py"):
        assert (finished / name).stat().st_size
    for name in ("config.json", "env.json", "result.json"):
        assert json.loads((finished / name).read_text())["schema"] == 1
    assert (finished / "train_gpt2.py").read_bytes() == SCRIPT.read_bytes()
    env = json.loads((finished / "env.json").read_text())
    assert env["train_gpt2_sha256"] == hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    assert env["torch"] == torch.__version__ and env["threads"] == 1 and env["gpus"] == []
    assert "attention" in env["attention_backend"] or env["attention_backend"] == "math"
    assert not [p for p in finished.rglob("*") if p.is_file() and b"secret-12345" in p.read_bytes()]
    assert not [p.name for p in finished.iterdir() if p.name.startswith(".") and p.name != ".lock"], "a temporary is left"
    config = json.loads((finished / "config.json").read_text())
    cfg = Config(**config["config"])
    assert config["recipe"] == "sample" and cfg.max_steps == 40 and cfg.optimizer == "muon"
    assert set(config["config"]) == {f.name for f in dataclasses.fields(Config)}


def test_rows_count_steps_tokens_and_epochs(finished: Path, shards: Path, tmp_path: Path) -> None:
    train, val = rows(finished, "train"), rows(finished, "val")
    assert [r["step"] for r in train] == list(range(1, 41))
    assert [r["tokens"] for r in train] == [128 * s for s in range(1, 41)]
    total = len(read_tokens(shards, "train"))
    assert [r["epoch"] for r in train] == [(128 * s - 1) // total for s in range(1, 41)]
    assert {r["epoch"] for r in train} == {0, 1, 2}
    assert [r["step"] for r in val] == [0, 15, 30, 40]
    assert all(r["mfu"] is None and r["step_ms"] > 0 and r["grad_norm"] >= 0 for r in train)
    seconds = [r["train_s"] for r in train]
    assert seconds == sorted(seconds)
    assert sum(r["step_ms"] for r in train) / 1000 == pytest.approx(seconds[-1], rel=1e-6)
    assert train_gpt2.read_metrics(finished) == {"train": train, "val": val}
    damaged = tmp_path / "metrics.jsonl"
    damaged.write_bytes((finished / "metrics.jsonl").read_bytes() + b"[1]\n\xff\xfe\n\0\0\n{\"kind\": \"tr")
    assert train_gpt2.read_metrics(tmp_path) == {"train": train, "val": val}


def test_logged_rates_follow_the_schedule(finished: Path) -> None:
    """sample: constant, then linear over the last 60% of the steps to a twentieth; the update of row s is that of step s - 1."""
    rates = [r["lr"] / RECIPES["sample"].muon_lr for r in rows(finished, "train")]
    assert rates == pytest.approx([0.05 + 0.95 * min(1.0, (40 - s) / 24) for s in range(40)])


def test_first_losses_are_those_of_the_initial_model(finished: Path, shards: Path) -> None:
    """The head starts at zero: ln(vocabulary) at step 0, for training and validation alike."""
    assert rows(finished, "train")[0]["loss"] == pytest.approx(math.log(VOCAB), rel=1e-6)
    assert rows(finished, "val")[0]["val_loss"] == pytest.approx(math.log(VOCAB), rel=1e-6)
    assert rows(finished, "train")[-1]["loss"] < math.log(VOCAB) - 1.0, "nothing was learned"


def test_val_loss_is_the_mean_over_the_stated_tokens_of_the_saved_weights(finished: Path, shards: Path) -> None:
    model, cfg = train_gpt2.load_run(finished)
    assert not model.training
    losses = token_losses(model, read_tokens(shards, "val")[:113])
    end = result(finished)
    assert end["val_loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert end["val_loss"] == rows(finished, "val")[-1]["val_loss"]
    assert end["best_val_loss"] == min(r["val_loss"] for r in rows(finished, "val"))
    protocol = end["val_protocol"]
    assert protocol["data"] == hashlib.sha256(read_tokens(shards, "val")[:113].astype("<u2").tobytes()).hexdigest()
    assert (protocol["tokens"], protocol["seq_len"], protocol["document_mask"], protocol["dtype"]) == (112, 16, False, "fp32")
    assert json.loads((finished / "config.json").read_text())["val_protocol"] == protocol
    assert cfg.val_tokens == 112


def test_result_says_how_it_ended(finished: Path, shards: Path) -> None:
    end = result(finished)
    assert (end["exit_reason"], end["exit_code"], end["step"], end["tokens"]) == ("finished", 0, 40, 40 * 128)
    assert end["mfu"] is None and end["device"] == "cpu" and end["world_size"] == 1 and end["seed"] == 1337
    assert end["train_loss"] == rows(finished, "train")[-1]["loss"]
    assert end["train_seconds"] == pytest.approx(rows(finished, "train")[-1]["train_s"])
    assert end["total_seconds"] > end["train_seconds"] + end["val_seconds"]
    assert end["data"] == {"dir": str(shards), "fingerprint": train_gpt2.data_fingerprint(shards), "dataset": None}
    weights = load_file(finished / "model.safetensors")
    assert end["weights_sha256"] == hashlib.sha256((finished / "model.safetensors").read_bytes()).hexdigest()
    assert end["params"] == sum(t.numel() for t in weights.values())
    assert all(t.dtype == torch.float32 for t in weights.values())


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun"])
def test_logged_loss_is_the_mean_over_the_tokens_of_the_step(shards: Path, tmp_path: Path, recipe: str) -> None:
    """With a learning rate of nothing every step has the initial weights: 4 accumulated micro-batches, one mean."""
    still = {k: 0 for k in ("lr", "embed-lr", "head-lr", "scalar-lr", "muon-lr")}
    deep = {"n_layer": 6, "head_precision": "same"} if recipe == "speedrun" else {}
    argv = flags(recipe, shards, tmp_path / "run", max_steps=3, zero_init=False, **deep, **still)
    assert main(argv) == Exit.OK
    tokens = read_tokens(shards, "train")
    model = GPT(parse_args(argv))
    logged = [r["loss"] for r in rows(tmp_path / "run", "train")]
    assert logged == pytest.approx(
        [token_losses(model, tokens[128 * s : 128 * s + 129]).mean().item() for s in range(3)], rel=1e-6
    )
    model.zero_grad()
    ids = torch.from_numpy(tokens[:129].astype(np.int64))
    F.cross_entropy(model.logits(ids[:-1].view(8, 16)).flatten(0, 1), ids[1:]).backward()
    if recipe == "speedrun":  # begins with head and embedding as one weight, which counts once
        assert model.head is not None and model.head.weight.grad is not None and model.wte.weight.grad is not None
        model.wte.weight.grad += model.head.weight.grad
        model.head.weight.grad = None
    norm = math.sqrt(sum((p.grad.double() ** 2).sum().item() for p in model.parameters() if p.grad is not None))
    assert rows(tmp_path / "run", "train")[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("steps", [2, 3])
def test_head_and_embedding_go_apart_after_the_tied_steps(shards: Path, tmp_path: Path, steps: int) -> None:
    assert main(flags("sample", shards, tmp_path / "run", max_steps=3, tied_steps=steps)) == Exit.OK
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(weights["wte.weight"], weights["head.weight"]) == (steps == 3)


@pytest.mark.parametrize("recipe", ["gpt2", "sample"])
def test_accumulation_gives_the_same_curve_and_weights(shards: Path, tmp_path: Path, recipe: str) -> None:
    """One micro-batch of 8, four of 2, eight of 1: the same sums in another order."""
    curves, ends = [], []
    for micro in (8, 2, 1):
        run_dir = tmp_path / str(micro)
        rate = {"lr": 0.01, "embed_lr": 0.01} if recipe == "gpt2" else {}
        assert main(flags(recipe, shards, run_dir, micro_batch=micro, max_steps=8, warmup_steps=0, **rate)) == Exit.OK
        curves.append([r["loss"] for r in rows(run_dir, "train")] + [r["val_loss"] for r in rows(run_dir, "val")])
        ends.append(load_file(run_dir / "model.safetensors"))
    for curve, end in zip(curves[1:], ends[1:], strict=True):
        assert curve == pytest.approx(curves[0], rel=2e-5)
        for name in end:
            # AdamW turns even a gradient that is rounding alone, such as a key bias's, into steps of the full rate.
            assert (end[name] - ends[0][name]).norm() <= 1e-2 * ends[0][name].norm() + 1e-6, name
        off = sum(((end[k] - ends[0][k]) ** 2).sum().item() for k in end)
        assert off <= 1e-8 * sum((t**2).sum().item() for t in ends[0].values())
    assert curves[0][7] < curves[0][0] - 0.05


def test_a_run_is_bit_equal_to_its_repetition(shards: Path, tmp_path: Path) -> None:
    for name in "ab":
        assert main(flags("sample", shards, tmp_path / name, max_steps=5)) == Exit.OK
    curves = [[r["loss"] for r in rows(tmp_path / name, "train")] for name in "ab"]
    assert curves[0] == curves[1]
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_run_without_a_name_gets_a_dated_one(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(flags("sample", shards, "", max_steps=1)) == Exit.OK
    (found,) = (tmp_path / "runs").iterdir()
    assert found.name.startswith(f"sample-{time.strftime('%Y')}") and result(found)["exit_reason"] == "finished"


# ------------------------------------------------------------------------------- validation


def test_evaluation_does_not_depend_on_the_batch(shards: Path) -> None:
    cfg = dataclasses.replace(
        RECIPES["gpt2"], n_layer=2, n_head=2, n_embd=32, seq_len=16, vocab_size=VOCAB, padded_vocab=PADDED, precision="fp32"
    )
    model = GPT(cfg)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)
    stream = TokenStream(train_gpt2.find_shards(shards, "val"))
    expected = token_losses(model, read_tokens(shards, "val")[:145]).mean().item()
    for batch in (1, 2, 4, 5, 9, 64):
        assert train_gpt2.evaluate_tokens(model, stream, 144, 16, batch) == pytest.approx(expected, rel=2e-6)
    # Dealt to ranks, the parts add up to the same sum; another rank's rows are left out.
    x = torch.from_numpy(read_tokens(shards, "val")[:145].astype(np.int64))
    nll = model.nll(x[:-1].view(-1, 16), x[1:].view(-1, 16))
    assert nll.double().mean().item() == pytest.approx(expected, rel=1e-6)


# ------------------------------------------------------------------------------- warm-up


def snapshot(trainer: Trainer) -> dict[str, Any]:
    """Everything that training depends on and warm-up could have changed."""
    state = {k: v.clone() for k, v in (trainer.model.state_dict() | trainer.optimizer.state()).items()}
    return {
        "state": state, "rng": torch.get_rng_state(), "numpy": np.random.get_state()[1].copy(),
        "grads": [p.grad is None for p in trainer.model.parameters()], "scaler": trainer.scaler.state_dict(),
        "bad": trainer.bad.clone(), "counters": (trainer.step, trainer.tokens, trainer.train_s, trainer.loader.wait_s),
    }  # fmt: skip


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["state"].keys() == b["state"].keys()
    assert [k for k in a["state"] if not torch.equal(a["state"][k], b["state"][k])] == []
    assert torch.equal(a["rng"], b["rng"]) and (a["numpy"] == b["numpy"]).all()
    for key in ("grads", "scaler", "bad", "counters"):
        assert a[key] == b[key]


@contextlib.contextmanager
def trainer_of(argv: list[str]) -> Iterator[Trainer]:
    trainer = Trainer(parse_args(argv))
    trainer.setup()
    try:
        yield trainer
    finally:
        trainer.checkpoints.close()
        trainer.loader.pool.shutdown()
        trainer.metrics.close()
        trainer.lock.close()


@pytest.mark.parametrize(("recipe", "precision"), [("gpt2", "fp32"), ("sample", "fp32"), ("gpt2", "fp16")])
def test_warm_up_leaves_no_trace(shards: Path, tmp_path: Path, recipe: str, precision: str) -> None:
    argv = flags(recipe, shards, tmp_path / "run", precision=precision, max_steps=3)
    torch.manual_seed(7)
    fresh = GPT(parse_args(argv)).state_dict()
    rng = torch.get_rng_state()
    torch.manual_seed(7)
    with trainer_of(argv) as trainer:
        assert all(torch.equal(v, fresh[k]) for k, v in trainer.model.state_dict().items())
        assert not any(v.any() for v in trainer.optimizer.state().values())
        assert torch.equal(rng, torch.get_rng_state())
        assert trainer.compile_s > 0 and trainer.train_s == 0
        assert trainer.run() == Exit.OK  # and with a state that is not all zeros
        before = snapshot(trainer)
        assert any(v.any() for v in trainer.optimizer.state().values())
        trainer.warm_up()
        assert_same(before, snapshot(trainer))


# ------------------------------------------------------------------------------- numbers that are not finite

STEADY = {"schedule": "constant", "warmup_steps": 0, "epochs": 99, "val_every": 0, "muon_momentum_warmup": 0}


def weights_after(recipe: str, shards: Path, run_dir: Path, steps: int, **changes: Any) -> dict[str, Any]:
    with trainer_of(flags(recipe, shards, run_dir, max_steps=steps, **STEADY, **changes)) as trainer:
        trainer.run()
        return snapshot(trainer)


def poison(trainer: Trainer, step: int, value: float) -> None:
    """From `step` (counted from 1) on, one number of one gradient is not finite."""
    trainer.model.wte.weight.register_hook(
        lambda g: g.index_fill(0, torch.tensor(3), value) if trainer.step == step - 1 and trainer.loader.wait_s else g
    )


@pytest.mark.parametrize("recipe", ["gpt2", "sample"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient_halts_with_the_weights_before_it(shards: Path, tmp_path: Path, recipe: str, value: float) -> None:
    expected = weights_after(recipe, shards, tmp_path / "good", 3)
    with trainer_of(flags(recipe, shards, tmp_path / "bad", max_steps=9, **STEADY)) as trainer:
        poison(trainer, 4, value)
        with pytest.raises(Halt, match=r"gradient norm is (nan|inf) at step 4; the weights are those of step 3") as caught:
            trainer.run()
        assert caught.value.code == Exit.NON_FINITE == 3
        found = snapshot(trainer)
    assert [k for k in expected["state"] if not torch.equal(expected["state"][k], found["state"][k])] == []
    assert len(rows(tmp_path / "bad", "train")) == 3, "the bad step is not a step of the curve"


def test_a_loss_that_is_not_finite_ends_with_code_3_and_one_line(shards: Path, tmp_path: Path, capsys: Capture) -> None:
    """A learning rate beyond all bounds: the first update is finite, the second forward is not."""
    hot = {"lr": 1e30, "embed-lr": 1e30}
    expected = weights_after("gpt2", shards, tmp_path / "one", 1, **hot)
    capsys.readouterr()
    seen: list[Trainer] = []
    original = Trainer.setup

    def setup(self: Trainer) -> None:
        seen.append(self)
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "setup", setup)
        assert main(flags("gpt2", shards, tmp_path / "run", max_steps=9, **STEADY, **hot)) == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "loss is nan at step 2; the weights are those of step 1" in lines[0]
    now = seen[0].model.state_dict()
    assert all(torch.equal(expected["state"][k], v) for k, v in now.items())
    end = result(tmp_path / "run")
    assert (end["exit_reason"], end["exit_code"], end["step"], end["tokens"]) == ("non_finite", 3, 1, 128)
    assert end["weights"] is None and math.isfinite(end["train_loss"])
    json.loads((tmp_path / "run" / "result.json").read_text(), parse_constant=lambda c: pytest.fail(f"{c} in result.json"))


# ------------------------------------------------------------------------------- fp16


def test_fp16_follows_the_fp32_curve(shards: Path, tmp_path: Path) -> None:
    curves = []
    for precision in ("fp32", "fp16", "bf16"):
        argv = flags("sample", shards, tmp_path / precision, precision=precision, max_steps=12)
        assert main(argv) == Exit.OK
        curves.append([r["loss"] for r in rows(tmp_path / precision, "train")])
        norms = [r["grad_norm"] for r in rows(tmp_path / precision, "train")]
        if precision == "fp32":
            reference = norms
        assert norms[:3] == pytest.approx(reference[:3], rel=0.05), "the logged norm still has the scale in it"
    assert curves[1] == pytest.approx(curves[0], rel=5e-3)
    assert curves[2] == pytest.approx(curves[0], rel=4e-2)
    assert curves[0][-1] < curves[0][0] - 0.3


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_fp16_moments_are_those_of_gradients_without_the_scale(shards: Path, tmp_path: Path, clip: float) -> None:
    """AdamW's step hides a constant factor of the gradients; its moments do not, nor does clipping."""
    moments = []
    for precision in ("fp32", "fp16"):
        state = weights_after("gpt2", shards, tmp_path / precision, 2, precision=precision, clip=clip)["state"]
        moments.append({k: v for k, v in state.items() if k.startswith("exp_avg.") and k.endswith("weight")})
    for name, exact in moments[0].items():
        assert (moments[1][name] - exact).norm() < 0.02 * exact.norm(), name


def test_fp16_overflow_skips_one_step_and_lowers_the_scale(shards: Path, tmp_path: Path) -> None:
    expected = weights_after("gpt2", shards, tmp_path / "good", 2, precision="fp16")
    with trainer_of(flags("gpt2", shards, tmp_path / "run", max_steps=3, precision="fp16", **STEADY)) as trainer:
        scale = trainer.scaler.get_scale()
        poison(trainer, 3, math.inf)
        assert trainer.run() == Exit.OK
        found = snapshot(trainer)
        assert trainer.scaler.get_scale() == scale / 2
    assert [k for k in expected["state"] if not torch.equal(expected["state"][k], found["state"][k])] == []
    with trainer_of(flags("gpt2", shards, tmp_path / "on", max_steps=5, precision="fp16", **STEADY)) as trainer:
        poison(trainer, 3, math.inf)
        assert trainer.run() == Exit.OK
        assert not torch.equal(trainer.model.wte.weight, found["state"]["wte.weight"]), "later steps train again"
        assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


# ------------------------------------------------------------------------------- other ends


def when(condition: Callable[[], bool], action: Callable[[], None]) -> threading.Thread:
    def wait() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not condition():
            time.sleep(0.002)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(shards: Path, tmp_path: Path, capsys: Capture, number: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    missed: list[int] = []
    signal.signal(number, lambda n, _: missed.append(n))  # if the trainer does not listen, the test must outlive it
    metrics = run_dir / "metrics.jsonl"
    thread = when(lambda: metrics.exists() and metrics.read_text().count('"train"') >= 3, lambda: os.kill(os.getpid(), number))
    assert main(flags("sample", shards, run_dir, max_steps=20_000, epochs=2_000, val_every=0)) == Exit.STOPPED == 5
    thread.join()
    assert not missed
    end, steps = result(run_dir), rows(run_dir, "train")
    assert (end["exit_reason"], end["exit_code"]) == ("stopped", 5)
    assert 3 <= end["step"] == steps[-1]["step"] == len(steps) < 20_000
    saved = run_dir / "checkpoints" / f"step-{end['step']:06d}"
    assert train_gpt2.verify_checkpoint(saved)["step"] == end["step"]
    assert end["weights_sha256"] == hashlib.sha256((run_dir / "model.safetensors").read_bytes()).hexdigest()
    error = capsys.readouterr().err
    assert "stopped by signal" in error and "--resume" in error and "Traceback" not in error


def test_max_minutes_ends_a_run_well(shards: Path, tmp_path: Path) -> None:
    argv = flags("sample", shards, tmp_path / "run", max_steps=20_000, epochs=2_000, max_minutes=0.3 / 60, val_every=0)
    assert main(argv) == Exit.OK
    end = result(tmp_path / "run")
    assert (end["exit_reason"], end["exit_code"]) == ("max_minutes", 0)
    assert 1 < end["step"] < 20_000 and 0.3 < end["train_seconds"] < 3
    assert rows(tmp_path / "run", "val")[-1]["step"] == end["step"] and end["weights"] == "model.safetensors"


def test_on_finish_runs_once_when_everything_is_written(shards: Path, tmp_path: Path) -> None:
    cases = {("always", 0): 1, ("success", 0): 1, ("failure", 0): 0, ("always", 3): 1, ("success", 3): 0, ("failure", 3): 1}
    for (which, code), times in cases.items():
        run_dir = tmp_path / f"{which}{code}"
        told = tmp_path / f"{which}{code}.txt"
        command = f"cat {run_dir}/result.json > {told}.json && ls {run_dir} > {told}.ls && echo done >> {told}"
        hot = {"lr": 1e30, "embed-lr": 1e30} if code else {}
        argv = flags(
            "gpt2", shards, run_dir, max_steps=3, val_every=0, warmup_steps=0, on_finish=command, on_finish_when=which, **hot
        )
        assert main(argv) == code
        assert (told.read_text().split() if told.exists() else []) == ["done"] * times
        if times:
            assert json.loads(Path(f"{told}.json").read_text())["exit_code"] == code
            assert ("model.safetensors" in Path(f"{told}.ls").read_text()) == (code == 0)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        ("gpt2 --mirror s3://b --on-finish K=secret;ssh_root@host", "gpt2 --mirror s3://b --on-finish (not kept)"),
        ("gpt2 --on-finish=a://x:secret@y --mirror s3://me:secret@b/c", "gpt2 --on-finish=(not kept) --mirror s3://b/c"),
        ("gpt2 --data a//b@c --seed 1", "gpt2 --data a//c --seed 1"),
        ("gpt2 --mirror=s3://b --data c@d", "gpt2 --mirror=s3://b --data c@d"),
    ],
)
def test_no_secret_of_the_command_line_is_written_down(argv: str, shown: str) -> None:
    expected = [word.replace("_", " ") for word in shown.replace("(not kept)", "(not_kept)").split()]
    assert train_gpt2.public_argv(argv.split()) == expected


def test_on_finish_does_not_run_for_a_run_that_never_began(shards: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    assert main(flags("gpt2", tmp_path / "absent", tmp_path / "run", on_finish=f"touch {told}")) == Exit.BAD_INPUT
    assert not told.exists()


# ------------------------------------------------------------------------------- bad input


def tree(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def refused(argv: list[str], folder: Path, capsys: Capture, *said: str) -> str:
    """The command line ends with 2 and one line that says all this, and writes nothing below the folder."""
    before = tree(folder)
    capsys.readouterr()
    assert main(argv) == Exit.BAD_INPUT == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: ") and error.count("\n") == 1 and error.endswith("\n"), error
    for text in said:
        assert text in error
    assert tree(folder) == before
    return error


def broken(tmp_path: Path, name: str, content: bytes) -> Path:
    folder = write_shards(tmp_path / "data")  # whole again, if it was broken before
    (folder / name).write_bytes(content)
    return folder


TRAIN, VAL = "tiny_train_000001.bin", "tiny_val_000000.bin"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (TRAIN, shard_bytes(range(9))[:-2], "header says 9 tokens"),
        (TRAIN, shard_bytes(range(9))[:700], "too few for a shard header"),
        (TRAIN, shard_bytes(range(9), magic=1), "not a token shard"),
        (TRAIN, shard_bytes(range(9), version=3), "shard version 3"),
        (VAL, shard_bytes(range(9))[:-2], "header says 9 tokens"),
        (VAL, shard_bytes(range(9), magic=1), "not a token shard"),
    ],
)
def test_bad_shards_are_refused(tmp_path: Path, capsys: Capture, name: str, content: bytes, said: str) -> None:
    folder = broken(tmp_path, name, content)
    refused(flags("sample", folder, tmp_path / "run"), tmp_path, capsys, str(folder / name), said)


def test_missing_or_insufficient_data_is_refused(shards: Path, tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    refused(flags("sample", tmp_path / "absent", run), tmp_path, capsys, "no *_train_*.bin shards in", "python -m data")
    (tmp_path / "empty").mkdir()
    refused(flags("gpt2", tmp_path / "empty", run), tmp_path, capsys, "python -m data")
    only = write_shards(tmp_path / "only")
    for path in only.glob("*_val_*"):
        path.unlink()
    refused(flags("sample", only, run), tmp_path, capsys, "no *_val_*.bin shards in")
    refused(flags("sample", shards, run, max_steps=14), tmp_path, capsys, "1,737", "--max-steps to 13", "--epochs 2")
    refused(flags("sample", shards, run, val_tokens=160), tmp_path, capsys, "val shards hold 150")
    empty = write_shards(tmp_path / "hollow", train=(0,))
    refused(flags("sample", empty, run), tmp_path, capsys, "no tokens")
    for text in ("{", '{"schema": 1}', '{"schema": 99, "fingerprint": "a"}'):
        (only / "tiny_val_000000.bin").write_bytes(shard_bytes(range(150)))
        (only / "manifest.json").write_text(text)
        refused(flags("sample", only, run), tmp_path, capsys, "manifest.json")


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, capsys: Capture) -> None:
    """Those of the validation before anything is written; those far on in the train shards where they are met."""
    folder = broken(tmp_path, VAL, shard_bytes([1, 2, VOCAB, *range(100)]))
    early = flags("sample", folder, tmp_path / "run", on_finish=f"touch {tmp_path / 'early'}")
    refused(early, tmp_path, capsys, str(folder), f"token id {VOCAB} ", "--vocab-size")
    assert not (tmp_path / "early").exists()
    folder = broken(tmp_path, "tiny_train_000000.bin", shard_bytes([*range(130), 60_000, *range(130)]))
    hook = tmp_path / "hook"
    more = {"max_steps": 5, "on_finish": f"touch {hook}", "on_finish_when": "failure"}
    assert main(flags("sample", folder, tmp_path / "run", **more)) == Exit.BAD_INPUT
    assert hook.exists(), "a rented machine must get its --on-finish once training has begun"
    left = result(tmp_path / "run")
    assert (left["exit_code"], left["exit_reason"], left["step"]) == (2, "bad_input", 1)
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and "token id 60000 " in error[0] and len(rows(tmp_path / "run", "train")) == 1


# Each with a word of the line that must be in it.
BAD_FLAGS: list[tuple[dict[str, Any], str]] = [
    ({"micro_batch": 3}, "micro-batch"),
    ({"batch_tokens": 100}, "batch-tokens"),
    ({"micro_batch": 0}, "micro-batch"),
    ({"max_steps": 0}, "max-steps"),
    ({"max_steps": "many"}, "max-steps"),
    ({"max_steps": "1e3"}, "max-steps"),
    ({"n_head": 3}, "n-head"),
    ({"vocab_size": 300}, "vocab-size"),
    ({"val_tokens": 100}, "val-tokens"),
    ({"val_tokens": 0}, "val-tokens"),
    ({"val_every": -1}, "val-every"),
    ({"value_embeds": 2}, "value-embeds"),
    ({"value_embeds": -1}, "value-embeds"),
    ({"checkpoint_every": "often"}, "checkpoint-every"),
    ({"checkpoint_every": "-5"}, "checkpoint-every"),
    ({"checkpoint_every": "nanm"}, "checkpoint-every"),
    ({"keep": 1}, "keep"),
    ({"optimizer": "sgd"}, "optimizer"),
    ({"precision": "fp64"}, "precision"),
    ({"bias": "maybe"}, "bias"),
    ({"lr": -1}, "lr"),
    ({"lr": "nan"}, "lr"),
    ({"muon_lr": "inf"}, "muon-lr"),
    ({"beta1": 1.0}, "beta1"),
    ({"beta2": -0.1}, "beta2"),
    ({"muon_momentum": 1.5}, "muon-momentum"),
    ({"muon_beta2": 1}, "muon-beta2"),
    ({"warmup_steps": -1}, "warmup-steps"),
    ({"warmdown_frac": 1.5}, "warmdown-frac"),
    ({"final_lr_frac": -0.5}, "final-lr-frac"),
    ({"softcap": -15}, "softcap"),
    ({"softcap": 100}, "softcap"),
    ({"clip": -1}, "clip"),
    ({"threads": -2}, "threads"),
    ({"max_minutes": -1}, "max-minutes"),
    ({"mtbf_hours": 0}, "mtbf-hours"),
    ({"comm_timeout": 0}, "comm-timeout"),
    ({"spike_window": 0}, "spike-window"),
    ({"attn_gate": True, "n_embd": 8}, "n-embd"),
    ({"attention": "cudnn"}, "attention"),
    ({"max_step": 5}, "max-step"),
    ({"learning_rate": 5}, "learning-rate"),
    ({"resume": "newest"}, "resume"),
    ({"resume": "7"}, "resume"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), BAD_FLAGS, ids=[" ".join(f"{k}={v}" for k, v in c.items()) for c, _ in BAD_FLAGS])
def test_bad_flags_are_refused_by_name(shards: Path, tmp_path: Path, capsys: Capture, changes: dict[str, Any], said: str) -> None:
    refused(flags("sample", shards, tmp_path / "run", **changes), tmp_path, capsys, f"--{said}")


def test_unknown_recipes_are_refused(shards: Path, tmp_path: Path, capsys: Capture) -> None:
    refused(["gpt3"], tmp_path, capsys, "gpt3", "speedrun")
    refused([], tmp_path, capsys, "recipe")
    refused(["sample", "gpt2"], tmp_path, capsys, "gpt2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(shards: Path, tmp_path: Path, capsys: Capture) -> None:
    refused(flags("sample", shards, tmp_path / "run", device="cuda"), tmp_path, capsys, "no CUDA device")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_more_ranks_than_gpus_are_refused_on_every_rank(
    shards: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Also on the ranks that have a GPU: else rank 0 would wait for the others and say nothing. Two GPUs, three ranks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for key, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(key, str(value))
    argv = flags("sample", shards, tmp_path / "run", device="auto")
    if rank == 0:
        refused(argv, tmp_path, capsys, "3 processes were started for 2 GPUs", "--nproc_per_node")
    else:
        assert main(argv) == Exit.BAD_INPUT
        assert capsys.readouterr().err == ""


def test_a_run_directory_in_use_is_refused(shards: Path, finished: Path, tmp_path: Path, capsys: Capture) -> None:
    before = {p.name: p.read_bytes() for p in finished.iterdir() if p.is_file()}
    refused(flags("sample", shards, finished), finished, capsys, str(finished), "--resume", "--run-dir")
    assert {p.name: p.read_bytes() for p in finished.iterdir() if p.is_file()} == before
    (tmp_path / "file").write_text("x")
    refused(flags("sample", shards, tmp_path / "file"), tmp_path, capsys, str(tmp_path / "file"))
    refused(flags("sample", shards, tmp_path / "file" / "below"), tmp_path, capsys, str(tmp_path / "file"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with these options; needs the right to mount."""
    mounts: list[Path] = []

    def mount(options: str) -> Path:
        at = tmp_path / f"disk{len(mounts)}"
        at.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("mounting a file system is not allowed here")
        mounts.append(at)
        return at

    yield mount
    for at in mounts:
        subprocess.run(["umount", "-l", str(at)], check=True)


def test_a_full_disk_at_the_start_is_refused(shards: Path, capsys: Capture, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=1m")
    refused(flags("sample", shards, disk / "run"), disk, capsys, str(disk), "GB free", "needs")
    refused(flags("sample", shards, disk / "a" / "b"), disk, capsys, str(disk), "GB free")
    no_inodes = small_disk("size=64m,nr_inodes=1")
    refused(flags("sample", shards, no_inodes / "run"), no_inodes, capsys, str(no_inodes), "No space left")
    few = small_disk("size=64m,nr_inodes=4")  # the folder fits, its files do not
    refused(flags("sample", shards, few / "run"), few, capsys, str(few), "No space left")


def test_a_full_disk_at_the_last_weights_is_an_error_of_the_disk(small_disk: Callable[[str], Path]) -> None:
    """safetensors has an exception of its own for it, which is no OSError."""
    cfg = parse_args(["gpt2", "--n-layer", "1", "--n-embd", "64", "--n-head", "2"])
    at = small_disk("size=1m")
    with pytest.raises(OSError) as caught:
        train_gpt2.save_weights(GPT(cfg), cfg, at / "model.safetensors")
    assert caught.value.errno == errno.ENOSPC and not list(at.iterdir())


def test_a_compile_mode_without_compilation_is_refused(shards: Path, tmp_path: Path, capsys: Capture) -> None:
    argv = flags("gpt2", shards, tmp_path / "run", compile="off", compile_mode="max-autotune-no-cudagraphs")
    assert main(argv) == Exit.BAD_INPUT and not (tmp_path / "run").exists()
    assert "nothing is compiled here" in capsys.readouterr().err


# ------------------------------------------------------------------------------- command line


def test_help_is_readable_and_names_every_field(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: train_gpt2.py") and "torchrun" in text
    for f in dataclasses.fields(Config):
        assert f.metadata["help"]
        if f.name != "recipe":
            assert f"--{f.name.replace('_', '-')}" in text
    assert max(map(len, text.splitlines())) <= 130


def test_every_field_is_a_flag_of_its_type() -> None:
    cfg = parse_args(["gpt2", "--n-layer=3", "--softcap", "15", "--bias=false", "--qk-norm", "--data", "x", "--compile=off"])
    expected = dataclasses.replace(RECIPES["gpt2"], n_layer=3, softcap=15.0, bias=False, qk_norm=True, data="x", compile="off")
    assert cfg == expected and isinstance(cfg.softcap, float)
    assert parse_args(["gpt2", "--resume"]).resume == "newest"
    for recipe, preset in RECIPES.items():
        assert parse_args([recipe]) == preset and preset.recipe == recipe


def test_learning_hash_follows_what_is_learned_alone() -> None:
    cfg = RECIPES["gpt2"]
    for change in ({"run_dir": "x"}, {"seed": 2}, {"micro_batch": 1}, {"parallel": "ddp"}, {"device": "cpu"}, {"keep": 5}):
        assert train_gpt2.learning_hash(dataclasses.replace(cfg, **change)) == train_gpt2.learning_hash(cfg)
        assert train_gpt2.config_hash(dataclasses.replace(cfg, **change)) != train_gpt2.config_hash(cfg)
    for change in ({"lr": 1.0}, {"n_layer": 3}, {"max_steps": 5}, {"batch_tokens": 1024}, {"schedule": "linear"}):
        assert train_gpt2.learning_hash(dataclasses.replace(cfg, **change)) != train_gpt2.learning_hash(cfg)


IMPORT_PROBE = """
import os, signal, sys, threading
import torch

def state():
    switches = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    return dict(os.environ), threading.active_count(), handlers, torch.get_rng_state().tolist(), switches, sorted(os.listdir())

before = state()
import train_gpt2
assert before == state(), (before, state())
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
loaded = {m.split(".")[0] for m in sys.modules}
assert not loaded & {"data", "eval", "harness", "wandb", "transformers", "datasets", "fsspec", "matplotlib"}, loaded
print("clean")
"""


def test_importing_has_no_side_effects(tmp_path: Path, python: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([python, "-c", IMPORT_PROBE], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("clean\n", "", 0)
    assert tree(tmp_path) == []


def test_the_script_ends_a_bad_command_line_with_one_line(shards: Path, tmp_path: Path) -> None:
    """The real process: its exit code, and nothing else on stderr, such as a warning of a library."""
    argv = flags("sample", shards, tmp_path / "run", micro_batch=3)
    done = subprocess.run([sys.executable, str(SCRIPT), *argv], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --batch-tokens 128 ") and done.stderr.count("\n") == 1
    assert tree(tmp_path) == []
