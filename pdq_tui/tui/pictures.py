"""Which charts there are, and the picture of each from the session's view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdq_tui.core.metrics import METRICS
from pdq_tui.host.view import Point, SessionView
from pdq_tui.tui.device_panel import engine_gpu
from pdq_tui.tui.heading import Look
from pdq_tui.tui.plot_picture import Band, Curve, Level, Picture

#: Metrics that m goes through in a chart, then the device's own series.
METRIC_CHARTS: Final = (
    "tpot_ms", "bandwidth_gbps", "ttft_ms", "e2e_ms", "prefill_tokens_per_s", "decode_tokens_per_s", "itl_ms",
    "prefill_mfu", "mbu", "gap_ms",
)  # fmt: skip
MEMORY, POWER = "memory", "power"
CHARTS: Final = (*METRIC_CHARTS, MEMORY, POWER)
#: What the four places of the full grid show at first.
FIRST: Final = ("tpot_ms", "bandwidth_gbps", MEMORY, POWER)
WINDOWS: Final[tuple[float | None, ...]] = (120.0, None, 30.0)


@dataclass(frozen=True)
class Titled:
    """A picture with its frame's words. ``value``: the newest value as text, for a strip."""

    picture: Picture
    title: str
    subtitle: str
    value: str = ""


def window_words(window_s: float | None) -> str:
    if window_s is None:
        return "all"
    return f"last {window_s:.0f} s"


def titled(
    view: SessionView,
    chart: str,
    window_s: float | None,
    marks: Sequence[tuple[float, str]],
    look: Look,
    *,
    readonly: bool = False,
) -> Titled:
    """The chart called ``chart`` (one of CHARTS) as it is now. ``readonly``: no key starts anything."""
    if chart == MEMORY:
        return _memory(view, window_s, tuple(marks), look)
    if chart == POWER:
        return _power(view, window_s, tuple(marks))
    return _metric(view, chart, window_s, tuple(marks), _empty(view, readonly))


def _metric(
    view: SessionView, id_: str, window_s: float | None, marks: tuple[tuple[float, str], ...], empty: str
) -> Titled:
    metric = METRICS[id_]
    curves = tuple(
        Curve(arm, view.arms[arm].series.get(id_, ()), arm.lower(), dashed=arm == "B")
        for arm in ("A", "B")
        if arm in view.arms
    )
    levels: tuple[Level, ...] = ()
    peak = view.device.read_peak_gbps if view.device else None
    subtitle = window_words(window_s)
    if id_ == "bandwidth_gbps" and peak:
        levels = (Level("peak", peak),)
        subtitle = f"read peak {peak:.4g} · {subtitle}"
    percent = metric.unit == "1"
    picture = Picture(
        curves, levels, now=view.elapsed_s, window_s=window_s, zero=id_ in ("bandwidth_gbps", "mbu", "prefill_mfu"),
        marks=marks, empty=empty, scale=100.0 if percent else 1.0,
    )  # fmt: skip
    title = f"{metric.short} {metric.shown_unit}".strip()
    return Titled(picture, "BANDWIDTH GB/s (decode)" if id_ == "bandwidth_gbps" else title, subtitle)


def _empty(view: SessionView, readonly: bool) -> str:
    if view.workload_error:
        return "workload refused, see 6 Log"
    if view.model is None:
        return f"engine {view.engine.state}"
    if view.running:
        return "no request has ended yet"
    if view.wants_loop:
        return "starts when both arms are ready"
    return "read-only: no workload is started" if readonly else "no request yet: r starts the workload"


def _memory(
    view: SessionView, window_s: float | None, marks: tuple[tuple[float, str], ...], look: Look
) -> Titled:
    gpu = engine_gpu(view)
    on_gpu = gpu is not None
    points = view.sensor_series.get("memory_used_bytes" if on_gpu else "engine_rss_bytes", ())
    ready = [arm.ready for arm in view.arms.values() if arm.ready is not None]
    bands: tuple[Band, ...] = ()
    if ready:
        weights = max(r.weights.session_resident_bytes for r in ready) / 2**30
        kv = max(r.kv.allocated_bytes for r in ready) / 2**30
        bands = (Band("weights", weights, "▓", "#"), Band("kv", weights + kv, "▒", ":"))
    total = gpu.memory_total_bytes if gpu is not None else None
    levels = (Level("total", total / 2**30),) if total else ()
    picture = Picture(
        (Curve("used" if on_gpu else "RSS", points, "c"),), levels, bands, view.elapsed_s, window_s, True, marks,
        empty="no memory reading yet", scale=1 / 2**30,
    )  # fmt: skip
    what = "device memory (NVML)" if on_gpu else "engine RSS, sampled"
    filled = "now: weights # kv :" if look.plain else "now: weights ▓ kv ▒"
    subtitle = f"{what} · {filled}" if bands else what
    return Titled(picture, "MEMORY GiB", subtitle, _newest(points, 1 / 2**30, "GiB"))


def _power(view: SessionView, window_s: float | None, marks: tuple[tuple[float, str], ...]) -> Titled:
    gpu = engine_gpu(view)
    power = view.sensor_series.get("power_w", ())
    if gpu is not None and (gpu.power_w is not None or power):
        levels = (Level("cap", gpu.power_limit_w),) if gpu.power_limit_w else ()
        picture = Picture((Curve("W", power, "c"),), levels, (), view.elapsed_s, window_s, True, marks)
        cap = f"cap {gpu.power_limit_w:.0f} · " if gpu.power_limit_w else ""
        return Titled(picture, "POWER W", f"{cap}board average, NVML", _newest(power, 1.0, "W"))
    curves = (
        Curve("all", view.sensor_series.get("cpu_load", ()), "c"),
        Curve("engine", view.sensor_series.get("engine_load", ()), "b", dashed=True),
    )
    picture = Picture(
        curves, (), (), view.elapsed_s, window_s, True, marks, empty="no CPU reading yet", scale=100.0
    )
    return Titled(
        picture,
        "CPU LOAD %",
        f"power n/a ({power_missing(view)})",
        _newest(view.sensor_series.get("cpu_load", ()), 100.0, "%"),
    )


def power_missing(view: SessionView) -> str:
    """Why there is no power reading."""
    gpu = engine_gpu(view)
    if gpu is not None:
        return f"NVML: {gpu.missing.get('power_w', 'no reading')}"
    if view.device is not None and view.device.kind == "cpu":
        return "CPU run"
    return view.sensor_state.text if view.sensor_state is not None else "sensors starting"


def _newest(points: Sequence[Point], scale: float, unit: str) -> str:
    value = next((v for _, v in reversed(points) if v is not None), None)
    return "n/a" if value is None else f"{value * scale:.3g} {unit}"
