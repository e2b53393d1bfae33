"""Work that people did by hand for an evaluation's policies: only what was logged is totalled, nothing is estimated."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from pdq_tui.errors import PdqError, UsageError
from pdq_tui.store import atomic

FILE: Final = "operations.jsonl"
_MOST_MINUTES: Final = 60 * 24 * 365


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    op: str
    minutes: float
    at: str


def add(directory: Path, op: str, minutes: float) -> Entry:
    """Raises UsageError for what is no work, PdqError where ``directory`` holds no evaluation or cannot be written."""
    text = " ".join(op.encode("utf-8", "replace").decode("utf-8").split())
    if not text:
        raise UsageError("--op: say what was done")
    if not (math.isfinite(minutes) and 0 < minutes <= _MOST_MINUTES):
        raise UsageError(f"--minutes: {minutes:g} is not a time that somebody worked", "minutes above 0")
    if not (directory / "spec.json").exists():
        raise UsageError(f"there is no evaluation in {directory}", "--dir names one")
    entry = Entry(op=text, minutes=minutes, at=datetime.now(UTC).isoformat(timespec="seconds"))
    try:
        with (directory / FILE).open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
    except OSError as error:
        raise atomic.failed(directory / FILE, error) from error
    return entry


def read(directory: Path) -> list[Entry]:
    """In the order they were logged; none where nothing was. Raises PdqError for a damaged line."""
    try:
        lines = (directory / FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise PdqError(f"{directory / FILE} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.convert(json.loads(line), Entry))
        except (ValueError, msgspec.ValidationError) as error:
            raise PdqError(f"{directory / FILE}, line {number} is damaged: {error}") from error
    return found
