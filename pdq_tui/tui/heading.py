"""The live screen's first two lines, and how a terminal is drawn to: pure functions from the session's picture.

Foreign text (model, device, policy names, errors) goes through ``literal`` and is never parsed as markup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rich.cells import cell_len

from pdq_tui.core.metrics import format_bytes
from pdq_tui.core.policy import STAGES, Policy, Stage
from pdq_tui.host.view import ArmView, SessionView
from pdq_tui.tui.lines import ASCII, Part, Row, fit, literal
from pdq_tui.tui.rows import apart, clip, length

_TABLE = str.maketrans(ASCII)

Form = Literal["long", "short", "shortest"]
_FORMS: Final[tuple[Form, ...]] = ("long", "short", "shortest")


@dataclass(frozen=True)
class Look:
    """How this terminal is drawn to: ``plain`` is ASCII only."""

    plain: bool = False

    def own(self, text: str) -> str:
        """Our own words, with glyphs that the terminal has."""
        return text.translate(_TABLE) if self.plain else text

    def foreign(self, text: object) -> str:
        """Somebody else's words, literally; in ASCII what cannot be shown becomes ?."""
        shown = literal(text)
        return shown.encode("ascii", "replace").decode() if self.plain else shown


@dataclass(frozen=True)
class Display:
    """The display's own state, which the session does not know. ``first``: nobody has been here before."""

    frozen_s: float | None = None
    slow_fps: float | None = None
    fps: float = 2.0
    readonly: bool = False
    first: bool = False


def state_words(view: SessionView, display: Display, look: Look) -> Part:
    """The state in capitals with a mark, e.g. "● RUNNING", "! WORKER STALLED 12 s"."""
    if display.frozen_s is not None:
        return (f"! PAUSED +{display.frozen_s:.0f} s recorded", "bad")
    engine = view.engine
    if engine.state == "stalled":
        return (f"! WORKER STALLED {engine.since_s:.0f} s", "bad")
    if engine.state == "dead":
        return ("! ENGINE DEAD" if display.readonly else "! ENGINE DEAD (R restarts)", "bad")
    if display.slow_fps is not None:
        return (f"! LINK SLOW: {display.slow_fps:.0f} fps", "warn")
    if view.workload_error and not view.running:
        return ("! WORKLOAD REFUSED", "bad")
    mark = look.own("● " if view.running else "○ ")
    return (mark + engine.state.upper(), "mark" if view.running else "head")


def clock(seconds: float) -> str:
    whole = int(max(seconds, 0.0))
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def header(view: SessionView, display: Display, width: int, look: Look) -> Row:
    """Model, device, lengths, run, state, elapsed time, active arm, ABBA."""
    wide = width >= 110
    run = look.foreign(view.run_id.rsplit("-", 1)[-1])
    state = state_words(view, display, look)
    arms = _arm_choice(view)
    right: list[Part] = [
        ((f"run {run}  " if wide else f"{run} "), "dim"),
        state,
        (f" {clock(view.elapsed_s)}  " if wide else f" {clock(view.elapsed_s)[-5:]} ", ""),
        *((("arm ", "dim"),) if wide else ()),
        *arms,
        (
            "  ABBA " + ("on" if view.interleave else "off")
            if wide
            else (" ABBA" if view.interleave else ""),
            "",
        ),
        (("  read-only" if wide else " r/o") if display.readonly else "", "warn"),
        (" ", ""),
    ]
    lengths = f"  {_lengths(view, wide)} "
    room = max(width - length(right) - cell_len(lengths) - 6, 0)
    model = look.foreign(view.model.id) if view.model else "no model yet"
    device = look.foreign(_device_name(view)) if view.device else ""
    model_room = min(cell_len(model), max(room - min(cell_len(device) + 1, 14), 8))
    device_room = min(cell_len(device), room - model_room - 1)
    left: list[Part] = [(" pdq  ", "mark"), (fit(model, model_room), "head")]
    if device_room >= 4:
        left.append((f" {fit(device, device_room)}", ""))
    left.append((lengths, "dim"))
    return apart(left, right, width)


def _device_name(view: SessionView) -> str:
    device = view.device
    if device is None:
        return ""
    return device.name.replace("NVIDIA ", "")


def _lengths(view: SessionView, wide: bool) -> str:
    if view.workload is None:
        return "workload refused" if view.workload_error else "no workload yet"
    work, lengths = view.workload.workload, view.workload.lengths
    span = str(lengths[0]) if lengths and min(lengths) == max(lengths) else ""
    if lengths and not span:
        span = f"{min(lengths)}-{max(lengths)}"
    if wide:
        return f"in {span} out {work.output_tokens} bs {work.batch}"
    return f"in{span} out{work.output_tokens} bs{work.batch}"


def _arm_choice(view: SessionView) -> list[Part]:
    parts: list[Part] = []
    for arm in ("A", "B"):
        here = view.active == arm
        parts.append((f"[{arm}]" if here else f" {arm} ", arm.lower() if here else "dim"))
    return parts


def policy_line(view: SessionView, width: int, look: Look) -> Row:
    """Both arms' policies by stage, what the second copy of weights costs, and which arm is the reference: in the
    longest of three forms that fits."""
    half = width // 2
    words: list[str] = []
    for form in _FORMS[width < 110 :]:
        words = [arm_words(view.arms.get(arm), look, form, reference=arm == "B") for arm in ("A", "B")]
        words[0] = words[0].ljust(min(half - 3, width - 6 - cell_len(words[1])))
        if sum(map(cell_len, words)) + 6 <= width:
            break
    return clip(
        [
            part
            for arm, text in zip("AB", words, strict=True)
            for part in ((f" {arm} ", arm.lower()), (text, ""))
        ],
        width,
    )


def arm_words(arm: ArmView | None, look: Look, form: Form = "long", *, reference: bool = False) -> str:
    """What the arm does in each stage and with the KV cache (left out of "shortest"), and its state."""
    policy = wanted_policy(arm)
    if arm is None or policy is None:
        return "no policy"
    stages = [stage_word(policy, stage) for stage in STAGES]
    kv = f"kv {policy.kv.label}"
    if form == "long":
        text = " · ".join([*(f"{stage} {word}" for stage, word in zip(STAGES, stages, strict=True)), kv])
    else:
        text = "/".join([*stages, kv] if form == "short" else stages)
    text = look.own(text) + (" *" if policy.name.endswith("*") else "")
    notes = _notes(arm, form == "long")
    if reference:
        notes.append("reference" if form == "long" else "base")
    if not notes:
        return text
    return f"{text} ({', '.join(notes)})" if form == "long" else f"{text} {' '.join(notes)}"


def _notes(arm: ArmView, long: bool) -> list[str]:
    if arm.refused:
        return ["refused" if long else "(refused)"]
    if arm.pending:
        return ["packing" if long else "(packing)"]
    extra = arm.ready.weights.extra_bytes if arm.ready else 0
    if not extra:
        return []
    size = f"+{format_bytes(extra)}"
    return [f"{size} copy" if long else size.replace(" ", "")]


def wanted_policy(arm: ArmView | None) -> Policy | None:
    """What the arm is to do: what was asked for, unless that was refused."""
    if arm is None:
        return None
    if arm.ready is not None and (arm.refused or arm.wanted is None):
        return arm.ready.policy
    return arm.wanted


def stage_word(policy: Policy, stage: Stage) -> str:
    return policy.stage(stage).format.label
