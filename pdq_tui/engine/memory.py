"""Peak and current memory of this process, for stages that run on the CPU; and how much memory there is.

Linux keeps the resident set's high-water mark (VmHWM); writing 5 to ``/proc/self/clear_refs`` sets it back to the
current size, so that each stage has a peak of its own. Where that is not allowed the resident set is sampled by a
thread, which misses short peaks, and the method says so.
"""

from __future__ import annotations

import ctypes
import re
import resource
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import psutil

from pdq_tui.core.cgroups import Memory, own_memory

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
SMAPS = Path("/proc/self/smaps")
SAMPLE_S = 0.02
MADV_DONTNEED = 4

_libc = ctypes.CDLL(None)
#: The first line of a mapping: addresses, permissions, offset, device, inode, file.
_MAPPING = re.compile(r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) \S+ \S+ \S+ \d+ *(?P<path>.*?)$")


class PeakMeter(Protocol):
    """``method`` names how ``peak_bytes`` came about; ``reset`` starts a new stage."""

    method: str

    def reset(self) -> None: ...
    def peak_bytes(self) -> int | None: ...


class HighWater:
    """VmHWM, reset at each stage edge."""

    method = "VmHWM, reset for each stage"

    def __init__(self, status: Path = STATUS, clear_refs: Path = CLEAR_REFS) -> None:
        self._status = status
        self._clear = clear_refs

    def reset(self) -> None:
        self._clear.write_text("5")

    def peak_bytes(self) -> int | None:
        return status_bytes("VmHWM", self._status)


class SampledRss:
    """The largest resident set that a thread saw since the last reset."""

    method = f"resident set sampled every {SAMPLE_S * 1000:.0f} ms"

    def __init__(self) -> None:
        self._peak = rss_bytes()
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="rss", daemon=True).start()

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(SAMPLE_S):
            self._look()

    def _look(self) -> int:
        now = rss_bytes()
        with self._lock:
            self._peak = max(self._peak, now)
            return self._peak

    def reset(self) -> None:
        with self._lock:
            self._peak = rss_bytes()

    def peak_bytes(self) -> int | None:
        return self._look()


def peak_meter(status: Path = STATUS, clear_refs: Path = CLEAR_REFS) -> PeakMeter:
    """The better meter of the two that this system allows."""
    meter = HighWater(status, clear_refs)
    try:
        meter.reset()
    except OSError:
        return SampledRss()
    return meter if meter.peak_bytes() is not None else SampledRss()


def status_bytes(key: str, status: Path = STATUS) -> int | None:
    """A ``Vm…`` line of /proc/self/status in bytes; None where there is none."""
    try:
        text = status.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None


def give_back(mapped: Iterable[Path] = ()) -> None:
    """Return to the system what this process no longer uses: free pages of the heap (glibc keeps them), and resident
    pages of the files ``mapped``, which come back from the page cache where they are read again. A mapping that was
    written to is left alone: its changes would be lost.
    """
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
    wanted = {str(path) for path in mapped}
    for start, end in _clean_mappings(wanted) if wanted else ():
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)


def _clean_mappings(paths: set[str]) -> list[tuple[int, int]]:
    """Address ranges of these files in this process that hold no changed page (a private copy is an
    anonymous page; one that the kernel still has to write to the disk is none); nothing where the system does not tell."""
    found: list[tuple[int, int]] = []
    span: tuple[int, int] | None = None
    try:
        with SMAPS.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                head = _MAPPING.match(line)
                if head is not None:
                    inside = head["path"] in paths
                    span = (int(head["start"], 16), int(head["end"], 16)) if inside else None
                elif span is not None and line.startswith("Anonymous:"):
                    if int(line.split()[1]) == 0:
                        found.append(span)
                    span = None
    except OSError:
        return []
    return found


def rss_bytes() -> int:
    """Resident set of this process now."""
    return int(psutil.Process().memory_info().rss)


def host_memory() -> Memory:
    """The machine's memory, narrowed by this process's cgroups."""
    machine = psutil.virtual_memory()
    return own_memory(Memory(int(machine.total), int(machine.available)))


def host_total_bytes() -> int:
    """The machine's memory, or the tightest cgroup's limit where that is smaller."""
    return host_memory().total


def host_free_bytes() -> int:
    """What can still be taken without swapping: available memory, or the rest of a cgroup's or this process's own
    limit (ulimit -v, -d) where that is smaller."""
    free = host_memory().available
    for number, key in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit, used = resource.getrlimit(number)[0], status_bytes(key)
        if limit != resource.RLIM_INFINITY and used is not None:
            free = min(free, max(0, limit - used))
    return free
