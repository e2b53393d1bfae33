"""--readonly has one meaning on every screen: look; start, switch, apply and save nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_views import FakeSession, make_view
from small_app import settle, text_of

from pdq_tui.core.protocol import Load
from pdq_tui.host.runs import new_run
from pdq_tui.tui import keys
from pdq_tui.tui.app import PdqApp
from pdq_tui.tui.live import LiveScreen
from pdq_tui.tui.policies import PoliciesScreen

Make = Callable[..., PdqApp]
#: Everything that a person can press, except what leads to another screen, opens a dialog of its own or quits.
PRESSED = [
    key
    for key in (
        *"abcdefghijklmnoprstuvwxyz",
        *"ABCDEFGHIJKLMNOPRSUVWXYZ",
        "delete",
        "space",
        "ctrl+a",
        "ctrl+s",
    )
    if key not in ("e", "q")
]


@pytest.mark.parametrize("size", [(120, 36), (80, 24), (60, 20)])
async def test_readonly_is_said_and_no_key_of_the_live_screen_changes_anything(
    make_app: Make, session: FakeSession, size: tuple[int, int]
) -> None:
    app = make_app(readonly=True)
    async with app.run_test(size=size) as pilot:
        for key in PRESSED:
            await pilot.press(key)
            assert isinstance(app.screen, LiveScreen), key
        assert [call for call in session.calls if call[0] != "note"] == []
        shown = text_of(app)
        assert "read-only" in shown or "r/o" in shown
        for word in ("Start", "Stop", "Snap", "ABBA off", "Arm "):
            assert word not in shown.splitlines()[-1]


async def test_readonly_policies_are_tried_out_but_neither_applied_nor_written(
    make_app: Make, session: FakeSession, tmp_path: Path
) -> None:
    mine = tmp_path / "home" / "config" / "profiles" / "mine.toml"
    mine.parent.mkdir(parents=True)
    mine.write_text('schema = 1\nname = "mine"\n')
    before = mine.read_bytes()
    app = make_app(readonly=True)
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press("3")
        await settle(pilot)
        screen = app.screen
        assert isinstance(screen, PoliciesScreen)
        screen.query_one("#list").move_to("mine")  # type: ignore[attr-defined]
        await pilot.press("enter", "j", "l")
        await settle(pilot)
        assert screen.draft is not None and screen.draft.prefill.weights != "bf16"
        for key in ("a", "b", "w", "delete"):
            await pilot.press(key)
            await settle(pilot)
            assert app.screen is screen, key
        assert session.calls == []
        assert mine.read_bytes() == before and list(mine.parent.iterdir()) == [mine]
        shown = text_of(app)
        assert "read-only" in shown.splitlines()[0] and "nothing is applied or written" in shown
        assert "Apply" not in shown.splitlines()[-1]


async def test_readonly_help_and_palette_offer_nothing_that_changes(make_app: Make) -> None:
    from pdq_tui.tui.commands import PdqCommands
    from pdq_tui.tui.help import key_lines

    app = make_app(readonly=True)
    async with app.run_test(size=(120, 36)) as pilot:
        names = [name for name, _, _ in PdqCommands(app.screen)._commands()]
        assert not any(
            name.startswith(("A: ", "B: ", "Live: Arm", "Live: Snap", "Live: Run")) for name in names
        )
        for digit in ("1", "3"):
            await pilot.press(digit)
            await settle(pilot)
            shown = "\n".join(line.text for line in key_lines(app.screen, 100))
            off = [b.tooltip for b in itertools.chain(keys.LIVE, PoliciesScreen.BINDINGS)
                   if b.action.split("(")[0] in keys.CHANGING]  # type: ignore[union-attr]  # fmt: skip
            assert len(off) == 15
            assert [text for text in off if text in shown] == []


@pytest.mark.parametrize("readonly", [False, True])
async def test_what_is_refused_is_offered_nowhere(make_app: Make, readonly: bool) -> None:
    """Key lines, panels, sentences and help name a key only where it does something."""
    from pdq_tui.tui.help import key_lines

    app = make_app(make_view(ratios={}, arms={}), readonly=readonly)
    shown = ""
    async with app.run_test(size=(160, 48)) as pilot:
        for digit in "1236":
            await pilot.press(digit)
            await settle(pilot)
            shown += text_of(app) + "".join(line.text for line in key_lines(app.screen, 100))
    offered = {
        text: text in shown
        for text in (
            "ctrl+c Stop", "r Stop", "stop the run", "x: ABBA", "s on the live screen", "a or b applies",
            "Apply to A", "w Write", "del Delete",
        )
    }  # fmt: skip
    assert set(offered.values()) == {not readonly}, offered
    assert bool(re.search(r"ctrl\+c +a second time within 2 s: quit", shown)) is readonly


async def test_readonly_ctrl_c_twice_quits(make_app: Make, session: FakeSession) -> None:
    app = make_app(readonly=True)
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        await pilot.press("ctrl+c")
        assert "ctrl+c again within 2 s quits" in session.picture.notes[-1].text and not session.closed
        await pilot.press("ctrl+c")
        await app.workers.wait_for_complete()
        assert session.closed and ("stop",) not in session.calls


async def test_readonly_loads_the_model_and_starts_no_loop(make_app: Make, session: FakeSession) -> None:
    from fake_views import BASE, STAGED

    app = make_app(make_view(running=False), readonly=True, load=Load(model="/m"), a=STAGED, b=BASE)
    started: list[Any] = []
    session.start = lambda *a, **how: started.append(how)  # type: ignore[method-assign]
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        assert started == [{"loop": False}]
        await pilot.press("ctrl+c")
        assert ("stop",) not in session.calls


def test_readonly_run_makes_no_directory(tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs", ["pdq-tui"], in_memory=True)
    assert run.in_memory and run.text == "" and run.meta["argv"] == ["pdq-tui"]
    run.track(1, "engine")
    run.release()
    assert not (tmp_path / "runs").exists()
