"""Help: the keys that work on this screen, what the focused number means, and what the marks stand for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen, Screen

from pdq_tui.core.metrics import METRICS, Metric
from pdq_tui.tui.ask import BOX, FRAME, WIDTH
from pdq_tui.tui.lines import Line, LineList, cells, drawn, fit, is_ascii, literal, wrapped
from pdq_tui.tui.page import key_name

#: Shown with every help: no mark is explained by its colour.
MARKS = (
    ("✓", "ok"),
    ("✗", "failed or refused"),
    ("!", "warning"),
    ("?", "unsure: neither better, worse nor the same can be said"),
    ("@20", "decided at the look after 20 blocks, and still so; prov.: no look has decided yet"),
    ("▲ ▼", "the number is higher, lower than the reference; the word says whether that is better"),
    ("=", "same: the interval lies inside the threshold"),
    ("★", "reference, always the left column"),
    ("⚑", "conditions differ: the row is flagged"),
    ("±", "half of the 95 % interval of the median"),
    ("*", "a policy changed but not written to a file"),
    ("n/a", "not available; the reason stands beside it or in 6 Log"),
)
#: Cells of the scroll bar, and of the widest column of keys.
_BAR, _COLUMN = 1, 21
#: Actions that go from panel to panel; those that the library itself binds are said in our words.
_FOCUS = ("focus_panel", "app.focus_next", "app.focus_previous")
_LIBRARY_WORDS = {"app.focus_next": "next panel", "app.focus_previous": "panel before"}


class HelpScreen(ModalScreen[None]):
    """Opened over another screen. ``metric``: id of the focused panel's metric; ``subject``: the screen explained,
    by default the one below."""

    DEFAULT_CSS = (
        "HelpScreen {"
        + BOX
        + """
        & > #box { height: 90%; min-height: 3; }
        & LineList { height: 1fr; max-height: 100%; }
    }
    """
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,f1,q", "dismiss(None)", "Close", id="help.close", tooltip="close help"),
    ]

    def __init__(self, metric: str | None = None, subject: Screen[Any] | None = None) -> None:
        super().__init__()
        self.metric = METRICS.get(metric) if metric else None
        self.subject = subject
        self._filled = 0

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.border_title = "help"
            box.border_subtitle = "j k g G scroll   esc closes"
            yield LineList(id="help", cursor=False)

    def on_mount(self) -> None:
        self.set_class(is_ascii(self.app), "-ascii")
        if self.subject is None:
            below = [screen for screen in self.app.screen_stack if screen is not self]
            self.subject = below[-1] if below else None
        if self.metric is None:  # a screen may say which metric its focused row is about
            self.metric = METRICS.get(getattr(self.subject, "help_metric", None) or "")
        self.query_one(LineList).focus()
        self._fill()

    def on_resize(self) -> None:
        self._fill()

    def _fill(self) -> None:
        """Lines for the window's width; known before anything is laid out, so that the first picture has them."""
        box = self.query_one(LineList)
        width = max(20, min(WIDTH, self.app.size.width) - FRAME - _BAR)
        if width == self._filled:
            return
        self._filled = width
        lines: list[Line] = []
        if self.metric is not None:
            lines += metric_lines(self.metric, width)
        if self.subject is not None:
            lines += key_lines(self.subject, width)
        lines.append(Line.of("MARKS", "head"))
        for mark, meaning in MARKS:
            lines += _row(drawn(self.app, mark), meaning, width, 6)
        box.set_lines(
            [Line(tuple((drawn(self.app, text), role) for text, role in line.parts)) for line in lines]
        )


def metric_lines(metric: Metric, width: int) -> list[Line]:
    """Name, unit, formula and why of one metric, wrapped to ``width``."""
    unit = metric.shown_unit or "bytes"
    lines = [Line.of(f"THIS PANEL: {metric.short}  {metric.name}", "head")]
    for label, text in (("unit", f"{unit}; {metric.direction}"), ("is", metric.formula), ("why", metric.why)):
        lines += _row(label, text, width, 6)
    return [*lines, Line.of("")]


def key_lines(screen: Screen[Any], width: int) -> list[Line]:
    """The keys of ``screen`` as they are bound now (a keymap may have moved them), then the app's own."""
    groups: dict[str, dict[str, list[str]]] = {"THIS SCREEN": {}, "MOVING": {}, "EVERYWHERE": {}}
    for key, active in screen.active_bindings.items():
        binding = active.binding
        moves = binding.action.startswith(_FOCUS)
        if not binding.id and not moves:
            continue  # the library's own, such as copying selected text with the mouse
        if active.node is screen.app:
            group = "EVERYWHERE"
        else:
            group = "THIS SCREEN" if active.node is screen and not moves else "MOVING"
        text = _LIBRARY_WORDS.get(binding.action) or active.tooltip or binding.description
        if text:
            groups[group].setdefault(literal(text), []).append(key_name(binding.key_display or key))
    labels = {text: " ".join(sorted(names, key=len)) for g in groups.values() for text, names in g.items()}
    column = min(max(map(cells, labels.values()), default=0) + 2, _COLUMN, width * 2 // 5)
    lines: list[Line] = []
    for group, entries in groups.items():
        if entries:
            lines.append(Line.of(group, "head"))
            for text in entries:
                lines += _row(labels[text], text, width, column)
            lines.append(Line.of(""))
    return lines


def _row(label: str, text: str, width: int, column: int) -> Iterable[Line]:
    """``label`` in a column of its own beside ``text``; both go over several lines where they have to."""
    labels = wrapped(label, column - 1)
    texts = wrapped(text, max(10, width - column - 3))
    for left, right in itertools.zip_longest(labels, texts, fillvalue=""):
        yield Line(((f" {fit(left, column)}", "mark"), (right, "")))
