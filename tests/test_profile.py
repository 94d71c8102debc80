"""The split of a step: interval arithmetic and traces made by hand with known answers, and real runs."""

from __future__ import annotations

import json
import os
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from train_support import TINY
from trainer_jobs import CONTEXT

from harness import profile as p

# --- intervals ---------------------------------------------------------------------------------------------


def cells(spans: list[tuple[float, float]]) -> set[int]:
    """The unit cells of [0, 60) that integer intervals cover: set arithmetic to compare with."""
    return {x for start, end in spans for x in range(int(start), int(end))}


def test_interval_arithmetic_agrees_with_sets_of_cells():
    rng = random.Random(0)
    for _ in range(300):
        a, b = ([(x, x + rng.randint(-1, 12)) for x in (rng.randint(0, 45) for _ in range(rng.randint(0, 6)))] for _ in range(2))
        ua, ub = p.union(a), p.union(b)
        assert all(x[1] < y[0] for x, y in pairwise(ua)), "disjoint, with gaps between"
        assert cells(ua) == cells(a)
        assert cells(p.subtract(ua, ub)) == cells(a) - cells(b)
        assert cells(p.intersect(ua, ub)) == cells(a) & cells(b)
        assert p.length(p.intersect(ua, ub)) == len(cells(a) & cells(b))
        assert p.exposed(a, b) == len(cells(a) - cells(b))


def test_exposed_communication_is_no_sum_over_streams():
    # Two collectives on two streams from 0 to 10, compute from 4 to 6: eight are exposed, not sixteen.
    assert p.exposed([(0, 10), (0, 10)], [(4, 6)]) == 8
    assert p.exposed([(0, 10)], [(0, 5), (3, 10)]) == 0
    assert p.exposed([], [(0, 5)]) == 0


# --- traces made by hand -----------------------------------------------------------------------------------


def event(cat: str, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": args}


def kernel(name: str, start: float, end: float, asked: float, number: int, cat: str = "kernel") -> list[dict[str, Any]]:
    """A kernel and the launch that asked for it."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", asked, asked + 1, correlation=number),
        event(cat, name, start, end, correlation=number),
    ]


def gpu_trace() -> list[dict[str, Any]]:
    """Two steps, 0 to 1000 and 1000 to 2000 us, with answers that can be read off."""
    events: list[dict[str, Any]] = []
    for i, at in enumerate((0, 1000)):
        n = 10 * i
        events += [
            event("user_annotation", f"ProfilerStep#{i}", at, at + 1000),
            event("user_annotation", "phase:loader", at, at + 50),
            event("user_annotation", "phase:forward", at + 50, at + 100),
            event("user_annotation", "phase:backward", at + 100, at + 150),
            event("user_annotation", "phase:optimizer", at + 150, at + 200),
            *kernel("Memcpy HtoD (Pinned -> Device)", at + 50, at + 80, at + 40, n, "gpu_memcpy"),
            *kernel("sm90_xmma_gemm_bf16", at + 80, at + 300, at + 60, n + 1),  # forward, launched early, runs late
            *kernel("elementwise", at + 280, at + 320, at + 70, n + 2),  # overlaps on another stream: 20 more
            *kernel("cudnn_generated_fort_native_sdpa_bwd", at + 320, at + 620, at + 110, n + 3),
            *kernel("ncclDevKernel_AllReduce", at + 500, at + 720, at + 120, n + 4),  # 120 hidden, 100 exposed
            *kernel("ncclDevKernel_Reduce", at + 600, at + 720, at + 130, n + 5),  # a second stream: no more
            *kernel("adam", at + 720, at + 800, at + 160, n + 6),
        ]
    return events


def test_a_gpu_trace_splits_into_its_known_parts():
    trace = p.parse_trace(gpu_trace())
    parts = p.split(trace)
    assert trace.device and trace.steps == 2
    assert parts == pytest.approx(
        {
            "forward": 0.24,
            "backward": 0.3,
            "optimizer": 0.08,
            "exposed_communication": 0.1,
            "h2d_copy": 0.03,
            "loader_wait": 0.05,
            "idle": 0.2,
        }
    )
    assert sum(parts.values()) == pytest.approx(1.0), "the parts are the step"
    assert list(parts) == list(p.PARTS)
    shares = p.limits(trace, parts)
    assert shares == pytest.approx({"compute": 0.52, "memory": 0.1, "communication": 0.1, "data": 0.08, "launch": 0.2})
    assert p.top_work(trace)[0] == ("cudnn_generated_fort_native_sdpa_bwd", pytest.approx(0.3))


def test_a_kernel_belongs_to_the_phase_that_launched_it_not_to_the_one_it_runs_in():
    events = [
        event("user_annotation", "ProfilerStep#0", 0, 100),
        event("user_annotation", "phase:forward", 0, 10),
        event("user_annotation", "phase:backward", 10, 100),
        *kernel("gemm", 50, 90, 5, 1),
    ]
    parts = p.split(p.parse_trace(events))
    assert parts["forward"] == pytest.approx(0.04) and parts["backward"] == 0


def test_what_lies_outside_the_steps_is_not_counted():
    events = [
        event("user_annotation", "ProfilerStep#0", 100, 200),
        *kernel("gemm", 50, 150, 40, 1),
        *kernel("gemm", 300, 400, 290, 2),
    ]
    assert sum(p.split(p.parse_trace(events)).values()) == pytest.approx(0.1)


def test_on_the_cpu_operators_are_the_compute_and_gloo_the_communication():
    events = [
        event("user_annotation", "ProfilerStep#0", 0, 1000),
        event("user_annotation", "phase:forward", 0, 400),
        event("cpu_op", "aten::linear", 0, 300),
        event("cpu_op", "aten::mm", 10, 290),
        event("cpu_op", "aten::_scaled_dot_product_flash_attention_for_cpu", 300, 400),
        event("user_annotation", "phase:backward", 400, 500),
        event("cpu_op", "aten::_scaled_dot_product_flash_attention_for_cpu_backward", 400, 500),
        event("user_annotation", "gloo:all_reduce", 450, 800),
        event("cpu_op", "c10d::allreduce_", 450, 900),
    ]
    trace = p.parse_trace(events)
    parts = p.split(trace)
    assert (parts["forward"], parts["backward"], parts["exposed_communication"], parts["idle"]) == pytest.approx(
        (0.4, 0.1, 0.3, 0.2)
    )
    assert trace.attention_calls == 1
    assert p.limits(trace, parts)["compute"] == pytest.approx(0.48)
    assert p.top_work(trace)[0] == ("aten::mm", pytest.approx(0.28)), "the caller is charged with the rest alone"


def test_memory_at_the_end_of_the_forward_and_at_the_peak():
    events = [
        event("user_annotation", "ProfilerStep#0", 0, 100),
        event("user_annotation", "phase:forward", 0, 50),
        *(
            {"ph": "i", "name": "[memory]", "ts": ts, "args": {"Device Type": 0, "Bytes": size}}
            for ts, size in ((-5, 999), (10, 100), (20, 300), (30, -50), (60, 200), (70, -500), (80, 120))
        ),
    ]
    assert p.memory_levels(p.parse_trace(events)) == (350, 550)


def test_matrix_products_are_told_from_kernels_that_move_bytes():
    """Names as they stand in traces of an H200."""
    products = ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "_relu2_kernel", "cudnn_generated_fort_native_sdpa_sm90_flash")
    others = ("triton_red_fused_add_mul_1", "_cross_entropy_kernel", "_fp8_gradient_kernel", "Memset (Device)")
    assert all(p.MATMUL.search(name) for name in products) and not any(p.MATMUL.search(name) for name in others)


@pytest.mark.parametrize("limit", p.LIMITS)
def test_the_largest_share_is_named_with_its_number(limit: str):
    shares = {name: 0.1 for name in p.LIMITS} | {limit: 0.6}
    sentence = p.binding_limit(shares, 0.43, [("gemm", 0.3)])
    assert sentence.startswith(p.WORDS[limit]) and "60%" in sentence and "43.0%" in sentence and "gemm" in sentence


def test_recomputation_is_counted_apart():
    from train_gpt2 import RECIPES, parameter_count

    cfg = RECIPES["gpt2"]
    blocks = parameter_count(cfg)["matmul"] - cfg.padded_vocab * cfg.n_embd
    config = {"n_layer": 12, "n_embd": 768, "seq_len": 1024, "attn_gate": False}
    assert p.recomputed_flops(config | {"recompute": "off"}, blocks) == 0
    # A third of the blocks' 6 N + 12 L d T is their forward pass.
    assert 3 * p.recomputed_flops(config | {"recompute": "block"}, blocks) == 6 * blocks + 12 * 12 * 768 * 1024
    assert p.recomputed_flops(config | {"recompute": "selective"}, blocks) == 12 * 2 * 768 * 768


# --- real runs ---------------------------------------------------------------------------------------------

DELAY = 0.03  # seconds by which one rank comes late to every all-reduce


def profiled_rank(argv: list[str], variables: dict[str, str], late: bool) -> None:
    """One rank in a process of its own; `late`: it sleeps before every all-reduce."""
    os.environ |= variables
    import torch
    import torch.distributed as dist

    from harness.profile import rank_main

    torch.set_num_threads(1)
    if late:
        reduce = dist.all_reduce

        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(DELAY)
            return reduce(*args, **kwargs)

        dist.all_reduce = slow
    os._exit(rank_main(argv))


def profile_tiny(tmp_path: Path, shards: Path, world: int, late: int | None = None, **flags: Any) -> dict[str, Any]:
    """`profile` of a tiny speedrun on `world` gloo ranks, its processes forked instead of started by torchrun."""
    import socket

    values = {k: v for k, v in TINY.items() if not k.startswith("val-")}
    values |= {"data": shards, "head-precision": "same", "value-embeds": 1, **{k.replace("_", "-"): v for k, v in flags.items()}}

    def process(command: Any) -> int:
        argv = list(command)[list(command).index("harness.profile") + 1 :]
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        ranks = []
        for rank in range(world):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            variables = {k: str(v) for k, v in numbers.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ranks.append(CONTEXT.Process(target=profiled_rank, args=(argv, variables, rank == late)))
            ranks[-1].start()
        for rank in ranks:
            rank.join(120)
        return max(abs(rank.exitcode or 0) for rank in ranks)

    argv = [f"--{k}={v}" for k, v in values.items()]
    return p.profile("speedrun", argv, tmp_path / "out", gpus=world, steps=2, warm=2, plain=2, process=process)


def test_a_late_rank_exposes_communication_on_the_others_only(tmp_path: Path, shards: Path):
    content = profile_tiny(tmp_path, shards, world=2, late=1)
    first, second = (rank["parts_ms"]["exposed_communication"] for rank in content["ranks"])
    calls = 2  # per step: the small gradients, then loss and norm
    assert first > 0.9 * calls * 1000 * DELAY, "rank 0 waits for rank 1 in every all-reduce"
    assert second < first - 0.6 * calls * 1000 * DELAY, "rank 1 sleeps outside of communication"
    assert content["exposed_communication_ms"] == {"min": pytest.approx(second), "max": pytest.approx(first)}
    for rank in content["ranks"]:
        assert sum(rank["parts_ms"].values()) == pytest.approx(rank["step_ms"])
        assert rank["communication_ms"] >= rank["parts_ms"]["exposed_communication"] - 1e-6
    assert content["attention_calls"]["seen"] == content["attention_calls"]["one_per_block"] and not content["warnings"]
    logged = [json.loads(line) for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    step_ms = [row["step_ms"] for row in logged if row["kind"] == "train"]
    assert content["step_ms"] == pytest.approx(sum(step_ms[2:4]) / 2, rel=0.3), "both are delayed by hundreds of milliseconds"
    assert content["mfu"] is None and content["peak_bytes"] == 0, "no number without its hardware"
    assert json.loads((tmp_path / "out" / "profile.json").read_text())["sentence"] == content["sentence"]
    assert (tmp_path / "out" / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert "binding limit: " in p.statement(content)


@pytest.mark.full
def test_on_four_ranks_everyone_waits_for_the_late_one(tmp_path: Path, shards: Path):
    content = profile_tiny(tmp_path, shards, world=4, late=2)
    waits = [rank["parts_ms"]["exposed_communication"] for rank in content["ranks"]]
    assert min(waits[0], waits[1], waits[3]) > 0.9 * 2 * 1000 * DELAY
    assert waits[2] == min(waits) == content["exposed_communication_ms"]["min"]


def test_attention_computed_twice_is_warned_of(tmp_path: Path, shards: Path):
    content = profile_tiny(tmp_path, shards, world=1, recompute="block")
    assert content["attention_calls"]["seen"] == 2 * content["attention_calls"]["one_per_block"]
    assert any("attention runs 2.0 times" in text for text in content["warnings"])
    memory = content["memory_bytes"]
    assert memory["weights"] == memory["gradients"] > 0 and memory["optimizer"] > 0 and memory["activations"] > 0


@pytest.mark.full
@pytest.mark.parametrize(("how", "times"), [("selective", 1), ("block", 2)])
def test_attention_is_counted_under_compile_too(tmp_path: Path, shards: Path, how: str, times: int):
    content = profile_tiny(tmp_path, shards, world=1, recompute=how, compile="on")
    assert content["attention_calls"]["seen"] == times * content["attention_calls"]["one_per_block"]


def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]):
    from harness.__main__ import main

    out = tmp_path / "out"
    for argv in (["sample", "--no-such-flag", "1"], ["sample", "--gpus", "0"], ["nothing"]):
        assert main(["profile", *argv, "--out", str(out)]) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and message.count("\n") == 1
        assert not out.exists()


def test_varlen_attention_is_counted_once_and_a_window_bounds_what_is_computed_again():
    seen = ("aten::_scaled_dot_product_cudnn_attention", "torch_attn::_varlen_attn")
    assert all(p.ATTENTION.match(name) and not p.ATTENTION.match(f"{name}_backward") for name in seen)
    config = {"n_layer": 2, "n_embd": 8, "seq_len": 64, "recompute": "block", "attn_gate": False}
    assert p.recomputed_flops(config, 100) == 200 + 4 * 2 * 8 * 64
    assert p.recomputed_flops(config | {"window": 16}, 100) == 200 + 4 * 2 * 8 * 16
    assert p.recomputed_flops(config | {"window": 0}, 100) == p.recomputed_flops(config | {"window": 99}, 100)
