"""One worker process: its own session and process group, pipes for messages, a log for everything else it prints.

Started by ``subprocess.Popen``, never ``multiprocessing``: inside a running Textual app ``spawn`` raises and ``fork``
would copy threads and device state. The thread that calls ``Worker`` must live as long as the worker: the worker asks
the kernel to die with its parent, and for the kernel that is the *thread* that started it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pdq_tui.core.protocol import Message, encode
from pdq_tui.host.printed import Printed
from pdq_tui.host.stages import StageWatch

#: A line longer than this is no message of ours: it is skipped up to its newline.
MAX_LINE: Final = 32 * 1024 * 1024


def worker_environment() -> dict[str, str]:
    """Our environment without what belongs to a screen, and with what keeps libraries quiet and text readable."""
    env = {
        k: v for k, v in os.environ.items() if not k.startswith("TEXTUAL") and k not in ("COLUMNS", "LINES")
    }
    env |= {"PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1", "TERM": "dumb", "NO_COLOR": "1"}
    for key, value in {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }.items():
        env.setdefault(key, value)
    return env


class Worker:
    """A running worker. Raises OSError where it cannot be started.

    on_line   called in the reader thread with each line (no newline), None for a line that was too long.
    on_exit   called once, in the waiter thread, after the last line was delivered.
    """

    def __init__(
        self,
        role: str,
        argv: Sequence[str],
        log: Path | None,
        on_line: Callable[[Worker, bytes | None], None],
        on_exit: Callable[[Worker, int], None],
    ) -> None:
        self.role = role
        self.expected = False
        self.started = time.monotonic()
        self.last_heard: float | None = None
        self._on_line = on_line
        self._on_exit = on_exit
        self.stages = StageWatch(role)
        self._printed = Printed(role, log, lambda: self.stages.word)
        self._lock = threading.Lock()
        self._reaped = False
        self._ended = threading.Event()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        try:
            self._process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed.fd,
                bufsize=0,
                start_new_session=True,
                env=worker_environment(),
            )
        except BaseException:
            self._printed.close()
            raise
        self._printed.start()
        self.pid = self._process.pid
        self._reader = self._thread(self._read)
        self._writer = self._thread(self._write)
        self._waiter = self._thread(self._wait)
        for thread in (self._reader, self._writer, self._waiter):
            thread.start()

    def _thread(self, target: Callable[[], None]) -> threading.Thread:
        name = f"{self.role}-{self.pid}-{target.__name__.strip('_')}"
        return threading.Thread(target=target, name=name, daemon=True)

    # -- what a caller may do: nothing here waits for the worker ---------------------------------------------------------

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    @property
    def idle_outbox(self) -> bool:
        """False while the worker has not yet taken what it was sent."""
        return self._outbox.empty()

    def send(self, message: Message) -> None:
        """Queue one command; a writer thread carries it over."""
        self.stages.sent(message)
        self._outbox.put(encode(message))

    def vanish(self) -> None:
        """Close its stdin once it has taken what it was sent."""
        self._outbox.put(None)

    def signal(self, number: int) -> None:
        """Signal the worker's whole process group, if the worker has not been reaped yet."""
        with self._lock:
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """True when it has ended, its last line was delivered and ``on_exit`` has returned."""
        return self._ended.wait(max(timeout_s, 0.0))

    def tail(self) -> str:
        """The end of what this worker printed outside the protocol; carriage-return progress collapsed."""
        return self._printed.tail()

    # -- threads ---------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        buffer = bytearray()
        skipping = False
        while chunk := os.read(fd, 1 << 18):
            self.last_heard = time.monotonic()
            buffer += chunk
            if b"\n" not in chunk:
                if len(buffer) > MAX_LINE:
                    skipping = True
                    buffer.clear()
                continue
            *lines, rest = buffer.split(b"\n")
            buffer = rest
            for line in lines:
                if skipping or len(line) > MAX_LINE:
                    skipping = False
                    self._on_line(self, None)
                elif line:
                    self._on_line(self, bytes(line))
        if buffer:
            self._on_line(self, bytes(buffer))

    def _write(self) -> None:
        assert self._process.stdin is not None
        fd = self._process.stdin.fileno()
        while (line := self._outbox.get()) is not None:
            rest = memoryview(line)
            try:
                while rest:
                    rest = rest[os.write(fd, rest) :]
            except OSError:  # it is gone, or has closed its stdin: the waiter tells
                break
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _wait(self) -> None:
        # Without reaping: while the zombie holds its pid, the group cannot be somebody else's.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # helpers that it started
            code = self._process.wait()
            self._reaped = True
        self._outbox.put(None)
        self._reader.join(5.0)
        self._writer.join(1.0)
        self._on_exit(self, code)
        self._printed.close()
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()
        self._ended.set()
