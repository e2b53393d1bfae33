"""Summaries, intervals, quantile rules, the four words: known answers and laws."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdq_tui.core.stats import (
    LOOK_ALPHA,
    LOOKS,
    Interval,
    autocorrelation,
    block_interval,
    careful,
    holm_alphas,
    judge,
    quantile,
    quantiles,
    summarize,
    summarize_in_units,
    summarize_pooled,
    t_cdf,
    t_quantile,
    threshold,
    unsure_reason,
)

FINITE = st.floats(min_value=-1e6, max_value=1e6)


# Table values of Student's t, two-sided 95 % and 99 %.
@pytest.mark.parametrize(
    ("df", "p", "known"),
    [
        (1, 0.975, 12.7062),
        (2, 0.975, 4.30265),
        (3, 0.975, 3.18245),
        (9, 0.975, 2.26216),
        (19, 0.975, 2.09302),
        (39, 0.975, 2.02269),
        (120, 0.975, 1.97993),
        (1, 0.995, 63.6567),
        (9, 0.995, 3.24984),
        (9, 0.5 + 0.45, 1.83311),
    ],
)
def test_t_quantile_is_the_table_value(df: float, p: float, known: float) -> None:
    assert t_quantile(p, df) == pytest.approx(known, abs=6e-5 * max(1, known / 10))
    assert t_quantile(1 - p, df) == pytest.approx(-t_quantile(p, df))


@given(st.floats(0.001, 0.999), st.integers(1, 300))
def test_t_quantile_inverts_t_cdf(p: float, df: int) -> None:
    assert t_cdf(t_quantile(p, df), df) == pytest.approx(p, abs=1e-9)


def test_t_against_scipy() -> None:
    stats = pytest.importorskip(
        "scipy.stats", reason="scipy is not a dependency; the table values stand alone"
    )
    for df in (1, 2, 5, 9, 40, 500):
        for p in (0.6, 0.9, 0.975, 0.99165, 0.9995):
            assert t_quantile(p, df) == pytest.approx(float(stats.t.ppf(p, df)), rel=1e-8)


def test_t_quantile_refuses_what_has_no_answer() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        t_quantile(1.0, 3)
    with pytest.raises(ValueError, match="positive"):
        t_cdf(0.0, 0)


def test_median_interval_by_order_statistics() -> None:
    # n = 10: ranks 2 and 9 (coverage 97.9 %); n = 6: the extremes (96.9 %). Conover, table A3.
    assert summarize(list(range(1, 11)), "ms").ci95 == (2, 9)
    assert summarize([3, 1, 2, 6, 5, 4], "ms").ci95 == (1, 6)
    assert summarize(list(range(1, 101)), "ms").ci95 == (40, 61)


def test_few_values_have_a_median_and_say_why_no_interval() -> None:
    s = summarize([1.0, 3.0], "ms")
    assert (s.median, s.ci95, s.n) == (2.0, None, 2)
    assert s.reason is not None and "n = 2" in s.reason


def test_missing_and_non_finite_values_are_not_values() -> None:
    s = summarize([1.0, None, math.nan, math.inf, 3.0], "ms")
    assert (s.median, s.n) == (2.0, 2)
    empty = summarize([None, math.nan], "ms", "no sensor")
    assert (empty.median, empty.ci95, empty.n, empty.reason) == (None, None, 0, "no sensor")


@given(st.lists(FINITE, min_size=6, max_size=60))
def test_the_interval_encloses_the_median(values: list[float]) -> None:
    s = summarize(values, "ms")
    assert s.ci95 is not None and s.median is not None
    assert s.ci95[0] <= s.median <= s.ci95[1]
    assert s.median == statistics.median(values)
    assert summarize(values, "ms") == s


def test_the_interval_covers_the_true_median_as_often_as_it_says() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(1000):
        low, high = summarize([rng.expovariate(1.0) for _ in range(24)], "ms").ci95 or (0, 0)
        hits += low <= math.log(2) <= high
    assert hits >= 940


def test_large_samples_use_the_normal_ranks_without_a_step() -> None:
    just_below = summarize(list(range(1000)), "ms").ci95
    just_above = summarize(list(range(1001)), "ms").ci95
    assert just_below is not None and just_above is not None
    assert just_above[0] == pytest.approx(just_below[0], abs=2)


def test_gaps_of_one_request_are_not_independent() -> None:
    rng = random.Random(2)
    groups = [[10 + shift + rng.gauss(0, 0.01) for _ in range(50)] for shift in (0, 1, 2, 3, 4, 5, 6, 7)]
    pooled = summarize_pooled(groups, "ms")
    single = summarize([v for g in groups for v in g], "ms")
    assert pooled.n == single.n == 400 and pooled.ci95 is not None and single.ci95 is not None
    assert pooled.ci95[1] - pooled.ci95[0] > 3 * (single.ci95[1] - single.ci95[0])


@pytest.mark.parametrize(
    ("units", "p99", "interval", "words"),
    [
        (367, False, False, "367 independent units"),
        (368, False, True, "only the interval"),
        (999, False, True, "only the interval"),
        (1000, True, True, None),
    ],
)
def test_p99_needs_independent_units(units: int, p99: bool, interval: bool, words: str | None) -> None:
    q = quantiles([[float(i)] for i in range(units)], "ms")
    assert (q.p99 is not None, q.p99_ci95 is not None) == (p99, interval)
    assert (q.p99_reason is None) if words is None else words in (q.p99_reason or "")
    assert q.p50 is not None and q.units == q.n == units
    if q.p99_ci95 and q.p99:
        assert q.p99_ci95[0] < q.p99 < q.p99_ci95[1]


def test_quantiles_of_nothing_are_null() -> None:
    q = quantiles([], "ms", "no decode step was made")
    assert (q.p50, q.p90, q.p99, q.max, q.n, q.reason) == (
        None,
        None,
        None,
        None,
        0,
        "no decode step was made",
    )


def test_quantile_interpolates() -> None:
    assert quantile([0.0, 10.0], 0.5) == 5.0
    assert quantile([1.0], 0.99) == 1.0


# -- block intervals ---------------------------------------------------------------------------------------------------


def test_student_t_on_known_differences() -> None:
    d = [0.01, 0.02, 0.03, 0.02]
    i = block_interval(d)
    assert i is not None and i.method == "student-t" and i.n == 4
    half = 3.18245 * statistics.stdev(d) / 2
    assert (i.low, i.high) == (pytest.approx(0.02 - half, abs=1e-6), pytest.approx(0.02 + half, abs=1e-6))


def test_one_block_has_no_interval() -> None:
    assert block_interval([0.5]) is None and block_interval([]) is None


def test_dependent_blocks_widen_the_interval() -> None:
    d = [math.sin(i / 4) * 0.01 for i in range(40)]
    assert autocorrelation(d) > 0.2
    i = block_interval(d)
    assert i is not None and i.method == "block bootstrap"
    t_half = t_quantile(0.975, 39) * statistics.stdev(d) / math.sqrt(40)
    assert i.half_width >= t_half
    assert block_interval(d) == i


@given(st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=30), st.sampled_from([0.05, LOOK_ALPHA, 0.01]))
def test_turning_the_comparison_round_turns_the_interval_round(d: list[float], alpha: float) -> None:
    i, back = block_interval(d, alpha), block_interval([-x for x in d], alpha)
    assert i is not None and back is not None
    assert back.mean == pytest.approx(-i.mean, abs=1e-12)
    assert i.low <= i.mean <= i.high
    if i.method == "student-t":
        assert (back.low, back.high) == (pytest.approx(-i.high, abs=1e-12), pytest.approx(-i.low, abs=1e-12))


@pytest.mark.parametrize(
    ("interval", "better", "word"),
    [
        ((0.02, 0.015, 0.025), "lower", "worse"),
        ((0.02, 0.015, 0.025), "higher", "better"),
        ((-0.02, -0.025, -0.015), "lower", "better"),
        ((-0.02, -0.025, -0.015), "higher", "worse"),
        ((0.005, 0.004, 0.006), "lower", "same"),  # excludes 0, but below the threshold
        ((0.0, -0.009, 0.009), "lower", "same"),
        ((0.0, -0.02, 0.02), "lower", "unsure"),
        ((0.012, 0.005, 0.019), "lower", "worse"),
        (
            (0.009, 0.004, 0.014),
            "lower",
            "unsure",
        ),  # the mean does not leave the threshold, the interval does
        ((0.02, 0.015, 0.025), None, "unsure"),
    ],
)
def test_the_four_words(interval: tuple[float, float, float], better: str | None, word: str) -> None:
    assert judge(Interval(*interval, 10), 0.01, better) == word


def test_noise_that_hides_everything_does_not_make_things_the_same() -> None:
    wide = Interval(0.0, -0.5, 0.5, 2)
    assert judge(wide, 2.0, "lower") == "same"
    assert careful("same", 2.0, 0.01) == "unsure"
    assert unsure_reason(wide, 2.0, 0.01) == "noise here hides differences up to 639%"
    assert careful("same", math.log(1.04), 0.01) == "same"
    assert (
        careful("same", math.log(1.2), 0.2) == "same"
    )  # the person said that 20 % is the least that matters
    assert careful("better", 2.0, 0.01) == "better"


def test_nothing_measured_is_unsure() -> None:
    assert judge(None, 0.01, "lower") == "unsure"


def test_the_threshold_is_the_larger_of_effect_and_noise() -> None:
    assert threshold(0.01, None) == pytest.approx(math.log(1.01))
    assert threshold(0.01, Interval(0.0, -0.03, 0.03, 10)) == pytest.approx(0.03)
    assert threshold(0.05, Interval(0.0, -0.03, 0.03, 10)) == pytest.approx(math.log(1.05))


def test_holm_levels() -> None:
    assert holm_alphas([0.01, 0.04, 0.03]) == [
        pytest.approx(0.05 / 3),
        pytest.approx(0.05),
        pytest.approx(0.025),
    ]
    assert holm_alphas([]) == []


def test_equal_arms_are_rarely_called_different() -> None:
    """The planned looks keep the false alarms of equal arms at 5 % even with no threshold to help."""
    rng = random.Random(3)
    alarms = 0
    for _ in range(400):
        d = [rng.gauss(0, 0.01) for _ in range(LOOKS[-1])]
        alarms += any(
            judge(block_interval(d[:look], LOOK_ALPHA), 0.0, "lower") in ("better", "worse") for look in LOOKS
        )
    assert alarms <= 32  # 8 %: 5 % and three standard errors


@given(
    st.lists(st.one_of(st.none(), st.floats(width=32)), max_size=40),
    st.lists(st.integers(1, 4), min_size=40, max_size=40),
)
def test_values_in_a_row_are_summarized_as_their_groups_are(
    values: list[float | None], sizes: list[int]
) -> None:
    groups, rest = [], list(values)
    while rest:
        size = sizes[len(groups)]
        groups.append(rest[:size])
        rest = rest[size:]
    assert summarize_in_units(values, [len(g) for g in groups], "ms") == summarize_pooled(groups, "ms")
