"""What else could explain a result, and what it does not cover: each confounder and each risk with its state and evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pdq_tui.core.caveats import EXPLAINED_MIN
from pdq_tui.judge.diary import Entry
from pdq_tui.judge.plan import RISKS, Spec, not_tested

Json = Mapping[str, Any]

EXCLUDED: Final = "excluded"
PARTLY: Final = "partly"
OPEN: Final = "not excluded"
NOT_REACHED: Final = "not reached"
TESTED: Final = "tested"
NOT_TESTED: Final = "not tested"
#: CPU time of others, as a share, from which a measurement is not taken to have had the machine for itself.
OTHER_LOAD: Final = 0.05


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """``about``: what was done about it, or why it matters. ``state``: one word of those above; ``evidence``: what it rests on."""

    name: str
    about: str
    state: str
    evidence: str


def confounders(spec: Spec, found: Mapping[str, Json]) -> list[Row]:
    timing = found.get("confirmation")
    return [
        _resources(timing),
        _cache(spec),
        _kernels(timing),
        _data(spec, found),
        _concurrency(spec, found),
        _clocks(timing),
        Row(
            name="versions",
            about="all policies in one process: one set of libraries, one driver",
            state=EXCLUDED if timing else NOT_REACHED,
            evidence="the conditions above hold for every arm",
        ),
        Row(
            name="order of steps",
            about="policies take turns in random blocks; the steps themselves run in one order, in one engine process",
            state=OPEN,
            evidence="weights and compiled programs are those of the selection",
        ),
    ]


def _resources(timing: Json | None) -> Row:
    about = "one process and the same threads for all; policies take turns in blocks"
    name = "allocation of resources"
    if timing is None:
        return Row(name=name, about=about, state=NOT_REACHED, evidence="the confirmation run was not reached")
    other = timing.get("other_load")
    if other is None:
        return Row(name=name, about=about, state=OPEN, evidence="other load was not seen by the sensors")
    return Row(
        name=name,
        about=about,
        state=EXCLUDED if other < OTHER_LOAD else PARTLY,
        evidence=f"others had {other:.0%} of the CPU time (median)",
    )


def _cache(spec: Spec) -> Row:
    kinds = sorted({policy.kv.label for policy in spec.policies})
    one = len(kinds) == 1
    return Row(
        name="cache policy",
        about="each request fills a cache of its own; nothing is reused between requests",
        state=EXCLUDED if one else OPEN,
        evidence=f"KV cache {', '.join(kinds)}" + (" in all policies" if one else ", by policy"),
    )


def _kernels(timing: Json | None) -> Row:
    about = "each format runs the kernel that is first for its rows; the hardware's share of each stage's time is measured"
    shares: list[tuple[float, str]] = [
        (float(share), f"{arm['label']} {stage}")
        for arm in (timing or {}).get("arms", [])
        for stage in ("prefill", "decode")
        if (share := (arm[stage].get("explained") or {}).get("median")) is not None
    ]
    if not shares:
        why = "the confirmation run was not reached" if timing is None else "no peaks were measured"
        state = NOT_REACHED if timing is None else OPEN
        return Row(name="kernels", about=about, state=state, evidence=why)
    least, where = min(shares)
    return Row(
        name="kernels",
        about=about,
        state=PARTLY if least >= EXPLAINED_MIN else OPEN,
        evidence=f"explained shares from {least:.0%} ({where}) to {max(shares)[0]:.0%}",
    )


def _data(spec: Spec, found: Mapping[str, Json]) -> Row:
    lengths = {(s.prompt, s.output) for s in spec.traffic}
    return Row(
        name="data size",
        about=f"prompts of {spec.workload.prompt_tokens} tokens from the built-in texts, different ones in turn",
        state=OPEN,
        evidence=f"one prompt length was timed; the traffic has {len(lengths)} pair{'' if len(lengths) == 1 else 's'} of lengths",
    )


def _concurrency(spec: Spec, found: Mapping[str, Json]) -> Row:
    about = f"timed at batch {spec.workload.batch}, one request or batch at a time; load by another engine beside it"
    points = found.get("load", {}).get("points", [])
    if not points:
        return Row(name="concurrency model", about=about, state=OPEN, evidence="no load test")
    most = max((p["concurrency"] or 0 for p in points), default=0)
    arms = {p["arm"] for p in points}
    return Row(
        name="concurrency model",
        about=about,
        state=PARTLY,
        evidence=f"{len(arms)} policies loaded up to concurrency {most}, at equal total memory",
    )


def _clocks(timing: Json | None) -> Row:
    about = "mirrored blocks cancel a linear drift; the control shows what is left"
    if timing is None:
        return Row(
            name="clocks and drift",
            about=about,
            state=NOT_REACHED,
            evidence="the confirmation run was not reached",
        )
    drifted = sum("drifted" in w for w in timing.get("warnings", []))
    floor = (timing.get("noise_floor") or {}).get("e2e_ms")
    control = "no control" if floor is None else f"the control differed from itself by up to {floor:.1%}"
    return Row(
        name="clocks and drift",
        about=about,
        state=EXCLUDED if not drifted and floor is not None else PARTLY,
        evidence=f"{drifted} figures drifted by more than 5 %; {control}",
    )


# -- risks -------------------------------------------------------------------------------------------------------------------


def risks(spec: Spec, found: Mapping[str, Json], logged: Sequence[Entry] = ()) -> list[Row]:
    """Those that a step tests, with what it found, and those that no single evaluation can settle."""
    left = not_tested(found)
    rows = [
        Row(
            name=name,
            about=why,
            state=NOT_TESTED
            if name in left and not found.get(step or "")
            else PARTLY
            if name in left
            else TESTED,
            evidence=left.get(name, "") if name in left and left[name] != why else _seen(name, found),
        )
        for name, (why, step) in RISKS.items()
    ]
    minutes = sum(entry.minutes for entry in logged)
    return [
        _sample(spec, found),
        Row(
            name="environment",
            about="another machine, driver or version has other kernels and other bottlenecks",
            state=NOT_TESTED,
            evidence=f"{found.get('conditions', {}).get('device', {}).get('name', 'one device')} alone; `recheck` repeats it",
        ),
        Row(
            name="other models",
            about="error and shares of time differ from model to model",
            state=NOT_TESTED,
            evidence=f"{spec.model} alone",
        ),
        *rows,
        Row(
            name="serving engine",
            about="kernels and schedulers of vLLM, SGLang and TensorRT-LLM are others",
            state=NOT_TESTED,
            evidence="what it would take there was read, not run",
        ),
        Row(
            name="engineering cost",
            about="a gain has to pay for who deploys and keeps it",
            state=PARTLY if logged else NOT_TESTED,
            evidence=f"{minutes:g} min logged"
            if logged
            else "settings and steps are counted; no work was logged",
        ),
    ]


def _sample(spec: Spec, found: Mapping[str, Json]) -> Row:
    about = "prompts, windows and tasks may not be yours"
    paths = (found.get("quality") or {}).get("paths", {})
    windows = next((path["kld"]["windows"] for of in paths.values() for path in of), 0)
    asked = found.get("tasks", {}).get("asked", 0)
    if not windows and not asked:
        return Row(name="sample bias", about=about, state=NOT_TESTED, evidence="no quality was measured")
    return Row(
        name="sample bias",
        about=about,
        state=PARTLY,
        evidence=f"{windows} held-out windows of built-in texts, {asked} tasks ({spec.tasks_name})",
    )


def _seen(name: str, found: Mapping[str, Json]) -> str:
    if name == "task set" and "tasks" in found:
        return f"{found['tasks']['asked']} tasks"
    if name == "load" and "load" in found:
        return f"{len(found['load']['points'])} loads"
    if name == "soak" and "soak" in found:
        return f"{found['soak']['requests']} requests"
    if name == "abnormal inputs" and "abnormal" in found:
        return f"{len(found['abnormal']['abnormal'])} cases"
    return "no finished step looks at it"
