"""A headless measurement: the same engine, journal and events as the app's, driven from the caller's thread."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

from pdq_tui.core import protocol as p
from pdq_tui.core.policy import Policy
from pdq_tui.core.workload import Workload
from pdq_tui.errors import FAILED, INTERRUPTED, OK, UNFIT, USAGE, PdqError
from pdq_tui.host.journal import Journal
from pdq_tui.host.runs import Run
from pdq_tui.host.sentences import failure_sentence
from pdq_tui.host.supervisor import Supervisor

#: An engine that has not given a sign of life for this long will not give one.
SILENT_S: Final = 120.0
#: What the engine may take, over the budget, to end by itself.
GRACE_S: Final = 60.0
STOP_S: Final = 30.0
EXIT_CODES: Final = {"usage": USAGE, "model": FAILED, "oom": FAILED, "device": UNFIT, "internal": FAILED}


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
    sensors: bool = True,
    engine_argv: Sequence[str] | None = None,
    sensors_argv: Sequence[str] | None = None,
    silent_s: float = SILENT_S,
) -> MeasureResult:
    """Load, prepare every policy, run blocks, and return everything that was recorded.

    Call it from the main thread, where Ctrl-C and SIGTERM arrive: the first ends the measurement at the next token and keeps
    the results, the second ends at once. ``on_event`` is called in this thread. ``hard``: any fallback is an error.
    Raises MeasureError with the exit code of the command (an engine that cannot even start: 4), and with what was
    measured until then.
    """
    if not policies:
        raise PdqError("no policy to measure", exit_code=USAGE)
    journal = Journal(run.journal_path)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    supervisor = Supervisor(
        run,
        inbox.put,
        journal=journal,
        engine_argv=engine_argv,
        sensors_argv=sensors_argv,
        sensors=sensors,
        restart=False,
    )
    plan = _Plan(
        load, list(policies), workload, blocks, budget_s, seed, hard, min_seconds, warmup_steps, solo
    )
    driver = _Driver(plan, supervisor, inbox, on_event, silent_s)
    supervisor.start()
    try:
        with _ctrl_c(driver):
            reason = driver.run()
    except PdqError as error:
        kept = sum(isinstance(e, p.Request) and e.valid for e in driver.events)
        hint = error.hint
        if kept:
            where = f"{kept} requests measured before it are kept in {run.place}"
            hint = f"{hint}; {where}" if hint else where
        supervisor.close()
        raise MeasureError(error.message, hint, error.exit_code, journal.events()) from error
    finally:
        supervisor.close()
    interrupted = driver.interrupted
    return MeasureResult(
        journal.events(),
        "stopped" if interrupted else reason,
        tuple(labels(policies)),
        INTERRUPTED if interrupted else OK,
    )


@dataclass
class _Plan:
    load: p.Load
    policies: list[Policy]
    workload: Workload
    blocks: int
    budget_s: float | None
    seed: int
    hard: bool
    min_seconds: float
    warmup_steps: int
    solo: bool


@dataclass
class _Driver:
    """Sends one command, waits for its answer, sends the next."""

    plan: _Plan
    supervisor: Supervisor
    inbox: queue.SimpleQueue[Any]
    on_event: Callable[[Any], None] | None
    silent_s: float
    interrupted: bool = False
    events: list[Any] = field(default_factory=list)
    hello: bool = False
    presses: int = 0
    _presses_seen: int = 0
    _failed_task: tuple[float, str] | None = None
    _stop_by: float | None = None
    _deadline: float | None = None
    _disk_text: str = ""

    def __post_init__(self) -> None:
        self._disk_text = self.supervisor.journal.text

    def run(self) -> str:
        plan = self.plan
        arms = labels(plan.policies)
        try:
            self._until(p.Hello, lambda e: bool(e.role == "engine"))
            self.hello = True
            self.supervisor.send(plan.load)
            self._until(p.ModelReady)
            # The workload first: its row counts decide which kernels and programs an arm gets.
            self.supervisor.send(p.SetWorkload(workload=plan.workload))
            self._until(p.WorkloadReady)
            for arm, policy in zip(arms, plan.policies, strict=True):
                self.supervisor.send(p.SetArm(arm=arm, policy=policy, hard=plan.hard))
                self._check_fallbacks(self._until(p.ArmReady, _of_arm(arm)))
            if plan.budget_s is not None:
                self._deadline = time.monotonic() + plan.budget_s + GRACE_S
            self.supervisor.send(
                p.RunBlocks(
                    arms=arms,
                    blocks=plan.blocks,
                    min_seconds=plan.min_seconds,
                    budget_s=plan.budget_s,
                    warmup_steps=plan.warmup_steps,
                    seed=plan.seed,
                    solo=plan.solo,
                )
            )
            ended = self._until(p.RunEnded)
        except _InterruptedEarlyError:
            return "stopped"
        if ended.reason == "failed":
            raise PdqError("the measurement failed", self._log_hint("-"))
        return str(ended.reason)

    def _until(self, kind: type, accept: Callable[[Any], bool] = lambda e: True) -> Any:
        """The next accepted event of ``kind``. Everything that ends the road raises PdqError."""
        while True:
            while self.presses > self._presses_seen:
                self._presses_seen += 1
                self._interrupt()
            event = self._next()
            self._check_time()
            self._watch_disk()
            if event is None:
                continue
            if self.on_event is not None:
                self.on_event(event)
            if isinstance(event, kind) and accept(event):
                return event
            self._check(event)

    def _next(self) -> Any:
        try:
            event = self.inbox.get(timeout=0.25)
        except queue.Empty:
            return None
        if isinstance(event, p.Request):
            self.events.append(event)
        return event

    def _watch_disk(self) -> None:
        """Say it when the journal's disk fills up, and not only at the end: there is time to make room."""
        text = self.supervisor.journal.text
        if text and not self._disk_text and self.on_event is not None:
            self.on_event(p.Note(level="warn", text=text))
        self._disk_text = text

    def _interrupt(self) -> None:
        if self.interrupted:
            raise _InterruptedEarlyError
        self.interrupted = True
        self._stop_by = time.monotonic() + STOP_S
        self.supervisor.send(p.CancelTask())
        self.supervisor.send(p.Stop())
        if not self.events:  # nothing measured yet: nothing to wait for
            raise _InterruptedEarlyError

    def _check_time(self) -> None:
        now = time.monotonic()
        if self._stop_by is not None and now > self._stop_by:
            raise _InterruptedEarlyError
        if self._deadline is not None and now > self._deadline:
            raise PdqError(f"the engine did not end {GRACE_S:.0f} s after its budget")
        if self._failed_task is not None and now > self._failed_task[0]:
            raise PdqError(self._failed_task[1])
        silence = self.supervisor.engine_silence()
        if silence is not None and silence > self.silent_s:
            raise PdqError(f"the engine has stopped answering ({silence:.0f} s without a sign of life)")

    def _check(self, e: Any) -> None:
        match e:
            case p.Failure(fatal=True):
                return  # its end follows, and tells both
            case p.Failure():
                code = e.exit_code if e.exit_code is not None else EXIT_CODES.get(e.kind, FAILED)
                raise PdqError(failure_sentence(e), e.hint, code)
            case p.WorkerExited(role="engine"):
                if self.interrupted:
                    raise _InterruptedEarlyError
                raise PdqError(e.text, e.hint or self._log_hint(e.tail), FAILED if self.hello else UNFIT)
            case p.ArmRefused():
                raise PdqError(f"policy {e.policy} refused: {e.reason}", e.hint)
            case p.WorkloadRefused():
                raise PdqError(e.reason, e.hint, USAGE)
            case p.TaskEnded(ok=False, task="load" | "convert"):
                # The Failure that says why comes with it; alone, it has to do.
                self._failed_task = (time.monotonic() + 2.0, e.text or f"{e.task} {e.label} failed")

    def _log_hint(self, tail: str) -> str | None:
        run = self.supervisor.run
        return f"what it printed is in {run.path / 'stderr.log'}" if tail and not run.in_memory else None

    def _check_fallbacks(self, ready: p.ArmReady) -> None:
        if self.plan.hard and ready.fallbacks:
            first = ready.fallbacks[0]
            raise PdqError(
                f"{ready.policy.name}: {first.stage} {first.module} would run {first.used}, not {first.wanted}: "
                f"{first.reason}",
                "leave --hard out to measure with fallbacks",
            )


@contextlib.contextmanager
def _ctrl_c(driver: _Driver) -> Iterator[None]:
    """Ctrl-C, and a polite end from outside, as a count that the driver looks at instead of an exception in the midst
    of anything. Signals reach the main thread only; elsewhere they are left as they are."""

    def pressed(_number: int, _frame: FrameType | None) -> None:
        driver.presses += 1

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, pressed) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _of_arm(arm: str) -> Callable[[Any], bool]:
    return lambda event: bool(event.arm == arm)


class _InterruptedEarlyError(Exception):
    """Ctrl-C, and nothing more to wait for."""
