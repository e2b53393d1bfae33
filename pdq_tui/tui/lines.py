"""Literal text and one list widget for every plain screen.

Text of a model, a file or an error is never parsed as markup: everything here takes (text, role) pairs or plain strings.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from pdq_tui.errors import PdqError

#: Glyphs whose width or existence a terminal may dispute, and what stands for them under --ascii.
ASCII = {
    "★": "*", "▶": ">", "▲": "^", "▼": "v", "✓": "ok", "✗": "x", "⚑": "!", "●": "*", "○": "o", "·": "-",
    "±": "+-", "Δ": "d", "×": "x", "…": "...", "→": "->", "≥": ">=", "≤": "<=", "–": "-", "─": "-", "│": "|",
    "┤": "|", "▁": ".", "▂": ".", "▃": ":", "▄": ":", "▅": "=", "▆": "=", "▇": "#", "█": "#", "√": "sqrt",
    "Σ": "sum", "∞": "inf", "−": "-", "■": "#", "½": "1/2", "δ": "delta",
}  # fmt: skip
_ASCII_TABLE = str.maketrans(ASCII)
#: Control characters would move the cursor or recolour the screen: each is shown as its Unicode control picture.
_CONTROLS = {c: 0x2400 + c for c in range(0x20)} | {0x7F: 0x2421} | dict.fromkeys(range(128, 160), 65533)
_CONTROLS |= {ord("\t"): ord(" ")} | dict.fromkeys((*range(8234, 8239), *range(8294, 8298)), 65533)

#: (text, role); roles are a widget's COMPONENT_CLASSES without their prefix, "" for plain.
Part = tuple[str, str]
Row = tuple[Part, ...]


def literal(text: object) -> str:
    """One line of foreign text as it may go to a terminal: no control, bidi-override or broken characters."""
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return text.encode("utf-8", "replace").decode("utf-8").translate(_CONTROLS)


def is_ascii(app: App[Any]) -> bool:
    """Whether the app was asked for plain ASCII drawing."""
    return bool(getattr(app, "ascii", False))


def is_readonly(app: App[Any]) -> bool:
    """Whether the app only looks (--readonly): see ``keys.works``."""
    return bool(getattr(app, "readonly", False))


def to_ascii(text: str) -> str:
    """Our own glyphs as plain ASCII; may be longer. To be applied before a text is fitted to a width."""
    return text.translate(_ASCII_TABLE)


def drawn(app: App[Any], text: str) -> str:
    """Our own text with the glyphs that this terminal is to be given. Never for foreign text."""
    return to_ascii(text) if is_ascii(app) else text


def title(text: str) -> Content:
    """A border's title or subtitle: a plain str there would be parsed as markup."""
    return Content(literal(text))


def fit(text: str, width: int) -> str:
    """``text`` cut or padded to ``width`` terminal cells; a cut ends in ~ (one cell everywhere, also in ASCII)."""
    if width <= 0:
        return ""
    size = cell_len(text)
    if size <= width:
        return text + " " * (width - size)
    kept, used = [], 0
    for char in text:
        used += cell_len(char)
        if used > width - 1:
            break
        kept.append(char)
    cut = "".join(kept)
    return cut + "~" + " " * (width - 1 - cell_len(cut))


def wrapped(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` cells, broken at blanks where it can be; at least one line."""
    width = max(4, width)
    lines = [""]
    for whole in text.split():
        word = whole
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        while cell_len(word) > width:  # a path has no blanks
            head = word
            while cell_len(head) > width:
                head = head[: max(1, len(head) - max(1, (cell_len(head) - width) // 2))]
            lines[-1] = head
            lines.append("")
            word = word[len(head) :]
        lines[-1] = word
    return lines


def paragraph(text: str, width: int, height: int, more: str = "…") -> str:
    """``text`` in at most ``height`` lines of ``width`` cells; what is cut ends in ``more``."""
    lines = wrapped(text, width)
    if len(lines) <= height:
        return "\n".join(lines)
    last = lines[height - 1]
    while cells(last + more) > width:
        last = last[:-1]
    return "\n".join([*lines[: height - 1], last.rstrip() + more])


def keys_that_fit(pieces: Sequence[str], last: str, width: int, gap: str, more: str = "…") -> str:
    """A line of keys in ``width`` cells: the first ``pieces``, ``more`` where others are left out, and always ``last``,
    which tells of all of them."""
    whole = gap.join((*pieces, last))
    if cells(whole) <= width:
        return whole
    shown = list(pieces)
    while shown and cells(f"{gap.join(shown)} {more} {last}") > width:
        shown.pop()
    return f"{gap.join(shown)} {more} {last}"


def sentence(error: Exception) -> str:
    """An error as one line for a person: ours in its own words, the system's with the file it is about."""
    if isinstance(error, PdqError):
        return literal(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return literal(f"{where}{error.strerror or type(error).__name__}")
    return literal(f"{type(error).__name__}: {error}")


def cells(text: str) -> int:
    """Width in terminal cells."""
    return len(text) if text.isascii() else cell_len(text)


class Line(NamedTuple):
    """One line of a list. ``parts``: (text, role); roles are LineList.COMPONENT_CLASSES. No ``key``: cannot be chosen."""

    parts: tuple[Part, ...]
    key: Hashable | None = None

    @classmethod
    def of(cls, text: str, role: str = "", key: Hashable | None = None) -> Line:
        return cls(((text, role),), key)

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)


def widest(lines: Sequence[Line]) -> int:
    """Cells of the widest line; 0 without lines."""
    return max((cells(line.text) for line in lines), default=0)


class LineList(ScrollView, can_focus=True):
    """Lines with a cursor on those that have a key. Draws only what is visible, at any size down to nothing."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "list--cursor", "list--head", "list--dim", "list--good", "list--bad", "list--warn", "list--mark",
    }  # fmt: skip
    DEFAULT_CSS = """
    LineList {
        height: 1fr; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0;
        & > .list--cursor { background: $panel; text-style: bold; }
        &:focus > .list--cursor { background: $primary-muted; text-style: bold; }
        & > .list--head { text-style: bold; }
        & > .list--dim { text-style: dim; }
        & > .list--good { color: $text-accent; text-style: bold; }
        & > .list--bad { color: $text-warning; text-style: bold; }
        & > .list--warn { color: $text-warning; }
        & > .list--mark { color: $text-primary; text-style: bold; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "move(1)", "Down", id="list.down", tooltip="next row", show=False),
        Binding("k,up", "move(-1)", "Up", id="list.up", tooltip="previous row", show=False),
        Binding("g,home", "edge(-1)", "Top", id="list.top", tooltip="first row", show=False),
        Binding("G,end", "edge(1)", "Bottom", id="list.bottom", tooltip="last row", show=False),
        Binding("pagedown", "page(1)", "Page down", id="list.page_down", tooltip="a page down", show=False),
        Binding("pageup", "page(-1)", "Page up", id="list.page_up", tooltip="a page up", show=False),
    ]

    class Moved(Message):
        """The cursor stands on another line."""

        def __init__(self, lines: LineList, key: Hashable | None) -> None:
            super().__init__()
            self.lines, self.key = lines, key

        @property
        def control(self) -> LineList:
            return self.lines

    class Chosen(Moved):
        """A line was clicked a second time."""

    def __init__(self, *, id: str | None = None, cursor: bool = True, follow: bool = False) -> None:  # noqa: A002
        """``cursor`` False: lines are only scrolled. ``follow``: stay at the end while new lines come."""
        super().__init__(id=id)
        self.lines: Sequence[Line] = ()
        self.cursor: int | None = None
        self.with_cursor, self.follow = cursor, follow

    # -- contents

    def set_lines(self, lines: Sequence[Line], width: int | None = None) -> None:
        """Replace everything; the cursor stays on its key where that still exists, else near where it was.

        ``width``: cells of the widest line where the caller knows it already; many lines are best counted in a thread.
        """
        key, at = self.key, self.cursor or 0
        at_end = self.follow and self.scroll_offset.y >= self.max_scroll_y
        self.lines = lines
        if width is None:
            width = widest(lines)
        self.virtual_size = Size(width + self._gutter, len(lines))
        if self.with_cursor:
            same = [i for i, line in enumerate(lines) if line.key is not None and line.key == key]
            self.cursor = same[0] if same else self._selectable(at, 1, self._selectable(at, -1, None))
            if self.key != key:
                self.post_message(self.Moved(self, self.key))
        elif at_end:
            self.call_after_refresh(self.scroll_end, animate=False, immediate=True)
        self.refresh()

    @property
    def key(self) -> Hashable | None:
        """Key of the line under the cursor, None without one."""
        if self.cursor is None or not 0 <= self.cursor < len(self.lines):
            return None
        return self.lines[self.cursor].key

    def move_to(self, key: Hashable) -> None:
        for index, line in enumerate(self.lines):
            if line.key == key:
                self._go(index)
                return

    def _selectable(self, start: int, step: int, default: int | None) -> int | None:
        index = start
        while 0 <= index < len(self.lines):
            if self.lines[index].key is not None:
                return index
            index += step
        return default

    def _go(self, index: int | None) -> None:
        if index is None or index == self.cursor:
            return
        self.cursor = index
        self.scroll_to_region(Region(self.scroll_offset.x, index, 1, 1), animate=False, immediate=True)
        self.refresh()
        self.post_message(self.Moved(self, self.key))

    # -- keys and mouse

    def action_move(self, step: int) -> None:
        if not self.with_cursor:
            self.scroll_relative(y=step, animate=False)
        else:
            here = -1 if self.cursor is None else self.cursor
            self._go(self._selectable(here + step, step, self.cursor))

    def action_edge(self, direction: int) -> None:
        if not self.with_cursor:
            (self.scroll_home if direction < 0 else self.scroll_end)(animate=False, immediate=True)
        elif direction < 0:
            self._go(self._selectable(0, 1, self.cursor))
            self.scroll_home(animate=False, immediate=True)
        else:
            self._go(self._selectable(len(self.lines) - 1, -1, self.cursor))

    def action_page(self, direction: int) -> None:
        page = max(1, self.size.height - 1)
        if not self.with_cursor:
            self.scroll_relative(y=direction * page, animate=False)
            return
        target = min(max((self.cursor or 0) + direction * page, 0), max(0, len(self.lines) - 1))
        self._go(self._selectable(target, direction, self._selectable(target, -direction, self.cursor)))

    def on_click(self, event: events.Click) -> None:
        index = event.y + self.scroll_offset.y
        if not self.with_cursor or not 0 <= index < len(self.lines) or self.lines[index].key is None:
            return
        if index == self.cursor:
            self.post_message(self.Chosen(self, self.key))
        self._go(index)

    # -- drawing

    @property
    def _gutter(self) -> int:
        return 2 if self.with_cursor else 0

    def render_line(self, y: int) -> Strip:
        scroll_x, scroll_y = self.scroll_offset
        width, index = self.scrollable_content_region.width, y + scroll_y  # a scroll bar covers no mark
        base = self.rich_style
        if not 0 <= index < len(self.lines):
            return Strip.blank(width, base)
        line = self.lines[index]
        here = self.with_cursor and index == self.cursor
        under = base + self.get_component_rich_style("list--cursor", partial=True) if here else base
        parts: Iterable[Part] = line.parts
        if self.with_cursor:
            parts = ((drawn(self.app, "▶ ") if here else "  ", ""), *line.parts)
        whole = Strip([Segment(text, self._style(under, role)) for text, role in parts if text])
        return self._marked(whole, scroll_x, width, under)

    @staticmethod
    def _marked(whole: Strip, start: int, width: int, style: Style) -> Strip:
        """The ``width`` cells of a line from ``start`` on; < and > stand where it goes on beyond them."""
        shown = whole.crop_extend(start, start + width, style)
        mark = Strip([Segment("<", style)]), Strip([Segment(">", style)])
        if width > 2 and start and whole.crop(0, start).text.strip():
            shown = Strip.join([mark[0], shown.crop(1, width)])
        if width > 2 and whole.crop(start + width, None).text.strip():
            shown = Strip.join([shown.crop(0, width - 1), mark[1]])
        return shown

    def _style(self, base: Style, role: str) -> Style:
        return base + self.get_component_rich_style(f"list--{role}", partial=True) if role else base
