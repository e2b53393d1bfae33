"""Drawing of the live screen: one picture of the session into the panels that its layout has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from textual.screen import Screen

from pdq_tui.host.view import SessionView
from pdq_tui.tui import device_panel, footing, heading, panels, pictures
from pdq_tui.tui.chart import Chart
from pdq_tui.tui.heading import Display, Look
from pdq_tui.tui.lines import Row
from pdq_tui.tui.plot import spark
from pdq_tui.tui.rows import Rows, clip, row


@dataclass(frozen=True)
class Drawing:
    """What is drawn and how. ``layout``: see ``live_layout``; ``keys``: binding id → keys, where they were moved."""

    screen: Screen[Any]
    view: SessionView
    display: Display
    look: Look
    layout: str
    keys: Mapping[str, str]

    def rows(self) -> None:
        """Everything but the charts."""
        view, look, size = self.view, self.look, self.screen.app.size
        if self.layout == "tiny":
            text = f"window too small: {size.width}x{size.height}, needs 60x20. The run goes on."
            self._rows("too-small").show(
                [row(text[i : i + max(size.width, 1)]) for i in range(0, len(text), max(size.width, 1))]
            )
            return
        width, readonly = size.width, self.display.readonly
        self._rows("header").show([heading.header(view, self.display, width, look)])
        self._rows("policies").show([heading.policy_line(view, width, look)])
        height = self._rows("bottom").size.height
        hint: list[Row] = []
        if self._greets and self.layout == "small" and not view.tasks:  # where there is no chart to say it in
            hint = [row(f" {text}") for text in footing.first_words(self.keys)]
        self._rows("bottom").show(footing.bottom_rows(view, width, height, look, hint))
        self._rows("keys").show([footing.key_row(view, width, look, readonly, self.keys)])
        title, source = device_panel.device_title(view)
        for stage in ("prefill", "decode"):
            panel = self._rows(stage)
            if panel.display:
                rows = panels.stage_rows(view, stage, panel.size.width, look, readonly=readonly)
                panel.show(
                    rows,
                    panels.stage_title(view, stage, look),
                    panels.stage_subtitle(view, stage, panel.size.width - 4),
                )
        for name in ("device", "side"):
            panel = self._rows(name)
            if panel.display:
                panel.show(device_panel.device_rows(view, panel.size.width, look), title, source)
        stages = self._rows("stages")
        if stages.display:
            words = panels.live_words(view, look)
            stages.show(
                panels.both_rows(view, stages.size.width, look, readonly=readonly),
                f"STAGES  {words}".rstrip(),
                panels.burst_subtitle(view, stages.size.width - 4),
            )

    def charts(
        self, charts: Sequence[str], window_s: float | None, marks: Sequence[tuple[float, str]]
    ) -> None:
        """``charts``: what each place shows (``pictures.CHARTS``); ``window_s``: how far back."""
        view, look = self.view, self.look
        for index, chart_id in enumerate(charts):
            widget = self.screen.query_one(f"#chart{index}", Chart)
            if widget.display:
                shown = pictures.titled(view, chart_id, window_s, marks, look, readonly=self.display.readonly)
                if self._greets and index == 0:
                    words = "\n".join(footing.first_words(self.keys))
                    shown = replace(shown, picture=replace(shown.picture, empty=words))
                widget.metric = chart_id
                title = shown.title + ("  (m: next)" if self.layout == "mid" else "")
                widget.show(shown.picture, title, look.own(shown.subtitle))
        for index, chart_id in enumerate((pictures.MEMORY, pictures.POWER)):
            strip = self._rows(f"strip{index}")
            if strip.display:
                shown = pictures.titled(view, chart_id, window_s, (), look)
                bars = max(strip.size.width - len(shown.value) - 4, 0)
                points = shown.picture.curves[0].points if shown.picture.curves else ()
                line = row(" ", (spark(points, bars, plain=look.plain), "a"), f"  {shown.value}")
                strip.show([clip(line, strip.size.width)], shown.title)

    @property
    def _greets(self) -> bool:
        """Whether to say what to press: until there is something to see."""
        return self.display.first and not any(arm.requests for arm in self.view.arms.values())

    def _rows(self, widget_id: str) -> Rows:
        return self.screen.query_one(f"#{widget_id}", Rows)
