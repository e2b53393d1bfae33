"""What a headless run says while it works: one changing line on a terminal, plain lines elsewhere with -v."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from pdq_tui.commands.common import STATE, printable, say
from pdq_tui.core import protocol as p
from pdq_tui.core.metrics import counted
from pdq_tui.host.sentences import lines

_EVERY_S: Final = 0.1


class Printer:
    """Call it with each event. The changing line is drawn on stderr where that is a terminal; elsewhere, with
    ``every_s``, it is a line of its own at most that often. ``around``: what to put about its text."""

    def __init__(self, blocks: int | None = None, *, every_s: float | None = None) -> None:
        self._tty = sys.stderr.isatty() and STATE.verbosity >= 0
        self._shown = False
        self._next = 0.0
        self._began = time.monotonic()
        self._blocks, self._every_s = blocks, every_s
        self.around: Callable[[str], str] = lambda text: text
        self._requests = 0
        #: Number of the measurement's first block: an engine counts on from one measurement to the next.
        self._first: int | None = None

    def __call__(self, event: Any) -> None:
        # What ends the command is told once, by the command.
        told = [] if isinstance(event, p.ArmRefused) else lines(event)
        for level, text, hint in told:
            self._line(level, f"{text} ({hint})" if hint else text)
        match event:
            case p.Progress():
                self.bytes(event.done, event.total, event.label, event.unit)
            case p.ModelReady():
                m, d = event.model, event.device
                threads = f", {counted(d.threads, 'thread')}" if d.kind == "cpu" else ""
                size = f"{m.parameters / 1e6:.0f} M parameters"
                self._line("info", f"{m.id}: {size}, {m.layers} layers, {m.dtype}, on {d.name}{threads}")
            case p.TaskEnded(ok=True):
                self._line("info", f"{event.task} {event.label}: {event.seconds:.1f} s".replace("  ", " "))
            case p.RunStarted():
                self._first, self._requests = None, 0
                self._blocks = event.blocks or self._blocks
                self._line("info", f"measuring {', '.join(event.arms)} in blocks")
            case p.Request():
                self._requests += 1
                self._draw(self._where(event))
            case p.StageSample():
                pass

    def bytes(self, done: float, total: float | None, label: str, unit: str = "bytes") -> None:
        """Progress of one task; also the demo fetch's own callback."""
        if unit == "bytes" and total:
            self._draw(f"{label}: {done / 1e6:.0f} of {total / 1e6:.0f} MB ({done / total:.0%})")
        elif total:
            self._draw(f"{label}: {done:.0f} of {total:.0f} {unit}".rstrip())
        else:
            self._draw(label)

    def close(self) -> None:
        """Take the changing line away."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False

    def _where(self, r: p.Request) -> str:
        if r.block is None:
            what = "memory alone" if r.kind == "solo" else "warm-up"
            return f"{what}: {r.arm}"
        self._first = r.block if self._first is None else self._first
        number = r.block - self._first
        of = f" of {self._blocks}" if self._blocks is not None and number < self._blocks else ""
        rate = f", {r.tpot_ms:.1f} ms a token" if r.tpot_ms is not None else ""
        return f"block {number + 1}{of}: {r.arm}{rate}, {self._requests} requests"

    def _line(self, level: str, text: str) -> None:
        self.close()
        say(text if level == "info" else f"{level}: {text}", level=1 if level == "info" else 0)

    def _draw(self, text: str) -> None:
        now = time.monotonic()
        every_s = _EVERY_S if self._tty else self._every_s
        if every_s is None or now < self._next:
            return
        self._next = now + every_s
        text = self.around(text)
        if not self._tty:
            say(text)
            return
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(
            "\r\x1b[K" + printable(f"{now - self._began:4.0f} s  {text}".replace("\n", " "))[:width]
        )
        sys.stderr.flush()
        self._shown = True
