"""Commands: from the app to a worker."""

from __future__ import annotations

import msgspec

from pdq_tui.core.messages.base import Message
from pdq_tui.core.messages.energy import MeasureEnergy
from pdq_tui.core.messages.guards import Guard
from pdq_tui.core.policy import Policy
from pdq_tui.core.workload import Workload


class Load(Message):
    """Load a model. ``model`` is a directory, a hub id, or "demo" with ``source`` the fetched GGUF's directory.

    ``layers``: "auto" runs decoder layers as the kernel table says (compiled where it can), "eager" never compiles.
    ``kernels``: "auto" builds and uses the project's own CPU kernels where it can, "torch" does not.
    ``prefill_rows``: the most rows (tokens × sequences) of a prompt that run at once; None as the kernel table says, 0 never
    cuts one.
    ``tuned``: "auto" puts first what ``Tune`` found on this machine, where its stamp fits; "off" does not.
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
    layers: str = "eager"
    kernels: str = "torch"
    tuned: str = "off"
    prefill_rows: int | None = 0


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


class Score(Message):
    """Hold ``arms`` against ``base`` on windows of the built-in corpus. Answered by a ``Scored`` a window and arm,
    then ``RunEnded``. The base scores a window once, for all arms.

    path     "prefill": one pass over a window of ``prompt_tokens``; its second half is compared.
             "decode": ``prompt_tokens`` under the prefill policy, then ``new_tokens`` forced tokens one at a time under
             the decode policy, through the handed-off cache.
    forced   of the decode path: "text", the window's own continuation, or "sample", what ``base`` says at temperature 1,
             drawn by ``seed``.
    text     half of the corpus: "selection" or "confirmation" (``core.corpus``). In the order that ``seed`` gives it, the
             windows after the first ``skip``.
    batch    windows in one pass, as many as the workload has sequences: other kernels may run at another number of rows.
    """

    arms: list[str]
    base: str
    path: str
    windows: int
    prompt_tokens: int
    new_tokens: int = 0
    forced: str = "text"
    text: str = "selection"
    skip: int = 0
    seed: int = 0
    batch: int = 1


class Question(msgspec.Struct, kw_only=True):
    """One request as a user sends it: ``workload`` is prepared as any other, and its batches run one after another.

    leave   "prefill" or "decode": whoever asked goes away while that stage runs; None: waits for the answer.
    forced  an answer a prompt, as token ids: nothing is made, and the arm says how likely it finds each (``Answered.nll``).
    """

    id: str
    workload: Workload
    leave: str | None = None
    forced: list[list[int]] | None = None


class Ask(Message):
    """Have ``arm`` answer ``questions``, each by itself and in order. Answered by an ``Answered`` each, then ``RunEnded``.

    A question that cannot run is answered with the reason, and the next one is asked. The workload of the engine's runs
    stays what it is.
    """

    arm: str
    questions: list[Question]
    task: str = "ask"


class LmEval(Message):
    """Run lm-eval's ``tasks`` (names, or paths of YAML files) on ``arm``, ``limit`` documents each at most. Answered by an
    ``LmEvaluated`` a task, then ``RunEnded``."""

    arm: str
    tasks: list[str]
    limit: int | None = None
    seed: int = 0


class Tune(Message):
    """Measure the kernel candidates for the loaded model's linear layers. Answered by ``TuneStarted``, a ``KernelsTimed`` a
    format, layer shape and row count, and ``RunEnded``; ``Stop`` ends it between two samples.

    formats  labels of formats (``core.formats.of_label``).
    seconds  measuring time a format, shape and row count at most, once every candidate has its least number of samples.
    """

    formats: list[str]
    rows: list[int]
    seconds: float = 0.4
    seed: int = 0


class Trace(Message):
    """Run ``arm`` once under torch's profiler, one prefill and ``steps`` decode steps, beside every measurement: in a
    loop it comes between two requests, in a measurement after its end. Answered by ``Traced``.

    folder   where the trace is written, in a directory of its own; None: it is read and not kept
    rolling  it takes the place of the arm's last rolling one: what a schedule asks for
    """

    arm: str
    steps: int = 4
    rolling: bool = False
    folder: str | None = None


class Serve(Message):
    """Serve ``arm`` under load by transformers' continuous batching, each step's stage by the requests' state. Answered by
    a ``Served`` a request, one ``ServeEnded``, then ``RunEnded``.

    concurrency    closed loop: as many requests are in flight at any time; or
    rate           open loop: requests a second arrive on their own (Poisson), drawn by ``seed``.
    seconds        of arrivals; what is in flight then is finished, for as long again at most.
    least          requests that have to finish before a closed loop ends.
    prompt_tokens, output_tokens  of each request; EOS is ignored.
    kv_tokens      what the paged cache holds: the rest of the memory that all policies share.
    chunk          tokens of a step at most, prompts are cut to it.
    rows           sequences at once that kernels are chosen for.
    """

    arm: str
    concurrency: int | None = None
    rate: float | None = None
    seconds: float = 10.0
    least: int = 4
    prompt_tokens: int = 512
    output_tokens: int = 64
    kv_tokens: int = 8192
    chunk: int = 256
    rows: int = 1
    seed: int = 0


class Soak(Message):
    """Run the workload on ``arm`` for ``seconds``, one request after another, and every ``canary_every_s`` (and at the
    start and the end) the same ``canary_prompts`` with ``canary_tokens`` each. Answered by a ``Request`` of kind "soak" a
    request, a ``Canary`` a pass, then ``RunEnded``.
    """

    arm: str
    seconds: float
    canary_every_s: float = 180.0
    canary_prompts: int = 2
    canary_tokens: int = 16
    seed: int = 0


class Stop(Message):
    """End the running loop or measurement at the next token; results so far stay."""


class CancelTask(Message):
    """Cancel loading, converting or packing. Answered by ``TaskEnded(cancelled=True)``."""


class Ping(Message):
    id: int = 0


class Shutdown(Message):
    pass


class Watch(Message):
    """To the sensors: follow this engine process and device. Joined by ``uuid`` or ``bus_id`` only. ``others``: (UUID, bus id)
    of the further devices that its model lies on."""

    pid: int | None = None
    uuid: str | None = None
    bus_id: str | None = None
    interval_s: float = 0.1
    others: list[tuple[str | None, str | None]] = msgspec.field(default_factory=list)


Command = (
    Load
    | SetArm
    | SetWorkload
    | StartLoop
    | SelectArm
    | Interleave
    | RunBlocks
    | Score
    | Ask
    | LmEval
    | Tune
    | Trace
    | Guard
    | MeasureEnergy
    | Serve
    | Soak
    | Stop
    | CancelTask
    | Ping
    | Shutdown
    | Watch
)
