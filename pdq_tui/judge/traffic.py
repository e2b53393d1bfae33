"""What a team's requests look like: lengths of prompts and answers, and what share of time each stage has in them."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from pdq_tui.errors import UsageError


class Shape(msgspec.Struct, frozen=True):
    """``count`` requests of ``prompt`` and ``output`` tokens each."""

    prompt: int
    output: int
    count: int = 1


PRESETS: Final = {
    "chat": Shape(1024, 256),
    "rag": Shape(8192, 256),
    "agent": Shape(16384, 500),
    "reasoning": Shape(500, 8192),
    "summary": Shape(4096, 200),
}
_COLUMNS: Final = ("prompt_tokens", "output_tokens")


def read(word: str) -> list[Shape]:
    """A preset's name, or a CSV file with the columns prompt_tokens and output_tokens (more are passed over). Raises
    UsageError with the line that is not right."""
    if word in PRESETS:
        return [PRESETS[word]]
    path = Path(word).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--traffic: {word} is no preset and cannot be read ({error})", f"presets: {', '.join(PRESETS)}"
        ) from error
    rows = csv.DictReader(io.StringIO(text))
    lacks = [c for c in _COLUMNS if c not in (rows.fieldnames or ())]
    if lacks:
        raise UsageError(f"{path}: no column {', '.join(lacks)}", f"needs {' and '.join(_COLUMNS)}")
    tally: dict[tuple[int, int], int] = {}
    for row in rows:
        try:
            prompt, output = (int(row[c] or "") for c in _COLUMNS)
        except ValueError:
            prompt = output = 0
        if prompt < 1 or output < 1:
            raise UsageError(f"{path}, line {rows.line_num}: two whole numbers above 0 are needed")
        tally[prompt, output] = tally.get((prompt, output), 0) + 1
    if not tally:
        raise UsageError(f"{path} holds no request")
    return [Shape(p, n, c) for (p, n), c in sorted(tally.items())]


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a traffic by stage, in ms, and what that bounds.

    prefill      fraction of the time that is prefill; decode is the rest.
    most_gain    largest relative gain that a staged policy can have over the best uniform one: against a uniform it
                 differs in one stage at least, and at best that stage would take no time (Amdahl, AFIPS 1967).
    extrapolated whether lengths lie beyond those that were measured.
    """

    prefill_ms: float
    decode_ms: float
    prefill: float
    most_gain: float
    extrapolated: bool


def share(traffic: Sequence[Shape], prompt: int, output: int, ttft_ms: float, tpot_ms: float) -> Share:
    """From one measured point: TTFT in ms of ``prompt`` tokens, taken as linear in the prompt, and TPOT in ms, taken as
    constant. ``output``: the tokens that were measured."""
    prefill = sum(s.count * ttft_ms * s.prompt / prompt for s in traffic)
    decode = sum(s.count * tpot_ms * (s.output - 1) for s in traffic)
    whole = prefill + decode
    least = min(prefill, decode) / whole
    return Share(
        prefill_ms=prefill,
        decode_ms=decode,
        prefill=prefill / whole,
        most_gain=least / (1 - least),
        extrapolated=any(s.prompt != prompt or s.output > output for s in traffic),
    )
