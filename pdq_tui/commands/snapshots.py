"""``snapshots list/show/rm``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import msgspec
import typer

from pdq_tui.commands.common import ascii_only, columns, emit, printable, runs_dir, say, settings
from pdq_tui.commands.words import Dir, One, Several
from pdq_tui.errors import PdqError, UsageError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="List, show, make and delete snapshots.",
)

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@app.command("list", help="All snapshots, oldest first; damaged ones are listed with what is wrong.")
def list_(as_json: AsJson = False, directory: Dir = None) -> None:
    from pdq_tui.store.listing import list_snapshots, runs_without

    runs = runs_dir(settings({"run.dir": ("--dir", directory)}))
    found = list_snapshots(runs)
    if as_json:
        emit(json.dumps([msgspec.to_builtins(s) for s in found], indent=1))
        return
    without = runs_without(runs)
    if without:
        say(
            f"{len(without)} run{'s' if len(without) > 1 else ''} without a snapshot, the last {without[-1]}: "
            f"`pdq-tui snapshots make RUN` makes them from its journal"
        )
    if not found:
        say(f"there is no snapshot in {runs}; `pdq-tui run` makes one an arm, s in the app makes one")
        return
    rows = [
        (
            s.id,
            s.created,
            s.arm,
            s.policy,
            s.model,
            "" if s.requests is None else str(s.requests),
            f"! {s.error}" if s.error else s.note,
        )
        for s in found
    ]
    emit(columns(rows, ("snapshot", "made (UTC)", "arm", "policy", "model", "requests", "note")))


@app.command(help="Print one snapshot's figures.")
def show(word: One, as_json: AsJson = False, directory: Dir = None) -> None:
    from pdq_tui.commands.stored import snapshot_path
    from pdq_tui.report.tables import render
    from pdq_tui.store.snapshot import load

    runs = runs_dir(settings({"run.dir": ("--dir", directory)}))
    snapshot = load(snapshot_path(word, runs))
    say(str(snapshot.path), level=1)
    if as_json:
        emit(render(snapshot.document(), "json"))
    else:
        emit(render(snapshot.document(), "table", ascii_only=ascii_only()))


@app.command(help="Make a snapshot of each arm of a run from its journal, as after an app that was killed.")
def make(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id, its last four characters, or its directory.")
    ],
    arm: Annotated[
        list[str] | None,
        typer.Option("--arm", metavar="ARM", help="Only this arm; repeat it. [all measured]"),
    ] = None,
    note: Annotated[str, typer.Option("--name", metavar="TEXT", help="A note that is kept with them.")] = "",
    directory: Dir = None,
) -> None:
    from pdq_tui.core.analysis import collect, timed
    from pdq_tui.host.journal import read_events
    from pdq_tui.store.listing import resolve_run
    from pdq_tui.store.snapshot import save

    loaded = settings({"run.dir": ("--dir", directory)})
    place = resolve_run(run, runs_dir(loaded))
    try:
        events = list(read_events(place / "events.jsonl"))
    except OSError as error:
        raise PdqError(f"{place / 'events.jsonl'} cannot be read: {error.strerror or error}") from error
    facts = collect(events)
    labels = facts.labels()
    wanted = arm or [a for a in labels if timed(facts.of(a))]
    if not wanted:
        raise PdqError(f"nothing was measured in {place}", f"its log: {place / 'stderr.log'}")
    effect = loaded.settings.run.min_effect
    for label in wanted:
        path = save(place, events, label, note, reference=labels[0], min_effect=effect)
        emit(f"{place.name}/{path.name}  {label}  {path}")


@app.command(help="Delete snapshots. Asks first; without a terminal it needs --yes.")
def rm(
    words: Several,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    directory: Dir = None,
) -> None:
    from pdq_tui.commands.stored import snapshot_path
    from pdq_tui.store.snapshot import remove

    runs = runs_dir(settings({"run.dir": ("--dir", directory)}))
    paths = list(dict.fromkeys(snapshot_path(word, runs) for word in words))
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("nothing was deleted: there is no terminal to ask on", "say --yes")
        for path in paths:
            say(str(path), level=-1)
        sys.stderr.write(f"Delete {len(paths)} snapshot{'s' if len(paths) > 1 else ''}? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            say("nothing was deleted")
            raise typer.Exit(1)
    for path in paths:
        remove(path)
        say(f"deleted {printable(str(path))}")
