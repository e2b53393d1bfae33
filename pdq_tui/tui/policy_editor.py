"""The Policies screen's editor: one policy's values, whether they are valid, what it would take, and the question
that changes one of them."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from pdq_tui.core.policy import Policy
from pdq_tui.errors import PdqError
from pdq_tui.host.view import SessionView
from pdq_tui.tui import policy_edit, policy_lines
from pdq_tui.tui.ask import Pick, Write
from pdq_tui.tui.forecast import ForecastLines
from pdq_tui.tui.lines import Line, LineList, drawn, literal, wrapped
from pdq_tui.tui.runnable import Refusal


class PolicyEditor(Vertical):
    """A panel around the list ``edit``. It changes nothing: the screen does, by its keys."""

    DEFAULT_CSS = """
    PolicyEditor {
        & #valid { height: auto; max-height: 3; padding: 0 1; }
    }
    """

    def compose(self) -> ComposeResult:
        yield LineList(id="edit")
        yield Static(id="valid", markup=False)
        yield ForecastLines(id="forecast")

    def on_mount(self) -> None:
        self.border_title = "edit"

    @property
    def field(self) -> policy_edit.Field | None:
        """The field under the cursor."""
        key = self.query_one("#edit", LineList).key
        return policy_edit.BY_ID.get(key) if isinstance(key, str) else None

    def show(self, draft: Policy | None, reason: str) -> None:
        """``draft``, or ``reason`` where there is none."""
        edit, valid = self.query_one("#edit", LineList), self.query_one("#valid", Static)
        if draft is None:
            edit.set_lines([Line.of(part, "warn") for part in wrapped(literal(reason), edit.size.width - 3)])
            valid.update("")
            return
        edit.set_lines(policy_lines.edit_lines(draft))
        wrong = policy_edit.wrong_with(draft)
        valid.update(drawn(self.app, policy_lines.verdict_text(draft, wrong, edit.size.width)))

    def foresee(self, draft: Policy | None, view: SessionView) -> None:
        """What it would take, before it is applied; nothing of what is not valid."""
        budget = getattr(self.app, "weight_budget_bytes")  # noqa: B009 - the app's class is not this room's to know
        valid = draft is not None and policy_edit.wrong_with(draft) is None
        self.query_one("#forecast", ForecastLines).about(draft if valid else None, view, budget)


def question(draft: Policy, field: policy_edit.Field, refusal: Refusal) -> Pick | Write:
    """The dialog that asks for another value of ``field``; ``refusal``: why a format does not run here."""
    where = f"{field.stage} " if field.stage else ""
    value = policy_edit.value_of(draft, field)
    if not field.typed:
        return Pick(f"{where}{field.label}", policy_edit.choices(draft, field, refusal), value)
    hint = "  (patterns = format; … @prefill or @decode)" if field.id == "keep" else ""
    return Write(f"{where}{field.label}{hint}", value, lambda text: _wrong(draft, field, text))


def _wrong(draft: Policy, field: policy_edit.Field, text: str) -> str | None:
    try:
        policy, _ = policy_edit.changed(draft, field, text)
    except PdqError as error:
        return str(error)
    return policy_edit.wrong_with(policy)
