"""Bursts that come by themselves: whose turn it is, never two at once; and energy by stage while a session goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy
from pdq_tui.host.live import LOST_S, LiveSession, Schedule
from pdq_tui.host.live_energy import LiveEnergy
from pdq_tui.host.runs import new_run

S = 10**9


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_arm_that_waited_longest_is_next_and_none_while_one_is_under_way() -> None:
    clock = Clock()
    schedule = Schedule(30.0, clock)
    assert schedule.due(["B", "A"]) is None
    clock.now += 30
    assert schedule.due([]) is None
    assert schedule.due(["B", "A"]) == "B"
    clock.now += 60
    assert schedule.due(["B", "A"]) is None, "the last one has not ended"
    schedule.ended()
    assert schedule.due(["B", "A"]) is None, "so long after the last one's end"
    clock.now += 30
    assert schedule.due(["B", "A"]) == "A"
    clock.now += LOST_S
    assert schedule.due(["B", "A"]) == "B", "one that nothing was heard of went with its engine"
    never = Schedule(None, clock)
    clock.now += 10**6
    assert never.due(["A"]) is None


def window(
    kind: str, begin: float, end: float, prompt: int = 0, output: int = 0, arm: str = "A"
) -> p.EnergyWindow:
    return p.EnergyWindow(
        arm=arm, policy_digest="d", window=kind, start_ns=round(begin * S), end_ns=round(end * S), prompt_tokens=prompt,
        output_tokens=output,
    )  # fmt: skip


def sample(at: float, joules: float | None, why: str = "no permission") -> p.SensorSample:
    missing = {} if joules is not None else {"energy_j": why}
    return p.SensorSample(t_ns=round(at * S), cpu=p.CpuSample(energy_j=joules, missing=missing))


def test_a_burst_is_settled_by_the_reading_behind_its_end() -> None:
    live = LiveEnergy()
    settled: list[str] = []
    # 10 W idle, then 50 W in every window: 6 s of prefill make 600 tokens, 6 s of decode 300.
    edges = [("idle", 0, 6), ("prefill", 6, 12), ("decode", 12, 18), ("mixed", 18, 24)]
    for tenth in range(270):
        at = tenth / 10
        settled += live.sample(sample(at, 10 * at if at < 6 else 60 + 50 * (at - 6)), None, False)
        for kind, begin, end in edges:
            if at == end:
                tokens = {"prefill": (600, 0), "decode": (0, 300), "mixed": (300, 150)}.get(kind, (0, 0))
                live.window(window(kind, begin, end, *tokens))
    assert settled == ["A"]
    digest, ended, taken = live.found["A"]
    assert (digest, ended) == ("d", 24 * S)
    assert taken.prefill_j == pytest.approx(0.5) and taken.decode_j == pytest.approx(1.0)
    assert taken.prefill_net_j == pytest.approx(0.4) and taken.closure == pytest.approx(0.0, abs=1e-6)
    assert taken.source.startswith("RAPL")


def test_without_a_counter_the_reason_is_kept_and_nothing_found() -> None:
    live = LiveEnergy()
    live.sample(sample(0, None), None, False)
    assert live.missing == "no permission"
    live.sample(sample(1, 5.0), None, False)
    assert live.missing is None
    live.sample(sample(2, 5.0), None, True)
    assert live.missing is not None and "GPU" in live.missing
    assert live.found == {}


@pytest.fixture
def session(tmp_path: Path) -> Any:
    made = LiveSession(new_run(tmp_path, ["test"], seed=0))
    sent: list[Any] = []
    made.supervisor.send = lambda message: sent.append(message) or True  # type: ignore[method-assign, assignment, func-returns-value]
    yield made, sent
    made.close()


def test_bursts_come_with_the_loop_s_requests_only(session: Any) -> None:
    live, sent = session
    live.schedule(trace_every_s=0.01, energy_every_s=0.01)
    request = p.Request(request=1, arm="A", policy="p", policy_digest="d", kind="loop")
    time.sleep(0.02)
    live._on_event(request)
    assert sent == [], "no loop runs"
    live._loop, live._engine.loop_arms, live._active = True, ["B", "A"], "A"
    live._on_event(p.Request(request=2, arm="A", policy="p", policy_digest="d", kind="blocks"))
    assert sent == [], "a measurement is not a loop"
    live._on_event(request)
    [burst] = sent
    assert isinstance(burst, p.Trace) and (burst.arm, burst.rolling) == ("A", True)
    live._on_event(request)
    assert len(sent) == 1, "one at a time, and no energy without a counter"
    live._on_event(p.Traced(arm="A", policy="p", rolling=True, failed="no"))
    assert live.view().traces == {}, "one that failed by itself is not what is shown"
    live._on_event(sample(1.0, 5.0))
    live._interleave = True
    time.sleep(0.02)
    live._on_event(request)
    assert [(type(m).__name__, getattr(m, "arm", None) or m.arms) for m in sent[1:]] == [
        ("Trace", "B"),
        ("MeasureEnergy", ["B"]),
    ]


def test_ages_and_energy_reach_the_screen_s_picture(session: Any) -> None:
    live, _ = session
    live.session.apply(
        p.ArmReady(arm="A", policy=find_policy("bf16"), weights=p.WeightsInfo(), kv=p.KvInfo(), coverage={})
    )
    now = time.monotonic_ns()
    live._on_event(p.Traced(arm="A", policy="bf16", t_ns=now - 34 * S))
    assert live.view().trace_ages_s["A"] == pytest.approx(34, abs=1)
    at = now / S
    for kind, k in (("idle", 4), ("prefill", 3), ("decode", 2), ("mixed", 1)):
        live.session.apply(window(kind, at - 6 * k - 5, at - 6 * k + 1, 10, 10))
    for n in range(300):
        live.session.apply(sample(at - 30 + n / 10, n))
    found = live.view().energy["A"]
    assert found.age_s == pytest.approx(5, abs=1) and found.taken.prefill_j == pytest.approx(6.0, rel=0.01)
    assert any("energy of arm A (RAPL" in n.text for n in live.view().notes)
