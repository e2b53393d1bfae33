"""From texts to token ids: exact lengths, deterministic by seed, left-padded with an id that exists.

A prompt that cannot run is refused by its number and the others run; only a workload without a single runnable
prompt is refused whole.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jinja2 import TemplateError

from pdq_tui.core.protocol import ModelInfo, RefusedPrompt
from pdq_tui.core.workload import MOST_TOKENS, Workload
from pdq_tui.errors import UsageError

BuiltIn = Callable[[str], list[str]]


@dataclass(frozen=True)
class Batch:
    """One pass' prompts. ``ids`` int64 [B, P] on the CPU; ``pad`` int64 [B], left padding of each row, None: none."""

    number: int
    ids: torch.Tensor
    pad: torch.Tensor | None
    real_tokens: int
    padded_tokens: int

    @property
    def rows(self) -> int:
        return int(self.ids.shape[0])

    @property
    def width(self) -> int:
        return int(self.ids.shape[1])


@dataclass(frozen=True)
class Prepared:
    """A workload as token ids. ``lengths`` of the prompts that run; ``refused`` by 1-based number."""

    workload: Workload
    batches: tuple[Batch, ...]
    lengths: list[int]
    sha256: str
    chat_template_applied: bool
    refused: list[RefusedPrompt] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        """Tokens of KV that any request of this workload needs: one buffer serves them all."""
        return max(batch.width for batch in self.batches) + self.workload.output_tokens


def prepare(workload: Workload, tokenizer: Any, model: ModelInfo, built_in: BuiltIn) -> Prepared:
    """Token ids for a workload. ``tokenizer`` is a Hugging Face tokenizer, ``built_in`` gives a prompt set's texts.

    Raises UsageError where the workload is impossible or no prompt is left.
    """
    if workload.output_tokens < 1 or workload.batch < 1 or (workload.prompt_tokens or 1) < 1:
        raise UsageError("a workload needs at least one prompt token, one output token and a batch of one")
    if workload.prompt_tokens is not None and workload.prompts != "file":
        # Before as many tokens are made: a typing error of three zeros would take minutes and the machine's memory.
        reason = _too_long(workload.prompt_tokens, workload, model)
        if reason is not None:
            raise UsageError(f"no prompt can run: {reason}", _hint(model))
        if workload.prompt_tokens * workload.batch > MOST_TOKENS:
            raise UsageError(
                f"{workload.prompt_tokens} prompt tokens × {workload.batch} rows are more than {MOST_TOKENS} a pass",
                "a smaller batch (--batch) or shorter prompts (--in)",
            )
    notes: list[str] = []
    applied = False
    if workload.prompts == "file":
        rows, refused, applied = _users_own(workload, tokenizer, notes)
    else:
        rows, refused = _built_in(workload, tokenizer, built_in(workload.prompts)), []
    runnable = []
    for number, ids in rows:
        reason = _unfit(ids, workload, model)
        if reason is None:
            runnable.append(ids)
        else:
            refused.append(RefusedPrompt(number, reason))
    refused.sort(key=lambda r: r.number)
    if not runnable:
        raise UsageError(
            "no prompt can run: " + (refused[0].reason if refused else "there is none"),
            _hint(model) if workload.prompt_tokens or rows else "give prompts that are not empty",
        )
    _note_positions(runnable, workload, model, notes)
    if workload.stop == "fixed":
        notes.append(f"EOS is ignored: every answer is exactly {workload.output_tokens} tokens")
    return Prepared(
        workload=workload,
        batches=tuple(_batches(runnable, workload.batch, _pad_id(tokenizer, model))),
        lengths=[len(ids) for ids in runnable],
        sha256=_digest(runnable),
        chat_template_applied=applied,
        refused=refused,
        notes=notes,
    )


def _built_in(workload: Workload, tokenizer: Any, texts: Sequence[str]) -> list[tuple[int, list[int]]]:
    """``distinct`` prompts from a set (at most as many as it has texts): each starts at a text of its own, goes on
    with the texts after it where that is too short, and is cut at the exact length."""
    order = list(range(len(texts)))
    random.Random(f"{workload.seed}:{workload.prompts}").shuffle(order)
    rows = []
    for number in range(min(max(1, workload.distinct), len(order))):
        ids = _encode(tokenizer, texts[order[number]], special=True)
        if workload.prompt_tokens is not None:
            turn = 1
            while len(ids) < workload.prompt_tokens:
                following = texts[order[(number + turn) % len(order)]]
                ids = ids + _encode(tokenizer, "\n\n" + following, special=False)
                turn += 1
            ids = ids[: workload.prompt_tokens]
        rows.append((number + 1, ids))
    return rows


def _users_own(
    workload: Workload, tokenizer: Any, notes: list[str]
) -> tuple[list[tuple[int, list[int]]], list[RefusedPrompt], bool]:
    """The user's texts, then the user's chats, numbered in that order from 1."""
    rows: list[tuple[int, list[int]]] = []
    refused: list[RefusedPrompt] = []
    template = workload.chat_template == "auto" and bool(getattr(tokenizer, "chat_template", None))
    if workload.chats and not template:
        why = "not asked for" if workload.chat_template == "none" else "the model has none"
        notes.append(f"no chat template applied ({why}): the messages are joined by blank lines")
    applied = False
    for number, text in enumerate(workload.texts, 1):
        if not text.strip():
            refused.append(RefusedPrompt(number, "the prompt is empty"))
        else:
            rows.append((number, _encode(tokenizer, text, special=True)))
    for number, chat in enumerate(workload.chats, len(workload.texts) + 1):
        if not any(content.strip() for _, content in chat):
            refused.append(RefusedPrompt(number, "the chat is empty"))
        elif template:
            messages = [{"role": role, "content": _clean(content)} for role, content in chat]
            try:
                ids = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            except (TemplateError, ValueError) as error:
                refused.append(RefusedPrompt(number, f"the model's chat template refuses it: {error}"))
                continue
            applied = True
            rows.append((number, [int(i) for i in ids]))
        else:
            text = "\n\n".join(content for _, content in chat)
            rows.append((number, _encode(tokenizer, text, special=True)))
    return rows, refused, applied


def _clean(text: str) -> str:
    """Lone surrogates cannot be encoded; they are replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    # verbose=False: the tokenizer's own opinion about lengths is a log line; the model's limit is checked below.
    encoded = tokenizer(_clean(text), add_special_tokens=special, verbose=False)
    return [int(i) for i in encoded["input_ids"]]


def _unfit(ids: Sequence[int], workload: Workload, model: ModelInfo) -> str | None:
    """Why this prompt cannot run on this model; None where it can."""
    if not ids:
        return "the prompt has no tokens"
    if model.vocab and max(ids) >= model.vocab:
        return f"token id {max(ids)} is beyond the model's vocabulary of {model.vocab}"
    return _too_long(len(ids), workload, model)


def _hint(model: ModelInfo) -> str:
    also = ", or --beyond-positions measures speed without sense" if model.rotary else ""
    return f"shorten the prompts or the output (--in, --out){also}"


def _too_long(tokens: int, workload: Workload, model: ModelInfo) -> str | None:
    needed, limit = tokens + workload.output_tokens, model.max_positions
    if limit is None or needed <= limit:
        return None
    text = (
        f"{tokens} prompt + {workload.output_tokens} new tokens are more than the model's {limit} positions"
    )
    if not model.rotary:
        return text
    return None if workload.long_positions_ok else text + " (rotary: runs on, but the text means little)"


def _note_positions(
    rows: Sequence[Sequence[int]], workload: Workload, model: ModelInfo, notes: list[str]
) -> None:
    limit = model.max_positions
    over = sum(1 for ids in rows if limit is not None and len(ids) + workload.output_tokens > limit)
    if over:
        notes.append(
            f"{over} of {len(rows)} prompts go beyond the model's {limit} positions: speed only, not text"
        )


def _pad_id(tokenizer: Any, model: ModelInfo) -> int:
    """An id that exists. What it is does not matter: padding is masked."""
    for name in ("pad_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int) and 0 <= value < (model.vocab or value + 1):
            return value
    return 0


def _batches(rows: Sequence[Sequence[int]], size: int, pad_id: int) -> list[Batch]:
    """Rows in order, ``size`` a pass, the last one filled up from the front."""
    found = []
    for number in range(-(-len(rows) // size)):
        taken = [rows[(number * size + i) % len(rows)] for i in range(size)]
        width = max(len(ids) for ids in taken)
        ids = torch.full((size, width), pad_id, dtype=torch.int64)
        for i, row in enumerate(taken):
            ids[i, width - len(row) :] = torch.tensor(row, dtype=torch.int64)
        pads = [width - len(row) for row in taken]
        found.append(
            Batch(
                number=number,
                ids=ids,
                pad=torch.tensor(pads, dtype=torch.int64) if any(pads) else None,
                real_tokens=sum(len(row) for row in taken),
                padded_tokens=sum(pads),
            )
        )
    return found


def _digest(rows: Sequence[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update((",".join(map(str, row)) + ";").encode("ascii"))
    return digest.hexdigest()
