"""A comparison as lines: the snapshots to choose from, the setup check, the rows.

Pure functions over what the store says, in the reports' words; every glyph is the caller's to translate for ASCII.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdq_tui.report.cells import (
    DELTA,
    INTERVAL,
    PERCENT,
    about,
    delta_text,
    interval_text,
    judgement_text,
    percent_number,
    percent_text,
    value_text,
)
from pdq_tui.tui.lines import Line, Part, fit, literal, to_ascii

if TYPE_CHECKING:  # their modules import polars, which the first screen must not wait for
    from pdq_tui.store.compare import Comparison, Row
    from pdq_tui.store.listing import Listed
    from pdq_tui.store.setup import SetupCheck

_ROLES = {"better": "good", "worse": "bad", "same": "", "unsure": "dim", "": "dim"}


def snapshot_lines(listed: Sequence[Listed], picked: Sequence[str], run_id: str, width: int) -> list[Line]:
    """The picker: this run's first, newest first. What cannot be read has its reason and no key."""
    ordered = sorted(listed, key=lambda s: (s.run == run_id, s.created, s.id), reverse=True)
    lines: list[Line] = []
    for s in ordered:
        name = f"{s.run[-4:]}/{s.name}"
        if s.error is not None:
            lines.append(Line.of(f"    ! {literal(name)}  {literal(s.error.replace(s.path, 'it'))}", "warn"))
            continue
        star = "★" if picked and picked[0] == s.id else " "
        mark = f"[{'x' if s.id in picked else ' '}] {star}"
        count = "" if s.requests is None else f"n={s.requests}"
        here = "this run" if s.run == run_id else s.created.replace("T", " ")[:16]
        parts: list[Part] = [
            (f"{mark} ", "mark"),
            (f"{fit(literal(name), 9)} ", ""),
            (fit(f"{literal(s.arm)} {literal(s.policy)}", max(12, min(34, width - 44))) + " ", ""),
            (f"{count:<7}{fit(here, 17)}", "dim"),
            (f" {literal(s.model)}  {literal(s.note)}".rstrip(), "dim"),
        ]
        lines.append(Line(tuple(parts), s.id))
    return lines


def setup_text(checks: Sequence[SetupCheck]) -> str:
    """What differs first and in full, then what is unknown, then what is the same, in one paragraph."""
    differs = [c for c in checks if c.status == "differs"]
    parts = []
    for c in differs:
        flags = f" → {' and '.join(c.invalidates)} flagged ⚑" if c.invalidates else ""
        parts.append(f"✗ {c.what} ({literal(c.reference)} against {literal(c.value)}){flags}")
    unknown = [c.what for c in checks if c.status == "unknown"]
    meant = [c.what for c in checks if c.status == "by policy"]
    same = [c.what for c in checks if c.status == "ok"]
    if unknown:
        parts.append(f"? not known: {', '.join(unknown)}")
    if meant:
        parts.append(f"differ by policy: {', '.join(meant)}")
    if same:
        parts.append(f"✓ {', '.join(same)}")
    return "same setup?  " + "   ".join(parts)


@dataclass(frozen=True)
class Columns:
    """Widths of the columns; 0: left out. What is left out is in the detail of the row."""

    name: int
    unit: int
    value: int
    delta: int
    percent: int
    interval: int
    word: int
    plain: bool = False

    @classmethod
    def for_width(cls, width: int, plain: bool = False) -> Columns:
        """Widths that fill ``width`` cells, one blank behind each column: full names from 113, the absolute difference
        from 94, the interval from 74."""
        if width >= 113:
            spare = width - 113
            return cls(24 + min(spare // 2, 14), 6, 15 + min(spare // 4, 9), 10, 7, 16, 12, plain)
        if width >= 94:
            return cls(9, 6, 13, 10, 7, 16, 12, plain)
        if width >= 74:
            return cls(9, 5, 11, 0, 6, 15, 10, plain)
        return cls(9, 0, 11, 0, 6, 0, 10, plain)

    def line(self, cells: Sequence[str], roles: Mapping[int, str], key: str | None = None) -> Line:
        """name, unit, reference, candidate, Δ, Δ %, interval, word → one line; numbers are set to the right."""
        widths = (
            self.name,
            self.unit,
            self.value,
            self.value,
            self.delta,
            self.percent,
            self.interval,
            self.word,
        )
        parts: list[Part] = []
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            if width == 0:
                continue
            text = fit(to_ascii(cell) if self.plain else cell, width)
            if index in (2, 3, 4, 5):
                text = text.rstrip().rjust(width) if not text.rstrip().endswith("~") else text
            parts.append((text + " ", roles.get(index, "")))
        return Line(tuple(parts), key)


def table_lines(
    comparison: Comparison,
    candidate: str,
    width: int,
    *,
    differences: bool,
    hidden: bool,
    wanted: str = "",
    plain: bool = False,
) -> list[Line]:
    """The rows of one pair under their groups. ``differences``: only better and worse; ``hidden``: the others below."""
    side = next(c for c in comparison.candidates if c.id == candidate)
    columns = Columns.for_width(width, plain)
    head = (
        "",
        "",
        f"★ {literal(comparison.reference.label)}",
        literal(side.label),
        DELTA,
        PERCENT,
        INTERVAL,
        "judgement",
    )
    lines = [columns.line(head, dict.fromkeys(range(8), "head"))]
    rows = [r for r in comparison.rows_of(candidate) if wanted in f"{r.name} {r.short} {r.group}".lower()]
    shown = [r for r in rows if r.different] if differences else rows
    rest = [r for r in rows if not r.different] if differences else []
    for group in dict.fromkeys(r.group for r in shown):
        lines.append(Line.of(f"─ {group} ".ljust(width, "─"), "dim"))
        lines += [_row_line(columns, r) for r in shown if r.group == group]
    if rest:
        keys = "H hides them" if hidden else "H shows them"
        lines.append(
            Line.of(f"─ no difference that can be told: {len(rest)} rows ({keys}) ".ljust(width, "─"), "dim")
        )
        lines += [_row_line(columns, r) for r in rest] if hidden else []
    if not rows:
        lines.append(
            Line.of("no row matches the filter" if wanted else "no metric is in both snapshots", "dim")
        )
    return lines


def _row_line(columns: Columns, row: Row) -> Line:
    entry = about(row.metric)
    name = row.name if columns.name >= 20 else row.short
    room = columns.value - columns.plain  # ± is two characters there
    cells = (
        name,
        entry.shown_unit,
        value_text(row.metric, row.reference, room),
        value_text(row.metric, row.value, room),
        delta_text(row),
        percent_number(row.percent),
        interval_text(row),
        judgement_text(row),
    )
    return columns.line(cells, {1: "dim", 7: _ROLES.get(row.judgement, "")}, row.metric)


def row_text(comparison: Comparison, row: Row) -> str:
    """One row in words, to be copied."""
    side = next(c for c in comparison.candidates if c.id == row.candidate)
    unit = about(row.metric).shown_unit
    word = row.judgement or "no judgement"
    reason = f" ({row.reason})" if row.reason else ""
    return (
        f"{row.name}{f' [{unit}]' if unit else ''}: reference {comparison.reference.label} ({comparison.reference.id}) "
        f"{value_text(row.metric, row.reference)}, {side.label} ({side.id}) {value_text(row.metric, row.value)}, "
        f"difference {delta_text(row)} = {percent_text(row.percent)}, 95 % interval {interval_text(row)}, {word}{reason}"
    )
