"""From what the app has on its arms to an evaluation that runs beside it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.policy import Policy
from pdq_tui.core.protocol import Load
from pdq_tui.core.workload import Workload
from pdq_tui.errors import PdqError
from pdq_tui.host import begun, demo
from pdq_tui.judge.evaluation import Evaluation
from pdq_tui.judge.plan import PLANS, STAGED, UNIFORM, Spec
from pdq_tui.judge.traffic import Shape
from pdq_tui.judge.watching import PROGRESS, Mark


def make_spec(load: Load, arms: Iterable[Policy], workload: Workload, plan: str, min_effect: float) -> Spec:
    """The usual contenders and those on the arms; the workload itself is the traffic. Raises PdqError where prompts have
    no exact length."""
    if workload.prompt_tokens is None:
        raise PdqError(
            "an evaluation runs on the built-in prompts of an exact length", "start the app without --prompts"
        )
    uniform = {name: find_policy(name) for name in UNIFORM}
    staged = {name: find_policy(name) for name in STAGED}
    for policy in arms:
        (staged if policy.staged else uniform).setdefault(policy.name, policy)
    return Spec(
        model=load.model,
        load=load,
        uniform=tuple(uniform.values()),
        staged=tuple(staged.values()),
        workload=workload,
        traffic=(Shape(workload.prompt_tokens, workload.output_tokens),),
        traffic_name="the workload itself",
        plan=PLANS[plan],
        gate="standard",
        min_effect=min_effect,
        seed=workload.seed,
    )


def begin(spec: Spec, folder: Path) -> tuple[Path, subprocess.Popen[bytes]]:
    """A new evaluation in ``folder``, running. Raises PdqError. For a thread: the demo model may have to be looked up."""
    if spec.load.model == "demo" and spec.load.source is None:
        source = demo.fetch(lambda *_: None, lambda: False)
        spec = msgspec.structs.replace(spec, load=msgspec.structs.replace(spec.load, source=str(source)))
    place = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    Evaluation.create(spec, place)
    return place, go_on(place)


def go_on(place: Path) -> subprocess.Popen[bytes]:
    """What is not done of the evaluation in ``place``. Raises PdqError."""
    child = begun.begin(["evaluate", "--resume", "--dir", str(place)], place / PROGRESS)
    # It imports for seconds before it says so itself, and nothing may run beside it from now on.
    Mark(place, child.pid).step("starting", None)
    return child
