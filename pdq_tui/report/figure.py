"""A figure of a report: an Altair chart drawn to SVG here, so that the page needs neither a network nor a script for it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import altair as alt
import vl_convert

#: Okabe and Ito's colours on white: told apart by all common kinds of colour blindness. The reference comes first.
COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
#: Series differ in these as well: colour alone carries nothing.
SHAPES: Final = ("circle", "triangle-up", "square", "diamond", "cross", "triangle-down", "stroke")
DASHES: Final = ((1, 0), (6, 3), (2, 2), (8, 2, 2, 2), (10, 4), (4, 4), (1, 3))
#: Widths in CSS pixels: of a page, and of a phone. Each figure is drawn for both, so that its words stay readable.
WIDE: Final = 680
NARROW: Final = 320

_INK: Final = "#222222"
_FAINT: Final = "#dddddd"
#: Widths of words are those of the first of these that is here: what has no such font may need a little more room.
_SANS: Final = "Arial, Liberation Sans, Helvetica, DejaVu Sans, sans-serif"
#: A mark that has words of its own. A drawing without a script shows them where it is pointed at by a title only.
_POINT: Final = re.compile(
    r'<path((?: aria-label="([^"]*)" role="graphics-symbol" aria-roledescription="point")[^>]*)/>'
)
#: Numbers of an axis: 130, 0.7, 12000.
PLAIN: Final = ".6~g"


class Figure(NamedTuple):
    """``draw`` makes the chart for a width in CSS pixels; None where there is nothing to draw, and ``missing`` says why.
    ``reads``: how it is to be read. ``name`` is unique on its page."""

    name: str
    title: str
    reads: str
    draw: Callable[[int], Any] | None
    missing: str | None = None


def absent(name: str, title: str, why: str) -> Figure:
    return Figure(name, title, "", None, why)


def svg(chart: Any, width: int, name: str) -> str:
    """The chart as an SVG element that scales down with its column. Ids begin with ``name``: a page holds many."""
    whole = (
        chart.properties(autosize=alt.AutoSizeParams(type="fit-x", contains="padding"), width=width)
        .configure(background="white", font=_SANS, padding={"left": 6, "right": 8, "top": 4, "bottom": 2})
        .configure_axis(
            labelColor=_INK, titleColor=_INK, gridColor=_FAINT, domainColor=_INK, labelFontSize=12,
            titleFontSize=12, titleFontWeight="normal", labelLimit=max(90, width // 3),
        )
        .configure_legend(
            orient="top", title=None, labelColor=_INK, labelFontSize=12, labelLimit=width - 40, symbolSize=90,
            columns=1 if width < WIDE else 2, columnPadding=30,
        )
        .configure_view(stroke=None)
    )  # fmt: skip
    text: str = vl_convert.vegalite_to_svg(whole.to_dict())
    # They count all charts that this process drew: numbered anew, the same figure is the same bytes.
    for number, one in enumerate(dict.fromkeys(re.findall(r'\bid="([^"]+)"', text))):
        mine = f"{name}-{number}"
        text = text.replace(f'id="{one}"', f'id="{mine}"').replace(f"url(#{one})", f"url(#{mine})")
    return _POINT.sub(r"<path\1><title>\2</title></path>", text)


def scales(labels: Sequence[str]) -> tuple[Any, Any, Any]:
    """Colour, shape and dash of the series ``labels``, in their order."""

    def of(values: Sequence[Any]) -> Any:
        return alt.Scale(
            domain=list(labels), range=list(itertools.islice(itertools.cycle(values), len(labels)))
        )

    return of(COLOURS), of(SHAPES), of(DASHES)


def rows(values: Sequence[dict[str, Any]]) -> Any:
    """Data of a chart, kept in it."""
    return alt.InlineData(values=list(values))
