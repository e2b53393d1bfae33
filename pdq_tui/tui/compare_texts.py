"""What both sides of a pair answered to the same prompts, side by side, over the Compare screen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from pdq_tui.tui.ask import BOX, FRAME
from pdq_tui.tui.lines import Line, LineList, drawn, fit, is_ascii, literal, title, wrapped

if TYPE_CHECKING:
    from pdq_tui.core.texts import Answers

#: Cells between the two columns; below this width the texts stand one below the other.
_GAP, _BESIDE = 3, 50


class TextsDialog(ModalScreen[None]):
    """The answers to one prompt at a time. It opens on the first prompt whose answers part."""

    DEFAULT_CSS = (
        "TextsDialog {"
        + BOX
        + " & > #box { width: 100%; height: 100%; } & LineList { height: 1fr; max-height: 100%; } }"
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q,t", "dismiss(None)", "Close", id="texts.close", tooltip="back to the table"),
        Binding(
            "left_square_bracket,h,left", "turn(-1)", "Prompt", id="texts.prev", tooltip="previous prompt"
        ),
        Binding("right_square_bracket,l,right", "turn(1)", "Prompt", id="texts.next", tooltip="next prompt"),
        Binding("n", "part", "Next that parts", id="texts.part", tooltip="next prompt whose answers part"),
    ]

    def __init__(self, pairs: Sequence[Answers], names: tuple[str, str]) -> None:
        """``pairs``: at least one. ``names``: of the reference and the candidate."""
        super().__init__()
        self.pairs, self.names = pairs, names
        self.at = next((i for i, pair in enumerate(pairs) if not pair.same), 0)

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.border_subtitle = "[ ] prompt   n next that parts   j k scroll   esc closes"
            yield LineList(id="texts", cursor=False)

    def on_mount(self) -> None:
        self.set_class(is_ascii(self.app), "-ascii")
        self.query_one(LineList).focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self._fill)

    def action_turn(self, step: int) -> None:
        self.at = (self.at + step) % len(self.pairs)
        self._fill()
        self.query_one(LineList).scroll_home(animate=False, immediate=True)

    def action_part(self) -> None:
        later = [*range(self.at + 1, len(self.pairs)), *range(self.at + 1)]
        self.at = next((i for i in later if not self.pairs[i].same), self.at)
        self.action_turn(0)

    def _fill(self) -> None:
        pair, box = self.pairs[self.at], self.query_one(LineList)
        parted = sum(not p.same for p in self.pairs)
        told = f"{parted} of {len(self.pairs)} part" if parted else f"all {len(self.pairs)} are the same"
        self.query_one("#box", Vertical).border_title = title(
            drawn(self.app, f"prompt {pair.prompt + 1} · {self.at + 1} of {len(self.pairs)}, {told}")
        )
        width = max(20, self.app.size.width - FRAME - 1)  # of the scroll bar
        box.set_lines(text_lines(pair, self.names, width, plain=is_ascii(self.app)))


def text_lines(pair: Answers, names: tuple[str, str], width: int, *, plain: bool = False) -> list[Line]:
    """Both texts in ``width`` cells, what they share dim, a line where they part, and how each goes on. Blanks and line
    ends are kept: answers may differ in nothing else."""
    star, bar, rule = ("* ", " | ", "-") if plain else ("★ ", " │ ", "─")
    heads = (f"{star}{literal(names[0])}", literal(names[1]))
    counts = ("", "") if pair.tokens is None else tuple(f"{n} tokens" for n in pair.tokens)
    word = "the same to the end" if pair.same else pair.word
    told = [f"{rule * 2} {part} " for part in wrapped(word, width - 4)]
    role = "dim" if pair.same else "warn"
    mark = [Line.of(part + rule * max(0, width - cell_len(part)), role) for part in told]
    if width < _BESIDE:
        lines: list[Line] = []
        for head, count, rest in zip(heads, counts, pair.rests, strict=True):
            lines.append(Line.of(fit(f"{head}  {count}", width).rstrip(), "head"))
            lines += [Line.of(text, "dim") for text in kept_lines(pair.common, width)]
            lines += [*mark, *(Line.of(text) for text in kept_lines(rest, width))]
        return lines
    each = (width - _GAP) // 2
    titles = [f"{head}  {count}".rstrip() for head, count in zip(heads, counts, strict=True)]
    shared = kept_lines(pair.common, each)
    rests = itertools.zip_longest(*(kept_lines(rest, each) for rest in pair.rests), fillvalue="")
    return [
        _beside(titles[0], titles[1], each, bar, "head"),
        *(_beside(text, text, each, bar, "dim") for text in shared),
        *mark,
        *(_beside(left, right, each, bar, "") for left, right in rests),
    ]


def _beside(left: str, right: str, width: int, bar: str, role: str) -> Line:
    return Line(((fit(left, width), role), (bar, "dim"), (fit(right, width).rstrip(), role)))


def kept_lines(text: str, width: int) -> list[str]:
    """``text`` literally in lines of at most ``width`` cells, broken behind a blank where there is one; where the text
    itself breaks, the line ends in ␊. Nothing for no text."""
    lines: list[str] = []
    for part in text.splitlines(keepends=True):
        rest = literal(part)
        while (cut := _cells_of(rest, width)) < len(rest):
            blank = rest.rfind(" ", 0, cut)
            cut = blank + 1 if blank > 0 else cut
            lines.append(rest[:cut])
            rest = rest[cut:]
        if rest:
            lines.append(rest)
    return lines


def _cells_of(text: str, width: int) -> int:
    """Characters of ``text`` that fit into ``width`` cells; at least one."""
    used = 0
    for index, char in enumerate(text):
        used += cell_len(char)
        if used > width:
            return max(1, index)
    return len(text)
