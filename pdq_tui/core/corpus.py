"""Long English text for windows of quality: Python's own help topics, which every installation has, in two halves.

What chooses a policy and what confirms it must not be the same text, whatever the windows' lengths: so each document
belongs to one half, and no window crosses from one into the other.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from pdq_tui.errors import UnfitError, UsageError

SELECTION: Final = "selection"
CONFIRMATION: Final = "confirmation"
HALVES: Final = (SELECTION, CONFIRMATION)
#: Characters that a document has to have after what others have as well was left out.
_LEAST: Final = 500


def documents(half: str) -> tuple[str, ...]:
    """Always the same, in one order, for one version of Python. Raises UsageError for another word than ``HALVES``,
    UnfitError where this Python was installed without its help topics."""
    if half not in HALVES:
        raise UsageError(f"no half of the text is called {half!r}", f"there are: {', '.join(HALVES)}")
    return _halves()[HALVES.index(half)]


@cache
def _halves() -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UnfitError(
            "the text that quality is measured on is not there: this Python has no help topics (pydoc_data)",
            "install Python's whole standard library",
        ) from None
    halves: tuple[list[str], list[str]] = ([], [])
    sizes, seen = [0, 0], set[str]()
    # The longest first, each to the half that has less: both come out about as long. Topics quote whole chapters of each
    # other: a paragraph stays in the first document that has it.
    for _, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        fresh = [part for part in text.strip().split("\n\n") if " ".join(part.split()) not in seen]
        seen.update(" ".join(part.split()) for part in fresh)
        if sum(map(len, fresh)) < _LEAST:
            continue
        smaller = sizes.index(min(sizes))
        halves[smaller].append("\n\n".join(fresh))
        sizes[smaller] += len(halves[smaller][-1])
    return tuple(halves[0]), tuple(halves[1])
