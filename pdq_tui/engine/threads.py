"""How many CPU threads the engine may use: never more than this process can really run at once.

In a container with a CPU quota a library sees the host's cores, starts as many threads, and gets slower by several
times without an error.
"""

from __future__ import annotations

import math


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
