"""``compare``: snapshots side by side, the reference first."""

from __future__ import annotations

from typing import Annotated

import typer

from pdq_tui.commands import flags
from pdq_tui.commands.common import ascii_only, emit, one_of, runs_dir, say, settings
from pdq_tui.commands.gate import JUDGED, watched
from pdq_tui.commands.words import Dir, ReferenceFirst
from pdq_tui.errors import GATE, OK, UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)

FORMATS = ("table", "md", "json", "csv")


@app.command(help="Compare snapshots with the first: difference, 95 % interval, judgement.")
def compare(
    words: ReferenceFirst,
    format_: Annotated[
        str, typer.Option("--format", metavar="|".join(FORMATS), help="What is printed.")
    ] = "table",
    diff_only: Annotated[
        bool, typer.Option("--diff-only", help="Only what is better or worse (table and md).")
    ] = False,
    min_effect: flags.MinEffect = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="worse[:METRIC,...]",
            help="Exit 3 if a timed metric (e2e_ms, ttft_ms, tpot_ms, rates) is judged worse; with names only these. "
            "Memory counts only by name: worse:stored_bytes. Unsure never fails, and is said.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also when model or workload differ: side by side, without a judgement."
        ),
    ] = False,
    directory: Dir = None,
) -> None:
    gated = watched(fail_on, JUDGED)
    one_of("--format", format_, FORMATS)
    if len(words) < 2:
        raise UsageError(
            "a comparison needs a reference and at least one candidate", "`pdq-tui snapshots list`"
        )
    loaded = settings(
        {"run.min_effect": ("--min-effect", flags.share_of(min_effect)), "run.dir": ("--dir", directory)}
    )
    from pdq_tui.commands.stored import snapshot_path
    from pdq_tui.report.tables import render
    from pdq_tui.store.compare import compare as compare_snapshots
    from pdq_tui.store.snapshot import load

    runs = runs_dir(loaded)
    found = [load(snapshot_path(word, runs)) for word in words]
    comparison = compare_snapshots(found, loaded.settings.run.min_effect, force=force)
    emit(render(comparison, format_, diff_only=diff_only, ascii_only=format_ == "table" and ascii_only()))
    rows = [row for row in comparison.rows if row.metric in gated]
    labels = {side.id: side.label for side in comparison.candidates}
    for row in rows:
        if row.judgement == "worse":
            say(f"worse: {labels[row.candidate]} ({row.candidate}) in {row.name}")
        elif row.judgement == "unsure":
            say(f"unsure: {labels[row.candidate]} ({row.candidate}) in {row.name}: {row.reason}")
    raise typer.Exit(GATE if any(row.judgement == "worse" for row in rows) else OK)
