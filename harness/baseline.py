"""Baselines: runs frozen into one hashed JSON file that every later run is judged against.

Two kinds live in `harness/baselines/`. `runs` holds the seeds of one recipe with their whole val curves,
`published` a number with its source and the data set it belongs to. Neither is ever edited: replacing one
needs a reason, which the new file keeps together with the hash of the old one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from harness.common import SCHEMA, UserError, read_json, run_directory

FOLDER = Path(__file__).resolve().parent / "baselines"
FEWEST_SEEDS = 3  # below that neither a deviation nor a watch band means anything
STEADY_FROM = 0.1  # share of a run's steps that are left out of its throughput: start-up, caches, clocks
MOST_STEADY = 200  # steady steps kept per run, evenly thinned: enough for the median's interval

# Fields of the config that say where and how a run is kept, not what it learns.
RUN_FIELDS = frozenset(
    (
        *("run_dir", "seed", "data", "device", "wandb", "max_minutes"),
        *("resume", "checkpoint_every", "keep", "mirror", "mtbf_hours", "spot_mtbf_hours", "on_save_error"),
        *("on_finish", "on_finish_when"),
    )
)
PROTOCOL_FIELDS = ("data", "tokens", "seq_len", "document_mask", "dtype")
HARDWARE_FIELDS = ("gpus", "cpu", "threads")
SOFTWARE_FIELDS = (
    "python",
    "torch",
    "cuda",
    "cudnn",
    "nccl",
    "triton",
    "driver",
    "attention_backend",
    "compile",
)


# --- reading runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run directory in memory. `result` is empty while the run is still going."""

    path: Path
    recipe: str
    config: dict[str, Any]
    learning_hash: str
    env: dict[str, Any]
    result: dict[str, Any]
    train: list[dict[str, Any]]
    val: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def dataset(self) -> str | None:
        """The data set's name, from the result or from a manifest that still fits it; None if unknown."""
        data = self.result.get("data", {})
        if data.get("dataset"):
            return str(data["dataset"])
        try:
            manifest = read_json(Path(data["dir"]) / "manifest.json")
        except (KeyError, UserError):
            return None
        return str(manifest["dataset"]) if manifest["fingerprint"] == data["fingerprint"] else None

    @property
    def diverged(self) -> bool:
        """Ended by a loss that was not finite, or by a spike."""
        return self.result.get("exit_reason") in ("non_finite", "spike")

    @property
    def val_loss(self) -> float:
        """Nats per token at the end; infinity for a run that diverged."""
        return math.inf if self.diverged else float(self.result["val_loss"])

    def facts(self) -> dict[str, Any]:
        """What must be equal before two losses may be compared, as dotted names, in the order of reading."""
        data = self.result.get("data", {})
        protocol = self.result.get("val_protocol", {})
        return {
            "recipe": self.recipe,
            "data.fingerprint": data.get("fingerprint"),
            **{f"val_protocol.{key}": protocol.get(key) for key in PROTOCOL_FIELDS},
            "train_tokens": self.config["max_steps"] * self.config["batch_tokens"],
        }

    def stack(self) -> dict[str, Any]:
        """Hardware and software, as far as they can move a bit of the result or its speed."""
        fields = {key: self.env.get(key) for key in (*HARDWARE_FIELDS, *SOFTWARE_FIELDS)}
        return {"device": self.result.get("device"), "world_size": self.result.get("world_size"), **fields}

    def steady_tokens_per_s(self) -> list[float]:
        """Tokens/s of the steady steps, at most `MOST_STEADY` of them, evenly spaced."""
        rows = [row for row in self.train if row["step"] > STEADY_FROM * self.config["max_steps"]]
        stride = -(-len(rows) // MOST_STEADY) or 1
        return [round(float(row["tokens_per_s"]), 3) for row in rows[::stride]]

    def curve(self) -> list[dict[str, Any]]:
        """The val curve; every point also carries a digest of all train losses up to it, for bit equality."""
        digest, points, rows = hashlib.sha256(), [], iter(self.train)
        row = next(rows, None)
        for point in self.val:
            while row is not None and row["step"] <= point["step"]:
                digest.update(f"{row['step']}:{float(row['loss']).hex()};".encode())
                row = next(rows, None)
            points.append(
                {
                    "step": point["step"],
                    "tokens": point["tokens"],
                    "val_loss": point["val_loss"],
                    "train_digest": digest.hexdigest()[:16],
                }
            )
        return points


def read_run(name: str | Path, *, finished: bool = True) -> Run:
    """Read a run directory (a path, or a bare name under runs/).

    Raises UserError if a file is missing or of an unknown schema, or, with `finished`, if the run did not
    reach its last step; one that diverged did end, and is read.
    """
    from train_gpt2 import read_metrics  # torch comes with it

    path = run_directory(str(name))
    config = read_json(path / "config.json")
    result = read_json(path / "result.json") if finished or (path / "result.json").exists() else {}
    metrics = read_metrics(path) if (path / "metrics.jsonl").exists() else {"train": [], "val": []}
    run = Run(
        path,
        config["recipe"],
        config["config"],
        config["learning_hash"],
        read_json(path / "env.json"),
        result,
        metrics["train"],
        metrics["val"],
    )
    if finished and not run.diverged and result["exit_reason"] != "finished":
        raise UserError(
            f"{path} did not finish: {result['exit_reason']} at step {result['step']} of "
            f"{result['max_steps']}; "
            "resume it or train it again"
        )
    return run


def read_runs(names: Iterable[str | Path]) -> list[Run]:
    """Finished runs, each with a seed of its own; raises UserError where two share one (no two samples)."""
    runs = [read_run(name) for name in names]
    seen: dict[int, Run] = {}
    for run in runs:
        if run.seed in seen:
            raise UserError(
                f"{seen[run.seed].path} and {run.path} share seed {run.seed}: not two independent samples; give one run per seed"
            )
        seen[run.seed] = run
    losses = {run.val_loss for run in runs if not run.diverged}
    if len(runs) > 1 and len(losses) == 1:
        raise UserError(f"{len(runs)} seeds ended on the same val loss {losses.pop()}: the seed does not reach the run")
    return runs


def differences(expected: dict[str, Any], found: dict[str, Any], where: str) -> list[str]:
    """One line for each key of `expected` whose value is another in `found`."""
    return [
        f"{key}: baseline {expected[key]!r}, {where} {found.get(key)!r}" for key in expected if expected[key] != found.get(key)
    ]


# --- the file ----------------------------------------------------------------------------------------------


def content_hash(content: dict[str, Any]) -> str:
    """sha256 of everything in a baseline but the hash itself, in canonical JSON."""
    rest = {key: value for key, value in content.items() if key != "hash"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def path_of(name: str, folder: Path) -> Path:
    """Where the baseline of that name is kept; raises UserError for a name that is a path or empty."""
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise UserError(f"{name!r} is no baseline name: use letters, digits, '-', '_' and '.'")
    return folder / f"{name}.json"


def load(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """A baseline, verified. Raises UserError if it does not exist or is not as it was recorded."""
    path = path_of(name, folder)
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.json"))) or "none yet"
        raise UserError(f"no baseline {name!r} in {folder} (there are: {known})")
    content = read_json(path)
    problems = check(content, name)
    if problems:
        raise UserError(f"{path}: {problems[0]}; restore it from version control, baselines are never edited")
    return content


def check(content: dict[str, Any], name: str) -> list[str]:
    """What is wrong with a baseline's content: the hash first, then the numbers worked out again."""
    if content.get("hash") != content_hash(content):
        return ["its content does not match its hash: it was edited or damaged"]
    problems = []
    if content.get("name") != name:
        problems.append(f"it calls itself {content.get('name')!r}")
    if content.get("kind") == "published":
        problems += [f"it has no {key}" for key in ("metric", "value", "datasets", "source") if not content.get(key)]
    elif content.get("kind") == "runs":
        losses = [run["val_loss"] for run in content["runs"]]
        if content["n"] != len(losses) or len({run["seed"] for run in content["runs"]}) != len(losses):
            problems.append("its count does not fit its seeds")
        elif summary(losses) != {key: content[key] for key in ("n", "mean", "std")}:
            problems.append("its mean or deviation does not follow from its losses")
    else:
        problems.append(f"its kind is {content.get('kind')!r}")
    return problems


def summary(losses: Sequence[float]) -> dict[str, Any]:
    """Count, mean and sample deviation, exactly rounded so that they can be checked for equality."""
    return {"n": len(losses), "mean": statistics.fmean(losses), "std": statistics.stdev(losses)}


def write(content: dict[str, Any], folder: Path, replace: str | None) -> Path:
    """Seal and write a baseline: temporary name, fsync, rename.

    Raises UserError if one of that name exists and no reason to replace it is given. With one, the history of
    the old file is carried on.
    """
    path = path_of(content["name"], folder)
    history: list[dict[str, Any]] = []
    if path.exists():
        if replace is None:
            raise UserError(
                f"baseline {content['name']!r} exists and is never edited; "
                "record another name, or give the cause with --replace REASON"
            )
        if not replace.strip():
            raise UserError("--replace needs a reason: what changed, and why the old baseline no longer holds")
        old = read_json(path)
        history = [
            *old.get("history", []),
            {
                "replaced": content["recorded"],
                "reason": replace,
                **{key: old[key] for key in ("recorded", "n", "mean", "std", "value", "hash") if key in old},
            },
        ]
    elif replace is not None:
        raise UserError(f"--replace: there is no baseline {content['name']!r} to replace")
    content = {**content, "history": history}
    content["hash"] = content_hash(content)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    return path


def from_runs(
    name: str, runs: Sequence[Run], margin: float | None = None, note: str = "", without_speed: str = ""
) -> dict[str, Any]:
    """Freeze finished runs that differ in nothing but the seed; raises UserError where they do.

    `without_speed`: why their tokens/s say nothing, such as having trained side by side; they are then left out.
    """
    if len(runs) < FEWEST_SEEDS:
        raise UserError(f"a baseline needs at least {FEWEST_SEEDS} seeds, got {len(runs)}; 10 or more are better")
    first = runs[0]
    for run in runs:
        if run.diverged:
            raise UserError(f"{run.path} diverged ({run.result['exit_reason']}); it cannot be part of a baseline")
        apart = [
            *differences(first.facts(), run.facts(), run.name),
            *differences(learning(first.config), learning(run.config), run.name),
            *differences(first.stack(), run.stack(), run.name),
            *differences(source(first.env), source(run.env), run.name),
        ]
        grid = [point["tokens"] for point in run.val]
        if grid != [point["tokens"] for point in first.val]:
            apart.append(f"val curve: {run.name} was validated at other token counts")
        if apart:
            raise UserError(f"the runs of a baseline must be alike but for the seed; against {first.name}: " + "; ".join(apart))
    missing = [key for key, value in first.facts().items() if value is None]
    if missing:
        raise UserError(f"{first.path}/result.json does not say {', '.join(missing)}")
    return {
        "schema": SCHEMA,
        "kind": "runs",
        "name": name,
        "recorded": date.today().isoformat(),
        "note": note,
        **summary([run.val_loss for run in runs]),
        "margin": margin,
        "facts": first.facts(),
        "dataset": first.dataset,
        "config": learning(first.config),
        "learning_hash": first.learning_hash,
        "train_gpt2_sha256": first.env.get("train_gpt2_sha256"),
        "git_commits": sorted({str(run.env.get("git_commit")) for run in runs}),
        "stack": first.stack(),
        "deterministic": first.config["deterministic"],
        "tokens_per_s": None if without_speed else statistics.median(run.result["tokens_per_s"] for run in runs),
        "without_speed": without_speed,
        "commands": [run.env.get("argv") for run in runs],
        "runs": [
            {
                "seed": run.seed,
                "val_loss": run.val_loss,
                "tokens_per_s": None if without_speed else run.result["tokens_per_s"],
                "train_seconds": None if without_speed else run.result["train_seconds"],
                "weights_sha256": run.result.get("weights_sha256"),
                "curve": run.curve(),
                "steady_tokens_per_s": [] if without_speed else run.steady_tokens_per_s(),
            }
            for run in runs
        ],
    }


def learning(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that decides what is learned and how fast."""
    return {key: value for key, value in config.items() if key not in RUN_FIELDS}


def source(env: dict[str, Any]) -> dict[str, Any]:
    return {"train_gpt2.py": env.get("train_gpt2_sha256")}


# --- the command -------------------------------------------------------------------------------------------


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("baseline", help="freeze runs as a baseline; list, show and verify baselines")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where baselines are kept (default: the project's)")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    record = actions.add_parser("record", help="freeze finished runs, one per seed")
    record.add_argument("name")
    record.add_argument("runs", nargs="+", metavar="RUN", help="run directory, or its name under runs/")
    record.add_argument("--margin", type=float, help="nats by which a later run may be worse (or differ), declared now")
    record.add_argument("--note", default="", help="what a reader should know, such as a shortened schedule")
    record.add_argument("--without-speed", metavar="REASON", help="leave out tokens/s that say nothing; why")

    publish = actions.add_parser("publish", help="record a published number with its source")
    publish.add_argument("name")
    publish.add_argument("value", type=float, help="val loss in nats per token, or an accuracy from 0 to 1")
    publish.add_argument("--metric", choices=("val_loss", "hellaswag_acc_norm"), required=True)
    publish.add_argument("--dataset", action="append", required=True, help="data set (or a copy of it); may be repeated")
    publish.add_argument("--source", required=True, help="where the number stands")
    publish.add_argument("--val-tokens", type=int, help="tokens the val loss was taken over, if the source says so")
    publish.add_argument("--scoring", choices=("llmc", "lm-eval"), help="HellaSwag's scoring")
    publish.add_argument("--trained-tokens", type=int, help="tokens that the published model was trained on")
    publish.add_argument("--note", default="")

    for parser_of_writer in (record, publish):
        parser_of_writer.add_argument("--replace", metavar="REASON", help="replace the baseline of that name; why")
    actions.add_parser("list", help="one line per baseline")
    actions.add_parser("show", help="one baseline in full").add_argument("name")
    actions.add_parser("verify", help="check hashes and numbers").add_argument("name", nargs="*")


def run(args: argparse.Namespace) -> int:
    if args.action == "record":
        if args.margin is not None and not (0 < args.margin < math.inf):
            raise UserError(f"--margin {args.margin}: must be a positive number of nats")
        if args.without_speed is not None and not args.without_speed.strip():
            raise UserError("--without-speed needs the reason why the speeds say nothing")
        path_of(args.name, args.folder)
        content = from_runs(args.name, read_runs(args.runs), args.margin, args.note, args.without_speed or "")
        path = write(content, args.folder, args.replace)
        print(f"{path}\n{describe(content)}")
    elif args.action == "publish":
        content = published(args)
        print(f"{write(content, args.folder, args.replace)}\n{describe(content)}")
    elif args.action == "list":
        for name in names(args.folder):
            print(describe(load(name, args.folder)))
    elif args.action == "show":
        show(load(args.name, args.folder))
    else:
        return verify(args.name or names(args.folder), args.folder)
    return 0


def published(args: argparse.Namespace) -> dict[str, Any]:
    """The content of a published reference; raises UserError if its key is incomplete."""
    if (args.metric == "hellaswag_acc_norm") != (args.scoring is not None):
        raise UserError("--scoring is part of a HellaSwag number and of no other")
    if args.metric == "hellaswag_acc_norm" and not 0 < args.value < 1:
        raise UserError(f"{args.value}: an accuracy is given as a fraction, such as 0.2955")
    return {
        "schema": SCHEMA,
        "kind": "published",
        "name": args.name,
        "recorded": date.today().isoformat(),
        "note": args.note,
        "metric": args.metric,
        "value": args.value,
        "datasets": args.dataset,
        "val_tokens": args.val_tokens,
        "scoring": args.scoring,
        "trained_tokens": args.trained_tokens,
        "source": args.source,
    }


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.json"))


def describe(content: dict[str, Any]) -> str:
    """One line: name, number, what it is of."""
    if content["kind"] == "published":
        key = f"{content['scoring']} scoring" if content["scoring"] else content["datasets"][0]
        return f"{content['name']:<28} published  {content['metric']} {content['value']:.4f}  {key}"
    facts, stack = content["facts"], content["stack"]
    device = ", ".join(sorted(set(stack["gpus"] or []))) or stack["cpu"] or stack["device"]
    return (
        f"{content['name']:<28} runs       val_loss {content['mean']:.4f} +- {content['std']:.4f} "
        f"(n={content['n']})  {facts['recipe']}, {facts['train_tokens']:,} tokens, {device}"
    )


def show(content: dict[str, Any]) -> None:
    """Everything a person wants to know; the curves are left in the file."""
    for key, value in content.items():
        if key == "runs":
            for run in value:
                speed = f"{run['tokens_per_s']:,.0f} tokens/s" if run["tokens_per_s"] else ""
                print(f"seed {run['seed']:>6}  val_loss {run['val_loss']:.5f}  {speed}")
        elif key in ("commands", "history"):
            for item in value:
                print(f"{key}: {item if isinstance(item, str) else json.dumps(item)}")
        elif isinstance(value, dict):
            print(f"{key}:")
            for inner, item in value.items():
                print(f"  {inner}: {item}")
        else:
            print(f"{key}: {value}")


def verify(wanted: Sequence[str], folder: Path) -> int:
    """0 if every baseline is as it was recorded, else 1; one line each."""
    bad = 0
    for name in wanted:
        path = path_of(name, folder)
        try:
            problems = check(read_json(path), name)
        except (UserError, KeyError, TypeError) as error:
            problems = [f"unreadable: {error}"]
        print(f"{name}: {'; '.join(problems) or 'ok'}")
        bad += bool(problems)
    return int(bad > 0)
