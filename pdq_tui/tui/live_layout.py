"""Which panels the live screen has at a size, and where they stand."""

from __future__ import annotations

from typing import Final, NamedTuple

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widget import Widget

from pdq_tui.tui.chart import Chart
from pdq_tui.tui.rows import Rows

_ALWAYS: Final = ("header", "policies", "bottom", "keys")
#: What is on the screen in each layout, from top to bottom; the other panels are not there.
LAYOUTS: Final[dict[str, tuple[str, ...]]] = {
    "full": (
        *_ALWAYS,
        "top",
        "prefill",
        "decode",
        "device",
        "row1",
        "chart0",
        "chart1",
        "row2",
        "chart2",
        "chart3",
    ),
    "mid": (*_ALWAYS, "stages", "row1", "chart0", "side", "strips", "strip0", "strip1"),
    "small": (*_ALWAYS, "stages", "row1", "side"),
    "tiny": ("too-small",),
}
#: Ids of everything that a layout may hide.
WIDGETS: Final = (
    *_ALWAYS, "top", "prefill", "decode", "device", "stages", "row1", "chart0", "chart1", "side", "row2", "chart2",
    "chart3", "strips", "strip0", "strip1", "too-small",
)  # fmt: skip
_ROW_OF: Final = {
    "prefill": "top", "decode": "top", "device": "top", "chart0": "row1", "chart1": "row1", "side": "row1",
    "chart2": "row2", "chart3": "row2",
}  # fmt: skip


class Layout(NamedTuple):
    """``name``: one of LAYOUTS; ``shown``: ids of the widgets that are there; ``zoomed``: the panel that is alone."""

    name: str
    shown: frozenset[str]
    zoomed: str | None


def layout_for(width: int, height: int) -> str:
    """full, mid, small (numbers only) or tiny (one line)."""
    if width >= 120 and height >= 36:
        return "full"
    if width >= 80 and height >= 24:
        return "mid"
    return "small" if width >= 60 and height >= 20 else "tiny"


def arranged(width: int, height: int, zoomed: str | None) -> Layout:
    """The layout of a window; of a zoomed panel that it has, only that and its row."""
    name = layout_for(width, height)
    if zoomed is None or zoomed not in LAYOUTS[name]:
        return Layout(name, frozenset(LAYOUTS[name]), None)
    return Layout(name, frozenset((*_ALWAYS, zoomed, _ROW_OF.get(zoomed, zoomed))), zoomed)


def widgets(marker: str) -> ComposeResult:
    """All panels of all layouts. ``marker``: what the charts draw with."""
    yield Rows(id="header")
    yield Rows(id="policies")
    with Horizontal(id="top"):
        yield _panel(Rows(id="prefill", focusable=True, metric="ttft_ms"))
        yield _panel(Rows(id="decode", focusable=True, metric="tpot_ms"))
        yield _panel(Rows(id="device", focusable=True, metric="decode_peak_bytes"))
    yield _panel(Rows(id="stages", focusable=True, metric="tpot_ms"))
    with Horizontal(id="row1"):
        yield _panel(Chart(id="chart0", marker=marker))
        yield _panel(Chart(id="chart1", marker=marker))
        yield _panel(Rows(id="side", focusable=True, metric="decode_peak_bytes"))
    with Horizontal(id="row2"):
        yield _panel(Chart(id="chart2", marker=marker))
        yield _panel(Chart(id="chart3", marker=marker))
    with Horizontal(id="strips"):
        yield _panel(Rows(id="strip0"))
        yield _panel(Rows(id="strip1"))
    yield Rows(id="too-small")
    yield Rows(id="bottom")
    yield Rows(id="keys")


def _panel(widget: Widget) -> Widget:
    widget.add_class("panel")
    return widget
