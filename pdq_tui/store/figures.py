"""Figures that are counted, not timed: one exact number of an arm, with its formula, beside the timed metrics."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pdq_tui.core.metrics import MISSING, format_bytes


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """``path``: where the contract's ``arms[]`` keeps it. ``unit`` "B" is shown in binary multiples."""

    id: str
    path: tuple[str, ...]
    name: str
    short: str
    unit: str
    better: str | None
    formula: str
    why: str

    @property
    def shown_unit(self) -> str:
        return "" if self.unit == "B" else self.unit

    def format(self, value: float | None) -> str:
        if value is None:
            return MISSING
        return format_bytes(value) if self.unit == "B" else f"{value:.0f}"

    def of(self, arm: dict[str, Any]) -> float | None:
        """The number in one arm of the contract; None where it is missing."""
        found: Any = arm
        for key in self.path:
            found = found.get(key) if isinstance(found, dict) else None
        return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None


_ALL: Final = (
    Figure(
        id="bytes_per_step",
        path=("decode", "bytes_per_step"),
        name="Bytes per decode step",
        short="B/step",
        unit="B",
        better="lower",
        formula="stored bytes that one step must read: packed weights, scales, zero points, head, one embedding row a token, KV at its length",
        why="What quantization is for in decode: time can fall no faster than this.",
    ),
    Figure(
        id="stored_bytes",
        path=("weights", "stored_bytes"),
        name="Weights stored",
        short="weights",
        unit="B",
        better="lower",
        formula="bytes of both stages' weights, what they share counted once",
        why="What the policy occupies before the first token.",
    ),
    Figure(
        id="extra_bytes",
        path=("weights", "extra_bytes"),
        name="Extra weight bytes",
        short="extra",
        unit="B",
        better="lower",
        formula="weights of both stages together minus the larger stage alone",
        why="The price of staging: KV cache that no longer fits.",
    ),
    Figure(
        id="kv_bytes_per_token",
        path=("kv", "bytes_per_token"),
        name="KV cache per token",
        short="KV/token",
        unit="B",
        better="lower",
        formula="bytes of keys and values of one token over all layers",
        why="With the free memory it gives the tokens that fit.",
    ),
)

FIGURES: Final[dict[str, Figure]] = {f.id: f for f in _ALL}
