"""What a hand, a paste or a line may send: keys faster than a frame, and bytes that are no text."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from pty_gear import Pty, end, start

PAGE_UP, PAGE_DOWN, BACKSPACE = b"\x1b[5~", b"\x1b[6~", b"\x7f"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Pty]:
    found = start(tmp_path)
    yield found
    end(found)


def test_I08_bytes_that_are_no_text_are_no_end(terminal: Pty) -> None:
    for bad in (b"\xff", b"\xfc", b"\xc3(", b"\xf0\x9f"):
        os.write(terminal.master, bad)
        terminal.quiet()
        assert terminal.child.poll() is None, terminal.received[-2000:]
    terminal.answers(b"?", b"esc closes")


def test_the_palette_survives_pages_before_its_list_is_drawn(terminal: Pty) -> None:
    draw = random.Random(1)  # with these keys and pauses the unguarded palette ends within a few turns
    for _ in range(25):
        os.write(terminal.master, b"\x10")
        for _ in range(8):
            os.write(terminal.master, draw.choice([b"w", b"a", b"\x1b[B", PAGE_UP, PAGE_DOWN, BACKSPACE]))
            terminal.read(draw.choice([0, 0.002, 0.01, 0.03]))
        assert terminal.child.poll() is None, terminal.received[-2000:]
        os.write(terminal.master, b"\x1b")
        terminal.read(0.2)
    os.write(terminal.master, b"\x1b")
    terminal.answers(b"?", b"esc closes")
