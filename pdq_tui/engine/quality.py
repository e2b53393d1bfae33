"""How far a policy's answers are from the base's: Kullback-Leibler divergence per position, over the full vocabulary, by
the very views that are timed.

Prefill path: one pass over a window, its second half compared, as llama-perplexity does (ggml-org/llama.cpp). Decode path:
the prompt under the prefill policy, then forced tokens one at a time under the decode policy, through the handed-off
cache; so the error of a cheap prefill is seen along the answer, and that of a cheap decode as it grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from pdq_tui.core.protocol import Score, Scored
from pdq_tui.engine.device import Device
from pdq_tui.engine.runner import Arm
from pdq_tui.engine.windows import digest

#: Rows of logits that are turned into float64 at once: a row is a vocabulary.
_ROWS: Final = 32


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KLD of q to p by row, in nats: log-probabilities [n, V] each → [n]. A token that p rules out adds nothing, also where q
    rules it out as well."""
    terms = torch.where(p == -math.inf, 0.0, p.exp() * (p - q))
    return terms.sum(-1).clamp_min(0)  # rounding may leave −1e-18


@dataclass
class _Values:
    """Per compared position."""

    kld: list[float | None] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    nll: list[float | None] = field(default_factory=list)
    base_nll: list[float | None] = field(default_factory=list)

    def add(self, base: Tensor, arm: Tensor, forced: Tensor) -> None:
        """base, arm: logits [n, V] of the same positions; forced: int64 [n], the token that follows."""
        for at in range(0, len(forced), _ROWS):
            rows = slice(at, at + _ROWS)
            p, q = (x[rows].double().log_softmax(-1) for x in (base, arm))
            token = forced[rows, None]
            self.kld += _finite(divergence(p, q))
            self.same += (base[rows].argmax(-1) == arm[rows].argmax(-1)).tolist()
            self.nll += _finite(-q.gather(-1, token)[:, 0])
            self.base_nll += _finite(-p.gather(-1, token)[:, 0])


def _finite(values: Tensor) -> list[float | None]:
    return [v if math.isfinite(v) else None for v in values.tolist()]


class Judge:
    """Scores windows of several arms against the base. What the base says of a window is made once and held for that
    window only: kept logits of many windows would be larger than the model."""

    def __init__(self, device: Device, base: Arm, arms: Sequence[Arm], command: Score) -> None:
        self._device, self._base, self._arms, self._command = device, base, arms, command

    def score(self, windows: Sequence[Tensor]) -> Iterator[Scored]:
        """windows: int64 [prompt_tokens (+ new_tokens)] each → one result a window and arm, arm by arm, for ``batch``
        windows at a time. A last group that is not full is filled with its own last window, whose results are dropped.
        """
        batch = max(1, self._command.batch)
        for first in range(0, len(windows), batch):
            group = list(windows[first : first + batch])
            filled = group + group[-1:] * (batch - len(group))
            yield from self._group(first, len(group), torch.stack(filled).to(self._device.torch_device))

    def _group(self, number: int, rows: int, ids: Tensor) -> Iterator[Scored]:
        """ids int64 [B, T], of which the first ``rows`` count."""
        command = self._command
        # No inference_mode over the whole: between two yields other code runs.
        with torch.inference_mode():
            if command.path == "prefill":
                first = ids.shape[1] // 2
                forced = ids[:, first + 1 :]
                base = self._pass(self._base, ids, ids.shape[1] - first)
            else:
                first = 0
                prompt = ids[:, : command.prompt_tokens]
                if command.forced == "text":
                    forced = ids[:, command.prompt_tokens :]
                    base = self._forced(self._base, prompt, forced)
                else:
                    base, forced = self._sampled(prompt, number)
        for arm in self._arms:
            with torch.inference_mode():
                if command.path == "prefill":
                    ours = self._pass(arm, ids, ids.shape[1] - first)
                else:
                    ours = self._forced(arm, prompt, forced)
                found = [
                    self._scored(arm, number + i, first, base[i], ours[i], forced[i], digest(ids[i]))
                    for i in range(rows)
                ]
            yield from found

    def _scored(
        self, arm: Arm, window: int, first: int, base: Tensor, ours: Tensor, forced: Tensor, text: str
    ) -> Scored:
        """base, ours: logits [n, V]; forced: int64 [n]."""
        values, command = _Values(), self._command
        values.add(base, ours, forced)
        return Scored(
            arm=arm.label,
            base=command.base,
            policy=arm.policy.name,
            policy_digest=arm.policy.digest,
            path=command.path,
            forced=command.forced if command.path == "decode" else "text",
            window=window,
            first=first,
            kld=values.kld,
            same_top1=values.same,
            nll=values.nll,
            base_nll=values.base_nll,
            text_sha256=text,
        )

    def _pass(self, arm: Arm, ids: Tensor, keep: int) -> Tensor:
        """Logits [B, keep − 1, V] of one prefill pass: of the last ``keep`` positions without the very last, which
        nothing follows."""
        generation = arm.staged.start(ids.shape[0], ids.shape[1], None)
        return generation.score(ids, keep)[:, :-1]

    def _forced(self, arm: Arm, prompt: Tensor, forced: Tensor) -> Tensor:
        """Logits [B, N, V]: the prompt's last position, then after each of the first N − 1 forced tokens."""
        generation = arm.staged.start(prompt.shape[0], prompt.shape[1] + forced.shape[1], None)
        rows = [generation.prefill(prompt).clone()]
        generation.handoff()
        rows += [generation.step(forced[:, at].contiguous()).clone() for at in range(forced.shape[1] - 1)]
        return torch.stack(rows, dim=1)

    def _sampled(self, prompt: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """What the base says at temperature 1, and its logits on the way: [B, N, V] and int64 [B, N]. Each window has a
        seed of its own, so that its sample does not depend on the batch."""
        B, P = prompt.shape
        N = self._command.new_tokens
        seeded = [
            torch.Generator().manual_seed(self._command.seed * 1_000_003 + number + i) for i in range(B)
        ]
        generation = self._base.staged.start(B, P + N, None)
        rows = [generation.prefill(prompt).clone()]
        generation.handoff()
        tokens: list[Tensor] = []
        while True:
            shares = rows[-1].float().softmax(-1).cpu()
            drawn = [
                torch.multinomial(share, 1, generator=g) for share, g in zip(shares, seeded, strict=True)
            ]
            tokens.append(torch.cat(drawn).to(prompt.device))
            if len(tokens) == N:
                return torch.stack(rows, dim=1), torch.stack(tokens, dim=1)
            rows.append(generation.step(tokens[-1]).clone())
