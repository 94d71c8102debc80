"""The statistics behind every verdict: small, vectorised, with error rates that are measured, not hoped for.

Every decision is made from an `Estimate` (a difference of means, its standard error, degrees of freedom). Its
three numbers may be arrays of any one shape, so the simulations below run the very code that judges a run.

    python -m harness.stats --tables                         print the error rates and the power tables
    python -m harness.stats --tables --into docs/regress.md  write them between that page's markers
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats as sp

Array = npt.NDArray[np.float64]

PUBLISHED_DEVIATION = 0.0013  # nats, final val loss: modded-nanogpt track 3, ten seeds of its baseline
WELCH_FROM = 5  # seeds in the smaller arm from which two variances are worth estimating apart
MOST_SEEDS = 10_000  # beyond this, "how many seeds" is answered with "none"


class Verdict(IntEnum):
    """The answer to a question; the value is the exit code of `python -m harness regress`."""

    PASS = 0
    FAIL = 1
    INCONCLUSIVE = 3


@dataclass(frozen=True)
class Estimate:
    """A difference of means in nats (new minus reference), its standard error and degrees of freedom.

    `diff`, `se` and `df` are arrays of one shape (or scalars). A zero error gives p-values of 0 or 1, and
    NaN exactly on the bound, which decides nothing; NaN (a single run) decides nothing either.
    """

    diff: Array
    se: Array
    df: Array
    method: str

    def p_below(self, bound: float) -> Array:
        """p-value against "the difference is at least `bound`"."""
        return np.asarray(sp.t.cdf(self._t(bound), self.df))

    def p_above(self, bound: float) -> Array:
        """p-value against "the difference is at most `bound`"."""
        return np.asarray(sp.t.sf(self._t(bound), self.df))

    def interval(self, alpha: float) -> tuple[Array, Array]:
        """Lower and upper end, each missed with probability `alpha` (so together a 1 - 2 alpha interval)."""
        reach = sp.t.isf(alpha, self.df) * self.se
        return self.diff - reach, self.diff + reach

    def _t(self, bound: float) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            return (self.diff - bound) / self.se


def _moments(x: npt.ArrayLike) -> tuple[int, Array, Array]:
    """Count, mean and unbiased variance over the last axis; the variance of one value is NaN."""
    x = np.asarray(x, np.float64)
    n = x.shape[-1]
    return n, x.mean(-1), x.var(-1, ddof=1) if n > 1 else np.full(x.shape[:-1], np.nan)


def one_sample(new: npt.ArrayLike, value: float) -> Estimate:
    """Mean of `new` (..., n) minus a fixed value: scipy's `ttest_1samp`."""
    n, mean, var = _moments(new)
    return Estimate(mean - value, np.sqrt(var / n), np.full_like(mean, n - 1), "one-sample t")


def paired(new: npt.ArrayLike, base: npt.ArrayLike) -> Estimate:
    """Mean of the differences of two (..., n) arrays, seed by seed: scipy's `ttest_rel`."""
    estimate = one_sample(np.asarray(new, np.float64) - np.asarray(base, np.float64), 0.0)
    return Estimate(estimate.diff, estimate.se, estimate.df, "paired t")


def pooled(new: npt.ArrayLike, base: npt.ArrayLike) -> Estimate:
    """Difference of means (..., n) and (..., m) with one common variance: scipy's `ttest_ind`.

    Needs three values in all; one new run is enough, since the baseline then supplies the deviation.
    """
    n, mean_new, var_new = _moments(new)
    m, mean_base, var_base = _moments(base)
    df = max(n + m - 2, 0)
    squares = (n - 1) * np.nan_to_num(var_new) + (m - 1) * np.nan_to_num(var_base)
    var = squares / df if df else np.full_like(squares, np.nan)
    diff = mean_new - mean_base
    return Estimate(diff, np.sqrt(var * (1 / n + 1 / m)), np.full_like(diff, df), "pooled t")


def welch(new: npt.ArrayLike, base: npt.ArrayLike) -> Estimate:
    """Difference of means (..., n) and (..., m), two variances: scipy's `ttest_ind(equal_var=False)`."""
    n, mean_new, var_new = _moments(new)
    m, mean_base, var_base = _moments(base)
    a, b = var_new / n, var_base / m
    with np.errstate(invalid="ignore", divide="ignore"):
        df = (a + b) ** 2 / (a**2 / (n - 1) + b**2 / (m - 1))
    return Estimate(mean_new - mean_base, np.sqrt(a + b), df, "Welch t")


def two_sample(new: npt.ArrayLike, base: npt.ArrayLike) -> Estimate:
    """Pooled t below `WELCH_FROM` seeds in the smaller arm, Welch from there on.

    The choice depends on the counts alone, never on the values, so it does not disturb the error rate.
    """
    fewest = min(np.shape(new)[-1], np.shape(base)[-1])
    return welch(new, base) if fewest >= WELCH_FROM else pooled(new, base)


# --- the questions -----------------------------------------------------------------------------------------


def p_values(question: str, estimate: Estimate, margin: float = 0.0) -> tuple[Array, Array]:
    """The p-value that a PASS and the p-value that a FAIL is decided by.

    target: PASS rejects "the mean is above the target", FAIL rejects "it is at or below it".
    worse:  PASS rejects "worse by the margin or more", FAIL rejects "not worse at all".
    same:   PASS rejects "off by the margin or more" on both sides (TOST: the larger p-value), FAIL rejects
            "no difference" (two-sided). Schuirmann 1987.
    """
    if question == "target":
        return estimate.p_below(0.0), estimate.p_above(0.0)
    if question == "worse":
        return estimate.p_below(margin), estimate.p_above(0.0)
    if question == "same":
        equivalent = np.maximum(estimate.p_below(margin), estimate.p_above(-margin))
        different = 2 * np.minimum(estimate.p_above(0.0), estimate.p_below(0.0))
        return equivalent, different
    raise ValueError(f"unknown question {question!r}")


def decide(question: str, estimate: Estimate, alpha: float, margin: float = 0.0) -> npt.NDArray[np.int64]:
    """Verdicts, of the estimate's shape. Each kind of wrong verdict has probability at most `alpha`.

    A difference shown to be above zero and also below the margin is a PASS: worse, but by less than what was
    declared acceptable. Whatever is shown neither way is INCONCLUSIVE: absence of evidence never passes.
    """
    p_pass, p_fail = p_values(question, estimate, margin)
    undecided = np.where(p_fail < alpha, Verdict.FAIL, Verdict.INCONCLUSIVE)
    return np.asarray(np.where(p_pass < alpha, Verdict.PASS, undecided))


def check_looks(looks: Sequence[int]) -> None:
    """A plan of looks is a rising list of seed counts; raises ValueError with what is wrong."""
    if not looks or looks[0] < 1 or any(b <= a for a, b in pairwise(looks)):
        raise ValueError(f"looks must be rising seed counts such as 3,5,8; got {','.join(map(str, looks))}")


def sequential(
    question: str,
    estimate_first: Callable[[int], Estimate],
    available: int,
    looks: Sequence[int],
    alpha: float,
    margin: float = 0.0,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Verdict after each declared look is taken in turn, and the seed count at which it fell (0: not yet).

    `estimate_first(k)` is the estimate from the first k runs; `looks` is the whole declared plan, of which
    those up to `available` seeds are taken. Every look spends alpha / len(looks), so by the union bound the
    chance of any wrong PASS over the plan is at most alpha, and so is that of any wrong FAIL, whatever the
    dependence between looks. Runs between two looks wait for the next one.
    """
    check_looks(looks)
    verdict: npt.NDArray[np.int64] | None = None
    fell = np.zeros((), np.int64)
    for k in looks:
        if k > available:
            break
        now = decide(question, estimate_first(k), alpha / len(looks), margin)
        if verdict is None:
            verdict, fell = np.full(now.shape, int(Verdict.INCONCLUSIVE)), np.zeros(now.shape, np.int64)
        falls = (fell == 0) & (now != Verdict.INCONCLUSIVE)
        verdict, fell = np.where(falls, now, verdict), np.where(falls, k, fell)
    return (np.asarray(int(Verdict.INCONCLUSIVE)) if verdict is None else verdict), fell


# --- power and the number of seeds -------------------------------------------------------------------------


def power(effect: float, deviation: float, n: int, alpha: float, m: int | None = None) -> float:
    """Chance that a one-sided t test at `alpha` detects `effect` nats.

    `n` new seeds against a fixed value (m None: also the paired test, with the deviation of the differences)
    or against m baseline seeds (pooled), from the non-central t.
    """
    df = n - 1 if m is None else n + m - 2
    if df < 1:
        return 0.0
    se = deviation * np.sqrt(1 / n if m is None else 1 / n + 1 / m)
    shift = effect / se
    if shift > 30:  # scipy's non-central t loses its digits out there
        return 1.0
    return float(sp.nct.sf(sp.t.isf(alpha, df), df, shift))


def seeds_needed(
    question: str,
    diff: float,
    deviation: float,
    alpha: float,
    *,
    margin: float = 0.0,
    m: int | None = None,
    wanted: float = 0.8,
) -> int | None:
    """Seeds in all (not "more") after which the question is decided with probability `wanted`.

    It takes the present estimate `diff` and `deviation` at their word. With `m` baseline seeds only the new
    arm grows; with m None the reference is a fixed value (or the seeds are paired). Returns None when no
    number up to `MOST_SEEDS` would do: the estimate sits on the bound, or the baseline itself is too small.
    """

    def chance(n: int) -> float:
        if question == "target":
            return power(abs(diff), deviation, n, alpha, m)
        if question == "worse":
            return max(power(margin - diff, deviation, n, alpha, m), power(diff, deviation, n, alpha, m))
        above, below = (power(margin + d, deviation, n, alpha, m) for d in (diff, -diff))
        return max(above + below - 1, power(abs(diff), deviation, n, alpha / 2, m))

    high = 2
    while chance(high) < wanted:
        if high >= MOST_SEEDS:
            return None
        high = min(2 * high, MOST_SEEDS)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if chance(middle) >= wanted else (middle, high)
    return high


# --- a fresh curve against the baseline's curves -----------------------------------------------------------


class WatchBand:
    """The band that a run's val curve is watched against, calibrated by rank, with an exact false-alarm rate.

    `base_NT`: the val curves of N >= 3 baseline seeds at the same T token counts. A curve's excursion is the
    largest |z| that it holds, on one side, for `persist` validations in a row ("for good": one noisy
    validation is no excursion). For every baseline seed i, mean and deviation come from the other N - 1
    seeds, and the fresh curve raises the alarm when its excursion exceeds seed i's own one over the
    whole run, for every i, both measured with i left out.

    Among N + 1 exchangeable curves at most one can exceed all others in that pairwise way, so a run like the
    baseline's raises an alarm, at any time of its life, with probability at most 1/(N+1). No
    distribution is assumed. (The leave-one-out tournament of Barber et al. 2021, "Predictive inference with
    the jackknife+".) No smaller rate is to be had from N seeds by ranks.
    """

    def __init__(self, base_NT: npt.ArrayLike, persist: int = 2) -> None:
        base = np.asarray(base_NT, np.float64)
        if base.ndim != 2 or base.shape[0] < 3 or base.shape[1] < 1:
            raise ValueError("a watch band needs the val curves of at least three baseline seeds")
        n = base.shape[0]
        self.rate = 1 / (n + 1)
        self.persist = min(persist, base.shape[1])
        others = [np.delete(base, i, axis=0) for i in range(n)]
        self._mean = np.stack([o.mean(0) for o in others])  # (N, T)
        self._std = np.stack([o.std(0, ddof=1) for o in others]).clip(1e-9)
        self._reach = self._excursion((base - self._mean) / self._std)[:, -1]  # (N,)

    def _excursion(self, z: Array) -> Array:
        """Running largest |z| held on one side for `persist` points; (..., T) -> (..., T), 0 before that."""
        held = np.zeros_like(z)
        if z.shape[-1] >= self.persist:
            windows = np.lib.stride_tricks.sliding_window_view(z, self.persist, axis=-1)
            held[..., self.persist - 1 :] = np.maximum(windows.min(-1), -windows.max(-1)).clip(0)
        return np.asarray(np.maximum.accumulate(held, axis=-1))

    def first_alarm(self, curve_T: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Index of the validation at which each curve (..., t) left the band for good; -1 if it has not.

        t may be below T: the run is still going.
        """
        curve = np.asarray(curve_T, np.float64)
        t = curve.shape[-1]
        z = (curve[..., None, :] - self._mean[:, :t]) / self._std[:, :t]  # (..., N, t)
        out = (self._excursion(z) > self._reach[:, None]).all(-2)
        return np.where(out.any(-1), out.argmax(-1), -1)

    def limits(self) -> tuple[Array, Array]:
        """Lower and upper edge (T,): a curve that holds beyond one for `persist` points is out."""
        reach = self._reach[:, None] * self._std
        return (self._mean - reach).min(0), (self._mean + reach).max(0)


# --- throughput and too-good-to-be-true --------------------------------------------------------------------


def ratio_interval(
    new: Sequence[npt.ArrayLike],
    base: Sequence[npt.ArrayLike],
    alpha: float = 0.05,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Ratio of throughputs (new / base) and its two-sided 1 - alpha percentile bootstrap interval.

    Each argument is a list of runs, each the tokens/s of its steady steps. A run's throughput is the median
    of its steps, an arm's the mean over its runs. Runs are drawn with replacement, then steps within each in
    circular blocks (neighbouring steps share clock and temperature). With one run per arm the interval knows
    nothing of the differences between launches; see the measured coverage in docs/regress.md.
    """
    rng = np.random.default_rng(seed)

    def arm(runs: Sequence[npt.ArrayLike]) -> tuple[float, Array]:
        steps = [np.asarray(run, np.float64) for run in runs]
        if not steps or any(s.size == 0 for s in steps):
            raise ValueError("throughput needs at least one steady step in every run")
        medians = np.stack([_block_medians(s, draws, rng) for s in steps], -1)  # (draws, runs)
        picks = rng.integers(len(steps), size=(draws, len(steps)))
        return float(np.mean([np.median(s) for s in steps])), np.take_along_axis(medians, picks, -1).mean(-1)

    point_new, drawn_new = arm(new)
    point_base, drawn_base = arm(base)
    low, high = np.quantile(drawn_new / drawn_base, [alpha / 2, 1 - alpha / 2])
    return point_new / point_base, float(low), float(high)


def _block_medians(steps: Array, draws: int, rng: np.random.Generator) -> Array:
    """Medians (draws,) of circular block resamples of one run's steps; block length about the square root."""
    n = steps.size
    length = max(1, round(n**0.5))
    starts = rng.integers(n, size=(draws, -(-n // length), 1))
    index = (starts + np.arange(length)) % n
    return np.asarray(np.median(steps[index.reshape(draws, -1)[:, :n]], axis=-1))


def jump(losses: npt.ArrayLike, at: int) -> tuple[float, float]:
    """Size in nats and one-sided p-value of a downward jump between losses[at - 1] and losses[at].

    Least squares with a line and a step at `at`; the line takes the ordinary descent, what is left is the
    jump (negative: a drop). Needs three points on either side, else (0, 1).
    """
    y = np.asarray(losses, np.float64)
    if min(at, y.size - at) < 3:
        return 0.0, 1.0
    x = np.arange(y.size, dtype=np.float64)
    design = np.stack([np.ones_like(x), x - x.mean(), (x >= at).astype(np.float64)], 1)
    solution, residual, *_ = np.linalg.lstsq(design, y, rcond=None)
    df = y.size - 3
    variance = float(residual[0]) / df if residual.size else 0.0
    error = float(np.sqrt(max(variance, 1e-18) * np.linalg.inv(design.T @ design)[2, 2]))
    return float(solution[2]), float(sp.t.cdf(solution[2] / error, df))


# --- known truth: what the error rates really are ----------------------------------------------------------

Noise = Callable[[np.random.Generator, tuple[int, ...]], Array]

# Standardised to mean 0, deviation 1, so that the nulls below are exactly true.
NOISES: dict[str, Noise] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "gamma(2)": lambda rng, shape: (rng.gamma(2.0, size=shape) - 2.0) / 2.0**0.5,
    "t(3)": lambda rng, shape: rng.standard_t(3.0, size=shape) / 3.0**0.5,
}


@dataclass(frozen=True)
class Wrong:
    """A wrong verdict at the truth under which it is likeliest: the true difference is `shift`.

    A FAIL is measured with hardly any margin, so that no PASS hides it. Losses are in seed deviations.
    """

    question: str
    verdict: Verdict
    alpha: float
    shift: float
    margin: float

    def __str__(self) -> str:
        truth = (
            "on target"
            if self.question == "target"
            else "at the margin"
            if self.shift
            else "at no difference"
        )
        return f"{self.question}: {self.verdict.name} {truth}"

    def decided(self, estimate: Estimate) -> npt.NDArray[np.int64]:
        return decide(self.question, estimate, self.alpha, self.margin)


WRONG = (
    Wrong("target", Verdict.PASS, 0.01, 0.0, 0.0),
    Wrong("target", Verdict.FAIL, 0.01, 0.0, 0.0),
    Wrong("worse", Verdict.PASS, 0.05, 2.0, 2.0),
    Wrong("worse", Verdict.FAIL, 0.05, 0.0, 1e-6),
    Wrong("same", Verdict.PASS, 0.05, 2.0, 2.0),
    Wrong("same", Verdict.FAIL, 0.05, 0.0, 1e-6),
)
SIZES = (2, 3, 5, 10)
BASELINE_SEEDS = 10
LOOKS = (2, 3, 5, 10)


@dataclass(frozen=True)
class Rate:
    """How often a wrong verdict fell in a simulation, beside the rate that was promised."""

    what: str
    noise: str
    n: str
    alpha: float
    wrong: int
    trials: int

    @property
    def rate(self) -> float:
        return self.wrong / self.trials

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Clopper-Pearson interval of the true rate."""
        ends: Any = sp.binomtest(self.wrong, self.trials).proportion_ci(level, "exact")
        return float(ends.low), float(ends.high)


def simulate(trials: int = 10_000, watch_trials: int | None = None, seed: int = 0) -> list[Rate]:
    """Error rates under known truth: each wrong verdict of each question, at its least favourable truth.

    `target` has no seeds of its own to pair with; the other questions are tried unpaired and paired.
    """
    rng = np.random.default_rng(seed)
    rates: list[Rate] = []
    for name, noise in NOISES.items():
        for n in SIZES:
            new, base = noise(rng, (trials, n)), noise(rng, (trials, BASELINE_SEEDS))
            shared = noise(rng, (trials, n))  # what a seed adds to both members of a pair
            pair_new, pair_base = new + shared, noise(rng, (trials, n)) + shared
            for case in WRONG:
                bad = (
                    case.decided(
                        one_sample(new + case.shift, 0.0)
                        if case.question == "target"
                        else two_sample(new + case.shift, base)
                    )
                    == case.verdict
                )
                rates.append(Rate(str(case), name, str(n), case.alpha, int(bad.sum()), trials))
                if case.question != "target":
                    bad = case.decided(paired(pair_new + case.shift, pair_base)) == case.verdict
                    rates.append(Rate(f"{case}, paired", name, str(n), case.alpha, int(bad.sum()), trials))
        rates += _simulate_sequential(rng, name, noise, trials)
        rates += _simulate_watch(rng, name, noise, trials if watch_trials is None else watch_trials)
    return rates


def _simulate_sequential(rng: np.random.Generator, noise_name: str, noise: Noise, trials: int) -> list[Rate]:
    """Looking at every size of `LOOKS` and stopping at the first verdict, with and without the correction."""
    new, base = noise(rng, (trials, LOOKS[-1])), noise(rng, (trials, BASELINE_SEEDS))
    n, rates = ",".join(map(str, LOOKS)), []
    for case in WRONG:

        def first(k: int, case: Wrong = case) -> Estimate:
            x = new[:, :k] + case.shift
            return one_sample(x, 0.0) if case.question == "target" else two_sample(x, base)

        verdict, _ = sequential(case.question, first, LOOKS[-1], LOOKS, case.alpha, case.margin)
        naive = np.stack([case.decided(first(k)) == case.verdict for k in LOOKS]).any(0)
        for how, bad in (("looks planned", verdict == case.verdict), ("looks unplanned", naive)):
            rates.append(Rate(f"{case}, {how}", noise_name, n, case.alpha, int(bad.sum()), trials))
    return rates


def _simulate_watch(rng: np.random.Generator, noise_name: str, noise: Noise, trials: int) -> list[Rate]:
    """Alarms over a whole run of 16 validations whose noise drifts (correlation 0.7 between neighbours)."""
    points, correlation, rates = 16, 0.7, []
    for n in (BASELINE_SEEDS, 19):
        curves = noise(rng, (trials, n + 1, points))
        for t in range(1, points):
            curves[..., t] = correlation * curves[..., t - 1] + (1 - correlation**2) ** 0.5 * curves[..., t]
        alarms = sum(int(WatchBand(c[:-1]).first_alarm(c[-1]) >= 0) for c in curves)
        rates.append(Rate("watch: alarm over a whole run", noise_name, str(n), 1 / (n + 1), alarms, trials))
    return rates


def simulate_ratio(trials: int = 1000, seed: int = 0) -> list[tuple[str, int, float]]:
    """How often the 95% throughput interval covers a true ratio of 1: (spread between launches, runs, rate).

    100 steps a run, 2% step noise with correlation 0.5 between neighbours.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for between in (0.0, 0.01):
        for runs in (1, 3, 10):
            noise = rng.standard_normal((trials, 2, runs, 100))
            for t in range(1, 100):
                noise[..., t] = 0.5 * noise[..., t - 1] + 0.75**0.5 * noise[..., t]
            speed = 1 + 0.02 * noise + between * rng.standard_normal((trials, 2, runs, 1))
            hits = 0
            for i, (x, y) in enumerate(speed):
                _, low, high = ratio_interval(list(x), list(y), draws=200, seed=i)
                hits += low <= 1 <= high
            rows.append((f"{between:.0%}", runs, hits / trials))
    return rows


# --- the tables of docs/regress.md -------------------------------------------------------------------------


def tables(trials: int = 10_000, ratio_trials: int = 1000) -> str:
    """Markdown: measured error rates with 95% intervals, power, seeds needed, throughput coverage."""
    rates = simulate(trials)
    lines = [
        f"### Measured error rates ({trials:,} experiments each, baseline of {BASELINE_SEEDS} seeds)",
        "",
        "Percent of experiments with the wrong verdict (95% Clopper-Pearson interval), at the truth where it "
        "is likeliest. n: new seeds (for the watch: baseline seeds).",
        "",
        "| wrong verdict | n | promised | " + " | ".join(NOISES) + " |",
        "|---|---|---|" + "---|" * len(NOISES),
    ]
    for what, n in dict.fromkeys((r.what, r.n) for r in rates):
        row = [r for r in rates if (r.what, r.n) == (what, n)]
        cells = [f"{100 * r.rate:.2f} ({100 * r.interval()[0]:.2f}-{100 * r.interval()[1]:.2f})" for r in row]
        promised = "none" if "unplanned" in what else f"{100 * row[0].alpha:.1f}"
        lines.append(f"| {what} | {n} | {promised} | " + " | ".join(cells) + " |")
    effects, sizes = [k / 1000 for k in range(1, 11)], (2, 3, 5, 10, 20, 45)
    for title, alpha, against in (
        ("against a fixed target (`target`, alpha 1%)", 0.01, lambda n: None),
        (f"against a baseline of {BASELINE_SEEDS} seeds (`worse`, alpha 5%)", 0.05, lambda n: BASELINE_SEEDS),
        ("against a baseline of as many seeds (`worse`, alpha 5%)", 0.05, lambda n: n),
    ):
        lines += [
            "",
            f"### Power {title}, seed deviation {PUBLISHED_DEVIATION}",
            "",
            "Percent of experiments in which a true difference is found.",
            "",
            "| difference (nats) | " + " | ".join(f"n={n}" for n in sizes) + " | n for 80% |",
            "|---|" + "---|" * (len(sizes) + 1),
        ]
        for effect in effects:
            cells = [f"{100 * power(effect, PUBLISHED_DEVIATION, n, alpha, against(n)):.0f}" for n in sizes]
            powers = (
                (n, power(effect, PUBLISHED_DEVIATION, n, alpha, against(n))) for n in range(2, MOST_SEEDS)
            )
            enough = next((n for n, chance in powers if chance >= 0.8), "none")
            lines.append(f"| {effect:.3f} | " + " | ".join(cells) + f" | {enough} |")
    lines += [
        "",
        f"### Coverage of the 95% throughput interval ({ratio_trials:,} experiments each)",
        "",
        "| spread between launches | runs per arm | covers the true ratio |",
        "|---|---|---|",
    ]
    lines += [f"| {between} | {runs} | {hit:.1%} |" for between, runs, hit in simulate_ratio(ratio_trials)]
    return "\n".join(lines) + "\n"


def replace_section(page: str, marker: str, text: str) -> str:
    """`page` with the text between its two `marker` comments replaced; ValueError if absent."""
    start, end = f"<!-- {marker} -->\n", f"<!-- /{marker} -->"
    if page.count(start) != 1 or page.count(end) != 1:
        raise ValueError(f"no section marked {start.strip()} ... {end}")
    head, rest = page.split(start)
    return head + start + text + end + rest.split(end)[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.stats", description="error rates and power, measured"
    )
    parser.add_argument("--tables", action="store_true", required=True, help="print the tables in Markdown")
    parser.add_argument(
        "--trials", type=int, default=10_000, help="experiments per error rate (default 10000)"
    )
    parser.add_argument("--into", type=Path, help="write them between this page's markers instead")
    args = parser.parse_args(argv)
    if args.into is None:
        print(tables(args.trials), end="")
        return 0
    try:
        page = args.into.read_text()
        replace_section(page, "tables", "")  # a page without the markers is refused before minutes are spent
    except (OSError, ValueError) as error:
        print(f"error: {args.into}: {error}", file=sys.stderr)
        return 2
    args.into.write_text(replace_section(page, "tables", tables(args.trials)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
