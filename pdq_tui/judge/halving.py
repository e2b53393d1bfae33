"""Policies that differ by groups of layers: made from what each group costs and gains, and halved by what they measure.

Pure: numbers in, numbers out. A *unit* is one group of layers in one format in one stage, everything else in the model's own
dtype. Costs of a whole policy are first taken as the sums of its units' (time is separable; divergence is not, whole policies of
the demo model measured half of the sum): estimates, good enough to say what is worth measuring, and never reported as found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

#: Label of the model's own dtype.
DENSE: Final = "bf16"


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """kld: nats that it costs along the decode path; ms: what it adds to a request's end-to-end time (negative: saves).
    key: of its packed bytes, which a stage shares with the other where both are alike; bytes: how many."""

    group: int
    stage: str
    format: str
    kld: float
    ms: float
    key: str
    bytes: int


#: Formats of a group by stage: (prefill, decode).
Pair = tuple[str, str]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """``pairs``: of each group, in order. Estimated: nats, ms of a request, bytes of both stages' packed weights."""

    pairs: tuple[Pair, ...]
    kld: float
    ms: float
    bytes: int

    @property
    def uniform(self) -> bool:
        return is_uniform(self.pairs)


def is_uniform(pairs: Iterable[Iterable[str]]) -> bool:
    """One format in all groups and both stages?"""
    return len({fmt for pair in pairs for fmt in pair}) == 1


def composed(pairs: Sequence[Pair], units: Mapping[tuple[int, str, str], Unit]) -> Candidate:
    """The sums over groups; bytes that both stages of a group read count once."""
    kld = ms = 0.0
    size = 0
    for group, pair in enumerate(pairs):
        both = [units[group, stage, fmt] for stage, fmt in zip(("prefill", "decode"), pair, strict=True)]
        kld += sum(u.kld for u in both)
        ms += sum(u.ms for u in both)
        size += sum({u.key: u.bytes for u in both}.values())
    return Candidate(pairs=tuple(pairs), kld=kld, ms=ms, bytes=size)


def candidates(units: Iterable[Unit], groups: int) -> list[Candidate]:
    """Each once: all groups alike in every pair of formats; and, for rising prices of a nat and of a byte, what is cheapest
    group by group (the lower convex hull of time, divergence and bytes, since a policy's costs are its groups' sums)."""
    by = {(u.group, u.stage, u.format): u for u in units}
    pairs = [
        (a, b)
        for a in dict.fromkeys(u.format for u in by.values() if u.stage == "prefill")
        for b in dict.fromkeys(u.format for u in by.values() if u.stage == "decode")
    ]
    alike = [composed([pair] * groups, by) for pair in pairs]
    found = {c.pairs: c for c in alike}
    spread = [
        max(values) - min(values) for values in zip(*((c.ms, c.kld, c.bytes) for c in alike), strict=True)
    ]
    ms = spread[0] or 1.0
    for nat in _prices(ms, spread[1]):
        for byte in _prices(ms, spread[2]):
            best = []
            for group in range(groups):
                best.append(min(pairs, key=lambda pair: _priced(by, group, pair, nat, byte)))
            found.setdefault(tuple(best), composed(best, by))
    return list(found.values())


def _prices(ms: float, spread: float) -> list[float]:
    """ms a unit of something whose whole range is ``spread``: from nothing to far more than all of the time."""
    return [0.0] if spread <= 0 else [0.0, *(ms / spread * 2.0**k for k in range(-6, 7))]


def _priced(
    units: Mapping[tuple[int, str, str], Unit], group: int, pair: Pair, nat: float, byte: float
) -> tuple[float, float]:
    both = [units[group, stage, fmt] for stage, fmt in zip(("prefill", "decode"), pair, strict=True)]
    size = sum({u.key: u.bytes for u in both}.values())
    kld = sum(u.kld for u in both)
    return sum(u.ms for u in both) + nat * kld + byte * size, kld


def worth_measuring(
    found: Sequence[Candidate], most_kld: float, most_bytes: int | None, places: int, kept_bytes: int = 0
) -> tuple[list[Candidate], dict[tuple[Pair, ...], str]]:
    """The ``places`` fastest by estimate of those that may keep to the limits, with every uniform one of them, since the winner
    is held against the best of those; and why each other one is not measured. Divergence is estimated roughly, so that only
    twice the limit rules out; bytes are counted, with ``kept_bytes`` that no policy touches."""
    left: dict[tuple[Pair, ...], str] = {}
    may = []
    for c in found:
        size = c.bytes + kept_bytes
        if most_bytes is not None and size > most_bytes:
            left[c.pairs] = f"estimated {_mib(size)} of weights, over the limit of {_mib(most_bytes)}"
        elif c.kld > 2 * most_kld:
            left[c.pairs] = f"estimated KLD {c.kld:.4f}, {c.kld / most_kld:.1f} times the limit"
        else:
            may.append(c)
    may.sort(key=lambda c: (c.ms, c.kld))
    for rank, c in enumerate(may[places:], places + 1):
        if not c.uniform or c.pairs[0][0] == DENSE:
            left[c.pairs] = f"estimated to be number {rank} in time; {places} are measured"
    return [c for c in may if c.pairs not in left], left


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one candidate measured in a round. kld: mean; kld_ci95: over windows, None where there is none; bytes: weights of
    both stages and what no policy touches; e2e_ms: median of its requests."""

    name: str
    kld: float | None
    kld_ci95: tuple[float, float] | None
    nonfinite: int
    bytes: int
    e2e_ms: float


def over_limit(r: Result, most_kld: float, most_bytes: int | None) -> str | None:
    """Why it cannot be chosen whatever else is measured: certain only where the interval's lower end is over the limit."""
    if r.nonfinite or r.kld is None:
        return "logits are not finite"
    if most_bytes is not None and r.bytes > most_bytes:
        return f"{_mib(r.bytes)}, over the limit of {_mib(most_bytes)}"
    low = r.kld if r.kld_ci95 is None else r.kld_ci95[0]
    if low > most_kld:
        shown = f"{r.kld:.4f}" if r.kld_ci95 is None else f"{r.kld:.4f} [{low:.4f}, {r.kld_ci95[1]:.4f}]"
        return f"KLD {shown}, over the limit of {most_kld:g}"
    return None


def safe(r: Result, most_kld: float) -> bool:
    """Whether its interval lies under the limit."""
    return r.kld_ci95 is not None and r.kld_ci95[1] <= most_kld


def halve(
    results: Sequence[Result], most_kld: float, most_bytes: int | None, least: int = 3
) -> tuple[list[str], dict[str, str]]:
    """One round: who goes on, fastest first, and why each other one does not. Half of those within the limits go on, at
    least ``least``; the fastest whose interval lies under the KLD limit always, so that candidates of whom that is not yet
    sure cannot drive out all others."""
    out: dict[str, str] = {}
    within = []
    for r in results:
        why = over_limit(r, most_kld, most_bytes)
        if why is None:
            within.append(r)
        else:
            out[r.name] = why
    within.sort(key=lambda r: r.e2e_ms)
    places = max(least, math.ceil(len(within) / 2))
    kept = within[:places]
    surest = next((r for r in within if safe(r, most_kld)), None)
    if surest is not None and surest not in kept:
        kept.append(surest)
    for r in within:
        if r not in kept:
            out[r.name] = (
                f"{r.e2e_ms:.1f} ms a request, {kept[0].name} took {kept[0].e2e_ms:.1f}: in the slower half"
            )
    return [r.name for r in kept], out


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
