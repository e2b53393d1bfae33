"""The live session as one object: reducer, supervisor, and what the person wants.

The person's intentions (model, a policy an arm, workload, loop) are kept here and sent one after the other as the
engine gets ready for them. After a new engine took the place of a crashed one they are sent again, without whatever
the old one died of.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pdq_tui.core import protocol as p
from pdq_tui.core.policy import Policy
from pdq_tui.core.workload import Workload
from pdq_tui.host.guard import GuardLimits, Trip, Watch
from pdq_tui.host.journal import Journal
from pdq_tui.host.runs import Run
from pdq_tui.host.session import Session
from pdq_tui.host.supervisor import Supervisor
from pdq_tui.host.view import SessionView

#: Seconds of each of an arm's four energy windows: counters need five.
ENERGY_S: Final = 6.0
#: A burst that nothing was heard of for so long went with its engine.
LOST_S: Final = 300.0
#: Failures that the same request would meet again: what was under way is not tried again by itself.
REPEATING: Final = ("oom", "device")


class Schedule:
    """When what takes turns with the requests comes next: ``every_s`` seconds after the last of it ended, the arm that
    waited longest first; None: never."""

    def __init__(self, every_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.every_s, self._clock = every_s, clock
        self._last = clock()
        self._before: dict[str, float] = {}
        self._sent_at: float | None = None

    def due(self, arms: Sequence[str]) -> str | None:
        """The arm whose turn has come, which is then taken to be under way."""
        now = self._clock()
        if self.every_s is None or not arms or now - self._last < self.every_s:
            return None
        if self._sent_at is not None and now - self._sent_at < LOST_S:
            return None
        arm = min(arms, key=lambda a: self._before.get(a, float("-inf")))
        self._before[arm] = self._sent_at = now
        return arm

    def ended(self) -> None:
        """One has ended, whoever asked for it."""
        self._last, self._sent_at = self._clock(), None


@dataclass
class _Engine:
    """What the engine that runs now has been sent and has answered."""

    hello: bool = False
    load_sent: bool = False
    model_ready: bool = False
    arms_sent: dict[str, Policy] = field(default_factory=dict)
    arms_settled: set[str] = field(default_factory=set)
    arms_ready: set[str] = field(default_factory=set)
    workload_sent: Workload | None = None
    workload_ready: bool = False
    loop_arms: list[str] | None = None
    stop_sent: bool = False
    guard_sent: bool = False
    failure: p.Failure | None = None


class LiveSession:
    """Every method returns at once and may be called from any thread; results come with ``view()``.

    Arms are "A" and "B"; ``reference`` (B) is what ratios are against.
    """

    def __init__(
        self,
        run: Run,
        *,
        engine_argv: Sequence[str] | None = None,
        sensors_argv: Sequence[str] | None = None,
        sensors: bool = True,
        min_effect: float = 0.01,
        reference: str = "B",
        guard: GuardLimits | None = None,
    ) -> None:
        self.run = run
        self.reference = reference
        self.journal = Journal(run.journal_path)
        self.supervisor = Supervisor(
            run,
            self._on_event,
            journal=self.journal,
            engine_argv=engine_argv,
            sensors_argv=sensors_argv,
            sensors=sensors,
        )
        self.session = Session(
            run,
            self.journal,
            min_effect=min_effect,
            reference=reference,
            silence=self.supervisor.engine_silence,
        )
        self._lock = threading.RLock()
        self._engine = _Engine()
        self._load: p.Load | None = None
        self._hold_load = False
        self._policies: dict[str, Policy] = {}
        self._ready: dict[str, Policy] = {}
        self._workload: Workload | None = None
        self._active = "A"
        self._interleave = False
        self._loop = False
        self._seed = 0
        self._started = False
        self._watch = Watch(guard or GuardLimits())
        self._tripped: Trip | None = None
        self._took_s: float | None = None  # what the baseline took to be made ready
        self._let_go()
        self._bursts = Schedule(None), Schedule(None)

    # -- what the person may do ------------------------------------------------------------------------------------------

    def start(
        self, load: p.Load, a: Policy, b: Policy, workload: Workload, *, active: str = "A", loop: bool = False
    ) -> None:
        """Start the workers and, as soon as they are there, everything else. With ``loop`` the workload runs as soon
        as it can. Called again with another model, it takes a new engine for it."""
        with self._lock:
            another = self._started and load != self._load
            self._let_go()
            if another:
                self._took_s = None
            self._load, self._workload = load, workload
            self._seed = workload.seed
            self._active, self._loop = active, loop
            for arm, policy in (("A", a), ("B", b)):
                self._policies[arm] = policy
                self.session.want(arm, policy)
            self.session.intend(active=active, loop=loop)
            if not self._started:
                self._started = True
                self.supervisor.start()
            elif another:
                self._ready.clear()
                self.restart_engine()
            else:
                self._advance()

    def set_policy(self, arm: str, policy: Policy) -> None:
        """Make ``arm`` follow ``policy``; the arm goes on with what it has until that is ready. What is resident is
        there with the next request."""
        with self._lock:
            self._policies[arm] = policy
            self._engine.arms_sent.pop(arm, None)
            self.session.want(arm, policy)
            if arm != self.reference:
                self._let_go()
            self._advance()

    def set_workload(self, workload: Workload) -> None:
        """Another workload; a running loop is ended for it and goes on with the new one."""
        with self._lock:
            self._workload = workload
            self._engine.workload_sent = None
            self._advance()

    def select(self, arm: str) -> None:
        """The next requests use ``arm``."""
        with self._lock:
            self._active = arm
            if arm != self.reference:
                self._let_go()
            self.session.intend(active=arm)
            if self._engine.loop_arms is not None and arm in self._engine.loop_arms:
                self.supervisor.send(p.SelectArm(arm=arm))

    def interleave(self, on: bool) -> None:
        """Alternate both arms in ABBA blocks, or not."""
        with self._lock:
            self._interleave = on
            if on:
                self._let_go()
            self.session.intend(interleave=on)
            if self._engine.loop_arms is not None:
                self.supervisor.send(p.Interleave(on=on and len(self._engine.loop_arms) > 1))

    def start_loop(self) -> None:
        """Run the workload without end, now or as soon as model, arm and workload are ready."""
        with self._lock:
            self._loop = True
            self.session.intend(loop=True)
            self._advance()

    def stop(self) -> None:
        """End the loop at the next token."""
        with self._lock:
            self._loop = False
            self.session.intend(loop=False)
            self._stop_sending()

    def cancel(self) -> None:
        """Cancel loading, converting or packing."""
        self.supervisor.send(p.CancelTask())

    def trace(self, arm: str, steps: int = 4, *, rolling: bool = False) -> None:
        """Profile one burst of ``arm``, between two requests where the workload runs. ``Traced`` answers. ``rolling``:
        its file takes the place of the arm's last rolling one."""
        where = self.run.trace_path
        folder = None if where is None else str(where)
        self.supervisor.send(p.Trace(arm=arm, steps=steps, rolling=rolling, folder=folder))

    def measure_energy(self, arms: Sequence[str], seconds: float = ENERGY_S) -> None:
        """Stage-pure loops of ``arms``, four of ``seconds`` each, between two requests where the workload runs."""
        self.supervisor.send(p.MeasureEnergy(arms=list(arms), seconds=seconds))

    def schedule(self, *, trace_every_s: float | None = None, energy_every_s: float | None = None) -> None:
        """While the loop runs, profile a burst and measure energy so often; None: only when asked."""
        with self._lock:
            self._bursts = Schedule(trace_every_s), Schedule(energy_every_s)

    def restart_engine(self) -> None:
        """Replace the engine; also the way back after it was given up. Everything wanted is sent again."""
        with self._lock:
            self._hold_load = False
            self.supervisor.restart_engine()

    def close(self, timeout: float = 4.0) -> None:
        """End both workers (within ``timeout`` seconds) and the journal."""
        self.supervisor.close(timeout)
        self.session.close()

    # -- what a screen may read --------------------------------------------------------------------------------------------

    def view(self, window_s: float | None = 120.0) -> SessionView:
        return replace(self.session.view(window_s), garbage=self.supervisor.garbage)

    def events(self, since_ns: int | None = None) -> list[Any]:
        """Everything recorded so far, complete, for a snapshot."""
        return self.session.events(since_ns)

    def note(self, level: str, text: str, hint: str | None = None) -> None:
        """A line of the event log: ``level`` info, warn or error. It is journaled."""
        self.record(p.Note(level=level, text=text, hint=hint))

    def record(self, event: p.Message) -> None:
        """Journal an event of the app's own (a saved snapshot) and show it."""
        self.journal.write(p.encode(event))
        self.session.apply(event)

    # -- the engine's answers --------------------------------------------------------------------------------------------

    def _on_event(self, event: Any) -> None:
        self.session.apply(event)
        if self._watch.limits.on and isinstance(event, (p.Request, p.Guarded)):
            self._guard(event)
        if isinstance(event, (p.Request, p.Traced, p.TaskEnded)):
            self._burst(event)
        if isinstance(event, (p.Request, p.Guarded, p.SensorSample, p.StageSample, p.Progress, p.Pong)):
            return
        with self._lock:
            self._note_answer(event)
            self._advance()

    def _note_answer(self, e: Any) -> None:
        engine = self._engine
        match e:
            case p.Hello(role="engine"):
                self._engine = _Engine(hello=True)
            case p.WorkerExited(role="engine"):
                self._engine_gone(e)
            case p.Failure(fatal=True):
                engine.failure = e
            case p.ModelReady():
                engine.model_ready = True
            case p.ArmReady():
                engine.arms_ready.add(e.arm)
                self._ready[e.arm] = e.policy
                if e.arm == self.reference:
                    self._baseline_ready(e)
                if engine.arms_sent.get(e.arm) == e.policy:
                    engine.arms_settled.add(e.arm)
            case p.ArmRefused():
                self._refused(e.arm, e.policy)
            case p.WorkloadReady():
                engine.workload_ready = engine.workload_sent is not None
            case p.RunEnded():
                engine.loop_arms, engine.stop_sent = None, False
                if e.reason == "failed":
                    self._loop = False
                    self.session.intend(loop=False)

    def _refused(self, arm: str, name: str) -> None:
        if arm == self.reference and arm not in self._engine.arms_ready:
            self._baseline_lost()
        sent = self._engine.arms_sent.get(arm)
        if sent is None or sent.name != name:
            return
        self._engine.arms_settled.add(arm)
        # What was refused is not asked of the next engine; what the arm still has is.
        if self._policies.get(arm) == sent:
            self._fall_back(arm)

    def _fall_back(self, arm: str) -> None:
        if arm in self._ready:
            self._policies[arm] = self._ready[arm]
            if arm in self._engine.arms_ready:
                self._engine.arms_sent[arm] = self._ready[arm]
        else:
            self._policies.pop(arm, None)

    def _engine_gone(self, e: p.WorkerExited) -> None:
        old, self._engine = self._engine, _Engine()
        if e.expected or old.failure is None or old.failure.kind not in REPEATING:
            return
        if old.load_sent and not old.model_ready:
            self._hold_load = True
        for arm in [a for a in old.arms_sent if a not in old.arms_settled]:
            self.session.give_up(arm, e.text)
            self._fall_back(arm)
        if old.loop_arms is not None and self._loop:
            self._loop = False
            self.session.intend(loop=False)
            self.session.note(
                "info", "the loop is not started again by itself: it would meet the same failure"
            )

    # -- the guard -----------------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """The person chose the guarded arm (again), or gave it another policy or model: what it did before is forgotten."""
        self._watch.reset()
        self._tripped = None
        if self._watch.limits.on:
            self.session.guard(self._watch.limits.every, self._watch.limits.kld)

    def _guard(self, event: p.Request | p.Guarded) -> None:
        with self._lock:
            policy = self._ready.get(event.arm)
            if event.arm == self.reference or self._tripped or policy is None:
                return
            if event.policy_digest != policy.digest:
                return  # of what the arm did before
            if self._active == self.reference and not self._interleave:
                return  # a late answer: the person went to the baseline meanwhile
            watch = self._watch
            trip = watch.request(event) if isinstance(event, p.Request) else watch.checked(event)
            if isinstance(event, p.Guarded):
                self.session.guard_state("watching", mean=watch.kld)
            if trip is not None:
                self._trip(event.arm, policy, trip)

    def _trip(self, arm: str, policy: Policy, trip: Trip) -> None:
        self._tripped = trip
        base = self.reference
        wanted = self._policies.get(base) or self._ready.get(base)
        name = wanted.name if wanted is not None else "no policy"
        switched = base in self._engine.arms_ready
        if switched:
            text = f"guard: {arm} ({policy.name}) gave way to {base} ({name}) at request {trip.request}: {trip.words}"
        else:
            text = (
                f"guard: {arm} ({policy.name}) should give way at request {trip.request}: {trip.words}; {base} ({name}) is not "
                f"resident, and {self._reload_words()}"
            )
        if switched:
            self._interleave, self._active = False, base
            self.session.intend(interleave=False, active=base)
            if self._engine.loop_arms is not None:
                self.supervisor.send(p.Interleave(on=False))
                self.supervisor.send(p.SelectArm(arm=base))
        self.record(
            p.GuardTripped(
                arm=arm,
                policy=policy.name,
                base=base,
                base_policy=name,
                measure=trip.measure,
                value=trip.value,
                limit=trip.limit,
                request=trip.request,
                switched=switched,
                text=text,
            )
        )

    def _reload_words(self) -> str:
        if self._took_s is None:
            return "how long making it ready takes is not known: it never was"
        return f"making it ready took {self._took_s:.1f} s"

    def _baseline_ready(self, e: p.ArmReady) -> None:
        """It can be switched to now, also for what tripped while it could not."""
        if not e.resident or self._took_s is None:
            self._took_s = e.seconds
        if self._watch.limits.on and self._tripped is None:
            self.session.guard_state("watching")
        trip, arm = self._tripped, next((a for a in self._ready if a != self.reference), None)
        if trip is not None and self._active != self.reference and arm is not None:
            self._trip(arm, self._ready[arm], trip)

    def _baseline_lost(self) -> None:
        """Without it nothing is checked: told once, and on the screen as long as it lasts."""
        if not self._watch.limits.on or self._tripped:
            return
        text = f"guard: the baseline {self.reference} is not resident, nothing is checked; {self._reload_words()}"
        self.session.guard_state("blind", text)
        self.note("warn", text)

    def _burst(self, event: Any) -> None:
        """Bursts whose time has come. A request's end is the time to look: without a loop there are none."""
        with self._lock:
            traces, energy = self._bursts
            loop = self._engine.loop_arms
            match event:
                case p.Traced():
                    traces.ended()
                case p.TaskEnded(task="energy"):
                    energy.ended()
                case p.Request(kind="loop") if loop is not None and self._loop:
                    arms = loop if self._interleave else [a for a in loop if a == self._active]
                    if (arm := traces.due(arms)) is not None:
                        self.trace(arm, rolling=True)
                    if self.session.counts_energy and (arm := energy.due(arms)) is not None:
                        self.measure_energy([arm])

    # -- sending what is wanted and possible ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        engine = self._engine
        if not engine.hello or self._load is None or self._hold_load:
            return
        if not engine.load_sent:
            engine.load_sent = self.supervisor.send(self._load)
            # The engine imports for seconds before it can say so itself.
            self.session.apply(p.Progress(task="load", label=self._load.model, done=0))
            return
        if not engine.model_ready:
            return
        if self._watch.limits.on and not engine.guard_sent:
            every = self._watch.limits.every
            engine.guard_sent = self.supervisor.send(p.Guard(base=self.reference, every=every))
        # The workload first: its row counts decide which kernels and programs an arm gets.
        if self._workload is not None and engine.workload_sent != self._workload:
            if engine.loop_arms is not None:
                self._stop_sending()
                return
            engine.workload_sent, engine.workload_ready = self._workload, False
            self.supervisor.send(p.SetWorkload(workload=self._workload))
        for arm in ("B", "A"):
            policy = self._policies.get(arm)
            if policy is not None and engine.arms_sent.get(arm) != policy:
                self.session.want(arm, policy)
                engine.arms_settled.discard(arm)
                engine.arms_sent[arm] = policy
                self.supervisor.send(p.SetArm(arm=arm, policy=policy))
        if self._loop:
            self._advance_loop()

    def _advance_loop(self) -> None:
        engine = self._engine
        ready = sorted(engine.arms_ready, key=lambda arm: (arm != self.reference, arm))
        if engine.loop_arms is not None:
            if engine.loop_arms != ready:
                self._stop_sending()  # and started again, with all arms, when it has ended
            return
        waiting = [a for a in engine.arms_sent if a not in engine.arms_settled and a not in engine.arms_ready]
        if not engine.workload_ready or waiting or self._active not in ready:
            return
        engine.loop_arms = ready
        both = self._interleave and len(ready) > 1
        # Said again: a switch that an engine before this one told late would be shown else.
        self.session.intend(active=self._active)
        self.supervisor.send(p.StartLoop(arm=self._active, arms=ready, interleave=both, seed=self._seed))

    def _stop_sending(self) -> None:
        if self._engine.loop_arms is not None and not self._engine.stop_sent:
            self._engine.stop_sent = True
            self.supervisor.send(p.Stop())
