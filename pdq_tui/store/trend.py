"""Many snapshots over time: the same policy on the same work again and again, and what had changed between.

A series is one policy on one model, device and workload. Versions may differ inside a series, that is what a trend is
for; so each snapshot is judged against the one before it in its series, unpaired, and a drift of the machine between the
two is not cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from pdq_tui.core.stats import UNSURE, Ratio, Summary
from pdq_tui.errors import PdqError
from pdq_tui.store.snapshot import Snapshot
from pdq_tui.store.unpaired import unpaired

#: What is followed: (metric, where ``arms[]`` has its summary).
FOLLOWED: Final = (
    ("e2e_ms", ("e2e_ms",)),
    ("ttft_ms", ("prefill", "ttft_ms")),
    ("tpot_ms", ("decode", "tpot_ms")),
    ("mbu", ("decode", "mbu")),
)
_JUDGED: Final = ("e2e_ms", "ttft_ms", "tpot_ms")


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot. ``at``: when it was made, ISO time. ``changed``: versions and kernels that differ from the point before
    in its series, in words. ``against``: the ratio to that point by metric, none for the first."""

    id: str
    at: str
    note: str
    versions: dict[str, str]
    figures: dict[str, Summary]
    changed: list[str]
    against: dict[str, Ratio]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """``setup``: model, device and workload in words."""

    setup: str
    policy: str
    points: list[Point]


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """``skipped``: what could not be read, with the reason."""

    series: list[Series]
    skipped: list[str]
    min_effect: float


def trend(snapshots: Sequence[Snapshot], min_effect: float, skipped: Sequence[str] = ()) -> Trend:
    """In the order of time, whatever order they come in. Raises PdqError where there is none."""
    if not snapshots:
        raise PdqError("there is no snapshot to follow", "; ".join(skipped) or None)
    found: dict[tuple[str, str], list[Snapshot]] = {}
    for s in sorted(snapshots, key=lambda s: (_when(s), s.id)):
        if s.arm.get("valid") is not False:
            found.setdefault((_setup(s), s.policy or s.label), []).append(s)
    return Trend(
        series=[
            Series(setup=setup, policy=policy, points=_points(of, min_effect))
            for (setup, policy), of in found.items()
        ],
        skipped=[
            *skipped,
            *(f"{s.id}: its arm is not valid" for s in snapshots if s.arm.get("valid") is False),
        ],
        min_effect=min_effect,
    )


def _points(snapshots: Sequence[Snapshot], min_effect: float) -> list[Point]:
    points: list[Point] = []
    before: Snapshot | None = None
    for s in snapshots:
        versions = _versions(s)
        ratios = [] if before is None else unpaired(before, s, _JUDGED, min_effect)
        points.append(
            Point(
                id=s.id,
                at=_when(s),
                note=s.note,
                versions=versions,
                figures={metric: _summary(s.arm, path) for metric, path in FOLLOWED},
                changed=_changed(points[-1].versions, versions) if points else [],
                against={r.metric: r for r in ratios},
            )
        )
        before = s
    return points


def judgement(point: Point, metric: str) -> str:
    ratio = point.against.get(metric)
    return UNSURE if ratio is None else ratio.judgement


def _when(s: Snapshot) -> str:
    return str(s.manifest.get("created") or s.manifest.get("started") or "")


def _setup(s: Snapshot) -> str:
    m, d, w = s.part("model"), s.part("device"), s.part("workload")
    lengths = w.get("prompt_tokens") or "own length"
    return (
        f"{m.get('id') or '?'} {m.get('dtype') or ''} on {d.get('name') or '?'}, prompt {lengths}, "
        f"output {w.get('output_tokens')}, batch {w.get('batch')}"
    )


def _versions(s: Snapshot) -> dict[str, str]:
    """Everything that a new version of something could have changed, by name."""
    found = {"pdq-tui": str(s.part("tool").get("version") or "")}
    found |= {str(k): str(v or "") for k, v in s.part("libraries").items() if k != "pdq-tui"}
    found["Python"] = str(s.manifest.get("python") or "")
    found["driver"] = str(s.manifest.get("driver") or "")
    for stage in ("prefill", "decode"):
        part: Any = s.arm.get(stage)
        names = part.get("kernels") if isinstance(part, dict) else None
        found[f"{stage} kernels"] = ", ".join(map(str, names or []))
    return {k: v for k, v in found.items() if v}


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    names = dict.fromkeys([*before, *after])
    return [
        f"{name} {before.get(name, 'none')} → {after.get(name, 'none')}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _summary(arm: dict[str, Any], path: Sequence[str]) -> Summary:
    found: Any = arm
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("median"), (int, float)):
        return Summary(median=None, ci95=None, n=0, unit="", reason="not in this snapshot")
    ci = found.get("ci95")
    return Summary(
        median=float(found["median"]),
        ci95=(float(ci[0]), float(ci[1])) if ci else None,
        n=int(found.get("n") or 0),
        unit=str(found.get("unit") or ""),
    )
