"""What only a CUDA device can show: its kernels, compiled blocks, fp8, memory, and collectives between devices.

Run by `make test-gpu`. Everything is compared with float64 or with the same run on the CPU.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from train_support import flags, result, rows, write_shards

import train_gpt2
from train_gpt2 import GPT, RECIPES, Config, Exit, HeadLoss, Optimizer, Trainer, main, parse_args

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# Head widths of 64 and rows of 128 positions, so that every attention backend can take them.
SIZES = {
    "n_layer": 4, "n_head": 2, "n_embd": 128, "seq_len": 128, "batch_tokens": 2048, "micro_batch": 8, "val_batch": 4,
    "val_tokens": 1024, "max_steps": 12, "val_every": 0, "device": "cuda", "precision": "bf16", "compile": "off", "epochs": 9,
}  # fmt: skip
FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
NEEDS_FP8 = pytest.mark.skipif(not FP8, reason="no fp8")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("gpu"), train=(20_000, 777, 9_000), val=(1_500,))


@pytest.fixture(autouse=True)
def _free() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def command(recipe: str, data: Path, run_dir: Path, **changes: Any) -> list[str]:
    small = {"value_embeds": 1, "head_precision": "same"} if recipe == "speedrun" else {}
    return flags(recipe, data, run_dir, **{**SIZES, **small, **changes})


def losses(run_dir: Path) -> list[float]:
    return [r["loss"] for r in rows(run_dir, "train")]


# ------------------------------------------------------------------------------- kernels


def reference(z: Tensor, targets: Tensor, vocab: int, cap: float) -> tuple[Tensor, Tensor]:
    """Token losses and the gradient of their sum with respect to z, in float64."""
    z64 = z.double().requires_grad_()
    real = z64[:, :vocab]
    nll = F.cross_entropy(cap * torch.tanh(real / cap) if cap else real, targets, ignore_index=-1, reduction="none")
    (grad,) = torch.autograd.grad(nll.sum(), z64)
    return nll.detach(), grad


@pytest.mark.parametrize("cap", [0.0, 15.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_kernel_equals_float64(dtype: torch.dtype, cap: float) -> None:
    """Validation (no gradient) is exact to fp32; training may use the device's tanh, good to 2^-10 of the softcap."""
    generator = torch.Generator("cuda").manual_seed(0)
    z = (6 * torch.randn(65, 50304, device="cuda", generator=generator)).to(dtype)
    z[:, 50257:] = 80  # padded ids would dominate if they counted
    targets = torch.randint(50257, (65,), device="cuda", generator=generator)
    targets[:3] = torch.tensor([50256, 0, 4095], device="cuda")
    targets[5::9] = -1
    nll, grad = reference(z, targets, 50257, cap)
    kept = z.clone()
    got = train_gpt2.cross_entropy_(kept, targets, 50257, cap, grad=False)
    assert torch.equal(kept, z)
    torch.testing.assert_close(got.double(), nll, rtol=2e-5, atol=2e-5)
    got = train_gpt2.cross_entropy_(kept, targets, 50257, cap, grad=True)
    torch.testing.assert_close(got.double(), nll, rtol=0, atol=cap * 2**-9 + 2e-5)
    size = 1 if dtype == torch.float32 else 2
    torch.testing.assert_close(kept.double(), grad, rtol=0.06 if cap else 2**-8 * size, atol=2e-3 if cap else 1e-5)
    assert not kept[:, 50257:].any() and not kept[targets < 0].any() and not got[targets < 0].any()


@pytest.mark.parametrize("precision", ["same", *(pytest.param(p, marks=NEEDS_FP8) for p in ("fp8", "fp8-rows", "fp8-all"))])
@pytest.mark.parametrize("cap", [0.0, 15.0])
def test_head_loss_on_the_device_equals_float64(cap: float, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16: 8 bits of mantissa. fp8: 3 bits for inputs and 2 for gradients, so directions and norms only. Three chunks."""
    monkeypatch.setitem(train_gpt2.HEAD_CHUNK, "cuda", 192)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(512, 128, device="cuda", generator=generator).bfloat16()
    w = (torch.randn(50304, 128, device="cuda", generator=generator) * 0.2).bfloat16().float()
    targets = torch.randint(50257, (512,), device="cuda", generator=generator)
    targets[::11] = -1
    x64, w64 = x.double().requires_grad_(), w.double().requires_grad_()
    z = x64 @ w64[:50257].T
    want = F.cross_entropy(cap * torch.tanh(z / cap) if cap else z, targets, ignore_index=-1, reduction="sum")
    dx, dw = torch.autograd.grad(want, (x64, w64))
    xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
    loss = HeadLoss.apply(xs, ws, targets, 50257, cap, precision)
    loss.backward()
    fp8 = precision != "same"
    assert loss.item() == pytest.approx(want.item(), rel=1e-2 if fp8 else 1e-3)
    for got, exact in ((xs.grad, dx), (ws.grad, dw)):
        assert got is not None
        off = ((got.double() - exact).norm() / exact.norm()).item()
        assert off < (0.15 if fp8 else 0.01), off
    assert not ws.grad[50257:].any() and not xs.grad[targets < 0].any()  # type: ignore[index]


@pytest.mark.skipif(not HOPPER, reason="the fused MLP is for Hopper")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_fused_mlp_equals_float64(compiled: bool) -> None:
    """Output and gradients to bf16's rounding, no further from float64 than the plain form; more tiles than processors."""
    cfg = dataclasses.replace(RECIPES["speedrun"], n_embd=512, n_head=4)
    generator = torch.Generator("cuda").manual_seed(0)
    mlp = train_gpt2.MLP(cfg).cuda()
    with torch.no_grad():
        for p in mlp.parameters():
            p.normal_(std=0.05, generator=generator)
    x = torch.randn(2, 9600, 512, device="cuda", generator=generator).bfloat16()
    assert train_gpt2.fuses_mlp(cfg, x) and not train_gpt2.fuses_mlp(cfg, x[:, :9599])
    assert not train_gpt2.fuses_mlp(dataclasses.replace(cfg, fused_mlp="off"), x)
    dy = torch.randn(x.shape, device="cuda", generator=generator).bfloat16()
    x64 = x.double().requires_grad_()
    weights = [p.detach().bfloat16().double().requires_grad_() for p in (mlp.fc.weight, mlp.proj.weight)]
    y64 = F.relu(x64 @ weights[0].T).square() @ weights[1].T
    exact = [y64, *torch.autograd.grad(y64, (x64, *weights), dy.double())]
    forward = torch.compile(mlp.forward, fullgraph=True, dynamic=False) if compiled else mlp.forward
    off = {}
    for fused in (True, False):
        xs = x.clone().requires_grad_()
        y = forward(xs, fused)
        got = [y, *torch.autograd.grad(y, (xs, mlp.fc.weight, mlp.proj.weight), dy)]
        off[fused] = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True)]
    assert all(a < 0.01 and a < 1.2 * b for a, b in zip(off[True], off[False], strict=True)), off


@pytest.mark.parametrize("shape", [(3, 128, 128), (2, 512, 128), (2, 128, 512)])
def test_orthogonalization_in_bf16_against_svd(shape: tuple[int, int, int]) -> None:
    """The float64 band [0.846, 1.124] of singular values from 1e-3 of the norm, widened by bf16 through five products."""
    g = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    out = train_gpt2.orthogonalize(g).double()
    for one, result_ in zip(g.double(), out, strict=True):
        u, s, vt = torch.linalg.svd(one, full_matrices=False)
        promised = int((s >= 1e-3 * one.norm()).sum())
        singular = torch.linalg.svdvals(result_)
        assert promised >= len(s) - 2 and singular[promised - 1] > 0.75 and singular.max() < 1.2
        assert (result_ * (u @ vt)).sum() / (result_.norm() * (u @ vt).norm()) > 0.99


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["gpt2", "speedrun"])
def test_a_skipped_step_changes_no_bit(recipe: str, compiled: bool) -> None:
    cfg = parse_args(command(recipe, Path("x"), Path("y")))
    model = GPT(cfg).cuda()
    optimizer = Optimizer(model, cfg, 0, 1, compiled=compiled)
    generator = torch.Generator("cuda").manual_seed(0)

    def gradients(poison: float) -> None:
        for p in model.parameters():
            p.grad = torch.randn(p.shape, device="cuda", generator=generator)
            p.grad.view(-1)[0] += poison

    def everything() -> dict[str, Tensor]:
        return {k: v.clone() for k, v in (model.state_dict() | optimizer.state()).items()}

    no, yes = (torch.tensor(v, device="cuda") for v in (False, True))
    gradients(0.0)
    optimizer.step(1.0, 0.9, None, no)
    before = everything()
    for poison in (0.0, math.nan, math.inf):
        gradients(poison)
        optimizer.step(1.0, 0.9, torch.tensor(0.5, device="cuda"), yes)
    after = everything()
    assert [k for k in before if not torch.equal(before[k], after[k])] == []
    gradients(0.0)
    optimizer.step(1.0, 0.9, None, no)
    assert not torch.equal(everything()["wte.weight"], before["wte.weight"])


# ------------------------------------------------------------------------------- model


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient", "math"])
@pytest.mark.parametrize("recipe", ["gpt2", "speedrun"])
def test_every_backend_is_causal_and_near_the_cpu(recipe: str, backend: str) -> None:
    cfg = parse_args(command(recipe, Path("x"), Path("y"), attention=backend))
    model = GPT(cfg)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * (0.3 if p.ndim < 2 else p.shape[-1] ** -0.5))
    exact = GPT(dataclasses.replace(cfg, precision="fp32"))
    exact.load_state_dict(model.state_dict())
    idx = torch.randint(cfg.vocab_size, (2, 128), generator=generator)
    train_gpt2.choose_attention(dataclasses.replace(exact.cfg, attention="math"), torch.device("cpu"))
    want, model = exact.logits(idx), model.cuda()
    try:
        train_gpt2.choose_attention(cfg, torch.device("cuda", 0))
    except train_gpt2.UserError as e:
        pytest.skip(str(e))
    before = model.logits(idx.cuda())
    assert ((before.cpu() - want).norm() / want.norm()) < 0.1  # bf16 through four layers
    for t in (1, 64, 127):
        changed = idx.clone()
        changed[:, t:] = (changed[:, t:] + 7) % cfg.vocab_size
        after = model.logits(changed.cuda())
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-2)
        assert (after[:, t] - before[:, t]).abs().max() > 0.1


# ------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun"])
def test_a_run_on_the_device_follows_the_one_on_the_cpu(data: Path, tmp_path: Path, recipe: str) -> None:
    fast = {"lr": 0.01, "embed_lr": 0.01, "warmup_steps": 2} if recipe == "gpt2" else {}
    assert main(command(recipe, data, tmp_path / "cpu", device="cpu", precision="fp32", **fast)) == Exit.OK
    assert main(command(recipe, data, tmp_path / "gpu", **fast)) == Exit.OK
    assert main(command(recipe, data, tmp_path / "fp32", precision="fp32", **fast)) == Exit.OK
    want = losses(tmp_path / "cpu")
    assert want[-1] < want[0] - 0.1
    assert losses(tmp_path / "fp32") == pytest.approx(want, rel=3e-2)  # Muon in bf16
    assert losses(tmp_path / "gpu") == pytest.approx(want, rel=5e-2)
    env = json.loads((tmp_path / "gpu" / "env.json").read_text())
    assert env["gpus"] and env["driver"] and "attention" in env["attention_backend"]
    end = result(tmp_path / "gpu")
    assert end["peak_mem_bytes"] > 4 * end["params"] and (end["mfu"] is None or 0 < end["mfu"] < 1)


def test_compiled_blocks_give_the_same_curve_and_compile_only_before_training(data: Path, tmp_path: Path) -> None:
    assert main(command("speedrun", data, tmp_path / "plain")) == Exit.OK
    trainer = Trainer(parse_args(command("speedrun", data, tmp_path / "compiled", compile="on", val_every=4)))
    trainer.setup()
    counters = torch._dynamo.utils.counters["stats"]
    fresh = GPT(trainer.cfg).state_dict()
    assert all(torch.equal(v.cpu(), fresh[k]) for k, v in trainer.model.state_dict().items()), "warm-up left a trace"
    assert not any(v.any() for v in trainer.optimizer.state().values())
    graphs = counters["unique_graphs"]
    assert graphs > 0
    assert trainer.run() == Exit.OK
    assert counters["unique_graphs"] == graphs, "something was compiled while training"
    trainer.checkpoints.close()
    trainer.finish(Exit.OK, "finished")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=2e-2)


@NEEDS_FP8
def test_the_fp8_head_follows_the_bf16_one(data: Path, tmp_path: Path) -> None:
    for head in ("same", "fp8", "fp8-rows", "fp8-all"):
        assert main(command("speedrun", data, tmp_path / head, head_precision=head)) == Exit.OK
    odd = {"seq_len": 120, "micro_batch": 1, "batch_tokens": 240, "val_tokens": 960}  # 120 tokens: the backward stays in bf16
    assert main(command("speedrun", data, tmp_path / "odd", head_precision="fp8-all", **odd)) == Exit.OK
    same, *others = (losses(tmp_path / head) for head in ("same", "fp8", "fp8-rows", "fp8-all"))
    assert all(other == pytest.approx(same, rel=5e-2) for other in others)
    assert len({tuple(curve) for curve in (same, *others)}) == 4


def test_deterministic_runs_are_bit_equal(data: Path, tmp_path: Path) -> None:
    for name in "ab":
        assert main(command("speedrun", data, tmp_path / name, deterministic=True)) == Exit.OK
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("room", [True, False])
def test_a_checkpoint_is_the_state_of_its_step(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool) -> None:
    """With room for a snapshot on the device, and without: then the next update has to wait for the copy to the host."""
    if not room:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 0))
    argv = command("speedrun", data, tmp_path / "run", deterministic=True, checkpoint_every=3, max_steps=9)
    assert main(argv) == Exit.OK
    first = losses(tmp_path / "run")
    assert main([*argv, "--resume", "6"]) == Exit.OK
    torch.use_deterministic_algorithms(False)
    assert len(first) == 9 and losses(tmp_path / "run")[9:] == first[6:]


def test_a_bad_gradient_ends_with_code_3_and_the_weights_before_it(data: Path, tmp_path: Path) -> None:
    """The host learns of it a step later; by then no further update may have been made."""
    steady = {"schedule": "constant", "muon_momentum_warmup": 0}
    good = Trainer(parse_args(command("speedrun", data, tmp_path / "good", max_steps=3, deterministic=True, **steady)))
    good.setup()
    good.run()
    bad = Trainer(parse_args(command("speedrun", data, tmp_path / "bad", deterministic=True, **steady)))
    bad.setup()
    bad.model.wte.weight.register_hook(lambda g: g * math.nan if bad.step == 3 else g)
    with pytest.raises(train_gpt2.Halt, match="at step 4; the weights are those of step 3") as caught:
        bad.run()
    torch.use_deterministic_algorithms(False)
    assert caught.value.code == Exit.NON_FINITE and bad.step == 3
    for key, value in good.model.state_dict().items():
        assert torch.equal(value, bad.model.state_dict()[key]), key


def test_out_of_memory_ends_with_code_4_and_a_size_to_try(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, 1.5 * 2**30 / total))
    try:
        huge = {"micro_batch": 2048, "batch_tokens": 2048 * 128, "vocab_size": 50257, "padded_vocab": 50304, "max_steps": 1}
        assert main(command("gpt2", data, tmp_path / "run", epochs=99, **huge)) == Exit.OUT_OF_MEMORY == 4
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "--micro-batch" in said[0]
    assert (tmp_path / "run" / "out_of_memory.txt").stat().st_size
    assert result(tmp_path / "run")["exit_reason"] == "out_of_memory"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("recipe", ["gpt2", "speedrun"])
def test_two_devices_give_the_curve_of_one(data: Path, tmp_path: Path, recipe: str) -> None:
    exact = {"precision": "fp32", "micro_batch": 4, "attention": "math"}
    assert main(command(recipe, data, tmp_path / "one", **exact)) == Exit.OK
    for mode in ("ddp", "owner", "zero1"):
        argv = command(recipe, data, tmp_path / mode, parallel=mode, **exact)
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", train_gpt2.__file__]
        done = subprocess.run([*start, *argv], env={**os.environ, "OMP_NUM_THREADS": "2"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        assert losses(tmp_path / mode) == pytest.approx(losses(tmp_path / "one"), rel=5e-3)  # Muon in bf16


def test_more_processes_than_devices_are_refused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = torch.cuda.device_count() + 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
    with pytest.raises(train_gpt2.UserError, match=f"{count} processes were started for {count - 1} GPUs"):
        train_gpt2.setup_distributed(Config(device="cuda"))
    assert RECIPES["gpt2"].device == "auto"
