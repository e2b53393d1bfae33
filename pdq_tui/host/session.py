"""The session's reducer: events in, from any thread; frozen pictures out, on the screen's own timer.

Everything live is bounded; what must be complete is in the journal, and ``events()`` reads it back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pdq_tui.core import protocol as p
from pdq_tui.core.arms import counts
from pdq_tui.core.metrics import METRICS
from pdq_tui.core.policy import Policy
from pdq_tui.core.together import together
from pdq_tui.host import sentences
from pdq_tui.host.journal import Journal
from pdq_tui.host.live_energy import LiveEnergy
from pdq_tui.host.numbers import Figures, Numbers, Refresher
from pdq_tui.host.runs import Run
from pdq_tui.host.series import Series
from pdq_tui.host.view import ArmView, EnergyView, EngineView, GuardView, NoteView, SessionView, TaskView

#: Silence after which the engine is called stalled. Importing torch can hold the interpreter for some seconds.
STALLED_S: Final = 10.0
NOTES: Final = 500
SNAPSHOTS: Final = 200
LOADING: Final = ("fetch", "convert", "load")


@dataclass
class _Arm:
    wanted: Policy | None = None
    ready: p.ArmReady | None = None
    refused: str | None = None
    pending: bool = False
    requests: int = 0
    first_use: int = 0
    invalid: int = 0
    invalid_reason: str | None = None
    series: dict[str, Series] = field(default_factory=dict)
    last: p.Request | None = None

    def forget(self) -> None:
        self.requests = self.first_use = self.invalid = 0
        self.invalid_reason = None


@dataclass
class _Task:
    label: str
    done: float
    total: float | None
    unit: str
    began_ns: int


class Session:
    """One run as it is now. ``reference``: the arm that ratios are against.

    silence   seconds since the engine's last sign of life, where a supervisor knows; see ``Supervisor``.
    clock     now on the events' own clock, in ns; a recording has its own.
    """

    def __init__(
        self,
        run: Run,
        journal: Journal | None = None,
        *,
        min_effect: float = 0.01,
        reference: str = "B",
        silence: Callable[[], float | None] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.run = run
        self.journal = journal or Journal(run.journal_path)
        self.reference = reference
        self.silence = silence
        self._clock = clock
        self._lock = threading.RLock()
        self._start_ns = int(run.meta["monotonic_ns"])
        self._wall_ns = int(run.meta["wall_ns"])
        self._arms: dict[str, _Arm] = {}
        self._active = "A"
        self._interleave = False
        self._running = ""  # "", "loop" or "blocks"
        self._wants_loop = False
        self._tasks: dict[str, _Task] = {}
        self._model: p.ModelInfo | None = None
        self._device: p.DeviceInfo | None = None
        self._workload: p.WorkloadReady | None = None
        self._workload_error: str | None = None
        self._sensor_state: p.SensorState | None = None
        self._sensors: p.SensorSample | None = None
        self._sensor_series: dict[str, Series] = {}
        self._notes: deque[NoteView] = deque(maxlen=NOTES)
        self._notes_total = 0
        self._snapshots: deque[str] = deque(maxlen=SNAPSHOTS)
        self._traces: dict[str, p.Traced] = {}
        self._energy = LiveEnergy()
        self._live: p.StageSample | None = None
        self._guard: GuardView | None = None
        self._dropped: dict[str, int] = {}
        self._engine = EngineView()
        self._base, self._base_text = "starting", ""
        self._since_ns = self._start_ns
        self._loaded = False
        self._numbers = Numbers(reference, min_effect)
        self._figures = Figures()
        self._generation = 0
        self._dirty = False
        self._refresher = Refresher(self._compute)
        if run.text:
            self.note("warn", run.text)

    # -- events ------------------------------------------------------------------------------------------------------------

    def apply(self, event: Any) -> None:
        """Take one event in. From any thread; does not wait for anything but the lock."""
        if not event.t_ns:  # made in this process and never on the wire, where it would have been stamped
            event.t_ns = self._clock()
        with self._lock:
            for level, text, hint in sentences.lines(event):
                self._note(level, text, hint, event.t_ns)
            self._reduce(event)
            self._settle(event.t_ns)

    def note(self, level: str, text: str, hint: str | None = None) -> None:
        """A line of this session's own: ``level`` info, warn or error."""
        with self._lock:
            self._note(level, text, hint, self._clock())

    def events(self, since_ns: int | None = None) -> list[Any]:
        """The journal so far, complete: what a snapshot is made from. ``since_ns`` on the events' own clock."""
        found = self.journal.events()
        return found if since_ns is None else [e for e in found if e.t_ns >= since_ns]

    @property
    def counts_energy(self) -> bool:
        """Whether a counter was read that energy can be held against."""
        with self._lock:
            return self._sensors is not None and self._energy.missing is None

    def close(self) -> None:
        self._refresher.close()

    def _reduce(self, e: Any) -> None:
        match e:
            case p.Request():
                self._request(e)
            case p.SensorSample():
                self._sample(e)
            case p.StageSample():
                self._live = e
            case p.Progress():
                known = self._tasks.get(e.task)
                began = known.began_ns if known is not None else e.t_ns
                self._tasks[e.task] = _Task(e.label, e.done, e.total, e.unit, began)
            case p.TaskEnded():
                self._tasks.pop(e.task, None)
            case p.ModelReady():
                if self._model is not None and (self._model.id, self._model.dtype) != (
                    e.model.id,
                    e.model.dtype,
                ):
                    self._forget()
                self._model, self._device, self._loaded = e.model, e.device, True
                for task in LOADING:
                    self._tasks.pop(task, None)
            case p.ArmReady() | p.ArmRefused():
                self._arm_event(e)
            case p.WorkloadReady():
                before = self._workload
                if before is None or _work(before) != _work(e):
                    self._forget()
                self._workload, self._workload_error = e, None
            case p.WorkloadRefused():
                self._workload_error = e.reason
            case p.RunStarted():
                self._running, self._interleave = e.kind, e.interleave
            case p.RunEnded():
                self._running, self._live = "", None
            case p.Traced():
                if not (e.failed and e.rolling):  # the next one comes by itself
                    self._traces[e.arm] = e
            case p.EnergyWindow():
                self._energy.window(e)
            case p.ArmSwitched():
                self._active = e.arm
            case p.SensorState():
                self._sensor_state = e
            case p.Dropped():
                self._dropped[e.role] = e.count
            case p.Guarded():
                self._guarded(e)
            case p.GuardTripped():
                self.guard_state("switched" if e.switched else "stuck", e.text)
            case p.SnapshotSaved():
                self._snapshots.append(e.name)
            case p.WorkerStarted() | p.WorkerExited() | p.Hello():
                self._worker_event(e)

    def _guarded(self, e: p.Guarded) -> None:
        before = self._guard or GuardView(every=0, limit=0.0)
        self._guard = replace(before, checks=before.checks + 1, last=e)

    def _arm_event(self, e: p.ArmReady | p.ArmRefused) -> None:
        arm = self._arms.setdefault(e.arm, _Arm())
        if isinstance(e, p.ArmRefused):
            if arm.wanted is None or arm.wanted.name == e.policy:
                arm.pending, arm.refused = False, e.reason
            return
        if arm.ready is None or arm.ready.policy.digest != e.policy.digest:
            arm.forget()
            self._forget(e.arm)
        arm.ready = e
        if arm.wanted is None:
            arm.wanted = e.policy
        if arm.wanted.digest == e.policy.digest:
            arm.pending, arm.refused = False, None

    def _worker_event(self, e: p.WorkerStarted | p.WorkerExited | p.Hello) -> None:
        if e.role != "engine":
            if isinstance(e, p.WorkerExited):
                self._sensors = None
            return
        if isinstance(e, p.WorkerStarted):
            self._engine = replace(self._engine, pid=e.pid, restarts=e.restart)
            self._base, self._base_text = ("restarting" if e.restart else "starting"), self._base_text
        elif isinstance(e, p.Hello):
            self._base, self._base_text = "ready", ""
        else:
            self._engine = replace(self._engine, pid=None)
            self._tasks.clear()
            self._running, self._live, self._loaded = "", None, False
            stays_down = not e.expected and not e.replaced
            self._base, self._base_text = ("dead" if stays_down else "restarting"), e.text
            for arm in self._arms.values():
                arm.pending = arm.ready is not None and not stays_down

    def _request(self, r: p.Request) -> None:
        arm = self._arms.setdefault(r.arm, _Arm())
        self._live = None  # it has ended; the next one says itself where it is
        tally = counts([r])
        arm.last = r
        current = arm.ready is None or arm.ready.policy.digest == r.policy_digest
        if current:
            arm.requests += tally.used
            arm.first_use += tally.first_use
            arm.invalid += tally.invalid
            if not r.valid:
                # One that the device gave up in is told by the engine's end.
                if r.nonfinite is not None and arm.invalid_reason != r.invalid_reason:
                    self._note("error", f"arm {r.arm}: not valid: {r.invalid_reason}", None, r.t_ns)
                arm.invalid_reason = r.invalid_reason
            self._numbers.add(r)
            self._dirty = True
        if not r.valid or tally.used or tally.control:
            at = self._seconds(r.host_end_ns or r.t_ns)
            for id_, metric in METRICS.items():
                value = metric.of(r, self._device, self._model) if r.valid else None
                arm.series.setdefault(id_, Series()).add(at, value)

    def _sample(self, e: p.SensorSample) -> None:
        self._sensors = e
        at = self._seconds(e.t_ns)
        values: dict[str, float | None] = {
            "cpu_load": e.cpu.load,
            "engine_load": e.cpu.engine_load,
            "engine_rss_bytes": e.cpu.engine_rss_bytes,
        }
        index = self._sensor_state.engine_gpu if self._sensor_state is not None else None
        on_gpu = self._device is not None and self._device.kind == "cuda"
        ours = together([g for g in e.gpus if g.engine or g.index == index])
        for arm in self._energy.sample(e, ours, on_gpu):
            level, text = sentences.energy_sentence(arm, self._energy.found[arm][2])
            self._note(level, text, None, e.t_ns)
        if ours is not None:
            for name in ("power_w", "memory_used_bytes", "gpu_util", "temperature_c", "sm_mhz"):
                values[name] = getattr(ours, name)
        for name, value in values.items():
            series = self._sensor_series.get(name)
            if series is None:
                if value is None:
                    continue
                series = self._sensor_series[name] = Series(spacing_s=0.15)
            series.add(at, value)

    def _forget(self, arm: str | None = None) -> None:
        """Figures of what ran before say nothing about what runs now."""
        if arm is None:
            for each in self._arms.values():
                each.forget()
        self._numbers.forget(arm)
        self._generation += 1
        self._dirty = True
        if arm is None:
            self._figures = Figures()
        else:
            self._figures = Figures({a: s for a, s in self._figures.stats.items() if a != arm})

    def _note(self, level: str, text: str, hint: str | None, t_ns: int) -> None:
        wall = self._wall_ns + ((t_ns or self._clock()) - self._start_ns)
        clock = time.strftime("%H:%M:%S", time.localtime(wall / 1e9))
        self._notes.append(NoteView(clock, level, text, hint))
        self._notes_total += 1

    def _seconds(self, t_ns: int) -> float:
        return (t_ns - self._start_ns) / 1e9

    def _settle(self, t_ns: int) -> None:
        """The engine's state from what is known; remembers when it changed."""
        state, text = self._base, self._base_text
        if state == "ready":
            if self._running:
                state = "measuring" if self._running == "blocks" else "running"
            elif any(task in self._tasks for task in LOADING):
                state = "loading"
            elif self._tasks:
                state = "packing"
            elif not self._loaded:
                text = "no model is loaded"
        if state != self._engine.state:
            self._since_ns = t_ns or self._clock()
        self._engine = replace(self._engine, state=state, text=text)

    # -- what the person asked for, told by LiveSession ------------------------------------------------------------------------

    def want(self, arm: str, policy: Policy) -> None:
        with self._lock:
            state = self._arms.setdefault(arm, _Arm())
            state.wanted, state.refused, state.pending = policy, None, True

    def give_up(self, arm: str, reason: str) -> None:
        """What was asked for will not come: the arm goes back to what it had."""
        with self._lock:
            state = self._arms.setdefault(arm, _Arm())
            state.refused, state.pending = reason, False

    def intend(
        self, *, active: str | None = None, interleave: bool | None = None, loop: bool | None = None
    ) -> None:
        with self._lock:
            self._active = self._active if active is None else active
            self._interleave = self._interleave if interleave is None else interleave
            self._wants_loop = self._wants_loop if loop is None else loop

    def guard(self, every: int, limit: float) -> None:
        """From now on, or anew: every ``every``-th request is re-scored, and its KLD may be ``limit`` nats."""
        with self._lock:
            self._guard = GuardView(every=every, limit=limit)

    def guard_state(self, state: str, text: str = "", mean: float | None = None) -> None:
        with self._lock:
            before = self._guard or GuardView(every=0, limit=0.0)
            self._guard = replace(before, state=state, text=text, mean=before.mean if mean is None else mean)

    # -- pictures ----------------------------------------------------------------------------------------------------------

    def view(self, window_s: float | None = 120.0) -> SessionView:
        """The session now; series reach ``window_s`` seconds back, None for all that is kept."""
        with self._lock:
            dirty, self._dirty = self._dirty, False
        if dirty:
            self._refresher.refresh()
        now_ns = self._clock()
        now = self._seconds(now_ns)
        start = None if window_s is None else now - window_s
        with self._lock:
            arms = {name: self._arm_view(name, arm, start) for name, arm in self._arms.items()}
            other = next((a for a in arms if a != self.reference), None)
            sensors = self._sensors
            return SessionView(
                run_id=self.run.id,
                run_dir=self.run.place,
                elapsed_s=now,
                engine=self._engine_view(now_ns),
                active=self._active,
                interleave=self._interleave,
                running=bool(self._running),
                tasks=tuple(
                    TaskView(name, t.label, t.done, t.total, t.unit, (now_ns - t.began_ns) / 1e9)
                    for name, t in self._tasks.items()
                ),
                model=self._model,
                device=self._device,
                workload=self._workload,
                workload_error=self._workload_error,
                arms=arms,
                ratios=dict(self._figures.ratios.get(other, {})) if other is not None else {},
                traces=dict(self._traces),
                trace_ages_s={arm: (now_ns - t.t_ns) / 1e9 for arm, t in self._traces.items()},
                energy={
                    arm: EnergyView(digest, (now_ns - end) / 1e9, taken)
                    for arm, (digest, end, taken) in self._energy.found.items()
                },
                energy_missing=self._energy.missing,
                sensor_state=self._sensor_state,
                sensors=sensors,
                sensors_age_s=None if sensors is None else (now_ns - sensors.t_ns) / 1e9,
                sensor_series={name: s.since(start) for name, s in self._sensor_series.items()},
                notes=tuple(self._notes),
                snapshots=tuple(self._snapshots),
                live_tokens=self._live.tokens if self._live is not None else 0,
                live_stage=self._live.stage if self._live is not None else "",
                dropped=sum(self._dropped.values()),
                journal_text=self.journal.text,
                run_text=self.run.text,
                wants_loop=self._wants_loop,
                notes_total=self._notes_total,
                guard=self._guard,
            )

    def _arm_view(self, name: str, arm: _Arm, start: float | None) -> ArmView:
        return ArmView(
            arm=name,
            wanted=arm.wanted,
            ready=arm.ready,
            refused=arm.refused,
            pending=arm.pending,
            requests=arm.requests,
            first_use=arm.first_use,
            invalid=arm.invalid,
            invalid_reason=arm.invalid_reason,
            stats=self._figures.stats.get(name, {}),
            series={id_: s.since(start) for id_, s in arm.series.items()},
            last=arm.last,
        )

    def _engine_view(self, now_ns: int) -> EngineView:
        silent = self.silence() if self.silence is not None else None
        if silent is not None and silent > STALLED_S:
            return replace(
                self._engine, state="stalled", text=f"no sign of life for {silent:.0f} s", since_s=silent
            )
        return replace(self._engine, since_s=(now_ns - self._since_ns) / 1e9)

    def _compute(self) -> None:
        with self._lock:
            ready = {name: arm.ready for name, arm in self._arms.items() if arm.ready is not None}
            given = self._numbers.snapshot(self._device, self._model, ready)
            generation = self._generation
        figures = self._numbers.compute(given)
        with self._lock:
            if generation == self._generation:
                self._figures = figures


def _work(ready: p.WorkloadReady) -> tuple[str, str]:
    return ready.workload.digest, ready.prompts_sha256
