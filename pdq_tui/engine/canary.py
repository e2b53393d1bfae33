"""The same prompts again and again while a policy runs for hours: what it says of them must not move."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pdq_tui.core.protocol import Canary, Soak
from pdq_tui.engine.device import Device
from pdq_tui.engine.quality import divergence
from pdq_tui.engine.runner import Arm


class Canaries:
    """Holds minute 0's tokens and logits of ``prompts`` (int64 [1, P] each), and compares every later pass with them."""

    def __init__(self, device: Device, arm: Arm, prompts: Sequence[Tensor], command: Soak) -> None:
        self._device, self._arm, self._command = device, arm, command
        self._prompts = [ids.to(device.torch_device) for ids in prompts]
        self._forced: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._sha = ""
        self._number = 0
        self._begin = time.monotonic()

    @torch.inference_mode()
    def sing(self) -> Canary:
        """One pass over all prompts: minute 0's own tokens forced, so that positions stay comparable after a difference."""
        first = not self._logits
        said, klds, nonfinite, highest = hashlib.sha256(), [], 0, None
        for i, ids in enumerate(self._prompts):
            logits = self._pass(ids, None if first else self._forced[i])
            if first:
                self._forced.append(logits.argmax(-1))
                self._logits.append(logits)
            said.update((",".join(map(str, logits.argmax(-1).tolist())) + ";").encode("ascii"))
            finite = torch.isfinite(logits)
            nonfinite += int((~finite).sum())
            if bool(finite.any()):
                top = float(logits[finite].max())
                highest = top if highest is None else max(highest, top)
            if bool(finite.all()):
                p, q = (x.double().log_softmax(-1) for x in (self._logits[i], logits))
                klds.append(float(divergence(p, q).mean()))
        sha = said.hexdigest()
        if first:
            self._sha = sha
        self._number += 1
        return Canary(
            arm=self._arm.label,
            number=self._number,
            at_s=time.monotonic() - self._begin,
            tokens_sha256=sha,
            same=sha == self._sha,
            kld=max(klds) if len(klds) == len(self._prompts) else None,
            nonfinite=nonfinite,
            highest=highest,
        )

    def _pass(self, ids: Tensor, forced: Tensor | None) -> Tensor:
        """Logits float32 [N, V] behind the prompt and each of the first N − 1 tokens; greedy where none are forced."""
        N = self._command.canary_tokens
        generation = self._arm.staged.start(1, ids.shape[1] + N, None)
        rows = [generation.prefill(ids)[0].float().clone()]
        generation.handoff()
        for at in range(N - 1):
            token = rows[-1].argmax(-1) if forced is None else forced[at]
            rows.append(generation.step(token.reshape(1))[0].float().clone())
        return torch.stack(rows)
