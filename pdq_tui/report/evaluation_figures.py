"""The figures of an evaluation. What a step did not measure is said in the figure's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import altair as alt

from pdq_tui.core.metrics import METRICS
from pdq_tui.core.roofline import evaluation_rooflines
from pdq_tui.judge.matrix import SEPARABLE, Cell, stage_matrix
from pdq_tui.judge.plan import Spec
from pdq_tui.judge.soak import words
from pdq_tui.report.figure import PLAIN, Figure, absent, rows, scales
from pdq_tui.report.roofline_figure import roofline_figure

Json = Mapping[str, Any]

#: Faster, slower, cannot be told: blue and orange are told apart by everybody, and the sign says it again.
_SIDES: Final = {"faster": "#9ecae1", "slower": "#fdc086", "not told": "#eeeeee"}
_SHOWN: Final = ("e2e_ms", "ttft_ms", "tpot_ms")
_NOT_HERE: Final = "not measured in this evaluation"


def evaluation_figures(spec: Spec, found: Mapping[str, Json]) -> list[Figure]:
    """``found``: what the finished steps said, by name."""
    timing = found.get("confirmation")
    quality = found.get("quality") or found.get("small_quality")
    return [
        _ratios(timing),
        _map(timing),
        _matrix(spec, timing),
        roofline_figure(evaluation_rooflines(found)),
        _positions(quality),
        *_load(found.get("load")),
        *_soak(found.get("soak")),
    ]


def _ratios(timing: Json | None) -> Figure:
    title = "staged against each uniform that was kept"
    shown = [
        r
        for r in (timing or {}).get("ratios", [])
        if r["metric"] in _SHOWN and r["arm"] in (timing or {}).get("staged", []) and r["ratio"] is not None
    ]
    if not shown:
        return absent("ratios", title, f"the confirmation run was {_NOT_HERE}")
    data = [
        {
            "row": f"{METRICS[r['metric']].short}  / {r['reference']}",
            "label": r["arm"],
            "ratio": r["ratio"],
            "low": (r["ci95"] or [None, None])[0],
            "high": (r["ci95"] or [None, None])[1],
            "word": r["judgement"],
        }
        for r in shown
    ]
    labels = list(dict.fromkeys(d["label"] for d in data))
    order = list(
        dict.fromkeys(d["row"] for m in _SHOWN for d in data if d["row"].startswith(f"{METRICS[m].short} "))
    )

    def draw(width: int) -> Any:
        colour, shape, _ = scales(labels)
        offset = alt.YOffset("label:N", sort=labels)
        base = alt.Chart(rows(data)).encode(
            y=alt.Y("row:N", sort=order, title=None), yOffset=offset, color=alt.Color("label:N", scale=colour)
        )
        x = alt.Scale(type="log", nice=False, padding=24)
        axis = alt.Axis(format=PLAIN, tickCount=5)
        title_x = "staged / uniform (logarithmic)"
        one = alt.Chart(rows([{"one": 1}])).mark_rule(strokeDash=[4, 3]).encode(x=alt.X("one:Q", scale=x))
        return alt.layer(
            one,
            base.mark_rule(strokeWidth=2).encode(
                x=alt.X("low:Q", scale=x, axis=axis, title=title_x), x2="high:Q"
            ),
            base.mark_point(size=60, filled=True, opacity=1).encode(
                x=alt.X("ratio:Q", scale=x, axis=axis, title=title_x), shape=alt.Shape("label:N", scale=shape)
            ),
            base.mark_text(align="left", dx=7, dy=-7, fontSize=10, color="#222222").encode(
                x=alt.X("ratio:Q", scale=x), text="word:N", color=alt.value("#222222")
            ),
        ).properties(height=(26 * len(labels) + 8) * len(order))

    return Figure(
        "ratios",
        title,
        "Left of 1 the staged policy takes less time. A line is the 95 % interval over blocks; the word is the judgement.",
        draw,
    )


# -- the map -----------------------------------------------------------------------------------------------------------


def _map(timing: Json | None) -> Figure:
    title = "where it pays: time of a request, staged minus uniform, ms"
    cells = (timing or {}).get("map", [])
    if not cells:
        return absent("map", title, f"the confirmation run was {_NOT_HERE}")
    several = len({(c["prompt"], c["batch"]) for c in cells}) > 1
    data = []
    for c in cells:
        ci = c["ci95"]
        side = "not told"
        if ci and ci[1] < 0:
            side = "faster"
        elif ci and ci[0] > 0:
            side = "slower"
        row = f"{c['staged']} − {c['uniform']}"  # two lines of a label
        if several:
            row += f"  ({c['prompt']} × {c['batch']})"
        text = f"{_short(c['delta_ms'])}{'~' if c['extrapolated'] else ''}"
        data.append({"row": row, "output": c["output"], "side": side, "text": text})
    order = list(dict.fromkeys(d["row"] for d in data))

    def draw(width: int) -> Any:
        base = alt.Chart(rows(data)).encode(
            x=alt.X("output:O", title="tokens of the answer", axis=alt.Axis(labelAngle=0)),
            y=alt.Y(
                "row:N",
                sort=order,
                title=None,
                axis=alt.Axis(
                    labelExpr="[split(datum.label, ' − ')[0], '− ' + split(datum.label, ' − ')[1]]",
                    labelLineHeight=12,
                    labelFontSize=10,
                    labelLimit=200 if width > 400 else 128,
                ),
            ),
        )
        fill = alt.Color(
            "side:N",
            scale=alt.Scale(domain=list(_SIDES), range=list(_SIDES.values())),
            legend=alt.Legend(columns=3),
        )
        return alt.layer(
            base.mark_rect(stroke="white").encode(color=fill),
            base.mark_text(fontSize=11 if width > 400 else 8).encode(text="text:N"),
        ).properties(height=34 * len(order) + 24)

    where = "; ".join(f"prompt {p}, batch {b}" for p, b in sorted({(c["prompt"], c["batch"]) for c in cells}))
    return Figure(
        "map",
        title,
        f"Negative: staged is faster. Not told: the 95 % interval holds 0. ~: longer than what was measured, extrapolated. "
        f"Measured at {where}.",
        draw,
    )


def _short(ms: float) -> str:
    return f"{ms / 1e3:+.0f}k" if abs(ms) >= 9_999.5 else f"{ms:+.0f}"


# -- stage matrix ------------------------------------------------------------------------------------------------------


def _matrix(spec: Spec, timing: Json | None) -> Figure:
    n = spec.workload.output_tokens
    title = f"stage matrix: a request of {n} tokens composed from the stages' times, ms"
    if timing is None:
        return absent("matrix", title, f"the confirmation run was {_NOT_HERE}")
    cells = stage_matrix(spec.policies, timing["arms"], n)
    if not cells:
        return absent("matrix", title, "fewer than two uniform policies were timed together")
    least = min(c.composed_ms for c in cells)
    data = [
        {
            "prefill": c.prefill,
            "decode": c.decode,
            "ratio": c.composed_ms / least,
            "text": f"{c.composed_ms:,.0f}",
            "under": f"measured {c.measured_ms:,.0f}" if c.measured_ms is not None else "",
        }
        for c in cells
    ]
    names = list(dict.fromkeys(c.prefill for c in cells))

    def draw(width: int) -> Any:
        base = alt.Chart(rows(data)).encode(
            x=alt.X("decode:N", sort=names, title="decode", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("prefill:N", sort=names, title="prefill"),
        )
        shade = alt.Color(
            "ratio:Q",
            scale=alt.Scale(range=["#9ecae1", "#f7f7f7", "#fdc086"]),
            legend=alt.Legend(title="times the fastest", orient="top", gradientLength=min(200, width // 2)),
        )
        size = 12 if width > 400 else 10
        return alt.layer(
            base.mark_rect(stroke="white").encode(color=shade),
            base.mark_text(fontSize=size, dy=-6).encode(text="text:N"),
            base.mark_text(fontSize=size - 2, dy=9).encode(text="under:N"),
        ).properties(height=48 * len(names) + 20)

    return Figure("matrix", title, _separable(cells), draw)


def _separable(cells: Sequence[Cell]) -> str:
    told = "Each cell is one policy's TTFT plus another's steps: a prediction, with what was measured of it below. "
    errors = [(c.policy, c.error) for c in cells if c.error is not None and c.prefill != c.decode]
    if not errors:
        return told + "No mixed cell was measured as a whole, so that separability was not checked."
    name, worst = max(errors, key=lambda e: abs(e[1]))
    word = (
        "separable here"
        if abs(worst) <= SEPARABLE
        else "not separable here: composed times are not to be relied on"
    )
    return (
        told + f"The largest error of a mixed cell is {worst:+.1%} ({name}): {word} (limit {SEPARABLE:.0%})."
    )


# -- quality along the answer ------------------------------------------------------------------------------------------


def _positions(quality: Json | None) -> Figure:
    title = "divergence from the base along the answer: KLD by position, nats"
    data = [
        {
            "label": name,
            "at": at + 1,
            "kld": e["value"],
            "low": (e["ci95"] or [None, None])[0],
            "high": (e["ci95"] or [None, None])[1],
        }
        for name, paths in (quality or {}).get("paths", {}).items()
        for path in paths
        if path["path"] == "decode" and path["forced"] == "text"
        for at, e in path["by_position"]
        if e["value"] is not None
    ]
    if not data:
        return absent("positions", title, f"quality was {_NOT_HERE}")
    labels = list(dict.fromkeys(d["label"] for d in data))

    def draw(width: int) -> Any:
        colour, _, dash = scales(labels)
        base = alt.Chart(rows(data)).encode(
            x=alt.X(
                "at:Q",
                title="position in the answer",
                scale=alt.Scale(nice=False),
                axis=alt.Axis(tickMinStep=1, format="d"),
            ),
            # The band's own sign would be too pale to be told from another's.
            color=alt.Color(
                "label:N",
                scale=colour,
                legend=alt.Legend(symbolType="stroke", symbolOpacity=1, symbolStrokeWidth=3),
            ),
        )
        return alt.layer(
            base.mark_area(opacity=0.15).encode(
                y=alt.Y("low:Q", title="KLD, nats"),
                y2="high:Q",
            ),
            base.mark_line(strokeWidth=2).encode(y="kld:Q", strokeDash=alt.StrokeDash("label:N", scale=dash)),
        ).properties(height=260)

    return Figure(
        "positions",
        title,
        "Position 1 is the first token, prefill's own. Error from a cheap prefill fades along the answer, error from a cheap decode grows. Bands are 95 % intervals over "
        "windows, position by position.",
        draw,
    )


# -- under load, and over hours ----------------------------------------------------------------------------------------


#: What of a load point is drawn: (key of the figure, words, unit of the axis, where it lies).
_UNDER_LOAD: Final = (
    ("ttft", "TTFT, the slowest tenth", "p90, ms", ("ttft_ms", "p90")),
    ("tpot", "TPOT, the slowest tenth", "p90, ms", ("tpot_ms", "p90")),
    ("tokens", "new tokens", "tokens/s", ("tokens_per_s",)),
    ("good", "requests that met both targets", "%", ("good",)),
)


def _load(load: Json | None) -> list[Figure]:
    """A curve of each by concurrency, closed loop; the knees in the caption of the share that met both targets."""
    title = "under load"
    points = [p for p in (load or {}).get("points", []) if p.get("concurrency")]
    if not points or load is None:
        return [absent("load", title, f"load was {_NOT_HERE}")]
    found = []
    for name, what, unit, path in _UNDER_LOAD:
        data = []
        for p in points:
            value: Any = p
            for key in path:
                value = (value or {}).get(key)
            if value is not None:
                data.append(
                    {
                        "label": p["arm"],
                        "at": p["concurrency"],
                        "value": value * (100 if name == "good" else 1),
                    }
                )
        reads = "By another engine's attention and cache: not to be compared with the figures of one request at a time."
        if name == "good":
            t = load["targets"]
            reads = f"Targets: TTFT ≤ {t['ttft_ms']:g} ms, TPOT ≤ {t['tpot_ms']:g} ms. {_knees(load)}"
        if data:
            found.append(_curve(f"load-{name}", f"{title}: {what}", data, "requests at a time", unit, reads))
        else:
            found.append(absent(f"load-{name}", f"{title}: {what}", "too few requests at each load"))
    return found


def _knees(load: Json) -> str:
    told = []
    for k in load["knees"]:
        if k["concurrency"] is None:
            told.append(
                f"{k['arm']}: no load met both targets for {load['targets']['share']:.0%} of the requests."
            )
        else:
            more = "" if k["reached"] else ", the largest that was tried"
            told.append(f"{k['arm']}: knee at {k['concurrency']}{more}.")
    return " ".join(told)


def _soak(soak: Json | None) -> list[Figure]:
    """How much each series changed over the run."""
    title = "over the run: drift"
    if soak is None:
        return [absent("soak", title, f"a soak was {_NOT_HERE}")]
    data = [
        {
            "row": d["name"],
            "change": d["change"] * 100,
            "low": d["change_ci95"][0] * 100,
            "high": d["change_ci95"][1] * 100,
            "word": "drifts" if d["drifts"] else "no drift",
        }
        for d in soak["drifts"]
        if d["change"] is not None
    ]
    why = "; ".join(
        f"{d['name']}: {d['reason']}" for d in soak["drifts"] if d["change"] is None and d["reason"]
    )
    if not data:
        return [absent("soak", title, why or "no series was long enough")]

    def draw(width: int) -> Any:
        base = alt.Chart(rows(data)).encode(y=alt.Y("row:N", title=None, sort=None))
        x_title = "change over the run, %"
        bounds = alt.Chart(rows([{"at": -1.0}, {"at": 1.0}])).mark_rule(strokeDash=[4, 3], color="#777777")
        return alt.layer(
            bounds.encode(x=alt.X("at:Q", title=x_title)),
            base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", title=x_title), x2="high:Q"),
            base.mark_point(filled=True, size=60, opacity=1).encode(x=alt.X("change:Q", title=x_title)),
            base.mark_text(dy=-9, fontSize=11).encode(x="change:Q", text="word:N"),
        ).properties(height=44 * len(data) + 10)

    rest = f" Not drawn: {why}." if why else ""
    return [
        Figure(
            "soak",
            f"{title} in {words(soak['asked_s'])} of {soak['policy']}",
            "Drift: the 95 % interval excludes 0 and the change is above 1 % (dashed). The first tenth is warm-up."
            + ("" if soak["hours_long"] else " Not the hours-long test.")
            + rest,
            draw,
        )
    ]


def _curve(name: str, title: str, data: Sequence[dict[str, Any]], x: str, y: str, reads: str) -> Figure:
    labels = list(dict.fromkeys(d["label"] for d in data))

    def draw(width: int) -> Any:
        colour, shape, dash = scales(labels)
        base = alt.Chart(rows(data)).encode(
            x=alt.X("at:O", title=x, axis=alt.Axis(labelAngle=0)),
            y=alt.Y("value:Q", title=y),
            color=alt.Color("label:N", scale=colour),
        )
        return alt.layer(
            base.mark_line().encode(strokeDash=alt.StrokeDash("label:N", scale=dash)),
            base.mark_point(filled=True, size=40).encode(shape=alt.Shape("label:N", scale=shape)),
        ).properties(height=240)

    return Figure(name, title, reads or "Lower is faster.", draw)
