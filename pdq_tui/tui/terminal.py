"""What this terminal can show, and a driver for one that can show ASCII only."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.cells import cell_len
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


class AsciiDriver(LinuxDriver):
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
