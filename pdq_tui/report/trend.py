"""A trend as a page, as flat rows and as figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import polars as pl

from pdq_tui.core.metrics import METRICS, counted
from pdq_tui.core.stats import BETTER, WORSE
from pdq_tui.report.cells import percent_text, value_text
from pdq_tui.report.page import Page, Table
from pdq_tui.report.pages import HOLDS, day, formulas
from pdq_tui.store.trend import FOLLOWED, Point, Series, Trend

if TYPE_CHECKING:  # the charts' library is imported for a figure only
    from pdq_tui.report.figure import Figure

LEGEND: Final = (
    "One row a snapshot, oldest first. The ratio is against the snapshot before it in the same series (same model, device, "
    "workload and policy); the word comes from an unpaired bootstrap over blocks, so that a drift of the machine between "
    "the two is not cancelled: interleave both in one run before anything is concluded. ± is half the width of the 95 % "
    "interval of the median."
)
_METRICS: Final = tuple(metric for metric, _ in FOLLOWED)
_FIRST: Final = "first"

SCHEMA: Final = {
    "setup": pl.String(), "policy": pl.String(), "snapshot": pl.String(), "at": pl.String(), "metric": pl.String(),
    "unit": pl.String(), "value": pl.Float64(), "low": pl.Float64(), "high": pl.Float64(), "ratio": pl.Float64(),
    "ratio_low": pl.Float64(), "ratio_high": pl.Float64(), "judgement": pl.String(), "changed": pl.String(),
    "note": pl.String(),
}  # fmt: skip


def trend_page(t: Trend) -> Page:
    points = sum(len(s.points) for s in t.series)
    return Page(
        title=f"Trend of {counted(points, 'snapshot')}",
        headline=_headline(t),
        facts=[
            ("from", day(min((p.at for s in t.series for p in s.points), default=""))),
            ("to", day(max((p.at for s in t.series for p in s.points), default=""))),
            ("series", f"{len(t.series)} (a policy on one model, device and workload)"),
            ("smallest effect that matters", f"{t.min_effect * 100:g} %"),
        ],
        tables=[_table(s) for s in t.series],
        notes=[*(f"left out: {why}" for why in t.skipped), HOLDS],
        formulas=formulas(_METRICS),
        legend=LEGEND,
    )


def _headline(t: Trend) -> str:
    told = []
    for s in t.series:
        for p in s.points:
            ratio = p.against.get("e2e_ms")
            if ratio is not None and ratio.ratio is not None and ratio.judgement in (BETTER, WORSE):
                with_ = (
                    f" with {', '.join(p.changed)}" if p.changed else ", nothing that is recorded had changed"
                )
                told.append(
                    f"{s.policy}: E2E {percent_text((ratio.ratio - 1) * 100)} ({ratio.judgement}) on {day(p.at)}{with_}."
                )
    return " ".join(told) or "No snapshot's E2E differs from the one before it beyond what can be told."


def _table(s: Series) -> Table:
    rows = []
    for p in s.points:
        cells = [day(p.at), p.id, "; ".join(p.changed) or ("–" if p.against else _FIRST), p.note]
        for metric in _METRICS:
            cells.append(value_text(metric, p.figures[metric]))
            if metric != "mbu":
                cells.append(_against(p, metric))
        rows.append(cells)
    columns = ["measured", "snapshot", "changed", "note"]
    for metric in _METRICS:
        m = METRICS[metric]
        columns.append(f"{m.short} {m.shown_unit}")
        if metric != "mbu":
            columns.append("against before")
    return Table(title=f"{s.policy}: {s.setup}", columns=columns, rows=rows, left=4)


def _against(p: Point, metric: str) -> str:
    ratio = p.against.get(metric)
    if ratio is None:
        return "–"
    return f"{percent_text(None if ratio.ratio is None else (ratio.ratio - 1) * 100)} {ratio.judgement}"


def trend_rows(t: Trend) -> list[dict[str, Any]]:
    """One row a snapshot and metric, of ``SCHEMA``."""
    found = []
    for s in t.series:
        for p in s.points:
            for metric in _METRICS:
                f, r = p.figures[metric], p.against.get(metric)
                row: dict[str, Any] = {
                    "setup": s.setup, "policy": s.policy, "snapshot": p.id, "at": p.at, "metric": metric,
                    "unit": METRICS[metric].unit, "value": f.median, "changed": "; ".join(p.changed), "note": p.note,
                }  # fmt: skip
                row["low"], row["high"] = f.ci95 or (None, None)
                if r is not None:
                    row |= {"ratio": r.ratio, "judgement": r.judgement}
                    row["ratio_low"], row["ratio_high"] = r.ci95 or (None, None)
                found.append(row)
    return found


# -- figures -----------------------------------------------------------------------------------------------------------


def trend_figures(t: Trend) -> list[Figure]:
    """One a metric and setup, the policies in it as series; a dashed line where a version had changed."""
    by_setup: dict[str, list[Series]] = {}
    for s in t.series:
        by_setup.setdefault(s.setup, []).append(s)
    return [
        _figure(f"{metric}-{number}", metric, setup, of)
        for number, (setup, of) in enumerate(by_setup.items())
        for metric in _METRICS
    ]


def _figure(name: str, metric: str, setup: str, of: list[Series]) -> Figure:
    from pdq_tui.report.figure import Figure, absent

    m = METRICS[metric]
    title = f"{m.name}: {setup}"
    scale = 100 if m.unit == "1" else 1
    moments = sorted({p.at for s in of for p in s.points})
    data: list[dict[str, Any]] = [
        {
            "label": s.policy,
            "at": moments.index(p.at) + 1,
            "value": f.median * scale,
            "low": None if f.ci95 is None else f.ci95[0] * scale,
            "high": None if f.ci95 is None else f.ci95[1] * scale,
        }
        for s in of
        for p in s.points
        if (f := p.figures[metric]).median is not None
    ]
    if not data:
        return absent(name, title, m.missing)
    marks = {moments.index(p.at) + 1: "; ".join(p.changed) for s in of for p in s.points if p.changed}
    said = "; ".join(f"{at}: {what}" for at, what in sorted(marks.items()))
    reads = (
        f"Snapshots in the order of time ({day(moments[0])} to {day(moments[-1])}), with the 95 % interval of the median. "
        + (f"Dashed lines: something had changed before ({said})." if marks else "No version had changed.")
    )

    def draw(width: int) -> Any:
        import altair as alt

        from pdq_tui.report.figure import rows, scales

        labels = list(dict.fromkeys(d["label"] for d in data))
        colour, shape, _ = scales(labels)
        base = alt.Chart(rows(data)).encode(
            x=alt.X("at:O", title="snapshot", axis=alt.Axis(labelAngle=0)),
            color=alt.Color("label:N", scale=colour),
        )
        changes = alt.Chart(rows([{"at": at} for at in marks])).mark_rule(strokeDash=[4, 3], color="#777777")
        y_title = f"{m.short}, {m.shown_unit}"
        return alt.layer(
            changes.encode(x="at:O"),
            base.mark_line(opacity=0.5).encode(
                y=alt.Y("value:Q", title=y_title, scale=alt.Scale(zero=False))
            ),
            base.mark_rule().encode(y=alt.Y("low:Q", title=y_title), y2="high:Q"),
            base.mark_point(filled=True, size=50, opacity=1).encode(
                y=alt.Y("value:Q", title=y_title), shape=alt.Shape("label:N", scale=shape)
            ),
        ).properties(height=220)

    return Figure(name, title, reads, draw)
