"""What the figures of a page are drawn from beside its numbers: the requests of each arm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdq_tui.core.analysis import collect, timed
from pdq_tui.core.protocol import Request
from pdq_tui.store.compare import Comparison
from pdq_tui.store.snapshot import Snapshot


class Samples(NamedTuple):
    """``requests`` are those that count, in the order in which they ran. ``run``: times of different runs have no common
    beginning, and are drawn from their own."""

    label: str
    run: str
    requests: Sequence[Request]


def of_snapshots(comparison: Comparison, snapshots: Iterable[Snapshot]) -> list[Samples]:
    """One a column of ``comparison``, in its order."""
    by_id = {s.id: s for s in snapshots}
    sides = (comparison.reference, *comparison.candidates)
    return [Samples(side.label, side.run, timed(by_id[side.id].requests)) for side in sides]


def of_snapshot(snapshot: Snapshot) -> list[Samples]:
    return [Samples(snapshot.label, snapshot.run, timed(snapshot.requests))]


def of_events(events: Iterable[object], run: str, labels: Sequence[str]) -> list[Samples]:
    """One an arm of ``labels`` that has requests."""
    facts = collect(events)
    found = [Samples(label, run, timed(facts.of(label))) for label in labels]
    return [s for s in found if s.requests]
