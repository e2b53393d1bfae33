"""The live chart: a line-API widget over ``plot.draw`` that sends only the rows that changed."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from textual.content import Content
from textual.events import Resize
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from pdq_tui.tui.lines import Row
from pdq_tui.tui.plot import draw
from pdq_tui.tui.plot_picture import Picture


class Chart(Widget, can_focus=True):
    """Shows the last ``Picture`` that it was given. ``metric``: the id whose formula the help shows."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "chart--a", "chart--b", "chart--c", "chart--ref", "chart--axis", "chart--band",
    }  # fmt: skip
    DEFAULT_CSS = """
    Chart {
        & > .chart--a { color: $series-a; }
        & > .chart--b { color: $series-b; }
        & > .chart--c { color: $series-c; }
        & > .chart--ref { color: $text-muted; }
        & > .chart--axis { color: $text-muted; }
        & > .chart--band { color: $series-band; }
    }
    """

    def __init__(self, *, marker: str = "braille", metric: str | None = None, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.marker = marker
        self.metric = metric
        self.picture = Picture()
        self.drawn: list[Row] = []
        self.drawn_size = (0, 0)
        #: Title and subtitle as given; the widget's own properties hold them escaped.
        self.frame = ("", "")

    def show(self, picture: Picture, title: str, subtitle: str = "") -> None:
        """Draw ``picture`` in place of the last one; rows that come out the same are left alone."""
        if self.frame != (title, subtitle):
            self.frame = (title, subtitle)
            self.border_title, self.border_subtitle = Content(title), Content(subtitle)
        if picture == self.picture and self.drawn:
            return
        self.picture = picture
        self._draw()

    def on_resize(self, event: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width, height = self.size
        before, self.drawn = self.drawn, draw(self.picture, width, height, self.marker)
        if len(before) != len(self.drawn) or self.drawn_size != (width, height):
            self.drawn_size = (width, height)
            self.refresh()
            return
        changed = [Region(0, y, width, 1) for y in range(height) if before[y] != self.drawn[y]]
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        base = self.rich_style
        if not 0 <= y < len(self.drawn):
            return Strip.blank(self.size.width, base)
        # Every segment has a style of its own: a None style crashes the monochrome filter under NO_COLOR.
        segments = [
            Segment(
                text, base + self.get_component_rich_style(f"chart--{role}", partial=True) if role else base
            )
            for text, role in self.drawn[y]
        ]
        return Strip(segments).adjust_cell_length(self.size.width, base)
