"""What a reader of the figures must know beside them: what was left out, what spoils them, what limits them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from pdq_tui.core.arms import arm_stats, counts, drift, invalid_reason, timed
from pdq_tui.core.comparable import runners_differ
from pdq_tui.core.evidence import flagged
from pdq_tui.core.facts import Facts, engine_gpus, other_load, samples_during, slowed
from pdq_tui.core.footprint import footprint
from pdq_tui.core.metrics import METRICS, counted, format_bytes
from pdq_tui.core.pairs import blocks_of, control_intervals, on_several
from pdq_tui.core.protocol import Request
from pdq_tui.core.stats import LOOKS

#: A change between the first and the last third of a run from here on is a warning.
DRIFT_WARNING: Final = 0.05
#: Below this share of the time explained by the hardware's limits the engine is measured, not the precision.
EXPLAINED_MIN: Final = 0.5
#: Of a CPU run: above this share of the machine for others (the app itself needs a few hundredths) it is not alone.
OTHER_LOAD: Final = 0.15
#: A judgement is planned on so much: fewer blocks or seconds give wide intervals, and autocorrelation is not seen.
BLOCKS_MIN: Final = LOOKS[0]
SECONDS_MIN: Final = 10.0


#: A GPU beside the engine's that is busy for more of the time is named.
NEIGHBOUR_LOAD: Final = 0.05


def warnings(facts: Facts, labels: Sequence[str]) -> list[str]:
    """Sentences about everything that a reader of the figures must know."""
    out: list[str] = []
    for label in labels:
        out += _arm_warnings(facts, label)
    out += _too_short(facts)
    out += _neighbours(facts, [r for label in labels for r in timed(facts.of(label))])
    out += _between(facts, labels)
    if facts.superseded:
        out.append(f"{facts.superseded} requests of an earlier workload or model are left out")
    out += [f"{a}: policy {r.policy} was refused: {r.reason}" for a, r in facts.refused.items()]
    for end in facts.ended[-1:]:
        if end.reason != "done" and end.reason != "stopped":
            out.append(f"the run ended early ({end.reason}) after {end.blocks} blocks")
    out += [f"{e.role} worker: {e.text}" for e in facts.exits if not e.expected]
    out += [f"{f.kind}: {f.message}" for f in facts.failures]
    out += [n.text for n in facts.notes if n.level in ("warn", "error")]
    out += facts.model.notes if facts.model else []
    return list(dict.fromkeys(out))


def _arm_warnings(facts: Facts, label: str) -> list[str]:
    requests = facts.of(label)
    ready = facts.arms.get(label)
    used = timed(requests)
    out = [f"{label}: {w}" for w in ready.warnings] if ready else []
    for f in ready.fallbacks if ready else ():
        times = f" in {f.modules} modules" if f.modules != 1 else ""
        out.append(f"{label}: {f.stage} of {f.module} runs {f.used} instead of {f.wanted}{times}: {f.reason}")
    pieces = max((r.prefill_pieces for r in used), default=1)
    if pieces > 1:
        cover = ready.coverage.get("prefill") if ready else None
        most = f" of at most {cover.rows} rows ({cover.rows_reason})" if cover and cover.rows else ""
        out.append(f"{label}: prompts ran in up to {pieces} pieces{most}: each reads all weights again")
    traced = facts.trace_of(label)
    out += [f"{label}: {text}" for text in flagged(traced.policy, traced.stages)] if traced else []
    alone = [r for r in requests if r.kind == "solo" and r.valid and not r.cancelled]
    beyond = footprint(ready, alone).exceeded if ready else None
    if beyond:
        out.append(
            f"{label}: took {format_bytes(beyond)} more memory than was predicted and set aside for it"
        )
    energy = facts.energy_of(label)
    if energy.flagged and energy.closure is not None:
        out.append(
            f"{label}: energy by stage does not add up: a mixed run differs by {energy.closure:+.1%} from its stages"
        )
    c = counts(requests)
    left = [
        (c.first_use, "first-use"),
        (c.invalid, "invalid"),
        (c.cancelled, "cancelled"),
    ]
    told = ", ".join(f"{n} {name}" for n, name in left if n)
    if told:
        out.append(f"{label}: not in the figures: {told} requests")
    bad = invalid_reason(requests)
    if bad is not None:
        out.append(f"{label}: invalid, may not be ranked: {bad}")
    made = sorted({n for r in used for n in r.output_tokens})
    if len(made) > 1:
        out.append(f"{label}: requests made {made[0]} to {made[-1]} tokens; E2E is over unequal work")
    spread = on_several(used)
    if spread is not None:
        where = facts.device.layers if facts.device else ""
        out.append(f"{label}: {spread}{f' ({where})' if where else ''}: figures are shown, nothing is judged")
    elif any(r.eager_launch_bound for r in used):
        out.append(f"{label}: eager: launch-bound, no verdict")
    out += [f"{label}: {text}" for text in _limits(facts, used)]
    for metric, value in drift(requests, facts.device, facts.model).items():
        if value is not None and abs(value) > DRIFT_WARNING:
            out.append(
                f"{label}: {metric} drifted by {value:+.1%} from the first to the last third of the run"
            )
    limits = slowed(facts, requests)
    if limits:
        out.append(f"{label}: the GPU was slowed down while it was measured: {', '.join(limits)}")
    others = other_load(facts, used)
    if others is not None and others > OTHER_LOAD and (facts.device is None or facts.device.kind == "cpu"):
        out.append(
            f"{label}: other processes had {others:.0%} of this machine's CPU time while it was measured: the times are"
            " theirs as well"
        )
    answers: dict[int, set[str]] = {}
    for r in used:
        if r.tokens_sha256:
            answers.setdefault(r.prompt, set()).add(r.tokens_sha256)
    unsteady = sum(len(s) > 1 for s in answers.values())
    if unsteady:
        out.append(f"{label}: {unsteady} of {len(answers)} prompts got different answers on repetition")
    return out


def _neighbours(facts: Facts, used: Sequence[Request]) -> list[str]:
    """Who else was on the engine's GPU, and what the GPUs beside it did, while ``used`` ran: all of them share power, links
    and the host."""
    ours = 0
    beside: dict[int, tuple[int, float]] = {}
    for sample in samples_during(facts, used):
        mine = engine_gpus(facts, sample)
        if not mine:
            continue
        ours = max(ours, *(g.other_processes or 0 for g in mine), 0)
        own = {g.index for g in mine}
        for gpu in (g for g in sample.gpus if g.index not in own):
            processes, load = beside.get(gpu.index, (0, 0.0))
            beside[gpu.index] = max(processes, gpu.other_processes or 0), max(load, gpu.gpu_util or 0.0)
    found = []
    if ours:
        found.append(
            f"{_processes(ours, 'other ')} had memory or time of the engine's GPU while it was measured"
        )
    for index, (processes, load) in sorted(beside.items()):
        if processes or load > NEIGHBOUR_LOAD:
            found.append(
                f"GPU {index} beside the engine's had {_processes(processes)} and was busy up to {load:.0%} of the time: it shares power, links and host"
            )
    return found


def _processes(count: int, which: str = "") -> str:
    return f"{count or 'no'} {which}process{'' if count == 1 else 'es'}"


def _between(facts: Facts, labels: Sequence[str]) -> list[str]:
    """What stands between the arms beside their policies."""
    found = []
    for arm in labels[1:]:
        for why in dict.fromkeys(runners_differ(facts.arms, labels[0], arm).values()):
            found.append(f"{why}: that is no difference of precision, and nothing is said of the times")
    if labels:
        mine = [r for a in labels for r in facts.of(a)]
        mine.sort(key=lambda r: (r.t_ns, r.request))
        control = control_intervals(mine, labels[0], device=facts.device, model=facts.model)
        for metric, interval in control.items():
            if interval is not None and interval.n >= BLOCKS_MIN and (interval.low > 0 or interval.high < 0):
                found.append(
                    f"{labels[0]} against itself differs in {METRICS[metric].short} by {math.expm1(interval.mean):+.1%}: "
                    "the place in a block matters here; nothing smaller than that is called a difference"
                )
    return found


def _too_short(facts: Facts) -> list[str]:
    """For runs in blocks: fewer than a judgement is planned on."""
    used = [r for r in facts.requests if r.kind == "blocks" and r.block is not None and not r.warmup]
    if not used:
        return []
    blocks = len(blocks_of(used))
    seconds = (max(r.host_end_ns for r in used) - min(r.host_start_ns for r in used)) / 1e9
    found = []
    if blocks < BLOCKS_MIN:
        found.append(f"{counted(blocks, 'block')}: judgements are planned on {BLOCKS_MIN}")
    if 0 < seconds < SECONDS_MIN:
        found.append(f"{seconds:.1f} s were measured: judgements are planned on {SECONDS_MIN:g} s")
    return found


def _limits(facts: Facts, used: Sequence[Request]) -> list[str]:
    """Where the engine, the cache or the census speaks and not the memory or the arithmetic of the device."""
    stats = arm_stats(used, facts.device, facts.model, ("prefill_explained", "decode_explained", "mbu"))
    shares = {stage: stats[f"{stage}_explained"].median for stage in ("prefill", "decode")}
    low = [
        f"{v * 100:.0f} % of {stage}" for stage, v in shares.items() if v is not None and v < EXPLAINED_MIN
    ]
    found = []
    if low:
        found.append(
            f"engine-limited: the hardware's limit explains {', '.join(low)}; two precisions compared here are two "
            "kernels compared"
        )
    mbu, step = stats["mbu"].median, max((r.bytes_per_step or 0 for r in used), default=0)
    if mbu is not None and mbu > 1:
        cache = facts.device.last_level_cache_bytes if facts.device else None
        fits = cache is not None and step <= cache
        why = (
            "what a step reads fits in the last-level cache"
            if fits
            else "the census or the read peak is wrong"
        )
        found.append(f"{METRICS['mbu'].short} is {mbu * 100:.0f} %: {why}")
    return found
