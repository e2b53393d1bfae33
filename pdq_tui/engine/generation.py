"""One request on a staged model: its cache, its padding, its positions, and what its stages cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdq_tui.core.kv import Stage
from pdq_tui.core.roofline import StageCost
from pdq_tui.engine import attention
from pdq_tui.engine.cancel import check
from pdq_tui.engine.kv import KvCache

if TYPE_CHECKING:
    from pdq_tui.engine.staged import StagedArm


class Generation:
    """One request: ``prefill`` once, ``handoff`` once, then ``step`` for every further token. Nothing synchronises."""

    def __init__(self, arm: StagedArm, cache: KvCache, batch: int, pad: Tensor | None) -> None:
        owner = arm.owner
        self._arm, self._cache, self._batch = arm, cache, batch
        self._pdq = owner.attention_name == "pdq"
        device = owner.device.torch_device
        self._pads: list[int] = [0] * batch if pad is None else [int(n) for n in pad.tolist()]
        self._pad = pad.to(device) if pad is not None and any(self._pads) else None
        self._call = owner.caller.logits
        self._rows = owner.pieces(arm.policy.kv)
        self._cuts: list[tuple[int, int]] = []
        self._decode = arm.view("decode", batch, batch)
        self._mask: Tensor | None = None
        with torch.inference_mode():
            if self._pad is None:
                # One row a sequence, as with padding: a compiled layer knows one shape.
                self._position = torch.zeros((batch, 1), dtype=torch.int64, device=device)
            else:
                self._position = -self._pad[:, None].to(torch.int64)
                self._mask = (
                    attention.decode_mask(self._pad, cache.capacity, owner.dtype)
                    if self._pdq
                    else (torch.arange(cache.capacity, device=device)[None, :] >= self._pad[:, None]).to(
                        torch.int64
                    )
                )
        cache.reset()
        cache.mask = self._mask

    @property
    def length(self) -> int:
        """Positions filled, padding included."""
        return self._cache.end

    @property
    def pieces(self) -> int:
        """In how many the last prompt went through the model."""
        return len(self._cuts)

    @torch.inference_mode()
    def prefill(self, ids: Tensor, cancelled: Callable[[], bool] = lambda: False) -> Tensor:
        """int64 [B, P], left-padded → logits [B, V] of the last position; fills the cache. ``cancelled`` is asked between
        the pieces of a long prompt. Raises Cancelled."""
        return self._prefill(ids, 1, cancelled)[:, -1]

    @torch.inference_mode()
    def score(self, ids: Tensor, keep: int) -> Tensor:
        """The same pass for judging: logits [B, keep, V] of the last ``keep`` positions."""
        return self._prefill(ids, keep, lambda: False)

    def _prefill(self, ids: Tensor, keep: int, cancelled: Callable[[], bool]) -> Tensor:
        B, P = ids.shape
        view = self._arm.view("prefill", self._rows.most(B * P), B * keep)
        self._cache.reset()
        self._cuts = self._rows.cut(B, P)
        logits = []
        for first, last in self._cuts:
            if first:
                check(cancelled)
            self._cache.advance(last - first)
            self._cache.activate()
            # Of a piece before those positions one is multiplied, since no model runs without its head.
            kept = max(1, last - max(first, P - keep))
            found = self._call(view.model, ids[:, first:last], *self._seen(first, last), self._cache, kept)
            if last > P - keep:
                logits.append(found)
        self._position.add_(P)
        return logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)

    def _seen(self, first: int, last: int) -> tuple[Tensor | None, Tensor]:
        """(mask, positions) of queries ``first`` to ``last`` over everything up to ``last``."""
        if self._pad is None:
            return None, torch.arange(first, last, device=self._position.device)[None, :]
        positions = attention.prefill_positions(self._pad, last)[:, first:]
        assert self._mask is not None
        if not self._pdq:
            return self._mask[:, :last], positions
        return attention.prefill_mask(self._pad, last, first), positions

    @torch.inference_mode()
    def handoff(self) -> None:
        """The cache becomes decode's: converted where the policy's [kv] says so, else nothing is done to it."""
        self._cache.handoff(self._pads)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """int64 [B] → logits [B, V] of the next position."""
        cache = self._cache
        cache.advance(1)
        cache.activate()
        mask = self._mask
        if mask is not None:
            mask = mask[..., : cache.end]
        logits = self._call(self._decode.model, tokens[:, None], mask, self._position, cache)
        self._position.add_(1)
        return logits[:, -1]

    def rewind(self, positions: int) -> None:
        """Forget all but the first ``positions`` of the cache; the next step follows them."""
        self._position.add_(positions - self._cache.end)
        self._cache.rewind(positions)

    # -- census --------------------------------------------------------------------------------------------------------

    def prefill_cost(self, P: int) -> StageCost:
        """Bytes and FLOPs of a prefill of P positions; those of padding are not counted."""
        view = self._arm.view("prefill", self._rows.most(self._batch * P), self._batch)
        return self._arm.owner.costs.prefill(
            view.placements,
            [P - pad for pad in self._pads],
            self._arm.policy.kv,
            [last for _, last in self._rows.cut(self._batch, P)],
        )

    def step_cost(self) -> StageCost:
        """Bytes and FLOPs of the next step, at the cache's current length."""
        length = self.length + 1
        contexts = [length - pad for pad in self._pads]
        return self._arm.owner.costs.step(self._decode.placements, contexts, length, self._arm.policy.kv)

    def bytes_per_step(self) -> int:
        return self.step_cost().bytes

    def bytes_per_step_wasted(self) -> int:
        return self.step_cost().wasted_bytes

    def kv_bytes(self) -> int:
        """Bytes that the request's positions take in the cache as it stands, padding included."""
        stage: Stage = "decode" if self._cache.decoding else "prefill"
        geometry = self._cache.shape.geometry
        return self._batch * geometry.sequence_bytes(self._cache.kv, stage, self.length)
