"""Two arms on the same tasks: what changed both ways, and whether that is a loss. Paired throughout."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

import msgspec

from pdq_tui.core.stats import quantile
from pdq_tui.judge import quality
from pdq_tui.judge.quality import Gate

#: The largest drop of the solved share that a gate lets pass: a choice of this project, one step a preset.
DROPS: Final = {"strict": 0.01, "standard": 0.02, "loose": 0.05}
#: A base that solves less tells nothing about what a policy loses.
FLOOR: Final = 0.30
#: Generated length as a fraction of the base's.
LENGTHS: Final = (0.9, 1.1)
_Z: Final = 1.959964
_POWER_Z: Final = 0.841621
_RESAMPLES: Final = 1000


class Flips(msgspec.Struct, frozen=True, kw_only=True):
    """n tasks that both answered. base, policy: solved shares; lost, gained: tasks that only one side solved.

    drop        base − policy and its 95 % interval for paired shares (Agresti and Min, Statist. Med. 24, 2005).
    mcnemar_p   exact two-sided binomial test of lost against gained.
    detectable  the smallest drop that so many tasks show with 80 % power at α = 0.05, by the flips that were seen.
    length      generated tokens, policy / base, with a bootstrap interval over tasks; None where the base made none.
    changed     answers whose text is another.
    """

    n: int
    base: float
    policy: float
    lost: int
    gained: int
    drop: float
    drop_ci95: tuple[float, float]
    mcnemar_p: float
    detectable: float
    changed: int
    length: float | None
    length_ci95: tuple[float, float] | None


def compare(
    base: Sequence[bool],
    policy: Sequence[bool],
    lengths: Sequence[tuple[int, int]],
    changed: int,
) -> Flips:
    """In one order of tasks, at least one. lengths: tokens of (base, policy)."""
    n = len(base)
    lost = sum(b and not p for b, p in zip(base, policy, strict=True))
    gained = sum(p and not b for b, p in zip(base, policy, strict=True))
    ratio, interval = _length(lengths)
    return Flips(
        n=n,
        base=sum(base) / n,
        policy=sum(policy) / n,
        lost=lost,
        gained=gained,
        drop=(lost - gained) / n,
        drop_ci95=_paired(lost, gained, n),
        mcnemar_p=mcnemar(lost, gained),
        detectable=(_Z + _POWER_Z) * math.sqrt(max(lost + gained, 1)) / n,
        changed=changed,
        length=ratio,
        length_ci95=interval,
    )


def mcnemar(lost: int, gained: int) -> float:
    """P of as uneven a split of ``lost + gained`` fair coins, or a more uneven one; 1 where nothing flipped."""
    n, least = lost + gained, min(lost, gained)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(least + 1)) / 2.0**n)


def _paired(lost: int, gained: int, n: int) -> tuple[float, float]:
    b, c, m = lost + 0.5, gained + 0.5, n + 2
    middle, spread = (b - c) / m, math.sqrt((b + c) - (b - c) ** 2 / m) / m
    return max(-1.0, middle - _Z * spread), min(1.0, middle + _Z * spread)


def _length(pairs: Sequence[tuple[int, int]]) -> tuple[float | None, tuple[float, float] | None]:
    whole = sum(b for b, _ in pairs)
    if not whole:
        return None, None
    ratio = sum(p for _, p in pairs) / whole
    if len(pairs) < 2:
        return ratio, None
    rng = random.Random(0)
    found = []
    for _ in range(_RESAMPLES):
        picked = [pairs[rng.randrange(len(pairs))] for _ in pairs]
        below = sum(b for b, _ in picked)
        if below:
            found.append(sum(p for _, p in picked) / below)
    found.sort()
    return ratio, (quantile(found, 0.025), quantile(found, 0.975))


def task_gate(f: Flips, limit: float) -> Gate:
    """Non-inferiority: the upper bound of the drop must lie under ``limit``."""
    low, high = f.drop_ci95
    reason = f"{f.n} tasks show a drop of {f.detectable:.1%} or more"
    if f.base < FLOOR:
        result = quality.NOT_INFORMATIVE
        reason = f"the base solves {f.base:.0%}; below {FLOOR:.0%} a loss cannot show"
    elif high <= limit:
        result = quality.PASS
    elif low > limit or (f.mcnemar_p < 0.05 and f.drop > limit):
        result, reason = quality.FAIL, f"McNemar p = {f.mcnemar_p:.3g}"
    else:
        result = quality.UNSURE
    return Gate(
        name="quality: drop on the task set",
        limit=f"≤ {limit:.0%} (upper bound)",
        measured=f"{f.drop:+.1%} [{low:+.1%}, {high:+.1%}] of {f.n}; {f.lost} lost, {f.gained} gained",
        result=result,
        reason=reason,
    )


def length_gate(f: Flips) -> Gate:
    low, high = LENGTHS
    shown, result = "n/a", quality.UNSURE
    reason: str | None = "the base made no tokens"
    if f.length is not None:
        shown, reason = f"{f.length:.0%}", "one task: no interval"
        if f.length_ci95 is not None:
            a, b = f.length_ci95
            shown += f" [{a:.0%}, {b:.0%}]"
            inside, outside = low <= a and b <= high, b < low or a > high
            result = quality.PASS if inside else quality.FAIL if outside else quality.UNSURE
            reason = None if inside or outside else "the interval holds a limit"
    return Gate(
        name="quality: generated length against the base's",
        limit=f"{low:.0%} to {high:.0%}",
        measured=shown,
        result=result,
        reason=reason,
    )
