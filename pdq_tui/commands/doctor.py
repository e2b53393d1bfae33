"""``doctor``: can this machine do it, and what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Annotated

import msgspec
import typer

from pdq_tui.commands.common import emit, printable, settings
from pdq_tui.doctor import Check, Engine
from pdq_tui.errors import OK, UNFIT, PdqError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Versions, device, sensors, formats and kernels here, terminal, paths: ok, warn or fail. Exit 4 if unfit."
)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    device: Annotated[
        str, typer.Option("--device", metavar="auto|cuda|cpu", help="The device that is meant.")
    ] = "auto",
) -> None:
    from pdq_tui.doctor import examine

    found = []
    for check in chain(_settings(), examine(device, _engine())):
        found.append(check)
        if not as_json:
            advice = f"\n{'':21}{printable(check.advice)}" if check.advice else ""
            emit(f"{check.status:<5} {check.group:<10}     {printable(check.text)}{advice}")
    fit = all(check.status != "fail" for check in found)
    if as_json:
        emit(
            json.dumps({"schema": 1, "fit": fit, "checks": [msgspec.to_builtins(c) for c in found]}, indent=1)
        )
    raise typer.Exit(OK if fit else UNFIT)


def _settings() -> Iterator[Check]:
    """Damaged settings end every other command."""
    try:
        settings()
    except PdqError as error:
        yield Check("settings", "fail", error.message, error.hint)


def _engine() -> Engine:
    try:
        engine = settings().settings.engine
    except PdqError:
        return Engine()
    return Engine(engine.threads, engine.kernels, engine.tuned)
