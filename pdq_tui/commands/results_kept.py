"""What becomes of a headless run's results: a snapshot an arm where the run lives, else somewhere else, never nowhere."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdq_tui.commands.common import say
from pdq_tui.core.analysis import collect, run_document, timed
from pdq_tui.core.protocol import Request, encode
from pdq_tui.errors import PdqError
from pdq_tui.host.journal import read_events
from pdq_tui.host.runs import Run
from pdq_tui.store.snapshot import save


@dataclass
class Kept:
    """``document``: the run's JSON contract. ``snapshots``: what was saved. ``trouble``: sentences about what could
    not be stored where it belongs. ``lost``: nothing is on any disk, so that the document must go to stdout."""

    document: dict[str, Any]
    snapshots: list[tuple[str, Path]] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    lost: bool = False

    def tell(self) -> None:
        """Where everything is, on stderr."""
        for text in self.trouble:
            say(f"error: {text}", level=-1)
        for label, path in self.snapshots:
            say(f"snapshot {path.parent.parent.name}/{path.name}  {label}  {path}")


def keep(run: Run, events: Sequence[Any], labels: Sequence[str], *, note: str, min_effect: float) -> Kept:
    """Save a snapshot of each arm that has requests. A place that cannot be written is replaced by a temporary
    directory, and that by stdout (``lost``)."""
    facts = collect(events)
    measured = [a for a in (labels or facts.labels()) if timed(facts.of(a))]
    reference = labels[0] if labels else None
    kept = Kept(run_document(run.meta, events, reference, min_effect))
    if not run.in_memory and _journal_whole(run, events):
        try:
            for label in measured:
                kept.snapshots.append(
                    (label, _save(run, run.path, events, label, note, reference, min_effect))
                )
            if run.text:  # complete, but not where it was asked for
                kept.trouble.append(run.text)
            return kept
        except PdqError as error:
            kept.trouble.append(str(error))
    else:
        kept.trouble.append(run.text or f"the journal in {run.path} could not be written to the end")
    spare = _spare(run, events)
    try:
        if spare is not None:
            kept.snapshots = [
                (label, _save(run, spare, events, label, note, reference, min_effect)) for label in measured
            ]
            kept.trouble.append(f"the whole run is kept in {spare} instead")
            return kept
    except PdqError as error:
        kept.trouble.append(str(error))
    kept.trouble.append("no temporary directory takes the results either: they are on stdout")
    kept.snapshots, kept.lost = [], True
    return kept


def _save(
    run: Run,
    place: Path,
    events: Sequence[Any],
    label: str,
    note: str,
    reference: str | None,
    min_effect: float,
) -> Path:
    return save(place, events, label, note, reference=reference, meta=run.meta, min_effect=min_effect)


def _journal_whole(run: Run, events: Sequence[Any]) -> bool:
    """True when every request that was measured can be read back from the run's journal."""
    assert run.journal_path is not None
    try:
        on_disk = sum(isinstance(e, Request) for e in read_events(run.journal_path))
    except OSError:
        on_disk = 0
    return on_disk >= sum(isinstance(e, Request) for e in events)


def _spare(run: Run, events: Sequence[Any]) -> Path | None:
    """A temporary directory with the whole journal in it, or None where there is no room either."""
    try:
        place = Path(tempfile.mkdtemp(prefix="pdq-tui-")) / run.id
        place.mkdir()
        with (place / "events.jsonl").open("wb") as file:
            file.writelines(encode(event) for event in events)
    except OSError:
        return None
    return place
