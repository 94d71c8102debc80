"""The statistics: values against scipy, the published examples, and error rates under known truth."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats as sp

from harness import stats
from harness.stats import Verdict

PAGE = Path(__file__).parent.parent / "docs" / "regress.md"


def losses(mean: float, deviation: float, n: int, seed: int = 0) -> np.ndarray:
    """n values with exactly this mean and sample deviation."""
    x = np.random.default_rng(seed).standard_normal(n)
    return mean + deviation * (x - x.mean()) / x.std(ddof=1)


# --- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, m", [(2, 2), (3, 10), (7, 5), (20, 11)])
def test_p_values_and_intervals_are_scipys(n, m):
    x, y = losses(3.28, 0.002, n, 1), losses(3.279, 0.001, m, 2)
    cases = [
        (stats.one_sample(x, 3.279), lambda side: sp.ttest_1samp(x - 3.279, 0, alternative=side)),
        (stats.pooled(x, y), lambda side: sp.ttest_ind(x, y, alternative=side)),
        (stats.welch(x, y), lambda side: sp.ttest_ind(x, y, equal_var=False, alternative=side)),
    ]
    if n <= m:
        cases.append((stats.paired(x, y[:n]), lambda side: sp.ttest_rel(x, y[:n], alternative=side)))
    for estimate, scipys in cases:
        assert estimate.p_below(0.0) == pytest.approx(scipys("less").pvalue, rel=1e-9)
        assert estimate.p_above(0.0) == pytest.approx(scipys("greater").pvalue, rel=1e-9)
        low, high = estimate.interval(0.05)
        theirs = scipys("two-sided").confidence_interval(0.9)
        assert (low, high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)


def test_pooled_for_few_seeds_welch_from_five():
    ten = losses(3.28, 0.001, 10)
    assert stats.two_sample(losses(3.28, 0.001, 4), ten).method == "pooled t"
    assert stats.two_sample(losses(3.28, 0.001, 5), ten).method == "Welch t"
    assert stats.two_sample(ten, losses(3.28, 0.001, 3)).method == "pooled t"


def test_one_run_is_judged_by_the_baselines_deviation():
    base = losses(3.28, 0.001, 10)
    estimate = stats.two_sample([3.2825], base)
    expected_t = 0.0025 / (0.001 * (1 + 1 / 10) ** 0.5)
    assert estimate.p_above(0.0) == pytest.approx(sp.t.sf(expected_t, 9), rel=1e-9)
    assert stats.decide("target", stats.one_sample([3.0], 3.28), 0.01) == Verdict.INCONCLUSIVE  # no deviation


def test_the_published_rule():
    """Ten losses of 3.2787 +- 0.0013 pass p < 0.01 for 3.28; three of 3.2795 do not."""
    ten = stats.one_sample(losses(3.2787, 0.0013, 10), 3.28)
    assert stats.decide("target", ten, 0.01) == Verdict.PASS
    p_pass, _ = stats.p_values("target", ten)
    assert p_pass == pytest.approx(sp.t.cdf(-0.0013 / (0.0013 / 10**0.5), 9), rel=1e-9)

    three = stats.one_sample(losses(3.2795, 0.0013, 3), 3.28)
    assert stats.decide("target", three, 0.01) == Verdict.INCONCLUSIVE
    needed = stats.seeds_needed("target", -0.0005, 0.0013, 0.01)
    assert needed is not None and 60 <= needed <= 80
    # Independently: that many normal samples do pass four times in five, and a fifth fewer do not.
    rng = np.random.default_rng(0)
    for n, enough in ((needed, True), (round(0.8 * needed), False)):
        x = rng.normal(3.2795, 0.0013, (20_000, n))
        passes = (sp.ttest_1samp(x, 3.28, axis=1, alternative="less").pvalue < 0.01).mean()
        assert bool(passes > 0.79) == enough


@pytest.mark.parametrize(
    "question, diff, expected",
    [
        ("worse", 0.0, Verdict.PASS),
        ("worse", -0.05, Verdict.PASS),  # better is not worse
        ("worse", 0.02, Verdict.PASS),  # shown worse, but by less than the margin
        ("worse", 0.08, Verdict.FAIL),
        ("same", 0.0, Verdict.PASS),
        ("same", -0.08, Verdict.FAIL),  # better is not the same
        ("same", 0.08, Verdict.FAIL),
    ],
)
def test_clear_cases(question, diff, expected):
    estimate = stats.two_sample(losses(3.28 + diff, 0.002, 6, 1), losses(3.28, 0.002, 10, 2))
    assert stats.decide(question, estimate, 0.05, 0.04) == expected


def test_absence_of_evidence_never_passes():
    """Two noisy seeds with no difference at all against a tight margin decide nothing."""
    estimate = stats.two_sample(losses(3.28, 0.01, 2), losses(3.28, 0.01, 3, 1))
    for question in ("worse", "same"):
        assert stats.decide(question, estimate, 0.05, 0.001) == Verdict.INCONCLUSIVE


def test_identical_pairs_are_no_worse_and_the_bound_itself_decides_nothing():
    x = losses(3.28, 0.001, 3)
    assert stats.decide("worse", stats.paired(x, x), 0.05, 0.001) == Verdict.PASS
    assert stats.decide("same", stats.paired(x, x), 0.05, 0.001) == Verdict.PASS
    exact = stats.Estimate(np.float64(0.001), np.float64(0), np.float64(2), "paired t")
    assert np.isnan(exact.p_below(0.001))


# --- sequential --------------------------------------------------------------------------------------------


def test_each_look_spends_its_share():
    """A p-value between alpha / looks and alpha decides nothing under the plan, but would as a lone look."""
    x = losses(3.2787, 0.0013, 6)
    first = lambda k: stats.one_sample(x[:k], 3.2805)  # noqa: E731
    p = float(first(6).p_below(0))
    assert 0.01 / 3 < p < 0.01
    verdict, fell = stats.sequential("target", first, 6, (3, 6, 9), 0.01)
    assert (verdict, fell) == (Verdict.INCONCLUSIVE, 0)
    assert stats.sequential("target", first, 6, (6,), 0.01) == (Verdict.PASS, 6)


def test_runs_between_looks_wait_and_the_first_verdict_stands():
    seen = []

    def first(k: int) -> stats.Estimate:
        seen.append(k)
        return stats.one_sample([3.0 + 0.001 * i for i in range(k)], 3.28)

    verdict, fell = stats.sequential("target", first, 4, (3, 5, 8), 0.01)
    assert seen == [3] and (verdict, fell) == (Verdict.PASS, 3)
    for plan in ((), (5, 3), (3, 3), (0, 2)):
        with pytest.raises(ValueError, match="rising"):
            stats.sequential("target", first, 4, plan, 0.01)


# --- power -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "effect, n, alpha, m", [(0.002, 5, 0.01, None), (0.001, 10, 0.05, 10), (0.003, 2, 0.05, 20)]
)
def test_power_is_what_simulation_gives(effect, n, alpha, m):
    rng = np.random.default_rng(3)
    x = rng.normal(effect, 0.0013, (20_000, n))
    if m is None:
        p = sp.ttest_1samp(x, 0, axis=1, alternative="greater").pvalue
    else:
        p = sp.ttest_ind(x, rng.normal(0, 0.0013, (20_000, m)), axis=1, alternative="greater").pvalue
    assert stats.power(effect, 0.0013, n, alpha, m) == pytest.approx((p < alpha).mean(), abs=0.012)


def test_power_beyond_the_digits_of_the_non_central_t():
    for effect in (0.1, 1.0, 1e6):
        assert stats.power(effect, 0.001, 5, 0.01) == pytest.approx(1.0)


def test_seeds_needed_has_an_honest_none():
    assert stats.seeds_needed("target", 0.0, 0.0013, 0.01) is None  # on the target
    assert (
        stats.seeds_needed("worse", 0.0005, 0.0013, 0.05, margin=0.001, m=3) is None
    )  # three baseline seeds
    assert stats.seeds_needed("worse", 0.0, 0.0013, 0.05, margin=0.01, m=10) == 2
    both = stats.seeds_needed("same", 0.0, 0.0013, 0.05, margin=0.0013)
    one = stats.seeds_needed("worse", 0.0, 0.0013, 0.05, margin=0.0013)
    assert both is not None and one is not None and both > one  # two sides to show


def test_seeds_needed_is_the_textbooks_sample_size():
    """One-sample t, effect of one deviation, 80% power: 10 two-sided and 8 one-sided at 5%."""
    assert stats.seeds_needed("same", 1.0, 1.0, 0.05, margin=0.1) == 10
    assert stats.seeds_needed("target", -1.0, 1.0, 0.05) == 8


# --- the watch band ----------------------------------------------------------------------------------------


def curves(n: int, points: int = 12, seed: int = 0) -> np.ndarray:
    """Descending curves with drifting noise of deviation 0.01."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 0.01, (n, points))
    for t in range(1, points):
        noise[:, t] = 0.7 * noise[:, t - 1] + 0.51**0.5 * noise[:, t]
    return 8 * np.exp(-np.arange(points) / 4) + 3 + noise


def test_watch_sees_a_lasting_departure_on_either_side_and_not_one_noisy_point():
    band = stats.WatchBand(curves(10))
    good = curves(1, seed=99)[0]
    assert band.rate == pytest.approx(1 / 11)
    assert band.first_alarm(good) == -1
    for sign in (1, -1):
        gone = good.copy()
        gone[6:] += sign * 0.5
        assert band.first_alarm(gone) == 7  # the second validation outside
        assert band.first_alarm(gone[:7]) == -1  # not yet
        assert band.first_alarm(gone[:8]) == 7  # a run that is still going
        spike = good.copy()
        spike[6] += sign * 0.5
        assert band.first_alarm(spike) == -1
        low, high = band.limits()
        assert (
            ((gone[6:] > high[6:]) | (gone[6:] < low[6:])).all()
            and (low < good).all()
            and (good < high).all()
        )


def test_watch_alarm_is_at_most_one_in_n_plus_one_among_exchangeable_curves():
    """The proof, tried: of N + 1 curves each held out in turn, at most one raises the alarm."""
    for seed in range(40):
        all_curves = curves(5, points=6, seed=seed)
        alarms = [
            stats.WatchBand(np.delete(all_curves, i, 0)).first_alarm(all_curves[i]) >= 0 for i in range(5)
        ]
        assert sum(alarms) <= 1


def test_watch_refuses_two_seeds():
    with pytest.raises(ValueError, match="three"):
        stats.WatchBand(curves(2))


# --- throughput and jumps ----------------------------------------------------------------------------------


def test_throughput_ratio_is_that_of_the_medians_and_its_interval_brackets_it():
    rng = np.random.default_rng(0)
    base = [1000 * (1 + 0.02 * rng.standard_normal(150)) for _ in range(3)]
    new = [0.9 * 1000 * (1 + 0.02 * rng.standard_normal(150)) for _ in range(3)]
    new[0][:3] = 10.0  # a stall must not move the median
    ratio, low, high = stats.ratio_interval(new, base)
    assert ratio == pytest.approx(
        np.mean([np.median(x) for x in new]) / np.mean([np.median(x) for x in base])
    )
    assert low < ratio < high and low < 0.9 < high and high - low < 0.03
    assert stats.ratio_interval(new, base) == (ratio, low, high)  # same seed, same answer
    with pytest.raises(ValueError, match="steady"):
        stats.ratio_interval([[]], base)


def test_jump_is_told_from_the_ordinary_descent():
    rng = np.random.default_rng(1)
    descent = 4 - 0.01 * np.arange(40) + rng.normal(0, 0.02, 40)
    size, p = stats.jump(descent, 20)
    assert abs(size) < 0.05 and p > 0.001
    dropped = descent - 0.3 * (np.arange(40) >= 20)
    size, p = stats.jump(dropped, 20)
    assert size == pytest.approx(-0.3, abs=0.05) and p < 1e-6
    assert stats.jump(-dropped, 20)[1] > 0.99  # a rise is no drop
    assert stats.jump(descent[:5], 3) == (0.0, 1.0)


# --- known truth -------------------------------------------------------------------------------------------


def check_rates(rates: list[stats.Rate]) -> None:
    """Under normal noise no planned rate is above its promise, beyond what its own 99.9% interval allows."""
    promised = [r for r in rates if r.noise == "normal" and "unplanned" not in r.what]
    assert {r.n for r in promised} >= {"2", "3", "5", "10"}
    for rate in promised:
        assert rate.interval(0.999)[0] <= rate.alpha, rate
    # and the ones that are exact are also not far below it: the simulation does reach its wrong verdicts
    for rate in promised:
        if rate.what.startswith("target: PASS") and "planned" not in rate.what:
            assert rate.interval(0.999)[1] >= rate.alpha, rate


def test_error_rates_hold_in_ten_thousand_experiments_each():
    rates = stats.simulate(10_000, watch_trials=200)
    check_rates(rates)
    by = {(r.what, r.noise, r.n): r.rate for r in rates}
    looks = ",".join(map(str, stats.LOOKS))
    assert (
        by["worse: FAIL at no difference, looks unplanned", "normal", looks] > 0.08
    )  # why the plan is needed
    assert 0.02 < by["target: PASS on target", "gamma(2)", "5"] < 0.05  # skew is not covered by the promise


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_full_simulation_holds_and_the_page_shows_it():
    check_rates(stats.simulate())
    assert stats.tables() in PAGE.read_text(), "run: python -m harness.stats --tables --into docs/regress.md"


def test_tables_go_between_their_markers(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("head\n<!-- tables -->\nold\n<!-- /tables -->\ntail\n")
    assert stats.replace_section(page.read_text(), "tables", "new\n") == (
        "head\n<!-- tables -->\nnew\n<!-- /tables -->\ntail\n"
    )
    page.write_text("no markers\n")
    assert stats.main(["--tables", "--trials", "10", "--into", str(page)]) == 2
    assert "no section marked" in capsys.readouterr().err and page.read_text() == "no markers\n"
