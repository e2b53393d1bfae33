"""From windows to figures of quality: means with intervals over windows, by position, and the gate.

The unit is a window: errors inside one hang together, and taken token by token an interval comes out about three times
too narrow.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from pdq_tui.core.protocol import Scored
from pdq_tui.core.stats import quantile

_RESAMPLES: Final = 1000
#: Upper limits of the mean decode-path KLD in nats, from llama.cpp's published ladder for Llama-3-8B (q6_K, q5_K_M, q4_K_M).
GATES: Final = {"strict": 0.0055, "standard": 0.011, "loose": 0.031}

PASS: Final = "pass"
FAIL: Final = "fail"
UNSURE: Final = "unsure"
NOT_INFORMATIVE: Final = "not informative"
#: Gates without a limit of their own: the person weighs them.
SHOWN: Final = "shown"
NOT_TESTED: Final = "not tested"


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over windows. ``ci95``: bootstrap over windows, None below two. ``reason`` where there is no value."""

    value: float | None
    ci95: tuple[float, float] | None = None
    windows: int = 0
    reason: str | None = None


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """One policy along one path. ``kld`` in nats; ``same_top1`` a fraction; ``ppl_ratio`` = exp(mean NLL difference).
    ``texts``: of each window's token ids, 12 hex digits of SHA-256."""

    policy: str
    path: str
    forced: str
    kld: Estimate
    kld_median: float | None
    kld_p99: float | None
    kld_max: float | None
    same_top1: Estimate
    ppl_ratio: Estimate
    positions: int
    nonfinite: int
    by_position: list[tuple[int, Estimate]]
    texts: list[str] = []


def summarize(windows: Sequence[Scored]) -> Path:
    """Of one arm, one path, one kind of forced tokens; at least one window."""
    first = windows[0]
    values = sorted(v for w in windows for v in w.kld if v is not None)
    by_position: dict[int, list[Scored]] = defaultdict(list)
    for w in windows:
        for i in range(len(w.kld)):
            by_position[w.first + i].append(w)
    return Path(
        policy=first.policy,
        path=first.path,
        forced=first.forced,
        kld=over_windows(windows, lambda w: w.kld),
        kld_median=quantile(values, 0.5) if values else None,
        kld_p99=quantile(values, 0.99) if len(values) >= 1000 else None,
        kld_max=values[-1] if values else None,
        same_top1=over_windows(windows, lambda w: [float(s) for s in w.same_top1]),
        ppl_ratio=_exp(over_windows(windows, _nll_differences)),
        positions=len(values),
        nonfinite=sum(v is None for w in windows for v in w.kld),
        by_position=[
            (at, over_windows(there, lambda w, at=at: [w.kld[at - w.first]]))  # type: ignore[misc]
            for at, there in sorted(by_position.items())
        ],
        texts=[w.text_sha256 for w in windows],
    )


def _nll_differences(w: Scored) -> list[float | None]:
    return [
        None if ours is None or base is None else ours - base
        for ours, base in zip(w.nll, w.base_nll, strict=True)
    ]


def over_windows(windows: Sequence[Scored], of: Callable[[Scored], Sequence[float | None]]) -> Estimate:
    """The mean of all positions, and a percentile bootstrap over whole windows. A window with a missing value has none."""
    there = [[v for v in of(w) if v is not None] for w in windows if None not in of(w) and of(w)]
    if not there:
        return Estimate(value=None, reason="logits are not finite" if windows else "nothing was scored")
    sums, sizes = [sum(v) for v in there], [len(v) for v in there]
    value = sum(sums) / sum(sizes)
    if len(there) < 2:
        return Estimate(value=value, windows=len(there), reason="one window: no interval")
    rng = random.Random(0)
    means = []
    for _ in range(_RESAMPLES):
        picked = [rng.randrange(len(there)) for _ in there]
        means.append(sum(sums[i] for i in picked) / sum(sizes[i] for i in picked))
    means.sort()
    return Estimate(value=value, ci95=(quantile(means, 0.025), quantile(means, 0.975)), windows=len(there))


def _exp(e: Estimate) -> Estimate:
    return msgspec.structs.replace(
        e,
        value=None if e.value is None else math.exp(e.value),
        ci95=None if e.ci95 is None else (math.exp(e.ci95[0]), math.exp(e.ci95[1])),
    )


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """``result``: pass, fail, unsure, not informative, shown, not tested."""

    name: str
    limit: str
    measured: str
    result: str
    reason: str | None = None


def gate(path: Path, limit: float, *, uninformative: str | None = None) -> Gate:
    """Non-inferiority on the decode path's mean KLD: the upper bound must lie under ``limit``. ``uninformative``: why no
    answer can be given for this policy on this model."""
    low, high = path.kld.ci95 or (None, None)
    if path.nonfinite or path.kld.value is None or low is None or high is None:
        result, reason = (FAIL, "logits are not finite") if path.nonfinite else (UNSURE, path.kld.reason)
    elif uninformative is not None:
        result, reason = NOT_INFORMATIVE, uninformative
    elif high <= limit:
        result, reason = PASS, None
    else:
        result, reason = (FAIL, None) if low > limit else (UNSURE, "the interval holds the limit")
    shown = "n/a" if path.kld.value is None else f"{path.kld.value:.4f}"
    if low is not None and high is not None:
        shown += f" [{low:.4f}, {high:.4f}]"
    return Gate(
        name="quality: KLD on the decode path, nats",
        limit=f"≤ {limit:g} (upper bound)",
        measured=shown,
        result=result,
        reason=reason,
    )
