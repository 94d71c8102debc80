"""Intervals and paired tests, against enumeration and published values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval import stats


def test_accuracy_of_gpt2_on_hellaswag() -> None:
    """2,968 of 10,042 is 29.55% with a standard error of 0.0046, as lm-eval prints it."""
    estimate = stats.accuracy(np.arange(10_042) < 2_968)
    assert estimate.value == pytest.approx(0.29556, abs=1e-5)
    assert estimate.se == pytest.approx(0.00455, abs=1e-5)
    # Wilson (1927): (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    z, n, p = 1.959964, 10_042, 2_968 / 10_042
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    for got, sign in ((estimate.low, -1), (estimate.high, 1)):
        assert got == pytest.approx((p + z * z / (2 * n) + sign * half) / (1 + z * z / n), abs=1e-7)


@pytest.mark.parametrize("right", [0, 5])
def test_interval_of_all_or_nothing_stays_inside(right: int) -> None:
    estimate = stats.accuracy([i < right for i in range(5)])
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.high - estimate.low > 0.3  # five examples say little, although the standard error is 0


def test_mcnemar_by_enumeration() -> None:
    """3 examples only A gets right, 9 only B: two-sided sign test over 12 coins."""
    a = [True] * 3 + [False] * 9 + [True] * 20 + [False] * 30
    b = [False] * 3 + [True] * 9 + [True] * 20 + [False] * 30
    found = stats.paired_accuracy(a, b)
    tail = sum(math.comb(12, k) for k in range(4)) / 2**12
    assert (found.only_a, found.only_b) == (3, 9)
    assert found.p_value == pytest.approx(2 * tail)
    assert found.difference.value == pytest.approx(6 / 62)
    assert found.difference.se == pytest.approx(np.std(np.array(b, float) - np.array(a, float), ddof=1) / math.sqrt(62))


def test_same_model_twice_differs_by_nothing() -> None:
    found = stats.paired_accuracy([True, False, True], [True, False, True])
    assert found.p_value == 1.0 and found.difference.value == 0.0


def test_mcnemar_level_under_equal_skill() -> None:
    """Two equally good models are called different at 5% in at most 5% of draws (the exact test is
    conservative).
    """
    rng = np.random.default_rng(0)
    p_values = [stats.paired_accuracy(rng.random(200) < 0.3, rng.random(200) < 0.3).p_value for _ in range(400)]
    assert 0.005 < np.mean(np.array(p_values) < 0.05) < 0.075


def test_mean_interval_covers() -> None:
    rng = np.random.default_rng(1)
    inside = []
    for _ in range(400):
        estimate = stats.mean(rng.normal(2.0, 3.0, 8))
        inside.append(estimate.low < 2.0 < estimate.high)
    assert 0.92 < np.mean(inside) < 0.98


def test_unequal_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="same examples"):
        stats.paired_accuracy([True], [True, False])
