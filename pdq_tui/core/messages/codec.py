"""Messages as lines: one JSON object each, and the only boundary where non-finite numbers become null with a reason and
broken text is replaced."""

from __future__ import annotations

import functools
import math
import time
from typing import Any, Final

import msgspec

from pdq_tui.core.messages.base import VERSION, Message
from pdq_tui.core.messages.commands import Command
from pdq_tui.core.messages.energy import EnergyWindow
from pdq_tui.core.messages.events import (
    Answered,
    ArmReady,
    ArmRefused,
    ArmSwitched,
    Canary,
    Dropped,
    Failure,
    Hello,
    KernelsTimed,
    LmEvaluated,
    ModelReady,
    Note,
    Pong,
    Progress,
    Request,
    RunEnded,
    RunStarted,
    Scored,
    Served,
    ServeEnded,
    StageSample,
    TaskEnded,
    TuneStarted,
    WorkloadReady,
    WorkloadRefused,
)
from pdq_tui.core.messages.guards import Guarded, GuardTripped
from pdq_tui.core.messages.own import SnapshotSaved, WorkerExited, WorkerStarted
from pdq_tui.core.messages.profiles import Traced
from pdq_tui.core.messages.readings import SensorSample, SensorState
from pdq_tui.errors import PdqError

Event = (
    Hello
    | Progress
    | TaskEnded
    | ModelReady
    | ArmReady
    | ArmRefused
    | WorkloadReady
    | WorkloadRefused
    | RunStarted
    | ArmSwitched
    | StageSample
    | Request
    | Scored
    | Answered
    | LmEvaluated
    | TuneStarted
    | KernelsTimed
    | Traced
    | EnergyWindow
    | Served
    | ServeEnded
    | Canary
    | Guarded
    | GuardTripped
    | RunEnded
    | Note
    | Failure
    | Dropped
    | Pong
    | SensorState
    | SensorSample
    | WorkerStarted
    | WorkerExited
    | SnapshotSaved
)

#: May be dropped (and counted) when the reader is slow. Everything else is never dropped.
DROPPABLE: Final = (Progress, StageSample, SensorSample)


class ProtocolError(PdqError):
    """A line that is not of this protocol's version, or not a message at all."""


class VersionError(ProtocolError):
    """A message of another protocol version: nothing that follows can be trusted."""


class UnknownTypeError(PdqError):
    """A message of a type that this version does not know: to be counted and skipped."""


_encoder = msgspec.json.Encoder()


class _Head(msgspec.Struct):
    v: int = 0
    type: str = ""


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Made when the first line comes: the app's first screen does not wait for the types of every message."""
    return msgspec.json.Decoder(kind)


def encode(message: Message) -> bytes:
    """One line, newline included, stamped with the time if it has none. Floats that are not finite become null (in a
    list: are left out) and the field's name is listed in ``nonfinite_fields``; text that is not UTF-8 encodable is
    replaced."""
    if not message.t_ns:
        message.t_ns = time.monotonic_ns()
    lost: list[str] = []
    body = _clean(msgspec.to_builtins(message), "", lost)
    if lost:
        body["nonfinite_fields"] = lost
    return _encoder.encode(body) + b"\n"


def _clean(value: Any, path: str, lost: list[str]) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        lost.append(path)
        return None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {
            _clean(k, path, lost): _clean(v, f"{path}.{k}" if path else str(k), lost)
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        before = len(lost)
        cleaned = [_clean(v, f"{path}[{i}]", lost) for i, v in enumerate(value)]
        # Readers of a list of numbers expect numbers: what is not one is left out, and named.
        return [v for v in cleaned if v is not None] if len(lost) > before and None in cleaned else cleaned
    return value


def decode_command(line: bytes) -> Any:
    """Raises ProtocolError or UnknownTypeError."""
    return _decode(line, _decoder(Command))


def decode_event(line: bytes) -> Any:
    """Raises ProtocolError or UnknownTypeError."""
    return _decode(line, _decoder(Event))


def _decode(line: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        message = decoder.decode(line)
        if message.v == VERSION:
            return message
        error: Exception = ValueError("version")
    except (msgspec.DecodeError, UnicodeDecodeError) as raised:
        error = raised
    try:
        head = _decoder(_Head).decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ProtocolError(f"not a message: {line[:80]!r}") from error
    if not head.type:
        raise ProtocolError(f"not a message: {line[:80]!r}") from error
    if head.v != VERSION:
        raise VersionError(
            f"this line speaks protocol version {head.v}, this program version {VERSION}",
            "use the same pdq-tui version for the run and for reading it",
        ) from error
    if "Invalid value" in str(error) and "`$.type`" in str(error):
        raise UnknownTypeError(f"unknown message type {head.type!r}") from error
    raise ProtocolError(f"malformed {head.type!r} message: {error}") from error
