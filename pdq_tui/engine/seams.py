"""Where a pass goes on on another device: hooks of a view that bring a module's arguments to where the module lies.

Only a view's own modules get them. What all layers are given alike (positions' cosines and sines, masks) is brought to each
device once a pass.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from pdq_tui.engine.layout import Layout


class Seams:
    """The hooks of one view; ``layout`` names its modules. Nothing where all lie on one device."""

    def __init__(self, view: nn.Module, layout: Layout) -> None:
        #: By a tensor's id and a device: the tensor, which keeps the id its own, and its copy there.
        self._moved: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        if not layout.several:
            return
        _own_hooks(view)
        view.register_forward_pre_hook(lambda *_: self._moved.clear())
        view.register_forward_hook(
            lambda *_: self._moved.clear(), always_call=True
        )  # a pass that raises lets go of them too
        for name, device in layout.units.items():
            module = view.get_submodule(name)
            _own_hooks(module)
            module.register_forward_pre_hook(self._mover(device), with_kwargs=True)

    def _mover(self, device: torch.device) -> Any:
        def move(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            # The hidden state comes first and is another one at every layer.
            hidden = tuple(
                a.to(device) if isinstance(a, Tensor) else self._there(a, device) for a in args[:1]
            )
            rest = tuple(self._there(a, device) for a in args[1:])
            return (*hidden, *rest), {name: self._there(a, device) for name, a in kwargs.items()}

        return move

    def _there(self, given: Any, device: torch.device) -> Any:
        if isinstance(given, Tensor):
            if given.device == device:
                return given
            found = self._moved.get((id(given), device))
            if found is None:
                found = self._moved[id(given), device] = given, given.to(device)
            return found[1]
        if type(given) in (tuple, list):
            return type(given)(self._there(each, device) for each in given)
        if type(given) is dict:
            return {key: self._there(each, device) for key, each in given.items()}
        return given


def _own_hooks(module: nn.Module) -> None:
    """A view's shells share the model's dicts of hooks until here."""
    for name in (
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
    ):
        vars(module)[name] = OrderedDict(vars(module)[name])
