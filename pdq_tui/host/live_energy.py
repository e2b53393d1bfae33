"""Energy by stage while the session goes on: the last burst of stage-pure loops of each arm, held against the counter."""

from __future__ import annotations

from collections import deque
from typing import Final

from pdq_tui.core import protocol as p
from pdq_tui.core.energy import EDGE_S, Reading, StageEnergy, counted_joules, source_of, stage_energy

#: Counter readings that are kept: a burst takes half a minute an arm, at ten readings a second.
_READINGS: Final = 6000
#: The window that a burst ends with.
_LAST: Final = "mixed"


class LiveEnergy:
    """Fed with samples and windows in their order, under the session's lock."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque(maxlen=_READINGS)
        self._windows: dict[str, list[p.EnergyWindow]] = {}
        #: Arms whose last window's end still lacks the reading behind it.
        self._open: set[str] = set()
        #: Arm → (policy digest, when its burst ended in ns, what it took).
        self.found: dict[str, tuple[str, int, StageEnergy]] = {}
        #: Why there is no counter; None where there is one, or nothing was read yet.
        self.missing: str | None = None

    def sample(self, e: p.SensorSample, gpu: p.GpuSample | None, on_gpu: bool) -> list[str]:
        """The arms whose burst is settled with this. ``gpu``: the reading of the one that the engine runs on."""
        settled: list[str] = []
        joules, why = counted_joules(e.cpu, gpu, on_gpu)
        if joules is None:
            self.missing = why
            return settled
        self.missing = None
        self._readings.append((e.t_ns, joules))
        for arm in list(self._open):
            windows = self._windows[arm]
            end = windows[-1].end_ns
            taken = stage_energy(windows, self._readings, source_of(on_gpu), "no counter")
            self.found[arm] = (windows[-1].policy_digest, end, taken)
            if e.t_ns > end + EDGE_S * 1e9:
                self._open.discard(arm)
                settled.append(arm)
        return settled

    def window(self, e: p.EnergyWindow) -> None:
        if e.window == "idle":
            self._windows[e.arm] = []
        self._windows.setdefault(e.arm, []).append(e)
        if e.window == _LAST:
            self._open.add(e.arm)
