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
