"""The app on a pseudo-terminal of its own."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

CHILD = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from fake_views import FakeSession
from pdq_tui.tui.app import Options, PdqApp
sys.exit(PdqApp(FakeSession(), Options(runs_dir=Path({runs!r}), fps=4.0)).run())
"""
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


class Pty:
    """The app on a pseudo-terminal; ``received`` is everything that it wrote there."""

    def __init__(self, script: Path, **environment: str) -> None:
        self.master, self.slave = pty.openpty()
        self.before = termios.tcgetattr(self.slave)
        self.received = b""
        env = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("PDQ_", "TEXTUAL", "COLORTERM", "NO_COLOR"))
        }
        self.child = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=self.slave, stdout=self.slave, stderr=self.slave, start_new_session=True,
            env=env | {"TERM": "xterm-256color", "LANG": "C.UTF-8", "LINES": "36", "COLUMNS": "120"} | environment,
        )  # fmt: skip

    def until(self, what: Callable[[], bool], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, f"waited too long; the last that came: {self.received[-400:]!r}"
            self.read(0.05)

    def read(self, seconds: float) -> None:
        if select.select([self.master], [], [], seconds)[0]:
            with contextlib.suppress(OSError):
                self.received += os.read(self.master, 1 << 16)

    def quiet(self) -> None:
        """Read until nothing has come for a while."""
        before = None
        while before != len(self.received):
            before = len(self.received)
            self.read(0.4)

    @property
    def modes(self) -> list[object]:
        return termios.tcgetattr(self.slave)

    @property
    def raw(self) -> bool:
        return not int(str(self.modes[3])) & termios.ICANON

    def stopped(self) -> bool:
        return os.waitid(os.P_PID, self.child.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None

    def answers(self, key: bytes, text: bytes) -> None:
        self.quiet()
        start = len(self.received)
        os.write(self.master, key)
        self.until(lambda: text in self.received[start:])

    def ends(self) -> None:
        """Twice ctrl+c: within seconds, and the terminal is as it was."""
        os.write(self.master, b"\x03")
        time.sleep(0.2)
        os.write(self.master, b"\x03")
        self.until(lambda: self.child.poll() is not None, 15.0)
        assert self.child.returncode == 130
        self.quiet()
        assert self.modes == self.before
        assert self.received.count(ENTER) == self.received.count(LEAVE)
        assert b"\x1b[?25h" in self.received[self.received.rindex(LEAVE) :]


def start(tmp_path: Path, **environment: str) -> Pty:
    """The app with a made session, its first screen drawn."""
    script = tmp_path / "child.py"
    script.write_text(
        CHILD.format(tests=str(Path(__file__).parent), runs=str(tmp_path / "runs")), encoding="utf-8"
    )
    found = Pty(script, **environment)
    found.until(lambda: b"PREFILL" in found.received and b"DECODE" in found.received)
    return found


def end(terminal: Pty) -> None:
    if terminal.child.poll() is None:
        terminal.child.kill()
        terminal.child.wait()
    os.close(terminal.master)
    os.close(terminal.slave)
