"""Bytes and floating-point operations of a stage, operator by operator, and the time that the hardware needs for them.

One multiply-add is two operations. What is divided by these (explained share, MFU) is defined in ``core.metrics``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


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
    """One stage under one policy: bytes it must read, FLOPs by dtype, and the time it took; all of one pass."""

    label: str
    stage: str
    policy: str
    bytes: int
    flops: Mapping[str, float]
    ms: float

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
