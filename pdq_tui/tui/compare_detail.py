"""All that is known about one row of a comparison, over the Compare screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from pdq_tui.report.cells import about, delta_interval_text, delta_text, judgement_text, value_text
from pdq_tui.tui.ask import BOX, FRAME, WIDTH
from pdq_tui.tui.compare_rows import setup_text
from pdq_tui.tui.compare_spread import Samples, histogram_lines
from pdq_tui.tui.lines import Line, LineList, drawn, is_ascii, literal, wrapped

if TYPE_CHECKING:  # polars comes with it
    from pdq_tui.store.compare import Comparison, Row


class RowDetail(ModalScreen[None]):
    """All that is known about one row."""

    DEFAULT_CSS = "RowDetail {" + BOX + " & LineList { max-height: 100%; } }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q", "dismiss(None)", "Close", id="detail.close", tooltip="back to the table"),
    ]

    def __init__(self, comparison: Comparison, row: Row, sides: Samples | None) -> None:
        super().__init__()
        self.comparison, self.row, self.sides = comparison, row, sides

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.border_subtitle = "esc closes"
            yield LineList(id="detail", cursor=False)

    def on_mount(self) -> None:
        self.set_class(is_ascii(self.app), "-ascii")
        self.query_one(LineList).focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self._fill)

    def _fill(self) -> None:
        box = self.query_one(LineList)
        width = max(24, min(WIDTH, self.app.size.width) - FRAME - 1)  # of the scroll bar
        lines = detail_lines(self.comparison, self.row, self.sides, width)
        box.styles.height = len(lines)
        box.set_lines([Line(tuple((drawn(self.app, t), r) for t, r in line.parts)) for line in lines])


def detail_lines(comparison: Comparison, row: Row, sides: Samples | None, width: int) -> list[Line]:
    """Everything about one row: what it is, how it was judged, how its values are spread."""
    entry = about(row.metric)
    side = next(c for c in comparison.candidates if c.id == row.candidate)
    unit = "bytes" if entry.unit == "B" else entry.shown_unit
    lines = [Line.of(f"{row.name}  {unit}  {entry.direction}", "head")]
    facts = [("is", entry.formula), ("why", entry.why)]
    judged = judgement_text(row) if row.judgement else "not judged: it follows from the speed rows"
    how = f"{judged}; {row.method}" + (f", {row.blocks} blocks" if row.blocks else "")
    facts.append(("judged", how + (f": {row.reason}" if row.reason else "")))
    if row.delta is not None and row.delta_ci95 is not None:
        base = "geometric mean over the blocks" if row.blocks else "median of the blocks"
        text = f"{delta_text(row)} {delta_interval_text(row)} {entry.shown_unit}: the reference's {base} × (ratio − 1)"
        facts.append(("Δ", text))
    for label, name, summary in (
        ("★", comparison.reference.label, row.reference),
        ("", side.label, row.value),
    ):
        reason = f": {summary.reason}" if summary.reason else ""
        facts.append(
            (label or "against", f"{name}  {value_text(row.metric, summary)}  n={summary.n}{reason}")
        )
    facts.append(("set-up", setup_text(comparison.setup_of(side.id))))
    for label, text in facts:
        first, *more = wrapped(literal(text), width - 9)
        lines.append(Line(((f"{label:<8} ", "mark"), (first, ""))))
        lines += [Line.of(" " * 9 + part) for part in more]
    if sides is not None:
        lines += histogram_lines(row.metric, sides, (comparison.reference.label, side.label), width)
    return lines
