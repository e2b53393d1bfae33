"""What an arm said, held against what the baseline would have said: one pass of the baseline over the request's own tokens.

The arm's logits are kept while the request runs, outside its timed steps, so that what is judged is what was answered.
Of a long answer the last positions alone are kept: a whole one of a large vocabulary would not fit beside the model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from pdq_tui.core.protocol import Guarded, Request
from pdq_tui.engine import faults
from pdq_tui.engine.device import Device
from pdq_tui.engine.prompts import Batch
from pdq_tui.engine.quality import divergence
from pdq_tui.engine.runner import Arm

#: Tokens of an answer that are compared at most: its last ones, where the error of a decode has grown largest.
POSITIONS: Final = 128
#: Rows of logits that are turned into float64 at once: a row is a vocabulary.
_ROWS: Final = 32


class Kept:
    """Of one request: the logits [B, V] that chose each of its last tokens, and all its tokens."""

    def __init__(self, positions: int = POSITIONS) -> None:
        self._logits: deque[tuple[int, Tensor]] = deque(maxlen=positions)
        self.rows: list[list[int]] = []

    def logits(self, number: int, logits: Tensor) -> None:
        """For ``Hooks.logits``. A copy of their own dtype: nothing is rounded."""
        self._logits.append((number, logits.clone()))

    def tokens(self, rows: list[list[int]], _highest: float) -> None:
        """For ``Hooks.kept``."""
        self.rows = rows

    def compared(self) -> tuple[int, Tensor]:
        """The place of the first token whose logits were kept, and those of all from there on, [B, n, V]. Steps behind
        the last row's end, which an asynchronous stop may have made, are no part of the answer."""
        made = max((len(row) for row in self.rows), default=0)
        kept = [(number, logits) for number, logits in self._logits if number < made]
        return kept[0][0], torch.stack([logits for _, logits in kept], dim=1)


def rescore(
    device: Device, arm: Arm, base: Arm, batch: Batch, capacity: int, kept: Kept, record: Request
) -> Guarded:
    """``batch``, ``capacity``: those of the request that ``kept`` and ``record`` are of. Where the pass does not fit into
    memory that is the reason for having no figure."""
    begin = time.monotonic()
    found = Guarded(
        request=record.request,
        arm=arm.label,
        policy=record.policy,
        policy_digest=record.policy_digest,
        base=base.label,
        base_policy=base.policy.name,
    )
    try:
        _compare(device, base, batch, capacity, kept, found)
    except (RuntimeError, MemoryError) as error:
        if faults.kind_of(error) != "oom":
            raise
        found.reason = "re-scoring it does not fit into memory"
    found.seconds = time.monotonic() - begin
    return found


@torch.inference_mode()
def _compare(device: Device, base: Arm, batch: Batch, capacity: int, kept: Kept, found: Guarded) -> None:
    first, ours = kept.compared()
    n = ours.shape[1]
    theirs = _logits(device, base, batch, capacity, kept.rows, first + n, n)
    # Rows end at different places; what stands behind a row's end is no answer.
    counts = torch.tensor([[first + i < len(row) for i in range(n)] for row in kept.rows], device=ours.device)
    p, q = theirs[counts], ours[counts]
    found.positions = len(q)
    found.nonfinite = int((~torch.isfinite(q)).sum())
    found.same_top1 = float((p.argmax(-1) == q.argmax(-1)).double().mean())
    if found.nonfinite:
        found.reason = "logits are not finite"
        return
    both = zip(torch.split(p, _ROWS), torch.split(q, _ROWS), strict=True)
    values = torch.cat([divergence(*(x.double().log_softmax(-1) for x in rows)) for rows in both])
    if not bool(torch.isfinite(values).all()):
        found.reason = "the divergence is not finite: the baseline's own logits are broken"
        return
    found.kld, found.kld_max = float(values.mean()), float(values.max())


def _logits(
    device: Device,
    base: Arm,
    batch: Batch,
    capacity: int,
    rows: Sequence[Sequence[int]],
    made: int,
    keep: int,
) -> Tensor:
    """The baseline's [B, keep, V] at the positions that chose the last ``keep`` of the first ``made`` tokens, in one prefill pass over prompt and
    answer."""
    answer = torch.zeros((len(rows), made - 1), dtype=batch.ids.dtype)
    for i, row in enumerate(rows):
        part = row[: made - 1]
        answer[i, : len(part)] = torch.tensor(part, dtype=batch.ids.dtype)
    ids = torch.cat([batch.ids, answer], dim=1).to(device.torch_device)
    pad = batch.pad.to(device.torch_device) if batch.pad is not None else None
    generation = base.staged.start(batch.rows, max(capacity, ids.shape[1]), pad)
    return generation.score(ids, keep)
