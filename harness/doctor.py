"""Check the machine and a config against known mistakes before a run is paid for.

    python -m harness doctor [CONFIG] [--gpus N] [--spot] [--rented] [--json] [-- TRAINER FLAGS]

CONFIG is a recipe of the trainer, a run directory, or a JSON file of config fields. Exit code: 0 nothing to
mend, 1 a warning, 3 an error (2 is bad input). Facts are gathered by `probe`, with real calls; the rules
below them are pure functions of those facts, so that each can be tested on a made case.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from harness.common import UserError, find_runs, human_count, read_json

Config = dict[str, Any]
SEVERITIES = ("info", "warning", "error")
EXIT_CODES = {"info": 0, "warning": 1, "error": 3}
GIB = 2**30
TRAINER_FLAGS = True
SHORT_STEPS = 100  # a run of so few steps looks for bugs, not for a result
LONG_STEPS = 2000  # a run of so many steps repays compilation many times over
LARGE_GPU = 80e9  # bytes; a card of this size is rented to train, not to debug
SLOW_DISK = 100e6  # bytes/s; a 1.5 GB checkpoint takes 15 s and more
HIGH_ADAMW_LR = 3e-4  # above it an AdamW transformer needs warm-up or clipping (GPT-2 124M runs 6e-4 with both)
HOT_CELSIUS = 85  # data-centre GPUs begin to lower their clocks near 87 C


@dataclass(frozen=True)
class Finding:
    """One mistake: what it is, what it costs, how to mend it."""

    check: str
    severity: str
    what: str
    why: str
    fix: str


@dataclass(frozen=True)
class GpuState:
    """One GPU as found: memory in bytes, clocks in MHz, temperature in Celsius."""

    name: str
    memory: int
    free: int
    capability: tuple[int, int]
    temperature: float | None = None
    clock_limit: float | None = None
    clock_max: float | None = None
    slowdown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """Facts about the machine. A field that could not be found out is None and its rule is silent."""

    gpus: tuple[GpuState, ...] = ()
    cuda_problem: str | None = None  # why torch cannot use a GPU that is there
    driver: str | None = None
    torch: str = ""
    cuda: str | None = None
    attention: dict[str, str | None] = field(default_factory=dict)  # backend -> None, or why its call failed
    collective: str | None = None  # why a real all-reduce failed
    collective_backend: str = "gloo"
    ram_available: int | None = None
    shared_memory: int | None = None
    open_files: int | None = None
    disk_free: int | None = None
    disk_speed: float | None = None
    busy_port: int | None = None
    rented: str | None = None  # the sign by which a rented machine was recognized
    spot: bool = False


@dataclass(frozen=True)
class Context:
    """What the rules look at."""

    machine: Machine
    config: Config | None = None
    world_size: int = 1
    train_tokens: int | None = None  # in the shards of the config's data directory
    leaked_documents: int = 0
    parameters: int | None = None
    muon_strays: tuple[str, ...] = ()  # parameters under Muon that are no matrices inside blocks
    bf16_control: bool = False  # a finished bf16 run of the same recipe is at hand
    environment: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        return default if self.config is None else self.config.get(name, default)

    @property
    def on_gpu(self) -> bool:
        return bool(self.machine.gpus) and self.get("device") != "cpu"

    @property
    def steps(self) -> int:
        return int(self.get("max_steps", 0) or 0)


Rule = Callable[[Context], Iterator[Finding]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def examine(context: Context) -> list[Finding]:
    """All findings, the worst first."""
    findings = [finding for check in RULES for finding in check(context)]
    return sorted(findings, key=lambda f: -SEVERITIES.index(f.severity))


# --------------------------------------------------------------------------------- rules: the machine


@rule
def gpu_usable(c: Context) -> Iterator[Finding]:
    if c.machine.cuda_problem:
        yield Finding(
            "gpu",
            "error",
            f"torch cannot use the GPU: {c.machine.cuda_problem}",
            "training would fall back to the CPU, hundreds of times slower",
            "install the driver that this torch build needs, or the torch build that this driver takes",
        )


@rule
def no_gpu(c: Context) -> Iterator[Finding]:
    large = (c.parameters or 0) > 5e7
    if large and not c.machine.gpus and not c.machine.cuda_problem:
        yield Finding(
            "no-gpu",
            "warning",
            f"no GPU for a model of {human_count(c.parameters or 0)} parameters",
            "a step takes minutes on a CPU: the run would take weeks",
            "rent a GPU (python -m harness plan), or use the sample recipe here",
        )


@rule
def gpu_free(c: Context) -> Iterator[Finding]:
    for i, gpu in enumerate(c.machine.gpus):
        if gpu.free < 0.9 * gpu.memory:
            yield Finding(
                "gpu-busy",
                "warning",
                f"GPU {i} has {gpu.free / GIB:.1f} of {gpu.memory / GIB:.1f} GiB free",
                "another process shares it: measured speed is wrong, and memory may run out",
                "end the other process (nvidia-smi lists it), or choose GPUs with CUDA_VISIBLE_DEVICES",
            )


@rule
def mixed_gpus(c: Context) -> Iterator[Finding]:
    if len({gpu.name for gpu in c.machine.gpus}) > 1:
        yield Finding(
            "gpu-mixed",
            "warning",
            "the GPUs differ: " + ", ".join(g.name for g in c.machine.gpus),
            "every step waits for the slowest",
            "choose equal ones with CUDA_VISIBLE_DEVICES",
        )


@rule
def clocks(c: Context) -> Iterator[Finding]:
    for i, gpu in enumerate(c.machine.gpus):
        hot = gpu.temperature is not None and gpu.temperature >= HOT_CELSIUS
        if gpu.slowdown or hot:
            reason = ", ".join(gpu.slowdown) or f"{gpu.temperature:.0f} C"
            yield Finding(
                "clock",
                "warning",
                f"GPU {i} is slowed down or about to be: {reason}",
                "throughput falls during the run, and comparisons with other runs are void",
                "report it to the provider or move to another machine; check airflow on your own",
            )
        if gpu.clock_limit is not None and gpu.clock_max and gpu.clock_limit < 0.9 * gpu.clock_max:
            yield Finding(
                "clock-limit",
                "warning",
                f"GPU {i}'s clock is limited to {gpu.clock_limit:.0f} of {gpu.clock_max:.0f} MHz",
                "compute-bound steps take longer by that ratio",
                "nvidia-smi -rgc resets the limit",
            )


@rule
def attention_backends(c: Context) -> Iterator[Finding]:
    asked, backends = c.get("attention", "auto"), c.machine.attention
    if asked in backends and backends[asked] is not None:
        yield Finding(
            "attention",
            "error",
            f"the attention backend {asked!r} fails here: {backends[asked]}",
            "the run would end at its first step",
            "leave attention at auto, which takes one that works",
        )
    fast = [name for name in backends if name != "math"]
    if c.on_gpu and fast and all(backends[name] is not None for name in fast):
        yield Finding(
            "attention",
            "warning",
            "no fused attention backend works here: only the math one does",
            "it keeps T x T scores: several times slower, and memory grows with the square of T",
            "use a GPU of compute capability 8.0 or newer, and a current torch build",
        )


@rule
def collectives(c: Context) -> Iterator[Finding]:
    if c.machine.collective:
        yield Finding(
            "collective",
            "error",
            f"an all-reduce over {c.machine.collective_backend} failed: {c.machine.collective}",
            "a run on several ranks would hang or end at its start",
            "repeat with NCCL_DEBUG=INFO; in a container give --shm-size=8g and --ulimit memlock=-1",
        )


@rule
def shared_memory(c: Context) -> Iterator[Finding]:
    size = c.machine.shared_memory
    if size is not None and c.world_size > 1 and size < GIB:
        yield Finding(
            "shared-memory",
            "warning",
            f"/dev/shm has {size / 2**20:.0f} MiB",
            "ranks exchange data through it (64 MiB is a container's default) and would end with a bus error",
            "start the container with --shm-size=8g or --ipc=host",
        )


@rule
def open_files(c: Context) -> Iterator[Finding]:
    limit = c.machine.open_files
    if limit is not None and limit < 1024:
        yield Finding(
            "open-files",
            "warning",
            f"only {limit} open files are allowed",
            "shards, sockets and checkpoint files of all ranks need more",
            "ulimit -n 65536",
        )


@rule
def disk(c: Context) -> Iterator[Finding]:
    speed, free = c.machine.disk_speed, c.machine.disk_free
    size = 12 * c.parameters if c.parameters else None
    if speed is not None and speed < SLOW_DISK:
        took = f"a checkpoint of {size / 1e9:.1f} GB takes {size / speed:.0f} s" if size else "checkpoints wait for it"
        yield Finding(
            "disk-speed",
            "warning",
            f"the disk writes {speed / 1e6:.0f} MB/s",
            took,
            "put --run-dir on a local SSD",
        )
    if free is not None and size and free < 4 * size:
        yield Finding(
            "disk-space",
            "error",
            f"{free / 1e9:.1f} GB of disk are free",
            f"checkpoints of {size / 1e9:.1f} GB, of which up to three exist at once, would fill it",
            "make room, or put --run-dir on a larger disk",
        )


@rule
def port(c: Context) -> Iterator[Finding]:
    if c.machine.busy_port is not None and c.world_size > 1:
        yield Finding(
            "port",
            "warning",
            f"port {c.machine.busy_port} is in use",
            "torchrun without --standalone ends with 'address already in use': often a dead job's orphan",
            "end that process, start with --standalone, or set MASTER_PORT",
        )


@rule
def ram(c: Context) -> Iterator[Finding]:
    if c.machine.ram_available is not None and c.parameters and c.get("checkpoint_every", "auto") != "0":
        need = 12 * c.parameters  # each tensor is staged by one rank only
        if need > c.machine.ram_available:
            yield Finding(
                "memory",
                "error",
                f"{c.machine.ram_available / 1e9:.1f} GB of memory are free",
                f"checkpoints are staged there, {need / 1e9:.1f} GB each",
                "close other programs, or rent a machine with more memory",
            )


# ---------------------------------------------------------------------------------- rules: the config


@rule
def fp16_where_bf16_exists(c: Context) -> Iterator[Finding]:
    native = all(gpu.capability >= (8, 0) for gpu in c.machine.gpus)
    if c.get("precision") == "fp16" and c.on_gpu and native:
        yield Finding(
            "fp16",
            "warning",
            "precision is fp16 on a GPU with native bf16",
            "fp16's narrow range needs a loss scaler, skips steps and still overflows; the speed is the same",
            "--precision bf16",
        )


@rule
def bf16_missing(c: Context) -> Iterator[Finding]:
    old = [gpu.name for gpu in c.machine.gpus if gpu.capability < (8, 0)]
    if c.on_gpu and old and c.get("precision") == "bf16":
        yield Finding(
            "bf16",
            "warning",
            f"{old[0]} has no native bf16",
            "it is emulated, several times slower than fp16 there",
            "--precision fp16",
        )


@rule
def fp8_support(c: Context) -> Iterator[Finding]:
    old = [gpu.name for gpu in c.machine.gpus if gpu.capability < (8, 9)]
    if uses_fp8(c) and c.on_gpu and old:
        yield Finding(
            "fp8-support",
            "warning",
            f"fp8 is asked for and {old[0]} has none",
            "it falls back to 16 bits: slower than planned, and not the run that was planned",
            "use Ada, Hopper or newer, or --head-precision same",
        )


@rule
def fp8_without_control(c: Context) -> Iterator[Finding]:
    if uses_fp8(c) and not c.bf16_control:
        yield Finding(
            "fp8-control",
            "warning",
            "fp8 without a finished bf16 run of the same recipe",
            "a loss that fp8 made worse cannot be told from one that the recipe made",
            "run the same recipe in bf16 first, then compare with python -m harness regress",
        )


def uses_fp8(c: Context) -> bool:
    """True where any field asks for fp8, by its value or by a switch with fp8 in its name."""
    fields = (c.config or {}).items()
    return any(
        "fp8" in str(value).lower() or ("fp8" in key and value not in (False, "off", "none", "", 0, None))
        for key, value in fields
        if key not in ("run_dir", "data")
    )


@rule
def unsteady_start(c: Context) -> Iterator[Finding]:
    # Muon's update has a fixed size, so it starts without either; AdamW's first steps do not.
    steep = c.get("optimizer") == "adamw" and (c.get("lr") or 0) > HIGH_ADAMW_LR
    if steep and not c.get("warmup_steps") and not c.get("clip"):
        yield Finding(
            "unsteady-start",
            "warning",
            f"AdamW at lr {c.get('lr'):g} with neither warm-up nor gradient clipping",
            "Adam's second moment is noise in the first steps: a spike there may never heal",
            "--warmup-steps 700 --clip 1.0, or a lower --lr",
        )


@rule
def recomputed_attention(c: Context) -> Iterator[Finding]:
    if recomputation(c) in ("block", "full", "per-block", "whole-block"):
        yield Finding(
            "recompute-attention",
            "warning",
            "whole blocks are recomputed, attention included",
            "attention is the costliest thing to compute twice, and fused kernels keep little of it",
            "use selective recomputation, which keeps attention's output",
        )


def recomputation(c: Context) -> str:
    for name in ("recompute", "activation_checkpointing", "checkpoint_activations"):
        if c.get(name) is not None:
            return str(c.get(name))
    return "none"


@rule
def one_checkpoint(c: Context) -> Iterator[Finding]:
    if c.config is not None and c.get("keep", 2) < 2:
        yield Finding(
            "one-checkpoint",
            "error",
            f"{c.get('keep')} checkpoint is kept",
            "one that turns out damaged is the whole run",
            "--keep 2 or more",
        )


@rule
def no_checkpoints(c: Context) -> Iterator[Finding]:
    if c.machine.spot and str(c.get("checkpoint_every", "auto")) == "0":
        yield Finding(
            "no-checkpoints",
            "error",
            "checkpoints are off on a spot machine",
            "a preemption loses everything",
            "--checkpoint-every auto",
        )


@rule
def local_checkpoints(c: Context) -> Iterator[Finding]:
    if c.machine.spot and c.config is not None and not c.get("mirror"):
        yield Finding(
            "local-checkpoints",
            "error",
            "checkpoints stay on the spot machine's own disk",
            "a preempted machine often takes its disk along",
            "--mirror s3://bucket/run, or a network disk",
        )


@rule
def needless_sharding(c: Context) -> Iterator[Finding]:
    if sharded(c) and fits_whole(c):
        yield Finding(
            "needless-sharding",
            "warning",
            f"parallel is {c.get('parallel')} and the model's state fits on every GPU whole",
            "gathering weights each step costs time and saves memory that nobody needs",
            "--parallel ddp, the control; shard when a profile names memory as the limit",
        )


def sharded(c: Context) -> bool:
    return any(word in str(c.get("parallel", "")).lower() for word in ("zero", "fsdp"))


def fits_whole(c: Context) -> bool:
    """True where 16 bytes a parameter take at most half of the smallest GPU."""
    if not c.parameters or not c.machine.gpus:
        return False
    return 16 * c.parameters <= 0.5 * min(gpu.memory for gpu in c.machine.gpus)


@rule
def needless_tensor_parallel(c: Context) -> Iterator[Finding]:
    wanted = int(c.get("tensor_parallel", 1) or 1) > 1 or str(c.get("parallel", "")).lower() in (
        "tp",
        "tensor",
    )
    if wanted and fits_whole(c):
        yield Finding(
            "tensor-parallel",
            "warning",
            "tensor parallelism for a model that fits on one GPU",
            "two all-reduces in every layer, none of which hides",
            "--parallel ddp",
        )


@rule
def full_state_dict(c: Context) -> Iterator[Finding]:
    if sharded(c) and (c.get("full_state_dict") or c.get("checkpoint_state") == "full"):
        yield Finding(
            "full-state",
            "error",
            "sharded training that gathers the full state on one rank to save it",
            "that rank runs out of memory just when the model no longer fits, and all others wait",
            "save sharded; build one weights file from the shards afterwards",
        )


@rule
def debugging_on_many(c: Context) -> Iterator[Finding]:
    if c.on_gpu and 0 < c.steps <= SHORT_STEPS:
        large = max(gpu.memory for gpu in c.machine.gpus) >= LARGE_GPU
        if c.world_size > 1 or large:
            what = f"{c.world_size} GPUs" if c.world_size > 1 else c.machine.gpus[0].name
            yield Finding(
                "debug-large",
                "info",
                f"a run of {c.steps} steps on {what}",
                "looking for bugs costs the same minutes on a small card, at a tenth of the price",
                "debug on the GPU that python -m harness plan names; measure here when it works",
            )


@rule
def eager_long(c: Context) -> Iterator[Finding]:
    if c.on_gpu and c.get("compile") == "off" and c.steps >= LONG_STEPS:
        yield Finding(
            "eager",
            "warning",
            f"compilation is off for {c.steps:,} steps",
            "eager steps take about twice as long; compiling costs a minute once",
            "--compile auto",
        )


@rule
def autotune_short(c: Context) -> Iterator[Finding]:
    if "max-autotune" in str(c.get("compile_mode")) and 0 < c.steps < LONG_STEPS:
        yield Finding(
            "autotune",
            "warning",
            f"max-autotune for {c.steps:,} steps",
            "it times kernels for minutes to save a few percent of each step",
            "--compile-mode default",
        )


@rule
def deterministic_long(c: Context) -> Iterator[Finding]:
    if c.on_gpu and c.get("deterministic") and c.steps >= LONG_STEPS:
        yield Finding(
            "deterministic",
            "warning",
            f"deterministic mode for {c.steps:,} steps",
            "slower kernels for the whole run; resuming is exact to float tolerance without it",
            "keep it for short comparisons",
        )


@rule
def muon_everywhere(c: Context) -> Iterator[Finding]:
    if c.muon_strays:
        yield Finding(
            "muon-strays",
            "error",
            f"Muon would update {', '.join(c.muon_strays[:3])}",
            "orthogonalizing an embedding, head or scalar has no meaning, and learning suffers",
            "give AdamW everything but the matrices inside blocks",
        )


@rule
def no_stop_action(c: Context) -> Iterator[Finding]:
    if c.machine.rented and c.config is not None and not c.get("on_finish"):
        yield Finding(
            "no-stop",
            "warning",
            f"this machine is rented ({c.machine.rented}) and nothing stops it at the end",
            "it is billed until someone remembers it",
            "--on-finish 'sudo poweroff', or the provider's command",
        )


@rule
def batch_and_ranks(c: Context) -> Iterator[Finding]:
    batch, micro, seq_len = (c.get(name) for name in ("batch_tokens", "micro_batch", "seq_len"))
    if batch and micro and seq_len and batch % (micro * seq_len * c.world_size):
        yield Finding(
            "batch",
            "error",
            f"{batch:,} tokens a step are no multiple of {c.world_size} ranks x {micro} x {seq_len}",
            "the global batch would change with the number of ranks, and with it what is learned",
            "choose --micro-batch or the number of GPUs so that it divides",
        )
    if c.get("batch_per_rank"):
        yield Finding(
            "batch",
            "error",
            "the batch is given per rank",
            "the global batch changes with the number of ranks, and with it what is learned",
            "give the global batch, --batch-tokens",
        )


@rule
def short_data(c: Context) -> Iterator[Finding]:
    budget = c.steps * int(c.get("batch_tokens", 0) or 0)
    passes = max(1, int(c.get("epochs", 0) or 0))
    if c.train_tokens is not None and budget > passes * c.train_tokens:
        yield Finding(
            "short-data",
            "error",
            f"{human_count(budget)} tokens are asked for and {c.get('data')} has {human_count(c.train_tokens)}",
            "the run would be refused, or repeat text without saying so",
            "fetch more (python -m data fetch), or allow repetition with --epochs",
        )


@rule
def val_in_train(c: Context) -> Iterator[Finding]:
    if c.leaked_documents:
        yield Finding(
            "val-in-train",
            "error",
            f"{c.leaked_documents} documents of the val shards begin like train ones",
            "the val loss would measure memory",
            "python -m data leak shows them; rebuild the shards",
        )


SECRET_NAME = re.compile(r"(token|secret|passw|api_?key|credential)", re.IGNORECASE)
SECRET_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{16}|Bearer\s+\S{8,}"
    r"|://[^/\s:@]+:[^/\s@]+@|xox[abpr]-[A-Za-z0-9-]{10,}"
)


@rule
def logged_secret(c: Context) -> Iterator[Finding]:
    secrets = {name: v for name, v in c.environment.items() if SECRET_NAME.search(name) and len(v) >= 8}
    for name, value in (c.config or {}).items():
        text = str(value)
        known = [variable for variable, secret in secrets.items() if secret in text]
        if known or SECRET_VALUE.search(text):
            what = f"${known[0]}" if known else "something that looks like an access token"
            yield Finding(
                "secret",
                "error",
                f"--{name.replace('_', '-')} contains {what}",
                "the config is saved in the run directory and shown in reports and W&B",
                "let the command read it from the environment when it runs: '... $NAME' in single quotes",
            )


# -------------------------------------------------------------------------------------------- probing


def probe(run_root: Path, spot: bool, rented: bool) -> Machine:
    """Find out the facts, by real calls. Takes a few seconds on a CPU, under 20 s on eight GPUs."""
    import psutil
    import torch

    usable = torch.cuda.is_available()
    gpus = tuple(gpu_states()) if usable else ()
    problem = None
    if not usable and shutil.which("nvidia-smi"):
        problem = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, driver {driver_version()}"
    backend = "nccl" if usable else "gloo"
    free, speed = disk_facts(run_root)
    return Machine(
        gpus=gpus,
        cuda_problem=problem,
        driver=driver_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        attention=try_attention("cuda" if usable else "cpu"),
        collective=try_all_reduce(backend, max(1, len(gpus))),
        collective_backend=backend,
        ram_available=psutil.virtual_memory().available,
        shared_memory=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        disk_free=free,
        disk_speed=speed,
        busy_port=find_busy_port(int(os.environ.get("MASTER_PORT", "29500"))),
        rented="you said so" if rented or spot else rented_sign(os.environ),
        spot=spot,
    )


def nvidia_smi(fields: str) -> list[list[str]]:
    """Rows of `nvidia-smi --query-gpu`, or none where it cannot be asked."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def driver_version() -> str | None:
    rows = nvidia_smi("driver_version")
    return rows[0][0] if rows else None


def gpu_states() -> Iterator[GpuState]:
    """Memory and capability from torch; temperature, clocks and slow-downs from nvidia-smi, matched "
    "by UUID."""
    import torch

    slowdowns = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
    fields = ["uuid", "temperature.gpu", "clocks.applications.graphics", "clocks.max.graphics"]
    rows = nvidia_smi(",".join(fields + [f"clocks_throttle_reasons.{name}" for name in slowdowns]))
    by_uuid = {row[0].removeprefix("GPU-"): row[1:] for row in rows}

    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:  # "[N/A]" and the like
            return None

    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        state = GpuState(properties.name, total, free, (properties.major, properties.minor))
        if row := by_uuid.get(str(properties.uuid).removeprefix("GPU-")):
            active = tuple(name for name, value in zip(slowdowns, row[3:]) if value == "Active")
            state = dataclasses.replace(
                state,
                temperature=number(row[0]),
                clock_limit=number(row[1]),
                clock_max=number(row[2]),
                slowdown=active,
            )
        yield state


def try_attention(device: str) -> dict[str, str | None]:
    """Forward and backward of causal attention on each backend: None where it works, else why not."""
    import warnings

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    backends = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    if device == "cpu":
        backends = {name: backends[name] for name in ("flash", "math")}  # the others are CUDA only
    result: dict[str, str | None] = {}
    for name, backend in backends.items():
        q = torch.randn(1, 2, 128, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        try:
            with warnings.catch_warnings(), sdpa_kernel(backend):
                warnings.simplefilter("ignore")
                scaled_dot_product_attention(q, q, q, is_causal=True).float().sum().backward()
            assert q.grad is not None and bool(q.grad.isfinite().all())
            result[name] = None
        except (RuntimeError, AssertionError) as error:
            result[name] = str(error).split("\n")[0] or "not finite"
    return result


def try_all_reduce(backend: str, ranks: int, timeout: float = 15) -> str | None:
    """A real all-reduce over all GPUs (or one gloo rank): None if the sum is right, else what went wrong.

    Each rank is a process of its own, as in training, and is ended if it hangs.
    """
    import torch.multiprocessing as mp

    context = mp.get_context("spawn") if backend == "nccl" else mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        workers = [
            context.Process(target=all_reduce_rank, args=(backend, rank, ranks, folder, results), daemon=True)
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        deadline = time.monotonic() + timeout
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, worker in enumerate(workers) if worker.is_alive()]
        for rank in hung:
            workers[rank].kill()
        if hung:
            return f"rank {hung[0]} did not answer in {timeout:.0f} s"
        problems = [results.get() for _ in workers if not results.empty()]
        failed = [problem for problem in problems if problem]
        if failed:
            return str(failed[0])
        if len(problems) < ranks:
            return "a rank ended without an answer"
    return None


def all_reduce_rank(backend: str, rank: int, ranks: int, folder: str, results: Any) -> None:
    """One rank of the trial: sums rank + 1 over all ranks and puts None or the error into `results`."""
    import torch
    import torch.distributed as dist

    try:
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        store = f"file://{folder}/store"
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=10))
        value = torch.full((1024,), float(rank + 1), device=device)
        dist.all_reduce(value)
        expected = ranks * (ranks + 1) / 2
        wrong = not bool((value == expected).all())
        dist.destroy_process_group()
        results.put(f"the sum was {value[0].item():g} instead of {expected:g}" if wrong else None)
    except Exception as error:  # whatever it is, it is the finding
        results.put(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def disk_facts(folder: Path, size: int = 64 * 2**20) -> tuple[int, float]:
    """Free bytes, and bytes per second of writing `size` bytes durably, in the nearest existing folder."""
    existing = folder.absolute()
    while not existing.is_dir():
        existing = existing.parent
    block = os.urandom(2**20)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            start = time.perf_counter()
            for _ in range(size // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - start
    except OSError as error:
        raise UserError(f"nothing can be written in {existing}: {error.strerror}; choose another --run-dir") from None
    return shutil.disk_usage(existing).free, size / seconds


def find_busy_port(port_number: int) -> int | None:
    with socket.socket() as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind(("", port_number))
        except OSError:
            return port_number
    return None


def rented_sign(environment: Any) -> str | None:
    """The environment variable that a GPU-rental service sets, if one is there."""
    signs = (
        "RUNPOD_POD_ID",
        "VAST_CONTAINERLABEL",
        "LAMBDA_INSTANCE_ID",
        "MODAL_TASK_ID",
        "PAPERSPACE_METRIC_URL",
    )
    return next((sign for sign in signs if environment.get(sign)), None)


def leaked_documents(data: Path, length: int = 64, limit: int = 10) -> int:
    """Documents of the val shards whose first `length` tokens also begin a document of the train shards.

    A quick sign over at most `limit` train shards; `python -m data leak` looks at whole documents.
    """
    import numpy as np

    from train_gpt2 import EOT, find_shards, open_shard

    weights = np.random.default_rng(0).integers(1, 2**63, size=length, dtype=np.uint64)

    def openings(shards: Iterable[Path]) -> np.ndarray:
        """64-bit hashes of the first tokens of every document that is long enough."""
        hashes = []
        for shard in shards:
            tokens = np.asarray(open_shard(shard))
            starts = np.flatnonzero(tokens == EOT) + 1
            ends = np.append(starts[1:] - 1, len(tokens))
            starts = starts[ends - starts >= length]
            rows = tokens[starts[:, None] + np.arange(length)].astype(np.uint64)
            hashes.append((rows * weights).sum(axis=1, dtype=np.uint64))
        return np.concatenate(hashes)

    val, train = openings(find_shards(data, "val")), openings(find_shards(data, "train")[:limit])
    return len(np.intersect1d(val, train))


# ---------------------------------------------------------------------------------------- the command


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "doctor",
        help="check the machine and a config against known mistakes",
        usage="python -m harness doctor [CONFIG] [options] [-- TRAINER FLAGS]",
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="recipe, run directory, or JSON file of fields")
    parser.add_argument("--gpus", type=int, help="ranks the run will have (default: all GPUs, or 1)")
    parser.add_argument("--spot", action="store_true", help="this machine can be taken away at any moment")
    parser.add_argument("--rented", action="store_true", help="this machine is paid for by the hour")
    parser.add_argument("--json", action="store_true", help="findings as JSON")


def run(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.trainer_flags)
    run_dir = Path((config or {}).get("run_dir") or "runs")
    spot = args.spot or bool((config or {}).get("spot_mtbf_hours"))
    machine = probe(run_dir, spot, args.rented)
    context = Context(machine, config, args.gpus or max(1, len(machine.gpus)), environment=dict(os.environ))
    if config is not None:
        context = dataclasses.replace(context, **config_facts(config))
    findings = examine(context)
    if args.json:
        report = {
            "machine": dataclasses.asdict(machine),
            "findings": [dataclasses.asdict(f) for f in findings],
        }
        print(json.dumps({"schema": 1, **report}, indent=2))
    else:
        print(describe(machine))
        for finding in findings:
            print(render(finding))
        print(f"{len(findings)} to look at" if findings else "nothing to mend")
    return max((EXIT_CODES[f.severity] for f in findings), default=0)


def load_config(what: str | None, flags: list[str]) -> Config | None:
    """Fields of a recipe (with the trainer's flags), a run directory or a JSON file. Raises UserError."""
    if what is None:
        if flags:
            raise UserError("trainer flags need a recipe: doctor RECIPE -- FLAGS")
        return None
    from train_gpt2 import RECIPES, Config, parse_args

    if what in RECIPES:
        return dataclasses.asdict(parse_args([what, *flags]))
    if flags:
        raise UserError(f"trainer flags change a recipe ({', '.join(RECIPES)}), and {what!r} is none")
    path = Path(what)
    if path.is_dir():
        return dataclasses.asdict(Config()) | read_json(path / "config.json")["config"]
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{what!r} is no recipe ({', '.join(RECIPES)}), run directory or JSON file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{what} cannot be read as JSON: {error}") from None
    base = None
    if isinstance(fields, dict) and isinstance(fields.get("config"), dict):  # a run's own config.json, whole: a field that
        fields, base = fields["config"], Config()  # it lacks is younger than the run and meant the default
    if not isinstance(fields, dict) or fields.get("recipe", "gpt2") not in RECIPES:
        raise UserError(f"{what} holds no config: an object of fields is expected, with a known recipe")
    return dataclasses.asdict(base or RECIPES[fields.get("recipe", "gpt2")]) | fields


def config_facts(config: Config) -> dict[str, Any]:
    """What the rules need to know about a config, read from the trainer's own functions and from the data."""
    import torch

    from train_gpt2 import GPT, Config, TokenStream, find_shards, is_muon

    cfg = Config(**{f.name: config[f.name] for f in dataclasses.fields(Config)})
    with torch.device("meta"):
        parameters = dict(GPT(cfg).named_parameters())
    strays = tuple(n for n, p in parameters.items() if is_muon(n, cfg) and not (n.startswith("blocks.") and p.ndim == 2))
    facts: dict[str, Any] = {
        "parameters": sum(p.numel() for p in parameters.values()),
        "muon_strays": strays,
        "bf16_control": has_bf16_control(cfg.recipe),
    }
    data = Path(cfg.data)
    if any(data.glob("*_train_*.bin")):
        facts["train_tokens"] = len(TokenStream(find_shards(data, "train")))
        if any(data.glob("*_val_*.bin")):
            facts["leaked_documents"] = leaked_documents(data)
    return facts


def has_bf16_control(recipe: str) -> bool:
    """True if fp8 was accepted as a promotion, or if runs/ holds a finished run of the recipe that used none."""
    from harness import ledger

    if any(r["kind"] == "decision" and r["verdict"] == "accepted" and "fp8" in r["candidate"] for r in ledger.read()):
        return True
    for run_dir in find_runs():
        try:
            config, result = read_json(run_dir / "config.json"), read_json(run_dir / "result.json")
        except UserError:
            continue
        plain = not uses_fp8(Context(Machine(), config["config"]))
        if config["recipe"] == recipe and plain and result["exit_reason"] == "finished":
            return True
    return False


def describe(machine: Machine) -> str:
    """The machine in a few lines."""
    works = [name for name, problem in machine.attention.items() if problem is None]
    gpus = ", ".join(f"{gpu.name} ({gpu.memory / GIB:.0f} GiB)" for gpu in machine.gpus) or "none that torch can use"
    rows = [
        ("GPUs", gpus),
        (
            "software",
            f"torch {machine.torch}, CUDA {machine.cuda or 'none'}, driver {machine.driver or 'none'}",
        ),
        ("attention", f"{', '.join(works) or 'no backend'} ran forward and backward"),
        (
            "all-reduce",
            f"{machine.collective_backend} {'failed' if machine.collective else 'gave the right sum'}",
        ),
    ]
    if machine.ram_available is not None and machine.disk_free is not None and machine.disk_speed is not None:
        rows.append(
            (
                "memory, disk",
                f"{machine.ram_available / GIB:.1f} GiB free; {machine.disk_free / GIB:.1f} GiB free, "
                f"written at {machine.disk_speed / 1e6:,.0f} MB/s",
            )
        )
    return "\n".join(f"{name:14s}{text}" for name, text in rows)


def render(finding: Finding) -> str:
    """One finding as an indented paragraph."""
    first = f"{finding.severity.upper()} [{finding.check}] {finding.what}"
    body = [f"why: {finding.why}", f"fix: {finding.fix}"]
    fill = textwrap.TextWrapper(100, initial_indent="  ", subsequent_indent="       ")
    return "\n".join([textwrap.fill(first, 100, subsequent_indent="    "), *(fill.fill(line) for line in body)])
