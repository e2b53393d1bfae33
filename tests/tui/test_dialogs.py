"""The small questions over a screen: nothing shines through, and every word of a choice is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_views import STAGED
from small_app import settle, text_of
from textual.renderables.background_screen import BackgroundScreen
from textual.screen import ModalScreen

from pdq_tui.tui.app import PdqApp
from pdq_tui.tui.ask import Ask, Choice, Pick, Write
from pdq_tui.tui.export import ExportDialog
from pdq_tui.tui.lines import LineList, cells
from pdq_tui.tui.modals import stage_choices

DIALOGS: dict[str, Callable[[], ModalScreen[Any]]] = {
    "ask": lambda: Ask("Stop it?"),
    "pick": lambda: Pick("which", [Choice("bf16", "a note"), Choice("fp8", refused="not here")], "bf16"),
    "write": lambda: Write("name", "mine", lambda text: None if text else "empty"),
    "export": ExportDialog,
}


@pytest.mark.parametrize("name", DIALOGS)
@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 36)])
async def test_nothing_of_the_screen_below_is_seen(
    name: str, size: tuple[int, int], make_app: Callable[..., PdqApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app()
    tinted: list[bool] = []
    monkeypatch.setattr(BackgroundScreen, "__init__", lambda *_: tinted.append(True))
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        below = text_of(app)
        await app.push_screen(DIALOGS[name]())
        await settle(pilot)
        shown = text_of(app)
        for word in ("TTFT", "token 37 of 64", "1 Live" if size[0] > 60 else "Screens"):
            assert word in below and word not in shown
        outside = [line for line in shown.splitlines() if not any(c in line for c in "╭│╰")]
        assert "".join(outside).strip() == ""
        assert tinted == []


@pytest.mark.parametrize("width", [60, 80, 120])
async def test_a_choice_is_read_whole(width: int, make_app: Callable[..., PdqApp]) -> None:
    app = make_app()
    choices = [
        *stage_choices(STAGED, "decode", lambda _: None),
        Choice("fp8", refused="no scaled product on this machine " * 2),
    ]
    async with app.run_test(size=(width, 36)) as pilot:
        await app.push_screen(Pick("which", choices, "int4-g64"))
        await settle(pilot)
        box = app.screen.query_one(LineList)
        assert [line.text for line in box.lines if cells(line.text) > box.size.width - 2] == []
        read = " ".join(" ".join(line.text.split()) for line in box.lines)
        for choice in choices:
            assert choice.note in read and (choice.refused or "").strip() in read
        assert box.key == "int4-g64"  # lines without a value are passed over
        await pilot.press("g", "k", "j", "j")
        assert box.key == choices[2].value
