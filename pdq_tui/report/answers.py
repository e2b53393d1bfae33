"""What two policies answered to the same prompts: a table for every form, and the texts side by side for those with room."""

from __future__ import annotations

from typing import Final

from pdq_tui.core.texts import Answers
from pdq_tui.report.cells import NOTHING
from pdq_tui.report.page import SideBySide, Table
from pdq_tui.store.compare import Comparison

#: Pairs that a table names, and that a page shows in full; those that part come first.
_ROWS: Final = 20
#: Characters that a table shows of how an answer goes on.
_EXCERPT: Final = 40


def answers_tables(c: Comparison) -> list[Table]:
    """One table, or none where no prompt was answered by both."""
    found = _ordered(c)
    if not found:
        return []
    table = Table(
        title="answers",
        columns=["candidate", "prompt", "first divergence", "★ goes on", "the candidate goes on"],
        rows=[],
        left=5,
    )
    for label, pair in found[:_ROWS]:
        goes_on = (NOTHING if pair.same else _excerpt(pair.common, rest) for rest in pair.rests)
        table.rows.append([label, str(pair.prompt + 1), pair.word, *goes_on])
    if len(found) > _ROWS:
        table.footer.append(f"{len(found) - _ROWS} more pairs are not shown; the JSON form has all")
    table.footer.append(
        "the first answer to each prompt, of a batch its first row; greedy, so that other tokens come of the arithmetic. What a "
        "different answer is worth, evaluate tells"
    )
    return [table]


def side_by_side(c: Comparison) -> list[SideBySide]:
    return [
        SideBySide(
            title=f"prompt {pair.prompt + 1}: {label} against {c.reference.label}",
            labels=(f"★ {c.reference.label}", label),
            common=pair.common,
            rest=pair.rests,
            word=pair.word,
        )
        for label, pair in _ordered(c)[:_ROWS]
    ]


def _ordered(c: Comparison) -> list[tuple[str, Answers]]:
    found = [(side.label, pair) for side in c.candidates for pair in c.answers.get(side.id, ())]
    return sorted(found, key=lambda item: item[1].same)


def _excerpt(common: str, rest: str) -> str:
    """The word in which it happens, and what follows."""
    if not rest:
        return "(ends)" if common else "(nothing)"
    before = common[-12:].split(" ")[-1]
    text = f"…{before}{rest}".replace("\n", " ⏎ ")
    return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 1]}…"
