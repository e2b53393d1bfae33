"""A page as one HTML file that needs nothing else: style, script and figures are in it, and it may ask for nothing.

The Content-Security-Policy holds that: a page that is opened from a mail or a build server fetches nothing, whoever
wrote a model's name or a note into it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Final

from pdq_tui.report.figure import NARROW, WIDE, Figure, svg
from pdq_tui.report.page import Formula, Page, SideBySide, Table

_SORT_FROM: Final = 3


def html(p: Page, figures: Sequence[Figure]) -> str:
    """The file's text. Figures first, then the tables that hold their numbers, what the numbers mean at the end."""
    style, script = _own("page.css"), _own("page.js")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_e(p.title)}</title>",
            f"<style>\n{style}</style></head><body>",
            f"<header><h1>{_e(p.title)}</h1>",
            f'<p class="headline">{_e(p.headline)}</p>',
            _conditions(p.facts),
            "</header><main>",
            "<section><h2>Figures</h2>",
            *(_figure(f) for f in figures),
            "</section>",
            '<section><h2>Numbers</h2><p class="hint">A click on a heading sorts.</p>',
            *(_table(t) for t in p.tables),
            "</section>",
            _texts(p.texts),
            _list("Notes", p.notes),
            _means(p.formulas, p.legend),
            "</main><footer>Made by pdq-tui. This file holds everything it shows.</footer>",
            f"<script>{script}</script></body></html>",
            "",
        ]
    )


def _own(name: str) -> str:
    return resources.files("pdq_tui.report").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _e(text: str) -> str:
    """What people wrote, as text: a control character would hide what stands behind it."""
    return escape("".join(c if c.isprintable() or c == "\n" else " " for c in text), quote=True)


def _conditions(facts: Sequence[tuple[str, str]]) -> str:
    found = "".join(f"<dt>{_e(name)}</dt><dd>{_e(value)}</dd>" for name, value in facts)
    return f'<dl class="conditions">{found}</dl>'


def _figure(f: Figure) -> str:
    head = f'<figure id="figure-{_e(f.name)}"><h3>{_e(f.title)}</h3>'
    if f.draw is None:
        return f'{head}<p class="absent">Not drawn: {_e(f.missing or "")}.</p></figure>'
    drawn = "".join(
        f'<div class="{form}" role="img" aria-label="{_e(f.title)}">{svg(f.draw(width), width, f"{f.name}-{form}")}</div>'
        for form, width in (("wide", WIDE), ("narrow", NARROW))
    )
    return f"{head}{drawn}<figcaption>{_e(f.reads)}</figcaption></figure>"


def _table(t: Table) -> str:
    sorts = len(t.rows) >= _SORT_FROM
    heads = "".join(
        f'<th scope="col"{_left(t, i)}>{f"<button>{_e(c)}</button>" if sorts else _e(c)}</th>'
        for i, c in enumerate(t.columns)
    )
    body = []
    for i, row in enumerate(t.rows):
        if i in t.sections:
            body.append(f'<tr class="section"><th colspan="{len(t.columns)}">{_e(t.sections[i])}</th></tr>')
        body.append("<tr>" + "".join(f"<td{_left(t, j)}>{_e(c)}</td>" for j, c in enumerate(row)) + "</tr>")
    below = "".join(f"<li>{_e(line)}</li>" for line in t.footer)
    return (
        f'<h3>{_e(t.title)}</h3><div class="scroll" tabindex="0" role="region" aria-label="{_e(t.title)}">'
        f"<table{' class=sorts' if sorts else ''}><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        + (f'<ul class="below">{below}</ul>' if below else "")
    )


def _left(t: Table, column: int) -> str:
    return ' class="l"' if column < t.left else ""


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return (
        f"<section><h2>{_e(title)}</h2><ul>{''.join(f'<li>{_e(line)}</li>' for line in lines)}</ul></section>"
    )


def _texts(texts: Sequence[SideBySide]) -> str:
    if not texts:
        return ""
    return f"<section><h2>Answers side by side</h2>{''.join(_pair(t) for t in texts)}</section>"


def _pair(t: SideBySide) -> str:
    """Both texts, what they share in a paler ink; the mark is a word as well as a colour."""
    sides = "".join(
        f'<div><h4>{_e(label)}</h4><p><span class="common">{_text(t.common)}</span>'
        f"{f'<mark>▸</mark>{_text(rest)}' if any(t.rest) else ''}</p></div>"
        for label, rest in zip(t.labels, t.rest, strict=True)
    )
    return f'<div class="answers"><h3>{_e(t.title)}</h3><p class="word">{_e(t.word)}</p><div class="pair">{sides}</div></div>'


def _text(text: str) -> str:
    """What a model wrote, with its line breaks and blanks; other control characters as their pictures."""
    shown = "".join(
        c if c.isprintable() or c == "\n" else chr(0x2400 + ord(c)) if ord(c) < 32 else "�" for c in text
    )
    return escape(shown.encode("utf-8", "replace").decode("utf-8"), quote=True)


def _means(formulas: Sequence[Formula], legend: str) -> str:
    found = "".join(
        f"<dt>{_e(f.short)}: {_e(f.name)}</dt><dd>{_e(f.formula)}. {_e(f.why)}"
        f"{f' ({_e(f.better)} is better)' if f.better else ''}</dd>"
        for f in formulas
    )
    return (
        f'<section><h2>What the numbers mean</h2><p>{_e(legend)}</p><dl class="means">{found}</dl></section>'
    )
