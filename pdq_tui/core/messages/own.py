"""What the app's own process writes into the journal beside the workers' events."""

from __future__ import annotations

from pdq_tui.core.messages.base import Message


class WorkerStarted(Message):
    role: str
    pid: int
    restart: int = 0


class WorkerExited(Message):
    """``text`` is the sentence for the person; ``expected`` is True after Shutdown; ``replaced`` is True when a new
    worker takes its place without being asked; ``hint`` is what to do about it, where the worker knew."""

    role: str
    pid: int
    returncode: int | None
    expected: bool
    text: str
    tail: str = ""
    replaced: bool = False
    hint: str | None = None


class SnapshotSaved(Message):
    arm: str
    name: str
    path: str
    note: str = ""
