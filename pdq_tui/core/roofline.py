"""Bytes and floating-point operations of a stage, operator by operator, and the time that the hardware needs for them.

One multiply-add is two operations. What is divided by these (explained share, MFU) is defined in ``core.metrics``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

#: Stage → where a document of an arm says what one pass read, and how long one took.
_SAID: Final = {"prefill": ("bytes", "prefill_ms"), "decode": ("bytes_per_step", "step_ms")}
#: A measured peak is the best of a few looks: two roofs of one device this near each other are one.
_SAME_ROOF: Final = 0.1


class Op(msgspec.Struct, frozen=True):
    """One operator (or several equal ones). ``bytes``: stored bytes it must read; ``flops`` in ``dtype``."""

    name: str
    bytes: int
    flops: float
    dtype: str
    count: int = 1


class StageCost(msgspec.Struct, frozen=True):
    """What one prefill, or one decode step, has to read and to multiply at least.

    ``wasted_bytes`` are read beyond that (padding of a static buffer) and are in no bound.
    """

    ops: tuple[Op, ...] = ()
    wasted_bytes: int = 0

    @property
    def bytes(self) -> int:
        return sum(op.bytes * op.count for op in self.ops)

    @property
    def flops(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for op in self.ops:
            if op.flops:
                found[op.dtype] = found.get(op.dtype, 0.0) + op.flops * op.count
        return found

    def bound_ms(self, read_gbps: float | None, compute_tflops: Mapping[str, float]) -> float | None:
        """Σ max(bytes / read peak, FLOPs / compute peak) in ms; None where a peak that is needed was not measured."""
        if not read_gbps:
            return None
        total = 0.0
        for op in self.ops:
            seconds = op.bytes / (read_gbps * 1e9)
            if op.flops:
                peak = compute_tflops.get(op.dtype)
                if not peak:
                    return None
                seconds = max(seconds, op.flops / (peak * 1e12))
            total += seconds * op.count
        return total * 1e3


class Roof(msgspec.Struct, frozen=True):
    """What a device reaches: reading in GB/s, products by dtype in TFLOP/s. Measured, or a data sheet's."""

    read_gbps: float | None
    compute_tflops: Mapping[str, float]

    def ridge(self, dtype: str) -> float | None:
        """FLOP per byte from which on a stage in ``dtype`` is bound by arithmetic; below it, by memory."""
        peak = self.compute_tflops.get(dtype)
        return peak * 1e3 / self.read_gbps if peak and self.read_gbps else None


class RoofPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One stage under one policy: bytes it must read, FLOPs by dtype, and the time it took; all of one pass. ``label``:
    of the arm or snapshot."""

    label: str
    stage: str
    policy: str
    bytes: int
    flops: Mapping[str, float]
    ms: float

    @property
    def name(self) -> str:
        """ "A decode"."""
        return f"{self.label} {self.stage}"

    @property
    def total(self) -> float:
        return sum(self.flops.values())

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.total / self.bytes

    @property
    def tflops(self) -> float:
        return self.total / self.ms / 1e9

    @property
    def gbps(self) -> float:
        return self.bytes / self.ms / 1e6

    @property
    def dtype(self) -> str:
        """What most of its operations are in."""
        return max(self.flops, key=lambda d: self.flops[d])

    def bound(self, roof: Roof) -> str | None:
        """ "memory" or "compute": the side of its ridge that it lies on; None where a peak was not measured. Each dtype
        counts against its own peak."""
        if not roof.read_gbps or not all(roof.compute_tflops.get(d) for d in self.flops):
            return None
        compute_ms = sum(f / (roof.compute_tflops[d] * 1e9) for d, f in self.flops.items())
        return "compute" if compute_ms > self.bytes / (roof.read_gbps * 1e6) else "memory"


def roof_point(
    label: str,
    stage: str,
    policy: str,
    read: int | None,
    flops: Mapping[str, float] | None,
    ms: float | None,
) -> RoofPoint | None:
    """None where something is missing that a place in the picture needs."""
    done = {d: f for d, f in (flops or {}).items() if f > 0}
    if not read or not done or not ms or ms <= 0:
        return None
    return RoofPoint(label=label, stage=stage, policy=policy, bytes=read, flops=done, ms=ms)


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """The stages of one arm or snapshot under the roof of the device that it ran on. ``missing``: stage → why it is not
    among the points."""

    label: str
    device: str
    roof: Roof
    points: tuple[RoofPoint, ...] = ()
    missing: dict[str, str] = msgspec.field(default_factory=dict)


def document_rooflines(doc: Mapping[str, Any]) -> list[Roofline]:
    """One an arm of a run's document (see ``core.document``), in its order."""
    arms = [a for a in doc.get("arms") or [] if isinstance(a, Mapping)]
    return [arm_roofline(a, doc.get("device"), str(a.get("label"))) for a in arms]


def evaluation_rooflines(found: Mapping[str, Mapping[str, Any]]) -> list[Roofline]:
    """Of the arms of an evaluation's confirmation run, on the device of its conditions; none before it was reached."""
    device = found.get("conditions", {}).get("device")
    return document_rooflines({"device": device, "arms": found.get("confirmation", {}).get("arms", [])})


def arm_roofline(arm: Mapping[str, Any], device: Mapping[str, Any] | None, label: str) -> Roofline:
    """``arm`` and ``device`` as in a document. What is not there, or is no number, is missing with the reason."""
    points: list[RoofPoint] = []
    missing: dict[str, str] = {}
    for stage, (read, timed) in _SAID.items():
        part = arm.get(stage)
        part = part if isinstance(part, Mapping) else {}
        time = part.get(timed)
        found = {
            read: _number(part.get(read)),
            "flops": _table(part.get("flops")) or None,
            timed: _number(time.get("median")) if isinstance(time, Mapping) else None,
        }
        point = roof_point(label, stage, str(arm.get("policy")), *found.values())
        if point is not None:
            points.append(point)
        else:
            lacks = next((key for key, value in found.items() if not value), read)
            missing[stage] = str(part.get(f"{lacks}_reason") or f"{lacks} is not in the document")
    return Roofline(
        label=label,
        device=str((device or {}).get("name") or "device not known"),
        roof=document_roof(device),
        points=tuple(points),
        missing=missing,
    )


def document_roof(device: Mapping[str, Any] | None) -> Roof:
    said = device or {}
    return Roof(_number(said.get("read_peak_gbps")), _table(said.get("compute_peak_tflops")))


def distinct_roofs(lines: Sequence[Roofline]) -> list[tuple[str, Roof]]:
    """(device, roof) of those that are not another look at one before them; one device can have two, as with another
    number of threads. What has no peaks is left out."""
    found: list[tuple[str, Roof]] = []
    for line in lines:
        known = line.roof.read_gbps is not None or line.roof.compute_tflops
        if known and not any(name == line.device and _near(roof, line.roof) for name, roof in found):
            found.append((line.device, line.roof))
    return found


def _near(a: Roof, b: Roof) -> bool:
    one, two = ({"read": r.read_gbps, **r.compute_tflops} for r in (a, b))
    return one.keys() == two.keys() and all(
        abs((x or 0) - (y or 0)) <= _SAME_ROOF * max(x or 0, y or 0)
        for x, y in ((one[k], two[k]) for k in one)
    )


def _number(value: Any) -> Any:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if good else None


def _table(value: Any) -> dict[str, float]:
    said = value.items() if isinstance(value, Mapping) else ()
    return {str(k): float(v) for k, v in said if _number(v) is not None and v > 0}


def linear(name: str, N: int, K: int, rows: int, weight_bytes: int, dtype: str, count: int = 1) -> Op:
    """A linear layer [N, K] on ``rows`` rows whose weights are stored in ``weight_bytes``."""
    return Op(name, weight_bytes, 2.0 * N * K * rows, dtype, count)


def merged(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Equal operators counted together: 30 equal layers become one line."""
    found: dict[tuple[str, int, float, str], int] = {}
    for op in ops:
        key = (op.name, op.bytes, op.flops, op.dtype)
        found[key] = found.get(key, 0) + op.count
    return tuple(Op(*key, count) for key, count in found.items())
