"""Stopped and continued in a real terminal: by ctrl+z, and by somebody else's SIGSTOP, which nobody can handle."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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

    def __init__(self, script: Path) -> None:
        self.master, self.slave = pty.openpty()
        self.before = termios.tcgetattr(self.slave)
        self.received = b""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PDQ_", "TEXTUAL"))}
        self.child = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=self.slave, stdout=self.slave, stderr=self.slave, start_new_session=True,
            env=env | {"TERM": "xterm-256color", "LANG": "C.UTF-8", "LINES": "36", "COLUMNS": "120"},
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


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Pty]:
    script = tmp_path / "child.py"
    runs = str(tmp_path / "runs")
    script.write_text(CHILD.format(tests=str(Path(__file__).parent), runs=runs), encoding="utf-8")
    found = Pty(script)
    found.until(lambda: b"PREFILL" in found.received and b"DECODE" in found.received)
    yield found
    if found.child.poll() is None:
        found.child.kill()
        found.child.wait()
    os.close(found.master)
    os.close(found.slave)


def test_app_continued_after_a_foreign_stop_goes_on_and_ends(terminal: Pty) -> None:
    terminal.answers(b"?", b"esc closes")
    terminal.answers(b"?", b"PREFILL")
    for _ in range(2):
        terminal.child.send_signal(signal.SIGSTOP)
        terminal.until(terminal.stopped)
        termios.tcsetattr(terminal.slave, termios.TCSANOW, terminal.before)  # type: ignore[arg-type] # as a shell does
        start = len(terminal.received)
        terminal.child.send_signal(signal.SIGCONT)
        terminal.until(lambda: terminal.raw and b"PREFILL" in terminal.received[start:])  # noqa: B023
    terminal.answers(b"?", b"esc closes")
    terminal.answers(b"?", b"PREFILL")
    assert terminal.received.count(ENTER) == 1
    terminal.ends()


def test_app_suspended_with_ctrl_z_gives_the_terminal_back_and_takes_it_again(terminal: Pty) -> None:
    for count in (1, 2):
        os.write(terminal.master, b"\x1a")
        terminal.until(terminal.stopped)
        terminal.quiet()
        assert terminal.modes == terminal.before
        assert terminal.received.count(LEAVE) == count
        start = len(terminal.received)
        terminal.child.send_signal(signal.SIGCONT)
        terminal.until(lambda: terminal.raw and b"PREFILL" in terminal.received[start:])  # noqa: B023
    terminal.answers(b"?", b"esc closes")
    terminal.answers(b"?", b"PREFILL")
    terminal.ends()
