"""How the values of one row are spread: both sides' requests over one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pdq_tui.core.arms import timed
from pdq_tui.core.metrics import METRICS
from pdq_tui.report.cells import about
from pdq_tui.tui.lines import Line, fit, literal

if TYPE_CHECKING:  # polars comes with these
    from pdq_tui.store.compare import Comparison, Row
    from pdq_tui.store.snapshot import Snapshot

#: The reference's values and the candidate's, one a counted request.
Samples = tuple[Sequence[float], Sequence[float]]
_BARS = " ▁▂▃▄▅▆▇█"


def samples(comparison: Comparison, sources: Mapping[str, Snapshot], row: Row) -> Samples | None:
    """The values of both sides, from ``sources`` by their ids; None for what is not measured a request."""
    metric = METRICS.get(row.metric)
    if metric is None or row.method == "exact":
        return None
    values = []
    for name in (comparison.reference.id, row.candidate):
        s = sources[name]
        found = (metric.of(r, s.device, s.model) for r in timed(s.requests))
        values.append([v for v in found if v is not None])
    return values[0], values[1]


def spread_lines(row: Row, sides: Samples | None, names: tuple[str, str], width: int) -> list[Line]:
    """Why the row matters, and its histogram where it has one."""
    lines = histogram_lines(row.metric, sides, names, width) if sides is not None else []
    return [
        Line.of(about(row.metric).why, "dim"),
        *(lines or [Line.of(f"{row.method}: one number, no distribution", "dim")]),
    ]


def histogram_lines(metric: str, sides: Samples, names: tuple[str, str], width: int) -> list[Line]:
    """Both sides' values over one axis, the reference (★) above. Empty or equal values are fine."""
    both = [*sides[0], *sides[1]]
    if not both:
        return []
    entry = about(metric)
    low, high = min(both), max(both)
    label = 14
    bins = max(1, min(width - label - 8, 80))
    lines = [Line.of(f"{'distribution':<{label}} {entry.shown_unit or 'bytes'}, one value a request", "dim")]
    for name, values in zip((f"★ {names[0]}", f"  {names[1]}"), sides, strict=True):
        counts = [0] * bins
        for value in values:
            place = (value - low) / (high - low) if high > low else 0.0
            counts[min(bins - 1, int(place * bins))] += 1
        top = max(counts)
        bars = "".join(_BARS[0 if not c else 1 + round((len(_BARS) - 2) * c / top)] for c in counts)
        lines.append(
            Line(((fit(literal(name), label) + " ", "mark"), (bars, ""), (f" n={len(values)}", "dim")))
        )
    left, right = str(entry.format(low)), str(entry.format(high))
    axis = left + right.rjust(max(1, bins - len(left))) if high > low else left
    return [*lines, Line.of(" " * (label + 1) + axis, "dim")]
