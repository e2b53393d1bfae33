"""What was seen of a device's peaks, look by look: which looks count, what is best of them, and what is said of them.

A peak is the best that was ever seen, so a look on a busy machine cannot make it too high; it can leave it too low, and MBU
and MFU too high. Hence a look says whether it was disturbed, and only undisturbed ones count towards those that are wanted.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from pdq_tui.core.metrics import counted
from pdq_tui.engine.runner import Peaks

#: So many undisturbed looks are taken, each by a session of its own, before the cache alone is asked,
LOOKS: Final = 3
#: but no more than so many in all: a machine that is never quiet is not measured for ever.
MOST_LOOKS: Final = 10
#: From this share of the machine's CPU time for other processes on, a look was disturbed.
OTHERS: Final = 0.15
#: From here on as well, if the repetitions of its probes took so much longer than the shortest: median over shortest, less 1.
SPREAD: Final = 0.25


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of all probes.

    at       when, ISO 8601, UTC.
    others   share of this machine's CPU time that other processes (and a hypervisor) had meanwhile; None where nobody
             can tell, and where the device is no CPU.
    spread   of the probes that gave the peaks, the median one: its repetitions' median over their shortest, less 1.
    """

    read_gbps: float | None = None
    read_method: str = ""
    compute_tflops: dict[str, float] = msgspec.field(default_factory=dict)
    copy_gbps: float | None = None
    at: str = ""
    others: float | None = None
    spread: float | None = None

    @property
    def disturbed(self) -> str | None:
        """Why it does not count; None where it does."""
        if self.others is not None and self.others > OTHERS:
            return f"other processes had {self.others:.0%} of this machine's CPU time"
        if self.spread is not None and self.spread > SPREAD:
            return f"repetitions of its probes took {self.spread:.0%} longer than the shortest"
        return None


class Looks(msgspec.Struct, frozen=True):
    """All that were taken of one device, in order."""

    taken: tuple[Look, ...] = ()

    @property
    def enough(self) -> bool:
        quiet = sum(look.disturbed is None for look in self.taken)
        return quiet >= LOOKS or len(self.taken) >= MOST_LOOKS

    @property
    def best(self) -> Peaks:
        """Of each figure the highest."""
        reads = max(self.taken, key=lambda look: look.read_gbps or 0.0, default=Look())
        tflops: dict[str, float] = {}
        for look in self.taken:
            for dtype, value in look.compute_tflops.items():
                tflops[dtype] = max(value, tflops.get(dtype, 0.0))
        copies = [look.copy_gbps for look in self.taken if look.copy_gbps is not None]
        return Peaks(
            reads.read_gbps, reads.read_method, dict(sorted(tflops.items())), max(copies, default=None)
        )

    @property
    def difference(self) -> float | None:
        """Of the figure that differs most between the undisturbed looks: the share by which its lowest is below its
        highest. None of fewer than two."""
        quiet = [look for look in self.taken if look.disturbed is None]
        if len(quiet) < 2:
            return None
        figures = [
            {"read": look.read_gbps or 0.0, "copy": look.copy_gbps or 0.0, **look.compute_tflops}
            for look in quiet
        ]
        named = set.intersection(*(set(each) for each in figures))
        pairs = [(min(f[n] for f in figures), max(f[n] for f in figures)) for n in named]
        return max((1 - low / high for low, high in pairs if high > 0), default=None)

    @property
    def words(self) -> str:
        """How old and how sure the peaks are: "best of 3 looks, the last on 2026-12-03; up to 4% apart"."""
        if not self.taken:
            return ""
        disturbed = [look for look in self.taken if look.disturbed is not None]
        text = f"best of {counted(len(self.taken), 'look')}, the last on {self.taken[-1].at[:10] or 'an unknown day'}"
        if self.difference is not None:
            text += f"; up to {self.difference:.0%} apart"
        if disturbed:
            text += f"; {len(disturbed)} on a busy machine"
        return text

    @property
    def warning(self) -> str | None:
        """Where no look was undisturbed: the peaks may be too low, and what divides by them too high."""
        if not self.taken or any(look.disturbed is None for look in self.taken):
            return None
        again = "" if self.enough else "; the next model that is loaded looks again"
        return (
            f"the peaks of this device were measured while {self.taken[-1].disturbed}: they may be too low, MBU and MFU too"
            f" high{again}"
        )


def read(file: Path) -> Looks:
    """A file that is missing or damaged, or of another version, counts as no look."""
    try:
        return Looks(
            tuple(msgspec.convert(json.loads(file.read_text(encoding="utf-8"))["taken"], list[Look]))
        )
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError):
        return Looks()


def write(file: Path, name: str, looks: Looks) -> None:
    """A cache that cannot be written costs a measurement next time, nothing else."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        part.write_text(json.dumps({"device": name, **msgspec.to_builtins(looks)}), encoding="utf-8")
        part.replace(file)


class CpuTimes(msgspec.Struct, frozen=True):
    """Of the whole machine since it started, and of this process with its threads; in seconds."""

    busy: float
    all: float
    own: float


def cpu_times() -> CpuTimes | None:
    """None where the system does not tell."""
    try:
        times = psutil.cpu_times()
    except OSError:
        return None
    # guest times are counted in user and nice already (proc(5))
    every = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    used = os.times()
    return CpuTimes(every - times.idle - getattr(times, "iowait", 0.0), every, used.user + used.system)


def others(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """Share of the machine's CPU time between two readings that other processes had."""
    if before is None or after is None or after.all <= before.all:
        return None
    theirs = (after.busy - before.busy) - (after.own - before.own)
    return min(1.0, max(0.0, theirs / (after.all - before.all)))


def told(looks: Looks) -> dict[str, Any] | None:
    """For people who ask without an engine; None where nobody has looked."""
    if not looks.taken:
        return None
    best = looks.best
    return {
        "read_gbps": best.read_gbps,
        "read_method": best.read_method,
        "copy_gbps": best.copy_gbps,
        "compute_tflops": best.compute_tflops,
        "words": looks.words,
        "warning": looks.warning,
    }
