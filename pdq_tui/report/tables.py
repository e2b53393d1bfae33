"""A comparison, a run's document or an evaluation as text: a plain table for the terminal, Markdown, strict JSON, CSV."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pdq_tui.errors import UsageError
from pdq_tui.report import flat
from pdq_tui.report.evaluated import Evaluated
from pdq_tui.report.page import Page, Table
from pdq_tui.report.pages import comparison_page, document_page
from pdq_tui.report.trend import trend_page
from pdq_tui.store.compare import Comparison
from pdq_tui.store.snapshot import strict_json
from pdq_tui.store.trend import Trend

Source = Comparison | Evaluated | Trend | Mapping[str, Any]

FORMATS: Final = ("table", "md", "json", "csv")
_ASCII: Final = {
    "★": "*",
    "±": "+-",
    "Δ": "d",
    "✓": "ok",
    "✗": "DIFFERS",
    "▲": "^",
    "▼": "v",
    "⚑": "!",
    "→": "->",
    "–": "-",
    "−": "-",
    "·": "|",
    "×": "x",
    "Σ": "sum",
    "─": "-",
    "≥": ">=",
    "…": "...",
    "⏎": "\\n",
}


def render(
    source: Source,
    format: str = "table",  # noqa: A002 - the command line's own word for it
    *,
    diff_only: bool = False,
    ascii_only: bool = False,
) -> str:
    """``source``: a comparison or a run's contract document. ``diff_only``: only rows that are better or worse
    (comparisons as table and md). ``ascii_only``: for terminals that cannot show more. Raises UsageError."""
    if format == "table":
        text = plain(page(source, diff_only=diff_only))
    elif format == "md":
        text = markdown(page(source, diff_only=diff_only))
    elif format == "json":
        text = to_json(source).decode("utf-8")
    elif format == "csv":
        text = flat.to_csv(flat.rows(flat_source(source)))
    else:
        raise UsageError(f"{format!r} is not a format", f"legal: {', '.join(FORMATS)}")
    return to_ascii(text) if ascii_only else text


def flat_source(source: Source) -> Comparison | Trend | Mapping[str, Any]:
    """What has one row a metric. Raises UsageError for an evaluation, which has tables of many kinds."""
    if isinstance(source, Evaluated):
        raise UsageError("an evaluation has no single table", "legal for it: md, html, json")
    return source


def page(source: Source, *, diff_only: bool = False) -> Page:
    if isinstance(source, Comparison):
        return comparison_page(source, diff_only=diff_only)
    if isinstance(source, Evaluated):
        return source.page()
    if isinstance(source, Trend):
        return trend_page(source)
    return document_page(source)


def to_json(source: Source) -> bytes:
    """Strict JSON. A comparison's missing numbers are null with ``<key>_reason``."""
    if isinstance(source, Evaluated):
        return strict_json(source.body())
    if isinstance(source, Trend):
        return strict_json({"schema": 1, "kind": "pdq-tui trend", **msgspec.to_builtins(source)})
    if not isinstance(source, Comparison):
        return strict_json(source)
    body = {"schema": 1, "kind": "pdq-tui comparison", **msgspec.to_builtins(source)}
    for line in body["rooflines"]:
        if line["roof"]["read_gbps"] is None:
            line["roof"]["read_gbps_reason"] = "no read peak was measured"
    for row in body["rows"]:
        why = row.get("reason") or "has none"
        for key in ("delta", "delta_ci95", "percent", "ci95"):
            if row[key] is None:
                row[f"{key}_reason"] = f"{row['method']}: {why}" if key.endswith("ci95") else why
        for side in ("reference", "value"):
            for key in ("median", "ci95"):
                if row[side][key] is None:
                    row[side][f"{key}_reason"] = row[side].get("reason") or "one number, no distribution"
    return strict_json(body)


def to_ascii(text: str) -> str:
    for sign, plain_sign in _ASCII.items():
        text = text.replace(sign, plain_sign)
    return text.encode("ascii", "replace").decode("ascii")


# -- plain -------------------------------------------------------------------------------------------------------------


def plain(p: Page) -> str:
    """Aligned columns, no borders: readable in a terminal and in a log."""
    lines = [p.title, *textwrap.wrap(p.headline, 110), ""]
    width = max((len(k) for k, _ in p.facts), default=0)
    lines += [f"{k:<{width}}  {v}" for k, v in p.facts]
    for table in p.tables:
        lines += ["", *_plain_table(table)]
    if p.notes:
        lines += ["", *(f"- {_one_line(n)}" for n in p.notes)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _plain_table(t: Table) -> list[str]:
    cells = [[_one_line(c) for c in row] for row in t.rows]
    widths = [max(len(c) for c in column) for column in zip(t.columns, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            c.ljust(w) if i < t.left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )

    out = [t.title, line(t.columns), "─" * (sum(widths) + 2 * (len(widths) - 1))]
    for i, row in enumerate(cells):
        if i in t.sections:
            out.append(f"── {t.sections[i]}")
        out.append(line(row))
    return out + [f"  {f}" for f in t.footer]


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


# -- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(p: Page) -> str:
    """For a pull request: the sentence, the tables, the conditions, what the numbers mean."""
    lines = [f"## {_md(p.title)}", "", f"**{_md(p.headline)}**"]
    for table in p.tables:
        lines += ["", *_md_table(table)]
    if p.notes:
        lines += ["", "### Notes", "", *(f"- {_md(n)}" for n in p.notes)]
    lines += ["", "### Conditions", "", "| condition | value |", "| :-- | :-- |"]
    lines += [f"| {_md(k)} | {_md(v)} |" for k, v in p.facts]
    lines += ["", "<details><summary>What the numbers mean</summary>", ""]
    lines += ["| metric | formula | why it matters | better |", "| :-- | :-- | :-- | :-- |"]
    lines += [
        f"| {_md(f.short)} ({_md(f.name)}) | {_md(f.formula)} | {_md(f.why)} | {f.better or '–'} |"
        for f in p.formulas
    ]
    lines += [
        "",
        p.legend,
        "",
        "</details>",
    ]
    return "\n".join(lines) + "\n"


def _md_table(t: Table) -> list[str]:
    out = [f"### {_md(t.title)}", "", f"| {' | '.join(_md(c) for c in t.columns)} |"]
    out.append(f"| {' | '.join(':--' if i < t.left else '--:' for i in range(len(t.columns)))} |")
    for i, row in enumerate(t.rows):
        if i in t.sections:
            out.append(f"| **{_md(t.sections[i])}** |{' |' * (len(t.columns) - 1)}")
        out.append(f"| {' | '.join(_md(c) for c in row)} |")
    if t.footer:
        out += ["", *(f"- {_md(f)}" for f in t.footer)]
    return out


def _md(text: str) -> str:
    """Text inside a table cell or a line: what Markdown or HTML would take for its own is escaped."""
    clean = (
        _one_line(text).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    )
    for sign in "*_`[]":
        clean = clean.replace(sign, f"\\{sign}")
    return clean
