"""From what the steps found to one word, its gates, its reasons and its limits.

GO              faster than every uniform that was kept, quality held, and nothing that decides is untested.
ONLY-IF         the same for a stated region, or while a stated dimension is untested.
NO-GO           quality fails, or some uniform is as fast or faster.
UNSURE          an interval holds the limit.
NOT INFORMATIVE the model cannot answer the question.
ENGINE-LIMITED  less than half of an arm's time that decides is explained by the hardware: kernels were compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pdq_tui.core.caveats import EXPLAINED_MIN
from pdq_tui.core.metrics import PRIMARY
from pdq_tui.core.stats import BETTER, UNSURE
from pdq_tui.judge import breakeven, quality, soak
from pdq_tui.judge.plan import Spec, not_tested

GO: Final = "GO"
ONLY_IF: Final = "ONLY-IF"
NO_GO: Final = "NO-GO"
UNSURE_WORD: Final = "UNSURE"
NOT_INFORMATIVE: Final = "NOT INFORMATIVE"
ENGINE_LIMITED: Final = "ENGINE-LIMITED"

HOLDS: Final = "Holds for this device, this engine and version, these kernels."

Json = Mapping[str, Any]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """``staged``: the policy that it is about, None where none came so far. ``because``: sentences, the deciding first.
    ``to_change``: what would have to be otherwise for a better word."""

    word: str
    staged: str | None
    against: list[str]
    gates: list[quality.Gate]
    because: list[str]
    to_change: list[str]
    region: str | None
    not_tested: dict[str, str]
    holds: str = HOLDS


def verdict(spec: Spec, found: Mapping[str, Json]) -> Verdict:
    """``found``: what the steps said, by name; the last may be one that stopped the protocol."""
    each = verdicts(spec, found)
    stop = _stopped(found)
    return each[0] if each else _early(str(stop or "the protocol was not finished"), found)


def verdicts(spec: Spec, found: Mapping[str, Json]) -> list[Verdict]:
    """One a confirmed candidate, the best word first; none before all of them have their timing and their quality."""
    if _stopped(found) is not None or "confirmation" not in found or "quality" not in found:
        return []
    order = (GO, ONLY_IF, ENGINE_LIMITED, UNSURE_WORD, NOT_INFORMATIVE, NO_GO)
    each = [_one(spec, found, name) for name in found["confirmation"]["staged"]]
    return sorted(each, key=lambda v: order.index(v.word))


def _stopped(found: Mapping[str, Json]) -> Any:
    """What ended the protocol early; None where nothing did."""
    return next((step["stop"] for step in found.values() if step.get("stop")), None)


def _early(stop: str, found: Mapping[str, Json]) -> Verdict:
    failed = found.get("small_quality", {}).get("failed", [])
    word = NO_GO if found.get("bottleneck", {}).get("stop") or failed else UNSURE_WORD
    gates = [
        msgspec.convert(g, quality.Gate) for g in found.get("small_quality", {}).get("gates", {}).values()
    ]
    return Verdict(
        word=word,
        staged=None,
        against=[],
        gates=gates,
        because=[stop],
        to_change=[],
        region=None,
        not_tested=not_tested(found),
    )


def _one(spec: Spec, found: Mapping[str, Json], name: str) -> Verdict:
    timing = found["confirmation"]
    uniform = [u for u in timing["uniform"] if u != name]
    speed = [
        r
        for r in timing["ratios"]
        if r["arm"] == name and r["metric"] == PRIMARY and r["reference"] in uniform
    ]
    quality_gate = msgspec.convert(found["quality"]["gates"][name], quality.Gate)
    speed_gates = [_speed_gate(r) for r in speed]
    weak = _unexplained(timing["arms"], [name, *uniform])
    explained = _explained_gate(weak)
    answers = _task_gates(found, name)
    worse = [g for g in answers if g.result == quality.FAIL]
    stability = [_drift_gate(found), _abnormal_gate(found)]
    unstable = [g for g in stability if g.result == quality.FAIL]
    because: list[str] = []
    lost = [g for g in speed_gates if g.result == quality.FAIL]
    open_ = [g for g in speed_gates if g.result == quality.UNSURE]
    region = None
    if quality_gate.result == quality.FAIL:
        word = NO_GO
        because.append(
            f"quality: {quality_gate.measured} nats on the decode path, limit {quality_gate.limit}"
        )
    elif worse:
        word = NO_GO
        because += [f"{g.name}: {g.measured}" for g in worse]
    elif unstable:
        word = NO_GO
        because += [f"{g.name}: {g.measured}" for g in unstable]
    elif weak:
        word = ENGINE_LIMITED
        because.append(
            f"the hardware explains less than {EXPLAINED_MIN:.0%} of the time in {len(weak)} of "
            f"{2 * (1 + len(uniform))} stages of the policies that decide, so that kernels were compared"
        )
    elif quality_gate.result == quality.NOT_INFORMATIVE:
        word = NOT_INFORMATIVE
        because.append(f"quality cannot be judged: {quality_gate.reason}")
    elif lost:
        region = _region(found, name, uniform)
        word = ONLY_IF if region else NO_GO
    elif open_ or quality_gate.result == quality.UNSURE:
        word = UNSURE_WORD
    else:
        untested = not_tested(found)
        word = ONLY_IF if untested else GO
        region = "one request or batch at a time, as measured" + (
            f"; not tested: {', '.join(untested)}" if untested else ""
        )
    because += [f"{g.name}: {g.measured}" for g in (*lost, *open_)]
    because += [f"{g.name}: {g.measured}" for g in speed_gates if g.result == quality.PASS]
    if word == ENGINE_LIMITED:
        because += _projections(timing["arms"], spec.workload.output_tokens, name, uniform)
    if word not in (NO_GO, NOT_INFORMATIVE) and quality_gate.result == quality.NOT_INFORMATIVE:
        because.append(f"quality cannot be judged: {quality_gate.reason}")
    if quality_gate.result == quality.UNSURE:
        because.append(
            f"quality: {quality_gate.measured} nats, limit {quality_gate.limit}: {quality_gate.reason}"
        )
    return Verdict(
        word=word,
        staged=name,
        against=uniform,
        gates=[
            *speed_gates,
            quality_gate,
            *answers,
            _memory_gate(found, name, uniform),
            *stability,
            explained,
        ],
        because=because,
        to_change=[
            *_to_change(lost, open_, quality_gate, weak),
            *(f"{g.name}: {g.reason or g.measured}" for g in (*worse, *unstable)),
            *(f"{what} has to be tested" for what in not_tested(found)),
        ],
        region=region,
        not_tested=not_tested(found),
    )


def _to_change(
    lost: Sequence[quality.Gate], open_: Sequence[quality.Gate], held: quality.Gate, weak: Sequence[str]
) -> list[str]:
    told = []
    if weak:
        told.append('kernels that come nearer to the hardware\'s limit: the gate "engine" names them')
    told += [f"{g.name}: another traffic, or a faster stage ({g.measured})" for g in lost]
    told += [f"{g.name}: a narrower interval, from more blocks or a quieter machine" for g in open_]
    if held.result == quality.FAIL:
        told.append(f"quality: a format with less error, or a wider limit than {held.limit}")
    elif held.result == quality.UNSURE:
        told.append("quality: a narrower interval, from more windows (--plan full)")
    elif held.result == quality.NOT_INFORMATIVE:
        told.append("quality: a checkpoint that was not stored in 4 bits")
    return told


def _speed_gate(r: Json) -> quality.Gate:
    """Faster than this uniform, by more than the noise and the least effect."""
    ci = r["ci95"]
    shown = "n/a" if r["ratio"] is None else f"{(r['ratio'] - 1) * 100:+.1f} %"
    if ci:
        shown += f" [{(ci[0] - 1) * 100:+.1f}, {(ci[1] - 1) * 100:+.1f}]"
    result = {BETTER: quality.PASS, UNSURE: quality.UNSURE}.get(r["judgement"], quality.FAIL)
    return quality.Gate(
        name=f"speed: E2E against {r['reference']}",
        limit="faster",
        measured=f"{shown} ({r['judgement']})",
        result=result,
        reason=r["reason"],
    )


def _memory_gate(found: Mapping[str, Json], name: str, uniform: Sequence[str]) -> quality.Gate:
    """Shown, not judged: whether extra bytes matter is the user's to say."""
    weights = found["conditions"]["weights"]
    mine = weights[name]["stored_bytes"]
    least = min(weights[u]["stored_bytes"] for u in uniform)
    return quality.Gate(
        name="memory: weights against the smallest uniform that was kept",
        limit="shown",
        measured=f"{mine / 2**20:.0f} MiB against {least / 2**20:.0f} MiB ({mine / least - 1:+.0%})",
        result=quality.SHOWN,
        reason=None if mine <= least else "what it takes more is not there for KV cache",
    )


def _task_gates(found: Mapping[str, Json], name: str) -> list[quality.Gate]:
    """Answers lost, and their length. One that the base is too weak for stays open, and is named as not settled."""
    gates = found.get("tasks", {}).get("policies", {}).get(name, {}).get("gates")
    if gates is not None:
        return [msgspec.convert(g, quality.Gate) for g in gates]
    why = not_tested(found).get("task set")
    return [
        quality.Gate(
            name="quality: drop on the task set",
            limit="by the gate's preset",
            measured="n/a",
            result=quality.NOT_TESTED,
            reason=why,
        )
    ]


def _drift_gate(found: Mapping[str, Json]) -> quality.Gate:
    """A short soak can fail; only an hours-long one can pass."""
    name, limit = "stability: drift of time, memory and answers over hours", "no drift over 1 %"
    body = found.get("soak")
    if body is None:
        return quality.Gate(
            name=name,
            limit=limit,
            measured="n/a",
            result=quality.NOT_TESTED,
            reason=not_tested(found)["soak"],
        )
    troubles = body["troubles"]
    shown = "none" if not troubles else f"{len(troubles)} found"
    result = quality.FAIL if troubles else quality.PASS if body["hours_long"] else quality.NOT_TESTED
    return quality.Gate(
        name=name,
        limit=limit,
        measured=f"{shown} in {soak.words(body['asked_s'])}",
        result=result,
        reason="; ".join([*troubles, *([body["unsettled"]] if body["unsettled"] else [])]) or None,
    )


def _abnormal_gate(found: Mapping[str, Json]) -> quality.Gate:
    """Each case ended in a stated way, and the request behind it was right."""
    name, limit = "stability: abnormal inputs", "each ends as stated, the next request is right"
    if "abnormal" not in found:
        why = not_tested(found)["abnormal inputs"]
        return quality.Gate(name=name, limit=limit, measured="n/a", result=quality.NOT_TESTED, reason=why)
    rows = found["abnormal"]["abnormal"]
    asked = [r for r in rows if r["result"] != quality.NOT_TESTED]
    failed = [r for r in asked if r["result"] == quality.FAIL]
    left = [f"{r['case']} was not tested: {r['reason']}" for r in rows if r not in asked]
    bad = [
        f"{r['case']}: {r['state']}"
        + ("" if r["next_right"] else ", the next request was not right")
        + (f" ({r['reason']})" if r["reason"] else "")
        for r in failed
    ]
    return quality.Gate(
        name=name,
        limit=limit,
        measured=f"{len(asked) - len(failed)} of {len(asked)} cases",
        result=quality.FAIL if failed else quality.PASS,
        reason="; ".join([*bad, *left]) or None,
    )


def _projections(arms: Sequence[Json], tokens: int, name: str, uniform: Sequence[str]) -> list[str]:
    """What the ratio would be if the hardware explained the same share of every arm's stages: the ratio of the hardware's
    limits, Σ explained share × time. No measurement, and called so."""
    limits = {arm["label"]: _limit_ms(arm, tokens) for arm in arms}
    told = []
    for u in uniform:
        ours, theirs = limits.get(name), limits.get(u)
        if ours and theirs:
            told.append(
                f"projection at equal explained share, not measured: E2E {ours / theirs - 1:+.0%} against {u}"
            )
    return told


def _limit_ms(arm: Json, tokens: int) -> float | None:
    """The hardware's limit of one request, prefill and ``tokens`` − 1 steps; None where a part is missing."""
    prefill, decode = arm["prefill"], arm["decode"]
    parts = [prefill.get("ttft_ms"), prefill.get("explained"), decode.get("tpot_ms"), decode.get("explained")]
    if not all(parts):
        return None
    ttft, share_p, tpot, share_d = (float(part["median"]) for part in parts)
    return ttft * share_p + (tokens - 1) * tpot * share_d


def _unexplained(arms: Sequence[Json], names: Sequence[str]) -> list[str]:
    found = []
    for arm in arms:
        if arm["label"] not in names:
            continue
        for stage in ("prefill", "decode"):
            share = (arm[stage].get("explained") or {}).get("median")
            if share is not None and share < EXPLAINED_MIN:
                kernels = ", ".join(arm[stage].get("kernels") or []) or "kernels unknown"
                found.append(f"{arm['label']} {stage} {share:.0%} ({kernels})")
    return found


def _explained_gate(weak: Sequence[str]) -> quality.Gate:
    return quality.Gate(
        name="engine: share of each stage's time that the hardware explains",
        limit=f"≥ {EXPLAINED_MIN:.0%} in every arm that decides",
        measured="all above" if not weak else f"{len(weak)} below",
        result=quality.PASS if not weak else quality.FAIL,
        reason="; ".join(weak) or None,
    )


def _region(found: Mapping[str, Json], name: str, uniform: Sequence[str]) -> str | None:
    """The answer lengths at which it beats every kept uniform, measured or extrapolated; None where there are none."""
    cells = [c for c in found["confirmation"]["map"] if c["staged"] == name and c["uniform"] in uniform]
    outputs = sorted({c["output"] for c in cells})
    won = [
        n
        for n in outputs
        if all(c["ci95"] and c["ci95"][1] < 0 for c in cells if c["output"] == n)
        and len([c for c in cells if c["output"] == n]) == len(uniform)
    ]
    if not won:
        return None
    far = any(c["extrapolated"] for c in cells if c["output"] in won)
    tail = " (some of them extrapolated)" if far else ""
    return f"answers of {', '.join(map(str, won))} tokens{tail}"


def break_even_sentences(found: Mapping[str, Json]) -> list[str]:
    """One sentence a pair of staged and uniform."""
    told = []
    for b in found.get("confirmation", {}).get("break_even", []):
        at = ""
        if b["side"] in (breakeven.ABOVE, breakeven.BELOW) and b["output"] is not None:
            ci = b["ci95"]
            spread = f" [{ci[0]:.0f}, {ci[1]:.0f}]" if ci else ""
            at = f" than {b['output']:.0f}{spread} tokens"
        told.append(f"{b['staged']} against {b['uniform']}: {b['side']}{at}")
    return told
