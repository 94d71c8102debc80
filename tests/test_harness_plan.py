"""The planner's arithmetic against published values, and its refusals."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path

import pytest

from harness import plan
from harness.__main__ import main
from harness.common import UserError
from harness.gpus import GPUS, Gpu, find_gpu


def make(*argv: str) -> dict:
    """The plan for a command line, as its JSON."""
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers())
    return plan.make_plan(parser.parse_args(["plan", *argv]))


# -------------------------------------------------------------------------------- FLOPs, hours and cost


def test_gpt2_flops_per_token():
    # 12 layers of 12 * 768^2 and one head of 50,304 * 768, times 6, plus 12 * 12 * 768 * 1024
    by_hand = 6 * (12 * 12 * 768**2 + 50304 * 768) + 12 * 12 * 768 * 1024
    assert by_hand == 854_654_976
    result = make("--model", "gpt2", "--gpu", "H100")["model"]
    assert result["flops_per_token"] == by_hand  # published: 854.65 MFLOP
    assert result["flops_per_token_6n"] == by_hand - 113_246_208
    # Radford et al.'s 124,439,808 parameters with the vocabulary padded from 50,257 to 50,304
    assert result["parameters"] == 124_439_808 + (50304 - 50257) * 768


@pytest.mark.parametrize(
    ("params", "tokens", "gpu", "count", "hours", "gpu_hours"),
    [
        ("1B", "100B", "A100", 8, 167, 1340),
        ("7B", "100B", "A100", 8, 1170, 9350),
        ("7B", "1T", "H100", 64, 461, 29500),
    ],
)
def test_published_hours(params, tokens, gpu, count, hours, gpu_hours):
    result = make("--params", params, "--tokens", tokens, "--gpu", gpu, "--count", str(count), "--mfu", "0.4")
    assert result["hours"]["by_6n"] == pytest.approx(hours, rel=0.005)
    assert result["hours"]["gpu_hours_by_6n"] == pytest.approx(gpu_hours, rel=0.005)
    if params == "1B":
        assert result["work"]["flops_6n"] == pytest.approx(6.0e20)


def test_the_two_counts_are_kept_apart():
    result = make("--model", "gpt2", "--tokens", "10B", "--gpu", "H200", "--mfu", "40%")["hours"]
    assert result["value"] == pytest.approx(6.0, abs=0.05)  # distributed.md's 6.0 h against 5.2 h
    assert result["by_6n"] == pytest.approx(5.2, abs=0.05)


def test_quoted_hours_solve_for_the_mfu_and_give_the_hours_back():
    result = make("--gpu", "H100", "--count", "8", "--tokens", "10B", "--quoted-hours", "0.75")
    assert result["mfu"]["value"] == pytest.approx(854_654_976 * 1e10 / (8 * 989e12 * 0.75 * 3600))
    assert result["hours"]["value"] == pytest.approx(0.75)


@pytest.mark.parametrize(("billed_by", "hours"), [("hour", 7), ("minute", 361 / 60), ("second", 6.0012)])
def test_cost_is_billed_in_whole_units(billed_by, hours):
    argv = ("--gpu", "H200", "--tokens", "10B", "--price", "2.5", "--billed-by", billed_by)
    cost = make(*argv, "--mfu", "0.4")["cost"]
    assert cost["billed_hours"] == pytest.approx(hours, abs=2e-4)
    assert cost["total"] == pytest.approx(2.5 * cost["billed_hours"])


def test_no_price_is_invented():
    assert make("--gpu", "H200")["cost"]["total"] is None


def test_contingency_comes_from_a_measured_run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    (run / "result.json").write_text(
        json.dumps(
            {
                "schema": 1,
                "mfu": 0.5,
                "device": "cuda",
                "startup_seconds": 60,
                "compile_seconds": 40,
                "train_seconds": 1000,
                "val_seconds": 50,
                "checkpoint_stall_seconds": 10,
            }
        )
    )
    result = make("--gpu", "H200", "--tokens", "10B", "--measured", str(run), "--spot-mtbf", "2h")
    training = 854_654_976 * 1e10 / (989e12 * 0.5)
    extra = result["cost"]["extra_seconds"]
    assert extra["setup"] == 60
    assert extra["validation"] == pytest.approx(0.05 * training)
    assert extra["checkpoints"] == pytest.approx(0.01 * training)
    interval = math.sqrt(2 * result["checkpoints"]["stall_seconds"] * 7200)
    assert extra["retries"] == pytest.approx(training / 7200 * (interval / 2 + 60))


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(("ranks", "savings"), [(8, (2.9, 4.3, 8.0)), (64, (3.8, 7.2, 64.0))])
def test_zero_savings(ranks, savings):
    saving = make("--params", "7B", "--gpu", "A100", "--count", str(ranks))["memory"]["saving"]
    assert [round(s, 1) for s in saving] == list(savings)


def test_seven_billion_parameters():
    state = make("--params", "7B", "--gpu", "A100", "--count", "8")["memory"]["state"]
    assert state["ddp"] == 112e9
    assert state["zero3"] == 14e9


def test_activations_with_and_without_the_quadratic_term():
    shape = plan.Shape(layers=32, width=4096, heads=32, seq_len=8192, vocab=32000)
    whole = plan.activation_bytes(shape, 1, quadratic=True)
    fused = plan.activation_bytes(shape, 1)
    assert whole == pytest.approx(380e9, rel=0.002)
    assert fused == pytest.approx(36.5e9, rel=0.002)
    assert (whole - fused) / whole == pytest.approx(0.90, abs=0.005)
    assert fused / 32 == pytest.approx(1.14e9, rel=0.002)
    # tensor parallelism divides all but 10 of the 34 bytes
    assert plan.activation_bytes(shape, 1, tensor_parallel=8) == pytest.approx(fused * (10 + 24 / 8) / 34)


def test_recomputation_policies_by_hand():
    shape = plan.Shape(layers=16, width=1024, heads=16, seq_len=1024, vocab=50304)
    unit = 4 * 1024 * 1024  # s * b * h
    assert plan.activation_bytes(shape, 4, "selective", quadratic=True) == 16 * 20 * unit
    assert plan.activation_bytes(shape, 4, "per-block") == (16 * 2 + 34) * unit
    assert plan.activation_bytes(shape, 4, "sqrt segments") == (4 * 2 + 4 * 34) * unit


def test_adapters_have_only_their_optimizer_state_to_shard():
    memory = make("--params", "7B", "--trainable-params", "20M", "--gpu", "H100", "--count", "8")["memory"]
    frozen = 2 * (7e9 - 20e6)
    assert memory["state"]["ddp"] == frozen + 16 * 20e6
    assert memory["state"]["zero1"] == frozen + (4 + 12 / 8) * 20e6
    assert memory["state"]["zero3"] == (frozen + 16 * 20e6) / 8
    assert memory["adapters"]["optimizer_bytes"] == 12 * 20e6


def test_largest_micro_batch_is_the_largest():
    shape = plan.Shape(12, 768, 12, 1024, 50304)
    room = 20e9
    largest = plan.largest_micro_batch(shape, room, "none")

    def size(batch):
        return plan.activation_bytes(shape, batch) + plan.logits_bytes(shape, batch)

    assert size(largest) <= room < size(largest + 1)


# --------------------------------------------------------------- communication, pipeline, checkpoints


def test_all_reduce_against_a_ring_counted_step_by_step():
    ranks, size, link = 8, 4e9, 450e9
    steps = 2 * (ranks - 1)  # reduce-scatter, then all-gather, one chunk of size/ranks each
    assert plan.all_reduce_seconds(size, ranks, link) == pytest.approx(steps * (size / ranks) / link)


def test_communication_that_cannot_hide():
    slow = make("--gpu", "H100", "--count", "8", "--bandwidth", "1", "--micro-batch", "4")["communication"]
    fast = make("--gpu", "H100", "--count", "8", "--micro-batch", "64")["communication"]
    assert not slow["hides"]
    assert fast["hides"]


def test_pipeline_bubble():
    assert make("--gpu", "H100", "--pipeline", "4", "--pipeline-microbatches", "8")["pipeline"]["bubble"] == 3 / 8
    argv = ("--pipeline", "4", "--pipeline-microbatches", "8", "--virtual-stages", "2")
    assert make("--gpu", "H100", *argv)["pipeline"]["bubble"] == 3 / 16


def test_checkpoint_interval_minimizes_the_overhead():
    stall, mtbf = 2.0, 6 * 3600.0
    best = min(range(1, 20000), key=lambda t: stall / t + t / (2 * mtbf))
    assert plan.checkpoint_interval(stall, mtbf) == pytest.approx(best, abs=1)


def test_spot_preemption_is_the_instances_and_hardware_failure_is_each_gpus():
    spot = make("--gpu", "H100", "--count", "8", "--spot-mtbf", "6h")["checkpoints"]
    owned = make("--gpu", "H100", "--count", "8", "--device-mtbf", "800h")["checkpoints"]
    assert spot["mtbf_hours"] == 6
    assert owned["mtbf_hours"] == 100


# -------------------------------------------------------------------------------------------- strategy


LLAMA_7B = ("--layers", "32", "--width", "4096", "--heads", "32", "--vocab", "32000", "--seq-len", "2048")


@pytest.mark.parametrize(
    ("argv", "recommended"),
    [
        (("--model", "gpt2", "--gpu", "H100", "--count", "8"), "DDP"),
        (("--model", "gpt2", "--gpu", "H100"), "one GPU"),
        (("--params", "3.5B", "--gpu", "A100-40", "--count", "8"), "ZeRO-1"),
        (("--params", "8.5B", "--gpu", "A40", "--count", "8"), "FSDP2, reshard_after_forward=False"),
        (("--params", "13B", "--gpu", "A40", "--count", "8"), "FSDP2, reshard_after_forward=True"),
        (("--params", "30B", "--gpu", "A100", "--count", "64"), "FSDP2, reshard_after_forward=True"),
        ((*LLAMA_7B, "--gpu", "L4", "--count", "8"), "FSDP2 (like ZeRO-3) and selective"),
        (("--params", "400B", "--gpu", "H100", "--count", "8"), "tensor parallelism"),
    ],
)
def test_the_smallest_strategy_that_fits_is_recommended(argv, recommended):
    assert make(*argv)["strategy"]["recommended"].startswith(recommended)


def test_a_long_sequence_is_split_before_the_layers_are():
    argv = (
        "--layers",
        "2",
        "--width",
        "8192",
        "--heads",
        "64",
        "--seq-len",
        "2000000",
        "--gpu",
        "L4",
        "--count",
        "8",
    )
    assert make(*argv)["strategy"]["recommended"] == "context parallelism"


def test_framework_and_debug_gpu():
    small = make("--model", "gpt2", "--gpu", "H100", "--count", "8")["strategy"]
    assert small["framework"].startswith("this trainer")
    assert small["smallest_gpu"] == "A10G"
    assert make("--params", "2.5B", "--gpu", "H100")["strategy"]["smallest_gpu"] == "A40"
    big = make("--params", "400B", "--gpu", "H100", "--count", "64")["strategy"]
    assert "Megatron" in big["framework"]
    assert big["smallest_gpu"] is None


# -------------------------------------------------------------------------------------- GPUs and errors


def test_dense_peaks_against_the_published_sparse_ones():
    # As printed on the data sheets, with 2:4 sparsity.
    sparse = {"A100": 624, "H100": 1979, "H100-PCIE": 1513, "L4": 242, "L40S": 733, "A10G": 140, "A40": 299.4}
    for name, peak in sparse.items():
        assert find_gpu(name).peak == pytest.approx(peak / 2, rel=0.02)
    assert all(gpu.source for gpu in GPUS)
    assert find_gpu("nvidia a100-80gb").name == "A100"
    assert find_gpu("h100_pcie").name == "H100-PCIE"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gpu", "H100", "--peak", "1979"], "989"),
        (["--gpu", "H100", "--peak", "3958"], "fp8 with sparsity"),
        (["--gpu", "H100", "--peak", "494.5"], "TF32"),
        (["--gpu", "H100", "--mfu", "130%"], "sparsity or fp8"),
        (["--gpu", "H100", "--tokens", "10B", "--quoted-hours", "1.5"], "sparsity or fp8"),
        (["--gpu", "H100", "--tokens", "10B", "--quoted-hours", "0.1"], "another run"),
        (["--gpu", "H100", "--mfu", "0.4", "--quoted-hours", "3"], "one of"),
        (["--gpu", "K80"], "not in the table"),
        ([], "--gpu"),
        (["--gpu", "H100", "--model", "gpt5"], "unknown model"),
        (["--gpu", "H100", "--width", "512"], "--layers, --heads"),
        (["--gpu", "H100", "--layers", "2", "--width", "100", "--heads", "3"], "divisible"),
        (["--gpu", "H100", "--params", "7B", "--model", "gpt2"], "--params"),
        (["--gpu", "H100", "--params", "7B", "--trainable-params", "8B"], "exceeds"),
        (["--gpu", "H100", "--tokens", "ten"], "ten"),
        (["--gpu", "H100", "--spot-mtbf", "6"], "unit"),
        (["--gpu", "H100", "--count", "0"], "positive"),
        (["--gpu", "H100", "--measured", "no-such-run"], "no-such-run"),
    ],
)
def test_bad_input_is_one_line(argv, message, capsys):
    code = main(["plan", *argv])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_a_cpu_run_has_no_mfu_to_take(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "result.json").write_text(json.dumps({"schema": 1, "mfu": None, "device": "cpu"}))
    with pytest.raises(UserError, match="no MFU"):
        make("--gpu", "H100", "--measured", str(tmp_path))


def test_text_shows_both_counts_and_json_is_json(capsys):
    assert main(["plan", "--gpu", "H100", "--count", "8", "--price", "2.5"]) == 0
    text = capsys.readouterr().out
    assert "854.65" in text and "741.41" in text and "20.00" in text
    assert max(map(len, text.splitlines())) <= 100
    assert main(["plan", "--gpu", "H100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == 1


# ------------------------------------------------------------------------- this trainer's own memory


def test_recipes_are_counted_on_the_real_module():
    by_sizes, by_module = plan.gpt_model("gpt2", 12, 768, 12), plan.recipe_model("gpt2", {})
    assert by_module == by_sizes
    from train_gpt2 import HEAD_CHUNK, PEAK_BF16, RECIPES, flops_per_token, parameter_count

    speedrun = plan.recipe_model("speedrun", {})
    assert speedrun.flops_per_token == flops_per_token(RECIPES["speedrun"])
    assert speedrun.parameters == parameter_count(RECIPES["speedrun"])["total"]
    assert HEAD_CHUNK["cuda"] == plan.HEAD_CHUNK
    for name in ("H100", "H200", "A100", "L4", "A10G", "L40S", "B200"):
        assert find_gpu(name).peak == pytest.approx(PEAK_BF16[name], rel=1e-3)


def test_peak_against_what_was_measured():
    """docs/log.md, 2026-12-01, one H200, --micro-batch 64: `speedrun`, its head in fp8 and in bf16, both with the fused MLP."""
    from train_gpt2 import RECIPES

    peaks = {}
    for head, measured in (("fp8-all", 26.84e9), ("same", 25.05e9)):
        model = plan.config_model(dataclasses.replace(RECIPES["speedrun"], head_precision=head))
        peaks[head] = plan.trainer_peak(model, 64, gpu=find_gpu("H200"))
        assert peaks[head] == pytest.approx(measured, rel=0.10)
    assert peaks["fp8-all"] - peaks["same"] == pytest.approx(26.84e9 - 25.05e9, rel=0.15)
    plain = plan.config_model(dataclasses.replace(RECIPES["speedrun"], fused_mlp="off"))
    assert plan.trainer_peak(plain, 64, gpu=find_gpu("H200")) - peaks["fp8-all"] == pytest.approx(31.67e9 - 26.84e9, rel=0.02)
    fp8 = plan.recipe_model("speedrun", {})
    assert plan.trainer_peak(fp8, 64, gpu=find_gpu("A100")) == plan.trainer_peak(model, 64), "the head falls back to bf16 there"


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "fused"), [("gpt2", False), ("speedrun", False), ("speedrun", True)])
def test_kept_activations_are_those_that_autograd_saves(recipe, fused, monkeypatch):
    """Counts the tensors saved by blocks whose backward is partitioned as torch.compile does it."""
    import torch

    import train_gpt2
    from train_gpt2 import GPT, RECIPES

    monkeypatch.setattr(train_gpt2, "fuses_mlp", lambda cfg, x: fused)
    torch._dynamo.reset()
    tables = 1 if recipe == "speedrun" else 0
    cfg = dataclasses.replace(RECIPES[recipe], n_layer=2, seq_len=128, vocab_size=1000, padded_vocab=1024, value_embeds=tables)
    model = GPT(cfg)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager_decomp_partition", fullgraph=True)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own:
            saved[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = model.hidden(torch.randint(1000, (4, 128)))
    assert out.requires_grad
    weights = 2 * 12 * cfg.n_layer * cfg.n_embd**2  # 16-bit copies, counted apart
    kept = (sum(t.untyped_storage().nbytes() for t in saved.values()) - weights) / (4 * 128 * cfg.n_embd)
    per_block = plan.KEPT_BLOCK + (plan.KEPT_SEPARATE_QK if tables else 0) - (plan.KEPT_HIDDEN if fused else 0)
    predicted = 2 * per_block + plan.KEPT_VALUE_TABLE * tables + plan.KEPT_OUTSIDE + (plan.KEPT_SMEAR if tables else 0)
    assert predicted == pytest.approx(kept, rel=0.03)


def short_run(folder: Path, recipe: str, micro_batch: int, steps: int) -> dict:
    """result.json of a training on made-up tokens, two micro-batches a step."""
    import numpy as np
    from train_support import shard_bytes

    from harness.common import launch_training

    rng = np.random.default_rng(0)
    batch = 2 * micro_batch * 1024
    for split, count in (("train", steps * batch + 1), ("val", 65_537)):
        (folder / f"x_{split}_000000.bin").write_bytes(shard_bytes(rng.integers(0, 50257, count)))
    argv = [recipe, "--data", str(folder), "--run-dir", str(folder / "run"), "--micro-batch", str(micro_batch)]
    argv += ["--batch-tokens", str(batch), "--max-steps", str(steps), "--val-tokens", "65536", "--val-batch", "8"]
    assert launch_training([*argv, "--val-every", "0", "--checkpoint-every", "0"]) == 0
    return json.loads((folder / "run" / "result.json").read_text())


def named_in(device: str) -> Gpu | None:
    """The GPU of the table whose name a device's own holds, the longest such."""
    longest_first = sorted(GPUS, key=lambda g: -len(g.name))
    return next((g for g in longest_first if g.name in device.replace(" ", "-")), None)


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batch", [8, 16, 32])
@pytest.mark.parametrize("recipe", ["gpt2", "speedrun"])
def test_peak_memory_on_a_gpu(recipe, micro_batch, tmp_path: Path):
    """Predicted peak memory against a real short run, within 10%."""
    measured = short_run(tmp_path, recipe, micro_batch, steps=4)["peak_mem_bytes"]
    import torch

    predicted = plan.trainer_peak(plan.recipe_model(recipe, {}), micro_batch, gpu=named_in(torch.cuda.get_device_name()))
    print(f"{recipe} --micro-batch {micro_batch}: measured {measured / 1e9:.2f} GB, predicted {predicted / 1e9:.2f} GB")
    assert predicted == pytest.approx(measured, rel=0.10)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["gpt2", "speedrun"])
def test_hours_on_a_gpu(recipe, tmp_path: Path):
    """Predicted training time of a real short run, given its MFU, within 10%."""
    result = short_run(tmp_path, recipe, 32, steps=80)
    if result["mfu"] is None:
        pytest.skip(f"the peak of {result['device']} is not known")
    gpu = named_in(result["device"])
    assert gpu is not None
    model = plan.recipe_model(recipe, {})
    predicted = 3600 * plan.hours(model.flops_per_token * result["tokens"], 1, gpu.peak, result["mfu"])
    print(f"{recipe}: measured {result['train_seconds']:.2f} s, predicted {predicted:.2f} s")
    assert predicted == pytest.approx(result["train_seconds"], rel=0.10)
