"""The KV buffers of one model, kept for the next request of the same size and formats, and what is told of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import msgspec
import torch

from pdq_tui.core.kv import KvGeometry, KvPolicy
from pdq_tui.core.policy import STAGES, Stage
from pdq_tui.core.protocol import KvInfo
from pdq_tui.engine import kv_native
from pdq_tui.engine.formats.packed import DTYPE_NAMES
from pdq_tui.engine.kv import MODEL_DTYPE, KvCache, KvShape
from pdq_tui.engine.kv_formats import Codec, Plain, codec
from pdq_tui.engine.layout import Layout
from pdq_tui.errors import UnfitError

#: Buffers kept for reuse by (batch, capacity), for each policy's KV formats.
KEPT: Final = 2


class KvPool:
    """``own_attention``: the engine's own attention reads the cache; another one knows plain tensors of all positions.
    ``layout``: each layer's keys and values lie with its weights."""

    def __init__(self, shape: KvShape, layout: Layout, *, own_attention: bool) -> None:
        self.shape, self.layout, self.own_attention = shape, layout, own_attention
        self.device = layout.home
        self._caches: dict[KvPolicy, OrderedDict[tuple[int, int], KvCache]] = {}

    def check(self, kv: KvPolicy, policy: str) -> None:
        """Raises UnfitError, naming ``policy``, for formats that this model's heads or this attention cannot read."""
        if kv == MODEL_DTYPE:
            return
        why = self.refused or self.shape.geometry.misfit(kv)
        if why is not None:
            hint = "load the model with --attention pdq" if self.refused else "choose another format in [kv]"
            raise UnfitError(f"{policy}: KV cache {kv.label}: {why}", hint)

    def own_kernels(self, kv: KvPolicy) -> set[Codec]:
        """Formats that our own kernels may serve in this policy, and in the model's dtype: what is compiled uses that."""
        if not self.own_attention:
            return set()
        shape = self.shape
        made = {codec(kv, stage, shape.head_dim, shape.dtype) for kv in (MODEL_DTYPE, kv) for stage in STAGES}
        return {one for one in made if kv_native.unfit(one, shape.dtype, self.device) is None}

    @property
    def refused(self) -> str | None:
        """Why no cache of this model can be quantized."""
        return None if self.own_attention else "only this program's own attention reads a quantized cache"

    def cache(self, batch: int, capacity: int, kv: KvPolicy = MODEL_DTYPE) -> KvCache:
        """A cache for (batch, capacity), the same one again where there is one: one request runs at a time."""
        kept = self._caches.setdefault(kv, OrderedDict())
        key = (batch, capacity)
        found = kept.get(key)
        if found is None:
            while len(kept) >= KEPT:
                kept.popitem(last=False)
            where = [self.layout.layer(index) for index in range(self.shape.layers)]
            found = KvCache(self.shape, batch, capacity, where, kv, own_attention=self.own_attention)
            kept[key] = found
        kept.move_to_end(key)
        return found

    def _geometry(self, device: torch.device | None) -> KvGeometry:
        """Of all layers, or of those on ``device``."""
        whole = self.shape.geometry
        if device is None:
            return whole
        mine = tuple(w for i, w in enumerate(whole.windows) if self.layout.layer(i) == device)
        return msgspec.structs.replace(whole, windows=mine)

    def new_bytes(
        self, kvs: Iterable[KvPolicy], batch: int, capacity: int, device: torch.device | None = None
    ) -> int:
        """What requests of (batch, capacity) under these policies, one at a time, will take beside what is kept: in all, or
        on ``device``."""
        geometry, own = self._geometry(device), self.own_attention
        wanted = set(kvs)
        buffers = sum(
            geometry.buffer_bytes(kv, batch, capacity, windows=own)
            for kv in wanted
            if (batch, capacity) not in self._caches.get(kv, ())
        )
        return buffers + max((geometry.handoff_bytes(kv, batch, capacity) for kv in wanted), default=0)

    def clear(self) -> None:
        self._caches.clear()

    @property
    def nbytes(self) -> int:
        """Of all buffers that are kept."""
        return sum(cache.nbytes for kept in self._caches.values() for cache in kept.values())

    def nbytes_on(self, device: torch.device) -> int:
        return sum(
            store.nbytes
            for kept in self._caches.values()
            for cache in kept.values()
            for store in cache.stores
            if store.parts[0].device == device
        )

    def capacity_tokens(
        self, kv: KvPolicy, free_bytes: int, reserve_bytes: int, device: torch.device
    ) -> int | None:
        """Tokens of KV that the layers on ``device`` have room for in ``free_bytes``; None where none lies there."""
        per_token = self._geometry(device).bytes_per_token(kv, "decode")
        return max(0, free_bytes - reserve_bytes) // per_token if per_token else None

    def info(self, kv: KvPolicy, free_bytes: int | None, reserve_bytes: int) -> KvInfo:
        """The fact sheet of ``kv`` on this model. ``free_bytes``: all that KV may take, present buffers among it."""
        geometry, kept = self.shape.geometry, self._caches.get(kv, OrderedDict())
        windows = {window for window in geometry.windows if window is not None}
        per_token = geometry.bytes_per_token(kv, "decode")
        kernel, reason = self.kernel(kv)
        known = free_bytes is not None
        return KvInfo(
            dtype=self._dtype(kv, "decode"),
            bytes_per_token=per_token,
            prefill_dtype=self._dtype(kv, "prefill"),
            prefill_bytes_per_token=geometry.bytes_per_token(kv, "prefill"),
            convert=kv.convert,
            layers=geometry.layers,
            quantized_layers=geometry.layers if kv.decode != "bf16" else 0,
            sliding_layers=geometry.sliding_layers,
            window=max(windows, default=None),
            sequence_bytes=geometry.layers * geometry.sequence_layer_bytes(kv),
            kernel=kernel,
            kernel_reason=reason,
            allocated_bytes=sum(cache.nbytes for cache in kept.values()),
            free_bytes=free_bytes,
            reserve_bytes=reserve_bytes,
            capacity_tokens=max(0, free_bytes - reserve_bytes) // per_token
            if free_bytes is not None
            else None,
            capacity_reason=None if known else "this device does not tell how much of its memory is free",
        )

    def kernel(self, kv: KvPolicy) -> tuple[str, str | None]:
        """What decode attention runs, and why not our own kernel."""
        if not self.own_attention:
            return "transformers", "asked for"
        made = codec(kv, "decode", self.shape.head_dim, self.shape.dtype)
        reason = self.why_not_native(kv)
        if reason is None:
            return "native", None
        return "torch sdpa" if isinstance(made, Plain) else "torch, by blocks", reason

    def why_not_native(self, kv: KvPolicy) -> str | None:
        """Why decode reads a cache of ``kv`` by something else than our own kernels; None where it does."""
        if not self.own_attention:
            return "only this program's own attention has them"
        made = codec(kv, "decode", self.shape.head_dim, self.shape.dtype)
        return kv_native.why_not(made, self.shape.dtype, self.device)

    def _dtype(self, kv: KvPolicy, stage: Stage) -> str:
        return DTYPE_NAMES[self.shape.dtype] if kv.dtype(stage) == "bf16" else kv.named(stage)
