"""Snapshots of different runs: the ratio of medians of blocks, with a bootstrap over blocks.

Nothing cancels a drift between the runs here: the threshold is widened by the drift inside each.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Final

from pdq_tui.core.arms import drift, timed, unequal_work, units
from pdq_tui.core.metrics import METRICS, PRIMARY
from pdq_tui.core.protocol import Request
from pdq_tui.core.stats import (
    MEDIAN_CI_MIN,
    UNSURE,
    Interval,
    Ratio,
    careful,
    judge,
    quantile,
    unsure_reason,
)
from pdq_tui.store.snapshot import Snapshot

UNPAIRED: Final = "unpaired bootstrap"
_RESAMPLES: Final = 1000
_NOT_INTERLEAVED: Final = "not interleaved: a drift between the runs is not cancelled"


def unpaired(a: Snapshot, b: Snapshot, metrics: Sequence[str], min_effect: float) -> list[Ratio]:
    """b / a of each metric: the ratio of the medians of their blocks, a block's value being the geometric mean of the
    arm's requests in it (outside blocks each request stands alone). Percentile bootstrap over blocks, from 6 on each
    side. δ is at least the noise floors of both runs and the drift inside each."""
    used = [timed(s.requests) for s in (a, b)]
    blocks = [units(requests) for requests in used]
    moved = [drift(requests, s.device, s.model, metrics) for s, requests in zip((a, b), used, strict=True)]
    unequal = unequal_work(*used)
    return [
        _ratio(
            a,
            b,
            metric,
            [block_values(of, s, metric) for s, of in zip((a, b), blocks, strict=True)],
            [m[metric] for m in moved],
            unequal if metric == PRIMARY else None,
            min_effect,
        )
        for metric in metrics
    ]


def _ratio(
    a: Snapshot,
    b: Snapshot,
    metric: str,
    sides: Sequence[list[float]],
    moved: Sequence[float | None],
    unequal: str | None,
    min_effect: float,
) -> Ratio:
    counts = [len(side) for side in sides]
    level = statistics.median(sides[0]) if sides[0] else None
    ratio = statistics.median(sides[1]) / level if level and sides[1] else None
    interval = bootstrap(*sides)
    effects = [min_effect]
    effects += [f for s in (a, b) if isinstance(f := s.part("noise_floor").get(metric), float)]
    effects += [abs(m) for m in moved if m is not None]
    delta = math.log1p(max(effects))
    if interval is None:
        word, reason = (
            UNSURE,
            f"{counts[0]} and {counts[1]} independent units: an interval needs {MEDIAN_CI_MIN}",
        )
    elif unequal is not None:
        word, reason = UNSURE, unequal
    else:
        word, reason = careful(judge(interval, delta, METRICS[metric].better), delta, min_effect), ""
        if word == UNSURE:
            reason = f"{unsure_reason(interval, delta, min_effect)}; "
        reason += _NOT_INTERLEAVED
    return Ratio(
        reference=a.label,
        arm=b.label,
        metric=metric,
        ratio=ratio,
        ci95=None if interval is None else (math.exp(interval.low), math.exp(interval.high)),
        judgement=word,
        threshold=delta,
        reason=reason,
        level=level,
    )


def block_values(blocks: Sequence[Sequence[Request]], s: Snapshot, metric: str) -> list[float]:
    """One positive number an independent unit, ascending."""
    of, device, model = METRICS[metric].of, s.device, s.model
    found = []
    for unit in blocks:
        values = [v for r in unit if (v := of(r, device, model)) is not None and 0 < v < math.inf]
        if values:
            found.append(values[0] if len(values) == 1 else math.prod(values) ** (1 / len(values)))
    return sorted(found)


def bootstrap(one: Sequence[float], two: Sequence[float]) -> Interval | None:
    """95 % percentile bootstrap of ln(median of ``two`` / median of ``one``), both ascending; None below 6 of
    either, where resampling a median is too narrow."""
    if min(len(one), len(two)) < MEDIAN_CI_MIN:
        return None
    rng = random.Random(0)  # fixed: the same values give the same interval
    logs = sorted(
        math.log(median_of_resample(two, rng) / median_of_resample(one, rng)) for _ in range(_RESAMPLES)
    )
    middle = math.log(statistics.median(two) / statistics.median(one))
    return Interval(middle, quantile(logs, 0.025), quantile(logs, 0.975), min(len(one), len(two)), UNPAIRED)


def median_of_resample(ordered: Sequence[float], rng: random.Random) -> float:
    """The median of as many draws with replacement, without drawing them: a draw is x at ⌊n·U⌋, so that the k-th
    smallest draw is x at ⌊n·U₍ₖ₎⌋, and U₍ₖ₎ of n uniforms is Beta(k, n − k + 1). One step whatever n is."""
    n = len(ordered)
    k = (n + 1) // 2
    place = rng.betavariate(k, n - k + 1)
    low = ordered[min(n - 1, int(n * place))]
    if n % 2:
        return low
    # The next of the n − k that lie above it is the smallest of n − k uniforms on (place, 1).
    place = 1 - (1 - place) * rng.random() ** (1 / (n - k))
    return (low + ordered[min(n - 1, int(n * place))]) / 2
