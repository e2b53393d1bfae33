"""The end of a growing log file, in bounded memory, with carriage-return progress collapsed to its last state."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from typing import NamedTuple

from pdq_tui.host.printed import collapsed, unmarked

#: At most this much is read at once; what came faster is skipped and said so.
READ_BYTES = 1 << 20
#: Lines kept.
KEPT_LINES = 5_000
#: A line longer than this is cut: a library that prints a tensor must not cost the screen its life.
LINE_CHARS = 2_000


class Entry(NamedTuple):
    """``when``: time and stage of a line that was marked with them, else ""."""

    when: str
    text: str


class LogTail:
    """Follows one file. One reader at a time: whoever holds ``busy``.

    entries  newest last, at most KEPT_LINES; an unfinished last line is ``partial``, shown but not kept yet; None
             where there is none.
    error    a sentence while the file cannot be read, else None. A file that is not there yet is no error.
    """

    def __init__(self, path: Path, keep: int = KEPT_LINES) -> None:
        self.path = path
        self.busy = threading.Lock()
        self.entries: deque[Entry] = deque(maxlen=keep)
        self.partial: Entry | None = None
        self.error: str | None = None
        self.skipped_bytes = 0
        #: whether the file was looked at before, so that what comes now is new
        self.looked = False
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._rest = b""

    def read(self) -> bool:
        """Take in what was appended since the last call; True where anything changed. Never raises OSError."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                changed = self._take(file.fileno(), status)
        except FileNotFoundError:
            changed, self.error = self.error is not None, None
        except OSError as error:
            text = f"{self.path} cannot be read: {error.strerror}"
            changed, self.error = text != self.error, text
        else:
            changed, self.error = changed or self.error is not None, None
        changed = changed or not self.looked
        self.looked = True
        return changed

    def _take(self, descriptor: int, status: os.stat_result) -> bool:
        identity = (status.st_dev, status.st_ino)
        if identity != self._identity or status.st_size < self._offset:
            # another file under the same name, or cut short: begin again with its end
            self._identity, self._offset, self._rest = identity, 0, b""
        behind = status.st_size - self._offset
        if behind <= 0:
            return False
        if behind > READ_BYTES:
            skipped = behind - READ_BYTES
            self.skipped_bytes += skipped
            self._offset += skipped
            self._rest = b""
            self.entries.append(Entry("", f"… {skipped:,} bytes came too fast and are only in {self.path}"))
        block = os.pread(descriptor, READ_BYTES, self._offset)
        self._offset += len(block)
        *whole, self._rest = (self._rest + block).split(b"\n")
        self.entries.extend(entry(line) for line in whole[-(self.entries.maxlen or 0) :])
        if len(self._rest) > READ_BYTES:
            self._rest = self._rest[-READ_BYTES:]
        self.partial = entry(self._rest) if self._rest else None
        return True


def entry(line: bytes) -> Entry:
    """A line of the file as it is shown: carriage-return progress in its last state, and cut where it is too long."""
    when, rest = unmarked(collapsed(line))
    text = rest.decode("utf-8", "replace")
    return Entry(
        when.decode("utf-8", "replace"), text if len(text) <= LINE_CHARS else text[:LINE_CHARS] + " …"
    )
