"""What a screen sees: one frozen picture of the session, taken on the screen's own timer.

``Session.view()`` builds it under the session's lock; nothing in it changes afterwards, so a slow terminal can take
as long as it likes while the reader threads go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdq_tui.core.energy import StageEnergy
from pdq_tui.core.policy import Policy
from pdq_tui.core.protocol import (
    ArmReady,
    DeviceInfo,
    Guarded,
    ModelInfo,
    Request,
    SensorSample,
    SensorState,
    Traced,
    WorkloadReady,
)
from pdq_tui.core.stats import Ratio, Summary

#: (seconds on the session's clock, value); None is a gap.
Point = tuple[float, float | None]


@dataclass(frozen=True)
class EngineView:
    """``state``: starting, loading, packing, ready, running, measuring, stalled, restarting, dead.

    ``text``: a sentence where there is something to say (why it is dead, what is missing); ``since_s``: for how many
    seconds the state has lasted (for "stalled": since the last sign of life).
    """

    state: str = "starting"
    text: str = ""
    since_s: float = 0.0
    pid: int | None = None
    restarts: int = 0


@dataclass(frozen=True)
class TaskView:
    task: str
    label: str
    done: float
    total: float | None
    unit: str
    seconds: float = 0.0


@dataclass(frozen=True)
class ArmView:
    """One arm. ``wanted`` is the policy asked for, ``ready`` what the engine really has; ``refused`` why they differ.

    ``stats`` and ``series`` are keyed by metric id (``core.metrics``) and belong to the policy and the workload that
    run now (``series`` goes further back). ``requests`` counts those in ``stats``; ``invalid_reason`` is the last one.
    """

    arm: str
    wanted: Policy | None = None
    ready: ArmReady | None = None
    refused: str | None = None
    pending: bool = False
    requests: int = 0
    first_use: int = 0
    invalid: int = 0
    invalid_reason: str | None = None
    stats: dict[str, Summary] = field(default_factory=dict)
    series: dict[str, tuple[Point, ...]] = field(default_factory=dict)
    last: Request | None = None


@dataclass(frozen=True)
class GuardView:
    """What the guard has seen of the arm that it watches. ``state``: "watching", "switched" (to the baseline), "stuck" (a
    limit was passed, and the baseline is not resident), "blind" (it is not, and nothing can be checked). ``text``: one
    sentence where there is something to say. ``last``: the newest check."""

    every: int
    limit: float
    state: str = "watching"
    text: str = ""
    checks: int = 0
    mean: float | None = None
    last: Guarded | None = None


@dataclass(frozen=True)
class EnergyView:
    """The last burst of stage-pure loops of an arm under the policy ``digest``, ``age_s`` seconds ago."""

    digest: str
    age_s: float
    taken: StageEnergy


@dataclass(frozen=True)
class NoteView:
    """A line of the event log. ``clock`` is wall time HH:MM:SS; ``level``: info, warn, error."""

    clock: str
    level: str
    text: str
    hint: str | None = None


@dataclass(frozen=True)
class SessionView:
    """``ratios``: metric id → A against B, live: words stand only from the planned looks on (``Ratio.provisional``).

    ``sensor_series`` keys: power_w, memory_used_bytes, gpu_util, temperature_c, sm_mhz, cpu_load, engine_load,
    engine_rss_bytes; a series that was never measured is not there. ``wants_loop``: the person asked for the loop,
    whether or not it can run yet (``running`` is what is). ``run_text``, ``journal_text``: to be shown as a banner.
    ``guard``: None where nothing is guarded.
    ``traces``: the last profiled burst an arm, of whatever policy it followed then (``Traced.policy_digest``), and how
    long ago it was. ``energy``: likewise, an arm; ``energy_missing``: why there is no counter to hold it against.
    """

    run_id: str
    run_dir: str
    elapsed_s: float
    engine: EngineView
    active: str
    interleave: bool
    running: bool
    tasks: tuple[TaskView, ...] = ()
    model: ModelInfo | None = None
    device: DeviceInfo | None = None
    workload: WorkloadReady | None = None
    workload_error: str | None = None
    arms: dict[str, ArmView] = field(default_factory=dict)
    ratios: dict[str, Ratio] = field(default_factory=dict)
    traces: dict[str, Traced] = field(default_factory=dict)
    trace_ages_s: dict[str, float] = field(default_factory=dict)
    energy: dict[str, EnergyView] = field(default_factory=dict)
    energy_missing: str | None = None
    sensor_state: SensorState | None = None
    sensors: SensorSample | None = None
    sensors_age_s: float | None = None
    sensor_series: dict[str, tuple[Point, ...]] = field(default_factory=dict)
    notes: tuple[NoteView, ...] = ()
    snapshots: tuple[str, ...] = ()
    live_tokens: int = 0
    live_stage: str = ""
    dropped: int = 0
    journal_text: str = ""
    run_text: str = ""
    wants_loop: bool = False
    garbage: int = 0
    notes_total: int = 0
    guard: GuardView | None = None
