"""The stage matrix: k prefill formats by k decode formats, composed from the stages' own times.

Prefill and decode of one request run one after the other, so a request of N tokens that combines them takes the one's
TTFT and N − 1 of the other's steps. That is a prediction: where a policy of that combination was timed as a whole, the
two stand side by side, and more than ``SEPARABLE`` between them means that time is not separable here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pdq_tui.core.policy import Policy

Json = Mapping[str, Any]
#: Predicted against measured, as a fraction of the measured time.
SEPARABLE: Final = 0.03


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """``composed_ms`` from the stages; ``measured_ms`` and ``error`` where ``policy`` was timed as a whole."""

    prefill: str
    decode: str
    composed_ms: float
    policy: str | None = None
    measured_ms: float | None = None
    error: float | None = None


def stage_matrix(policies: Sequence[Policy], arms: Sequence[Json], output_tokens: int) -> list[Cell]:
    """From the arms of one interleaved run, whose uniform policies give the stages. Empty below two of them."""
    by_name = {p.name: p for p in policies}
    timed = [a for a in arms if a.get("policy") in by_name or a.get("label") in by_name]
    uniform: dict[str, Json] = {}
    for arm in timed:
        policy = by_name[str(arm.get("policy") or arm.get("label"))]
        if not policy.staged and _median(arm, "prefill", "ttft_ms") and _median(arm, "decode", "tpot_ms"):
            uniform.setdefault(policy.name, arm)
    if len(uniform) < 2:
        return []
    whole = {by_name[str(a.get("policy") or a.get("label"))]: a for a in timed}
    cells = []
    for p_name, p_arm in uniform.items():
        for d_name, d_arm in uniform.items():
            ttft, tpot = _median(p_arm, "prefill", "ttft_ms"), _median(d_arm, "decode", "tpot_ms")
            assert ttft is not None and tpot is not None
            composed = ttft + (output_tokens - 1) * tpot
            combined = next(
                (
                    (policy.name, arm)
                    for policy, arm in whole.items()
                    if policy.prefill == by_name[p_name].prefill
                    and policy.decode == by_name[d_name].decode
                    and policy.kv == by_name[p_name].kv
                    and policy.keep == by_name[p_name].keep
                ),
                None,
            )
            measured = None if combined is None else _of(combined[1].get("e2e_ms"))
            cells.append(
                Cell(
                    prefill=p_name,
                    decode=d_name,
                    composed_ms=composed,
                    policy=None if combined is None else combined[0],
                    measured_ms=measured,
                    error=None if not measured else composed / measured - 1,
                )
            )
    return cells


def _median(arm: Json, stage: str, key: str) -> float | None:
    return _of((arm.get(stage) or {}).get(key))


def _of(summary: Json | None) -> float | None:
    value = (summary or {}).get("median")
    return float(value) if isinstance(value, (int, float)) else None
