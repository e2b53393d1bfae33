"""Curves as dots in character cells.

Time runs in bins anchored to the session's clock, so that a chart moves by whole dots and only when it has to: rows
that did not change are not sent to the terminal again.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdq_tui.host.view import Point
from pdq_tui.tui.plot_picture import Curve
from pdq_tui.tui.plot_scale import row_of

MARKERS = ("braille", "block", "ascii")
#: Dots a cell: across, down.
_DOTS = {"braille": (2, 4), "block": (1, 2), "ascii": (1, 1)}
_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


@dataclass
class Canvas:
    """``width`` × ``height`` cells; ``marker`` is one of MARKERS. ``cells``: (column, row) → (dots, role)."""

    width: int
    height: int
    marker: str
    cells: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)

    @property
    def dots(self) -> tuple[int, int]:
        across, down = _DOTS[self.marker]
        return self.width * across, self.height * down

    def put(self, x: int, y: int, role: str) -> None:
        """Set the dot at ``x`` from the left, ``y`` from the bottom."""
        across, down = _DOTS[self.marker]
        col, row = x // across, self.height - 1 - y // down
        if not (0 <= col < self.width and 0 <= row < self.height):
            return
        if self.marker == "braille":
            bit = _BRAILLE[x % across][down - 1 - y % down]
        elif self.marker == "block":
            bit = 1 << (y % down)
        else:
            bit = 1
        self.cells[col, row] = (self.cells.get((col, row), (0, ""))[0] | bit, role)

    def glyph(self, bits: int, role: str) -> str:
        if self.marker == "braille":
            return chr(0x2800 + bits)
        if self.marker == "block":
            return {1: "▄", 2: "▀", 3: "█"}[bits]
        return {"a": "*", "b": "o"}.get(role, "+")


def trace(
    canvas: Canvas, curve: Curve, points: list[Point], now: float, span: float, low: float, high: float
) -> int | None:
    """Draw one curve; returns the row of its last value."""
    across, down = canvas.dots
    bin_s = span / across
    end = math.ceil(now / bin_s - 1e-9)
    pause = _pause(points)
    before: tuple[int, int, float] | None = None
    columns: dict[int, tuple[int, int]] = {}
    for t, value in points:
        if value is None:
            before = None
            continue
        x = min(across - 1, math.floor(t / bin_s) - end + across)
        y = min(down - 1, max(0, math.floor((value - low) / (high - low) * down)))
        if before is None or t - before[2] > pause:
            _cover(columns, x, y, y)
        else:
            _join(columns, before[0], before[1], x, y)
        before = (x, y, t)
    _dots(canvas, columns, curve)
    last = next((v for _, v in reversed(points) if v is not None), None)
    return None if last is None else row_of(last, low, high, canvas.height)


def _pause(points: Sequence[Point]) -> float:
    """Seconds without a point that are a gap: several times what is usual between the points of this curve."""
    steps = [b[0] - a[0] for a, b in itertools.pairwise(points)]
    return max(1.5, 4 * statistics.median(steps)) if steps else 0.0


def _cover(columns: dict[int, tuple[int, int]], x: int, low: int, high: int) -> None:
    there = columns.get(x)
    columns[x] = (low, high) if there is None else (min(there[0], low), max(there[1], high))


def _join(columns: dict[int, tuple[int, int]], x0: int, y0: int, x1: int, y1: int) -> None:
    if x0 == x1:
        _cover(columns, x0, min(y0, y1), max(y0, y1))
        return
    before = y0
    for x in range(x0 + 1, x1 + 1):
        here = round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
        if here > before:
            _cover(columns, x, before + 1, here)
        elif here < before:
            _cover(columns, x, here, before - 1)
        else:
            _cover(columns, x, here, here)
        before = here


def _dots(canvas: Canvas, columns: dict[int, tuple[int, int]], curve: Curve) -> None:
    for x, (low, high) in columns.items():
        for y in range(low, high + 1):
            if not curve.dashed or (x % 2 == 0 and (high == low or (y - low) % 2 == 0)):
                canvas.put(x, y, curve.role)
