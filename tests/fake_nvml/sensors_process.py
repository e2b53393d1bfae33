"""The sensors worker as a test drives it: a real process, its events in a list, and waiting for what is to come."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdq_tui.core.protocol import GpuSample, SensorSample, SensorState, Watch, decode_event, encode
from pdq_tui.errors import PdqError


class SensorsProcess:
    def __init__(self, log: Path, env: Mapping[str, str]) -> None:
        # No NVML of this machine may answer in place of the fake, nor a setting of it change the outcome.
        base = {k: v for k, v in os.environ.items() if k not in ("FAKE_NVML", "CUDA_VISIBLE_DEVICES")}
        self.log = log
        self._cond = threading.Condition()
        self._events: list[Any] = []
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdq_tui.sensors.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=base | dict(env),
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                event = decode_event(line)
            except PdqError as error:  # an event of no accepted kind: `until` shows it
                event = error
            with self._cond:
                self._events.append(event)
                self._cond.notify_all()

    @property
    def events(self) -> list[Any]:
        with self._cond:
            return list(self._events)

    def send(self, command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(encode(command))
        self.process.stdin.flush()

    def watch(self, **fields: Any) -> None:
        self.send(Watch(**fields))

    def until(self, accept: Callable[[Any], bool], timeout: float = 40.0) -> Any:
        """The first event, already seen or still to come, that ``accept`` takes."""
        deadline, seen = time.monotonic() + timeout, 0
        with self._cond:
            while True:
                for event in self._events[seen:]:
                    if accept(event):
                        return event
                seen = len(self._events)
                left = deadline - time.monotonic()
                if left <= 0 or (self.process.poll() is not None and not self._cond.wait(0.2)):
                    raise AssertionError(self._story())
                self._cond.wait(left)

    def _story(self) -> str:
        kinds = collections.Counter(type(event).__name__ for event in self._events)
        state = [event for event in self._events if isinstance(event, SensorState)]
        last = "\n".join(map(str, [*state[-1:], *self._events[-2:]]))
        return f"no such event among {dict(kinds)}; the last:\n{last}\nlog: {self.log.read_text()}"

    def state(self, timeout: float = 40.0) -> SensorState:
        found = self.until(lambda e: isinstance(e, SensorState), timeout)
        assert isinstance(found, SensorState)
        return found

    def gpus(self, accept: Callable[[list[GpuSample]], bool], timeout: float = 40.0) -> list[GpuSample]:
        """The GPUs of the first sample that comes from now on and that ``accept`` takes."""
        now = time.monotonic_ns()
        sample = self.until(
            lambda e: isinstance(e, SensorSample) and e.t_ns >= now and accept(e.gpus), timeout
        )
        assert isinstance(sample, SensorSample)
        return sample.gpus

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


@contextmanager
def sensors(directory: Path, env: Mapping[str, str]) -> Iterator[SensorsProcess]:
    running = SensorsProcess(directory / "sensors.log", env)
    try:
        yield running
    finally:
        running.stop()
