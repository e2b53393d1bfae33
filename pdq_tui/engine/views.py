"""Views of one model: the module shells copied, the tensors shared, only the linear layers replaced."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from pdq_tui.engine import experts


def copy_shell(
    model: PreTrainedModel,
    linears: Mapping[str, nn.Module],
    attention: str,
    others: Mapping[str, nn.Parameter] = MappingProxyType({}),
) -> PreTrainedModel:
    """A model with the same parameters, buffers and hooks, ``linears`` in place of the modules, or of the parameters, of
    these dotted names, and ``others`` in place of the parameters of theirs.

    The view has configs of its own, which name ``attention``; no tensor is copied. Hooks of accelerate's are left out: they
    call the modules that are replaced here.
    """
    modules: dict[int, nn.Module] = {}
    configs: dict[int, PreTrainedConfig] = {}
    mixture = any(isinstance(module, experts.ExpertLinears) for module in linears.values())

    def config_copy(config: PreTrainedConfig) -> PreTrainedConfig:
        if id(config) not in configs:
            mine = copy.copy(config)
            mine._attn_implementation = attention
            if mixture:
                mine._experts_implementation = experts.NAME
            configs[id(config)] = mine
        return configs[id(config)]

    def shell(module: nn.Module, name: str) -> nn.Module:
        if name in linears:
            return linears[name]
        if id(module) in modules:
            return modules[id(module)]
        mine = copy.copy(module)
        if "_hf_hook" in vars(mine):  # accelerate's: a forward bound to the module that this is a copy of
            for name_of in ("_hf_hook", "_old_forward", "forward"):
                vars(mine).pop(name_of, None)
        modules[id(module)] = mine
        mine._parameters = dict(module._parameters)
        for leaf in mine._parameters:
            other = others.get(f"{name}.{leaf}" if name else leaf)
            if other is not None:
                mine._parameters[leaf] = other
        mine._buffers = dict(module._buffers)
        mine._modules = {
            child_name: None
            if child is None
            else shell(child, f"{name}.{child_name}" if name else child_name)
            for child_name, child in module._modules.items()
        }
        for leaf in [leaf for leaf in mine._parameters if f"{name}.{leaf}" in linears]:
            del mine._parameters[leaf]
            mine._modules[leaf] = linears[f"{name}.{leaf}"]
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            mine.__dict__["config"] = config_copy(config)
        return mine

    view = shell(model, "")
    assert isinstance(view, PreTrainedModel)
    return view


class Caller:
    """Calls a causal LM by the argument names that its version of transformers uses."""

    def __init__(self, model: PreTrainedModel) -> None:
        names = inspect.signature(type(model).forward).parameters
        #: "cache" since transformers 5.20-something, "past_key_values" before.
        self._cache = "cache" if "cache" in names else "past_key_values"
        self._fixed: dict[str, Any] = {"use_cache": True}
        self._can_keep = "logits_to_keep" in names

    def logits(
        self,
        view: nn.Module,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        cache: object,
        keep: int = 1,
    ) -> torch.Tensor:
        """ids int64 [B, q] → logits [B, keep, V] of the last ``keep`` positions, in the model's dtype."""
        kept = {"logits_to_keep": keep} if self._can_keep else {}
        out = view(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            **{self._cache: cache},
            **self._fixed,
            **kept,
        )
        logits: torch.Tensor = out.logits[:, -keep:].to(ids.device)
        return logits
