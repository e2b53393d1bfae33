"""Decoder layers of Llama's kind: what our own calls need to know of one to do what its modules do.

A layer's kind is told by its class, since only the code of a class says what its modules are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from pdq_tui.engine import native
from pdq_tui.engine.recorded import UncompiledError, UnknownKindError

#: Classes whose code is that of ``native/layer.h``; what they differ in (biases, norms of heads, windows) it has.
CLASSES: Final = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
#: Of the three groups of matrices that read the same rows, and those that read alone.
QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUT: Final = "self_attn.o_proj"
GATE_UP: Final = ("mlp.gate_proj", "mlp.up_proj")
DOWN: Final = "mlp.down_proj"
MATRICES: Final = (*QKV, OUT, *GATE_UP, DOWN)


def is_transformers_own(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Is it of a class of this name in transformers itself? A checkpoint's own code may call its classes alike."""
    return type(module).__name__ in names and type(module).__module__.startswith("transformers.models.")


@dataclass(frozen=True)
class LlamaKind:
    """norms: before attention, before the MLP, of a query's and of a key's head, None where there is none. matrices: by
    MATRICES, the view's own linear layers."""

    attention: nn.Module
    head_dim: int
    scaling: float
    eps: float
    norms: tuple[Tensor | None, ...]
    matrices: dict[str, Any]


def llama_kind(layer: nn.Module) -> LlamaKind:
    """Raises UnknownKindError where it is of another kind, UncompiledError where nothing of our own is built here."""
    if native.loaded() is None:
        raise UncompiledError(native.why_not() or "our own kernels are switched off")
    if not is_transformers_own(layer, CLASSES):
        raise UnknownKindError(f"no call of our own for layers of {type(layer).__name__}")
    attention: Any = layer.get_submodule("self_attn")
    activation: Any = layer.get_submodule("mlp.act_fn")
    if type(activation).__name__ not in ("SiLU", "SiLUActivation"):
        raise UnknownKindError(f"no call of our own for layers with {type(activation).__name__}")
    norms: list[Any] = [
        layer.get_submodule("input_layernorm"),
        layer.get_submodule("post_attention_layernorm"),
    ]
    norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    eps = {float(norm.variance_epsilon) for norm in norms if norm is not None}
    dtypes = {norm.weight.dtype for norm in norms if norm is not None}
    if not dtypes <= {torch.bfloat16, torch.float32}:
        raise UnknownKindError("our own calls take bf16 and float32")
    if len(eps) != 1:
        raise UncompiledError("its norms have different epsilons")
    return LlamaKind(
        attention,
        int(attention.head_dim),
        float(attention.scaling),
        eps.pop(),
        tuple(None if norm is None else norm.weight.detach() for norm in norms),
        {name: layer.get_submodule(name) for name in MATRICES},
    )
