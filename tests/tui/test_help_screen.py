"""Help: every key of the screen below, the focused number's formula, at any size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_app import SmallApp, settle, text_of
from textual._compositor import Compositor
from textual.binding import Binding
from textual.renderables.background_screen import BackgroundScreen

from pdq_tui.core.metrics import METRICS
from pdq_tui.tui.app import PdqApp
from pdq_tui.tui.compare import CompareScreen
from pdq_tui.tui.help import HelpScreen, key_lines, metric_lines
from pdq_tui.tui.lines import LineList, cells
from pdq_tui.tui.live import LiveScreen
from pdq_tui.tui.log import LogScreen
from pdq_tui.tui.policies import PoliciesScreen

SCREENS = (CompareScreen, PoliciesScreen, LogScreen)


@pytest.mark.parametrize("screen", SCREENS)
async def test_every_binding_of_the_screen_has_an_id_a_tooltip_and_a_line(
    screen: type, tmp_path: Path
) -> None:
    for binding in screen.BINDINGS:
        assert isinstance(binding, Binding) and binding.id and binding.tooltip
    app = SmallApp(screen, tmp_path)
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        shown = "\n".join(line.text for line in key_lines(app.screen, 100))
        for binding in screen.BINDINGS:
            assert binding.tooltip in shown
        assert "next row" in shown and "THIS SCREEN" in shown


async def test_help_shows_formula_why_and_marks_and_closes(tmp_path: Path) -> None:
    app = SmallApp(CompareScreen, tmp_path)
    async with app.run_test(size=(120, 60)) as pilot:
        await settle(pilot)
        below = app.screen
        app.push_screen(HelpScreen("tpot_ms"))
        await settle(pilot)
        shown = text_of(app)
        for part in ("THIS PANEL: TPOT", METRICS["tpot_ms"].formula, METRICS["tpot_ms"].why, "lower is better",
                     "this snapshot is the reference", "MARKS", "unsure"):  # fmt: skip
            assert part in shown
        await pilot.press("escape")
        await pilot.pause()
        assert app.screen is below


async def test_a_moved_key_is_shown_where_it_is_now(tmp_path: Path) -> None:
    app = SmallApp(CompareScreen, tmp_path)
    app.set_keymap({"compare.diff": "X"})
    async with app.run_test(size=(120, 60)) as pilot:
        await settle(pilot)
        line = next(x for x in key_lines(app.screen, 100) if "only rows that are better" in x.text)
        assert line.text.strip().startswith("X ")


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_every_metric_has_its_help_in_any_width(metric: str) -> None:
    for width in (20, 34, 76):
        lines = metric_lines(METRICS[metric], width)
        assert any("why" in line.text for line in lines)


async def test_help_scrolls_at_60x20_and_smaller(tmp_path: Path) -> None:
    app = SmallApp(PoliciesScreen, tmp_path)
    async with app.run_test(size=(60, 20)) as pilot:
        await settle(pilot)
        app.push_screen(HelpScreen("ttft_ms"))
        await settle(pilot)
        assert "Time to first token" in text_of(app)
        await pilot.press("G")
        await settle(pilot)
        assert "not available" in text_of(app)
        for size in ((30, 8), (20, 5), (10, 3), (2, 2), (1, 1), (300, 100)):
            await pilot.resize_terminal(*size)
            await settle(pilot)
            for key in ("j", "k", "g", "G"):
                await pilot.press(key)
            text_of(app)
        assert app.screen.query_one(LineList).lines


async def test_help_in_ascii(tmp_path: Path) -> None:
    app = SmallApp(LogScreen, tmp_path, plain=True)
    async with app.run_test(size=(80, 60)) as pilot:
        await settle(pilot)
        app.push_screen(HelpScreen("prefill_mfu"))
        await settle(pilot)
        assert {c for c in text_of(app) if not c.isascii()} == set()


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 36)])
async def test_two_keys_of_one_binding_stay_in_their_column(
    size: tuple[int, int], make_app: Callable[..., PdqApp]
) -> None:
    app = make_app(keys={"live.snapshot": "ctrl+underscore,f5,shift+f6"})
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        await pilot.press("question_mark")
        await settle(pilot)
        box = app.screen.query_one(LineList)
        assert [line.text for line in box.lines if cells(line.text) > box.size.width] == []
        shown = "\n".join(line.text for line in box.lines)
        for word in ("right", "down", "f1", "ctrl+p", "f5", "shift+f6"):
            assert word in shown
        # The text beside them begins in one column.
        rows = [line for line in key_lines(app.screen_stack[-2], size[0] - 5) if len(line.parts) == 2]
        assert len({cells(line.parts[0][0]) for line in rows}) == 1


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 36)])
@pytest.mark.parametrize("digit", "1236")
async def test_keys_that_move_are_said_in_our_words_and_on_one_line(
    digit: str, size: tuple[int, int], make_app: Callable[..., PdqApp]
) -> None:
    app = make_app()
    async with app.run_test(size=size) as pilot:
        await pilot.press(digit)
        await settle(pilot)
        rows = [" ".join(line.text.split()) for line in key_lines(app.screen, size[0] - 5)]
        assert not any("Focus" in row for row in rows)
        moving = rows[rows.index("MOVING") + 1 : rows.index("EVERYWHERE") - 1]
        following, before = (
            ("j tab down right", "k up left shift+tab") if digit == "1" else ("tab", "shift+tab")
        )
        assert f"{following} next panel" in moving and f"{before} panel before" in moving
        if digit != "1":
            assert "j down next row" in moving and "G end last row" in moving


async def test_help_is_drawn_few_times_and_nothing_below_it(
    make_app: Callable[..., PdqApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        live = app.screen
        drawn: list[str] = []
        below: list[str] = []
        partly, beneath = Compositor.render_partial_update, LiveScreen.query_one

        def part(self: Compositor) -> object:
            update = partly(self)
            if update is not None:
                drawn.append("part")
            return update

        monkeypatch.setattr(Compositor, "render_partial_update", part)
        monkeypatch.setattr(BackgroundScreen, "__init__", lambda *a: below.append("tinted"))
        await pilot.press("question_mark")
        await settle(pilot)
        assert isinstance(app.screen, HelpScreen)
        assert below == []
        assert len(drawn) <= 2  # the rest of the box, and the focused list's frame; it was seven
        monkeypatch.setattr(LiveScreen, "query_one", lambda *a: below.append("drawn"))
        assert isinstance(live, LiveScreen)
        live.redraw()
        monkeypatch.setattr(LiveScreen, "query_one", beneath)
        assert below == []
