"""lm-eval's tasks on a staged model: its requests run through the engine's own views, cache and attention.

A log-likelihood takes the context under the prefill view and the continuation one token at a time under the decode view, as
an answer is made; generation is greedy, by the same two views. Rolling log-likelihoods (perplexity of a text) have no answer:
they are one pass under the prefill view.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from pdq_tui.core.protocol import LmEvaluated, ModelInfo
from pdq_tui.engine import faults
from pdq_tui.engine.cancel import check
from pdq_tui.engine.device import Device
from pdq_tui.engine.runner import Arm
from pdq_tui.errors import UnfitError, UsageError

#: New tokens where a task names no limit: lm-eval's own default.
_NEW_TOKENS: Final = 256
#: Buffers of KV come in steps of so many tokens, so that requests of many lengths share them.
_STEP: Final = 256
_RESAMPLES: Final = 100


class StagedRequests:
    """What lm-eval asks of a causal model, without a line of lm-eval's: with its ``TemplateLM`` it is one."""

    def __init__(
        self,
        device: Device,
        arm: Arm,
        tokenizer: Any,
        model: ModelInfo,
        eos: frozenset[int],
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        super().__init__()
        self._device, self._arm, self._eos = device, arm, eos
        self.tokenizer = tokenizer
        self._limit = model.max_positions
        self._cancelled, self._progress = cancelled, progress

    @property
    def eot_token_id(self) -> int:
        told = getattr(self.tokenizer, "eos_token_id", None)
        return int(told) if told is not None else min(self._eos, default=0)

    @property
    def prefix_token_id(self) -> int:
        told = getattr(self.tokenizer, "bos_token_id", None)
        return int(told) if told is not None else self.eot_token_id

    @property
    def max_length(self) -> int:
        return self._limit or 2048

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            bos = getattr(self.tokenizer, "bos_token", None)
            add_special_tokens = not (bos and string.startswith(bos))
        found = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return [int(i) for i in found]

    # -- the three kinds of request ------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """(…, context ids, continuation ids) → Σ ln p of the continuation, and whether greedy decoding would give it."""
        found = []
        for number, (_, context, continuation) in enumerate(requests):
            self._next(number, len(requests))
            found.append(self._answered(self._cut(context, len(continuation)), continuation))
        return found

    @torch.inference_mode()
    def _answered(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        generation = self._start(len(context) + len(continuation))
        logits = generation.prefill(self._ids(context))
        generation.handoff()
        total, greedy = 0.0, True
        for at, token in enumerate(continuation):
            shares = logits[0].double().log_softmax(-1)
            total += float(shares[token])
            greedy = greedy and int(shares.argmax()) == token
            if at + 1 < len(continuation):
                logits = generation.step(self._ids([token])[0])
        return total, greedy

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows as long as the model's positions; each token counts once."""
        found = []
        for number, request in enumerate(requests):
            self._next(number, len(requests))
            ids = [self.prefix_token_id, *self.tok_encode(request.args[0], add_special_tokens=False)]
            most = self.max_length - 1
            found.append(sum(self._passed(ids[at : at + most + 1]) for at in range(0, len(ids) - 1, most)))
        return found

    @torch.inference_mode()
    def _passed(self, ids: list[int]) -> float:
        """Σ ln p of all tokens but the first, from one pass."""
        logits = self._start(len(ids)).score(self._ids(ids[:-1]), len(ids) - 1)[0]
        shares = logits.double().log_softmax(-1)
        return float(shares.gather(-1, self._ids(ids[1:])[0][:, None]).sum())

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, cut at the first of the task's stop texts."""
        found = []
        for number, request in enumerate(requests):
            self._next(number, len(requests))
            text, wanted = request.args
            if wanted.get("do_sample") and wanted.get("temperature", 1.0) > 0:
                raise UsageError(
                    "this task samples its answers: two policies would differ by chance", "a greedy task"
                )
            until = wanted.get("until") or []
            until = [until] if isinstance(until, str) else [u for u in until if u]
            most = int(wanted.get("max_gen_toks", _NEW_TOKENS))
            found.append(self._generated(self._cut(self.tok_encode(text), most), until, most))
        return found

    @torch.inference_mode()
    def _generated(self, context: list[int], until: Sequence[str], most: int) -> str:
        generation = self._start(len(context) + most)
        logits = generation.prefill(self._ids(context))
        generation.handoff()
        made: list[int] = []
        text = ""
        while len(made) < most:
            check(self._cancelled)
            token = int(logits[0].argmax())
            if token in self._eos:
                break
            made.append(token)
            text = str(self.tokenizer.decode(made, skip_special_tokens=True))
            ends = [at for u in until if (at := text.find(u)) >= 0]
            if ends:
                return text[: min(ends)]
            if len(made) < most:
                logits = generation.step(self._ids([token])[0])
        return text

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _next(self, number: int, total: int) -> None:
        check(self._cancelled)
        self._progress(number, total)

    def _cut(self, context: list[int], new: int) -> list[int]:
        """The end of a context that is too long for the model, as lm-eval's own models do; at least one token."""
        room = self.max_length - new
        if room < 1:
            raise UsageError(f"{new} new tokens are more than the model's {self.max_length} positions")
        return context[-room:] or [self.prefix_token_id]

    def _start(self, tokens: int) -> Any:
        capacity = -(-tokens // _STEP) * _STEP
        return self._arm.staged.start(1, min(capacity, max(tokens, self._limit or capacity)), None)

    def _ids(self, row: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(row)], dtype=torch.int64, device=self._device.torch_device)


def evaluate(
    words: Sequence[str], limit: int | None, seed: int, requests: Callable[[type], StagedRequests]
) -> list[dict[str, Any]]:
    """lm-eval's tasks, by name or by YAML file, ``limit`` documents each → the fields of ``LmEvaluated`` beside the arm.

    requests: makes the model of the class that it is given. Raises UnfitError without lm-eval, UsageError for a task that
    cannot be loaded.
    """
    try:
        import lm_eval
        from lm_eval.api.model import TemplateLM
        from lm_eval.tasks import TaskManager, get_task_dict
    except ImportError as error:
        raise UnfitError(f"lm-eval cannot be used: {error}", "pip install 'pdq-tui[lm-eval]'") from error
    folders = [str(Path(word).resolve().parent) for word in words if is_file(word)]
    names = [task_name(Path(word)) if is_file(word) else word for word in words]
    try:
        tasks = get_task_dict(names, TaskManager(include_path=folders or None))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, AttributeError) as error:
        raise UsageError(
            f"lm-eval cannot load {', '.join(names)}: {faults.first_line(error)}",
            "a task's name, or a YAML file whose data lie on this machine",
        ) from error
    torch.manual_seed(seed)
    model = type("EngineLM", (StagedRequests, TemplateLM), {})
    done = lm_eval.evaluate(
        lm=requests(model), task_dict=tasks, limit=limit, bootstrap_iters=_RESAMPLES, log_samples=True
    )
    return [_of_task(done, name) for name in done["samples"]]


def _of_task(done: dict[str, Any], name: str) -> dict[str, Any]:
    """lm-eval's own figures of one task, and each document's, in the order of the documents. A metric is named with the
    filter that its answers went through where that is not "none": a task with two has each document twice."""
    samples = sorted(done["samples"][name], key=lambda s: s["doc_id"])
    better = done.get("higher_is_better", {}).get(name, {})
    metrics, errors, values, higher = {}, {}, {}, {}
    for key, value in done["results"][name].items():
        metric, _, filtered = key.partition(",")
        if not isinstance(value, (int, float)) or metric == "sample_len":
            continue
        by = filtered or "none"
        named = {m: m if by == "none" else f"{m},{by}" for m in (metric, metric.removesuffix("_stderr"))}
        if metric.endswith("_stderr"):
            errors[named[metric.removesuffix("_stderr")]] = float(value)
            continue
        metrics[named[metric]] = float(value)
        mine = [s.get(metric) for s in samples if s.get("filter", "none") == by]
        if mine and all(isinstance(v, (int, float)) for v in mine):
            values[named[metric]] = [float(v) for v in mine]
        if better.get(metric) is not None:
            higher[named[metric]] = bool(better[metric])
    return {
        "task": name,
        "version": str(done.get("versions", {}).get(name, "")),
        "documents": len({s["doc_id"] for s in samples}),
        "metrics": metrics,
        "stderr": errors,
        "values": values,
        "higher_is_better": higher,
    }


def is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def task_name(path: Path) -> str:
    """What a task's file calls it. Raises UsageError. Its tags need lm-eval's own reader, its name does not."""
    try:
        found = re.search(r"^task:\s*[\"']?([^\s\"'#]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if found is None:
        raise UsageError(f"{path}: names no task", "a line such as task: my_task")
    return found.group(1)


def told(arm: Arm, fields: dict[str, Any]) -> LmEvaluated:
    return LmEvaluated(arm=arm.label, policy=arm.policy.name, policy_digest=arm.policy.digest, **fields)
