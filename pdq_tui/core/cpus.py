"""How many CPUs a process may really use at once: its affinity mask, and the quota of its cgroups (versions 1 and 2).

In a container with a CPU quota a library sees the host's cores; so does whoever divides a load by their number.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
PROC: Final = Path("/proc")


def quota_v2(cpu_max: str | None) -> float | None:
    """CPUs granted by a ``cpu.max`` file's text ("200000 100000"); None: no limit, or not readable as one."""
    parts = (cpu_max or "").split()
    if len(parts) != 2 or parts[0] == "max":
        return None
    return _ratio(parts[0], parts[1])


def quota_v1(quota_us: str | None, period_us: str | None) -> float | None:
    """CPUs granted by ``cpu.cfs_quota_us`` (-1: no limit) and ``cpu.cfs_period_us``."""
    return _ratio((quota_us or "").strip(), (period_us or "").strip())


def _ratio(quota: str, period: str) -> float | None:
    try:
        q, p = int(quota), int(period)
    except ValueError:
        return None
    return q / p if q > 0 and p > 0 else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def cpu_quota(pid: int | None = None, root: Path = CGROUP_ROOT, proc: Path = PROC) -> float | None:
    """The tightest CPU quota over a process's cgroup and all its parents, in CPUs; None where there is none.

    ``pid``: None is this process.
    """
    found: list[float] = []
    membership = proc / ("self" if pid is None else str(pid)) / "cgroup"
    for line in (_text(membership) or "0::/").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            bases = [root, root / "unified"]
        elif "cpu" in controllers.split(","):
            bases = [root / "cpu", root / controllers, root / "cpu,cpuacct"]
        else:
            continue
        parts = [part for part in path.strip().split("/") if part and part != ".."]
        for base in bases:
            # A container often sees only its own cgroup, mounted at the root: so the root counts as well.
            for depth in range(len(parts) + 1):
                here = base.joinpath(*parts[:depth])
                for value in (
                    quota_v2(_text(here / "cpu.max")),
                    quota_v1(_text(here / "cpu.cfs_quota_us"), _text(here / "cpu.cfs_period_us")),
                ):
                    if value is not None:
                        found.append(value)
    return min(found) if found else None


def affinity(pid: int | None = None) -> int:
    """CPUs that a process may be scheduled on. Raises OSError for one that is not there any more."""
    return len(os.sched_getaffinity(pid or 0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cpus(pid: int | None = None) -> float:
    """The smaller of affinity and quota. Raises OSError for a process that is not there any more."""
    quota = cpu_quota(pid)
    return float(affinity(pid)) if quota is None else min(float(affinity(pid)), quota)
