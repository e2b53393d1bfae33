"""When an arm is to give way to the baseline: what the engine re-scored, what failed, and the limits.

Decides and no more: switching, journaling and telling are ``host.live``'s.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

from pdq_tui.core.protocol import Guarded, Request

Measure = Literal["kld", "nonfinite", "errors"]

#: Checks that a rolling mean needs, and requests that an error rate needs, before either decides.
LEAST_CHECKS: Final = 3
LEAST_REQUESTS: Final = 5


@dataclass(frozen=True)
class GuardLimits:
    """``every``: which requests are re-scored; 0: none, and nothing is guarded. ``kld``: nats, the most that the mean over
    the last ``window`` checks may be. ``errors``: the largest share of the last ``requests`` that may fail."""

    every: int = 0
    kld: float = 0.031
    window: int = 5
    errors: float = 0.05
    requests: int = 20

    @property
    def on(self) -> bool:
        return self.every > 0


@dataclass(frozen=True)
class Trip:
    """Which limit was passed, by what, at which request; ``words``: half a sentence."""

    measure: Measure
    value: float
    limit: float
    request: int
    words: str


class Watch:
    """What one arm did since it was last let go. Not safe for threads by itself."""

    def __init__(self, limits: GuardLimits) -> None:
        self.limits = limits
        self._klds: deque[float] = deque(maxlen=limits.window)
        self._failed: deque[bool] = deque(maxlen=limits.requests)

    def reset(self) -> None:
        self._klds.clear()
        self._failed.clear()

    @property
    def kld(self) -> float | None:
        """Mean of the last checks in nats, None before there is one."""
        return sum(self._klds) / len(self._klds) if self._klds else None

    def request(self, r: Request) -> Trip | None:
        """Logits that are not finite decide at once, failures by their share."""
        if r.warmup or r.cancelled:
            return None
        if r.nonfinite is not None:
            return Trip("nonfinite", 1, 0, r.request, r.invalid_reason or "logits are not finite")
        self._failed.append(not r.valid)
        share = sum(self._failed) / len(self._failed)
        if not r.valid and len(self._failed) >= LEAST_REQUESTS and share > self.limits.errors:
            failed = f"{sum(self._failed)} of the last {len(self._failed)} requests failed"
            return Trip(
                "errors",
                share,
                self.limits.errors,
                r.request,
                f"{failed}, the limit is {self.limits.errors:.0%}",
            )
        return None

    def checked(self, g: Guarded) -> Trip | None:
        if g.nonfinite:
            words = f"{g.nonfinite} logits are not finite in request {g.request}"
            return Trip("nonfinite", g.nonfinite, 0, g.request, words)
        if g.kld is None:
            return None
        self._klds.append(g.kld)
        mean = self.kld
        if (
            mean is not None
            and mean > self.limits.kld
            and len(self._klds) >= min(LEAST_CHECKS, self.limits.window)
        ):
            words = (
                f"KLD against the baseline is {mean:.3g} nats over the last {len(self._klds)} checks, "
                f"the limit is {self.limits.kld:g}"
            )
            return Trip("kld", mean, self.limits.kld, g.request, words)
        return None
