"""Scaling candidates of the trainer against the control: the same losses to what their arithmetic allows."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_jobs import RECIPE, run

import train_gpt2
from train_gpt2 import COMPUTE_DTYPE, GPT, RECIPES, Config, choose_attention, recomputing, selective_contexts

# --- recomputation -----------------------------------------------------------------------------------------

LAYERS = 3


class Calls(TorchDispatchMode):
    """Counts operators below autograd, which is where a recomputation shows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        self.seen[name] = self.seen.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    def attention(self) -> int:
        """Attention forwards: fused ones by name, the math one by its softmax."""
        fused = sum(
            n for name, n in self.seen.items() if name.startswith("_scaled_dot_product") and not name.endswith("backward")
        )
        return fused or self.seen.get("_safe_softmax", 0) + self.seen.get("_softmax", 0)


def tiny(recipe: str, backend: str, how: str, **more: Any) -> Config:
    sizes = {
        "n_layer": LAYERS,
        "n_head": 2,
        "n_embd": 64,
        "seq_len": 64,
        "vocab_size": 200,
        "padded_vocab": 256,
        "value_embeds": 0,
    }
    changes = {**sizes, "zero_init": False, "precision": "fp32", "head_precision": "same", "attention": backend, "recompute": how}
    return dataclasses.replace(RECIPES[recipe], **(changes | more))


def passes(cfg: Config, device: str) -> tuple[Calls, float, torch.Tensor]:
    """Operators, loss and gradients of one forward and backward."""
    choose_attention(cfg, torch.device(device))
    model = GPT(cfg).to(device)
    for block in model.blocks:
        if cfg.recompute != "off":
            block.forward = recomputing(block.forward, cfg.recompute)  # type: ignore[method-assign]
    x = torch.randint(200, (2, 64), generator=torch.Generator().manual_seed(1)).to(device)
    with Calls() as calls:
        loss = model(x, x)
        loss.backward()
    return calls, loss.item(), torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("backend", ["flash", "math"])
@pytest.mark.parametrize("recipe", ["sample", "gpt2"])  # five products a block, an odd number, and four
def test_selective_recomputation_never_computes_attention_again(recipe: str, backend: str):
    plain, loss, gradients = passes(tiny(recipe, backend, "off"), "cpu")
    assert plain.attention() == LAYERS
    for how, attentions in (("selective", LAYERS), ("block", 2 * LAYERS)):
        calls, same, again = passes(tiny(recipe, backend, how), "cpu")
        assert calls.attention() == attentions
        products, before = (sum(c.seen.get(k, 0) for k in ("mm", "addmm")) for c in (calls, plain))
        assert products > before, "something else is computed again"
        assert same == loss and torch.equal(again, gradients), "the same operations on the same numbers"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient", "math"])
def test_selective_recomputation_never_computes_attention_again_on_cuda(backend: str):
    more = {"precision": "bf16", "n_embd": 128}
    plain, loss, gradients = passes(tiny("sample", backend, "off", **more), "cuda")
    for how, attentions in (("selective", LAYERS), ("block", 2 * LAYERS)):
        calls, same, again = passes(tiny("sample", backend, how, **more), "cuda")
        assert calls.attention() == attentions and plain.attention() == LAYERS
        assert same == pytest.approx(loss, rel=1e-5)
        assert (again - gradients).norm() < 0.01 * gradients.norm()  # attention's backward adds in any order


def test_every_attention_is_in_the_list_of_what_is_kept():
    """Also those whose device is not here; torch's own list of intensive operators lacks cuDNN's and the CPU's."""
    from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

    names = "flash_attention efficient_attention cudnn_attention fused_attention_overrideable flash_attention_for_cpu"
    operators = [getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in names.split()]
    operators += [torch.ops.aten.bmm.default, torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default]
    saving, _ = selective_contexts()
    ask = SelectiveCheckpointContext(is_recompute=False)
    assert all(
        saving.policy_fn(ask, op) == CheckpointPolicy.MUST_SAVE for op in [*operators, torch.ops.higher_order.flex_attention]
    )
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    assert saving.policy_fn(ask, backward) != CheckpointPolicy.MUST_SAVE
    # Every second product, counted apart for the forward pass and for the recomputation.
    mm, again = torch.ops.aten.mm.default, SelectiveCheckpointContext(is_recompute=True)
    kept = [saving.policy_fn(c, mm) == CheckpointPolicy.MUST_SAVE for c in (ask, again, ask, again, ask, again)]
    assert kept == [True, True, False, False, True, True]


def activation_bytes(cfg: Config, tmp_path: Path) -> int:
    """Bytes that a forward pass leaves allocated, by the profiler's record of every allocation."""
    choose_attention(cfg, torch.device("cpu"))
    model = GPT(cfg)
    for block in model.blocks:
        if cfg.recompute != "off":
            block.forward = recomputing(block.forward, cfg.recompute)  # type: ignore[method-assign]
    x = torch.randint(200, (4, 64))
    gc.collect()  # else what earlier tests left is freed within the record
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        loss = model(x, x)
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    del loss
    return sum(int(e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")


def test_recomputation_saves_the_memory_it_promises(tmp_path: Path):
    held = {how: activation_bytes(tiny("gpt2", "flash", how), tmp_path) for how in ("off", "selective", "block")}
    assert held["off"] > 1.3 * held["selective"] > 1.3 * held["block"]
    # A block that is made again keeps its input: N * C floats, beside what lies outside the blocks.
    outside = activation_bytes(dataclasses.replace(tiny("gpt2", "flash", "block"), n_layer=1), tmp_path)
    one = 4 * 4 * 64 * 64
    assert (held["block"] - outside) / (LAYERS - 1) == pytest.approx(one, rel=0.6)


# --- ranks -------------------------------------------------------------------------------------------------


def losses(run_dir: Path) -> dict[str, list[float]]:
    """Train and val losses and gradient norms by step, later lines first."""
    rows = {(r["kind"], r["step"]): r for r in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())}
    ordered = [rows[key] for key in sorted(rows)]
    train = [r for r in ordered if r["kind"] == "train"]
    return {
        "train": [r["loss"] for r in train],
        "norm": [r["grad_norm"] for r in train],
        "val": [r["val_loss"] for r in ordered if r["kind"] == "val"],
    }


def train(tmp_path: Path, shards: Path, name: str, *flags: str, recipe: str = "muon", world: int = 2) -> Path:
    """A tiny training with accumulation and a checkpoint at step 3."""
    argv = [*RECIPE[recipe], "--data", str(shards), "--run-dir", str(tmp_path / name), "--max-steps", "6", "--micro-batch", "2"]
    run([*argv, "--checkpoint-every", "3", "--epochs", "2", *flags], world)
    return tmp_path / name


def assert_same(found: Path, expected: Path, tolerance: float) -> None:
    a, b = losses(found), losses(expected)
    for key in a:
        assert a[key] == pytest.approx(b[key], rel=tolerance), key
        assert len(a[key]) == len(b[key]) > 1


# fp32: sums over ranks in another order.
FLOAT = 1e-5


def test_fsdp_is_the_control_and_its_checkpoint_goes_on_without_it(tmp_path: Path, shards: Path):
    control = train(tmp_path, shards, "owner")
    sharded = train(tmp_path, shards, "fsdp2", "--parallel", "fsdp2", "--recompute", "selective")
    assert_same(sharded, control, FLOAT)
    # From its step 3 on as one unsharded rank, which reads the same layout.
    later = sharded / "checkpoints" / "step-000006"
    later.rename(sharded / "checkpoints" / "put-away")
    (sharded / "metrics.jsonl").write_text("")
    train(tmp_path, shards, "fsdp2", "--resume", "newest", world=1)
    a, b = losses(sharded), losses(control)
    assert len(a["train"]) == 3 and a["train"] == pytest.approx(b["train"][3:], rel=FLOAT)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["muon", "adamw"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_way_to_shard_is_the_control(tmp_path: Path, shards: Path, world: int, recipe: str):
    control = train(tmp_path, shards, "control", recipe=recipe, world=1)
    for parallel in ("ddp", "owner", "zero1", "fsdp2", "fsdp3"):
        found = train(tmp_path, shards, parallel, "--parallel", parallel, recipe=recipe, world=world)
        assert_same(found, control, FLOAT * 10)


@pytest.mark.full
def test_fsdp_goes_on_from_any_other_mode(tmp_path: Path, shards: Path):
    control = train(tmp_path, shards, "owner")
    (control / "checkpoints" / "step-000006").rename(control / "checkpoints" / "put-away")
    whole = losses(control)
    for parallel, world in (("fsdp2", 2), ("fsdp3", 4), ("fsdp2", 1)):
        (control / "metrics.jsonl").write_text("")
        train(tmp_path, shards, "owner", "--parallel", parallel, "--resume", "3", world=world)
        assert losses(control)["train"] == pytest.approx(whole["train"][3:], rel=FLOAT * 10)
        for extra in (control / "checkpoints").glob("step-000006"):
            extra.rename(extra.with_name(f"put-away-{parallel}-{world}"))


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["owner", "zero1", "fsdp2"])
def test_reduction_in_bf16_stays_within_bf16(tmp_path: Path, shards: Path, parallel: str):
    wide = ("--n-embd", "128", "--padded-vocab", "1024", "--parallel", parallel)  # parameters large enough to go alone
    control = train(tmp_path, shards, "fp32", *wide)
    found = train(tmp_path, shards, "bf16", *wide, "--reduce-precision", "bf16")
    assert_same(found, control, 2**-8)
    assert losses(found)["train"] != losses(control)["train"], "the flag must do something"


@pytest.mark.full
def test_fsdp_in_bf16_stays_within_bf16(tmp_path: Path, shards: Path):
    control = train(tmp_path, shards, "owner", "--precision", "bf16")
    for parallel in ("fsdp2", "fsdp3"):
        assert_same(train(tmp_path, shards, parallel, "--precision", "bf16", "--parallel", parallel), control, 2**-6)


@pytest.mark.full
def test_recomputation_under_compile(tmp_path: Path, shards: Path):
    control = train(tmp_path, shards, "off", "--compile", "on", world=1)
    for how in ("selective", "block"):
        assert_same(train(tmp_path, shards, how, "--compile", "on", "--recompute", how, world=1), control, FLOAT * 10)


def test_bf16_reduction_is_refused_where_it_would_do_nothing():
    from train_gpt2 import UserError, parse_args

    with pytest.raises(UserError, match="--reduce-precision bf16"):
        parse_args(["speedrun", "--reduce-precision", "bf16", "--parallel", "ddp"])
    assert COMPUTE_DTYPE["bf16"] == torch.bfloat16


# --- compile caches ----------------------------------------------------------------------------------------

ATTENTION_OF_A_COMPILED_BLOCK = """
import sys
import torch
from test_candidates import tiny
from train_gpt2 import GPT, choose_attention
cfg = tiny("sample", sys.argv[1], "off")
choose_attention(cfg, torch.device("cpu"))
model = GPT(cfg)
for block in model.blocks[:1]:
    block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
idx = torch.zeros(1, cfg.seq_len, dtype=torch.long)
model(idx, idx).backward()
with torch.profiler.profile() as found:
    x = torch.ones(1, cfg.seq_len, cfg.n_embd, requires_grad=True)
    model.blocks[0](x, x, None, None, model.rope, None, False)
print(any("scaled_dot_product_flash" in event.key for event in found.key_averages()))
"""


@pytest.mark.full
def test_a_backend_never_gets_the_kernels_compiled_for_another(tmp_path: Path):
    """torch's caches on disk are keyed by the graph, which is the same for all backends."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    for backend, flash in (("flash", "True"), ("math", "False"), ("flash", "True")):
        command = [sys.executable, "-c", ATTENTION_OF_A_COMPILED_BLOCK, backend]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(train_gpt2.__file__).parent)
        assert done.stdout.strip() == flash, done.stderr[-2000:]
