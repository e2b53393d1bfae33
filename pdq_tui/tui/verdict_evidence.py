"""The evidence behind one row of a verdict: what was asked, what came out, and the report's table that it rests on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from pdq_tui.tui.ask import BOX, FRAME, WIDTH
from pdq_tui.tui.lines import Line, LineList, drawn, is_ascii, literal, wrapped

if TYPE_CHECKING:  # polars comes with these
    from pdq_tui.judge.scenarios import Card
    from pdq_tui.report.evaluated import Evaluated
    from pdq_tui.report.page import Table

#: The tables of the report that a row rests on, by the beginning of its name: words of their titles.
_TABLES: Final = {
    "speed": ("does staging gain", "different bottlenecks"),
    "quality": ("quality held", "KLD by position"),
    "memory": ("what does it cost",),
    "engine": ("which limit", "different bottlenecks"),
    "stability": ("does it hold up", "drift", "abnormal"),
    "long prompt": ("does staging gain",),
    "decode-sensitive": ("does staging gain",),
    "tight memory": ("what does it cost",),
    "high concurrency": ("under load",),
    "map": ("where is it significant",),
}


class Evidence(ModalScreen[None]):
    DEFAULT_CSS = (
        "Evidence {"
        + BOX
        + """
        & > #box { height: 90%; min-height: 3; }
        & LineList { height: 1fr; max-height: 100%; }
    }
    """
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q", "dismiss(None)", "Close", id="evidence.close", tooltip="close"),
    ]

    def __init__(self, source: Evaluated, cards: Sequence[Card], key: Hashable) -> None:
        super().__init__()
        self.source, self.cards, self.key = source, cards, key

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.border_title = "evidence"
            box.border_subtitle = "j k g G scroll   esc closes"
            yield LineList(id="lines", cursor=False)

    def on_mount(self) -> None:
        self.set_class(is_ascii(self.app), "-ascii")
        self.query_one(LineList).focus()
        self._fill()

    def on_resize(self) -> None:
        self._fill()

    def _fill(self) -> None:
        width = max(20, min(WIDTH, self.app.size.width) - FRAME - 1)
        lines = evidence_lines(self.source, self.cards, self.key, width)
        self.query_one(LineList).set_lines(
            [Line(tuple((drawn(self.app, text), role) for text, role in line.parts)) for line in lines]
        )


def evidence_lines(source: Evaluated, cards: Sequence[Card], key: Hashable, width: int) -> list[Line]:
    """``key``: as in ``verdict_lines``: (kind, which)."""
    assert isinstance(key, tuple)
    kind, which = key[0], key[1]
    lines: list[Line] = []
    name = str(kind)
    if kind == "gate":
        gate = source.verdict.gates[which]
        name = gate.name
        lines += _head(gate.name, width)
        for label, text in (
            ("limit", gate.limit),
            ("measured", gate.measured),
            ("result", gate.result),
            ("why", gate.reason or ""),
        ):
            lines += _row(label, text, width)
    elif kind == "card":
        card = cards[which]
        name = card.name
        lines += [
            *_head(card.name, width),
            *_row("speaks", card.says, width),
            *_row("because", card.because, width),
        ]
    elif kind == "step":
        lines += _step(source, str(which), width)
    found = next((words for begin, words in _TABLES.items() if name.startswith(begin)), ())
    if found:
        for table in source.page().tables:
            if any(word in table.title for word in found):
                lines += [Line.of(""), *table_lines(table, width)]
    return lines


def _step(source: Evaluated, name: str, width: int) -> list[Line]:
    from pdq_tui.judge.plan import STEPS

    step = next(s for s in STEPS if s.name == name)
    lines = [*_head(step.title, width), *_row("why", step.why, width)]
    body = source.found.get(name)
    if body is None:
        return [*lines, *_row("state", "not done yet", width)]
    lines += _row("took", f"{body.get('seconds', 0):.0f} s", width)
    return lines + (_row("ended", str(body["stop"]), width) if body.get("stop") else [])


def table_lines(table: Table, width: int) -> list[Line]:
    """A report's table for a narrow place: each row its name, then one line a column."""
    lines = _head(table.title, width)
    for row in table.rows:
        words = [cell for cell in row[: table.left] if cell] or row[:1]
        lines += [Line.of(part, "mark") for part in wrapped(literal(" · ".join(words)), width)]
        for column, cell in list(zip(table.columns, row, strict=True))[table.left :]:
            if cell:
                lines += _row(column, cell, width, 24 if width > 50 else 14)
    for text in table.footer:
        lines += [Line.of(part, "dim") for part in wrapped(literal(text), width)]
    return lines


def _head(text: str, width: int) -> list[Line]:
    return [Line.of(part, "head") for part in wrapped(literal(text), width)]


def _row(label: str, text: str, width: int, column: int = 10) -> list[Line]:
    if not text:
        return []
    first, *more = wrapped(literal(text), width - column - 1)
    lines = [Line(((f" {label:<{column - 1}} "[: column + 1], "dim"), (first, "")))]
    return lines + [Line.of(" " * (column + 1) + part) for part in more]
