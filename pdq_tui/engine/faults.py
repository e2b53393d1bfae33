"""What the device or the allocator raised, as a message for a person: out of memory, device error, or our own fault."""

from __future__ import annotations

import re
import traceback

import torch

from pdq_tui.core.protocol import Failure
from pdq_tui.engine.device import Device

_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_WANTED = re.compile(r"(?:tried to allocate|unable to mmap) ([\d.]+)\s*(bytes|[KMGT]iB)", re.IGNORECASE)
#: How a failed allocation reads where it is a plain RuntimeError.
_OOM = ("not enough memory", "can't allocate memory", "out of memory", "cannot allocate memory")
#: A thread needs a stack: this is a limit on memory as well, or one on their number.
_NO_THREAD = "can't start new thread"
#: oneDNN's words where it has no memory for its code, and where it cannot compute something at all: only with less than
#: this free is it the first.
_PRIMITIVE, _SCARCE_BYTES = "could not create a primitive", 64 << 20
_DEVICE = ("device-side assert", "cuda error", "cublas", "cudnn error", "illegal memory access")


def wanted_bytes(text: str) -> int | None:
    """The allocation that failed, from the allocator's words."""
    found = _WANTED.search(text)
    return int(float(found.group(1)) * _UNITS[found.group(2).lower()]) if found else None


def kind_of(error: BaseException, free_bytes: int | None = None) -> str:
    """oom, device or internal. ``free_bytes``: on the device now; None where that is not known."""
    text = str(error).lower()
    if _PRIMITIVE in text and free_bytes is not None and free_bytes < _SCARCE_BYTES:
        return "oom"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        word in text for word in (*_OOM, _NO_THREAD)
    ):
        return "oom"
    if isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and any(word in text for word in _DEVICE)
    ):
        return "device"
    return "internal"


def first_line(error: BaseException) -> str:
    """What an error says, for a sentence; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def failure(error: BaseException, stage: str | None, device: Device | None) -> Failure:
    """The failure's message. Memory and device errors are fatal: after them the process is replaced, never reused,
    since a caught one keeps tensors alive and a failed assertion poisons the device's context."""
    # Not asked of a device that may have failed: its answer would be another error.
    scarce = device.free_bytes() if device is not None and _PRIMITIVE in str(error) else None
    kind = kind_of(error, scarce)
    first = first_line(error)
    detail = "".join(traceback.format_exception(error))[-8000:]
    if kind == "oom":
        threads = _NO_THREAD in str(error)
        what = "no memory for another thread, or no leave," if threads else "out of memory"
        return Failure(
            kind=kind,
            message=f"{what} in {stage or 'the engine'}",
            hint=_hint(stage, threads),
            stage=stage,
            wanted_bytes=wanted_bytes(str(error)),
            free_bytes=device.free_bytes() if device is not None else None,
            fatal=True,
            detail=detail,
        )
    if kind == "device":
        return Failure(
            kind=kind,
            message=f"the device failed in {stage or 'the engine'}: {first}",
            stage=stage,
            fatal=True,
            detail=detail,
        )
    return Failure(
        kind=kind,
        message=f"the engine failed in {stage or 'its own code'}: {type(error).__name__}: {first}",
        stage=stage,
        fatal=True,
        detail=detail,
    )


def _hint(stage: str | None, threads: bool) -> str:
    if threads:
        return "look at the limits of this shell or container: ulimit -v, ulimit -u, pids.max, memory.max"
    if stage == "load":
        return "end what else takes memory here, raise the limit, or take a smaller model"
    return "take fewer or shorter prompts, a smaller policy, or one arm at a time"
