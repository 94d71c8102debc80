"""Promote a scaling change, or reject it: measured against the control, gated in writing, recorded.

    python -m harness promote CANDIDATE [--recipe NAME] [--minutes-each M] [-- TRAINER FLAGS]
    python -m harness promote --candidate "--micro-batch 64" --objective throughput
    python -m harness promote --suite h200 --data DIR --minutes-each 1
    python -m harness promote list | show ID | accept ID

The smallest configuration that fits is the control. A candidate is a difference of two configs with a declared
objective, tolerance and reason. docs/promote.md explains the five gates.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from harness import gates, ledger
from harness import profile as profiles
from harness.common import SCHEMA, TRAINER, UserError, is_user_error, kill_family, launcher, read_json, without_flags

TRAINER_FLAGS = True
ACTIONS = ("list", "show", "accept")


# --- candidates --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A config difference with what it promises: `flags` for the candidate against `control` for the control."""

    name: str
    flags: tuple[str, ...]
    objective: str  # gates.OBJECTIVES
    addresses: tuple[str, ...]  # limits it takes away: profile.LIMITS, "capacity"
    tolerance: float  # nats of val loss
    rationale: str  # why this tolerance
    control: tuple[str, ...] = ()
    gpus: int = 1
    control_gpus: int = 1


EXACT = "the same operations in the same order: bit for bit"
ORDER = "the same sums in another order; bf16 training carries such differences to some thousandths of a nat"
FP8 = "0.25% of the loss, what DeepSeek-V3 reported for fp8 against bf16 (arXiv 2412.19437), is 0.009 at 3.7 nats"
MODEL = "another model: no worse than the control by more than two runs of one recipe differ"
CURVE = "another update rule: no worse than the control by more than two runs of one recipe differ"


def _c(
    name: str, flags: str, objective: str, addresses: str, tolerance: float, rationale: str, control: str = "", **more: int
) -> Candidate:
    return Candidate(
        name, tuple(flags.split()), objective, tuple(addresses.split()), tolerance, rationale, tuple(control.split()), **more
    )


CANDIDATES: dict[str, Candidate] = {
    c.name: c
    for c in (
        _c("cudnn-attention", "--attention cudnn", "throughput", "compute", 0.01, ORDER, "--attention flash"),
        _c("fa4-attention", "--attention fa4", "throughput", "compute", 0.01, ORDER, "--attention cudnn"),
        _c("flex-attention", "--attention flex", "throughput", "compute", 0.01, ORDER, "--attention cudnn"),
        _c("key-offset", "--key-offset true", "time_to_loss", "", 0.01, MODEL, "--key-offset false"),
        _c("tied-steps", "--tied-steps 4000", "time_to_loss", "", 0.01, MODEL, "--tied-steps 0"),
        _c("compile", "--compile on", "throughput", "memory launch", 0.01, ORDER, "--compile off"),
        _c(
            "max-autotune", "--compile on --compile-mode max-autotune-no-cudagraphs", "throughput", "compute memory", 0.01, ORDER,
            "--compile on",
        ),
        # 0.0018: three times GPT-2's rate, the best of those tried for AdamW in short runs.
        _c("muon", "--optimizer muon", "time_to_loss", "", 0.01, CURVE, "--optimizer adamw --lr 0.0018 --beta1 0.9"),
        _c("fp8-head", "--head-precision fp8", "throughput", "compute", 0.01, FP8, "--head-precision same"),
        _c("fp8-all-head", "--head-precision fp8-all", "throughput", "compute", 0.01, FP8, "--head-precision same"),
        _c("fused-mlp", "--fused-mlp auto", "throughput", "compute memory", 0.01, ORDER, "--fused-mlp off"),
        _c("fp8-rows-head", "--head-precision fp8-rows", "throughput", "compute", 0.01, FP8, "--head-precision same"),
        _c("selective-recompute", "--recompute selective", "throughput", "capacity", 0.01, ORDER, "--recompute off"),
        _c("block-recompute", "--recompute block", "throughput", "capacity", 0.01, ORDER, "--recompute off"),
        _c("fsdp2", "--parallel fsdp2", "throughput", "capacity", 0.01, ORDER),
        _c("fsdp3", "--parallel fsdp3", "throughput", "capacity", 0.01, ORDER),
        _c("micro-batch-64", "--micro-batch 64", "throughput", "memory launch", 0.01, ORDER, "--micro-batch 32"),
    )
}  # fmt: skip

# For N devices, asked for as NAME-N; 0 stands for N. The control of the first two is one device: is N worth it at all?
SEVERAL: dict[str, Candidate] = {
    c.name: c
    for c in (
        _c("owner", "--parallel owner", "throughput", "compute", 0.01, ORDER, gpus=0),
        _c("ddp", "--parallel ddp", "throughput", "compute", 0.01, ORDER, gpus=0),
        _c("owner-over-ddp", "--parallel owner", "throughput", "compute capacity", 0.01, ORDER, "--parallel ddp",
            gpus=0, control_gpus=0),
        _c("zero1", "--parallel zero1", "throughput", "capacity", 0.01, ORDER, "--parallel owner", gpus=0, control_gpus=0),
        _c("fsdp2", "--parallel fsdp2", "throughput", "capacity", 0.01, ORDER, "--parallel owner", gpus=0, control_gpus=0),
        _c("bf16-reduce", "--reduce-precision bf16", "throughput", "communication", 0.01, ORDER, "--reduce-precision fp32",
            gpus=0, control_gpus=0),
        _c("bucket-100", "--parallel ddp --ddp-bucket-mb 100", "throughput", "communication", 0.01, ORDER, "--parallel ddp",
            gpus=0, control_gpus=0),
    )
}  # fmt: skip
NAMES = (*CANDIDATES, *(f"{name}-N" for name in SEVERAL))

# Those of "h200" share runs: with these flags the bare recipe is the candidate of four and the control of the last two.
# Those of "kernels" too: it is the candidate of the first two and the control of the others but fp8-rows-head. They train without
# the two parts of "recipe", with which the losses of seeds differ by more than the tolerance in so short runs.
# Those of "devices" run on --gpus N, and share the run of `owner`.
SUITES: dict[str, tuple[tuple[str, ...], str]] = {
    "h200": (
        ("cudnn-attention", "compile", "muon", "fp8-all-head", "selective-recompute", "fsdp2"),
        "--attention cudnn --compile on",
    ),
    "kernels": (
        ("fp8-all-head", "fused-mlp", "flex-attention", "fp8-rows-head", "fa4-attention", "max-autotune"),
        "--attention cudnn --compile on --key-offset false --tied-steps 0",
    ),
    "recipe": (("key-offset", "tied-steps"), "--attention cudnn --compile on"),
    "devices": (("owner-over-ddp-N", "zero1-N", "fsdp2-N"), ""),
}


def find_candidate(name: str) -> Candidate:
    """The candidate of this name; of NAME-N the one on N devices. Raises UserError."""
    stem, _, count = name.rpartition("-")
    if name not in CANDIDATES and stem in SEVERAL and count.isdigit() and int(count) > 1:
        found = SEVERAL[stem]
        return replace(found, name=name, gpus=int(count), control_gpus=found.control_gpus or int(count))
    if name not in CANDIDATES:
        raise UserError(f"no candidate {name!r}; there are {', '.join(NAMES)} (N devices, at least 2), or give --candidate FLAGS")
    return CANDIDATES[name]


# --- trainings ---------------------------------------------------------------------------------------------


class Job(Protocol):
    """A training that has been started."""

    def alive(self) -> bool: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Process:
    """A training as a process group of its own; its output goes to a log, its largest memory to `peak`."""

    def __init__(self, argv: Sequence[str], gpus: int, log: Path, trainer: Path = TRAINER, restarts: int = 0):
        import psutil

        command = [*launcher(gpus, f"--max-restarts={restarts}"), str(trainer), *argv]
        log.parent.mkdir(parents=True, exist_ok=True)
        self.peak = 0
        with log.open("ab") as out:
            self.child = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)
        self.watched = psutil.Process(self.child.pid)
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    def _watch(self) -> None:
        import psutil

        while self.child.poll() is None:
            try:
                family = [self.watched, *self.watched.children(recursive=True)]
                self.peak = max(self.peak, sum(p.memory_info().rss for p in family))
            except psutil.Error:
                pass
            time.sleep(0.1)

    def alive(self) -> bool:
        return self.child.poll() is None

    def kill(self) -> None:
        """SIGKILL to every process of the training."""
        kill_family(self.child.pid)
        self.child.wait()

    def wait(self) -> int:
        try:
            return self.child.wait()
        except BaseException:  # Ctrl-C: nothing is left running
            self.kill()
            raise


class OutOfTime(Exception):
    """The time given to a suite is used up; what is finished is kept."""


@dataclass
class Lab:
    """Trains into one folder. A finished run of the same config is not made again."""

    folder: Path
    start: Callable[[Sequence[str], int, Path], Job] = lambda argv, gpus, log: Process(argv, gpus, log)
    profile: Callable[..., dict[str, Any]] = profiles.profile
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    deadline: float = float("inf")  # time.monotonic() after which nothing is started
    made: dict[str, list[tuple[int, Path]]] = field(default_factory=dict)  # arm -> (when, run)

    def train(self, name: str, argv: Sequence[str], gpus: int = 1) -> Path:
        """A run in folder/name: made now, or found finished. It may have ended in any way that left a result."""
        run = self.folder / name
        if (run / "result.json").exists():
            return run
        self.check_time()
        if run.exists():  # cut off by an earlier, interrupted call
            assert_idle(run)
            run.rename(run.with_name(f"{run.name}.cut-{time.time_ns()}"))
        log = run.with_name(run.name + ".log")
        began = time.time()
        job = self.start([*argv, "--run-dir", str(run)], gpus, log)
        code = job.wait()
        if not (run / "result.json").exists():
            raise UserError(f"{name} ended with exit code {code} and left no result: {last_line(log)}")
        launch = {"exit_code": code, "wall_s": time.time() - began, "host_peak_bytes": getattr(job, "peak", 0)}
        (run / "launch.json").write_text(json.dumps({"schema": SCHEMA, **launch}) + "\n")
        result = read_json(run / "result.json")
        rate = f"{result['tokens_per_s']:,.0f} tokens/s" if result["tokens_per_s"] else "no steady step"
        self.say(f"  {name}: {result['exit_reason']}, {rate}, val loss {result['val_loss']}, {launch['wall_s']:.0f} s in all")
        return run

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime("the time given is used up; the same command goes on from here")


def assert_idle(run: Path) -> None:
    """Raises UserError while a training of an earlier call still writes there: it would go on under the new one's name."""
    from train_gpt2 import lock_run

    if run.is_dir():
        lock_run(run, 0.0).close()


def last_line(log: Path) -> str:
    """What a training said last, errors first."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["it said nothing"])[-1][:300]


def kill_and_resume(lab: Lab, name: str, argv: Sequence[str], gpus: int = 1, steps: int = 40) -> dict[str, Any]:
    """SIGKILL at a random step, resume, and an unbroken twin: what gates.recovery_gate reads.

    `argv` lacks the step and checkpoint flags. The kill waits for the first whole checkpoint; a training that is over
    before it could be killed is a problem that is said, not a pass.
    """
    kept = lab.folder / name / "recovery.json"
    if kept.exists():
        return read_json(kept)
    every = max(1, steps // 4)
    argv = [*argv, "--max-steps", str(steps), "--val-every", "0"]
    # Where saves come faster than they are written a run waits for them: the twin makes two, for their cost, the resume none.
    twin = lab.train(f"{name}/twin", [*argv, "--checkpoint-every", str(max(1, steps // 2))], gpus)
    record: dict[str, Any] = {}
    for _ in range(3):  # a training of milliseconds a step may be over before the signal reaches it
        record = _kill_once(lab, lab.folder / name / f"broken-{time.time_ns()}", argv, gpus, every, steps)
        if "problem" not in record or "killed_after_step" in record:
            break
    record |= {"schema": SCHEMA, "twin": str(twin), "signal": 9}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(record) + "\n")
    return record


def _kill_once(lab: Lab, broken: Path, argv: Sequence[str], gpus: int, every: int, steps: int) -> dict[str, Any]:
    """One training, its SIGKILL and its resume."""
    lab.check_time()
    aim = random.SystemRandom().randint(every + 1, max(every + 1, steps // 2))
    log = broken.with_name(broken.name + ".log")
    record: dict[str, Any] = {"broken": str(broken), "aimed_at": aim}
    job = lab.start([*argv, "--checkpoint-every", str(every), "--run-dir", str(broken)], gpus, log)
    try:
        while job.alive() and not (done_steps(broken) >= aim and (broken / "checkpoints" / "latest").exists()):
            time.sleep(0.002)
        killed = job.alive()
    finally:  # also when this process is interrupted: nothing is left running
        job.kill()
    if not killed or (broken / "result.json").exists():
        return record | {"problem": f"the training was over before it could be killed at step {aim}: {last_line(log)}"}
    record["killed_after_step"] = done_steps(broken)
    before = len((broken / "metrics.jsonl").read_text().splitlines())
    resume = [*argv, "--checkpoint-every", "0", "--run-dir", str(broken), "--resume", "newest"]
    code = lab.start(resume, gpus, log).wait()
    after = [json.loads(line) for line in (broken / "metrics.jsonl").read_text().splitlines()[before:] if line.strip()]
    again = [row["step"] for row in after if row["kind"] == "train"]
    if code or not again:
        said = f"killed after step {record['killed_after_step']}, the resume ended with {code}: {last_line(log)}"
        return record | {"problem": said}
    return record | {"resumed_at": again[0] - 1}


def done_steps(run: Path) -> int:
    """The last step in a run's metrics, 0 before any."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return 0
    for line in reversed(path.read_text().splitlines()):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["kind"] == "train":
            return int(row["step"])
    return 0


# --- one decision ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a decision is made on."""

    recipe: str
    flags: tuple[str, ...]  # of the workload, for both arms
    minutes: float
    steps: int | None  # None: as many as fit into the minutes
    seeds: tuple[int, ...]
    rounds: int
    price: float | None
    memory_limit: int | None
    baseline: dict[str, Any] | None
    kill_steps: int = 40
    anyway: bool = False  # train although the control's profile says that there is nothing to gain
    note: str = ""
    fresh_after: int = 3  # a shared arm is run again once it is so many decisions old


def short(argv: Sequence[str]) -> str:
    """A name for an arm: equal configs share it, so that a flag at its default makes no other arm."""
    from train_gpt2 import config_hash, parse_args

    return config_hash(replace(parse_args(list(argv)), run_dir=""))[:10]


def decide(
    candidate: Candidate,
    plan: Plan,
    lab: Lab,
    chosen: Sequence[str] = (),
    number: int = 0,
    records: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Trains both arms interleaved, evaluates the gates, and returns the ledger's record (not yet written).

    `chosen`: flags of the present control. `number`: which decision of a suite this is. Raises UserError where nothing
    can be measured.
    """
    from train_gpt2 import parse_args

    old = [plan.recipe, *plan.flags, *chosen, *candidate.control]
    new = [plan.recipe, *plan.flags, *chosen, *candidate.flags]
    configs = [asdict(parse_args(argv)) for argv in (old, new)]
    difference = {k: [configs[0][k], configs[1][k]] for k in configs[0] if configs[0][k] != configs[1][k]}
    if candidate.gpus != candidate.control_gpus:
        difference["ranks"] = [candidate.control_gpus, candidate.gpus]
    if not difference:
        raise UserError(f"{candidate.name} does not differ from its control; there is nothing to measure")

    # Gate 1 first: what does the control's step spend its time on?
    found: dict[str, Any] | None = None
    where = lab.folder / f"profile-{short(old)}-{candidate.control_gpus}"
    problem = ""
    if candidate.objective == "time_to_loss" and plan.steps is not None:
        pass  # its limit is the loss curve, and the length is known
    elif (where / "profile.json").exists():
        found = read_json(where / "profile.json")
    else:
        lab.check_time()
        lab.say(f"{candidate.name}: profile of the control")
        if where.exists():
            assert_idle(where / "run")
            where.rename(where.with_name(f"{where.name}.cut-{time.time_ns()}"))
        try:
            found = lab.profile(
                plan.recipe, old[1:], where, candidate.control_gpus, process=quiet(where.with_name(where.name + ".log"))
            )
        except UserError as error:
            problem = f"{error} ({last_line(where.with_name(where.name + '.log'))})"
    steps = plan.steps
    if problem and not plan.anyway:
        raise UserError(f"the control could not be profiled, so no limit is known: {problem}")
    if steps is None:
        if found is None:
            raise UserError(f"the control could not be profiled ({problem}), so give --steps")
        steps = max(30, round(plan.minutes * 60_000 / found["step_ms"]))
    every = max(1, steps // 8)
    schedule = ["--max-steps", str(steps), "--val-every", str(every), "--checkpoint-every", "0", *data_flags(old, steps)]
    old, new = [*old, *schedule], [*new, *schedule]

    evidence = gates.Evidence(
        objective=candidate.objective,
        addresses=candidate.addresses,
        tolerance=candidate.tolerance,
        profile=found,
        problem=problem,
        control=[],
        candidate=[],
        baseline=plan.baseline,
    )
    outcome = [] if plan.anyway or found is None else gates.unworthy(evidence)
    trained = not outcome
    if trained:
        arms = _train_arms(candidate, plan, lab, old, new, number, steps)
    else:
        lab.say(f"{candidate.name}: nothing is trained, since the profile decides (--anyway trains all the same)")
        arms = {"control": [where / "run"], "candidate": []}
    evidence.control, evidence.candidate = arms["control"], arms["candidate"]
    spoke = next((run for run in [*arms["candidate"], *arms["control"]] if (run / "env.json").exists()), None)
    if spoke is None:
        raise UserError(
            f"neither arm got as far as its first step: {', '.join(run.name for runs in arms.values() for run in runs)}"
        )
    env = read_json(spoke / "env.json")
    own = host_memory() if env["device"] == "cpu" else env.get("gpu_memory_bytes")
    limit = plan.memory_limit or (found or {}).get("device_bytes") or own
    workload = workload_of(spoke, plan, steps, old)
    evidence.memory_limit, evidence.origin = limit, ledger.origin_loss(records, workload["key"])
    recovery = None
    if trained:
        outcome = gates.evaluate(replace(evidence, recovery={"problem": "not yet killed"}))
    if trained and all(gate.status == "pass" for gate in outcome if gate.number != 4):
        lab.say(f"{candidate.name}: kill and resume")
        argv = [*new, "--seed", str(plan.seeds[0]), *data_flags(new, plan.kill_steps)]
        kill_argv = [*argv, "--val-tokens", str(configs[1]["seq_len"] * 8)]
        recovery = kill_and_resume(lab, f"kill-{short(kill_argv)}-{candidate.gpus}", kill_argv, candidate.gpus, plan.kill_steps)
        evidence.recovery = recovery
        # On the CPU every bit must return; a GPU's own repetitions differ by the order of atomic additions.
        evidence.recovery_tolerance = 0.0 if env["device"] == "cpu" or configs[1]["deterministic"] else 0.01
    if trained:
        outcome = gates.evaluate(evidence)
    verdict, reason = gates.verdict(outcome)
    objective = next(gate for gate in outcome if gate.number == 3)
    control, tried = (measured(arms[name], recovery if name == "candidate" else None, plan.price) for name in arms)
    if found and not trained:
        control |= {key: found[key] for key in ("tokens_per_s", "step_ms", "mfu", "peak_bytes")} | {"val_loss": None}
    notes = [plan.note] if plan.note else []
    if found:
        notes.append("control's step, ms: " + ", ".join(f"{k.replace('_', ' ')} {v:.2f}" for k, v in found["parts_ms"].items()))
        notes += [f"profile: {text}" for text in found["warnings"]]
    if difference.keys() & {"compile", "compile_mode"} and (even := break_even(control, tried)) is not None:
        notes.append(f"the longer start-up is paid back after {even:,.0f} steps")
    loss = next(gate for gate in outcome if gate.number == 2).data
    if loss.get("relative") is not None and difference.keys() & {"precision", "head_precision"}:
        notes.append(f"relative loss error {loss['relative']:+.3%} (DeepSeek-V3 for fp8 against bf16: below 0.25%)")
    return {
        "kind": "decision",
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "candidate": candidate.name,
        "recipe": plan.recipe,
        "flags": {"control": [*chosen, *candidate.control], "candidate": [*chosen, *candidate.flags]},
        "ranks": {"control": candidate.control_gpus, "candidate": candidate.gpus},
        "difference": difference,
        "objective": candidate.objective,
        "addresses": list(candidate.addresses),
        "tolerance": candidate.tolerance,
        "rationale": candidate.rationale,
        "workload": workload,
        "gates": [asdict(gate) for gate in outcome],
        "measured": {"control": control, "candidate": tried, "ratio": objective.data.get("ratio")},
        "recovery": recovery and {k: recovery.get(k) for k in ("killed_after_step", "resumed_at", "signal")},
        "software": {
            **{k: env.get(k) for k in ("torch", "cuda", "cudnn", "nccl", "triton", "driver", "python")},
            "attention": env.get("attention_backend"),
        },
        "hardware": hardware(env, candidate),
        "git_commit": env.get("git_commit"),
        "train_gpt2_sha256": env.get("train_gpt2_sha256"),
        "verdict": verdict,
        "reason": reason,
        "notes": notes,
    }


def _train_arms(
    candidate: Candidate, plan: Plan, lab: Lab, old: list[str], new: list[str], number: int, steps: int
) -> dict[str, list[Path]]:
    """Runs of both arms, interleaved; a run that another decision has made lately is shared."""
    arms: dict[str, list[Path]] = {"control": [], "candidate": []}
    pairs = [("control", old, candidate.control_gpus), ("candidate", new, candidate.gpus)]
    lab.say(f"{candidate.name}: {steps} steps an arm, seeds {', '.join(map(str, plan.seeds))}, {plan.rounds} round(s)")
    for turn in range(plan.rounds):
        for seed in plan.seeds:
            # A-B, then B-A: what drifts with time falls on both arms alike.
            for name, argv, gpus in pairs if (turn + plan.seeds.index(seed)) % 2 == 0 else pairs[::-1]:
                argv = [*argv, "--seed", str(seed)]
                key = f"{short(argv)}-{gpus}"
                known = lab.made.setdefault(key, [])
                fresh = [run for when, run in known if number - when < plan.fresh_after]
                if len(fresh) <= turn:
                    run = lab.train(f"{key}-{len(known)}", argv, gpus)
                    known.append((number, run))
                for _, run in known:
                    if run not in arms[name]:
                        arms[name].append(run)
    return arms


def quiet(log: Path, variables: Mapping[str, str] | None = None) -> Callable[[Sequence[str]], int]:
    """Runs a command with its output in a log. Interrupted, it ends the command and what that has started."""

    def process(command: Sequence[str]) -> int:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            child = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=variables, start_new_session=True
            )
        try:
            return child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGTERM)  # torchrun, or another promote, ends its own children then
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                kill_family(child.pid)
            raise

    return process


def data_flags(argv: Sequence[str], steps: int) -> list[str]:
    """Passes over the shards that so many steps need, and at most a million val tokens. Raises UserError."""
    from train_gpt2 import TokenStream, find_shards, parse_args

    cfg = parse_args(list(argv))
    train, val = (len(TokenStream(find_shards(cfg.data, split))) for split in ("train", "val"))  # type: ignore[arg-type]
    passes = -(-(steps * cfg.batch_tokens + 1) // train)
    tokens = min(cfg.val_tokens, 1 << 20, val - 1) // cfg.seq_len * cfg.seq_len
    return ["--epochs", str(max(cfg.epochs, passes)), "--val-tokens", str(tokens)]


def host_memory() -> int:
    """The machine's memory in bytes."""
    import psutil

    return int(psutil.virtual_memory().total)


def workload_of(run: Path, plan: Plan, steps: int, argv: Sequence[str]) -> dict[str, Any]:
    """What both arms train on; `key` is equal for decisions whose losses may be compared."""
    from train_gpt2 import TokenStream, find_shards, parse_args, val_protocol

    cfg = parse_args(list(argv))
    protocol = val_protocol(cfg, TokenStream(find_shards(cfg.data, "val")))
    config, result = read_json(run / "config.json")["config"], read_json(run / "result.json")
    facts = {
        "recipe": plan.recipe,
        "steps": steps,
        "batch_tokens": config["batch_tokens"],
        "seq_len": config["seq_len"],
        "data_fingerprint": result["data"]["fingerprint"],
        "val_protocol": {k: v for k, v in protocol.items() if k != "dtype"},
        "device": result["device"],
        "flags": without_folder(plan.flags),
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return {"key": key, **facts, "dataset": result["data"].get("dataset"), "seeds": list(plan.seeds), "minutes": plan.minutes}


def without_folder(flags: Sequence[str]) -> list[str]:
    """Flags without --data (the fingerprint says which text it was, wherever it lay) and without what may be secret."""
    from train_gpt2 import public_argv

    return without_flags(public_argv(list(flags)), "--data")


def hardware(env: dict[str, Any], candidate: Candidate) -> dict[str, Any]:
    names = env.get("gpus") or []
    one = names[0] if names else env.get("cpu") or "cpu"
    text = (
        f"{one} ({candidate.control_gpus} to {candidate.gpus})"
        if candidate.gpus != candidate.control_gpus
        else f"{candidate.gpus} x {one}"
    )
    return {"text": text, "gpus": names, "cpu": env.get("cpu"), "threads": env.get("threads"), "platform": env.get("platform")}


def measured(paths: Sequence[Path], recovery: dict[str, Any] | None, price: float | None) -> dict[str, Any]:
    """An arm's figures, over its runs: medians of steady steps, the largest peak. Empty for one that was not trained."""
    if not paths:
        return {}
    from train_gpt2 import Config, state_bytes

    runs = [gates.read(path) for path in paths]
    steady = [gates.steady(run) for run in runs if run.train]
    rate = statistics.fmean(statistics.median(s) for s in steady if s) if any(steady) else None
    result = runs[0].result
    world = result.get("world_size", 1)
    config = runs[0].config
    mfus = [r.result["mfu"] for r in runs if r.result.get("mfu") is not None]
    losses = [r.result["val_loss"] for r in runs if r.result.get("val_loss") is not None]
    hours = 1e9 / rate / 3600 * world if rate else None
    checkpoint, stall, stored = None, None, None
    if recovery and not recovery.get("problem"):
        twin = read_json(Path(recovery["twin"]) / "result.json")
        saved = twin.get("checkpoints") or {}
        checkpoint = saved.get("bytes")
        stall = first_stall(gates.read(Path(recovery["twin"])).train)
        stored = saved.get("write_s")
    return {
        "runs": [path.name for path in paths],
        "ends": [r.result.get("exit_reason") for r in runs],
        "tokens_per_s": rate,
        "step_ms": config["batch_tokens"] / rate * 1000 if rate else None,
        "mfu": statistics.fmean(mfus) if mfus else None,
        "peak_bytes": max((gates.peak_bytes(r) for r in runs), default=0),
        "state_bytes": state_bytes(Config(**config)) if "n_layer" in config else None,
        "checkpoint_bytes": checkpoint,
        "checkpoint_stall_ms": stall,
        "checkpoint_write_s": stored,
        "startup_s": min((r.result.get("startup_seconds") or 0.0) for r in runs),
        "compile_s": min((r.result.get("compile_seconds") or 0.0) for r in runs),
        "device_hours_per_billion": hours,
        "cost_per_billion": hours * price if hours and price is not None else None,
        "val_loss": statistics.fmean(losses) if losses else None,
        "world_size": world,
    }


def first_stall(rows: Sequence[dict[str, Any]]) -> float | None:
    """Milliseconds that the first save cost: blocked, and by the longer of the two steps after it."""
    at = next((i for i, row in enumerate(rows) if row.get("save_ms")), None)
    if at is None:
        return None
    usual = statistics.median(row["step_ms"] for row in rows)
    return rows[at]["save_ms"] + max(0.0, max(row["step_ms"] for row in rows[at : at + 2]) - usual)


def break_even(control: dict[str, Any], candidate: dict[str, Any]) -> float | None:
    """Steps after which a longer start-up has paid for itself; None where there is nothing to pay or to gain."""
    if not control.get("step_ms") or not candidate.get("step_ms"):
        return None
    extra, saved = candidate["compile_s"] - control["compile_s"], control["step_ms"] - candidate["step_ms"]
    return extra * 1000 / saved if extra > 0 and saved > 0 else None


# --- the command -------------------------------------------------------------------------------------------


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "promote",
        help="measure a candidate against the control, gate it, record the verdict",
        usage="python -m harness promote CANDIDATE|list|show ID|accept ID [options] [-- TRAINER FLAGS]",
        epilog="candidates: " + ", ".join(NAMES),
    )
    parser.add_argument("what", nargs="?", help="a candidate's name, or list, show, accept")
    parser.add_argument("id", nargs="?", help="record for show and accept")
    parser.add_argument("--candidate", metavar="FLAGS", help="a difference of your own, as trainer flags in one string")
    parser.add_argument("--suite", choices=sorted(SUITES), help="a list of decisions in one go; the same command goes on")
    parser.add_argument("--recipe", help="workload (default: speedrun with a GPU, sample without)")
    parser.add_argument("--control", default="", help="what to compare with: a candidate's name, a ledger id, or `smallest`")
    parser.add_argument("--reason", default="", help="why the control uses more than one device, or why ID is accepted")
    parser.add_argument("--objective", choices=gates.OBJECTIVES, default="throughput", help="of --candidate")
    parser.add_argument("--tolerance", type=float, default=0.01, help="of --candidate, nats of val loss (default 0.01)")
    parser.add_argument("--addresses", default="", help=f"limits of --candidate (default: all of {', '.join(profiles.LIMITS)})")
    parser.add_argument("--gpus", type=int, help="ranks of the candidate (default: as the candidate says)")
    parser.add_argument("--data", help="folder of token shards")
    parser.add_argument("--minutes-each", type=float, default=1.0, help="training time of the control (default 1)")
    parser.add_argument("--steps", type=int, help="steps of each run, instead of minutes")
    parser.add_argument("--seeds", default="1337", help="comma-separated; several make the loss gate a test")
    parser.add_argument("--rounds", type=int, help="runs of each arm and seed (default 2; in a suite 1)")
    parser.add_argument("--kill-steps", type=int, default=40, help="steps of the killed run (default 40)")
    parser.add_argument("--anyway", action="store_true", help="train although the profile says that there is nothing to gain")
    parser.add_argument("--note", default="", help="a remark kept with the record")
    parser.add_argument("--baseline", help="frozen baseline that the candidate must not fall behind")
    parser.add_argument("--memory-limit", type=float, metavar="GB", help="memory that must suffice (default: the device's)")
    parser.add_argument("--price", type=float, help="price of one device hour, for the cost of a billion tokens")
    parser.add_argument("--stop-after", type=float, metavar="MIN", help="start nothing more after so many minutes")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: runs/promote-NAME-DATE)")
    parser.add_argument("--ledger", type=Path, default=ledger.LEDGER, help="the ledger (default: harness/ledger.jsonl)")
    parser.add_argument("--table", type=Path, help="its Markdown table (default: docs/ledger.md, or beside --ledger)")
    parser.add_argument("--json", action="store_true", help="with list and show: JSON")


def run(args: argparse.Namespace) -> int:
    if args.table is None:
        args.table = ledger.TABLE if args.ledger == ledger.LEDGER else args.ledger.with_suffix(".md")
    if args.what in ACTIONS:
        return {"list": _list, "show": _show, "accept": _accept}[args.what](args)
    records = ledger.read(args.ledger)  # a damaged ledger is said before minutes are spent
    candidates = _chosen(args)
    plan = _plan(args)
    chosen = _control_flags(args, records, plan.recipe)
    name = args.suite or candidates[0].name
    lab = Lab(args.out or Path("runs") / f"promote-{name}-{datetime.now():%Y%m%d-%H%M%S}")
    if args.stop_after is not None:
        lab.deadline = time.monotonic() + args.stop_after * 60
    from train_gpt2 import grad_accum_steps, lock_run, parse_args

    for candidate in candidates:  # every command line is checked before anything runs
        for more, gpus in ((candidate.control, candidate.control_gpus), (candidate.flags, candidate.gpus)):
            grad_accum_steps(parse_args([plan.recipe, *plan.flags, *chosen, *more]), gpus)
    data_flags([plan.recipe, *plan.flags], 1)
    try:
        lab.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {lab.folder}: {error.strerror}") from None
    _lock = lock_run(lab.folder, 0.0)  # two calls in one folder would measure each other; held until the process ends
    # As Ctrl-C does: an exception that reaches the waits, which end their trainings.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return _decide_all(args, candidates, plan, lab, chosen)


def _decide_all(args: argparse.Namespace, candidates: Sequence[Candidate], plan: Plan, lab: Lab, chosen: Sequence[str]) -> int:
    """Each decision on its own: one that cannot be made is said, and the others go on."""
    from train_gpt2 import write_atomic

    rows: list[tuple[str, str, str]] = []
    code = 0
    for number, candidate in enumerate(candidates):
        kept = lab.folder / f"decision-{candidate.name}.json"
        asked: dict[str, Any] = {"candidate": asdict(candidate), "recipe": plan.recipe, "chosen": [*chosen]}
        asked |= {"flags": without_folder(plan.flags)}
        asked |= {"minutes": args.minutes_each, "steps": args.steps, "seeds": plan.seeds, "rounds": plan.rounds}
        asked = json.loads(json.dumps(asked))
        try:
            if kept.exists():
                record = read_json(kept)
                if different := [k for k, v in asked.items() if record.get("asked", asked)[k] != v]:
                    raise UserError(f"{kept} is a decision on another question ({', '.join(different)}); choose another --out")
                if plan.anyway and not record["measured"]["candidate"]:
                    raise UserError(f"{kept} was decided by the profile alone; choose another --out for --anyway")
            else:
                # One length for the whole suite, so that its decisions can share runs.
                plan = replace(plan, steps=plan.steps or _steps_of(lab, candidates[:number]))
                record = decide(candidate, plan, lab, chosen, number, ledger.read(args.ledger))
                record = ledger.append(record, args.ledger)
                write_atomic(kept, json.dumps(record | {"asked": asked}) + "\n")
                ledger.write_table(ledger.read(args.ledger), args.table)
            rows.append((candidate.name, f"{record['verdict']} ({record['id']})", record["reason"]))
        except OutOfTime as pause:
            rows.append((candidate.name, "not yet", str(pause)))
            code = 3
        except Exception as error:
            if len(candidates) == 1 and not is_user_error(error):
                raise
            (lab.folder / f"error-{candidate.name}.txt").write_text(traceback.format_exc())
            rows.append(
                (candidate.name, "no decision", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            )
            code = code or 1
        print(f"{rows[-1][0]}: {rows[-1][1]}: {rows[-1][2]}", flush=True)
    if len(rows) > 1:
        print("\n| candidate | verdict | why |\n|---|---|---|")
        for row in rows:
            print("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |")
    print(f"runs: {lab.folder}; ledger: {args.ledger}; table: {args.table}")
    if len(rows) == 1 and code == 1:
        print(f"error: {rows[0][2].removeprefix('UserError: ')}", file=sys.stderr)
        return 2
    return code


def _steps_of(lab: Lab, earlier: Sequence[Candidate]) -> int | None:
    """Steps of the first decision made in this folder."""
    for candidate in earlier:
        kept = lab.folder / f"decision-{candidate.name}.json"
        if kept.exists():
            return int(read_json(kept)["workload"]["steps"])
    return None


def _chosen(args: argparse.Namespace) -> list[Candidate]:
    """The candidates that the command line asks for. Raises UserError."""
    if sum(x is not None for x in (args.what, args.candidate, args.suite)) != 1:
        raise UserError("give one of: a candidate's name, --candidate FLAGS, --suite NAME, list, show ID, accept ID")
    if args.suite:
        names = SUITES[args.suite][0]
        if any(name.endswith("-N") for name in names) and (args.gpus or 0) < 2:
            raise UserError(f"--suite {args.suite}: say with --gpus on how many devices, at least 2")
        return [find_candidate(re.sub("-N$", f"-{args.gpus}", name)) for name in names]
    if args.candidate is not None:
        if not 0 <= args.tolerance < 1:
            raise UserError(f"--tolerance {args.tolerance}: nats of val loss, from 0 (bit for bit) to below 1")
        limits = tuple(args.addresses.replace(",", " ").split()) or profiles.LIMITS
        if unknown := set(limits) - {*profiles.LIMITS, "capacity"}:
            raise UserError(f"--addresses {sorted(unknown)[0]}: name some of {', '.join([*profiles.LIMITS, 'capacity'])}")
        try:
            flags = tuple(shlex.split(args.candidate))
        except ValueError as error:
            raise UserError(f"--candidate {args.candidate}: {error}") from None
        name = re.sub(r"[^\w.=-]+", "_", "-".join(flag.strip("-") for flag in flags)) or "nothing"
        return [
            Candidate(name, flags, args.objective, limits, args.tolerance, "declared on the command line", gpus=args.gpus or 1)
        ]
    found = find_candidate(args.what)
    return [replace(found, gpus=args.gpus)] if args.gpus else [found]


def _plan(args: argparse.Namespace) -> Plan:
    """The workload. Raises UserError."""
    for name in ("minutes_each", "steps", "rounds", "kill_steps", "gpus", "memory_limit", "stop_after"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} must be above 0 and finite, not {value}")
    if args.kill_steps < 12:
        raise UserError(f"--kill-steps {args.kill_steps}: at least 12, to have checkpoints before and steps after the kill")
    try:
        seeds = tuple(int(part) for part in args.seeds.split(","))
    except ValueError:
        raise UserError(f"--seeds {args.seeds}: give whole numbers such as 1,2,3") from None
    if min(seeds) < 0:
        raise UserError(f"--seeds {args.seeds}: a seed is 0 or more")
    if len(set(seeds)) != len(seeds):
        raise UserError(f"--seeds {args.seeds}: each seed once; more runs of one seed are --rounds")
    recipe = args.recipe
    if recipe is None:
        import torch

        recipe = "speedrun" if torch.cuda.is_available() else "sample"
    flags = [
        *(SUITES[args.suite][1].split() if args.suite else []),
        *args.trainer_flags,
        *(["--data", args.data] if args.data else []),
    ]
    from harness import baseline

    return Plan(
        recipe, tuple(flags), args.minutes_each, args.steps, seeds, args.rounds or (1 if args.suite else 2), args.price,
        int(args.memory_limit * 1e9) if args.memory_limit else None,
        baseline.load(args.baseline) if args.baseline else None, args.kill_steps, args.anyway, args.note,
    )  # fmt: skip


def _control_flags(args: argparse.Namespace, records: Sequence[dict[str, Any]], recipe: str) -> list[str]:
    """Flags of the control: the accepted one of this recipe, or what --control names. Raises UserError."""
    if args.control == "smallest":
        return []
    if not args.control:
        current = ledger.control_of(records, recipe)
        return list(current["flags"]) if current else []
    try:
        chosen = find_candidate(args.control)
        flags, ranks = list(chosen.flags), chosen.gpus
    except UserError:
        record = ledger.find(records, args.control)
        if record["kind"] == "control":
            record = ledger.find(records, record["of"])
        flags, ranks = record["flags"]["candidate"], record["ranks"]["candidate"]
    if ranks > 1 and not args.reason.strip():
        raise UserError(f"--control {args.control} takes {ranks} devices: say with --reason why the smallest is not the control")
    return flags


def _list(args: argparse.Namespace) -> int:
    records = ledger.read(args.ledger)
    if args.json:
        print(json.dumps(records, indent=1))
        return 0
    if not records:
        print(f"no decisions in {args.ledger}")
    for r in records:
        if r["kind"] == "control":
            print(f"{r['id']}  {r['date'][:10]}  {r['recipe']}: {r['candidate']} ({r['of']}) is the control")
        else:
            print(f"{r['id']}  {r['date'][:10]}  {r['candidate']:<22} {r['verdict']:<9} {r['hardware']['text']}: {r['reason']}")
    return 0


def _show(args: argparse.Namespace) -> int:
    record = ledger.find(ledger.read(args.ledger), args.id or "")
    print(json.dumps(record, indent=1) if args.json or record["kind"] == "control" else ledger.detail(record))
    return 0


def _accept(args: argparse.Namespace) -> int:
    """Makes an accepted candidate the control of its recipe."""
    records = ledger.read(args.ledger)
    record = ledger.find(records, args.id or "")
    if record["kind"] != "decision":
        raise UserError(f"{record['id']} is no decision")
    if record["verdict"] != "accepted":
        raise UserError(f"{record['id']} was rejected ({record['reason']}); only an accepted candidate becomes the control")
    if record["ranks"]["candidate"] > 1 and not args.reason.strip():
        raise UserError(
            f"{record['id']} takes {record['ranks']['candidate']} devices: say with --reason why the smallest is not the control"
        )
    current = ledger.control_of(records, record["recipe"])
    if current and current["of"] == record["id"]:
        raise UserError(f"{record['id']} is the control of {record['recipe']} already")
    sealed = ledger.append(
        {
            "kind": "control",
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "of": record["id"],
            "candidate": record["candidate"],
            "recipe": record["recipe"],
            "flags": record["flags"]["candidate"],
            "reason": args.reason or record["reason"],
        },
        args.ledger,
    )
    ledger.write_table(ledger.read(args.ledger), args.table)
    print(f"{sealed['id']}: {record['candidate']} ({record['id']}) is now the control of {record['recipe']}")
    return 0
