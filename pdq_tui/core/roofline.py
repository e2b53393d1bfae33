"""Bytes and floating-point operations of a stage, operator by operator, and the time that the hardware needs for them.

explained share = Σ over operators max(bytes / peak bandwidth, FLOPs / peak of their dtype) / measured time.
MFU = Σ over dtypes (FLOPs / peak of that dtype) / measured time. One multiply-add is two operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

#: Short dtype names of this program, as keys of FLOP counts and of measured compute peaks.
DTYPES: Final = ("fp32", "bf16", "fp16", "int8", "fp8")


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

    def mfu(self, seconds: float | None, compute_tflops: Mapping[str, float]) -> float | None:
        """Fraction of the compute peaks that was used; None without a time or a peak."""
        return mfu(self.flops, seconds, compute_tflops)


def mfu(
    flops: Mapping[str, float], seconds: float | None, compute_tflops: Mapping[str, float]
) -> float | None:
    """Model FLOPs utilization as a fraction; None where the time or a dtype's peak is missing."""
    if not seconds or not flops:
        return None
    ideal = 0.0
    for dtype, count in flops.items():
        peak = compute_tflops.get(dtype)
        if not peak:
            return None
        ideal += count / (peak * 1e12)
    return ideal / seconds


def explained(bound_ms: float | None, measured_ms: float | None) -> float | None:
    """Explained share as a fraction; None where either is missing. Never clamped: over 1 the census is wrong."""
    return bound_ms / measured_ms if bound_ms and measured_ms else None


def linear(name: str, N: int, K: int, rows: int, weight_bytes: int, dtype: str, count: int = 1) -> Op:
    """A linear layer [N, K] on ``rows`` rows whose weights are stored in ``weight_bytes``."""
    return Op(name, weight_bytes, 2.0 * N * K * rows, dtype, count)


def causal_attention(
    layers: int, batch: int, heads: int, kv_heads: int, head_dim: int, prompt: int, itemsize: int, dtype: str
) -> Op:
    """Attention of a whole prompt, one layer counted ``layers`` times: P·(P + 1)/2 pairs, two products each.

    Bytes are the keys and values that were just made, read once.
    """
    pairs = prompt * (prompt + 1) / 2
    return Op(
        "attention",
        2 * batch * kv_heads * head_dim * prompt * itemsize,
        4.0 * batch * heads * head_dim * pairs,
        dtype,
        layers,
    )


def decode_attention(
    layers: int, batch: int, heads: int, kv_heads: int, head_dim: int, context: int, itemsize: int, dtype: str
) -> Op:
    """Attention of one new token a sequence over ``context`` positions, the new one included."""
    return Op(
        "attention",
        2 * batch * kv_heads * head_dim * context * itemsize,
        4.0 * batch * heads * head_dim * context,
        dtype,
        layers,
    )


def merged(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Equal operators counted together: 30 equal layers become one line."""
    found: dict[tuple[str, int, float, str], int] = {}
    for op in ops:
        key = (op.name, op.bytes, op.flops, op.dtype)
        found[key] = found.get(key, 0) + op.count
    return tuple(Op(*key, count) for key, count in found.items())
