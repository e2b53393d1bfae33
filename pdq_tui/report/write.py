"""Reports as files: md, html, json, csv, parquet, each whole or not at all, in UTF-8 whatever the locale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from pdq_tui.errors import PdqError, UsageError
from pdq_tui.report import flat, tables
from pdq_tui.report.evaluated import Evaluated
from pdq_tui.report.samples import Samples
from pdq_tui.report.tables import Source
from pdq_tui.report.trend import trend_figures
from pdq_tui.store import atomic
from pdq_tui.store.compare import Comparison
from pdq_tui.store.trend import Trend


class File(NamedTuple):
    """``tail``: what its name has behind the stem. ``spare``: written only over a file of that name."""

    tail: str
    data: bytes
    spare: bool = False


class Reported(NamedTuple):
    """``samples``: the requests behind it, for the figures of an HTML report."""

    source: Source
    samples: Sequence[Samples] = ()


class AlreadyThereError(PdqError):
    """``names``: of the files that would have been replaced."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(
            f"{', '.join(map(str, paths))} already there",
            "use --force to replace, or --dir for another place",
        )
        self.names = [path.name for path in paths]


Reporter = Callable[[Reported], list[File]]


def _text(tail: str, render: Callable[[Source], bytes]) -> Reporter:
    return lambda reported: [File(tail, render(reported.source))]


def _flat(suffix: str, render: Callable[[flat.Flat], bytes]) -> Reporter:
    """A run's ratios have columns of their own, so they are a table of their own."""

    def files(reported: Reported) -> list[File]:
        source = tables.flat_source(reported.source)
        found = [File(f".{suffix}", render(flat.rows(source)))]
        if not isinstance(source, Comparison | Trend):
            ratios = flat.ratios(source)
            found.append(File(f"-ratios.{suffix}", render(ratios), spare=not ratios.rows))
        return found

    return files


def _html(reported: Reported) -> list[File]:
    # The charts' library takes longer to import than everything else here, and only this format needs it.
    from pdq_tui.report import evaluation_figures, run_figures
    from pdq_tui.report.html import html

    source, samples = reported
    if isinstance(source, Comparison):
        figures = run_figures.comparison_figures(source, samples)
    elif isinstance(source, Evaluated):
        figures = evaluation_figures.evaluation_figures(source.spec, source.found)
    elif isinstance(source, Trend):
        figures = trend_figures(source)
    else:
        figures = run_figures.document_figures(source, samples)
    return [File(".html", html(tables.page(source), figures).encode("utf-8", "replace"))]


#: The files of each format.
REPORTERS: Final[dict[str, Reporter]] = {
    "md": _text(".md", lambda s: tables.markdown(tables.page(s)).encode("utf-8", "replace")),
    "html": _html,
    "json": _text(".json", tables.to_json),
    "csv": _flat("csv", lambda f: flat.to_csv(f).encode("utf-8", "replace")),
    "parquet": _flat("parquet", flat.to_parquet),
}


def write(
    source: Source | Reported,
    formats: Sequence[str],
    directory: Path,
    force: bool = False,
    *,
    stem: str = "report",
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
    reported = source if isinstance(source, Reported) else Reported(source)
    rendered: dict[Path, bytes] = {}
    for tail, data, spare in (file for f in formats for file in REPORTERS[f](reported)):
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
