"""The way back, as tables of an evaluation's report."""

from __future__ import annotations

from pdq_tui.judge.rollback import Plan
from pdq_tui.report.page import Table


def limits_table(plan: Plan) -> Table:
    return Table(
        title=f"5. and back? Baseline {plan.baseline}: what sends traffic back to it",
        columns=["watched", "limit", "where the limit is from"],
        rows=[[limit.watched, limit.limit, limit.origin] for limit in plan.limits],
        left=3,
        footer=[
            "in the app `--guard K` watches the first three: every K-th request is re-scored by the resident baseline, which takes over",
            "the baseline stays deployed until the last hold is over; the steps back are those of the servers' tables",
        ],
    )


def ramp_table(plan: Plan) -> Table:
    return Table(
        title="5. and back? Share of traffic, and how long it stays there",
        columns=["share", "requests of the candidate", "and at least"],
        rows=[[f"{h.share:.0%}", f"≥ {h.requests}", _time(h.minutes)] for h in plan.ramp],
        footer=[
            "shares and times are a choice of this project; one limit passed at any share: all traffic goes back"
        ],
    )


def _time(minutes: int) -> str:
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:g} h"
