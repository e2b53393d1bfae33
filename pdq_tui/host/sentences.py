"""Events as lines of the event log: what a person is told, and how loudly."""

from __future__ import annotations

import signal
from typing import Any

from pdq_tui.core.energy import StageEnergy
from pdq_tui.core.evidence import flagged
from pdq_tui.core.protocol import (
    ArmReady,
    ArmRefused,
    ArmSwitched,
    Failure,
    GuardTripped,
    ModelReady,
    Note,
    RunEnded,
    SensorState,
    SnapshotSaved,
    TaskEnded,
    Traced,
    WorkerExited,
    WorkloadReady,
    WorkloadRefused,
)

#: (level, text, hint)
Line = tuple[str, str, str | None]


def lines(event: Any) -> list[Line]:
    """What to tell about one event; nothing for most."""
    match event:
        case Note():
            return [(event.level, event.text, event.hint)]
        case Failure(fatal=False):  # a fatal one is told by the worker's end
            return [("error", failure_sentence(event), event.hint)]
        case ArmReady():
            return _arm_ready(event)
        case ArmRefused():
            return [("error", f"arm {event.arm}: {event.policy} refused: {event.reason}", event.hint)]
        case ArmSwitched():
            text = f"arm switched to {event.arm} ({event.policy}) at request {event.at_request}"
            return [("info", text, None)]
        case ModelReady():
            return [("warn", note, None) for note in event.model.notes]
        case WorkloadReady():
            return _workload_ready(event)
        case WorkloadRefused():
            return [("error", f"workload refused: {event.reason}", event.hint)]
        case RunEnded(reason="budget"):  # of one that failed, the failure says why
            return [("warn", f"the run ended (budget) after {event.requests} requests", None)]
        case TaskEnded(cancelled=True):
            return [("info", f"{event.task} {event.label}: cancelled", None)]
        case TaskEnded(task="pack", ok=False):
            return []  # the refusal that follows says why, and the way out
        case TaskEnded(ok=False):
            return [("error", f"{event.task} {event.label}: {event.text or 'failed'}", None)]
        case SensorState():
            level = "info" if event.nvml in ("ok", "absent") else "warn"
            found: list[Line] = [(level, event.text, event.hint)] if event.text else []
            if event.nvml == "ok" and event.engine_gpu is None and event.engine_gpu_reason:
                found.append(("info", event.engine_gpu_reason, None))
            return found
        case GuardTripped():
            return [("error", event.text, None)]
        case SnapshotSaved():
            return [("info", f"snapshot {event.name} saved  {event.arm}  {event.path}", None)]
        case Traced():
            return _traced(event)
        case WorkerExited(expected=False):
            if event.role == "sensors" and event.replaced:
                return []
            tail = "; it is started again" if event.replaced else ""
            return [("warn" if event.role == "sensors" else "error", event.text + tail, event.hint)]
    return []


def _arm_ready(event: ArmReady) -> list[Line]:
    how = "resident" if event.resident else f"in {event.seconds:.1f} s"
    found: list[Line] = [("info", f"arm {event.arm}: {event.policy.name} ready ({how})", None)]
    found += [("warn", f"arm {event.arm}: {text}", None) for text in event.warnings]
    for fallback in event.fallbacks:
        more = f" and {fallback.modules - 1} more" if fallback.modules > 1 else ""
        text = (
            f"arm {event.arm}, {fallback.stage}: {fallback.module}{more} runs {fallback.used}, "
            f"not {fallback.wanted}: {fallback.reason}"
        )
        found.append(("warn", text, None))
    for stage, coverage in event.coverage.items():
        if not coverage.converted_parameters:
            continue  # a dense stage converts nothing, and means to
        left = [m for m in coverage.left if not m.module.endswith("lm_head")]
        if left:
            names = ", ".join(m.module for m in left[:3]) + (" …" if len(left) > 3 else "")
            modules = "module" if len(left) == 1 else "modules"
            text = f"arm {event.arm}, {stage}: {len(left)} {modules} left in the model's dtype ({names}): {left[0].reason}"
            found.append(("warn", text, None))
    return found


def _traced(event: Traced) -> list[Line]:
    if event.failed is not None:
        return [("warn", f"no trace of arm {event.arm}: {event.failed}", None)]
    where = f"saved in {event.path}" if event.path else f"not kept: {event.path_reason}"
    found: list[Line] = [("info", f"trace of arm {event.arm}, {event.events} events, {where}", None)]
    found += [("info", f"trace of arm {event.arm}: {note}", None) for note in event.notes]
    return [*found, *(("warn", text, None) for text in flagged(event.policy, event.stages))]


def _workload_ready(event: WorkloadReady) -> list[Line]:
    found: list[Line] = [("info", note, None) for note in event.notes]
    if event.refused:
        total = event.prompts + len(event.refused)
        first = event.refused[0]
        more = f" (and {len(event.refused) - 1} more)" if len(event.refused) > 1 else ""
        text = f"{event.prompts} of {total} prompts run; prompt {first.number}: {first.reason}{more}"
        found.append(("warn", text, None))
    return found


def energy_sentence(arm: str, taken: StageEnergy) -> tuple[str, str]:
    """(level, what a burst of stage-pure loops found)."""
    if taken.prefill_j is None and taken.decode_j is None:
        return "warn", f"no energy by stage of arm {arm}: {taken.reason}"
    each = (("prefill", taken.prefill_j, "prompt"), ("decode", taken.decode_j, "output"))
    text = ", ".join(f"{stage} {j:.3g} J a {token} token" for stage, j, token in each if j is not None)
    closes = (
        "" if taken.closure is None else f"; whole requests differ by {taken.closure:+.1%} from their stages"
    )
    return ("warn" if taken.flagged else "info"), f"energy of arm {arm} ({taken.source}): {text}{closes}"


def failure_sentence(failure: Failure) -> str:
    """A failure with its stage and, for memory, the wanted and the free bytes."""
    text = failure.message
    if failure.stage and failure.kind in ("oom", "device") and failure.stage not in text:
        text += f" in {failure.stage}"
    sizes = [
        f"{_size(value)} {word}"
        for value, word in ((failure.wanted_bytes, "wanted"), (failure.free_bytes, "free"))
        if value is not None
    ]
    return f"{text} ({', '.join(sizes)})" if sizes else text


def _size(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def exit_sentence(role: str, code: int | None, expected: bool, fatal: Failure | None, tail: str) -> str:
    """Why a worker is gone, in one sentence. ``code`` as subprocess gives it: negative is a signal."""
    if expected:
        return f"the {role} ended"
    if fatal is not None:
        return f"the engine had to be ended: {failure_sentence(fatal)}"
    last = tail.splitlines()[-1].strip() if tail else ""
    if code == -signal.SIGKILL:
        return f"the {role} was killed, probably out of memory"
    if any(word in tail for word in ("MemoryError", "std::bad_alloc", "not enough memory", "can't allocate")):
        return f"the {role} ran out of memory ({last})" if last else f"the {role} ran out of memory"
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the {role} crashed ({name})" + (f": {last}" if last else "")
    if code == 0:
        return f"the {role} ended without being asked"
    return f"the {role} ended with exit code {code}" + (f": {last}" if last else "")


def given_up(role: str, crashes: int, limit: int) -> str:
    """What is added where a worker is not replaced any more; nothing where it never would have been."""
    if role == "sensors":
        return "; its readings are n/a from here on"
    return f"; {crashes} times in a row, so it is not started again by itself" if crashes >= limit else ""
