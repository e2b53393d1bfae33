"""What an app that was killed left behind is offered at the next start: nothing of it is ended unasked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_views import BASE, STAGED, FakeSession
from small_app import settle, text_of

from pdq_tui.core.protocol import Load
from pdq_tui.host.runs import LOCK, Run, cut_short, leftovers, new_run
from pdq_tui.tui.ask import Ask
from pdq_tui.tui.live import LiveScreen

Make = Callable[..., Any]
SIZE = (120, 36)


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def killed(worker: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose app is gone and whose engine is not."""
    monkeypatch.setenv("PDQ_HOME", str(tmp_path / "home"))
    run = new_run(tmp_path / "runs", ["pdq-tui", "demo"])
    run.track(worker.pid, "engine")
    lock = run.path / LOCK
    lock.write_text(lock.read_text().replace(f'"pid": {os.getpid()}', '"pid": 999999999'))
    return run


def options() -> dict[str, Any]:
    return {"load": Load(model="/nowhere"), "a": STAGED, "b": BASE}


@pytest.mark.parametrize("key", ["y", "n", "escape"])
async def test_S05_a_worker_left_behind_is_ended_only_after_y(
    make_app: Make, session: FakeSession, worker: subprocess.Popen[bytes], killed: Run, key: str
) -> None:
    app = make_app(**options())
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        assert isinstance(app.screen, Ask)
        asked = " ".join(text_of(app).replace("│", " ").split())
        assert killed.id in asked and f"engine process {worker.pid} is still there" in asked
        assert worker.poll() is None
        assert any(call[0] == "start" for call in session.calls), (
            "the model's load does not wait for the answer"
        )
        await pilot.press(key)
        await settle(pilot)
        assert isinstance(app.screen, LiveScreen)
        if key == "y":
            assert worker.wait(5) != 0
            assert [n for n in session.picture.notes if f"engine process {worker.pid}" in n.text]
        else:
            assert worker.poll() is None and len(leftovers([killed.path.parent])) == 1


async def test_S05_readonly_offers_nothing(
    make_app: Make, worker: subprocess.Popen[bytes], killed: Run
) -> None:
    app = make_app(readonly=True, **options())
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        assert isinstance(app.screen, LiveScreen) and worker.poll() is None


async def test_S05_the_lock_of_a_run_that_was_cut_short_is_left_for_the_session(
    make_app: Make, worker: subprocess.Popen[bytes], killed: Run
) -> None:
    worker.kill()
    worker.wait()
    (killed.path / "events.jsonl").write_text('{"type":"request","v":1}\n')
    app = make_app(**options())
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        assert isinstance(app.screen, LiveScreen), "nothing is left to end"
    assert cut_short([killed.path.parent]) == [killed.path]
