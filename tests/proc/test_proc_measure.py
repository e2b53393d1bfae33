"""The headless measurement against a fake engine: labels, ends, failures, Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from proc_gear import ENGINE, SENSORS

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.protocol import Load, Request, RunEnded, RunStarted
from pdq_tui.core.workload import Workload
from pdq_tui.errors import PdqError
from pdq_tui.host.journal import read_events
from pdq_tui.host.measure import MeasureError, MeasureResult, labels, measure
from pdq_tui.host.runs import Run


@pytest.fixture
def go(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., MeasureResult]:
    def go(mode: str = "", *names: str, model: str = "demo", **options: Any) -> MeasureResult:
        monkeypatch.setenv("FAKE_ENGINE", mode)
        policies = [find_policy(name) for name in names or ("bf16", "int8")]
        options.setdefault("workload", Workload())
        options.setdefault("blocks", 3)
        options.setdefault("sensors", False)
        workload = options.pop("workload")
        return measure(
            Load(model=model),
            policies,
            workload,
            run=run,
            engine_argv=ENGINE,
            sensors_argv=SENSORS,
            min_seconds=0,
            **options,
        )

    return go


def test_two_policies_end_to_end(go: Callable[..., MeasureResult], run: Run) -> None:
    seen: list[Any] = []
    result = go(on_event=seen.append, sensors=True)
    assert (result.reason, result.exit_code, result.labels) == ("done", 0, ("bf16", "int8"))
    requests = [e for e in result.events if isinstance(e, Request)]
    assert len(requests) == 3 * 6 and {r.arm for r in requests} == {"bf16", "int8"}
    assert sum(r.control for r in requests) == 6
    assert [e for e in seen if isinstance(e, Request)] == requests
    assert [type(e) for e in read_events(run.path / "events.jsonl")] == [type(e) for e in result.events]
    assert not (run.path / "lock.json").exists()


def test_labels_are_unique() -> None:
    p = [find_policy(n) for n in ("int8", "bf16", "int8", "int8")]
    assert labels(p) == ["int8", "bf16", "int8#2", "int8#3"]


def test_a_budget_ends_it(go: Callable[..., MeasureResult]) -> None:
    result = go("", blocks=10_000, budget_s=0.3)
    assert result.reason == "budget" and result.exit_code == 0


@pytest.mark.parametrize(
    ("mode", "options", "message", "code"),
    [
        ("", {"model": "/no/such/place"}, "no such directory", 2),
        ("refuse_int4", {"names": ("bf16", "int4")}, "policy int4 refused: it needs 9 GiB", 1),
        ("fallback", {"hard": True}, "would run bf16, not int8", 1),
        ("oom@4", {"workload": Workload(batch=2)}, "out of memory in decode", 1),
        ("kill@4", {}, "killed, probably out of memory", 1),
        ("segv@4", {}, "crashed (SIGSEGV)", 1),
        ("exit_at_start", {}, "no libtorch here", 4),
        ("wrong_version", {}, "another version", 4),
        ("hang@4", {"silent_s": 1.5}, "stopped answering", 1),
    ],
)
def test_failures_are_a_sentence_and_an_exit_code(
    go: Callable[..., MeasureResult], mode: str, options: dict[str, Any], message: str, code: int
) -> None:
    names = options.pop("names", ())
    with pytest.raises(MeasureError, match=message.replace("(", r"\(").replace(")", r"\)")) as caught:
        go(mode, *names, **options)
    assert caught.value.exit_code == code
    if mode.endswith("@4"):
        assert caught.value.requests == 3
        assert "3 requests measured before it are kept in" in str(caught.value)


def test_fallbacks_without_hard_are_measured(go: Callable[..., MeasureResult]) -> None:
    assert go("fallback").exit_code == 0


def test_no_policy_is_a_usage_error(run: Run) -> None:
    with pytest.raises(PdqError) as caught:
        measure(Load(model="demo"), [], Workload(), run=run)
    assert caught.value.exit_code == 2


def press(times: int, seen: list[Any], number: int = signal.SIGINT) -> threading.Thread:
    def keys() -> None:
        while sum(isinstance(e, Request) for e in seen) < 5:
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    thread = threading.Thread(target=keys)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_the_results(go: Callable[..., MeasureResult], number: int) -> None:
    seen: list[Any] = []
    thread = press(1, seen, number)
    result = go("", blocks=100_000, on_event=seen.append)
    thread.join()
    assert (result.reason, result.exit_code) == ("stopped", 130)
    assert sum(isinstance(e, Request) for e in result.events) >= 5
    assert [e.reason for e in result.events if isinstance(e, RunEnded)] == ["stopped"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait_for_a_hung_engine(go: Callable[..., MeasureResult]) -> None:
    seen: list[Any] = []
    thread = press(2, seen)
    began = time.monotonic()
    result = go("hang@6", blocks=100_000, on_event=seen.append)
    thread.join()
    assert time.monotonic() - began < 60, "a hung engine would have kept it for an hour"
    assert result.exit_code == 130 and sum(isinstance(e, Request) for e in result.events) == 5


def test_ctrl_c_while_loading(go: Callable[..., MeasureResult]) -> None:
    threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    result = go("hang_at_load")
    assert result.exit_code == 130 and time.monotonic() - began < 60
    assert not any(isinstance(e, RunStarted) for e in result.events)


def test_X04_a_full_disk_loses_no_result(go: Callable[..., MeasureResult], run: Run, tmp_path: Path) -> None:
    (run.path / "events.jsonl").symlink_to("/dev/full")
    result = go()
    assert result.exit_code == 0
    assert sum(isinstance(e, Request) for e in result.events) == 18
