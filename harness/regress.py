"""The regression check: runs against a fixed baseline, by a test whose error rates are known.

Exit codes: 0 PASS, 1 FAIL, 3 INCONCLUSIVE, and 2 for runs that must not be compared. The questions, the tests
behind them and their measured error rates are in docs/regress.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import baseline as baselines
from harness import stats
from harness.baseline import HARDWARE_FIELDS, Run, differences, learning, read_runs, source
from harness.common import SCHEMA, UserError, launch_training, read_json
from harness.stats import Verdict
from harness.watch import Watcher, follow

QUESTIONS = ("target", "worse", "same", "exact")
ALPHA = {"target": 0.01, "worse": 0.05, "same": 0.05}  # target: the speedrun's own rule

# `make regress`: the sample recipe on a schedule that two cores finish in under a minute a seed. Two
# micro-batches a step, so that accumulation is exercised; the seeds are none of the baseline's.
SAMPLE_BASELINE = "sample-cpu-short"
SAMPLE_SEEDS = (1001, 1002, 1003)
SAMPLE_FLAGS = (
    *("--max-steps", "48", "--batch-tokens", "256", "--micro-batch", "1", "--seq-len", "128"),
    *("--val-tokens", "2048", "--val-every", "8", "--checkpoint-every", "0"),
)


@dataclass
class Result:
    """What is printed, kept as JSON, and pasted as Markdown. Losses in nats (accuracies as fractions)."""

    question: str
    verdict: str
    exit_code: int
    baseline: dict[str, Any]
    runs: list[dict[str, Any]]
    reason: str
    alpha: float | None = None
    margin: float | None = None
    method: str | None = None
    estimate: float | None = None
    interval: list[float] | None = None  # each end is missed with probability alpha_spent
    df: float | None = None
    p_pass: float | None = None
    p_fail: float | None = None
    alpha_spent: float | None = None
    looks: list[int] | None = None
    seeds_used: int = 0
    seeds_needed: int | None = None
    changes: list[str] = field(default_factory=list)
    suspicions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared_on: dict[str, Any] = field(default_factory=dict)
    throughput: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA
    date: str = ""


# --- like with like ----------------------------------------------------------------------------------------


def check_alike(runs: Sequence[Run], baseline: dict[str, Any], question: str) -> dict[str, Any]:
    """The facts that runs and baseline share. Raises UserError with every line that differs."""
    lines: list[str] = []
    if baseline["kind"] == "published":
        shared = {
            "dataset": baseline["datasets"],
            "scoring": baseline["scoring"],
            "val_tokens": baseline["val_tokens"],
        }
        if question != "target":
            raise UserError(f"{baseline['name']} is a published number without seeds: ask --question target")
        for run in runs:
            if baseline["metric"] == "val_loss":
                lines += _unlike_published(run, baseline)
            else:
                hellaswag(run, baseline["scoring"])
    else:
        shared = baseline["facts"]
        for run in runs:
            facts = run.facts()
            if run.diverged:  # its result may lack what was never measured
                facts = {key: value if value is not None else shared[key] for key, value in facts.items()}
            lines += differences(shared, facts, run.name)
            if question == "exact":
                lines += differences(baseline["stack"], run.stack(), run.name)
                if run.stack()["device"] != "cpu" and not (run.config["deterministic"] and baseline["deterministic"]):
                    lines.append(
                        f"deterministic: needed on both sides off the CPU; {run.name} "
                        f"{run.config['deterministic']}, baseline {baseline['deterministic']}"
                    )
    if lines:
        raise UserError(f"not like with like, so not compared with {baseline['name']}: " + "; ".join(lines))
    return {key: value for key, value in shared.items() if value is not None}


def _unlike_published(run: Run, baseline: dict[str, Any]) -> list[str]:
    """How a run's val loss is of another kind than the published one."""
    lines = []
    if run.dataset not in baseline["datasets"]:
        known = repr(run.dataset) if run.dataset else "unknown (no manifest in its data folder)"
        lines.append(f"dataset: baseline {' or '.join(map(repr, baseline['datasets']))}, {run.name} {known}")
    tokens = run.facts()["val_protocol.tokens"]
    if baseline["val_tokens"] not in (None, tokens):
        lines.append(f"val_protocol.tokens: baseline {baseline['val_tokens']}, {run.name} {tokens}")
    return lines


def hellaswag(run: Run, scoring: str) -> float:
    """acc_norm (fraction) of a run under this scoring; raises UserError if there is none."""
    path = run.path / f"hellaswag-{scoring}.json"
    if not path.exists():
        others = sorted(p.stem.removeprefix("hellaswag-") for p in run.path.glob("hellaswag-*.json"))
        raise UserError(
            f"not like with like: {run.path} has no HellaSwag under {scoring} scoring (it has: "
            f"{', '.join(others) or 'none'}); run python -m eval hellaswag {run.path} --scoring {scoring}"
        )
    content = read_json(path)
    if content["subset"]:
        raise UserError(f"not like with like: {path} covers {content['examples']} examples, a subset")
    return float(content["acc_norm"])


def changes(run: Run, baseline: dict[str, Any]) -> list[str]:
    """What was changed on purpose, or at least is another: config fields and the trainer's source."""
    if baseline["kind"] == "published":
        return []
    from train_gpt2 import Config

    # A field that the trainer did not have yet when the baseline was recorded had, in effect, its default.
    default = learning(asdict(Config()))
    new, old = default | learning(run.config), default | baseline["config"]
    lines = [f"{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in sorted(new | old) if new.get(k) != old.get(k)]
    if source(run.env) != {"train_gpt2.py": baseline["train_gpt2_sha256"]}:
        lines.append("train_gpt2.py: another version")
    return lines


# --- verdicts ----------------------------------------------------------------------------------------------


def judge(
    runs: Sequence[Run],
    baseline: dict[str, Any],
    question: str,
    *,
    alpha: float | None = None,
    margin: float | None = None,
    target: float | None = None,
    looks: Sequence[int] | None = None,
) -> Result:
    """The verdict over finished runs with seeds of their own. Raises UserError for what cannot be asked."""
    if question in ("worse", "same"):
        margin = margin if margin is not None else baseline.get("margin")
        if margin is None:
            raise UserError(f"--question {question} needs --margin: the nats that you declare acceptable")
        if not 0 < margin < math.inf:
            raise UserError(f"--margin {margin}: must be a positive number of nats")
    elif margin is not None:
        raise UserError(f"--margin means nothing for --question {question}")
    if question == "exact" and (alpha is not None or looks):
        raise UserError("--alpha and --looks mean nothing for --question exact: nothing is left to chance")
    if alpha is not None and not 0 < alpha < 0.5:
        raise UserError(f"--alpha {alpha}: must lie between 0 and 0.5")
    if question == "target":
        if target is None:
            if baseline["kind"] != "published":
                raise UserError(f"{baseline['name']} has no target: give --target LOSS, or a published baseline")
            target = baseline["value"]
    elif target is not None:
        raise UserError(f"--target means nothing for --question {question}")
    shared = check_alike(runs, baseline, question)
    result = Result(
        question,
        Verdict.INCONCLUSIVE.name,
        int(Verdict.INCONCLUSIVE),
        {key: baseline[key] for key in ("name", "hash", "recorded", "n", "mean", "std", "value") if key in baseline},
        [{"path": str(r.path), "seed": r.seed, "value": None if r.diverged else _value(r, baseline)} for r in runs],
        "",
        margin=margin,
        changes=sorted({line for run in runs for line in changes(run, baseline)}),
        compared_on=shared,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    diverged = [run for run in runs if run.diverged]
    if diverged:
        ends = ", ".join(f"{r.name} ({r.result['exit_reason']} at step {r.result['step']})" for r in diverged)
        return _decided(result, Verdict.FAIL, f"diverged: {ends}; no test is needed")
    if question == "exact":
        return _exact(result, runs, baseline)
    return _tested(result, runs, baseline, target, alpha or ALPHA[question], looks)


def _decided(result: Result, verdict: Verdict, reason: str) -> Result:
    result.verdict, result.exit_code, result.reason = verdict.name, int(verdict), reason
    return result


def _value(run: Run, baseline: dict[str, Any]) -> float:
    return run.val_loss if baseline.get("metric") != "hellaswag_acc_norm" else hellaswag(run, baseline["scoring"])


def _tested(
    result: Result,
    runs: Sequence[Run],
    baseline: dict[str, Any],
    target: float | None,
    alpha: float,
    looks: Sequence[int] | None,
) -> Result:
    """Estimate, decide by the question's test, and say how many seeds would decide it."""
    values = [run["value"] for run in result.runs]
    sign = -1.0 if baseline.get("metric") == "hellaswag_acc_norm" else 1.0  # of an accuracy, more is better
    base = {run["seed"]: run["val_loss"] for run in baseline.get("runs", [])}

    def first(k: int) -> stats.Estimate:
        new, seeds = [sign * v for v in values[:k]], [run.seed for run in runs[:k]]
        if target is not None:
            return stats.one_sample(new, sign * target)
        # The data order is a fact that both sides share (it does not depend on the seed); equal seeds then
        # start from the same weights, and their difference cancels what the seed brings.
        if k > 1 and set(seeds) <= set(base):
            return stats.paired(new, [base[seed] for seed in seeds])
        return stats.two_sample(new, list(base.values()))

    margin = result.margin or 0.0
    used = len(values)
    if looks is None:
        spent = alpha
        verdict = Verdict(int(stats.decide(result.question, first(used), alpha, margin)))
    else:
        spent = alpha / len(looks)
        taken, fell = stats.sequential(result.question, first, used, looks, alpha, margin)
        verdict = Verdict(int(taken))
        used = int(fell) or max((k for k in looks if k <= used), default=0)
        result.looks = list(looks)
    result.alpha, result.alpha_spent, result.seeds_used = alpha, spent, used
    if used == 0:
        assert looks is not None
        return _decided(result, verdict, f"the first look is at {looks[0]} seeds; there are {len(values)}")
    estimate = first(used)
    result.method, result.estimate, result.df = (
        estimate.method,
        sign * float(estimate.diff),
        float(estimate.df),
    )
    if not math.isnan(estimate.se):
        low, high = estimate.interval(spent)
        result.interval = sorted((sign * float(low), sign * float(high)))
        result.p_pass, result.p_fail = map(float, stats.p_values(result.question, estimate, margin))
    if verdict == Verdict.INCONCLUSIVE:
        result.seeds_needed = _seeds_needed(result.question, estimate, used, len(base), spent, margin)
    return _decided(result, verdict, _reason(result, target, verdict, sign < 0))


def _seeds_needed(question: str, estimate: stats.Estimate, n: int, m: int, alpha: float, margin: float) -> int | None:
    """Seeds in all for a decision with 80% power if the present estimate and deviation are the truth."""
    against = None if question == "target" or estimate.method == "paired t" else m
    scale = (1 / n if against is None else 1 / n + 1 / m) ** 0.5
    deviation = float(estimate.se) / scale
    if not deviation > 0:  # NaN: one run against a fixed value
        return None
    needed = stats.seeds_needed(question, float(estimate.diff), deviation, alpha, margin=margin, m=against)
    return None if needed is None else max(needed, n + 1)


def _reason(result: Result, target: float | None, verdict: Verdict, more_is_better: bool) -> str:
    """The verdict in words."""
    if result.interval is None:
        return "one run has no deviation of its own: at least two seeds are needed"
    low, high = result.interval
    if result.question == "target":
        reached, missed = ("at least", "below") if more_is_better else ("at most", "above")
        said = {
            Verdict.PASS: f"the mean is {reached} {target:g}",
            Verdict.FAIL: f"the mean is {missed} {target:g}",
        }
    elif result.question == "worse":
        but = ", though it is worse" if low > 0 else ""
        said = {
            Verdict.PASS: f"not worse by {result.margin:g} or more{but}",
            Verdict.FAIL: "worse than the baseline",
        }
    else:
        but = ", though not equal" if low > 0 or high < 0 else ""
        said = {
            Verdict.PASS: f"the same within {result.margin:g}{but}",
            Verdict.FAIL: "not the same as the baseline",
        }
    if verdict != Verdict.INCONCLUSIVE:
        return said[verdict]
    text = f"neither shown: {said[Verdict.PASS]}, nor {said[Verdict.FAIL]}"
    if result.seeds_needed is None:
        return text + "; no number of new seeds decides it at this estimate (the baseline would need more, too)"
    more = result.seeds_needed - result.seeds_used
    return text + f"; about {more} more seeds ({result.seeds_needed} in all) would decide it, four times in five"


def _exact(result: Result, runs: Sequence[Run], baseline: dict[str, Any]) -> Result:
    """Bit equality with the baseline's run of the same seed: val losses, and train losses by digest."""
    known = {run["seed"]: run for run in baseline["runs"]}
    for run in runs:
        if run.seed not in known:
            raise UserError(f"{run.path}: seed {run.seed} is none of {baseline['name']}'s ({sorted(known)})")
        expected, found = known[run.seed]["curve"], run.curve()
        for before, now in zip(expected, found):
            if before != now:
                return _decided(result, Verdict.FAIL, f"{run.name} departs by step {now['step']}: {_apart(before, now)}")
        if len(expected) != len(found):
            return _decided(result, Verdict.FAIL, f"{run.name} has {len(found)} validations, not {len(expected)}")
    result.seeds_used = len(runs)
    return _decided(result, Verdict.PASS, f"every loss of {len(runs)} run(s) is equal to the last bit")


def _apart(before: dict[str, Any], now: dict[str, Any]) -> str:
    if before["step"] != now["step"]:
        return f"validated at step {now['step']}, not {before['step']}"
    if before["val_loss"] != now["val_loss"]:
        return f"val loss {now['val_loss']!r}, was {before['val_loss']!r}"
    return "a train loss up to there differs, the val loss does not"


def throughput(runs: Sequence[Run], baseline: dict[str, Any], margin: float, alpha: float = 0.05) -> dict[str, Any]:
    """Ratio of tokens/s to the baseline's with its bootstrap interval, on the same hardware only.

    PASS: not slower by `margin` (a part) or more; FAIL: slower; each end of the interval is missed with
    probability alpha. Never part of the loss verdict.
    """
    if baseline["kind"] != "runs":
        return {"compared": False, "why": "a published number has no throughput here"}
    if reason := baseline.get("without_speed"):
        return {"compared": False, "why": f"the baseline keeps no tokens/s: {reason}"}
    hardware = {key: baseline["stack"][key] for key in ("device", "world_size", *HARDWARE_FIELDS)}
    for run in runs:
        lines = differences(hardware, run.stack(), run.name)
        if lines or not run.steady_tokens_per_s():
            return {"compared": False, "why": "; ".join(lines) or f"{run.name} has no steady steps"}
    ratio, low, high = stats.ratio_interval(
        [run.steady_tokens_per_s() for run in runs],
        [run["steady_tokens_per_s"] for run in baseline["runs"]],
        2 * alpha,
    )
    verdict = Verdict.PASS if low > 1 - margin else Verdict.FAIL if high < 1 else Verdict.INCONCLUSIVE
    return {
        "compared": True,
        "ratio": ratio,
        "interval": [low, high],
        "alpha": alpha,
        "margin": margin,
        "verdict": verdict.name,
        "exit_code": int(verdict),
    }


# --- the statement -----------------------------------------------------------------------------------------


def statement(result: Result) -> str:
    """Markdown for a pull request: the verdict, what it rests on, and what should make a reader doubt it."""
    base = result.baseline
    values = [run["value"] for run in result.runs if run["value"] is not None]
    seeds = ", ".join(str(run["seed"]) for run in result.runs)
    rows = [
        ("verdict", f"**{result.verdict}**: {result.reason}"),
        ("question", _question(result)),
        ("runs", f"{len(result.runs)} (seeds {seeds})" + (f", mean {_mean_std(values)}" if values else "")),
        ("baseline", f"`{base['name']}` of {base['recorded']}, {_number(base)}, hash {base['hash'][:12]}"),
    ]
    if result.estimate is not None and result.interval is not None and result.alpha_spent is not None:
        low, high = result.interval
        ends = f"{1 - 2 * result.alpha_spent:.3g} interval {low:+.5f} to {high:+.5f}"
        how = f"{result.method}, {result.df:.3g} degrees of freedom"
        p_values = f"PASS {result.p_pass:.2g}, FAIL {result.p_fail:.2g}, each against {result.alpha_spent:.3g}"
        rows += [("difference", f"{result.estimate:+.5f}, {ends} ({how})"), ("p-values", p_values)]
    if result.looks:
        plan = f"declared at {', '.join(map(str, result.looks))} seeds, alpha {result.alpha} spent evenly"
        rows.append(("looks", f"{plan}; decided on {result.seeds_used}"))
    rows += [
        ("throughput", _throughput_line(result.throughput)),
        ("changed", "; ".join(result.changes) or "nothing in the config or the trainer"),
        ("compared on", "; ".join(f"{key} {_short(value)}" for key, value in result.compared_on.items())),
    ]
    table = "\n".join(f"| {name} | {text} |" for name, text in rows)
    warnings = "".join(f"\n> **Too good to be true?** {line}\n" for line in result.suspicions)
    notes = "".join(f"\n> Note: {line}\n" for line in result.notes)
    return f"### Regression check: {result.verdict}\n\n| | |\n|---|---|\n{table}\n{warnings}{notes}"


def _question(result: Result) -> str:
    name = result.baseline["name"]
    return {
        "target": f"does the mean reach the target? (`{name}`)",
        "worse": f"is it worse than `{name}` by {result.margin} or more?",
        "same": f"is it the same as `{name}` within {result.margin}?",
        "exact": f"is it bit-equal to `{name}`?",
    }[result.question]


def _mean_std(values: Sequence[float]) -> str:
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return f"{mean:.5f}"
    return f"{mean:.5f} +- {(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5:.5f}"


def _number(base: dict[str, Any]) -> str:
    if "value" in base:
        return f"published {base['value']:g}"
    return f"{base['mean']:.5f} +- {base['std']:.5f} (n={base['n']})"


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] + "…" if len(text) == 64 else text


def _throughput_line(found: dict[str, Any]) -> str:
    if not found.get("compared"):
        return f"not compared ({found.get('why', 'not asked')})"
    low, high = found["interval"]
    return (
        f"{found['verdict']}: {found['ratio']:.3f} of the baseline's, interval {low:.3f} to {high:.3f}, "
        f"accepted loss {found['margin']:.0%}"
    )


# --- the command -------------------------------------------------------------------------------------------


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("regress", help="test runs against a baseline: PASS, FAIL or INCONCLUSIVE")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="finished run, one per seed, in the order they came")
    parser.add_argument("--baseline", help="name of the baseline (python -m harness baseline list)")
    parser.add_argument("--folder", type=Path, default=baselines.FOLDER, help="where baselines are kept")
    parser.add_argument(
        "--question",
        choices=QUESTIONS,
        help="target: mean loss at most a number. worse (default): worse by the margin or more? "
        "same: equal within the margin? exact: bit-equal?",
    )
    parser.add_argument("--margin", type=float, help="acceptable difference in nats (default: the baseline's)")
    parser.add_argument("--target", type=float, help="the number to reach, for --question target")
    parser.add_argument("--alpha", type=float, help="chance of a wrong verdict (default: target 0.01, others 0.05)")
    parser.add_argument(
        "--looks",
        metavar="N,N,...",
        help="seed counts at which you will look, declared before the first look",
    )
    parser.add_argument("--throughput-margin", type=float, metavar="PART", help="also fail if slower; accepted loss")
    parser.add_argument("--out", type=Path, help="path without suffix of verdict (.json) and statement (.md)")
    parser.add_argument("--watch", metavar="RUN", help="follow a running run instead")
    parser.add_argument("--poll", type=float, default=5.0, help="seconds between two looks of --watch")
    parser.add_argument("--patience", type=float, default=1800.0, help="seconds of silence before --watch gives up")
    parser.add_argument("--run-sample", action="store_true", help="train three seeds of the sample recipe and check them")


def run(args: argparse.Namespace) -> int:
    if args.run_sample or args.watch:
        way = "--run-sample" if args.run_sample else "--watch"
        if args.runs or (args.run_sample and args.watch):
            raise UserError(f"{way} takes no other runs")
        if args.run_sample:
            args.baseline = args.baseline or SAMPLE_BASELINE
            baselines.load(args.baseline, args.folder)  # before minutes are spent
            args.runs = [str(path) for path in train_sample(Path("runs"))]
    if not args.baseline:
        raise UserError("--baseline NAME is missing: what are the runs to be compared with?")
    baseline = baselines.load(args.baseline, args.folder)
    if args.watch:
        if args.question or args.looks or args.target is not None or args.margin is not None:
            raise UserError("--watch asks its own question: has the val curve left the baseline's band?")
        return int(follow(Watcher(args.watch, baseline), _say, args.poll, args.patience))
    if not args.runs:
        raise UserError("no runs given: name finished run directories, or use --watch or --run-sample")
    runs = read_runs(args.runs)
    question = args.question or "worse"
    looks = parse_looks(args.looks) if args.looks else None
    result = judge(runs, baseline, question, alpha=args.alpha, margin=args.margin, target=args.target, looks=looks)
    from harness.suspect import suspicions

    result.suspicions = suspicions(runs, baseline)
    result.throughput = throughput(runs, baseline, 0.05 if args.throughput_margin is None else args.throughput_margin)
    out = args.out or runs[0].path / f"regress-{baseline['name']}-{question}"
    result.notes += earlier_looks(out.with_suffix(".json"), result)
    if args.throughput_margin is not None:
        _fold_in_throughput(result)
    text = statement(result)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    out.with_suffix(".md").write_text(text)
    print(text)
    print(f"written: {out.with_suffix('.json')} and {out.with_suffix('.md')}")
    return result.exit_code


def _say(text: str) -> None:
    print(text, flush=True)


def _fold_in_throughput(result: Result) -> None:
    """With --throughput-margin the run must also hold its speed: the worse of the two verdicts counts."""
    found = result.throughput
    if not found["compared"]:
        raise UserError(f"--throughput-margin: the speeds cannot be compared: {found['why']}")
    severity = [Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL]
    speed, loss = Verdict(found["exit_code"]), Verdict(result.exit_code)
    if severity.index(speed) > severity.index(loss):
        _decided(result, speed, f"{result.reason}; throughput: {speed.name}")


def parse_looks(text: str) -> list[int]:
    """'3,5,8' -> [3, 5, 8]; raises UserError."""
    try:
        looks = [int(part) for part in text.split(",")]
        stats.check_looks(looks)
    except ValueError as error:
        raise UserError(f"--looks {text}: must be rising seed counts such as 3,5,8 ({error})") from None
    return looks


def earlier_looks(kept: Path, now: Result) -> list[str]:
    """What an earlier verdict on the same first run means for this one.

    Raises UserError when a plan of looks was declared there and is another now: a plan that moves with the
    data bounds nothing.
    """
    if not kept.exists():
        return []
    before = read_json(kept)
    if before["looks"] and before["looks"] != now.looks:
        raise UserError(
            f"{kept}: this check was declared with --looks {','.join(map(str, before['looks']))}; "
            "go on with that plan, or ask a new question of new runs with another --out"
        )
    undecided = before["verdict"] == Verdict.INCONCLUSIVE.name and now.question != "exact"
    if undecided and now.looks is None and len(now.runs) > len(before["runs"]):
        return [
            f"these seeds were looked at before, with {len(before['runs'])} of them; without --looks, "
            "declared at the start, the chance of a wrong verdict is more than alpha"
        ]
    return []


def train_sample(root: Path) -> list[Path]:
    """Train the sample recipe on the short schedule, one run per seed, into fresh directories under `root`.

    Raises UserError if a run ends in bad input; a run that diverges is a result.
    """
    folder = root / f"regress-sample-{datetime.now():%Y%m%d-%H%M%S}"
    data = Path("data/sample")
    if not (data / "manifest.json").exists():
        from data.sample import make_sample

        make_sample(data)
    paths = []
    for seed in SAMPLE_SEEDS:
        path = folder / f"seed-{seed}"
        code = launch_training(["sample", "--device", "cpu", *SAMPLE_FLAGS, "--seed", str(seed), "--run-dir", str(path)])
        if not (path / "result.json").exists():
            raise UserError(f"training of {path} ended with exit code {code} and left no result")
        paths.append(path)
    return paths
