"""A recorded run played again: the same figures as live at the same moment, stepped, sought back and forth."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_snapshots

from pdq_tui.core import protocol as p
from pdq_tui.core.protocol import encode
from pdq_tui.errors import PdqError
from pdq_tui.host.journal import Journal
from pdq_tui.host.replay import SPEEDS, ReplaySession, two_arms
from pdq_tui.host.runs import Run
from pdq_tui.host.session import Session


def record(folder: Path, events: list[Any], torn: bytes = b"") -> Path:
    place = folder / made_snapshots.RUN
    place.mkdir(parents=True)
    (place / "events.jsonl").write_bytes(b"".join(encode(e) for e in events) + torn)
    meta = {"id": made_snapshots.RUN, "monotonic_ns": events[0].t_ns, "wall_ns": 1_764_657_000 * 10**9}
    (place / "meta.json").write_text(json.dumps(meta))
    return place


@pytest.fixture
def events() -> list[Any]:
    return made_snapshots.events()


@pytest.fixture
def session(tmp_path: Path, events: list[Any]) -> Any:
    one = ReplaySession(record(tmp_path, events))
    one.playing = False
    yield one
    one.close()


def figures(session: Any, arm: str = "A") -> tuple[int, float | None]:
    """Requests and the median TPOT, once the figures have come."""
    end = time.monotonic() + 20
    view = session.view(None)
    while view.arms.get(arm) and view.arms[arm].requests and "tpot_ms" not in view.arms[arm].stats:
        assert time.monotonic() < end
        time.sleep(0.01)
        view = session.view(None)
    there = view.arms.get(arm)
    stats = there.stats.get("tpot_ms") if there else None
    return (there.requests if there else 0), (stats.median if stats else None)


def test_the_end_shows_what_the_live_session_showed(session: ReplaySession, events: list[Any]) -> None:
    live = Session(Run("x", Path("/nowhere"), session.run.meta), Journal(None))
    for event in events:
        live.apply(event)
    session.seek(session.length_s)
    assert session.settle()
    assert figures(session) == figures(live) and figures(session)[0] == 24
    one, other = session.view(None), live.view(None)
    assert one.arms["A"].series == other.arms["A"].series and one.arms["B"].ready == other.arms["B"].ready
    assert one.elapsed_s == pytest.approx(session.length_s)
    live.close()


def test_steps_go_request_by_request_both_ways(session: ReplaySession, events: list[Any]) -> None:
    session.seek(0.0)
    assert session.settle()
    seen = []
    for step in (1, 1, 1, -1, -1, -1, -1):
        session.step(step)
        assert session.settle()
        seen.append(sum(isinstance(e, p.Request) for e in session.events()))
    assert seen == [1, 2, 3, 2, 1, 0, 0] and not session.playing


def test_back_and_forth_ends_in_the_same_picture(session: ReplaySession) -> None:
    half = session.length_s / 2
    session.seek(half)
    assert session.settle()
    before = figures(session)
    session.seek(session.length_s)
    assert session.settle()
    session.skip(-session.length_s / 2)
    assert session.settle()
    assert figures(session) == before and 0 < before[0] < 24
    for far in (-1e6, 1e6):
        session.seek(far)
        assert session.settle()
        assert 0 <= session.position_s <= session.length_s


def test_it_plays_at_its_speed_stops_at_the_end_and_begins_again(tmp_path: Path, events: list[Any]) -> None:
    short = [e for e in events if e.t_ns <= events[0].t_ns + 2 * 10**9]
    one = ReplaySession(record(tmp_path, short), speed=16.0)
    try:
        end = time.monotonic() + 20
        while one.playing and time.monotonic() < end:
            time.sleep(0.01)
        assert not one.playing and one.position_s == pytest.approx(one.length_s)
        one.toggle()
        assert one.playing
        assert "REPLAY" in one.view().run_text
    finally:
        one.close()


def test_hours_of_silence_are_passed_over(tmp_path: Path, events: list[Any]) -> None:
    last = events[-1]
    late = msgspec.structs.replace(last, t_ns=last.t_ns + 3600 * 10**9)
    one = ReplaySession(record(tmp_path, [events[0], late]), speed=64.0)
    try:
        end = time.monotonic() + 20
        while one.playing and time.monotonic() < end:
            time.sleep(0.01)
        assert one.position_s == pytest.approx(one.length_s) and one.length_s > 3600
    finally:
        one.close()


def test_speed_stays_in_its_bounds(session: ReplaySession) -> None:
    for step, bound in ((1, SPEEDS[-1]), (-1, SPEEDS[0])):
        for _ in range(20):
            session.faster(step)
        assert session.speed == bound


def test_arms_of_a_headless_run_are_named_a_and_b(events: list[Any]) -> None:
    names = {"A": "int4", "B": "bf16"}

    def renamed(e: Any) -> Any:
        if isinstance(e, p.RunStarted):
            return msgspec.structs.replace(e, arms=[names[a] for a in e.arms])
        return msgspec.structs.replace(e, arm=names[e.arm]) if getattr(e, "arm", None) in names else e

    found, told = two_arms([renamed(e) for e in events])
    assert [getattr(e, "arm", None) for e in found] == [getattr(e, "arm", None) for e in events]
    assert told == "arm A is int4, B is bf16"
    assert two_arms(events)[1] is None


def test_a_torn_journal_plays_and_says_so(tmp_path: Path, events: list[Any]) -> None:
    one = ReplaySession(record(tmp_path, events, torn=b'{"broken'))
    try:
        assert any("1 torn lines" in note.text for note in one.view().notes)
    finally:
        one.close()


@pytest.mark.parametrize("content", [None, b""])
def test_what_cannot_be_replayed_is_a_sentence(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "events.jsonl").write_bytes(content)
    with pytest.raises(PdqError, match="cannot be replayed"):
        ReplaySession(tmp_path)


def test_nothing_can_be_made_to_run(session: ReplaySession) -> None:
    session.start_loop()
    session.set_policy("A", made_snapshots.POLICIES["B"])
    assert "nothing runs" in session.view().notes[-1].text
    assert not session.view().wants_loop
