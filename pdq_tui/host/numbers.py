"""The live figures: which requests they rest on, and computing them without making the screen wait.

A figure costs microseconds with a few requests and milliseconds with thousands. While it is cheap it is computed when
a picture is asked for; once it is not, a thread of its own does it, at most a small share of the time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdq_tui.core.arms import arm_stats
from pdq_tui.core.comparable import runners_differ
from pdq_tui.core.pairs import ratios
from pdq_tui.core.protocol import ArmReady, DeviceInfo, ModelInfo, Request
from pdq_tui.core.stats import Ratio, Summary

#: Newest requests of one arm that its live summaries rest on.
STATS_REQUESTS: Final = 400
#: Blocked requests that the live ratios rest on, from the first on: planned looks must not move.
RATIO_REQUESTS: Final = 2400
INLINE_S: Final = 0.002
#: The thread computes at most one part in this many of the time.
SHARE: Final = 40


@dataclass(frozen=True)
class Figures:
    """``stats`` by arm and metric; ``ratios`` by arm (never the reference) and metric."""

    stats: dict[str, dict[str, Summary]] = field(default_factory=dict)
    ratios: dict[str, dict[str, Ratio]] = field(default_factory=dict)


@dataclass
class _Input:
    stats: dict[str, list[Request]]
    blocked: list[Request]
    device: DeviceInfo | None
    model: ModelInfo | None
    arms: Mapping[str, ArmReady]


class Numbers:
    """Collects requests and keeps ``Figures`` up to date. Not thread-safe by itself: its owner's lock guards
    ``add``, ``forget`` and ``snapshot``; ``compute`` needs no lock."""

    def __init__(self, reference: str, min_effect: float) -> None:
        self.reference = reference
        self.min_effect = min_effect
        self._recent: dict[str, deque[Request]] = {}
        self._blocked: list[Request] = []

    def add(self, request: Request) -> None:
        self._recent.setdefault(request.arm, deque(maxlen=STATS_REQUESTS)).append(request)
        if request.block is not None and len(self._blocked) < RATIO_REQUESTS:
            self._blocked.append(request)

    def forget(self, arm: str | None = None) -> None:
        """What was measured no longer describes ``arm`` (None: any arm): a new policy, or a new workload."""
        if arm is None:
            self._recent.clear()
        else:
            self._recent.pop(arm, None)
        # A ratio joins two arms: one that changed starts it anew for both.
        self._blocked.clear()

    def snapshot(
        self, device: DeviceInfo | None, model: ModelInfo | None, arms: Mapping[str, ArmReady]
    ) -> _Input:
        return _Input({a: list(r) for a, r in self._recent.items()}, list(self._blocked), device, model, arms)

    def compute(self, given: _Input) -> Figures:
        stats = {a: arm_stats(r, given.device, given.model) for a, r in given.stats.items()}
        return Figures(stats, self._ratios(given))

    def _ratios(self, given: _Input) -> dict[str, dict[str, Ratio]]:
        arms: Sequence[str] = list(dict.fromkeys(r.arm for r in given.blocked))
        if self.reference not in arms or len(arms) < 2:
            return {}
        rows = ratios(
            given.blocked,
            self.reference,
            arms,
            self.min_effect,
            provisional=True,
            device=given.device,
            model=given.model,
            conditions={a: runners_differ(given.arms, self.reference, a) for a in arms},
        )
        found: dict[str, dict[str, Ratio]] = {}
        for row in rows:
            found.setdefault(row.arm, {})[row.metric] = row
        return found


class Refresher:
    """Runs ``job`` in the caller's thread while it is cheap, else in a thread of its own. ``job`` takes its locks
    itself and computes outside of them."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._cost_s = 0.0
        self._not_before = 0.0
        self._wanted = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def refresh(self) -> None:
        """Called when a picture is asked for and something changed."""
        if self._cost_s <= INLINE_S:
            self._timed()
            return
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="figures", daemon=True)
            self._thread.start()
        self._wanted.set()

    def close(self) -> None:
        self._closed = True
        self._wanted.set()

    def _timed(self) -> None:
        began = time.perf_counter()
        self._job()
        self._cost_s = time.perf_counter() - began

    def _run(self) -> None:
        while self._wanted.wait() and not self._closed:
            self._wanted.clear()
            self._timed()
            time.sleep(min(self._cost_s * SHARE, 5.0))
