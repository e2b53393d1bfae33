"""What hours of running change: slopes with intervals, and answers that should have stayed the same.

A slope is called drift only where its interval excludes 0 and the change over the run is above 1 % of the level.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from pdq_tui.core.protocol import Canary, Request, SensorSample
from pdq_tui.core.stats import ALPHA, autocorrelation, t_quantile
from pdq_tui.errors import UsageError
from pdq_tui.judge.load import trend

#: From here on a soak is what the word means.
HOURS_LONG_S: Final = 2 * 3600.0
#: A change over the whole run that is smaller matters to nobody.
LEAST: Final = 0.01
#: Mean KLD against minute 0 on the same forced tokens, in nats: far below any format's, far above rounding.
KLD_LIMIT: Final = 1e-3
#: The first part of a run warms up: caches, clocks, the allocator.
_WARM_SHARE: Final = 0.1
#: A series is taken in so many means, as far as it has values for them.
_BINS: Final = 30
_LONG_BINS: Final = 12
_LEAST_BINS: Final = 6
_R_MOST: Final = 0.9
_UNITS: Final = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """One series over the run. level: its mean; change: slope × length / level, with its 95 % interval.

    drifts  the interval excludes 0 and |change| > ``LEAST``; ``worse``: in the direction that hurts.
    """

    name: str
    unit: str
    n: int
    level: float | None
    slope_per_hour: float | None
    change: float | None
    change_ci95: tuple[float, float] | None
    drifts: bool
    worse: bool
    reason: str | None = None


def duration_s(text: str) -> float:
    """ "20s", "10min", "4h" in seconds. Raises UsageError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|m|h)\s*", text)
    seconds = float(found.group(1)) * _UNITS[found.group(2)] if found else 0.0
    if not 1 <= seconds <= 30 * 24 * 3600:
        raise UsageError(f"--soak: {text!r} is no duration", "like 20s, 10min or 4h; 1 s to 30 days")
    return seconds


def words(seconds: float) -> str:
    """ "4 h", "10 min", "20 s"."""
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{seconds:.0f} s"


def drift(
    name: str, unit: str, series: Sequence[tuple[float, float]], *, hurts: int = 0, reason: str | None = None
) -> Drift:
    """series: (seconds since the start, value). hurts: +1 where rising is worse, −1 where falling is, 0 where neither."""
    series = sorted((t, v) for t, v in series if math.isfinite(v))
    bins = _means(series, _BINS)
    slope = trend(bins)
    level = statistics.fmean(v for _, v in bins) if bins else None
    if slope is None or len(bins) < _LEAST_BINS or level is None or level == 0:
        why = reason or f"{len(series)} values: a slope needs {_LEAST_BINS} parts of the run"
        return Drift(
            name=name, unit=unit, n=len(series), level=level, slope_per_hour=None, change=None, change_ci95=None,
            drifts=False, worse=False, reason=why,
        )  # fmt: skip
    middle = slope[0]
    half = _half(series)
    length = bins[-1][0] - bins[0][0]
    change, spread = middle * length / abs(level), half * length / abs(level)
    interval = (change - spread, change + spread)
    drifts = (interval[0] > 0 or interval[1] < 0) and abs(change) > LEAST
    return Drift(
        name=name,
        unit=unit,
        n=len(series),
        level=level,
        slope_per_hour=middle * 3600,
        change=change,
        change_ci95=interval,
        drifts=drifts,
        worse=drifts and change * hurts > 0,
    )


def _half(series: Sequence[tuple[float, float]]) -> float:
    """Half the 95 % interval of the slope. Long parts of the run show what lasts longer than a short one."""
    return max(_half_of(_means(series, count)) for count in (_BINS, _LONG_BINS))


def _half_of(bins: Sequence[tuple[float, float]]) -> float:
    """Where values hang together (another program for a minute) fewer of them are independent than there are, for the spread
    and for Student's degrees of freedom. What a slope leaves shows too little of it, by about (2 + 4r) / n
    (F. H. C. Marriott, J. A. Pope, Biometrika 41, 1954)."""
    slope = trend(bins)
    if slope is None:
        return 0.0
    n = len(bins)
    r = autocorrelation([v - slope[0] * t for t, v in bins])
    r = min(max(r + (2 + 4 * r) / n, 0.0), _R_MOST)
    independent = n * (1 - r) / (1 + r)
    t = t_quantile(1 - ALPHA / 2, max(1.0, independent - 2)) / t_quantile(1 - ALPHA / 2, n - 2)
    return (slope[2] - slope[1]) / 2 * t * math.sqrt((1 + r) / (1 - r))


def _means(series: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Means of ``most`` equal parts of the time after the warm-up, of fewer where there are few values."""
    if not series:
        return []
    first, last = series[0][0], series[-1][0]
    begin = first + (last - first) * _WARM_SHARE
    kept = [(t, v) for t, v in series if t >= begin]
    count = min(most, max(_LEAST_BINS, len(kept) // 3))
    if len(kept) < count or last <= begin:
        return list(kept)
    bins: list[list[tuple[float, float]]] = [[] for _ in range(count)]
    for t, v in kept:
        bins[min(count - 1, int((t - begin) / (last - begin) * count))].append((t, v))
    return [(statistics.fmean(t for t, _ in b), statistics.fmean(v for _, v in b)) for b in bins if b]


def analyse(
    requests: Sequence[Request], canaries: Sequence[Canary], sensors: Sequence[SensorSample], begin_ns: int
) -> dict[str, Any]:
    """The soak's body: drifts, canaries, clocks and temperature by thirds."""

    def at(ns: int) -> float:
        return (ns - begin_ns) / 1e9

    good = [r for r in requests if r.valid and not r.cancelled and not r.warmup]

    def of(name: str) -> list[tuple[float, float]]:
        return [(at(r.host_start_ns), float(v)) for r in good if (v := getattr(r, name)) is not None]

    energy = [
        (at(s.t_ns), float(g.energy_j))
        for s in sensors
        for g in s.gpus
        if g.engine and g.energy_j is not None
    ]
    no_energy = next(
        (
            g.missing.get("energy_j")
            for s in sensors
            for g in s.gpus
            if g.engine and g.missing.get("energy_j")
        ),
        "no energy counter here",
    )
    drifts = [
        drift("TPOT", "ms", of("tpot_ms"), hurts=1),
        drift("TTFT", "ms", of("ttft_ms"), hurts=1),
        drift("memory", "B", of("steady_bytes"), hurts=1, reason="this device tells no allocated memory"),
        drift("power by the energy counter", "W", _rates(energy), hurts=1, reason=no_energy),
    ]
    seconds = max((at(r.host_end_ns) for r in requests), default=0.0)
    return {
        "requests": len(good),
        "failed": sum(not r.valid for r in requests),
        "measured_s": seconds,
        "drifts": [msgspec.to_builtins(d) for d in drifts],
        "canaries": _canaries(canaries),
        "conditions": {
            "clock_mhz": _thirds(
                [(s.t_ns, v) for s in sensors if (v := _engine_gpu(s, "sm_mhz") or s.cpu.mhz) is not None]
            ),
            "temperature_c": _thirds(
                [
                    (s.t_ns, v)
                    for s in sensors
                    if (v := _engine_gpu(s, "temperature_c") or s.cpu.temperature_c) is not None
                ]
            ),
        },
    }


def _engine_gpu(s: SensorSample, field: str) -> float | None:
    return next((getattr(g, field) for g in s.gpus if g.engine), None)


def _rates(counter: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Differences of a counter over at least 5 s each."""
    found, last = [], None
    for t, v in counter:
        if last is None:
            last = (t, v)
        elif t - last[0] >= 5.0:
            found.append(((t + last[0]) / 2, (v - last[1]) / (t - last[0])))
            last = (t, v)
    return found


def _thirds(series: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """First against last third."""
    if len(series) < 3:
        return {"first": None, "last": None, "reason": "not told here"}
    third = len(series) // 3
    return {
        "first": statistics.fmean(v for _, v in series[:third]),
        "last": statistics.fmean(v for _, v in series[-third:]),
    }


def _canaries(canaries: Sequence[Canary]) -> dict[str, Any]:
    klds = [c.kld for c in canaries if c.kld is not None]
    highest = [c.highest for c in canaries if c.highest is not None]
    return {
        "n": len(canaries),
        "changed": sum(not c.same for c in canaries),
        "nonfinite": sum(c.nonfinite for c in canaries),
        "kld_max": max(klds, default=None),
        "highest": [min(highest), max(highest)] if highest else None,
        "rows": [
            {
                "at_s": c.at_s,
                "tokens_sha256": c.tokens_sha256,
                "kld": c.kld,
                "nonfinite": c.nonfinite,
                "highest": c.highest,
            }
            for c in canaries
        ],
    }


def troubles(body: dict[str, Any]) -> list[str]:
    """What a gate must not let pass, in sentences."""
    found = [
        f"{d['name']} changed by {d['change']:+.1%} [{d['change_ci95'][0]:+.1%}, {d['change_ci95'][1]:+.1%}]"
        for d in body["drifts"]
        if d["worse"]
    ]
    c = body["canaries"]
    if c["nonfinite"]:
        found.append(f"{c['nonfinite']} logits of canaries are not finite")
    if c["kld_max"] is not None and c["kld_max"] > KLD_LIMIT:
        found.append(f"canaries moved by up to {c['kld_max']:.2g} nats from minute 0")
    if body["failed"]:
        found.append(f"{body['failed']} requests failed")
    return found
