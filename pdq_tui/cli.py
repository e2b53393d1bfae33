"""The command line's front door: which command is meant. Each command lives in ``pdq_tui.commands`` and is imported
only when it is asked for, so that the app's first screen waits for nothing it does not need."""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib
import io
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import typer.main
from typer.core import TyperGroup

from pdq_tui import __version__
from pdq_tui.commands import COMMANDS
from pdq_tui.commands.common import STATE, tell
from pdq_tui.errors import PdqError, UsageError

_VALUED: Final = ("--config",)
_PLAIN: Final = ("-v", "-vv", "-q", "--verbose", "--quiet")
_ENDING: Final = ("--version", "-h", "--help", "--install-completion", "--show-completion")


def with_app(args: list[str]) -> list[str]:
    """The same words with ``app`` before the first that is neither a common option nor a command: it is a model."""
    at = 0
    while at < len(args):
        word = args[at]
        if word in _VALUED:
            at += 2
        elif word in _PLAIN or word.startswith("--config="):
            at += 1
        elif word in _ENDING or word in COMMANDS:
            return args
        else:
            break
    at = min(at, len(args))
    if at < len(args):
        _mistyped(args[at])
    return [*args[:at], "app", *args[at:]]


def _mistyped(word: str) -> None:
    """Raises UsageError where a first word is nearly a command, and nothing of that name is here to be opened."""
    near = difflib.get_close_matches(word, COMMANDS, 1, 0.75)
    if near and "/" not in word and not Path(word).exists():
        raise UsageError(
            f"no command is called {word!r}",
            f"did you mean `pdq-tui {near[0]}`? A hub model of that name is opened by `pdq-tui app {word}`",
        )


class Commands(TyperGroup):
    """A group whose commands are imported on demand and whose default command takes an unknown first word."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            if cmd_name == "app":
                # What a start makes stays: looking for garbage in it again and again is a sixth of the time to the
                # first frame. The app turns it on again after that frame.
                gc.disable()
            module = importlib.import_module(f"pdq_tui.commands.{COMMANDS[cmd_name]}")
            command = typer.main.get_command(module.app)
            command.name = cmd_name
            self._give_common_options(command)
            self.commands[cmd_name] = command
        return self.commands[cmd_name]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # A shell that completes has no first word yet, or an unfinished one.
        return super().parse_args(ctx, args if ctx.resilient_parsing else with_app(args))

    def _give_common_options(self, command: Any) -> None:
        """-v, -q and --config are understood after the command as well."""
        for sub in getattr(command, "commands", {}).values():
            self._give_common_options(sub)
        if not hasattr(command, "commands"):
            command.params += [p for p in self.params if p.name in ("verbose", "quiet", "config")]


def _show_version(value: bool) -> None:
    if value:
        print(f"pdq-tui {__version__}")
        raise typer.Exit


def _louder(value: int) -> None:
    if value:
        STATE.verbosity = value


def _quieter(value: bool) -> None:
    if value:
        STATE.verbosity = -1


def _config(value: Path | None) -> None:
    if value is not None:
        STATE.config = value.expanduser()


cli = typer.Typer(
    cls=Commands,
    name="pdq-tui",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="[MODEL | COMMAND] ...",
)


@cli.callback(
    epilog="MODEL is demo, a directory, or a hub id. A directory that is called like a command is written ./run. "
    "Exit codes: 0 ok, 1 run failed, 2 usage or configuration, 3 gate failed (--fail-on), 4 environment unfit, "
    "130 interrupted, results kept."
)
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, expose_value=False, help="Print the version."
        ),
    ] = False,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose",
            "-v",
            count=True,
            callback=_louder,
            expose_value=False,
            show_default=False,
            help="Say more on stderr.",
        ),
    ] = 0,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", callback=_quieter, expose_value=False, help="Say nothing but errors on stderr."
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            callback=_config,
            expose_value=False,
            help="Settings file in place of the user's.",
        ),
    ] = None,
) -> None:
    """Toggle precision in prefill and in decode, each on its own, and see what that does to speed and memory.

    `pdq-tui [MODEL]` opens the app (see `pdq-tui app -h`); everything else is a command.
    """


def main() -> None:
    """The console script. Ends the process with the exit code."""
    _lenient_streams()
    try:
        cli()
    except PdqError as error:
        tell(error)
        sys.exit(error.exit_code)


def _lenient_streams() -> None:
    """A character that the terminal's encoding lacks must not end a measurement's report."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, io.UnsupportedOperation):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
