"""What each step of the protocol does: it measures through an evaluation's engine and returns what it found as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdq_tui.core import corpus
from pdq_tui.core import protocol as p
from pdq_tui.core.analysis import collect, run_document
from pdq_tui.core.arms import arm_stats
from pdq_tui.core.caveats import SECONDS_MIN
from pdq_tui.core.comparable import obstacles
from pdq_tui.core.facts import other_load
from pdq_tui.core.metrics import PRIMARY
from pdq_tui.core.pairs import noise_floor, ratios
from pdq_tui.core.stats import BETTER, UNSURE, WORSE, Ratio
from pdq_tui.errors import PdqError, UsageError
from pdq_tui.host.conversation import Conversation, RefusedError
from pdq_tui.judge import breakeven, operation, traffic
from pdq_tui.judge import quality as judged
from pdq_tui.judge.plan import Spec

if TYPE_CHECKING:
    from pdq_tui.judge.evaluation import Evaluation

Json = dict[str, Any]

#: Answer lengths of the map, in tokens.
MAP_OUTPUTS: Final = (16, 64, 256, 1024, 4096)
METRICS: Final = (PRIMARY, "ttft_ms", "prefill_ms", "tpot_ms")
#: What tells of prefill and of decode.
STAGE_METRICS: Final = ("ttft_ms", "tpot_ms")


def conditions(ev: Evaluation) -> Json:
    refused: dict[str, str] = {}

    def do(_talk: Conversation) -> None:
        for policy in ev.spec.policies:
            try:
                ev.arm(policy)
            except RefusedError as error:
                refused[policy.name] = str(error)

    events = ev.talk(do)
    if ev.spec.base.name in refused:
        raise PdqError(f"the base cannot run here: {refused[ev.spec.base.name]}")
    doc = run_document(ev.meta, events, ev.spec.base.name, ev.spec.min_effect)
    model = collect(events).model
    arms = doc.pop("arms")
    for key in ("ratios", "noise_floor", "warnings"):
        doc.pop(key)
    return doc | {
        "contenders": [arm["label"] for arm in arms],
        "refused": refused,
        "weights": {arm["label"]: arm["weights"] for arm in arms},
        "kv": {arm["label"]: arm["kv"] for arm in arms},
        "fallbacks": {arm["label"]: arm["fallbacks"] for arm in arms if arm["fallbacks"]},
        "operation": {
            arm["label"]: {
                "storage": arm["storage"],
                "kernels": {s: arm[s]["kernels"] for s in ("prefill", "decode")},
                "formats": {s: arm[s]["formats"] for s in ("prefill", "decode")},
            }
            for arm in arms
        },
        "max_positions": model.max_positions if model else None,
        "windows": _windows(ev, model),
        "stop": None if len(arms) > 1 else "nothing but the base can run here",
    }


def _windows(ev: Evaluation, model: p.ModelInfo | None) -> dict[str, int]:
    """Tokens of a window by path: the plan's, or as many as the model has positions for. Raises UsageError for a model
    that is too short for the forced tokens alone, before anything is timed."""
    plan = ev.spec.plan
    # A window is prepared as a prompt that one token follows.
    most = (model.max_positions if model and model.max_positions else math.inf) - 1
    found = {
        "prefill": int(min(plan.window_tokens, most)),
        "decode": int(min(plan.window_tokens, most - plan.new_tokens)),
        "new_tokens": plan.new_tokens,
    }
    if min(found.values()) < 2:
        raise UsageError(
            f"this model's {int(most) + 1} positions are too few for {plan.new_tokens} forced tokens behind a prompt",
            "--plan quick forces fewer" if plan.name != "quick" else None,
        )
    return found


def bottleneck(ev: Evaluation) -> Json:
    w, base = ev.spec.workload, ev.spec.base
    events = ev.blocks([base], ev.spec.plan.selection_blocks, ev.spec.seed + 1, solo=False)
    facts = collect(events)
    stats = arm_stats(facts.of(base.name), facts.device, facts.model)
    figures = {
        m: stats[m].median
        for m in ("ttft_ms", "tpot_ms", "prefill_mfu", "mbu", "prefill_explained", "decode_explained")
    }
    missing = {f"{m}_reason": stats[m].reason for m, value in figures.items() if value is None}
    ttft, tpot = figures["ttft_ms"], figures["tpot_ms"]
    if ttft is None or tpot is None:
        raise PdqError("the base gave no time of a stage", stats["tpot_ms"].reason)
    assert w.prompt_tokens is not None
    share = traffic.share(ev.spec.traffic, w.prompt_tokens, w.output_tokens, ttft, tpot)
    least = ev.spec.min_effect
    stop = None
    if share.most_gain < least:
        stop = (
            f"no staging can gain more than {share.most_gain:.1%} on this traffic: "
            f"{share.prefill:.1%} of its time is prefill"
        )
    return {
        "base": base.name,
        "traffic": ev.spec.traffic_name,
        **msgspec.to_builtins(share),
        **figures,
        **missing,
        "measured": {"prompt": w.prompt_tokens, "output": w.output_tokens, "batch": w.batch},
        "stop": stop,
    }


def selection(ev: Evaluation) -> Json:
    names = ev.found["conditions"]["contenders"]
    contenders = ev.by_name(names)
    events = ev.blocks(contenders, ev.spec.plan.selection_blocks, ev.spec.seed + 2, solo=False)
    uniform = [c.name for c in contenders if c in ev.spec.uniform]
    staged = [c.name for c in contenders if c in ev.spec.staged]
    e2e = {name: medians(events, name)[PRIMARY] for name in names}
    best = min(uniform, key=lambda n: e2e[n])
    against = _ratios(ev, events, best, names)
    kept_uniform = [best] + [
        n for n in sorted(uniform, key=lambda n: e2e[n]) if n != best and _may_be_as_good(against[n][PRIMARY])
    ]
    base = ev.spec.base.name
    kept = kept_uniform[: ev.spec.plan.keep_uniform]
    ranked = sorted(staged, key=lambda n: e2e[n])[: ev.spec.plan.keep_staged]
    reasons = {
        n: f"{against[n][PRIMARY].ratio - 1:+.1%} against {best}"  # type: ignore[operator]
        for n in names
        if n not in (*kept, *ranked) and against.get(n) and against[n][PRIMARY].ratio is not None
    }
    return {
        "best_uniform": best,
        "e2e_ms": e2e,
        "ratios": [_ratio(r) for rows in against.values() for r in rows.values()],
        "uniform": kept,
        "staged": ranked,
        "also_measured": [base] if base not in kept else [],
        "left_out": reasons,
        "stop": None if ranked else "no staged policy can run here",
    }


def small_quality(ev: Evaluation) -> Json:
    names = [*ev.found["selection"]["uniform"], *ev.found["selection"]["staged"]]
    paths = _scored(ev, names, ev.spec.plan.small_windows, corpus.SELECTION)
    gates = {n: msgspec.to_builtins(_gate(ev, by)) for n, by in paths.items()}
    failed = [n for n, g in gates.items() if g["result"] == judged.FAIL]
    staged = [n for n in ev.found["selection"]["staged"] if n not in failed]
    return {
        "paths": {n: msgspec.to_builtins(by) for n, by in paths.items()},
        "gates": gates,
        "failed": failed,
        "uniform": [n for n in ev.found["selection"]["uniform"] if n not in failed] or [ev.spec.base.name],
        "staged": staged,
        "stop": None if staged else "no staged policy keeps the base's answers: nothing is left to time",
    }


def confirmation(ev: Evaluation) -> Json:
    small, selection = ev.found["small_quality"], ev.found["selection"]
    uniform, staged = small["uniform"], small["staged"]
    first = selection["best_uniform"] if selection["best_uniform"] in uniform else uniform[0]
    names = [first, *(n for n in uniform if n != first), *staged, *selection["also_measured"]]
    names = list(dict.fromkeys(names))
    policies = sorted(ev.by_name(names), key=lambda policy: names.index(policy.name))
    events = ev.blocks(policies, ev.spec.plan.blocks, ev.spec.seed + 4, solo=True, min_seconds=SECONDS_MIN)
    doc = run_document(ev.meta, events, first, ev.spec.min_effect)
    facts = collect(events)
    requests = facts.requests
    lines = [breakeven.line(requests, s, u) for s in staged for u in uniform]
    return {
        "reference": first,
        "uniform": uniform,
        "staged": staged,
        "arms": doc["arms"],
        "blocks": doc["workload"]["blocks"],
        "clocks": doc["device"]["clocks"],
        "other_load": other_load(facts, facts.requests),
        "noise_floor": doc["noise_floor"],
        "warnings": doc["warnings"],
        "ratios": [
            _ratio(r)
            for u in uniform
            for rows in _ratios(ev, events, u, [u, *staged]).values()
            for r in rows.values()
        ],
        "map": [cell for line in lines for cell in _map(line, ev.spec)],
        "break_even": [
            {"staged": line.staged, "uniform": line.uniform, **msgspec.to_builtins(line.break_even())}
            for line in lines
        ],
        "crossover": _crossover(ev, events, uniform),
        "stop": None,
    }


def quality(ev: Evaluation) -> Json:
    small = ev.found["small_quality"]
    names = [*small["uniform"], *small["staged"]]
    paths = _scored(ev, names, ev.spec.plan.windows, corpus.CONFIRMATION)
    return {
        "paths": {n: msgspec.to_builtins(by) for n, by in paths.items()},
        "gates": {n: msgspec.to_builtins(_gate(ev, by)) for n, by in paths.items()},
        "stop": None,
    }


# -- parts of them -----------------------------------------------------------------------------------------------------


def _ratios(
    ev: Evaluation, events: Sequence[Any], reference: str, names: Sequence[str]
) -> dict[str, dict[str, Ratio]]:
    """By arm and metric. δ is also that of the run's own control, where neither side of a pair is the control."""
    facts = collect(events)
    found: dict[str, dict[str, Ratio]] = {}
    control = facts.started[-1].arms[0]
    rows = ratios(
        facts.requests,
        reference,
        names,
        ev.spec.min_effect,
        device=facts.device,
        model=facts.model,
        metrics=METRICS,
        conditions=obstacles(facts, [reference, *(n for n in names if n != reference)]),
        floors=noise_floor(facts.requests, control, device=facts.device, model=facts.model, metrics=METRICS),
    )
    for row in rows:
        found.setdefault(row.arm, {})[row.metric] = row
    return found


def _crossover(ev: Evaluation, events: Sequence[Any], uniform: Sequence[str]) -> list[Json]:
    """Each kept uniform against the base, by stage. ``crosses``: True where one stage is better and the other worse, False
    where both are better or both worse or the same, None where a stage cannot be told."""
    base = ev.spec.base.name
    found = []
    for name, rows in _ratios(ev, events, base, [base, *uniform]).items():
        words = {rows[m].judgement for m in STAGE_METRICS}
        found.append(
            {
                "uniform": name,
                "base": base,
                **{key: _ratio(rows[m]) for key, m in zip(("prefill", "decode"), STAGE_METRICS, strict=True)},
                "crosses": None if UNSURE in words else words == {BETTER, WORSE},
            }
        )
    return found


def _scored(ev: Evaluation, names: Sequence[str], windows: int, text: str) -> dict[str, list[judged.Path]]:
    base, lengths = ev.spec.base, ev.found["conditions"]["windows"]
    found: dict[str, list[judged.Path]] = {}

    def do(talk: Conversation) -> None:
        for policy in (base, *ev.by_name(names)):
            ev.arm(policy)
        for path, forced in (("prefill", "text"), ("decode", "text"), ("decode", "sample")):
            scored = talk.score(
                p.Score(
                    arms=list(names),
                    base=base.name,
                    path=path,
                    forced=forced,
                    windows=windows,
                    prompt_tokens=lengths[path],
                    new_tokens=lengths["new_tokens"] if path == "decode" else 0,
                    text=text,
                    seed=ev.spec.seed,
                    batch=ev.spec.workload.batch,
                )
            )
            for name in names:
                found.setdefault(name, []).append(judged.summarize([s for s in scored if s.arm == name]))

    ev.talk(do)
    return found


def _gate(ev: Evaluation, paths: Sequence[judged.Path]) -> judged.Gate:
    """The worse of the two decode paths decides."""
    limit = judged.GATES[ev.spec.gate]
    decode = [path for path in paths if path.path == "decode"]
    worst = max(decode, key=lambda path: (path.nonfinite, path.kld.ci95[1] if path.kld.ci95 else 0.0))
    return judged.gate(worst, limit, uninformative=_uninformative(ev, worst.policy))


def _uninformative(ev: Evaluation, name: str) -> str | None:
    """4-bit formats on weights that came from a 4-bit file say nothing about 4-bit formats."""
    notes = ev.found["conditions"]["model"].get("notes", [])
    policy = ev.by_name([name])[0]
    four = any(policy.stage(stage).weights == "int4" for stage in ("prefill", "decode"))
    from_four = next((note for note in notes if "4 bits" in note), None)
    return f"4-bit formats on this model: {from_four}" if four and from_four else None


def medians(events: Sequence[Any], arm: str) -> dict[str, float]:
    """Medians of one arm's times. Raises PdqError where one is missing."""
    facts = collect(events)
    stats = arm_stats(facts.of(arm), facts.device, facts.model, METRICS)
    missing = next((m for m in METRICS if stats[m].median is None), None)
    if missing is not None:
        raise PdqError(f"{arm} gave no {missing}: {stats[missing].reason}")
    return {m: float(stats[m].median or 0.0) for m in METRICS}


def _may_be_as_good(ratio: Ratio) -> bool:
    """Whether its interval overlaps the best's."""
    return ratio.ci95 is None or ratio.ci95[0] <= 1.0


def _ratio(r: Ratio) -> Json:
    return {
        "reference": r.reference,
        "arm": r.arm,
        "metric": r.metric,
        "ratio": r.ratio,
        "ci95": list(r.ci95) if r.ci95 else None,
        "judgement": r.judgement,
        "reason": r.reason,
        "blocks": r.blocks,
    }


def _map(line: breakeven.Line, spec: Spec) -> list[Json]:
    cells = []
    if not line.a:
        return []
    for output in sorted({*MAP_OUTPUTS, spec.workload.output_tokens}):
        delta, ci = line.delta_ms(output)
        cells.append(
            {
                "staged": line.staged,
                "uniform": line.uniform,
                "prompt": spec.workload.prompt_tokens,
                "batch": spec.workload.batch,
                "output": output,
                "delta_ms": delta,
                "ci95": list(ci) if ci else None,
                "extrapolated": output > line.longest,
            }
        )
    return cells


#: By the name of ``plan.STEPS``.
DO: Final[dict[str, Callable[[Evaluation], Json]]] = {
    "conditions": conditions,
    "bottleneck": bottleneck,
    "selection": selection,
    "small_quality": small_quality,
    "confirmation": confirmation,
    "quality": quality,
    "tasks": operation.tasks,
    "load": operation.load,
    "abnormal": operation.abnormal,
    "soak": operation.soak,
    "logs": operation.log_analysis,
}
