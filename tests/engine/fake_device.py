"""A fake asynchronous device: work is queued, and its clock advances only in ``synchronize()``.

Whoever reads a time without a synchronise finds nothing there, as on a real device. Peaks are set by the test, the
capability as well, and work can be told to run out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pdq_tui.core.policy import Keep, Policy
from pdq_tui.core.protocol import DeviceInfo
from pdq_tui.engine.runner import Arm


@dataclass
class FakeMark:
    at_ms: float | None = None


class FakeDevice:
    """Virtual milliseconds. ``speed`` turns queued work into time (drift); ``idle`` moves the host's clock alone."""

    kind = "fake"
    memory_method = "fake allocator high-water mark"

    def __init__(self, capability: tuple[int, int] | None = (9, 0)) -> None:
        self.torch_device = torch.device("cpu")
        self.capability = capability
        self.total_bytes: int | None = 10_000
        self.clock_ms = 0.0
        self.synchronizations = 0
        self.speed: Callable[[float, float], float] = lambda work_ms, clock_ms: work_ms
        self._queue: list[float | FakeMark] = []
        self.held = 100
        self.peak = 100
        self.peaks_to_come: list[int] = []

    def queue(self, work_ms: float) -> None:
        self._queue.append(work_ms)

    def synchronize(self) -> None:
        self.synchronizations += 1
        for item in self._queue:
            if isinstance(item, FakeMark):
                item.at_ms = self.clock_ms
            else:
                self.clock_ms += self.speed(item, self.clock_ms)
        self._queue.clear()

    def mark(self) -> FakeMark:
        mark = FakeMark()
        self._queue.append(mark)
        return mark

    def elapsed_ms(self, first: FakeMark, second: FakeMark) -> float:
        if first.at_ms is None or second.at_ms is None:
            raise RuntimeError("the events have not been reached yet")
        return second.at_ms - first.at_ms

    def peek_ms(self, first: FakeMark, second: FakeMark) -> float | None:
        if first.at_ms is None or second.at_ms is None:
            return None
        return second.at_ms - first.at_ms

    def idle(self, ms: float) -> None:
        self.clock_ms += ms

    def host_ns(self) -> int:
        return int(self.clock_ms * 1e6)

    def info(self) -> DeviceInfo:
        return DeviceInfo(kind="fake", name="fake", capability=self.capability, memory_bytes=self.total_bytes)

    def reset_peak(self) -> None:
        self.peak = self.held

    def touch(self, peak: int) -> None:
        self.peak = max(self.peak, peak)

    def peak_bytes(self) -> int | None:
        return self.peak

    def allocated_bytes(self) -> int | None:
        return self.held

    def free_bytes(self) -> int | None:
        return None if self.total_bytes is None else self.total_bytes - self.held

    def empty_cache(self, mapped: Iterable[Path] = ()) -> None:
        pass


@dataclass(frozen=True)
class FakeCost:
    bytes: int = 0
    flops: dict[str, float] = field(default_factory=dict)

    def bound_ms(self, read_gbps: float | None, compute_tflops: Mapping[str, float]) -> float | None:
        return self.bytes / read_gbps if read_gbps else None


@dataclass
class FakeStaged:
    """Costs in virtual ms; ``answer`` gives the token of each step (0 is prefill's); ``fail_at`` runs out of memory."""

    device: FakeDevice
    prefill_ms: float = 80.0
    step_ms: float = 5.0
    handoff_ms: float = 0.0
    vocab: int = 16
    answer: Callable[[int, int], int] = lambda step, row: 1 + step % 3
    nan_at: int | None = None
    fail_at: int | None = None
    first_use_ms: float = 0.0
    prefill_peak: int = 300
    decode_peak: int = 200
    seen: set[tuple[str, Sequence[int]]] = field(default_factory=set)
    passes: list[tuple[str, int]] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)

    def start(self, batch: int, capacity: int, pad: torch.Tensor | None) -> FakeGeneration:
        self.starts.append((batch, capacity))
        return FakeGeneration(self, batch)


class FakeGeneration:
    def __init__(self, staged: FakeStaged, batch: int) -> None:
        self.staged = staged
        self.batch = batch
        self.length = 0
        self.steps = 0

    def _work(self, stage: str, shape: tuple[int, ...], ms: float, peak: int, step: int) -> torch.Tensor:
        staged = self.staged
        if staged.fail_at == step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. More words.")
        if (stage, shape) not in staged.seen:
            staged.seen.add((stage, shape))
            staged.device.queue(staged.first_use_ms)
        staged.device.queue(ms)
        staged.device.touch(peak)
        logits = torch.zeros(self.batch, staged.vocab)
        for row in range(self.batch):
            logits[row, staged.answer(step, row)] = 1.0
        if staged.nan_at is not None and step >= staged.nan_at:
            logits[0, 3] = float("nan")
        return logits

    pieces = 1

    def prefill(self, ids: torch.Tensor, cancelled: Callable[[], bool] = lambda: False) -> torch.Tensor:
        self.length = ids.shape[1]
        self.staged.passes.append(("prefill", ids.shape[1]))
        return self._work("prefill", tuple(ids.shape), self.staged.prefill_ms, self.staged.prefill_peak, 0)

    def handoff(self) -> None:
        self.staged.device.queue(self.staged.handoff_ms)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.length += 1
        self.steps += 1
        self.staged.passes.append(("decode", 1))
        return self._work("decode", (self.batch,), self.staged.step_ms, self.staged.decode_peak, self.steps)

    def rewind(self, positions: int) -> None:
        self.staged.passes.append(("rewind", positions))
        self.length = positions

    def bytes_per_step_wasted(self) -> int:
        return 0

    def kv_bytes(self) -> int:
        return 2 * self.length * self.batch

    def prefill_cost(self, P: int) -> FakeCost:
        return FakeCost(10 * P, {"bf16": 100.0 * P})

    def step_cost(self) -> FakeCost:
        return FakeCost(1000 + self.length, {"bf16": 10.0})


def fake_arm(device: FakeDevice, label: str = "A", **costs: Any) -> Arm:
    """An arm of its own policy: two labels have two digests."""
    policy = Policy(name=f"policy-{label}", summary=label, keep=(Keep(modules=(label,)),))
    return Arm(label, policy, FakeStaged(device, **costs))
