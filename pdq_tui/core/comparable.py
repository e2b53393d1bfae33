"""What forbids a word about the difference of two arms: one of them is invalid, or something beside the policy
differed. Which metrics it touches is told, so that the others keep their word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdq_tui.core.arms import invalid_reason
from pdq_tui.core.facts import Facts
from pdq_tui.core.metrics import METRICS, PRIMARY, RATIO_METRICS
from pdq_tui.core.policy import STAGES
from pdq_tui.core.protocol import ArmReady, Coverage


def stage_metrics(stage: str) -> tuple[str, ...]:
    """The judged metrics that ``stage`` has a part in: its own and the primary one."""
    return tuple(m for m in RATIO_METRICS if m == PRIMARY or METRICS[m].stage == stage)


def obstacles(facts: Facts, labels: Sequence[str]) -> dict[str, dict[str, str]]:
    """arm → metric → why nothing may be said of it against the first of ``labels``."""
    bad = {a: f"{a}: {why}" for a in labels if (why := invalid_reason(facts.of(a))) is not None}
    found = {a: runners_differ(facts.arms, labels[0], a) for a in labels[1:]}
    for arm in found:
        why = bad.get(arm) or bad.get(labels[0])
        if why is not None:
            found[arm] = dict.fromkeys(RATIO_METRICS, why)
    return {arm: reasons for arm, reasons in found.items() if reasons}


def runners_differ(arms: Mapping[str, ArmReady], reference: str, arm: str) -> dict[str, str]:
    """metric → why: the decoder layers of one arm are compiled, those of the other are not. No policy asks for that,
    and it can be the larger part of the difference."""
    found: dict[str, str] = {}
    for stage in STAGES:
        ran = [c.runner if (c := coverage(arms, a, stage)) else None for a in (reference, arm)]
        if None not in ran and ran[0] != ran[1]:
            told = f"{stage} layers of {reference} run {ran[0]}, of {arm} {ran[1]}"
            for metric in stage_metrics(stage):
                found.setdefault(metric, told)
    return found


def coverage(arms: Mapping[str, ArmReady], arm: str, stage: str) -> Coverage | None:
    ready = arms.get(arm)
    return ready.coverage.get(stage) if ready else None
