"""The text of one cell, on the screen and in every report: values with their interval, differences with their sign,
judgements with their mark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdq_tui.core.metrics import BYTE_UNITS, METRICS, Metric
from pdq_tui.core.stats import BETTER, SAME, UNSURE, WORSE, Summary
from pdq_tui.store.figures import FIGURES, Figure
from pdq_tui.store.setup import MEMORY

if TYPE_CHECKING:  # polars comes with it, and the screen must not wait for that
    from pdq_tui.store.compare import Row

#: Headings of the columns that hold differences.
DELTA: Final = "Δ by ratio"
PERCENT: Final = "Δ %"
INTERVAL: Final = "95 % CI of Δ %"
NOTHING: Final = "–"
ARROWS: Final = {BETTER: "", WORSE: "", SAME: "= ", UNSURE: "? "}
FLAG: Final = "⚑"
#: What a number may end in (see ``core.metrics``), and what it then is to be multiplied by.
_SCALES: Final = {**BYTE_UNITS, "k": 1e3, "M": 1e6}
_SUFFIX: Final = " " + "".join(sorted(set("".join(_SCALES))))


def about(metric: str) -> Metric | Figure:
    """The registry's entry of a metric or a counted figure."""
    return METRICS[metric] if metric in METRICS else FIGURES[metric]


def value_text(metric: str, s: Summary, width: int | None = None) -> str:
    """ "129.7 ±1.4": the median and half the width of its 95 % interval, in the median's unit and decimals (in more
    where they would show 0). Where that is more than ``width`` characters, the median alone."""
    text = about(metric).format(s.median)
    if s.median is None or s.ci95 is None or s.ci95[0] == s.ci95[1]:
        return text
    whole = _with_half(metric, text, (s.ci95[1] - s.ci95[0]) / 2)
    return text if width is not None and len(whole) > width else whole


def _with_half(metric: str, text: str, half: float) -> str:
    number = text.rstrip(_SUFFIX)
    suffix = text[len(number) :]
    scale = _SCALES[suffix.strip()] if suffix else 0.01 if about(metric).unit == "1" else 1
    rounded = f"{half / scale:.{len(number.partition('.')[2])}f}"
    return f"{number} ±{rounded if float(rounded) else f'{half / scale:.1g}'}{suffix}"


def judgement_text(row: Row) -> str:
    """The value's direction as an arrow, the judgement as a word, ⚑ where a condition differs: never one of them
    alone. A dash where neither direction is good by itself."""
    arrow = ARROWS.get(row.judgement, "")
    if row.judgement in (BETTER, WORSE):
        change = row.delta if row.delta is not None else row.percent
        arrow = "▲ " if change is not None and change > 0 else "▼ "
    return f"{arrow}{row.judgement or NOTHING}{f' {FLAG}' if row.flagged else ''}"


def percent_text(value: float | None) -> str:
    """ "+27.1 %"."""
    number = percent_number(value)
    return number if value is None else f"{number} %"


def percent_number(value: float | None) -> str:
    """The same for a column whose heading says %."""
    if value is None:
        return NOTHING
    if abs(value) < 0.05:
        return "0.0"
    return f"{value:+.0f}" if abs(value) >= 1000 else f"{value:+.1f}"


def delta_interval_text(row: Row) -> str:
    if row.delta_ci95 is None:
        return NOTHING
    low, high = (signed(row.metric, bound) for bound in row.delta_ci95)
    return f"[{low}, {high}]"


def interval_text(row: Row) -> str:
    """The interval; for one number a side what that number is, for medians and what has too few blocks a dash."""
    if row.ci95 is None:
        return row.method if row.group == MEMORY else NOTHING
    low, high = row.ci95
    return f"[{low:+.1f}, {high:+.1f}]"


def delta_text(row: Row) -> str:
    return NOTHING if row.delta is None else signed(row.metric, row.delta)


def signed(metric: str, value: float) -> str:
    if value == 0:
        return "0"
    text = about(metric).format(value)
    return text if value < 0 else f"+{text}"
