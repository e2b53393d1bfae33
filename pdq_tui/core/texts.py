"""What two arms answered to the same prompts, and where the answers part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from pdq_tui.core.arms import timed
from pdq_tui.core.protocol import Request


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """Two answers to one prompt, of the first request of each; of a batch its first row.

    ``token`` counts from 1: the first that is not the other's, or that the other does not have. None where they are the
    same, and where token ids were not recorded (``recorded``). ``at``: characters that both texts begin with; None where
    the texts are equal. ``tokens``: how many each has.
    """

    prompt: int
    reference: str
    value: str
    same: bool
    recorded: bool
    token: int | None = None
    at: int | None = None
    tokens: tuple[int, int] | None = None

    @property
    def common(self) -> str:
        """What both texts begin with."""
        return self.reference if self.at is None else self.reference[: self.at]

    @property
    def rests(self) -> tuple[str, str]:
        """What each goes on with behind that."""
        return self.reference[len(self.common) :], self.value[len(self.common) :]

    @property
    def word(self) -> str:
        """ "first divergence: token 12 of 64"."""
        if self.same:
            return "the same answer"
        if self.token is None:
            where = "" if self.at is None else f": character {self.at + 1}"
            return f"first divergence{where} (token ids were not recorded)"
        short, long = min(self.tokens or (0, 0)), max(self.tokens or (0, 0))
        if self.token > short:
            return f"one ends after token {short}, the other after {long}"
        text = "" if self.at is not None else ", the text is the same"
        return f"first divergence: token {self.token} of {short if short == long else f'{short} and {long}'}{text}"


def compared_answers(reference: Sequence[Request], candidate: Sequence[Request]) -> list[Answers]:
    """One a prompt that both answered, in the order of the prompts, of the requests that count. Answers without a text
    are left out."""
    one, two = _first(reference), _first(candidate)
    return [_compared(one[n], two[n]) for n in sorted(one.keys() & two.keys())]


#: A request, and the ids of its first row; none where they were not recorded.
_Answer = tuple[Request, Sequence[int]]


def _first(requests: Sequence[Request]) -> dict[int, _Answer]:
    # Stored requests carry ids only where an answer is first written (``store.series``).
    ids = {r.tokens_sha256: r.token_ids for r in requests if r.token_ids and r.tokens_sha256}
    found: dict[int, _Answer] = {}
    for r in timed(requests):
        if r.text is not None and r.prompt not in found:
            found[r.prompt] = r, r.token_ids or ids.get(r.tokens_sha256 or "", [])
    return found


def _compared(one: _Answer, two: _Answer) -> Answers:
    (a, _), (b, _) = one, two
    return compared_texts(a.prompt, (a.text or "", b.text or ""), (one[1], two[1]))


def compared_texts(prompt: int, texts: tuple[str, str], ids: tuple[Sequence[int], Sequence[int]]) -> Answers:
    """Two answers to the prompt of this number; ``ids``: their tokens, none where they were not recorded."""
    left, right = texts
    recorded = all(ids)
    # A digest is of all rows of a batch; ids and text are of its first.
    same = ids[0] == ids[1] if recorded else left == right
    return Answers(
        prompt=prompt,
        reference=left,
        value=right,
        same=same,
        recorded=recorded,
        token=_common(*ids) + 1 if recorded and not same else None,
        at=None if left == right else _common(left, right),
        tokens=(len(ids[0]), len(ids[1])) if recorded else None,
    )


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
