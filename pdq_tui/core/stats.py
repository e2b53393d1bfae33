"""Summaries, paired blocks, and the four words: better, worse, same, unsure."""

from __future__ import annotations

import msgspec


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in the JSON contract's form. ``median`` None with a ``reason`` where nothing was measured."""

    median: float | None
    ci95: tuple[float, float] | None
    n: int
    unit: str
    reason: str | None = None


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """arm / reference of one metric. ``judgement``: better, worse, same, unsure. ``threshold`` is δ, in ln units.

    ``provisional``: a live figure between planned looks; carries no word to rely on.
    """

    reference: str
    arm: str
    metric: str
    ratio: float | None
    ci95: tuple[float, float] | None
    judgement: str
    blocks: int = 0
    threshold: float | None = None
    noise_floor: float | None = None
    provisional: bool = False
    reason: str | None = None
