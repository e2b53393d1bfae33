"""Events: from the engine to the app."""

from __future__ import annotations

import msgspec

from pdq_tui.core.messages.base import Message
from pdq_tui.core.messages.facts import (
    CandidateTime,
    Coverage,
    DeviceInfo,
    Fallback,
    KvInfo,
    ModelInfo,
    WeightsInfo,
)
from pdq_tui.core.policy import Policy
from pdq_tui.core.workload import Workload


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
    """``attention``: the attention implementation that runs, None where the worker did not say. ``linears``: parameters of
    every linear layer by its dotted name, in the model's order, the head among them; what a policy's patterns name."""

    model: ModelInfo
    device: DeviceInfo
    attention: str | None = None
    load_peak_bytes: int | None = None
    load_peak_reason: str | None = None
    linears: dict[str, int] = msgspec.field(default_factory=dict)


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
    """The arm keeps what it had. ``exit_code``: of a command that cannot go on without the policy; None: 1."""

    arm: str
    policy: str
    reason: str
    hint: str | None = None
    exit_code: int | None = None


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

    ttft_ms = prefill_ms: prompts are tokenized beforehand and nothing queues, so queue_ms and tokenize_ms are None, not
    measured; the hand-off does not delay the first token and is apart.
    ``itl_ms`` holds every decode step; its sum is decode_ms. ``tpot_ms`` = decode_ms / (steps), null for N < 2.
    ``prefill_bound_ms`` and ``decode_bound_ms`` (mean per step) are the hardware limits of the operators that ran:
    sum of max(bytes / read peak, FLOPs / peak of the dtype), see ``core.roofline``; null without measured peaks.
    ``decode_flops`` are those of the mean step, as ``bytes_per_step`` are its bytes.
    ``prompt_tokens`` are real tokens over the batch, ``padded_tokens`` the padding beside them.
    ``prefill_pieces``: in how many passes the prompt went through the model.
    ``output_tokens`` are per row. ``peak_*`` are per-stage high-water marks by ``memory_method``.
    ``text`` and ``token_ids`` are the first row's answer; ``tokens_sha256`` is of all rows.
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
    queue_ms: float | None = None
    tokenize_ms: float | None = None
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
    decode_flops: dict[str, float] = msgspec.field(default_factory=dict)
    prefill_bytes: int | None = None
    prefill_pieces: int = 1
    prefill_bound_ms: float | None = None
    decode_bound_ms: float | None = None
    kv_bytes: int | None = None
    prefill_peak_bytes: int | None = None
    decode_peak_bytes: int | None = None
    steady_bytes: int | None = None
    memory_method: str = ""
    eager_launch_bound: bool = False
    devices: int = 1
    cancelled: bool = False
    valid: bool = True
    invalid_reason: str | None = None
    nonfinite: NonFinite | None = None
    text: str | None = None
    token_ids: list[int] = msgspec.field(default_factory=list)
    tokens_sha256: str | None = None
    host_start_ns: int = 0
    host_end_ns: int = 0


class Scored(Message):
    """One window of ``Score``: a value a compared position, never dropped. Nats; full vocabulary.

    first      where the first value stands: the position in the window, or the decode step (1: the second token).
    kld        Σ p_base · ln(p_base / p_arm); null where either side's logits are not finite.
    same_top1  whether both have the same argmax.
    nll        −ln p of the next (or forced) token, of the arm and of the base; null likewise.
    text_sha256  of the window's token ids, 12 hex digits; "" in journals of earlier versions.
    """

    arm: str
    base: str
    policy: str
    policy_digest: str
    path: str
    forced: str
    window: int
    first: int
    kld: list[float | None]
    same_top1: list[bool]
    nll: list[float | None]
    base_nll: list[float | None]
    text_sha256: str = ""


class LmEvaluated(Message):
    """One of lm-eval's tasks on one arm; never dropped. metrics, stderr: lm-eval's own figures by name; values: of each
    document, in the documents' order, for the metrics that are one number a document."""

    arm: str
    policy: str
    policy_digest: str
    task: str
    version: str
    documents: int
    metrics: dict[str, float | None]
    stderr: dict[str, float | None]
    values: dict[str, list[float]]
    higher_is_better: dict[str, bool]


class Answered(Message):
    """How one ``Question`` ended; never dropped. A value a prompt, in their order, where there is one.

    state    "done", "refused" (before anything ran), "cancelled", "not finite" (logits with NaN or infinity).
    reason   why it is not "done".
    tokens   ids that were made, EOS included where it ended an answer. ``texts``: decoded without special tokens.
    highest  the largest logit that chose a token; None where none was chosen.
    ttft_ms, tpot_ms  of the last batch, where the stage ran.
    nll      of forced answers: mean −ln p per token, in nats, after the prompt and the tokens before it, by the prefill path;
             None for one without a token, or where logits are not finite.
    """

    id: str
    arm: str
    policy: str
    policy_digest: str
    state: str
    reason: str | None = None
    refused: list[RefusedPrompt] = msgspec.field(default_factory=list)
    prompt_tokens: list[int] = msgspec.field(default_factory=list)
    tokens: list[list[int]] = msgspec.field(default_factory=list)
    texts: list[str] = msgspec.field(default_factory=list)
    stop_reasons: list[str] = msgspec.field(default_factory=list)
    chat_template_applied: bool = False
    highest: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    seconds: float = 0.0
    nll: list[float | None] = msgspec.field(default_factory=list)


class TuneStarted(Message):
    """``stamp``: what the times will depend on, by ``core.tuned.STAMP``. ``cells``: how many ``KernelsTimed`` will come.
    ``refused``: label of a format → why nothing runs it on this device."""

    device: str
    stamp: dict[str, str]
    dtype: str
    cells: int
    refused: dict[str, str] = msgspec.field(default_factory=dict)


class KernelsTimed(Message):
    """The candidates of one format on one layer shape and row count, never dropped.

    K               in features, columns of padding included; ``layers``: how many layers have this shape
    rows_low, _high the row counts that ``rows`` stands for
    own_error       the format's own error; None where no exact product of it exists here, and the least of the
                    candidates' errors stands in
    rotating_bytes  weights that were read in turn, so that no cache serves them all
    """

    format: str
    dtype: str
    N: int
    K: int
    layers: int
    rows: int
    rows_low: int
    rows_high: int
    times: list[CandidateTime]
    own_error: float | None = None
    own_reason: str | None = None
    rotating_bytes: int = 0


class Served(Message):
    """One request under load; never dropped. Times count from its arrival, by the host's clock around whole steps.

    arrival_s  since the load began. queue_ms: until it was first scheduled.
    tpot_ms    (t_last − t_first) / (N − 1); None for one token.
    warmup     True for those that arrived before the load had settled.
    """

    arm: str
    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    queue_ms: float | None = None
    warmup: bool = False
    error: str | None = None


class ServeEnded(Message):
    """What one load was like. ``tokens``: by "stage/view"; the two differ where a mixed step ran as the policy says.

    mixed        steps that held both stages; ``split_steps``: how many of them ran as two passes.
    readmitted   requests that lost their cache and were begun again; ``cancelled``: given up at the end.
    seconds      from the first arrival to the last token; ``busy_s``: the sum of all requests' times in it.
    """

    arm: str
    engine: str
    attention: str
    scheduler: str
    tokens: dict[str, int]
    steps: int = 0
    mixed: int = 0
    split_steps: int = 0
    readmitted: int = 0
    cancelled: int = 0
    kv_tokens: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0


class Canary(Message):
    """One pass of the canaries; never dropped. The first is minute 0, which the others are held against.

    same     whether every token is minute 0's. kld: the largest mean over a prompt's positions, in nats; None where logits
             are not finite. nonfinite: logits that are NaN or infinite. highest: the largest finite logit.
    """

    arm: str
    number: int
    at_s: float
    tokens_sha256: str
    same: bool
    kld: float | None
    nonfinite: int
    highest: float | None


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
