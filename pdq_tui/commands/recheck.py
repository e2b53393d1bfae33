"""``recheck``: a snapshot's own specification on today's versions; exit code 3 where something became worse."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdq_tui.commands import flags
from pdq_tui.commands.common import ascii_only, emit, runs_dir, say, settings
from pdq_tui.commands.gate import TIMED
from pdq_tui.commands.progress import Printer
from pdq_tui.commands.words import One
from pdq_tui.errors import GATE, INTERRUPTED, OK, PdqError, UsageError

if TYPE_CHECKING:
    from pdq_tui.core.policy import Policy
    from pdq_tui.core.protocol import Load, ModelInfo
    from pdq_tui.core.workload import Workload
    from pdq_tui.store.snapshot import Snapshot

app = typer.Typer(add_completion=False, rich_markup_mode=None)

#: What a recheck is there to try: it must not keep its figures from being judged.
ON_TRIAL = ("libraries", "driver", "prefill kernels", "decode kernels", "prefill layers", "decode layers")


@app.command(
    help="Run a snapshot's model, policy and workload again on today's versions. Exit 3 if a time or rate is worse."
)
def recheck(
    word: One,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Where the model lies today. [where it was]"),
    ] = None,
    blocks: flags.Blocks = None,
    min_seconds: flags.MinSeconds = 10.0,
    min_effect: flags.MinEffect = None,
    directory: flags.RunsDir = None,
) -> None:
    loaded = settings(
        {
            "run.blocks": ("--blocks", blocks),
            "run.min_effect": ("--min-effect", flags.share_of(min_effect)),
            "run.dir": ("--dir", directory),
        }
    )
    from pdq_tui.commands.results_kept import keep
    from pdq_tui.commands.run import fetch_demo
    from pdq_tui.commands.stored import snapshot_path
    from pdq_tui.host.measure import measure
    from pdq_tui.host.runs import new_run
    from pdq_tui.report.tables import render
    from pdq_tui.store.compare import compare
    from pdq_tui.store.snapshot import load as load_snapshot

    runs, s = runs_dir(loaded), loaded.settings
    flags.refuse_several(s, "recheck")
    before = load_snapshot(snapshot_path(word, runs))
    policy, workload, info = _spec(before)
    threads = before.part("conditions").get("threads")
    command: Load = flags.load_of(s, model or _model(info))
    command.dtype = info.dtype or None
    command.threads = threads if isinstance(threads, int) else None
    printer = Printer(blocks=s.run.blocks)
    fetch_demo(command, printer)
    where = new_run(runs, sys.argv, seed=workload.seed, extra={"name": f"recheck of {before.id}"})
    say(f"run {where.id}: {policy.name} again, as in {before.id}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = measure(
            command,
            [policy],
            workload,
            run=where,
            blocks=s.run.blocks,
            seed=workload.seed,
            on_event=printer,
            min_seconds=min_seconds,
        )
    finally:
        printer.close()
    kept = keep(
        where, result.events, result.labels, note=f"recheck of {before.id}", min_effect=s.run.min_effect
    )
    kept.tell()
    if result.exit_code == INTERRUPTED:
        say("interrupted: nothing is judged")
        raise typer.Exit(INTERRUPTED)
    if not kept.snapshots:
        raise PdqError("the recheck gave no snapshot to compare with")
    after = load_snapshot(kept.snapshots[0][1])
    found = compare([before, after], s.run.min_effect, on_trial=ON_TRIAL)
    emit(render(found, "table", ascii_only=ascii_only()))
    code = OK
    for check in found.setup:
        if check.what in ON_TRIAL and check.status == "differs":
            say(f"{check.what}: {check.reference} then, {check.value} now")
    for row in found.rows:
        if row.metric in TIMED and row.judgement == "worse":
            say(f"regression: {row.name} is worse")
            code = GATE
        elif row.metric in TIMED and row.judgement == "unsure":
            say(f"unsure: {row.name}: {row.reason}")
    if before.arm.get("text_sha256") != after.arm.get("text_sha256"):
        say("the answers are other ones than then")
    raise typer.Exit(code)


def _spec(snapshot: Snapshot) -> tuple[Policy, Workload, ModelInfo]:
    """What was asked for then, from the journal of its run. Raises PdqError where that is gone."""
    from pdq_tui.core.facts import collect
    from pdq_tui.host.journal import read_events

    journal = snapshot.path.resolve().parent.parent / "events.jsonl"
    try:
        facts = collect(read_events(journal))
    except OSError as error:
        raise PdqError(
            f"{snapshot.id} cannot be run again: the journal of its run cannot be read ({error})",
            "a snapshot keeps figures; what was asked for stands in its run's events.jsonl",
        ) from error
    ready = facts.arms.get(snapshot.label)
    if ready is None or facts.workload is None or facts.model is None:
        raise PdqError(
            f"{journal} does not say what {snapshot.label} was: model, workload or policy is missing"
        )
    return ready.policy, facts.workload.workload, facts.model


def _model(info: ModelInfo) -> str:
    """A path that is still there, else the hub's id; the demo model by its name."""
    if info.id == flags.DEMO:
        return info.id
    if info.path and Path(info.path).exists():
        return info.path
    if not info.id or flags.looks_like_path(info.id):
        raise UsageError(
            f"the model is no longer at {info.path or info.id}", "--model names where it lies today"
        )
    return info.id
