"""Counts from journals, and the diary of work by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy
from pdq_tui.errors import PdqError, UsageError
from pdq_tui.judge import diary, logs


def counted(*journals: list[Any]) -> dict[str, logs.Count]:
    found = logs.Logs()
    for journal in journals:
        found.take(journal)
    return {c.kind: c for c in found.counts()}


def request(**more: Any) -> p.Request:
    fields: dict[str, Any] = {"request": 1, "arm": "x", "policy": "x", "policy_digest": "d", "kind": "blocks"}
    return p.Request(**(fields | more))


def ready(arm: str, modules: int) -> p.ArmReady:
    fallback = p.Fallback(
        stage="decode", module="m", wanted="int4", used="bf16", reason="no kernel", modules=modules
    )
    return p.ArmReady(
        arm=arm,
        policy=find_policy("int4"),
        weights=p.WeightsInfo(),
        coverage={},
        kv=p.KvInfo(),
        fallbacks=[fallback],
    )


def served(**more: Any) -> p.ServeEnded:
    return p.ServeEnded(arm="x", engine="e", attention="a", scheduler="s", tokens={}, **more)


def test_a_quiet_journal_counts_nothing() -> None:
    found = counted([request(), served(), p.WorkerStarted(role="engine", pid=1)])
    assert set(found) == set(logs.KINDS) and all(c.count == 0 and c.causes == [] for c in found.values())


def test_every_kind_is_counted_with_its_cause() -> None:
    gpu = p.GpuSample(index=0, engine=True, throttle=["HW thermal slowdown", "GPU idle"])
    other = p.GpuSample(index=1, engine=False, throttle=["HW thermal slowdown"])
    found = counted(
        [
            p.WorkerStarted(role="engine", pid=1),
            request(valid=False, invalid_reason="logits are not finite"),
            p.Failure(kind="internal", message="it broke"),
            p.Failure(kind="oom", message="out of memory in prefill"),
            p.WorkerExited(role="engine", pid=1, returncode=-9, expected=False, text="killed"),
            p.WorkerStarted(role="engine", pid=2, restart=1),
            served(readmitted=3),
            ready("x", 7),
            ready("x", 7),
            p.SensorSample(gpus=[gpu, other]),
            p.WorkloadRefused(reason="too long"),
            p.Dropped(count=2),
            p.Dropped(count=5),
        ]
    )
    assert found[logs.ERRORS].count == 3 and ("it broke", 1) in found[logs.ERRORS].causes
    assert found[logs.MEMORY].causes == [("out of memory in prefill", 1)]
    assert found[logs.RETRIES].count == 4, "three re-admissions and a restart"
    assert found[logs.FALLBACKS].count == 7, "an arm that is made ready twice falls back once"
    assert found[logs.THROTTLING].causes == [("clock limited: HW thermal slowdown (samples)", 1)]
    assert found[logs.REFUSALS].causes == [("too long", 1)]
    assert found[logs.LOST].count == 5, "the worker counts on by itself"


def test_journals_add_up_and_their_own_trouble_counts() -> None:
    found = logs.Logs()
    for _ in range(3):
        found.take([p.WorkerStarted(role="engine", pid=1)], torn=1, unknown=2)
    found.opened(2)
    by = {c.kind: c for c in found.counts()}
    assert by[logs.RETRIES].count == 2 and by[logs.LOST].count == 9


def test_many_causes_are_summed_up() -> None:
    found = counted([p.WorkloadRefused(reason=f"reason {i}") for i in range(30)])
    assert found[logs.REFUSALS].count == 30 and found[logs.REFUSALS].causes[-1] == ("other causes", 22)


# -- the diary ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    (tmp_path / "spec.json").write_text("{}")
    return tmp_path


def test_what_was_logged_is_read_again(evaluation: Path) -> None:
    assert diary.read(evaluation) == []
    diary.add(evaluation, " flags\nset \ud800", 12.5)
    diary.add(evaluation, "rolled back", 3)
    assert [(e.op, e.minutes) for e in diary.read(evaluation)] == [
        ("flags set ?", 12.5),
        ("rolled back", 3.0),
    ]


@pytest.mark.parametrize(
    ("op", "minutes", "sentence"),
    [(" ", 1.0, "--op"), ("x", 0.0, "--minutes"), ("x", -1.0, "--minutes"), ("x", float("nan"), "--minutes")],
)
def test_what_is_no_work_is_refused(evaluation: Path, op: str, minutes: float, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        diary.add(evaluation, op, minutes)
    assert diary.read(evaluation) == []


def test_a_diary_belongs_to_an_evaluation(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no evaluation"):
        diary.add(tmp_path, "x", 1)


def test_a_damaged_line_is_named(evaluation: Path) -> None:
    (evaluation / diary.FILE).write_text('{"op": "x", "minutes": 1, "at": "now"}\n{"op"\n')
    with pytest.raises(PdqError, match="line 2 is damaged"):
        diary.read(evaluation)
