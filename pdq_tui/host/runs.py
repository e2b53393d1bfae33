"""One run's directory: its id, its facts, and the lock that lets a later session recognise what was left behind."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pdq_tui import locations
from pdq_tui.errors import PdqError

META_SCHEMA: Final = 1
LOCK: Final = "lock.json"
_JOURNAL: Final = "events.jsonl"
#: How a measured request stands in a journal, and how much of one is looked through for it.
_REQUEST: Final = b'"type":"request"'
_LOOK_BYTES: Final = 4 << 20
#: Distributions whose versions travel with every result. Read from metadata: nothing here is imported.
LIBRARIES: Final = (
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "gguf",
    "bitsandbytes",
    "torchao",
    "nvidia-ml-py",
    "polars",
    "msgspec",
    "textual",
)


@dataclass
class Run:
    """One run on disk. ``in_memory``: no directory was wanted or could be made; ``path`` is then where it would have been.

    ``text`` is what the person must know about where it is kept; empty when it is where it was asked for.
    """

    id: str
    path: Path
    meta: dict[str, Any]
    text: str = ""
    in_memory: bool = False
    workers: dict[int, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return "memory only" if self.in_memory else str(self.path)

    @property
    def journal_path(self) -> Path | None:
        return None if self.in_memory else self.path / _JOURNAL

    @property
    def trace_path(self) -> Path | None:
        """Where traces of torch's profiler go."""
        return None if self.in_memory else self.path / "trace"

    def track(self, pid: int, role: str) -> None:
        """Note a worker in the lock file, so that it can be recognised if this process dies without a word."""
        self.workers[pid] = role
        self._write_lock()

    def untrack(self, pid: int) -> None:
        self.workers.pop(pid, None)
        self._write_lock()

    def release(self) -> None:
        """The session ended in good order: no lock is left."""
        if not self.in_memory:
            with contextlib.suppress(OSError):
                (self.path / LOCK).unlink(missing_ok=True)

    def discard(self) -> None:
        """The run came to nothing: its directory goes. What cannot be deleted stays, and harms nobody."""
        if not self.in_memory:
            shutil.rmtree(self.path, ignore_errors=True)

    def _write_lock(self) -> None:
        if self.in_memory:
            return
        body = {
            "host": socket.gethostname(),
            "boot": _boot_id(),
            "app": stamp(os.getpid(), "app"),
            "workers": [stamp(pid, role) for pid, role in self.workers.items()],
        }
        # A lock that cannot be written only costs the recognition of leftovers; the journal tells about the disk.
        with contextlib.suppress(OSError):
            _write_atomic(self.path / LOCK, body)


@dataclass(frozen=True)
class Leftover:
    """A worker of an earlier session whose app is gone. Offered to the person, never ended unasked."""

    run_id: str
    role: str
    pid: int
    start_ticks: int
    memory_bytes: int | None = None

    @property
    def text(self) -> str:
        memory = f", holding {self.memory_bytes / 2**30:.1f} GiB" if self.memory_bytes else ""
        return f"{self.role} worker {self.pid} of run {self.run_id} is still alive without its app{memory}"


def new_run(
    parent: Path | None = None,
    argv: Sequence[str] = (),
    *,
    seed: int = 0,
    extra: dict[str, Any] | None = None,
    in_memory: bool = False,
) -> Run:
    """Make ``<parent>/<utc>-<4hex>/`` with its meta.json. ``parent`` defaults to the runs directory. With
    ``in_memory`` nothing is made, because nobody wants it to be.

    A place that cannot be written degrades to a temporary directory, and that to memory; ``Run.text`` says so.
    """
    now = datetime.now(UTC)
    run_id = f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
    meta = {**_meta(run_id, now, argv, seed), **(extra or {})}
    wanted = (parent or locations.runs_dir()) / run_id
    if in_memory:
        return Run(run_id, wanted, meta, in_memory=True)
    error = _make(wanted, meta)
    if error is None:
        return Run(run_id, wanted, meta)
    try:
        spare = Path(tempfile.mkdtemp(prefix="pdq-tui-")) / run_id
    except OSError:
        spare_error: str | None = "no temporary directory either"
    else:
        spare_error = _make(spare, meta)
        if spare_error is None:
            text = f"{wanted.parent} cannot be written ({error}): this run is kept in {spare}"
            return Run(run_id, spare, meta, text)
    text = f"{wanted.parent} cannot be written ({error}): this run is kept in memory only"
    return Run(run_id, wanted, meta, text, in_memory=True)


def _make(path: Path, meta: dict[str, Any]) -> str | None:
    """None, or why the directory could not be made."""
    try:
        path.mkdir(parents=True)
        _write_atomic(path / "meta.json", meta)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _write_atomic(path: Path, body: dict[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def _meta(run_id: str, now: datetime, argv: Sequence[str], seed: int) -> dict[str, Any]:
    return {
        "schema": META_SCHEMA,
        "id": run_id,
        "started": now.isoformat(timespec="seconds"),
        # The two clocks at one moment: events carry the monotonic one.
        "wall_ns": time.time_ns(),
        "monotonic_ns": time.monotonic_ns(),
        "tool": {"name": "pdq-tui", "version": _version("pdq-tui")},
        "argv": list(argv),
        "seed": seed,
        "host": host_facts(),
        "libraries": {name: _version(name) for name in LIBRARIES},
    }


def host_facts() -> dict[str, Any]:
    """CPU name, threads this process may use, memory in bytes, kernel, Python."""
    return {
        "cpu": _cpu_name(),
        "threads": len(os.sched_getaffinity(0)),
        "threads_total": os.cpu_count(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": _system(),
        "python": platform.python_version(),
    }


def _system() -> str:
    """What ``platform.platform()`` says on Linux; that starts a process (uname -p) while the first screen waits."""
    name = os.uname()
    return f"{name.sysname}-{name.release}-{name.machine}-with-{''.join(platform.libc_ver())}"


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- leftovers ---------------------------------------------------------------------------------------------------------


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _start_ticks(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot (proc(5), field 22); None if there is no such process
    or it is a zombie. Together with the boot id it tells a recycled pid from the one that was meant."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def stamp(pid: int, role: str) -> dict[str, Any]:
    """What tells this process from a later one of the same number: see ``alive``."""
    return {"role": role, "pid": pid, "start_ticks": _start_ticks(pid)}


def alive(stamp: Any) -> bool:
    """Whether the process that ``stamp`` was made of is still there."""
    return (
        isinstance(stamp, dict)
        and isinstance(stamp.get("pid"), int)
        and stamp.get("start_ticks") is not None
        and _start_ticks(stamp["pid"]) == stamp["start_ticks"]
    )


def cut_short(parents: Iterable[Path]) -> list[Path]:
    """Directories of runs on this machine whose app was killed and that hold measurements in no snapshot: their locks are
    still there. To be called before ``leftovers``, which clears those locks away."""
    found: list[Path] = []
    for parent in parents:
        for lock in sorted(parent.glob(f"*/{LOCK}")):
            body = _read_lock(lock)
            if body is None or (body.get("boot") == _boot_id() and alive(body.get("app"))):
                continue
            place = lock.parent
            if not any(place.glob("snapshots/*/manifest.json")) and _measured(place / _JOURNAL):
                found.append(place)
    return found


def _measured(journal: Path) -> bool:
    """Whether a request is among what ``journal`` begins with."""
    try:
        with journal.open("rb") as file:
            return _REQUEST in file.read(_LOOK_BYTES)
    except OSError:
        return False


def _read_lock(lock: Path) -> dict[str, Any] | None:
    """A lock of this machine's; None for one of another and for what cannot be read."""
    try:
        body = json.loads(lock.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) and body.get("host") == socket.gethostname() else None


def leftovers(parents: Iterable[Path] | None = None, *, clear: bool = True) -> list[Leftover]:
    """Workers of earlier sessions that outlived their app on this machine. Locks whose processes are all gone are
    cleared away, unless ``clear`` is False: ``cut_short`` goes by them; those of other machines (a shared home) and of living apps are left alone."""
    found: list[Leftover] = []
    for parent in parents or (locations.runs_dir(),):
        for lock in sorted(parent.glob(f"*/{LOCK}")):
            body = _read_lock(lock)
            if body is None:
                continue
            same_boot = body.get("boot") == _boot_id()
            if same_boot and alive(body.get("app")):
                continue
            workers = [w for w in body.get("workers", []) if same_boot and alive(w)]
            for worker in workers:
                found.append(
                    Leftover(
                        lock.parent.name,
                        str(worker.get("role", "")),
                        worker["pid"],
                        worker["start_ticks"],
                        _rss(worker["pid"]),
                    )
                )
            if clear and not workers:
                with contextlib.suppress(OSError):
                    lock.unlink()
    return found


def _rss(pid: int) -> int | None:
    import psutil  # only where something was left behind; the first screen waits for every import

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def end_leftover(leftover: Leftover, timeout_s: float = 2.0) -> None:
    """End one leftover that the person agreed to end: this process alone, and only if it is still the one that was
    recognised. Raises PdqError where it may not be ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _start_ticks(leftover.pid) != leftover.start_ticks:
            return
        try:
            os.kill(leftover.pid, number)
            os.kill(leftover.pid, signal.SIGCONT)
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise PdqError(
                f"worker {leftover.pid} of run {leftover.run_id} belongs to another user"
            ) from error
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if _start_ticks(leftover.pid) != leftover.start_ticks:
                return
            time.sleep(0.02)
    raise PdqError(
        f"worker {leftover.pid} of run {leftover.run_id} does not end", "it may hang in the driver"
    )
