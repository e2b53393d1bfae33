"""From events to figures, one door: an arm's summaries, the ratios between arms, the JSON document of a run.

The parts: ``core.arms`` (one arm), ``core.pairs`` (two arms, paired blocks), ``core.facts`` (what the events say was
measured, on what), ``core.document`` (the contract that scripts read).
"""

from __future__ import annotations

from pdq_tui.core.arms import Counts, arm_stats, counts, drift, timed
from pdq_tui.core.document import arm_document, run_document
from pdq_tui.core.facts import Facts, collect
from pdq_tui.core.pairs import noise_floor, ratios

__all__ = [
    "Counts",
    "Facts",
    "arm_document",
    "arm_stats",
    "collect",
    "counts",
    "drift",
    "noise_floor",
    "ratios",
    "run_document",
    "timed",
]
