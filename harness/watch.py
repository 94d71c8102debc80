"""Follow a run that is still going, and say when its val curve has left the baseline's band for good."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.baseline import Run, differences, read_run
from harness.common import UserError
from harness.stats import Verdict, WatchBand


@dataclass(frozen=True)
class Alarm:
    """The validation at which a curve had left the band: its step, tokens and loss, and the band there."""

    step: int
    tokens: int
    val_loss: float
    low: float
    high: float

    @property
    def side(self) -> str:
        return "above" if self.val_loss > self.high else "below"

    def __str__(self) -> str:
        what = "worse than" if self.side == "above" else "better than can be expected of"
        return (
            f"step {self.step} ({self.tokens:,} tokens): val loss {self.val_loss:.4f} has left "
            f"{self.low:.4f} to {self.high:.4f} for good; {what} the baseline"
        )


class Watcher:
    """One run against the band of one baseline's val curves.

    Raises UserError when the run is not like the baseline: at the start as far as a running run can be known,
    wholly when it has ended.
    """

    def __init__(self, run_dir: str | Path, baseline: dict[str, Any]) -> None:
        if baseline["kind"] != "runs":
            raise UserError(
                f"{baseline['name']} is a published number: it has no curves to watch a run against"
            )
        self.run_dir, self.baseline = run_dir, baseline
        curves = [[p for p in run["curve"] if p["tokens"] > 0] for run in baseline["runs"]]
        self.grid = [point["tokens"] for point in curves[0]]
        self.band = WatchBand([[point["val_loss"] for point in curve] for curve in curves])
        self.run = self.read()

    def read(self) -> Run:
        """The run as it is now, checked against the baseline as far as it says what it is."""
        self.run = run = read_run(self.run_dir, finished=False)
        facts = {key: value for key, value in facts_now(run).items() if value is not None}
        unlike = differences({key: self.baseline["facts"][key] for key in facts}, facts, run.name)
        if unlike:
            raise UserError("not like with like: " + "; ".join(unlike))
        return run

    def curve(self) -> list[dict[str, Any]]:
        """The run's validations at the baseline's token counts, in order, up to the newest."""
        at = {point["tokens"]: point for point in self.run.val}
        curve = []
        for tokens in self.grid:
            if tokens not in at:
                break
            curve.append(at[tokens])
        if (
            self.run.val
            and len(curve) < len(self.grid)
            and self.run.val[-1]["tokens"] > self.grid[len(curve)]
        ):
            raise UserError(
                f"{self.run.path} was not validated at {self.grid[len(curve)]:,} tokens as the baseline was; "
                "train with the baseline's --val-every"
            )
        return curve

    def alarm(self) -> Alarm | None:
        """The alarm that the run as last read has raised, if any; a loss that is not finite is infinite."""
        curve = self.curve()
        losses = [p["val_loss"] if p["val_loss"] is not None else math.inf for p in curve]
        losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
        index = int(self.band.first_alarm(losses)) if losses else -1
        if index < 0:
            return None
        low, high = self.band.limits()
        return Alarm(
            curve[index]["step"], curve[index]["tokens"], losses[index], float(low[index]), float(high[index])
        )


def facts_now(run: Run) -> dict[str, Any]:
    """The facts of a run that may still be going: what its result will say is worked out from its config."""
    if run.result:
        return run.facts()
    from train_gpt2 import TokenStream, config_from_json, data_fingerprint, find_shards, val_protocol

    facts = run.facts()
    data = Path(run.config["data"])
    if not data.is_dir():
        return facts
    stream = TokenStream(find_shards(data, "val"))
    protocol = val_protocol(config_from_json(run.config, run.path), stream)
    known = {f"val_protocol.{key}": value for key, value in protocol.items()}
    known["data.fingerprint"] = data_fingerprint(data)
    return {key: known.get(key, value) for key, value in facts.items()}


def follow(
    watcher: Watcher,
    say: Callable[[str], None] = print,
    poll: float = 5.0,
    patience: float = 1800.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Verdict:
    """Watch until the run leaves the band (FAIL), ends inside it (PASS), or is cut off (INCONCLUSIVE).

    `patience` is the time in seconds without a new line in the metrics after which a run counts as cut off.
    """
    band = watcher.band
    say(
        f"watching {watcher.run.path} against {watcher.baseline['name']} ({watcher.baseline['n']} seeds): a "
        f"run like the baseline's raises a false alarm with probability at most {band.rate:.1%} over its "
        f"whole life: 1/(n+1), the least that {watcher.baseline['n']} seeds can give"
    )
    progress, since = (-1, -1), clock()
    while True:
        run = watcher.read()
        alarm = watcher.alarm()
        if alarm:
            say(f"ALARM at {alarm}")
            return Verdict.FAIL
        if run.diverged:
            say(f"ALARM: {run.path} diverged ({run.result['exit_reason']}) at step {run.result['step']}")
            return Verdict.FAIL
        if run.result and run.result["exit_reason"] != "finished":
            say(f"{run.path} ended early ({run.result['exit_reason']}), inside the band so far")
            return Verdict.INCONCLUSIVE
        if run.result:
            say(f"{run.path} finished inside the band, val loss {run.val_loss:.4f}")
            return Verdict.PASS
        now = (len(run.train), len(run.val))
        if now != progress:
            progress, since = now, clock()
        elif clock() - since > patience:
            say(f"{run.path} has written nothing for {patience:.0f} s; inside the band so far")
            return Verdict.INCONCLUSIVE
        sleep(poll)
