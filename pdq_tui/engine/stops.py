"""Whether this process was stopped and continued (SIGSTOP, ctrl+z of a shell): what was being timed then is no measurement."""

from __future__ import annotations

import signal
import time
from types import FrameType

_continued_ns = 0


def watch() -> None:
    """To be called once, in the main thread."""
    signal.signal(signal.SIGCONT, _note)


def _note(_number: int, _frame: FrameType | None) -> None:
    global _continued_ns
    _continued_ns = time.monotonic_ns()


def since(t_ns: int) -> bool:
    """Was the process continued after ``t_ns`` (monotonic clock)?"""
    return _continued_ns > t_ns
