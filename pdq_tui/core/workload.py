"""What is run: lengths, batch, prompts, and the order in which the arms take their turns. Deterministic by seed.

Token ids are made by the engine, which owns the tokenizer; this module decides which texts, how long, in what order.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

PROMPT_SETS: Final = ("short", "long", "mixed")
CHAT_TEMPLATES: Final = ("auto", "none")
#: What a person can ask of the decoder layers: what the kernel table ranks first, or transformers' modules in any case.
LAYERS: Final = ("auto", "eager")
#: Prompt tokens of one pass, all rows together, that are made at all.
MOST_TOKENS: Final = 1 << 24
StopMode = Literal["fixed", "natural"]


class Workload(msgspec.Struct, frozen=True):
    """One workload. Its digest names it: two runs with one digest did the same work.

    prompt_tokens  exact prompt length in tokens for the built-in prompt sets; None: the prompt's own length.
    output_tokens  new tokens a request (the first comes from prefill).
    batch          requests a pass, left-padded to the longest.
    prompts        a built-in set's name ("short", "long", "mixed"), or "file" when ``texts`` or ``chats`` are given.
    texts          the user's own prompts (already read from a file), one a request.
    chats          the user's own chats: each a list of (role, content).
    chat_template  "auto": applied to ``chats`` and, for texts, not; "none": never.
    stop           "fixed": exactly output_tokens, EOS ignored and said so; "natural": stops at EOS.
    distinct       how many different prompts the built-in sets make before they repeat.
    """

    prompt_tokens: int | None = 512
    output_tokens: int = 64
    batch: int = 1
    prompts: str = "mixed"
    texts: tuple[str, ...] = ()
    chats: tuple[tuple[tuple[str, str], ...], ...] = ()
    chat_template: str = "auto"
    stop: StopMode = "fixed"
    seed: int = 0
    distinct: int = 8
    long_positions_ok: bool = False

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:12]


class Turn(msgspec.Struct, frozen=True):
    """One request's place in the interleaving. ``control`` marks the reference run again as its own rival (A/A)."""

    block: int
    slot: int
    arm: str
    control: bool = False


def block_turns(arms: Sequence[str], block: int, seed: int, control: bool = True) -> list[Turn]:
    """The turns of one block: a random permutation of the arms (and the control), then the same mirrored.

    Two arms give ABBA or BAAB, three ABC CBA: every contender stands at the same mean position, so that a linear
    drift cancels inside the block. The first arm is the reference; with ``control`` it takes part twice.
    """
    contenders = [(arm, False) for arm in arms] + ([(arms[0], True)] if control else [])
    rng = random.Random(f"{seed}:{block}")
    rng.shuffle(contenders)
    order = contenders + contenders[::-1]
    return [Turn(block, slot, arm, is_control) for slot, (arm, is_control) in enumerate(order)]


def turns(arms: Sequence[str], seed: int, control: bool = True) -> Iterator[Turn]:
    """Blocks without end."""
    block = 0
    while True:
        yield from block_turns(arms, block, seed, control)
        block += 1
