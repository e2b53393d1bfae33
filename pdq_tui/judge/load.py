"""From requests under load to points of a curve, its knee, and whether more load would tell anything.

Nothing here runs: loads are made by the engine, step by step, while ``more`` says that the next one is worth it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from pdq_tui.core.protocol import Served, ServeEnded
from pdq_tui.core.stats import quantiles, t_quantile

#: MLPerf Inference's limits for 8-B models: (TTFT, TPOT) in ms, offline-like and interactive.
TARGETS: Final = {"server": (2000.0, 100.0), "interactive": (500.0, 30.0)}
#: Share of requests that have to meet both targets (DistServe, OSDI 2024).
MEET: Final = 0.9
#: A doubled concurrency that brings less throughput than this share more is past saturation.
_LEAST_GAIN: Final = 0.05


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one arm. concurrency: asked for (closed loop), or None; rate: asked for in requests/s (open loop), or None.

    achieved       mean requests in flight: the sum of their times / the whole time (Little).
    requests       that count, without the first round; ``failed`` of them gave no answer.
    throughput     finished requests a second; tokens_per_s: their new tokens.
    ttft_ms, tpot_ms, queue_ms   p50, p90, p99 where there are enough, max.
    good           share that met both targets; a failed request met none.
    growth_ms_s    slope of TTFT over arrival time, with its 95 % interval: above 0 the queue grows.
    """

    arm: str
    concurrency: int | None
    rate: float | None
    achieved: float | None
    requests: int
    failed: int
    throughput: float | None
    tokens_per_s: float | None
    ttft_ms: dict[str, Any]
    tpot_ms: dict[str, Any]
    queue_ms: dict[str, Any]
    good: float | None
    growth_ms_s: float | None
    growth_ci95: tuple[float, float] | None
    tokens: dict[str, int]
    mixed_steps: int
    steps: int
    readmitted: int
    kv_tokens: int
    flagged: str | None = None


def point(
    served: Sequence[Served],
    ended: ServeEnded,
    *,
    concurrency: int | None,
    rate: float | None,
    ttft_target: float,
    tpot_target: float,
) -> Point:
    counted = [s for s in served if not s.warmup]
    whole = [s for s in counted if s.error is None and s.e2e_ms is not None]
    # From the first arrival that counts to the last token: the first round is neither counted nor timed.
    begin = min((s.arrival_s for s in whole), default=0.0)
    end = max((s.arrival_s + (s.e2e_ms or 0.0) / 1e3 for s in whole), default=0.0)
    seconds = end - begin
    missed = len(counted) - len(whole) + ended.cancelled
    meets = sum(
        s.ttft_ms is not None and s.ttft_ms <= ttft_target and (s.tpot_ms is None or s.tpot_ms <= tpot_target)
        for s in whole
    )
    slope = trend([(s.arrival_s, s.ttft_ms) for s in whole if s.ttft_ms is not None])
    return Point(
        arm=ended.arm,
        concurrency=concurrency,
        rate=rate,
        achieved=ended.busy_s / ended.seconds if ended.seconds > 0 else None,
        requests=len(counted),
        failed=missed,
        throughput=len(whole) / seconds if seconds > 0 else None,
        tokens_per_s=sum(s.output_tokens for s in whole) / seconds if seconds > 0 else None,
        ttft_ms=_spread([s.ttft_ms for s in whole]),
        tpot_ms=_spread([s.tpot_ms for s in whole]),
        queue_ms=_spread([s.queue_ms for s in whole]),
        good=meets / (len(whole) + missed) if whole or missed else None,
        growth_ms_s=None if slope is None else slope[0],
        growth_ci95=None if slope is None else (slope[1], slope[2]),
        tokens=dict(ended.tokens),
        mixed_steps=ended.mixed,
        steps=ended.steps,
        readmitted=ended.readmitted,
        kv_tokens=ended.kv_tokens,
        flagged=_flag(ended),
    )


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Requests are the independent units."""
    q = quantiles([[v] for v in values if v is not None], "ms")
    found: dict[str, Any] = {"p50": q.p50, "p90": q.p90, "p99": q.p99, "max": q.max, "n": q.n}
    if q.p99_reason:
        found["p99_reason"] = q.p99_reason
    if q.reason:
        found["reason"] = q.reason
    return found


def _flag(ended: ServeEnded) -> str | None:
    wrong = {k: n for k, n in ended.tokens.items() if len(set(k.split("/"))) > 1}
    if not wrong:
        return None
    return ", ".join(
        f"{n} {k.split('/')[0]} tokens ran under the {k.split('/')[1]} view" for k, n in wrong.items()
    )


def trend(values: Sequence[tuple[float, float]], alpha: float = 0.05) -> tuple[float, float, float] | None:
    """Least squares of y over x: the slope and its interval by Student's t; None below three values or without spread."""
    n = len(values)
    if n < 3:
        return None
    mx, my = statistics.fmean(x for x, _ in values), statistics.fmean(y for _, y in values)
    sxx = math.fsum((x - mx) ** 2 for x, _ in values)
    if sxx <= 0:
        return None
    slope = math.fsum((x - mx) * (y - my) for x, y in values) / sxx
    rest = math.fsum((y - my - slope * (x - mx)) ** 2 for x, y in values)
    half = t_quantile(1 - alpha / 2, n - 2) * math.sqrt(rest / (n - 2) / sxx)
    return slope, slope - half, slope + half


# -- curves ------------------------------------------------------------------------------------------------------------


def saturated(points: Sequence[Point]) -> str | None:
    """Why a larger concurrency would tell nothing more; None where it may. ``points`` of one arm, closed loop, rising."""
    there = [(p.concurrency, p.throughput) for p in points if p.concurrency and p.throughput]
    if len(there) < 3:
        return None
    (c0, x0), (c1, x1), (c2, x2) = there[-3:]
    # Slopes in logarithms, of the last two rises: one alone may be noise.
    slopes = [math.log(b / a) / math.log(d / c) for a, b, c, d in ((x0, x1, c0, c1), (x1, x2, c1, c2))]
    least = math.log(1 + _LEAST_GAIN) / math.log(2)
    if all(s < least for s in slopes):
        return f"throughput grew by less than {_LEAST_GAIN:.0%} a doubling from concurrency {c0} to {c2}"
    return None


def overloaded(p: Point) -> bool:
    """Open loop: the queue grows while requests arrive, by more than half of the median wait over its length."""
    if p.growth_ci95 is None or p.growth_ms_s is None or not p.throughput or p.ttft_ms.get("p50") is None:
        return False
    length_s = p.requests / p.throughput
    return p.growth_ci95[0] > 0 and p.growth_ms_s * length_s > 0.5 * float(p.ttft_ms["p50"])


class Knee(msgspec.Struct, frozen=True, kw_only=True):
    """concurrency: the largest at which ``MEET`` of the requests meet both targets, and at all below it; None: none does.

    reached      False where the largest concurrency that was tried still meets them: the knee lies above.
    kneedle      where the throughput curve bends most (Satopää et al., ICDCSW 2011): a second opinion; None without a bend.
    goodput      requests a second: the highest arrival rate that met them; the throughput at the knee where no rate was tried.
    """

    arm: str
    concurrency: int | None
    reached: bool
    kneedle: int | None
    goodput: float | None
    goodput_method: str
    stopped: str | None = None


def knee(arm: str, points: Sequence[Point]) -> Knee:
    closed = sorted((p for p in points if p.concurrency is not None), key=lambda p: p.concurrency or 0)
    best: Point | None = None
    for p in closed:
        if p.good is None or p.good < MEET:
            break
        best = p
    tried = [p for p in points if p.rate is not None]
    rates = [p for p in tried if p.good is not None and p.good >= MEET and not overloaded(p)]
    top = max(rates, key=lambda p: p.rate or 0.0, default=None)
    goodput, method = (None, "no load met both targets")
    if top is not None:
        goodput, method = top.rate, "highest arrival rate that met both targets"
    elif tried:
        lowest = min(p.rate or 0.0 for p in tried)
        method = f"no arrival rate that was tried met both targets; the lowest was {lowest:.2f} requests/s"
    elif best is not None:
        goodput, method = (
            best.throughput,
            "throughput of the closed loop at the knee; no arrival rate was tried",
        )
    return Knee(
        arm=arm,
        concurrency=best.concurrency if best else None,
        reached=best is None or best is not closed[-1],
        kneedle=kneedle(
            [(float(p.concurrency or 0), p.throughput) for p in closed if p.throughput is not None]
        ),
        goodput=goodput,
        goodput_method=method,
        stopped=saturated(closed),
    )


def kneedle(curve: Sequence[tuple[float, float]]) -> int | None:
    """The x of the largest distance between a rising, flattening curve and its chord, both scaled to 1; None below three
    points, or where it lies nowhere above the chord by more than a twentieth."""
    if len(curve) < 3:
        return None
    (x0, y0), (x1, y1) = curve[0], (curve[-1][0], max(y for _, y in curve))
    if x1 <= x0 or y1 <= y0:
        return None
    bends = [((y - y0) / (y1 - y0) - (x - x0) / (x1 - x0), x) for x, y in curve]
    bend, at = max(bends)
    return int(at) if bend > 0.05 else None


def kv_tokens(weights: int, largest: int, bytes_per_token: int, tokens: int) -> int:
    """Equal total memory: the largest arm's weights and ``tokens`` of KV; what an arm's weights leave of it is its own."""
    return (largest + tokens * bytes_per_token - weights) // bytes_per_token
