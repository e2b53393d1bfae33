"""Polls NVML in threads of its own and keeps the last answers, so that a sample is always ready at once.

An NVML call can take seconds, or never return. Queries run in two lanes, quick and slow; a query that holds its lane
for longer than ``HUNG_S`` keeps that thread to itself from then on, and the lane goes on in a new thread without it.
Threads that hang are never joined: the worker leaves by ``os._exit``. When the driver goes, all handles are void: NVML
is started anew until it is back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from pdq_tui.core.protocol import GpuSample, SensorState
from pdq_tui.sensors import nvml
from pdq_tui.sensors.join import Identity, Match, match, visible_devices

#: A query that holds its lane for longer gets a thread of its own.
HUNG_S: Final = 1.0
#: An answer older than this (beyond its polling interval) is shown as stale …
STALE_S: Final = 1.0
#: … and one older than this is not shown at all.
FORGET_S: Final = 5.0
#: How often the process list, and GPUs that are not the engine's, are asked.
SLOW_S: Final = 1.0
#: All GPUs lost for so long: NVML is started anew …
LOST_S: Final = 2.0
#: … and tried again so often, as after a start that failed, until the driver is back.
RETRY_S: Final = 5.0
#: Repeating these would be read as "nothing happened": never shown stale.
_NEVER_STALE: Final = frozenset({"energy_j"})
NAMESPACE: Final = "process memory unknown (PID namespace): the engine's pid is not in NVML's list"


class Poll:
    """One group of fields of one device, and its last reading."""

    def __init__(self, device: nvml.Device, group: nvml.Group) -> None:
        self.device = device
        self.group = group
        self.reading: nvml.Reading | None = None
        self.asked_at = time.monotonic()  # when the running or last query began
        self.answered_at = self.asked_at
        self.running = False
        self.detached = False

    def run(self) -> None:
        self.asked_at, self.running = time.monotonic(), True
        reading = self.group.read(self.device)
        # One assignment each: a reader sees the old or the new reading, never half of one.
        self.reading, self.answered_at, self.running = reading, time.monotonic(), False

    def age(self, now: float, interval: float) -> float:
        """Seconds beyond the polling interval since the last answer."""
        return max(0.0, now - self.answered_at - interval)


class Lane:
    """Asks its polls in turn, each at its interval, in one thread that is replaced when a query hangs."""

    def __init__(self, sampler: Sampler, name: str, polls: Sequence[Poll]) -> None:
        self._sampler = sampler
        self._name = name
        self._polls = list(polls)
        self._current: Poll | None = None
        # Held while a query is found to hang and while one is found to have ended, so that it cannot be both.
        self._handover = threading.Lock()
        self._stopped = False
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name=f"nvml {self._name}", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        me = threading.current_thread()
        while self._thread is me and not self._stopped:
            for poll in list(self._polls):
                now = time.monotonic()
                if poll.reading is None or now - poll.asked_at >= self._sampler.interval(poll):
                    self._current = poll
                    poll.run()
                    with self._handover:
                        if poll.detached:
                            break
                        self._current = None
            else:
                time.sleep(self._sampler.tick())
                continue
            self._alone(poll)

    def _alone(self, poll: Poll) -> None:
        """This thread's lane has gone on without it; from now on it serves ``poll`` only, and unhurriedly."""
        while not self._stopped:
            time.sleep(SLOW_S)
            poll.run()

    def stop(self) -> None:
        """Ask nothing more. Waits a moment for the query that is under way."""
        self._stopped = True
        self._thread.join(HUNG_S)

    def watchdog(self, now: float) -> None:
        with self._handover:
            poll = self._current
            if poll is not None and not self._stopped and poll.running and now - poll.asked_at > HUNG_S:
                poll.detached = True
                self._polls = [other for other in self._polls if other is not poll]
                self._current = None
                self._start()


class Sampler:
    """What NVML says now. Methods return at once and may be called from one thread."""

    def __init__(self, visible: str | None, woken: Callable[[], None]) -> None:
        """``visible``: CUDA_VISIBLE_DEVICES of the engine, or None. ``woken`` is called when NVML has started or
        failed to, from another thread."""
        self._visible = visible
        self._woken = woken
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._start: nvml.Start | None = None
        self._polls: dict[Identity, list[Poll]] = {}
        self._lanes: list[Lane] = []
        self._lost_at: float | None = None
        self._pid: int | None = None
        self._wanted: Sequence[tuple[str | None, str | None]] | None = None
        self._interval = 0.1
        self._engine = Match(None, "the engine has not named its device yet")
        #: Of a model on several devices, the further ones.
        self._beside: list[Match] = []
        threading.Thread(target=self._initialise, name="nvml init", daemon=True).start()

    def _initialise(self) -> None:
        while True:
            start = nvml.start()
            self._adopt(start)
            self._woken()
            if start.kind in ("ok", "absent"):
                return
            time.sleep(RETRY_S)

    def _adopt(self, start: nvml.Start) -> None:
        with self._lock:
            self._start = start
            self._polls, self._lanes, self._lost_at = {}, [], None
            polls = [
                Poll(device, group)
                for device in start.devices
                if device.closed is None
                for group in nvml.GROUPS
            ]
            for poll in polls:
                self._polls.setdefault(poll.device.identity, []).append(poll)
            self._rejoin()
            for name, slow in (("quick", False), ("slow", True)):
                lane = [poll for poll in polls if poll.group.slow is slow]
                if lane:
                    self._lanes.append(Lane(self, name, lane))

    def _look_for_loss(self, now: float) -> None:
        """Where every GPU has been lost for a while, not one of them alone, start NVML anew."""
        with self._lock:
            opened = [d for d in self._start.devices if d.closed is None] if self._start is not None else []
            if not opened or not all(nvml.is_lost(device.where) for device in opened):
                self._lost_at = None
                return
            if self._lost_at is None:
                self._lost_at = now
            if now - self._lost_at < LOST_S:
                return
            lanes, self._lanes, self._polls = self._lanes, [], {}
            self._start = nvml.Start(
                "error", "NVML has lost its GPUs: no GPU sensors until it finds them again", "see 'dmesg'"
            )
            self._rejoin()
        threading.Thread(target=self._restart, args=(lanes,), name="nvml init", daemon=True).start()

    def _restart(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            lane.stop()
        nvml.stop()
        self._initialise()

    def watch(
        self, pid: int | None, devices: Sequence[tuple[str | None, str | None]], interval_s: float
    ) -> None:
        """``devices``: (UUID, bus id) of the engine's, the first one and those that its model lies on beside."""
        with self._lock:
            self._pid, self._wanted, self._interval = pid, devices, max(0.02, interval_s)
            self._rejoin()

    def _rejoin(self) -> None:
        if self._start is None or self._wanted is None:
            return
        identities = [device.identity for device in self._start.devices]
        uuid, bus_id = self._wanted[0]
        self._beside = [match(identities, *named) for named in self._wanted[1:]]
        if uuid is None and bus_id is None:
            hidden = visible_devices(self._visible, identities).reason
            self._engine = Match(None, "the engine runs on the CPU" + (f"; {hidden}" if hidden else ""))
        else:
            self._engine = match(identities, uuid, bus_id)

    def interval(self, poll: Poll) -> float:
        mine = poll.device.identity in self._mine
        return self._interval if mine and not poll.group.slow else SLOW_S

    def tick(self) -> float:
        return min(self._interval, SLOW_S) / 4 if self._engine.found is not None else SLOW_S / 4

    @property
    def _mine(self) -> list[Identity]:
        """What the engine runs on, as far as it was found."""
        return [m.found for m in (self._engine, *self._beside) if m.found is not None]

    @property
    def joined(self) -> bool:
        return self._engine.found is not None

    def state(self) -> SensorState | None:
        """None while NVML has been starting for less than a second."""
        with self._lock:
            start, engine, mine = self._start, self._engine, self._mine
            lost = next((m.reason for m in self._beside if m.found is None), None)
        if start is None:
            if time.monotonic() - self._begun < 1.0:
                return None
            return SensorState(
                nvml="starting",
                text="NVML is still starting; no GPU sensors until it answers",
                hint="a slow start is usual without persistence mode: 'nvidia-smi -pm 1'",
                engine_gpu_reason="NVML is still starting",
            )
        gpus = len({device.identity.index for device in start.devices})
        found = engine.found
        return SensorState(
            nvml=start.kind,
            text=start.text,
            hint=start.hint,
            driver=start.driver,
            gpus=gpus,
            engine_gpu=found.index if found is not None else None,
            engine_gpu_reason=lost if found is not None else (engine.reason if gpus else start.text),
            engine_gpus=[identity.index for identity in mine],
        )

    def samples(self) -> list[GpuSample]:
        """One sample a GPU, in NVML's order; the engine's MIG slice stands in its GPU's place."""
        now = time.monotonic()
        self._look_for_loss(now)
        with self._lock:
            start, mine, pid = self._start, self._mine, self._pid
            lanes = list(self._lanes)
        for lane in lanes:
            lane.watchdog(now)
        if start is None:
            return []
        shown = []
        for device in start.devices:
            identity = device.identity
            sliced = any(m.slice is not None and m.index == identity.index for m in mine)
            if identity in mine or (identity.slice is None and not sliced):
                shown.append(self._sample(device, identity in mine, pid, now))
        return shown

    def _sample(self, device: nvml.Device, is_engine: bool, pid: int | None, now: float) -> GpuSample:
        values: dict[str, Any] = {}
        missing = dict(device.missing)
        processes: list[tuple[int, int | None]] | None = None
        if device.closed is not None:
            everything = (key for group in nvml.GROUPS for key in group.fields)
            missing |= dict.fromkeys(everything, device.closed)
        for poll in self._polls.get(device.identity, ()):
            reading = self._aged(poll, now)
            values |= reading.values
            missing |= reading.missing
            if reading.processes is not None:
                processes = reading.processes
        if processes is not None:
            _count(processes, is_engine, pid, values, missing)
        if values.get("unified"):
            _unified(processes, missing.get("other_processes"), values, missing)
        identity = device.identity
        return GpuSample(
            index=identity.index,
            name=device.name,
            uuid=identity.uuid,
            bus_id=identity.bus_id,
            mig=identity.slice is not None,
            engine=is_engine,
            missing=missing,
            **values,
        )

    def _aged(self, poll: Poll, now: float) -> nvml.Reading:
        """The last reading with what its age says about it."""
        age = poll.age(now, self.interval(poll))
        reading = poll.reading
        if reading is None:
            why = (
                "not read yet"
                if age < STALE_S
                else f"{poll.group.name}: NVML has not answered for {age:.0f} s"
            )
            return nvml.Reading(missing=dict.fromkeys(poll.group.fields, why))
        if age < STALE_S:
            return reading
        if age >= FORGET_S:
            why = f"{poll.group.name}: NVML has not answered for {age:.0f} s"
            return nvml.Reading(missing=dict.fromkeys(poll.group.fields, why))
        stale = f"stale {age:.0f} s"
        values = {key: value for key, value in reading.values.items() if key not in _NEVER_STALE}
        return nvml.Reading(
            values, {**dict.fromkeys(poll.group.fields, stale), **reading.missing}, reading.processes
        )


def _count(
    processes: list[tuple[int, int | None]],
    is_engine: bool,
    pid: int | None,
    values: dict[str, Any],
    missing: dict[str, str],
) -> None:
    """Fill in the engine's memory and the number of others. In a container NVML lists the host's pids: a list without
    ours says nothing about us, and no pid of it is ever looked up on this machine."""
    pids = {listed for listed, _ in processes}
    if not is_engine:
        values["other_processes"] = len(pids)
        missing["process_memory_bytes"] = "the engine does not run on this GPU"
    elif pid is None or pid not in pids:
        missing["process_memory_bytes"] = missing["other_processes"] = NAMESPACE
    else:
        values["other_processes"] = len(pids) - 1
        known = [used for listed, used in processes if listed == pid and used is not None]
        if known:
            values["process_memory_bytes"] = sum(known)
        else:
            missing["process_memory_bytes"] = "NVML lists the process without its memory"


def _unified(
    processes: list[tuple[int, int | None]] | None,
    reason: str | None,
    values: dict[str, Any],
    missing: dict[str, str],
) -> None:
    if processes is None:
        missing["memory_used_bytes"] = (
            f"unified memory, and the process list is n/a ({reason or 'not read yet'})"
        )
    elif any(used is None for _, used in processes):
        missing["memory_used_bytes"] = "unified memory, and a process is listed without its memory"
    else:
        values["memory_used_bytes"] = sum(used for _, used in processes if used is not None)
