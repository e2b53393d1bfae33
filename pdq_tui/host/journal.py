"""The journal: every event of a session as one JSON line, appended the moment it is known.

Losing the disk never loses the run: lines that cannot be written stay in memory in their order, ``text`` says so,
and the file is tried again. A line torn by a full disk is closed by a newline before the next one, so that a reader
loses that line alone.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from pdq_tui.core.protocol import ProtocolError, UnknownTypeError, VersionError, decode_event

RETRY_S: Final = 5.0
#: What may wait in memory for the disk. Beyond it droppable lines are let go (and counted), records never.
BACKLOG_BYTES: Final = 256 * 1024 * 1024


@dataclass
class ReadCounts:
    """What a reader skipped: ``torn`` lines that are no messages, ``unknown`` types of a newer version."""

    torn: int = 0
    unknown: int = 0


def read_events(path: Path, counts: ReadCounts | None = None) -> Iterator[Any]:
    """The events of a journal in order. Torn lines and unknown types are skipped and counted.

    Raises OSError where the file cannot be read and VersionError where it was written by another protocol version.
    """
    with path.open("rb") as file:
        yield from _decode_lines(file, counts or ReadCounts())


def _first_bytes(file: BinaryIO, size: int) -> Iterator[bytes]:
    for line in file:
        size -= len(line)
        if size < 0:
            return
        yield line


def _decode_lines(lines: Iterable[bytes], counts: ReadCounts) -> Iterator[Any]:
    for line in lines:
        if not line.strip():
            continue
        try:
            yield decode_event(line)
        except VersionError:
            raise
        except ProtocolError:
            counts.torn += 1
        except UnknownTypeError:
            counts.unknown += 1


class Journal:
    """Append-only, from any thread. Never raises for the disk's sake.

    path   the file, or None to keep everything in memory.
    text   what the person must know about the disk; empty while all is well.
    """

    def __init__(self, path: Path | None, *, retry_s: float = RETRY_S) -> None:
        self.path = path
        self.text = "" if path is not None else "this run is kept in memory only"
        self.lost = 0
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._torn = False
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._next_try = 0.0
        self._closed = False
        if path is not None:
            self._open()

    def write(self, line: bytes, *, droppable: bool = False) -> None:
        """Append one encoded message (newline included)."""
        with self._lock:
            if self._closed:
                return
            if not self._backlog and self._fd is not None and self._put(line):
                return
            if droppable and self._backlog_bytes > BACKLOG_BYTES:
                self.lost += 1
                return
            self._backlog.append(line)
            self._backlog_bytes += len(line)
            if self.path is not None and time.monotonic() >= self._next_try:
                self._flush()

    def retry(self) -> bool:
        """Try the disk now. True when everything is on it."""
        with self._lock:
            if self.path is not None:
                self._flush()
            return not self._backlog

    def events(self, counts: ReadCounts | None = None) -> list[Any]:
        """Everything recorded so far: what is on disk, then what waits in memory."""
        counts = counts or ReadCounts()
        with self._lock:
            waiting = list(self._backlog)
            size = self._size()
        found: list[Any] = []
        # Outside the lock: writers go on meanwhile, behind ``size``.
        if size and self.path is not None:
            try:
                with self.path.open("rb") as file:
                    found = list(_decode_lines(_first_bytes(file, size), counts))
            except OSError as error:
                self.text = f"the journal cannot be read back: {error.strerror}"
        found.extend(_decode_lines(waiting, counts))
        return found

    def close(self) -> None:
        """Last try for what waits, then closed; later writes are ignored."""
        with self._lock:
            if self._backlog and self.path is not None:
                self._flush()
            self._closed = True
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _size(self) -> int:
        """Bytes on disk; 0 for what is not a regular file: a device has no end to read to."""
        if self.path is None:
            return 0
        try:
            status = self.path.stat()
        except OSError:
            return 0
        return status.st_size if stat.S_ISREG(status.st_mode) else 0

    # -- under the lock ------------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        assert self.path is not None
        try:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._failed(error)
            return False
        return True

    def _put(self, line: bytes) -> bool:
        assert self._fd is not None
        rest = memoryview(b"\n" + line if self._torn else line)
        try:
            while rest:
                written = os.write(self._fd, rest)
                rest = rest[written:]
                self._torn = bool(rest)
        except OSError as error:
            self._failed(error)
            return False
        return True

    def _flush(self) -> None:
        if self._fd is None and not self._open():
            return
        while self._backlog:
            if not self._put(self._backlog[0]):
                return
            self._backlog_bytes -= len(self._backlog.popleft())
        self.text = ""

    def _failed(self, error: OSError) -> None:
        self._next_try = time.monotonic() + self._retry_s
        self.text = (
            f"the journal cannot be written ({error.strerror}): events are kept in memory and tried again; "
            "export to another place or free some space"
        )
