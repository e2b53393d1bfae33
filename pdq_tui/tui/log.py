"""The log: what happened in this run, and what the engine's libraries printed, which must never reach the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from pdq_tui.host.view import NoteView, SessionView
from pdq_tui.tui.lines import Line, LineList, cells, drawn, fit, literal, title, widest, wrapped
from pdq_tui.tui.log_tail import LogTail
from pdq_tui.tui.page import Page

_ROLES = {"info": "", "warn": "warn", "error": "bad"}
_MARKS = {"info": " ", "warn": "!", "error": "✗"}
#: Cells before an event's text: the time, its mark and the blanks between; what does not fit goes on below the text.
_EVENT_INDENT = 11


class LogScreen(Page):
    """Events above, the engine's stderr below. Both stay at their end until scrolled up; G follows again."""

    TITLE_WORD = "6 LOG"
    DEFAULT_CSS = """
    LogScreen {
        & #events { height: 1fr; }
        & #engine { height: 1fr; }
        &.-no-engine #engine { display: none; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("i", "level('info')", "Info", id="log.info", tooltip="show or hide information"),
        Binding("W", "level('warn')", "Warnings", id="log.warn", tooltip="show or hide warnings"),
        Binding("E", "level('error')", "Errors", id="log.error", tooltip="show or hide errors"),
        Binding("l", "engine", "Engine log", id="log.engine", tooltip="show or hide what the engine printed"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.levels = {"info", "warn", "error"}
        self.tail: LogTail | None = None
        self._shown: tuple[tuple[NoteView, ...], int] | None = None

    def compose_body(self) -> ComposeResult:
        for name, heading in (("events", "events"), ("engine", "engine log")):
            box = LineList(id=name, cursor=False, follow=True)
            box.add_class("panel")
            box.border_title = heading
            yield box

    def started(self) -> None:
        self.query_one("#engine", LineList).focus()
        self._tick()
        self.set_interval(0.5, self._tick)

    def _tick(self) -> None:
        view: SessionView = self._session().view(1.0)
        path = Path(view.run_dir) / "stderr.log"
        if self.is_current:
            self._show_events(view.notes)
        if not path.is_absolute():  # a run kept in memory only has no log file
            return
        if self.tail is None or self.tail.path != path:
            self.tail = LogTail(path)
        self._read(self.tail, self.wanted)

    def _session(self) -> Any:
        return getattr(self.app, "session")  # noqa: B009 - the app's class is not this room's to know

    def on_screen_resume(self) -> None:
        if self.is_mounted:
            self._tick()

    # A log on a slow home must not hold up the keys, hence the thread.
    @work(thread=True, group="tail")
    def _read(self, tail: LogTail, wanted: str, force: bool = False) -> None:
        if not tail.busy.acquire(blocking=force):
            return
        try:
            changed = tail.read()
            lines = engine_lines(tail, wanted) if changed or force else None
            total = len(tail.entries) + (tail.partial is not None)
        finally:
            tail.busy.release()
        if lines is not None:
            self.app.call_from_thread(self._show_engine, tail, lines, widest(lines), wanted, total)

    def _show_events(self, notes: tuple[NoteView, ...], force: bool = False) -> None:
        box = self.query_one("#events", LineList)
        # Its own cells but for a scroll bar's, which comes and goes with the lines.
        width = max(20, box.size.width - 1 - _EVENT_INDENT)
        if not force and self._shown is not None and self._shown[0] is notes and self._shown[1] == width:
            return
        self._shown = notes, width
        lines: list[Line] = []
        shown = 0
        for note in notes:
            text = drawn(self.app, literal(note.text) + (f" ({literal(note.hint)})" if note.hint else ""))
            if note.level in self.levels and self.wanted in text.lower():
                mark, role = drawn(self.app, _MARKS.get(note.level, " ")), _ROLES.get(note.level, "")
                first, *more = wrapped(text, width) if cells(text) > width else [text]
                lines.append(Line(((f"{note.clock} ", "dim"), (f"{mark} {first}", role))))
                lines += [Line.of(" " * _EVENT_INDENT + part, role) for part in more]
                shown += 1
        box.set_lines(lines)
        box.border_subtitle = f"{shown} of {len(notes)}  levels {' '.join(sorted(self.levels)) or 'none'}"

    def _show_engine(self, tail: LogTail, lines: list[Line], width: int, wanted: str, total: int) -> None:
        if tail is not self.tail or wanted != self.wanted:
            return
        box = self.query_one("#engine", LineList)
        box.set_lines(lines, width)
        text = literal(f"{len(lines) if total else 0} of {total} lines  {tail.path}")
        box.border_subtitle = title(
            fit(text, box.size.width - 4).rstrip()
        )  # the library would cut with a non-ASCII …

    # -- what is shown

    def resized(self) -> None:
        self.call_after_refresh(self._tick)  # the events are wrapped at their panel's width

    def filtered(self) -> None:
        self._redraw()

    def _redraw(self) -> None:
        self._show_events(self._session().view(1.0).notes, force=True)
        if self.tail is not None:
            self._read(self.tail, self.wanted, force=True)

    def action_level(self, level: str) -> None:
        self.levels ^= {level}
        self._redraw()
        shown = [name for name in _ROLES if name in self.levels]
        self.say(f"events shown: {', '.join(shown) or 'none'}")

    def action_engine(self) -> None:
        hidden = not self.has_class("-no-engine")
        self.set_class(hidden, "-no-engine")
        self.query_one("#events" if hidden else "#engine", LineList).focus()
        self.say("engine log hidden; l shows it" if hidden else "engine log shown")


def engine_lines(tail: LogTail, wanted: str) -> list[Line]:
    """The tail's lines that hold ``wanted`` (lower case); for a thread, 5,000 of them are a few milliseconds."""
    rows = [*tail.entries, *([tail.partial] if tail.partial else [])]
    lines = [
        Line(((f"{literal(row.when)} ", "dim"), (literal(row.text), "")))
        if row.when
        else Line.of(literal(row.text))
        for row in rows
        if wanted in row.text.lower()
    ]
    if tail.error:
        lines.append(Line.of(literal(tail.error), "bad"))
    return lines or [
        Line.of("the engine has printed nothing" if not rows else "nothing matches the filter", "dim")
    ]
