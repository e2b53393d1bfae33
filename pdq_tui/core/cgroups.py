"""Memory that a process may take: the machine's, narrowed by the limit of each cgroup that it is in (versions 1, 2)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    total: int
    available: int


def cgroup_directories(membership: str, root: Path) -> list[tuple[Path, int]]:
    """(directory, cgroup version) of the memory cgroups that bind a process, innermost first up to the root.

    ``membership``: text of /proc/self/cgroup. In a container the named directory may not be visible; the root, which
    then is the container's own, always is looked at.
    """
    found: list[tuple[Path, int]] = []
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, version = root, 2
        elif "memory" in controllers.split(","):
            base, version = root / "memory", 1
        else:
            continue
        inner = base / path.lstrip("/")
        while inner != base and base in inner.parents:
            found.append((inner, version))
            inner = inner.parent
        found.append((base, version))
    return found


def cgroup_memory(membership: str, root: Path, machine: Memory) -> Memory:
    """``machine`` narrowed by each cgroup limit. Page cache that can be given back counts as available."""
    total, available = machine.total, machine.available
    for directory, version in cgroup_directories(membership, root):
        names = (
            ("memory.max", "memory.current")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        limit, used = (_number(directory / name) for name in names)
        if limit is None or used is None or limit >= machine.total:
            continue
        key = "inactive_file" if version == 2 else "total_inactive_file"
        free = max(0, limit - used + _stat(directory / "memory.stat", key))
        total, available = min(total, limit), min(available, free)
    return Memory(total, available)


def _number(path: Path) -> int | None:
    """None where there is no such file, or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for name, value in (line.split() for line in lines) if name == key), 0)


def own_memory(machine: Memory, root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> Memory:
    """``machine`` narrowed by this process's cgroups; as it is where there are none."""
    try:
        text = membership.read_text()
    except OSError:
        return machine
    return cgroup_memory(text, root, machine)
