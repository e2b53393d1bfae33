"""One request at a time, as a user sends it: prepared, checked against memory, run, and answered with how it ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from pdq_tui.core.protocol import Answered, Question, Request
from pdq_tui.engine.device import Device
from pdq_tui.engine.loader import LoadedModel
from pdq_tui.engine.prompts import Batch, BuiltIn, Prepared, prepare
from pdq_tui.engine.runner import Arm, Hooks, Limits, run_request
from pdq_tui.errors import UnfitError, UsageError

#: KV buffers are made for lengths of this step, in tokens, so that requests of nearly one length share one.
_CAPACITY_STEP = 64


class Asker:
    """Asks one arm. What the allocator or the device raises is passed on: after it the process is not to be trusted."""

    def __init__(self, device: Device, model: LoadedModel, arm: Arm, built_in: BuiltIn) -> None:
        self._device, self._model, self._arm, self._built_in = device, model, arm, built_in

    def answer(self, question: Question, stopped: Callable[[], bool]) -> Answered:
        begin = time.monotonic()
        arm = self._arm
        found = Answered(
            id=question.id,
            arm=arm.label,
            policy=arm.policy.name,
            policy_digest=arm.policy.digest,
            state="done",
        )
        try:
            prepared = prepare(question.workload, self._model.tokenizer, self._model.info, self._built_in)
            capacity = self._fit(prepared)
            found.prompt_tokens, found.refused = prepared.lengths, prepared.refused
            found.chat_template_applied = prepared.chat_template_applied
            if question.forced is not None:
                found.nll = self._likelihoods(prepared, question.forced)
                found.seconds = time.monotonic() - begin
                return found
            for batch in prepared.batches:
                self._one(found, question, prepared, batch, capacity, stopped)
                if found.state != "done":
                    break
        except (UsageError, UnfitError) as error:
            found.state, found.reason = "refused", error.message
        # The last batch was filled up with prompts that were answered already.
        count = len(found.prompt_tokens)
        del found.tokens[count:], found.stop_reasons[count:]
        found.texts = [
            str(self._model.tokenizer.decode(row, skip_special_tokens=True)) for row in found.tokens
        ]
        found.seconds = time.monotonic() - begin
        return found

    @torch.inference_mode()
    def _likelihoods(self, prepared: Prepared, forced: Sequence[Sequence[int]]) -> list[float | None]:
        """One prefill pass a batch over prompts and answers. Answers are filled up behind their end, which a causal model's
        earlier positions do not see. Raises UsageError where there is not one answer a prompt."""
        count = len(prepared.lengths)
        if len(forced) != count:
            raise UsageError(f"{len(forced)} answers for {count} prompts")
        found: list[float | None] = []
        for at, batch in enumerate(prepared.batches):
            rows = [*forced[at * batch.rows : (at + 1) * batch.rows]]
            rows += [[] for _ in range(batch.rows - len(rows))]
            found += self._rated(batch, rows)
        return found[:count]

    def _rated(self, batch: Batch, rows: Sequence[Sequence[int]]) -> list[float | None]:
        longest = max(map(len, rows))
        if not longest:
            return [None] * len(rows)
        answer = torch.zeros((len(rows), longest), dtype=batch.ids.dtype)
        for i, row in enumerate(rows):
            answer[i, : len(row)] = torch.tensor(list(row), dtype=batch.ids.dtype)
        device = self._device.torch_device
        ids = torch.cat([batch.ids, answer[:, :-1]], dim=1).to(device)
        pad = batch.pad.to(device) if batch.pad is not None else None
        generation = self._arm.staged.start(batch.rows, ids.shape[1], pad)
        logits = generation.score(ids, longest)
        found: list[float | None] = []
        for i, row in enumerate(rows):  # one row at a time: float64 of a whole batch's vocabularies is large
            if not row:
                found.append(None)
                continue
            likely = logits[i, : len(row)].double().log_softmax(-1)
            tokens = torch.tensor(list(row), device=device)
            value = float(-likely.gather(-1, tokens[:, None]).mean())
            found.append(value if math.isfinite(value) else None)
        return found

    def _fit(self, prepared: Prepared) -> int:
        """Positions of the KV buffer. Raises UnfitError where it does not fit into free memory."""
        capacity = -(-prepared.capacity // _CAPACITY_STEP) * _CAPACITY_STEP
        limit = self._model.info.max_positions
        if limit is not None:
            capacity = max(prepared.capacity, min(capacity, limit))
        rows, info = prepared.batches[0].rows, self._arm.staged.kv_info()
        if info.capacity_tokens is not None and rows * capacity > info.capacity_tokens:
            raise UnfitError(
                f"{rows} sequences of up to {capacity} tokens need {rows * capacity} tokens of KV cache; "
                f"{info.capacity_tokens} fit into free memory",
                "fewer sequences or shorter ones",
            )
        return capacity

    def _one(
        self,
        found: Answered,
        question: Question,
        prepared: Prepared,
        batch: Batch,
        capacity: int,
        stopped: Callable[[], bool],
    ) -> None:
        workload = prepared.workload
        limits = Limits(workload.output_tokens, workload.stop == "natural", self._model.eos)
        # A request looks for a cancellation after its prefill, and again after each step.
        looks, leave_at = 0, {"prefill": 1, "decode": 1 + max(1, workload.output_tokens // 2)}

        def cancelled() -> bool:
            nonlocal looks
            looks += 1
            gone = question.leave is not None and looks >= leave_at.get(question.leave, 1)
            return gone or stopped()

        def kept(rows: list[list[int]], highest: float) -> None:
            found.tokens += rows
            found.highest = highest if found.highest is None else max(found.highest, highest)

        record = Request(
            request=0, arm=found.arm, policy=found.policy, policy_digest=found.policy_digest, kind="ask"
        )
        run_request(
            self._device, self._arm, batch, capacity, limits, record, Hooks(cancelled=cancelled, kept=kept)
        )
        found.stop_reasons += record.stop_reasons
        found.ttft_ms, found.tpot_ms = record.ttft_ms, record.tpot_ms
        if not record.valid:
            found.state, found.reason = "not finite", record.invalid_reason
        elif record.cancelled:
            found.state = "cancelled"
            found.reason = f"after {max(record.output_tokens)} of {workload.output_tokens} tokens"
