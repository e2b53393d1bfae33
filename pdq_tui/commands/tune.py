"""``tune``: which kernel is fastest here, for this model's layers; the winners go to the user's kernel tables."""

from __future__ import annotations

import json
import signal
from typing import Annotated, Any

import msgspec
import typer

from pdq_tui.commands import flags
from pdq_tui.commands.common import ascii_only, columns, emit, say, settings
from pdq_tui.commands.progress import Printer
from pdq_tui.commands.run import fetch_demo
from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import policies
from pdq_tui.core.formats import of_label
from pdq_tui.core.policy import STAGES
from pdq_tui.core.tuned import MANY, ROWS
from pdq_tui.errors import INTERRUPTED, OK, PdqError, UnfitError, UsageError
from pdq_tui.host.tuning import Tuning, keep, measure_kernels

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Measure the kernel candidates on this machine for MODEL's layers: time, and error against float64. The fastest of "
    "each layer shape, format and row count come first from then on (engine.tuned). Ctrl-C keeps what was measured."
)
def tune(
    model: flags.Model,
    formats: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT,...",
            help="Weight formats, e.g. int8,w8a8,int4-g64,bf16. [those of the shipped policies]",
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            "--rows",
            metavar="N,...",
            help=f"Row counts (tokens x batch in one call). [{','.join(map(str, ROWS))}]",
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            metavar="SECONDS",
            min=0,
            callback=flags.finite,
            help="Time for one format, shape and row count, in seconds.",
        ),
    ] = 0.4,
    as_json: Annotated[
        bool, typer.Option("--json", help="Everything that was measured, as one JSON object.")
    ] = False,
    device: flags.Device = None,
    gpu: flags.Gpu = None,
    threads: flags.Threads = None,
    trust_remote_code: flags.Trust = False,
    revision: flags.Revision = None,
) -> None:
    labels = chosen_formats(formats)
    command = p.Tune(formats=labels, rows=chosen_rows(rows), seconds=seconds)
    s = settings(flags.engine_flags(device, gpu, threads, None)).settings
    flags.refuse_several(s, "tune")
    load = flags.load_of(s, model, trust_remote_code=trust_remote_code, revision=revision)
    load.tuned = "off"  # measured is the shipped order's rivals, whatever was found before
    printer = Printer(every_s=5.0)
    fetch_demo(load, printer)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found = measure_kernels(load, command, on_event=printer)
    finally:
        printer.close()
    if found.started is not None:
        for label, why in found.started.refused.items():
            say(f"{label} is left out: {why}")
    if found.started is None or not found.timed:
        if found.interrupted:
            raise PdqError("interrupted before anything was measured", exit_code=INTERRUPTED)
        raise UnfitError("no format that was asked for runs here", "pdq-tui doctor lists what runs here")
    path, told = keep(found)
    if as_json:
        emit(json.dumps(document(found, model, str(path)), indent=1))
    else:
        text = table(found)
        emit(text.replace("×", "x") if ascii_only() else text)
    cells = f"{len(found.timed)} of {found.started.cells}" if not found.complete else f"{len(found.timed)}"
    say(f"{cells} measurements; winners in {path}{f'; {told}' if told else ''}")
    if s.engine.tuned == "off":
        say("engine.tuned is off: they are not used until it is auto")
    raise typer.Exit(INTERRUPTED if found.interrupted else OK)


def chosen_formats(words: str | None, flag: str = "--format") -> list[str]:
    """Labels in the order given, or those of all shipped policies. Raises UsageError."""
    if words is not None:
        labels = [of_label(word.strip()).label for word in words.split(",") if word.strip()]
        if not labels:
            raise UsageError(f"{flag}: no format is named", f"e.g. {flag} int8,w8a8,int4")
        return list(dict.fromkeys(labels))
    found: dict[str, None] = {}
    for entry in policies().values():
        if entry.policy is not None and entry.origin == "shipped":
            found.update((entry.policy.stage(stage).format.label, None) for stage in STAGES)
    return list(found)


def chosen_rows(words: str | None) -> list[int]:
    """Raises UsageError."""
    if words is None:
        return list(ROWS)
    counts = []
    for word in words.split(","):
        if not word.strip().isdecimal() or not 1 <= int(word) < MANY:
            raise UsageError(f"--rows: {word!r} is not a legal value", "row counts such as 1,16,512")
        counts.append(int(word))
    return sorted(set(counts))


def table(found: Tuning) -> str:
    """A line a measurement: the fastest of all, and what it gains over the shipped choice."""
    lines = []
    notes: dict[str, None] = {}
    for cell in found.timed:
        fair = [t for t in cell.times if t.best and t.us is not None]
        best = min(fair, key=lambda t: t.us or 0.0, default=None)
        shipped = next((t for t in cell.times if t.shipped and t.us is not None), None)
        lines.append(
            (
                cell.format,
                f"{cell.N} × {cell.K}",
                str(cell.layers),
                _span(cell),
                best.kernel if best else "none",
                _time(best.us) if best else "n/a",
                f"{_time(best.us_low)} to {_time(best.us_high)}" if best else "n/a",
                _against(best, shipped),
                f"{best.error:.2g}" if best and best.error is not None else "n/a",
            )
        )
        for t in cell.times:
            if t.excluded:
                notes[f"{cell.format}: {t.kernel} may not win at {_span(cell)} rows: {t.excluded}"] = None
    head = (
        "format",
        "out × in",
        "layers",
        "rows",
        "fastest",
        "time",
        "quartiles",
        "over the shipped choice",
        "error",
    )
    return columns(lines, head) + "".join(f"{note}\n" for note in notes)


def _span(cell: p.KernelsTimed) -> str:
    if cell.rows_low == cell.rows_high:
        return str(cell.rows)
    return (
        f"{cell.rows} ({cell.rows_low} on)"
        if cell.rows_high == MANY
        else f"{cell.rows} ({cell.rows_low}-{cell.rows_high})"
    )


def _time(us: float | None) -> str:
    if us is None:
        return "n/a"
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


def _against(best: p.CandidateTime | None, shipped: p.CandidateTime | None) -> str:
    if best is None or shipped is None or shipped.us is None or best.us is None:
        return "n/a"
    if best.kernel == shipped.kernel:
        return "the same"
    return f"{shipped.us / best.us:.2f} times as fast as {shipped.kernel}"


def document(found: Tuning, model: str, path: str) -> dict[str, Any]:
    started = found.started
    assert started is not None
    return {
        "schema": 1,
        "kind": "pdq-tui tune",
        "model": model,
        "device": started.device,
        "stamp": started.stamp,
        "file": path,
        "complete": found.complete,
        "refused": started.refused,
        "cells": [
            {k: v for k, v in msgspec.to_builtins(cell).items() if k not in ("v", "t_ns", "type")}
            for cell in found.timed
        ],
    }
