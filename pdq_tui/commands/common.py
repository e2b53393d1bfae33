"""What all commands share: how loud they are, their settings, and the two ways out (data and words)."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdq_tui.errors import PdqError, UsageError

if TYPE_CHECKING:  # `--version` and completion need none of it
    from pdq_tui import config


@dataclass
class State:
    """What the common options said. ``verbosity``: -1 quiet, 0, 1 or more."""

    verbosity: int = 0
    config: Path | None = None


STATE = State()


def settings(flags: Mapping[str, tuple[str, Any]] | None = None) -> config.Loaded:
    """All layers merged; ``flags`` as ``config.load`` takes them."""
    from pdq_tui.config import load

    return load(flags, config=STATE.config)


def runs_dir(loaded: config.Loaded) -> Path:
    from pdq_tui import locations

    chosen = loaded.settings.run.dir
    return Path(chosen).expanduser() if chosen else locations.runs_dir()


def say(text: str, *, level: int = 0) -> None:
    """A sentence on stderr, when the person wants that much. Level 0 unless -q, 1 with -v."""
    if STATE.verbosity >= level:
        print(printable(text), file=sys.stderr, flush=True)


def tell(error: PdqError) -> None:
    """An error on stderr: one sentence, and the way out under it. Not silenced by -q."""
    print(f"pdq-tui: {printable(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"  {printable(error.hint)}", file=sys.stderr)


def emit(text: str) -> None:
    """Data on stdout, to the last byte. Raises PdqError where stdout cannot take it."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read it has seen enough; nothing more goes there, not even the flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise PdqError(f"stdout cannot be written: {error.strerror}") from error


def ascii_only() -> bool:
    """True where stdout's encoding cannot carry the tables' signs."""
    try:
        "±Δ★▲─…".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def printable(text: str) -> str:
    """Text of a file, a model or a name, safe for a terminal: control characters are shown, never sent."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")


def fraction(text: str, flag: str) -> float:
    """``1%`` or ``0.01`` as a fraction. Raises UsageError."""
    raw = text.strip()
    try:
        value = float(raw[:-1]) / 100 if raw.endswith("%") else float(raw)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(f"{flag}: {text!r} is not a legal value", "a share such as 1% or 0.01")
    return value


def one_of(flag: str, word: str, legal: Iterable[str]) -> str:
    """``word`` where it is among ``legal``. Raises UsageError, with what was perhaps meant."""
    words = list(legal)
    if word not in words:
        near = difflib.get_close_matches(word, words, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"{flag}: {word!r} is not a legal value", f"{meant}legal: {', '.join(words)}")
    return word


def columns(rows: Sequence[tuple[str, ...]], head: tuple[str, ...]) -> str:
    """Left-aligned columns under ``head``; the last one is as long as it is."""
    table = [head, *[tuple(printable(" ".join(cell.split())) for cell in row) for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n"
        for row in table
    )
