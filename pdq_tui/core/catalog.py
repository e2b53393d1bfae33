"""The policies that exist: shipped ones, and the user's, which shadow them by name. Damaged files are listed, not fatal."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdq_tui import locations
from pdq_tui.core.policy import Policy, load_policy
from pdq_tui.errors import PdqError, UsageError


class Entry(msgspec.Struct, frozen=True):
    """One policy file. ``origin``: shipped or user. ``policy`` is None where the file is damaged: see ``error``."""

    name: str
    path: str
    origin: str
    policy: Policy | None = None
    error: str | None = None


def policies(user_dir: Path | None = None) -> dict[str, Entry]:
    """All policies by name, shipped first, a user's file in place of a shipped one of the same name."""
    found: dict[str, Entry] = {}
    for origin, folder in (
        ("shipped", locations.shipped("profiles")),
        ("user", user_dir or locations.user_policies()),
    ):
        for path in sorted(folder.glob("*.toml")):
            try:
                policy = load_policy(path)
            except PdqError as error:
                found[path.stem] = Entry(path.stem, str(path), origin, error=str(error))
            else:
                found[policy.name] = Entry(policy.name, str(path), origin, policy)
    return found


def find_policy(word: str, user_dir: Path | None = None) -> Policy:
    """A policy by name or by path of a TOML file. Raises UsageError naming what is near."""
    if word.endswith(".toml") or "/" in word:
        return load_policy(Path(word).expanduser())
    entries = policies(user_dir)
    entry = entries.get(word)
    if entry is None:
        raise UsageError(f"no policy is called {word!r}", _near(word, list(entries)))
    if entry.policy is None:
        raise UsageError(entry.error or f"{entry.path} is damaged")
    return entry.policy


def _near(word: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, names, 3)
    return f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(sorted(names))}"
