"""The worker's line to the app: events leave on what was fd 1 at start, and nothing else does."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Final

from pdq_tui.core.protocol import DROPPABLE, Dropped, Message, encode

#: Samples kept for a slow reader; beyond it the oldest are dropped and counted.
_KEPT: Final = 64


def claim_stdout() -> int:
    """Duplicate fd 1 for events, then point fd 1 at fd 2, the log: libraries print from C++ to either."""
    events = os.dup(1)
    os.set_inheritable(events, False)
    os.dup2(2, 1)
    return events


class Channel:
    """``send`` never waits: a thread of its own writes, and samples may be dropped. The other messages never are."""

    def __init__(self, fd: int, role: str) -> None:
        self._fd = fd
        self._role = role
        self._ready = threading.Condition()
        self._kept: deque[Message] = deque()
        self._samples: deque[Message] = deque()
        self._dropped = 0
        self._told = 0
        threading.Thread(target=self._write, name="events", daemon=True).start()

    def send(self, message: Message) -> None:
        with self._ready:
            if not isinstance(message, DROPPABLE):
                self._kept.append(message)
            else:
                if len(self._samples) >= _KEPT:
                    self._samples.popleft()
                    self._dropped += 1
                self._samples.append(message)
            self._ready.notify()

    def _next(self) -> Message:
        with self._ready:
            while True:
                if self._kept:
                    return self._kept.popleft()
                if self._dropped > self._told:
                    self._told = self._dropped
                    return Dropped(count=self._dropped, role=self._role)
                if self._samples:
                    return self._samples.popleft()
                self._ready.wait()

    def _write(self) -> None:
        while True:
            line = encode(self._next())
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except BrokenPipeError:
                os._exit(0)  # nobody reads any more
