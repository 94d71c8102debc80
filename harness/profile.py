"""Split a steady training step and name its binding limit, with the evidence.

    python -m harness profile RECIPE [--gpus N] [--steps N] [trainer flags]

The trainer's own loop runs until it is steady, then a few steps under torch.profiler. Each rank's trace is cut
into forward, backward, optimizer, exposed communication, host-to-device copy, loader wait and idle time: parts
that add up to the step. What they mean is in docs/promote.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.common import SCHEMA, UserError, launcher, read_json, run_process

Interval = tuple[float, float]

PARTS = (
    "forward",
    "backward",
    "optimizer",
    "exposed_communication",
    "h2d_copy",
    "loader_wait",
    "idle",
)
LIMITS = ("compute", "memory", "communication", "data", "launch")
# Kernels (CUDA) and operators (CPU) bound by arithmetic; all others move bytes.
MATMUL = re.compile(
    r"gemm|nvjet|xmma|cutlass|triton_tem|_relu2_kernel|flash_fwd|flash_bwd|flash_attn|fmha|sdpa|cudnn.*attn|"
    r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm|_scaled_dot_product\w*)$"
)
ATTENTION = re.compile(r"^(aten::_scaled_dot_product\w*|torch_attn::_varlen_attn)(?<!backward)$")


# --- intervals ---------------------------------------------------------------------------------------------


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Sorted disjoint intervals that cover the same points; empty and reversed ones are dropped."""
    out: list[Interval] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The points of `a` that are not in `b`; both disjoint and sorted, as `union` returns them."""
    out: list[Interval] = []
    i = 0
    for start, end in a:
        while i < len(b) and b[i][1] <= start:
            i += 1
        at, k = start, i
        while k < len(b) and b[k][0] < end:
            if b[k][0] > at:
                out.append((at, b[k][0]))
            at = max(at, b[k][1])
            k += 1
        if at < end:
            out.append((at, end))
    return out


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The points in both; both disjoint and sorted."""
    return subtract(a, subtract(a, b))


def length(spans: Iterable[Interval]) -> float:
    return sum(end - start for start, end in spans)


def exposed(communication: Iterable[Interval], compute: Iterable[Interval]) -> float:
    """Time in which something is communicated and nothing computed: never a sum over streams."""
    return length(subtract(union(communication), union(compute)))


# --- traces ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A kernel, a copy or a CPU operator: when it ran, and when the host asked for it (microseconds)."""

    name: str
    start: float
    end: float
    asked: float

    @property
    def span(self) -> Interval:
        return self.start, self.end


@dataclass
class Trace:
    """What the split needs of one rank's trace; times in microseconds."""

    window: Interval
    steps: int
    phases: list[tuple[float, float, str]]  # by host time, disjoint, sorted
    compute: list[Work] = field(default_factory=list)
    communication: list[Work] = field(default_factory=list)
    h2d: list[Work] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # (time, bytes allocated or freed)
    attention_calls: int = 0
    device: bool = False  # whether kernels ran on a GPU


def read_trace(path: Path) -> Trace:
    """A chrome trace of torch.profiler, plain or gzipped. Raises UserError for one without steps."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as f:
        return parse_trace(json.load(f)["traceEvents"])


def parse_trace(events: Sequence[dict[str, Any]]) -> Trace:
    """Chrome events to a Trace.

    Kernels belong to the phase in which the host launched them, which holds on every thread: autograd launches
    from one of its own, while the host is inside the backward phase. On the CPU, operators are the compute.
    """
    spans = [e for e in events if e.get("ph") == "X"]
    marks = [e for e in spans if e.get("cat") == "user_annotation"]
    steps = [e for e in marks if e["name"].startswith("ProfilerStep")]
    if not steps:
        raise UserError("the trace holds no profiler step; it was cut off")
    window = (min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps))
    phases = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"].removeprefix("phase:")) for e in marks if e["name"].startswith("phase:")
    )
    trace = Trace(window, len(steps), phases)
    trace.device = any(e.get("cat") == "kernel" for e in spans)
    asked = {
        e["args"]["correlation"]: e["ts"]
        for e in spans
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    for e in spans:
        cat, name = e.get("cat"), e["name"]
        begun, ended = max(e["ts"], window[0]), min(e["ts"] + e["dur"], window[1])
        if ended <= begun:
            continue
        if cat == "cpu_op" and ATTENTION.match(name):
            trace.attention_calls += 1
        if trace.device:
            if cat not in ("kernel", "gpu_memcpy", "gpu_memset"):
                continue
            work = Work(name, begun, ended, asked.get(e.get("args", {}).get("correlation"), e["ts"]))
            if cat == "kernel" and "nccl" in name.lower():
                trace.communication.append(work)
            elif cat == "gpu_memcpy" and "HtoD" in name:
                trace.h2d.append(work)
            else:
                trace.compute.append(work)
        elif name.startswith("gloo:"):
            trace.communication.append(Work(name, begun, ended, e["ts"]))
        elif cat == "cpu_op" and name.startswith("aten::"):
            trace.compute.append(Work(name, begun, ended, e["ts"]))
    kind = 1 if trace.device else 0
    for e in events:
        if e.get("name") == "[memory]" and e.get("args", {}).get("Device Type") == kind:
            trace.memory.append((e["ts"], int(e["args"]["Bytes"])))
    trace.memory.sort(key=lambda event: event[0])
    return trace


def phase_of(trace: Trace, when: float) -> str:
    """The phase whose span holds this host time; "" between phases."""
    i = bisect_right(trace.phases, (when, float("inf"), "")) - 1
    return trace.phases[i][2] if i >= 0 and when < trace.phases[i][1] else ""


def split(trace: Trace) -> dict[str, float]:
    """Milliseconds a step in each of PARTS; they add up to the step.

    Every instant counts once: as compute where anything computes, else as communication, else as a copy, else as
    waiting for the loader, else as idle. Work asked for between the phases is the optimizer's.
    """
    by_phase: dict[str, list[Interval]] = {"forward": [], "backward": [], "optimizer": []}
    for work in trace.compute:
        phase = phase_of(trace, work.asked)
        by_phase[phase if phase in by_phase else "optimizer"].append(work.span)
    loader = [(start, end) for start, end, name in trace.phases if name == "loader"]
    claims = [
        *by_phase.items(),
        ("exposed_communication", [w.span for w in trace.communication]),
        ("h2d_copy", [w.span for w in trace.h2d]),
        ("loader_wait", loader),
        ("idle", [trace.window]),
    ]
    left, parts = [trace.window], {}
    for name, spans in claims:
        covered = union(spans)
        parts[name] = length(intersect(left, covered)) / 1000 / trace.steps
        left = subtract(left, covered)
    return parts


def limits(trace: Trace, parts: dict[str, float]) -> dict[str, float]:
    """Shares of the step by what bounds them: arithmetic, memory traffic, communication, data, launches."""
    step = sum(parts.values()) or 1.0
    matmul = length(union(w.span for w in trace.compute if MATMUL.search(w.name))) / 1000 / trace.steps
    busy = parts["forward"] + parts["backward"] + parts["optimizer"]
    return {
        "compute": matmul / step,
        "memory": (busy - matmul) / step,
        "communication": parts["exposed_communication"] / step,
        "data": (parts["loader_wait"] + parts["h2d_copy"]) / step,
        "launch": parts["idle"] / step,
    }


def memory_levels(trace: Trace) -> tuple[int, int]:
    """Bytes above the step's start: at the end of the first forward, and at the highest point."""
    forward = next((p for p in trace.phases if p[2] == "forward" and p[0] >= trace.window[0]), None)
    level = peak = activations = 0
    for when, size in trace.memory:
        if when < trace.window[0] or when > trace.window[1]:
            continue
        level += size
        peak = max(peak, level)
        if forward is not None and when <= forward[1]:
            activations = level
    return max(0, activations), peak


def top_work(trace: Trace, count: int = 5) -> list[tuple[str, float]]:
    """The names that take most time of their own, with their share of the window.

    A CPU operator that calls others is charged with what they leave.
    """
    total: dict[str, float] = {}
    callers: list[Work] = []
    for work in sorted(trace.compute, key=lambda w: (w.start, -w.end)):
        time_taken = work.end - work.start
        while callers and callers[-1].end <= work.start:
            callers.pop()
        if callers and work.end <= callers[-1].end and not trace.device:
            total[callers[-1].name] -= time_taken
        callers.append(work)
        total[work.name] = total.get(work.name, 0.0) + time_taken
    span = trace.window[1] - trace.window[0]
    return sorted(((name, t / span) for name, t in total.items()), key=lambda item: -item[1])[:count]


# --- what it means -----------------------------------------------------------------------------------------

WORDS = {
    "compute": "arithmetic",
    "memory": "memory traffic",
    "communication": "communication",
    "data": "the supply of data",
    "launch": "the host (launches, Python)",
}


def binding_limit(shares: dict[str, float], mfu: float | None, top: Sequence[tuple[str, float]]) -> str:
    """One sentence: the largest share, and the numbers that show it."""
    first, *others = sorted(LIMITS, key=lambda name: -shares[name])
    what = {
        "compute": "matrix products and attention fill",
        "memory": "kernels that move bytes (norms, activations, casts, updates) fill",
        "communication": "communication that nothing overlaps fills",
        "data": "waiting for tokens fills",
        "launch": "a device without work fills",
    }[first]
    rest = ", ".join(f"{name} {shares[name]:.0%}" for name in others)
    speed = f", MFU {mfu:.1%}" if mfu is not None else ""
    kernel = f"; most time: {top[0][0][:60]} {top[0][1]:.0%}" if top else ""
    return f"{WORDS[first]} binds: {what} {shares[first]:.0%} of the step{speed} ({rest}{kernel})"


def recomputed_flops(config: dict[str, Any], block_parameters: int) -> int:
    """FLOPs per token that the backward pass spends on making activations again; MFU never counts them."""
    layers, width = config["n_layer"], config["n_embd"]
    if config.get("recompute") == "block":
        return 2 * block_parameters + 4 * layers * width * min(config["seq_len"], config.get("window") or config["seq_len"])
    if config.get("recompute") == "selective":  # of the saved-in-turn products, the big one that is made again
        return 2 * layers * width**2 * (4 if config["attn_gate"] else 1)
    return 0


def summarize(folder: Path) -> dict[str, Any]:
    """profile.json's content from what every rank left in `folder`. Raises UserError where a rank is missing."""
    first = read_json(folder / "rank-0.json")
    ranks, traces = [], []
    for rank in range(first["world_size"]):
        facts = first if rank == 0 else read_json(folder / f"rank-{rank}.json")
        trace = read_trace(folder / f"trace-rank-{rank}.json.gz")
        parts = split(trace)
        activations, peak = memory_levels(trace)
        traces.append(trace)
        ranks.append(
            {
                "rank": rank,
                "parts_ms": parts,
                "step_ms": sum(parts.values()),
                "communication_ms": length(union(w.span for w in trace.communication)) / 1000 / trace.steps,
                "limits": limits(trace, parts),
                "memory_bytes": {
                    **{key: facts["memory_bytes"][key] for key in ("weights", "gradients", "optimizer")},
                    "activations": activations,
                    "temporary": max(
                        0,
                        peak - activations - (facts["memory_bytes"]["gradients"] if facts["accumulation"] > 1 else 0),
                    ),
                },
                "peak_bytes": facts["peak_bytes"],
            }
        )
    config, step_s = first["config"], first["plain_step_ms"] / 1000
    rate = config["batch_tokens"] / step_s
    peak_flops = first["peak_flops"]
    mfu = rate * first["flops_per_token"] / (peak_flops * len(ranks)) if peak_flops else None
    extra = recomputed_flops(config, first["block_parameters"])
    shares = ranks[0]["limits"]
    top = top_work(traces[0])
    capacity = max(r["peak_bytes"] for r in ranks) / first["device_bytes"] if first["device_bytes"] else None
    warnings = list(first["warnings"])
    expected = config["n_layer"] * first["accumulation"] * traces[0].steps
    if traces[0].attention_calls > expected:
        warnings.append(f"attention runs {traces[0].attention_calls / expected:.1f} times as often as once a block")
    return {
        "schema": SCHEMA,
        "recipe": first["recipe"],
        "config": config,
        "device": first["device"],
        "world_size": len(ranks),
        "profiled_steps": traces[0].steps,
        "step_ms": first["plain_step_ms"],  # without the profiler
        "profiled_step_ms": ranks[0]["step_ms"],
        "tokens_per_s": rate,
        "mfu": mfu,
        # What the hardware does in all; only this one counts recomputation.
        "hardware_utilization": mfu * (1 + extra / first["flops_per_token"]) if mfu is not None else None,
        "achieved_tflops": rate * first["flops_per_token"] / 1e12,
        "parts_ms": ranks[0]["parts_ms"],
        # A rank that waits for a slower one also spends "communication": the network itself is the least of them.
        "exposed_communication_ms": {
            "min": min(r["parts_ms"]["exposed_communication"] for r in ranks),
            "max": max(r["parts_ms"]["exposed_communication"] for r in ranks),
        },
        "limits": {**shares, "capacity": capacity},
        "binding_limit": max(LIMITS, key=lambda name: shares[name]),
        "sentence": binding_limit(shares, mfu, top),
        "memory_bytes": ranks[0]["memory_bytes"],
        "peak_bytes": ranks[0]["peak_bytes"],
        "device_bytes": first["device_bytes"],
        "top": [{"name": name, "share": share} for name, share in top],
        "attention_calls": {"seen": traces[0].attention_calls, "one_per_block": expected},
        "warnings": warnings,
        "ranks": ranks,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def draw(profile: dict[str, Any], path: Path) -> None:
    """Each rank's step as one stacked bar, in milliseconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = ("#4477aa", "#66ccee", "#228833", "#ee6677", "#ccbb44", "#aa3377", "#bbbbbb")
    ranks = profile["ranks"]
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.5 * len(ranks)), layout="constrained")
    left = [0.0] * len(ranks)
    names = [f"rank {r['rank']}" for r in ranks]
    for part, color in zip(PARTS, colors):
        widths = [r["parts_ms"][part] for r in ranks]
        axes.barh(names, widths, left=left, color=color, label=part.replace("_", " "))
        left = [a + b for a, b in zip(left, widths)]
    axes.invert_yaxis()
    axes.set_xlabel("ms per step, under the profiler")
    axes.set_title(f"{profile['recipe']} on {profile['device']}: {WORDS[profile['binding_limit']]} binds", fontsize=10)
    axes.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# --- the rank ----------------------------------------------------------------------------------------------


def watch(trainer_class: type, out: Path, warm: int, plain: int, steps: int, nvtx: bool) -> type:
    """A Trainer that marks its phases and records `steps` steps after `warm` and `plain` (timed) ones."""
    import torch

    # Its own fields must not be named like one of the trainer's.
    class Watched(trainer_class):  # type: ignore[misc,valid-type]
        def setup(self) -> None:
            super().setup()
            self.watched_steps = 0
            self.open_phases: list[Any] = []
            self.profiler: Any = None
            self.model.register_forward_pre_hook(lambda *_: self.enter("forward"))
            self.model.register_forward_hook(lambda *_: self.enter("backward"))
            self.own_zero_grad, self.own_batches = self.optimizer.zero_grad, self.loader.batches
            self.optimizer.zero_grad, self.loader.batches = self.end_of_step, self.watched_batches

        def enter(self, name: str | None) -> None:
            """Ends the phase that is open and begins another."""
            while self.open_phases:
                self.open_phases.pop()()
            if name is None:
                return
            mark = torch.profiler.record_function(f"phase:{name}")
            mark.__enter__()
            self.open_phases.append(lambda: mark.__exit__(None, None, None))
            if nvtx and self.device.type == "cuda":
                torch.cuda.nvtx.range_push(name)
                self.open_phases.append(torch.cuda.nvtx.range_pop)

        def backward(self, x: Any, y: Any, last: bool) -> Any:
            loss = super().backward(x, y, last)
            if hasattr(self, "watched_steps"):  # not in the warm-up, which is before
                self.enter("optimizer" if last else None)
            return loss

        def watched_batches(self, first: int, end: int) -> Any:
            made = self.own_batches(first, end)
            while True:
                self.enter("loader")
                batch = next(made, None)
                self.enter(None)
                if batch is None:
                    return
                yield batch

        def end_of_step(self) -> None:
            self.own_zero_grad()
            self.enter(None)
            self.watched_steps += 1
            if self.watched_steps == warm:
                self.synchronize()
                self.steady_since = time.perf_counter()
            if self.watched_steps == warm + plain:
                self.synchronize()
                self.plain_ms = (time.perf_counter() - self.steady_since) * 1000 / plain
                self.peak_bytes = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
                self.start_profiler()
            elif self.profiler is not None:
                self.synchronize()
                self.profiler.step()
                if self.watched_steps == warm + plain + 1 + steps:
                    self.profiler.stop()
                    self.profiler = None
                    self.leave_facts()

        def start_profiler(self) -> None:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self.device.type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self.graphs = compiled_graphs()
            trace = str(out / f"trace-rank-{self.rank}.json.gz")
            self.profiler = torch.profiler.profile(
                activities=kinds,
                schedule=torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1),
                on_trace_ready=lambda p: p.export_chrome_trace(trace),
                profile_memory=True,
            )
            self.profiler.start()

        def leave_facts(self) -> None:
            import dataclasses

            import train_gpt2

            cuda = self.device.type == "cuda"
            local = train_gpt2.local if hasattr(train_gpt2, "local") else (lambda t: t)
            held = [local(p) for p in self.model.parameters()]
            fresh, breaks = (now - before for now, before in zip(compiled_graphs(), self.graphs))
            warnings = []
            if fresh:
                warnings.append(f"{fresh} recompilations in steps that should be steady")
            if breaks:
                warnings.append(f"{breaks} graph breaks in steps that should be steady")
            facts = {
                "recipe": self.cfg.recipe,
                "config": dataclasses.asdict(self.cfg),
                "world_size": self.world,
                "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
                "device_bytes": torch.cuda.get_device_properties(self.device).total_memory if cuda else None,
                "plain_step_ms": self.plain_ms,
                "accumulation": self.accum,
                "flops_per_token": self.flops,
                "peak_flops": self.peak,
                "peak_bytes": self.peak_bytes,
                "block_parameters": sum(p.numel() for p in self.model.blocks.parameters() if p.ndim > 1),
                "memory_bytes": {
                    "weights": sum(t.nbytes for t in held),
                    "gradients": sum(4 * t.numel() for t in held),
                    "optimizer": sum(local(t).nbytes for t in self.optimizer.state().values()),
                },
                "warnings": warnings,
            }
            (out / f"rank-{self.rank}.json").write_text(json.dumps({"schema": SCHEMA, **facts}) + "\n")

    return Watched


def compiled_graphs() -> tuple[int, int]:
    """Graphs that torch.compile has made in this process, and graph breaks."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0, 0
    counters = dynamo.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def rank_main(argv: Sequence[str]) -> int:
    """One rank: the trainer's own main with a Trainer that watches. `argv`: folder, steps, nvtx, trainer's flags."""
    out, warm, plain, steps, nvtx, *flags = argv
    import train_gpt2

    watched = watch(train_gpt2.Trainer, Path(out), int(warm), int(plain), int(steps), nvtx == "1")
    train_gpt2.Trainer = watched  # type: ignore[misc,assignment]
    return train_gpt2.main(list(flags))


# --- the command -------------------------------------------------------------------------------------------

WARM, PLAIN, STEPS = 5, 10, 3


def trainer_flags(recipe: str, flags: Sequence[str], out: Path, steps: int, warm: int, plain: int) -> list[str]:
    """The profiled run's command line: short, one val row, no checkpoints. Raises UserError for bad flags."""
    from train_gpt2 import parse_args

    total = warm + plain + steps + 2
    cfg = parse_args([recipe, *flags])
    return [
        recipe,
        *flags,
        *("--run-dir", str(out / "run"), "--max-steps", str(total), "--max-minutes", "0", "--resume", ""),
        *("--val-every", "0", "--val-tokens", str(cfg.seq_len)),
        *("--checkpoint-every", "0", "--on-finish", "", "--wandb", "off", "--epochs", "1000000"),
    ]


def profile(
    recipe: str,
    flags: Sequence[str],
    out: Path,
    gpus: int = 1,
    steps: int = STEPS,
    warm: int = WARM,
    plain: int = PLAIN,
    nvtx: bool = False,
    process: Callable[[Sequence[str]], int] = run_process,
) -> dict[str, Any]:
    """Runs the profile and writes profile.json and profile.png into `out`.

    Raises UserError where the training ends early; its own message has been printed then.
    """
    train = trainer_flags(recipe, flags, out, steps, warm, plain)
    out.mkdir(parents=True, exist_ok=True)
    own = [str(out), str(warm), str(plain), str(steps), str(int(nvtx)), *train]
    code = process([*launcher(gpus), "-m", "harness.profile", *own])
    if code or not (out / "rank-0.json").exists():
        raise UserError(f"the profiled training ended with exit code {code}; see its message above")
    content = summarize(out)
    temporary = out / f".profile.json.{os.getpid()}"
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(out / "profile.json")
    draw(content, out / "profile.png")
    return content


def statement(content: dict[str, Any]) -> str:
    """The profile as a person reads it."""
    gb = 1e9
    speed = f"{content['tokens_per_s']:,.0f} tokens/s"
    if content["mfu"] is not None:
        speed += f", MFU {content['mfu']:.1%}"
        if content["hardware_utilization"] > content["mfu"]:
            speed += f" ({content['hardware_utilization']:.1%} of the peak with recomputation counted)"
    else:
        speed += f", {content['achieved_tflops']:.3g} TFLOP/s (no known peak for this device, so no MFU)"
    lines = [
        f"{content['recipe']} on {content['world_size']} x {content['device']}: "
        f"{content['step_ms']:.1f} ms a step ({content['profiled_step_ms']:.1f} under the profiler), {speed}",
        "",
        "ms per step".ljust(24) + "".join(f"rank {r['rank']}".rjust(10) for r in content["ranks"]) + "     share",
    ]
    for part in PARTS:
        cells = "".join(f"{r['parts_ms'][part]:10.2f}" for r in content["ranks"])
        share = content["parts_ms"][part] / content["profiled_step_ms"]
        lines.append(part.replace("_", " ").ljust(24) + cells + f"{share:10.1%}")
    memory = content["memory_bytes"]
    lines += [
        "",
        "memory, GB: " + ", ".join(f"{name} {size / gb:.3f}" for name, size in memory.items()),
        f"binding limit: {content['sentence']}",
        *(f"warning: {text}" for text in content["warnings"]),
    ]
    return "\n".join(lines)


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "profile",
        help="split a steady training step and name the binding limit",
        usage="python -m harness profile RECIPE [options] [trainer flags]",
    )
    parser.add_argument("recipe", help="recipe to profile")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="options below, and flags for the trainer")
    _options(parser)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=1, help="ranks on this node (default 1)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps under the profiler (default {STEPS})")
    parser.add_argument("--warm", type=int, default=WARM, help=f"steps before anything is measured (default {WARM})")
    parser.add_argument("--plain", type=int, default=PLAIN, help=f"steps timed without the profiler (default {PLAIN})")
    parser.add_argument("--out", type=Path, help="folder to write to (default: runs/profile-RECIPE-DATE)")
    parser.add_argument("--nvtx", action="store_true", help="also mark the phases for Nsight Systems")
    parser.add_argument("--json", action="store_true", help="print profile.json instead of the table")


def run(args: argparse.Namespace) -> int:
    # The options may stand among the trainer's flags.
    own = argparse.ArgumentParser(prog="python -m harness profile", allow_abbrev=False, add_help=False)
    _options(own)
    args, flags = own.parse_known_args(args.rest, namespace=args)
    flags = [flag for flag in flags if flag != "--"]
    for name in ("gpus", "steps", "warm", "plain"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(args, name)}")
    out = args.out or Path("runs") / f"profile-{args.recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    if (out / "run").exists():
        raise UserError(f"{out} holds a profile already; choose another --out")
    content = profile(args.recipe, flags, out, args.gpus, args.steps, args.warm, args.plain, args.nvtx)
    print(json.dumps(content, indent=1) if args.json else statement(content))
    if not args.json:
        print(f"written: {out / 'profile.json'}, {out / 'profile.png'} and the traces")
    return 0


if __name__ == "__main__":
    sys.exit(rank_main(sys.argv[1:]))
