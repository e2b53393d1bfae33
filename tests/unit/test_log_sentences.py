"""The event log tells each trouble once, and what comes by itself not at all."""

from __future__ import annotations

from typing import Any

import pytest

from pdq_tui.core import protocol as p
from pdq_tui.host import sentences


def told(*events: Any) -> list[tuple[str, str]]:
    return [(level, text) for e in events for level, text, _ in sentences.lines(e)]


@pytest.mark.parametrize(
    ("task", "follows"),
    [
        ("load", p.Failure(kind="model", message="/x: no such model", stage="load")),
        ("trace", p.Traced(arm="A", policy="p", failed="/x: no such model")),
        ("pack", p.ArmRefused(arm="A", policy="p", reason="/x: no such model")),
    ],
)
def test_a_task_that_failed_is_told_once_by_what_follows(task: str, follows: Any) -> None:
    found = told(p.TaskEnded(task=task, label="x", ok=False, seconds=1, text="/x: no such model"), follows)
    assert len(found) == 1 and "/x: no such model" in found[0][1] and found[0][0] in ("error", "warn")


def test_a_task_that_nothing_follows_is_told() -> None:
    [(level, text)] = told(p.TaskEnded(task="energy", label="A", ok=False, seconds=1, text="no workload"))
    assert level == "error" and "no workload" in text
    assert told(p.TaskEnded(task="load", label="x", ok=False, cancelled=True, seconds=1)) == [
        ("info", "load x: cancelled")
    ]


def test_a_burst_of_a_schedule_says_only_what_is_wrong() -> None:
    stage = p.StageTrace(stage="decode", steps=4, where="cpu", trace_ms=1.0, unmatched=["int4 was not seen"])
    asked = p.Traced(arm="A", policy="p", stages=[stage], path="/t", events=9, notes=["a note"])
    assert [level for level, _ in told(asked)] == ["info", "info", "warn"]
    asked.rolling = True
    [(level, text)] = told(asked)
    assert level == "warn" and "int4 was not seen" in text
