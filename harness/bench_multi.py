"""Show on one node of several devices that training scales, learns the same, and outlives a lost rank.

    python -m harness bench-multi --data DIR [--gpus 1,2,4,8] [--only scaling,curve,...] [--stop-after MIN]
    python -m harness bench-multi --data DIR --device cpu --gpus 1,2 --flags "..."   # a rehearsal, processes as devices

The folder is the state: the same command goes on where it stopped, and repeats only what failed. The environment is passed
on as it is (NCCL_* among it, and recorded). docs/bench-multi.md says what each item shows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import gates, ledger
from harness import profile as profiles
from harness.baseline import Run, read_run
from harness.bench import SHORT, SPEEDRUN_FLAGS, hardware, measure_all, say
from harness.common import UserError, launcher, read_json
from harness.promote import Lab, OutOfTime, Process, done_steps, last_line, quiet

ITEMS = ("scaling", "curve", "promotions", "fault", "evaluation")
RECIPES = ("gpt2", "speedrun")
# Largest difference (nats) of the train loss of one step, and of a val loss, by precision. bf16: the tolerance that promotions
# declare for sums in another order; the loss of one batch is noisier than a validation. First bounds, not yet measured.
TOLERANCE = {"fp32": (1e-3, 1e-3), "bf16": (0.03, 0.01), "fp16": (0.03, 0.01)}
SAME_SUM = 1e-9  # relative: an evaluation's batches are the same on any ranks, only their float64 sums are ordered otherwise
WHOLE = f"{SPEEDRUN_FLAGS} --checkpoint-every 0"  # on several devices its saves would wait for one another
CURVE = f"{WHOLE} --max-steps 192 --val-every 64"
FAULT = f"{SHORT} --max-steps 160"
EVALUATED = f"{SHORT} --max-steps 24"
HUNG = 300.0  # seconds beyond --comm-timeout after which a job with a killed rank is given up


def efficiency(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """(speed-up, efficiency) of each (devices, tokens/s): the rate over the first's, and that over the growth in devices.

    It holds for a fixed global batch (strong scaling) as for a fixed batch per device (weak): only the batch differs.
    """
    devices, rate = points[0]
    return [(r / rate, r / rate * devices / n) for n, r in points]


def same_micro_batch(argv: list[str], counts: Sequence[int]) -> list[str]:
    """`argv` with its micro-batch halved until it divides the batch on each of these counts of ranks.

    All counts get the same one, so that they differ in nothing but accumulation and communication.
    """
    from train_gpt2 import parse_args

    cfg = parse_args(argv)
    size = cfg.micro_batch
    while size > 1 and any(cfg.batch_tokens % (size * cfg.seq_len * n) for n in counts):
        size //= 2
    return [*argv, "--micro-batch", str(size)]


@dataclass
class Multi:
    """The items. Each returns {"holds": whether what it is to show is so, "shown": one line, and the numbers}."""

    lab: Lab
    data: str
    device: str
    gpus: list[int]  # ascending
    target: float
    flags: list[str]  # the caller's, after the sizes chosen here
    ledger: Path
    minutes_each: float
    hellaswag: list[str] = field(default_factory=list)  # options of python -m eval hellaswag
    paused: bool = False

    @property
    def most(self) -> int:
        return self.gpus[-1]

    def argv(self, recipe: str, sizes: str = "") -> list[str]:
        argv = [recipe, *sizes.split(), "--data", self.data, "--device", self.device, *self.flags]
        return same_micro_batch(argv, self.gpus)

    def points(self) -> dict[str, tuple[list[str], int]]:
        """Scaling's command lines and ranks by name. On all devices strong and weak scaling are one point."""
        from train_gpt2 import parse_args

        made = {}
        for recipe in RECIPES:
            argv = self.argv(recipe)
            batch = parse_args(argv).batch_tokens
            for kind in ("strong", "weak"):
                for n in self.gpus if kind == "strong" else self.gpus[:-1]:
                    size = batch if kind == "strong" else batch // self.most * n
                    made[f"{recipe}-{kind}-{n}"] = [*argv, "--batch-tokens", str(size)], n
        return made

    def check(self, items: Sequence[str]) -> None:
        """Every command line and what it needs of the data, before anything starts. Raises UserError."""
        from train_gpt2 import check_data, grad_accum_steps, parse_args

        sizes = {"curve": (CURVE, WHOLE), "fault": (FAULT,), "evaluation": (EVALUATED,)}
        whole = [(parse_args(self.argv("speedrun", text)), self.most) for item in items for text in sizes.get(item, ())]
        # Profiles and promotions take as many passes over the data as they need.
        free = [(self.argv("speedrun"), self.most), *(self.points().values() if "scaling" in items else ())]
        for cfg, ranks in [*whole, *((parse_args([*argv, "--max-steps", "1"]), n) for argv, n in free)]:
            grad_accum_steps(cfg, ranks)
            check_data(cfg if cfg.max_steps > 1 else replace(cfg, val_tokens=cfg.seq_len))

    def measure(self, item: str) -> dict[str, Any]:
        """One item, or what an earlier call found and kept."""
        from train_gpt2 import write_json

        kept = self.lab.folder / f"{item}.json"
        if kept.exists():
            return read_json(kept)
        try:
            result: dict[str, Any] = getattr(self, item)()
        except OutOfTime as pause:
            self.paused = True
            raise RuntimeError(f"not yet: {pause}") from None
        if result["holds"]:
            write_json(kept, result)
        return result

    def train(self, name: str, argv: Sequence[str], ranks: int) -> Run:
        """A finished training, made now or found. One that ended otherwise is set aside, so that the same command repeats it."""
        run = self.lab.train(name, argv, ranks)
        result = read_json(run / "result.json")
        if (ended := result["exit_reason"]) != "finished":
            run.rename(run.with_name(f"{name}.{ended}-{time.time_ns()}"))
            raise RuntimeError(f"{name} ended with {ended}: {last_line(self.lab.folder / f'{name}.log')}")
        if result["world_size"] != ranks:  # a comparison of a thing with itself would hold
            raise RuntimeError(f"{name} ran on {result['world_size']} ranks instead of {ranks}")
        return read_run(run)

    def scaling(self) -> dict[str, Any]:
        """Tokens/s, efficiency and exposed communication; a point that fails is said and the others go on."""
        found: dict[str, dict[str, Any]] = {}
        for name, (argv, n) in self.points().items():
            try:
                found[name] = self.point(name, argv, n)
                say(f"  {name}: {found[name]['tokens_per_s']:,.0f} tokens/s")
            except (ValueError, OSError, OutOfTime) as error:
                self.paused |= isinstance(error, OutOfTime)
                found[name] = {"error": str(error)}
                say(f"  {name}: FAILED: {error}")
        runs = []
        for recipe in RECIPES:
            for kind in ("strong", "weak"):
                last = f"{recipe}-strong-{self.most}"
                series = [(n, found.get(f"{recipe}-{kind}-{n}", found[last])) for n in self.gpus]
                good = [(n, p) for n, p in series if "error" not in p]
                rates = iter(efficiency([(n, p["tokens_per_s"]) for n, p in good]) if good else [])
                for n, p in series:
                    more = {} if "error" in p else dict(zip(("speed_up", "efficiency"), next(rates)))
                    runs.append({"recipe": recipe, "scaling": kind, "devices": n, **more, **p})
        failed = sum("error" in point for point in found.values())
        return {"holds": not failed, "shown": f"{len(found) - failed} of {len(found)} points measured, see above", "runs": runs}

    def point(self, name: str, argv: Sequence[str], ranks: int) -> dict[str, Any]:
        """One profiled training: the median of its steady steps without the profiler, and what the profile says."""
        from train_gpt2 import grad_accum_steps, parse_args

        where = self.lab.folder / f"scaling-{name}"
        log = where.with_name(f"{where.name}.log")
        if not (where / "profile.json").exists():
            self.lab.check_time()
            if where.exists():
                where.rename(where.with_name(f"{where.name}.cut-{time.time_ns()}"))
            try:
                accumulation = grad_accum_steps(parse_args(list(argv)), ranks)
                steps = max(1, profiles.STEPS // accumulation)  # a trace grows with every micro-batch
                self.lab.profile(argv[0], argv[1:], where, ranks, steps, process=quiet(log))
            except UserError as error:
                raise UserError(f"{error} ({last_line(log)})") from None
        profile = read_json(where / "profile.json")
        if profile["world_size"] != ranks:
            raise UserError(f"{where} was made on {profile['world_size']} ranks instead of {ranks}")
        first, last = profiles.WARM, profiles.WARM + profiles.PLAIN
        times = [row["step_ms"] for row in read_run(where / "run").train if first < row["step"] <= last]
        exposed, batch = profile["exposed_communication_ms"], profile["config"]["batch_tokens"]
        return {
            "batch_tokens": batch,
            "micro_batch": profile["config"]["micro_batch"],
            "steps": len(times),
            "tokens_per_s": batch * 1000 / statistics.median(times),
            "mfu": profile["mfu"],
            "exposed_ms": [exposed["min"], exposed["max"]],  # over the ranks: the least is the network's own share
            "exposed_share": exposed["max"] / profile["profiled_step_ms"],
            "peak_gb": profile["peak_bytes"] / 1e9,
        }

    def curve(self) -> dict[str, Any]:
        """The losses on all devices against those of one that accumulates, and the seconds to the target."""
        one, many = (self.train(f"curve-{n}", self.argv("speedrun", CURVE), n) for n in (1, self.most))
        train, val = (compare(a, b, key) for a, b, key in ((one.train, many.train, "loss"), (one.val, many.val, "val_loss")))
        limits = TOLERANCE[one.config["precision"]]
        whole = self.train(f"target-{self.most}", self.argv("speedrun", WHOLE), self.most)
        seconds, lowest = gates.seconds_to(whole, self.target), min(row["val_loss"] for row in whole.val)
        reached = f"after {seconds:.1f} s" if seconds is not None else f"not reached ({lowest:.4f})"
        return {
            "holds": train <= limits[0] and val <= limits[1],
            "shown": f"{self.most} devices against 1, {len(one.train)} steps: train losses differ by at most {train:.2g} "
            f"(tolerance {limits[0]:g}), val losses by {val:.2g} ({limits[1]:g}); val loss {self.target:g} on all: {reached}",
            "train_difference": train,
            "val_difference": val,
            "tolerance": limits,
            "target": self.target,
            "seconds_to_target": seconds,
            "val_losses": [(row["tokens"], row["train_s"], row["val_loss"]) for row in whole.val],
        }

    def promotions(self) -> dict[str, Any]:
        """The suite `devices` on all of them: its verdicts, whichever they are, are in the ledger."""
        folder = self.lab.folder / "promotions"
        self.lab.check_time()
        left = (self.lab.deadline - time.monotonic()) / 60
        options = ["--suite", "devices", "--anyway", "--gpus", str(self.most), "--recipe", "speedrun", "--out", str(folder)]
        options += ["--minutes-each", str(self.minutes_each), "--ledger", str(self.ledger)]
        options += [] if left == float("inf") else ["--stop-after", f"{left:.3f}"]
        log = self.lab.folder / "promotions.log"
        code = quiet(log)([*launcher(), "-m", "harness", "promote", *options, "--", *self.argv("speedrun")[1:]])
        if code == 3:
            raise OutOfTime("the time given is used up; the same command goes on from here")
        if code not in (0, 1):
            raise RuntimeError(f"promote ended with exit code {code}: {last_line(log)}")
        runs = []
        for kept in sorted(folder.glob("decision-*.json"), key=lambda path: path.stat().st_mtime):
            record = read_json(kept)
            rates = [record["measured"][arm].get("tokens_per_s") for arm in ("control", "candidate")]
            runs.append({k: record[k] for k in ("id", "candidate", "verdict", "reason", "measured")} | {"tokens_per_s": rates})
        said = [f"{r['candidate']} {r['verdict']} ({r['id']}{ratio(*r['tokens_per_s'])})" for r in runs]
        return {"holds": code == 0, "shown": "; ".join(said) or f"no decision, see {log}", "runs": runs}

    def fault(self) -> dict[str, Any]:
        """One rank killed under torchrun --max-restarts, against a run that never was; bit for bit."""
        from train_gpt2 import parse_args

        argv = self.argv("speedrun", FAULT)
        cfg = parse_args(argv)
        argv += ["--checkpoint-every", str(max(1, cfg.max_steps // 4)), "--deterministic"]
        unbroken = self.train("fault-unbroken", argv, self.most)
        self.lab.check_time()
        run = self.lab.folder / f"fault-{time.time_ns()}"
        log = run.with_name(f"{run.name}.log")
        job = Process([*argv, "--run-dir", str(run)], self.most, log, restarts=2)
        try:
            seen = kill_one(job, run, log, self.most - 1, cfg.comm_timeout)
        finally:  # also when interrupted: nothing is left running
            job.kill()
        again = read_run(run)
        train, val = compare(unbroken.train, again.train, "loss"), abs(unbroken.val_loss - again.val_loss)
        soon = seen["detected_s"] <= cfg.comm_timeout
        newest = seen["newest_checkpoint"] <= seen["resumed_at"] <= seen["killed_after_step"]
        return {
            "holds": soon and newest and train == val == 0,
            "shown": f"rank {self.most - 1} of {self.most} killed after step {seen['killed_after_step']}, noticed after "
            f"{seen['detected_s']:.1f} s (--comm-timeout {cfg.comm_timeout:g}); resumed at step {seen['resumed_at']} after "
            f"{seen['resumed_s']:.1f} s, next step trained after {seen['trained_s']:.1f} s; losses "
            + ("equal to the last bit" if train == val == 0 else f"differ by {max(train, val):.2g}"),
            **seen,
            "comm_timeout": cfg.comm_timeout,
            "train_difference": train,
            "val_difference": val,
        }

    def evaluation(self) -> dict[str, Any]:
        """Val loss and HellaSwag on all ranks against one; one that cannot be had does not take the other with it."""
        run = self.lab.folder / f"target-{self.most}"
        if not (run / "model.safetensors").exists():
            run = self.train("evaluated", self.argv("speedrun", EVALUATED), self.most).path
        made: dict[str, Any] = {}
        for task, options in (("val", []), ("hellaswag", self.hellaswag)):
            try:
                paths = [self.evaluate(task, run, n, options) for n in (1, self.most)]
                made[task] = compare_val(*paths) if task == "val" else compare_hellaswag(*paths)
            except RuntimeError as error:
                made[task] = {"holds": False, "shown": str(error)}
        shown = "; ".join(f"{task}: {result['shown']}" for task, result in made.items())
        return {"holds": all(result["holds"] for result in made.values()), "shown": shown, **made}

    def evaluate(self, task: str, run: Path, ranks: int, options: Sequence[str]) -> Path:
        """The file that python -m eval leaves, made now or found. Raises RuntimeError with what it said."""
        path = self.lab.folder / f"{task}-{ranks}.json"
        if path.exists():
            return path
        self.lab.check_time()
        command = [*launcher(ranks), "-m", "eval", task, str(run), "--device", self.device, "--save", str(path), *options]
        # torchrun gives each of several ranks one thread unless told otherwise; one rank must sum as they do.
        log, variables = path.with_suffix(".log"), {**({"OMP_NUM_THREADS": "1"} if self.device == "cpu" else {}), **os.environ}
        code = quiet(log, variables)(command)
        if not path.exists():
            raise RuntimeError(f"exit code {code} on {ranks} ranks: {last_line(log)}")
        return path


def ratio(control: float | None, candidate: float | None) -> str:
    """An arm that ran out of memory has no rate."""
    return f", {candidate / control:.3f} of the control's tokens/s" if control and candidate else ""


def compare(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]], key: str) -> float:
    """Largest difference of `key` over the steps of two runs. Raises RuntimeError where their steps differ."""
    first, second = ({row["step"]: row[key] for row in rows} for rows in (a, b))
    if first.keys() != second.keys() or not first:
        raise RuntimeError(f"the runs have {key} at other steps: {len(first)} and {len(second)} of them")
    return max(abs(first[step] - second[step]) for step in first)


def compare_val(one: Path, many: Path) -> dict[str, Any]:
    a, b = (read_json(path)["nats_per_token"] for path in (one, many))
    same = abs(a - b) <= SAME_SUM * a
    return {"holds": same, "shown": f"{a:.9f}, {b - a:+.1e} on all ranks", "one": a, "all": b}


def compare_hellaswag(one: Path, many: Path) -> dict[str, Any]:
    a, b = ([json.loads(line) for line in path.read_text().splitlines()] for path in (one, many))
    choices = [k for k in a[0] if k.startswith("choice_")]
    other = sum(any(x[k] != y[k] for k in ("index", "label", *choices)) for x, y in zip(a, b))
    largest = max(abs(p - q) for x, y in zip(a, b) for p, q in zip(x["nll"], y["nll"]))
    shown = f"{len(a):,} examples, {other} choices differ, losses by {largest:.1e} at most"
    return {"holds": len(a) == len(b) and not other, "shown": shown, "examples": len(a), "differ": other, "largest": largest}


def kill_one(job: Process, run: Path, log: Path, rank: int, patience: float) -> dict[str, Any]:
    """SIGKILL to one rank, two steps after a whole checkpoint; seconds from then to what follows, until the job has ended."""
    from train_gpt2 import list_checkpoints, step_number

    newest = -1
    while newest < 0 or done_steps(run) < newest + 2:
        if not job.alive():
            raise RuntimeError(f"the training was over before a rank could be killed: {last_line(log)}")
        time.sleep(0.005)
        newest = max(map(step_number, list_checkpoints(run)), default=-1)
    # Direct children only: what a rank has started itself has inherited its variables.
    victim = next(child for child in job.watched.children() if child.environ().get("RANK") == str(rank))
    seen: dict[str, Any] = {"newest_checkpoint": newest, "killed_after_step": done_steps(run)}
    read = log.stat().st_size
    victim.send_signal(signal.SIGKILL)
    began, rows = time.monotonic(), 0
    events = {
        "torchrun_s": r"exitcode: -9|closing signal",
        "ranks_s": r"lost another rank",
        "resumed_s": r"resumed from \S+ at step (\d+)",
    }
    while job.alive() and time.monotonic() < began + patience + HUNG:
        now, said = time.monotonic() - began, log.read_bytes()[read:].decode(errors="replace")
        for name, pattern in events.items():
            if name not in seen and (match := re.search(pattern, said)):
                seen[name] = now
                if name == "resumed_s":
                    seen["resumed_at"], rows = int(match[1]), trained_rows(run)
        if rows and "trained_s" not in seen and trained_rows(run) > rows:
            seen["trained_s"] = now
        time.sleep(0.01)
    if job.alive() or job.wait() or not {"resumed_s", "trained_s"} <= seen.keys():
        raise RuntimeError(f"the job did not go on after rank {rank} was killed: {last_line(log)}")
    return {"detected_s": min(seen.get(k, float("inf")) for k in ("torchrun_s", "ranks_s", "resumed_s")), **seen}


def trained_rows(run: Path) -> int:
    return (run / "metrics.jsonl").read_text().count('"kind": "train"')


def table(results: dict[str, Any], machine: dict[str, Any]) -> str:
    """What was found, in Markdown."""
    names = machine.get("gpus") or [machine.get("cpu", "unknown device")]
    lines = [f"{names[0]}, torch {machine.get('torch')}, NCCL {machine.get('nccl')}", ""]
    if runs := results.get("scaling", {}).get("runs"):
        lines += ["| recipe | scaling | devices | tokens a step | tokens/s | speed-up | efficiency | exposed communication |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for r in runs:
            cells = [r["recipe"], r["scaling"], str(r["devices"])]
            if "error" in r:
                cells += ["failed: " + r["error"].replace("|", "/"), *[""] * 4]
            else:
                cells += [f"{r['batch_tokens']:,}", f"{r['tokens_per_s']:,.0f}", f"{r['speed_up']:.2f}", f"{r['efficiency']:.1%}"]
                cells += [f"{r['exposed_ms'][1]:.1f} ms ({r['exposed_share']:.1%})"]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += ["| item | holds | shown |", "|---|---|---|"]
    for item in ITEMS:
        if (r := results.get(item)) is not None:
            text = r.get("shown") or f"FAILED: {r['error']}"
            lines.append(f"| {item} | {'yes' if r.get('holds') else 'NO'} | {text.replace('|', '/')} |")
    return "\n".join(lines)


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("bench-multi", help="scaling, same curve, promotions, lost rank and evaluation on several devices")
    parser.add_argument("--data", default="data/fineweb10B", help="folder of token shards (default: %(default)s)")
    parser.add_argument("--gpus", help="counts of devices (default: 1,2,4,... as many as there are)")
    parser.add_argument("--only", default=",".join(ITEMS), help="items, in this order (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, processes as devices")
    parser.add_argument("--flags", default="", help="trainer flags for all trainings in one string, such as smaller sizes")
    parser.add_argument("--target", type=float, default=3.65, help="val loss whose time is taken (default: %(default)s)")
    parser.add_argument("--minutes-each", type=float, default=0.25, help="of a promotion's control (default: %(default)s)")
    parser.add_argument("--hellaswag", default="", help="options of python -m eval hellaswag, such as '--limit N --file F'")
    parser.add_argument("--stop-after", type=float, metavar="MIN", help="start nothing more after so many minutes (exit code 3)")
    parser.add_argument("--ledger", type=Path, help="of the promotions (default: harness/ledger.jsonl; on the CPU in --folder)")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-multi"), help="where runs go (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bench-multi.json"), help="JSON of all results (default: %(default)s)")


def choose_counts(text: str | None, device: str) -> list[int]:
    """Ascending counts of devices, the last at least 2. Raises UserError."""
    import torch

    there = torch.cuda.device_count() if device == "cuda" else (os.cpu_count() or 1)
    if device == "cuda" and not there:
        raise UserError("there is no usable GPU here; --device cpu rehearses with processes as devices")
    try:
        counts = sorted({int(part) for part in text.split(",")}) if text else [n for n in (1, 2, 4, 8, 16) if n <= there]
    except ValueError:
        raise UserError(f"--gpus {text}: give counts such as 1,2,4,8") from None
    if counts[0] < 1 or counts[-1] < 2:
        raise UserError(f"--gpus {text or there}: counts of at least 1, one of them 2 or more: one device shows nothing here")
    if device == "cuda" and counts[-1] > there:
        raise UserError(f"--gpus {text}, but there are {there} GPUs here: ask for at most {there}")
    return counts


def run(args: argparse.Namespace) -> int:
    from train_gpt2 import write_json

    items = args.only.split(",")
    if unknown := sorted(set(items) - set(ITEMS)):
        raise UserError(f"--only {unknown[0]}: choose from {', '.join(ITEMS)}")
    for name in ("minutes_each", "stop_after"):
        if (value := getattr(args, name)) is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} must be above 0, not {value}")
    lab, counts = Lab(args.folder), choose_counts(args.gpus, args.device)
    if args.stop_after is not None:
        lab.deadline = time.monotonic() + args.stop_after * 60
    kept_ledger = args.ledger or (ledger.LEDGER if args.device == "cuda" else args.folder / "ledger.jsonl")
    try:
        flags, hellaswag = shlex.split(args.flags), shlex.split(args.hellaswag)
    except ValueError as error:
        raise UserError(f"--flags or --hellaswag: {error}") from None
    if args.out.is_dir():
        raise UserError(f"--out {args.out} is a folder; give a file")
    multi = Multi(lab, args.data, args.device, counts, args.target, flags, kept_ledger, args.minutes_each, hellaswag)
    settings = {k: getattr(args, k) for k in ("data", "device", "flags", "target", "hellaswag")} | {"gpus": counts}
    known = args.folder / "settings.json"
    before = {k: v for k, v in read_json(known).items() if k != "schema"} if known.exists() else settings
    for name in (k for k in settings if before.get(k) != settings[k]):
        raise UserError(f"{args.folder} holds results of --{name} {before.get(name)}: go on with that or choose another --folder")
    multi.check(items)
    # As Ctrl-C does: an exception that reaches the waits, which end their trainings.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args.folder.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(known, settings)
    paths = {item: args.folder / f"{item}.json" for item in ITEMS}
    results: dict[str, Any] = {item: read_json(path) for item, path in paths.items() if path.exists()}
    nccl = {k: v for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")}

    def write() -> None:
        write_json(args.out, {"hardware": hardware(args.folder), "nccl_variables": nccl, "settings": settings, **results})

    measure_all(items, multi.measure, results, write)
    print(f"\n{table(results, hardware(args.folder))}\n\nwritten to {args.out}; runs in {args.folder}", flush=True)
    if multi.paused:
        return 3
    return 0 if all(results[item].get("holds") for item in items) else 1
