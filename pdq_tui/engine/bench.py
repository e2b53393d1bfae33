"""Requests in a row: the endless loop of the live view, and the blocks of a measurement.

An arm is chosen at a request's start and never inside one. Every shape is warmed before it counts. What happens
between two requests is kept small: the record is sent, the next arm is looked up, and the next request starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdq_tui.core import protocol as p
from pdq_tui.core.workload import Turn, block_turns
from pdq_tui.engine import stops
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.device import Device
from pdq_tui.engine.guard import Kept, rescore
from pdq_tui.engine.prompts import Batch, Prepared
from pdq_tui.engine.runner import Arm, Hooks, Limits, Peaks, first_use, run_request
from pdq_tui.errors import UsageError

#: What is warmed up once: policy's digest, stage, rows, and positions (of the prompt, of the buffers).
Shape = tuple[str, str, int, int]


@dataclass
class Control:
    """What the person wants, asked between requests, and ``stopped`` at every token."""

    stopped: Callable[[], bool] = field(default=lambda: False)
    selected: Callable[[], str | None] = field(default=lambda: None)
    interleave: Callable[[], bool] = field(default=lambda: False)
    #: Does what waits between requests (packing, a new workload); True where the loop has to give way.
    between: Callable[[], bool] = field(default=lambda: False)


class Bench:
    """Arms, a workload, and the running numbers of requests and blocks, which never repeat within a process.

    ``epoch`` rises with every change of an arm or of the workload: a block that saw one is given up, since its turns
    would not compare the same things.
    """

    def __init__(self, device: Device, send: Callable[[p.Message], None]) -> None:
        self.device = device
        self.send = send
        self.arms: dict[str, Arm] = {}
        self.prepared: Prepared | None = None
        self.eos: frozenset[int] = frozenset()
        self.text: Callable[[Sequence[int]], str] | None = None
        self.peaks: Peaks | None = None
        self.epoch = 0
        self.warmup_steps = 10
        self.guard: p.Guard | None = None
        self._guarded: dict[str, int] = {}
        self._to_rescore: list[tuple[Arm, Batch, Kept, p.Request]] = []
        self._requests = 0
        self._blocks = 0
        self._last_end_ns: int | None = None
        self._warm: set[Shape] = set()
        self._history: dict[tuple[str, int, int], list[float]] = {}

    # -- what changes between requests -------------------------------------------------------------------------------

    def set_arm(self, arm: Arm, *, packed_anew: bool) -> None:
        """Put ``arm`` in place of the one with its label. Weights that were packed anew are warmed anew."""
        self.arms[arm.label] = arm
        self.epoch += 1
        self._last_end_ns = None
        if packed_anew:
            self.forget_warm(arm.policy.digest)

    def set_workload(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self._to_rescore.clear()
        self.epoch += 1
        self._last_end_ns = None

    def disturbed(self) -> None:
        """Something else ran in between: a block around it is given up, and the next gap is none."""
        self.epoch += 1
        self._last_end_ns = None

    def forget_warm(self, digest: str) -> None:
        self._warm = {key for key in self._warm if key[0] != digest}
        self._history = {key: value for key, value in self._history.items() if key[0] != digest}

    # -- one request -------------------------------------------------------------------------------------------------

    def _batch(self, number: int) -> Batch:
        if self.prepared is None:
            raise UsageError("there is no workload yet")
        return self.prepared.batches[number % len(self.prepared.batches)]

    def prompts(self) -> Sequence[Batch]:
        """The workload's batches. Raises UsageError where there is none."""
        self._batch(0)
        assert self.prepared is not None
        return self.prepared.batches

    def warm_up(self, label: str, stopped: Callable[[], bool]) -> None:
        """What is cold of this arm and the workload's first shape, before anything counts."""
        self._warm_up(self.arm(label), self._batch(0), stopped)

    def is_warm(self, label: str) -> bool:
        """Whether both stages of this arm have run on the workload's first shape."""
        return self._warm.issuperset(self._shapes(self.arm(label), self._batch(0)))

    def _shapes(self, arm: Arm, batch: Batch) -> tuple[Shape, Shape]:
        """Of prefill and of decode."""
        assert self.prepared is not None
        digest = arm.policy.digest
        return (digest, "prefill", batch.rows, batch.width), (
            digest,
            "decode",
            batch.rows,
            self.prepared.capacity,
        )

    def arm(self, label: str) -> Arm:
        if label not in self.arms:
            raise UsageError(f"arm {label} has no policy yet")
        return self.arms[label]

    def request(
        self, label: str, prompt: int, kind: str, stopped: Callable[[], bool], turn: Turn | None = None
    ) -> p.Request:
        """Warm what is cold, run one request of the workload, send its record."""
        arm, batch = self.arm(label), self._batch(prompt)
        self._warm_up(arm, batch, stopped)
        kept = self._kept(label, kind)
        record = self._run(arm, batch, kind, stopped, turn, kept=kept)
        if kept is not None and not record.cancelled:
            self._to_rescore.append((arm, batch, kept, record))
        key = (arm.policy.digest, batch.rows, batch.width)
        history = self._history.setdefault(key, [])
        if len(history) <= 1:
            record.first_use = first_use(record, history)
        if len(history) < 8 and record.prefill_ms is not None:
            history.append(record.prefill_ms)
        self.send(record)
        return record

    def _run(
        self,
        arm: Arm,
        batch: Batch,
        kind: str,
        stopped: Callable[[], bool],
        turn: Turn | None = None,
        output_tokens: int | None = None,
        kept: Kept | None = None,
    ) -> p.Request:
        assert self.prepared is not None
        workload = self.prepared.workload
        self._requests += 1
        record = p.Request(
            request=self._requests,
            arm=arm.label,
            policy=arm.policy.name,
            policy_digest=arm.policy.digest,
            kind=kind,
            prompt=batch.number,
            warmup=kind == "warmup",
        )
        if turn is not None:
            record.block, record.slot, record.control = turn.block, turn.slot, turn.control
        tokens = output_tokens or workload.output_tokens
        limits = Limits(tokens, workload.stop == "natural" and kind != "warmup", self.eos)
        number = self._requests

        def sample(made: int, stage: str, itl_ms: float | None) -> None:
            self.send(p.StageSample(request=number, arm=arm.label, stage=stage, tokens=made, itl_ms=itl_ms))

        hooks = Hooks(cancelled=stopped, sample=sample, text=self.text, peaks=self.peaks)
        if kept is not None:
            hooks.logits, hooks.kept = kept.logits, kept.tokens
        run_request(self.device, arm, batch, self.prepared.capacity, limits, record, hooks)
        if record.host_start_ns and stops.since(record.host_start_ns):
            record.cancelled = True
            self.send(
                p.Note(
                    level="warn",
                    text=f"request {number} does not count: the engine's process was stopped and continued during it",
                )
            )
        if self._last_end_ns is not None:
            record.gap_ms = (record.host_start_ns - self._last_end_ns) / 1e6
        self._last_end_ns = record.host_end_ns
        return record

    def _warm_up(self, arm: Arm, batch: Batch, stopped: Callable[[], bool]) -> None:
        """Both stages' real paths for this (stage, policy, shape), once; the record is sent and marked."""
        assert self.prepared is not None
        digest, tokens = arm.policy.digest, self.prepared.workload.output_tokens
        prefill, decode = self._shapes(arm, batch)
        if prefill in self._warm and (decode in self._warm or tokens == 1):
            return
        steps = 1 if decode in self._warm else self.warmup_steps
        record = self._run(arm, batch, "warmup", stopped, output_tokens=min(tokens, steps + 1))
        record.first_use = True
        if not record.cancelled:
            self._warm |= {prefill, decode}
            if record.prefill_ms is not None:
                self._history[digest, batch.rows, batch.width] = [record.prefill_ms]
        self.send(record)

    # -- the guard ---------------------------------------------------------------------------------------------------

    def set_guard(self, command: p.Guard) -> None:
        self.guard = command if command.every else None
        self._guarded.clear()

    def _kept(self, label: str, kind: str) -> Kept | None:
        """What keeps this request's logits, where it is one to be re-scored."""
        guard = self.guard
        if guard is None or kind != "loop" or label == guard.base or guard.base not in self.arms:
            return None
        number = self._guarded.get(label, 0)
        self._guarded[label] = number + 1
        return Kept() if number % guard.every == 0 else None

    def _rescore(self) -> None:
        """Between two requests, and behind a block: what waits to be held against the baseline."""
        waiting, self._to_rescore = self._to_rescore, []
        for arm, batch, kept, record in waiting:
            base = self.arms.get(self.guard.base) if self.guard is not None else None
            if base is not None and self.prepared is not None:
                self.send(rescore(self.device, arm, base, batch, self.prepared.capacity, kept, record))
                self._last_end_ns = None

    # -- the loop ----------------------------------------------------------------------------------------------------

    def loop(self, command: p.StartLoop, control: Control) -> None:
        """Run without end; interleaved, all arms take turns in mirrored blocks with the first one as its own control."""
        self._require([command.arm])
        self.send(
            p.RunStarted(kind="loop", arms=command.arms, interleave=command.interleave, seed=command.seed)
        )
        first, current = self._requests, command.arm
        blocks, number = 0, 0
        while not control.stopped() and not control.between() and not control.stopped():
            ready = [label for label in command.arms if label in self.arms]
            if control.interleave() and len(ready) > 1:
                took = self._block(ready, command.seed, "loop", control, lambda: not control.interleave())
                blocks += took is not None
                self._rescore()
                continue
            wanted = control.selected() or current
            if wanted != current and wanted in self.arms:
                current = wanted
                self.send(
                    p.ArmSwitched(
                        arm=current, policy=self.arms[current].policy.name, at_request=self._requests + 1
                    )
                )
            self.request(current, number, "loop", control.stopped)
            self._rescore()
            number += 1
        self._ended("stopped", first, blocks)

    def _block(
        self,
        arms: Sequence[str],
        seed: int,
        kind: str,
        control: Control,
        given_up: Callable[[], bool] = lambda: False,
    ) -> float | None:
        """One block over one prompt. Returns the seconds of its turns, None where it was broken off."""
        number, epoch = self._blocks, self.epoch
        self._blocks += 1
        turns = block_turns(arms, number, seed)
        # Warmed before the first turn, so that no turn of the block comes after a warm-up and another does not.
        for label in arms:
            self._warm_up(self.arm(label), self._batch(number), control.stopped)
        begin = self.device.host_ns()
        for position, turn in enumerate(turns):
            if position and (control.between() or self.epoch != epoch or given_up()):
                return None
            if control.stopped():
                return None
            self.request(turn.arm, number, kind, control.stopped, turn)
        return None if control.stopped() else (self.device.host_ns() - begin) / 1e9

    # -- the measurement ---------------------------------------------------------------------------------------------

    def blocks(
        self,
        command: p.RunBlocks,
        control: Control,
        solo: Callable[[str], None],
        together: Callable[[], None],
    ) -> None:
        """A measurement to its end. ``solo(label)`` leaves only that arm's weights in memory, ``together()`` brings
        all back. Ends when blocks and seconds are enough, when the budget would be overrun, or when stopped."""
        self._require(command.arms)
        started, first = self.device.host_ns(), self._requests
        self.warmup_steps = max(self.warmup_steps, command.warmup_steps)
        self.send(
            p.RunStarted(
                kind="blocks", arms=command.arms, interleave=True, seed=command.seed, blocks=command.blocks
            )
        )
        if command.solo:
            try:
                self._solo(command.arms, control, solo, together)
            except Cancelled:
                assert control.stopped()  # packing is cancelled by the stop, which the loop below answers
        done, measured_s, longest_s, reason = 0, 0.0, 0.0, "done"
        while done < command.blocks or measured_s < command.min_seconds:
            if control.stopped():
                reason = "stopped"
                break
            elapsed_s = (self.device.host_ns() - started) / 1e9
            if command.budget_s is not None and done and elapsed_s + longest_s > command.budget_s:
                reason = "budget"
                break
            self.send(
                p.Progress(
                    task="measure",
                    label=f"block {done + 1} of {max(command.blocks, done + 1)}",
                    done=done,
                    total=max(command.blocks, done + 1),
                    unit="blocks",
                )
            )
            begin = self.device.host_ns()
            took_s = self._block(command.arms, command.seed, "blocks", control)
            # Warm-ups cost budget, and are no measured time.
            longest_s = max(longest_s, (self.device.host_ns() - begin) / 1e9)
            if took_s is not None:
                measured_s += took_s
                done += 1
        self._ended(reason, first, done)

    def _solo(
        self,
        arms: Sequence[str],
        control: Control,
        solo: Callable[[str], None],
        together: Callable[[], None],
    ) -> None:
        """Memory belongs to a policy only while no other is resident: one request of each arm alone."""
        for number, label in enumerate(arms):
            if control.stopped():
                break
            self.send(
                p.Progress(task="measure", label=f"{label} alone, for memory", done=number, total=len(arms))
            )
            solo(label)
            self.request(label, 0, "solo", control.stopped)
        if not control.stopped():
            together()

    def _require(self, labels: Sequence[str]) -> None:
        for label in labels:
            self.arm(label)
        self._batch(0)

    def _ended(self, reason: str, first: int, blocks: int) -> None:
        self._last_end_ns = None
        self.send(p.RunEnded(reason=reason, requests=self._requests - first, blocks=blocks))
