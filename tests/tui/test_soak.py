"""Whatever is pressed, in whatever window: the app is still there, and works."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_evaluation
import made_snapshots
from fake_views import FakeSession, make_view
from small_app import settle, text_of
from textual.screen import ModalScreen

from pdq_tui.errors import PdqError
from pdq_tui.tui import evaluating
from pdq_tui.tui.app import PdqApp, scopes

KEYS, RESIZES = 1000, 200
#: Those that end or suspend the app on purpose.
_ENDING = {"q", "ctrl+q", "ctrl+c", "ctrl+z"}
_TYPED = (
    "x",
    "7",
    "/",
    "[",
    "ä",
    "backspace",
    "tab",
    "shift+tab",
    "enter",
    "escape",
    "up",
    "down",
    "left",
    "right",
)


def keys_to_press() -> list[str]:
    """Every key that means something anywhere, and some that are only typed."""
    bound = {key for scope in scopes() for b in scope for key in b.key.split(",")}
    return sorted((bound | set(_TYPED)) - _ENDING)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1])
async def test_a_thousand_random_keys_and_two_hundred_resizes_leave_a_working_app(
    make_app: Any, session: FakeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    def refuse(*_: Any) -> None:
        raise PdqError("nothing is started in a test")

    monkeypatch.setattr(evaluating, "begin", refuse)
    monkeypatch.setattr(evaluating, "go_on", refuse)
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    made_snapshots.save_all(runs)
    (tmp_path / "evaluations").mkdir()
    made_evaluation.make(tmp_path / "evaluations")
    run_dir = runs / "20261203T000000Z-abcd"
    run_dir.mkdir()
    session.picture = make_view(run_id=run_dir.name, run_dir=str(run_dir))
    session.run.path = run_dir
    rng = random.Random(seed)
    keys = keys_to_press()
    app: PdqApp = make_app()
    shown = set()
    async with app.run_test(size=(120, 36)) as pilot:
        todo = ["key"] * KEYS + ["size"] * RESIZES
        rng.shuffle(todo)
        for number, what in enumerate(todo):
            if what == "size":
                await pilot.resize_terminal(rng.randint(1, 200), rng.randint(1, 60))
            else:
                await pilot.press(rng.choice(keys))
            shown.add(app.showing)
            if number % 50 == 0:
                await app.workers.wait_for_complete()
        await settle(pilot)
        assert app.is_running and not session.closed
        assert len(shown) >= 4, "it came around"
        # And it still does what it is told.
        await pilot.resize_terminal(120, 36)
        for _ in range(10):
            if not isinstance(app.screen, ModalScreen):
                break
            await pilot.press("escape")
            await pilot.pause()
        for _ in range(2):  # a filter may have the first
            await pilot.press("escape", "1")
            await pilot.pause()
        await settle(pilot)
        assert app.showing == "live" and "PREFILL" in text_of(app)
        before = len(session.calls)
        await pilot.press("x")
        assert len(session.calls) == before + 1 and session.calls[-1][0] == "interleave"
