"""The live screen: what runs now, both arms side by side, on a timer of its own.

Every picture is one call of ``session.view()``; keys change the session's intentions and draw again at once.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.events import Resize
from textual.screen import Screen
from textual.widget import Widget

from pdq_tui.core.policy import Stage
from pdq_tui.host.view import SessionView
from pdq_tui.tui import device_panel, footing, heading, keys, modals, panels, pictures
from pdq_tui.tui.ask import Pick, Write
from pdq_tui.tui.chart import Chart
from pdq_tui.tui.copying import copy_text
from pdq_tui.tui.heading import Display, Look
from pdq_tui.tui.plot import spark
from pdq_tui.tui.rows import Rows, clip, row

if TYPE_CHECKING:
    from pdq_tui.tui.app import PdqApp

#: What is on the screen in each layout, from top to bottom; the other panels are not there.
_ALWAYS = ("header", "policies", "bottom", "keys")
LAYOUTS: dict[str, tuple[str, ...]] = {
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
_PANELS = ("top", "prefill", "decode", "device", "stages", "row1", "chart0", "chart1", "side", "row2", "chart2",
           "chart3", "strips", "strip0", "strip1", "too-small")  # fmt: skip
_ROW_OF = {"prefill": "top", "decode": "top", "device": "top", "chart0": "row1", "chart1": "row1", "side": "row1",
           "chart2": "row2", "chart3": "row2"}  # fmt: skip
#: A tick this late, three times in a row, means that the terminal does not keep up.
_LATE_S = 0.5
_MARKS = 50


def layout_for(width: int, height: int) -> str:
    """full, mid, small (numbers only) or tiny (one line)."""
    if width >= 120 and height >= 36:
        return "full"
    if width >= 80 and height >= 24:
        return "mid"
    return "small" if width >= 60 and height >= 20 else "tiny"


class LiveScreen(Screen[None]):
    """``window_s``: how far back the charts reach. ``frozen``: the picture that a paused display shows."""

    BINDINGS: ClassVar[list[BindingType]] = list(keys.LIVE)
    AUTO_FOCUS = ""

    def __init__(self) -> None:
        super().__init__()
        self.charts = list(pictures.FIRST)
        self.window_s: float | None = pictures.WINDOWS[0]
        self.frozen: SessionView | None = None
        self.zoomed: str | None = None
        self.layout_name = "tiny"
        self.marks: list[tuple[float, str]] = []
        self.last: SessionView | None = None
        self._charts_due = 0.0
        self._tick_due: float | None = None
        self._late = 0
        self._skip = False

    @property
    def pdq(self) -> PdqApp:
        return cast("PdqApp", self.app)

    @property
    def look(self) -> Look:
        return Look(self.pdq.ascii)

    def compose(self) -> ComposeResult:
        marker = self.pdq.marker
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

    def on_mount(self) -> None:
        self.set_class(self.pdq.ascii, "-ascii")
        self._arrange()
        self.redraw()
        fps = self.pdq.fps
        if fps > 0:
            self.set_interval(1 / fps, self._tick)

    def on_resize(self, event: Resize) -> None:
        self._arrange()
        self.call_after_refresh(self.redraw)

    def on_screen_resume(self) -> None:
        self.call_after_refresh(self.redraw)

    # -- layout ------------------------------------------------------------------------------------------------------------

    def _arrange(self) -> None:
        """Show the panels of the layout that fits; of a zoomed one only that and its row."""
        name = layout_for(self.app.size.width, self.app.size.height)
        shown = set(LAYOUTS[name])
        if self.zoomed is not None and self.zoomed not in shown:
            self.zoomed = None
        if self.zoomed is not None:
            shown = {*_ALWAYS, self.zoomed, _ROW_OF.get(self.zoomed, self.zoomed)}
        self.layout_name = name
        self.set_class(name == "small", "-small")
        self.set_class(self.zoomed is not None, "-zoomed")
        for widget_id in (*_ALWAYS, *_PANELS):
            self.query_one(f"#{widget_id}").display = widget_id in shown
        if self.focused is not None and not self.focused.display:
            self.set_focus(None)

    # -- drawing -----------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """The timer's: numbers each time, charts once a second. Late ticks halve what a slow terminal is sent."""
        now = time.monotonic()
        period = 1 / self.pdq.fps
        if self._tick_due is not None and now - self._tick_due > _LATE_S:
            self._late = min(self._late + 2, 8)
        elif self._late:
            self._late -= 1
        self._tick_due = now + period
        self._skip = self.slow and not self._skip
        if self._skip:
            return
        charts = now >= self._charts_due
        if charts:
            self._charts_due = now + 0.95
        self.redraw(charts=charts)

    @property
    def slow(self) -> bool:
        return self._late >= 6

    def redraw(self, *, charts: bool = True) -> None:
        """Take a picture of the session and draw what changed of it."""
        if self not in self.app.screen_stack or (self.app.screen is not self and opaque(self.app.screen)):
            return  # another screen is in front
        view = self._with_fetch(self.pdq.session.view(self.window_s))
        self._mark(view)
        display = Display(readonly=self.pdq.readonly, fps=self.pdq.fps)
        if self.slow:
            display = replace(display, slow_fps=1.0)
        if self.frozen is not None:
            display = replace(display, frozen_s=max(view.elapsed_s - self.frozen.elapsed_s, 0.0))
            view = self.frozen
        self.last = view
        self._draw_rows(view, display)
        if charts:
            self._draw_charts(view)

    def _with_fetch(self, view: SessionView) -> SessionView:
        fetch = self.pdq.fetching
        return view if fetch is None else replace(view, tasks=(fetch, *view.tasks))

    def _mark(self, view: SessionView) -> None:
        before = self.last
        if before is None or self.frozen is not None:
            return
        if view.active != before.active and not view.interleave:
            self.marks.append((view.elapsed_s, view.active))
        if len(view.snapshots) > len(before.snapshots):
            self.marks.append((view.elapsed_s, "s"))
        del self.marks[:-_MARKS]

    def _draw_rows(self, view: SessionView, display: Display) -> None:
        look, width = self.look, self.app.size.width
        if self.layout_name == "tiny":
            size = self.app.size
            text = f"window too small: {size.width}x{size.height}, needs 60x20. The run goes on."
            self._rows("too-small").show(
                [row(text[i : i + max(width, 1)]) for i in range(0, len(text), max(width, 1))]
            )
            return
        self._rows("header").show([heading.header(view, display, width, look)])
        self._rows("policies").show([heading.policy_line(view, width, look)])
        height = self._rows("bottom").size.height
        self._rows("bottom").show(footing.bottom_rows(view, width, height, look))
        self._rows("keys").show([self._key_row(view, width)])
        title, source = device_panel.device_title(view)
        for stage in ("prefill", "decode"):
            panel = self._rows(stage)
            if panel.display:
                rows = panels.stage_rows(view, stage, panel.size.width, look)
                panel.show(rows, panels.stage_title(view, stage, look), panels.stage_subtitle(view, stage))
        for name in ("device", "side"):
            panel = self._rows(name)
            if panel.display:
                panel.show(device_panel.device_rows(view, panel.size.width, look), title, source)
        stages = self._rows("stages")
        if stages.display:
            words = panels.live_words(view, look)
            stages.show(panels.both_rows(view, stages.size.width, look), f"STAGES  {words}".rstrip())

    def _draw_charts(self, view: SessionView) -> None:
        for index, chart_id in enumerate(self.charts):
            widget = self.query_one(f"#chart{index}", Chart)
            if widget.display:
                shown = pictures.titled(
                    view, chart_id, self.window_s, self.marks, self.look, readonly=self.pdq.readonly
                )
                widget.metric = chart_id
                title = shown.title + ("  (m: next)" if self.layout_name == "mid" else "")
                widget.show(shown.picture, title, self.look.own(shown.subtitle))
        for index, chart_id in enumerate((pictures.MEMORY, pictures.POWER)):
            strip = self._rows(f"strip{index}")
            if strip.display:
                shown = pictures.titled(view, chart_id, self.window_s, (), self.look)
                bars = max(strip.size.width - len(shown.value) - 4, 0)
                points = shown.picture.curves[0].points if shown.picture.curves else ()
                line = row(" ", (spark(points, bars, plain=self.look.plain), "a"), f"  {shown.value}")
                strip.show([clip(line, strip.size.width)], shown.title)

    def _rows(self, widget_id: str) -> Rows:
        return self.query_one(f"#{widget_id}", Rows)

    def _key_row(self, view: SessionView, width: int) -> tuple[tuple[str, str], ...]:
        """The keys that matter most, as many as fit."""
        names = self.pdq.options.keys

        def key(*ids: str) -> str:
            return "/".join(keys.shown(i, names) for i in ids)

        stop = "Stop" if view.running or view.wants_loop else "Start"
        screens = " ".join(f"{key(f'screen.{mode}')} {word}" for _, mode, word in keys.SCREENS)
        changing = [
            f"{key('live.run')} {stop}",
            f"{key('live.arm_a', 'live.arm_b')} Arm",
            f"{key('live.prefill', 'live.decode')} Stage",
            f"{key('live.interleave')} ABBA",
            f"{key('live.snapshot')} Snap",
        ]
        items = [
            *([] if self.pdq.readonly else changing),
            f"{key('app.help')} Help",
            f"{key('app.export')} Export",
            f"{key('live.zoom')} Zoom",
            f"{key('live.freeze')} Pause",
        ]
        if width < 110:
            screens = screens.replace("Compare", "Cmp").replace("Policies", "Pol")
        if width < 80:
            screens = " ".join(key(f"screen.{mode}") for _, mode, _ in keys.SCREENS) + " Screens"
        text = f" {screens} {self.look.own('│')}"
        for item in items:
            if len(text) + 1 + len(item) <= width:
                text += f" {item}"
        return row(text)

    # -- keys --------------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return not (action in keys.CHANGING and self.pdq.readonly)

    def now(self) -> SessionView:
        """The session's newest picture, whatever the display shows."""
        return self.pdq.session.view(self.window_s)

    def action_run(self) -> None:
        view = self.now()
        if view.running or view.wants_loop:
            self.pdq.session.stop()
        else:
            self.pdq.session.start_loop()
        self.redraw(charts=False)

    def action_restart(self) -> None:
        self.pdq.session.restart_engine()
        self.redraw(charts=False)

    def action_arm(self, arm: str) -> None:
        """A choice of one arm ends the alternation of both."""
        if self.now().interleave:
            self.pdq.session.interleave(False)
        self.pdq.session.select(arm)
        self.redraw(charts=False)

    def action_interleave(self) -> None:
        self.pdq.session.interleave(not self.now().interleave)
        self.redraw(charts=False)

    def action_stage(self, stage: Stage) -> None:
        view = self.now()
        arm = view.active
        policy = heading.wanted_policy(view.arms.get(arm))
        if policy is None:
            self.pdq.session.note("warn", f"arm {arm} has no policy yet")
            self.redraw(charts=False)
            return

        def chosen(label: str | None) -> None:
            if label is not None and label != policy.stage(stage).format.label:
                self.pdq.session.set_policy(arm, policy.with_stage(stage, modals.STAGES_BY_LABEL[label]))
            self.redraw(charts=False)

        question = f"arm {arm}: what {stage} does with the weights"
        self.app.push_screen(
            Pick(question, modals.stage_choices(policy, stage), policy.stage(stage).format.label), chosen
        )

    def action_kv(self) -> None:
        view = self.now()
        policy = heading.wanted_policy(view.arms.get(view.active))
        current = policy.kv.decode if policy else "bf16"
        self.app.push_screen(Pick(f"arm {view.active}: the KV cache", modals.KV_CHOICES, current))

    def action_snapshot(self) -> None:
        self.pdq.save_snapshots(self._measured_arms(), "")

    def action_snapshot_note(self) -> None:
        arms = self._measured_arms()

        def written(note: str | None) -> None:
            if note is not None:
                self.pdq.save_snapshots(arms, note)

        self.app.push_screen(Write("note for the snapshot", "", modals.check_note), written)

    def _measured_arms(self) -> list[str]:
        """The active arm; while both alternate, both: they are to be compared."""
        view = self.now()
        if not view.interleave:
            return [view.active]
        return [name for name in sorted(view.arms) if view.arms[name].requests] or [view.active]

    def action_freeze(self) -> None:
        self.frozen = None if self.frozen is not None else self.now()
        self.redraw()

    def action_metric(self, step: int) -> None:
        index = self._chart_index()
        place = pictures.CHARTS.index(self.charts[index])
        self.charts[index] = pictures.CHARTS[(place + step) % len(pictures.CHARTS)]
        self.redraw()

    def _chart_index(self) -> int:
        """The focused chart, else the first."""
        focused = self.focused
        if isinstance(focused, Chart) and focused.id:
            return int(focused.id[-1])
        return 0

    def action_window(self) -> None:
        place = pictures.WINDOWS.index(self.window_s)
        self.window_s = pictures.WINDOWS[(place + 1) % len(pictures.WINDOWS)]
        self.redraw()

    def action_zoom(self) -> None:
        if self.zoomed is not None:
            self.zoomed = None
        else:
            focused = self.focused
            self.zoomed = focused.id if focused is not None and focused.id else "chart0"
        self._arrange()
        self.call_after_refresh(self.redraw)

    def action_clear_marks(self) -> None:
        self.marks.clear()
        self.redraw()

    def action_escape(self) -> None:
        """Ends zoom, else cancels what is under way, else ends the pause. Never quits."""
        if self.zoomed is not None:
            self.action_zoom()
        elif self._with_fetch(self.now()).tasks:
            self.pdq.cancel_tasks()
        elif self.frozen is not None:
            self.action_freeze()
        else:
            self.set_focus(None)

    def action_focus_panel(self, step: int) -> None:
        if step > 0:
            self.focus_next()
        else:
            self.focus_previous()

    def action_copy(self) -> None:
        view = self.now()
        self.pdq.session.note(
            "info", copy_text(self.app, panels.summary_text(view), "live", Path(view.run_dir))
        )
        self.redraw(charts=False)

    @property
    def help_metric(self) -> str | None:
        """The metric of the focused panel, for the help."""
        focused = self.focused
        if isinstance(focused, (Chart, Rows)):
            return focused.metric
        return None


def opaque(screen: Screen[Any]) -> bool:
    """Whether nothing of what lies below ``screen`` is seen."""
    return screen.styles.background.a == 1


def _panel(widget: Widget) -> Widget:
    widget.add_class("panel")
    return widget
