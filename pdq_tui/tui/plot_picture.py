"""What a chart is to show: curves, reference levels and bands over a stretch of time, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdq_tui.host.view import Point

_SPANS = (30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
#: Values beyond this are no measurements; arithmetic on them would overflow.
_LARGEST = 1e30


@dataclass(frozen=True)
class Curve:
    """One line. ``role``: a, b or c. ``dashed``: every second dot, so that arms differ without colour."""

    label: str
    points: tuple[Point, ...]
    role: str = "a"
    dashed: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal reference: a peak, a cap."""

    label: str
    value: float


@dataclass(frozen=True)
class Band:
    """A filled band from the one below it up to ``value``."""

    label: str
    value: float
    glyph: str
    ascii_glyph: str


@dataclass(frozen=True)
class Picture:
    """All of a chart. ``now`` on the session's clock; ``window_s`` None shows everything; ``zero``: y starts at 0.

    ``marks``: (time, one letter) on the time axis. ``empty``: said where there is nothing to draw.
    """

    curves: tuple[Curve, ...] = ()
    levels: tuple[Level, ...] = ()
    bands: tuple[Band, ...] = ()
    now: float = 0.0
    window_s: float | None = 120.0
    zero: bool = False
    marks: tuple[tuple[float, str], ...] = ()
    empty: str = "no data yet"
    scale: float = 1.0


def finite(value: float | None) -> float | None:
    """The value, or None where it is no number that can be drawn."""
    if value is None or not math.isfinite(value) or abs(value) > _LARGEST:
        return None
    return value


def span_of(picture: Picture) -> float:
    """Seconds across. For a window of "all" the smallest round span that holds every point."""
    if picture.window_s is not None:
        return max(picture.window_s, 1.0)
    first = min((c.points[0][0] for c in picture.curves if c.points), default=picture.now)
    age = picture.now - first
    return float(next((s for s in _SPANS if s >= age), math.ceil(max(age, 1.0) / 86400) * 86400))


def visible_points(curve: Curve, start: float, scale: float) -> list[Point]:
    """The curve's points from ``start`` on, times ``scale``; None is a gap."""
    found: list[Point] = []
    for t, value in curve.points:
        if t >= start and math.isfinite(t):
            shown = finite(value)
            found.append((t, None if shown is None else finite(shown * scale)))
    return found
