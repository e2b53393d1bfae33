"""``report``: a snapshot, several compared, a run, an evaluation or a folder of runs, as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdq_tui.commands.common import emit, runs_dir, settings
from pdq_tui.commands.words import Runs, Several
from pdq_tui.errors import PdqError

if TYPE_CHECKING:  # polars comes with it
    from pdq_tui.report.write import Reported
    from pdq_tui.store.listing import Listed
    from pdq_tui.store.trend import Trend

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Write a report of a snapshot, of several compared with the first, of a whole run, of an evaluation's directory, "
    "or of a folder of runs (what changed over time and versions); prints the files' paths."
)
def report(
    words: Several,
    formats: Annotated[
        str,
        typer.Option(
            "-f", "--format", metavar="LIST", help="Any of md, html, json, csv, parquet, with commas."
        ),
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
    from pdq_tui.report.write import write

    chosen = [word.strip() for word in formats.split(",") if word.strip()]
    reported = _reported(words, runs_dir(loaded), loaded.settings.run.min_effect, force=force)
    for path in write(reported, chosen, out.expanduser(), force):
        emit(str(path))


def _reported(words: list[str], runs: Path, min_effect: float, *, force: bool) -> Reported:
    from pdq_tui.commands.stored import run_path, snapshot_path
    from pdq_tui.judge.evaluation import SPEC
    from pdq_tui.report import samples
    from pdq_tui.report.evaluated import read
    from pdq_tui.report.write import Reported
    from pdq_tui.store.compare import compare
    from pdq_tui.store.listing import list_snapshots
    from pdq_tui.store.snapshot import MANIFEST, load

    if len(words) == 1:
        place = Path(words[0]).expanduser()
        if (place / SPEC).is_file():
            return Reported(read(place))
        if place.is_dir() and not (place / MANIFEST).is_file() and (there := list_snapshots(place)):
            return Reported(_over_time(there, min_effect))
        run = run_path(words[0], runs)
        if run is not None:
            return _whole_run(run, min_effect)
    found = [load(snapshot_path(word, runs)) for word in words]
    if len(found) == 1:
        return Reported(found[0].document(), samples.of_snapshot(found[0]))
    compared = compare(found, min_effect, force=force)
    return Reported(compared, samples.of_snapshots(compared, found))


def _over_time(listed: list[Listed], min_effect: float) -> Trend:
    """All snapshots of a folder of runs. What cannot be read is named and left out."""
    from pdq_tui.store.snapshot import load
    from pdq_tui.store.trend import trend

    found, skipped = [], [f"{s.id}: {s.error}" for s in listed if s.error]
    for s in listed:
        if s.error is None:
            try:
                found.append(load(Path(s.path)))
            except PdqError as error:
                skipped.append(f"{s.id}: {error.message}")
    return trend(found, min_effect, skipped)


def _whole_run(directory: Path, min_effect: float) -> Reported:
    """Everything that was measured in one run, from its journal. Raises PdqError where that is nothing."""
    from pdq_tui.core.analysis import run_document
    from pdq_tui.host.journal import read_events
    from pdq_tui.report import samples
    from pdq_tui.report.write import Reported
    from pdq_tui.store.listing import JOURNAL
    from pdq_tui.store.snapshot import read_meta

    try:
        events = list(read_events(directory / JOURNAL))
    except OSError as error:
        raise PdqError(f"{directory / JOURNAL} cannot be read: {error.strerror or error}") from error
    document = run_document(read_meta(directory), events, min_effect=min_effect)
    if not document["arms"]:
        raise PdqError(f"nothing was measured in {directory}")
    labels = [arm["label"] for arm in document["arms"]]
    return Reported(document, samples.of_events(events, directory.name, labels))
