"""Three small questions: yes or no, one of several values, one line of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from pdq_tui.tui.lines import Line, LineList, drawn, fit, is_ascii, wrapped

#: Cells of a dialog's box, where the window has them, and what its border and padding take of them.
WIDTH, FRAME = 80, 4
#: The look of every dialog. Opaque: what shines through beside the box reads as part of it in a small window, and
#: tinting it is most of the work of opening one.
BOX = """
    align: center middle; background: $background;
    &:ansi { background: ansi_default; }
    & > #box { width: 80; max-width: 100%; height: auto; max-height: 100%; border: round $border; background: $surface;
               padding: 0 1; }
    &.-ascii > #box { border: ascii $border; }
    & Static { width: 1fr; height: auto; }
    & Input { height: 1; border: none; background: $panel; }
    & LineList { height: auto; max-height: 20; }
"""


class Ask(ModalScreen[bool]):
    """A yes or no question. Result: True only for y."""

    DEFAULT_CSS = "Ask {" + BOX + "}"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes", id="ask.yes", tooltip="yes"),
        Binding("n,escape", "answer(False)", "No", id="ask.no", tooltip="no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self.question = question

    def compose(self) -> ComposeResult:
        with Vertical(id="box"):
            yield Static(f"{self.question}\n\ny Yes   n No", markup=False)

    def on_mount(self) -> None:
        self.set_class(is_ascii(self.app), "-ascii")

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


#: Cells of a list's cursor and scroll bar.
_CURSOR = 3


@dataclass(frozen=True)
class Choice:
    """``refused``: why this value cannot be chosen here; shown greyed with the reason."""

    value: str
    note: str = ""
    refused: str | None = None


class Pick(ModalScreen[str | None]):
    """One of several values; those that cannot be chosen are shown with the reason. Result: None if nothing was."""

    DEFAULT_CSS = "Pick {" + BOX + "}"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Choose", id="pick.choose", tooltip="take this value", priority=True),
        Binding("escape", "dismiss(None)", "Back", id="pick.back", tooltip="change nothing"),
    ]

    def __init__(self, title: str, choices: Sequence[Choice], current: str) -> None:
        super().__init__()
        self.question, self.choices, self.current = title, choices, current

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.border_subtitle = "enter takes it   esc leaves it as it was"
            yield Static(self.question, markup=False)
            yield LineList(id="choices")

    def on_mount(self) -> None:
        self.set_class(is_ascii(self.app), "-ascii")
        box = self.query_one(LineList)
        self._fill()
        box.move_to(self.current)
        box.focus()

    def on_resize(self) -> None:
        self._fill()

    def _fill(self) -> None:
        """One line a value, more where the window is too narrow for its note."""
        width = max(len(choice.value) for choice in self.choices) + 4
        room = min(WIDTH, self.app.size.width) - FRAME - _CURSOR - width
        lines: list[Line] = []
        for choice in self.choices:
            mark = drawn(self.app, "● " if choice.value == self.current else "  ")
            refused = choice.refused is not None
            first, *more = wrapped(f"n/a: {choice.refused}" if refused else choice.note, room)
            parts = ((fit(mark + choice.value, width), "dim" if refused else ""), (first, "dim"))
            lines.append(Line(parts, None if refused else choice.value))
            lines += [Line.of(" " * width + part, "dim") for part in more]
        box = self.query_one(LineList)
        box.styles.height = len(lines)
        box.set_lines(lines)

    def action_choose(self) -> None:
        key = self.query_one(LineList).key
        if isinstance(key, str):
            self.dismiss(key)

    def on_line_list_chosen(self) -> None:
        self.action_choose()


class Write(ModalScreen[str | None]):
    """One line of text, checked as it is typed: ``check`` returns None or what is wrong. Result: None if given up."""

    DEFAULT_CSS = "Write {" + BOX + "}"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Back", id="write.back", tooltip="change nothing"),
    ]

    def __init__(self, title: str, value: str, check: Callable[[str], str | None]) -> None:
        super().__init__()
        self.question, self.value, self.check = title, value, check

    def compose(self) -> ComposeResult:
        with Vertical(id="box"):
            yield Static(self.question, markup=False)
            yield Input(self.value)
            yield Static(id="wrong", markup=False)

    def on_mount(self) -> None:
        self.set_class(is_ascii(self.app), "-ascii")
        self.query_one(Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        wrong = self.check(event.value)
        self.query_one("#wrong", Static).update(
            f"! {wrong}" if wrong else "enter takes it, esc leaves it as it was"
        )

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if self.check(event.value) is None:
            self.dismiss(event.value)
