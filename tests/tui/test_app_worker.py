"""The app on a real session with a made-up engine: workers started, stopped and replaced from key presses."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_views import BASE, STAGED, FakeSession
from textual.pilot import Pilot

from pdq_tui.core.protocol import Load
from pdq_tui.host.live import LiveSession
from pdq_tui.host.runs import new_run
from pdq_tui.tui.app import Options, PdqApp
from pdq_tui.tui.rows import Rows

FAKE_ENGINE = Path(__file__).parent.parent / "proc" / "fake_engine.py"


async def until(pilot: Pilot[Any], what: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited too long"
        await pilot.pause(0.05)


def test_the_fake_session_has_the_face_of_the_real_one(tmp_path: Path) -> None:
    real = LiveSession(new_run(tmp_path))
    face = {name for name in dir(real) if not name.startswith("_")}
    inner = {"journal", "supervisor", "session", "reference"}
    assert face - inner <= set(dir(FakeSession()))
    assert {name for name in dir(real.run) if not name.startswith("_")} <= set(dir(FakeSession().run))
    real.session.close()
    real.journal.close()


async def test_S02_worker_is_started_stopped_and_replaced_from_key_presses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = LiveSession(
        new_run(tmp_path / "runs"), engine_argv=[sys.executable, str(FAKE_ENGINE)], sensors=False
    )
    options = Options(
        runs_dir=tmp_path / "runs", load=Load(model="/m"), a=STAGED, b=BASE, fps=4.0, ascii=False
    )
    app = PdqApp(session, options)
    async with app.run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: session.view().running)
        pids = {session.view().engine.pid}
        for count in (1, 2, 3):
            await pilot.press("R")
            await until(
                pilot, lambda: session.view().engine.pid not in (None, *pids) and session.view().running
            )
            pids.add(session.view().engine.pid)
            assert len(pids) == count + 1
        await until(pilot, lambda: session.view().arms["A"].requests > 5)
        await pilot.press("x")
        await until(pilot, lambda: session.view().interleave and session.view().running)
        await pilot.press("r")
        await until(pilot, lambda: not session.view().running)
        await pilot.press("r")
        await until(pilot, lambda: session.view().running)
        await pilot.pause(0.6)
        assert "RUNNING" in app.screen.query_one("#header", Rows).text
        assert "n/a" not in app.screen.query_one("#decode", Rows).text.splitlines()[1]
        await pilot.press("ctrl+c", "ctrl+c")
        await pilot.pause(0.5)
    assert app.return_code == 130
    assert session.supervisor.worker_pids == {}
