"""Policies: the list, an editor that validates as you change, and what the engine made of what was applied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical

from pdq_tui import locations
from pdq_tui.core import catalog
from pdq_tui.core.policy import Policy, policy_to_toml
from pdq_tui.errors import PdqError
from pdq_tui.store.atomic import write_file
from pdq_tui.tui import policy_edit, policy_lines
from pdq_tui.tui.ask import Ask
from pdq_tui.tui.coverage import coverage_lines
from pdq_tui.tui.keys import bound
from pdq_tui.tui.lines import Line, LineList, drawn, is_readonly, literal, sentence
from pdq_tui.tui.page import Page
from pdq_tui.tui.policy_drafts import Drafts
from pdq_tui.tui.policy_editor import PolicyEditor, question
from pdq_tui.tui.runnable import Refusal, refusals


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
        & #coverage { height: 30%; min-height: 5; }
        &.-narrow #list-panel { width: 31; }
        &.-tall #top { height: auto; }
        &.-tall #list-panel, &.-tall #edit-panel { height: 21; }
        &.-tall #coverage { height: 1fr; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        bound("a", "apply('A')", "Apply to A", "policies.apply_a", "the next requests of arm A use it"),
        bound("b", "apply('B')", "Apply to B", "policies.apply_b", "the next requests of arm B use it"),
        bound("enter", "change", "Change", "policies.change", "choose or type the value of this row"),
        bound("l,right", "step(1)", "Next value", "policies.next", "next legal value", show=False),
        bound("h,left", "step(-1)", "Prev", "policies.prev", "previous legal value", show=False),
        bound("n", "new", "New", "policies.new", "a new policy: bf16 in both stages"),
        bound("c", "clone", "Clone", "policies.clone", "a copy under another name"),
        bound("w", "write", "Write", "policies.write", "write it to your policy folder"),
        bound("u", "undo", "Undo", "policies.undo", "take the last change back"),
        bound("delete", "delete", "Delete", "policies.delete", "delete your own file, after a question"),
    ]

    def __init__(self, user_dir: Path | None = None) -> None:
        super().__init__()
        self.user_dir = user_dir or locations.user_policies()
        self.drafts = Drafts()
        self._coverage: list[Line] = []

    def compose_body(self) -> ComposeResult:
        with Horizontal(id="top"):
            with Vertical(id="list-panel", classes="panel") as panel:
                panel.border_title = "policies"
                yield LineList(id="list")
            yield PolicyEditor(id="edit-panel", classes="panel")
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
        self.drafts.read(entries)
        damaged = self.drafts.damaged
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
        return self.drafts.now(self.chosen)

    def _show_list(self) -> None:
        self.query_one("#list", LineList).set_lines(
            policy_lines.list_lines(self.drafts, self._arms(), self.wanted)
        )

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

    @property
    def _editor(self) -> PolicyEditor:
        return self.query_one(PolicyEditor)

    def _show_edit(self) -> None:
        entry = self.drafts.entry(self.chosen)
        reason = entry.error if entry and entry.error else "choose a policy on the left"
        self.set_title(policy_lines.title_text(self.drafts, self.chosen))
        self._editor.show(self.draft, reason)
        self._editor.foresee(self.draft, self._session().view(1.0))

    def _refusals(self) -> Refusal:
        return refusals(self._session().view(1.0))

    def _put(self, policy: Policy, said: str = "") -> None:
        name = self.chosen
        if name is None or not self.drafts.put(name, policy):
            return
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
        draft, field = self.draft, self._editor.field
        if draft is None or field is None or field.typed:
            return
        value = policy_edit.stepped(draft, field, step, self._refusals())
        if value is None:
            self.say(f"{field.label}: {policy_edit.note_of(draft, field) or 'there is no other value'}")
        else:
            self._put(*policy_edit.changed(draft, field, value))

    def action_change(self) -> None:
        if self.focused is not None and self.focused.id == "list":
            self.query_one("#edit", LineList).focus()
            return
        draft, field = self.draft, self._editor.field
        if draft is None or field is None:
            return

        def answered(value: str | None) -> None:
            if value is not None:
                self._put(*policy_edit.changed(draft, field, value))

        self.app.push_screen(question(draft, field, self._refusals()), answered)

    def on_line_list_chosen(self, event: LineList.Chosen) -> None:
        if event.lines.id == "edit":
            self.action_change()

    def action_undo(self) -> None:
        if not self.drafts.undo(self.chosen):
            self.say("nothing to take back")
            return
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
        given = self.drafts.to_apply(name) or draft
        self._session().set_policy(arm, given)
        self.say(f"{given.name} asked for arm {arm}; the engine swaps at the next request and reports below")
        self._show_list()
        self._refresh_coverage()

    def _refresh_coverage(self) -> None:
        if not self.is_current:
            return
        view = self._session().view(1.0)
        lines = [
            Line(tuple((drawn(self.app, text), role) for text, role in line.parts))
            for line in coverage_lines(
                [view.arms[name] for name in sorted(view.arms)], readonly=is_readonly(self.app)
            )
        ]
        self._editor.foresee(self.draft, view)
        if lines != self._coverage:
            self._coverage = lines
            self.query_one("#coverage", LineList).set_lines(lines)
            self._show_list()

    def on_screen_resume(self) -> None:
        if self.is_mounted:
            self._refresh_coverage()

    # -- files

    def action_new(self) -> None:
        self._add(
            Policy(name=self.drafts.free_name("my-policy")), "new: bf16 in both stages, not written yet"
        )

    def action_clone(self) -> None:
        draft = self.draft
        if draft is None:
            self.say("nothing to clone: this file is damaged")
        else:
            name = self.drafts.free_name(f"{draft.name.rstrip('*')}-copy")
            self._add(msgspec.structs.replace(draft, name=name), "cloned, not written yet")

    def _add(self, policy: Policy, said: str) -> None:
        self.drafts.add(policy)
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
        path, question = self.drafts.place(policy, self.user_dir)
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
        self.drafts.written(name, policy)
        self._read(then=policy.name, said=f"written: {literal(path)}")

    def action_delete(self) -> None:
        name = self.chosen
        if name is None:
            return
        entry = self.drafts.entry(name)
        if entry is None:
            self.drafts.forget(name)
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
        self.drafts.forget(name)
        self._read(said=f"deleted: {literal(path)}")
