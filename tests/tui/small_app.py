"""A small app around one screen, on the fake session, with what the real app gives to its screens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_views import FakeSession, make_view
from textual.app import App
from textual.pilot import Pilot
from textual.screen import Screen

from pdq_tui.tui import theme

#: Texts that have broken other apps: markup, broken markup, control, wide and broken characters.
NASTY = ("[/", "x[/x]y", "[1] ok [/]", "[red]r[/red]", "a\x1b[31mb", "日本語[/]", "\ud800", "a\nb\tc\r")
#: From nothing to a wall.
SIZES = ((1, 1), (2, 2), (10, 3), (20, 5), (59, 19), (79, 24), (300, 100))


class SmallApp(App[None]):
    ENABLE_COMMAND_PALETTE = False
    min_effect = 0.01
    weight_budget_bytes: int | None = None
    readonly = False

    def __init__(
        self, screen: Callable[[], Screen[Any]], runs_dir: Path, *, plain: bool = False, **picture: Any
    ) -> None:
        super().__init__()
        self.make, self.runs_dir, self.ascii = screen, runs_dir, plain
        run_id = "20261202T063000Z-0f3a"
        self.session = FakeSession(make_view(run_id=run_id, run_dir=str(runs_dir / run_id), **picture))

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return theme.series_defaults(self.current_theme)

    def on_mount(self) -> None:
        self.push_screen(self.make())


async def settle(pilot: Pilot[Any]) -> None:
    """Until threads have ended and what they reported is drawn."""
    await pilot.pause()
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


def text_of(app: App[Any]) -> str:
    """What the terminal shows, one line a row."""
    return "\n".join("".join(s.text for s in strip) for strip in app.screen._compositor.render_strips())


async def at_every_size(screen: Callable[[], Screen[Any]], runs_dir: Path, back: str) -> None:
    """Start at each size, then go through all sizes in one app; at 80x24 ``back`` must be on the screen again."""
    for size in SIZES:
        app = SmallApp(screen, runs_dir)
        async with app.run_test(size=size) as pilot:
            await settle(pilot)
            text_of(app)
    app = SmallApp(screen, runs_dir)
    async with app.run_test(size=(80, 24)) as pilot:
        for size in SIZES:
            await pilot.resize_terminal(*size)
            await pilot.pause()
            for key in ("j", "G", "k", "g", "pagedown"):
                await pilot.press(key)
        await pilot.resize_terminal(80, 24)
        await settle(pilot)
        assert back in text_of(app)
