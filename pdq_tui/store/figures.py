"""Figures that are counted, not timed: one exact number of an arm, with its formula, beside the timed metrics."""

from __future__ import annotations

from typing import Any, Final

from pdq_tui.core.metrics import METRICS, Quantity


class Figure(Quantity, frozen=True, kw_only=True):
    """``path``: where the contract's ``arms[]`` keeps it."""

    path: tuple[str, ...]

    def of(self, arm: dict[str, Any]) -> float | None:
        """The number in one arm of the contract; None where it is missing."""
        found: Any = arm
        for key in self.path:
            found = found.get(key) if isinstance(found, dict) else None
        return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None


def _of_metric(metric: str, path: tuple[str, ...]) -> Figure:
    """A metric that is the same number in every request, and counted once."""
    m = METRICS[metric]
    return Figure(**{f: getattr(m, f) for f in Quantity.__struct_fields__}, path=path)


class _Bytes(Figure, frozen=True, kw_only=True):
    unit: str = "B"
    better: str | None = "lower"


_ALL: Final = (
    _of_metric("bytes_per_step", ("decode", "bytes_per_step")),
    _Bytes(
        id="stored_bytes",
        path=("weights", "stored_bytes"),
        name="Weights stored",
        short="weights",
        formula="bytes of both stages' weights, what they share counted once",
        why="What the policy occupies before the first token.",
    ),
    _Bytes(
        id="extra_bytes",
        path=("weights", "extra_bytes"),
        name="Extra weight bytes",
        short="extra",
        formula="weights of both stages together minus the larger stage alone",
        why="The price of staging: KV cache that no longer fits.",
    ),
    _Bytes(
        id="kv_bytes_per_token",
        path=("kv", "bytes_per_token"),
        name="KV cache per token",
        short="KV/token",
        formula="stored bytes of keys and values of one token over all layers, scales included, as decode reads them",
        why="With the free memory it gives the tokens that fit.",
    ),
)

FIGURES: Final[dict[str, Figure]] = {f.id: f for f in _ALL}
