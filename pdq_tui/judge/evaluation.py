"""The evaluation protocol: its steps (``judge.steps``) as a sitting (``judge.sitting``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdq_tui.core.policy import Policy
from pdq_tui.judge.plan import STEPS, Spec, Step
from pdq_tui.judge.sitting import SPEC as SPEC
from pdq_tui.judge.sitting import Sitting
from pdq_tui.judge.steps import DO


class Evaluation(Sitting[Spec]):
    """One evaluation in its directory."""

    command, what, kind, steps = "evaluate", "an evaluation", Spec, STEPS

    def do(self, step: Step) -> dict[str, Any]:
        return DO[step.name](self)

    def by_name(self, names: Sequence[str]) -> list[Policy]:
        return [policy for policy in self.spec.policies if policy.name in names]
