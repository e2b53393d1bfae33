"""Workers that outlived an app which was killed: each is offered to be ended, and none is ended unasked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from pdq_tui.core.metrics import format_bytes
from pdq_tui.errors import PdqError
from pdq_tui.host.runs import Leftover, end_leftover, leftovers

#: (level, text, hint), as the event log takes it.
Tell = Callable[[str, str, str | None], None]


def found(runs_dirs: Iterable[Path]) -> list[Leftover]:
    """For a thread: locks are read, and processes looked up. The locks stay: the session goes by them to find the runs
    that were cut short, at the same time, and clears them away."""
    return leftovers(set(runs_dirs), clear=False)


def question(left: Leftover) -> str:
    """Says what it is, and what it holds as long as it is there."""
    held = f" It holds {format_bytes(left.memory_bytes)}." if left.memory_bytes else ""
    return (
        f"The app of run {left.run_id} was killed, its {left.role} process {left.pid} is still there."
        f"{held} What runs beside it is slower. End it?"
    )


def end(left: Leftover, tell: Tell) -> None:
    """For a thread: it takes up to 4 s. ``tell`` says how it went."""
    try:
        end_leftover(left)
    except PdqError as error:
        tell("error", error.message, error.hint)
    else:
        tell("info", f"{left.role} process {left.pid} of run {left.run_id} ended", None)
