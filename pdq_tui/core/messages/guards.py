"""The guard: every k-th request of an arm is re-scored by the baseline, and what became of that."""

from __future__ import annotations

from pdq_tui.core.messages.base import Message


class Guard(Message):
    """Re-score every ``every``-th request of a running loop, of each arm but ``base``, by the arm ``base`` in one pass.
    0: none. Answered by a ``Guarded`` each, between two requests, and never inside a block. The arm that ``base`` names
    need not be ready: requests are not checked while it is not."""

    base: str
    every: int


class Guarded(Message):
    """One request that the baseline re-scored; never dropped.

    positions   tokens of the answer that were compared: its last ones, over the batch.
    kld         mean over them of Σ p_base · ln(p_base / p_arm) on the request's own tokens, in nats; None where logits
                are not finite, with ``reason``. kld_max: the largest of them.
    same_top1   share of positions at which the baseline would have said the same token next.
    nonfinite   logits of the arm, at these positions, that are NaN or infinite.
    seconds     that re-scoring took.
    """

    request: int
    arm: str
    policy: str
    policy_digest: str
    base: str
    base_policy: str
    positions: int = 0
    kld: float | None = None
    kld_max: float | None = None
    same_top1: float | None = None
    nonfinite: int = 0
    seconds: float = 0.0
    reason: str | None = None


class GuardTripped(Message):
    """A limit was passed. ``measure``: "kld" (rolling mean, nats), "nonfinite" (logits), "errors" (share of requests).
    ``switched``: whether requests go to the baseline from here on; else the baseline is not resident, and ``text`` says
    what making it ready takes. ``text``: the whole in one sentence."""

    arm: str
    policy: str
    base: str
    base_policy: str
    measure: str
    value: float
    limit: float
    request: int
    switched: bool
    text: str
