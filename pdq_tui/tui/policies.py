"""Policies: the list, an editor that validates as you change, and what the engine made of what was applied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Static

from pdq_tui import locations
from pdq_tui.core import catalog
from pdq_tui.core.policy import Policy, policy_to_toml
from pdq_tui.errors import PdqError
from pdq_tui.store.atomic import write_file
from pdq_tui.tui import policy_edit
from pdq_tui.tui.ask import Ask, Pick, Write
from pdq_tui.tui.coverage import coverage_lines
from pdq_tui.tui.forecast import ForecastLines
from pdq_tui.tui.lines import Line, LineList, drawn, fit, is_readonly, literal, sentence, wrapped
from pdq_tui.tui.page import Page


def write_policy(policy: Policy, path: Path, over: bool) -> None:
    """Write a policy file, complete or not at all. Raises PdqError, also where it exists and ``over`` is False."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PdqError(f"{path.parent} cannot be made: {error.strerror}") from error
    write_file(path, policy_to_toml(policy).encode(), force=over)


class PoliciesScreen(Page):
    """Nothing runs until a or b is pressed; the engine then swaps at the next request's start."""

    TITLE_WORD = "3 POLICIES"
    DEFAULT_CSS = """
    PoliciesScreen {
        & #top { height: 1fr; }
        & #list-panel { width: 34; }
        & #edit-panel { width: 1fr; }
        & #valid { height: auto; max-height: 3; padding: 0 1; }
        & #coverage { height: 30%; min-height: 5; }
        &.-narrow #list-panel { width: 31; }
        &.-tall #top { height: auto; }
        &.-tall #list-panel, &.-tall #edit-panel { height: 21; }
        &.-tall #coverage { height: 1fr; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "a",
            "apply('A')",
            "Apply to A",
            id="policies.apply_a",
            tooltip="the next requests of arm A use it",
        ),
        Binding(
            "b",
            "apply('B')",
            "Apply to B",
            id="policies.apply_b",
            tooltip="the next requests of arm B use it",
        ),
        Binding(
            "enter", "change", "Change", id="policies.change", tooltip="choose or type the value of this row"
        ),
        Binding(
            "l,right", "step(1)", "Next value", id="policies.next", tooltip="next legal value", show=False
        ),
        Binding("h,left", "step(-1)", "Prev", id="policies.prev", tooltip="previous legal value", show=False),
        Binding("n", "new", "New", id="policies.new", tooltip="a new policy: bf16 in both stages"),
        Binding("c", "clone", "Clone", id="policies.clone", tooltip="a copy under another name"),
        Binding("w", "write", "Write", id="policies.write", tooltip="write it to your policy folder"),
        Binding("u", "undo", "Undo", id="policies.undo", tooltip="take the last change back"),
        Binding(
            "delete",
            "delete",
            "Delete",
            id="policies.delete",
            tooltip="delete your own file, after a question",
        ),
    ]

    def __init__(self, user_dir: Path | None = None) -> None:
        super().__init__()
        self.user_dir = user_dir or locations.user_policies()
        self.entries: dict[str, catalog.Entry] = {}
        #: every policy's states by its name in the list, oldest first; the last is what is shown
        self.history: dict[str, list[Policy]] = {}
        self._coverage: list[Line] = []

    def compose_body(self) -> ComposeResult:
        with Horizontal(id="top"):
            with Vertical(id="list-panel", classes="panel") as panel:
                panel.border_title = "policies"
                yield LineList(id="list")
            with Vertical(id="edit-panel", classes="panel") as panel:
                panel.border_title = "edit"
                yield LineList(id="edit")
                yield Static(id="valid", markup=False)
                yield ForecastLines(id="forecast")
        coverage = LineList(id="coverage", cursor=False)
        coverage.add_class("panel")
        coverage.border_title = "what the engine made of it"
        yield coverage

    def started(self) -> None:
        self.query_one("#list", LineList).focus()
        self.say("reading the policies …")
        self._read()
        self._refresh_coverage()
        self.set_interval(1.0, self._refresh_coverage)

    def resized(self) -> None:
        self.call_after_refresh(self._show_edit)

    # -- the list

    @work(thread=True, exclusive=True, group="policies")
    def _read(self, then: str = "", said: str = "") -> None:
        try:
            entries = catalog.policies(self.user_dir)
        except OSError as error:
            self.app.call_from_thread(self.say, f"the policies cannot be read: {sentence(error)}")
            return
        self.app.call_from_thread(self._show_entries, entries, then, said)

    def _show_entries(self, entries: dict[str, catalog.Entry], then: str, said: str) -> None:
        self.entries = entries
        for name, entry in entries.items():
            if entry.policy is not None and name not in self.history:
                self.history[name] = [entry.policy]
        for name in [n for n in self.history if n not in entries and len(self.history[n]) == 1 and n != then]:
            del self.history[name]
        damaged = sum(entry.policy is None for entry in entries.values())
        self.say(
            said
            or (
                f"{damaged} damaged: chosen, each says why"
                if damaged
                else self._hint("a or b applies; nothing runs before")
            )
        )
        self._show_list()
        if then:
            self.query_one("#list", LineList).move_to(then)
        self._show_edit()

    @property
    def chosen(self) -> str | None:
        """Name of the policy under the list's cursor."""
        key = self.query_one("#list", LineList).key
        return key if isinstance(key, str) else None

    @property
    def draft(self) -> Policy | None:
        """The policy as edited so far; None where nothing is chosen or the file is damaged."""
        states = self.history.get(self.chosen or "")
        return states[-1] if states else None

    def _modified(self, name: str) -> bool:
        entry, states = self.entries.get(name), self.history.get(name)
        return states is not None and (entry is None or entry.policy != states[-1])

    def _show_list(self) -> None:
        arms = self._arms()
        lines = []
        for name in dict.fromkeys([*self.entries, *self.history]):
            if self.wanted and self.wanted not in name.lower():
                continue
            entry = self.entries.get(name)
            used = "".join(
                arm
                for arm, digest in arms.items()
                if name in self.history and digest == self.history[name][-1].digest
            )
            origin = entry.origin if entry else "unsaved"
            if entry is not None and entry.policy is None and name not in self.history:
                lines.append(Line(((f"! {literal(name)}", "bad"), ("  damaged", "dim")), name))
                continue
            mark = "*" if self._modified(name) else ""
            note = "" if origin == "shipped" else f"  {origin}"
            lines.append(Line(((f"{used:<2} ", "mark"), (literal(name) + mark, ""), (note, "dim")), name))
        self.query_one("#list", LineList).set_lines(lines or [Line.of("no policy matches", "dim")])

    def _arms(self) -> dict[str, str]:
        view = self._session().view(1.0)
        return {name: arm.wanted.digest for name, arm in view.arms.items() if arm.wanted is not None}

    def _session(self) -> Any:
        return getattr(self.app, "session")  # noqa: B009 - the app's class is not this room's to know

    def filtered(self) -> None:
        self._show_list()

    def on_line_list_moved(self, event: LineList.Moved) -> None:
        if event.lines.id == "list":
            self._show_edit()

    # -- the editor

    def _show_edit(self) -> None:
        edit, valid, name = self.query_one("#edit", LineList), self.query_one("#valid", Static), self.chosen
        draft = self.draft
        if draft is None:
            entry = self.entries.get(name or "")
            reason = entry.error if entry and entry.error else "choose a policy on the left"
            edit.set_lines([Line.of(part, "warn") for part in wrapped(literal(reason), edit.size.width - 3)])
            valid.update("")
            self._foresee(None)
            self.set_title(f"{literal(name)}: damaged" if entry else "")
            return
        lines: list[Line] = []
        heading: str | None = None
        for field in policy_edit.FIELDS:
            title = field.stage or ("" if field.id == "name" else "both")
            if title and title != heading:
                lines.append(Line.of({"both": "BOTH STAGES"}.get(title, title.upper()), "head"))
                heading = title
            value, note = literal(policy_edit.value_of(draft, field)), policy_edit.note_of(draft, field)
            role = "dim" if note and field.id != "keep" else ""
            gap = "  " if value else ""
            lines.append(
                Line(
                    ((fit(field.label, 13), "dim"), (value, role), (gap + note if note else "", "dim")),
                    field.id,
                )
            )
        edit.set_lines(lines)
        wrong = policy_edit.wrong_with(draft)
        storage, verdict = f"storage {draft.storage}", f"✗ {literal(wrong)}" if wrong else "✓ valid"
        if edit.size.width >= 70:
            storage += f": {policy_edit.STORAGE_WORDS[draft.storage]}"
        valid.update(
            drawn(
                self.app,
                f"{storage}\n{verdict}" if wrong or edit.size.width >= 70 else f"{verdict}, {storage}",
            )
        )
        self._foresee(None if wrong else draft)
        entry = self.entries.get(name or "")
        state = "modified *" if self._modified(name or "") else "as in its file"
        self.set_title(
            f"{literal(draft.name)}  ({state})   {literal(entry.path) if entry else 'not written yet'}"
        )

    def _foresee(self, policy: Policy | None) -> None:
        """What it would take, before it is applied."""
        budget = getattr(self.app, "weight_budget_bytes")  # noqa: B009 - see _session
        self.query_one("#forecast", ForecastLines).about(policy, self._session().view(1.0), budget)

    def _field(self) -> policy_edit.Field | None:
        key = self.query_one("#edit", LineList).key
        return policy_edit.BY_ID.get(key) if isinstance(key, str) else None

    def _put(self, policy: Policy, said: str = "") -> None:
        name = self.chosen
        if name is None or policy == self.history[name][-1]:
            return
        self.history[name].append(policy)
        self._show_list()
        self._show_edit()
        self.say(
            said
            or policy_edit.wrong_with(policy)
            or self._hint("changed; a or b applies it, w writes it, u takes it back")
        )

    def _hint(self, text: str) -> str:
        return "read-only: nothing is applied or written" if is_readonly(self.app) else text

    def action_step(self, step: int) -> None:
        draft, field = self.draft, self._field()
        if draft is None or field is None or field.typed:
            return
        value = policy_edit.stepped(draft, field, step)
        if value is None:
            self.say(f"{field.label}: {policy_edit.note_of(draft, field) or 'there is no other value'}")
        else:
            self._put(*policy_edit.changed(draft, field, value))

    def action_change(self) -> None:
        if self.focused is not None and self.focused.id == "list":
            self.query_one("#edit", LineList).focus()
            return
        draft, field = self.draft, self._field()
        if draft is None or field is None:
            return
        where = f"{field.stage} " if field.stage else ""
        value = policy_edit.value_of(draft, field)
        if field.typed:
            hint = "  (patterns = format; … @prefill or @decode)" if field.id == "keep" else ""
            dialog: Any = Write(
                f"{where}{field.label}{hint}", value, lambda text: self._wrong(draft, field, text)
            )
        else:
            dialog = Pick(f"{where}{field.label}", policy_edit.choices(draft, field), value)
        self.app.push_screen(
            dialog, lambda new: None if new is None else self._put(*policy_edit.changed(draft, field, new))
        )

    @staticmethod
    def _wrong(draft: Policy, field: policy_edit.Field, text: str) -> str | None:
        try:
            policy, _ = policy_edit.changed(draft, field, text)
        except PdqError as error:
            return str(error)
        return policy_edit.wrong_with(policy)

    def on_line_list_chosen(self, event: LineList.Chosen) -> None:
        if event.lines.id == "edit":
            self.action_change()

    def action_undo(self) -> None:
        states = self.history.get(self.chosen or "")
        if not states or len(states) < 2:
            self.say("nothing to take back")
            return
        states.pop()
        self._show_list()
        self._show_edit()
        self.say("taken back")

    # -- applying

    def action_apply(self, arm: str) -> None:
        draft, name = self.draft, self.chosen
        if draft is None or name is None:
            self.say("nothing to apply: this file is damaged")
            return
        wrong = policy_edit.wrong_with(draft)
        if wrong:
            self.say(f"not applied: {wrong}")
            return
        if self._modified(name):
            draft = msgspec.structs.replace(draft, name=draft.name.rstrip("*") + "*")
        self._session().set_policy(arm, draft)
        self.say(f"{draft.name} asked for arm {arm}; the engine swaps at the next request and reports below")
        self._show_list()
        self._refresh_coverage()

    def _refresh_coverage(self) -> None:
        if not self.is_current:
            return
        view = self._session().view(1.0)
        lines = [
            Line(tuple((drawn(self.app, text), role) for text, role in line.parts))
            for line in coverage_lines([view.arms[name] for name in sorted(view.arms)])
        ]
        draft = self.draft
        self._foresee(draft if draft is not None and policy_edit.wrong_with(draft) is None else None)
        if lines != self._coverage:
            self._coverage = lines
            self.query_one("#coverage", LineList).set_lines(lines)
            self._show_list()

    def on_screen_resume(self) -> None:
        if self.is_mounted:
            self._refresh_coverage()

    # -- files

    def action_new(self) -> None:
        self._add(Policy(name=self._free_name("my-policy")), "new: bf16 in both stages, not written yet")

    def action_clone(self) -> None:
        draft = self.draft
        if draft is None:
            self.say("nothing to clone: this file is damaged")
        else:
            name = self._free_name(f"{draft.name.rstrip('*')}-copy")
            self._add(msgspec.structs.replace(draft, name=name), "cloned, not written yet")

    def _free_name(self, stem: str) -> str:
        taken = {*self.entries, *self.history}
        return next(n for n in (stem, *(f"{stem}-{i}" for i in range(2, 10_000))) if n not in taken)

    def _add(self, policy: Policy, said: str) -> None:
        self.history[policy.name] = [policy]
        self._show_list()
        self.query_one("#list", LineList).move_to(policy.name)
        self.query_one("#edit", LineList).focus()
        self._show_edit()
        self.say(said)

    def action_write(self) -> None:
        draft, name = self.draft, self.chosen
        if draft is None or name is None:
            self.say("nothing to write: this file is damaged")
            return
        wrong = policy_edit.wrong_with(draft)
        if wrong:
            self.say(f"not written: {wrong}")
            return
        policy = msgspec.structs.replace(draft, name=draft.name.rstrip("*"))
        entry = self.entries.get(policy.name)
        path = self.user_dir / f"{policy.name}.toml"
        question = None
        if entry is not None and entry.origin == "user":
            path = Path(entry.path)
            question = f"{path} exists. Write over it?"
        elif entry is not None:
            question = (
                f"{policy.name} is shipped. Your file {path} would stand in its place from then on. Write it?"
            )
        self._after(question, lambda: self._write(name, policy, path, question is not None))

    def _after(self, question: str | None, then: Callable[[], Any]) -> None:
        if question is None:
            then()
        else:
            self.app.push_screen(
                Ask(literal(question)), lambda yes: then() if yes else self.say("left as it was")
            )

    @work(thread=True, group="policies")
    def _write(self, name: str, policy: Policy, path: Path, over: bool) -> None:
        try:
            write_policy(policy, path, over)
        except PdqError as error:
            self.app.call_from_thread(self.say, f"not written: {literal(error.message)}")
            return
        self.app.call_from_thread(self._written, name, policy, path)

    def _written(self, name: str, policy: Policy, path: Path) -> None:
        states = self.history.pop(name, [policy])
        self.history[policy.name] = [*states[:-1], policy]
        if name in self.entries and name != policy.name and self.entries[name].policy is not None:
            self.history[name] = [self.entries[name].policy]  # type: ignore[list-item]
        self._read(then=policy.name, said=f"written: {literal(path)}")

    def action_delete(self) -> None:
        name = self.chosen
        entry = self.entries.get(name or "")
        if name is None:
            return
        if entry is None:
            self.history.pop(name, None)
            self._show_list()
            self._show_edit()
            self.say(f"{literal(name)} was never written; it is gone from the list")
        elif entry.origin != "user":
            self.say(f"{literal(name)} is shipped and cannot be deleted")
        else:
            self._after(f"Delete {entry.path}?", lambda: self._delete(name, Path(entry.path)))

    @work(thread=True, group="policies")
    def _delete(self, name: str, path: Path) -> None:
        try:
            path.unlink()
        except OSError as error:
            self.app.call_from_thread(self.say, f"not deleted: {sentence(error)}")
            return
        self.app.call_from_thread(self._deleted, name, path)

    def _deleted(self, name: str, path: Path) -> None:
        self.history.pop(name, None)
        self._read(said=f"deleted: {literal(path)}")
