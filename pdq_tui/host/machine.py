"""This machine as the engine sees it, without an engine: a child imports torch, looks, says it in JSON and ends."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import msgspec

from pdq_tui import locations
from pdq_tui.core.kernels import Capability, KernelTable, load_kernels
from pdq_tui.core.messages.facts import DeviceInfo
from pdq_tui.core.tuned import InUse, in_use
from pdq_tui.errors import PdqError
from pdq_tui.host.process import worker_environment

TIMEOUT_S: Final = 180.0

#: Its output is the JSON of a _Said.
_LOOK: Final = """
import json, os, sys
out = os.dup(1); os.dup2(2, 1)
import msgspec
from pathlib import Path
from pdq_tui.core.kernels import load_kernels
from pdq_tui.engine import native, peaks, tune
from pdq_tui.engine.device import open_device
from pdq_tui.engine.kernels import capability
from pdq_tui.errors import PdqError
kind, threads, built, cache = sys.argv[1:]
try:
    device = open_device(kind, None, int(threads) if threads else None)
    info = device.info()
    native_kernels = native.built(Path(built)) if built else None
    own = native_kernels if info.kind == "cpu" else None
    machine = {
        "info": msgspec.to_builtins(info),
        "capability": msgspec.to_builtins(capability(device, buildable=bool(built))),
        "stamp": tune.stamp(info, load_kernels(device.kind), native_kernels),
        "peaks": peaks.told(info, Path(cache), own),
    }
    body = {"machine": machine}
except PdqError as error:
    body = {"error": error.message, "hint": error.hint}
os.write(out, json.dumps(body).encode())
"""


class MeasuredPeaks(msgspec.Struct, frozen=True):
    """What was measured of a device before, and is kept. GB/s and TFLOP/s; None where there is none.
    ``words``: how old and how sure it is."""

    read_gbps: float | None
    read_method: str
    copy_gbps: float | None
    compute_tflops: dict[str, float]
    words: str = ""
    warning: str | None = None


class Machine(msgspec.Struct, frozen=True):
    """``stamp``: what times of kernels depend on here, by ``core.tuned.STAMP``. ``peaks`` None: not measured yet."""

    info: DeviceInfo
    capability: Capability
    stamp: dict[str, str]
    peaks: MeasuredPeaks | None = None

    def kernels(self, tuned: str = "auto") -> tuple[KernelTable, InUse]:
        """The kernel table as the engine takes it here: what `tune` measured on this machine first (``tuned``: the
        setting engine.tuned), and whether there is such. Raises UsageError for a damaged kernel table."""
        found = in_use(self.info.kind, self.stamp, wanted=tuned)
        return msgspec.structs.replace(load_kernels(self.info.kind), tuned=found.table), found


class _Said(msgspec.Struct, frozen=True):
    machine: Machine | None = None
    error: str = ""
    hint: str | None = None


def look(device: str = "auto", threads: int | None = None, kernels: str = "auto") -> Machine:
    """Some seconds: torch is imported. ``kernels``: the setting engine.kernels. Raises PdqError where there is no such
    device, where the engine cannot be imported, or where nothing is said in TIMEOUT_S."""
    cache = locations.cache_dir()
    own = str(cache / "native") if kernels == "auto" else ""
    words = [sys.executable, "-P", "-c", _LOOK, device, str(threads or ""), own, str(cache)]
    try:
        child = subprocess.run(
            words,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=worker_environment(),
            timeout=TIMEOUT_S,
        )
        found = msgspec.json.decode(child.stdout, type=_Said)
    except subprocess.TimeoutExpired as error:
        raise PdqError(
            f"torch was not there after {TIMEOUT_S:.0f} s", "the disk or the driver may hang"
        ) from error
    except msgspec.DecodeError as error:  # no JSON: what the child printed last says why
        last = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        text = f"the engine cannot be imported (exit {child.returncode}): {''.join(last)}"
        raise PdqError(text, "install pdq-tui again (make run)") from error
    if found.machine is None:
        raise PdqError(found.error, found.hint)
    return found.machine
