"""The five gates that a candidate passes, in order, before it may become the control.

Each is a function of what is on disk (run directories, a profile, a killed and resumed run) and of what was declared
before: nothing here trains. The first gate that fails decides; docs/promote.md says why these five.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import baseline as baselines
from harness import regress, stats
from harness.baseline import Run, read_run
from harness.common import UserError
from harness.stats import Verdict

WORTH = 0.05  # share of the step that a limit must hold before a candidate that removes it is worth a try
FULL = 0.8  # share of the device's memory from which capacity counts as the limit
MARGIN = 0.1  # of the device's memory that must stay free: fragmentation, CUDA context, longer documents
DRIFT = 0.01  # fall of the last third below the first that counts, where it is also significant
COLLAPSE = 0.05  # such a fall that no heat explains: a leak, fragmentation, a start that was the only gain
# One seed has no deviation of its own: that of a run's final loss (modded-nanogpt track 3), three of it, two runs.
ONE_SEED = 3 * 2**0.5 * stats.PUBLISHED_DEVIATION
ALPHA = 0.05

OBJECTIVES = ("throughput", "time_to_loss", "fit")


@dataclass(frozen=True)
class Gate:
    """One gate's outcome with the evidence for it."""

    number: int
    name: str
    status: str  # pass, fail, or skipped where an earlier gate has decided
    evidence: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Evidence:
    """Everything the gates look at. Runs are directories; repetitions of one seed are allowed."""

    objective: str
    addresses: Sequence[str]  # limits that the candidate takes away: profile.LIMITS, or "capacity"
    tolerance: float  # nats of val loss; 0: bit for bit
    profile: dict[str, Any] | None  # of the control; None where it could not be made
    control: Sequence[Path]
    candidate: Sequence[Path]
    recovery: dict[str, Any] | None = None  # {"twin", "broken": run directories, "killed_after_step", "resumed_at"}
    recovery_tolerance: float = 0.0
    problem: str = ""  # why there is no profile
    memory_limit: int | None = None  # bytes; None: the device's
    origin: float | None = None  # val loss of this workload's first control
    baseline: dict[str, Any] | None = None  # a frozen one, from harness.baseline.load


def evaluate(e: Evidence) -> list[Gate]:
    """All five gates. The kill test is skipped, not failed, where the others have decided and it was not made."""
    control, candidate = [read(path) for path in e.control], [read(path) for path in e.candidate]
    gates = [
        limit_gate(e, control),
        loss_gate(e, control, candidate),
        objective_gate(e, control, candidate),
        memory_gate(e, candidate),
    ]
    decided = any(gate.status == "fail" for gate in gates)
    if e.recovery is None and decided:
        gates.insert(3, Gate(4, "recovery", "skipped", "an earlier gate has decided"))
    else:
        gates.insert(3, recovery_gate(e))
    return gates


def unworthy(e: Evidence) -> list[Gate]:
    """All five gates where the profile alone decides against a candidate; empty where it does not, or is not asked."""
    if e.objective != "throughput":
        return []
    first = limit_gate(e, [])
    names = {2: "loss", 3: "objective", 4: "recovery", 5: "memory"}
    skipped = [Gate(number, name, "skipped", "gate 1 has decided; nothing was trained") for number, name in names.items()]
    return [] if first.status == "pass" else [first, *skipped]


def verdict(gates: Sequence[Gate]) -> tuple[str, str]:
    """("accepted" or "rejected", the reason): the first gate that failed decides."""
    for gate in gates:
        if gate.status == "fail":
            return "rejected", f"gate {gate.number} ({gate.name}): {gate.evidence}"
    objective = next(gate for gate in gates if gate.number == 3)
    return "accepted", objective.evidence


def read(path: Path) -> Run:
    """A run that may have ended in any way: one that had no room for its first step left a result alone."""
    if not (path / "config.json").exists() and (path / "result.json").exists():
        result = baselines.read_json(path / "result.json")
        return Run(path, result["recipe"], {"seed": result["seed"]}, "", {}, result, [], [])
    return read_run(path, finished=False)


def _ended(run: Run) -> str:
    return str(run.result.get("exit_reason", "unfinished"))


# --- 1: the limit ------------------------------------------------------------------------------------------


def limit_gate(e: Evidence, control: Sequence[Run]) -> Gate:
    """The control's profile names a limit that the candidate addresses; for an optimizer its loss curve does."""

    def gate(ok: bool, text: str, **data: Any) -> Gate:
        return Gate(1, "limit", "pass" if ok else "fail", text, data)

    if e.objective == "time_to_loss":
        ends = statistics.fmean(r.val_loss for r in control) if control and all(r.val for r in control) else math.nan
        steps = control[0].config["max_steps"] if control else 0
        return gate(True, f"not a matter of the step's time: the control's curve ends at {ends:.4f} after {steps} steps")
    if e.objective == "fit":
        short = bool(control) and all(_ended(r) == "out_of_memory" for r in control)
        return gate(short, "the control runs out of memory" if short else "the control fits: memory is not its limit")
    if e.profile is None:
        why = f": {e.problem}" if e.problem else ""
        return gate(False, f"there is no profile of the control, so no limit is known{why}")
    shares, sentence = e.profile["limits"], e.profile["sentence"]
    data = {"limits": shares, "parts_ms": e.profile["parts_ms"], "sentence": sentence}
    if "capacity" in e.addresses:
        share = shares.get("capacity")
        if share is not None and share >= FULL:
            return gate(True, f"the control fills {share:.0%} of the device's memory", **data)
        known = "nothing says that memory binds, since its size is unknown"
        if share is not None:
            known = f"memory does not bind: the control takes {share:.0%} of the device's memory (at least {FULL:.0%} would)"
        if set(e.addresses) == {"capacity"}:
            return gate(False, f"{known}, and {sentence}", **data)
    named = [name for name in e.addresses if name != "capacity"]
    share = sum(shares[name] for name in named)
    text = f"{' and '.join(named)} hold {share:.0%} of the control's step; {sentence}"
    return gate(share >= WORTH, text if share >= WORTH else f"nothing to gain: {text}", **data)


# --- 2: the loss -------------------------------------------------------------------------------------------


def loss_gate(e: Evidence, control: Sequence[Run], candidate: Sequence[Run]) -> Gate:
    """The candidate's loss is the control's within the tolerance, or better, and no worse than where it all began."""

    def gate(ok: bool, text: str, **data: Any) -> Gate:
        return Gate(2, "loss", "pass" if ok else "fail", text, data)

    ends = [f"{run.name}: {_ended(run)}" for run in candidate if _ended(run) != "finished"]
    if ends or not candidate:
        return gate(False, f"the candidate did not finish ({', '.join(ends) or 'no run'})")
    if e.objective == "fit":  # the control has no loss; its own small-batch equal is the baseline, where given
        return _against_baseline(e, candidate) or gate(True, "the control cannot run; the candidate's loss is finite")
    if lost := [run.name for run in control if _ended(run) != "finished"] or ([] if control else ["none"]):
        return gate(False, f"the control did not finish ({', '.join(lost)}): nothing to compare with")
    expected = control[0].facts()
    for run in [*control, *candidate]:
        different = baselines.differences({k: v for k, v in expected.items() if k != "val_protocol.dtype"}, run.facts(), run.name)
        if different:
            return gate(False, f"not like with like: {'; '.join(different)}")
    seeds = sorted({r.seed for r in control} & {r.seed for r in candidate})
    if not seeds:
        return gate(False, "control and candidate share no seed")
    if e.tolerance == 0:
        return _exact(control, candidate)

    def mean(runs: Sequence[Run], seed: int) -> float:
        return statistics.fmean(r.val_loss for r in runs if r.seed == seed)

    old, new = [mean(control, s) for s in seeds], [mean(candidate, s) for s in seeds]
    diff = statistics.fmean(new) - statistics.fmean(old)
    relative = diff / statistics.fmean(old)
    data = {"seeds": seeds, "control": old, "candidate": new, "difference": diff, "relative": relative}
    text = f"val loss {statistics.fmean(new):.4f} against {statistics.fmean(old):.4f} ({diff:+.4f}, {relative:+.2%})"
    if len(seeds) == 1:
        late = _late_difference(control, candidate, seeds[0])
        data["train_difference"] = late
        text += f", train loss of the last third {late:+.4f}; tolerance {e.tolerance} (one seed: no test, a bound)"
        ok = diff <= e.tolerance and late <= e.tolerance
    else:
        estimate = stats.paired(new, old)
        decided = Verdict(int(stats.decide("worse", estimate, ALPHA, e.tolerance)))
        # The regression check says the same with its own words, where there are seeds enough to freeze the control.
        if len(seeds) >= baselines.FEWEST_SEEDS and len(control) == len(candidate) == len(seeds):
            try:
                judged = regress.judge(candidate, baselines.from_runs("control", control), "worse", margin=e.tolerance)
                decided, text = Verdict[judged.verdict], f"{text}; {judged.reason}"
            except UserError as error:  # another precision, or other hardware in between: the paired test above stands
                text += f"; {error}"
        p_pass, p_fail = (float(p) for p in stats.p_values("worse", estimate, e.tolerance))
        data |= {"p_pass": p_pass, "p_fail": p_fail, "verdict": decided.name}
        text += f"; {decided.name} over {len(seeds)} seeds (margin {e.tolerance}, p {p_pass:.2g})"
        ok = decided == Verdict.PASS
        if decided == Verdict.INCONCLUSIVE:
            text += ": not shown, more seeds would decide"
    if not ok:
        return gate(False, f"the loss is not the control's: {text}", **data)
    if e.origin is not None and statistics.fmean(new) - e.origin > e.tolerance:
        return gate(
            False, f"small losses have added up: {statistics.fmean(new):.4f} against {e.origin:.4f} of the first control", **data
        )
    return _against_baseline(e, candidate, text, data) or gate(True, text, **data)


def _exact(control: Sequence[Run], candidate: Sequence[Run]) -> Gate:
    """Every logged loss is the control's to the last bit."""
    by_seed = {run.seed: run for run in control}
    for run in candidate:
        twin = by_seed.get(run.seed)
        if twin is None:
            continue
        for key, ours, theirs in (("loss", run.train, twin.train), ("val_loss", run.val, twin.val)):
            for a, b in zip(ours, theirs):
                if a[key] != b[key]:
                    text = f"{run.name} departs at step {a['step']}: {key} {a[key]!r}, not {b[key]!r}; bit equality was declared"
                    return Gate(2, "loss", "fail", text, {"step": a["step"], "difference": a[key] - b[key]})
        if len(run.train) != len(twin.train):
            return Gate(2, "loss", "fail", f"{run.name} has {len(run.train)} steps, the control {len(twin.train)}")
    return Gate(2, "loss", "pass", "every loss is the control's to the last bit", {"difference": 0.0})


def _late_difference(control: Sequence[Run], candidate: Sequence[Run], seed: int) -> float:
    """Mean difference of train losses over the last third of the steps: less noisy than one validation."""

    def late(runs: Sequence[Run]) -> float:
        rows = [r.train[-max(1, len(r.train) // 3) :] for r in runs if r.seed == seed]
        return statistics.fmean(row["loss"] for part in rows for row in part)

    return late(candidate) - late(control)


def _against_baseline(e: Evidence, candidate: Sequence[Run], text: str = "", data: dict[str, Any] | None = None) -> Gate | None:
    """The frozen baseline's answer, where one was given; None where there is nothing to say."""
    if e.baseline is None:
        return None
    distinct = list({run.seed: run for run in candidate}.values())
    try:
        judged = regress.judge(distinct, e.baseline, "worse", margin=e.tolerance or None)
    except UserError as error:
        return Gate(2, "loss", "fail", f"the frozen baseline cannot be compared: {error}")
    ok = judged.verdict != Verdict.FAIL.name
    said = f"{text}; {judged.verdict} against {e.baseline['name']} ({judged.reason})"
    return Gate(2, "loss", "pass" if ok else "fail", said.lstrip("; "), data or {})


# --- 3: the objective --------------------------------------------------------------------------------------


def objective_gate(e: Evidence, control: Sequence[Run], candidate: Sequence[Run]) -> Gate:
    """What was promised is there, and holds in the steady state."""
    if e.objective == "fit":
        runs = bool(candidate) and all(_ended(r) == "finished" for r in candidate)
        short = bool(control) and all(_ended(r) == "out_of_memory" for r in control)
        text = (
            f"control: {', '.join(map(_ended, control)) or 'no run'}; candidate: {', '.join(map(_ended, candidate)) or 'no run'}"
        )
        return Gate(3, "objective", "pass" if runs and short else "fail", text)
    if not all(steady(run) for run in [*control, *candidate]) or not control or not candidate:
        return Gate(3, "objective", "fail", "a run has no steps to measure")
    return _time_to_loss(control, candidate) if e.objective == "time_to_loss" else _throughput(control, candidate)


def steady(run: Run) -> list[float]:
    """Tokens/s of the steps after the start-up part."""
    return run.steady_tokens_per_s()


def last_third(series: Sequence[list[float]]) -> list[list[float]]:
    return [s[-max(1, len(s) // 3) :] for s in series]


def thirds(runs: Sequence[Run]) -> tuple[float, float, float]:
    """Throughput of the last third of the steady steps over that of the first, with its interval."""
    series = [steady(run) for run in runs]
    return stats.ratio_interval(last_third(series), [s[: max(1, len(s) // 3)] for s in series], ALPHA)


def _throughput(control: Sequence[Run], candidate: Sequence[Run]) -> Gate:
    """Faster, by an interval that excludes 1, and still so at the end.

    A candidate that slows down more than its control is judged on its last third alone: a device that works harder gets
    hotter and lowers its clock, which takes a part of the gain and not the candidate's merit.
    """
    new, old = [steady(r) for r in candidate], [steady(r) for r in control]
    ratio, low, high = stats.ratio_interval(new, old, ALPHA)
    drift, drift_low, drift_high = thirds(candidate)
    control_drift, *_ = thirds(control)
    # A machine that slows down under both arms is not the candidate's doing.
    falls = drift_high < 1 and drift < 1 - DRIFT and drift < control_drift * (1 - DRIFT)
    late = ""
    if falls and low > 1:
        ratio, low, high = stats.ratio_interval(last_third(new), last_third(old), ALPHA)
        late = " in the last third"
    data = {
        "ratio": [ratio, low, high],
        "drift": [drift, drift_low, drift_high],
        "control_drift": control_drift,
        "runs": [len(control), len(candidate)],
    }
    runs = f"{len(control)} and {len(candidate)} runs"
    text = f"{ratio:.3f} of the control's tokens/s{late} (95% interval {low:.3f} to {high:.3f}, {runs})"
    if late and (low <= 1 or drift < control_drift * (1 - COLLAPSE)):
        text += f"; its last third runs at {drift:.3f} of its first (at most {drift_high:.3f}; control {control_drift:.3f})"
        return Gate(3, "objective", "fail", f"the gain does not last: {text}", data)
    if low <= 1:
        word = "slower" if high < 1 else "no faster, as far as these runs show"
        return Gate(3, "objective", "fail", f"{word}: {text}", data)
    return Gate(3, "objective", "pass", f"faster: {text}; last third at {drift:.3f} of the first", data)


def seconds_to(run: Run, target: float) -> float | None:
    """Training seconds until the val loss is at most `target`, between validations by a straight line; None: never."""
    before: dict[str, Any] | None = None
    for row in run.val:
        if row["val_loss"] <= target:
            if before is None:
                return float(row["train_s"])
            part = (before["val_loss"] - target) / (before["val_loss"] - row["val_loss"])
            return float(before["train_s"] + part * (row["train_s"] - before["train_s"]))
        before = row
    return None


def _time_to_loss(control: Sequence[Run], candidate: Sequence[Run]) -> Gate:
    """Sooner at the loss that the control ends on."""
    seeds = sorted({r.seed for r in control} & {r.seed for r in candidate})
    if not seeds:
        return Gate(3, "objective", "fail", "control and candidate share no seed")
    pairs = [(next(r for r in control if r.seed == s), next(r for r in candidate if r.seed == s)) for s in seeds]
    target = max(old.val_loss for old, _ in pairs)
    times = [(seconds_to(old, target), seconds_to(new, target)) for old, new in pairs]
    if any(new is None for _, new in times):
        best = min(row["val_loss"] for _, run in pairs for row in run.val)
        return Gate(3, "objective", "fail", f"the candidate never reaches the control's {target:.4f} (best {best:.4f})")
    ratios = [(old or 0.0) / max(new or 0.0, 1e-9) for old, new in times]
    ratio = math.exp(statistics.fmean(math.log(max(r, 1e-9)) for r in ratios))
    if len(seeds) == 1:
        # The noise of one run's loss, turned into seconds on both curves.
        old, new = pairs[0]
        sooner, later = seconds_to(old, target + ONE_SEED), seconds_to(new, target - ONE_SEED)
        low = (sooner or 0.0) / (times[0][1] or 1e-9) if later is not None or sooner is not None else 0.0
        high = (times[0][0] or 0.0) / max(seconds_to(new, target + ONE_SEED) or 1e-9, 1e-9)
        how = f"loss noise of {ONE_SEED:.4f} for one seed"
    else:
        low, high = (math.exp(float(x)) for x in stats.one_sample([math.log(r) for r in ratios], 0.0).interval(ALPHA / 2))
        how = f"{len(seeds)} seeds"
    data = {"target": target, "seconds": times, "ratio": [ratio, low, high]}
    text = (
        f"val loss {target:.4f} in {times[0][1]:.1f} s instead of {times[0][0]:.1f} s, {ratio:.2f} times as fast "
        f"(interval {low:.2f} to {high:.2f}, {how})"
    )
    return Gate(3, "objective", "pass" if low > 1 else "fail", text if low > 1 else f"not sooner: {text}", data)


# --- 4: recovery -------------------------------------------------------------------------------------------


def recovery_gate(e: Evidence) -> Gate:
    """A SIGKILL restores to the same optimizer step, and from there to the losses of a twin that was never killed."""

    def gate(ok: bool, text: str, **data: Any) -> Gate:
        return Gate(4, "recovery", "pass" if ok else "fail", text, data)

    if e.recovery is None:
        return gate(False, "no run was killed and resumed")
    if e.recovery.get("problem"):
        return gate(False, str(e.recovery["problem"]))
    twin, broken = read(Path(e.recovery["twin"])), read(Path(e.recovery["broken"]))
    killed, resumed = e.recovery["killed_after_step"], e.recovery["resumed_at"]
    data = {"killed_after_step": killed, "resumed_at": resumed}
    for run in (twin, broken):
        if _ended(run) != "finished":
            return gate(False, f"{run.name} did not finish ({_ended(run)})", **data)
    steps = [row["step"] for row in broken.train]
    if steps != [row["step"] for row in twin.train] or broken.result["step"] != twin.result["step"]:
        return gate(False, f"the resumed run made steps {steps[:1]}..{steps[-1:]}, not those of its twin", **data)
    if not 0 < resumed <= killed:
        return gate(False, f"killed after step {killed}, it went on from step {resumed}: not a restored state", **data)
    worst, where = 0.0, 0
    for a, b in zip(broken.train, twin.train):
        apart = abs(a["loss"] - b["loss"])
        if not apart <= worst:
            worst, where = apart, a["step"]
    val = abs(broken.val_loss - twin.val_loss)
    data |= {"largest_difference": worst, "at_step": where, "val_difference": val}
    text = f"SIGKILL after step {killed}, restored at step {resumed}"
    if worst > e.recovery_tolerance or val > e.recovery_tolerance:
        return gate(
            False,
            f"{text}, but its losses are not those of the unbroken twin: {worst:.2g} apart at step {where}, val {val:.2g} "
            f"(tolerance {e.recovery_tolerance:g})",
            **data,
        )
    same = "the same to the last bit" if worst == val == 0 else f"the same within {max(worst, val):.2g}"
    return gate(True, f"{text}; all {len(steps)} losses and the val loss are {same}", **data)


# --- 5: memory ---------------------------------------------------------------------------------------------


def memory_gate(e: Evidence, candidate: Sequence[Run]) -> Gate:
    """Peak memory fits with a margin."""

    def gate(ok: bool, text: str, **data: Any) -> Gate:
        return Gate(5, "memory", "pass" if ok else "fail", text, data)

    peak = max((peak_bytes(run) for run in candidate), default=0)
    if not peak:
        return gate(False, "no peak memory was recorded")
    if e.memory_limit is None:
        return gate(False, "the size of the memory is not known; give --memory-limit")
    room = 1 - peak / e.memory_limit
    text = f"peak {peak / 1e9:.2f} GB of {e.memory_limit / 1e9:.1f} GB, {room:.0%} free (at least {MARGIN:.0%} must be)"
    return gate(room >= MARGIN, text, peak_bytes=peak, limit_bytes=e.memory_limit)


def peak_bytes(run: Run) -> int:
    """Peak of the device's memory; on the CPU the process's largest resident size, which the launcher noted."""
    noted = run.path / "launch.json"
    own = int(run.result.get("peak_mem_bytes") or 0)
    if own or not noted.exists():
        return own
    return int(baselines.read_json(noted).get("host_peak_bytes") or 0)
