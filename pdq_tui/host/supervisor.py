"""Starts the two workers, reads them, replaces them when they die, and ends them: only processes that it started.

One thread, the *keeper*, starts every process and lives as long as the supervisor: workers ask the kernel to die with
the thread that started them, and a replacement must not have to wait for a screen that a slow terminal holds up.
Reader threads decode, journal and hand over; nothing that must be kept ever passes through the screen's event loop.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from pdq_tui import locations
from pdq_tui.core.protocol import (
    DROPPABLE,
    Dropped,
    Failure,
    Hello,
    Message,
    ModelReady,
    Note,
    Ping,
    Pong,
    Progress,
    ProtocolError,
    Request,
    Shutdown,
    StageSample,
    UnknownTypeError,
    VersionError,
    Watch,
    WorkerExited,
    WorkerStarted,
    decode_event,
    encode,
)
from pdq_tui.host.journal import Journal
from pdq_tui.host.process import Worker
from pdq_tui.host.runs import Run, cut_short, leftovers
from pdq_tui.host.sentences import exit_sentence, given_up

#: -P: a file named torch.py where the person happens to stand is not the library.
ENGINE_ARGV: Final = (sys.executable, "-P", "-m", "pdq_tui.engine.worker")
SENSORS_ARGV: Final = (sys.executable, "-P", "-m", "pdq_tui.sensors.worker")
TICK_S: Final = 0.25
PING_S: Final = 1.0
#: Crashes in a row, each soon after its start, after which the engine is not started again by itself.
ENGINE_CRASHES: Final = 3
SENSORS_CRASHES: Final = 3
#: A worker that lived this long, or an engine that answered this many requests, was not a failed start.
SETTLED_S: Final = 60.0
SETTLED_REQUESTS: Final = 50
#: On the wire only: of use to a live screen, not to anyone who reads the journal.
LIVE_ONLY: Final = (Progress, StageSample, Pong)

OnEvent = Callable[[Any], None]


class Supervisor:
    """The two workers of one session. ``on_event`` is called from several threads, one event at a time per worker.

    engine_argv, sensors_argv   command lines in place of the real workers.
    restart                     replace a crashed engine by itself; a headless run says no.
    garbage, unknown            lines that were no messages, and messages of types this version does not know.
    """

    def __init__(
        self,
        run: Run,
        on_event: OnEvent,
        *,
        journal: Journal | None = None,
        engine_argv: Sequence[str] | None = None,
        sensors_argv: Sequence[str] | None = None,
        sensors: bool = True,
        restart: bool = True,
    ) -> None:
        self.run = run
        self.journal = journal or Journal(run.journal_path)
        self.garbage = 0
        self.unknown = 0
        self._on_event = on_event
        self._argv = {"engine": tuple(engine_argv or ENGINE_ARGV)}
        if sensors:
            self._argv["sensors"] = tuple(sensors_argv or SENSORS_ARGV)
        self._restart = restart
        self._lock = threading.RLock()
        self._workers: dict[str, Worker] = {}
        self._starts: dict[str, int] = {"engine": 0, "sensors": 0}
        self._crashes: dict[str, int] = {"engine": 0, "sensors": 0}
        self._fatal: Failure | None = None
        self._version_errors: dict[str, str] = {}
        self._model_ready = False
        self._requests = 0
        self._watch = Watch()
        self._closing = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._due: list[tuple[float, str]] = []
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)

    # -- for the session -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers. Returns at once; what becomes of them comes as events. Workers that an earlier session
        left behind are told of, and left alone."""
        for role in self._argv:
            self._jobs.put(partial(self._launch, role))
        self._jobs.put(self._tell_leftovers)
        self._keeper.start()

    def send(self, command: Message) -> bool:
        """Queue a command for the engine. False when there is none: whoever holds the intention sends it again after
        the next Hello."""
        with self._lock:
            engine = self._workers.get("engine")
            if engine is None or not engine.alive or engine.expected:
                return False
            engine.send(command)
            return True

    @property
    def engine_pid(self) -> int | None:
        with self._lock:
            engine = self._workers.get("engine")
            return engine.pid if engine is not None and engine.alive else None

    @property
    def worker_pids(self) -> dict[str, int]:
        with self._lock:
            return {role: worker.pid for role, worker in self._workers.items() if worker.alive}

    @property
    def restarts(self) -> int:
        """How many engines came after the first."""
        return max(self._starts["engine"] - 1, 0)

    def engine_silence(self) -> float | None:
        """Seconds since the engine's last sign of life, None before its first or when there is no engine. It is
        pinged once a second, so a silence means that its interpreter does not run."""
        with self._lock:
            engine = self._workers.get("engine")
        if engine is None or not engine.alive or engine.last_heard is None:
            return None
        return time.monotonic() - engine.last_heard

    def restart_engine(self) -> None:
        """End the engine, if there is one, and start another. Returns at once."""
        self._jobs.put(self._restart_now)

    def vanish(self, timeout_s: float) -> float | None:
        """Close the engine's stdin without a word, as the kernel does for an app that was killed. Returns how many seconds
        it took to end, None where it had not within ``timeout_s``."""
        with self._lock:
            engine = self._workers.get("engine")
            if engine is None:
                return None
            engine.expected = True
        begin = time.monotonic()
        engine.vanish()
        return time.monotonic() - begin if engine.wait(timeout_s) else None

    def close(self, timeout: float = 4.0) -> None:
        """Ask both workers to end, then make them: within ``timeout`` seconds, also during a load or when stopped."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            workers = [w for w in self._workers.values() if w.alive]
            for worker in workers:
                worker.expected = True
        _end(workers, timeout)
        self._jobs.put(None)
        if self._keeper.ident is not None:
            self._keeper.join(1.0)
        # A worker that the keeper was just starting when we began to close.
        with self._lock:
            late = [w for w in self._workers.values() if w.alive]
        _end(late, 0.5)
        self.run.release()
        self.journal.close()

    # -- the keeper's thread ---------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        next_ping = 0.0
        while True:
            try:
                job = self._jobs.get(timeout=TICK_S)
            except queue.Empty:
                job = _nothing
            if job is None:
                return
            job()
            now = time.monotonic()
            for role in [role for at, role in self._due if at <= now]:
                self._due = [(at, r) for at, r in self._due if r != role]
                self._launch(role)
            if now >= next_ping:
                next_ping = now + PING_S
                with self._lock:
                    engine = self._workers.get("engine")
                # Not another one while a stopped worker has not taken the last.
                if engine is not None and engine.alive and engine.idle_outbox:
                    engine.send(Ping())

    def _launch(self, role: str) -> None:
        with self._lock:
            current = self._workers.get(role)
            if self._closing or (current is not None and current.alive):
                return
            if role == "engine":
                self._fatal = None
                self._version_errors.pop(role, None)
                self._model_ready = False
                self._requests = 0
            log = None if self.run.in_memory else self.run.path / _LOGS[role]
            count = self._starts[role]
            self._starts[role] += 1
            worker: Worker | None = None
            why = ""
            try:
                worker = Worker(role, self._argv[role], log, self._line, self._exit)
            except OSError as error:
                why = f"the {role} cannot be started: {error}"
            else:
                self._workers[role] = worker
                self.run.track(worker.pid, role)
        if worker is None:
            self._emit(WorkerExited(role=role, pid=0, returncode=None, expected=False, text=why))
            return
        self._emit(WorkerStarted(role=role, pid=worker.pid, restart=count))
        if role == "engine":
            self._watch = Watch(pid=worker.pid)
        self._send_watch()

    def _tell_leftovers(self) -> None:
        parents = {self.run.path.parent, locations.runs_dir()}
        for place in cut_short(parents):
            name = place.name.rpartition("-")[2] if place.parent == locations.runs_dir() else str(place)
            self._emit(
                Note(
                    level="warn",
                    text=f"the app of run {name} was killed; what it had measured is kept",
                    hint=f"to compare it: pdq-tui snapshots make {name}",
                )
            )
        for leftover in leftovers(parents):
            self._emit(Note(level="warn", text=leftover.text, hint=f"to end it: kill {leftover.pid}"))

    def _restart_now(self) -> None:
        with self._lock:
            engine = self._workers.get("engine")
            self._crashes["engine"] = 0
            self._due = [(at, role) for at, role in self._due if role != "engine"]
            if engine is not None:
                engine.expected = True
        if engine is not None and engine.alive:
            _end([engine], 3.0)
        self._launch("engine")

    def _send_watch(self) -> None:
        with self._lock:
            sensors = self._workers.get("sensors")
            if sensors is not None and sensors.alive and self._watch.pid is not None:
                sensors.send(self._watch)

    # -- the readers' and waiters' threads ---------------------------------------------------------------------------------

    def _line(self, worker: Worker, line: bytes | None) -> None:
        try:
            event = decode_event(line) if line is not None else None
        except VersionError as error:
            self._wrong_version(worker, error)
            return
        except UnknownTypeError:
            self.unknown += 1
            return
        except ProtocolError:
            event = None
        if event is None:
            self._count_garbage(worker, line)
            return
        if not event.t_ns:
            event.t_ns = time.monotonic_ns()
        worker.stages.take(event)
        match event:
            case Hello() if event.role != worker.role:
                self._count_garbage(worker, line)
                return
            case ModelReady():
                self._model_ready = True
                device = event.device
                # Device sensors are worth ten readings a second; a CPU's load is not, and would cost the CPU.
                interval = 0.1 if device.kind == "cuda" else 0.5
                self._watch = Watch(
                    pid=worker.pid,
                    uuid=device.uuid,
                    bus_id=device.bus_id,
                    interval_s=interval,
                    others=[(other.uuid, other.bus_id) for other in device.others],
                )
                self._send_watch()
            case Request():
                self._requests += 1
            case Failure(fatal=True) if worker.role == "engine":
                self._fatal = event
            case Dropped():
                event.role = worker.role
                line = None
        self._emit(event, line)

    def _emit(self, event: Any, line: bytes | None = None) -> None:
        if not isinstance(event, LIVE_ONLY):
            self.journal.write(
                line + b"\n" if line is not None else encode(event), droppable=isinstance(event, DROPPABLE)
            )
        self._on_event(event)

    def _count_garbage(self, worker: Worker, line: bytes | None) -> None:
        self.garbage += 1
        if self.garbage == 1:
            shown = (
                "a line of more than 32 MiB" if line is None else ascii(line[:60].decode("utf-8", "replace"))
            )
            self._emit(Note(level="warn", text=f"the {worker.role} sent what is no message: {shown}"))

    def _wrong_version(self, worker: Worker, error: VersionError) -> None:
        if worker.role in self._version_errors:
            return
        self._version_errors[worker.role] = (
            f"the {worker.role} belongs to another version of pdq-tui: {error.message}"
        )
        worker.signal(signal.SIGKILL)

    def _exit(self, worker: Worker, code: int) -> None:
        role = worker.role
        tail = worker.tail()
        with self._lock:
            self.run.untrack(worker.pid)
            if self._workers.get(role) is worker:
                del self._workers[role]
            expected = worker.expected or self._closing
            delay = None if expected else self._replacement_delay(worker)
            fatal = self._fatal if role == "engine" else None
            text = exit_sentence(role, code, expected, fatal, tail)
            if not expected:
                text = self._version_errors.get(role, text)
            if delay is None and not expected:
                text += given_up(role, self._crashes[role], ENGINE_CRASHES)
        self._emit(
            WorkerExited(
                role=role,
                pid=worker.pid,
                returncode=code,
                expected=expected,
                text=text,
                tail="" if expected else tail,
                replaced=delay is not None,
                hint=fatal.hint if fatal is not None and not expected else None,
            )
        )
        if delay is not None:
            at = time.monotonic() + delay
            self._jobs.put(lambda: self._due.append((at, role)))

    def _replacement_delay(self, worker: Worker) -> float | None:
        """Seconds until a new one is started, None for never. Under the lock."""
        role = worker.role
        settled = time.monotonic() - worker.started > SETTLED_S and (role == "sensors" or self._model_ready)
        if settled or (role == "engine" and self._requests >= SETTLED_REQUESTS):
            self._crashes[role] = 0
        self._crashes[role] += 1
        limit = ENGINE_CRASHES if role == "engine" else SENSORS_CRASHES
        if (
            role in self._version_errors
            or self._crashes[role] >= limit
            or (role == "engine" and not self._restart)
        ):
            return None
        return 0.0 if role == "engine" and self._crashes[role] == 1 else 0.5 * self._crashes[role]


_LOGS: Final = {"engine": "stderr.log", "sensors": "sensors.log"}


def _nothing() -> None:
    return


def _end(workers: Sequence[Worker], timeout: float) -> None:
    """Shutdown by message, then SIGTERM, then SIGKILL to the workers' groups. A stopped process is continued first:
    it could not act on anything but SIGKILL."""
    for worker in workers:
        worker.send(Shutdown())
        worker.signal(signal.SIGCONT)
    began = time.monotonic()
    for share, number in ((0.4, signal.SIGTERM), (0.75, signal.SIGKILL), (1.0, None)):
        for worker in workers:
            worker.wait(began + share * timeout - time.monotonic())
        workers = [w for w in workers if w.alive]
        if not workers or number is None:
            return
        for worker in workers:
            worker.signal(number)
            worker.signal(signal.SIGCONT)
