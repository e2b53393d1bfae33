"""What a worker is at, in one word, from what it is sent and says: the stage that its printed lines are marked with."""

from __future__ import annotations

from typing import Any

from pdq_tui.core import protocol as p


class StageWatch:
    """``word``: starting, idle, the task (load, convert, pack, warmup …), the run's kind, or prefill and decode.

    Fed by the supervisor from several threads and read by another; each step is one assignment.
    """

    def __init__(self, role: str) -> None:
        self.word = "starting"
        self._base = "idle" if role == "engine" else "reading"

    def sent(self, command: Any) -> None:
        """A command that the worker was sent: it imports its libraries for seconds before it can say what it does."""
        if isinstance(command, p.Load):
            self.word = "load"

    def take(self, event: Any) -> None:
        """An event of the worker's."""
        match event:
            case p.Progress(task="measure"):
                return  # beside the stages, which say more
            case p.Progress():
                self.word = event.task
            case p.StageSample():
                self.word = event.stage
            case p.RunStarted():
                self.word = self._base = event.kind
            case p.RunEnded():
                self.word = self._base = "idle"
            case p.Hello() if self.word != "load":
                self.word = self._base
            case p.TaskEnded() | p.ModelReady() | p.ArmReady() | p.ArmRefused():
                self.word = self._base
