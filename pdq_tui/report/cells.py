"""The text of one cell: values with their interval, differences with their sign, judgements with their mark."""

from __future__ import annotations

from typing import Final

from pdq_tui.core.metrics import METRICS, Metric
from pdq_tui.core.stats import BETTER, WORSE, Summary
from pdq_tui.store.compare import Row
from pdq_tui.store.figures import FIGURES, Figure
from pdq_tui.store.setup import MEMORY

ARROWS: Final = {"better": "", "worse": "", "same": "= ", "unsure": "? "}


def about(metric: str) -> Metric | Figure:
    """The registry's entry of a metric or a counted figure."""
    return METRICS[metric] if metric in METRICS else FIGURES[metric]


def value_text(metric: str, s: Summary) -> str:
    """ "129.7 ±1.4": the median and half the width of its 95 % interval."""
    entry = about(metric)
    text = entry.format(s.median)
    if s.median is None or s.ci95 is None or s.ci95[0] == s.ci95[1]:
        return text
    half = (s.ci95[1] - s.ci95[0]) / 2
    if entry.unit == "B":
        return f"{text} ±{entry.format(half)}"
    shown = half * 100 if entry.unit == "1" else half
    return f"{text} ±{shown:.0f}" if shown >= 100 else f"{text} ±{shown:.2g}"


def judgement_text(row: Row) -> str:
    """Word, arrow of the value's direction, and the flag where a condition differs."""
    if not row.judgement:
        return "–"
    arrow = ARROWS[row.judgement]
    if row.judgement in (BETTER, WORSE) and row.delta is not None:
        arrow = "▲ " if row.delta > 0 else "▼ "
    return f"{arrow}{row.judgement}{' ⚑' if row.flagged else ''}"


def percent_text(value: float | None) -> str:
    if value is None:
        return "–"
    if abs(value) < 0.05:
        return "0.0 %"
    return f"{value:+.0f} %" if abs(value) >= 1000 else f"{value:+.1f} %"


def delta_interval_text(row: Row) -> str:
    if row.delta_ci95 is None:
        return "–"
    low, high = (signed(row.metric, bound) for bound in row.delta_ci95)
    return f"[{low}, {high}]"


def interval_text(row: Row) -> str:
    """The interval; for one number a side what that number is, for medians and what has too few blocks a dash."""
    if row.ci95 is None:
        return row.method if row.group == MEMORY else "–"
    low, high = row.ci95
    return f"[{low:+.1f}, {high:+.1f}]"


def delta_text(row: Row) -> str:
    return "–" if row.delta is None else signed(row.metric, row.delta)


def signed(metric: str, value: float) -> str:
    if value == 0:
        return "0"
    text = about(metric).format(value)
    return text if value < 0 else f"+{text}"
