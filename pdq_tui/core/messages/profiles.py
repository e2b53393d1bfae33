"""A profiled burst: one prefill and a few decode steps under torch's profiler, told kernel by kernel."""

from __future__ import annotations

import msgspec

from pdq_tui.core.messages.base import Message


class KernelTime(msgspec.Struct, kw_only=True):
    """One kernel (on a CPU: one operator) of a stage.

    ms      self time over the whole burst: without what it called, and counted once where kernels overlap
    share   ``ms`` over the stage's time; all shares of a stage add up to 1 at most
    bytes   operands and result once each, over all calls, from their shapes; None where the shapes do not tell
    flops   likewise, two a multiply-add
    """

    name: str
    category: str
    calls: int
    ms: float
    share: float
    bytes: int | None = None
    flops: float | None = None


class StageTrace(msgspec.Struct, kw_only=True):
    """One stage of a burst.

    steps         passes: 1 of prefill, some of decode
    where         "device": kernels by the device's own clock; "cpu": operators by the host's
    trace_ms      the stage in the trace, all passes
    timer_ms      the same passes between the marks that every request is timed with
    plain_ms      the same burst without the profiler
    between_ms    time in the stage during which no kernel ran
    launch_bound  whether the device waited for launches; None with ``launch_reason`` where there is no device
    unmatched     what the policy says that this stage runs, and the trace does not show
    """

    stage: str
    steps: int
    where: str
    trace_ms: float
    timer_ms: float | None = None
    plain_ms: float | None = None
    between_ms: float = 0.0
    launch_bound: bool | None = None
    launch_reason: str | None = None
    kernels: list[KernelTime] = msgspec.field(default_factory=list)
    unmatched: list[str] = msgspec.field(default_factory=list)

    @property
    def overhead(self) -> float | None:
        """How many times as long the passes took under the profiler."""
        return self.timer_ms / self.plain_ms if self.timer_ms and self.plain_ms else None


class Traced(Message):
    """The answer to ``Trace``; never dropped. ``failed``: why there are no stages; the engine lives on.

    path     the file, gzipped, which was read back before this was sent; None with ``path_reason``
    rolling  of a schedule: the arm's next such burst replaces the file
    """

    arm: str
    policy: str
    policy_digest: str = ""
    prompt_tokens: int = 0
    batch: int = 1
    steps: int = 0
    stages: list[StageTrace] = msgspec.field(default_factory=list)
    path: str | None = None
    path_reason: str | None = None
    bytes: int | None = None
    rolling: bool = False
    events: int = 0
    seconds: float = 0.0
    notes: list[str] = msgspec.field(default_factory=list)
    failed: str | None = None
