"""``replay``: the app on a recorded journal."""

from __future__ import annotations

from typing import Annotated

import typer

from pdq_tui.commands.app import need_terminal
from pdq_tui.commands.common import runs_dir, settings
from pdq_tui.commands.words import Runs
from pdq_tui.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help="Open the app on a run that was recorded: step, seek and play it in the same screens.")
def replay(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run's id, a unique prefix, its last four characters, or its directory."
        ),
    ],
    speed: Annotated[
        float, typer.Option("--speed", metavar="X", help="How many times as fast as it was. 0.25 to 64.")
    ] = 1.0,
    marker: Annotated[
        str | None,
        typer.Option("--marker", metavar="auto|braille|block|ascii", help="What charts are drawn with."),
    ] = None,
    ascii_: Annotated[bool, typer.Option("--ascii", help="Draw everything in ASCII.")] = False,
    theme: Annotated[
        str | None, typer.Option("--theme", metavar="NAME", help="pdq-dark, pdq-light, …")
    ] = None,
    runs: Runs = None,
) -> None:
    loaded = settings(
        {
            "run.dir": ("--runs", runs),
            "screen.marker": ("--marker", marker),
            "screen.ascii": ("--ascii", ascii_ or None),
            "screen.theme": ("--theme", theme),
        }
    )
    s = loaded.settings
    from pdq_tui.host.replay import SPEEDS, ReplaySession

    if not SPEEDS[0] <= speed <= SPEEDS[-1]:
        raise UsageError(
            f"--speed: {speed:g} is not a legal value", f"legal: {SPEEDS[0]:g} to {SPEEDS[-1]:g}"
        )
    from pdq_tui.store.listing import resolve_run

    folder = runs_dir(loaded)
    place = resolve_run(run, folder)
    need_terminal("MODEL")
    from pdq_tui.tui.app import Options
    from pdq_tui.tui.replay import ReplayApp

    options = Options(
        runs_dir=folder,
        fps=None if s.screen.fps == "auto" else float(s.screen.fps),
        marker=s.screen.marker,
        ascii=True if s.screen.ascii else None,
        theme=None if s.screen.theme == "auto" else s.screen.theme,
        readonly=True,
        min_effect=s.run.min_effect,
        keys=dict(s.keys),
    )
    session = ReplaySession(place, speed=speed, min_effect=s.run.min_effect)
    try:
        code = ReplayApp(session, options).run(mouse=s.screen.mouse)
    finally:
        session.close()
    raise typer.Exit(1 if code is None else code)
