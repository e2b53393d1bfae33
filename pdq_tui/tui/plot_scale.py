"""The y axis of a chart: its range, round values on it, the row of a value."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdq_tui.tui.plot_picture import Level, Picture, finite


def number(value: float) -> str:
    """At most five characters for any size: 12, 11.5, 0.35, 4k, 1.5M, 1e18."""
    size = abs(value)
    if size >= 1e15 or (0 < size < 1e-3):
        return f"{value:.0e}".replace("e+", "e").replace("e-0", "e-")
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= factor:
            unit = 1e3 if letter == "k" else factor
            return f"{value / unit:.4g}"[:5].rstrip(".") + letter
    return f"{value:.4g}"


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round values between ``low`` and ``high``, at most ``most`` of them, at least one."""
    span = high - low
    if span <= 0 or most < 1:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most)) / 10
    for step in (m * power * scale for scale in (1, 10, 100, 1000) for m in (1, 2, 2.5, 5)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            break
    return [n * step for n in range(first, last + 1)] or [low]


def range_of(picture: Picture, values: Sequence[float]) -> tuple[float, float, list[Level]]:
    """y from, y to, and the references that can be shown without flattening the curves."""
    low, high = min(values), max(values)
    for band in picture.bands:
        high = max(high, band.value)
    reach = high * 2.5 if high > 0 else high
    levels = [
        lv for lv in picture.levels if finite(lv.value) is not None and min(0.0, low) <= lv.value <= reach
    ]
    for level in levels:
        low, high = min(low, level.value), max(high, level.value)
    if picture.zero or picture.bands:
        low = min(low, 0.0)
    pad = (high - low) * 0.08
    if pad <= abs(high) * 1e-6:
        pad = abs(high) * 0.1 or 1.0
    return (low if low == 0.0 and (picture.zero or picture.bands) else low - pad), high + pad, levels


def row_of(value: float, low: float, high: float, rows: int) -> int:
    """Row from the top that holds ``value``."""
    share = (value - low) / (high - low)
    return min(rows - 1, max(0, rows - 1 - math.floor(share * rows)))
