"""A recorded run in the place of a live one: the journal's events, reduced again at the pace that a person wants.

One thread does all the reducing, whatever key is pressed; the screen takes its pictures as of a live session. Going back
is reducing from the beginning, since a reducer cannot unlearn.
"""

from __future__ import annotations

import bisect
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from pdq_tui.core import protocol as p
from pdq_tui.core.facts import collect
from pdq_tui.errors import PdqError
from pdq_tui.host.journal import Journal, ReadCounts, read_events
from pdq_tui.host.runs import Run
from pdq_tui.host.session import Session
from pdq_tui.host.view import SessionView

SPEEDS: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_TICK_S: Final = 0.05
#: A pause in which nothing was recorded for longer is passed over while playing.
_IDLE_S: Final = 5.0
_NO_KEY: Final = "this is a recording: nothing runs"


def read_run(directory: Path) -> tuple[Run, list[Any], ReadCounts]:
    """A run's directory as it lies there. Raises PdqError where it holds no journal that can be read."""
    counts = ReadCounts()
    try:
        events = sorted(read_events(directory / "events.jsonl", counts), key=lambda e: int(e.t_ns))
    except OSError as error:
        raise PdqError(f"{directory} cannot be replayed: {error.strerror or error}") from error
    if not events:
        raise PdqError(f"{directory} cannot be replayed: its journal holds nothing")
    try:
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        meta = {}
    if not isinstance(meta, dict):
        meta = {}
    # Without its clocks the beginning is the first event, and the wall time is not known.
    first = next((e.t_ns for e in events if e.t_ns), 0)
    meta = {"id": directory.name, "monotonic_ns": first, "wall_ns": first, **meta}
    return Run(str(meta["id"]), directory, meta), events, counts


def two_arms(events: Iterable[Any]) -> tuple[list[Any], str | None]:
    """The events with the arms called A and B, B the reference, as the screen has them, and a sentence where they were
    called otherwise. Of more than two, the reference and the first rival; the others are left out, and named."""
    events = list(events)
    labels = collect(events).labels()
    if not labels or set(labels) <= {"A", "B"}:
        return events, None
    names = {labels[0]: "B"} | ({labels[1]: "A"} if len(labels) > 1 else {})
    found = []
    for event in events:
        arm = getattr(event, "arm", None)
        if isinstance(event, p.RunStarted):
            arms = [names[a] for a in event.arms if a in names]
            found.append(msgspec.structs.replace(event, arms=arms))
        elif not isinstance(arm, str) or not arm:
            found.append(event)
        elif arm in names:
            found.append(msgspec.structs.replace(event, arm=names[arm]))
    told = ", ".join(f"{new} is {old}" for old, new in sorted(names.items(), key=lambda n: n[1]))
    left = labels[2:]
    return found, f"arm {told}" + (f"; not shown: {', '.join(left)}" if left else "")


class ReplaySession:
    """Has ``LiveSession``'s face, and the keys of a player beside it. Positions are seconds since the run began."""

    def __init__(self, directory: Path, *, speed: float = 1.0, min_effect: float = 0.01) -> None:
        self.run, events, counts = read_run(directory)
        self._events, told = two_arms(events)
        self._times = [int(e.t_ns) for e in self._events]
        self._ends = [
            e.host_end_ns or e.t_ns for e in self._events if isinstance(e, p.Request) and not e.warmup
        ]
        self.journal = Journal(None)
        self.journal.text = ""
        self.speed = speed
        self.playing = True
        self._min_effect = min_effect
        self._start_ns = int(self.run.meta["monotonic_ns"])
        self._first_ns = max(self._start_ns, self._times[0])
        self._last_ns = max(self._times[-1], self._first_ns)
        self._notes = [("info", f"replay of {self.run.id}")]
        if told:
            self._notes.append(("info", told))
        if counts.torn or counts.unknown:
            self._notes.append(
                (
                    "warn",
                    f"the journal: {counts.torn} torn lines and {counts.unknown} unknown events are left out",
                )
            )
        self._lock = threading.RLock()
        self._position_ns = self._first_ns
        self._target_ns: int | None = None
        self._session, self._next = self._fresh(), 0
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._play, name="replay", daemon=True)
        self._thread.start()

    # -- the player ----------------------------------------------------------------------------------------------------

    @property
    def position_s(self) -> float:
        return (self._position_ns - self._start_ns) / 1e9

    @property
    def length_s(self) -> float:
        return (self._last_ns - self._start_ns) / 1e9

    def toggle(self) -> None:
        """Play or pause; from the end, play from the beginning."""
        with self._lock:
            if self._position_ns >= self._last_ns:
                self._target_ns, self.playing = self._first_ns, True
            else:
                self.playing = not self.playing
        self._wake.set()

    def faster(self, step: int) -> None:
        """The next speed of ``SPEEDS`` up or down."""
        with self._lock:
            place = bisect.bisect_left(SPEEDS, self.speed) + step
            self.speed = SPEEDS[min(max(place, 0), len(SPEEDS) - 1)]

    def seek(self, seconds: float) -> None:
        """To ``seconds`` since the run began, as near as the recording has it."""
        with self._lock:
            wanted = self._start_ns + int(seconds * 1e9)
            self._target_ns = min(max(wanted, self._first_ns), self._last_ns)
        self._wake.set()

    def skip(self, seconds: float) -> None:
        with self._lock:
            now = self._position_ns if self._target_ns is None else self._target_ns
            self.seek((now - self._start_ns) / 1e9 + seconds)

    def step(self, requests: int) -> None:
        """To the end of the next request (or the one before), and pause there."""
        with self._lock:
            now = self._position_ns if self._target_ns is None else self._target_ns
            place = bisect.bisect_right(self._ends, now) - 1 + requests
            self.playing = False
            if self._ends and place >= 0:
                self._target_ns = self._ends[min(place, len(self._ends) - 1)]
            else:
                self._target_ns = self._first_ns
        self._wake.set()

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until what was sought is there. For tests and for pictures."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            with self._lock:
                if self._target_ns is None:
                    return True
            time.sleep(0.005)
        return False

    def _play(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(_TICK_S)
            self._wake.clear()
            now = time.monotonic()
            passed, self._beat = now - self._beat, now
            with self._lock:
                target = self._target_ns
                if target is None and self.playing:
                    target = self._later(passed)
            if target is not None:
                self._go(target)

    def _later(self, passed_s: float) -> int:
        """Where playing has come to ``passed_s`` later; long silence is passed over."""
        position = self._position_ns + int(passed_s * self.speed * 1e9)
        if self._next < len(self._times) and self._times[self._next] - self._position_ns > _IDLE_S * 1e9:
            position = max(position, self._times[self._next] - int(1e9))
        if position >= self._last_ns:
            self.playing = False
        return min(position, self._last_ns)

    def _go(self, target: int) -> None:
        """Reduce up to ``target``. A new reducer is shown only when it has come there."""
        session, following = self._session, self._next
        if target < self._position_ns:
            session, following = self._fresh(), 0
        while following < len(self._times) and self._times[following] <= target:
            event = self._events[following]
            if isinstance(event, p.ArmReady):
                session.want(event.arm, event.policy)
            session.apply(event)
            following += 1
            if self._closed.is_set():
                return
        with self._lock:
            old, self._session, self._next = self._session, session, following
            self._position_ns = target
            if self._target_ns == target:
                self._target_ns = None
        if old is not session:
            old.close()

    def _fresh(self) -> Session:
        session = Session(
            self.run, Journal(None), min_effect=self._min_effect, clock=lambda: self._position_ns
        )
        session.journal.text = ""
        for level, text in self._notes:
            session.note(level, text)
        return session

    # -- a live session's face -----------------------------------------------------------------------------------------

    def view(self, window_s: float | None = 120.0) -> SessionView:
        with self._lock:
            session, seeking = self._session, self._target_ns is not None
            state = "seeking" if seeking else "playing" if self.playing else "paused"
        view = session.view(window_s)
        at, whole = _clock(view.elapsed_s), _clock(self.length_s)
        text = f"REPLAY {state} x{self.speed:g}  {at} of {whole}   space plays or pauses, , . step, < > 10 s, + - speed"
        return replace(view, run_text=text, wants_loop=False)

    def events(self, since_ns: int | None = None) -> list[Any]:
        """What was recorded up to the position."""
        with self._lock:
            found = self._events[: self._next]
        return found if since_ns is None else [e for e in found if e.t_ns >= since_ns]

    def note(self, level: str, text: str, hint: str | None = None) -> None:
        self._session.note(level, text, hint)

    def record(self, event: Any) -> None:
        """A recording does not change: what is saved from it is told, not journaled."""
        self._session.apply(event)

    def _refuse(self, *_args: Any, **_more: Any) -> None:
        self.note("warn", _NO_KEY)

    start: Callable[..., None] = _refuse
    set_policy: Callable[..., None] = _refuse
    set_workload: Callable[..., None] = _refuse
    select: Callable[..., None] = _refuse
    interleave: Callable[..., None] = _refuse
    start_loop: Callable[..., None] = _refuse
    restart_engine: Callable[..., None] = _refuse
    trace: Callable[..., None] = _refuse
    measure_energy: Callable[..., None] = _refuse

    def stop(self) -> None:
        """Nothing runs."""

    def cancel(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        self._thread.join(5.0)
        self._session.close()


def _clock(seconds: float) -> str:
    whole = max(0, int(seconds))
    return f"{whole // 3600:d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
