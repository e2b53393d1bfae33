"""The Policies screen's list, editor and verdict as lines: pure functions; every glyph is the caller's to translate."""

from __future__ import annotations

from collections.abc import Mapping

from pdq_tui.core.policy import Policy
from pdq_tui.tui import policy_edit
from pdq_tui.tui.lines import Line, fit, literal
from pdq_tui.tui.policy_drafts import Drafts

#: From this many cells on the editor says what a storage means.
_ROOMY = 70


def list_lines(drafts: Drafts, arms: Mapping[str, str], wanted: str) -> list[Line]:
    """One line a policy. ``arms``: arm → digest of the policy that it is to run; ``wanted``: only names with this."""
    lines = []
    for name in drafts.names:
        if wanted and wanted not in name.lower():
            continue
        entry, now = drafts.entry(name), drafts.now(name)
        if now is None:
            lines.append(Line(((f"! {literal(name)}", "bad"), ("  damaged", "dim")), name))
            continue
        used = "".join(arm for arm, digest in arms.items() if digest == now.digest)
        origin = entry.origin if entry else "unsaved"
        mark = "*" if drafts.modified(name) else ""
        note = "" if origin == "shipped" else f"  {origin}"
        lines.append(Line(((f"{used:<2} ", "mark"), (literal(name) + mark, ""), (note, "dim")), name))
    return lines or [Line.of("no policy matches", "dim")]


def edit_lines(policy: Policy) -> list[Line]:
    """One line a field under its stage; the line's key is the field's id."""
    lines: list[Line] = []
    heading: str | None = None
    for field in policy_edit.FIELDS:
        title = field.stage or ("" if field.id == "name" else "both")
        if title and title != heading:
            lines.append(Line.of({"both": "BOTH STAGES"}.get(title, title.upper()), "head"))
            heading = title
        value, note = literal(policy_edit.value_of(policy, field)), policy_edit.note_of(policy, field)
        role = "dim" if note and field.id != "keep" else ""
        gap = "  " if value else ""
        parts = ((fit(field.label, 13), "dim"), (value, role), (gap + note if note else "", "dim"))
        lines.append(Line(parts, field.id))
    return lines


def verdict_text(policy: Policy, wrong: str | None, width: int) -> str:
    """How it is stored and whether it is valid, on one line or two. ``wrong``: what is not, else None."""
    storage, verdict = f"storage {policy.storage}", f"✗ {literal(wrong)}" if wrong else "✓ valid"
    if width >= _ROOMY:
        return f"{storage}: {policy_edit.STORAGE_WORDS[policy.storage]}\n{verdict}"
    return f"{storage}\n{verdict}" if wrong else f"{verdict}, {storage}"


def title_text(drafts: Drafts, name: str | None) -> str:
    """The policy's name, whether it was changed, and its file."""
    now, entry = drafts.now(name), drafts.entry(name)
    if now is None:
        return f"{literal(name)}: damaged" if entry else ""
    state = "modified *" if drafts.modified(name) else "as in its file"
    return f"{literal(now.name)}  ({state})   {literal(entry.path) if entry else 'not written yet'}"
