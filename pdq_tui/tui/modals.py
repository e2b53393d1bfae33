"""What the live screen's small questions offer: formats for a stage, a note."""

from __future__ import annotations

from typing import Final

from pdq_tui.core.formats import DEFAULT_GROUP, default_of, formats
from pdq_tui.core.policy import Policy, Stage, StagePolicy, natural_storage
from pdq_tui.tui.ask import Choice
from pdq_tui.tui.runnable import Refusal

#: Every format that p and d offer, by its label.
STAGES_BY_LABEL: Final[dict[str, StagePolicy]] = {
    fmt.label: StagePolicy(fmt.weights, fmt.activations, fmt.group_size)
    for fmt in formats((DEFAULT_GROUP, 32, 128))
    if not fmt.dense or fmt == default_of("bf16")
}

_NOTE_CHARACTERS: Final = 200


def stage_choices(policy: Policy, stage: Stage, refusal: Refusal) -> list[Choice]:
    """The formats for ``stage`` of ``policy``, each with what it means for the bytes beside the other stage's, or why it
    does not run on this device."""
    other = policy.stage("decode" if stage == "prefill" else "prefill").format
    found = []
    for label, candidate in STAGES_BY_LABEL.items():
        fmt = candidate.format
        storage = {
            "uniform": "one copy",
            "shared": f"shares {other.label}'s bytes",
            "nested": f"nested with {other.label}: one copy",
            "dual": f"second copy beside {other.label}",
        }[natural_storage(fmt, other)]
        found.append(Choice(label, f"{fmt.note}; {storage}", refusal(fmt)))
    return found


def check_note(text: str) -> str | None:
    """What is wrong with a snapshot's note, None if nothing is."""
    return f"at most {_NOTE_CHARACTERS} characters" if len(text) > _NOTE_CHARACTERS else None
