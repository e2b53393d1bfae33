"""One decode step of a model of Llama's kind without the work around its layers that a step of one token has no use for.

Where every layer is one call (``layer_native``), what transformers does between them (masks that are given already, outputs
that are collected, arguments that are merged) takes as long as a quarter of the layers. The step here is what is left:
embedding, positions, layers, norm, head. Calls of more than one position go to the model's own code.
"""

from __future__ import annotations

import types
import weakref
from typing import Any, Final

import torch
from torch import Tensor, nn

from pdq_tui.engine.kv import KvCache
from pdq_tui.engine.layer_native import Masks, NativeLayer
from pdq_tui.engine.llama_kind import is_transformers_own

#: Classes whose code around the layers is what ``Decoder`` does.
CLASSES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
#: Rotary positions that depend on nothing but the position: computed once.
FIXED_ROTARY: Final = ("default", "linear", "llama3", "yarn", "proportional")
_CACHES: Final = ("cache", "past_key_values")


class Decoder:
    """The ``forward`` of a view's model, in place of its class's."""

    def __init__(self, model: Any) -> None:
        # Weakly: the model holds this, and a circle would keep an arm's weights until the collector comes by.
        self._own = weakref.WeakMethod(model.forward)
        inside = model.model
        self._embed, self._norm, self._rotary, self._head = (
            inside.embed_tokens,
            inside.norm,
            inside.rotary_emb,
            model.lm_head,
        )
        self._layers: list[NativeLayer] = list(inside.layers)
        self._fixed = getattr(self._rotary, "rope_type", "") in FIXED_ROTARY
        #: cos and sin of positions 0 to the longest cache so far, [positions, D] each.
        self._turns: tuple[Tensor, Tensor] | None = None

    def __call__(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
        cache = next((kwargs[name] for name in _CACHES if name in kwargs), None)
        if input_ids.shape[1] != 1 or not isinstance(cache, KvCache) or not cache.decoding:
            own = self._own()
            assert own is not None  # its model is what was called
            return own(input_ids=input_ids, position_ids=position_ids, **kwargs)
        hidden = self._embed(input_ids)
        turns = self._positions(hidden, position_ids, cache.capacity)
        masks: Masks = {}
        for layer in self._layers:
            hidden = layer.forward(hidden, position_embeddings=turns, masks=masks)
        return types.SimpleNamespace(logits=self._head(self._norm(hidden)))

    def _positions(self, hidden: Tensor, positions: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """cos and sin [B, 1, D] of position_ids [B or 1, 1]."""
        if not self._fixed:
            cos, sin = self._rotary(hidden, position_ids=positions)
            return cos, sin
        if self._turns is None or len(self._turns[0]) < capacity:
            every = torch.arange(capacity, device=hidden.device)[None]
            cos, sin = self._rotary(hidden, position_ids=every)
            self._turns = (cos[0].contiguous(), sin[0].contiguous())
        cosines, sines = self._turns
        return cosines[positions], sines[positions]


def take_over(model: nn.Module) -> bool:
    """Let ``model``, whose layers are all NativeLayer, step as above, where its class is known; ``give_back`` undoes it."""
    if not is_transformers_own(model, CLASSES):
        return False
    model.__dict__["forward"] = Decoder(model)
    return True


def give_back(model: nn.Module) -> None:
    model.__dict__.pop("forward", None)
