"""What an evaluation is about, how much of everything it takes, and the steps in their order with why each matters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pdq_tui.core.policy import Policy
from pdq_tui.core.protocol import Load
from pdq_tui.core.workload import Workload
from pdq_tui.judge.taskset import Task
from pdq_tui.judge.traffic import Shape


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``selection_blocks`` and ``blocks`` of the two runs. ``small_windows`` decide who is measured at all, ``windows``
    what is reported; each is ``window_tokens`` long (prefill path), or as many and ``new_tokens`` forced ones (decode).

    tasks              of the project's own, where the user gives none.
    concurrency        of the closed loops, rising; ``load_s`` seconds of arrivals each.
    rates              of the open loops, as shares of the best closed loop's throughput.
    soak_s             where the user names no other.
    longest_request_s  a single request of the abnormal inputs that would take longer is not sent, and said not to be.
    """

    name: str
    selection_blocks: int
    blocks: int
    small_windows: int
    windows: int
    window_tokens: int
    new_tokens: int
    longest_request_s: float
    tasks: int
    concurrency: tuple[int, ...]
    load_s: float
    rates: tuple[float, ...]
    soak_s: float
    keep_uniform: int = 3
    keep_staged: int = 2


PLANS: Final = {
    p.name: p
    for p in (
        Plan(
            name="quick",
            selection_blocks=3,
            blocks=10,
            small_windows=4,
            windows=8,
            window_tokens=256,
            new_tokens=24,
            longest_request_s=60.0,
            tasks=40,
            concurrency=(1, 2, 4),
            load_s=8.0,
            rates=(0.7,),
            soak_s=20.0,
        ),
        Plan(
            name="full",
            selection_blocks=6,
            blocks=30,
            small_windows=8,
            windows=24,
            window_tokens=512,
            new_tokens=128,
            longest_request_s=600.0,
            tasks=400,
            concurrency=(1, 2, 4, 8, 16, 32),
            load_s=60.0,
            rates=(0.5, 0.7, 0.85, 1.0),
            soak_s=600.0,
        ),
    )
}

#: The unquantized base first: every quality is against it.
BASE: Final = "bf16"
UNIFORM: Final = (BASE, "int8", "w8a8", "int4")
STAGED: Final = ("w8a8-prefill-int4-decode", "w8a8-prefill-int8-decode", "bf16-prefill-int4-decode")


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a resumed evaluation must not change. ``uniform[0]`` is the base. ``gate``: a preset's name.
    ``tasks``: what is asked, and ``tasks_name`` where it comes from; ``lm_tasks``: of lm-eval, names or YAML files.
    ``link_gbps``: GB/s between two pools of servers, where they were named."""

    model: str
    load: Load
    uniform: tuple[Policy, ...]
    staged: tuple[Policy, ...]
    workload: Workload
    traffic: tuple[Shape, ...]
    traffic_name: str
    plan: Plan
    gate: str
    min_effect: float
    seed: int = 0
    tasks: tuple[Task, ...] = ()
    tasks_name: str = "the project's own"
    lm_tasks: tuple[str, ...] = ()
    ttft_target_ms: float = 2000.0
    tpot_target_ms: float = 100.0
    soak_s: float | None = None
    link_gbps: float | None = None

    @property
    def base(self) -> Policy:
        return self.uniform[0]

    @property
    def policies(self) -> tuple[Policy, ...]:
        return (*self.uniform, *self.staged)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    why: str


STEPS: Final = (
    Step(
        name="conditions",
        title="Conditions",
        why="figures hold for this device, these versions and these kernels; who cannot run here is said before anything is measured",
    ),
    Step(
        name="bottleneck",
        title="Where the time goes",
        why="staging cannot gain more than the smaller stage's share; below the least effect that matters nothing else needs measuring",
    ),
    Step(
        name="selection",
        title="Who is worth confirming",
        why="the best of many looks better than it is: who is kept here is measured again on fresh data",
    ),
    Step(
        name="small_quality",
        title="Quality, small",
        why="a policy that answers otherwise need not be timed",
    ),
    Step(
        name="confirmation",
        title="Staged timing",
        why="the only timing that is reported: interleaved, with the reference as its own rival",
    ),
    Step(
        name="quality",
        title="Quality, held out",
        why="other windows than those that selected; along the answer, so that the guilty stage shows",
    ),
    Step(
        name="tasks",
        title="Task set",
        why="divergence does not rank near-lossless policies: answers that changed do, counted both ways",
    ),
    Step(
        name="load",
        title="Load",
        why="what holds for one request at a time need not hold for many: steps mix both stages, requests wait",
    ),
    Step(
        name="abnormal",
        title="Abnormal inputs",
        why="somebody will send them: each has to end in a stated way, and the next request has to be right",
    ),
    Step(
        name="soak",
        title="Soak",
        why="memory that grows, clocks that sink and numbers that go astray show only with time",
    ),
    Step(
        name="logs",
        title="Log analysis",
        why="what failed, was tried again or ran otherwise than asked for is counted, so that nobody has to have seen it",
    ),
)

#: What a whole protocol has, in a few words, and the step that tests it; None: this version does not.
RISKS: Final[dict[str, tuple[str, str | None]]] = {
    "task set": ("divergence does not rank near-lossless policies", "tasks"),
    "load": ("throughput under rising concurrency and its knee", "load"),
    "soak": ("hours of running: drift of time, memory and answers", "soak"),
    "abnormal inputs": ("empty, blank, too long, cancelled and broken requests", "abnormal"),
    "energy": ("needs a counter and windows of one stage", None),
}


def not_tested(found: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """By name of the risk: why it matters, of those that no finished step has looked at."""
    left: dict[str, str] = {}
    for name, (why, step) in RISKS.items():
        done = found.get(step) if step is not None else None
        if done is None:
            left[name] = why
        elif done.get("unsettled"):
            # A step that could not settle it leaves the risk open, for the reason that it names.
            left[name] = str(done["unsettled"])
    return left
