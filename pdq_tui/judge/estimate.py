"""How long the steps that are not done will take: from the times of the base and of the steps that are done. Estimates,
and shown as such; no figure of the report comes from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdq_tui.core.caveats import SECONDS_MIN
from pdq_tui.judge.abnormal import OUTPUT
from pdq_tui.judge.plan import STEPS, Spec

Json = Mapping[str, Any]


def left(spec: Spec, found: Mapping[str, Json]) -> dict[str, float]:
    """Seconds by step that is not done, in order; empty before the base was timed: nothing is known of this machine."""
    if "bottleneck" not in found:
        return {}
    by_step = {
        "selection": _selection,
        "small_quality": _small_quality,
        "confirmation": _confirmation,
        "quality": _quality,
        "tasks": _tasks,
        "load": _load,
        "abnormal": _abnormal,
        "soak": _soak,
    }
    return {
        step.name: by_step[step.name](spec, found)
        for step in STEPS
        if step.name not in found and step.name in by_step
    }


def _turns(arms: int) -> int:
    """Requests of a block: each arm twice, and the reference twice more as its own control."""
    return 2 * arms + 2


def _request_s(spec: Spec, found: Mapping[str, Json]) -> float:
    b = found["bottleneck"]
    ms: float = b["ttft_ms"] + (spec.workload.output_tokens - 1) * b["tpot_ms"]
    return ms / 1e3


def _contenders(spec: Spec, found: Mapping[str, Json]) -> int:
    there = found.get("conditions", {}).get("contenders")
    return len(spec.policies) if there is None else len(there)


def _kept(spec: Spec, found: Mapping[str, Json]) -> int:
    """How many policies are timed and scored: known after a selection, before it as many as may be."""
    for name in ("small_quality", "selection"):
        if name in found:
            return len(found[name]["uniform"]) + len(found[name]["staged"])
    return min(_contenders(spec, found), spec.plan.keep_uniform + spec.plan.keep_staged)


def _selection(spec: Spec, found: Mapping[str, Json]) -> float:
    arms = _contenders(spec, found)
    return (spec.plan.selection_blocks * _turns(arms) + arms) * _request_s(spec, found)


def _confirmation(spec: Spec, found: Mapping[str, Json]) -> float:
    arms = _kept(spec, found) + 1
    request_s = _request_s(spec, found)
    if "selection" in found:
        # What a turn took there, in the mix of policies.
        turns = spec.plan.selection_blocks * _turns(_contenders(spec, found))
        request_s = float(found["selection"]["seconds"]) / turns
    return max(SECONDS_MIN, spec.plan.blocks * _turns(arms) * request_s) + arms * request_s


def _small_quality(spec: Spec, found: Mapping[str, Json]) -> float:
    b, plan = found["bottleneck"], spec.plan
    assert spec.workload.prompt_tokens is not None
    prefill_ms = b["ttft_ms"] * plan.window_tokens / spec.workload.prompt_tokens
    window_ms = 3 * prefill_ms + 2 * plan.new_tokens * b["tpot_ms"]
    # The base scores as well.
    return float(plan.small_windows * (_kept(spec, found) + 1) * window_ms / 1e3)


def _quality(spec: Spec, found: Mapping[str, Json]) -> float:
    if "small_quality" not in found:
        return _small_quality(spec, found) * spec.plan.windows / spec.plan.small_windows
    small = found["small_quality"]
    seconds: float = small["seconds"]
    share = (_kept(spec, found) + 1) / (len(small["paths"]) + 1)
    return seconds * share * spec.plan.windows / spec.plan.small_windows


def _abnormal(spec: Spec, found: Mapping[str, Json]) -> float:
    """A dozen cases with a clean request each, the longest of them, and the engine that is started anew at the end."""
    b = found["bottleneck"]
    assert spec.workload.prompt_tokens is not None
    one = float(b["ttft_ms"] + OUTPUT * b["tpot_ms"]) / 1e3
    limit = float(found.get("conditions", {}).get("max_positions") or 0)
    longest = 2 * limit * float(b["ttft_ms"]) / 1e3 / spec.workload.prompt_tokens
    load = float(found.get("conditions", {}).get("seconds", 0.0))
    return 20 * one + (longest if longest <= spec.plan.longest_request_s else 0.0) + load / 2


def _tasks(spec: Spec, found: Mapping[str, Json]) -> float:
    """About 120 prompt tokens and 20 new ones a task, and the base answers as well; then it reads every answer once more."""
    b = found["bottleneck"]
    assert spec.workload.prompt_tokens is not None
    a_token = b["ttft_ms"] / spec.workload.prompt_tokens
    one = float(120 * a_token + 20 * b["tpot_ms"] + 140 * a_token) / 1e3
    return (len(spec.tasks) or spec.plan.tasks) * (_kept(spec, found) + 1) * one


def _load(spec: Spec, found: Mapping[str, Json]) -> float:
    """Two policies, each load as long as its arrivals and one round before and after; a server's step takes about twice as
    long as the engine's own."""
    loads = len(spec.plan.concurrency) + len(spec.plan.rates)
    rounds = sum(spec.plan.concurrency) + len(spec.plan.rates)
    return 2 * (loads * spec.plan.load_s + 2 * rounds * _request_s(spec, found))


def _soak(spec: Spec, found: Mapping[str, Json]) -> float:
    """As long as it was asked for, and one request that is under way at its end."""
    return (spec.soak_s or spec.plan.soak_s) + _request_s(spec, found)
