"""The chart: what it draws, and that no data and no size can break it."""

from __future__ import annotations

import itertools
import math

import pytest
from fake_views import wave
from rich.cells import cell_len
from textual.app import App, ComposeResult

from pdq_tui.tui import theme
from pdq_tui.tui.chart import Chart
from pdq_tui.tui.plot import draw, spark
from pdq_tui.tui.plot_canvas import MARKERS
from pdq_tui.tui.plot_picture import Band, Curve, Level, Picture
from pdq_tui.tui.plot_scale import number, ticks

NOW = 761.0
A = Curve("A", wave(12.0, 0.4), "a")
B = Curve("B", wave(19.0, 0.6), "b", dashed=True)


def texts(picture: Picture, width: int = 60, height: int = 11, marker: str = "braille") -> list[str]:
    return ["".join(text for text, _ in row) for row in draw(picture, width, height, marker)]


def points(*values: float | None, step: float = 1.0) -> tuple[tuple[float, float | None], ...]:
    start = NOW - step * (len(values) - 1)
    return tuple((start + i * step, v) for i, v in enumerate(values))


SERIES = {
    "empty": (),
    "one point": points(5.0),
    "all zero": points(*[0.0] * 40),
    "all None": points(*[None] * 40),
    "NaN": points(1.0, math.nan, 2.0, math.inf, -math.inf, 3.0),
    "1e18": points(1e18, 1e18, 2e18),
    "huge": points(1e308, -1e308, 1.0),
    "tiny": points(1e-12, 2e-12),
    "negative": points(-5.0, -4.0, -6.0),
    "same time": ((NOW, 1.0), (NOW, 2.0), (NOW, 3.0)),
    "future": ((NOW + 100, 1.0), (NOW + 200, 2.0)),
    "long ago": ((1.0, 1.0), (2.0, 2.0)),
}


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("marker", MARKERS)
def test_S07_any_series_at_any_size_fills_its_rows(name: str, marker: str) -> None:
    for window in (30.0, None):
        picture = Picture((Curve("A", SERIES[name]),), (Level("cap", 700.0),), now=NOW, window_s=window)
        for width, height in itertools.product((0, 1, 2, 7, 16, 20, 79, 300), (0, 1, 2, 3, 8, 9, 40)):
            rows = texts(picture, width, height, marker)
            assert len(rows) == (height if width else 0)
            assert all(cell_len(row) == width for row in rows)


@pytest.mark.parametrize("name", SERIES)
def test_S07_sparkline_of_any_series(name: str) -> None:
    for width in (0, 1, 5, 100):
        for plain in (False, True):
            assert len(spark(SERIES[name], width, plain=plain)) == width


def test_chart_labels_both_arms_at_their_line_ends() -> None:
    rows = texts(Picture((A, B), now=NOW))
    ends = {row.rstrip()[-1]: y for y, row in enumerate(rows) if row.rstrip()[-1:] in ("A", "B")}
    assert ends["B"] < ends["A"], "B is the larger value and stands above"


def test_chart_a_is_solid_and_b_has_every_second_dot() -> None:
    def dots(curve: Curve) -> int:
        rows = texts(Picture((curve,), now=NOW))
        return sum((ord(c) - 0x2800).bit_count() for row in rows for c in row if "⠀" < c <= "⣿")

    share = dots(Curve("B", A.points, "b", dashed=True)) / dots(A)
    assert 0.3 < share < 0.6


def test_chart_gap_stays_a_gap() -> None:
    values = [5.0] * 50 + [None] * 20 + [5.0] * 50
    rows = texts(Picture((Curve("A", points(*values)),), now=NOW), 60, 6)
    line = next(row for row in rows if row.rstrip().endswith("A"))
    drawn = line[line.index("┤") + 1 : -2] if "┤" in line else line[line.index("│") + 1 : -2]
    middle = drawn[len(drawn) // 2 - 3 : len(drawn) // 2 + 3]
    assert middle.strip() == ""
    assert drawn.strip()


def test_chart_pause_without_points_is_a_gap_as_well() -> None:
    old = tuple((NOW - 110 + i * 0.5, 5.0) for i in range(40))
    new = tuple((NOW - 20 + i * 0.5, 5.0) for i in range(40))
    rows = texts(Picture((Curve("A", old + new),), now=NOW), 60, 6)
    line = next(row for row in rows if row.rstrip().endswith("A"))
    assert line[25:45].strip() == ""


def test_chart_reference_line_is_named_and_left_out_when_it_would_flatten_the_curve() -> None:
    near = texts(Picture((A,), (Level("cap", 20.0),), now=NOW, zero=True))
    assert any("┈" in row and row.rstrip().endswith("cap") for row in near)
    far = texts(Picture((A,), (Level("cap", 4000.0),), now=NOW, zero=True))
    assert not any("cap" in row for row in far)


def test_chart_window_cuts_what_is_older() -> None:
    curve = Curve("A", ((NOW - 100, 1000.0), *points(*[5.0] * 20)))
    assert not any("1000" in row or "1k" in row for row in texts(Picture((curve,), now=NOW, window_s=30.0)))
    assert any("-20s" in row for row in texts(Picture((curve,), now=NOW, window_s=30.0)))


def test_chart_moves_only_by_whole_dots() -> None:
    """Half a dot later nothing is drawn anew, so nothing is sent to the terminal."""
    bin_s = 120 / (2 * 52)
    now = math.ceil(NOW / bin_s) * bin_s - bin_s * 0.9
    curve = Curve("A", wave(12.0, 0.4, end=now))
    assert texts(Picture((curve,), now=now)) == texts(Picture((curve,), now=now + bin_s * 0.5))


def test_chart_ascii_marker_uses_ascii_only() -> None:
    picture = Picture(
        (A, B), (Level("cap", 20.0),), (Band("w", 5.0, "▓", "#"),), now=NOW, marks=((NOW - 9, "s"),)
    )
    assert all(row.isascii() for row in texts(picture, marker="ascii"))


def test_chart_marks_stand_on_the_time_axis() -> None:
    rows = texts(Picture((A,), now=NOW, marks=((NOW - 60, "s"),)))
    assert "s" in rows[-2]


@pytest.mark.parametrize(
    ("low", "high", "most"), [(0, 1, 1), (0, 100, 5), (3, 3, 4), (-5, 5, 3), (1e18, 2e18, 6), (0, 1e-9, 3)]
)
def test_chart_ticks_are_few_round_and_inside(low: float, high: float, most: int) -> None:
    found = ticks(low, high, most)
    assert 1 <= len(found) <= most
    assert all(low - abs(low) * 1e-6 <= t <= high + abs(high) * 1e-6 for t in found)


def test_chart_numbers_stay_short() -> None:
    for value in (0, 1, 12.345, -3.5, 999.4, 1234, 12345, 1.5e6, 4.2e9, 1e18, -1e18, 1e-9, 0.001):
        assert len(number(value)) <= 6, number(value)


class OneChart(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.register_theme(theme.THEMES[0])

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return theme.series_defaults(self.current_theme)

    def compose(self) -> ComposeResult:
        yield Chart(id="chart")


async def test_chart_widget_draws_lines_with_explicit_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = OneChart()
    async with app.run_test(size=(60, 12)) as pilot:
        chart = app.query_one(Chart)
        chart.show(Picture((A, B), now=NOW), "TPOT [/ ms]", "last 120 s")
        await pilot.pause()
        strips = [chart.render_line(y) for y in range(12)]
        assert any("⠉" in strip.text or "⠒" in strip.text for strip in strips)
        assert all(segment.style is not None for strip in strips for segment in strip)
        assert all(strip.cell_length == 60 for strip in strips)
        assert chart._border_title is not None
        assert chart._border_title.plain == "TPOT [/ ms]"
        assert chart.render_line(99).text.strip() == ""


async def test_chart_widget_refreshes_only_rows_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    app = OneChart()
    async with app.run_test(size=(60, 12)) as pilot:
        chart = app.query_one(Chart)
        picture = Picture((A, B), now=NOW)
        chart.show(picture, "t")
        await pilot.pause()
        asked: list[int] = []
        monkeypatch.setattr(chart, "refresh", lambda *regions, **_: asked.append(len(regions)))
        chart.show(picture, "t")
        assert asked == []
        flat = Curve("A", points(*[12.0] * 120), "a")
        chart.show(Picture((flat, B), now=NOW), "t")
        assert asked
        assert 0 < asked[0] < 12
