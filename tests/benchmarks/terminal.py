"""A program in a pseudo-terminal: its bytes counted, its questions answered, its screen read when asked for.

The reader thread only stores chunks and answers what a modern terminal answers, so that it costs next to nothing while
something is measured. The screen is worked out from the chunks later, in the caller's thread.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from rich.cells import cell_len

#: What a terminal is asked at start, and what one with the kitty keyboard protocol and synchronized output answers.
_QUESTIONS = re.compile(
    rb"\x1b\[c|\x1b\[0c|\x1b\[6n|\x1b\[\?u|\x1b\[>0?q|\x1b\[\?(\d+)\$p|\x1b\](1[01]);\?(?:\x07|\x1b\\)"
)
_SEQUENCE = re.compile(
    r"\x1b\[([0-9:;<=>?]*)[ -/]*([@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1bP[^\x1b]*\x1b\\|\x1b[ -/]*[0-Z\\^-~]|[\x00-\x1f]"
)
#: An escape sequence whose end has not come yet.
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9:;<=>? -/]*|[\]P][^\x07\x1b]*\x1b?)?$")


class Cells:
    """As much of a terminal as a full-screen program needs: cursor moves, text, erasing. Colours are left out."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.lines = [[" "] * columns for _ in range(rows)]
        self.x = self.y = 0
        self._rest = ""

    def feed(self, text: str) -> None:
        text = self._rest + text
        unfinished = _UNFINISHED.search(text)
        self._rest = text[unfinished.start() :] if unfinished else ""
        text = text[: unfinished.start()] if unfinished else text
        at = 0
        for found in _SEQUENCE.finditer(text):
            self._put(text[at : found.start()])
            at = found.end()
            if found.group(2):
                self._control(found.group(1), found.group(2))
            elif found.group() == "\n":
                self.y = min(self.y + 1, self.rows - 1)
            elif found.group() == "\r":
                self.x = 0
            elif found.group() == "\b":
                self.x = max(self.x - 1, 0)
        self._put(text[at:])

    def _put(self, text: str) -> None:
        for char in text:
            width = cell_len(char)
            if self.x + width > self.columns or width == 0:
                continue
            self.lines[self.y][self.x] = char
            if width == 2:
                self.lines[self.y][self.x + 1] = ""
            self.x += width

    def _control(self, parameters: str, final: str) -> None:
        numbers = [int(n) if n.isdigit() else 0 for n in parameters.split(";")]
        first = numbers[0]
        if final in "Hf":
            self.y = min(max(first, 1), self.rows) - 1
            self.x = min(max(numbers[1] if len(numbers) > 1 else 1, 1), self.columns) - 1
        elif final == "A":
            self.y = max(self.y - max(first, 1), 0)
        elif final == "B":
            self.y = min(self.y + max(first, 1), self.rows - 1)
        elif final == "C":
            self.x = min(self.x + max(first, 1), self.columns - 1)
        elif final == "D":
            self.x = max(self.x - max(first, 1), 0)
        elif final == "G":
            self.x = min(max(first, 1), self.columns) - 1
        elif final == "J" and first in (2, 3):
            self.lines = [[" "] * self.columns for _ in range(self.rows)]
        elif final == "K" and first == 0:
            self.lines[self.y][self.x :] = [" "] * (self.columns - self.x)

    def text(self) -> str:
        return "\n".join("".join(line) for line in self.lines)


class Terminal:
    """Starts ``argv`` at once. Times are ``time.monotonic()`` in seconds."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], columns: int = 120, rows: int = 36
    ) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.cells = Cells(columns, rows)
        self._chunks: list[tuple[float, bytes]] = []
        self._shown = 0
        self._text = bytearray()
        self._arrived = threading.Condition()
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=dict(env),
            start_new_session=True,
            # One system call and no lock: safe between fork and exec. It makes this the controlling terminal.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        tail = b""
        while True:
            try:
                chunk = os.read(self._master, 1 << 16)
            except OSError:  # EIO: the program has closed its terminal
                return
            if not chunk:
                return
            now = time.monotonic()
            tail = self._answer(tail + chunk)
            with self._arrived:
                self._chunks.append((now, chunk))
                self._arrived.notify_all()

    def _answer(self, data: bytes) -> bytes:
        """Answers the questions in ``data``; what is left may be the beginning of one."""
        end = 0
        for found in _QUESTIONS.finditer(data):
            end = found.end()
            question = found.group()
            if found.group(1):
                known = found.group(1) == b"2026"
                answer = b"\x1b[?%s;%d$y" % (found.group(1), 2 if known else 0)
            elif found.group(2):
                answer = b"\x1b]%s;rgb:%s\x1b\\" % (
                    found.group(2),
                    b"cccc/cccc/cccc" if found.group(2) == b"10" else b"0000/0000/0000",
                )
            elif question.endswith(b"c"):
                answer = b"\x1b[?62;22c"
            elif question.endswith(b"n"):
                answer = b"\x1b[1;1R"
            elif question.endswith(b"u"):
                answer = b"\x1b[?0u"
            else:
                answer = b"\x1bP>|bench\x1b\\"
            os.write(self._master, answer)
        return data[end:][-32:]

    def send(self, keys: bytes) -> float:
        """Type ``keys``; the time just before."""
        now = time.monotonic()
        os.write(self._master, keys)
        return now

    def screen(self) -> str:
        with self._arrived:
            self._catch_up(len(self._chunks))
        return self.cells.text()

    def _catch_up(self, until: int) -> None:
        for _, chunk in self._chunks[self._shown : until]:
            self._text += chunk
        self._shown = until
        # A character cut in two waits for its other half.
        whole = self._text.decode("utf-8", "ignore")
        rest = len(self._text) - len(whole.encode())
        self._text = self._text[len(self._text) - rest :] if 0 < rest < 4 else bytearray()
        self.cells.feed(whole)

    def wait(self, shown: Callable[[str], bool], timeout: float) -> float | None:
        """When the chunk came that made ``shown(screen text)`` true; None: not within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        if shown(self.screen()):
            return time.monotonic()
        while True:
            with self._arrived:
                while self._shown >= len(self._chunks):
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._arrived.wait(left):
                        return None
                at = self._chunks[self._shown][0]
                self._catch_up(self._shown + 1)
            if shown(self.cells.text()):
                return at

    def bytes_between(self, start: float, end: float) -> int:
        with self._arrived:
            return sum(len(chunk) for at, chunk in self._chunks if start <= at < end)

    def longest_silence(self, start: float, end: float) -> float:
        """Seconds without any output, at most."""
        with self._arrived:
            times = [start, *(at for at, _ in self._chunks if start <= at < end), end]
        return max(b - a for a, b in pairwise(times))

    def close(self, timeout: float = 10.0) -> int | None:
        """End the program as a person would (twice ctrl+c); its exit code, None where it had to be killed."""
        if self.process.poll() is None:
            self.send(b"\x03")
            time.sleep(0.3)
            if self.process.poll() is None:
                self.send(b"\x03")
        try:
            code: int | None = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        return code

    def kill(self) -> None:
        """End the program at once; what it started has to notice by itself."""
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        self._reader.join(1.0)
