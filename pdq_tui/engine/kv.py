"""The KV cache: one buffer a model, allocated once, written in place, read as views of its filled part.

Nothing is concatenated and nothing is copied but the new positions. Layout of the buffer:
[layers, 2, batch, kv_heads, capacity, head_dim], so that one head's keys lie together and both matmuls of a decode
step read them in order.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from pdq_tui.core.protocol import KvInfo
from pdq_tui.engine.formats.packed import DTYPE_NAMES
from pdq_tui.errors import UsageError


def windows_of(config: Any) -> tuple[int | None, ...]:
    """By layer, over how many positions its attention slides; None where it sees all. From a text config."""
    layers = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return (None,) * layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


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
    def bytes_per_token(self) -> int:
        """Keys and values of one position of one sequence, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def info(self, allocated_bytes: int, free_bytes: int | None, reserve_bytes: int) -> KvInfo:
        """The fact sheet of a cache like this. ``free_bytes``: all that KV may take, ``allocated_bytes`` in it."""
        return KvInfo(
            dtype=DTYPE_NAMES[self.dtype],
            bytes_per_token=self.bytes_per_token,
            allocated_bytes=allocated_bytes,
            free_bytes=free_bytes,
            reserve_bytes=reserve_bytes,
            capacity_tokens=None
            if free_bytes is None
            else max(0, free_bytes - reserve_bytes) // self.bytes_per_token,
            capacity_reason="this device does not tell how much of its memory is free"
            if free_bytes is None
            else None,
        )


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What transformers asks of a layer; the tensors are slices of the one buffer."""

    is_sliding = False

    def __init__(self, owner: KvCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        return

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        owner = self.owner
        assert self.keys is not None and self.values is not None
        self.keys[:, :, owner.start : owner.end].copy_(key_states)
        self.values[:, :, owner.start : owner.end].copy_(value_states)
        return self.keys[:, :, : owner.end], self.values[:, :, : owner.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.start

    def get_max_length(self) -> int:
        return self.owner.capacity


class KvCache(Cache):
    """A preallocated cache for ``batch`` sequences of up to ``capacity`` positions.

    ``advance(n)`` says that the next forward writes n positions; ``reset`` forgets what is in it and keeps the buffer.
    """

    def __init__(self, shape: KvShape, batch: int, capacity: int, device: torch.device) -> None:
        self.shape, self.batch, self.capacity = shape, batch, capacity
        self.start = self.end = 0
        #: Additive [batch, 1, 1, capacity] of the present request, None where nothing is padded.
        self.mask: torch.Tensor | None = None
        self.buffer = torch.empty(
            (shape.layers, 2, batch, shape.kv_heads, capacity, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )
        self._keys = [self.buffer[i, 0] for i in range(shape.layers)]
        self._values = [self.buffer[i, 1] for i in range(shape.layers)]
        super().__init__(layers=[_Layer(self, k, v) for k, v in zip(self._keys, self._values, strict=True)])

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def reset(self) -> None:
        self.start = self.end = 0

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
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [batch, kv_heads, q, head_dim] in place; returns views [batch, kv_heads, end, head_dim]."""
        start, end = self.start, self.end
        keys, values = self._keys[layer_idx].narrow(2, 0, end), self._values[layer_idx].narrow(2, 0, end)
        keys.narrow(2, start, end - start).copy_(key_states)
        values.narrow(2, start, end - start).copy_(value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.start


_active: weakref.ref[KvCache] | None = None


def active_cache() -> KvCache:
    """The cache that was activated last. Raises RuntimeError where there is none any more."""
    cache = _active() if _active is not None else None
    if cache is None:
        raise RuntimeError("a compiled layer ran without an active KV cache")
    return cache
