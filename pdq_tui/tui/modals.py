"""What the live screen's small questions offer: formats for a stage, the KV cache, a note."""

from __future__ import annotations

from typing import Final

from pdq_tui.core.policy import Policy, Stage, StagePolicy, natural_storage
from pdq_tui.tui.ask import Choice

_FORMATS: Final[tuple[tuple[StagePolicy, str], ...]] = (
    (StagePolicy(), "the model's own dtype"),
    (StagePolicy("int8"), "weight-only, a scale per channel"),
    (StagePolicy("int8", "int8"), "int8 arithmetic, a scale per token"),
    (StagePolicy("int4", "model", 64), "weight-only, groups of 64"),
    (StagePolicy("int4", "model", 32), "weight-only, groups of 32"),
    (StagePolicy("int4", "model", 128), "weight-only, groups of 128"),
)
#: Every format that p and d offer, by its label.
STAGES_BY_LABEL: Final[dict[str, StagePolicy]] = {stage.format.label: stage for stage, _ in _FORMATS}

KV_CHOICES: Final = (
    Choice("bf16", "the model's own dtype, both stages"),
    Choice("int8", refused="this version keeps the KV cache in the model's dtype"),
    Choice("fp8", refused="this version keeps the KV cache in the model's dtype"),
)
_NOTE_CHARACTERS: Final = 200


def stage_choices(policy: Policy, stage: Stage) -> list[Choice]:
    """The formats for ``stage`` of ``policy``, each with what it means for the bytes beside the other stage's."""
    other = policy.stage("decode" if stage == "prefill" else "prefill").format
    found = []
    for candidate, note in _FORMATS:
        fmt = candidate.format
        storage = {
            "uniform": "one copy",
            "shared": f"shares {other.label}'s bytes",
            "dual": f"second copy beside {other.label}",
        }[natural_storage(fmt, other)]
        found.append(Choice(fmt.label, f"{note}; {storage}"))
    return found


def check_note(text: str) -> str | None:
    """What is wrong with a snapshot's note, None if nothing is."""
    return f"at most {_NOTE_CHARACTERS} characters" if len(text) > _NOTE_CHARACTERS else None
