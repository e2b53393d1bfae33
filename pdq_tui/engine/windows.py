"""Windows of text as token ids, for quality: consecutive pieces of one half of the corpus, none of which overlap."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import torch
from torch import Tensor

from pdq_tui.core import corpus
from pdq_tui.core.protocol import ModelInfo, Score
from pdq_tui.errors import UsageError


def windows(command: Score, tokenizer: Any, model: ModelInfo) -> list[Tensor]:
    """``command.windows`` windows, int64 [prompt_tokens (+ new_tokens)] each: in the seed's order of the half's documents
    those after the first ``command.skip``. Each begins as a prompt does, with what the tokenizer puts before a text.

    Raises UsageError for a path that does not exist, for windows that the model has no positions for, and where the half
    has too little text.
    """
    _check(command)
    length = command.prompt_tokens + (command.new_tokens if command.path == "decode" else 0)
    if model.max_positions is not None and length + 1 > model.max_positions:
        raise UsageError(
            f"a window of {length} tokens is more than the model's {model.max_positions} positions"
        )
    documents = list(corpus.documents(command.text))
    random.Random(f"{command.seed}:{command.text}").shuffle(documents)
    start = _start(tokenizer)
    each = length - len(start)
    if each < 1:
        raise UsageError(
            f"a window of {length} tokens is no longer than what the tokenizer puts before a text"
        )
    wanted = command.skip + command.windows
    stream: list[int] = []
    for text in documents:
        stream += _ids(tokenizer, text + "\n\n", special=False)
        if len(stream) >= wanted * each:
            break
    there = len(stream) // each
    if there < wanted:
        raise UsageError(
            f"{wanted} windows of {length} tokens were asked for, and the {command.text} half of the text has {there}",
            "shorter or fewer windows",
        )
    if model.vocab and max(stream) >= model.vocab:
        raise UsageError(f"token id {max(stream)} is beyond the model's vocabulary of {model.vocab}")
    return [
        torch.tensor([*start, *stream[n * each : (n + 1) * each]], dtype=torch.int64)
        for n in range(command.skip, wanted)
    ]


def digest(ids: Tensor) -> str:
    """12 hex digits of SHA-256 over one window's ids: two figures are of the same text only where these agree."""
    return hashlib.sha256(",".join(map(str, ids.tolist())).encode("ascii")).hexdigest()[:12]


def _check(command: Score) -> None:
    if command.path not in ("prefill", "decode") or command.forced not in ("text", "sample"):
        raise UsageError(f"there is no {command.path} path with forced {command.forced}")
    short = command.prompt_tokens < 2 or (command.path == "decode" and command.new_tokens < 2)
    if command.windows < 1 or command.skip < 0 or short:
        raise UsageError(
            "quality needs a window of at least two prompt and, on the decode path, two new tokens"
        )
    if command.batch < 1 or not command.arms:
        raise UsageError("quality needs an arm, and a batch of at least one window")


def _start(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text (BOS, most often), and nothing of what it may put behind one."""
    plain, special = (_ids(tokenizer, "a", special=s) for s in (False, True))
    for at in range(len(special) - len(plain) + 1):
        if special[at : at + len(plain)] == plain:
            return special[:at]
    return []


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    # verbose=False: the tokenizer's own opinion about lengths is a log line.
    return [int(i) for i in tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]]
