"""The roofline as a figure: log–log, one slope a memory, one ceiling a dtype, each stage of each arm a point."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import altair as alt

from pdq_tui.core.metrics import format_bytes
from pdq_tui.core.roofline import Roof, Roofline, RoofPoint, distinct_roofs
from pdq_tui.report.figure import DASHES, PLAIN, Figure, absent, rows, scales
from pdq_tui.report.roofline import flops_text, short

_INK: Final = "#444444"
#: Room around points, ridges and ceilings, in decades.
_ROOM: Final = 0.3


def roofline_figure(lines: Sequence[Roofline]) -> Figure:
    """The stages of ``lines`` under the measured roofs of their devices."""
    title = "roofline: what each stage reached, and the limit above it"
    points = [(line, p) for line in lines for p in line.points]
    if not points:
        reasons = dict.fromkeys(r for line in lines for r in line.missing.values())
        return absent("roofline", title, "; ".join(reasons) or "no stage was measured")
    roofs = distinct_roofs(lines)
    span = _span([p for _, p in points], [roof for _, roof in roofs])
    labels = list(dict.fromkeys(line.label for line, _ in points))
    data = [_point(line, p, several=len(roofs) > 1) for line, p in points]
    edges = [
        e for n, (device, roof) in enumerate(roofs) for e in _edges(device, roof, span, n, len(roofs) > 1)
    ]

    def draw(width: int) -> Any:
        colour, shape, _ = scales(labels)
        legend = alt.Legend() if len(labels) > 1 else None

        def place(x: str, y: str) -> dict[str, Any]:
            (x0, x1), (y0, y1) = span
            return {
                "x": alt.X(f"{x}:Q", scale=alt.Scale(type="log", domain=[x0, x1], nice=False), title="FLOP per byte",
                           axis=alt.Axis(format=PLAIN, values=_ticks(x0, x1))),
                "y": alt.Y(f"{y}:Q", scale=alt.Scale(type="log", domain=[y0, y1], nice=False), title="TFLOP/s",
                           axis=alt.Axis(format=PLAIN, values=_ticks(y0, y1))),
            }  # fmt: skip

        def layer(found: Iterable[dict[str, Any]]) -> Any:
            return alt.Chart(rows(list(found)))

        roof = [
            layer(edges)
            .mark_rule(color=_INK, strokeWidth=1.5, strokeDash=DASHES[n % len(DASHES)])
            .transform_filter(f"datum.n == {n}")
            .encode(**place("x", "y"), x2="x2:Q", y2="y2:Q", description="tells:N")
            for n in range(len(roofs))
        ]
        named = [e for e in edges if e["name"]]
        ceilings = (
            layer(named)
            .mark_text(align="right", dy=-5, fontSize=11, color=_INK, limit=width // 2)
            .encode(**place("x2", "y2"), text="name:N")
        )
        ridges = (
            layer(e for e in named if e["ridge"])
            .mark_point(size=40, filled=False, color=_INK, opacity=1, shape="diamond")
            .encode(**place("x", "y"), description="tells:N")
        )
        marks = (
            layer(data)
            .mark_point(size=110, filled=True, opacity=1)
            .encode(
                **place("intensity", "tflops"),
                color=alt.Color("label:N", scale=colour, legend=legend),
                shape=alt.Shape("label:N", scale=shape, legend=legend),
                description="tells:N",
            )
        )
        letters = (
            layer(data)
            .mark_text(dx=-13, fontSize=12, fontWeight="bold")
            .encode(**place("intensity", "tflops"), text="letter:N")
        )
        return alt.layer(*roof, ceilings, ridges, marks, letters).properties(height=320)

    return Figure("roofline", title, _reads(lines, len(roofs)), draw)


def _reads(lines: Sequence[Roofline], roofs: int) -> str:
    text = (
        "P is a prefill, D one decode step. A point under the slope is bound by memory, one under a ceiling by arithmetic in "
        "that dtype; a diamond is the ridge between the two. What lies between a point and its roof is the engine's to gain. "
        "Bytes and FLOPs are counted, times and peaks measured: a point tells them where it is pointed at, and so does the "
        "table."
    )
    if not roofs:
        text += " No peak was measured, so there is no roof."
    elif roofs > 1:
        text += (
            " Each device has a roof of its own, in dashes of its own; a point belongs under its device's."
        )
    gone = [f"{line.label} {stage} ({why})" for line in lines for stage, why in line.missing.items()]
    return text + (f" Not drawn: {', '.join(gone)}." if gone else "")


def _point(line: Roofline, p: RoofPoint, several: bool) -> dict[str, Any]:
    bound = {
        "memory": "bound by memory",
        "compute": "bound by arithmetic",
        None: "no peaks to hold it against",
    }
    tells = (
        f"{p.name}{f' ({p.policy})' if p.policy != p.label else ''}: {format_bytes(p.bytes)}, {flops_text(p.flops)}, "
        f"{p.ms:.4g} ms; {short(p.intensity)} FLOP/byte, {short(p.tflops)} TFLOP/s, {short(p.gbps)} GB/s; {bound[p.bound(line.roof)]}"
        f"{f', {line.device}' if several else ''}"
    )
    return {
        "label": p.label, "letter": p.stage[:1].upper(), "intensity": p.intensity, "tflops": p.tflops, "tells": tells,
    }  # fmt: skip


Span = tuple[tuple[float, float], tuple[float, float]]


def _span(points: Sequence[RoofPoint], roofs: Sequence[Roof]) -> Span:
    """FLOP per byte and TFLOP/s that hold every point, ridge and ceiling."""
    ridges = [r for roof in roofs for d in roof.compute_tflops if (r := roof.ridge(d)) is not None]
    across = [math.log10(v) for v in (*(p.intensity for p in points), *ridges)]
    up = [
        math.log10(v)
        for v in (*(p.tflops for p in points), *(t for r in roofs for t in r.compute_tflops.values()))
    ]
    # To the right a ceiling needs room for its name.
    wide = max(across) - min(across)
    x = (min(across) - _ROOM, max(across) + _ROOM + 0.25 * wide)
    y = (min(up) - _ROOM, max(up) + _ROOM)
    return (10 ** x[0], 10 ** x[1]), (10 ** y[0], 10 ** y[1])


def _ticks(low: float, high: float) -> list[float]:
    """Decades; with 2 and 5 of each where there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    return [v for n in range(first, last + 1) for s in steps if low <= (v := s * 10.0**n) <= high]


def _edges(device: str, roof: Roof, span: Span, n: int, several: bool) -> list[dict[str, Any]]:
    """The slope up to the highest ridge, and a ceiling a dtype from its ridge on."""
    (x0, x1), (y0, y1) = span
    of = f", {device}" if several else ""
    found = []
    slope = roof.read_gbps / 1e3 if roof.read_gbps else None
    peaks = {d: t for d, t in roof.compute_tflops.items() if t > 0}
    if slope is not None:
        begin = max(x0, y0 / slope)
        end = min(x1, (max(peaks.values()) if peaks else y1) / slope)
        if begin < end:
            tells = f"memory: {short(roof.read_gbps or 0)} GB/s read{of}"
            found.append(_edge(n, begin, begin * slope, end, end * slope, "", False, tells))
    for dtype, peak in sorted(peaks.items()):
        ridge = roof.ridge(dtype)
        turns = "" if ridge is None else f", from {short(ridge)} FLOP/byte on"
        begin = x0 if ridge is None else max(x0, ridge)
        found.append(
            _edge(
                n,
                begin,
                peak,
                x1,
                peak,
                f"{dtype} {short(peak)}{of}",
                ridge is not None,
                f"{dtype}: {short(peak)} TFLOP/s{turns}{of}",
            )
        )
    return found


def _edge(
    n: int, x: float, y: float, x2: float, y2: float, name: str, ridge: bool, tells: str
) -> dict[str, Any]:
    return {"n": n, "x": x, "y": y, "x2": x2, "y2": y2, "name": name, "ridge": ridge, "tells": tells}
