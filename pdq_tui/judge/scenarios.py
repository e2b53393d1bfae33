"""Four situations that people decide for, each answered from what was measured, or called not tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pdq_tui.core.metrics import format_bytes
from pdq_tui.core.stats import BETTER, SAME, WORSE
from pdq_tui.judge.plan import Spec
from pdq_tui.judge.verdict import Verdict

Json = Mapping[str, Any]

FOR: Final = "for staging"
AGAINST: Final = "against"
NEUTRAL: Final = "neutral"
OPEN: Final = "unsure"
NOT_TESTED: Final = "not tested"


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """``says``: for staging, against, neutral, unsure or not tested. ``because``: the numbers behind it."""

    name: str
    says: str
    because: str


def cards(spec: Spec, found: Mapping[str, Json], v: Verdict) -> list[Card]:
    """About the policy that the verdict is about; all are not tested where it is about none."""
    n = spec.workload.prompt_tokens
    return [
        _time("long prompt", "ttft_ms", found, v, f"at {n} tokens; longer prompts were not measured"),
        _load(found, v),
        _memory(found, v),
        _time("decode-sensitive", "tpot_ms", found, v, f"batch {spec.workload.batch}, one request at a time"),
    ]


def _time(name: str, metric: str, found: Mapping[str, Json], v: Verdict, where: str) -> Card:
    rows = [
        r
        for r in found.get("confirmation", {}).get("ratios", [])
        if r["arm"] == v.staged and r["metric"] == metric and r["reference"] in v.against
    ]
    if not rows:
        return Card(name=name, says=NOT_TESTED, because="the confirmation run was not reached")
    parts = [f"{_percent(r)} against {r['reference']} ({r['judgement']})" for r in rows]
    return Card(name=name, says=_all([r["judgement"] for r in rows]), because=f"{'; '.join(parts)}; {where}")


def _percent(r: Json) -> str:
    return "n/a" if r["ratio"] is None else f"{(r['ratio'] - 1) * 100:+.1f} %"


def _all(words: Sequence[str]) -> str:
    """Better than each kept uniform speaks for staging, worse than one against it."""
    if WORSE in words:
        return AGAINST
    if all(w == BETTER for w in words):
        return FOR
    return NEUTRAL if all(w in (BETTER, SAME) for w in words) else OPEN


def _load(found: Mapping[str, Json], v: Verdict) -> Card:
    """The curves side by side; they have no interval between policies, so that nobody is called better here."""
    name = "high concurrency"
    load = found.get("load", {})
    points = [p for p in load.get("points", []) if p["arm"] == v.staged and p["concurrency"]]
    if not points:
        return Card(name=name, says=NOT_TESTED, because="no load test in this evaluation")
    told = [_knee(k) for k in load.get("knees", [])]
    most = max(points, key=lambda p: int(p["concurrency"]))
    told += [
        f"{p['throughput']:.2f} requests/s against {other['throughput']:.2f} of {other['arm']} at {p['concurrency']} at a time"
        for p in (most,)
        for other in load["points"]
        if other["arm"] != v.staged
        and other["concurrency"] == p["concurrency"]
        and None not in (p["throughput"], other["throughput"])
    ]
    return Card(name=name, says=OPEN, because="; ".join(told))


def _knee(k: Json) -> str:
    if k["concurrency"] is None:
        return f"{k['arm']} meets the targets at no load"
    return f"{k['arm']} meets the targets up to {k['concurrency']} at a time" + (
        "" if k["reached"] else " or more"
    )


def _memory(found: Mapping[str, Json], v: Verdict) -> Card:
    name = "tight memory"
    weights = found.get("conditions", {}).get("weights", {})
    if v.staged is None or v.staged not in weights or not v.against:
        return Card(name=name, says=NOT_TESTED, because="no staged policy came that far")
    mine = weights[v.staged]["stored_bytes"]
    least = min(v.against, key=lambda u: float(weights[u]["stored_bytes"]))
    theirs = weights[least]["stored_bytes"]
    says = FOR if mine < theirs else NEUTRAL if mine == theirs else AGAINST
    gone = f", {format_bytes(mine - theirs)} less for KV cache" if mine > theirs else ""
    return Card(
        name=name,
        says=says,
        because=f"weights {format_bytes(mine)} against {format_bytes(theirs)} of {least}{gone}",
    )
