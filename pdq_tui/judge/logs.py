"""What the journals say went wrong, was tried again, or ran otherwise than asked for: counted, each with its causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from pdq_tui.core import protocol as p

ERRORS: Final = "errors"
RETRIES: Final = "retries"
FALLBACKS: Final = "fallbacks"
THROTTLING: Final = "throttling"
MEMORY: Final = "out of memory"
REFUSALS: Final = "refusals"
LOST: Final = "lost messages"
KINDS: Final = (ERRORS, RETRIES, FALLBACKS, THROTTLING, MEMORY, REFUSALS, LOST)
#: Reasons of a limited clock that are not the machine's trouble.
_HARMLESS: Final = ("idle", "application", "sync boost", "display")
#: Sentences of a kind that differ only in numbers are told once; more of them than this are summed up.
_MOST_CAUSES: Final = 8


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """``causes``: (sentence, how often), the most frequent first."""

    kind: str
    count: int
    causes: list[tuple[str, int]]


class Logs:
    """Takes the events of one journal after the other."""

    def __init__(self) -> None:
        self._by: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        self._engines = 0
        self.events = 0

    def take(self, events: Iterable[Any], torn: int = 0, unknown: int = 0) -> None:
        """``torn``, ``unknown``: lines of this journal that could not be read."""
        engines, dropped = 0, {"engine": 0, "sensors": 0}
        fallbacks: dict[str, list[p.Fallback]] = {}
        for e in events:
            self.events += 1
            match e:
                case p.Failure():
                    self._add(MEMORY if e.kind == "oom" else ERRORS, e.message)
                case p.WorkerExited(expected=False):
                    self._add(ERRORS, e.text)
                case p.Request() if not e.valid:
                    self._add(ERRORS, f"request not valid: {e.invalid_reason}")
                case p.Answered(state="not finite"):
                    self._add(ERRORS, f"answer not finite: {e.reason}")
                case p.Served() if e.error is not None:
                    self._add(ERRORS, f"request under load: {e.error}")
                case p.Answered(state="refused"):
                    self._add(REFUSALS, e.reason or "no reason")
                case p.ArmRefused() | p.WorkloadRefused():
                    self._add(REFUSALS, e.reason)
                case p.ServeEnded():
                    self._add(RETRIES, "re-admitted after its cache was taken away", e.readmitted)
                case p.WorkerStarted(role="engine"):
                    engines += 1
                case p.ArmReady():
                    # An arm that was made ready again has the same fallbacks, not more of them.
                    fallbacks[e.arm] = list(e.fallbacks)
                case p.SensorSample():
                    for gpu in e.gpus:
                        for reason in gpu.throttle or () if gpu.engine else ():
                            if not any(word in reason.lower() for word in _HARMLESS):
                                self._add(THROTTLING, f"clock limited: {reason} (samples)")
                case p.Dropped():
                    dropped[e.role] = max(dropped.get(e.role, 0), e.count)
        for of in fallbacks.values():
            for f in of:
                self._by[FALLBACKS][f"{f.stage}: {f.wanted} ran as {f.used}: {f.reason}"] += f.modules
        # The first engine of a journal is its own; every journal after the first is one more start.
        self._engines += engines
        if engines > 1:
            self._add(RETRIES, "engine started again after a crash", engines - 1)
        for role, count in dropped.items():
            self._add(LOST, f"live samples of the {role} that nobody read in time", count)
        self._add(LOST, "torn lines of a journal", torn)
        self._add(LOST, "messages of an unknown type", unknown)

    def opened(self, sittings: int) -> None:
        """``sittings``: journals beyond the first; resumed evaluations, and the disconnect that was asked for."""
        self._add(RETRIES, "engine opened anew (resumed, or after a disconnect)", sittings)

    def _add(self, kind: str, cause: str, count: int = 1) -> None:
        if count:
            self._by[kind][cause] += count

    def counts(self) -> list[Count]:
        found = []
        for kind, causes in self._by.items():
            top = causes.most_common(_MOST_CAUSES)
            rest = causes.total() - sum(n for _, n in top)
            if rest:
                top.append(("other causes", rest))
            found.append(Count(kind=kind, count=causes.total(), causes=top))
        return found
