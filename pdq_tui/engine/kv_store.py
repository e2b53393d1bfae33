"""Where keys and values lie: one set of buffers for layers of one kind, allocated once, written in place.

Layout of each part of a format: [layers, 2, batch, kv_heads, slots, width], so that one head's keys lie together and a
decode step reads them in order. A layer that slides over fewer positions than a request may have gets that many slots,
and position p lies in slot p mod slots: what leaves the window is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdq_tui.engine import kv_native
from pdq_tui.engine.kv_formats import Channels, Codec, Plain

#: Positions that are encoded at once: rows are widened to float32 meanwhile.
ENCODE_BLOCK: Final = 1024


class KvStore:
    """``layers`` layers of ``slots`` positions each, held as ``codec`` says. ``dtype``: the model's.

    own_kernel  our own CPU kernels read and write it; torch's operators do where not.
    """

    def __init__(
        self,
        codec: Codec,
        layers: int,
        batch: int,
        kv_heads: int,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.codec, self.slots = codec, slots
        self.plain = isinstance(codec, Plain)
        self.own_kernel = kv_native.why_not(codec, dtype, device) is None
        self.parts = [
            torch.empty((layers, 2, batch, kv_heads, slots, width), dtype=dtype, device=device)
            for width, dtype in codec.widths
        ]
        #: [layer][part]: [2, batch, kv_heads, slots, width]
        self.layers = [tuple(part[i] for part in self.parts) for i in range(layers)]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """keys and values [B, kv_heads, n, D] of the positions from ``start`` on; of more than there are slots, the last."""
        n = keys.shape[2]
        at = max(0, n - self.slots)
        while at < n:
            slot = (start + at) % self.slots
            count = min(n - at, self.slots - slot)
            if not self.plain:
                count = min(count, ENCODE_BLOCK)
            self._put(layer, slot, keys[:, :, at : at + count], values[:, :, at : at + count])
            at += count

    def _put(self, layer: int, slot: int, keys: Tensor, values: Tensor) -> None:
        count = keys.shape[2]
        if self.own_kernel and not self.plain:
            kv_native.put(keys, values, self.layers[layer], slot)
            return
        places = [part.narrow(3, slot, count) for part in self.layers[layer]]
        if self.plain:
            places[0][0].copy_(keys)
            places[0][1].copy_(values)
            return
        for place, made in zip(places, self.codec.encode(torch.stack((keys, values))), strict=True):
            place.copy_(made)

    def views(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """The first ``count`` slots of a plain store, [B, kv_heads, count, D] each; nothing is copied."""
        part = self.layers[layer][0].narrow(3, 0, count)
        return part[0], part[1]

    def read(self, layer: int, which: int, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Keys (``which`` 0) or values (1) of slots ``first`` to ``last``, dequantized: [B, kv_heads, n, D]."""
        return self.codec.decode(
            tuple(part[which].narrow(2, first, last - first) for part in self.layers[layer]), dtype
        )


@dataclass(frozen=True)
class Filled:
    """What one decode step of one layer attends over where it is not simply a tensor: quantized, or wrapped around.

    end       positions of the request so far, the new one included
    channels  what the keys are held apart from, None where they are held whole
    """

    store: KvStore
    layer: int
    end: int
    channels: Channels | None

    @property
    def count(self) -> int:
        """Slots that are filled: 0 to ``count``."""
        return min(self.end, self.store.slots)

    def keys(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Slots ``first`` to ``last`` as they are held, ``channels`` not put back."""
        return self.store.read(self.layer, 0, first, last, dtype)

    def values(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        return self.store.read(self.layer, 1, first, last, dtype)

    def by_slot(self, mask: Tensor) -> Tensor:
        """mask [..., at least end], a column a position → [..., count], a column a slot."""
        if self.end <= self.store.slots:
            return mask[..., : self.end]
        return mask[..., self.end - self.store.slots : self.end].roll(self.end % self.store.slots, -1)
