"""Experts of a mixture: the matrices of all of them in one place, any format each, multiplied for the tokens they got.

transformers keeps the experts' matrices in 3-D parameters and lets the config name who multiplies them
(``ExpertsInterface``). A view has an ``ExpertLinears`` where such a parameter was, and names "pdq" in its config.
The product is an operator, so that a compiled decoder layer can hold it: the number of tokens that each expert gets is
known at run time only.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME: Final = "pdq"

#: Which experts a compiled program means: the number is one of its tensors. Entries go with the layers.
_known: weakref.WeakValueDictionary[int, ExpertLinears] = weakref.WeakValueDictionary()
_numbers = itertools.count()

_library: Any = torch.library.Library("pdq_experts", "DEF")  # type: ignore[no-untyped-call]
_library.define("product(Tensor x, Tensor counts, Tensor number, int features) -> Tensor")


def _product(x: Tensor, counts: Tensor, number: Tensor, features: int) -> Tensor:
    """x [S, K] sorted by expert, counts int64 [E] of its rows → [S, N]."""
    linears = _known[int(number)].linears
    out = x.new_empty(x.shape[0], features)
    begin = 0
    for expert, rows in enumerate(counts.tolist()):
        if rows:
            out[begin : begin + rows] = linears[expert](x[begin : begin + rows])
            begin += rows
    return out


def _product_shape(x: Tensor, counts: Tensor, number: Tensor, features: int) -> Tensor:
    return x.new_empty(x.shape[0], features)


_library.impl("product", _product, "CompositeExplicitAutograd")
torch.library.register_fake("pdq_experts::product", _product_shape, lib=_library)


class ExpertLinears(nn.Module):
    """Stands in a view for one 3-D parameter. ``linears``: one layer an expert, not submodules: what is inside of them is
    out of a compiled program's sight."""

    number: Tensor

    def __init__(self, linears: Sequence[Callable[[Tensor], Tensor]], features: int) -> None:
        super().__init__()
        self.linears, self.features = tuple(linears), features
        number = next(_numbers)
        _known[number] = self
        # On the CPU whatever the device is: reading it must not wait for the device.
        self.register_buffer("number", torch.tensor(number), persistent=False)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [S, K] sorted by expert, counts int64 [E] → [S, N]."""
        out: Tensor = torch.ops.pdq_experts.product(x, counts, self.number, self.features)
        return out


def is_experts(module: nn.Module) -> bool:
    """Does transformers' interface multiply this module's 3-D parameters, so that a view's own can take their place?"""
    return hasattr(module, "_apply_gate") and hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """hidden [T, H], chosen int64 and weights [T, k] of each token's experts → [T, H].

    Same as ``transformers.integrations.moe.grouped_mm_experts_forward`` but for who multiplies.
    """
    tokens, each = chosen.shape
    expert, order = torch.sort(chosen.reshape(-1))
    counts = (expert[:, None] == torch.arange(module.num_experts, device=expert.device)).sum(0)
    x = (module.gate_up_proj if module.has_gate else module.up_proj)(hidden[order // each], counts)
    if module.has_bias:
        x = x + (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[expert]
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = module.down_proj(x, counts)
    if module.has_bias:
        x = x + module.down_proj_bias[expert]
    if getattr(module, "has_post_expert_norm", False):
        x = module.post_expert_norm(x)
    x = x * weights.reshape(-1)[order][:, None]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    out: Tensor = x[back].view(tokens, each, -1).sum(1).to(hidden.dtype)
    return out


def register() -> None:
    """Make it known to transformers."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, forward)
