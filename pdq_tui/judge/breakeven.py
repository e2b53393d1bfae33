"""From which answer length on a staged policy wins: ΔT(N) = a + (N − 1)·Δα from paired blocks.

a = (TTFT + hand-off) of the staged policy minus the uniform's, Δα = its decode step minus the uniform's, both in ms and
block by block; so an interval of ΔT(N) is one over blocks, and a and Δα are resampled together. Negative: staged is faster.
A decode step is taken as independent of the context's length where both read the same KV format.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from pdq_tui.core.pairs import blocks_of
from pdq_tui.core.protocol import Request
from pdq_tui.core.stats import block_interval, quantile

_RESAMPLES: Final = 2000

ALWAYS: Final = "staged is faster at every length"
NEVER: Final = "staged is faster at no length"
ABOVE: Final = "staged is faster for longer answers"
BELOW: Final = "staged is faster for shorter answers"
OPEN: Final = "no finite break-even: the decode steps cannot be told apart"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One staged policy against one uniform. ``a`` and ``step``: a value a block, in ms."""

    staged: str
    uniform: str
    a: list[float]
    step: list[float]
    longest: int

    def delta_ms(self, output: int) -> tuple[float, tuple[float, float] | None]:
        """ΔT at ``output`` tokens: mean over blocks and its 95 % interval, None below two blocks."""
        values = [a + (output - 1) * s for a, s in zip(self.a, self.step, strict=True)]
        interval = block_interval(values)
        return statistics.fmean(values), None if interval is None else (interval.low, interval.high)

    def break_even(self) -> BreakEven:
        """N* = 1 − a/Δα with its side, and the 95 % interval by resampling blocks."""
        a, step = statistics.fmean(self.a), statistics.fmean(self.step)
        interval = block_interval(self.step)
        if interval is None or interval.low <= 0 <= interval.high:
            return BreakEven(output=None, ci95=None, side=OPEN)
        if (a < 0) == (step < 0):
            return BreakEven(output=None, ci95=None, side=ALWAYS if step < 0 else NEVER)
        rng = random.Random(0)
        n = len(self.a)
        found = []
        for _ in range(_RESAMPLES):
            picked = [rng.randrange(n) for _ in range(n)]
            slope = sum(self.step[i] for i in picked)
            if slope and (slope < 0) == (step < 0):
                found.append(1 - sum(self.a[i] for i in picked) / slope)
        found.sort()
        return BreakEven(
            output=1 - a / step,
            ci95=(max(1.0, quantile(found, 0.025)), quantile(found, 0.975)) if found else None,
            side=ABOVE if step < 0 else BELOW,
        )


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """``output``: N*, in tokens; None where ``side`` says that there is none."""

    output: float | None
    ci95: tuple[float, float] | None
    side: str


def line(requests: Sequence[Request], staged: str, uniform: str) -> Line:
    """From the blocks in which both took part twice and every time is there."""
    a: list[float] = []
    step: list[float] = []
    for block in blocks_of(requests):
        sides = [block.get((label, False), []) for label in (staged, uniform)]
        if any(len(side) < 2 for side in sides):
            continue
        first = [_mean([_before_decode(r) for r in side]) for side in sides]
        steps = [_mean([r.tpot_ms for r in side]) for side in sides]
        if None not in first and None not in steps:
            a.append(first[0] - first[1])  # type: ignore[operator]
            step.append(steps[0] - steps[1])  # type: ignore[operator]
    longest = max((max(r.output_tokens, default=0) for r in requests), default=0)
    return Line(staged=staged, uniform=uniform, a=a, step=step, longest=longest)


def _before_decode(r: Request) -> float | None:
    return None if r.ttft_ms is None else r.ttft_ms + (r.handoff_ms or 0.0)


def _mean(values: Sequence[float | None]) -> float | None:
    there = [v for v in values if v is not None and math.isfinite(v)]
    return statistics.fmean(there) if len(there) == len(values) else None
