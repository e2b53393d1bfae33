"""The way back: against which baseline, at which limits, and in which steps traffic is moved.

Limits are those of the evaluation where it has them. Shares and holds are a choice of this project, and named so: a hold
is as many requests of the candidate as an unseen failure rate needs to be excluded, and no shorter than a time in which
caches, memory and other traffic change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pdq_tui.judge.plan import Spec
from pdq_tui.judge.quality import GATES
from pdq_tui.judge.verdict import Verdict

Json = Mapping[str, Any]

#: Share of traffic → the shortest hold in minutes: a batch of requests, a busy hour, a busy half-day, a day and a night.
RAMP: Final = {0.01: 30, 0.05: 60, 0.25: 240, 1.0: 1440}
#: The largest share of requests that may fail.
ERRORS: Final = 0.01
#: No failure among n requests excludes a rate of 3/n at 95 %.
_RULE_OF_THREE: Final = -math.log(0.05)


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """What is watched, above what traffic goes back, and where the number is from."""

    watched: str
    limit: str
    origin: str


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """``requests`` of the candidate have to have ended, and ``minutes`` to have passed, before the next share."""

    share: float
    requests: int
    minutes: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    baseline: str
    limits: list[Limit]
    ramp: list[Hold]


def plan(spec: Spec, found: Mapping[str, Json], v: Verdict) -> Plan | None:
    """None while there is neither a policy to move to nor one to go back to."""
    timing = found.get("confirmation", {})
    baseline = timing.get("reference")
    if v.staged is None or baseline is None:
        return None
    requests = math.ceil(_RULE_OF_THREE / ERRORS)
    ramp = [Hold(share=share, requests=requests, minutes=minutes) for share, minutes in RAMP.items()]
    limits = [
        Limit(
            watched="requests that fail",
            limit=f"more than {ERRORS:.0%} of the candidate's",
            origin=f"a choice of this project; {requests} requests without one exclude it at 95 %",
        ),
        Limit(watched="logits that are not finite", limit="any", origin="one is an error of arithmetic"),
        Limit(
            watched="KLD of answers re-scored by the baseline",
            limit=f"mean above {GATES[spec.gate]:g} nats",
            origin=f"the quality gate ({spec.gate}) of this evaluation",
        ),
        *_times(timing, baseline),
        Limit(
            watched="memory, and time per token, over the hold",
            limit="a slope whose interval excludes 0 and comes to more than 1 %",
            origin="as in the soak",
        ),
    ]
    return Plan(baseline=baseline, limits=limits, ramp=ramp)


def _times(timing: Json, baseline: str) -> list[Limit]:
    """A candidate that is no faster than the baseline has nothing to stay for."""
    arm = next((a for a in timing.get("arms", []) if a["label"] == baseline), None)
    found = []
    for stage, key, name in (("prefill", "ttft_ms", "TTFT"), ("decode", "tpot_ms", "TPOT")):
        value = ((arm or {}).get(stage) or {}).get(key) or {}
        if value.get("median") is not None:
            found.append(
                Limit(
                    watched=f"{name}, median of each hold",
                    limit=f"above the baseline's beside it ({value['median']:.1f} ms here)",
                    origin="measured here, by this engine: on a server its own baseline's figure stands in",
                )
            )
    return found
