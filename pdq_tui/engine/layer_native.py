"""Decoder layers of Llama's kind as one call of our own kernels each, where few sequences are decoded on a CPU.

A layer of small matrices costs more in calls, and in waits of its threads for each other, than in reading its weights. The
call (``native/layer.h``) does what the modules do: norm, projections, rotary positions, the layer's cache in its format,
attention, and the gated MLP. Every matrix is multiplied by the kernel that was placed for it, in its packed form.

Which layers it stands for is told by their class, since only the code of a class says what its modules are for. As for
compiled programs, results are compared with those of the modules before any of them is used (``agreement``).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from pdq_tui.engine import kv_native, native
from pdq_tui.engine.formats import native as forms
from pdq_tui.engine.formats.linears import PackedLinear
from pdq_tui.engine.kv import active_cache
from pdq_tui.engine.kv_store import Filled, KvStore
from pdq_tui.engine.recorded import Call, UncompiledError

#: Classes whose code is that of ``native/layer.h``; what they differ in (biases, norms of heads, windows) it has.
CLASSES: Final = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
#: Kernel's class → its number in ``native/linear.h``, and the operator's name where all matrices are multiplied so.
FORMS: Final[dict[type[PackedLinear], tuple[int, str]]] = {
    forms.NativeDense: (0, "layer_dense"),
    forms.NativeInt8: (1, "layer_int8"),
    forms.NativeW8A8: (2, "layer_int8"),
    forms.NativeInt4: (3, "layer_int4"),
    forms.NativeW4A8: (4, "layer_int4"),
    forms.NativeNested16: (5, "layer_nested"),
}
MIXED: Final = "layer_mixed"
_MATRICES: Final = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


#: By store of the cache, its mask by slot as the kernel takes it, float32 [B, slots]; made once a step.
Masks = dict[KvStore, Tensor]


def is_transformers_own(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Is it of a class of this name in transformers itself? A checkpoint's own code may call its classes alike."""
    return type(module).__name__ in names and type(module).__module__.startswith("transformers.models.")


class NativeLayer(nn.Module):
    """One decoder layer; ``call``: how its modules were called. Raises UncompiledError where it is of another kind."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        layer = call.layer
        if native.loaded() is None:
            raise UncompiledError(native.why_not() or "our own kernels are switched off")
        if not is_transformers_own(layer, CLASSES):
            raise UncompiledError(f"no call of our own for layers of {type(layer).__name__}")
        attention: Any = layer.get_submodule("self_attn")
        activation: Any = layer.get_submodule("mlp.act_fn")
        if type(activation).__name__ not in ("SiLU", "SiLUActivation"):
            raise UncompiledError(f"no call of our own for layers with {type(activation).__name__}")
        self._slot = call.slot
        self._head = int(attention.head_dim)
        self._scaling = float(attention.scaling)
        matrices = [_matrix(layer, name) for name in _MATRICES]
        nothing = self._nothing = attention.o_proj.weight.new_empty(0)
        norms: list[Any] = [
            layer.get_submodule("input_layernorm"),
            layer.get_submodule("post_attention_layernorm"),
        ]
        norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        eps = {float(norm.variance_epsilon) for norm in norms if norm is not None}
        if len(eps) != 1:
            raise UncompiledError("its norms have different epsilons")
        self._eps = eps.pop()
        self._tensors: list[Tensor] = [nothing if norm is None else norm.weight.detach() for norm in norms]
        self._numbers: list[int] = []
        for matrix in matrices:
            nested = isinstance(matrix, forms.NativeNested16)
            self._tensors += [
                matrix.base_weight if nested else matrix.weight,
                matrix.scales,
                matrix.weight if nested else nothing,
                nothing if matrix.bias is None else matrix.bias,
            ]
            self._numbers += [FORMS[type(matrix)][0], matrix.in_features, matrix.group]
        names = {FORMS[type(matrix)][1] for matrix in matrices}
        self._run = getattr(torch.ops.pdq_native, names.pop() if len(names) == 1 else MIXED).default
        # Modules stay what they are: not a submodule, so that the view's linear layers are found once.
        self._stands_for = (layer,)

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
            self._tensors,
            self._numbers,
            self._eps,
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


def _matrix(layer: nn.Module, name: str) -> Any:
    matrix = layer.get_submodule(name)
    if type(matrix) not in FORMS:
        raise UncompiledError(
            f"{name} is multiplied by {type(matrix).__name__}, which our own layers do not call"
        )
    return matrix
