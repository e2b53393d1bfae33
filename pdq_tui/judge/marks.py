"""What a person says of two answers: the same, changed, or worse. Kept in the evaluation's folder; the last word stands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from pdq_tui.errors import PdqError, UsageError
from pdq_tui.store import atomic

FILE: Final = "marks.jsonl"
SAME: Final = "same"
CHANGED: Final = "changed"
WORSE: Final = "worse"
MARKS: Final = (SAME, CHANGED, WORSE)

#: (policy, task) → mark.
Marks = Mapping[tuple[str, str], str]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """``mark``: one of ``MARKS``, or "" where one was taken back."""

    policy: str
    task: str
    mark: str
    at: str


def put(directory: Path, policy: str, task: str, mark: str) -> Entry:
    """Raises UsageError for no such mark, PdqError where ``directory`` holds no evaluation or cannot be written."""
    if mark not in (*MARKS, ""):
        raise UsageError(f"{mark!r} is no mark", f"legal: {', '.join(MARKS)}")
    if not (directory / "spec.json").exists():
        raise UsageError(f"there is no evaluation in {directory}")
    entry = Entry(policy=policy, task=task, mark=mark, at=datetime.now(UTC).isoformat(timespec="seconds"))
    try:
        with (directory / FILE).open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
    except OSError as error:
        raise atomic.failed(directory / FILE, error) from error
    return entry


def read(directory: Path) -> dict[tuple[str, str], str]:
    """What stands now; nothing where nothing was marked. Raises PdqError for a damaged line."""
    try:
        lines = (directory / FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise PdqError(f"{directory / FILE} cannot be read: {error}") from error
    found: dict[tuple[str, str], str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.convert(json.loads(line), Entry)
        except (ValueError, msgspec.ValidationError) as error:
            raise PdqError(f"{directory / FILE}, line {number} is damaged: {error}") from error
        found.pop((entry.policy, entry.task), None)
        if entry.mark:
            found[entry.policy, entry.task] = entry.mark
    return found


def counted(marks: Marks, policy: str) -> dict[str, int]:
    """By mark, those of one policy."""
    return {mark: sum(p == policy and m == mark for (p, _), m in marks.items()) for mark in MARKS}
