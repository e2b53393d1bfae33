"""A full screen's frame: title, body, filter, a line for what was just done, the keys, and a floor on its size."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import Screen
from textual.widgets import Input, Static

from pdq_tui.tui import keys
from pdq_tui.tui.lines import (
    LineList,
    drawn,
    fit,
    is_ascii,
    is_readonly,
    keys_that_fit,
    literal,
    paragraph,
)


class KeyLine(Static):
    """The keys that work here, as many as fit, and that there are more; ``?`` shows all of them."""

    DEFAULT_CSS = "KeyLine { height: 1; dock: bottom; background: $panel; color: $text-muted; padding: 0 1; }"

    def __init__(self) -> None:
        super().__init__(markup=False)

    def on_mount(self) -> None:
        self.watch(self.screen, "focused", self._redraw, init=False)
        self.call_after_refresh(self._redraw)

    def on_resize(self) -> None:
        self._redraw()

    def _redraw(self) -> None:
        seen: set[str] = set()
        words: dict[str, list[str]] = {}
        # the screen's own keys first, then what every page has, then the app's
        for key, active in sorted(
            self.screen.active_bindings.items(),
            key=lambda item: (item[1].node is self.app, (item[1].binding.id or "").startswith("page.")),
        ):
            binding = active.binding
            if binding.show and binding.description and binding.action not in seen:
                seen.add(binding.action)
                # Two directions of one thing are one word with both keys.
                words.setdefault(binding.description, []).append(key_name(binding.key_display or key))
        last = "/".join(words.pop(_HELP, ["?"])) + f" {_HELP}"
        pieces = [f"{'/'.join(names)} {word}" for word, names in words.items()]
        self.update(keys_that_fit(pieces, last, self.size.width, "  ", drawn(self.app, "…")))


#: What the key of the help is called in the key line.
_HELP = "Help"
_KEY_NAMES = {
    "question_mark": "?", "slash": "/", "colon": ":", "asterisk": "*", "left_square_bracket": "[",
    "right_square_bracket": "]", "escape": "esc", "space": "space", "ctrl+q": "ctrl+q", "delete": "del",
}  # fmt: skip


def key_name(key: str) -> str:
    """A key as printed on the keyboard: Textual's ``left_square_bracket`` is ``[``."""
    return _KEY_NAMES.get(key, key)


#: Lines of the sentence about what was just done.
_SAID_LINES = 3


class Page(Screen[None]):
    """A full screen: title line, body, filter, a line for what was just done, keys. Below 60x20 one sentence instead."""

    #: Classes by window size; ``-narrow``/``-short`` let a page's CSS give up what does not fit.
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012 - the base declares it so
        (0, "-thin"), (60, "-narrow"), (100, "-wide"),
    ]  # fmt: skip
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-flat"), (20, "-short"), (30, "-tall"),
    ]  # fmt: skip
    DEFAULT_CSS = """
    Page {
        & > #title { height: 1; background: $panel; text-style: bold; padding: 0 1; }
        & > #body { height: 1fr; }
        & > #said { height: auto; max-height: 3; dock: bottom; padding: 0 1; margin-bottom: 1; }
        & > #filter { display: none; height: 1; border: none; dock: bottom; margin-bottom: 1; }
        & > #filter.-open { display: block; }
        & > #too-small { display: none; height: 1fr; }
        &.-thin, &.-flat {
            & > #title, & > #body, & > #said, & > #filter, & > KeyLine { display: none; }
            & > #too-small { display: block; }
        }
        .panel { border: round $border-blurred; border-title-style: bold; border-title-color: $foreground;
                 border-subtitle-color: $foreground; padding: 0; }
        .panel:focus, .panel:focus-within { border: round $border; }
        &.-ascii LineList { scrollbar-size: 0 0; }
        &.-ascii .panel { border: ascii $border-blurred; }
        &.-ascii .panel:focus, &.-ascii .panel:focus-within { border: ascii $border; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", id="page.filter", tooltip="show only rows that contain a text"),
        Binding("escape", "escape", "Back", id="page.back", tooltip="clear the filter", show=False),
    ]
    TITLE_WORD = ""
    said = ""
    _title = ""

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        with Vertical(id="body"):
            yield from self.compose_body()
        yield Static(id="too-small", markup=False)
        yield Static(id="said", markup=False)
        yield Input(id="filter", placeholder="filter: text, enter keeps it, esc clears it")
        yield KeyLine()

    def compose_body(self) -> ComposeResult:
        raise NotImplementedError

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return keys.works(action, is_readonly(self.app))

    def on_mount(self) -> None:
        self.set_class(is_ascii(self.app), "-ascii")
        self.set_title("")
        self.started()

    def started(self) -> None:
        """Called once when the page is up."""

    def on_resize(self, event: events.Resize) -> None:
        self.query_one("#too-small", Static).update(
            f"window too small: {event.size.width}x{event.size.height}, needs 60x20. The run goes on."
        )
        self._show_words()
        self.resized()

    def resized(self) -> None:
        """Called when the window has another size."""

    def set_title(self, text: str) -> None:
        mark = "   read-only" if is_readonly(self.app) else ""
        self._title = literal(f"pdq  {self.TITLE_WORD}{mark}   {text}")
        self._show_words()

    def say(self, text: str) -> None:
        """A sentence about what was just done or could not be done; stays until the next."""
        self.said = literal(text)
        self._show_words()

    def _show_words(self) -> None:
        """Title and sentence at the window's width: what does not fit is seen to be cut."""
        width = max(1, self.app.size.width - 2)
        self.query_one("#title", Static).update(fit(self._title, width).rstrip())
        text = paragraph(self.said, width, _SAID_LINES, drawn(self.app, "…")) if self.said else ""
        self.query_one("#said", Static).update(text)

    # -- filter

    @property
    def wanted(self) -> str:
        """The filter's text, lower case."""
        return self.query_one("#filter", Input).value.strip().lower()

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.add_class("-open")
        box.focus()

    def action_escape(self) -> None:
        box = self.query_one("#filter", Input)
        box.value = ""
        box.remove_class("-open")
        self.focus_body()

    def focus_body(self) -> None:
        lists = self.query(LineList)
        if lists:
            lists.first().focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "filter":
            self.filtered()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "filter":
            event.input.set_class(bool(self.wanted), "-open")
            self.focus_body()

    def filtered(self) -> None:
        """Called when the filter's text has changed."""
