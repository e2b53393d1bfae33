"""What a model consists of: linear layers, experts, and what no format here reaches; told from modules and shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pdq_tui.engine.experts import is_experts
from pdq_tui.errors import UnfitError


@dataclass(frozen=True)
class Layer:
    """One linear layer of the model, or the matrices of all experts that one parameter holds.

    conv1d   its parameter is [K, N] (of experts: [E, K, N]).
    tied     it is the input embedding's.
    experts  0, or how many matrices [N, K] the one parameter holds.
    routed   of experts: how many of them see one token.
    """

    name: str
    N: int
    K: int
    conv1d: bool = False
    head: bool = False
    tied: bool = False
    experts: int = 0
    routed: int = 0

    @property
    def parameter(self) -> str:
        return self.name if self.experts else f"{self.name}.weight"

    @property
    def parameters(self) -> int:
        return self.N * self.K * max(1, self.experts)

    def rows(self, tokens: int) -> int:
        """Rows that one of its matrices sees in a pass over ``tokens``: all of them; of experts, an even share."""
        return max(1, -(-tokens * self.routed // self.experts)) if self.experts else tokens


@dataclass(frozen=True)
class Fused:
    """A weight that is no linear layer's and that no format here reaches: routers, experts of an unknown kind."""

    name: str
    parameters: int
    nbytes: int
    reason: str


@dataclass(frozen=True)
class Census:
    """What a model consists of. ``other_bytes``: every parameter and buffer that is no layer's weight, embedding tables
    (``embedding_bytes``: tokens and learned positions) among them."""

    layers: tuple[Layer, ...]
    fused: tuple[Fused, ...]
    other_bytes: int
    embedding_bytes: int


def take_census(model: PreTrainedModel) -> Census:
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied_weight = model.get_input_embeddings().weight
    routed = experts_per_token(model)
    layers: list[Layer] = []
    weights: set[int] = set()
    owners: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), module)
            layer = _layer(name, module, leaf, parameter, routed)
            if layer is None:
                continue
            tied = parameter is tied_weight
            layers.append(replace(layer, head=module is head, tied=tied))
            if not tied:
                weights.add(id(parameter))
    fused = []
    for name, parameter in model.named_parameters():
        owner = owners[id(parameter)]
        if id(parameter) in weights or parameter.dim() < 2 or isinstance(owner, nn.Embedding):
            continue
        what = "expert weights in one tensor" if parameter.dim() > 2 else "not a linear layer"
        reason = f"{what} ({type(owner).__name__}): no kernel here reads it packed"
        fused.append(Fused(name, parameter.numel(), parameter.nbytes, reason))
    other = {id(t): t.nbytes for t in [*model.parameters(), *model.buffers()] if id(t) not in weights}
    return Census(
        tuple(layers),
        tuple(fused),
        sum(other.values()),
        sum({id(m.weight): m.weight.nbytes for m in model.modules() if isinstance(m, nn.Embedding)}.values()),
    )


def _layer(name: str, module: nn.Module, leaf: str, parameter: torch.Tensor, routed: int) -> Layer | None:
    """The layer whose weight ``parameter`` is, None where it is none's."""
    # A subclass that multiplies in another way (a router that also chooses) is no linear layer.
    if type(module).forward in (nn.Linear.forward, Conv1D.forward) and leaf == "weight":
        conv1d = isinstance(module, Conv1D)
        N, K = (parameter.shape[1], parameter.shape[0]) if conv1d else tuple(parameter.shape)
        return Layer(name, N, K, conv1d)
    if is_experts(module) and parameter.dim() == 3:
        transposed = bool(module.is_transposed)
        E, N, K = parameter.shape
        if transposed:
            N, K = K, N
        return Layer(f"{name}.{leaf}" if name else leaf, N, K, transposed, experts=E, routed=routed or E)
    return None


def packable(model: nn.Module) -> set[str]:
    """Names of the parameters that a policy may replace: linear weights, GPT-2's Conv1D, matrices of experts."""
    return {
        layer.parameter
        for name, module in model.named_modules()
        for leaf, parameter in module.named_parameters(recurse=False)
        if (layer := _layer(name, module, leaf, parameter, 0)) is not None
    }


def experts_per_token(model: PreTrainedModel) -> int:
    """From the config; 0 where the model has no experts or does not say."""
    config = model.config.get_text_config()
    return int(getattr(config, "num_experts_per_tok", None) or 0)


def check_fit(model: PreTrainedModel, attention_name: str) -> None:
    """Raises UnfitError for layers that keep another kind of state than one pair of keys and values each, and for
    attention that would leave out what the model asks for."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    other = sorted(kinds - {"full_attention", "sliding_attention"})
    if getattr(config, "is_encoder_decoder", False):
        other.append("an encoder")
    if getattr(config, "kv_lora_rank", None):
        other.append("compressed keys and values (MLA)")
    if getattr(config, "num_kv_shared_layers", None):
        other.append("keys and values shared between layers")
    if other:
        raise UnfitError(f"this model has {', '.join(other)}, which this engine does not run")
    if attention_name == "pdq" and not model._supports_attention_backend:
        raise UnfitError(
            f"{type(model).__name__} has attention of its own, which nothing takes the place of",
            "load it with --attention eager",
        )
    if attention_name == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnfitError(
            "this model caps its attention scores, which sdpa leaves out", "use attention pdq or eager"
        )
