"""One request, timed: prefill, hand-off, N − 1 decode steps, each stage between two marks of the device.

No synchronise inside a stage, nothing sent, nothing decoded, no garbage collected: what is needed for the record is
kept on the device and read at the stage's edge. The first token is chosen by prefill's own logits, so it belongs to
prefill; decode starts from the cache that this prefill wrote.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

import torch

from pdq_tui.core.policy import Policy
from pdq_tui.core.protocol import KvInfo, NonFinite, Request
from pdq_tui.engine import faults
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.device import Device, Mark
from pdq_tui.engine.devices import places
from pdq_tui.engine.prompts import Batch

#: A sample this many times above the median, at the first use of a shape, is a one-off cost, not a speed.
FIRST_USE_FACTOR = 5.0
#: Live samples are sent at most this often, in seconds.
SAMPLE_EVERY_S = 0.1


class Cost(Protocol):
    """The census of one stage (``core.roofline``): stored bytes read, FLOPs by dtype, and the hardware's limit."""

    @property
    def bytes(self) -> int: ...
    @property
    def flops(self) -> dict[str, float]: ...
    def bound_ms(self, read_gbps: float | None, compute_tflops: Mapping[str, float]) -> float | None: ...


class Generation(Protocol):
    """One request's state in a staged model; see ``engine.staged``."""

    @property
    def length(self) -> int: ...
    @property
    def pieces(self) -> int: ...
    def prefill(self, ids: torch.Tensor, cancelled: Callable[[], bool] = ...) -> torch.Tensor: ...
    def score(self, ids: torch.Tensor, keep: int) -> torch.Tensor: ...
    def handoff(self) -> None: ...
    def step(self, tokens: torch.Tensor) -> torch.Tensor: ...
    def rewind(self, positions: int) -> None: ...
    def bytes_per_step_wasted(self) -> int: ...
    def kv_bytes(self) -> int: ...
    def prefill_cost(self, P: int) -> Cost: ...
    def step_cost(self) -> Cost: ...


class Staged(Protocol):
    """A policy made ready; see ``engine.staged``."""

    def start(self, batch: int, capacity: int, pad: torch.Tensor | None) -> Generation: ...
    def kv_info(self) -> KvInfo: ...


@dataclass
class Arm:
    """A label ("A", "int8#2"), the policy it follows, and the model that follows it."""

    label: str
    policy: Policy
    staged: Staged


@dataclass(frozen=True)
class Limits:
    """What ends a request. ``eos``: ids that end a row in natural mode; in fixed mode they are ignored, and told."""

    output_tokens: int
    natural: bool
    eos: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Peaks:
    """What the device reached when it was tried: reading, in GB/s, and products by dtype, in TFLOP/s."""

    read_gbps: float | None = None
    read_method: str = ""
    compute_tflops: dict[str, float] = field(default_factory=dict)
    copy_gbps: float | None = None


@dataclass
class Hooks:
    """What a request needs from outside. ``sample(tokens, stage, itl_ms)`` must not block."""

    cancelled: Callable[[], bool] = field(default=lambda: False)
    sample: Callable[[int, str, float | None], None] | None = None
    text: Callable[[Sequence[int]], str] | None = None
    #: Gets every row's tokens and the largest logit that chose one, after the request.
    kept: Callable[[list[list[int]], float], None] | None = None
    peaks: Peaks | None = None
    #: Gets the logits [B, V] that chose a token, and which it was (0: prefill's), outside every timed step. It copies
    #: what it keeps: the next step may write there.
    logits: Callable[[int, torch.Tensor], None] | None = None


class RequestFailedError(Exception):
    """The device gave up inside a request. ``partial`` is the record so far, marked invalid; the cause is chained."""

    def __init__(self, stage: str, step: int, partial: Request) -> None:
        super().__init__(f"{stage}, step {step}")
        self.stage = stage
        self.step = step
        self.partial = partial


@torch.inference_mode()
def run_request(
    device: Device,
    arm: Arm,
    batch: Batch,
    capacity: int,
    limits: Limits,
    record: Request,
    hooks: Hooks,
) -> Request:
    """Run one request and fill ``record`` (already named: number, arm, kind, block). Returns the same record.

    batch     token ids [B, P], left-padded, and the padding of each row.
    capacity  tokens of KV that each row's buffer holds, at least P + output_tokens.
    Raises RequestFailedError for what the device or the allocator raised in the middle.
    """
    run = _Run(device, arm, batch, limits, record, hooks)
    collecting = gc.isenabled()
    gc.disable()
    try:
        run.go(capacity)
    except (RuntimeError, MemoryError) as error:
        record.valid = False
        why = "out of memory" if faults.kind_of(error) == "oom" else faults.first_line(error)
        record.invalid_reason = f"failed in {run.stage}, step {run.step}: {why}"
        run.close_times()
        raise RequestFailedError(run.stage, run.step, record) from error
    finally:
        if collecting:
            gc.enable()
    return record


class _Run:
    """The request in flight."""

    def __init__(
        self, device: Device, arm: Arm, batch: Batch, limits: Limits, record: Request, hooks: Hooks
    ) -> None:
        self.device, self.arm, self.batch, self.limits = device, arm, batch, limits
        self.record, self.hooks = record, hooks
        self.stage, self.step = "prefill", 0
        self.tokens: list[torch.Tensor] = []
        self.highest: list[torch.Tensor] = []
        self.spans: list[tuple[Mark, Mark]] = []

    def go(self, capacity: int) -> None:
        record, device, batch = self.record, self.device, self.batch
        record.batch = batch.rows
        record.prompt_tokens, record.padded_tokens = batch.real_tokens, batch.padded_tokens
        record.memory_method = device.memory_method
        record.eager_launch_bound = device.kind == "cuda"
        record.devices = len(places(device)[0])
        record.policy, record.policy_digest = self.arm.policy.name, self.arm.policy.digest
        record.stop = "natural" if self.limits.natural else "fixed"
        ids = batch.ids.to(device.torch_device)
        pad = batch.pad.to(device.torch_device) if batch.pad is not None else None
        generation = self.arm.staged.start(batch.rows, capacity, pad)
        device.synchronize()
        record.host_start_ns = device.host_ns()
        try:
            self._prefill(generation, ids)
        except Cancelled:
            # Between two pieces of its prompt: there is no token yet, and no time.
            device.synchronize()
            record.host_end_ns = device.host_ns()
            record.cancelled = True
            record.output_tokens = [0] * batch.rows
            record.stop_reasons = ["cancelled"] * batch.rows
            return
        if self.limits.output_tokens > 1 and not self._cancelled() and not self._all_ended():
            self._decode(generation)
        self.close_times()
        self._close_tokens()
        record.kv_bytes = generation.kv_bytes()

    # -- the two stages ----------------------------------------------------------------------------------------------

    def _prefill(self, generation: Generation, ids: torch.Tensor) -> None:
        device, record = self.device, self.record
        device.reset_peak()
        begin = device.mark()
        logits = generation.prefill(ids, self.hooks.cancelled)
        # max, not argmax: it gives the token as well, propagates NaN, and is the faster of the two on a CPU.
        highest, token = logits.max(dim=-1)
        end = device.mark()
        device.synchronize()
        record.host_end_ns = device.host_ns()
        record.prefill_ms = device.elapsed_ms(begin, end)
        # Prompts are tokenized when the workload is set, and one request runs at a time: nothing else precedes.
        record.ttft_ms = record.prefill_ms
        record.prefill_peak_bytes = device.peak_bytes()
        self.tokens.append(token)
        self.highest.append(highest)
        if not _all_finite(logits):
            self._invalid("prefill", 0)
        if self.hooks.logits is not None:
            self.hooks.logits(0, logits)
        record.prefill_pieces = generation.pieces
        cost = generation.prefill_cost(ids.shape[1])
        record.prefill_bytes, record.prefill_flops = cost.bytes, dict(cost.flops)
        record.prefill_bound_ms = self._bound_ms(cost)

    def _decode(self, generation: Generation) -> None:
        device, record, sample = self.device, self.record, self.hooks.sample
        self.stage = "handoff"
        begin = device.mark()
        generation.handoff()
        end = device.mark()
        device.synchronize()
        record.handoff_ms = device.elapsed_ms(begin, end)
        first_cost = generation.step_cost()
        steps = self.limits.output_tokens - 1
        steady_at = {steps * 2 // 3 + 1, steps * 5 // 6 + 1, steps}
        steady: list[int] = []
        stop = _StopFlag(device, self.tokens[0], self.limits) if self.limits.natural else None
        self.stage = "decode"
        device.reset_peak()
        token = self.tokens[0]
        logits = None
        sampled_ns = device.host_ns()
        start = device.mark()
        for number in range(1, steps + 1):
            self.step = number
            logits = generation.step(token)
            highest, token = logits.max(dim=-1)
            mark = device.mark()
            self.spans.append((start, mark))
            self.tokens.append(token)
            self.highest.append(highest)
            if self.hooks.logits is not None:
                self.hooks.logits(number, logits)
            if stop is not None and stop.all_ended(token):
                break
            if self.hooks.cancelled():
                record.cancelled = True
                break
            # What is not part of a step (a live sample, a look at the memory) lies between two marks of its own.
            pause = stop is not None or self.hooks.logits is not None
            if number in steady_at and (held := device.allocated_bytes()) is not None:
                steady.append(held)
                pause = True
            if sample is not None and device.host_ns() - sampled_ns >= SAMPLE_EVERY_S * 1e9:
                sampled_ns = device.host_ns()
                sample(number + 1, "decode", device.peek_ms(start, mark))
                pause = True
            start = device.mark() if pause else mark
        device.synchronize()
        record.host_end_ns = device.host_ns()
        record.decode_peak_bytes = device.peak_bytes()
        record.steady_bytes = int(median(steady)) if steady else None
        self._check_decode(logits)
        # Linear in the length, so the mean over the steps is the mean of the first and the last.
        last_cost = generation.step_cost()
        record.bytes_per_step = (first_cost.bytes + last_cost.bytes) // 2
        record.bytes_per_step_wasted = generation.bytes_per_step_wasted()
        first, last = first_cost.flops, last_cost.flops
        record.decode_flops = {d: (first.get(d, 0.0) + last.get(d, 0.0)) / 2 for d in sorted(first | last)}
        first_bound, last_bound = self._bound_ms(first_cost), self._bound_ms(last_cost)
        if first_bound is not None and last_bound is not None:
            record.decode_bound_ms = (first_bound + last_bound) / 2

    def _bound_ms(self, cost: Cost) -> float | None:
        peaks = self.hooks.peaks
        return cost.bound_ms(peaks.read_gbps, peaks.compute_tflops) if peaks is not None else None

    def _cancelled(self) -> bool:
        self.record.cancelled = self.record.cancelled or self.hooks.cancelled()
        return self.record.cancelled

    def _all_ended(self) -> bool:
        """True in natural mode where the first token already ends every row."""
        return self.limits.natural and all(int(t) in self.limits.eos for t in self.tokens[0].tolist())

    # -- outside the timed region ------------------------------------------------------------------------------------

    def _invalid(self, stage: str, step: int) -> None:
        if self.record.nonfinite is None:
            self.record.valid = False
            self.record.nonfinite = NonFinite(stage, step)
            where = "prefill" if stage == "prefill" else f"decode step {step}"
            self.record.invalid_reason = f"logits are not finite from {where} on"

    def _check_decode(self, logits: torch.Tensor | None) -> None:
        """The highest logit of each step was kept: NaN or +inf shows there at its first step. The last step's logits
        are looked at whole, which shows −inf as well."""
        rows = torch.stack(self.highest[1:]) if len(self.highest) > 1 else None
        if rows is None or logits is None:
            return
        bad = ~torch.isfinite(rows).all(dim=1)
        if bool(bad.any()):
            self._invalid("decode", int(bad.int().argmax()) + 1)
        elif not _all_finite(logits):
            self._invalid("decode", self.step)

    def close_times(self) -> None:
        """Read the marks; called after the last synchronise, or after a failure for what was finished by then."""
        record = self.record
        try:
            record.itl_ms = [self.device.elapsed_ms(first, second) for first, second in self.spans]
        except RuntimeError:
            # The device died before its events were reached: the times of this decode do not exist.
            record.itl_ms = []
        if record.itl_ms:
            record.decode_ms = sum(record.itl_ms)
            record.tpot_ms = record.decode_ms / len(record.itl_ms)
        if record.ttft_ms is not None:
            record.e2e_ms = record.ttft_ms + (record.handoff_ms or 0.0) + (record.decode_ms or 0.0)

    def _close_tokens(self) -> None:
        """Read the tokens once, cut each row where it ended, and drop the steps after the last row's end."""
        record, limits = self.record, self.limits
        rows: list[list[int]] = torch.stack(self.tokens, dim=1).tolist()
        made = len(rows[0])
        kept, reasons = [], []
        for row in rows:
            end = next((i for i, token in enumerate(row) if token in limits.eos), None)
            if limits.natural and end is not None:
                kept.append(row[: end + 1])
                reasons.append("eos")
                continue
            kept.append(row)
            if made < limits.output_tokens:
                reasons.append("cancelled" if record.cancelled else "ended with the batch")
            else:
                reasons.append("length, EOS ignored" if end is not None else "length")
        record.output_tokens = [len(row) for row in kept]
        record.stop_reasons = reasons
        # The host may have run ahead of the stop flag: steps after the last row's end are no part of the answer.
        longest = max(record.output_tokens)
        if longest < made:
            del record.itl_ms[longest - 1 :]
            record.decode_ms = sum(record.itl_ms) if record.itl_ms else None
            record.tpot_ms = sum(record.itl_ms) / len(record.itl_ms) if record.itl_ms else None
            record.e2e_ms = (record.ttft_ms or 0.0) + (record.handoff_ms or 0.0) + (record.decode_ms or 0.0)
        digest = hashlib.sha256()
        for row in kept:
            digest.update((",".join(map(str, row)) + ";").encode("ascii"))
        record.tokens_sha256 = digest.hexdigest()
        record.token_ids = kept[0]
        if self.hooks.text is not None:
            record.text = self.hooks.text(kept[0])
        if self.hooks.kept is not None:
            self.hooks.kept(kept, float(torch.stack(self.highest).max()))


class _StopFlag:
    """Have all rows met an EOS? Asked without a synchronise: the flag travels to pinned memory behind the work, so on
    an asynchronous device the answer may be some steps old; the surplus steps are cut from the record."""

    def __init__(self, device: Device, first: torch.Tensor, limits: Limits) -> None:
        self._eos = torch.tensor(sorted(limits.eos), dtype=first.dtype, device=first.device)
        self._ended = torch.isin(first, self._eos)
        self._flag = torch.zeros((), dtype=torch.bool, pin_memory=device.kind == "cuda")

    def all_ended(self, tokens: torch.Tensor) -> bool:
        self._ended |= torch.isin(tokens, self._eos)
        self._flag.copy_(self._ended.all(), non_blocking=True)
        return bool(self._flag)


def first_use(record: Request, history: Sequence[float]) -> bool:
    """Does this first measured request of a shape hold a one-off cost? ``history``: earlier prefill times, in ms, of
    the same policy and shape (at least the warm-up's)."""
    if history and record.prefill_ms is not None:
        fresh = record.prefill_ms > FIRST_USE_FACTOR * median(history)
    else:
        fresh = not history
    if len(record.itl_ms) >= 3:
        fresh = fresh or max(record.itl_ms) > FIRST_USE_FACTOR * median(record.itl_ms)
    return fresh


def _all_finite(logits: torch.Tensor) -> bool:
    """NaN and both infinities survive min and max, so two numbers tell; far cheaper than isfinite over bf16."""
    low, high = torch.aminmax(logits)
    return bool(torch.isfinite(low) & torch.isfinite(high))
