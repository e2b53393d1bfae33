"""Stage-pure loops for energy: what to run, and when each ran."""

from __future__ import annotations

from pdq_tui.core.messages.base import Message


class MeasureEnergy(Message):
    """For each of ``arms`` four windows of at least ``seconds``: idle, prefill after prefill, decode step after decode
    step, whole requests. Apart from all measured requests. Answered by ``EnergyWindow`` each, then ``TaskEnded``."""

    arms: list[str]
    seconds: float = 6.0


class EnergyWindow(Message):
    """One window, never dropped. ``window``: idle, prefill, decode, mixed. Its edges are on the sensors' clock, after a
    synchronise; tokens are over the batch, ``output_tokens`` those of decode steps."""

    arm: str
    policy_digest: str
    window: str
    start_ns: int
    end_ns: int
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9
