"""Requests in a row on the fake device: warm-up, first use, flips, blocks, drift, budget, solo passes."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from itertools import groupby

import pytest
from fake_device import FakeDevice, FakeStaged, fake_arm
from test_run_request import batch_of

from pdq_tui.core import protocol as p
from pdq_tui.core.workload import Workload
from pdq_tui.engine import stops
from pdq_tui.engine.bench import Bench, Control
from pdq_tui.engine.prompts import Prepared
from pdq_tui.engine.runner import Arm
from pdq_tui.errors import UsageError


class Rig:
    """A bench with two arms, and everything it sent."""

    def __init__(self, *widths: int, n: int = 8, **costs: object) -> None:
        self.device = FakeDevice()
        self.sent: list[p.Message] = []
        self.bench = Bench(self.device, self.sent.append)
        batches = tuple(batch_of(width) for width in (widths or (32,)))
        workload = Workload(output_tokens=n)
        self.bench.set_workload(Prepared(workload, batches, list(widths), "sha", False))
        for label in ("A", "B"):
            self.bench.set_arm(fake_arm(self.device, label, **costs), packed_anew=True)

    def requests(self, kind: str | None = None) -> list[p.Request]:
        return [e for e in self.sent if isinstance(e, p.Request) and kind in (None, e.kind)]

    def staged(self, label: str) -> FakeStaged:
        staged = self.bench.arms[label].staged
        assert isinstance(staged, FakeStaged)
        return staged

    def last(self) -> p.RunEnded:
        event = self.sent[-1]
        assert isinstance(event, p.RunEnded)
        return event


def after(rig: Rig, requests: int) -> Callable[[], bool]:
    return lambda: len(rig.requests("loop")) >= requests


def nothing(label: str = "") -> None:
    pass


def test_T02_each_shape_is_warmed_before_it_is_measured() -> None:
    rig = Rig(16, 32, 48, first_use_ms=2000.0)
    rig.bench.loop(p.StartLoop(arm="A", arms=["A", "B"]), Control(stopped=after(rig, 6)))
    warm, measured = rig.requests("warmup"), rig.requests("loop")
    assert len(warm) == 3
    assert all(r.warmup and r.first_use for r in warm)
    assert all(r.prefill_ms == pytest.approx(2080) for r in warm)
    assert not any(r.first_use for r in measured)
    assert all(r.prefill_ms == pytest.approx(80) for r in measured)
    assert all(max(r.itl_ms) == pytest.approx(5) for r in measured)


def test_T02_a_cost_that_warm_up_missed_is_marked() -> None:
    rig = Rig()
    calls = iter([80.0, 2080.0, 80.0, 80.0])
    staged = rig.staged("A")
    original = staged.start

    def start(batch: int, capacity: int, pad: object) -> object:
        staged.prefill_ms = next(calls)
        return original(batch, capacity, None)

    staged.start = start  # type: ignore[assignment, method-assign]
    rig.bench.loop(p.StartLoop(arm="A", arms=["A"]), Control(stopped=after(rig, 3)))
    assert [r.first_use for r in rig.requests("loop")] == [True, False, False]


def test_flip_takes_place_at_a_request_boundary_without_another_warm_up() -> None:
    rig = Rig()
    wanted = iter(["A", "A", "B", "B", "A", "B"])
    rig.bench.loop(
        p.StartLoop(arm="A", arms=["A", "B"]),
        Control(stopped=after(rig, 6), selected=lambda: next(wanted, "B")),
    )
    assert [r.arm for r in rig.requests("loop")] == ["A", "A", "B", "B", "A", "B"]
    assert [r.arm for r in rig.requests("warmup")] == ["A", "B"]
    assert [e.arm for e in rig.sent if isinstance(e, p.ArmSwitched)] == ["B", "A", "B"]
    assert all(r.gap_ms == 0 for r in rig.requests()[1:])


def test_interleaved_loop_runs_mirrored_blocks_and_leaves_them_whole() -> None:
    rig = Rig()
    rig.bench.loop(
        p.StartLoop(arm="A", arms=["B", "A"], interleave=True),
        Control(stopped=after(rig, 12), interleave=lambda: True),
    )
    blocks = [list(rows) for _, rows in groupby(rig.requests("loop"), key=lambda r: r.block)]
    assert len(blocks) == 2
    for block in blocks:
        turns = [(r.arm, r.control) for r in block]
        assert turns == turns[::-1]
        assert sorted(set(turns)) == [("A", False), ("B", False), ("B", True)]
    assert {r.block for r in blocks[0]}.isdisjoint({r.block for r in blocks[1]})


def test_a_block_that_saw_a_change_is_given_up() -> None:
    rig = Rig()
    looks = iter(range(1000))

    def between() -> bool:
        if next(looks) == 3:
            rig.bench.set_arm(fake_arm(rig.device, "A", step_ms=7.0), packed_anew=True)
        return False

    rig.bench.loop(
        p.StartLoop(arm="A", arms=["A", "B"], interleave=True),
        Control(stopped=after(rig, 10), interleave=lambda: True, between=between),
    )
    sizes = [len(list(rows)) for _, rows in groupby(rig.requests("loop"), key=lambda r: r.block)]
    assert sizes[0] < 6
    assert sizes[1] == 6
    assert rig.last().blocks == 1


def test_blocks_end_when_blocks_and_seconds_are_enough() -> None:
    rig = Rig()
    rig.bench.blocks(p.RunBlocks(arms=["A", "B"], blocks=3, min_seconds=0.0), Control(), nothing, nothing)
    assert (rig.last().reason, rig.last().blocks) == ("done", 3)
    assert len(rig.requests("blocks")) == 18
    assert [r.arm for r in rig.requests("solo")] == ["A", "B"]
    rig.bench.blocks(
        p.RunBlocks(arms=["A", "B"], blocks=1, min_seconds=3.0, solo=False), Control(), nothing, nothing
    )
    assert sum(r.e2e_ms or 0 for r in rig.requests("blocks")[18:]) >= 3000
    numbers = [r.block for r in rig.requests("blocks")]
    assert len(set(numbers)) == len(numbers) // 6


def test_blocks_end_before_the_budget_is_overrun() -> None:
    rig = Rig()
    rig.bench.blocks(
        p.RunBlocks(arms=["A"], blocks=100, budget_s=1.0, min_seconds=0.0), Control(), nothing, nothing
    )
    assert rig.last().reason == "budget"
    assert 0 < rig.last().blocks < 100
    assert rig.device.clock_ms <= 1100


def test_blocks_stop_at_the_next_token() -> None:
    rig = Rig(n=1000)
    rig.bench.blocks(
        p.RunBlocks(arms=["A", "B"], blocks=3, solo=False),
        Control(stopped=lambda: len(rig.staged("A").passes) > 60),
        nothing,
        nothing,
    )
    assert rig.last().reason == "stopped"
    assert rig.requests()[-1].cancelled


def test_T12_memory_comes_from_a_pass_alone() -> None:
    rig = Rig()
    alone: list[str] = []
    rig.bench.blocks(
        p.RunBlocks(arms=["A", "B"], blocks=1, min_seconds=0.0),
        Control(),
        alone.append,
        lambda: alone.append("together"),
    )
    assert alone == ["A", "B", "together"]
    assert all(r.prefill_peak_bytes == 300 and r.decode_peak_bytes == 200 for r in rig.requests("solo"))


def test_T09_drift_cancels_inside_a_block() -> None:
    """Step time rises 1 % a second of load; the arms are equal, and so they come out."""
    rig = Rig(n=64)
    rig.device.speed = lambda work, clock: work * (1 + 0.01 * clock / 1000)
    rig.bench.blocks(p.RunBlocks(arms=["A", "B"], blocks=10, solo=False), Control(), nothing, nothing)
    differences = []
    for _, rows in groupby(rig.requests("blocks"), key=lambda r: r.block):
        block = list(rows)
        logs = {
            label: [math.log(r.tpot_ms or 0) for r in block if r.arm == label and not r.control]
            for label in "AB"
        }
        differences.append((sum(logs["B"]) - sum(logs["A"])) / 2)
    mean = sum(differences) / len(differences)
    assert abs(mean) < 0.002
    first, last = rig.requests("blocks")[0], rig.requests("blocks")[-1]
    assert (last.tpot_ms or 0) > 1.1 * (first.tpot_ms or 0)


def test_an_arm_without_policy_is_a_sentence() -> None:
    rig = Rig()
    with pytest.raises(UsageError, match="C has no policy"):
        rig.bench.loop(p.StartLoop(arm="C", arms=["C"]), Control())
    assert isinstance(rig.bench.arms["A"], Arm)


def test_warm_ups_are_no_measured_time() -> None:
    """Ten seconds measured are ten seconds of turns: a prompt of a new width is warmed beside them."""
    rig = Rig(16, 32, 48, 64, first_use_ms=60_000.0)
    rig.bench.blocks(
        p.RunBlocks(arms=["A", "B"], blocks=2, min_seconds=3.0, solo=False), Control(), nothing, nothing
    )
    turns = rig.requests("blocks")
    measured_s = sum((r.host_end_ns - r.host_start_ns) / 1e9 for r in turns)
    assert rig.last().reason == "done" and 3.0 <= measured_s < 6.0


def test_a_stop_during_the_solo_passes_brings_nothing_back_and_counts_what_was_run() -> None:
    rig, calls = Rig(), []
    rig.bench.blocks(
        p.RunBlocks(arms=["A", "B"], blocks=2, min_seconds=0.0),
        Control(stopped=lambda: bool(rig.requests("solo"))),
        calls.append,
        lambda: calls.append("together"),
    )
    assert calls == ["A"]
    assert (rig.last().reason, rig.last().blocks) == ("stopped", 0) and rig.last().requests >= 1


def test_a_request_during_which_the_process_was_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGCONT)
    monkeypatch.setattr(stops, "_continued_ns", 0)
    stops.watch()
    rig = Rig()
    staged = rig.staged("A")
    original = staged.start
    started = 0

    def start(batch: int, capacity: int, pad: object) -> object:
        nonlocal started
        started += 1
        if started == 3:  # the warm-up is the first
            os.kill(os.getpid(), signal.SIGCONT)
            monkeypatch.setattr(
                stops, "_continued_ns", rig.device.host_ns() + 1
            )  # on the fake device's clock
        return original(batch, capacity, None)

    staged.start = start  # type: ignore[assignment, method-assign]
    try:
        rig.bench.loop(p.StartLoop(arm="A", arms=["A"]), Control(stopped=after(rig, 3)))
    finally:
        signal.signal(signal.SIGCONT, before)
    assert [r.cancelled for r in rig.requests("loop")] == [False, True, False]
    notes = [e.text for e in rig.sent if isinstance(e, p.Note)]
    assert notes == ["request 3 does not count: the engine's process was stopped and continued during it"]


def test_continuing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGCONT)
    monkeypatch.setattr(stops, "_continued_ns", 0)
    stops.watch()
    try:
        begin = time.monotonic_ns()
        assert not stops.since(begin)
        os.kill(os.getpid(), signal.SIGCONT)
        assert stops.since(begin) and not stops.since(time.monotonic_ns())
    finally:
        signal.signal(signal.SIGCONT, before)
