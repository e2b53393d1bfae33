"""Summaries, intervals of paired block differences, and the four words: better, worse, same, unsure.

Pure numbers in, pure numbers out, and deterministic: the same values give the same interval on every machine. How
block differences are taken from requests is ``core.pairs``.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec

#: 95 % two-sided.
ALPHA: Final = 0.05
#: A live comparison may speak only at these numbers of blocks, each at LOOK_ALPHA, so that looking again and again
#: does not raise the rate of false alarms above 5 %.
LOOKS: Final = (10, 20, 40)
LOOK_ALPHA: Final = 0.0167
#: Above this lag-1 autocorrelation blocks are not independent and Student's t is too narrow.
AUTOCORRELATION_LIMIT: Final = 0.2
#: Fewest values for which two of them enclose the median with 95 % (1 − 2 · ½ⁿ ≥ 0.95).
MEDIAN_CI_MIN: Final = 6
#: p99 needs this many independent units to be stated, and this many to have an interval (1 − 0.99ⁿ ≥ 0.975).
P99_MIN: Final = 1000
P99_CI_MIN: Final = 368

#: Where the noise here exceeds this, two arms cannot be told apart, which is not the same as being the same.
SAME_LIMIT: Final = 0.05
TOO_WIDE: Final = "the interval is too wide"
#: Clear from the plain 95 % interval beside it, but the word needs the level for several metrics or several looks.
STRICTER: Final = "clear at 95 %, but not at the stricter level for several metrics or looks"

BETTER: Final = "better"
WORSE: Final = "worse"
SAME: Final = "same"
UNSURE: Final = "unsure"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in the JSON contract's form. ``median`` None with a ``reason`` where nothing was measured;
    ``ci95`` None with the same field's reason where there are too few values. ``note``: what a reader must know
    about a value that is there."""

    median: float | None
    ci95: tuple[float, float] | None
    n: int
    unit: str
    reason: str | None = None
    note: str | None = None


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """arm / reference of one metric. ``judgement``: better, worse, same, unsure. ``threshold`` is δ, in ln units.

    ``level``: what the ratio multiplies, in the metric's unit: the reference's geometric mean over the same blocks
    (unpaired: the median of its blocks). ``provisional``: a live figure whose word no planned look has decided yet.
    ``decided_at``: the number of blocks of the planned look that decided a live word.
    """

    reference: str
    arm: str
    metric: str
    ratio: float | None
    ci95: tuple[float, float] | None
    judgement: str
    blocks: int = 0
    threshold: float | None = None
    noise_floor: float | None = None
    provisional: bool = False
    reason: str | None = None
    level: float | None = None
    decided_at: int | None = None

    @property
    def difference(self) -> float | None:
        """level · (ratio − 1), in the metric's unit. From the ratio itself and not from two medians, so that the
        absolute and the relative difference never have different signs."""
        return None if self.level is None or self.ratio is None else self.level * (self.ratio - 1)

    @property
    def difference_ci95(self) -> tuple[float, float] | None:
        """level · (bound − 1) for both bounds of the ratio's interval; the level is taken as known."""
        if self.level is None or self.ci95 is None:
            return None
        return self.level * (self.ci95[0] - 1), self.level * (self.ci95[1] - 1)


class Interval(msgspec.Struct, frozen=True):
    """Mean of block differences (ln units), its two-sided interval, and how it was made."""

    mean: float
    low: float
    high: float
    n: int
    method: str = "student-t"

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def reach(self) -> float:
        """The largest distance from 0 that the interval holds: half its width where it is centred on 0."""
        return max(abs(self.low), abs(self.high))


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Pooled distribution of ``n`` values from ``units`` independent units. ``p99`` by the rules of ``P99_MIN``."""

    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None
    n: int
    unit: str
    units: int = 0
    p99_ci95: tuple[float, float] | None = None
    p99_reason: str | None = None
    reason: str | None = None


def present(values: Sequence[float | None]) -> list[float]:
    """The values that are there and finite. Infinity and NaN are not measurements."""
    return [float(v) for v in values if v is not None and math.isfinite(v)]


def summarize(values: Sequence[float | None], unit: str, reason: str | None = None) -> Summary:
    """Median and the 95 % interval of the median by order statistics. Missing and non-finite values are left out.

    The interval is [x_(k), x_(n−k+1)], k the largest rank with P(Bin(n, ½) < k) ≤ 0.025; below 6 values there is
    none. Source: W. J. Conover, Practical Nonparametric Statistics, 3rd ed., 3.2.
    """
    return _summary(sorted(present(values)), None, unit, reason)


def summarize_pooled(
    groups: Sequence[Sequence[float | None]], unit: str, reason: str | None = None
) -> Summary:
    """As ``summarize`` for values that come in dependent groups (the gaps of one request, the requests of one block): the median is of all
    values, the interval's ranks are those of as many values as there are groups."""
    filled = [g for g in (present(group) for group in groups) if g]
    return _summary(sorted(v for g in filled for v in g), len(filled), unit, reason)


def summarize_in_units(
    values: Sequence[float | None], sizes: Sequence[int], unit: str, reason: str | None = None
) -> Summary:
    """The same for ``values`` in a row, ``sizes`` of them at a time in one group: without a list a group, of which a long
    run has tens of thousands for every metric."""
    try:
        whole = math.isfinite(math.fsum(values))  # type: ignore[arg-type]
    except (TypeError, OverflowError, ValueError):
        whole = False  # None, or infinity, is among them
    if whole:
        return _summary(sorted(map(float, values)), len(sizes), unit, reason)  # type: ignore[arg-type]
    ends = list(itertools.accumulate(sizes, initial=0))
    groups = [values[begin:end] for begin, end in itertools.pairwise(ends)]
    return summarize_pooled(groups, unit, reason)


def _summary(ordered: list[float], units: int | None, unit: str, reason: str | None) -> Summary:
    n = len(ordered)
    if not n:
        return Summary(median=None, ci95=None, n=0, unit=unit, reason=reason or "nothing was measured")
    independent = n if units is None else units
    if independent < MEDIAN_CI_MIN:
        what = f"n = {n}" if independent == n else f"{independent} independent units"
        few = f"{what}: a 95 % interval of the median needs {MEDIAN_CI_MIN}"
        return Summary(median=statistics.median(ordered), ci95=None, n=n, unit=unit, reason=few)
    k = _median_rank(independent)
    low, high = k - 1, independent - k
    if units is not None:
        # Ranks of the groups as fractions of the pooled values: as wide as if each group were one value.
        low = low * n // independent
        high = min(n - 1, -(-(high + 1) * n // independent) - 1)
    return Summary(median=statistics.median(ordered), ci95=(ordered[low], ordered[high]), n=n, unit=unit)


@lru_cache(maxsize=4096)
def _median_rank(n: int) -> int:
    """Largest k ≥ 1 with P(Bin(n, ½) ≤ k − 1) ≤ 0.025; the normal approximation above 1000, where it is exact
    enough and sums of big integers are not cheap."""
    if n > 1000:
        return max(1, math.floor(n / 2 - 1.959964 * math.sqrt(n) / 2))
    limit = 0.025 * 2.0**n
    total, k = 0, 0
    while total + math.comb(n, k) <= limit:
        total += math.comb(n, k)
        k += 1
    return max(1, k)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between closest ranks (type 7 of Hyndman and Fan). ``ordered`` ascending, not empty."""
    place = (len(ordered) - 1) * q
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def quantiles(groups: Sequence[Sequence[float]], unit: str, reason: str | None = None) -> Quantiles:
    """p50, p90, p99, max of all values in ``groups``; the groups (requests, blocks) are the independent units.

    p99 is stated from 1,000 units on; from 368 on only its interval, by the order statistics of as many values as
    there are units; below, null with the n.
    """
    filled = [g for g in (present(group) for group in groups) if g]
    ordered = sorted(v for g in filled for v in g)
    units = len(filled)
    if not ordered:
        why = reason or "nothing was measured"
        return Quantiles(p50=None, p90=None, p99=None, max=None, n=0, unit=unit, p99_reason=why, reason=why)
    p99: float | None = None
    interval: tuple[float, float] | None = None
    why99: str | None = None
    if units >= P99_CI_MIN:
        spread = statistics.NormalDist().inv_cdf(1 - ALPHA / 2) * math.sqrt(0.99 * 0.01 / units)
        interval = (quantile(ordered, max(0.0, 0.99 - spread)), quantile(ordered, min(1.0, 0.99 + spread)))
    if units >= P99_MIN:
        p99 = quantile(ordered, 0.99)
    elif units >= P99_CI_MIN:
        why99 = f"{units} independent units: only the interval can be given, a p99 needs {P99_MIN}"
    else:
        why99 = f"{units} independent units, a p99 needs {P99_MIN}"
    return Quantiles(
        p50=quantile(ordered, 0.5),
        p90=quantile(ordered, 0.9),
        p99=p99,
        max=ordered[-1],
        n=len(ordered),
        unit=unit,
        units=units,
        p99_ci95=interval,
        p99_reason=why99,
    )


# -- intervals of block differences ------------------------------------------------------------------------------------


def autocorrelation(values: Sequence[float]) -> float:
    """Lag-1 autocorrelation; 0 where there is no spread or fewer than 3 values."""
    if len(values) < 3:
        return 0.0
    mean = statistics.fmean(values)
    spread = math.fsum((v - mean) ** 2 for v in values)
    if spread <= 0.0:
        return 0.0
    return math.fsum((a - mean) * (b - mean) for a, b in itertools.pairwise(values)) / spread


def block_interval(differences: Sequence[float], alpha: float = ALPHA) -> Interval | None:
    """The mean of block differences and its 1 − ``alpha`` interval. None below 2 blocks.

    Student's t; where lag-1 autocorrelation is above 0.2, the moving block bootstrap (H. R. Künsch, Ann. Statist.
    17, 1989), never narrower than Student's t, because with few blocks the bootstrap's own interval is too narrow.
    """
    return _block_interval(tuple(differences), alpha)


@lru_cache(maxsize=2048)
def _block_interval(differences: tuple[float, ...], alpha: float) -> Interval | None:
    n = len(differences)
    if n < 2:
        return None
    mean = statistics.fmean(differences)
    half = t_quantile(1 - alpha / 2, n - 1) * _deviation(differences) / math.sqrt(n)
    low, high = mean - half, mean + half
    if autocorrelation(differences) <= AUTOCORRELATION_LIMIT:
        return Interval(mean, low, high, n)
    boot_low, boot_high = _moving_block_bootstrap(differences, alpha)
    return Interval(mean, min(low, boot_low), max(high, boot_high), n, "block bootstrap")


def _deviation(values: Sequence[float]) -> float:
    """Sample standard deviation. ``statistics.stdev`` sums fractions: exact, and slow over thousands of blocks."""
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def _moving_block_bootstrap(
    values: tuple[float, ...], alpha: float, resamples: int = 2000
) -> tuple[float, float]:
    n = len(values)
    length = max(2, round(n ** (1 / 3)))
    starts = n - length + 1
    sums = [math.fsum(values[i : i + length]) for i in range(starts)]
    pieces = max(1, round(n / length))
    rng = random.Random(0)  # fixed: the same values give the same interval
    means = sorted(
        math.fsum(sums[rng.randrange(starts)] for _ in range(pieces)) / (pieces * length)
        for _ in range(resamples)
    )
    return quantile(means, alpha / 2), quantile(means, 1 - alpha / 2)


def two_sided_p(interval: Interval | None, differences: Sequence[float]) -> float:
    """p of Student's t against 0, for ordering metrics; 1 where there is no interval."""
    if interval is None:
        return 1.0
    spread = _deviation(differences)
    if spread == 0.0:
        return 1.0 if interval.mean == 0.0 else 0.0
    t = abs(interval.mean) / (spread / math.sqrt(len(differences)))
    return 2 * (1 - t_cdf(t, len(differences) - 1))


def holm_alphas(p_values: Sequence[float], alpha: float = ALPHA) -> list[float]:
    """Holm's level for each p-value: α / (m − rank), smallest p first. Same order as given.

    A metric may be called better or worse only if every metric with a smaller p was: ``core.pairs`` sees to it.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    levels = [alpha] * len(p_values)
    for rank, i in enumerate(order):
        levels[i] = alpha / (len(p_values) - rank)
    return levels


def threshold(min_effect: float, control: Interval | None) -> float:
    """δ in ln units: max(ln(1 + least effect that matters), reach of the A/A control's interval). Its reach and not
    its half-width: where the reference differs from itself by its place in the block, so may any two arms."""
    least = math.log1p(min_effect)
    return least if control is None else max(least, control.reach)


def judge(interval: Interval | None, delta: float, better: str | None) -> str:
    """better / worse / same / unsure for the ln ratio ``interval`` against ±``delta``.

    better, worse: the interval excludes 0 and |mean| > delta. same: it lies inside ±delta. ``better`` is "lower" or
    "higher", None for a metric that has no better direction: such a metric is same or unsure only.
    """
    if interval is None:
        return UNSURE
    excludes_zero = interval.low > 0 or interval.high < 0
    if excludes_zero and abs(interval.mean) > delta:
        if better is None:
            return UNSURE
        return BETTER if (interval.mean < 0) == (better == "lower") else WORSE
    if -delta < interval.low and interval.high < delta:
        return SAME
    return UNSURE


def careful(word: str, delta: float, min_effect: float) -> str:
    """ "same" becomes "unsure" where ``delta`` was widened by noise beyond 5 % (or the least effect, if larger): with
    two noisy blocks everything would be the same."""
    return UNSURE if word == SAME and delta > math.log1p(max(min_effect, SAME_LIMIT)) else word


def unsure_reason(interval: Interval, delta: float, min_effect: float) -> str:
    """Why a measured difference is unsure: noise that hides it, or an interval that is too wide."""
    inside = -delta < interval.low and interval.high < delta
    if inside and delta > math.log1p(max(min_effect, SAME_LIMIT)):
        return f"noise here hides differences up to {math.expm1(delta):.0%}"
    return STRICTER if inside or judge(interval, delta, "lower") in (BETTER, WORSE) else TOO_WIDE


# -- Student's t -------------------------------------------------------------------------------------------------------


def t_cdf(t: float, df: float) -> float:
    """P(T ≤ t) of Student's t by the regularized incomplete beta function (DLMF 8.17)."""
    if df <= 0:
        raise ValueError(f"degrees of freedom must be positive, not {df}")
    tail = 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t))
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=4096)
def t_quantile(p: float, df: float) -> float:
    """The t with P(T ≤ t) = p, by bisection on ``t_cdf``; absolute error below 1e-9."""
    if not 0 < p < 1:
        raise ValueError(f"p must lie between 0 and 1, not {p}")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 2.0
    while t_cdf(high, df) < p:
        low, high = high, high * 2
    while high - low > 1e-10 * max(1.0, high):
        middle = (low + high) / 2
        if t_cdf(middle, df) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b) by its continued fraction with Lentz's method (DLMF 8.17.22)."""
    if x <= 0.0 or x >= 1.0:
        return min(1.0, max(0.0, x))
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, 1 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    h = d
    for m in range(1, 500):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + numerator * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + numerator / c
            c = c if abs(c) > tiny else tiny
            h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return h
