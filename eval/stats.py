"""How sure a number is: intervals for an accuracy or a mean, and paired comparisons of two models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error and a 95% confidence interval, from `count` observations."""

    value: float
    se: float
    low: float
    high: float
    count: int

    def to_json(self) -> dict[str, float | None]:
        """Fields by name; None for what one observation cannot say."""
        return {k: v if math.isfinite(v) else None for k, v in asdict(self).items()}

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.se:.4f} (95% {self.low:.4f} to {self.high:.4f})"


def accuracy(correct: Sequence[bool] | np.ndarray) -> Estimate:
    """Share of True, binomial standard error, Wilson interval (it stays inside 0..1 near the ends)."""
    hits = np.asarray(correct, dtype=bool)
    n = len(hits)
    if n == 0:
        raise ValueError("an accuracy needs at least one example")
    p = float(hits.mean())
    interval = stats.binomtest(int(hits.sum()), n).proportion_ci(0.95, method="wilson")
    return Estimate(p, math.sqrt(p * (1 - p) / n), float(interval.low), float(interval.high), n)


def mean(values: Sequence[float] | np.ndarray) -> Estimate:
    """Mean, standard error from the sample deviation, Student-t interval (not finite below two values)."""
    x = np.asarray(values, dtype=np.float64)
    n = len(x)
    if n == 0:
        raise ValueError("a mean needs at least one value")
    center = float(x.mean())
    if n == 1:
        return Estimate(center, math.nan, -math.inf, math.inf, 1)
    se = float(x.std(ddof=1) / math.sqrt(n))
    half = float(stats.t.ppf(0.975, n - 1)) * se
    return Estimate(center, se, center - half, center + half, n)


@dataclass(frozen=True)
class PairedAccuracy:
    """Two models on the same examples: B's accuracy minus A's, and McNemar's exact two-sided p value."""

    difference: Estimate
    only_a: int  # right in A, wrong in B
    only_b: int  # wrong in A, right in B
    p_value: float

    def to_json(self) -> dict[str, object]:
        return {
            "difference": self.difference.to_json(),
            "only_a": self.only_a,
            "only_b": self.only_b,
            "mcnemar_exact_p": self.p_value,
        }


def paired_accuracy(correct_a: Sequence[bool] | np.ndarray, correct_b: Sequence[bool] | np.ndarray) -> PairedAccuracy:
    """McNemar's exact test: under equal skill the discordant examples fall like fair coins.

    Examples that both get right or both get wrong say nothing about which is better, so far fewer examples
    are needed than for two separate accuracies.
    """
    a, b = np.asarray(correct_a, dtype=bool), np.asarray(correct_b, dtype=bool)
    if a.shape != b.shape:
        raise ValueError(f"a paired comparison needs the same examples: {len(a)} and {len(b)} given")
    only_a, only_b = int((a & ~b).sum()), int((~a & b).sum())
    discordant = only_a + only_b
    p_value = float(stats.binomtest(only_b, discordant, 0.5).pvalue) if discordant else 1.0
    return PairedAccuracy(mean(b.astype(float) - a.astype(float)), only_a, only_b, p_value)
