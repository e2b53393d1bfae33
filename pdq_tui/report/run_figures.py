"""The figures of a comparison and of a run: ratios with their intervals, distributions, and values over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import altair as alt

from pdq_tui.core.metrics import METRICS
from pdq_tui.core.roofline import document_rooflines
from pdq_tui.core.stats import quantile
from pdq_tui.report.cells import about
from pdq_tui.report.figure import PLAIN, Figure, absent, rows, scales
from pdq_tui.report.roofline_figure import roofline_figure
from pdq_tui.report.samples import Samples
from pdq_tui.store.compare import Comparison
from pdq_tui.store.setup import SPEED

Json = Mapping[str, Any]

#: Points of one distribution; the far tail is told by its own: 99 and 99.9 %.
_LEVELS: Final = tuple(sorted({*(i / 200 for i in range(1, 200)), 0.99, 0.995, 0.999, 1.0}))
#: More requests of an arm than this are drawn as medians of neighbours.
_POINTS: Final = 300
#: A value more than this many times as large as another is drawn on a logarithmic axis.
_LOG_FROM: Final = 8.0
_TIMES: Final = ("ttft_ms", "tpot_ms")


def comparison_figures(c: Comparison, samples: Sequence[Samples]) -> list[Figure]:
    drawn = []
    for row in c.rows:
        if row.group == SPEED and row.percent is not None:
            ci = None if row.ci95 is None else [1 + bound / 100 for bound in row.ci95]
            label = next(s.label for s in c.candidates if s.id == row.candidate)
            drawn.append(_bar(label, row.metric, 1 + row.percent / 100, ci, row.judgement))
    return [_ratios(drawn, c.reference.label), roofline_figure(c.rooflines), *sample_figures(samples)]


def document_figures(doc: Json, samples: Sequence[Samples]) -> list[Figure]:
    drawn = [
        _bar(r["arm"], r["metric"], r["ratio"], r.get("ci95"), r["judgement"])
        for r in doc.get("ratios", [])
        if r.get("ratio") is not None
    ]
    reference = next((r["reference"] for r in doc.get("ratios", [])), "")
    found = [roofline_figure(document_rooflines(doc)), *sample_figures(samples)]
    return [_ratios(drawn, str(reference)), *found] if reference else found


def sample_figures(samples: Sequence[Samples]) -> list[Figure]:
    """Distributions and times over time; for no samples the reason why there are none."""
    if not any(s.requests for s in samples):
        return [absent("samples", "distributions", "the requests themselves were not given to this report")]
    return [
        *(_distribution(samples, metric) for metric in ("itl_ms", "ttft_ms")),
        *(_over_time(samples, metric) for metric in _TIMES),
    ]


# -- ratios ------------------------------------------------------------------------------------------------------------


def _bar(label: str, metric: str, ratio: float, ci: Sequence[float] | None, word: str) -> dict[str, Any]:
    low, high = ci or (None, None)
    return {
        "label": label,
        "metric": about(metric).short,
        "ratio": ratio,
        "low": low,
        "high": high,
        "word": word,
    }


def _ratios(drawn: Sequence[dict[str, Any]], reference: str) -> Figure:
    title = f"ratios to {reference}, with their 95 % intervals"
    if not drawn:
        return absent("ratios", title, "no ratio could be formed")
    labels = list(dict.fromkeys(d["label"] for d in drawn))
    metrics = list(dict.fromkeys(d["metric"] for d in drawn))
    data = [{**d, "row": f"{d['metric']}  {d['label']}" if len(labels) > 1 else d["metric"]} for d in drawn]
    order = [d["row"] for m in metrics for d in data if d["metric"] == m]
    ends = [v for d in data for v in (d["low"], d["high"], d["ratio"], 1.0) if v is not None and v > 0]
    low, high = min(ends), max(ends)
    room = (high / low) ** 0.04

    def draw(width: int) -> Any:
        # Room at the right for the words, in the scale's own units.
        words = 0.16 if width > 400 else 0.3
        domain = [low / room, high * room * (high / low + 0.05) ** words]
        colour, shape, _ = scales(labels)
        legend = alt.Legend() if len(labels) > 1 else None
        base = alt.Chart(rows(data)).encode(y=alt.Y("row:N", sort=order, title=None))
        x = alt.Scale(type="log", domain=domain, nice=False)
        axis = alt.Axis(format=PLAIN, tickCount=6 if width > 400 else 4)
        title_x = "ratio (logarithmic); 1 = the reference"
        ranges = base.mark_rule(strokeWidth=2).encode(
            x=alt.X("low:Q", scale=x, axis=axis, title=title_x),
            x2="high:Q",
            color=alt.Color("label:N", scale=colour, legend=None),
        )
        points = base.mark_point(size=70, filled=True, opacity=1).encode(
            x=alt.X("ratio:Q", scale=x, axis=axis, title=title_x),
            color=alt.Color("label:N", scale=colour, legend=legend),
            shape=alt.Shape("label:N", scale=shape, legend=legend),
        )
        words_at = (
            base.mark_text(align="left", dx=8, fontSize=11)
            .encode(x=alt.X("end:Q", scale=x), text="word:N")
            .transform_calculate(end="datum.high == null ? datum.ratio : datum.high")
        )
        one = alt.Chart(rows([{"one": 1}])).mark_rule(strokeDash=[4, 3]).encode(x=alt.X("one:Q", scale=x))
        return alt.layer(one, ranges, points, words_at).properties(height=24 * len(order) + 20)

    return Figure(
        "ratios",
        title,
        "A point is the geometric mean over blocks, its line the 95 % interval. Left of 1: a smaller value, which is "
        "better for times and worse for rates; the word says which, and what may not be told says unsure.",
        draw,
    )


# -- distributions -----------------------------------------------------------------------------------------------------


def _values(s: Samples, metric: str) -> list[float]:
    if metric == "itl_ms":
        return [v for r in s.requests for v in r.itl_ms if math.isfinite(v)]
    of = METRICS[metric].of
    found = (of(r, None, None) for r in s.requests)
    return [v for v in found if v is not None and math.isfinite(v)]


def _distribution(samples: Sequence[Samples], metric: str) -> Figure:
    entry = about(metric)
    title = f"{entry.name}: how the values are spread"
    data: list[dict[str, Any]] = []
    for s in samples:
        values = sorted(_values(s, metric))
        if len(values) < 2:
            continue
        data += [
            {"label": s.label, "value": quantile(values, level), "share": level * 100}
            for level in _LEVELS
            if level == 1.0 or level * len(values) >= 1
        ]
    if not data:
        return absent(f"spread-{metric}", title, "fewer than two values an arm")
    labels = list(dict.fromkeys(d["label"] for d in data))
    low, high = min(d["value"] for d in data), max(d["value"] for d in data)
    log = low > 0 and high / low > _LOG_FROM

    def draw(width: int) -> Any:
        colour, _, dash = scales(labels)
        scale = (
            alt.Scale(type="log", nice=False, domain=[low, high])
            if log
            else alt.Scale(zero=False, nice=False)
        )
        return (
            alt.Chart(rows(data))
            .mark_line(interpolate="step-after", strokeWidth=2)
            .encode(
                x=alt.X(
                    "value:Q",
                    scale=scale,
                    title=f"{entry.short}, {entry.shown_unit}{' (logarithmic)' if log else ''}",
                    axis=alt.Axis(format=PLAIN, tickCount=7 if width > 400 else 4),
                ),
                y=alt.Y("share:Q", title="% of the values at or below", scale=alt.Scale(domain=[0, 100])),
                color=alt.Color("label:N", scale=colour),
                strokeDash=alt.StrokeDash("label:N", scale=dash),
                order="share:Q",
            )
            .properties(height=220)
        )

    counts = ", ".join(f"{s.label} {len(_values(s, metric))}" for s in samples)
    return Figure(
        f"spread-{metric}",
        title,
        "Where a curve crosses 50 % is its median. A curve further left is faster; one that leans over near the top has a "
        f"tail of slow values. Values: {counts}.",
        draw,
    )


# -- over time ---------------------------------------------------------------------------------------------------------


def _over_time(samples: Sequence[Samples], metric: str) -> Figure:
    entry = about(metric)
    title = f"{entry.name} over the run"
    begins: dict[str, int] = {}
    for s in samples:
        for r in s.requests:
            begins[s.run] = min(begins.get(s.run, r.t_ns), r.t_ns)
    data: list[dict[str, Any]] = []
    thinned = False
    for s in samples:
        of = METRICS[metric].of
        points = [
            ((r.t_ns - begins[s.run]) / 1e9, v)
            for r in s.requests
            if (v := of(r, None, None)) is not None and math.isfinite(v)
        ]
        thinned = thinned or len(points) > _POINTS
        data += [{"label": s.label, "s": at, "value": v} for at, v in _thin(points)]
    if not data:
        return absent(f"time-{metric}", title, METRICS[metric].missing)
    labels = list(dict.fromkeys(d["label"] for d in data))

    def draw(width: int) -> Any:
        colour, shape, _ = scales(labels)
        return (
            alt.Chart(rows(data))
            .mark_point(size=28, filled=True, opacity=0.75)
            .encode(
                x=alt.X(
                    "s:Q", title="seconds", axis=alt.Axis(format=PLAIN, tickCount=7 if width > 400 else 4)
                ),
                y=alt.Y("value:Q", title=f"{entry.short}, {entry.shown_unit}", scale=alt.Scale(zero=False)),
                color=alt.Color("label:N", scale=colour),
                shape=alt.Shape("label:N", scale=shape),
            )
            .properties(height=220)
        )

    one = "a median of neighbouring requests" if thinned else "a request"
    apart = " Different runs are each drawn from their own beginning." if len(begins) > 1 else ""
    return Figure(
        f"time-{metric}",
        title,
        f"Each point is {one}. A slope is drift: of the clocks, the temperature or the neighbours.{apart}",
        draw,
    )


def _thin(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    if len(points) <= _POINTS:
        yield from points
        return
    size = math.ceil(len(points) / _POINTS)
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        yield quantile(sorted(at for at, _ in part), 0.5), quantile(sorted(v for _, v in part), 0.5)
