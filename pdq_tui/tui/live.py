"""The live screen: what runs now, both arms side by side, on a timer of its own.

Every picture is one call of ``session.view()``; keys change the session's intentions and draw again at once.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.events import Resize
from textual.screen import Screen

from pdq_tui.core.policy import Stage
from pdq_tui.host.view import SessionView
from pdq_tui.tui import heading, keys, kv_edit, live_layout, modals, panels, pictures
from pdq_tui.tui.ask import Pick, Write
from pdq_tui.tui.chart import Chart
from pdq_tui.tui.copying import copy_text
from pdq_tui.tui.heading import Display, Look
from pdq_tui.tui.live_drawing import Drawing
from pdq_tui.tui.rows import Rows
from pdq_tui.tui.runnable import refusals

if TYPE_CHECKING:
    from pdq_tui.tui.app import PdqApp

#: A tick this late, three times in a row, means that the terminal does not keep up.
_LATE_S = 0.5
_MARKS = 50


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
        yield from live_layout.widgets(self.pdq.marker)

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
        size = self.app.size
        self.layout_name, shown, self.zoomed = live_layout.arranged(size.width, size.height, self.zoomed)
        self.set_class(self.layout_name == "small", "-small")
        self.set_class(self.zoomed is not None, "-zoomed")
        for widget_id in live_layout.WIDGETS:
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
        display = Display(readonly=self.pdq.readonly, fps=self.pdq.fps, first=self.pdq.options.first)
        if self.slow:
            display = replace(display, slow_fps=1.0)
        if self.frozen is not None:
            display = replace(display, frozen_s=max(view.elapsed_s - self.frozen.elapsed_s, 0.0))
            view = self.frozen
        self.last = view
        drawing = Drawing(self, view, display, self.look, self.layout_name, self.pdq.options.keys)
        drawing.rows()
        if charts:
            drawing.charts(self.charts, self.window_s, self.marks)

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

    # -- keys --------------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return keys.works(action, self.pdq.readonly)

    def now(self) -> SessionView:
        """The session's newest picture, whatever the display shows."""
        return self.pdq.session.view(self.window_s)

    def action_run(self) -> None:
        view = self.now()
        if view.running or view.wants_loop:
            self.pdq.session.stop()
        else:
            self.pdq.unless_evaluating("the workload", self.pdq.session.start_loop)
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
            self._no_policy(arm)
            return

        def chosen(label: str | None) -> None:
            if label is not None and label != policy.stage(stage).format.label:
                self.pdq.session.set_policy(arm, policy.with_stage(stage, modals.STAGES_BY_LABEL[label]))
            self.redraw(charts=False)

        question = f"arm {arm}: what {stage} does with the weights"
        self.app.push_screen(
            Pick(
                question,
                modals.stage_choices(policy, stage, refusals(view)),
                policy.stage(stage).format.label,
            ),
            chosen,
        )

    def action_kv(self) -> None:
        view = self.now()
        arm = view.active
        policy = heading.wanted_policy(view.arms.get(arm))
        if policy is None:
            self._no_policy(arm)
            return

        def chosen(label: str | None) -> None:
            if label is not None and label != policy.kv.label:
                self.pdq.session.set_policy(arm, policy.with_kv(kv_edit.BY_LABEL[label]))
            self.redraw(charts=False)

        question = f"arm {arm}: the KV cache, as prefill/decode read it"
        self.app.push_screen(Pick(question, kv_edit.presets(view.model), policy.kv.label), chosen)

    def _no_policy(self, arm: str) -> None:
        self.pdq.session.note("warn", f"arm {arm} has no policy yet")
        self.redraw(charts=False)

    def action_energy(self) -> None:
        """Energy by stage of the active arm, or of both while they alternate; a sentence where it cannot be counted."""
        view = self.now()
        arms = [a for a in self._measured_arms() if a in view.arms and view.arms[a].ready is not None]
        if view.energy_missing is not None:
            self.pdq.session.note("warn", f"no energy by stage: {view.energy_missing}")
        elif not arms or view.workload is None:
            self.pdq.session.note("warn", f"arm {view.active} is not ready yet: no energy to measure")
        else:
            self.pdq.unless_evaluating("measuring energy", partial(self._measure_energy, arms))
        self.redraw(charts=False)

    def _measure_energy(self, arms: list[str]) -> None:
        self.pdq.session.measure_energy(arms)
        told = f"energy by stage of arm {' and '.join(arms)}: half a minute each, apart from all figures"
        self.pdq.session.note("info", told)
        self.redraw(charts=False)

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

    def action_show_metric(self, chart: str) -> None:
        """``chart``: one of ``pictures.CHARTS``; into the focused chart, else the first."""
        self.charts[self._chart_index()] = chart
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
