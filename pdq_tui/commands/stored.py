"""Snapshots by the words that a person gives."""

from __future__ import annotations

import re
from pathlib import Path

from pdq_tui.errors import UsageError
from pdq_tui.store.listing import JOURNAL, list_snapshots, resolve, resolve_run


def snapshot_path(word: str, runs: Path) -> Path:
    """``store.listing.resolve``, and ``@last-N``: the N-th before the last by the time they were made.

    Raises UsageError where there is no such snapshot.
    """
    back = re.fullmatch(r"@last-(\d+)", word)
    if back is None:
        return resolve(word, runs)
    found = sorted(list_snapshots(runs), key=lambda s: (s.created, s.id), reverse=True)
    if int(back[1]) >= len(found):
        raise UsageError(f"{word}: there are {len(found)} snapshots in {runs}", "`pdq-tui snapshots list`")
    return Path(found[int(back[1])].path)


def run_path(word: str, runs: Path) -> Path | None:
    """The directory of the run that ``word`` names; None where it names one snapshot, or no run."""
    if (Path(word).expanduser() / JOURNAL).is_file():
        return Path(word).expanduser()
    try:
        snapshot_path(word, runs)
    except UsageError:
        pass
    else:
        return None
    try:
        return resolve_run(word, runs)
    except UsageError:
        return None
