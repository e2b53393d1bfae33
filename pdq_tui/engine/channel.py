"""The worker's two pipes: commands in, events out, and what both must never do to a timed loop.

Events are encoded by whoever sends them (between requests) and written by a thread of their own, so that a slow reader
stops nobody. Droppable ones are dropped while the queue is long, and counted; the others never. Commands are read by a
thread as well: those that must take effect at once (stop, cancel, ping, arm selection) do so while the main thread
loads, packs or measures.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO

from pdq_tui.core import protocol as p

#: Droppable events are dropped while more than this many wait.
LONG_QUEUE = 256


class EventWriter:
    """``send`` never blocks and never raises for a closed pipe: without a reader this process has no purpose."""

    def __init__(self, fd: int, on_broken: Callable[[], None]) -> None:
        self._fd = fd
        self._on_broken = on_broken
        self._lines: deque[bytes] = deque()
        self._wake = threading.Condition()
        self._dropped = 0
        self._told = 0
        self._writing = False
        threading.Thread(target=self._write, name="events", daemon=True).start()

    def send(self, event: p.Message) -> None:
        if isinstance(event, p.DROPPABLE) and len(self._lines) > LONG_QUEUE:
            with self._wake:
                self._dropped += 1
            return
        line = p.encode(event)
        with self._wake:
            self._lines.append(line)
            self._wake.notify()

    def _write(self) -> None:
        while True:
            with self._wake:
                while not self._lines:
                    self._writing = False
                    self._wake.notify_all()
                    self._wake.wait()
                self._writing = True
                lines = list(self._lines)
                self._lines.clear()
                if self._dropped > self._told:
                    self._told = self._dropped
                    lines.append(p.encode(p.Dropped(count=self._dropped)))
            rest = memoryview(b"".join(lines))
            try:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError:
                self._on_broken()
                return

    def flush(self, timeout_s: float) -> None:
        """Wait until all is written, at most ``timeout_s``."""
        with self._wake:
            self._wake.wait_for(lambda: not self._lines and not self._writing, timeout_s)


class Inbox:
    """Commands in the order they came, each with its number; stop and cancel reach everything asked for before them."""

    def __init__(self, send: Callable[[p.Message], None]) -> None:
        self._send = send
        self._wake = threading.Condition()
        self._waiting: deque[tuple[int, Any]] = deque()
        self._last = 0
        self._stopped = 0
        self._cancelled = 0
        self.shutdown = False
        self.selected: str | None = None
        self.interleave: bool | None = None

    def read(self, stream: BinaryIO, on_end: Callable[[], None]) -> None:
        """Read lines until the other end closes; to be run in a thread."""
        for line in iter(stream.readline, b""):
            try:
                command = p.decode_command(line)
            except (p.ProtocolError, p.UnknownTypeError) as error:
                # A failure and no note: whoever sent it waits for what it would have brought.
                self._send(
                    p.Failure(
                        kind="internal", message=f"command not understood: {error.message}", hint=error.hint
                    )
                )
                continue
            self.take(command)
        on_end()

    def take(self, command: Any) -> None:
        """Act on what takes effect at once; queue the rest."""
        if isinstance(command, p.Ping):
            self._send(p.Pong(id=command.id))
            return
        with self._wake:
            match command:
                case p.Stop():
                    self._stopped = self._last
                case p.CancelTask():
                    self._cancelled = self._last
                    self._let_go_of_loads()
                case p.SelectArm():
                    self.selected = command.arm
                case p.Interleave():
                    self.interleave = command.on
                case p.Shutdown():
                    self.shutdown = True
                    self._stopped = self._cancelled = self._last
                case p.Watch():
                    pass
                case _:
                    self._last += 1
                    self._waiting.append((self._last, command))
                    if isinstance(command, p.StartLoop):
                        self.selected, self.interleave = command.arm, command.interleave
            self._wake.notify_all()

    def _let_go_of_loads(self) -> None:
        """A load that nobody has begun, since libraries are still imported, is over at once."""
        loads = [taken for taken in self._waiting if isinstance(taken[1], p.Load)]
        for taken in loads:
            self._waiting.remove(taken)
            label = taken[1].model
            self._send(p.TaskEnded(task="load", label=label, ok=False, seconds=0.0, cancelled=True))

    def stopped(self, number: int) -> bool:
        """Was the run with this number asked to stop?"""
        return number <= self._stopped or self.shutdown

    def cancelled(self, number: int) -> bool:
        """Was the task with this number cancelled?"""
        return number <= self._cancelled or self.shutdown

    def next(self) -> tuple[int, Any] | None:
        """The next command, waited for; None after Shutdown."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self.shutdown)
            return None if self.shutdown else self._waiting.popleft()

    def peek(self) -> Any:
        """The next command without taking it, or None; does not wait."""
        return self._waiting[0][1] if self._waiting else None
