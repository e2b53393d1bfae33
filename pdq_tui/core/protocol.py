"""The messages between the app's process and its workers, and the journal's lines: JSON, one message a line.

Each line carries ``v`` (protocol version), ``type`` and ``t_ns`` (CLOCK_MONOTONIC of the sender, one clock on one
machine). Readers tolerate unknown fields, count and skip unknown types, and refuse a wrong version with a sentence.
The messages are in ``core.messages``, by who sends them; this is where others import them from.

Units are in the names: _ms, _s, _ns, _bytes, _w (watt), _j (joule), _c (Celsius), _mhz; fractions are 0..1.
"""

from __future__ import annotations

from pdq_tui.core.messages.base import VERSION, Message
from pdq_tui.core.messages.codec import (
    DROPPABLE,
    Event,
    ProtocolError,
    UnknownTypeError,
    VersionError,
    decode_command,
    decode_event,
    encode,
)
from pdq_tui.core.messages.commands import (
    CancelTask,
    Command,
    Interleave,
    Load,
    Ping,
    RunBlocks,
    SelectArm,
    SetArm,
    SetWorkload,
    Shutdown,
    StartLoop,
    Stop,
    Watch,
)
from pdq_tui.core.messages.events import (
    ArmReady,
    ArmRefused,
    ArmSwitched,
    Dropped,
    Failure,
    Hello,
    ModelReady,
    NonFinite,
    Note,
    Pong,
    Progress,
    RefusedPrompt,
    Request,
    RunEnded,
    RunStarted,
    StageSample,
    TaskEnded,
    WorkloadReady,
    WorkloadRefused,
)
from pdq_tui.core.messages.facts import (
    Coverage,
    DeviceInfo,
    Fallback,
    KvInfo,
    LeftModule,
    ModelInfo,
    WeightsInfo,
)
from pdq_tui.core.messages.own import SnapshotSaved, WorkerExited, WorkerStarted
from pdq_tui.core.messages.readings import CpuSample, GpuSample, SensorSample, SensorState

__all__ = [
    "DROPPABLE",
    "VERSION",
    "ArmReady",
    "ArmRefused",
    "ArmSwitched",
    "CancelTask",
    "Command",
    "Coverage",
    "CpuSample",
    "DeviceInfo",
    "Dropped",
    "Event",
    "Failure",
    "Fallback",
    "GpuSample",
    "Hello",
    "Interleave",
    "KvInfo",
    "LeftModule",
    "Load",
    "Message",
    "ModelInfo",
    "ModelReady",
    "NonFinite",
    "Note",
    "Ping",
    "Pong",
    "Progress",
    "ProtocolError",
    "RefusedPrompt",
    "Request",
    "RunBlocks",
    "RunEnded",
    "RunStarted",
    "SelectArm",
    "SensorSample",
    "SensorState",
    "SetArm",
    "SetWorkload",
    "Shutdown",
    "SnapshotSaved",
    "StageSample",
    "StartLoop",
    "Stop",
    "TaskEnded",
    "UnknownTypeError",
    "VersionError",
    "Watch",
    "WeightsInfo",
    "WorkerExited",
    "WorkerStarted",
    "WorkloadReady",
    "WorkloadRefused",
    "decode_command",
    "decode_event",
    "encode",
]
