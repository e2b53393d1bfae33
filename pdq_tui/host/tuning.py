"""Kernel candidates measured by the engine, driven from the caller's thread, and what to keep of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdq_tui.core import protocol as p
from pdq_tui.core.tuned import TunedTable, Winner, difference, read_tuned, tuned_file, write_tuned
from pdq_tui.errors import PdqError
from pdq_tui.host.conversation import Conversation, InterruptedEarlyError
from pdq_tui.host.runs import new_run


@dataclass
class Tuning:
    """``started`` None: interrupted before anything was measured. ``complete``: every cell was measured."""

    started: p.TuneStarted | None = None
    timed: list[p.KernelsTimed] = field(default_factory=list)
    interrupted: bool = False

    @property
    def complete(self) -> bool:
        return self.started is not None and len(self.timed) == self.started.cells


def measure_kernels(
    load: p.Load,
    command: p.Tune,
    *,
    on_event: Callable[[Any], None] | None = None,
    engine_argv: Sequence[str] | None = None,
) -> Tuning:
    """Load the model and measure. Ctrl-C keeps what was measured. Call it from the main thread.

    Raises PdqError with the exit code of the command; an engine that dies on the way raises as well.
    """
    found = Tuning()

    def seen(event: Any) -> None:
        if isinstance(event, p.TuneStarted):
            found.started = event
        elif isinstance(event, p.KernelsTimed):
            found.timed.append(event)

    # Nothing of it is a run: no directory, no sensors.
    talk = Conversation(new_run(in_memory=True), on_event=on_event, sensors=False, engine_argv=engine_argv)
    try:
        with talk:
            talk.load(load)
            talk.tune(command, seen)
    except InterruptedEarlyError:
        pass
    found.interrupted = talk.interrupted
    return found


def winners(timed: Iterable[p.KernelsTimed]) -> list[Winner]:
    return [
        Winner(
            format=cell.format, dtype=cell.dtype, N=cell.N, K=cell.K, rows=(cell.rows_low, cell.rows_high),
            layout=t.layout, kernel=t.kernel, us=t.us, error=t.error,
        )
        for cell in timed
        for t in cell.times
        if t.best and t.us is not None and t.error is not None
    ]  # fmt: skip


def keep(tuning: Tuning, folder: Path | None = None) -> tuple[Path, str]:
    """Write the winners beside what is known of other shapes and formats on this machine; (the file, what became of an
    older one). Raises PdqError where it cannot be written."""
    started = tuning.started
    assert started is not None
    path = tuned_file(started.device, folder)
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    told = ""
    table = TunedTable(started.device, started.stamp)
    try:
        before = read_tuned(path)
    except PdqError as error:
        before, told = None, f"the damaged one is replaced ({error.message})"
    if before is not None:
        why = difference(before.stamp, started.stamp)
        if why is None and before.device == started.device:
            table = before
        else:
            told = f"one that was measured elsewhere is replaced ({why})"
    write_tuned(path, table.with_winners(winners(tuning.timed), now))
    return path, told
