"""Reports as files: md, json, csv, parquet, each whole or not at all, in UTF-8 whatever the locale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from pdq_tui.errors import PdqError, UsageError
from pdq_tui.report import flat, tables
from pdq_tui.report.tables import Source
from pdq_tui.store import atomic


class Reporter(Protocol):
    """One file format. ``suffix`` without the dot; ``render`` gives the file's bytes."""

    @property
    def suffix(self) -> str: ...

    def render(self, source: Source) -> bytes: ...


class _Bytes(msgspec.Struct, frozen=True):
    suffix: str
    make: Callable[[Source], bytes]

    def render(self, source: Source) -> bytes:
        return self.make(source)


REPORTERS: Final[dict[str, Reporter]] = {
    "md": _Bytes("md", lambda s: tables.markdown(tables.page(s)).encode("utf-8", "replace")),
    "json": _Bytes("json", tables.to_json),
    "csv": _Bytes("csv", lambda s: flat.to_csv(flat.rows(s)).encode("utf-8", "replace")),
    "parquet": _Bytes("parquet", lambda s: flat.to_parquet(flat.rows(s))),
}


def write(
    source: Source, formats: Sequence[str], directory: Path, force: bool = False, *, stem: str = "report"
) -> list[Path]:
    """Write ``<directory>/<stem>.<format>`` for each format and return the paths.

    All formats are rendered and checked for existing files before the first is written. Raises UsageError for an
    unknown format, PdqError where a file exists (unless ``force``) or cannot be written; what was written before
    stays, the file that failed does not.
    """
    unknown = [f for f in formats if f not in REPORTERS]
    if unknown or not formats:
        raise UsageError(
            f"{', '.join(unknown) or 'nothing'} is not a format", f"legal: {', '.join(REPORTERS)}"
        )
    chosen = {directory / f"{stem}.{REPORTERS[f].suffix}": REPORTERS[f] for f in formats}
    there = [str(p) for p in chosen if p.is_file()]
    if there and not force:
        raise PdqError(
            f"{', '.join(there)} already there", "use --force to replace, or --dir for another place"
        )
    rendered = {path: reporter.render(source) for path, reporter in chosen.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise atomic.failed(directory, error) from error
    for path, data in rendered.items():
        atomic.write_file(path, data, force=force)
    return list(rendered)
