"""The judge tried on recorded noise with true differences that are known: how often it is wrong, and how often it sees.

Shared by the tests, which try it on a thousand seeds, and ``tests.benchmarks.selftest``, which tries more and writes it down.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from recorded_noise import Recording, replayed, stretch

from pdq_tui.core.pairs import ratios
from pdq_tui.core.stats import BETTER, WORSE, Ratio
from pdq_tui.judge import breakeven, soak

#: What a verdict rests on.
PRIMARY: Final = "e2e_ms"
METRICS: Final = ("e2e_ms", "ttft_ms", "tpot_ms")
DIFFERENT: Final = (BETTER, WORSE)
#: Requests of a soak that is flat or drifts: minutes, and an hour.
SHORT_SOAK: Final = 600
LONG_SOAK: Final = 3000


def _judged(
    recording: Recording, slower: float, seed: int, blocks: int, metrics: Sequence[str]
) -> dict[str, Ratio]:
    requests = replayed(recording, {"A": (1.0, 1.0), "B": (slower, slower)}, seed=seed, blocks=blocks)
    return {r.metric: r for r in ratios(requests, "A", ["A", "B"], metrics=metrics)}


def words(
    recording: Recording, slower: float, seeds: Iterable[int], blocks: int, metrics: Sequence[str] = METRICS
) -> tuple[Counter[str], int]:
    """What is said of an arm that takes ``slower`` times the reference's time: the primary metric's words, and how often any
    metric is called better or worse."""
    said: Counter[str] = Counter()
    any_metric = 0
    for seed in seeds:
        rows = _judged(recording, slower, seed, blocks, metrics)
        said[rows[PRIMARY].judgement] += 1
        any_metric += any(r.judgement in DIFFERENT for r in rows.values())
    return said, any_metric


#: Staged against uniform, as factors of (prefill, step), on either side of a break-even.
SIDES: Final = {"longer answers": (1.6, 0.75), "shorter answers": (0.6, 1.3)}


class Signs(msgspec.Struct):
    """Of ΔT at one share of the true break-even length: how often its sign was right, how often its interval excluded 0,
    and how often that was on the wrong side."""

    right: int = 0
    said: int = 0
    said_wrong: int = 0


def signs(recording: Recording, side: str, seeds: Iterable[int], blocks: int) -> dict[float, Signs]:
    """At half and at twice the true break-even length N*."""
    by_prefill, by_step = SIDES[side]
    prefill = sum(recording.prefill_us) / len(recording.prefill_us)
    step = sum(recording.step_us) / len(recording.step_us)
    a, slope = prefill * (by_prefill - 1), step * (by_step - 1)
    found = {0.5: Signs(), 2.0: Signs()}
    for seed in seeds:
        requests = replayed(
            recording, {"uniform": (1.0, 1.0), "staged": SIDES[side]}, seed=seed, blocks=blocks
        )
        line = breakeven.line(requests, "staged", "uniform")
        for share, signs in found.items():
            output = max(1, round(share * (1 - a / slope)))
            faster = a + (output - 1) * slope < 0
            delta, interval = line.delta_ms(output)
            signs.right += (delta < 0) == faster
            if interval is not None and (interval[0] > 0 or interval[1] < 0):
                signs.said += 1
                signs.said_wrong += (delta < 0) != faster
    return found


def drifts(recording: Recording, change: float, seeds: Iterable[int], requests: int) -> int:
    """How often a soak of so many requests whose step time rises by ``change`` over its length is said to drift."""
    found = 0
    for seed in seeds:
        rest = stretch(recording, requests, random.Random(f"{recording.run}:soak:{seed}"))
        now, series = 0.0, []
        for i, (prefill, step) in enumerate(rest):
            value = step * (1 + change * i / requests)
            now += (prefill + recording.output_tokens * value) / 1e3
            series.append((now, value))
        found += soak.drift("TPOT", "ms", series, hurts=1).drifts
    return found
