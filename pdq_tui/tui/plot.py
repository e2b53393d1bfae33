"""Drawing of a line chart in characters: pure functions from a Picture to rows of (text, role).

Time runs in bins anchored to the session's clock, so that a chart moves by whole dots and only when it has to: rows
that did not change are not sent to the terminal again.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdq_tui.host.view import Point

#: (text, role); roles are Chart.COMPONENT_CLASSES without their prefix, "" for plain.
Part = tuple[str, str]
Row = tuple[Part, ...]

MARKERS = ("braille", "block", "ascii")
#: Dots a cell: across, down.
_DOTS = {"braille": (2, 4), "block": (1, 2), "ascii": (1, 1)}
_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_SPARK = {False: "▁▂▃▄▅▆▇█", True: "_.-:=+*#"}
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


@dataclass
class _Canvas:
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


def draw(picture: Picture, width: int, height: int, marker: str = "braille") -> list[Row]:
    """``height`` rows, each exactly ``width`` cells. Any size, any data."""
    if width <= 0 or height <= 0:
        return []
    plain = marker == "ascii"
    span = span_of(picture)
    visible = [_visible(c, picture.now - span, picture.scale) for c in picture.curves]
    values = [v for points in visible for _, v in points if v is not None]
    if not values or width < 16 or height < 2:
        return _words(_summary(picture, visible) if values else picture.empty, width, height)
    low, high, levels = _range(picture, values)
    axis_rows = 2 if height >= 9 else 0
    rows = height - axis_rows
    marks = ticks(low, high, max(2, (rows + 1) // 2)) if rows > 1 else [low]
    named = {_row_of(v, low, high, rows): number(v) for v in reversed(marks)}
    gutter = max(map(len, named.values())) + 2
    labels = [c.label for c in picture.curves] + [lv.label for lv in levels]
    right = max(map(len, labels), default=0) + 1
    plot = width - gutter - right
    if plot < 6:
        return _words(_summary(picture, visible), width, height)
    canvas = _Canvas(plot, rows, marker)
    ends: list[tuple[int, str, str]] = []
    for curve, points in reversed(list(zip(picture.curves, visible, strict=True))):
        last = _trace(canvas, curve, points, picture.now, span, low, high)
        if last is not None:
            ends.append((last, curve.label, curve.role))
    background = _background(picture, levels, low, high, rows, plain)
    ends += [(_row_of(lv.value, low, high, rows), lv.label, "ref") for lv in levels]
    named_right = _place(ends, rows)
    drawn = [
        _row(canvas, y, named.get(y, ""), gutter, background.get(y), named_right.get(y), right, plain)
        for y in range(rows)
    ]
    if axis_rows:
        drawn += _axis(picture, plot, gutter, right, span, plain)
    return drawn


def spark(points: Iterable[Point], width: int, *, plain: bool = False, scale: float = 1.0) -> str:
    """The last ``width`` values as a row of bars between their least and greatest; spaces for gaps."""
    values = [finite(v) for _, v in points][-width:] if width > 0 else []
    there = [v * scale for v in values if v is not None]
    if not there:
        return " " * max(width, 0)
    low, high = min(there), max(there)
    glyphs = _SPARK[plain]
    steps = len(glyphs) - 1
    flat = high - low <= abs(high) * 1e-9
    bars = [
        " " if v is None else glyphs[steps // 2 if flat else round((v * scale - low) / (high - low) * steps)]
        for v in values
    ]
    return "".join(bars).rjust(width)


# -- parts -------------------------------------------------------------------------------------------------------------


def _visible(curve: Curve, start: float, scale: float) -> list[Point]:
    found: list[Point] = []
    for t, value in curve.points:
        if t >= start and math.isfinite(t):
            shown = finite(value)
            found.append((t, None if shown is None else finite(shown * scale)))
    return found


def _range(picture: Picture, values: Sequence[float]) -> tuple[float, float, list[Level]]:
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


def _row_of(value: float, low: float, high: float, rows: int) -> int:
    """Row from the top that holds ``value``."""
    share = (value - low) / (high - low)
    return min(rows - 1, max(0, rows - 1 - math.floor(share * rows)))


def _trace(
    canvas: _Canvas, curve: Curve, points: list[Point], now: float, span: float, low: float, high: float
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
    return None if last is None else _row_of(last, low, high, canvas.height)


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


def _dots(canvas: _Canvas, columns: dict[int, tuple[int, int]], curve: Curve) -> None:
    for x, (low, high) in columns.items():
        for y in range(low, high + 1):
            if not curve.dashed or (x % 2 == 0 and (high == low or (y - low) % 2 == 0)):
                canvas.put(x, y, curve.role)


def _background(
    picture: Picture, levels: Sequence[Level], low: float, high: float, rows: int, plain: bool
) -> dict[int, Part]:
    found: dict[int, Part] = {}
    ordered = sorted(picture.bands, key=lambda band: band.value)
    for y in range(rows):
        middle = low + (rows - y - 0.5) / rows * (high - low)
        band = next((b for b in ordered if middle <= b.value), None)
        if band is not None:
            found[y] = (band.ascii_glyph if plain else band.glyph, "band")
    for level in levels:
        found[_row_of(level.value, low, high, rows)] = ("-" if plain else "┈", "ref")
    return found


def _place(ends: Sequence[tuple[int, str, str]], rows: int) -> dict[int, Part]:
    """A free row for each label, as near as can be to where its line ends. Curves (last given) choose before levels."""
    taken: dict[int, Part] = {}
    curves_first = sorted(ends, key=lambda end: end[2] == "ref")
    for row, label, role in curves_first:
        free = sorted((y for y in range(rows) if y not in taken), key=lambda y: (abs(y - row), y))
        if free:
            taken[free[0]] = (label, role)
    return taken


def _row(
    canvas: _Canvas,
    y: int,
    tick: str,
    gutter: int,
    behind: Part | None,
    label: Part | None,
    right: int,
    plain: bool,
) -> Row:
    edge = ("|" if plain else "┤") if tick else ("|" if plain else "│")
    parts: list[Part] = [(f"{tick:>{gutter - 2}} {edge}", "axis")]
    for x in range(canvas.width):
        cell = canvas.cells.get((x, y))
        part = (canvas.glyph(*cell), cell[1]) if cell is not None else behind or (" ", "")
        if parts[-1][1] == part[1]:
            parts[-1] = (parts[-1][0] + part[0], part[1])
        else:
            parts.append(part)
    text, role = label or ("", "")
    parts.append((f" {text}".ljust(right)[:right], role))
    return tuple(parts)


def _axis(picture: Picture, plot: int, gutter: int, right: int, span: float, plain: bool) -> list[Row]:
    line = list(("-" if plain else "─") * plot)
    words = [" "] * (plot + right)
    step = next(
        (s for s in (10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800) if span / s <= 4), span
    )
    cell_s = span / plot
    count = math.floor(span / step + 1e-9)
    for n in range(count, 0, -1):
        x = plot - 1 - round(n * step / cell_s)
        text = _ago(n * step)
        if x >= 0 and x + len(text) <= plot - 4:
            line[x] = "+" if plain else "┬"
            words[x : x + len(text)] = text
    words[plot - 3 : plot] = "now"
    for t, letter in picture.marks:
        x = plot - 1 - round((picture.now - t) / cell_s)
        if 0 <= x < plot:
            line[x] = letter[:1]
    corner = "+" if plain else "└"
    return [
        ((" " * (gutter - 1) + corner + "".join(line) + " " * right, "axis"),),
        ((" " * gutter + "".join(words), "axis"),),
    ]


def _ago(seconds: float) -> str:
    if seconds < 300:
        return f"-{seconds:.0f}s"
    return f"-{seconds / 60:.0f}m" if seconds < 7200 else f"-{seconds / 3600:.0f}h"


def _summary(picture: Picture, visible: Sequence[Sequence[Point]]) -> str:
    """The curves' last values in words, where there is no room to draw."""
    pieces = []
    for curve, points in zip(picture.curves, visible, strict=True):
        last = next((v for _, v in reversed(points) if v is not None), None)
        if last is not None:
            pieces.append(f"{curve.label} {number(last)}")
    return " ".join(pieces)


def _words(text: str, width: int, height: int, role: str = "axis") -> list[Row]:
    """``text`` centred on an otherwise empty field, wrapped between words."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width - 2:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    lines = lines[:height]
    top = (height - len(lines)) // 2
    rows: list[Row] = []
    for y in range(height):
        inside = lines[y - top] if 0 <= y - top < len(lines) else ""
        rows.append(((inside[:width].center(width), role),))
    return rows
