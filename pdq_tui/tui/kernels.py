"""Kernels and roofline: what each stage of each arm runs, and which of the device's limits it runs against."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Static

from pdq_tui.core import tracing
from pdq_tui.core.metrics import format_bytes
from pdq_tui.core.protocol import DeviceInfo, StageTrace, Traced
from pdq_tui.core.roofline import Roof, RoofPoint, arm_roofline, roof_point
from pdq_tui.host.view import ArmView, SessionView
from pdq_tui.report.roofline import flops_text
from pdq_tui.tui.chart import Chart
from pdq_tui.tui.lines import Line, LineList, drawn, fit, is_ascii, literal
from pdq_tui.tui.page import Page
from pdq_tui.tui.panels import ago
from pdq_tui.tui.roofline_plot import RoofPicture, draw_roof, signs

#: Snapshots of this run that are drawn, the last ones.
_SNAPSHOTS = 6
_STAGES = ("prefill", "decode")


class RooflineChart(Chart):
    """A chart that draws a ``RoofPicture``."""

    def __init__(self, *, marker: str = "braille", id: str | None = None) -> None:  # noqa: A002
        super().__init__(marker=marker, id=id)
        self.roof_picture = RoofPicture(Roof(None, {}))

    def plot(self, picture: RoofPicture) -> None:
        if picture != self.roof_picture:
            self.roof_picture = picture
            self._draw()

    def _draw(self) -> None:
        width, height = self.size
        self.drawn = draw_roof(self.roof_picture, width, height, self.marker)
        self.drawn_size = (width, height)
        self.refresh()


class KernelsScreen(Page):
    """Kernels by stage on the left, the roofline and its points on the right; narrower than 100 columns one of them."""

    TITLE_WORD = "5 KERNELS"
    DEFAULT_CSS = """
    KernelsScreen {
        & #panes { layout: horizontal; }
        & #body { layout: horizontal; }
        & #kernels { width: 1fr; height: 1fr; }
        & #right { width: 1fr; height: 1fr; }
        & #roof { height: 1fr; }
        & #points { height: auto; max-height: 10; min-height: 4; }
        & #point { height: 4; padding: 0 1; color: $text-muted; }
        &.-narrow #right { display: none; }
        &.-narrow.-roofline #right { display: block; }
        &.-narrow.-roofline #kernels { display: none; }
        &.-zoomed #kernels { display: none; }
        &.-zoomed.-table #kernels { display: block; }
        &.-zoomed.-table #right { display: none; }
        &.-short #points { max-height: 6; }
        &.-short #point { height: 2; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "t", "trace", "Profile", id="kernels.trace",
            tooltip="profile a burst of the active arm: one prefill, four decode steps, apart from all figures",
        ),
        Binding("v", "pane", "Table/Roof", id="kernels.pane", tooltip="table or roofline, where only one fits"),
        Binding("x", "difference", "A-B", id="kernels.difference", tooltip="kernels that differ between the arms, and back"),
        Binding("c", "categories", "Groups", id="kernels.categories", tooltip="kernels, or their categories only"),
        Binding("z", "zoom", "Zoom", id="kernels.zoom", tooltip="the focused side alone, and back"),
    ]  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.categories = self.differing = False
        self._bursts: dict[str, Traced] = {}
        self._points: list[tuple[str, str, RoofPoint]] = []
        self._roof = Roof(None, {})
        self._snapshots: dict[str, list[RoofPoint]] = {}
        self._asked: tuple[str, ...] = ()
        #: The arm whose burst was asked for, what it had before, and the sentence that says so.
        self._waits: tuple[str, Traced | None, str] | None = None

    def compose_body(self) -> ComposeResult:
        from textual.containers import Vertical

        table = LineList(id="kernels")
        table.add_class("panel")
        table.border_title = "kernels by stage"
        yield table
        with Vertical(id="right"):
            chart = RooflineChart(marker=getattr(self.app, "marker", "braille"), id="roof")
            chart.add_class("panel")
            chart.border_title = "roofline"
            yield chart
            points = LineList(id="points")
            points.add_class("panel")
            points.border_title = "stages"
            yield points
            yield Static(id="point", markup=False)

    def started(self) -> None:
        self.query_one("#kernels", LineList).focus()
        self._tick()
        self.call_after_refresh(self._tick)  # with the widths that the layout gave
        self.set_interval(1.0, self._tick)

    def on_screen_resume(self) -> None:
        if self.is_mounted:
            self._tick()

    def resized(self) -> None:
        self.call_after_refresh(self._tick)

    @property
    def help_metric(self) -> str:
        return "decode_explained" if self.query_one("#points").has_focus else "prefill_explained"

    # -- what is shown

    def _tick(self) -> None:
        if not self.is_current:
            return
        view: SessionView = self._session().view(1.0)
        self._end_waiting(view)
        self._show_kernels(view)
        self._show_points(view)
        if view.snapshots[-_SNAPSHOTS:] != self._asked:
            self._asked = view.snapshots[-_SNAPSHOTS:]
            self._read(Path(view.run_dir), self._asked)

    def _end_waiting(self, view: SessionView) -> None:
        """The burst that was asked for is there: its sentence goes, unless another one stands in its place."""
        if self._waits is not None:
            arm, before, sentence = self._waits
            if view.traces.get(arm) is not before:
                self._waits = None
                if self.said == sentence:
                    self.say("")

    def _session(self) -> Any:
        return getattr(self.app, "session")  # noqa: B009 - the app's class is not this room's to know

    @work(thread=True, group="snapshots", exclusive=True)
    def _read(self, run_dir: Path, names: Sequence[str]) -> None:
        found = {name: snapshot_points(run_dir, name) for name in names if name not in self._snapshots}
        if found:
            self.app.call_from_thread(self._add, found)

    def _add(self, found: dict[str, list[RoofPoint]]) -> None:
        self._snapshots |= found
        self._tick()

    def _show_kernels(self, view: SessionView) -> None:
        box = self.query_one("#kernels", LineList)
        width = max(20, box.size.width - 4)
        current = {a: t for a, t in view.traces.items() if _of_now(t, view.arms.get(a))}
        if self.differing and len(current) == 2:
            lines = difference_lines(current, width)
        else:
            lines = [
                line
                for arm in sorted(view.arms)
                for line in arm_lines(
                    arm,
                    view.arms[arm],
                    current.get(arm),
                    self.categories,
                    width,
                    self.wanted,
                    view.trace_ages_s.get(arm),
                )
            ]
        box.set_lines(
            [Line(tuple((drawn(self.app, t), role) for t, role in line.parts), line.key) for line in lines]
        )
        self._bursts = current
        self._show_kernel()
        device = view.device
        self.set_title(literal(device.name) if device is not None else "no device yet")

    def _show_kernel(self) -> None:
        box = self.query_one("#kernels", LineList)
        text = kernel_text(self._bursts, box.key)
        if text is None:
            text = "one profiled burst; its times are in no figure" if self._bursts else "t profiles a burst"
        box.border_subtitle = Content(fit(drawn(self.app, text), max(4, box.size.width - 4)).rstrip())

    def _show_points(self, view: SessionView) -> None:
        self._roof = roof_of(view.device)
        live = [point for arm in sorted(view.arms) for point in arm_points(arm, view.arms[arm])]
        stored = [point for name in self._asked for point in self._snapshots.get(name, ())]
        points = [*live, *stored]
        roles = {"A": "a", "B": "b"}
        self._points = [
            (sign, roles.get(p.label, "c"), p) for sign, p in zip(signs(points), points, strict=True)
        ]
        box = self.query_one("#points", LineList)
        width = max(20, box.size.width - 5)
        lines = [
            Line.of(fit(point_line(p, self._roof), width).rstrip(), key=p.name) for _, _, p in self._points
        ]
        box.set_lines(
            [Line(tuple((drawn(self.app, t), r) for t, r in line.parts), line.key) for line in lines]
            or [Line.of("no stage was measured yet", "dim")]
        )
        chart = self.query_one("#roof", RooflineChart)
        device = view.device
        chart.border_subtitle = Content(
            literal(drawn(self.app, f"read {self._roof.read_gbps:.0f} GB/s, measured; TFLOP/s up"))
            if device is not None and self._roof.read_gbps
            else "no peaks were measured yet"
        )
        self._show_choice()

    def _show_choice(self) -> None:
        box = self.query_one("#points", LineList)
        chosen = next((p for _, _, p in self._points if p.name == box.key), None)
        self.query_one("#roof", RooflineChart).plot(
            RoofPicture(self._roof, tuple(self._points), None if chosen is None else chosen.name)
        )
        text = "" if chosen is None else point_text(chosen, self._roof)
        self.query_one("#point", Static).update(drawn(self.app, literal(text)))

    def on_line_list_moved(self, event: LineList.Moved) -> None:
        if event.lines.id == "points":
            self._show_choice()
        else:
            self._show_kernel()

    def filtered(self) -> None:
        self._tick()

    # -- keys

    def action_trace(self) -> None:
        view: SessionView = self._session().view(1.0)
        arm = view.arms.get(view.active)
        if arm is None or arm.ready is None or view.workload is None:
            self.say(f"arm {view.active} is not ready yet: nothing to profile")
            return

        def profile() -> None:
            self._session().trace(view.active)
            self.say(
                f"profiling a burst of arm {view.active}, between two requests; a or b in 1 Live chooses the other arm"
            )
            self._waits = view.active, view.traces.get(view.active), self.said

        def refused() -> None:
            self.say(
                "an evaluation runs, and a burst beside it would spoil its figures: 4 shows it, r there stops it"
            )

        unless: Any = getattr(self.app, "unless_evaluating", None)
        if unless is None:
            profile()
        else:
            unless("the burst", profile, refused)

    def action_pane(self) -> None:
        self.toggle_class("-roofline")
        self.query_one("#points" if self.has_class("-roofline") else "#kernels", LineList).focus()
        self.call_after_refresh(self._tick)

    def action_difference(self) -> None:
        view: SessionView = self._session().view(1.0)
        both = [a for a, t in view.traces.items() if _of_now(t, view.arms.get(a))]
        if not self.differing and len(both) < 2:
            self.say("a difference needs a burst of both arms: t, the other arm in 1 Live, t")
            return
        self.differing = not self.differing
        self._tick()

    def action_categories(self) -> None:
        self.categories = not self.categories
        self._tick()

    def action_zoom(self) -> None:
        table = self.query_one("#kernels", LineList)
        self.set_class(table.has_focus, "-table")
        self.toggle_class("-zoomed")
        self.call_after_refresh(self._tick)

    def on_mount(self) -> None:
        super().on_mount()
        if is_ascii(self.app):
            self.query_one("#roof", RooflineChart).marker = "ascii"


# -- the table -----------------------------------------------------------------------------------------------------------


def _of_now(t: Traced, arm: ArmView | None) -> bool:
    """Whether a burst is of the policy that its arm follows."""
    return bool(
        t.stages and arm is not None and arm.ready is not None and arm.ready.policy.digest == t.policy_digest
    )


def arm_lines(
    arm: str,
    view: ArmView,
    traced: Traced | None,
    categories: bool,
    width: int,
    wanted: str,
    age_s: float | None = None,
) -> list[Line]:
    """One arm's kernels by stage, and the age of the burst that showed them; without one what its coverage names."""
    policy = view.ready.policy.name if view.ready is not None else "not ready"
    when = f"  burst {ago(age_s)}" if traced is not None and age_s is not None else ""
    lines = [Line.of(fit(literal(f"{arm}  {policy}{when}"), width).rstrip(), "head")]
    if traced is None:
        for name in _STAGES:
            covered = view.ready.coverage.get(name) if view.ready is not None else None
            named = (
                ", ".join(f"{n} × {kernel}" for kernel, n in covered.kernels.items())
                if covered
                else "not known"
            )
            runner = f"  [{covered.runner}]" if covered is not None else ""
            lines.append(Line.of(fit(literal(f"  {name}: {named}{runner}"), width).rstrip()))
        lines.append(Line.of("  placed, not yet seen to run: t profiles a burst", "dim"))
        return lines
    for stage in traced.stages:
        lines += stage_lines(arm, stage, categories, width, wanted)
    return lines


def stage_lines(arm: str, stage: StageTrace, categories: bool, width: int, wanted: str) -> list[Line]:
    passes = "1 pass" if stage.steps == 1 else f"{stage.steps} passes"
    over = f", profiler ×{stage.overhead:.1f}" if stage.overhead else ""
    lines = [
        Line.of(
            fit(f"  {stage.stage}  {stage.trace_ms:.1f} ms in {passes}{over}", width).rstrip(), "mark",
            key=(arm, stage.stage),
        )
    ]  # fmt: skip
    total = stage.trace_ms or 1.0
    if categories:
        for kind, ms in tracing.by_category(stage).items():
            lines.append(_row(width, ms / total, ms, None, kind, ""))
    else:
        for kernel in stage.kernels:
            if kernel.share < 0.002 or (wanted and wanted not in f"{kernel.name} {kernel.category}".lower()):
                continue
            lines.append(
                _row(
                    width,
                    kernel.share,
                    kernel.ms,
                    kernel.calls,
                    kernel.name,
                    kernel.category,
                    (arm, stage.stage, kernel.name, kernel.category),
                )
            )
        lines.append(_row(width, stage.between_ms / total, stage.between_ms, None, "between kernels", ""))
    if stage.launch_bound:
        lines.append(Line.of(fit(f"  ! {stage.launch_reason}", width).rstrip(), "warn"))
    lines += [
        Line.of(fit(literal(f"  ✗ not what the policy says: {why}"), width).rstrip(), "bad")
        for why in stage.unmatched
    ]
    return lines


_KINDS = {
    tracing.LAYER: "layer", tracing.GEMM: "GEMM", tracing.GEMV: "GEMV", "dequantize": "dequant", "quantize": "quant", "attention": "attn",
    "norm/rope/elementwise": "elemw", "sampling": "sample",
}  # fmt: skip


def _row(
    width: int,
    share: float,
    ms: float,
    calls: int | None,
    name: str,
    kind: str,
    key: Hashable | None = None,
) -> Line:
    head = f"  {share:>6.1%} {ms:>8.2f}"
    count = f" {calls:>5}" if calls is not None else " " * 6
    short = f" {_KINDS.get(kind, kind):<8}" if kind else " " * 9
    if width < 44:
        count = ""
    room = max(4, width - len(head + count + short) - 1)
    return Line(((f"{head}{count}{short} ", ""), (fit(literal(name), room).rstrip(), "")), key)


def kernel_text(traces: dict[str, Traced], key: Hashable | None) -> str | None:
    """What the row under the cursor did: bytes and FLOPs where its shapes tell, with their rates."""
    if not isinstance(key, tuple) or len(key) != 4 or key[0] not in traces:
        return None
    arm, stage_name, name, kind = key
    stage = next((s for s in traces[arm].stages if s.stage == stage_name), None)
    kernel = next((k for k in stage.kernels if (k.name, k.category) == (name, kind)), None) if stage else None
    if kernel is None:
        return None
    parts = [f"{kernel.calls} calls"]
    if kernel.bytes is not None and kernel.ms:
        parts.append(f"{format_bytes(kernel.bytes)}, {kernel.bytes / kernel.ms / 1e6:.3g} GB/s")
    if kernel.flops is not None and kernel.ms:
        parts.append(f"{kernel.flops / 1e9:.3g} GFLOP, {kernel.flops / kernel.ms / 1e9:.3g} TFLOP/s")
    if len(parts) == 1:
        parts.append("bytes and FLOPs n/a: shapes do not tell")
    return ", ".join(parts)


def difference_lines(traces: dict[str, Traced], width: int) -> list[Line]:
    """Kernels of B and A that came, went or changed, by stage, ms a pass."""
    one, two = traces["B"], traces["A"]
    lines = []
    for before, after in tracing.pairs(one.stages, two.stages):
        lines.append(
            Line.of(f"{before.stage}: B → A, ms a pass under the profiler", "head", key=("", before.stage))
        )
        for c in tracing.difference(before, after):
            if c.word == "same":
                continue
            a = "" if c.before_ms is None else f"{c.before_ms:.2f}"
            b = "" if c.after_ms is None else f"{c.after_ms:.2f}"
            head = f"  {c.word:<6} {a:>8} {b:>8}  "
            lines.append(Line.of(head + fit(literal(c.name), max(4, width - len(head)))))
    return lines


# -- the roofline --------------------------------------------------------------------------------------------------------


def roof_of(device: DeviceInfo | None) -> Roof:
    if device is None:
        return Roof(None, {})
    return Roof(device.read_peak_gbps, dict(device.compute_peak_tflops))


def arm_points(arm: str, view: ArmView) -> list[RoofPoint]:
    """Prefill and decode of a live arm: the last request's work over the median times."""
    last, policy = view.last, view.ready.policy.name if view.ready is not None else ""
    if last is None or view.ready is None or last.policy_digest not in ("", view.ready.policy.digest):
        return []
    times = {
        s: view.stats[m].median if m in view.stats else None
        for s, m in (("prefill", "prefill_ms"), ("decode", "decode_step_ms"))
    }
    found = (
        roof_point(arm, "prefill", policy, last.prefill_bytes, last.prefill_flops, times["prefill"]),
        roof_point(arm, "decode", policy, last.bytes_per_step, last.decode_flops, times["decode"]),
    )
    return [p for p in found if p is not None]


def snapshot_points(run_dir: Path, name: str) -> list[RoofPoint]:
    """Prefill and decode of one snapshot of this run; nothing where it cannot be read."""
    try:
        body = json.loads((run_dir / "snapshots" / name / "manifest.json").read_text(encoding="utf-8"))
        return list(arm_roofline(body["arm"], None, str(int(name))).points)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def point_line(p: RoofPoint, roof: Roof) -> str:
    bound = p.bound(roof)
    return f"{p.name:<10} {p.intensity:>7.3g} F/B {p.tflops:>7.3g} TF/s  {f'{bound}-bound' if bound else 'n/a: no peaks'}"


def point_text(p: RoofPoint, roof: Roof) -> str:
    """Bytes, FLOPs, time, and where its dtype changes side."""
    ridge = roof.ridge(p.dtype)
    side = f"; {p.dtype} turns compute-bound at {ridge:.3g} FLOP/byte" if ridge is not None else ""
    return f"{p.name} ({p.policy}): {format_bytes(p.bytes)}, {flops_text(p.flops)}, {p.ms:.3g} ms: {p.gbps:.3g} GB/s{side}"
