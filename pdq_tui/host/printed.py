"""What a worker's libraries print, C++ included, marked with time and stage on its way into the run's log.

The worker writes into a file in memory, never a pipe: a write into it ends at once also while this process is busy,
stopped or gone, and when the disk is full. A thread of ours looks ten times a second, marks what is new and writes it
to the log; what it has read is given back to the machine. Without this process and the worker nothing of it is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

#: How late a line may be marked, in seconds.
POLL_S: Final = 0.1
#: How often an unfinished line (a progress bar) is written on, in seconds.
PARTIAL_S: Final = 1.0
READ_BYTES: Final = 1 << 20
#: What is kept of one worker's words in the log; beyond it only the last ones are, when the worker has ended.
LOG_BYTES: Final = 64 << 20
TAIL_BYTES: Final = 4096
#: A line without an end is cut here.
LINE_BYTES: Final = 64 << 10

_MARK: Final = re.compile(rb"\d{4}-\d\d-\d\dT(\d\d:\d\d:\d\d)\.\d{3} (\S+) ")
_FALLOC_KEEP_SIZE: Final = 1
_FALLOC_PUNCH_HOLE: Final = 2


class Printed:
    """One worker's words. ``fd`` is what becomes its descriptors 1 and 2.

    log     the file that lines are appended to as ``YYYY-MM-DDTHH:MM:SS.mmm stage text``; None: only the tail is kept.
            A log that cannot be written costs lines, and it says how many, never the run.
    stage   the word for what the worker is doing now; called in our thread.
    Raises OSError where there is no memory or no place for the file.
    """

    def __init__(
        self, role: str, log: Path | None, stage: Callable[[], str], *, limit_bytes: int = LOG_BYTES
    ) -> None:
        self.fd = _spool(role)
        self._stage = stage
        self._limit = limit_bytes
        self._log = _open(log)
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._closed = False
        self._offset = 0  # read so far
        self._freed = 0  # given back so far
        self._rest = b""  # an unfinished line
        self._shown = b""  # what of it stands in the log already
        self._partial_at = 0.0
        self._tail = b""
        self._written = 0
        self._lost = 0
        self._torn = False
        self._thread = threading.Thread(target=self._follow, name=f"{role}-printed", daemon=True)

    def start(self) -> None:
        """Begin to look; once the worker runs."""
        self._thread.start()

    def tail(self) -> str:
        """The last that was printed, without marks; carriage-return progress collapsed."""
        self._take()
        lines = [collapsed(line) for line in self._tail.split(b"\n")]
        return b"\n".join(line for line in lines if line.strip()).decode("utf-8", "replace")

    def close(self) -> None:
        """Take in the rest and let go of the files."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._take()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._rest.strip():
                self._put(self._marked(self._rest + b"\n"))
            self._confess()
            os.close(self.fd)
            if self._log is not None:
                os.close(self._log)

    def _follow(self) -> None:
        while not self._ending.wait(POLL_S):
            self._take()

    def _take(self) -> None:
        """Everything new, up to the end at the time of the call."""
        with self._lock:
            if self._closed:
                return
            end = os.fstat(self.fd).st_size
            while self._offset < end:
                block = os.pread(self.fd, min(READ_BYTES, end - self._offset), self._offset)
                if not block:
                    break
                self._offset += len(block)
                self._tail = (self._tail + block)[-TAIL_BYTES:]
                whole, newline, self._rest = (self._rest + block).rpartition(b"\n")
                if newline:
                    self._put(self._marked(whole + b"\n"))
                if len(self._rest) > LINE_BYTES:
                    self._rest = self._rest[-LINE_BYTES:]
                self._give_back()
            self._show_partial()

    # -- under the lock ------------------------------------------------------------------------------------------------

    def _marked(self, lines: bytes) -> bytes:
        """Whole lines, each with the mark; a line that stands there unfinished is written over."""
        if b"\r" in lines:
            lines = b"".join(collapsed(line) + b"\n" for line in lines[:-1].split(b"\n"))
        mark = self._mark()
        again = b"\r" if self._shown else b""
        self._shown = b""
        return again + mark + lines[:-1].replace(b"\n", b"\n" + mark) + b"\n"

    def _mark(self) -> bytes:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now))
        stage = self._stage().encode("utf-8", "replace").split() or [b"-"]
        return b"%s.%03d %s " % (stamp.encode(), int(now % 1 * 1000), b"-".join(stage))

    def _show_partial(self) -> None:
        now = time.monotonic()
        text = collapsed(self._rest)
        if not text.strip() or text == self._shown or now - self._partial_at < PARTIAL_S:
            return
        self._partial_at = now
        again = b"\r" if self._shown else b""
        self._put(again + self._mark() + text)
        self._shown = text

    def _put(self, data: bytes) -> None:
        if self._log is None:
            return
        if self._written + len(data) > self._limit:
            self._limit = 0
            self._lost += len(data)
            return
        if self._lost:
            data = (b"\n" if self._torn else b"") + self._loss() + data
        try:
            rest = memoryview(data)
            while rest:
                count = os.write(self._log, rest)
                self._written += count
                rest = rest[count:]
            self._lost, self._torn = 0, False
        except OSError:
            # a full disk: the line is torn where it broke off, and what is missing is told with the next that fits
            self._torn = self._torn or len(rest) < len(data)
            self._lost += len(rest)

    def _loss(self) -> bytes:
        return self._mark() + f"… {self._lost:,} bytes are missing here\n".encode()

    def _confess(self) -> None:
        """What went beyond the limit ends with a sentence and the worker's last words."""
        if not self._lost or self._log is None:
            return
        mark = self._mark()
        last = b"".join(mark + collapsed(line) + b"\n" for line in self._tail.split(b"\n") if line.strip())
        with contextlib.suppress(OSError):  # still no room: there is nobody left to tell
            os.write(self._log, (b"\n" if self._shown or self._torn else b"") + self._loss() + last)

    def _give_back(self) -> None:
        """Let the machine have the memory of what was read. Where it cannot, the file stays as long as the worker."""
        whole = self._offset // READ_BYTES * READ_BYTES
        if whole > self._freed:
            flags = ctypes.c_int(_FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE)
            start, length = ctypes.c_int64(self._freed), ctypes.c_int64(whole - self._freed)
            if hasattr(_LIBC, "fallocate64"):
                _LIBC.fallocate64(self.fd, flags, start, length)
            self._freed = whole


_LIBC: Final = ctypes.CDLL(None)


def _spool(role: str) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(f"{role}-printed")
    else:
        with tempfile.TemporaryFile("w+b", buffering=0) as file:
            fd = os.dup(file.fileno())
    # whoever opens it once more (/dev/stderr) appends as well
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


def _open(path: Path | None) -> int | None:
    if path is None:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None


def collapsed(line: bytes) -> bytes:
    """What a terminal would show of a line that rewrote itself with carriage returns: its last state."""
    if b"\r" not in line:
        return line
    return next((state for state in reversed(line.split(b"\r")) if state.strip()), b"")


def unmarked(line: bytes) -> tuple[bytes, bytes]:
    """(``HH:MM:SS stage``, text) of a line of the log; the former is empty for a line without a mark."""
    found = _MARK.match(line)
    return (b"%s %s" % found.groups(), line[found.end() :]) if found is not None else (b"", line)
