"""How many CPU threads the engine may use: never more than this process can really run at once.

In a container with a CPU quota a library sees the host's cores, starts as many threads, and gets slower by several
times without an error.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
SELF_CGROUP = Path("/proc/self/cgroup")


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


def cpu_quota(root: Path = CGROUP_ROOT, self_cgroup: Path = SELF_CGROUP) -> float | None:
    """The tightest CPU quota over this process's cgroup and all its parents, in CPUs; None where there is none."""
    found: list[float] = []
    for line in (_text(self_cgroup) or "0::/").splitlines():
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


def affinity() -> int:
    """CPUs that this process may be scheduled on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count(cpus: int, quota: float | None, wanted: int | None = None) -> tuple[int, str]:
    """(threads, why): min(affinity, floor(quota), the user's wish), at least 1."""
    limits = [(max(1, cpus), f"{cpus} CPUs in the affinity mask")]
    if quota is not None:
        limits.append((max(1, math.floor(quota)), f"CPU quota of {quota:g}"))
    if wanted is not None:
        limits.append((max(1, wanted), f"{wanted} asked for"))
    threads, why = min(limits, key=lambda limit: limit[0])
    if wanted is not None and threads < wanted:
        why += f", though {wanted} were asked for"
    return threads, why
