"""Paired blocks: from requests to block differences, ratios and judgements.

The unit is one block. In ABBA, d = ½·Σ ln B − ½·Σ ln A; a linear drift cancels inside the block. The reference run
again as its own rival (``control``) says how large a difference means nothing here, today.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pdq_tui.core.arms import unequal_work
from pdq_tui.core.metrics import METRICS, MIRRORS, PRIMARY, RATIO_METRICS, Of
from pdq_tui.core.protocol import DeviceInfo, ModelInfo, Request
from pdq_tui.core.stats import (
    ALPHA,
    BETTER,
    LOOK_ALPHA,
    LOOKS,
    UNSURE,
    WORSE,
    Interval,
    Ratio,
    block_interval,
    careful,
    holm_alphas,
    judge,
    threshold,
    two_sided_p,
    unsure_reason,
)

#: One block's requests by contender: (arm, is the control).
Block = dict[tuple[str, bool], list[Request]]


def counted(request: Request) -> bool:
    """Whether a request's times may enter a figure."""
    left_out = request.warmup or request.kind == "warmup" or request.first_use or request.cancelled
    return request.valid and not left_out


def blocks_of(requests: Sequence[Request]) -> list[Block]:
    """The blocks in their order. A loop that is started again counts from block 0 again: a step back in (block, slot)
    begins a new series, so that two starts are never paired with each other."""
    found: list[Block] = []
    last: tuple[int, int] | None = None
    for r in requests:
        if r.block is None or r.slot is None or r.kind in ("solo", "warmup"):
            continue
        here = (r.block, r.slot)
        if last is None or here <= last or r.block != last[0]:
            found.append({})
        last = here
        if counted(r):  # a slot that does not count leaves its contender one short, and so its pairs out
            found[-1].setdefault((r.arm, r.control), []).append(r)
    return found


def block_difference(
    block: Block,
    metric: str,
    reference: tuple[str, bool],
    arm: tuple[str, bool],
    device: DeviceInfo | None = None,
    model: ModelInfo | None = None,
) -> float | None:
    """Mean ln of ``arm`` minus mean ln of ``reference`` in one block; None unless both took part twice (as often as each
    other) and every value is there and positive."""
    sides = _sides(block, reference, arm)
    logs = None if sides is None else _logs(sides, METRICS[metric].of, device, model)
    return None if logs is None else logs[0] - logs[1]


_Sides = tuple[Sequence[Request], Sequence[Request]]


def _sides(block: Block, reference: tuple[str, bool], arm: tuple[str, bool]) -> _Sides | None:
    ours, theirs = block.get(arm, ()), block.get(reference, ())
    return (ours, theirs) if 2 <= len(ours) == len(theirs) else None


def _logs(
    sides: _Sides, of: Of, device: DeviceInfo | None, model: ModelInfo | None
) -> tuple[float, float] | None:
    means = []
    for side in sides:
        product = 1.0
        for r in side:
            value = of(r, device, model)
            if value is None or not 0 < value < math.inf:
                return None
            product *= value
        # One logarithm a side, unless the product of more than a few large or small values leaves what a float holds.
        if 1e-300 < product < 1e300:
            means.append(math.log(product) / len(side))
        else:
            means.append(math.fsum(math.log(of(r, device, model) or 1.0) for r in side) / len(side))
    return means[0], means[1]


def differences(
    blocks: Sequence[Block],
    metric: str,
    reference: str,
    arm: str,
    *,
    control: bool = False,
    device: DeviceInfo | None = None,
    model: ModelInfo | None = None,
) -> list[float]:
    """Block differences of ``arm`` against ``reference``; with ``control`` of the reference against itself."""
    rival = (reference, True) if control else (arm, False)
    found = [block_difference(b, metric, (reference, False), rival, device, model) for b in blocks]
    return [d for d in found if d is not None]


def ratios(
    requests: Sequence[Request],
    reference: str,
    arms: Sequence[str],
    min_effect: float = 0.01,
    provisional: bool = False,
    *,
    device: DeviceInfo | None = None,
    model: ModelInfo | None = None,
    metrics: Sequence[str] = RATIO_METRICS,
    conditions: Mapping[str, Mapping[str, str]] | None = None,
    floors: Mapping[str, float | None] | None = None,
) -> list[Ratio]:
    """arm / reference for each arm but the reference and each metric, from paired blocks.

    Only requests of the policy that an arm follows now (its last request's) are paired. ``ci95`` is the plain 95 %
    interval; the word follows Holm's levels for all but the primary metric. ``provisional``: live figures, whose words
    are decided only at the planned looks; a decided word stands as long as the present figures do not speak against
    it. Blocks of an endless loop are always judged so, since it is a person who looks and stops. ``conditions``:
    arm → metric → what differed while it was measured, which makes that word "unsure". ``floors``: metric → noise
    floor (fraction) of the same run, for arms neither of which was run again as its own rival.
    """
    current = _current_policy(requests)
    blocks = blocks_of(current)
    provisional = provisional or any(r.kind == "loop" and r.block is not None for r in current)
    rows: list[Ratio] = []
    for arm in arms:
        if arm == reference:
            continue
        told = (conditions or {}).get(arm, {})
        eager = _launch_bound(current, reference, arm)
        unequal = None if eager else _unequal(current, reference, arm)
        blocked = {m: told.get(m) or eager or (unequal if m == PRIMARY else None) for m in metrics}
        rows += _arm_ratios(
            blocks, reference, arm, min_effect, provisional, device, model, metrics, blocked, floors or {}
        )
    return rows


def _given(floor: float | None) -> Interval | None:
    if floor is None:
        return None
    reach = math.log1p(floor)
    return Interval(0.0, -reach, reach, 0, "of the run")


def noise_floor(
    requests: Sequence[Request],
    reference: str,
    *,
    device: DeviceInfo | None = None,
    model: ModelInfo | None = None,
    metrics: Sequence[str] = RATIO_METRICS,
) -> dict[str, float | None]:
    """How far from 1 the A/A control's 95 % interval reaches, by metric, as a fraction; None where there is none."""
    found = control_intervals(requests, reference, device=device, model=model, metrics=metrics)
    return {m: None if i is None else math.expm1(i.reach) for m, i in found.items()}


def control_intervals(
    requests: Sequence[Request],
    reference: str,
    *,
    device: DeviceInfo | None = None,
    model: ModelInfo | None = None,
    metrics: Sequence[str] = RATIO_METRICS,
) -> dict[str, Interval | None]:
    """The reference against itself, ln units, by metric; None below two blocks with a control."""
    blocks = blocks_of(_current_policy(requests))
    return {
        m: block_interval(
            differences(blocks, m, reference, reference, control=True, device=device, model=model)
        )
        for m in metrics
    }


def _current_policy(requests: Sequence[Request]) -> list[Request]:
    now = {r.arm: r.policy_digest for r in requests}
    return [r for r in requests if r.policy_digest == now[r.arm]]


def _launch_bound(requests: Sequence[Request], reference: str, arm: str) -> str | None:
    """An eager run on a GPU, and a model that lies on several, forbid every word."""
    mine = [r for r in requests if r.arm in (reference, arm) and r.block is not None and counted(r)]
    return on_several(mine) or ("eager: launch-bound" if any(r.eager_launch_bound for r in mine) else None)


def on_several(requests: Sequence[Request]) -> str | None:
    """Why nothing is judged of these: the model lay on several devices, whose hand-overs are part of every time, and the
    peaks are of one. None where it did not."""
    most = max((r.devices for r in requests), default=1)
    return f"layers on {most} devices" if most > 1 else None


def _unequal(requests: Sequence[Request], reference: str, arm: str) -> str | None:
    """Unequal output lengths forbid one about end-to-end time."""
    mine = [r for r in requests if r.block is not None and counted(r)]
    return unequal_work(*([r for r in mine if r.arm == a] for a in (reference, arm)))


def _arm_ratios(
    blocks: Sequence[Block],
    reference: str,
    arm: str,
    min_effect: float,
    provisional: bool,
    device: DeviceInfo | None,
    model: ModelInfo | None,
    metrics: Sequence[str],
    blocked: Mapping[str, str | None],
    floors: Mapping[str, float | None],
) -> list[Ratio]:
    whole = [sides for b in blocks if (sides := _sides(b, (reference, False), (arm, False))) is not None]
    logs = {
        m: [pair for sides in whole if (pair := _logs(sides, METRICS[m].of, device, model)) is not None]
        for m in metrics
    }
    # Whichever side was run again as its own rival: the reach is the same seen from either.
    rival = next((a for a in (reference, arm) if any((a, True) in b for b in blocks)), None)
    control = {
        m: []
        if rival is None
        else differences(blocks, m, rival, rival, control=True, device=device, model=model)
        for m in metrics
    }
    seen = Seen(
        {m: [ours - theirs for ours, theirs in pairs] for m, pairs in logs.items()},
        control,
        {m: _given(f) for m, f in floors.items()},
        min_effect,
    )
    looked = _live_words(seen) if provisional else {m: (w, None) for m, w in words(seen, ALPHA).items()}
    rows = []
    for metric in metrics:
        d = seen.found[metric]
        interval, floor, delta = block_interval(d), seen.floor(metric), seen.delta(metric)
        (word, look), reason = looked[metric], blocked[metric]
        if reason is not None or interval is None:
            word = UNSURE
            reason = reason or f"{len(d)} block{'' if len(d) == 1 else 's'}"
        elif look is not None and not _stands(word, interval, delta, METRICS[metric].better):
            word, reason = UNSURE, f"{word} at {look} blocks, but no longer at {len(d)}"
        elif provisional and look is None:
            reason = _until_next_look(len(d)) or unsure_reason(interval, delta, min_effect)
        elif word == UNSURE:
            reason = unsure_reason(interval, delta, min_effect)
        rows.append(
            Ratio(
                reference=reference,
                arm=arm,
                metric=metric,
                ratio=None if not d else math.exp(math.fsum(d) / len(d)),
                ci95=None if interval is None else (math.exp(interval.low), math.exp(interval.high)),
                judgement=word,
                blocks=len(d),
                threshold=delta,
                noise_floor=None if floor is None else math.expm1(floor.reach),
                provisional=provisional and look is None and len(d) < LOOKS[-1],
                reason=reason,
                level=None if not d else math.exp(statistics.fmean(theirs for _, theirs in logs[metric])),
                decided_at=None if word == UNSURE else look,
            )
        )
    return rows


@dataclass(frozen=True)
class Seen:
    """By metric: the block differences of two arms, those of a side against itself, and the run's own floor for where
    no side was."""

    found: Mapping[str, Sequence[float]]
    control: Mapping[str, Sequence[float]]
    given: Mapping[str, Interval | None]
    min_effect: float

    def until(self, look: int) -> Seen:
        """What was known after ``look`` blocks; without the metrics that have fewer."""
        found = {m: d[:look] for m, d in self.found.items() if len(d) >= look}
        return replace(self, found=found, control={m: self.control[m][:look] for m in found})

    def floor(self, metric: str) -> Interval | None:
        return block_interval(self.control[metric]) or self.given.get(metric)

    def delta(self, metric: str) -> float:
        return threshold(self.min_effect, self.floor(metric))


def _stands(word: str, interval: Interval, delta: float, better: str | None) -> bool:
    """Whether the figures beside a word that an earlier look decided still say the same. Taking a word back never
    raises the rate of false alarms."""
    return judge(interval, delta, better) == word


def _until_next_look(blocks: int) -> str | None:
    """ "12 of 20 blocks"; None where all looks are behind."""
    ahead = [look for look in LOOKS if look > blocks]
    return f"{blocks} of {ahead[0]} blocks" if ahead else None


def _live_words(seen: Seen) -> dict[str, tuple[str, int | None]]:
    """The words at the planned looks and the look: the first that decides a metric decides it."""
    decided: dict[str, tuple[str, int | None]] = dict.fromkeys(seen.found, (UNSURE, None))
    for look in LOOKS:
        for metric, word in words(seen.until(look), LOOK_ALPHA).items():
            if decided[metric][0] == UNSURE and word != UNSURE:
                decided[metric] = word, look
    return decided


def words(seen: Seen, alpha: float) -> dict[str, str]:
    """Judgement of each metric: the primary at ``alpha``, the others at Holm's levels. A rate that is a time's
    reciprocal is the same hypothesis as the time and is judged at its level."""
    found: dict[str, str] = {}

    def one(metric: str, level: float) -> tuple[str, Interval | None]:
        interval, delta = block_interval(seen.found[metric], level), seen.delta(metric)
        return careful(judge(interval, delta, METRICS[metric].better), delta, seen.min_effect), interval

    if PRIMARY in seen.found:
        found[PRIMARY] = one(PRIMARY, alpha)[0]
    mirrored = {m: of for m, of in MIRRORS.items() if m in seen.found and of in seen.found}
    rest = [m for m in seen.found if m != PRIMARY and m not in mirrored]
    p = [two_sided_p(block_interval(seen.found[m]), seen.found[m]) for m in rest]
    levels = holm_alphas(p, alpha)
    stopped = False
    for i in sorted(range(len(rest)), key=lambda i: p[i]):
        # Holm stops at the first metric whose interval holds 0; none after it may be called different.
        _, interval = one(rest[i], levels[i])
        stopped = stopped or interval is None or interval.low <= 0 <= interval.high
        for metric in (rest[i], *(m for m, of in mirrored.items() if of == rest[i])):
            word, _ = one(metric, levels[i])
            found[metric] = UNSURE if stopped and word in (BETTER, WORSE) else word
    return found
