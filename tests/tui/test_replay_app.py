"""The app on a recording: the player's keys on every screen, and no key that would make something run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_app import settle, text_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_snapshots

from pdq_tui.core.protocol import encode
from pdq_tui.host.replay import ReplaySession
from pdq_tui.tui.app import Options, known_ids
from pdq_tui.tui.replay import PLAYER, ReplayApp


@pytest.fixture
def app(tmp_path: Path) -> Iterator[ReplayApp]:
    events = made_snapshots.events()
    place = tmp_path / "runs" / made_snapshots.RUN
    place.mkdir(parents=True)
    (place / "events.jsonl").write_bytes(b"".join(encode(e) for e in events))
    meta = {"id": made_snapshots.RUN, "monotonic_ns": events[0].t_ns, "wall_ns": 1_764_657_000 * 10**9}
    (place / "meta.json").write_text(json.dumps(meta))
    session = ReplaySession(place)
    session.playing = False
    yield ReplayApp(session, Options(runs_dir=tmp_path / "runs", fps=0.0, readonly=True))
    session.close()


def player(app: ReplayApp) -> ReplaySession:
    assert isinstance(app.session, ReplaySession)
    return app.session


async def reached(app: ReplayApp, pilot: Any) -> str:
    assert player(app).settle()
    app._redraw()
    await settle(pilot)
    return text_of(app)


async def test_keys_of_the_player(app: ReplayApp) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        assert "REPLAY paused" in await reached(app, pilot)
        await pilot.press("end")
        shown = await reached(app, pilot)
        assert player(app).position_s == player(app).length_s and "int8-prefill-int4-decode" in shown
        await pilot.press("home", "full_stop")
        await reached(app, pilot)
        first = player(app).position_s
        await pilot.press("full_stop", "comma")
        await reached(app, pilot)
        assert player(app).position_s == first
        await pilot.press("greater_than_sign")
        await reached(app, pilot)
        assert player(app).position_s == pytest.approx(first + 10)
        await pilot.press("plus", "plus", "minus")
        assert player(app).speed == 2.0
        await pilot.press("space")
        assert player(app).playing
        await pilot.press("space")
        assert not player(app).playing


async def test_they_work_on_other_screens_too(app: ReplayApp) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press("3", "end")
        await settle(pilot)
        assert app.showing == "policies" and player(app).settle()
        await pilot.press("6")
        await settle(pilot)
        assert "replay of" in text_of(app)


async def test_nothing_is_started_and_quitting_asks_nothing(app: ReplayApp) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press("end")
        await reached(app, pilot)
        before = player(app).view().notes
        await pilot.press("r", "a", "x", "s")
        await settle(pilot)
        assert player(app).view().notes == before, "these keys do nothing here"
        await pilot.press("q")
        await pilot.pause()
    assert app.return_code == 0


def test_its_keys_can_be_moved() -> None:
    assert {b.id for b in PLAYER} <= set(known_ids())
