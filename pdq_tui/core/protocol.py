"""The messages between the app's process and its workers, and the journal's lines: JSON, one message a line.

Each line carries ``v`` (protocol version), ``type`` and ``t_ns`` (CLOCK_MONOTONIC of the sender, one clock on one
machine). Readers tolerate unknown fields, count and skip unknown types, and refuse a wrong version with a sentence.
This module is the only boundary where non-finite numbers become null with a reason and broken text is replaced.

Units are in the names: _ms, _s, _ns, _bytes, _w (watt), _j (joule), _c (Celsius), _mhz; fractions are 0..1.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any, Final

import msgspec

from pdq_tui.core.policy import Policy
from pdq_tui.core.workload import Workload
from pdq_tui.errors import PdqError

VERSION: Final = 1


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


class Message(msgspec.Struct, kw_only=True, tag_field="type", tag=_snake):
    v: int = VERSION
    t_ns: int = 0


# -- commands: app → worker ------------------------------------------------------------------------------------------


class Load(Message):
    """Load a model. ``model`` is a directory, a hub id, or "demo" with ``source`` the fetched GGUF's directory.

    ``layers``: "auto" runs decoder layers as the kernel table says (compiled where it can), "eager" never compiles.
    """

    model: str
    source: str | None = None
    cache_dir: str = ""
    device: str = "auto"
    gpu: str | None = None
    dtype: str | None = None
    threads: int | None = None
    weight_budget_bytes: int | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    attention: str = "pdq"
    layers: str = "auto"


class SetArm(Message):
    """Make ``arm`` ("A", "B", or a label of a headless run) follow ``policy``: pack what is missing, then be ready."""

    arm: str
    policy: Policy
    hard: bool = False


class SetWorkload(Message):
    workload: Workload


class StartLoop(Message):
    """Run the workload without end on ``arm``; with ``interleave`` on all ``arms`` in ABBA blocks."""

    arm: str
    arms: list[str]
    interleave: bool = False
    seed: int = 0


class SelectArm(Message):
    arm: str


class Interleave(Message):
    on: bool


class RunBlocks(Message):
    """A headless measurement: warm-up, then blocks until ``blocks`` are done or ``budget_s`` is used up.

    arms[0] is the reference and is also measured as a repeated control. ``min_seconds`` is the floor on measured time.
    ``solo`` adds, before the blocks, a pass of each arm with only its policy resident, for memory.
    """

    arms: list[str]
    blocks: int = 10
    min_seconds: float = 10.0
    budget_s: float | None = None
    warmup_steps: int = 10
    seed: int = 0
    solo: bool = True


class Stop(Message):
    """End the running loop or measurement at the next token; results so far stay."""


class CancelTask(Message):
    """Cancel loading, converting or packing. Answered by ``TaskEnded(cancelled=True)``."""


class Ping(Message):
    id: int = 0


class Shutdown(Message):
    pass


class Watch(Message):
    """To the sensors: follow this engine process and device. Joined by ``uuid`` or ``bus_id`` only."""

    pid: int | None = None
    uuid: str | None = None
    bus_id: str | None = None
    interval_s: float = 0.1


# -- facts that travel inside events -----------------------------------------------------------------------------------


class ModelInfo(msgspec.Struct, kw_only=True):
    id: str
    path: str = ""
    revision: str | None = None
    sha256: str | None = None
    family: str = ""
    parameters: int = 0
    layers: int = 0
    hidden: int = 0
    vocab: int = 0
    max_positions: int | None = None
    rotary: bool = True
    dtype: str = ""
    chat_template: bool = False
    tied_head: bool = False
    notes: list[str] = msgspec.field(default_factory=list)


class DeviceInfo(msgspec.Struct, kw_only=True):
    """``uuid`` and ``bus_id`` are None on CPU. ``memory_bytes`` is the device's (or the cgroup's / machine's) total."""

    kind: str
    name: str
    index: int | None = None
    uuid: str | None = None
    bus_id: str | None = None
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    threads: int = 1
    threads_reason: str = ""
    cpu: str = ""
    isa: list[str] = msgspec.field(default_factory=list)
    memory_method: str = ""
    last_level_cache_bytes: int | None = None
    read_peak_gbps: float | None = None
    read_peak_method: str = ""
    compute_peak_tflops: dict[str, float] = msgspec.field(default_factory=dict)


class LeftModule(msgspec.Struct, kw_only=True):
    module: str
    parameters: int
    bytes: int
    reason: str


class Coverage(msgspec.Struct, kw_only=True):
    """What one stage of a policy really converted. Parameters are weights of linear layers (and tied heads).

    runner         what runs the decoder layers: "inductor" (one compiled program) or "eager" (transformers' modules)
    runner_reason  why nothing better does; None where nothing better is known here
    """

    converted_parameters: int = 0
    total_parameters: int = 0
    converted_bytes: int = 0
    left_bytes: int = 0
    left: list[LeftModule] = msgspec.field(default_factory=list)
    formats: dict[str, int] = msgspec.field(default_factory=dict)
    kernels: dict[str, int] = msgspec.field(default_factory=dict)
    runner: str = "eager"
    runner_reason: str | None = None


class Fallback(msgspec.Struct, kw_only=True):
    stage: str
    module: str
    wanted: str
    used: str
    reason: str
    modules: int = 1


class WeightsInfo(msgspec.Struct, kw_only=True):
    """Bytes of one policy. ``extra_bytes`` = union of both stages' packed bytes minus the larger stage alone.

    ``kept_bytes`` stay in the model's dtype (embeddings, head, norms). ``bits_per_weight``: over converted parameters,
    by stage. ``session_resident_bytes``: everything the engine holds now, all arms.
    """

    stored_bytes: int = 0
    prefill_bytes: int = 0
    decode_bytes: int = 0
    shared_bytes: int = 0
    extra_bytes: int = 0
    kept_bytes: int = 0
    bits_per_weight: dict[str, float | None] = msgspec.field(default_factory=dict)
    session_resident_bytes: int = 0


class KvInfo(msgspec.Struct, kw_only=True):
    dtype: str = "bf16"
    bytes_per_token: int = 0
    allocated_bytes: int = 0
    capacity_tokens: int | None = None


# -- events: worker → app ----------------------------------------------------------------------------------------------


class Hello(Message):
    """First line of a worker. ``role`` is "engine" or "sensors"."""

    role: str
    pid: int
    python: str = ""
    libraries: dict[str, str] = msgspec.field(default_factory=dict)


class Progress(Message):
    """Droppable. ``total`` None: not known. ``task``: fetch, convert, load, pack, warmup, measure."""

    task: str
    label: str
    done: float
    total: float | None = None
    unit: str = ""


class TaskEnded(Message):
    task: str
    label: str
    ok: bool
    seconds: float
    cancelled: bool = False
    text: str = ""


class ModelReady(Message):
    """``attention``: the attention implementation that runs, None where the worker did not say."""

    model: ModelInfo
    device: DeviceInfo
    attention: str | None = None
    load_peak_bytes: int | None = None
    load_peak_reason: str | None = None


class ArmReady(Message):
    arm: str
    policy: Policy
    weights: WeightsInfo
    coverage: dict[str, Coverage]
    kv: KvInfo
    fallbacks: list[Fallback] = msgspec.field(default_factory=list)
    warnings: list[str] = msgspec.field(default_factory=list)
    seconds: float = 0.0
    resident: bool = False


class ArmRefused(Message):
    """The arm keeps what it had."""

    arm: str
    policy: str
    reason: str
    hint: str | None = None


class RefusedPrompt(msgspec.Struct):
    number: int
    reason: str


class WorkloadReady(Message):
    """``lengths``: token counts of the prompts that will run. ``refused``: 1-based numbers of those that will not."""

    workload: Workload
    prompts: int
    lengths: list[int]
    prompts_sha256: str
    chat_template_applied: bool
    refused: list[RefusedPrompt] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)


class WorkloadRefused(Message):
    reason: str
    hint: str | None = None


class RunStarted(Message):
    kind: str  # loop | blocks
    arms: list[str]
    interleave: bool
    seed: int = 0
    blocks: int | None = None


class ArmSwitched(Message):
    """The next request uses ``arm``. ``gap_ms``: end of the last request to the start of the next, when measured."""

    arm: str
    policy: str
    at_request: int


class StageSample(Message):
    """Droppable, live only: where the running request is. Sent at most 10 times a second, never inside a timed step."""

    request: int
    arm: str
    stage: str
    tokens: int
    itl_ms: float | None = None


class NonFinite(msgspec.Struct):
    """Where logits first held NaN or infinity: ``step`` 0 is prefill, n ≥ 1 the n-th decode step."""

    stage: str
    step: int


class Request(Message):
    """One request's record, sent after it ended; never dropped. Times are device times where the device has events.

    ttft_ms = queue + tokenize + prefill + (handoff where it delays the first token; here it does not, so it is apart).
    ``itl_ms`` holds every decode step; its sum is decode_ms. ``tpot_ms`` = decode_ms / (steps), null for N < 2.
    ``prefill_bound_ms`` and ``decode_bound_ms`` (mean per step) are the hardware limits of the operators that ran:
    sum of max(bytes / read peak, FLOPs / peak of the dtype), see ``core.roofline``; null without measured peaks.
    ``prompt_tokens`` are real tokens over the batch, ``padded_tokens`` the padding beside them.
    ``output_tokens`` are per row. ``peak_*`` are per-stage high-water marks by ``memory_method``.
    ``valid`` False with ``invalid_reason``: may be shown, never ranked.
    """

    request: int
    arm: str
    policy: str
    policy_digest: str
    kind: str  # loop | blocks | solo | warmup
    block: int | None = None
    slot: int | None = None
    control: bool = False
    warmup: bool = False
    first_use: bool = False
    prompt: int = 0
    batch: int = 1
    prompt_tokens: int = 0
    padded_tokens: int = 0
    output_tokens: list[int] = msgspec.field(default_factory=list)
    stop: str = "fixed"
    stop_reasons: list[str] = msgspec.field(default_factory=list)
    queue_ms: float = 0.0
    tokenize_ms: float = 0.0
    prefill_ms: float | None = None
    handoff_ms: float | None = None
    ttft_ms: float | None = None
    decode_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    itl_ms: list[float] = msgspec.field(default_factory=list)
    gap_ms: float | None = None
    bytes_per_step: int | None = None
    bytes_per_step_wasted: int | None = None
    prefill_flops: dict[str, float] = msgspec.field(default_factory=dict)
    prefill_bytes: int | None = None
    prefill_bound_ms: float | None = None
    decode_bound_ms: float | None = None
    kv_bytes: int | None = None
    prefill_peak_bytes: int | None = None
    decode_peak_bytes: int | None = None
    steady_bytes: int | None = None
    memory_method: str = ""
    eager_launch_bound: bool = False
    cancelled: bool = False
    valid: bool = True
    invalid_reason: str | None = None
    nonfinite: NonFinite | None = None
    text: str | None = None
    tokens_sha256: str | None = None
    host_start_ns: int = 0
    host_end_ns: int = 0


class RunEnded(Message):
    """``reason``: done, budget, stopped, failed."""

    reason: str
    requests: int
    blocks: int = 0


class Note(Message):
    """A sentence for the person. ``level``: info, warn, error."""

    level: str
    text: str
    hint: str | None = None


class Failure(Message):
    """``kind``: usage, model, oom, device, internal. After ``fatal`` the worker ends and is replaced.

    ``exit_code``: of the error behind it, where it was one for people (``errors.PdqError``).
    """

    kind: str
    message: str
    hint: str | None = None
    stage: str | None = None
    wanted_bytes: int | None = None
    free_bytes: int | None = None
    fatal: bool = False
    detail: str = ""
    exit_code: int | None = None


class Dropped(Message):
    """How many droppable messages this worker has dropped so far because nobody read fast enough.

    ``role`` is filled in by the host.
    """

    count: int
    role: str = "engine"


class Pong(Message):
    id: int = 0


# -- sensors -----------------------------------------------------------------------------------------------------------


class GpuSample(msgspec.Struct, kw_only=True):
    """One GPU now. Every field alone: None with an entry in ``missing`` (field → reason)."""

    index: int
    name: str | None = None
    uuid: str | None = None
    bus_id: str | None = None
    mig: bool = False
    engine: bool = False
    gpu_util: float | None = None
    memory_util: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    memory_version: str | None = None
    unified: bool = False
    process_memory_bytes: int | None = None
    other_processes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    throttle: list[str] | None = None
    throttle_raw: int | None = None
    missing: dict[str, str] = msgspec.field(default_factory=dict)


class CpuSample(msgspec.Struct, kw_only=True):
    load: float | None = None
    engine_load: float | None = None
    engine_rss_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    mhz: float | None = None
    temperature_c: float | None = None
    missing: dict[str, str] = msgspec.field(default_factory=dict)


class SensorState(Message):
    """Sent at start and when it changes. ``nvml``: ok, absent, driver-not-loaded, version-mismatch, error.

    ``engine_gpu``: index of the GPU that is the engine's device, None with ``engine_gpu_reason``.
    """

    nvml: str
    text: str
    hint: str | None = None
    driver: str | None = None
    gpus: int = 0
    engine_gpu: int | None = None
    engine_gpu_reason: str | None = None


class SensorSample(Message):
    """Droppable on screen, journaled."""

    gpus: list[GpuSample] = msgspec.field(default_factory=list)
    cpu: CpuSample = msgspec.field(default_factory=CpuSample)


# -- host: written into the journal by the app's own process -------------------------------------------------------------


class WorkerStarted(Message):
    role: str
    pid: int
    restart: int = 0


class WorkerExited(Message):
    """``text`` is the sentence for the person; ``expected`` is True after Shutdown; ``replaced`` is True when a new
    worker takes its place without being asked."""

    role: str
    pid: int
    returncode: int | None
    expected: bool
    text: str
    tail: str = ""
    replaced: bool = False


class SnapshotSaved(Message):
    arm: str
    name: str
    path: str
    note: str = ""


Command = (
    Load
    | SetArm
    | SetWorkload
    | StartLoop
    | SelectArm
    | Interleave
    | RunBlocks
    | Stop
    | CancelTask
    | Ping
    | Shutdown
    | Watch
)
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
