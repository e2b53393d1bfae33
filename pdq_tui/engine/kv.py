"""The KV cache of one request at a time: allocated once, written in place, never concatenated.

Which stage a call belongs to is the cache's state: prefill until ``handoff``, decode after it. A stage reads what its
format says. Prefill in the model's dtype reads what it has just computed, so it needs no copy of its own unless the
hand-off is to convert it; that copy is let go layer by layer as the hand-off goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from pdq_tui.core.kv import KvGeometry, KvPolicy
from pdq_tui.core.kv import windows_of as windows_by_layer
from pdq_tui.engine.kv_formats import Channels, Plain, codec
from pdq_tui.engine.kv_store import ENCODE_BLOCK, Filled, KvStore
from pdq_tui.errors import UsageError

MODEL_DTYPE: Final = KvPolicy()
#: What a cache held at some time, by store and part.
Held = list[list[Tensor]]


def windows_of(config: Any) -> tuple[int | None, ...]:
    """By layer, over how many positions its attention slides; None where it sees all. From a text config."""
    return windows_by_layer(
        int(config.num_hidden_layers),
        getattr(config, "sliding_window", None),
        getattr(config, "use_sliding_window", None),
        getattr(config, "layer_types", None),
    )


class KvShape:
    """Layers, heads and head size of a model's cache, read from its config."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        text = config.get_text_config()
        self.layers = int(text.num_hidden_layers)
        self.heads = int(text.num_attention_heads)
        self.kv_heads = int(getattr(text, "num_key_value_heads", None) or self.heads)
        self.head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // self.heads)
        self.windows = windows_of(text)
        self.dtype = dtype

    @property
    def geometry(self) -> KvGeometry:
        return KvGeometry(self.kv_heads, self.head_dim, self.dtype.itemsize, self.windows)


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What transformers asks of a layer; everything lies with its owner."""

    is_sliding = False

    def __init__(self, owner: KvCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner, self.index = owner, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        return

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return self.owner.update(key_states, value_states, self.index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.start

    def get_max_length(self) -> int:
        return self.owner.capacity


class KvCache(Cache):
    """A preallocated cache for ``batch`` sequences of up to ``capacity`` positions.

    device         where it lies; or by layer, each layer's keys and values lie with its weights
    kv             formats of the two stages, and where they are converted
    own_attention  this engine's attention reads it: sliding layers keep their window alone then; another one reads
                   plain tensors of all positions

    ``advance(n)`` says that the next forward writes n positions; ``reset`` begins another request in the same buffers.
    """

    def __init__(
        self,
        shape: KvShape,
        batch: int,
        capacity: int,
        device: torch.device | Sequence[torch.device],
        kv: KvPolicy = MODEL_DTYPE,
        *,
        own_attention: bool = True,
    ) -> None:
        self.shape, self.batch, self.capacity, self.kv = shape, batch, capacity, kv
        self.devices = (device,) * shape.layers if isinstance(device, torch.device) else tuple(device)
        self.start = self.end = 0
        #: Additive [batch, 1, 1, capacity] of the present request, None where nothing is padded.
        self.mask: Tensor | None = None
        self.decoding = False
        self._own_attention = own_attention
        self._prefill_codec = codec(kv, "prefill", shape.head_dim, shape.dtype)
        decode = codec(kv, "decode", shape.head_dim, shape.dtype)
        slots = [min(w, capacity) if own_attention and w is not None else capacity for w in shape.windows]
        self.stores: list[KvStore] = []
        #: By layer: its store, and its place there.
        self._places: dict[int, tuple[KvStore, int]] = {}
        kinds = list(zip(slots, self.devices, strict=True))
        for count, where in sorted(set(kinds), key=lambda kind: (kind[0], kinds.index(kind))):
            members = [layer for layer, kind in enumerate(kinds) if kind == (count, where)]
            store = KvStore(decode, len(members), batch, shape.kv_heads, count, where, shape.dtype)
            self.stores.append(store)
            for place, layer in enumerate(members):
                self._places[layer] = (store, place)
        #: What prefill wrote for the hand-off, by layer.
        self._waiting: list[KvStore | None] = [None] * shape.layers
        self._channels: list[Channels | None] = [None] * shape.layers
        super().__init__(layers=[_Layer(self, i) for i in range(shape.layers)])

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that stay; what waits for a hand-off is not among them."""
        return sum(store.nbytes for store in self.stores)

    def reset(self) -> None:
        self.rewind(0)
        self.decoding = False
        self._waiting = [None] * self.shape.layers
        self._channels = [None] * self.shape.layers

    def rewind(self, positions: int) -> None:
        """Forget all but the first positions, in the same stage."""
        self.start = self.end = positions

    def copied(self) -> Held:
        """A copy of all that is held."""
        return [[part.clone() for part in store.parts] for store in self.stores]

    def restore(self, held: Held, layer: int | None = None) -> None:
        """Hold again what ``copied`` gave: everything, or what belongs to one layer."""
        for store, parts in zip(self.stores, held, strict=True):
            for part, before in zip(store.parts, parts, strict=True):
                if layer is None:
                    part.copy_(before)
                elif self._places[layer][0] is store:
                    place = self._places[layer][1]
                    part[place].copy_(before[place])

    def activate(self) -> None:
        """Make this the cache that compiled layers write to: a program cannot be given one as an argument."""
        global _active
        _active = weakref.ref(self)

    def advance(self, positions: int) -> None:
        """Raises UsageError where the buffer is full: writing on would read past its end."""
        if self.end + positions > self.capacity:
            raise UsageError(
                f"the KV cache holds {self.capacity} positions, {self.end} are filled, {positions} more do not fit"
            )
        self.start, self.end = self.end, self.end + positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> Any:
        """Write [B, kv_heads, q, D] in place; returns what the stage's attention reads: tensors [B, kv_heads, n, D], or
        twice the same ``Filled``."""
        if self.decoding:
            return self._decode(key_states, value_states, layer_idx)
        return self._prefill(key_states, value_states, layer_idx)

    def filled(self, layer: int) -> Filled:
        """Where ``layer`` decodes, the step that was advanced to included, written or not."""
        store, place = self._places[layer]
        return Filled(store, place, self.end, self._channels[layer])

    def _decode(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Any, Any]:
        filled = self.filled(layer)
        store, place, channels = filled.store, filled.layer, filled.channels
        store.write(place, self.start, keys if channels is None else channels.apart(keys), values)
        our_kernel = store.own_kernel and self._own_attention
        if store.plain and not our_kernel and self.end <= store.slots:
            return store.views(place, self.end)
        return filled, filled

    def _prefill(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, ...]:
        store, place = self._places[layer]
        if self.kv.convert == "handoff":
            store, place = self._waits(layer), 0
        past = self._past(store, place, keys.dtype) if self.end > store.slots else None
        store.write(place, self.start, keys, values)
        if store.plain and self.end <= store.slots:
            return store.views(place, self.end)
        read = self._prefill_codec
        if not isinstance(read, Plain) and self.end <= store.slots:
            return tuple(store.read(place, which, 0, self.end, keys.dtype) for which in (0, 1))
        if self.start and isinstance(read, Plain) and not store.plain:
            raise RuntimeError(
                "this KV cache takes a prompt in one piece: it holds another form than prefill reads"
            )
        # What was just computed; rounded like what was written of it, which a sliding layer has kept the end of only.
        new = read.decode(read.encode(keys), keys.dtype), read.decode(read.encode(values), values.dtype)
        if past is None:
            return new
        return tuple(torch.cat((before, each), dim=2) for before, each in zip(past, new, strict=True))

    def _past(self, store: KvStore, place: int, dtype: torch.dtype) -> tuple[Tensor, ...] | None:
        """What a sliding layer still holds of earlier pieces of a prompt, oldest first: keys and values [B, kv_heads, n, D].
        None where there is nothing."""
        if not self.start:
            return None
        if self.start <= store.slots:
            return tuple(store.read(place, which, 0, self.start, dtype).clone() for which in (0, 1))
        oldest = self.start % store.slots
        return tuple(
            store.read(place, which, 0, store.slots, dtype).roll(-oldest, dims=2) for which in (0, 1)
        )

    def _waits(self, layer: int) -> KvStore:
        waiting = self._waiting[layer]
        if waiting is None:
            shape = self.shape
            waiting = KvStore(
                self._prefill_codec,
                1,
                self.batch,
                shape.kv_heads,
                self.capacity,
                self.devices[layer],
                shape.dtype,
            )
            self._waiting[layer] = waiting
        return waiting

    def handoff(self, pads: Sequence[int] | None = None) -> None:
        """From here on it is decode's. Converts what prefill wrote where ``kv`` says so; ``pads``: columns of padding at
        the left of each row, which are no part of a channel's mean and spread."""
        self.decoding = True
        padded = pads if pads and any(pads) else None
        for layer, waiting in enumerate(self._waiting):
            if waiting is None:
                continue
            store, place = self._places[layer]
            if self.kv.keys == "channel":
                pad = None if padded is None else torch.tensor(padded, device=self.devices[layer])
                self._channels[layer] = Channels.of(waiting.read(0, 0, 0, self.end, torch.float32), pad)
            channels = self._channels[layer]
            for first in range(max(0, self.end - store.slots), self.end, ENCODE_BLOCK):
                last = min(first + ENCODE_BLOCK, self.end)
                keys, values = (waiting.read(0, which, first, last, torch.float32) for which in (0, 1))
                store.write(place, first, keys if channels is None else channels.apart(keys), values)
            self._waiting[layer] = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.start


_active: weakref.ref[KvCache] | None = None


def active_cache() -> KvCache:
    """The cache that was activated last. Raises RuntimeError where there is none any more."""
    cache = _active() if _active is not None else None
    if cache is None:
        raise RuntimeError("a compiled layer ran without an active KV cache")
    return cache
