"""The sensors process: ``python -m pdq_tui.sensors.worker``. Commands on stdin, events on what was stdout at start.

A process of its own because an NVML call can hang its caller's exit. It ends at stdin EOF and with its parent, by
``os._exit``, whatever its threads are doing.
"""

from __future__ import annotations

import ctypes
import os
import platform
import queue
import signal
import sys
import threading
import time
import traceback
from typing import Any, Final

import psutil

from pdq_tui.core.protocol import (
    CpuSample,
    Hello,
    Message,
    Note,
    Ping,
    Pong,
    ProtocolError,
    SensorSample,
    SensorState,
    Shutdown,
    UnknownTypeError,
    VersionError,
    Watch,
    decode_command,
)
from pdq_tui.sensors.channel import Channel, claim_stdout
from pdq_tui.sensors.cpu import CpuReader
from pdq_tui.sensors.sampler import Sampler

#: /proc is read this often, and so often a sample is sent where no GPU is the engine's.
CPU_S: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends. ``parent``: getppid() at start."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        # Not fatal: stdin EOF, and the parent check of the main loop, end this process as well.
        print(f"sensors: prctl: {os.strerror(ctypes.get_errno())}", file=sys.stderr, flush=True)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(0)


def _read_commands(channel: Channel, inbox: queue.SimpleQueue[Watch | None]) -> None:
    unknown = 0
    for line in iter(sys.stdin.buffer.readline, b""):
        try:
            command: Any = decode_command(line)
        except UnknownTypeError:
            unknown += 1
            print(f"sensors: {unknown} commands of unknown type skipped", file=sys.stderr, flush=True)
            continue
        except VersionError as error:
            channel.send(Note(level="error", text=f"sensors: {error.message}", hint=error.hint))
            continue
        except ProtocolError as error:
            channel.send(Note(level="warn", text=f"sensors: {error.message}"))
            continue
        if isinstance(command, Watch):
            inbox.put(command)
        elif isinstance(command, Ping):
            channel.send(Pong(id=command.id))
        elif isinstance(command, Shutdown):
            break
    os._exit(0)  # not sys.exit: a thread may hang in the driver


def _same(a: SensorState | None, b: SensorState) -> bool:
    return a is not None and all(
        getattr(a, key) == getattr(b, key) for key in SensorState.__struct_fields__ if key != "t_ns"
    )


def _die(args: threading.ExceptHookArgs) -> None:
    """A thread that failed by a mistake of ours must not leave its fields quietly stale: end, and be replaced."""
    traceback.print_exception(args.exc_type, args.exc_value, args.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    parent = os.getppid()
    threading.excepthook = _die
    channel = Channel(claim_stdout(), "sensors")
    die_with_parent(parent)
    hello: Message = Hello(
        role="sensors",
        pid=os.getpid(),
        python=platform.python_version(),
        libraries={"psutil": psutil.__version__},
    )
    channel.send(hello)
    inbox: queue.SimpleQueue[Watch | None] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(channel, inbox), name="commands", daemon=True).start()
    _loop(channel, inbox, parent)


def _loop(channel: Channel, inbox: queue.SimpleQueue[Watch | None], parent: int) -> None:
    gpus, cpus = Sampler(os.environ.get("CUDA_VISIBLE_DEVICES"), lambda: inbox.put(None)), CpuReader()
    said: SensorState | None = None
    interval = Watch().interval_s
    cpu, cpu_at = CpuSample(), -CPU_S
    due = time.monotonic()
    while os.getppid() == parent:
        now = time.monotonic()
        if now - cpu_at >= CPU_S:
            cpu, cpu_at = cpus.read(), now
        state = gpus.state()
        if state is not None and not _same(said, state):
            channel.send(state)
            said = state
        channel.send(SensorSample(gpus=gpus.samples(), cpu=cpu))
        # Ticks that come too late are left out, not made up for.
        due = max(due + (interval if gpus.joined else max(interval, CPU_S)), now)
        watch = _wait(inbox, due)
        if watch is not None:
            interval = watch.interval_s
            gpus.watch(watch.pid, [(watch.uuid, watch.bus_id), *watch.others], watch.interval_s)
            cpus.watch(watch.pid)
            cpu_at = -CPU_S
            due = time.monotonic()


def _wait(inbox: queue.SimpleQueue[Watch | None], until: float) -> Watch | None:
    """A command, or None at the time ``until`` and when NVML has started."""
    try:
        return inbox.get(timeout=max(0.001, until - time.monotonic()))
    except queue.Empty:
        return None


if __name__ == "__main__":
    main()
