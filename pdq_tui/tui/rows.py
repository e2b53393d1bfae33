"""Fixed lines of (text, role) and the widget that shows them: literal text, only changed lines drawn again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from pdq_tui.tui.lines import Part, Row, fit


class Rows(Widget):
    """Lines of text in roles. ``metric``: the id whose formula the help shows while this panel has the focus."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "rows--a", "rows--b", "rows--dim", "rows--head", "rows--warn", "rows--bad", "rows--good", "rows--mark",
        "rows--band",
    }  # fmt: skip
    DEFAULT_CSS = """
    Rows {
        & > .rows--a { color: $series-a; }
        & > .rows--b { color: $series-b; }
        & > .rows--dim { color: $text-muted; }
        & > .rows--head { text-style: bold; }
        & > .rows--warn { color: $text-warning; }
        & > .rows--bad { color: $text-warning; text-style: bold; }
        & > .rows--good { color: $text-accent; text-style: bold; }
        & > .rows--mark { color: $text-primary; text-style: bold; }
        & > .rows--band { color: $series-band; }
    }
    """

    def __init__(self, *, id: str | None = None, focusable: bool = False, metric: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.can_focus = focusable
        self.metric = metric
        self.rows: tuple[Row, ...] = ()
        #: Title and subtitle as given; the widget's own properties hold them escaped.
        self.frame = ("", "")

    def show(self, rows: Iterable[Row], title: str = "", subtitle: str = "") -> None:
        """Replace the lines; those that stay the same are left alone."""
        if self.frame != (title, subtitle):
            self.frame = (title, subtitle)
            self.border_title, self.border_subtitle = Content(title), Content(subtitle)
        before, self.rows = self.rows, tuple(rows)
        if before == self.rows:
            return
        width = self.size.width
        longest = max(len(before), len(self.rows))
        changed = [
            Region(0, y, width, 1)
            for y in range(min(longest, self.size.height))
            if before[y : y + 1] != self.rows[y : y + 1]
        ]
        if changed and width:
            self.refresh(*changed)

    @property
    def text(self) -> str:
        """What the lines say."""
        return "\n".join("".join(text for text, _ in row) for row in self.rows)

    def render_line(self, y: int) -> Strip:
        base = self.rich_style
        width = self.size.width
        if not 0 <= y < len(self.rows):
            return Strip.blank(width, base)
        segments = [Segment(text, self._style(base, role)) for text, role in self.rows[y] if text]
        return Strip(segments).adjust_cell_length(width, base)

    def _style(self, base: Style, role: str) -> Style:
        # Never None: the monochrome filter under NO_COLOR cannot take it.
        return base + self.get_component_rich_style(f"rows--{role}", partial=True) if role else base


def row(*parts: Part | str) -> Row:
    """Plain strings get no role."""
    return tuple((part, "") if isinstance(part, str) else part for part in parts)


def cell(text: str, width: int, role: str = "") -> Part:
    """``text`` cut or padded to ``width`` cells."""
    return (fit(text, width), role)


def length(parts: Sequence[Part]) -> int:
    return sum(cell_len(text) for text, _ in parts)


def apart(left: Sequence[Part], right: Sequence[Part], width: int) -> Row:
    """``left`` and ``right`` at the two edges; ``left`` is cut where both do not fit."""
    room = width - length(right)
    if room <= 0:
        return clip(right, width)
    clipped = clip(left, room)
    return (*clipped, (" " * (room - length(clipped)), ""), *right)


def clip(parts: Iterable[Part], width: int) -> Row:
    """At most ``width`` cells; what is cut ends in ~."""
    found: list[Part] = []
    used = 0
    for text, role in parts:
        size = cell_len(text)
        if used + size > width:
            if width > used:
                found.append((fit(text, width - used), role))
            break
        found.append((text, role))
        used += size
    return tuple(found)
