"""Stage-pure loops: one stage over and over for seconds, so that an energy counter beside them belongs to it alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

import torch

from pdq_tui.core.messages.energy import EnergyWindow
from pdq_tui.engine.cancel import check
from pdq_tui.engine.device import Device
from pdq_tui.engine.prompts import Batch
from pdq_tui.engine.runner import Arm

WINDOWS: Final = ("idle", "prefill", "decode", "mixed")
#: Decode steps between two synchronises: an asynchronous device must not run minutes behind the clock.
STEPS: Final = 16
_SLICE_S: Final = 0.1


class Loops:
    """One arm and one prompt. ``output_tokens`` of the workload: what a whole request makes."""

    def __init__(
        self,
        device: Device,
        arm: Arm,
        batch: Batch,
        capacity: int,
        output_tokens: int,
        cancelled: Callable[[], bool],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.device, self.arm, self.batch, self.capacity = device, arm, batch, capacity
        self.steps = max(0, output_tokens - 1)
        self.cancelled, self.sleep = cancelled, sleep

    @torch.inference_mode()
    def run(self, window: str, seconds: float) -> EnergyWindow:
        """Raises Cancelled."""
        device, batch = self.device, self.batch
        self.ids = batch.ids.to(device.torch_device)
        pad = batch.pad.to(device.torch_device) if batch.pad is not None else None
        self.generation = self.arm.staged.start(batch.rows, self.capacity, pad)
        turns = {"idle": self._idle, "prefill": self._prefill, "decode": self._decode, "mixed": self._mixed}[
            window
        ]()
        next(turns)  # whatever comes before the loop: a prompt for decode
        device.synchronize()
        out = EnergyWindow(
            arm=self.arm.label,
            policy_digest=self.arm.policy.digest,
            window=window,
            start_ns=device.host_ns(),
            end_ns=0,
        )
        while True:
            check(self.cancelled)
            prompt, made = next(turns)
            device.synchronize()
            out.prompt_tokens += prompt
            out.output_tokens += made
            out.end_ns = device.host_ns()
            if out.seconds >= seconds:
                return out

    def _idle(self) -> Iterator[tuple[int, int]]:
        while True:
            yield 0, 0
            self.sleep(_SLICE_S)

    def _prefill(self) -> Iterator[tuple[int, int]]:
        yield 0, 0
        while True:
            self.generation.prefill(self.ids).max(dim=-1)
            yield self.batch.real_tokens, 0

    def _decode(self) -> Iterator[tuple[int, int]]:
        """Steps through the cache that one prefill wrote; at its end back to that prefill's end, not to another prompt."""
        generation, start = self.generation, self.batch.width
        _, token = generation.prefill(self.ids).max(dim=-1)
        generation.handoff()
        most = min(self.steps, self.capacity - start)
        yield 0, 0
        made = since = 0
        while most:
            if made == most:
                generation.rewind(start)
                made = 0
            _, token = generation.step(token).max(dim=-1)
            made, since = made + 1, since + 1
            if since == STEPS:
                yield 0, since * self.batch.rows
                since = 0

    def _mixed(self) -> Iterator[tuple[int, int]]:
        yield 0, 0
        most = min(self.steps, self.capacity - self.batch.width)
        while True:
            _, token = self.generation.prefill(self.ids).max(dim=-1)
            self.generation.handoff()
            for number in range(most):
                _, token = self.generation.step(token).max(dim=-1)
                if number % STEPS == STEPS - 1:
                    self.device.synchronize()
            yield self.batch.real_tokens, most * self.batch.rows
