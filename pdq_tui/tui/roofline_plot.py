"""A roofline as rows of (text, role): log–log, one slope of the memory, one ceiling a dtype, letters for the points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdq_tui.core.roofline import Roof, RoofPoint
from pdq_tui.tui.lines import Part, Row
from pdq_tui.tui.plot_canvas import Canvas
from pdq_tui.tui.plot_scale import number

#: Columns on either side of the drawing that the axis and the ceilings' names take.
_GUTTER, _RIGHT = 8, 7


@dataclass(frozen=True)
class RoofPicture:
    """``points``: (what stands for it, role, point); ``selected``: the name of the point that is chosen."""

    roof: Roof
    points: tuple[tuple[str, str, RoofPoint], ...] = ()
    selected: str | None = None
    empty: str = "no stage was measured yet"


@dataclass(frozen=True)
class _Span:
    low: float
    high: float

    def place(self, value: float, dots: int) -> int:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return min(dots - 1, max(0, math.floor(share * dots)))

    def value(self, dot: int, dots: int) -> float:
        return float(10 ** (self.low + (dot + 0.5) / dots * (self.high - self.low)))


def spans(picture: RoofPicture) -> tuple[_Span, _Span] | None:
    """Decades of FLOP per byte and of TFLOP/s that hold every point and every ridge; None without peaks and points."""
    roof = picture.roof
    points = [p for _, _, p in picture.points]
    ridges = [r for d in roof.compute_tflops if (r := roof.ridge(d)) is not None]
    across = [p.intensity for p in points] + ridges
    up = [p.tflops for p in points] + [t for t in roof.compute_tflops.values() if t > 0]
    if not across or not up:
        return None
    low_x, high_x = math.floor(math.log10(min(across)) - 0.2), math.ceil(math.log10(max(across)) + 0.2)
    if roof.read_gbps:
        up.append(roof.read_gbps / 1e3 * 10**low_x * 2)
    return _Span(low_x, high_x), _Span(math.floor(math.log10(min(up)) * 2) / 2, math.log10(max(up)) + 0.25)


def draw_roof(picture: RoofPicture, width: int, height: int, marker: str = "braille") -> list[Row]:
    """``height`` rows of exactly ``width`` cells. Any size, any data."""
    if width <= 0 or height <= 0:
        return []
    found = spans(picture)
    plot, rows = width - _GUTTER - _RIGHT, height - 2
    if found is None or plot < 8 or rows < 3:
        text = picture.empty if found is None else "too small to draw: z"
        middle = height // 2
        return [
            ((text[:width].center(width) if y == middle else " " * width, "axis"),) for y in range(height)
        ]
    x_span, y_span = found
    canvas = Canvas(plot, rows, marker)
    _roofs(canvas, picture.roof, x_span, y_span)
    over: dict[tuple[int, int], Part] = {}
    _points(over, picture, plot, rows, x_span, y_span)
    plain = marker == "ascii"
    named = _ceilings(picture.roof, rows, y_span)
    marks = {rows - 1 - y_span.place(10.0**n, rows): 10.0**n for n in _decades(y_span)}
    drawn = [_row(canvas, over, y, marks.get(y), named.get(y, ""), plain) for y in range(rows)]
    return drawn + _axis(x_span, plot, plain)


def _decades(span: _Span) -> range:
    return range(math.ceil(span.low - 1e-9), math.floor(span.high + 1e-9) + 1)


def _roofs(canvas: Canvas, roof: Roof, x_span: _Span, y_span: _Span) -> None:
    across, up = canvas.dots
    peaks = sorted(t for t in roof.compute_tflops.values() if t > 0)
    slope = roof.read_gbps / 1e3 if roof.read_gbps else None
    before: int | None = None
    for x in range(across):
        intensity = x_span.value(x, across)
        if slope is not None:
            level = slope * intensity
            if peaks and level > peaks[-1]:
                before = None
            else:
                y = y_span.place(level, up) if level >= 10**y_span.low else None
                if y is not None:
                    for between in range(min(y, before if before is not None else y), y + 1):
                        canvas.put(x, between, "ref")
                before = y
        for peak in peaks:
            if (slope is None or slope * intensity >= peak) and x % 2 == 0:
                canvas.put(x, y_span.place(peak, up), "ref")


def _points(
    over: dict[tuple[int, int], Part],
    picture: RoofPicture,
    plot: int,
    rows: int,
    x_span: _Span,
    y_span: _Span,
) -> None:
    # The chosen one last: where two lie on each other it is the one that is seen.
    for sign, role, point in sorted(picture.points, key=lambda p: p[2].name == picture.selected):
        text = f"[{sign}]" if point.name == picture.selected else sign
        row = rows - 1 - y_span.place(point.tflops, rows)
        left = x_span.place(point.intensity, plot) - len(text) // 2
        left = min(max(0, left), plot - len(text))
        for offset, char in enumerate(text):
            over[left + offset, row] = (char, role)


def _ceilings(roof: Roof, rows: int, y_span: _Span) -> dict[int, str]:
    found: dict[int, str] = {}
    for dtype, peak in sorted(roof.compute_tflops.items(), key=lambda item: -item[1]):
        if peak <= 0:
            continue
        at = rows - 1 - y_span.place(peak, rows)
        near = [y for y in (at, at + 1, at - 1, at + 2, at + 3) if 0 <= y < rows and y not in found]
        if near:
            found[near[0]] = dtype
    return found


def _row(
    canvas: Canvas, over: dict[tuple[int, int], Part], y: int, mark: float | None, name: str, plain: bool
) -> Row:
    tick = number(mark) if mark is not None else ""
    edge = ("|" if plain else "┤") if tick else ("|" if plain else "│")
    parts: list[Part] = [(f"{tick:>{_GUTTER - 2}} {edge}", "axis")]
    for x in range(canvas.width):
        cell = canvas.cells.get((x, y))
        part = over.get((x, y)) or (
            (("." if plain else canvas.glyph(*cell)), cell[1]) if cell is not None else (" ", "")
        )
        if parts[-1][1] == part[1]:
            parts[-1] = (parts[-1][0] + part[0], part[1])
        else:
            parts.append(part)
    parts.append((f" {name}".ljust(_RIGHT)[:_RIGHT], "ref"))
    return tuple(parts)


def _axis(span: _Span, plot: int, plain: bool) -> list[Row]:
    line = list(("-" if plain else "─") * plot)
    words = [" "] * (plot + _RIGHT)
    for n in _decades(span):
        x, text = span.place(10.0**n, plot), number(10.0**n)
        if x + len(text) <= plot - 10:
            line[x] = "+" if plain else "┬"
            words[x : x + len(text)] = text
    unit = "FLOP/byte"
    words[plot - len(unit) : plot] = unit
    corner = "+" if plain else "└"
    return [
        ((" " * (_GUTTER - 1) + corner + "".join(line) + " " * _RIGHT, "axis"),),
        ((" " * _GUTTER + "".join(words), "axis"),),
    ]


def signs(points: Sequence[RoofPoint]) -> list[str]:
    """What stands for each point: the arm's letter, or the snapshot's number, and P or D."""
    return [f"{p.label}{p.stage[:1].upper()}" for p in points]
