"""What this terminal can show, a driver for one that can show ASCII only, and keeping it to ourselves."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import termios
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from textual.drivers import linux_driver
from textual.drivers.linux_driver import LinuxDriver

from pdq_tui.tui.lines import ASCII
from pdq_tui.tui.theme import shows_unicode

#: One character for one cell, so that nothing moves: Textual's own frames and scroll bars, and our glyphs.
_ONE_FOR_ONE = {ord(k): v for k, v in ASCII.items() if len(v) == 1} | dict.fromkeys(
    map(ord, "─━═╌╍┄┅┈┉▔▁"), "-"
)
_ONE_FOR_ONE |= dict.fromkeys(map(ord, "│┃║╎╏┆┇┊┋▏▕▎▍▌▐"), "|")
_ONE_FOR_ONE |= dict.fromkeys(map(ord, "╭╮╰╯┌┐└┘├┤┬┴┼┏┓┗┛┣┫┳┻╋╔╗╚╝"), "+")


def ascii_only(text: str) -> str:
    """``text`` with every character that is not ASCII replaced by as many ASCII ones as it has cells."""
    if text.isascii():
        return text
    found = text.translate(_ONE_FOR_ONE)
    return "".join(c if c.isascii() else "?" * cell_len(c) for c in found)


# The thread that reads the keys makes its decoder itself, a strict one: a byte that is no UTF-8 (a paste from a Latin-1
# terminal, noise on a line) would end the app. This is the name that it makes it by.
linux_driver.getincrementaldecoder = lambda encoding: partial(  # type: ignore[attr-defined]
    codecs.getincrementaldecoder(encoding), errors="replace"
)


class OwnDriver(LinuxDriver):
    """Textual's, except that it may be stopped by somebody else (SIGSTOP has no handler) and continued.

    Textual takes every SIGCONT for the end of its own suspension and starts a second time: a second thread that reads
    the keys and is never ended, and the raw mode remembered as what the terminal is to be given back in.
    """

    _suspended = False
    _raw: list[Any] | None = None

    def start_application_mode(self) -> None:
        super().start_application_mode()  # type: ignore[no-untyped-call]
        with contextlib.suppress(termios.error):
            self._raw = termios.tcgetattr(self.fileno)

    def _sigtstp_application(self, *signal_and_frame: Any) -> None:
        self._suspended = True
        super()._sigtstp_application(*signal_and_frame)

    def _sigcont_application(self, *signal_and_frame: Any) -> None:
        if self._suspended:
            self._suspended = False
            super()._sigcont_application(*signal_and_frame)
        elif self._raw is not None:
            # A shell may have used the terminal meanwhile: its mode, the cursor and the picture are ours again.
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.fileno, termios.TCSANOW, self._raw)
            self.write("\x1b[?25l")
            self._loop.call_soon_threadsafe(self._app.refresh)


class AsciiDriver(OwnDriver):
    """Whatever a widget draws, this terminal gets ASCII: also what other people's widgets and modal boxes draw."""

    def write(self, data: str) -> None:
        super().write(ascii_only(data))


def needs_ascii() -> bool:
    """Whether the stream that the screen is written to cannot carry box drawing (LANG=C without UTF-8 mode)."""
    stream = sys.__stderr__
    return not shows_unicode(stream.encoding if stream is not None else None)


def start_marker(wanted: str, plain: bool, environment: Mapping[str, str]) -> str:
    """braille, block or ascii. "auto": what the terminal's font is likely to have."""
    if plain:
        return "ascii"
    if wanted != "auto":
        return wanted
    return "block" if environment.get("TERM") in ("linux", "vt100", "vt220") else "braille"


@contextlib.contextmanager
def own_terminal(log: Path) -> Iterator[None]:
    """While it lasts, descriptors 1 and 2 lead to ``log`` and the terminal is written to through copies of them.

    Libraries and C++ code of this process write to 1 and 2 whatever Python's streams are; on the terminal that would
    scroll the screen away. A log that cannot be opened is replaced by the null device.
    """
    try:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        target = os.open(os.devnull, os.O_WRONLY)
    before = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    copies = []
    for number, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
        assert stream is not None, "a terminal was asked for before"
        stream.flush()
        copies.append(
            open(os.dup(number), "w", encoding=stream.encoding, errors=stream.errors, buffering=1)  # noqa: PTH123, SIM115
        )
        os.dup2(target, number)
    os.close(target)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = copies  # type: ignore[misc]
    try:
        yield
    finally:
        for number, copy in enumerate(copies, 1):
            copy.flush()
            os.dup2(copy.fileno(), number)
            copy.close()
        sys.stdout, sys.stderr = before[:2]
        sys.__stdout__, sys.__stderr__ = before[2:]  # type: ignore[misc]
