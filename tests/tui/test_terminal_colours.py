"""What really arrives at a terminal without all colours: nothing may be written in the colour that it is written on."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from pty_gear import end, start

#: An SGR sequence that sets both colours to the same, or draws black on the terminal's own background.
INVISIBLE = re.compile(rb"38;5;(\d+);48;5;\1\b|\b3([0-7]);4\2\b|\b30;49\b")


@pytest.mark.parametrize("term", ["xterm-256color", "screen", "linux"])
@pytest.mark.parametrize("no_color", [False, True])
def test_S09_plain_terminals_show_what_is_written(tmp_path: Path, term: str, no_color: bool) -> None:
    terminal = start(tmp_path, TERM=term, **({"NO_COLOR": "1"} if no_color else {}))
    try:
        terminal.quiet()
        found = Counter(re.findall(rb"\x1b\[([0-9;]*)m", terminal.received))
    finally:
        end(terminal)
    assert found, "nothing was styled at all"
    assert {sgr: n for sgr, n in found.items() if INVISIBLE.search(sgr)} == {}
    if no_color:
        coloured = {sgr for sgr in found if re.search(rb"\b(3[0-7]|38|4[0-7]|48|9[0-7]|10[0-7])\b", sgr)}
        assert coloured == set(), "NO_COLOR asks for no colours"
