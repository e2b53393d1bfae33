"""The lines at the bottom: what is under way, the newest of the event log, the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdq_tui.core.metrics import format_bytes
from pdq_tui.host.view import SessionView
from pdq_tui.tui import keys
from pdq_tui.tui.heading import Look
from pdq_tui.tui.lines import Row, keys_that_fit
from pdq_tui.tui.rows import apart, clip, row


def task_rows(view: SessionView, width: int, look: Look) -> list[Row]:
    """What is under way, with progress: loading, converting, packing, warming up."""
    rows = []
    for task in view.tasks:
        bar = progress_bar(task.done, task.total, 20 if width >= 100 else 12, look)
        amount = _amount(task.done, task.total, task.unit)
        text = f" {look.foreign(task.task)}  {look.foreign(task.label)}"
        tail = f"  {amount}  {task.seconds:.1f} s  esc cancels "
        rows.append(apart([(text, "head")], [(f"  {bar}", "mark"), (tail, "dim")], width))
    return rows


def progress_bar(done: float, total: float | None, width: int, look: Look) -> str:
    """A bar, empty where the total is not known."""
    full, empty = ("#", ".") if look.plain else ("█", "░")
    share = min(1.0, max(0.0, done / total)) if total and total > 0 and done == done else 0.0
    return full * round(share * width) + empty * (width - round(share * width))


def _amount(done: float, total: float | None, unit: str) -> str:
    if not done and not total:
        return "running"
    if unit.lower() in ("b", "bytes"):
        ends = format_bytes(total) if total else ""
        return f"{format_bytes(done)} of {ends}" if ends else format_bytes(done)
    if total:
        return f"{min(done / total, 9.99) * 100:3.0f} %"
    return f"{done:.0f} {unit}".strip()


def note_rows(view: SessionView, width: int, height: int, look: Look) -> list[Row]:
    """Newest first; a warning and an error carry their mark."""
    rows = []
    for text in (view.run_text, view.journal_text):
        if text:
            rows.append(clip([(f" ! {look.foreign(text)}", "bad")], width))
    guard = guard_words(view)
    if guard is not None:
        words, role = guard
        rows.append(
            clip([(f" ! {look.foreign(words)}" if role == "bad" else f" {look.own(words)}", role)], width)
        )
    for note in reversed(view.notes[-height:] if height > 0 else ()):
        mark, role = {"warn": ("! ", "warn"), "error": (look.own("✗ "), "bad")}.get(note.level, ("", ""))
        text = look.foreign(note.text)
        if note.hint:
            text += f" - {look.foreign(note.hint)}"
        rows.append(clip([(f" {note.clock}  ", "dim"), (f"{mark}{text}", role)], width))
    return rows[: max(height, 0)]


def guard_words(view: SessionView) -> tuple[str, str] | None:
    """One sentence on what the guard has seen, and the role to say it in; None where nothing is guarded."""
    g = view.guard
    if g is None or not (g.every or g.text):
        return None
    if g.text:
        return g.text, "bad"
    head = f"guard: 1 of {g.every} requests of A re-scored by B"
    if g.last is None:
        return f"{head}; none so far", "dim"
    if g.last.kld is None:
        return f"{head}; the last could not be: {g.last.reason or 'no figure'}", "warn"
    mean = g.last.kld if g.mean is None else g.mean
    same = "" if g.last.same_top1 is None else f", same top-1 {g.last.same_top1:.0%}"
    return f"{head}; KLD {mean:.3g} nats (limit {g.limit:g}){same}, {g.checks} checks", "dim"


def bottom_rows(
    view: SessionView, width: int, height: int, look: Look, first: Sequence[Row] = ()
) -> list[Row]:
    """Tasks first, then the newest notes."""
    rows = [*first, *task_rows(view, width, look)][:height]
    return rows + note_rows(view, width, height - len(rows), look)


def first_words(names: Mapping[str, str]) -> tuple[str, str, str]:
    """What to press, for somebody who has never been here. ``names``: binding id → keys, where they were moved."""

    def key(id_: str) -> str:
        return keys.shown(id_, names)

    return (
        f"{key('live.arm_a')} {key('live.arm_b')}: an arm; {key('live.interleave')}: both in turns, compared; "
        f"{key('live.prefill')} {key('live.decode')}: precision",
        f"{key('live.snapshot')}: keep; {key('screen.compare')}: compare; {key('app.export')}: report; "
        f"{key('screen.verdict')}: is it worth it here?",
        f"{key('app.help')}: every key and every number; {key('app.quit')}: quit",
    )


def key_row(view: SessionView, width: int, look: Look, readonly: bool, names: Mapping[str, str]) -> Row:
    """The keys that matter most, as many as fit, and that there are more. ``names``: binding id → keys, where they were moved."""

    def key(*ids: str) -> str:
        return "/".join(keys.shown(i, names) for i in ids)

    stop = "Stop" if view.running or view.wants_loop else "Start"
    screens = " ".join(f"{key(f'screen.{mode}')} {word}" for _, mode, word in keys.SCREENS)
    changing = [
        f"{key('live.run')} {stop}",
        f"{key('live.arm_a', 'live.arm_b')} Arm",
        f"{key('live.prefill', 'live.decode')} Stage",
        f"{key('live.interleave')} ABBA",
        f"{key('live.snapshot')} Snap",
    ]
    items = [
        *([] if readonly else changing),
        f"{key('app.export')} Export",
        f"{key('live.zoom')} Zoom",
        f"{key('live.freeze')} Pause",
    ]
    if width < 110:
        screens = screens.replace("Compare", "Cmp").replace("Policies", "Pol")
    if width < 80:
        screens = " ".join(key(f"screen.{mode}") for _, mode, _ in keys.SCREENS) + " Screens"
    first = f" {screens} {look.own('│')}"
    return row(keys_that_fit([first, *items], f"{key('app.help')} Help", width, " ", look.own("…")))
