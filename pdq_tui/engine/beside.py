"""What of an arm is not as this machine could have it though every layer's format and kernel are: its decoder layers'
program, the kernel of its KV cache, its prompts' pieces. Each is told where the figures are; ``--hard`` refuses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdq_tui.engine import native

if TYPE_CHECKING:
    from pdq_tui.engine.staged import StagedArm, View


def fallbacks_beside(arm: StagedArm, views: dict[str, list[View]]) -> list[str]:
    """A sentence each. ``views``: by stage, those that the workload runs."""
    owner = arm.owner
    found = [
        f"the decoder layers of {stage} run one operator after the other, not as one program: {view.uncompiled}"
        for stage, made in views.items()
        for view in made
        if view.uncompiled is not None
    ]
    kernel, reason = owner.caches.kernel(arm.policy.kv)
    if reason is not None and native.loaded() is not None and owner.device.kind == "cpu":
        found.append(
            f"decode attention over {arm.policy.kv.label} runs {kernel}, not our own kernel: {reason}"
        )
    cover = arm.coverage["prefill"]
    if cover.rows is None and cover.rows_reason and owner.prefill_rows != 0:
        found.append(f"prompts run whole, not in pieces: {cover.rows_reason}")
    return list(dict.fromkeys(found))
