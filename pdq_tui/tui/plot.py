"""Drawing of a line chart in characters: pure functions from a Picture to rows of (text, role)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pdq_tui.host.view import Point
from pdq_tui.tui.lines import Part, Row
from pdq_tui.tui.plot_canvas import Canvas, trace
from pdq_tui.tui.plot_picture import Level, Picture, finite, span_of, visible_points
from pdq_tui.tui.plot_scale import number, range_of, row_of, ticks

_SPARK = {False: "▁▂▃▄▅▆▇█", True: "_.-:=+*#"}


def draw(picture: Picture, width: int, height: int, marker: str = "braille") -> list[Row]:
    """``height`` rows, each exactly ``width`` cells. Any size, any data."""
    if width <= 0 or height <= 0:
        return []
    plain = marker == "ascii"
    span = span_of(picture)
    visible = [visible_points(c, picture.now - span, picture.scale) for c in picture.curves]
    values = [v for points in visible for _, v in points if v is not None]
    if not values or width < 16 or height < 2:
        return _words(_summary(picture, visible) if values else picture.empty, width, height)
    low, high, levels = range_of(picture, values)
    axis_rows = 2 if height >= 9 else 0
    rows = height - axis_rows
    marks = ticks(low, high, max(2, (rows + 1) // 2)) if rows > 1 else [low]
    named = {row_of(v, low, high, rows): number(v) for v in reversed(marks)}
    gutter = max(map(len, named.values())) + 2
    labels = [c.label for c in picture.curves] + [lv.label for lv in levels]
    right = max(map(len, labels), default=0) + 1
    plot = width - gutter - right
    if plot < 6:
        return _words(_summary(picture, visible), width, height)
    canvas = Canvas(plot, rows, marker)
    ends: list[tuple[int, str, str]] = []
    for curve, points in reversed(list(zip(picture.curves, visible, strict=True))):
        last = trace(canvas, curve, points, picture.now, span, low, high)
        if last is not None:
            ends.append((last, curve.label, curve.role))
    background = _background(picture, levels, low, high, rows, plain)
    ends += [(row_of(lv.value, low, high, rows), lv.label, "ref") for lv in levels]
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
        found[row_of(level.value, low, high, rows)] = ("-" if plain else "┈", "ref")
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
    canvas: Canvas,
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
    """``text`` centred on an otherwise empty field, wrapped between words; each line of it begins a new one."""
    lines: list[str] = []
    for part in text.split("\n"):
        begin = True
        for word in part.split():
            if not begin and len(lines[-1]) + 1 + len(word) <= width - 2:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
            begin = False
    lines = lines[:height]
    top = (height - len(lines)) // 2
    rows: list[Row] = []
    for y in range(height):
        inside = lines[y - top] if 0 <= y - top < len(lines) else ""
        rows.append(((inside[:width].center(width), role),))
    return rows
