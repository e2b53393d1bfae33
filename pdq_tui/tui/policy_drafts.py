"""The policies as read and what was made of each since: every one's states, oldest first. No widget, no file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from pdq_tui.core.catalog import Entry
from pdq_tui.core.policy import Policy


class Drafts:
    """``entries``: what the catalog found, by name. A policy without an entry was never written."""

    def __init__(self) -> None:
        self.entries: Mapping[str, Entry] = {}
        self._states: dict[str, list[Policy]] = {}
        #: Made here and never written: no file's going takes them along.
        self._unwritten: set[str] = set()

    def read(self, entries: Mapping[str, Entry]) -> None:
        """What the files say now. What was made or changed here stays; what is unchanged and in no file any more
        goes."""
        self.entries = entries
        for name, entry in entries.items():
            if entry.policy is not None and name not in self._states:
                self._states[name] = [entry.policy]
        gone = [n for n in self._states if n not in entries and n not in self._unwritten]
        for name in [n for n in gone if len(self._states[n]) == 1]:
            del self._states[name]

    @property
    def names(self) -> list[str]:
        """Those with a file first, each once."""
        return list(dict.fromkeys([*self.entries, *self._states]))

    @property
    def damaged(self) -> int:
        """How many files cannot be read as a policy."""
        return sum(entry.policy is None for entry in self.entries.values())

    def entry(self, name: str | None) -> Entry | None:
        return self.entries.get(name or "")

    def now(self, name: str | None) -> Policy | None:
        """The policy as changed so far; None where nothing has this name or the file is damaged."""
        states = self._states.get(name or "")
        return states[-1] if states else None

    def modified(self, name: str | None) -> bool:
        """Whether it says something else than its file, or has none."""
        now, entry = self.now(name), self.entry(name)
        return now is not None and (entry is None or entry.policy != now)

    def to_apply(self, name: str) -> Policy | None:
        """What an arm is given: a name that ends in * where no file says the same."""
        now = self.now(name)
        if now is None or not self.modified(name):
            return now
        return msgspec.structs.replace(now, name=now.name.rstrip("*") + "*")

    def put(self, name: str, policy: Policy) -> bool:
        """Another state; False where it is the same as before."""
        if policy == self._states[name][-1]:
            return False
        self._states[name].append(policy)
        return True

    def undo(self, name: str | None) -> bool:
        """Take the last change back; False where there is none."""
        states = self._states.get(name or "")
        if not states or len(states) < 2:
            return False
        states.pop()
        return True

    def add(self, policy: Policy) -> None:
        self._states[policy.name] = [policy]
        self._unwritten.add(policy.name)

    def forget(self, name: str) -> None:
        """Drop all that was made of it."""
        self._states.pop(name, None)
        self._unwritten.discard(name)

    def free_name(self, stem: str) -> str:
        """``stem``, or with the first number that no policy has."""
        taken = {*self.entries, *self._states}
        return next(n for n in (stem, *(f"{stem}-{i}" for i in range(2, 10_000))) if n not in taken)

    def written(self, name: str, policy: Policy) -> None:
        """What ``name`` showed is in a file now, as ``policy``; written under another name, the old one is as in its
        file again."""
        states = self._states.pop(name, [policy])
        self._unwritten -= {name, policy.name}
        self._states[policy.name] = [*states[:-1], policy]
        entry = self.entries.get(name)
        if name != policy.name and entry is not None and entry.policy is not None:
            self._states[name] = [entry.policy]

    def place(self, policy: Policy, user_dir: Path) -> tuple[Path, str | None]:
        """The file that ``policy`` goes to, and what is to be asked before."""
        entry, path = self.entry(policy.name), user_dir / f"{policy.name}.toml"
        if entry is None:
            return path, None
        if entry.origin == "user":
            return Path(entry.path), f"{entry.path} exists. Write over it?"
        return path, (
            f"{policy.name} is shipped. Your file {path} would stand in its place from then on. Write it?"
        )
