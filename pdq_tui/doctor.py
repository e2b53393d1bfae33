"""What this machine can do for pdq-tui, line by line: ok, warn or fail, and what to do about it.

Fail means that the program cannot do its work here; warn, that something is missing and the rest goes on. Nothing
heavy is imported here: what torch knows is asked in a child process, what the sensors know in theirs.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from pdq_tui import locations
from pdq_tui.core.catalog import policies
from pdq_tui.core.datasheet import data_sheet
from pdq_tui.core.formats import default_of, formats
from pdq_tui.core.kernels import Capability, KernelTable
from pdq_tui.core.metrics import counted
from pdq_tui.core.protocol import (
    ProtocolError,
    SensorSample,
    SensorState,
    Shutdown,
    UnknownTypeError,
    decode_event,
    encode,
)
from pdq_tui.errors import PdqError
from pdq_tui.host import demo
from pdq_tui.host.machine import MeasuredPeaks, look
from pdq_tui.host.process import worker_environment
from pdq_tui.host.runs import leftovers
from pdq_tui.host.supervisor import SENSORS_ARGV

Status = Literal["ok", "warn", "fail"]

NEEDED: Final = ("torch", "transformers", "safetensors", "textual", "polars", "msgspec", "psutil")
USEFUL: Final = {
    "accelerate": "some models need it to load",
    "gguf": "GGUF files, the demo model's among them, need it",
    "nvidia-ml-py": "without it there are no GPU sensors",
}
SENSORS_TIMEOUT_S: Final = 6.0
#: A demo model, converted, and a run: less than this is worth a word.
FREE_BYTES: Final = 1_000_000_000
_FORMATS: Final = tuple(fmt for fmt in formats() if not fmt.dense or fmt == default_of("bf16"))


class Check(msgspec.Struct, frozen=True):
    """One line. ``advice`` is None where there is nothing to do."""

    group: str
    status: Status
    text: str
    advice: str | None = None


class Engine(msgspec.Struct, frozen=True):
    """What the settings say about the engine: CPU threads, own kernels (auto, torch), tuned kernel tables (auto, off)."""

    threads: int | None = None
    kernels: str = "auto"
    tuned: str = "auto"


def examine(device: str = "auto", settings: Engine | None = None) -> Iterator[Check]:
    """All checks, each as soon as it is known; the first seconds go to importing torch in a child."""
    yield from versions()
    yield from paths()
    yield from policy_files()
    yield from terminal(os.environ, sys.stdout.isatty(), sys.stdout.encoding)
    yield from left_behind()
    yield from sensors()
    yield from engine(device, settings or Engine())


def versions() -> Iterator[Check]:
    yield Check("versions", "ok", f"Python {platform.python_version()} on {platform.platform()}")
    for name in NEEDED:
        found = _version(name)
        if found is None:
            yield Check("versions", "fail", f"{name} is not installed", "install pdq-tui again (make run)")
        else:
            yield Check("versions", "ok", f"{name} {found}")
    for name, why in USEFUL.items():
        found = _version(name)
        if found is None:
            yield Check("versions", "warn", f"{name} is not installed: {why}", f"pip install {name}")
        else:
            yield Check("versions", "ok", f"{name} {found}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def paths() -> Iterator[Check]:
    """Whether what must be written can be, without leaving anything behind."""
    for name, path in (
        ("settings", locations.config_dir()),
        ("runs", locations.runs_dir()),
        ("cache", locations.cache_dir()),
    ):
        there = next(p for p in (path, *path.parents) if p.exists())
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            advice = "results are kept in memory and a temporary directory: set PDQ_HOME, or give --dir"
            yield Check("paths", "warn", f"{name}: {path} cannot be written: {error.strerror}", advice)
            continue
        free = shutil.disk_usage(there).free
        if free < FREE_BYTES:
            text = f"{name}: {path} has {free / 1e6:.0f} MB free"
            yield Check("paths", "warn", text, "make room, or set PDQ_HOME to another disk")
        else:
            yield Check("paths", "ok", f"{name}: {path}, {free / 1e9:.0f} GB free")
    if demo.fetched():
        yield Check("paths", "ok", f"demo model: {demo.model_dir()}")
    else:
        yield Check("paths", "ok", "demo model: not fetched yet (93 MB by pip, when it is first asked for)")


def policy_files() -> Iterator[Check]:
    entries = policies()
    for entry in entries.values():
        if entry.error is not None:
            yield Check("policies", "warn", f"{entry.name} is damaged: {entry.error}", "correct the file")
    good = sum(entry.policy is not None for entry in entries.values())
    if good:
        yield Check("policies", "ok", f"{good} policies")
    else:
        yield Check("policies", "fail", "there is not one policy", "install pdq-tui again")


def terminal(environment: Mapping[str, str], is_terminal: bool, encoding: str | None) -> Iterator[Check]:
    term = environment.get("TERM", "")
    if not is_terminal:
        yield Check("terminal", "ok", "stdout is no terminal: the app needs one, `pdq-tui run` does not")
        return
    if term in ("", "dumb", "unknown"):
        yield Check(
            "terminal", "warn", f"TERM={term}: the app cannot draw here", "use `pdq-tui run`, or set TERM"
        )
        return
    size = shutil.get_terminal_size()
    if size.columns < 60 or size.lines < 20:
        yield Check(
            "terminal", "warn", f"{size.columns}x{size.lines} is too small", "at least 60x20, best 120x36"
        )
    else:
        yield Check("terminal", "ok", f"TERM={term}, {size.columns}x{size.lines}")
    if "utf" in (encoding or "").lower():
        yield Check("terminal", "ok", f"encoding {encoding}")
    else:
        yield Check("terminal", "warn", f"encoding {encoding}: drawn in ASCII", "set LANG to a UTF-8 locale")
    if environment.get("COLORTERM") in ("truecolor", "24bit"):
        yield Check("terminal", "ok", "24-bit colour")
    else:
        yield Check(
            "terminal", "ok", "no 24-bit colour announced (COLORTERM): the terminal's own palette is used"
        )


def left_behind() -> Iterator[Check]:
    for leftover in leftovers(clear=False):  # what the next start tells of a killed run goes by its lock
        yield Check("workers", "warn", leftover.text, f"end it with: kill {leftover.pid}")


def sensors() -> Iterator[Check]:
    """Start the sensors' process, and read what it says first."""
    try:
        state, sample = _ask_sensors()
    except OSError as error:
        yield Check("sensors", "fail", f"the sensors' process cannot be started: {error}")
        return
    if state is None:
        yield Check(
            "sensors",
            "warn",
            f"no answer within {SENSORS_TIMEOUT_S:.0f} s",
            "the driver may hang: try nvidia-smi; measuring goes on without sensors",
        )
    else:
        status: Status = "ok" if state.nvml in ("ok", "absent") else "warn"
        yield Check("sensors", status, state.text or f"NVML: {state.nvml}, {state.gpus} GPUs", state.hint)
    for gpu in sample.gpus if sample is not None else ():
        missing = ", ".join(f"{name} ({why})" for name, why in gpu.missing.items())
        text = f"GPU {gpu.index} {gpu.name or ''}".rstrip()
        yield Check(
            "sensors", "ok", f"{text}: {'all fields' if not missing else 'not available: ' + missing}"
        )
    if state is not None and state.gpus > 1:
        yield Check(
            "GPUs",
            "ok",
            f"{state.gpus}: --gpu INDEX or UUID takes one, --gpu 0,1 or all lays one model's layers over several (no verdict)",
        )


def _ask_sensors() -> tuple[SensorState | None, SensorSample | None]:
    state: SensorState | None = None
    sample: SensorSample | None = None
    process = subprocess.Popen(
        SENSORS_ARGV,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=worker_environment(),
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        end = time.monotonic() + SENSORS_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            rest = b""
            while (state is None or sample is None) and time.monotonic() < end:
                if not selector.select(timeout=0.2):
                    continue
                chunk = os.read(process.stdout.fileno(), 65536)
                if not chunk:
                    break
                *found, rest = (rest + chunk).split(b"\n")
                for line in found:
                    event = _decoded(line)
                    state = event if isinstance(event, SensorState) else state
                    sample = event if isinstance(event, SensorSample) else sample
        process.stdin.write(encode(Shutdown()))
        process.stdin.close()
    except BrokenPipeError:
        pass  # it has ended already; what it said counts
    finally:
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
    return state, sample


def _decoded(line: bytes) -> Any:
    try:
        return decode_event(line)
    except (ProtocolError, UnknownTypeError):
        return None


def engine(device: str, settings: Engine) -> Iterator[Check]:
    """torch's view of the device, and which kernels fit each format there."""
    try:
        here = look(device, settings.threads, settings.kernels)
    except PdqError as error:
        yield Check("engine", "fail", error.message, error.hint)
        return
    info = here.info
    memory = f", {info.memory_bytes / 2**30:.1f} GiB" if info.memory_bytes else ""
    threads = f", {counted(info.threads, 'thread')} ({info.threads_reason})" if info.kind == "cpu" else ""
    yield Check("engine", "ok", f"device {info.kind}: {info.name}{memory}{threads}")
    if info.kind == "cpu" and info.cpu and info.cpu != info.name:
        yield Check("engine", "ok", f"CPU {info.cpu}")
    yield from peaks(info.name, here.peaks)
    try:
        table, tuned = here.kernels(settings.tuned)
    except PdqError as error:
        yield Check("kernels", "fail", error.message, error.hint)
        return
    yield from kernels(table, here.capability)
    yield Check("kernels", "warn" if tuned.level == "warn" else "ok", tuned.text, tuned.hint)


def peaks(name: str, found: MeasuredPeaks | None) -> Iterator[Check]:
    """What was measured of this device, beside what its data sheet promises."""
    if found is None:
        yield Check("peaks", "ok", "not measured yet: the first model that is loaded does, in 2 to 4 s")
    else:
        reads = f"reads {found.read_gbps:.4g} GB/s ({found.read_method})" if found.read_gbps else "reads n/a"
        copies = f"copies {found.copy_gbps:.4g} GB/s" if found.copy_gbps else "copies n/a"
        rates = ", ".join(f"{d} {t:.3g}" for d, t in sorted(found.compute_tflops.items()))
        yield Check("peaks", "ok", f"measured: {reads}, {copies}; TFLOP/s: {rates or 'n/a'}")
        if found.warning is not None:
            yield Check(
                "peaks", "warn", f"{found.words}: {found.warning}", "load a model while nothing else runs"
            )
        elif found.words:
            yield Check("peaks", "ok", found.words)
    sheet = data_sheet(name)
    if sheet is None:
        yield Check("peaks", "ok", f"no data sheet of {name} is known here")
        return
    rates = ", ".join(f"{d} {t:.4g}" for d, t in sorted(sheet.compute_tflops.items()))
    share = f" ({found.read_gbps / sheet.read_gbps:.0%} of it read)" if found and found.read_gbps else ""
    yield Check(
        "peaks", "ok", f"data sheet of {sheet.board}: {sheet.read_gbps:.0f} GB/s{share}; TFLOP/s: {rates}"
    )


def kernels(table: KernelTable, capability: Capability, dtype: str = "bf16") -> Iterator[Check]:
    """Per format, the kernels whose limits this device meets, best ranked first, and those that were measured fastest here;
    layers have limits of their own."""
    has = ", ".join(capability.features) or "none of avx2, avx512, bf16, vnni, amx"
    if capability.kind == "cpu":
        yield Check("kernels", "ok", f"CPU arithmetic: {has}")
    for fmt in _FORMATS:
        fits = [c for c in table.of(fmt) if c.misfit(capability, dtype) is None]
        if fits:
            ranked = sorted(fits, key=lambda c: (c.rank, c.name))
            fastest = "" if table.tuned is None else table.tuned.words(fmt)
            measured = f"; measured here: {fastest}" if fastest else ""
            yield Check("kernels", "ok", f"{fmt.label}: {', '.join(c.name for c in ranked)}{measured}")
        else:
            reasons = {str(c.misfit(capability, dtype)) for c in table.of(fmt)} or {"no kernel is known"}
            yield Check(
                "kernels", "warn", f"{fmt.label}: {'; '.join(sorted(reasons))}", "use another format here"
            )
    if _version("pdq-tui") is not None and not locations.shipped("kernels_cfg").is_dir():
        yield Check(
            "kernels", "fail", f"{Path(locations.shipped('kernels_cfg'))} is missing", "install again"
        )
