"""``report``: one snapshot, or several compared, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdq_tui.commands.common import emit, runs_dir, settings
from pdq_tui.commands.words import Runs, Several

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Write a report of a snapshot, or of several compared with the first; prints the files' paths."
)
def report(
    words: Several,
    formats: Annotated[
        str,
        typer.Option("-f", "--format", metavar="LIST", help="Any of md, json, csv, parquet, with commas."),
    ] = "md,json",
    out: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where the files go: report.md, report.json, …")
    ] = Path(),
    force: Annotated[
        bool, typer.Option("--force", help="Replace files; compare what differs in model or workload.")
    ] = False,
    runs: Runs = None,
) -> None:
    loaded = settings({"run.dir": ("--runs", runs)})
    from pdq_tui.commands.stored import snapshot_path
    from pdq_tui.report.write import write
    from pdq_tui.store.compare import compare
    from pdq_tui.store.snapshot import load

    found = [load(snapshot_path(word, runs_dir(loaded))) for word in words]
    source = (
        found[0].document()
        if len(found) == 1
        else compare(found, loaded.settings.run.min_effect, force=force)
    )
    chosen = [word.strip() for word in formats.split(",") if word.strip()]
    for path in write(source, chosen, out.expanduser(), force):
        emit(str(path))
