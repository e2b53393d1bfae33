"""Energy by stage from a counter read beside stage-pure windows.

The counter is the GPU's own (NVML, total energy) where the engine runs on one, else RAPL's, which is the whole package's.
Power samples are averages of unknown weight and are not integrated. A window's energy is the counter's difference between
its edges, interpolated between the two samples around each edge.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from pdq_tui.core.messages.energy import EnergyWindow
from pdq_tui.core.messages.readings import CpuSample, GpuSample

#: A window shorter than this says nothing: counters move in steps of up to a tenth of a second.
SECONDS_MIN: Final = 5.0
#: An edge farther than this from the next sample, in seconds, is not known.
EDGE_S: Final = 1.0
#: A mixed run that differs by more from its stages' sum flags the stages' figures.
CLOSURE: Final = 0.05

#: (monotonic ns, joules), ascending.
Reading = tuple[int, float]


class StageEnergy(msgspec.Struct, frozen=True, kw_only=True):
    """One arm. Joules a prompt token and an output token; ``net``: without what the same time costs idle, context loaded.

    ``closure``: (mixed run − its stages' sum) / mixed run. Each None with its ``reason``.
    """

    prefill_j: float | None = None
    decode_j: float | None = None
    prefill_net_j: float | None = None
    decode_net_j: float | None = None
    idle_w: float | None = None
    closure: float | None = None
    source: str = ""
    reason: str = ""

    @property
    def flagged(self) -> bool:
        return self.closure is not None and abs(self.closure) > CLOSURE


def counted_joules(cpu: CpuSample, gpu: GpuSample | None, on_gpu: bool) -> tuple[float | None, str]:
    """What the counter that counts here says in a sample, and why nothing where it does not: the GPU's where the engine
    runs ``on_gpu``, else the processor package's."""
    if not on_gpu:
        return cpu.energy_j, cpu.missing.get("energy_j", "not read")
    if gpu is None:
        return None, "the GPU that the engine runs on is not among those that are read"
    return gpu.energy_j, gpu.missing.get("energy_j", "not read")


def source_of(on_gpu: bool) -> str:
    return "NVML" if on_gpu else "RAPL, the whole package"


def joules_at(readings: Sequence[Reading], t_ns: int) -> float | None:
    """The counter at a time, between the samples around it; None without both, near enough."""
    i = bisect_left(readings, (t_ns, float("-inf")))
    if i < len(readings) and readings[i][0] == t_ns:
        return readings[i][1]
    if i == 0 or i == len(readings):
        return None
    (t0, e0), (t1, e1) = readings[i - 1], readings[i]
    if t1 - t0 > EDGE_S * 1e9 or e1 < e0:
        return None
    return e0 + (e1 - e0) * (t_ns - t0) / (t1 - t0)


def window_joules(readings: Sequence[Reading], window: EnergyWindow) -> float | None:
    """None also where the counter started again inside of the window, or stood still."""
    first, last = joules_at(readings, window.start_ns), joules_at(readings, window.end_ns)
    if first is None or last is None or last <= first:
        return None
    inside = [first, *(e for t, e in readings if window.start_ns < t < window.end_ns), last]
    return last - first if all(a <= b for a, b in pairwise(inside)) else None


def stage_energy(
    windows: Sequence[EnergyWindow], readings: Sequence[Reading], source: str, no_counter: str
) -> StageEnergy:
    """One arm's energy from its windows and the counter's readings; the last window of each kind counts."""
    if not windows:
        return StageEnergy(source=source, reason="no stage-pure loop was run (run --energy)")
    if len(readings) < 2:
        return StageEnergy(source=source, reason=no_counter)
    by_kind = {w.window: w for w in windows}
    short = [w.window for w in by_kind.values() if w.seconds < SECONDS_MIN]
    if short:
        why = f"the window of {' and '.join(short)} is shorter than {SECONDS_MIN:.0f} s"
        return StageEnergy(source=source, reason=why)
    used = {kind: window_joules(readings, w) for kind, w in by_kind.items()}
    if all(value is None for value in used.values()):
        return StageEnergy(source=source, reason="no two counter readings lie around a window's edge")
    idle_j = used.get("idle")
    idle_w = None if idle_j is None else idle_j / by_kind["idle"].seconds

    def each(kind: str) -> tuple[float | None, float | None]:
        w, total = by_kind.get(kind), used.get(kind)
        tokens = 0 if w is None else w.prompt_tokens if kind == "prefill" else w.output_tokens
        if w is None or total is None or not tokens:
            return None, None
        return total / tokens, None if idle_w is None else (total - idle_w * w.seconds) / tokens

    prefill, prefill_net = each("prefill")
    decode, decode_net = each("decode")
    closure = None
    mixed, mixed_j = by_kind.get("mixed"), used.get("mixed")
    if mixed is not None and mixed_j and prefill is not None and decode is not None:
        closure = (mixed_j - mixed.prompt_tokens * prefill - mixed.output_tokens * decode) / mixed_j
    return StageEnergy(
        prefill_j=prefill,
        decode_j=decode,
        prefill_net_j=prefill_net,
        decode_net_j=decode_net,
        idle_w=idle_w,
        closure=closure,
        source=source,
        reason="" if prefill is not None and decode is not None else "a stage's window could not be read",
    )
