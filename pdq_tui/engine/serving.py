"""A policy under load: transformers' continuous batching, whose model is a dispatcher over the two stages' views.

Another attention and another cache than the single-stream engine's: figures from here stand beside those, never among them.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

from pdq_tui.core import prompts as prompt_sets
from pdq_tui.core.policy import STAGES, Stage
from pdq_tui.core.protocol import Serve, Served, ServeEnded
from pdq_tui.core.workload import Workload
from pdq_tui.engine.loader import LoadedModel
from pdq_tui.engine.prompts import prepare
from pdq_tui.engine.runner import Arm
from pdq_tui.engine.staged import StagedModel
from pdq_tui.engine.views import copy_shell
from pdq_tui.errors import UnfitError, UsageError

ATTENTION: Final = "sdpa"
SCHEDULER: Final = "fifo"
#: Tokens of one page of the cache. Small, so that equal memory means nearly equal tokens.
_PAGE: Final = 32
#: How long the driver sleeps at most: it has to see a finished request soon, to send the next.
_POLL_S: Final = 0.02
#: What is in flight at the end may take as long again as the load did, and at least this many seconds.
_DRAIN_S: Final = 30.0

Progress = Callable[[float, float | None, str], None]


class Dispatcher:
    """Runs one ragged step: every request by the view of its own stage, as the policy's ``mixed`` says where both are there.

    The stage is the request's state: it has prefilled as long as no token of it was made. The scheduler calls a request
    decoding already while its last chunk runs, and a chunk may be one token long: neither tells.
    """

    def __init__(self, views: dict[Stage, Any], mixed: str) -> None:
        self._views, self._mixed = views, mixed
        self.tokens: Counter[str] = Counter()
        self.steps = self.mixed = self.split_steps = 0
        self.readmitted: set[str] = set()
        #: The requests of the step that is about to run: given by the server once its batches exist.
        self.batch: Callable[[], Sequence[Any]] = lambda: ()

    def forward(self, logits_to_keep: Tensor | None = None, **step: Any) -> Any:
        """The ragged batch [1, q] of one step → an object with ``logits`` [1, kept, V]."""
        requests = list(self.batch())
        stages: list[Stage] = ["decode" if r.state.generated_tokens else "prefill" for r in requests]
        sizes = [int(r.query_length) for r in requests]
        self.readmitted |= {r.state.request_id for r in requests if r.state._true_initial_tokens}
        self.steps += 1
        there = set(stages)
        if len(there) == 1:
            (view,) = there
            return self._whole(view, stages, sizes, logits_to_keep, step)
        self.mixed += 1
        if self._mixed != "split":
            whole: Stage = "prefill" if self._mixed == "prefill" else "decode"
            return self._whole(whole, stages, sizes, logits_to_keep, step)
        self.split_steps += 1
        return self._split(stages, sizes, logits_to_keep, step)

    def _count(self, stage: Stage, view: Stage, tokens: int) -> None:
        self.tokens[f"{stage}/{view}"] += tokens

    def _whole(
        self,
        view: Stage,
        stages: Sequence[Stage],
        sizes: Sequence[int],
        keep: Tensor | None,
        step: dict[str, Any],
    ) -> Any:
        for stage, size in zip(stages, sizes, strict=True):
            self._count(stage, view, size)
        return self._views[view](**step, **({} if keep is None else {"logits_to_keep": keep}))

    def _split(
        self, stages: Sequence[Stage], sizes: Sequence[int], keep: Tensor | None, step: dict[str, Any]
    ) -> Any:
        """Two passes over one batch, each with the requests of its stage; the logits come back in the batch's order."""
        keep = step["logits_indices"] if keep is None else keep
        out: Tensor | None = None
        for stage in STAGES:
            mine = [i for i, s in enumerate(stages) if s == stage]
            part, kept, places = _part(step, mine, sizes, keep)
            for i in mine:
                self._count(stage, stage, sizes[i])
            logits = self._views[stage](**part, logits_to_keep=kept).logits
            if out is None:
                out = logits.new_empty((1, keep.numel(), logits.shape[-1]))
            out[:, places] = logits
        return SimpleNamespace(logits=out)


def _part(
    step: dict[str, Any], mine: Sequence[int], sizes: Sequence[int], keep: Tensor
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The step of the requests ``mine`` alone, which of its positions give logits, and their places in the whole."""
    device = step["input_ids"].device
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    rows = _cat([(edges[i], edges[i + 1]) for i in mine], device)
    part = dict(step)
    part["input_ids"], part["position_ids"] = step["input_ids"][:, rows], step["position_ids"][:, rows]
    part["cu_seq_lens_q"] = _edges([sizes[i] for i in mine], device)
    part["max_length_q"] = max(sizes[i] for i in mine)
    columns: dict[str, Tensor] = {}
    part["cu_seq_lens_k"], part["max_length_k"] = {}, {}
    for kind, ends in step["cu_seq_lens_k"].items():
        cut = [int(e) for e in ends.tolist()]
        lengths = [cut[i + 1] - cut[i] for i in mine]
        columns[kind] = _cat([(cut[i], cut[i + 1]) for i in mine], device)
        part["cu_seq_lens_k"][kind] = _edges(lengths, device)
        part["max_length_k"][kind] = max(lengths)
    part["write_index"] = [index[rows] for index in step["write_index"]]
    # Without anything in the cache nothing is read, and the index is empty.
    part["read_index"] = (
        [
            index[columns[kind]] if index.numel() else index
            for kind, index in zip(step["cache"].cache_allocators, step["read_index"], strict=True)
        ]
        if "cache" in step
        else step["read_index"]
    )
    mask = step.get("attention_mask")
    if isinstance(mask, dict):
        part["attention_mask"] = {k: m[..., rows, :][..., columns[k]] for k, m in mask.items()}
    elif mask is not None:
        (one,) = columns.values()
        part["attention_mask"] = mask[..., rows, :][..., one]
    place_of = {int(row): at for at, row in enumerate(rows.tolist())}
    kept = [(at, place_of[row]) for at, row in enumerate(keep.tolist()) if row in place_of]
    places = torch.tensor([at for at, _ in kept], dtype=torch.int64, device=device)
    indices = torch.tensor([row for _, row in kept], dtype=torch.int64, device=device)
    part["logits_indices"] = indices
    return part, indices, places


def _cat(spans: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(a, b, device=device) for a, b in spans])


def _edges(sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device=device)


class Serving:
    """One load on one arm. A context manager: its server is a thread, which ends with it."""

    def __init__(
        self, staged: StagedModel, model: LoadedModel, arm: Arm, command: Serve, cancelled: Callable[[], bool]
    ) -> None:
        if (command.concurrency is None) == (command.rate is None):
            raise UsageError("a load is either a closed loop of a concurrency or an open loop of a rate")
        if (command.concurrency or 1) < 1 or (command.rate or 1.0) <= 0 or command.output_tokens < 1:
            raise UsageError("a load needs a concurrency or rate above 0 and at least one new token")
        self._command, self._arm = command, arm
        self._prompts = _prompts(command, model)
        views = staged.serving_views(arm.policy, command.chunk, command.rows, ATTENTION, cancelled=cancelled)
        self.dispatcher = Dispatcher(dict(views), arm.policy.serving.mixed)
        shell: Any = copy_shell(staged.skeleton, {}, ATTENTION)
        shell.forward = self.dispatcher.forward
        self._shell = shell
        self._manager: Any = None

    def __enter__(self) -> Serving:
        c = self._command
        try:
            config = ContinuousBatchingConfig(
                page_size=_PAGE,
                num_blocks=max(1, c.kv_tokens // _PAGE),
                max_batch_tokens=c.chunk,
                max_requests_per_batch=max(c.rows, 1) * 4,
                max_blocks_per_request=0,
                # Prompts repeat; a shared prefix would be another workload.
                allow_block_sharing=False,
                use_async_batching=False,
                use_cuda_graph=False,
                auto_switch_to_flash=False,
                scheduler_type=SCHEDULER,
            )
            make: Any = GenerationConfig
            generation = make(do_sample=False, max_new_tokens=c.output_tokens, eos_token_id=-1)
            self._manager = self._shell.init_continuous_batching(generation, config)
        except (TypeError, ValueError, AttributeError) as error:
            raise UnfitError(
                f"transformers {transformers.__version__} cannot serve this model by continuous batching: {error}"
            ) from error
        manager = self._manager
        self.dispatcher.batch = lambda: manager.batch_processor.inputs_and_outputs.requests_in_batch
        # The server's thread takes over the caller's mode; buffers that kernels keep were made in this one.
        with torch.inference_mode():
            manager.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._manager is not None:
            self._manager.stop(block=True, timeout=30.0, hard_stop=True)

    def run(self, stopped: Callable[[], bool], progress: Progress) -> Iterator[Served | ServeEnded]:
        """Requests as they end, and at the end what the load was like."""
        c, begin = self._command, time.perf_counter()
        arrivals = _poisson(c) if c.rate is not None else None
        first = c.concurrency or 0
        waiting: list[tuple[float, int]] = []
        sent: dict[str, tuple[int, float]] = {}
        number = finished = cancelled = 0
        busy, last = 0.0, begin
        # A closed loop starts all at once: its first round is no picture of the load. An open one starts empty.
        warm_until = first if arrivals is None else max(1, int((c.rate or 0.0) * c.seconds * 0.1))
        if arrivals is None:
            waiting = [(0.0, n) for n in range(first)]
        else:
            waiting = [(at, n) for n, at in enumerate(arrivals)]
        number = len(waiting)
        heapq.heapify(waiting)
        ending = False
        while waiting or sent:
            now = time.perf_counter() - begin
            drain_by = c.seconds + max(c.seconds, _DRAIN_S)
            if stopped() or now > drain_by:
                cancelled = len(sent) + len(waiting)
                break
            while waiting and waiting[0][0] <= now:
                at, which = heapq.heappop(waiting)
                # An open loop's request arrived when it was due, also where this thread woke up late.
                arrived = begin + at if arrivals is not None else time.perf_counter()
                key = self._manager.add_request(
                    self._prompts[which % len(self._prompts)],
                    request_id=f"load-{which}",
                    max_new_tokens=self._tokens(which),
                    record_timestamps=True,
                    eos_token_id=-1,
                )
                if key is None:
                    raise RuntimeError(f"the server takes no more requests: {self._dead()}")
                sent[key] = (which, arrived)
            wait = min(_POLL_S, max(0.0, waiting[0][0] - now)) if waiting else _POLL_S
            result = self._manager.get_result(timeout=max(wait, 1e-3))
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError(f"the server ended: {self._dead()}")
                progress(now, c.seconds, self._label(len(sent)))
                continue
            if not result.is_finished() or result.request_id not in sent:
                continue
            which, arrived = sent.pop(result.request_id)
            event = _served(c, which, arrived, begin, result, warmup=which < warm_until)
            finished += 1
            if event.e2e_ms is not None:
                busy += event.e2e_ms / 1e3
                last = max(last, arrived + event.e2e_ms / 1e3)
            yield event
            ending = ending or (now >= c.seconds and finished >= c.least + warm_until)
            if arrivals is None and not ending:
                heapq.heappush(waiting, (0.0, number))
                number += 1
        d = self.dispatcher
        yield ServeEnded(
            arm=self._arm.label,
            engine=f"transformers {transformers.__version__} continuous batching",
            attention=f"{ATTENTION}, paged cache of {_PAGE} tokens a page",
            scheduler=f"{SCHEDULER}, {c.chunk} tokens a step, mixed steps: {self._arm.policy.serving.mixed}",
            tokens=dict(d.tokens),
            steps=d.steps,
            mixed=d.mixed,
            split_steps=d.split_steps,
            readmitted=len(d.readmitted),
            cancelled=cancelled,
            kv_tokens=c.kv_tokens,
            seconds=last - begin,
            busy_s=busy,
        )

    def _tokens(self, which: int) -> int:
        """Requests of one length that start together stay in step: all prefill, then all decode, and no step ever mixes
        the stages. So those of a closed loop's first round, which do not count, end one after the other."""
        c = self._command
        if c.concurrency is None or which >= c.concurrency:
            return c.output_tokens
        return max(1, round(c.output_tokens * (which + 1) / c.concurrency))

    def _label(self, flying: int) -> str:
        c = self._command
        what = f"concurrency {c.concurrency}" if c.rate is None else f"{c.rate:.2g} requests/s"
        return f"{self._arm.label} under load, {what}, {flying} in flight"

    def _dead(self) -> str:
        error = self._manager.background_thread_status.fatal_error
        return str(error) if error is not None else "without a word"


def _prompts(c: Serve, model: LoadedModel) -> list[list[int]]:
    """Different prompts of one exact length. Raises UsageError where the model has no positions for them."""
    prepared = prepare(
        Workload(prompt_tokens=c.prompt_tokens, output_tokens=c.output_tokens, distinct=16, seed=c.seed),
        model.tokenizer,
        model.info,
        prompt_sets.built_in,
    )
    return [[int(t) for t in batch.ids[0].tolist()] for batch in prepared.batches]


def _poisson(c: Serve) -> list[float]:
    """Arrival times in seconds; at least one."""
    rng, at = random.Random(f"arrivals:{c.seed}"), 0.0
    found: list[float] = []
    assert c.rate is not None
    while True:
        at += rng.expovariate(c.rate)
        if at > c.seconds and found:
            return found
        found.append(at)


def _served(c: Serve, which: int, arrived: float, begin: float, result: Any, *, warmup: bool) -> Served:
    times = list(result.timestamps or [])
    started = result.lifespan[0]
    return Served(
        arm=c.arm,
        number=which,
        arrival_s=arrived - begin,
        prompt_tokens=c.prompt_tokens,
        output_tokens=len(result.generated_tokens),
        ttft_ms=(times[0] - arrived) * 1e3 if times else None,
        tpot_ms=(times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else None,
        e2e_ms=(times[-1] - arrived) * 1e3 if times else None,
        queue_ms=max(0.0, (started - arrived) * 1e3) if started > 0 else None,
        warmup=warmup,
        error=result.error,
    )
