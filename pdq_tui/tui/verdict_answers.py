"""What the base and a policy answered to the tasks of an evaluation, side by side, with a person's marks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual.binding import Binding, BindingType
from textual.containers import Vertical

from pdq_tui.errors import PdqError
from pdq_tui.tui import keys
from pdq_tui.tui.ask import FRAME
from pdq_tui.tui.compare_texts import TextsDialog, text_lines
from pdq_tui.tui.lines import Line, LineList, drawn, is_ascii, is_readonly, literal, sentence, title, wrapped

if TYPE_CHECKING:
    from pdq_tui.core.texts import Answers

#: Lines of a task's prompt that are shown at most: a long context is not what is read here.
_PROMPT_LINES: Final = 4
_MARKS: Final = {"same": "good", "changed": "warn", "worse": "bad"}


class AnswersDialog(TextsDialog):
    """One task at a time. Opens on the first that parts and has no mark; a mark goes on to the next such."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "mark('same')", "Same", id="answers.same", tooltip="mark: says the same"),
        Binding(
            "c", "mark('changed')", "Changed", id="answers.changed", tooltip="mark: changed, and no worse"
        ),
        Binding("w", "mark('worse')", "Worse", id="answers.worse", tooltip="mark: worse than the base's"),
        Binding("u", "mark('')", "Unmark", id="answers.unmark", tooltip="take the mark back"),
        Binding("p", "policy", "Policy", id="answers.policy", tooltip="the next policy's answers"),
    ]

    def __init__(
        self,
        tasks: Mapping[str, Any],
        of: Mapping[str, Mapping[str, Answers]],
        marks: Mapping[tuple[str, str], str],
        place: Path,
    ) -> None:
        """``tasks``: what the step found; ``of``: by policy, the pairs by task, at least one of each. ``place``: the
        evaluation's folder, where marks are kept."""
        self._tasks, self._of, self.place = tasks, of, place
        self.marks = dict(marks)
        self.policies = list(of)
        self.policy = self.policies[0]
        self._items = {str(item["id"]): item for item in tasks.get("items", [])}
        self._error = ""
        self._ids: list[str] = list(of[self.policy])
        super().__init__(list(of[self.policy].values()), (str(tasks["base"]), self.policy))
        self.at = self._next(0)

    def on_mount(self) -> None:
        marking = "" if is_readonly(self.app) else "s same  c changed  w worse  u unmark   "
        self.query_one("#box", Vertical).border_subtitle = title(
            f"{marking}[ ] task   n next that parts   p policy   esc"
        )
        super().on_mount()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return keys.works(action, is_readonly(self.app))

    def _next(self, begin: int) -> int:
        """From ``begin`` on the first that parts and has no mark, else the first that parts, else ``begin``."""
        order = [*range(begin, len(self.pairs)), *range(begin)]
        parted = [i for i in order if not self.pairs[i].same]
        unmarked = [i for i in parted if (self.policy, self._ids[i]) not in self.marks]
        return next(iter(unmarked or parted), begin % len(self.pairs))

    def action_policy(self) -> None:
        self.policy = self.policies[(self.policies.index(self.policy) + 1) % len(self.policies)]
        self._ids, self.pairs = list(self._of[self.policy]), list(self._of[self.policy].values())
        self.names = (self.names[0], self.policy)
        self.at = self._next(0)
        self.action_turn(0)

    def action_mark(self, mark: str) -> None:
        from pdq_tui.judge import marks

        task = self._ids[self.at]
        try:
            marks.put(self.place, self.policy, task, mark)
        except PdqError as error:
            self._error = sentence(error)
            self._fill()
            return
        self._error = ""
        self.marks.pop((self.policy, task), None)
        if mark:
            self.marks[self.policy, task] = mark
            self.at = self._next(self.at + 1)
        self.action_turn(0)

    def _fill(self) -> None:
        pair, task = self.pairs[self.at], self._ids[self.at]
        parted = [i for i, p in enumerate(self.pairs) if not p.same]
        marked = sum((self.policy, self._ids[i]) in self.marks for i in parted)
        told = f"{task} · {self.at + 1} of {len(self.pairs)}, {len(parted)} part, {marked} of them marked"
        self.query_one("#box", Vertical).border_title = title(drawn(self.app, told))
        width = max(20, self.app.size.width - FRAME - 1)  # of the scroll bar
        lines = [Line.of(text, "bad") for text in wrapped(literal(self._error), width)] if self._error else []
        lines += self._task_lines(task, width)
        self.query_one(LineList).set_lines(
            [
                *(Line(tuple((drawn(self.app, t), r) for t, r in line.parts)) for line in lines),
                *text_lines(pair, self.names, width, plain=is_ascii(self.app)),
            ]
        )

    def _task_lines(self, task: str, width: int) -> list[Line]:
        item = self._items.get(task, {})
        prompt = wrapped(literal(item.get("prompt", "")), width)
        shown = prompt[:_PROMPT_LINES]
        if len(prompt) > _PROMPT_LINES:
            shown[-1] = f"… {len(prompt) - _PROMPT_LINES + 1} more lines"
        answers = self._tasks.get("answers", {})
        right = [
            f"{literal(name)} {'right' if answers.get(name, {}).get(task, {}).get('right') else 'wrong'}"
            for name in self.names
        ]
        mark = self.marks.get((self.policy, task), "")
        kind, wanted = (literal(item.get(key, "")) for key in ("kind", "answer"))
        facts = f"{kind}   wanted: {wanted}   {', '.join(right)}".strip()
        return [
            *(Line.of(text) for text in shown),
            *(Line.of(text, "dim") for text in wrapped(facts, width)),
            Line.of(f"marked {mark}" if mark else "not marked", _MARKS.get(mark, "dim")),
            Line.of(""),
        ]
