"""How stored snapshots are named on the command line, and where they are looked for."""

from __future__ import annotations

from typing import Annotated, Final

import typer

NAMING: Final = "RUN/NNN, a unique prefix of one, @last, @last-1 (the one before), or a path."

One = Annotated[str, typer.Argument(metavar="SNAPSHOT", help=NAMING)]
Several = Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help=NAMING)]
ReferenceFirst = Annotated[
    list[str], typer.Argument(metavar="REF CAND...", help=f"Snapshots, the reference first: {NAMING}")
]

_WHERE: Final = "Where the runs are, in place of the state directory."
Dir = Annotated[str | None, typer.Option("--dir", metavar="DIR", help=_WHERE)]
#: For a command whose --dir is where it writes to.
Runs = Annotated[str | None, typer.Option("--runs", metavar="DIR", help=_WHERE)]
