"""One engine process talked to from the caller's thread: a command, its answer, the next; no screen, no loop.

What ends the road (a refusal, a crash, silence, an interrupt) is raised; what was measured until then is in the journal.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Final

from pdq_tui.core import protocol as p
from pdq_tui.core.policy import Policy
from pdq_tui.core.workload import Workload
from pdq_tui.errors import FAILED, UNFIT, USAGE, PdqError
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


class RefusedError(PdqError):
    """The engine lives on, and does not do this: a policy or a workload that does not fit."""


class InterruptedEarlyError(Exception):
    """Ctrl-C, and nothing more to wait for."""


class Conversation:
    """Use it as a context manager, from the main thread, where Ctrl-C and SIGTERM arrive: the first ends what runs at the
    next token and keeps the results, the second ends at once. ``patient`` False: the first ends at once already, for a
    caller who keeps no half results. ``on_event`` is called in this thread.

    Every method raises PdqError with the exit code of the command, and InterruptedEarlyError.
    """

    def __init__(
        self,
        run: Run,
        *,
        on_event: Callable[[Any], None] | None = None,
        sensors: bool = True,
        engine_argv: Sequence[str] | None = None,
        sensors_argv: Sequence[str] | None = None,
        silent_s: float = SILENT_S,
        patient: bool = True,
    ) -> None:
        self.journal = Journal(run.journal_path)
        self.requests: list[p.Request] = []
        self.interrupted = False
        self.presses = 0
        self._run, self._on_event, self._silent_s, self._patient = run, on_event, silent_s, patient
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._supervisor = Supervisor(
            run,
            self._inbox.put,
            journal=self.journal,
            engine_argv=engine_argv,
            sensors_argv=sensors_argv,
            sensors=sensors,
            restart=False,
        )
        self._disk_text = self.journal.text
        self._hello = False
        self._presses_seen = 0
        self._failed_task: tuple[float, str] | None = None
        self._stop_by: float | None = None
        self._deadline: float | None = None
        self._signals = _ctrl_c(self)

    def __enter__(self) -> Conversation:
        self._supervisor.start()
        self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.__exit__(None, None, None)
        self._supervisor.close()

    # -- what is asked -------------------------------------------------------------------------------------------------

    def load(self, load: p.Load) -> p.ModelReady:
        self._until(p.Hello, lambda e: bool(e.role == "engine"))
        self._hello = True
        self._supervisor.send(load)
        ready: p.ModelReady = self._until(p.ModelReady)
        return ready

    def workload(self, workload: Workload) -> p.WorkloadReady:
        self._supervisor.send(p.SetWorkload(workload=workload))
        ready: p.WorkloadReady = self._until(p.WorkloadReady)
        return ready

    def arm(self, label: str, policy: Policy, *, hard: bool = False) -> p.ArmReady:
        """``hard``: any fallback is an error."""
        self._supervisor.send(p.SetArm(arm=label, policy=policy, hard=hard))
        ready: p.ArmReady = self._until(p.ArmReady, lambda event: bool(event.arm == label))
        if hard and ready.fallbacks:
            first = ready.fallbacks[0]
            raise PdqError(
                f"{ready.policy.name}: {first.stage} {first.module} would run {first.used}, not {first.wanted}: "
                f"{first.reason}",
                "leave --hard out to measure with fallbacks",
            )
        return ready

    def blocks(self, command: p.RunBlocks) -> p.RunEnded:
        if command.budget_s is not None:
            self._deadline = time.monotonic() + command.budget_s + GRACE_S
        ended = self._ended(command)
        self._deadline = None
        return ended

    def score(self, command: p.Score) -> list[p.Scored]:
        """A result a window and arm, in order; fewer than asked for where it was interrupted."""
        found: list[p.Scored] = []
        self._ended(command, lambda e: found.append(e) if isinstance(e, p.Scored) else None)
        return found

    def ask(self, command: p.Ask) -> list[p.Answered]:
        """An answer a question, in order; fewer than asked for where it was interrupted."""
        found: list[p.Answered] = []
        self._ended(command, lambda e: found.append(e) if isinstance(e, p.Answered) else None)
        return found

    def lm_eval(self, command: p.LmEval) -> list[p.LmEvaluated]:
        """A result a task; none where it was interrupted."""
        found: list[p.LmEvaluated] = []
        self._ended(command, lambda e: found.append(e) if isinstance(e, p.LmEvaluated) else None)
        return found

    def serve(self, command: p.Serve) -> tuple[list[p.Served], p.ServeEnded | None]:
        """The requests of one load, and what it was like; None where it was interrupted."""
        served: list[p.Served] = []
        ended: list[p.ServeEnded] = []

        def seen(event: Any) -> None:
            if isinstance(event, p.Served):
                served.append(event)
            elif isinstance(event, p.ServeEnded):
                ended.append(event)

        self._ended(command, seen)
        return served, ended[0] if ended else None

    def soak(self, command: p.Soak) -> p.RunEnded:
        return self._ended(command)

    def vanish(self, command: p.Message, timeout_s: float = STOP_S) -> float | None:
        """Send ``command`` and go away without a word, as an app does that was killed. Returns how many seconds the engine
        took to end by itself, None where it did not within ``timeout_s``. Nothing can be asked afterwards."""
        self._supervisor.send(command)
        return self._supervisor.vanish(timeout_s)

    def tune(self, command: p.Tune, seen: Callable[[Any], object]) -> p.RunEnded:
        """``seen`` is called with every event, so that what was measured before an interrupt is there."""
        return self._ended(command, seen)

    def energy(self, command: p.MeasureEnergy) -> p.TaskEnded:
        """Stage-pure loops; their windows are in the journal."""
        self._supervisor.send(command)
        done: p.TaskEnded = self._until(p.TaskEnded, lambda e: bool(e.task == "energy"))
        return done

    def trace(self, command: p.Trace) -> p.Traced:
        """Kernels of one burst; what failed is in it."""
        self._supervisor.send(command)
        done: p.Traced = self._until(p.Traced, lambda e: bool(e.arm == command.arm))
        return done

    def _ended(self, command: p.Message, seen: Callable[[Any], object] = lambda e: None) -> p.RunEnded:
        self._supervisor.send(command)
        ended: p.RunEnded = self._until(p.RunEnded, seen=seen)
        if ended.reason == "failed":
            raise PdqError("the measurement failed", self._log_hint("-"))
        return ended

    # -- waiting for the answer ----------------------------------------------------------------------------------------

    def _until(
        self,
        kind: type,
        accept: Callable[[Any], bool] = lambda e: True,
        seen: Callable[[Any], object] = lambda e: None,
    ) -> Any:
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
            if self._on_event is not None:
                self._on_event(event)
            seen(event)
            if isinstance(event, kind) and accept(event):
                return event
            self._check(event)

    def _next(self) -> Any:
        try:
            event = self._inbox.get(timeout=0.25)
        except queue.Empty:
            return None
        if isinstance(event, p.Request):
            self.requests.append(event)
        return event

    def _watch_disk(self) -> None:
        """Say it when the journal's disk fills up, and not only at the end: there is time to make room."""
        text = self.journal.text
        if text and not self._disk_text and self._on_event is not None:
            self._on_event(p.Note(level="warn", text=text))
        self._disk_text = text

    def _interrupt(self) -> None:
        if self.interrupted:
            raise InterruptedEarlyError
        self.interrupted = True
        self._stop_by = time.monotonic() + STOP_S
        self._supervisor.send(p.CancelTask())
        self._supervisor.send(p.Stop())
        if not (self._patient and self.requests):  # nothing measured yet: nothing to wait for
            raise InterruptedEarlyError

    def _check_time(self) -> None:
        now = time.monotonic()
        if self._stop_by is not None and now > self._stop_by:
            raise InterruptedEarlyError
        if self._deadline is not None and now > self._deadline:
            raise PdqError(f"the engine did not end {GRACE_S:.0f} s after its budget")
        if self._failed_task is not None and now > self._failed_task[0]:
            raise PdqError(self._failed_task[1])
        silence = self._supervisor.engine_silence()
        if silence is not None and silence > self._silent_s:
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
                    raise InterruptedEarlyError
                raise PdqError(e.text, e.hint or self._log_hint(e.tail), FAILED if self._hello else UNFIT)
            case p.ArmRefused():
                raise RefusedError(f"policy {e.policy} refused: {e.reason}", e.hint, e.exit_code)
            case p.WorkloadRefused():
                raise RefusedError(e.reason, e.hint, USAGE)
            case p.TaskEnded(ok=False, task="load" | "convert"):
                # The Failure that says why comes with it; alone, it has to do.
                self._failed_task = (time.monotonic() + 2.0, e.text or f"{e.task} {e.label} failed")

    def _log_hint(self, tail: str) -> str | None:
        run = self._run
        return f"what it printed is in {run.path / 'stderr.log'}" if tail and not run.in_memory else None


@contextlib.contextmanager
def _ctrl_c(conversation: Conversation) -> Iterator[None]:
    """Ctrl-C, and a polite end from outside, as a count that the driver looks at instead of an exception in the midst
    of anything. Signals reach the main thread only; elsewhere they are left as they are."""

    def pressed(_number: int, _frame: FrameType | None) -> None:
        conversation.presses += 1

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, pressed) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
