"""``note``: work that was done by hand, logged with the evaluation that it belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdq_tui.commands.common import runs_dir, say, settings
from pdq_tui.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Log manual work (deploying, tuning, rolling back) with an evaluation; its report totals it."
)
def note(
    op: Annotated[str, typer.Option("--op", metavar="TEXT", help="What was done.")],
    minutes: Annotated[float, typer.Option("--minutes", metavar="M", help="How long it took, in minutes.")],
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="The evaluation's directory. [the last one]"),
    ] = None,
) -> None:
    from pdq_tui.judge import diary

    place = directory.expanduser() if directory else _last(runs_dir(settings({})).parent / "evaluations")
    entry = diary.add(place, op, minutes)
    total = sum(e.minutes for e in diary.read(place))
    say(f"logged in {place}: {entry.op}, {entry.minutes:g} min; {total:g} min in all")


def _last(parent: Path) -> Path:
    found = sorted(
        (p for p in parent.glob("*") if (p / "spec.json").exists()), key=lambda p: p.stat().st_mtime
    )
    if not found:
        raise UsageError(f"there is no evaluation in {parent}", "--dir names one that lies elsewhere")
    return found[-1]
