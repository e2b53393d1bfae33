"""CPU and memory of this machine and of the engine's process, through psutil.

load           busy share of all logical CPUs since the last reading, 0..1, the whole machine.
other_load     load without the engine's part: other processes, the app among them, 0..1 of the whole machine.
engine_load    CPU time of the engine's process / wall time / CPUs that it may use (affinity, cgroup quota), 0..1.
memory_*       of the tightest cgroup limit where there is one, else of the machine; bytes.
"""

from __future__ import annotations

import time
from typing import Any, Final

import psutil

from pdq_tui.core.cgroups import Memory, own_memory
from pdq_tui.core.cpus import affinity, cpu_quota, usable_cpus
from pdq_tui.core.protocol import CpuSample
from pdq_tui.sensors.rapl import Rapl

#: Frequency and temperature read one file per core or chip, which is not cheap on large machines.
SLOW_S: Final = 2.0
#: Chips of psutil.sensors_temperatures() that are the processor's own, in order of preference.
_CHIPS: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal")


class CpuReader:
    """Keeps what differences are taken from. Not for use from several threads."""

    def __init__(self) -> None:
        psutil.cpu_percent(interval=None)  # the first call has nothing to compare with
        self._process: psutil.Process | None = None
        self._gone: str | None = "the engine has not started"
        self._engine: tuple[float, float] | None = None  # (wall s, CPU s) at the last reading
        self._first = True
        self._slow_at = -SLOW_S
        self._cpus, self._cpus_at = 1.0, -SLOW_S
        self._slow: dict[str, float] = {}
        self._slow_missing: dict[str, str] = {}
        self._rapl = Rapl()
        self._affinity: int | None = None
        self._quota: float | None = None

    def watch(self, pid: int | None) -> None:
        self._process, self._engine, self._gone = None, None, None
        self._cpus_at = -SLOW_S
        if pid is None:
            self._gone = "the engine has not started"
            return
        try:
            self._process = psutil.Process(pid)
        except psutil.Error as error:
            self._gone = _why(error)

    def read(self) -> CpuSample:
        sample = CpuSample()
        load = psutil.cpu_percent(interval=None) / 100
        if self._first:
            sample.missing["load"] = "first reading: nothing to compare with"
        else:
            sample.load = load
        self._first = False
        machine = psutil.virtual_memory()
        memory = own_memory(Memory(machine.total, machine.available))
        sample.memory_total_bytes, sample.memory_available_bytes = memory.total, memory.available
        self._read_engine(sample)
        self._read_slow(sample)
        sample.energy_j, why = self._rapl.read()
        if sample.energy_j is None:
            sample.missing["energy_j"] = why
        return sample

    def _read_engine(self, sample: CpuSample) -> None:
        if self._process is not None:
            try:
                with self._process.oneshot():
                    times, rss = self._process.cpu_times(), self._process.memory_info().rss
                    if self._process.status() == psutil.STATUS_ZOMBIE:
                        raise psutil.ZombieProcess(self._process.pid)
                cpus = self._engine_cpus(self._process.pid)
            except psutil.Error as error:
                self._process, self._gone = None, _why(error)
            except ProcessLookupError:
                self._process, self._gone = None, "the engine's process has ended"
            else:
                now, spent = time.monotonic(), times.user + times.system
                before, self._engine = self._engine, (now, spent)
                sample.engine_rss_bytes = rss
                sample.affinity, sample.quota = self._affinity, self._quota
                if self._quota is None:
                    sample.missing["quota"] = "no quota limits the engine's cgroup"
                if before is None or now <= before[0]:
                    sample.missing["engine_load"] = "first reading: nothing to compare with"
                else:
                    used = (spent - before[1]) / (now - before[0])
                    sample.engine_load = used / cpus
                    if sample.load is not None:
                        sample.other_load = max(0.0, sample.load - used / (psutil.cpu_count() or 1))
                return
        reason = self._gone or "the engine has not started"
        sample.missing |= dict.fromkeys(("engine_load", "engine_rss_bytes", "affinity", "quota"), reason)

    def _engine_cpus(self, pid: int) -> float:
        """CPUs that the engine may use; a quota may be changed while it runs, so it is looked at now and then."""
        now = time.monotonic()
        if now - self._cpus_at >= SLOW_S:
            self._cpus, self._cpus_at = usable_cpus(pid), now
            self._affinity, self._quota = affinity(pid), cpu_quota(pid)
        return self._cpus

    def _read_slow(self, sample: CpuSample) -> None:
        now = time.monotonic()
        if now - self._slow_at >= SLOW_S:
            self._slow_at, self._slow, self._slow_missing = now, {}, {}
            mhz = _frequency()
            if mhz is None:
                self._slow_missing["mhz"] = "this machine does not report a clock"
            else:
                self._slow["mhz"] = mhz
            celsius = _temperature()
            if celsius is None:
                self._slow_missing["temperature_c"] = "this machine does not report a CPU temperature"
            else:
                self._slow["temperature_c"] = celsius
        sample.mhz, sample.temperature_c = self._slow.get("mhz"), self._slow.get("temperature_c")
        sample.missing |= self._slow_missing


def _frequency() -> float | None:
    """MHz, mean over the cores."""
    try:
        frequency: Any = psutil.cpu_freq()  # None on many virtual machines, whatever its type says
    except (NotImplementedError, OSError):
        return None
    return float(frequency.current) if frequency and frequency.current else None


def _temperature() -> float | None:
    """Hottest reading of the processor's own chip."""
    chips = psutil.sensors_temperatures()
    for chip in _CHIPS:
        if chips.get(chip):
            return max(reading.current for reading in chips[chip])
    return None


def _why(error: psutil.Error) -> str:
    if isinstance(error, psutil.AccessDenied):
        return "no permission to look at the engine's process"
    return "the engine's process has ended"
