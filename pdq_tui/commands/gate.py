"""``--fail-on``: which judgements make a command end with exit code 3."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Final

from pdq_tui.core.metrics import MEMORY_METRICS, RATIO_METRICS
from pdq_tui.errors import UsageError
from pdq_tui.store.figures import FIGURES

#: Times and rates have blocks, an interval and a judgement. Bytes are the known price of a policy: a second copy of the
#: weights is always more, and fails a gate only where it is named.
TIMED: Final = RATIO_METRICS
#: The metrics of a comparison that are judged at all; utilizations are not.
JUDGED: Final = (*TIMED, *MEMORY_METRICS, *FIGURES)
WORSE: Final = "worse"


def watched(text: str | None, legal: Sequence[str]) -> tuple[str, ...]:
    """The metrics that may fail the command: none without the flag, the timed ones for "worse", those named after
    "worse:". ``legal``: what may be named. Raises UsageError."""
    if text is None:
        return ()
    word, colon, names = text.partition(":")
    if word != WORSE:
        raise UsageError(f"--fail-on: {text!r} is not a legal value", "legal: worse, worse:METRIC,METRIC")
    if not colon:
        return tuple(TIMED)
    chosen = tuple(name.strip() for name in names.split(","))
    for name in chosen:
        if name not in legal:
            near = difflib.get_close_matches(name, legal, 1)
            did = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"--fail-on: no metric is called {name!r}", f"{did}legal: {', '.join(legal)}")
    return chosen
