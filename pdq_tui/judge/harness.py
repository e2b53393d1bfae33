"""lm-eval's tasks by two policies: each document against itself, as with the project's own tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pdq_tui.core.protocol import LmEvaluated
from pdq_tui.core.stats import block_interval
from pdq_tui.judge import flips


def compared(base: Sequence[LmEvaluated], policy: Sequence[LmEvaluated]) -> list[dict[str, Any]]:
    """A row a task and metric that both have. Where a document is right or wrong: flips both ways, McNemar's p and the drop
    with its interval; else the mean difference with Student's interval over documents."""
    theirs = {result.task: result for result in base}
    rows = []
    for ours in policy:
        other = theirs.get(ours.task)
        if other is None:
            continue
        for metric, value in ours.metrics.items():
            if metric not in other.metrics:
                continue
            row: dict[str, Any] = {
                "task": ours.task,
                "version": ours.version,
                "documents": ours.documents,
                "metric": metric,
                "base": other.metrics[metric],
                "policy": value,
                "stderr": ours.stderr.get(metric),
                "higher_is_better": ours.higher_is_better.get(metric),
                "flips": None,
                "difference": None,
                "difference_ci95": None,
            }
            right = ours.higher_is_better.get(metric) is not False
            rows.append(row | _paired(other.values.get(metric), ours.values.get(metric), right))
    return rows


def _paired(base: Sequence[float] | None, policy: Sequence[float] | None, right: bool) -> dict[str, Any]:
    """``right``: a 1 is an answer that is right; where it is the worse, nothing is lost or gained by it."""
    if not base or not policy or len(base) != len(policy):
        return {"reason": "lm-eval gives no figure of a document for it"}
    if right and set(base) | set(policy) <= {0.0, 1.0}:
        changed = sum(a != b for a, b in zip(base, policy, strict=True))
        found = flips.compare([b == 1.0 for b in base], [v == 1.0 for v in policy], [], changed)
        return {"flips": msgspec.to_builtins(found)}
    differences = [b - a for a, b in zip(base, policy, strict=True)]
    interval = block_interval(differences)
    return {
        "difference": sum(differences) / len(differences),
        "difference_ci95": None if interval is None else [interval.low, interval.high],
    }
