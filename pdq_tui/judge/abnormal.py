"""Requests that no one should send and somebody will: what each has to end in, and whether the next request is right.

Nothing here runs: ``cases`` says what is asked, ``result`` what an answer is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from pdq_tui.core.protocol import Answered
from pdq_tui.core.workload import MOST_TOKENS, Workload

PASS: Final = "pass"
FAIL: Final = "fail"
NOT_TESTED: Final = "not tested"

DONE: Final = "done"
REFUSED: Final = "refused"
CANCELLED: Final = "cancelled"
ENDED: Final = "engine ended"

#: New tokens of the requests; one is cancelled half-way.
OUTPUT: Final = 8

#: Special tokens of common tokenizers, as a user may type them, and characters that steer terminals.
_CONTROL: Final = (
    "<|endoftext|><|im_start|>system<|im_end|></s><s>[INST]<unk><pad>\x00\x07\x1b[2J\u2028 go on"
)
#: A UTF-8 text cut in the middle of a character, a lone continuation byte and a byte that never occurs.
_BYTES: Final = b"caf\xc3 \x80 \xff ok \xe2\x82".decode("utf-8", "surrogateescape")
_RIGHT_TO_LEFT: Final = (
    "\u0645\u0631\u062d\u0628\u0627 \u202e\u05e9\u05dc\u05d5\u05dd\u202c e\u0301o\u0308\u0323 Z"
    + "\u0336" * 30
    + " \U0001f469\u200d\U0001f4bb\ufe0f"
)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """``expected``: the states that are right. ``not_tested``: why it is not asked here."""

    name: str
    workload: Workload
    expected: tuple[str, ...]
    leave: str | None = None
    not_tested: str | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """``next_right``: whether the same clean request as before gave the same tokens afterwards; None: not asked."""

    case: str
    expected: list[str]
    state: str | None
    reason: str | None
    next_right: bool | None
    result: str
    seconds: float | None = None


def clean(prompt_tokens: int, seed: int) -> Workload:
    """The request whose tokens have to be the same before and after."""
    return Workload(prompt_tokens=prompt_tokens, output_tokens=OUTPUT, distinct=1, seed=seed)


def cases(
    prompt_tokens: int,
    seed: int,
    *,
    max_positions: int | None,
    capacity_tokens: int | None,
    seconds_a_token: float,
    longest_s: float,
) -> list[Case]:
    """capacity_tokens: KV tokens that fit into memory; seconds_a_token: of a prompt, to say no to a limit that would take
    longer than ``longest_s``."""
    usual = clean(prompt_tokens, seed)

    def text(words: str) -> Workload:
        return Workload(prompt_tokens=None, output_tokens=OUTPUT, prompts="file", texts=(words,), distinct=1)

    def long(tokens: int) -> Workload:
        return msgspec.structs.replace(usual, prompt_tokens=tokens, prompts="long")

    limit = (max_positions or 0) - OUTPUT
    at_limit = _why_not(limit, max_positions, capacity_tokens, seconds_a_token, longest_s)
    over = None if max_positions else "this model names no limit"
    # Twice what fits into memory, or more than a pass may have at all.
    rows = MOST_TOKENS // prompt_tokens
    if capacity_tokens is not None:
        rows = min(rows, 2 * capacity_tokens // (prompt_tokens + OUTPUT))
    huge = msgspec.structs.replace(usual, batch=rows + 1)
    return [
        Case(name="empty", workload=text(""), expected=(REFUSED,)),
        Case(name="blank", workload=text(" \t\n\u3000 "), expected=(REFUSED,)),
        Case(
            name="one token",
            workload=msgspec.structs.replace(usual, prompt_tokens=1),
            expected=(DONE,),
        ),
        Case(name="at the limit", workload=long(max(limit, 1)), expected=(DONE,), not_tested=at_limit),
        Case(name="one over the limit", workload=long(limit + 1), expected=(REFUSED,), not_tested=over),
        Case(name="control tokens", workload=text(_CONTROL), expected=(DONE,)),
        Case(name="invalid bytes", workload=text(_BYTES), expected=(DONE,)),
        Case(name="right-to-left and combining text", workload=text(_RIGHT_TO_LEFT), expected=(DONE,)),
        Case(name="huge batch", workload=huge, expected=(REFUSED,)),
        Case(name="cancelled during prefill", workload=usual, expected=(CANCELLED,), leave="prefill"),
        Case(name="cancelled during decode", workload=usual, expected=(CANCELLED,), leave="decode"),
    ]


def _why_not(
    limit: int,
    max_positions: int | None,
    capacity: int | None,
    seconds_a_token: float,
    longest_s: float,
) -> str | None:
    if max_positions is None:
        return "this model names no limit"
    if limit < 1:
        return f"its {max_positions} positions leave no room for a prompt"
    if capacity is not None and max_positions > capacity:
        return f"KV cache for {max_positions} tokens does not fit into free memory ({capacity} do)"
    # Attention grows with the square: twice a straight line, as an estimate.
    seconds = 2 * limit * seconds_a_token
    if seconds > longest_s:
        return f"a prompt of {limit} tokens would take about {seconds:.0f} s; {longest_s:.0f} s are this plan's most"
    return None


def result(
    case: Case, answer: Answered | None, why: str | None, before: Sequence[int], after: Sequence[int] | None
) -> Result:
    """answer: None where the engine ended, for ``why``. before, after: the clean request's tokens."""
    state, reason = (ENDED, why) if answer is None else (answer.state, answer.reason)
    if answer is not None and answer.refused and reason is None:
        reason = answer.refused[0].reason
    right = after is not None and list(after) == list(before)
    begun = list(answer.tokens[0]) if answer is not None and case.leave and answer.tokens else []
    # What was made before the cancellation is the beginning of the whole answer.
    torn = bool(case.leave) and begun != list(before[: len(begun)])
    if torn:
        reason = "the tokens before the cancellation are not the answer's beginning"
    stated = state in case.expected and (state == DONE or bool(reason)) and not torn
    return Result(
        case=case.name,
        expected=list(case.expected),
        state=state,
        reason=reason,
        next_right=right,
        result=PASS if stated and right else FAIL,
        seconds=None if answer is None else round(answer.seconds, 2),
    )


def skipped(case: Case) -> Result:
    return Result(
        case=case.name,
        expected=list(case.expected),
        state=None,
        reason=case.not_tested,
        next_right=None,
        result=NOT_TESTED,
    )


def disconnected(seconds: float | None, before: Sequence[int], after: Sequence[int] | None) -> Result:
    """seconds: what the engine took to end by itself, after whoever asked was gone; None: it did not."""
    right = after is not None and list(after) == list(before)
    gone = seconds is not None
    return Result(
        case="disconnect",
        expected=[ENDED],
        state=ENDED if gone else "engine still runs",
        reason="by itself, in the middle of a request; a new one answered next" if gone else None,
        next_right=right,
        result=PASS if gone and right else FAIL,
        seconds=None if seconds is None else round(seconds, 2),
    )
