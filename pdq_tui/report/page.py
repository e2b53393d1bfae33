"""One model of a readable page for all its forms: facts, tables of text, notes, formulas. Building it is
``report.pages``, drawing it ``report.tables``."""

from __future__ import annotations

import msgspec


class Table(msgspec.Struct, kw_only=True):
    """``rows`` of cells as text, one per column. ``left``: how many columns from the left are words (the others are
    numbers, set to the right). ``sections``: a heading before the row of that index."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    left: int = 1
    sections: dict[int, str] = msgspec.field(default_factory=dict)
    footer: list[str] = msgspec.field(default_factory=list)


class SideBySide(msgspec.Struct, frozen=True, kw_only=True):
    """Two texts that begin alike: ``common``, then what each goes on with. ``word``: where and whether they part."""

    title: str
    labels: tuple[str, str]
    common: str
    rest: tuple[str, str]
    word: str


class Formula(msgspec.Struct, frozen=True, kw_only=True):
    short: str
    name: str
    formula: str
    why: str
    better: str | None


class Page(msgspec.Struct, kw_only=True):
    """``headline``: the one sentence to read if no other is read. ``facts``: (name, value) of the conditions. ``texts``:
    in full where a form has the room; a table among ``tables`` tells of them too.
    ``legend``: how the page's signs and words are to be read."""

    title: str
    headline: str
    facts: list[tuple[str, str]]
    tables: list[Table]
    notes: list[str]
    formulas: list[Formula]
    legend: str
    texts: list[SideBySide] = []
