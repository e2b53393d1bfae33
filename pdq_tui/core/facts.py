"""What a run's events say was measured, and under which conditions. A reduction of the journal, without figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pdq_tui.core import protocol as p
from pdq_tui.core.energy import StageEnergy, counted_joules, source_of, stage_energy
from pdq_tui.core.stats import present
from pdq_tui.core.together import together

#: Clock limit reasons that make a measurement suspect, by the words that they hold.
_SLOWED: Final = ("thermal", "hw_slowdown", "hw slowdown", "power brake")


@dataclass
class Facts:
    """``requests``: those made of the last workload on the last model, in order. ``superseded``: how many were made
    of an earlier one, and are left out."""

    model: p.ModelInfo | None = None
    device: p.DeviceInfo | None = None
    attention: str | None = None
    load_peak_bytes: int | None = None
    load_peak_reason: str | None = None
    workload: p.WorkloadReady | None = None
    arms: dict[str, p.ArmReady] = field(default_factory=dict)
    refused: dict[str, p.ArmRefused] = field(default_factory=dict)
    requests: list[p.Request] = field(default_factory=list)
    superseded: int = 0
    started: list[p.RunStarted] = field(default_factory=list)
    ended: list[p.RunEnded] = field(default_factory=list)
    sensors: list[p.SensorSample] = field(default_factory=list)
    sensor_state: p.SensorState | None = None
    energy: list[p.EnergyWindow] = field(default_factory=list)
    traces: dict[str, p.Traced] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)
    python: str | None = None
    notes: list[p.Note] = field(default_factory=list)
    failures: list[p.Failure] = field(default_factory=list)
    exits: list[p.WorkerExited] = field(default_factory=list)

    def of(self, arm: str) -> list[p.Request]:
        """The requests of ``arm`` under the policy that it follows now."""
        ready = self.arms.get(arm)
        mine = [r for r in self.requests if r.arm == arm]
        if ready is None:
            return mine
        digest = ready.policy.digest
        return [r for r in mine if r.policy_digest in ("", digest)]

    def energy_of(self, arm: str) -> StageEnergy:
        """Energy by stage of ``arm`` under the policy that it follows now."""
        ready = self.arms.get(arm)
        mine = [w for w in self.energy if w.arm == arm and ready and w.policy_digest == ready.policy.digest]
        on_gpu = self.device is not None and self.device.kind == "cuda"
        read = [(s.t_ns, counted_joules(s.cpu, engine_gpu(self, s), on_gpu)) for s in self.sensors]
        readings = [(t, joules) for t, (joules, _) in read if joules is not None]
        why = next((why for _, (joules, why) in read if joules is None), "not read")
        return stage_energy(mine, readings, source_of(on_gpu), f"no energy counter: {why}")

    def trace_of(self, arm: str) -> p.Traced | None:
        """The last burst of ``arm`` under the policy that it follows now."""
        found, ready = self.traces.get(arm), self.arms.get(arm)
        if found is None or ready is None or found.policy_digest != ready.policy.digest:
            return None
        return found

    def labels(self, reference: str | None = None) -> list[str]:
        """The arms, reference first: the one named; "B" of the app's two; else the first of the last run."""
        found = list(dict.fromkeys([*self.arms, *(r.arm for r in self.requests)]))
        order = [a for a in (self.started[-1].arms if self.started else []) if a in found]
        first = reference
        if first is None:
            first = "B" if set(found) == {"A", "B"} else next(iter(order), None)
        ordered = [*order, *(a for a in found if a not in order)]
        return sorted(ordered, key=lambda a: a != first)


def collect(events: Iterable[Any], since_ns: int | None = None) -> Facts:
    """Reduce events in order. ``since_ns``: requests and sensor samples stamped before it are left out."""
    f = Facts()
    for e in events:
        match e:
            case p.Request():
                if since_ns is None or e.t_ns >= since_ns:
                    f.requests.append(e)
            case p.SensorSample():
                if since_ns is None or e.t_ns >= since_ns:
                    f.sensors.append(e)
            case p.SensorState():
                f.sensor_state = e
            case p.ModelReady():
                if f.model is not None and (f.model.id, f.model.dtype) != (e.model.id, e.model.dtype):
                    _supersede(f)
                f.model, f.device, f.attention = e.model, e.device, e.attention
                f.load_peak_bytes, f.load_peak_reason = e.load_peak_bytes, e.load_peak_reason
            case p.WorkloadReady():
                if f.workload is not None and _work(f.workload) != _work(e):
                    _supersede(f)
                f.workload = e
            case p.ArmReady():
                f.arms[e.arm] = e
                f.refused.pop(e.arm, None)
            case p.EnergyWindow():
                f.energy.append(e)
            case p.Traced():
                if e.stages:
                    f.traces[e.arm] = e
            case p.ArmRefused():
                f.refused[e.arm] = e
            case p.RunStarted():
                f.started.append(e)
            case p.RunEnded():
                f.ended.append(e)
            case p.Hello():
                if e.role == "engine":
                    f.libraries.update(e.libraries)
                    f.python = e.python or None
            case p.Note():
                f.notes.append(e)
            case p.Failure():
                f.failures.append(e)
            case p.WorkerExited():
                f.exits.append(e)
            case _:
                pass  # progress, live samples and the like say nothing about what was measured
    return f


def _work(ready: p.WorkloadReady) -> tuple[str, str]:
    return ready.workload.digest, ready.prompts_sha256


def _supersede(f: Facts) -> None:
    f.superseded += len(f.requests)
    f.requests.clear()


# -- conditions --------------------------------------------------------------------------------------------------------


def engine_gpu(f: Facts, sample: p.SensorSample) -> p.GpuSample | None:
    """What the engine's GPUs read in ``sample``, several as one; None on CPU or if unknown."""
    return together(engine_gpus(f, sample))


def engine_gpus(f: Facts, sample: p.SensorSample) -> list[p.GpuSample]:
    """Those that the engine runs on, joined by their flag or their UUID."""
    named = {d.uuid for d in (f.device, *f.device.others) if d.uuid is not None} if f.device else set()
    return [gpu for gpu in sample.gpus if gpu.engine or gpu.uuid in named]


def samples_during(f: Facts, requests: Sequence[p.Request]) -> list[p.SensorSample]:
    """Samples taken while one of ``requests`` ran (host monotonic clock on both sides)."""
    windows = sorted((r.host_start_ns, r.host_end_ns) for r in requests if r.host_end_ns)
    found, i = [], 0
    for s in sorted(f.sensors, key=lambda s: s.t_ns):
        while i < len(windows) and windows[i][1] < s.t_ns:
            i += 1
        if i < len(windows) and windows[i][0] <= s.t_ns:
            found.append(s)
    return found


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    there = present(values)
    if not there:
        return None
    return {"min": min(there), "median": statistics.median(there), "max": max(there)}


def clocks(f: Facts, requests: Sequence[p.Request]) -> dict[str, Any] | None:
    """Clocks, temperature and limit reasons while ``requests`` ran: {name: {min, median, max}}; None without samples.

    ``throttle`` lists what limited the clocks; ``memory_version`` names the call that memory was read with.
    """
    samples = samples_during(f, requests)
    gpus = [g for g in (engine_gpu(f, s) for s in samples) if g is not None]
    named: dict[str, Any]
    if gpus:
        named = {
            "sm_mhz": _spread([g.sm_mhz for g in gpus]),
            "memory_mhz": _spread([g.memory_mhz for g in gpus]),
            "temperature_c": _spread([g.temperature_c for g in gpus]),
            "power_w": _spread([g.power_w for g in gpus]),
        }
    else:
        named = {
            "cpu_mhz": _spread([s.cpu.mhz for s in samples]),
            "temperature_c": _spread([s.cpu.temperature_c for s in samples]),
        }
    kept = {k: v for k, v in named.items() if v is not None}
    if not kept:
        return None
    if gpus:
        kept["throttle"] = sorted({t for g in gpus for t in g.throttle or ()})
        kept["memory_version"] = next((g.memory_version for g in gpus if g.memory_version), None)
    return kept


def other_load(f: Facts, requests: Sequence[p.Request]) -> float | None:
    """Share of the machine's CPU time that went to other processes while ``requests`` ran (median of the samples)."""
    seen = present([s.cpu.other_load for s in samples_during(f, requests)])
    return statistics.median(seen) if seen else None


def slowed(f: Facts, requests: Sequence[p.Request]) -> list[str]:
    """Thermal and hardware slowdowns seen while ``requests`` ran; idle and application clocks are not among them."""
    seen = (clocks(f, requests) or {}).get("throttle", [])
    return [t for t in seen if any(word in t.lower() for word in _SLOWED)]
