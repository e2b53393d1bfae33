"""A headless measurement: the same engine, journal and events as the app's, driven from the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pdq_tui.core import protocol as p
from pdq_tui.core.policy import Policy
from pdq_tui.core.workload import Workload
from pdq_tui.errors import FAILED, INTERRUPTED, OK, USAGE, PdqError
from pdq_tui.host.conversation import SILENT_S, Conversation, InterruptedEarlyError
from pdq_tui.host.runs import Run


@dataclass(frozen=True)
class MeasureResult:
    """``events``: the whole journal. ``labels``: arms in order, the reference first. ``reason``: done, budget,
    stopped (by Ctrl-C). ``exit_code``: 0, or 130 when interrupted: what was measured is there."""

    events: list[Any]
    reason: str
    labels: tuple[str, ...] = ()
    exit_code: int = OK


class MeasureError(PdqError):
    """A measurement that failed. ``events``: what there is nevertheless, also in the run's journal."""

    def __init__(
        self, message: str, hint: str | None = None, exit_code: int = FAILED, events: Sequence[Any] = ()
    ) -> None:
        super().__init__(message, hint, exit_code)
        self.events = list(events)

    @property
    def requests(self) -> int:
        """How many requests were measured before it failed."""
        return sum(isinstance(e, p.Request) and e.valid for e in self.events)


def labels(policies: Sequence[Policy]) -> list[str]:
    """Unique arm labels: the policy's name, from the second of a name on ``name#2``, ``name#3``."""
    seen: dict[str, int] = {}
    found = []
    for policy in policies:
        seen[policy.name] = count = seen.get(policy.name, 0) + 1
        found.append(policy.name if count == 1 else f"{policy.name}#{count}")
    return found


def measure(
    load: p.Load,
    policies: Sequence[Policy],
    workload: Workload,
    *,
    run: Run,
    blocks: int = 10,
    budget_s: float | None = None,
    seed: int = 0,
    hard: bool = False,
    on_event: Callable[[Any], None] | None = None,
    min_seconds: float = 10.0,
    warmup_steps: int = 10,
    solo: bool = True,
    trace_steps: int = 0,
    energy_s: float = 0.0,
    sensors: bool = True,
    engine_argv: Sequence[str] | None = None,
    sensors_argv: Sequence[str] | None = None,
    silent_s: float = SILENT_S,
) -> MeasureResult:
    """Load, prepare every policy, run blocks, and return everything that was recorded.

    Call it from the main thread, where Ctrl-C and SIGTERM arrive: the first ends the measurement at the next token and keeps
    the results, the second ends at once. ``on_event`` is called in this thread. ``hard``: any fallback is an error.
    Raises MeasureError with the exit code of the command (an engine that cannot even start: 4), and with what was
    measured until then. ``energy_s``: afterwards, stage-pure loops of so many seconds.
    ``trace_steps``: then, a burst of each arm under torch's profiler, of so many steps.
    """
    if not policies:
        raise PdqError("no policy to measure", exit_code=USAGE)
    arms = labels(policies)
    talk = Conversation(
        run,
        on_event=on_event,
        sensors=sensors,
        engine_argv=engine_argv,
        sensors_argv=sensors_argv,
        silent_s=silent_s,
    )
    reason = "stopped"
    try:
        with talk:
            talk.load(load)
            # The workload first: its row counts decide which kernels and programs an arm gets.
            talk.workload(workload)
            for arm, policy in zip(arms, policies, strict=True):
                talk.arm(arm, policy, hard=hard)
            command = p.RunBlocks(
                arms=arms,
                blocks=blocks,
                min_seconds=min_seconds,
                budget_s=budget_s,
                warmup_steps=warmup_steps,
                seed=seed,
                solo=solo,
            )
            reason = talk.blocks(command).reason
            if energy_s and not talk.interrupted:
                talk.energy(p.MeasureEnergy(arms=arms, seconds=energy_s))
            kept_in = run.trace_path
            # After everything that is measured: what a profiler leaves behind disturbs nothing.
            for arm in arms if trace_steps and not talk.interrupted else ():
                talk.trace(
                    p.Trace(arm=arm, steps=trace_steps, folder=None if kept_in is None else str(kept_in))
                )
    except InterruptedEarlyError:
        pass
    except PdqError as error:
        kept = sum(r.valid for r in talk.requests)
        hint = error.hint
        if kept:
            where = f"{kept} requests measured before it are kept in {run.place}"
            hint = f"{hint}; {where}" if hint else where
        raise MeasureError(error.message, hint, error.exit_code, talk.journal.events()) from error
    return MeasureResult(
        talk.journal.events(),
        "stopped" if talk.interrupted else reason,
        tuple(arms),
        INTERRUPTED if talk.interrupted else OK,
    )
