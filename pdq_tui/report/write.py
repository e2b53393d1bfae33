"""Reports as files: md, json, csv, parquet, each whole or not at all, in UTF-8 whatever the locale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from pdq_tui.errors import PdqError, UsageError
from pdq_tui.report import flat, tables
from pdq_tui.report.tables import Source
from pdq_tui.store import atomic
from pdq_tui.store.compare import Comparison


class File(NamedTuple):
    """``tail``: what its name has behind the stem. ``spare``: written only over a file of that name."""

    tail: str
    data: bytes
    spare: bool = False


class AlreadyThereError(PdqError):
    """``names``: of the files that would have been replaced."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(
            f"{', '.join(map(str, paths))} already there",
            "use --force to replace, or --dir for another place",
        )
        self.names = [path.name for path in paths]


def _text(tail: str, render: Callable[[Source], bytes]) -> Callable[[Source], list[File]]:
    return lambda source: [File(tail, render(source))]


def _flat(suffix: str, render: Callable[[flat.Flat], bytes]) -> Callable[[Source], list[File]]:
    """A run's ratios have columns of their own, so they are a table of their own."""

    def files(source: Source) -> list[File]:
        found = [File(f".{suffix}", render(flat.rows(source)))]
        if not isinstance(source, Comparison):
            ratios = flat.ratios(source)
            found.append(File(f"-ratios.{suffix}", render(ratios), spare=not ratios.rows))
        return found

    return files


#: The files of each format.
REPORTERS: Final[dict[str, Callable[[Source], list[File]]]] = {
    "md": _text(".md", lambda s: tables.markdown(tables.page(s)).encode("utf-8", "replace")),
    "json": _text(".json", tables.to_json),
    "csv": _flat("csv", lambda f: flat.to_csv(f).encode("utf-8", "replace")),
    "parquet": _flat("parquet", flat.to_parquet),
}


def write(
    source: Source, formats: Sequence[str], directory: Path, force: bool = False, *, stem: str = "report"
) -> list[Path]:
    """Write ``<directory>/<stem>.<format>`` for each format and return the paths; for csv and parquet of a run also
    ``<stem>-ratios.<format>`` where it has ratios, or where such a file is there: it would stay beside figures that
    it is not about.

    All formats are rendered and checked for existing files before the first is written. Raises UsageError for an
    unknown format, AlreadyThereError where a file exists (unless ``force``), PdqError where one cannot be written;
    what was written before stays, the file that failed does not.
    """
    unknown = [f for f in formats if f not in REPORTERS]
    if unknown or not formats:
        raise UsageError(
            f"{', '.join(unknown) or 'nothing'} is not a format", f"legal: {', '.join(REPORTERS)}"
        )
    rendered: dict[Path, bytes] = {}
    for tail, data, spare in (file for f in formats for file in REPORTERS[f](source)):
        path = directory / f"{stem}{tail}"
        if path.is_file() or not spare:
            rendered[path] = data
    there = [path for path in rendered if path.is_file()]
    if there and not force:
        raise AlreadyThereError(there)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise atomic.failed(directory, error) from error
    for path, data in rendered.items():
        atomic.write_file(path, data, force=force)
    return list(rendered)
