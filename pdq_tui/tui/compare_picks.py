"""Which snapshots are compared: those listed, those picked, the reference first. No widget, no file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # polars comes with it
    from pdq_tui.store.listing import Listed


class Picks:
    """``picked``: ids, the reference first; by default, until a key changes them, the last of each arm of the run."""

    def __init__(self, picked: Sequence[str] = ()) -> None:
        self.picked: list[str] = list(picked)
        self.listed: list[Listed] = []
        self._touched = bool(picked)

    def relist(self, listed: list[Listed], run_id: str) -> tuple[bool, bool]:
        """What the store holds now; what cannot be read any more is not picked. Returns whether the list changed, and
        whether what is picked did."""
        before = (self.listed, self.picked)
        self.listed = listed
        readable = {s.id for s in listed if s.error is None}
        self.picked = (
            [name for name in self.picked if name in readable]
            if self._touched
            else last_of_each_arm(listed, run_id)
        )
        return before[0] != self.listed, before[1] != self.picked

    def toggle(self, name: str) -> None:
        self._touched = True
        self.picked = [p for p in self.picked if p != name] if name in self.picked else [*self.picked, name]

    def lead(self, name: str) -> None:
        """``name`` is the reference from now on."""
        self._touched = True
        self.picked = [name, *(p for p in self.picked if p != name)]

    @property
    def paths(self) -> list[str]:
        """Where the picked ones lie, in their order."""
        places = {s.id: s.path for s in self.listed}
        return [places[name] for name in self.picked]

    def matching(self, wanted: str) -> list[Listed]:
        """The listed ones with ``wanted``, lower case, in their names or note."""
        return [s for s in self.listed if wanted in f"{s.id} {s.arm} {s.policy} {s.model} {s.note}".lower()]


def last_of_each_arm(listed: Sequence[Listed], run_id: str) -> list[str]:
    """The run's newest readable snapshot of every arm, B (the reference of the app) first."""
    mine = sorted((s for s in listed if s.run == run_id and s.error is None), key=lambda s: (s.created, s.id))
    newest = {s.arm: s.id for s in mine}
    return [newest[arm] for arm in sorted(newest, key=lambda arm: (arm != "B", arm))]
