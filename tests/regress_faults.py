"""Faults put into the trainer on purpose, to see which of them the regression check and the watch catch.

    python -m tests.regress_faults train DIR     train what is missing: baseline, fresh, faulty runs (long)
    python -m tests.regress_faults collect DIR   keep the fresh and faulty runs, compactly, in FILE
    python -m tests.regress_faults table         judge the kept runs, write the table into docs/regress.md

Every fault is its own patch: flags, a text of train_gpt2.py replaced by another, or other data.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats as sp

from harness import regress
from harness.baseline import FOLDER, load
from harness.regress import SAMPLE_BASELINE, SAMPLE_FLAGS
from harness.stats import Verdict, WatchBand, decide, replace_section, two_sample

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "regress_faults.json"
PAGE = ROOT / "docs" / "regress.md"
BASELINE_SEEDS = range(15)
FRESH_SEEDS = range(100, 120)
FAULT_SEEDS = (200, 201, 202)
TESTED = ("worse", "same")


@dataclass(frozen=True)
class Fault:
    """One injected fault: flags, or `old`, which stands once in train_gpt2.py, replaced by `new`."""

    what: str
    flags: tuple[str, ...] = ()
    old: str | None = None
    new: str = ""
    val_is_train: bool = False


FAULTS = {
    "muon-lr": Fault("Muon learning rate x0.6", ("--muon-lr", "0.018")),
    "momentum": Fault("Muon momentum 0.95 to 0.7", ("--muon-momentum", "0.7")),
    "no-warmdown": Fault("no warmdown", ("--warmdown-frac", "0")),
    "three-layers": Fault("one layer of four dropped", ("--n-layer", "3")),
    "no-rotary": Fault("rotary positions off", ("--position", "none")),
    "sum": Fault(
        "accumulation sums instead of averaging (2 micro-batches)",
        old="/ self.cfg.batch_tokens)).backward()",
        new="/ (self.cfg.batch_tokens / self.accum))).backward()",
    ),
    "weight-decay": Fault("weight decay x20", ("--muon-wd", "2.0")),
    "same-batch": Fault(
        "the same batch at every step",
        old="start = step * cfg.batch_tokens + row * cfg.seq_len",
        new="start = row * cfg.seq_len",
    ),
    "next-token": Fault(
        "attention sees the next token",
        old="attn_mask=mask, is_causal=mask is None, scale=scale)",
        new="attn_mask=torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril(1), scale=scale)",
    ),
    "val-is-train": Fault("val shard equal to a train shard", val_is_train=True),
}


# --- training ----------------------------------------------------------------------------------------------


def jobs() -> Iterator[tuple[str, str | None, int]]:
    """(directory name, fault or None, seed) in the order of training."""
    for seed in BASELINE_SEEDS:
        yield f"clean-{seed}", None, seed
    for name in FAULTS:
        for seed in FAULT_SEEDS:
            yield f"{name}-{seed}", name, seed
    for seed in FRESH_SEEDS:
        yield f"clean-{seed}", None, seed


def patched_source(fault: Fault, source: str) -> str:
    """train_gpt2.py with the fault in it."""
    if fault.old is None:
        return source
    if source.count(fault.old) != 1:
        raise SystemExit(f"error: {fault.what}: {fault.old!r} stands {source.count(fault.old)} times in the trainer")
    return source.replace(fault.old, fault.new)


def leaking_data(data: Path, folder: Path) -> Path:
    """A copy of the sample whose val shard is its train shard."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("sample_train_000001.bin", "sample_val_000000.bin"):
        shutil.copy(data / "sample_train_000001.bin", folder / name)
    return folder


def train(folder: Path, trainer: Path) -> None:
    """Train whatever has no result yet, one run at a time; the trainer is taken as it stands at the start."""
    source = trainer.read_text()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    for name, fault_name, seed in jobs():
        run_dir = folder / name
        if (run_dir / "result.json").exists():
            continue
        shutil.rmtree(run_dir, ignore_errors=True)
        fault = FAULTS[fault_name] if fault_name else Fault("")
        script = folder / f"train_gpt2-{fault_name}.py" if fault.old else folder / "train_gpt2.py"
        script.write_text(patched_source(fault, source))
        flags = [
            *SAMPLE_FLAGS,
            "--threads",
            "1",
            "--seed",
            str(seed),
            "--run-dir",
            str(run_dir),
            *fault.flags,
        ]
        if fault.val_is_train:
            flags += ["--data", str(leaking_data(Path("data/sample"), folder / "leak"))]
        print(name, flush=True)
        with (folder / f"{name}.log").open("w") as log:
            subprocess.run([sys.executable, script, "sample", *flags], env=environment, stderr=log, stdout=log)
        (run_dir / "model.safetensors").unlink(missing_ok=True)  # only the numbers are judged


# --- keeping -----------------------------------------------------------------------------------------------


def collect(folder: Path) -> None:
    """Keep what the check reads of the fresh and faulty runs: what they share once, then the rest."""
    first: dict[str, Any] = {}
    runs = {}
    for name, fault, seed in jobs():
        if seed in BASELINE_SEEDS:
            continue
        if not (folder / name / "result.json").exists():
            print(f"{name}: not trained yet")
            continue
        config, env, result = (json.loads((folder / name / f"{part}.json").read_text()) for part in ("config", "env", "result"))
        rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        del config["config"]["run_dir"]
        env.pop("argv")
        if fault and FAULTS[fault].val_is_train:  # the folder was of its day; what counts is its fingerprint
            config["config"]["data"] = result["data"]["dir"] = "data/val-is-train"
        first = first or {"config": config, "env": env, "result": result}
        runs[name] = {
            "fault": fault,
            "config": changed(first["config"]["config"], config["config"]),
            "learning_hash": config["learning_hash"],
            "env": changed(first["env"], env),
            "result": changed(first["result"], result),
            "train": [[r["step"], r["loss"], r["tokens_per_s"]] for r in rows if r["kind"] == "train"],
            "val": [[r["step"], r["val_loss"]] for r in rows if r["kind"] == "val"],
        }
    body = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in runs.items())
    FILE.write_text(f'{{"schema": 1, "first": {json.dumps(first)},\n"runs": {{\n{body}\n}}}}\n')


def changed(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in other.items() if key not in base or base[key] != value}


def unpack(kept: dict[str, Any], name: str, folder: Path) -> Path:
    """A kept run as a run directory again (without weights), for the check to read."""
    run, first = kept["runs"][name], kept["first"]
    run_dir = folder / name
    run_dir.mkdir(parents=True)
    config = {**first["config"]["config"], **run["config"], "run_dir": str(run_dir)}
    batch = config["batch_tokens"]
    outer = {**first["config"], "config": config, "learning_hash": run["learning_hash"]}
    for part, content in (
        ("config", outer),
        ("env", {**first["env"], **run["env"]}),
        ("result", {**first["result"], **run["result"]}),
    ):
        (run_dir / f"{part}.json").write_text(json.dumps(content))
    rows = [
        {
            "kind": "train",
            "step": step,
            "tokens": step * batch,
            "loss": loss,
            "tokens_per_s": rate,
            "epoch": 0,
        }
        for step, loss, rate in run["train"]
    ] + [{"kind": "val", "step": step, "tokens": step * batch, "val_loss": loss} for step, loss in run["val"]]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


# --- judging -----------------------------------------------------------------------------------------------


def judge(run_dirs: list[Path], question: str, out: Path) -> dict[str, Any]:
    """What `python -m harness regress` says of these runs: its verdict file, or the refusal."""
    argv = [*map(str, run_dirs), "--baseline", SAMPLE_BASELINE, "--question", question, "--out", str(out)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            regress.run(regress_arguments(argv))
        except ValueError as refusal:
            return {"verdict": "refused", "why": str(refusal)}
    verdict: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    return verdict


def regress_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    regress.add_parser(parser.add_subparsers())
    return parser.parse_args(["regress", *argv])


def watched(run_dir: Path) -> tuple[int | None, str]:
    """The step at which the watch raised its alarm over a finished run, and on which side; None: never."""
    watcher = regress.Watcher(run_dir, load(SAMPLE_BASELINE))
    alarm = watcher.alarm()
    return (alarm.step, alarm.side) if alarm else (None, "")


def table(kept: dict[str, Any]) -> str:
    """The Markdown section: faults, then what the fresh runs did."""
    rows = ["| injected fault | difference (nats) | `worse` | `same` | `--watch`: alarm at step |"]
    rows.append("|---|---|---|---|---|")
    caught = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, fault in FAULTS.items():
            names = [f"{name}-{seed}" for seed in FAULT_SEEDS]
            if not set(names) <= set(kept["runs"]):
                rows.append(f"| {fault.what} | not trained yet | | | |")
                continue
            run_dirs = [unpack(kept, run, folder) for run in names]
            worse, same = (judge(run_dirs, q, folder / f"{name}-{q}") for q in ("worse", "same"))
            if worse["verdict"] == "refused":
                differing = [line.split(": ")[0] for line in worse["why"].split(": ", 1)[1].split("; ")]
                cells = ["", f"refused: other {', '.join(dict.fromkeys(differing))}", "refused", "refused"]
            else:
                alarms = [watched(run_dir) for run_dir in run_dirs]
                steps = ", ".join(f"{step} ({side})" if step is not None else "-" for step, side in alarms)
                difference = "diverged" if worse["estimate"] is None else f"{worse['estimate']:+.4f}"
                cells = [difference, cell(worse), cell(same), steps]
            caught += any(v["verdict"] in ("FAIL", "refused") or v.get("suspicions") for v in (worse, same))
            rows.append(f"| {fault.what} | " + " | ".join(cells) + " |")
        fresh = [unpack(kept, run, folder) for run in kept["runs"] if run.startswith("clean-")]
        text = "\n".join(rows) + f"\n\n{caught} of {len(FAULTS)} caught with three seeds.\n\n" + false_alarms(fresh, folder)
    return text


def cell(verdict: dict[str, Any]) -> str:
    """PASS/FAIL/INCONCLUSIVE with the p-value that decided, and whether it looked too good."""
    p = {"PASS": verdict["p_pass"], "FAIL": verdict["p_fail"]}.get(verdict["verdict"])
    return (
        verdict["verdict"] + (f" (p={p:.1g})" if p is not None else "") + ("; too good: warned" if verdict["suspicions"] else "")
    )


def false_alarms(fresh: list[Path], folder: Path) -> str:
    """False alarms of the unpatched recipe, with the bound that chance allows.

    Two kinds of runs: `fresh` ones, which the baseline has never seen, and the baseline's own, each judged
    against the others.
    """
    baseline = load(SAMPLE_BASELINE)
    left_out = []
    for i, run in enumerate(baseline["runs"]):
        others = baseline["runs"][:i] + baseline["runs"][i + 1 :]
        band = WatchBand([losses_after_start(other) for other in others])
        estimate = two_sample([run["val_loss"]], [other["val_loss"] for other in others])
        left_out.append(
            [band.first_alarm(losses_after_start(run)) >= 0]
            + [decide(question, estimate, 0.05, baseline["margin"]) == Verdict.FAIL for question in TESTED]
        )
    rows = []
    for k, what in enumerate(("watch", *(f"`{question}`, one seed" for question in TESTED))):
        rate = 1 / baseline["n"] if k == 0 else 0.05
        rows.append((f"{what}, baseline's own seeds", sum(bool(x[k]) for x in left_out), len(left_out), rate))
    if fresh:
        alarms = sum(watched(run)[0] is not None for run in fresh)
        rows.append(("watch, fresh seeds", alarms, len(fresh), 1 / (baseline["n"] + 1)))
    for question in TESTED:
        for size, name in ((1, "one fresh seed"), (3, "three fresh seeds")):
            groups = [fresh[i : i + size] for i in range(0, len(fresh) - size + 1, size)]
            found = [judge(g, question, folder / f"{i}-{size}-{question}") for i, g in enumerate(groups)]
            if groups:
                fails = sum(v["verdict"] == "FAIL" for v in found)
                rows.append((f"`{question}`, {name}", fails, len(groups), 0.05))
    lines = [
        f"The unpatched recipe: {len(fresh)} fresh seeds, each trained once, and the baseline's {baseline['n']} "
        "seeds, each against the others.",
        "",
        "| check | false alarms | of | stated rate | 98% binomial bound |",
        "|---|---|---|---|---|",
    ]
    for what, alarms, of, rate in rows:
        lines.append(f"| {what} | {alarms} | {of} | {rate:.1%} | {int(sp.binom.ppf(0.98, of, rate))} |")
    return "\n".join(lines) + "\n"


def losses_after_start(run: dict[str, Any]) -> list[float]:
    return [point["val_loss"] for point in run["curve"] if point["tokens"] > 0]


def read_kept() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(FILE.read_text())
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.regress_faults", description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("train", "collect", "table"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt2.py")
    args = parser.parse_args()
    if args.action != "table" and args.folder is None:
        parser.error(f"{args.action} needs a folder")
    if args.action == "train":
        train(args.folder, args.trainer)
    elif args.action == "collect":
        collect(args.folder)
    else:
        PAGE.write_text(replace_section(PAGE.read_text(), "faults", table(read_kept())))
        print(f"{PAGE}, from {FILE.name} and {FOLDER.name}/{SAMPLE_BASELINE}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
