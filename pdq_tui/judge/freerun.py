"""Two policies that answer freely: how far their answers agree, by measures that need no other model.

same         answers whose tokens are the base's, all of them.
chrF         character n-grams of 1 to 6, precision and recall averaged over the orders that either text has, F with β = 2,
             blanks left out (Popović, WMT 2015; what sacreBLEU calls chrF2|nc:6|nw:0|space:no). 1: the same text. It is a
             measure of surface: "no" against "not" is near, a paraphrase far.
divergence   the first token that is not the base's, counted from 1.
NLL          what the base itself thinks of the other answer: its mean negative log-likelihood per token of the policy's
             answer, minus that of its own, in nats. 0: it finds both as likely; +0.7: half as likely, token for token.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pdq_tui.core.stats import quantile
from pdq_tui.core.texts import Answers, compared_texts

Json = Mapping[str, Any]

ORDERS: Final = 6
BETA: Final = 2.0
_RESAMPLES: Final = 1000


class Mean(msgspec.Struct, frozen=True, kw_only=True):
    """Over ``n`` answers, with a bootstrap interval over them; None for none."""

    value: float | None
    ci95: tuple[float, float] | None
    n: int


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Of ``n`` answers. ``divergence``: median over those that part, None where none does or ids are not kept. ``least``:
    the id of the task whose answers are furthest apart by chrF."""

    n: int
    same: int
    chrf: Mean
    divergence: float | None
    nll: Mean
    least: str | None


def chrf(hypothesis: str, reference: str) -> float:
    """0 to 1."""
    a, b = ("".join(text.split()) for text in (hypothesis, reference))
    precisions, recalls = [], []
    for n in range(1, ORDERS + 1):
        mine, theirs = _grams(a, n), _grams(b, n)
        if mine and theirs:
            matched = (mine & theirs).total()
            precisions.append(matched / mine.total())
            recalls.append(matched / theirs.total())
    if not precisions:
        return 1.0 if a == b else 0.0
    precision, recall = statistics.fmean(precisions), statistics.fmean(recalls)
    if not precision + recall:
        return 0.0
    return (1 + BETA**2) * precision * recall / (BETA**2 * precision + recall)


def _grams(text: str, n: int) -> Counter[str]:
    return Counter(text[i : i + n] for i in range(len(text) - n + 1))


def agreement(base: Json, policy: Json, nll: Mapping[str, tuple[float, float]]) -> Agreement | None:
    """``base``, ``policy``: by task, as the step keeps them (``text``, and ``ids`` where there are such). ``nll``: by task,
    the base's for the policy's answer and for its own. None where no task was answered by both."""
    both = [t for t in base if t in policy]
    if not both:
        return None
    pairs = {t: pair(base, policy, t, n) for n, t in enumerate(both)}
    scores = {t: chrf(policy[t]["text"], base[t]["text"]) for t in both}
    parted = [float(p.token) for p in pairs.values() if p.token is not None]
    gaps = [nll[t][0] - nll[t][1] for t in both if t in nll]
    apart = [t for t in both if not pairs[t].same]
    return Agreement(
        n=len(both),
        same=sum(p.same for p in pairs.values()),
        chrf=_mean(list(scores.values())),
        divergence=statistics.median(parted) if parted else None,
        nll=_mean(gaps),
        least=min(apart, key=lambda t: scores[t]) if apart else None,
    )


def pair(base: Json, policy: Json, task: str, number: int) -> Answers:
    """Both answers to one task; ``number``: of the task, from 0."""
    a, b = base[task], policy[task]
    return compared_texts(number, (a["text"], b["text"]), (a.get("ids") or [], b.get("ids") or []))


def pairs(tasks: Json, policy: str) -> dict[str, Answers]:
    """By task id, in the order in which they were asked, of what a finished ``tasks`` step keeps."""
    answers = tasks.get("answers", {})
    base, other = answers.get(tasks.get("base", ""), {}), answers.get(policy, {})
    ids = [str(item["id"]) for item in tasks.get("items", [])]
    return {t: pair(base, other, t, n) for n, t in enumerate(ids) if t in base and t in other}


def _mean(values: Sequence[float]) -> Mean:
    if not values:
        return Mean(value=None, ci95=None, n=0)
    rng = random.Random(0)
    drawn = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    ci = (quantile(drawn, 0.025), quantile(drawn, 0.975)) if len(values) > 1 else None
    return Mean(value=statistics.fmean(values), ci95=ci, n=len(values))
