"""``config show`` and ``config init``."""

from __future__ import annotations

from typing import Annotated

import typer

from pdq_tui import config, locations
from pdq_tui.commands.common import STATE, emit, say, settings
from pdq_tui.errors import PdqError, UsageError

app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Show the merged settings, or write a settings file."
)


@app.command(help="Print the merged settings as TOML, each value with its unit and where it came from.")
def show() -> None:
    loaded = settings()
    for path in loaded.files:
        say(f"read {path}", level=1)
    emit(config.show(loaded))


@app.command(
    help="Write a settings file in which everything is explained and nothing is set; prints its path."
)
def init(
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    path = STATE.config or locations.config_file()
    if path.exists() and not force:
        raise UsageError(f"{path} is there already", "--force replaces it")
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(config.template(), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise PdqError(f"{path} cannot be written: {error.strerror}") from error
    emit(str(path))
