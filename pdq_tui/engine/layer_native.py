"""Decoder layers of Llama's kind as one call of our own kernels each, where few sequences are decoded on a CPU.

A layer of small matrices costs more in calls, and in waits of its threads for each other, than in reading its weights. The
call (``native/layer.h``) does what the modules do: norm, projections, rotary positions, the layer's cache in its format,
attention, and the gated MLP. Every matrix is multiplied by the kernel that was placed for it, in its packed form.

Which layers it stands for says ``llama_kind``. As for compiled programs, results are compared with those of the modules before any of them is used (``agreement``).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from pdq_tui.engine import kv_native
from pdq_tui.engine.faults import first_line
from pdq_tui.engine.kv import active_cache
from pdq_tui.engine.kv_store import Filled, KvStore
from pdq_tui.engine.llama_kind import OUT, llama_kind
from pdq_tui.engine.native_forms import FORMS, given, word_of
from pdq_tui.engine.recorded import Call, UncompiledError

#: By store of the cache, its mask by slot as the kernel takes it, float32 [B, slots]; made once a step.
Masks = dict[KvStore, Tensor]


class NativeLayer(nn.Module):
    """One decoder layer; ``call``: how its modules were called. Raises UncompiledError where it is of another kind."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        kind = llama_kind(call.layer)
        for name, matrix in kind.matrices.items():
            if type(matrix) not in FORMS:
                raise UncompiledError(
                    f"{name} is multiplied by {type(matrix).__name__}, which our own layers do not call"
                )
        matrices = list(kind.matrices.values())
        self._slot, self._scaling = call.slot, kind.scaling
        nothing = self._nothing = kind.matrices[OUT].weight.new_empty(0)
        tensors, numbers = given(matrices, nothing)
        norms = [nothing if norm is None else norm for norm in kind.norms]
        ops: Any = torch.ops.pdq_native
        try:
            self._layer = ops.prepare_layer([*norms, *tensors], numbers, kind.head_dim, kind.eps)
        except RuntimeError as error:
            raise UncompiledError(f"no call of our own for this layer: {first_line(error)}") from error
        # What was prepared holds the tensors: let go with this.
        weakref.finalize(self, ops.forget_layer, self._layer).atexit = False
        self._run = getattr(torch.ops.pdq_native, f"layer_{word_of(matrices)}").default
        # Modules stay what they are: not a submodule, so that the view's linear layers are found once.
        self._stands_for = (call.layer,)

    def forward(self, hidden: Tensor, *_args: Any, masks: Masks | None = None, **kwargs: Any) -> Tensor:
        cache = active_cache()
        filled = cache.filled(self._slot)
        if not filled.store.own_kernel:  # such a cache is not given to these layers (``staged``)
            raise RuntimeError("this KV cache is not one of our own kernels'")
        cos, sin = kwargs["position_embeddings"]
        nothing = self._nothing
        channels = filled.channels
        mask = nothing if cache.mask is None else _mask(cache.mask, filled, {} if masks is None else masks)
        out: Tensor = self._run(
            hidden.contiguous(),
            cos,
            sin,
            self._layer,
            self._scaling,
            *kv_native.filled_up(filled.store.layers[filled.layer]),
            nothing if channels is None else channels.mean,
            nothing if channels is None else channels.spread,
            cache.start % filled.store.slots,
            filled.count,
            mask,
        )
        return out


def _mask(additive: Tensor, filled: Filled, masks: Masks) -> Tensor:
    """additive: [B, 1, 1, capacity], a column a position."""
    if filled.store not in masks:
        masks[filled.store] = filled.by_slot(additive).flatten(1).float()
    return masks[filled.store]
