"""The memory that a policy was predicted to take, held against what its pass alone then took.

What is known beforehand: the stored weights of both stages, what stays in the model's dtype, and the KV cache at its
length. Activations and scratch are not predicted; a reserve is set aside for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdq_tui.core.protocol import ArmReady, Request


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. ``rest``: the measured peak of each stage without the prediction: activations and scratch, and an engine's
    own. ``exceeded``: by how much the larger one is beyond the reserve; 0 where it is not; None with ``reason`` where
    the measured figure holds more than this policy."""

    weights: int
    kv: int
    reserve: int
    rest: dict[str, int | None]
    exceeded: int | None = None
    reason: str = ""

    @property
    def predicted(self) -> int:
        return self.weights + self.kv


def footprint(ready: ArmReady, solo: Sequence[Request]) -> Footprint:
    """``solo``: passes with only this policy resident."""
    weights = ready.weights.stored_bytes + ready.weights.kept_bytes
    kv = max((r.kv_bytes or 0 for r in solo), default=0)
    measured = {
        stage: max((v for r in solo if (v := getattr(r, f"{stage}_peak_bytes")) is not None), default=None)
        for stage in ("prefill", "decode")
    }
    rest = {s: None if v is None else v - weights - kv for s, v in measured.items()}
    known = [v for v in rest.values() if v is not None]
    reason, exceeded = "", None
    if not solo or not known:
        reason = "no pass of this policy alone was made"
    elif any("allocator" not in r.memory_method for r in solo):
        reason = "the process' memory holds its libraries too: only an allocator's own figure can be held against it"
    else:
        exceeded = max(0, max(known) - ready.kv.reserve_bytes)
    return Footprint(
        weights=weights, kv=kv, reserve=ready.kv.reserve_bytes, rest=rest, exceeded=exceeded, reason=reason
    )
