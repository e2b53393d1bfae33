"""Stopped and continued in a real terminal: by ctrl+z, and by somebody else's SIGSTOP, which nobody can handle."""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from pty_gear import ENTER, LEAVE, Pty, end, start


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Pty]:
    found = start(tmp_path)
    yield found
    end(found)


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
